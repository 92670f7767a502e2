"""Where somebody spoiled what a recovery needs and no syncer is left that knew it: the syncers are gone, an operator heals."""

import asyncio
import random
from typing import TYPE_CHECKING

from isthmus.errors import IsthmusError, first_cause
from isthmus.log import Log, heal
from isthmus.syncer import Syncer

if TYPE_CHECKING:
    from simulation.cluster import Cluster, Seat

GONE = "every syncer at once"

LOOKS, LOOK_S = 3, 8.0
"""How often an operator looks after each syncer, and how long one that was stopped needs to be back."""


class Operator:
    """Who runs `isthmus heal --apply` until every fragment can be folded again, whoever serves meanwhile."""

    def __init__(self, cluster: "Cluster") -> None:
        self._cluster = cluster
        self._draw = random.Random(f"operator/{cluster.scenario.seed}")
        self.due = False
        """Whether a fragment may be beyond folding, and nobody has healed it yet."""

    def strike(self) -> None:
        """Kill every syncer while the spoiler is still at it: what they knew is what the store has, or lost."""
        cluster = self._cluster
        for seat in cluster.seats:
            for life in list(seat.processes) if seat.is_syncer else ():
                cluster.kill(seat, life)
        self.due = True
        cluster.faults[GONE] += 1
        cluster.say("world", f"fault: {GONE}")

    async def run(self) -> None:
        """Where all syncers are gone, heal until nothing is left to do; else let who still knows a state store it."""
        await asyncio.sleep(self._draw.uniform(0.0, 8.0))
        if not self.due:
            await self._relieve()
            if not self._lost():
                return
        cluster = self._cluster
        process = cluster.world.process("operator")
        ports = cluster.world.ports(process)

        async def body() -> None:
            log = Log(cluster.run, ports.store, process.runtime)
            left = [True]
            while any(left):
                left = [await self._mend(log, found) for found in await heal.diagnose(log)]

        task = process.start(body())
        await asyncio.wait([task])
        self.due = False
        failure = task.exception()
        if failure is not None:
            error = first_cause(failure)
            cluster.checker.violate(f"heal ended by {error!r}", None if isinstance(error, IsthmusError) else error)

    async def _relieve(self) -> None:
        """Stop in order each syncer that serves what another cannot fold: it leaves a snapshot, as `heal` says."""
        seats = [seat for seat in self._cluster.seats if seat.is_syncer]
        for _ in range(LOOKS):
            for other in seats:
                lacking = set().union(*(self._broken(seat) for seat in seats if seat is not other))
                if other.stops and lacking - self._broken(other):
                    self._cluster.faults["stopped for its snapshot"] += 1
                    other.stop(max(other.stops))
                    await asyncio.sleep(LOOK_S)
            await asyncio.sleep(1.0)

    def _lost(self) -> set[int]:
        """Return the fragments that no syncer can fold: the one that kept them is gone, and the others did not know."""
        seats = [seat for seat in self._cluster.seats if seat.is_syncer]
        return set.intersection(*(self._broken(seat) for seat in seats))

    def _broken(self, seat: "Seat") -> set[int]:
        """Return the fragments that a syncer cannot fold."""
        if seat.unfoldable and not seat.agents:
            return {f.index for f in self._cluster.run.layout.fragments}
        return {
            k.fragment.index
            for agent in seat.agents
            if isinstance(agent, Syncer)
            for k in agent.coordinators
            if k.broken
        }

    async def _mend(self, log: Log, found: heal.Diagnosis) -> bool:
        """Heal one fragment if it needs it; return whether it is to be looked at again."""
        if found.hopeless:
            self._cluster.checker.violate(f"fragment {found.fragment} cannot be healed: {found.hopeless}")
        elif found.wound is not None and await heal.heal(log, found) is not None:
            self._cluster.faults["fragments healed"] += 1
        return found.wound is not None

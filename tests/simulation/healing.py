"""An operator heals fragments that no syncer can fold, after a learner has spoiled merged updates."""

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
"""How often an operator looks at each syncer, and how long a syncer that was stopped needs to come back."""


class Operator:
    """Runs `isthmus heal --apply` until every fragment can be folded again, whether syncers serve meanwhile or not."""

    def __init__(self, cluster: "Cluster") -> None:
        self._cluster = cluster
        self._draw = random.Random(f"operator/{cluster.scenario.seed}")
        self.due = False
        """Whether a fragment may be impossible to fold, and was not healed yet."""

    def strike(self) -> None:
        """Kill every syncer while the learner still spoils objects: state that is not in the store is lost."""
        cluster = self._cluster
        for seat in cluster.seats:
            for life in list(seat.processes) if seat.is_syncer else ():
                cluster.kill(seat, life)
        self.due = True
        cluster.faults[GONE] += 1
        cluster.say("world", f"fault: {GONE}")

    async def run(self) -> None:
        """Heal until nothing is left to do. If syncers are alive, first let them store the states that they know."""
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
        """Stop each syncer that serves a fragment that another cannot fold: it leaves a snapshot, as `heal` advises."""
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
        """Return the fragments that no syncer can fold: the syncer that had their state is gone."""
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
        """Heal a fragment if needed; return whether to look at it again."""
        if found.hopeless:
            self._cluster.checker.violate(f"fragment {found.fragment} cannot be healed: {found.hopeless}")
        elif found.wound is not None and await heal.heal(log, found) is not None:
            self._cluster.faults["fragments healed"] += 1
        return found.wound is not None

"""The vigil between storm and calm: some processes fail for long, and the run is judged meanwhile.

If a syncer and a learner are well, every fragment gets a commit within `Scenario.goes_on_s` of any moment. No fragment
gets many times the commits of another. Each process that is well takes part.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isthmus.format.records.keys import updates_prefix
from isthmus.learner import LearnerAgent
from isthmus.syncer import Syncer
from isthmus.syncer.agent import FETCHES_MAX
from simulation.scenario import LEARNERS_ONLY, Ailing, Ailment, Kind

if TYPE_CHECKING:
    from simulation.cluster import Cluster, Seat

EVALUATION_S = 15.0
"""Duration of an evaluation: about a hundred steps, as if a real one took minutes."""

APART = 3
APART_MORE = 5
"""During a vigil, a fragment gets at most `APART` times the commits of another, plus `APART_MORE`."""

MEASURED_S = 8.0
"""How long a process's traffic is measured before its link is limited."""

DRIFT_S = 12.0
"""How long some fragments get no commits before that, so that their versions are behind those of others."""

FAIR = 2.0
FAIR_MORE = 3.0
"""A learner with a thin link is behind in one fragment by at most `FAIR` times the versions of another fragment, plus
`FAIR_MORE`."""

USED = 0.9
"""Overloaded syncers merge at least this share of the updates that they read."""

KEPT = 0.4
"""At least this share of the learners' tokens is merged under overload, if the period may grow without a limit."""

SLOW_S = 10.0
"""The last fetches of an overload may take this long after its end."""

ALIKE = 2.0
ALIKE_MORE = 2
"""Under overload, a fragment gets at most `ALIKE` times the commits of another, plus `ALIKE_MORE`. The same holds for
the rounds that a learner is in."""

THIN_SHARE = 0.05
"""A learner with a thin uplink is in at least this share of the rounds."""

THIN_BEHIND = 3.0
"""A learner with a thin uplink is on average at most this many versions behind, since its downlink is not limited."""


@dataclass(frozen=True)
class Case:
    """An ailment and the process that has it. `of`: the only syncer that it affects, if there is one."""

    ailment: Ailment
    seat: "Seat"
    of: "Seat | None"

    def __str__(self) -> str:
        return f"{self.seat.name} {self.ailment}" + (f" ({self.of.name})" if self.of else "")


class Vigil:
    """The vigil of one cluster."""

    def __init__(self, cluster: "Cluster") -> None:
        self._cluster = cluster
        self.cases: list[Case] = []
        syncers = [seat for seat in cluster.seats if seat.is_syncer]
        learners = [seat for seat in cluster.seats if not seat.is_syncer]
        alone = {Ailment.UNREADABLE_TO_ONE, Ailment.ENDLESS_TO_ONE}
        for ailing in cluster.scenario.ailments:
            if ailing.ailment in alone and self.cases:
                continue  # another syncer must be well to merge that learner's updates
            self._draw(ailing, syncers, learners)
            if ailing.ailment in alone:
                break
        self.well = [seat for seat in cluster.seats if all(case.seat is not seat for case in self.cases)]

    def _draw(self, ailing: Ailing, syncers: "list[Seat]", learners: "list[Seat]") -> None:
        of_learner = ailing.ailment in LEARNERS_ONLY or not ailing.of_syncer
        among = [seat for seat in (learners if of_learner else syncers) if all(c.seat is not seat for c in self.cases)]
        if len(among) < 2:
            return  # one syncer and one learner stay well
        to_one = ailing.ailment in (Ailment.UNREADABLE_TO_ONE, Ailment.ENDLESS_TO_ONE)
        at = int(ailing.draw * len(among))
        of = syncers[int(ailing.draw * 1000) % len(syncers)] if to_one else None
        self.cases.append(Case(ailing.ailment, among[at], of))

    # --- ailments -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin the ailments of objects at the start of the run: an update that was merged must stay readable."""
        for case in self.cases:
            self._afflict_objects(case)

    def _afflict_objects(self, case: Case) -> None:
        prefixes = frozenset(updates_prefix(f.index, case.seat.name) for f in self._cluster.run.layout.fragments)
        for seat in self._cluster.seats:
            if not seat.is_syncer or case.of not in (None, seat):
                continue
            match case.ailment:
                case Ailment.UNREADABLE | Ailment.UNREADABLE_TO_ONE:
                    seat.store.unreadable |= prefixes
                case Ailment.ENDLESS | Ailment.ENDLESS_TO_ONE:
                    seat.store.endless |= prefixes
                case _:
                    pass

    def _afflict(self, case: Case) -> None:
        self._cluster.say(case.seat.name, str(case.ailment))
        self._cluster.faults[f"vigil: {case.ailment}"] += 1
        seat = case.seat
        match case.ailment:
            case Ailment.STORE_LOST:
                seat.store.cut_off = True
            case Ailment.BUS_LOST:
                seat.bus.cut_off = True
            case Ailment.HEARS_NOTHING:
                seat.bus.cut_reads = True
            case Ailment.SAYS_NOTHING:
                seat.bus.cut_writes = True
            case Ailment.DENIED:
                seat.store.denies_reads = seat.store.denies_writes = True
            case Ailment.WRITES_DENIED:
                seat.store.denies_writes = True
            case Ailment.STORE_SILENT:
                seat.store.silent = True
            case Ailment.DEAF:
                seat.bus.deaf = True
            case Ailment.EVALUATES:
                seat.evaluate_s = EVALUATION_S
            case _:
                self._afflict_objects(case)

    # --- the watch ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Begin the ailments, and watch the run."""
        cluster = self._cluster
        if cluster.scenario.kind is Kind.THIN:
            await self._thin()
            return
        if cluster.scenario.kind is Kind.OVERLOAD:
            await self._overload()
            return
        for case in self.cases:
            self._afflict(case)
        if cluster.scenario.hostile:
            cluster.faults[f"vigil: somebody {cluster.scenario.hostile}"] += 1
            cluster.choir.hostile.begin()
        began, clock = cluster.world.clock.time(), cluster.world.clock
        first = cluster.checker.heads()
        heads, moved = dict(first), dict.fromkeys(first, began)
        while clock.time() < began + cluster.scenario.vigil_s:
            await asyncio.sleep(0.5)
            cluster.checker.look(cluster.seats)
            for p, head in cluster.checker.heads().items():
                if p in cluster.checker.lies:
                    continue  # no commit may follow a lie
                if head > heads[p]:
                    heads[p], moved[p] = head, clock.time()
                elif clock.time() - moved[p] > cluster.scenario.goes_on_s:
                    moved[p] = float("inf")  # report it only once
                    cluster.checker.violate(
                        f"fragment {p} stands at {head} for {cluster.scenario.goes_on_s:.1f} s while {self}"
                    )
        if cluster.scenario.bereft:
            cluster.operator.strike()
        if cluster.scenario.hostile:
            cluster.choir.hostile.end()
        gained = {p: head - first[p] for p, head in heads.items() if p not in cluster.checker.lies}
        apart = max(gained.values()) > APART * min(gained.values()) + APART_MORE
        if apart and not cluster.scenario.needs_a_forger:
            cluster.checker.violate(f"fragments got {list(gained.values())} commits while {self}")
        self._takes_part(first)

    def __str__(self) -> str:
        ill = [str(case) for case in self.cases]
        if self._cluster.scenario.hostile:
            ill.append(f"somebody {self._cluster.scenario.hostile}")
        return f"{' and '.join(ill) or 'nobody is ill'}; well are {', '.join(seat.name for seat in self.well)}"

    def _takes_part(self, first: dict[int, int]) -> None:
        """Check that each learner that was always well is in some round of each fragment that had several.

        Without grace and late work, a configuration may merge only the quickest learners, so this is not checked.
        """
        pace = self._cluster.run.pace
        if pace.grace == 0.0 and pace.staleness == 0:
            return
        for p, commits in enumerate(self._cluster.checker.commits):
            inputs = [{given.learner for given in header.inputs} for header, _ in commits[first[p] :]]
            if len(inputs) < 6 or self._cluster.scenario.hostile:
                continue
            for seat in self.well:
                if not seat.is_syncer and not any(seat.name in among for among in inputs):
                    self._cluster.checker.violate(
                        f"{seat.name} is well, and in none of {len(inputs)} rounds of fragment {p} while {self}"
                    )

    # --- thin links ---------------------------------------------------------------------------------------------------

    async def drift(self) -> None:
        """Throttle the logs of some fragments in the store, so that these fragments fall behind."""
        await asyncio.sleep(4.0)
        slow = frozenset(f"commits/{p:05d}/" for p in range(len(self._cluster.run.layout.fragments)) if p % 3 == 1)
        for seat in self._cluster.seats:
            seat.store.throttled |= slow
        await asyncio.sleep(DRIFT_S)
        for seat in self._cluster.seats:
            seat.store.throttled -= slow

    async def _thin(self) -> None:
        cluster = self._cluster
        assert cluster.scenario.thin is not None
        direction, share = cluster.scenario.thin
        seat = next(seat for seat in cluster.seats if not seat.is_syncer)
        assert seat.ports is not None
        wire = seat.ports.wire
        before = wire.bytes_up, wire.bytes_down
        await asyncio.sleep(MEASURED_S)
        needs = (wire.bytes_up - before[0]) / MEASURED_S, (wire.bytes_down - before[1]) / MEASURED_S
        if direction == "up":
            seat.store.up_bytes_s = share * needs[0]
        else:
            seat.store.down_bytes_s = share * needs[1]
        cluster.faults[f"vigil: thin link {direction}"] += 1
        cluster.say(seat.name, f"its link {direction} carries {share:.2f} of what it needs")
        await asyncio.sleep(cluster.scenario.vigil_s / 3)
        start = cluster.checker.heads()
        (agent,) = seat.agents
        behind = [0.0] * len(start)
        looks = int(cluster.scenario.vigil_s * 2 / 3)
        for _ in range(looks):
            await asyncio.sleep(1.0)
            cluster.checker.look(cluster.seats)
            if isinstance(agent, LearnerAgent) and agent.boundary is not None:
                for p, head in cluster.checker.heads().items():
                    behind[p] += (head - agent.boundary.slots[p].base) / looks
        self._judge_thin(seat.name, direction, share, behind, start)
        seat.store.up_bytes_s = seat.store.down_bytes_s = float("inf")

    # --- overload -----------------------------------------------------------------------------------------------------

    async def _overload(self) -> None:
        cluster = self._cluster
        seats = [seat for seat in cluster.seats if seat.is_syncer and seat.ports is not None]
        wires = [seat.ports.wire for seat in seats if seat.ports is not None]
        before = [(wire.bytes_down, wire.read_bytes["updates"]) for wire in wires]
        await asyncio.sleep(MEASURED_S)
        for seat, wire, (read, of_updates) in zip(seats, wires, before, strict=True):
            needs = (wire.read_bytes["updates"] - of_updates) / MEASURED_S
            # In these small runs commits are as large as updates, so their traffic is counted apart.
            besides = (wire.bytes_down - read) / MEASURED_S - needs
            seat.store.down_bytes_s = besides + needs / cluster.scenario.overload
        said = f"syncers that are asked for {cluster.scenario.overload:g} times what their links carry"
        cluster.faults["vigil: overload"] += 1
        cluster.say("world", said)
        await asyncio.sleep(cluster.scenario.vigil_s / 3)
        start, read_before = cluster.checker.heads(), sum(wire.reads["updates"] for wire in wires)
        trained_before = self._trained()
        for _ in range(int(cluster.scenario.vigil_s * 2 / 3)):
            await asyncio.sleep(1.0)
            cluster.checker.look(cluster.seats)
        rounds = [header for p, commits in enumerate(cluster.checker.commits) for header, _ in commits[start[p] :]]
        made = Counter(header.fragment for header in rounds)
        given = Counter(learner for header in rounds for learner in {i.learner for i in header.inputs})
        read = sum(wire.reads["updates"] for wire in wires) - read_before
        merged = sum(len(header.inputs) for header in rounds)
        tokens = sum(given.tokens for header in rounds for given in header.inputs)
        kept = tokens / max(1, (self._trained() - trained_before) * len(start))
        learners = [seat.name for seat in cluster.seats if not seat.is_syncer]
        for held in self._held():  # links differ between syncers, so each syncer is judged by its own fragments
            self._alike(f"{said} made commits", {p: made[p] for p in held})
        self._alike(f"{said} merged updates", {name: given[name] for name in learners})
        if merged + FETCHES_MAX < USED * read:
            cluster.checker.violate(f"{said} read {read} updates, and merged {merged}")
        if kept < KEPT and not cluster.scenario.rules.sync_every_max:
            cluster.checker.violate(f"{said} merged {kept:.0%} of the tokens")
        cluster.say(
            "world", f"{said}: {len(rounds)} commits, {read} updates read, {merged} merged, {kept:.0%} of tokens"
        )
        for seat in seats:
            seat.store.down_bytes_s = float("inf")
            # Fetches under way stay slow to their end, and until then rounds wait for slow fetches.
            cluster.checker.disturb(seat.name, "store", SLOW_S)

    def _held(self) -> list[set[int]]:
        """Return the fragments that each syncer holds."""
        agents = [agent for seat in self._cluster.seats for agent in seat.agents if isinstance(agent, Syncer)]
        return [set(agent.held) for agent in agents]

    def _trained(self) -> int:
        """Return the tokens that all learners alive have trained."""
        agents = [agent for seat in self._cluster.seats for agent in seat.agents if isinstance(agent, LearnerAgent)]
        return sum(agent.boundary.tokens_seen for agent in agents if agent.boundary is not None)

    def _alike(self, what: str, counts: dict[Any, int]) -> None:
        if counts and max(counts.values()) > ALIKE * min(counts.values()) + ALIKE_MORE:
            self._cluster.checker.violate(f"{what} unevenly: {counts}")

    def _judge_thin(self, name: str, direction: str, share: float, behind: list[float], start: dict[int, int]) -> None:
        checker = self._cluster.checker
        said = f"{name}, whose link {direction} carries {share:.2f} of what it needs,"
        versions = f"is {', '.join(f'{b:.1f}' for b in behind)} versions behind"
        merged, rounds = self._merged(name, start)
        self._cluster.say(name, f"{versions}, and in {merged} of {rounds} rounds")
        if direction == "down" and max(behind) > FAIR * min(behind) + FAIR_MORE:
            checker.violate(f"{said} {versions}: not fair among fragments")
        if direction == "up" and max(behind) > THIN_BEHIND:
            checker.violate(f"{said} {versions}, though nothing is in the way down")
        if direction == "up" and merged < THIN_SHARE * rounds:
            checker.violate(f"{said} is in {merged} of {rounds} rounds")

    def _merged(self, name: str, start: dict[int, int]) -> tuple[int, int]:
        """Return in how many rounds since `start` a learner is, and the number of these rounds."""
        rounds = [header for p, c in enumerate(self._cluster.checker.commits) for header, _ in c[start[p] :]]
        return sum(any(given.learner == name for given in header.inputs) for header in rounds), len(rounds)

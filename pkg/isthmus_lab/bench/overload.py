"""A syncer with more demand than it can serve, in virtual time: what it reads and merges, and how old versions get.

Learners train on a simulated clock, so no figure depends on the machine. Each repeat is a world with other latencies.
"""

import asyncio
import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from typing_extensions import override

from isthmus.codecs import codec, packed_size
from isthmus.format.layout import Layout, Spec, TensorClass
from isthmus.format.records.objects import CommitHeader
from isthmus.format.rules import Pace, Rules
from isthmus.learner import LearnerAgent
from isthmus.learner.boundary import Replica
from isthmus.learner.checkpoint import Saver
from isthmus.log import Log
from isthmus.log.creation import Seed
from isthmus.syncer import Syncer
from isthmus.syncer.agent import FETCHES_MAX
from isthmus_lab.bench.measure import Row, Say, row
from isthmus_lab.simulate.conditions import Conditions
from isthmus_lab.simulate.world import Arrays, Times, Trainee, World, learn, serve

LOADS = (0.5, 1.0, 2.0, 3.0, 5.0)
"""Demand, as multiples of what the syncer can serve."""

LEARNERS, MANY, MANY_LOAD = 12, (40, 100), 3.0
FRAGMENTS, SYNC_EVERY, SIZE, STEP_S = 12, 12, 2048, 0.5
HEADER_BYTES = 400
"""Approximate size of an update's header on the wire."""

PERIOD_S = SYNC_EVERY * STEP_S
SETTLING, MEASURED = 4.0, 10.0
"""How long each load lasts before and during the measurement, in rounds of every fragment. Such a round takes
`PERIOD_S`, or `PERIOD_S` times the load if that is longer."""

NEAR_S = 0.01
USED, SERVED, OLDEST, KEPT, SPREAD = 0.95, 0.9, 3.0, 0.85, 0.3
"""The aims, and the spread of the latencies. `KEPT` is an aim only where the link is the limit: if each answer of the
store takes steps, the latency alone costs more tokens, whatever the rule."""

Limited = str
"""What limits a syncer: "link", the bandwidth of its downlink, or "store", the time that each answer takes."""


@dataclass(frozen=True)
class Seen:
    """The figures of one load."""

    used: float
    """Updates merged, as a share of those read."""
    served: float
    """Updates merged, as a share of those that could be: those sent, or those that can be read if they are fewer."""
    oldest: float
    """The longest time between two commits of a fragment, in multiples of the mean time."""
    present: float
    """Learners in a round, as a share of those expected."""
    period: float
    """Mean time between two commits of a fragment, in H steps."""
    kept: float
    """Tokens merged, as a share of those trained."""


def rows(repeats: int, say: Say) -> Iterator[Row]:
    """Yield the figures of each load."""
    cases = [(limited, load, LEARNERS) for limited in ("link", "store") for load in LOADS]
    cases += [("link", MANY_LOAD, learners) for learners in MANY]
    for done, (limited, load, learners) in enumerate(cases):
        seen = []
        for number in range(repeats):
            seen.append(measured(limited, load, learners, number))
            say((done + (number + 1) / repeats) / len(cases))
        case, size = f"{load:g} times what its {limited} serves", f"{learners} learners"
        yield row("overload", f"{case}: merged of read", size, [s.used for s in seen], "", aim=USED)
        yield row("overload", f"{case}: served", size, [s.served for s in seen], "of capacity", aim=SERVED)
        yield row("overload", f"{case}: oldest", size, [s.oldest for s in seen], "mean ages", aim=OLDEST, at_most=True)
        yield row("overload", f"{case}: present", size, [s.present for s in seen], "of expected")
        yield row("overload", f"{case}: period", size, [s.period for s in seen], "H steps")
        aim = KEPT if limited == "link" else None
        yield row("overload", f"{case}: kept", size, [s.kept for s in seen], "of tokens", aim=aim)


def measured(limited: Limited, load: float, learners: int, number: int = 0) -> Seen:
    """Return the figures of one load."""
    world = World(f"overload/{limited}/{load}/{learners}/{number}")
    logging.disable(logging.WARNING)  # hides the warnings of simulated processes
    try:
        seen: Seen = world.clock.run_until_complete(_measured(world, limited, load, learners))
        return seen
    finally:
        logging.disable(logging.NOTSET)
        world.clock.close()


async def _measured(world: World, limited: Limited, load: float, learners: int) -> Seen:
    specs = [Spec(f"t{p}", (SIZE,), "float32", TensorClass.DENSE) for p in range(FRAGMENTS)]
    rules = Rules(fragments=FRAGMENTS, sync_every=SYNC_EVERY)
    run = await world.create(Seed(specs, [np.ones(SIZE, np.float32) for _ in specs], {}, rules, Pace()))
    demand = learners * FRAGMENTS / PERIOD_S
    capacity = demand / load
    size = packed_size(codec(rules.codec_up), run.layout.fragments[0]) + HEADER_BYTES
    if limited == "link":
        way = Conditions(NEAR_S, SPREAD, down_bytes_s=capacity * size)
    else:
        way = Conditions(FETCHES_MAX / capacity / 2.0, SPREAD)
    syncers: list[Syncer] = []
    agents: list[LearnerAgent] = []
    ports = world.ports(world.process("s"), way, Conditions(NEAR_S))
    reads = ports.wire.reads
    stopping = asyncio.Event()
    running = [ports.process.start(serve(ports, "s", stopping, None, syncers.append))]
    for i in range(learners):
        theirs = world.ports(world.process(f"l{i}"), Conditions(NEAR_S, SPREAD), Conditions(NEAR_S))
        life = learn(theirs, f"l{i}", _Trainee(i), Times(), started=agents.append, stopping=stopping.is_set)
        running.append(theirs.process.start(life))
    round_s = PERIOD_S * max(1.0, load)
    await asyncio.sleep(SETTLING * round_s)
    (syncer,) = syncers
    first, before, trained = (
        [coordinator.head for coordinator in syncer.coordinators],
        reads["updates"],
        _trained(agents),
    )
    await asyncio.sleep(MEASURED * round_s)
    read, trained = reads["updates"] - before, _trained(agents) - trained
    judge = world.ports(world.process("judge"))
    log = Log(run, judge.store, judge.process.runtime)
    commits = [[c.header async for c in log.commits(p, 0)][head:] for p, head in enumerate(first)]
    stopping.set()
    await asyncio.gather(*running)
    return _seen(commits, read, trained, demand, capacity, MEASURED * round_s)


def _trained(agents: Sequence[LearnerAgent]) -> int:
    return sum(agent.boundary.tokens_seen for agent in agents if agent.boundary is not None)


def _seen(
    commits: Sequence[Sequence[CommitHeader]], read: int, trained: int, demand: float, capacity: float, seconds: float
) -> Seen:
    """Return the figures of a load from its commits, its updates read and its tokens trained in these seconds.

    `demand`: updates a second that learners send if the period is H; `capacity`: updates a second that can be read.
    """
    every = [header for headers in commits for header in headers]
    sent = demand * SYNC_EVERY / (sum(header.period for header in every) / max(1, len(every)))
    merged = sum(len(header.inputs) for header in every)
    ages = [b.written_at - a.written_at for headers in commits for a, b in pairwise(headers)]
    mean = sum(ages) / max(1, len(ages))
    return Seen(
        used=merged / max(1, read),
        served=merged / (min(sent, capacity) * seconds),
        oldest=max(ages, default=0.0) / mean if mean else 0.0,
        present=merged / max(1, sum(len(header.waited.expected) for header in every)),
        period=mean / PERIOD_S,
        kept=sum(given.tokens for header in every for given in header.inputs) / max(1, trained * FRAGMENTS),
    )


class _Trainee(Trainee):
    """A model of plain arrays, and steps of about half a second."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    @override
    def begin(self, agent: LearnerAgent, layout: Layout) -> tuple[Replica, Saver | None]:
        self._model = Arrays(layout)
        return self._model, None

    @override
    def duration(self) -> float:
        return STEP_S * self._draw.uniform(0.8, 1.2)

    @override
    def step(self, number: int) -> tuple[int, float]:
        for values in self._model.values:
            np.multiply(values, np.float32(0.95), out=values)
            np.add(values, np.float32(self._draw.gauss(0.0, 0.01)), out=values)
        return 100, 1.0

    @override
    def enough(self, agent: LearnerAgent) -> bool:
        return False

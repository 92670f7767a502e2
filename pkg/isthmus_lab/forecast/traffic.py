"""Traffic of a run besides its payload, measured with the real syncer and learners over a simulated store and bus.

Headers, commits, snapshots, messages and requests do not depend on the size of the model. So a small model runs for a
few periods in virtual time, and all its traffic is counted.
"""

import asyncio
import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from typing_extensions import override

from isthmus.codecs import codec, packed_size
from isthmus.format.layout import Layout, Spec, TensorClass, partition
from isthmus.format.records.messages import SYNCER_STREAM, learner_stream
from isthmus.format.rules import Pace, Rules
from isthmus.learner import LearnerAgent
from isthmus.learner.boundary import Replica
from isthmus.learner.checkpoint import Saver
from isthmus.log.creation import Seed
from isthmus.runtime.metrics import Metrics
from isthmus.syncer import Syncer
from isthmus_lab.forecast.bandwidth import OnTheWire, Setup
from isthmus_lab.simulate.conditions import Conditions
from isthmus_lab.simulate.world import Arrays, Times, Trainee, World, learn, serve

ELEMENTS = 256
"""Parameters of each fragment: few, so that a period is quick to compute."""

LATENCY_S = 0.02

LEARNERS_MAX = 16
"""Most learners to measure with: beyond, a learner's traffic per round hardly changes, and measuring takes long."""

OPERATIONS = ("get", "put", "create", "list", "delete")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Traffic of one process per fragment round, without the payload of fragments."""

    requests: dict[str, float]
    """Requests to the store, by operation."""
    up_bytes: float
    """Bytes of object headers and messages that the process sends. A syncer's include snapshots of the small model."""
    down_bytes: float
    """Bytes of object headers and messages that the process receives."""
    messages: float
    """Messages that the process publishes on the bus."""


@dataclass(frozen=True, kw_only=True)
class MessageCosts:
    """Traffic of one learner, and of the syncer."""

    learner: Cost
    syncer: Cost


@functools.cache
def bits(name: str, params: float, fragments: int) -> float:
    """Return a codec's bits per parameter for a model of this size, scales and padding included."""
    rows = max(1, math.ceil(params / fragments / 1024))
    layout = partition([Spec("weight", (rows, 1024), "float32", TensorClass.DENSE)], 1)
    return 8.0 * packed_size(codec(name), layout.fragments[0]) / layout.size


@dataclass
class _Seen:
    """Counters at one moment."""

    operations: Counter[str] = field(default_factory=Counter)
    up: int = 0
    down: int = 0


class _Still(Trainee):
    """A trainee that trains nothing, in steps of constant duration."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    @override
    def begin(self, agent: LearnerAgent, layout: Layout) -> tuple[Replica, Saver | None]:
        return Arrays(layout), None

    @override
    def duration(self) -> float:
        return self._step_s

    @override
    def step(self, number: int) -> tuple[int, float]:
        return 1, 0.0

    @override
    def enough(self, agent: LearnerAgent) -> bool:
        return False


def measure(rules: Rules, pace: Pace, learners: int, step_s: float = 1.0) -> MessageCosts:
    """Run two periods to warm up and two more; return the traffic per fragment round in the last two."""
    world = World("traffic")
    try:
        found: MessageCosts = world.clock.run_until_complete(_run(world, rules, pace, learners, step_s))
    finally:
        world.clock.close()
    return found


def own_codec(link: Setup, up: str, down: str, cost: Cost) -> OnTheWire:
    """Return the cost of this library's codecs on a link: bits of payload; bytes of headers, commits and messages."""
    return OnTheWire(
        name=f"isthmus {up} up, {down} down",
        up_bits=bits(up, link.params, link.fragments),
        down_bits=bits(down, link.params, link.fragments),
        up_bytes=cost.up_bytes,
        down_bytes=cost.down_bytes,
    )


async def _run(world: World, rules: Rules, pace: Pace, learners: int, step_s: float) -> MessageCosts:
    p = rules.fragments
    specs = [Spec(f"w{i}", (ELEMENTS,), "float32", TensorClass.DENSE) for i in range(p)]
    values = [np.zeros(ELEMENTS, np.float32) for _ in specs]
    run = await world.create(Seed(specs, values, {}, rules, pace))
    stopping = asyncio.Event()
    ended = False
    syncers: list[Syncer] = []
    agents: list[LearnerAgent] = []
    said: Counter[str] = Counter()
    sizes: Counter[str] = Counter()

    def appended(stream: str, body: bytes) -> None:
        said[stream] += 1
        sizes[stream] += len(body)

    world.streams.appended.append(appended)
    wire = Conditions(LATENCY_S, 0.0)
    processes = [world.process(name) for name in ("syncer", *(f"l{m}" for m in range(learners)))]
    ports = [world.ports(process, wire, wire) for process in processes]
    tasks = [processes[0].start(serve(ports[0], "syncer", stopping, None, syncers.append))]
    for m in range(learners):
        body = learn(
            ports[m + 1], f"l{m}", _Still(step_s), Times(), started=agents.append, stopping=lambda: ended,
            checkpoint_s=math.inf,
        )  # fmt: skip
        tasks.append(processes[m + 1].start(body))
    period = rules.sync_every * step_s
    await asyncio.sleep(2.0 * period)
    first, before = [_look(a.metrics) for a in (syncers[0], agents[0])], (Counter(said), Counter(sizes))
    begun = sum(k.head for k in syncers[0].coordinators)
    await asyncio.sleep(2.0 * period)
    last, after = [_look(a.metrics) for a in (syncers[0], agents[0])], (Counter(said), Counter(sizes))
    rounds = sum(k.head for k in syncers[0].coordinators) - begun
    ended = True
    stopping.set()
    await asyncio.gather(*tasks)
    up, down = (packed_size(codec(name), run.layout.fragments[0]) for name in (rules.codec_up, rules.codec_down))
    count, size = after[0] - before[0], after[1] - before[1]
    # A learner receives the syncers' messages; a syncer receives the messages of all processes.
    syncer = _cost(first[0], last[0], rounds, SYNCER_STREAM, list(size), count, size)
    learner = _cost(first[1], last[1], rounds, learner_stream("l0"), [SYNCER_STREAM], count, size)
    return MessageCosts(
        syncer=replace(syncer, up_bytes=syncer.up_bytes - down, down_bytes=syncer.down_bytes - learners * up),
        learner=replace(learner, up_bytes=learner.up_bytes - up, down_bytes=learner.down_bytes - down),
    )


def _cost(
    first: _Seen, last: _Seen, rounds: int, own: str, heard: Sequence[str], count: Counter[str], size: Counter[str]
) -> Cost:
    requests = last.operations - first.operations
    return Cost(
        requests={name: requests[name] / rounds for name in OPERATIONS if requests[name]},
        up_bytes=(last.up - first.up + size[own]) / rounds,
        down_bytes=(last.down - first.down + sum(size[s] for s in heard)) / rounds,
        messages=count[own] / rounds,
    )


def _look(metrics: Metrics) -> _Seen:
    def value(name: str, **labels: str) -> float:
        return metrics.registry.get_sample_value(f"isthmus_{name}", labels) or 0.0

    seen = _Seen()
    for operation in OPERATIONS:
        seen.operations[operation] = int(value("store_request_seconds_count", operation=operation))
    seen.up = int(value("store_bytes_total", direction="up"))
    seen.down = int(value("store_bytes_total", direction="down"))
    return seen

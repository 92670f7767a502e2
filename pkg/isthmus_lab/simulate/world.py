"""A simulated world: one store, one bus, one clock, and processes that run the library's syncer and learner in it."""

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from typing_extensions import override

from isthmus.bus.store import StoreBus
from isthmus.codecs.kernels import F32
from isthmus.format.layout import Layout
from isthmus.format.rules import Pace
from isthmus.format.signing import Signer
from isthmus.learner import LearnerAgent
from isthmus.learner.boundary import Boundary, Replica
from isthmus.learner.checkpoint import Saver
from isthmus.log import Log
from isthmus.log.creation import Seed, create_run
from isthmus.log.run import Run, read_run
from isthmus.store import BESIDE, EdgeStore, Regions, Store
from isthmus.syncer import Syncer
from isthmus_lab.simulate.bus import SimulatedBus, Streams
from isthmus_lab.simulate.clock import Clock
from isthmus_lab.simulate.conditions import Conditions
from isthmus_lab.simulate.process import Process
from isthmus_lab.simulate.store import Objects, SimulatedStore


class Trainee(Protocol):
    """What a simulated learner trains, in place of a training loop."""

    def begin(self, agent: LearnerAgent, layout: Layout) -> tuple[Replica, Saver | None]:
        """Return the model, whose fragments the agent writes next, and the `Saver` of further state, if any."""
        ...

    def duration(self) -> float:
        """Return how long the next step takes, in virtual seconds."""
        ...

    def step(self, number: int) -> tuple[int, float]:
        """Train step `number` of the learner, counted from 0; return the step's tokens and loss."""
        ...

    def enough(self, agent: LearnerAgent) -> bool:
        """Return whether this learner has trained as much as it is asked to."""
        ...


@dataclass(slots=True)
class SimulatedPorts:
    """One process's connections to the store and the bus."""

    process: Process
    store: EdgeStore
    bus: SimulatedBus | StoreBus
    wire: SimulatedStore


@dataclass(slots=True)
class Times:
    """How a learner spent its time, in virtual seconds, and its steps."""

    trained_s: float = 0.0
    waited_s: float = 0.0
    steps: int = 0


@dataclass
class World:
    """The clock, the store and the bus that all simulated processes share."""

    seed: str
    clock: Clock = field(init=False)
    objects: Objects = field(default_factory=Objects)
    streams: Streams = field(default_factory=Streams)
    buckets: dict[str, Objects] = field(default_factory=dict)
    """Objects in the buckets beside the run's own, by URL."""
    ways: dict[str, Conditions] = field(default_factory=dict)
    """What the requests of every process to such a bucket meet, by URL."""

    def __post_init__(self) -> None:
        self.clock = Clock(hash_of(self.seed))

    def process(self, name: str, life: int = 0, **options: Any) -> Process:
        """Make a process. Its randomness depends on the world's seed, its name and the number of its life."""
        return Process(self.clock, name, f"{self.seed}/{name}/{life}", **options)

    def ports(
        self,
        process: Process,
        store: Conditions | None = None,
        bus: Conditions | None = None,
        beat_s: float | None = None,
    ) -> SimulatedPorts:
        """Connect a process to the store and the bus; return its ports.

        `beat_s`: the heartbeat of a run whose bus is in its store; None: the bus is a server.
        """
        wire = SimulatedStore(self.objects, process, store or Conditions())
        runtime = process.runtime

        def beside(url: str) -> nullcontext[Store]:
            there = SimulatedStore(self.buckets[url], process, self.ways.get(url, Conditions()), url)
            return nullcontext(EdgeStore(there, runtime, BESIDE))

        edge = EdgeStore(wire, runtime, regions=Regions(beside, runtime))
        if beat_s is None:
            return SimulatedPorts(process, edge, SimulatedBus(self.streams, process, bus or Conditions()), wire)
        boxes = EdgeStore(SimulatedStore(self.objects, process, bus or Conditions()), runtime).for_bus
        return SimulatedPorts(process, edge, StoreBus(boxes, runtime, 16 * "0", beat_s), wire)

    async def create(self, seed: Seed) -> Run:
        """Create the run in the store."""
        ports = self.ports(self.process("init"))
        return await create_run(ports.store, ports.process.runtime, seed)


def hash_of(seed: str) -> int:
    """Return a number that is the same for a seed in every process."""
    return int.from_bytes(seed.encode(), "little")


async def serve(
    ports: SimulatedPorts,
    name: str,
    stopping: asyncio.Event,
    pace: Pace | None = None,
    started: Callable[[Syncer], None] = lambda _: None,
    signer: Signer | None = None,
) -> None:
    """Run a syncer until `stopping` is set."""
    run = await read_run(ports.store)
    log = Log(run, ports.store, ports.process.runtime, signer)
    syncer = Syncer(log, ports.store, ports.bus, ports.process.runtime, name, pace)
    started(syncer)
    await syncer.recover()
    await syncer.run(stopping)


async def learn(
    ports: SimulatedPorts,
    name: str,
    trainee: Trainee,
    times: Times,
    *,
    started: Callable[[LearnerAgent], None] = lambda _: None,
    attached: Callable[[Boundary], None] = lambda _: None,
    stopping: Callable[[], bool] = lambda: False,
    signer: Signer | None = None,
    **options: Any,
) -> None:
    """Run a learner until its trainee has had enough or `stopping` is true. Raises the error that ends the agent."""
    run = await read_run(ports.store)
    clock = ports.process.clock
    agent = LearnerAgent(
        Log(run, ports.store, ports.process.runtime, signer),
        ports.store,
        ports.bus,
        ports.process.runtime,
        name,
        **options,
    )
    started(agent)
    await agent.join()
    boundary = agent.attach(*_attached(trainee.begin(agent, run.layout)))
    attached(boundary)
    news = asyncio.Event()
    boundary.news = news.set
    serving = asyncio.ensure_future(agent.run())
    while not serving.done() and not stopping() and not trainee.enough(agent):
        seconds = trainee.duration()
        await asyncio.sleep(seconds)
        boundary.after_step(*trainee.step(boundary.step))
        times.trained_s += seconds
        times.steps += 1
        since = clock.time()
        while boundary.overdue() and not serving.done() and not stopping():
            news.clear()
            await asyncio.wait([serving, asyncio.ensure_future(news.wait())], return_when=asyncio.FIRST_COMPLETED)
            boundary.wait_on()
        times.waited_s += clock.time() - since
    agent.drain(done=trainee.enough(agent))
    await serving


def _attached(begun: tuple[Replica, Saver | None]) -> tuple[Replica, None, Saver | None]:
    replica, saver = begun
    return replica, None, saver


class Arrays(Replica):
    """A model of plain arrays, one per fragment."""

    def __init__(self, layout: Layout) -> None:
        self.values = [np.zeros(f.size, np.float32) for f in layout.fragments]

    @override
    def read(self, fragment: int, out: F32) -> None:
        out[:] = self.values[fragment]

    @override
    def write(self, fragment: int, values: F32) -> None:
        self.values[fragment][:] = values

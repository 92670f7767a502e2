"""Shared by tests: a model without torch, a quickly created run, and waiting for a condition instead of a time."""

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np

from isthmus.bus import Bus, default_bus, open_bus
from isthmus.codecs.kernels import F32
from isthmus.format.layout import Layout, Spec, TensorClass
from isthmus.format.records.frame import Blob
from isthmus.format.rules import Pace, Rules
from isthmus.format.signing import Signer
from isthmus.learner import LearnerAgent
from isthmus.log import Commit, Log, fold, merge
from isthmus.log.creation import Seed, create_run
from isthmus.log.holes import Holes
from isthmus.log.run import Run
from isthmus.runtime.clock import Runtime, single_threaded
from isthmus.store import RUNNING, EdgeStore, Layer, Patience, Store, open_store
from isthmus.syncer import Syncer
from isthmus.syncer.holders import Holders
from isthmus_lab.simulate import world as simulate
from isthmus_lab.simulate.conditions import Conditions

P = ParamSpec("P")
T = TypeVar("T")

SPECS = [Spec("embed", (40, 8), "float32", TensorClass.EMBEDDING)] + [
    Spec(f"layer{i}", (20 + i, 9), "float32", TensorClass.DENSE) for i in range(7)
]
QUICK = Pace(heartbeat_s=0.2, silence_s=0.8)


def seed_of(rules: Rules | None = None, pace: Pace = QUICK, specs: list[Spec] = SPECS, seed: int = 0) -> Seed:
    """Return the seed of a small run."""
    draw = np.random.default_rng(seed)
    values = [draw.normal(size=s.size).astype(np.float32) for s in specs]
    return Seed(specs, values, {}, rules or Rules(fragments=4, sync_every=4), pace, "", seed)


class NumpyReplica:
    """A model of plain arrays."""

    def __init__(self, layout: Layout) -> None:
        self.values = [np.zeros(f.size, np.float32) for f in layout.fragments]

    def read(self, fragment: int, out: F32) -> None:
        """Copy a fragment's values out."""
        out[:] = self.values[fragment]

    def write(self, fragment: int, values: F32) -> None:
        """Copy a fragment's values in."""
        self.values[fragment][:] = values


class _Deaf(Holders):
    def heard(self, *_: object, **__: object) -> None:
        """Ignore a heartbeat of another syncer."""


@dataclass
class World:
    """A run with its store, bus and runtime, on one event loop without a thread."""

    run: Run
    store: EdgeStore
    bus: Bus
    runtime: Runtime
    signer: Signer | None = None
    """The key that signs what is written here, if the run is signed."""

    @property
    def log(self) -> Log:
        """A new log for each caller, as each process has its own."""
        return Log(self.run, self.store, self.runtime, self.signer)

    def by(self, signer: Signer | None) -> "World":
        """Return the same world with another signer."""
        return replace(self, signer=signer)

    def through(self, wrap: Callable[[EdgeStore], Store], patience: Patience = RUNNING) -> "World":
        """Return the same world with a wrapped store, which may be slow, faulty or asleep."""
        return replace(self, store=EdgeStore(wrap(self.store), self.runtime, patience))

    def syncer(
        self, name: str = "s1", pace: Pace | None = None, *, deaf: bool = False, accepted: Holes | None = None
    ) -> Syncer:
        """Return a syncer that is not started. A deaf syncer hears no other syncer, so it takes all fragments."""
        fragments = len(self.run.layout.fragments)
        holders = _Deaf(name, pace or self.run.pace, fragments, self.runtime.now()) if deaf else None
        return Syncer(self.log, self.store, self.bus, self.runtime, name, pace, holders, accepted)

    def learner(self, name: str, **options: Any) -> LearnerAgent:
        """Return a learner's agent that has not joined."""
        return LearnerAgent(self.log, self.store, self.bus, self.runtime, name, **options)


class Sleepy(Layer):
    """A store whose creates below a prefix wait until `wake` is set."""

    def __init__(self, inner: Store, prefix: str, asleep: asyncio.Event, wake: asyncio.Event) -> None:
        super().__init__(inner)
        self.prefix, self.asleep, self.wake = prefix, asleep, wake

    async def create(self, key: str, data: Blob) -> bool:
        """Create an object, after `wake` is set if it is below the prefix."""
        if key.startswith(self.prefix) and not self.wake.is_set():
            self.asleep.set()
            await self.wake.wait()
        return await super().create(key, data)


_simulated: simulate.World | None = None
"""The simulated world in which `world` creates runs while a test in virtual time runs."""


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Run a coroutine on the simulator's clock, so that nothing depends on how fast or how busy the machine is.

    Meanwhile `world` creates its runs in a simulated store and bus, whatever place it is given.
    """

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        global _simulated  # noqa: PLW0603  (the clock has contexts of its own)
        _simulated = simulate.World("test")
        try:
            came: T = _simulated.clock.run_until_complete(test(*args, **kwargs))
            return came
        finally:
            _simulated.clock.close()
            _simulated = None

    return run


@asynccontextmanager
async def world(
    url: Path | str, seed: Seed | None = None, bus: str | None = None, runtime: Runtime | None = None
) -> AsyncIterator[World]:
    """Create a run in a folder, or in a bucket with the given bus, and open it."""
    seed = seed or seed_of()
    if _simulated is not None:
        way = Conditions(latency_s=0.001)
        ports = _simulated.ports(_simulated.process("test"), way, way)
        run = await create_run(ports.store, ports.process.runtime, seed)
        yield World(run, ports.store, ports.bus, ports.process.runtime, seed.signer)
        return
    runtime = runtime or single_threaded(0)
    async with open_store(str(url), runtime, make=bus is not None) as store:
        run = await create_run(store, runtime, seed)
        bus = bus or default_bus(str(url))
        assert bus is not None
        async with open_bus(bus, run.digest, None) as opened:
            yield World(run, store, opened, runtime, seed.signer)


@asynccontextmanager
async def serving(syncer: Syncer, *, killed: bool = False) -> AsyncIterator[Syncer]:
    """Run a syncer during the body; stop it at the end, in order (it then writes snapshots) or as if killed."""
    await syncer.recover()
    stopping = asyncio.Event()
    task = asyncio.ensure_future(syncer.run(stopping))
    try:
        yield syncer
    finally:
        if killed:  # do not tell it to stop: a coordinator that wakes up now would still write its snapshot
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        else:
            stopping.set()
            await asyncio.wait_for(task, 60)


async def train(
    agent: LearnerAgent,
    steps: int,
    *,
    step_s: float = 0.01,
    seed: int = 0,
    tokens: int = 100,
    enough: Callable[[], bool] = lambda: True,
    toward: Sequence[F32] | None = None,
    done: bool = True,
    wait_s: float = 0.0,
    loss: Callable[[int], float] = lambda _: 1.0,
    keep: bool = False,
) -> NumpyReplica:
    """Join, train a toy problem for this many steps and on until `enough` holds, finish the uploads, and leave.

    `toward`: the values to which each fragment is pulled; zero by default. `done`: whether the learner says that it has
    trained all its steps. `wait_s`: how long it waits for the answers to its last uploads. `loss`: that of a step.
    `keep`: whether it stores a last checkpoint, as a link does that is closed.
    """
    await agent.join()
    replica = NumpyReplica(agent.layout)
    boundary = agent.attach(replica)
    task = asyncio.ensure_future(agent.run())
    draw = np.random.default_rng(seed)
    end = time.monotonic() + 120.0
    while (boundary.step < steps or not enough()) and not task.done():
        assert time.monotonic() < end, "`enough` never held"
        for p, values in enumerate(replica.values):
            away = values if toward is None else values - toward[p]
            values -= np.float32(0.02) * away + draw.normal(scale=1e-3, size=values.size).astype(np.float32)
        boundary.after_step(tokens, loss(boundary.step))
        await asyncio.sleep(step_s)
    if keep:
        boundary.freeze()
    agent.drain(done=done, wait_s=wait_s)
    await task
    return replica


async def until(condition: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    """Wait for a condition. Raises `AssertionError` that says what never happened."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"never happened: {what}"
        await asyncio.sleep(0.02)


def balanced(agent: LearnerAgent) -> None:
    """Assert that every token of a learner is accounted for, in each fragment."""
    assert agent.boundary is not None
    for p, account in enumerate(agent.uplink.accounts):
        account.local = agent.boundary.local_tokens(p)
        attempts = agent.uplink.attempts[p]
        assert account.sent.keys() == attempts.keys(), f"fragment {p}: {account} does not fit {attempts}"
        for base, attempt in attempts.items():
            # An update that an earlier incarnation sent after its checkpoint counts as lost until it is merged.
            ours = attempt.header.incarnation == agent.incarnation
            assert account.sent[base] == attempt.header.tokens or not ours, f"fragment {p}, base {base}: {account}"
        processed = agent.boundary.tokens_seen + agent.uplink.tokens_lost
        assert account.processed == processed, f"fragment {p}: {account} does not add up to {processed}"


async def head(w: World, fragment: int) -> fold.At[merge.State]:
    """Return a fragment folded to the end of its log."""
    return await fold.fold(w.log, fragment, fold.Merging(w.log))


async def newest_commit(w: World, fragment: int) -> Commit:
    """Return the newest commit of a fragment that has one."""
    commit = await w.log.newest(fragment)
    assert commit is not None
    return commit


async def commit_of(w: World, fragment: int, version: int) -> Commit:
    """Return a commit that must exist."""
    commit = await w.log.commit(fragment, version)
    assert commit is not None
    return commit


async def all_commits(log: Log) -> dict[int, list[Commit]]:
    return {f.index: [c async for c in log.commits(f.index, 0, log.run.digest)] for f in log.run.layout.fragments}


async def check_log(w: World) -> int:
    """Check any log: it is contiguous and chained, every input exists, each base is merged once, all digests are right.

    This checks the log as it is now; syncers may go on. Return the number of commits.
    """
    count = 0
    for p, commits in (await all_commits(w.log)).items():
        assert [c.version for c in commits] == list(range(1, len(commits) + 1))
        bases: dict[str, int] = {}
        state = merge.initial(await fold.initial(w.log, p))
        for commit in commits:
            for given in commit.header.inputs:
                assert given.base > bases.get(given.learner, -1), "a base was merged twice, or out of order"
                bases[given.learner] = given.base
            state = await fold.Merging(w.log).step(state, commit)  # raises if a digest is not as recorded
            count += 1
        published = await fold.fold(w.log, p, fold.PublishedValue(w.log), until=len(commits))
        assert published.version == len(commits)
        assert merge.array_digest(published.carried) == merge.array_digest(state.published)
        merged = await fold.fold(w.log, p, fold.Merging(w.log), until=len(commits))
        assert merged.carried.digest == state.digest
    return count

"""What the tests of advice share: learners that train, faults, and `isthmus status` repeated until it says something."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from advice.followed import advises, isthmus, says
from advice.rows import Row
from integration.test_full_store import IN_A_DISK_OF_ITS_OWN, own_mounts  # noqa: F401  (a fixture)
from isthmus.format.rules import Pace, Rules
from isthmus.learner import LearnerAgent
from isthmus.store import Layer, Patience, Store
from isthmus.store.layer import Send
from support.forking import Forked, nursery
from support.world import NumpyReplica, World, seed_of, serving, train

T = TypeVar("T")

PACE = Pace(heartbeat_s=0.2, silence_s=0.8, snapshot_every=4096)
FEW = seed_of(Rules(fragments=2, sync_every=4), PACE)
MANY = seed_of(Rules(fragments=6, sync_every=4), PACE)


@dataclass
class Fault:
    """A fault of requests to a store, which lasts until it is mended."""

    error: BaseException
    prefix: str | tuple[str, ...] = ""
    operations: tuple[str, ...] = ("get", "put", "create", "list", "delete")
    mended: bool = False
    after_s: float = 0.0
    """How long a request waits for the error [seconds]."""

    def of(self, w: World) -> World:
        """Return the world with this fault in its store."""
        return w.through(lambda store: Faulty(store, self), Patience(attempts=1))


class Faulty(Layer):
    """A store with a fault."""

    def __init__(self, store: Store, fault: Fault) -> None:
        super().__init__(store)
        self._fault = fault

    async def _through(self, operation: str, key: str, send: Send[T]) -> T:
        if not self._fault.mended and operation in self._fault.operations and key.startswith(self._fault.prefix):
            await asyncio.sleep(self._fault.after_s)
            raise self._fault.error
        return await send()


@asynccontextmanager
async def training(
    agent: LearnerAgent,
    speed: float | Callable[[], float] = 0.0,
    step_s: float = 0.01,
    loss: Callable[[], float] = lambda: 1.0,
    tokens: int = 100,
) -> AsyncIterator[asyncio.Event]:
    """Let a learner train during the body. It is killed at the end, unless the event is set: then it has left, done.

    `speed`: how far each parameter moves in a step, beside noise. `loss`: the loss of the next step.
    """
    await agent.join()
    replica = NumpyReplica(agent.layout)
    boundary = agent.attach(replica)
    serving_ = asyncio.ensure_future(agent.run())
    done = asyncio.Event()

    async def steps() -> None:
        draw = np.random.default_rng(0)
        while not done.is_set():
            for values in replica.values:
                moved = speed() if callable(speed) else speed
                values += np.float32(moved) + draw.normal(scale=1e-3, size=values.size).astype(np.float32)
            boundary.after_step(tokens, loss())
            await asyncio.sleep(step_s)

    stepping = asyncio.ensure_future(steps())
    try:
        yield done
    finally:
        if done.is_set():
            await stepping
            agent.drain(done=True)
            await serving_
        for task in (stepping, serving_):
            task.cancel()
        await asyncio.gather(stepping, serving_, return_exceptions=True)


async def status(w: World, *flags: str) -> tuple[int, str]:
    """Run `isthmus status --check`; return its exit code and its lines about the run's health."""
    code, out = await isthmus("status", w.run.url, "--bus", w.bus.url, "--check", *flags)
    return code, out.partition(f"\n{w.run.url}: run ")[0]


PATIENT = 100
"""The most looks, each a second or so: beside other work on the machine, some need many."""


async def said(here: Row, w: World, *flags: str) -> str:
    """Repeat `isthmus status --check` until it has a row's sentence; return its lines, which must have the advice."""
    for _ in range(PATIENT):
        _, line = await status(w, *flags)
        if says(here, line):
            advises(here, line)
            return line
        await asyncio.sleep(0.2)
    raise AssertionError(f"never said: {here.said}\nbut: {line}")


async def well(w: World, *flags: str) -> str:
    """Repeat `isthmus status --check` until it ends with 0 in a run with a commit; return its lines about the run's health.

    Learners are said to merge as soon as a syncer is there, before the first commit.
    """
    for _ in range(PATIENT):
        code, line = await status(w, *flags)
        if code == 0 and await w.log.newest(0) is not None:
            return line
        await asyncio.sleep(0.2)
    raise AssertionError(f"never well: {line}")


@asynccontextmanager
async def command(folder: Path, *words: str) -> AsyncIterator[Forked]:
    """Run an `isthmus` command in a process of its own during the body, then stop it with SIGTERM."""
    log = folder / f"{words[0]}.log"
    process = await asyncio.to_thread(nursery().start, [*words], os.environ, log, log)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.to_thread(process.wait, 60.0)
        finally:
            process.kill()


async def finished(w: World, versions: int = 6) -> None:
    """Let a learner train until every fragment has this many versions; then all leave in order."""
    async with serving(w.syncer("s1")) as syncer:
        await train(w.learner("a"), 10, enough=lambda: min(k.head for k in syncer.coordinators) >= versions)

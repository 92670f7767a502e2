"""Opening a run: its store, its bus and the threads of the process that uses them.

The first requests are tried twice, within seconds, since an operator is watching. Once the store or bus has answered,
an outage is waited out.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches

from isthmus.bus import Bus, open_bus
from isthmus.errors import BucketMissing, IsthmusError, RunMissing, Unavailable
from isthmus.format.records.keys import RUN_KEY, snapshots_prefix
from isthmus.format.records.messages import SYNCER_STREAM
from isthmus.log import Log
from isthmus.log.run import Run, read_run, run_below
from isthmus.log.trust import Trust
from isthmus.runtime.clock import Runtime, threaded
from isthmus.runtime.urls import Place
from isthmus.store import EdgeStore, open_store

TRUSTING = Trust()
"""The trust of a process that only reads: no key, and no demands on the run."""

THREADS = 4
"""Default number of threads for work that leaves the event loop."""

LOOK_S = 2.0
"""Time between two checks whether the run or bus is there [s]."""

SAY_S = 300.0
"""Time between two messages that the run or bus is still missing [s]."""

LIKE = 0.75
"""How like a name of another one has to be to be meant, by `difflib`."""

Find = Callable[[EdgeStore], Awaitable[Run]]
"""Finds the run at a store, or creates one there."""


@dataclass(frozen=True, slots=True)
class Ports:
    """An open run: its log, store, bus and runtime."""

    log: Log
    store: EdgeStore
    bus: Bus
    runtime: Runtime


async def known_run(store: EdgeStore, trust: Trust = TRUSTING) -> Run:
    """Return the run at this store, or raise within seconds that it cannot be read.

    Raises what `read_run` does. `RunMissing` also names a run in the folder `run` below this place, or one in a folder
    beside it whose name is much like it, if there is one.
    """
    try:
        return await read_run(store.at_start, trust.require)
    except RunMissing as missing:
        near = "" if missing.beside else await run_below(store.at_start)
        like = _run_like(store.url)
        raise RunMissing(store.url, near, beside=missing.beside, pinned=trust.run_digest, like=like) from None


def _run_like(url: str) -> str:
    """Return the run in the folder beside this one whose name is most like it; empty if none is, and in a bucket."""
    folder = Place.of(url).folder
    if folder is None:
        return ""
    try:
        beside = [entry.name for entry in folder.parent.iterdir() if (entry / RUN_KEY).is_file()]
    except OSError:
        return ""
    return "".join(str(folder.parent / name) for name in get_close_matches(folder.name, beside, 1, LIKE))


@asynccontextmanager
async def open_place(
    url: str, *, threads: int = THREADS, compute: int | None = None, gpu: bool = False, make: bool = False
) -> AsyncIterator[EdgeStore]:
    """Open the store at a URL, whether or not it holds a run, with threads of its own (see `threaded`)."""
    with threaded(threads, compute=compute, gpu=gpu) as runtime:
        async with open_store(url, runtime, make=make) as store:
            yield store


@asynccontextmanager
async def open_log(
    url: str, trust: Trust = TRUSTING, *, threads: int = THREADS, gpu: bool = False
) -> AsyncIterator[Log]:
    """Open a run's log without a bus. Raises what `known_run` and `Trust.require` do."""
    async with open_place(url, threads=threads, gpu=gpu) as store:
        yield await _log(await known_run(store, trust), store, trust)


@asynccontextmanager
async def open_ports(
    url: str,
    bus_url: str,
    find: Find | None = None,
    trust: Trust = TRUSTING,
    *,
    compute: int | None = None,
    gpu: bool = False,
) -> AsyncIterator[Ports]:
    """Open store and bus of the run that `find` returns; without `find`, `known_run` does. The bus is not contacted.

    `compute`: threads that share one computation; by default as many as there are cores. `gpu`: whether a GPU computes
    the matrices of isotropic merges. Raises what `find`, `Trust.require` and `Trust.judge` do.
    """
    async with open_place(url, threads=max(THREADS, compute or 0), compute=compute, gpu=gpu) as store:
        run = await (find(store) if find else known_run(store, trust))
        log = await _log(run, store, trust)
        async with open_bus(bus_url, log.run.digest, store, run.pace.heartbeat_s) as bus:
            yield Ports(log, store, bus, store.runtime)


async def _log(run: Run, store: EdgeStore, trust: Trust) -> Log:
    trust.judge(run)
    log = Log(run, store, store.runtime, trust.signer)
    if Place.of(store.url).in_bucket:
        store.landmark = snapshots_prefix(0)
    await log.members.refresh(store.at_start)
    return log


async def bus_answers(bus: Bus) -> None:
    """Check that the bus can be read. Raises `Unavailable`, `Denied`."""
    await bus.tail(SYNCER_STREAM)


async def patiently(
    ask: Callable[[], Awaitable[object]], runtime: Runtime, stopping: asyncio.Event, say: Callable[[IsthmusError], None]
) -> bool:
    """Repeat `ask` until the run, with its bucket, or the bus is there; return False if `stopping` is set before.

    There is no time limit, since nobody knows when an operator will create the run. `say` is called with the error at
    first and then every `SAY_S`. Raises what waiting would not cure: `Denied`, or a record that cannot be read.
    """
    said_at: float | None = None
    while not stopping.is_set():
        try:
            await ask()
            return True
        except (RunMissing, BucketMissing, Unavailable) as error:
            if said_at is None or runtime.now() - said_at >= SAY_S:
                said_at = runtime.now()
                say(error)
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await stopping.wait()
    return False

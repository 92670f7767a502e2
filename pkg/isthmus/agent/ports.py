"""The ways to a run: its store, its bus and the threads of whoever uses them, opened with patience.

The first requests are tried twice and for seconds, since somebody is watching; once something has answered, an outage
is ridden out.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from isthmus.bus import Bus, open_bus
from isthmus.errors import IsthmusError, RunMissing, Unavailable
from isthmus.format.records.keys import snapshots_prefix
from isthmus.format.records.messages import SYNCER_STREAM
from isthmus.log import Log
from isthmus.log.run import Require, Run, anything, read_run, run_below
from isthmus.log.trust import Trust
from isthmus.runtime.clock import Runtime, threaded
from isthmus.runtime.urls import split
from isthmus.store import BUCKETS, EdgeStore, open_store

TRUSTING = Trust()
"""Of those who only read, and demand nothing."""

THREADS = 4
"""For work that leaves the event loop, where nobody says otherwise."""

LOOK_S = 2.0
"""How often one looks whether a run has been created."""

SAY_S = 300.0
"""How often it is said that there is still none."""

Find = Callable[[EdgeStore], Awaitable[Run]]
"""Finds the run at a store, or makes one there."""


@dataclass(frozen=True, slots=True)
class Ports:
    """A run and the ways to it."""

    log: Log
    store: EdgeStore
    bus: Bus
    runtime: Runtime


async def known_run(store: EdgeStore, require: Require = anything) -> Run:
    """Return the run at this store, or say within seconds that it cannot be read.

    Raises what `read_run` does; `RunMissing` says where there is one nearby.
    """
    try:
        return await read_run(store.at_start, require)
    except RunMissing:
        raise RunMissing(store.url, await run_below(store.at_start)) from None


@asynccontextmanager
async def open_place(
    url: str, *, threads: int = THREADS, compute: int | None = None, make: bool = False
) -> AsyncIterator[EdgeStore]:
    """Open the store at a URL, whether there is a run or not, with threads of its own (see `runtime.threaded`)."""
    with threaded(threads, compute=compute) as runtime:
        async with open_store(url, runtime, make=make) as store:
            yield store


@asynccontextmanager
async def open_log(url: str, trust: Trust = TRUSTING, *, threads: int = THREADS) -> AsyncIterator[Log]:
    """Open a run's log alone, without a bus. Raises what `known_run` and `Trust.require` do."""
    async with open_place(url, threads=threads) as store:
        yield await _log(await known_run(store, trust.require), store, trust)


@asynccontextmanager
async def open_ports(
    url: str, bus_url: str, find: Find | None = None, trust: Trust = TRUSTING, *, compute: int | None = None
) -> AsyncIterator[Ports]:
    """Open store and bus of the run that `find` finds, `known_run` by default; the bus is not asked for anything.

    `compute`: threads that share one computation; as many as there are cores where nothing is said. Raises what `find`,
    `Trust.require` and `Trust.judge` do.
    """
    async with open_place(url, threads=max(THREADS, compute or 0), compute=compute) as store:
        run = await (find(store) if find else known_run(store, trust.require))
        log = await _log(run, store, trust)
        async with open_bus(bus_url, log.run.digest) as bus:
            yield Ports(log, store, bus, store.runtime)


async def _log(run: Run, store: EdgeStore, trust: Trust) -> Log:
    trust.judge(run)
    log = Log(run, store, store.runtime, trust.signer)
    if split(store.url).scheme in BUCKETS:
        store.landmark = snapshots_prefix(0)
    await log.members.refresh(store.at_start)
    return log


async def bus_answers(bus: Bus) -> None:
    """Return if the bus can be used. Raises `Unavailable`, `Denied`."""
    await bus.tail(SYNCER_STREAM)


async def patiently(
    ask: Callable[[], Awaitable[object]], runtime: Runtime, stopping: asyncio.Event, say: Callable[[IsthmusError], None]
) -> bool:
    """Ask for a run, or a bus, until there is one, and return True; False once `stopping` is set.

    It waits as long as it takes: when somebody creates the run is not for a number of seconds to know. What is missing
    is said now and then. Raises what waiting would not cure: `Denied`, a record that cannot be read.
    """
    said_at: float | None = None
    while not stopping.is_set():
        try:
            await ask()
            return True
        except (RunMissing, Unavailable) as error:
            if said_at is None or runtime.now() - said_at >= SAY_S:
                said_at = runtime.now()
                say(error)
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await stopping.wait()
    return False

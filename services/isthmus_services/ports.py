"""Settings → ports: opens a run's store and bus for a service, with short patience until both have answered once."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from isthmus.bus import Bus, open_bus
from isthmus.errors import RunMissing, Unavailable
from isthmus.log import Log
from isthmus.log.run import Run, read_run, run_below
from isthmus.records.messages import SYNCER_STREAM
from isthmus.runtime import Runtime, threaded
from isthmus.store import AT_START, RUNNING, EdgeStore, Store, open_store

OFFLOAD_THREADS = 4

LOOK_S = 2.0
"""How often one looks whether a run has been created."""

SAY_S = 300.0
"""How often it is said that there is still none."""


@dataclass(frozen=True)
class Ports:
    """A run and the ways to it."""

    log: Log
    store: EdgeStore
    bus: Bus
    runtime: Runtime


@asynccontextmanager
async def open_log(run: str, workers: int = OFFLOAD_THREADS) -> AsyncIterator[Log]:
    """Open a run's log alone, without a bus. Raises `RunMissing`, `Denied`, `Unavailable` within seconds."""
    async with _open(run, workers) as (log, _):
        yield log


@asynccontextmanager
async def open_ports(run: str, bus: str, *, bus_must_answer: bool = True) -> AsyncIterator[Ports]:
    """Open store and bus and read the run. Raises `RunMissing`, `Denied`, `Unavailable` within seconds."""
    async with _open(run, OFFLOAD_THREADS) as (log, store), open_bus(bus, log.run.digest) as opened:
        try:
            await opened.tail(SYNCER_STREAM)
        except Unavailable:
            if bus_must_answer:
                raise
        yield Ports(log, store, opened, log.runtime)


async def known_run(store: Store) -> Run:
    """Return the run at this store. Raises what `read_run` does; `RunMissing` says where there is one nearby."""
    try:
        return await read_run(store)
    except RunMissing:
        raise RunMissing(store.url, await run_below(store)) from None


async def until_created(
    store: Store, runtime: Runtime, stopping: asyncio.Event, say: Callable[[RunMissing | Unavailable], None]
) -> bool:
    """Wait until there is a run, and return True; False once `stopping` is set. What is missing is said now and then.

    It waits as long as it takes: when somebody creates the run is not for a number of seconds to know. Raises `Denied`,
    which waiting would not cure, and what else `read_run` raises.
    """
    said_at: float | None = None
    while not stopping.is_set():
        try:
            await read_run(store)
            return True
        except (RunMissing, Unavailable) as error:
            if said_at is None or runtime.now() - said_at >= SAY_S:
                said_at = runtime.now()
                say(error)
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await stopping.wait()
    return False


@asynccontextmanager
async def _open(run: str, workers: int) -> AsyncIterator[tuple[Log, EdgeStore]]:
    runtime, pool = threaded(workers)
    try:
        async with open_store(run, runtime) as store:
            store.patience = AT_START
            found = await known_run(store)
            store.patience = RUNNING
            yield Log(found, store, runtime), store
    finally:
        pool.shutdown(wait=False, cancel_futures=True)

"""Settings → ports: opens a run's store and bus for a service, with short patience until both have answered once."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from isthmus.bus import Bus, open_bus
from isthmus.errors import Unavailable
from isthmus.log import Log
from isthmus.records.messages import SYNCER_STREAM
from isthmus.run import read_run
from isthmus.runtime import Runtime, threaded
from isthmus.store import AT_START, RUNNING, EdgeStore, open_store

OFFLOAD_THREADS = 4


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


@asynccontextmanager
async def _open(run: str, workers: int) -> AsyncIterator[tuple[Log, EdgeStore]]:
    runtime, pool = threaded(workers)
    try:
        async with open_store(run, runtime) as store:
            store.patience = AT_START
            found = await read_run(store)
            store.patience = RUNNING
            yield Log(found, store, runtime), store
    finally:
        pool.shutdown(wait=False, cancel_futures=True)

"""Both clients of buckets on a real S3 server: time, processor time, and the lag of the event loop."""

import asyncio
import os
import resource
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path

from isthmus.agent.ports import open_place
from isthmus.store import EdgeStore
from isthmus_lab.bench.measure import Row, Say, quantile, row, sized
from isthmus_lab.bench.servers import bucket
from isthmus_services.servers import s3_server

CLIENTS = ("s3", "s3+aiobotocore")
"""URL schemes of the clients. The first client is measured beside the second."""

SIZES = ((8 << 10, 32, 256), (1 << 20, 8, 32), (16 << 20, 4, 8))
"""Bytes of an object, requests at once, requests in a repeat."""

LOOK_S = 0.001


class Lag:
    """The delays of a task that asks the event loop to run it every millisecond."""

    def __init__(self) -> None:
        self.late: list[float] = []

    async def watch(self) -> None:
        """Measure the delays, in seconds, until cancelled."""
        while True:
            at = time.perf_counter() + LOOK_S
            await asyncio.sleep(LOOK_S)
            self.late.append(time.perf_counter() - at)


async def timed(work: Callable[[int], Awaitable[object]], count: int, at_once: int) -> tuple[float, float, float]:
    """Run `count` requests; return the seconds, the seconds of processor time, and the p99 of the loop's lag [s]."""
    slots, lag = asyncio.Semaphore(at_once), Lag()

    async def one(number: int) -> None:
        async with slots:
            await work(number)

    watching = asyncio.ensure_future(lag.watch())
    await asyncio.sleep(0.0)  # the watching task starts to wait
    cpu, began = processor_s(), time.perf_counter()
    await asyncio.gather(*(one(i) for i in range(count)))
    took, used = time.perf_counter() - began, processor_s() - cpu
    await asyncio.sleep(2.0 * LOOK_S)  # the watching task notes its last delay when it runs
    watching.cancel()
    with suppress(asyncio.CancelledError):
        await watching
    return took, used, quantile(lag.late or [0.0], 0.99)


def processor_s() -> float:
    """Return the seconds of processor time that this process has used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def rows(repeats: int, say: Say) -> Iterator[Row]:
    """Yield time, processor time and loop lag of requests by obstore, beside those by aiobotocore."""
    with tempfile.TemporaryDirectory() as folder, s3_server(Path(folder)) as server:
        os.environ.update(server.environment)
        found = asyncio.run(_measure(repeats, say))
    for (operation, size), by_client in found.items():
        ours, theirs = (by_client[client] for client in CLIENTS)
        for number, (what, unit, scale) in enumerate(
            (("time", "ms a request", 1e3), ("processor", "ms a request", 1e3), ("loop lag p99", "ms", 1e3))
        ):
            yield row(
                "store",
                f"{operation}: {what}, beside aiobotocore",
                sized(size),
                [scale * sample[number] for sample in ours],
                unit,
                limits=[scale * sample[number] for sample in theirs],
                aim=1.0,
                at_most=True,
            )


Found = dict[tuple[str, int], dict[str, list[tuple[float, float, float]]]]


async def _measure(repeats: int, say: Say) -> Found:
    found: Found = {(op, size): {c: [] for c in CLIENTS} for size, _, _ in SIZES for op in ("PUT", "GET")}
    async with AsyncExitStack() as stack:
        stores: dict[str, EdgeStore] = {}
        name = bucket()
        for client in CLIENTS:
            stores[client] = await stack.enter_async_context(open_place(f"{client}://{name}/{client}", make=True))
        done = 0
        for number in range(repeats + 1):
            for size, at_once, count in SIZES:
                data = os.urandom(size)
                for client, store in stores.items():
                    for op in ("PUT", "GET"):

                        async def put(i: int, store: EdgeStore = store, data: bytes = data) -> None:
                            await store.put(f"{len(data)}/{i}", data)

                        async def get(i: int, store: EdgeStore = store, size: int = size) -> None:
                            await store.get(f"{size}/{i}")

                        took, used, lag = await timed(put if op == "PUT" else get, count, at_once)
                        if number:
                            found[op, size][client].append((took / count, used / count, lag))
                        done += 1
                        say(done / ((repeats + 1) * len(SIZES) * len(CLIENTS) * 2))
    return found

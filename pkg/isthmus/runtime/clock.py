"""The injected world: clocks, randomness, ids and the way CPU work leaves the event loop.

The agents get one of these and use nothing global, so the same code runs under threads, on one bare loop, and in
virtual time. This is the only module of the library that may touch the real ones.
"""

import asyncio
import gc
import os
import random
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Offload(Protocol):
    """Runs `fn(*args)` away from the event loop and returns its result; `fn` must release the GIL to be worth it."""

    def __call__(self, fn: Callable[..., T], /, *args: Any) -> Awaitable[T]:
        """Await the result of `fn(*args)`."""
        ...


@dataclass(frozen=True, slots=True)
class ComputePool:
    """Threads that share one computation. Who waits for them must not be one of them."""

    pool: Executor | None = None
    threads: int = 1

    def share(self, work: Callable[[int, int], object], count: int, least: int = 64) -> None:
        """Run `work(start, stop)` on parts of range(count), none of them much smaller than `least`, until all are done.

        `work` must release the GIL to be worth it, and come to the same however the range is cut.
        """
        # More parts than threads: some take longer than others.
        parts = min(4 * self.threads, count // least)
        if self.pool is None or parts < 2:
            work(0, count)
            return
        cuts = [count * i // parts for i in range(parts + 1)]
        for part in [self.pool.submit(work, start, stop) for start, stop in pairwise(cuts)]:
            part.result()


ALONE = ComputePool()
"""No threads but the caller's own."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """Clock, randomness, ids and CPU offload of one agent."""

    now: Callable[[], float]
    """Seconds on a clock that never goes back; differences mean something, values do not."""
    wall: Callable[[], float]
    """Seconds since 1970 (UTC), for records people read. No decision rests on it."""
    random: random.Random
    offload: Offload
    new_id: Callable[[], str]
    """16 hex digits, unique among processes."""
    compute: ComputePool = ALONE
    """Threads for one large computation, which the result does not depend on."""


@contextmanager
def uncollected() -> Iterator[None]:
    """Keep the garbage collector away while much is loaded that stays: each of its looks through all objects of a
    process that has torch takes tens of milliseconds, and there are many of them meanwhile."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


async def inline(fn: Callable[..., T], /, *args: Any) -> T:
    """Run on the loop itself: for a single-threaded world."""
    return fn(*args)


def random_id() -> str:
    """Return 16 hex digits from the operating system's randomness."""
    return os.urandom(8).hex()


def clock() -> float:
    """Return seconds on a clock that never goes back, for threads that have no agent."""
    return time.monotonic()


def cores() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def threaded(workers: int, seed: int | None = None, compute: int | None = None) -> Iterator[Runtime]:
    """Give the real world, with `workers` threads for offloaded work and a compute of so many, or as there are cores.

    What has not begun at the end of it is cancelled, and what has is not waited for.
    """
    pool = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="isthmus-offload")
    # Its threads begin with the first computation that they share: most processes never have one.
    compute = compute or cores()
    helpers = ThreadPoolExecutor(max_workers=compute, thread_name_prefix="isthmus-compute")

    def offload(fn: Callable[..., T], /, *args: Any) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(pool, fn, *args)

    try:
        yield Runtime(time.monotonic, time.time, random.Random(seed), offload, random_id, ComputePool(helpers, compute))
    finally:
        for threads in (pool, helpers):
            threads.shutdown(wait=False, cancel_futures=True)


def single_threaded(seed: int | None = None) -> Runtime:
    """Return the real clock without any thread: offloaded work runs on the loop."""
    return Runtime(time.monotonic, time.time, random.Random(seed), inline, random_id)


EXIT_S = 5.0
"""At most so long an ending process waits for threads that others' libraries began."""


def wait_for_foreign_threads() -> None:
    """Wait until no thread that Python does not know runs any of it. To be called at exit.

    A thread of a library in Rust that hands a result to an event loop is still in there when the loop goes on with it.
    Where that was the last thing the process waited for, the interpreter ends meanwhile and ends that thread by
    unwinding its stack; Rust aborts the process for that. Whatever it had done, its exit status was 134 then (Pythons
    before 3.14, 7 of 240 processes on a busy machine).
    """
    until = time.monotonic() + EXIT_S
    while set(sys._current_frames()) - {thread.ident for thread in threading.enumerate()} and time.monotonic() < until:
        time.sleep(0.001)

"""The injected runtime: clocks, randomness, ids, and how CPU work leaves the event loop.

Each agent gets a `Runtime` and uses no global clock or randomness. So the same code runs with threads, on a single
event loop, and in virtual time. This is the only module of the library that may use the real ones.
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
    """Threads that share one computation. A thread that calls `share` must not be one of them."""

    pool: Executor | None = None
    threads: int = 1
    gpu: bool = False
    """Whether a CUDA GPU computes the matrices of isotropic merges, with the same bits."""

    def share(self, work: Callable[[int, int], object], count: int, least: int = 64) -> None:
        """Run `work(start, stop)` on parts of range(count), none much smaller than `least`; wait for all of them.

        `work` must release the GIL to be worth it, and give the same result however the range is cut.
        """
        # There are more parts than threads, since some parts take longer than others.
        parts = min(4 * self.threads, count // least)
        if self.pool is None or parts < 2:
            work(0, count)
            return
        cuts = [count * i // parts for i in range(parts + 1)]
        for part in [self.pool.submit(work, start, stop) for start, stop in pairwise(cuts)]:
            part.result()


ALONE = ComputePool()
"""A pool without threads: the caller's thread does all the work."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """Clock, randomness, ids and CPU offload of one agent."""

    now: Callable[[], float]
    """Seconds on a clock that never goes back; only differences have a meaning."""
    wall: Callable[[], float]
    """Seconds since 1970 (UTC), for records that people read. No decision rests on it."""
    random: random.Random
    offload: Offload
    new_id: Callable[[], str]
    """16 hex digits, unique among processes."""
    compute: ComputePool = ALONE
    """Threads for one large computation; its result does not depend on their number."""
    small_on_loop: bool = False
    """Whether `SmallWork` uses the event loop. In a simulation it does not, as small arrays stand for large ones."""


class SmallWork:
    """Runs small work on the event loop, where it takes less than to hand it to a thread. Other work runs in a thread.

    So does the first call, which may load compiled kernels.
    """

    def __init__(self, runtime: Runtime, *, small: bool) -> None:
        self._offload = runtime.offload
        self._small = small and runtime.small_on_loop
        self._loaded = False

    async def __call__(self, fn: Callable[..., T], /, *args: Any) -> T:
        """Return `fn(*args)`."""
        if self._small and self._loaded:
            return fn(*args)
        result = await self._offload(fn, *args)
        self._loaded = True
        return result


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable the garbage collector while many lasting objects are loaded.

    Otherwise it would run many times, and in a process with torch each full collection takes tens of milliseconds.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


async def inline(fn: Callable[..., T], /, *args: Any) -> T:
    """Run `fn(*args)` on the event loop itself, for a runtime without threads."""
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
def threaded(
    workers: int, seed: int | None = None, compute: int | None = None, *, gpu: bool = False
) -> Iterator[Runtime]:
    """Provide a runtime with the real clocks and threads.

    `workers`: threads for offloaded work. `compute`: threads that share one computation; by default as many as there
    are cores. `gpu`: see `ComputePool`. At the end of the context, work that has not begun is cancelled; work that has
    begun is not waited for.
    """
    pool = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="isthmus-offload")
    # These threads start with the first shared computation, which most processes never have.
    compute = compute or cores()
    helpers = ThreadPoolExecutor(max_workers=compute, thread_name_prefix="isthmus-compute")

    def offload(fn: Callable[..., T], /, *args: Any) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(pool, fn, *args)

    try:
        shared = ComputePool(helpers, compute, gpu)
        yield Runtime(time.monotonic, time.time, random.Random(seed), offload, random_id, shared, small_on_loop=True)
    finally:
        for threads in (pool, helpers):
            threads.shutdown(wait=False, cancel_futures=True)


def single_threaded(seed: int | None = None) -> Runtime:
    """Return a runtime with the real clocks and no threads: offloaded work runs on the event loop."""
    return Runtime(time.monotonic, time.time, random.Random(seed), inline, random_id)


EXIT_S = 5.0
"""How long an ending process waits at most for threads that other libraries started."""


def wait_for_foreign_threads() -> None:
    """Wait until no thread that Python's `threading` does not know runs Python code. To be called at exit.

    When a thread of a Rust library hands a result to an event loop, it may still be inside the interpreter while the
    loop goes on with that result. If the process then ends, the interpreter ends this thread by unwinding its stack,
    and Rust aborts the process. The exit status was then 134, whatever the process had done (Pythons before 3.14, 7 of
    240 processes on a busy machine).
    """
    until = time.monotonic() + EXIT_S
    while set(sys._current_frames()) - {thread.ident for thread in threading.enumerate()} and time.monotonic() < until:
        time.sleep(0.001)

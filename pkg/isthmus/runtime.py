"""The injected world: clocks, randomness, ids and the way CPU work leaves the event loop.

The agents get one of these and use nothing global, so the same code runs under threads, on one bare loop, and in
virtual time. This is the only module of the library that may touch the real ones.
"""

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Offload(Protocol):
    """Runs `fn(*args)` away from the event loop and returns its result; `fn` must release the GIL to be worth it."""

    def __call__(self, fn: Callable[..., T], /, *args: Any) -> Awaitable[T]:
        """Await the result of `fn(*args)`."""
        ...


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


async def inline(fn: Callable[..., T], /, *args: Any) -> T:
    """Run on the loop itself: for a single-threaded world."""
    return fn(*args)


def random_id() -> str:
    """Return 16 hex digits from the operating system's randomness."""
    return os.urandom(8).hex()


@contextmanager
def threaded(workers: int, seed: int | None = None) -> Iterator[Runtime]:
    """Give the real world, with `workers` threads for offloaded work.

    What has not begun at the end of it is cancelled, and what has is not waited for.
    """
    pool = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="isthmus-offload")

    def offload(fn: Callable[..., T], /, *args: Any) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(pool, fn, *args)

    try:
        yield Runtime(time.monotonic, time.time, random.Random(seed), offload, random_id)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def single_threaded(seed: int | None = None) -> Runtime:
    """Return the real clock without any thread: offloaded work runs on the loop."""
    return Runtime(time.monotonic, time.time, random.Random(seed), inline, random_id)

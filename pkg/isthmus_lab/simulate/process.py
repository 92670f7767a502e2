"""A simulated process: a life on the clock with its own clocks and randomness, which can be paused and killed."""

import asyncio
import heapq
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from isthmus.runtime.clock import Runtime
from isthmus_lab.simulate.clock import Clock, Life

T = TypeVar("T")

EPOCH_S = 1.8e9
"""Time of the world's wall clock when a simulation starts, in seconds since 1970."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of work, in seconds of a process's loop or of a thread of its pool. By default all work is free."""

    callback_s: float = 0.0
    """Seconds of the loop for each callback and each read of the clock, since one callback may handle a lot."""
    message_s: float = 0.0
    """Seconds of the loop for a message sent or received, in the bus's client and for the record."""
    request_s: float = 0.0
    """Seconds of the loop for a request to the store."""
    byte_s: float = 0.0
    """Seconds of a thread for each byte of the arguments and result of offloaded work."""
    threads: int = 4

    def scaled(self, by: float) -> "Costs":
        """Return the costs on a machine that is slower, or has more to do, by this factor."""
        return Costs(self.callback_s * by, self.message_s * by, self.request_s * by, self.byte_s * by, self.threads)


FREE = Costs()

MEASURED = Costs(callback_s=10e-6, message_s=30e-6, request_s=1.3e-3, byte_s=3e-9)
"""Costs on one core of the machine that all figures are from. A message: decoding a record (4 to 10 µs) and redis-py
(20 µs). A request: one of aiobotocore. A byte: verifying, decoding and adding up an update (1.5 ns a parameter of half
a byte)."""


STALLS_WITHIN = 30
"""A process that is told to stall does so within this many reads of its clock."""


class Process:
    """One process of the simulated world."""

    def __init__(
        self,
        clock: Clock,
        name: str,
        seed: str,
        *,
        wall_skew_s: float = 0.0,
        compute_s: Callable[[random.Random], float] = lambda _: 0.0,
        costs: Costs = FREE,
        bytes_scale: float = 1.0,
    ) -> None:
        """`bytes_scale`: bytes that offloaded work stands for, per byte of the simulated objects."""
        self.name = name
        self.random = random.Random(seed)
        """Draws of its ports. The agent's own draws come from another stream, so that faults do not change them."""
        self.clock = clock
        self.life = Life(name)
        self.life.callback_s = costs.callback_s
        self.costs = costs
        self._stall_s, self._stalls_in = 0.0, 0
        self.wall_skew_s = wall_skew_s
        self.tasks: list[asyncio.Task[Any]] = []
        began = self.random.uniform(0.0, 1e5)  # monotonic clocks start anywhere
        own = random.Random(f"{seed}/agent")
        free_at = [0.0] * costs.threads

        def now() -> float:
            life = self.life
            life.owed_s += costs.callback_s
            if self._stalls_in:
                self._stalls_in -= 1
                if not self._stalls_in:
                    life.owed_s += self._stall_s
            return clock.time() + life.owed_s + began

        async def offload(fn: Callable[..., T], /, *args: Any) -> T:
            result = fn(*args)
            seconds = compute_s(self.random)
            if costs.byte_s > 0.0:
                # Each call takes one thread, as soon as one is free.
                began_at = max(clock.time(), heapq.heappop(free_at))
                until = began_at + costs.byte_s * bytes_scale * sum(map(_size, (*args, result)))
                heapq.heappush(free_at, until)
                seconds += until - clock.time()
            if seconds > 0.0:
                await asyncio.sleep(seconds)
            return result

        self.runtime = Runtime(
            now=now,
            wall=lambda: EPOCH_S + clock.time() + self.life.owed_s + self.wall_skew_s,
            random=own,
            offload=offload,
            new_id=lambda: f"{own.getrandbits(64):016x}",
        )

    def start(self, body: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a coroutine in this process."""
        task = self.clock.start(self.life, body)
        self.tasks.append(task)
        return task

    def spend(self, seconds: float) -> None:
        """Charge seconds of the loop's time to the work that runs in this process now."""
        self.life.owed_s += seconds

    def stall(self, seconds: float) -> None:
        """Block the loop at a random moment, also in the middle of a callback, as a collection of garbage or a copy
        that holds the interpreter does."""
        self._stall_s, self._stalls_in = seconds, self.random.randrange(1, STALLS_WITHIN)

    @property
    def alive(self) -> bool:
        """Whether the process has not been killed."""
        return not self.life.ended

    def pause(self) -> None:
        """Stop the process as SIGSTOP does."""
        self.clock.freeze(self.life)

    def resume(self) -> None:
        """Let the process go on with the state that it had when it was paused."""
        self.clock.thaw(self.life)

    def kill(self) -> None:
        """End the process as SIGKILL does: none of its code runs any more."""
        self.clock.end(self.life)


def _size(thing: object) -> int:
    if isinstance(thing, np.ndarray):
        return thing.nbytes
    return len(thing) if isinstance(thing, bytes | bytearray | memoryview) else 0

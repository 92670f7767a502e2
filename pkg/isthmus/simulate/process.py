"""A simulated process: a life on the clock, with clocks and randomness of its own, that can be paused and killed."""

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from isthmus.runtime import Runtime
from isthmus.simulate.clock import Clock, Life

T = TypeVar("T")

EPOCH = 1.8e9
"""What the world's wall clock shows when a simulation starts, in seconds since 1970."""


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
    ) -> None:
        self.name = name
        self.random = random.Random(seed)
        """Draws of its ports; the agent's own come from another stream, so that faults do not change them."""
        self.clock = clock
        self.life = Life(name)
        self.wall_skew_s = wall_skew_s
        self.tasks: list[asyncio.Task[Any]] = []
        began = self.random.uniform(0.0, 1e5)  # monotonic clocks start anywhere
        own = random.Random(f"{seed}/agent")

        async def offload(fn: Callable[..., T], /, *args: Any) -> T:
            result = fn(*args)
            if (seconds := compute_s(self.random)) > 0.0:
                await asyncio.sleep(seconds)
            return result

        self.runtime = Runtime(
            now=lambda: clock.time() + began,
            wall=lambda: EPOCH + clock.time() + self.wall_skew_s,
            random=own,
            offload=offload,
            new_id=lambda: f"{own.getrandbits(64):016x}",
        )

    def start(self, body: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a coroutine in this process."""
        task = self.clock.start(self.life, body)
        self.tasks.append(task)
        return task

    @property
    def alive(self) -> bool:
        """Whether it has not been killed."""
        return not self.life.ended

    def pause(self) -> None:
        """Stop it as SIGSTOP does."""
        self.clock.freeze(self.life)

    def resume(self) -> None:
        """Let it go on with what it believes."""
        self.clock.thaw(self.life)

    def kill(self) -> None:
        """End it as SIGKILL does: nothing of it runs any more."""
        self.clock.end(self.life)

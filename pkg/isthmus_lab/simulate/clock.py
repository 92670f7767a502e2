"""An asyncio event loop in virtual time: time jumps to the next timer, and a seed orders the callbacks that are ready.

Every callback belongs to a `Life`, which is found by the callback's context. Within one life, callbacks run in the
order that asyncio promises. Which of several lives runs next is drawn, because processes promise each other no order. A
life can be frozen (its callbacks are kept) and ended (they are dropped, and no `finally` runs, as with SIGKILL).

Callbacks take no time unless their life has costs. Then the life's loop is blocked for as long as its callbacks took,
and callbacks that become ready meanwhile wait.
"""

import asyncio
import contextlib
import contextvars
import heapq
import random
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator
from contextvars import Context, ContextVar
from typing import Any, TypeVar

T = TypeVar("T")

TURNS_MAX = 1_000_000
"""After this many callbacks without time passing, the simulation is taken for an endless loop."""


SLICE_S = 0.001
"""The time that callbacks took passes in pieces of at least this many seconds, because each piece needs a timer."""

HELD_UP_S = 0.02
"""A loop counts as held up if it is blocked for this many seconds at once. Shorter times are ordinary work."""

HELD_UP_MAX = 512
"""How many of the last times that its loop was held up a life remembers."""


class StandsStill(RuntimeError):
    """The simulation cannot go on.

    Either nothing is ready and no timer runs, or callbacks run without end while no time passes.
    """


class Handle:
    """A pending callback.

    asyncio's own handle does more than is needed here, and most of a simulation's work is callbacks.
    """

    __slots__ = ("args", "callback", "context", "dropped", "life")

    def __init__(self, callback: Callable[..., object], args: tuple[Any, ...], context: Context, life: "Life") -> None:
        self.callback = callback
        self.args = args
        self.context = context
        self.life = life
        self.dropped = False

    def cancel(self) -> None:
        """See `asyncio.Handle`."""
        self.dropped = True

    def cancelled(self) -> bool:
        """See `asyncio.Handle`."""
        return self.dropped


class Life:
    """One simulated process, as the clock sees it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.frozen = False
        self.ended = False
        self.busy = False
        """Whether its loop is blocked for the time that callbacks took."""
        self.callback_s = 0.0
        """The cost of every callback, in seconds of its loop."""
        self.owed_s = 0.0
        """Seconds that callbacks took and that have not passed yet. Code that runs in this life may add to it."""
        self.held_up: deque[tuple[float, float]] = deque(maxlen=HELD_UP_MAX)
        """Start and end of each long time that its loop was blocked: frozen, or busy."""
        self.ready: deque[Handle] = deque()
        self.context = contextvars.copy_context()
        """Tasks started in this context, and all tasks that they start, belong to this life."""
        self.context.run(_LIFE.set, self)
        self._frozen_at = 0.0

    def stood_s(self, since: float, until: float) -> float:
        """Return the seconds between `since` and `until` for which its loop was held up, as far as it remembers."""
        times = [*self.held_up, (self._frozen_at, until)] if self.frozen else self.held_up
        return sum(max(0.0, min(stop, until) - max(start, since)) for start, stop in times)


_LIFE: ContextVar[Life] = ContextVar("isthmus_life")


class Task(asyncio.Task[Any]):
    """A task whose place in a set does not depend on its address, so that a seed repeats the same simulation."""

    def __init__(self, coro: Any, *, number: int, **more: Any) -> None:
        self._number = number
        super().__init__(coro, **more)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class Clock:
    """An event loop for simulated lives. It has only what coroutines need that use nothing but the ports.

    `time()` is in virtual seconds since the clock was made.
    """

    def __init__(self, seed: int = 0) -> None:
        self.world = Life("world")
        """The life of callbacks that belong to no process: requests on their way, planned faults."""
        self.failures: list[dict[str, Any]] = []
        """What asyncio reported to its exception handler, and errors of callbacks. Empty in a sound simulation."""
        self._now = 0.0
        self._turns_now = 0
        self._timers: list[tuple[float, int, Handle]] = []
        self._count = 0
        self._tasks = 0
        self._awake: list[Life] = []  # lives with ready callbacks that are neither frozen nor busy
        self._busy: list[Life] = []
        self._closing = False
        self._random = random.Random(seed)
        self._loop: Any = self  # given to asyncio as its loop; it has no sockets, signals or threads
        self._closed = False
        self._running = False
        self._graveyard: list[Life] = []

    # --- the interface of an asyncio loop -----------------------------------------------------------------------------

    def time(self) -> float:
        """Return virtual seconds."""
        return self._now

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Context | None = None) -> Handle:
        """See `asyncio`. The callback belongs to the life of its context."""
        if context is None:
            context = contextvars.copy_context()
        handle = Handle(callback, args, context, context.get(_LIFE) or self.world)
        self._make_ready(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Handle:
        """See `asyncio`."""
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Handle:
        """See `asyncio`. A cancelled callback is skipped when its time comes."""
        if context is None:
            context = contextvars.copy_context()
        handle = Handle(callback, args, context, context.get(_LIFE) or self.world)
        self._count += 1
        heapq.heappush(self._timers, (when, self._count, handle))
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        """See `asyncio`."""
        return asyncio.Future(loop=self._loop)

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: Context | None = None,
        **_: Any,
    ) -> asyncio.Task[T]:
        """See `asyncio`."""
        self._tasks += 1
        return Task(coro, number=self._tasks, loop=self._loop, name=name or f"t{self._tasks}", context=context)

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Keep the context in `failures`, which the code that runs the simulation checks."""
        self.failures.append(context)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """See `call_exception_handler`."""
        self.failures.append(context)

    def get_debug(self) -> bool:
        """Return False."""
        return False

    def is_running(self) -> bool:
        """Return whether the clock is running callbacks."""
        return self._running

    def is_closed(self) -> bool:
        """Return whether the clock is closed."""
        return self._closed

    def close(self) -> None:
        """Cancel every task that is left, of ended lives too, and run until nothing is ready. Then drop all timers."""
        self._closing = True
        for life in (*self._graveyard, *self._busy):
            life.ended = life.frozen = life.busy = False
            if life.ready and life not in self._awake:
                self._awake.append(life)
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        with self._running_loop():
            self._run(lambda: not self._awake)
        self._closed = True
        self._timers.clear()
        for life in (*self._awake, *self._graveyard):
            life.ready.clear()
        self._awake.clear()

    def run_until_complete(self, future: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the world's own life until it is done; return its result. Raises `StandsStill`."""
        main = self.create_task(future, context=self.world.context)
        with self._running_loop():
            self._run(main.done)
        return main.result()

    @contextlib.contextmanager
    def _running_loop(self) -> Iterator[None]:
        hooks = sys.get_asyncgen_hooks()
        asyncio._set_running_loop(self._loop)  # documented for authors of event loops
        sys.set_asyncgen_hooks(finalizer=self._close_generator)
        self._running = True
        try:
            yield
        finally:
            self._running = False
            sys.set_asyncgen_hooks(*hooks)
            asyncio._set_running_loop(None)

    # --- lives --------------------------------------------------------------------------------------------------------

    def start(self, life: Life, body: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a coroutine in a life."""
        return self.create_task(body, context=life.context)

    def freeze(self, life: Life) -> None:
        """Stop a life: keep its callbacks that become ready, those of expired timers too, until `thaw`."""
        if not life.frozen:
            life._frozen_at = self._now
        life.frozen = True
        if life in self._awake:
            self._awake.remove(life)

    def thaw(self, life: Life) -> None:
        """Let a frozen life go on, without telling it that time has passed."""
        if life.frozen:
            life.held_up.append((life._frozen_at, self._now))
        life.frozen = False
        self._wake(life)

    def occupy(self, life: Life, seconds: float) -> None:
        """Block a life's loop for some seconds from now on, as one long callback does."""
        if life.busy:
            life.owed_s += seconds  # added to the work that it is busy with
            return
        if life.ended or self._closing:
            return
        life.busy = True
        self._busy.append(life)
        if life in self._awake:
            self._awake.remove(life)
        if seconds >= HELD_UP_S:
            life.held_up.append((self._now, self._now + seconds))
        self.call_later(seconds, self._leave, life, context=self.world.context)

    def _leave(self, life: Life) -> None:
        """Unblock the loop of a busy life, or block it for the time that it owes by now."""
        if not life.busy:
            return  # `close` has unblocked it meanwhile
        life.busy = False
        self._busy.remove(life)
        if life.owed_s >= SLICE_S and not life.ended:
            seconds, life.owed_s = life.owed_s, 0.0
            self.occupy(life, seconds)
        else:
            self._wake(life)

    def _wake(self, life: Life) -> None:
        if life.ready and not (life.frozen or life.busy or life.ended) and life not in self._awake:
            self._awake.append(life)

    def end(self, life: Life) -> None:
        """End a life at once. The requests that it has sent belong to the world and go on."""
        life.ended = True
        # The life is kept until the end, because collected coroutines would run their `finally` blocks.
        self._graveyard.append(life)
        if life in self._awake:
            self._awake.remove(life)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _make_ready(self, handle: Handle) -> None:
        life = handle.life
        life.ready.append(handle)
        if len(life.ready) == 1 and not (life.frozen or life.busy or life.ended):
            self._awake.append(life)

    def _run(self, done: Callable[[], bool]) -> None:
        """Run callbacks until `done`, each of a life drawn at random. If none is ready, let time jump."""
        awake, draw = self._awake, self._random.random  # locals, as a simulation spends a quarter of its time here
        while not done():
            if not awake:
                self._jump()
                continue
            at = int(draw() * len(awake)) if len(awake) > 1 else 0
            life = awake[at]
            handle = life.ready.popleft()
            if not life.ready:
                awake.pop(at)
            self._turns_now += 1
            if self._turns_now > TURNS_MAX:
                raise StandsStill(f"at {self._now:.3f} s {life.name} goes round in circles: {handle.callback}")
            if handle.dropped:
                continue
            try:
                handle.context.run(handle.callback, *handle.args)
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                self.failures.append({"message": f"exception in {handle.callback}", "exception": error})
            life.owed_s += life.callback_s
            if life.owed_s >= SLICE_S:
                seconds, life.owed_s = life.owed_s, 0.0
                self.occupy(life, seconds)

    def _jump(self) -> None:
        """Let time jump to the next timer and make the callbacks that are due ready. Raises `StandsStill`."""
        if not self._timers:
            raise StandsStill(f"at {self._now:.3f} s nothing is left to happen")
        timers, pop = self._timers, heapq.heappop
        now = self._now = max(self._now, timers[0][0])
        self._turns_now = 0
        while timers and timers[0][0] <= now:
            handle = pop(timers)[2]
            if not handle.dropped:
                self._make_ready(handle)

    def _close_generator(self, generator: AsyncGenerator[Any, Any]) -> None:
        self.create_task(generator.aclose())

"""A thread with an event loop, beside the caller's thread, which does one piece of work until it ends or is stopped."""

# ruff: noqa: TID251  (threads: this is one of their places)
import asyncio
import atexit
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from isthmus.errors import first_cause

Result = TypeVar("Result")

EXIT_S = 3.0
"""A thread that is stopped gets this many seconds to release what it holds."""


class LoopThread:
    """A thread that runs a coroutine on its own event loop. It is stopped when the interpreter exits."""

    def __init__(
        self,
        name: str,
        work: Callable[[], Coroutine[None, None, None]],
        failed: Callable[[BaseException], None],
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        """`failed` is called on the thread with the error that `work` raised. `ended` is called last, in any case."""
        self._work, self._failed, self._ended = work, failed, ended
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def ask(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the loop and return its result. Raises its errors. Call this once `work` has begun."""
        assert self._loop is not None, "it has begun"
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def join(self, seconds: float) -> None:
        """Wait until the thread has ended by itself, for at most `seconds`."""
        self._thread.join(seconds)

    def stop(self) -> None:
        """Cancel the work and wait up to `EXIT_S` for the thread to end."""
        loop = self._loop
        if loop is not None and self._thread.is_alive():
            with suppress(RuntimeError):  # the loop may end at this moment
                loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
            self._thread.join(EXIT_S)
        atexit.unregister(self.stop)

    def _main(self) -> None:
        async def run() -> None:
            self._loop = asyncio.get_running_loop()
            await self._work()

        try:
            asyncio.run(run())
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self._failed(first_cause(error))
        finally:
            self._ended()

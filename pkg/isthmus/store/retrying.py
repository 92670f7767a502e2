"""A store that tries again: the one place where store requests are repeated. Nothing below repeats them.

What must not be given up (a published value, a commit, a version to fetch) is asked for again above it, on a slower
clock, for as long as it takes: there `Unavailable` means that a whole series of tries came to nothing.
"""

import asyncio
from dataclasses import dataclass
from typing import TypeVar

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt

from isthmus.errors import Unavailable
from isthmus.runtime.clock import Runtime
from isthmus.store.base import Store
from isthmus.store.layer import Layer, Send

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Patience:
    """How often and how long a request is tried again: exponential back-off with full jitter."""

    attempts: int = 8
    first_s: float = 0.05
    longest_s: float = 10.0
    request_s: float | None = None
    """A request that takes longer counts as not answered; None: the store's own timeouts decide."""


RUNNING = Patience()
"""Once it has worked."""

AT_START = Patience(attempts=2, first_s=0.1, longest_s=0.5, request_s=2.5)
"""For the first, small request: an operator is watching, say it within ten seconds."""


BESIDE = Patience(attempts=2)
"""Where there is another place to ask, or somebody asks again."""


class RetryingStore(Layer):
    """Tries again on `Unavailable`.

    A create that is tried again may find its own object: it then returns False, and the caller compares the bytes
    (`Log.append` does). Everything else is idempotent, since no key ever gets other bytes.
    """

    def __init__(self, store: Store, runtime: Runtime, patience: Patience) -> None:
        super().__init__(store)
        self._runtime = runtime
        self._patience = patience

    async def _through(self, operation: str, key: str, send: Send[T]) -> T:
        # What retrying needs is set up only for the few that need it.
        try:
            return await send()
        except Unavailable:
            if self._patience.attempts == 1:
                raise
        await asyncio.sleep(self._pause_s(1))
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(Unavailable),
            stop=stop_after_attempt(self._patience.attempts - 1),
            wait=lambda state: self._pause_s(state.attempt_number + 1),
            sleep=asyncio.sleep,
            reraise=True,
        ):
            with attempt:
                return await send()
        raise AssertionError("unreachable: tenacity re-raises")

    def _pause_s(self, attempt: int) -> float:
        """Return how long to wait after so many attempts."""
        ceiling_s = min(self._patience.longest_s, self._patience.first_s * 2.0 ** (attempt - 1))
        return ceiling_s * self._runtime.random.random()

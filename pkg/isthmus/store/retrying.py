"""A store that retries requests. Whole requests are retried only here, in no layer below.

Callers repeat what must not be given up (a published value, a commit, a version to fetch), more slowly and for as long
as it takes. For them `Unavailable` means that a whole series of tries failed.
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
    """How often and how long a request is retried: exponential back-off with full jitter."""

    attempts: int = 8
    first_s: float = 0.05
    longest_s: float = 10.0
    request_s: float | None = None
    """A request that takes longer [s] counts as not answered; None: the store's own timeouts decide."""


RUNNING = Patience()
"""For all requests after the start."""

AT_START = Patience(attempts=2, first_s=0.1, longest_s=0.5, request_s=2.5)
"""For the first, small requests: an operator is watching and should see a failure within ten seconds."""


BESIDE = Patience(attempts=2)
"""For buckets beside the run's own: there is another place to ask, or the caller asks again."""


ONCE = Patience(attempts=1, request_s=5.0)
"""For the bus: whatever matters is said again, and the next look for messages comes soon."""


class RetryingStore(Layer):
    """Retries requests that raise `Unavailable`.

    A create that is retried may find its own object. It then returns False, and the caller compares the bytes
    (`Log.append` does). All other operations are idempotent, since a key never gets other bytes.
    """

    def __init__(self, store: Store, runtime: Runtime, patience: Patience) -> None:
        super().__init__(store)
        self._runtime = runtime
        self._patience = patience

    async def _through(self, operation: str, key: str, send: Send[T]) -> T:
        # Retrying is set up only for the few requests that fail the first time.
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
        """Return how long to wait [s] after this many attempts."""
        ceiling_s = min(self._patience.longest_s, self._patience.first_s * 2.0 ** (attempt - 1))
        return ceiling_s * self._runtime.random.random()

"""The one place where store requests are retried, timed and counted. Nothing below retries them.

What must not be given up (a published value, a commit, a version to fetch) is asked for again above it, on a slower
clock, for as long as it takes: there `Unavailable` means that a whole series of tries came to nothing.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt

from isthmus.errors import Denied, ObjectMissing, Unavailable
from isthmus.metrics import Metrics
from isthmus.records.frame import Blob
from isthmus.runtime import Runtime
from isthmus.store.base import Entry, Store

T = TypeVar("T")


@dataclass(slots=True)
class Traffic:
    """What went over the wire: objects and their bytes, each counted once it was through."""

    bytes_up: int = 0
    bytes_down: int = 0
    requests: int = 0
    retries: int = 0


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


class EdgeStore:
    """A store that tries again on `Unavailable`, and knows for how long it has not been heard from.

    A create that is tried again may find its own object: it then returns False, and the caller compares the bytes
    (`log.append` does). Everything else is idempotent, since no key ever gets other bytes.
    """

    def __init__(self, store: Store, runtime: Runtime, patience: Patience = RUNNING) -> None:
        self.url = store.url
        self.traffic = Traffic()
        self.patience = patience
        self.metrics: Metrics | None = None
        """Where requests are counted, once an agent has said so."""
        self.answered_at: float | None = None
        """When the store last answered, on the runtime's clock."""
        self._store = store
        self.runtime = runtime
        self._down_since: float | None = None
        self._open: dict[int, float] = {}  # when each request under way was sent
        self._sent = 0

    @property
    def hung_s(self) -> float:
        """Seconds for which a request has been waited for in vain while no other was answered; 0 where none has."""
        if not self._open:
            return 0.0
        return max(0.0, self.runtime.now() - max(min(self._open.values()), self.answered_at or 0.0))

    @property
    def down_s(self) -> float:
        """Seconds since the store was last reached; 0 while it answers."""
        return 0.0 if self._down_since is None else self.runtime.now() - self._down_since

    async def get(self, key: str) -> bytearray:
        """See `Store.get`."""
        data = await self._try("get", lambda: self._store.get(key))
        self._count(down=len(data))
        return data

    async def get_range(self, key: str, start: int, stop: int) -> bytearray:
        """See `Store.get_range`."""
        data = await self._try("get", lambda: self._store.get_range(key, start, stop))
        self._count(down=len(data))
        return data

    async def put(self, key: str, data: Blob) -> None:
        """See `Store.put`."""
        await self._try("put", lambda: self._store.put(key, data))
        self._count(up=len(data))

    async def create(self, key: str, data: Blob) -> bool:
        """See `Store.create`."""
        created = await self._try("create", lambda: self._store.create(key, data))
        self._count(up=len(data))
        return created

    async def list(self, prefix: str) -> Sequence[Entry]:
        """See `Store.list`."""
        return await self._try("list", lambda: self._store.list(prefix))

    async def delete(self, key: str) -> None:
        """See `Store.delete`."""
        await self._try("delete", lambda: self._store.delete(key))

    def _count(self, *, up: int = 0, down: int = 0) -> None:
        self.traffic.bytes_up += up
        self.traffic.bytes_down += down
        if self.metrics is not None:
            self.metrics.store_bytes.labels("up").inc(up)
            self.metrics.store_bytes.labels("down").inc(down)

    async def _try(self, operation: str, request: Callable[[], Awaitable[T]]) -> T:
        # What retrying needs is set up only for the few that need it.
        try:
            return await self._once(operation, request)
        except Unavailable:
            if self.patience.attempts == 1:
                raise
        await asyncio.sleep(self._pause(1))
        async for attempt in AsyncRetrying(
            retry=retry_if_exception_type(Unavailable),
            stop=stop_after_attempt(self.patience.attempts - 1),
            wait=lambda state: self._pause(state.attempt_number + 1),
            sleep=asyncio.sleep,
            reraise=True,
        ):
            with attempt:
                return await self._once(operation, request)
        raise AssertionError("unreachable: tenacity re-raises")

    async def _once(self, operation: str, request: Callable[[], Awaitable[T]]) -> T:
        self.traffic.requests += 1
        self._sent += 1
        number, started = self._sent, self.runtime.now()
        self._open[number] = started
        try:
            result = await self._in_time(request)
        except Unavailable:
            if self._down_since is None:
                self._down_since = self.runtime.now()
            self.traffic.retries += 1
            if self.metrics is not None:
                self.metrics.store_failures.labels(operation).inc()
            raise
        except (ObjectMissing, Denied):
            self._answered(operation, started)
            raise
        finally:
            del self._open[number]
        self._answered(operation, started)
        return result

    def _answered(self, operation: str, started: float) -> None:
        """Note an answer, be it a refusal."""
        self._down_since = None
        self.answered_at = self.runtime.now()
        if self.metrics is not None:
            self.metrics.store_seconds.labels(operation).observe(self.answered_at - started)

    async def _in_time(self, request: Callable[[], Awaitable[T]]) -> T:
        try:
            async with asyncio.timeout(self.patience.request_s):
                return await request()
        except TimeoutError:
            raise Unavailable(f"{self.url}: no answer within {self.patience.request_s:g} s") from None

    def _pause(self, attempt: int) -> float:
        """Return the seconds to wait after so many attempts."""
        ceiling = min(self.patience.longest_s, self.patience.first_s * 2.0 ** (attempt - 1))
        return ceiling * self.runtime.random.random()

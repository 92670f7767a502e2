"""A bus that measures requests and passes them on to another bus."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from typing_extensions import override

from isthmus.bus.base import Bus, BusItem, Refusing
from isthmus.errors import Unavailable
from isthmus.runtime.clock import Runtime

if TYPE_CHECKING:
    from isthmus.runtime.metrics import Metrics

T = TypeVar("T")


class TimedBus(Bus):
    """Counts failures of all requests and measures their durations, except of reads: those wait for messages."""

    def __init__(self, bus: Bus, metrics: "Metrics", runtime: Runtime) -> None:
        self.url, self.polled = bus.url, bus.polled
        self._bus = bus
        self._metrics = metrics
        self._runtime = runtime

    @override
    def hurry(self) -> None:
        self._bus.hurry()

    @override
    async def append(self, stream: str, *bodies: bytes) -> None:
        await self._measure("append", lambda: self._bus.append(stream, *bodies))

    @override
    async def read(self, positions: Mapping[str, str], timeout_s: float) -> Mapping[str, Sequence[BusItem]]:
        try:
            return await self._bus.read(positions, timeout_s)
        except Unavailable:
            self._metrics.bus_failures.labels("read").inc()
            raise

    @override
    async def ago(self, streams: Sequence[str], seconds: float) -> Mapping[str, str]:
        return await self._measure("ago", lambda: self._bus.ago(streams, seconds))

    @override
    async def tail(self, stream: str) -> str:
        return await self._measure("tail", lambda: self._bus.tail(stream))

    @override
    async def names(self, within_s: float | None = None) -> set[str]:
        return await self._measure("names", lambda: self._bus.names(within_s))

    @override
    async def refusing(self) -> Refusing | None:
        return await self._bus.refusing()

    async def _measure(self, operation: str, request: Callable[[], Awaitable[T]]) -> T:
        started = self._runtime.now()
        try:
            result = await request()
        except Unavailable:
            self._metrics.bus_failures.labels(operation).inc()
            raise
        self._metrics.bus_seconds.labels(operation).observe(self._runtime.now() - started)
        return result

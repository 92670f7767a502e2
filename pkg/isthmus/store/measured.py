"""A store that counts and measures requests, each try by itself."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from typing_extensions import override

from isthmus.errors import Denied, ObjectMissing, Unavailable
from isthmus.format.records.frame import Blob, Body, Data
from isthmus.runtime.clock import Runtime
from isthmus.store.base import Store
from isthmus.store.layer import Layer, Send

if TYPE_CHECKING:
    from isthmus.runtime.metrics import Metrics

T = TypeVar("T")


@dataclass(slots=True)
class Traffic:
    """Counts of what went over the wire: object bytes of answered requests, all requests, and unanswered ones."""

    bytes_up: int = 0
    bytes_down: int = 0
    requests: int = 0
    retries: int = 0


class MeasuredStore(Layer):
    """Counts bytes, requests and failures, and measures how long answers take [s]."""

    def __init__(self, store: Store, runtime: Runtime, traffic: Traffic, metrics: "Metrics | None") -> None:
        super().__init__(store)
        self._runtime = runtime
        self._traffic = traffic
        self._metrics = metrics

    @override
    async def get(self, key: str) -> Body:
        return self._down(await super().get(key))

    @override
    async def get_range(self, key: str, start: int, stop: int) -> Body:
        return self._down(await super().get_range(key, start, stop))

    @override
    async def put(self, key: str, data: Data) -> None:
        await super().put(key, data)
        self._up(data)

    @override
    async def create(self, key: str, data: Blob) -> bool:
        created = await super().create(key, data)
        self._up(data)
        return created

    async def _through(self, operation: str, key: str, send: Send[T]) -> T:
        self._traffic.requests += 1
        started = self._runtime.now()
        try:
            result = await send()
        except Unavailable:
            self._traffic.retries += 1
            if self._metrics is not None:
                self._metrics.store_failures.labels(operation).inc()
            raise
        except (ObjectMissing, Denied):
            self._answered(operation, started)
            raise
        self._answered(operation, started)
        return result

    def _answered(self, operation: str, started: float) -> None:
        if self._metrics is not None:
            self._metrics.store_seconds.labels(operation).observe(self._runtime.now() - started)

    def _up(self, data: Data) -> None:
        self._traffic.bytes_up += len(data)
        if self._metrics is not None:
            self._metrics.store_bytes.labels("up").inc(len(data))

    def _down(self, data: Body) -> Body:
        self._traffic.bytes_down += len(data)
        if self._metrics is not None:
            self._metrics.store_bytes.labels("down").inc(len(data))
        return data

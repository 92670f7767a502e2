"""What stands between everybody and a store: time limit, watch, measure and retry, stacked in this order."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from typing_extensions import override

from isthmus.errors import Unavailable
from isthmus.format.records.frame import Blob, Body, Data
from isthmus.runtime.clock import Runtime
from isthmus.store.base import Entry, Store
from isthmus.store.limited import LimitedStore
from isthmus.store.measured import MeasuredStore, Traffic
from isthmus.store.regions import Regions
from isthmus.store.retrying import AT_START, RUNNING, Patience, RetryingStore
from isthmus.store.watched import Outage, WatchedStore

if TYPE_CHECKING:
    from isthmus.runtime.metrics import Metrics


class EdgeStore(RetryingStore):
    """A store that tries again, and knows what went through it and for how long it has not been heard from.

    Where another patience or somebody's metrics are wanted, `with_patience` and `measured_by` put other layers before
    the same store; what is known of it (`outage`, `traffic`) they have in common.
    """

    def __init__(
        self,
        store: Store,
        runtime: Runtime,
        patience: Patience = RUNNING,
        metrics: "Metrics | None" = None,
        *,
        outage: Outage | None = None,
        traffic: Traffic | None = None,
        regions: Regions | None = None,
    ) -> None:
        """`regions`: the ways to buckets beside this one."""
        self.runtime = runtime
        self.traffic = traffic or Traffic()
        self.outage = outage or Outage(runtime)
        self.regions = regions
        self.landmark = ""
        """A prefix below which there always is something, once a run is known to be there. A listing that has nothing
        is believed only from a store that lists this: obstore takes a page that a gateway makes up for an empty one."""
        self._before = store
        self._metrics = metrics
        limited = store if patience.request_s is None else LimitedStore(store, patience.request_s)
        watched = WatchedStore(limited, self.outage)
        super().__init__(MeasuredStore(watched, runtime, self.traffic, metrics), runtime, patience)

    def with_patience(self, patience: Patience) -> "EdgeStore":
        """Return the same store, tried again like this."""
        return self._restacked(patience, self._metrics)

    def measured_by(self, metrics: "Metrics") -> "EdgeStore":
        """Return the same store with its requests counted there."""
        return self._restacked(self._patience, metrics)

    @property
    def at_start(self) -> "EdgeStore":
        """The same store for the first requests: what is not there is said within seconds."""
        return self.with_patience(AT_START)

    def _restacked(self, patience: Patience, metrics: "Metrics | None") -> "EdgeStore":
        edge = EdgeStore(
            self._before, self.runtime, patience, metrics,
            outage=self.outage, traffic=self.traffic, regions=self.regions,
        )  # fmt: skip
        edge.landmark = self.landmark
        return edge

    @override
    async def get(self, key: str) -> Body:
        if self.regions is None:
            return await super().get(key)
        return await self.regions.read(key, lambda store: store.get(key), lambda: super(EdgeStore, self).get(key))

    @override
    async def get_range(self, key: str, start: int, stop: int) -> Body:
        if self.regions is None:
            return await super().get_range(key, start, stop)
        return await self.regions.read(
            key,
            lambda store: store.get_range(key, start, stop),
            lambda: super(EdgeStore, self).get_range(key, start, stop),
        )

    @override
    async def put(self, key: str, data: Data) -> None:
        if self.regions is None:
            return await super().put(key, data)
        return await self.regions.put(
            key, lambda store: store.put(key, data), lambda: super(EdgeStore, self).put(key, data)
        )

    @override
    async def create(self, key: str, data: Blob) -> bool:
        if self.regions is None:
            return await super().create(key, data)
        return await self.regions.create(
            key, lambda store: store.create(key, data), lambda: super(EdgeStore, self).create(key, data)
        )

    @override
    async def list(self, prefix: str) -> Sequence[Entry]:
        found = await self._listed(prefix)
        if found or not self.landmark:
            return found
        if not await self._listed(self.landmark):
            raise Unavailable(
                f"{self.url}: it lists nothing, not even what is there ({self.landmark}): a gateway in between has "
                "answered, or somebody has deleted it"
            )
        return await self._listed(prefix)

    async def _listed(self, prefix: str) -> Sequence[Entry]:
        if self.regions is None:
            return await super().list(prefix)
        return await self.regions.list(prefix, lambda: super(EdgeStore, self).list(prefix))

    @override
    async def delete(self, key: str) -> None:
        if self.regions is None:
            return await super().delete(key)
        return await self.regions.delete(
            key, lambda store: store.delete(key), lambda: super(EdgeStore, self).delete(key)
        )

"""The layers around every store: time limit, watch, measure and retry, from the inside out."""

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
from isthmus.store.retrying import AT_START, ONCE, RUNNING, Patience, RetryingStore
from isthmus.store.watched import Outage, WatchedStore

if TYPE_CHECKING:
    from isthmus.runtime.metrics import Metrics


class EdgeStore(RetryingStore):
    """A store that retries requests, counts its traffic, and records since when the store below has not answered.

    `with_patience` and `measured_by` put new layers around the same store, with another patience or with metrics. All
    of them share `outage` and `traffic`.
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
        """`regions`: access to the buckets beside this one."""
        self.runtime = runtime
        self.traffic = traffic or Traffic()
        self.outage = outage or Outage(runtime)
        self.regions = regions
        self.landmark = ""
        """A prefix with at least one object, once the run is known to exist; empty: none.

        An empty listing is believed only if the store lists this prefix: obstore reads a page that a gateway made up as
        an empty listing.
        """
        self._before = store
        self._metrics = metrics
        limited = store if patience.request_s is None else LimitedStore(store, patience.request_s)
        watched = WatchedStore(limited, self.outage)
        super().__init__(MeasuredStore(watched, runtime, self.traffic, metrics), runtime, patience)

    def with_patience(self, patience: Patience) -> "EdgeStore":
        """Return the same store with another patience."""
        return self._restacked(patience, self._metrics)

    def measured_by(self, metrics: "Metrics") -> "EdgeStore":
        """Return the same store, counting its requests in these metrics."""
        return self._restacked(self._patience, metrics)

    @property
    def at_start(self) -> "EdgeStore":
        """The same store for the first requests: it reports a failure within seconds."""
        return self.with_patience(AT_START)

    @property
    def for_bus(self) -> "EdgeStore":
        """The same store for messages: nothing is tried twice, and their bytes are not those of the run's objects."""
        return EdgeStore(self._before, self.runtime, ONCE, outage=self.outage)

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
                f"{self.url}: its listing is empty, although {self.landmark} exists: a gateway in between has "
                "answered, or another process has deleted it"
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

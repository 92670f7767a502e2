"""What stands between everybody and a store: time limit, watch, measure and retry, stacked in this order."""

from typing import TYPE_CHECKING

from isthmus.runtime import Runtime
from isthmus.store.base import Store
from isthmus.store.limited import LimitedStore
from isthmus.store.measured import MeasuredStore, Traffic
from isthmus.store.retrying import AT_START, RUNNING, Patience, RetryingStore
from isthmus.store.watched import Outage, WatchedStore

if TYPE_CHECKING:
    from isthmus.metrics import Metrics


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
    ) -> None:
        self.runtime = runtime
        self.traffic = traffic or Traffic()
        self.outage = outage or Outage(runtime)
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
        return EdgeStore(self._before, self.runtime, patience, metrics, outage=self.outage, traffic=self.traffic)

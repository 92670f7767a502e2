"""A store that records when it last answered."""

from typing import TypeVar

from isthmus.errors import Denied, ObjectMissing, Unavailable
from isthmus.runtime.clock import Runtime
from isthmus.store.base import Store
from isthmus.store.layer import Layer, Send

T = TypeVar("T")


class Outage:
    """Records for how long a store has not answered, on the runtime's clock."""

    def __init__(self, runtime: Runtime) -> None:
        self.answered_at: float | None = None
        """When the store last answered, if only with `Denied` or `ObjectMissing`; None: never yet."""
        self._runtime = runtime
        self._down_since: float | None = None
        self._open: dict[int, float] = {}  # when each open request was sent, by its number
        self._sent = 0

    @property
    def down_s(self) -> float:
        """Seconds since the first request that failed after the last answer; 0 while the store answers."""
        return 0.0 if self._down_since is None else self._runtime.now() - self._down_since

    @property
    def hung_s(self) -> float:
        """Seconds for which the oldest open request has waited without any answer from the store; 0 if none is open."""
        if not self._open:
            return 0.0
        return max(0.0, self._runtime.now() - max(min(self._open.values()), self.answered_at or 0.0))

    def sent(self) -> int:
        """Note that a request was sent; return its number."""
        self._sent += 1
        self._open[self._sent] = self._runtime.now()
        return self._sent

    def ended(self, number: int) -> None:
        """Note that a request has ended, for whatever reason."""
        del self._open[number]

    def answered(self) -> None:
        """Note an answer, if only `Denied` or `ObjectMissing`."""
        self._down_since = None
        self.answered_at = self._runtime.now()

    def failed(self) -> None:
        """Note that a request was not answered."""
        if self._down_since is None:
            self._down_since = self._runtime.now()


class WatchedStore(Layer):
    """Reports the outcome of every request to an `Outage`."""

    def __init__(self, store: Store, outage: Outage) -> None:
        super().__init__(store)
        self._outage = outage

    async def _through(self, operation: str, key: str, send: Send[T]) -> T:
        number = self._outage.sent()
        try:
            result = await send()
        except Unavailable:
            self._outage.failed()
            raise
        except (ObjectMissing, Denied):
            self._outage.answered()
            raise
        finally:
            self._outage.ended(number)
        self._outage.answered()
        return result

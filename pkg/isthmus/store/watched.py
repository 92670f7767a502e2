"""A store of which is known when it last answered."""

from typing import TypeVar

from isthmus.errors import Denied, ObjectMissing, Unavailable
from isthmus.runtime.clock import Runtime
from isthmus.store.base import Store
from isthmus.store.layer import Layer, Send

T = TypeVar("T")


class Outage:
    """For how long a store has not been heard from, on the runtime's clock."""

    def __init__(self, runtime: Runtime) -> None:
        self.answered_at: float | None = None
        """When the store last answered, be it with a refusal; None: never yet."""
        self._runtime = runtime
        self._down_since: float | None = None
        self._open: dict[int, float] = {}  # when each request under way was sent
        self._sent = 0

    @property
    def down_s(self) -> float:
        """Seconds since the store was last reached; 0 while it answers."""
        return 0.0 if self._down_since is None else self._runtime.now() - self._down_since

    @property
    def hung_s(self) -> float:
        """Seconds for which a request has been waited for in vain while no other was answered; 0 where none has."""
        if not self._open:
            return 0.0
        return max(0.0, self._runtime.now() - max(min(self._open.values()), self.answered_at or 0.0))

    def sent(self) -> int:
        """Note that a request is under way; return its number."""
        self._sent += 1
        self._open[self._sent] = self._runtime.now()
        return self._sent

    def ended(self, number: int) -> None:
        """Note that a request is under way no longer, for whatever reason."""
        del self._open[number]

    def answered(self) -> None:
        """Note an answer, be it a refusal."""
        self._down_since = None
        self.answered_at = self._runtime.now()

    def failed(self) -> None:
        """Note that there was no answer."""
        if self._down_since is None:
            self._down_since = self._runtime.now()


class WatchedStore(Layer):
    """Tells an `Outage` what became of every request."""

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

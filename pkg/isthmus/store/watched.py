"""A store that records when it last answered."""

from collections.abc import Callable
from typing import TypeVar

from isthmus.errors import Denied, ObjectMissing, TakesNoWrites, Unavailable, told
from isthmus.runtime.clock import Runtime
from isthmus.store.base import Store
from isthmus.store.layer import Layer, Send

T = TypeVar("T")

WRITES = ("put", "create")
"""What a full store refuses. It still deletes."""

LATELY_S = 60.0
"""A write that failed longer ago says nothing about now."""


class Outage:
    """Records for how long a store has not answered, on the runtime's clock."""

    def __init__(self, runtime: Runtime) -> None:
        self.answered_at: float | None = None
        """When the store last answered, if only with `Denied` or `ObjectMissing`; None: never yet."""
        self.why = ""
        """What the last request said that failed."""
        self.over: Callable[[float], None] = lambda _: None
        """Called at each answer, with the seconds since the first request that was sent after the last one."""
        self._runtime = runtime
        self._down_since: float | None = None
        self._unwritten_since: float | None = None
        self._unwritten_at = 0.0
        self._open: dict[int, float] = {}  # when each open request was sent, by its number
        self._asked_at: float | None = None  # when the first request after the last answer was sent, or was open
        self._sent = 0

    @property
    def down_s(self) -> float:
        """Seconds since the first request that failed after the last answer; 0 while the store answers."""
        return 0.0 if self._down_since is None else self._runtime.now() - self._down_since

    @property
    def unwritten_s(self) -> float:
        """Seconds since the first write that failed after the last one that was answered; 0 if writes work.

        A store that is full or read-only answers all other requests.
        """
        if self._unwritten_since is None or self._runtime.now() - self._unwritten_at > LATELY_S:
            return 0.0
        return self._runtime.now() - self._unwritten_since

    @property
    def hung_s(self) -> float:
        """Seconds for which the oldest open request has waited without any answer from the store; 0 if none is open."""
        if not self._open:
            return 0.0
        return max(0.0, self._runtime.now() - max(min(self._open.values()), self.answered_at or 0.0))

    def sent(self) -> int:
        """Note that a request was sent; return its number."""
        self._sent += 1
        now = self._open[self._sent] = self._runtime.now()
        self._asked_at = now if self._asked_at is None else self._asked_at
        return self._sent

    def ended(self, number: int) -> None:
        """Note that a request has ended, for whatever reason. One that was cancelled says nothing of the store."""
        del self._open[number]
        if not self._open and self._down_since is None:
            self._asked_at = None

    def answered(self, operation: str) -> None:
        """Note an answer, if only `Denied` or `ObjectMissing`, before its request is noted as ended."""
        now = self._runtime.now()
        asked_at, self._asked_at = self._asked_at, now
        self._down_since = None
        if operation in WRITES:
            self._unwritten_since = None
        self.answered_at = now
        self.over(0.0 if asked_at is None else now - asked_at)

    def failed(self, operation: str, why: str, *, answered: bool = False) -> None:
        """Note that a request failed, and the error's text. `answered`: the store answered, and refused the write."""
        self.why, now = why, self._runtime.now()
        if answered:
            self.answered("")
        elif self._down_since is None:
            self._down_since = now
        if operation in WRITES:
            if self._unwritten_since is None or now - self._unwritten_at > LATELY_S:
                self._unwritten_since = now
            self._unwritten_at = now


class WatchedStore(Layer):
    """Reports the outcome of every request to an `Outage`."""

    def __init__(self, store: Store, outage: Outage) -> None:
        super().__init__(store)
        self._outage = outage

    async def _through(self, operation: str, key: str, send: Send[T]) -> T:
        number = self._outage.sent()
        try:
            result = await send()
            self._outage.answered(operation)
        except Unavailable as error:
            self._outage.failed(operation, told(error), answered=isinstance(error, TakesNoWrites))
            raise
        except (ObjectMissing, Denied):
            self._outage.answered(operation)
            raise
        finally:
            self._outage.ended(number)
        return result

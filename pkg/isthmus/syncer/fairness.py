"""One learner gets no more than its share of a syncer: of its attention (`FairQueue`) and of its fetches (`FairSlots`).

Both serve whoever is there in turn, and bound what each may have waiting. What is dropped is counted by name; whatever
matters is said again.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

SLOW_MAX = 1024
"""Users remembered as slow."""

T = TypeVar("T")
Own = TypeVar("Own")


class FairQueue(Generic[T]):
    """A bounded queue per author, served in turn; the owner's own events go before everybody's."""

    def __init__(self, each: int, total: int, dropped: Callable[[str], None]) -> None:
        """`each`: events of one author that wait at most, fewer where many wait; `dropped` is told whose was lost."""
        self._each = each
        self._total = total
        self._dropped = dropped
        self._own: deque[T] = deque()
        self._waiting: dict[str, deque[T]] = {}  # in order of their turns
        self._size = 0
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._own) + self._size

    def put_own(self, event: T) -> None:
        """Add an event of the owner's; those are few, and never dropped."""
        self._own.append(event)
        self._filled.set()

    def put(self, author: str, event: T) -> None:
        """Add an author's event. Where too many of its own wait, the oldest is dropped: newer words say more."""
        queue = self._waiting.setdefault(author, deque())
        queue.append(event)
        self._size += 1
        if len(queue) > min(self._each, max(1, self._total // len(self._waiting))):
            queue.popleft()
            self._size -= 1
            self._dropped(author)
        self._filled.set()

    def take_own(self, kind: type[Own]) -> list[Own]:
        """Take the owner's events of one kind out of turn."""
        taken = [event for event in self._own if isinstance(event, kind)]
        self._own = deque(event for event in self._own if not isinstance(event, kind))
        return taken

    async def get(self) -> T:
        """Return the next event, waiting for one."""
        while not self:
            self._filled.clear()
            await self._filled.wait()
        return self.get_nowait()

    def get_nowait(self) -> T:
        """Return the next event. Raises `IndexError` where there is none."""
        if self._own:
            return self._own.popleft()
        if not self._waiting:
            raise IndexError("nothing waits")
        author, queue = next(iter(self._waiting.items()))
        event = queue.popleft()
        self._size -= 1
        del self._waiting[author]
        if queue:
            self._waiting[author] = queue  # behind all others
        return event


@dataclass(eq=False, slots=True)
class _Turn:
    """Somebody who waits for a slot."""

    user: str
    comes: asyncio.Future[None]
    begun: Callable[[], None]
    told: bool = False


class FairSlots:
    """A pool of slots in which one user holds at most a share, and only one after it held one for too long."""

    def __init__(self, total: int, each: int) -> None:
        self._free = total
        self._each = each
        self._held: dict[str, int] = {}
        self._slow: set[str] = set()
        self._waiting: deque[_Turn] = deque()

    @asynccontextmanager
    async def slot(self, user: str, begun: Callable[[], None] = lambda: None) -> AsyncIterator[None]:
        """Hold a slot; wait for one where none is free, or the user has its share.

        `begun` is called once it waits for nobody but the user's own others any more.
        """
        if self._waiting or not self._may(user):
            turn = _Turn(user, asyncio.get_running_loop().create_future(), begun)
            self._waiting.append(turn)
            try:
                self._serve()
                await turn.comes
            except BaseException:
                if turn.comes.done() and not turn.comes.cancelled():
                    self._give_back(user)
                else:
                    self._waiting = deque(other for other in self._waiting if other is not turn)
                raise
        else:
            self._take(user)
            begun()
        try:
            yield
        finally:
            self._give_back(user)

    def judge(self, user: str, slow: bool) -> None:
        """Note whether a user's last slot was held until its time was over."""
        if slow and len(self._slow) >= SLOW_MAX:
            self._slow.clear()
        (self._slow.add if slow else self._slow.discard)(user)

    def _may(self, user: str) -> bool:
        return self._free > 0 and self._held.get(user, 0) < (1 if user in self._slow else self._each)

    def _take(self, user: str) -> None:
        self._free -= 1
        self._held[user] = self._held.get(user, 0) + 1

    def _give_back(self, user: str) -> None:
        self._free += 1
        self._held[user] -= 1
        if not self._held[user]:
            del self._held[user]
        self._serve()

    def _serve(self) -> None:
        """Hand free slots to those who wait, in order, passing over whoever has its share."""
        passed_over: deque[_Turn] = deque()
        while self._waiting and self._free > 0:
            turn = self._waiting.popleft()
            if turn.comes.done():
                continue  # cancelled
            may = self._may(turn.user)
            if may:
                self._take(turn.user)
                turn.comes.set_result(None)
            else:
                passed_over.append(turn)
            if not turn.told:
                turn.told = True
                turn.begun()
        passed_over.extend(self._waiting)
        self._waiting = passed_over

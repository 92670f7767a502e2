"""Fair shares of a syncer: of its message handling (`FairQueue`) and of its fetches (`FairSlots`).

Both serve authors or users in turn and limit the share of each. Dropped messages are counted by author; important
messages are repeated by their authors.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

SLOW_MAX = 1024
"""The most users that are remembered as slow."""

T = TypeVar("T")
Own = TypeVar("Own")


class FairQueue(Generic[T]):
    """A bounded queue per author, served in turn. Events of the queue's owner are served first."""

    def __init__(self, each: int, total: int, dropped: Callable[[str], None]) -> None:
        """`each`: the most events of one author that wait; fewer if many authors wait. `total`: the most in all.
        `dropped` is called with the author of each dropped event."""
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
        """Add an event of the owner. These events are few, and are never dropped."""
        self._own.append(event)
        self._filled.set()

    def put(self, author: str, event: T) -> None:
        """Add an author's event. If too many of that author's wait, its oldest is dropped, as newer messages say
        more."""
        queue = self._waiting.setdefault(author, deque())
        queue.append(event)
        self._size += 1
        if len(queue) > min(self._each, max(1, self._total // len(self._waiting))):
            queue.popleft()
            self._size -= 1
            self._dropped(author)
        self._filled.set()

    def take_own(self, kind: type[Own]) -> list[Own]:
        """Remove the owner's events of one kind, and return them."""
        taken = [event for event in self._own if isinstance(event, kind)]
        self._own = deque(event for event in self._own if not isinstance(event, kind))
        return taken

    async def get(self) -> T:
        """Return the next event; wait until there is one."""
        while not self:
            self._filled.clear()
            await self._filled.wait()
        return self.get_nowait()

    def get_nowait(self) -> T:
        """Return the next event. Raises `IndexError` if there is none."""
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
    """A wait for a slot."""

    user: str
    comes: asyncio.Future[None]
    begun: Callable[[], None]
    told: bool = False


class FairSlots:
    """A pool of slots in which each user holds at most a share, or one slot after it was judged slow."""

    def __init__(self, total: int, each: int) -> None:
        self._free = total
        self._each = each
        self._held: dict[str, int] = {}
        self._slow: set[str] = set()
        self._waiting: deque[_Turn] = deque()

    @asynccontextmanager
    async def slot(self, user: str, begun: Callable[[], None] = lambda: None) -> AsyncIterator[None]:
        """Hold a slot; wait for one if none is free or the user has its share.

        `begun` is called when the user gets the slot, or when it waits only because of the user's own other slots.
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
        """Note whether a user is slow: its last slot was held until the time limit."""
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
        """Hand free slots to the waiting users, in order, passing over users that have their share."""
        passed_over: deque[_Turn] = deque()
        while self._waiting and self._free > 0:
            turn = self._waiting.popleft()
            if turn.comes.done():
                continue  # the wait was cancelled
            may = self._may(turn.user)
            if may:
                self._take(turn.user)
                turn.comes.set_result(None)
            else:
                passed_over.append(turn)
            if not turn.told:
                turn.told = True
                turn.begun()
        self._waiting.extendleft(reversed(passed_over))

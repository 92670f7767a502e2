"""What the fragments of one syncer share: places in line, and tallies."""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field

from isthmus.rounds.admission import Admission
from isthmus.syncer.fairness import FairSlots
from isthmus.syncer.inbox import Fetched

DROPPED_MAX = 1024
"""Names of which dropped messages are counted one by one."""


class ReadAhead:
    """Updates that were read for a round that closed before: the next round takes them, and they are not read again.

    Bounded; whatever is the oldest goes first, and would be read again.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._updates: OrderedDict[tuple[int, bytes], Fetched] = OrderedDict()

    def put(self, fragment: int, fetched: Fetched) -> None:
        """Keep an update of a fragment."""
        self._updates[fragment, fetched.pointer.digest] = fetched
        while len(self._updates) > self._most:
            self._updates.popitem(last=False)

    def take(self, fragment: int, digest: bytes) -> Fetched | None:
        """Return an update that was kept, which is not kept any more; None where there is none."""
        return self._updates.pop((fragment, digest), None)


@dataclass(slots=True)
class Limits:
    """What the fragments of one syncer share."""

    accumulators: asyncio.Semaphore
    fetches: FairSlots
    kept: ReadAhead
    admission: Admission
    looks: asyncio.Semaphore
    folds: asyncio.Semaphore
    merges: asyncio.Semaphore
    snapshots: asyncio.Semaphore


@dataclass(slots=True)
class Tallies:
    """What a syncer did since it started."""

    commits: int = 0
    commits_lost: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    """Messages that found too many before them, by author."""

    def drop(self, author: str) -> None:
        """Count a dropped message."""
        if author in self.dropped or len(self.dropped) < DROPPED_MAX:
            self.dropped[author] = self.dropped.get(author, 0) + 1

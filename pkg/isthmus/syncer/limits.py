"""What the fragments of one syncer share: limits, updates read ahead, and tallies."""

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from isthmus.log.manifests import Manifests
from isthmus.rounds.admission import Admission
from isthmus.syncer.fairness import FairSlots
from isthmus.syncer.inbox import Fetched

DROPPED_MAX = 1024
"""The most authors of which dropped messages are counted."""

DROPPED_S = 60.0
"""Dropped messages are reported for this long after the last one."""


class ReadAhead:
    """Updates that were read too late for their round. The next round takes them, so that they are not read again.

    Bounded: the oldest update is dropped first, and is then read again.
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
        """Remove an update and return it; None if it is not kept."""
        return self._updates.pop((fragment, digest), None)


@dataclass(slots=True)
class Limits:
    """The limits that the fragments of one syncer share."""

    accumulators: asyncio.Semaphore
    fetches: FairSlots
    kept: ReadAhead
    manifests: Manifests
    admission: Admission
    looks: asyncio.Semaphore
    folds: asyncio.Semaphore
    merges: asyncio.Semaphore
    snapshots: asyncio.Semaphore
    look: Callable[[], None]
    """Notices that this process stood still. Called before a round is closed or committed."""


@dataclass(slots=True)
class Tallies:
    """Counts of what a syncer has done since it started."""

    commits: int = 0
    races_lost: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    """Messages that were dropped because too many waited, by author; none of them long before the last one."""
    turned_away: dict[str, str] = field(default_factory=dict)
    """By learner: for which reason its newest update was rejected for its manifest."""
    dropped_at: float = -math.inf
    """When the last message was dropped [s]."""

    def lately_dropped(self, now: float) -> Mapping[str, int]:
        """Return how many messages of each author were dropped; nothing once none was dropped for `DROPPED_S`."""
        return self.dropped if now - self.dropped_at <= DROPPED_S else {}

    def drop(self, author: str, now: float) -> None:
        """Count a dropped message."""
        if not self.lately_dropped(now):
            self.dropped.clear()
        self.dropped_at = now
        if author in self.dropped or len(self.dropped) < DROPPED_MAX:
            self.dropped[author] = self.dropped.get(author, 0) + 1

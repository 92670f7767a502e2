"""What the fragments of one syncer share: places in line, and tallies."""

import asyncio
from dataclasses import dataclass, field

from isthmus.syncer.fairness import FairSlots

DROPPED_MAX = 1024
"""Names of which dropped messages are counted one by one."""


@dataclass(slots=True)
class Limits:
    """What the fragments of one syncer share."""

    accumulators: asyncio.Semaphore
    fetches: FairSlots
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

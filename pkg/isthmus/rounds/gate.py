"""How many rounds a syncer has under way: as many as it can serve, and the fragment that waits longest first. No I/O.

Where learners ask for more than the syncer can read and merge, more rounds at once make each round longer and merge no
more updates. The gate lets a round in while the syncer can deal with the rounds under way within the lead: the time
that an update usually takes from the call to being stored. With less work under way the syncer would stand idle for a
moment (Little's law). With more, updates only wait, and grow old.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from isthmus.averages import smooth

FETCHES_TIMED = 64
"""Of the last so many fetches the median is taken: one learner's slow bodies say nothing of the others'."""

OUTLYING = 4.0
"""A fetch that takes more medians than this counts as one that takes so many."""

CERTAIN = 3.0
"""Standard errors by which fetches have to slow one another down to be believed to share a link."""

PATIENCE = 2.0
"""A fetch under way is waited for as long as so many usual ones take."""


@dataclass(slots=True)
class _Waiting:
    """A fragment whose round is due."""

    since: float
    lead_s: float
    tell: Callable[[], None]
    told: bool = False


class Gate:
    """Lets rounds in, fragment by fragment. One for each syncer."""

    def __init__(self, fetches: int = 1, merges: int = 1) -> None:
        """`fetches`, `merges`: how many of them run at once."""
        self._fetches = fetches
        self._merges = merges
        self._timed: deque[tuple[int, float]] = deque(maxlen=FETCHES_TIMED)  # how many there were at once, and seconds
        self._under_way = 0
        self._useful = float(fetches)
        """How many fetches at once make reading faster, …"""
        self._alone_s = 0.0
        """… and what one of them takes with nobody beside it, in seconds."""
        self.fetch_s = 0.0
        """What reading an update and adding it up usually takes, in seconds; 0 while unknown."""
        self.merge_s = 0.0
        self._owed: dict[int, int] = {}  # updates that rounds under way still wait for, by fragment
        self._merging = 0
        self._waiting: dict[int, _Waiting] = {}

    @property
    def patience_s(self) -> float:
        """How long a fetch under way is waited for, in seconds."""
        return PATIENCE * self.fetch_s

    @property
    def waiting(self) -> int:
        """Rounds that are due and wait to be let in."""
        return len(self._waiting)

    def fetch_begins(self) -> int:
        """Note that a fetch begins; return how many there are with it."""
        self._under_way += 1
        return self._under_way

    def fetch_ends(self, among: int, seconds: float | None = None) -> None:
        """Note that a fetch, begun as the last of so many, is through, and what it took; None where it failed."""
        self._under_way -= 1
        if seconds is not None:
            self._timed.append((among, seconds))
            self.fetch_s = statistics.median(taken for _, taken in self._timed)
            self._learn()

    def _learn(self) -> None:
        """Learn how many fetches at once make reading faster.

        A fetch takes a + s·n where n are under way: a passes whatever the others do, s on a link that they share. Least
        squares over the last fetches tell the two apart. With more than (a + s) / s at once the link is busy all the
        time, and each further one only makes the others wait.
        """
        timed = [(n, min(taken, OUTLYING * self.fetch_s)) for n, taken in self._timed]
        mean_n, mean_s = (statistics.fmean(column) for column in zip(*timed, strict=True))
        spread = sum((n - mean_n) ** 2 for n, _ in timed)
        if not spread:
            self._alone_s = self._alone_s or mean_s
            return  # all of them say the same
        shared_s = sum((n - mean_n) * (taken - mean_s) for n, taken in timed) / spread
        noise = sum((taken - mean_s - shared_s * (n - mean_n)) ** 2 for n, taken in timed) / len(timed)
        if shared_s < CERTAIN * math.sqrt(noise / spread):
            shared_s = 0.0
        self._alone_s = max(mean_s - shared_s * (mean_n - 1.0), shared_s)
        self._useful = float(self._fetches)
        if shared_s > 0.0:
            self._useful = min(self._useful, self._alone_s / shared_s)

    def merge_begins(self) -> None:
        """Note that a round was handed over to be merged."""
        self._merging += 1

    def merge_ends(self, seconds: float | None = None) -> None:
        """Note that it is merged, and what that took."""
        self._merging -= 1
        if seconds is not None:
            self.merge_s = smooth(self.merge_s, seconds)
        self._let_in()

    def owes(self, fragment: int, updates: int | None) -> None:
        """Note how many updates a fragment's round still waits for; None where none is open."""
        if updates is None:
            self._owed.pop(fragment, None)
        else:
            self._owed[fragment] = updates
        self._let_in()

    def admits(self, fragment: int, since: float, lead_s: float, tell: Callable[[], None]) -> bool:
        """Return whether a round may be opened now; else `tell` is called as soon as it may.

        `since`: when the last round of the fragment ended; `lead_s`: what an update takes from the call to being there.
        """
        self._waiting[fragment] = _Waiting(since, lead_s, tell)
        admitted = self._first() == fragment and self._has_room(lead_s)
        if admitted:
            del self._waiting[fragment]
        else:
            self._let_in()
        return admitted

    def leaves(self, fragment: int) -> None:
        """Note that a fragment does not wait any more."""
        if self._waiting.pop(fragment, None) is not None:
            self._let_in()

    def _first(self) -> int:
        return min(self._waiting, key=lambda p: (self._waiting[p].since, p))

    def _has_room(self, lead_s: float) -> bool:
        """Return whether what waits for others to be read, or merged, will have had its turn within the lead."""
        queued = sum(self._owed.values()) - self._useful
        # One more than there are threads: it gathers its updates while the others are merged.
        unmerged = len(self._owed) + self._merging - self._merges
        if queued > 0 and not self._timed:
            return False  # nothing is known yet
        waits_s = max(queued * self._alone_s / self._useful, unmerged * self.merge_s / self._merges)
        return waits_s <= lead_s

    def _let_in(self) -> None:
        """Tell the fragment that waits longest, once, that it may come in. The fragment asks again then, or leaves."""
        if self._waiting:
            first = self._waiting[self._first()]
            if not first.told and self._has_room(first.lead_s):
                first.told = True
                first.tell()

"""How many rounds a syncer has under way: as many as it can serve, and the fragment that waits longest first. No I/O.

Where learners ask for more than the syncer can read and merge, more rounds at once make each round longer and merge no
more updates. A round is let in while the syncer can deal with the rounds under way within the lead: the
time that an update usually takes from the call to being stored. With less work under way the syncer would stand idle
for a moment (Little's law). With more, updates only wait, and grow old.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from isthmus.runtime.averages import smooth

FETCHES_TIMED = 64
"""Of the last so many fetches the median is taken: one learner's slow bodies say nothing of the others'."""

WINDOW = 16
"""So many fetches in a row tell together how many were under way, and how long one of them took."""

WINDOWS_EACH, WINDOWS_KNOWN = 4, 64
"""So many windows are kept for each number under way, and none that is older than so many windows. On a busy link that
number is the same all the time, and only windows of before tell what fewer fetches would take."""

TELLING = 1 / 8
"""Of the fetches that can run at once: the numbers under way must differ by so much to tell what fewer would take."""

TRIED = 1 / 4
"""Of the fetches that can run at once: where nothing tells that, it is tried with so many."""

CERTAIN = 3.0
"""Standard errors by which fetches have to slow one another down to be believed to share a link."""

PATIENCE = 2.0
"""A fetch under way is waited for as long as so many usual ones take."""


@dataclass(frozen=True, slots=True)
class _Window:
    """Some fetches in a row."""

    number: int
    under_way: float
    """How many of them were, on average."""
    seconds: float
    """What one of them took, by Little's law: how many were under way, by how many were through in a second."""


@dataclass(slots=True)
class _Waiting:
    """A fragment whose round is due."""

    since: float
    lead_s: float
    tell: Callable[[], None]
    told: bool = False


class Admission:
    """Lets rounds in, fragment by fragment. One for each syncer."""

    def __init__(self, fetches: int = 1, merges: int = 1) -> None:
        """`fetches`, `merges`: how many of them run at once."""
        self._fetches = fetches
        self._merges = merges
        self._timed: deque[float] = deque(maxlen=FETCHES_TIMED)  # seconds that the last fetches took
        self._windows: dict[int, deque[_Window]] = {}  # by how many were under way
        self._number = 0
        self._through = 0  # fetches of this window
        self._busy_s, self._fetched_s = 0.0, 0.0  # of this window: while any fetch was under way, and of all fetches
        self._counted_at = 0.0
        self._under_way = 0
        self._telling = True
        """Whether the numbers under way differed by enough."""
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

    def fetch_begins(self, now: float) -> None:
        """Note that a fetch begins."""
        self._count(now)
        self._under_way += 1

    def fetch_ends(self, now: float, seconds: float | None) -> None:
        """Note that a fetch is through, and what it took; None where it failed."""
        self._count(now)
        self._under_way -= 1
        if seconds is not None:
            self._timed.append(seconds)
            self.fetch_s = statistics.median(self._timed)
            if not self._windows:
                self._alone_s = self.fetch_s
            self._through += 1
            if self._through == WINDOW:
                self._end_window()

    def _count(self, now: float) -> None:
        if self._under_way:
            self._busy_s += now - self._counted_at
            self._fetched_s += self._under_way * (now - self._counted_at)
        self._counted_at = now

    def _end_window(self) -> None:
        if self._busy_s:
            self._number += 1
            window = _Window(self._number, self._fetched_s / self._busy_s, self._fetched_s / WINDOW)
            self._windows.setdefault(round(window.under_way), deque(maxlen=WINDOWS_EACH)).append(window)
            self._learn()
        self._through, self._busy_s, self._fetched_s = 0, 0.0, 0.0

    def _learn(self) -> None:
        """Learn how many fetches at once make reading faster.

        A fetch takes a + s·n where n are under way: a passes whatever the others do, s on a link that they share. Least
        squares over the last windows tell the two apart, whether the link serves one after the other or all at once.
        With more than (a + s) / s at once the link is busy all the time, and each further one only makes the others
        wait.
        """
        known = [w for same in self._windows.values() for w in same if w.number > self._number - WINDOWS_KNOWN]
        mean_n = statistics.fmean(w.under_way for w in known)
        mean_s = statistics.fmean(w.seconds for w in known)
        spread = sum((w.under_way - mean_n) ** 2 for w in known)
        self._telling = spread >= len(known) * (TELLING * self._fetches) ** 2
        shared_s = sum((w.under_way - mean_n) * (w.seconds - mean_s) for w in known) / spread if spread else 0.0
        noise = statistics.fmean((w.seconds - mean_s - shared_s * (w.under_way - mean_n)) ** 2 for w in known)
        if shared_s * math.sqrt(spread) < CERTAIN * math.sqrt(noise):
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
        useful = self._useful if self._telling else min(self._useful, max(1.0, TRIED * self._fetches))
        queued = sum(self._owed.values()) - useful
        # One more than there are threads: it gathers its updates while the others are merged.
        unmerged = len(self._owed) + self._merging - self._merges
        if queued > 0 and not self._timed:
            return False  # nothing is known yet
        waits_s = max(queued * self._alone_s / useful, unmerged * self.merge_s / self._merges)
        return waits_s <= lead_s

    def _let_in(self) -> None:
        """Tell the fragment that waits longest, once, that it may come in. The fragment asks again then, or leaves."""
        if self._waiting:
            first = self._waiting[self._first()]
            if not first.told and self._has_room(first.lead_s):
                first.told = True
                first.tell()

"""Admission of rounds: limits how many rounds a syncer has under way to what it can serve. No I/O.

When learners ask for more than the syncer can read and merge, more rounds at once make each round longer and merge no
more updates. A round is admitted while the syncer can finish the rounds under way within the lead. The lead is the time
that an update usually takes from the call to being stored. With less work under way the syncer would sometimes be idle
(Little's law). With more, updates only wait and grow old. The fragment that has waited longest comes first.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from isthmus.runtime.averages import smooth

FETCHES_TIMED = 64
"""Number of last fetches whose median duration is used: one learner's slow bodies must not stand for the others'."""

WINDOW = 16
"""Consecutive fetches from which one window is measured: how many were under way, and how long one of them took."""

WINDOWS_EACH, WINDOWS_KNOWN = 4, 64
"""Windows that are kept for each number of fetches under way, and the age, in windows, from which a window is ignored.
On a busy link the number under way never changes. Only older windows then tell how long fewer fetches would take."""

TELLING = 1 / 8
"""Share of the fetches that can run at once. The numbers under way must have at least this standard deviation;
otherwise the windows do not tell how long fewer fetches would take."""

TRIED = 1 / 4
"""Share of the fetches that can run at once: the limit while the windows do not tell how long fewer would take."""

CERTAIN = 3.0
"""Standard errors by which fetches must slow one another down before they are taken to share a link."""

PATIENCE = 2.0
"""How long a round waits for a fetch under way, in usual durations of a fetch."""


@dataclass(frozen=True, slots=True)
class _Window:
    """What was measured over `WINDOW` consecutive fetches."""

    number: int
    under_way: float
    """Fetches under way, on average over the time in which there was any."""
    seconds: float
    """Duration of one fetch, by Little's law: fetches under way divided by fetches completed in a second."""


@dataclass(slots=True)
class _Waiting:
    """A fragment whose round is due and waits to be admitted."""

    since: float
    lead_s: float
    tell: Callable[[], None]
    told: bool = False


class Admission:
    """Admits rounds, one fragment at a time. Each syncer has one, shared by all its fragments."""

    def __init__(self, fetches: int = 1, merges: int = 1) -> None:
        """`fetches`, `merges`: how many fetches and merges can run at once."""
        self._fetches = fetches
        self._merges = merges
        self._timed: deque[float] = deque(maxlen=FETCHES_TIMED)  # durations of the last fetches, in seconds
        self._windows: dict[int, deque[_Window]] = {}  # by the rounded number of fetches under way
        self._number = 0
        self._through = 0  # fetches completed in this window
        # In this window: the time in which any fetch was under way, and the sum over all fetches of their times.
        self._busy_s, self._fetched_s = 0.0, 0.0
        self._counted_at = 0.0
        self._under_way = 0
        self._telling = True
        """Whether the numbers of fetches under way varied enough to tell how long fewer fetches would take."""
        self._useful = float(fetches)
        """How many fetches at once make reading faster."""
        self._alone_s = 0.0
        """How long a fetch takes with no other fetch beside it, in seconds."""
        self.fetch_s = 0.0
        """How long reading an update and adding it to the sum usually takes, in seconds; 0 while unknown."""
        self.merge_s = 0.0
        self._owed: dict[int, int] = {}  # updates that the open rounds still wait for, by fragment
        self._merging = 0
        self._waiting: dict[int, _Waiting] = {}

    @property
    def patience_s(self) -> float:
        """How long a round waits for a fetch under way, in seconds."""
        return PATIENCE * self.fetch_s

    @property
    def waiting(self) -> int:
        """The number of rounds that are due and wait to be admitted."""
        return len(self._waiting)

    def fetch_begins(self, now: float) -> None:
        """Note that a fetch begins."""
        self._count(now)
        self._under_way += 1

    def fetch_ends(self, now: float, seconds: float | None) -> None:
        """Note that a fetch has ended, and its duration in seconds; None if the fetch failed."""
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
        """Estimate how many fetches at once make reading faster.

        With n fetches under way, a fetch takes a + s·n: a does not depend on the other fetches, s is the time on a link
        that they share. Least squares over the last windows separate a and s, whether the link serves fetches one after
        the other or all at once. With more than (a + s) / s fetches at once the link is always busy, and each further
        fetch only makes the others wait.
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
        """Note that the merge of a round begins, or waits for a thread."""
        self._merging += 1

    def merge_ends(self, seconds: float | None = None) -> None:
        """Note that the merge of a round has ended, and its duration in seconds; None if it did not start."""
        self._merging -= 1
        if seconds is not None:
            self.merge_s = smooth(self.merge_s, seconds)
        self._let_in()

    def owes(self, fragment: int, updates: int | None) -> None:
        """Note how many updates the round of a fragment still waits for; None if no round is open."""
        if updates is None:
            self._owed.pop(fragment, None)
        else:
            self._owed[fragment] = updates
        self._let_in()

    def admits(self, fragment: int, since: float, lead_s: float, tell: Callable[[], None]) -> bool:
        """Return whether the round of a fragment may open now. If not, call `tell` as soon as it may.

        `since`: when the last round of the fragment ended. `lead_s`: how long an update takes from the call to being
        stored, in seconds.
        """
        self._waiting[fragment] = _Waiting(since, lead_s, tell)
        admitted = self._first() == fragment and self._has_room(lead_s)
        if admitted:
            del self._waiting[fragment]
        else:
            self._let_in()
        return admitted

    def leaves(self, fragment: int) -> None:
        """Note that a fragment no longer waits to be admitted."""
        if self._waiting.pop(fragment, None) is not None:
            self._let_in()

    def _first(self) -> int:
        return min(self._waiting, key=lambda p: (self._waiting[p].since, p))

    def _has_room(self, lead_s: float) -> bool:
        """Return whether the queues for fetches and for merges will be worked off within the lead."""
        useful = self._useful if self._telling else min(self._useful, max(1.0, TRIED * self._fetches))
        queued = sum(self._owed.values()) - useful
        # One round more than there are threads is admitted: it gathers its updates while the others are merged.
        unmerged = len(self._owed) + self._merging - self._merges
        if queued > 0 and not self._timed:
            return False  # nothing is known yet
        waits_s = max(queued * self._alone_s / useful, unmerged * self.merge_s / self._merges)
        return waits_s <= lead_s

    def _let_in(self) -> None:
        """Tell the fragment that has waited longest, once, that its round may open. The fragment then asks again or
        leaves."""
        if self._waiting:
            first = self._waiting[self._first()]
            if not first.told and self._has_room(first.lead_s):
                first.told = True
                first.tell()

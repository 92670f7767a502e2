"""How many update bodies may share a learner's uplink at once: as many as make it faster, and no more.

If round trips limit the speed, several uploads side by side carry more. If bandwidth limits it, they only share the
link: each then takes as long as all of them together, and the versions that they are based on grow old. Neither latency
nor bandwidth is known, and both change. So measurements set the window, as in TCP Vegas: n uploads at once should each
be as fast as a single one. The share of speed that each loses, times n, is how many uploads' worth waits in a queue.

The agent measures; the training thread only calls `room`. They share plain attributes, which are read without a lock.
"""

from collections import deque

from isthmus.runtime.averages import smooth

LIMIT_MAX = 4
"""Most uploads at once."""

QUEUED_LOW, QUEUED_HIGH = 0.3, 0.7
"""The queue, in uploads, below which the window grows by one, and above which it shrinks by one."""

UPLOADS_REMEMBERED = 32
"""Newest uploads whose speeds are kept. The fastest of them is taken as the speed of a single upload."""

TRIES_MAX = 64
"""Most uploads between two tries of a larger window that was too large before."""


class Window:
    """One learner's uploads under way, and how many there may be."""

    def __init__(self) -> None:
        self.limit = LIMIT_MAX
        """Most update bodies on the wire at once."""
        self.free_at = 0.0
        """When the next upload under way is expected to end, on the runtime's clock; 0 while the window has room."""
        self.open_s = 0.0
        """How long rounds stay open for updates, in seconds: a moving average over the commits read."""
        self._rates: deque[float] = deque(maxlen=UPLOADS_REMEMBERED)
        self._rate = 0.0  # bytes per second of one upload, a moving average
        self._mean_size = 0.0
        self._since_change = 0
        self._patience = 4
        self._under_way: dict[int, tuple[float, int, int]] = {}
        self._count = 0

    @property
    def full(self) -> bool:
        """Whether a new upload has to wait until one under way ends."""
        return len(self._under_way) >= self.limit

    def room(self, in_hand: int, now: float, step_s: float) -> bool:
        """Return whether one more capture is wanted at this step boundary while `in_hand` are not uploaded yet.

        One capture more than the window allows is wanted if an upload is expected to end before the next boundary: the
        link must not stand idle. Training thread.
        """
        return in_hand < self.limit or (in_hand == self.limit and self.free_at <= now + step_s)

    def began(self, size: int, now: float) -> int:
        """Note that an upload begins; return its number."""
        self._count += 1
        self._under_way[self._count] = now, size, len(self._under_way) + 1
        self._expect()
        return self._count

    def ended(self, number: int, now: float, *, stored: bool) -> None:
        """Note that an upload ended. One that was not stored says nothing about the link and is not measured."""
        began_at, size, beside = self._under_way.pop(number)
        if stored and now > began_at:
            self._learn(size, size / (now - began_at), max(beside, len(self._under_way) + 1))
        self._expect()

    @property
    def upload_s(self) -> float:
        """How long one upload takes, in seconds; 0 while unknown."""
        return self._mean_size / self._rate if self._rate else 0.0

    def _learn(self, size: int, rate: float, at_once: int) -> None:
        self._rates.append(rate)
        self._rate = smooth(self._rate, rate)
        self._mean_size = smooth(self._mean_size, float(size))
        queued = at_once * (1.0 - rate / max(self._rates))
        self._since_change += 1
        if queued > QUEUED_HIGH and at_once >= self.limit > 1:
            self.limit -= 1
            # A larger window is tried again, since links change, but less and less often.
            self._patience = min(TRIES_MAX, 2 * self._patience)
            self._since_change = 0
        elif queued < QUEUED_LOW and self.limit < LIMIT_MAX and self._since_change >= self._patience:
            self.limit += 1
            self._since_change = 0

    def _expect(self) -> None:
        if len(self._under_way) < self.limit or self._rate == 0.0:
            self.free_at = 0.0
        else:
            self.free_at = min(at + size / self._rate for at, size, _ in self._under_way.values())

"""How many bodies may share a learner's uplink at once: as many as make it faster, and not one more.

Where a round trip is what takes time, several uploads side by side carry more. Where the link is what takes time, they
only share it: each takes as long as all of them, and by then the versions they are based on are old. Neither latency
nor bandwidth is known, and both change; so the window is held by what was measured, as TCP Vegas holds its own: what n
uploads at once lose of the speed that one alone has is, as a share of n, what waits in a queue instead of moving.

The agent measures, the training thread only asks (`room`): plain attributes, read without a lock.
"""

from collections import deque

from isthmus.runtime.averages import smooth

LIMIT_MAX = 4
"""Uploads at once at most."""

QUEUED_LOW, QUEUED_HIGH = 0.3, 0.7
"""Uploads' worth of waiting below which one more is tried, and above which one fewer is."""

UPLOADS_REMEMBERED = 32
"""Uploads of which the fastest says what the link can do."""

TRIES_MAX = 64
"""Uploads between two tries of a larger window that was too large before, at most."""


class Window:
    """One learner's uploads under way."""

    def __init__(self) -> None:
        self.limit = LIMIT_MAX
        """Bodies on the wire at once."""
        self.free_at = 0.0
        """When the next of them is expected to be through, on the runtime's clock."""
        self.open_s = 0.0
        """How long rounds stay open for an update to come, a moving average over the commits read, in seconds."""
        self._rates: deque[float] = deque(maxlen=UPLOADS_REMEMBERED)
        self._rate = 0.0  # bytes a second and upload, a moving average
        self._mean_size = 0.0
        self._since_change = 0
        self._patience = 4
        self._under_way: dict[int, tuple[float, int, int]] = {}
        self._count = 0

    @property
    def full(self) -> bool:
        """Whether an upload has to wait for one under way."""
        return len(self._under_way) >= self.limit

    def room(self, in_hand: int, now: float, step_s: float) -> bool:
        """Return whether one more capture is wanted at this step boundary, with so many not yet through.

        One more than fit on the wire, where the wire will be free before the next boundary: it must not stand idle.
        """
        return in_hand < self.limit or (in_hand == self.limit and self.free_at <= now + step_s)

    def began(self, size: int, now: float) -> int:
        """Note that an upload begins; return its number."""
        self._count += 1
        self._under_way[self._count] = now, size, len(self._under_way) + 1
        self._expect()
        return self._count

    def ended(self, number: int, now: float, *, stored: bool) -> None:
        """Note that an upload is through, or came to nothing, which says nothing of the link."""
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
            # What was too much is tried again, ever more seldom: links change.
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

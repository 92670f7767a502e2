"""How long a demo still takes, over all of its phases: the one at hand as it goes, later ones as they were measured."""

import time
from collections.abc import Callable, Mapping

TRAINING, LAST, JUDGING, ALONE, DRAWING = (
    "training",
    "last rounds",
    "judging the run",
    "training one learner alone",
    "drawing",
)
KNOWN_SHARE = 0.03
"""Share of a phase after which its own speed is better known than what was expected of it."""


class Left:
    """Knows the phase, and how much of it is done."""

    def __init__(self, expected: Mapping[str, float], now: Callable[[], float] = time.monotonic) -> None:
        """`expected`: seconds of every phase, in their order."""
        self._expected = dict(expected)
        self._now = now
        self._phase = ""
        self._since = now()
        self._first: tuple[float, float] | None = None
        self._share = 0.0

    def enter(self, phase: str) -> None:
        """Begin a phase."""
        self._phase, self._since, self._first, self._share = phase, self._now(), None, 0.0

    def at(self, share: float) -> None:
        """Note how much of the phase is done, 0 to 1; its speed is measured from the first of it."""
        self._share = share
        if share > 0 and self._first is None:
            self._first = self._now(), share

    @property
    def seconds(self) -> float | None:
        """Seconds to the end of the last phase; None before the first."""
        if self._phase not in self._expected:
            return None
        phases = list(self._expected)
        later = sum(self._expected[phase] for phase in phases[phases.index(self._phase) + 1 :])
        now = self._now()
        if self._first is not None and self._share - self._first[1] >= KNOWN_SHARE:
            at, share = self._first
            # What has passed since the last word of it counts as done too, as far as it can.
            return later + (now - at) * max(0.0, 1.0 - self._share) / (self._share - share)
        return later + max(0.0, self._expected[self._phase] - (now - self._since))

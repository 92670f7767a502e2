"""Remaining time of a demo: the present phase by its progress, later phases by their expected times."""

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
"""Share of a phase after which its measured speed is a better basis than its expected time."""


class Left:
    """An estimate of the remaining time, from the present phase and how much of it is done."""

    def __init__(self, expected: Mapping[str, float], now: Callable[[], float] = time.monotonic) -> None:
        """Begin before the first phase. `expected` has the seconds of every phase, in the order of the phases."""
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
        """Note which share of the phase is done, 0 to 1. The phase's speed is measured from the first share above 0."""
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
            # Time without a new share counts as spent: the estimate grows until the next one.
            return later + (now - at) * max(0.0, 1.0 - self._share) / (self._share - share)
        return later + max(0.0, self._expected[self._phase] - (now - self._since))

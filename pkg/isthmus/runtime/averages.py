"""Moving averages of what is measured: durations, rates, sizes."""

import statistics
from collections import deque

SMOOTHING = 0.2
"""Weight of a new measurement in the moving averages of durations."""


def smooth(average: float, sample: float) -> float:
    """Return the moving average one sample on; the first sample stands for itself."""
    return sample if average == 0.0 else average + SMOOTHING * (sample - average)


LAST = 5
"""Durations of which the middle one is usual."""


class Usual:
    """The usual of what takes long now and then: the middle one of the last few, of two the lower one.

    An average of requests of which one hung for its timeout is no duration that any of them had.
    """

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=LAST)

    def note(self, duration: float) -> None:
        """Take one more."""
        self._last.append(duration)

    @property
    def value(self) -> float:
        """What is usual; 0 while nothing is known."""
        return statistics.median_low(self._last) if self._last else 0.0

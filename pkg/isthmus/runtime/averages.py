"""Moving averages and medians of measurements: durations, rates, sizes."""

import statistics
from collections import deque

SMOOTHING = 0.2
"""Weight of a new measurement in the moving averages of durations."""


def smooth(average: float, sample: float) -> float:
    """Return the moving average after one more sample; an average of 0 is replaced by the sample."""
    return sample if average == 0.0 else average + SMOOTHING * (sample - average)


LAST = 5
"""Number of recent durations whose median is the usual one."""


class Usual:
    """The usual duration of something that sometimes takes much longer: the lower median of the last few.

    An average would not do: if one request hung until its timeout, no request took the average time.
    """

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=LAST)

    def note(self, duration: float) -> None:
        """Add a duration."""
        self._last.append(duration)

    @property
    def value(self) -> float:
        """The usual duration; 0 before the first."""
        return statistics.median_low(self._last) if self._last else 0.0

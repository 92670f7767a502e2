"""The losses of a learner's newest steps, and whether they have risen."""

import itertools
import math
import statistics
from collections import deque

from isthmus.format.records.fields import LOSS_MAX

STEPS_KEPT = 8192

WINDOW = 32
"""Steps over which losses are averaged before they are compared."""

HIGH_WINDOWS = 2
"""Windows in a row that must be high before a loss counts as risen."""

ABOVE_FIRST = 1.5
"""A window is high if its mean is so many times the first losses."""

ABOVE_LOWEST = 2.0
"""It is high, too, if its mean is so many times the lowest, and more than half of what was learnt is lost again."""

SCATTERS = 3.0
"""A mean that is higher by less than so many times the median difference between neighbouring losses is not high."""


class Losses:
    """Keeps the losses of the newest `STEPS_KEPT` steps that gave one of at most `LOSS_MAX` in size."""

    def __init__(self, first: float | None = None) -> None:
        """Begin with no losses. `first`: what the first losses of a learner were that goes on from a checkpoint."""
        self._kept: deque[tuple[int, float]] = deque(maxlen=STEPS_KEPT)
        self._window: list[float] = []
        self.first = first
        """The median of the first three losses; None until `WINDOW` are known."""
        self._lowest = math.inf
        self._high = 0
        self.risen: tuple[float, float] | None = None
        """The level before and the mean of the newest window, if the loss has risen and not come down again."""

    def add(self, step: int, loss: float) -> None:
        """Note the loss of a step. A larger one, or a NaN, is left out, because a mean with it says nothing."""
        if abs(loss) > LOSS_MAX or math.isnan(loss):
            return
        self._kept.append((step, loss))
        self._window.append(loss)
        if len(self._window) == WINDOW:
            self._judge(self._window)
            self._window = []

    def _judge(self, window: list[float]) -> None:
        now, scatter = statistics.fmean(window), statistics.median(abs(b - a) for a, b in itertools.pairwise(window))
        if self.first is None:
            self.first = statistics.median(window[:3])
        level = self._level(now, self.first)
        high = level is not None and now - level > SCATTERS * scatter
        self._high = self._high + 1 if high else 0
        self.risen = (level, now) if level is not None and self._high >= HIGH_WINDOWS else None
        self._lowest = min(self._lowest, now)

    def _level(self, now: float, first: float) -> float | None:
        """Return the level before above which a window's mean is high; None if it is not. Losses may be negative."""
        if now > ABOVE_FIRST * first > 0.0:
            return first
        half = (first + self._lowest) / 2.0
        return self._lowest if now > max(ABOVE_LOWEST * self._lowest, half) and self._lowest > 0.0 else None

    def mean_after(self, step: int) -> float | None:
        """Return the mean over the kept steps after `step`; None if none of them gave a loss."""
        found = []
        for at, loss in reversed(self._kept):
            if at <= step:
                break
            found.append(loss)
        return math.fsum(found) / len(found) if found else None

"""The losses of a learner's newest steps."""

import math
from collections import deque

from isthmus.format.records.fields import LOSS_MAX

STEPS_KEPT = 8192


class Losses:
    """Keeps the losses of the newest `STEPS_KEPT` steps that gave one of at most `LOSS_MAX` in size."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, float]] = deque(maxlen=STEPS_KEPT)

    def add(self, step: int, loss: float) -> None:
        """Note the loss of a step. A larger one, or a NaN, is left out, because a mean with it says nothing."""
        if abs(loss) <= LOSS_MAX:
            self._kept.append((step, loss))

    def mean_after(self, step: int) -> float | None:
        """Return the mean over the kept steps after `step`; None if none of them gave a loss."""
        found = []
        for at, loss in reversed(self._kept):
            if at <= step:
                break
            found.append(loss)
        return math.fsum(found) / len(found) if found else None

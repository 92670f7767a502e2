"""The losses of a learner's newest steps."""

import math
from collections import deque

STEPS_KEPT = 8192


class Losses:
    """Keeps the finite losses of the newest `STEPS_KEPT` steps that gave one."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, float]] = deque(maxlen=STEPS_KEPT)

    def add(self, step: int, loss: float) -> None:
        """Note the loss of a step. One that is not finite is left out, because a mean with it says nothing."""
        if math.isfinite(loss):
            self._kept.append((step, loss))

    def mean_after(self, step: int) -> float | None:
        """Return the mean over the kept steps after `step`; None if none of them gave a loss."""
        found = []
        for at, loss in reversed(self._kept):
            if at <= step:
                break
            found.append(loss)
        return math.fsum(loss / len(found) for loss in found) if found else None

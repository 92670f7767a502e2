"""Moving averages of what is measured: durations, rates, sizes."""

SMOOTHING = 0.2
"""Weight of a new measurement in the moving averages of durations."""


def smooth(average: float, sample: float) -> float:
    """Return the moving average one sample on; the first sample stands for itself."""
    return sample if average == 0.0 else average + SMOOTHING * (sample - average)

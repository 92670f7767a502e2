"""Summary of an experiment's rows over their seeds."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from isthmus_lab.training.setting import Row


@dataclass(frozen=True)
class Spread:
    """A mean over seeds and the standard deviation among them (0 for one seed)."""

    mean: float
    deviation: float


MEASURED = (
    "val_loss",
    "goodput",
    "uptime",
    "participation",
    "up_bits_per_param",
    "down_bits_per_param",
    "wall_virtual_s",
    "tokens",
    "kept",
)


def summary(rows: Sequence[Row]) -> dict[str, dict[str, Spread]]:
    """Return, by setting and measure, the mean over seeds and its spread."""
    grouped: dict[str, list[Row]] = {}
    for row in rows:
        grouped.setdefault(row.setting, []).append(row)
    found = {}
    for name, of_one in grouped.items():
        values = {what: [row.measured(what) for row in of_one] for what in (*MEASURED, *of_one[0].extra)}
        found[name] = {what: _spread([x for x in v if x is not None]) for what, v in values.items()}
    return found


def _spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0)

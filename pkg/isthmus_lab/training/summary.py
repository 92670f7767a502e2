"""Summary of an experiment's rows over their seeds."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from isthmus_lab.training.setting import Row, Setting


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


def outer_of(setting: Setting) -> dict[str, float]:
    """Return the outer `rate` and `momentum` of a setting; empty for data parallel, which has no outer step."""
    if setting.method == "data-parallel":
        return {}
    return {"rate": setting.rules.outer_lr, "momentum": setting.rules.outer_momentum}


T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""By number of seeds, from two on: how many standard errors a mean must be from 0 so that chance alone takes it there
in at most one case of twenty (Student's t). The last one is for ten seeds and more."""


@dataclass(frozen=True)
class Paired:
    """The losses of a setting less those of its baseline, seed by seed: both have the same initialisation and data."""

    baseline: str
    """The other setting."""
    by_seed: Sequence[float]
    """The differences [nats per byte], in the order of the seeds; below 0, the setting is better."""
    mean: float
    deviation: float
    """Their mean and standard deviation (0 for one seed)."""
    agree: int
    """In how many seeds the difference has the sign of the mean."""

    @property
    def told(self) -> bool:
        """Whether the seeds tell the difference from chance, at 95 % by a paired t-test. One seed never does."""
        n = len(self.by_seed)
        return n > 1 and abs(self.mean) > T95[min(n, len(T95) + 1) - 2] * self.deviation / math.sqrt(n)


def baselines(names: Sequence[str], chosen: str | None = None) -> dict[str, str]:
    """Return by setting the one that it is compared with: `chosen`, or the first one of its group.

    Settings with the same name before the colon are a group, and those without a colon are one.
    """
    first: dict[str, str] = {}
    for name in names:
        first.setdefault(group(name), name)
    return {name: chosen or first[group(name)] for name in names}


def group(name: str) -> str:
    """Return the group of a setting: its name before the colon; empty for a name without a colon."""
    return name.partition(": ")[0] if ": " in name else ""


def paired(rows: Sequence[Row], of: Mapping[str, str]) -> dict[str, Paired]:
    """Return by setting how its losses differ from those of its baseline in `of`. A baseline is not in the result."""
    losses = {(row.setting, row.seed): row.val_loss for row in rows}
    found = {}
    for name, other in of.items():
        if name != other:
            by_seed = [losses[name, seed] - losses[other, seed] for at, seed in losses if at == name]
            spread = _spread(by_seed)
            agree = sum(x * spread.mean > 0 for x in by_seed)
            found[name] = Paired(other, by_seed, spread.mean, spread.deviation, agree)
    return found


def _spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0)

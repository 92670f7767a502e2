"""Curves as a line of block characters, for tables on terminals."""

from collections.abc import Mapping, Sequence

from rich.console import Group

from isthmus.inspect.losses import Point, rise
from isthmus_services.output.tables import OR_JSON, Column, fitted

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 16

_LOSSES = (
    Column("learner", justify="left"),
    Column("first", 2),
    Column("lowest"),
    Column("newest"),
    Column("loss over time", 1, justify="left"),
    Column("trend", justify="left"),
)


def curve(points: Sequence[Point], first: float, last: float) -> str:
    """Return a loss between two times as `WIDTH` characters, from its lowest mean to its highest; blank where there is
    no point."""
    bins: list[list[float]] = [[] for _ in range(WIDTH)]
    for at, loss in points:
        bins[min(WIDTH - 1, int((at - first) / max(last - first, 1e-9) * WIDTH))].append(loss)
    means = [sum(found) / len(found) if found else None for found in bins]
    known = [mean for mean in means if mean is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    steps = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if mean is None else BLOCKS[round((mean - low) * steps)] for mean in means)


def losses(curves: Mapping[str, Sequence[Point]], width: int, hint: str = OR_JSON) -> Group:
    """Return a table of the learners' losses over a run; `curves` must not be empty."""
    times = [point.at for points in curves.values() for point in points]
    rows = [
        [
            name,
            f"{points[0].loss:.3f}",
            f"{min(point.loss for point in points):.3f}",
            f"{points[-1].loss:.3f}",
            curve(points, min(times), max(times)),
            "rises" if rise(points) else "",
        ]
        for name, points in curves.items()
    ]
    return fitted("losses of the merged updates", _LOSSES, rows, width, hint)

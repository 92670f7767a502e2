"""Pictures that several commands draw, or that a command draws of a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from isthmus.errors import InputError
from isthmus.log.evaluations import Point
from isthmus_services.output.report import MARKERS, save


def measured(run: str, series: Mapping[str, Sequence[Point]], path: Path) -> None:
    """Draw measurements of the global model against its version. Raises `InputError` if there are none."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    if not any(series.values()):
        raise InputError(
            f"{run} has no measurements yet: isthmus follow --exec CMD --series NAME stores the number that CMD prints"
        )
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    for marker, (name, points) in zip(MARKERS * len(series), sorted(series.items()), strict=False):
        axes.plot([p.cut for p in points], [p.value for p in points], marker=marker, markersize=4, label=name)
    axes.set(xlabel="version of the global model", ylabel="measured", title=run)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    save(figure, path)

"""Output of benchmarks: a table on a terminal, tables in a page of the documentation, a picture."""

import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import RenderableType

from isthmus.errors import InputError
from isthmus_lab.bench.measure import Row
from isthmus_services.output.report import save
from isthmus_services.output.tables import Column, fitted

COLUMNS = (
    Column("case", justify="left"),
    Column("size", 1),
    Column("value"),
    Column("unit", 2, "left"),
    Column("limit", 3),
    Column("ratio"),
    Column("aim"),
    Column("spread", 4),
    Column("n", 5),
)

WIDE = 30.0
"""A panel has a logarithmic axis if its largest share is more than this many times its smallest."""


def table(title: str, rows: Sequence[Row], width: int) -> RenderableType:
    """Return rows as a table for a terminal."""
    return fitted(title, COLUMNS, [cells(row) for row in rows], width)


def cells(row: Row) -> list[str]:
    """Return the cells of a row as text, in the order of `COLUMNS`."""
    mark = {True: " ✓", False: " ✗", None: ""}[row.reached]
    sign = "≤ " if row.at_most else ""
    return [
        row.case,
        row.size,
        _number(row.value),
        row.unit,
        "" if row.limit is None else _number(row.limit),
        "" if row.ratio is None else f"{row.ratio:.2f}",
        "" if row.aim is None else f"{sign}{row.aim:.3g}{mark}",
        f"{row.spread:.0%}",
        str(row.repeats),
    ]


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def write_tables(rows: Sequence[Row], machines: Sequence[str], path: Path) -> None:
    """Write tables into a page, between `<!-- bench NAME -->` and `<!-- end -->`. Raises `InputError`."""
    try:
        text = path.read_text()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    for name in dict.fromkeys(row.bench for row in rows):
        mark = re.compile(rf"(<!-- bench {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not mark.search(text):
            raise InputError(f"{path} has no place for {name}: <!-- bench {name} --> and <!-- end -->")
        lines = ["| " + " | ".join(c.name for c in COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
        lines += ["| " + " | ".join(cells(row)) + " |" for row in rows if row.bench == name]
        lines += ["", f"({'; '.join(machines)})", ""]
        inside = "\n".join(lines)
        text = mark.sub(lambda found, inside=inside: f"{found[1]}{inside}{found[2]}", text)  # type: ignore[misc]
    path.write_text(text)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw each row that has a limit or an aim: its ratio to the limit, or value / aim. Each benchmark has a panel.

    Raises `InputError` if no row has one.
    """
    from matplotlib.figure import Figure

    benches = {name: [r for r in rows if r.bench == name and _share(r) is not None] for name in _names(rows)}
    benches = {name: shown for name, shown in benches.items() if shown}
    if not benches:
        raise InputError("--plot: none of these figures has a limit or an aim to be drawn beside")
    heights = [0.26 * len(shown) + 0.9 for shown in benches.values()]
    figure = Figure(figsize=(9.5, sum(heights)), layout="constrained")
    panels = figure.subplots(len(benches), 1, squeeze=False, gridspec_kw={"height_ratios": heights})
    for axes, (name, shown) in zip(panels[:, 0], benches.items(), strict=True):
        places = range(len(shown))
        shares = [_share(row) or 0.0 for row in shown]
        colors = [{True: "tab:green", False: "tab:red", None: "tab:gray"}[row.reached] for row in shown]
        axes.barh(places, shares, color=colors, height=0.6)
        for place, row in zip(places, shown, strict=True):
            if row.aim is not None:
                at = row.aim if row.ratio is not None else 1.0
                axes.plot([at, at], [place - 0.42, place + 0.42], color="black", linewidth=2)
        if min(shares) > 0.0 and max(shares) > WIDE * min(shares):
            axes.set_xscale("log")
        axes.set_yticks(places, [f"{row.case}  {row.size}" for row in shown], fontsize=7)
        axes.invert_yaxis()
        axes.axvline(1.0, color="black", linewidth=0.6, linestyle=":")
        axes.set_title(f"{name}: ratio to the limit, or value / aim where there is none", fontsize=9, loc="left")
        axes.tick_params(axis="x", labelsize=7)
    save(figure, path)


def _names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.bench for row in rows))


def _share(row: Row) -> float | None:
    if row.ratio is not None:
        return row.ratio
    return None if not row.aim else row.value / row.aim

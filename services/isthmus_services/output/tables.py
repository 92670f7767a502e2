"""Tables that fit: what a terminal has no room for is left out and named, and nothing is cut without a word."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

WIDEN = "widen the terminal"
OR_JSON = "widen or use --json"

_BESIDE, _BEFORE = 3, 1
"""Columns of a terminal that one of a table takes besides its text, and that a table takes at its left."""


@dataclass(frozen=True)
class Column:
    """One column; `leaves` orders what is left out first (the highest), and never at 0."""

    name: str
    leaves: int = 0
    justify: Literal["left", "right"] = "right"


def fitted(
    title: str, columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int, hint: str = OR_JSON
) -> Group:
    """Return a table no wider than this: columns that have to leave are named below it, long cells are folded.

    Cells are text as it is: what processes say of themselves is never markup.
    """
    for row in rows:
        assert len(row) == len(columns), f"{title}: {len(row)} cells for {len(columns)} columns"
    wide = [max([cell_len(c.name), *(cell_len(row[i]) for row in rows)]) for i, c in enumerate(columns)]
    kept = list(range(len(columns)))
    while sum(wide[i] + _BESIDE for i in kept) + _BEFORE > width:
        leaving = max(kept, key=lambda i: (columns[i].leaves, i))
        if not columns[leaving].leaves:
            break  # what stays is folded
        kept.remove(leaving)
    # As a line of its own, a title does not wrap at the width of a narrow table.
    parts: list[RenderableType] = [Text(title, style="italic")] if title else []
    table = Table()
    for i in kept:
        table.add_column(Text(columns[i].name), justify=columns[i].justify, overflow="fold")
    for row in rows:
        table.add_row(*(Text(row[i]) for i in kept))
    parts.append(table)
    if hidden := [c.name for i, c in enumerate(columns) if i not in kept]:
        parts.append(Text(f"hidden at this width: {', '.join(hidden)}: {hint}", style="dim"))
    return Group(*parts)


def in_view(shown: Group, console: Console) -> RenderableType:
    """Return what a terminal has lines for; those it has none for are counted in its last one."""
    lines = console.render_lines(shown, pad=False)
    if len(lines) <= console.height:
        return shown
    room = console.height - 1
    kept = Segments([part for line in lines[:room] for part in (*line, Segment.line())])
    return Group(kept, Text(f"{len(lines) - room} more lines: a taller terminal has room for them", style="dim"))

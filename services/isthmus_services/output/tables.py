"""Tables that fit a terminal: columns without room are left out and named below, and nothing is cut silently."""

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
"""Terminal columns that a column of a table takes besides its text, and that a table takes at its left."""


@dataclass(frozen=True)
class Column:
    """One column. The column with the highest `leaves` is left out first; a column with 0 is never left out."""

    name: str
    leaves: int = 0
    justify: Literal["left", "right"] = "right"


def fitted(
    title: str, columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int, hint: str = OR_JSON
) -> Group:
    """Return a table for a terminal of `width` columns: columns left out are named below it, long cells are folded.

    Cells are plain text: names and messages of processes are never read as markup.
    """
    for row in rows:
        assert len(row) == len(columns), f"{title}: {len(row)} cells for {len(columns)} columns"
    wide = [max([cell_len(c.name), *(cell_len(row[i]) for row in rows)]) for i, c in enumerate(columns)]
    kept = list(range(len(columns)))
    while sum(wide[i] + _BESIDE for i in kept) + _BEFORE > width:
        leaving = max(kept, key=lambda i: (columns[i].leaves, i))
        if not columns[leaving].leaves:
            break  # cells of the remaining columns are folded
        kept.remove(leaving)
    # The title is a line of its own: as a table's title, it would wrap at the width of a narrow table.
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
    """Return the lines for which the terminal has room; its last line says how many are left out."""
    lines = console.render_lines(shown, pad=False)
    if len(lines) <= console.height:
        return shown
    room = console.height - 1
    kept = Segments([part for line in lines[:room] for part in (*line, Segment.line())])
    return Group(kept, Text(f"{len(lines) - room} more lines: enlarge the terminal to see them", style="dim"))

"""Tables fit the terminal: columns are hidden in their order and named, cells are folded, nothing is cut silently."""

from collections.abc import Sequence

import pytest
from rich.console import Console

from isthmus_services.output.tables import Column, fitted, in_view

COLUMNS = (Column("name", justify="left"), Column("rarely", 9), Column("often", 1), Column("state", justify="left"))
ROWS = (("eu-1", "1,234,567", "88.1%", "training"), ("us-1", "1", "9.0%", "waiting for 0/17"))


def shown(width: int, rows: Sequence[tuple[str, ...]] = ROWS) -> list[str]:
    console = Console(width=width, record=True, color_system=None)
    console.print(fitted("a title that is rather longer than a narrow table", COLUMNS, rows, width))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in "".join(lines)
    return lines


def test_where_there_is_room_nothing_leaves() -> None:
    lines = shown(80)
    assert lines[0] == "a title that is rather longer than a narrow table"
    assert all(word in lines[2] for word in ("name", "rarely", "often", "state"))
    assert not any("hidden" in line for line in lines)


def test_a_title_is_as_wide_as_the_terminal_not_as_its_table() -> None:
    assert shown(60, [("a", "1", "2", "x")])[0] == "a title that is rather longer than a narrow table"


def test_what_matters_least_leaves_first_and_is_named() -> None:
    lines = shown(44)
    assert [line.strip() for line in lines[-2:]] == ["hidden at this width: rarely: widen or use", "--json"]
    lines = shown(30)
    assert "hidden at this width: rarely, often:" in "".join(lines)


@pytest.mark.parametrize("width", [12, 20, 30])
def test_what_stays_is_folded_however_narrow_it_gets(width: int) -> None:
    lines = shown(width)
    letters = "".join(line[1:-1].rpartition("│")[2].strip() for line in lines if line.startswith("│"))
    for word in ("training", "waiting"):
        assert word in letters


def test_a_cell_is_no_markup() -> None:
    assert any("[/bold]" in line for line in shown(80, [("[/bold]", "[red]", "", "")]))


@pytest.mark.parametrize(("height", "last"), [(6, "└"), (5, "2 more lines: enlarge the terminal to see them")])
def test_lines_that_a_terminal_has_no_room_for_are_counted(height: int, last: str) -> None:
    console = Console(width=80, height=height, record=True, color_system=None)
    table = fitted("", (Column("a"),), [("1",), ("2",)], 80)
    console.print(in_view(table, console), end="")
    lines = console.export_text().splitlines()
    assert len(lines) == height
    assert lines[-1].startswith(last)

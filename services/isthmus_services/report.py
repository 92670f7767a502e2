"""What a command leaves: text on a console as wide as what it goes to, JSON, pictures."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PIPE_WIDTH = 150
"""Columns where nobody's terminal says how many there are."""


def stdout() -> Console:
    """Return a console on stdout."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)


def save(figure: "Figure", path: Path) -> None:
    """Write a picture, in a folder that need not be there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def write_json(report: Mapping[str, object], *paths: str | Path | None) -> None:
    """Write the report to each path that is given."""
    for path in paths:
        if path:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(json.dumps(report, indent=2) + "\n")

"""What a command leaves: text on a console as wide as what it goes to, JSON, pictures."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

MARKERS = "os^vDP<>hp8d"
"""Of lines in one picture: no two alike, so that they can be told apart in grey too. (x and * mark what was published.)
"""

PIPE_WIDTH = 200
"""Columns where nobody's terminal says how many there are."""


def stdout() -> "Console":
    """Return a console on stdout, as wide as the terminal, or as COLUMNS says; else as a file has room for."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() or os.environ.get("COLUMNS") else PIPE_WIDTH)


def require_free(path: str | Path, flag: str, *, force: bool) -> None:
    """Raise `InputError` where a file cannot be written there, or is there and was not asked to be replaced."""
    path = Path(path)
    if not path.parent.is_dir():
        raise InputError(f"{flag} {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise InputError(f"{flag} {path} is a folder: name a file")
    if path.exists() and not force:
        raise InputError(f"{flag} {path} is there already: --force replaces it")


def require_empty(path: str | Path, flag: str, *, force: bool) -> None:
    """Raise `InputError` unless a folder can be made there, or is there and empty, or was asked to be written into."""
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise InputError(f"{flag} {path} is a file: name a folder")
    if not force and path.is_dir() and any(path.iterdir()):
        raise InputError(f"{flag} {path} is not empty: --force writes into it all the same")


def save(figure: "Figure", path: Path) -> None:
    """Write a picture, in a folder that need not be there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def write_json(report: Mapping[str, object], *paths: str | Path | None) -> None:
    """Write the report to each path that is given."""
    for path in paths:
        if path:
            try:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                Path(path).write_text(json.dumps(report, indent=2) + "\n")
            except OSError as error:
                raise InputError(f"{path} cannot be written: {error.strerror}") from None

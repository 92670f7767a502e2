"""Results of a command: text on a console of the right width, JSON files and pictures."""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from isthmus.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

MARKERS = "os^vDP<>hp8d"
"""Markers of the lines in one picture: no two alike, so that the lines can be told apart in grey too. (x and * mark
published figures.)"""

PIPE_WIDTH = 200
"""Columns of the console if stdout is not a terminal and COLUMNS is not set."""


def stdout(piped: int | None = None) -> "Console":
    """Return a console on stdout, as wide as the terminal or as COLUMNS says.

    Without either it is `PIPE_WIDTH` columns wide, or at most `piped`.
    """
    from rich.console import Console

    class OnStdout(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # `main` handles it; rich would end with the exit code of a failed check

    width = min(PIPE_WIDTH, piped or PIPE_WIDTH)
    return OnStdout(width=None if sys.stdout.isatty() or os.environ.get("COLUMNS") else width)


def require_free(path: str | Path, flag: str, *, force: bool) -> None:
    """Raise `InputError` if the path has no folder or is a folder, or if the file exists and `force` is not set."""
    path = Path(path)
    if not path.parent.is_dir():
        raise InputError(f"{flag} {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise InputError(f"{flag} {path} is a folder: name a file")
    if path.exists() and not force:
        raise InputError(f"{flag} {path} exists already: use --force to replace it")


def require_empty(path: str | Path, flag: str, *, force: bool) -> None:
    """Raise `InputError` if the path is a file, or if it is a folder with files in it and `force` is not set."""
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise InputError(f"{flag} {path} is a file: name a folder")
    if not force and path.is_dir() and any(path.iterdir()):
        raise InputError(f"{flag} {path} is not empty: use --force to write into it")


def save(figure: "Figure", path: Path) -> None:
    """Write a picture, and create its folder if it does not exist. A PNG has 256 colours, which makes it three times
    as small."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    if path.suffix == ".png":
        from PIL import Image

        with Image.open(path) as whole:
            small = whole.convert("RGB").quantize(dither=Image.Dither.NONE)
        small.save(path, optimize=True)


_RESULTS: ContextVar[TextIO] = ContextVar("results")
"""The stdout of a command whose text goes to stderr."""


@contextmanager
def text_on_stderr() -> Iterator[None]:
    """Let all text go to stderr meanwhile, so that stdout has nothing but what `write_json` writes there."""
    before = _RESULTS.set(sys.stdout)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _RESULTS.reset(before)


def write_json(report: Mapping[str, object], *paths: str | Path | None) -> None:
    """Write the report as JSON to each path that is not empty; `-` is stdout.

    Raises `InputError` if a path cannot be written.
    """
    for path in paths:
        if path == "-":
            print(json.dumps(report, indent=2), file=_RESULTS.get(sys.stdout))
        elif path:
            try:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                Path(path).write_text(json.dumps(report, indent=2) + "\n")
            except OSError as error:
                raise InputError(f"{path} cannot be written: {error.strerror}") from None

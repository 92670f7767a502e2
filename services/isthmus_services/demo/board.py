"""The board of a demo: a process of its own, whose page is opened in a browser if the demo runs on a terminal."""

import contextlib
import os
import subprocess
import sys
import webbrowser
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from isthmus.errors import InputError
from isthmus_services.processes import end, isthmus_command

STOP_S = 5.0


@contextmanager
def shown(place: Mapping[str, str], log: Path) -> Iterator[str]:
    """Serve the board of a run while the body runs; yield its URL. Raises `InputError` if the board does not start.

    `place`: the variables that name the run, its bus and its owner.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ISTHMUS_")}
    environment |= {**place, "PYTHONUNBUFFERED": "1"}
    with open(log, "wb") as out:
        process = subprocess.Popen(
            isthmus_command("board", "--http", "127.0.0.1:0"),
            stdout=subprocess.PIPE, stderr=out, stdin=subprocess.DEVNULL, env=environment, start_new_session=True,
            text=True,
        )  # fmt: skip
    try:
        assert process.stdout is not None, "asked for a pipe"
        url = next((word for word in process.stdout.readline().split() if word.startswith("http://")), "")
        if not url:
            process.wait(STOP_S)
            raise InputError(f"--board: {log.read_text(errors='replace').strip()[-500:]} ({log})")
        yield url
    finally:
        end(process, STOP_S)


def open_in_browser(url: str) -> None:
    """Open the page in a browser if stdout is a terminal."""
    if sys.stdout.isatty():
        with contextlib.suppress(webbrowser.Error):
            webbrowser.open(url)


def stay(url: str) -> None:
    """Keep the page open until the user presses Enter; return at once unless stdin and stdout are terminals."""
    if sys.stdin.isatty() and sys.stdout.isatty():
        with contextlib.suppress(EOFError, KeyboardInterrupt):
            input(f"the board stays open at {url}: press Enter to close it\n")

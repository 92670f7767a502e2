"""Progress of a command: a bar on a terminal, a line every few seconds into a pipe."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

LINES_EVERY_S = 5.0


@contextmanager
def progress(what: str) -> Iterator[Callable[[float], None]]:
    """Show progress on stderr while the body runs; yield a function to call with the share that is done, 0 to 1."""
    if sys.stderr.isatty():
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=1.0)
            yield lambda share: bar.update(task, completed=share)
        return
    said = time.monotonic()

    def say(share: float) -> None:
        nonlocal said
        if time.monotonic() - said >= LINES_EVERY_S:
            said = time.monotonic()
            print(f"{what}: {share:.0%}", file=sys.stderr, flush=True)

    yield say

"""Log lines for people: how they look, and how a training loop that configures no logging still shows them."""

import logging

from isthmus.errors import legible
from isthmus.runtime.urls import without_passwords

TEXT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


REPEATS = 5
"""Warnings of one kind that are written as they come."""

REPEATS_S = 60.0
"""Afterwards one is written in this many seconds, with the number of those that were left out."""


class Repeats(logging.Filter):
    """Leaves out most warnings of a kind that comes again and again, so that they do not hide the others.

    Warnings are of one kind if they come from the same line of code and concern the same learner.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[object, ...], tuple[int, float, int]] = {}
        """By kind: how many were written in a row, when the last was, and how many were left out since."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to write a record; add to it how many were left out before it."""
        if record.levelno != logging.WARNING:
            return True
        kind = (record.name, record.lineno, getattr(record, "learner", None))
        written, at, left_out = self._seen.get(kind, (0, record.created, 0))
        if written >= REPEATS and record.created - at < REPEATS_S:
            self._seen[kind] = (written, at, left_out + 1)
            return False
        again = written if record.created - at < 2 * REPEATS_S else 0
        self._seen[kind] = (again + 1, record.created, 0)
        if left_out:
            record.msg, record.args = f"{record.getMessage()} ({left_out} more like it were left out)", None
        return True


class Lines(logging.Formatter):
    """Writes a message as one line. Unprintable characters are escaped: other processes wrote parts of messages."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line of a record, legible and without passwords."""
        record.message = legible(without_passwords(record.message))
        return super().formatMessage(record)


class _Fallback(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to stderr until the program configures logging, and then removes itself."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, unless the root logger has handlers: these get it, too."""
        if logging.getLogger().handlers:
            ours = logging.getLogger("isthmus")
            ours.removeHandler(self)
            ours.setLevel(logging.NOTSET)
        else:
            super().emit(record)


def show() -> None:
    """Write what Isthmus logs to stderr, from level INFO on, unless the program has configured logging.

    Without this, Python would drop the lines that say that a learner joined, restarted and left.
    """
    ours = logging.getLogger("isthmus")
    if ours.hasHandlers() or ours.level != logging.NOTSET:
        return
    handler = _Fallback()
    handler.setFormatter(Lines(TEXT))
    handler.addFilter(Repeats())
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)

"""Log lines for people: how they look, and how a training loop that configures no logging still shows them."""

import logging

from isthmus.errors import legible
from isthmus.runtime.urls import without_passwords

TEXT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


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
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)

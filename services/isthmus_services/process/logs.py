"""Configures the logging of the commands: a JSON object per event, or lines of text."""

import logging
import sys

from isthmus.runtime.log_lines import TEXT, Lines, Repeats

_NOISY = ("botocore", "aiobotocore", "aiohttp", "asyncio", "numba", "matplotlib")

_JSON = "isthmus-json"
"""Name of the handler that writes JSON objects. `last_word` looks for it."""

_serving = False
"""Whether this process has finished its start (see `serving`)."""


def configure(format: str = "auto", level: str = "info", **context: str) -> None:
    """Log to stderr. `format` is auto (text on a terminal, else JSON), json or text.

    `context` (run, service, learner or syncer) is in every JSON line, beside the fields of the event itself:
    fragment, version, learner and the like.
    """
    global _serving  # noqa: PLW0603  (logging itself is as global as it gets)
    _serving = False
    as_json = format == "json" or (format == "auto" and not sys.stderr.isatty())
    handler = logging.StreamHandler(sys.stderr)
    if as_json:
        from pythonjsonlogger.json import JsonFormatter

        handler.name = _JSON
        handler.setFormatter(
            JsonFormatter(
                ["levelname", "name", "message"],
                rename_fields={"levelname": "level", "name": "logger", "exc_info": "traceback"},
                static_fields=context,
                timestamp="time",
            )
        )
    else:
        handler.setFormatter(Lines(TEXT))
    handler.addFilter(Repeats())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for noisy in _NOISY:
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.getLogger("isthmus").setLevel(level.upper())


def quiet() -> None:
    """Log only warnings and errors, as text on stderr: for commands that have a display of their own."""
    handler = logging.StreamHandler()
    handler.setFormatter(Lines("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)


def serving() -> None:
    """Note that the start is over. From now on, `last_word` writes the reason for the end as an event of a JSON log."""
    global _serving  # noqa: PLW0603
    _serving = True


def last_word(command: str, message: str) -> None:
    """Report why a command ends: an event if the process was serving and logs JSON, else a line of text on stderr."""
    if _serving and any(handler.name == _JSON for handler in logging.getLogger().handlers):
        logging.getLogger("isthmus.services").critical("%s", message, extra={"command": command})
    else:
        print(f"isthmus {command}: {message}", file=sys.stderr)

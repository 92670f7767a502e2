"""The one place that configures logging."""

import logging
import sys


def configure(*, verbose: bool = False) -> None:
    """Log to stderr, one line per event, with time and level."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for noisy in ("botocore", "aiobotocore", "aiohttp", "asyncio", "numba", "matplotlib"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    logging.getLogger("isthmus").setLevel(logging.DEBUG if verbose else logging.INFO)


def quiet() -> None:
    """Warnings only: for commands that have a display of their own."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", force=True)

"""The bus for announcements: the port, its implementations, and opening by URL."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from isthmus.bus.base import START, Bus, BusItem
from isthmus.bus.sqlite import open_sqlite
from isthmus.errors import InputError
from isthmus.runtime.urls import redacted, split

__all__ = ["START", "Bus", "BusItem", "default_bus", "open_bus"]

EMBEDDED_FILE = "bus.sqlite"


def default_bus(run_url: str) -> str | None:
    """Return the URL of the embedded bus beside a file store, or None for a run in a bucket."""
    parts = split(run_url)
    if parts.scheme not in ("", "file"):
        return None
    path = Path(parts.path if parts.scheme else run_url).expanduser().absolute()
    return f"sqlite://{path / EMBEDDED_FILE}"


@asynccontextmanager
async def open_bus(url: str, run: bytes) -> AsyncIterator[Bus]:
    """Open `redis://host`, `rediss://…`, `unix://…` or `sqlite:///path` for the run with this digest.

    Raises `InputError` for a URL of another kind. Nothing is contacted before the first request.
    """
    parts = split(url)
    name = run[:8].hex()
    if parts.scheme in ("redis", "rediss", "unix"):
        from isthmus.bus.redis import open_redis

        async with open_redis(url, name) as redis:
            yield redis
    elif parts.scheme == "sqlite":
        # Everything after :// is a path, in which ? and # have no special meaning.
        async with open_sqlite(Path(url.partition("://")[2]), name) as sqlite:
            yield sqlite
    else:
        raise InputError(
            f"{redacted(url)}: a bus is redis://host:port or sqlite:///path, not {parts.scheme or 'a path'}"
        )

"""The bus for announcements: the port, its implementations, and opening by URL."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from isthmus.bus.base import START, Bus, BusItem
from isthmus.bus.sqlite import open_sqlite
from isthmus.errors import InputError
from isthmus.runtime.urls import Place

__all__ = ["START", "Bus", "BusItem", "default_bus", "open_bus"]

EMBEDDED_FILE = "bus.sqlite"


def default_bus(run_url: str) -> str | None:
    """Return the URL of the embedded bus beside a file store, or None for a run in a bucket."""
    folder = Place.of(run_url).folder
    return None if folder is None else f"sqlite://{folder / EMBEDDED_FILE}"


@asynccontextmanager
async def open_bus(url: str, run: bytes) -> AsyncIterator[Bus]:
    """Open `redis://host`, `rediss://…`, `unix://…` or `sqlite:///path` for the run with this digest.

    Raises `InputError` for a URL of another kind. Nothing is contacted before the first request.
    """
    place, name = Place.of(url), run[:8].hex()
    if place.scheme in ("redis", "rediss", "unix"):
        from isthmus.bus.redis import open_redis

        async with open_redis(place, name) as redis:
            yield redis
    elif place.scheme == "sqlite":
        async with open_sqlite(Path(place.path), name) as sqlite:
            yield sqlite
    else:
        raise InputError(f"{place}: a bus is redis://host:port or sqlite:///path, not {place.scheme or 'a path'}")

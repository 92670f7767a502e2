"""The bus for announcements: the port, its implementations, and opening by URL."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from isthmus.bus.base import START, Bus, BusItem
from isthmus.bus.store import SCHEME, StoreBus
from isthmus.errors import InputError
from isthmus.format.rules import Pace
from isthmus.runtime.urls import Place
from isthmus.store import EdgeStore, endpoint_of, rewrite_s
from isthmus.wording import key_flag

__all__ = [
    "BUSES",
    "IN_STORE",
    "PACE_IN_STORE",
    "START",
    "Bus",
    "BusItem",
    "default_bus",
    "default_pace",
    "in_store",
    "open_bus",
    "require_bus",
    "syncer_command",
]

EMBEDDED_FILE = "bus.sqlite"


IN_STORE = f"{SCHEME}:"
"""The URL of the bus in the run's own store."""

BUSES = (
    f"redis://…; {IN_STORE} for the run's own store; "
    f"or, for the {EMBEDDED_FILE} of a run in a folder, no --bus and no ISTHMUS_BUS"
)
"""The kinds of buses, as they are given."""

PACE_IN_STORE = Pace(heartbeat_s=5.0, silence_s=15.0)
"""Each heartbeat and each look for messages is a request to the store."""


def require_bus(url: str) -> Place:
    """Return the parts of the URL of a bus. Raises `InputError` if it is of no known kind, or says too little or much.

    Nothing is contacted.
    """
    place = Place.of(url)
    if place.scheme == SCHEME and url != IN_STORE:
        raise InputError(f"{place}: nothing may follow {IN_STORE}, which means the run's own store: leave the rest out")
    if place.scheme in ("redis", "rediss") and not place.host:
        raise InputError(f"{place}: the host is missing: write {place.scheme}://host:port")
    if place.scheme in ("sqlite", "unix") and not place.path:
        raise InputError(f"{place}: the path is missing: write {place.scheme}:///path")
    if place.scheme not in ("redis", "rediss", "sqlite", "unix", SCHEME):
        known = f"redis://host:port, sqlite:///path or {IN_STORE} (the run's own store)"
        raise InputError(f"{place}: a bus is {known}, not {place.scheme or 'a path'}")
    return place


def in_store(bus_url: str) -> bool:
    """Return whether the bus at this URL is in the run's own store."""
    return Place.of(bus_url).scheme == SCHEME


def default_bus(run_url: str) -> str:
    """Return the URL of the bus of a run for which none is given: a file in the run's folder, else the store."""
    folder = Place.of(run_url).folder
    return IN_STORE if folder is None else f"sqlite://{folder / EMBEDDED_FILE}"


def syncer_command(run_url: str, bus_url: str, more: str = "", *, signed: bool) -> str:
    """Return the command that starts a syncer of a run, to be copied; in a `signed` run a syncer needs its key.

    `more`: further flags, after a space. The bus is always named: the shell that it is copied to may have ISTHMUS_BUS.
    """
    command = f"isthmus syncer {run_url} --bus {bus_url}{more}"
    if not signed:
        return command
    keyed = f"{command}{key_flag('syncer', signed=True)}"
    return f". syncer/env && isthmus syncer{more} (with the folders of isthmus create; else {keyed})"


def default_pace(bus_url: str, run_url: str) -> Pace:
    """Return the default pace of a run that is created at this URL, for this bus. Raises `InputError`.

    The requests to a bus in a store cost nothing if the store is on this machine.
    """
    if not in_store(bus_url):
        return Pace()
    endpoint = endpoint_of(run_url)
    return Pace() if endpoint is None or Place.of(endpoint).is_loopback else PACE_IN_STORE


@asynccontextmanager
async def open_bus(
    url: str, run: bytes, store: EdgeStore | None, beat_s: float = PACE_IN_STORE.heartbeat_s
) -> AsyncIterator[Bus]:
    """Open `redis://host`, `rediss://…`, `unix://…`, `sqlite:///path` or `store:` for the run with this digest.

    `store`: the run's own, which `store:` means; None: the bus cannot be there. `beat_s`: the heartbeat of the run's
    processes. Raises `InputError` for a URL of another kind. Nothing is contacted before the first request.
    """
    place, name = require_bus(url), run[:8].hex()
    if place.scheme in ("redis", "rediss", "unix"):
        from isthmus.bus.redis import open_redis

        async with open_redis(place, name) as redis:
            yield redis
    elif place.scheme == "sqlite":
        from isthmus.bus.sqlite import open_sqlite

        async with open_sqlite(Path(place.path), name) as sqlite:
            yield sqlite
    elif store is not None:
        yield StoreBus(store.for_bus, store.runtime, name, beat_s, rewrite_s(store.url))
    else:
        raise InputError(f"{place}: no run's store is open here, and so its bus is out of reach")

"""The store port: the six things Isthmus asks of an object store, and what their failures mean."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from isthmus.errors import ObjectMissing
from isthmus.records.frame import Blob, Body, Data


class Entry(NamedTuple):
    """One object in a listing."""

    key: str
    size: int
    modified: float
    """When it was written, in seconds since 1970, on the store's clock."""


class Store(Protocol):
    """Durable, strongly consistent key → bytes.

    Every method may raise `Unavailable` (not now; the effect of a write is unknown) and `Denied` (an operator must
    act). Writes are atomic: a reader sees all of an object or none of it.
    """

    url: str

    async def get(self, key: str) -> Body:
        """Return the object. Raises `ObjectMissing`."""
        ...

    async def get_range(self, key: str, start: int, stop: int) -> Body:
        """Return bytes [start, stop) of the object, fewer where it ends earlier. Raises `ObjectMissing`."""
        ...

    async def put(self, key: str, data: Data) -> None:
        """Write the object, replacing what was there."""
        ...

    async def create(self, key: str, data: Blob) -> bool:
        """Write the object only where there is none: True if this call did, False if something was there."""
        ...

    async def list(self, prefix: str) -> Sequence[Entry]:
        """Return all objects below a prefix that ends with '/' (or is empty), in order of their keys."""
        ...

    async def delete(self, key: str) -> None:
        """Remove the object; nothing happens where there is none."""
        ...


async def is_there(store: Store, key: str) -> bool:
    """Return whether there is an object, by its first byte."""
    try:
        await store.get_range(key, 0, 1)
    except ObjectMissing:
        return False
    return True

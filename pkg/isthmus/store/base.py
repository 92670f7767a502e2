"""The store port: the six things Isthmus asks of an object store, and what their failures mean."""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from isthmus.errors import ObjectMissing
from isthmus.format.records.frame import Blob, Body, Data, Gathered
from isthmus.runtime.clock import Runtime

PART_BYTES = 64 << 20
"""No request to a bucket carries more: larger objects go in parts, several at once."""

RANGE_BYTES = 16 << 20
"""Larger objects are read from a bucket in ranges of so many bytes, several at once: one connection alone does not
fill a long link that loses packets."""


def requests_to_read(size: float) -> int:
    """Return how many requests reading an object of so many bytes from a bucket takes."""
    return max(1, math.ceil(size / RANGE_BYTES))


def requests_to_write(size: float) -> int:
    """Return how many requests writing such an object takes: in parts, one to begin and one to end them as well."""
    return 1 if size <= PART_BYTES else math.ceil(size / PART_BYTES) + 2


_INLINE_MAX = 1 << 18
"""Bytes whose copy is not worth leaving the loop for."""


async def part_of(data: Gathered, start: int, stop: int, runtime: Runtime) -> Blob:
    """Return bytes [start, stop) for one request: copied away from the loop where they are many."""
    if stop - start <= _INLINE_MAX:
        return data.part(start, stop)
    return await runtime.offload(data.part, start, stop)


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

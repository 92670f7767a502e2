"""The store port: the six operations Isthmus needs of an object store, and what their failures mean."""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from isthmus.errors import ObjectMissing
from isthmus.format.records.frame import Blob, Body, Data, Gathered
from isthmus.runtime.clock import Runtime

PART_BYTES = 64 << 20
"""Largest body of one write to a bucket [bytes]; larger objects are written in parts, several at once."""

RANGE_BYTES = 16 << 20
"""Larger objects are read from a bucket in ranges of this many bytes, several at once.

A single connection does not fill a long link that loses packets.
"""


def requests_to_read(size: float) -> int:
    """Return how many requests are needed to read an object of `size` bytes from a bucket."""
    return max(1, math.ceil(size / RANGE_BYTES))


def requests_to_write(size: float) -> int:
    """Return how many requests are needed to write an object of `size` bytes to a bucket.

    An upload in parts takes one request for each part, one to begin and one to complete it.
    """
    return 1 if size <= PART_BYTES else math.ceil(size / PART_BYTES) + 2


_INLINE_MAX = 1 << 18
"""Up to this many bytes are copied on the event loop: moving the copy to a thread would cost more."""


async def part_of(data: Gathered, start: int, stop: int, runtime: Runtime) -> Blob:
    """Return bytes [start, stop) for one request; a large part is copied away from the event loop."""
    if stop - start <= _INLINE_MAX:
        return data.part(start, stop)
    return await runtime.offload(data.part, start, stop)


class Entry(NamedTuple):
    """One object in a listing."""

    key: str
    size: int
    modified: float
    """Time of the write, in seconds since 1970, on the store's clock."""


class Store(Protocol):
    """A durable, strongly consistent map from keys to bytes.

    Every method may raise `Unavailable` (not now; the effect of a write is unknown) and `Denied` (an operator must
    act). Writes are atomic: a reader sees all of an object or none of it.
    """

    url: str

    async def get(self, key: str) -> Body:
        """Return the object. Raises `ObjectMissing`."""
        ...

    async def get_range(self, key: str, start: int, stop: int) -> Body:
        """Return bytes [start, stop) of the object, fewer if it ends earlier. Raises `ObjectMissing`."""
        ...

    async def put(self, key: str, data: Data) -> None:
        """Write the object, replacing any object under this key."""
        ...

    async def create(self, key: str, data: Blob) -> bool:
        """Write the object only if the key is free: True if this call wrote it, False if an object was there."""
        ...

    async def list(self, prefix: str) -> Sequence[Entry]:
        """Return all objects below a prefix that ends with '/' (or is empty), in order of their keys."""
        ...

    async def delete(self, key: str) -> None:
        """Delete the object; do nothing if there is none."""
        ...


async def is_there(store: Store, key: str) -> bool:
    """Return whether an object exists, by reading its first byte. Raises `Unavailable`, `Denied`."""
    try:
        await store.get_range(key, 0, 1)
    except ObjectMissing:
        return False
    return True

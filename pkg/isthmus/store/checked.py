"""Reading objects with a limit on their size: an attacker who may write there could store a terabyte.

Large objects are read in pieces. Each piece is checked as it arrives, and only a piece that is not what was written is
read again. The digests of pieces that an object states prove nothing: the caller checks the digest of the whole object.
"""

import asyncio

import numpy as np

from isthmus.errors import RecordInvalid, first_cause
from isthmus.format import digests
from isthmus.format.records import frame
from isthmus.format.records.frame import Blob, Body
from isthmus.reasons import Reason
from isthmus.runtime.clock import Runtime
from isthmus.store.base import Store

PIECES_AT_ONCE = 8
TRIES = 3
"""How often a piece is read, at most, until its bytes match its digest."""

HEAD_BYTES = 64 << 10
"""Bytes of an object that are read first; a longer head is then read again as a whole."""


async def whole(store: Store, key: str, kind: frame.Kind, payload: int = 0) -> Body:
    """Return an object of a kind, with at most `payload` bytes of payload.

    Raises `ObjectMissing`, `Unavailable`, `Denied`, and `RecordInvalid` for a longer object, without reading the rest.
    """
    return await _at_most(store, key, frame.largest(kind, payload))


async def _at_most(store: Store, key: str, most: int) -> Body:
    blob = await store.get_range(key, 0, most + 1)
    if len(blob) > most:
        raise RecordInvalid(Reason.OVERSIZED, f"{key} has more than the {most} bytes that one of its kind can have")
    return blob


async def read(
    store: Store, runtime: Runtime, key: str, at_most: int, *, first: int | None = None, cut: bool = False
) -> Body:
    """Return an object, checking the pieces of a large one as they arrive.

    `at_most`: the most bytes that an object of this kind can have; no more are read. `first`: return only this many
    bytes from the beginning, or a few more. `cut`: return the beginning of a longer object instead of raising; the
    caller then finds that its digest is wrong.

    Raises `ObjectMissing`, `Unavailable`, `Denied`, and `RecordInvalid` if the object is longer, or a piece does not
    match the digest that the object states.
    """
    head: Body = bytearray()
    table = None
    if at_most > frame.PIECE_BYTES:
        head, table = await _head(store, key, at_most)
    if table is None:
        if first is not None or cut:
            return await store.get_range(key, 0, at_most if first is None else first)
        return await _at_most(store, key, at_most)
    wanted = [piece for piece in table.pieces() if first is None or piece[0] < first]
    end = wanted[-1][1] if wanted else table.start
    out = frame.blank(end)
    frame.fill(out[: table.start], np.frombuffer(head, np.uint8)[: table.start])
    slots = asyncio.Semaphore(PIECES_AT_ONCE)

    async def one(begin: int, stop: int, digest: bytes) -> None:
        async with slots:
            for _ in range(TRIES):
                blob = await store.get_range(key, begin, stop)
                if await runtime.offload(_placed, blob, digest, out[begin:stop]):
                    return
        raise RecordInvalid(Reason.DIGEST_MISMATCH, f"{key}: bytes {begin} to {stop} are not what was written")

    try:
        async with asyncio.TaskGroup() as tasks:
            for piece in wanted:
                tasks.create_task(one(*piece))
    except BaseExceptionGroup as group:
        raise first_cause(group) from None
    return out


async def _head(store: Store, key: str, at_most: int) -> tuple[Body, frame.Table | None]:
    """Return the beginning of an object, up to its payload, and its table of pieces.

    The table is None if it is missing or incomplete, or if the object would be longer than `at_most`.
    """
    head = await store.get_range(key, 0, HEAD_BYTES)
    table = frame.table_of(head)
    if table is not None and table.start + table.size > at_most:
        table = None
    if table is not None and table.start > len(head) == HEAD_BYTES:
        head = await store.get_range(key, 0, table.start)
        table = frame.table_of(head)
    whole = table is not None and table.start <= len(head) and len([*table.pieces()]) * table.piece >= table.size
    return head, table if whole else None


def _placed(blob: Blob, digest: bytes, place: memoryview) -> bool:
    """Copy a piece to its place if its digest is right; return whether it is."""
    if len(blob) != len(place) or digests.digest(blob) != digest:
        return False
    frame.fill(place, np.frombuffer(blob, np.uint8))
    return True

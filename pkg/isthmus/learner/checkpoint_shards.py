"""Parts of a checkpoint: objects of their own that hold its arrays in pieces.

Each rank of a learner writes the pieces that it holds, and reads those it needs of the pieces that others wrote. Each
piece has its own digest and is checked when it arrives.
"""

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import msgspec
import numpy as np

from isthmus.codecs.kernels import U8
from isthmus.errors import RecordInvalid
from isthmus.format import digests
from isthmus.format.records import frame
from isthmus.format.records.keys import part_key
from isthmus.format.records.objects import CheckpointHeader, Part, PartHeader, Piece
from isthmus.format.records.tree import Leaf, laid, numpy_leaf
from isthmus.log import Log
from isthmus.log.verify import head_of
from isthmus.reasons import Reason

Extent = tuple[int, ...]

LOCAL = 99_999
"""Number, in place of a rank, of the part with the model's local tensors. Readers of the global model need no other."""


class ShardRef(msgspec.Struct, frozen=True, array_like=True):
    """The place in the store of a rectangle of an array."""

    key: str
    at: int
    """The byte of the object at which the rectangle begins."""
    size: int
    digest: bytes
    offset: Extent
    """Where the rectangle begins in the array."""
    shape: Extent


@dataclass(frozen=True, slots=True)
class ShardToWrite:
    """A rectangle of an array that a rank has to write."""

    rank: int
    held: Any
    """Its bytes in C order, in the form that the rank knows: an array, or an object that stands for one."""
    offset: Extent
    shape: Extent


# --- writing ----------------------------------------------------------------------------------------------------------


def by_rank(leaves: Sequence[Leaf]) -> Mapping[int, list[tuple[Piece, Any]]]:
    """Return the pieces of these arrays that each rank has to write, each with the array that the rank holds.

    The rank fills in sizes and digests.
    """
    found: defaultdict[int, list[tuple[Piece, Any]]] = defaultdict(list)
    for number, leaf in enumerate(leaves):
        for away in leaf.pieces:
            assert isinstance(away, ShardToWrite), "a leaf that is to be written"
            found[away.rank].append((Piece(number, away.offset, away.shape, 0, 0, bytes(32)), away.held))
    return found


async def write(log: Log, header: PartHeader, arrays: Sequence["np.ndarray[Any, Any]"]) -> Part:
    """Store a part with these arrays as its pieces, and return its reference. Raises `Unavailable`, `Denied`."""
    blob, part = await log.runtime.offload(_packed, log, header, arrays)
    await log.store.put(part.key, blob)
    return part


def _packed(log: Log, header: PartHeader, arrays: Sequence["np.ndarray[Any, Any]"]) -> tuple[frame.Gathered, Part]:
    leaves = [numpy_leaf(array) for array in arrays]
    starts, payload = laid(leaves)
    pieces = tuple(
        msgspec.structs.replace(piece, at=at, size=leaf.spec.size, digest=digests.digest(leaf.data))
        for piece, leaf, at in zip(header.pieces, leaves, starts, strict=True)
    )
    whole = frame.gathered(frame.Kind.PART, msgspec.structs.replace(header, pieces=pieces), payload)
    log.seal(whole)
    head = len(whole) - sum(map(len, payload))
    digest = digests.digest(whole.part(0, head))
    key = part_key(header.learner, header.incarnation, header.step, header.rank, digest)
    return whole, Part(key=key, size=len(whole), head=head, digest=digest)


# --- reading ----------------------------------------------------------------------------------------------------------


async def located(log: Log, header: CheckpointHeader, most: int) -> Mapping[int, tuple[ShardRef, ...]]:
    """Return, by array number, where the pieces of the checkpoint's arrays in parts lie.

    `most`: the largest total size of the parts' heads that is read, in bytes.

    Raises `ObjectMissing`, and `RecordInvalid` if a part's head is too large or is not the one that the checkpoint
    names, or if the pieces do not make up the arrays.
    """
    found: defaultdict[int, list[ShardRef]] = defaultdict(list)
    for part in header.parts:
        if part.head > min(part.size, frame.largest(frame.Kind.PART, 0)):
            raise RecordInvalid(Reason.OVERSIZED, f"{part.key} is said to begin with {part.head} bytes of header")
    if (heads_size := sum(part.head for part in header.parts)) > most:
        raise RecordInvalid(Reason.OVERSIZED, f"its parts begin with {heads_size} bytes of headers, limit {most}")
    heads = await asyncio.gather(*(log.store.get_range(part.key, 0, part.head) for part in header.parts))
    for part, head in zip(header.parts, heads, strict=True):
        said = head_of(head, part.key, PartHeader, part.digest)
        if (said.run, said.learner, said.step) != (header.run, header.learner, header.step):
            raise RecordInvalid(Reason.WRONG_RUN, f"{part.key} is of another checkpoint")
        for piece in said.pieces:
            if part.head + piece.at + piece.size > part.size:
                raise RecordInvalid(Reason.TRUNCATED, f"{part.key} ends before what it holds")
            lies = ShardRef(part.key, part.head + piece.at, piece.size, piece.digest, piece.offset, piece.shape)
            found[piece.array].append(lies)
    for number in header.in_parts:
        _require_whole(header, number, found[number])
    return {number: tuple(found[number]) for number in header.in_parts}


def _require_whole(header: CheckpointHeader, number: int, pieces: Sequence[ShardRef]) -> None:
    if number >= len(header.arrays):
        raise RecordInvalid(Reason.MALFORMED, f"there is no array {number}")
    spec = header.arrays[number]
    inside = all(
        len(p.offset) == len(p.shape) == len(spec.shape)
        and all(a + n <= m for a, n, m in zip(p.offset, p.shape, spec.shape, strict=True))
        and p.size * prod(spec.shape) == spec.size * prod(p.shape)
        for p in pieces
    )
    # Overlaps are not checked here: the learner that wrote the pieces has checked that its blocks do not overlap.
    if not inside or sum(p.size for p in pieces) != spec.size:
        raise RecordInvalid(Reason.TRUNCATED, f"its parts do not make up array {number}")


async def read(log: Log, pieces: Sequence[ShardRef], itemsize: int, offset: Extent, shape: Extent) -> U8:
    """Return a rectangle of an array, as bytes [size] in C order, from the pieces that contain it.

    Raises `Unavailable`, `ObjectMissing`, and `RecordInvalid` if a piece is not what was written.
    """
    if len(pieces) == 1 and (pieces[0].offset, pieces[0].shape) == (offset, shape):
        lies = pieces[0]
        blob = await log.store.get_range(lies.key, lies.at, lies.at + lies.size)
        await log.runtime.offload(_check, blob, lies)
        return np.frombuffer(blob, np.uint8)
    out = np.zeros(prod(shape) * itemsize, np.uint8)  # Another learner's pieces may overlap and leave gaps.
    for lies in pieces:
        begin = [max(a, b) for a, b in zip(lies.offset, offset, strict=True)]
        end = [min(a + m, b + n) for a, m, b, n in zip(lies.offset, lies.shape, offset, shape, strict=True)]
        if any(a >= b for a, b in zip(begin, end, strict=True)):
            continue
        blob = await log.store.get_range(lies.key, lies.at, lies.at + lies.size)
        await log.runtime.offload(_place, blob, lies, itemsize, out, offset, shape, begin, end)
    return out


def _place(
    blob: frame.Blob,
    lies: ShardRef,
    itemsize: int,
    out: U8,
    offset: Extent,
    shape: Extent,
    begin: Sequence[int],
    end: Sequence[int],
) -> None:
    """Check a piece and copy the wanted part of it into `out`."""
    _check(blob, lies)
    source = np.frombuffer(blob, np.uint8).reshape(*lies.shape, itemsize)
    into = out.reshape(*shape, itemsize)
    there = tuple(slice(a - o, b - o) for a, b, o in zip(begin, end, lies.offset, strict=True))
    here = tuple(slice(a - o, b - o) for a, b, o in zip(begin, end, offset, strict=True))
    into[here] = source[there]


def _check(blob: frame.Blob, lies: ShardRef) -> None:
    if len(blob) != lies.size or digests.digest(blob) != lies.digest:
        raise RecordInvalid(Reason.DIGEST_MISMATCH, f"{lies.key}: the bytes from {lies.at} on are not what was written")


async def whole(log: Log, leaf: Leaf) -> Leaf:
    """Return a leaf with its bytes, read from its pieces. Raises the errors of `read`."""
    if not leaf.pieces:
        return leaf
    spec = leaf.spec
    data = await read(log, leaf.pieces, spec.size // prod(spec.shape), (0,) * len(spec.shape), spec.shape)
    return Leaf(spec, data, shared=False)

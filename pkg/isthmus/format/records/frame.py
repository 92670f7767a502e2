"""Objects as bytes: a fixed prefix, a msgpack header, a raw payload aligned to 64 bytes. Nothing is ever unpickled.

    offset  bytes
         0      8   magic "\\x89ISTHMUS"
         8      2   version of this frame
        10      2   kind of record
        12      4   bytes of the header
        16      8   bytes of the payload
        24      4   CRC-32 of the header
        28      4   bytes of a piece of the payload; zero if pieces have no digests
        32     32   author: an Ed25519 public key; zeros if the run is unsigned
        64     64   signature by the author's key; zeros if the run is unsigned
       128      …   header (msgpack map), the digests of the pieces (BLAKE3, 32 bytes each), zeros up to a multiple of
                    64, payload to the end

All numbers are little endian. The digest of an object is the BLAKE3 of all its bytes, so it also covers the signature.
Readers rely on this digest. The digests of pieces only tell a reader which piece of a large object is damaged and has
to be fetched again, before the rest has arrived (`isthmus.store.checked`).

The signature (`isthmus.format.signing.sshsig`, in the namespace of the kind) covers the object with zeros in place of
the signature, and the BLAKE3 of the payload in place of the payload. So it covers the whole object, although only a few
hundred bytes are signed and verified. The bytes of an object are not trusted: sizes are checked before anything is
allocated or decoded, and every field of a header has a type and a range.
"""

import struct
import zlib
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

import msgpack
import msgspec
import numpy as np

from isthmus.errors import RecordInvalid
from isthmus.format import digests, memory
from isthmus.format.signing import Forged, Signer, namespace_of, verify
from isthmus.reasons import Reason
from isthmus.wording import an

Blob = bytes | bytearray | memoryview

Body = bytearray | memoryview
"""An object that was read or drafted. Its holder owns the bytes and may write into them."""


class Gathered:
    """An object whose bytes lie in several places, and stay there until they are sent: it is never copied whole."""

    def __init__(self, pieces: "Sequence[Blob | np.ndarray[Any, Any]]") -> None:
        """Take the pieces whose concatenation is the object. None of them may change while this object exists."""
        views = [memoryview(_flat(piece)) for piece in pieces]
        self._views = [view for view in views if len(view)]
        self._size = sum(map(len, self._views))

    def __len__(self) -> int:
        return self._size

    def __bytes__(self) -> bytes:
        return b"".join(self._views)

    def views(self) -> Iterator[memoryview]:
        """Yield views of the object's bytes, in order, without a copy."""
        yield from self._views

    def part(self, start: int, stop: int) -> memoryview:
        """Return bytes [start, stop), as a copy if they lie in several places."""
        found, at = [], 0
        for view in self._views:
            if at < stop and at + len(view) > start:
                found.append(view[max(0, start - at) : stop - at])
            at += len(view)
        if len(found) == 1:
            return found[0]
        out = blank(sum(map(len, found)))
        at = 0
        for view in found:
            fill(out[at : at + len(view)], np.frombuffer(view, np.uint8))
            at += len(view)
        return out


Data = Blob | Gathered
"""An object as a store takes it."""


def _flat(piece: "Blob | np.ndarray[Any, Any]") -> Blob:
    return np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data if isinstance(piece, np.ndarray) else piece


MAGIC = b"\x89ISTHMUS"
FRAME_VERSION = 2
"""Version 1 used SHA-256 instead of BLAKE3."""
PREFIX = struct.Struct("<8sHHIQII32s64s")
ALIGN = 64
UNSIGNED_AUTHOR, UNSIGNED_SIGNATURE = bytes(32), bytes(64)
_AUTHOR, _SIGNATURE = slice(32, 64), slice(64, 128)

PIECE_BYTES = 16 << 20
"""Payloads larger than this are written with a digest for each piece of this size, which one request fetches."""

PIECE_LEAST, PIECE_MOST = 1 << 20, 1 << 30
"""Limits of the size of a piece: digests of smaller pieces would take too much space, and larger pieces are no use."""

T = TypeVar("T", bound=msgspec.Struct)


class Kind(IntEnum):
    """The kind of a record."""

    RUN = 1
    UPDATE = 2
    VALUE = 3
    SNAPSHOT = 4
    COMMIT = 5
    MESSAGE = 6
    CLAIM = 7
    SEGMENT = 8
    PACKED = 9
    CHECKPOINT = 10
    PART = 11
    EVALUATION = 12
    MEMBERS = 13
    MANIFEST = 14
    PROMOTION = 15


PIECED = frozenset({Kind.UPDATE, Kind.VALUE, Kind.SNAPSHOT, Kind.CHECKPOINT})
"""Kinds whose payloads may have digests of pieces. (The header of a checkpoint's part has digests of its arrays.)"""

HEADER_MAX = {
    # The digests of version 0 of up to 4,096 fragments take 34 bytes each, 136 KiB; the rest is for the other fields.
    Kind.RUN: 160 << 10,
    Kind.UPDATE: 4 << 10,
    Kind.VALUE: 4 << 10,
    Kind.SNAPSHOT: 4 << 10,
    # Up to 4,096 inputs with the longest possible names, and as many expected learners: 3.8 MB.
    Kind.COMMIT: 8 << 20,
    Kind.MESSAGE: 64 << 10,
    Kind.CLAIM: 64 << 10,
    Kind.SEGMENT: 64 << 10,
    Kind.PACKED: 4 << 10,
    Kind.EVALUATION: 4 << 10,
    # The name and key of every member, a version for each of up to 4,096 fragments, and the charter: 256 sources for
    # each of 4,096 members would be 68 MB, so a charter may not have the most of everything.
    Kind.MEMBERS: 1 << 20,
    # Up to 256 sources, and 64 statements of 256 characters in up to 1 KiB each: 94 KiB.
    Kind.MANIFEST: 128 << 10,
    # A version for each of up to 4,096 fragments, and the keys of up to 64 measurements.
    Kind.PROMOTION: 96 << 10,
    # The structure of an optimizer's and a sampler's state, whose arrays are the payload. Each array takes some 200
    # bytes of header, and a mixture of experts with Adam has some 130,000 arrays.
    Kind.CHECKPOINT: 64 << 20,
    # The rectangles of arrays in the part.
    Kind.PART: 64 << 20,
}
"""Most bytes of a header, for each kind of record. Headers whose limit has no comment fit on a page or two."""


class Draft(NamedTuple):
    """An object under construction: the caller fills `payload` [n] in place, then uses `blob`."""

    blob: memoryview
    payload: memoryview


def blank(size: int) -> memoryview:
    """Return bytes [size] of arbitrary values to write into."""
    return memory.room(size).data


def fill(place: memoryview, data: "np.ndarray[Any, Any]") -> None:
    """Copy an array's bytes to a place of the same size. Unlike assignment to a view, this lets other threads run."""
    np.copyto(np.frombuffer(place, np.uint8), np.ascontiguousarray(data).reshape(-1).view(np.uint8))


def gathered(kind: Kind, header: msgspec.Struct, pieces: "Sequence[Blob | np.ndarray[Any, Any]]") -> Gathered:
    """Return an object whose payload, these pieces, is not copied. Raises `ValueError` if the header is too large."""
    whole = Gathered(pieces)
    return Gathered([_head(kind, header, len(whole), whole), *whole.views()])


def draft(kind: Kind, header: msgspec.Struct, payload_size: int = 0) -> Draft:
    """Return an object with its prefix and header written, and a payload of zeros.

    Its payload cannot have digests of pieces, because it is filled in later, so it must not be larger than one piece.
    Raises `ValueError` if the header is too large.
    """
    assert kind not in PIECED or payload_size <= PIECE_BYTES, "gather it, or write it"
    out = _headed(kind, header, payload_size)
    np.frombuffer(out.payload, np.uint8)[:] = 0
    return out


def _headed(kind: Kind, header: msgspec.Struct, payload_size: int, payload: Gathered | None = None) -> Draft:
    head = _head(kind, header, payload_size, payload)
    blob = blank(len(head) + payload_size)
    blob[: len(head)] = head
    return Draft(blob, blob[len(head) :])


def written(kind: Kind, header: msgspec.Struct, payload: "np.ndarray[Any, Any]") -> Body:
    """Return an object with a copy of this payload. Raises `ValueError` if the header is too large."""
    out = _headed(kind, header, payload.nbytes, Gathered([payload]))
    fill(out.payload, payload)
    return out.blob


def _head(kind: Kind, header: msgspec.Struct, payload_size: int, payload: Gathered | None) -> bytearray:
    packed = msgpack.packb(msgspec.to_builtins(header, builtin_types=(bytes,)), use_bin_type=True)
    if len(packed) > HEADER_MAX[kind]:
        raise ValueError(
            f"{an(kind.name.lower())} header of {len(packed)} bytes is over its limit of {HEADER_MAX[kind]}"
        )
    table = b""
    if payload is not None and kind in PIECED and payload_size > PIECE_BYTES:
        table = b"".join(
            digests.digest(payload.part(at, min(at + PIECE_BYTES, payload_size)))
            for at in range(0, payload_size, PIECE_BYTES)
        )
    start = payload_offset(len(packed) + len(table))
    blob = bytearray(start)
    PREFIX.pack_into(
        blob,
        0,
        MAGIC,
        FRAME_VERSION,
        kind,
        len(packed),
        payload_size,
        zlib.crc32(packed),
        PIECE_BYTES if table else 0,
        UNSIGNED_AUTHOR,
        UNSIGNED_SIGNATURE,
    )
    blob[PREFIX.size : PREFIX.size + len(packed)] = packed
    blob[PREFIX.size + len(packed) : PREFIX.size + len(packed) + len(table)] = table
    return blob


def payload_offset(size: int) -> int:
    """Return the byte at which the payload starts if the header and the digests of pieces have `size` bytes."""
    return -(-(PREFIX.size + size) // ALIGN) * ALIGN


def largest(kind: Kind, payload_size: int) -> int:
    """Return the most bytes that a record of this kind with such a payload can have, as this release writes it."""
    pieces = _pieces(payload_size, PIECE_BYTES) if payload_size > PIECE_BYTES else 0
    return payload_offset(HEADER_MAX[kind] + 32 * pieces) + payload_size


def _pieces(payload_size: int, piece: int) -> int:
    return -(-payload_size // piece) if piece else 0


class Table(NamedTuple):
    """The places and digests of the pieces of an object's payload."""

    start: int
    """The byte of the object at which the payload starts."""
    size: int
    """Bytes of the payload."""
    piece: int
    digests: tuple[bytes, ...]

    def pieces(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield for each piece the bytes [start, stop) of the object, and the digest."""
        for n, digest in enumerate(self.digests):
            begin = n * self.piece
            yield self.start + begin, self.start + min(begin + self.piece, self.size), digest


def table_of(blob: Blob) -> Table | None:
    """Return the table of pieces at the beginning of an object, or None if there is none or it is not an object.

    The table has only those digests that lie within blob. It is not trusted: a reader also checks the digest of the
    whole object.
    """
    if len(blob) < PREFIX.size:
        return None
    magic, version, kind, header_size, payload_size, _, piece, *_ = PREFIX.unpack_from(blob)
    known = magic == MAGIC and version == FRAME_VERSION and kind in PIECED
    if not known or header_size > HEADER_MAX[Kind(kind)] or not PIECE_LEAST <= piece <= PIECE_MOST:
        return None
    first, count = PREFIX.size + header_size, _pieces(payload_size, piece)
    at_hand = bytes(blob[first : first + 32 * count])
    found = tuple(at_hand[at : at + 32] for at in range(0, len(at_hand) - 31, 32))
    return Table(payload_offset(header_size + 32 * count), payload_size, piece, found)


def parse(blob: Blob, kind: Kind, schema: type[T]) -> tuple[T, memoryview]:
    """Return the validated header and a view of the payload. Raises `RecordInvalid` with a named reason."""
    header_size, payload_size, pieces = _prefix(blob, kind)
    start = payload_offset(header_size + 32 * pieces)
    if len(blob) != start + payload_size:
        reason = Reason.TRUNCATED if len(blob) < start + payload_size else Reason.OVERSIZED
        raise RecordInvalid(reason, f"{len(blob)} bytes where the prefix says {start + payload_size}")
    view = memoryview(blob)
    if any(view[PREFIX.size + header_size + 32 * pieces : start]):
        raise RecordInvalid(Reason.MALFORMED, "padding is not zero")
    return _header(view, header_size, schema), view[start:]


def parse_head(blob: Blob, kind: Kind, schema: type[T]) -> T:
    """Return the validated header of an object, given its beginning. Raises `RecordInvalid`."""
    header_size, *_ = _prefix(blob, kind)
    if len(blob) < PREFIX.size + header_size:
        raise RecordInvalid(Reason.TRUNCATED, f"{len(blob)} bytes do not hold a header of {header_size}")
    return _header(memoryview(blob), header_size, schema)


def head_end(blob: Blob, kind: Kind) -> int:
    """Return the byte at which the header of an object ends, given its beginning. Raises `RecordInvalid`."""
    return PREFIX.size + _prefix(blob, kind)[0]


def kind_of(blob: Blob) -> int:
    """Return the kind of record in a prefix, or 0 if blob is too short to have one. Nothing is checked."""
    return int(PREFIX.unpack_from(blob)[2]) if len(blob) >= PREFIX.size else 0


def header_size(blob: Blob) -> int:
    """Return the size in bytes of the header of an object whose prefix has been checked."""
    return int(PREFIX.unpack_from(blob)[3])


def payload_start(blob: Blob) -> int:
    """Return the byte at which the payload starts according to a prefix, or 0 if there is none. Nothing is checked."""
    if len(blob) < PREFIX.size or bytes(blob[:8]) != MAGIC:
        return 0
    size, payload_size, _, piece = PREFIX.unpack_from(blob)[3:7]
    return payload_offset(size + 32 * _pieces(payload_size, piece))


# --- signatures -------------------------------------------------------------------------------------------------------


def seal(data: "Body | Gathered", signer: Signer | None) -> None:
    """Sign a complete object in place; without a signer leave it unsigned.

    This hashes the payload, so call it off the event loop for large objects.
    """
    if signer is None:
        return
    head = next(data.views()) if isinstance(data, Gathered) else memoryview(data)
    head[_AUTHOR] = signer.author
    head[_SIGNATURE] = UNSIGNED_SIGNATURE
    head[_SIGNATURE] = signer.sign(namespace_of(Kind(kind_of(head)).name), signed_part(data))


def signed_part(data: Data) -> bytes:
    """Return the bytes that an object's author signs: the head without the signature, and the digest of the payload."""
    if isinstance(data, Gathered):
        views = list(data.views())
        head, payload = memoryview(views[0]), digests.digest_of(views[1:])
    else:
        head = memoryview(data)[: payload_start(data) or len(data)]
        payload = digests.digest(memoryview(data)[len(head) :])
    return b"".join((head[: _SIGNATURE.start], UNSIGNED_SIGNATURE, head[_SIGNATURE.stop :], payload))


def author_of(blob: Blob) -> bytes:
    """Return the author [32 bytes] in an object's prefix, zeros if it is unsigned. Nothing is checked."""
    return bytes(blob[_AUTHOR])


def signature_of(blob: Blob) -> bytes:
    """Return the signature [64 bytes] in an object's prefix. Nothing is checked."""
    return bytes(blob[_SIGNATURE])


def require_signature(blob: Blob, kind: Kind) -> bytes:
    """Return the author [32 bytes] of an object that `parse` has accepted, after verifying its signature.

    Raises `RecordInvalid` if the object is unsigned or the signature is wrong. This hashes the payload, so call it off
    the event loop for large objects.
    """
    author = author_of(blob)
    if author == UNSIGNED_AUTHOR:
        raise RecordInvalid(Reason.UNSIGNED, f"this {kind.name.lower()} is not signed")
    try:
        verify(author, namespace_of(kind.name), signed_part(blob), signature_of(blob))
    except Forged as error:
        raise RecordInvalid(Reason.BAD_SIGNATURE, str(error)) from None
    return author


def unsealed(blob: Blob) -> bytearray:
    """Return a copy of an object without author and signature. It can be made from the object's content alone."""
    out = bytearray(blob)
    out[_AUTHOR], out[_SIGNATURE] = UNSIGNED_AUTHOR, UNSIGNED_SIGNATURE
    return out


# --- digests and prefixes ---------------------------------------------------------------------------------------------


def digest(blob: Data) -> bytes:
    """Return the digest [32 bytes] of the whole object."""
    return digests.digest_of(blob.views()) if isinstance(blob, Gathered) else digests.digest(blob)


def _prefix(blob: Blob, kind: Kind) -> tuple[int, int, int]:
    """Return the bytes of the header, the bytes of the payload, and the number of its pieces that have digests."""
    if len(blob) < PREFIX.size:
        raise RecordInvalid(Reason.TRUNCATED, f"{len(blob)} bytes do not hold a prefix of {PREFIX.size}")
    magic, version, found, header_size, payload_size, _, piece, author, signature = PREFIX.unpack_from(blob)
    if magic != MAGIC:
        raise RecordInvalid(Reason.MALFORMED, "no Isthmus object: wrong magic")
    if version != FRAME_VERSION:
        raise RecordInvalid(Reason.MALFORMED, f"frame version {version}; this release reads {FRAME_VERSION}")
    if found != kind:
        raise RecordInvalid(Reason.MALFORMED, f"record of kind {found} where {kind.name.lower()} ({kind}) was expected")
    if header_size > HEADER_MAX[kind]:
        raise RecordInvalid(Reason.OVERSIZED, f"header of {header_size} bytes, limit {HEADER_MAX[kind]}")
    if (author == UNSIGNED_AUTHOR) != (signature == UNSIGNED_SIGNATURE):
        raise RecordInvalid(Reason.MALFORMED, "an author and no signature, or a signature and no author")
    if piece and (kind not in PIECED or not PIECE_LEAST <= piece <= PIECE_MOST):
        raise RecordInvalid(Reason.MALFORMED, f"pieces of {piece} bytes in {an(kind.name.lower())}")
    return header_size, payload_size, _pieces(payload_size, piece)


def _header(view: memoryview, size: int, schema: type[T]) -> T:
    raw = view[PREFIX.size : PREFIX.size + size]
    if zlib.crc32(raw) != PREFIX.unpack_from(view)[5]:
        raise RecordInvalid(Reason.MALFORMED, "the header does not match its CRC-32")
    try:
        plain = msgpack.unpackb(
            raw,
            raw=False,
            use_list=False,
            strict_map_key=True,
            max_str_len=size,
            max_bin_len=size,
            max_array_len=size,
            max_map_len=size,
            max_ext_len=0,
        )
        return msgspec.convert(plain, schema, builtin_types=(bytes,))
    except (msgspec.ValidationError, ValueError, TypeError, RecursionError, msgpack.exceptions.StackError) as error:
        raise RecordInvalid(Reason.MALFORMED, f"header: {error}") from None

"""Mutates any bytes, and also fields of a header. There it corrects the checksum, to get past the checks."""

import random
import struct
import zlib
from typing import Any

import msgpack

from isthmus.format.records import frame

INTEGERS = (0, 1, 2, 31, 127, 128, 255, 256, 1 << 16, 1 << 20, (1 << 31) - 1, 1 << 32, 10**12, 1 << 53, (1 << 63) - 1,
            (1 << 64) - 1, -1, -(1 << 31), -(1 << 63))  # fmt: skip
FLOATS = (0.0, -0.0, 1e-320, 1e308, -1e308, float("inf"), float("nan"), 0.5, 1e9, 1e11, 1e300)
TEXTS = (
    "",
    "a",
    "../x",
    "a/b",
    "\x00",
    "\x1b[2J",
    "x" * 300,
    "١",
    "é" * 64,
    "None",
    "updates/00000/eu/x",
    "*",
    "a" * 63,
)

MOST = 1 << 20
"""Largest size of an input in bytes."""


def mutated(data: bytes, draw: random.Random, other: bytes = b"", framed: bool = True) -> bytes:
    """Return data with a few changes. `other`: bytes from which pieces may be copied."""
    out = data
    for _ in range(draw.choice((1, 1, 1, 2, 3, 8))):
        if framed and len(out) >= frame.PREFIX.size and draw.random() < 0.6:
            out = _in_frame(out, draw)
        else:
            out = _bytes(bytearray(out), draw, other)
    return out[:MOST]


def _in_frame(data: bytes, draw: random.Random) -> bytes:
    """Change header, payload or prefix. Then correct sizes and checksum, unless the change is to them."""
    try:
        magic, version, kind, size, payload, crc, piece, author, signature = frame.PREFIX.unpack_from(data)
    except struct.error:
        return data
    raw = data[frame.PREFIX.size : frame.PREFIX.size + size]
    rest = data[frame.payload_start(data) or len(data) :]
    what = draw.random()
    if what < 0.75:
        try:
            plain = msgpack.unpackb(raw, raw=False, strict_map_key=False)
            raw = msgpack.packb(_changed(plain, draw), use_bin_type=True)
        except (ValueError, TypeError, OverflowError, msgpack.exceptions.UnpackException, RecursionError):
            raw = _bytes(bytearray(raw), draw, raw)
    elif what < 0.85:
        rest = _bytes(bytearray(rest), draw, raw)
    elif what < 0.95:
        kind = draw.randrange(16)
        piece = draw.choice((0, 1 << 20, 1 << 24, 1 << 30, (1 << 32) - 1))
        payload = draw.choice((payload, len(rest), 0, 1 << 40, (1 << 64) - 1))
        size = draw.choice((len(raw), 0, 1 << 20, (1 << 32) - 1))
        head = frame.PREFIX.pack(magic, version, kind, size, payload, crc, piece, author, signature)
        return head + raw + rest
    else:
        author, signature = draw.randbytes(32), draw.randbytes(64)
    start = frame.payload_offset(len(raw))
    head = frame.PREFIX.pack(magic, version, kind, len(raw), len(rest), zlib.crc32(raw), 0, author, signature)
    return (head + raw).ljust(start, b"\0") + rest


def _changed(node: Any, draw: random.Random, depth: int = 0) -> Any:
    """Return a tree with one change in it."""
    if isinstance(node, dict) and node and draw.random() < 0.9:
        key = draw.choice(list(node))
        what = draw.random()
        if what < 0.06:
            return {k: v for k, v in node.items() if k != key}
        if what < 0.1:
            return {**node, draw.choice(TEXTS): node[key]}
        return {**node, key: _changed(node[key], draw, depth + 1)}
    if isinstance(node, list) and node and draw.random() < 0.9:
        at, what = draw.randrange(len(node)), draw.random()
        if what < 0.08:
            return node[:at] + node[at + 1 :]
        if what < 0.16:
            return node * draw.choice((2, 3, 64)) if len(node) < 64 else node
        return [*node[:at], _changed(node[at], draw, depth + 1), *node[at + 1 :]]
    return _value(node, draw, depth)


def _value(node: Any, draw: random.Random, depth: int) -> Any:
    if draw.random() < 0.15:
        deep: Any = draw.choice((1, "a", None))
        for _ in range(draw.choice((1, 4, 64, 600))):
            deep = [deep] if draw.random() < 0.5 else {"a": deep}
        return deep
    if isinstance(node, bool):
        return not node
    if isinstance(node, int):
        return draw.choice((*INTEGERS, node + 1, node - 1, node ^ (1 << draw.randrange(40))))
    if isinstance(node, float):
        return draw.choice((*FLOATS, node * 2, -node))
    if isinstance(node, bytes):
        return draw.choice((b"", node[:-1], node + b"\0", draw.randbytes(len(node)), bytes(len(node))))
    if isinstance(node, str):
        return draw.choice((*TEXTS, node + "x", node[::-1], node[:-1]))
    return draw.choice((None, 0, "", b"", [], {}, 1.5))


def _bytes(data: bytearray, draw: random.Random, other: bytes) -> bytes:
    """Change bytes without regard to their meaning."""
    if not data:
        return draw.randbytes(draw.choice((0, 1, 8, 200)))
    at = draw.randrange(len(data))
    match draw.randrange(8):
        case 0:
            data[at] ^= 1 << draw.randrange(8)
        case 1:
            data[at] = draw.randrange(256)
        case 2:
            del data[at : at + draw.choice((1, 2, 4, 64, 4096))]
        case 3:
            data[at:at] = draw.randbytes(draw.choice((1, 2, 4, 64)))
        case 4:
            value = draw.choice(INTEGERS) & ((1 << 64) - 1)
            width = draw.choice((1, 2, 4, 8))
            data[at : at + width] = value.to_bytes(8, draw.choice(("little", "big")))[:width]
        case 5 if other:
            begin = draw.randrange(len(other))
            data[at : at + draw.choice((0, 8, 64))] = other[begin : begin + draw.choice((8, 64, 512))]
        case 6:
            return bytes(data[:at])
        case _:
            end = min(len(data), at + draw.choice((4, 16, 64)))
            data[at:end] = bytes(end - at)
    return bytes(data)

"""Codecs by name, and the packing of a fragment's difference for the wire, tensor by tensor."""

from functools import cache

import numpy as np

from isthmus.codecs import kernels
from isthmus.codecs.base import BadCode, Codec
from isthmus.codecs.bf16 import BFloat16
from isthmus.codecs.f32 import Float32
from isthmus.codecs.int4 import Int4
from isthmus.codecs.int8 import Int8
from isthmus.codecs.kernels import F32, U8
from isthmus.codecs.rate import SMALL, Rate
from isthmus.format import memory
from isthmus.format.layout import Fragment
from isthmus.format.rules import rate_of, require_codec
from isthmus.runtime.clock import ALONE, ComputePool

__all__ = [
    "CODECS",
    "BadCode",
    "Codec",
    "aligned",
    "codec",
    "cut",
    "pack",
    "packed_bounds",
    "packed_size",
    "room",
    "unpack",
    "warm",
]

CODECS: dict[str, Codec] = {c.name: c for c in (Float32(), BFloat16(), Int8(), Int4())}
"""Codecs of fixed size, by name. `codec` also knows every rate from half a bit to four: `isthmus.codecs.rate`."""

_ALIGN = 4  # Each tensor's bytes start on a multiple of this, so that views of them as wider types are aligned.


@cache
def codec(name: str) -> Codec:
    """Return the codec of this name. Raises `InputError`, which lists the known names, for any other."""
    bits = rate_of(require_codec(name))
    return CODECS[name] if bits is None else Rate(bits)


def warm(*names: str) -> None:
    """Compile every kernel that merges and these codecs use, or load it from the cache on disk."""
    kernels.warm()
    x = np.linspace(-1.0, 1.0, SMALL, dtype=np.float32)
    for code in map(codec, names):
        out = np.zeros(code.bounds(x.size)[1], np.uint8)
        size = code.encode(x, out, whole=True)
        code.decode_part(out[:size], x.size, 0, np.empty_like(x))


def aligned(size: int) -> int:
    """Return the bytes that a packed tensor of this size takes in a packed fragment, padding included."""
    return -(-size // _ALIGN) * _ALIGN


def packed_size(code: Codec, fragment: Fragment) -> int:
    """Return the bytes of a packed fragment; an estimate unless the codec is `exact`.

    Each tensor is packed by itself, so no scale spans two tensors, and padded to a multiple of four bytes.
    """
    return sum(aligned(code.size(t.size)) for t in fragment.tensors)


def packed_bounds(code: Codec, fragment: Fragment) -> tuple[int, int]:
    """Return the fewest and the most bytes that a packed fragment can have."""
    of = [code.bounds(t.size) for t in fragment.tensors]
    return sum(aligned(least) for least, _ in of), sum(aligned(most) for _, most in of)


def cut(code: Codec, fragment: Fragment, data: U8) -> tuple[U8, ...]:
    """Return the bytes of each tensor in a packed fragment, data [m] uint8, as views of it.

    Raises `BadCode` if the size of data is wrong, or if a tensor's header is invalid.
    """
    if code.exact and data.size != packed_size(code, fragment):
        raise BadCode(f"{data.size} bytes where {code.name} packs this fragment into {packed_size(code, fragment)}")
    found, at = [], 0
    for t in fragment.tensors:
        size = code.measure(data[at:], t.size)
        found.append(data[at : at + size])
        at += aligned(size)
    if at != data.size:
        raise BadCode(f"{data.size} bytes, but by their own headers {code.name} needs {at}")
    return tuple(found)


def room(code: Codec, fragment: Fragment) -> U8:
    """Return zeros [m] uint8 for the most bytes that a packed fragment takes."""
    if code.exact:
        out = memory.room(packed_size(code, fragment))
        out.fill(0)
        return out
    # The operating system provides zeroed pages when they are first written, so the unused rest costs no memory.
    return np.zeros(packed_bounds(code, fragment)[1], np.uint8)


def pack(code: Codec, fragment: Fragment, x: F32, compute: ComputePool = ALONE, *, whole: bool = False) -> U8:
    """Return finite x [fragment.size] float32 packed into uint8 [m]; m is `packed_size` if the codec is `exact`.

    `whole`: see `Codec.encode`.
    """
    out, at = room(code, fragment), 0
    for t in fragment.tensors:
        at += aligned(code.encode(x[t.start : t.stop], out[at : at + code.bounds(t.size)[1]], compute, whole=whole))
    return out[:at]


def unpack(code: Codec, fragment: Fragment, data: U8, out: F32) -> None:
    """Unpack data, as `pack` returned it, into out [fragment.size] float32. Raises `BadCode` if it is invalid."""
    for t, piece in zip(fragment.tensors, cut(code, fragment, data), strict=True):
        code.decode(piece, out[t.start : t.stop])


def as_bytes(blob: bytes | bytearray | memoryview) -> U8:
    """View a buffer as uint8 [n] without a copy."""
    return np.frombuffer(blob, dtype=np.uint8)

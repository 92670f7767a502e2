"""How a difference is packed for the wire: a registry of codecs and the packing of a fragment, tensor by tensor."""

import numpy as np

from isthmus.codecs.base import Codec
from isthmus.codecs.bf16 import BFloat16
from isthmus.codecs.f32 import Float32
from isthmus.codecs.int4 import Int4
from isthmus.codecs.int8 import Int8
from isthmus.kernels import F32, U8
from isthmus.layout import Fragment
from isthmus.rules import CodecName, named

__all__ = ["CODECS", "Codec", "codec", "cut", "pack", "packed_size", "unpack"]

CODECS: dict[CodecName, Codec] = {c.name: c for c in (Float32(), BFloat16(), Int8(), Int4())}

_ALIGN = 4  # every tensor's piece starts on a multiple of this, so that wide views of it are aligned


def codec(name: str) -> Codec:
    """Return the codec of this name. Raises `InputError` that lists those there are."""
    return CODECS[named(CodecName, name, "codec")]


def _piece(code: Codec, n: int) -> int:
    return -(-code.size(n) // _ALIGN) * _ALIGN


def packed_size(code: Codec, fragment: Fragment) -> int:
    """Return the bytes of a packed fragment: each tensor apart (scales never cross one), padded to four bytes."""
    return sum(_piece(code, t.size) for t in fragment.tensors)


def cut(code: Codec, fragment: Fragment, data: U8) -> tuple[U8, ...]:
    """Return what each tensor has of a packed fragment, data [packed_size] uint8; they share its memory.

    Raises `ValueError` where it is not of that size.
    """
    if data.size != packed_size(code, fragment):
        raise ValueError(f"{data.size} bytes where {code.name} packs this fragment into {packed_size(code, fragment)}")
    found, at = [], 0
    for t in fragment.tensors:
        found.append(data[at : at + code.size(t.size)])
        at += _piece(code, t.size)
    return tuple(found)


def pack(code: Codec, fragment: Fragment, x: F32, out: U8) -> None:
    """Pack x [fragment.size] float32 into out [packed_size] uint8, which must come zeroed."""
    for t, piece in zip(fragment.tensors, cut(code, fragment, out), strict=True):
        code.encode(x[t.start : t.stop], piece)


def unpack(code: Codec, fragment: Fragment, data: U8, out: F32) -> None:
    """Unpack data [packed_size] uint8 into out [fragment.size] float32."""
    for t, piece in zip(fragment.tensors, cut(code, fragment, data), strict=True):
        code.decode(piece, out[t.start : t.stop])


def as_bytes(blob: bytes | bytearray | memoryview) -> U8:
    """View a buffer as uint8 [n] without a copy."""
    return np.frombuffer(blob, dtype=np.uint8)

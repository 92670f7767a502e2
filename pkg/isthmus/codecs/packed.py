"""A packed fragment, never unpacked as a whole: measured and added up a piece at a time, while that is in the cache."""

import math
from dataclasses import dataclass

import numpy as np

from isthmus import kernels
from isthmus.codecs import Codec, codec, packed_size, pieces
from isthmus.kernels import F32, U8
from isthmus.layout import Fragment
from isthmus.rules import CodecName
from isthmus.runtime import ALONE, Crew

PIECE = 1 << 16
"""Parameters unpacked at a time: 256 KiB. A multiple of the blocks of codecs and norms: it does not change a bit."""

SHARE = 4
"""Pieces of one thread at least."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A difference of a fragment [n] as it travelled."""

    fragment: Fragment
    code: Codec
    data: tuple[U8, ...]
    """Of each tensor."""
    norms: tuple[float, ...]
    """Euclidean length of each tensor's; not finite where it holds a NaN or an infinity."""

    @property
    def norm(self) -> float:
        """Euclidean length of all of it."""
        return math.sqrt(sum(length * length for length in self.norms))

    def decode(self) -> F32:
        """Return it whole, [n] float32."""
        out = np.empty(self.fragment.size, np.float32)
        for t, data in zip(self.fragment.tensors, self.data, strict=True):
            self.code.decode(data, out[t.start : t.stop])
        return out

    def add(self, tensor: int, coefficient: float, total: F32, crew: Crew = ALONE) -> None:
        """Add coefficient times a tensor [m], by its number in the fragment, to total [m]; see `kernels.accumulate`."""
        data = self.data[tensor]

        def work(first: int, last: int) -> None:
            scratch = np.empty(PIECE, np.float32)
            for start in range(first * PIECE, min(last * PIECE, total.size), PIECE):
                part = total[start : start + PIECE]
                self.code.decode_part(data, total.size, start, scratch[: part.size])
                kernels.accumulate(part, scratch[: part.size], coefficient)

        crew.share(work, -(-total.size // PIECE), SHARE)


def packed(fragment: Fragment, code: Codec, data: U8, crew: Crew = ALONE) -> Packed:
    """Measure a packed fragment, data [packed_size] uint8. Raises `ValueError` where it is not of that size."""
    if data.size != packed_size(code, fragment):
        raise ValueError(f"{data.size} bytes where {code.name} packs this fragment into {packed_size(code, fragment)}")
    cut = tuple(data[at] for at in pieces(code, fragment))
    norms = tuple(_norm(code, piece, t.size, crew) for t, piece in zip(fragment.tensors, cut, strict=True))
    return Packed(fragment, code, cut, norms)


def plain(fragment: Fragment, x: F32) -> Packed:
    """Return a fragment's values x [n] float32 as if they had come as they are."""
    return packed(fragment, codec(CodecName.F32), np.ascontiguousarray(x, "<f4").view(np.uint8))


def _norm(code: Codec, data: U8, n: int, crew: Crew) -> float:
    squares = np.empty(-(-n // kernels.NORM_BLOCK), np.float64)

    def work(first: int, last: int) -> None:
        scratch = np.empty(min(n, PIECE), np.float32)
        for start in range(first * PIECE, min(last * PIECE, n), PIECE):
            part = scratch[: min(PIECE, n - start)]
            code.decode_part(data, n, start, part)
            block = start // kernels.NORM_BLOCK
            kernels.squares(part, squares[block : block + -(-part.size // kernels.NORM_BLOCK)])

    crew.share(work, -(-n // PIECE), SHARE)
    return kernels.norm_of(squares)

"""A packed fragment, which is measured and added up one piece at a time, so that each piece stays in the cache."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from isthmus.codecs import Codec, codec, cut, kernels
from isthmus.codecs.base import PIECE, SHARE, pieces
from isthmus.codecs.kernels import F32, U8
from isthmus.format import memory
from isthmus.format.layout import Fragment
from isthmus.format.rules import CodecName
from isthmus.runtime.clock import ALONE, ComputePool


@dataclass(frozen=True, slots=True)
class Packed:
    """The difference of a fragment [n] as it was sent."""

    fragment: Fragment
    code: Codec
    data: tuple[U8, ...]
    """The bytes of each tensor."""
    norms: tuple[float, ...]
    """Euclidean norm of each tensor's difference; not finite if that holds a NaN or an infinity."""

    @property
    def norm(self) -> float:
        """Euclidean norm of the whole difference."""
        return math.sqrt(sum(length * length for length in self.norms))

    def decode(self) -> F32:
        """Return the whole difference, [n] float32."""
        out = memory.empty(self.fragment.size)
        for t, data in zip(self.fragment.tensors, self.data, strict=True):
            self.code.decode(data, out[t.start : t.stop])
        return out

    def add(self, tensor: int, coefficient: float, total: F32, compute: ComputePool = ALONE) -> None:
        """Add coefficient · a tensor [m], given by its number in the fragment, to total [m]; see `add`."""

        add(self.code, self.data[tensor], coefficient, total, total, compute)


def packed(fragment: Fragment, code: Codec, data: U8, compute: ComputePool = ALONE) -> Packed:
    """Return a packed fragment, data [m] uint8, with its norms. Raises `BadCode` if the bytes are invalid."""
    of = cut(code, fragment, data)
    norms = tuple(_norm(code, piece, t.size, compute) for t, piece in zip(fragment.tensors, of, strict=True))
    return Packed(fragment, code, of, norms)


def add(code: Codec, data: U8, coefficient: float, before: F32, after: F32, compute: ComputePool = ALONE) -> None:
    """Write before [n] + coefficient · a packed tensor to after [n], which may be before; see `kernels.accumulate`."""

    def work(first: int, last: int) -> None:
        for number in range(first, last):
            at = slice(number * PIECE, min(after.size, (number + 1) * PIECE))
            if before is not after:
                np.copyto(after[at], before[at])  # The copy brings the piece into the cache.
            code.add_part(data, after.size, at.start, coefficient, after[at])

    compute.share(work, pieces(after.size), SHARE)


def keep_dropped(fragment: Fragment, code: Codec, data: U8, x: F32, compute: ComputePool = ALONE) -> None:
    """Subtract the decoded data from x [n], which was packed into data, so that x keeps what the codec dropped."""
    for t, piece in zip(fragment.tensors, cut(code, fragment, data), strict=True):
        left = x[t.start : t.stop]
        add(code, piece, -1.0, left, left, compute)


def length_of(x: F32, compute: ComputePool = ALONE) -> float:
    """Return `kernels.norm(x)`, bit for bit, computed by all threads of `compute`."""
    squares = np.empty(-(-x.size // kernels.NORM_BLOCK), np.float64)
    of = kernels.NORM_BLOCK
    compute.share(lambda a, b: kernels.squares(x[a * of : b * of], squares[a:b]), squares.size, SHARE * PIECE // of)
    return kernels.norm_of(squares)


def plain(fragment: Fragment, x: F32) -> Packed:
    """Return a fragment's values x [n] float32 packed by the codec f32."""
    return packed(fragment, codec(CodecName.F32), np.ascontiguousarray(x, "<f4").view(np.uint8))


def decoded(code: Codec, data: U8, n: int, first: int = 0, last: int | None = None) -> Iterator[tuple[slice, F32]]:
    """Yield the place and the values [m] float32 of pieces [first, last) of a packed tensor of n parameters.

    All pieces use the same memory: the values are valid until the next piece.
    """
    scratch = np.empty(min(n, PIECE), np.float32)
    for number in range(first, pieces(n) if last is None else last):
        at = slice(number * PIECE, min(n, (number + 1) * PIECE))
        part = scratch[: at.stop - at.start]
        code.decode_part(data, n, at.start, part)
        yield at, part


def _norm(code: Codec, data: U8, n: int, compute: ComputePool) -> float:
    squares = np.empty(-(-n // kernels.NORM_BLOCK), np.float64)

    def work(first: int, last: int) -> None:
        for at, part in decoded(code, data, n, first, last):
            block = at.start // kernels.NORM_BLOCK
            kernels.squares(part, squares[block : block + -(-part.size // kernels.NORM_BLOCK)])

    compute.share(work, pieces(n), SHARE)
    return kernels.norm_of(squares)

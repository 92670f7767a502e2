"""Codecs of any rate from half a bit to four: levels of one step for the whole tensor, centroids, an entropy stage.

A packed tensor, little endian, consists of:

- its size in bytes (4 bytes), its largest level L (2), zeros (2);
- L centroids (float32);
- the frequencies of 2 L + 1 symbols (2 bytes each), padded to a multiple of four bytes;
- the size of each piece's stream in bytes (4 bytes each);
- the streams, padded with zeros to a multiple of four bytes.

If every level is zero, L is 0 and nothing follows the first eight bytes. Each piece of `PIECE` parameters can be
decoded by itself.
"""

import math

import numpy as np

from isthmus.codecs import base, kernels
from isthmus.codecs.base import PIECE, SHARE, BadCode, Codec
from isthmus.codecs.int4 import Int4
from isthmus.codecs.kernels import F32, U8
from isthmus.codecs.kernels import rate as kernel
from isthmus.runtime.clock import ALONE, ComputePool

SMALL = 4096
"""Tensors of fewer parameters are packed as int4, because a table would cost more than it saves."""

SAMPLE = 1 << 15
"""Parameters, spread over the tensor, in the sample on which the step is chosen."""

BLOCKS = PIECE // kernels.NORM_BLOCK
"""Blocks of a norm in a piece."""

_WRONG = {
    kernel.SHORT: "fewer bytes than it says",
    kernel.HEADER: "no header of a packed tensor",
    kernel.TABLE: "no table: centroids are finite and not negative, frequencies add up to 4096",
    kernel.LENGTHS: "streams of other lengths than it says",
    kernel.STREAM: "a stream that no encoder wrote",
}


class Rate(Codec):
    """A codec of at most so many bits a parameter, tables included: it takes the smallest step that a sample allows.

    The error of a value is at most one step: 0.55 of a step, plus the distance from its level's centroid to that
    multiple of the step. Centroids are means, so the decoded tensor is shorter than x. If `whole`, they are scaled to
    give the decoded tensor the norm of x, and the bound on the error does not hold.
    """

    exact = False

    def __init__(self, bits: float) -> None:
        self.bits = bits
        self.name = f"q{bits:g}"
        self._small = Int4()

    def size(self, n: int) -> int:
        """Return the bytes that n parameters take at this rate, about."""
        return self._small.size(n) if n < SMALL else math.ceil(n * self.bits / 8.0)

    def bounds(self, n: int) -> tuple[int, int]:
        """Return 8, which suffices for zeros, and the bytes at the most bits that a symbol can take: twelve."""
        if n < SMALL:
            return self._small.bounds(n)
        pieces = base.pieces(n)
        return 8, kernel.header_size(kernel.LEVELS, pieces) + pieces * 4 * kernel.LANES + 3 * n // 2 + 4

    def measure(self, data: U8, n: int) -> int:
        """Check the header and the table; see `Codec.measure`. `decode_part` checks the streams."""
        if n < SMALL:
            return self._small.measure(data, n)
        wrong, size = kernel.check(data, n, PIECE)
        self._refuse(wrong)
        return int(size)

    def encode(self, x: F32, out: U8, compute: ComputePool = ALONE, *, whole: bool = False) -> int:
        """Measure x, choose the step on a sample, quantise every parameter, count the symbols, and code each piece."""
        n = x.size
        if n < SMALL:
            return self._small.encode(x, out)
        pieces = base.pieces(n)
        tops, squares = np.empty(pieces), np.empty(-(-n // kernels.NORM_BLOCK))

        def measure(first: int, last: int) -> None:
            for p in range(first, last):
                part = x[p * PIECE : (p + 1) * PIECE]
                kernels.squares(part, squares[p * BLOCKS : (p + 1) * BLOCKS])
                tops[p] = kernel.largest(part)

        compute.share(measure, pieces, SHARE)
        norm, largest = kernels.norm_of(squares), float(tops.max())
        every = max(1, n // SAMPLE)
        step = kernel.choose_step(x, norm / math.sqrt(n), largest, self.bits, kernels.BLOCK, every, pieces)
        inverse = np.float32(1.0 / step if step else 0.0)
        symbols = np.empty(n, np.uint8)
        counts = np.zeros((pieces, 2 * kernel.LEVELS + 1), np.int64)
        sums = np.zeros(counts.shape, np.float64)

        def quantise(first: int, last: int) -> None:
            for p in range(first, last):
                at = slice(p * PIECE, (p + 1) * PIECE)
                kernel.quantise(x[at], inverse, symbols[at])
                kernel.count(x[at], symbols[at], counts[p], sums[p])

        compute.share(quantise, pieces, SHARE)
        counted, centroids, levels = kernel.folded(counts, sums)
        if levels == 0:
            out[:8] = np.frombuffer(_head(8, 0), np.uint8)
            return 8
        if whole:
            kernel.lengthen(counted, centroids, norm)
        table = np.empty(2 * levels + 1, np.int64)
        kernel.frequencies(counted[: table.size], table)
        streams: list[U8] = [np.empty(0, np.uint8)] * pieces

        def stream(first: int, last: int) -> None:
            room = np.empty(3 * min(n, PIECE) // 4 + 2 * kernel.LANES + 1, "<u2")
            for p in range(first, last):
                part = symbols[p * PIECE : (p + 1) * PIECE]
                streams[p] = room[kernel.encode(part, table, room) :].view(np.uint8).copy()

        compute.share(stream, pieces, SHARE)
        at = kernel.header_size(levels, pieces)
        size = at + sum(s.size for s in streams)
        head = (
            _head(-(-size // 4) * 4, levels)
            + centroids[:levels].astype("<f4").tobytes()
            + table.astype("<u2").tobytes()
        )
        lengths = np.array([s.size for s in streams], "<u4").tobytes()
        out[: len(head)] = np.frombuffer(head, np.uint8)
        out[at - len(lengths) : at] = np.frombuffer(lengths, np.uint8)
        for s in streams:
            out[at : at + s.size] = s
            at += s.size
        return -(-size // 4) * 4

    def decode_part(self, data: U8, n: int, start: int, out: F32) -> None:
        """Decode the pieces one by one."""
        if n < SMALL:
            self._small.decode_part(data, n, start, out)
            return
        for at in range(0, out.size, PIECE):
            self._refuse(kernel.decode(data, n, PIECE, (start + at) // PIECE, out[at : at + PIECE]))

    def _refuse(self, wrong: int) -> None:
        if wrong != kernel.OK:
            raise BadCode(f"{self.name}: {_WRONG[wrong]}")


def _head(size: int, levels: int) -> bytes:
    return size.to_bytes(4, "little") + levels.to_bytes(2, "little") + bytes(2)

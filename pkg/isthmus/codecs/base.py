"""What a codec is: a stated way to turn float32 into bytes and back, and nothing else."""

from abc import ABC, abstractmethod

import numpy as np

from isthmus.codecs import kernels
from isthmus.codecs.kernels import BLOCK, F32, U8
from isthmus.runtime.clock import ALONE, ComputePool

PIECE = 1 << 16
"""Parameters unpacked at a time: 256 KiB. A multiple of the blocks of codecs and norms: it does not change a bit."""


SHARE = 4
"""Pieces of one thread at least."""


class BadCode(ValueError):
    """Bytes that no encoder wrote."""


class Codec(ABC):
    """Packs one tensor's difference. Stateless; every method may run on any thread."""

    name: str
    bits: float
    """Bits per parameter of a large tensor, scales and tables included."""
    lossless = False
    exact = True
    """Whether every tensor of n parameters takes the same bytes, `size(n)`; else what it holds decides."""

    @abstractmethod
    def size(self, n: int) -> int:
        """Return the bytes that n parameters take, scales and padding included; about that unless `exact`."""

    def bounds(self, n: int) -> tuple[int, int]:
        """Return the fewest and the most bytes that n parameters can take."""
        return self.size(n), self.size(n)

    def measure(self, data: U8, n: int) -> int:
        """Return the bytes that a tensor of n parameters takes at the start of data, which holds more. Raises
        `BadCode`."""
        if data.size < self.size(n):
            raise BadCode(f"{data.size} bytes where {self.name} packs {n} parameters into {self.size(n)}")
        return self.size(n)

    @abstractmethod
    def encode(self, x: F32, out: U8, compute: ComputePool = ALONE, *, whole: bool = False) -> int:
        """Pack finite x [n] float32 into zeros, out [the most `bounds` allows] uint8; return the bytes it took.

        `whole`: what is dropped is given up, so that what is left should be as long as x where the codec would shorten
        it; else it is fed back, and should be as near as can be.
        """

    @abstractmethod
    def decode_part(self, data: U8, n: int, start: int, out: F32) -> None:
        """Unpack parameters [start, start + out.size) of the n in data, as `measure` found it, into out [m] float32.

        `start` is a multiple of `PIECE`, and so is the end, unless it is n. Raises `BadCode` for what no encoder wrote,
        never on values; the caller checks finiteness.
        """

    def add_part(self, data: U8, n: int, start: int, coefficient: float, total: F32) -> None:
        """Add coefficient · the parameters that `decode_part` would unpack to total [m], as `kernels.accumulate`."""
        scratch = np.empty(min(PIECE, total.size), np.float32)
        for first in range(0, total.size, PIECE):
            piece = total[first : first + PIECE]
            part = scratch[: piece.size]
            self.decode_part(data, n, start + first, part)
            kernels.accumulate(piece, part, coefficient)

    def decode(self, data: U8, out: F32) -> None:
        """Unpack data, as `measure` found it, into out [n] float32, as `decode_part` does."""
        self.decode_part(data, out.size, 0, out)


def pieces(n: int) -> int:
    """Return how many pieces n parameters are unpacked in."""
    return -(-n // PIECE)


def blocks(n: int) -> int:
    """Return the number of blocks of 128 that n parameters take."""
    return -(-n // BLOCK)

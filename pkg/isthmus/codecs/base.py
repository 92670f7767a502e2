"""The interface of a codec, which turns float32 into bytes and back."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np

from isthmus.codecs import kernels
from isthmus.codecs.kernels import BLOCK, F32, U8
from isthmus.runtime.clock import ALONE, ComputePool

PIECE = 1 << 16
"""Parameters unpacked at a time: 256 KiB as float32.

A multiple of the blocks of the fixed-size codecs and of norms, whose results therefore do not depend on it. The format
of `isthmus.codecs.rate` does.
"""


SHARE = 4
"""Fewest pieces that are handed to a thread at a time."""


class BadCode(ValueError):
    """The bytes cannot be the output of an encoder."""


class Step(NamedTuple):
    """An outer step over a part of a tensor, and where its results go. Arrays are [m] float32; see `outer_step`."""

    total: F32
    scale: float
    learning_rate: float
    momentum: float
    master: F32
    buffer: F32
    published: F32
    new_master: F32
    new_buffer: F32
    new_published: F32


class Codec(ABC):
    """A codec, which packs the difference of one tensor. Stateless; every method may run on any thread."""

    name: str
    bits: float
    """Bits per parameter of a large tensor, scales and tables included."""
    lossless = False
    exact = True
    """Whether every tensor of n parameters takes `size(n)` bytes. Otherwise its size depends on its values."""

    advances = False
    """Whether it has `advance_part`."""

    @abstractmethod
    def size(self, n: int) -> int:
        """Return the bytes that n parameters take, scales and padding included; an estimate unless `exact`."""

    def bounds(self, n: int) -> tuple[int, int]:
        """Return the fewest and the most bytes that n parameters can take."""
        return self.size(n), self.size(n)

    def measure(self, data: U8, n: int) -> int:
        """Return the bytes that a tensor of n parameters takes at the start of data; other tensors may follow it.

        Raises `BadCode` if data is too short or invalid.
        """
        if data.size < self.size(n):
            raise BadCode(f"{data.size} bytes where {self.name} packs {n} parameters into {self.size(n)}")
        return self.size(n)

    @abstractmethod
    def encode(self, x: F32, out: U8, compute: ComputePool = ALONE, *, whole: bool = False) -> int:
        """Pack finite x [n] float32 into out, zeros [largest of `bounds`] uint8; return the bytes that were used.

        `whole` says that nothing will make up for what the codec drops: a codec that would shorten x then keeps its
        Euclidean length. Without it error feedback adds what was dropped later, and the codec stays as close to x as it
        can.
        """

    @abstractmethod
    def decode_part(self, data: U8, n: int, start: int, out: F32) -> None:
        """Unpack parameters [start, start + out.size) of n into out [m] float32.

        data has exactly the bytes that `measure` counted. `start` is a multiple of `PIECE`; the end is one, too, or is
        n. Raises `BadCode` if the bytes are invalid. The values are not checked: the caller checks that they are
        finite.
        """

    def add_part(self, data: U8, n: int, start: int, coefficient: float, total: F32) -> None:
        """Add coefficient · x to total [m], where x is what `decode_part` would unpack; see `kernels.accumulate`."""
        scratch = np.empty(min(PIECE, total.size), np.float32)
        for first in range(0, total.size, PIECE):
            piece = total[first : first + PIECE]
            part = scratch[: piece.size]
            self.decode_part(data, n, start + first, part)
            kernels.accumulate(piece, part, coefficient)

    def advance_part(self, data: U8, n: int, start: int, step: Step) -> bool:
        """Take the outer step, pack its difference to the published value into data, and publish, in one pass.

        data: the bytes of all n parameters, as `encode` writes them; `start`: as in `decode_part`. The bits are those
        of `kernels.outer_step`, `kernels.subtract`, `encode` and `add_part`. Return whether all results are finite.
        """
        raise NotImplementedError

    def decode(self, data: U8, out: F32) -> None:
        """Unpack all n parameters of data into out [n] float32; see `decode_part`."""
        self.decode_part(data, out.size, 0, out)


def pieces(n: int) -> int:
    """Return the number of pieces of `PIECE` parameters that n parameters take."""
    return -(-n // PIECE)


def blocks(n: int) -> int:
    """Return the number of blocks of 128 that n parameters take."""
    return -(-n // BLOCK)

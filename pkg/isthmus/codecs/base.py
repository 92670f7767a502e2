"""What a codec is: a stated way to turn float32 into bytes and back, and nothing else."""

from abc import ABC, abstractmethod
from typing import ClassVar

from isthmus.kernels import BLOCK, F32, U8
from isthmus.rules import CodecName


class Codec(ABC):
    """Packs one tensor's difference. Stateless; every method may run on any thread."""

    name: ClassVar[CodecName]
    bits: ClassVar[float]
    """Bits per parameter of a large tensor, scales included."""
    lossless: ClassVar[bool] = False

    @abstractmethod
    def size(self, n: int) -> int:
        """Return the bytes that n parameters take, scales and padding included."""

    @abstractmethod
    def encode(self, x: F32, out: U8) -> None:
        """Pack finite x [n] float32 into out [size(n)] uint8."""

    @abstractmethod
    def decode_part(self, data: U8, n: int, start: int, out: F32) -> None:
        """Unpack parameters [start, start + out.size) of the n in data [size(n)] uint8 into out [m] float32.

        `start` is a multiple of 128. Never raises on values; the caller checks finiteness.
        """

    def decode(self, data: U8, out: F32) -> None:
        """Unpack data [size(n)] uint8 into out [n] float32, as `decode_part` does."""
        self.decode_part(data, out.size, 0, out)


def blocks(n: int) -> int:
    """Return the number of blocks of 128 that n parameters take."""
    return -(-n // BLOCK)

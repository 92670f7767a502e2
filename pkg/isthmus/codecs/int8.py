"""The codec of eight bits: integers with one scale per block of 128."""

import numpy as np

from isthmus.codecs import kernels
from isthmus.codecs.base import PIECE, SHARE, Codec, Step, blocks, pieces
from isthmus.codecs.kernels import F32, U8, U16
from isthmus.format.rules import CodecName
from isthmus.runtime.clock import ALONE, ComputePool


class Int8(Codec):
    """The nearest of 255 levels, with a bfloat16 scale per 128 parameters from their largest magnitude.

    The scales of all blocks precede the levels.
    """

    name = CodecName.INT8.value
    advances = True
    bits = 8.125

    def size(self, n: int) -> int:
        """Return two bytes a block for the scale, and one byte a parameter."""
        return 2 * blocks(n) + n

    def encode(self, x: F32, out: U8, compute: ComputePool = ALONE, *, whole: bool = False) -> int:
        """Quantise blocks of 128."""
        split = 2 * blocks(x.size)
        scales = out[:split].view(np.uint16)

        def work(first: int, last: int) -> None:
            a, b = first * PIECE, min(x.size, last * PIECE)
            kernels.encode_int8(x[a:b], scales[blocks(a) : blocks(b)], out[split + a : split + b])

        compute.share(work, pieces(x.size), SHARE)
        return self.size(x.size)

    def advance_part(self, data: U8, n: int, start: int, step: Step) -> bool:
        """Take the outer step, pack and publish in one pass; see `Codec.advance_part`."""
        return kernels.advance_int8(*step, *_part(data, n, start, step.total.size))

    def decode_part(self, data: U8, n: int, start: int, out: F32) -> None:
        """Multiply the levels by their block's scale."""
        kernels.decode_int8(*_part(data, n, start, out.size), out)

    def add_part(self, data: U8, n: int, start: int, coefficient: float, total: F32) -> None:
        """Unpack and add in one pass; see `Codec.add_part`."""
        kernels.accumulate_int8(*_part(data, n, start, total.size), coefficient, total)


def _part(data: U8, n: int, start: int, size: int) -> tuple[U16, U8]:
    """Return the scales and levels of parameters [start, start + size) of n."""
    split, first = 2 * blocks(n), start // kernels.BLOCK
    return data[:split].view(np.uint16)[first : first + blocks(size)], data[split + start : split + start + size]

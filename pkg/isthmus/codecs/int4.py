"""The codec of four bits: integers with one scale per block of 128."""

import numpy as np

from isthmus.codecs import kernels
from isthmus.codecs.base import PIECE, SHARE, Codec, Step, blocks, pieces
from isthmus.codecs.kernels import F32, U8, U16
from isthmus.format.rules import CodecName
from isthmus.runtime.clock import ALONE, ComputePool


class Int4(Codec):
    """The nearest of 15 levels, with a bfloat16 scale per 128 parameters from their largest magnitude.

    The scales of all blocks precede the levels.
    """

    name = CodecName.INT4.value
    advances = True
    bits = 4.125

    def size(self, n: int) -> int:
        """Return 66 bytes a block: two for the scale and 64 for the levels. The last block is padded."""
        return blocks(n) * (2 + kernels.BLOCK // 2)

    def encode(self, x: F32, out: U8, compute: ComputePool = ALONE, *, whole: bool = False) -> int:
        """Quantise blocks of 128."""
        split, half = 2 * blocks(x.size), kernels.BLOCK // 2
        scales = out[:split].view(np.uint16)

        def work(first: int, last: int) -> None:
            a, b = first * PIECE, min(x.size, last * PIECE)
            codes = out[split + half * blocks(a) : split + half * blocks(b)]
            kernels.encode_int4(x[a:b], scales[blocks(a) : blocks(b)], codes)

        compute.share(work, pieces(x.size), SHARE)
        return self.size(x.size)

    def advance_part(self, data: U8, n: int, start: int, step: Step) -> bool:
        """Take the outer step, pack and publish in one pass; see `Codec.advance_part`."""
        return kernels.advance_int4(*step, *_part(data, n, start, step.total.size))

    def decode_part(self, data: U8, n: int, start: int, out: F32) -> None:
        """Multiply the levels by their block's scale."""
        kernels.decode_int4(*_part(data, n, start, out.size), out)

    def add_part(self, data: U8, n: int, start: int, coefficient: float, total: F32) -> None:
        """Unpack and add in one pass; see `Codec.add_part`."""
        kernels.accumulate_int4(*_part(data, n, start, total.size), coefficient, total)


def _part(data: U8, n: int, start: int, size: int) -> tuple[U16, U8]:
    """Return the scales of parameters [start, start + size) of n, and the levels from `start` on."""
    split, first = 2 * blocks(n), start // kernels.BLOCK
    return data[:split].view(np.uint16)[first : first + blocks(size)], data[split + start // 2 :]

"""Four bits: integers over a scale per block of 128."""

import numpy as np

from isthmus import kernels
from isthmus.codecs.base import Codec, blocks
from isthmus.kernels import F32, U8
from isthmus.rules import CodecName
from isthmus.runtime import ALONE, Crew


class Int4(Codec):
    """Nearest of 15 levels, absmax scaling, a bfloat16 scale per 128 parameters; the scales come first."""

    name = CodecName.INT4.value
    bits = 4.125

    def size(self, n: int) -> int:
        """Two bytes a block for the scale, and 64 bytes a block; the last block is padded."""
        return blocks(n) * (2 + kernels.BLOCK // 2)

    def encode(self, x: F32, out: U8, crew: Crew = ALONE, *, whole: bool = False) -> int:
        """Quantise blocks of 128."""
        split = 2 * blocks(x.size)
        kernels.encode_int4(x, out[:split].view(np.uint16), out[split:])
        return self.size(x.size)

    def decode_part(self, data: U8, n: int, start: int, out: F32) -> None:
        """Multiply levels by their block's scale."""
        split, first = 2 * blocks(n), start // kernels.BLOCK
        scales = data[:split].view(np.uint16)[first : first + blocks(out.size)]
        kernels.decode_int4(scales, data[split + start // 2 :], out)

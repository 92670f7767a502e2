"""Eight bits: integers over a scale per block of 128."""

import numpy as np

from isthmus import kernels
from isthmus.codecs.base import Codec, blocks
from isthmus.kernels import F32, U8
from isthmus.rules import CodecName
from isthmus.runtime import ALONE, Crew


class Int8(Codec):
    """Nearest of 255 levels, absmax scaling, a bfloat16 scale per 128 parameters; the scales come first."""

    name = CodecName.INT8.value
    bits = 8.125

    def size(self, n: int) -> int:
        """Two bytes a block for the scale, and one byte a parameter."""
        return 2 * blocks(n) + n

    def encode(self, x: F32, out: U8, crew: Crew = ALONE, *, whole: bool = False) -> int:
        """Quantise blocks of 128."""
        split = 2 * blocks(x.size)
        kernels.encode_int8(x, out[:split].view(np.uint16), out[split:])
        return self.size(x.size)

    def decode_part(self, data: U8, n: int, start: int, out: F32) -> None:
        """Multiply levels by their block's scale."""
        split, first = 2 * blocks(n), start // kernels.BLOCK
        scales = data[:split].view(np.uint16)[first : first + blocks(out.size)]
        kernels.decode_int8(scales, data[split + start :], out)

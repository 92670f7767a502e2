"""The codec of thirty-two bits: the difference unchanged."""

import numpy as np

from isthmus.codecs.base import Codec
from isthmus.codecs.kernels import F32, U8
from isthmus.format.rules import CodecName
from isthmus.runtime.clock import ALONE, ComputePool


class Float32(Codec):
    """IEEE 754 single precision, little endian."""

    name = CodecName.F32.value
    bits = 32.0
    lossless = True

    def size(self, n: int) -> int:
        """Return four bytes a parameter."""
        return 4 * n

    def encode(self, x: F32, out: U8, compute: ComputePool = ALONE, *, whole: bool = False) -> int:
        """Copy x."""
        out.view(np.dtype("<f4"))[:] = x
        return self.size(x.size)

    def decode_part(self, data: U8, n: int, start: int, out: F32) -> None:
        """Copy the parameters."""
        out[:] = data.view(np.dtype("<f4"))[start : start + out.size]

"""The codec of sixteen bits: bfloat16, the paper's default on the wire."""

import numpy as np

from isthmus.codecs import kernels
from isthmus.codecs.base import Codec
from isthmus.codecs.kernels import F32, U8
from isthmus.format.rules import CodecName
from isthmus.runtime.clock import ALONE, ComputePool


class BFloat16(Codec):
    """bfloat16, rounded half to even. Values that would overflow become the largest finite number."""

    name = CodecName.BF16.value
    bits = 16.0

    def size(self, n: int) -> int:
        """Return two bytes a parameter."""
        return 2 * n

    def encode(self, x: F32, out: U8, compute: ComputePool = ALONE, *, whole: bool = False) -> int:
        """Round to the nearest bfloat16, half to even."""
        kernels.encode_bf16(x, out.view(np.uint16))
        return self.size(x.size)

    def decode_part(self, data: U8, n: int, start: int, out: F32) -> None:
        """Widen to float32, which is exact."""
        kernels.decode_bf16(data.view(np.uint16)[start : start + out.size], out)

"""The hot loops, compiled by numba with the GIL released. Same bits on every machine and for every thread count.

Rules that keep the bits: no fastmath and no contraction to fused multiply-add (LLVM contracts only when told to; matrix
products ask for it by name and get it on every machine), one thread per call, sums in float64 over fixed blocks with a
fixed number of lanes, rounding by addition of a constant instead of a library call. A thread in which the processor
flushes denormals has other bits all the same: merges ask `require_denormals` first. Whoever changes the result of one
of these raises `ARITHMETIC`, and replay refuses logs written under another number.
"""

import numpy as np

from isthmus.kernels.compiled import F32, F64, I64, U8, U16
from isthmus.kernels.formats import (
    BLOCK,
    accumulate_int4,
    accumulate_int8,
    decode_bf16,
    decode_int4,
    decode_int8,
    encode_bf16,
    encode_int4,
    encode_int8,
)
from isthmus.kernels.matrices import combine, matmul, mirror, scale
from isthmus.kernels.vectors import (
    NORM_BLOCK,
    accumulate,
    add,
    all_finite,
    flushes_denormals,
    norm,
    norm_of,
    outer_step,
    products,
    require_denormals,
    squares,
    subtract,
    trimmed_mean,
)
from isthmus.runtime import uncollected

__all__ = [
    "ARITHMETIC",
    "BLOCK",
    "F32",
    "F64",
    "I64",
    "NORM_BLOCK",
    "U8",
    "U16",
    "accumulate",
    "accumulate_int4",
    "accumulate_int8",
    "add",
    "all_finite",
    "combine",
    "decode_bf16",
    "decode_int4",
    "decode_int8",
    "encode_bf16",
    "encode_int4",
    "encode_int8",
    "flushes_denormals",
    "matmul",
    "mirror",
    "norm",
    "norm_of",
    "outer_step",
    "products",
    "require_denormals",
    "scale",
    "squares",
    "subtract",
    "trimmed_mean",
    "warm",
]

ARITHMETIC = 1
"""Version of the arithmetic of merges; recorded in every commit."""


@uncollected()
def warm() -> None:
    """Compile every kernel for the array types the library uses, or load it from the cache on disk."""
    x = np.linspace(-1.0, 1.0, BLOCK + 3, dtype=np.float32)
    y, z = np.zeros_like(x), np.zeros_like(x)
    half, scales, bytes_ = np.zeros(x.size, np.uint16), np.zeros(2, np.uint16), np.zeros(2 * BLOCK, np.uint8)
    norm(x)
    sums = np.empty(1)
    squares(x, sums)
    norm_of(sums)
    all_finite(x)
    flushes_denormals()
    accumulate(y, x, 0.5)
    products(x, y, sums)
    trimmed_mean(x.reshape(1, -1), sums, sums, 0, y)
    outer_step(x, 1.0, 0.1, 0.5, x, x, y, z)
    subtract(x, y, z)
    add(x, y, z)
    square, product = x[:9].reshape(3, 3), np.empty((3, 3), np.float32)
    matmul(square, square, product, 0, 3, False)
    mirror(product)
    scale(square, 0.5, product)
    combine(0.5, square, 0.5, product, product)
    encode_bf16(x, half)
    decode_bf16(half, y)
    encode_int8(x, scales, bytes_[: x.size])
    decode_int8(scales, bytes_[: x.size], y)
    accumulate_int8(scales, bytes_[: x.size], 0.5, y)
    encode_int4(x, scales, bytes_[:BLOCK])
    decode_int4(scales, bytes_[:BLOCK], y)
    accumulate_int4(scales, bytes_[:BLOCK], 0.5, y)

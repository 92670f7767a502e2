"""The hot loops, compiled by numba and run without the GIL. Results have the same bits on every machine.

The number of threads does not change them either. These rules keep the bits:

- no fastmath, and no contraction to fused multiply-add: LLVM contracts only when told to. Matrix products ask for the
  fused operation by name and get it on every machine;
- one thread per call;
- sums in float64 over fixed blocks with a fixed number of lanes;
- rounding by addition of a constant instead of a library call.

A thread in which the processor flushes denormals computes other bits nevertheless, so merges call `require_denormals`
first. A change of any kernel's result must raise `ARITHMETIC`; logs written under another number are not replayed.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from isthmus.codecs.kernels import rate, vectors
from isthmus.codecs.kernels.compiled import F32, F64, I64, U8, U16
from isthmus.codecs.kernels.formats import (
    BLOCK,
    accumulate_int4,
    accumulate_int8,
    advance_int4,
    advance_int8,
    decode_bf16,
    decode_int4,
    decode_int8,
    encode_bf16,
    encode_int4,
    encode_int8,
)
from isthmus.codecs.kernels.matrices import combine, matmul, mirror, scale
from isthmus.codecs.kernels.vectors import (
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
from isthmus.runtime.clock import uncollected

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
    "advance_int4",
    "advance_int8",
    "all_finite",
    "build",
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
"""Version of the arithmetic of merges, recorded in every commit."""


@uncollected()
def warm() -> None:
    """Compile every kernel for the array types the library uses, or load it from the cache on disk."""
    for fn, arguments in _calls():
        fn(*arguments)


def build() -> None:
    """Compile every kernel for the processor that `NUMBA_CPU_NAME` names and keep it on disk, without running it."""
    for fn, arguments in (*_calls(), *_calls_of_rate()):
        fn.compile_for(*arguments)


def _calls() -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yield every kernel but those of `rate`, with arguments of the types that the library calls it with."""
    x = np.linspace(-1.0, 1.0, BLOCK + 3, dtype=np.float32)
    y, z, sums = np.zeros_like(x), np.zeros_like(x), np.zeros(1)
    half, scales, bytes_ = np.zeros(x.size, np.uint16), np.zeros(2, np.uint16), np.zeros(2 * BLOCK, np.uint8)
    square, product = x[:9].reshape(3, 3), np.zeros((3, 3), np.float32)
    yield norm, (x,)
    yield squares, (x, sums)
    yield norm_of, (sums,)
    yield all_finite, (x,)
    yield vectors._halves_and_doubles, (x[0], x[0], x[0])
    yield accumulate, (y, x, 0.5)
    yield products, (x, y, sums)
    yield trimmed_mean, (x.reshape(1, -1), sums, sums, 0, y)
    yield outer_step, (x, 1.0, 0.1, 0.5, x, x, y, z)
    yield subtract, (x, y, z)
    yield add, (x, y, z)
    yield matmul, (square, square, product, 0, 3, False)
    yield mirror, (product,)
    yield scale, (square, 0.5, product)
    yield combine, (0.5, square, 0.5, product, product)
    yield encode_bf16, (x, half)
    yield decode_bf16, (half, y)
    yield encode_int8, (x, scales, bytes_[: x.size])
    yield decode_int8, (scales, bytes_[: x.size], y)
    yield accumulate_int8, (scales, bytes_[: x.size], 0.5, y)
    yield encode_int4, (x, scales, bytes_[:BLOCK])
    yield decode_int4, (scales, bytes_[:BLOCK], y)
    yield accumulate_int4, (scales, bytes_[:BLOCK], 0.5, y)
    yield advance_int8, (x, 1.0, 0.1, 0.5, x, x, x, y, z, z.copy(), scales, bytes_[: x.size])
    yield advance_int4, (x, 1.0, 0.1, 0.5, x, x, x, y, z, z.copy(), scales, bytes_[:BLOCK])


def _calls_of_rate() -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Yield the kernels of `rate` with arguments of the right types but meaningless values."""
    x, real = np.zeros(1, np.float32), np.zeros((1, 1))
    bytes_, words, numbers = np.zeros(1, np.uint8), np.zeros(1, np.uint16), np.zeros((1, 1), np.int64)
    yield rate.largest, (x,)
    yield rate.choose_step, (x, 1.0, 1.0, 1.0, 1, 1, 1)
    yield rate.quantise, (x, x[0], bytes_)
    yield rate.count, (x, bytes_, numbers[0], real[0])
    yield rate.frequencies, (numbers[0], numbers[0])
    yield rate.encode, (bytes_, numbers[0], words)
    yield rate.header_size, (1, 1)
    yield rate.check, (bytes_, 1, 1)
    yield rate.decode, (bytes_, 1, 1, 1, x)
    yield rate.folded, (numbers, real)
    yield rate.lengthen, (numbers[0], x, 1.0)

"""The hot loops, compiled by numba with the GIL released. Same bits on every machine and for every thread count.

Rules that keep the bits: no fastmath and no contraction to fused multiply-add (LLVM contracts only when told to; matrix
products ask for it by name and get it on every machine), one thread per call, sums in float64 over fixed blocks with a
fixed number of lanes, rounding by addition of a constant instead of a library call. A thread in which the processor
flushes denormals has other bits all the same: merges ask `require_denormals` first. Whoever changes the result of one
of these raises `ARITHMETIC`, and replay refuses logs written under another number.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba.core import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from isthmus.errors import DenormalsFlushed

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]
U16 = NDArray[np.uint16]

ARITHMETIC = 1
"""Version of the arithmetic of merges; recorded in every commit."""

BLOCK = 128
"""Elements that share one scale in the blocked codecs."""

NORM_BLOCK = 4096
"""Elements summed before the partial sums are folded; part of the arithmetic."""

_ROUND = np.float32(12582912.0)  # 1.5 * 2**23: adding and subtracting it rounds a small float32 half to even
_SMALLEST_NORMAL, _HALF, _TWO = np.finfo(np.float32).smallest_normal, np.float32(0.5), np.float32(2.0)

F = TypeVar("F", bound=Callable[..., Any])


def _kernel(fn: F) -> F:
    """Compile on first use, without the GIL, and keep the machine code on disk between processes."""
    return cast(F, numba.njit(nogil=True, cache=True, fastmath=False, error_model="numpy")(fn))


# --- norms and checks -------------------------------------------------------------------------------------------------


@_kernel
def _sum_of_squares(x: F32, start: int, stop: int) -> float:
    """Return the sum of squares of x[start:stop] in float64, in eight fixed lanes."""
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = 0.0
    i = start
    while i + 8 <= stop:
        s0 += np.float64(x[i]) * np.float64(x[i])
        s1 += np.float64(x[i + 1]) * np.float64(x[i + 1])
        s2 += np.float64(x[i + 2]) * np.float64(x[i + 2])
        s3 += np.float64(x[i + 3]) * np.float64(x[i + 3])
        s4 += np.float64(x[i + 4]) * np.float64(x[i + 4])
        s5 += np.float64(x[i + 5]) * np.float64(x[i + 5])
        s6 += np.float64(x[i + 6]) * np.float64(x[i + 6])
        s7 += np.float64(x[i + 7]) * np.float64(x[i + 7])
        i += 8
    while i < stop:
        s0 += np.float64(x[i]) * np.float64(x[i])
        i += 1
    return ((s0 + s1) + (s2 + s3)) + ((s4 + s5) + (s6 + s7))


@_kernel
def norm(x: F32) -> float:
    """Return the Euclidean norm of x [n] as float64, summed in fixed blocks and eight fixed lanes."""
    total = 0.0
    n = x.size
    start = 0
    while start < n:
        stop = min(start + NORM_BLOCK, n)
        total += _sum_of_squares(x, start, stop)
        start = stop
    return math.sqrt(total)


@_kernel
def squares(x: F32, out: F64) -> None:
    """Write the sum of squares of every block of `NORM_BLOCK` elements of x [n] to out [⌈n / NORM_BLOCK⌉] float64."""
    for block in range(out.size):
        start = block * NORM_BLOCK
        out[block] = _sum_of_squares(x, start, min(start + NORM_BLOCK, x.size))


@_kernel
def norm_of(squares: F64) -> float:
    """Return the norm of what has these sums of squares by block [m]: what `norm` returns of all of it, bit for bit."""
    total = 0.0
    for block in range(squares.size):
        total += squares[block]
    return math.sqrt(total)


@_kernel
def all_finite(x: F32) -> bool:
    """Return whether x [n] holds neither NaN nor infinity."""
    bits = x.view(np.uint32)
    bad = np.uint32(0)
    for i in range(bits.size):
        # All eight exponent bits set is what NaN and infinity have in common.
        bad |= np.uint32((bits[i] & np.uint32(0x7F800000)) == np.uint32(0x7F800000))
    return bool(bad == 0)


@_kernel
def _halves_and_doubles(x: np.float32, half: np.float32, two: np.float32) -> bool:
    """Return whether x is itself again; the numbers come in as arguments, or the compiler would know the answer."""
    halved = x * half
    return bool(halved * two == x)


def flushes_denormals() -> bool:
    """Return whether this thread turns denormal float32 into zeros, be it as results or as operands.

    A mode of the processor (FTZ and DAZ on x86-64, FZ on Arm) that a thread inherits from the one that starts it.
    """
    return not _halves_and_doubles(_SMALLEST_NORMAL, _HALF, _TWO)


def require_denormals() -> None:
    """Raise `DenormalsFlushed` in a thread whose arithmetic has other bits than everybody else's."""
    if flushes_denormals():
        raise DenormalsFlushed


# --- the merge --------------------------------------------------------------------------------------------------------


@_kernel
def accumulate(total: F32, x: F32, coefficient: float) -> None:
    """Add coefficient * x [n] to total [n] in place; the product in float64, the sum rounded to float32 once."""
    for i in range(total.size):
        total[i] = np.float32(np.float64(total[i]) + coefficient * np.float64(x[i]))


@_kernel
def outer_step(
    total: F32,
    scale: float,
    learning_rate: float,
    momentum: float,
    master: F32,
    buffer: F32,
    new_master: F32,
    new_buffer: F32,
) -> None:
    """SGD with Nesterov momentum on the outer gradient Δ = scale * total; all arrays [n] float32.

    b' = μ b + Δ;  Θ' = Θ − η (Δ + μ b')   (DiLoCo, arXiv 2311.08105, as in Sutskever et al. 2013)
    """
    rate = np.float32(learning_rate)
    mu = np.float32(momentum)
    for i in range(total.size):
        gradient = np.float32(scale * np.float64(total[i]))
        b = mu * buffer[i] + gradient
        new_buffer[i] = b
        new_master[i] = master[i] - rate * (gradient + mu * b)


@_kernel
def subtract(a: F32, b: F32, out: F32) -> None:
    """out = a − b, elementwise [n]."""
    for i in range(out.size):
        out[i] = a[i] - b[i]


@_kernel
def add(a: F32, b: F32, out: F32) -> None:
    """out = a + b, elementwise [n]."""
    for i in range(out.size):
        out[i] = a[i] + b[i]


# --- matrices ---------------------------------------------------------------------------------------------------------

_WIDTH = 256
"""Columns of a product that are computed together …"""
_DEPTH = 256
"""… from so many rows of its right side at a time: 256 KiB, which stay in the cache. Neither changes a bit."""
_ROWS = 4


def _generate_fma(_context: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a b + c, rounded once: an instruction where the processor has one, else the C library's, the same bits."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


_fma: Any = intrinsic(_generate_fma)


@_kernel
def matmul(a: F32, b: F32, out: F32, first: int, last: int, symmetric: bool) -> None:
    """Write rows [first, last) of a [m, k] times b [k, n] into out [m, n]; `symmetric`: up to the diagonal will do.

    Every element is c ← fma(a_il, b_lj, c) for l = 0, 1, …: one order, whatever the width of the processor's vectors,
    the blocks and the threads that rows are given to. With `symmetric` what lies right of the last diagonal element of
    a group of four rows may be left unwritten: see `mirror`.
    """
    k, n = a.shape[1], b.shape[1]
    panel, tile = np.empty((_DEPTH, _WIDTH), np.float32), np.empty((_ROWS, _WIDTH), np.float32)
    for j0 in range(0, n, _WIDTH):
        if symmetric and j0 >= last:
            break
        width = min(_WIDTH, n - j0)
        begin = max(first, first + (j0 - first) // _ROWS * _ROWS) if symmetric else first
        for l0 in range(0, k, _DEPTH):
            depth = min(_DEPTH, k - l0)
            for q in range(depth):
                for j in range(width):
                    panel[q, j] = b[l0 + q, j0 + j]
                for j in range(width, _WIDTH):
                    panel[q, j] = np.float32(0.0)
            for i0 in range(begin, last, _ROWS):
                rows = min(_ROWS, last - i0)
                for i in range(_ROWS):
                    for j in range(_WIDTH):
                        tile[i, j] = np.float32(0.0)
                if l0 > 0:
                    for i in range(rows):
                        for j in range(width):
                            tile[i, j] = out[i0 + i, j0 + j]
                # Of fewer than four rows the last is computed several times.
                i1, i2, i3 = min(i0 + 1, last - 1), min(i0 + 2, last - 1), min(i0 + 3, last - 1)
                q = 0
                while q + 4 <= depth:
                    at = l0 + q
                    a00, a01, a02, a03 = a[i0, at], a[i0, at + 1], a[i0, at + 2], a[i0, at + 3]
                    a10, a11, a12, a13 = a[i1, at], a[i1, at + 1], a[i1, at + 2], a[i1, at + 3]
                    a20, a21, a22, a23 = a[i2, at], a[i2, at + 1], a[i2, at + 2], a[i2, at + 3]
                    a30, a31, a32, a33 = a[i3, at], a[i3, at + 1], a[i3, at + 2], a[i3, at + 3]
                    for j in range(_WIDTH):
                        b0, b1, b2, b3 = panel[q, j], panel[q + 1, j], panel[q + 2, j], panel[q + 3, j]
                        tile[0, j] = _fma(a03, b3, _fma(a02, b2, _fma(a01, b1, _fma(a00, b0, tile[0, j]))))
                        tile[1, j] = _fma(a13, b3, _fma(a12, b2, _fma(a11, b1, _fma(a10, b0, tile[1, j]))))
                        tile[2, j] = _fma(a23, b3, _fma(a22, b2, _fma(a21, b1, _fma(a20, b0, tile[2, j]))))
                        tile[3, j] = _fma(a33, b3, _fma(a32, b2, _fma(a31, b1, _fma(a30, b0, tile[3, j]))))
                    q += 4
                while q < depth:
                    for i in range(rows):
                        factor = a[i0 + i, l0 + q]
                        for j in range(_WIDTH):
                            tile[i, j] = _fma(factor, panel[q, j], tile[i, j])
                    q += 1
                for i in range(rows):
                    for j in range(width):
                        out[i0 + i, j0 + j] = tile[i, j]


@_kernel
def mirror(x: F32) -> None:
    """Copy what lies below the diagonal of x [m, m] above it."""
    for i in range(x.shape[0]):
        for j in range(i):
            x[j, i] = x[i, j]


@_kernel
def scale(x: F32, factor: float, out: F32) -> None:
    """out = factor x, elementwise [m, n]; the product in float64."""
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            out[i, j] = np.float32(factor * np.float64(x[i, j]))


@_kernel
def combine(s: float, x: F32, t: float, y: F32, out: F32) -> None:
    """out = s x + t y, elementwise [m, n]: two products, each rounded, and their sum."""
    one, other = np.float32(s), np.float32(t)
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            out[i, j] = one * x[i, j] + other * y[i, j]


# --- number formats ---------------------------------------------------------------------------------------------------


@_kernel
def _bf16_bits(value: np.float32) -> np.uint16:
    """Round one finite float32 to bfloat16, half to even; values above the largest finite bfloat16 saturate to it."""
    one = np.empty(1, np.float32)
    one[0] = value
    bits = one.view(np.uint32)[0]
    rounded = np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    high = np.uint32(rounded >> np.uint32(16))
    if (high & np.uint32(0x7F80)) == np.uint32(0x7F80) and (bits & np.uint32(0x7F800000)) != np.uint32(0x7F800000):
        high = np.uint32((bits >> np.uint32(16)) & np.uint32(0x8000)) | np.uint32(0x7F7F)
    return np.uint16(high)


@_kernel
def encode_bf16(x: F32, out: U16) -> None:
    """Round x [n] to bfloat16 [n] half to even; finite values stay finite (saturation)."""
    bits = x.view(np.uint32)
    for i in range(bits.size):
        b = bits[i]
        high = np.uint32(np.uint32(b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))
        overflowed = (high & np.uint32(0x7F80)) == np.uint32(0x7F80) and (b & np.uint32(0x7F800000)) != np.uint32(
            0x7F800000
        )
        if overflowed:
            high = np.uint32((b >> np.uint32(16)) & np.uint32(0x8000)) | np.uint32(0x7F7F)
        out[i] = np.uint16(high)


@_kernel
def decode_bf16(data: U16, out: F32) -> None:
    """Widen bfloat16 [n] to float32 [n], exactly."""
    bits = out.view(np.uint32)
    for i in range(data.size):
        bits[i] = np.uint32(data[i]) << np.uint32(16)


@_kernel
def _block_scale(x: F32, start: int, stop: int, levels: np.float32, scale_bits: U16, block: int) -> np.float32:
    """Write the bfloat16 scale absmax / levels of x[start:stop] and return 1 / scale (0 for a block of zeros)."""
    largest = np.float32(0.0)
    for i in range(start, stop):
        magnitude = abs(x[i])
        largest = max(largest, magnitude)
    bits = _bf16_bits(np.float32(largest / levels))
    scale_bits[block] = bits
    one = np.empty(1, np.uint32)
    one[0] = np.uint32(bits) << np.uint32(16)
    scale = one.view(np.float32)[0]
    # Below 2**-126 the inverse would overflow; such a block is zero for every practical purpose.
    if scale < np.float32(1.1754944e-38):
        scale_bits[block] = np.uint16(0)
        return np.float32(0.0)
    inverse: np.float32 = np.float32(1.0) / scale
    return inverse


@_kernel
def encode_int8(x: F32, scales: U16, out: U8) -> None:
    """Quantise x [n] to signed bytes [n], levels −127…127 of a bfloat16 scale per block of 128."""
    n = x.size
    for block in range(scales.size):
        start = block * BLOCK
        stop = min(start + BLOCK, n)
        inverse = _block_scale(x, start, stop, np.float32(127.0), scales, block)
        for i in range(start, stop):
            q = min(max(x[i] * inverse, np.float32(-127.0)), np.float32(127.0))
            out[i] = np.uint8(np.int32((q + _ROUND) - _ROUND) & 0xFF)


@_kernel
def decode_int8(scales: U16, data: U8, out: F32) -> None:
    """Undo `encode_int8`: out [n] = level * scale."""
    one = np.empty(1, np.uint32)
    for block in range(scales.size):
        one[0] = np.uint32(scales[block]) << np.uint32(16)
        scale = one.view(np.float32)[0]
        start = block * BLOCK
        for i in range(start, min(start + BLOCK, out.size)):
            out[i] = np.float32(np.int8(data[i])) * scale


@_kernel
def encode_int4(x: F32, scales: U16, out: U8) -> None:
    """Quantise x [n] to 4 bits, levels −7…7 of a bfloat16 scale per block of 128, stored as level + 8.

    A block is 64 bytes, the last one padded with zeros: element i in the low half of byte i, element i + 64 in the
    high half, so that both halves of a load are neighbours.
    """
    n = x.size
    half = BLOCK // 2
    seven = np.float32(7.0)
    for block in range(scales.size):
        start = block * BLOCK
        stop = min(start + BLOCK, n)
        inverse = _block_scale(x, start, stop, seven, scales, block)
        base = block * half
        for j in range(half):
            low = np.int32(0)
            high = np.int32(0)
            if start + j < stop:
                q = min(max(x[start + j] * inverse, -seven), seven)
                low = np.int32((q + _ROUND) - _ROUND)
            if start + half + j < stop:
                q = min(max(x[start + half + j] * inverse, -seven), seven)
                high = np.int32((q + _ROUND) - _ROUND)
            out[base + j] = np.uint8((low + 8) | ((high + 8) << 4))


@_kernel
def decode_int4(scales: U16, data: U8, out: F32) -> None:
    """Undo `encode_int4`: out [n] = (code − 8) * scale."""
    n = out.size
    half = BLOCK // 2
    one = np.empty(1, np.uint32)
    for block in range(scales.size):
        one[0] = np.uint32(scales[block]) << np.uint32(16)
        scale = one.view(np.float32)[0]
        start = block * BLOCK
        base = block * half
        for j in range(min(half, n - start)):
            out[start + j] = np.float32(np.int32(data[base + j] & 0x0F) - 8) * scale
        for j in range(min(half, max(n - start - half, 0))):
            out[start + half + j] = np.float32(np.int32(data[base + j] >> 4) - 8) * scale


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
    encode_int4(x, scales, bytes_[:BLOCK])
    decode_int4(scales, bytes_[:BLOCK], y)

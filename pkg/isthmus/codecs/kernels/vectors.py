"""Sums, checks and the outer step over vectors."""

import math
from typing import Any

import numpy as np

from isthmus.codecs.kernels.compiled import F32, F64, kernel
from isthmus.errors import DenormalsFlushed

NORM_BLOCK = 4096
"""Elements summed before the partial sums are added up; part of the arithmetic."""

_U64: Any = np.uint64  # A loop whose index could be negative is not vectorised.

_SMALLEST_NORMAL, _HALF, _TWO = np.finfo(np.float32).smallest_normal, np.float32(0.5), np.float32(2.0)


# --- norms and checks -------------------------------------------------------------------------------------------------


@kernel
def _folded(first: float, lanes: F64) -> float:
    """Return the sum of eight lanes in a fixed order; `first` takes the place of lanes[0]."""
    return float(((first + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7])))


@kernel
def _sum_of_squares(x: F32, block: Any, lanes: F64) -> float:
    """Return the sum of squares of one block of x in float64, in eight fixed lanes; `lanes` [8] is scratch."""
    start = block * _U64(NORM_BLOCK)
    stop = min(start + _U64(NORM_BLOCK), _U64(x.size))
    eights = (stop - start) // _U64(8)
    lanes[:] = 0.0
    for k in range(eights):
        for lane in range(_U64(8)):
            value = np.float64(x[start + k * _U64(8) + lane])
            lanes[lane] += value * value
    first = lanes[0]
    for i in range(start + eights * _U64(8), stop):
        value = np.float64(x[i])
        first += value * value
    return _folded(first, lanes)


@kernel
def norm(x: F32) -> float:
    """Return the Euclidean norm of x [n] as float64, summed in fixed blocks and eight fixed lanes."""
    total, lanes = 0.0, np.empty(8, np.float64)
    for block in range(_U64((x.size + NORM_BLOCK - 1) // NORM_BLOCK)):
        total += _sum_of_squares(x, block, lanes)
    return math.sqrt(total)


@kernel
def squares(x: F32, out: F64) -> None:
    """Write the sum of squares of every block of `NORM_BLOCK` elements of x [n] to out [⌈n / NORM_BLOCK⌉] float64."""
    lanes = np.empty(8, np.float64)
    for block in range(_U64(out.size)):
        out[block] = _sum_of_squares(x, block, lanes)


@kernel
def norm_of(squares: F64) -> float:
    """Return the norm of a vector, given its sums of squares by block [m]: bit for bit what `norm` returns for it."""
    total = 0.0
    for block in range(squares.size):
        total += squares[block]
    return math.sqrt(total)


@kernel
def all_finite(x: F32) -> bool:
    """Return whether x [n] holds neither NaN nor infinity."""
    bits = x.view(np.uint32)
    bad = np.uint32(0)
    for i in range(bits.size):
        # All eight exponent bits are set in NaN and infinity, and in no other number.
        bad |= np.uint32((bits[i] & np.uint32(0x7F800000)) == np.uint32(0x7F800000))
    return bool(bad == 0)


@kernel
def _halves_and_doubles(x: np.float32, half: np.float32, two: np.float32) -> bool:
    """Return whether x · half · two is x again. The numbers are arguments, or the compiler would know the answer."""
    halved = x * half
    return bool(halved * two == x)


def flushes_denormals() -> bool:
    """Return whether this thread turns denormal float32 into zeros, as results or as operands.

    This is a mode of the processor (FTZ and DAZ on x86-64, FZ on Arm), which a thread inherits from the thread that
    starts it.
    """
    return not _halves_and_doubles(_SMALLEST_NORMAL, _HALF, _TWO)


def require_denormals() -> None:
    """Raise `DenormalsFlushed` in a thread that flushes denormals, because its results have other bits."""
    if flushes_denormals():
        raise DenormalsFlushed


@kernel
def _product_of_block(x: F32, y: F32, block: Any, lanes: F64) -> float:
    """Return the inner product of one block of x and y in float64, in eight fixed lanes; `lanes` [8] is scratch."""
    start = block * _U64(NORM_BLOCK)
    stop = min(start + _U64(NORM_BLOCK), _U64(x.size))
    eights = (stop - start) // _U64(8)
    lanes[:] = 0.0
    for k in range(eights):
        for lane in range(_U64(8)):
            i = start + k * _U64(8) + lane
            lanes[lane] += np.float64(x[i]) * np.float64(y[i])
    first = lanes[0]
    for i in range(start + eights * _U64(8), stop):
        first += np.float64(x[i]) * np.float64(y[i])
    return _folded(first, lanes)


@kernel
def products(x: F32, y: F32, out: F64) -> None:
    """Write the inner product of every block of `NORM_BLOCK` elements of x and y [n] to out [⌈n / NORM_BLOCK⌉]."""
    lanes = np.empty(8, np.float64)
    for block in range(_U64(out.size)):
        out[block] = _product_of_block(x, y, block, lanes)


@kernel
def trimmed_mean(x: F32, weights: F64, factors: F64, trim: int, out: F32) -> None:
    """Write to out [n] the weighted mean of each column of factors · x [m, n] without its `trim` least and greatest.

    Products are in float64. Of equal values that of the earlier row counts as the lesser. The sum runs in ascending
    order and is rounded to float32 once.
    """
    m = x.shape[0]
    values, order = np.empty(m, np.float64), np.empty(m, np.int64)
    for j in range(out.size):
        for i in range(m):
            value = factors[i] * np.float64(x[i, j])
            at = i
            while at > 0 and values[at - 1] > value:
                values[at], order[at] = values[at - 1], order[at - 1]
                at -= 1
            values[at], order[at] = value, i
        total, weight = 0.0, 0.0
        for at in range(trim, m - trim):
            total += weights[order[at]] * values[at]
            weight += weights[order[at]]
        out[j] = np.float32(total / weight)


# --- the merge --------------------------------------------------------------------------------------------------------


@kernel
def accumulate(total: F32, x: F32, coefficient: float) -> None:
    """Add coefficient * x [n] to total [n] in place, with product and sum in float64, rounded to float32 once.

    With the coefficients 1 and −1 the result is float32's own sum or difference: a first rounding to at least twice as
    many digits and two more changes no bit of the second (S. Figueroa, 1995).
    """
    for i in range(total.size):
        total[i] = np.float32(np.float64(total[i]) + coefficient * np.float64(x[i]))


@kernel
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
    """Apply SGD with Nesterov momentum to the outer gradient Δ = scale * total; all arrays are [n] float32.

    b' = μ b + Δ;  Θ' = Θ − η (Δ + μ b')   (DiLoCo, arXiv 2311.08105, as in Sutskever et al. 2013)
    """
    rate = np.float32(learning_rate)
    mu = np.float32(momentum)
    for i in range(total.size):
        gradient = np.float32(scale * np.float64(total[i]))
        b = mu * buffer[i] + gradient
        new_buffer[i] = b
        new_master[i] = master[i] - rate * (gradient + mu * b)


@kernel
def subtract(a: F32, b: F32, out: F32) -> None:
    """Write a − b to out, elementwise [n]."""
    for i in range(out.size):
        out[i] = a[i] - b[i]


@kernel
def add(a: F32, b: F32, out: F32) -> None:
    """Write a + b to out, elementwise [n]."""
    for i in range(out.size):
        out[i] = a[i] + b[i]

"""Products of matrices, every sum of them in one order, and what goes with them."""

from typing import Any

import numpy as np

from isthmus.codecs.kernels.compiled import F32, kernel

_WIDTH = 256
"""Columns of a product that are computed together …"""
_DEPTH = 256
"""… from so many rows of its right side at a time: 256 KiB, which stay in the cache. Neither changes a bit."""
_ROWS = 4


_SIZE = (1 << 63) - 1
"""Of the bits of a float64 those without the sign …"""
_DROPPED = (1 << 29) - 1
"""… those that a float32 has no room for …"""
_HALF = 1 << 28
"""… what they are where it lies half-way between two float32 …"""
_TINY = (1023 - 126) << 52
"""… and all of 2⁻¹²⁶, the smallest float32 with all its digits."""

_fma: Any = None  # see `_prepare`
_bits: Any = None
_of_bits: Any = None
_in_hardware = True


def _prepare() -> None:
    """Make what kernels use as instructions, and find out whether the processor has one that multiplies and adds."""
    from llvmlite import ir
    from numba.core import types
    from numba.extending import intrinsic

    def generate_fma(_context: Any, a: Any, b: Any, c: Any) -> Any:
        """Return a b + c, rounded once: an instruction."""

        def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
            return builder.fma(*arguments)

        return types.float32(types.float32, types.float32, types.float32), generate

    def generate_bits(_context: Any, x: Any) -> Any:
        """Return the bits of a float64."""

        def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], ir.IntType(64))

        return types.int64(types.float64), generate

    def generate_of_bits(_context: Any, x: Any) -> Any:
        """Return the float64 of these bits."""

        def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], ir.DoubleType())

        return types.float64(types.int64), generate

    globals().update(
        _fma=intrinsic(generate_fma), _bits=intrinsic(generate_bits), _of_bits=intrinsic(generate_of_bits),
        _in_hardware=has_fma(),
    )  # fmt: skip


def has_fma() -> bool:
    """Return whether the processor that kernels are compiled for multiplies and adds in one instruction."""
    import llvmlite.binding as llvm
    from numba.core.registry import cpu_target

    triple, name, features = cpu_target.target_context.codegen().magic_tuple()
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=name, features=features)
    # Without the instruction LLVM calls the C library.
    return "fmaf" not in machine.emit_assembly(llvm.parse_assembly(_ONE_FMA))


_ONE_FMA = """
declare float @llvm.fma.f32(float, float, float)
define float @one(float %a, float %b, float %c) {
  %x = call float @llvm.fma.f32(float %a, float %b, float %c)
  ret float %x
}
"""


@kernel
def fma_alone(a: Any, b: Any, c: Any) -> Any:
    """Return a b + c of three float32, rounded once, by arithmetic of float64 alone.

    The product a b is exact in float64 (48 digits of 53; no exponent leaves the range). Let s be its rounded sum with c
    and e the error of that rounding, which Knuth's two-sum computes exactly. Rounding s again to float32 can be wrong:
    s may lie half-way between two float32 where the true sum does not. So s is rounded to odd first: if e is not zero
    and the last digit of s is even, the neighbour of s on the side of e takes its place. Rounding that to float32 is
    right, as float64 has more than two digits to spare (Boldo and Melquiond, "Emulation of FMA and correctly rounded
    sums: proved algorithms using rounding to odd", IEEE Transactions on Computers 57, 2008, theorem 2). Among denormals
    float32 has fewer digits, so it is right there, too.
    """
    product, addend = np.float64(a) * np.float64(b), np.float64(c)
    s = product + addend
    part = s - product
    e = (product - (s - part)) + (addend - part)
    bits = _bits(s)
    if e != 0.0 and bits & 1 == 0:
        bits += 1 if (e > 0.0) == (s > 0.0) else -1
    return np.float32(_of_bits(bits))


@kernel
def _add_row(factor: float, row: F32, into: F32, before: F32) -> None:
    """into = fma(factor, row, into), elementwise, without an instruction for it; `before`: room for as many elements.

    Two roundings are one where the first does not end half-way between two float32: so it is for all but one of some
    5e8 sums, and those that may differ are computed again.
    """
    f = np.float64(factor)
    for j in range(_WIDTH):
        before[j] = into[j]
    doubtful = np.int64(0)  # below zero where any is: comparisons would keep the loop from wide registers
    for j in range(_WIDTH):
        s = f * np.float64(row[j]) + np.float64(before[j])
        into[j] = np.float32(s)
        size = _bits(s) & _SIZE
        doubtful |= ((size & _DROPPED) ^ _HALF) - 1  # half-way
        doubtful |= (size - _TINY) & ~(size - 1)  # a denormal, and not zero
    if doubtful < 0:
        for j in range(_WIDTH):
            into[j] = fma_alone(factor, row[j], before[j])


@kernel
def matmul(a: F32, b: F32, out: F32, first: int, last: int, symmetric: bool) -> None:
    """Write rows [first, last) of a [m, k] times b [k, n] into out [m, n]; `symmetric`: up to the diagonal will do.

    Every element is c ← fma(a_il, b_lj, c) for l = 0, 1, …: one order, whatever the width of the processor's vectors,
    the blocks and the threads that rows are given to. With `symmetric` what lies right of the last diagonal element of
    a group of four rows may be left unwritten: see `mirror`.
    """
    k, n = a.shape[1], b.shape[1]
    panel, tile = np.empty((_DEPTH, _WIDTH), np.float32), np.empty((_ROWS, _WIDTH), np.float32)
    before = np.empty(_WIDTH, np.float32)
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
                while _in_hardware and q + 4 <= depth:
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
                        if _in_hardware:
                            for j in range(_WIDTH):
                                tile[i, j] = _fma(factor, panel[q, j], tile[i, j])
                        else:
                            _add_row(factor, panel[q], tile[i], before)
                    q += 1
                for i in range(rows):
                    for j in range(width):
                        out[i0 + i, j0 + j] = tile[i, j]


@kernel
def mirror(x: F32) -> None:
    """Copy what lies below the diagonal of x [m, m] above it."""
    for i in range(x.shape[0]):
        for j in range(i):
            x[j, i] = x[i, j]


@kernel
def scale(x: F32, factor: float, out: F32) -> None:
    """out = factor x, elementwise [m, n]; the product in float64."""
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            out[i, j] = np.float32(factor * np.float64(x[i, j]))


@kernel
def combine(s: float, x: F32, t: float, y: F32, out: F32) -> None:
    """out = s x + t y, elementwise [m, n]: two products, each rounded, and their sum."""
    one, other = np.float32(s), np.float32(t)
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            out[i, j] = one * x[i, j] + other * y[i, j]

"""Products of matrices with every sum in one fixed order, and the other operations on matrices."""

from typing import Any

import numpy as np

from isthmus.codecs.kernels.compiled import F32, kernel

_WIDTH = 256
"""Columns of a product that are computed together. The result does not depend on it."""
_DEPTH = 256
"""Rows of the right factor that are used at a time: 256 KiB, which fit the cache. The result does not depend on it."""
_ROWS = 4


_SIZE = (1 << 63) - 1
"""Mask of all bits of a float64 but the sign."""
_DROPPED = (1 << 29) - 1
"""Mask of the bits of a float64 that a float32 has no room for."""
_HALF = 1 << 28
"""Value of the bits under `_DROPPED` if the float64 lies half-way between two float32."""
_TINY = (1023 - 126) << 52
"""Bits of the float64 2⁻¹²⁶, the smallest normal float32."""

_fma: Any = None  # see `_prepare`
_bits: Any = None
_of_bits: Any = None
_in_hardware = True


def _prepare() -> None:
    """Define the instructions that kernels use, and find out whether the processor has a fused multiply-add."""
    from llvmlite import ir
    from numba.core import types
    from numba.extending import intrinsic

    def generate_fma(_context: Any, a: Any, b: Any, c: Any) -> Any:
        """Return a b + c, rounded once, as one instruction."""

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
    """Return whether the processor that kernels are compiled for has an instruction for fused multiply-add."""
    import llvmlite.binding as llvm
    from numba.core.registry import cpu_target

    triple, name, features = cpu_target.target_context.codegen().magic_tuple()
    machine = llvm.Target.from_triple(triple).create_target_machine(cpu=name, features=features)
    # Without the instruction LLVM calls the C library's fmaf.
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
    """Return a b + c of three float32, rounded once, computed in float64 alone.

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
    """Write fma(factor, row, into) to into [`_WIDTH`] without the instruction; `before` [`_WIDTH`] is scratch.

    Rounding to float64 and then to float32 gives the bits of one rounding, unless the float64 lies half-way between two
    float32 or the result is a denormal. About one in 5e8 sums is half-way. If any sum may differ, the row is computed
    again by `fma_alone`.
    """
    f = np.float64(factor)
    for j in range(_WIDTH):
        before[j] = into[j]
    doubtful = np.int64(0)  # Becomes negative if any sum is. Comparisons would keep the loop from being vectorised.
    for j in range(_WIDTH):
        s = f * np.float64(row[j]) + np.float64(before[j])
        into[j] = np.float32(s)
        size = _bits(s) & _SIZE
        doubtful |= ((size & _DROPPED) ^ _HALF) - 1  # Negative if half-way.
        doubtful |= (size - _TINY) & ~(size - 1)  # Negative if a denormal and not zero.
    if doubtful < 0:
        for j in range(_WIDTH):
            into[j] = fma_alone(factor, row[j], before[j])


@kernel
def matmul(a: F32, b: F32, out: F32, first: int, last: int, symmetric: bool) -> None:
    """Write rows [first, last) of a [m, k] times b [k, n] into out [m, n].

    Every element is c ← fma(a_il, b_lj, c) for l = 0, 1, … The order is the same for any width of the processor's
    vectors, any blocks and any division of rows among threads. `symmetric` says that the product is symmetric: elements
    right of the last diagonal element of a group of four rows may then be left unwritten, and `mirror` completes them.
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
                # In a group of fewer than four rows, the last row is computed several times.
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
    """Copy the elements below the diagonal of x [m, m] to the places above it."""
    for i in range(x.shape[0]):
        for j in range(i):
            x[j, i] = x[i, j]


@kernel
def scale(x: F32, factor: float, out: F32) -> None:
    """Write factor x to out, elementwise [m, n], with the product in float64."""
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            out[i, j] = np.float32(factor * np.float64(x[i, j]))


@kernel
def combine(s: float, x: F32, t: float, y: F32, out: F32) -> None:
    """Write s x + t y to out, elementwise [m, n], in float32: each product is rounded, and so is their sum."""
    one, other = np.float32(s), np.float32(t)
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            out[i, j] = one * x[i, j] + other * y[i, j]

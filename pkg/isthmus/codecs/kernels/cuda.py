"""The iteration of `isthmus.log.polar` on a CUDA GPU, with the bits of the kernels in `matrices`.

These rules keep the bits:

- Every element of a product is the same chain as on the processor, c ← fma(a_il, b_lj, c) for l = 0, 1, … The
  instruction (`fma.rn.f32`) rounds once and keeps denormals. There is no fastmath, no tensor core and no split sum.
- A tile that reaches beyond the last l is filled so that the additional products are −0. Adding −0 changes no number;
  adding +0 would turn a sum of −0 into +0.
- `combine` rounds each product and then their sum. CUDA's compiler contracts a product and a sum to one operation. It
  does so even if the product is computed in float64 and then rounded, because it first narrows that to float32 (seen in
  the PTX of libNVVM 13.5). So each product is an fma, too, with the addend −0. This addend is an argument, so the
  compiler does not know it and leaves the fma alone.

Only the bits of NaN differ between processors and GPUs. A merge that has a NaN is never committed.
"""

# ruff: noqa: TID251  (threads: a lock, since several merges may run at once)

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from isthmus.codecs.kernels import levels
from isthmus.codecs.kernels.compiled import F32
from isthmus.errors import InputError, told
from isthmus.runtime.clock import uncollected

SIDE = 16
"""A block has SIDE × SIDE threads, and uses as many rows of the right factor at a time."""
EACH = 4
"""A thread computes EACH × EACH elements of a product, SIDE rows and SIDE columns apart. They stay in registers."""
TILE = SIDE * EACH
"""Rows and columns of the part of a product that a block computes. The result depends on none of these numbers."""
_SHARED = (SIDE, TILE + 1)
"""Shape of a block's part of a factor. The additional column keeps threads from waiting for the same memory bank."""

_THREADS, _BLOCKS = 256, 4096
"""Threads of a block, and most blocks, for elementwise operations."""

_NEGATIVE_ZERO = np.float32(-0.0)

_INSTALL = "pip install 'numba-cuda[cu13]' (cu12 for a driver of CUDA 12), or set CUDA_HOME to the toolkit's folder"
_LOOK = "see whether nvidia-smi shows a GPU, and whether this container may use it"
_LINE = 300
"""Most characters of an error of numba that are shown."""

_lock = threading.Lock()
"""Held during any work on the GPU."""

_cuda: Any = None  # see `_load`
_launchable: dict[str, Any] = {}
"""The compiled kernels, by name."""


def require() -> str:
    """Return the name of the GPU. Raises `InputError`, which says what is missing and what to do."""
    with _lock:
        try:
            _load()
        except Exception as error:  # numba has no CUDA target, or numba-cuda lacks what it needs.
            why = f"numba cannot load its CUDA target: {line(error)}: {_INSTALL}"
            raise InputError(f"no GPU can be used: {why}") from None
        try:
            there, why = bool(_cuda.is_available()), _cuda.cuda_error()
            if there:
                name = _cuda.get_current_device().name
                return name.decode() if isinstance(name, bytes) else str(name)
        except Exception as error:  # There is a driver, but it does not work.
            raise InputError(f"no GPU can be used: {line(error)}: {_LOOK}") from None
    if why:
        raise InputError(f"no GPU can be used: {line(why)}: {_LOOK}")
    raise InputError(f"no GPU can be used: there is a driver, but not CUDA's compiler libNVVM: {_INSTALL}")


def line(error: object) -> str:
    """Return what an error says as one line without a full stop: numba's errors have many lines."""
    text = " ".join((told(error) if isinstance(error, BaseException) else str(error)).split())
    return text[:_LINE].rstrip(".: ")


def _load() -> None:
    """Import numba's CUDA target and prepare the kernels; each is compiled at its first launch."""
    if _launchable:
        return
    levels.choose()
    with uncollected():  # The import loads most of the compiler.
        from numba import cuda
        from numba.core import config

    settings: Any = config
    settings.CUDA_LOW_OCCUPANCY_WARNINGS = 0  # Small matrices are allowed.
    globals()["_cuda"] = cuda
    _launchable.update({fn.__name__: _cuda.jit(fn, fastmath=False) for fn in (_multiply, _scale, _combine)})


# --- what runs on the GPU ---------------------------------------------------------------------------------------------
#
# The innermost loop of a product is a `while` loop: the compiler unrolls it and drops numba's checks for negative
# indices. In a `range` loop they stay, and the PTX has four instructions for addresses beside each multiply-add.


def _multiply(a: Any, b: Any, out: Any, transposed: Any, symmetric: Any, negative_zero: Any) -> None:
    """Write a [m, k] times b [k, n] to out [m, n]; `transposed`: b is [n, k].

    `symmetric`: the product is symmetric. Blocks above the diagonal then compute nothing, and blocks below it write
    their elements twice. The whole product would have the same bits: (i, j) and (j, i) are sums of the same products in
    the same order.
    """
    left = _cuda.shared.array(_SHARED, np.float32)  # [l, i]
    right = _cuda.shared.array(_SHARED, np.float32)  # [l, j]
    sums = _cuda.local.array((EACH, EACH), np.float32)
    column = _cuda.local.array(EACH, np.float32)
    row = _cuda.local.array(EACH, np.float32)
    m, n, k = out.shape[0], out.shape[1], a.shape[1]
    tx, ty = _cuda.threadIdx.x, _cuda.threadIdx.y
    i0, j0 = _cuda.blockIdx.y * TILE, _cuda.blockIdx.x * TILE
    if symmetric and j0 > i0:
        return
    for r in range(EACH):
        for c in range(EACH):
            sums[r, c] = 0.0
    l0 = 0
    while l0 < k:
        for s in range(EACH):
            i = i0 + ty + s * SIDE
            if i < m and l0 + tx < k:
                left[tx, ty + s * SIDE] = a[i, l0 + tx]
            else:
                left[tx, ty + s * SIDE] = 0.0
            if transposed:
                j = j0 + ty + s * SIDE
                if j < n and l0 + tx < k:
                    right[tx, ty + s * SIDE] = b[j, l0 + tx]
                else:
                    right[tx, ty + s * SIDE] = negative_zero
            else:
                j = j0 + tx + s * SIDE
                if j < n and l0 + ty < k:
                    right[ty, tx + s * SIDE] = b[l0 + ty, j]
                else:
                    right[ty, tx + s * SIDE] = negative_zero
        _cuda.syncthreads()
        q = 0
        while q < SIDE:
            for r in range(EACH):
                column[r] = left[q, ty + r * SIDE]
            for c in range(EACH):
                row[c] = right[q, tx + c * SIDE]
            for r in range(EACH):
                for c in range(EACH):
                    sums[r, c] = _cuda.fma(column[r], row[c], sums[r, c])
            q += 1
        _cuda.syncthreads()
        l0 += SIDE
    for r in range(EACH):
        i = i0 + ty + r * SIDE
        for c in range(EACH):
            j = j0 + tx + c * SIDE
            if i < m and j < n:
                out[i, j] = sums[r, c]
                if symmetric and j0 < i0:
                    out[j, i] = sums[r, c]


def _scale(x: Any, factor: Any, out: Any, transposed: Any) -> None:
    """Write factor x to out, elementwise [m, n], with the product in float64; `transposed`: x is [n, m]."""
    n = out.shape[1]
    for p in range(_cuda.grid(1), out.size, _cuda.gridsize(1)):
        i, j = p // n, p % n
        value = x[j, i] if transposed else x[i, j]
        out[i, j] = np.float32(factor * np.float64(value))


def _combine(s: Any, x: Any, t: Any, y: Any, out: Any, negative_zero: Any) -> None:
    """Write s x + t y to out, elementwise [n], in float32: each product is rounded, and so is their sum."""
    for p in range(_cuda.grid(1), out.size, _cuda.gridsize(1)):
        out[p] = _cuda.fma(s, x[p], negative_zero) + _cuda.fma(t, y[p], negative_zero)


# --- what launches it -------------------------------------------------------------------------------------------------


def product(a: F32, b: F32) -> F32:
    """Return the product of a [m, k] and b [k, n] as `kernels.matmul` computes it. Raises what numba does."""
    with _lock:
        _load()
        out = _empty(a.shape[0], b.shape[1])
        _launch_multiply(_uploaded(a), _uploaded(b), out, False, False)
        return _downloaded(out)


def gram(x: F32) -> F32:
    """Return the product of x [m, n] and its transpose as `kernels.matmul` computes it. Raises what numba does."""
    with _lock:
        _load()
        there, out = _uploaded(x), _empty(x.shape[0], x.shape[0])
        _launch_multiply(there, there, out, True, True)
        return _downloaded(out)


def polar_factor(d: F32, factor: float, quintics: Sequence[tuple[float, float, float]]) -> F32:
    """Return the polar factor of d [m, n] as `isthmus.log.polar` computes it on the processor, as a new array.

    `factor` scales d before the first step. `quintics`: the coefficients of each step. d is copied to the GPU once and
    the result back once; all matrices between them stay there. Raises what numba does where the GPU fails.
    """
    tall = d.shape[0] > d.shape[1]
    m, n = sorted(d.shape)
    with _lock:
        _load()
        start, x = _uploaded(d), _empty(m, n)
        square, other = _empty(m, m), _empty(m, m)
        _launch_scale(start, factor, x, tall)
        result = start.reshape(m, n)  # The memory of d serves for the products.
        for a, b, c in quintics:
            _launch_multiply(x, x, square, True, True)
            _launch_multiply(square, square, other, False, True)
            _launch_combine(b, square, c, other, square)
            _launch_multiply(square, x, result, False, False)
            _launch_combine(a, x, 1.0, result, x)
        if tall:
            start = result.reshape(n, m)
            _launch_scale(x, 1.0, start, True)
            x = start
        return _downloaded(x)


def _uploaded(x: F32) -> Any:
    """Return an array of the GPU with the elements of x [m, n], contiguous."""
    # Upload it flat: a row of a larger matrix counts as contiguous, but keeps that matrix's strides.
    return _cuda.to_device(np.ascontiguousarray(x).reshape(-1)).reshape(*x.shape)


def _empty(m: int, n: int) -> Any:
    return _cuda.device_array((m, n), np.float32)


def _downloaded(x: Any) -> F32:
    """Wait for all launches and return an array of the GPU as an array of the host."""
    out = np.empty(tuple(x.shape), np.float32)
    x.copy_to_host(out)
    return out


def _launch_multiply(a: Any, b: Any, out: Any, transposed: bool, symmetric: bool) -> None:
    m, n = out.shape
    grid = (-(-n // TILE), -(-m // TILE))
    _launchable["_multiply"][grid, (SIDE, SIDE)](a, b, out, transposed, symmetric, _NEGATIVE_ZERO)


def _launch_scale(x: Any, factor: float, out: Any, transposed: bool) -> None:
    _launchable["_scale"][_blocks(out), _THREADS](x, float(factor), out, transposed)


def _launch_combine(s: float, x: Any, t: float, y: Any, out: Any) -> None:
    flat = [array.reshape(array.size) for array in (x, y, out)]
    _launchable["_combine"][_blocks(out), _THREADS](
        np.float32(s), flat[0], np.float32(t), flat[1], flat[2], _NEGATIVE_ZERO
    )


def _blocks(out: Any) -> int:
    return int(min(-(-out.size // _THREADS), _BLOCKS))

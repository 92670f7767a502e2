"""The polar factor of a matrix, with the same bits everywhere: the nearest matrix whose singular values are all one.

    X₀ = D / ‖D‖;  A = X Xᵀ;  X ← a X + (b A + c A²) X,  five times

Each step of this Newton–Schulz iteration applies an odd quintic to every singular value. Its coefficients bring values
as near to 1 as possible on the interval where they lie by then; the first interval is [0.003, 1] (Amsel et al., arXiv
2505.16932). After five steps, values that were at least 0.003 ‖D‖ are within 0.005 of one. Smaller values have grown
560-fold. Zeros stay zero: a direction that the mean does not have is not created.
"""

import logging

import numpy as np

from isthmus.codecs import kernels
from isthmus.codecs.kernels import F32, cuda
from isthmus.errors import InputError
from isthmus.format.isotropic import cut
from isthmus.runtime.clock import ALONE, ComputePool

logger = logging.getLogger(__name__)

QUINTICS = (
    (8.383673612923168, -24.765905857974545, 18.357081892887603),
    (4.043420433700428, -3.0114049938415337, 0.5695121503191825),
    (3.505570617243889, -2.6266538356180993, 0.5257194048203223),
    (2.490115939444251, -1.8342750827526684, 0.43683470689542475),
    (1.9177762487314496, -1.2967501911246433, 0.379704875398585),
)
"""The coefficients a, b, c of each step."""

_WITHIN = 0.999
"""Norm that a matrix is scaled to, a little below one: rounding must not push a singular value out of the interval of
the first quintic."""

_PROBE = (70, 131)
"""Shape of the matrix that `require_gpu` compares. It needs several blocks of the GPU's product, and parts of some."""

_warned: set[str] = set()
"""Names of the warnings that were logged: each is logged once."""


def isotropic(d: F32, block: int = 0, compute: ComputePool = ALONE) -> F32:
    """Return d [m, n] with all singular values made equal, as a new array of arbitrary length.

    This is the polar factor of d. If a side is longer than `block`, d is cut into blocks as even as possible, and each
    block becomes its own polar factor; 0: d is never cut. A block of zeros stays zero.
    """
    out = np.zeros_like(d)
    for rows in cut(d.shape[0], block):
        for columns in cut(d.shape[1], block):
            part = np.ascontiguousarray(d[rows, columns])
            norm = kernels.norm(part.reshape(-1))
            if norm > 0.0:
                out[rows, columns] = polar_factor(part, norm, compute)
    return out


def polar_factor(d: F32, norm: float, compute: ComputePool = ALONE) -> F32:
    """Return the polar factor of d [m, n] float32, whose Euclidean norm is `norm` (> 0), as a new array.

    The threads of `compute` share the rows of the products, or its GPU computes them, which changes no bit. Raises
    `DenormalsFlushed`.
    """
    if compute.gpu and (found := _on_gpu(d, norm)) is not None:
        return found
    wide = d.shape[0] <= d.shape[1]
    x = np.ascontiguousarray(d if wide else d.T)
    start = np.empty_like(x)
    kernels.scale(x, _WITHIN / norm, start)
    x, m = start, start.shape[0]
    gram, square = np.empty((m, m), np.float32), np.empty((m, m), np.float32)
    product = np.empty_like(x)
    for a, b, c in QUINTICS:
        _multiply(x, np.ascontiguousarray(x.T), gram, True, compute)
        _multiply(gram, gram, square, True, compute)
        kernels.combine(b, gram, c, square, gram)
        _multiply(gram, x, product, False, compute)
        kernels.combine(a, x, 1.0, product, x)
    return x if wide else np.ascontiguousarray(x.T)


def require_gpu() -> str:
    """Return the name of the GPU. Raises `InputError` unless it computes polar factors with the processor's bits."""
    name = cuda.require()
    d = np.random.default_rng(0).standard_normal(_PROBE, dtype=np.float32)
    d[::7] *= np.float32(1e-40)  # These rows are denormals, and so are those of the polar factor.
    d[1::7] *= np.float32(1e-22)  # Products of these rows are zeros of either sign.
    for probe in (d, np.ascontiguousarray(d.T)):
        norm = kernels.norm(probe.reshape(-1))
        try:
            found = cuda.polar_factor(probe, _WITHIN / norm, QUINTICS)
        except Exception as error:
            raise InputError(
                f"{name} cannot compute merges: {cuda.line(error)}: see whether this version of numba-cuda supports "
                "this GPU and its driver, or leave merges to the processor"
            ) from error
        if found.tobytes() != polar_factor(probe, norm).tobytes():
            raise InputError(
                f"{name} computes other bits than the processor, so its merges could not be replayed: leave merges to "
                "the processor"
            )
    return name


def _on_gpu(d: F32, norm: float) -> F32 | None:
    """Return the polar factor of d [m, n], computed on the GPU; None if the GPU failed, which is logged once."""
    try:
        return cuda.polar_factor(d, _WITHIN / norm, QUINTICS)
    except Exception as error:  # Its memory may be full, or the GPU may have failed: the processor has the same bits.
        logger.log(
            logging.DEBUG if "gpu" in _warned else logging.WARNING,
            "the GPU could not compute a matrix of %d × %d: %s; the processor computes it, with the same bits. Further "
            "failures are not logged", *d.shape, cuda.line(error),
        )  # fmt: skip
        _warned.add("gpu")
        return None


def _multiply(a: F32, b: F32, out: F32, symmetric: bool, compute: ComputePool) -> None:
    """Write the product a b to out. `symmetric`: the product is symmetric, so only half of it is computed."""

    def rows(start: int, stop: int) -> None:
        kernels.require_denormals()  # of the thread that this is
        kernels.matmul(a, b, out, start, stop, symmetric)

    compute.share(rows, out.shape[0])
    if symmetric:
        kernels.mirror(out)

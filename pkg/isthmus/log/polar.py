"""The polar factor of a matrix, with the same bits everywhere: the nearest matrix whose singular values are all one.

    X₀ = D / ‖D‖;  A = X Xᵀ;  X ← a X + (b A + c A²) X,  five times

Each step of this Newton–Schulz iteration applies an odd quintic to every singular value. Its coefficients bring values
as near to 1 as possible on the interval where they lie by then; the first interval is [0.003, 1] (Amsel et al., arXiv
2505.16932). After five steps, values that were at least 0.003 ‖D‖ are within 0.005 of one. Smaller values have grown
560-fold. Zeros stay zero: a direction that the mean does not have is not created.
"""

import numpy as np

from isthmus.codecs import kernels
from isthmus.codecs.kernels import F32
from isthmus.format.isotropic import cut
from isthmus.runtime.clock import ALONE, ComputePool

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

    The threads of `compute` share the rows of the products, which changes no bit. Raises `DenormalsFlushed`.
    """
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


def _multiply(a: F32, b: F32, out: F32, symmetric: bool, compute: ComputePool) -> None:
    """Write the product a b to out. `symmetric`: the product is symmetric, so only half of it is computed."""

    def rows(start: int, stop: int) -> None:
        kernels.require_denormals()  # of the thread that this is
        kernels.matmul(a, b, out, start, stop, symmetric)

    compute.share(rows, out.shape[0])
    if symmetric:
        kernels.mirror(out)

"""Matrices of numbers that arithmetic can get wrong, and their products on the processor."""

import numpy as np

from isthmus.codecs import kernels
from isthmus.codecs.kernels import F32
from isthmus.runtime.clock import ALONE, ComputePool

KINDS = ("normal", "denormal", "of all sizes", "zeros")


def values(kind: str, m: int, n: int) -> F32:
    """Return a matrix [m, n] of numbers of a kind, always the same."""
    draw = np.random.default_rng([m, n])
    x = draw.standard_normal((m, n), dtype=np.float32)
    if kind == "denormal":  # Products are denormals or underflow, to zeros of either sign.
        x *= np.float32(3e-23)
        x[:, draw.random(n) < 0.3] *= np.float32(100.0)
    elif kind == "of all sizes":
        x *= (10.0 ** draw.integers(-30, 18, (m, n))).astype(np.float32)
    elif kind == "zeros":
        x[draw.random((m, n)) < 0.7] = 0.0
        x[draw.random((m, n)) < 0.2] *= np.float32(-0.0)
    return x


def product(a: F32, b: F32, compute: ComputePool = ALONE) -> F32:
    """Return the product of two matrices as the processor computes it."""
    out = np.empty((a.shape[0], b.shape[1]), np.float32)
    compute.share(lambda start, stop: kernels.matmul(a, b, out, start, stop, False), len(out))
    return out

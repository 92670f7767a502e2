"""Run the kernels of `isthmus.codecs.kernels.cuda` in numba's simulator; print as JSON whether their bits are right.

    NUMBA_ENABLE_CUDASIM=1 python -m support.simulated_cuda [wrong]

With `wrong`, only kernels that are wrong on purpose are run, which takes a few seconds.

The simulator runs every thread of a kernel as Python code. It does not show what a compiler makes of the kernels. Its
`cuda.fma` computes a b + c with two roundings, so it is replaced by the exact `fma_alone`. The processor's kernels use
that if the processor has no such instruction. Tests in `tests/gpu` compare the real instruction. The simulator's
`cuda.shared.array` can give two threads of a block different arrays, if both ask at the same moment. So it is replaced,
too.
"""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numba.cuda.simulator import kernelapi

from isthmus.codecs import kernels
from isthmus.codecs.kernels import F32, cuda, matrices
from isthmus.log import polar
from support.matrices import KINDS, product, values

EDGES = ((1, 1, 1), (3, 1, 5), (1, 7, 9), (8, 4, 8), (9, 5, 7), (17, 3, 8), (7, 16, 25))
"""Rows, depth and columns of products: multiples of a tile of 8 by 8 with depth 2, and others."""

SHAPES = ((9, 1), (4, 19), (10, 9), (1, 1), (1, 9), (2, 2), (8, 8), (19, 3), (7, 13))
"""Shapes of matrices whose polar factor is computed. The first three are computed with numbers of every kind."""


def fused(_: object, a: Any, b: Any, c: Any) -> Any:
    """Return a b + c, rounded once."""
    return matrices.fma_alone(np.float32(a), np.float32(b), np.float32(c))


def shared_array(self: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Return the array that a block's threads share, one for each line of code that asks for it."""
    return self._allocations.setdefault(sys._getframe(1).f_lineno, np.empty(shape, dtype))


def products(kinds: Sequence[str] = KINDS) -> Iterator[tuple[str, F32, F32]]:
    """Yield the name of each product, and what the processor and the simulator compute."""
    for kind in kinds:
        for m, k, n in EDGES:
            a, b = values(kind, m, k), values(kind, k, n)
            yield f"product {m} {k} {n} {kind}", product(a, b), cuda.product(a, b)
            yield f"gram {m} {k} {kind}", product(a, np.ascontiguousarray(a.T)), cuda.gram(a)


def factors() -> Iterator[tuple[str, F32, F32]]:
    """Yield the name of each polar factor, and what the processor and the simulator compute. Its argument follows: it
    must not change."""
    for kind in KINDS:
        for m, n in SHAPES if kind == "normal" else SHAPES[:3]:
            d = values(kind, m, n)
            norm = kernels.norm(d.reshape(-1))
            if norm == 0.0:
                continue
            before = d.copy()
            found = cuda.polar_factor(d, polar._WITHIN / norm, polar.QUINTICS)
            yield f"polar factor {m} {n} {kind}", polar.polar_factor(d, norm), found
            yield f"argument {m} {n} {kind}", before, d


def compared(cases: Iterator[tuple[str, F32, F32]]) -> dict[str, bool]:
    """Return whether the bits are the same, by the name of the case."""
    return {name: wanted.tobytes() == found.tobytes() for name, wanted, found in cases}


def main() -> None:
    """Print which cases have the same bits, with correct kernels and with kernels that are wrong on purpose."""
    assert os.environ.get("NUMBA_ENABLE_CUDASIM") == "1", "otherwise a GPU would run the kernels"
    sys.setswitchinterval(1e-6)  # The simulator waits for its threads in a loop.
    kernels.warm()
    module: Any = kernelapi.FakeCUDAModule
    shared: Any = kernelapi.FakeCUDAShared
    shared.array = shared_array
    rounding_twice, module.fma = module.fma, fused
    right, found = sys.argv[1:] != ["wrong"], dict[str, dict[str, bool]]()
    a, b = values("normal", 3, 20), values("normal", 20, 5)
    if right:
        found["tiles as on a GPU"] = {"product 3 20 5": product(a, b).tobytes() == cuda.product(a, b).tobytes()}
    # The simulator runs smaller tiles of fewer threads faster.
    cuda.SIDE, cuda.EACH, cuda.TILE, cuda._SHARED = 2, 4, 8, (2, 9)
    cuda._THREADS, cuda._BLOCKS = 4, 2
    if right:
        found["products"] = compared(products())
        found["polar factors"] = compared(factors())
    cuda._NEGATIVE_ZERO = np.float32(0.0)
    found["zeros of the other sign"] = compared(products(("denormal",)))
    cuda._NEGATIVE_ZERO = np.float32(-0.0)
    module.fma = rounding_twice
    found["two roundings"] = compared(products(("normal",)))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()

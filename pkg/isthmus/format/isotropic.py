"""The cost of isotropic merges in operations, and the models for which it is low. Plain arithmetic, without kernels."""

from collections.abc import Iterable, Sequence

from isthmus.format.layout import Spec, TensorClass

STEPS = 5
"""Steps of the iteration, each of three matrix products. `isthmus.log.polar` has coefficients for as many."""

FLOP_MAX = 5200.0
"""Operations a parameter and round up to which isotropic merges are the default.

Merging eight updates by RDA takes as long as 1,500 to 1,800 operations on the machines of `speeds.toml`. An isotropic
merge takes 4,300 operations for a transformer 256 wide, 5,100 in blocks of 256, and twice that for a transformer 512
wide.
"""


SOUND_FLOP_S = 6e9
"""Operations a second of a core below which `FLOP_MAX` is lowered in proportion.

A core with FMA makes eight times as many even if it is busy; a core without FMA makes a quarter.
"""


def cut(length: int, block: int) -> list[slice]:
    """Return the parts that a side of a matrix is cut into, no longer than `block` and as even as possible.

    With block = 0 the side is one part.
    """
    parts = -(-length // block) if block else 1
    return [slice(length * i // parts, length * (i + 1) // parts) for i in range(parts)]


def flop(m: int, n: int, block: int = 0) -> float:
    """Return the floating-point operations of merging a matrix [m, n]: 5 (3 k² l + k³) per block of sides k ≤ l."""
    parts = len(cut(m, block)), len(cut(n, block))
    short, long = sorted((m / parts[0], n / parts[1]))
    return parts[0] * parts[1] * STEPS * (3.0 * short * short * long + short**3)


def is_cheap(shapes: Iterable[tuple[int, int]], block: int = 0, flop_s: float = SOUND_FLOP_S) -> bool:
    """Return whether there are matrices, and merging matrices of these shapes costs at most `FLOP_MAX` a parameter.

    `flop_s`: operations a second of a core of the machine that merges.
    """
    operations = parameters = 0.0
    for m, n in shapes:
        operations += flop(m, n, block)
        parameters += m * n
    return 0.0 < operations <= FLOP_MAX * parameters * min(1.0, flop_s / SOUND_FLOP_S)


def taken(specs: Iterable[Spec]) -> list[tuple[int, int]]:
    """Return the shapes of the tensors of a model that an isotropic merge treats as matrices."""
    return [(s.shape[0], s.shape[1]) for s in specs if s.is_matrix and s.role == TensorClass.DENSE]


def suits(specs: Sequence[Spec], block: int = 0, flop_s: float = SOUND_FLOP_S) -> bool:
    """Return whether isotropic merges are cheap for a model; see `is_cheap`."""
    return is_cheap(taken(specs), block, flop_s)

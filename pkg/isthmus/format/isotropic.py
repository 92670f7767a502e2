"""What isotropic merges cost in operations, and for which models that is little. Plain arithmetic, without kernels."""

from collections.abc import Iterable, Sequence

from isthmus.format.layout import Spec, TensorClass

STEPS = 5
"""Steps of the iteration, three matrix products each: as many as `isthmus.log.polar` has coefficients for."""

FLOP_MAX = 5200.0
"""Operations a parameter and round up to which isotropic merges are the default. Merging eight updates by RDA takes as
long as 1,500 to 1,800 of them on the machines of `speeds.toml`; a transformer 256 wide takes 4,300, blocks of 256
5,100, a transformer of 512 twice that."""


SOUND_FLOP_S = 6e9
"""Operations a second below which a machine is too slow for that default, in proportion: a core with FMA makes eight
times as many also where it is busy, one without it a quarter."""


def cut(length: int, block: int) -> list[slice]:
    """Return a side of a matrix cut into parts no longer than `block`, as even as can be; 0: never cut."""
    parts = -(-length // block) if block else 1
    return [slice(length * i // parts, length * (i + 1) // parts) for i in range(parts)]


def flop(m: int, n: int, block: int = 0) -> float:
    """Return the floating-point operations of merging a matrix: per block of sides k ≤ l, 5 (3 k² l + k³)."""
    parts = len(cut(m, block)), len(cut(n, block))
    short, long = sorted((m / parts[0], n / parts[1]))
    return parts[0] * parts[1] * STEPS * (3.0 * short * short * long + short**3)


def is_cheap(shapes: Iterable[tuple[int, int]], block: int = 0, flop_s: float = SOUND_FLOP_S) -> bool:
    """Return whether there are matrices, and merging those of these shapes costs at most `FLOP_MAX` a parameter.

    `flop_s`: how many operations a core makes in a second where merges are computed.
    """
    operations = parameters = 0.0
    for m, n in shapes:
        operations += flop(m, n, block)
        parameters += m * n
    return 0.0 < operations <= FLOP_MAX * parameters * min(1.0, flop_s / SOUND_FLOP_S)


def taken(specs: Iterable[Spec]) -> list[tuple[int, int]]:
    """Return the shapes of those tensors of a model that an isotropic merge takes for matrices."""
    return [(s.shape[0], s.shape[1]) for s in specs if s.is_matrix and s.role == TensorClass.DENSE]


def suits(specs: Sequence[Spec], block: int = 0, flop_s: float = SOUND_FLOP_S) -> bool:
    """Return whether isotropic merges are cheap for a model, on a machine that makes so many operations a second."""
    return is_cheap(taken(specs), block, flop_s)

"""Operations that isotropic merges cost: for the matrices of a given model, or of a typical model of its size."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from isthmus.format.isotropic import flop, is_cheap, taken
from isthmus.format.layout import Spec
from isthmus_lab.forecast import quality

ASPECT = 100.0
"""Width over depth of a typical transformer; losses hardly depend on it between 30 and 200 (Kaplan et al., 2020)."""

WIDTH_STEP = 64
"""Widths are multiples of this number."""


@dataclass(frozen=True, kw_only=True)
class Matrices:
    """The matrices of a model."""

    shapes: Sequence[tuple[int, int]]
    times: float = 1.0
    """How often the model has each of these matrices."""

    def flop(self, block: int = 0) -> float:
        """Return the floating-point operations of one isotropic merge of all matrices."""
        return self.times * _flop(tuple(self.shapes), block)

    def gain(self, block: int) -> float:
        """Return the share of the gain of whole isotropic merges that blocks leave: the mean over all matrices.

        The mean is weighted by parameters; see `quality.gained`.
        """
        return _gain(tuple(self.shapes), block)

    def cheap(self, block: int, flop_s: float) -> bool:
        """Return whether isotropic merges are the default for a model with these matrices.

        `flop_s`: operations a second of a core of the machine that merges.
        """
        return is_cheap(self.shapes, block, flop_s)


@lru_cache(maxsize=64)
def _flop(shapes: tuple[tuple[int, int], ...], block: int) -> float:
    return sum(flop(m, n, block) for m, n in shapes)


@lru_cache(maxsize=64)
def _gain(shapes: tuple[tuple[int, int], ...], block: int) -> float:
    size = [m * n for m, n in shapes]
    left = [quality.gained(-(-min(shape) // block) if block else 1) for shape in shapes]
    return sum(map(operator.mul, size, left)) / sum(size) if size else 1.0


def of(specs: Sequence[Spec]) -> Matrices:
    """Return the matrices among a model's tensors."""
    return Matrices(shapes=taken(specs))


def typical(params: float) -> Matrices:
    """Return the matrices of a transformer with this number of parameters: 12 d² a layer, d / 100 layers."""
    width = max(WIDTH_STEP, round((ASPECT * params / 12.0) ** (1.0 / 3.0) / WIDTH_STEP) * WIDTH_STEP)
    layer = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    return Matrices(shapes=layer, times=params / (12.0 * width * width))

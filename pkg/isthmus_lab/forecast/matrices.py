"""What isotropic merges cost in operations: the matrices of a model, as they are or as models of its size have them."""

from collections.abc import Sequence
from dataclasses import dataclass

from isthmus.format.isotropic import flop, is_cheap, taken
from isthmus.format.layout import Spec

ASPECT = 100.0
"""Width over depth of a usual transformer; losses hardly depend on it between 30 and 200 (Kaplan et al., 2020)."""

WIDTH_STEP = 64
"""Widths are multiples of it."""


@dataclass(frozen=True, kw_only=True)
class Matrices:
    """The matrices of a model."""

    shapes: Sequence[tuple[int, int]]
    times: float = 1.0
    """How often the model has all of these."""

    def flop(self, block: int = 0) -> float:
        """Return the floating-point operations of one isotropic merge of all of them."""
        return self.times * sum(flop(m, n, block) for m, n in self.shapes)

    def cheap(self, block: int, flop_s: float) -> bool:
        """Return whether isotropic merges are the default for such a model, at so many operations a second."""
        return is_cheap(self.shapes, block, flop_s)


def of(specs: Sequence[Spec]) -> Matrices:
    """Return the matrices among a model's tensors."""
    return Matrices(shapes=taken(specs))


def typical(params: float) -> Matrices:
    """Return those of a transformer of so many parameters: 12 d² a layer, d / 100 layers."""
    width = max(WIDTH_STEP, round((ASPECT * params / 12.0) ** (1.0 / 3.0) / WIDTH_STEP) * WIDTH_STEP)
    layer = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    return Matrices(shapes=layer, times=params / (12.0 * width * width))

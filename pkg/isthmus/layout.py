"""What a model is cut into: named tensors, packed whole into fragments of balanced size.

Largest tensor first, each into the lightest fragment so far (LPT): the heaviest fragment is at most 4/3 of the
optimum. The same list of tensors gives the same layout everywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod

from isthmus.errors import InputError

DTYPES = ("float32", "bfloat16", "float16")
"""Element types a merged parameter may have; all arithmetic on them is float32."""


class TensorClass(StrEnum):
    """Classes of tensors, each of which may be merged by a rule of its own."""

    DENSE = "dense"
    EMBEDDING = "embedding"
    VECTOR = "vector"
    """Never taken for a matrix, whatever its shape: what the run's creator names, and output layers not tied."""


@dataclass(frozen=True, slots=True)
class Spec:
    """One parameter of the model, as the run knows it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: TensorClass

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """Whether it maps vectors to vectors: two dimensions, neither of them 1."""
        return len(self.shape) == 2 and min(self.shape) > 1


@dataclass(frozen=True, slots=True)
class Tensor:
    """A parameter and its place in its fragment: elements [start, stop) of the fragment's flat vector."""

    spec: Spec
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Fragment:
    """Whole tensors that travel together as one flat float32 vector of `size` elements."""

    index: int
    tensors: tuple[Tensor, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.tensors[-1].stop


@dataclass(frozen=True, slots=True)
class Layout:
    """Every tensor of the run and the fragment it travels in."""

    specs: tuple[Spec, ...]
    placement: tuple[int, ...]
    """Fragment of each tensor of `specs`."""
    fragments: tuple[Fragment, ...]

    @property
    def size(self) -> int:
        """Number of elements of the whole model."""
        return sum(f.size for f in self.fragments)


def place(specs: Sequence[Spec], placement: Sequence[int]) -> Layout:
    """Return the layout of a given placement; tensors keep the order of `specs` within their fragment."""
    fragments = []
    for index in range(max(placement) + 1):
        tensors, at = [], 0
        for spec, home in zip(specs, placement, strict=True):
            if home == index:
                tensors.append(Tensor(spec, at, at + spec.size))
                at += spec.size
        fragments.append(Fragment(index, tuple(tensors)))
    return Layout(tuple(specs), tuple(placement), tuple(fragments))


def partition(specs: Sequence[Spec], fragments: int) -> Layout:
    """Pack whole tensors into at most `fragments` fragments (fewer where there are fewer tensors).

    Raises `InputError` for an empty model, an empty tensor, two tensors of one name or an unsupported dtype.
    """
    if not specs:
        raise InputError("the model has no trainable parameter: nothing to merge")
    seen: set[str] = set()
    for s in specs:
        if s.name in seen:
            raise InputError(f"two tensors are named {s.name!r}")
        if s.size == 0:
            raise InputError(f"tensor {s.name!r} has no elements (shape {s.shape})")
        if s.dtype not in DTYPES:
            raise InputError(f"tensor {s.name!r} is {s.dtype}: only {', '.join(DTYPES)} can be merged")
        seen.add(s.name)
    loads = [0] * min(fragments, len(specs))
    placement = [0] * len(specs)
    for i in sorted(range(len(specs)), key=lambda i: (-specs[i].size, specs[i].name)):
        lightest = min(range(len(loads)), key=lambda p: (loads[p], p))
        placement[i] = lightest
        loads[lightest] += specs[i].size
    return place(specs, placement)


def first_difference(ours: Sequence[Spec], run: Sequence[Spec]) -> str | None:
    """Name the first tensor in which two models differ, or return None.

    Which tensors are no matrices is the word of the run, and no difference.
    """
    for mine, theirs in zip(ours, run, strict=False):
        if mine.name != theirs.name:
            return f"tensor {mine.name!r} stands where the run has {theirs.name!r}"
        for what in ("shape", "dtype", "role"):
            a, b = getattr(mine, what), getattr(theirs, what)
            if a != b and not (what == "role" and {a, b} == {TensorClass.DENSE, TensorClass.VECTOR}):
                return f"tensor {mine.name!r} has {what} {a}, the run has {b}"
    if len(ours) > len(run):
        return f"tensor {ours[len(run)].name!r} is not in the run"
    if len(ours) < len(run):
        return f"tensor {run[len(ours)].name!r} of the run is missing"
    return None

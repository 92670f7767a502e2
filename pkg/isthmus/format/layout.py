"""The layout of a model: its named tensors, packed into fragments of balanced size.

A tensor that is larger than a fragment is cut along its first dimension. The largest piece goes first, each into the
lightest fragment so far (LPT), so the heaviest fragment is at most 4/3 of the optimum. The same list of tensors gives
the same layout on every machine.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from math import ceil, prod

from isthmus.errors import InputError

DTYPES = ("float32", "bfloat16", "float16")
"""Element types that a merged parameter may have. All arithmetic on them is float32."""


class TensorClass(StrEnum):
    """The classes of tensors. Each may be merged by a rule of its own."""

    DENSE = "dense"
    EMBEDDING = "embedding"
    VECTOR = "vector"
    """Never treated as a matrix, whatever its shape: a tensor named by the run's creator, or an untied output layer."""


@dataclass(frozen=True, slots=True)
class Spec:
    """One parameter of the model, as the run describes it."""

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
        """Whether the parameter maps vectors to vectors: it has two dimensions, neither of them 1."""
        return len(self.shape) == 2 and min(self.shape) > 1


Cut = tuple[int, int]
"""A fragment's index, and the number of rows of a tensor in it."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A parameter, or some rows of one, and its place in its fragment: elements [start, stop) of the flat vector."""

    spec: Spec
    """The whole parameter."""
    start: int
    stop: int
    rows: tuple[int, int] | None = None
    """The first row and the row after the last; None if the parameter is whole."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter, or of its rows in this fragment."""
        return self.spec.shape if self.rows is None else (self.rows[1] - self.rows[0], *self.spec.shape[1:])

    @property
    def name(self) -> str:
        """Name of the parameter, followed by the rows unless the parameter is whole."""
        return self.spec.name if self.rows is None else f"{self.spec.name}[{self.rows[0]}:{self.rows[1]}]"

    @property
    def origin(self) -> int:
        """Index of the first element in the flat parameter."""
        return 0 if self.rows is None else self.rows[0] * (self.spec.size // self.spec.shape[0])

    @property
    def is_matrix(self) -> bool:
        """Whether `shape` is that of a matrix: two dimensions, neither of them 1."""
        return len(self.shape) == 2 and min(self.shape) > 1

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Fragment:
    """Tensors, and parts of large ones, that are sent together as one flat float32 vector of `size` elements."""

    index: int
    tensors: tuple[Tensor, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.tensors[-1].stop


@dataclass(frozen=True, slots=True)
class Layout:
    """Every tensor of the run, and the fragments that they are sent in."""

    specs: tuple[Spec, ...]
    placement: tuple[tuple[Cut, ...], ...]
    """For each tensor of `specs`, the fragments of its rows, in the order of the rows."""
    fragments: tuple[Fragment, ...]

    @property
    def size(self) -> int:
        """Number of elements of the whole model."""
        return sum(f.size for f in self.fragments)


CUT_FROM = 1 << 17
"""Tensors of at most so many elements are never cut."""

PIECE_MIN = 1 << 14
"""Fewest elements in a piece, about."""

BALANCED = 1.05
"""Largest size of a fragment, as a multiple of the mean, that does not make `partition` cut tensors finer."""


def place(specs: Sequence[Spec], placement: Sequence[Sequence[Cut]]) -> Layout:
    """Return the layout of a given placement.

    Within a fragment tensors keep the order of `specs`, and pieces of a tensor the order of their rows. Raises
    `ValueError` if a tensor's rows do not add up, or if a fragment is empty.
    """
    tensors: dict[int, list[Tensor]] = {}
    ends: dict[int, int] = {}
    for spec, cuts in zip(specs, placement, strict=True):
        height = spec.shape[0] if spec.shape else 1
        if sum(rows for _, rows in cuts) != height:
            raise ValueError(f"tensor {spec.name!r} has {height} rows, its pieces {[rows for _, rows in cuts]}")
        first = 0
        for home, rows in cuts:
            start = ends.get(home, 0)
            ends[home] = start + spec.size // height * rows
            part = None if len(cuts) == 1 else (first, first + rows)
            tensors.setdefault(home, []).append(Tensor(spec, start, ends[home], part))
            first += rows
    if sorted(tensors) != list(range(len(tensors))):
        raise ValueError(f"there are fragments {sorted(tensors)}, and one between them is empty")
    fragments = tuple(Fragment(p, tuple(tensors[p])) for p in sorted(tensors))
    return Layout(tuple(specs), tuple(tuple(cuts) for cuts in placement), fragments)


def partition(specs: Sequence[Spec], fragments: int, *, finer: bool = True) -> Layout:
    """Pack tensors into at most `fragments` fragments (fewer if there are fewer pieces).

    A tensor that is larger than the mean fragment and has more than `CUT_FROM` elements is cut along its first
    dimension. With `finer` the largest size of a piece is halved until the fragments are balanced; tensors of up to
    `CUT_FROM` elements stay whole.

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
    limit = sum(s.size for s in specs) / fragments
    best: list[list[Cut]] = []
    lightest = 0.0
    while True:
        heaviest, mean, cuts = _packed(specs, max(limit, PIECE_MIN), fragments)
        if not best or heaviest / mean < lightest:
            best, lightest = cuts, heaviest / mean
        if not finer or heaviest <= BALANCED * mean or limit <= PIECE_MIN:
            return place(specs, best)
        limit /= 2.0


def _packed(specs: Sequence[Spec], limit: float, fragments: int) -> tuple[int, float, list[list[Cut]]]:
    """Return the size of the heaviest fragment, the mean size, and the fragments of each tensor's rows."""
    pieces = []
    for i, spec in enumerate(specs):
        height = spec.shape[0] if spec.shape else 1
        parts = min(height, ceil(spec.size / limit)) if spec.size > max(limit, CUT_FROM) else 1
        edges = [height * part // parts for part in range(parts + 1)]
        width = spec.size // height
        pieces += [(-(b - a) * width, spec.name, a, b - a, i) for a, b in pairwise(edges)]
    loads = [(0, p) for p in range(min(fragments, len(pieces)))]
    found: list[list[tuple[int, Cut]]] = [[] for _ in specs]
    for size, _, first, rows, i in sorted(pieces):
        load, home = heapq.heappop(loads)
        heapq.heappush(loads, (load - size, home))
        found[i].append((first, (home, rows)))
    cuts = [[cut for _, cut in sorted(of_one)] for of_one in found]
    return max(loads)[0], sum(load for load, _ in loads) / len(loads), cuts


def first_difference(ours: Sequence[Spec], run: Sequence[Spec]) -> str | None:
    """Return a description of the first difference between the tensors of two models, or None.

    The run decides whether a tensor is of class `DENSE` or `VECTOR`, so that is no difference.
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

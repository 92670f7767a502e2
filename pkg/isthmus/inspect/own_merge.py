"""A merge rule of one's own: a Python function that the lab trains with, and that replay folds a recorded log with.

    def merge(updates, weights, tensors):
        return weights @ updates

The function is called once for each round of a fragment of n parameters.

- `updates` [m, n] float32: the outer gradients of the round (base minus parameters), decoded and clipped as the syncer
  merges them, in the order of arrival. A learner whose late work is merged too has a row for each update.
- `weights` [m] float32: the share of each update in the round. They are above 0 and add up to 1.
- `tensors`: the fragment's tensors, `isthmus.format.layout.Tensor`. `start` and `stop` are a tensor's columns; `shape`,
  `name`, `is_matrix`, and the `role` of its `spec` (dense, embedding or vector) say what the tensor is.

It returns Δ [n] float32. The outer optimizer takes its step with Δ, as with that of a built-in rule. It is called
in place of all built-in rules, also in place of the mean of embeddings. It may change `updates`, which is a copy.

The same arguments must give the same bits, or no figure can be had again. So the function keeps nothing from one call
to the next, and seeds in each call the random numbers that it draws. The first round of each fragment with any number
of updates is merged twice, and the bits are compared.

A real run cannot use such a rule: every syncer must compute the same bits from the same log, at any later time.
"""

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from typing_extensions import override

from isthmus.codecs import kernels
from isthmus.codecs.kernels import F32
from isthmus.codecs.packed import Packed
from isthmus.errors import InputError, legible
from isthmus.format.layout import Fragment, Spec, Tensor, TensorClass, partition
from isthmus.format.records.objects import Outer
from isthmus.log.merge import Accumulator
from isthmus.runtime.clock import ALONE, ComputePool

Merge = Callable[[F32, F32, Sequence[Tensor]], F32]
"""The signature of the function; see the module."""

_SAMPLE = partition(
    [
        Spec("embedding", (64, 32), "float32", TensorClass.EMBEDDING),
        Spec("matrix", (48, 32), "float32", TensorClass.DENSE),
        Spec("vector", (48,), "float32", TensorClass.DENSE),
    ],
    1,
).fragments[0]
"""The fragment of the round that `require_sound` tries."""


@dataclass(frozen=True, slots=True)
class OwnMerge:
    """A function that merges the updates of a round, and its name for messages, such as `--merge my_rule:median`."""

    name: str
    function: Merge
    _compared: set[tuple[int, int]] = field(default_factory=set, repr=False, compare=False)
    """Fragments, and numbers of updates, of which a round was merged twice, and the bits were equal."""

    def require_sound(self) -> "OwnMerge":
        """Merge a round of three made-up updates and one of a single update; return self. Raises `InputError`.

        So a wrong signature, shape or element type is found before anything is trained or read.
        """
        draw = np.random.default_rng(0)
        updates = draw.standard_normal((3, _SAMPLE.size)).astype(np.float32)
        for count in (3, 1):
            self.merged(updates[:count].copy(), np.full(count, 1.0 / count, np.float32), _SAMPLE)
        self._compared.clear()
        return self

    def merged(self, updates: F32, weights: F32, fragment: Fragment) -> F32:
        """Return Δ [n] of a round of updates [m, n] with weights [m]. Raises `InputError` if the function fails.

        It fails if it raises, or returns anything but n finite float32 values, or if the first round of this fragment
        with as many updates gives other values when it is merged again.
        """
        if (fragment.index, len(updates)) in self._compared:
            return self._once(updates, weights, fragment)
        delta = self._once(updates.copy(), weights.copy(), fragment).copy()
        again = self._once(updates, weights, fragment)
        for t in fragment.tensors:
            differ = np.count_nonzero(delta[t.start : t.stop].view(np.int32) != again[t.start : t.stop].view(np.int32))
            if differ:
                raise InputError(
                    f"{self.name}: merging {len(updates)} updates [{len(updates)}, {fragment.size}] twice returned "
                    f"different bits for the same updates, first in tensor {t.name} ({differ} of {t.stop - t.start} "
                    "elements): draw random numbers from a generator that the function makes in each call, such as "
                    "numpy.random.default_rng(0), and keep nothing from one call to the next"
                )
        self._compared.add((fragment.index, len(updates)))
        return delta

    def _once(self, updates: F32, weights: F32, fragment: Fragment) -> F32:
        at = f"{self.name}: merging {len(updates)} updates [{len(updates)}, {fragment.size}]"
        try:
            found: Any = self.function(updates, weights, fragment.tensors)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[1:]  # the first entry is the call above
            line = f" at {where[-1].filename}:{where[-1].lineno}" if where else ""
            how = "" if where else "; define it as def merge(updates, weights, tensors)"
            raise InputError(f"{at} raised {type(error).__name__}{line}: {legible(str(error))}{how}") from error
        if not isinstance(found, np.ndarray):
            raise InputError(f"{at} returned {type(found).__name__}: return a numpy array [{fragment.size}] of float32")
        if found.shape != (fragment.size,):
            hint = "" if found.size != fragment.size else "; .reshape(-1) makes it flat"
            raise InputError(f"{at} returned an array of shape {list(found.shape)}: return [{fragment.size}]{hint}")
        if found.dtype != np.float32:
            raise InputError(f"{at} returned {found.dtype}: return float32, by .astype(np.float32)")
        delta = np.ascontiguousarray(found)
        for t in fragment.tensors:
            if not kernels.all_finite(delta[t.start : t.stop]):
                raise InputError(
                    f"{at} returned NaN or infinity in tensor {t.name}: do not divide by a length or a spread that "
                    "can be 0, and do not overflow float32"
                )
        return delta

    def accumulator(
        self, fragment: Fragment, outer: Mapping[str, Outer], compute: ComputePool = ALONE
    ) -> "OwnAccumulator":
        """Return the sum of a round that this function merges."""
        return OwnAccumulator(self, fragment, outer, compute)


class OwnAccumulator(Accumulator):
    """The updates of one round, all kept as float32, which a function of one's own merges."""

    def __init__(
        self, rule: OwnMerge, fragment: Fragment, outer: Mapping[str, Outer], compute: ComputePool = ALONE
    ) -> None:
        super().__init__(fragment, outer, compute)
        self._rule = rule
        self._rows: list[F32] = []
        self._weight_of: list[float] = []

    @override
    def add(self, x: Packed | F32, weight: float, scale: float = 1.0, *, learner: str = "") -> None:
        values = x.decode() if isinstance(x, Packed) else x
        self._rows.append(values if scale == 1.0 else values * np.float32(scale))
        self._weight_of.append(weight)
        self.count += 1

    @override
    def deltas(self) -> tuple[list[tuple[F32, float]], int]:
        weights = np.array(self._weight_of)
        delta = self._rule.merged(np.stack(self._rows), (weights / weights.sum()).astype(np.float32), self.fragment)
        return [(delta[t.start : t.stop], 1.0) for t in self.fragment.tensors], 0

"""Measure how similar the merged differences of successive versions are, by a fold of the log.

Outer momentum is useful only as far as past differences predict the next one. With the momentum b and its factor μ:

    Δ_t = b_t − μ b_{t−1};   ρ = cos(Δ_t, Δ_{t−1})
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from isthmus.codecs.kernels import F32
from isthmus.log import Log, fold
from isthmus.log.listing import earliest


@dataclass(frozen=True, slots=True)
class MergedDifference:
    """The merged difference of one commit."""

    version: int
    length: float
    """‖Δ‖, in units of the parameters."""
    cosine: float | None
    """Its cosine with the difference before it; None if that is not known, or one of the two is zero."""


async def differences(log: Log, fragment: int) -> Sequence[MergedDifference]:
    """Return the merged differences of a fragment, from the earliest version that its log can be folded from.

    Raises `LogCorrupt`.
    """
    merging = fold.Merging(log)
    at = await fold.begin(log, fragment, merging, at_most=await earliest(log, fragment))
    found: list[MergedDifference] = []
    before, last = at.carried.momentum, None
    async for further in fold.onward(log, fragment, merging, at):
        header = further.last[-1].header
        delta = further.carried.momentum - np.float32(header.dense.momentum) * before
        if header.healed is None:
            found.append(MergedDifference(header.version, float(np.linalg.norm(delta)), _cosine(delta, last)))
        before, last = further.carried.momentum, None if header.healed else delta
    return found


def _cosine(a: F32, b: F32 | None) -> float | None:
    if b is None:
        return None
    lengths = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    return float(np.dot(a, b)) / lengths if lengths > 0.0 else None

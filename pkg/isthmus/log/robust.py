"""Robust merges: less than half of the learners in a round cannot choose the direction. RDA with robust means.

    Trimmed = median‖v‖ · φ( trimmed mean of φ(v), by coordinate )          Yin et al. 2018, arXiv 1803.01498
    Median  = median‖v‖ · φ( geometric median of φ(v) )                     Pillutla et al. 2019, arXiv 1912.13445

φ(x) = x/‖x‖. Unit vectors are merged, because a long update would otherwise count by its length. The result is as long
as the median update, because a single learner can move a mean of lengths anywhere. Each learner has one vote. If a
learner has several updates in the round, one on each base, v is their weighted mean. Weights rest on what learners
state about themselves, so no learner's weight counts for more than the round's median weight. The bounds alone allow
twice the median, with which three of eight learners could be the majority. With one learner the result is its update;
with two it is their RDA except for the length.

The geometric median is a weighted sum of the votes. A fixed number of smoothed Weiszfeld steps finds its weights, which
depend only on the votes' inner products: their Gram matrix.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from isthmus.codecs import kernels
from isthmus.codecs.base import PIECE, SHARE, pieces
from isthmus.codecs.kernels import F32, F64
from isthmus.codecs.packed import Packed, length_of
from isthmus.runtime.clock import ComputePool

WEISZFELD_STEPS = 32
SMOOTHING = 1e-3
"""Smaller distances between unit vectors count as this: if the median is one of the vectors, its distance is zero."""

CANCELLED_BELOW = 1e-3
"""As with RDA: a direction shorter than this is noise, and is not normalised."""


class KeptUpdate(NamedTuple):
    """An update of the round."""

    x: Packed
    weight: float
    scale: float
    learner: str


class Vote(NamedTuple):
    """One learner's contribution to the round, for one tensor."""

    of: tuple[tuple[Packed, float], ...]
    """Its updates, with a factor for each: the sum of the products is the learner's vector."""
    weight: float
    length: float
    """Euclidean length of its vector, after clipping."""
    factor: float
    """Factor from its vector to its direction; 0 for a zero vector, which is a vote too and counts as zeros."""


def merged(
    kept: Sequence[KeptUpdate], tensor: int, total: F32, trim: float | None, compute: ComputePool
) -> tuple[float, bool]:
    """Write a tensor's merged direction to total [n]; return the factor to it, and whether the directions cancelled.

    `trim`: the share of values left out at either end of each coordinate; None: use the geometric median instead.
    """
    cast = [_vote(own, tensor, total.size, compute) for own in _by_learner(kept)]
    weights = votes([vote.weight for vote in cast])
    magnitude = weighted_median([vote.length for vote in cast], weights)
    if trim is None:
        shares = geometric_median(_gram(cast, tensor, total.size, compute), weights)
        total[:] = 0.0
        for vote, share in zip(cast, shares, strict=True):
            for x, times in vote.of:
                if share * vote.factor * times:
                    x.add(tensor, share * vote.factor * times, total, compute)
    else:
        _trimmed(cast, tensor, total, left_out(trim, len(cast)), np.array(weights), compute)
    length = length_of(total, compute)
    if length >= CANCELLED_BELOW:
        return magnitude / length, False
    return magnitude, magnitude > 0.0


def _by_learner(kept: Sequence[KeptUpdate]) -> list[list[KeptUpdate]]:
    """Return each learner's updates, in the order in which the learners first appear."""
    found: dict[str, list[KeptUpdate]] = {}
    for k in kept:
        found.setdefault(k.learner, []).append(k)
    return list(found.values())


def _vote(own: Sequence[KeptUpdate], tensor: int, n: int, compute: ComputePool) -> Vote:
    if len(own) == 1:
        (k,) = own
        norm = k.x.norms[tensor]
        return Vote(((k.x, 1.0),), k.weight, k.scale * norm, 1.0 / norm if norm > 0.0 else 0.0)
    weight = math.fsum(k.weight for k in own)
    whole = Vote(tuple((k.x, k.weight / weight * k.scale) for k in own), weight, 0.0, 1.0)
    norm = math.sqrt(float(_gram([whole], tensor, n, compute)[0, 0]))
    return whole._replace(length=norm, factor=1.0 / norm if norm > 0.0 else 0.0)


def votes(weights: Sequence[float]) -> list[float]:
    """Return the weights, each capped at their median; for an even number, at the lower of the middle two.

    A learner that states false numbers about itself can thus lose influence, but hardly gain any. Where honest learners
    have equal weights, their number decides.
    """
    middle = sorted(weights)[(len(weights) - 1) // 2]
    return [min(weight, middle) for weight in weights]


def left_out(trim: float, count: int) -> int:
    """Return how many of `count` values are left out at either end: at least one of three or more, and never all."""
    return min(max(int(trim * count), 1 if count >= 3 else 0), (count - 1) // 2)


def weighted_median(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the weighted median; if exactly half of the weight is on either side, halfway between the two values."""
    ordered = sorted(zip(values, weights, strict=True))
    half, below = 0.5 * math.fsum(weights), 0.0
    for number, (value, weight) in enumerate(ordered):
        below += weight
        if below > half:
            return value
        if below == half and number + 1 < len(ordered):
            return 0.5 * (value + ordered[number + 1][0])
    return ordered[-1][0]


def geometric_median(gram: F64, weights: Sequence[float]) -> list[float]:
    """Return the shares [m] of vectors in their geometric median; they add up to one. `gram` [m, m]: inner products.

    Uses plain float arithmetic in the order of the vectors, so that the bits are the same everywhere.
    """
    count = len(weights)
    g = [[float(value) for value in row] for row in gram]
    total = math.fsum(weights)
    shares = [w / total for w in weights]
    for _ in range(WEISZFELD_STEPS):
        across = [math.fsum(shares[j] * g[i][j] for j in range(count)) for i in range(count)]
        own = math.fsum(shares[i] * across[i] for i in range(count))
        pulls = [
            weights[i] / max(math.sqrt(max(0.0, own - 2.0 * across[i] + g[i][i])), SMOOTHING) for i in range(count)
        ]
        total = math.fsum(pulls)
        shares = [pull / total for pull in pulls]
    return shares


def _gram(cast: Sequence[Vote], tensor: int, n: int, compute: ComputePool) -> F64:
    """Return the inner products [m, m] of the votes' directions, summed over fixed blocks in order."""
    m, blocks = len(cast), -(-n // kernels.NORM_BLOCK)
    sums = np.zeros((m, m, blocks))

    def work(first: int, last: int) -> None:
        part = np.empty((m, min(n, PIECE)), np.float32)
        for number in range(first, last):
            at = slice(number * PIECE, min(n, (number + 1) * PIECE))
            size = at.stop - at.start
            _decode(cast, tensor, n, at, part)
            of = slice(at.start // kernels.NORM_BLOCK, -(-at.stop // kernels.NORM_BLOCK))
            for i in range(m):
                for j in range(i + 1):
                    kernels.products(part[i, :size], part[j, :size], sums[i, j, of])

    compute.share(work, pieces(n), SHARE)
    out = np.zeros((m, m))
    for i in range(m):
        for j in range(i + 1):
            out[i, j] = out[j, i] = cast[i].factor * cast[j].factor * math.fsum(sums[i, j])
    return out


def _trimmed(cast: Sequence[Vote], tensor: int, total: F32, trim: int, weights: F64, compute: ComputePool) -> None:
    n, factors = total.size, np.array([vote.factor for vote in cast])

    def work(first: int, last: int) -> None:
        part = np.empty((len(cast), min(n, PIECE)), np.float32)
        for number in range(first, last):
            at = slice(number * PIECE, min(n, (number + 1) * PIECE))
            _decode(cast, tensor, n, at, part)
            kernels.trimmed_mean(part[:, : at.stop - at.start], weights, factors, trim, total[at])

    compute.share(work, pieces(n), SHARE)


def _decode(cast: Sequence[Vote], tensor: int, n: int, at: slice, part: F32) -> None:
    """Write elements `at` of every vote's vector to part [m, …]."""
    for row, vote in zip(part, cast, strict=True):
        own = row[: at.stop - at.start]
        if len(vote.of) == 1:
            ((x, _),) = vote.of
            x.code.decode_part(x.data[tensor], n, at.start, own)
            continue
        own[:] = 0.0
        for x, times in vote.of:
            x.code.add_part(x.data[tensor], n, at.start, times, own)

"""Merges whose direction less than half of a round cannot choose: RDA with each of its means made robust.

    Trimmed = median‖v‖ · φ( trimmed mean of φ(v), by coordinate )          Yin et al. 2018, arXiv 1803.01498
    Median  = median‖v‖ · φ( geometric median of φ(v) )                     Pillutla et al. 2019, arXiv 1912.13445

φ(x) = x/‖x‖. Of unit vectors, since a long one would count by its length otherwise; as long as the median update, since
a mean of lengths is anybody's. Weights are what learners say of themselves: here no update counts for more than the
median of the round. What bounds let pass, twice the median, would make three of eight the larger part. With one update
it is that one, with two their RDA but for the length.

The geometric median is found by smoothed steps of Weiszfeld's, a fixed number of them, on the Gram matrix of the
updates: it is a weighted sum of them, and its weights need their inner products alone.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from isthmus import kernels
from isthmus.codecs.base import PIECE, SHARE, pieces
from isthmus.codecs.packed import Packed
from isthmus.kernels import F32, F64
from isthmus.runtime import Crew

WEISZFELD_STEPS = 32
SMOOTHING = 1e-3
"""Distances below this, of unit vectors, count as this: where the median is one of them, its distance is nothing."""

CANCELLED_BELOW = 1e-3
"""As with RDA: a direction shorter than this is noise, and is not made longer."""


class Kept(NamedTuple):
    """An update of the round."""

    x: Packed
    weight: float
    scale: float


def merged(kept: Sequence[Kept], tensor: int, total: F32, trim: float | None, crew: Crew) -> tuple[float, bool]:
    """Write the direction of a tensor's updates to total [n]; return the factor to it, and whether they cancelled.

    `trim`: the share that is left out at either end of each coordinate; None: by the geometric median.
    """
    lengths = [k.scale * k.x.norms[tensor] for k in kept]
    weights = votes([k.weight for k in kept])
    magnitude = weighted_median(lengths, weights)
    # A zero has no direction: it is an update all the same, and counts as one in the middle.
    factors = np.array([1.0 / k.x.norms[tensor] if k.x.norms[tensor] > 0.0 else 0.0 for k in kept])
    if trim is None:
        shares = geometric_median(_gram(kept, tensor, total.size, factors, crew), weights)
        total[:] = 0.0
        for k, share, factor in zip(kept, shares, factors, strict=True):
            if share * factor:
                k.x.add(tensor, share * factor, total, crew)
    else:
        _trimmed(kept, tensor, total, left_out(trim, len(kept)), np.array(weights), factors, crew)
    length = _norm(total, crew)
    if length >= CANCELLED_BELOW:
        return magnitude / length, False
    return magnitude, magnitude > 0.0


def votes(weights: Sequence[float]) -> list[float]:
    """Return weights of which none is above their median, of an even number the lower of the middle two.

    By what one says of oneself influence can be lost, but hardly won. Where honest learners weigh alike, heads decide.
    """
    middle = sorted(weights)[(len(weights) - 1) // 2]
    return [min(weight, middle) for weight in weights]


def left_out(trim: float, count: int) -> int:
    """Return how many of so many values are left out at either end: one at least of three, and never all."""
    return min(max(int(trim * count), 1 if count >= 3 else 0), (count - 1) // 2)


def weighted_median(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the value in the middle of the weight; halfway between two where exactly half of it is on either side."""
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
    """Return the shares [m] of vectors whose inner products are `gram` [m, m] in their geometric median; they add up to
    one. In plain float arithmetic, in the order of the vectors: the same bits everywhere."""
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


def _gram(kept: Sequence[Kept], tensor: int, n: int, factors: F64, crew: Crew) -> F64:
    """Return the inner products [m, m] of the updates' directions, summed over fixed blocks in their order."""
    m, blocks = len(kept), -(-n // kernels.NORM_BLOCK)
    sums = np.zeros((m, m, blocks))

    def work(first: int, last: int) -> None:
        part = np.empty((m, min(n, PIECE)), np.float32)
        for number in range(first, last):
            at = slice(number * PIECE, min(n, (number + 1) * PIECE))
            size = at.stop - at.start
            _decode(kept, tensor, n, at, part)
            of = slice(at.start // kernels.NORM_BLOCK, -(-at.stop // kernels.NORM_BLOCK))
            for i in range(m):
                for j in range(i + 1):
                    kernels.products(part[i, :size], part[j, :size], sums[i, j, of])

    crew.share(work, pieces(n), SHARE)
    out = np.zeros((m, m))
    for i in range(m):
        for j in range(i + 1):
            out[i, j] = out[j, i] = factors[i] * factors[j] * math.fsum(sums[i, j])
    return out


def _trimmed(kept: Sequence[Kept], tensor: int, total: F32, trim: int, weights: F64, factors: F64, crew: Crew) -> None:
    n = total.size

    def work(first: int, last: int) -> None:
        part = np.empty((len(kept), min(n, PIECE)), np.float32)
        for number in range(first, last):
            at = slice(number * PIECE, min(n, (number + 1) * PIECE))
            _decode(kept, tensor, n, at, part)
            kernels.trimmed_mean(part[:, : at.stop - at.start], weights, factors, trim, total[at])

    crew.share(work, pieces(n), SHARE)


def _decode(kept: Sequence[Kept], tensor: int, n: int, at: slice, part: F32) -> None:
    """Write elements `at` of every update's tensor to part [m, …]."""
    for row, k in zip(part, kept, strict=True):
        k.x.code.decode_part(k.x.data[tensor], n, at.start, row[: at.stop - at.start])


def _norm(x: F32, crew: Crew) -> float:
    squares = np.empty(-(-x.size // kernels.NORM_BLOCK), np.float64)
    of = kernels.NORM_BLOCK
    crew.share(lambda a, b: kernels.squares(x[a * of : b * of], squares[a:b]), squares.size, SHARE * PIECE // of)
    return kernels.norm_of(squares)

"""Training losses over the life of a run, as the inputs of its commits state them, and whether they rise.

A learner's newest merged loss is that of its merged update that was captured last, of those that state a loss; of
several captured at once, the largest. This is the largest of its points. An update committed last may be an older one.
"""

import asyncio
import itertools
import statistics
from bisect import insort
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from isthmus.errors import LogCorrupt
from isthmus.log import Commit, Log

SAMPLES = 16
"""Commits of the first fragment, evenly spaced, from which a curve is sampled where the whole log is not read."""

AT_ONCE = 8

POINTS_MAX = 512
"""Points of a curve that are kept. When there are more, every other one of the older half is dropped."""

SPANS = 32
"""Equal spans of a curve's time, over which means are taken before they are compared."""

NEWEST = 4
"""Newest of these means that must all be high before a loss counts as rising."""

BEFORE_LEAST = 8
"""Fewest means before the newest ones."""

RISEN = 0.2
"""Share of what a learner's loss fell by in all, by which it must have risen again."""

LEAST = 0.02
"""Share of its lowest loss that a rise must exceed, whatever the loss fell by."""

YOUNG_S, YOUNG_LEAST = 600.0, 0.2
"""In place of `LEAST`, for a curve that covers less than this many seconds: in a run's first minutes a loss may go up a
little and down again."""

ENDED = 1 / 8
"""A loss counts for as long as its newest point is younger than this share of the time that all curves cover."""

SPREADS = 3.0
"""Multiple of the median difference between neighbouring means that a rise must exceed."""


WORSE = 1.5
"""A loss that stays above so many times that of the first updates has diverged."""

NOT_FALLEN = 0.8
"""A loss that stays above this share of that of the first updates has not fallen."""


class Point(NamedTuple):
    """The loss of one merged update. Points are ordered by time, then by loss."""

    at: float
    """When the update was captured [seconds since 1970]."""
    loss: float


class LossCurves:
    """The loss curves of learners, from the commits in which their updates were merged."""

    def __init__(self) -> None:
        self._points: dict[str, list[Point]] = {}

    def take(self, commits: Iterable[Commit]) -> None:
        """Add the losses of the commits' inputs, in any order."""
        for commit in commits:
            for given in commit.header.inputs:
                if given.loss is not None:
                    points = self._points.setdefault(given.learner, [])
                    insort(points, Point(given.taken_at, given.loss))
                    if len(points) > POINTS_MAX:
                        del points[1 : POINTS_MAX // 2 : 2]

    def points(self) -> Mapping[str, Sequence[Point]]:
        """Return the points of each learner, in order of time."""
        return {name: tuple(points) for name, points in sorted(self._points.items())}


async def sampled(log: Log, known: Collection[Commit]) -> LossCurves:
    """Return curves from commits that were read already, and a sample of the first fragment's. Raises `Unavailable`.

    `known`: the newest commit of each fragment, and others.
    """
    curves, slots = LossCurves(), asyncio.Semaphore(AT_ONCE)
    curves.take(known)
    read = {commit.version for commit in known if commit.header.fragment == 0}

    async def one(version: int) -> list[Commit]:
        try:
            async with slots:
                found = await log.commit(0, version)
        except LogCorrupt:
            return []  # what looks at the log's condition says so
        return [found] if found else []

    spaced = {1 + k * (max(read) - 1) // SAMPLES for k in range(SAMPLES)} if read else set[int]()
    for commits in await asyncio.gather(*(one(version) for version in sorted(spaced - read))):
        curves.take(commits)
    return curves


def rise(points: Sequence[Point]) -> tuple[float, float] | None:
    """Return a rising loss as its lowest level before and its lowest newest mean; None if it does not rise.

    Points near each other state the same steps, so means are taken over `SPANS` equal spans of time. A level is the
    median of `NEWEST` means in a row. The loss rises if the `NEWEST` last means all lie above the lowest level before:
    by more than `RISEN` of the way that it came down from its first means, by more than `LEAST` (`YOUNG_LEAST` for a
    curve under `YOUNG_S` long), and by more than `SPREADS` times the median difference between neighbouring means. It
    rises, too, if they lie above `WORSE` times the first losses: a run that diverged at once has no low level.
    """
    means = _means(points)
    before, newest = means[:-NEWEST], means[-NEWEST:]
    if len(before) < BEFORE_LEAST:
        return None
    first = min(point.loss for point in points[:NEWEST])
    if first > 0.0 and min(newest) > WORSE * first:
        return first, min(newest)
    lowest = min(statistics.median(before[k : k + NEWEST]) for k in range(len(before) - NEWEST + 1))
    scatter = statistics.median(abs(b - a) for a, b in itertools.pairwise(means))
    fell = statistics.median(before[:3]) - lowest
    now, least = min(newest), LEAST if points[-1].at - points[0].at >= YOUNG_S else YOUNG_LEAST
    return (lowest, now) if now - lowest > max(RISEN * fell, least * abs(lowest), SPREADS * scatter) else None


def not_fallen(points: Sequence[Point]) -> tuple[float, float] | None:
    """Return a loss that has not fallen as the lowest of its first ones and its lowest newest mean; None if it has.

    None, too, for a curve that is too short to say.
    """
    means = _means(points)
    if len(means) < BEFORE_LEAST + NEWEST:
        return None
    first, now = min(point.loss for point in points[:NEWEST]), min(means[-NEWEST:])
    return (first, now) if now > NOT_FALLEN * first else None


def _means(points: Sequence[Point]) -> list[float]:
    """Return the mean loss of each span of time that has points; `points` are in order of time."""
    if not points:
        return []
    first, whole = points[0].at, max(points[-1].at - points[0].at, 1e-9)
    spans = itertools.groupby(points, lambda point: min(SPANS - 1, int((point.at - first) / whole * SPANS)))
    return [statistics.fmean(point.loss for point in group) for _, group in spans]


def rising(curves: Mapping[str, Sequence[Point]]) -> dict[str, tuple[float, float]]:
    """Return the learners whose losses rise, each with the two levels of `rise`. `curves`: by learner, none empty."""
    times = [point.at for points in curves.values() for point in points]
    since = max(times) - ENDED * (max(times) - min(times)) if times else 0.0
    levels = {name: rise(points) for name, points in curves.items() if points[-1].at >= since}
    return {name: level for name, level in levels.items() if level is not None}

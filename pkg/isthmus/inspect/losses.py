"""Training losses over the life of a run, as the inputs of its commits state them, and whether they rise."""

import asyncio
import statistics
from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from isthmus.errors import LogCorrupt
from isthmus.log import Commit, Log

SAMPLES = 16
"""Commits of the first fragment, evenly spaced, from which a curve is sampled where the whole log is not read."""

AT_ONCE = 8

POINTS_MAX = 512
"""Points of a curve that are kept. When there are more, every other one of the older half is dropped."""

NEWEST = 8
"""Newest points of a curve that must all be high before a loss counts as rising, and least number of points before."""

RISEN = 0.2
"""Share of what a learner's loss fell by in all, by which it must have risen again."""

LEAST = 0.02
"""Share of its lowest loss that a rise must exceed, whatever the loss fell by."""

ENDED = 1 / 8
"""A loss counts for as long as its newest point is younger than this share of the time that all curves cover."""

SPREADS = 4.0
"""Multiple of the newest points' median distance from their median that a rise must exceed."""


class Point(NamedTuple):
    """The loss of one merged update."""

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


async def sampled(log: Log, heads: Sequence[Commit | None]) -> LossCurves:
    """Return curves from the newest commits of all fragments, and a sample of the first fragment's. Raises
    `Unavailable`."""
    curves, slots = LossCurves(), asyncio.Semaphore(AT_ONCE)
    curves.take(filter(None, heads))
    head = heads[0].version if heads and heads[0] else 0

    async def one(version: int) -> list[Commit]:
        try:
            async with slots:
                found = await log.commit(0, version)
        except LogCorrupt:
            return []  # what looks at the log's condition says so
        return [found] if found else []

    spaced = {1 + k * (head - 1) // SAMPLES for k in range(SAMPLES)}
    chosen = {*spaced, *range(max(1, head - NEWEST + 1), head)} - {head} if head else set[int]()
    for commits in await asyncio.gather(*(one(version) for version in sorted(chosen))):
        curves.take(commits)
    return curves


def rise(points: Sequence[Point]) -> tuple[float, float] | None:
    """Return a rising loss as its lowest level before and the lowest of the `NEWEST` points; None if it does not rise.

    A level is the median of some points in a row: of a quarter of them, at least three and at most `NEWEST`. The loss
    rises if all newest points lie clearly above the lowest level before: by more than `RISEN` of the way that it came
    down from its first points, by more than the newest points scatter, and by more than `LEAST`.
    """
    before, newest = [p.loss for p in points[:-NEWEST]], [p.loss for p in points[-NEWEST:]]
    if len(before) < NEWEST:
        return None
    row = max(3, min(NEWEST, len(before) // 4))
    lowest = min(statistics.median(before[k : k + row]) for k in range(len(before) - row + 1))
    now, middle = min(newest), statistics.median(newest)
    spread = statistics.median(abs(loss - middle) for loss in newest)
    fell = statistics.median(before[:3]) - lowest
    return (lowest, now) if now - lowest > max(RISEN * fell, LEAST * abs(lowest), SPREADS * spread) else None


def rising(curves: Mapping[str, Sequence[Point]]) -> dict[str, tuple[float, float]]:
    """Return the learners whose losses rise, each with the two levels of `rise`. `curves`: by learner, none empty."""
    times = [point.at for points in curves.values() for point in points]
    since = max(times) - ENDED * (max(times) - min(times)) if times else 0.0
    levels = {name: rise(points) for name, points in curves.items() if points[-1].at >= since}
    return {name: level for name, level in levels.items() if level is not None}

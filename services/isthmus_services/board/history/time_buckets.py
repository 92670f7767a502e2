"""Sums, or last values, in time buckets of equal width, from which a view of any stretch of time is drawn.

There are at most `MOMENTS` buckets, however long a run lives. When time passes the end of the last one, each two
buckets become one and the width doubles.
"""

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

MOMENTS = 2048
CELLS_MAX = MOMENTS * 256
"""Largest number of buckets times things, so that memory does not grow with both. `FEWEST` buckets always stay."""

FEWEST = 128

SHORTEST_S = 0.25
"""Width of the buckets of a run that has just begun [seconds]."""


class Kept(StrEnum):
    """What a bucket keeps of several values of one thing."""

    SUM = "sum"
    LAST = "last"  # NaN if there was none
    NEWEST = "newest"  # the whole row of the largest first field, if alike the largest second, …; NaN if there was none


class TimeBuckets:
    """Values [buckets, things, fields] (float64) of a growing number of things, from a start time on."""

    def __init__(self, began: float, fields: Sequence[str], kept: Kept) -> None:
        """`began`: seconds since 1970; earlier values belong to the first bucket."""
        self.began = began
        self.width = SHORTEST_S
        self.fields = tuple(fields)
        self.kept = kept
        self.most = MOMENTS
        """Number of buckets."""
        self.touched = False
        """Whether anything was recorded."""
        self._empty = 0.0 if kept == Kept.SUM else math.nan
        self.values: NDArray[np.float64] = np.full((MOMENTS, 0, len(self.fields)), self._empty)

    @property
    def things(self) -> int:
        """Number of things that there is room for."""
        return int(self.values.shape[1])

    def room(self, things: int) -> None:
        """Make room for this many things. This may reduce the number of buckets."""
        if things > self.things:
            more = max(things, 2 * self.things) - self.things
            while self.most > FEWEST and self.most * (self.things + more) > CELLS_MAX:
                self._double()
                self.most //= 2
                self.values = self.values[: self.most].copy()
            self.values = np.concatenate(
                [self.values, np.full((self.most, more, len(self.fields)), self._empty)], axis=1
            )

    def place(self, at: float) -> int:
        """Return the index of the bucket of a time. If there is none yet, double the width of the buckets first."""
        number = max(0, math.floor((at - self.began) / self.width))
        while number >= self.most:
            self._double()
            number = max(0, math.floor((at - self.began) / self.width))
        return number

    def at(self, at: float) -> NDArray[np.float64]:
        """Return the values [things, fields] of the bucket of a time.

        Write to them at once: later calls may replace `values`.
        """
        self.touched = True
        place = self.place(at)  # may replace `self.values`
        found: NDArray[np.float64] = self.values[place]
        return found

    def add(self, at: float, things: Sequence[int], values: NDArray[np.float64]) -> None:
        """Record values [n, fields] of n things; the same thing may be among them twice."""
        here = self.at(at)
        if self.kept == Kept.SUM:
            np.add.at(here, np.asarray(things, np.intp), values)
        elif self.kept == Kept.LAST:
            for thing, row in zip(things, values, strict=True):
                np.copyto(here[thing], row, where=~np.isnan(row))
        else:
            for thing, row in zip(things, values, strict=True):
                if _newer(row, here[thing]):
                    here[thing] = row

    def one(self, at: float, thing: int, **values: float) -> None:
        """Record values of one thing, by the names of fields."""
        row = self.at(at)[thing]
        for name, value in values.items():
            field = self.fields.index(name)
            row[field] = row[field] + value if self.kept == Kept.SUM else value

    def end(self, number: int) -> float:
        """Return when a bucket ends [seconds since 1970]."""
        return self.began + (number + 1) * self.width

    def covers(self, at: float) -> bool:
        """Return whether a time is before the end of the last bucket."""
        return at < self.end(self.most - 1)

    def whole(self, at: float) -> int:
        """Return how many buckets have ended by a time."""
        return math.floor(min(self.most, max(0.0, (at - self.began) / self.width)))

    def until(self, at: float) -> NDArray[np.float64]:
        """Return the sums [things, fields] over all buckets that had ended by a time.

        With `Kept.LAST`, return the last value of each thing, or NaN if there is none; with `NEWEST` its newest row.
        """
        return self.over(0, self.whole(at))

    def spans(self, begin: float, end: float, most: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return edges [n + 1] and values [n, things, fields] of spans that cover a stretch of time with both its ends.

        There are at most `most` spans, each of the same number of buckets; the last may have fewer.
        """
        first = min(self.most - 1, max(0, math.floor((begin - self.began) / self.width)))
        last = max(first + 1, min(self.most, math.floor((end - self.began) / self.width) + 1))
        each = max(1, math.ceil((last - first) / most))
        starts = np.arange(first, last, each)
        edges = self.began + self.width * np.append(starts, last)
        found = np.stack([self.over(start, min(start + each, last)) for start in starts.tolist()])
        return edges, found

    def over(self, first: int, last: int) -> NDArray[np.float64]:
        """Return the sums, last values or newest rows [things, fields] of the buckets from `first` to before `last`."""
        part = self.values[first:last]
        if self.kept == Kept.SUM:
            summed: NDArray[np.float64] = part.sum(axis=0)
            return summed
        if last <= first:
            return np.full(self.values.shape[1:], math.nan)
        return _last(part) if self.kept == Kept.LAST else newest(part)[-1]

    def _double(self) -> None:
        first, second = self.values[0::2], self.values[1::2]
        if self.kept == Kept.SUM:
            merged = first + second
        elif self.kept == Kept.LAST:
            merged = np.where(np.isnan(second), first, second)
        else:
            merged = np.where(_newer(second, first)[..., None], second, first)
        self.values = np.concatenate([merged, np.full_like(merged, self._empty)])
        self.width *= 2.0

    # --- on disk ------------------------------------------------------------------------------------------------------

    def arrays(self, name: str) -> dict[str, NDArray[np.float64]]:
        """Return the values, for `restored`. Their names begin with `name`."""
        used = np.flatnonzero((self.values != 0.0 if self.kept == Kept.SUM else ~np.isnan(self.values)).any((1, 2)))
        top = int(used[-1]) + 1 if used.size else 0
        return {f"{name}.scale": np.array([self.began, self.width]), f"{name}.values": self.values[:top]}

    def restored(self, name: str, arrays: Mapping[str, NDArray[np.float64]]) -> None:
        """Replace the values with the result of `arrays`. Raises `KeyError` or `ValueError` for anything else."""
        began, width = (float(x) for x in arrays[f"{name}.scale"])
        values = arrays[f"{name}.values"]
        if values.ndim != 3 or values.shape[2] != len(self.fields) or len(values) > MOMENTS or not width > 0.0:
            raise ValueError(f"{name}: values of shape {values.shape}")
        self.began, self.width, self.touched = began, width, True
        while self.most > FEWEST and self.most * values.shape[1] > CELLS_MAX:
            self.most //= 2
        if len(values) > self.most:
            raise ValueError(f"{name}: {len(values)} moments of {values.shape[1]} things")
        self.values = np.full((self.most, *values.shape[1:]), self._empty)
        self.values[: len(values)] = values


def newest(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return, for each bucket, the newest row of each thing up to it [buckets, things, fields]; NaN if there is none.

    The newest row is that with the largest first field; of several alike, the one with the largest second field, and so
    on.
    """
    there = ~np.isnan(values[..., 0])
    place = np.zeros(values.shape[1], np.intp)
    places = np.empty(values.shape[:2], np.intp)
    things = np.arange(values.shape[1])
    for bucket in range(len(values)):
        if there[bucket].any():
            place = np.where(_newer(values[bucket], values[place, things]), bucket, place)
        places[bucket] = place
    found: NDArray[np.float64] = np.take_along_axis(values, places[..., None], axis=0)
    return found


def _newer(rows: NDArray[np.float64], others: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return whether rows […, fields] are newer than others (see `newest`). Any is newer than one without values."""
    found: NDArray[np.bool_] = np.isnan(others[..., 0]) & ~np.isnan(rows[..., 0])
    alike = np.ones_like(found)
    for field in range(rows.shape[-1]):
        found |= alike & (rows[..., field] > others[..., field])
        alike &= rows[..., field] == others[..., field]
    return found


def _last(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the last value along the first axis that is not NaN; NaN if there is none."""
    there = ~np.isnan(values)
    place = np.where(there.any(axis=0), len(values) - 1 - there[::-1].argmax(axis=0), 0)
    found: NDArray[np.float64] = np.take_along_axis(values, place[None], axis=0)[0]
    return found

"""A table with a row for each commit, sorted by the time at which the commit was written.

The table is stored in columns and keeps sums up to any row, and up to any row of one fragment. So a question about any
moment costs the same however many commits there are.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Column = NDArray[Any]

QUORUM_MISSED, HEALED = 1, 2
"""Bits of `flags`."""

COLUMNS: dict[str, str] = {
    "written_at": "<f8",  # seconds since 1970, on its writer's clock
    "fragment": "<u2",
    "version": "<u4",
    "writer": "<u2",
    "closed_by": "<u2",
    "flags": "u1",
    "inputs": "<u2",
    "fresh": "<u2",  # inputs on the newest base
    "expected": "<u2",
    "missing": "<u2",
    "share": "<f8",  # of the learners expected, or in nevertheless, that are in the commit; 0 if it heals
    "shared": "u1",  # 0 if the commit heals, else 1
    "late": "<u2",
    "rejected": "<u4",
    "repeated": "<u4",  # rejected, but no work was lost by it
    "faults": "<u4",  # rejected for a reason that shows a problem (`isthmus.reasons.REMEDIES`)
    "tokens": "<f8",  # multiplied by the fragment's share of the parameters
    "bytes": "<u8",
    "grace_s": "<f4",
    "waited_s": "<f4",
    "merge_s": "<f4",
    "publish_s": "<f4",
    "commit_s": "<f4",  # from the closing of the round until the commit was written
    "period": "<f4",  # steps between two uploads of the fragment, from this commit on
}

FIRST_ROOM = 1024


class Rows:
    """The table, which grows at its end. Rows appended out of order are sorted when the table is read next."""

    def __init__(self) -> None:
        self._columns: dict[str, Column] = {name: np.zeros(FIRST_ROOM, kind) for name, kind in COLUMNS.items()}
        self._count = 0
        self._sorted = True
        self._sums: dict[str, tuple[int, NDArray[np.float64]]] = {}
        self._order: tuple[int, NDArray[np.int64], NDArray[np.int64]] | None = None
        self._newest: NDArray[np.int64] = np.zeros(0, np.int64)
        self._fragment_sums: dict[str, NDArray[np.float64]] = {}

    def __len__(self) -> int:
        return self._count

    def append(self, row: tuple[float, ...]) -> None:
        """Append a row: one value for each of `COLUMNS`."""
        if self._count == len(self._columns["flags"]):
            self._columns = {name: np.concatenate([c, np.zeros_like(c)]) for name, c in self._columns.items()}
        if self._count and row[0] < float(self._columns["written_at"][self._count - 1]):
            self._sorted = False
        for column, value in zip(self._columns.values(), row, strict=True):
            column[self._count] = value
        self._count += 1

    def __getitem__(self, name: str) -> Column:
        """Return a column, sorted by time."""
        self._sort()
        return self._columns[name][: self._count]

    def _sort(self) -> None:
        if self._sorted:
            return
        # Rows are only a little late. So only the rows from the first misplaced one on are moved.
        times = self._columns["written_at"][: self._count]
        order = np.argsort(times, kind="stable")
        first = int(np.argmax(order != np.arange(self._count)))
        for column in self._columns.values():
            column[first : self._count] = column[order[first:]]
        self._sorted = True
        self._sums = {name: (min(first, upto), sums) for name, (upto, sums) in self._sums.items()}
        self._order = None

    # --- sums ---------------------------------------------------------------------------------------------------------

    def place(self, at: float) -> int:
        """Return how many rows were written at or before a time."""
        return int(np.searchsorted(self["written_at"], at, side="right"))

    def until(self, name: str, count: int) -> float:
        """Return the sum of a column, or of another name that `sums` takes, over the first `count` rows."""
        return float(self.sums(name)[count])

    def sums(self, name: str) -> NDArray[np.float64]:
        """Return the sums [n + 1] of a column's first 0, 1, … rows.

        Names such as `flags&1` and `closed_by=2` count the rows for which they are true.
        """
        self._sort()
        upto, sums = self._sums.get(name, (0, np.zeros(1)))
        if upto < self._count:
            more = np.empty(self._count - upto)
            np.cumsum(self._values(name, upto), out=more)
            sums = np.concatenate([sums[: upto + 1], more + sums[upto]])
            self._sums[name] = self._count, sums
        return sums[: self._count + 1]

    def _values(self, name: str, first: int) -> NDArray[np.float64]:
        if "&" in name:
            column, _, bits = name.partition("&")
            set_bits: NDArray[np.float64] = ((self._columns[column][first : self._count] & int(bits)) > 0).astype(
                np.float64
            )
            return set_bits
        if "=" in name:
            column, _, value = name.partition("=")
            # A commit that heals a fragment closed no round.
            healed = (self._columns["flags"][first : self._count] & HEALED) > 0
            equal: NDArray[np.float64] = ((self._columns[column][first : self._count] == int(value)) & ~healed).astype(
                float
            )
            return equal
        return self._columns[name][first : self._count].astype(np.float64)

    # --- by fragment --------------------------------------------------------------------------------------------------

    def of(self, fragment: int) -> NDArray[np.int64]:
        """Return the indices of a fragment's rows, sorted by time."""
        order, begins = self.by_fragment()
        if fragment + 1 >= len(begins):
            return order[:0]
        return order[begins[fragment] : begins[fragment + 1]]

    def newest(self, fragment: int, count: int) -> int:
        """Return the index of the row with a fragment's highest version among the first `count` rows, or -1."""
        places = self.of(fragment)
        before = int(np.searchsorted(places, count))
        return int(self._newest[int(self.by_fragment()[1][fragment]) + before - 1]) if before else -1

    def by_fragment(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the indices of all rows, sorted by fragment and time, and where each fragment begins among them."""
        self._sort()
        if self._order is None or self._order[0] != self._count:
            fragments = self._columns["fragment"][: self._count]
            order = np.argsort(fragments, kind="stable")
            top = int(fragments.max()) + 1 if self._count else 0
            self._order = self._count, order, np.searchsorted(fragments[order], np.arange(top + 1))
            self._fragment_sums = {}
            # The clocks of two syncers differ, so a higher version may have an earlier time.
            ranked = (fragments[order].astype(np.int64) << 32) | self._columns["version"][: self._count][order]
            first = np.where(ranked == np.maximum.accumulate(ranked), np.arange(self._count), 0)
            self._newest = order[np.maximum.accumulate(first)]
        return self._order[1], self._order[2]

    def fragment_sums(self, name: str) -> NDArray[np.float64]:
        """Return the sums [n + 1] of a column's first 0, 1, … rows in the order of `by_fragment`."""
        order, _ = self.by_fragment()
        found = self._fragment_sums.get(name)
        if found is None:
            found = self._fragment_sums[name] = np.concatenate([[0.0], np.cumsum(self[name][order].astype(np.float64))])
        return found

    # --- on disk ------------------------------------------------------------------------------------------------------

    def arrays(self) -> dict[str, Column]:
        """Return the columns, for `restored`."""
        return {f"rows.{name}": self[name] for name in COLUMNS}

    def restored(self, arrays: dict[str, Column]) -> None:
        """Replace the rows with the result of `arrays`. Raises `KeyError` or `ValueError` for anything else."""
        columns = {name: arrays[f"rows.{name}"] for name in COLUMNS}
        count = len(columns["flags"])
        for name, column in columns.items():
            if column.shape != (count,) or column.dtype != np.dtype(COLUMNS[name]):
                raise ValueError(f"{name}: {column.shape} of {column.dtype}")
        if count:
            self._columns, self._count = columns, count

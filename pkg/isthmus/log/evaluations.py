"""Measurements of the global model, made by its followers: series of numbers, one object each, beside the log.

No commit depends on them; promotions do (`isthmus.log.promotions`). Replay does not read them, and the garbage
collector does not delete them. If a member has stored different numbers for one version, none of them counts: neither
for a promotion nor where a measurement is shown.
"""

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from isthmus.errors import InputError, ObjectMissing, RecordInvalid
from isthmus.format.records import frame
from isthmus.format.records.fields import require_name
from isthmus.format.records.keys import EVALUATIONS, evaluation_key, evaluations_prefix, is_versioned, version_in
from isthmus.format.records.objects import SCHEMA, EvaluationHeader
from isthmus.log.commits import Log
from isthmus.log.verify import Verified

logger = logging.getLogger(__name__)

AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement."""

    cut: int
    """Number of the measured cut: the version of every fragment."""
    value: float
    at: float
    """Seconds since 1970."""


@dataclass(frozen=True, slots=True)
class Contested:
    """The different numbers that one member has stored for one cut. None of them counts."""

    cut: int
    by: str
    values: tuple[float, ...]
    """In ascending order."""

    def __str__(self) -> str:
        values = ", ".join(map(str, self.values))
        return f"contested at version {self.cut}: {self.by} has stored {values} for it, and none of them counts"


@dataclass(frozen=True, slots=True)
class Series:
    """What counts of a series."""

    points: list[Point]
    """One for each cut, ordered by cut."""
    contested: list[Contested]
    """Cuts with different numbers of one member, ordered by cut. A point of such a cut is another member's."""


def contested(found: Iterable[Verified[EvaluationHeader]]) -> list[Contested]:
    """Return where a member has stored different numbers of the same bytes, ordered by cut and member.

    Nothing proves which of them was first. Numbers that name no member are not compared: anybody stores them.
    """
    values = defaultdict[tuple[int, str, str, bytes | None], set[float]](set)
    for h in (one.header for one in found):
        if h.by is not None:
            values[h.cut, h.by, h.series, h.published].add(h.value)
    different = {(cut, by): tuple(sorted(own)) for (cut, by, *_), own in values.items() if len(own) > 1}
    return [Contested(cut, by, own) for (cut, by), own in sorted(different.items())]


async def note(
    log: Log, series: str, cut: int, value: float, *, by: str | None = None, published: bytes | None = None
) -> bool:
    """Store a measurement of a cut; return whether it is the only number of this member for the cut.

    Raises `InputError` for a bad name or a value that is not finite, and what the store raises.

    `by`: the member that measured it, whose key signs it. `published`: the digest of the whole cut [32 bytes]. If this
    member has stored another number of these bytes before, this one is logged, and not stored: with both, none would
    count.
    """
    require_name("series", series)
    if not math.isfinite(value):
        raise InputError(f"{series} of cut {cut} is {value}: only finite numbers make a series")
    if by is not None:
        there = [m.header for m in await read(log, series, cut=cut)]
        earlier = sorted({h.value for h in there if (h.by, h.published) == (by, published)})
        if earlier and earlier != [value]:
            logger.warning(
                "%s of cut %d is not stored as %g: %s has stored %s for it before, and if an evaluator's numbers for "
                "one version differ, none of them counts; measure a later version", series, cut, value, by,
                ", ".join(f"{one:g}" for one in earlier),
            )  # fmt: skip
        if earlier:
            return earlier == [value]
    header = EvaluationHeader(
        schema=SCHEMA, run=log.run.digest, series=series, cut=cut, value=float(value), written_at=log.runtime.wall(),
        by=by, published=published,
    )  # fmt: skip
    blob = frame.draft(frame.Kind.EVALUATION, header, 0).blob
    log.seal(blob)
    await log.store.create(evaluation_key(series, cut, frame.digest(blob)), blob)
    return True


async def names(log: Log) -> list[str]:
    """Return the names of a run's series. Raises what the store raises."""
    return sorted({entry.key.split("/")[1] for entry in await log.store.list(EVALUATIONS) if is_versioned(entry.key)})


async def series(log: Log, name: str, newest: int | None = None) -> Series:
    """Return what counts of a series, or of its `newest` cuts; of several members' points of one cut, the last written.

    Points are left out as by `read`. Raises what the store raises.
    """
    found = await read(log, name, newest)
    different = contested(found)
    none = {(one.cut, one.by) for one in different}
    counted = [h for h in (m.header for m in found) if (h.cut, h.by) not in none]
    points = [Point(h.cut, h.value, h.written_at) for h in sorted(counted, key=lambda h: (h.cut, h.written_at))]
    return Series(list({p.cut: p for p in points}.values()), different)


async def read(
    log: Log, name: str, newest: int | None = None, *, cut: int | None = None, in_force: bool = True
) -> list[Verified[EvaluationHeader]]:
    """Return the measurements in a series, or those of its `newest` cuts, or of one `cut`, in no order.

    Those that cannot be read are left out. With `in_force`, so are those by authors who are no longer members, since
    nothing proves when these were written. Raises what the store raises.
    """
    keys = [entry.key for entry in await log.store.list(evaluations_prefix(name)) if is_versioned(entry.key)]
    cuts = sorted({version_in(key) for key in keys})
    wanted = {cut} if cut is not None else set(cuts if newest is None else cuts[-newest:])
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(key: str) -> Verified[EvaluationHeader] | None:
        async with slots:
            try:
                blob = await log.fetch(key, frame.Kind.EVALUATION)
                return await log.open(blob, key, EvaluationHeader, in_force=in_force)
            except (ObjectMissing, RecordInvalid):
                return None

    found = await asyncio.gather(*(one(key) for key in keys if version_in(key) in wanted))
    return [one for one in found if one is not None]

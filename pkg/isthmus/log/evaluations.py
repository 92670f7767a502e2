"""Measurements of the global model, made by its followers: series of numbers, one object each, beside the log.

No commit depends on them; promotions do (`isthmus.log.promotions`). Replay does not read them, and the garbage
collector does not delete them.
"""

import asyncio
import logging
import math
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


async def note(
    log: Log, series: str, cut: int, value: float, *, by: str | None = None, published: bytes | None = None
) -> None:
    """Store a measurement of a cut. Raises `InputError` for a bad name or a value that is not finite, and what the
    store raises.

    `by`: the member that measured it, whose key signs it. `published`: the digest of the whole cut [32 bytes]. If this
    member has stored a number of these bytes before, that number stays the only one: another one is logged, and not
    stored.
    """
    require_name("series", series)
    if not math.isfinite(value):
        raise InputError(f"{series} of cut {cut} is {value}: only finite numbers make a series")
    if by is not None:
        there = [m.header for m in await read(log, series, cut=cut)]
        earlier = next((h.value for h in there if (h.by, h.published) == (by, published)), None)
        if earlier is not None:
            if earlier != value:
                logger.warning(
                    "%s of cut %d is not stored as %g: %s has stored %g for it before, and the first number counts",
                    series, cut, value, by, earlier,
                )  # fmt: skip
            return
    header = EvaluationHeader(
        schema=SCHEMA, run=log.run.digest, series=series, cut=cut, value=float(value), written_at=log.runtime.wall(),
        by=by, published=published,
    )  # fmt: skip
    blob = frame.draft(frame.Kind.EVALUATION, header, 0).blob
    log.seal(blob)
    await log.store.create(evaluation_key(series, cut, frame.digest(blob)), blob)


async def names(log: Log) -> list[str]:
    """Return the names of a run's series. Raises what the store raises."""
    return sorted({entry.key.split("/")[1] for entry in await log.store.list(EVALUATIONS) if is_versioned(entry.key)})


async def series(log: Log, name: str, newest: int | None = None) -> list[Point]:
    """Return a series, or the points of its `newest` cuts, ordered by cut; of points of the same cut, the last written.

    Points are left out as by `read`. Raises what the store raises.
    """
    found = [Point(m.header.cut, m.header.value, m.header.written_at) for m in await read(log, name, newest)]
    return list({p.cut: p for p in sorted(found, key=lambda p: (p.cut, p.at))}.values())


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

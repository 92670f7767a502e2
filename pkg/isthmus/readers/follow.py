"""Follow a run: its global model, one cut after another, for whoever serves it, judges it or samples from it.

A cut is the same version of every fragment: cut v is what `isthmus export --version v` writes, whoever follows,
whenever, and however many syncers there are. There is no mixture of versions, and no more is fetched than has changed:
each fragment is carried from its last version by what was published since, checked against the log on the way.
"""

import asyncio
import logging
import os
import shutil
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from isthmus.errors import InputError, LogCorrupt, Unavailable, told
from isthmus.kernels import F32
from isthmus.log import Log, fold
from isthmus.log.run import Run
from isthmus.readers import export
from isthmus.runtime import Runtime

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""The log is looked at this often while it has nothing new; a look is one small request for each fragment."""

FRAGMENTS_AT_ONCE = 8
NEWEST = "newest"
"""Name of the link to the newest cut in a folder."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The global model at one version of every fragment."""

    run: Run
    version: int
    values: Sequence[F32]
    """Published value [n] of each fragment. They are never written to again."""


class Follower:
    """A run's published values, as far as they were followed."""

    def __init__(self, log: Log) -> None:
        self._log, self._carry = log, fold.Publishing(log)
        self._at: list[fold.At[F32] | None] = [None] * len(log.run.layout.fragments)
        self._seen = [0] * len(self._at)
        """The newest version of each fragment that was seen."""

    async def head(self, wanted: int) -> int:
        """Return the newest version that every fragment has; where not all have `wanted`, one before that.

        Raises `Unavailable`, `Denied`, `LogCorrupt`.
        """
        gate = asyncio.Semaphore(FRAGMENTS_AT_ONCE)

        async def look(p: int) -> None:
            async with gate:
                newest = await self._log.newest(p, self._seen[p])
                self._seen[p] = newest.version if newest else 0

        behind = [p for p, seen in enumerate(self._seen) if seen < wanted]
        await asyncio.gather(*map(look, behind))
        if min(self._seen) >= wanted:  # then the others are looked at, too: they may be further by now
            await asyncio.gather(*(look(p) for p in range(len(self._at)) if p not in behind))
        return min(self._seen)

    async def cut(self, version: int) -> Cut:
        """Return the cut of a version that every fragment has. Raises `Unavailable`, `Denied`, `LogCorrupt`."""
        gate = asyncio.Semaphore(FRAGMENTS_AT_ONCE)

        async def bring(p: int) -> F32:
            async with gate:
                at = await self._brought(p, version)
                self._at[p] = at
                return at.carried

        values = await asyncio.gather(*(bring(p) for p in range(len(self._at))))
        return Cut(self._log.run, version, values)

    async def _brought(self, p: int, version: int) -> fold.At[F32]:
        at = self._at[p]
        if at is not None and at.version <= version:
            try:
                async for further in fold.onward(self._log, p, self._carry, at, until=version):
                    at = further
            except LogCorrupt as error:
                # What lies between may have been collected while nobody looked.
                logger.info("fragment %d is followed from a snapshot: %s", p, error)
            else:
                if at.version == version:
                    return at
        return await fold.fold(self._log, p, self._carry, until=version)


async def cuts(
    log: Log, runtime: Runtime, *, after: int = -1, every: int = 1, apart_s: float = 0.0
) -> AsyncIterator[Cut]:
    """Yield cuts whose version is a multiple of `every`, beyond `after`: the newest each time, and so not all of them,
    at least `apart_s` seconds apart. For ever.

    An outage is waited for. Raises `Denied`, and `LogCorrupt` where a cut cannot be had any more.
    """
    follower, away = Follower(log), False
    while True:
        began = runtime.now()
        wanted = max(0, (after // every + 1) * every)
        try:
            head = await follower.head(wanted) // every * every
            cut = await follower.cut(head) if head >= wanted else None
        except Unavailable as error:
            if not away:
                logger.warning("the run cannot be followed for now: %s", told(error))
            away = True
            await asyncio.sleep(LOOK_S)
            continue
        if away:
            logger.warning("the run is followed again")
        away = False
        if cut is not None:
            after = cut.version
            yield cut
        await asyncio.sleep(max(LOOK_S if cut is None else 0.0, (began + apart_s - runtime.now()) if cut else 0.0))


# --- cuts in a folder -------------------------------------------------------------------------------------------------


def newest_in(folder: Path) -> int:
    """Return the version of the newest cut that a folder points to, -1 where it points to none."""
    try:
        return int(os.readlink(folder / NEWEST).removeprefix("cut-"))
    except (OSError, ValueError):
        return -1


def _cuts_in(folder: Path) -> list[Path]:
    found = [path for path in folder.glob("cut-*") if path.name[4:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[4:]))


def store(cut: Cut, folder: Path, *, dtype: str | None, largest: int, keep: int) -> Path:
    """Write a cut below a folder, whole or not at all: `cut-000123`, to which `newest` points then; return it.

    Safetensors of at most `largest` bytes each (but a tensor is never divided) with the index that `from_pretrained`
    reads, in the run's dtypes or in one. Of earlier cuts `keep` - 1 stay. Raises `InputError` where it cannot be
    written.
    """
    path = folder / f"cut-{cut.version:06d}"
    scratch = folder / f".{path.name}.new"
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        export.write_parts(scratch, cut.run, cut.values, [cut.version] * len(cut.values), dtype=dtype, largest=largest)
        if path.exists():
            shutil.rmtree(path)
        scratch.rename(path)
        link = folder / f".{NEWEST}.new"
        link.unlink(missing_ok=True)
        link.symlink_to(path.name)
        os.replace(link, folder / NEWEST)
        for gone in _cuts_in(folder)[:-keep]:
            shutil.rmtree(gone)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error}") from None
    return path

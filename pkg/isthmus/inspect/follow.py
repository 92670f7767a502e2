"""Follow a run: read its global model, one cut after another, to serve it, evaluate it or sample from it.

A cut is the same version of every fragment. Cut v is what `isthmus export --version v` writes; it does not depend on
the follower, the time or the number of syncers. Versions are mixed only on request: then a cut is the newest version of
each fragment, and its number is the sum of these versions. Only changes are fetched: a fragment is carried forward from
its last version by the differences published since, each checked against the log.
"""

import asyncio
import logging
import os
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isthmus.codecs.kernels import F32
from isthmus.errors import Denied, InputError, LogCorrupt, Unavailable, told
from isthmus.format.records.keys import promotion_key
from isthmus.inspect import export
from isthmus.log import Log, fold
from isthmus.log.promotions import Promotions, cut_digest, doubts, require_bytes, stored
from isthmus.log.run import Run
from isthmus.runtime.clock import Runtime

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two looks at a log with nothing new. A look is one small request for each fragment."""

FRAGMENTS_AT_ONCE = 8
NEWEST = "newest"
"""Name of the link to the newest cut in a folder."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The global model at one version of every fragment, or of some of them."""

    run: Run
    number: int
    """The version of all fragments; the sum of their versions if these are mixed."""
    values: Mapping[int, F32]
    """The published value [n] of each followed fragment. These arrays are never written to again."""
    versions: Mapping[int, int]
    """The version of each followed fragment."""
    local: export.Local = field(default_factory=dict)
    """Tensors that are not merged, such as running statistics. `CutFollower` leaves it empty; callers may add them."""
    published: bytes | None = None
    """Digest of the cut [32 bytes] (`isthmus.log.promotions.cut_digest`); None if it has not all fragments."""

    def tensors(self) -> dict[str, NDArray[np.float32]]:
        """Return the tensors in the followed fragments, in their shapes, as float32. Tied tensors are in it once."""
        return export.tensors(self.run, self.values)

    def buffers(self) -> dict[str, NDArray[Any]]:
        """Return the tensors that are not merged, in their shapes. Floating point values are float32."""
        return {
            name: values.astype(np.float32) if values.dtype == np.float64 else values
            for name, (_, values) in self.local.items()
        }


class CutFollower:
    """Reads cuts of a run, and keeps the value of each followed fragment to carry it forward."""

    def __init__(self, log: Log, fragments: Sequence[int] | None = None) -> None:
        """`fragments`: those to follow; None: all. Raises `InputError` for one that the run does not have."""
        self._log, self._carry = log, fold.PublishedValue(log)
        there = range(len(log.run.layout.fragments))
        self.fragments = sorted(set(there if fragments is None else fragments))
        if not self.fragments or not set(self.fragments) <= set(there):
            raise InputError(f"fragments {fragments}: the run has 0 to {there.stop - 1}")
        self._at: dict[int, fold.At[F32]] = {}
        self._seen = dict.fromkeys(self.fragments, 0)
        """By fragment, the newest version that was found."""

    async def heads(self) -> dict[int, int]:
        """Return the newest version of each fragment. Raises `Unavailable`, `Denied`, `LogCorrupt`."""
        await self._look(self.fragments)
        return dict(self._seen)

    async def head(self, wanted: int) -> int:
        """Return the newest version that every fragment has. It is less than `wanted` if not all fragments have that.

        Raises `Unavailable`, `Denied`, `LogCorrupt`.
        """
        behind = [p for p, seen in self._seen.items() if seen < wanted]
        await self._look(behind)
        if min(self._seen.values()) >= wanted:  # look at the other fragments, too: they may have advanced
            await self._look([p for p in self.fragments if p not in behind])
        return min(self._seen.values())

    async def _look(self, fragments: Sequence[int]) -> None:
        slots = asyncio.Semaphore(FRAGMENTS_AT_ONCE)

        async def look(p: int) -> None:
            async with slots:
                newest = await self._log.newest(p, self._seen[p])
                self._seen[p] = newest.version if newest else 0

        await asyncio.gather(*map(look, fragments))

    async def cut(self, number: int, versions: Mapping[int, int] | None = None) -> Cut:
        """Return the cut of version `number`, which every fragment must have, or of `versions`, whose sum it is.

        Raises `Unavailable`, `Denied`, `LogCorrupt`.
        """
        slots = asyncio.Semaphore(FRAGMENTS_AT_ONCE)
        versions = dict.fromkeys(self.fragments, number) if versions is None else versions

        async def bring(p: int) -> None:
            async with slots:
                self._at[p] = await self._brought(p, versions[p])

        await asyncio.gather(*map(bring, self.fragments))
        values = {p: self._at[p].carried for p in self.fragments}
        first = self._log.run.header.snapshots
        whole = len(self.fragments) == len(first)
        published = [at.last[-1].header.published_digest if at.last else first[p] for p, at in sorted(self._at.items())]
        return Cut(self._log.run, number, values, versions, published=cut_digest(published) if whole else None)

    async def _brought(self, p: int, version: int) -> fold.At[F32]:
        at = self._at.get(p)
        if at is not None and at.version <= version:
            try:
                async for further in fold.onward(self._log, p, self._carry, at, until=version):
                    at = further
            except LogCorrupt as error:
                # The values in between may have been collected since the last cut.
                logger.info("fragment %d is followed from a snapshot: %s", p, error)
            else:
                if at.version == version:
                    return at
        return await fold.fold(self._log, p, self._carry, until=version)


async def cuts(
    log: Log,
    runtime: Runtime,
    *,
    after: int = -1,
    every: int = 1,
    apart_s: float = 0.0,
    fragments: Sequence[int] | None = None,
    mixed: bool = False,
    promoted: bool = False,
    only: int | None = None,
) -> AsyncIterator[Cut]:
    """Yield for ever the newest cut beyond `after` whose number is a multiple of `every`, and skip those before it.

    Two cuts are at least `apart_s` seconds apart. With `mixed`, a cut is yielded once its number has grown by `every`
    or more. With `promoted`, only promoted cuts are yielded, whatever `every` and `mixed` say. With `only`, that cut
    alone is yielded, once every fragment has it. During an outage of the store, wait. Raises `Denied`, `LogCorrupt` if
    a cut is not available any more, and `InputError`.
    """
    follower, away, told_wait, promotions = CutFollower(log, fragments), False, False, _Promoted(log)
    while True:
        began = runtime.now()
        wanted = max(0, (after // every + 1) * every)
        try:
            if only is not None:
                head = await follower.head(only)
                cut = await follower.cut(only) if head >= only else None
                if cut is None and not told_wait:
                    logger.warning("version %d is not there yet; the newest is %d: this waits for it", only, head)
                    told_wait = True
            elif promoted:
                version = await promotions.newest()
                cut = await promotions.require(await follower.cut(version)) if version > after else None
            elif mixed:
                versions = await follower.heads()
                number = sum(versions.values())
                cut = await follower.cut(number, versions) if after < 0 or number >= after + every else None
            else:
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
            after = cut.number
            yield cut
            if only is not None:
                return
        await asyncio.sleep(max(LOOK_S if cut is None else 0.0, (began + apart_s - runtime.now()) if cut else 0.0))


class _Promoted:
    """The promotions of a run, for one that follows it: each one that does not hold is logged once."""

    def __init__(self, log: Log) -> None:
        self._known = Promotions(log)
        self._said: set[tuple[int, str]] = set()

    async def newest(self) -> int:
        """Return the version of the last promotion that holds; -1 if there is none."""
        last = await self._known.refresh()
        for found in self._known.unsound:
            if (found.number, found.fault) not in self._said:
                self._said.add((found.number, found.fault))
                logger.warning(
                    "%s does not hold, and its version is not given out: %s; isthmus promote %s --list names its "
                    "author", promotion_key(found.number), found.fault, self._known.log.run.url,
                )  # fmt: skip
        return last.version if last else -1

    async def require(self, cut: Cut) -> Cut:
        """Return the cut if it is the one that was promoted, and log what makes its numbers doubtful.

        Raises `LogCorrupt`, and what the store raises.
        """
        if (last := self._known.last) is not None:
            require_bytes(last, cut.published)
            with suppress(Denied):  # the promotion holds all the same
                for said in doubts(last, await stored(self._known.log)):
                    logger.warning("%s", said)
        return cut


# --- cuts in a folder -------------------------------------------------------------------------------------------------


def newest_in(folder: Path) -> int:
    """Return the number of the cut that a folder's link to the newest cut names; -1 if there is none."""
    try:
        return int(os.readlink(folder / NEWEST).removeprefix("cut-"))
    except (OSError, ValueError):
        return -1


def _cuts_in(folder: Path) -> list[Path]:
    found = [path for path in folder.glob("cut-*") if path.name[4:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[4:]))


def store(cut: Cut, folder: Path, *, dtype: str | None, largest: int, keep: int) -> Path:
    """Write a cut below a folder, whole or not at all, as `cut-000123`; point the link `newest` to it; return its path.

    Its files are safetensors of at most `largest` bytes each (but a tensor is never divided), with the index that
    `from_pretrained` reads. `dtype`: that of all the run's tensors in the files; None: their own. The newest `keep`
    cuts stay, and older ones are deleted. Raises `InputError` if the cut cannot be written.
    """
    path = folder / f"cut-{cut.number:06d}"
    scratch = folder / f".{path.name}.new"
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        export.write_parts(scratch, cut.run, cut.values, cut.versions, dtype=dtype, largest=largest, local=cut.local)
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

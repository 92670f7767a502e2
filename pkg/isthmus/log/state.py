"""What is the matter with a log, by one look: its newest commits, what is missing or damaged, what stands still."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from isthmus.errors import LogCorrupt
from isthmus.format.rules import KEPT_VERSIONS
from isthmus.log import Commit, Log
from isthmus.log.complete import require_commits

STANDS = 8
"""A fragment stands still when most of the others were merged so many times since it last was."""

LOOKS_AT_ONCE = 8

GROWN = 8 * KEPT_VERSIONS
"""Versions from which on somebody should collect what is not needed."""


@dataclass(frozen=True, slots=True)
class LogState:
    """A log as it was found."""

    heads: Sequence[Commit | None]
    """The newest commit of each fragment that could be read; None where there is none."""
    wrong: Mapping[int, str] = field(default_factory=dict)
    """By fragment, what is missing or damaged."""
    standing: Sequence[int] = ()
    """Fragments that stand still while others are merged (see `STANDS`)."""
    uncollected: int = 0
    """Versions of the first fragment, where nothing was ever collected; else 0."""
    whole_log: bool = True
    """Whether all commits were looked for, and not those since the newest snapshots alone."""


async def look(log: Log, hints: Mapping[int, int] | None = None) -> LogState:
    """Return the state of a log. Objects are not verified: that is what `replay` does.

    `hints`: by fragment, a version that is probably there. Raises `Unavailable`, and `Denied` where commits may not be
    read.
    """
    gate = asyncio.Semaphore(LOOKS_AT_ONCE)
    wrong: dict[int, str] = {}
    from_first: list[bool] = []

    async def one(p: int) -> Commit | None:
        newest = None
        async with gate:
            try:
                newest = await log.newest(p, (hints or {}).get(p, 0))
                head = newest.version if newest else 0
                from_first.append(await require_commits(log, p, head) <= 1)
            except LogCorrupt as error:
                wrong[p] = str(error)
                newest = newest or await _last_readable(log, p)
        return newest

    heads = await asyncio.gather(*(one(f.index) for f in log.run.layout.fragments))
    still = await _standing(log, heads, wrong)
    grown = await uncollected(log, heads[0].version) if heads[0] is not None and 0 not in wrong else 0
    return LogState(heads, dict(sorted(wrong.items())), still, grown, all(from_first))


async def uncollected(log: Log, head: int) -> int:
    """Return the head of the first fragment where it has grown large and nothing was ever collected; else 0."""
    if head < GROWN:
        return 0
    first = await log.commit(0, 1)
    return 0 if first is not None and first.packed else head


def collects(url: str, versions: int) -> str:
    """Return what to say of a run that has so many versions of which none was ever collected."""
    return (
        f"nothing was collected in {versions:,} versions: the run grows until its store is full. isthmus gc {url} says "
        "what may go, --apply deletes it, and --apply --every 3600 goes on so"
    )


async def _last_readable(log: Log, p: int) -> Commit | None:
    """Return the newest commit before the first that cannot be read, from the newest snapshot on whose own can be."""
    for start in [*(version for version, _ in await log.snapshots(p)), 1]:
        version, found = max(1, start), None
        try:
            while (following := await log.commit(p, version)) is not None:
                found, version = following, version + 1
        except LogCorrupt:
            pass
        if found is not None:
            return found
    return None


async def _standing(log: Log, heads: Sequence[Commit | None], wrong: Mapping[int, str]) -> list[int]:
    async def before(p: int, head: Commit | None) -> float | None:
        """Return when the fragment was merged the last but so many times; None where it was not merged so often."""
        if head is None or head.version < STANDS or p in wrong:
            return None
        try:
            commit = await log.commit(p, head.version - STANDS + 1)
        except LogCorrupt:
            return None
        return commit.header.written_at if commit else None

    since = await asyncio.gather(*(before(p, head) for p, head in enumerate(heads)))
    return standing([head.header.written_at if head else None for head in heads], since)


def standing(last: Sequence[float | None], since: Sequence[float | None]) -> list[int]:
    """Return the fragments that stand still.

    `last`: when each was merged last, None where it never was; `since`: when it was merged the last but `STANDS` times
    [both in seconds since 1970].
    """
    return [
        p
        for p, at in enumerate(last)
        if is_most(began is not None and (at is None or began > at) for q, began in enumerate(since) if q != p)
    ]


def is_most(moved: Iterable[bool]) -> bool:
    """Return whether more than half of the others have moved that often since."""
    every = list(moved)
    return sum(every) > len(every) / 2

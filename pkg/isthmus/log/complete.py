"""Whether a log is whole: its end is the first version that is missing, and so is a hole in it.

What lies beyond a hole shows it: later commits, snapshots, published values. A syncer that took a hole for the end
would commit a second version of the same number, and the fragment would stand for good.
"""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from isthmus.errors import Denied, LogCorrupt, ObjectMissing, RecordInvalid
from isthmus.format.records.keys import commit_in, commit_key, commits_prefix, is_versioned, values_prefix, version_in
from isthmus.format.records.objects import SnapshotHeader, ValueHeader
from isthmus.format.rules import MemberRole
from isthmus.log import Log
from isthmus.log.listing import earliest
from isthmus.log.verified import KINDS
from isthmus.store.base import is_there

AHEAD = 8
"""Versions beyond the end that are looked for one by one."""


async def require_whole(log: Log, fragment: int, head: int, *, lists: bool = False) -> None:
    """Raise `LogCorrupt` where a version beyond the end of a fragment's log is known, so that one is missing.

    `head`: the version that the log was read to. `lists`: look at all published values as well, which takes a right to
    list them; without it that is left out. (A value of the next version may be there before its commit is.) Raises
    `Unavailable`.
    """
    versions = range(head + 2, head + 2 + AHEAD)
    found = await asyncio.gather(*(_is_commit(log, fragment, version) for version in versions))
    known = [version for version, there in zip(versions, found, strict=True) if there]
    known += [
        v
        for v, key in await log.snapshots(fragment)
        if v > head and await _is_genuine(log, fragment, key, SnapshotHeader)
    ]
    if lists:
        try:
            entries = [e for e in await log.store.list(values_prefix(fragment)) if is_versioned(e.key)]
        except Denied:
            entries = []
        beyond = [e.key for e in entries if version_in(e.key) > head + 1]
        known += [version_in(key) for key in beyond if await _is_genuine(log, fragment, key, ValueHeader)]
    key = commit_key(fragment, head + 1)
    # Whoever commits meanwhile has made no hole.
    if known and not await is_there(log.store, key):
        raise LogCorrupt(
            key, f"is missing, and version {max(known)} is there: bring it back from a backup, or go on in a new run "
            "from the newest version that can be exported (`isthmus export`, then `isthmus init --from`)",
            (fragment, head),
        )  # fmt: skip


async def _is_commit(log: Log, fragment: int, version: int) -> bool:
    try:
        return await log.commit(fragment, version) is not None
    except LogCorrupt:
        return False  # whoever may write there can put anything there


async def _is_genuine(log: Log, fragment: int, key: str, record: type[SnapshotHeader] | type[ValueHeader]) -> bool:
    """Return whether an object is what its name says, by whoever may have made that version: names say nothing of
    themselves, and a key that was expelled says nothing of what came later."""
    try:
        found = await log.open(await log.fetch(key, KINDS[record], fragment), key, record)
    except (ObjectMissing, RecordInvalid):
        return False
    judges = log.members.versions[log.members.in_force(fragment, version_in(key)) :]
    return not log.members.signed or any(m.permits(found.author, (MemberRole.SYNCER,), None) for m in judges)


async def require_commits(log: Log, fragment: int, head: int) -> int:
    """Raise `LogCorrupt` where a commit up to `head`, or below any commit or snapshot that is stored, is missing.

    Returns from which version on was looked: 1 where commits may be listed. Where that is refused, those since the
    newest snapshot are asked for one by one: they are what a new syncer needs. Raises `Unavailable`.
    """
    snapshots = await log.snapshots(fragment)
    try:
        entries = await log.store.list(commits_prefix(fragment))
    except Denied:
        await require_whole(log, fragment, head)
        first = max([1, *(version for version, _ in snapshots if version <= head)])
        await _require_all(log, fragment, range(first, head + 1), head)
        return first
    there = {version for entry in entries if (version := commit_in(entry.key))}
    # Names beyond the end are believed as far as what lies there is what it should be.
    beyond = sorted(version for version in there if version > head)[:AHEAD]
    known = [version for version in beyond if await _is_commit(log, fragment, version)]
    known += [v for v, key in snapshots if v > head and await _is_genuine(log, fragment, key, SnapshotHeader)]
    newest = max([head, *known])
    # A listing of many pages takes a while: what it lacks is asked for before it is believed. So is what it has beyond
    # the end: a store may list what it does not give out.
    await _require_all(log, fragment, (v for v in range(1, newest + 1) if v not in there or v > head), newest)
    listed = commit_key(fragment, min(beyond, default=head))
    if beyond and not await is_there(log.store, listed):
        raise LogCorrupt(listed, "is listed, and the store does not give it out", (fragment, head))
    return 1


async def _require_all(log: Log, fragment: int, versions: Iterable[int], newest: int) -> None:
    for asked in batched(versions, AHEAD):
        found = await asyncio.gather(*(is_there(log.store, commit_key(fragment, version)) for version in asked))
        for version, there in zip(asked, found, strict=True):
            if not there:
                raise LogCorrupt(
                    commit_key(fragment, version), f"is missing, and version {newest} is there: bring it back from a "
                    "backup. A run with a snapshot after it goes on, and `isthmus replay` ends before it",
                    (fragment, version - 1),
                )  # fmt: skip


def batched(values: Iterable[int], count: int) -> Iterator[Sequence[int]]:
    """Yield values, so many at a time."""
    left = iter(values)
    while found := tuple(islice(left, count)):
        yield found


async def require_chain(log: Log, fragment: int, head: int) -> None:
    """Raise `LogCorrupt` where a commit is missing below `head`, which a snapshot beyond it hides from a fold.

    Reads all commits that can still be folded. Raises `Unavailable`.
    """
    at = await earliest(log, fragment)
    async for commit in log.commits(fragment, at):
        at = commit.version
        if at >= head:
            return
    if at < head:
        key = commit_key(fragment, at + 1)
        raise LogCorrupt(key, f"is missing, and version {head} is there: replay ends before it", (fragment, at))

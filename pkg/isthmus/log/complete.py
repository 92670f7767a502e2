"""Whether a log is whole: its end is the first version that is missing, and so is a hole in it.

What lies beyond a hole shows it: later commits, snapshots, published values. A syncer that took a hole for the end
would commit a second version of the same number, and the fragment would stand for good.
"""

import asyncio
from collections.abc import Sequence

from isthmus.errors import Denied, LogCorrupt
from isthmus.log import Log
from isthmus.log.select import earliest
from isthmus.records.keys import commit_in, commit_key, commits_prefix, is_versioned, values_prefix, version_in
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
    found = await asyncio.gather(*(is_there(log.store, commit_key(fragment, version)) for version in versions))
    known = [version for version, there in zip(versions, found, strict=True) if there]
    known += [version for version, _ in await log.snapshots(fragment) if version > head]
    if lists:
        try:
            entries = await log.store.list(values_prefix(fragment))
        except Denied:
            entries = []
        known += [v for v in (version_in(e.key) for e in entries if is_versioned(e.key)) if v > head + 1]
    key = commit_key(fragment, head + 1)
    # Whoever commits meanwhile has made no hole.
    if known and not await is_there(log.store, key):
        raise LogCorrupt(
            key, f"is missing, and version {max(known)} is there: bring it back from a backup, or go on in a new run "
            "from the newest version that can be exported (`isthmus export`, then `isthmus init --from`)",
            (fragment, head),
        )  # fmt: skip


async def require_commits(log: Log, fragment: int, head: int) -> int:
    """Raise `LogCorrupt` where a commit up to `head`, or below any commit or snapshot that is stored, is missing.

    Returns from which version on was looked: 1 where commits may be listed. Where that is refused, those since the
    newest snapshot are asked for one by one: they are what a new syncer needs. Raises `Unavailable`.
    """
    snapshots = [version for version, _ in await log.snapshots(fragment)]
    try:
        entries = await log.store.list(commits_prefix(fragment))
    except Denied:
        await require_whole(log, fragment, head)
        first = max([1, *(version for version in snapshots if version <= head)])
        return await _require_all(log, fragment, range(first, head + 1), head, first)
    there = {version for entry in entries if (version := commit_in(entry.key))}
    newest = max([head, *there, *snapshots])
    # A listing of many pages takes a while: what it lacks is asked for before it is believed.
    lacking = [version for version in range(1, newest + 1) if version not in there]
    return await _require_all(log, fragment, lacking, newest, 1)


async def _require_all(log: Log, fragment: int, versions: Sequence[int], newest: int, first: int) -> int:
    for start in range(0, len(versions), AHEAD):
        asked = versions[start : start + AHEAD]
        found = await asyncio.gather(*(is_there(log.store, commit_key(fragment, version)) for version in asked))
        for version, there in zip(asked, found, strict=True):
            if not there:
                raise LogCorrupt(
                    commit_key(fragment, version), f"is missing, and version {newest} is there: bring it back from a "
                    "backup. A run with a snapshot after it goes on, and `isthmus replay` ends before it",
                    (fragment, version - 1),
                )  # fmt: skip
    return first


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

"""Find holes in a log. Its end is the first missing version, and a hole looks the same.

Later commits, snapshots or published values show that a missing version is a hole. A syncer that took a hole for the
end would commit a second version under the same number, and the fragment could never advance again.
"""

import asyncio
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

from isthmus.errors import Denied, LogCorrupt, ObjectMissing, RecordInvalid
from isthmus.format.records import frame
from isthmus.format.records.keys import (
    MEMBERS,
    commit_in,
    commit_key,
    commits_prefix,
    is_versioned,
    values_prefix,
    version_in,
)
from isthmus.format.records.objects import SnapshotHeader, ValueHeader
from isthmus.format.rules import MemberRole
from isthmus.log import Commit, Log
from isthmus.log.listing import earliest
from isthmus.log.verify import KINDS
from isthmus.store.base import Entry, is_there
from isthmus.wording import agreeing, fragments, key_flag

AHEAD = 8
"""Versions beyond the end that are requested one by one."""

DOUBTED_MAX = 64
"""The most commits of a fragment that one look reads because of what the listing says of them."""

Holes = Mapping[int, Collection[int]]
"""By fragment, versions whose commit or value is lost for good, and is not to be reported."""

HOLE = "a hole in its history (the run goes on)"
"""What a fragment has whose log lacks an object that no syncer needs to go on: a newer snapshot is there."""

GOES_ON = "restore it from a backup: `isthmus replay` needs it, and a learner with an older checkpoint may"
"""The advice for such an object."""

_IN_MEMORY = (
    "restore it from a backup; without one, a syncer that still merges this fragment writes a snapshot once it is "
    "stopped with SIGTERM, and the run goes on from that; if none does, "
)
IN_A_NEW_RUN = (
    f"{_IN_MEMORY}go on in a new run from the newest version that can be exported (`isthmus export --version "
    "N`, then `isthmus init --from`)"
)
"""The advice for a commit that is missing before others."""

_TOGETHER = "a snapshot is used only together with its commit"

FROM_BEFORE = f"{_IN_MEMORY}isthmus heal names what is to be deleted, and the run goes on from the version before"
"""The advice for the newest commits, if they are missing."""


def lacking(version: int, known: int, *, commits: bool = True) -> str:
    """Return in words that a commit is missing, and which later object shows that it existed.

    `known`: the newest version that has any object. `commits`: whether a commit from `version` on is there.
    """
    if known == version:
        return f"is missing, and its snapshot is there ({_TOGETHER})"
    if not commits:
        later = f"a snapshot or a value of version {known} is there ({_TOGETHER})"
        return f"is missing, like all commits after it, and {later}"
    return f"is missing, and version {known} is there"


def damage(of: Collection[int], why: str) -> str:
    """Return in words that fragments' logs have a hole, or are damaged. `why`: the text of a `LogCorrupt`."""
    if GOES_ON in why:
        return f"{fragments(of, 'each of ')} has {HOLE}: {why}"
    return f"the {agreeing(len(of), 'log', 'logs')} of {fragments(of)} {agreeing(len(of), 'is', 'are')} damaged: {why}"


def accept_flag(holes: Holes) -> str:
    """Return the flag, after a space, by which commands accept these holes; empty if there are none."""
    words = [f"{p}/{span}" for p, versions in sorted(holes.items()) for span in spans(versions)]
    return f" --accept-hole {' '.join(words)}" if words else ""


def spans(versions: Iterable[int]) -> list[str]:
    """Return versions as text, those in a row together: `3`, `5-8`."""
    found = list[list[int]]()
    for version in sorted(versions):
        if found and version == found[-1][1] + 1:
            found[-1][1] = version
        else:
            found.append([version, version])
    return [str(first) if first == last else f"{first}-{last}" for first, last in found]


async def last_missing(log: Log, fragment: int, version: int) -> int:
    """Return the last of the commits that are missing in a row from `version` on, by the listing; `version` itself if
    its commit is there. Raises `Unavailable`."""
    try:
        there = [commit_in(entry.key) for entry in await log.store.list(commits_prefix(fragment))]
    except Denied:
        return version
    return min((v - 1 for v in there if v > version), default=version) if version not in there else version


def ask_heal(url: str, *, signed: bool) -> str:
    """Return the advice to run `isthmus heal` on a run, and who may. In a `signed` run --apply needs a syncer's key."""
    key = key_flag("syncer", signed=signed)
    return f"isthmus heal {url} says what can be done (run it as the reader, and with --apply{key} as a syncer)"


def ask_to_accept(url: str) -> str:
    """Return the advice for a hole in a run's history: there is nothing to heal."""
    return f"nothing else is to be done; without a backup, isthmus heal {url} says which flags accept it as lost"


async def require_whole(log: Log, fragment: int, head: int, *, lists: bool = False) -> None:
    """Raise `LogCorrupt` if a version beyond the end of a fragment's log is known, so that one before it is missing.

    `head`: the version that the log was read to. `lists`: also look at all published values. This needs permission to
    list values and is skipped without it. (The value of version `head` + 1 may exist before its commit does.) Raises
    `Unavailable`.
    """
    known = await known_beyond(log, fragment, head + 1, lists=lists)
    key = commit_key(fragment, head + 1)
    # There is no hole if a syncer has committed this version meanwhile.
    if known.newest is not None and not await is_there(log.store, key):
        raise LogCorrupt(key, _gone(head + 1, known.newest, commits=bool(known.commits)), (fragment, head))


def _gone(version: int, known: int, *, commits: bool) -> str:
    """Describe a missing commit that the run needs, and the advice for it."""
    return f"{lacking(version, known, commits=commits)}: {IN_A_NEW_RUN if commits else FROM_BEFORE}"


@dataclass(frozen=True, slots=True)
class Beyond:
    """What is stored of versions beyond the end of a fragment's log."""

    commits: Sequence[int]
    """Versions with a commit."""
    others: Sequence[int]
    """Versions with a snapshot or a value."""
    keys: Sequence[str]
    """The keys of these snapshots and values."""

    @property
    def newest(self) -> int | None:
        """The newest version that has any of these; None if none has."""
        return max((*self.commits, *self.others), default=None)


async def known_beyond(log: Log, fragment: int, head: int, *, lists: bool = False) -> Beyond:
    """Return versions after `head` with a commit or (with `lists`) a published value, and of snapshots from it.

    Looks at the next `AHEAD` commits, at all snapshots, and with permission to list them at all values. Raises
    `Unavailable`.
    """
    versions = range(head + 1, head + 1 + AHEAD)
    found = await asyncio.gather(*(_is_commit(log, fragment, version) for version in versions))
    commits = [version for version, there in zip(versions, found, strict=True) if there]
    keys = [
        key
        for v, key in await log.snapshots(fragment)
        if v >= head and await _is_genuine(log, fragment, key, SnapshotHeader)
    ]
    if lists:
        try:
            entries = [e for e in await log.store.list(values_prefix(fragment)) if is_versioned(e.key)]
        except Denied:
            entries = []
        beyond = [e.key for e in entries if version_in(e.key) > head]
        keys += [key for key in beyond if await _is_genuine(log, fragment, key, ValueHeader)]
    return Beyond(commits, [version_in(key) for key in keys], keys)


async def _is_commit(log: Log, fragment: int, version: int) -> bool:
    try:
        return await log.commit(fragment, version) is not None
    except LogCorrupt:
        return False  # any process with write access can put invalid bytes there


async def _is_genuine(log: Log, fragment: int, key: str, record: type[SnapshotHeader] | type[ValueHeader]) -> bool:
    """Return whether an object is what its key says, and its author may have made that version.

    A key alone proves nothing, and an expelled member proves nothing about later versions.
    """
    try:
        found = await log.open(await log.fetch(key, KINDS[record], fragment), key, record)
    except (ObjectMissing, RecordInvalid):
        return False
    judges = log.members.versions[log.members.in_force(fragment, version_in(key)) :]
    return not log.members.signed or any(m.permits(found.author, (MemberRole.SYNCER,), None) for m in judges)


async def require_commits(log: Log, fragment: int, head: int, accepted: Collection[int] = ()) -> int:
    """Raise `LogCorrupt` if a commit up to `head`, or below any stored commit or snapshot, is missing.

    The commits that the listing makes doubtful are read, too, and one of them may be damaged. Return the first version
    that was checked: 1 where commits may be listed. Where listing is denied, only the commits since the newest snapshot
    are requested, one by one: a new syncer needs those. `accepted`: versions whose commits may be missing or damaged if
    a later snapshot is there. Raises `Unavailable`.
    """
    snapshots = await log.snapshots(fragment)
    try:
        entries = await log.store.list(commits_prefix(fragment))
    except Denied:
        await require_whole(log, fragment, head)
        first = max([1, *(version for version, _ in snapshots if version <= head)])
        await _require_all(log, fragment, range(first, head + 1), head, head, snapshots, accepted)
        return first
    there = {version for entry in entries if (version := commit_in(entry.key))}
    # A key beyond the end counts only if there is a valid commit under it.
    beyond = sorted(version for version in there if version > head)[:AHEAD]
    commits = [version for version in beyond if await _is_commit(log, fragment, version)]
    others = [v for v, key in snapshots if v > head and await _is_genuine(log, fragment, key, SnapshotHeader)]
    newest = max([head, *commits, *others])
    # Commits may be created while a long listing is read, so versions that it lacks are requested before they are
    # reported missing. Versions beyond the end are requested too: a store may list objects that it does not return.
    asked = (v for v in range(1, newest + 1) if v not in there or v > head)
    await _require_all(log, fragment, asked, max([head, *commits]), newest, snapshots, accepted)
    listed = commit_key(fragment, min(beyond, default=head))
    if beyond and not await is_there(log.store, listed):
        raise LogCorrupt(listed, "is listed, and the store does not give it out", (fragment, head))
    await require_readable(log, fragment, _doubtful(entries, head), accepted)
    return 1


def _doubtful(entries: Iterable[Entry], head: int) -> Sequence[int]:
    """Return versions below `head` whose commits may be damaged, by a listing; the newest, if they are many.

    A commit is older than its successor: a later date shows that other bytes were written under its key. So it is with
    a commit that was restored or packed, which is then read for nothing. A commit of less than half the size of each of
    its neighbours is read, too.
    """
    found = list[int]()
    listed = sorted((commit_in(entry.key), entry) for entry in entries)
    sizes = [entry.size for _, entry in listed]
    for number, ((version, entry), (following, after)) in enumerate(pairwise(listed)):
        again = following == version + 1 and entry.modified > after.modified
        small = 2 * entry.size < min(sizes[number - 1] if number else after.size, after.size)
        if 0 < version < head and (again or small or entry.size < frame.PREFIX.size):
            found.append(version)
    return found[-DOUBTED_MAX:]


async def require_readable(
    log: Log, fragment: int, versions: Iterable[int], accepted: Collection[int] = ()
) -> list[Commit]:
    """Return the commits of these versions, but for missing ones. Raise `LogCorrupt`, with advice, for a damaged one.

    `accepted`: versions whose commits may be damaged if a later snapshot is there. Raises `Unavailable`, and `Denied`
    if commits may not be read.
    """
    commits = list[Commit]()

    async def read(version: int) -> Commit | LogCorrupt | None:
        try:
            return await log.commit(fragment, version)
        except LogCorrupt as error:
            advised = await with_advice(log, fragment, version, error)
            return None if GOES_ON in advised.detail and version in accepted else advised

    for asked in batched(versions, AHEAD):
        for found in await asyncio.gather(*map(read, asked)):
            if isinstance(found, LogCorrupt):
                raise found
            if found is not None:
                commits.append(found)
    return commits


async def _require_all(
    log: Log,
    fragment: int,
    versions: Iterable[int],
    end: int,
    newest: int,
    snapshots: Sequence[tuple[int, str]],
    accepted: Collection[int],
) -> None:
    """Raise `LogCorrupt` if the commit of one of these versions is missing. `end`: the newest version with a commit;
    `newest`: the newest one with any object."""
    for asked in batched(versions, AHEAD):
        found = await asyncio.gather(*(is_there(log.store, commit_key(fragment, version)) for version in asked))
        for version, there in zip(asked, found, strict=True):
            if not there:
                passed = await _goes_on(log, fragment, version, [at for at, _ in snapshots if at <= newest])
                if passed and version in accepted:
                    continue
                gone = _gone(version, newest, commits=end > version)
                more = f"{lacking(version, newest)}: {GOES_ON}" if passed else gone
                raise LogCorrupt(commit_key(fragment, version), more, (fragment, version - 1))


async def _goes_on(log: Log, fragment: int, version: int, snapshots: Iterable[int]) -> bool:
    """Return whether syncers can go on from one of these snapshots, although an object up to `version` is missing.

    `snapshots`: their versions. A syncer uses a snapshot only together with the commit that published it.
    """
    for at in sorted(snapshots, reverse=True):
        if at > version and await is_there(log.store, commit_key(fragment, at)):
            return True
    return False


async def with_advice(log: Log, fragment: int, version: int, error: LogCorrupt) -> LogCorrupt:
    """Return an error about a version's object; if a later snapshot is there, it says that only `replay` needs it."""
    if error.key.startswith(MEMBERS) or GOES_ON in error.detail:
        return error
    if not await _goes_on(log, fragment, version, [at for at, _ in await log.snapshots(fragment)]):
        return error
    return LogCorrupt(error.key, f"{error.detail}: {GOES_ON}", refused=error.refused)


def batched(values: Iterable[int], count: int) -> Iterator[Sequence[int]]:
    """Yield values, at most `count` at a time."""
    left = iter(values)
    while found := tuple(islice(left, count)):
        yield found


async def require_chain(log: Log, fragment: int, head: int) -> None:
    """Raise `LogCorrupt` if a commit is missing below `head`. A fold does not notice this if a snapshot lies beyond it.

    Reads all commits from the oldest snapshot that can still be folded. Raises `Unavailable`.
    """
    at = await earliest(log, fragment)
    try:
        async for commit in log.commits(fragment, at):
            at = commit.version
            if at >= head:
                return
    except LogCorrupt as error:
        if error.key.startswith(MEMBERS):
            raise  # its detail has the advice
        raise LogCorrupt(error.key, f"{error.detail}: {GOES_ON}", (fragment, at)) from None
    if at < head:
        raise LogCorrupt(commit_key(fragment, at + 1), f"{lacking(at + 1, head)}: {GOES_ON}", (fragment, at))

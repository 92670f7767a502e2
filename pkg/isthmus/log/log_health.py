"""The condition of a log: its newest commits, missing or damaged objects, and fragments that stand still."""

import asyncio
import math
import operator
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from isthmus.errors import Denied, LogCorrupt
from isthmus.format.records.keys import UPDATES, commit_key, values_prefix
from isthmus.format.rules import KEPT_VERSIONS, MIN_AGE_S
from isthmus.log import Commit, Log
from isthmus.log.holes import GOES_ON, Holes, accept_flag, require_commits, require_readable, with_advice
from isthmus.log.run import Run
from isthmus.runtime.disk import Room, room_in
from isthmus.runtime.urls import Place
from isthmus.store.base import is_there
from isthmus.wording import agreeing, fragments, key_flag, listed

T = TypeVar("T")

STANDS = 8
"""A fragment stands still when most other fragments were merged this many times since its last merge."""

LOOKS_AT_ONCE = 8

NEWEST = 3
"""The least number of commits before a fragment's newest one that are read, so that damage to them is noticed soon. The
values of so many versions before the newest one are looked for."""

RECENT = 24
"""Commits of all fragments that are read at least, so that what they say of a learner does not rest on a few."""

GROWN = 8 * KEPT_VERSIONS
"""Versions from which on a run whose garbage was never collected is reported."""

LEFT_S = 2 * MIN_AGE_S
"""An object that is older than this many seconds would be gone if garbage was collected once an hour."""

APART_S = 3600.0
"""Times of two syncers' clocks that differ by less than this many seconds do not show which of them was earlier."""

LEARNERS_NAMED = 3
"""The most learners that a sentence names."""

ROOM = 16 << 20
"""A disk is full if it has less room than this many bytes, or than eight bytes a parameter: no checkpoint fits then."""

FILES = 64
"""It is full, too, if it can hold fewer than this many files more for each fragment: some versions have as many."""


@dataclass(frozen=True, slots=True)
class LogState:
    """The condition of a log when it was read."""

    heads: Sequence[Commit | None]
    """The newest readable commit of each fragment; None if there is none."""
    recent: Sequence[Commit] = ()
    """The newest commits of all fragments, those of `heads` included, in no order."""
    wrong: Mapping[int, str] = field(default_factory=dict)
    """By fragment, the object that is missing or damaged, and how."""
    standing: Sequence[int] = ()
    """Fragments that stand still (see `STANDS`)."""
    uncollected: int = 0
    """Versions of the first fragment, if they are many and nothing was ever collected; else 0."""
    whole_log: bool = True
    """Whether all commits were looked for, not only those since the newest snapshots."""


async def look(
    log: Log,
    hints: Mapping[int, int] | None = None,
    *,
    objects: bool = False,
    suspects: Mapping[int, Collection[int]] | None = None,
    older: int = 0,
    accepted: Holes | None = None,
) -> LogState:
    """Return the condition of a log.

    `hints`: by fragment, a version that probably exists. `objects`: also look whether the objects that a new syncer
    needs are there, in their sizes; that they are what commits say is checked by `replay` alone. `suspects`: by
    fragment, older versions whose commits are read as well. `older`: how many more of the older commits are read, of
    all fragments together, chosen at random. `accepted`: holes that are not reported if the run goes on without them.
    Raises `Unavailable`, and `Denied` if commits may not be read.
    """
    older_each = math.ceil(older / len(log.run.layout.fragments))
    slots = asyncio.Semaphore(LOOKS_AT_ONCE)
    wrong: dict[int, str] = {}
    from_first: list[bool] = []
    recent: list[Commit] = []
    before = max(NEWEST, math.ceil(RECENT / len(log.run.layout.fragments)))

    def by_chance(head: int) -> list[int]:
        among = range(1, max(1, head - before))
        return sorted(log.runtime.random.sample(among, min(older_each, len(among))))

    async def one(p: int) -> Commit | None:
        newest, known = None, (accepted or {}).get(p, ())
        head, holes = 0, list[LogCorrupt]()

        async def checked(check: Awaitable[T], otherwise: T) -> T:
            """Note a hole that the run goes on without: it must not hide damage that stops the fragment."""
            try:
                return await check
            except LogCorrupt as error:
                if GOES_ON not in error.detail:
                    raise
                holes.append(error)
                return otherwise

        async with slots:
            try:
                newest = await log.newest(p, (hints or {}).get(p, 0))
                head = newest.version if newest else 0
                # The newest commits may have been skipped: the search for the end begins at a hint or a snapshot.
                recent.extend(filter(None, [newest]))
                recent.extend(
                    await checked(require_readable(log, p, range(max(1, head - before), head), known), list[Commit]())
                )
                from_first.append(await checked(require_commits(log, p, head, known), 2) <= 1)
                others = [*(suspects or {}).get(p, ()), *by_chance(head)]
                await checked(require_readable(log, p, others, known), list[Commit]())
                if objects:
                    await require_objects(log, p, head)
                await checked(require_values(log, p, head, accepted=known), None)
            except LogCorrupt as error:
                holes.insert(0, error)
                newest = newest or await _last_readable(log, p)
        if holes:
            wrong[p] = str(holes[0])
        return newest

    heads = await asyncio.gather(*(one(f.index) for f in log.run.layout.fragments))
    still = await _standing(log, heads, wrong)
    grown = await uncollected(log, heads[0].version) if heads[0] is not None and 0 not in wrong else 0
    return LogState(heads, recent, dict(sorted(wrong.items())), still, grown, all(from_first))


async def require_objects(log: Log, p: int, head: int) -> None:
    """Raise `LogCorrupt` if an update or a value since the newest snapshot is missing or has another size.

    A commit that heals is a place to start as a snapshot is: what was merged before it is not looked for. Does nothing
    without permission to list them. Raises `Unavailable`.
    """
    begin = max((version for version, _ in await log.snapshots(p) if version <= head), default=0)
    if begin == head:
        return
    try:
        entries = [*await log.store.list(f"{UPDATES}{p:05d}/"), *await log.store.list(values_prefix(p))]
    except Denied:
        return
    sizes = {entry.key: entry.size for entry in entries}
    commits = list[Commit]()
    for version in range(begin + 1, head + 1):
        commit = await log.commit(p, version)
        if commit is None:
            break
        if commit.header.healed is not None:
            commits.clear()
        commits.append(commit)
    for commit in commits:
        version = commit.version
        for given in commit.header.inputs:
            if (size := sizes.get(given.key)) != given.bytes:
                there = "is missing" if size is None else f"has {size} bytes"
                raise LogCorrupt(
                    given.key, f"{there}, and version {version} merged {given.bytes} bytes", (p, version - 1)
                )
        if commit.header.value_key not in sizes:
            raise LogCorrupt(
                commit.header.value_key, f"is missing, and version {version} published it", (p, version - 1)
            )


async def require_values(
    log: Log,
    p: int,
    head: int,
    read: Callable[[Log, Commit], Awaitable[None]] | None = None,
    accepted: Collection[int] = (),
) -> None:
    """Raise `LogCorrupt` if the value that one of the newest versions published is missing.

    `read`: also reads a value, and raises `LogCorrupt` if it is damaged. `accepted`: versions whose values may be gone
    if a snapshot has what they led to, and whose commits may be damaged. Values from before a healing commit, which
    nobody reads, are not looked for; nor are those of packed commits, which the collector may have deleted. Does
    nothing without permission to read values. Raises `Unavailable`.
    """
    for version in range(head, max(0, head - NEWEST - 1), -1):
        try:
            commit = await log.commit(p, version)
        except LogCorrupt as error:
            if version not in accepted:
                raise await with_advice(log, p, version - 1, error) from None
            commit = None
        if commit is None or commit.in_segment:
            return
        key = commit.header.value_key
        try:
            if not await is_there(log.store, key):
                raise LogCorrupt(key, f"is missing, and version {version} published it")
            if read is not None:
                await read(log, commit)
        except LogCorrupt as error:
            advised = await with_advice(log, p, version - 1, error)
            if GOES_ON not in advised.detail or version not in accepted:
                raise advised from None
        except Denied:
            return
        if commit.header.healed is not None:
            return


async def uncollected(log: Log, head: int) -> int:
    """Return the first fragment's head if it is `GROWN` or more and garbage is never collected; else 0.

    A young run has nothing to collect yet: its oldest published value must be `LEFT_S` older than its newest, by the
    store's own times. Returns 0 without permission to list values, and if the first commit is damaged.
    """
    if head < GROWN:
        return 0
    try:
        first = await log.commit(0, 1)
        if first is not None and first.in_segment:
            return 0
        times = [entry.modified for entry in await log.store.list(values_prefix(0))]
    except (Denied, LogCorrupt):
        return 0
    return head if times and max(times) - min(times) > LEFT_S else 0


def collects(url: str, versions: int, accepted: Holes | None = None, *, signed: bool) -> str:
    """Return the warning for a run with this many versions whose garbage was never collected.

    `accepted`: holes that are accepted, and that the collector must accept, too. `signed`: whether the run is, so that
    the collector needs its key.
    """
    key = key_flag("collector", signed=signed)
    return (
        f"nothing was collected in {versions:,} versions: the run grows until its store is full. isthmus gc "
        f"{url}{accept_flag(accepted or {})} "
        f"lists what can be deleted, --apply{key} deletes it, and --apply{key} --every 3600 repeats this hourly"
    )


def lacks(p: int, head: int, version: int, learners: Sequence[str]) -> str:
    """Return in words that learners have a later version of a fragment than its log, whose newest is `head`."""
    return (
        f"{listed(learners, LEARNERS_NAMED)} {agreeing(len(learners), 'has', 'have')} version {version} of "
        f"fragment {p}, and its log ends at version {head}: no update on that version can be merged"
    )


def know_it(run: str = "") -> str:
    """Return which checkpoints are to be deleted before learners can go on without a lost commit.

    isthmus heal names them: for `run`, or without one below this text.
    """
    named = f"that isthmus heal {run} then names" if run else "named below"
    return f"the checkpoints {named}, since they know the lost version (a learner that is started names its own, too)"


ALONE = "a learner that has no older checkpoint goes on with the run's model alone, from its first step"


def restores(p: int, head: int, run: str = "") -> str:
    """Return what to do about versions that learners have and the log lacks. `run`: see `know_it`."""
    return (
        f"restore {commit_key(p, head + 1)} and what follows it from a backup. Without one, stop all learners and "
        f"syncers, delete {know_it(run)}, and start them again: the fragment goes on from version {head}; {ALONE}"
    )


def room_left(run: Run) -> Room | None:
    """Return the room that is left on a full disk of a run in a folder; None for any other disk, and for a bucket."""
    folder = Place.of(run.url).folder
    if folder is None:
        return None
    left = room_in(folder)
    few = left.files is not None and left.files < FILES * len(run.layout.fragments)
    return left if few or left.bytes < max(ROOM, 8 * run.layout.size) else None


async def _last_readable(log: Log, p: int) -> Commit | None:
    """Return the newest commit before the first unreadable one, starting at the newest snapshot with a readable
    commit."""
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
    async def before(p: int, head: Commit | None) -> Commit | None:
        """Return the fragment's `STANDS`-th commit from the end; None if it has fewer."""
        if head is None or head.version < STANDS or p in wrong:
            return None
        try:
            return await log.commit(p, head.version - STANDS + 1)
        except LogCorrupt:
            return None

    since = await asyncio.gather(*(before(p, head) for p, head in enumerate(heads)))
    return standing(heads, since, is_later)


def is_later(commit: Commit, other: Commit) -> bool:
    """Return whether a commit was made after another one, of any fragment, however wrong the clocks of syncers are.

    A learner's lives and steps only go up, so they decide where both commits merged the same learners. Else times of
    one clock decide, or of two clocks that are over `APART_S` apart.
    """
    known = {given.learner: (given.incarnation, given.step) for given in other.header.inputs}
    both = [
        (given.incarnation, given.step) > known[given.learner]
        for given in commit.header.inputs
        if given.learner in known
    ]
    if both:
        return all(both)
    apart = commit.header.written_at - other.header.written_at
    return apart > (0.0 if commit.header.writer == other.header.writer else APART_S)


def standing(
    last: Sequence[object], since: Sequence[object], later: Callable[[Any, Any], bool] = operator.gt
) -> list[int]:
    """Return the fragments that stand still.

    `last`: each fragment's last merge, None if it has none; `since`: its `STANDS`-th merge from the end. `later`: tells
    whether one merge was later than another; by default, merges are given as times.
    """
    return [
        p
        for p, at in enumerate(last)
        if is_most(began is not None and (at is None or later(began, at)) for q, began in enumerate(since) if q != p)
    ]


def stands(still: Sequence[int]) -> str:
    """Return in words that these fragments stand still."""
    stand = agreeing(len(still), "stands", "stand")
    return f"{fragments(still)} {stand} still: most others were merged at least {STANDS} times since then"


def is_most(moved: Iterable[bool]) -> bool:
    """Return whether more than half of the values are true."""
    every = list(moved)
    return sum(every) > len(every) / 2

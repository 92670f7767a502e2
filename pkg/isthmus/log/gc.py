"""Garbage collection: find and delete the objects that a run no longer needs.

The log decides what may go; an object's age only delays its deletion. Commits are never deleted. Those below the oldest
kept snapshot are packed into segments, and a small pointer stays under each one's key, so that no stalled syncer can
create that commit again. A snapshot may go if it is below the oldest one kept, except version 0. A value may go if it
is not above the head and no commit that may still be folded names it. An update may go if no such commit names it, and
an older commit merged it or its base is too old for any staleness. The snapshot and the values from which the newest
promoted version is folded stay, as followers of promoted versions read them.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby

from isthmus.errors import Denied, LogCorrupt, ObjectMissing, RecordInvalid, StoreFull, Unavailable
from isthmus.format.records import frame
from isthmus.format.records.frame import Blob, Kind
from isthmus.format.records.keys import (
    BUS,
    LEARNERS,
    MEMBERS,
    SCRATCH,
    UPDATES,
    commit_key,
    incarnation_in,
    is_versioned,
    learner_in,
    segment_key,
    snapshots_prefix,
    values_prefix,
    version_in,
)
from isthmus.format.records.objects import SCHEMA, SEGMENT_COMMITS_MAX, ClaimHeader, PackedHeader, SegmentHeader
from isthmus.format.rules import CHECKPOINTS_KEPT, KEPT_VERSIONS, MIN_AGE_S, STALENESS_MAX, MemberRole
from isthmus.log import Commit, Log, fold, promotions
from isthmus.log.holes import Holes, ask_heal, batched
from isthmus.log.listing import by_learner, checkpoints_in, parts_in
from isthmus.reasons import Reason
from isthmus.store import Entry, checked

logger = logging.getLogger(__name__)

_DELETES_AT_ONCE = 16

NOBODYS = frozenset({Reason.UNSIGNED, Reason.NOT_A_MEMBER})
"""Reasons that make a checkpoint or a claim junk for good: damage in transit neither makes nor removes a valid
signature."""

SAID_S = 86400.0
"""Age in seconds below which messages of a bus in the store stay, so that `status` can tell how a process ended."""

UNNAMED = ("snapshots", "checkpoints", "scratch", "messages")
"""Kinds of objects that no commit names, in the order in which they are deleted."""


@dataclass(slots=True)
class Garbage:
    """The objects that may be deleted, by kind."""

    doomed: dict[str, list[Entry]] = field(default_factory=dict)
    young: int = 0
    """Number of objects that are not needed but still too young."""
    messages: int = 0
    """Number of objects with messages that stay, whatever the least age that was asked for."""
    pack: list[list[tuple[int, int]]] = field(default_factory=list)
    """Sequences of (fragment, version) whose commits are packed into one segment each."""
    starts: list[int] = field(default_factory=list)
    """Per fragment, the version from which it can be folded after the collection."""
    heads: list[int] = field(default_factory=list)
    accepted: Holes = field(default_factory=dict)
    """Commits that are lost for good: what is before them is collected nevertheless."""
    promoted: int | None = None
    """The newest promoted version, whose values stay foldable; None: none is promoted."""

    @property
    def bytes(self) -> int:
        """Bytes that deleting frees."""
        return sum(entry.size for entries in self.doomed.values() for entry in entries)

    @property
    def objects(self) -> int:
        """Number of objects to be deleted."""
        return sum(map(len, self.doomed.values()))


async def plan(
    log: Log,
    *,
    keep: int = KEPT_VERSIONS,
    min_age_s: float = MIN_AGE_S,
    accepted: Holes | None = None,
    progress: Callable[[float], None] = lambda _: None,
) -> Garbage:
    """Return what may be deleted while the newest `keep` versions of each fragment stay foldable. Deletes nothing.

    `accepted`: commits that may be missing or damaged if they are older than the versions that are kept.
    Raises `LogCorrupt` if a commit that is not packed is missing or damaged: nothing should be collected then.
    """
    found = Garbage(accepted=accepted or {})
    before = log.runtime.wall() - min_age_s
    promotion = await promotions.newest(log)
    found.promoted = promotion.version if promotion else None
    fragments = log.run.layout.fragments
    for number, fragment in enumerate(fragments):
        try:
            await _plan_fragment(log, fragment.index, keep, before, found)
        except LogCorrupt as error:
            if error.refused or error.key.startswith(MEMBERS):
                raise  # nothing is known to be damaged, or its detail has the advice
            if any(error.key == commit_key(fragment.index, v) for v in found.accepted.get(fragment.index, ())):
                why = "it is accepted, and nothing is collected until it is older than all that is kept"
                raise LogCorrupt(
                    error.key, f"{error.detail}: {why}: collect again later, or keep less (--keep, --min-age)"
                ) from None
            raise LogCorrupt(
                error.key, f"{error.detail}: nothing is collected; {ask_heal(log.run.url, signed=log.members.signed)}"
            ) from None
        progress((number + 1) / (len(fragments) + 1))
    listed = await log.store.list(LEARNERS)
    held_by = by_learner(checkpoints_in(listed))
    keep_of = {name: await _newest_genuine(log, held) for name, held in held_by.items()}
    _doom(found, "checkpoints", (e for name, held in held_by.items() for e in held if e not in keep_of[name]), before)
    # A part belongs to the checkpoint of its incarnation and step. A part whose checkpoint is not written yet is young.
    kept = {_stand(entry.key) for entries in keep_of.values() for entry in entries}
    _doom(found, "checkpoints", (e for e in parts_in(listed) if _stand(e.key) not in kept), before)
    # An interrupted `isthmus doctor` leaves probe objects behind.
    probes = [e for e in listed if e.key.split("/")[2:3] == ["doctor"]]
    _doom(found, "scratch", [*await log.store.list(SCRATCH), *probes], before)
    # A process of a bus in the store writes its words again with every heartbeat, so old ones are of one that ended.
    with suppress(Denied):  # policies of earlier versions do not allow it, and no such run has its bus in the store
        said = await log.store.list(BUS)
        old = [entry for entry in said if entry.modified <= log.runtime.wall() - SAID_S]
        found.messages = len(said) - len(old)
        _doom(found, "messages", old, before)
    if log.signer is not None and log.signer.author in log.members.current.owners:
        # Only the owner deletes claims. A collector that removed a valid claim could make a learner begin an
        # incarnation that belongs to another process.
        _doom(found, "claims", await _nobodys(log, [e for e in listed if incarnation_in(e.key)]), before)
    progress(1.0)
    return found


async def apply(log: Log, doomed: Garbage, progress: Callable[[float], None] = lambda _: None) -> None:
    """Pack and delete what a plan names. If it is interrupted, part of the work is done and nothing is broken.

    Commits are packed first, because replay reads the commits that are not packed; damage found there stops the
    collection. All snapshots are deleted next: a snapshot that stayed without the objects after it would be a start
    that leads nowhere. If there is no space for a segment, objects that no commit names are deleted first, then those
    that the commits to be packed name. Raises `Unavailable` if there is still no space.
    """
    done, total = 0, max(1, len(doomed.pack) + doomed.objects)
    slots = asyncio.Semaphore(_DELETES_AT_ONCE)

    async def delete(entries: Iterable[Entry]) -> None:
        async def one(entry: Entry) -> None:
            nonlocal done
            async with slots:
                await log.store.delete(entry.key)
            done += 1
            progress(done / total)

        async with asyncio.TaskGroup() as tasks:
            for entry in entries:
                tasks.create_task(one(entry))

    left = {kind: list(entries) for kind, entries in doomed.doomed.items()}

    async def make_room(run: list[tuple[int, int]]) -> None:
        """Delete one kind of objects that no commit names; if none is left, values or updates up to these commits."""
        for kind in UNNAMED:
            if entries := left.pop(kind, []):
                return await delete(entries)
        for kind in ("values", "updates"):
            of_run = [entry for entry in left.get(kind, ()) if _is_of(entry, run)]
            left[kind] = [entry for entry in left.get(kind, ()) if not _is_of(entry, run)]
            if of_run:
                return await delete(of_run)
        raise Unavailable(
            f"{log.store.url} is full, and nothing is left to be collected that would make room for a segment of "
            "commits: give it more space"
        )

    for run in doomed.pack:
        while True:
            try:
                await _pack(log, run, doomed.accepted)
                break
            except StoreFull:
                await make_room(run)
        done += 1
        progress(done / total)
    await delete(left.pop("snapshots", []))
    await delete(entry for entries in left.values() for entry in entries)


def _is_of(entry: Entry, run: list[tuple[int, int]]) -> bool:
    """Return whether a value or an update is of these commits' fragment, and of their last version or an older one."""
    return int(entry.key.split("/")[1]) == run[0][0] and version_in(entry.key) <= run[-1][1]


async def _plan_fragment(log: Log, p: int, keep: int, before: float, found: Garbage) -> None:
    newest = await log.newest(p)
    head = newest.version if newest else 0
    # `begin` reads and checks the whole snapshot: older ones may be deleted only if a fold can start from this one.
    start = (await fold.begin(log, p, fold.Merging(log), at_most=max(0, head - keep))).version
    promoted_from, kept_values = await _needed_by_promoted(log, p, found.promoted)
    snapshots = [e for e in await _versioned(log, snapshots_prefix(p)) if version_in(e.key) > 0]
    # A snapshot that is too young to be deleted can be started from, so the objects after it stay too.
    young = [version_in(e.key) for e in snapshots if e.modified > before]
    found.young += sum(version < start for version in young)
    start = min([start, *young])
    packed_to = await _plan_packing(log, p, start, before, found)
    kept_updates, settled_updates = set(), set()
    # If the commits below `start` are not all packed, replay can begin at an older version and read them. Then the
    # objects that they name stay, however old these are by the clock of another machine.
    floor = start if packed_to == start - 1 > 0 else packed_to
    lost = [version for version in found.accepted.get(p, ()) if version < start]
    async for commit in _between(log, p, min(floor, head - STALENESS_MAX - 1), head, lost):
        names = {given.key for given in commit.header.inputs}
        if commit.version > floor:
            kept_values.add(commit.header.value_key)
            kept_updates |= names
        else:
            settled_updates |= names
    values = await _versioned(log, values_prefix(p))
    _doom(
        found,
        "values",
        (e for e in values if version_in(e.key) <= head and version_in(e.key) != start and e.key not in kept_values),
        before,
    )
    _doom(
        found,
        "snapshots",
        (e for e in snapshots if version_in(e.key) < start and version_in(e.key) != promoted_from),
        before,
    )
    _doom(
        found,
        "updates",
        (
            e
            for e in await _versioned(log, f"{UPDATES}{p:05d}/")
            if e.key not in kept_updates and (version_in(e.key) < head - STALENESS_MAX or e.key in settled_updates)
        ),
        before,
    )
    found.starts.append(start)
    found.heads.append(head)


async def _needed_by_promoted(log: Log, p: int, promoted: int | None) -> tuple[int, set[str]]:
    """Return the version of the snapshot from which a promoted version is folded, and the keys of the values after it.

    `promoted`: None: none is promoted; then 0 and no keys. Raises `LogCorrupt` if the version cannot be folded.
    """
    if promoted is None:
        return 0, set()
    at = await fold.begin(log, p, fold.PublishedValue(log), at_most=promoted)
    return at.version, {commit.header.value_key async for commit in _between(log, p, at.version, promoted)}


async def _plan_packing(log: Log, p: int, start: int, before: float, found: Garbage) -> int:
    """Plan which commits below `start` to pack; return the newest version up to which all are, or will be, packed."""
    plain: list[int] = []
    packed_to, young, lost = 0, start, set[int]()
    for version in range(start - 1, 0, -1):
        accepted = version in found.accepted.get(p, ())
        try:
            commit = await log.commit(p, version)
        except LogCorrupt:
            if not accepted:
                raise
            commit = None
        if commit is None and accepted:
            lost.add(version)
            continue
        if commit is None:
            raise LogCorrupt(commit_key(p, version), "is missing below the end of the log")
        if commit.in_segment:
            packed_to = version
            break  # commits are packed in ascending order, so all below are packed
        plain.append(version)
        if commit.header.written_at > before:
            young = version
    # Commits are packed in ascending order: those after one that is too young must wait.
    ripe = [version for version in reversed(plain) if version < young]
    found.young += len(plain) - len(ripe)
    packed_to = ripe[-1] if ripe else packed_to
    for _, unbroken in groupby(enumerate(ripe), lambda numbered: numbered[1] - numbered[0]):
        for versions in batched((version for _, version in unbroken), SEGMENT_COMMITS_MAX):
            found.pack.append([(p, version) for version in versions])
    while packed_to + 1 in lost:
        packed_to += 1
    return packed_to


async def _pack(log: Log, run: list[tuple[int, int]], accepted: Holes) -> None:
    """Copy commits into a segment, then put a pointer under each one's key, in ascending order.

    Raises `LogCorrupt` if a commit is not the one that its successor names. `accepted`: commits that may be lost.
    """
    p, first = run[0]
    blobs = []
    lost = run[-1][1] + 1 in accepted.get(p, ())
    try:
        following = await log.commit(p, run[-1][1] + 1)
    except LogCorrupt:
        if not lost:
            raise
        following = None
    for _, version in reversed(run):
        key = commit_key(p, version)
        blob = await log.fetch(key, Kind.COMMIT)
        if frame.kind_of(blob) == Kind.PACKED:
            return  # another collector has packed it meanwhile
        # A commit that was damaged in transit must not become the only copy.
        # Of a commit before a lost one, only its own checksum tells.
        named = lost if following is None else frame.digest(blob) == following.header.previous
        if not named:
            raise LogCorrupt(
                key, f"is not the commit that {commit_key(p, version + 1)} names as the one before it: nothing more is "
                f"collected; {ask_heal(log.run.url, signed=log.members.signed)}"
            )  # fmt: skip
        following = log.verifier.commit(blob, p, version)
        blobs.append(blob)
    blobs.reverse()
    header = SegmentHeader(
        schema=SCHEMA, run=log.run.digest, fragment=p, first=first, sizes=tuple(len(blob) for blob in blobs)
    )
    out = frame.draft(Kind.SEGMENT, header, sum(header.sizes))
    at = 0
    for blob in blobs:
        out.payload[at : at + len(blob)] = blob
        at += len(blob)
    key = segment_key(p, first, await log.sealed_digest(out.blob))
    await log.store.put(key, out.blob)
    offset = len(out.blob) - at
    for (_, version), blob in zip(run, blobs, strict=True):
        pointer = PackedHeader(
            schema=SCHEMA,
            run=log.run.digest,
            fragment=p,
            version=version,
            segment=key,
            offset=offset,
            size=len(blob),
            digest=frame.digest(blob),
        )
        stands = frame.draft(Kind.PACKED, pointer).blob
        log.seal(stands)
        await log.store.put(commit_key(p, version), stands)
        offset += len(blob)


async def _between(log: Log, p: int, after: int, until: int, lost: Collection[int] = ()) -> AsyncIterator[Commit]:
    """Yield the commits after a version, up to another one. Raises `LogCorrupt` if one of them is missing or damaged.

    `lost`: versions that are left out if they are.
    """
    at = max(0, after)
    while at < until:
        try:
            async for commit in log.commits(p, at):
                if commit.version > until:
                    return
                yield commit
                at = commit.version
                if at == until:
                    return
        except LogCorrupt:
            if at + 1 not in lost:
                raise
        at += 1
        if at not in lost:  # what later commits name would be taken for garbage
            raise LogCorrupt(commit_key(p, at), "is missing below the end of the log")


async def _newest_genuine(log: Log, held: Sequence[Entry]) -> Sequence[Entry]:
    """Return the checkpoints of a learner to keep: the newest from which it can resume, and others that may be valid.

    In a signed run each checkpoint is checked for this, since others may have stored later ones that no learner may
    use.
    """
    if not log.members.signed:
        return held[:CHECKPOINTS_KEPT]
    found, spared = list[Entry](), list[Entry]()
    for entry in held:
        if len(found) == CHECKPOINTS_KEPT:
            break
        if entry.size > log.checkpoint_most:
            logger.warning(
                "%s is kept: with %d bytes it is too large to be judged here; delete it if its learner did not write "
                "it", entry.key, entry.size,
            )  # fmt: skip
            spared.append(entry)  # its learner may have written it and can read it
            continue
        try:
            blob = await checked.read(log.store, log.runtime, entry.key, entry.size, cut=True)
            await log.open_checkpoint(blob, entry.key)
        except Denied as error:
            logger.warning(
                "all checkpoints are kept, because this process may not read them (%s): give it a collector's rights "
                "(isthmus doctor %s --role collector --key COLLECTOR_KEY_FILE, beside it, names what is missing)",
                error, log.run.url,
            )  # fmt: skip
            return held
        except ObjectMissing:
            spared.append(entry)  # it is listed, so the store may return it another time
        except RecordInvalid as error:
            own = error.reason == Reason.OVERSIZED and _speaks_for(log, blob, entry.key)
            if own:
                found.append(entry)  # its header is longer than other processes decode, but its own learner can read it
            elif error.reason not in NOBODYS:
                spared.append(entry)  # it may have been damaged in transit and be whole in the store
        else:
            found.append(entry)
    return [*found, *spared]


async def _nobodys(log: Log, claims: Sequence[Entry]) -> list[Entry]:
    """Return the claims that no present or former member of a signed run has made: junk stored by others."""
    found = []
    for entry in claims:
        try:
            await log.open(await log.fetch(entry.key, Kind.CLAIM), entry.key, ClaimHeader)
        except ObjectMissing:
            continue
        except RecordInvalid as error:
            # Damage in transit neither makes nor removes a valid signature, except in the first bytes of an object.
            if error.reason in NOBODYS:
                found.append(entry)
    return found


def _speaks_for(log: Log, blob: Blob, key: str) -> bool:
    """Return whether the author of an object, whose signature was checked, may write under the name in its key."""
    return log.members.current.permits(frame.author_of(blob), (MemberRole.LEARNER,), learner_in(key))


def _stand(key: str) -> tuple[str, ...]:
    """Return the learner, incarnation and step in the key of a checkpoint or of a part of a checkpoint."""
    _, learner, incarnation, *_, name = key.split("/")
    return learner, incarnation, name.split("-")[0]


async def _versioned(log: Log, prefix: str) -> list[Entry]:
    return [e for e in await log.store.list(prefix) if is_versioned(e.key)]


def _doom(found: Garbage, kind: str, entries: Iterable[Entry], before: float) -> None:
    for entry in entries:
        if entry.modified > before:
            found.young += 1
        else:
            found.doomed.setdefault(kind, []).append(entry)

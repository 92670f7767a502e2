"""Healing a fragment whose log cannot be folded: it restarts from its published value, without its momentum.

Recovery folds the updates that were merged since the newest snapshot. If one of them is missing or damaged and no
remaining syncer holds the state, no syncer can continue, although every learner still has the published value. A
healing commit then records this permanently. It merges nothing, names the missing object, and brings the whole
published value, with a master equal to it and no momentum. Everything merged before stays in the model and in the log,
but the states in between can no longer be verified. The momentum, and what the codec had still to publish, are lost.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import compress

from typing_extensions import override

from isthmus.codecs.kernels import ARITHMETIC, F32
from isthmus.errors import Denied, LogCorrupt, ObjectMissing, RecordInvalid
from isthmus.format.layout import TensorClass
from isthmus.format.records import frame
from isthmus.format.records.keys import (
    LEARNERS,
    MEMBERS,
    UPDATES,
    commit_in,
    commit_key,
    incarnation_in,
    is_versioned,
    learner_in,
    snapshot_key,
    value_key,
    version_in,
)
from isthmus.format.records.objects import SCHEMA, CommitHeader, Healed, UpdateHeader, Waited
from isthmus.log import Commit, Log, fold, merge
from isthmus.log.checkpoint_head import read_head
from isthmus.log.holes import (
    FROM_BEFORE,
    GOES_ON,
    IN_A_NEW_RUN,
    Beyond,
    known_beyond,
    last_missing,
    require_chain,
    require_whole,
)
from isthmus.log.listing import all_or, by_learner, checkpoints_in
from isthmus.log.log_health import ALONE, LOOKS_AT_ONCE, know_it, lacks, require_objects, require_values, restores
from isthmus.log.merge import State
from isthmus.log.verify import HEALER
from isthmus.runtime.urls import Place
from isthmus.store import Entry, checked
from isthmus.store.base import is_there
from isthmus.wording import agreeing, listed

ADOPTED_MAX = 3
"""The most learners that are named as resting on a damaged commit."""

RESTORE = (
    "restore that object from a backup, or go on in a new run from the newest version that can be exported "
    "(`isthmus export --version N`, then `isthmus init --from`)"
)

MAKE_AGAIN = (
    "Start a syncer unless one runs; once isthmus status says that syncers hold all fragments (mend those first that "
    "cannot be folded), stop them with SIGTERM, and start them again: they write snapshots, which have all that is "
    "missing"
)


@dataclass(frozen=True, slots=True)
class Starts:
    """The newest start of each learner, and what its newest checkpoint says that it has seen."""

    numbers: Mapping[str, int]
    seen: Sequence[tuple[Entry, tuple[int, ...]]]
    """Each newest checkpoint, and by fragment the last commit that it knows. A start without a checkpoint has none."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Whether a fragment's log can be folded to its end and, if not, whether the fragment can be healed."""

    fragment: int
    head: int
    head_at: float
    """When the newest commit was written, in seconds since 1970 by its writer's clock; 0: version 0, or unknown."""
    wound: Healed | None = None
    """What a healing commit would record; None if the fragment is sound or cannot be healed."""
    hopeless: str = ""
    """Why the fragment cannot be healed, or empty."""
    hole: int = 0
    """The version whose commit or value is missing or damaged, and which the run does not need; 0 if there is none."""
    hole_to: int = 0
    """The last of the commits that are missing in a row from there on."""
    goes_on_from: int | None = None
    """The version from which the fragment goes on without the lost commits that learners know; None: none is lost."""
    lacking: str = ""
    """What is missing of a log that can be folded all the same, and what to do; empty if nothing is."""

    @property
    def holed(self) -> bool:
        """Whether only objects are missing or damaged that the run does not need: see `holes.HOLE`."""
        return self.hole > 0

    @property
    def sound(self) -> bool:
        """Whether the log can be folded to its end, has no hole, and lacks nothing."""
        return self.wound is None and not self.hopeless and not self.lacking


async def diagnose(
    log: Log, fragments: Sequence[int] | None = None, progress: Callable[[float], None] = lambda _: None
) -> list[Diagnosis]:
    """Return a diagnosis of every fragment, or of the chosen ones, by folding each to its end. Writes nothing.

    Raises `InputError` for a fragment that does not exist, and `Denied` if an update may not be read: it may be
    undamaged.
    """
    chosen = all_or(log, fragments)
    found, starts = [], await newest_starts(log)
    for number, p in enumerate(chosen):
        found.append(await _diagnose(log, p, starts))
        progress((number + 1) / len(chosen))
    return found


async def heal(log: Log, found: Diagnosis) -> Commit | None:
    """Write a healing commit and then its snapshot; return the commit, or None if a syncer has committed meanwhile.

    Raises `LogCorrupt` if the value to start from has been damaged since the diagnosis.
    """
    assert found.wound is not None, "nothing to heal, or nothing to heal it from"
    p, version = found.fragment, found.head + 1
    newest = await log.commit(p, found.head) if found.head else None
    members = await log.members.refresh(log.store)
    published = await _published(log, p, found.wound.source)
    result = merge.healed(version, published, log.run.layout.fragments[p], log.run.digest, log.seal)
    key = value_key(p, version, result.value_digest)
    await log.store.put(key, result.value)
    outer, now = merge.outers(log.run.rules), log.runtime.wall()
    header = CommitHeader(
        schema=SCHEMA,
        run=log.run.digest,
        previous=newest.digest if newest else log.run.digest,
        arithmetic=ARITHMETIC,
        fragment=p,
        version=version,
        inputs=(),
        late=(),
        dense=outer[TensorClass.DENSE],
        embedding=outer[TensorClass.EMBEDDING],
        codec_down="f32",
        cancelled=0,
        value_key=key,
        value_digest=result.value_digest,
        published_digest=result.published_digest,
        state_digest=result.state_digest,
        rejected=(),
        rejected_total=dict(newest.header.rejected_total) if newest else {},
        clipped_total=dict(newest.header.clipped_total) if newest else {},
        waited=_nobody(now),
        writer=HEALER,
        attempt=log.runtime.new_id(),
        written_at=now,
        members=members.version,
        usual_length=newest.header.usual_length if newest else 0.0,
        healed=found.wound,
    )
    body = frame.draft(frame.Kind.COMMIT, header).blob
    log.seal(body)
    written = log.verifier.commit(body, p, version)  # a commit that others would not accept must never take the key
    if not await log.append(p, version, body):
        return None
    blob = merge.snapshot(result.state, p, log.run.digest)
    await log.store.put(snapshot_key(p, version, await log.sealed_digest(blob)), blob)
    return written


class Noting(fold.Merging):
    """Merges as every fold does, and remembers which snapshots could not be believed."""

    def __init__(self, log: Log) -> None:
        super().__init__(log)
        self.passed: dict[int, LogCorrupt] = {}

    @property
    def told(self) -> str:
        """The newest snapshot that was passed over, why it is not believed, and what to do; empty if none was."""
        if not self.passed:
            return ""
        error = self.passed[max(self.passed)]
        return f"{error.key}: {error.detail}; syncers go on from an older one. {MAKE_AGAIN}"

    @override
    async def start(self, fragment: int, version: int, key: str, commit: Commit | None) -> State:
        try:
            return await super().start(fragment, version, key, commit)
        except LogCorrupt as error:
            self.passed[version] = error
            raise


async def _diagnose(log: Log, p: int, starts: Starts) -> Diagnosis:
    try:
        carry = Noting(log)
        at = await fold.fold(log, p, carry)
        try:
            await require_whole(log, p, at.version, lists=True)
            await require_chain(log, p, at.version)
            if lost := await lost_after(log, p, at.version, starts):
                more = f"{agreeing(len(lost.learners), 'this learner has', 'these learners have')} joined again"
                said = f"{lost.said}; {restores(p, at.version)}. isthmus heal goes on saying this until {more}"
                past = f"the fragment has moved past version {lost.version - 1}"
                return Diagnosis(p, at.version, 0.0, hopeless=f"{said}, or {past}", goes_on_from=at.version)
            lacking = await _lacking(log, p, at.version) or carry.told
        except LogCorrupt as error:
            hole = commit_in(error.key) or version_in(error.key) if GOES_ON in error.detail else 0
            to = await last_missing(log, p, hole) if hole else 0
            if commit_in(error.key) == at.version + 1:
                return await _broken(log, Diagnosis(p, at.version, 0.0, hole=hole, hole_to=to), error)
            return Diagnosis(p, at.version, 0.0, hopeless=str(error), hole=hole, hole_to=to)
        return Diagnosis(p, at.version, at.last[-1].header.written_at if at.last else 0.0, lacking=lacking)
    except LogCorrupt as error:
        if error.refused:
            raise Denied(f"{error}{_who_may(log)}") from None
        wrong = error
    try:
        newest = await log.newest(p)
    except LogCorrupt as error:
        return await _broken(log, Diagnosis(p, error.readable[1] if error.readable else 0, 0.0), error)
    head, head_at = (newest.version, newest.header.written_at) if newest else (0, 0.0)
    try:
        source = await _newest_published(log, p)
    except LogCorrupt as error:
        return Diagnosis(p, head, head_at, hopeless=f"no published value can be read: {error}; {RESTORE}")
    broken_at = wrong.readable[1] + 1 if wrong.readable else 1
    wound = Healed(source=source, broken_at=min(broken_at, head), key=wrong.key, why=wrong.detail[:256])
    return Diagnosis(p, head, head_at, wound)


def _who_may(log: Log) -> str:
    """Return who may read updates, after a refusal. In a folder, the refusal has the advice."""
    if Place.of(log.run.url).folder is not None:
        return ". Nothing is known to be damaged"
    whose = "the reader's folder, or of a syncer's"
    return f": only readers and syncers may read updates: diagnose with the env of {whose}"


async def _broken(log: Log, of: Diagnosis, error: LogCorrupt) -> Diagnosis:
    """Return a diagnosis with the damage to an unreadable commit and the advice for it.

    The object under its key may never have been a commit.
    """
    if error.key.startswith(MEMBERS):
        return replace(of, hopeless=str(error))
    p, version, run = of.fragment, commit_in(error.key), log.run.url
    beyond = await known_beyond(log, p, version, lists=True) if version else Beyond((), (), ())
    if not version or beyond.commits:
        missing = IN_A_NEW_RUN in error.detail
        said = str(error) if missing else f"the chain of commits is broken: {error}; {RESTORE}"
        return replace(of, hopeless=said)
    there = [error.key] if await is_there(log.store, error.key) else []
    there += sorted(beyond.keys)
    delete = (
        f"delete {' and '.join(f'{run}/{key}' for key in there)} with the credentials of the store's administrator (no "
        f"participant may delete {agreeing(len(there), 'it', 'them')})"
    )
    go_on = f"and start them again: they go on from version {version - 1}"
    adopted = sorted({name for names in (await _adopted(log, p, version)).values() for name in names})
    if adopted or beyond.others:
        rest = f" Updates of {listed(adopted, ADOPTED_MAX)} rest on it." if adopted else ""
        found = LogCorrupt(error.key, error.detail.removesuffix(f": {FROM_BEFORE}"))
        several = max(beyond.others, default=version) > version
        newest, them = ("the newest commits are lost", "them") if several else ("the newest commit is lost", "it")
        said = (
            f"{newest}: {found}.{rest} Restore {them} from a backup. Without one: if a syncer still "
            "merges this fragment, let it go on for a version or more, and stop it with SIGTERM: it writes a snapshot, "
            f"and the run goes on from that. If none does, stop all syncers and learners, {delete}, "
            f"and {know_it()}, {go_on}; {ALONE}"
        )
        return replace(of, hopeless=said, goes_on_from=version - 1)
    said = (
        f"an object that is no commit is in the place of the next one: {error}. If it was a commit, restore it from a "
        f"backup. If it was not, or there is no backup, stop all syncers, {delete}, {go_on}; start learners that ended "
        "meanwhile, too"
    )
    return replace(of, hopeless=said)


async def _adopted(log: Log, p: int, least: int, starts: Mapping[str, int] | None = None) -> dict[int, list[str]]:
    """Return the learners with a genuine update that rests on a version, by version from `least` on.

    Such a version was committed, and they have adopted it. `starts`: only updates of this start of each learner, and of
    later ones, count: one that was started again since goes on from what the log has. Without permission to read
    updates, none is found. Raises `Unavailable`.
    """
    found = dict[int, set[str]]()
    try:
        for key in [entry.key for entry in await log.store.list(f"{UPDATES}{p:05d}/") if is_versioned(entry.key)]:
            version, learner = version_in(key), learner_in(key)
            if version >= least and learner and learner not in found.get(version, ()):
                with suppress(ObjectMissing, RecordInvalid):
                    update = await log.open(await log.fetch(key, frame.Kind.UPDATE, p), key, UpdateHeader)
                    if starts is None or update.header.incarnation >= starts.get(learner, 0):
                        found.setdefault(version, set()).add(learner)
    except Denied:
        return {}
    return {version: sorted(names) for version, names in found.items()}


async def newest_starts(log: Log) -> Starts:
    """Return the newest start of each learner. Of checkpoints only the beginnings are read, and nothing is verified.

    Without permission to read them, no learner is known. Raises `Unavailable`.
    """
    numbers, slots = dict[str, int](), asyncio.Semaphore(LOOKS_AT_ONCE)

    async def known(name: str, newest: Entry) -> tuple[Entry, tuple[int, ...]] | None:
        with suppress(ObjectMissing, RecordInvalid):
            async with slots:
                header = (await read_head(log, newest.key)).said
            if header.incarnation == numbers[name]:
                return newest, tuple(f.settled_to for f in header.fragments)
        return None

    try:
        entries = await log.store.list(LEARNERS)
        for entry in entries:
            name = learner_in(entry.key)
            numbers[name] = max(numbers.get(name, 0), incarnation_in(entry.key) or 0)
        held = by_learner(checkpoints_in(entries))
        seen = await asyncio.gather(*(known(name, of[0]) for name, of in held.items()))
    except Denied:
        return Starts({}, ())
    return Starts(numbers, [one for one in seen if one is not None])


@dataclass(frozen=True, slots=True)
class Lost:
    """Versions of a fragment that were committed, whose commits are lost without a trace in the log itself."""

    version: int
    """The newest that is known."""
    learners: Sequence[str]
    """Who has it."""
    said: str
    head: int
    """The newest version in the log."""


async def lost_after(log: Log, p: int, head: int, starts: Starts) -> Lost | None:
    """Return which versions after the last commit learners have, by their updates and newest checkpoints.

    Such versions were committed. `starts`: from `newest_starts`. Raises `Unavailable`.
    """
    found = await _adopted(log, p, head + 1, starts.numbers) if starts.numbers else {}
    for entry, versions in starts.seen:
        seen = versions[p] if p < len(versions) else 0
        if seen > head and await _genuine(log, entry):
            found[seen] = sorted({*found.get(seen, ()), learner_in(entry.key)})
    if not found or await is_there(log.store, commit_key(p, head + 1)):  # or a syncer has committed it meanwhile
        return None
    newest = max(found)
    return Lost(newest, found[newest], lacks(p, head, newest, found[newest]), head)


async def knowing(log: Log, goes_on_from: Mapping[int, int]) -> list[str]:
    """Return the keys of checkpoints that know a later version of a fragment than the one it goes on from.

    A learner does not start as long as it has one. The headers are not verified, as a learner does not verify them for
    this. Those that may not be read here are left out. Raises `Unavailable`.
    """
    slots = asyncio.Semaphore(LOOKS_AT_ONCE)

    async def knows(key: str) -> bool:
        with suppress(ObjectMissing, RecordInvalid):
            async with slots:
                seen = [f.settled_to for f in (await read_head(log, key)).said.fragments]
            return any(seen[p] > version for p, version in goes_on_from.items() if p < len(seen))
        return False

    try:
        keys = [entry.key for entry in checkpoints_in(await log.store.list(LEARNERS))]
        return sorted(compress(keys, await asyncio.gather(*map(knows, keys))))
    except Denied:
        return []


async def _genuine(log: Log, entry: Entry) -> bool:
    """Return whether the whole checkpoint is valid, and its author may write it. One that is too large is not read."""
    if entry.size > log.checkpoint_most:
        return False
    try:
        await log.open_checkpoint(await checked.read(log.store, log.runtime, entry.key, entry.size), entry.key)
    except (ObjectMissing, RecordInvalid):
        return False
    return True


async def _lacking(log: Log, p: int, head: int) -> str:
    """Return which object is missing that syncers can do without, as a published value, and what to do.

    Raises `LogCorrupt` for one that only a replay needs.
    """
    try:
        await require_objects(log, p, head)
        await require_values(log, p, head, _read_value)
    except LogCorrupt as error:
        if GOES_ON in error.detail:
            raise
        return f"{error.key} {error.detail}: a syncer can make it again. {MAKE_AGAIN}"
    return ""


async def _read_value(log: Log, commit: Commit) -> None:
    """Raise `LogCorrupt` if a commit's value object is damaged. One that was damaged on its way is read again."""
    detail = ""
    for _ in range(fold.READS):
        try:
            blob = await fold.stored_value(log, commit)
            await log.runtime.offload(log.verifier.value, blob, commit.header)
        except RecordInvalid as error:
            detail = f"is not what version {commit.version} published: {error.detail}"
        else:
            return
    raise LogCorrupt(commit.header.value_key, detail)


async def _newest_published(log: Log, p: int) -> int:
    """Return the newest version whose published value can be read. Raises `LogCorrupt` if there is none."""
    try:
        return (await fold.fold(log, p, fold.PublishedValue(log))).version
    except LogCorrupt as error:
        if error.readable is None:
            raise
        return (await fold.fold(log, p, fold.PublishedValue(log), until=error.readable[1])).version


async def _published(log: Log, p: int, version: int) -> F32:
    return (await fold.fold(log, p, fold.PublishedValue(log), until=version)).carried


def _nobody(now: float) -> Waited:
    """Return the record of waiting for a commit that had no round."""
    return Waited(
        called_by=HEALER,
        quorum=0,
        quorum_missed=False,
        closed_by="healed",
        expected=(),
        missing=(),
        passed=(),
        boundary_at=now,
        opened_at=now,
        closed_at=now,
        hold_until=now,
        quorum_s=0.0,
        grace_s=0.0,
        waited_s=0.0,
        fastest_step_s=0.0,
        slowest_step_s=0.0,
        sync_s=0.0,
        cap_s=0.0,
        merge_s=0.0,
        publish_s=0.0,
        overlap_steps=0.0,
    )

"""The fold: what a fragment's log adds up to. There is one, and everything that needs a state or a value uses it.

    state(p, v) = fold(merge, snapshot(p, u), commits(p, u+1 … v))

`begin` finds a place to start that can be believed, `onward` walks the commits after it, `fold` does both. What is
carried along is a `Carry`: `Merging` carries the full state and merges every round anew from its updates (taking a
fragment over, replay, what if); `Publishing` carries the published value and applies the published differences
(joining, export); `Following` carries nothing and reads the commits alone (fragments that others keep).
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

import numpy as np

from isthmus import memory
from isthmus.codecs import BadCode, Codec, as_bytes, codec, packed_bounds, unpack
from isthmus.errors import Denied, LogCorrupt, ObjectMissing, RecordInvalid
from isthmus.kernels import F32
from isthmus.layout import Fragment
from isthmus.log import Commit, Log, merge
from isthmus.log.membership import Members
from isthmus.log.merge import Accumulator, Advance, State, by_class
from isthmus.log.updates import Update, open_update
from isthmus.records import frame
from isthmus.records.frame import Blob
from isthmus.records.keys import commit_key, snapshot_key, snapshots_prefix
from isthmus.records.objects import CommitHeader, Input, Outer, SnapshotHeader, ValueHeader
from isthmus.rules import CodecName
from isthmus.store import checked

INPUTS_AT_ONCE = 4
"""Inputs of one commit in memory at once while folding."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class At(Generic[T]):
    """A fragment at one version of its log."""

    version: int
    carried: T
    digest: bytes
    """Of the commit that made this version; of the run object at version 0: what the next commit must name."""
    last: tuple[Commit, ...]
    """The newest commits up to here, oldest first; as many as were asked for."""


class Carry(Protocol[T]):
    """What is carried along the log."""

    async def start(self, fragment: int, version: int, key: str, commit: Commit | None) -> T:
        """Return what a snapshot holds; `commit` made its version (None: version 0). Raises `LogCorrupt`."""
        ...

    async def step(self, carried: T, commit: Commit) -> T:
        """Return what a commit makes of it. Raises `LogCorrupt` where its inputs are damaged or give something else."""
        ...

    async def restart(self, commit: Commit) -> T:
        """Return what a commit that heals starts again with, whatever was before it. Raises `LogCorrupt`."""
        ...


# --- walking ----------------------------------------------------------------------------------------------------------


async def begin(log: Log, fragment: int, carry: Carry[T], *, at_most: int | None = None, keep: int = 1) -> At[T]:
    """Return the newest snapshot (of version `at_most` or older) that can be believed.

    Raises `LogCorrupt`, naming every snapshot that was tried, where there is none.
    """
    problems: list[str] = []
    for version, key in await log.snapshots(fragment):
        if at_most is not None and version > at_most:
            continue
        try:
            last = await _anchor(log, fragment, version, keep)
            carried = await carry.start(fragment, version, key, last[-1] if last else None)
        except ObjectMissing as error:
            problems.append(f"{error.key}: is missing")
        except LogCorrupt as error:
            problems.append(f"{error.key}: {error.detail}")
        else:
            return At(version, carried, last[-1].digest if last else log.run.digest, last)
    limit = "" if at_most is None else f" of version {at_most} or older"
    raise LogCorrupt(snapshots_prefix(fragment), f"no snapshot{limit} can be believed: {'; '.join(problems) or 'none'}")


async def onward(
    log: Log, fragment: int, carry: Carry[T], at: At[T], *, until: int | None = None, keep: int = 1
) -> AsyncIterator[At[T]]:
    """Yield every version after `at`, up to `until` or the end of the log. Raises `LogCorrupt` where it is damaged."""
    if until is not None and at.version >= until:
        return
    try:
        async for commit in log.commits(fragment, at.version, at.digest):
            carried = await carry.step(at.carried, commit)
            at = At(commit.version, carried, commit.digest, (*at.last, commit)[-keep:])
            yield at
            if at.version == until:
                return
    except LogCorrupt as error:
        raise error.after(fragment, at.version) from None


async def fold(log: Log, fragment: int, carry: Carry[T], *, until: int | None = None, keep: int = 1) -> At[T]:
    """Return the fragment at a version, or at the end of its log.

    Where the way from the newest snapshot is blocked, one that came meanwhile is tried: the collector may have passed.
    Else a commit beyond the place that heals it, where there is one.
    """
    start = at = await begin(log, fragment, carry, at_most=until, keep=keep)
    while True:
        try:
            async for further in onward(log, fragment, carry, at, until=until, keep=keep):
                at = further
            break
        except LogCorrupt:
            again: At[T] | None = await begin(log, fragment, carry, at_most=until, keep=keep)
            if again is None or again.version <= start.version:
                again = await beyond(log, fragment, carry, at, until=until, keep=keep)
            if again is None:
                raise
            start = at = again
    if until is not None and at.version < until:
        raise LogCorrupt(commit_key(fragment, at.version + 1), f"is missing: version {until} was asked for").after(
            fragment, at.version
        )
    return at


async def beyond(
    log: Log, fragment: int, carry: Carry[T], at: At[T], *, until: int | None = None, keep: int = 1
) -> At[T] | None:
    """Return the fragment at the newest commit after `at` that heals it; None where there is none.

    Only the chain of commits is walked: what a commit that heals starts from, it brings itself.
    """
    last: tuple[Commit, ...] = at.last
    found = None
    async for commit in log.commits(fragment, at.version, at.digest):
        if until is not None and commit.version > until:
            break
        last = (*last, commit)[-keep:]
        if commit.header.healed is not None:
            found = commit, last
    if found is None:
        return None
    commit, last = found
    return At(commit.version, await carry.restart(commit), commit.digest, last)


async def _anchor(log: Log, fragment: int, version: int, keep: int) -> tuple[Commit, ...]:
    """Return the last commits up to a version, its own among them."""
    last = []
    for v in range(max(1, version - keep + 1), version + 1):
        commit = await log.commit(fragment, v)
        if commit is None:
            raise LogCorrupt(commit_key(fragment, v), f"is missing, and there is a snapshot of version {version}")
        last.append(commit)
    return tuple(last)


# --- the full state ---------------------------------------------------------------------------------------------------


class Merging:
    """Carries the full state: every round is merged anew and must give what the commit recorded."""

    def __init__(self, log: Log, moved: Callable[[int], None] = lambda size: None) -> None:
        """`moved` is called for each object that was read, with the bytes of an update: what takes long is not
        blocked."""
        self.log = log
        self._moved = moved

    async def start(self, fragment: int, version: int, key: str, commit: Commit | None) -> State:
        """See `Carry.start`."""
        size = 4 * self.log.run.layout.fragments[fragment].size
        try:
            largest = frame.largest(frame.Kind.SNAPSHOT, 3 * size)
            blob = await checked.read(self.log.store, self.log.runtime, key, largest)
            self._moved(0)
            header, payload = frame.parse(blob, frame.Kind.SNAPSHOT, SnapshotHeader)
            await self.log.require_author(blob, frame.Kind.SNAPSHOT)
        except RecordInvalid as error:
            raise LogCorrupt(key, f"not a snapshot: {error}") from None
        _check_snapshot(self.log, key, header, fragment, version)
        try:
            state = merge.restore(header, payload, self.log.run.layout.fragments[fragment].size)
        except ValueError as error:
            raise LogCorrupt(key, f"holds {error}") from None
        # Version 0 has no commit: the run object names the digest of the whole snapshot.
        wanted = commit.header.state_digest if commit else self.log.run.header.snapshots[fragment]
        found = await self.log.runtime.offload(lambda: state.digest if commit else frame.digest(blob))
        if found != wanted:
            by = f"commit {version}" if commit else "the run object"
            raise LogCorrupt(key, f"has digest {found.hex()[:16]}, {by} says {wanted.hex()[:16]}")
        return state

    async def step(self, carried: State, commit: Commit) -> State:
        """See `Carry.step`."""
        self._moved(0)
        return _as_recorded(await self.merged(carried, commit), commit).state

    async def restart(self, commit: Commit) -> State:
        """See `Carry.restart`."""
        return _as_recorded(await restarted(self.log, commit), commit).state

    async def merged(self, state: State, commit: Commit, watch: "Watch | None" = None) -> Advance:
        """Return what a commit's inputs make of a state; it is for the caller to compare."""
        h = commit.header
        if h.version != state.version + 1:
            raise LogCorrupt(commit_key(h.fragment, h.version), f"does not follow version {state.version}")
        if h.healed is not None:
            return await restarted(self.log, commit)

        def read(given: Input, update: Update) -> None:
            self._moved(given.bytes)
            if watch is not None:
                watch(given, update)

        return await combine(
            self.log, state, h.fragment, h.inputs, outer_of(h), codec(h.codec_down), read, under=h.members
        )


class Following:
    """Carries nothing: the chain of commits, and that there is a snapshot to fold from, is all that is looked at."""

    async def start(self, fragment: int, version: int, key: str, commit: Commit | None) -> None:
        """See `Carry.start`."""

    async def step(self, carried: None, commit: Commit) -> None:
        """See `Carry.step`."""

    async def restart(self, commit: Commit) -> None:
        """See `Carry.restart`."""


def _as_recorded(result: Advance, commit: Commit) -> Advance:
    """Return what a commit came to. Raises `LogCorrupt` where it recorded something else."""
    if result.state_digest != commit.header.state_digest:
        raise LogCorrupt(
            commit_key(commit.header.fragment, commit.version),
            f"its inputs fold to state {result.state_digest.hex()[:16]}, {commit.header.writer} recorded "
            f"{commit.header.state_digest.hex()[:16]}: `isthmus replay` says where they differ",
        )
    return result


async def restarted(log: Log, commit: Commit) -> Advance:
    """Return what a commit that heals starts again with: its value object is all that is needed."""
    h = commit.header
    nothing = np.zeros(log.run.layout.fragments[h.fragment].size, np.float32)
    published = await Publishing(log).step(nothing, commit)
    return await log.runtime.offload(
        merge.healed, h.version, published, log.run.layout.fragments[h.fragment], log.run.digest
    )


Watch = Callable[[Input, Update], None]
"""Called with each input as it is read."""


async def combine(
    log: Log,
    state: State,
    fragment: int,
    inputs: Sequence[Input],
    outer: dict[str, Outer],
    down: Codec,
    watch: Watch | None = None,
    under: int | None = None,
) -> Advance:
    """Return the state after merging these stored updates, in this order. Raises `LogCorrupt` for a damaged one.

    `under`: the membership by which their authors are judged; None: any that is known.
    """
    part = log.run.layout.fragments[fragment]
    accumulator = Accumulator(part, outer, log.runtime.crew)
    todo, ahead = iter(inputs), deque[tuple[Input, asyncio.Future[Update]]]()

    def fetch_next() -> None:
        if (given := next(todo, None)) is not None:
            ahead.append((given, asyncio.ensure_future(read_input(log, part, given, under))))

    try:
        # A few at a time, in order: memory does not grow with the round.
        for _ in range(INPUTS_AT_ONCE):
            fetch_next()
        while ahead:
            given, task = ahead[0]
            update = await task
            if watch is not None:
                watch(given, update)
            add = partial(accumulator.add, learner=given.learner)
            await log.runtime.offload(add, update.gradient, given.weight, given.scale)
            ahead.popleft()
            fetch_next()
    finally:
        for _, task in ahead:
            task.cancel()
        await asyncio.gather(*(task for _, task in ahead), return_exceptions=True)
    return await log.runtime.offload(
        merge.advance, state, accumulator, down, log.run.digest, log.run.rules.feedback_down
    )


async def read_input(log: Log, fragment: Fragment, given: Input, under: int | None = None) -> Update:
    """Return an update that a commit merged. Raises `LogCorrupt` where it is missing or is not what was merged."""
    try:
        blob = await checked.read(log.store, log.runtime, given.key, given.bytes)
        return await log.runtime.offload(
            open_update, blob, given.digest, log.run, fragment, given.learner, given.base, log.runtime.crew,
            log.members, under,
        )  # fmt: skip
    except ObjectMissing:
        raise LogCorrupt(given.key, f"is missing; {given.bytes} bytes of it were merged") from None
    except Denied as error:
        raise LogCorrupt(given.key, f"may not be read, and was merged: {error}", refused=True) from None
    except RecordInvalid as error:
        raise LogCorrupt(
            given.key, f"is not what was merged (digest {given.digest.hex()[:16]}, {given.bytes} bytes): {error}"
        ) from None


def outer_of(header: CommitHeader) -> dict[str, Outer]:
    """Return the arithmetic a commit was made with, by class of tensors."""
    return by_class(header.dense, header.embedding)


# --- published values -------------------------------------------------------------------------------------------------


class Publishing:
    """Carries the published value [n]: a snapshot's published part, read by range, and the differences after it."""

    def __init__(self, log: Log) -> None:
        self.log = log

    async def start(self, fragment: int, version: int, key: str, commit: Commit | None) -> F32:
        """See `Carry.start`."""
        try:
            return await self._start(fragment, version, key, commit)
        except LogCorrupt as error:
            if not self.log.doubt(key, error):
                raise
            return await self._start(fragment, version, key, commit)

    async def _start(self, fragment: int, version: int, key: str, commit: Commit | None) -> F32:
        size = 4 * self.log.run.layout.fragments[fragment].size
        # The published value comes first, behind a header of a known limit: one read by range gets both.
        largest = frame.largest(frame.Kind.SNAPSHOT, 3 * size)
        try:
            blob = await checked.read(self.log.store, self.log.runtime, key, largest, first=largest - 2 * size)
            header = frame.parse_head(blob, frame.Kind.SNAPSHOT, SnapshotHeader)
        except RecordInvalid as error:
            raise LogCorrupt(key, f"not a snapshot: {error}") from None
        _check_snapshot(self.log, key, header, fragment, version)
        start = frame.payload_start(blob)
        if len(blob) < start + size:
            raise LogCorrupt(key, f"holds {len(blob) - start} bytes of published value, its fragment has {size}")
        values = np.frombuffer(memoryview(blob)[start : start + size], np.dtype("<f4")).copy()
        if commit is None and key != snapshot_key(fragment, 0, self.log.run.header.snapshots[fragment]):
            raise LogCorrupt(key, "is not the version 0 that the run object names")
        # Of version 0 the run object names the digest of the whole object; its header vouches for this part.
        wanted = commit.header.published_digest if commit else header.published_digest
        found = merge.array_digest(values)
        if found != wanted:
            raise LogCorrupt(
                key, f"has published digest {found.hex()[:16]}, version {version} published {wanted.hex()[:16]}"
            )
        return values

    async def step(self, carried: F32, commit: Commit) -> F32:
        """See `Carry.step`."""
        try:
            return await self._step(carried, commit)
        except LogCorrupt as error:
            if not self.log.doubt(commit.header.value_key, error):
                raise
            return await self._step(carried, commit)

    async def _step(self, carried: F32, commit: Commit) -> F32:
        h = commit.header
        fragment = self.log.run.layout.fragments[h.fragment]
        try:
            packed = packed_bounds(codec(CodecName.F32 if h.healed else h.codec_down), fragment)[1]
            largest = frame.largest(frame.Kind.VALUE, packed)
            blob = await checked.read(self.log.store, self.log.runtime, h.value_key, largest)
        except ObjectMissing:
            raise LogCorrupt(h.value_key, f"is missing, and version {h.version} published it") from None
        except RecordInvalid as error:
            raise LogCorrupt(h.value_key, f"is not what version {h.version} published: {error}") from None
        await self.log.members.reach(h.members, self.log.store)
        return await self.log.runtime.offload(_apply, self.log.members, blob, carried, fragment, h)

    async def restart(self, commit: Commit) -> F32:
        """See `Carry.restart`."""
        return (await restarted(self.log, commit)).state.published


async def initial(log: Log, fragment: int) -> F32:
    """Return the published value [n] of version 0."""
    key = snapshot_key(fragment, 0, log.run.header.snapshots[fragment])
    return await Publishing(log).start(fragment, 0, key, None)


def _apply(members: Members, blob: Blob, values: F32, fragment: Fragment, header: CommitHeader) -> F32:
    """Return the published value that a commit's value object gives: a difference, or all of it where it heals."""
    key, found = header.value_key, frame.digest(blob)
    if found != header.value_digest:
        raise LogCorrupt(
            key,
            f"has digest {found.hex()[:16]} ({len(blob)} bytes), version {header.version} published "
            f"{header.value_digest.hex()[:16]}",
        )
    try:
        value, payload = frame.parse(blob, frame.Kind.VALUE, ValueHeader)
        members.require_author(blob, frame.Kind.VALUE, under=header.members)
    except RecordInvalid as error:
        raise LogCorrupt(key, f"not a value: {error}") from None
    code = codec(value.codec)
    if value.version != header.version:
        raise LogCorrupt(key, f"is of version {value.version}")
    try:
        if header.healed is None:
            out = merge.next_published(values, fragment, code, as_bytes(payload))
        else:
            out = memory.empty(values.size)
            unpack(code, fragment, as_bytes(payload), out)
    except BadCode as error:
        raise LogCorrupt(key, f"is no packed fragment: {error}") from None
    if merge.array_digest(out) != header.published_digest:
        raise LogCorrupt(key, f"applied to version {header.version - 1} does not give the published version")
    return out


def _check_snapshot(log: Log, key: str, header: SnapshotHeader, fragment: int, version: int) -> None:
    run = bytes(32) if version == 0 else log.run.digest
    found, wanted = (header.run, header.fragment, header.version), (run, fragment, version)
    if found != wanted:
        raise LogCorrupt(key, f"is of fragment {header.fragment}, version {header.version}, or of another run")

"""The fold computes a fragment's state or value from its log. Everything that needs one of these uses this fold.

    state(p, v) = fold(merge, snapshot(p, u), commits(p, u+1 … v))

`begin` finds a snapshot that can be trusted, `onward` walks the commits after it, `fold` does both. A `Carry` says what
is computed along the log. `Merging` carries the full state and merges every round again from its updates (for taking
over a fragment, replay, what-if). `PublishedValue` carries the published value and applies the published differences
(for joining and export). `ChainOnly` carries nothing and reads only the commits (for fragments that other syncers
hold).
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

import numpy as np
from typing_extensions import override

from isthmus.codecs import BadCode, Codec, as_bytes, codec, unpack
from isthmus.codecs.kernels import F32
from isthmus.errors import Denied, LogCorrupt, ObjectMissing, RecordInvalid
from isthmus.format import memory
from isthmus.format.layout import Fragment
from isthmus.format.records import frame
from isthmus.format.records.frame import Blob
from isthmus.format.records.keys import commit_key, snapshot_key, snapshots_prefix
from isthmus.format.records.objects import UNSTATED, CommitHeader, Input, Outer
from isthmus.log import Commit, Log, merge
from isthmus.log.merge import Accumulator, Advance, State, by_class
from isthmus.log.updates import Update, verify_update
from isthmus.log.verify import Verifier
from isthmus.runtime.clock import ComputePool
from isthmus.store import checked

INPUTS_AT_ONCE = 4
"""Inputs of one commit that are in memory at once during a fold."""

READS = 3
"""Times that a commit before a snapshot is read before it counts as damaged in the store."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class At(Generic[T]):
    """A fragment at one version of its log."""

    version: int
    carried: T
    digest: bytes
    """Digest of the commit that made this version; at version 0, of the run object. The next commit must name it."""
    last: tuple[Commit, ...]
    """The newest commits up to this version, oldest first; as many as were requested."""
    under: int = 0
    """The membership version that the commit was made under. No later commit may be made under an earlier one."""

    @classmethod
    def made_by(cls, commit: Commit, carried: T, last: tuple[Commit, ...]) -> "At[T]":
        """Return the fragment at the version that a commit made."""
        return cls(commit.version, carried, commit.digest, last, commit.header.members)


class Carry(Protocol[T]):
    """What a fold computes along the log."""

    async def start(self, fragment: int, version: int, key: str, commit: Commit | None) -> T:
        """Return the start from a snapshot; `commit` made its version (None: version 0). Raises `LogCorrupt`."""
        ...

    async def step(self, carried: T, commit: Commit) -> T:
        """Return the result of applying a commit. Raises `LogCorrupt` if objects are damaged or give another result."""
        ...

    async def restart(self, commit: Commit) -> T:
        """Return the new start that a healing commit gives, whatever came before. Raises `LogCorrupt`."""
        ...


# --- walking ----------------------------------------------------------------------------------------------------------


async def begin(
    log: Log, fragment: int, carry: Carry[T], *, at_most: int | None = None, keep: int = 1, need: int | None = None
) -> At[T]:
    """Return the start from the newest snapshot (of version `at_most` or older) that can be trusted.

    With it come the last `keep` commits up to its version, or all of them if there are fewer. At least `need` of them
    must exist; None: all. Raises `LogCorrupt` if no snapshot can be trusted; the error names every one that was tried.
    """
    problems: list[str] = []
    for version, key in await log.snapshots(fragment):
        if at_most is not None and version > at_most:
            continue
        try:
            last = await _anchor(log, fragment, version, keep, need)
            carried = await carry.start(fragment, version, key, last[-1] if last else None)
        except ObjectMissing as error:
            problems.append(f"{error.key}: is missing")
        except LogCorrupt as error:
            problems.append(f"{error.key}: {error.detail}")
        else:
            return At.made_by(last[-1], carried, last) if last else At(version, carried, log.run.digest, last)
    limit = "" if at_most is None else f" of version {at_most} or older"
    raise LogCorrupt(snapshots_prefix(fragment), f"no snapshot{limit} can be believed: {'; '.join(problems) or 'none'}")


async def onward(
    log: Log, fragment: int, carry: Carry[T], at: At[T], *, until: int | None = None, keep: int = 1
) -> AsyncIterator[At[T]]:
    """Yield every version after `at`, up to `until` or the end of the log. Raises `LogCorrupt` where it is damaged."""
    if until is not None and at.version >= until:
        return
    try:
        async for commit in log.commits(fragment, at.version, at.digest, at.under):
            carried = await carry.step(at.carried, commit)
            at = At.made_by(commit, carried, (*at.last, commit)[-keep:])
            yield at
            if at.version == until:
                return
    except LogCorrupt as error:
        raise error.after(fragment, at.version) from None


async def fold(
    log: Log, fragment: int, carry: Carry[T], *, until: int | None = None, keep: int = 1, need: int | None = None
) -> At[T]:
    """Return the fragment at a version, or at the end of its log. Raises `LogCorrupt`.

    If the commits after the newest snapshot cannot be folded, start again from a newer snapshot, if there is one by
    now: the collector may have deleted the objects meanwhile. Otherwise continue from a later healing commit, if there
    is one.
    """
    start = at = await begin(log, fragment, carry, at_most=until, keep=keep, need=need)
    while True:
        try:
            async for further in onward(log, fragment, carry, at, until=until, keep=keep):
                at = further
            break
        except LogCorrupt:
            again: At[T] | None = await begin(log, fragment, carry, at_most=until, keep=keep, need=need)
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
    """Return the fragment at the newest healing commit after `at`; None if there is none.

    Only the chain of commits is walked, since a healing commit brings all that is needed to start from it.
    """
    last: tuple[Commit, ...] = at.last
    found = None
    async for commit in log.commits(fragment, at.version, at.digest, at.under):
        if until is not None and commit.version > until:
            break
        last = (*last, commit)[-keep:]
        if commit.header.healed is not None:
            found = commit, last
    if found is None:
        return None
    commit, last = found
    return At.made_by(commit, await carry.restart(commit), last)


async def _commit_read_again(log: Log, fragment: int, version: int) -> Commit | None:
    """Return a commit; one that was damaged on its way is read again. Raises `LogCorrupt`.

    A syncer that goes on without such a commit would record another usual length than replay computes.
    """
    for _ in range(READS - 1):
        try:
            return await log.commit(fragment, version)
        except LogCorrupt:
            continue
    return await log.commit(fragment, version)


async def _anchor(log: Log, fragment: int, version: int, keep: int, need: int | None) -> tuple[Commit, ...]:
    """Return the last `keep` commits up to a version, its own among them, or all if there are fewer.

    At least `need` of them must exist; None: all. Raises `LogCorrupt`.
    """
    versions = range(max(1, version - keep + 1), version + 1)
    found = await asyncio.gather(*(_commit_read_again(log, fragment, v) for v in versions), return_exceptions=True)
    last: list[Commit] = []
    for v, commit in zip(reversed(versions), reversed(found), strict=True):
        if isinstance(commit, Commit):
            last.insert(0, commit)
        elif need is not None and len(last) >= need and (commit is None or isinstance(commit, LogCorrupt)):
            break
        elif commit is None:
            raise LogCorrupt(commit_key(fragment, v), f"is missing, and there is a snapshot of version {version}")
        else:
            raise commit
    return tuple(last)


# --- the full state ---------------------------------------------------------------------------------------------------


class Merging(Carry[State]):
    """Carries the full state: every round is merged again and must give what its commit recorded."""

    def __init__(self, log: Log, moved: Callable[[int], None] = lambda size: None) -> None:
        """`moved` is called for each commit and each object read, with the bytes of an update, else 0. Its calls show
        that a long fold is not blocked."""
        self.log = log
        self._moved = moved

    @override
    async def start(self, fragment: int, version: int, key: str, commit: Commit | None) -> State:
        size = 4 * self.log.run.layout.fragments[fragment].size
        try:
            largest = frame.largest(frame.Kind.SNAPSHOT, 3 * size)
            blob = await checked.read(self.log.store, self.log.runtime, key, largest)
            self._moved(0)
            if self.log.members.signed:
                await self.log.members.refresh(self.log.store)
            return await self.log.runtime.offload(self.log.verifier.snapshot, blob, key, fragment, commit)
        except RecordInvalid as error:
            raise LogCorrupt(key, f"no snapshot to begin with: {error.detail}") from None

    @override
    async def step(self, carried: State, commit: Commit) -> State:
        self._moved(0)
        return _as_recorded(await self.merged(carried, commit), commit).state

    @override
    async def restart(self, commit: Commit) -> State:
        return _as_recorded(await restarted(self.log, commit), commit).state

    async def merged(self, state: State, commit: Commit, watch: "Watch | None" = None) -> Advance:
        """Return the result of merging a commit's inputs into a state. The caller compares it with the commit."""
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
            self.log, state, h.fragment, h.inputs, outer_of(h), codec(h.codec_down), read, under=h.members,
            stated=h.state_digest != UNSTATED,
        )  # fmt: skip


class ChainOnly(Carry[None]):
    """Carries nothing: checks only the chain of commits, and that there is a snapshot to fold from."""

    @override
    async def start(self, fragment: int, version: int, key: str, commit: Commit | None) -> None: ...

    @override
    async def step(self, carried: None, commit: Commit) -> None: ...

    @override
    async def restart(self, commit: Commit) -> None: ...


def _as_recorded(result: Advance, commit: Commit) -> Advance:
    """Return the result of a commit. Raises `LogCorrupt` if the commit recorded another result."""
    if result.published_digest != commit.header.published_digest:
        raise LogCorrupt(
            commit_key(commit.header.fragment, commit.version),
            f"its inputs publish {result.published_digest.hex()[:16]}, {commit.header.writer} recorded "
            f"{commit.header.published_digest.hex()[:16]}: `isthmus replay` says where they differ",
        )
    if result.state_digest != commit.header.state_digest:
        raise LogCorrupt(
            commit_key(commit.header.fragment, commit.version),
            f"its inputs fold to state {result.state_digest.hex()[:16]}, {commit.header.writer} recorded "
            f"{commit.header.state_digest.hex()[:16]}: `isthmus replay` says where they differ",
        )
    return result


async def restarted(log: Log, commit: Commit) -> Advance:
    """Return the new start that a healing commit gives. Only its value object is needed. Raises `LogCorrupt`."""
    h = commit.header
    nothing = np.zeros(log.run.layout.fragments[h.fragment].size, np.float32)
    published = await PublishedValue(log).step(nothing, commit)
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
    accumulator: Callable[[Fragment, Mapping[str, Outer], ComputePool], Accumulator] | None = None,
    *,
    stated: bool = False,
) -> Advance:
    """Return the state after merging these stored updates, in this order. Raises `LogCorrupt` if one is damaged.

    `under`: the membership version that their authors are checked against; None: any known version may allow them.
    `accumulator`: makes the round's sum, for arithmetic that no run records; None: `Accumulator`. `stated`: whether the
    state's digest is computed.
    """
    part = log.run.layout.fragments[fragment]
    total = (accumulator or Accumulator)(part, outer, log.runtime.compute)
    todo, ahead = iter(inputs), deque[tuple[Input, asyncio.Future[Update]]]()

    def fetch_next() -> None:
        if (given := next(todo, None)) is not None:
            ahead.append((given, asyncio.ensure_future(read_input(log, part, given, under))))

    try:
        # Read a few at a time, in order: memory then does not grow with the number of inputs.
        for _ in range(INPUTS_AT_ONCE):
            fetch_next()
        while ahead:
            given, task = ahead[0]
            update = await task
            if watch is not None:
                watch(given, update)
            add = partial(total.add, learner=given.learner)
            await log.runtime.offload(add, update.gradient, given.weight, given.scale)
            ahead.popleft()
            fetch_next()
    finally:
        for _, task in ahead:
            task.cancel()
        await asyncio.gather(*(task for _, task in ahead), return_exceptions=True)
    advance = partial(merge.advance, stated=stated)
    return await log.runtime.offload(advance, state, total, down, log.run.digest, log.run.rules.feedback_down)


async def read_input(log: Log, fragment: Fragment, given: Input, under: int | None = None) -> Update:
    """Return an update that a commit merged. Raises `LogCorrupt` if it is missing, may not be read, or differs."""
    try:
        most = frame.largest(frame.Kind.UPDATE, log.verifier.payload_most(frame.Kind.UPDATE, fragment.index))
        blob = await checked.read(log.store, log.runtime, given.key, min(given.bytes, most))
        return await log.runtime.offload(
            verify_update, log.verifier, blob, given.key, given.digest, fragment, given.learner, given.base,
            log.runtime.compute, under,
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
    """Return the arithmetic that a commit was made with, by class of tensors."""
    return by_class(header.dense, header.embedding)


# --- published values -------------------------------------------------------------------------------------------------


class PublishedValue(Carry[F32]):
    """Carries the published value [n]: a snapshot's published part, read by range, and the differences after it."""

    def __init__(self, log: Log) -> None:
        self.log = log

    @override
    async def start(self, fragment: int, version: int, key: str, commit: Commit | None) -> F32:
        try:
            return await self._start(fragment, version, key, commit)
        except LogCorrupt as error:
            if not self.log.doubt(key, error):
                raise
            return await self._start(fragment, version, key, commit)

    async def _start(self, fragment: int, version: int, key: str, commit: Commit | None) -> F32:
        size = 4 * self.log.run.layout.fragments[fragment].size
        # The published value lies first, behind a header of limited size: one range read gets both.
        largest = frame.largest(frame.Kind.SNAPSHOT, 3 * size)
        try:
            begin = await checked.read(self.log.store, self.log.runtime, key, largest, first=largest - 2 * size)
            return await self.log.runtime.offload(self.log.verifier.published, begin, key, fragment, commit)
        except RecordInvalid as error:
            raise LogCorrupt(key, f"no snapshot to begin with: {error.detail}") from None

    @override
    async def step(self, carried: F32, commit: Commit) -> F32:
        try:
            return await self._step(carried, commit)
        except LogCorrupt as error:
            if not self.log.doubt(commit.header.value_key, error):
                raise
            return await self._step(carried, commit)

    async def _step(self, carried: F32, commit: Commit) -> F32:
        h = commit.header
        fragment = self.log.run.layout.fragments[h.fragment]
        blob = await stored_value(self.log, commit)
        await self.log.members.reach(h.members, self.log.store)
        if h.healed is not None:
            await _require_source(self.log, h, h.healed.source)
        return await self.log.runtime.offload(_apply, self.log.verifier, blob, carried, fragment, h)

    @override
    async def restart(self, commit: Commit) -> F32:
        return (await restarted(self.log, commit)).state.published


async def stored_value(log: Log, commit: Commit) -> Blob:
    """Return the bytes of a commit's value object. Only their number is checked. Raises `LogCorrupt`."""
    h = commit.header
    try:
        largest = frame.largest(frame.Kind.VALUE, log.verifier.payload_most(frame.Kind.VALUE, h.fragment))
        return await checked.read(log.store, log.runtime, h.value_key, largest)
    except ObjectMissing:
        raise LogCorrupt(h.value_key, f"is missing, and version {h.version} published it") from None
    except RecordInvalid as error:
        raise LogCorrupt(h.value_key, f"is not what version {h.version} published: {error}") from None


async def _require_source(log: Log, h: CommitHeader, source: int) -> None:
    """Raise `LogCorrupt` unless a healing commit publishes the same value as the version that it starts from."""
    if source:
        commit = await log.commit(h.fragment, source)
        wanted = commit.header.published_digest if commit else None
    else:
        wanted = merge.array_digest(await initial(log, h.fragment))
    if wanted != h.published_digest:
        raise LogCorrupt(
            commit_key(h.fragment, h.version), f"says that it starts again from version {source}, and does not"
        )


async def initial(log: Log, fragment: int) -> F32:
    """Return the published value [n] of version 0."""
    key = snapshot_key(fragment, 0, log.run.header.snapshots[fragment])
    return await PublishedValue(log).start(fragment, 0, key, None)


def _apply(verifier: Verifier, blob: Blob, values: F32, fragment: Fragment, header: CommitHeader) -> F32:
    """Return the published value [n] from a commit's value object: a difference, or the whole value if it heals.

    Raises `LogCorrupt`.
    """
    key = header.value_key
    try:
        payload = verifier.value(blob, header).payload
    except RecordInvalid as error:
        raise LogCorrupt(
            key, f"{len(blob)} bytes are not what version {header.version} published: {error.detail}"
        ) from None
    code = codec(header.codec_down)
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

"""The commit log of a run: reading it, folding it, appending to it. Recovery, replay, joining and export all use this.

    state(p, v) = fold(merge, snapshot(p, u), commits(p, u+1 … v))

Listing happens only to find the newest snapshot; after that, versions are probed one by one until there is none.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import numpy as np

from isthmus import merge
from isthmus.codecs import as_bytes, codec, packed_size, unpack
from isthmus.errors import LogCorrupt, ObjectMissing, RecordInvalid, Unavailable
from isthmus.kernels import ARITHMETIC, F32, all_finite, norm
from isthmus.layout import DENSE, EMBEDDING, Fragment
from isthmus.merge import Accumulator, Advance, State
from isthmus.reasons import Reason
from isthmus.records import frame
from isthmus.records.frame import Blob
from isthmus.records.objects import (
    CommitHeader,
    Outer,
    SnapshotHeader,
    UpdateHeader,
    ValueHeader,
    commit_key,
    snapshot_key,
    snapshots_prefix,
    version_in,
)
from isthmus.run import Run
from isthmus.runtime import Runtime
from isthmus.store import Store

GRADIENT_NORM_MAX = 1e18
"""Length of an update above which it is turned away: sums of such numbers leave float32's range."""

FETCHES = 8
"""Inputs of one commit fetched at once while folding."""


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit as it was read: its header and the digest of its bytes."""

    header: CommitHeader
    digest: bytes

    @property
    def version(self) -> int:
        """The version it created."""
        return self.header.version


@dataclass(frozen=True, slots=True)
class Head:
    """A fragment at the end of its log."""

    state: State
    last: tuple[Commit, ...]
    """The newest commits, oldest first: as many as judging late updates takes."""
    digest: bytes
    """Digest of the newest commit, or of the run where there is none: what the next commit names as `previous`."""


class Log:
    """Reads and extends the log of one run."""

    def __init__(self, run: Run, store: Store, runtime: Runtime) -> None:
        self.run = run
        self.store = store
        self._runtime = runtime

    # --- reading ------------------------------------------------------------------------------------------------------

    async def commit(self, fragment: int, version: int) -> Commit | None:
        """Return a commit, or None where the log ends before it. Raises `LogCorrupt`."""
        key = commit_key(fragment, version)
        try:
            blob = await self.store.get(key)
        except ObjectMissing:
            return None
        try:
            header, _ = frame.parse(blob, frame.Kind.COMMIT, CommitHeader)
        except RecordInvalid as error:
            raise LogCorrupt(key, f"not a commit: {error}") from None
        if (header.run, header.fragment, header.version) != (self.run.digest, fragment, version):
            raise LogCorrupt(key, "belongs to another run, fragment or version")
        if header.arithmetic != ARITHMETIC:
            raise LogCorrupt(key, f"written with arithmetic {header.arithmetic}; this release has {ARITHMETIC}")
        return Commit(header, frame.digest(blob))

    async def commits(self, fragment: int, after: int, digest: bytes | None = None) -> AsyncIterator[Commit]:
        """Yield the commits after a version, in order, until the log ends; each must name the one before.

        `digest` is what the first must name (None: not checked). Raises `LogCorrupt` where the chain breaks.
        """
        while (found := await self.commit(fragment, after + 1)) is not None:
            if digest is not None and found.header.previous != digest:
                raise LogCorrupt(commit_key(fragment, after + 1), "does not follow the commit before it")
            after, digest = after + 1, found.digest
            yield found

    async def snapshots(self, fragment: int) -> list[tuple[int, str]]:
        """Return (version, key) of the stored snapshots of a fragment, newest first. Lists."""
        entries = await self.store.list(snapshots_prefix(fragment))
        return sorted(((version_in(e.key), e.key) for e in entries), reverse=True)

    async def head(self, fragment: int, keep: int = 2) -> Head:
        """Return the fragment at the end of its log: the newest good snapshot and the commits after it, folded.

        Raises `LogCorrupt` where no snapshot can be believed or an input of a later commit is damaged.
        """
        problems: list[str] = []
        for version, key in await self.snapshots(fragment):
            try:
                state, digest, last = await self._start(fragment, version, key, keep)
            except (LogCorrupt, ObjectMissing) as error:
                problems.append(str(error))
                continue
            async for commit in self.commits(fragment, version, digest):
                state = (await self.fold(state, commit)).state
                last, digest = [*last, commit][-keep:], commit.digest
            return Head(state, tuple(last), digest)
        raise LogCorrupt(snapshots_prefix(fragment), "no snapshot can be believed: " + ("; ".join(problems) or "none"))

    async def published(self, fragment: int) -> tuple[int, F32, bytes]:
        """Return (version, published value [n], digest of the newest commit): the fold of values alone.

        What a learner joins with: the published part of the newest snapshot, read by range, and the values after it.
        """
        problems: list[str] = []
        for start, key in await self.snapshots(fragment):
            version = start
            try:
                values, digest = await self._published_at(fragment, version, key)
            except (LogCorrupt, ObjectMissing) as error:
                problems.append(str(error))
                continue
            async for commit in self.commits(fragment, version, digest):
                values = await self.apply(values, commit)
                version, digest = commit.version, commit.digest
            return version, values, digest
        raise LogCorrupt(snapshots_prefix(fragment), "no snapshot can be believed: " + ("; ".join(problems) or "none"))

    async def initial(self, fragment: int) -> F32:
        """Return the published value [n] of version 0."""
        key = snapshot_key(fragment, 0, self.run.header.snapshots[fragment])
        values, _ = await self._published_at(fragment, 0, key)
        return values

    # --- folding ------------------------------------------------------------------------------------------------------

    async def fold(self, state: State, commit: Commit) -> Advance:
        """Return what a commit made of a state, computed anew from its inputs and compared with what it recorded."""
        header = commit.header
        fragment = self.run.layout.fragments[header.fragment]
        key = commit_key(header.fragment, header.version)
        if header.version != state.version + 1:
            raise LogCorrupt(key, f"does not follow version {state.version}")
        accumulator = Accumulator(fragment, outer_of(header))
        gate = asyncio.Semaphore(FETCHES)

        async def fetch(item: int) -> F32:
            async with gate:
                given = header.inputs[item]
                try:
                    blob = await self.store.get(given.key)
                    update = await self._runtime.offload(
                        open_update, blob, given.digest, self.run, fragment, given.learner, given.base
                    )
                except ObjectMissing:
                    raise LogCorrupt(given.key, f"is missing, and {key} merged it") from None
                except RecordInvalid as error:
                    raise LogCorrupt(given.key, f"is damaged, and {key} merged it: {error}") from None
                return update.gradient

        tasks = [asyncio.ensure_future(fetch(i)) for i in range(len(header.inputs))]
        try:
            for given, task in zip(header.inputs, tasks, strict=True):
                await self._runtime.offload(accumulator.add, await task, given.weight)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        result = await self._runtime.offload(
            merge.advance, state, accumulator, codec(header.codec_down), self.run.digest
        )
        if result.state_digest != header.state_digest:
            raise LogCorrupt(key, f"its inputs fold to another state than the one {header.writer} recorded")
        return result

    async def apply(self, values: F32, commit: Commit) -> F32:
        """Return the published value [n] after a commit, from the one before and the commit's value object."""
        header = commit.header
        fragment = self.run.layout.fragments[header.fragment]
        try:
            blob = await self.store.get(header.value_key)
        except ObjectMissing:
            raise LogCorrupt(header.value_key, f"is missing, and version {header.version} published it") from None
        return await self._runtime.offload(_apply, blob, values, fragment, header)

    # --- appending ----------------------------------------------------------------------------------------------------

    async def append(self, fragment: int, version: int, body: Blob) -> bool:
        """Create a commit and settle whether it is ours: True if these bytes are the log now, False if others are.

        An unknown outcome is settled by sending the identical bytes again. The body never changes in between.
        """
        key = commit_key(fragment, version)
        while True:
            try:
                if await self.store.create(key, body):
                    return True
                return bytes(await self.store.get(key)) == bytes(body)
            except (Unavailable, ObjectMissing):
                # Not reached, or "exists" answered before the object can be read: not settled, so go on asking.
                await asyncio.sleep(self._runtime.random.uniform(0.1, 0.5))

    # --- starting points ----------------------------------------------------------------------------------------------

    async def _start(self, fragment: int, version: int, key: str, keep: int) -> tuple[State, bytes, list[Commit]]:
        """Return the state in a snapshot, the digest of its commit, and the last commits up to it."""
        blob = await self.store.get(key)
        try:
            header, payload = frame.parse(blob, frame.Kind.SNAPSHOT, SnapshotHeader)
        except RecordInvalid as error:
            raise LogCorrupt(key, f"not a snapshot: {error}") from None
        self._check_snapshot(key, header, fragment, version)
        if len(payload) != 12 * self.run.layout.fragments[fragment].size:
            raise LogCorrupt(key, "is not of the size of its fragment")
        state = merge.restore(header, payload)
        wanted, digest, last = await self._anchor(fragment, version, keep)
        # Version 0 has no commit: the run object names the digest of the whole snapshot.
        computed = await self._runtime.offload(lambda: state.digest() if version else frame.digest(blob))
        if computed != wanted:
            raise LogCorrupt(
                key, f"does not match the digest in {f'commit {version}' if version else 'the run object'}"
            )
        return state, digest, last

    async def _anchor(self, fragment: int, version: int, keep: int) -> tuple[bytes, bytes, list[Commit]]:
        """Return the digest a snapshot of this version must have, the digest of its commit, and the last commits."""
        if version == 0:
            return self.run.header.snapshots[fragment], self.run.digest, []
        last = []
        for v in range(max(1, version - keep + 1), version + 1):
            commit = await self.commit(fragment, v)
            if commit is None:
                raise LogCorrupt(commit_key(fragment, v), f"is missing, and there is a snapshot of version {version}")
            last.append(commit)
        return last[-1].header.state_digest, last[-1].digest, last

    async def _published_at(self, fragment: int, version: int, key: str) -> tuple[F32, bytes]:
        size = 4 * self.run.layout.fragments[fragment].size
        # The published value comes first, behind a header of a known limit: one read by range gets both.
        reach = frame.largest(frame.Kind.SNAPSHOT, 0) + size
        blob = await self.store.get_range(key, 0, reach)
        try:
            header = frame.parse_head(blob, frame.Kind.SNAPSHOT, SnapshotHeader)
        except RecordInvalid as error:
            raise LogCorrupt(key, f"not a snapshot: {error}") from None
        self._check_snapshot(key, header, fragment, version)
        start = frame.payload_offset(frame.header_size(blob))
        if len(blob) < start + size:
            raise LogCorrupt(key, "is shorter than its fragment")
        values = np.frombuffer(memoryview(blob)[start : start + size], np.dtype("<f4")).copy()
        if version == 0:
            # The run object names the digest of the whole object; its header vouches for the published part.
            if not key.endswith(self.run.header.snapshots[fragment][:8].hex()):
                raise LogCorrupt(key, "is not the version 0 that the run object names")
            wanted, digest = header.published_digest, self.run.digest
        else:
            commit = await self.commit(fragment, version)
            if commit is None:
                raise LogCorrupt(commit_key(fragment, version), f"is missing, and there is a snapshot of {version}")
            wanted, digest = commit.header.published_digest, commit.digest
        if merge.array_digest(values) != wanted:
            raise LogCorrupt(key, f"does not hold the value that version {version} published")
        return values, digest

    def _check_snapshot(self, key: str, header: SnapshotHeader, fragment: int, version: int) -> None:
        run = bytes(32) if version == 0 else self.run.digest
        if (header.run, header.fragment, header.version) != (run, fragment, version):
            raise LogCorrupt(key, "belongs to another run, fragment or version")


# --- updates: bytes to gradients --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Update:
    """A verified update: what it says, and its outer gradient [n] float32."""

    header: UpdateHeader
    gradient: F32


def open_update(blob: Blob, digest: bytes, run: Run, fragment: Fragment, learner: str, base: int) -> Update:
    """Verify and decode an update. Pure, slow: runs off the loop. Raises `RecordInvalid` with a named reason.

    Checked in this order: digest, frame, run, fragment and codec, author, base, size, finiteness, length.
    """
    if frame.digest(blob) != digest:
        raise RecordInvalid(Reason.DIGEST_MISMATCH, "the bytes are not those that were announced")
    header, payload = frame.parse(blob, frame.Kind.UPDATE, UpdateHeader)
    if header.run != run.digest:
        raise RecordInvalid(Reason.WRONG_RUN, "the update belongs to another run")
    if (header.fragment, header.codec) != (fragment.index, run.rules.codec_up):
        raise RecordInvalid(Reason.WRONG_LAYOUT, f"fragment {header.fragment} in {header.codec}")
    if header.learner != learner:
        raise RecordInvalid(Reason.WRONG_AUTHOR, f"the update is by {header.learner}, announced by {learner}")
    if header.base != base:
        raise RecordInvalid(Reason.MALFORMED, f"base {header.base} where {base} was announced")
    code = codec(run.rules.codec_up)
    if len(payload) != packed_size(code, fragment):
        raise RecordInvalid(Reason.WRONG_LAYOUT, f"{len(payload)} bytes, not {packed_size(code, fragment)}")
    gradient = np.empty(fragment.size, np.float32)
    unpack(code, fragment, as_bytes(payload), gradient)
    if not all_finite(gradient):
        raise RecordInvalid(Reason.NON_FINITE, "holds a NaN or an infinity")
    if norm(gradient) > GRADIENT_NORM_MAX:
        raise RecordInvalid(Reason.OVERFLOW, f"longer than {GRADIENT_NORM_MAX:g}: no training step goes that far")
    return Update(header, gradient)


def outer_of(header: CommitHeader) -> dict[str, Outer]:
    """Return the arithmetic a commit was made with, by class of tensors."""
    return {DENSE: header.dense, EMBEDDING: header.embedding}


def _apply(blob: Blob, values: F32, fragment: Fragment, header: CommitHeader) -> F32:
    key = header.value_key
    if frame.digest(blob) != header.value_digest:
        raise LogCorrupt(key, f"is not the value that version {header.version} published")
    try:
        value, payload = frame.parse(blob, frame.Kind.VALUE, ValueHeader)
    except RecordInvalid as error:
        raise LogCorrupt(key, f"not a value: {error}") from None
    code = codec(value.codec)
    if value.version != header.version or len(payload) != packed_size(code, fragment):
        raise LogCorrupt(key, "is of another version or size")
    out = merge.apply_value(values, fragment, code, payload)
    if merge.array_digest(out) != header.published_digest:
        raise LogCorrupt(key, f"applied to version {header.version - 1} does not give the published version")
    return out

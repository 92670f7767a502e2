"""The commit log of a run as objects: reading it, finding its end, appending to it. `fold` makes states of it.

Nothing is listed but snapshots, and those only where a fold starts; versions are probed one by one until there is none.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from functools import partial

from isthmus.errors import LogCorrupt, ObjectMissing, RecordInvalid, Unavailable
from isthmus.format.records import frame
from isthmus.format.records.frame import Blob, Body, Gathered, Kind
from isthmus.format.records.keys import commit_key, is_versioned, snapshots_prefix, version_in
from isthmus.format.records.objects import CheckpointHeader, PackedHeader, SegmentHeader
from isthmus.format.signing import Signer
from isthmus.log.membership import Members
from isthmus.log.run import Run
from isthmus.log.verified import Commit, Gate, H, Verified
from isthmus.reasons import Reason
from isthmus.runtime.clock import Runtime
from isthmus.store import EdgeStore, Store, checked

AHEAD_MAX = 16
"""Commits asked for at once while walking: after ten thousand of them nobody wants to wait for one at a time."""


CHECKPOINT_EACH, CHECKPOINT_EXTRA = 64, 64 << 20
"""Bytes per parameter, and in all, that another learner's checkpoint may have to be looked at, parts included."""

INLINE_MAX = 1 << 16
"""Bytes of an object whose signature is checked on the loop: larger ones are hashed elsewhere."""


class Log:
    """One run's log. Reading is safe for anybody; appending is the syncer's."""

    def __init__(
        self, run: Run, store: Store, runtime: Runtime, signer: Signer | None = None, members: Members | None = None
    ) -> None:
        """`signer`: the key that what is written here is signed with; `members`: what is known of who may write."""
        self.run = run
        self.store = store
        self.runtime = runtime
        self.signer = signer
        self.members = members or Members(run)
        self.gate = Gate(run, self.members)
        """Judges what is read here."""
        self._regions = store.regions if isinstance(store, EdgeStore) else None
        if self.members.signed and self._regions is not None:
            self._regions.directed_by(self.members)

    def through(self, store: Store) -> "Log":
        """Return this log, read and written another way."""
        log = Log(self.run, store, self.runtime, self.signer, self.members)
        log._regions = log._regions or self._regions
        return log

    def doubt(self, key: str, error: Exception) -> bool:
        """See `Regions.doubt`."""
        return self._regions is not None and self._regions.doubt(key, error)

    def seal(self, data: Body | Gathered) -> None:
        """Sign an object, where this run is signed. Slow for large ones: off the loop."""
        frame.seal(data, self.signer)

    async def sealed_digest(self, data: Body | Gathered) -> bytes:
        """Sign an object and return its digest [32 bytes], off the loop."""

        def work() -> bytes:
            self.seal(data)
            return frame.digest(data)

        return await self.runtime.offload(work)

    async def open(
        self,
        blob: Blob,
        key: str,
        record: type[H],
        *,
        digest: bytes | None = None,
        in_force: bool = False,
        header_most: int | None = None,
    ) -> Verified[H]:
        """Return the object in these bytes (see `Gate.open`).

        `in_force`: its author has to be a member now; without that, to have been one at any time. Where nobody is known
        who may have written it, the membership is read to its end first. Raises `RecordInvalid`, `LogCorrupt`, and what
        the store raises.
        """

        async def judged() -> Verified[H]:
            under = self.members.current.version if in_force else None
            judge = partial(self.gate.open, blob, key, record, digest=digest, under=under, header_most=header_most)
            return await self.runtime.offload(judge) if len(blob) > INLINE_MAX else judge()

        known = self.members.current.version
        try:
            return await judged()
        except RecordInvalid as error:
            if error.reason != Reason.NOT_A_MEMBER or (await self.members.refresh(self.store)).version == known:
                raise
        return await judged()

    @property
    def checkpoint_most(self) -> int:
        """Bytes that are read of another learner's checkpoint at most."""
        return CHECKPOINT_EACH * self.run.layout.size + CHECKPOINT_EXTRA

    async def open_checkpoint(self, blob: Blob, key: str, *, own: bool = False) -> Verified[CheckpointHeader]:
        """Return a checkpoint by whoever may speak under its name now, or one that the owner has vouched for when it
        rotated the name's key. Raises what `open` does.

        `own`: of this learner itself, whose header may be as long as any.
        """
        in_force = not self.members.vouched(key, frame.signature_of(blob))
        most = None if own else self.gate.header_most
        return await self.open(blob, key, CheckpointHeader, in_force=in_force, header_most=most)

    # --- reading ------------------------------------------------------------------------------------------------------

    async def fetch(self, key: str, kind: Kind, fragment: int = 0) -> Body:
        """Return the bytes under a key, of which nothing is checked but that one of this kind may have so many.

        Raises `RecordInvalid` for more, and what the store raises.
        """
        return await checked.whole(self.store, key, kind, self.gate.payload_most(kind, fragment))

    async def commit(self, fragment: int, version: int) -> Commit | None:
        """Return a commit, or None where the log ends before it. Raises `LogCorrupt`."""
        key = commit_key(fragment, version)
        try:
            blob = await self._fetched(key)
        except ObjectMissing:
            return None
        packed = frame.kind_of(blob) == Kind.PACKED
        if packed:
            blob, _ = await self._unpacked(key, blob)
        return await self._opened(fragment, version, blob, packed)

    async def commits(
        self, fragment: int, after: int, digest: bytes | None = None, members: int = 0
    ) -> AsyncIterator[Commit]:
        """Yield the commits after a version, in order, until the log ends; each must name the one before.

        `digest` is what the first must name (None: not checked), `members` the membership that the one before it was
        made under: none is made under an earlier one. Raises `LogCorrupt` where the chain breaks. Where one is there,
        more are likely: they are asked for ahead, ever more at once; packed ones come a segment at a time.
        """
        ahead: deque[asyncio.Task[list[Commit]]] = deque()
        width, asked = 1, after
        try:
            while True:
                while len(ahead) < width:
                    asked += 1
                    ahead.append(asyncio.ensure_future(self._from(fragment, asked)))
                found = await ahead.popleft()
                if not found:
                    return
                width = min(AHEAD_MAX, 2 * width)
                for commit in found:
                    if commit.version <= after:
                        continue  # a segment begins before what was asked for
                    if digest is not None and commit.header.previous != digest:
                        raise LogCorrupt(
                            commit_key(fragment, after + 1),
                            f"follows commit {commit.header.previous.hex()[:16]}, "
                            f"the commit before it is {digest.hex()[:16]}: another history",
                            (fragment, after),
                        )
                    if commit.header.members < members:
                        raise LogCorrupt(
                            commit_key(fragment, after + 1),
                            f"made under membership {commit.header.members}, and the one before it under {members}",
                            (fragment, after),
                        )
                    after, digest, members = commit.version, commit.digest, commit.header.members
                    yield commit
                if len(found) > 1:
                    # What was asked for ahead may lie in the same segment: go on behind it, one segment at a time.
                    await _drop(ahead)
                    asked, width = after, 1
        finally:
            await _drop(ahead)

    async def _from(self, fragment: int, version: int) -> list[Commit]:
        """Return a commit, or where it is packed all of its segment from it on; nothing where the log ends."""
        key = commit_key(fragment, version)
        try:
            blob = await self._fetched(key)
        except ObjectMissing:
            return []
        if frame.kind_of(blob) != Kind.PACKED:
            return [await self._opened(fragment, version, blob, False)]
        inner, at = await self._unpacked(key, blob)
        first = await self._opened(fragment, version, inner, True)
        return [first, *await self._rest_of(fragment, at, first)]

    async def _rest_of(self, fragment: int, at: PackedHeader, first: Commit) -> list[Commit]:
        """Return what follows a packed commit in its segment, as far as the chain vouches for it."""
        found = [first]
        try:
            segment = await self.open(await self.fetch(at.segment, Kind.SEGMENT), at.segment, SegmentHeader)
        except (ObjectMissing, RecordInvalid):
            return []  # each by itself, then, with its own pointer and digest
        if segment.header.fragment != fragment:
            return []
        start = 0
        for number, size in enumerate(segment.header.sizes):
            version = segment.header.first + number
            if version > first.version:
                try:
                    commit = await self._opened(fragment, version, segment.payload[start : start + size], True)
                except LogCorrupt:
                    break
                if commit.header.previous != found[-1].digest:
                    break
                found.append(commit)
            start += size
        # Each is vouched for by the one after it; the last one by its own pointer.
        if len(found) > 1 and await self._pointed_at(fragment, found[-1].version) != found[-1].digest:
            found.pop()
        return found[1:]

    async def _pointed_at(self, fragment: int, version: int) -> bytes | None:
        """Return the digest that the pointer to a packed commit names; None where it is no pointer to believe."""
        key = commit_key(fragment, version)
        try:
            return (await self.open(await self.fetch(key, Kind.PACKED), key, PackedHeader)).header.digest
        except (ObjectMissing, RecordInvalid):
            return None

    async def snapshots(self, fragment: int) -> list[tuple[int, str]]:
        """Return (version, key) of the stored snapshots of a fragment, newest first. Lists."""
        entries = await self.store.list(snapshots_prefix(fragment))
        return sorted(((version_in(e.key), e.key) for e in entries if is_versioned(e.key)), reverse=True)

    async def newest(self, fragment: int, hint: int = 0) -> Commit | None:
        """Return the newest commit, None at version 0: from a hint or the newest snapshot, forward to the end."""
        found = await self.commit(fragment, hint) if hint else None
        if found is None:
            for version, _ in await self.snapshots(fragment):
                # A name says nothing: somebody may have put it there.
                if version and (found := await self.commit(fragment, version)) is not None:
                    break
        while (following := await self.commit(fragment, (found.version if found else 0) + 1)) is not None:
            found = following
        return found

    async def version_at(self, fragment: int, time: float) -> int:
        """Return the newest version written at or before a time [seconds since 1970, the syncers' clocks]."""
        newest = await self.newest(fragment)
        low, high = 0, newest.version if newest else 0
        while low < high:
            middle = (low + high + 1) // 2
            commit = await self.commit(fragment, middle)
            if commit is None:
                raise LogCorrupt(commit_key(fragment, middle), "is missing below the end of the log")
            low, high = (middle, high) if commit.header.written_at <= time else (low, middle - 1)
        return low

    # --- appending ----------------------------------------------------------------------------------------------------

    async def append(self, fragment: int, version: int, body: Blob) -> bool:
        """Create a commit and settle whether it is ours: True if these bytes are the log now, False if others are.

        An unknown outcome is settled by sending the identical bytes again. The body never changes in between.
        """
        key, ours = commit_key(fragment, version), frame.digest(body)
        while True:
            try:
                if await self.store.create(key, body):
                    return True
                found = await self.commit(fragment, version)
            except Unavailable:
                found = None
            if found is not None:
                return found.digest == ours
            # Not reached, or "exists" answered before the object can be read: not settled, so go on asking.
            await asyncio.sleep(self.runtime.random.uniform(0.1, 0.5))

    # --- inside -------------------------------------------------------------------------------------------------------

    async def _fetched(self, key: str) -> Body:
        """Return what lies where a commit belongs. Raises `LogCorrupt`, and what the store raises."""
        try:
            return await self.fetch(key, Kind.COMMIT)
        except RecordInvalid as error:
            raise LogCorrupt(key, f"not a commit: {error}") from None

    async def _opened(self, fragment: int, version: int, blob: Blob, packed: bool) -> Commit:
        """Return the commit in these bytes. Raises `LogCorrupt`, and what the store raises."""
        known = self.members.current.version
        try:
            return self.gate.commit(blob, fragment, version, packed)
        except LogCorrupt:
            # It may have been made under a membership that is not known here yet.
            if (await self.members.refresh(self.store)).version == known:
                raise
        return self.gate.commit(blob, fragment, version, packed)

    async def _unpacked(self, key: str, blob: Blob) -> tuple[Body, PackedHeader]:
        """Return the bytes of a packed commit from its segment, and where they lie."""
        try:
            at = (await self.open(blob, key, PackedHeader)).header
            if at.size > frame.largest(Kind.COMMIT, 0):
                raise RecordInvalid(Reason.OVERSIZED, f"{at.size} bytes of a commit are packed")
        except RecordInvalid as error:
            raise LogCorrupt(key, f"not a commit: {error}") from None
        try:
            inner = await self.store.get_range(at.segment, at.offset, at.offset + at.size)
        except ObjectMissing:
            raise LogCorrupt(at.segment, f"is missing, and {key} is packed in it") from None
        found = frame.digest(inner)
        if found != at.digest:
            raise LogCorrupt(
                at.segment,
                f"bytes {at.offset} to {at.offset + at.size} have digest {found.hex()[:16]}, "
                f"{key} says {at.digest.hex()[:16]}",
            )
        return inner, at


async def _drop(tasks: "deque[asyncio.Task[list[Commit]]]") -> None:
    """Forget requests whose answers are not wanted any more."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    tasks.clear()

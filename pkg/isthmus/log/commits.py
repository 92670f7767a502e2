"""The commit log of a run as objects: read it, find its end, append to it. `fold` computes states from it.

Only snapshots are listed, and only where a fold starts. Commits are requested by version, one after the other, until
one is missing.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from functools import partial

from isthmus.errors import LogCorrupt, ObjectMissing, RecordInvalid, Unavailable
from isthmus.format.records import frame
from isthmus.format.records.frame import Blob, Body, Gathered, Kind
from isthmus.format.records.keys import MEMBERS, commit_key, is_versioned, snapshots_prefix, version_in
from isthmus.format.records.objects import CheckpointHeader, PackedHeader, SegmentHeader
from isthmus.format.signing import Signer
from isthmus.log.membership import Members
from isthmus.log.run import Run
from isthmus.log.verify import Commit, H, Verified, Verifier
from isthmus.reasons import Reason
from isthmus.runtime.clock import Runtime
from isthmus.store import EdgeStore, Store, checked

AHEAD_MAX = 16
"""Most commits requested at once during a walk: ten thousand requests one at a time would take too long."""


CHECKPOINT_EACH, CHECKPOINT_EXTRA = 64, 64 << 20
"""Most bytes read of another learner's checkpoint, parts included: so many per parameter, plus a constant."""

INLINE_MAX = 1 << 16
"""Most bytes of an object that is verified on the event loop; larger objects are hashed on another thread."""


class Log:
    """One run's log. Every process may read it. Syncers append to it, and so does an operator who heals a fragment."""

    def __init__(
        self, run: Run, store: Store, runtime: Runtime, signer: Signer | None = None, members: Members | None = None
    ) -> None:
        """`signer`: the key that signs objects written through this log. `members`: the known versions of the
        membership."""
        self.run = run
        self.store = store
        self.runtime = runtime
        self.signer = signer
        self.members = members or Members(run)
        self.verifier = Verifier(run, self.members)
        """Checks every object that is read through this log."""
        self._regions = store.regions if isinstance(store, EdgeStore) else None
        if self.members.signed and self._regions is not None:
            self._regions.directed_by(self.members)

    def through(self, store: Store) -> "Log":
        """Return this log over another view of its store."""
        log = Log(self.run, store, self.runtime, self.signer, self.members)
        log._regions = log._regions or self._regions
        return log

    def doubt(self, key: str, error: Exception) -> bool:
        """Note that the object under a key is damaged; return whether reading it again may help (see
        `Regions.doubt`)."""
        return self._regions is not None and self._regions.doubt(key, error)

    @property
    def author(self) -> bytes:
        """The public key that signs objects written through this log [32 bytes]; zeros if nothing is signed."""
        return self.signer.author if self.signer else frame.UNSIGNED_AUTHOR

    def seal(self, data: Body | Gathered) -> None:
        """Sign an object if there is a signer. Slow for large objects: call it off the loop."""
        frame.seal(data, self.signer)

    async def sealed_digest(self, data: Body | Gathered) -> bytes:
        """Sign an object and return its digest [32 bytes]. The work is done off the loop."""

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
        """Return the verified object in these bytes (see `Verifier.open`).

        `in_force`: the author must be a member now; otherwise it is enough that the author was a member in any known
        version. If no known version allows the author, the membership is first read to its end. Raises `RecordInvalid`,
        `LogCorrupt`, and what the store raises.
        """

        async def judged() -> Verified[H]:
            under = self.members.current.version if in_force else None
            judge = partial(self.verifier.open, blob, key, record, digest=digest, under=under, header_most=header_most)
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
        """Most bytes that are read of another learner's checkpoint."""
        return CHECKPOINT_EACH * self.run.layout.size + CHECKPOINT_EXTRA

    async def open_checkpoint(self, blob: Blob, key: str, *, own: bool = False) -> Verified[CheckpointHeader]:
        """Return a verified checkpoint. Raises what `open` does.

        Its author must be allowed to write under its name now, or the owner must have vouched for it when it rotated
        the name's key. `own`: it is this learner's own checkpoint, whose header may be of any length.
        """
        in_force = not self.members.vouched(key, frame.signature_of(blob))
        most = None if own else self.verifier.header_most
        return await self.open(blob, key, CheckpointHeader, in_force=in_force, header_most=most)

    # --- reading ------------------------------------------------------------------------------------------------------

    async def fetch(self, key: str, kind: Kind, fragment: int = 0) -> Body:
        """Return the bytes under a key. Only their number is checked: no object of this kind can be longer.

        Raises `RecordInvalid` for a longer object, and what the store raises.
        """
        return await checked.whole(self.store, key, kind, self.verifier.payload_most(kind, fragment))

    async def commit(self, fragment: int, version: int) -> Commit | None:
        """Return a commit, or None if there is none under its key. Raises `LogCorrupt`."""
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
        """Yield the commits after a version, in order, until the log ends. Each must name the commit before it.

        `digest`: what the first commit must name as its predecessor (None: not checked). `members`: the membership
        version that the predecessor was made under; no later commit may be made under an earlier version. Raises
        `LogCorrupt` where the chain breaks. Once a commit is found, more are likely, so ever more are requested ahead.
        Packed commits are read a segment at a time.
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
                        continue  # the segment may begin before the requested version
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
                    # The requests ahead may be for commits in this segment. Continue behind it, one segment at a time.
                    await _drop(ahead)
                    asked, width = after, 1
        finally:
            await _drop(ahead)

    async def _from(self, fragment: int, version: int) -> list[Commit]:
        """Return a commit; if it is packed, also the rest of its segment. Empty if the log ends before it."""
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
        """Return the commits that follow a packed commit in its segment, as far as the chain vouches for them."""
        found = [first]
        try:
            segment = await self.open(await self.fetch(at.segment, Kind.SEGMENT), at.segment, SegmentHeader)
        except (ObjectMissing, RecordInvalid):
            return []  # each commit is then read alone, by its own pointer and digest
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
        # The next commit vouches for each commit by digest. The last one needs its own pointer.
        if len(found) > 1 and await self._pointed_at(fragment, found[-1].version) != found[-1].digest:
            found.pop()
        return found[1:]

    async def _pointed_at(self, fragment: int, version: int) -> bytes | None:
        """Return the digest that the pointer to a packed commit names; None if the pointer is missing or invalid."""
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
        """Return the newest commit, or None at version 0. Raises `LogCorrupt` if one of the newest is damaged.

        The search starts at the hint, or at the newest snapshot that has a commit, and goes forward to the end.
        """
        found, wrong = await self.readable(fragment, hint)
        if wrong is not None:
            at = found.version if found else 0
            raise wrong if wrong.key.startswith(MEMBERS) else wrong.after(fragment, at)
        return found

    async def readable(self, fragment: int, hint: int = 0) -> tuple[Commit | None, LogCorrupt | None]:
        """Return the newest commit, or None at version 0, and None.

        If one of the newest commits is damaged, return the commit before the damaged one, and the error.
        """
        found = await self.commit(fragment, hint) if hint else None
        wrong: LogCorrupt | None = None
        if found is None:
            for version, _ in await self.snapshots(fragment):
                # A snapshot's name proves nothing, since others may write there: its commit must exist.
                try:
                    if version and (found := await self.commit(fragment, version)) is not None:
                        break
                except LogCorrupt as error:
                    wrong = error
        try:
            while (following := await self.commit(fragment, (found.version if found else 0) + 1)) is not None:
                found = following
        except LogCorrupt as error:
            return found, error
        return found, wrong

    async def version_at(self, fragment: int, time: float) -> int:
        """Return the newest version written at or before a time [seconds since 1970, by the syncers' clocks].

        Raises `LogCorrupt` for a damaged commit before that time, or where the log cannot be read so far.
        """
        newest, wrong = await self.readable(fragment)
        if wrong is not None and (newest is None or time > newest.header.written_at):
            raise wrong
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
        """Create a commit. Return True if the log holds these bytes now, False if it holds another commit.

        If the outcome is unknown, the identical bytes are sent again until it is known. They never change in between.
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
            # The store was not reached, or it answered "exists" before the object can be read: try again.
            await asyncio.sleep(self.runtime.random.uniform(0.1, 0.5))

    # --- inside -------------------------------------------------------------------------------------------------------

    async def _fetched(self, key: str) -> Body:
        """Return the bytes under a commit's key. Raises `LogCorrupt`, and what the store raises."""
        try:
            return await self.fetch(key, Kind.COMMIT)
        except RecordInvalid as error:
            raise LogCorrupt(key, f"not a commit: {error}") from None

    async def _opened(self, fragment: int, version: int, blob: Blob, in_segment: bool) -> Commit:
        """Return the verified commit in these bytes. Raises `LogCorrupt`, and what the store raises."""
        known = self.members.current.version
        try:
            return self.verifier.commit(blob, fragment, version, in_segment)
        except LogCorrupt:
            # The commit may have been made under a newer membership than is known here.
            if (await self.members.refresh(self.store)).version == known:
                raise
        return self.verifier.commit(blob, fragment, version, in_segment)

    async def _unpacked(self, key: str, blob: Blob) -> tuple[Body, PackedHeader]:
        """Return the bytes of a packed commit from its segment, and the pointer to it. Raises `LogCorrupt`."""
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
    """Cancel requests whose answers are not needed any more, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    tasks.clear()

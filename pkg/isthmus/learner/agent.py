"""The learner's agent: uploads what the boundary captured, announces it, fetches lazily what others committed.

Plain coroutines off the training thread. Without store or bus it waits and the training goes on; whatever no commit has
settled is said again.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from isthmus import kernels
from isthmus.bus import Bus
from isthmus.bus.voice import Listener, Speaker
from isthmus.codecs import as_bytes, codec, pack, packed_size, unpack
from isthmus.errors import InputError, LogCorrupt, RecordInvalid, Unavailable
from isthmus.kernels import F32
from isthmus.layout import Fragment
from isthmus.learner.boundary import (
    Adopted,
    BaseMerged,
    Boundary,
    Called,
    Captured,
    Passed,
    Ready,
    Replica,
    ToAgent,
    ToTraining,
    UploadDone,
    UploadFailed,
    rounded,
)
from isthmus.learner.history import History, read_history
from isthmus.learner.ledger import Account, weigh
from isthmus.log import Commit, Log
from isthmus.members import smooth
from isthmus.reasons import Reason
from isthmus.records import frame
from isthmus.records.messages import (
    SYNCER_STREAM,
    Alive,
    Announce,
    Call,
    Committed,
    FromSyncer,
    Heartbeat,
    Leave,
    Pass,
    Progress,
    decode,
    learner_stream,
)
from isthmus.records.objects import SCHEMA, ClaimHeader, UpdateHeader, claim_key, update_key
from isthmus.rules import ADOPTIONS, Pace
from isthmus.runtime import Runtime
from isthmus.store import EdgeStore

logger = logging.getLogger(__name__)

FETCHERS = 4
"""Fragments fetched at once."""

PROBE_BEATS = 10
"""Heartbeats without a word about a fragment after which its next commit is looked for in the store."""

PROGRESS_BEATS = 0.1
"""Heartbeats between two reports of new steps."""

FINAL = {
    reason.value
    for reason in Reason
    # These speak of one update among several on its base, not of the newest one.
    if reason not in (Reason.SUPERSEDED, Reason.DUPLICATE, Reason.UNKNOWN_BASE, Reason.BASE_MERGED)
}
"""Rejections after which an update is not said again."""


@dataclass(slots=True)
class Known:
    """A fragment as the agent knows the log."""

    version: int
    values: F32
    digest: bytes
    wanted: int
    heard_at: float
    fetching: bool = False


@dataclass(slots=True)
class Attempt:
    """An upload that no commit has settled."""

    header: UpdateHeader
    key: str
    digest: bytes
    size: int
    due: bool
    boundary_at: float
    said_at: float
    residual: F32 | None
    """What the codec dropped; the next update's error feedback, if this one is merged."""


class LearnerAgent:
    """One learner's traffic with store and bus."""

    def __init__(
        self,
        log: Log,
        store: EdgeStore,
        bus: Bus,
        runtime: Runtime,
        name: str,
        *,
        adopt: str = "overwrite",
        steps_target: int = 0,
        pace: Pace | None = None,
    ) -> None:
        if adopt not in ADOPTIONS:
            raise InputError(f"unknown adoption {adopt!r}: choose one of {', '.join(ADOPTIONS)}")
        self.name = name
        self.pace = (pace or log.run.pace).check()
        self.incarnation = 0
        self.history = History()
        self.boundary: Boundary | None = None
        self.accounts = [Account() for _ in log.run.layout.fragments]
        self.failure: BaseException | None = None
        self._log = log
        self._store = store
        self._bus = bus
        self._runtime = runtime
        self._run = log.run
        self._adopt = adopt
        self._steps_target = steps_target
        self._up = codec(log.run.rules.codec_up)
        self._lossy = log.run.rules.error_feedback and not self._up.lossless
        self._speaker = Speaker(bus, learner_stream(name), runtime)
        self._listener = Listener(bus, runtime, lambda stream: stream == SYNCER_STREAM)
        self._known: list[Known] = []
        self._attempts: list[dict[int, Attempt]] = [{} for _ in log.run.layout.fragments]
        self._residual: list[F32 | None] = [None] * len(log.run.layout.fragments)
        self._upload_s = 0.0
        self._sync_s = 0.0
        self._wake = asyncio.Event()
        self._stale = asyncio.Event()
        self._uploading: set[asyncio.Task[None]] = set()
        self._draining = asyncio.Event()
        self._done = False

    # --- joining ------------------------------------------------------------------------------------------------------

    async def join(self) -> None:
        """Claim the name, find where predecessors stopped, and read the newest published values."""
        # The position first, the log after it: what is committed in between is heard again, which is harmless.
        self._listener.positions[SYNCER_STREAM] = await self._bus.tail(SYNCER_STREAM)
        self.incarnation = await self._claim()
        self.history = await read_history(self._log, self._bus, self.name)
        gate = asyncio.Semaphore(FETCHERS)

        async def one(fragment: int) -> Known:
            async with gate:
                version, values, digest = await self._log.published(fragment)
                return Known(version, values, digest, version, self._runtime.now())

        self._known = list(await asyncio.gather(*(one(f.index) for f in self._run.layout.fragments)))
        for account in self.accounts:
            account.lost = self.history.tokens_lost

    def attach(self, replica: Replica, notify: Callable[[], None] | None = None) -> Boundary:
        """Return the training side, with the newest values written into the replica.

        `notify` calls `wake` on the agent's loop; without one the boundary lives on that loop and calls it directly.
        """
        self.boundary = Boundary(
            self._run.layout,
            replica,
            sync_every=self._run.rules.sync_every,
            staleness=self.pace.staleness,
            adopt=self._adopt,
            versions=[(k.version, k.values) for k in self._known],
            step=self.history.step,
            tokens_seen=self.history.tokens_seen,
            now=self._runtime.now,
            notify=notify or self.wake,
        )
        return self.boundary

    def wake(self) -> None:
        """Look at the boundary's outbox. On the agent's loop only."""
        self._wake.set()

    async def _claim(self) -> int:
        incarnation = 1 + max(
            (int(entry.key.split("/")[2]) for entry in await self._store.list(f"learners/{self.name}/")), default=0
        )
        while True:
            header = ClaimHeader(
                schema=SCHEMA,
                run=self._run.digest,
                learner=self.name,
                incarnation=incarnation,
                claimed_at=self._runtime.wall(),
            )
            if await self._store.create(claim_key(self.name, incarnation), frame.draft(frame.Kind.CLAIM, header).blob):
                return incarnation
            incarnation += 1

    # --- running ------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve the boundary until `drain` was called and everything under way is through."""
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(self._listen()),
                tasks.create_task(self._speaker.run()),
                tasks.create_task(self._beat()),
                tasks.create_task(self._probe()),
                tasks.create_task(self._report_progress()),
                *(tasks.create_task(self._fetch_stale()) for _ in range(FETCHERS)),
            ]
            await self._serve_boundary(tasks)
            for task in background:
                task.cancel()
        await self._last_words()

    def drain(self, *, done: bool = False) -> None:
        """Stop once the uploads under way are announced; `done`: the learner has trained all its steps."""
        self._done = done
        self._draining.set()
        self._wake.set()

    async def _serve_boundary(self, tasks: asyncio.TaskGroup) -> None:
        assert self.boundary is not None, "run before attach"
        while True:
            while self.boundary.outbox:
                self._take(self.boundary.outbox.popleft(), tasks)
            if self._draining.is_set() and not self._uploading:
                return
            await self._wake.wait()
            self._wake.clear()

    def _take(self, message: ToAgent, tasks: asyncio.TaskGroup) -> None:
        match message:
            case Captured() as captured:
                if not self.accounts[captured.fragment].send(captured.base, captured.tokens):
                    self._tell(UploadDone(captured.fragment))  # an earlier update on this base was merged meanwhile
                    return
                task = tasks.create_task(self._upload(captured))
                self._uploading.add(task)
                task.add_done_callback(self._uploaded)
            case Passed(fragment, version):
                self._speaker.say(
                    Pass(
                        run=self._run.digest,
                        id=self._runtime.new_id(),
                        learner=self.name,
                        fragment=fragment,
                        version=version,
                    )
                )
            case Adopted(fragment, _, overwritten):
                self.accounts[fragment].overwritten += overwritten

    def _tell(self, message: ToTraining) -> None:
        if self.boundary is not None:
            self.boundary.inbox.append(message)

    def _uploaded(self, task: asyncio.Task[None]) -> None:
        self._uploading.discard(task)
        self._wake.set()

    # --- up -----------------------------------------------------------------------------------------------------------

    async def _upload(self, captured: Captured) -> None:
        p = captured.fragment
        header = UpdateHeader(
            schema=SCHEMA,
            run=self._run.digest,
            fragment=p,
            learner=self.name,
            incarnation=self.incarnation,
            base=captured.base,
            codec=self._up.name,
            steps=captured.steps,
            tokens=captured.tokens,
            step=captured.step,
            tokens_seen=captured.tokens_seen,
        )
        account = self.accounts[p]
        blob, residual = await self._runtime.offload(
            self._pack, captured, header, self._run.layout.fragments[p], self._residual[p]
        )
        if blob is None:
            logger.warning("fragment %d diverged here: the difference to version %d is not finite", p, captured.base)
            account.settle(captured.base, "rejected")
            self._tell(UploadDone(p))
            return
        digest = frame.digest(blob)
        key = update_key(p, self.name, captured.base, digest)
        try:
            await self._store.put(key, blob)
        except Unavailable as error:
            logger.warning("%s cannot be uploaded for now: %s", key, error)
            self._upload_failed(captured)
            return
        self._tell(UploadDone(p))
        self._upload_s = smooth(self._upload_s, self._runtime.now() - captured.boundary_at)
        if captured.base not in account.sent:
            return  # settled while it was on its way
        self._attempts[p][captured.base] = Attempt(
            header, key, digest, len(blob), captured.due, captured.boundary_at, 0.0, residual if self._lossy else None
        )
        self._announce(self._attempts[p][captured.base])

    def _upload_failed(self, captured: Captured) -> None:
        p, base = captured.fragment, captured.base
        account, earlier = self.accounts[p], self._attempts[p].get(base)
        if base not in account.sent or self._draining.is_set():
            self._tell(UploadDone(p))  # settled without it, or nobody is left to take it again
            return
        if self.boundary is not None and self.boundary.slots[p].base != base:
            account.settle(base, "late", earlier.header.tokens if earlier else None)
            self._tell(UploadDone(p))
            return
        account.unsend(base, earlier.header.tokens if earlier else None)
        header = earlier.header if earlier else None
        self._tell(UploadFailed(p, base, header.step if header else None, header.tokens_seen if header else 0))

    def _pack(
        self, captured: Captured, header: UpdateHeader, fragment: Fragment, residual: F32 | None
    ) -> tuple[bytearray | None, F32]:
        """Return the update object and what its codec dropped; (None, …) where the difference is not finite."""
        gradient = np.empty(fragment.size, np.float32)
        kernels.subtract(rounded(captured.base_values, fragment.tensors), captured.values, gradient)
        if residual is not None:
            kernels.add(gradient, residual, gradient)
        if not kernels.all_finite(gradient):
            return None, gradient
        out = frame.draft(frame.Kind.UPDATE, header, packed_size(self._up, fragment))
        pack(self._up, fragment, gradient, as_bytes(out.payload))
        if self._lossy:
            sent = np.empty_like(gradient)
            unpack(self._up, fragment, as_bytes(out.payload), sent)
            kernels.subtract(gradient, sent, gradient)
        return out.blob, gradient

    def _announce(self, attempt: Attempt) -> None:
        now = self._runtime.now()
        attempt.said_at = now
        h = attempt.header
        self._speaker.say(
            Announce(
                run=self._run.digest,
                id=self._runtime.new_id(),
                learner=self.name,
                incarnation=self.incarnation,
                fragment=h.fragment,
                base=h.base,
                key=attempt.key,
                digest=attempt.digest,
                size=attempt.size,
                steps=h.steps,
                tokens=h.tokens,
                step=h.step,
                tokens_seen=h.tokens_seen,
                due=attempt.due,
                age_s=max(0.0, now - attempt.boundary_at),
                step_s=self.boundary.step_s if self.boundary else 0.0,
                upload_s=self._upload_s,
                sync_s=self._sync_s,
            )
        )

    # --- hearing ------------------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        async for _, said in self._listener.live(lambda: None):
            try:
                message = decode(said.body)
            except RecordInvalid as error:
                logger.warning("message on the syncers' stream turned away: %s", error)
                continue
            if message.run == self._run.digest and isinstance(message, FromSyncer):
                self._hear(message)

    def _hear(self, message: FromSyncer) -> None:
        match message:
            case Committed(fragment=p, version=version) if p < len(self._known):
                self._want(p, version)
            case Alive(heads=heads):
                for p, version in enumerate(heads[: len(self._known)]):
                    self._want(p, version)
            case Call(fragment=p, version=version) if p < len(self._known):
                self._known[p].heard_at = self._runtime.now()
                self._want(p, version - 1)
                newest = self._attempts[p].get(version - 1)
                # Maybe the announcement was lost, maybe it crossed the call: say it again, but not at once.
                if newest is not None and self._runtime.now() - newest.said_at > self.pace.heartbeat_s / 4:
                    self._announce(newest)
                self._tell(Called(p, version))
            case _:
                pass

    def _want(self, fragment: int, version: int) -> None:
        known = self._known[fragment]
        known.heard_at = self._runtime.now()
        if version > known.wanted:
            known.wanted = version
            self._stale.set()

    async def _probe(self) -> None:
        """Look for commits nobody told us of: the bus may have lost the word, or be away."""
        while True:
            await asyncio.sleep(self.pace.heartbeat_s * self._runtime.random.uniform(0.5, 1.5))
            quiet = self._runtime.now() - PROBE_BEATS * self.pace.heartbeat_s
            for p, known in enumerate(self._known):
                if known.heard_at < quiet:
                    known.heard_at = self._runtime.now()
                    try:
                        if await self._log.commit(p, known.version + 1) is not None:
                            self._want(p, known.version + 1)
                    except (Unavailable, LogCorrupt) as error:
                        logger.warning("probing fragment %d: %s", p, error)
                        break

    # --- down ---------------------------------------------------------------------------------------------------------

    async def _fetch_stale(self) -> None:
        while True:
            behind = [p for p, k in enumerate(self._known) if k.wanted > k.version and not k.fetching]
            if not behind:
                self._stale.clear()
                await self._stale.wait()
                continue
            p = min(behind, key=lambda p: self._known[p].version)
            self._known[p].fetching = True
            try:
                await self._fetch(p)
            except (Unavailable, LogCorrupt) as error:
                logger.warning("fragment %d cannot be fetched for now: %s", p, error)
                await asyncio.sleep(self._runtime.random.uniform(0.2, 1.0))
            finally:
                self._known[p].fetching = False
                self._stale.set()

    async def _fetch(self, p: int) -> None:
        """Bring one fragment to the newest version heard of: difference by difference, or from a snapshot."""
        known = self._known[p]
        started = self._runtime.now()
        behind = known.wanted - known.version
        fragment = self._run.layout.fragments[p]
        difference = packed_size(codec(self._run.rules.codec_down), fragment)
        # A snapshot's published part and, on average, half a snapshot interval of differences after it.
        from_snapshot = 4 * fragment.size + difference * self.pace.snapshot_every // 2
        if behind * difference > from_snapshot:
            version, values, _ = await self._log.published(p)
            for v in range(known.version + 1, version + 1):
                commit = await self._log.commit(p, v)
                if commit is None:
                    raise LogCorrupt(f"version {v} of fragment {p}", "is missing from the log")
                self._settle(p, commit)
                known.version, known.digest = v, commit.digest
            known.values = values
        while known.version < known.wanted:
            commit = await self._log.commit(p, known.version + 1)
            if commit is None:
                known.wanted = known.version  # said, but not in the log
                break
            if commit.header.previous != known.digest:
                raise LogCorrupt(f"version {commit.version} of fragment {p}", "does not follow the version held here")
            known.values = await self._log.apply(known.values, commit)
            known.version, known.digest = commit.version, commit.digest
            self._settle(p, commit)
        if behind == 1:
            self._sync_s = smooth(self._sync_s, self._runtime.now() - started)
        self._tell(Ready(p, known.version, known.values))

    def _settle(self, p: int, commit: Commit) -> None:
        """Learn from a commit what became of our updates."""
        attempts, account = self._attempts[p], self.accounts[p]
        for given in commit.header.inputs:
            if given.learner != self.name:
                continue
            for base in [b for b in account.sent if b < given.base]:
                self._close(p, base, "rejected")
            attempt = attempts.get(given.base)
            if attempt is not None and attempt.digest == given.digest:
                self._residual[p] = attempt.residual
            # A predecessor's update on this base is not ours, but closes the base all the same.
            self._close(p, given.base, "merged", given.tokens if given.incarnation == self.incarnation else 0)
            self._tell(BaseMerged(p, given.base))
        for turned in commit.header.rejected:
            if turned.learner == self.name and turned.reason in FINAL and turned.base in attempts:
                self._close(p, turned.base, "rejected")
        for base in [b for b in account.sent if commit.version - b > self.pace.staleness]:
            self._close(p, base, "late")
        account.forget(commit.version - self.pace.staleness - 1)

    def _close(self, p: int, base: int, part: str, tokens: int | None = None) -> None:
        """Settle a base; an attempt that was not merged takes its residual with it."""
        self._attempts[p].pop(base, None)
        self.accounts[p].settle(base, part, tokens)

    # --- saying -------------------------------------------------------------------------------------------------------

    async def _beat(self) -> None:
        while True:
            self._speaker.say(self._heartbeat())
            now = self._runtime.now()
            for attempts in self._attempts:
                if attempts:
                    newest = attempts[max(attempts)]
                    if now - newest.said_at >= self.pace.heartbeat_s * self._runtime.random.uniform(0.8, 1.2):
                        self._announce(newest)
            await asyncio.sleep(self.pace.heartbeat_s * self._runtime.random.uniform(0.8, 1.0))

    async def _report_progress(self) -> None:
        assert self.boundary is not None, "run before attach"
        said = self.boundary.step
        while True:
            await asyncio.sleep(self.pace.heartbeat_s * PROGRESS_BEATS)
            if self.boundary.step == said:
                continue
            said = self.boundary.step
            self._speaker.say(
                Progress(
                    run=self._run.digest,
                    id=self._runtime.new_id(),
                    learner=self.name,
                    incarnation=self.incarnation,
                    step=said,
                    tokens_seen=self.boundary.tokens_seen,
                )
            )

    def _heartbeat(self) -> Heartbeat:
        b = self.boundary
        assert b is not None, "heartbeat before attach"
        for p, account in enumerate(self.accounts):
            account.local = b.local_tokens(p)
        waiting = []
        if self._store.down_s:
            waiting.append(f"store ({self._store.down_s:.0f} s)")
        if self._speaker.down_since is not None or self._listener.down_since is not None:
            waiting.append("bus")
        return Heartbeat(
            run=self._run.digest,
            id=self._runtime.new_id(),
            learner=self.name,
            incarnation=self.incarnation,
            step=b.step,
            steps_target=self._steps_target,
            tokens_seen=b.tokens_seen,
            loss=b.loss if b.loss is not None and np.isfinite(b.loss) else None,
            step_s=b.step_s,
            upload_s=self._upload_s,
            sync_s=self._sync_s,
            versions=tuple(slot.base for slot in b.slots),
            bytes_up=self._store.traffic.bytes_up,
            bytes_down=self._store.traffic.bytes_down,
            tokens_lost=self.history.tokens_lost,
            ledger=weigh(self.accounts, self._run.shares, b.tokens_here + self.history.tokens_lost),
            waiting_for=", ".join(waiting),
        )

    async def _last_words(self) -> None:
        b = self.boundary
        self._speaker.say(self._heartbeat())
        self._speaker.say(
            Leave(
                run=self._run.digest,
                id=self._runtime.new_id(),
                learner=self.name,
                incarnation=self.incarnation,
                step=b.step if b else 0,
                done=self._done,
            )
        )
        try:
            async with asyncio.timeout(2.0):
                await self._speaker.flush()
        except (TimeoutError, Unavailable) as error:
            logger.warning("last words not said: %s", error)

"""One fragment at one syncer: its state, its round, its accumulator; the only place where commits are written.

Of a fragment that another syncer keeps only the commits are read. Its state is folded when it is taken over.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field

from isthmus.codecs import codec
from isthmus.errors import Denied, LogCorrupt, ObjectMissing, RecordInvalid, Unavailable
from isthmus.kernels import ARITHMETIC
from isthmus.layout import TensorClass
from isthmus.log import Commit, Log, fold, merge
from isthmus.log.merge import Accumulator, Advance, State
from isthmus.log.updates import Update, open_update
from isthmus.metrics import SyncerMetrics
from isthmus.reasons import Reason
from isthmus.records import frame
from isthmus.records.fields import SECONDS_MAX
from isthmus.records.keys import RUN_KEY, snapshot_key, value_key
from isthmus.records.messages import Call, Committed, FromSyncer
from isthmus.records.objects import INPUTS_MAX, SCHEMA, SEEN_MAX, CommitHeader, Input, Passing, Waited
from isthmus.rounds.events import (
    Abandon,
    Action,
    Announced,
    Appended,
    Arrived,
    Called,
    CallRound,
    CatchUp,
    CaughtUp,
    ClosedBy,
    Fetch,
    Hold,
    Invalid,
    Lost,
    Merge,
    Passed,
    Pointer,
    Refused,
    Spoiled,
    Tick,
    Unreachable,
)
from isthmus.rounds.members import Members
from isthmus.rounds.rounds import Round, Rounds
from isthmus.rules import Pace
from isthmus.runtime import Runtime
from isthmus.store import Store
from isthmus.syncer.counting import Counting
from isthmus.syncer.fairness import FairQueue, FairSlots
from isthmus.syncer.inbox import Event, Fetched, Folded, FromBus, Heard, Looked

logger = logging.getLogger(__name__)

INBOX_MAX = 2048
"""Bus messages that wait for one fragment; beyond that they are dropped, since they will be said again."""

INBOX_EACH = 64
"""Those of one author among them."""

LOOK_S = 0.25
"""Between two looks at the log that found nothing: words of commits that do not exist cost no more than that."""

FETCH_S, FETCH_BYTES_S = 30.0, 1 << 20
"""An update may take this long to fetch, and a second more for so many bytes: bodies may be slow, or never end."""

STATE_BYTES = 12
"""Of a state, for each parameter: published, master, momentum."""

SNAPSHOTS_WORTH, SNAPSHOT_LEAST = 2, 16 << 20
"""Updates merged since the newest snapshot, in snapshots' bytes, after which the next one is written; and in bytes, of
which fewer are folded in a moment."""

FOLDS_TRIED = 3
"""Folds in a row that the store cuts short, after which a fragment is left to others; they are tried again even so."""

FOLD_S, FOLD_BYTES_S = 10.0, 8 << 20
"""A fragment that is being folded is left to others where no object comes for as long as that, and a second more for so
many bytes of its state."""


@dataclass(slots=True)
class Limits:
    """What the fragments of one syncer share."""

    accumulators: asyncio.Semaphore
    fetches: FairSlots
    looks: asyncio.Semaphore
    folds: asyncio.Semaphore
    merges: asyncio.Semaphore
    snapshots: asyncio.Semaphore


DROPPED_MAX = 1024
"""Names of which dropped messages are counted one by one."""


@dataclass(slots=True)
class Tallies:
    """What a syncer did since it started."""

    commits: int = 0
    commits_lost: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)
    """Messages that found too many before them, by author."""

    def drop(self, author: str) -> None:
        """Count a dropped message."""
        if author in self.dropped or len(self.dropped) < DROPPED_MAX:
            self.dropped[author] = self.dropped.get(author, 0) + 1


def snapshot_after(size: int) -> int:
    """Return the bytes of updates merged into a fragment of so many parameters after which a snapshot is due."""
    return max(SNAPSHOTS_WORTH * STATE_BYTES * size, SNAPSHOT_LEAST)


class Keeper:
    """Keeps one fragment: folds its log, runs its rounds, commits."""

    def __init__(
        self,
        log: Log,
        fragment: int,
        members: Members,
        pace: Pace,
        runtime: Runtime,
        limits: Limits,
        tallies: Tallies,
        metrics: SyncerMetrics,
        name: str,
        say: Callable[[FromSyncer], None],
        updates: Store | None = None,
    ) -> None:
        """`updates`: the way to what learners stored, where it differs from the log's: a refusal there is no outage."""
        self.fragment = log.run.layout.fragments[fragment]
        self.rounds = Rounds(pace, log.run.rules.sync_every, members)
        self.rounds.holding = False
        self.state: State | None = None
        """At `head`; None where only the commits are known."""
        self.fold_s = 0.0
        """How long folding the state took when the fragment was last taken over, in seconds."""
        self.broken = ""
        """Why the log of this fragment cannot be folded to its end here, or empty."""
        self._retry_at = 0.0
        self._log = log
        self._store = updates or log.store
        self._pace = pace
        self._runtime = runtime
        self._limits = limits
        self._tallies = tallies
        self._metrics = metrics
        self._counting = Counting(fragment, name, metrics, runtime)
        self._name = name
        self._say = say
        self._digest = log.run.digest
        self._outer = merge.outers(log.run.rules)
        self._down = codec(log.run.rules.codec_down)
        self._accumulator: Accumulator | None = None
        self._inputs: list[Input] = []
        self._has_slot = False
        self._slot_lock = asyncio.Lock()
        self._merging = fold.Merging(log, self._moved)
        self._following = fold.Following()
        self._begun = False
        self._wanted = False
        """Whether this syncer is to hold the fragment; it does (`rounds.holding`) as soon as it has its state."""
        self._unsnapped = 0
        """Bytes of updates merged since the newest snapshot, as far as is known."""
        self._moved_at = runtime.now()
        """When folding the state began, or last read a part of it."""
        self._folding = False
        self._failed = 0
        """Folds in a row that the store did not let come to an end."""
        self._keep = max(2, pace.staleness + 1)
        self._inbox: FairQueue[Event] = FairQueue(INBOX_EACH, INBOX_MAX, self._dropped)
        self._tasks: asyncio.TaskGroup | None = None
        self._fetching: set[asyncio.Task[None]] = set()
        self._snapshot: asyncio.Task[None] | None = None
        self._snapshot_version = 0
        """The newest version of which a snapshot is stored, or on its way."""
        self._look = asyncio.Event()
        self._known = 0
        """The newest version that another syncer says is there."""
        self._behind_since = runtime.now()

    @property
    def head(self) -> int:
        """The newest version folded; 0 before `recover`."""
        return self.rounds.head

    def overdue(self, silent_s: float) -> bool:
        """Return whether this fragment is for others to keep: they know of a version that could not be read here for
        longer than `silent_s`, the silence of a syncer taken for dead [s], or its state does not come."""
        now = self._runtime.now()
        if self._failed >= FOLDS_TRIED:
            return True
        if self._folding:  # what waits for its turn to be folded is not late, whatever that takes
            return now - self._moved_at > FOLD_S + STATE_BYTES * self.fragment.size / FOLD_BYTES_S
        return self.head < self._known and now - self._behind_since > silent_s

    def _moved(self, size: int = 0) -> None:
        """Note that so many bytes of updates were folded."""
        self._moved_at = self._runtime.now()
        if self.state is None:
            self._unsnapped += size

    def _learn_of(self, version: int) -> None:
        """Note that a version is said to be in the log."""
        if self.head >= self._known:
            self._behind_since = self._runtime.now()
        self._known = max(version, self._known)

    @property
    def waiting(self) -> int:
        """Events that wait to be handled."""
        return len(self._inbox)

    def offer(self, author: str, event: FromBus) -> None:
        """Queue what an author said on the bus; where too much of its own waits, the oldest of that is dropped."""
        self._inbox.put(author, event)

    def hold(self, holding: bool) -> None:
        """Take the fragment over, or leave it once the round under way is through."""
        self._inbox.put_own(Hold(holding))

    def _dropped(self, author: str) -> None:
        self._tallies.drop(author)
        self._metrics.messages_dropped.inc()

    async def recover(self) -> None:
        """Read the commits to their end. A damaged chain leaves the fragment `broken`: not served until it heals."""
        try:
            at = await fold.fold(self._log, self.fragment.index, self._following, keep=self._keep)
        except LogCorrupt as error:
            self._break(error)
            return
        self._begin(at)

    def _begin(self, at: fold.At[State] | fold.At[None]) -> None:
        self._begun, self.state, self._digest = True, at.carried, at.digest
        self._counting.begun(at.version, at.last[-1].header if at.last else None)
        self.rounds.restored(at.version, [commit.header for commit in at.last])

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve rounds until `stopping` is set; a merge under way is finished first."""
        async with asyncio.TaskGroup() as self._tasks:
            following = self._tasks.create_task(self._follow())
            while not stopping.is_set():
                event = await self._next()
                actions = [] if event is None else await self._handle(event)
                # The clock is looked at after every event: a round ends when its grace ends, whatever else happens.
                await self._do([*actions, *self.rounds.on(Tick(), self._runtime.now())])
                lacking = self._folds and self.state is None
                if (lacking or self.broken) and self._runtime.now() >= self._retry_at:
                    self._look.set()  # what was damaged, or failed, on its way to us may be whole in the store
            for task in (following, *self._fetching):
                task.cancel()
            if self.rounds.holding and self.state is not None and self._snapshot_version < self.state.version:
                # Whoever starts next need not fold what this syncer knows.
                if self._snapshot is not None:
                    await self._snapshot
                if await self._at_the_end(self.state.version):
                    await self._write_snapshot()

    async def _next(self) -> Event | None:
        """Return the next event; None when the clock has to be looked at first."""
        try:
            event = self._inbox.get_nowait()
            await asyncio.sleep(0)  # with events without end the others of this loop want their turns too
            return event
        except IndexError:
            pass
        now = self._runtime.now()
        deadline = self.rounds.deadline(now)
        # Without a round there is no deadline; wake up now and then to see whether to stop.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._pace.heartbeat_s if deadline is None else deadline - now):
                return await self._inbox.get()
        return None

    # --- events -------------------------------------------------------------------------------------------------------

    async def _handle(self, event: Event) -> list[Action]:
        now = self._runtime.now()
        match event:
            case Folded(at, done):
                self._go_to(at)
                done.set()
                return []
            case Looked(through, error):
                if through:
                    self.broken = ""
                elif error is not None and (error.readable is None or self._lacks(error.readable[1])):
                    self._break(error)  # else we have gone beyond that place by ourselves
                if through and self._wanted and self.state is not None and not self.rounds.holding:
                    return self.rounds.on(Hold(holding=True), now)
                return self.rounds.on(CaughtUp(), now)
            case Hold(holding):
                self._wanted = holding
                if holding and self.state is None:
                    self._look.set()  # it is held once its state is folded
                    return []
                return self.rounds.on(event, now)
            case Announced() | Called() | Passed() | Invalid():
                return self.rounds.on(event, now)
            case Heard(version):
                self._learn_of(version)
                return [CatchUp()] if version > self.head else []
            case Fetched(pointer, update, reason, at, done):
                try:
                    return await self._arrive(pointer, update, reason, at)
                finally:
                    done.set()

    async def _arrive(
        self, pointer: Pointer, update: Update | None, reason: Reason | None, fetched_at: float
    ) -> list[Action]:
        if reason is not None:
            return self.rounds.on(Refused(pointer, reason), self._runtime.now())
        if update is None:
            self.rounds.on(Unreachable(pointer), self._runtime.now())
            return []
        if not self.rounds.accepts(pointer):
            return self.rounds.fetches()
        if self._accumulator is None:
            self._accumulator = Accumulator(self.fragment, self._outer, self._runtime.crew)
        effective = merge.weight(update.header.tokens, update.header.steps)
        await self._runtime.offload(self._accumulator.add, update.gradient, effective)
        given = Input(
            key=pointer.key,
            digest=pointer.digest,
            learner=pointer.learner,
            incarnation=update.header.incarnation,
            base=pointer.base,
            steps=update.header.steps,
            tokens=update.header.tokens,
            step=update.header.step,
            tokens_seen=update.header.tokens_seen,
            bytes=pointer.size,
            train_s=update.header.train_s,
            taken_at=self._wall(pointer.boundary_at),
            heard_at=self._wall(pointer.heard_at),
            fetched_at=self._wall(fetched_at),
            arrived_at=self._runtime.wall(),
            weight=effective,
        )
        self._inputs.append(given)
        return self.rounds.on(Arrived(pointer), self._runtime.now())

    # --- actions ------------------------------------------------------------------------------------------------------

    async def _do(self, actions: Iterable[Action]) -> None:
        todo = list(actions)
        while todo:
            match todo.pop(0):
                case CallRound(version):
                    self._say(
                        Call(
                            run=self._log.run.digest,
                            id=self._runtime.new_id(),
                            syncer=self._name,
                            fragment=self.fragment.index,
                            version=version,
                        )
                    )
                case Fetch(pointer):
                    assert self._tasks is not None, "fetching before run"
                    task = self._tasks.create_task(self._fetch(pointer))
                    self._fetching.add(task)
                    task.add_done_callback(self._fetching.discard)
                case CatchUp():
                    self._look.set()
                case Merge(version, closed_by):
                    todo += await self._merge(version, closed_by)
                case Abandon():
                    self._release()

    async def _fetch(self, pointer: Pointer) -> None:
        await self._slot()
        async with self._limits.fetches.slot(pointer.learner):
            update, reason = None, None
            try:
                async with asyncio.timeout(FETCH_S + pointer.size / FETCH_BYTES_S):
                    # One byte more than announced, so that a larger object is noticed and never read whole.
                    blob = await self._store.get_range(pointer.key, 0, pointer.size + 1)
                self._limits.fetches.judge(pointer.learner, slow=False)
                if len(blob) != pointer.size:
                    reason = Reason.OVERSIZED if len(blob) > pointer.size else Reason.TRUNCATED
                else:
                    update = await self._runtime.offload(
                        open_update,
                        blob,
                        pointer.digest,
                        self._log.run,
                        self.fragment,
                        pointer.learner,
                        pointer.base,
                        self._runtime.crew,
                    )
                    if (update.header.steps, update.header.tokens) != (pointer.steps, pointer.tokens):
                        reason = Reason.MALFORMED
            except ObjectMissing:
                reason = Reason.MISSING
            except RecordInvalid as error:
                self._warn("%s of %s turned away: %s", pointer.key, pointer.learner, error, learner=pointer.learner)
                reason = error.reason
            except Denied as error:
                self._warn("%s of %s may not be read: %s", pointer.key, pointer.learner, error, learner=pointer.learner)
                if not await self._is_refused():
                    # Another account's object, another key, an archive: whatever it is, it is this update's affair.
                    reason = Reason.UNREADABLE
            except TimeoutError:
                self._limits.fetches.judge(pointer.learner, slow=True)
                self._warn("%s of %s takes too long", pointer.key, pointer.learner, learner=pointer.learner)
            except Unavailable as error:
                self._warn("%s cannot be fetched for now: %s", pointer.key, error, learner=pointer.learner)
            done = asyncio.Event()
            self._inbox.put_own(Fetched(pointer, None if reason else update, reason, self._runtime.now(), done))
            await done.wait()

    async def _is_refused(self) -> bool:
        """Return whether it is this syncer that is refused, not one learner's object: then the run object is, too."""
        try:
            await self._log.store.get_range(RUN_KEY, 0, 1)
        except (Unavailable, Denied):
            return True
        return False

    async def _merge(self, version: int, closed_by: ClosedBy) -> list[Action]:
        assert self.state is not None, "merging before recovery"
        assert self._accumulator is not None, "merging an empty round"
        assert self.rounds.round is not None, "merging without a round"
        started = self._runtime.now()
        async with self._limits.merges:
            result: Advance = await self._runtime.offload(
                merge.advance, self.state, self._accumulator, self._down, self._log.run.digest
            )
        merged = self._runtime.now()
        if not result.finite:
            self._warn("the merge of %s overflows", [i.key for i in self._inputs], level=logging.ERROR, version=version)
            self._release()
            self.rounds.on(Spoiled(), self._runtime.now())
            return []
        key = value_key(self.fragment.index, version, result.value_digest)
        await self._put(key, result.value)
        published = self._runtime.now()
        header = CommitHeader(
            schema=SCHEMA,
            run=self._log.run.digest,
            previous=self._digest,
            arithmetic=ARITHMETIC,
            fragment=self.fragment.index,
            version=version,
            inputs=tuple(self._inputs),
            late=self.rounds.late(self._wall),
            dense=self._outer[TensorClass.DENSE],
            embedding=self._outer[TensorClass.EMBEDDING],
            codec_down=self._down.name,
            cancelled=result.cancelled,
            value_key=key,
            value_digest=result.value_digest,
            published_digest=result.published_digest,
            state_digest=result.state_digest,
            rejected=self.rounds.rejections(self._wall),
            rejected_total=dict(self.rounds.rejected_total),
            waited=self._waited(self.rounds.round, closed_by, merged - started, published - merged),
            writer=self._name,
            attempt=self._runtime.new_id(),
            written_at=self._runtime.wall(),
        )
        # From here on these bytes are the attempt: they do not change until its outcome is known.
        try:
            body = frame.draft(frame.Kind.COMMIT, header).blob
            frame.parse(body, frame.Kind.COMMIT, CommitHeader)  # what nobody could read must never take the key
        except (RecordInvalid, ValueError) as error:
            self._warn("no commit can say this: %s", error, level=logging.ERROR, version=version)
            self._release()
            self.rounds.on(Spoiled(), self._runtime.now())
            return []
        try:
            ours = await self._log.append(self.fragment.index, version, body)
        except LogCorrupt as error:
            self._break(error)  # something stands under the key that is no commit
            return []
        if ours:
            self._tallies.commits += 1
            first = self._tallies.commits == 1  # the rest are counted, once a minute
            logger.log(
                logging.INFO if first else logging.DEBUG,
                "commit %d/%d merges %d updates of %d expected learners, closed by %s",
                self.fragment.index,
                version,
                len(header.inputs),
                len(header.waited.expected),
                closed_by.value,
                extra={
                    "fragment": self.fragment.index,
                    "version": version,
                    "learners": [given.learner for given in header.inputs],
                    "missing": list(header.waited.missing),
                },
            )
            self._settle(Commit(header, frame.digest(body)), result.state)
            return self.rounds.on(CaughtUp(), self._runtime.now())
        self._tallies.commits_lost += 1
        self._metrics.commits_lost.inc()
        self._learn_of(version)
        self._release()
        self.rounds.on(Lost(), self._runtime.now())
        return await self._catch_up()

    async def _put(self, key: str, data: frame.Blob) -> None:
        """Store an object however long the store is away: giving up would only mean to merge the same again."""
        while True:
            try:
                await self._log.store.put(key, data)
            except Unavailable as error:
                self._warn("%s cannot be written for now: %s", key, error)
                await asyncio.sleep(self._runtime.random.uniform(0.1, 0.5))
            else:
                return

    async def _follow(self) -> None:
        """Look at the log whenever somebody knows more than we do, beside the round under way, one look at a time."""
        while True:
            await self._look.wait()
            self._look.clear()
            head, had = self.head, self.state is not None
            async with self._limits.folds if self._folds and not had else self._limits.looks:
                try:
                    async for at in self._onward():
                        done = asyncio.Event()
                        self._inbox.put_own(Folded(at, done))
                        await done.wait()
                    looked = Looked(through=True)
                except LogCorrupt as error:
                    looked = Looked(through=False, error=error)
                except Unavailable as error:
                    self._warn("cannot catch up for now: %s", error)
                    looked = Looked(through=False)
                # Only now: a round opened on the way would be for a version that exists.
                self._inbox.put_own(looked)
            if self.head == head and had == (self.state is not None):
                await asyncio.sleep(LOOK_S * self._runtime.random.uniform(0.8, 1.2))

    @property
    def _folds(self) -> bool:
        """Whether the state is wanted. Where folding it failed, only folding it tells that it goes again."""
        return self._wanted or bool(self.broken) or self._failed >= FOLDS_TRIED

    def _lacks(self, version: int) -> bool:
        """Return whether a log that can be read up to this version is not enough to go on here."""
        return self.head <= version or (self._folds and self.state is None)

    async def _onward(self) -> AsyncIterator[fold.At[State] | fold.At[None]]:
        """Read what others committed, and fold it where the state is wanted. Raises `LogCorrupt`, `Unavailable`."""
        self._retry_at = self._runtime.now() + self._pace.heartbeat_s
        p, folds = self.fragment.index, self._folds
        try:
            if folds and self.state is not None:
                here = fold.At(self.head, self.state, self._digest, ())
                async for folded in fold.onward(self._log, p, self._merging, here, keep=self._keep):
                    yield folded
                return
            if self._begun:
                known = fold.At(self.head, None, self._digest, ())
                async for followed in fold.onward(self._log, p, self._following, known, keep=self._keep):
                    yield followed
                if not folds:
                    return
        except LogCorrupt as error:
            # What comes next may have been collected while we were away: start again from a snapshot.
            self._warn("starts again from a snapshot: %s", error)
        if not folds:
            yield await fold.fold(self._log, p, self._following, keep=self._keep)
            return
        started, self._unsnapped = self._runtime.now(), 0
        self._folding = True
        self._moved()
        try:
            folded_whole = await fold.fold(self._log, p, self._merging, keep=self._keep)
        except Unavailable:
            self._failed += 1
            raise
        finally:
            self._folding = False
        self._failed, self.fold_s = 0, self._runtime.now() - started
        yield folded_whole

    def _go_to(self, at: fold.At[State] | fold.At[None]) -> None:
        """Go to where a look at the log came to, unless we are there already; the next round is for later."""
        if not self._begun:
            self._begin(at)
        for commit in at.last:
            if commit.version > self.head:
                self._settle(commit, at.carried)
        if at.carried is not None and self.state is None and at.version == self.head:
            self.state = at.carried

    async def _catch_up(self) -> list[Action]:
        """Fold what was there first, before anything else is done: the next round stands on it. But not for ever: what
        somebody has merged may never end for us, and then this fragment is for others to keep."""
        try:
            async with asyncio.timeout(self._pace.silence_s):
                async for at in self._onward():
                    self._go_to(at)
            self.broken = ""
        except LogCorrupt as error:
            self._break(error)
            return []
        except (Unavailable, TimeoutError) as error:
            self._warn("cannot catch up for now: %s", str(error) or f"no answer within {self._pace.silence_s:g} s")
            self._look.set()
            return []  # another round here would be lost as this one was
        return self.rounds.on(CaughtUp(), self._runtime.now())

    def _break(self, error: LogCorrupt) -> None:
        """Stop serving a fragment whose log is damaged; the next snapshot another syncer writes may heal it."""
        if self.broken != str(error):
            self._warn("is not served here: %s", error, level=logging.ERROR)
        self.broken = str(error)
        self._release()
        self.rounds.on(Lost(), self._runtime.now())

    def _settle(self, commit: Commit, state: State | None) -> None:
        """A commit is in the log: it becomes the state, and only now is it said. What we had is let go where the commit
        is another's and the fragment, too."""
        self._release()
        self.state, self._digest = state, commit.digest
        if state is None and self.rounds.holding:
            self.rounds.on(Hold(holding=False), self._runtime.now())
        ours = commit.header.writer == self._name
        self._counting.settled(commit.header)
        if ours:
            self._say(
                Committed(
                    run=self._log.run.digest,
                    id=self._runtime.new_id(),
                    syncer=self._name,
                    fragment=self.fragment.index,
                    version=commit.version,
                )
            )
        self._unsnapped += sum(given.bytes for given in commit.header.inputs)
        if state is not None and ours and self._is_snapshot_due(commit.version):
            assert self._tasks is not None, "committing before run"
            self._snapshot = self._tasks.create_task(self._write_snapshot())
        self.rounds.on(Appended(commit.header), self._runtime.now())

    def _is_snapshot_due(self, version: int) -> bool:
        """Return whether who takes over should find a newer snapshot: it reads that one and what was merged since."""
        if self._snapshot is not None and not self._snapshot.done():
            return False
        by_versions = (version + self.fragment.index) % self._pace.snapshot_every == 0
        return by_versions or self._unsnapped >= snapshot_after(self.fragment.size)

    async def _at_the_end(self, version: int) -> bool:
        """Return whether a version is the newest. From a snapshot of an older one no way may lead on any more: what was
        merged after it may have been collected."""
        try:
            return await self._log.commit(self.fragment.index, version + 1) is None
        except (Unavailable, Denied, LogCorrupt):
            return False

    async def _write_snapshot(self) -> None:
        p = self.fragment.index
        async with self._limits.snapshots:
            # What it is by now: while others are written, no state is kept that has been left behind meanwhile.
            state, told = self.state, self._unsnapped
            if state is None:
                return  # it is another's, who writes its own
            blob = await self._runtime.offload(merge.snapshot, state, p, self._log.run.digest)
            digest = await self._runtime.offload(frame.digest, blob)
            try:
                await self._log.store.put(snapshot_key(p, state.version, digest), blob)
                self._snapshot_version = max(state.version, self._snapshot_version)
                self._unsnapped -= told
            except Unavailable as error:
                self._warn("no snapshot: %s", error, version=state.version)

    def _warn(self, text: str, *args: object, level: int = logging.WARNING, **about: object) -> None:
        about["fragment"] = self.fragment.index
        logger.log(level, f"fragment %d: {text}", self.fragment.index, *args, extra=about)

    def _wall(self, at: float) -> float:
        """Return the date of a time on our clock."""
        return max(0.0, self._runtime.wall() - (self._runtime.now() - at))

    def _waited(self, r: Round, closed_by: ClosedBy, merge_s: float, publish_s: float) -> Waited:
        return Waited(
            called_by=r.called_by,
            quorum=r.quorum,
            quorum_missed=r.quorum_missed,
            closed_by=closed_by.value,
            expected=tuple(sorted(r.expected))[:INPUTS_MAX],
            missing=tuple(sorted(r.missing))[:INPUTS_MAX],
            passed=tuple(Passing(learner=who, at=self._wall(at)) for who, at in sorted(r.passed.items())[:INPUTS_MAX]),
            boundary_at=self._wall(r.boundary_at),
            opened_at=self._wall(r.opened_at),
            closed_at=self._wall(r.closed_at),
            hold_until=self._wall(r.hold_until),
            quorum_s=_bounded(r.quorum_s),
            grace_s=_bounded(r.grace_s),
            waited_s=_bounded(r.closed_at - r.opened_at),
            fastest_step_s=_bounded(r.terms.fastest_step_s),
            slowest_step_s=_bounded(r.terms.slowest_step_s),
            sync_s=_bounded(r.terms.sync_s),
            cap_s=_bounded(r.terms.cap_s),
            merge_s=_bounded(merge_s),
            publish_s=_bounded(publish_s),
            overlap_steps=r.overlap_steps,
            boundary_s=_bounded(r.opened_at - r.boundary_at),
            gives_up_s=_bounded(r.gives_up_at - r.opened_at),
            hold_s=r.hold_until - r.opened_at,
            seen=() if r.cut or len(r.seen) > SEEN_MAX else tuple(r.seen),
        )

    # --- the accumulator's place in the pool --------------------------------------------------------------------------

    async def _slot(self) -> None:
        """Wait until this fragment may hold an accumulator; until then its updates stay pointers."""
        async with self._slot_lock:
            if self._has_slot:
                return
            await self._limits.accumulators.acquire()
            if self.rounds.round is None:
                self._limits.accumulators.release()  # the round is over; what was to be fetched stays a pointer
            else:
                self._has_slot = True

    def _release(self) -> None:
        self._accumulator, self._inputs = None, []
        if self._has_slot:
            self._has_slot = False
            self._limits.accumulators.release()


def _bounded(seconds: float) -> float:
    """Durations are what learners say of themselves, and sums of that: they must fit into a commit."""
    return min(max(0.0, seconds), SECONDS_MAX)

"""One fragment at one syncer: its state, its round, its accumulator. The only place where rounds are committed.

While another syncer keeps the fragment, only its commits are read. Its state is folded when it is taken over.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial

from isthmus.codecs import codec
from isthmus.codecs.kernels import ARITHMETIC
from isthmus.errors import Expelled, LogCorrupt, RecordInvalid, Unavailable
from isthmus.format.layout import TensorClass
from isthmus.format.records import frame
from isthmus.format.records.charter import Terms
from isthmus.format.records.keys import value_key
from isthmus.format.records.messages import Call, Committed, FromSyncer
from isthmus.format.records.objects import SCHEMA, CommitHeader
from isthmus.format.rules import MemberRole, Pace
from isthmus.format.signing import fingerprint
from isthmus.log import Commit, Log, manifests, merge
from isthmus.log.fork_detection import ForkDetection
from isthmus.log.log_health import lacks, restores
from isthmus.log.merge import Advance, State
from isthmus.log.replaced import why_not
from isthmus.log.updates import Update
from isthmus.reasons import ABOUT_MANIFEST, REMEDIES, Reason
from isthmus.rounds.bounds import Claim, Influence
from isthmus.rounds.events import (
    Abandon,
    Action,
    Announced,
    Appended,
    Arrived,
    Begun,
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
    Turn,
    Unreachable,
)
from isthmus.rounds.live_learners import LiveLearners
from isthmus.rounds.rounds import Rounds
from isthmus.runtime.clock import Runtime
from isthmus.runtime.metrics import SyncerMetrics
from isthmus.store import Store
from isthmus.syncer.commit_metrics import Counting
from isthmus.syncer.fairness import FairQueue
from isthmus.syncer.fetcher import Fetcher
from isthmus.syncer.fragment_reader import At, FragmentReader
from isthmus.syncer.inbox import Event, Fetched, Folded, FromBus, Heard, Looked
from isthmus.syncer.limits import Limits, Tallies
from isthmus.syncer.recorder import Recorder
from isthmus.syncer.round_sum import RoundSum
from isthmus.syncer.snapshots import Snapshots
from isthmus.wording import counted

logger = logging.getLogger(__name__)

INBOX_MAX = 2048
"""The most bus messages that wait for one fragment. Beyond that the oldest are dropped; their authors will repeat
them."""

INBOX_EACH = 64
"""The most of those messages that are one author's."""

LACKED_S = 10.0
"""An update on a version that the log lacks is logged if it lacks that for longer than this many seconds."""

LOOK_S = 0.25
"""Seconds between two reads of the log if the first found nothing. This bounds the cost of announced commits that do
not exist."""


class FragmentCoordinator:
    """Keeps one fragment: folds its log, runs its rounds, commits."""

    def __init__(
        self,
        log: Log,
        fragment: int,
        live: LiveLearners,
        pace: Pace,
        runtime: Runtime,
        limits: Limits,
        tallies: Tallies,
        metrics: SyncerMetrics,
        name: str,
        say: Callable[[FromSyncer], None],
        updates: Store | None = None,
        accepted: Collection[int] = (),
    ) -> None:
        """`updates`: the store to read updates from, if not the log's. If it denies an update, that is no outage.
        `accepted`: versions that are lost for good, and are not reported."""
        self.fragment = log.run.layout.fragments[fragment]
        bounds = log.run.header.bounds
        self._inbox: FairQueue[Event] = FairQueue(INBOX_EACH, INBOX_MAX, self._dropped)
        self.rounds = Rounds(pace, log.run.rules.periods, live, bounds, limits.admission, fragment, self._turn)
        self._fastest = bounds.slow
        self._live = live
        self.rounds.holding = False
        self._log = log
        self._pace = pace
        self._runtime = runtime
        self._limits = limits
        self._tallies = tallies
        self._metrics = metrics
        self._reader = FragmentReader(log, self.fragment, pace, runtime)
        self._fetcher = Fetcher(log, updates or log.store, self.fragment, runtime, limits.fetches, limits.manifests)
        self._snapshots = Snapshots(log, self.fragment, pace, runtime, limits.snapshots, lambda: self.state, accepted)
        self._recorder = Recorder(runtime)
        self._counting = Counting(fragment, name, metrics, runtime)
        self._name = name
        self._say = say
        self._down = codec(log.run.rules.codec_down)
        self._members = log.members
        self._under = log.members.current.version
        """The membership version by which the round's inputs are judged, and under which the round is committed."""
        self._sum = RoundSum(
            self.fragment,
            log.run.rules,
            Influence(bounds, log.run.rules),
            runtime,
            self._known_state,
            self._terms,
        )
        self.forks = ForkDetection(fragment, metrics.histories.inc)
        self._has_slot = False
        self._slot_lock = asyncio.Lock()
        self._merging = False
        """Whether a round is being merged. Updates read meanwhile are kept for the next round."""
        self._tasks: asyncio.TaskGroup | None = None
        self._fetching: set[asyncio.Task[None]] = set()
        self._look = asyncio.Event()
        self._ahead: dict[str, tuple[float, int]] = {}
        """By learner whose newest update is on a version that the log lacks: since when, and which version."""
        self._lacked = -1
        """The head at which that was logged last."""

    @property
    def head(self) -> int:
        """The newest version whose commit was read or written here; 0 before `recover`."""
        return self.rounds.head

    @property
    def state(self) -> State | None:
        """The state at `head`; None while only the commits are known."""
        return self._reader.state

    def _terms(self, learner: str) -> Terms:
        return self._members.versions[self._under].terms(learner)

    def _known_state(self) -> State:
        assert self.state is not None, "used before recovery"
        return self.state

    @property
    def fold_s(self) -> float:
        """The time that folding the state took when the fragment was last taken over, in seconds."""
        return self._reader.fold_s

    @property
    def broken(self) -> str:
        """The reason why the log of this fragment cannot be folded to its end here, or empty."""
        return self._reader.broken

    @property
    def refused(self) -> bool:
        """Whether the fragment is `broken` because this syncer is denied an object of its log."""
        return bool(self.broken) and self._reader.refused

    @property
    def hole(self) -> str:
        """The error that names a missing commit of the fragment's log, or empty. The fragment is served all the
        same."""
        return self._snapshots.hole

    def overdue(self, silent_s: float) -> bool:
        """Return whether the fragment should be left to other syncers (see `FragmentReader.overdue`)."""
        return self._reader.overdue(silent_s)

    @property
    def waiting(self) -> int:
        """The number of events that wait to be handled."""
        return len(self._inbox)

    def offer(self, author: str, event: FromBus) -> None:
        """Queue an event of an author on the bus. If too many of that author's wait, its oldest is dropped."""
        self._inbox.put(author, event)

    def hold(self, holding: bool) -> None:
        """Take the fragment over, or leave it once the round under way has ended."""
        self._inbox.put_own(Hold(holding))

    def _turn(self) -> None:
        self._inbox.put_own(Turn())

    def _dropped(self, author: str) -> None:
        self._tallies.drop(author, self._runtime.now())
        self._metrics.messages_dropped.inc()

    async def recover(self) -> None:
        """Read the commits to their end. If the chain is damaged, the fragment is `broken`: not served until it
        heals."""
        try:
            at = await self._reader.begin()
        except LogCorrupt as error:
            self._break(error)
            return
        self._begin(at)

    def _begin(self, at: At) -> None:
        self._reader.begun = True
        self._reader.go_to(at.version, at.digest, at.under, at.carried)
        self._counting.begun(at.version, at.last[-1].header if at.last else None)
        for commit in at.last:
            self.forks.know(commit.version, commit.digest)
            self._sum.note(commit.header)
        self.rounds.restored(at.version, [commit.header for commit in at.last])

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve rounds until `stopping` is set. A merge under way is finished first."""
        async with asyncio.TaskGroup() as self._tasks:
            following = self._tasks.create_task(self._follow())
            while not stopping.is_set():
                event = await self._next()
                actions = self._again_after_a_gap()
                actions += [] if event is None else await self._handle(event)
                # Look at the clock after every event: a round ends when its grace ends, however many events wait.
                await self._do([*actions, *self.rounds.on(Tick(), self._runtime.now())])
                if self._reader.retries:
                    self._look.set()
            for task in (following, *self._fetching):
                task.cancel()
            if self.rounds.holding:
                await self._snapshots.write_last()

    def _again_after_a_gap(self) -> list[Action]:
        """Begin a round again that was open while this process stood still or the bus was away.

        The updates in it are short: their learners have trained on, and what they send on a base that is merged already
        is rejected.
        """
        self._limits.look()
        if not self.rounds.overtaken:
            return []
        self._release()
        self.rounds.on(Lost(), self._runtime.now())
        return self.rounds.on(CaughtUp(), self._runtime.now())

    async def _next(self) -> Event | None:
        """Return the next event; None if none comes before the clock has to be looked at."""
        try:
            event = self._inbox.get_nowait()
            await asyncio.sleep(0)  # give other tasks on the event loop a turn, however many events wait
            return event
        except IndexError:
            pass
        now = self._runtime.now()
        deadline = self.rounds.deadline(now)
        # Without a deadline, wake up every heartbeat to see whether to stop.
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
            case Looked(through, error, said):
                if through:
                    self._reader.broken = ""
                    self._reader.looked(said)
                elif error is not None and (error.readable is None or self._reader.lacks(error.readable[1])):
                    self._break(error)  # otherwise this syncer is already beyond the damaged place
                if through and self._reader.wanted and self.state is not None and not self.rounds.holding:
                    return self.rounds.on(Hold(holding=True), now)
                return self.rounds.on(CaughtUp(), now)
            case Hold(holding):
                self._reader.wanted = holding
                if holding and self.state is None:
                    self._look.set()  # the fragment is held once its state is folded
                    return []
                return self.rounds.on(event, now)
            case Announced(pointer):
                self._note_base(pointer.learner, pointer.base, now)
                return self.rounds.on(event, now)
            case Called() | Passed() | Invalid() | Begun() | Turn():
                return self.rounds.on(event, now)
            case Heard(version):
                self._reader.learn_of(version, hearsay=True)
                return [CatchUp()] if version > self.head else []
            case Fetched():
                try:
                    return await self._arrive(event)
                finally:
                    event.done.set()

    async def _arrive(self, fetched: Fetched) -> list[Action]:
        pointer, update, reason, fetched_at = fetched.pointer, fetched.update, fetched.reason, fetched.at
        if reason is not None:
            return self._refuse(pointer, reason)
        if update is None:
            self.rounds.on(Unreachable(pointer), self._runtime.now())
            return []
        if not self.rounds.take_fetched(pointer):
            self._keep(fetched)
            return self.rounds.fetches()
        judge = self._members.versions[self._under]
        if self._members.signed and not judge.permits(update.author, (MemberRole.LEARNER,), pointer.learner):
            # The update was fetched for another round, or its author became a member after this round began.
            return self.rounds.on(Refused(pointer, Reason.NOT_A_MEMBER), self._runtime.now())
        try:
            manifests.require(judge, pointer.learner, update.header.manifest, update.manifest)
        except RecordInvalid as error:
            return self._refuse(pointer, error.reason)
        self._tallies.turned_away.pop(pointer.learner, None)
        claim = self._claim(update, self.rounds.elapsed_s(pointer.base, fetched_at))
        given = self._recorder.given(pointer, update.header, fetched_at, claim.norm)
        if not await self._sum.offer(update.gradient, given, claim):
            return self.rounds.on(Refused(pointer, Reason.TOO_LONG), self._runtime.now())
        return self.rounds.on(Arrived(pointer), self._runtime.now())

    def _note_base(self, learner: str, base: int, now: float) -> None:
        """Note the base of an announced update. Log it if the log lacks that version, and not only for a moment."""
        if base <= self.head:
            self._ahead.pop(learner, None)
            return
        if learner not in self._ahead and len(self._ahead) >= INBOX_MAX:
            return  # no author of many names can fill the memory
        since, known = self._ahead.get(learner, (now, base))
        since = now if known <= self.head else since
        self._ahead[learner] = since, base
        # Until the log is read again, the version may be there.
        if now - since < LACKED_S or self.broken or self._lacked == self.head:
            return
        self._lacked, p = self.head, self.fragment.index
        names = sorted(name for name, (_, version) in self._ahead.items() if version > self.head)
        logger.warning("%s; %s", lacks(p, self.head, base, names), restores(p, self.head, self._log.run.url))

    def _refuse(self, pointer: Pointer, reason: Reason) -> list[Action]:
        """Reject an update. If that is for its manifest, note it for the syncer's messages, and log it once."""
        away = self._tallies.turned_away
        if reason in ABOUT_MANIFEST and away.get(pointer.learner) != reason.value:
            logger.warning(
                "updates of %s are rejected for their manifest (%s): %s",
                pointer.learner, reason.value, REMEDIES[reason], extra={"learner": pointer.learner},
            )  # fmt: skip
            away[pointer.learner] = reason.value
        return self.rounds.on(Refused(pointer, reason), self._runtime.now())

    def _claim(self, update: Update, elapsed_s: float) -> Claim:
        h = update.header
        step_s = self._live.usual_step_s() / self._fastest
        return Claim(h.learner, h.steps, h.tokens, update.gradient.norm, elapsed_s, step_s)

    # --- actions ------------------------------------------------------------------------------------------------------

    async def _do(self, actions: Iterable[Action]) -> None:
        todo = list(actions)
        while todo:
            match todo.pop(0):
                case CallRound(version, afresh):
                    self._say(
                        Call(
                            run=self._log.run.digest,
                            id=self._runtime.new_id(),
                            syncer=self._name,
                            fragment=self.fragment.index,
                            version=version,
                            afresh=afresh,
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
                    self._merging = True
                    for fetched in self._inbox.take_own(Fetched):
                        self._set_aside(fetched)
                    try:
                        todo += await self._merge(version, closed_by)
                    finally:
                        self._merging = False
                case Abandon():
                    self._release()

    async def _fetch(self, pointer: Pointer) -> None:
        """Fetch an update. The fetch keeps its slot until the update was added to the round, which bounds the updates
        in memory. It keeps no slot while a round is merged, since a merge may take long."""
        await self._slot()

        def begun() -> None:
            self._inbox.put_own(Begun(self.rounds.newest(pointer)))

        pointer = self.rounds.newest(pointer)
        if (kept := self._limits.kept.take(self.fragment.index, pointer.digest)) is not None:
            begun()
            self._inbox.put_own(replace(kept, pointer=pointer))
            return
        async with self._limits.fetches.slot(pointer.learner, begun):
            pointer = self.rounds.newest(pointer)
            started, took = self._runtime.now(), None
            self._limits.admission.fetch_begins(started)
            try:
                update, reason = await self._fetcher.fetch(pointer)
                fetched = Fetched(pointer, update, reason, self._runtime.now(), asyncio.Event())
                if self._merging:
                    self._set_aside(fetched)
                else:
                    self._inbox.put_own(fetched)
                    await fetched.done.wait()
                if update is not None:
                    took = self._runtime.now() - started
            finally:
                self._limits.admission.fetch_ends(self._runtime.now(), took)

    def _set_aside(self, fetched: Fetched) -> None:
        """Release the slot of a fetch that ended before or while a round is merged. Its update is kept for the next
        round; a failure is handled after the merge."""
        fetched.done.set()
        if fetched.update is None:
            self._inbox.put_own(fetched)
        else:
            self._keep(fetched)

    def _keep(self, fetched: Fetched) -> None:
        if self.rounds.wants(fetched.pointer):
            self._limits.kept.put(self.fragment.index, fetched)
        self.rounds.on(Unreachable(fetched.pointer), self._runtime.now())

    async def _merge(self, version: int, closed_by: ClosedBy) -> list[Action]:
        await self._sum.settle()
        assert self._sum.total is not None, "merging an empty round"
        assert self.rounds.round is not None, "merging without a round"
        started, began, admission = self._runtime.now(), None, self._limits.admission
        admission.merge_begins()
        try:
            async with self._limits.merges:
                began = self._runtime.now()
                result: Advance = await self._runtime.offload(
                    partial(merge.advance, stated=self._snapshots.states(version)),
                    self._known_state(),
                    self._sum.total,
                    self._down,
                    self._log.run.digest,
                    self._log.run.rules.feedback_down,
                    self._log.seal,
                )
        finally:
            admission.merge_ends(None if began is None else self._runtime.now() - began)
        merged = self._runtime.now()
        if not result.finite:
            # Reject the update that reaches furthest. If the next merge overflows too, it rejects another one.
            worst, others = self._sum.furthest(), len(self._sum.inputs) - 1
            self._warn(
                "the merge overflows: %s is rejected, %d other updates are merged anew", worst.key, others,
                level=logging.ERROR, version=version,
            )  # fmt: skip
            self._release()
            return self.rounds.on(Spoiled(frozenset([worst.digest])), self._runtime.now())
        key = value_key(self.fragment.index, version, result.value_digest)
        if self._members.signed:
            await asyncio.gather(self._put(key, result.value), self._look_at_members())
            if why := self._disallowed(version):
                self._warn("the round is merged again under membership %d: %s", self._members.current.version, why)
                self._release()
                self.rounds.on(Lost(), self._runtime.now())
                return self.rounds.on(CaughtUp(), self._runtime.now())
        else:
            await self._put(key, result.value)
        published = self._runtime.now()
        header = CommitHeader(
            schema=SCHEMA,
            run=self._log.run.digest,
            previous=self._reader.digest,
            arithmetic=ARITHMETIC,
            fragment=self.fragment.index,
            version=version,
            inputs=tuple(self._sum.inputs),
            late=self.rounds.late(self._recorder.wall),
            dense=self._sum.total.outer[TensorClass.DENSE],
            embedding=self._sum.total.outer[TensorClass.EMBEDDING],
            codec_down=self._down.name,
            cancelled=result.cancelled,
            value_key=key,
            value_digest=result.value_digest,
            published_digest=result.published_digest,
            state_digest=result.state_digest,
            rejected=self.rounds.rejections(self._recorder.wall),
            rejected_total=dict(self.rounds.rejected_total),
            clipped_total=self._clipped_total(),
            waited=self._recorder.waited(self.rounds.round, closed_by, merged - started, published - merged),
            writer=self._name,
            attempt=self._runtime.new_id(),
            written_at=self._runtime.wall(),
            members=self._under,
            period=self.rounds.next_period(),
            usual_length=self._sum.usual_length,
        )
        # From here on the bytes of this attempt do not change until its outcome is known.
        try:
            body = frame.draft(frame.Kind.COMMIT, header).blob
            self._log.seal(body)
            # Check the commit as its readers will: an invalid commit must never take the key.
            commit = await self._runtime.offload(self._log.verifier.commit, body, self.fragment.index, version)
        except (LogCorrupt, ValueError) as error:
            self._warn(
                "the commit would be invalid and is not written: %s", error, level=logging.ERROR, version=version
            )
            spoiled = Spoiled(frozenset(given.digest for given in self._sum.inputs))
            self._release()
            return self.rounds.on(spoiled, self._runtime.now())
        self._limits.look()
        if self.rounds.overtaken:
            return self._again_after_a_gap()
        try:
            ours = await self._log.append(self.fragment.index, version, body)
        except LogCorrupt as error:
            self._break(error)  # the object under the key is not a valid commit
            return []
        if ours:
            self._tallies.commits += 1
            first = self._tallies.commits == 1  # later commits are counted, in a line a minute
            logger.log(
                logging.INFO if first else logging.DEBUG,
                "commit %d/%d merges %s of %d expected learners, closed by %s",
                self.fragment.index,
                version,
                counted(len(header.inputs), "update"),
                len(header.waited.expected),
                closed_by.value,
                extra={
                    "fragment": self.fragment.index,
                    "version": version,
                    "learners": [given.learner for given in header.inputs],
                    "missing": list(header.waited.missing),
                },
            )
            self._settle(commit, result.state)
            return self.rounds.on(CaughtUp(), self._runtime.now())
        self._tallies.races_lost += 1
        self._metrics.races_lost.inc()
        self._reader.learn_of(version)
        self._release()
        self.rounds.on(Lost(), self._runtime.now())
        return await self._catch_up()

    def _clipped_total(self) -> dict[str, int]:
        """Return the number of clipped updates by reason, over the log and the round under way."""
        total = Counter(self.rounds.clipped_total)
        total.update(reason for given in self._sum.inputs for reason in given.clipped)
        return dict(total)

    async def _put(self, key: str, data: frame.Blob) -> None:
        """Store an object, however long the store is away: after giving up, the same merge would only be done again."""
        while True:
            try:
                await self._log.store.put(key, data)
            except Unavailable as error:
                self._warn("%s cannot be written for now: %s", key, error)
                await asyncio.sleep(self._runtime.random.uniform(0.1, 0.5))
            else:
                return

    def _disallowed(self, version: int) -> str:
        """Return why a version may not be committed under the membership it was merged under; empty if it may.

        Raises `Expelled` if this syncer is no member any more.
        """
        now, author = self._members.current, self._log.author
        if not now.permits(author, (MemberRole.SYNCER,), self._name):
            raise Expelled(f"syncer {self._name}", fingerprint(author), now.version)
        if self._under < self._members.in_force(self.fragment.index, version):
            return "it came into force"
        learners = {given.learner for given in self._sum.inputs}
        return why_not(now, self._members.versions[self._under], self._name, author, learners)

    async def _look_at_members(self) -> None:
        """Read the membership to its end, however long the store is away: an expelled member must be in no later
        round."""
        while True:
            try:
                await self._members.refresh(self._log.store)
            except Unavailable as error:
                self._warn("the membership cannot be read for now: %s", error)
                await asyncio.sleep(self._runtime.random.uniform(0.1, 0.5))
            except LogCorrupt as error:
                self._warn("the membership stays as it is: %s", error, level=logging.ERROR)
                return
            else:
                return

    async def _follow(self) -> None:
        """Read the log whenever it may have more than is known here, one read at a time, beside the round under way."""
        while True:
            await self._look.wait()
            self._look.clear()
            head, had, said = self.head, self.state is not None, self._reader.said
            async with self._limits.folds if self._reader.folds and not had else self._limits.looks:
                try:
                    async for at in self._reader.onward():
                        done = asyncio.Event()
                        self._inbox.put_own(Folded(at, done))
                        await done.wait()
                    looked = Looked(through=True, said=said)
                except LogCorrupt as error:
                    looked = Looked(through=False, error=error)
                except Unavailable as error:
                    self._warn("cannot catch up for now: %s", error)
                    looked = Looked(through=False)
                # Report the end only now: a round opened on the way would create a version that exists.
                self._inbox.put_own(looked)
            if self.head == head and had == (self.state is not None):
                await asyncio.sleep(LOOK_S * self._runtime.random.uniform(0.8, 1.2))

    def _go_to(self, at: At) -> None:
        """Move to the place that a read of the log has reached, unless this syncer is there already. No round is
        opened."""
        if not self._reader.begun:
            self._begin(at)
        for commit in at.last:
            if commit.version > self.head:
                self._settle(commit, at.carried)
        if at.carried is not None and self.state is None and at.version == self.head:
            self._reader.state = at.carried
        if self._reader.folded is not None:
            self._snapshots.merged, self._reader.folded = self._reader.folded, None

    async def _catch_up(self) -> list[Action]:
        """Fold the winner's commit before anything else, since the next round builds on it.

        The wait is limited to `silence_s`: reading the winner's inputs may never end here, and then the fragment is
        left to other syncers.
        """
        try:
            async with asyncio.timeout(self._pace.silence_s):
                async for at in self._reader.onward():
                    self._go_to(at)
            self._reader.broken = ""
        except LogCorrupt as error:
            self._break(error)
            return []
        except (Unavailable, TimeoutError) as error:
            self._warn("cannot catch up for now: %s", str(error) or f"no answer within {self._pace.silence_s:g} s")
            self._look.set()
            return []  # another round on the old version would be lost too
        return self.rounds.on(CaughtUp(), self._runtime.now())

    def _break(self, error: LogCorrupt) -> None:
        """Stop serving a fragment whose log is damaged. A later snapshot of another syncer may make it readable
        again."""
        if self.broken != str(error):
            self._warn("is not served by this syncer: %s", error, level=logging.ERROR)
        self._reader.broken, self._reader.refused = str(error), error.refused
        self._release()
        self.rounds.on(Lost(), self._runtime.now())

    def _settle(self, commit: Commit, state: State | None) -> None:
        """Go on to a commit that is in the log, and announce it if this syncer wrote it: a commit is announced only
        once it is in the log.

        `state`: the state after the commit; None drops the old one, since another syncer committed and keeps the
        fragment.
        """
        self._release()
        self._reader.go_to(commit.version, commit.digest, commit.header.members, state)
        if state is None and self.rounds.holding:
            self.rounds.on(Hold(holding=False), self._runtime.now())
        self.forks.know(commit.version, commit.digest)
        self._sum.note(commit.header)
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
                    digest=commit.digest,
                )
            )
        self._snapshots.merged += sum(given.bytes for given in commit.header.inputs)
        if state is not None and ours:
            assert self._tasks is not None, "committing before run"
            self._snapshots.look(commit, state, self._tasks)
        self.rounds.on(Appended(commit.header), self._runtime.now())

    def _warn(self, text: str, *args: object, level: int = logging.WARNING, **about: object) -> None:
        about["fragment"] = self.fragment.index
        logger.log(level, f"fragment %d: {text}", self.fragment.index, *args, extra=about)

    # --- the accumulator's place in the pool --------------------------------------------------------------------------

    async def _slot(self) -> None:
        """Wait until this fragment may hold an accumulator; until then its updates stay pointers."""
        async with self._slot_lock:
            if self._has_slot:
                return
            await self._limits.accumulators.acquire()
            if self.rounds.round is None:
                self._limits.accumulators.release()  # the round is over: the update to fetch stays a pointer
            else:
                self._has_slot = True
                if not self._sum.inputs:
                    self._under = self._members.current.version

    def _release(self) -> None:
        self._sum.clear()
        self._under = self._members.current.version
        if self._has_slot:
            self._has_slot = False
            self._limits.accumulators.release()

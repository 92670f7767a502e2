"""The syncer: hears learners, keeps fragments, commits. It imports no torch and keeps no state but a fold of the log.

Any number of syncers may run at once. They share the fragments by `holders`. If two believe that they hold the same
fragment, the conditional create of a commit decides, and the loser folds the winner's commit. A restarted syncer folds
the log and goes on.
"""

import asyncio
import contextlib
import logging
import math
from collections import deque
from functools import partial
from itertools import chain, islice

from isthmus.agent.health import Vitals
from isthmus.agent.tolerance import Tolerance, TolerantBus, TolerantStore
from isthmus.agent.trouble import PATIENCE_S, REMIND_S, Connectivity, TroubleLog
from isthmus.bus import Bus
from isthmus.bus.base import BusItem
from isthmus.bus.endpoints import UNSAID_MAX, Listener, Speaker
from isthmus.bus.timed import TimedBus
from isthmus.codecs import codec, packed_bounds
from isthmus.errors import Denied, LogCorrupt, ObjectMissing, RecordInvalid, Unavailable, told
from isthmus.format.records import frame
from isthmus.format.records.fields import WAITING_MAX
from isthmus.format.records.keys import RUN_KEY, snapshots_prefix, update_key
from isthmus.format.records.messages import (
    DROPPED_LISTED,
    REFUSED_LISTED,
    SYNCER_STREAM,
    Alive,
    Announce,
    Call,
    Committed,
    FromLearner,
    FromSyncer,
    Heartbeat,
    Leave,
    Pass,
    Progress,
    is_stream,
    learner_of,
)
from isthmus.format.records.objects import work_of
from isthmus.format.rules import Pace
from isthmus.log import Log
from isthmus.log.bus_messages import keep_members, may_speak, streams_of, verify_batch
from isthmus.log.holes import Holes
from isthmus.log.manifests import Manifests
from isthmus.log.merge import state_bytes
from isthmus.reasons import Reason
from isthmus.rounds.admission import Admission
from isthmus.rounds.events import Announced, Called, Invalid, Passed, Pointer
from isthmus.rounds.live_learners import LiveLearners
from isthmus.runtime.clock import Runtime
from isthmus.runtime.metrics import SyncerMetrics
from isthmus.runtime.urls import without_passwords
from isthmus.store import EdgeStore
from isthmus.syncer import run_object
from isthmus.syncer.coordinator import FragmentCoordinator
from isthmus.syncer.fairness import FairQueue, FairSlots
from isthmus.syncer.holders import Holders
from isthmus.syncer.inbox import FromBus, Heard
from isthmus.syncer.limits import Limits, ReadAhead, Tallies
from isthmus.version import __version__

logger = logging.getLogger(__name__)

ACCUMULATORS_MAX = 64
"""Rounds that hold an accumulator at once. Each takes 4 n bytes, and the packed updates of the round if its merge rule
is in `ROBUST`. The updates of further rounds wait as pointers."""

FETCHES_MAX, FETCHES_EACH = 16, 4
"""Updates in memory at once that are fetched or decoded and not yet accumulated: in all, and of one learner."""

KEPT_MAX = 16
"""Further updates in memory: those that were read too late for their round and are kept for the next."""

LOOKS_MAX = 8
"""Fragments whose logs are read for new commits at once."""

FOLDS_MAX = 4
"""Fragments whose states are folded at once when they are taken over: each fold holds a state, a sum and inputs."""

SNAPSHOTS_MAX = 2
"""Snapshots being written at once: 12 n bytes each."""

HEARD_EACH, HEARD_MAX = 512, 16384
"""The most messages that wait to be decoded, of one author and in all."""

MESSAGES_A_TURN = 32
"""Messages that are decoded before other tasks on the event loop have their turn."""

LOOK_LEAST_S = 0.005

TAKES_BYTES_S = 1 << 29
"""The assumed speed of folding states, in bytes a second. Before a newly assigned share of fragments is folded, the
syncer waits as long as folding takes at this speed. If the share is gone again by then, nothing was read for it; if it
stays, taking over lasts twice as long."""

STORE_AWAY_S, STORE_AWAY = 5.0, 4.0
"""If the store answers again after longer than this, and so many times as long as a commit usually takes, learners are
asked for newer updates than those that they sent before."""

LAST_WORDS_S = 3.0
"""How long a syncer that ends tries to say so. On a busy machine a message took longer than a second."""

HUNG_S = 10.0
"""A store is taken to be away if it has left a request unanswered for this many seconds and answered no other."""

MEANWHILE = "it leaves its fragments to other syncers, merges nothing, and goes on by itself once that is over"
"""What a syncer does during an outage, for the log."""

OWN_BEATS = 2 * UNSAID_MAX
"""Own heartbeats that a syncer remembers, to tell them from those of another one of its name. After an outage of the
bus all that wait are sent at once."""

TWIN_BEATS = 4
"""Heartbeats without one of another syncer of the same name, after which there is none."""

RECOVERIES_MAX = 8
"""Fragments whose commits are read at once at start."""


class Syncer:
    """The work of one syncer process, as plain coroutines."""

    def __init__(
        self,
        log: Log,
        store: EdgeStore,
        bus: Bus,
        runtime: Runtime,
        name: str,
        pace: Pace | None = None,
        holders: Holders | None = None,
        accepted: Holes | None = None,
    ) -> None:
        """`accepted`: holes in the log that are not reported."""
        self.name = name
        self.pace = (pace or log.run.pace).check()
        self.tallies = Tallies()
        self.metrics = SyncerMetrics()
        self._came_at: dict[int, float] = {}
        """Since when this syncer has been assigned each fragment whose state it lacks."""
        self._echoed_at = math.inf
        """When a message of this syncer was last heard back from the bus; before the first, when listening began."""
        self._heard_learners = False
        self._own_beats = deque[str](maxlen=OWN_BEATS)
        self._stops = False
        self._twin_at = self._twin_said_at = -math.inf
        self.held: set[int] = set()
        """The fragments of which this syncer opens rounds as soon as it has their state."""
        self._tolerance = Tolerance(runtime)
        self._store = store = store.measured_by(self.metrics)
        if store.regions is not None:
            store.regions.mirrors = True
        self._tolerant = TolerantStore(store, self._tolerance)
        self._log = log.through(self._tolerant)
        self._unknown = asyncio.Event()
        self._bus = bus = TolerantBus(TimedBus(bus, self.metrics, runtime), self._tolerance)
        self._runtime = runtime
        self._run = log.run
        self._live = LiveLearners(self.pace, runtime.now(), log.run.header.bounds)
        self._holders = holders or Holders(name, self.pace, len(log.run.layout.fragments), runtime.now())
        self._speaker = Speaker(bus, SYNCER_STREAM, runtime, log.signer)
        self._listener = Listener(
            bus,
            runtime,
            self._listens_to,
            self.pace.heartbeat_s,
            back_s=self.pace.silence_s + self.pace.heartbeat_s,
            known=partial(streams_of, log.members),
        )
        self._said: FairQueue[tuple[str, BusItem, bool]] = FairQueue(HEARD_EACH, HEARD_MAX, self._dropped)
        self._connectivity = Connectivity(runtime, store, self._tolerance, self._listener, self._speaker, bus.url)
        self._trouble_log = TroubleLog(name, self.pace.silence_s, MEANWHILE)
        self._commits_at_gap = -1
        store.outage.over = self._store_answers
        self.vitals = Vitals(runtime, store, self._listener, self._speaker, self.metrics, bus.url, self._stood_still)
        self._admission = Admission(FETCHES_MAX, runtime.compute.threads)
        limits = Limits(
            accumulators=asyncio.Semaphore(ACCUMULATORS_MAX),
            fetches=FairSlots(FETCHES_MAX, FETCHES_EACH),
            kept=ReadAhead(KEPT_MAX),
            manifests=Manifests(log.through(store)),  # like an update, a manifest that is denied is no outage
            admission=self._admission,
            looks=asyncio.Semaphore(LOOKS_MAX),
            folds=asyncio.Semaphore(FOLDS_MAX),
            # Each merge makes a second state, 12 n bytes. More merges than threads at once would gain nothing.
            merges=asyncio.Semaphore(runtime.compute.threads),
            snapshots=asyncio.Semaphore(SNAPSHOTS_MAX),
            look=self.vitals.look,
        )
        self.coordinators = [
            FragmentCoordinator(
                self._log,
                f.index,
                self._live,
                self.pace,
                runtime,
                limits,
                self.tallies,
                self.metrics,
                name,
                self._speaker.say,
                updates=store,
                accepted=(accepted or {}).get(f.index, ()),
            )
            for f in self._run.layout.fragments
        ]

    @property
    def fold_s(self) -> float:
        """The longest time that folding a fragment's state took when the fragment was last taken over, in seconds."""
        return max(coordinator.fold_s for coordinator in self.coordinators)

    @property
    def heard_of(self) -> tuple[float, int]:
        """The usual step of the known learners [s; 0 while unknown], and the number of live learners."""
        return self._live.usual_step_s(), len(self._live.expected((), self._runtime.now()))

    async def recover(self) -> None:
        """Read the membership and every fragment's log (see `FragmentCoordinator.recover`). Raises what reading them
        raises."""
        await self._log.members.refresh(self._log.store)
        await self._recover()

    async def _recover(self) -> None:
        """Read every fragment's commits to their end. Raises `LogCorrupt` if every fragment is damaged, `Unavailable`,
        `Denied`.

        States are folded only when fragments are taken over.
        """
        slots = asyncio.Semaphore(RECOVERIES_MAX)

        async def one(coordinator: FragmentCoordinator) -> None:
            async with slots:
                await coordinator.recover()

        async with asyncio.TaskGroup() as tasks:
            for coordinator in self.coordinators:
                tasks.create_task(one(coordinator))
        self._require_some()
        self._tolerant.vouch()
        self._show()

    def _require_some(self) -> None:
        """Raise `LogCorrupt` if every fragment is damaged. A fragment whose objects this syncer is denied does not
        count as damaged: the permission may come back."""
        if all(coordinator.broken and not coordinator.refused for coordinator in self.coordinators):
            raise LogCorrupt(snapshots_prefix(0).split("/", maxsplit=1)[0], self.coordinators[0].broken)

    async def run(self, stopping: asyncio.Event) -> None:
        """Serve until `stopping` is set. Merges under way are finished first."""
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(self.vitals.watch())]
            background.append(tasks.create_task(self._attend()))
            if self._bus.polled:
                with contextlib.suppress(Unavailable):
                    await self._bus.append(SYNCER_STREAM, b"")  # the newest write is what dates the messages there
            # Follow the stream even before it exists: other syncers must be heard from their first message.
            await self._listener.follow(SYNCER_STREAM)
            async for stream, said in self._listener.backlog():
                self._said.put(stream, (stream, said, True))
            self._gap(0.0)
            self._holders.started_at = self._echoed_at = self._runtime.now()
            background += [
                tasks.create_task(self._listen()),
                tasks.create_task(self._hold()),
                tasks.create_task(self._ask()),
                tasks.create_task(run_object.keep(self._run, self._store, lambda: [k.head for k in self.coordinators])),
                tasks.create_task(self._speaker.run()),
                tasks.create_task(self._beat()),
                tasks.create_task(keep_members(self._log, self._unknown, self.pace.heartbeat_s)),
            ]
            async with asyncio.TaskGroup() as keeping:
                for coordinator in self.coordinators:
                    keeping.create_task(coordinator.run(stopping))
            await self._last_words()
            for task in background:
                task.cancel()
        self.vitals.rest()

    def _show(self) -> None:
        """Make the gauges compute their values when they are read."""
        m = self.metrics
        m.process.labels("syncer", self._run.digest[:8].hex(), self.name, __version__).set(1)
        m.fold_seconds.set_function(lambda: self.fold_s)
        m.fragments.set(len(self.coordinators))
        m.fragments_held.set_function(lambda: len(self.held))
        m.fragments_broken.set_function(lambda: sum(bool(coordinator.broken) for coordinator in self.coordinators))
        m.rounds_waiting.set_function(lambda: self._admission.waiting)
        m.period.set_function(lambda: max((self.coordinators[p].rounds.period for p in self.held), default=0.0))
        m.fragments_holed.set_function(lambda: sum(bool(coordinator.hole) for coordinator in self.coordinators))
        m.learners.set_function(lambda: len(self._live.expected((), self._runtime.now())))

    # --- hearing ------------------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        async for stream, said in self._listener.live(self._gap):
            self.vitals.look()
            self._said.put(stream, (stream, said, self._listener.behind))

    async def _attend(self) -> None:
        """Handle messages, author by author in turn: an author of a thousand messages delays only its own."""
        while True:
            self._hear(*await self._said.get())
            for _ in range(MESSAGES_A_TURN):
                if not self._said:
                    break
                self._hear(*self._said.get_nowait())
            await asyncio.sleep(0)

    def _listens_to(self, stream: str) -> bool:
        if may_speak(stream, self._log.members):
            return True
        if is_stream(stream):
            self._unknown.set()  # its learner may have become a member since the membership was read
        return False

    def _dropped(self, stream: str) -> None:
        self.tallies.drop(learner_of(stream) or stream, self._runtime.now())
        self.metrics.messages_dropped.inc()

    def _gap(self, away_s: float) -> None:
        self._live.gap(self._runtime.now(), away_s)
        self._holders.gap(self._runtime.now())

    def _store_answers(self, away_s: float) -> None:
        """Note that the store answers again: what learners have sent before is short, as they have trained on."""
        # A link on which every value takes so long would otherwise never carry a commit.
        if away_s <= STORE_AWAY_S or self.tallies.commits <= self._commits_at_gap:
            return
        usual_s = max((self.coordinators[p].rounds.usual_commit_s for p in self.held), default=0.0)
        if away_s > STORE_AWAY * usual_s:
            self._commits_at_gap = self.tallies.commits
            self._live.gap(self._runtime.now(), away_s)

    def _stood_still(self, for_s: float) -> None:
        """Note that this process stood still: what was said meanwhile waits, and its rounds' times have run out."""
        self._listener.behind = True
        self._gap(for_s)

    def _hear(self, stream: str, said: BusItem, old: bool) -> None:
        try:
            for message in verify_batch(stream, said.body, self._run.digest, self._log.members):
                if isinstance(message, FromSyncer):
                    self._from_syncer(message, old)
                else:
                    self._from_learner(message, old)
        except RecordInvalid as error:
            if error.reason == Reason.NOT_A_MEMBER:
                self._unknown.set()  # the author may have become a member since the membership was read
            about = {"reason": error.reason.value, "learner": learner_of(stream)}
            logger.warning("rejected a message on %s: %s", stream, error, extra=about)
            counts = self.tallies.rejected
            counts[error.reason.value] = counts.get(error.reason.value, 0) + 1
            self.metrics.rejections.labels(error.reason.value).inc()

    def _from_syncer(self, message: FromSyncer, old: bool) -> None:
        if message.syncer == self.name and not old:
            self._echoed_at = self._runtime.now()
            if isinstance(message, Alive) and not message.stopping and message.id not in self._own_beats:
                self._note_twin()
        if isinstance(message, Alive) and not old:
            if message.stopping:
                self._holders.left(message.syncer)
            else:
                self._holders.heard(message.syncer, self._runtime.now(), message.broken, able=message.able)
        match message:
            case Call() | Committed() | Alive() if message.syncer == self.name:
                pass
            case Call():
                self._offer(message.fragment, SYNCER_STREAM, Called(message.version, message.syncer))
            case Committed():
                self._require_fragment(message.fragment)
                self.coordinators[message.fragment].forks.contradicts(message.version, message.digest, message.syncer)
                self._offer(message.fragment, SYNCER_STREAM, Heard(message.version))
            case Alive():
                if self._log.members.said(message.members, message.syncer):
                    self._unknown.set()
                for fragment, version in enumerate(message.heads[: len(self.coordinators)]):
                    if version > self.coordinators[fragment].head:
                        self._offer(fragment, SYNCER_STREAM, Heard(version))

    def _from_learner(self, message: FromLearner, old: bool) -> None:
        now = self._runtime.now()
        self._heard_learners |= not old
        if isinstance(message, Leave):
            self._live.left(message.learner, message.incarnation)
            return
        if isinstance(message, Pass):
            self._offer(message.fragment, message.learner, Passed(message.learner, message.version))
            return
        # A message from before this syncer listened is no sign of life.
        if not old and isinstance(message, Progress):
            self._live.heard(message.learner, message.incarnation, now)
        elif not old and isinstance(message, Announce | Heartbeat):
            if isinstance(message, Heartbeat) and self._log.members.said(message.members, message.learner):
                self._unknown.set()
            self._live.heard(
                message.learner,
                message.incarnation,
                now,
                step_s=message.step_s,
                upload_s=message.upload_s,
                sync_s=message.sync_s,
            )
        if isinstance(message, Announce):
            self._announced(message, now, old)

    def _announced(self, message: Announce, now: float, old: bool) -> None:
        self._require_fragment(message.fragment)
        fragment = self._run.layout.fragments[message.fragment]
        least, most = packed_bounds(codec(self._run.rules.codec_up), fragment)
        reason = None
        key = update_key(message.fragment, message.learner, message.base, message.digest)
        if message.key != key or message.steps == 0 or message.tokens == 0:
            reason = Reason.MALFORMED
        elif message.size > frame.largest(frame.Kind.UPDATE, most):
            reason = Reason.OVERSIZED
        elif message.size < least:
            reason = Reason.TRUNCATED
        elif self.coordinators[message.fragment].forks.contradicts(message.seen, message.seen_digest, message.learner):
            reason = Reason.OTHER_HISTORY
        pointer = Pointer(
            learner=message.learner,
            incarnation=message.incarnation,
            **work_of(message),
            digest=message.digest,
            key=message.key,
            size=message.size,
            due=message.due,
            boundary_at=now - message.age_s,
            heard_at=now,
            old=old,
        )
        if reason is not None:
            about = {"reason": reason.value, "learner": message.learner, "fragment": message.fragment}
            logger.warning("rejected an announcement of %s: %s", message.key, reason.value, extra=about)
            self._offer(message.fragment, message.learner, Invalid(pointer, reason))
            return
        self._offer(message.fragment, message.learner, Announced(pointer))

    def _require_fragment(self, fragment: int) -> None:
        if fragment >= len(self.coordinators):
            raise RecordInvalid(Reason.WRONG_LAYOUT, f"fragment {fragment} of {len(self.coordinators)}")

    def _offer(self, fragment: int, author: str, event: FromBus) -> None:
        self._require_fragment(fragment)
        self.coordinators[fragment].offer(author, event)

    # --- saying -------------------------------------------------------------------------------------------------------

    def _note_twin(self) -> None:
        """Log, once in a while, that another syncer has this one's name: neither sees the other then."""
        self._twin_at = now = self._runtime.now()
        if now >= self._twin_said_at + REMIND_S:
            self._twin_said_at = now
            logger.warning(
                "another syncer is named %s too: each takes the other's messages for its own, and both merge all "
                "fragments; start one of them again with another --name",
                self.name,
            )

    async def _beat(self) -> None:
        patience = self._runtime.now() + PATIENCE_S
        while True:
            if not self._heard_learners and self._runtime.now() >= patience:
                patience = math.inf
                logger.info(
                    "no learner is heard yet on %s: one whose log says «joined» has another bus, and is to be started "
                    "again with this one (--bus, ISTHMUS_BUS, join(bus=…)), or this syncer with that one; one whose "
                    "log does not say it yet still loads",
                    without_passwords(self._bus.url),
                )
            alive = self._alive()
            self._own_beats.append(alive.id)
            self._speaker.say(alive)
            self._trouble_log.look(self._runtime.now(), self._connectivity.troubles())
            self.vitals.lag_s_max = 0.0
            await asyncio.sleep(self._holders.beat_s * self._runtime.random.uniform(0.8, 1.0))

    async def _hold(self) -> None:
        """Take over and leave fragments as syncers come and go, for ever."""
        while True:
            now = self._runtime.now()
            if not any(coordinator.state is not None for coordinator in self.coordinators):
                self._require_some()
            held = self._holders.held(now, self._broken, able=self._able())
            waiting = self._too_new(held, now)
            held -= waiting.keys()
            for p in held ^ self.held:
                self.coordinators[p].hold(p in held)
            if held != self.held:
                logger.info("%s holds %d of %d fragments", self.name, len(held), len(self.coordinators))
            self.held = held
            for learner in self._live.forget(now):
                self.metrics.forget(learner)
                self.tallies.dropped.pop(learner, None)
                self.tallies.turned_away.pop(learner, None)
            # Wake up when a syncer falls silent or a fragment's wait is over, so that taking over begins at once.
            changes_s = min(self._holders.silent_in_s(now), *(at - now for at in waiting.values()), math.inf)
            await asyncio.sleep(min(self._holders.beat_s / 2, max(changes_s, LOOK_LEAST_S)))

    def _too_new(self, mine: set[int], now: float) -> dict[int, float]:
        """Return the fragments of `mine` that are to be folded later, and when. Their states are not here, and another
        syncer may hold them again before they could be folded."""
        lacking = {p for p in mine - self.held if self.coordinators[p].state is None}
        self._came_at = {p: self._came_at.get(p, now) for p in lacking}
        parameters = sum(self.coordinators[p].fragment.size for p in lacking)
        wait_s = state_bytes(self._run.rules) * parameters / TAKES_BYTES_S
        return {p: came_at + wait_s for p, came_at in self._came_at.items() if now < came_at + wait_s}

    def _able(self) -> bool:
        """Return whether this syncer can hold fragments: it reaches the store, hears others, and is heard.

        A syncer also hears its own messages. If they do not come back, it hears no others either, whatever the bus
        answers. The other syncers leave out a syncer that is not able within its silence, as if it were dead. It keeps
        asking the store, and comes back with its first sign of life after the outage.
        """
        away_s = max(self._connectivity.store_down_s, self._connectivity.refused_s, self._connectivity.bus_down_s)
        deaf_s = self._runtime.now() - self._echoed_at
        return max(away_s, deaf_s) < self._holders.silent_s and self._store.outage.hung_s < HUNG_S

    async def _ask(self) -> None:
        """Ask the store for a byte while it is away or denies requests: a syncer without fragments may send no other
        request."""
        while True:
            await asyncio.sleep(self.pace.heartbeat_s)
            if self._store.outage.down_s or self._store.outage.hung_s >= HUNG_S or self._tolerance.refused_s:
                with contextlib.suppress(Unavailable, ObjectMissing):
                    await self._log.store.get_range(RUN_KEY, 0, 1)  # raises `Denied` after too long a denial

    @property
    def _broken(self) -> tuple[int, ...]:
        """The fragments that cannot be served here: their logs cannot be read to their ends, or were not for too
        long."""
        silent_s = self._holders.silent_s
        return tuple(p for p, k in enumerate(self.coordinators) if k.broken or k.overdue(silent_s))

    def _alive(self) -> Alive:
        lately = self.tallies.lately_dropped(self._runtime.now())
        refusals = chain.from_iterable(self.coordinators[p].rounds.refusals() for p in sorted(self.held))
        loudest = sorted(lately.items(), key=lambda item: -item[1])[:DROPPED_LISTED]
        return Alive(
            run=self._run.digest,
            id=self._runtime.new_id(),
            syncer=self.name,
            commits=self.tallies.commits,
            heads=tuple(coordinator.head for coordinator in self.coordinators),
            rejected=dict(self.tallies.rejected),
            waiting_for=", ".join(self._connectivity.waiting_for)[:WAITING_MAX],
            lag_ms=self.vitals.lag_s_max * 1e3,
            held=len(self.held),
            fold_s=self.fold_s,
            broken=self._broken,
            slow=tuple(p for p in self._broken if not self.coordinators[p].broken),
            refused=tuple(p for p in self._broken if self.coordinators[p].refused),
            holed=tuple(p for p, coordinator in enumerate(self.coordinators) if coordinator.hole),
            stopping=self._stops,
            able=self._able(),
            members=self._log.members.current.version,
            dropped=dict(loudest),
            quorum=self.pace.quorum,
            twin=self._runtime.now() < self._twin_at + TWIN_BEATS * self._holders.beat_s,
            turned_away=dict(list(self.tallies.turned_away.items())[:DROPPED_LISTED]),
            unlisted=tuple(islice(refusals, REFUSED_LISTED)),
        )

    async def _last_words(self) -> None:
        self._stops = True  # also in the heartbeats that come before this ends
        self._speaker.say(self._alive())
        await asyncio.sleep(0)
        # The last commits should be announced, but an outage of the bus must not delay the end.
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                await self._speaker.flush()
        except (TimeoutError, Unavailable, Denied) as error:
            logger.warning("could not send the last announcements: %s", told(error))

"""The learner's agent: joins the run, listens and speaks on the bus, and connects boundary, uplink and downlink.

The agent consists of plain coroutines off the training thread. While the store or the bus is unavailable, the agent
waits and training goes on. The agent announces updates again until a commit settles them.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

from isthmus.agent.health import Vitals
from isthmus.agent.tolerance import REFUSED_S, Tolerance, TolerantBus, TolerantStore
from isthmus.bus import START, Bus
from isthmus.bus.endpoints import Listener, Speaker
from isthmus.bus.timed import TimedBus
from isthmus.errors import Denied, InputError, LogCorrupt, RecordInvalid, Unavailable
from isthmus.format.layout import Layout
from isthmus.format.records.keys import LEARNERS, commit_key, learner_in
from isthmus.format.records.messages import (
    SYNCER_STREAM,
    Alive,
    Announce,
    Call,
    Committed,
    FromSyncer,
    Heartbeat,
    Progress,
    learner_stream,
)
from isthmus.format.records.objects import CheckpointHeader
from isthmus.format.rules import Adoption, Pace, named
from isthmus.format.signing.keys import fingerprint
from isthmus.learner import manifest as manifests
from isthmus.learner import resume
from isthmus.learner.backend import ArrayBackend, Arrays, LocalBackend
from isthmus.learner.boundary import (
    Adopted,
    Boundary,
    CalledFor,
    Captured,
    NothingToGive,
    Replica,
    SyncerBack,
    ToAgent,
    ToTraining,
)
from isthmus.learner.checkpoint import Checkpoint, Saver, StateCopy, moved
from isthmus.learner.downlink import FRAGMENTS_AT_ONCE, PROBE_BEATS, Downlink
from isthmus.learner.incarnation import Incarnation
from isthmus.learner.reporter import Reporter
from isthmus.learner.resume import History, read_history
from isthmus.learner.summary import Summary
from isthmus.learner.uplink import Uplink
from isthmus.log import Log
from isthmus.log.bus_messages import keep_members, verify_batch
from isthmus.log.expulsions import removed
from isthmus.log.holes import ask_heal
from isthmus.log.membership import Membership
from isthmus.reasons import Reason
from isthmus.runtime.clock import Runtime
from isthmus.runtime.metrics import LearnerMetrics
from isthmus.store import EdgeStore
from isthmus.version import __version__

logger = logging.getLogger(__name__)

WAIT_S = 20.0
"""Seconds that a leaving learner waits for the answers to its last updates, as long as it hears a syncer.

Process managers commonly give a process 30 s to end. The last checkpoint takes part of this time.
"""

SILENT_BEATS = 2.0
"""Heartbeats without a message after which a name that was in use a moment ago is free."""

LOOK_S = 0.1
"""Seconds between two checks for these answers."""


MakeBackend = Callable[[LocalBackend, Tolerance, Callable[[int, int], None]], ArrayBackend]


class LearnerAgent:
    """One learner's traffic with the store and the bus."""

    def __init__(
        self,
        log: Log,
        store: EdgeStore,
        bus: Bus,
        runtime: Runtime,
        name: str,
        *,
        adopt: str = Adoption.OVERWRITE.value,
        steps_target: int = 0,
        pace: Pace | None = None,
        checkpoint_s: float = math.inf,
        make_backend: MakeBackend | None = None,
        manifest: manifests.Statement | None = None,
        takeover: bool = False,
    ) -> None:
        """`manifest`: what the learner states about its training; None: it writes no manifest.

        `takeover`: whether it takes its name from another process that still speaks under it.

        `make_backend` makes the learner's array backend from that of this process, which is the default.

        It also gets the tolerance for denied requests and a callback. The callback takes the numbers of bytes (up,
        down) that other ranks of this learner moved.
        """
        self.name = name
        self.pace = (pace or log.run.pace).check()
        self.history = History()
        self.boundary: Boundary | None = None
        self.metrics = LearnerMetrics()
        tolerance = Tolerance(runtime, lately_s=REFUSED_S)
        store = store.measured_by(self.metrics)
        if store.regions is not None:
            store.regions.near = name
        self._store = TolerantStore(store, tolerance)
        self._log = log = log.through(self._store)
        self._bus = bus = TolerantBus(TimedBus(bus, self.metrics, runtime), tolerance)
        self._runtime = runtime
        self._run = log.run
        self._traffic = store.traffic
        self._adopt = named(Adoption, adopt, "adoption")
        speaker = self._speaker = Speaker(bus, learner_stream(name), runtime, log.signer)
        listener = self._listener = Listener(bus, runtime, None)
        self.vitals = Vitals(runtime, store, listener, speaker, self.metrics, bus.url)
        self._wake, self._unknown = asyncio.Event(), asyncio.Event()
        self._reporter = reporter = Reporter(
            log, name, runtime, self.pace, edge=store, bus=bus, tolerance=tolerance, speaker=speaker,
            listener=listener, metrics=self.metrics, steps_target=steps_target,
        )  # fmt: skip
        own = self.own_backend = LocalBackend(log)
        backend = self._backend = make_backend(own, tolerance, self._moved) if make_backend else own
        self.uplink = Uplink(log.run, backend, runtime, name, self.pace, announce=reporter.announce, tell=self._tell)
        self.downlink = Downlink(
            log, runtime, self.pace, backend, settle=self.uplink.settle, tell=self._tell,
            found_other=self.metrics.histories.inc,
        )  # fmt: skip
        self._claimed = Incarnation(
            log, runtime, name, self.uplink, backend, self.metrics, heartbeat_s=self.pace.heartbeat_s,
            checkpoint_s=checkpoint_s, tell=self._tell, through=self.wake,
        )  # fmt: skip
        reporter.of(self.uplink, self.downlink, self._claimed)
        self._manifest = manifest
        self._takeover = takeover
        self._objection = ""
        """Why the charter lets no update be merged with this manifest, or empty."""
        self._done = False
        self._wait_s, self._wait_for_syncer = 0.0, False
        self._lingers = False
        """Whether all its work was sent, so the agent answers calls in place of the training side."""

    @property
    def stored_step(self) -> int | None:
        """The step of this name's newest checkpoint that is known to be in the store; None if none is known."""
        found = self._claimed.stored_step
        return found if found is not None or self.history.checkpoint is None else self.history.step

    @property
    def last_bytes(self) -> int:
        """Size of the arrays in the newest drafted checkpoint, in bytes."""
        return self._claimed.last_bytes

    @property
    def under_way(self) -> str:
        """What the agent still waits for while it leaves, as text."""
        if self._claimed.busy:
            return f"storing the last checkpoint, {self.last_bytes / 1e6:.0f} MB"
        return "updates on their way" if self.uplink.busy else "waiting for answers to the last updates"

    @property
    def incarnation(self) -> int:
        """How many times this name has joined the run, including this time; 0 before `join`."""
        return self.uplink.incarnation

    @property
    def layout(self) -> Layout:
        """How the model is divided into fragments."""
        return self._run.layout

    @property
    def waiting_for(self) -> tuple[str, ...]:
        """What this learner waits for at the moment, as its heartbeats report it."""
        return self._reporter.waiting_for

    def summary(self) -> Summary:
        """Return the summary so far. Another thread may call this only after the agent has ended."""
        return self._reporter.summary()

    def scalars(self) -> tuple[int, Mapping[str, float]] | None:
        """Return the step and the values of the last heartbeat, for a sink; None before the first heartbeat."""
        return self._reporter.scalars()

    # --- joining ------------------------------------------------------------------------------------------------------

    async def join(self) -> None:
        """Read the newest published values, find where earlier incarnations stopped, and claim the name.

        Raises `InputError` if another process goes on speaking under the name, and this one must not take it over.
        """
        now = await self._log.members.refresh(self._store)
        if objection := manifests.objection(now, self.name, self._manifest):
            raise InputError(f"{self._run.url}: {objection}")
        if self._manifest is not None and self._log.members.signed and now.charter is None:
            logger.warning(
                "%s has a manifest, and %s has no charter: its owner alone decides what is merged; if you expect one, "
                "this is another run (ISTHMUS_RUN_DIGEST), or the charter is not in force yet",
                self.name,
                self._run.url,
            )
        # Take the positions on the bus before reading the log. Commits in between are heard again, which is harmless.
        away = None
        for stream in (SYNCER_STREAM, learner_stream(self.name)):
            try:
                self._listener.positions[stream] = await self._bus.tail(stream)
            except Unavailable as error:
                self._listener.positions[stream], away = START, error
        # Read the log before listing this name's stored updates: the list then has every update that the log merged.
        try:
            await self.downlink.begin()
        except LogCorrupt as error:
            asked = "" if error.refused else f"; {ask_heal(self._run.url, signed=self._log.members.signed)}"
            raise LogCorrupt(error.key, f"{error.detail}{asked}", error.readable, refused=error.refused) from None
        if away is not None:
            if not any(known.version for known in self.downlink.known):
                raise away  # Nothing was merged in this run yet, so the person who starts it should see the error.
            logger.warning("%s starts although the bus does not answer yet: %s", self.name, away)
        read = [known.version for known in self.downlink.known]
        since = [version - self.pace.staleness for version in read]
        self.history = await read_history(self._log, self._bus, self.name, since, self._bring)
        if (own := self.history.checkpoint) is not None:
            # An earlier process may still run under this name. Its checkpoint may cover commits not read above.
            await self.downlink.reach([t.settled_to for t in own.traffic])
            await self._require_no_less(own)
        versions = [known.version for known in self.downlink.known]
        if self.history.alive and away is None and not self._takeover:
            await self._require_silence()
        await self._try_publishing()
        if self._manifest is not None:
            self.uplink.manifest = await manifests.store(self._log, self.name, self._manifest)
        self.uplink.incarnation = await self._claimed.claim(self.history, versions)
        if self.history.alive:
            logger.warning(
                "another process of the name %s, or an earlier join in this one, spoke less than %g s ago: if it still "
                "runs, it ends now, and what it trained since its newest checkpoint is lost; give each a name of its "
                "own (--learner, join(learner=…))",
                self.name, self._log.run.pace.silence_s,
            )  # fmt: skip
        self.uplink.resume(self.history)
        self._reporter.first_step = self.history.step
        self._reporter.first_tokens = self.history.tokens_seen + self.history.tokens_lost
        await self.uplink.settle_past(self._log, self.history, read, versions)
        self._store.vouch()

    def _heed(self, now: Membership) -> None:
        """Log once what a changed membership says against this learner, its key or its manifest."""
        if why := removed(self._log, self.name):
            there, again = now.member(self.name), f"or ask {now.decider} to admit it again"
            do = again if there is None else f"and start it again with the key {fingerprint(there.key)}"
            logger.error("%s: nothing that this process trains from now on is merged; end it, %s", why, do)
        before, self._objection = self._objection, manifests.objection(now, self.name, self._manifest)
        if self._objection and self._objection != before:
            logger.warning("membership %d: %s", now.version, self._objection)

    async def _require_no_less(self, own: Checkpoint) -> None:
        """Raise `LogCorrupt` if the log ends before a version that an earlier incarnation has seen."""
        versions = [known.version for known in self.downlink.known]
        for p, (version, traffic) in enumerate(zip(versions, own.traffic, strict=True)):
            if version < traffic.settled_to:
                beyond = await resume.seen_beyond(self._log, self.name, versions)
                raise LogCorrupt(
                    commit_key(p, version + 1),
                    f"is missing: an earlier incarnation of {self.name} has seen version {traffic.settled_to}, so the "
                    "store was set back, or shows less than it did. Restore the commits; or, to go on without them, "
                    f"delete {' and '.join(beyond)}: {self.name} then goes on from a checkpoint before that, or from "
                    "step 0 if it has none",
                )

    async def _require_silence(self) -> None:
        """Raise `InputError` if another process of this name has been heard since this one began to join.

        A process that was killed a moment ago is silent for `SILENT_BEATS` heartbeats.
        """
        patience_s = SILENT_BEATS * max(self.pace.heartbeat_s, self._run.pace.heartbeat_s)
        since = self._listener.positions[learner_stream(self.name)]
        if await resume.speaks(self._log, self._bus, self.name, since, patience_s):
            raise InputError(
                f"another process of the name {self.name}, or an earlier join in this one, trains, and would end if "
                "this one took its name: end it first, or give this one a name of its own (--learner, "
                "join(learner=…)). If it must end now: --takeover, or join(takeover=True); what it trained since its "
                "newest checkpoint is lost"
            )

    async def _bring(self, found: Checkpoint) -> Checkpoint:
        """Move the checkpoint's fragment arrays to the ranks that own them.

        If this process owns all of them, load the other arrays of the checkpoint too.
        """
        points, traffic = await moved(found.points, found.traffic, self._backend.home)
        found = replace(found, points=points, traffic=traffic)
        return found if self._backend.divides else await found.whole(self._log)

    async def _try_publishing(self) -> None:
        """Check the permission to publish by appending an empty message. Raises `Denied`.

        The check comes before the claim: a learner that cannot publish must not stop the process that has the name.
        """
        try:
            await self._bus.append(learner_stream(self.name), b"")
        except Unavailable as error:
            logger.warning("%s could not check its permission to publish: the bus is away: %s", self.name, error)

    async def donor(
        self,
        fits: Callable[[Checkpoint], str | None],
        glance: Callable[[CheckpointHeader], str | None] = lambda _: None,
    ) -> Checkpoint | None:
        """Return another learner's checkpoint that a newcomer can go on from (see `resume.donor`)."""
        return await resume.donor(self._log, self.name, self.downlink.merged_lately, fits, glance)

    async def others(self) -> set[str]:
        """Return the names of learners that have been in an unsigned run, as far as the store tells.

        In a signed run, members alone may use a name.
        """
        if self._log.members.signed:
            return set()
        with suppress(Denied, Unavailable):
            return {learner_in(entry.key) for entry in await self._log.store.list(LEARNERS)} - {self.name}
        return set()

    def attach(
        self,
        replica: Replica,
        notify: Callable[[], None] | None = None,
        saver: Saver | None = None,
        arrays: Arrays | None = None,
    ) -> Boundary:
        """Return the training side, after writing the newest values, or the local work on them, into the replica.

        `notify` calls `wake` on the agent's loop. Without `notify`, the boundary lives on that loop and calls `wake`
        directly. `arrays` makes the arrays that fragments are copied into; by default they lie in this process.
        """
        self._claimed.saver = saver
        self.metrics.process.labels("learner", self._run.digest[:8].hex(), self.name, __version__).set(1)
        self.metrics.checkpoint_age.set_function(self._claimed.age_s)
        self.boundary = Boundary(
            self._run.layout,
            replica,
            periods=self._run.rules.periods,
            pace=self.pace,
            adopt=self._adopt,
            versions=[(k.version, k.values, k.period) for k in self.downlink.known],
            step=self.history.step,
            tokens_seen=self.history.tokens_seen,
            now=self._runtime.now,
            notify=notify or self.wake,
            points=[self.uplink.point(self.history, p, k.version, k.values) for p, k in enumerate(self.downlink.known)],
            saver=saver,
            window=self.uplink.window,
            arrays=arrays,
            first_loss=self.history.first_loss,
        )
        self._reporter.boundary = self.boundary
        return self.boundary

    def wake(self) -> None:
        """Make the agent look at the boundary's outbox. Call this on the agent's loop only."""
        self._wake.set()

    # --- running ------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve the boundary until `drain` was called and all work under way has ended."""
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(self._listen()),
                tasks.create_task(self._speaker.run()),
                tasks.create_task(self._reporter.beat()),
                tasks.create_task(self.downlink.probe()),
                tasks.create_task(self._reporter.report_progress()),
                tasks.create_task(self._claimed.ask_for_checkpoints()),
                tasks.create_task(self._claimed.watch()),
                tasks.create_task(self.vitals.watch()),
                tasks.create_task(
                    keep_members(self._log, self._unknown, PROBE_BEATS * self.pace.heartbeat_s, self._heed)
                ),
                *(tasks.create_task(self.downlink.fetch()) for _ in range(FRAGMENTS_AT_ONCE)),
            ]
            await self._serve_boundary(tasks)
            await self._linger()
            for task in background:
                task.cancel()
        await self._reporter.leave(done=self._done)
        self.vitals.rest()

    async def _linger(self) -> None:
        """Wait until every sent update is answered, as long as a syncer is heard or the caller says how long to wait.

        These updates are much of a short incarnation's work, and only the learner announces them again.
        """
        self._lingers, began = True, self._runtime.now()
        while (now := self._runtime.now()) < began + self._wait_s and self.uplink.awaits_answer:
            if not self._wait_for_syncer and now - self._reporter.syncer_heard_at > self.pace.silence_s:
                return
            await asyncio.sleep(LOOK_S)

    def drain(self, *, done: bool = False, wait_s: float | None = 0.0) -> None:
        """Stop once the uploads under way are announced, and then answered or `wait_s` seconds have passed.

        `done`: the learner has trained all its steps. `wait_s` None: wait `WAIT_S`, and only while a syncer is heard.
        """
        self._done, self._wait_for_syncer = done, wait_s is not None
        self._wait_s = WAIT_S if wait_s is None else wait_s
        self.uplink.draining = True
        self._wake.set()

    def hurry(self) -> None:
        """Wait for no more answers: the process has to end."""
        self._wait_s = 0.0

    async def _serve_boundary(self, tasks: asyncio.TaskGroup) -> None:
        assert self.boundary is not None, "run before attach"
        while True:
            while self.boundary.outbox:
                self._take(self.boundary.outbox.popleft(), tasks)
            if self.uplink.draining and not self.uplink.busy and not self._claimed.busy:
                return
            await self._wake.wait()
            self._wake.clear()

    def _take(self, message: ToAgent, tasks: asyncio.TaskGroup) -> None:
        match message:
            case Captured() as captured:
                self.uplink.take(captured, tasks, self.wake)
            case NothingToGive(fragment, version):
                self._reporter.have_nothing(fragment, version)
            case Adopted() as adopted:
                self.uplink.adopted(adopted)
            case StateCopy() as frozen:
                self._claimed.take(frozen, tasks)

    def _moved(self, up: int, down: int) -> None:
        """Count the bytes that other ranks of this learner moved to and from the store."""
        self._traffic.bytes_up += up
        self._traffic.bytes_down += down
        for direction, size in (("up", up), ("down", down)):
            self.metrics.store_bytes.labels(direction).inc(size)

    def _tell(self, message: ToTraining) -> None:
        if self.boundary is not None:
            self.boundary.post(message)

    # --- hearing ------------------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        async for stream, said in self._listener.live(lambda _: None):
            try:
                messages = verify_batch(stream, said.body, self._run.digest, self._log.members)
            except RecordInvalid as error:
                if error.reason == Reason.NOT_A_MEMBER:
                    self._unknown.set()  # The author may have become a member since the last look.
                own = stream == learner_stream(self.name) and removed(self._log, self.name)  # `_heed` has said so
                if error.reason != Reason.WRONG_RUN and not own:
                    logger.warning("rejected a message on %s: %s", stream, error)
                continue
            for message in messages:
                if isinstance(message, FromSyncer):
                    self._hear(message)
                elif isinstance(message, Announce | Heartbeat | Progress) and message.incarnation > self.incarnation:
                    self._claimed.doubt()

    def _hear(self, message: FromSyncer) -> None:
        now = self._runtime.now()
        if now - self._reporter.syncer_heard_at > self.pace.silence_s:
            self._tell(SyncerBack())
        self._reporter.syncer_heard_at = now
        match message:
            case Committed(fragment=p, version=version, digest=digest, syncer=by):
                self.downlink.want(p, version)
                self.downlink.said(p, version, digest, by)
            case Alive(heads=heads, members=members, syncer=by, turned_away=turned_away, unlisted=unlisted):
                if reason := turned_away.get(self.name):
                    self.uplink.unmerged.rejected_for = reason
                self.uplink.refuse(unlisted)
                if self._log.members.said(members, by):
                    self._unknown.set()
                for p, version in enumerate(heads):
                    self.downlink.want(p, version)
            case Call(fragment=p, version=version, afresh=afresh) if p < len(self._run.layout.fragments):
                self.downlink.want(p, version - 1)
                self.uplink.called(p, version)
                if not self._lingers:
                    self._tell(CalledFor(p, version, afresh))
                elif afresh or version - 1 not in self.uplink.attempts[p]:
                    self._reporter.have_nothing(p, version)
            case _:
                pass

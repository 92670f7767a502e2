"""The learner's agent: joins, listens, speaks, and moves things between the boundary, the uplink and the downlink.

Plain coroutines off the training thread. Without store or bus it waits and the training goes on; whatever no commit has
settled is said again.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from isthmus import __version__
from isthmus.bus import START, Bus
from isthmus.bus.timed import TimedBus
from isthmus.bus.voice import Listener, Speaker
from isthmus.errors import Denied, Fenced, InputError, ObjectMissing, RecordInvalid, Unavailable
from isthmus.layout import Layout
from isthmus.learner.boundary import Adopted, Boundary, Called, Captured, Freeze, Passed, Replica, ToAgent, ToTraining
from isthmus.learner.checkpoint import Checkpoint, Frozen, Saver, Traffic, pack, why_useless
from isthmus.learner.concern import Concern, Trouble
from isthmus.learner.downlink import FETCHERS, Downlink
from isthmus.learner.history import History, donors, read_checkpoint, read_head, read_history
from isthmus.learner.ledger import PARTS, weigh
from isthmus.learner.summary import Summary
from isthmus.learner.uplink import Attempt, Uplink
from isthmus.log import Log
from isthmus.metrics import LearnerMetrics
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
from isthmus.records.objects import SCHEMA, CheckpointHeader, ClaimHeader, checkpoint_key, claim_key
from isthmus.rules import ADOPTIONS, Pace
from isthmus.runtime import Runtime
from isthmus.store import EdgeStore, Entry
from isthmus.tolerance import Tolerance, TolerantBus, TolerantStore
from isthmus.vitals import Vitals

logger = logging.getLogger(__name__)

PROGRESS_BEATS = 0.1
"""Heartbeats between two reports of new steps."""

LINGER_S = 5.0
"""A learner of which nothing was ever merged waits so long, when it leaves, to hear of the first merge …"""

LINGER_LOOK_S = 0.1
"""… and looks so often."""

MISSED_BEATS = 1.5
"""Heartbeats after which silence is what a learner leaves under, if it leaves then."""

CLAIM_BEATS = 10
"""Heartbeats between two looks for a later claim of our name; a word of it on the bus is looked into at once."""

DONOR_S = 120.0
"""Reading another learner's checkpoint may take this long."""

CHECKPOINTS_KEPT = 2
"""Of one learner in the store; older ones are deleted once a newer one is there."""


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
        checkpoint_s: float = math.inf,
    ) -> None:
        if adopt not in ADOPTIONS:
            raise InputError(f"unknown adoption {adopt!r}: choose one of {', '.join(ADOPTIONS)}")
        self.name = name
        self.pace = (pace or log.run.pace).check()
        self.history = History()
        self.boundary: Boundary | None = None
        self._tolerance = Tolerance(runtime)
        self._edge = store
        self._store = TolerantStore(store, self._tolerance)
        self._log = log = Log(log.run, self._store, runtime)
        self.metrics = LearnerMetrics()
        store.metrics = self.metrics
        self._bus = bus = TolerantBus(TimedBus(bus, self.metrics, runtime), self._tolerance)
        self._runtime = runtime
        self._run = log.run
        self._adopt = adopt
        self._steps_target = steps_target
        self._checkpoint_s = checkpoint_s
        self._checkpoints: list[str] = []
        self._checkpointing = 0
        self._checkpoints_useless = False
        self._checkpoint_bytes = 0
        self._saver: Saver | None = None
        self._speaker = Speaker(bus, learner_stream(name), runtime)
        self._listener = Listener(bus, runtime, None)
        self.vitals = Vitals(runtime, store, self._listener, self._speaker, self.metrics)
        self._stored_at = self._began_at = runtime.now()
        self._beaten: Heartbeat | None = None
        self._wake = asyncio.Event()
        self._look = asyncio.Event()
        self._syncer_heard_at = runtime.now()
        self._concern = Concern(name, self.pace.silence_s)
        self.uplink = Uplink(log.run, self._store, runtime, name, self.pace, announce=self._announce, tell=self._tell)
        self.downlink = Downlink(log, runtime, self.pace, settle=self.uplink.settle, tell=self._tell)
        self._done = False

    @property
    def incarnation(self) -> int:
        """How often this name has joined the run, this time included; 0 before `join`."""
        return self.uplink.incarnation

    @property
    def layout(self) -> Layout:
        """What the model is cut into."""
        return self._run.layout

    @property
    def waiting_for(self) -> tuple[str, ...]:
        """What does not answer just now, as heartbeats say it."""
        waiting = []
        if self._edge.down_s:
            waiting.append(f"store ({self._edge.down_s:.0f} s)")
        if self._tolerance.refused_s:
            waiting.append(f"being let in again ({self._tolerance.refused_s:.0f} s)")
        if self._speaker.down_since is not None or self._listener.down_since is not None:
            waiting.append("bus")
        if self._concern.said and not waiting:
            waiting.append(f"a merge ({self._concern.said})")
        return tuple(waiting)

    # --- joining ------------------------------------------------------------------------------------------------------

    async def join(self) -> None:
        """Claim the name, find where predecessors stopped, and read the newest published values."""
        # The position first, the log after it: what is committed in between is heard again, which is harmless.
        away = None
        for stream in (SYNCER_STREAM, learner_stream(self.name)):
            try:
                self._listener.positions[stream] = await self._bus.tail(stream)
            except Unavailable as error:
                self._listener.positions[stream], away = START, error
        # The log before what we left behind: every update of ours that it has merged is then among what is listed.
        await self.downlink.begin()
        if away is not None:
            if not any(known.version for known in self.downlink.known):
                raise away  # nothing was ever merged here: whoever starts this run wants to know
            logger.warning("%s starts without the bus, which will be back: %s", self.name, away)
        read = [known.version for known in self.downlink.known]
        since = [version - self.pace.staleness for version in read]
        self.history = await read_history(self._log, self._bus, self.name, since)
        if self.history.checkpoint is not None:
            # A twin that still runs may have written a checkpoint that knows more of the log than we have read.
            await self.downlink.reach([t.settled_to for t in self.history.checkpoint.traffic])
        self.uplink.incarnation = await self._claim()
        self.uplink.resume(self.history)
        await self._settle_past(read)

    async def donor(
        self,
        fits: Callable[[Checkpoint], str | None],
        glance: Callable[[CheckpointHeader], str | None] = lambda _: None,
    ) -> Checkpoint | None:
        """Return a healthy learner's checkpoint that fits, for a newcomer to a run in flight; None where there is none.

        `glance` and `fits` return why not; the first is shown the header before the rest of the object is fetched. Both
        run off the loop. Asked are only learners of whom the log has merged something lately; and no process: the
        checkpoints are in the store. Whatever goes wrong with one of them, it is not used.
        """
        try:
            async with asyncio.timeout(DONOR_S):
                for entry in await donors(self._log, self.name, self.downlink.merged_lately):
                    try:
                        found = await self._look_at(entry, fits, glance)
                    except Exception as error:  # a stranger's object: whatever it is, it ends no join
                        logger.warning("checkpoint %s is not used: %s", entry.key, error or type(error).__name__)
                        continue
                    if found is not None:
                        return found
        except (Unavailable, Denied, TimeoutError) as error:
            # A nicety: a newcomer without it warms up.
            logger.warning("no checkpoint of another learner could be read: %s", error or type(error).__name__)
        return None

    async def _look_at(
        self,
        entry: Entry,
        fits: Callable[[Checkpoint], str | None],
        glance: Callable[[CheckpointHeader], str | None],
    ) -> Checkpoint | None:
        header = await read_head(self._log, entry.key)
        why = await self._runtime.offload(glance, header)
        if why is None:
            found = await read_checkpoint(self._log, entry.key, entry.size)
            if found is None:
                return None
            why = await self._runtime.offload(fits, found)
            if why is None:
                return found
        logger.info("the optimizer of %s does not fit: %s", header.learner, why)
        return None

    def attach(
        self, replica: Replica, notify: Callable[[], None] | None = None, saver: Saver | None = None
    ) -> Boundary:
        """Return the training side, with the newest values, or the local work on them, written into the replica.

        `notify` calls `wake` on the agent's loop; without one the boundary lives on that loop and calls it directly.
        """
        self._saver = saver
        self.metrics.process.labels("learner", self._run.digest[:8].hex(), self.name, __version__).set(1)
        self.metrics.checkpoint_age.set_function(lambda: self._runtime.now() - self._stored_at)
        self.boundary = Boundary(
            self._run.layout,
            replica,
            sync_every=self._run.rules.sync_every,
            pace=self.pace,
            adopt=self._adopt,
            versions=[(k.version, k.values) for k in self.downlink.known],
            step=self.history.step,
            tokens_seen=self.history.tokens_seen,
            now=self._runtime.now,
            notify=notify or self.wake,
            points=[self.uplink.point(self.history, p, k.version, k.values) for p, k in enumerate(self.downlink.known)],
            saver=saver,
            window=self.uplink.window,
        )
        return self.boundary

    def wake(self) -> None:
        """Look at the boundary's outbox. On the agent's loop only."""
        self._wake.set()

    async def _claim(self) -> int:
        incarnation = self.history.life + 1
        while True:
            header = ClaimHeader(
                schema=SCHEMA,
                run=self._run.digest,
                learner=self.name,
                incarnation=incarnation,
                claimed_at=self._runtime.wall(),
                resumed=self.history.checkpoint.key if self.history.checkpoint else "",
                versions=tuple(known.version for known in self.downlink.known),
                tokens_seen=self.history.tokens_seen,
                tokens_lost=self.history.tokens_lost,
            )
            if await self._store.create(claim_key(self.name, incarnation), frame.draft(frame.Kind.CLAIM, header).blob):
                return incarnation
            incarnation += 1

    async def _settle_past(self, read: Sequence[int]) -> None:
        """Learn what became of earlier lives' updates: only commits that can hold one of them are read.

        `read`: the versions the log had when those updates were listed; what came after may hold later ones.
        """
        gate = asyncio.Semaphore(FETCHERS)

        async def one(p: int, known: int) -> None:
            if not self.history.settled_to:
                self.uplink.settled_to[p] = known
                return
            bases = [self.history.newest_bases[p], *self.uplink.attempts[p], *self.uplink.accounts[p].sent]
            last = known if known > read[p] else min(known, max(bases) + self.pace.staleness + 1)
            async with gate:
                # Below the oldest snapshot kept, what was merged may have been collected: it is in no listing.
                kept = [version for version, _ in await self._log.snapshots(p) if version > 0]
                last = max(last, min([known, *kept]) if kept else 0)
                async for commit in self._log.commits(p, self.history.settled_to[p]):
                    if commit.version > last:
                        break
                    self.uplink.absorb(commit, self.history)
                    self.uplink.settle(commit)
            self.uplink.expire(p, known)

        await asyncio.gather(*(one(p, k.version) for p, k in enumerate(self.downlink.known)))

    # --- running ------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve the boundary until `drain` was called and everything under way is through."""
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(self._listen()),
                tasks.create_task(self._speaker.run()),
                tasks.create_task(self._beat()),
                tasks.create_task(self.downlink.probe()),
                tasks.create_task(self._report_progress()),
                tasks.create_task(self._ask_for_checkpoints()),
                tasks.create_task(self._watch_claim()),
                tasks.create_task(self.vitals.watch()),
                *(tasks.create_task(self.downlink.fetch()) for _ in range(FETCHERS)),
            ]
            await self._serve_boundary(tasks)
            await self._linger()
            for task in background:
                task.cancel()
        await self._last_words()
        self.vitals.rest()

    async def _linger(self) -> None:
        """Stay for a moment where nothing of us was ever merged, updates are under way and a syncer is there to merge
        them: a short life ends before it hears of it, and would be told that it was for nothing."""
        until = self._runtime.now() + LINGER_S
        while self._runtime.now() < until:
            merged = any(account.merged for account in self.uplink.accounts)
            gone = self._runtime.now() - self._syncer_heard_at > self.pace.silence_s
            if merged or gone or not any(self.uplink.attempts):
                return
            await asyncio.sleep(LINGER_LOOK_S)

    def drain(self, *, done: bool = False) -> None:
        """Stop once the uploads under way are announced; `done`: the learner has trained all its steps."""
        self._done = done
        self.uplink.draining = True
        self._wake.set()

    async def _serve_boundary(self, tasks: asyncio.TaskGroup) -> None:
        assert self.boundary is not None, "run before attach"
        while True:
            while self.boundary.outbox:
                self._take(self.boundary.outbox.popleft(), tasks)
            if self.uplink.draining and not self.uplink.busy and not self._checkpointing:
                return
            await self._wake.wait()
            self._wake.clear()

    def _take(self, message: ToAgent, tasks: asyncio.TaskGroup) -> None:
        match message:
            case Captured() as captured:
                self.uplink.take(captured, tasks, self.wake)
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
            case Adopted() as adopted:
                self.uplink.adopted(adopted)
            case Frozen() as frozen:
                # The other half now, before any later message of the boundary changes it.
                self._checkpointing += 1
                points = tuple(self.uplink.reconciled(p, point) for p, point in enumerate(frozen.points))
                tasks.create_task(
                    self._checkpoint(replace(frozen, points=points), self.uplink.traffic(), self.uplink.tokens_lost)
                )

    def _tell(self, message: ToTraining) -> None:
        if self.boundary is not None:
            self.boundary.post(message)

    # --- checkpoints and twins ----------------------------------------------------------------------------------------

    async def _ask_for_checkpoints(self) -> None:
        """Ask for a copy at the cadence, but never while the one before is on its way."""
        while math.isfinite(self._checkpoint_s):
            await asyncio.sleep(self._checkpoint_s)
            if not self._checkpointing:
                self._tell(Freeze())

    async def _checkpoint(self, frozen: Frozen, traffic: Sequence[Traffic], tokens_lost: int) -> None:
        take = self._saver.take if self._saver else lambda _: None
        try:
            useless = await self._runtime.offload(why_useless, frozen)
            if useless is not None:
                self.metrics.checkpoints_failed.inc()
                if not self._checkpoints_useless:
                    logger.warning(
                        "no checkpoint of step %d, nor of those after it until it is over: %s", frozen.step, useless
                    )
            elif self._checkpoints_useless:
                logger.warning("checkpoints are written again, from step %d on", frozen.step)
            self._checkpoints_useless = useless is not None
            if useless is not None:
                return
            blob = await self._runtime.offload(
                pack, self._run, self.name, self.incarnation, tokens_lost, self._runtime.wall(), frozen,
                traffic, take,
            )  # fmt: skip
            key = checkpoint_key(self.name, self.incarnation, frozen.step, frame.digest(blob))
            await self._store.put(key, blob)
            self._checkpoint_bytes += len(blob)
            self._stored_at = self._runtime.now()
            if key not in self._checkpoints:
                self._checkpoints.append(key)
        except (Unavailable, Denied) as error:
            self.metrics.checkpoints_failed.inc()
            logger.warning("no checkpoint of step %d (%d bytes): %s", frozen.step, len(blob), error)
        else:
            await self._drop_old_checkpoints()
        finally:
            self._checkpointing -= 1
            self._wake.set()

    async def _drop_old_checkpoints(self) -> None:
        try:
            while len(self._checkpoints) > CHECKPOINTS_KEPT:
                await self._store.delete(self._checkpoints[0])
                self._checkpoints.pop(0)
        except (Unavailable, Denied) as error:
            logger.warning("old checkpoints stay for the collector: %s", error)

    async def _watch_claim(self) -> None:
        """Stop when another process has claimed our name. Raises `Fenced`."""
        while True:
            try:
                async with asyncio.timeout(CLAIM_BEATS * self.pace.heartbeat_s):
                    await self._look.wait()
            except TimeoutError:
                pass
            self._look.clear()
            try:
                await self._store.get_range(claim_key(self.name, self.incarnation + 1), 0, 1)
            except (ObjectMissing, Unavailable):
                continue
            raise Fenced(self.name, self.incarnation + 1)

    # --- hearing ------------------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        async for stream, said in self._listener.live(lambda: None):
            try:
                message = decode(said.body)
            except RecordInvalid as error:
                logger.warning("message on %s turned away: %s", stream, error)
                continue
            if message.run != self._run.digest:
                continue
            if stream == SYNCER_STREAM and isinstance(message, FromSyncer):
                self._hear(message)
            elif isinstance(message, Announce | Heartbeat | Progress) and message.incarnation > self.incarnation:
                self._look.set()  # somebody speaks as our successor: see whether it has claimed the name

    def _hear(self, message: FromSyncer) -> None:
        self._syncer_heard_at = self._runtime.now()
        match message:
            case Committed(fragment=p, version=version):
                self.downlink.want(p, version)
            case Alive(heads=heads):
                for p, version in enumerate(heads):
                    self.downlink.want(p, version)
            case Call(fragment=p, version=version) if p < len(self._run.layout.fragments):
                self.downlink.want(p, version - 1)
                self.uplink.called(p, version)
                self._tell(Called(p, version))
            case _:
                pass

    # --- saying -------------------------------------------------------------------------------------------------------

    async def _beat(self) -> None:
        while True:
            beat = self._heartbeat()
            self._speaker.say(beat)
            self._show(beat)
            self._concern.look(self._runtime.now(), self._troubles())
            self.uplink.repeat()
            await asyncio.sleep(self.pace.heartbeat_s * self._runtime.random.uniform(0.8, 1.0))

    def _troubles(self) -> list[Trouble]:
        """Return what keeps this learner's work from being merged: for how long, what, and what to do."""
        now = self._runtime.now()
        deaf_or_mute = [since for since in (self._listener.down_since, self._speaker.down_since) if since is not None]
        found = [
            (self._edge.down_s, "the store does not answer", f"see whether {self._edge.url} is there"),
            (self._tolerance.refused_s, "what was allowed before is refused", "see to credentials and policies"),
        ]
        if deaf_or_mute:
            found.append((now - min(deaf_or_mute), "the bus does not answer", f"see whether {self._bus.url} is there"))
        else:
            start = f"start one: isthmus syncer {self._edge.url} --bus {self._bus.url}"
            found.append((now - self._syncer_heard_at, "no syncer is heard", start))
        dry = self.uplink.unmerged.trouble(now, self._step, self._run.rules.sync_every)
        return [*found, dry] if dry else found

    @property
    def _step(self) -> int:
        return self.boundary.step if self.boundary else self.history.step

    def summary(self) -> Summary:
        """Return what the stay came to so far. From another thread only once the agent has ended."""
        beat, quiet_s = self._heartbeat(), MISSED_BEATS * self.pace.heartbeat_s
        return Summary(
            learner=self.name,
            run=self._run.url,
            steps=beat.step - self.history.step,
            steps_done=beat.step,
            seconds=self._runtime.now() - self._began_at,
            versions=beat.versions,
            ledger=beat.ledger,
            trouble=self._concern.said or next((what for for_s, what, _ in self._troubles() if for_s > quiet_s), ""),
        )

    def scalars(self) -> tuple[int, Mapping[str, float]] | None:
        """Return the step and what the last heartbeat said, for a sink; None before the first."""
        beat = self._beaten
        if beat is None:
            return None
        shares = {f"ledger/{part}": getattr(beat.ledger, part) / max(beat.ledger.processed, 1) for part in PARTS}
        durations = {"seconds/step": beat.step_s, "seconds/upload": beat.upload_s, "seconds/sync": beat.sync_s}
        return beat.step, shares | durations | {"version/least": min(beat.versions), "version/most": max(beat.versions)}

    def _show(self, beat: Heartbeat) -> None:
        """Bring the metrics to what the heartbeat says."""
        m = self.metrics
        self._beaten = beat
        m.steps_done.set(beat.step)
        m.step_seconds.set(beat.step_s)
        m.upload_seconds.set(beat.upload_s)
        m.sync_seconds.set(beat.sync_s)
        m.tokens_lost.set(beat.tokens_lost)
        m.incarnation.set(beat.incarnation)
        for part in PARTS:
            m.ledger.labels(part).set(getattr(beat.ledger, part))
        for p, held in enumerate(beat.versions):
            m.fragment_version.labels(p).set(held)

    def _announce(self, attempt: Attempt) -> None:
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
                age_s=max(0.0, self._runtime.now() - attempt.boundary_at),
                step_s=self.boundary.step_s if self.boundary else 0.0,
                upload_s=self.uplink.upload_s,
                sync_s=self.downlink.sync_s,
            )
        )

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
        for p, account in enumerate(self.uplink.accounts):
            account.local = b.local_tokens(p)
        return Heartbeat(
            run=self._run.digest,
            id=self._runtime.new_id(),
            learner=self.name,
            incarnation=self.incarnation,
            step=b.step,
            steps_target=self._steps_target,
            tokens_seen=b.tokens_seen,
            loss=b.loss if b.loss is not None and math.isfinite(b.loss) else None,
            step_s=b.step_s,
            upload_s=self.uplink.upload_s,
            sync_s=self.downlink.sync_s,
            versions=tuple(slot.base for slot in b.slots),
            bytes_up=self._edge.traffic.bytes_up,
            bytes_down=self._edge.traffic.bytes_down,
            checkpoint_bytes=self._checkpoint_bytes,
            tokens_lost=self.uplink.tokens_lost,
            ledger=weigh(self.uplink.accounts, self._run.shares, b.tokens_seen + self.uplink.tokens_lost),
            waiting_for=", ".join(self.waiting_for),
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
        except (TimeoutError, Unavailable, Denied) as error:
            logger.warning("last words not said: %s", error or type(error).__name__)

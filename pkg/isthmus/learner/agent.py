"""The learner's agent: joins, listens, speaks, and moves things between the boundary, the uplink and the downlink.

Plain coroutines off the training thread. Without store or bus it waits and the training goes on; whatever no commit has
settled is said again.
"""

import asyncio
import logging
import math
from collections.abc import Callable

from isthmus.bus import Bus
from isthmus.bus.voice import Listener, Speaker
from isthmus.errors import InputError, RecordInvalid, Unavailable
from isthmus.learner.boundary import Adopted, Boundary, Called, Captured, Passed, Replica, ToAgent, ToTraining
from isthmus.learner.downlink import FETCHERS, Downlink
from isthmus.learner.history import History, read_history
from isthmus.learner.ledger import weigh
from isthmus.learner.uplink import Attempt, Uplink
from isthmus.log import Log
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
from isthmus.records.objects import SCHEMA, ClaimHeader, claim_key, claims_prefix
from isthmus.rules import ADOPTIONS, Pace
from isthmus.runtime import Runtime
from isthmus.store import EdgeStore

logger = logging.getLogger(__name__)

PROGRESS_BEATS = 0.1
"""Heartbeats between two reports of new steps."""


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
        self.history = History()
        self.boundary: Boundary | None = None
        self._log = log
        self._store = store
        self._bus = bus
        self._runtime = runtime
        self._run = log.run
        self._adopt = adopt
        self._steps_target = steps_target
        self._speaker = Speaker(bus, learner_stream(name), runtime)
        self._listener = Listener(bus, runtime, lambda stream: stream == SYNCER_STREAM)
        self._wake = asyncio.Event()
        self.uplink = Uplink(log.run, store, runtime, name, self.pace, announce=self._announce, tell=self._tell)
        self.downlink = Downlink(log, runtime, self.pace, settle=self.uplink.settle, tell=self._tell)
        self._done = False

    @property
    def incarnation(self) -> int:
        """How often this name has joined the run, this time included; 0 before `join`."""
        return self.uplink.incarnation

    # --- joining ------------------------------------------------------------------------------------------------------

    async def join(self) -> None:
        """Claim the name, find where predecessors stopped, and read the newest published values."""
        # The position first, the log after it: what is committed in between is heard again, which is harmless.
        self._listener.positions[SYNCER_STREAM] = await self._bus.tail(SYNCER_STREAM)
        self.uplink.incarnation = await self._claim()
        self.history = await read_history(self._log, self._bus, self.name)
        await self.downlink.begin()
        for account in self.uplink.accounts:
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
            versions=[(k.version, k.values) for k in self.downlink.known],
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
            (int(entry.key.split("/")[2]) for entry in await self._store.list(claims_prefix(self.name))), default=0
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
                tasks.create_task(self.downlink.probe()),
                tasks.create_task(self._report_progress()),
                *(tasks.create_task(self.downlink.fetch()) for _ in range(FETCHERS)),
            ]
            await self._serve_boundary(tasks)
            for task in background:
                task.cancel()
        await self._last_words()

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
            if self.uplink.draining and not self.uplink.busy:
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
            case Adopted(fragment, version, overwritten):
                self.uplink.adopted(fragment, version, overwritten)

    def _tell(self, message: ToTraining) -> None:
        if self.boundary is not None:
            self.boundary.inbox.append(message)

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
            self._speaker.say(self._heartbeat())
            self.uplink.repeat()
            await asyncio.sleep(self.pace.heartbeat_s * self._runtime.random.uniform(0.8, 1.0))

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
            loss=b.loss if b.loss is not None and math.isfinite(b.loss) else None,
            step_s=b.step_s,
            upload_s=self.uplink.upload_s,
            sync_s=self.downlink.sync_s,
            versions=tuple(slot.base for slot in b.slots),
            bytes_up=self._store.traffic.bytes_up,
            bytes_down=self._store.traffic.bytes_down,
            tokens_lost=self.history.tokens_lost,
            ledger=weigh(self.uplink.accounts, self._run.shares, b.tokens_here + self.history.tokens_lost),
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

"""The reporter: publishes what a learner does on the bus, in metrics, to sinks, in its log, and in its summary."""

import asyncio
import logging
import math
from collections.abc import Mapping
from dataclasses import replace

from isthmus.agent.tolerance import Tolerance
from isthmus.agent.trouble import Connectivity, Trouble, TroubleLog
from isthmus.bus import syncer_command
from isthmus.bus.base import Bus
from isthmus.bus.endpoints import Listener, Speaker
from isthmus.errors import Denied, Unavailable, told
from isthmus.format.records.fields import WAITING_MAX
from isthmus.format.records.messages import PARTS, Announce, Heartbeat, Leave, Pass, Progress
from isthmus.format.records.objects import work_of
from isthmus.format.rules import Pace
from isthmus.learner.boundary import Boundary
from isthmus.learner.downlink import Downlink
from isthmus.learner.incarnation import Incarnation
from isthmus.learner.ledger import weigh
from isthmus.learner.summary import Summary
from isthmus.learner.uplink import Attempt, Uplink
from isthmus.log import Log
from isthmus.log.expulsions import removed
from isthmus.log.fork_detection import UNSAID
from isthmus.reasons import GOES_ON, REJECTED, UNHEARD, Reason
from isthmus.runtime.clock import Runtime
from isthmus.runtime.metrics import LearnerMetrics
from isthmus.store import EdgeStore

logger = logging.getLogger(__name__)

PROGRESS_BEATS = 0.1
"""Interval between two reports of new steps, in heartbeats."""

MISSED_BEATS = 1.5
"""The summary names a trouble that has lasted longer than this many heartbeats."""

MEANWHILE = "training goes on, but its updates are not merged meanwhile"
"""What any trouble means for a learner, as its warnings say it."""

LAST_WORDS_S = 2.0
"""Seconds that publishing the leave message may take."""


class Reporter:
    """Reports what one learner does: on the bus, in metrics and in its log."""

    def __init__(
        self,
        log: Log,
        name: str,
        runtime: Runtime,
        pace: Pace,
        *,
        edge: EdgeStore,
        bus: Bus,
        tolerance: Tolerance,
        speaker: Speaker,
        listener: Listener,
        metrics: LearnerMetrics,
        steps_target: int,
    ) -> None:
        self.boundary: Boundary | None = None
        self.uplink: Uplink
        self.downlink: Downlink
        self.claimed: Incarnation
        self.first_step = 0
        """The step at which this incarnation began."""
        self.first_tokens = 0
        """The tokens that earlier incarnations processed."""
        self.syncer_heard_at = self._began_at = runtime.now()
        self._left_at: float | None = None
        self._run = log.run
        self._members = log.members
        self._log = log
        self._name = name
        self._runtime = runtime
        self._pace = pace
        self._edge = edge
        self._bus = bus
        self._speaker = speaker
        self._connectivity = Connectivity(runtime, edge, tolerance, listener, speaker, bus.url)
        self._metrics = metrics
        self._steps_target = steps_target
        self._trouble_log = TroubleLog(name, pace.silence_s, MEANWHILE)
        self._hindered_at, self._hindered_step = -math.inf, 0
        """When, and at which step, store, bus or syncers were last known to be away: nothing could be merged then."""
        self._unheard_at = -math.inf
        """When syncers were last known to be away: nothing could be rejected until then."""
        self._deaf_at = -math.inf
        self._has_listened = False
        """When the bus was last known to be away: no syncer could be heard until then."""
        self._beaten: Heartbeat | None = None

    def of(self, uplink: Uplink, downlink: Downlink, claimed: Incarnation) -> None:
        """Set the uplink, the downlink and the incarnation; they are made after the reporter."""
        self.uplink, self.downlink, self.claimed = uplink, downlink, claimed

    # --- on the bus ---------------------------------------------------------------------------------------------------

    async def beat(self) -> None:
        """Publish heartbeats, and announce again the updates that no commit has settled."""
        while True:
            beat = self._heartbeat()
            self._speaker.say(beat)
            self._show(beat)
            self._trouble_log.look(self._runtime.now(), self._troubles())
            self.uplink.repeat()
            looked_at = self._runtime.now()
            await asyncio.sleep(self._pace.heartbeat_s * self._runtime.random.uniform(0.8, 1.0))
            if self._runtime.now() - looked_at > MISSED_BEATS * self._pace.heartbeat_s:
                self._deaf_at = self._runtime.now()  # this process stood still, so it could hear nobody

    async def report_progress(self) -> None:
        """Report new steps soon after they are done.

        Reports are signs of life. A later incarnation also finds from them how many tokens were lost.
        """
        assert self.boundary is not None, "run before attach"
        said = self.boundary.step
        while not self._bus.polled:  # there each report would be a request, and heartbeats must do
            await asyncio.sleep(self._pace.heartbeat_s * PROGRESS_BEATS)
            if self.boundary.step == said:
                continue
            said = self.boundary.step
            self._speaker.say(
                Progress(
                    run=self._run.digest,
                    id=self._runtime.new_id(),
                    learner=self._name,
                    incarnation=self.uplink.incarnation,
                    step=said,
                    tokens_seen=self.boundary.tokens_seen,
                )
            )

    def announce(self, attempt: Attempt) -> None:
        """Announce where an update is stored."""
        h = attempt.header
        known = self.downlink.known[h.fragment]
        self._speaker.say(
            Announce(
                run=self._run.digest,
                id=self._runtime.new_id(),
                learner=self._name,
                incarnation=self.uplink.incarnation,
                fragment=h.fragment,
                **work_of(h),
                key=attempt.key,
                digest=attempt.digest,
                size=attempt.size,
                due=attempt.due or (self.boundary is not None and self.boundary.is_last(h.fragment, h.base)),
                age_s=max(0.0, self._runtime.now() - attempt.boundary_at),
                step_s=self.boundary.step_s if self.boundary else 0.0,
                upload_s=self.uplink.upload_s,
                sync_s=self.downlink.sync_s,
                seen=known.version,
                seen_digest=known.digest if known.version else UNSAID,
            )
        )

    def have_nothing(self, fragment: int, version: int) -> None:
        """Tell the syncer that a round need not wait for this learner."""
        self._speaker.say(
            Pass(
                run=self._run.digest,
                id=self._runtime.new_id(),
                learner=self._name,
                fragment=fragment,
                version=version,
            )
        )

    async def leave(self, *, done: bool) -> None:
        """Publish a last heartbeat and the leave message. `done`: the learner has trained all its steps."""
        self._left_at = self._runtime.now()
        self._speaker.say(self._heartbeat())
        self._speaker.say(
            Leave(
                run=self._run.digest,
                id=self._runtime.new_id(),
                learner=self._name,
                incarnation=self.uplink.incarnation,
                step=self.boundary.step if self.boundary else 0,
                done=done,
                kept_to=self._kept_to,
                diverged=self.boundary is not None and not math.isfinite(self.boundary.loss or 0.0),
            )
        )
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                await self._speaker.flush()
        except (TimeoutError, Unavailable, Denied) as error:
            logger.warning("could not publish the leave message: %s", told(error))

    def _heartbeat(self) -> Heartbeat:
        b = self.boundary
        assert b is not None, "heartbeat before attach"
        for p, account in enumerate(self.uplink.accounts):
            account.local = b.local_tokens(p)
        return Heartbeat(
            run=self._run.digest,
            id=self._runtime.new_id(),
            learner=self._name,
            incarnation=self.uplink.incarnation,
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
            checkpoint_bytes=self.claimed.bytes_stored,
            tokens_lost=self.uplink.tokens_lost,
            ledger=weigh(self.uplink.told(), self._run.shares, b.tokens_seen + self.uplink.tokens_lost),
            waiting_for=", ".join(self.waiting_for)[:WAITING_MAX],
            members=self._members.current.version,
            risen=b.risen,
        )

    # --- how it is ----------------------------------------------------------------------------------------------------

    @property
    def waiting_for(self) -> tuple[str, ...]:
        """What this learner waits for at the moment, as its heartbeats report it."""
        waiting = self._connectivity.waiting_for
        if self._trouble_log.said and not waiting:
            waiting.append(f"a merge ({self._trouble_log.said})")
        return tuple(waiting)

    def _troubles(self) -> list[Trouble]:
        """Return what keeps this learner's work from being merged: seconds so far, what it is, and what to do."""
        now = self._runtime.now()
        found = self._connectivity.troubles()
        if self._connectivity.bus_is_down or not self._has_listened:
            self._deaf_at, self._has_listened = now, True  # while it joined, nobody could be heard
        else:
            silent_s = now - max(self.syncer_heard_at, self._deaf_at)
            what, theirs = UNHEARD, "(--bus, ISTHMUS_BUS, join(bus=…))"
            start = syncer_command(self._edge.url, self._bus.url, signed=self._members.signed)
            start += self._members.before_a_syncer
            remedy = f"if one runs, use its bus {theirs}; else start one: {start}"
            since = self._runtime.wall() - silent_s + MISSED_BEATS * self._pace.heartbeat_s
            if not any(known.version for known in self.downlink.known):
                remedy += f" (nothing was ever merged in {self._edge.url}: is that the address of the run?)"
            if self.downlink.found_at > since:
                what += f", {GOES_ON}"
                remedy = f"{self._bus.url} is not the bus of its syncers: use theirs {theirs}"
            found.append((silent_s, what, remedy))
        at = self.boundary
        step, period = (self.first_step, self._run.rules.sync_every) if at is None else (at.step, at.longest_period)
        if now - self.syncer_heard_at > MISSED_BEATS * self._pace.heartbeat_s:
            self._hindered_at, self._hindered_step, self._unheard_at = now, step, now
        elif any(for_s > 0 for for_s, *_ in self._connectivity.troubles()):
            self._hindered_at, self._hindered_step = now, step
        unmerged = self.uplink.unmerged
        if unmerged.rejected_for == Reason.STALE:  # what waited for an outage to end comes too late, and no later work
            unmerged = replace(unmerged, step=max(unmerged.step, self._hindered_step))
        if self._removed:  # commits do not list what syncers reject before they look at it
            unmerged = replace(unmerged, rejected_for=Reason.NOT_A_MEMBER)
        dry = unmerged.trouble(now, step, period)
        if dry is None:
            return found
        for_s, what, remedy = dry
        # While another trouble is known, and for a while after it, that trouble explains why nothing is merged. A
        # rejection needs no other explanation, unless no syncer was there to merge what came after it.
        itself = what.startswith(REJECTED) and unmerged.rejected_for != Reason.STALE
        hindered_at = self._unheard_at if itself else self._hindered_at
        return [*found, (min(for_s, now - hindered_at), what, remedy)]

    @property
    def _removed(self) -> str:
        return removed(self._log, self._name)

    @property
    def _kept_to(self) -> int:
        return self.first_step if self.claimed.stored_step is None else self.claimed.stored_step

    def summary(self) -> Summary:
        """Return the summary so far. Another thread may call this only after the agent has ended."""
        at = self.boundary
        beat, quiet_s = self._heartbeat(), MISSED_BEATS * self._pace.heartbeat_s
        return Summary(
            learner=self._name,
            run=self._run.url,
            bus=self._bus.url,
            kept_to=self._kept_to,
            steps=beat.step - self.first_step,
            steps_done=beat.step,
            seconds=(self._runtime.now() if self._left_at is None else self._left_at) - self._began_at,
            versions=beat.versions,
            ledger=beat.ledger,
            processed_before=self.first_tokens,
            loss=None if self.boundary is None else self.boundary.loss,
            risen=None if self.boundary is None else self.boundary.risen,
            expelled=self._removed,
            rejected_for=self.uplink.unmerged.rejected_for,
            first_after=0 if at is None or self.uplink.unmerged.announced else math.ceil(at.first_due),
            unanswered=sum(
                share * sum(account.sent.values())
                for account, share in zip(self.uplink.told(), self._run.shares, strict=True)
            ),
            trouble=next(
                (f"{what}; {remedy}" for for_s, what, remedy in self._troubles() if for_s > quiet_s),
                self._trouble_log.said,
            ),
        )

    # --- metrics and sinks --------------------------------------------------------------------------------------------

    def scalars(self) -> tuple[int, Mapping[str, float]] | None:
        """Return the step and the values of the last heartbeat, for a sink; None before the first heartbeat."""
        beat = self._beaten
        if beat is None:
            return None
        shares = {f"ledger/{part}": getattr(beat.ledger, part) / max(beat.ledger.processed, 1) for part in PARTS}
        durations = {"seconds/step": beat.step_s, "seconds/upload": beat.upload_s, "seconds/sync": beat.sync_s}
        return beat.step, shares | durations | {"version/least": min(beat.versions), "version/most": max(beat.versions)}

    def _show(self, beat: Heartbeat) -> None:
        """Set the metrics to the values of a heartbeat."""
        m = self._metrics
        self._beaten = beat
        m.steps_done.set(beat.step)
        m.step_seconds.set(beat.step_s)
        m.upload_seconds.set(beat.upload_s)
        m.sync_seconds.set(beat.sync_s)
        m.tokens_trained_again.set(beat.tokens_lost)
        m.incarnation.set(beat.incarnation)
        for part in PARTS:
            m.ledger.labels(part).set(getattr(beat.ledger, part))
        for p, held in enumerate(beat.versions):
            m.fragment_version.labels(p).set(held)

"""The rounds of one fragment, as a state machine without I/O: events with a time go in, actions come out.

    closed → open (called) → grace, once the quorum is in → merging → closed

An open round may also merge directly, or be abandoned.

The syncer passes announcements, arrivals, calls, passes and the clock to `Rounds.on`, and carries out the actions. A
round is opened by another syncer's call, or by an update that is due and based on the newest version. Such an update
opens a round only at the syncer that holds the fragment, if its learner has not opened one too recently
(`Bounds.opening`), and if `admission` has room. Then every learner is called, and answers with what it has. An
announced update counts only when its bytes are here and checked. No round waits for ever, and no update: one that is
not due or not on the newest version opens a round itself once none was opened for long enough (`IDLE_PERIODS`).
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum

from isthmus.format.records.messages import Refusal
from isthmus.format.records.objects import (
    CHANGES_MAX,
    INPUTS_MAX,
    LISTED_MAX,
    CommitHeader,
    Late,
    Rejection,
    Seen,
    What,
)
from isthmus.format.rules import BOUNDS, STALENESS_MAX, Bounds, Pace
from isthmus.reasons import FINAL, LOSSLESS, PASSING, Reason
from isthmus.rounds.admission import Admission
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
    Event,
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
from isthmus.rounds.grace import Terms, adaptive_grace
from isthmus.rounds.live_learners import AFRESH_LEADS, LiveLearners
from isthmus.rounds.period import next_period
from isthmus.runtime.averages import Usual

POINTERS_MAX = 4096
"""The most updates of one fragment that wait; beyond that a new one is rejected."""

FINAL_EACH = 16
"""The most final rejections of one learner that wait for a commit to list them."""

AHEAD_MAX = 2
"""Versions by which a base may be ahead of this syncer's head; an update with a base beyond that is rejected."""

ABSENT_STEPS = 0.5
"""Share of a learner's step: a round that lasted less does not count as missed by the learner."""

ABSENT_KNOWN = 4
"""A learner of which an update has come may miss this many times as many rounds: over a thin link every fourth update
arrives."""

IDLE_PERIODS = 2.0
"""After this many times the time in which a learner usually opens a round, any waiting update opens one."""

LONG_S, LONG_LEADS = 5.0, 4.0
"""If an update is heard of longer after its capture than this, and than so many times its learner's usual lead, it was
held up. If nothing was committed for as long, an outage of the store is over, of which this syncer may not know: it
asks the store for nothing while no update is announced."""

STEP_UNKNOWN_S = 1.0
"""The duration of a step, in seconds, that is assumed until a learner has stated its own."""


class Phase(StrEnum):
    """The phase of a fragment's rounds."""

    CLOSED = "closed"
    OPEN = "open"
    GRACE = "grace"
    MERGING = "merging"


@dataclass(slots=True)
class Round:
    """The round under way. Times are on the syncer's clock, in seconds."""

    opened_at: float
    due_at: float
    """Since when an update has been due: before `opened_at`, if the round had to wait for admission."""
    boundary_at: float
    called_at: float
    called_by: str
    arrived: dict[tuple[str, int], Pointer] = field(default_factory=dict)
    """The updates that were accumulated, by learner and base, in order of arrival."""
    passed: dict[str, float] = field(default_factory=dict)
    """The learners that have no update for the round, and when the syncer heard so."""
    all_heard_at: float = 0.0
    """When every learner has had the time to be heard (see `LiveLearners.all_heard_at`)."""
    gives_up_at: float = math.inf
    """When the round stops waiting and merges what has arrived: a period of the slowest expected learner after opening.
    No later message of a learner changes it."""
    quorum_at: float | None = None
    quorum_s: float = 0.0
    grace_s: float = 0.0
    not_before: float = -math.inf
    """The round does not close before this time, however many learners have answered. Set only to decide a recorded
    round anew."""
    kept_open: bool = False
    """Whether the round was kept open past its end for announced updates that this syncer had not read yet."""
    own_until: float = -math.inf
    """When the round closed, if it was kept open. To decide a recorded round anew, it is set beforehand."""
    outdated: set[tuple[str, int]] = field(default_factory=set)
    """Learner and base of the updates that waited for admission or for the bus. Their learners are asked for newer ones
    instead."""
    overlap_steps: float = 0.0
    terms: Terms = field(default_factory=Terms)
    closed_by: ClosedBy | None = None
    closed_at: float = 0.0
    expected: frozenset[str] = frozenset()
    quorum: int = 1
    fresh: set[str] = field(default_factory=set)
    seen: list[Seen] = field(default_factory=list)
    """What the round was decided by, in order: arrivals, passes, and learners that came or went (see
    `records.objects.Seen`)."""
    cut: bool = False
    """Whether `seen` is incomplete, since there were too many changes."""

    def note(self, what: What, learner: str, now: float) -> None:
        """Add an entry to `seen`. Changes of the expected learners are bounded: a learner could come and go for
        ever."""
        changes = what in ("here", "gone")
        if not changes or len(self.seen) < CHANGES_MAX:
            self.seen.append(Seen(now - self.opened_at, what, learner))
        else:
            self.cut = True

    @property
    def missing(self) -> frozenset[str]:
        """The expected learners that have neither a fresh update in the round nor passed."""
        return self.expected.difference(self.fresh, self.passed)

    @property
    def quorum_missed(self) -> bool:
        """Whether fewer learners than the quorum have a fresh update in the round."""
        return len(self.fresh) < self.quorum


class Rounds:
    """The rounds of one fragment at one syncer."""

    def __init__(
        self,
        pace: Pace,
        periods: tuple[int, int],
        live: LiveLearners,
        bounds: Bounds = BOUNDS,
        admission: Admission | None = None,
        fragment: int = 0,
        turn: Callable[[], None] = lambda: None,
    ) -> None:
        """`periods`: the shortest and the longest period, in steps. `admission` is shared by all fragments of a syncer.
        It calls `turn` when it has room for a waiting round of this fragment; the caller then passes a `Turn` to
        `on`."""
        self.phase = Phase.CLOSED
        self.round: Round | None = None
        self.head = 0
        self.holding = True
        """Whether this syncer opens rounds of the fragment. If not, it keeps pointers and follows the log."""
        self.rejected_total: dict[str, int] = {}
        """Rejections by reason, over the fragment's log and those not yet in a commit."""
        self._pace = pace
        self._shortest, self._longest = periods
        self.period = float(self._shortest)
        """Steps between two uploads of the fragment, as the newest commit says."""
        self._live = live
        # By learner and base: digest and tokens of the merged update, as long as others on the base may come.
        self._merged: dict[str, dict[int, tuple[bytes, int]]] = {}
        # By digest of an update that is counted as lost: the head then, and whether it is lost for good.
        self._losses: dict[bytes, tuple[int, bool]] = {}
        # By learner and base: updates rejected for now. If one is never merged, its loss is still to be counted.
        self._put_off: dict[tuple[str, int], Pointer] = {}
        self._recent: list[set[str]] = []  # learners of the last two commits
        self._waiting: dict[tuple[str, int], Pointer] = {}
        self._fetching: dict[tuple[str, int], Pointer] = {}
        self._begun: dict[tuple[str, int], float] = {}  # when the fetch of an update began
        self._longer: dict[tuple[str, int], Pointer] = {}  # updates announced while one on the same base is read
        self._admission = admission or Admission()
        self._fragment = fragment
        self._turn = turn
        self._in_line = False
        """Whether a round waits for admission."""
        self._due_at = math.inf
        """Since when the update that waits for admission has been due."""
        self._ended_at = -math.inf  # when the last round ended
        # By learner, base and reason: how often, when last, and the digest of the last update rejected.
        self._rejections: dict[tuple[str, int, str], tuple[int, float, bytes]] = {}
        self._close_to_commit = Usual()
        self._exceeded = False
        """Whether the lag of the last round was longer than a period."""
        self._opened: dict[int, float] = {}  # when this round and the one before were opened, by version
        self._bounds = bounds
        self._missed: dict[str, int] = {}  # rounds in a row that a learner has missed without passing
        self.clipped_total: dict[str, int] = {}
        """Clipped updates by reason, over the fragment's log."""
        self._opened_by: dict[str, float] = {}  # when each learner last opened a round here
        self._known_since: dict[int, float] = {}  # when each of the newest versions was read or written here

    # --- events -------------------------------------------------------------------------------------------------------

    def restored(self, head: int, last: Iterable[CommitHeader]) -> None:
        """Start from the end of the log: `head` is its version, `last` its newest commits, oldest first."""
        self.head = head
        for commit in last:
            self._note_commit(commit)

    def on(self, event: Event, now: float) -> list[Action]:
        """Handle an event and return the actions that it asks for, in order. `now`: the time on the syncer's clock
        [s]."""
        actions = self._on(event, now)
        r = self.round if self.phase in (Phase.OPEN, Phase.GRACE) else None
        self._admission.owes(self._fragment, None if r is None else len(r.missing))
        if self._in_line and not self._may_open:
            self._leave_line()
        return actions

    def _on(self, event: Event, now: float) -> list[Action]:
        match event:
            case Tick():
                return self._tick(now)
            case Announced(pointer):
                return self._announced(pointer, now)
            case Arrived(pointer):
                return self._arrived(pointer, now)
            case Refused(pointer, reason):
                return self._refuse(pointer, reason, now)
            case Begun(pointer):
                place = (pointer.learner, pointer.base)
                if place in self._fetching:
                    self._fetching[place], self._begun[place] = pointer, now
            case Turn():
                return self._caught_up(now)
            case Unreachable(pointer):
                self._fetched(pointer)
                self._replace(pointer, now)
            case Passed(learner, version):
                return self._passed(learner, version, now)
            case Called(version, by):
                return self._called(version, by, now)
            case Hold(holding):
                return self._hold(holding, now)
            case Invalid(pointer, reason):
                self._reject(pointer, reason, now)
            case Appended(commit):
                self._appended(commit, now)
            case CaughtUp():
                return self._caught_up(now)
            case Spoiled(by):
                self._spoiled(by, now)
                return self._caught_up(now)
            case Lost():
                self._lost(now)
        return []

    def _hold(self, holding: bool, now: float) -> list[Action]:
        """Take the fragment over, or leave it to another syncer once the round under way has ended."""
        taken = holding and not self.holding
        self.holding = holding
        return self._caught_up(now) if taken else []

    def _announced(self, pointer: Pointer, now: float) -> list[Action]:
        """Handle an announcement. An update cannot have been captured before its base was there."""
        since = self._known_since.get(pointer.base)
        if since is not None and pointer.boundary_at < since and not pointer.old:
            pointer = replace(pointer, boundary_at=min(since, now))
        if pointer.base > self.head + AHEAD_MAX:
            self._reject(pointer, Reason.UNKNOWN_BASE, now)
            return [CatchUp()]
        place = (pointer.learner, pointer.base)
        known = self._longer.get(place) or self._waiting.get(place)
        in_round = self.round.arrived.get(place) if self.round else None
        settled = self._judge(pointer)
        if settled is None and known is None and len(self._waiting) >= POINTERS_MAX:
            settled = Reason.OVERSIZED
        if settled is not None:
            self._reject(pointer, settled, now, count=not pointer.old)
            return []
        self._put_off.pop(place, None)
        again = pointer.digest in {p.digest for p in (known, in_round) if p is not None}
        if pointer.base == self.head and not (again or pointer.old):
            self._look_for_outage(pointer, now)
        # An update that is announced again still opens a round if it is due: the previous round may have failed.
        if again:
            self._reject(pointer, Reason.DUPLICATE, now, count=not pointer.old)
        elif known is not None and known.rank > pointer.rank:
            self._reject(pointer, Reason.SUPERSEDED, now, count=not pointer.old)
        elif place in self._begun:
            # The update on this base that is being read is used. If newer ones replaced it while reading takes long, no
            # update would ever be read to its end.
            if place in self._longer:
                self._reject(self._longer[place], Reason.SUPERSEDED, now)
            self._longer[place] = pointer
        else:
            if known is not None:
                self._reject(known, Reason.SUPERSEDED, now)
            elif pointer.base < self.head:
                self._note_answer(pointer, now)  # measured too: it came too late for the round that it answers
            self._waiting[place] = pointer
            if self.round is not None:
                (self.round.outdated.add if self._is_of_before(pointer) else self.round.outdated.discard)(place)
        # If its base is newer than our head, another syncer has committed, and the log has more to read.
        actions: list[Action] = [CatchUp()] if pointer.base > self.head else []
        # An update that was due stays due: a later incarnation repeats it without knowing that.
        waits = self._waiting.get(place)
        due = pointer.due or (known is not None and known.due)
        if waits is not None and due and not waits.due and place not in self._fetching:
            self._waiting[place] = replace(waits, due=True)
        if self._may_open and due and pointer.base == self.head and self._try_to_open(now):
            actions.append(self._call())
        return actions + self.fetches()

    def _look_for_outage(self, pointer: Pointer, now: float) -> None:
        """Notice from an update that was held up that an outage of the store is over."""
        since_s = now - max(self._live.committed_at, self._live.back_at, pointer.boundary_at)
        if since_s > max(LONG_S, LONG_LEADS * self._live.lead_s(pointer.learner)):
            self._live.gap(now, since_s)

    def _called(self, version: int, by: str, now: float) -> list[Action]:
        """Handle another syncer's call: open the same round here, or catch up if the call is for a later version."""
        if version > self.head + 1:
            return [CatchUp()]
        if version == self.head + 1 and self._may_open:
            self._open(now, now, now, by)
            return self.fetches()
        return []

    def _passed(self, learner: str, version: int, now: float) -> list[Action]:
        """Handle a learner's pass: it has nothing for this round, or nothing newer than its update that waits here."""
        if self.round is not None and version == self.head + 1 and learner not in self.round.passed:
            if self._settle_for_outdated(learner):
                self.round.kept_open = True
                return self.fetches()
            self.round.passed[learner] = now
            self.round.note("pass", learner, now)
        return self._tick(now)

    def _settle_for_outdated(self, learner: str) -> bool:
        """Let a learner's outdated updates be read after all; return whether there are any."""
        assert self.round is not None, "an answer without a round"
        before = len(self.round.outdated)
        self.round.outdated = {place for place in self.round.outdated if place[0] != learner}
        return len(self.round.outdated) < before

    def elapsed_s(self, base: int, now: float) -> float:
        """Return how long a version has been known here, in seconds; infinity if that is not known."""
        return now - self._known_since.get(base, -math.inf)

    @property
    def overtaken(self) -> bool:
        """Whether the round was opened before the last outage was over: its learners have trained on meanwhile."""
        return self.round is not None and self.round.opened_at < self._live.back_at

    @property
    def usual_commit_s(self) -> float:
        """How long it usually takes from the end of a round until its commit is in the log [s]; 0 while unknown."""
        return self._close_to_commit.value

    def take_fetched(self, pointer: Pointer) -> bool:
        """End the fetch of an update; return whether it still belongs in the round. If so, the caller must accumulate
        it now."""
        self._fetched(pointer)
        if self.round is None or self.phase not in (Phase.OPEN, Phase.GRACE):
            return False  # too late for this round: the update stays a pointer for the next
        return self.wants(pointer) and (pointer.learner, pointer.base) not in self.round.outdated

    def newest(self, pointer: Pointer) -> Pointer:
        """Return the update to fetch: the one that has replaced `pointer`, or `pointer` itself."""
        return self._waiting.get((pointer.learner, pointer.base), pointer)

    def wants(self, pointer: Pointer) -> bool:
        """Return whether an update still waits to be merged, and was not replaced by another."""
        return self._waiting.get((pointer.learner, pointer.base)) is pointer

    def _fetched(self, pointer: Pointer) -> None:
        place = (pointer.learner, pointer.base)
        self._fetching.pop(place, None)
        self._begun.pop(place, None)

    def _arrived(self, pointer: Pointer, now: float) -> list[Action]:
        """Note that a fetched update is accumulated."""
        place = (pointer.learner, pointer.base)
        assert self.round is not None, "arrived without a round"
        self._waiting.pop(place, None)
        if longer := self._longer.pop(place, None):
            self._waiting[place] = longer  # the commit of this round settles it, or the round comes to nothing
        self.round.arrived[place] = pointer
        self._take_back(pointer, now)
        self.round.note("in", pointer.learner, now)
        self._live.came(pointer.learner, self.elapsed_s(pointer.base, now) / max(1, pointer.steps))
        if pointer.base == self.head:
            self.round.fresh.add(pointer.learner)
            self._note_answer(pointer, now)
        return self._tick(now) + self.fetches()

    def fetches(self) -> list[Action]:
        """Return the updates to fetch now, one of each learner: oldest bases first, then those announced first.

        Without grace a round closes as soon as its quorum is in. A fixed order of learners would starve the last one.
        """
        if self.phase not in (Phase.OPEN, Phase.GRACE):
            return []
        room = INPUTS_MAX - len(self._fetching) - (len(self.round.arrived) if self.round else 0)
        busy = {learner for learner, _ in self._fetching}
        actions: list[Action] = []
        idle = [(place, pointer) for place, pointer in self._waiting.items() if place[0] not in busy]
        for place, pointer in sorted(idle, key=lambda w: (w[1].base, w[1].heard_at, w[0])):
            if len(actions) >= room:
                break
            if place[0] in busy:
                continue
            if self.round and place in self.round.outdated:
                continue  # its learner is asked for a newer one
            if pointer.base > self.head or self._judge(pointer) or (self.round and place in self.round.arrived):
                continue  # its base is not known here yet, or the commit of this round settles it
            busy.add(place[0])
            self._fetching[place] = pointer
            actions.append(Fetch(pointer))
        return actions

    def _refuse(self, pointer: Pointer, reason: Reason, now: float) -> list[Action]:
        """Reject an update whose bytes are missing or not acceptable."""
        self._fetched(pointer)
        place = (pointer.learner, pointer.base)
        if self.wants(pointer):
            del self._waiting[place]
            if longer := self._longer.pop(place, None):
                self._waiting[place] = longer
        # A longer update that waits holds its work.
        self._reject(pointer, Reason.SUPERSEDED if place in self._waiting else reason, now)
        if reason in FINAL and pointer.base == self.head and place not in self._waiting:
            # The learner has answered with an update that cannot be merged. The round need not wait for another.
            return self._passed(pointer.learner, self.head + 1, now) + self.fetches()
        return self._tick(now) + self.fetches()

    def _tick(self, now: float) -> list[Action]:
        """Look at the clock, and close the round if there is nothing left to wait for.

        Also due after every event: if messages never cease, no timer ever finds the queue empty.
        """
        r = self.round
        if r is None or self.phase not in (Phase.OPEN, Phase.GRACE):
            return self._caught_up(now) if self._in_line or self._opens_next() <= now else []
        expected = self._expected(now)
        if self._note_expected(r, expected, now):
            r.kept_open = True  # the outdated update of a learner that is gone is read now
            return self.fetches()
        r.quorum = min(self._pace.quorum, max(1, len(expected)))
        if self.phase is Phase.OPEN and len(r.fresh) >= r.quorum:
            self.phase = Phase.GRACE
            r.quorum_at = now
            r.quorum_s = max(0.0, now - r.boundary_at)
            r.terms = self._terms(r, expected)
            granted = adaptive_grace(self._pace, self.period, r.terms, r.quorum_s)
            r.grace_s, r.overlap_steps = granted.seconds, granted.overlap_steps
        if len(r.arrived) >= INPUTS_MAX:
            return self._close(ClosedBy.FULL, now)  # the other updates wait for the next round
        everyone = bool(r.arrived) and not r.missing
        # Until every learner has had the time to be heard, those of the last commits must have answered.
        settled = now >= self._live.all_heard_at or (bool(self._recent) and self._known() <= r.fresh | r.passed.keys())
        ending = now >= self._gives_up(r) or (self.phase is Phase.GRACE and now >= self._grace_ends(r))
        if everyone and settled and now >= r.not_before:
            r.kept_open = r.kept_open or ending  # the last update was still being read when the round was to end
            # If the last answer came only after grace, it is grace that ended the round.
            last = r.opened_at + (r.seen[-1].at if r.seen else 0.0)
            over = self.phase is Phase.GRACE and last > self._grace_ends(r)
            return self._close(ClosedBy.GRACE if over else ClosedBy.EVERYONE, now)
        if ending and r.outdated:
            r.outdated.clear()  # learners have not sent newer updates in time, so the outdated ones are read
            r.kept_open = True
            return self.fetches()
        kept_open = now < self._own_until(r)
        if self.phase is Phase.GRACE and now >= self._grace_ends(r):
            if not kept_open:
                return self._close(ClosedBy.GRACE, now)
            r.kept_open = True
        if now >= self._gives_up(r) and kept_open:
            r.kept_open = True
        elif now >= self._gives_up(r):
            if r.arrived:
                return self._close(ClosedBy.DEADLINE, now)
            self._end(now)
            return [Abandon()]
        if now >= r.called_at + self._pace.heartbeat_s:  # the same sum as in `deadline`: rounding must not differ
            # Repeat the call and the fetches: messages get lost on the bus, and fetches fail.
            r.called_at = now
            return [self._call(), *self.fetches()]
        return []

    def deadline(self, now: float) -> float | None:
        """Return when the next `Tick` is due, `now` if it is overdue; None if nothing waits for the clock."""
        r = self.round
        if r is None or self.phase not in (Phase.OPEN, Phase.GRACE):
            opens = math.inf if self._in_line else self._opens_next()
            return max(now, opens) if math.isfinite(opens) else None
        own_until = self._own_until(r)

        def ends(at: float) -> float:
            """Return when to look at an end: at its time, to note that the round is kept open, and once that is
            over."""
            return at if now < at else max(at, own_until)

        # Look at least every heartbeat: calls are repeated, and learners fall silent without an event.
        times = [ends(self._gives_up(r)), r.called_at + self._pace.heartbeat_s]
        if self._live.all_heard_at > now:
            times.append(self._live.all_heard_at)
        if self.phase is Phase.GRACE:
            times.append(ends(self._grace_ends(r)))
        return max(now, min(times))

    def _appended(self, commit: CommitHeader, now: float) -> None:
        """Note the next commit of the log, by this syncer or another. Updates of the round that it left out wait again.

        No round is opened here, but on `CaughtUp`: one opened between two commits would create a version that exists.
        """
        ours = self.round is not None and self.phase is Phase.MERGING
        if ours and self.round is not None:
            self._exceeded = (self._lag() or 0.0) > self.period
            self._close_to_commit.note(now - self.round.closed_at)
        leftover = list(self.round.arrived.values()) if self.round else []
        self._end(now)
        self.head = commit.version
        self._live.committed_at = now
        self._note_commit(commit)
        kept = {v: at for v, at in self._known_since.items() if v >= commit.version - self._pace.staleness}
        self._known_since = kept | {commit.version: now}
        merged = {given.digest for given in commit.inputs}
        for pointer in leftover:
            self._waiting.setdefault((pointer.learner, pointer.base), pointer)
        for place, pointer in list(self._waiting.items()):
            reason = self._judge(pointer)
            if reason is not None:
                del self._waiting[place]
                if pointer.digest not in merged:
                    self._reject(pointer, reason, now)
        for place, pointer in list(self._put_off.items()):
            reason = self._judge(pointer)
            if reason is not None:
                del self._put_off[place]
                if reason not in LOSSLESS:
                    self._reject(pointer, reason, now)

    def _caught_up(self, now: float) -> list[Action]:
        """Open the next round if an update waits that may open it."""
        return [self._call(), *self.fetches()] if self._try_to_open(now) else []

    def _call(self) -> CallRound:
        assert self.round is not None, "a call without a round"
        return CallRound(self.head + 1, afresh=bool(self.round.outdated))

    def _try_to_open(self, now: float) -> bool:
        """Open a round if an update may open one and admission has room; return whether it was opened."""
        ready = [pointer for pointer in self._waiting.values() if now >= self._opens_at(pointer)]
        if not ready or not self._may_open:
            self._leave_line()
            return False
        opener, lead_s = max(ready, key=self._is_due), self._live.lead_s()
        boundary_at = opener.boundary_at if self._is_due(opener) else now
        due_at = opener.heard_at if opener.old else boundary_at
        self._due_at = min(self._due_at, max(due_at, self._opens_at(opener)))
        if not self._admission.admits(self._fragment, self._ended_at, lead_s, self._turn):
            self._in_line = True
            return False
        due_at, waited = self._due_at, self._in_line and now - self._due_at > AFRESH_LEADS * lead_s
        self._in_line, self._due_at = False, math.inf
        self._open(due_at, now if waited else boundary_at, now, opener.learner)
        if waited:
            assert self.round is not None, "opened"
            self.round.outdated = {place for place in self._waiting if place[1] == self.head}
        return True

    def _is_of_before(self, pointer: Pointer) -> bool:
        """Return whether an update on the newest version was captured before the last outage was over.

        An old message waited to be read, for how long is not known. At a start it counts as it stands: whoever sent it
        may be gone, and what it says of its steps is all that the end of its round would rest on.
        """
        of_before = pointer.boundary_at < self._live.back_at or (pointer.old and self._live.back_at > -math.inf)
        return pointer.base == self.head and of_before

    def _leave_line(self) -> None:
        self._in_line, self._due_at = False, math.inf
        self._admission.leaves(self._fragment)

    def _spoiled(self, by: Collection[bytes], now: float) -> None:
        """End a round that cannot be committed: reject the updates that cause it; the others wait for the next
        round."""
        if self.round is not None:
            for place, pointer in self.round.arrived.items():
                if pointer.digest in by:
                    self._reject(pointer, Reason.OVERFLOW, now)
                    self._losses[pointer.digest] = self.head, True
                else:
                    self._waiting.setdefault(place, pointer)
        self._end(now)

    def _lost(self, now: float) -> None:
        """End a round whose merge did not become the log; its updates wait for the next round."""
        if self.round is not None:
            for pointer in self.round.arrived.values():
                self._waiting.setdefault((pointer.learner, pointer.base), pointer)
        self._end(now)

    def _replace(self, pointer: Pointer, now: float) -> None:
        """Replace an update that no round has taken by the one announced on the same base while it was read, if any."""
        place = (pointer.learner, pointer.base)
        longer = self._longer.pop(place, None)
        if longer is not None and self.wants(pointer):
            self._reject(pointer, Reason.SUPERSEDED, now)
            self._waiting[place] = longer

    def _end(self, now: float) -> None:
        """Forget the round: it was merged, lost, spoiled or given up."""
        for place in list(self._longer):
            self._replace(self._waiting[place], now)
        self.phase, self.round, self._ended_at = Phase.CLOSED, None, now

    # --- what a commit records ----------------------------------------------------------------------------------------

    def next_period(self) -> float:
        """Return the period after the round that is being merged, in steps of the fastest learner.

        A single lag longer than a period may come from a request that hung, so only a second one in a row counts. If
        learners wait for versions (`lead`), nothing is overwritten, and the period stays as it is.
        """
        lag = self._lag()
        if lag is None or self._pace.lead is not None or (lag > self.period and not self._exceeded):
            return self.period
        return next_period(self.period, lag, self._shortest, self._longest)

    def _lag(self) -> float | None:
        """Return the lag of the round that is being merged, in steps of the fastest learner; None while these are
        unknown.

        If the round gave up, its wait after the last arrival is no part of the lag: that wait grows with the period.
        """
        r = self.round
        step_s = 0.0 if r is None else self._live.terms(r.expected, ()).fastest_step_s
        if r is None or step_s <= 0.0:
            return None
        ended = r.closed_at
        if r.closed_by is ClosedBy.DEADLINE:
            ended = max((r.opened_at + seen.at for seen in r.seen if seen.what == "in"), default=ended)
        return (ended - r.due_at + self._close_to_commit.value + self._live.usual_sync_s()) / step_s

    def late(self, wall: Callable[[float], float]) -> tuple[Late, ...]:
        """Return the updates that wait but are not in this round, at most `LISTED_MAX`. `wall` turns a time on the
        syncer's clock into a date."""
        waiting = list(self._waiting.values())[:LISTED_MAX]
        return tuple(Late(learner=p.learner, base=p.base, digest=p.digest, heard_at=wall(p.heard_at)) for p in waiting)

    def rejections(self, wall: Callable[[float], float]) -> tuple[Rejection, ...]:
        """Return the rejections that are in no commit yet, at most `LISTED_MAX`, final ones first. The rest is listed
        by later commits."""
        turns: dict[str, int] = {}
        order: list[tuple[bool, int, tuple[str, int, str]]] = []
        for place in self._rejections:
            turns[place[0]] = turns.get(place[0], 0) + 1
            order.append((place[2] not in FINAL, turns[place[0]], place))
        # Final ones come first, learner by learner in turn: a learner repeats an update until its rejection is listed.
        listed = [(place, self._rejections[place]) for _, _, place in sorted(order)[:LISTED_MAX]]
        return tuple(
            Rejection(learner=who, base=base, reason=reason, digest=digest, count=count, at=wall(at))
            for (who, base, reason), (count, at, digest) in listed
        )

    def refusals(self) -> Iterator[Refusal]:
        """Yield the updates on the newest version that are rejected for good, while no commit lists that."""
        for (who, base, reason), (_, _, digest) in self._rejections.items():
            if reason in FINAL and base == self.head:
                yield Refusal(learner=who, fragment=self._fragment, base=base, digest=digest, reason=reason)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _judge(self, pointer: Pointer) -> Reason | None:
        """Return why an update can never be merged, by what becomes of its work; None if it may be."""
        merged = self._merged.get(pointer.learner, {})
        digest, tokens = merged.get(pointer.base, (b"", 0))
        # However old it is: its learner announces it until it has read what became of it.
        if pointer.digest == digest or self._losses.get(pointer.digest, (0, False))[1]:
            return Reason.DUPLICATE
        if pointer.tokens <= tokens:
            return Reason.SUPERSEDED
        if pointer.base < self.head - self._pace.staleness:
            return Reason.STALE
        if pointer.base <= max(merged, default=-1):
            return Reason.BASE_MERGED
        if self.round is not None:
            newest = max((b for who, b in self.round.arrived if who == pointer.learner), default=-1)
            if pointer.base < newest:
                return Reason.OVERTAKEN
        return None

    def _reject(self, pointer: Pointer, reason: Reason, now: float, *, count: bool = True) -> None:
        if not count:
            return
        if reason not in LOSSLESS and (pointer.digest in self._losses or self._judge(pointer) is Reason.DUPLICATE):
            reason = Reason.DUPLICATE
        if reason in PASSING and len(self._put_off) < POINTERS_MAX:
            self._put_off[pointer.learner, pointer.base] = pointer
        self.rejected_total[reason.value] = self.rejected_total.get(reason.value, 0) + 1
        place = (pointer.learner, pointer.base, reason.value)
        if place not in self._rejections:
            # Final rejections of one learner take no place from another's. Rejections beyond the limit are only
            # counted.
            final = reason.value in FINAL
            same = [p for p in self._rejections if (p[2] in FINAL) == final and (not final or p[0] == pointer.learner)]
            if len(same) >= (FINAL_EACH if final else LISTED_MAX):
                return
        before = self._rejections[place][0] if place in self._rejections else 0
        self._rejections[place] = before + 1, now, pointer.digest
        if reason not in LOSSLESS and len(self._losses) < POINTERS_MAX:
            self._losses[pointer.digest] = self.head, False

    def _take_back(self, pointer: Pointer, now: float) -> None:
        """Count no loss for an update that was rejected and is read after all, before a commit has listed that."""
        self._losses.pop(pointer.digest, None)
        for place, (count, _, digest) in list(self._rejections.items()):
            if digest == pointer.digest and place[2] not in LOSSLESS:
                del self._rejections[place]
                self.rejected_total[place[2]] -= count
                for _ in range(count):
                    self._reject(pointer, Reason.DUPLICATE, now)

    def _note_commit(self, commit: CommitHeader) -> None:
        self.period = commit.period or float(self._shortest)
        for given in commit.inputs:
            self._merged.setdefault(given.learner, {})[given.base] = given.digest, given.tokens
        # Updates on older bases are stale anyway, except that a learner may announce its newest again. Forgetting these
        # bases bounds memory by the number of active learners.
        oldest, recent = commit.version - self._pace.staleness, commit.version - STALENESS_MAX
        self._merged = {
            who: {base: merged for base, merged in bases.items() if base >= oldest or base == max(bases)}
            for who, bases in self._merged.items()
            if max(bases) >= recent
        }
        # Count the rounds in a row that waited for a learner that neither came nor passed: it only gives signs of life.
        came = {given.learner for given in commit.inputs} | {p.learner for p in commit.waited.passed}
        self._missed = {who: n for who, n in self._missed.items() if who not in came}
        for who in commit.waited.missing:
            step_s = self._live.believed_step_s(who)
            if who not in came and 0.0 < ABSENT_STEPS * step_s <= commit.waited.waited_s:
                self._missed[who] = self._missed.get(who, 0) + 1
        self._recent = [*self._recent, {given.learner for given in commit.inputs}][-2:]
        for reason, total in commit.clipped_total.items():
            self.clipped_total[reason] = max(total, self.clipped_total.get(reason, 0))
        for reason, total in commit.rejected_total.items():
            self.rejected_total[reason] = max(total, self.rejected_total.get(reason, 0))
        self._losses = {digest: lost for digest, lost in self._losses.items() if lost[0] >= recent}
        for turned in commit.rejected:
            if turned.reason in FINAL:
                self._losses[turned.digest] = commit.version, True
            place = (turned.learner, turned.base, turned.reason)
            # Another update on the base, rejected for the same reason, is still to be listed: its learner repeats it.
            if place in self._rejections and (
                turned.reason not in FINAL or self._rejections[place][2] == turned.digest
            ):
                del self._rejections[place]

    def _known(self) -> set[str]:
        return set().union(*self._recent)

    def _expected(self, now: float) -> set[str]:
        # A learner whose update is being fetched is expected, even if it has left: no later round would take that
        # update.
        here = self._live.expected(self._known(), now)
        absent = {who for who, rounds in self._missed.items() if rounds >= self._absent(who)}
        return (here - absent) | {learner for learner, _ in self._fetching}

    def _absent(self, learner: str) -> int:
        return self._bounds.absent * (ABSENT_KNOWN if self._live.has_come(learner) else 1)

    def _is_due(self, pointer: Pointer) -> bool:
        return pointer.due and pointer.base == self.head

    def _opens_at(self, pointer: Pointer) -> float:
        """Return when a waiting update may open a round, as far as its learner is concerned.

        A learner that is always due would otherwise open and close every round alone, and leave the others no time to
        train.
        """
        if pointer.base > self.head:
            return math.inf
        last = self._opened_by.get(pointer.learner)
        limit = self._bounds.opening * self.period * self._live.usual_step_s(pointer.learner)
        may_at = -math.inf if last is None else last + limit
        return may_at if self._is_due(pointer) else max(may_at, self._idle_at(pointer))

    def _idle_at(self, pointer: Pointer) -> float:
        """Return when a waiting update that is not due opens a round, because none was opened for it.

        Only newer work of a learner that still trains would open one, and there may be no such learner any more.
        """
        usual_s = self.period * self._live.usual_step_s() + self._live.lead_s() + self._live.usual_sync_s()
        return max(pointer.heard_at, self._ended_at) + max(self._pace.silence_s, IDLE_PERIODS * usual_s)

    def _opens_next(self) -> float:
        """Return when the first of the waiting updates may open a round; infinity if none may."""
        if not self._may_open:
            return math.inf
        return min(map(self._opens_at, self._waiting.values()), default=math.inf)

    @property
    def _may_open(self) -> bool:
        return self.holding and self.phase is Phase.CLOSED

    def _note_answer(self, pointer: Pointer, now: float) -> None:
        opened_at = self._opened.get(pointer.base + 1, math.inf)
        if not pointer.old and pointer.boundary_at > opened_at:
            self._live.answered(pointer.learner, now - opened_at)

    def _open(self, due_at: float, boundary_at: float, now: float, by: str) -> None:
        self.phase = Phase.OPEN
        self._opened = {v: at for v, at in self._opened.items() if v >= self.head} | {self.head + 1: now}
        horizon = now - self._longest * self._live.usual_step_s() * self._bounds.slow
        self._opened_by = {who: at for who, at in self._opened_by.items() if at >= horizon} | {by: now}
        expected = self._expected(now)
        slowest = self._live.terms(expected, ()).slowest_step_s or STEP_UNKNOWN_S
        self.round = Round(
            opened_at=now,
            due_at=min(due_at, now),
            boundary_at=min(boundary_at, now),
            called_at=now,
            called_by=by,
            gives_up_at=now + self.period * slowest,
            expected=frozenset(expected),
            outdated={place for place, pointer in self._waiting.items() if self._is_of_before(pointer)},
        )

    def _note_expected(self, r: Round, expected: set[str], now: float) -> bool:
        """Note the learners that came and went; return whether one with outdated updates is gone."""
        if expected == r.expected:
            return False
        for learner in sorted(expected - r.expected):
            r.note("here", learner, now)
        gone = sorted(r.expected - expected)
        for learner in gone:
            r.note("gone", learner, now)
        r.expected = frozenset(expected)
        settled = [self._settle_for_outdated(learner) for learner in gone]
        return any(settled)

    def _terms(self, r: Round, expected: set[str]) -> Terms:
        terms = self._live.terms(expected, expected - r.fresh - r.passed.keys())
        return replace(terms, sync_s=terms.sync_s + self._close_to_commit.value)

    def _grace_ends(self, r: Round) -> float:
        assert r.quorum_at is not None, "grace without quorum"
        # After a start or an outage of the bus, others may exist that have not been heard yet.
        return max(r.quorum_at + r.grace_s, self._live.all_heard_at)

    def _own_until(self, r: Round) -> float:
        """Return until when the round stays open for announced updates that this syncer has not read yet.

        There is no limit while an update waits behind other fetches. Once its fetch has begun, the round waits as long
        as two usual fetches take; a slower update is left to the next round. With `grace` 0 the round ends with its
        quorum.
        """
        if not self._fetching or (self.phase is Phase.GRACE and self._pace.grace == 0.0):
            return r.own_until
        return max(self._begun.get(place, math.inf) for place in self._fetching) + self._admission.patience_s

    def _gives_up(self, r: Round) -> float:
        # If steps are quicker than the store, a period of them passes before the first update is here.
        first_by = 0.0 if r.arrived else r.opened_at + self._pace.silence_s
        return max(r.gives_up_at, self._live.all_heard_at, first_by)

    def _close(self, by: ClosedBy, now: float) -> list[Action]:
        assert self.round is not None, "closing without a round"
        self.phase = Phase.MERGING
        self.round.closed_by, self.round.closed_at = by, now
        self.round.all_heard_at = self._live.all_heard_at
        self.round.own_until = now if self.round.kept_open else -math.inf
        return [Merge(self.head + 1, by)]

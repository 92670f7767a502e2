"""Who is there, and how fast: learners as a syncer hears them, on the syncer's own clock. Pure, no I/O."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from isthmus.averages import smooth
from isthmus.rounds.bounds import within
from isthmus.rounds.grace import Terms
from isthmus.rules import BOUNDS, Bounds, Pace

FORGET_SILENCES = 100
"""Times L after which a silent learner is a stranger again."""

LEFT_MAX = 1024
"""Learners remembered as having left on purpose."""


@dataclass(slots=True)
class Member:
    """One learner. Durations are what it says of itself, in seconds; 0 while unknown."""

    incarnation: int
    heard_at: float
    step_s: float = 0.0
    upload_s: float = 0.0
    sync_s: float = 0.0
    answer_s: float = 0.0
    """From a call to the update that answers it being here and checked, as measured by the syncer."""


class Members:
    """The learners heard of lately. After a start or a gap of the bus nobody's silence means anything for a while."""

    def __init__(self, pace: Pace, now: float, bounds: Bounds = BOUNDS) -> None:
        """`bounds`: how far from the others a learner's own word is believed: a round that misses its quorum waits H
        steps of the slowest, and grace is as long as the fastest has steps."""
        self._pace = pace
        self._bounds = bounds
        self._members: dict[str, Member] = {}
        self._left: dict[str, int] = {}
        self.hold_until = now + pace.heartbeat_s
        """Before this, one heartbeat interval after a start or a gap, no round closes early."""
        self._deaf_before = now

    def heard(
        self,
        learner: str,
        incarnation: int,
        now: float,
        *,
        step_s: float = 0.0,
        upload_s: float = 0.0,
        sync_s: float = 0.0,
    ) -> None:
        """Note a sign of life; durations of 0 are left as they were."""
        if self._left.get(learner, -1) >= incarnation:
            return  # a message from before it left
        self._left.pop(learner, None)
        member = self._members.get(learner)
        if member is None or member.incarnation < incarnation:
            # Another process, maybe another machine: its durations are its own.
            member = self._members[learner] = Member(incarnation, now)
        member.heard_at = max(member.heard_at, now)
        member.step_s = step_s or member.step_s
        member.upload_s = upload_s or member.upload_s
        member.sync_s = sync_s or member.sync_s

    def answered(self, learner: str, seconds: float) -> None:
        """Note how long after a call the update that answers it was here."""
        if member := self._members.get(learner):
            member.answer_s = smooth(member.answer_s, max(seconds, 0.0))

    def left(self, learner: str, incarnation: int) -> None:
        """Note that a learner stopped on purpose."""
        member = self._members.get(learner)
        if member is None or member.incarnation <= incarnation:
            self._members.pop(learner, None)
            self._left[learner] = max(incarnation, self._left.get(learner, -1))

    def gap(self, now: float) -> None:
        """Note that the bus was away until now: silence until here says nothing."""
        self._deaf_before = now
        self.hold_until = now + self._pace.heartbeat_s

    def expected(self, recent: Iterable[str], now: float) -> set[str]:
        """Return whom a round waits for: those heard within L, and those in `recent` commits not yet known silent."""
        silent_before = now - self._pace.silence_s
        here = {name for name, m in list(self._members.items()) if m.heard_at >= silent_before}
        for name in recent:
            if name in here or name in self._left:
                continue
            member = self._members.get(name)
            since = self._deaf_before if member is None else max(member.heard_at, self._deaf_before)
            if since >= silent_before:
                here.add(name)
        return here

    def terms(self, expected: Iterable[str], missing: Iterable[str]) -> Terms:
        """Return what is known of these learners' speeds."""
        found = [self._members[name] for name in expected if name in self._members]
        late = [self._members[name] for name in missing if name in self._members]
        fast, slow = self._bounds.fast, self._bounds.slow
        fastest, slowest = within((m.step_s for m in found), fast, slow)
        _, upload_s = within((m.upload_s for m in found), fast, slow)
        return Terms(
            fastest_step_s=fastest,
            slowest_step_s=slowest,
            sync_s=within((m.sync_s for m in found), fast, slow)[1],
            cap_s=slowest + max((m.answer_s or min(m.upload_s, upload_s) for m in late), default=0.0),
        )

    def believed_step_s(self, learner: str) -> float:
        """Return how long a learner's step takes as far as that is believed, in seconds; 0 while unknown."""
        member = self._members.get(learner)
        return 0.0 if member is None else min(member.step_s, self._bounds.slow * self.usual_step_s())

    def usual_step_s(self, learner: str = "") -> float:
        """Return the median step of those here, or that of a learner where it is longer [s]; 0 while unknown."""
        steps = [m.step_s for m in list(self._members.values()) if m.step_s > 0.0]
        if not steps:
            return 0.0
        median = statistics.median_low(steps)
        member = self._members.get(learner)
        if member is None:
            return median
        return min(max(member.step_s, median), median * self._bounds.slow)

    def forget(self, now: float) -> set[str]:
        """Drop whom nobody will wait for again, so that memory is bounded by who is here; return their names."""
        before = now - FORGET_SILENCES * self._pace.silence_s
        gone = {name for name, m in self._members.items() if m.heard_at < before}
        for name in gone:
            del self._members[name]
        while len(self._left) > LEFT_MAX:
            name = next(iter(self._left))
            del self._left[name]
            gone.add(name)
        return gone

"""The live learners and their speeds, as a syncer hears them, on the syncer's own clock. Pure, no I/O."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from isthmus.format.rules import BOUNDS, Bounds, Pace
from isthmus.rounds.grace import Terms
from isthmus.runtime.averages import smooth

FORGET_SILENCES = 100
"""A silent learner is forgotten after this many times L (`Pace.silence_s`)."""

AFRESH_LEADS = 2.0
"""If an update has waited longer than this many leads, a newer one is asked for: its learner has trained since."""

PATIENCE = 0.2
"""Share of an outage of the bus for which rounds wait afterwards for the learners of the last commits."""

PATIENCE_SILENCES = 10
"""They wait at most this many times L."""

LEFT_MAX = 1024
"""The most learners that are remembered as having left on purpose."""


@dataclass(slots=True)
class LiveLearner:
    """One learner that was heard of lately. Durations are in seconds, as the learner states them unless noted; 0 while
    unknown."""

    incarnation: int
    heard_at: float
    step_s: float = 0.0
    upload_s: float = 0.0
    sync_s: float = 0.0
    answer_s: float = 0.0
    """From a call until the update that answers it is here and checked, as measured by the syncer."""
    step_most_s: float = 0.0
    """The longest that a step of the learner's newest update can have taken, of those that were read and checked; 0
    before the first."""


class LiveLearners:
    """The learners heard of lately. For a while after a start or an outage of the bus, silence proves nothing."""

    def __init__(self, pace: Pace, now: float, bounds: Bounds = BOUNDS) -> None:
        """`bounds`: how far from the others' a learner's stated durations are believed. They matter: a round that
        misses its quorum waits for a period of the slowest learner, and grace depends on the step of the fastest."""
        self._pace = pace
        self._bounds = bounds
        self._learners: dict[str, LiveLearner] = {}
        self._left: dict[str, int] = {}
        self._changes = 0
        """How often a learner has come, has come back after a silence, or has left."""
        self._here: tuple[int, frozenset[str], float] = -1, frozenset(), math.inf
        """Which learners were last found to be here, after how many changes, and when the one that had then been silent
        for longest was heard."""
        self._medians: dict[str, float] = {}
        """The usual durations by field, as far as they were asked for since a learner last stated another one."""
        self.all_heard_at = now + pace.heartbeat_s
        """When every learner has had the time to be heard: one heartbeat interval after a start or an outage of the
        bus. No round closes early before this time."""
        self._deaf_before = now
        self.back_at = -math.inf
        """When the bus came back after an outage so long that learners are asked for newer updates than those that they
        sent before."""

        self.committed_at = now
        """When a commit of any fragment was last seen."""

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
        """Note a sign of life of a learner, and its durations in seconds. A duration of 0 leaves the known one as it
        is."""
        if self._left.get(learner, -1) >= incarnation:
            return  # a message from before it left
        self._left.pop(learner, None)
        known = self._learners.get(learner)
        if known is None or known.incarnation < incarnation:
            # A new incarnation may run on another machine, so the durations of the earlier one do not apply.
            known = self._learners[learner] = LiveLearner(incarnation, now)
            self._changed()
        known.heard_at = max(known.heard_at, now)
        if learner not in self._here[1]:
            self._changes += 1
        said = (step_s or known.step_s, upload_s or known.upload_s, sync_s or known.sync_s)
        if said != (known.step_s, known.upload_s, known.sync_s):
            known.step_s, known.upload_s, known.sync_s = said
            self._medians.clear()

    def answered(self, learner: str, seconds: float) -> None:
        """Note how many seconds after a call the update that answers it was here."""
        if known := self._learners.get(learner):
            known.answer_s = smooth(known.answer_s, max(seconds, 0.0))

    def came(self, learner: str, step_most_s: float) -> None:
        """Note that an update was read and checked, and the longest that each of its steps can have taken [s]."""
        if known := self._learners.get(learner):
            known.step_most_s = max(step_most_s, math.ulp(0.0))

    def has_come(self, learner: str) -> bool:
        """Return whether an update of this incarnation of a learner, of any fragment, was read and checked."""
        known = self._learners.get(learner)
        return known is not None and known.step_most_s > 0.0

    def left(self, learner: str, incarnation: int) -> None:
        """Note that a learner stopped on purpose."""
        known = self._learners.get(learner)
        if known is None or known.incarnation <= incarnation:
            self._learners.pop(learner, None)
            self._changed()
            self._left[learner] = max(incarnation, self._left.get(learner, -1))

    def gap(self, now: float, away_s: float) -> None:
        """Note that the bus was away for so long until now [s]: earlier silence of a learner proves nothing."""
        self._deaf_before = now
        self.all_heard_at = now + self._pace.heartbeat_s
        if away_s > AFRESH_LEADS * self.lead_s():
            # Agents find the bus again at different times. Each has the work of the whole outage, and if rounds do not
            # wait for it, it is soon too old.
            silence_s = self._pace.silence_s
            wait_s = min(max(silence_s, PATIENCE * away_s), PATIENCE_SILENCES * silence_s)
            self.back_at, self.all_heard_at = now, now + wait_s
            self._deaf_before = self.all_heard_at - silence_s

    def expected(self, recent: Iterable[str], now: float) -> set[str]:
        """Return the learners that a round waits for: those heard within L, and those in `recent` commits that are not
        yet known to be silent or to have left."""
        silent_before = now - self._pace.silence_s
        here = self._heard_since(silent_before)
        for name in set(recent) - here:
            if name in self._left:
                continue
            known = self._learners.get(name)
            since = self._deaf_before if known is None else max(known.heard_at, self._deaf_before)
            if since >= silent_before:
                here.add(name)
        return here

    def _heard_since(self, before: float) -> set[str]:
        """Return the learners heard since a time that is no earlier than that of the call before."""
        changes, here, oldest = self._here
        if changes != self._changes or oldest < before:
            changes = self._changes
            found = {name: m.heard_at for name, m in list(self._learners.items()) if m.heard_at >= before}
            here, oldest = frozenset(found), min(found.values(), default=math.inf)
            self._here = changes, here, oldest  # in one step: metrics are read by another thread
        return set(here)

    def terms(self, expected: Iterable[str], missing: Iterable[str]) -> Terms:
        """Return the terms of grace for a round that expects these learners and still misses some of them."""
        found = [self._learners[name] for name in expected if name in self._learners]
        late = [self._learners[name] for name in missing if name in self._learners]
        steps, uploads, syncs = ([getattr(m, said) for m in found] for said in ("step_s", "upload_s", "sync_s"))
        step_s, upload_s, sync_s = (_usual(said) for said in (steps, uploads, syncs))
        slowest = max((self._step_s(m, step_s) for m in found), default=0.0)
        answers = (m.answer_s or self._believed(m, m.upload_s, upload_s) for m in late)
        return Terms(
            fastest_step_s=max(min((said for said in steps if said > 0.0), default=0.0), step_s / self._bounds.fast),
            slowest_step_s=slowest,
            sync_s=max((self._believed(m, m.sync_s, sync_s) for m in found), default=0.0),
            cap_s=slowest + max(answers, default=0.0),
        )

    def lead_s(self, learner: str = "") -> float:
        """Return how long an update usually takes from the call to being stored: a step and an upload [s]; 0 while
        unknown. Of `learner`, if that is longer, as the learner states it."""
        known = self._learners.get(learner)
        own_s = 0.0 if known is None else known.step_s + known.upload_s
        return max(own_s, self.usual_step_s() + self._median("upload_s"))

    def usual_sync_s(self) -> float:
        """Return how long it usually takes from a commit until its value is ready at a learner [s]; 0 while unknown."""
        return self._median("sync_s")

    def believed_step_s(self, learner: str) -> float:
        """Return the believed duration of a learner's step, in seconds; 0 while unknown."""
        known = self._learners.get(learner)
        return 0.0 if known is None else self._step_s(known, self.usual_step_s())

    def _step_s(self, known: LiveLearner, usual_s: float) -> float:
        most = self._bounds.fast * known.step_most_s if known.step_most_s else math.inf
        return min(self._believed(known, known.step_s, usual_s), most)

    def _believed(self, known: LiveLearner, said_s: float, usual_s: float) -> float:
        """Return the stated duration, limited to a multiple of the usual one; the limit is lower before an update has
        come."""
        return min(said_s, usual_s * (self._bounds.slow if known.step_most_s else self._bounds.fast))

    def usual_step_s(self, learner: str = "") -> float:
        """Return the median step of all known learners, or the step of `learner` if it is longer, as far as that is
        believed [s]; 0 while unknown."""
        median = self._median("step_s")
        known = self._learners.get(learner)
        if known is None:
            return median
        return min(max(known.step_s, median), median * self._bounds.slow)

    def _changed(self) -> None:
        self._changes += 1
        self._medians.clear()

    def _median(self, field: str) -> float:
        """Return the usual value of a duration of all known learners [s]; 0 while unknown."""
        if field not in self._medians:
            self._medians[field] = _usual([getattr(m, field) for m in self._learners.values()])
        return self._medians[field]

    def forget(self, now: float) -> set[str]:
        """Drop learners that no round will wait for again, to bound the memory used, and return their names."""
        before = now - FORGET_SILENCES * self._pace.silence_s
        gone = {name for name, m in self._learners.items() if m.heard_at < before}
        for name in gone:
            del self._learners[name]
            self._changed()
        while len(self._left) > LEFT_MAX:
            name = next(iter(self._left))
            del self._left[name]
            gone.add(name)
        return gone


def _usual(said: list[float]) -> float:
    """Return the median of the known durations [s], the lower of the middle two if their number is even; 0 if none is
    known."""
    known = [seconds for seconds in said if seconds > 0.0]
    return statistics.median_low(known) if known else 0.0

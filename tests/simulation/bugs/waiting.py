"""Planted bugs: rounds that wait too long or not long enough, and what collects meanwhile."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from isthmus.learner.boundary import Boundary
from isthmus.rounds import rounds
from isthmus.rounds.grace import Grace
from isthmus.rounds.live_learners import LiveLearners
from isthmus.rounds.rounds import Phase, Rounds
from isthmus.runtime.averages import smooth
from isthmus.syncer.coordinator import FragmentCoordinator
from simulation.bugs.planted import planted


@planted(20, "choir")
def wait_on_when_grace_is_over() -> Iterator[None]:
    """The round stays open for 0.8 s after grace has ended."""

    def tick(self: Any, now: Any) -> Any:
        if self.phase is Phase.GRACE and now < original_ends(self, self.round) + 0.8:
            return []
        return original(self, now)

    original, original_ends = Rounds._tick, Rounds._grace_ends
    with patch.object(Rounds, "_tick", tick):
        yield


@planted(20, "choir")
def close_when_half_of_grace_is_over() -> Iterator[None]:
    """The round waits for half of the grace that was granted and recorded."""

    def ends(self: Any, r: Any) -> Any:
        return r.quorum_at + 0.5 * r.grace_s

    with patch.object(Rounds, "_grace_ends", ends):
        yield


@planted(20, caught_by=6)
def leave_late_updates_to_newer_work() -> Iterator[None]:
    """An update that is not due, or came too late for its round, waits until another one opens the next round."""
    with patch.object(Rounds, "_idle_at", lambda self, pointer: math.inf):
        yield


@contextlib.contextmanager
def durations_as_said() -> Iterator[None]:
    """Believe every duration that a learner states."""
    with (
        patch.object(LiveLearners, "_believed", lambda self, member, said_s, usual_s: said_s),
        patch.object(LiveLearners, "_step_s", lambda self, member, usual_s: member.step_s),
    ):
        yield


@planted(40, "hostile", caught_by=6)
def wait_as_long_as_anybody_says() -> Iterator[None]:
    """Grace is as long as the slowest learner says it needs, without a bound."""

    def grace(pace: Any, sync_every: Any, terms: Any, quorum_s: Any) -> Any:
        return Grace(terms.cap_s, pace.overlap)

    with patch.object(rounds, "adaptive_grace", grace), durations_as_said():
        yield


@planted(60, "hostile", caught_by=6)
def steps_take_as_long_as_anybody_says() -> Iterator[None]:
    """A round that misses its quorum waits for H steps of 30 years, because a learner that never answers says so."""
    with durations_as_said():
        yield


@planted(20)
def a_pause_collects_versions() -> Iterator[None]:
    """While the training thread takes no step, every new version waits for it whole in memory."""

    def post(self: Any, message: Any) -> None:
        self.__dict__.setdefault("hoard", []).append(message)
        original(self, message)

    original = Boundary.post
    with patch.object(Boundary, "post", post):
        yield


@planted(20, "siege")
def a_pause_is_a_step() -> Iterator[None]:
    """All time between two steps counts as a step's duration, even an evaluation of minutes or a stopped process."""

    def after_step(self: Any, tokens: Any, loss: Any = None) -> None:
        now, before = self._now(), self.__dict__.setdefault("before", self._now())
        self.averaged = smooth(self.__dict__.get("averaged", 0.0), now - before)
        self.before = now
        original(self, tokens, loss)
        self.step_s = self.averaged

    original = Boundary.after_step
    with patch.object(Boundary, "after_step", after_step):
        yield


@planted(20, "plain")
def a_place_is_kept_for_a_round_that_is_over() -> Iterator[None]:
    """A fetch that gets a place for an accumulator after its round keeps the place. In the end no round gets one."""

    async def slot(self: Any) -> None:
        async with self._slot_lock:
            if self._has_slot:
                return
            await self._limits.accumulators.acquire()
            if self.rounds.round is not None:
                self._has_slot = True
                if not self._sum.inputs:
                    self._under = self._members.current.version

    with patch.object(FragmentCoordinator, "_slot", slot):
        yield

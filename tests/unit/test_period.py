"""A fragment's period follows the duration of its rounds, keeps to its bounds and never oscillates."""

import math
from dataclasses import replace
from typing import Any

import pytest

from isthmus.errors import InputError
from isthmus.format.rules import STEPS_MOST, Bounds, Pace, Rules
from isthmus.rounds.admission import Admission
from isthmus.rounds.events import Action, Announced, Appended, CallRound, ClosedBy, Fetch, Merge, Passed, Tick, Turn
from isthmus.rounds.period import LAGS, next_period
from isthmus.runtime.averages import Usual
from support.round_story import STEP_S, Story, merged


def after(period: float, lag: float, least: float = 12.0, most: float = 1000.0) -> float:
    return next_period(period, lag, least, most)


def test_where_rounds_are_quick_the_period_is_what_the_rules_say() -> None:
    assert after(12.0, 0.0) == 12.0
    assert after(12.0, 4.0) == 12.0
    assert after(12.0, 4.4) > 12.0


def test_the_period_has_its_bounds_and_at_most_doubles() -> None:
    assert after(12.0, 1e6) == 24.0, "one round that hung says little about the next"
    assert after(24.0, 1e6) == 48.0
    assert after(60.0, 1e6, most=96.0) == 96.0
    assert after(14.0, 0.0) == 12.0


@pytest.mark.parametrize("every", [36.0, 48.0, 60.0])
def test_where_a_syncer_serves_one_round_in_so_many_steps_the_period_is_right_at_once(every: float) -> None:
    """With a longer period, learners wait less for the syncer: the lag is the time between rounds less the period."""
    period = after(24.0, every - 24.0)
    assert period == pytest.approx(min(48.0, every * LAGS / (1.0 + LAGS)))
    for _ in range(3):
        period = after(period, every - period)
    assert period == pytest.approx(every * LAGS / (1.0 + LAGS))


@pytest.mark.parametrize("far", [0.0, 3.0, 8.0, 20.0])
@pytest.mark.parametrize("every", [0.0, 20.0, 36.0, 90.0])
@pytest.mark.parametrize("start", [12.0, 30.0, 300.0])
def test_the_period_comes_to_rest_and_never_swings(far: float, every: float, start: float) -> None:
    """`far`: steps that a round takes at any period; `every`: fewest steps from one round to the next at the syncer."""
    period, seen = start, []
    for _ in range(60):
        period = after(period, max(far, every - period))
        seen.append(period)
    rest = seen[-1]
    assert rest == pytest.approx(after(rest, max(far, every - rest)), rel=1e-3)
    assert rest == pytest.approx(max(12.0, LAGS * far, every * LAGS / (1.0 + LAGS)), rel=1e-3)
    sides = {math.copysign(1.0, p - rest) for p in [start, *seen] if abs(p - rest) > 1e-6 * rest}
    assert len(sides) <= 1, f"it is never on both sides of where it rests: {seen}"


def test_the_rules_say_how_long_a_period_may_be() -> None:
    assert Rules().periods == (12, 96)
    assert Rules(sync_every=STEPS_MOST).check().periods == (STEPS_MOST, STEPS_MOST), "a commit cannot record more"
    assert Rules(sync_every=24, fragments=24, sync_every_max=24).check().periods == (24, 24)
    with pytest.raises(InputError, match="sync_every_max 8 is less than sync_every 12"):
        Rules(sync_every_max=8).check()


# --- what a syncer measures -------------------------------------------------------------------------------------------


def closed(story: Story, *, waits_s: float) -> None:
    """Open a round with an update of a, and close it `waits_s` later with an update of b."""
    story.now += 10.0
    for who in ("a", "b"):
        story.beat(who)
    actions = story.announce("a", base=story.rounds.head, due=True)
    story.arrive(actions)
    story.now += waits_s
    assert any(isinstance(a, Merge) for a in story.arrive(story.announce("b", base=story.rounds.head))), (
        "both learners are in"
    )


def test_the_lag_is_from_due_to_adoptable_in_the_fastest_members_steps() -> None:
    story = Story("a", "b")
    story.beat("b", step_s=4 * STEP_S)
    closed(story, waits_s=1.0)
    # The update was due 0.02 s before its announcement. The version is ready 0.01 s after its commit, which takes no
    # time here.
    lag = (0.02 + 1.0 + 0.01) / STEP_S
    assert story.rounds.next_period() == pytest.approx(next_period(12.0, lag, 12, 96))
    assert story.rounds.next_period() > 12.0


def test_what_storing_a_commit_takes_is_part_of_the_lag() -> None:
    story = Story("a", "b")
    closed(story, waits_s=0.5)
    quick = story.rounds.next_period()
    story.now += 2.0
    story.rounds.on(Appended(merged(1, "a", "b", period=50.0)), story.now)
    closed(story, waits_s=0.5)
    assert story.rounds.next_period() == pytest.approx(next_period(50.0, (0.02 + 0.5 + 2.0 + 0.01) / STEP_S, 12, 96))
    assert story.rounds.next_period() > quick


def test_one_round_that_hung_does_not_move_the_period_and_two_do() -> None:
    story = Story("a", "b")
    closed(story, waits_s=0.5)
    quick = story.rounds.next_period()
    story.rounds.on(Appended(merged(1, "a", "b", period=quick)), story.now)
    for hung in (1, 2):
        closed(story, waits_s=2.0 * quick * STEP_S)
        period = story.rounds.next_period()
        assert (period > quick) == (hung == 2)
        story.rounds.on(Appended(merged(1 + hung, "a", "b", period=period)), story.now)
    # A single duration that hung does not become the usual one either.
    usual = Usual()
    for took, value in ((3.0, 3.0), (0.1, 0.1), (0.2, 0.2), (3.0, 0.2), (0.1, 0.2), (0.1, 0.1)):
        usual.note(took)
        assert usual.value == value


def test_what_a_round_waited_in_vain_does_not_lengthen_the_period() -> None:
    """The round gives up after a period. With that wait in the lag, one absent learner would maximise the period."""
    story = Story("a", "b", pace=Pace(quorum=2, silence_s=1000.0, heartbeat_s=1.0))
    for _ in range(3):
        story.now += 1.0
        story.arrive(story.announce("a", base=story.rounds.head, due=True))
        actions: list[Action] = []
        while not any(isinstance(a, Merge) for a in actions):
            at = story.rounds.deadline(story.now)
            assert at is not None
            story.now = max(at, story.now + 0.001)
            actions = story.rounds.on(Tick(), story.now)
        assert Merge(story.rounds.head + 1, ClosedBy.DEADLINE) in actions
        assert story.rounds.next_period() == 12.0
        story.commit("a", period=story.rounds.next_period())


def test_where_learners_wait_for_versions_the_period_stays() -> None:
    story = Story("a", "b", pace=Pace(lead=0.0, heartbeat_s=1.0, silence_s=100.0))
    closed(story, waits_s=3.0)
    assert story.rounds.next_period() == 12.0


def test_the_period_in_force_is_that_of_the_newest_commit() -> None:
    story = Story("a", "b", bounds=Bounds(opening=0.8))
    assert story.rounds.period == 12.0
    story.commit("a", "b", period=40.0)
    assert story.rounds.period == 40.0
    # A round gives up one period of the slowest learner after it was opened.
    story.arrive(story.announce("a", base=1, due=True))
    assert getattr(story.rounds.round, "gives_up_at", 0.0) == pytest.approx(story.now + 40.0 * STEP_S)
    story.commit("a", "b", period=40.0)
    # The learner that opened a round may open the next one only after most of a period.
    assert story.announce("a", base=2, due=True) == []
    assert story.rounds.deadline(story.now) == pytest.approx(story.now + 0.8 * 40.0 * STEP_S)


def test_a_log_without_periods_has_that_of_the_rules() -> None:
    story = Story("a", "b")
    story.commit("a", "b", period=40.0)
    story.commit("a", "b")
    assert story.rounds.period == 12.0


# --- learners whose updates waited for admission are asked for newer ones ---------------------------------------------


class Queued:
    """A round for which updates of a and b waited `waits_s` for admission; by default, newer ones are asked for."""

    def __init__(self, *learners: str, waits_s: float = 1.0, **options: Any) -> None:
        self.admission = Admission(1, 1)
        self.admission.fetch_begins(0.0)
        self.admission.fetch_ends(5.0, 5.0)
        self.admission.owes(9, 5)
        self.story = Story("a", "b", admission=self.admission, **options)
        for learner in learners or ("a", "b"):
            assert self.story.announce(learner, due=True) == []
        self.story.now += waits_s
        self.admission.owes(9, None)
        self.actions = self.story.rounds.on(Turn(), self.story.now)

    def fetches(self, actions: list[Action]) -> set[tuple[str, int]]:
        """Return the learners whose updates are fetched, each with the tokens of its update."""
        return {(a.pointer.learner, a.pointer.tokens) for a in actions if isinstance(a, Fetch)}


def test_what_waited_long_is_asked_for_afresh_and_not_read() -> None:
    q = Queued()
    assert q.actions == [CallRound(1, afresh=True)]
    assert q.fetches(q.story.announce("a", tokens=2000)) == {("a", 2000)}
    assert q.fetches(q.story.announce("b", tokens=2000)) == {("b", 2000)}
    assert q.story.rounds.round is not None
    assert q.story.rounds.round.boundary_at == q.story.now, "the wait for admission does not use up grace"


def test_the_lag_begins_when_the_update_was_due() -> None:
    q = Queued()
    q.story.arrive([*q.story.announce("a", tokens=2000), *q.story.announce("b", tokens=2000)])
    lag = (0.02 + 1.0 + 0.01) / STEP_S
    assert q.story.rounds.next_period() == pytest.approx(next_period(12.0, lag, 12, 96))


def test_what_waited_for_a_moment_is_read_as_it_is() -> None:
    # A lead is a step of 0.1 s and an upload of 0.02 s. An update may wait for two leads.
    q = Queued(waits_s=2 * 0.12 - 0.03)
    assert CallRound(1) in q.actions
    assert q.fetches(q.actions) == {("a", 1000), ("b", 1000)}


def test_whoever_has_nothing_newer_is_read_as_it_is() -> None:
    q = Queued()
    assert q.fetches(q.story.rounds.on(Passed("a", 1), q.story.now)) == {("a", 1000)}
    assert q.story.rounds.round is not None
    assert q.story.rounds.round.missing == {"a", "b"}, "a is in the round only once its update is read"


def test_whoever_repeats_what_waited_has_not_answered() -> None:
    q = Queued()
    assert q.fetches(q.story.announce("a", due=True)) == set()


def test_whoever_is_gone_is_read_as_it_was() -> None:
    q = Queued(pace=Pace(heartbeat_s=1.0, silence_s=3.0), waits_s=1.0)
    q.story.members.left("a", 1)
    assert q.fetches(q.story.rounds.on(Tick(), q.story.now)) == {("a", 1000)}


def test_whoever_has_not_answered_when_the_round_ends_is_read_as_it_was() -> None:
    q = Queued()
    q.story.arrive(q.story.announce("a", tokens=2000))
    read: set[tuple[str, int]] = set()
    while not read:
        at = q.story.rounds.deadline(q.story.now)
        assert at is not None
        q.story.now = at
        actions = q.story.rounds.on(Tick(), at)
        assert not any(isinstance(a, Merge) for a in actions), "the round does not close without the update of b"
        read = q.fetches(actions)
    assert read == {("b", 1000)}
    assert any(isinstance(a, Merge) for a in q.story.arrive(actions))


def test_a_call_is_repeated_as_it_was() -> None:
    q = Queued(pace=Pace(heartbeat_s=1.0, silence_s=100.0))
    q.story.now += 1.1
    assert q.story.rounds.on(Tick(), q.story.now) == [CallRound(1, afresh=True)]
    q.story.announce("a", tokens=2000)
    q.story.rounds.on(Passed("b", 1), q.story.now)
    q.story.now += 1.1
    assert q.story.rounds.on(Tick(), q.story.now) == [CallRound(1)], "all learners have answered"


def test_a_round_that_all_have_answered_afresh_was_not_kept_open() -> None:
    q = Queued()
    q.story.arrive([*q.story.announce("a", tokens=2000), *q.story.announce("b", tokens=2000)])
    assert q.story.rounds.round is not None
    assert (q.story.rounds.round.closed_by, q.story.rounds.round.kept_open) == (ClosedBy.EVERYONE, False)


def test_an_old_update_that_need_not_wait_for_room_is_read_as_it_is() -> None:
    story = Story("a", "b")
    story.now += 60.0
    story.members.committed_at = story.now  # of another fragment: there was no outage
    story.beat("a")
    old = replace(story.pointer("a", due=True), boundary_at=story.now - 50.0)
    assert story.rounds.on(Announced(old), story.now) == [CallRound(1), Fetch(old)]

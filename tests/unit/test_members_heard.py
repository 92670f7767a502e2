"""The messages heard from each learner decide whether a round waits for it, and for how long."""

import pytest

from isthmus.format.rules import Pace
from isthmus.rounds.live_learners import FORGET_SILENCES, LEFT_MAX, LiveLearners
from isthmus.runtime.averages import smooth

PACE = Pace(heartbeat_s=1.0, silence_s=3.0)


def members(*heard: str, at: float = 100.0) -> LiveLearners:
    """Return the learners known to a syncer that has listened for long; these were last heard at time `at`."""
    found = LiveLearners(PACE, 0.0)
    for name in heard:
        found.heard(name, 1, at)
    return found


# --- silence ----------------------------------------------------------------------------------------------------------


def test_who_was_heard_within_l_is_waited_for_to_the_last_moment() -> None:
    found = members("a", at=100.0)
    assert found.expected((), 103.0) == {"a"}
    assert found.expected((), 103.01) == set()


def test_who_was_in_the_last_commits_and_fell_silent_since_is_not_waited_for() -> None:
    found = members("a", "b")
    found.heard("a", 1, 104.0)
    assert found.expected({"a", "b"}, 104.0) == {"a"}
    assert found.expected({"a", "b", "never-heard"}, 104.0) == {"a"}


def test_after_a_start_whoever_the_log_knows_is_waited_for_until_it_could_have_been_heard() -> None:
    found = LiveLearners(PACE, 100.0)
    assert found.expected({"a"}, 102.9) == {"a"}
    assert found.expected({"a"}, 103.1) == set()


def test_after_a_gap_of_the_bus_nobodys_silence_says_anything() -> None:
    found = members("a", "b")
    found.gap(105.0, 0.0)
    assert found.all_heard_at == 106.0
    assert found.expected({"a", "b"}, 105.0) == {"a", "b"}
    assert found.expected({"a", "b"}, 108.0) == {"a", "b"}
    assert found.expected({"a", "b"}, 108.1) == set()


# --- leaving and coming back ------------------------------------------------------------------------------------------


def test_who_left_is_not_waited_for_even_if_the_log_knows_it() -> None:
    found = LiveLearners(PACE, 100.0)
    found.heard("a", 1, 100.5)
    found.heard("b", 1, 100.5)
    found.left("b", 1)
    assert found.expected({"a", "b", "c"}, 101.0) == {"a", "c"}, "c could not have been heard yet"


def test_a_word_from_before_it_left_brings_nobody_back_and_a_later_life_does() -> None:
    found = members("a", "b")
    found.left("b", 1)
    found.heard("b", 1, 100.5)
    assert found.expected({"b"}, 100.5) == {"a"}
    found.heard("b", 2, 100.6)
    assert found.expected((), 100.6) == {"a", "b"}


def test_a_farewell_of_an_earlier_life_is_no_farewell() -> None:
    found = members("a")
    found.heard("a", 2, 100.5)
    found.left("a", 1)
    assert found.expected((), 100.5) == {"a"}


# --- durations --------------------------------------------------------------------------------------------------------


def test_a_new_life_has_durations_of_its_own() -> None:
    found = members("a")
    found.heard("a", 1, 100.0, step_s=5.0, upload_s=3.0, sync_s=1.0)
    found.answered("a", 9.0)
    assert found.terms({"a"}, {"a"}).cap_s == 14.0
    found.heard("a", 2, 101.0, step_s=0.1, upload_s=0.2)
    known = found.terms({"a"}, {"a"})
    assert (known.slowest_step_s, known.sync_s) == (0.1, 0.0)
    assert known.cap_s == pytest.approx(0.1 + 0.2), "its stated durations count until it has answered"


def test_durations_that_are_not_said_are_as_they_were() -> None:
    found = members("a")
    found.heard("a", 1, 100.0, step_s=5.0, upload_s=3.0, sync_s=1.0)
    found.heard("a", 1, 100.5)
    known = found.terms({"a"}, {"a"})
    assert (known.fastest_step_s, known.sync_s, known.cap_s) == (5.0, 1.0, 8.0)


def test_what_was_measured_of_an_answer_counts_more_than_what_is_said_of_it() -> None:
    found = members("a")
    found.heard("a", 1, 100.0, step_s=1.0, upload_s=9.0)
    found.answered("a", 2.0)
    assert found.terms({"a"}, {"a"}).cap_s == 3.0


def test_the_cap_is_the_slowest_step_of_all_and_the_slowest_answer_of_those_that_are_missing() -> None:
    found = members("fast", "slow", "far")
    for name, step_s, upload_s in (("fast", 1.0, 0.5), ("slow", 4.0, 1.0), ("far", 2.0, 7.0)):
        found.heard(name, 1, 100.0, step_s=step_s, upload_s=upload_s, sync_s=upload_s / 2)
        found.came(name, step_s)
    everybody = {"fast", "slow", "far"}
    known = found.terms(everybody, {"fast"})
    assert (known.fastest_step_s, known.slowest_step_s, known.sync_s, known.cap_s) == (1.0, 4.0, 3.5, 4.5)
    assert found.terms(everybody, {"far"}).cap_s == 11.0


def test_of_an_average_the_first_sample_is_all_and_each_further_one_a_fifth() -> None:
    assert smooth(0.0, 10.0) == 10.0
    assert smooth(10.0, 20.0) == 12.0


# --- memory -----------------------------------------------------------------------------------------------------------


def test_the_silent_are_forgotten_after_long_and_those_that_left_are_bounded() -> None:
    found = members("a")
    found.heard("b", 1, 100.0 + FORGET_SILENCES * PACE.silence_s)
    assert found.forget(100.0 + FORGET_SILENCES * PACE.silence_s) == set()
    assert found.forget(100.1 + FORGET_SILENCES * PACE.silence_s) == {"a"}
    for i in range(LEFT_MAX + 2):
        found.left(f"l{i}", 1)
    assert found.forget(400.0) == {"l0", "l1"}
    found.heard("l0", 1, 400.0)
    found.heard("l2", 1, 400.0)
    assert found.expected((), 400.0) >= {"l0"}
    assert "l2" not in found.expected((), 400.0)


@pytest.mark.parametrize(("steps", "slowest"), [((1.0, 12.0), 12.0), ((1.0, 1e9), 16.0), ((1.0, 2.0, 1e9), 32.0)])
def test_a_learner_that_says_its_steps_take_for_ever_is_believed_up_to_a_bound(
    steps: tuple[float, ...], slowest: float
) -> None:
    found = members(*"abc"[: len(steps)])
    for name, step_s in zip("abc", steps, strict=False):
        found.heard(name, 1, 100.0, step_s=step_s)
        found.came(name, step_s)
    known = found.terms("abc", ())
    assert known.slowest_step_s == slowest
    assert known.fastest_step_s == 1.0


def test_a_lead_is_the_usual_one_or_that_of_the_learner_if_it_is_longer() -> None:
    found = members("a", "b", "c")
    for name, step_s, upload_s in (("a", 1.0, 3.0), ("b", 2.0, 5.0), ("c", 3.0, 20.0)):
        found.heard(name, 1, 100.0, step_s=step_s, upload_s=upload_s)
    assert found.lead_s() == 7.0
    assert [found.lead_s(name) for name in ("a", "b", "c", "never-heard")] == [7.0, 7.0, 23.0, 7.0]

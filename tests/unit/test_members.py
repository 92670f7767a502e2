"""A round waits for a learner until the learner has been silent for too long or has left."""

from isthmus.format.rules import Pace
from isthmus.rounds.live_learners import LiveLearners

PACE = Pace(heartbeat_s=1.0, silence_s=4.0)


def test_whoever_is_killed_is_waited_for_no_longer_than_its_silence() -> None:
    members = LiveLearners(PACE, 0.0)
    for second in range(10):
        for learner in ("steady", "spot"):
            members.heard(learner, 1, float(second))
    members.heard("steady", 1, 13.0)
    assert members.expected((), 13.0) == {"steady", "spot"}
    assert members.expected((), 13.0 + 1e-6) == {"steady"}


def test_nor_is_it_for_being_in_commits_of_late() -> None:
    members = LiveLearners(PACE, 0.0)
    members.heard("spot", 1, 9.0)
    assert members.expected(("spot",), 13.0) == {"spot"}
    assert members.expected(("spot",), 13.0 + 1e-6) == set()


def test_after_a_gap_of_the_bus_silence_says_nothing_for_those_of_late() -> None:
    members = LiveLearners(PACE, 0.0)
    members.heard("spot", 1, 9.0)
    members.gap(12.0, 0.0)
    assert members.expected(("spot",), 16.0) == {"spot"}
    assert members.expected(("spot",), 16.0 + 1e-6) == set()


def test_one_that_left_on_purpose_is_not_waited_for_at_all() -> None:
    members = LiveLearners(PACE, 0.0)
    members.heard("a", 1, 9.0)
    members.left("a", 1)
    assert members.expected(("a",), 9.0) == set()

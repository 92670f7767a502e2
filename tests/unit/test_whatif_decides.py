"""Rounds are decided anew from the events that their commits recorded, under the recorded pace and another one."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from isthmus.format.records.objects import Healed, Seen, What
from isthmus.format.rules import Pace, Rules
from isthmus.inspect import whatif
from isthmus.log import Commit, Log
from support.commits import committed, given


def log_of(pace: Pace, rules: Rules) -> Log:
    """Return all that `decide` needs of a log: the pace and the rules of its run."""
    return cast(Log, SimpleNamespace(run=SimpleNamespace(pace=pace, rules=rules)))


LOG = log_of(Pace(quorum=1, grace=0.8), Rules(sync_every=12))


def round_of(
    version: int, *seen: tuple[float, What, str], bases: dict[str, int] | None = None, **changed: Any
) -> Commit:
    """Return a commit of a round with these events in order: seconds since opening, what happened, and the learner."""
    ins = [who for _, what, who in seen if what == "in"]
    header = committed(version, *(given(who, (bases or {}).get(who, version - 1), version) for who in ins))
    waited = {
        "closed_by": "everyone",
        "expected": ("a", "b", "c"),
        "seen": tuple(Seen(at, what, who) for at, what, who in seen),
        "waited_s": seen[-1][0],
        "quorum_s": seen[0][0],
        "grace_s": 2.0,
        "gives_up_s": 12.0,
        "hold_s": -60.0,
        "fastest_step_s": 1.0,
        "slowest_step_s": 1.0,
        "sync_s": 0.5,
        "cap_s": 2.0,
    } | changed
    return Commit(msgspec.structs.replace(header, waited=msgspec.structs.replace(header.waited, **waited)), bytes(32))


def decided(*commits: Commit, pace: Pace | None = None, **changed: Any) -> list[list[tuple[str, int]]]:
    """Return the learner and base of each input, by round, under a pace with these changes."""
    log = LOG if pace is None else log_of(pace, Rules(sync_every=4))
    return [[(i.learner, i.base) for i in inputs] for inputs in whatif.decide(log, commits, (), changed)]


EVERYONE: list[tuple[float, What, str]] = [(0.1, "in", "a"), (1.0, "in", "b"), (1.5, "in", "c")]


def test_under_the_recorded_pace_a_round_comes_out_as_it_did() -> None:
    assert decided(round_of(1, *EVERYONE)) == [[("a", 0), ("b", 0), ("c", 0)]]


def test_without_grace_the_first_one_is_merged_alone_and_the_others_join_the_next_round() -> None:
    rounds = [round_of(1, *EVERYONE), round_of(2, *EVERYONE), round_of(3, *EVERYONE)]
    assert decided(*rounds, grace=0.0) == [
        [("a", 0)],
        [("b", 0), ("c", 0), ("a", 1)],
        [("b", 1), ("c", 1), ("a", 2)],
    ]


def test_without_staleness_what_misses_its_round_is_lost() -> None:
    rounds = [round_of(1, *EVERYONE), round_of(2, *EVERYONE)]
    assert decided(*rounds, grace=0.0, staleness=0) == [[("a", 0)], [("a", 1)]]


def test_a_larger_quorum_waits_for_as_many() -> None:
    rounds = [round_of(1, *EVERYONE[:2], closed_by="grace", waited_s=2.1)]
    assert decided(*rounds, grace=0.0, quorum=2) == [[("a", 0), ("b", 0)]]
    assert decided(*rounds, grace=0.0, quorum=1) == [[("a", 0)]]


def test_what_came_in_before_anybody_noticed_that_grace_was_over_was_in() -> None:
    """The event loop was busy: grace ended after 2.1 s, and the syncer noticed that after 2.5 s."""
    late = round_of(1, (0.1, "in", "a"), (2.3, "in", "b"), closed_by="grace", waited_s=2.5)
    assert decided(late) == [[("a", 0), ("b", 0)]]


def test_whoever_fell_silent_on_the_way_was_waited_for_until_then() -> None:
    left = round_of(1, (0.1, "in", "a"), (0.5, "in", "b"), (0.6, "in", "d"), (0.7, "gone", "c"), expected=("a", "b"))
    assert decided(left) == [[("a", 0), ("b", 0), ("d", 0)]]


def test_quorum_is_counted_from_the_step_boundary_that_opened_the_round() -> None:
    """The time from that boundary to the opening shortens the slack, of which grace is a share."""
    pace = Pace(quorum=1, grace=0.5, overlap=4.0)
    opened: dict[str, Any] = {"boundary_s": 1.0, "quorum_s": 1.1, "grace_s": 1.2, "cap_s": 10.0, "waited_s": 1.3}
    one = round_of(1, (0.1, "in", "a"), (0.8, "in", "b"), closed_by="grace", **opened)
    assert decided(one, pace=pace) == [[("a", 0), ("b", 0)]]
    # The slack is 4 steps of 1 s − 1.1 s − 0.5 s = 2.4 s. A quarter of that is over 0.7 s after the opening.
    assert decided(one, pace=pace, grace=0.25) == [[("a", 0)]]


def test_a_commit_that_heals_had_no_round() -> None:
    wound = Healed(source=1, broken_at=1, key="k", why="")
    healing = Commit(committed(2, healed=wound), bytes(32))
    assert decided(round_of(1, *EVERYONE), healing, round_of(3, *EVERYONE), grace=0.0) == [
        [("a", 0)],
        [],
        [("a", 2)],
    ]


@pytest.mark.parametrize("changed", [{}, {"grace": 0.0}, {"quorum": 3}])
def test_every_round_of_a_log_is_decided(changed: Mapping[str, Any]) -> None:
    rounds = [round_of(version, *EVERYONE) for version in range(1, 20)]
    found = decided(*rounds, **changed)
    assert len(found) == 19
    assert all(found)
    bases = [place for inputs in found for place in inputs]
    assert len(bases) == len(set(bases)), "no base is merged twice"


def test_a_round_that_was_kept_open_closes_when_it_did_though_nobody_was_waited_for_meanwhile() -> None:
    """Its last learner left and came back while the syncer was reading that learner's update."""
    story: list[tuple[float, What, str]] = [
        (0.2, "in", "a"), (0.2, "gone", "a"), (0.2, "gone", "b"), (0.3, "here", "b"), (0.4, "in", "b"), (0.4, "gone", "b")
    ]  # fmt: skip
    kept: dict[str, Any] = {"expected": (), "quorum_s": 0.4, "grace_s": 0.0, "own_s": 0.4}
    assert decided(round_of(1, *story, **kept)) == [[("a", 0), ("b", 0)]]
    assert decided(round_of(1, *story, **kept | {"own_s": 0.0})) == [[("a", 0)]], "otherwise it would have closed"


def test_without_grace_too_a_round_whose_end_was_noticed_late_comes_out_as_it_did() -> None:
    """The syncer had just started and held the round until 0.5 s; busy, it noticed that after b's update had come."""
    pace = Pace(quorum=1, grace=0.0)
    held: dict[str, Any] = {"closed_by": "grace", "grace_s": 0.0, "hold_s": 0.5, "expected": ("a", "b")}
    one = round_of(1, (0.4, "in", "a"), (0.6, "in", "b"), own_s=0.6, **held)
    assert decided(one, pace=pace) == [[("a", 0), ("b", 0)]]
    assert decided(one, pace=Pace(quorum=1, grace=0.8), grace=0.0) == [[("a", 0)]], "nothing is kept open without grace"

"""Each syncer computes alone which fragments it holds, and agrees with the others once it has heard them."""

import pytest

from isthmus.format.rules import Pace
from isthmus.syncer.holders import SILENT_BEATS, Holders

PACE = Pace(heartbeat_s=1.0)


def syncers(*names: str, fragments: int = 24) -> dict[str, Holders]:
    """Return syncers that have just heard each other."""
    found = {name: Holders(name, PACE, fragments, 0.0) for name in names}
    for one in found.values():
        for other in names:
            one.heard(other, 10.0)
    return found


def test_the_living_share_all_fragments_and_none_twice() -> None:
    held = [s.held(10.1) for s in syncers("a", "b", "c").values()]
    assert set.union(*held) == set(range(24))
    assert sum(map(len, held)) == 24
    assert all(held)


def test_a_dead_ones_fragments_go_to_the_others_and_nothing_else_moves() -> None:
    found = syncers("a", "b", "c")
    before = {name: s.held(10.1) for name, s in found.items()}
    later = 10.0 + (SILENT_BEATS + 1) * found["a"].beat_s
    for name in "ab":
        for other in "ab":
            found[name].heard(other, later - 0.1)
    after = {name: found[name].held(later) for name in "ab"}
    assert after["a"] | after["b"] == set(range(24))
    assert not after["a"] & after["b"]
    assert all(before[name] <= after[name] for name in "ab")


def test_it_is_known_when_the_next_one_will_have_been_silent_too_long() -> None:
    one = syncers("a", "b", "c")["a"]
    one.heard("b", 10.2)
    soon = one.silent_in_s(10.3)
    assert soon == pytest.approx(one.silent_s - 0.3)
    shared = one.held(10.3 + soon - 0.01)
    assert shared < one.held(10.3 + soon + 0.01), "a and b share the fragments of c"
    one.heard("b", 10.3 + soon)
    assert one.silent_in_s(10.3 + soon) == pytest.approx(one.silent_s)
    assert Holders("a", PACE, 4, 0.0).silent_in_s(5.0) == pytest.approx(one.silent_s), (
        "without other syncers, nothing changes sooner"
    )


def test_one_that_stops_on_purpose_is_not_waited_for() -> None:
    found = syncers("a", "b")
    found["a"].left("b")
    assert found["a"].held(10.1) == set(range(24))


def test_a_newcomer_holds_nothing_before_others_had_the_chance_to_be_heard() -> None:
    alone = Holders("a", PACE, 4, started_at=5.0)
    assert alone.held(5.1) == set()
    assert alone.held(6.0) == {0, 1, 2, 3}


def test_silence_during_a_gap_of_the_bus_says_nothing() -> None:
    found = syncers("a", "b")
    mine = found["a"].held(10.1)
    found["a"].gap(60.0)
    assert found["a"].held(60.1) == mine
    assert found["a"].held(70.0) == set(range(24))


def test_a_fragment_one_cannot_fold_goes_to_the_next() -> None:
    found = syncers("a", "b")
    lost = next(iter(found["a"].held(10.1)))
    assert lost not in found["a"].held(10.1, broken={lost})
    found["b"].heard("a", 10.1, broken={lost})
    assert lost in found["b"].held(10.2)

"""The figures that several tools show."""

import msgspec
import pytest

from isthmus.format.records.messages import Tally
from isthmus.format.records.objects import CommitHeader, Healed
from isthmus.log.figures import LogSums, Reached, ledger, places, shares, trained_again
from support.commits import committed, given


def of(version: int, expected: tuple[str, ...], *there: str) -> CommitHeader:
    header = committed(version, *(given(name, version - 1, version, f"{name}{k}") for k, name in enumerate(there)))
    return msgspec.structs.replace(header, waited=msgspec.structs.replace(header.waited, expected=expected))


def test_places_are_of_learners_expected_or_there_nevertheless() -> None:
    assert places(of(1, ("a", "b"), "a")) == (1, 2)
    assert places(of(1, ("a", "b"), "c")) == (1, 3)
    # A learner with a late and a fresh update has one place.
    assert places(of(1, ("a",), "a", "a")) == (1, 1)


def test_shares_are_of_rounds_of_several_learners() -> None:
    inputs = [
        given("a", 0, 1, weight=3.0, tokens=10),
        given("a", 0, 1, "late", weight=1.0, tokens=10),
        given("b", 0, 1, weight=4.0, tokens=60),
    ]
    assert shares(committed(1, *inputs)) == {"a": (0.5, 0.25), "b": (0.5, 0.75)}
    assert shares(committed(1, *inputs[:2])) == {}


def test_participation_is_the_mean_over_commits() -> None:
    healed = Healed(source=1, broken_at=2, key="k", why="w")
    heals = msgspec.structs.replace(of(3, ()), healed=healed)
    headers = [of(1, ("a", "b"), "a"), of(2, tuple("abcdefgh"), *"abcdefgh"), heals]
    assert LogSums(headers).participation == pytest.approx((1 / 2 + 1) / 2)
    assert LogSums().participation is None
    assert LogSums([heals]).participation is None
    assert LogSums(headers).commits == 3


def test_an_update_that_is_clipped_for_two_reasons_is_one_clipped_update() -> None:
    both = given("a", 0, 1, clipped=("weight", "norm"))
    sums = LogSums([committed(1, both, given("b", 0, 1)), committed(2, given("a", 1, 2, clipped=("norm",)))])
    assert (sums.merged, sums.clipped) == (3, 2)
    assert sums.clips == {"weight": 1, "norm": 2}


def test_the_ledger_of_a_run_is_the_sum_of_its_learners() -> None:
    one = Tally(processed=10.0, merged=4.0, overwritten=3.0, late=1.0, pending=1.0, rejected=0.5, lost=0.5)
    both = ledger([one, one])
    assert (both.processed, both.merged, both.lost) == (20.0, 8.0, 1.0)
    assert ledger([]).processed == 0


def test_the_newest_merged_update_is_that_of_the_newest_incarnation_with_the_most_steps() -> None:
    old = given("a", 1, 2, step=40, tokens_seen=4000, taken_at=9e9)
    new = given("a", 2, 3, incarnation=2, step=30, tokens_seen=3000)
    assert max(map(Reached.of, (old, new))) == (2, 30, 3000)
    assert max(map(Reached.of, (old, new))).processed({2: 1500}) == 4500
    assert Reached.of(old).processed({2: 1500}) == 4000


def test_tokens_trained_again_are_as_claims_state_or_as_far_as_merged_updates_tell() -> None:
    spans = {1: (100, 900), 2: (600, 1200), 4: (1500, 1800), 5: (1700, 2000)}
    assert trained_again(spans, {}) == {1: 0, 2: 300, 4: 300, 5: 300 + 100}
    # The claim also has what no update has.
    assert trained_again(spans, {2: 450}) == {1: 0, 2: 450, 4: 450, 5: 550}
    assert trained_again(spans, {2: 450, 3: 500, 4: 600, 5: 800}) == {1: 0, 2: 450, 4: 600, 5: 800}
    # The first update of an incarnation may reach back before its checkpoint.
    assert trained_again({1: (0, 900), 2: (500, 1700)}, {1: 0, 2: 100}) == {1: 0, 2: 100}
    assert trained_again({1: (-100, 900)}, {}) == {1: 0}
    assert trained_again({}, {1: 0}) == {}

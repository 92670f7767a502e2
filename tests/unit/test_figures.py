"""The figures that several tools show."""

import msgspec
import pytest

from isthmus.format.records.objects import CommitHeader, Healed
from isthmus.log.figures import participation, places, shares
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
    assert participation(headers) == pytest.approx((1 / 2 + 1) / 2)
    assert participation([]) is None
    assert participation([heals]) is None

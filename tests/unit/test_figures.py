"""The figures that several tools show."""

import msgspec
import pytest

from isthmus.format.records.objects import CommitHeader, Healed
from isthmus.log.figures import participation, places
from support.commits import committed, given


def of(version: int, expected: tuple[str, ...], *there: str) -> CommitHeader:
    header = committed(version, *(given(name, version - 1, version, f"{name}{k}") for k, name in enumerate(there)))
    return msgspec.structs.replace(header, waited=msgspec.structs.replace(header.waited, expected=expected))


def test_places_are_of_learners_expected_or_there_nevertheless() -> None:
    assert places(of(1, ("a", "b"), "a")) == (1, 2)
    assert places(of(1, ("a", "b"), "c")) == (1, 3)
    # A learner with a late and a fresh update has one place.
    assert places(of(1, ("a",), "a", "a")) == (1, 1)


def test_participation_is_the_mean_over_commits() -> None:
    healed = Healed(source=1, broken_at=2, key="k", why="w")
    heals = msgspec.structs.replace(of(3, ()), healed=healed)
    headers = [of(1, ("a", "b"), "a"), of(2, tuple("abcdefgh"), *"abcdefgh"), heals]
    assert participation(headers) == pytest.approx((1 / 2 + 1) / 2)
    assert participation([]) is None
    assert participation([heals]) is None

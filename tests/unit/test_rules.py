"""The arithmetic of a run: what suits its period, and what is warned of."""

import pytest

from isthmus.errors import InputError
from isthmus.rules import LONG_STEPS, Rules, outer_for, overdrive


def test_the_plain_rules_are_those_that_suit_them() -> None:
    assert Rules.suited() == Rules()


@pytest.mark.parametrize("merge", ["rda", "avg"])
def test_long_rounds_have_less_momentum_at_the_same_effective_rate(merge: str) -> None:
    short, long = (Rules.suited(merge=merge, sync_every=h) for h in (LONG_STEPS, LONG_STEPS + 1))
    assert long.outer_momentum < short.outer_momentum
    assert long.outer_lr / (1 - long.outer_momentum) == pytest.approx(short.outer_lr / (1 - short.outer_momentum))


def test_what_is_given_stays() -> None:
    rules = Rules.suited(outer_lr=0.1)
    assert (rules.outer_lr, rules.outer_momentum) == (0.1, outer_for("rda", 12)[1])


@pytest.mark.parametrize("period", [12, 48])
@pytest.mark.parametrize(("merge", "effective"), [("rda", 2.0), ("avg", 3.5)])
def test_the_rate_follows_a_momentum_of_ones_own(merge: str, effective: float, period: int) -> None:
    rules = Rules.suited(merge=merge, sync_every=period, outer_momentum=0.9)
    assert rules.outer_lr == pytest.approx(effective * 0.1)
    assert overdrive(rules) is None


def test_a_momentum_that_cannot_be_is_named() -> None:
    with pytest.raises(InputError, match="outer_momentum"):
        Rules.suited(outer_momentum=1.0).check()


def test_an_unknown_merge_is_still_refused() -> None:
    with pytest.raises(InputError, match="unknown merge 'median'"):
        Rules.suited(merge="median").check()


@pytest.mark.parametrize("merge", ["rda", "avg"])
@pytest.mark.parametrize("period", [1, 12, 48, 64])
def test_what_suits_is_not_warned_of(merge: str, period: int) -> None:
    assert overdrive(Rules.suited(merge=merge, sync_every=period)) is None


def test_overdriving_is_warned_of_with_what_suits() -> None:
    said = overdrive(Rules(sync_every=48, outer_lr=0.7, outer_momentum=0.9))
    assert said is not None
    assert "7.0" in said
    assert "0.6 with 0.7" in said

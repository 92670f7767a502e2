"""`Rules.suited` chooses rules that suit the period and the model, and rates that overdrive a run give a warning."""

import pytest

from isthmus.errors import InputError
from isthmus.format import isotropic
from isthmus.format.layout import Spec, TensorClass
from isthmus.format.rules import LONG_STEPS, Rules, outer_for, overdrive


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
    with pytest.raises(InputError, match="unknown merge 'mode'"):
        Rules.suited(merge="mode").check()


def test_sending_isotropically_does_not_go_with_a_plain_mean() -> None:
    with pytest.raises(InputError, match="isotropic_up does not go with merge avg"):
        Rules.suited(merge="avg", isotropic_up=True).check()
    assert Rules.suited(merge="rda", isotropic_up=True).check()


@pytest.mark.parametrize("merge", ["rda", "avg"])
@pytest.mark.parametrize("period", [1, 12, 48, 64])
def test_what_suits_is_not_warned_of(merge: str, period: int) -> None:
    assert overdrive(Rules.suited(merge=merge, sync_every=period)) is None


def test_overdriving_is_warned_of_with_what_suits() -> None:
    said = overdrive(Rules(sync_every=48, outer_lr=0.7, outer_momentum=0.9))
    assert said is not None
    assert "7.0" in said
    assert "0.6 with 0.7" in said


def transformer(width: int) -> list[Spec]:
    shapes = {"qkv": (3 * width, width), "proj": (width, width), "up": (4 * width, width), "down": (width, 4 * width)}
    dense = [Spec(name, shape, "float32", TensorClass.DENSE) for name, shape in shapes.items()]
    return [Spec("embed", (50_000, width), "float32", TensorClass.EMBEDDING), *dense]


def test_matrices_are_merged_isotropically_where_they_are_narrow() -> None:
    assert Rules.suited(transformer(256)).merge == "iso"
    assert Rules.suited(transformer(512)).merge == "rda"
    assert Rules.suited(transformer(512), iso_block=256).merge == "iso"
    assert Rules.suited(transformer(256), merge="avg").merge == "avg"
    assert Rules.suited(transformer(512), merge="iso").merge == "iso"
    for none in ([], [Spec("gain", (64,), "float32", TensorClass.DENSE)], transformer(256)[:1]):
        assert Rules.suited(none) == Rules()
    assert Rules.suited(transformer(64), outer_momentum=0.9).outer_lr == pytest.approx(1.1 / 3), (
        "the same effective rate"
    )


def test_a_machine_too_slow_for_isotropic_merges_does_without() -> None:
    narrow, width = transformer(64), transformer(256)
    for flop_s, merges in (
        (5e10, ("iso", "iso")),
        (6e9, ("iso", "iso")),
        (1.5e9, ("iso", "rda")),
        (7e8, ("rda", "rda")),
    ):
        assert tuple(Rules.suited(specs, flop_s=flop_s).merge for specs in (narrow, width)) == merges, flop_s
    assert Rules.suited(width, flop_s=1e6, merge="iso").merge == "iso", "a rule that is asked for is kept"


def test_what_is_cheap_is_a_matter_of_operations_a_parameter() -> None:
    side = int(isotropic.FLOP_MAX / 20)
    assert isotropic.is_cheap([(side, side)])
    assert not isotropic.is_cheap([(side + 1, side + 1)])
    assert isotropic.is_cheap([(side + 1, side + 1)], block=side)
    assert isotropic.is_cheap([(64, 64)] * 10 + [(2 * side, 2 * side)]) is False, "the large matrix dominates the cost"
    assert not isotropic.is_cheap([])


def sent(rules: Rules) -> tuple[str, str, bool, bool, bool]:
    return rules.codec_up, rules.codec_down, rules.isotropic_up, rules.error_feedback, rules.feedback_down


GIVEN_UP, FED_BACK = ("q3", "q3", True, False, False), ("int4", "int4", False, True, True)


def test_what_is_sent_isotropically_takes_three_bits_and_gives_up_the_rest() -> None:
    assert sent(Rules.suited(transformer(256))) == sent(Rules.suited(transformer(256), isotropic_up=False)) == FED_BACK
    for rules in (Rules.suited(transformer(256), isotropic_up=True), Rules.suited(merge="rda", isotropic_up=True)):
        assert sent(rules) == GIVEN_UP
    assert sent(Rules.suited(isotropic_up=True, codec_up="int8")) == ("int8", *GIVEN_UP[1:])
    fed = Rules.suited(isotropic_up=True, codec_down="f32", feedback_down=True)
    assert sent(fed) == ("q3", "f32", True, False, True)

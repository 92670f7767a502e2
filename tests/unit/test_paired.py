"""Differences of losses between settings of the lab, seed by seed, and when the seeds are too few to tell them."""

import statistics
from pathlib import Path

import pytest

from isthmus_lab.commands.simulate import training
from isthmus_lab.training.setting import Row
from isthmus_lab.training.summary import T95, baselines, paired
from isthmus_services.main import main


def rows(name: str, *losses: float) -> list[Row]:
    """Return a row for each seed."""
    return [
        Row(
            setting=name, learners=4, H=12, K=1, seed=seed, tokens=1, val_loss=loss, goodput=1.0, uptime=1.0,
            participation=1.0, up_bits_per_param=4.0, down_bits_per_param=4.0, wall_virtual_s=1.0,
        )
        for seed, loss in enumerate(losses)
    ]  # fmt: skip


def test_a_baseline_is_the_first_of_its_group_unless_one_is_chosen() -> None:
    names = ["M = 4: Avg", "M = 4: iso", "M = 8: Avg", "M = 8: iso", "alone", "beside"]
    assert baselines(names) == {
        "M = 4: Avg": "M = 4: Avg", "M = 4: iso": "M = 4: Avg", "M = 8: Avg": "M = 8: Avg", "M = 8: iso": "M = 8: Avg",
        "alone": "alone", "beside": "alone",
    }  # fmt: skip
    assert set(baselines(names, "alone").values()) == {"alone"}


def test_losses_are_compared_seed_by_seed() -> None:
    # The seeds differ by far more than the settings do, and in every seed the second setting is better.
    found = paired([*rows("a", 2.0, 2.5, 3.0), *rows("b", 1.98, 2.49, 2.97)], {"a": "a", "b": "a"})
    assert found.keys() == {"b"}
    (b,) = found.values()
    assert b.baseline == "a"
    assert b.by_seed == pytest.approx([-0.02, -0.01, -0.03])
    assert [b.mean, b.deviation] == pytest.approx([-0.02, 0.01])
    assert b.agree == 3
    # t = 0.02 / (0.01 / √3) = 3.5 is less than 4.3: three seeds are too few.
    assert not b.told
    more = (2.0, 2.5, 3.0, 3.5)
    (b,) = paired([*rows("a", *more), *rows("b", *(x - d for x, d in zip(more, (0.02, 0.01, 0.03, 0.02), strict=True)))],
                  {"a": "a", "b": "a"}).values()  # fmt: skip
    # With one more seed like these, t = 0.02 / (0.0082 / 2) = 4.9, and 3.18 is enough.
    assert b.told
    (b,) = paired([*rows("a", 2.0, 2.5), *rows("b", 2.1, 2.3)], {"a": "a", "b": "a"}).values()
    assert (b.agree, b.told) == (1, False)
    (b,) = paired([*rows("a", 2.0), *rows("b", 1.0)], {"a": "a", "b": "a"}).values()
    assert (b.mean, b.agree, b.told) == (-1.0, 1, False)
    (b,) = paired([*rows("a", 2.0, 2.5), *rows("b", 2.0, 2.5)], {"a": "a", "b": "a"}).values()
    assert (b.agree, b.told) == (0, False), "the same losses do not differ"


def test_the_table_of_quantiles_is_students() -> None:
    # Of normal differences without a mean, one of twenty is beyond the quantile: here with a fixed generator.
    draw = statistics.NormalDist()
    for n in (2, 3, 10):
        samples = [draw.samples(n, seed=k) for k in range(4000)]
        beyond = sum(abs(statistics.fmean(x)) > T95[n - 2] * statistics.stdev(x) / n**0.5 for x in samples)
        assert 0.04 < beyond / len(samples) < 0.06, n


def test_the_table_says_what_is_compared_and_which_seeds_are_too_few() -> None:
    of = {"a": "a", "b": "a", "c": "a"}
    one = paired([*rows("a", 2.0), *rows("b", 1.0), *rows("c", 3.0)], of)
    assert [training._difference(one.get(name)) for name in of] == ["", "-1.000", "+1.000"]
    (said,) = training._compared(one, 1)
    assert said.startswith(
        "difference: the loss less that of «a»; one seed is too few to tell a difference below 0.015"
    )
    three = paired([*rows("a", 2.0, 2.5, 3.0), *rows("b", 1.9, 2.4, 2.9), *rows("c", 2.1, 2.4, 3.1)], of)
    assert training._difference(three["b"]).startswith("-0.100 ± 0.000 (3 of 3) *")
    assert training._difference(three["c"]).strip() == "+0.033 ± 0.115 (2 of 3)"
    said, unsure = training._compared(three, 3)
    assert "*: beyond chance, at 95 %" in said
    assert unsure == "3 seeds are too few to tell these from their baseline: «c»"
    assert training._compared({}, 3) == []
    groups = paired([*rows("x: a", 1.0), *rows("x: b", 1.0), *rows("y: a", 1.0), *rows("y: b", 1.0)],
                    baselines(["x: a", "x: b", "y: a", "y: b"]))  # fmt: skip
    assert (
        "less that of the first setting of the group (the same name before the colon)"
        in training._compared(groups, 1)[0]
    )


def test_a_baseline_that_is_no_setting_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my.toml").write_text('[cases.one]\nmerge = "avg"\n[cases.two]\n')
    assert main(["simulate", "training", str(tmp_path / "my.toml"), "--baseline", "three"]) == 2
    assert "--baseline three: there is no such setting; there are one, two" in capsys.readouterr().err

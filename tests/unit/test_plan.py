"""The planner gives settings with reasons, forecasts, costs and warnings, from a file or from flags."""

import itertools
import json
import math
import re
import shlex
import tomllib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from isthmus.agent import speed
from isthmus.agent.speed import Speeds
from isthmus.errors import InputError
from isthmus.format.layout import Spec, TensorClass
from isthmus.format.rules import LONG_STEPS, Pace, Rules
from isthmus.learner.incarnation import RARER_MAX
from isthmus.store.base import PART_BYTES, requests_to_read, requests_to_write
from isthmus.torch.model import specs_of
from isthmus_lab.commands.plan import EGRESS, NO_EGRESS
from isthmus_lab.commands.rates import gbit_s
from isthmus_lab.forecast import learning
from isthmus_lab.forecast import speeds as modelled
from isthmus_lab.forecast.island import Island
from isthmus_lab.forecast.outcome import CHECKPOINT_SHARE, HEADROOM, goodput_of, lost_s
from isthmus_lab.forecast.planner import Plan, plan
from isthmus_lab.forecast.search import PERIODS, Fixed, _pairs
from isthmus_lab.training.experiment import base
from isthmus_lab.training.setting import Shape, Wires
from isthmus_lab.training.trainee import build
from isthmus_lab.training.training import train
from isthmus_services.board.prices import Prices
from isthmus_services.main import main
from isthmus_services.output import report
from isthmus_services.settings import declared, shared

pytestmark = pytest.mark.tier("test")

PRICES = Prices(put_per_1000=0.005, get_per_1000=0.0004, storage_gb_month=0.023, egress_gb=0.02)

CLUSTER = """
params = 3e8
store_region = "eu"

[[learner]]
name = "eu"
count = 4
step_s = 1.0
up_gbit_s = 1.0
down_gbit_s = 1.0
latency_s = 0.005
region = "eu"

[[learner]]
name = "us spot"
count = 2
step_s = 1.3
up_gbit_s = 0.2
down_gbit_s = 0.4
latency_s = 0.08
region = "us"
mtbf_hours = 5
restart_s = 120
"""


RDA = Fixed(merge="rda", codec="int4", codec_down="int4")
"""Settings with which the figures below are easily computed by hand."""


def speeds(_: Rules) -> Speeds:
    return Speeds(add_s=1e-9, round_s=10e-9)


def planned(params: float, *islands: Island, **more: Any) -> Plan:
    return plan(params, islands, PRICES, speeds=speeds, **more)


def test_a_fast_link_gets_the_shortest_period_and_a_thin_one_a_longer_one() -> None:
    wide = planned(1e8, Island(name="a", count=4, latency_s=0.02), fixed=RDA)
    thin = planned(1e8, Island(name="a", count=4, up_gbit_s=0.02, down_gbit_s=0.02), fixed=RDA)
    assert wide.rules.sync_every == 12
    assert thin.rules.sync_every > LONG_STEPS
    assert thin.rules == Rules.suited(sync_every=thin.rules.sync_every, fragments=thin.rules.fragments)
    for found in (wide, thin):
        for f in found.forecasts:
            assert f.fits
            assert f.up_load <= HEADROOM + CHECKPOINT_SHARE
            assert f.down_load <= HEADROOM
        assert found.rules.check() is found.rules
        assert found.pace.check() is found.pace
        assert found.rules.fragments <= found.rules.sync_every
        assert {c.name for c in found.choices} == {
            "sync_every", "fragments", "codec", "codec_down", "outer_lr", "merge", "checkpoint", "overlap", "quorum", "syncers",
        }  # fmt: skip
        assert all(c.reason for c in found.choices)
    assert thin.forecasts[0].back_s > wide.forecasts[0].back_s


def test_what_is_fixed_is_not_chosen_and_a_link_that_cannot_carry_it_is_named() -> None:
    found = planned(
        1e9, Island(name="attic", count=2, up_gbit_s=0.01, down_gbit_s=0.01), fixed=Fixed(sync_every=12, codec="bf16")
    )
    assert (found.rules.sync_every, found.rules.codec_up) == (12, "bf16")
    assert not found.forecasts[0].fits
    assert any(w.startswith("attic: its link up cannot carry its fragments") for w in found.warnings)
    (why,) = (c.reason for c in found.choices if c.name == "sync_every")
    assert why.startswith("you asked for 12; the run will use 96, because learners lengthen a period that is shorter")
    assert "to at most 8 times what was asked for; every figure here is for 96" in why


def test_fragments_that_are_given_leave_the_period_to_be_chosen() -> None:
    found = planned(2.9e9, Island(name="a", count=2, up_gbit_s=10.0, down_gbit_s=10.0), fixed=Fixed(fragments=24))
    assert found.rules.fragments == 24
    assert found.rules.sync_every >= 24


def test_checkpoints_are_counted_and_leave_the_uplink_to_the_fragments() -> None:
    thin, wide = (planned(2e8, Island(name="a", count=2, up_gbit_s=gbit, down_gbit_s=1.0)) for gbit in (0.2, 10.0))
    every = {c.name: c.value for c in thin.choices}["checkpoint"]
    assert every == pytest.approx(4e9 * 8 / (0.15 * 0.2e9), rel=0.01)
    assert {c.name: c.value for c in wide.choices}["checkpoint"] == 60.0
    why = [next(c.reason for c in found.choices if c.name == "checkpoint") for found in (thin, wide)]
    assert "take so long at 15% of an uplink of 0.2 Gbit/s (a)" in why[0]
    assert why[1].startswith("seconds between two, the least; ")
    assert wide.forecasts[0].up_gb_day > 4.0 * 86400 / 60
    assert thin.forecasts[0].up_load < 1.0


def test_bytes_and_requests_follow_from_the_rounds() -> None:
    found = planned(1e8, Island(name="a", count=3, region="far"), Island(name="b", count=1), store_region="", fixed=RDA)
    rounds = found.rules.fragments * 86400 / found.rules.sync_every
    assert found.syncer["rounds_day"] == pytest.approx(rounds)
    a, b = found.forecasts
    # Payload: 4.125 bits per parameter up and down, each fragment once per period; headers come on top.
    payload = 1e8 / 8 * 86400 / found.rules.sync_every / 1e9
    every = next(c.value for c in found.choices if c.name == "checkpoint")
    assert isinstance(every, int | float)
    saved = 1e8 * 20.0 / every * 86400 / 1e9
    assert a.up_gb_day - saved == pytest.approx(4.125 * payload, rel=0.05)
    assert a.down_gb_day == pytest.approx(4.125 * payload, rel=0.05)
    assert a.up_gb_day - saved > 4.125 * payload
    assert found.day["up_gb"] == pytest.approx(3 * a.up_gb_day + b.up_gb_day)
    both = a.up_gb_day + a.down_gb_day
    assert found.day["egress_gb"] == pytest.approx(3 * both), "only what leaves a region is paid for"
    assert a.requests_day["create"] == pytest.approx(rounds, rel=0.3)
    parts = math.ceil(1e8 * 20.0 / PART_BYTES) + 2
    assert a.requests_day["put"] == pytest.approx(86400 / every * parts), "checkpoints"
    d = found.day
    assert d["usd"] == pytest.approx(d["requests_usd"] + d["egress_usd"] + d["storage_usd"])
    assert d["requests_usd"] == pytest.approx(d["reads"] / 1000 * 0.0004 + d["writes"] / 1000 * 0.005)


def test_large_objects_are_counted_by_the_requests_that_they_take() -> None:
    few, many = (
        planned(2e9, Island(name="a", count=4), fixed=replace(RDA, sync_every=96, fragments=p)) for p in (2, 96)
    )
    for found, reads, writes in ((few, 31, 10), (many, 1, 1)):
        rounds = found.syncer["rounds_day"]
        a = found.forecasts[0]
        assert a.requests_day["get"] >= (reads - 1) * rounds
        assert a.requests_day["create"] >= (writes - 1) * rounds
    assert few.forecasts[0].requests_day["get"] / few.syncer["rounds_day"] > 20
    assert many.forecasts[0].requests_day["get"] / many.syncer["rounds_day"] < 5


@pytest.mark.parametrize(
    ("size", "reads", "writes"),
    [(0, 1, 1), (16 << 20, 1, 1), ((16 << 20) + 1, 2, 1), (64 << 20, 4, 1), ((64 << 20) + 1, 5, 4), (1 << 30, 64, 18)],
)
def test_an_object_takes_requests_by_its_size(size: int, reads: int, writes: int) -> None:
    assert (requests_to_read(size), requests_to_write(size)) == (reads, writes)


def test_failures_cost_goodput_and_distance_costs_merged_work() -> None:
    often = replace(RDA, sync_every=12)
    calm, spot = (
        planned(1e8, Island(name="a", count=2, mtbf_hours=h, restart_s=90.0), fixed=often).forecasts[0]
        for h in (math.inf, 1.0)
    )
    assert calm.goodput == calm.utilization < 1.0
    # 24 bytes a parameter over a gigabit a second, a request away: 2.4 GB take 19.3 s.
    kept = (
        1 - (6 - 12 * 12 / 6 / 3600) / 3600
    )  # half a period of twelve steps, and a little less as failures are random
    assert spot.goodput == pytest.approx(spot.utilization * kept / (1 + (90 + 19.3) / 3600), rel=1e-6)
    # Unless it is given, a minute to start.
    spot = planned(1e8, Island(name="a", count=2, mtbf_hours=1.0), fixed=often).forecasts[0]
    assert spot.goodput == pytest.approx(spot.utilization * kept / (1 + (60 + 19.3) / 3600), rel=1e-6)
    near, far = (planned(1e8, Island(name="a", count=2, latency_s=s), fixed=often).forecasts[0] for s in (0.0, 1.0))
    assert far.kept < near.kept <= 1 - 1 / 12 + 1e-9


@pytest.mark.parametrize(
    ("mtbf_s", "restart_s", "period_s"), [(3600.0, 60.0, 12.0), (600.0, 300.0, 48.0), (100.0, 0.0, 100.0)]
)
def test_goodput_is_what_learners_keep_that_fail_at_random(mtbf_s: float, restart_s: float, period_s: float) -> None:
    """Each fragment is uploaded at its own place in the period; what it did since then is gone."""
    draw = np.random.default_rng(0)
    up = draw.exponential(mtbf_s, 400_000)
    first = draw.uniform(0.0, period_s, up.size)
    kept = np.where(up < first, 0.0, first + np.floor((up - first) / period_s) * period_s)
    here = Island(name="a", count=2, mtbf_hours=mtbf_s / 3600)
    found = goodput_of(here, 1.0, restart_s, lost_s(here, period_s / here.step_s))
    assert found == pytest.approx(kept.sum() / (up.sum() + restart_s * up.size), rel=0.003)


@pytest.mark.tier("all")
@pytest.mark.parametrize("latency_s", [0.02, 0.1])
def test_the_work_merged_is_about_what_real_learners_merge(latency_s: float) -> None:
    """The learners train in virtual time. Everything else is as planned, including the period."""
    given = replace(RDA, sync_every=12, fragments=12)
    found = planned(1e5, Island(name="a", count=4, latency_s=latency_s), fixed=given)
    shape = Shape(width=32, layers=2, heads=2)
    row = train(
        base(
            240,
            learners=4,
            shape=shape,
            noise=0.1,
            wires=Wires(latency_s=latency_s, spread=0.5),
            rules_sync_every_max=12,
        ),
        0,
    )
    assert found.forecasts[0].kept == pytest.approx(row.kept, abs=0.1)


@pytest.mark.tier("all")
@pytest.mark.parametrize(
    "wires",
    [Wires(latency_s=0.5, spread=0.0), Wires(latency_s=0.06, spread=0.3, gbit_s=0.0229, parameters=1e8)],
    ids=["far", "thin"],
)
def test_the_period_is_about_the_one_to_which_real_learners_lengthen_it(wires: Wires) -> None:
    """H = 12 is asked for. The lab's run counts its first rounds at H = 12 and its last, unmerged ones."""
    link = 1.0 if wires.gbit_s is None else wires.gbit_s
    island = Island(name="a", count=4, latency_s=wires.latency_s, up_gbit_s=link, down_gbit_s=link)
    shape = Shape(width=16, layers=1, heads=1)
    setting = base(600, learners=4, shape=shape, noise=0.05, wires=wires, rules_sync_every_max=0)
    specs = specs_of(build(setting, 0))
    found = planned(wires.parameters or 1e5, island, fixed=replace(RDA, sync_every=12, fragments=12), specs=specs)
    row = train(setting, 0)
    assert found.period == pytest.approx(row.extra["period"], rel=0.3)
    assert row.extra["period"] > 1.2 * found.rules.sync_every
    assert found.forecasts[0].kept == pytest.approx(row.kept, abs=0.2)
    assert not any("overwritten" in warning for warning in found.warnings)


GRID = list(
    itertools.product(
        (1e6, 1e8, 2.9e9, 7e10), (1, 2, 8, 64), (0.02, 0.2, 1.0, 10.0), (0.005, 0.05, 0.5), (0.3, 1.0, 10.0), (0.0, 2.5)
    )
)


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.tier("all")) for part in range(1, 12))])
def test_a_plan_never_warns_of_what_it_chose(part: int) -> None:
    """Over many sizes, links, distances and step times, warnings are only about what was given to the plan."""
    about_what_was_given = ("nobody to merge with", "for this model at any period up to 768 steps")
    for params, count, gbit, latency_s, step_s, gpu_hour in GRID[part::97]:
        island = Island(name="a", count=count, up_gbit_s=gbit, down_gbit_s=gbit, latency_s=latency_s, step_s=step_s)
        prices = replace(PRICES, gpu_hour=gpu_hour)
        found = plan(params, [island], prices, speeds=speeds)
        for warning in found.warnings:
            assert any(words in warning for words in about_what_was_given), (warning, island)
            assert "sync_every" not in warning
        f = found.forecasts[0]
        said = any("at any period" in w for w in found.warnings)
        assert said or (f.fits and f.in_model == pytest.approx(f.goodput * f.kept))
        assert found.rules.check() is found.rules
        assert found.pace.check() is found.pace


def test_a_link_that_can_carry_nothing_is_said_to_be_too_thin_and_not_badly_set() -> None:
    found = planned(7e10, Island(name="attic", count=2, up_gbit_s=0.01, down_gbit_s=0.01))
    assert found.period >= max(PERIODS)
    assert any("too thin for this model at any period up to 768 steps" in w for w in found.warnings)
    far = planned(1e6, Island(name="moon", count=2, latency_s=9.0, step_s=0.01))
    assert any(w.startswith("moon: a new version is") and "at any period" in w for w in far.warnings)
    assert far.forecasts[0].in_model < 0.5


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.tier("all")) for part in range(1, 6))])
def test_a_chosen_period_is_no_worse_than_any_other(part: int) -> None:
    """No other fixed period learns more, or learns more per dollar if GPU hours have a price.

    One that is extrapolated may, within the error of the forecast.
    """
    island = Island(name="a", count=8, latency_s=0.05)
    for gpu_hour in (0.0, 2.5):
        prices = replace(PRICES, gpu_hour=gpu_hour)

        def value(found: Plan) -> float:
            return found.learnt / (found.day["usd"] if gpu_hour else 1.0)  # noqa: B023

        best = plan(2.9e9, [island], prices, speeds=speeds, fixed=RDA)
        given = replace(RDA, fragments=best.rules.fragments)
        others = [
            plan(2.9e9, [island], prices, speeds=speeds, fixed=replace(given, sync_every=h))
            for h in PERIODS[part::6]
            if h >= best.rules.fragments
        ]
        for other in (o for o in others if o.forecasts[0].fits):
            further = other.worth.beyond and not best.worth.beyond
            assert value(best) >= value(other) / (1.0 + (learning.error() if further else 1e-9))
    assert best.forecasts[0].kept > 0.8


def test_farther_learners_and_slower_syncers_get_longer_periods() -> None:
    near, far = (planned(1e8, Island(name="a", count=8, latency_s=s), fixed=RDA).rules.sync_every for s in (0.01, 0.8))
    assert near < far
    slow = plan(1e9, [Island(name="a", count=8)], PRICES, speeds=lambda _: Speeds(add_s=4e-8, round_s=4e-7), fixed=RDA)
    assert slow.rules.sync_every > planned(1e9, Island(name="a", count=8), fixed=RDA).rules.sync_every


def test_the_init_line_is_what_the_real_parser_takes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    taken: list[declared.Init] = []
    report = tmp_path / "r.json"

    def run(settings: declared.Init) -> int:
        taken.append(settings)
        return 0

    monkeypatch.setattr("isthmus_services.commands.init.run", run)
    for words in (
        "--params 2.9e9",
        "--params 1e8 --latency 0.8",
        "--params 1e7 --codec int8",
        "--params 1e7 --merge iso --iso-block 512",
        "--params 1e6",
        "--params 1e6 --codec int4",
        "--params 1e6 --merge iso --step-seconds 0.001 --sync-every 24",
        "--params 1e6 --merge rda",
    ):
        assert main(["plan", *words.split(), "--json", str(report)]) == 0
        line = capsys.readouterr().out.strip().splitlines()[-1]
        assert line.startswith("isthmus init s3://BUCKET/RUN --model PACKAGE.MODULE:FUNCTION ")
        assert main(shlex.split(line)[1:]) == 0
        rules = shared.rules_of(taken[-1], ())
        assert rules == msgspec.convert(json.loads(report.read_text())["rules"], Rules), words
        assert shared.pace_of(taken[-1], Pace()).overlap >= 2.0


def test_what_is_sent_isotropically_takes_a_learner_longer_to_pack_and_less_room() -> None:
    near = Island(name="a", count=4, latency_s=0.0)
    given = Fixed(fragments=12, sync_every=24, merge="iso", codec="q3", codec_down="q3", isotropic_up=True)
    sent = planned(1e6, near, fixed=given)
    plain = planned(1e6, near, fixed=replace(RDA, fragments=12, sync_every=24))
    assert sent.rules.isotropic_up
    assert not plain.rules.isotropic_up
    assert sent.forecasts[0].up_gb_day < plain.forecasts[0].up_gb_day
    assert sent.forecasts[0].sent_s > plain.forecasts[0].sent_s
    assert plain.forecasts[0].memory_gib - sent.forecasts[0].memory_gib == pytest.approx(8e6 / 2**30)
    hurried = Island(name="a", count=4, step_s=1e-4)
    assert not planned(1e6, hurried, fixed=replace(given, isotropic_up=None)).rules.isotropic_up
    with pytest.raises(InputError, match="too many of a learner's cores"):
        planned(1e6, hurried, fixed=given)
    said = {choice.name: choice.reason for choice in sent.choices}
    assert "of its cores" in said["isotropic_up"]
    assert "given up" in said["codec"]


def test_a_robust_merge_keeps_what_it_compares_and_its_time_is_not_planned() -> None:
    near = Island(name="a", count=4, latency_s=0.0)
    plain, robust = (
        planned(1e9, near, fixed=Fixed(fragments=12, sync_every=24, merge=merge, codec="int4"))
        for merge in ("rda", "median")
    )
    kept = robust.syncer["memory_gib"] - plain.syncer["memory_gib"]
    assert kept == pytest.approx(4 * 1e9 * 4 / 8 / 2**30, rel=0.1), "four bits of each parameter of each learner"
    assert any("merging by median" in warning for warning in robust.warnings)
    assert not any("merging by" in warning for warning in plain.warnings)


def test_whole_numbers_are_printed_whole_and_what_was_assumed_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--params", "2.9e9", "--latency", "0.5"]) == 0
    shown = capsys.readouterr().out
    for name in ("checkpoint", "overlap", "sync_every", "fragments", "quorum", "syncers"):
        assert re.search(rf"│ {name} +│ \d+ +│", shown), name
    shown = " ".join(shown.split())
    assert "1 s a step (--step-seconds)" in shown
    assert "8 GPUs a learner (--gpus)" in shown
    assert "$2.5 for an hour of a GPU (--gpu-hour)" in shown
    assert "1 Gbit/s up (--up)" in shown
    assert "no learner ever fails (--mtbf-hours)" in shown
    assert "0.05 s to the store" not in shown, "the latency was given, not assumed"
    assert "the forecast lets the GPUs of a learner share its step without loss" in shown
    words = ["--params", "2.9e9", "--step-seconds", "1", "--gpus", "64", "--gpu-hour", "3"]
    words += ["--up", "1", "--down", "1", "--latency", "0.05", "--mtbf-hours", "1000"]
    assert main(["plan", *words]) == 0
    assert "assumed, because not given: 60 s to start after a failure (--restart)" in capsys.readouterr().out
    assert main(["plan", *words, "--restart", "600"]) == 0
    assert "assumed" not in capsys.readouterr().out


def test_the_output_in_a_pipe_has_100_columns_and_the_words_of_the_glossary(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    glossary = (Path(__file__).parents[2] / "docs" / "glossary.md").read_text()
    for more in ([], ["--compare"]):
        assert main(["plan", "--params", "2.9e9", "--learners", "8", *more]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines[:-1])) <= 100, "only the line to copy may be longer"
        said = " ".join(" ".join(lines).replace("│", " ").split())
        for word in ("tokens merged", "goodput", "worth"):
            assert word in said
            assert f"| {word} |" in glossary
        assert "in the model" not in said
        assert "work merged" not in said


def test_no_cell_is_cut_at_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(report, "PIPE_WIDTH", 80)
    cluster = tmp_path / "c.toml"
    cluster.write_text(CLUSTER.replace("us spot", "a name as long as somebody may well give to a learner"))
    for words in (["--params", "2.9e9", "--learners", "8", "--mtbf-hours", "100"], ["--islands", str(cluster)]):
        for more in ([], ["--compare"]):
            assert main(["plan", *words, *more]) == 0
            lines = capsys.readouterr().out.splitlines()
            assert not any("…" in line for line in lines)
            assert all(len(line) <= 80 for line in lines[:-1]), "only the line to copy may be longer"
    shown = "\n".join(lines)
    assert "dollars" in shown


def test_speeds_come_from_the_table_or_a_file_and_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("timed without being asked")

    monkeypatch.setattr(modelled, "measure", never)
    assert main(["plan", "--params", "1e8"]) == 0
    assert "syncer arithmetic: table, class xeon-2023: measured" in " ".join(capsys.readouterr().out.split())
    assert main(["plan", "--params", "1e8", "--cpu", "slow"]) == 0
    assert "table, class slow: not measured" in capsys.readouterr().out
    monkeypatch.undo()
    monkeypatch.setattr(modelled, "products", partial(speed.products, side=128))
    own, said = tmp_path / "own.toml", tmp_path / "r.json"
    assert main(["plan", "--measure", str(own)]) == 0
    assert f"isthmus plan --speeds {own} uses it" in capsys.readouterr().out
    given = ["--merge", "rda", "--codec", "int4", "--codec-down", "int4"]
    assert main(["plan", "--params", "1e8", *given, "--speeds", str(own), "--json", str(said)]) == 0
    assert f"syncer arithmetic: {own}: fastest of" in " ".join(capsys.readouterr().out.split())
    written = tomllib.loads(own.read_text())
    report_ = json.loads(said.read_text())
    per_round = 8 * written["add_s"]["int4"] + written["round_s"]["int4"]
    assert report_["syncer"]["merge_s"] == pytest.approx(1e8 / report_["rules"]["fragments"] * per_round)


def test_isotropic_merges_are_counted_by_the_matrices_there_are_and_a_better_way_to_merge_is_named() -> None:
    few = replace(RDA, sync_every=24, fragments=12)
    here = Island(name="a", count=4, up_gbit_s=10.0, down_gbit_s=10.0)
    rda, iso, cut = (
        planned(1e9, here, fixed=replace(few, merge=merge, iso_block=block))
        for merge, block in (("rda", None), ("iso", 0), ("iso", 512))
    )
    choice = next(c for c in cut.choices if c.name == "merge")
    assert choice.value == "iso"
    assert "it takes, a round: " in choice.reason
    assert rda.syncer["merge_s"] < cut.syncer["merge_s"] < iso.syncer["merge_s"]
    assert any(w.startswith("--merge iso is kept as you asked; without it the plan would learn") for w in iso.warnings)
    assert any(w.startswith("--iso-block 0 is kept as you asked") for w in iso.warnings)
    assert not any(w.startswith("--merge") for w in rda.warnings)
    # Twenty layers of width 2,048. A matrix with sides d ≤ l takes 5 (3 d² l + d³) operations.
    shapes = [(2048, 3 * 2048), (2048, 2048), (2048, 4 * 2048), (4 * 2048, 2048)] * 20 + [(50_000 * 2048,)]
    specs = [Spec(f"t{i}", shape, "bfloat16", TensorClass.DENSE) for i, shape in enumerate(shapes)]
    known = planned(1e9, here, fixed=replace(few, merge="iso", iso_block=0), specs=specs)
    flop = 20 * 5 * 2048**3 * (10 + 4 + 13 + 13)
    added = known.syncer["merge_s"] - rda.syncer["merge_s"]
    assert added == pytest.approx(flop / 12 / speeds(Rules()).flop_s)


def test_the_table_has_every_codec_and_its_figures_are_believable() -> None:
    default, classes = modelled.classes()
    assert classes[default].how.startswith("measured")
    for found in classes.values():
        modelled.table(msgspec.to_builtins(found), "the table")
        fast = classes[default]
        for name in modelled.TIMED:
            assert 0.5 <= found.add_s[name] / fast.add_s[name] <= 4.0
            assert 1e-10 < found.round_s[name] < 1e-6


def test_what_is_known_to_hurt_is_said() -> None:
    found = planned(
        3e9,
        Island(name="fast", count=1),
        Island(name="slow", count=1, step_s=5.0),
        Island(name="spot", count=1, mtbf_hours=0.1),
    )
    said = "\n".join(found.warnings)
    assert "slow: its steps take 5.0 times" in said
    assert "spot: failures and restarts cost" in said
    assert "spot: a checkpoint every 3,200 s is rare beside a failure every 360 s" in said
    assert "5 TB" not in said
    assert any("stores take objects of up to 5 TB" in w for w in planned(1e12, Island(name="a", count=2)).warnings)
    assert any("nobody to merge with" in w for w in planned(1e8, Island(name="a")).warnings)


def test_checkpoints_that_are_rare_beside_failures_are_warned_of_with_advice_that_helps() -> None:
    def rare(**more: float) -> str:
        fields = {"count": 3, "step_s": 12.0, "up_gbit_s": 0.5, "mtbf_hours": 1.0} | more
        found = planned(7e9, Island(name="a", **fields))  # type: ignore[arg-type]
        return "".join(w for w in found.warnings if "is rare beside" in w)

    # 20 bytes of each parameter at 15 % of 500 Mbit/s. Hardly any learner lives so long.
    said = rare()
    assert said.startswith(
        "a: a checkpoint every 14,934 s is rare beside a failure every 3,600 s: about 93% of its steps"
    )
    link = re.search(r"its uplink carries one every 360 s from ([0-9.]+) Gbit/s on", said)
    assert link is not None, said
    assert not rare(up_gbit_s=float(link[1]))
    assert not rare(mtbf_hours=42.0)
    # At ten times as many hours, half of the interval over the time between failures is 21 %.
    said = rare(mtbf_hours=10.0)
    assert "about 19% of its steps are trained again" in said
    assert (
        "--checkpoint 360 there (checkpoint_s= of isthmus.join), instead of the plan's 14934, takes one at least every"
        in said
    )
    assert "every 3600 s (at most 10 times as rarely as it is told), for 62% of its uplink instead of 15%" in said
    assert 360 * RARER_MAX == 3600
    assert not rare(mtbf_hours=math.inf)


def test_the_command_plans_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster, report = tmp_path / "c.toml", tmp_path / "r.json"
    cluster.write_text(CLUSTER)
    assert main(["plan", "--islands", str(cluster), "--json", str(report)]) == 0
    shown = capsys.readouterr().out
    assert "4 × eu" in shown
    assert "2 × us spot" in shown
    said = json.loads(report.read_text())
    assert [f["island"]["name"] for f in said["forecasts"]] == ["eu", "us spot"]
    assert said["forecasts"][0]["island"]["mtbf_hours"] is None
    assert said["day"]["egress_gb"] > 0
    assert said["syncer"]["cores"] > 0
    assert said["rules"]["sync_every"] >= 12


def test_egress_without_regions_is_unknown_and_not_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "r.json"
    assert main(["plan", "--params", "1e9", "--learners", "4", "--json", str(report)]) == 0
    said = json.loads(report.read_text())
    assert {name: said["day"][name] for name in EGRESS} == dict.fromkeys(EGRESS)
    assert f"{NO_EGRESS}: counted as 0" in said["assumed"]
    abroad = 4 * said["forecasts"][0]["down_gb_day"] * PRICES.egress_gb
    assert abroad > 1.0
    assert (
        f"{NO_EGRESS}: counted as 0; ${abroad:,.0f} a day if all learners are outside the store's region"
        in " ".join(capsys.readouterr().out.split())
    )


def test_what_is_not_known_of_regions_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = tmp_path / "c.toml"

    def said(text: str) -> str:
        cluster.write_text(text)
        assert main(["plan", "--islands", str(cluster)]) == 0
        return " ".join(capsys.readouterr().out.split())

    shown = said(CLUSTER)
    sent = re.search(r"egress \$[0-9,.]+ for ([0-9,]+) GB sent and ([0-9,]+) GB received between regions", shown)
    assert sent is not None, shown
    assert all(int(number.replace(",", "")) > 0 for number in sent.groups())
    assert "(region)" not in shown
    assert "(store_region)" not in shown
    assert "the store is outside every learner's region (store_region)" in said(CLUSTER.replace("store_region", "#"))
    assert "no egress of us spot (region)" in said(CLUSTER.replace('region = "us"', ""))


def test_the_command_counts_a_module(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "isthmus.demo.gpt:byte_gpt", "--learners", "2"]) == 0
    assert "settings for" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "file", "said"),
    [
        ([], None, "give the size of the model in exactly one way"),
        (["--params", "1e9", "--model", "x:y"], None, "give the size of the model in exactly one way"),
        (["--params", "-1"], None, "--params -1: must be more than 0"),
        (["--params", "1e9", "--up", "inf"], None, "--up inf: write a number and its unit, Mbit/s, Gbit/s or MB/s"),
        (["--params", "1e9", "--up", "200Mbot"], None, "--up 200Mbot: write a number and its unit, Mbit/s, Gbit/s"),
        (["--params", "1e9", "--up", "200"], None, "--up 200: which unit? write 200Mbit/s, 200Gbit/s or 200MB/s"),
        (["--params", "1e9", "--down", "1e3"], None, "--down 1e3: which unit? write 1000Mbit/s, 1000Gbit/s"),
        (["--params", "1e9", "--up", "0"], None, "--up 0: must be more than 0"),
        (["--params", "1e9", "--codec", "int3"], None, "--codec int3: choose one of"),
        (["--params", "1e9", "--fragments", "24", "--sync-every", "12"], None, "24 fragments within 12 steps"),
        (["--params", "1e9", "--islands", "FILE"], "[[learner]]\nname = 'a'\nspeed = 3", "learner 1: unknown speed"),
        (["--params", "1e9", "--islands", "FILE"], "[[learner]]\nstep_s = 3", "learner 1: "),
        (["--params", "1e9", "--islands", "FILE"], "[[learner]]\nname = 'a'\nstep_s = -3", "learner a: step_s must be"),
        (["--params", "1e9", "--islands", "FILE"], "", "has no [[learner]] tables"),
        (["--params", "1e9", "--islands", "FILE"], "a = ", "c.toml: "),
        (["--params", "1e9", "--prices", "FILE"], "put = 1", "unknown put"),
        (["--params", "1e9", "--islands", "/nowhere.toml"], None, "/nowhere.toml: No such file"),
        (["--params", "1e30"], None, "1e+30 parameters cannot be: at least 1, at most 1e+14"),
        (
            ["--params", "1e9", "--latency", "50"],
            None,
            "--latency 50 cannot be (at most 10): it is in seconds, one way",
        ),
        (["--params", "1e9", "--step-seconds", "1e6"], None, "--step-seconds 1e+06 cannot be (at most 86400)"),
        (["--params", "1e9", "--up", "1e9Gbit/s"], None, "--up 1e+09 cannot be (at most 100000): it is in Gbit/s"),
        (["--params", "1e9", "--mtbf-hours", "1e-6"], None, "--mtbf-hours 1e-06 cannot be (at least 0.001)"),
        (["--params", "1e9", "--gpus", "9"], None, "--gpus 9: cannot be divided equally among 8 learners"),
        (["--params", "1e9", "--cpu", "abacus"], None, "--cpu abacus: choose one of xeon-2023, epyc-2023, slow"),
        (["--params", "1e9", "--speeds", "FILE"], "cpu = 'x'", "isthmus plan --measure FILE writes such a file"),
        (["--params", "1e9", "--speeds", "FILE", "--cpu", "slow"], "", "use only one"),
        (["--params", "1e9", "--compare", "--step-tokens", "0.5"], None, "a step has at least one token"),
        (
            ["--params", "1e9", "--islands", "FILE"],
            "[[learner]]\nname = 'a'\nlatency_s = 20",
            "learner a: latency_s 20",
        ),
    ],
)
def test_what_cannot_be_is_one_clear_line(
    words: list[str], file: str | None, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "c.toml"
    if file is not None:
        path.write_text(file)
    assert main(["plan", *(str(path) if word == "FILE" else word for word in words)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("word", "rate"),
    [
        ("0.5", 0.5), ("100", 100.0), ("200Mbit/s", 0.2), ("200 Mbit", 0.2), ("200mbps", 0.2), ("200Mb/s", 0.2),
        ("25MB/s", 0.2), ("25 MBps", 0.2), ("25MByte/s", 0.2), ("0.2Gbit/s", 0.2), ("0.2gbps", 0.2), ("1.5GB/s", 12.0),
        ("400Gbit/s", 400.0), ("64kbit/s", 64e-6), ("1e9bit/s", 1.0), ("1Tbit/s", 1000.0),
    ],
)  # fmt: skip
def test_a_rate_is_read_in_its_usual_spellings(word: str, rate: float) -> None:
    assert gbit_s(word) == pytest.approx(rate, rel=1e-12)


def test_links_are_printed_as_they_were_understood(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    said = []
    for words in ("--up 200Mbit/s --down 25MB/s", "--up 0.2 --down 0.2"):
        assert main(["plan", "--params", "1e8", *words.split()]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert said[0].startswith("links of 8 × learner: 200 Mbit/s up, 200 Mbit/s down, 0.05 s one way to the store\n")
    config = tmp_path / "c.toml"
    config.write_text("[plan]\nup = 0.2\ndown = '200Mbps'\n")
    assert main(["plan", "--params", "1e8", "--config", str(config)]) == 0
    assert capsys.readouterr().out == said[0]


def test_a_model_in_two_bytes_takes_less_of_a_learner() -> None:
    def taken(dtype: str) -> float:
        specs = [Spec(f"layer{i}", (4096, 4096), dtype, TensorClass.DENSE) for i in range(8)]
        size = sum(s.size for s in specs)
        found = planned(float(size), Island(name="a", count=2), specs=specs, fixed=Fixed(merge="rda"))
        assert found.rules.error_feedback
        return found.forecasts[0].memory_gib * 2**30 / size

    assert taken("float32") == pytest.approx(30.0)
    assert taken("bfloat16") == taken("float16") == pytest.approx(27.0)


@pytest.mark.tier("all")
def test_the_pages_requests_of_a_bus_in_the_store_are_the_plans(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/deploy.md").read_text()
    rows = re.findall(r"^\| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| (0\.\d+) \|$", page, re.M)
    assert len(rows) == 3
    for period, learner, syncer, usd in rows:
        words = ["--params", "1e9", "--learners", "4", "--sync-every", period.replace(",", "")]
        assert main(["plan", *words, "--json", str(tmp_path / "plan")]) == 0
        bus = json.loads((tmp_path / "plan").read_text())["bus_in_store"]
        counts = [round(sum(bus[who].values()), -2) for who in ("learner", "syncer")]
        assert [int(c.replace(",", "")) for c in (learner, syncer)] == counts
        assert f"{bus['usd_hour']:.3f}" == usd


def test_the_price_of_checkpoints_that_leave_their_region_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    learner = '[[learner]]\nname = "{0}"\nregion = "{0}"\nup_gbit_s = 10\ndown_gbit_s = 10\nstep_s = 13\n'
    for here, named in (("us", True), ("eu", False)):
        file = tmp_path / f"{here}.toml"
        file.write_text('params = 7e9\nstore_region = "eu"\n' + learner.format(here))
        assert main(["plan", "--islands", str(file), "--json", str(tmp_path / "plan")]) == 0
        said, planned = " ".join(capsys.readouterr().out.split()), json.loads((tmp_path / "plan").read_text())
        of_that = re.search(r"\$([\d.,]+) of that are for checkpoints that leave their region, one every (\d+) s", said)
        assert bool(of_that) is named, said
        if of_that:
            usd, every_s = float(of_that[1].replace(",", "")), int(of_that[2])
            assert usd == pytest.approx(planned["day"]["checkpoints_egress_usd"], abs=0.01)
            assert f"with --checkpoint {10 * every_s} at these learners it is ${usd / 10:,.2f}" in said
            assert planned["day"]["checkpoints_gb"] == pytest.approx(usd / 0.02, rel=0.01)


def test_a_single_learner_is_given_no_codec_below_the_usual_one() -> None:
    """What codecs cost a learner that merges with nobody was not measured: 0.75 bits were taken as free."""
    island = Island(name="a", count=1, up_gbit_s=0.05, down_gbit_s=0.05, latency_s=0.05)
    found = plan(1e9, [island], PRICES, speeds=speeds)
    assert {found.rules.codec_up, found.rules.codec_down} <= {"f32", "bf16", "int8", "int4"}
    fixed = plan(1e9, [island], PRICES, speeds=speeds, fixed=Fixed(codec="q0.75"))
    assert (fixed.rules.codec_up, fixed.rules.codec_down) in [
        ("q0.75", d) for d in ("q0.75", "f32", "bf16", "int8", "int4")
    ]
    assert set(_pairs(Fixed(codec="q0.75"), 1)) == {("q0.75", d) for d in ("f32", "bf16", "int8", "q0.75")}


@pytest.mark.parametrize("learners", [1, 2])
def test_one_learner_has_no_link_at_which_it_begins_to_pay(learners: int, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--params", "1e9", "--learners", str(learners), "--up", "0.1", "--down", "0.1"]
    assert main(["plan", "--compare", *words]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert ("times it): it pays" in said) == (learners > 1), said


def test_checkpoints_that_no_object_takes_are_neither_stored_nor_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "plan",
        "--learners",
        "4",
        "--up",
        "100",
        "--down",
        "100",
        "--merge",
        "rda",
        "--sync-every",
        "48",
        "--params",
    ]
    stored = dict[str, float]()
    for params in ("2.4e11", "2.6e11"):
        assert main([*words, params]) == 0
        said = " ".join(capsys.readouterr().out.replace("│", " ").split())
        found = re.search(r"([0-9,]+) GB stored", said)
        assert found is not None
        stored[params] = float(found[1].replace(",", ""))
        fits = params == "2.4e11"
        assert ("pass each learner --checkpoint" in said) == fits
        assert ("none is stored: 5.2 TB are more than one object takes" in said) == (not fits)
        assert (" TB each take so long at " in said) == fits
    assert stored["2.4e11"] - stored["2.6e11"] > 2 * 4 * 4800 - 0.1 * stored["2.6e11"], (
        "two checkpoints of each learner"
    )

"""The planner: settings with reasons, forecasts, cost and warnings, from a file or from flags."""

import json
import math

import pytest

from isthmus.lab.experiments import base
from isthmus.lab.setting import Shape, Wires
from isthmus.lab.training import train
from isthmus.model.planner import CHECKPOINT_SHARE, HEADROOM, Fixed, Island, Prices, plan
from isthmus.model.speeds import Speeds
from isthmus.rules import LONG, Rules
from isthmus_services.cli import main

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


def speeds(_: Rules) -> Speeds:
    return Speeds(add_s=1e-9, round_s=10e-9)


def planned(params: float, *islands: Island, **more):
    return plan(params, islands, PRICES, speeds=speeds, **more)


def test_a_fast_link_gets_the_shortest_period_and_a_thin_one_a_longer_one():
    wide = planned(1e8, Island(name="a", count=4))
    thin = planned(1e8, Island(name="a", count=4, up_gbit_s=0.02, down_gbit_s=0.02))
    assert wide.rules.sync_every == 12
    assert thin.rules.sync_every > LONG
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
            "sync_every", "fragments", "codec", "codec_down", "outer_lr", "checkpoint", "overlap", "quorum",
        }  # fmt: skip
        assert all(c.reason for c in found.choices)
    assert thin.forecasts[0].back_s > wide.forecasts[0].back_s


def test_what_is_fixed_is_not_chosen_and_a_link_that_cannot_carry_it_is_named():
    found = planned(
        1e9, Island(name="attic", count=2, up_gbit_s=0.01, down_gbit_s=0.01), fixed=Fixed(sync_every=12, codec="bf16")
    )
    assert (found.rules.sync_every, found.rules.codec_up) == (12, "bf16")
    assert not found.forecasts[0].fits
    assert found.forecasts[0].kept < 0.1
    assert any(w.startswith("attic: its link up cannot carry its fragments") for w in found.warnings)
    assert any(c.reason == "as you asked" for c in found.choices if c.name == "sync_every")


def test_fragments_that_are_given_leave_the_period_to_be_chosen():
    found = planned(2.9e9, Island(name="a", count=2, up_gbit_s=10.0, down_gbit_s=10.0), fixed=Fixed(fragments=24))
    assert (found.rules.fragments, found.rules.sync_every) == (24, 24)


def test_checkpoints_are_counted_and_leave_the_uplink_to_the_fragments():
    thin, wide = (planned(2e8, Island(name="a", count=2, up_gbit_s=gbit, down_gbit_s=1.0)) for gbit in (0.2, 10.0))
    every = {c.name: c.value for c in thin.choices}["checkpoint"]
    assert every == pytest.approx(4e9 * 8 / (0.15 * 0.2e9), rel=0.01)
    assert {c.name: c.value for c in wide.choices}["checkpoint"] == 60.0
    assert wide.forecasts[0].up_gb_day > 4.0 * 86400 / 60
    assert thin.forecasts[0].up_load < 1.0


def test_bytes_and_requests_follow_from_the_rounds():
    found = planned(1e8, Island(name="a", count=3, region="far"), Island(name="b", count=1), store_region="")
    rounds = found.rules.fragments * 86400 / found.rules.sync_every
    assert found.syncer["rounds_day"] == pytest.approx(rounds)
    a, b = found.forecasts
    # Payload: 4.125 bits per parameter up and down, each fragment once per period; headers come on top.
    payload = 1e8 / 8 * 86400 / found.rules.sync_every / 1e9
    every = next(c.value for c in found.choices if c.name == "checkpoint")
    saved = 1e8 * 20.0 / every * 86400 / 1e9
    assert a.up_gb_day - saved == pytest.approx(4.125 * payload, rel=0.05)
    assert a.down_gb_day == pytest.approx(4.125 * payload, rel=0.05)
    assert a.up_gb_day - saved > 4.125 * payload
    assert found.day["up_gb"] == pytest.approx(3 * a.up_gb_day + b.up_gb_day)
    assert found.day["egress_gb"] == pytest.approx(3 * a.down_gb_day), "only what leaves the store's region is paid for"
    assert a.requests_day["create"] == pytest.approx(rounds, rel=0.3)
    assert a.requests_day["put"] == pytest.approx(86400 / every), "checkpoints"
    d = found.day
    assert d["usd"] == pytest.approx(d["requests_usd"] + d["egress_usd"] + d["storage_usd"])
    assert d["requests_usd"] == pytest.approx(d["reads"] / 1000 * 0.0004 + d["writes"] / 1000 * 0.005)


def test_failures_cost_goodput_and_distance_costs_merged_work():
    calm, spot = (planned(1e8, Island(name="a", count=2, mtbf_hours=h)).forecasts[0] for h in (math.inf, 1.0))
    assert calm.goodput == 1.0
    assert spot.goodput == pytest.approx(1 / (1 + (60 + 6) / 3600))
    near, far = (planned(1e8, Island(name="a", count=2, latency_s=s)).forecasts[0] for s in (0.0, 1.0))
    assert far.kept < near.kept <= 1 - 1 / 12 + 1e-9


@pytest.mark.parametrize("latency_s", [0.02, 0.5])
def test_the_work_merged_is_about_what_real_learners_merge(latency_s):
    """In virtual time, where everything else is as planned."""
    found = planned(1e5, Island(name="a", count=4, latency_s=latency_s), fixed=Fixed(sync_every=12, fragments=12))
    shape = Shape(width=32, layers=2, heads=2)
    row = train(base(240, learners=4, shape=shape, noise=0.1, wires=Wires(latency_s=latency_s, spread=0.5)), 0)
    assert found.forecasts[0].kept == pytest.approx(row.kept, abs=0.1)


def test_what_is_known_to_hurt_is_said():
    found = planned(
        3e9,
        Island(name="fast", count=1),
        Island(name="slow", count=1, step_s=5.0),
        Island(name="spot", count=1, mtbf_hours=0.1),
    )
    said = "\n".join(found.warnings)
    assert "slow: its steps take 5.0 times" in said
    assert "spot: failures and restarts cost" in said
    assert "5 GB per request refuse it" in said
    assert any("nobody to merge with" in w for w in planned(1e8, Island(name="a")).warnings)


def test_the_command_plans_from_a_file(tmp_path, capsys):
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


def test_the_command_counts_a_module(capsys):
    assert main(["plan", "--model", "isthmus.demo.gpt:byte_gpt", "--learners", "2"]) == 0
    assert "settings for" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "file", "said"),
    [
        ([], None, "say how large the model is, once"),
        (["--params", "1e9", "--model", "x:y"], None, "say how large the model is, once"),
        (["--params", "-1"], None, "--params -1: must be more than 0"),
        (["--params", "1e9", "--up", "inf"], None, "up_gbit_s must be finite"),
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
    ],
)
def test_what_cannot_be_is_one_clear_line(words, file, said, capsys, tmp_path):
    path = tmp_path / "c.toml"
    if file is not None:
        path.write_text(file)
    assert main(["plan", *(str(path) if word == "FILE" else word for word in words)]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1

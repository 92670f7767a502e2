"""The bandwidth that a utilisation needs: the simulation agrees with closed forms and with published figures."""

import itertools
import json
from pathlib import Path

import pytest

from isthmus.errors import InputError
from isthmus.format.rules import Pace, Rules
from isthmus_lab.forecast import traffic
from isthmus_lab.forecast.bandwidth import (
    DATA_PARALLEL,
    DECOUPLED,
    DILOCO,
    METHODS,
    STREAMING,
    OnTheWire,
    Setup,
    exact,
    required,
    simulate,
)
from isthmus_services.main import main

BF16 = OnTheWire(name="bf16", up_bits=16.0, down_bits=16.0)
INT4 = OnTheWire(name="int4", up_bits=4.0, down_bits=4.0)
LOPSIDED = OnTheWire(name="int4 up, int8 down", up_bits=4.125, down_bits=8.125, up_bytes=2e3, down_bytes=6e3)


@pytest.mark.parametrize("method", METHODS)
def test_the_played_transfers_agree_with_the_closed_form(method: str) -> None:
    grid = itertools.product((0.5, 1.0), (0.0, 0.05, 0.6), (24, 96), (12, 24), (0.0, 1.0, 2.0, 5.0), (0.1, 2.0, 50.0))
    for (step_s, latency_s, period, fragments, overlap, gbit_s), codec in itertools.product(grid, (BF16, LOPSIDED)):
        link = Setup(
            params=2.9e9,
            step_s=step_s,
            latency_s=latency_s,
            sync_every=period,
            fragments=fragments,
            overlap=overlap,
            syncer_s=0.3 * latency_s,
        )
        assert simulate(method, link, codec, gbit_s) == pytest.approx(exact(method, link, codec, gbit_s), rel=1e-9)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("utilization", [0.5, 0.9, 0.99])
def test_the_bandwidth_that_is_required_gives_the_utilisation(method: str, utilization: float) -> None:
    link = Setup(params=1e9, latency_s=0.001)
    needed = required(method, link, BF16, utilization)
    assert simulate(method, link, BF16, needed) == pytest.approx(utilization, rel=1e-6)
    assert simulate(method, link, BF16, 0.9 * needed) < utilization


def test_the_published_figures_come_out_of_one_size() -> None:
    """The published 104, 1.7 and 0.43 Gbit/s at 90 %: the first fixes the model's size, the others follow from it."""
    link = Setup(params=2.87e9)
    assert required(DATA_PARALLEL, link, BF16, 0.9) == pytest.approx(104.0, rel=0.01)
    assert required(DECOUPLED, link, BF16, 0.9) == pytest.approx(1.7, rel=0.03)
    assert required(DECOUPLED, link, INT4, 0.9) == pytest.approx(0.43, rel=0.03)


def test_everything_is_proportional_to_size_and_speed() -> None:
    link = Setup(params=1e9)
    for method in METHODS:
        one = required(method, link, BF16, 0.9)
        assert required(method, Setup(params=2e9), BF16, 0.9) == pytest.approx(2 * one, rel=1e-6)
        assert required(method, Setup(params=1e9, step_s=0.5), BF16, 0.9) == pytest.approx(2 * one, rel=1e-6)


def test_a_longer_overlap_hides_latency_and_a_blocking_method_does_not() -> None:
    near, far = Setup(params=1e8), Setup(params=1e8, latency_s=1.2)
    patient = Setup(params=1e8, latency_s=1.2, overlap=4.0)
    assert simulate(DECOUPLED, near, BF16, 10.0) == 1.0
    assert simulate(DECOUPLED, far, BF16, 10.0) < 1.0
    assert simulate(DECOUPLED, patient, BF16, 10.0) == 1.0
    assert simulate(DATA_PARALLEL, far, BF16, 1e6) < 0.5
    assert simulate(DILOCO, far, BF16, 1e6) == pytest.approx(24 / 26.4)
    with pytest.raises(InputError, match="no bandwidth gives 90%"):
        required(DATA_PARALLEL, far, BF16, 0.9)
    assert simulate(STREAMING, Setup(params=1e9, learners=1), BF16, 0.1) == 1.0


def test_what_passes_besides_the_payload_is_measured_on_the_real_agents() -> None:
    found = traffic.measure(Rules(fragments=4, sync_every=4), Pace(), 2)
    # For each version a learner stores one update and fetches the commit and the value.
    assert found.learner.requests["create"] == pytest.approx(1.0, abs=0.3)
    assert found.learner.requests["get"] == pytest.approx(2.0, abs=0.5)
    assert found.syncer.requests["create"] == pytest.approx(1.0, abs=0.1)
    assert found.syncer.requests["get"] == pytest.approx(2.0, abs=0.5)
    for cost in (found.learner, found.syncer):
        assert 500.0 < cost.up_bytes < 20_000.0
        assert 500.0 < cost.down_bytes < 40_000.0
        assert cost.messages > 1.0
    more = traffic.measure(Rules(fragments=4, sync_every=4), Pace(), 4)
    assert more.learner.down_bytes > found.learner.down_bytes, "a commit names every learner"
    assert traffic.measure(Rules(fragments=4, sync_every=4), Pace(), 2) == found


def test_bits_are_those_of_the_packed_fragment() -> None:
    assert traffic.bits("f32", 1e9, 24) == 32.0
    assert traffic.bits("bf16", 1e9, 24) == 16.0
    assert traffic.bits("int8", 1e9, 24) == pytest.approx(8.125)
    assert traffic.bits("int4", 1e9, 24) == pytest.approx(4.125)


def test_the_command_reports_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, picture = tmp_path / "r.json", tmp_path / "r.png"
    words = ["--params", "2.9e9", "--step-seconds", "1", "--learners", "4", "--utilization", "0.9", "--gbit-s", "1"]
    size = ["--fragments", "4", "--sync-every", "4"]
    assert main(["simulate", "bandwidth", *words, *size, "--json", str(report), "--plot", str(picture)]) == 0
    said = json.loads(report.read_text())
    keys = {"method", "codec", "params", "step_seconds", "learners", "utilization", "gbit_per_s"}
    assert all(keys <= row.keys() for row in said["rows"])
    assert {row["method"] for row in said["rows"]} == set(METHODS)
    assert any(row["codec"] == "isthmus int4 up, int8 down" for row in said["rows"])
    assert {row["gbit_per_s"] for row in said["rows"] if row["utilization"] != 0.9} == {1.0}
    assert said["published"][1]["published"] == 1.7
    assert picture.stat().st_size > 10_000
    assert "published figures" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--params", "0"], "--params 0: must be more than 0"),
        (["--params", "1e9", "--utilization", "1.5"], "--utilization 1.5: a share between 0 and 1"),
        (["--params", "1e9", "--utilization", "0"], "--utilization 0: a share between 0 and 1"),
        (["--params", "1e9", "--gbit-s", "-1"], "--gbit-s -1: must be more than 0"),
        (["--params", "1e9", "--fragments", "48"], "48 fragments within 24 steps"),
        (["--params", "1e9", "--step-seconds", "-1"], "--step-seconds -1: must be more than 0"),
        (["--params", "1e9", "--learners", "1"], "--learners 1: a single learner exchanges no updates"),
        (["--params", "1e30"], "1e+30 parameters cannot be"),
        (["--params", "1e9", "--latency", "50"], "latency_s 50 cannot be (at most 10): it is in seconds, one way"),
        ([], "missing: --params"),
    ],
)
def test_what_cannot_be_is_one_clear_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "bandwidth", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1

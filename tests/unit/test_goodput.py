"""Two derivations of the goodput of failing chips agree with each other and with published figures."""

import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from isthmus_lab.commands.simulate.goodput import predictions
from isthmus_lab.forecast.failures import Repairs, simulate
from isthmus_lab.forecast.goodput import (
    DECOUPLED,
    ELASTIC,
    MODES,
    PUBLISHED,
    PUBLISHED_CHIPS,
    RESTART,
    Cluster,
    exact,
    longest,
    stalls,
    young,
)
from isthmus_services.main import main
from isthmus_services.output import report as reports

pytestmark = pytest.mark.tier("test")

HARSH = Cluster(
    mtbi_years=0.3,
    reconfigure_s=20.0,
    restart_s=90.0,
    rack_mtbi_years=2.0,
    maintenance_days=20.0,
    region_mtbi_years=0.02,
    region_hours=0.5,
)
"""All kinds of failures at once."""


@pytest.mark.parametrize("interrupted", ["absorb", "again"])
@pytest.mark.parametrize(("mode", "learners"), [(RESTART, 1), (ELASTIC, 1), (DECOUPLED, 4)])
def test_the_simulation_agrees_with_the_renewal_argument(mode: str, learners: int, interrupted: str) -> None:
    cluster = Cluster(interrupted=interrupted)
    played = simulate(cluster, mode, 600_000, learners, failures=1500)
    expected = exact(cluster, mode, 600_000, learners)
    # The width of the 95 % interval, and an allowance since repairs take hours and the simulated time is short.
    slack = played.goodput_ci[1] - played.goodput_ci[0] + 0.002
    for share in ("goodput", "waiting", "reconfiguring", "lost"):
        assert getattr(played.shares, share) == pytest.approx(getattr(expected, share), abs=slack), share
    assert played.shares.uptime == pytest.approx(expected.uptime, abs=2 * slack)


@pytest.mark.parametrize(("shape", "power"), [(0.5, 2.0), (1.5, 1.0)])
def test_repairs_matter_by_their_mean_alone(shape: float, power: float) -> None:
    """The exact form does not contain the shape, so the simulation must not depend on it either."""
    cluster = Cluster(repair_shape=shape, repair_power=power)
    played = simulate(cluster, ELASTIC, 600_000, 1, failures=3000)
    slack = played.goodput_ci[1] - played.goodput_ci[0] + 0.002
    assert played.shares.goodput == pytest.approx(exact(Cluster(), ELASTIC, 600_000, 1).goodput, abs=slack)


def test_it_agrees_where_racks_regions_and_maintenance_join_in() -> None:
    played = simulate(HARSH, DECOUPLED, 100_000, 4, failures=6000).shares
    expected = exact(HARSH, DECOUPLED, 100_000, 4)
    assert played.goodput == pytest.approx(expected.goodput, abs=0.02)
    assert played.repairing == pytest.approx(expected.repairing, abs=0.02)


def test_long_outages_of_regions_are_there_from_the_beginning() -> None:
    cluster = Cluster(region_mtbi_years=0.1, region_hours=168.0, reconfigure_s=8.0, restart_s=50.0)
    played = simulate(cluster, DECOUPLED, 400_000, 16, failures=300).shares
    expected = exact(cluster, DECOUPLED, 400_000, 16)
    assert expected.repairing > 0.15
    assert played.repairing == pytest.approx(expected.repairing, abs=0.04)


def test_planned_maintenance_stops_a_job_that_cannot_shrink() -> None:
    calm = Cluster(reconfigure_s=8.0, restart_s=50.0)
    tended = replace(calm, maintenance_days=10.0)
    for mode in (RESTART, ELASTIC):
        played, expected = simulate(tended, mode, 600_000, 1, failures=1500), exact(tended, mode, 600_000, 1)
        assert expected.goodput < exact(calm, mode, 600_000, 1).goodput - 0.02
        slack = played.goodput_ci[1] - played.goodput_ci[0] + 0.004
        assert played.shares.goodput == pytest.approx(expected.goodput, abs=slack)


def test_a_lead_longer_than_any_stall_costs_nothing() -> None:
    def goodput(lead: float | None) -> tuple[float, float]:
        cluster = Cluster(quorum=8, lead=lead)
        played = simulate(cluster, DECOUPLED, 1_200_000, 8, failures=400)
        return played.shares.goodput, exact(cluster, DECOUPLED, 1_200_000, 8).goodput

    none, little, much, never = goodput(0.0), goodput(4.0), goodput(1000.0), goodput(None)
    for at in (0, 1):
        assert none[at] < little[at] < never[at]
        assert much[at] == pytest.approx(never[at])
    assert none[0] == pytest.approx(none[1], abs=0.03)


def test_every_rack_counts_however_large_a_slice_is() -> None:
    small, large = (
        exact(
            Cluster(slice_chips=n, mtbi_years=1e12, rack_mtbi_years=0.05, reconfigure_s=9.0, restart_s=9.0),
            ELASTIC, 1_228_800, 1,
        )
        for n in (1024, 4096)
    )  # fmt: skip
    # As many racks fail, and each failure stops four times as many chips.
    assert large.repairing == pytest.approx(4 * small.repairing, rel=0.3)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cluster", [Cluster(), HARSH, replace(HARSH, quorum=3, lead=0.0, behind=0.2)])
def test_the_shares_add_up(mode: str, cluster: Cluster) -> None:
    for found in (exact(cluster, mode, 300_000, 4), simulate(cluster, mode, 300_000, 4, failures=100).shares):
        assert found.goodput + found.waiting + found.reconfiguring + found.lost == pytest.approx(1.0, abs=1e-9)
        assert 0.0 < found.repairing < found.waiting


def test_only_the_two_stalls_are_fitted_and_the_rest_is_predicted() -> None:
    cluster = Cluster()
    for mode, published in PUBLISHED.items():
        assert exact(cluster, mode, PUBLISHED_CHIPS, 1).goodput == pytest.approx(published, abs=1e-6)
    # Published, but not used to fit: 88 %, 40 %, and an uptime of about 100 % from M = 4 on.
    assert exact(cluster, DECOUPLED, 1_200_000, 8).goodput == pytest.approx(0.88, abs=0.02)
    assert exact(cluster, ELASTIC, 2_400_000, 1).goodput == pytest.approx(0.40, abs=0.02)
    assert exact(cluster, DECOUPLED, 1_200_000, 4).uptime > 0.999
    assert exact(cluster, DECOUPLED, 1_200_000, 2).uptime < 0.96
    assert stalls(replace(cluster, reconfigure_s=3.0))[0] == 3.0


def test_what_should_help_helps_and_what_should_hurt_hurts() -> None:
    usual = Cluster(reconfigure_s=10.0, restart_s=60.0)

    def goodput(learners: int = 8, chips: int = 1_200_000, mode: str = DECOUPLED, cluster: Cluster = usual) -> float:
        return exact(cluster, mode, chips, learners).goodput

    assert goodput(2) < goodput(4) < goodput(8) < goodput(16)
    assert goodput(chips=2_400_000) < goodput() < goodput(chips=600_000)
    assert goodput(cluster=replace(usual, mtbi_years=0.5)) < goodput()
    assert goodput(mode=RESTART) < goodput(mode=ELASTIC) == pytest.approx(goodput(1))
    for worse in (
        replace(usual, repair_hours=24.0),
        replace(usual, speed_deviation=0.05),
        replace(usual, rack_mtbi_years=0.1),
        replace(usual, maintenance_days=7.0),
        replace(usual, region_mtbi_years=0.01),
        replace(usual, quorum=8, lead=0.0),
        replace(usual, interrupted="again"),
    ):
        assert goodput(cluster=worse) < goodput(), worse
    # Without a lead, learners do not wait for a quorum: if it is missed, only the model stands still.
    patient = replace(usual, quorum=8)
    assert exact(patient, DECOUPLED, 1_200_000, 8).uptime < 0.6
    assert exact(patient, DECOUPLED, 1_200_000, 8).goodput == pytest.approx(goodput())


def test_without_failures_only_the_slowest_slice_costs() -> None:
    calm = Cluster(mtbi_years=1e12, reconfigure_s=10.0, restart_s=60.0, speed_deviation=0.0)
    for mode in MODES:
        assert exact(calm, mode, 1_200_000, 8).goodput == pytest.approx(1.0, abs=1e-6)
    assert longest(1, 0.1) == 1.0
    # The expected greatest of ten standard normal draws is 1.5388.
    assert longest(10, 1.0) - 1.0 == pytest.approx(1.5388, abs=0.01)
    assert young(0.5, 100.0) == pytest.approx(10.0)


SMALL = Cluster(slice_chips=8, reconfigure_s=8.3, restart_s=51.2)


@pytest.mark.parametrize("rejoin", ["next", "once", "cheaper"])
@pytest.mark.parametrize("slices", [1, 4, 64])
def test_a_small_restarting_job_is_played_as_it_is_computed(slices: int, rejoin: str) -> None:
    """On average one repaired slice waits for the next restart: 1.5 % of the time of 64 slices, a quarter of 4."""
    cluster = replace(SMALL, rejoin=rejoin)
    played, expected = simulate(cluster, RESTART, 8 * slices, 1, failures=400), exact(cluster, RESTART, 8 * slices, 1)
    assert played.shares.goodput == pytest.approx(expected.goodput, abs=0.0023)
    assert played.shares.waiting == pytest.approx(expected.waiting, abs=0.0023)


def test_a_small_job_restarts_for_a_slice_that_is_back_and_a_large_one_does_not() -> None:
    def goodput(rejoin: str, chips: int) -> float:
        return exact(replace(SMALL, slice_chips=64 if chips > 10_000 else 8, rejoin=rejoin), RESTART, chips, 1).goodput

    for chips in (16, 512, 1_200_000):
        assert goodput("cheaper", chips) == pytest.approx(max(goodput("next", chips), goodput("once", chips)))
    assert goodput("once", 512) - goodput("next", 512) > 0.01
    assert goodput("next", 1_200_000) - goodput("once", 1_200_000) > 0.05


def small_on_the_page() -> Iterator[tuple[str, int, int, float]]:
    """Yield mode, learners, chips and goodput [%] of the table of small clusters in docs/paper.md."""
    table = (
        (Path(__file__).parents[2] / "docs/paper.md").read_text().partition("| goodput | 8 |")[2].partition("\n\n")[0]
    )
    for line in table.splitlines()[2:]:
        name, *cells = (cell.strip() for cell in line.strip("| ").split("|"))
        mode = RESTART if "restarts" in name else ELASTIC if "elastic" in name else DECOUPLED
        for chips, cell in zip((8, 16, 64, 512), cells, strict=True):
            if cell:
                yield (
                    mode,
                    int(name.rpartition("M = ")[2].strip(")") if "M = " in name else 1),
                    chips,
                    float(cell.removesuffix(" %")),
                )


@pytest.mark.parametrize("chips", [8, 16, 64, 512])
def test_a_small_cluster_has_defaults_that_fit(chips: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "r.json"
    assert main(["simulate", "goodput", "--chips", str(chips), "--failures", "40", "--json", str(report)]) == 0
    rows = json.loads(report.read_text())["rows"]
    assert {r["slice_chips"] for r in rows} == {1 if chips < 16 else 8}
    learners = [r["learners"] for r in rows if r["mode"] == DECOUPLED]
    assert learners == [m for m in (1, 2, 4, 8, 16) if m * rows[0]["slice_chips"] <= chips]
    shown = capsys.readouterr().out
    assert f"assumed for {chips} chips; use --slice-chips to change it" in shown
    for row in rows:
        assert row["goodput"] == pytest.approx(row["goodput_exact"], abs=0.004)
    exactly = {(row["mode"], row["learners"]): row["goodput_exact"] for row in rows}
    for mode, many, of, said in small_on_the_page():
        if of == chips:
            assert said == pytest.approx(100.0 * exactly[mode, many], abs=0.06), (mode, many)


def test_the_tables_fit_a_terminal_of_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reports, "PIPE_WIDTH", 80)
    assert main(["simulate", "goodput", "--chips", "2400000", "--learners", "16", "--failures", "20"]) == 0
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert "│ 2,400,000 │ decoupled, M = 16 │" in shown


def test_repairs_have_their_mean_fresh_and_under_way() -> None:
    draw = random.Random(0)
    repairs = Repairs(100.0, 0.7, 2.0)
    fresh = [repairs.draw(draw) for _ in range(40_000)]
    mean = sum(fresh) / len(fresh)
    assert mean == pytest.approx(100.0, rel=0.03)
    # The mean time left of a repair under way is E[X²] / 2 E[X].
    left = [repairs.left(draw) for _ in range(40_000)]
    expected = sum(x * x for x in fresh) / len(fresh) / (2.0 * mean)
    assert sum(left) / len(left) == pytest.approx(expected, rel=0.08)
    assert len(set(left)) > 39_000, "no two slices come back at the same moment"


def test_extreme_choices_are_answered_and_not_a_traceback() -> None:
    assert exact(Cluster(step_s=1e4, reconfigure_s=8.0, restart_s=50.0), ELASTIC, 1_200_000, 1).goodput < 0.5
    assert exact(Cluster(checkpoint_s=2e4, reconfigure_s=8.0, restart_s=50.0), RESTART, 1_200_000, 1).goodput < 0.01


def test_a_seed_gives_the_same_again() -> None:
    assert simulate(HARSH, DECOUPLED, 20_000, 2, failures=50, seed=3) == simulate(
        HARSH, DECOUPLED, 20_000, 2, failures=50, seed=3
    )
    a = simulate(HARSH, DECOUPLED, 20_000, 2, failures=50, seed=4)
    assert a.shares != simulate(HARSH, DECOUPLED, 20_000, 2, failures=50, seed=3).shares


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--chips", "-5"], "-5 chips in 1 learners: each needs at least one slice"),
        (["--chips", "64", "--learners", "2", "--slice-chips", "64"], "at least one slice"),
        (["--chips", "4", "--learners", "8"], "4 chips in 8 learners: each needs at least one slice of 1 chips"),
        (["--rejoin", "maybe"], "choose one of cheaper, next, once"),
        (["--learners", "0"], "each needs at least one slice"),
        (["--repair-shape", "0.001"], "--repair-shape 0.001: must be at least 0.2"),
        (["--region-hours", "inf"], "region_hours must be finite"),
        (["--mtbi-years", "0"], "--mtbi-years 0: must be more than 0"),
        (["--repair-hours", "-1"], "--repair-hours -1: must be at least 0"),
        (["--repair-hours", "1000"], "no stall gives the published 58%"),
        (["--speed-deviation", "nan"], "--speed-deviation nan: must be a number"),
        (["--interrupted", "maybe"], "choose one of absorb, again"),
    ],
)
def test_what_cannot_be_is_one_clear_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "goodput", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_the_command_writes_what_it_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.toml").write_text("[simulate.goodput]\nreconfigure_s = 12.0\nfailures = 50\n")
    report, picture = tmp_path / "r.json", tmp_path / "p.png"
    words = ["--chips", "300000", "--chips", "600000", "--learners", "4", "--sensitivity"]
    files = ["--json", str(report), "--plot", str(picture), "--config", str(tmp_path / "c.toml")]
    assert main(["simulate", "goodput", *words, *files]) == 0
    said = json.loads(report.read_text())
    assert [(r["mode"], r["chips"], r["learners"]) for r in said["rows"]] == [
        (mode, chips, m) for chips in (300_000, 600_000) for mode, m in ((RESTART, 1), (ELASTIC, 1), (DECOUPLED, 4))
    ]
    for row in said["rows"]:
        low, high = row["goodput_ci"]
        assert low < row["goodput"] < high
        assert math.isclose(row["goodput"] + row["waiting"] + row["reconfiguring"] + row["lost"], 1.0)
    assert said["stalls"]["reconfigure_s"] == 12.0
    assert said["predictions"][1]["published"] == 0.88
    assert predictions(replace(Cluster(), repair_hours=0.3)) == [], "of another cluster nothing is published"
    assert {r["parameter"] for r in said["sensitivity"]} >= {"repair_hours", "interrupted", "restart_s"}
    assert picture.stat().st_size > 10_000
    shown = capsys.readouterr().out
    assert "where allocated chips' time goes" in shown
    tables = [line for line in shown.splitlines() if line.startswith(("│", "┃"))]
    assert max(map(len, tables)) <= 80


@pytest.mark.parametrize(("stall_s", "apart"), [("559", True), ("5", False)])
def test_where_the_renewal_argument_fails_the_simulation_counts(
    stall_s: str, apart: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """It counts the stalls at a failure and at the return separately, and both cannot fall into a short repair."""
    words = [
        "--chips",
        "128",
        "--learners",
        "4",
        "--mtbi-years",
        "0.0219",
        "--repair-hours",
        "0.25",
        "--restart-s",
        "60",
    ]
    assert main(["simulate", "goodput", *words, "--reconfigure-s", stall_s, "--failures", "400"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert ("go by the simulation" in said) == apart
    assert "a slice comes back after 0.25 hours (--repair-hours; `isthmus plan` lets a learner" in said

"""The comparison of decoupled training with data parallel agrees with sums by hand, and with the lab's measurements.

The lab's experiment `compare` ran three settings, each in three ways, for the time of 600 steps of a second. The loss
of a data-parallel run is converted into steps by the curve of undisturbed data parallel with as many learners, from
the same experiment; that of a decoupled run by the curve of data parallel at its best inner rates (`lab.toml`). The model's predictions use only the settings and rows of other experiments (`lab.toml`).
"""

import itertools
import json
import math
import re
import statistics
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from isthmus.agent.speed import Speeds
from isthmus.errors import InputError
from isthmus.format.rules import MergeRule
from isthmus_lab.commands.plan import _lasting
from isthmus_lab.forecast import learning
from isthmus_lab.forecast.compare import (
    ACROSS,
    ALONE,
    ASSUMED,
    DECOUPLED,
    ONE_PLACE,
    Comparison,
    Job,
    Way,
    compare,
    held,
)
from isthmus_lab.forecast.island import Island
from isthmus_lab.forecast.learning import Lab, Measured, lab
from isthmus_lab.forecast.outcome import DAY_S
from isthmus_lab.forecast.planner import Plan, plan
from isthmus_lab.forecast.search import Fixed
from isthmus_lab.training.decoupled import COMPARED, IN_MEMORY_S, IN_ONE_PLACE
from isthmus_lab.training.experiment import PARALLEL, base, named
from isthmus_lab.training.setting import WINDOW_TOKENS, Failures, Shape, Wires
from isthmus_lab.training.training import train
from isthmus_services.board.prices import Prices
from isthmus_services.main import main

pytestmark = pytest.mark.tier("test")

RESULTS = Path(__file__).parents[2] / "docs" / "results"
PRICES = Prices(put_per_1000=0.005, get_per_1000=0.0004, storage_gb_month=0.023, egress_gb=0.02, gpu_hour=2.0)


USUAL = Job()
FREE = Fixed()
RDA = Fixed(merge="rda", codec="int4", codec_down="int4")


def planned(params: float, *islands: Island, fixed: Fixed = FREE) -> Plan:
    return plan(params, islands, PRICES, fixed=fixed, speeds=lambda _: Speeds(add_s=2e-9, round_s=3e-8))


def compared(
    params: float, *islands: Island, tokens: float = 1000.0, job: Job = USUAL, fixed: Fixed = FREE
) -> Comparison:
    return compare(planned(params, *islands, fixed=fixed), islands, PRICES, tokens, job)


def test_without_failures_one_place_loses_nothing_and_everything_is_counted_by_hand() -> None:
    found = compared(1e8, Island(name="a", count=4, gpus=2, up_gbit_s=2.0, down_gbit_s=5.0, latency_s=0.0))
    one, across, alone, ours = found.ways
    assert [w.name for w in found.ways] == [ONE_PLACE, ACROSS, ALONE, DECOUPLED]
    assert alone.learnt == pytest.approx(1000 * DAY_S)
    assert alone.usd == pytest.approx(24 * 2.0 * 2)
    assert one.processed == one.learnt == pytest.approx(4 * 1000 * DAY_S)
    assert one.usd == pytest.approx(24 * 2.0 * 8)
    # An all-reduce moves 1.5 times 16 bits of 1e8 parameters over 2 Gbit/s: 1.2 s. It begins after the forward pass, a third
    # of the step, with the first of 128 buckets of gradients.
    assert across.step_s == pytest.approx(1.2 + (1 / 3 + 2 / 3 / 128), rel=0.01)
    assert across.learnt == pytest.approx(one.learnt / across.step_s)
    assert ours.learnt == pytest.approx(ours.processed * ours.worth)
    assert ours.usd > one.usd
    assert found.least < ours.learnt < found.most


@pytest.mark.parametrize("overlapped", [True, False])
@pytest.mark.parametrize("learners", [2, 16])
def test_a_ring_waits_for_each_of_its_latencies_and_the_comparison_for_two(learners: int, overlapped: bool) -> None:
    far = Island(name="a", count=learners, gpus=2, up_gbit_s=2.0, down_gbit_s=2.0, latency_s=0.3)
    job = replace(USUAL, overlapped=overlapped)
    there, here = (compared(1e8, island, job=job) for island in (far, replace(far, latency_s=0.0)))
    step_s = here.way(ACROSS).step_s
    assert here.ring_step_s == pytest.approx(step_s)
    assert there.way(ACROSS).step_s == pytest.approx(step_s + 2 * 0.3)
    assert there.ring_step_s == pytest.approx(step_s + 2 * (learners - 1) * 0.3)


def test_any_failure_stops_a_job_and_its_own_alone_a_learner() -> None:
    fixed = Fixed(sync_every=24)
    calm, failing = (
        compared(1e8, Island(name="a", count=8, mtbf_hours=h, restart_s=60.0), fixed=fixed) for h in (math.inf, 1.0)
    )
    assert calm.way(ONE_PLACE).goodput == 1.0
    # Eight times an hour all learners stand still for a minute: 1 / (1 + 480 / 3600). Checkpoints cost a little more.
    assert failing.way(ONE_PLACE).goodput == pytest.approx(1 / (1 + 480 / 3600), rel=0.06)
    kept = 1 - (12 - 24 * 24 / 6 / 3600) / 3600  # half a period, and a little less as failures are random
    assert failing.way(DECOUPLED).goodput == pytest.approx(
        calm.way(DECOUPLED).goodput * kept / (1 + 79.3 / 3600), rel=1e-6
    )
    # Across the links a job fails as often, reads its checkpoint for 19.3 s, and works for one second of each step.
    across = failing.way(ACROSS)
    assert across.goodput == pytest.approx(1 / (1 + 8 * 79.3 / 3600) / across.step_s, rel=0.06)


def test_learners_of_unequal_speed_are_compared_token_by_token() -> None:
    fast, slow = Island(name="fast", step_s=1.0), Island(name="slow", step_s=3.0)
    fixed = replace(RDA, sync_every=24, fragments=12)
    found = compared(1e8, slow, fast, fixed=fixed)
    one, across, alone, ours = found.ways
    assert alone.learnt == pytest.approx(1000 * DAY_S), "the fast one alone"
    # A step of two learners' tokens, three quarters of them on the fast one, takes 1.5 s on either.
    assert one.step_s == pytest.approx(1.5)
    assert one.processed == pytest.approx((1.0 + 1.0 / 3.0) * 1000 * DAY_S)
    assert one.goodput == 1.0
    assert across.goodput == pytest.approx(one.step_s / across.step_s)
    # Copies take a share of a step's time, twice or thrice less of a long step.
    assert 0.98 * one.processed < ours.processed < one.processed
    assert ours.goodput == pytest.approx(ours.processed / one.processed, rel=0.01)


def test_goodput_is_the_same_figure_in_the_plan_the_comparison_and_the_lab() -> None:
    """Two learners that never fail: across the links, gradients take 1.6 s after each step of a second."""
    wires = Wires(latency_s=0.0, spread=0.0, gbit_s=0.01, parameters=1e6)
    there = named(base(120, learners=2, shape=Shape(width=16, layers=1, heads=1), until="time", wires=wires), "")
    job = named(there, "", **PARALLEL)
    island = Island(name="a", count=2, up_gbit_s=0.01, down_gbit_s=0.01, latency_s=0.0)
    fixed = replace(RDA, sync_every=there.rules.sync_every, fragments=there.rules.fragments)
    forecast = planned(1e6, island, fixed=fixed).forecasts[0]
    found = compared(1e6, island, job=Job(overlapped=False), fixed=fixed)
    assert forecast.goodput == pytest.approx(found.way(DECOUPLED).goodput, rel=1e-12)
    assert forecast.goodput == forecast.utilization
    # The run is short: learners first fetch the model for three seconds of 120, and at its end they wait for each other.
    assert found.way(DECOUPLED).goodput == pytest.approx(train(there, 0).goodput, abs=0.05)
    assert found.way(ACROSS).goodput == pytest.approx(1.0 / 2.6)
    assert found.way(ACROSS).goodput == pytest.approx(train(job, 0).goodput, abs=0.01)
    assert found.way(ONE_PLACE).goodput == train(named(job, "", wires=IN_ONE_PLACE), 0).goodput == 1.0


def test_a_job_that_checkpoints_by_the_clock_loses_half_of_the_time_between() -> None:
    rate = 1 / 1000
    found = held(rate, 0.0, Job(checkpoint_s=0.0, every_s=20.0))
    assert found == pytest.approx(1 - 10 / 1000, abs=2e-4)
    assert held(rate, 100.0, Job(checkpoint_s=0.0, every_s=0.0)) == pytest.approx(1 / 1.1)
    assert held(0.0, 100.0, Job()) == 1.0


@pytest.mark.parametrize(("count", "params", "restart_s"), [(2, 1e8, 600.0), (8, 1e9, 3600.0)])
def test_where_it_begins_to_pay_both_are_alike(count: int, params: float, restart_s: float) -> None:
    island = Island(name="a", count=count, latency_s=0.01, mtbf_hours=50.0, restart_s=restart_s)
    found = compared(params, island, fixed=RDA)
    period = planned(params, island, fixed=RDA).rules
    assert found.mtbf_hours is not None
    assert found.mtbf_hours_at_parity is not None
    assert found.gbit_s is not None
    assert 0 < found.mtbf_hours < found.mtbf_hours_at_parity
    fixed = replace(RDA, sync_every=period.sync_every, fragments=period.fragments)
    at = compared(params, replace(island, mtbf_hours=found.mtbf_hours), fixed=fixed)
    assert at.way(DECOUPLED).learnt == pytest.approx(at.way(ONE_PLACE).learnt, rel=0.01)
    sooner = compared(params, replace(island, mtbf_hours=found.mtbf_hours / 2), fixed=fixed)
    assert sooner.way(DECOUPLED).learnt > sooner.way(ONE_PLACE).learnt
    # Data parallel across links of that speed learns as much as decoupled training on the present links.
    fast = replace(island, up_gbit_s=found.gbit_s, down_gbit_s=found.gbit_s)
    assert compared(params, fast, fixed=fixed).way(ACROSS).learnt == pytest.approx(
        found.way(DECOUPLED).learnt, rel=0.01
    )


def test_links_so_far_that_no_speed_helps_are_never_fast_enough_for_data_parallel() -> None:
    found = compared(1e8, Island(name="a", count=2, latency_s=0.5))
    assert found.gbit_s == math.inf
    assert found.way(ACROSS).learnt < 0.6 * found.way(ONE_PLACE).learnt


def test_a_step_without_tokens_is_refused() -> None:
    with pytest.raises(InputError, match="at least one token"):
        compared(1e8, Island(name="a", count=2), tokens=math.nan)


# --- against the lab --------------------------------------------------------------------------------------------------


WALL_S = 600.0


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, float]]:
    return {
        name: {what: of["mean"] for what, of in spread.items()}
        for name, spread in json.loads((RESULTS / "compare.json").read_text())["summary"].items()
    }


def learnt(rows: dict[str, dict[str, float]], learners: int, loss: float) -> float:
    """Return how many steps of undisturbed data parallel end at this loss, by the curve of the same experiment."""
    curve = [
        (steps, rows[f"undisturbed data parallel: M = {learners}, {steps} steps"]["val_loss"])
        for steps in (75, 150, 300, 600)
    ]
    for (a, high), (b, low) in itertools.pairwise(curve):
        if loss >= low or b == 600:
            return math.exp(math.log(a) + (high - loss) / (high - low) * math.log(b / a))
    raise AssertionError("there is a last pair")


def whole(number: object) -> int:
    assert isinstance(number, int)
    return number


def predicted(place: str) -> dict[str, float]:
    """Return how many steps' worth each way learns in the lab's 600 s, as the model predicts."""
    what = COMPARED[place]
    wires, learners, failures = what["wires"], whole(what["learners"]), what.get("failures")
    assert isinstance(wires, Wires)
    assert isinstance(failures, Failures | None)
    assert wires.parameters is not None
    assert wires.gbit_s is not None
    # A data-parallel step waits for the slowest learner, and the learners' steps vary by 5 %. Decoupled learners do not
    # wait.
    quantile = statistics.NormalDist().inv_cdf((learners - 0.375) / (learners + 0.25))
    restart_s = mtbf_hours = math.inf
    if failures is not None:
        # First the machine is replaced. A decoupled learner then also fetches its checkpoint and the model over its
        # link, 20 and 4 bytes per parameter.
        restart_s, mtbf_hours = failures.repair_s, failures.every_s / 3600.0
    fetch_s = wires.parameters * 4.0 * 8.0 / (wires.gbit_s * 1e9)
    island = Island(
        name=place, count=learners, up_gbit_s=wires.gbit_s, down_gbit_s=wires.gbit_s, latency_s=wires.latency_s,
        mtbf_hours=mtbf_hours, restart_s=0.0 if failures is None else restart_s,
    )  # fmt: skip
    period, fragments = whole(what.get("rules_sync_every", 12)), whole(what.get("rules_fragments", 12))
    fixed = replace(RDA, sync_every=period, fragments=fragments)
    job = Job(checkpoint_s=0.0, every_s=IN_MEMORY_S, overlapped=False)
    tokens = float(WINDOW_TOKENS)
    theirs = compared(
        wires.parameters, replace(island, step_s=1.0 + 0.05 * quantile), tokens=tokens, job=job, fixed=fixed
    )
    ours = compared(wires.parameters, island, tokens=tokens, job=job, fixed=fixed)

    def steps(way: Way, worth: float, wall_s: float) -> float:
        return way.processed * worth / (learners * tokens) * wall_s / DAY_S

    found = planned(wires.parameters, island, fixed=fixed)
    return {
        ONE_PLACE: steps(theirs.way(ONE_PLACE), 1.0, WALL_S),
        ACROSS: steps(theirs.way(ACROSS), 1.0, WALL_S),
        # Learners first fetch the model. The lab's run is short, so tokens have their worth in short runs.
        DECOUPLED: steps(ours.way(DECOUPLED), found.worth.short, WALL_S - fetch_s),
    }


@pytest.mark.parametrize("place", COMPARED)
def test_what_it_says_of_equal_wall_time_is_what_the_lab_measured(
    place: str, rows: dict[str, dict[str, float]]
) -> None:
    learners = whole(COMPARED[place]["learners"])
    model = predicted(place)
    for way, said in model.items():
        # Data parallel has the rate of its own curve; decoupled training stands beside data parallel at its best rate.
        loss = rows[f"{place}: {way}"]["val_loss"]
        measured = lab().steps_for(learners, loss) if way == DECOUPLED else learnt(rows, learners, loss)
        print(place, way, round(said / WALL_S, 3), round(measured / WALL_S, 3))
        assert said / WALL_S == pytest.approx(measured / WALL_S, abs=0.1), way


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_says_what_it_rests_on_and_where_it_pays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = tmp_path / "r.json"
    words = ["--params", "2.9e9", "--learners", "8", "--gpus", "64", "--mtbf-hours", "100", "--compare"]
    words += ["--restart", "900"]
    assert main(["plan", *words]) == 0
    brief = " ".join(capsys.readouterr().out.split())
    assert "--details has what the comparison assumes" in brief
    assert "- GPUs cost the same" not in brief
    assert main(["plan", *words, "--details", "--json", str(said)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert brief.partition("--details has")[0] in shown
    for part in (
        "a day of 64 GPUs in 8 learners, 2.9e+09 parameters",
        "by a lab model of 0.26 million parameters, in its longest runs (",
        "1 (parity) was published at large scale",
        "it pays where each link has less than",
        "1e+06 tokens in a learner's step (--step-tokens)",
        "the comparison assumes: - GPUs cost the same in every place",
        "isthmus init s3://BUCKET/RUN",
    ):
        assert part in shown, part
    assert "with int4 and more bits alone" not in shown
    report = json.loads(said.read_text())
    one, across, alone, ours = report["compare"]["ways"]
    assert f"at most {ours['learnt'] / alone['learnt']:.3g} times it" in shown
    assert ours["learnt"] == pytest.approx(ours["processed"] * report["worth"]["long"])
    assert across["learnt"] < ours["learnt"] < one["learnt"]
    least, most = (report["compare"][name] / one["learnt"] for name in ("least", "most"))
    assert (
        f"verdict: decoupled learns {ours['learnt'] / one['learnt']:.0%} of one place (less; "
        f"{least:.0%} in short runs, {most:.0%} at parity), "
        f"{ours['learnt'] / across['learnt']:.3g} times data parallel across the links (more), and at most "
        f"{ours['learnt'] / alone['learnt']:.3g} times one island alone, for "
        f"{ours['usd'] / alone['usd']:.3g} times the dollars"
    ) in shown
    hours, parity = (report["compare"][name] for name in ("mtbf_hours", "mtbf_hours_at_parity"))
    assert 2.0 < hours < parity < 48.0
    pays = "it pays if a learner fails more often than every"
    assert f"{pays} {hours:.3g} hours; at parity if a learner fails more often than every {parity:.3g} hours" in shown
    assert report["compare"]["gbit_s_at_parity"] == "always"
    assert report["init"].startswith("isthmus init")


def test_failures_that_nobody_would_train_with_are_no_case_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = tmp_path / "r.json"
    words = ["--params", "2.9e9", "--mtbf-hours", "100", "--compare", "--json", str(said)]
    assert main(["plan", *words]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "it never pays here, nor at parity, not even if every learner failed every 30 minutes" in shown
    beside = json.loads(said.read_text())["compare"]
    assert beside["mtbf_hours"] == "never"
    place, ours = beside["goodput_at_least"]
    assert f"because then goodput is {place:.0%} in one place and {ours:.0%} decoupled (a restart there takes" in shown
    assert ours < place, "or it would pay at parity"
    assert "dollars: egress is not known without regions" in shown
    words[words.index("100")] = "0.3"
    assert main(["plan", *words]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "not even if every learner failed every 18 minutes" in shown
    assert "30 minutes" not in shown
    assert json.loads(said.read_text())["compare"]["mtbf_least_hours"] == 0.3


def test_compute_that_no_gpu_has_is_shown_and_called_impossible(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--params", "7e9", "--learners", "3", "--gpus", "24", "--compare"]
    assert main(words) == 0
    shown = " ".join(capsys.readouterr().out.split())
    # 6 · 7e9 parameters · 1e6 tokens in a second on 8 GPUs.
    assert "compute of 3 × learner: 1 s for a step of 1e+06 tokens, that is 5,250 TFLOP/s of each of its GPUs" in shown
    assert "warning: learner: the step time implies 5,250 TFLOP/s of each GPU; no present GPU is so fast" in shown
    assert "at 400 TFLOP/s of each GPU a step takes 13.1 s; give --step-seconds 13.1 " in shown
    assert main([*words, "--step-seconds", "13.1"]) == 0
    shown = capsys.readouterr().out
    assert "400.8 TFLOP/s" in shown
    assert "no present GPU" not in shown


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.5, "0.5 seconds"), (22.6, "22.6 seconds"), (600.0, "10 minutes"), (7200.0, "2 hours"), (3e6, "34.7 days")],
)
def test_a_duration_is_said_in_the_unit_in_which_it_is_read(seconds: float, said: str) -> None:
    assert _lasting(seconds) == said


def test_the_page_has_what_the_comparison_assumes() -> None:
    page = (
        (RESULTS.parent / "compare.md").read_text().partition("<!-- assumed -->")[2].partition("<!-- /assumed -->")[0]
    )
    assert [" ".join(item.split()) for item in page.strip().removeprefix("- ").split("\n- ")] == list(ASSUMED)


def test_what_costs_nothing_has_no_price_per_dollar(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--params", "1e6", "--compare", "--gpu-hour", "0", "--learners", "1"]) == 0
    shown = capsys.readouterr().out
    assert "a day of 8 GPUs in 1 learner, 1e+06 parameters" in shown
    assert re.search(r"learnt per dollar +│ +free │ +free │ +free │ +[0-9.e+]+ │", shown)
    assert "inf" not in shown


def test_beyond_what_the_lab_measured_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["plan", "--params", "1e9", "--learners", "64", "--compare", "--sync-every", "256", "--merge", "rda"]) == 0
    )
    shown = " ".join(capsys.readouterr().out.split())
    assert "M = 64 is beyond the 16 that were measured" in shown
    assert "H = 256 is beyond the 96 that were measured (nearest: M = 16, H = 48, 0.29 after 600 steps)" in shown
    rda, iso = lab(MergeRule.RDA), lab(MergeRule.ISO)
    assert (max(rda.costs), max(iso.costs)) == (16, 16)
    (said,) = re.findall(
        r"beyond H = (\d+) \(isotropic merges: beyond H = (\d+)\)", (RESULTS.parent / "compare.md").read_text()
    )
    assert said == (str(rda.longest_period), str(iso.longest_period))


def test_parity_was_published_for_four_bits_and_more(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--params", "1e9", "--learners", "8", "--codec", "q2"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "1 (parity) was published at large scale, with int4 and more bits alone" in shown


def test_a_comparison_fits_into_a_hundred_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--params", "7e9", "--learners", "3", "--compare"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[:-1])) <= 100, "only the line to copy may be longer"


# --- what a token is worth --------------------------------------------------------------------------------------------


def test_the_labs_rows_are_those_of_its_results() -> None:
    found, iso = lab(), lab("iso")
    for row in (*found.data_parallel, *found.decoupled, *found.overwritten, *found.long, *iso.decoupled, *iso.long):
        if not row.experiment:
            said = "".join(page.read_text() for page in sorted((RESULTS.parent / "experiments").glob("*.md")))
            assert f"{row.loss:.3f}" in said, row
            continue
        of = json.loads((RESULTS / f"{row.experiment}.json").read_text())["summary"][row.setting]
        assert row.loss == pytest.approx(of["val_loss"]["mean"], abs=6e-5), row
        if row not in found.data_parallel:
            assert row.kept == pytest.approx(of["kept"]["mean"], abs=6e-5), row


def test_data_parallel_has_the_best_of_the_recorded_inner_rates() -> None:
    """Beside data parallel at a worse rate, decoupled training would look better than it is. One row, of 8 learners and
    3,000 steps at 0.003, is on the page alone."""
    recorded = {
        name: loss["val_loss"]["mean"]
        for experiment in ("curve", "parity", "longer", "gap")
        for name, loss in json.loads((RESULTS / f"{experiment}.json").read_text())["summary"].items()
    }
    for row in lab().data_parallel:
        m, times = row.learners, row.steps // 600
        names = {75 <= row.steps < 600: f"M = {m}, {row.steps} steps: data parallel", row.steps == 600: f"M = {m}: data parallel",
                 row.steps > 600: f"M = {m}, {times} × as long: data parallel"}  # fmt: skip
        rates = [loss for name, loss in recorded.items() if name.startswith(names[True])]
        rates += [
            loss
            for name, loss in recorded.items()
            if times == 3 and name == f"three times as long: M = {m}, data parallel"
        ]
        assert rates, row
        assert row.seeds == (3 if row.steps <= 600 else 1)
        assert row.loss <= min(rates) + 6e-5, row


def test_the_seeds_that_were_kept_give_the_recorded_means() -> None:
    found = json.loads((RESULTS / "curve.json").read_text())
    assert found["by_seed"].keys() == found["summary"].keys()
    for name, losses in found["by_seed"].items():
        recorded = found["summary"][name]["val_loss"]
        assert (statistics.fmean(losses), statistics.stdev(losses)) == pytest.approx(
            (recorded["mean"], recorded["deviation"])
        )


def test_isotropic_merges_are_worth_more_than_rda_and_no_more_than_parity() -> None:
    for learners in (2, 4, 8, 16):
        for sync_every in (12, 24, 48):
            rda, iso = (lab(merge).worth(learners, sync_every, 0.9) for merge in ("rda", "iso"))
            assert rda.short < iso.short <= 1.0
            assert rda.long < iso.long <= 1.0


def test_a_token_of_a_larger_batch_is_worth_what_the_page_says() -> None:
    """Data parallel of twice as many learners needs more than half of the steps to the same loss."""
    costs = [1.0 - 300.0 / lab().steps_for(2 * m, lab().loss_after(m, 600)) for m in (2, 4, 8)]
    page = (RESULTS.parent / "compare.md").read_text().partition("<!-- doubled -->")[2].partition("<!--")[0]
    assert page == f"{100 * min(costs):.0f} to {100 * max(costs):.0f} %"


def test_every_measured_row_of_learners_and_periods_is_in_the_forecast() -> None:
    """The table of three seeds in docs/experiments/merging.md has the rows that are in no file of results."""
    page = (RESULTS.parent / "experiments" / "merging.md").read_text()
    found = re.findall(r"^\| (24|48), (\d+) \| [*\d. ±]+ \| ([\d.]+) ± [\d.]+ \| ([\d.]+) ± ", page, re.MULTILINE)
    assert len(found) == 8
    for h, m, rda, iso in found:
        for merge, loss in (("rda", rda), ("iso", iso)):
            (row,) = (r for r in lab(merge).decoupled if (r.sync_every, r.learners) == (int(h), int(m)))
            assert row.seeds == 3
            assert row.loss == pytest.approx(float(loss), abs=1e-3)


def test_the_forecast_is_as_close_to_every_row_as_the_page_says() -> None:
    """A row between others is also left out, and forecast from its neighbours."""
    rda, iso = lab(), lab("iso")

    def largest(of: Lab, rows: Iterable[Measured]) -> float:
        return max(abs(of.off(row)) for row in rows)

    left_out = max(of.off_between(row) for of in (rda, iso) for row in of.decoupled)
    found = [
        largest(rda, rda.decoupled), largest(iso, iso.decoupled), left_out, largest(rda, rda.overwritten),
        largest(rda, rda.long), largest(iso, iso.long),
    ]  # fmt: skip
    page = (RESULTS.parent / "compare.md").read_text().partition("<!-- errors -->")[2].partition("<!-- /errors -->")[0]
    rows = [line.strip("| ").split("|") for line in page.strip().splitlines()[2:]]
    assert [row[-1].strip() for row in rows] == [f"{error:.1%}".replace("%", " %") for error in found]
    assert [int(row[1]) for row in rows[:2] + rows[3:]] == [
        len(of) for of in (rda.decoupled, iso.decoupled, rda.overwritten, rda.long, iso.long)
    ]
    assert learning.error() == max(found)
    for row in rda.data_parallel:
        assert rda.paid(row) == pytest.approx(0.0, abs=1e-9)


def test_what_is_overwritten_costs_less_in_longer_runs_too() -> None:
    """Runs of two lengths, each 0.25 s away from the store, compared with runs near it."""
    rows = json.loads((RESULTS / "gap.json").read_text())["summary"]

    def paid(setting: str, steps: int) -> float:
        return lab().paid(Measured(learners=4, steps=steps, loss=rows[setting]["val_loss"]["mean"], seeds=1))

    short = paid("M = 4: 0.25 s away", 600) - paid("M = 4: defaults", 600)
    long = paid("three times as long: M = 4, 0.25 s away", 1800) - paid("three times as long: M = 4, defaults", 1800)
    less = rows["M = 4: defaults"]["kept"]["mean"] - rows["M = 4: 0.25 s away"]["kept"]["mean"]
    assert short == pytest.approx(lab().per_overwritten * less, rel=0.3)
    assert 0.3 < long / short < 0.7


def test_more_learners_longer_periods_and_less_merged_are_worth_less() -> None:
    worth = lab().worth
    for name in ("short", "long"):

        def at(learners: int, sync_every: int, kept: float) -> float:
            found: float = getattr(worth(learners, sync_every, kept), name)  # noqa: B023
            return found

        assert at(1, 12, 0.9) == 1.0 > at(2, 12, 0.9) >= at(8, 12, 0.9) > at(16, 12, 0.9) > at(64, 12, 0.9)
        assert at(8, 12, 0.9) > at(8, 24, 0.9) > at(8, 48, 0.9) > at(8, 96, 0.9) > at(8, 384, 0.9)
        assert at(8, 12, 0.9) > at(8, 12, 0.7) > at(8, 12, 0.4) > at(8, 12, 0.2) > at(8, 12, 0.0) == 0.0
    assert worth(8, 12, 0.9).long > worth(8, 12, 0.9).short
    assert not worth(8, 24, 0.8).beyond


def test_a_plan_says_without_being_asked_how_data_parallel_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = tmp_path / "r.json"
    for gbit_s, words, better in (
        ("100", "data parallel across these links does as well or better: the plan learns", False),
        ("0.1", "beside data parallel across these links, the plan learns", True),
    ):
        links = ["--up", gbit_s, "--down", gbit_s, "--latency", "0.005"]
        assert main(["plan", "--params", "1e9", "--learners", "3", *links, "--json", str(said)]) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert words in shown
        assert (json.loads(said.read_text())["times_data_parallel_across_links"] > 1.05) == better
        assert "matrices of a typical transformer, " in shown
        assert "egress not known, since no learner has a region (--islands)" in shown
        assert ("pass each learner --checkpoint " in shown) == better


@pytest.mark.parametrize("experiment", ["parity", "outer-seeds"])
def test_the_tables_of_three_seeds_have_the_recorded_losses(experiment: str) -> None:
    page = (RESULTS.parent / "experiments" / "merging.md").read_text()
    for name, figures in json.loads((RESULTS / f"{experiment}.json").read_text())["summary"].items():
        loss = figures["val_loss"]
        assert f"{loss['mean']:.3f} ± {loss['deviation']:.3f}" in page, name


def test_the_table_of_codecs_has_the_recorded_losses() -> None:
    page = (RESULTS.parent / "experiments" / "codecs.md").read_text()
    recorded = json.loads((RESULTS / "bits.json").read_text())["summary"]
    names = ("f32", "int8", "int4", "q3", "q2", "q1.5", "q1", "q0.75")
    rows = re.findall(r"^\| (M = [48], [\w ]+) \| (both ways|up|down) \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) == 18
    for setting, way, cells in rows:
        for name, cell in zip(names, cells.split("|"), strict=True):
            if cell.strip():
                loss = recorded[f"{setting}: {name} {'both ways' if name == 'f32' else way}"]["val_loss"]["mean"]
                assert cell.strip() == f"{loss:.3f}", (setting, way, name)


def test_the_gaps_that_pages_name_are_those_of_the_recorded_losses() -> None:
    recorded = json.loads((RESULTS / "parity.json").read_text())["summary"]

    def loss(learners: int, what: str) -> float:
        (found,) = {
            figures["val_loss"]["mean"]
            for name, figures in recorded.items()
            if name.startswith(f"M = {learners}: {what}, inner rate ")
        }
        return float(found)

    def gaps(what: str) -> list[float]:
        return [loss(m, what) - loss(m, "data parallel") for m in (2, 4, 8, 16)]

    iso, rda = gaps("iso by default"), gaps("RDA")
    answers, tried = ((RESULTS.parent / name).read_text() for name in ("experiments.md", "tried.md"))
    in_words = "gap −{:.2f}, −{:.2f}, −{:.2f} and +{:.2f} for 2, 4, 8 and 16 learners".format(*map(abs, iso))
    assert in_words in answers
    assert [gap > 0.0 for gap in iso] == [False, False, False, True]
    assert "gap {:.2f}, {:.2f}, {:.2f} and {:.2f} for 2, 4, 8 and 16 learners".format(*rda) in answers
    assert "{:.2f}, {:.2f}, {:.2f} and {:.2f} nats".format(*rda) in tried
    assert f"{-iso[0]:.2f} and {-iso[1]:.2f} nats below it with 2 and 4,\nand {iso[3]:.2f} above it with 16" in tried


def test_the_table_of_adapters_has_the_best_of_the_recorded_rates() -> None:
    page = (RESULTS.parent / "experiments" / "merging.md").read_text()
    recorded = json.loads((RESULTS / "adapters.json").read_text())["summary"]
    losses = {name: figures["val_loss"]["mean"] for name, figures in recorded.items()}
    rows = re.findall(r"^\| (iso|RDA|Avg), (Nesterov|no momentum, outer rate 0\.28) \| (.*) \|$", page, re.MULTILINE)
    assert len(rows) == 6
    for rule, step, cells in rows:
        how = rule.lower() + (f", {step}" if step != "Nesterov" else "")
        for period, cell in zip((16, 64, 256), cells.split(" | "), strict=True):
            at = f"M = 4, H = {period}: {how}, inner rate "
            best, rate = min((loss, name[len(at) :]) for name, loss in losses.items() if name.startswith(at))
            assert cell == f"{best:.3f} ({rate})"


ROW = re.compile(
    r"(?P<gpus>\d+) GPUs in (?P<learners>\d+)(?: places)?, (?P<params>[\d.e]+)(?: parameters)?, (?P<gbit>\d+) Gbit/s, "
    r"(?P<latency>[\d.]+) s, (?:a failure per )?(?P<mtbf>\d+) h(?:, (?P<restart>\d+) s to start)?"
)
"""What a row of the page's table plans."""


@pytest.mark.tier("all")
def test_the_pages_table_is_what_the_command_says(tmp_path: Path) -> None:
    page = (RESULTS.parent / "compare.md").read_text()
    lines = page.partition("<!-- table -->")[2].partition("<!-- /table -->")[0].strip().splitlines()[2:]
    found = []
    for line in lines:
        row = ROW.search(line)
        assert row, line
        words = ["--params", row["params"], "--learners", row["learners"], "--gpus", row["gpus"], "--up", row["gbit"]]
        words += ["--down", row["gbit"], "--latency", row["latency"], "--mtbf-hours", row["mtbf"]]
        words += ["--restart", row["restart"]] if row["restart"] else []
        words += ["--step-seconds", "1", "--step-tokens", "1e6", "--gpu-hour", "2.5", "--json", str(tmp_path / "plan")]
        assert main(["plan", "--compare", *words]) == 0
        planned = json.loads((tmp_path / "plan").read_text())
        ways = {way["name"]: way for way in planned["compare"]["ways"]}
        one = ways[ONE_PLACE]["learnt"]
        cells = [f"{one:.2e}".replace("e+", "e")]
        cells += [
            f"{share / one:.0%}".replace("%", " %") for share in (ways[ACROSS]["learnt"], ways[DECOUPLED]["learnt"])
        ]
        cells.append(f"{planned['compare']['most'] / one:.0%}".replace("%", " %"))
        assert [cell.strip() for cell in line.strip("|").split("|")[1:]] == cells, line
        found.append((planned, ways[DECOUPLED]["learnt"] / one))
    assert [planned["rules"]["merge"] for planned, _ in found] == ["rda", "rda", "rda", "iso"], "as the page says"
    assert found[3][0]["rules"]["iso_block"] == 512
    beside = [planned["compare"] for planned, _ in found]
    assert f"would need {beside[1]['gbit_s']:.0f} Gbit/s" in " ".join(page.split())
    assert f"more often than every {beside[2]['mtbf_hours']:.1f} hours" in " ".join(page.split())
    assert f"at parity every {beside[2]['mtbf_hours_at_parity']:.0f} hours" in " ".join(page.split())
    shares = [share for _, share in found if share < 1.0]
    assert f"({min(shares):.0%} to {max(shares):.0%} above)".replace("%", "").replace(" above", " % above") in page


def test_one_learner_is_compared_with_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--params", "1e6", "--compare", "--gpu-hour", "2", "--learners", "1"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("one learner has nobody to merge with") == 1
    assert not re.search(r"compared with|is a tie|it pays", shown)


def test_bandwidths_at_which_it_pays_have_the_two_digits_that_are_known(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--learners", "4", "--up", "0.2", "--down", "0.2", "--step-seconds", "1", "--gpus", "8"]
    assert main(["plan", "--params", "1.3e9", "--compare", *words, "--merge", "rda"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    (digits,) = re.findall(r"it pays where each link has less than ([0-9.]+) [GM]bit/s", shown)
    assert len(digits.strip("0").replace(".", "")) <= 2

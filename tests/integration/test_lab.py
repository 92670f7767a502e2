"""The lab's experiments are reproducible, include baselines, and run by `isthmus simulate training`."""

import asyncio
import json
import random
import re
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from isthmus.errors import InputError
from isthmus.format.layout import Layout, Spec, TensorClass
from isthmus.format.records import frame
from isthmus.format.rules import Pace, Rules, outer_for
from isthmus.learner.agent import LearnerAgent
from isthmus.log.creation import Seed
from isthmus.torch import model as torch_model
from isthmus_lab.simulate.conditions import Conditions
from isthmus_lab.simulate.world import Arrays, Times, World, learn, serve
from isthmus_lab.training import trainee, training
from isthmus_lab.training.adapters import LAYERS
from isthmus_lab.training.experiment import base, named
from isthmus_lab.training.experiments import EXPERIMENTS, SEEDS, chosen
from isthmus_lab.training.setting import Failures, Guests, Row, Setting, Shape, Wires
from isthmus_lab.training.summary import summary
from isthmus_lab.training.training import train
from isthmus_services.main import main

pytestmark = pytest.mark.tier("all")

TINY = named(
    base(16, learners=2, shape=Shape(width=16, layers=1, heads=1)), "tiny", rules_fragments=3, rules_sync_every=4
)


def test_a_setting_and_seed_give_the_same_row_again() -> None:
    row = train(TINY, 3)
    assert train(TINY, 3) == row
    assert train(TINY, 4).val_loss != row.val_loss
    assert row.tokens >= TINY.budget
    assert 3.0 < row.val_loss < 6.0
    assert 0.9 < row.goodput <= 1.0
    assert row.participation > 0.9
    assert 4.0 < row.up_bits_per_param < 5.0


@pytest.mark.tier("test")
@pytest.mark.parametrize("after_s", [0.0, 5.0])
def test_a_syncer_that_fails_ends_the_run_with_its_error(after_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its learners would train on: for an hour of their time, and for nothing."""
    steps = 0

    async def fails(*_: object) -> None:
        await asyncio.sleep(after_s)
        raise RuntimeError("the syncer's error")

    def counted(*arguments: Any) -> Any:
        nonlocal steps
        steps += 1
        return step(*arguments)

    step = trainee.Trained.step
    monkeypatch.setattr(training, "serve", fails)
    monkeypatch.setattr(trainee.Trained, "step", counted)
    with pytest.raises(RuntimeError, match="the syncer's error"):
        train(named(TINY, "", steps=3600), 0)
    assert steps <= 20


class Voice(msgspec.Struct):
    words: str


def test_a_small_model_stands_for_a_large_one_by_its_payloads_alone() -> None:
    """A commit is equally large for both models. If its size were scaled too, commits would take a third of a link."""
    world = World("payload")

    async def seconds(size: int) -> tuple[float, float, int]:
        made = frame.draft(frame.Kind.SEGMENT, Voice(words="x" * 300), size)
        conditions = Conditions(up_bytes_s=100.0, down_bytes_s=100.0, payload_scale=50.0, timeout_s=1e6)
        store = world.ports(world.process(f"p{size}"), conditions).wire
        began = world.clock.time()
        await store.put("a", made.blob)
        put = world.clock.time()
        await store.get("a")
        return put - began, world.clock.time() - put, len(made.blob) - size

    try:
        for size in (0, 1000):
            up, down, head = world.clock.run_until_complete(seconds(size))
            assert up == pytest.approx((head + 50 * size) / 100.0)
            assert down == pytest.approx(up)
    finally:
        world.clock.close()


def test_a_name_decides_nothing_and_everything_else_does() -> None:
    assert named(TINY, "other").key(0) == TINY.key(0)
    keys = {TINY.key(0), TINY.key(1), named(TINY, "", peak_lr=1.0).key(0), named(TINY, "", pace_grace=0.1).key(0)}
    assert len(keys) == 4


def test_experiments_are_whole() -> None:
    for name, experiment in EXPERIMENTS.items():
        settings = chosen(name, "paper", None)
        assert len({s.name for s in settings}) == len(settings)
        for s in settings:
            assert s.rules.check() is s.rules
            assert s.pace.check() is s.pace
        quick = chosen(name, "quick", None)
        assert 2 <= len(quick) <= 8
        assert set(experiment.quick) <= {s.name for s in settings}
    with pytest.raises(InputError, match="choose one of heterogeneous"):
        chosen("nonsense", "quick", None)


def test_adapters_alone_are_trained_and_the_model_below_them_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainee, "BASE_STEPS", 60)
    trainee._trained_on_code.cache_clear()
    adapted = named(TINY, "adapters", adapters=2, steps=60, peak_lr=1e-2, shape=Shape(width=48, layers=1, heads=1))
    start = trainee.build(adapted, 0)
    trained = {name for name, p in start.named_parameters() if p.requires_grad}
    shapes = {name: tuple(p.shape) for name, p in start.named_parameters() if name in trained}
    layers = [f"blocks.{b}.{layer}" for b in range(adapted.shape.layers) for layer in LAYERS]
    assert trained == {f"{layer}.{part}" for layer in layers for part in "ab"}
    width = adapted.shape.width
    assert (shapes["blocks.0.up.a"], shapes["blocks.0.up.b"]) == ((2, width), (4 * width, 2))
    below = trainee.build(named(adapted, "", adapters=0), 0)
    below.load_state_dict(trainee._trained_on_code(adapted.shape, 0))
    assert trainee.val_loss(start, adapted) == pytest.approx(trainee.val_loss(below, adapted), abs=1e-5)
    ends, load = list[torch.nn.Module](), torch_model.load

    def loaded(model: torch.nn.Module, *more: Any) -> None:
        load(model, *more)
        ends.append(model)

    monkeypatch.setattr(torch_model, "load", loaded)
    row = train(adapted, 0)
    assert row.val_loss < trainee.val_loss(start, adapted) - 0.02, "it learns"
    (end,) = ends
    for name, p in end.named_parameters():
        assert torch.equal(p, start.get_parameter(name)) == (name not in trained), name
    whole = train(named(adapted, "data parallel", method="data-parallel"), 0)
    assert whole.val_loss < trainee.val_loss(start, adapted) - 0.02


def test_failures_cost_goodput_and_are_made_up_for() -> None:
    failing = named(TINY, "failing", steps=40, failures=Failures(every_s=10.0, repair_s=5.0, checkpoint_s=3.0))
    row, calm = train(failing, 0), train(named(failing, "calm", failures=None), 0)
    assert row.goodput < calm.goodput - 0.1
    assert row.wall_virtual_s > calm.wall_virtual_s
    assert row.tokens >= failing.budget
    assert failing.failures is not None
    for moments in ("peer", "mean", "fresh"):
        changed = msgspec.structs.replace(failing.failures, moments=moments)
        assert train(named(failing, moments, failures=changed), 0).tokens >= failing.budget


def test_learners_that_fail_before_they_have_read_their_checkpoints_end_the_run() -> None:
    thin, often = Wires(gbit_s=0.01, parameters=1e8), Failures(every_s=30.0, repair_s=5.0, checkpoint_s=10.0)
    with pytest.raises(InputError, match=r"^never: after 100 times .* 0% of its tokens are trained: .*every_s.*gbit_s"):
        train(Setting(name="never", learners=2, steps=20, wires=thin, failures=often), 0)


def test_any_failure_stops_data_parallel_and_takes_back_what_no_checkpoint_has() -> None:
    job = named(TINY, "job", steps=60, until="time", method="data-parallel", wires=Wires(latency_s=0.0))
    calm = train(job, 0)
    assert (calm.tokens, calm.wall_virtual_s, calm.goodput, calm.uptime) == (60 * 2 * 128, 60.0, 1.0, 1.0)
    failing = named(job, "failing", failures=Failures(every_s=20.0, repair_s=4.0, checkpoint_s=5.0))
    row = train(failing, 0)
    assert train(failing, 0) == row
    # The run ends by the clock, even during a repair.
    assert row.wall_virtual_s == 60.0
    assert row.tokens < calm.tokens
    assert row.uptime < 0.95
    taken_back = row.tokens / calm.tokens - row.goodput
    assert taken_back > 0.01, "some tokens must have been processed again"
    kept = named(failing, "", failures=Failures(every_s=20.0, repair_s=4.0, checkpoint_s=0.1))
    assert train(kept, 0).tokens / calm.tokens - train(kept, 0).goodput < taken_back
    more = named(failing, "", learners=4)
    assert train(more, 0).goodput < row.goodput, "with twice the learners it fails twice as often"


def test_by_the_clock_a_thin_link_leaves_data_parallel_few_steps() -> None:
    wires = Wires(latency_s=0.0, gbit_s=0.01, parameters=1e6)
    row = train(named(TINY, "thin", steps=60, until="time", method="data-parallel", wires=wires), 0)
    # Each step sends 16 bits of a million parameters once, at 10 Mbit/s: 1.6 s besides the 1 s of the step.
    assert row.tokens == int(60 / 2.6) * 2 * 128
    assert row.goodput == pytest.approx(23 / 60)


def test_guests_shorten_the_run() -> None:
    alone = named(TINY, "alone", steps=40)
    helped = named(alone, "helped", guests=Guests(count=2, come=0.25, go=0.75))
    assert train(helped, 0).wall_virtual_s < 0.95 * train(alone, 0).wall_virtual_s


@pytest.mark.parametrize("method", ["decoupled", "data-parallel"])
def test_muon_is_an_inner_optimizer_too(method: str) -> None:
    setting = named(TINY, "muon", steps=30, inner="muon", method=method)
    row = train(setting, 0)
    assert row.val_loss < 5.0 < np.log(256)
    assert row.val_loss != train(named(setting, "", inner="adamw"), 0).val_loss


def test_data_parallel_waits_for_the_slowest_and_for_its_gradients() -> None:
    mixed = named(TINY, "", method="data-parallel", step_s=(1.0, 2.0))
    row = train(mixed, 0)
    assert row.goodput == pytest.approx(0.75, abs=0.02)
    thin = named(mixed, "", step_s=(1.0,), wires=Wires(latency_s=0.0, gbit_s=1.0, parameters=1e9))
    # Each of two learners sends and gets half of the parameters twice, two bytes for each: 16 Gbit at 1 Gbit/s.
    assert train(thin, 0).wall_virtual_s == pytest.approx(16 * (1.0 + 16.0), rel=0.01)


def test_experts_learn_and_are_counted() -> None:
    row = train(named(TINY, "experts", shape=Shape(width=16, layers=1, heads=1, experts=4)), 0)
    assert 0.0 <= row.extra["idle_experts"] <= 1.0


def test_spread_is_over_seeds() -> None:
    row = train(TINY, 0)
    rows = [msgspec.structs.replace(row, seed=s, val_loss=loss) for s, loss in enumerate((1.0, 2.0, 3.0))]
    assert summary(rows)["tiny"]["val_loss"].mean == 2.0
    assert summary(rows)["tiny"]["val_loss"].deviation == 1.0


def test_the_command_reports_draws_and_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> dict[str, Any]:
        cache, report, picture = tmp_path / "cache", tmp_path / "report.json", tmp_path / "picture.png"
        size = ("--scale", "quick", "--steps", "3", "--workers", "2")
        where = ("--cache", str(cache), "--json", str(report), "--plot", str(picture))
        code = main(["simulate", "training", "codecs", *size, *where])
        assert code == 0
        assert picture.stat().st_size > 10_000
        found: dict[str, Any] = json.loads(report.read_text())
        return found

    first = run()
    assert "up: int4" in capsys.readouterr().out
    names = {s.name for s in chosen("codecs", "quick", 3)}
    assert {row["setting"] for row in first["rows"]} == names == first["summary"].keys()
    wanted = set(Row.__struct_fields__) - {"kept", "extra"}
    assert wanted <= first["rows"][0].keys()
    kept = sorted((tmp_path / "cache").iterdir())
    assert len(kept) == len(names)
    stamps = {path.name: path.stat().st_mtime_ns for path in kept}
    kept[0].unlink()
    kept[1].write_text("{ damaged")
    assert run() == first
    again = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    assert {name for name in stamps if again[name] != stamps[name]} == {kept[0].name, kept[1].name}


def test_bad_choices_are_one_line_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "training", "nonsense"]) == 2
    assert "choose one of heterogeneous" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "cooking", "codecs"])
    assert ended.value.code == 2
    assert main(["simulate", "training", "codecs", "--seeds", "0"]) == 2
    assert main(["simulate", "training", "codecs", "--only", "sideways*"]) == 2
    said = capsys.readouterr().err
    assert '--only "sideways*": codecs has no setting with such a name; it has "' in said
    assert all(f'"{setting.name}"' in said for setting in chosen("codecs", "paper", None))


def test_part_of_an_experiment_is_run_by_names(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    few = ("--steps", "2", "--seeds", "1", "--only", "down: bf*", "--cache", str(tmp_path), "--json", str(report))
    assert main(["simulate", "training", "codecs", *few]) == 0
    assert [row["setting"] for row in json.loads(report.read_text())["rows"]] == ["down: bf16"]


def test_outer_rates_are_shown_where_they_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = "learners = 2\nsteps = 4\nfragments = 3\nsync_every = 4\nshape = {width = 16, layers = 1, heads = 1}\n"
    (tmp_path / "my.toml").write_text(
        tiny + '[cases.mean]\nmerge = "avg"\nouter_lr = 0.7\nouter_momentum = 0.5\n[cases.iso]\nmerge = "iso"\n'
    )
    words = ["simulate", "training", str(tmp_path / "my.toml"), "--seeds", "1", "--workers", "1"]
    words += ["--cache", str(tmp_path / "cache"), "--json", str(tmp_path / "r.json")]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "0.7, 0.5" in said
    assert "outer: the outer rate and momentum" in " ".join(said.split())
    lr, momentum = outer_for("iso", 4)
    assert json.loads((tmp_path / "r.json").read_text())["outer"] == {
        "mean": {"rate": 0.7, "momentum": 0.5},
        "iso": {"rate": lr, "momentum": momentum},
    }
    assert main([*words, "--only", "iso"]) == 0
    assert "outer:" not in capsys.readouterr().out


class _Steps:
    """Trains nothing; a step takes about `step_s`."""

    def __init__(self, step_s: float, draw: random.Random) -> None:
        self.step_s, self.draw = step_s, draw

    def begin(self, agent: LearnerAgent, layout: Layout) -> tuple[Arrays, None]:
        self.model = Arrays(layout)
        return self.model, None

    def duration(self) -> float:
        return self.step_s * self.draw.uniform(0.9, 1.1)

    def step(self, number: int) -> tuple[int, float]:
        for values in self.model.values:
            values -= np.float32(0.01)
        return 10, 1.0

    def enough(self, agent: LearnerAgent) -> bool:
        return False


@pytest.mark.parametrize(("lead", "far"), [(None, True), (0.0, False)])
def test_with_a_lead_nobody_runs_ahead_of_who_is_slow_to_answer(lead: float | None, far: bool) -> None:
    """One learner answers calls up to 30 s later, at its step boundary. If `lead` is set, the other waits for it."""
    world = World("lead")
    pace = Pace(quorum=2, lead=lead, grace=0.0, heartbeat_s=5.0, silence_s=100.0)
    if lead is not None:
        pace = msgspec.structs.replace(pace, overlap=0.0)
    agents: dict[str, LearnerAgent] = {}

    async def body() -> dict[str, Times]:
        spec = Spec("w", (8,), "float32", TensorClass.DENSE)
        rules = Rules(fragments=1, sync_every=4)
        await world.create(Seed([spec], [np.zeros(8, np.float32)], {}, rules, pace))
        good = Conditions(latency_s=0.01)
        syncer = world.process("s")
        syncer.start(serve(world.ports(syncer, good, good), "s", asyncio.Event()))
        times: dict[str, Times] = {}
        for name, step_s in (("quick", 1.0), ("slow", 30.0)):
            process, times[name] = world.process(name), Times()
            steps = _Steps(step_s, process.random)
            process.start(
                learn(
                    world.ports(process, good, good), name, steps, times[name],
                    started=partial(agents.__setitem__, name),
                )
            )  # fmt: skip
        await asyncio.sleep(600.0)
        return times

    times = world.clock.run_until_complete(body())
    world.clock.close()
    assert (times["quick"].steps > 400) == far
    assert (times["quick"].waited_s > 200.0) != far
    assert agents["quick"].downlink.known[0].version > 5


def test_the_page_has_the_cost_of_every_experiment() -> None:
    page = (Path(__file__).parents[2] / "docs/experiments.md").read_text()
    rows = re.findall(r"^\| (\[?`.*?) \| .* \| ([\d, ]+) \| ([\d., ]+) \|$", page, re.M)
    said: dict[str, tuple[str, str]] = {}
    for names, runs, hours in rows:
        found = re.findall(r"`([a-z-]+)`", names)
        said |= dict(zip(found, zip(runs.split(", "), hours.split(", "), strict=True), strict=True))
    seeds = SEEDS["paper"]
    costs = {name: chosen(name, "paper", None) for name in EXPERIMENTS}
    assert said == {
        name: (f"{seeds * len(found)}", f"{seeds * sum(s.core_s for s in found) / 3600:.2g}")
        for name, found in costs.items()
    }

"""Real Trainers of frameworks share a run and continue after a kill; hooks count their steps and tokens."""

import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import isthmus
from e2e.test_processes import ROOT, commits_of, processes, wait_for
from e2e.test_ranks import torchrun
from isthmus.errors import InputError
from isthmus.integrations.hook import StepHook, Tokens, raw, require_own_weights, require_whole_batches
from isthmus.torch.shard_transfer import _as
from isthmus_services.demo import judge
from isthmus_services.main import main

TRAINER = str(Path(__file__).parent / "trainer_learner.py")


def notes(path: Path, rank: int = 0) -> list[tuple[str, int, list[int], float]]:
    return [tuple(json.loads(line)) for line in path.with_suffix(f".{rank}").read_text().splitlines()]


@pytest.mark.timeout(600)
def test_trainers_share_a_run_and_go_on_after_kill_9(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    steps = 400
    with processes(tmp_path) as p:
        p.isthmus("s", "syncer", run, "--wait")
        start = (sys.executable, TRAINER, run, "a", str(steps), str(tmp_path / "a"))
        first = p.start("a1", *start)
        wait_for((tmp_path / "run" / "run").exists, "the first one creates the run")
        ranks = p.start("b", *torchrun(2), TRAINER, run, "b", "120", str(tmp_path / "b"))
        wait_for(lambda: list((tmp_path / "run" / "learners" / "a").glob("*/checkpoints/*"))[1:], "a has checkpoints")
        wait_for(lambda: len(notes(tmp_path / "a")) > 60, "a has trained")
        os.kill(first.pid, signal.SIGKILL)
        p.ends(p.start("a2", *start))
        p.ends(ranks)
        taken = len(notes(tmp_path / "a"))
        p.ends(p.start("a3", *start))
        assert len(notes(tmp_path / "a")) == taken, "a learner that has taken all its steps takes no more"
        assert f"a has trained {steps} steps" in p.said("a3")
        said = p.said("a2")
        assert f"a has trained {steps} steps" in said
        assert "isthmus/version" in said
        assert "b has trained 120 steps" in p.said("b")
    found = notes(tmp_path / "a")
    lives = {life: {step: (lines, rate) for of, step, lines, rate in found if of == life} for life, *_ in found}
    before, after = lives.values()
    begun = min(after)
    assert 0 < begun <= max(before) + 1, "the second incarnation continued from the checkpoint"
    assert sorted(after) == list(range(begun, steps)), "it took each remaining step once"
    for step in before.keys() & after.keys():
        assert after[step] == before[step], "a repeated step reads the same lines, at the same rate"
    # Over both incarnations, each epoch has every line once.
    read = [line for step in range(steps) for line in (after if step >= begun else before)[step][0]]
    for epoch in range(0, len(read), 64):
        assert sorted(read[epoch : epoch + 64]) == list(range(64))
    assert [n for *_, lines, _ in notes(tmp_path / "b", 0) for n in lines] != [
        n for *_, lines, _ in notes(tmp_path / "b", 1) for n in lines
    ], "ranks read different lines"
    commits = commits_of(run)
    assert judge.continuous(commits)
    assert {i.learner for c in commits for i in c.header.inputs} == {"a", "b"}
    tokens = {i.learner: i.tokens / i.steps for c in commits for i in c.header.inputs}
    assert tokens == {"a": 2 * 4 * 12, "b": 2 * 2 * 4 * 12}, "tokens of all micro-batches and all ranks count"
    assert main(["replay", run]) == 0
    losses = [float(x.split("'loss': '")[1].split("'")[0]) for x in said.splitlines() if "'loss': '" in x]
    assert losses[-1] < 2.0 < math.log(80)
    assert math.log(80) > losses[0] > losses[-1], "the first loss is a mean of the steps since the restart"


def test_what_would_be_sent_by_mistake_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from isthmus.integrations.transformers import IsthmusCallback

    arguments = TrainingArguments(
        "out", load_best_model_at_end=True, eval_strategy="steps", report_to="none", use_cpu=True
    )
    with pytest.raises(InputError, match="load_best_model_at_end puts earlier weights into the model"):
        IsthmusCallback("run", learner="a").on_train_begin(arguments, TrainerState(), TrainerControl())
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    alone = TrainingArguments("out", report_to="none", use_cpu=True)
    with pytest.raises(InputError, match="one of 2 processes of a job, and the Trainer sees 1"):
        IsthmusCallback("run", learner="a").on_train_begin(alone, TrainerState(), TrainerControl())
    with pytest.raises(InputError, match="the Trainer sets steps= itself"):
        IsthmusCallback("run", learner="a", steps=3)


@pytest.mark.timeout(300)
def test_the_example_trains_beside_a_loop_of_accelerate_and_a_plain_one(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    with processes(tmp_path) as p:
        p.isthmus("s", "syncer", run, "--wait")

        def started(name: str, life: str = "") -> Any:
            example = str(ROOT / "examples" / f"{name}.py")
            return p.start(name + life, sys.executable, example, run, "--learner", name, "--steps", "100")

        first = started("accelerate_loop")
        others = [started("trainer"), started("plain_loop")]
        checkpoints = tmp_path / "run" / "learners" / "accelerate_loop"
        wait_for(lambda: list(checkpoints.glob("*/checkpoints/*")), "it has a checkpoint")
        os.kill(first.pid, signal.SIGKILL)
        for process in (started("accelerate_loop", "-again"), *others):
            p.ends(process)
    commits = commits_of(run)
    assert judge.continuous(commits)
    lives = {(i.learner, i.incarnation) for c in commits for i in c.header.inputs}
    assert lives >= {("trainer", 1), ("plain_loop", 1), ("accelerate_loop", 2)}
    stated = {i.learner for c in commits for i in c.header.inputs if i.loss is not None}
    assert stated == {"trainer", "plain_loop", "accelerate_loop"}
    assert main(["status", run, "--ledger", "--json", str(tmp_path / "status.json")]) == 0
    ledgers = json.loads((tmp_path / "status.json").read_text())["ledgers"]
    tokens = {"trainer": 16 * 24, "accelerate_loop": 2 * 8 * 24, "plain_loop": 16 * 24}
    assert ledgers.keys() == tokens.keys()
    for name, ledger in ledgers.items():
        assert ledger["processed"] == 100 * tokens[name] + ledger["tokens_trained_again"]
        for row in ledger["fragments"]:
            parts = ("merged", "overwritten", "late", "pending", "rejected", "lost")
            assert sum(row[part] for part in parts) == ledger["processed"], (name, row)
    assert main(["replay", run]) == 0


@pytest.mark.timeout(300)
def test_what_frameworks_shard_by_fsdp2_is_one_learner(tmp_path: Path) -> None:
    run, learner = str(tmp_path / "run"), str(Path(__file__).parent / "fsdp2_learner.py")
    with processes(tmp_path) as p:
        p.isthmus("s", "syncer", run, "--wait")
        started = [p.start(how, *torchrun(2), learner, run, how, "40") for how in ("trainer", "accelerate")]
        for process in started:
            p.ends(process)
        for how in ("trainer", "accelerate"):
            assert p.said(how).count(f"{how} has trained 40 steps, sharded") == 2
    commits = commits_of(run)
    assert judge.continuous(commits)
    tokens = {i.learner: i.tokens / i.steps for c in commits for i in c.header.inputs}
    assert tokens == {"trainer": 2 * 8 * 24, "accelerate": 2 * 2 * 8 * 24}, (
        "tokens of all ranks and micro-batches count"
    )
    assert main(["replay", run]) == 0


class Counted:
    """A link that records the tokens of each reported step."""

    rate = 1.0

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.closed: bool | None = None

    def step(self, tokens: int, *, loss: float | None = None) -> None:
        self.steps.append(tokens)

    def of_all_ranks(self, count: int) -> int:
        return count

    def close(self, *, done: bool = True) -> None:
        self.closed = done


class Reads(nn.Module):
    """A model that takes tokens by keyword or by position."""

    main_input_name = "input_ids"

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 3)

    def forward(self, mask: torch.Tensor | None = None, input_ids: torch.Tensor | None = None) -> torch.Tensor:
        assert input_ids is not None
        return self.table(input_ids).sum()  # type: ignore[no-any-return]


IDS = torch.arange(8).view(2, 4)


def hooked(optimizer: Any, model: nn.Module, **options: Any) -> tuple[Counted, StepHook]:
    link = Counted()
    return link, StepHook(link, model, optimizer, **options)  # type: ignore[arg-type]


def test_steps_that_a_scaler_skips_are_no_steps() -> None:
    model = Reads()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    link, hook = hooked(optimizer, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    for turn in range(6):
        loss = model(input_ids=IDS)
        scaler.scale(loss * (torch.inf if turn in (1, 4) else 1.0)).backward()
        before = model.table.weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(before, model.table.weight) == (turn in (1, 4))
    assert link.steps == [8, 16, 8, 16], "tokens of a skipped step count with the next step that is taken"
    hook.close(done=False)
    assert link.closed is False
    model(input_ids=IDS).backward()
    optimizer.step()
    assert len(link.steps) == 4, "close removes the hook"


def test_a_step_is_warmed_up_and_the_schedule_does_not_see_it() -> None:
    model = Reads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    link, hook = hooked(optimizer, model)
    link.rate = 0.25
    model(input_ids=IDS).backward()
    before = model.table.weight.detach().clone()
    optimizer.step()
    assert model.table.weight.grad is not None
    assert torch.equal(model.table.weight, before - 0.125 * model.table.weight.grad)
    assert optimizer.param_groups[0]["lr"] == 0.5
    # After warm-up, a step uses the rate that the schedule set, and the rate stays.
    link.rate, optimizer.param_groups[0]["lr"] = 1.0, 0.25
    before = model.table.weight.detach().clone()
    optimizer.step()
    assert torch.equal(model.table.weight, before - 0.25 * model.table.weight.grad)
    assert optimizer.param_groups[0]["lr"] == 0.25
    hook.close()
    assert not optimizer._optimizer_step_pre_hooks


def test_a_fused_optimizer_under_a_scaler_is_refused_by_name() -> None:
    fused = torch.optim.AdamW(Reads().parameters(), fused=True)
    require_own_weights(fused, None)
    with pytest.raises(
        InputError, match=r"torch.optim.adamw.AdamW is fused and a GradScaler scales its gradients.*fused=False"
    ):
        require_own_weights(fused, torch.amp.GradScaler("cpu"))
    require_own_weights(torch.optim.AdamW(Reads().parameters()), torch.amp.GradScaler("cpu"))


def test_an_optimizer_with_weights_of_its_own_is_refused_by_name() -> None:
    class Mastered(torch.optim.SGD):
        master_params = ("kept",)

    with pytest.raises(InputError, match=r"Mastered keeps master weights of its own \(master_params\)"):
        require_own_weights(Mastered(Reads().parameters()), None)


def test_tokens_are_those_that_are_read_in_training() -> None:
    model = Reads()
    tokens = Tokens(model)
    model(None, IDS)
    model(input_ids=IDS)
    model.eval()
    model(input_ids=IDS)
    model.train()
    assert tokens.taken() == 16
    assert tokens.taken() == 1, "a step without tokens counts as one: a weight needs at least one token"
    tokens.close()
    model(input_ids=IDS)
    assert tokens.taken() == 1
    counted = Tokens(model, lambda args, kwargs: 5)
    model(input_ids=IDS)
    assert counted.taken() == 5
    plain = nn.Linear(3, 2)
    elements = Tokens(plain)
    plain(torch.ones(4, 3))
    assert elements.taken() == 12


def test_reports_may_wait_for_the_loop() -> None:
    model = Reads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    link, hook = hooked(optimizer, model, now=False)
    assert not hook.report()
    model(input_ids=IDS).backward()
    optimizer.step()
    assert link.steps == []
    assert hook.report()
    assert link.steps == [8]
    optimizer.step()
    optimizer.step()
    with pytest.raises(InputError, match="2 optimizer steps were taken between two reports"):
        hook.report()


def test_what_wraps_no_optimizer_is_refused() -> None:
    with pytest.raises(InputError, match=r"an object wraps no torch\.optim\.Optimizer"):
        raw(object())


@pytest.mark.timeout(120)
def test_accelerate_counts_steps_not_micro_batches_and_compiled_models_are_the_same(tmp_path: Path) -> None:
    from accelerate import Accelerator

    from isthmus.integrations.accelerate import join

    run = str(tmp_path / "run")
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    plain = Reads()
    model, optimizer = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=0.1))
    model = torch.compile(model, backend="eager")
    with join(accelerator, run, model, optimizer, learner="a", create=isthmus.Rules(fragments=1)) as learner:
        for _ in range(8):
            with accelerator.accumulate(model):
                accelerator.backward(model(input_ids=IDS))  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
        assert (learner.link.steps_done, learner.link.tokens_seen) == (4, 64)
    assert [spec.name for spec in learner.link.run.layout.specs] == ["table.weight"]


def test_ranks_that_read_one_batch_together_are_refused() -> None:
    class Mesh:
        mesh_dim_names = ("dp", "tp")

        def __init__(self, *shape: int) -> None:
            self.shape = shape

    model = Reads()
    weight: Any = model.table.weight
    for shape in ((4, 1), (1, 1)):
        weight.device_mesh = Mesh(*shape)
        require_whole_batches(model)
    weight.device_mesh = Mesh(2, 2)
    with pytest.raises(InputError, match=r"table\.weight lies on a mesh with tensor or context parallelism"):
        require_whole_batches(model)


def test_blocks_of_any_dtype_lie_behind_each_other() -> None:
    """Store three numbers of two bytes, and behind them two of four bytes, without padding."""
    half, single = torch.tensor([1.0, 2.0, 3.0]).bfloat16(), torch.tensor([4.0, 5.0])
    words = torch.cat([x.view(torch.uint8) for x in (half, single)])
    assert torch.equal(_as(words[:6], torch.bfloat16), half)
    assert torch.equal(_as(words[6:], torch.float32), single)

"""torchtitan's trainer is a learner: the real one if installed (`make torchtitan`), or one with the same parts."""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

import isthmus
from e2e.test_processes import commits_of, processes, wait_for
from e2e.test_ranks import torchrun
from isthmus.errors import InputError
from isthmus.integrations.torchtitan import join
from isthmus_services.main import main

ON_CPUS = str(Path(__file__).parent / "torchtitan_on_cpus.py")


class Trainer:
    """The parts of torchtitan's trainer that the adapter uses, with the same behaviour."""

    def __init__(self, steps: int, *, checkpoints: bool = False, parts: int = 1) -> None:
        torch.manual_seed(0)
        self.config = SimpleNamespace(
            checkpoint=SimpleNamespace(enable=checkpoints), training=SimpleNamespace(steps=steps)
        )
        self.model_parts = [nn.Linear(1, 1) for _ in range(parts)]
        self.optimizers = SimpleNamespace(
            optimizers=[torch.optim.AdamW(m.parameters(), lr=0.1) for m in self.model_parts]
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizers.optimizers[0], lambda step: 1 / (1 + step))
        self.lr_schedulers = SimpleNamespace(schedulers=[schedule])
        self.metrics_processor = SimpleNamespace(log=lambda *logged: self.logged.append(logged))
        self.logged: list[tuple[int, float, float]] = []
        self.dataloader: Any = StatefulDataLoader(range(24), batch_size=2, shuffle=False)
        self.step = 0
        self.read: list[int] = []
        self.rates: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]

    def train_step(self, batches: Any) -> None:
        batch = next(batches)
        self.read += batch.tolist()
        optimizer = self.optimizers.optimizers[0]
        optimizer.zero_grad()
        loss = self.model_parts[0](batch.float()[:, None]).pow(2).mean()
        loss.backward()
        self.rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        self.lr_schedulers.schedulers[0].step()
        if self.step % 2:
            self.metrics_processor.log(self.step, loss.item(), loss.item())

    def train(self, fails_at: int = 99) -> None:
        batches = iter(self.dataloader)
        while self.step < self.config.training.steps:
            self.step += 1
            if self.step == fails_at:
                raise RuntimeError("a node is gone")
            self.train_step(batches)


def test_its_steps_are_reported_and_it_comes_back_to_step_schedule_and_data(tmp_path: Path) -> None:
    run, rules = str(tmp_path / "run"), isthmus.Rules(fragments=1)
    first, second = Trainer(10), Trainer(10)
    with pytest.raises(RuntimeError, match="a node is gone"), join(first, run, learner="a", create=rules) as link:
        first.train(fails_at=5)
    assert (link.steps_done, link.tokens_seen) == (4, 8)
    with join(second, run, learner="a") as link:
        second.train()
    assert (link.steps_done, link.tokens_seen, second.step) == (10, 20, 10)
    assert first.read + second.read == list(range(20)), "both incarnations together read every line once"
    # The loss of a step that it logs, and of no other, is in the run.
    losses = {step: loss for step, loss, _ in first.logged + second.logged}
    assert list(losses) == [1, 3, 5, 7, 9]
    assert link.summary.loss == losses[9]
    assert first.rates + second.rates == pytest.approx([0.1 / (1 + step) for step in range(10)])


def test_what_it_would_send_by_mistake_is_refused(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    with (
        pytest.raises(InputError, match="torchtitan's checkpoints are on"),
        join(Trainer(1, checkpoints=True), run, learner="a"),
    ):
        pass
    with (
        pytest.raises(InputError, match="cut the model into 2 parts with 2 optimizers"),
        join(Trainer(1, parts=2), run, learner="a"),
    ):
        pass


@pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="no torchtitan: `make torchtitan` has one")
@pytest.mark.timeout(300)
def test_torchtitan_itself_trains_on_two_ranks_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data, tokenizer = tmp_path / "tests" / "assets" / "c4_test", tmp_path / "tokenizer"
    for folder in (data, tokenizer):
        folder.mkdir(parents=True)
    text = "the quick brown fox jumps over the lazy dog. " * 20
    (data / "data.json").write_text(f"{json.dumps({'text': text})}\n" * 200)
    words = {word: i for i, word in enumerate(["?", *sorted(set(text.split()))])}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "?"}
    (tokenizer / "tokenizer.json").write_text(
        json.dumps({"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model})
    )
    run = str(tmp_path / "run")
    with processes(tmp_path) as p:
        p.isthmus("s", "syncer", run, "--wait")
        for number, steps in enumerate((8, 40)):
            own = (
                "--model.name", "llama3", "--model.flavor", "debugmodel", "--model.hf_assets_path", str(tokenizer),
                "--training.dataset", "c4_test", "--training.seq_len", "64", "--training.local_batch_size", "2",
                "--training.steps", str(steps), "--comm.init_timeout_seconds", "60",
            )  # fmt: skip
            p.ends(p.start(f"t{number}", *torchrun(2), ON_CPUS, run, "--learner", "titan", *own))
        wait_for(lambda: len(commits_of(run)) > 0, "something was merged")
    commits = commits_of(run)
    assert {i.learner: i.tokens / i.steps for c in commits for i in c.header.inputs} == {"titan": 2 * 2 * 64}
    assert {i.incarnation for c in commits for i in c.header.inputs} <= {1, 2}
    assert main(["replay", run]) == 0

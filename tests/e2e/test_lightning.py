"""Lightning's Trainer shares a run with a plain loop over the same module, and continues after a kill."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import isthmus
from e2e.lightning_model import LINES, make_model
from e2e.test_processes import commits_of, processes, wait_for
from isthmus_services.demo import judge
from isthmus_services.main import main

LEARNER = str(Path(__file__).parent / "lightning_learner.py")
STEPS = 400

Note = tuple[int, int, list[int], float]


def notes(path: Path) -> list[Note]:
    if not path.exists():
        return []
    whole = path.read_text()
    return [tuple(json.loads(line)) for line in whole[: whole.rfind("\n") + 1].splitlines()]


@pytest.mark.tier("test")
@pytest.mark.timeout(300)
def test_a_module_shares_a_run_with_a_plain_loop_and_goes_on_after_kill_9(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    with processes(tmp_path) as p:
        p.isthmus("s", "syncer", run, "--wait")
        start = (sys.executable, LEARNER, run, "a", str(STEPS), str(tmp_path / "a"))
        first = p.start("a1", *start)
        wait_for(lambda: len(notes(tmp_path / "a")) > 60, "a has trained")
        wait_for(lambda: list((tmp_path / "run" / "learners" / "a").glob("*/checkpoints/*"))[1:], "a has checkpoints")
        os.kill(first.pid, signal.SIGKILL)
        second = p.start("a2", *start)
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        draw = torch.Generator().manual_seed(1)
        with isthmus.join(run, model, optimizer, learner="b", steps=60) as link:
            while link.steps_done < 60:
                x = torch.randint(LINES, (8, 1), generator=draw)
                loss = (model(x) - torch.sin(x.float())).pow(2).mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                link.step(tokens=len(x), loss=loss.item())
                time.sleep(0.02)
        p.ends(second)
        assert f"a has trained {STEPS} steps" in p.said("a2")
    lives: dict[int, dict[int, tuple[list[int], float]]] = {}
    for life, step, lines, rate in notes(tmp_path / "a"):
        lives.setdefault(life, {})[step] = lines, rate
    before, after = lives.values()
    begun = min(after)
    assert 0 < begun <= max(before) + 1, "the second incarnation continued from the checkpoint"
    assert sorted(after) == list(range(begun, STEPS)), "it took each remaining step once"
    for step in before.keys() & after.keys():
        assert after[step] == before[step], "a repeated step reads the same lines, at the same rate"
    read = [line for step in range(STEPS) for line in (after if step >= begun else before)[step][0]]
    for epoch in range(0, len(read), LINES):
        assert sorted(read[epoch : epoch + LINES]) == list(range(LINES)), (
            "over both incarnations, each epoch has every line once"
        )
    commits = commits_of(run)
    assert judge.continuous(commits)
    assert {i.learner for c in commits for i in c.header.inputs} == {"a", "b"}
    assert {i.learner: i.tokens / i.steps for c in commits for i in c.header.inputs} == {"a": 8, "b": 8}
    assert main(["replay", run]) == 0
    assert main(["export", run, "-o", str(tmp_path / "m.safetensors")]) == 0
    from safetensors.torch import load_file

    learned, fresh = make_model(), make_model()
    learned.load_state_dict(load_file(tmp_path / "m.safetensors"))
    x = torch.arange(LINES)[:, None]

    def loss_of(model: nn.Module) -> float:
        with torch.no_grad():
            return float((model(x) - torch.sin(x.float())).pow(2).mean())

    assert loss_of(learned) < 0.1 * loss_of(fresh)


@pytest.mark.filterwarnings("ignore")  # Lightning's own warnings
@pytest.mark.timeout(300)
def test_what_fails_leaves_as_not_done_and_two_optimizers_are_refused(tmp_path: Path) -> None:
    import lightning.pytorch as pl

    from isthmus.errors import InputError
    from isthmus.integrations.lightning import IsthmusCallback

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self, *, fails_at: int = 99, optimizers: int = 1) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1)
            self.fails_at, self.number = fails_at, optimizers
            self.automatic_optimization = optimizers == 1

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            if number == self.fails_at:
                raise RuntimeError("the fourth batch is no good")
            return torch.as_tensor(self.layer(batch).pow(2).mean())

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(self.number)]

    def fit(module: pl.LightningModule, save: Path | None = None, **said: object) -> None:
        callback = IsthmusCallback(
            str(tmp_path / "run"), learner="a", create=isthmus.Rules(fragments=1), checkpoint_s=60.0
        )
        trainer = pl.Trainer(
            max_steps=6, callbacks=[callback] * (save is None), logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
        )  # fmt: skip
        lines: torch.utils.data.Dataset[torch.Tensor] = torch.utils.data.Subset(torch.ones(6, 3), range(6))  # type: ignore[arg-type]
        trainer.fit(module, torch.utils.data.DataLoader(lines, batch_size=1), **said)
        if save is not None:
            trainer.save_checkpoint(save)

    with pytest.raises(InputError, match="the module has 2 optimizers: a learner has one"):
        fit(Module(optimizers=2))
    with pytest.raises(RuntimeError, match="the fourth batch is no good"):
        fit(Module(fails_at=3))
    model = nn.ModuleDict({"layer": nn.Linear(3, 1)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with isthmus.join(str(tmp_path / "run"), model, optimizer, learner="a") as link:
        assert (link.steps_done, link.incarnation) == (3, 2), "the last checkpoint is of the step that failed"
    stored = tmp_path / "stored.ckpt"
    fit(Module(), stored)
    with pytest.raises(InputError, match=r"ckpt_path makes the Trainer load a checkpoint of its own, but a has one"):
        fit(Module(), ckpt_path=str(stored))
    with pytest.raises(InputError, match="the Trainer sets data= itself"):
        IsthmusCallback("run", learner="a", data=None)

"""docs/replaying.md works from top to bottom, on a run in which one learner went wrong."""

import os
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import isthmus
from isthmus_services.main import main
from support.docs_blocks import Shell
from support.forking import nursery

pytestmark = pytest.mark.tier("all")

MODEL = '''"""A model of one's own."""

from torch import nn


def build() -> nn.Module:
    """Return it."""
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
'''
PAGE = "docs/replaying.md"
SPOILED_FROM, ENOUGH = 5, 9


def train(run: str, build: "object") -> None:
    """Train two learners in step. The data of one of them is wrong from version `SPOILED_FROM` on."""
    assert callable(build)
    torch.manual_seed(0)
    models = {name: build() for name in ("eu-1", "us-1")}
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.02) for name, model in models.items()}
    links = {name: isthmus.join(run, models[name], optimizers[name], learner=name) for name in models}
    until = time.monotonic() + 240
    while min(v for link in links.values() for v in link.versions) < ENOUGH:
        assert time.monotonic() < until, {name: link.versions for name, link in links.items()}
        for name, link in links.items():
            spoiled = name == "us-1" and min(link.versions) >= SPOILED_FROM
            x = torch.randn(32, 16)
            y = x.sum(dim=1, keepdim=True).sin() * (-9 if spoiled else 1)
            loss = torch.nn.functional.mse_loss(models[name](x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizers[name].step()
            optimizers[name].zero_grad()
            link.step(tokens=len(x), loss=loss.item())
        time.sleep(0.01)
    for link in links.values():
        link.close()


def test_a_merge_that_went_wrong_is_found_and_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "model.py").write_text(MODEL)
    asked = ("--model", "my_package.model:build", "--fragments", "2", "--sync-every", "10", "--quorum", "2")
    assert main(["init", "RUN", *asked]) == 0
    from my_package.model import build  # type: ignore[import-not-found]

    syncer = nursery().start(["syncer", str(tmp_path / "RUN")], dict(os.environ), tmp_path / "log", tmp_path / "log")
    try:
        train("RUN", build)
    finally:
        syncer.terminate()
        syncer.wait(60)
    paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": ":".join(filter(None, paths)),
    }
    with Shell(tmp_path, environment) as shell:
        shell.page(PAGE)
    said = {block.strip(): text for block, text in shell.said.items()}
    assert "2 of 2 learners are done" in said["isthmus status RUN --check"]
    assert "merged differences are" in said["isthmus explain RUN 1"]
    assert "us-1 (incarnation 1) from version 5" in said["isthmus explain RUN 1/6"]
    assert "merged into version 6" in said["isthmus explain RUN 1/us-1/5"]
    assert ", 0 differ" in said["isthmus replay RUN"]

    def judged(name: str) -> float:
        model = build()
        model.load_state_dict(load_file(tmp_path / name))
        x = torch.randn(512, 16, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            return float(torch.nn.functional.mse_loss(model(x), x.sum(dim=1, keepdim=True).sin()))

    assert judged("before.safetensors") < judged("after.safetensors")
    # Leaving the learner out of all rounds also leaves out what it did well before, so its model need not be better.
    without, after = load_file(tmp_path / "without.safetensors"), load_file(tmp_path / "after.safetensors")
    assert any(not torch.equal(v, after[k]) for k, v in without.items())
    assert main(["export", "NEW", "-o", "new.safetensors"]) == 0
    before, new = load_file(tmp_path / "before.safetensors"), load_file(tmp_path / "new.safetensors")
    assert before.keys() == new.keys()
    assert all(torch.equal(before[name], new[name]) for name in before)
    for name in ("whatif.png", "trace.json"):
        assert (tmp_path / name).stat().st_size
    assert any(not torch.equal(v, load_file(tmp_path / "other.safetensors")[k]) for k, v in before.items())

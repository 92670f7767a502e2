"""Ray Train's workers are one learner: one worker is killed, and Ray starts them again. `make ray` runs this test."""

import importlib.util
import os
import re
import signal
import sys
from pathlib import Path

import pytest
import torch

import isthmus
from e2e.test_processes import ROOT, commits_of, processes, wait_for
from isthmus_services.demo import judge
from isthmus_services.main import main

STEPS = 200


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="not run: ray is not installed (make ray)")
@pytest.mark.timeout(600)
def test_workers_share_a_run_with_a_plain_loop_and_ray_brings_them_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.syspath_prepend(ROOT / "examples")
    from trainer import Counting, make_model  # type: ignore[import-not-found]

    run = str(tmp_path / "run")
    with processes(tmp_path) as p:
        p.isthmus("s", "syncer", run, "--wait")
        example = str(ROOT / "examples" / "ray_train.py")
        job = p.start("ray", sys.executable, example, run, "--learner", "eu-1", "--steps", str(STEPS))
        first = tmp_path / "run" / "learners" / "eu-1" / "000001"
        wait_for(lambda: [*(first / "checkpoints").glob("0*")] or job.poll() is not None, "a checkpoint")
        model, lines = make_model(), torch.utils.data.DataLoader(Counting(7), batch_size=8)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        with isthmus.join(run, model, optimizer, learner="us-1", steps=60) as link:
            for batch in lines:
                if link.steps_done == 30:
                    (victim,) = re.findall(r"pid=(\d+)\) world_rank=1", p.said("ray"))
                    os.kill(int(victim), signal.SIGKILL)
                if link.steps_done == 60:
                    break
                loss = model(**batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                link.step(tokens=batch["input_ids"].numel(), loss=loss.item())
        p.ends(job)
        said = p.said("ray")
    assert f"eu-1 has trained {STEPS} steps on 2 workers" in said
    (step,) = re.findall(r"\(start 2 of this name\): goes on after step (\d+)", said)
    assert 0 < int(step) < STEPS, "the learner continued from its checkpoint"
    commits = commits_of(run)
    assert judge.continuous(commits)
    inputs = [i for c in commits for i in c.header.inputs]
    assert {(i.learner, i.incarnation) for i in inputs} == {("eu-1", 1), ("eu-1", 2), ("us-1", 1)}
    assert {i.learner: i.tokens / i.steps for i in inputs} == {"eu-1": 2 * 8 * 24, "us-1": 8 * 24}
    assert main(["replay", run]) == 0

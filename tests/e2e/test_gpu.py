"""Without a GPU, every part of `make gpu` runs at a small size, and reports that there was no GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from e2e.test_processes import QUIET, ROOT
from gpu.run import NO_GPU, PARTS


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU: make gpu")
@pytest.mark.timeout(900)
def test_every_part_runs_without_a_gpu(tmp_path: Path) -> None:
    every = [word for part in PARTS for word in ("--only", part.name)]
    done = subprocess.run(
        [sys.executable, "-m", "gpu.run", "--out", str(tmp_path), "--seconds", "800", *every],
        cwd=ROOT, env={**os.environ, **QUIET}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "report.json").read_text())
    assert {part["name"]: part["state"] for part in found["parts"]} == {part.name: NO_GPU for part in PARTS}
    rows = {row["case"]: row["value"] for part in found["parts"] for row in part["rows"]}
    assert rows["RDA: versions that differ"] == rows["RDA, one killed: versions that differ"] == 0
    assert rows["RDA, one killed: versions replayed"] > 0
    assert {test["outcome"] for part in found["parts"] for test in part["tests"]} == {NO_GPU}
    assert (tmp_path / "losses.png").exists()

"""docs/tutorial.md works from top to bottom, in a folder that looks like a clone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from support.docs_blocks import ROOT, Shell

pytestmark = [pytest.mark.tier("all"), pytest.mark.timeout(600)]  # the page has twenty blocks with real processes


def test_the_tutorial_does_what_it_says(tmp_path: Path) -> None:
    for name in subprocess.run(
        ["git", "ls-tree", "--name-only", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split():
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "ISTHMUS_"))}
    with Shell(tmp_path, environment | {"OMP_NUM_THREADS": "1", "AWS_EC2_METADATA_DISABLED": "true"}) as shell:
        shell.page("docs/tutorial.md")
    said = "".join(shell.said.values())
    assert said.count(", 0 differ") == 3
    assert "2 of 2 learners are done" in said
    assert "eu-1: 300 steps in" in said
    assert "store: 6 users isthmus-" in said
    for name in ("model", "from-bucket"):
        with safe_open(tmp_path / "out" / f"{name}.safetensors", "np") as model:
            assert len(list(model.keys())) > 10

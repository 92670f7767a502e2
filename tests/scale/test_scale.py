"""The run at scale works at a small size: all its parts take part, and its log can be replayed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


@pytest.mark.timeout(400)
def test_a_plain_and_a_sharded_learner_and_two_syncers_share_a_run_through_s3(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "scale.run", "--width", "64", "--layers", "2", "--fragments", "6", "--sync-every", "6",
         "--rounds", "3", "--both", "--out", str(tmp_path / "out"), "--json", str(report)],
        env={**os.environ, "PYTHONPATH": str(HERE.parent)}, capture_output=True, text=True, timeout=360, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    said = json.loads(report.read_text())
    assert said["replay"]["differ"] == 0
    assert said["replay"]["commits"] == said["log"]["commits"] >= 6 * 3
    assert said["log"]["learners"] == ["plain", "sharded"]
    assert set(said["log"]["writers"]) == {"syncer-0", "syncer-1"}
    assert [(one["learner"], one["rank"], one["ranks"]) for one in said["learners"]] == [
        ("plain", 0, 1), ("sharded", 0, 2), ("sharded", 1, 2)
    ]  # fmt: skip
    assert all(one["gib"]["peak"] >= one["gib"]["before_joining"] > 0.0 for one in said["learners"])
    assert all(syncer["cpu_s"] > 0.0 for syncer in said["syncers"].values())


def test_the_board_is_measured_on_a_simulated_run_that_is_repeated(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "scale.board", "--learners", "6", "--fragments", "6", "--commits", "3000", "--repeats", "1",
         "--into", str(tmp_path / "out"), "--json", str(report)],
        env={**os.environ, "PYTHONPATH": str(HERE.parent), "CHROMIUM": "none"}, capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    said = json.loads(report.read_text())
    assert said["simulated"]["commits"] > 0
    assert said["first_reading"]["commits"] == 9600
    assert said["answers"].keys() >= {"run", "state", "series", "lanes", "fragments"}
    assert all(answer["numbers"] < 40_000 for answer in said["answers"].values())
    assert said["browser"].startswith("not run")

"""The demo ends when its learners have done their steps, or when a process keeps failing."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

from isthmus.errors import InputError
from isthmus.inspect.bus_view import BusView
from isthmus_services.commands.learner import NEVER_MERGED
from isthmus_services.demo.fleet import CRASHES_MAX, Fleet, Worker


def fleet_of(code: int, tmp_path: Path) -> Fleet:
    """Return a fleet whose only learner ends with this exit code at each start."""
    learner = Worker("l", "learner", [sys.executable, "-c", f"raise SystemExit({code})"], tmp_path / "l.log", {})
    syncer = Worker("s", "syncer", [], tmp_path / "s.log", {})
    learner.start()
    return Fleet(syncer, [learner], 10, 12, random.Random(0), None, None)


def ended(fleet: Fleet) -> subprocess.Popen[bytes]:
    process = fleet.learners[0].process
    assert process is not None
    process.wait(60)
    return process


@pytest.mark.parametrize("code", [0, NEVER_MERGED])
def test_a_learner_that_has_done_its_steps_is_done_merged_or_not(code: int, tmp_path: Path) -> None:
    fleet = fleet_of(code, tmp_path)
    ended(fleet)
    fleet.tend(BusView(bytes(32)))
    assert fleet.finished
    assert fleet.learners[0].starts == 1


def test_one_that_keeps_ending_ends_the_demo(tmp_path: Path) -> None:
    fleet = fleet_of(1, tmp_path)
    with pytest.raises(InputError, match="l ended with status 1"):
        for _ in range(CRASHES_MAX):
            ended(fleet)
            fleet.tend(BusView(bytes(32)))
    assert fleet.learners[0].starts == CRASHES_MAX

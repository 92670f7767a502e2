"""A training loop that configures no logging shows that its learner joins, restarts, leaves or is not merged.

ISTHMUS_BUS names its bus.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

LOOP = """
import sys
import torch
import isthmus
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rules = isthmus.Rules(fragments=1, sync_every=2)
with isthmus.join(sys.argv[1], model, optimizer, learner="a", create=rules) as link:
    link.step(tokens=1)
"""

MISUSED = """
import sys
import torch
import isthmus
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rules = isthmus.Rules(fragments=1, sync_every=2)
with isthmus.join(sys.argv[1], model, optimizer, learner="a", create=rules) as link:
    for _ in range(3):
        model(torch.ones(4)).sum().backward()
        link.step(tokens=1)
        optimizer.step()
link = isthmus.join(sys.argv[1], model, optimizer, learner="b", create=rules)
link.step(tokens=1)
"""

FENCED = """
import sys
import time
import torch
import isthmus
def joined(takeover):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rules = isthmus.Rules(fragments=1, sync_every=2)
    return isthmus.join(sys.argv[1], model, optimizer, learner="a", create=rules, takeover=takeover)
first = joined(False)
second = joined(True)
until = time.monotonic() + 60.0
while time.monotonic() < until:
    try:
        first.step(tokens=1)
    except isthmus.errors.Fenced:
        break
    time.sleep(0.05)
else:
    sys.exit(1)
first.close(wait=0.0)
second.close(wait=0.0)
"""

UNMERGED = """
import sys
import time
import torch
import isthmus
from isthmus.agent import trouble
trouble.PATIENCE_S = 0.5
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rules, pace = isthmus.Rules(fragments=1, sync_every=2), isthmus.Pace(silence_s=0.5, heartbeat_s=0.1)
for _ in range(2):
    with isthmus.join(sys.argv[1], model, optimizer, learner="a", create=rules, pace=pace) as link:
        for _ in range(100):
            link.step(tokens=1)
            time.sleep(0.02)
"""

KILLED = """
import os
import sys
import time
import torch
import isthmus
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rules, pace = isthmus.Rules(fragments=1, sync_every=50), isthmus.Pace(silence_s=0.5, heartbeat_s=0.1)
with isthmus.join(sys.argv[1], model, optimizer, learner="a", create=rules, pace=pace) as link:
    for _ in range(int(sys.argv[2])):
        link.step(tokens=1000)
        time.sleep(0.01)
    if sys.argv[2] != "0":
        time.sleep(1.0)
        os._exit(0)
"""

SHOWN = """
import logging
from isthmus.runtime import log_lines
{before}
log_lines.show()
log_lines.show()
logging.getLogger('isthmus.link').info('joined')
{after}
"""

CONFIGURED = """
logging.basicConfig(level=logging.INFO)
logging.getLogger('isthmus.x').info('once')
logging.getLogger().setLevel(logging.ERROR)
logging.getLogger('isthmus.x').info('never')
"""


def lines_of(program: str, *arguments: str, **more: str) -> list[str]:
    """Return what a program writes to stderr."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *arguments],
        env={**os.environ, **more}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


def test_a_loop_without_logging_shows_its_lines_and_takes_the_bus_of_the_environment(tmp_path: Path) -> None:
    lines = lines_of(LOOP, str(tmp_path / "run"), ISTHMUS_BUS=f"sqlite://{tmp_path}/elsewhere.sqlite")
    for words in ("a joined ", "a: 1 steps in "):
        assert sum(words in line for line in lines) == 1, lines
    assert (tmp_path / "elsewhere.sqlite").exists()
    assert not (tmp_path / "run" / "bus.sqlite").exists()


def test_a_loop_that_steps_in_the_wrong_order_or_does_not_close_is_told_so(tmp_path: Path) -> None:
    lines = lines_of(MISUSED, str(tmp_path / "run"))
    for learner, words in (
        ("a", "; a loop that calls link.step before optimizer.step() ends so each time: call it after"),
        (
            "b",
            "this process ends, and link.close() was not called: no last checkpoint is stored, and a restart goes on after",
        ),
    ):
        assert [f" {learner}: " in line for line in lines if words in line] == [True], lines


@pytest.mark.parametrize(
    "script",
    [
        # The loop of another error than that a second process has the name, and closed.
        "from isthmus.link import agent_thread\nagent_thread.Fenced = KeyError\n" + FENCED,
        FENCED.replace("first.close(wait=0.0)\n", ""),
    ],
    ids=["closed", "fenced"],
)
def test_a_link_that_is_closed_or_has_a_successor_is_not_said_to_be_open(script: str, tmp_path: Path) -> None:
    lines = lines_of(script, str(tmp_path / "run"))
    assert not [line for line in lines if "was not called" in line]


@pytest.mark.tier("all")
def test_a_loop_without_logging_shows_its_restart_and_that_nothing_is_merged(tmp_path: Path) -> None:
    lines = "\n".join(lines_of(UNMERGED, str(tmp_path / "run")))
    said = [
        r"a joined \S+ \(start 1 of this name\): goes on after step 0 ", r"a: no syncer is heard .*: isthmus syncer ",
        r"a: 100 steps in .*NONE OF ITS WORK WAS MERGED", r"a joined \S+ \(start 2 of this name\): goes on after step 100 ",
        r"a: 100 steps in .* 200 over all its incarnations",
    ]  # fmt: skip
    assert re.search(".*".join(said), lines, re.S), lines


def test_a_restart_that_begins_anew_is_a_warning_if_work_is_lost(tmp_path: Path) -> None:
    """The learner was killed before its first checkpoint; the one after it begins at step 0."""
    run, joined = (
        str(tmp_path / "run"),
        r"(INFO|WARNING) .*a joined \S+ \(start \d of this name\): goes on after step 0 ",
    )
    levels = []
    for steps in ("31", "0"):
        said = "\n".join(lines_of(KILLED, run, steps))
        found = re.search(joined + r"\((\d+) tokens lost in all\)", said)
        assert found, said
        levels.append((found[1], int(found[2]) > 0))
    assert levels == [("INFO", False), ("WARNING", True)]


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        ("logging.basicConfig(level=logging.INFO, format='MINE %(message)s')", "", ["MINE joined"]),
        ("logging.basicConfig(level=logging.ERROR)", "", []),
        ("logging.getLogger('isthmus').setLevel(logging.ERROR)", "", []),
        ("", CONFIGURED, ["joined", "INFO:isthmus.x:once"]),
    ],
    ids=["its own format", "errors only", "errors of isthmus only", "later"],
)
def test_a_program_that_configures_logging_decides(before: str, after: str, lines: list[str]) -> None:
    found = lines_of(SHOWN.format(before=before, after=after))
    assert len(found) == len(lines)
    assert all(line.endswith(words) for line, words in zip(found, lines, strict=True)), found

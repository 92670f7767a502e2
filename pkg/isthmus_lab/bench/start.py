"""Time until a command is of use. Each command runs as a process of its own."""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from isthmus_lab.bench.measure import Row, Say, row
from isthmus_services.processes import isthmus_command

HELP_S, STATUS_S, SYNCER_S, JOIN_S = 0.15, 0.25, 0.5, 0.4

STATUS = """
from isthmus_services.main import loaded, parsed
loaded(parsed(["status", "run"]).command)
"""

JOIN = """
import sys, time
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())  # imports the larger half of torch
began = time.perf_counter()
import isthmus
with isthmus.join(sys.argv[1], model, optimizer, learner="a", create=isthmus.Rules(fragments=1)) as link:
    print(time.perf_counter() - began, flush=True)
"""


def rows(repeats: int, say: Say) -> Iterator[Row]:
    """Yield the seconds until the help is printed, a status is asked for, a syncer serves, and a learner has joined."""
    with tempfile.TemporaryDirectory() as folder:
        run = str(Path(folder) / "run")
        _isthmus("init", run)
        cases: dict[str, tuple[float, Callable[[], float]]] = {
            "isthmus --help": (HELP_S, partial(_seconds, "--help")),
            # `isthmus status` listens for one and a half heartbeats. Only the time until it begins to listen counts.
            "isthmus status, until it asks": (STATUS_S, partial(_python, STATUS)),
            "syncer serves": (SYNCER_S, partial(_until_served, run)),
            "learner joined, after torch's own imports": (JOIN_S, partial(_joined, str(Path(folder) / "other"))),
        }
        bare: list[float] = []
        found: dict[str, list[float]] = {case: [] for case in cases}
        for number in range(repeats + 1):
            took = _python("pass")
            if number:
                bare.append(took)
            for case, (_, measure) in cases.items():
                took = measure()
                if number:
                    found[case].append(took)
            say((number + 1) / (repeats + 1))
    yield row("start", "python -c pass", "", bare, "s")
    for case, (aim, _) in cases.items():
        yield row("start", case, "", found[case], "s", aim=aim, at_most=True)


def _isthmus(*words: str) -> None:
    subprocess.run(isthmus_command(*words), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _python(program: str) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], check=True)
    return time.perf_counter() - began


def _seconds(*words: str) -> float:
    began = time.perf_counter()
    subprocess.run(isthmus_command(*words), check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began


def _until_served(run: str) -> float:
    began = time.perf_counter()
    process = subprocess.Popen(
        isthmus_command("syncer", run), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if re.search(r"serves .* fragments", line):
                return time.perf_counter() - began
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    raise RuntimeError("a syncer ended before it served")


def _joined(run: str) -> float:
    said = subprocess.run(
        [sys.executable, "-c", JOIN, run], capture_output=True, text=True, env={**os.environ}, check=True
    )
    return float(said.stdout.split()[0])

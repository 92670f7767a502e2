"""Time until a command is of use. Each command runs as a process of its own."""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
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
        # Installed modules are compiled. Modules of a clone are, too, after the first time that is not counted.
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(Path(folder) / "compiled")}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        run, other = str(Path(folder) / "run"), str(Path(folder) / "other")
        _seconds(environment, *isthmus_command("init", run))
        cases: dict[str, tuple[float, Callable[[], float]]] = {
            "isthmus --help": (HELP_S, partial(_seconds, environment, *isthmus_command("--help"))),
            # `isthmus status` listens for one and a half heartbeats. Only the time until it begins to listen counts.
            "isthmus status, until it asks": (STATUS_S, partial(_seconds, environment, sys.executable, "-c", STATUS)),
            "syncer serves": (SYNCER_S, partial(_until_served, environment, run)),
            "learner joined, after torch's own imports": (
                JOIN_S,
                partial(_joined, environment, other),
            ),
        }
        bare: list[float] = []
        found: dict[str, list[float]] = {case: [] for case in cases}
        for number in range(repeats + 1):
            took = _seconds(environment, sys.executable, "-c", "pass")
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


def _seconds(environment: Mapping[str, str], *command: str) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    return time.perf_counter() - began


def _until_served(environment: Mapping[str, str], run: str) -> float:
    began = time.perf_counter()
    process = subprocess.Popen(
        isthmus_command("syncer", run),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
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


def _joined(environment: Mapping[str, str], run: str) -> float:
    said = subprocess.run(
        [sys.executable, "-c", JOIN, run], capture_output=True, text=True, env=environment, check=True
    )
    return float(said.stdout.split()[0])

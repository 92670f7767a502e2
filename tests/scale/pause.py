"""Measure the memory of a learner that pauses while three others train on: `python -m scale.pause --minutes 5`.

Each learner is a process, and so is the syncer. The store is a folder. The three other learners take very cheap steps,
so that as many versions are published as the machine can carry.
"""

import argparse
import re
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import isthmus
from isthmus.format.rules import Pace, Rules
from scale.run import Process

WIDTH = 1024
STEP_S = 0.5
STEPS_BEFORE = 8


def model(millions: int) -> nn.Module:
    """Return linear layers with about this many million parameters in all."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(millions * 1_000_000 // WIDTH**2)))


def memory_mb() -> float:
    """Return the resident memory of this process, in MB."""
    status = Path("/proc/self/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    return int(found[1]) / 1e3 if found else 0.0


def join(run: str, learner: str, millions: int) -> tuple[isthmus.Link, nn.Module]:
    """Join with plain SGD, which has no state, so that the memory measured is Isthmus's."""
    net = model(millions)
    link = isthmus.join(
        run, net, torch.optim.SGD(net.parameters(), lr=0.1), learner=learner, checkpoint_s=3600,
        create=Rules(fragments=8, sync_every=8), pace=Pace(heartbeat_s=1.0, silence_s=5.0),
    )  # fmt: skip
    return link, net


def step(link: isthmus.Link, net: nn.Module) -> None:
    """Change every parameter a little."""
    with torch.no_grad():
        for p in net.parameters():
            p.add_(torch.randn(p.shape[1]), alpha=1e-4)
    link.step(tokens=8)
    time.sleep(STEP_S)


def busy(run: str, learner: str, millions: int) -> None:
    """Train until the process is killed."""
    link, net = join(run, learner, millions)
    while True:
        step(link, net)


def main() -> None:
    """Pause beside three busy learners and print the memory of this process meanwhile."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="how long the learner pauses")
    parser.add_argument("--millions", type=int, default=50, help="millions of parameters")
    parser.add_argument("--busy", nargs=2, metavar=("RUN", "LEARNER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.busy:
        run, learner = given.busy
        busy(run, learner, given.millions)
    with tempfile.TemporaryDirectory() as folder:
        run, others = f"{folder}/run", list[Process]()
        link, net = join(run, "paused", given.millions)
        try:
            others.append(
                Process("syncer", [sys.executable, "-m", "isthmus_services.main", "syncer", run], Path(folder, "s"))
            )
            for name in ("b1", "b2", "b3"):
                command = [sys.executable, __file__, "--busy", run, name, "--millions", str(given.millions)]
                others.append(Process(name, command, Path(folder, name)))
            while sum(link.versions) < STEPS_BEFORE:
                step(link, net)
            before, peak, end = memory_mb(), 0.0, time.monotonic() + 60 * given.minutes
            print(f"{given.millions} million parameters are {4 * given.millions} MB; before the pause {before:.0f} MB")
            while time.monotonic() < end:
                for other in others:
                    other.must_live()
                time.sleep(0.1)
                peak = max(peak, memory_mb())
            stood = list(link.versions)
            while sum(link.versions) <= sum(stood):
                step(link, net)
            missed = sum(b - a for a, b in zip(stood, link.versions, strict=True))
            print(
                f"{given.minutes:g} minutes of pause: at most {peak:.0f} MB; then {missed} versions newer, {memory_mb():.0f} MB"
            )
        finally:
            for other in others:
                other.stop()
            link.close(wait=0)


if __name__ == "__main__":
    main()

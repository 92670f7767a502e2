"""Measure the host memory that a restart takes, as multiples of the optimizer's state: `python -m scale.restart`.

A learner of one process and one of two DDP ranks join a run, take a step and leave; then they join again. The output
says by how much the peak memory of each process grew in each `join`.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn

import isthmus

WIDTH, LAYERS = 2048, 30
"""126 million parameters, with an optimizer's state of 1.0 GB. Python and its libraries need little in comparison."""


def peak_mb() -> float:
    """Return the peak resident memory of this process, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def life(run: str, width: int) -> None:
    """Join, take one step if this is the first incarnation, and leave."""
    ranks = "RANK" in os.environ
    if ranks:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
    if ranks:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    state = 8 * sum(p.numel() for p in model.parameters()) / 1e6
    before = peak_mb()
    link = isthmus.join(run, model, optimizer, learner="a", create=isthmus.Rules(fragments=8, sync_every=1000))
    grew = peak_mb() - before
    who = f"rank {os.environ['RANK']} of 2" if ranks else "one process"
    what = "restored" if link.steps_done else "began"
    print(
        f"{who} {what}: join took {grew:.0f} MB, {grew / state:.1f} times the {state:.0f} MB of AdamW's state",
        flush=True,
    )
    if not link.steps_done:
        for p in model.parameters():
            p.grad = torch.full_like(p, 1e-3)
        optimizer.step()
        link.step(tokens=1)
    link.close(wait=0)


def main() -> None:
    """Run both learners, two incarnations each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=WIDTH, help=f"of the model's {LAYERS} square layers")
    parser.add_argument("--life", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.life:
        life(given.life, given.width)
        return
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    for start in ((), torchrun):
        with tempfile.TemporaryDirectory() as folder:
            for _ in range(2):
                command = [sys.executable, *start, __file__, "--life", f"{folder}/run", "--width", str(given.width)]
                subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    main()

"""Your own training loop in a run: join, step, close. Start as many of these as you like, anywhere, and one syncer.

python examples/own_loop.py RUN --learner eu-1 [--bus redis://host]      # the first one creates the run
isthmus syncer RUN [--bus redis://host]
python examples/own_loop.py RUN --learner us-1 [--bus redis://host]
"""

import argparse
import time
from functools import partial

import torch
from torch import nn

import isthmus


def make_model() -> nn.Module:
    """Two hidden layers; any module will do."""
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))


def batches(seed: int, start: int, count: int):
    """Yield (x, y) of a function to learn; each learner sees points of its own, by step, so a restart repeats none."""
    for step in range(start, count):
        draw = torch.Generator().manual_seed(seed * 1_000_003 + step)
        x = torch.randn(32, 16, generator=draw)
        yield x, torch.sin(x.sum(dim=1, keepdim=True))


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="s3://bucket/prefix or a folder")
    parser.add_argument("--learner", required=True)
    parser.add_argument("--bus")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument(
        "--step-seconds", type=float, default=0.0, help="slow each step down, to look like a large model"
    )
    a = parser.parse_args()

    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rules = partial(isthmus.Rules.suited, fragments=4, sync_every=8)
    with isthmus.join(a.run, model, optimizer, bus=a.bus, learner=a.learner, create=rules, steps=a.steps) as link:
        seed, said = sum(a.learner.encode()), "nothing left to do"
        for x, y in batches(seed, link.steps_done, a.steps):
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            link.step(tokens=len(x), loss=loss.item())
            said = f"loss {loss.item():.4f}"
            time.sleep(a.step_seconds)
        print(f"{a.learner}: {link.steps_done} steps, {said}, versions {link.versions}")


if __name__ == "__main__":
    main()

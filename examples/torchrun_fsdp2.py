"""A learner that is a torchrun job: FSDP2 shards the model over its ranks. Start as many jobs as you like, anywhere.

torchrun --nproc-per-node 4 --max-restarts 3 examples/torchrun_fsdp2.py RUN --learner eu-1 [--bus redis://host]
isthmus syncer RUN [--bus redis://host]
python examples/torchrun_fsdp2.py RUN --learner us-1 [--bus redis://host]      # one process: not sharded, same run
"""

import argparse
import os
import signal
import time
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import isthmus


class Net(nn.Module):
    """A few blocks; any module will do."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16 if i == 0 else width, width), nn.GELU()) for i in range(4)
        )
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the blocks one after another."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_model(device: torch.device, sharded: bool) -> nn.Module:
    """Return the model, each block and the rest of it sharded over all ranks."""
    torch.manual_seed(0)
    model = Net().to(device)
    if sharded:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    return model


def batch(learner: str, step: int, rank: int, device: torch.device):
    """Return (x, y): each rank of each learner sees points of its own, by step, so a restart repeats none."""
    draw = torch.Generator().manual_seed(hash_of(learner) + 1009 * step + rank)
    x = torch.randn(32, 16, generator=draw).to(device)
    return x, torch.sin(x.sum(dim=1, keepdim=True))


def hash_of(name: str) -> int:
    """Return a number for a name that is the same in every process."""
    return int.from_bytes(name.encode()[-6:], "little")


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", help="s3://bucket/prefix or a folder")
    parser.add_argument("--learner", required=True, help="the name of the whole job, the same on every rank")
    parser.add_argument("--bus")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument(
        "--step-seconds", type=float, default=0.0, help="slow each step down, to look like a large model"
    )
    a = parser.parse_args()

    # What a scheduler sends before it takes the machines away.
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) if torch.cuda.is_available() else 0)
    if not torch.cuda.is_available():
        device = torch.device("cpu")
    if ranks > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    model = make_model(device, sharded=ranks > 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rules = partial(isthmus.Rules.suited, fragments=4, sync_every=8)
    # Every rank joins, steps and closes alike; where a rank dies, torchrun starts all of them again.
    with isthmus.join(a.run, model, optimizer, bus=a.bus, learner=a.learner, create=rules, steps=a.steps) as link:
        said = "nothing left to do"
        # Told to stop, they leave after the same step, with a checkpoint.
        while link.steps_done < a.steps and not link.of_all_ranks(len(told)):
            x, y = batch(a.learner, link.steps_done, rank, device)
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            link.step(tokens=len(x) * ranks, loss=loss.item())  # the tokens of all ranks together
            said = f"loss {loss.item():.4f}"
            time.sleep(a.step_seconds)
        link.close(done=link.steps_done >= a.steps)
    if link.speaks:
        print(f"{a.learner}: {link.steps_done} steps on {ranks} ranks, {said}")
    if ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

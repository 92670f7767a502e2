"""Run by torchrun, two ranks: one incarnation of a learner with uneven shards, or the same loop without Isthmus.

Arguments: the run's folder or `alone`, the step at which it ends, counted over all incarnations, how it ends (`return`,
`raise`, `kill`), and the file to which the first rank writes the result.
"""

import hashlib
import itertools
import json
import os
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import isthmus
from isthmus.learner.boundary import CopyState
from isthmus.torch import loop
from support.restarts import PACE, RULES, TOKENS, Data, boundary_of, wait_until_stored


def digest(tensor: torch.Tensor) -> str:
    """Return the digest of a whole tensor. All ranks must call this."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return hashlib.sha256(whole.detach().contiguous().numpy().tobytes()).hexdigest()[:16]


def main(run: str, until: int, end: str, out: Path) -> None:
    """Train as one incarnation up to step `until`."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Dropout(0.2), nn.Linear(7, 5), nn.Linear(5, 3))
    for module in model:
        if isinstance(module, nn.Linear):
            fully_shard(module)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
    torch.manual_seed(12 + rank)
    data = Data()
    data.order = data.order[rank::2]
    batches: list[int] = []
    state: dict[str, Any] = {"random": isthmus.RandomState(), "schedule": schedule}

    def step(x: torch.Tensor, last: bool) -> None:
        out = model(x)
        if last and rank == 1 and end == "raise":
            raise RuntimeError("cut short")
        (out - x[:, :3].cumsum(1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if last and rank == 1 and end == "kill":
            os.kill(os.getpid(), signal.SIGKILL)

    joined: Any = nullcontext()
    if run != "alone":
        joined = isthmus.join(
            run, model, optimizer, learner="a", create=RULES, pace=PACE, data=data, state=state, checkpoint_s=3600
        )
    with patch.object(loop, "NOTE_S", 60.0), joined as link:
        first = 0 if link is None else link.steps_done
        for n, (number, x) in zip(itertools.count(first + 1), data, strict=False):
            step(x, last=n == until)
            batches.append(number)
            if link is not None:
                stores = rank == 0 and n == first + 2
                if stores:
                    boundary_of(link).post(CopyState())
                link.step(tokens=TOKENS)
                if stores:
                    wait_until_stored(link)
            dist.barrier()
            if n == until:
                break
        tokens = n * TOKENS if link is None else link.tokens_seen
    found = {name: digest(tensor) for name, tensor in model.state_dict().items()}
    for number, entries in optimizer.state_dict()["state"].items():
        found |= {f"{number}/{key}": digest(value) for key, value in entries.items()}
    every: list[Any] = [None, None]
    dist.all_gather_object(every, batches)
    if rank == 0:
        said = {
            "first": first,
            "tensors": found,
            "batches": every,
            "tokens": tokens,
            "rate": optimizer.param_groups[0]["lr"],
        }
        out.write_text(json.dumps(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))

"""Run by torchrun, two ranks: if the ranks do different things, both raise the same error."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import isthmus
from isthmus.errors import InputError, RunMissing


def net(width: int = 4, *, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2))
    fully_shard(model[0])
    return model


def join(run: str, model: nn.Module, **options: Any) -> isthmus.Link:
    optimizer = options.pop("optimizer", torch.optim.SGD)(model.parameters(), lr=0.1)
    given: dict[str, Any] = {"learner": "a", "create": isthmus.Rules(fragments=2)} | options
    return isthmus.join(run, model, optimizer, **given)


def stepping(run: str, tokens: int) -> None:
    with join(run, net()) as link:
        link.step(8)
        link.step(tokens)


def closing(run: str, early: bool) -> None:
    link = join(run, net())
    if early:
        link.close()
    else:
        link.step(8)


class Odd:
    """Data whose state cannot be stored on the second rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> dict[str, object]:
        return {"at": self if self.rank else 0}

    def load_state_dict(self, state: dict[str, object]) -> None:
        raise AssertionError("nothing was kept")


def keeping(run: str, rank: int) -> None:
    with join(run, net(), learner="odd", data=Odd(rank)) as link:
        link.step(8)


def cases(run: str, rank: int) -> dict[str, Callable[[], object]]:
    return {
        "names": lambda: join(run, net(), learner="a" if rank == 0 else "b"),
        "runs": lambda: join(run if rank == 0 else f"{run}-other", net()),
        "optimizers": lambda: join(run, net(), optimizer=torch.optim.SGD if rank == 0 else torch.optim.AdamW),
        "models": lambda: join(run, net(4 if rank == 0 else 6)),
        "values": lambda: join(run, net(seed=rank)),
        "no run": lambda: join(f"{run}-none", net(), create=None),
        "tokens": lambda: stepping(run, 8 if rank == 0 else 9),
        "data": lambda: keeping(run, rank),
        "one closes": lambda: closing(run, early=rank == 1),
    }


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank, said = dist.get_rank(), {}
    for what, case in cases(sys.argv[1], rank).items():
        dist.barrier()
        try:
            case()
        except (InputError, RunMissing) as error:
            said[what] = f"{type(error).__name__}: {error}"
        else:
            said[what] = "nothing was refused"
    Path(f"{sys.argv[1]}.{rank}").write_text(json.dumps(said))
    dist.destroy_process_group()

"""A learner of one process, or of a torchrun job: RUN NAME KIND STEPS, then options that say how it trains.

With --told, gradients come from the learner's name and the step, not from data. The learner also keeps in step with the
learners named after --told, so what is merged does not depend on the clock. A KIND that ends in -there uses the CPU as
the device that keeps fragments; a KIND that ends in -cuda uses the GPU.
"""

import argparse
import os
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import isthmus
from isthmus.torch import device


class Places:
    """Data whose position is kept in checkpoints."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "rank": dist.get_rank() if dist.is_initialized() else 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state["rank"] == (dist.get_rank() if dist.is_initialized() else 0)
        self.at = state["at"]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5))


def placed(kind: str, where: str = "cpu") -> nn.Module:
    model = net().to(where)
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if kind == "fsdp2":
        fully_shard(model[1])
        fully_shard(model)
    return model


def set_gradients(model: nn.Module, name: str, step: int) -> None:
    draw = torch.Generator().manual_seed(sum(name.encode()) * 1000 + step)
    for p in model.parameters():
        whole = (torch.randn(p.shape, generator=draw) / 8).to(p.device)
        mesh, placements = getattr(p, "device_mesh", None), getattr(p, "placements", None)
        p.grad = whole if mesh is None else distribute_tensor(whole, mesh, placements, src_data_rank=None)


def wait_for(learners: list[str], step: int, folder: Path) -> None:
    for name in learners:
        while not (folder / f"{name}.{step}").exists():
            time.sleep(0.002)


def wait_for_the_first(a: argparse.Namespace, step: int) -> None:
    """Let the first learner's update arrive first: the sum depends on the order. An update is due every 24 steps."""
    if a.name == a.told[0] or step % 24 != 1:
        return
    while len(list(Path(a.run).glob(f"updates/*/{a.told[0]}/*"))) <= step // 24:
        time.sleep(0.01)
    time.sleep(1.0)


def main() -> None:
    parser = argparse.ArgumentParser()
    for what in ("run", "name", "kind"):
        parser.add_argument(what)
    parser.add_argument("steps", type=int)
    parser.add_argument("--told", nargs="*", default=[])
    parser.add_argument("--pids", type=Path)
    a = parser.parse_args()
    kind, _, there = a.kind.partition("-")
    where = "cuda" if there == "cuda" else "cpu"
    if kind != "plain":
        # NCCL allows one rank per GPU: ranks that share a GPU exchange through the host.
        alone = where == "cuda" and os.environ["WORLD_SIZE"] == "1"
        dist.init_process_group("cpu:gloo,cuda:nccl" if alone else "gloo")
    lanes: list[device.DeviceStream] = []
    if there:

        class Seen(device.DeviceStream):
            def __init__(self, where: torch.device) -> None:
                super().__init__(where)
                lanes.append(self)

        device.DeviceStream = Seen  # type: ignore[misc,assignment]
        if where == "cpu":
            device.device_of = lambda model: torch.device("cpu")
    model = placed(kind, where)
    pace = isthmus.Pace()
    if a.told:
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
        pace = isthmus.Pace(quorum=len(a.told), lead=0.0, overlap=0.0, grace=0.0, staleness=0, silence_s=60.0)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # A round is abandoned after H steps of the slowest learner. Learners in step must all have answered before that.
    rules = isthmus.Rules(sync_every=48 if a.told else 4, fragments=2 if a.told else 3)
    folder, places = Path(a.run).parent, Places()
    link = isthmus.join(
        a.run, model, optimizer, learner=a.name, create=rules, pace=pace, checkpoint_s=0.3, steps=a.steps, data=places
    )
    rank = dist.get_rank() if dist.is_initialized() else 0
    print(f"{a.name}/{rank} goes on after {link.steps_done}, {link.moments} moments, place {places.at}", flush=True)
    if a.pids is not None:
        (a.pids / f"{link.incarnation}.{rank}").write_text(str(os.getpid()))
    if a.told and link.speaks:
        (folder / f"{a.name}.0").touch()
    if a.told:
        # The first round expects the learners heard of so far, so let every learner be heard of.
        wait_for(a.told, 0, folder)
        time.sleep(3.0)
    with link:
        while link.steps_done < a.steps:
            if a.told:
                set_gradients(model, a.name, link.steps_done)
            else:
                model(torch.arange(9, device=where)).pow(2).sum().backward()
            time.sleep(0.25 if a.told else 0.02)
            optimizer.step()
            optimizer.zero_grad()
            if a.told:
                wait_for(a.told, link.steps_done, folder)
                wait_for_the_first(a, link.steps_done + 1)
            places.at += 1
            link.step(9)
            if a.told and link.speaks:
                (folder / f"{a.name}.{link.steps_done}").touch()
    for device_stream in lanes:
        own = device_stream.waits[threading.get_ident()]
        print(
            f"{a.name}/{rank} waited for its device {device_stream.waits.total()} times, {own} of them in training",
            flush=True,
        )
    if link.speaks:
        print(f"{a.name} is done: {link.summary}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

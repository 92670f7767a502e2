"""Run by torchrun: the fragments that ranks read and write agree with the whole tensors as torch gathers them."""

import math
import sys
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from isthmus.format.digests import digest
from isthmus.format.layout import Cut, Spec, place
from isthmus.format.records import tree
from isthmus.format.rules import Adoption, FrozenCheck
from isthmus.learner.backend import ArrayRef, Remote
from isthmus.learner.checkpoint_shards import ShardRef
from isthmus.log.run import UNTOLD
from isthmus.torch import device, sharded_fragments
from isthmus.torch import model as torch_model
from isthmus.torch.loop import Loop
from isthmus.torch.ranks import Op, ranks_of
from isthmus.torch.sharded import InBlocks, Lying, Sharded

HIDDEN = {"even": 16, "uneven": 5}


def net(width: int) -> nn.Sequential:
    torch.manual_seed(0)  # replicas hold equal values, because an owner sends its own
    model = nn.Sequential(nn.Embedding(7, width), nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, 3))
    model[1].bias.requires_grad_(False)
    return model.to(torch.bfloat16) if width == 16 else model


def shard(model: nn.Sequential, mesh: DeviceMesh | None = None, offload: OffloadPolicy | None = None) -> nn.Module:
    for layer in (model[1], model[3], model):
        fully_shard(layer, mesh=mesh, offload_policy=offload or OffloadPolicy())
    return model


def placed(kind: str, model: nn.Sequential) -> nn.Module:
    match kind:
        case "FSDP2":
            return shard(model)
        case "FSDP2, offloaded":
            return shard(model, offload=CPUOffloadPolicy(pin_memory=False))
        case "FSDP2, layers recomputed and compiled":
            model[1] = checkpoint_wrapper(model[1])
            shard(model)
            compiled: Any = torch.compile(model)
            return compiled  # type: ignore[no-any-return]
        case "HSDP":
            return shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))
        case "FSDP2 and tensor parallelism":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            parallelize_module(model, mesh["tp"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
            return shard(model, mesh=mesh["dp"])
        case "DDP":
            return nn.parallel.DistributedDataParallel(model)
    raise ValueError(kind)


KINDS = (
    "FSDP2",
    "FSDP2, offloaded",
    "FSDP2, layers recomputed and compiled",
    "HSDP",
    "FSDP2 and tensor parallelism",
    "DDP",
)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, p in torch_model.named(torch_model.unwrapped(model)):
        held = p.detach()
        found[name] = (held.full_tensor() if hasattr(held, "full_tensor") else held).float().reshape(-1).clone()
    return found


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.arange(6)).float().pow(2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def cut(i: int, spec: Spec) -> list[Cut]:
    """Cut a tensor in two parts of odd lengths, across the ranks' shards; the second part is in the next fragment."""
    rows = spec.shape[0]
    return [(i % 3, rows - rows // 3), ((i + 1) % 3, rows // 3)]


class Numbered:
    """Stands for the arrays of other ranks, by the numbers that are expected."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def remote(self, rank: int, number: int | None = None) -> Remote:
        return Remote(rank, self.numbers.pop(0) if number is None else number)

    def reserve(self, count: int) -> int:
        return SAVED


SAVED = 1000
"""The first number of saved arrays."""


def move(sharded: Sharded, p: int, rank: int, read: int, write: int, base: int, mix: int) -> None:
    """Read, mix and write a fragment on the rank that owns it, with its arrays under these numbers."""
    array_table = sharded.array_table

    def held(number: int) -> ArrayRef:
        return Remote(rank, number) if rank else array_table.wait_for(number)

    if not rank:
        array_table.put(read, sharded.empty(p))
    sharded.read(p, held(read))
    mixed = sharded.mixed(p, Adoption.CARRY, held(read), held(write), held(write), held(base))
    if not rank:
        array_table.put(mix, mixed)
    sharded.write(p, held(write))


Wholes = dict[tuple[int, str], torch.Tensor]


def holds_what_it_is_to_write(sharded: Sharded, saved: Any, wholes: Wholes) -> None:
    """Check that each rank's pieces are blocks of torch's whole tensors, and that they add up to these tensors."""
    told, found = [], 0
    if saved is not None:
        for (key, what), x in wholes.items():
            kept = saved["state"]["state"][key][what]
            if isinstance(kept, torch.Tensor):
                assert torch.equal(kept, x)
                continue
            assert (kept.spec.shape, kept.spec.size) == (tuple(x.shape), x.numel() * x.itemsize)
            assert sum(math.prod(away.shape) for away in kept.pieces) == x.numel()
            for away in kept.pieces:
                number = away.held.number if isinstance(away.held, Remote) else 0
                assert isinstance(away.held, Remote) == (away.rank > 0)
                told.append((key, what, away.rank, number, away.offset, away.shape))
                if not away.rank:
                    found += is_block(away.held, x, away.offset, away.shape)
    pieces = msgspec.msgpack.decode(sharded.ranks.exchange(msgspec.msgpack.encode(told))[0])
    for key, what, rank, number, offset, shape in pieces:
        if rank == dist.get_rank() > 0:
            found += is_block(sharded.array_table.wait_for(number), wholes[key, what], offset, shape)
    assert found == sum(piece[2] == dist.get_rank() for piece in pieces)


def is_block(held: np.ndarray, x: torch.Tensor, offset: Any, shape: Any) -> bool:
    block = x[tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))]
    assert torch.equal(torch.from_numpy(held).view(x.dtype).view(block.shape), block)
    return True


def with_moments(saved: Any, wholes: Wholes, stored: bool) -> Any:
    """Return a saved state with whole tensors, or with places in the store, instead of the ranks' pieces."""
    entries: dict[Any, Any] = {}
    for key, entry in saved["state"]["state"].items():
        entries[key] = {what: wholes[key, what] if isinstance(x, InBlocks) else x for what, x in entry.items()}
        if stored:
            for what, x in entry.items():
                if isinstance(x, InBlocks):
                    entries[key][what] = Lying(x.spec, (ShardRef(f"{key}/{what}", 0, 0, b"", (), ()),))
    return saved | {"state": saved["state"] | {"state": entries}}


def flat_of(held: Any) -> np.ndarray:
    """Return an array of the array table in memory, also if it is on a device."""
    return torch.cat([x.float() for x in held.tensors]).numpy() if isinstance(held, device.DeviceBlock) else held


def check(kind: str, width: int, device_stream: device.DeviceStream | None, full: int | None = None) -> None:
    """Compare with torch all that is read, written, saved and loaded. The device of rank `full` has no room."""
    dist.barrier()
    sharded_fragments.ShardedFragments._has_room = lambda *_: dist.get_rank() != full  # type: ignore[method-assign]
    model = placed(kind, net(width))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    train(model, optimizer)
    bare = torch_model.unwrapped(model)
    ranks = ranks_of(model)
    assert ranks is not None
    sharded = Sharded(Loop(bare, optimizer), ranks, ["as a"], device_stream)
    specs = torch_model.specs_of(bare)
    layout = place(specs, [cut(i, spec) for i, spec in enumerate(specs)])
    before = whole(model)
    draw = np.random.default_rng(0)
    given = [draw.integers(-8, 8, f.size).astype(np.float32) for f in layout.fragments]
    read, write, base, mix = ([at + f.index for f in layout.fragments] for at in (100, 200, 300, 400))
    for p, flat in enumerate(given):
        staged = None
        if device_stream is not None:
            there = [torch.from_numpy(flat[t.start : t.stop].copy()) for t in layout.fragments[p].tensors]
            staged = device.Staged(flat, device.DeviceBlock(there))
        sharded.array_table.put(write[p], flat if staged is None else staged)
        sharded.array_table.put(base[p], np.ones_like(flat))
    saved: Any = None
    wholes: Wholes = {}

    def fetch(pieces: Any, itemsize: int, offset: Any, shape: Any) -> np.ndarray:
        key, what = pieces[0].key.split("/")
        block = wholes[int(key), what][tuple(slice(a, a + n) for a, n in zip(offset, shape, strict=True))]
        assert block.itemsize == itemsize
        return block.contiguous().reshape(-1).view(torch.uint8).numpy()

    sharded.fetch = fetch
    owner = ranks.owners(len(layout.fragments))
    with sharded.call("JOIN", layout_of=lambda _: (layout, owner)):
        if ranks.leads:
            for t in (t for f in layout.fragments for t in f.tensors):
                part = before[t.spec.name].numpy()[t.origin : t.origin + t.size]
                assert np.array_equal(sharded.values(t), part), (kind, t.name)
            fixed = before["1.bias"].to(dict(torch_model.named(torch_model.unwrapped(model)))["1.bias"].dtype)
            assert sharded.frozen(FrozenCheck.CHECKED) == {"1.bias": digest(torch_model.bits_of(fixed).numpy())}
            assert sharded.frozen(FrozenCheck.TRUSTED) == {"1.bias": UNTOLD}
            numbers = [mix[p] for p, rank in enumerate(owner) if rank]
            sharded.place(layout, owner, Numbered(numbers), b"-")
            for p, rank in enumerate(owner):
                move(sharded, p, rank, read[p], write[p], base[p], mix[p])
            saved = sharded.save().optimizer
    after = whole(model)
    assert device_stream is None or not device_stream.waits, "the training thread never waits for the device"
    for f, rank in zip(layout.fragments, owner, strict=True):
        if rank != dist.get_rank():
            assert sharded.array_table.find(read[f.index]) is None, "only the owner has the array"
            continue
        for t in f.tensors:
            part = before[t.spec.name].numpy()[t.origin : t.origin + t.size]
            assert np.array_equal(flat_of(sharded.array_table.wait_for(read[f.index]))[t.start : t.stop], part), (
                kind,
                t.name,
            )
        mixed = given[f.index] + (flat_of(sharded.array_table.wait_for(read[f.index])) - 1)
        assert np.array_equal(flat_of(sharded.array_table.wait_for(mix[f.index])), mixed), kind
        for what in (read, mix):
            assert isinstance(sharded.array_table.wait_for(what[f.index]), device.DeviceBlock) == (
                device_stream is not None
            )
    for f, flat in zip(layout.fragments, given, strict=True):
        for t in f.tensors:
            part = after[t.spec.name].numpy()[t.origin : t.origin + t.size]
            assert np.array_equal(flat[t.start : t.stop], part), (kind, t.name)
    # Compare the saved moments with torch's whole tensors. Then clear the moments and load them again.
    entries = optimizer.state_dict()["state"]
    wholes = {
        (key, what): (x.full_tensor() if hasattr(x, "full_tensor") else x).clone()
        for key, entry in entries.items()
        for what, x in entry.items()
    }
    holds_what_it_is_to_write(sharded, saved, wholes)
    for stored in (False, True):
        for entry in entries.values():
            for x in entry.values():
                x.zero_()
        with sharded.call("STEP", 1 + stored, 1):
            if ranks.leads:
                # Load a peer's whole state through the first rank, or this learner's own state from the store.
                marked, parts = sharded._marked(with_moments(saved, wholes, stored))
                told = {"state": marked, "local": {}, "alone": None, "own": True}
                blob = tree.packed(told, "a checkpoint", torch_model.take_tensor)
                ranks.command(Op.LOAD, blob=blob)
                assert bool(parts) == (not stored and kind != "DDP")
                assert sharded._load(blob, parts) == "own"
        entries = optimizer.state_dict()["state"]
        for key, entry in entries.items():
            for what, x in entry.items():
                there = x.full_tensor() if hasattr(x, "full_tensor") else x
                assert torch.equal(there, wholes[key, what]), (kind, key, what)
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    values = [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().float() for p in trained]
    long = [x.square().mean().sqrt().item() for x in values]
    with sharded.call("STEP", 3, 1):
        if ranks.leads:
            together = sharded.tried()
            torch.testing.assert_close([s.rms for s in together.lengths()], long, rtol=1e-5, atol=0.0)
            assert all(s.rms > 0.0 for s in together.moved), kind
    train(model, optimizer)
    if dist.get_rank() == 0:
        print(f"{kind}, width {width}, {'on a device' if device_stream else 'on CPUs'}: as torch says", flush=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for kind in KINDS:
        for width in HIDDEN.values():
            if kind == "FSDP2 and tensor parallelism" and width % 2:
                continue  # torch cannot shard a tensor unevenly in two dimensions
            check(kind, width, None)
            # With the CPU as the device the same code runs, and each queued operation is done at once.
            check(kind, width, device.DeviceStream(torch.device("cpu")))
            if kind in ("FSDP2", "HSDP"):
                check(kind, width, device.DeviceStream(torch.device("cpu")), full=1)
    dist.destroy_process_group()
    sys.exit(0)

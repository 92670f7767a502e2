"""A learner on a device sends and adopts the same bits as one on the CPU, and its training thread never waits.

The device is a GPU if the tests run with `-m gpu`. Otherwise it is the CPU: the same code runs, queued operations are
done at once, and each wait is counted."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import isthmus
from isthmus.codecs import codec
from isthmus.codecs.kernels import F32
from isthmus.format.records.objects import SCHEMA, UpdateHeader
from isthmus.format.rules import Adoption, Pace, Rules
from isthmus.learner.backend import ArrayRef, LocalBackend, local_residual, mixed
from isthmus.log.creation import Seed
from isthmus.runtime.clock import threaded
from isthmus.torch import device
from isthmus.torch.device import DeviceArrays, DeviceBackend, DeviceStream, Staged
from isthmus.torch.model import TorchReplica, specs_of
from support.world import World, serving, world

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def net(where: torch.device, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(40, 24), nn.Linear(24, 31), nn.Linear(31, 5)).to(where, dtype)


def seed_of(model: nn.Module, rules: Rules) -> Seed:
    values = [p.detach().float().reshape(-1).cpu().numpy().copy() for p in model.parameters()]
    return Seed(specs_of(model), values, {}, rules, Pace(heartbeat_s=0.2, silence_s=0.8), "", 0)


def header(w: World, p: int) -> UpdateHeader:
    return UpdateHeader(
        schema=SCHEMA, run=w.run.digest, fragment=p, learner="a", incarnation=1, base=0,
        codec=codec(w.run.rules.codec_up).name, steps=4, tokens=400, step=4, tokens_seen=400, train_s=1.0,
    )  # fmt: skip


def draw(w: World, p: int, seed: int) -> F32:
    return np.random.default_rng(seed).normal(size=w.run.layout.fragments[p].size).astype(np.float32)


def whole(block: Any) -> F32:
    return torch.cat([x.float() for x in block.tensors]).cpu().numpy()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rules", [Rules(codec_up=c, fragments=3) for c in ("int4", "int8", "bf16", "f32", "q2")])
def test_an_update_packed_on_the_device_is_the_one_packed_here(
    tmp_path: Path, where: torch.device, rules: Rules, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "CHUNK", 256)  # several chunks of a tensor, the last one not full
    monkeypatch.setattr(device, "STAGED_BYTES", 240)

    async def go() -> None:
        model = net(where, dtype)
        async with world(tmp_path / "run", seed_of(model, rules)) as w:
            own, device_stream = LocalBackend(w.log), DeviceStream(where)
            there = DeviceBackend(own, device_stream)
            arrays, replica = DeviceArrays(model, w.run.layout, device_stream), TorchReplica(model, w.run.layout)
            for p, fragment in enumerate(w.run.layout.fragments):
                base = draw(w, p, 1)
                feedback: ArrayRef | None = None
                for turn in range(2):
                    with torch.no_grad():
                        for parameter in model.parameters():
                            parameter.add_(0.01)
                    captured, values = arrays.empty(p), np.empty(fragment.size, np.float32)
                    arrays.read(p, captured)
                    replica.read(p, values)
                    wanted = await own.pack(header(w, p), base, values, feedback)
                    # The base is on the device in the first turn. In the second it was adopted: only the host has it.
                    staged = await there.staged(p, base)
                    if turn:
                        assert isinstance(staged, Staged)
                        staged.block = None
                    found = await there.pack(header(w, p), staged, captured, feedback)
                    assert wanted is not None
                    assert found is not None
                    assert found.digest == wanted.digest
                    if wanted.dropped is None:
                        assert found.dropped is None
                        continue
                    assert found.dropped is not None
                    assert local_residual(found.dropped).dtype == (np.float32 if dtype == torch.float32 else np.uint16)
                    assert np.array_equal(local_residual(found.dropped), local_residual(wanted.dropped))
                    feedback = found.dropped

    asyncio.run(go())


def test_what_is_not_finite_is_no_update(tmp_path: Path, where: torch.device) -> None:
    async def go() -> None:
        model = net(where)
        async with world(tmp_path / "run", seed_of(model, Rules(fragments=2))) as w:
            device_stream = DeviceStream(where)
            there, arrays = (
                DeviceBackend(LocalBackend(w.log), device_stream),
                DeviceArrays(model, w.run.layout, device_stream),
            )
            captured = arrays.empty(0)
            arrays.read(0, captured)
            assert await there.is_finite(captured)
            captured.tensors[-1][-1] = torch.inf
            assert await there.pack(header(w, 0), draw(w, 0, 1), captured, None) is None
            assert not await there.is_finite(captured)
            assert await there.is_finite(await there.staged(0, draw(w, 0, 1)))

    asyncio.run(go())


def test_where_the_device_has_no_room_the_cpu_does_it(tmp_path: Path, where: torch.device) -> None:
    class Full(DeviceStream):
        def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
            raise torch.OutOfMemoryError("no room")

    async def go() -> None:
        model = net(where, torch.bfloat16)
        async with world(tmp_path / "run", seed_of(model, Rules(fragments=2))) as w:
            own, device_stream = LocalBackend(w.log), Full(where)
            there, arrays = DeviceBackend(own, device_stream), DeviceArrays(model, w.run.layout, device_stream)
            captured, base = arrays.empty(0), draw(w, 0, 1)
            arrays.read(0, captured)
            wanted = await own.pack(header(w, 0), base, whole(captured), draw(w, 0, 2))
            found = await there.pack(header(w, 0), base, captured, draw(w, 0, 2))
            assert wanted is not None
            assert found is not None
            assert found.digest == wanted.digest
            staged = await there.staged(0, base)
            assert isinstance(staged, Staged)
            assert staged.block is None
            arrays.write(0, staged)
            arrays.read(0, captured)
            assert np.array_equal(whole(captured), torch.from_numpy(base).bfloat16().float().numpy())

    asyncio.run(go())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("adopt", [Adoption.BLEND, Adoption.CARRY])
def test_what_is_adopted_is_what_would_be_on_the_cpu(
    tmp_path: Path, where: torch.device, dtype: torch.dtype, adopt: Adoption
) -> None:
    async def go() -> None:
        model = net(where, dtype)
        async with world(tmp_path / "run", seed_of(model, Rules(fragments=2))) as w:
            device_stream = DeviceStream(where)
            there, arrays = (
                DeviceBackend(LocalBackend(w.log), device_stream),
                DeviceArrays(model, w.run.layout, device_stream),
            )
            replica = TorchReplica(model, w.run.layout)
            for p, fragment in enumerate(w.run.layout.fragments):
                local, base, version = arrays.empty(p), draw(w, p, 1), draw(w, p, 2)
                arrays.read(p, local)
                mine = whole(local).copy()
                staged = await there.staged(p, version)
                for since in (None, local):
                    sent = None if since is None else mine
                    now = arrays.mixed(p, adopt, local, staged, base, since)
                    assert np.array_equal(whole(now), mixed(fragment, adopt, mine, version, base, sent))
                assert isinstance(staged, Staged)
                assert staged.block is None, "mixing must free the version's memory on the device"
                found, staged = np.empty(fragment.size, np.float32), await there.staged(p, version)
                for value in (staged, base):
                    arrays.write(p, value)
                    replica.read(p, found)
                    wanted = version if value is staged else base
                    assert np.array_equal(found, torch.from_numpy(wanted).to(dtype).float().numpy())
                assert isinstance(staged, Staged)
                assert staged.block is None, "writing must free the version's memory on the device"

    asyncio.run(go())


class Read(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records operations that make the host wait for numbers from the device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket._qualified_op_name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal"):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_learner_on_a_device_trains_goes_on_and_never_waits_at_a_boundary(
    tmp_path: Path, where: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes: list[DeviceStream] = []
    trainers: list[int] = []

    class Seen(DeviceStream):
        def __init__(self, on: torch.device) -> None:
            super().__init__(on)
            lanes.append(self)

    monkeypatch.setattr(device, "device_of", lambda model: where)
    monkeypatch.setattr(device, "DeviceStream", Seen)
    run, trained = str(tmp_path / "run"), net(where, torch.bfloat16)

    def train(steps: int) -> isthmus.Link:
        trainers.append(threading.get_ident())
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
        link = isthmus.join(
            run, trained, optimizer, learner="a", create=Rules(fragments=3, sync_every=3),
            pace=Pace(heartbeat_s=0.2, silence_s=0.8), checkpoint_s=0.3,
        )  # fmt: skip
        with link:
            while link.steps_done < steps or min(link.versions) < 4:
                trained(torch.arange(40, device=where)).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                with Read() as read:
                    link.step(40)
                assert not read.found
                threading.Event().wait(0.01)
        return link

    async def go() -> None:
        seed = seed_of(trained, Rules(fragments=3, sync_every=3))
        with threaded(2, 0) as runtime:
            async with world(tmp_path / "run", seed, runtime=runtime) as w, serving(w.syncer()):
                first = await asyncio.to_thread(train, 20)
                again = await asyncio.to_thread(train, first.steps_done + 20)
                assert again.moments == "own"
                assert again.incarnation == 2

    asyncio.run(go())
    assert len(lanes) == 2
    for trainer, device_stream in zip(trainers, lanes, strict=True):
        assert sum(device_stream.waits.values()) > 10, "the agent's threads must have waited"
        # Each incarnation has its own counts: a new thread may get the id of a thread that has ended.
        assert trainer not in device_stream.waits

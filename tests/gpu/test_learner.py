"""A learner whose model is on a GPU: nothing at a step boundary waits for the GPU, whatever trains it, and replay agrees."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import isthmus
from e2e.test_processes import processes
from e2e.test_ranks import LEARNER, torchrun
from isthmus.format.rules import Pace, Rules
from isthmus.log import fold
from isthmus.runtime.clock import threaded
from isthmus.torch.model import load, specs_of
from isthmus_services.main import main
from support.world import World, seed_of, serving, world

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]

BUSY_CYCLES = 100_000_000
"""Clock cycles that the GPU is kept busy for, some 50 ms: far longer than a boundary takes the host."""

RULES = Rules(fragments=3, sync_every=3)
PACE = Pace(heartbeat_s=0.2, silence_s=0.8)


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(40, 64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 40)).to("cuda", dtype)


def words(model: nn.Module) -> torch.Tensor:
    x = torch.arange(40, device="cuda")
    return nn.functional.cross_entropy(model(x).float(), (x + 1) % 40)


def images(model: nn.Module) -> torch.Tensor:
    x = torch.randn(8, 3, 16, 16, device="cuda").to(memory_format=torch.channels_last)
    found: torch.Tensor = model(x).float().pow(2).mean()
    return found


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten())
    return model.to("cuda", memory_format=torch.channels_last)  # type: ignore[no-any-return]


def adam(model: nn.Module, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, **more)


MODELS: dict[str, tuple[Callable[[], Any], Callable[[nn.Module], torch.optim.Optimizer], Any]] = {
    "float32, AdamW": (net, adam, words),
    "fused AdamW": (net, lambda m: adam(m, fused=True), words),
    "capturable AdamW": (net, lambda m: adam(m, capturable=True), words),
    "bfloat16": (lambda: net(torch.bfloat16), lambda m: adam(m, fused=True), words),
    "SGD with momentum": (net, lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9), words),
    "compiled": (lambda: torch.compile(net()), adam, words),
    "channels_last": (convolutions, adam, images),
}


def train(
    run: str, model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Any, steps: int
) -> tuple[isthmus.Link, list[str]]:
    """Train in a run, with the GPU busy at each boundary; return the link and the boundaries that waited for the GPU.

    `steps`: how many boundaries are judged. They begin when every fragment has been adopted twice: before that, kernels
    are loaded and memory is allocated, and CUDA may wait for the GPU then.
    """
    link = isthmus.join(run, model, optimizer, learner="a", create=RULES, pace=PACE, checkpoint_s=0.5)
    waited: list[str] = []
    with link:
        judged = 0
        while judged < steps:
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda._sleep(BUSY_CYCLES)  # type: ignore[no-untyped-call]
            behind: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            behind.record()
            ready, allocated = min(link.versions) >= 2, _allocations()
            began = time.perf_counter()
            link.step(40)
            took = time.perf_counter() - began
            if ready and behind.query():
                more = _allocations() - allocated
                waited.append(f"step {link.steps_done}: {1e3 * took:.0f} ms, {more} allocations of device memory")
            judged += ready
            behind.synchronize()
    return link, waited


def _allocations() -> int:
    """Return how often memory of the device was allocated by this process so far."""
    return int(torch.cuda.memory_stats().get("num_device_alloc", 0))


@pytest.mark.parametrize("kind", MODELS)
def test_a_learner_trains_goes_on_and_never_waits_for_the_gpu(tmp_path: Path, kind: str) -> None:
    make, optimizer_of, loss_of = MODELS[kind]
    run = str(tmp_path / "run")

    async def go() -> None:
        model = make()
        specs = specs_of(model)
        with threaded(2, 0) as runtime:
            async with world(tmp_path / "run", seed_of(RULES, PACE, specs), runtime=runtime) as w, serving(w.syncer()):
                first, waited = await asyncio.to_thread(train, run, model, optimizer_of(model), loss_of, 30)
                assert not waited, f"of {first.steps_done} boundaries these waited for the GPU: {waited}"
                model = make()
                again, _ = await asyncio.to_thread(train, run, model, optimizer_of(model), loss_of, 6)
                assert again.moments == "own"
                assert again.incarnation == 2

    asyncio.run(go())
    assert main(["replay", run]) == 0


def test_a_global_model_is_read_into_a_model_on_the_gpu(tmp_path: Path) -> None:
    async def go() -> None:
        async with world(tmp_path / "run", seed_of(RULES, PACE, specs_of(net()))) as w:
            there, here = net(), net().cpu()
            values = await published(w)
            load(there, w.run.layout, values)
            load(here, w.run.layout, values)
            for a, b in zip(there.parameters(), here.parameters(), strict=True):
                assert torch.equal(a.cpu(), b)

    asyncio.run(go())


async def published(w: World) -> list[Any]:
    return [await fold.initial(w.log, f.index) for f in w.run.layout.fragments]


def test_the_random_state_of_the_gpu_is_restored() -> None:
    torch.cuda.manual_seed(5)
    saved = isthmus.RandomState().state_dict()
    wanted = torch.rand(9, device="cuda")
    isthmus.RandomState().load_state_dict(saved)
    assert torch.equal(torch.rand(9, device="cuda"), wanted)


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_on_the_gpu_train_and_replay_agrees(tmp_path: Path, ranks: int) -> None:
    run = str(tmp_path / "run")
    with processes(tmp_path) as p:
        p.isthmus("s", "syncer", run, "--wait")
        p.ends(p.start("job", *torchrun(ranks), LEARNER, run, "a", "fsdp2-cuda", "100"))
    assert main(["replay", run]) == 0

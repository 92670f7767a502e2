"""In a process that flushes denormals to zero, merges are refused, and a learner's own threads do not flush them."""

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import isthmus
from isthmus.codecs import codec, kernels, pack
from isthmus.codecs.kernels import U8
from isthmus.errors import DenormalsFlushed, InputError
from isthmus.format.layout import Spec, TensorClass, partition
from isthmus.format.rules import Pace, Rules
from isthmus.log import fold, merge
from isthmus.log.creation import Seed
from isthmus.log.polar import polar_factor
from isthmus.runtime.clock import ComputePool
from isthmus.torch import model as torch_model
from support.world import check_log, serving, world

pytestmark = pytest.mark.tier("test")

FRAGMENT = partition([Spec("w", (40, 8), "float32", TensorClass.DENSE)], 1).fragments[0]
FADED = np.full(FRAGMENT.size, 1e-40, np.float32)
"""Denormal values, like the momentum of parameters that have had no gradient for a few hundred rounds."""


Flushing = Callable[[Callable[[], object]], object]


@pytest.fixture
def flushing() -> Iterator[Flushing]:
    """Start a thread in which the processor flushes denormals; no other thread of the tests is changed."""
    with ThreadPoolExecutor(1, initializer=torch.set_flush_denormal, initargs=(True,)) as pool:
        yield lambda fn: pool.submit(fn).result()


def a_round() -> merge.Accumulator:
    accumulator = merge.Accumulator(FRAGMENT, merge.outers(Rules()))
    accumulator.add(FADED, 1.0)
    return accumulator


def a_difference() -> U8:
    return pack(codec("f32"), FRAGMENT, FADED)


def test_a_thread_is_told_from_one_that_flushes(flushing: Flushing) -> None:
    assert not kernels.flushes_denormals()
    assert flushing(kernels.flushes_denormals)
    kernels.require_denormals()
    with pytest.raises(DenormalsFlushed, match=r"call torch\.set_flush_denormal\(False\) in that thread"):
        flushing(kernels.require_denormals)
    assert issubclass(DenormalsFlushed, InputError), "an operator can fix the cause, and a retry cannot"


def test_a_compute_that_flushes_computes_nothing() -> None:
    d = np.ones((200, 200), np.float32)
    pool = ThreadPoolExecutor(2, initializer=torch.set_flush_denormal, initargs=(True,))
    with pool, pytest.raises(DenormalsFlushed):
        polar_factor(d, 200.0, ComputePool(pool, 2))


@pytest.mark.parametrize(
    "work",
    [
        a_round,
        partial(merge.advance, merge.initial(FADED), a_round(), codec("int4"), bytes(32)),
        lambda: merge.next_published(FADED, FRAGMENT, codec("f32"), a_difference()),
    ],
    ids=["accumulate", "advance", "apply a value"],
)
def test_what_the_log_records_is_not_computed_there(work: Callable[[], object], flushing: Flushing) -> None:
    work()
    with pytest.raises(DenormalsFlushed):
        flushing(work)


def tiny() -> nn.Module:
    """Return a model whose first weights are denormal. If all inputs are zero, training does not make them larger."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    with torch.no_grad():
        model.get_parameter("0.weight").fill_(1e-40)
    return model


def made_of(model: nn.Module) -> Seed:
    """Return the seed of a run whose codecs keep every bit."""
    rules = Rules(fragments=2, sync_every=2, codec_up="f32", codec_down="f32")
    pace = Pace(heartbeat_s=0.2, silence_s=0.8)
    return Seed(torch_model.specs_of(model), torch_model.values_of(model), {}, rules, pace)


async def test_a_learner_trains_in_a_process_that_flushes_and_its_training_thread_goes_on_flushing(
    folder: Path, flushing: Flushing
) -> None:
    """The learner's agent adds published differences to denormal values, and compares each with a digest in the log."""
    flushed: list[bool] = []

    def train() -> None:
        model = tiny()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with isthmus.join(str(folder), model, optimizer, learner="a") as link:
            while min(link.versions) < 3:
                model(torch.zeros(1, 4)).sum().backward()
                optimizer.step()
                link.step(tokens=4)
                flushed.append(kernels.flushes_denormals())
                time.sleep(0.01)

    async with world(folder, made_of(tiny())) as w, serving(w.syncer()):
        await asyncio.get_running_loop().run_in_executor(None, flushing, train)
        await check_log(w)
        ends = [await fold.fold(w.log, f.index, fold.PublishedValue(w.log)) for f in w.run.layout.fragments]
    smallest = min(np.abs(at.carried[at.carried != 0.0]).min() for at in ends)
    assert smallest < np.finfo(np.float32).smallest_normal, "the run has denormal values that could be flushed"
    assert flushed
    assert all(flushed), "the training thread still flushes denormals"


async def test_who_follows_in_a_process_that_flushes_gets_what_was_published(folder: Path, flushing: Flushing) -> None:
    """Each value is compared with a digest in the log: if denormals were flushed, the digest would not match."""
    model, followed = tiny(), tiny()

    def train() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with isthmus.join(str(folder), model, optimizer, learner="a") as link:
            while min(link.versions) < 3:
                model(torch.zeros(1, 4)).sum().backward()
                optimizer.step()
                link.step(tokens=4)
                time.sleep(0.01)

    cuts: list[int] = []

    def follow() -> None:
        with isthmus.follow(str(folder), followed) as following:
            while following.cut < 3:
                following.update(60.0)
                cuts.append(following.cut)

    async with world(folder, made_of(tiny())) as w:
        loop = asyncio.get_running_loop()
        async with serving(w.syncer()):
            following = loop.run_in_executor(None, flushing, follow)
            await asyncio.wait([following], timeout=1.0)  # the follower has the first version, and must add differences
            await loop.run_in_executor(None, train)
            await following
        ends = [
            await fold.fold(w.log, f.index, fold.PublishedValue(w.log), until=cuts[-1]) for f in w.run.layout.fragments
        ]
    for f, at in zip(w.run.layout.fragments, ends, strict=True):
        for t in f.tensors:
            held = followed.get_parameter(t.spec.name).detach().reshape(-1)[t.origin : t.origin + t.size]
            assert held.numpy().tobytes() == at.carried[t.start : t.stop].tobytes(), t.name

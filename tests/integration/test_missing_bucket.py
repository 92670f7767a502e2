"""A run in a bucket that does not exist: join creates both, and the advice creates the user's own model."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest
import torch
from torch import nn

import isthmus
from isthmus.agent.ports import known_run, open_place, patiently
from isthmus.errors import BucketMissing, LayoutMismatch
from isthmus.format.rules import Rules
from isthmus.log.run import Run
from isthmus.runtime.clock import single_threaded
from isthmus.runtime.urls import Place
from isthmus.store import make_bucket
from isthmus_services.main import main
from isthmus_services.servers import Server


@pytest.fixture
def join(seaweedfs: Server, use: Callable[[Server], None], tmp_path: Path) -> Callable[..., isthmus.Link]:
    use(seaweedfs)

    def joins(run: str, create: isthmus.link.joining.Create | None = None) -> isthmus.Link:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return isthmus.join(run, model, optimizer, bus=f"sqlite://{tmp_path}/bus", learner="a", create=create)

    return joins


async def waited(run: str) -> Run:
    """Wait for the run as `isthmus syncer --wait` does; return it."""
    async with open_place(run) as store:
        assert await patiently(lambda: known_run(store), store.runtime, asyncio.Event(), lambda _: None)
        return await known_run(store)


async def test_join_creates_the_bucket_of_the_run_that_it_creates_and_warns(
    join: Callable[..., isthmus.Link], caplog: pytest.LogCaptureFixture
) -> None:
    run = f"s3://made-{uuid4().hex}/run"
    with pytest.raises(BucketMissing, match=r"call join\(\.\.\., create=Rules\.suited\)"):
        await asyncio.to_thread(join, run)
    waiting = asyncio.ensure_future(waited(run))
    link = await asyncio.to_thread(join, run, Rules.suited)
    await asyncio.to_thread(link.close)
    warned = [r.getMessage() for r in caplog.records if r.levelname == "WARNING" and "created the bucket" in r.msg]
    assert len(warned) == 1
    assert f"for a new run {run}: if that is a mistyped address" in warned[0]
    assert [s.name for s in (await waiting).layout.specs] == ["weight", "bias"]


async def test_of_learners_that_start_together_only_the_one_that_made_the_bucket_warns(
    join: Callable[..., isthmus.Link],
) -> None:
    place = Place.of(f"s3://made-{uuid4().hex}/run")
    assert await make_bucket(place, single_threaded(0))
    assert not await make_bucket(place, single_threaded(0))


def test_a_run_of_another_model_says_what_to_do(join: Callable[..., isthmus.Link]) -> None:
    run = f"s3://made-{uuid4().hex}/run"
    assert main(["init", run, "--create-bucket"]) == 0
    with pytest.raises(LayoutMismatch) as refused:
        join(run, Rules.suited)
    assert str(refused.value).endswith(
        f"; use the model that {run} was created with (isthmus.demo.gpt:byte_gpt made its model), or another address "
        "for this one"
    )

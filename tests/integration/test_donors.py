"""A new learner tries the newest checkpoints of others first, and fetches little of a checkpoint that it rejects."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from isthmus.errors import RecordInvalid
from isthmus.format.layout import Spec, TensorClass
from isthmus.format.records import frame
from isthmus.format.records.keys import checkpoint_key
from isthmus.format.records.objects import CheckpointHeader
from isthmus.learner.agent import LearnerAgent
from isthmus.learner.checkpoint import Checkpoint, LoopState, Saver
from isthmus.learner.resume import donors
from isthmus.log.checkpoint_head import HEAD_BYTES, read_head
from isthmus.log.listing import checkpoints_in
from isthmus.store import Entry
from isthmus.torch.loop import Loop
from support.world import NumpyReplica, World, seed_of, serving, train, world

LARGE = seed_of(specs=[Spec(f"layer{i}", (100, 90), "float32", TensorClass.DENSE) for i in range(4)])


class Moments:
    """A stand-in for an optimizer, with a state of `names` arrays."""

    def __init__(self, names: int = 1) -> None:
        self.names = names

    def mark(self, now: object) -> None:
        pass

    def moved(self, orderly: bool) -> None:
        return None

    def save(self) -> LoopState:
        return LoopState({f"a parameter with a long name {i}": np.full(30, i, np.float32) for i in range(self.names)})

    def take(self, node: object) -> None:
        return None


@asynccontextmanager
async def merged(folder: Path, *names: str, saver: Callable[[], Saver] = Moments) -> AsyncIterator[World]:
    """Create a run in which these learners train at the same time. Each stores a checkpoint when it leaves."""

    async def live(agent: LearnerAgent) -> None:
        await agent.join()
        replica = NumpyReplica(w.run.layout)
        boundary = agent.attach(replica, saver=saver())
        task = asyncio.ensure_future(agent.run())
        while not ready():
            for values in replica.values:
                values -= np.float32(1e-3)
            boundary.after_step(100, 1.0)
            await asyncio.sleep(0.01)
        boundary.freeze()
        agent.drain(done=True)
        await task

    async with world(folder, LARGE) as w, serving(w.syncer()):
        agents = [w.learner(name) for name in names]

        def ready() -> bool:
            return all(sum(account.merged for account in agent.uplink.accounts) for agent in agents)

        await asyncio.gather(*map(live, agents))
        yield w


def written(folder: Path, learner: str, at: float) -> None:
    """Set the time at which a learner's checkpoints were written, on the store's clock."""
    for path in folder.glob(f"learners/{learner}/*/checkpoints/*"):
        os.utime(path, (at, at))


async def test_the_newest_checkpoint_comes_first_whatever_its_learner_is_called(folder: Path) -> None:
    async with merged(folder, "a", "b", "c") as w:
        for order in (["b", "a", "c"], ["c", "b", "a"]):
            for age, name in enumerate(order):
                written(folder, name, 1e9 - age)
            found = await donors(w.log, "newcomer", {"a", "b", "c"})
            assert [e.key.split("/")[1] for e in found] == order
        assert [e.key.split("/")[1] for e in await donors(w.log, "b", {"b", "c"})] == ["c"]


async def test_what_goes_wrong_with_one_donor_is_its_own_affair(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with merged(folder, "a", "b", "c") as w:
        for age, name in enumerate("abc"):
            written(folder, name, 1e9 - age)
        newcomer = w.learner("newcomer")
        await newcomer.join()
        assert newcomer.downlink.merged_lately <= {"a", "b", "c"}
        newcomer.downlink.merged_lately |= {"a", "b", "c"}

        def fits(found: Checkpoint) -> None:
            if found.header.learner == "a":
                raise ZeroDivisionError("a's very own")

        def glance(header: CheckpointHeader) -> None:
            if header.learner == "b":
                raise AttributeError("b's very own")

        found = await newcomer.donor(fits, glance)
        assert found is not None
        assert found.header.learner == "c"
        assert "a's very own" in caplog.text
        assert "b's very own" in caplog.text


@pytest.mark.parametrize("names", [1, 2000], ids=["short header", "long header"])
async def test_one_that_its_header_gives_away_is_not_fetched(names: int, folder: Path) -> None:
    async with merged(folder, "a", saver=lambda: Moments(names)) as w:
        [entry] = checkpoints_in(await w.store.list("learners/"))
        header = (await read_head(w.log, entry.key)).said
        assert header.learner == "a"
        newcomer = w.learner("newcomer")
        await newcomer.join()
        before = w.store.traffic.bytes_down
        seen: list[Checkpoint] = []
        assert await newcomer.donor(seen.append, lambda header: "of another class") is None
        fetched = w.store.traffic.bytes_down - before
        assert seen == []
        assert fetched < entry.size / 2
        assert (fetched > HEAD_BYTES) == (names > 1)
        assert await newcomer.donor(lambda found: None) is not None, (
            "without the check of its header, the checkpoint must be used"
        )


async def test_of_one_that_claims_a_huge_header_only_the_beginning_is_read(folder: Path) -> None:
    async with merged(folder, "a") as w:
        [entry] = checkpoints_in(await w.store.list("learners/"))
        blob = bytearray(await w.store.get(entry.key)) + bytes(4 << 20)
        blob[12:16] = (60 << 20).to_bytes(4, "little")
        assert frame.head_end(blob, frame.Kind.CHECKPOINT) == frame.PREFIX.size + (60 << 20)
        await w.store.put(entry.key, blob)
        before = w.store.traffic.bytes_down
        with pytest.raises(RecordInvalid, match="bytes of header"):
            await read_head(w.log, entry.key)
        assert w.store.traffic.bytes_down - before <= HEAD_BYTES


async def test_a_damaged_header_is_passed_over(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with merged(folder, "a") as w:
        [entry] = checkpoints_in(await w.store.list("learners/"))
        whole = await w.store.get(entry.key)
        newcomer = w.learner("newcomer")
        await newcomer.join()
        for damaged in (whole[:50], b"", whole[:200], bytes(300), bytes(whole[:130]) + b"?" + bytes(whole[131:])):
            await w.store.put(entry.key, damaged)
            assert await newcomer.donor(lambda found: None) is None
        assert caplog.text.count("is not used") == 5


async def test_a_run_in_flight_whose_learners_wrote_no_checkpoint_has_no_donor(folder: Path) -> None:
    async with world(folder, LARGE) as w, serving(w.syncer()) as syncer:
        await train(w.learner("a"), 20, enough=lambda: min(k.head for k in syncer.coordinators) >= 1)
        newcomer = w.learner("newcomer")
        await newcomer.join()
        assert await newcomer.donor(lambda found: None) is None


def test_of_ones_own_checkpoints_those_of_later_lives_come_first_whatever_their_steps() -> None:
    """An incarnation that went back to an older checkpoint, say after a twin did damage, has taken fewer steps than the
    one before it. A restart still goes on from the later incarnation's checkpoints."""
    keys = [checkpoint_key("l", life, step, bytes(32)) for life, step in ((3, 7), (2, 60), (2, 40), (1, 100), (1, 90))]
    listed = [Entry(key, 1, 0.0) for key in sorted(keys)]
    assert [e.key for e in checkpoints_in(listed)] == keys


class Sampler:
    """A sampler that returns its state as the dict that it later changes."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"epoch": 0, "order": [3, 1, 2], "seen": np.zeros(3, np.int64)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_the_samplers_state_is_of_the_moment_it_was_asked_for() -> None:
    model, sampler = torch.nn.Linear(2, 2), Sampler()
    [alone] = Loop(model, torch.optim.SGD(model.parameters(), 0.1), sampler).save().ranks
    sampler.state["epoch"] = 1
    sampler.state["order"].append(4)
    sampler.state["seen"] += 1
    assert isinstance(alone, dict)
    data = alone["objects"]["data"]
    assert (data["epoch"], data["order"], data["seen"].tolist()) == (0, [3, 1, 2], [0, 0, 0])

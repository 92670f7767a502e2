"""A syncer merges an update only as its own header describes it, and merges each base once, even after a restart."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from isthmus.errors import Denied
from isthmus.format.records import frame
from isthmus.format.records.keys import commit_key
from isthmus.format.records.messages import Announce, encode, learner_stream
from isthmus.format.records.objects import Input, UpdateHeader
from isthmus.format.rules import Pace, Rules
from isthmus.log import Log
from isthmus.store import EdgeStore
from isthmus.syncer import Syncer
from isthmus.syncer.round_sum import EXPLODES
from isthmus_lab.simulate.conditions import Conditions
from support.written_log import ONE_WAY_S, Asked, Written

RULES = Rules(fragments=2, sync_every=4)
PACE = Pace(heartbeat_s=1.0, silence_s=3.0, staleness=3)
CALM = Pace(heartbeat_s=1.0, silence_s=60.0, staleness=3)
"""A pace at which late updates wait for newer ones."""


class Serving(Syncer):
    """A syncer whose connection to the store can be told to answer otherwise."""

    wire: Asked


@asynccontextmanager
async def syncer(w: Written) -> AsyncIterator[Serving]:
    """Run a syncer in virtual time, for 10 s without learners before the block; cancel it at the end."""
    process = w.world.process("syncer", len(w.store.requests))
    ports = w.world.ports(process, Conditions(latency_s=ONE_WAY_S), Conditions(latency_s=ONE_WAY_S))
    wire = Asked(ports.wire)
    store = EdgeStore(wire, process.runtime)
    found = Serving(Log(w.run, store, process.runtime), store, ports.bus, process.runtime, "s1", None)
    found.wire = wire
    await found.recover()
    task = process.start(found.run(asyncio.Event()))
    await asyncio.sleep(10.0)
    try:
        yield found
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def announce(w: Written, key: str, **claimed: Any) -> None:
    """Announce an update, with these claims in place of its own values; then wait 5 s."""
    _, fragment, learner, name = key.split("/")
    header, _ = frame.parse(w.blob(key), frame.Kind.UPDATE, UpdateHeader)
    fields: dict[str, Any] = {
        "run": w.run.digest,
        "id": "x",
        "learner": learner,
        "incarnation": header.incarnation,
        "fragment": int(fragment),
        "base": int(name.split("-")[0]),
        "key": key,
        "digest": frame.digest(w.blob(key)),
        "size": len(w.blob(key)),
        "steps": header.steps,
        "tokens": header.tokens,
        "step": header.step,
        "tokens_seen": header.tokens_seen,
        "due": True,
        "age_s": 0.0,
        "step_s": 0.1,
        "upload_s": 0.1,
        "sync_s": 0.1,
    }
    bus = w.world.ports(w.process).bus
    await bus.append(learner_stream(learner), encode(Announce(**fields | claimed)))
    await asyncio.sleep(5.0)


async def head(w: Written) -> int:
    newest = await w.log.newest(0)
    return newest.version if newest else 0


async def inputs(w: Written, version: int) -> tuple[Input, ...]:
    commit = await w.log.commit(0, version)
    assert commit is not None
    return commit.header.inputs


def test_a_due_update_is_merged_as_it_was_announced() -> None:
    async def body(w: Written) -> None:
        async with syncer(w):
            key = w.upload("a", 0)
            await announce(w, key)
            [given] = await inputs(w, 1)
            assert (given.key, given.tokens, given.steps) == (key, 400, 4)

    Written(RULES, PACE).drive(body)


@pytest.mark.parametrize(
    ("claimed", "reason"),
    [
        ({"tokens": 401}, "malformed"),
        ({"steps": 3}, "malformed"),
        ({"size": -1}, "oversized"),
        ({"size": 1}, "truncated"),
    ],
)
def test_an_update_is_merged_for_what_it_says_itself_or_not_at_all(claimed: dict[str, int], reason: str) -> None:
    """The weight follows from tokens and steps, and the announced values decide which of two updates is taken."""

    async def body(w: Written) -> None:
        async with syncer(w) as serving:
            key = w.upload("a", 0)
            size = len(w.blob(key)) + claimed.get("size", 0)
            await announce(w, key, **claimed | {"size": size})
            assert serving.coordinators[0].rounds.rejected_total == {reason: 1}
            assert await head(w) == 0
            await announce(w, w.upload("b", 0))
            assert [given.learner for given in await inputs(w, 1)] == ["b"]

    Written(RULES, PACE).drive(body)


def test_only_a_learner_that_was_merged_before_is_said_to_explode(caplog: pytest.LogCaptureFixture) -> None:
    """A learner's first update may be many times as long as those of learners that have trained for long."""

    async def body(w: Written) -> None:
        size = w.run.layout.fragments[0].size
        async with syncer(w):
            for base in range(5):
                for name, length in (("wild", 0.05), ("a", 1e-3), ("b", 1e-3))[base < 3 :]:
                    await announce(w, w.upload(name, base, values=np.full(size, length, np.float32)))
                await asyncio.sleep(10.0)
                wild = [given for given in await inputs(w, base + 1) if given.learner == "wild"]
                assert all(given.scale < EXPLODES for given in wild)
                assert len(wild) == (base >= 3)
                assert ("wild explodes" in caplog.text) == (base > 3), "not at its first update"

    Written(RULES, CALM).drive(body)


def test_no_learner_is_said_to_explode_while_a_fragment_has_no_history(caplog: pytest.LogCaptureFixture) -> None:
    """Learning rates are warmed up: the first updates are far shorter than those that follow."""

    async def body(w: Written) -> None:
        size = w.run.layout.fragments[0].size
        async with syncer(w):
            for base, (a, b) in enumerate(((1e-5, 1e-5), (1e-2, 1e-5))):
                for name, length in (("a", a), ("b", b)):
                    await announce(w, w.upload(name, base, values=np.full(size, length, np.float32)))
                await asyncio.sleep(10.0)
            assert min(given.scale for given in await inputs(w, 2)) < EXPLODES
            assert "explodes" not in caplog.text

    Written(RULES, CALM).drive(body)


def test_an_update_that_may_not_be_read_is_its_learners_affair() -> None:
    async def body(w: Written) -> None:
        async with syncer(w) as serving:
            serving.wire.answers = lambda operation, key: Denied("403") if key.startswith("updates/00000/a/") else None
            await announce(w, w.upload("a", 0))
            assert serving.coordinators[0].rounds.rejected_total == {"unreadable": 1}
            await announce(w, w.upload("b", 0))
            assert await head(w) == 1

    Written(RULES, PACE).drive(body)


def test_where_the_syncer_itself_is_refused_no_update_is_to_blame() -> None:
    async def body(w: Written) -> None:
        async with syncer(w) as serving:
            serving.wire.answers = lambda operation, key: Denied("403") if operation.startswith("get") else None
            key = w.upload("a", 0)
            await announce(w, key)
            assert serving.coordinators[0].rounds.rejected_total == {}
            serving.wire.answers = lambda operation, key: None
            await announce(w, key)
            assert await head(w) == 1

    Written(RULES, PACE).drive(body)


@pytest.mark.parametrize("versions", [1, 2, 3])
def test_a_syncer_that_comes_back_knows_every_base_that_could_be_merged_again(versions: int) -> None:
    """This includes bases merged as long ago as staleness allows: their commits are read despite a newer snapshot."""

    async def body(w: Written) -> None:
        await w.commit(w.upload("a", 0), w.upload("b", 0))
        while w.states[0].version < versions:
            await w.commit(w.upload("b", w.states[0].version))
        w.snapshot()
        async with syncer(w) as serving:
            await announce(w, w.upload("a", 0, tokens=900, steps=9))
            assert serving.coordinators[0].rounds.rejected_total == {"base-merged": 1}
            await announce(w, w.upload("b", versions))
            assert [given.learner for given in await inputs(w, versions + 1)] == ["b"]

    Written(RULES, PACE).drive(body)


def test_commits_as_far_back_as_staleness_reaches_must_be_there() -> None:
    """Without one of these commits the syncer cannot know which bases were merged. An older commit may be missing."""

    async def body(w: Written) -> None:
        await w.grow(6)
        w.snapshot()
        await w.store.delete(commit_key(0, 2))
        async with syncer(w) as serving:
            assert not serving.coordinators[0].broken
        await w.store.delete(commit_key(0, 3))
        async with syncer(w) as serving:
            assert serving.coordinators[0].broken

    Written(RULES, PACE).drive(body)


def test_nothing_is_committed_that_could_not_be_read() -> None:
    async def body(w: Written) -> None:
        async with syncer(w):
            await announce(w, w.upload("a", 0), age_s=1e9, step_s=1e9, upload_s=1e9, sync_s=1e9)
            assert await head(w) == 1
            assert commit_key(0, 1) in w.keys("commits/")

    Written(RULES, PACE).drive(body)


def test_every_so_many_versions_there_is_a_snapshot_and_fragments_take_turns() -> None:
    async def body(w: Written) -> None:
        async with syncer(w):
            for base in range(6):
                for p in (0, 1):
                    await announce(w, w.upload("a", base, p))
        stored = {p: [version for version, _ in reversed(await w.log.snapshots(p)) if version] for p in (0, 1)}
        assert stored == {0: [3, 6], 1: [2, 5]}

    Written(RULES, Pace(heartbeat_s=1.0, silence_s=3.0, snapshot_every=3)).drive(body)

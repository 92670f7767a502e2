"""If one learner's objects, messages or links are bad, or one syncer cannot serve, others go on. In virtual time."""

import asyncio
import logging
import random
import re
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NoReturn

import numpy as np
import pytest

from isthmus.errors import Denied
from isthmus.format.layout import Spec, TensorClass
from isthmus.format.records.frame import Blob, Body, Data
from isthmus.format.records.keys import update_key
from isthmus.format.records.messages import Announce, encode, learner_stream
from isthmus.format.rules import Pace, Rules
from isthmus.log import Log
from isthmus.log.creation import Seed
from isthmus.log.run import Run
from isthmus.store import EdgeStore, Entry, Store
from isthmus.syncer import Syncer
from isthmus_lab.simulate.conditions import Conditions
from isthmus_lab.simulate.world import SimulatedPorts, Times, World, learn, serve
from simulation.toy import Toy

FRAGMENTS = 4

Before = Callable[[str, str], Awaitable[object] | None]
"""Called with the kind of a request and its key. Its result is awaited before the request is sent."""


class Wrapped:
    """A store whose requests can be delayed or denied before they are sent."""

    def __init__(self, inner: Store, before: Before) -> None:
        self._inner, self._before, self.url = inner, before, inner.url

    async def _ask(self, what: str, key: str) -> None:
        waiting = self._before(what, key)
        if waiting is not None:
            await waiting

    async def get(self, key: str) -> Body:
        await self._ask("get", key)
        return await self._inner.get(key)

    async def get_range(self, key: str, start: int, stop: int) -> Body:
        await self._ask("get", key)
        return await self._inner.get_range(key, start, stop)

    async def put(self, key: str, data: Data) -> None:
        await self._ask("put", key)
        await self._inner.put(key, data)

    async def create(self, key: str, data: Blob) -> bool:
        await self._ask("create", key)
        return await self._inner.create(key, data)

    async def list(self, prefix: str) -> Sequence[Entry]:
        await self._ask("list", prefix)
        return await self._inner.list(prefix)

    async def delete(self, key: str) -> None:
        await self._ask("delete", key)
        await self._inner.delete(key)


class Story:
    """Syncers and learners in one world. `before` is called for each request of a syncer."""

    def __init__(self, name: str, *, latency_s: float = 0.01) -> None:
        self.world = World(name)
        self.before: Before = lambda _, __: None
        self.syncers: list[Syncer] = []
        self.serving: list[asyncio.Task[None]] = []
        self.stores: list[Conditions] = []
        self.buses: list[Conditions] = []
        self._latency_s = latency_s

    def _before(self, what: str, key: str) -> Awaitable[object] | None:
        return self.before(what, key)

    async def begin(self, syncers: int, learners: int, pace: Pace | None = None) -> Run:
        # The period is fixed, so that the number of commits shows how long rounds take.
        rules = Rules(fragments=FRAGMENTS, sync_every=4, sync_every_max=4)
        specs = [Spec(f"t{i}", (16,), "float32", TensorClass.DENSE) for i in range(FRAGMENTS)]
        self.run = await self.world.create(
            Seed(specs, [np.ones(16, np.float32) for _ in specs], {}, rules, pace or Pace())
        )
        for i in range(syncers):
            process = self.world.process(f"s{i}")
            self.stores.append(Conditions(self._latency_s))
            self.buses.append(Conditions(self._latency_s / 2))
            ports = self.world.ports(process, self.stores[i], self.buses[i])
            wrapped = Wrapped(ports.wire, self._before)
            ports = SimulatedPorts(process, EdgeStore(wrapped, process.runtime), ports.bus, ports.wire)
            self.serving.append(process.start(serve(ports, f"s{i}", asyncio.Event(), None, self.syncers.append)))
        for i in range(learners):
            process = self.world.process(f"l{i}")
            ports = self.world.ports(process, Conditions(self._latency_s), Conditions(self._latency_s / 2))
            process.start(learn(ports, f"l{i}", Toy(random.Random(i), 0.25), Times()))
        await asyncio.sleep(15.0)
        return self.run

    def heads(self) -> list[int]:
        return [max(s.coordinators[p].head for s in self.syncers) for p in range(FRAGMENTS)]

    async def commits_meanwhile(self, seconds: float) -> list[int]:
        before = self.heads()
        await asyncio.sleep(seconds)
        return [now - then for now, then in zip(self.heads(), before, strict=True)]

    async def merged_since(self, heads: list[int]) -> list[str]:
        """Return the learners whose updates were merged after these versions, once for each update."""
        ports = self.world.ports(self.world.process("judge"))
        log = Log(self.run, ports.store, ports.process.runtime)
        return [
            given.learner
            for p, head in enumerate(heads)
            async for commit in log.commits(p, head)
            for given in commit.header.inputs
        ]

    def tell(self, body: Coroutine[Any, Any, None]) -> None:
        try:
            self.world.clock.run_until_complete(body)
        finally:
            self.world.clock.close()


def refuse(key: str) -> NoReturn:
    raise Denied(f"s3://bucket/run: access denied (AccessDenied): {key}")


@pytest.mark.tier("all")
def test_what_one_learner_stored_and_nobody_may_read_turns_its_updates_away_and_nothing_else() -> None:
    story = Story("denied")

    async def body() -> None:
        await story.begin(syncers=2, learners=3)
        story.before = lambda what, key: refuse(key) if what == "get" and "/l0/" in key else None
        await asyncio.sleep(5.0)  # until updates that were fetched before are merged
        heads = story.heads()
        assert min(await story.commits_meanwhile(60.0)) > 20
        assert all(not task.done() for task in story.serving)
        merged = await story.merged_since(heads)
        assert "l0" not in merged
        assert {"l1", "l2"} <= set(merged)
        assert sum(k.rounds.rejected_total.get("unreadable", 0) for k in story.syncers[0].coordinators) > 0
        # The learner is not rejected for good: once its updates may be read, they are merged again.
        story.before = lambda _, __: None
        await asyncio.sleep(5.0)
        heads = story.heads()
        await asyncio.sleep(30.0)
        assert "l0" in await story.merged_since(heads)

    story.tell(body())


@pytest.mark.tier("all")
def test_bodies_that_never_end_hold_up_nobody_but_their_learner() -> None:
    story = Story("endless")

    async def body() -> None:
        await story.begin(syncers=1, learners=3)
        story.before = lambda what, key: asyncio.sleep(1e6) if what == "get" and "/l0/" in key else None
        heads = story.heads()
        assert min(await story.commits_meanwhile(120.0)) > 25
        merged = await story.merged_since([head + 4 for head in heads])
        assert "l0" not in merged
        assert {"l1", "l2"} <= set(merged)

    story.tell(body())


@pytest.mark.tier("all")
def test_what_a_syncer_itself_is_refused_ends_it_only_after_the_stated_time() -> None:
    story = Story("own keys")

    async def body() -> None:
        await story.begin(syncers=1, learners=2)
        story.before = lambda what, key: refuse(key) if key.startswith(("commits/", "values/")) else None
        await asyncio.sleep(200.0)
        assert not story.serving[0].done()
        story.before = lambda _, __: None
        assert min(await story.commits_meanwhile(30.0)) > 8  # the syncer goes on, as after any outage
        story.before = lambda what, key: refuse(key) if key.startswith("commits/") else None
        await asyncio.wait(story.serving, timeout=400.0)
        assert story.serving[0].done()
        error = story.serving[0].exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        assert isinstance(error, Denied)

    story.tell(body())


@pytest.mark.tier("all")
@pytest.mark.parametrize("port", ["store", "bus"])
def test_a_syncer_that_cannot_serve_says_so_is_left_out_while_it_lasts_and_comes_back(
    port: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "isthmus.agent.trouble")
    story = Story(f"half dead {port}")

    async def body() -> None:
        await story.begin(syncers=2, learners=3)
        assert all(s.held for s in story.syncers)
        conditions = (story.stores if port == "store" else story.buses)[0]
        conditions.cut_off = True
        await asyncio.sleep(15.0)  # for the syncer's timeouts, and until its peer takes it for silent
        assert story.syncers[1].held == set(range(FRAGMENTS))
        counts = await story.commits_meanwhile(60.0)
        assert min(counts) > 20, counts
        assert min(counts) >= 0.5 * max(counts), counts
        conditions.cut_off = False
        await asyncio.sleep(15.0)
        assert story.syncers[0].held
        assert story.syncers[0].held | story.syncers[1].held == set(range(FRAGMENTS))
        assert not story.syncers[0].held & story.syncers[1].held
        assert min(await story.commits_meanwhile(30.0)) > 10

    story.tell(body())
    said = [
        r.getMessage() for r in caplog.records if r.name == "isthmus.agent.trouble" and r.getMessage().startswith("s0")
    ]
    assert re.match(rf"s0: the {port} does not answer \(for 1\d s\): it leaves its fragments .*; check that", said[0])
    assert said[-1] == f"s0: the {port} does not answer: over"
    assert len(said) <= 3  # the outage, a reminder, and its end


def test_a_flood_from_one_learner_stops_nobody_and_is_counted_under_its_name() -> None:
    story = Story("flood", latency_s=0.02)

    async def body() -> None:
        run = await story.begin(syncers=1, learners=3)

        async def flood() -> None:
            number = 0
            while True:
                for _ in range(60):
                    number += 1
                    p, base, digest = number % FRAGMENTS, 10**6 + number, number.to_bytes(32, "big")
                    story.world.streams.append(
                        learner_stream("evil"),
                        encode(
                            Announce(
                                run=run.digest, id="x", learner="evil", incarnation=1, fragment=p, base=base,
                                key=update_key(p, "evil", base, digest), digest=digest, size=400, steps=1, tokens=1,
                                step=1, tokens_seen=1, due=True, age_s=0.0, step_s=0.2, upload_s=0.0, sync_s=0.0,
                            )
                        ),
                        story.world.clock.time(),
                    )  # fmt: skip
                await asyncio.sleep(0.05)

        quiet = await story.commits_meanwhile(30.0)
        flooding = asyncio.ensure_future(flood())
        loud = await story.commits_meanwhile(30.0)
        flooding.cancel()
        assert min(loud) >= 0.8 * min(quiet), (quiet, loud)
        assert set(story.syncers[0].tallies.dropped) <= {"evil"}

    story.tell(body())

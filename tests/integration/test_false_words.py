"""A syncer that cannot read its store for a while goes on afterwards, even if it heard of false versions meanwhile."""

import asyncio

import pytest

from isthmus.errors import Denied, LogCorrupt, Unavailable
from isthmus.format.records.frame import Body
from isthmus.format.records.keys import UPDATES, commit_key
from isthmus.format.records.messages import SYNCER_STREAM, Committed, encode
from isthmus.log import Log
from isthmus.store import EdgeStore, Layer, Store
from support.world import in_virtual_time, seed_of, serving, train, world


class Gate(Layer):
    """A store that fails reads below a prefix, while it is closed."""

    prefix, closed = "", False
    error: Exception = Unavailable("away")

    async def get(self, key: str) -> Body:
        """Read an object if the gate is open."""
        self._pass(key)
        return await super().get(key)

    async def get_range(self, key: str, start: int, stop: int) -> Body:
        """Read a range if the gate is open."""
        self._pass(key)
        return await super().get_range(key, start, stop)

    def _pass(self, key: str) -> None:
        if self.closed and key.startswith(self.prefix):
            raise self.error


@pytest.mark.tier("all")
@in_virtual_time
async def test_a_false_version_that_was_named_while_the_store_was_away_stops_nothing() -> None:
    gates: list[Gate] = []

    def wrap(store: EdgeStore) -> Store:
        gates.append(Gate(store))
        return gates[-1]

    async with world("", seed_of()) as w, serving(w.through(wrap).syncer()) as syncer:
        learner = asyncio.ensure_future(train(w.learner("a"), 3000))
        await asyncio.sleep(5.0)
        for gate in gates:
            gate.closed = True
        for p in range(len(w.run.layout.fragments)):
            word = Committed(run=w.run.digest, id=f"{p}", syncer="ghost", fragment=p, version=999, digest=bytes(32))
            await w.bus.append(SYNCER_STREAM, encode(word))
        await asyncio.sleep(3.0)
        for gate in gates:
            gate.closed = False
        before = [coordinator.head for coordinator in syncer.coordinators]
        await asyncio.sleep(10.0)
        assert all(coordinator.head > head + 2 for coordinator, head in zip(syncer.coordinators, before, strict=True))
        await learner


@in_virtual_time
async def test_a_syncer_that_may_not_read_what_was_merged_waits_until_it_may() -> None:
    async with world("", seed_of()) as w:
        async with serving(w.syncer("s1"), killed=True) as first:
            await train(w.learner("a"), 40, enough=lambda: all(coordinator.head for coordinator in first.coordinators))
        for entry in await w.store.list("snapshots/"):
            if not entry.key.split("/")[2].startswith("0" * 12):
                await w.store.delete(entry.key)
        gates: list[Gate] = []

        def wrap(store: EdgeStore) -> Store:
            gates.append(Gate(store))
            gates[-1].prefix, gates[-1].error, gates[-1].closed = UPDATES, Denied("403"), True
            return gates[-1]

        async with serving(w.through(wrap).syncer("s2")) as second:
            await asyncio.sleep(3.0)
            assert all(coordinator.refused for coordinator in second.coordinators)
            for gate in gates:
                gate.closed = False
            before = [coordinator.head for coordinator in second.coordinators]
            await train(w.learner("a"), 400, step_s=0.05)
            assert all(coordinator.head > head for coordinator, head in zip(second.coordinators, before, strict=True))


@in_virtual_time
async def test_a_syncer_ends_where_every_fragment_is_damaged() -> None:
    async with world("", seed_of()) as w:
        async with serving(w.syncer("s1"), killed=True) as first:
            await train(
                w.learner("a"), 40, enough=lambda: all(coordinator.head > 1 for coordinator in first.coordinators)
            )
        log = Log(w.run, w.store, w.runtime)
        for p in range(len(w.run.layout.fragments)):
            await log.store.put(commit_key(p, 1), b"no commit")
            for key in [key for version, key in await log.snapshots(p) if version]:
                await log.store.delete(key)  # with one, a fragment does without that commit
        with pytest.raises(LogCorrupt):
            await w.syncer("s2").recover()

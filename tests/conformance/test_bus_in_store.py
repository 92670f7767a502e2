"""The bus in the run's own store: what stores and writers can do to it, and what it costs."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typing_extensions import override

from isthmus.bus import PACE_IN_STORE, START, default_pace
from isthmus.bus.endpoints import Listener
from isthmus.bus.store import (
    ABANDONED_S,
    BOXES_EACH,
    HEAD_BYTES,
    KEPT_BYTES,
    KEPT_LEAST,
    KEPT_S,
    LIST_BEATS,
    LIVE_BEATS,
    QUICK,
    QUICK_BEATS,
    SLOW,
    Said,
    StoreBus,
    open_box,
    pack_box,
)
from isthmus.errors import Denied, Unavailable
from isthmus.format.records.frame import Body, Data
from isthmus.format.rules import Pace
from isthmus.store import EdgeStore, Entry, rewrite_s
from isthmus.store.layer import Layer
from isthmus.syncer.holders import BEATS_PER_INTERVAL, SILENT_BEATS
from isthmus_lab.simulate.conditions import Conditions
from isthmus_lab.simulate.world import World

RUN = 16 * "0"
BEAT_S = 4.0

Bodies = st.lists(st.binary(max_size=300), min_size=1, max_size=8)


class Strange(Layer):
    """A store that can hide, deny and count."""

    def __init__(self, store: EdgeStore) -> None:
        super().__init__(store)
        self.frozen: Sequence[Entry] | None = None
        """What every listing shows, if set."""
        self.denied: set[str] = set()
        """Keys that cannot be read."""
        self.asked: list[str] = []
        self.puts_fail = False
        self.full = False
        self.keeps = False

    @override
    async def delete(self, key: str) -> None:
        if self.keeps:
            raise Denied("403")
        await super().delete(key)

    @override
    async def list(self, prefix: str) -> Sequence[Entry]:
        self.asked.append(f"list {prefix}")
        found = await super().list(prefix) if self.frozen is None else self.frozen
        return [entry for entry in found if entry.key.startswith(prefix)]

    @override
    async def get_range(self, key: str, start: int, stop: int) -> Body:
        self.asked.append(f"get {key}")
        if key in self.denied:
            raise Denied("403")
        return await super().get_range(key, start, stop)

    @override
    async def put(self, key: str, data: Data) -> None:
        self.asked.append(f"put {key}")
        if self.full:
            raise Unavailable("no room")
        await super().put(key, data)
        if self.puts_fail:
            raise Unavailable("the answer was lost")


def drive(
    body: Callable[[Callable[[str], tuple[StoreBus, Strange]], World], Awaitable[None]], gap_s: float = 0.0
) -> None:
    """Run `body` in virtual time with a function that opens the bus for a process of this name."""
    world = World("boxes")

    def opened(name: str) -> tuple[StoreBus, Strange]:
        process = world.process(name)
        store = Strange(world.ports(process, Conditions(0.01)).store)
        return StoreBus(store, process.runtime, RUN, BEAT_S, gap_s), store

    async def go() -> None:
        await body(opened, world)

    try:
        world.clock.run_until_complete(go())
    finally:
        world.clock.close()


async def heard(bus: StoreBus, stream: str, position: str = START) -> tuple[list[bytes], str]:
    found: list[bytes] = []
    while items := (await bus.read({stream: position}, 0.0)).get(stream):
        found += [item.body for item in items]
        position = items[-1].position
    return found, position


# --- the format -------------------------------------------------------------------------------------------------------


@given(Bodies, st.integers(0, 1 << 40), st.integers(1, 1 << 40), st.integers(0, 10**6))
def test_a_box_has_what_was_put_in(bodies: list[bytes], written: int, first: int, age_ms: int) -> None:
    said = [Said(first + 2 * i, (age_ms + i) / 1e3, body) for i, body in enumerate(bodies)]
    box = pack_box(written, said[-1].number + 1, said)
    assert len(box) % 256 == written % 256
    opened = open_box(box)
    assert opened is not None
    assert (opened.written, opened.newest, opened.whole) == (written, said[-1].number + 1, True)
    assert [(s.number, s.body) for s in opened.said] == [(s.number, s.body) for s in said]
    assert all(abs(a.age_s - b.age_s) < 0.002 for a, b in zip(opened.said, said, strict=True))


@given(Bodies, st.integers(0, 3000))
def test_the_beginning_of_a_box_has_the_newest_messages(bodies: list[bytes], cut: int) -> None:
    said = [Said(i, 0.0, body) for i, body in enumerate(bodies, 1)]
    box = pack_box(7, len(said), said)
    opened = open_box(box[:cut])
    if cut < 24:
        assert opened is None
        return
    assert opened is not None
    assert opened.said == tuple(said[len(said) - len(opened.said) :])
    if cut < len(box):
        assert not opened.whole or len(opened.said) == len(said)
    assert opened.reaches(said[-1].number - 1) == bool(opened.said)


def test_a_box_without_messages_is_one() -> None:
    opened = open_box(pack_box(3, 9, [])[:24])
    assert opened is not None
    assert (opened.written, opened.newest, opened.said) == (3, 9, ())


def test_looks_are_close_enough_to_notice_signs_of_life() -> None:
    """A syncer is taken for dead when it was silent for so many of its signs of life; one may have just been missed."""
    assert SLOW + 1.0 / BEATS_PER_INTERVAL < SILENT_BEATS / BEATS_PER_INTERVAL
    assert QUICK < SLOW


@given(st.binary(max_size=600))
def test_any_bytes_are_a_box_or_none(junk: bytes) -> None:
    assert open_box(junk) is None or junk.startswith(b"\x89ISTHBOX")
    opened = open_box(b"\x89ISTHBOX" + junk)
    if opened is not None:
        numbers = [said.number for said in opened.said]
        assert numbers == sorted(set(numbers))
        assert all(0 < number <= opened.newest for number in numbers)


# --- what a store can do ----------------------------------------------------------------------------------------------


def test_a_live_writer_is_heard_although_listings_stand_still() -> None:
    """Some stores list late: a box that is known is asked for directly."""

    async def body(opened: Callable[[str], tuple[StoreBus, Strange]], world: World) -> None:
        (writer, _), (reader, store) = opened("w"), opened("r")
        await writer.append("syncer", b"1")
        found, position = await heard(reader, "syncer")
        store.frozen = await store.list(f"bus/{RUN}/")
        for n in range(2, 40):
            await writer.append("syncer", b"%d" % n)
            await asyncio.sleep(0.5)
            more, position = await heard(reader, "syncer", position)
            found += more
        assert found == [b"%d" % n for n in range(1, 40)]

    drive(body)


def test_an_old_box_that_lands_late_hides_and_repeats_nothing() -> None:
    async def body(opened: Callable[[str], tuple[StoreBus, Strange]], world: World) -> None:
        (writer, _), (reader, _) = opened("w"), opened("r")
        await writer.append("syncer", b"1")
        (key,) = [key for key in world.objects.blobs if key.startswith("bus/")]
        late = world.objects.get(key)
        await writer.append("syncer", b"2")
        found, position = await heard(reader, "syncer")
        await writer.append("syncer", b"3")
        world.objects.put(key, late, world.clock.time())
        more, position = await heard(reader, "syncer", position)
        assert (found, more) == ([b"1", b"2"], [])
        await writer.append("syncer", b"4")
        assert (await heard(reader, "syncer", position))[0] == [b"3", b"4"]

    drive(body)


def test_a_box_that_cannot_be_read_hides_no_other() -> None:
    async def body(opened: Callable[[str], tuple[StoreBus, Strange]], world: World) -> None:
        (one, _), (other, _), (reader, store) = opened("one"), opened("other"), opened("r")
        await one.append("learner/a", b"a")
        store.denied = {key for key in world.objects.blobs if key.startswith("bus/")}
        await other.append("learner/b", b"b")
        both = {"learner/a": START, "learner/b": START}
        assert {s: [i.body for i in items] for s, items in (await reader.read(both, 0.0)).items()} == {
            "learner/b": [b"b"]
        }
        store.denied |= {key for key in world.objects.blobs if key.startswith("bus/")}
        await one.append("learner/a", b"a")
        await other.append("learner/b", b"b")
        with pytest.raises(Denied):
            await reader.read(both, 0.0)

    drive(body)


def test_what_is_no_box_is_passed_over() -> None:
    async def body(opened: Callable[[str], tuple[StoreBus, Strange]], world: World) -> None:
        (writer, _), (reader, store) = opened("w"), opened("r")
        for name in ("0123456789abcdef", "no-writer", "0123456789abcdef/deeper"):
            world.objects.put(f"bus/{RUN}/syncer/{name}", b"junk" * 2000, 0.0)
        await writer.append("syncer", b"1")
        assert (await heard(reader, "syncer"))[0] == [b"1"]
        store.asked.clear()
        await heard(reader, "syncer")
        assert not [asked for asked in store.asked if "0123456789abcdef" in asked], "junk is read once"
        assert await reader.names() == {"syncer"}

    drive(body)


def test_a_learner_with_many_boxes_fills_nobodys_memory() -> None:
    """It may write anything below its own prefix. Its process is the one that wrote last."""

    async def body(opened: Callable[[str], tuple[StoreBus, Strange]], world: World) -> None:
        (writer, _), (reader, store) = opened("w"), opened("r")
        big = pack_box(1, 2, [Said(1, 0.0, bytes(KEPT_BYTES // 2)), Said(2, 0.0, bytes(KEPT_BYTES))])
        await writer.append("learner/a", b"mine")
        (own,) = world.objects.list(f"bus/{RUN}/learner/a/")
        for n in range(10 * BOXES_EACH):
            world.objects.put(f"bus/{RUN}/learner/a/{n:016x}", big, own.modified - 1.0)
        found, _ = await heard(reader, "learner/a")
        assert b"mine" in found
        assert len({asked for asked in store.asked if asked.startswith("get")}) == BOXES_EACH
        assert sum(map(len, found)) <= BOXES_EACH * KEPT_BYTES, "of each box, what a box may hold"

    drive(body)


def test_positions_do_not_grow_with_the_processes_of_the_past() -> None:
    async def body(opened: Callable[[str], tuple[StoreBus, Strange]], world: World) -> None:
        (writer, _), (reader, _) = opened("w"), opened("r")
        await writer.append("syncer", b"1")
        past = " ".join(f"{n:016x}:9" for n in range(4 * BOXES_EACH))
        (item,) = (await reader.read({"syncer": past}, 0.0))["syncer"]
        assert len(item.position) < 40
        (item,) = (await reader.read({"syncer": past[:100].rpartition(" ")[0]}, 0.0))["syncer"]
        assert item.position.count(":") == 6, "few of them are kept: a late listing may lack their boxes"

    drive(body)


def test_a_process_that_may_not_delete_speaks_all_the_same() -> None:
    async def body(opened: Callable[[str], tuple[StoreBus, Strange]], world: World) -> None:
        old, _ = opened("old")
        await old.append("syncer", b"1")
        await asyncio.sleep(2.0 * ABANDONED_S)
        (writer, store), (reader, _) = opened("w"), opened("r")
        store.keeps = True
        await writer.append("syncer", b"2")
        assert sorted((await heard(reader, "syncer"))[0]) == [b"1", b"2"]

    drive(body)


# --- what a writer can do ---------------------------------------------------------------------------------------------


def test_a_number_is_not_used_again_after_a_write_that_failed() -> None:
    """The write may have taken effect: a reader that saw it would take another message of this number for the same."""

    async def body(opened: Callable[[str], tuple[StoreBus, Strange]], world: World) -> None:
        (writer, store), (reader, _) = opened("w"), opened("r")
        await writer.append("syncer", b"1")
        store.puts_fail = True
        with pytest.raises(Unavailable):
            await writer.append("syncer", b"lost answer")
        found, position = await heard(reader, "syncer")
        assert found == [b"1", b"lost answer"]
        store.puts_fail = False
        await writer.append("syncer", b"lost answer")
        assert (await heard(reader, "syncer", position))[0] == [b"lost answer"]

    drive(body)


def test_what_was_refused_is_not_said_later() -> None:
    """Its sender says it again, or has given it up."""

    async def body(opened: Callable[[str], tuple[StoreBus, Strange]], world: World) -> None:
        (writer, store), (reader, _) = opened("w"), opened("r")
        store.full = True
        with pytest.raises(Unavailable):
            await writer.append("syncer", b"given up")
        with pytest.raises(Unavailable):
            await writer.append("syncer", b"said again")
        store.full = False
        await writer.append("syncer", b"said again", b"more")
        assert (await heard(reader, "syncer"))[0] == [b"said again", b"more"]
        assert (await heard(writer, "syncer"))[0] == [b"said again", b"more"]

    drive(body)


def test_appends_at_once_are_one_write() -> None:
    async def body(opened: Callable[[str], tuple[StoreBus, Strange]], world: World) -> None:
        (writer, store), (reader, _) = opened("w"), opened("r")
        await writer.append("syncer", b"first")
        store.asked.clear()
        await asyncio.gather(*(writer.append("syncer", b"%d" % n) for n in range(20)))
        assert len(store.asked) <= 2
        assert (await heard(reader, "syncer"))[0] == [b"first", *(b"%d" % n for n in range(20))]

    drive(body)


def test_where_a_key_may_be_written_once_a_second_it_is() -> None:
    async def body(opened: Callable[[str], tuple[StoreBus, Strange]], world: World) -> None:
        (writer, store), (reader, _) = opened("w"), opened("r")
        began = world.clock.time()
        await writer.append("syncer", b"0")
        assert world.clock.time() - began < 0.1, "the first is written at once"
        await asyncio.gather(*(writer.append("syncer", b"%d" % n) for n in range(1, 20)))
        assert 1.0 <= world.clock.time() - began < 1.2
        assert requests(store)["put"] == 2
        assert (await heard(reader, "syncer"))[0] == [b"%d" % n for n in range(20)]

    drive(body, gap_s=1.0)


def test_stores_that_limit_writes_of_a_key_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_REGION", "auto")
    assert rewrite_s("gs://bucket/run") == 1.0
    assert rewrite_s("s3://bucket/run") == 0.0
    assert rewrite_s("/folder") == 0.0
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://account.r2.cloudflarestorage.com")
    assert rewrite_s("s3://bucket/run") == 1.0


def test_a_box_keeps_what_is_new_and_little_of_what_is_old() -> None:
    async def body(opened: Callable[[str], tuple[StoreBus, Strange]], world: World) -> None:
        (writer, _), (reader, _) = opened("w"), opened("r")
        for n in range(100):
            await writer.append("syncer", b"%d" % n)
        assert len((await heard(reader, "syncer"))[0]) == 100
        await asyncio.sleep(KEPT_S + 1.0)
        await writer.append("syncer", b"new")
        fresh, _ = opened("fresh")
        assert (await heard(fresh, "syncer"))[0] == [*(b"%d" % n for n in range(101 - KEPT_LEAST, 100)), b"new"]
        for n in range(40):
            await writer.append("syncer", bytes([n]) * 8000)
        (key,) = [key for key in world.objects.blobs if key.startswith("bus/")]
        assert KEPT_BYTES - 9000 < len(world.objects.get(key)) < KEPT_BYTES + 256
        await writer.append("syncer", bytes(2 * KEPT_BYTES))
        assert (await heard(opened("late")[0], "syncer"))[0] == [bytes(2 * KEPT_BYTES)], "one message is always kept"

    drive(body)


def test_a_process_deletes_the_boxes_of_its_ancestors() -> None:
    async def body(opened: Callable[[str], tuple[StoreBus, Strange]], world: World) -> None:
        for n in range(5):
            writer, _ = opened(f"life {n}")
            await writer.append("learner/a", b"%d" % n)
            await opened(f"other {n}")[0].append("learner/b", b"x")
            await asyncio.sleep(0.4 * ABANDONED_S)
        mine = [key for key in world.objects.blobs if "/learner/a/" in key]
        assert len(mine) == 3, "those of the last hour, by the store's clock, stay"

    drive(body)


# --- what it costs ----------------------------------------------------------------------------------------------------


def requests(store: Strange) -> dict[str, int]:
    return {verb: sum(asked.startswith(verb) for asked in store.asked) for verb in ("put", "get", "list")}


@pytest.mark.parametrize("asks", [False, True])
def test_a_learner_that_waits_costs_a_few_requests_a_heartbeat(asks: bool) -> None:
    async def body(opened: Callable[[str], tuple[StoreBus, Strange]], world: World) -> None:
        (syncer, _), (learner, store) = opened("s"), opened("l")
        listener, beats = Listener(learner, learner._runtime, None), 50
        listener.positions = {"syncer": START, "learner/a": START}

        async def beat() -> None:
            while True:
                await syncer.append("syncer", b"alive")
                await asyncio.sleep(BEAT_S / 4)

        async def listen() -> None:
            async for _ in listener.live(lambda _: None):
                pass

        tasks = [asyncio.ensure_future(beat()), asyncio.ensure_future(listen())]
        await asyncio.sleep(2 * BEAT_S)
        store.asked.clear()
        for _ in range(beats):
            await learner.append("learner/a", b"beat")
            if asks:
                learner.hurry()
            await asyncio.sleep(BEAT_S)
        for task in tasks:
            task.cancel()
        found = requests(store)
        looks = beats / (QUICK if asks else SLOW)
        assert 0.8 * looks <= found["get"] <= looks, found
        assert beats <= found["put"] <= beats + 1
        assert found["list"] <= 2 * beats / LIST_BEATS + 4

    drive(body)


def test_looks_are_quick_only_while_an_answer_is_due() -> None:
    async def body(opened: Callable[[str], tuple[StoreBus, Strange]], world: World) -> None:
        (writer, _), (reader, store) = opened("w"), opened("r")
        await writer.append("syncer", b"alive")
        _, position = await heard(reader, "syncer")
        reader.hurry()
        asked = []
        for _ in range(2):
            store.asked.clear()
            assert await reader.read({"syncer": position}, (QUICK_BEATS - 0.1) * BEAT_S) == {}
            asked.append(requests(store)["get"])
        assert asked[0] >= 2 * asked[1] > 0, "in the first two heartbeats, and in the next two"

    drive(body)


def test_a_hundred_learners_and_a_thousand_names_of_the_past() -> None:
    """One listing tells which of many boxes were written; those of the past are never read."""

    async def body(opened: Callable[[str], tuple[StoreBus, Strange]], world: World) -> None:
        for n in range(1000):
            old = pack_box(1, 1, [Said(1, 0.0, b"old")])
            world.objects.put(f"bus/{RUN}/learner/past-{n}/{n:016x}", old, 0.0)
        await asyncio.sleep(3600.0)
        writers = [opened(f"l{n}")[0] for n in range(100)]
        reader, store = opened("s")
        for n, writer in enumerate(writers):
            await writer.append(f"learner/l{n}", b"hello %d" % n)
        listener = Listener(reader, reader._runtime, lambda name: name.startswith("learner/"), back_s=30.0)
        assert sorted([said.body async for _, said in listener.backlog()]) == sorted(
            b"hello %d" % n for n in range(100)
        )
        assert not [asked for asked in store.asked if "past-" in asked]
        store.asked.clear()
        for n in range(0, 100, 10):
            await writers[n].append(f"learner/l{n}", b"again")
        found = await reader.read(listener.positions, 0.0)
        assert {stream for stream, items in found.items() if [i.body for i in items] == [b"again"]} == {
            f"learner/l{n}" for n in range(0, 100, 10)
        }
        assert requests(store) == {"put": 0, "get": 10, "list": 1}

    drive(body)


def test_a_silent_writer_is_found_by_listing_alone() -> None:
    async def body(opened: Callable[[str], tuple[StoreBus, Strange]], world: World) -> None:
        (writer, _), (reader, store) = opened("w"), opened("r")
        await writer.append("syncer", b"1")
        _, position = await heard(reader, "syncer")
        await asyncio.sleep((LIVE_BEATS + 1.0) * BEAT_S)
        store.asked.clear()
        assert await reader.read({"syncer": position}, 3 * BEAT_S) == {}
        assert requests(store)["get"] == 0
        await writer.append("syncer", b"2")
        found = await reader.read({"syncer": position}, 10 * BEAT_S)
        assert [item.body for item in found["syncer"]] == [b"2"]

    drive(body)


def test_a_long_box_is_read_whole_only_if_the_newest_messages_do_not_reach_back() -> None:
    async def body(opened: Callable[[str], tuple[StoreBus, Strange]], world: World) -> None:
        (writer, _), (reader, store) = opened("w"), opened("r")
        for n in range(10):
            await writer.append("syncer", bytes([n]) * (HEAD_BYTES // 3))
        found, position = await heard(reader, "syncer")
        assert len(found) == 10
        store.asked.clear()
        await writer.append("syncer", b"new")
        assert (await heard(reader, "syncer", position))[0] == [b"new"]
        assert requests(store)["get"] <= 2  # once for the message, once to see that there is no other

    drive(body)


def test_requests_are_rare_only_where_they_cost_something(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    assert default_pace("store:", "s3://bucket/run") == PACE_IN_STORE
    assert default_pace("redis://host", "s3://bucket/run") == Pace()
    assert default_pace("store:", "/folder") == Pace()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:8333")
    assert default_pace("store:", "s3://bucket/run") == Pace()
    assert PACE_IN_STORE.heartbeat_s > Pace().heartbeat_s

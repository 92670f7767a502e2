"""Speakers and listeners survive outages of the bus: recent messages are kept, and reading resumes where it stopped."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Self, cast

import pytest
from redis.asyncio import Redis

from isthmus.bus import START, Bus, BusItem, endpoints, open_bus
from isthmus.bus.base import READ_MAX, RETAINED_MESSAGES
from isthmus.bus.endpoints import MESSAGES_AT_ONCE, NAMES_EVERY_S, RECENT_S, UNSAID_MAX, Listener, Speaker
from isthmus.bus.redis import RedisBus
from isthmus.errors import Denied, Unavailable
from isthmus.format.records.messages import Announce, Leave, decode
from isthmus_lab.simulate.world import World


def word(number: int) -> Leave:
    return Leave(run=bytes(32), id=f"{number}", learner="l", incarnation=1, step=number, done=False)


def update(number: int, fragment: int = 0, base: int = 7) -> Announce:
    return Announce(
        run=bytes(32), id=f"{number}", learner="l", incarnation=1, fragment=fragment, base=base, key="k",
        digest=bytes(32), size=1, steps=1, tokens=number, step=number, tokens_seen=number, due=True, age_s=0.0,
        step_s=0.1, upload_s=0.1, sync_s=0.1,
    )  # fmt: skip


def step_of(body: bytes) -> int:
    (message,) = decode(body)
    assert isinstance(message, Leave | Announce)
    return message.step


def drive(body: Callable[[World], Awaitable[None]]) -> None:
    """Run `body` with a world of its own, in virtual time."""
    world = World("voice")

    async def go() -> None:
        await body(world)

    try:
        world.clock.run_until_complete(go())
    finally:
        world.clock.close()


def down(end: Speaker | Listener) -> bool:
    return end.down_since is not None


class Deaf(Bus):
    """A bus that implements nothing."""

    url = "deaf://"

    async def append(self, stream: str, *bodies: bytes) -> None:
        raise NotImplementedError

    async def read(self, positions: Mapping[str, str], timeout_s: float) -> Mapping[str, Sequence[BusItem]]:
        raise NotImplementedError

    async def ago(self, streams: Sequence[str], seconds: float) -> Mapping[str, str]:
        raise NotImplementedError

    async def tail(self, stream: str) -> str:
        raise NotImplementedError

    async def names(self, within_s: float | None = None) -> set[str]:
        raise NotImplementedError


class Wire(Deaf):
    """A bus that takes `takes_s` for each request, is unavailable if `away` is set, and keeps the messages sent."""

    url = "wire://"

    def __init__(self, takes_s: float = 0.0) -> None:
        self.takes_s, self.away, self.requests = takes_s, False, 0
        self.said: list[int] = []

    async def append(self, stream: str, *bodies: bytes) -> None:
        self.requests += 1
        await asyncio.sleep(self.takes_s)
        if self.away:
            raise Unavailable("away")
        self.said += [step_of(body) for body in bodies]


# --- speaking ---------------------------------------------------------------------------------------------------------


def test_what_is_said_while_something_is_sent_is_sent_next() -> None:
    async def body(world: World) -> None:
        wire = Wire(takes_s=1.0)
        speaker = Speaker(wire, "s", world.process("p").runtime)
        running = asyncio.ensure_future(speaker.run())
        speaker.say(word(0))
        await asyncio.sleep(0.5)
        speaker.say(word(1))
        await asyncio.sleep(3.0)
        assert wire.said == [0, 1]
        speaker.say(word(2))
        await asyncio.sleep(3.0)
        assert (wire.said, wire.requests) == ([0, 1, 2], 3)
        running.cancel()

    drive(body)


def test_while_the_bus_is_away_the_newest_words_are_kept_and_come_in_order() -> None:
    async def body(world: World) -> None:
        wire = Wire(takes_s=0.01)
        wire.away = True
        speaker = Speaker(wire, "s", world.process("p").runtime)
        running = asyncio.ensure_future(speaker.run())
        for number in range(UNSAID_MAX + 100):
            speaker.say(word(number))
            if number % 50 == 0:
                await asyncio.sleep(0.5)
        assert down(speaker)
        wire.away = False
        await asyncio.sleep(10.0)
        assert wire.said == list(range(100, UNSAID_MAX + 100))
        assert not down(speaker)
        running.cancel()

    drive(body)


def test_the_last_word_before_an_outage_is_sent_after_it_also_where_nothing_follows() -> None:
    async def body(world: World) -> None:
        wire = Wire()
        wire.away = True
        speaker = Speaker(wire, "s", world.process("p").runtime)
        running = asyncio.ensure_future(speaker.run())
        speaker.say(word(0))
        await asyncio.sleep(60.0)
        wire.away = False
        await asyncio.sleep(5.0)
        assert wire.said == [0]
        running.cancel()

    drive(body)


def test_what_was_dropped_while_it_was_being_sent_takes_no_newer_word_along() -> None:
    async def body(world: World) -> None:
        wire = Wire(takes_s=1.0)
        speaker = Speaker(wire, "s", world.process("p").runtime)
        for number in range(UNSAID_MAX):
            speaker.say(word(number))
        flushing = asyncio.ensure_future(speaker.flush())
        await asyncio.sleep(0.5)
        for number in range(UNSAID_MAX, UNSAID_MAX + MESSAGES_AT_ONCE // 2):
            speaker.say(word(number))
        await flushing
        assert wire.said == list(range(UNSAID_MAX + MESSAGES_AT_ONCE // 2)), (
            "no message is lost, and none is sent twice"
        )

    drive(body)


def test_of_the_updates_on_one_base_only_the_newest_is_announced_after_an_outage() -> None:
    """Whoever hears of a shorter one first may merge it, and the rest of the work on the base would be rejected."""

    async def body(world: World) -> None:
        wire = Wire()
        wire.away = True
        speaker = Speaker(wire, "s", world.process("p").runtime)
        running = asyncio.ensure_future(speaker.run())
        for message in (update(1), word(2), update(3, base=6), update(4, fragment=1), update(5), update(6), word(7)):
            speaker.say(message)
            await asyncio.sleep(3.0)
        wire.away = False
        await asyncio.sleep(5.0)
        assert wire.said == [2, 3, 4, 6, 7]
        running.cancel()

    drive(body)


def test_an_update_that_is_replaced_while_it_is_sent_keeps_nothing_back() -> None:
    async def body(world: World) -> None:
        wire = Wire(takes_s=1.0)
        speaker = Speaker(wire, "s", world.process("p").runtime)
        for message in (word(0), update(1), word(2)):
            speaker.say(message)
        flushing = asyncio.ensure_future(speaker.flush())
        await asyncio.sleep(0.5)
        speaker.say(update(3))
        await flushing
        assert wire.said == [0, 1, 2, 3], "no message is lost, and none is sent twice"

    drive(body)


# --- listening --------------------------------------------------------------------------------------------------------


class Names(Deaf):
    """A bus of these streams, each with an empty message and two others; it counts the requests."""

    url = "names://"

    def __init__(self, *streams: str) -> None:
        self.streams, self.away, self.reads, self.looks = set(streams), False, 0, 0
        self.asked: list[float | None] = []

    async def names(self, within_s: float | None = None) -> set[str]:
        self.looks += 1
        self.asked.append(within_s)
        if self.away:
            raise Unavailable("away")
        return set(self.streams)

    async def ago(self, streams: Sequence[str], seconds: float) -> Mapping[str, str]:
        return dict.fromkeys(streams, f"{seconds:g} s ago")

    async def read(self, positions: Mapping[str, str], timeout_s: float) -> Mapping[str, Sequence[BusItem]]:
        self.reads += 1
        if self.away:
            raise Unavailable("away")
        found = {
            stream: [BusItem("1", b""), BusItem("2", stream.encode()), BusItem("3", b"last")]
            for stream in sorted(self.streams)
            if positions.get(stream) not in (None, "3")
        }
        if not found:
            await asyncio.sleep(timeout_s)
        return found


def wanted(name: str) -> bool:
    return name.startswith("learner/")


def test_streams_come_and_go_and_those_named_from_the_start_stay() -> None:
    async def body(world: World) -> None:
        bus = Names("learner/a", "learner/b", "other")
        listener = Listener(bus, world.process("p").runtime, wanted, back_s=7.0)
        listener.positions["syncer"] = "5"
        await listener.find()
        assert listener.positions == {"syncer": "5", "learner/a": "7 s ago", "learner/b": "7 s ago"}
        assert bus.asked == [RECENT_S], "with `back_s`, old streams are not asked for"
        bus.streams = {"learner/b", "learner/c"}
        listener.positions["learner/a"] = "17"
        await listener.find()
        assert set(listener.positions) == {"syncer", "learner/a", "learner/b", "learner/c"}, (
            "learner/a was in use a moment ago"
        )
        await asyncio.sleep(RECENT_S)
        await listener.find()
        assert set(listener.positions) == {"syncer", "learner/b", "learner/c"}
        bus.streams |= {"learner/a"}
        await listener.find()
        assert listener.positions["learner/a"] == "17", "reading resumes at the old position"
        bus.streams |= {"syncer"}
        listener = Listener(bus, world.process("q").runtime, None)
        listener.positions["syncer"] = "5"
        await listener.find()
        assert listener.positions == {"syncer": "5"}
        assert bus.looks == 4

    drive(body)


def test_what_was_said_in_the_past_is_told_once_and_costs_nothing_afterwards() -> None:
    async def body(world: World) -> None:
        bus = Names("learner/a", "learner/b")
        listener = Listener(bus, world.process("p").runtime, wanted)
        assert [stream async for stream, _ in listener.backlog()] == ["learner/a"] * 2 + ["learner/b"] * 2
        bus.streams = {"learner/b"}
        assert [stream async for stream, _ in listener.backlog()] == []
        assert bus.asked == [None, RECENT_S]
        # All old messages have been read, so only streams that were used lately are still read.
        assert set(listener.positions) == {"learner/b"}

    drive(body)


def test_positions_of_streams_that_are_not_read_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "NAMES_MAX", 3)

    async def body(world: World) -> None:
        bus = Names()
        listener = Listener(bus, world.process("p").runtime, wanted, back_s=7.0)
        for number in range(10):
            bus.streams = {f"learner/{number}"}
            await listener.find()
            await asyncio.sleep(RECENT_S)
        assert list(listener._left) == ["learner/6", "learner/7", "learner/8"]

    drive(body)


def test_where_somebody_has_filled_the_list_those_who_are_known_are_heard_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoints, "NAMES_MAX", 3)

    async def body(world: World) -> None:
        bus = Names("learner/a", "learner/b", "learner/c")
        listener = Listener(
            bus, world.process("p").runtime, {"learner/a", "learner/eu"}.__contains__, known=lambda: {"learner/eu"}
        )
        await listener.find()
        assert set(listener.positions) == {"learner/a", "learner/eu"}
        bus.streams = {"learner/a"}
        other = Listener(bus, world.process("p").runtime, wanted, known=lambda: {"learner/eu"})
        await other.find()
        assert set(other.positions) == {"learner/a"}, "the list is not full, so learner/eu would be in it"

    drive(body)


def test_each_message_is_heard_once_and_nobodys_are_passed_over() -> None:
    async def body(world: World) -> None:
        bus = Names("learner/a", "learner/b")
        listener = Listener(bus, world.process("p").runtime, wanted)
        heard = [(stream, said.body) async for stream, said in listener.backlog()]
        assert heard == [(s, b) for s in ("learner/a", "learner/b") for b in (s.encode(), b"last")]
        assert set(listener.positions.values()) == {"3"}
        assert bus.reads == 1

    drive(body)


class Busy(Names):
    """A bus on which each stream has `kept` messages, and one more after each read."""

    def __init__(self, **kept: int) -> None:
        super().__init__(*(f"learner/{name}" for name in kept))
        self.newest = {f"learner/{name}": count for name, count in kept.items()}
        self.read_of: list[set[str]] = []

    async def read(self, positions: Mapping[str, str], timeout_s: float) -> Mapping[str, Sequence[BusItem]]:
        assert len(self.read_of) < 100, "the listener reads for ever"
        self.read_of.append(set(positions))
        after = {stream: int(position or 0) for stream, position in positions.items()}
        found = {
            stream: [BusItem(str(n), b"%d" % n) for n in range(at + 1, min(at + READ_MAX, self.newest[stream]) + 1)]
            for stream, at in after.items()
        }
        self.newest = {stream: newest + 1 for stream, newest in self.newest.items()}
        return {stream: items for stream, items in found.items() if items}


def test_the_backlog_of_a_busy_run_ends_with_what_was_kept() -> None:
    """In a run of many learners some message comes during every read. A syncer that starts must serve all the same."""

    async def body(world: World) -> None:
        bus = Busy(a=1, b=READ_MAX + 3, c=0)
        listener = Listener(bus, world.process("p").runtime, wanted)
        heard = [(stream, int(said.body)) async for stream, said in listener.backlog()]
        assert bus.read_of == [{"learner/a", "learner/b", "learner/c"}, {"learner/b"}]
        assert heard == [("learner/a", 1), *(("learner/b", n) for n in range(1, READ_MAX + 5))]
        assert listener.positions == {"learner/a": "1", "learner/b": f"{READ_MAX + 4}", "learner/c": ""}

    drive(body)


def test_the_backlog_ends_although_one_author_writes_as_fast_as_is_read() -> None:
    async def body(world: World) -> None:
        bus = Busy(a=1_000_000)
        listener = Listener(bus, world.process("p").runtime, wanted)
        heard = [int(said.body) async for _, said in listener.backlog()]
        assert 2 * RETAINED_MESSAGES <= len(heard) <= 3 * RETAINED_MESSAGES
        assert heard == list(range(1, len(heard) + 1))

    drive(body)


def test_after_an_outage_it_is_said_once_that_there_was_a_gap_before_anything_that_came_after() -> None:
    async def body(world: World) -> None:
        bus = Names("learner/a")
        heard: list[str] = []
        listener = Listener(bus, world.process("p").runtime, wanted)

        async def listen() -> None:
            async for stream, _ in listener.live(lambda away_s: heard.append(f"away for {away_s / 10:.0f}0 s")):
                heard.append(stream)

        listening = asyncio.ensure_future(listen())
        await asyncio.sleep(5.0)
        assert heard == ["learner/a"] * 2
        assert not down(listener)
        bus.away = True
        await asyncio.sleep(30.0)
        assert down(listener)
        answered_at = listener.answered_at
        assert answered_at is not None
        bus.away = False
        bus.streams.add("learner/b")
        await asyncio.sleep(5.0)
        assert heard == ["learner/a"] * 2 + ["away for 30 s"] + ["learner/b"] * 2
        assert not down(listener)
        assert listener.answered_at is not None
        assert listener.answered_at > answered_at + 20.0
        listening.cancel()

    drive(body)


def test_new_streams_are_looked_for_now_and_then_and_not_at_every_read() -> None:
    async def body(world: World) -> None:
        bus = Names("learner/a")
        listener = Listener(bus, world.process("p").runtime, wanted, every_s=100.0)

        async def listen() -> None:
            async for _ in listener.live(lambda _: None):
                pass

        listening = asyncio.ensure_future(listen())
        await asyncio.sleep(50.0)
        assert 50 / NAMES_EVERY_S - 5 <= bus.looks <= 50 / NAMES_EVERY_S + 1
        listening.cancel()

    drive(body)


# --- positions --------------------------------------------------------------------------------------------------------


async def test_a_reader_of_a_file_reads_each_message_once_and_begins_again_where_it_was_emptied(tmp_path: Path) -> None:
    async with open_bus(f"sqlite://{tmp_path / 'bus.sqlite'}", b"r" * 32, None) as bus:
        await bus.append("s", b"0", b"1", b"2")
        assert await bus.tail("s") == "3"
        assert [said.body for said in (await bus.read({"s": "1"}, 0.0))["s"]] == [b"1", b"2"]
        assert await bus.read({"s": "3"}, 0.0) == {}
        # A position beyond the end means that the file was deleted, so numbers begin again.
        assert [said.body for said in (await bus.read({"s": "4"}, 0.0))["s"]] == [b"0", b"1", b"2"]
        assert (await bus.read({"s": "4"}, 0.0))["s"][0].position == "1"


def redis_bus(reader: object, writer: object) -> RedisBus:
    return RedisBus(lambda: (cast(Redis, reader), cast(Redis, writer)), "run", "redis://here")


@pytest.mark.parametrize(
    ("newest", "position", "again"),
    [
        ("1700000000000-9", "1700000000000-10", True),
        ("1700000000000-10", "1700000000000-9", False),
        ("999999999999-0", "1700000000000-0", True),
        ("1700000000000-10", "1700000000000-10", False),
    ],
)
async def test_ids_of_messages_are_numbers(newest: str, position: str, again: bool) -> None:
    """If a server lost its newest messages, the reader's position lies beyond its end; as numbers, 10 comes after 9."""

    class Server:
        """A server that holds one message, and its own pipeline."""

        def pipeline(self, transaction: bool) -> Self:
            return self

        def xrevrange(self, key: str, count: int) -> None:
            pass

        async def execute(self) -> list[list[tuple[bytes, dict[bytes, bytes]]]]:
            return [[(newest.encode(), {b"m": b"x"})]]

        async def xread(self, streams: dict[str, str], count: int, block: int | None) -> list[object]:
            [(key, after)] = streams.items()
            behind = tuple(map(int, newest.split("-"))) > tuple(map(int, after.split("-")))
            return [[key.encode(), [(newest.encode(), {b"m": b"x"})]]] if behind else []

    found = await redis_bus(Server(), Server()).read({"s": position}, 0.0)
    assert bool(found) is (again or newest != position)


async def test_on_redis_what_was_said_before_is_before_the_end_however_far_back_is_asked_for() -> None:
    class Server:
        def pipeline(self, transaction: bool) -> Self:
            self.asked: list[str] = []
            return self

        def xrevrange(self, key: str, count: int) -> None:
            self.asked.append(key)

        async def execute(self) -> list[list[tuple[bytes, dict[bytes, bytes]]]]:
            newest = {"isthmus:run:a": b"1700000000000-3", "isthmus:run:b": b"1600000000000-3"}
            return [[(newest[key], {})] if key in newest else [] for key in self.asked]

        async def time(self) -> tuple[int, int]:
            return 1700000010, 0

    found = await redis_bus(Server(), Server()).ago(["a", "b", "none"], 60.0)
    assert found == {"a": "1699999950000-0", "b": "1600000000000-3", "none": START}


async def test_a_link_in_the_place_of_the_file_is_not_followed(tmp_path: Path) -> None:
    """Otherwise anyone who may write beside a run could have tables created in another file of a participant."""
    victim, link = tmp_path / "letters.sqlite", tmp_path / "run" / "bus.sqlite"
    link.parent.mkdir()
    for there in (False, True):
        if there:
            victim.write_bytes(b"")
        link.unlink(missing_ok=True)
        link.symlink_to(victim)
        with pytest.raises(Denied, match="is a link to another file"):
            async with open_bus(f"sqlite://{link}", bytes(32), None) as bus:
                await bus.append("syncer", b"x")
        assert victim.exists() == there
        assert not there or victim.read_bytes() == b""

"""Every bus implementation passes this suite, with several connections at once."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from redis import Redis

from isthmus.agent.ports import open_place
from isthmus.bus import START, Bus, endpoints, open_bus, sqlite
from isthmus.bus import redis as redis_bus
from isthmus.bus.base import RETAINED_MESSAGES
from isthmus.bus.endpoints import Listener, Speaker
from isthmus.bus.store import KEPT_BYTES, KEPT_LEAST
from isthmus.errors import Denied, InputError, Unavailable
from isthmus.format.records.messages import Leave, decode
from isthmus.runtime.clock import single_threaded
from isthmus.runtime.urls import Place as Url
from isthmus_lab.simulate.bus import Streams
from isthmus_lab.simulate.conditions import Conditions
from isthmus_lab.simulate.world import World
from isthmus_services.servers import Server, redis_server

NEVER_S = 3600.0
"""Longer than any test may take: a read with this timeout that returns was woken by a message."""

Place = tuple[str | World, bytes]
"""Where a bus is, as a URL or as a simulated world, and the run's digest."""

KINDS = ["sqlite", "redis", "simulated", "folder", "seaweedfs", "moto"]


BEAT_S = 0.1
"""The heartbeat of runs whose bus is in their store."""


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path, use: Callable[[Server], None]) -> Place:
    """Return where an empty bus is; for a bus in the run's store, where that is."""
    run = os.urandom(32)
    if request.param == "folder":
        return str(tmp_path / "run"), run
    if request.param in ("seaweedfs", "moto"):
        use(request.getfixturevalue(request.param))
        return f"s3://conformance/{run[:5].hex()}/run", run
    if request.param == "simulated":
        return World("conformance"), run
    if request.param == "sqlite":
        return f"sqlite://{tmp_path / 'deep' / 'bus.sqlite'}", run
    return request.getfixturevalue("redis").url, run


@asynccontextmanager
async def opened_at(url: str, digest: bytes) -> AsyncIterator[Bus]:
    """Open a bus at its own URL, or in the store at this URL."""
    if Url.of(url).scheme in ("redis", "sqlite"):
        async with open_bus(url, digest, None) as bus:
            yield bus
        return
    async with open_place(url, make=True) as store, open_bus("store:", digest, store, BEAT_S) as bus:
        yield bus


def run(place: Place, body: Callable[..., Coroutine[Any, Any, None]], connections: int = 1) -> None:
    where, digest = place
    if isinstance(where, World):
        # The simulator's bus in good conditions; it lives in virtual time.
        buses = [where.ports(where.process(f"p{i}"), None, Conditions(0.01, 0.5)).bus for i in range(connections)]
        where.clock.run_until_complete(body(*buses))
        return

    @asynccontextmanager
    async def opened(count: int) -> AsyncIterator[list[Bus]]:
        async with opened_at(where, digest) as bus:
            if count == 1:
                yield [bus]
            else:
                async with opened(count - 1) as others:
                    yield [bus, *others]

    async def go() -> None:
        async with opened(connections) as buses:
            await body(*buses)

    asyncio.run(go())


async def drain(bus: Bus, stream: str, position: str = START) -> tuple[list[bytes], str]:
    found: list[bytes] = []
    while messages := (await bus.read({stream: position}, 0.0)).get(stream):
        found += [m.body for m in messages]
        position = messages[-1].position
    return found, position


def test_messages_come_back_in_order(place: Place) -> None:
    async def body(bus: Bus) -> None:
        for i in range(5):
            await bus.append("s", f"{i}".encode())
        found, position = await drain(bus, "s")
        assert found == [b"0", b"1", b"2", b"3", b"4"]
        await bus.append("s", b"5")
        assert (await drain(bus, "s", position))[0] == [b"5"]

    run(place, body)


def test_several_messages_go_in_at_once_and_in_order(place: Place) -> None:
    async def body(bus: Bus) -> None:
        await bus.append("s", b"0")
        await bus.append("s", b"1", b"2", b"3")
        found, position = await drain(bus, "s")
        assert found == [b"0", b"1", b"2", b"3"]
        await bus.append("s", b"4", b"5")
        assert (await drain(bus, "s", position))[0] == [b"4", b"5"]

    run(place, body)


def test_readers_have_positions_of_their_own(place: Place) -> None:
    async def body(writer: Bus, one: Bus, other: Bus) -> None:
        await writer.append("s", b"x")
        assert (await drain(one, "s"))[0] == (await drain(other, "s"))[0] == [b"x"]
        assert (await drain(one, "s"))[0] == [b"x"]

    run(place, body, 3)


def test_several_streams_are_read_at_once(place: Place) -> None:
    async def body(bus: Bus) -> None:
        await bus.append("a", b"1")
        await bus.append("b", b"2")
        found = await bus.read({"a": START, "b": START, "never": START}, 0.0)
        assert {k: [m.body for m in v] for k, v in found.items()} == {"a": [b"1"], "b": [b"2"]}

    run(place, body)


def test_reading_waits_for_what_comes(place: Place) -> None:
    async def body(reader: Bus, writer: Bus) -> None:
        async def later() -> None:
            await asyncio.sleep(0.2)
            await writer.append("s", b"late")

        task = asyncio.ensure_future(later())
        found = await reader.read({"s": START}, NEVER_S)
        assert [m.body for m in found["s"]] == [b"late"]
        await task

    run(place, body, 2)


def test_what_one_connection_says_it_hears_itself(place: Place) -> None:
    async def body(bus: Bus) -> None:
        reading = asyncio.ensure_future(bus.read({"s": START}, NEVER_S))
        await asyncio.sleep(0.1)
        await bus.append("s", b"x")
        assert (await reading)["s"][0].body == b"x"

    run(place, body)


def test_reading_nothing_ends_in_time(place: Place) -> None:
    async def body(bus: Bus, patient: Bus) -> None:
        await bus.append("s", b"x")
        _, position = await drain(bus, "s")
        loop = asyncio.get_running_loop()
        waiting = asyncio.ensure_future(patient.read({"s": position}, NEVER_S))
        started = loop.time()
        assert await bus.read({"s": position}, 0.3) == {}
        assert loop.time() - started > 0.2
        assert await bus.read({}, 0.1) == {}
        assert not waiting.done(), "each read must have its own timeout"
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    run(place, body, 2)


def test_the_tail_is_behind_the_newest_message(place: Place) -> None:
    async def body(bus: Bus) -> None:
        assert (await drain(bus, "s", await bus.tail("s")))[0] == []
        await bus.append("s", b"old")
        position = await bus.tail("s")
        await bus.append("s", b"new")
        assert (await drain(bus, "s", position))[0] == [b"new"]

    run(place, body)


def test_a_position_of_some_time_ago_lies_before_what_was_said_since_and_behind_what_was_said_before(
    place: Place,
) -> None:
    """An agent that reads a thousand streams begins with the messages of the last few heartbeats."""

    async def body(bus: Bus) -> None:
        await bus.append("busy", b"old")
        await bus.append("idle", b"long ago")
        await asyncio.sleep(1.0)
        await bus.append("busy", b"new", b"newer")
        since = await bus.ago(["busy", "idle", "nobody"], 0.5)
        assert (await drain(bus, "busy", since["busy"]))[0] == [b"new", b"newer"]
        assert (await drain(bus, "nobody", since["nobody"]))[0] == []
        # No position is beyond a stream's end: it would look as if the bus had lost the stream's last messages.
        assert (await drain(bus, "idle", since["idle"]))[0] in ([], [b"long ago"])
        await bus.append("idle", b"again")
        assert (await drain(bus, "idle", since["idle"]))[0][-1:] == [b"again"]
        everything = await bus.ago(["busy"], 3600.0)
        assert (await drain(bus, "busy", everything["busy"]))[0] == [b"old", b"new", b"newer"]

    run(place, body)


def test_a_listener_begins_a_little_way_back_and_forgets_streams_that_are_no_more(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(bus: Bus) -> None:
        await bus.append("learner/a", b"old")
        await asyncio.sleep(1.0)
        await bus.append("learner/a", b"new")
        listener = Listener(bus, single_threaded(), lambda name: name.startswith("learner/"), back_s=0.5)
        assert [said.body async for _, said in listener.backlog()] == [b"new"]
        assert listener.positions.keys() == {"learner/a"}
        # A stream that the listener was told to read stays, even if it does not exist.
        listener.positions["syncer"] = START

        async def nobody(within_s: float | None) -> set[str]:
            return set()

        monkeypatch.setattr(bus, "names", nobody)
        monkeypatch.setattr(endpoints, "RECENT_S", 0.0)
        await listener.find()
        assert listener.positions.keys() == {"syncer"}

    run(place, body)


def test_streams_are_found_by_name(place: Place) -> None:
    async def body(bus: Bus, other: Bus) -> None:
        assert await bus.names() == set()
        await bus.append("learner/eu-1", b"x")
        await other.append("syncer", b"x")
        assert await bus.names() == {"learner/eu-1", "syncer"}
        await asyncio.sleep(2.5 if bus.polled else 1.5)  # stores may tell whole seconds only
        await other.append("syncer", b"y")
        assert await bus.names(1.0) == {"syncer"}
        assert await bus.names(100.0) == await bus.names() == {"learner/eu-1", "syncer"}

    run(place, body, 2)


def test_runs_do_not_hear_each_other(place: Place) -> None:
    async def body(bus: Bus) -> None:
        await bus.append("s", b"mine")
        if isinstance(place[0], World):  # a world holds one run: another run is another world
            place[0].streams = Streams()
            await silent(place[0].ports(place[0].process("other")).bus)
            return
        async with opened_at(place[0], os.urandom(32)) as other:
            await silent(other)

    async def silent(other: Bus) -> None:
        assert await other.names() == set()
        assert (await drain(other, "s"))[0] == []

    run(place, body)


def test_old_messages_are_dropped_and_memory_stays_bounded(place: Place) -> None:
    async def body(bus: Bus) -> None:
        for i in range(0, 3 * RETAINED_MESSAGES, 32):
            await bus.append("s", *(f"{i + j}".encode() for j in range(32)))
        found, _ = await drain(bus, "s")
        if bus.polled:
            assert KEPT_LEAST <= len(found) <= KEPT_BYTES / 16
        else:
            assert RETAINED_MESSAGES <= len(found) <= 2 * RETAINED_MESSAGES
        assert found[-1] == f"{3 * RETAINED_MESSAGES - 1}".encode()

    run(place, body)


def test_any_bytes_survive(place: Place) -> None:
    async def body(bus: Bus) -> None:
        data = bytes(range(256)) * 100
        await bus.append("s", data)
        assert (await drain(bus, "s"))[0] == [data]

    run(place, body)


def test_many_writers_lose_nothing(place: Place) -> None:
    async def body(*buses: Bus) -> None:
        async def write(i: int, bus: Bus, some: Iterable[int]) -> None:
            for n in some:
                await bus.append("s", f"{i} {n}".encode())

        # Each bus has eight writers at once. With two hundred at once, connections would fail for other reasons.
        await asyncio.gather(*(write(i, bus, range(k, 50, 8)) for i, bus in enumerate(buses) for k in range(8)))
        found, _ = await drain(buses[0], "s")
        assert sorted(found) == sorted(f"{i} {n}".encode() for i in range(4) for n in range(50))

    run(place, body, 4)


def test_a_cancelled_task_ends_whatever_it_was_doing(place: Place) -> None:
    """On Python 3.11, redis-py loses a cancellation that meets a finished write: about one in a hundred here."""

    async def body(bus: Bus) -> None:
        async def talk() -> None:
            while True:
                await bus.append("s", b"x")
                await bus.read({"s": START}, 0.0)

        for i in range(300):
            task = asyncio.ensure_future(talk())
            await asyncio.sleep(0.0005 * (i % 7))
            task.cancel()
            done, _ = await asyncio.wait([task], timeout=60.0)
            assert done, f"cancellation {i} was swallowed"
            assert task.cancelled()

    run(place, body)


async def test_a_cancelled_task_ends_while_the_connections_are_lost(tmp_path: Path) -> None:
    """A cancellation that redis-py loses may meet a request that fails."""
    with redis_server(tmp_path) as server:
        admin = Redis.from_url(server.url)
        async with open_bus(server.url, b"r" * 32, None) as bus:

            async def talk() -> None:
                while True:
                    try:
                        await bus.append("s", b"x")
                    except Unavailable:
                        await asyncio.sleep(0)

            for i in range(200):
                task = asyncio.ensure_future(talk())
                await asyncio.sleep(0.0005 * (i % 7))
                await asyncio.to_thread(admin.client_kill_filter, _type="normal", skipme=True)
                task.cancel()
                done, _ = await asyncio.wait([task], timeout=60.0)
                assert done, f"cancellation {i} was swallowed"
                assert task.cancelled()
        admin.close()


# --- agents' messages -------------------------------------------------------------------------------------------------


async def test_a_distant_bus_is_not_one_round_trip_a_message() -> None:
    requests: list[tuple[bytes, ...]] = []

    class Far:
        async def append(self, stream: str, *bodies: bytes) -> None:
            await asyncio.sleep(0)
            requests.append(bodies)
            if len(requests) == 1:
                raise Unavailable("gone")

    speaker = Speaker(cast(Bus, Far()), "s", single_threaded())
    words = [Leave(run=bytes(32), id=f"{i}", learner="l", incarnation=1, step=i, done=False) for i in range(100)]
    for word in words:
        speaker.say(word)
    with pytest.raises(Unavailable):
        await speaker.flush()
    await speaker.flush()
    assert [word for bodies in requests[1:] for body in bodies for word in decode(body)] == words, (
        "every message must arrive exactly once"
    )
    assert len(requests) == 3


# --- losing everything ------------------------------------------------------------------------------------------------


async def test_a_reader_ahead_of_what_is_left_starts_again(tmp_path: Path) -> None:
    """If Redis restarts empty, or without its last second, it issues ids again, and positions lie in the future."""
    with redis_server(tmp_path) as server:
        async with open_bus(server.url, b"r" * 32, None) as bus:
            for i in range(10):
                await bus.append("s", f"{i}".encode())
            _, position = await drain(bus, "s")
            ahead = f"{int(position.split('-')[0]) + 10_000_000}-0"
            assert [m.body for m in (await bus.read({"s": ahead}, 0.5))["s"]] == [f"{i}".encode() for i in range(10)]


def test_what_is_not_ours_in_a_stream_is_passed_over(redis: Server) -> None:
    """A process that may write to a stream can put other fields into it. A reader skips each of these once."""
    import redis as client

    digest = os.urandom(32)

    async def body(bus: Bus) -> None:
        await bus.append("s", b"")  # without this message, no reader would find the stream
        listener = Listener(bus, single_threaded(), lambda _: True)
        with client.Redis.from_url(redis.url) as strange:
            strange.xadd(f"isthmus:{digest[:8].hex()}:s", {"other": "field"})
        heard = [said.body async for _, said in listener.backlog()]
        assert heard == []
        assert listener.positions["s"] == await bus.tail("s"), "the entry must not be read again"
        await bus.append("s", b"ours")
        assert [said.body async for _, said in listener.backlog()] == [b"ours"], "an empty body is not a message"

    run((redis.url, digest), body)


async def test_a_wiped_redis_is_heard_again(redis: Server) -> None:
    import redis as client

    run = os.urandom(32)
    async with open_bus(redis.url, run, None) as bus:
        await bus.append("s", b"before")
        _, position = await drain(bus, "s")
        with client.Redis.from_url(redis.url) as operator:
            operator.flushall()
        assert await bus.read({"s": position}, 0.05) == {}
        await bus.append("s", b"after")
        found = await bus.read({"s": position}, 1.0)
        assert [m.body for m in found["s"]] == [b"after"]


async def test_a_deleted_sqlite_file_is_made_again(tmp_path: Path) -> None:
    path, run = tmp_path / "bus.sqlite", os.urandom(32)
    async with open_bus(f"sqlite://{path}", run, None) as bus, open_bus(f"sqlite://{path}", run, None) as reader:
        for i in range(5):
            await bus.append("s", f"{i}".encode())
        _, position = await drain(reader, "s")
        for file in tmp_path.glob("bus.sqlite*"):
            file.unlink()
        await bus.append("s", b"after")
        assert [m.body for m in (await reader.read({"s": position}, 1.0))["s"]] == [b"after"]


async def test_reading_makes_no_sqlite_file_and_finds_what_is_written_later(tmp_path: Path) -> None:
    """`isthmus status` with a mistyped --bus left a file there."""
    url, run = f"sqlite://{tmp_path / 'deep' / 'bus.sqlite'}", os.urandom(32)
    async with open_bus(url, run, None) as reader, open_bus(url, run, None) as writer:
        assert await reader.read({"s": START}, 0.0) == {}
        assert (await reader.tail("s"), await reader.names(), await reader.other_runs(60.0)) == ("0", set(), [])
        assert list(tmp_path.iterdir()) == []
        waiting = asyncio.ensure_future(reader.read({"s": START}, 10.0))
        await asyncio.sleep(0.1)
        await writer.append("s", b"later")
        assert [m.body for m in (await waiting)["s"]] == [b"later"]
        await reader.append("s", b"last")
        assert [m.body for m in (await writer.read({"s": START}, 1.0))["s"]] == [b"later", b"last"]


async def test_a_link_that_leads_nowhere_is_not_followed_by_a_reader_either(tmp_path: Path) -> None:
    (tmp_path / "bus.sqlite").symlink_to(tmp_path / "nothing")
    with pytest.raises(Denied, match="it is a link to another file"):
        await failing(f"sqlite://{tmp_path / 'bus.sqlite'}")


async def test_streams_that_nobody_writes_to_leave_the_sqlite_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "EXPIRE_S", 0.5)
    async with open_bus(f"sqlite://{tmp_path / 'bus.sqlite'}", bytes(32), None) as bus:
        await bus.append("gone", b"1")
        await asyncio.sleep(1.0)
        assert await bus.names() == {"gone"}
        for _ in range(sqlite.TRIM_EVERY + 1):
            await bus.append("here", b"2")
        assert await bus.names() == {"here"}
        assert await bus.tail("gone") == "0"


async def test_a_file_that_is_no_database_is_unavailable(tmp_path: Path) -> None:
    path = tmp_path / "bus.sqlite"
    path.write_bytes(b"this is not a database at all" * 100)
    async with open_bus(f"sqlite://{path}", bytes(32), None) as bus:
        with pytest.raises(Unavailable, match="not a database"):
            await bus.append("s", b"x")


# --- no access --------------------------------------------------------------------------------------------------------


async def failing(url: str) -> None:
    async with open_bus(url, bytes(32), None) as bus:
        await bus.tail("syncer")


async def test_a_redis_that_is_not_there_is_unavailable() -> None:
    with pytest.raises(Unavailable, match=r"redis://127\.0\.0\.1:9"):
        await failing("redis://127.0.0.1:9")


async def test_a_redis_that_asks_for_a_password_is_denied(tmp_path: Path) -> None:
    with redis_server(tmp_path, arguments=("--save", "", "--requirepass", "sesame")) as server:
        with pytest.raises(Denied, match="asks for a password"):
            await failing(server.url)
        with pytest.raises(Denied, match="refuses its password"):
            await failing(server.url.replace("redis://", "redis://:guess@"))
        await failing(server.url.replace("redis://", "redis://:sesame@"))


async def test_a_password_is_never_part_of_an_error() -> None:
    with pytest.raises(Unavailable) as caught:
        await failing("redis://:sesame@127.0.0.1:9")
    assert "sesame" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://host", "/just/a/path", "redis://host:notaport"])
async def test_a_url_of_no_bus_is_refused(url: str) -> None:
    with pytest.raises(InputError):
        await failing(url)


# --- keys of other programs, and old streams --------------------------------------------------------------------------


def commands_of(client: Any) -> dict[str, int]:
    """Return how often the server was asked for each command."""
    return {name.removeprefix("cmdstat_"): stat["calls"] for name, stat in client.info("commandstats").items()}


async def test_no_key_of_others_on_a_shared_redis_is_looked_at(redis: Server) -> None:
    import redis as client

    async with open_bus(redis.url, os.urandom(32), None) as bus:
        with client.Redis.from_url(redis.url) as other:
            other.mset({f"session:{i}": b"x" for i in range(1000)})
            other.config_resetstat()
            await bus.append("learner/a", b"x")
            for within in (None, 10.0):
                assert await bus.names(within) == {"learner/a"}
            asked = commands_of(other)
    assert asked["zrevrangebyscore"] == 2
    assert not {"scan", "keys", "type"} & asked.keys()


async def test_streams_are_found_again_when_the_servers_clock_was_set(redis: Server) -> None:
    async with open_bus(redis.url, os.urandom(32), None) as bus, open_bus(redis.url, os.urandom(32), None):
        await bus.append("learner/a", b"x")
        cast(Any, bus)._ahead -= 3600.0
        await bus.names(10.0)
        assert await bus.names(10.0) == {"learner/a"}
        cast(Any, bus)._ahead += 3600.0
        await bus.append("learner/b", b"x")
        await bus.append("learner/b", b"x")
        assert await bus.names(10.0) == {"learner/a", "learner/b"}


async def test_a_time_far_in_the_future_hides_no_stream(redis: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    import redis as client

    monkeypatch.setattr(redis_bus, "NAMES_MAX", 2)
    run = os.urandom(32)
    async with open_bus(redis.url, run, None) as bus:
        await bus.append("learner/honest", b"x")
        with client.Redis.from_url(redis.url) as other:
            other.zadd(f"isthmus:{run[:8].hex()}:names", {f"learner/{i}": "inf" for i in range(5)})
        assert await bus.names() == {"learner/honest"}
        assert await bus.names(10.0) == {"learner/honest"}


async def test_names_of_the_past_leave_the_list(redis: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_bus(redis.url, os.urandom(32), None) as bus:
        await bus.append("learner/gone", b"x")
        await asyncio.sleep(1.1)
        monkeypatch.setattr(redis_bus, "EXPIRE_S", 1)
        monkeypatch.setattr(redis_bus, "EXPIRE_EVERY", 1)
        await bus.append("learner/here", b"x")
        assert await bus.names() == {"learner/here", "learner/gone"}
        await bus.append("syncer", b"x")
        assert await bus.names() == {"learner/here", "syncer"}

"""The bus gives each error of Redis its meaning, and a run goes on when real servers fail over."""

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import redis

from isthmus.bus import Bus, open_bus
from isthmus.bus import redis as bus_redis
from isthmus.bus.replies import MEANINGS
from isthmus.errors import Denied, Unavailable
from isthmus.format.rules import Pace
from isthmus_services.servers import Server, free_ports, redis_binary, redis_server
from support.world import seed_of, serving, train, until, world

ERRORS: dict[str, tuple[bytes, type[Exception], str]] = {
    # name: (what the server says, what is raised, what the user reads)
    "READONLY": (b"READONLY You can't write against a read only replica.", Unavailable, "looked up again"),
    "MASTERDOWN": (b"MASTERDOWN Link with MASTER is down", Unavailable, "looked up again"),
    "UNBLOCKED": (b"UNBLOCKED force unblock, instance state changed (master -> replica?)", Unavailable, "its role"),
    "LOADING": (b"LOADING Redis is loading the dataset in memory", Unavailable, "has just started"),
    "CLUSTERDOWN": (b"CLUSTERDOWN Hash slot not served", Unavailable, "slots"),
    "TRYAGAIN": (b"TRYAGAIN Multiple keys request during rehashing of slot", Unavailable, "moves slots"),
    "MOVED": (b"MOVED 3999 127.0.0.1:6381", Denied, "not in a cluster"),
    "ASK": (b"ASK 3999 127.0.0.1:6381", Denied, "not in a cluster"),
    "CROSSSLOT": (b"CROSSSLOT Keys in request don't hash to the same slot", Denied, "not in a cluster"),
    "NOAUTH": (b"NOAUTH Authentication required.", Denied, "ISTHMUS_BUS_PASSWORD_FILE"),
    "WRONGPASS": (b"WRONGPASS invalid username-password pair or user is disabled.", Denied, "install the run's users"),
    "without any password configured": (
        b"ERR AUTH <password> called without any password configured for the default user. Are you sure your "
        b"configuration is correct?",
        Denied,
        "leave user and password out",
    ),
    "NOPERM": (b"NOPERM this user has no permissions to run the 'xadd' command", Denied, "isthmus access"),
    "OOM": (b"OOM command not allowed when used memory > 'maxmemory'.", Unavailable, "raise maxmemory"),
    "MISCONF": (b"MISCONF Redis is configured to save RDB snapshots, but it's unable to", Unavailable, "disk"),
    "NOREPLICAS": (b"NOREPLICAS Not enough good replicas to write.", Unavailable, "min-replicas-to-write"),
    "WRONGTYPE": (b"WRONGTYPE Operation against a key holding the wrong kind of value", Denied, "another program"),
    "DENIED": (b"DENIED Redis is running in protected mode", Denied, "give it a password"),
    "max number of clients": (b"ERR max number of clients reached", Unavailable, "raise maxclients"),
    "HELLO": (b"ERR unknown command `HELLO`, with args beginning with: `3`", Denied, r"\?protocol=2"),
}


WELL = {
    "TIME": b"*2\r\n$10\r\n1700000000\r\n$1\r\n0\r\n",
    "ZADD": b":1\r\n",
    "EXPIRE": b":1\r\n",
    "ZREMRANGEBYSCORE": b":0\r\n",
}
"""Answers of a server without an error. A command that is not in it is answered with OK."""

RECONNECT = {"READONLY", "MASTERDOWN", "UNBLOCKED"}
"""After these errors, the bus opens a new connection and looks the server's name up again: it may lead elsewhere."""

CLOSES = {"LOADING", "NOAUTH", "WRONGPASS", "without any password configured", "max number of clients"}
"""After these errors, redis-py itself closes the connection."""


def test_every_error_of_the_table_is_tried() -> None:
    assert ERRORS.keys() == MEANINGS.keys()


@asynccontextmanager
async def saying(words: bytes, at: str) -> AsyncIterator[tuple[Bus, list[int]]]:
    """Open a bus at a server that answers commands of this name with this error. Count requests by connection."""
    connections: list[int] = []

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(0)
        try:
            while head := await reader.readline():
                parts = []
                for _ in range(int(head[1:])):
                    size = int((await reader.readline())[1:])
                    parts.append((await reader.readexactly(size + 2))[:-2])
                connections[-1] += 1
                name = parts[0].decode()
                writer.write(b"-" + words + b"\r\n" if at in ("*", name) else WELL.get(name, b"+OK\r\n"))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(one, "127.0.0.1", 0)
    async with (
        server,
        open_bus(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}?protocol=2", b"r" * 32, None) as bus,
    ):
        yield bus, connections


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("request_", ["append", "read"])
async def test_every_error_has_its_meaning(name: str, request_: str) -> None:
    words, raised, said = ERRORS[name]
    async with saying(words, "XADD" if request_ == "append" else "XREAD") as (bus, connections):
        for _ in range(2):
            with pytest.raises(raised, match=said):
                await (bus.append("s", b"x") if request_ == "append" else bus.read({"s": ""}, 0.0))
        again = name in RECONNECT | CLOSES
        assert len(connections) == (2 if again else 1)


async def test_a_server_that_is_no_redis_is_called_so(seaweedfs: Server) -> None:
    async with open_bus(seaweedfs.url.replace("http:", "redis:"), b"r" * 32, None) as bus:
        with pytest.raises(Unavailable, match=r"what answers there is no Redis: check the address .*HTTP/1\.1 400"):
            await bus.append("s", b"x")


async def test_a_refused_user_is_named_and_its_password_is_not(redis: Server) -> None:
    url = redis.url.replace("redis://", "redis://learner-eu-1:not-this-one@")
    async with open_bus(url, b"r" * 32, None) as bus:
        with pytest.raises(Denied, match=r"as user learner-eu-1: .*let its administrator install the run's") as refused:
            await bus.append("s", b"x")
    assert "not-this-one" not in str(refused.value)


# --- real servers -----------------------------------------------------------------------------------------------------


class Name:
    """A server name: new connections go to the port that it leads to at the time, and open ones stay."""

    def __init__(self, leads_to: int) -> None:
        self.leads_to, self.port = leads_to, 0
        self._open: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Name":
        self._server = await asyncio.start_server(self._one, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        there, back = await asyncio.open_connection("127.0.0.1", self.leads_to)

        async def pass_on(source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
            while data := await source.read(1 << 16):
                to.write(data)
                await to.drain()
            to.close()

        try:
            await asyncio.gather(pass_on(reader, back), pass_on(there, writer))
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._open.discard(task)
            for end in (writer, back):
                end.close()


def port_of(server: Server) -> int:
    return int(server.url.rpartition(":")[2])


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Server, Server]]:
    """A primary and its replica."""
    keep = ("--save", "", "--appendonly", "no", "--repl-diskless-sync-delay", "0")
    with redis_server(tmp_path / "a", arguments=keep) as a:
        follow = (*keep, "--replicaof", "127.0.0.1", str(port_of(a)))
        with redis_server(tmp_path / "b", arguments=follow) as b:
            yield a, b


def role(server: Server) -> str:
    with redis.Redis(port=port_of(server)) as client:
        return str(client.info("replication")["role"])


async def goes_on_after(folder: Path, name: Name, fail_over: Callable[[], None], new: Callable[[], int]) -> None:
    """Let a learner and a syncer share a bus by this name, fail over, and wait for merges."""
    seed = seed_of(pace=Pace(heartbeat_s=0.2, silence_s=2.0))
    async with world(folder / "run", seed, bus=f"redis://127.0.0.1:{name.port}") as w, serving(w.syncer()) as syncer:
        done = False
        training = asyncio.ensure_future(train(w.learner("l0"), 20, enough=lambda: done))
        await until(lambda: syncer.tallies.commits >= 8, "commits before")
        await asyncio.to_thread(fail_over)
        name.leads_to = new()
        before = syncer.tallies.commits
        await until(lambda: syncer.tallies.commits >= before + 12, "commits after")
        done = True
        await training


async def test_a_run_goes_on_after_a_failover(pair: tuple[Server, Server], tmp_path: Path) -> None:
    """The old primary lives on as a replica, its connections stay open, and its name leads to the new one."""
    first, second = pair

    def fail_over() -> None:
        with redis.Redis(port=port_of(first)) as client:
            while client.info("replication")["connected_slaves"] < 1:
                time.sleep(0.02)
            client.execute_command("FAILOVER")
        while role(second) != "master" or role(first) != "slave":
            time.sleep(0.02)

    async with Name(port_of(first)) as name:
        await goes_on_after(tmp_path, name, fail_over, lambda: port_of(second))


async def test_requests_beside_new_connections_fail_as_in_any_outage(
    pair: tuple[Server, Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a demoted server many requests at a time make the bus connect anew: none may fail in another way."""
    _, replica = pair
    monkeypatch.setattr(bus_redis, "RECONNECT_S", 0.0)
    url, end = f"redis://127.0.0.1:{port_of(replica)}", asyncio.get_running_loop().time() + 60.0
    refused = 0
    async with open_bus(url, b"r" * 32, None) as bus:

        async def append() -> None:
            nonlocal refused
            while refused <= 100 and asyncio.get_running_loop().time() < end:
                with pytest.raises(Unavailable):
                    await bus.append("s", b"x")
                refused += 1
                await asyncio.sleep(0.002 * (refused % 3))

        async def read() -> None:
            while refused <= 100 and asyncio.get_running_loop().time() < end:
                await bus.read({"s": ""}, 0.05)

        await asyncio.gather(*(append() for _ in range(8)), *(read() for _ in range(4)))
        assert refused > 100
        with redis.Redis(port=port_of(replica)) as client:
            client.execute_command("REPLICAOF", "NO", "ONE")
        await bus.append("s", b"y")
        assert [item.body for item in (await bus.read({"s": ""}, 1.0))["s"]] == [b"y"]


@contextmanager
def sentinel(folder: Path, of: Server) -> Iterator[int]:
    """Run a Sentinel that watches a server; yield its port."""
    folder.mkdir()
    port = free_ports(1)[0]
    settings = folder / "sentinel.conf"
    settings.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {folder}\nsentinel monitor run 127.0.0.1 {port_of(of)} 1\n"
        "sentinel down-after-milliseconds run 500\nsentinel failover-timeout run 3000\n"
    )
    process = subprocess.Popen([redis_binary(), str(settings), "--sentinel"], stdout=subprocess.DEVNULL)
    try:
        yield port
    finally:
        process.terminate()
        process.wait(30)


async def test_a_run_goes_on_after_sentinel_has_failed_over(pair: tuple[Server, Server], tmp_path: Path) -> None:
    first, second = pair
    with sentinel(tmp_path / "sentinel", first) as port:

        def primary() -> int:
            with redis.Redis(port=port, decode_responses=True) as client:
                return int(client.execute_command("SENTINEL", "get-master-addr-by-name", "run")[1])

        def fail_over() -> None:
            assert first.process is not None
            first.process.kill()
            while primary() != port_of(second) or role(second) != "master":
                time.sleep(0.05)

        async with Name(port_of(first)) as name:
            await goes_on_after(tmp_path, name, fail_over, primary)

"""The bus on Redis Streams: one key per stream, plain XADD and XREAD, and no retries below the agents.

One more key of a run is a sorted set of its streams' names. The score of a name is the time of the last write to its
stream, on the server's clock. So finding new streams does not read the keys of other programs on the same server.
"""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from typing_extensions import override

from isthmus.bus.base import NAMES_MAX, READ_MAX, RETAINED_MESSAGES, START, Bus, BusItem, Refused, Refusing
from isthmus.bus.replies import Action, meaning
from isthmus.errors import Denied, InputError, Unavailable, told
from isthmus.format.records.messages import SYNCER_STREAM, is_stream
from isthmus.runtime.descriptors import explained
from isthmus.runtime.urls import Place

T = TypeVar("T")

CONNECT_TIMEOUT_S = 3.0
WRITE_TIMEOUT_S = 5.0
BLOCK_S_MAX = 5.0  # one XREAD; longer waits are several
READ_TIMEOUT_S = BLOCK_S_MAX + 5.0  # after which a connection is given up
RECONNECT_S = 1.0  # the least time between two rounds of new connections
EXPIRE_S = 7 * 86400
"""The server drops a stream that has had no writes for about this long."""

REFUSAL_S = 2.0
"""How long to wait for a server to refuse a length; after that the length counts as accepted."""

EXPIRE_EVERY = 256  # appends
NAMES = "names"
"""Name of the sorted set below the run's prefix; no stream has this name."""

AHEAD_S = 60.0
"""A stream whose last write lies further in the future than this is ignored: no real write has such a time."""

_FIELD = b"m"

PRIMARY = "master"
"""Redis's word for a server that is no replica."""

FULL = 0.97
"""Share of its memory from which a server is said to be full: each message needs a little."""


@dataclass(frozen=True)
class ServerFacts:
    """What a Redis server reports about itself."""

    version: tuple[int, ...]
    valkey: bool
    mode: str
    """standalone, sentinel or cluster."""
    role: str
    """master or slave."""
    append_only: bool
    eviction_policy: str
    memory_max: int
    """Bytes; 0 for no limit."""
    memory_used: int
    time: float
    """Its clock, in seconds since 1970."""
    saves: bool = True
    """Whether its last write of a snapshot or of the append-only file succeeded."""


class RedisBus(Bus):
    """Streams of one run as keys `isthmus:<run>:<stream>`. Positions are Redis stream ids."""

    def __init__(self, connect: Callable[[], tuple["Redis", "Redis"]], run: str, url: str) -> None:
        """`connect`: makes two clients, one that waits for messages, and one for everything else."""
        self.url = url
        self._connect = connect
        self._reader, self._writer = connect()
        self._replaced: deque[tuple[float, Redis]] = deque()
        """Clients that were replaced, and when; requests that were under way end on them."""
        self._replaced_at = -math.inf
        self._prefix = f"isthmus:{run}:"
        self._names = self._prefix + NAMES
        self._appended: dict[str, int] = {}
        self._tidies = True
        self._ahead: float | None = None
        """The server's clock minus the event loop's [s]; None until the server was asked."""

    @override
    async def append(self, stream: str, *bodies: bytes) -> None:
        key, now = self._prefix + stream, await self._now()
        before = self._appended.get(key, 0)
        requests = self._writer.pipeline(transaction=False)
        for body in bodies:
            requests.xadd(key, {_FIELD: body}, maxlen=RETAINED_MESSAGES, approximate=True)
        requests.zadd(self._names, {stream: now})
        replies: list[Any] = await self._guard(requests.execute())
        self._ahead = _order(replies[0].decode())[0] / 1e3 - asyncio.get_running_loop().time()
        self._appended[key] = before + len(bodies)
        if self._tidies and -before % EXPIRE_EVERY < len(bodies):
            await self._tidy(stream, now)

    async def _tidy(self, stream: str, now: float) -> None:
        """Set expiry times, so that the server drops the streams of learners that never come back.

        Every `EXPIRE_EVERY` appends are often enough. A syncer does this for all streams, since learners with users of
        their own may lack the permission.
        """
        requests = self._writer.pipeline(transaction=False)
        try:
            streams = [stream]
            if stream == SYNCER_STREAM:
                streams = [name for name in await self.names(EXPIRE_S) if is_stream(name)]
                requests.zremrangebyscore(self._names, "-inf", now - EXPIRE_S)
                requests.expire(self._names, EXPIRE_S)
            for name in streams:
                requests.expire(self._prefix + name, EXPIRE_S)
            await self._guard(requests.execute())
        except Denied:
            self._tidies = False

    @override
    async def read(self, positions: Mapping[str, str], timeout_s: float) -> Mapping[str, Sequence[BusItem]]:
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        after: dict[str, str] = {self._prefix + stream: position or "0-0" for stream, position in positions.items()}
        while True:
            left = min(until - loop.time(), BLOCK_S_MAX)
            if not after:
                await asyncio.sleep(max(left, 0.0))
                return {}
            # BLOCK 0 would wait for ever; without BLOCK the request returns at once.
            block = int(left * 1000) if left > 0.001 else None
            reply = await self._guard(self._reader.xread(cast("dict[Any, Any]", after), count=READ_MAX, block=block))
            found = {
                # An entry of another program gets an empty body. Its position counts, or it would be read for ever.
                key.decode(errors="replace").removeprefix(self._prefix): [
                    BusItem(entry.decode(errors="replace"), (fields or {}).get(_FIELD, b""))
                    for entry, fields in entries
                ]
                for key, entries in _pairs(reply)
            }
            if found:
                return found
            if await self._rewind(after):
                continue
            if until - loop.time() <= 0.001:
                return {}

    async def ago(self, streams: Sequence[str], seconds: float) -> Mapping[str, str]:
        """See `Bus.ago`. Ids of Redis streams begin with the server's clock in milliseconds."""
        now_s, now_us = await self._guard(self._writer.time())
        then = f"{max(0, int((now_s - seconds) * 1e3 + now_us / 1e3))}-0"
        newest = await self._newest([self._prefix + stream for stream in streams])
        # A position beyond the end would look as if the server had lost the newest messages.
        return {
            stream: START if at is None else min(at, then, key=_order)
            for stream, at in zip(streams, newest, strict=True)
        }

    @override
    async def tail(self, stream: str) -> str:
        return (await self._newest([self._prefix + stream]))[0] or START

    @override
    async def names(self, within_s: float | None = None) -> set[str]:
        now = await self._now()
        requests = self._writer.pipeline(transaction=False)
        since = "-inf" if within_s is None else now - within_s
        requests.zrevrangebyscore(self._names, now + AHEAD_S, since, start=0, num=NAMES_MAX)
        requests.time()  # updates `_ahead` for the next call: a clock may have been set
        found, (seconds, microseconds) = await self._guard(requests.execute())
        self._ahead = seconds + microseconds / 1e6 - asyncio.get_running_loop().time()
        return {name.decode(errors="replace") for name in found}

    async def _now(self) -> float:
        """Return the time by the server's clock [s since 1970], from the difference that was last measured."""
        if self._ahead is None:
            seconds, microseconds = await self._guard(self._writer.time())
            self._ahead = seconds + microseconds / 1e6 - asyncio.get_running_loop().time()
        return asyncio.get_running_loop().time() + self._ahead

    async def facts(self) -> ServerFacts:
        """Return what the server reports about itself. Raises `Unavailable`, and `Denied` without +info and +time."""
        seconds, microseconds = await self._guard(self._writer.time())
        info: dict[str, Any] = await self._guard(self._writer.info())
        shown = info.get("valkey_version") or info["redis_version"]
        return ServerFacts(
            version=tuple(int(part) for part in str(shown).split(".") if part.isdigit()),
            valkey="valkey_version" in info,
            # Valkey calls this server_mode.
            mode="cluster" if info.get("cluster_enabled") else str(info.get("redis_mode", info.get("server_mode", ""))),
            role=str(info.get("role", PRIMARY)),
            append_only=bool(info.get("aof_enabled", 0)),
            eviction_policy=str(info.get("maxmemory_policy", "noeviction")),
            memory_max=int(info.get("maxmemory", 0)),
            memory_used=int(info.get("used_memory", 0)),
            time=seconds + microseconds / 1e6,
            saves="err" not in (info.get("rdb_last_bgsave_status"), info.get("aof_last_write_status")),
        )

    @override
    async def refusing(self) -> Refusing | None:
        try:
            facts = await self.facts()
        except Denied:
            return None
        used, most = facts.memory_used, facts.memory_max
        if facts.role != PRIMARY:
            return Refusing(
                "the server is a replica now", "make it the primary again, or let the bus's name lead to the primary"
            )
        if used > FULL * most > 0:
            return Refusing(
                f"its memory is full ({used / 1e6:.1f} of {most / 1e6:.1f} MB)",
                "raise its maxmemory, or delete what else this server stores",
            )
        if not facts.saves and await self._stops_writes():
            return Refusing(
                "it cannot write to its disk",
                "free that disk (its log names the file); or, since nothing in a bus has to be kept, redis-cli CONFIG "
                "SET stop-writes-on-bgsave-error no",
            )
        return None

    async def _stops_writes(self) -> bool:
        """Return whether the server refuses writes while it cannot save. If it does not tell this user, assume so."""
        setting = "stop-writes-on-bgsave-error"
        try:
            said: dict[Any, Any] = await self._guard(self._writer.config_get(setting))
        except (Denied, Unavailable):  # managed servers may not have the command
            return True
        return bool(said.get(setting, "yes") == "yes")

    async def takes(self, size: int) -> bool:
        """Return whether the server would accept a value of `size` bytes. Raises `Denied`, `Unavailable`.

        Only the length of an argument to PING is sent, on a connection of its own that is then closed. The server
        refuses a length over its limit as soon as it has read it, and otherwise waits for bytes that never come.
        Nothing is stored, and agents have all permissions that this needs.
        """
        connection: Any = self._writer.connection_pool.make_connection()  # type: ignore[no-untyped-call]

        async def ask() -> bool:
            try:
                await connection.connect()
                await connection.send_packed_command(b"*2\r\n$4\r\nPING\r\n$%d\r\n" % size, check_health=False)
                # None means no answer within this time. The server's errors are raised.
                return await connection.read_response(timeout=REFUSAL_S) is None
            except ResponseError as error:
                if "invalid bulk length" in str(error):
                    return False
                raise
            finally:
                await connection.disconnect(nowait=True)

        return await self._guard(ask())

    @property
    def user(self) -> str:
        """The user's name on the server; empty if none was given."""
        return str(self._writer.connection_pool.connection_kwargs.get("username") or "")

    @property
    def verifies(self) -> bool:
        """Whether the server's certificate is verified against the trusted authorities."""
        given = self._writer.connection_pool.connection_kwargs.get("ssl_cert_reqs", "required")
        return str(given).lower() not in ("none", "verifymode.cert_none", "0")

    async def administers(self) -> list[str]:
        """Return the commands that this user may use although no participant of a run needs them. Raises `Unavailable`.

        Only commands that change nothing in the form sent here are tried.
        """
        key = self._prefix + "doctor-nothing"
        client: Any = self._writer
        asked = (("CONFIG", "GET", "maxmemory"), ("ACL", "WHOAMI"), ("DEL", key), ("XTRIM", key, "MAXLEN", "0"))
        found = []
        for command in asked:
            try:
                await self._guard(client.execute_command(*command))
            except Denied:
                continue
            found.append(" ".join(command[:2]) if command[0] in ("CONFIG", "ACL") else command[0])
        return found

    async def _newest(self, keys: Sequence[str]) -> list[str | None]:
        """Return the newest id of each stream in one round trip; None for a stream that does not exist."""
        if not keys:
            return []
        requests = self._writer.pipeline(transaction=False)
        for key in keys:
            requests.xrevrange(key, count=1)
        replies: list[Any] = await self._guard(requests.execute())
        return [str(entries[0][0].decode()) if entries else None for entries in replies]

    async def _rewind(self, after: dict[str, str]) -> bool:
        """Reset our position in streams that end before it: the server lost their newest messages.

        Returns True if such a stream has messages to read.
        """
        rewound = False
        read = [key for key, position in after.items() if position != "0-0"]
        for key, newest in zip(read, await self._newest(read), strict=True):
            if newest is None or _order(newest) < _order(after[key]):
                after[key] = "0-0"
                rewound = rewound or newest is not None
        return rewound

    async def _guard(self, request: Awaitable[T]) -> T:
        task = asyncio.current_task()
        cancelled = task.cancelling() if task else 0
        try:
            try:
                return await request
            finally:
                # redis-py writes inside asyncio.wait_for, which before Python 3.12 swallows a cancellation that arrives
                # when the write is already done (bpo-37658), whether the request then succeeds or fails. The task would
                # never end, so cancel it again.
                if task and task.cancelling() > cancelled:
                    raise asyncio.CancelledError
        except (RedisError, OSError, TimeoutError) as error:
            found = meaning(error)
            user = f" as user {self.user}" if self.user and found.action == Action.END else ""
            said = f"{self.url}{user}: {found.words}{': ' if found.words else ''}{explained(told(error))}"
            if isinstance(error, RedisConnectionError) and "connecting to" in said:
                said = f"{said.rstrip('.')}: check that a server of the bus is started there, and that it is reachable"
            if found.action == Action.END:
                raise Denied(said) from None
            if found.action == Action.RECONNECT:
                await self._reconnect()
            raise (Refused(said) if found.words else Unavailable(said)) from None

    async def _reconnect(self) -> None:
        """Let the next requests make new connections, for which the server's name is looked up again.

        Connections in use are not closed: the client fails in ways of its own where one is closed under a request.
        """
        now = asyncio.get_running_loop().time()
        if now - self._replaced_at < RECONNECT_S:
            return
        self._replaced_at = now
        self._replaced.extend((now, client) for client in (self._reader, self._writer))
        self._reader, self._writer = self._connect()
        while self._replaced[0][0] < now - READ_TIMEOUT_S:
            await _close(self._replaced.popleft()[1])

    async def aclose(self) -> None:
        """Close all connections."""
        for client in (self._reader, self._writer, *(client for _, client in self._replaced)):
            await _close(client)


async def _close(client: "Redis") -> None:
    with suppress(RedisError, OSError, TimeoutError):
        await client.aclose()


def _pairs(reply: Any) -> list[tuple[bytes, list[tuple[bytes, dict[bytes, bytes]]]]]:
    """Return XREAD's reply as pairs, for both versions of the protocol."""
    if not reply:
        return []
    if isinstance(reply, dict):
        # RESP3: {key: [[entry, …]]}, one more level of nesting than RESP2.
        reply = [
            (key, groups[0] if groups and isinstance(groups[0], list) else groups) for key, groups in reply.items()
        ]
    return list(reply)


def _order(entry: str) -> tuple[int, int]:
    milliseconds, _, number = entry.partition("-")
    return int(milliseconds), int(number or 0)


@asynccontextmanager
async def open_redis(place: Place, run: str) -> AsyncIterator[RedisBus]:
    """Open the bus at a Redis URL; connections are made lazily and closed with the context. Raises `InputError`."""
    # Retries in the client would append twice and hide outages. A blocking read needs a longer timeout than a write.
    options: dict[str, Any] = {
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "retry": Retry(NoBackoff(), 0),
        "health_check_interval": 0,
    }

    def connect() -> tuple[Redis, Redis]:
        reader = Redis.from_url(place.url, socket_timeout=READ_TIMEOUT_S, **options)
        writer = Redis.from_url(place.url, socket_timeout=WRITE_TIMEOUT_S, **options)
        # The client checks most options only when it makes a connection.
        writer.connection_pool.make_connection()  # type: ignore[no-untyped-call]
        return reader, writer

    try:
        bus = RedisBus(connect, run, str(place))
    except (AttributeError, TypeError, ValueError, RedisError) as error:
        names = [name for name in place.options if f"'{name}'" in str(error)] or place.options
        advice = f": correct or leave out the option {', '.join(names)}" if names else ""
        raise InputError(f"{place}: Redis's client cannot read this URL{advice}") from None
    try:
        yield bus
    finally:
        await bus.aclose()

"""Users of a Redis server, set there by an administrator."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from isthmus.bus.redis import CONNECT_TIMEOUT_S, WRITE_TIMEOUT_S
from isthmus.bus.replies import Action, meaning
from isthmus.errors import Denied, InputError, Unavailable, told
from isthmus.runtime.urls import redacted


@dataclass(frozen=True, slots=True)
class BusUser:
    """A user of the bus."""

    name: str
    digest: str
    """SHA-256 of its password, in hexadecimal."""
    rules: str
    """Its permissions, in the syntax of ACL SETUSER."""


@dataclass(frozen=True, slots=True)
class UsersSet:
    """The state of a server after its users were set."""

    saved: bool
    """Whether the users are in the server's ACL file. Otherwise they are lost when it restarts."""
    is_open: bool
    """Whether anyone may use the server without a password."""


async def require_users(url: str) -> None:
    """Raise `InputError` if the Redis of this URL is too old for a run's users; `Denied` and `Unavailable`."""
    async with _opened(url) as client:
        version = str((await client.info("server"))["redis_version"])
    if int(version.partition(".")[0]) < 7:
        raise InputError(
            f"{redacted(url)}: Redis {version} cannot let a user only read a key: use Redis 7 or newer, or --bus-users "
            "none, with which all participants use the bus alike"
        )


async def set_users(url: str, users: Sequence[BusUser], removed: Sequence[str] = ()) -> UsersSet:
    """Set these users on the Redis of this URL, which names an administrator, and save them in its ACL file.

    `removed`: names of users that are deleted there. Raises `InputError` if a user exists with another password (then
    nothing is changed); `Denied` and `Unavailable`.
    """
    async with _opened(url) as client:
        for user in users:
            there = await client.acl_getuser(user.name)
            if there is not None and there["passwords"] != [user.digest]:
                raise InputError(
                    f"{redacted(url)}: the server has a user {user.name} with another password, of another "
                    "installation: use a Redis of its own for this run, or remove that user there (ACL DELUSER "
                    f"{user.name})"
                )
        if removed:
            await client.acl_deluser(*removed)
        for user in users:
            rules = user.rules.split()
            await client.execute_command("ACL", "SETUSER", user.name, "reset", "on", f"#{user.digest}", *rules)
        try:
            await client.acl_save()
            saved = True
        except ResponseError as error:
            if "not configured to use an ACL file" not in str(error):
                raise
            saved = False
        default = await client.acl_getuser("default")
        return UsersSet(saved, bool(default) and {"on", "nopass"} <= set(default["flags"]))


@asynccontextmanager
async def _opened(url: str) -> AsyncIterator[Any]:
    """Open a client of the Redis of this URL, and turn its errors into `Denied` and `Unavailable`."""
    client: Any = Redis.from_url(
        url, socket_connect_timeout=CONNECT_TIMEOUT_S, socket_timeout=WRITE_TIMEOUT_S, decode_responses=True
    )
    try:
        yield client
    except (RedisError, OSError, TimeoutError) as error:
        found = meaning(error)
        name = client.connection_pool.connection_kwargs.get("username")
        user = f"as user {name}" if name else "without a user"
        if found.action == Action.END or isinstance(error, ResponseError):
            raise Denied(
                f"{redacted(url)} {user}: {told(error)}: name an administrator of the bus with --bus-user and "
                "--bus-password-file, or use --bus-users file (its administrator installs the users) or none"
            ) from None
        raise Unavailable(f"{redacted(url)}: {found.words}{': ' if found.words else ''}{told(error)}") from None
    finally:
        await client.aclose()

"""Users of a Redis server, set there by an administrator."""

from collections.abc import Sequence
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


async def set_users(url: str, users: Sequence[BusUser]) -> UsersSet:
    """Set these users on the Redis of this URL, which names an administrator, and save them in its ACL file.

    Raises `InputError` if a user exists with another password (then nothing is changed), or if the server is too old
    for such users; `Denied` and `Unavailable`.
    """
    client: Any = Redis.from_url(
        url, socket_connect_timeout=CONNECT_TIMEOUT_S, socket_timeout=WRITE_TIMEOUT_S, decode_responses=True
    )
    shown = redacted(url)
    try:
        for user in users:
            there = await client.acl_getuser(user.name)
            if there is not None and there["passwords"] != [user.digest]:
                raise InputError(
                    f"{shown}: the server has a user {user.name} with another password, of another installation: use "
                    f"a Redis of its own for this run, or remove that user there (ACL DELUSER {user.name})"
                )
        version = str((await client.info("server"))["redis_version"])
        if int(version.partition(".")[0]) < 7:
            raise InputError(
                f"{shown}: Redis {version} cannot let a user only read a key: use Redis 7 or newer, or --bus-users none"
            )
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
    except (RedisError, OSError, TimeoutError) as error:
        found = meaning(error)
        said = f"{shown}: {found.words}{': ' if found.words else ''}{told(error)}"
        final = found.action == Action.END or isinstance(error, ResponseError)
        raise (Denied if final else Unavailable)(said) from None
    finally:
        await client.aclose()

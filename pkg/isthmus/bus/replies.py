"""What Redis's errors mean: whether to wait, to connect anew, or to end, and what to tell the user.

`tests/conformance/test_replies.py` tries the table with a server that answers with each of these errors.
"""

import re
from dataclasses import dataclass
from enum import Enum

from redis import exceptions as redis


class Action(Enum):
    """What the bus does after an error."""

    WAIT = "the same server will answer again"
    RECONNECT = "another server may answer under the same name"
    END = "an operator has to act"


@dataclass(frozen=True, slots=True)
class Meaning:
    """What an error means: the action, and words for the user."""

    action: Action
    words: str


_PASSWORD = Meaning(
    Action.END,
    "the server asks for a password: redis://USER:PASSWORD@host:port, or ISTHMUS_BUS_USER and "
    "ISTHMUS_BUS_PASSWORD_FILE",
)
_REFUSED = Meaning(
    Action.END,
    "the server does not know this user, or refuses its password: let its administrator install the run's users "
    "(`isthmus create … --bus-users server`, or --aclfile with redis/users.acl, on Redis 7), or correct "
    "ISTHMUS_BUS_USER and ISTHMUS_BUS_PASSWORD_FILE",
)
_UNPROTECTED = "without any password configured"
_CLUSTER = Meaning(
    Action.END,
    "this is a node of a Redis Cluster, and the run's streams are on another node: use a server that is not in a "
    "cluster, or a proxy in front of it",
)

MEANINGS: dict[str, Meaning] = {
    "READONLY": Meaning(Action.RECONNECT, "this server is a replica now: its name is looked up again"),
    "MASTERDOWN": Meaning(Action.RECONNECT, "this server is a replica without a primary: its name is looked up again"),
    "UNBLOCKED": Meaning(Action.RECONNECT, "this server has changed its role: its name is looked up again"),
    "LOADING": Meaning(Action.WAIT, "the server has just started and still loads its data"),
    "CLUSTERDOWN": Meaning(Action.WAIT, "the cluster does not serve: some of its slots have no server"),
    "TRYAGAIN": Meaning(Action.WAIT, "the cluster moves slots"),
    "MOVED": _CLUSTER,
    "ASK": _CLUSTER,
    "CROSSSLOT": _CLUSTER,
    "NOAUTH": _PASSWORD,
    "WRONGPASS": _REFUSED,
    _UNPROTECTED: Meaning(
        Action.END,
        "the server has no passwords, and got one: leave user and password out (ISTHMUS_BUS_USER, "
        "ISTHMUS_BUS_PASSWORD_FILE), or let its administrator set them",
    ),
    "NOPERM": Meaning(Action.END, "the user of the bus lacks a right: `isthmus access` writes users that have it"),
    "OOM": Meaning(Action.WAIT, "the server's memory is full: raise maxmemory, or delete other data stored there"),
    "MISCONF": Meaning(
        Action.WAIT,
        "the server cannot write to its disk, which may be full, and takes no writes until it can: free that disk, or, "
        "since nothing in a bus has to be kept, redis-cli CONFIG SET stop-writes-on-bgsave-error no",
    ),
    "NOREPLICAS": Meaning(Action.WAIT, "fewer replicas are connected than the server wants (min-replicas-to-write)"),
    "WRONGTYPE": Meaning(Action.END, "a key of this run is not a stream: another program has written to it"),
    "DENIED": Meaning(Action.END, "the server is in protected mode: give it a password, or bind it to loopback"),
    "max number of clients": Meaning(Action.WAIT, "the server has reached its limit of clients: raise maxclients"),
    "HELLO": Meaning(Action.END, "this server does not know HELLO: put ?protocol=2 at the end of the bus's URL"),
}
"""Meanings by the first word of the error, or by another word in it."""

OTHERS = Meaning(Action.WAIT, "")
_NO_REDIS = Meaning(
    Action.WAIT,
    "what answers there is no Redis: check the address of the bus, redis://HOST:PORT (--bus, ISTHMUS_BUS)",
)

_CLASSES: dict[type[Exception], str] = {
    # redis-py removes the first word from errors that it has a class for.
    redis.ReadOnlyError: "READONLY",
    redis.MasterDownError: "MASTERDOWN",
    redis.BusyLoadingError: "LOADING",
    redis.ClusterDownError: "CLUSTERDOWN",
    redis.TryAgainError: "TRYAGAIN",
    redis.AskError: "ASK",  # MOVED too
    redis.ClusterCrossSlotError: "CROSSSLOT",
    redis.AuthenticationWrongNumberOfArgsError: "NOAUTH",
    redis.AuthorizationError: "NOPERM",
    redis.NoPermissionError: "NOPERM",
    redis.OutOfMemoryError: "OOM",
}
_WORDS = re.compile("|".join(rf"\b{word}\b" for word in MEANINGS))


def meaning(error: BaseException) -> Meaning:
    """Return what an error of redis-py means; `OTHERS` for one that is not in the table."""
    for kind in type(error).__mro__:
        if kind in _CLASSES:
            return MEANINGS[_CLASSES[kind]]
    if isinstance(error, redis.InvalidResponse):
        return _NO_REDIS
    if isinstance(error, redis.AuthenticationError):  # one class for three errors, whose first word it removes
        said = str(error)
        return MEANINGS[_UNPROTECTED if _UNPROTECTED in said else "WRONGPASS" if "invalid" in said else "NOAUTH"]
    found = _WORDS.search(str(error))
    return MEANINGS[found[0]] if found else OTHERS

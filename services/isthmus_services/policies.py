"""The table of permissions (`isthmus.format.permissions`) as Redis ACLs and as policies of object stores.

Only AWS can say «create, never overwrite» in a policy (`s3:if-none-match`). MinIO, Ceph and SeaweedFS have no such
condition. There the program asks for it with every PUT, and only object versioning preserves an object from a client
that does not ask.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isthmus.bus.redis import NAMES
from isthmus.bus.users import BusUser
from isthmus.format.permissions import (
    ALL_STREAMS,
    CREATE,
    DELETE,
    FRAGMENT,
    LIST,
    READ,
    REPLACE,
    RUN,
    Operation,
    Participant,
    grants,
    streams,
)

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of a participant. Only learners, and followers of a series, have names."""

    participant: Participant
    name: str = ""
    checkpoints: bool = True
    """Whether a learner may read other learners' checkpoints, and a follower any checkpoints."""

    @property
    def user(self) -> str:
        """The user name on the bus and in file names."""
        return f"{self.participant}-{self.name}" if self.name else str(self.participant)

    @property
    def access_key(self) -> str:
        """The access key at a store, which other programs may use, too."""
        return f"isthmus-{self.user}"


@dataclass(frozen=True, slots=True)
class Dialect:
    """What the policies of a kind of store can express."""

    conditional: bool
    """Whether a PUT may be granted only with If-None-Match."""
    listing: str
    """The operator that compares a listing's prefix."""
    asks_to_list: bool = False
    """Whether only a user that may list, with the key as prefix or without a prefix, gets a 404 for a missing key."""


AWS = Dialect(conditional=True, listing="StringLikeIfExists", asks_to_list=True)
CEPH = Dialect(conditional=False, listing="StringLikeIfExists", asks_to_list=True)
MINIO = Dialect(conditional=False, listing="StringLike")
"""MinIO has no …IfExists operators. MinIO and SeaweedFS answer 404 for a missing key to any user that may read it."""

ACTIONS: Mapping[Operation, list[str]] = {
    READ: ["s3:GetObject"],
    DELETE: ["s3:DeleteObject"],
    REPLACE: ["s3:PutObject", "s3:AbortMultipartUpload"],
    CREATE: ["s3:PutObject"],
}


def policy(who: Identity, bucket: str, prefix: str, dialect: Dialect, partition: str = "aws") -> Document:
    """Return an identity's policy for the run at `prefix` of a bucket (empty: the bucket is the run)."""
    return {"Version": "2012-10-17", "Statement": statements(who, bucket, prefix, dialect, partition)}


def statements(who: Identity, bucket: str, prefix: str, dialect: Dialect, partition: str = "aws") -> list[Document]:
    """Return the statements of `policy`, each with an id."""
    given = grants(who.participant, who.name, checkpoints=who.checkpoints)
    below = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
    arn = f"arn:{partition}:s3:::{bucket}"

    def keys(operation: Operation, *, large: bool | None = None) -> list[str]:
        found = [p for g in given if g.operation == operation and large in (None, g.large) for p in g.patterns]
        return [below + p.replace(FRAGMENT, 5 * "?").replace(RUN, 16 * "?") for p in dict.fromkeys(found)]

    def allow(sid: str, actions: Sequence[str], of: Sequence[str], condition: Document | None = None) -> None:
        if of:
            resource = [f"{arn}/{key}" for key in of]
            out.append({"Sid": sid, "Effect": "Allow", "Action": list(actions), "Resource": resource})
            if condition:
                out[-1]["Condition"] = condition

    out: list[Document] = []
    allow("Read", ACTIONS[READ], keys(READ))
    listed = keys(LIST) + (keys(READ) if dialect.asks_to_list else [])
    out.append({"Sid": "List", "Effect": "Allow", "Action": ["s3:ListBucket"], "Resource": [arn]})
    out[-1]["Condition"] = {dialect.listing: {"s3:prefix": listed}}
    if dialect.conditional:
        # Copies, and the completion of an upload in parts, are PutObject too: the same condition applies.
        allow("Create", ACTIONS[CREATE], keys(CREATE), {"Null": {"s3:if-none-match": "false"}})
        # Beginning such an upload, and sending its parts, create no object and carry no such header.
        allow("Parts", ACTIONS[REPLACE], keys(CREATE, large=True), {"Bool": {"s3:ObjectCreationOperation": "false"}})
    else:
        allow("Create", ACTIONS[REPLACE], keys(CREATE))
    allow("Replace", ACTIONS[REPLACE], keys(REPLACE))
    allow("Delete", ACTIONS[DELETE], keys(DELETE))
    return out


def ceph_bucket_policy(identities: Sequence[Identity], bucket: str, prefix: str) -> Document:
    """Return one bucket policy for Ceph. Ceph's users must have the identities' access keys as names."""
    return {
        "Version": "2012-10-17",
        "Statement": [
            {**s, "Sid": f"{who.user}.{s['Sid']}", "Principal": {"AWS": [f"arn:aws:iam:::user/{who.access_key}"]}}
            for who in identities
            for s in statements(who, bucket, prefix, CEPH)
        ],
    }


def seaweedfs_identities(
    keys: Mapping[Identity, tuple[str, str]], root: tuple[str, str], bucket: str, prefix: str
) -> Document:
    """Return the file for `weed s3 -config`: each identity with its key and policy, and an administrator.

    `keys`: access keys and their secrets; `root`: the administrator's.
    """
    administrator = {
        "name": "root",
        "credentials": [{"accessKey": root[0], "secretKey": root[1]}],
        "actions": ["Admin", "Read", "List", "Write", "Tagging"],
    }
    return {
        "identities": [
            administrator,
            *(
                {
                    "name": who.user,
                    "credentials": [{"accessKey": name, "secretKey": secret}],
                    "actions": [],
                    "policyNames": [who.access_key],
                }
                for who, (name, secret) in keys.items()
            ),
        ],
        "policies": [
            {"name": who.access_key, "content": json.dumps(policy(who, bucket, prefix, MINIO))} for who in keys
        ],
    }


_COMMANDS = "+hello +auth +ping +info +time +xread +xrevrange"
_LOOKING = "+zrevrangebyscore"
_WRITING = "+xadd"
"""Commands are named one by one: a category such as @stream would let a learner delete and trim."""

_RUN = "isthmus:" + 16 * "?"
"""Prefix of the keys of any run, whose name has 16 digits. `*` would also match a made-up run and stream."""

_NAMING = f"(+zadd %W~{_RUN}:{NAMES})"
"""A participant that writes a stream may enter it in the list of streams, and may do nothing else there."""

_TIDYING = f"(+zremrangebyscore +expire %W~{_RUN}:{NAMES}) (+expire %W~{_RUN}:syncer %W~{_RUN}:learner/*)"
"""Syncers let streams without writes expire. No other participant may set an expiry, not even of its own stream."""


def has_bus(participant: Participant) -> bool:
    """Return whether a participant reads or writes any stream of the bus."""
    return any(streams(participant))


def acl_rules(who: Identity) -> str:
    """Return a Redis 7 user's permissions in the syntax of ACL SETUSER. They hold for every run on the server."""
    read, written = streams(who.participant, who.name)
    # A participant that reads all streams has to find new ones.
    commands = [_COMMANDS, *([_LOOKING] if ALL_STREAMS in read else []), *([_WRITING] if written else [])]
    keys = [f"%R~{_RUN}:{stream}" for stream in read]
    keys += [f"%W~{_RUN}:{stream}" for stream in written]
    # Use selectors: otherwise XADD would be allowed on the list of streams, too.
    more = [_NAMING] if written else []
    more += [_TIDYING] if who.participant == Participant.SYNCER else []
    return " ".join(["resetkeys", "resetchannels", "-@all", *commands, *keys, *more])


def bus_user(who: Identity, password: str) -> BusUser:
    """Return a participant's user of the bus."""
    return BusUser(who.user, hashlib.sha256(password.encode()).hexdigest(), acl_rules(who))


def acl_line(user: BusUser) -> str:
    """Return a user's line in a Redis 7 ACL file."""
    return f"user {user.name} on #{user.digest} {user.rules}"

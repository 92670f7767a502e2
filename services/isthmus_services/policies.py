"""The table of permissions (`isthmus.format.permissions`) in the words of Redis and of object stores.

Only AWS can say «create, never write over» in a policy (`s3:if-none-match`). MinIO, Ceph and SeaweedFS know no such
condition: there the program asks for it with every PUT, and nothing but versions of objects keeps what was there from
somebody who does not.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isthmus.bus.redis import NAMES
from isthmus.format.permissions import (
    ALL_STREAMS,
    CREATE,
    DELETE,
    FRAGMENT,
    LIST,
    READ,
    REPLACE,
    Operation,
    Participant,
    grants,
    streams,
)

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Identity:
    """One participant by name: a learner, or a follower of a series; the others have none."""

    participant: Participant
    name: str = ""
    checkpoints: bool = True
    """Whether a learner may read others' checkpoints, and a follower any."""

    @property
    def user(self) -> str:
        """What it is called, at the bus and in files."""
        return f"{self.participant}-{self.name}" if self.name else str(self.participant)

    @property
    def access_key(self) -> str:
        """What it is called at a store that it may share with others."""
        return f"isthmus-{self.user}"


@dataclass(frozen=True, slots=True)
class Dialect:
    """What a store's policies can say."""

    conditional: bool
    """Whether a PUT may be granted only with If-None-Match."""
    listing: str
    """The operator that compares a listing's prefix."""
    asks_to_list: bool = False
    """Whether 404 of a missing key is told only to who may list, by the key or without any prefix."""


AWS = Dialect(conditional=True, listing="StringLikeIfExists", asks_to_list=True)
CEPH = Dialect(conditional=False, listing="StringLikeIfExists", asks_to_list=True)
MINIO = Dialect(conditional=False, listing="StringLike")
"""MinIO has no operators …IfExists, and says 404 of a missing key to whoever may read it. So does SeaweedFS."""

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
        return [below + p.replace(FRAGMENT, "?????") for p in dict.fromkeys(found)]

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
        # Completions of uploads in parts, and copies, are PutObject too, and judged by the same condition.
        allow("Create", ACTIONS[CREATE], keys(CREATE), {"Null": {"s3:if-none-match": "false"}})
        # Beginning one, and its parts, create no object and carry no such header.
        allow("Parts", ACTIONS[REPLACE], keys(CREATE, large=True), {"Bool": {"s3:ObjectCreationOperation": "false"}})
    else:
        allow("Create", ACTIONS[REPLACE], keys(CREATE))
    allow("Replace", ACTIONS[REPLACE], keys(REPLACE))
    allow("Delete", ACTIONS[DELETE], keys(DELETE))
    return out


def ceph_bucket_policy(identities: Sequence[Identity], bucket: str, prefix: str) -> Document:
    """Return one policy for a bucket of Ceph's, whose users have the names of the identities' access keys."""
    return {
        "Version": "2012-10-17",
        "Statement": [
            {**s, "Sid": f"{who.user}.{s['Sid']}", "Principal": {"AWS": [f"arn:aws:iam:::user/{who.access_key}"]}}
            for who in identities
            for s in statements(who, bucket, prefix, CEPH)
        ],
    }


def seaweedfs_identities(secrets: Mapping[Identity, str], root: tuple[str, str], bucket: str, prefix: str) -> Document:
    """Return what `weed s3 -config` reads: each identity with its key and a policy, and one that may do everything."""
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
                    "credentials": [{"accessKey": who.access_key, "secretKey": secret}],
                    "actions": [],
                    "policyNames": [who.access_key],
                }
                for who, secret in secrets.items()
            ),
        ],
        "policies": [
            {"name": who.access_key, "content": json.dumps(policy(who, bucket, prefix, MINIO))} for who in secrets
        ],
    }


_COMMANDS = "+hello +auth +ping +info +time +xread +xrevrange"
_LOOKING = "+zrevrangebyscore"
_WRITING = "+xadd"
"""Named one by one: a category such as @stream would let a learner delete and trim."""

_RUN = "isthmus:" + 16 * "?"
"""Keys of any run, whose name has 16 digits. `*` would also stand for a run and a stream of somebody's making."""

_NAMING = f"(+zadd %W~{_RUN}:{NAMES})"
"""Who writes a stream says so in the list of streams, and does nothing else there."""

_TIDYING = f"(+zremrangebyscore +expire %W~{_RUN}:{NAMES}) (+expire %W~{_RUN}:syncer %W~{_RUN}:learner/*)"
"""Syncers have the server drop what nobody writes to any more. Nobody else shortens a life, not even its own."""


def has_bus(participant: Participant) -> bool:
    """Return whether it speaks or listens on the bus at all."""
    return any(streams(participant))


def acl_rules(who: Identity) -> str:
    """Return what a user of Redis 7 may, in the words of ACL SETUSER: of every run on the server."""
    read, written = streams(who.participant, who.name)
    # Who listens to all looks for new streams.
    commands = [_COMMANDS, *([_LOOKING] if ALL_STREAMS in read else []), *([_WRITING] if written else [])]
    keys = [f"%R~{_RUN}:{stream}" for stream in read]
    keys += [f"%W~{_RUN}:{stream}" for stream in written]
    # As selectors, or it could make a stream of the list.
    more = [_NAMING] if written else []
    more += [_TIDYING] if who.participant == Participant.SYNCER else []
    return " ".join(["resetkeys", "resetchannels", "-@all", *commands, *keys, *more])


def acl_line(who: Identity, password: str) -> str:
    """Return a user's line in a Redis 7 ACL file, with the digest of its password."""
    return f"user {who.user} on #{hashlib.sha256(password.encode()).hexdigest()} {acl_rules(who)}"

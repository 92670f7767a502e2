"""Who may do what in a run's store and on its bus: one table, from which policies and ACLs are made and proved."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from isthmus.records.keys import EVALUATIONS, LEARNERS, MEMBERS, RUN_KEY, SCRATCH, UPDATES
from isthmus.records.messages import SYNCER_STREAM, learner_stream


class Participant(StrEnum):
    """Who has credentials of its own."""

    OWNER = "owner"  # creates the run and says who may take part
    SYNCER = "syncer"
    LEARNER = "learner"  # one of its own for each
    COLLECTOR = "collector"  # runs `isthmus gc`
    FOLLOWER = "follower"  # follows the global model, and may store what it measured
    READER = "reader"  # status, replay, explain, export


class Operation(StrEnum):
    """What is done to an object."""

    READ = "read"
    LIST = "list"
    CREATE = "create"  # where there is none: If-None-Match
    REPLACE = "replace"
    DELETE = "delete"


READ, LIST, CREATE, REPLACE, DELETE = Operation

LOG = (RUN_KEY, f"{MEMBERS}*", "commits/*", "segments/*", "snapshots/*", "values/*")
"""What everybody reads: the log, and what it published. `*` and `?` match as in IAM: any text, any character."""

_OWN = "updates/?????/{name}/*"
# Five characters are a fragment: with * in their place updates/00003/OTHER/NAME/… would be allowed too.
_CHECKPOINTS = LEARNERS + "{name}/*/checkpoints/*"

TABLE: Mapping[Participant, Mapping[Operation, tuple[str, ...]]] = {
    Participant.OWNER: {
        READ: (*LOG, f"{SCRATCH}*"),
        LIST: ("snapshots/*", f"{SCRATCH}*"),
        CREATE: (RUN_KEY, f"{MEMBERS}*", f"{SCRATCH}*"),
        REPLACE: ("snapshots/*", f"{SCRATCH}*"),
        DELETE: (f"{SCRATCH}*",),
    },
    Participant.SYNCER: {
        READ: (*LOG, f"{UPDATES}*", f"{SCRATCH}*"),
        LIST: ("snapshots/*", f"{SCRATCH}*"),
        CREATE: ("commits/*", f"{SCRATCH}*"),
        # Named by their digests: writing one again writes the same.
        REPLACE: ("values/*", "snapshots/*", f"{SCRATCH}*"),
        DELETE: (f"{SCRATCH}*",),
    },
    Participant.LEARNER: {
        READ: (*LOG, _OWN, LEARNERS + "{name}/*"),
        LIST: ("snapshots/*", _OWN, LEARNERS + "{name}/*"),
        CREATE: (_OWN, LEARNERS + "{name}/*/claim"),
        REPLACE: (_CHECKPOINTS,),
        DELETE: (_CHECKPOINTS,),
    },
    Participant.COLLECTOR: {
        READ: LOG,
        LIST: ("commits/*", "segments/*", "snapshots/*", "values/*", f"{UPDATES}*", f"{LEARNERS}*", f"{SCRATCH}*"),
        CREATE: ("segments/*",),
        # The key of a packed commit keeps standing, with a pointer under it.
        REPLACE: ("commits/*", "segments/*"),
        DELETE: ("snapshots/*", "values/*", f"{UPDATES}*", f"{LEARNERS}*/checkpoints/*", f"{SCRATCH}*"),
    },
    Participant.FOLLOWER: {
        READ: LOG,
        LIST: ("snapshots/*", f"{EVALUATIONS}*"),
        CREATE: (),
        REPLACE: (f"{EVALUATIONS}*",),
        DELETE: (),
    },
    Participant.READER: {
        READ: (*LOG, f"{UPDATES}*", f"{LEARNERS}*", f"{EVALUATIONS}*"),
        LIST: ("snapshots/*", f"{UPDATES}*", f"{LEARNERS}*", f"{EVALUATIONS}*"),
        CREATE: (),
        REPLACE: (),
        DELETE: (),
    },
}
"""Patterns of keys below a run's prefix, with the participant's own name in them."""

DONORS = LEARNERS + "*/checkpoints/*"
"""What a newcomer reads of others to take over their moments. Without it, it warms up."""

STREAMS: Mapping[Participant, str] = {
    Participant.SYNCER: SYNCER_STREAM,
    Participant.LEARNER: learner_stream("{name}"),
}
"""What each writes on the bus; all of them read all streams."""


def allowed(who: Participant, operation: Operation, name: str = "", *, donors: bool = False) -> tuple[str, ...]:
    """Return the patterns of keys on which a participant of this name may do something.

    `donors`: whether a learner may read the checkpoints of others.
    """
    found = tuple(pattern.format(name=name) for pattern in TABLE[who][operation])
    more = who is Participant.LEARNER and donors
    if more and operation is READ:
        return (*found, DONORS)
    return (*found, f"{LEARNERS}*") if more and operation is LIST else found


class Dialect(StrEnum):
    """Whose policies are written."""

    AWS = "aws"
    MINIO = "minio"
    CEPH = "ceph"
    SEAWEEDFS = "seaweedfs"


ENFORCES_CREATE = frozenset({Dialect.AWS})
"""Where a policy can ask for If-None-Match: elsewhere, whoever may create a key may write over it, too."""


@dataclass(frozen=True)
class Place:
    """A bucket and the run's prefix in it, without slashes around it."""

    bucket: str
    prefix: str

    def arn(self, pattern: str = "") -> str:
        """Return a name for keys that match, or the bucket's own."""
        at = "/".join(part for part in (self.bucket, self.prefix if pattern else "", pattern) if part)
        return f"arn:aws:s3:::{at}"

    def key(self, pattern: str) -> str:
        """Return a pattern of keys of the bucket."""
        return f"{self.prefix}/{pattern}" if self.prefix else pattern


def policy(
    who: Participant, name: str, place: Place, dialect: Dialect, *, donors: bool = False, principal: str = ""
) -> dict[str, Any]:
    """Return the policy document of a participant. `principal`: whose, where it is the bucket's (Ceph)."""

    def patterns(operation: Operation) -> list[str]:
        return [place.arn(pattern) for pattern in allowed(who, operation, name, donors=donors)]

    statements: list[dict[str, Any]] = [_statement("Read", ["s3:GetObject"], patterns(READ))]
    # Without ListBucket a GET of a missing key is 403, and probing for the next commit rests on 404. AWS may judge that
    # GET with its key as the prefix: what may be read may be asked for.
    asked = [place.key(p) for o in (READ, LIST) for p in allowed(who, o, name, donors=donors)]
    listing = _statement("List", ["s3:ListBucket"], [place.arn()])
    if (
        dialect is not Dialect.MINIO
    ):  # which answers a GET of a missing key by this alone, and has no prefix for it then
        operator = "StringLikeIfExists" if dialect is Dialect.AWS else "StringLike"
        listing["Condition"] = {operator: {"s3:prefix": sorted(set(asked))}}
    statements.append(listing)
    if create := patterns(CREATE):
        statement = _statement("Create", ["s3:PutObject"], create)
        if dialect in ENFORCES_CREATE:
            statement["Condition"] = {"Null": {"s3:if-none-match": "false"}}
        statements.append(statement)
        large = [p for p in create if f"/{UPDATES}" in f"/{p.partition(':::')[2]}"]
        if large and dialect in ENFORCES_CREATE:
            # Beginning an upload in parts, and its parts, create no object and carry no such header.
            parts = _statement("Parts", ["s3:PutObject", "s3:AbortMultipartUpload"], large)
            parts["Condition"] = {"Bool": {"s3:ObjectCreationOperation": "false"}}
            statements.append(parts)
    if replace := patterns(REPLACE):
        statements.append(_statement("Replace", ["s3:PutObject", "s3:AbortMultipartUpload"], replace))
    if delete := patterns(DELETE):
        statements.append(_statement("Delete", ["s3:DeleteObject"], delete))
    if principal:
        for statement in statements:
            statement["Principal"] = {"AWS": [principal]}
    return {"Version": "2012-10-17", "Statement": statements}


def _statement(sid: str, actions: list[str], resources: list[str]) -> dict[str, Any]:
    return {"Sid": sid, "Effect": "Allow", "Action": actions, "Resource": resources}


_COMMANDS = "+hello +auth +ping +info +time +scan +xread +xrevrange"
_WRITING = "+xadd +expire"
"""Named one by one: a category such as @stream would let a learner delete and trim."""


def redis_rules(stream: str) -> str:
    """Return the rules of a user of Redis 7: it reads every stream of every run and writes only its own, if any."""
    rules = f"resetchannels -@all {_COMMANDS}"
    return f"{rules} {_WRITING} %R~isthmus:* %W~isthmus:*:{stream}" if stream else f"{rules} %R~isthmus:*"

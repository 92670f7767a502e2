"""The table of permissions, put to real servers: what it grants is possible, and nothing else is."""

import json
import re
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import redis as redis_client
from botocore.config import Config
from botocore.exceptions import ClientError

from isthmus import permissions as p
from isthmus.permissions import Dialect, Operation, Participant, Place
from isthmus.records.keys import (
    RUN_KEY,
    checkpoint_key,
    claim_key,
    commit_key,
    evaluation_key,
    members_key,
    segment_key,
    snapshot_key,
    update_key,
    value_key,
)
from isthmus.records.messages import SYNCER_STREAM, learner_stream
from permissions.places import BUCKET, LEARNERS, PREFIX, Servers, servers

ROOT = Path(__file__).parents[2]
DIGEST = bytes(range(32))

KEYS = {
    "run": RUN_KEY,
    "members": members_key(1),
    "commit": commit_key(3, 9),
    "segment": segment_key(3, 1, DIGEST),
    "snapshot": snapshot_key(3, 8, DIGEST),
    "value": value_key(3, 9, DIGEST),
    "update of eu-1": update_key(3, "eu-1", 9, DIGEST),
    "update of us-1": update_key(3, "us-1", 9, DIGEST),
    "claim of eu-1": claim_key("eu-1", 1),
    "claim of us-1": claim_key("us-1", 1),
    "checkpoint of eu-1": checkpoint_key("eu-1", 1, 9, DIGEST),
    "checkpoint of us-1": checkpoint_key("us-1", 1, 9, DIGEST),
    "evaluation": evaluation_key("loss", 9, DIGEST),
    "scratch": "scratch/x",
    # What a pattern with a wildcard too many would let through.
    "update of us-1 that looks like eu-1's": "updates/00003/us-1/eu-1/x",
    "claim of eu-10": claim_key("eu-10", 1),
}

PEOPLE: list[tuple[Participant, str, str]] = [
    (who, who.value, "") for who in Participant if who is not Participant.LEARNER
]
PEOPLE += [(Participant.LEARNER, f"learner-{name}", name) for name in LEARNERS]


def like(pattern: str, text: str) -> bool:
    """Match as IAM does: * and ? stop at nothing."""
    return (
        re.fullmatch("".join({"*": ".*", "?": "."}.get(c, re.escape(c)) for c in pattern), text, re.DOTALL) is not None
    )


def grants(who: Participant, name: str, operation: Operation, key: str) -> bool:
    """Return whether the table does."""
    return any(like(pattern, key) for pattern in p.allowed(who, operation, name))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with servers(tmp_path_factory.mktemp("servers")) as found:
        client(found, "isthmus", (found.folder / "store-password").read_text().strip()).create_bucket(Bucket=BUCKET)
        yield found


def client(place: Servers, user: str, secret: str) -> Any:
    return boto3.client(
        "s3", endpoint_url=place.s3, region_name="us-east-1", aws_access_key_id=user, aws_secret_access_key=secret,
        verify=str(place.authority), config=Config(retries={"max_attempts": 1}),
    )  # fmt: skip


def is_allowed(request: Any, **given: Any) -> bool:
    try:
        request(Bucket=BUCKET, **given)
        return True
    except ClientError as error:
        code = str(error.response["Error"]["Code"])
    assert code in ("AccessDenied", "NoSuchKey", "PreconditionFailed"), code
    return code != "AccessDenied"


@pytest.mark.parametrize(("who", "user", "name"), PEOPLE, ids=[user for _, user, _ in PEOPLE])
def test_the_store_grants_what_the_table_says_and_nothing_else(
    place: Servers, who: Participant, user: str, name: str
) -> None:
    """On SeaweedFS with the generated policies. It cannot ask for If-None-Match: who may create may write over there."""
    operator = client(place, "isthmus", (place.folder / "store-password").read_text().strip())
    own = client(place, user, place.secret(user))
    for what, key in KEYS.items():
        at = f"{PREFIX}/{key}"
        operator.put_object(Bucket=BUCKET, Key=at, Body=b"there")
        may = {operation: grants(who, name, operation, key) for operation in Operation}
        writes = may[Operation.CREATE] or may[Operation.REPLACE]
        assert is_allowed(own.get_object, Key=at) == may[Operation.READ], f"{user} reads {what}"
        assert is_allowed(own.put_object, Key=at, Body=b"over") == writes, f"{user} writes {what}"
        assert is_allowed(own.put_object, Key=at, Body=b"new", IfNoneMatch="*") == writes, f"{user} creates {what}"
        assert is_allowed(own.delete_object, Key=at) == may[Operation.DELETE], f"{user} deletes {what}"
        # What is not there is told to whoever may read it: probing for the next commit rests on that.
        operator.delete_object(Bucket=BUCKET, Key=at)
        if may[Operation.READ]:
            with pytest.raises(ClientError, match="NoSuchKey"):
                own.get_object(Bucket=BUCKET, Key=at)
    for prefix in ("", "commits/", "updates/", "updates/00003/eu-1/", "updates/00003/us-1/", "learners/", "learners/us-1/",
                   "snapshots/00003/", "evaluations/", "scratch/"):  # fmt: skip
        may_list = grants(who, name, Operation.LIST, prefix) or grants(who, name, Operation.READ, prefix)
        found = is_allowed(own.list_objects_v2, Prefix=f"{PREFIX}/{prefix}")
        assert found == (may_list and bool(prefix)), f"{user} lists {prefix or 'everything'}"
    assert not is_allowed(own.list_objects_v2), f"{user} lists the bucket"
    assert not is_allowed(own.get_object, Key="another/run"), f"{user} reads another run"


def holds(conditions: dict[str, Any], context: dict[str, str]) -> bool:
    """Judge conditions as AWS documents them, those that are written here."""
    for operator, keys in conditions.items():
        for key, values in keys.items():
            own = context.get(key)
            listed = values if isinstance(values, list) else [values]
            if operator == "Null":
                good = (own is None) == (listed == ["true"])
            elif operator == "Bool":
                good = own in listed
            else:
                assert operator in ("StringLikeIfExists", "StringLike"), operator
                good = (own is None and operator == "StringLikeIfExists") or any(
                    own is not None and like(value, own) for value in listed
                )
            if not good:
                return False
    return True


def decided(document: dict[str, Any], action: str, resource: str, context: dict[str, str]) -> bool:
    return any(
        action in s["Action"]
        and any(like(r, resource) for r in s["Resource"])
        and holds(s.get("Condition", {}), context)
        for s in document["Statement"]
    )


@pytest.mark.parametrize("dialect", Dialect)
@pytest.mark.parametrize(("who", "user", "name"), PEOPLE, ids=[user for _, user, _ in PEOPLE])
def test_the_policies_of_each_store_decide_as_the_table_says(
    who: Participant, user: str, name: str, dialect: Dialect
) -> None:
    """Decided by the documented rules of policies, not by these stores: SeaweedFS alone is at hand as a server."""
    where = Place(BUCKET, PREFIX)
    document = json.loads(json.dumps(p.policy(who, name, where, dialect)))
    whole = {"s3:ObjectCreationOperation": "true"}
    create_only = dialect in p.ENFORCES_CREATE
    for what, key in KEYS.items():
        may = {operation: grants(who, name, operation, key) for operation in Operation}
        at = where.arn(key)
        assert decided(document, "s3:GetObject", at, {}) == may[Operation.READ], what
        assert decided(document, "s3:DeleteObject", at, {}) == may[Operation.DELETE], what
        created = decided(document, "s3:PutObject", at, whole | {"s3:if-none-match": "*"})
        assert created == (may[Operation.CREATE] or may[Operation.REPLACE]), what
        replaced = decided(document, "s3:PutObject", at, whole)
        assert replaced == (may[Operation.REPLACE] or (may[Operation.CREATE] and not create_only)), what
    assert not decided(document, "s3:PutBucketPolicy", where.arn(), {})
    assert not decided(document, "s3:GetObject", f"arn:aws:s3:::{BUCKET}/another/run", {})


# --- the bus ----------------------------------------------------------------------------------------------------------

USERS = {"syncer": SYNCER_STREAM, "learner-eu-1": learner_stream("eu-1"), "learner-us-1": learner_stream("us-1"),
         "reader": ""}  # fmt: skip


def bus(place: Servers, user: str, password: str) -> "redis_client.Redis":
    port = int(place.redis.rpartition(":")[2])
    return redis_client.Redis(
        host="127.0.0.1", port=port, username=user, password=password, ssl=True, ssl_ca_certs=str(place.authority),
        ssl_min_version=ssl.TLSVersion.TLSv1_2,
    )  # fmt: skip


@pytest.mark.parametrize("user", USERS)
def test_each_user_of_the_bus_writes_its_own_stream_and_reads_all(place: Servers, user: str) -> None:
    own = bus(place, user, place.password(user))
    denied = redis_client.exceptions.NoPermissionError
    for stream in (SYNCER_STREAM, *map(learner_stream, ("eu-1", "us-1", "eu-10", "other"))):
        key = f"isthmus:0123456789abcdef:{stream}"
        if stream == USERS[user]:
            own.xadd(key, {"m": b"x"}, maxlen=10, approximate=True)
            own.expire(key, 60)
        else:
            with pytest.raises(denied):
                own.xadd(key, {"m": b"x"})
            with pytest.raises(denied):
                own.expire(key, 60)
        own.xread({key: "0-0"})
        on_keys: tuple[tuple[str, ...], ...] = (("XDEL", key, "1-1"), ("XTRIM", key, "MAXLEN", "0"), ("DEL", key), ("RENAME", key, key + "x"),
                      ("XSETID", key, "9-9"), ("SET", key, "x"), ("COPY", key, key + "x"))  # fmt: skip
        for words in on_keys:
            with pytest.raises(denied):
                own.execute_command(*words)  # type: ignore[no-untyped-call]
    nothing_else: tuple[tuple[str, ...], ...] = (("FLUSHALL",), ("CONFIG", "GET", "*"), ("CONFIG", "SET", "maxmemory", "1"), ("ACL", "LIST"), ("KEYS", "*"),
                  ("SHUTDOWN", "NOSAVE"), ("CLIENT", "KILL", "TYPE", "normal"), ("EVAL", "1", "0"),
                  ("SUBSCRIBE", "x"), ("MONITOR",), ("REPLICAOF", "NO", "ONE"))  # fmt: skip
    for words in nothing_else:
        with pytest.raises(denied):
            own.execute_command(*words)  # type: ignore[no-untyped-call]
    with pytest.raises(denied):
        own.xread({"somebody:elses": "0-0"})


def test_nobody_comes_in_without_a_password_or_without_tls(place: Servers) -> None:
    with pytest.raises(redis_client.exceptions.AuthenticationError):
        bus(place, "syncer", "wrong").ping()
    port = int(place.redis.rpartition(":")[2])
    with pytest.raises(redis_client.exceptions.ConnectionError):
        redis_client.Redis(host="127.0.0.1", port=port, socket_timeout=5).ping()
    with pytest.raises(redis_client.exceptions.ConnectionError, match=r"(?i)certificate"):
        redis_client.Redis(host="127.0.0.1", port=port, ssl=True).ping()  # an authority that nobody told it of


def test_a_message_larger_than_any_of_ours_is_refused(place: Servers) -> None:
    own = bus(place, "syncer", place.password("syncer"))
    with pytest.raises(redis_client.exceptions.RedisError):
        own.xadd(f"isthmus:0123456789abcdef:{SYNCER_STREAM}", {"m": bytes(2 << 20)})


# --- the table, as people read it -------------------------------------------------------------------------------------


def table() -> str:
    """Return the table as SECURITY.md has it."""
    lines = [
        "| | " + " | ".join(operation.value for operation in Operation) + " | writes on the bus |",
        "|---|---|---|---|---|---|---|",
    ]
    for who in Participant:
        cells = [
            ", ".join(f"`{pattern}`" for pattern in p.allowed(who, operation, "NAME")).replace(
                ", ".join(f"`{pattern}`" for pattern in p.LOG), "the log"
            )
            or "–"
            for operation in Operation
        ]
        stream = p.STREAMS.get(who, "").format(name="NAME")
        lines.append(f"| {who.value} | " + " | ".join(cells) + f" | {f'`{stream}`' if stream else '–'} |")
    return "\n".join(lines)


def test_the_table_in_the_document_is_the_one_in_the_code() -> None:
    assert table() in (ROOT / "SECURITY.md").read_text()

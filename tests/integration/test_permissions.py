"""Real servers allow each identity exactly what the table of permissions grants it.

SeaweedFS reads the identities and policies that `isthmus access` writes, and Redis 7 reads the ACL. Only AWS's policies
can forbid overwriting an object: infra/test_aws.py tests that.
"""

import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import redis as redis_client
from botocore.exceptions import ClientError

from infra import graph
from isthmus.bus import open_bus
from isthmus.doctor import FAILURE, OK, WARNING, Finding, Role, RoleKind, examine_bus, examine_open_store
from isthmus.errors import Denied, ObjectMissing
from isthmus.runtime.clock import single_threaded
from isthmus.store import EdgeStore, open_store
from isthmus_services.commands import access
from isthmus_services.main import main
from isthmus_services.servers import free_ports, redis_server
from support.permission_cases import (
    ALL,
    COLLECTOR,
    HEARS,
    IDENTITIES,
    KEYS,
    LEARNERS,
    LISTS,
    OWNER,
    READER,
    SERIES,
    SPEAKS,
    STREAMS,
    SYNCER,
)
from support.permitted import Store, seaweedfs_of

BUCKET, PREFIX = "permitted", "team/run"


def made(folder: Path, *more: str) -> Path:
    """Run `isthmus access` for all identities of the cases."""
    names = [word for name in LEARNERS for word in ("--learner", name)]
    assert main(["access", str(folder), "--run", f"s3://{BUCKET}/{PREFIX}", *names, "--series", SERIES, *more]) == 0
    return folder


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    place = tmp_path_factory.mktemp("permitted")
    with seaweedfs_of(place, made(place / "access"), BUCKET) as store:
        yield store


@asynccontextmanager
async def opened(
    store: Store, users: Collection[str], scheme: str = "s3", prefix: str = PREFIX
) -> AsyncIterator[dict[str, EdgeStore]]:
    """Open the store as each user. Credentials are read when a store is opened."""
    async with AsyncExitStack() as stack:
        found = {}
        for user in users:
            with pytest.MonkeyPatch.context() as patch:
                for name in [n for n in os.environ if n.startswith("AWS_")]:
                    patch.delenv(name)
                for name, value in store.environment(user).items():
                    patch.setenv(name, value)
                runtime = single_threaded(0)
                found[user] = await stack.enter_async_context(open_store(f"{scheme}://{BUCKET}/{prefix}", runtime))
        yield found


async def allowed(request: Awaitable[object]) -> bool:
    try:
        await request
    except Denied:
        return False
    except ObjectMissing:
        return True
    return True


@pytest.mark.parametrize("scheme", ["s3", "s3+aiobotocore"])
async def test_each_identity_does_what_it_may_and_nothing_else(store: Store, scheme: str) -> None:
    async with opened(store, ALL, scheme) as stores:

        async def who(request: Callable[[EdgeStore], Awaitable[object]]) -> set[str]:
            return {user for user, opened in stores.items() if await allowed(request(opened))}

        with contextlib.closing(store.client()) as administrator:
            for key, expected in KEYS.items():
                at = {"Bucket": BUCKET, "Key": f"{PREFIX}/{key}"}
                # Without a condition in the policy, users that may create an object may also overwrite it.
                writers = {*expected.create, *expected.replace}
                assert await who(lambda s, key=key: s.get(key)) == set(expected.read), key  # type: ignore[misc]
                administrator.put_object(**at, Body=b"x")
                assert await who(lambda s, key=key: s.get(key)) == set(expected.read), key  # type: ignore[misc]
                assert await who(lambda s, key=key: s.put(key, b"x")) == writers, key  # type: ignore[misc]
                assert await who(lambda s, key=key: s.delete(key)) == set(expected.delete), key  # type: ignore[misc]
                administrator.delete_object(**at)
                assert await who(lambda s, key=key: s.create(key, b"x")) == writers, key  # type: ignore[misc]
                administrator.delete_object(**at)
            for prefix, listers in LISTS.items():
                assert await who(lambda s, prefix=prefix: s.list(prefix)) == set(listers), prefix  # type: ignore[misc]


def refusal(request: Callable[..., Any], **given: Any) -> str:
    """Return the code of the error that a request ends with, or an empty string."""
    try:
        request(**given)
    except ClientError as error:
        return str(error.response["Error"]["Code"])
    return ""


def test_no_other_way_leads_there(store: Store) -> None:
    """Copies, multipart uploads, bulk deletions, versions, tags, and settings of the bucket are denied as well."""
    mine, theirs = (f"{PREFIX}/updates/00003/{name}/x" for name in LEARNERS)
    bucket = {"Bucket": BUCKET}
    with contextlib.closing(store.client()) as administrator, contextlib.closing(store.client("learner-eu-1")) as s3:
        administrator.put_object(**bucket, Key=theirs, Body=b"theirs")
        refused: tuple[tuple[Callable[..., Any], dict[str, Any]], ...] = (
            (s3.copy_object, {"Key": theirs, "CopySource": f"{BUCKET}/{mine}"}),
            (s3.copy_object, {"Key": mine, "CopySource": f"{BUCKET}/{theirs}"}),  # to read by copying
            (s3.create_multipart_upload, {"Key": theirs}),
            (s3.list_object_versions, {"Prefix": theirs}),
            (s3.list_multipart_uploads, {}),
            (s3.put_object_tagging, {"Key": theirs, "Tagging": {"TagSet": []}}),
            (s3.put_object_acl, {"Key": theirs, "ACL": "public-read"}),
            (s3.list_objects, {}),
            (s3.list_objects_v2, {}),
            (s3.put_bucket_policy, {"Policy": "{}"}),
            (s3.get_bucket_policy, {}),
            (s3.put_bucket_versioning, {"VersioningConfiguration": {"Status": "Suspended"}}),
            (s3.delete_bucket, {}),
        )
        for request, given in refused:
            assert refusal(request, **bucket, **given) == "AccessDenied", (request, given)
        many = s3.delete_objects(**bucket, Delete={"Objects": [{"Key": theirs}]})
        assert [e["Code"] for e in many["Errors"]] == ["AccessDenied"]
        assert administrator.get_object(**bucket, Key=theirs)["Body"].read() == b"theirs"
        administrator.delete_object(**bucket, Key=theirs)


async def test_nothing_outside_the_run_is_open_to_anyone(store: Store) -> None:
    async with opened(store, ALL, prefix="team") as stores:
        for user, s in stores.items():
            for key in ("x", "run2/run", "run2/updates/00003/eu-1/x", "run2/scratch/x"):
                for request in (s.put(key, b"x"), s.get(key), s.delete(key), s.create(key, b"x")):
                    assert not await allowed(request), (user, key)
            for prefix in ("", "run2/", "run2/scratch/"):
                assert not await allowed(s.list(prefix)), (user, prefix)


async def test_a_strict_learner_has_no_donors(tmp_path: Path) -> None:
    theirs = next(key for key in KEYS if key.startswith("learners/us-1/") and "/parts/" in key)
    with seaweedfs_of(tmp_path, made(tmp_path / "access", "--strict"), BUCKET) as store:
        async with opened(store, ("learner-eu-1", "learner-us-1")) as stores:
            assert not await allowed(stores["learner-eu-1"].get(theirs))
            assert not await allowed(stores["learner-eu-1"].list("learners/"))
            assert await allowed(stores["learner-eu-1"].list("learners/eu-1/"))
            assert await allowed(stores["learner-us-1"].get(theirs))


# --- what the doctor says ---------------------------------------------------------------------------------------------


def role_of(user: str) -> Role:
    who = IDENTITIES[user]
    return Role(RoleKind(who.participant), who.name, who.name)


async def findings(store: Store, user: str, role: Role) -> dict[str, Finding]:
    """Return what `isthmus doctor --role …` finds in the store with a user's credentials."""
    async with opened(store, [user]) as stores:
        with pytest.MonkeyPatch.context() as patch:  # the doctor opens its own clients
            for name, value in store.environment(user).items():
                patch.setenv(name, value)
            given = examine_open_store(stores[user], role, stores[user].runtime, 1 << 12)
            return {f.check: f async for f in given if isinstance(f, Finding)}


def failures(found: Mapping[str, Finding]) -> dict[str, str]:
    """Return what failed, but for the run, which these tests do not create."""
    return {check: f.said for check, f in found.items() if f.outcome == FAILURE and check != "store: run"}


@pytest.mark.parametrize("user", sorted(ALL))
async def test_the_doctor_finds_each_identity_as_it_should_be(store: Store, user: str) -> None:
    found = await findings(store, user, role_of(user))
    assert failures(found) == {}
    assert {"store: may read", "store: may list below", "store: must not read", "store: must not delete"} <= set(found)
    if role_of(user).place:
        assert found["store: must not create"].outcome == OK
    over = found.get("store: must not write over")
    creates = {who for expected in KEYS.values() for who in expected.create} & {user}
    # SeaweedFS's policies cannot forbid overwriting, so the doctor warns each user that may create objects, and has a
    # place to try it.
    assert (over.outcome if over else None) == (WARNING if creates and role_of(user).place else None)
    with contextlib.closing(store.client()) as administrator:
        assert administrator.list_objects_v2(Bucket=BUCKET).get("Contents", []) == [], "nothing is left behind"


@pytest.mark.parametrize(
    ("user", "pretends", "expected"),
    [
        pytest.param(
            COLLECTOR, "learner-us-1", {"store: may write", "store: must not read"}, marks=pytest.mark.tier("all")
        ),
        ("learner-eu-1", "learner-us-1", {"store: may list", "store: may write", "store: may read"}),
        (READER, "learner-us-1", {"store: may write"}),
        (SYNCER, OWNER, {"store: must not create", "store: must not read"}),
        (COLLECTOR, SYNCER, {"store: may read", "store: must not create", "store: must not delete"}),
    ],
)
async def test_the_doctor_finds_what_is_missing_and_what_is_too_much(
    store: Store, user: str, pretends: str, expected: set[str]
) -> None:
    assert set(failures(await findings(store, user, role_of(pretends)))) >= expected


async def test_the_doctor_finds_an_administrator_out(store: Store) -> None:
    root = store.folder / "root"
    root.mkdir(exist_ok=True)
    user, password = (store.folder / access.ROOT_USER).read_text(), (store.folder / access.ROOT_PASSWORD).read_text()
    (root / access.CREDENTIALS).write_text(
        f"[default]\naws_access_key_id = {user.strip()}\naws_secret_access_key = {password.strip()}\n"
    )
    found = await findings(store, "root", role_of("learner-eu-1"))
    wrong = {f"store: must not {what}" for what in ("read", "list", "delete", "create")}
    assert set(failures(found)) == wrong
    with contextlib.closing(store.client()) as administrator:
        assert administrator.list_objects_v2(Bucket=BUCKET).get("Contents", []) == [], "nothing is left behind"


# --- the bus ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """A Redis 7 with the ACL file: a function that returns a user's URL, password included."""
    binary = graph.redis_7()
    place = tmp_path_factory.mktemp("bus")
    folder = made(place / "access")
    arguments = ("--aclfile", str(folder / access.ACL_FILE), "--maxmemory", "64mb")
    port = free_ports(1)[0]
    with redis_server(place, port=port, binary=binary, settings=folder / access.SETTINGS_FILE, arguments=arguments):
        yield (
            lambda user: f"redis://{user}:{(folder / user / access.BUS_PASSWORD).read_text().strip()}@127.0.0.1:{port}"
        )


async def test_each_user_hears_and_speaks_what_it_may(bus: Callable[[str], str]) -> None:
    async with open_bus(bus(SYNCER), bytes(32), None) as syncer:
        await syncer.append("syncer", b"first")
    for user in ("learner-eu-1", "learner-us-1"):
        async with open_bus(bus(user), bytes(32), None) as own:
            await own.append(f"learner/{user.removeprefix('learner-')}", b"first")
    for user in HEARS:
        async with open_bus(bus(user), bytes(32), None) as opened:
            heard = {stream for stream in STREAMS if await allowed(opened.read({stream: ""}, 0.0))}
            assert heard == set(HEARS[user]), user
            assert {s for s in STREAMS if await allowed(opened.tail(s))} == set(HEARS[user]), user
            assert {s for s in STREAMS if await allowed(opened.append(s, b"x"))} == set(SPEAKS[user]), user
            assert await allowed(opened.names()) == (user in (SYNCER, READER)), user


async def test_many_streams_are_not_read_where_one_of_them_may_not_be(bus: Callable[[str], str]) -> None:
    async with open_bus(bus("learner-eu-1"), bytes(32), None) as opened:
        with pytest.raises(Denied):
            await opened.read({"syncer": "", "learner/us-1": ""}, 0.0)


@pytest.mark.parametrize("user", sorted(ALL))
async def test_the_doctor_finds_each_user_of_the_bus_as_it_should_be(bus: Callable[[str], str], user: str) -> None:
    role = role_of(user)
    url = bus(user) if user in HEARS else ""
    found = {f.check: f async for f in examine_bus(url, bytes(32), role, single_threaded())}
    assert failures(found) == {}
    assert ("does not use the bus" in found["bus: access"].said) == (user not in HEARS)
    if user in HEARS:
        for check in ("bus: TLS", "bus: value size", "bus: must not administer", "bus: must not write for others"):
            assert found[check].outcome == OK, found[check]
        assert ("bus: must not hear others" in found) == (user not in (SYNCER, READER))


@pytest.mark.parametrize(
    ("user", "pretends", "expected"),
    [
        (SYNCER, "learner-eu-1", {"bus: streams", "bus: must not write for others"}),
        ("learner-us-1", "learner-eu-1", {"bus: access"}),
        ("learner-us-1", SYNCER, {"bus: access"}),
        (READER, SYNCER, {"bus: streams"}),
        (SYNCER, READER, {"bus: must not write for others"}),
    ],
)
async def test_the_doctor_finds_the_wrong_user_of_the_bus(
    bus: Callable[[str], str], user: str, pretends: str, expected: set[str]
) -> None:
    found = {f.check: f async for f in examine_bus(bus(user), bytes(32), role_of(pretends), single_threaded())}
    assert set(failures(found)) == expected


RUN = 16 * "0"


def test_a_learner_makes_no_stream_beside_its_own(bus: Callable[[str], str]) -> None:
    """With `*` in its pattern, the ACL would also allow `isthmus:RUN:x:learner/us-1`, which is not us-1's stream."""
    own, beside = (
        f"isthmus:{RUN}:learner/us-1",
        (
            f"isthmus:{RUN}:learner/1:learner/us-1",
            f"isthmus:{RUN}:{RUN}:learner/us-1",
            "isthmus:0:learner/us-1",
            f"isthmus:{RUN}:learner/us-12",
            f"isthmus:{RUN}:learner/eu-1",
        ),
    )
    with contextlib.closing(redis_client.Redis.from_url(bus("learner-us-1"))) as client:
        client.xadd(own, {"m": b"x"})
        for key in beside:
            with pytest.raises(redis_client.exceptions.NoPermissionError):
                client.xadd(key, {"m": b"x"})
        for command in (("EXPIRE", own, "1"), ("PEXPIRE", own, "1"), ("XTRIM", own, "MAXLEN", "0"), ("DEL", own)):
            with pytest.raises(redis_client.exceptions.NoPermissionError):
                cast(Any, client).execute_command(*command)
    with contextlib.closing(redis_client.Redis.from_url(bus(SYNCER))) as client:
        assert client.expire(own, 1000)
        assert client.expire(f"isthmus:{RUN}:syncer", 1000) in (True, False)


def test_nobody_comes_in_without_a_password_or_does_what_is_not_granted(bus: Callable[[str], str]) -> None:
    refused = (
        *(("FLUSHALL",), ("CONFIG", "GET", "*"), ("CONFIG", "SET", "maxmemory", "0"), ("KEYS", "*"), ("ACL", "LIST")),
        *(("SHUTDOWN",), ("MONITOR",), ("SAVE",), ("CLIENT", "KILL", "TYPE", "normal")),
        *(
            ("XTRIM", f"isthmus:{RUN}:syncer", "MAXLEN", "0"),
            ("XDEL", f"isthmus:{RUN}:syncer", "0-1"),
            ("GET", "other"),
        ),
        *(
            ("DEL", f"isthmus:{RUN}:syncer"),
            ("UNLINK", f"isthmus:{RUN}:syncer"),
            ("RENAME", f"isthmus:{RUN}:syncer", "x"),
        ),
        *(
            ("XREAD", "STREAMS", "other:stream", "0"),
            ("XADD", "other:stream", "*", "m", "x"),
            ("EVAL", "return 1", "0"),
        ),
        *(
            ("XADD", f"isthmus:{RUN}:names", "*", "m", "x"),
            ("DEL", f"isthmus:{RUN}:names"),
            ("ZRANGE", f"isthmus:{RUN}:names", "0", "-1"),
            ("ZREMRANGEBYSCORE", f"isthmus:{RUN}:names", "-inf", "+inf"),
        ),
        *(
            ("SCAN", "0"),
            ("KEYS", "isthmus:*"),
            ("ZADD", f"isthmus:{RUN}:syncer", "1", "x"),
            ("ZADD", "other", "1", "x"),
        ),
        *(("SUBSCRIBE", "x"), ("PUBLISH", "x", "y"), ("SET", f"isthmus:{RUN}:syncer", "x"), ("SELECT", "1")),
    )
    for user in HEARS:
        with contextlib.closing(redis_client.Redis.from_url(bus(user))) as client:
            for command in refused:
                if command[0] == "ZREMRANGEBYSCORE" and user == SYNCER:
                    continue  # a syncer removes outdated names
                with pytest.raises(redis_client.exceptions.NoPermissionError):
                    cast(Any, client).execute_command(*command)
    for stranger in ("default", "owner", "collector", f"follower-{SERIES}"):
        url = bus(READER).replace("//reader:", f"//{stranger}:")
        assert not comes_in(url), stranger
    assert not comes_in(bus(READER).replace("reader:", "reader:x"))
    assert comes_in(bus(READER))
    assert set(IDENTITIES) > set(HEARS)


def comes_in(url: str) -> bool:
    with contextlib.closing(redis_client.Redis.from_url(url)) as client:
        try:
            return bool(client.ping())
        except redis_client.exceptions.AuthenticationError:
            return False

"""Users that `isthmus create` makes at a store with AWS's API for them: SeaweedFS, and moto's imitation of AWS."""

from pathlib import Path

import boto3
import pytest

from isthmus.agent.ports import known_run, open_place
from isthmus.errors import BucketMissing, Denied, InputError, Unavailable
from isthmus.format.permissions import Participant
from isthmus.runtime.clock import threaded
from isthmus.store.users import AccessKey, open_users
from isthmus_services.policies import MINIO, Identity, policy
from isthmus_services.servers import Server

URL = "s3://bucket-of-users/run"
WIDE, NARROW = (
    policy(Identity(Participant.LEARNER, "a", wide), "bucket-of-users", "run", MINIO) for wide in (True, False)
)


@pytest.fixture(params=["seaweedfs", "moto"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Server:
    server: Server = request.getfixturevalue(request.param)
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return server


async def ensure(name: str, document: dict[str, object], known: str = "") -> AccessKey | None:
    with threaded(2) as runtime:
        async with open_users(URL, runtime) as users:
            return await users.ensure(name, document, known)


async def test_a_user_is_made_once_and_a_lost_key_is_replaced(store: Server) -> None:
    client = boto3.Session().client("iam", endpoint_url=store.url, region_name="us-east-1")
    made = await ensure("user-1", WIDE)
    assert made is not None
    assert await ensure("user-1", WIDE, made.id) is None, "it has the key"
    again = await ensure("user-1", WIDE)
    assert again is not None
    listed = client.list_access_keys(UserName="user-1")["AccessKeyMetadata"]
    assert [key["AccessKeyId"] for key in listed] == [again.id], "the key whose secret was lost is gone"


async def test_a_policy_that_differs_is_replaced_and_another_stays(store: Server) -> None:
    client = boto3.Session().client("iam", endpoint_url=store.url, region_name="us-east-1")

    def in_force() -> tuple[str, str]:
        arn = client.list_attached_user_policies(UserName="user-2")["AttachedPolicies"][0]["PolicyArn"]
        version = client.get_policy(PolicyArn=arn)["Policy"]["DefaultVersionId"]
        return version, str(client.get_policy_version(PolicyArn=arn, VersionId=version)["PolicyVersion"]["Document"])

    key = await ensure("user-2", WIDE)
    assert key is not None
    first = in_force()
    assert "learners/*/checkpoints" in first[1]
    await ensure("user-2", WIDE, key.id)
    assert in_force() == first
    await ensure("user-2", NARROW, key.id)
    assert "learners/*/checkpoints" not in in_force()[1]


async def test_a_removed_user_is_gone_with_its_key_and_policy_and_removing_it_again_does_nothing(store: Server) -> None:
    client = boto3.Session().client("iam", endpoint_url=store.url, region_name="us-east-1")
    for name in ("removed-1", "removed-2"):
        key = await ensure(name, WIDE)
        assert key is not None
        await ensure(name, NARROW, key.id)  # AWS deletes no policy that has more than one version
    arn = client.list_attached_user_policies(UserName="removed-1")["AttachedPolicies"][0]["PolicyArn"]
    with threaded(2) as runtime:
        async with open_users(URL, runtime) as users:
            assert await users.named("removed-") == ["removed-1", "removed-2"]
            assert [await users.remove("removed-1") for _ in range(2)] == [True, False]
            assert await users.named("removed-") == ["removed-2"]
    with pytest.raises(client.exceptions.NoSuchEntityException):
        client.get_policy(PolicyArn=arn)
    assert await ensure("removed-1", WIDE) is not None, "the name is free again"


async def test_a_bucket_is_created_in_a_region_of_its_own(moto: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """AWS refuses a bucket without the name of its region, in every region but the first."""
    for name, value in {**moto.environment, "AWS_REGION": "eu-west-1"}.items():
        monkeypatch.setenv(name, value)
    async with open_place("s3://bucket-in-europe/run", make=True):
        pass
    client = boto3.Session().client("s3", endpoint_url=moto.url, region_name="eu-west-1")
    assert client.get_bucket_location(Bucket="bucket-in-europe")["LocationConstraint"] == "eu-west-1"


@pytest.mark.parametrize("client", ["s3", "s3+aiobotocore"])
@pytest.mark.parametrize(
    ("key", "secret", "says"),
    [
        (
            "nobody",
            "not-a-secret",
            "not known there .*the access key nobody of {origin}: .*use an access key that exists",
        ),
        (
            None,
            "not-a-secret",
            "secret key does not fit .*the access key {key} of {origin}: correct the secret key there$",
        ),
    ],
)
@pytest.mark.parametrize("source", ["variable", "file"])
async def test_refused_credentials_are_named_with_their_source(
    client: str, key: str | None, secret: str, says: str, source: str, seaweedfs: Server, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name, value in seaweedfs.environment.items():
        monkeypatch.setenv(name, value)
    key = key or seaweedfs.environment["AWS_ACCESS_KEY_ID"]
    file, origin = tmp_path / "credentials", "AWS_ACCESS_KEY_ID"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    if source == "file":
        file.write_text(f"[team]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
        monkeypatch.setenv("AWS_PROFILE", "team")
        origin = f"{file}, profile team"
    async with open_place(f"{client}://bucket-of-users/run") as store:
        with pytest.raises((Denied, Unavailable), match=says.format(key=key, origin=origin)) as refused:
            await known_run(store)
    assert secret not in str(refused.value)
    monkeypatch.setenv("AWS_PROFILE", "nope")
    with pytest.raises(InputError, match=f"no AWS profile nope: {file} .*have (team|no profiles): set AWS_PROFILE"):
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
        monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
        async with open_place(f"{client}://bucket-of-users/run"):
            pass


async def test_a_run_that_this_user_may_not_read_says_what_to_check(
    seaweedfs: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in seaweedfs.environment.items():
        monkeypatch.setenv(name, value)
    async with open_place(URL, make=True):
        pass
    key = await ensure("user-3", WIDE)
    assert key is not None
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key.id)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key.secret)
    async with open_place("s3://bucket-of-users/rum") as store:
        with pytest.raises(Denied, match=r"check the run's address, and whose credentials these are$") as refused:
            await known_run(store)
    assert not isinstance(refused.value, BucketMissing)

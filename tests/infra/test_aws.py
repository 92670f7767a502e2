"""The CloudFormation templates deploy into moto, and the real program works with exactly the rights that they give.

What moto 5.2 lacks, and how these tests make up for it:

- Its CloudFormation creates a bucket with its encryption only, and knows neither bucket policies nor Secrets Manager
  nor ElastiCache. The tests set the bucket's other properties with the requests that CloudFormation would send, and
  judge the bucket policy as it is written. redis.yaml, and the bus in learner.yaml, are linted but not deployed. Their
  access strings run on a real Redis, without what needs 7.0 and 7.2 (read-only or write-only keys, CLIENT SETINFO).
- Its IAM ignores conditions and does not know `?`. moto authenticates every request and tells its action, its resource
  and the policies of the caller's role. `allows` below makes the decision; it knows conditions and `?`.
- A GET of a missing key is answered with 404 for every caller. On S3 this depends on ListBucket, so the tests check the
  decision on ListBucket instead.
"""

import asyncio
import json
import re
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

import boto3
import pytest
import redis as redis_client
from botocore.exceptions import ClientError
from cfnlint.api import lint_file
from cfnlint.decode import cfn_yaml
from moto.core.authorization import enable_iam_authentication
from moto.iam.access_control import IAMPolicy, IAMRequestBase

from isthmus.bus import open_bus
from isthmus.doctor import FAILURE, Finding, Role, RoleKind, examine_open_store
from isthmus.errors import Denied, ObjectMissing
from isthmus.format.permissions import READ, Participant, may
from isthmus.format.records.keys import RUN_KEY, claim_key, commit_key, update_key
from isthmus.format.records.messages import SYNCER_STREAM, learner_stream
from isthmus.log import Log, gc
from isthmus.log.creation import create_run
from isthmus.runtime.clock import Runtime, single_threaded
from isthmus.store import EdgeStore, open_store, require_create_only
from isthmus_services.policies import AWS as AWS_WORDS
from isthmus_services.policies import Identity, acl_rules, policy
from isthmus_services.servers import Server
from support.permission_cases import (
    COLLECTOR,
    DIGEST,
    EU,
    FOLLOWER,
    IDENTITIES,
    KEYS,
    LISTS,
    OWNER,
    READER,
    SYNCER,
    US,
)
from support.world import World, check_log, seed_of, serving, train

# moto warns of each resource that it leaves out. As an error in its server's thread, this would fail a request.
pytestmark = pytest.mark.filterwarnings("ignore:Tried to parse AWS:UserWarning")

AWS = Path(__file__).parents[2] / "infra" / "aws"
PREFIX = "team/run"
STRICT, ADMINISTRATOR = "learner-lab-1", "administrator"

OpenAll = Callable[..., Awaitable[dict[str, EdgeStore]]]
"""Opens the store in each role, below a prefix."""


@pytest.mark.parametrize("name", ["isthmus", "learner", "redis"])
def test_cfn_lint_finds_nothing(name: str) -> None:
    assert lint_file(AWS / f"{name}.yaml") == []


# --- what a policy says -----------------------------------------------------------------------------------------------


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def like(pattern: str, text: str) -> bool:
    """Return whether a pattern matches as in IAM, where `*` and `?` match any character."""
    expression = "".join({"*": ".*", "?": "."}.get(c, re.escape(c)) for c in pattern)
    return re.fullmatch(expression, text, re.DOTALL) is not None


# Whether a condition holds, given the values that it lists and the request's value (None if it has none).
OPERATORS: dict[str, Callable[[list[str], str | None], bool]] = {
    "Bool": lambda values, own: own in values,
    "Null": lambda values, own: (own is None) == (values == ["true"]),
    "StringLikeIfExists": lambda values, own: own is None or any(like(v, own) for v in values),
}


def allows(documents: Sequence[Mapping[str, Any]], action: str, resource: str, context: Mapping[str, str]) -> bool:
    """Return whether a request is allowed: an Allow applies to it, and no Deny does."""
    effects = {
        statement["Effect"]
        for document in documents
        for statement in listed(document["Statement"])
        if any(like(a, action) for a in listed(statement["Action"]))
        and any(like(r, resource) for r in listed(statement["Resource"]))
        and all(
            OPERATORS[operator](listed(values), context.get(key))
            for operator, keys in statement.get("Condition", {}).items()
            for key, values in keys.items()
        )
    }
    return effects == {"Allow"}


def judge(request: IAMRequestBase, resource: str) -> None:
    """Decide a request in place of moto."""
    documents = [IAMPolicy(policy)._policy_json for policy in request._access_key.collect_policies()]
    context = {f"s3:{key}": values[0] for key, values in parse_qs(urlsplit(request._path).query).items()}
    if "If-None-Match" in request._headers:
        context["s3:if-none-match"] = request._headers["If-None-Match"]
    # Neither the beginning of a multipart upload nor a part creates an object. AWS says so in this key.
    query = parse_qs(urlsplit(request._path).query, keep_blank_values=True)
    context["s3:ObjectCreationOperation"] = "false" if {"uploads", "partNumber"} & query.keys() else "true"
    if not allows(documents, request._action, resource, context):
        request._raise_access_denied()


# --- the stacks -------------------------------------------------------------------------------------------------------


class Cloud:
    """The stacks of one run in moto, each role's credentials, and the bucket."""

    def __init__(self, url: str, opened: ExitStack) -> None:
        self.url = url
        self._opened = opened
        self._clients: dict[str, Any] = {}
        self._tag = uuid.uuid4().hex[:8]
        self.run = self.deploy("isthmus", Prefix=PREFIX)
        self.bucket, self.arn = self.run["Bucket"], self.run["BucketArn"]
        self.roles = {user: self.run[f"{user.capitalize()}RoleArn"] for user in (OWNER, SYNCER, COLLECTOR, READER)}
        for name, strict in ((EU, "false"), (US, "false"), (STRICT, "true")):
            learner = name.removeprefix("learner-")
            given = {"LearnerName": learner, "Bucket": self.bucket, "Prefix": self.run["Prefix"], "Strict": strict}
            self.roles[name] = self.deploy("learner", f"-{learner}", **given)["RoleArn"]
        self.roles[FOLLOWER] = self._role(FOLLOWER, policy(IDENTITIES[FOLLOWER], self.bucket, PREFIX, AWS_WORDS))
        everything = {"Effect": "Allow", "Action": "s3:*", "Resource": "*"}
        self.administrator = self._role("administrator", {"Version": "2012-10-17", "Statement": [everything]})

    def _role(self, user: str, document: Mapping[str, Any]) -> str:
        """Create a role with a policy that is in no template; return its ARN."""
        iam, name = self.client("iam"), f"{user}-{self._tag}"
        arn: str = iam.create_role(RoleName=name, AssumeRolePolicyDocument="{}")["Role"]["Arn"]
        made = iam.create_policy(PolicyName=name, PolicyDocument=json.dumps(document))["Policy"]["Arn"]
        iam.attach_role_policy(RoleName=name, PolicyArn=made)
        return arn

    def client(self, service: str) -> Any:
        """Return an administrator's client."""
        if service not in self._clients:
            client = boto3.client(
                service,
                endpoint_url=self.url,
                region_name="us-east-1",
                aws_access_key_id="test",
                aws_secret_access_key="test",
            )
            self._clients[service] = self._opened.enter_context(closing(client))
        return self._clients[service]

    def deploy(self, template: str, suffix: str = "", **parameters: str) -> dict[str, str]:
        """Create a stack; return its outputs."""
        name, cloud = f"{template}-{self._tag}{suffix}", self.client("cloudformation")
        cloud.create_stack(
            StackName=name,
            TemplateBody=(AWS / f"{template}.yaml").read_text(),
            Parameters=[{"ParameterKey": k, "ParameterValue": v} for k, v in parameters.items()],
            Capabilities=["CAPABILITY_IAM"],
        )
        (stack,) = cloud.describe_stacks(StackName=name)["Stacks"]
        assert stack["StackStatus"] == "CREATE_COMPLETE"
        return {out["OutputKey"]: out["OutputValue"] for out in stack["Outputs"]}

    def credentials(self, who: str) -> dict[str, str]:
        """Return the environment variables of a process in this role."""
        arn = self.roles.get(who, self.administrator)
        given = self.client("sts").assume_role(RoleArn=arn, RoleSessionName="test")["Credentials"]
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": given["AccessKeyId"],
            "AWS_SECRET_ACCESS_KEY": given["SecretAccessKey"],
            "AWS_SESSION_TOKEN": given["SessionToken"],
        }

    def documents(self, who: str) -> list[Mapping[str, Any]]:
        """Return the policies of a role, as deployed."""
        iam = self.client("iam")
        attached = iam.list_attached_role_policies(RoleName=self.roles[who].rsplit("/", 1)[1])["AttachedPolicies"]
        return [
            iam.get_policy_version(PolicyArn=p["PolicyArn"], VersionId="v1")["PolicyVersion"]["Document"]
            for p in attached
        ]


@pytest.fixture(scope="module")
def cloud(moto: Server) -> Iterator[Cloud]:
    with ExitStack() as opened:
        yield Cloud(moto.url, opened)


@pytest.fixture
def environments(cloud: Cloud) -> dict[str, dict[str, str]]:
    """The environment variables of a process in each role."""
    return {who: cloud.credentials(who) for who in (*cloud.roles, ADMINISTRATOR)}


@pytest.fixture
def stores(
    cloud: Cloud,
    environments: dict[str, dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
    use: Callable[[Server], None],
) -> Iterator[OpenAll]:
    """Open the run's store once for each role, while moto authenticates and `allows` decides."""
    monkeypatch.setattr(IAMRequestBase, "check_action_permitted", judge)

    async def open_all(stack: AsyncExitStack, prefix: str = PREFIX, scheme: str = "s3") -> dict[str, EdgeStore]:
        opened: dict[str, EdgeStore] = {}
        for who, environment in environments.items():
            # Credentials are read when a store is opened.
            use(cast(Server, SimpleNamespace(environment=environment)))
            opened[who] = await stack.enter_async_context(
                open_store(f"{scheme}://{cloud.bucket}/{prefix}", single_threaded(0))
            )
        return opened

    with enable_iam_authentication():
        yield open_all


def resolved(node: Any, cloud: Cloud) -> Any:
    """Replace references to the bucket."""
    if isinstance(node, dict):
        if node == {"Ref": "Bucket"}:
            return cloud.bucket
        if node == {"Fn::GetAtt": ["Bucket", "Arn"]}:
            return cloud.arn
        if "Fn::Sub" in node:
            return node["Fn::Sub"].replace("${Bucket.Arn}", cloud.arn)
        return {str(key): resolved(value, cloud) for key, value in node.items()}
    return [resolved(value, cloud) for value in node] if isinstance(node, list) else node


# --- the bucket -------------------------------------------------------------------------------------------------------


def test_the_bucket_is_encrypted_private_and_keeps_everything(cloud: Cloud) -> None:
    s3, bucket = cloud.client("s3"), {"Bucket": cloud.bucket}
    (rule,) = s3.get_bucket_encryption(**bucket)["ServerSideEncryptionConfiguration"]["Rules"]
    assert rule["ApplyServerSideEncryptionByDefault"] == {"SSEAlgorithm": "AES256"}

    resources = cfn_yaml.load(str(AWS / "isthmus.yaml"))["Resources"]
    assert resources["Bucket"]["DeletionPolicy"] == resources["Bucket"]["UpdateReplacePolicy"] == "Retain"
    written = resolved(resources["Bucket"]["Properties"], cloud)
    assert "VersioningConfiguration" not in written
    s3.put_public_access_block(**bucket, PublicAccessBlockConfiguration=written["PublicAccessBlockConfiguration"])
    s3.put_bucket_ownership_controls(**bucket, OwnershipControls=written["OwnershipControls"])
    rules = [
        {"ID": r["Id"], "Filter": {"Prefix": ""}, **{k: v for k, v in r.items() if k != "Id"}}
        for r in written["LifecycleConfiguration"]["Rules"]
    ]
    s3.put_bucket_lifecycle_configuration(**bucket, LifecycleConfiguration={"Rules": rules})

    blocked = s3.get_public_access_block(**bucket)["PublicAccessBlockConfiguration"]
    assert len(blocked) == 4
    assert all(blocked.values())
    (owner,) = s3.get_bucket_ownership_controls(**bucket)["OwnershipControls"]["Rules"]
    assert owner == {"ObjectOwnership": "BucketOwnerEnforced"}
    (rule,) = s3.get_bucket_lifecycle_configuration(**bucket)["Rules"]
    assert rule["Status"] == "Enabled"
    assert rule["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 1}
    assert not {"Expiration", "Transitions", "NoncurrentVersionExpiration"} & set(rule)


def test_the_bucket_policy_denies_whatever_comes_without_tls(cloud: Cloud) -> None:
    properties = cfn_yaml.load(str(AWS / "isthmus.yaml"))["Resources"]["BucketPolicy"]["Properties"]
    only_tls = resolved(properties["PolicyDocument"], cloud)
    assert properties["Bucket"] == {"Ref": "Bucket"}
    assert only_tls["Statement"][0]["Principal"] == "*"
    documents = [*cloud.documents("reader"), only_tls]
    for action, resource in (("s3:ListBucket", cloud.arn), ("s3:GetObject", f"{cloud.arn}/{PREFIX}/run")):
        assert allows(documents, action, resource, {"aws:SecureTransport": "true"})
        assert not allows(documents, action, resource, {"aws:SecureTransport": "false"})


# --- rights of each role ----------------------------------------------------------------------------------------------


async def allowed(request: Awaitable[object]) -> bool:
    try:
        await request
    except Denied:
        return False
    return True


@pytest.mark.parametrize("user", [OWNER, SYNCER, COLLECTOR, READER, EU, US, STRICT])
def test_the_templates_say_what_is_made_of_the_table(cloud: Cloud, user: str) -> None:
    who = replace(IDENTITIES.get(user, Identity(Participant.LEARNER, "lab-1")), checkpoints=False)
    deployed = [s for document in cloud.documents(user) for s in document["Statement"]]
    table = policy(who, cloud.bucket, PREFIX, AWS_WORDS)["Statement"]
    assert [s for s in deployed if s in table] == table
    # A learner that is not strict has two more statements. Other tests check what they allow.
    assert len(deployed) == len(table) + (2 if user in (EU, US) else 0)


async def test_each_role_does_what_it_may_and_nothing_else(stores: OpenAll) -> None:
    async with AsyncExitStack() as stack:
        run = await stores(stack)
        administrator = run.pop(ADMINISTRATOR)
        strict = {STRICT}
        for key, expected in KEYS.items():
            # A strict learner reads published objects and what syncers say, and no objects of other learners.
            published = key.split("/")[0] in ("run", "members", "commits", "segments", "values", "snapshots")
            published = published or (key.startswith("bus/") and "/syncer/" in key)
            readers = set(expected.read) | (strict if published else set())
            assert {who for who, s in run.items() if await found(s.get(key))} == readers, key
            assert {who for who, s in run.items() if await allowed(s.put(key, b"x"))} == set(expected.replace), key
            await administrator.put(key, b"x")
            assert {who for who, s in run.items() if await allowed(s.get(key))} == readers, key
            assert {who for who, s in run.items() if await allowed(s.delete(key))} == set(expected.delete), key
            await administrator.delete(key)
            may_create = {*expected.create, *expected.replace}
            assert {who for who, s in run.items() if await allowed(s.create(key, b"x"))} == may_create, key
            await administrator.delete(key)
        for prefix, listers in LISTS.items():
            others = prefix in ("members/", "snapshots/00003/") or prefix.endswith("/syncer/")
            named = set(listers) | (strict if others else set())
            # S3 answers 404 for a missing key only if the caller may also list it, so each reader may list.
            named |= {u for u in IDENTITIES if may(IDENTITIES[u].participant, READ, f"{prefix}x", IDENTITIES[u].name)}
            named |= strict if may(Participant.LEARNER, READ, f"{prefix}x", "lab-1", checkpoints=False) else set()
            assert {who for who, s in run.items() if await allowed(s.list(prefix))} == named - {ADMINISTRATOR}, prefix


async def found(request: Awaitable[object]) -> bool:
    """Return whether a request for a missing object is allowed."""
    try:
        await request
    except Denied:
        return False
    except ObjectMissing:
        return True
    raise AssertionError("nothing is there")


def client_of(environment: Mapping[str, str]) -> Any:
    """Return an S3 client with these credentials, independent of Isthmus."""
    return boto3.client(
        "s3",
        endpoint_url=environment["AWS_ENDPOINT_URL"],
        region_name=environment["AWS_REGION"],
        aws_access_key_id=environment["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=environment["AWS_SECRET_ACCESS_KEY"],
        aws_session_token=environment["AWS_SESSION_TOKEN"],
    )


@pytest.mark.usefixtures("stores")
@pytest.mark.parametrize(
    ("who", "key"),
    [
        (EU, update_key(3, "eu-1", 9, DIGEST)),
        (EU, claim_key("eu-1", 9)),
        (SYNCER, commit_key(3, 9)),
        (OWNER, RUN_KEY),
        (OWNER, "members/000000000002"),
    ],
)
def test_what_may_only_be_created_cannot_be_written_over_in_any_way(
    cloud: Cloud, environments: dict[str, dict[str, str]], who: str, key: str
) -> None:
    """Completing an upload and copying are PutObject, too. So is a part, but it creates no object: parts are granted
    for keys under which large objects may be created."""
    at = {"Bucket": cloud.bucket, "Key": f"{PREFIX}/{key}"}
    with closing(client_of(environments[ADMINISTRATOR])) as operator, closing(client_of(environments[who])) as s3:
        s3.put_object(**at, Body=b"first", IfNoneMatch="*")
        assert refusal(s3.put_object, **at, Body=b"second", IfNoneMatch="*") == "PreconditionFailed"

        # The administrator begins an upload. The role then tries to add to it and to complete it.
        upload = {"UploadId": operator.create_multipart_upload(**at)["UploadId"]}
        part = operator.upload_part(**at, **upload, PartNumber=1, Body=b"second")["ETag"]
        parts = {"MultipartUpload": {"Parts": [{"PartNumber": 1, "ETag": part}]}}
        operator.put_object(Bucket=cloud.bucket, Key=f"{PREFIX}/scratch/second", Body=b"second")
        source = {"CopySource": {"Bucket": cloud.bucket, "Key": f"{PREFIX}/scratch/second"}}
        for request, given in (
            (s3.put_object, {"Body": b"second"}),
            (s3.create_multipart_upload, {}),
            (s3.upload_part, {**upload, "PartNumber": 2, "Body": b"second"}),
            (s3.upload_part_copy, {**upload, "PartNumber": 2, **source}),
            (s3.complete_multipart_upload, {**upload, **parts}),
            (s3.copy_object, source),
            (s3.delete_object, {}),
            (s3.put_object_acl, {"ACL": "private"}),
            (s3.put_object_tagging, {"Tagging": {"TagSet": []}}),
        ):
            makes_none = request in (s3.create_multipart_upload, s3.upload_part, s3.upload_part_copy)
            expected = "" if makes_none and key.startswith("updates/") else "AccessDenied"
            assert refusal(request, **at, **given) == expected, request
        assert operator.get_object(**at)["Body"].read() == b"first"
        for used in (at, source["CopySource"]):
            operator.delete_object(**used)


def refusal(request: Callable[..., Any], **given: Any) -> str:
    """Return the code of the error that a request ends with, or an empty string."""
    try:
        request(**given)
    except ClientError as error:
        return str(error.response["Error"]["Code"])
    return ""


@pytest.mark.parametrize("scheme", ["s3", "s3+aiobotocore"])
async def test_what_is_too_large_for_one_request_is_created_all_the_same(
    stores: OpenAll, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    """One client completes a multipart upload with the condition. The other cannot, and sends the object whole."""
    part, key = 6 << 20, update_key(3, "eu-1", 11, DIGEST)
    for module in ("bucket", "s3"):
        monkeypatch.setattr(f"isthmus.store.{module}.PART_BYTES", part)
    data = bytes(range(256)) * (2 * part // 256)
    async with AsyncExitStack() as stack:
        run = await stores(stack, scheme=scheme)
        assert await run[EU].create(key, data)
        assert bytes(await run[EU].get(key)) == data
        assert not await run[EU].create(key, data[::-1])
        assert not await allowed(run[US].create(update_key(3, "eu-1", 12, DIGEST), data))
        assert bytes(await run[EU].get(key)) == data
        await run[ADMINISTRATOR].delete(key)


async def test_nothing_outside_the_prefix_is_open_to_anyone(stores: OpenAll) -> None:
    async with AsyncExitStack() as stack:
        opened = await stores(stack, "team")
        for who, store in opened.items():
            if who == ADMINISTRATOR:
                continue
            for key in ("x", "run2/x"):
                for request in (store.put(key, b"x"), store.get(key), store.delete(key)):
                    assert not await allowed(request), (who, key)
            for prefix in ("", "run2/"):
                assert not await allowed(store.list(prefix)), (who, prefix)


def test_a_missing_key_is_told_to_everyone_who_may_read_it(cloud: Cloud) -> None:
    """S3 requires ListBucket before it answers 404. Reports differ on whether the request then has a prefix."""
    key = f"{PREFIX}/{commit_key(3, 9)}"
    for who in cloud.roles:
        documents = cloud.documents(who)
        assert allows(documents, "s3:ListBucket", cloud.arn, {})
        assert allows(documents, "s3:ListBucket", cloud.arn, {"s3:prefix": key})
        assert not allows(documents, "s3:ListBucket", cloud.arn, {"s3:prefix": "other/"})
        assert not allows(documents, "s3:ListAllMyBuckets", "*", {})


@pytest.mark.tier("all")
async def test_a_run_needs_no_more_than_its_roles_have(stores: OpenAll, tmp_path: Path) -> None:
    """The owner creates, a syncer and two learners train, a collector collects: each with its role's credentials."""
    async with AsyncExitStack() as stack:
        store = await stores(stack)
        runtime = single_threaded(0)
        await require_create_only(store[OWNER], runtime)
        run = await create_run(store[OWNER], runtime, seed_of())
        bus = await stack.enter_async_context(open_bus(f"sqlite://{tmp_path}/bus", run.digest, None))
        worlds = {who: World(run, s, bus, runtime) for who, s in store.items()}
        await require_create_only(store[SYNCER], runtime)
        async with serving(worlds[SYNCER].syncer()) as syncer:
            await asyncio.gather(
                *(
                    train(worlds[who].learner(name), 12, seed=i, enough=lambda: syncer.tallies.commits >= 4)
                    for i, (who, name) in enumerate(((EU, "eu-1"), (STRICT, "lab-1")))
                )
            )
        assert await check_log(worlds[READER]) == syncer.tallies.commits
        log = Log(run, store[COLLECTOR], runtime)
        await gc.apply(log, await gc.plan(log, keep=1, min_age_s=0.0))
        await doctors_agree(store, runtime)


async def doctors_agree(store: Mapping[str, EdgeStore], runtime: Runtime) -> None:
    """Check that `isthmus doctor --role …` finds each identity able to do what it must, and nothing more."""

    async def failures(who: str, role: Role) -> set[str]:
        found = [f async for f in examine_open_store(store[who], role, runtime, 1 << 16)]
        assert not role.place or {f.check for f in found if isinstance(f, Finding)} >= {"store: conditional PUT"}
        return {f.check for f in found if isinstance(f, Finding) and f.outcome == FAILURE}

    assert await failures(ADMINISTRATOR, Role(RoleKind.OPERATOR)) == set()
    for user in (OWNER, SYNCER, COLLECTOR, READER):
        assert await failures(user, Role(RoleKind(user))) == set(), user
    for user, name in ((EU, "eu-1"), (US, "us-1"), (STRICT, "lab-1")):
        assert await failures(user, Role(RoleKind.LEARNER, name)) == set(), user
    written = {f"store: must not write {what}" for what in ("the run object", "a commit", "another's claim")}
    too_much = written | {f"store: must not {what}" for what in ("read", "list", "delete")}
    assert await failures(ADMINISTRATOR, Role(RoleKind.LEARNER, "eu-1")) >= too_much


# --- the bus ----------------------------------------------------------------------------------------------------------


def command(client: redis_client.Redis, *words: str) -> None:
    """Send a command of any kind. The client's method for this has no types."""
    client.execute_command(*words)  # type: ignore[no-untyped-call]


def access_strings() -> dict[str, str]:
    users = cfn_yaml.load(str(AWS / "redis.yaml"))["Resources"]
    learner = cfn_yaml.load(str(AWS / "learner.yaml"))["Resources"]["BusUser"]["Properties"]["AccessString"]["Fn::Sub"]
    return {
        "default": users["DefaultUser"]["Properties"]["AccessString"],
        "syncer": users["SyncerUser"]["Properties"]["AccessString"],
        "eu-1": learner.replace("${LearnerName}", "eu-1"),
    }


def test_each_bus_user_writes_one_stream_and_reads_those_of_isthmus() -> None:
    given = access_strings()
    for user, stream in (("syncer", SYNCER_STREAM), ("eu-1", learner_stream("eu-1"))):
        who = IDENTITIES[SYNCER if user == SYNCER else EU]
        words = [w for w in given[user].split() if w not in ("on", "+client|setinfo", "+client|setname")]
        assert words == [w for w in acl_rules(who).split() if w != "resetchannels"], "ElastiCache has no such word"
        assert f"%W~isthmus:{16 * chr(63)}:{stream}" in words
    assert given["default"].split()[0] == "off"


async def test_the_bus_needs_no_more_commands_than_its_users_have(redis: Server) -> None:
    """Runs on any Redis. Before 7.0, reading and writing are one permission, and there are no selectors. CLIENT SETINFO
    came with 7.2."""
    name, password = f"u{uuid.uuid4().hex}", uuid.uuid4().hex
    port = urlsplit(redis.url).port
    assert port is not None
    plain = re.sub("[()]", "", access_strings()["eu-1"])
    rules = [r for r in plain.split() if "~" not in r and r != "+client|setinfo"]
    with closing(redis_client.Redis(port=port)) as admin:
        command(admin, "ACL", "SETUSER", name, f">{password}", *rules, "~isthmus:*")
        async with open_bus(f"redis://{name}:{password}@127.0.0.1:{port}", DIGEST, None) as bus:
            stream = learner_stream(name)
            await bus.append(stream, b"hello")
            assert [s.body for s in (await bus.read({stream: ""}, 1.0))[stream]] == [b"hello"]
            assert await bus.read({stream: await bus.tail(stream)}, 0.05) == {}
            assert await bus.tail(stream)
        with closing(redis_client.Redis(port=port, username=name, password=password)) as user:
            for refused in (
                ("FLUSHALL",),
                ("CONFIG", "GET", "*"),
                ("DEL", "isthmus:x"),
                ("XTRIM", "isthmus:x", "MAXLEN", "0"),
            ):
                with pytest.raises(redis_client.exceptions.NoPermissionError):
                    command(user, *refused)
        command(admin, "ACL", "DELUSER", name)

"""`isthmus create` makes a signed run on real servers that enforce every permission; the folders are all it takes.

SeaweedFS and Redis 7 speak only TLS, and know only their administrators at first. Each participant has nothing but a
copy of its folder elsewhere, and an empty environment.
"""

import configparser
import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import pytest
import redis as redis_client

from e2e.test_processes import HANGS_S, QUIET
from infra import graph
from isthmus.format.signing import read_signer
from isthmus.format.signing.keys import new_signer, write_signer
from isthmus_services.main import main
from isthmus_services.servers import Server, redis_server, s3_server
from support import forking
from support.authority import Authority
from support.forking import Forked

pytestmark = [pytest.mark.timeout(600), pytest.mark.tier("test")]

ROOT = ("root-of-store", "secret-of-root-0123456789")
ADMIN = "secret-of-admin-0123456789"
SMALL = ("--model", "support.paced:small", "--sync-every", "16", "--fragments", "2")
LEARNERS = ("--learner", "eu-1", "--learner", "us-1", "--series", "held-out")
TRAINING = ("--train", "support.paced:train", "--steps", "80")


@dataclass
class Place:
    """Servers, their administrators' files, and the processes that were started."""

    folder: Path
    authority: Authority
    store: Server
    bus: Server
    started: list[Forked] = field(default_factory=list)

    def administrator(self) -> dict[str, str]:
        """Return the environment of the store's administrator. It names no credentials: flags do."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "ISTHMUS_"))}
        return {
            **inherited,
            **QUIET,
            "AWS_ENDPOINT_URL": self.store.url,
            "AWS_REGION": "us-east-1",
            "AWS_CA_BUNDLE": str(self.authority.file),
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "nothing",
            "ISTHMUS_BUS": self.bus.url,
            "ISTHMUS_BUS_CA": str(self.authority.file),
            "ISTHMUS_BUS_USER": "admin",
            "ISTHMUS_BUS_PASSWORD_FILE": str(self.folder / "admin-password"),
        }

    def words(self, bucket: str, *more: str) -> list[str]:
        """Return the words of the command for a run of its own."""
        at = self.folder / bucket
        admin = ("--admin-credentials", str(self.folder / "credentials"), "--admin-profile", "root")
        return ["create", f"s3://{bucket}/team/run", "--folder", str(at), "--bus-users", "server", *admin, *more]

    def create(self, bucket: str, *more: str, code: int = 0) -> str:
        done = forking.isthmus(*self.words(bucket, *more), environment=self.administrator())
        said = done.stdout + done.stderr
        assert done.returncode == code, said
        for secret in secrets_in(self.folder / bucket):
            assert secret not in said
        return said

    def start(self, name: str, folder: Path, *words: str) -> Forked:
        """Start a process with the settings of a participant's folder, and nothing else."""
        log = self.folder / f"{name}.log"
        process = forking.nursery().start([*words], settings(folder), log, log)
        self.started.append(process)
        return process

    def do(self, name: str, folder: Path, *words: str, code: int = 0) -> str:
        process = self.start(name, folder, *words)
        assert process.wait(HANGS_S) == code, self.said()
        return (self.folder / f"{name}.log").read_text()

    def said(self) -> str:
        return "".join(f"--- {p.stem}\n{p.read_text(errors='replace')}" for p in sorted(self.folder.glob("*.log")))

    def client(self, service: str, credentials: tuple[str, str] = ROOT) -> Any:
        return boto3.client(
            service, endpoint_url=self.store.url, region_name="us-east-1", verify=str(self.authority.file),
            aws_access_key_id=credentials[0], aws_secret_access_key=credentials[1],
        )  # fmt: skip

    def acl(self) -> list[str]:
        """Return the lines of the server's users, in order."""
        host, _, port = self.bus.url.removeprefix("rediss://").partition(":")
        with contextlib.closing(
            redis_client.Redis(
                host=host, port=int(port), username="admin", password=ADMIN, ssl=True,
                ssl_ca_certs=str(self.authority.file), decode_responses=True,
            )
        ) as client:  # fmt: skip
            return sorted(map(str, client.acl_list()))


def settings(folder: Path) -> dict[str, str]:
    """Return the environment that a participant's `env` makes of an almost empty one, in which others' are left."""
    stray = {"AWS_ACCESS_KEY_ID": "stray", "AWS_SECRET_ACCESS_KEY": "stray", "AWS_PROFILE": "stray", "ISTHMUS_BUS": "x"}
    done = subprocess.run(
        ["bash", "-euc", f". {folder}/env && env -0"],
        env={"PATH": os.environ["PATH"], "HOME": str(folder), **QUIET, **stray}, cwd="/",
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return dict(line.partition("=")[::2] for line in done.stdout.split("\0") if line)


def credentials_of(folder: Path) -> tuple[str, str]:
    """Return a participant's access key and its secret."""
    parsed = configparser.ConfigParser()
    parsed.read(folder / "aws-credentials")
    return parsed["default"]["aws_access_key_id"], parsed["default"]["aws_secret_access_key"]


def secrets_in(folder: Path) -> list[str]:
    """Return every secret in the folders of a run."""
    found = [path.read_text().strip() for path in folder.rglob("*password")]
    for path in folder.rglob("aws-credentials"):
        parsed = configparser.ConfigParser()
        parsed.read_string(path.read_text())
        found.append(parsed["default"]["aws_secret_access_key"])
    for path in folder.rglob("key"):
        found += path.read_text().split("\n")[2:-2]  # the first line is alike in all keys
    return found


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(p.relative_to(folder)): (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    binary = graph.redis_7()
    folder = tmp_path_factory.mktemp("create")
    authority = Authority(folder)
    (folder / "admin-password").write_text(ADMIN)
    (folder / "users.acl").write_text(f"user default off\nuser admin on >{ADMIN} ~* &* +@all\n")
    (folder / "credentials").write_text(f"[root]\naws_access_key_id = {ROOT[0]}\naws_secret_access_key = {ROOT[1]}\n")
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(
            s3_server(folder / "store", credentials=ROOT, certificate=authority.certificate("store"))
        )
        bus = stack.enter_context(
            redis_server(
                folder / "bus", binary=binary, arguments=("--aclfile", str(folder / "users.acl")),
                certificate=authority.certificate("bus"),
            )
        )  # fmt: skip
        found = Place(folder, authority, store, bus)
        try:
            yield found
        finally:
            for process in found.started:
                process.kill()
                process.wait()


@pytest.fixture(scope="module")
def ran(place: Place) -> Path:
    """Create a run, let its participants work from copies of their folders, then add a learner, which works, too."""
    write_signer(place.folder / "globex", new_signer(), "globex")  # us-1 is another organisation's, with its own key
    theirs = ("--public-key", f"us-1={place.folder / 'globex'}.pub")
    said = place.create("first", *LEARNERS, *theirs, *SMALL)
    assert said.count("  new  ") == 7, said
    assert re.search("learner-us-1/env && isthmus learner --key LEARNER_KEY_FILE\n", said)
    made, given = place.folder / "first", place.folder / "given"
    before = contents(made), place.acl()
    assert place.create("first", *LEARNERS, *SMALL).count("as before") == 7
    assert (contents(made), place.acl()) == before, "the second time changes nothing"

    shutil.copytree(made, given)
    syncer = place.start("syncer", given / "syncer", "syncer")
    key = ("--key", str(place.folder / "globex"))
    learners = [
        place.start("eu-1", given / "learner-eu-1", "learner", *TRAINING),
        place.start("us-1", given / "learner-us-1", "learner", *TRAINING, *key),
    ]
    for process in learners:
        assert process.wait(HANGS_S) == 0, place.said()

    said = place.create("first", "--learner", "ap-1")
    assert re.findall(r"(as before|new|changed) .*/(\S+)/env", said) == [
        ("as before", "owner"), ("as before", "syncer"), ("as before", "collector"), ("as before", "reader"),
        ("new", "learner-ap-1"), ("as before", "learner-eu-1"), ("as before", "learner-us-1"),
        ("as before", "follower-held-out"),
    ]  # fmt: skip
    shutil.copytree(made / "learner-ap-1", given / "learner-ap-1")
    assert place.start("ap-1", given / "learner-ap-1", "learner", *TRAINING).wait(HANGS_S) == 0, place.said()
    syncer.terminate()
    assert syncer.wait(HANGS_S) == 0, place.said()
    return given


def test_participants_merge_with_nothing_but_their_folders(place: Place, ran: Path) -> None:
    report = place.folder / "status.json"
    place.do("status", ran / "reader", "status", "--json", str(report))
    rows = {row["learner"]: row for row in json.loads(report.read_text())["learners"]}
    assert set(rows) == {"eu-1", "us-1", "ap-1"}
    assert "0 differ" in place.do("replay", ran / "reader", "replay")
    for name in rows:
        said = (place.folder / f"{name}.log").read_text()
        assert re.search(r"merged", said), said
    assert "membership 2" in place.do("members", ran / "owner", "members", "list")
    place.do("gc", ran / "collector", "gc", "--apply", "--min-age", "0", "--keep", "2")
    place.do(
        "follow", ran / "follower-held-out",
        "follow", "--exec", "echo 0.5", "--series", "held-out", "--mixed", "--cuts", "1",
    )  # fmt: skip
    assert "held-out" in place.do("status-series", ran / "reader", "status")


def test_a_signed_run_needs_nothing_but_the_bucket(place: Place) -> None:
    """Without --bus, messages are in the store, and its policies say who may speak as whom."""
    made, environment = place.folder / "alone", place.administrator()
    for name in [name for name in environment if name.startswith("ISTHMUS_BUS")]:
        del environment[name]
    words = [word for word in place.words("alone", *LEARNERS[:4], *SMALL) if word not in ("--bus-users", "server")]
    done = forking.isthmus(*words, "--heartbeat", "0.5", "--silence", "2", environment=environment)
    assert done.returncode == 0, done.stderr
    assert "bus: in the run's own store" in done.stdout
    given = place.folder / "given-alone"
    shutil.copytree(made, given)
    assert settings(given / "learner-eu-1")["ISTHMUS_BUS"] == "store:"
    assert "ISTHMUS_BUS_USER" not in settings(given / "learner-eu-1")
    syncer = place.start("alone-syncer", given / "syncer", "syncer")
    learners = [place.start(f"alone-{n}", given / f"learner-{n}", "learner", *TRAINING) for n in ("eu-1", "us-1")]
    for process in learners:
        assert process.wait(HANGS_S) == 0, place.said()
    syncer.terminate()
    assert syncer.wait(HANGS_S) == 0, place.said()
    report = place.folder / "alone.json"
    place.do("alone-status", given / "reader", "status", "--check", "--json", str(report))
    rows = {row["learner"]: row for row in json.loads(report.read_text())["learners"]}
    assert {name: row["state"] for name, row in rows.items()} == {"eu-1": "done", "us-1": "done"}, "their last words"
    assert all(row["ledger"]["merged"] > 0 for row in rows.values())
    assert "0 differ" in place.do("alone-replay", given / "reader", "replay")
    # One learner cannot speak as another, or as a syncer.
    s3 = place.client("s3")
    boxes = [o["Key"] for o in s3.list_objects_v2(Bucket="alone", Prefix="team/run/bus/")["Contents"]]
    assert sorted({box.split("/bus/")[1].partition("/")[2].rpartition("/")[0] for box in boxes}) == [
        "learner/eu-1", "learner/us-1", "syncer",
    ]  # fmt: skip
    own = credentials_of(given / "learner-eu-1")
    eu = place.client("s3", own)
    for box in boxes:
        if "/learner/eu-1/" in box:
            eu.put_object(Bucket="alone", Key=box, Body=b"mine")
            continue
        with pytest.raises(eu.exceptions.ClientError, match="AccessDenied"):
            eu.put_object(Bucket="alone", Key=box, Body=b"forged")


@pytest.mark.tier("all")
@pytest.mark.parametrize("user", [
    "owner", "syncer", "collector", "learner-eu-1", "learner-ap-1", "follower-held-out", "reader",
])  # fmt: skip
def test_the_doctor_finds_no_failure_for_any_participant(place: Place, ran: Path, user: str) -> None:
    report = place.folder / f"{user}.json"
    own = ("--series", "held-out") if user.startswith("follower") else ()  # the role is in the folder's settings
    place.do(f"doctor-{user}", ran / user, "doctor", "--size", "0.1", "--json", str(report), *own)
    found = {f["check"]: f["outcome"] for f in json.loads(report.read_text())["findings"]}
    assert "failure" not in found.values(), found
    assert "ok" in {outcome for check, outcome in found.items() if check.startswith("store: must not")}, found


@pytest.mark.tier("all")
def test_only_their_owners_may_read_the_files(place: Place, ran: Path) -> None:
    files = [path for path in (place.folder / "first").rglob("*") if path.is_file()]
    assert {p.stat().st_mode & 0o777 for p in files if p.name != "key.pub"} == {0o600}
    own = secrets_in(ran / "learner-eu-1")
    assert len(own) > 3
    others = "".join(p.read_text(errors="replace") for p in files if "learner-eu-1" not in p.parts)
    digests = (place.folder / "first" / "store").rglob("*")
    for path in digests:  # the servers' own files have all store keys
        others = others.replace(path.read_text(), "")
    assert not [secret for secret in own if secret in others]


# --- interruptions and differences, on servers without TLS ----------------------------------------------------------


@dataclass
class Plain:
    """A store and a Redis on which the command's own environment is an administrator's."""

    folder: Path
    store: Server
    bus: Server

    @property
    def environment(self) -> dict[str, str]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "ISTHMUS_"))}
        return {**inherited, **QUIET, **self.store.environment, "ISTHMUS_BUS": self.bus.url}

    def words(self, bucket: str, *more: str) -> list[str]:
        return ["create", f"s3://{bucket}/run", "--folder", str(self.folder / bucket), *more]

    def create(self, bucket: str, *more: str, code: int = 0) -> str:
        done = forking.isthmus(*self.words(bucket, *more), environment=self.environment)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def client(self) -> Any:
        of = self.store.environment
        return boto3.client(
            "s3", endpoint_url=self.store.url, region_name="us-east-1", aws_access_key_id=of["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=of["AWS_SECRET_ACCESS_KEY"],
        )  # fmt: skip

    @contextlib.contextmanager
    def redis(self) -> Iterator[Any]:
        with contextlib.closing(redis_client.Redis.from_url(self.bus.url, decode_responses=True)) as client:
            yield client

    def users(self) -> list[str]:
        with self.redis() as client:
            return sorted(map(str, client.acl_list()))

    def forget_users(self) -> None:
        with self.redis() as client:
            for name in set(client.acl_users()) - {"default"}:
                client.acl_deluser(name)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, seaweedfs: Server) -> Iterator[Plain]:
    binary = graph.redis_7()
    if binary is None:
        pytest.skip("needs redis-server 7 or newer on PATH")
    folder = tmp_path_factory.mktemp("plain")
    with redis_server(folder / "bus", binary=binary) as bus:
        yield Plain(folder, seaweedfs, bus)


SERVER = ("--bus-users", "server")
EVERY = 17
"""The command is killed after its first effect, and later by so many each time."""


def everything(plain: Plain, bucket: str) -> tuple[dict[str, str], list[str]]:
    """Return which files there are, and the users of the bus without their passwords."""
    folder = plain.folder / bucket
    names = {str(p.relative_to(folder)): oct(p.stat().st_mode) for p in folder.rglob("*") if p.is_file()}
    return names, [re.sub(r"#[0-9a-f]{64}", "#", line) for line in plain.users()]


@pytest.mark.tier("all")
def test_a_command_killed_after_any_effect_is_finished_by_running_it_again(plain: Plain) -> None:
    words = ("--learner", "a", *SERVER, *SMALL)
    plain.forget_users()
    plain.create("whole", *words)
    expected = everything(plain, "whole")
    before = contents(plain.folder / "whole"), plain.users()
    assert plain.create("whole", *words).count("as before") == 5
    assert (contents(plain.folder / "whole"), plain.users()) == before
    with (plain.folder / "killed.log").open("wb") as log, subprocess.Popen(
        [sys.executable, "-m", "support.killed"], env=plain.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=log, text=True,
    ) as victims:  # fmt: skip
        assert victims.stdin is not None
        assert victims.stdout is not None
        for last in range(1, 1000, EVERY):
            plain.forget_users()
            bucket = f"killed-{last}"
            print(json.dumps([last, plain.words(bucket, *words)]), file=victims.stdin, flush=True)
            ended = int(victims.stdout.readline())
            assert ended in (0, -9), (plain.folder / "killed.log").read_text()
            plain.create(bucket, *words)
            assert everything(plain, bucket) == expected, f"killed after effect {last}"
            reader = settings(plain.folder / bucket / "reader")
            listed = forking.isthmus("members", "list", environment=reader)
            assert (listed.returncode, "membership 1" in listed.stdout) == (0, True), listed.stdout + listed.stderr
            if not ended:
                break
        assert last > 40, "the command has more effects than that"
        victims.stdin.close()


def test_a_learner_is_added_and_one_that_was_removed_is_not(plain: Plain) -> None:
    plain.forget_users()
    plain.create("more", "--learner", "a", *SERVER, *SMALL)
    said = plain.create("more", "--learner", "b", *SERVER)
    assert "members: a, b, gc, syncer-* (membership 2)" in said
    assert sum("user learner-" in line for line in plain.users()) == 2
    owner = settings(plain.folder / "more" / "owner")
    assert forking.isthmus("members", "remove", owner["ISTHMUS_RUN"], "a", environment=owner).returncode == 0
    said = plain.create("more", "--learner", "c", *SERVER)
    assert "members: b, c, gc, syncer-* (membership 4)" in said
    said = plain.create("more", "--learner", "a", *SERVER, code=2)
    key = plain.folder / "more" / "learner-a" / "key.pub"
    assert f"isthmus members add s3://more/run a --as learner --public-key {key}" in said


def test_a_run_object_that_is_gone_is_put_back_from_the_owners_copy(plain: Plain) -> None:
    plain.forget_users()
    words = ("back", "--learner", "a", *SERVER, *SMALL)
    made = plain.create(*words)
    store = plain.client()
    kept = store.get_object(Bucket="back", Key="run/run")["Body"].read()
    store.put_object(Bucket="back", Key="run/updates/00000/a/000000000000-0011223344556677", Body=b"x")
    store.delete_object(Bucket="back", Key="run/run")
    said = plain.create(*words)
    copy = plain.folder / "back" / "owner" / "run"
    assert "s3://back/run/run was gone: it is put back from the owner's copy" in said
    assert store.get_object(Bucket="back", Key="run/run")["Body"].read() == kept
    assert re.search("run [0-9a-f]{16}, signed", made)[0] in said  # type: ignore[index]
    copy.unlink()
    store.delete_object(Bucket="back", Key="run/run")
    assert "run the same `isthmus create` again if that made the run" in plain.create(*words, code=2)


def test_in_a_store_that_came_back_empty_no_other_run_takes_the_place(plain: Plain) -> None:
    """It was made of the built-in model, under the old keys, and every participant's env was written anew."""
    plain.forget_users()
    words = ("lost", "--learner", "a", *SERVER, *SMALL)
    made = re.search("run ([0-9a-f]{16}), signed", plain.create(*words))
    assert made is not None
    store, copy = plain.client(), plain.folder / "lost" / "owner" / "run"
    before = {path: path.read_bytes() for path in (plain.folder / "lost").rglob("*") if path.is_file()}
    kept = {}
    for entry in store.list_objects_v2(Bucket="lost")["Contents"]:
        kept[entry["Key"]] = store.get_object(Bucket="lost", Key=entry["Key"])["Body"].read()
        store.delete_object(Bucket="lost", Key=entry["Key"])
    for gone in ("its objects", "its bucket"):
        if gone == "its bucket":
            store.delete_bucket(Bucket="lost")
        said = plain.create("lost", "--learner", "a", *SERVER, code=2)
        assert f"s3://lost/run has no run, and {copy} is the copy of run {made[1]}, which was there" in said
        assert {path: path.read_bytes() for path in before} == before
    store.create_bucket(Bucket="lost")
    for key, data in kept.items():
        store.put_object(Bucket="lost", Key=key, Body=data)
    assert made[0] in plain.create("lost", "--learner", "a", *SERVER)
    store.delete_object(Bucket="lost", Key="run/run")
    assert "was gone: it is put back" in plain.create(*words)


@pytest.mark.tier("all")
def test_a_learner_that_left_is_named_and_removed_with_all_it_had(plain: Plain, tmp_path: Path) -> None:
    plain.forget_users()
    plain.create("leaves", "--learner", "a", "--learner", "b", *SERVER, *SMALL)
    folder = plain.folder / "leaves"
    (folder / "learner-a").rename(tmp_path / "learner-a")
    said = plain.create("leaves", *SERVER)
    assert "warning: learner-a has no folder in" in said
    assert "is still a member and a user of the store" in said
    command = re.findall(r"isthmus (create .* --remove learner-a)$", said, re.MULTILINE)[0].split()
    kept = settings(tmp_path / "learner-a")
    assert forking.isthmus("members", "list", environment=kept).returncode == 0, "it still has its rights"
    for _ in range(2):
        done = forking.isthmus(*command, environment=plain.environment)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "removed: learner-a" in done.stdout
        assert "members: b, gc, syncer-*" in done.stdout
        assert "warning: learner-a" not in done.stdout
    assert not any("user learner-a" in line for line in plain.users())
    refused = forking.isthmus("members", "list", environment=kept)
    assert (refused.returncode, "the access key is not known there" in refused.stderr) == (2, True), refused.stderr
    assert forking.isthmus("members", "list", environment=settings(folder / "learner-b")).returncode == 0

    owner = settings(folder / "owner")
    assert forking.isthmus("members", "remove", owner["ISTHMUS_RUN"], "b", environment=owner).returncode == 0
    said = plain.create("leaves", *SERVER)
    assert re.search(
        "warning: learner-b is not a member, and is still a user of the store: .*--remove learner-b\n", said
    )
    plain.create("leaves", *SERVER, "--remove", "b")
    assert not (folder / "learner-b").exists()
    said = plain.create("leaves", "--remove", "c", code=2)
    assert "--remove c: no participant has this name: learner-a or learner-b" in said
    said = plain.create("leaves", "--learner", "b", code=2)
    assert "add it again with `isthmus keys new b --folder .` and `isthmus members add s3://leaves/run b" in said
    asked = [shlex.split(command) for command in re.findall("`isthmus (.*?)`", said)]
    again = re.search("run this command again with (--public-key b=b.pub)", said)
    assert again is not None
    with contextlib.chdir(tmp_path):
        for command in asked:
            done = forking.isthmus(*command, environment=plain.environment)
            assert done.returncode == 0, done.stdout + done.stderr
        said = plain.create("leaves", "--learner", "b", *again[1].split(), *SERVER)
    assert "learner-b/env && isthmus learner --key LEARNER_KEY_FILE" in said
    assert "--remove NAME" in (folder / "README").read_text()


@pytest.mark.tier("all")
def test_what_differs_is_an_error_and_nothing_is_changed(plain: Plain, tmp_path: Path) -> None:
    plain.forget_users()
    said = plain.create("differs", "--learner", "a", *SERVER, *SMALL, "--model", "nope:build", code=2)
    assert "no module nope" in said.lower() or "nope" in said
    said = plain.create("differs", "--learner", "a", *SERVER, *SMALL)
    assert ("  changed" in said, said.count("  new")) == (False, 5), "what a refused command has left is of no use yet"
    folder, before = plain.folder / "differs", (contents(plain.folder / "differs"), plain.users())

    def refused(*words: str) -> str:
        done = forking.isthmus("create", *words, environment=plain.environment)
        assert done.returncode == 2, done.stdout + done.stderr
        return done.stderr

    own = ("s3://differs/run", "--folder", str(folder))
    assert "there is a run that belongs to SHA256:" in refused("s3://differs/run", "--folder", str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()
    assert "belongs to the run s3://differs/run" in refused("s3://differs/other", "--folder", str(folder))
    assert "sync_every is 16 there, not 17" in refused(*own, "--sync-every", "17")
    assert "keeps its pace" in refused(*own, "--quorum", "3")
    write_signer(tmp_path / "other", new_signer(), "other")
    assert "has another key of a" in refused(*own, "--learner", "a", "--public-key", f"a={tmp_path / 'other'}.pub")
    (folder / "learner-a").rename(tmp_path / "learner-a")
    assert "put its folder back" in refused(*own, "--learner", "a")
    (tmp_path / "learner-a").rename(folder / "learner-a")
    (folder / "syncer").rename(tmp_path / "syncer")
    assert f"{folder / 'syncer'} is missing: put a copy of it back" in refused(*own)
    (tmp_path / "syncer").rename(folder / "syncer")
    for name in ("key", "key.pub"):
        (folder / "learner-a" / name).rename(tmp_path / name)
    write_signer(folder / "learner-a" / "key", read_signer(tmp_path / "other"), "a")
    for words in ((), ("--learner", "a")):
        error = " ".join(refused(*own, *words).split())
        assert "if the member was given that key (isthmus members rotate), put it there as" in error
        assert "as before" not in error
    for name in ("key", "key.pub"):
        (tmp_path / name).rename(folder / "learner-a" / name)
    assert (contents(folder), plain.users()) == before

    # Another installation on the same Redis, whose user `syncer` has another password.
    said = plain.create("second", "--learner", "b", *SERVER, *SMALL, code=2)
    assert "has a user syncer with another password" in said
    assert plain.users() == before[1]


@pytest.mark.tier("all")
def test_without_apis_for_users_the_files_and_the_next_step_are_written(plain: Plain, tmp_path: Path) -> None:
    """A store that refuses to make users, as SeaweedFS does by default, and a bus whose administrator is elsewhere."""
    with s3_server(tmp_path, arguments=("-s3.iam.readOnly=true",)) as store:
        other = Plain(tmp_path, store, plain.bus)
        said = other.create("files", "--learner", "a", *SMALL)
        folder = tmp_path / "files"
        assert "store: users could not be created" in said
        assert f"{folder}/README" in said
        assert f"--aclfile {folder}/redis/users.acl" in said
        assert other.create("files", "--learner", "a").count("as before") == 5
        known = json.loads((folder / "store" / "seaweedfs.json").read_text())
        keys = {i["credentials"][0]["secretKey"] for i in known["identities"]}
        assert settings(folder / "reader")["AWS_SHARED_CREDENTIALS_FILE"] == str(folder / "reader" / "aws-credentials")
        assert any(secret in keys for secret in secrets_in(folder / "learner-a"))


@pytest.mark.tier("all")
def test_without_users_of_the_bus_all_use_it_alike(plain: Plain, redis: Server) -> None:
    """The Redis of the wheel is too old for users with the permissions that a run needs, and says so."""
    environment = {**plain.environment, "ISTHMUS_BUS": redis.url}
    done = forking.isthmus(*plain.words("alike", "--learner", "a", *SERVER, *SMALL), environment=environment)
    assert (done.returncode, "use Redis 7 or newer, or --bus-users none" in done.stderr) == (2, True), done.stderr
    assert not (plain.folder / "alike").exists(), "the bus is asked before anything is made"
    done = forking.isthmus(*plain.words("alike", "--learner", "a", *SMALL), environment=environment)
    assert (done.returncode, "use Redis 7 or newer, or --bus-users none" in done.stderr) == (2, True), done.stderr
    words = plain.words("alike", "--learner", "a", "--bus-users", "none", *SMALL)
    done = forking.isthmus(*words, environment=environment)
    assert done.returncode == 0, done.stderr
    assert f"warning: {plain.store.url} and {redis.url} can be reached from this machine alone" in done.stdout
    assert "users.acl" not in (plain.folder / "alike" / "README").read_text()
    found = settings(plain.folder / "alike" / "learner-a")
    assert (found["ISTHMUS_BUS"], "ISTHMUS_BUS_USER" in found) == (redis.url, False)
    found = settings(plain.folder / "alike" / "reader")
    assert forking.isthmus("status", environment=found).returncode == 0
    assert not [*plain.folder.glob("alike/*/bus-*"), *plain.folder.glob("alike/redis/*.acl")]
    report = plain.folder / "alike.json"
    found |= {"ISTHMUS_BUS": redis.url}
    done = forking.isthmus("doctor", "--size", "0.1", "--json", str(report), environment=found)
    checks = {f["check"]: f["outcome"] for f in json.loads(report.read_text())["findings"]}
    assert checks["bus: users"] == "warning", done.stdout
    assert "failure" not in {outcome for check, outcome in checks.items() if check.startswith("bus:")}, done.stdout


def test_a_folder_remembers_its_bus_and_what_changed_is_named(plain: Plain) -> None:
    words = ("remembered", "--bus", plain.bus.url, "--bus-users", "none")
    plain.create(*words, "--learner", "a", *SMALL)
    silent = {name: value for name, value in plain.environment.items() if name != "ISTHMUS_BUS"}
    done = forking.isthmus(*plain.words("remembered", "--learner", "b"), environment=silent)
    assert (done.stdout.count("  as before"), done.stdout.count("  new")) == (5, 1), done.stdout + done.stderr
    assert "add --shard I/M to `isthmus learner`: 0/2 for the first" in done.stdout
    said = plain.create("remembered", "--bus-users", "file")
    assert said.count("  changed") == 4, "the owner and the collector do not use the bus"
    differs = "ISTHMUS_BUS_PASSWORD_FILE, ISTHMUS_BUS_USER, bus-password, bus-user"
    assert said.count(f"differs: {differs}; give it a copy again, and restart its processes") == 4
    (plain.folder / "remembered" / "reader" / "aws-credentials").unlink()  # the store's secrets cannot be read again
    said = plain.create("remembered", "--bus-users", "file")
    assert said.count("differs: aws-credentials; give it a copy again, and its processes notice it by themselves") == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("gs://bucket/run",), "serves s3:// only"),
        (("az://container/run",), "serves s3:// only"),
        (("out/run",), "serves s3:// only"),
        (("s3://bucket/run", "--learner", "a b"), "--learner"),
        (("s3://bucket/run", "--bus", "sqlite:///x"), "needs a bus that all reach"),
        (("s3://bucket/run", "--public-key", "a=x.pub"), "where --learner NAME is given too"),
        (("s3://bucket/run", "--admin-credentials", "gone"), "there is no such file"),
    ],
)
def test_a_wrong_word_is_reported_before_anything_is_made(
    tmp_path: Path, words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["create", "--folder", str(tmp_path / "new"), "--bus", "redis://127.0.0.1:1", *words]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "new").exists()

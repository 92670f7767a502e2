"""What `isthmus doctor` says of a store: folders and buckets that are wrong in one way each."""

import asyncio
import errno
import os
import re
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import pytest

from advice.doctors import FREES, Doctor, printed, small_run
from advice.followed import command_in
from advice.gate import Gate, error, gate
from advice.rows import A_GAP, row
from isthmus.store.files import FileStore
from isthmus_services.commands import access
from isthmus_services.commands import doctor as command
from isthmus_services.main import main
from isthmus_services.servers import Server, s3_server
from support.authority import Authority
from support.world import World, serving, train, world

SLOW = pytest.mark.tier("all")

# --- folders ----------------------------------------------------------------------------------------------------------


@contextmanager
def as_user() -> Iterator[None]:
    """Run as a user whom modes bind: not as root."""
    if root := os.geteuid() == 0:
        os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        if root:
            os.setresuid(0, 0, 0)


@pytest.fixture
def mine(doctor: Doctor) -> Iterator[Path]:
    """A small run in a folder that belongs to the user of `as_user`."""
    above = Path(tempfile.mkdtemp())
    run = above / "run"
    small_run(run)
    doctor.prints(str(run))  # root can read what Python imports
    above.chmod(0o755)
    if os.geteuid() == 0:
        for path in (above, *above.rglob("*")):
            os.chown(path, 65534, 65534)
    yield run
    for path in (above, run, run / "scratch", run / "commits"):
        if path.exists():
            path.chmod(0o755)
    shutil.rmtree(above)


@row(
    "doctor", "store: access: …: user … may not …, which is …: `…` allows it",
    means="The user of this process may not read the run's folder.",
    do="let this user read and enter … and what is in it: see owner and mode (ls -ld), chown or chmod",
    then="`ok store: access`",
)  # fmt: skip
@row(
    "doctor", "store: may list: …: user … may not …, which is …: `…` allows it",
    means="The user of this process may not list a folder of the run.",
    do="let this user read …/…: chown or chmod", then="`ok store: may list`",
)  # fmt: skip
@row(
    "doctor", "store: may write: …: user … may not …, which is …: `…` allows it",
    means="The user of this process may not write into the run's folder.",
    do="let this user write in …/…: chown or chmod, and a mount that is not read-only", then="`ok store: may write`",
)  # fmt: skip
@row(
    "doctor", "log: commits: the log cannot be read: …: user … may not …, which is …: `…` allows it",
    means="The user of this process may not read the log.",
    do="let this user read … and what is in it: chown or chmod", then="`ok log: commits`",
)  # fmt: skip
@pytest.mark.parametrize(
    ("check", "below", "mode"),
    [
        pytest.param("store: access", "", 0o000, marks=SLOW),
        pytest.param("store: may list", "scratch", 0o300, marks=SLOW),
        ("store: may write", "scratch", 0o500),
        ("log: commits", "commits", 0o000),
    ],
)
def test_a_folder_of_another_user(check: str, below: str, mode: int, doctor: Doctor, mine: Path) -> None:
    told = doctor.only(check)
    (mine / below).mkdir(exist_ok=True)
    if os.geteuid() == 0:
        os.chown(mine / below, 65534, 65534)
    (mine / below).chmod(mode)
    with as_user():
        text = told.finds(str(mine))
    assert f"{mine}" in text.partition("→")[2]
    with as_user():
        subprocess.run(re.findall(r"`(chmod .*)` allows it", text)[0], shell=True, check=True)
        told.finds_no_more(str(mine))


@row(
    "doctor", "store: rights: user … may not …, which is …: `…` allows it",
    means="The user of this process may not use one folder of the run that its role needs, for instance that of one fragment.",
    do="run that command, and the doctor again until this is ok; the processes then go on by themselves",
    then="`ok store: rights`",
)  # fmt: skip
@pytest.mark.parametrize(
    ("role", "refused", "mode", "others"),
    [
        (("learner", "--learner", "eu"), "updates/00000/eu", 0o500, "updates/00001/us"),
        (("learner", "--learner", "eu"), "values/00000", 0o600, "scratch"),
        (("syncer",), "commits/00000", 0o500, "segments/00000"),
        (("syncer",), "updates/00001/us", 0o600, "learners/eu"),
        (("operator",), "learners/eu", 0o500, ""),
        (("learner", "--learner", "eu"), "updates/00000", 0o000, ""),
        (("syncer",), "updates/00001/us", 0o000, ""),
        (("reader",), "updates/00000", 0o000, ""),
        (("operator",), "updates/00001/us", 0o000, ""),
    ],
    ids=[
        "learner writes",
        "learner reads",
        "syncer writes",
        "syncer reads",
        "operator",
        "learner, closed above",
        "syncer, closed",
        "reader, closed above",
        "operator, closed",
    ],
)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
def test_one_folder_that_a_role_may_not_use(
    role: tuple[str, ...], refused: str, mode: int, others: str, doctor: Doctor, mine: Path
) -> None:
    """A folder that the role does not need says nothing."""
    places = (
        "updates/00000/eu",
        "updates/00001/us",
        "values/00000",
        "commits/00000",
        "segments/00000",
        "learners/eu",
        "scratch",
    )
    for path in (mine / place for place in places):
        path.mkdir(parents=True, exist_ok=True)
    subprocess.run(["chown", "-R", "65534:65534", str(mine)], check=True)
    if others:
        (mine / others).chmod(0o500)
    (mine / refused).chmod(mode)
    with as_user():
        text = doctor.finds(str(mine), "--role", *role)
        assert f"{mine / refused}, which is" in text
        subprocess.run(re.findall(r"`(chmod .*)` allows it", text)[0], shell=True, check=True)
        assert "ok      store: rights" in doctor.finds_no_more(str(mine), "--role", *role)


@row(
    "doctor", "store: rights: user … may not …, which is …: `…` allows it (and … more are like that)",
    means="The user of this process may not use some folders of the run that its role needs, for instance those of one "
    "fragment. Its requests there are refused, while the others work.",
    do="run that command, and the doctor again until this is ok; the processes then go on by themselves",
    then="`ok store: rights`",
)  # fmt: skip
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
def test_several_folders_that_a_role_may_not_use(doctor: Doctor, mine: Path) -> None:
    places = mine / "commits/00000", mine / "commits/00001"
    for path in places:
        path.mkdir(parents=True)
    subprocess.run(["chown", "-R", "65534:65534", str(mine)], check=True)
    for path in places:
        path.chmod(0o500)
    with as_user():
        assert "(and 1 more are like that)" in doctor.finds(str(mine), "--role", "syncer")
        for _ in places:
            text = doctor.prints(str(mine), "--role", "syncer")
            subprocess.run(re.findall(r"`(chmod .*)` allows it", text)[0], shell=True, check=True)
        assert "ok      store: rights" in doctor.finds_no_more(str(mine), "--role", "syncer")


@row(
    "doctor", "store: access: there is no folder … yet, and … is not writable",
    means="The run does not exist, and this user could not create it there.",
    do="let this user write in … (chown or chmod), or choose another place",
    then="`ok store: access`, which says that the folder can be created",
)  # fmt: skip
def test_a_place_where_nothing_can_be_created(doctor: Doctor, mine: Path) -> None:
    mine.parent.chmod(0o555)
    to_come = str(mine.parent / "another")
    with as_user():
        doctor.finds(to_come, "--role", "collector")
    mine.parent.chmod(0o755)
    with as_user():
        doctor.finds_no_more(to_come, "--role", "collector")


@row(
    "doctor", "store: may delete: …: Permission denied: …, though owner and mode allow it: see `lsattr -d` of it and of its "
    "folder, the options of the mount, and SELinux or AppArmor",
    means="The user of this process may not delete objects.",
    do="let this user write in …/…: chown or chmod", then="`ok store: may delete`",
)  # fmt: skip
def test_a_folder_where_nothing_can_be_deleted(doctor: Doctor, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An append-only folder, which few file systems know."""
    unlink = Path.unlink

    def denied(path: Path, missing_ok: bool = False) -> None:
        if path.parent.name == "scratch":
            raise PermissionError(errno.EPERM, "Permission denied", str(path))
        unlink(path, missing_ok)

    small_run(folder)
    monkeypatch.setattr(Path, "unlink", denied)
    doctor.finds(str(folder))
    monkeypatch.undo()
    doctor.finds_no_more(str(folder))


@row(
    "doctor", "store: access: … is a link: no folder or file of a run may be one",
    means="A link leads out of the run's folder. Through it, objects of others could be overwritten.",
    do="put a folder in the place of the link, with what the link leads to", then="`ok store: access`",
)  # fmt: skip
def test_a_link_in_the_folder(doctor: Doctor, folder: Path, tmp_path: Path) -> None:
    small_run(folder)
    there = tmp_path / "elsewhere"
    (folder / "scratch").rename(there) if (folder / "scratch").exists() else there.mkdir()
    (folder / "scratch").symlink_to(there)
    doctor.finds(str(folder), "--role", "syncer")
    (folder / "scratch").unlink()
    there.rename(folder / "scratch")
    doctor.finds_no_more(str(folder), "--role", "syncer")


@row(
    "doctor", "store: access: …: [Errno 5] Input/output error",
    means="The disk or the network share does not give what it has.",
    do="see the kernel's log (dmesg): the disk or the network share of … may be damaged or gone",
    then="`ok store: access`",
)  # fmt: skip
def test_a_disk_that_fails(doctor: Doctor, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    small_run(folder)
    monkeypatch.setattr(FileStore, "_read", fails)
    doctor.finds(str(folder))
    monkeypatch.undo()
    doctor.finds_no_more(str(folder))


@row(
    "doctor", "store: conditional PUT: …: Operation not permitted: …",
    means="The log rests on objects that are created once, and this file system has no hard links for that.",
    do="use a file system with atomic hard links (ext4, xfs; not FAT, and few network shares); a syncer refuses this one",
    then="`ok store: conditional PUT`",
)  # fmt: skip
def test_a_file_system_without_hard_links(doctor: Doctor, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_run(folder)

    def none_here(source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(target))

    monkeypatch.setattr(os, "link", none_here)
    doctor.finds(str(folder))
    monkeypatch.undo()
    doctor.finds_no_more(str(folder))


@row(
    "doctor", "store: bandwidth: …: [Errno 27] File too large (… bytes)",
    means="The file system or a limit of this user does not allow files as large as a run's objects.",
    do="raise the limit on the size of a file (ulimit -f), or use another file system", then="`ok store: bandwidth`",
)  # fmt: skip
def test_a_limit_on_the_size_of_a_file(doctor: Doctor, folder: Path) -> None:
    small_run(folder)
    doctor.prints(str(folder))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        doctor.finds(str(folder), "--size", "2")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    doctor.finds_no_more(str(folder), "--size", "2")


@row(
    "doctor", "store: address: …: runs live in s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or in a folder, not in …",
    means="The URL of the run is of no kind that is known.",
    do="correct the URL of the run, or what is named here", then="`ok store: access`",
)  # fmt: skip
def test_an_address_of_no_store(doctor: Doctor, folder: Path) -> None:
    doctor.finds("ftp://x/y", "--role", "collector")
    doctor.finds_no_more(small_run(folder), "--role", "collector")


# --- buckets, behind a gate -------------------------------------------------------------------------------------------


@pytest.fixture
def gated(moto: Server, use: Callable[[Server], None]) -> Iterator[tuple[Gate, str]]:
    """A gate before a server that checks no signatures, and the URL of a small run behind it."""
    with gate(moto.url) as there:
        use(replace(moto, url=there.url, environment={**moto.environment, "AWS_ENDPOINT_URL": there.url}))
        yield there, small_run(f"s3://gated-{os.getpid()}/run", make=True)


ROLE = ("--role", "collector")


@row(
    "doctor", "store: access: s3://… at …: connection refused: start the store there, or correct the endpoint",
    means="Nothing answers at the store's address.",
    do="check that a store answers at this address (AWS_ENDPOINT_URL, or endpoint= in the URL)",
    then="`ok store: access`",
)  # fmt: skip
def test_a_store_that_does_not_answer(doctor: Doctor, gated: tuple[Gate, str], monkeypatch: pytest.MonkeyPatch) -> None:
    there, run = gated
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    doctor.finds(run, *ROLE)
    monkeypatch.setenv("AWS_ENDPOINT_URL", there.url)
    doctor.finds_no_more(run, *ROLE)


@row(
    "doctor", "store: access: s3://…: there is no such bucket (NoSuchBucket)",
    means="No bucket has this name at this address.",
    do="check its name and the endpoint (AWS_ENDPOINT_URL); if that is right, create it with an administrator's credentials: "
    "isthmus init … --create-bucket (with a run of the built-in model; for a model of your own, add --model "
    "PACKAGE.MODULE:FUNCTION, or call join(..., create=Rules.suited))",
    then="`ok store: run`",
)  # fmt: skip
def test_no_bucket(doctor: Doctor, gated: tuple[Gate, str]) -> None:
    run = f"s3://not-there-{os.getpid()}/run"
    text = doctor.finds(run, *ROLE)
    assert "creates it" not in text, "the advice is given once, below the finding"
    assert main(command_in(text, "init")) == 0
    doctor.finds_no_more(run, *ROLE)


@row(
    "doctor", "store: access: …: this machine's clock is more than 15 minutes off the server's (RequestTimeTooSkewed)",
    means="The store refuses all requests, since they are dated by this machine's clock.",
    do="run an NTP client (chrony) on this machine", then="`ok store: access`, and `ok store: clock`",
)  # fmt: skip
@row(
    "doctor", "store: access: … access denied (AccessDenied) for …, signed with …",
    means="These credentials may not read.",
    do="use credentials with s3:GetObject below …, and s3:ListBucket (a missing key must be 404, not 403)",
    then="`ok store: access`",
)  # fmt: skip
@row(
    "doctor", "store: run: … access denied (AccessDenied) for …, signed with …",
    means="These credentials may not read the object that describes the run.",
    do="use credentials with s3:GetObject below …, and s3:ListBucket (a missing key must be 404, not 403)",
    then="`ok store: run`",
)  # fmt: skip
@row(
    "doctor", "store: may write: … is full (its disks are): give it more space, or free what the run does not need any "
    "more: isthmus gc … lists what can be deleted, and --apply deletes it (in a signed run "
    "with --key COLLECTOR_KEY_FILE)",
    means="The store takes no more objects. Learners train on; no round goes on.",
    do=f"make room: {FREES}. Until then nothing is merged; learners train on",
    then="`ok store: may write`",
    lost=A_GAP,
)  # fmt: skip
@row(
    "doctor", "store: may write: …: InternalError: …",
    means="The store answers and takes no object. SeaweedFS says this when it has no room.",
    do=f"see the store's own log: it may be full (disks, volumes, quota) or damaged. If it is full: {FREES}",
    then="`ok store: may write`",
    lost=A_GAP,
)  # fmt: skip
@row(
    "doctor", "store: may delete: … access denied (AccessDenied) for …, signed with …",
    means="These credentials may not delete what this role must delete.",
    do="use credentials with s3:DeleteObject below … (`isthmus access` writes a policy for each role; if `isthmus create` made this run, run that again)",
    then="`ok store: may delete`",
)  # fmt: skip
@row(
    "doctor", "store: bandwidth: …: the object is larger than this store takes in one request (EntityTooLarge) "
    "(… bytes)",
    means="The store, or a gateway before it, does not take objects as large as a run's.",
    do="raise the store's limit on the size of one object, or that of a gateway before it",
    then="`ok store: bandwidth`",
)  # fmt: skip
@pytest.mark.parametrize(
    ("words", "code", "status", "when"),
    [
        (("store: access: …: this",), "RequestTimeTooSkewed", 403, lambda *_: True),
        pytest.param(("store: access: … access",), "AccessDenied", 403, lambda *_: True, marks=SLOW),
        pytest.param(
            ("store: run",), "AccessDenied", 403, lambda method, path, size: path.endswith("/run/run"), marks=SLOW
        ),
        (("store: may write: … is",), "XMinioStorageFull", 507, lambda method, path, size: method == "PUT"),
        pytest.param(
            ("store: may write: …: I",), "InternalError", 500, lambda method, path, size: method == "PUT", marks=SLOW
        ),
        (("store: may delete: … access",), "AccessDenied", 403, lambda method, path, size: method == "DELETE"),
        pytest.param(
            ("store: bandwidth",), "EntityTooLarge", 400, lambda method, path, size: size > 1 << 14, marks=SLOW
        ),
    ],
)
def test_a_store_that_refuses(
    words: tuple[str, ...], code: str, status: int, when: Callable[..., bool], doctor: Doctor, gated: tuple[Gate, str]
) -> None:
    """The gate answers as stores do. What the advice mends is the store, so the gate opens; gc runs as it is printed."""
    there, run = gated
    told = doctor.only(*words)
    there.answers = lambda *asked: error(code, status=status) if when(*asked) else None
    text = told.finds(run, *ROLE)
    if "isthmus gc" in told.rows[0].do:
        assert main(printed(text.partition("→")[2], "gc")) == 0, "collecting works in a store that takes no objects"
    there.open()
    told.finds_no_more(run, *ROLE)


@row(
    "doctor", "store: conditional PUT: s3://…: a second create-only PUT (If-None-Match: *) of the same key got through",
    means="The log rests on objects that are created once. This store overwrites them.",
    do="use a store that honours it: AWS S3, MinIO, SeaweedFS, R2; a syncer refuses this one",
    then="`ok store: conditional PUT`",
)  # fmt: skip
def test_a_store_without_conditional_writes(
    doctor: Doctor, gated: tuple[Gate, str], capsys: pytest.CaptureFixture[str]
) -> None:
    there, run = gated
    there.without = {"if-none-match"}
    doctor.finds(run, *ROLE)
    assert main(["init", f"{run}-another", "--insecure"]) == 2
    assert "does not honour create-only PUT" in capsys.readouterr().err
    there.open()
    doctor.finds_no_more(run, *ROLE)


@row(
    "doctor", "store: bandwidth: … MB/s up, … MB/s down, by one object of … MB",
    means="The way to the store takes less than a megabyte a second. Updates and versions come late.",
    do="find out what limits the way to the store (network, disk); if nothing can be done, create the run with a "
    "smaller codec (int4) or a larger H (--sync-every)",
    then="`ok store: bandwidth`",
)  # fmt: skip
@pytest.mark.tier("all")
def test_a_slow_way(doctor: Doctor, gated: tuple[Gate, str]) -> None:
    there, run = gated
    there.bytes_s = 1e5
    doctor.finds(run, *ROLE, "--size", "0.1")
    there.open()
    doctor.finds_no_more(run, *ROLE, "--size", "2")


@row(
    "doctor", "store: integrity: a PUT whose bytes do not match its SHA-256 is accepted: an interrupted PUT may leave an "
    "empty object",
    means="The store does not look whether the bytes arrived as they were sent.",
    do="use s3+aiobotocore://…, whose MD5 most stores compare; damage is found when objects are read, by their digests",
    then="`ok store: integrity`",
)  # fmt: skip
@row(
    "doctor", "store: must not create: not tried: this client sends no checksum that this store compares",
    means="Whether the policy keeps this role from writing what is not its own is tried with bytes that a store refuses, "
    "and this store refuses none.",
    do="run the doctor again with these credentials and another --role: its writes must be refused",
    then="a failure of `store: may write`. If it is ok, the credentials may do too much",
)  # fmt: skip
@pytest.mark.tier("all")
def test_a_store_that_compares_no_sums(doctor: Doctor, gated: tuple[Gate, str]) -> None:
    there, run = gated
    there.without = {name for kind in ("sha256", "crc32") for name in (f"x-amz-checksum-{kind}",)} | {"content-md5"}
    doctor.finds(run, *ROLE)
    assert "ok      store: may write" in doctor.prints(run, "--role", "owner"), "here all may do all"
    there.without.discard("content-md5")
    doctor.only("store: integrity").finds_no_more(run.replace("s3:", "s3+aiobotocore:"), *ROLE)


# --- buckets with a policy for each role ------------------------------------------------------------------------------

BUCKET, PREFIX = "advised", "team/run"
RUN = f"s3://{BUCKET}/{PREFIX}"
"""SeaweedFS makes the losers of each race wait for a second. integration/test_permissions.py covers the main cases."""


@pytest.fixture(scope="module")
def policed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], dict[str, str]]]:
    """A SeaweedFS with the policies of `isthmus access`: a function that returns the environment of a user.

    The administrator is the user `root`. There is a bucket, without a run.
    """
    made = tmp_path_factory.mktemp("policed") / "access"
    words = ("--learner", "eu-1", "--learner", "us-1", "--series", "held-out")
    assert main(["access", str(made), "--run", RUN, *words]) == 0
    user, password = (made / access.ROOT_USER).read_text().strip(), (made / access.ROOT_PASSWORD).read_text().strip()
    (made / "root").mkdir()
    secret = f"[default]\naws_access_key_id = {user}\naws_secret_access_key = {password}\n"
    (made / "root" / access.CREDENTIALS).write_text(secret)
    arguments = (f"-s3.config={made / access.SEAWEEDFS_FILE}",)
    with s3_server(made.parent / "store", credentials=(user, password), arguments=arguments) as server:

        def of(who: str) -> dict[str, str]:
            file = made / who / access.CREDENTIALS
            return {"AWS_ENDPOINT_URL": server.url, "AWS_REGION": "us-east-1", "AWS_SHARED_CREDENTIALS_FILE": str(file)}

        with closing(administrator(of("root"))) as client:
            client.create_bucket(Bucket=BUCKET)
        yield of


def administrator(environment: dict[str, str]) -> Any:
    """Return a client with an administrator's credentials, independent of Isthmus."""
    lines = Path(environment["AWS_SHARED_CREDENTIALS_FILE"]).read_text().splitlines()
    key, secret = (line.partition("=")[2].strip() for line in lines[1:3])
    keys = {"aws_access_key_id": key, "aws_secret_access_key": secret}
    return boto3.client("s3", endpoint_url=environment["AWS_ENDPOINT_URL"], region_name="us-east-1", **keys)


@pytest.fixture
def as_role(policed: Callable[[str], dict[str, str]], use: Callable[[Server], None]) -> Callable[[str], dict[str, str]]:
    """Return a function that makes this process a user of the store, whose environment it returns."""

    def become(who: str) -> dict[str, str]:
        environment = policed(who)
        use(Server(environment["AWS_ENDPOINT_URL"], None, environment))  # type: ignore[arg-type]
        return environment

    return become


LEARNER = ("--role", "learner", "--learner", "eu-1", "--bus", "sqlite:///dev/shm/none-such/bus")


@row(
    "doctor", "store: run: no run at s3://…",
    means="The bucket can be reached, and there is no run below this prefix.",
    do="correct its address; or, if it is right and there never was a run, create it: isthmus init …; if there was one, bring it "
    "back (is a mount or a disk lost? its processes' logs say)",
    then="`ok store: run`, with the run's digest",
)  # fmt: skip
@pytest.mark.tier("all")
def test_a_bucket_without_a_run(doctor: Doctor, gated: tuple[Gate, str]) -> None:
    text = doctor.finds(f"{gated[1]}-to-come", *ROLE)
    assert main(printed(text.partition("create it:")[2], "init")) == 0
    doctor.finds_no_more(f"{gated[1]}-to-come", *ROLE)


@row(
    "doctor", "store: must not write a commit: not tried: no such object exists yet",
    means="Whether the policy protects a commit is tried on a commit, and there is none.",
    do="run the doctor again once the run is under way", then="`ok store: must not write a commit`",
)  # fmt: skip
@row(
    "doctor", "log: commits: none since the newest snapshots is missing; this role may not list all …",
    means="A learner may not list the log, so only what a newcomer needs was looked for.",
    do="run the doctor with a reader's or a syncer's credentials to check all of them", then="`ok log: commits`",
)  # fmt: skip
@SLOW
async def test_a_run_that_is_not_under_way(
    doctor: Doctor, as_role: Callable[[str], dict[str, str]], tmp_path: Path
) -> None:
    with closing(administrator(as_role("root"))) as client:
        for entry in client.list_objects_v2(Bucket=BUCKET).get("Contents", ()):  # other tests have trained the run
            client.delete_object(Bucket=BUCKET, Key=entry["Key"])
    async with world(RUN, bus=f"sqlite://{tmp_path}/bus") as w:
        as_role("learner-eu-1")
        await asyncio.to_thread(doctor.only("store").finds, RUN, *LEARNER)
        await trained(w)
    text = await asyncio.to_thread(doctor.only("log").finds, RUN, *LEARNER)
    assert "ok      store: must not write a commit" in text
    as_role("reader")
    text = await asyncio.to_thread(doctor.finds_no_more, RUN, "--role", "reader", *LEARNER[4:])
    assert "ok      log: commits: none of " in text


async def trained(w: World) -> None:
    """Let a learner train until each fragment has two versions."""
    async with serving(w.syncer("s1")) as syncer:
        await train(w.learner("us-1"), 4, enough=lambda: min(k.head for k in syncer.coordinators) >= 2)


@pytest.fixture
def under_way(as_role: Callable[[str], dict[str, str]], tmp_path: Path) -> None:
    """The run with some commits, which an earlier test may have made."""

    async def grow() -> None:
        async with world(RUN, bus=f"sqlite://{tmp_path}/bus") as w:
            await trained(w)

    with closing(administrator(as_role("root"))) as client:
        if not client.list_objects_v2(Bucket=BUCKET, Prefix=f"{PREFIX}/commits/").get("Contents"):
            asyncio.run(grow())


@row(
    "doctor", "store: may list: … access denied (AccessDenied) for …, signed with …",
    means="These credentials may not list what this role must list. They may be another participant's.",
    do="use credentials with s3:ListBucket below … (`isthmus access` writes a policy for each role; if `isthmus create` made this run, run that again)",
    then="`ok store: may list`",
)  # fmt: skip
@row(
    "doctor", "store: may write: … access denied (AccessDenied) for …, signed with …",
    means="These credentials may not write what this role must write. They may be another participant's.",
    do="use credentials with s3:PutObject below … (`isthmus access` writes a policy for each role; if `isthmus create` made this run, run that again)",
    then="`ok store: may write`",
)  # fmt: skip
@row(
    "doctor", "store: may read: … refused: … access denied (AccessDenied) for …, signed with …",
    means="These credentials may not read what this role must read. They may be another participant's.",
    do="use the role's own credentials, which `isthmus access` writes: s3:GetObject on what is named here, and "
    "s3:ListBucket (a missing key must be 404, not 403)",
    then="`ok store: may read`",
)  # fmt: skip
@SLOW
@pytest.mark.usefixtures("under_way")
def test_credentials_of_another_participant(doctor: Doctor, as_role: Callable[[str], dict[str, str]]) -> None:
    as_role("learner-us-1")
    doctor.finds(RUN, *LEARNER)
    as_role("learner-eu-1")
    text = doctor.finds_no_more(RUN, *LEARNER)
    for what in ("may list", "may write", "may read"):
        assert f"ok      store: {what}" in text


@row(
    "doctor", "store: may create: … refused: … access denied (AccessDenied) for …, signed with …",
    means="These credentials may not create what this role must create, though they may write elsewhere.",
    do="use credentials with s3:PutObject below … (`isthmus access` writes a policy for each role; if `isthmus create` made this run, run that again)",
    then="`ok store: may create`",
)  # fmt: skip
def test_credentials_that_may_not_create_updates(
    doctor: Doctor, seaweedfs: Server, use: Callable[[Server], None]
) -> None:
    with gate(seaweedfs.url) as there:
        use(replace(seaweedfs, url=there.url, environment={**seaweedfs.environment, "AWS_ENDPOINT_URL": there.url}))
        run = small_run(f"s3://updates-{os.getpid()}/run", make=True)
        there.answers = lambda how, path, _: error("AccessDenied") if how == "PUT" and "/updates/" in path else None
        assert "updates/00000/eu-1/" in doctor.finds(run, *LEARNER)
        there.open()
        assert "ok      store: may create" in doctor.finds_no_more(run, *LEARNER)


@row(
    "doctor", "store: roles: nothing keeps participants apart: these credentials may do all that this role must not",
    means="All participants have the same key of the store, in a run without signatures on this machine: each may do everything.",
    like="With signatures, or a store elsewhere, each of these permissions is a failure: `store: must not …`.",
    do="usual on one machine; else use the role's own credentials, which `isthmus access` and `isthmus create` write",
    then="`ok store: must not …`, with the role's own credentials",
)  # fmt: skip
@pytest.mark.usefixtures("under_way")
def test_one_key_for_all_on_one_machine(doctor: Doctor, as_role: Callable[[str], dict[str, str]]) -> None:
    as_role("root")
    assert "failure store: " not in doctor.finds(RUN, *LEARNER)
    as_role("learner-eu-1")
    assert "ok      store: must not read" in doctor.finds_no_more(RUN, *LEARNER)


@row(
    "doctor", "store: must not read: these credentials may read …",
    means="The credentials may do more than their role needs.",
    do="use the role's own credentials, which `isthmus access` writes", then="`ok store: must not read`",
)  # fmt: skip
@row(
    "doctor", "store: must not write a commit: these credentials may write …",
    means="The credentials may do more than their role needs. With these, a learner could write the log.",
    do="use the role's own credentials, which `isthmus access` writes", then="`ok store: must not write a commit`",
)  # fmt: skip
@SLOW
@pytest.mark.usefixtures("under_way")
@pytest.mark.parametrize("name", [("--learner", "eu-1"), ()], ids=["named", "unnamed"])
def test_credentials_that_may_do_too_much(
    name: tuple[str, ...],
    doctor: Doctor,
    as_role: Callable[[str], dict[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(command, "is_near", lambda _: False)  # a store of this machine is below
    as_role("root")
    text = doctor.finds(RUN, "--role", "learner", *name, *LEARNER[4:])
    kinds = ("read", "list", "delete", "create", "write the run object", "write a commit")
    assert all(f"failure store: must not {what}: " in text for what in kinds)
    as_role("learner-eu-1")
    text = doctor.finds_no_more(RUN, *LEARNER)
    assert all(f"ok      store: must not {what}: " in text for what in kinds)
    assert ": 0 kinds of key" not in text


@row(
    "doctor", "store: must not write for others: anyone who can write in this folder can write all of it, not only a "
    "…'s own objects",
    means="A folder keeps nobody apart.",
    do="if participants do not trust each other, use a bucket with a policy for each (`isthmus access`)",
    then="`ok store: must not write a commit`, and so on for each kind of object",
)  # fmt: skip
@SLOW
@pytest.mark.usefixtures("under_way")
def test_a_folder_that_keeps_nobody_apart(
    doctor: Doctor, folder: Path, as_role: Callable[[str], dict[str, str]]
) -> None:
    doctor.finds(small_run(folder), *LEARNER)
    as_role("learner-eu-1")
    assert "ok      store: must not write a commit" in doctor.finds_no_more(RUN, *LEARNER)


@row(
    "doctor", "store: must not create: not tried: a … has no key of its own to try it on",
    means="This role writes nothing, so the doctor has no place where it could try what a policy forbids.",
    do="run the doctor again with these credentials and another --role: its writes must be refused",
    then="a failure of `store: access` or `store: may write`. If both are ok, the credentials may do too much",
)  # fmt: skip
@SLOW
@pytest.mark.usefixtures("under_way")
def test_a_role_that_writes_nothing(doctor: Doctor, as_role: Callable[[str], dict[str, str]]) -> None:
    as_role("reader")
    doctor.finds(RUN, "--role", "reader", *LEARNER[4:])
    assert "failure store: access: " in doctor.finds_no_more(RUN, "--role", "collector")


@row(
    "doctor", "store: must not write over: these credentials may overwrite objects that are created only once: …",
    means="A participant could destroy what it has written, an update for example that was merged.",
    do="use a policy with s3:if-none-match (AWS only); on other stores, versioning keeps the old objects",
    then="with such a policy `ok store: must not write over`; with versioning the warning stays, and every object can "
    "be restored",
)  # fmt: skip
@SLOW
@pytest.mark.usefixtures("under_way")
def test_objects_that_may_be_overwritten(doctor: Doctor, as_role: Callable[[str], dict[str, str]]) -> None:
    """SeaweedFS knows no such condition. infra/test_aws.py has policies with it."""
    environment = as_role("root")
    with closing(administrator(environment)) as client:
        client.put_bucket_versioning(Bucket=BUCKET, VersioningConfiguration={"Status": "Enabled"})
        key = f"{PREFIX}/updates/00000/eu-1/000000000001-x"
        for body in (b"first", b"second"):
            client.put_object(Bucket=BUCKET, Key=key, Body=body)
        kept = client.list_object_versions(Bucket=BUCKET, Prefix=key)["Versions"]
        bodies = {client.get_object(Bucket=BUCKET, Key=key, VersionId=v["VersionId"])["Body"].read() for v in kept}
        assert bodies == {b"first", b"second"}
        client.put_bucket_versioning(Bucket=BUCKET, VersioningConfiguration={"Status": "Suspended"})
    as_role("learner-eu-1")
    doctor.finds(RUN, *LEARNER)


@row(
    "doctor", "store: TLS: …: passwords and data can be read and changed in transit",
    means="The connection to another machine is not encrypted.",
    do="use an address with https:// (AWS_ENDPOINT_URL); AWS_CA_BUNDLE names a file of your own authorities",
    then="`ok store: access` at the new address, and no more word of it",
)  # fmt: skip
@pytest.mark.tier("all")
def test_a_store_without_tls(
    doctor: Doctor, gated: tuple[Gate, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, run = gated
    monkeypatch.setenv("AWS_ENDPOINT_URL", there.url.replace("127.0.0.1", "0.0.0.0"))  # not known to be this machine
    doctor.finds(run, *ROLE)
    authority = Authority(tmp_path)
    with gate(there.upstream, certificate=authority.certificate("store")) as encrypted:
        monkeypatch.setenv("AWS_ENDPOINT_URL", encrypted.url)
        monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.file))
        assert "ok      store: access" in doctor.finds_no_more(run, *ROLE)


# --- proxies ----------------------------------------------------------------------------------------------------------


@row(
    "doctor", "store: proxy: requests to … go through the proxy …:… (HTTP_PROXY)",
    means="The environment names a proxy for the store's address. What is measured is the way to the proxy.",
    do="if none is wanted, set NO_PROXY=…", then="no more word of it",
)  # fmt: skip
@row(
    "doctor", "store: way: HTTP_PROXY: …: this URL cannot be read (…)",
    means="The variable that names the proxy holds no URL.",
    do="correct HTTP_PROXY", then="`ok store: way`",
)  # fmt: skip
def test_a_proxy(doctor: Doctor, gated: tuple[Gate, str], monkeypatch: pytest.MonkeyPatch) -> None:
    there, run = gated
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://store.test:9000")
    monkeypatch.setenv("HTTP_PROXY", "http://[proxy")
    doctor.only("store: way").finds(run, *ROLE)
    monkeypatch.setenv("HTTP_PROXY", there.url)
    text = doctor.only("store: proxy").finds(run, *ROLE)
    doctor.only("store: way").finds_no_more(run, *ROLE)
    monkeypatch.setenv("NO_PROXY", re.findall(r"set NO_PROXY=(\S+)", text)[0])
    doctor.finds_no_more(run, *ROLE)

"""A run works over TLS when each participant has exactly what the table of permissions grants, and leaks no secret.

The owner, a syncer, two learners and a collector are processes. Their secrets are in files that `isthmus access`
writes. One learner is killed. Command lines, environments, logs, objects and messages are searched for every secret.
"""

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import redis as redis_client

from e2e.island import BUCKET, PREFIX, Island, island_in
from e2e.test_processes import HANGS_S, PACED, wait_for
from isthmus_services.commands import access
from support import forking
from support.forking import Forked

pytestmark = pytest.mark.timeout(600)

STEPS = "400"
SMALL = ("--model", "support.paced:small", "--sync-every", "16", "--fragments", "2")


@pytest.fixture(scope="module")
def island(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Island]:
    with island_in(tmp_path_factory.mktemp("least"), ["eu-1", "us-1"], ["held-out"]) as found:
        yield found


def learner(island: Island, life: str, name: str) -> Forked:
    words = ("learner", "--learner", name, *PACED, STEPS, "--checkpoint", "0.5")
    return island.start(f"{name}-{life}", f"learner-{name}", *words)


def checkpoints(island: Island, name: str) -> list[str]:
    return [key for key in island.held() if key.startswith(f"learners/{name}/") and "/checkpoints/" in key]


@pytest.fixture(scope="module")
def ran(island: Island) -> dict[str, Any]:
    """Create a run, merge, kill a learner and restart it, collect meanwhile, and end the run."""
    # Only the owner may create a run: the syncer is denied, and says so.
    refused = island.do("no-init", "syncer", "init", *SMALL, code=2)
    island.do("init", "owner", "init", *SMALL)
    syncer = island.start("syncer", "syncer", "syncer", "--heartbeat", "0.1")
    island.start("collector", "collector", "gc", "--apply", "--every", "1", "--keep", "64")
    first, other = learner(island, "first", "eu-1"), learner(island, "first", "us-1")
    wait_for(lambda: checkpoints(island, "eu-1") and any(k.startswith("values/") for k in island.held()), "a merge")
    running = {name: command_line(process) for name, process in island.started.items() if process.poll() is None}
    first.kill()
    first.wait()
    again = learner(island, "second", "eu-1")
    for process in (again, other):
        assert process.wait(HANGS_S) == 0, island.said()
    syncer.terminate()
    assert syncer.wait(HANGS_S) == 0, island.said()
    collector = island.started["collector"]
    assert collector.poll() is None, island.said()
    collector.terminate()
    collector.wait()
    return {"refused": refused, "running": running, "replay": island.do("replay", "reader", "replay")}


def command_line(process: Forked) -> tuple[str, str]:
    """Return the command line and the environment of a process, as they can be read in /proc."""
    place = Path(f"/proc/{process.pid}")
    return tuple(  # type: ignore[return-value]
        (place / name).read_bytes().replace(b"\0", b"\n").decode(errors="replace") for name in ("cmdline", "environ")
    )


def test_a_run_goes_through_with_nothing_but_what_the_table_grants(island: Island, ran: dict[str, Any]) -> None:
    assert "0 differ" in ran["replay"]
    assert "access denied" in ran["refused"]
    lives = {key.split("/")[2] for key in island.held() if key.startswith("learners/eu-1/") and key.endswith("claim")}
    assert lives == {"000001", "000002"}, "eu-1 was killed, and continued under its name"
    assert "us-1" in island.do("status", "reader", "status")
    for denied in ("access denied", "NOPERM", "no permissions"):
        running = [p for p in island.folder.glob("*.log") if not p.stem.startswith(("no-init", "refused-"))]
        assert not [p.stem for p in running if denied in p.read_text(errors="replace")], (
            "no process was denied anything"
        )


def test_a_collector_may_do_all_that_collecting_is(island: Island, ran: dict[str, Any]) -> None:
    assert ran["replay"]
    before, report = island.held(), island.folder / "gc.json"
    island.do("gc", "collector", "gc", "--apply", "--min-age", "0", "--keep", "1", "--json", str(report))
    done = json.loads(report.read_text())
    gone = set(before) - set(island.held())
    assert {key.split("/")[0] for key in gone} >= {"updates", "values", "snapshots", "learners"}, done
    assert done["packed"] > 0
    assert any(key.startswith("segments/") for key in island.held())
    assert "0 differ" in island.do("replay-after", "reader", "replay"), "a reader may read packed commits"


@pytest.mark.parametrize(
    ("user", "words", "says"),
    [
        ("reader", ("status", "--ledger"), "us-1"),
        ("reader", ("explain", "0/1"), "commit"),
        ("reader", ("explain", "0"), "fragment"),
        ("reader", ("export", "-o", "{folder}/reader.safetensors"), "reader.safetensors"),
        ("follower-held-out", ("export", "-o", "{folder}/follower.safetensors"), "follower.safetensors"),
        ("follower-held-out", ("follow", "--exec", "echo 0.5", "--series", "held-out", "--mixed", "--cuts", "1"), ""),
        ("syncer", ("heal",), ""),
    ],
)
def test_each_command_needs_no_more_than_whose_it_is(
    island: Island, ran: dict[str, Any], user: str, words: tuple[str, ...], says: str
) -> None:
    assert ran["replay"]
    said = island.do(f"{user}-{words[0]}-{len(island.started)}", user, *(w.format(folder=island.folder) for w in words))
    assert says in said
    if words[0] == "follow":
        assert any(key.startswith("evaluations/held-out/") for key in island.held())


@pytest.mark.parametrize(
    ("user", "words"),
    [
        ("learner-eu-1", ("gc", "--apply", "--min-age", "0")),
        ("follower-held-out", ("replay",)),
        ("reader", ("follow", "--exec", "echo 0.5", "--series", "held-out", "--mixed", "--cuts", "1")),
        ("reader", ("gc", "--apply", "--min-age", "0", "--keep", "1")),
    ],
)
def test_a_command_of_somebody_else_is_refused(
    island: Island, ran: dict[str, Any], user: str, words: tuple[str, ...]
) -> None:
    assert ran["replay"]
    before = set(island.held())
    process = island.start(f"refused-{user}-{words[0]}", user, *words)
    code = process.wait(HANGS_S)
    said = (island.folder / f"refused-{user}-{words[0]}.log").read_text()
    # Replay names the objects that it cannot read, and ends with 1, as it does if something differs.
    assert (code, "access denied" in said) == (1 if words[0] == "replay" else 2, True), (code, said)
    assert set(island.held()) == before


@pytest.mark.parametrize("user", ["owner", "syncer", "collector", "learner-eu-1", "follower-held-out", "reader"])
def test_the_doctor_agrees_over_tls(island: Island, ran: dict[str, Any], user: str) -> None:
    assert ran["replay"]
    kind, _, name = user.partition("-")
    own = {"learner": ("--learner", name), "follower": ("--series", name)}.get(kind, ())
    report = island.folder / f"{user}.json"
    words = ("doctor", "--role", kind, *own, "--size", "0.1", "--json", str(report))
    island.do(f"doctor-{user}", user, *words)
    found = {f["check"]: f["outcome"] for f in json.loads(report.read_text())["findings"]}
    assert "failure" not in found.values(), found
    assert "store: TLS" not in found
    if kind in ("syncer", "learner", "reader"):
        assert found["bus: TLS"] == "ok"
        assert found["bus: must not administer"] == "ok"


def test_no_secret_is_on_a_command_line_in_a_log_an_object_or_a_message(island: Island, ran: dict[str, Any]) -> None:
    secrets = island.secrets()
    assert len(secrets) == len(set(secrets.values())) == 13

    def clean(where: str, text: str) -> None:
        assert not [place for place, secret in secrets.items() if secret in text], where

    assert set(ran["running"]) == {"syncer", "collector", "eu-1-first", "us-1-first"}
    for name, (line, environment) in ran["running"].items():
        clean(f"command line of {name}", line)
        clean(f"environment of {name}", environment)
    for server in (island.store, island.bus):
        clean("a server's command line", Path(f"/proc/{server.process.pid}/cmdline").read_bytes().decode())
    for path in island.folder.rglob("*.log"):
        clean(path.name, path.read_text(errors="replace"))
    looked = 0
    with contextlib.closing(island.administrator()) as s3:
        for key in island.held():
            clean(key, s3.get_object(Bucket=BUCKET, Key=f"{PREFIX}/{key}")["Body"].read().decode("latin-1"))
            looked += 1
    assert looked > 20
    password = secrets[str(island.access / "reader" / access.BUS_PASSWORD)]
    host, _, port = island.bus.url.removeprefix("rediss://").partition(":")
    reader = redis_client.Redis(
        host=host,
        port=int(port),
        username="reader",
        password=password,
        ssl=True,
        ssl_ca_certs=str(island.authority.file),
    )
    with contextlib.closing(reader):
        digest = re.search(r"run ([0-9a-f]{16})", island.do("status", "reader", "status"))
        assert digest is not None
        run = f"isthmus:{digest[1]}"
        streams = [
            name.decode() for name in cast("list[bytes]", reader.zrevrangebyscore(f"{run}:names", "+inf", "-inf"))
        ]
        # The list may have a name without a stream, because the doctor has tried to add one.
        assert {"syncer", "learner/eu-1", "learner/us-1"} <= set(streams)
        for name in streams:
            clean(name, str(reader.xrevrange(f"{run}:{name}")))


@pytest.mark.parametrize(
    ("command", "wrong"),
    [
        (("status",), access.BUS_PASSWORD),
        (("status",), access.CREDENTIALS),
        (("replay",), access.CREDENTIALS),
        (("doctor", "--role", "reader", "--size", "0.1"), access.CREDENTIALS),
        (("doctor", "--role", "reader", "--size", "0.1"), access.BUS_PASSWORD),
        (("status", "--show-settings"), ""),
    ],
)
def test_no_secret_is_in_an_error(
    island: Island, ran: dict[str, Any], command: tuple[str, ...], wrong: str, tmp_path: Path
) -> None:
    """Wrong secrets are not shown either, because they may be right elsewhere."""
    assert ran["replay"]
    environment = island.environment("reader")
    mistaken = "sesame-0123456789abcdef0123456789abcdef"
    if wrong:
        text = (island.access / "reader" / wrong).read_text()
        right = text.rpartition("=")[2].strip()
        (tmp_path / wrong).write_text(text.replace(right, mistaken))
        name = "ISTHMUS_BUS_PASSWORD_FILE" if wrong == access.BUS_PASSWORD else "AWS_SHARED_CREDENTIALS_FILE"
        environment[name] = str(tmp_path / wrong)
    log = tmp_path / "log"
    process = forking.nursery().start([*command], environment, log, log)
    code = process.wait(HANGS_S)
    said = log.read_text()
    assert (code != 0) == bool(wrong) or command[0] == "status", said
    assert said
    assert not [place for place, secret in {**island.secrets(), "wrong": mistaken}.items() if secret in said], said

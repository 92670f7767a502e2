"""`isthmus demo` on a user's own bucket and Redis: the demo signs its run with keys of its own.

The servers are reached at 0.0.0.0. Linux takes this for 127.0.0.1, but it does not count as an address of this machine.
"""

import pydoc_data.topics
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.test_processes import isthmus
from isthmus.log.trust import is_near
from isthmus_services.servers import Server, redis_server

SHORT = ("--learners", "2", "--steps", "24", "--data", pydoc_data.topics.__file__)
PASSWORD = "a word of the user's"


def processes_with(word: str) -> list[str]:
    """Return the command lines of the processes that have a word in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if word.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue  # ended meanwhile, or of another user
    return found


@pytest.fixture
def away(
    seaweedfs: Server, use: Callable[[Server], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> tuple[str, ...]:
    """Return the flags of a short demo in a bucket that does not exist yet."""
    use(seaweedfs)
    monkeypatch.setenv("AWS_ENDPOINT_URL", seaweedfs.url.replace("127.0.0.1", "0.0.0.0"))
    return ("--store", f"s3://own-{uuid.uuid4().hex[:8]}/demo", "--out", str(tmp_path / "out"), *SHORT)


@pytest.mark.timeout(400)
def test_a_demo_in_a_bucket_of_ones_own_signs_its_run(away: tuple[str, ...], tmp_path: Path) -> None:
    store, out = away[1], tmp_path / "out"
    arguments = ("--requirepass", PASSWORD, "--save", "", "--appendonly", "no")
    with redis_server(tmp_path / "redis", arguments=arguments) as redis:
        bus = redis.url.replace("127.0.0.1", "0.0.0.0")
        assert not is_near(store)
        assert not is_near(bus)
        demo = ("demo", *away, "--bus", bus)
        environment = {"ISTHMUS_BUS_PASSWORD": PASSWORD}
        refused = isthmus(*demo, environment=environment)
        assert refused.returncode == 2
        assert refused.stderr.strip().endswith(f"{store}: there is no such bucket: create it, or add --create-bucket")
        done = isthmus(*demo, "--create-bucket", environment=environment, timeout=360)
        logs = "".join(f.read_text() for f in (out / "logs").glob("*.log")) if done.returncode else ""
        assert done.returncode == 0, done.stdout + done.stderr + logs
        again = isthmus(*demo, environment=environment)
        assert f"{store} already holds a run" in again.stderr
    assert "key " + str(out / "keys" / "owner") in done.stdout
    assert "held-out loss, global model" in done.stdout
    assert done.stdout.splitlines()[-1].endswith(f"isthmus board {store} --bus {bus}")
    assert not processes_with(store), "a process outlived the demo"
    names = {"owner", "syncer", "learner-0", "learner-1"}
    modes = {path.name: path.stat().st_mode & 0o777 for path in (out / "keys").iterdir()}
    assert {name for name in modes if not name.endswith(".pub")} == names
    assert {modes[name] for name in names} == {0o600}
    replayed = isthmus("replay", store, "--owner", str(out / "keys" / "owner.pub"))
    assert " 0 differ" in replayed.stdout, replayed.stdout + replayed.stderr
    collected = isthmus("gc", store, "--key", str(out / "keys" / "owner"))
    assert collected.returncode == 0, collected.stderr
    listed = isthmus("members", "list", store)
    assert all(name in listed.stdout for name in ("syncer-*", "learner-0", "learner-1")), listed.stdout


@pytest.mark.tier("test")
def test_a_demo_that_is_refused_keeps_the_keys_of_an_earlier_one(away: tuple[str, ...], tmp_path: Path) -> None:
    key = tmp_path / "out" / "keys" / "owner"
    key.parent.mkdir(parents=True)
    key.touch()
    (key.parents[1] / ".isthmus-demo").write_text('{"made_by": "isthmus demo"}')
    refused = isthmus("demo", *away, "--create-bucket", "--bus", "redis://0.0.0.0:1")
    assert refused.returncode == 2
    assert refused.stderr.startswith("isthmus demo: redis://0.0.0.0:1"), refused.stderr
    assert key.exists()

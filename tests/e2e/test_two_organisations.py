"""Two organisations share a run with the generated permissions, TLS and their own keys; one learner is killed.

Every key, member and file of secrets is made by a command of its own; `isthmus create`, which docs/deploy.md shows, does
the same at once (test_create.py). The first organisation owns the run and runs a syncer. Each organisation has a learner.
"""

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.island import BUCKET, RUN, Island, island_in

pytestmark = pytest.mark.timeout(600)
STEPS = 220


@pytest.fixture(scope="module")
def island(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Island]:
    with island_in(tmp_path_factory.mktemp("shared"), ["eu-1", "us-1"]) as found:
        yield found


class Site:
    """One participant: its environment, its key, and the log of its processes."""

    def __init__(self, island: Island, folder: Path, user: str, key: str = "") -> None:
        self.folder = folder
        self.log = folder / f"{user}.log"
        self.environment = island.environment(user) | {"OMP_NUM_THREADS": "1"}
        if key:
            self.environment["ISTHMUS_KEY"] = str(folder / "keys" / key)

    def start(self, *words: str) -> "subprocess.Popen[bytes]":
        with self.log.open("ab") as out:
            return subprocess.Popen(
                [sys.executable, "-m", "isthmus_services.main", *words], env=self.environment, cwd=self.folder,
                stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            )  # fmt: skip

    def run(self, *words: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "isthmus_services.main", *words], env=self.environment, cwd=self.folder,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        with self.log.open("a") as out:
            out.write(done.stdout + done.stderr)
        assert done.returncode == code, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr


def until(what: str, log: Path, process: "subprocess.Popen[bytes]") -> None:
    end = time.monotonic() + 240
    while not re.search(what, log.read_text(errors="replace")):
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
        assert time.monotonic() < end, f"never said {what}: {log.read_text(errors='replace')[-3000:]}"
        time.sleep(0.1)


def stop(processes: "list[subprocess.Popen[bytes]]") -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()


def ended(process: "subprocess.Popen[bytes]") -> int:
    return process.wait(300)


def test_two_organisations_train_under_the_permissions_with_tls(island: Island, tmp_path: Path) -> None:
    owner = Site(island, tmp_path, "owner", "acme")
    for name in ("acme", "acme-syncer", "acme-eu", "globex-us", "acme-gc", "mallory"):
        owner.run("keys", "new", name, "--folder", "keys")
    said = owner.run("init", "--fragments", "4", "--sync-every", "8")
    assert re.search(r"signed by its owner SHA256:\S+", said)
    for name, role, key in (
        ("eu-1", "learner", "acme-eu"), ("us-1", "learner", "globex-us"), ("syncer-*", "syncer", "acme-syncer"),
        ("gc", "collector", "acme-gc"),
    ):  # fmt: skip
        owner.run("members", "add", RUN, name, "--as", role, "--public-key", f"keys/{key}.pub")
    assert "membership 4" in owner.run("members", "list")

    syncer = Site(island, tmp_path, "syncer", "acme-syncer")
    eu = Site(island, tmp_path, "learner-eu-1", "acme-eu")
    us = Site(island, tmp_path, "learner-us-1", "globex-us")
    stranger = Site(island, tmp_path, "learner-us-1", "mallory")
    with contextlib.ExitStack() as stack:
        processes: list[subprocess.Popen[bytes]] = []
        stack.callback(stop, processes)
        merging = syncer.start("syncer")
        processes.append(merging)
        until(r"serves s3://", syncer.log, merging)
        training = ("--steps", str(STEPS), "--checkpoint", "2")
        first = eu.start("learner", "--learner", "eu-1", *training)
        second = us.start("learner", "--learner", "us-1", *training)
        processes += [first, second]
        for site, process in ((eu, first), (us, second)):
            until(r"joined", site.log, process)
        # The stranger has the passwords of us-1, but the key is not a member's.
        assert "the membership does not name us-1" in stranger.run(
            "learner", "--learner", "us-1", "--steps", "5", code=2
        )
        until(r"commit \d+/1 merges", syncer.log, merging)
        time.sleep(3)  # leave time for a checkpoint to resume from; the test does not judge how much
        first.send_signal(signal.SIGKILL)
        ended(first)
        lines = [Path(f"/proc/{p.pid}/cmdline").read_bytes() for p in (merging, second) if p.poll() is None]
        again = eu.start("learner", "--learner", "eu-1", *training)
        processes.append(again)
        assert ended(again) == 0, eu.log.read_text()[-3000:]
        assert ended(second) == 0, us.log.read_text()[-3000:]
        merging.terminate()
        assert ended(merging) == 0
    assert "(start 2 of this name)" in eu.log.read_text()

    reader = Site(island, tmp_path, "reader")
    status = reader.run("status", "--json", "status.json")
    found = json.loads((tmp_path / "status.json").read_text())
    assert {row["learner"] for row in found["learners"]} == {"eu-1", "us-1"}, status
    assert re.search(r"\d+ commits, 0 differ", reader.run("replay"))
    reader.run("export", "-o", "model.safetensors")
    Site(island, tmp_path, "collector", "acme-gc").run("gc", "--keep", "2", "--min-age", "0", "--apply")
    assert re.search(r"\d+ commits, 0 differ", reader.run("replay", "--from", "1", code=0))

    # No secret is in a command line, in printed output, or in an object.
    secrets = list(island.secrets().values())
    secrets += [
        line
        for path in (tmp_path / "keys").glob("*")
        if path.suffix != ".pub"
        for line in path.read_text().split("\n")[1:-2]
    ]
    assert len(secrets) > 12
    objects = b""
    with contextlib.closing(island.administrator()) as store:
        for page in store.get_paginator("list_objects_v2").paginate(Bucket=BUCKET):
            for entry in page.get("Contents", ()):
                objects += entry["Key"].encode() + store.get_object(Bucket=BUCKET, Key=entry["Key"])["Body"].read()
    printed = b"".join(path.read_bytes() for path in tmp_path.glob("*.log"))
    for secret in filter(None, secrets):
        assert secret.encode() not in objects
        assert secret.encode() not in printed
        assert not any(secret.encode() in line for line in lines)

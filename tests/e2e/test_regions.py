"""A learner uses a store near it, and continues with the run's store while the near server is down."""

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from e2e.test_processes import HANGS_S, PACED, QUIET, wait_for
from isthmus_services import servers
from isthmus_services.servers import Server, s3_server
from support import forking
from support.forking import Forked

pytestmark = pytest.mark.timeout(600)

RUN = "s3://home/run"
STEPS = "600"


class Island:
    """Two stores, a run in the first, and processes that know the second only from the membership."""

    def __init__(self, folder: Path, home: Server) -> None:
        self.folder, self.home = folder, home
        self.started: list[Forked] = []
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "ISTHMUS_"))}
        self.environment = {
            **inherited, **QUIET, **home.environment, "AWS_REGION": "us-east-1", "ISTHMUS_RUN": RUN,
            "ISTHMUS_BUS": f"sqlite://{folder}/bus.sqlite",
        }  # fmt: skip

    def start(self, log: str, key: str, *words: str) -> Forked:
        path = self.folder / f"{log}.log"
        own = {"ISTHMUS_KEY": str(self.folder / "keys" / key)} if key else {}
        process = forking.nursery().start([*words], self.environment | own, path, path)
        self.started.append(process)
        return process

    def do(self, key: str, *words: str) -> str:
        name = f"{len(self.started)}-{words[0]}"
        assert self.start(name, key, *words).wait(HANGS_S) == 0, self.said()
        return (self.folder / f"{name}.log").read_text()

    def said(self) -> str:
        return "".join(f"--- {p.stem}\n{p.read_text(errors='replace')}" for p in sorted(self.folder.glob("*.log")))


def client(url: str) -> Any:
    return boto3.client(
        "s3", endpoint_url=url, region_name="us-east-1",
        aws_access_key_id=servers.ACCESS_KEY, aws_secret_access_key=servers.SECRET_KEY,
    )  # fmt: skip


def keys_at(url: str, bucket: str) -> set[str]:
    with contextlib.closing(client(url)) as s3:
        pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket)
        return {item["Key"].removeprefix("run/") for page in pages for item in page.get("Contents", ())}


@pytest.fixture
def island(tmp_path: Path) -> Iterator[Island]:
    with s3_server(tmp_path / "home") as home:
        found = Island(tmp_path, home)
        try:
            yield found
        finally:
            for process in found.started:
                if process.poll() is None:
                    process.kill()
                process.wait()


def made(url: str, bucket: str) -> None:
    with contextlib.closing(client(url)) as s3:
        s3.create_bucket(Bucket=bucket)


def from_learner(keys: set[str], name: str) -> set[str]:
    return {key for key in keys if key.startswith("updates/") and key.split("/")[2] == name}


def test_a_store_near_a_learner_is_killed_and_comes_back(island: Island, tmp_path: Path) -> None:
    home = island.home.url
    made(home, "home")
    with contextlib.ExitStack() as stack:
        near = stack.enter_context(s3_server(tmp_path / "near"))
        made(near.url, "near")
        for name in ("owner", "syncer", "eu", "us"):
            island.do("", "keys", "new", name, "--folder", str(tmp_path / "keys"))
        island.do("owner", "init", "--model", "support.paced:small", "--sync-every", "8", "--fragments", "2")
        place = f"s3://near/run?endpoint={near.url}"
        for words in (("eu",), ("us", "--bucket", place), ("s-*", "--as", "syncer")):
            key = "syncer" if words[0] == "s-*" else words[0]
            island.do("owner", "members", "add", RUN, *words, "--public-key", str(tmp_path / "keys" / f"{key}.pub"))
        assert "s3://near/run" in island.do("", "members", "list")

        syncer = island.start("syncer", "syncer", "syncer", "--name", "s-1", "--heartbeat", "0.2")
        training = [
            island.start(name, name, "learner", "--learner", name, *PACED, STEPS, "--checkpoint", "1")
            for name in ("eu", "us")
        ]
        wait_for(lambda: len(from_learner(keys_at(near.url, "near"), "us")) > 4, "updates near it")
        assert not from_learner(keys_at(home, "home"), "us")
        assert {key.split("/")[0] for key in keys_at(near.url, "near")} <= {"updates", "values", "snapshots"}
        near.kill()
        wait_for(lambda: len(from_learner(keys_at(home, "home"), "us")) > 2, "updates with the run")
        assert all(process.poll() is None for process in (syncer, *training)), island.said()
        port = int(near.url.rpartition(":")[2])
        near = stack.enter_context(s3_server(tmp_path / "near", port=port))
        for process in training:
            assert process.wait(HANGS_S) == 0, island.said()
        syncer.terminate()
        assert syncer.wait(HANGS_S) == 0, island.said()

        assert re.search(r"\d+ commits, 0 differ", island.do("", "replay"))
        report = tmp_path / "status.json"
        island.do("", "status", "--json", str(report))
        merged = {row["learner"]: row for row in json.loads(report.read_text())["learners"]}
        assert merged.keys() == {"eu", "us"}
        assert "will not be asked first for" in (tmp_path / "us.log").read_text()

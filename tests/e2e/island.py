"""Servers over TLS that hold each participant to its permissions, and processes with a participant's environment."""

import configparser
import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3

from e2e.test_processes import HANGS_S, QUIET
from infra import graph
from isthmus_services.commands import access
from isthmus_services.servers import Server, redis_server, s3_server
from support import forking
from support.authority import Authority
from support.forking import Forked

BUCKET, PREFIX = "least", "team/run"
RUN = f"s3://{BUCKET}/{PREFIX}"


@dataclass
class Island:
    """Servers, the folder that `isthmus access` wrote, and the processes that were started."""

    folder: Path
    access: Path
    authority: Authority
    store: Server
    bus: Server
    started: dict[str, Forked] = field(default_factory=dict)

    def environment(self, user: str) -> dict[str, str]:
        """Return the environment of a participant's process: addresses, and names of files with secrets."""
        own = self.access / user
        told = {
            "AWS_ENDPOINT_URL": self.store.url,
            "AWS_REGION": "us-east-1",
            "AWS_CA_BUNDLE": str(self.authority.file),
            "AWS_SHARED_CREDENTIALS_FILE": str(own / access.CREDENTIALS),
            "ISTHMUS_RUN": RUN,
        }
        if (own / access.BUS_PASSWORD).exists():
            told |= {
                "ISTHMUS_BUS": self.bus.url,
                "ISTHMUS_BUS_CA": str(self.authority.file),
                "ISTHMUS_BUS_USER": (own / access.BUS_USER).read_text().strip(),
                "ISTHMUS_BUS_PASSWORD_FILE": str(own / access.BUS_PASSWORD),
            }
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "ISTHMUS_"))}
        return {**inherited, **QUIET, **told}

    def start(self, name: str, user: str, *words: str) -> Forked:
        log = self.folder / f"{name}.log"
        process = forking.nursery().start([*words], self.environment(user), log, log)
        self.started[name] = process
        return process

    def do(self, name: str, user: str, *words: str, code: int = 0) -> str:
        """Run a command to its end; return its output."""
        process = self.start(name, user, *words)
        assert process.wait(HANGS_S) == code, self.said()
        return (self.folder / f"{name}.log").read_text()

    def said(self) -> str:
        return "".join(f"--- {p.stem}\n{p.read_text(errors='replace')}" for p in sorted(self.folder.glob("*.log")))

    def secrets(self) -> dict[str, str]:
        """Return every secret, by the path of the file that holds it."""
        found = {str(p): p.read_text().strip() for p in self.access.rglob("*password")}
        for path in self.access.rglob(access.CREDENTIALS):
            parsed = configparser.ConfigParser()
            parsed.read_string(path.read_text())
            found[str(path)] = parsed["default"]["aws_secret_access_key"]
        return found

    def administrator(self) -> Any:
        """Return a client that may read the whole bucket."""
        return boto3.client(
            "s3",
            endpoint_url=self.store.url,
            region_name="us-east-1",
            verify=str(self.authority.file),
            aws_access_key_id=(self.access / access.ROOT_USER).read_text().strip(),
            aws_secret_access_key=(self.access / access.ROOT_PASSWORD).read_text().strip(),
        )

    def held(self) -> list[str]:
        with contextlib.closing(self.administrator()) as s3:
            pages = s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
            return [item["Key"].removeprefix(f"{PREFIX}/") for page in pages for item in page.get("Contents", ())]


@contextlib.contextmanager
def island_in(folder: Path, learners: Sequence[str], series: Sequence[str] = ()) -> Iterator[Island]:
    """Run Redis 7 and SeaweedFS, both over TLS only and with the permissions of every participant."""
    binary = graph.redis_7()
    authority, made = Authority(folder), folder / "access"
    made.mkdir()
    access.prepare(made, learners, series, (BUCKET, PREFIX))
    root = (made / access.ROOT_USER).read_text().strip(), (made / access.ROOT_PASSWORD).read_text().strip()
    acl = ("--aclfile", str(made / access.ACL_FILE), "--maxmemory", "64mb")
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(
            s3_server(
                folder / "store",
                credentials=root,
                arguments=(f"-s3.config={made / access.SEAWEEDFS_FILE}",),
                certificate=authority.certificate("store"),
            )
        )
        bus = stack.enter_context(
            redis_server(
                folder / "bus",
                binary=binary,
                settings=made / access.SETTINGS_FILE,
                arguments=acl,
                certificate=authority.certificate("bus"),
            )
        )
        there = Island(folder, made, authority, store, bus)
        with contextlib.closing(there.administrator()) as s3:
            s3.create_bucket(Bucket=BUCKET)
        try:
            yield there
        finally:
            for process in there.started.values():
                if process.poll() is None:
                    process.kill()
                process.wait()

"""`isthmus doctor` finds real servers healthy. What it says of others, and whether its advice works, is in `tests/advice`."""

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from advice.gate import gate
from e2e.test_processes import isthmus
from isthmus.bus.redis import ServerFacts
from isthmus.doctor import FAILURE, OK, WARNING, Finding, Role, RoleKind, examine_open_store
from isthmus.doctor.bus import judge
from isthmus.errors import Denied
from isthmus.format.records.frame import Blob
from isthmus.log.run import Run
from isthmus.runtime.clock import Runtime, single_threaded
from isthmus.store import EdgeStore, Layer, open_store, require_create_only
from isthmus_services.main import main
from isthmus_services.servers import Server, s3_server
from support.world import world

pytestmark = pytest.mark.tier("test")

SMALL = ("--size", "0.25")


def doctor(
    *arguments: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[int, dict[str, dict[str, str]]]:
    """Run the command as a user does; return its exit code and its findings by check."""
    report = tmp_path / "doctor.json"
    code = main(["doctor", *arguments, *SMALL, "--json", str(report)])
    said = capsys.readouterr().out
    findings = json.loads(report.read_text())["findings"]
    for finding in findings:
        assert finding["said"] in said
        assert finding["advice"] or finding["outcome"] == OK, "each problem comes with advice"
    return code, {f["check"]: f for f in findings}


def failures(found: dict[str, dict[str, str]]) -> dict[str, str]:
    return {check: f["said"] for check, f in found.items() if f["outcome"] == FAILURE}


# --- healthy places ---------------------------------------------------------------------------------------------------


def test_a_folder_is_healthy(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(folder)]) == 0
    code, found = doctor(str(folder), tmp_path=tmp_path, capsys=capsys)
    assert code == 0
    # Whether a machine calls itself loopback is its own affair.
    assert {name for name, f in found.items() if f["outcome"] != OK} - {"machine: own name"} == {"run: bus"}
    assert not list((folder / "scratch").iterdir()), "the doctor deletes its test objects"


def test_an_s3_server_and_a_redis_are_healthy_and_nothing_is_left_behind(
    seaweedfs: Server, redis: Server, use: Callable[[Server], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use(seaweedfs)
    assert main(["init", "s3://doctor/run", "--create-bucket"]) == 0
    code, found = doctor("s3://doctor/run", "--bus", redis.url, tmp_path=tmp_path, capsys=capsys)
    assert code == 0, failures(found)
    assert found["store: conditional PUT"]["outcome"] == OK
    assert re.search(r"MB/s up, .* MB/s down", found["store: bandwidth"]["said"])
    for what in ("store: way", "bus: way"):
        assert re.search(r"^127\.0\.0\.1, .* from 127\.0\.0\.1 by lo \(MTU \d+\)", found[what]["said"])
    assert found["bus: version"]["said"].startswith("Redis ")
    assert found["bus: persistence"]["outcome"] == WARNING, "this Redis persists nothing"

    async def left() -> int:
        async with open_store("s3://doctor/run", single_threaded()) as store:
            return len(await store.list("scratch/"))

    assert asyncio.run(left()) == 0


# --- broken places ----------------------------------------------------------------------------------------------------


def test_no_permission_to_create(
    tmp_path: Path, use: Callable[[Server], None], capsys: pytest.CaptureFixture[str]
) -> None:
    identities = [
        {"name": who, "credentials": [{"accessKey": who, "secretKey": who * 3}], "actions": actions}
        for who, actions in (("owner", ["Admin", "Read", "List", "Write"]), ("reader", ["Read", "List"]))
    ]
    (tmp_path / "s3.json").write_text(json.dumps({"identities": identities}))
    config = (f"-s3.config={tmp_path / 's3.json'}",)
    with s3_server(tmp_path, credentials=("owner", "owner" * 3), arguments=config) as server:
        use(server)
        assert main(["init", "s3://shared/run", "--create-bucket"]) == 0
        as_reader = {"AWS_ACCESS_KEY_ID": "reader", "AWS_SECRET_ACCESS_KEY": "reader" * 3}
        use(Server(server.url, server.process, {**server.environment, **as_reader}))
        code, found = doctor("s3://shared/run", "--bus", f"sqlite://{tmp_path}/bus", tmp_path=tmp_path, capsys=capsys)
        assert code == 1
        assert "access denied" in failures(found)["store: may write"]
        assert found["store: run"]["outcome"] == OK, "reading is allowed"
        refused = isthmus("syncer", "s3://shared/run", "--bus", f"sqlite://{tmp_path}/bus")
        assert refused.returncode == 2
        assert "access denied" in refused.stderr


def test_a_syncer_refuses_a_store_without_conditional_put(
    moto: Server, redis: Server, use: Callable[[Server], None]
) -> None:
    use(moto)
    assert main(["init", "s3://once-good/run", "--create-bucket"]) == 0
    with gate(moto.url) as there:
        there.without = {"if-none-match"}
        done = isthmus("syncer", "s3://once-good/run", "--bus", redis.url, environment={"AWS_ENDPOINT_URL": there.url})
    assert done.returncode == 2
    assert "does not honour create-only PUT" in done.stderr


def test_the_failures_are_said_again_above_the_last_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(folder), "--bus", "redis://127.0.0.1:1", "--owner", "nothing", *SMALL]) == 1
    report, again = re.split(r"^(?=\d+ failures?, to look at first:$)", capsys.readouterr().out, flags=re.MULTILINE)
    found = re.findall(r"^failure .*\n {8}→ .*\n", report, re.MULTILINE)
    assert len(found) == 2, report
    head, *lines, summary = again.splitlines(keepends=True)
    assert head == "2 failures, to look at first:\n"
    assert lines == [*"".join(found).splitlines(keepends=True), "\n"]
    assert summary.endswith(", 2 failures\n")
    assert main(["init", str(folder)]) == 0
    capsys.readouterr()
    assert main(["doctor", str(folder), *SMALL]) == 0
    assert "to look at first" not in capsys.readouterr().out


class Racy(Layer):
    """A store that looks first and writes later: correct for one client, wrong for several."""

    async def create(self, key: str, data: Blob) -> bool:
        if any(e.key == key for e in await self._store.list(key.rpartition("/")[0] + "/")):
            return False
        await asyncio.sleep(0.01)
        await self._store.put(key, data)
        return True


async def test_a_store_that_loses_races_is_found_out(folder: Path) -> None:
    async with world(folder) as w:
        store = EdgeStore(Racy(w.store), w.runtime)
        found = await findings(store, w.runtime)
        assert "is not atomic" in found["store: conditional PUT"].said
        with pytest.raises(Denied, match="is not atomic"):
            await require_create_only(store, w.runtime)


async def findings(store: EdgeStore, runtime: Runtime, role: Role | None = None) -> dict[str, Finding]:
    given = examine_open_store(store, role or Role(RoleKind.OPERATOR), runtime, 1 << 16)
    return {f.check: f async for f in given if not isinstance(f, Run)}


# --- single checks ----------------------------------------------------------------------------------------------------

GOOD = ServerFacts((7, 2, 16), False, "standalone", "master", True, "noeviction", 1 << 30, 1 << 20, 0.0)


def changed(**facts: object) -> dict[str, str]:
    given = {name: getattr(GOOD, name) for name in GOOD.__dataclass_fields__} | facts
    return {f.check: f.outcome for f in judge(ServerFacts(**given)) if f.outcome != OK}


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, {}),
        ({"version": (5, 0, 14)}, {"bus: version": FAILURE}),
        ({"version": (6, 2, 14)}, {"bus: version": WARNING}),
        ({"version": (7, 0, 15)}, {"bus: version": WARNING}),
        ({"version": (7, 2, 15)}, {"bus: version": WARNING}),
        ({"version": (7, 4, 11)}, {}),
        ({"version": (7, 4, 10)}, {"bus: version": WARNING}),
        ({"version": (8, 0, 9)}, {"bus: version": WARNING}),
        ({"version": (8, 6, 6)}, {}),
        ({"version": (8, 8, 1)}, {"bus: version": WARNING}),
        ({"version": (8, 8, 2)}, {}),
        ({"version": (9, 0, 0)}, {}),
        ({"version": (8, 1, 0), "valkey": True}, {}),
        ({"mode": "cluster"}, {"bus: mode": FAILURE}),
        ({"role": "slave"}, {"bus: mode": FAILURE}),
        ({"append_only": False}, {"bus: persistence": WARNING}),
        ({"eviction_policy": "volatile-lru"}, {"bus: eviction": FAILURE}),
        ({"eviction_policy": "volatile-lru", "memory_max": 0}, {"bus: eviction": WARNING, "bus: memory": WARNING}),
        ({"memory_used": 900 << 20}, {"bus: memory": WARNING}),
        ({"memory_used": 1 << 30}, {"bus: memory": FAILURE}),
        ({"memory_max": 0}, {"bus: memory": WARNING}),
    ],
)
def test_what_a_server_says_of_itself_is_judged(facts: dict[str, object], expected: dict[str, str]) -> None:
    assert changed(**facts) == expected

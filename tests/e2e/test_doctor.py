"""`isthmus doctor` finds real servers healthy, and names the fault of servers that are broken in one way each."""

import asyncio
import json
import os
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from e2e.test_processes import isthmus
from isthmus.bus.redis import ServerFacts
from isthmus.codecs.kernels import ARITHMETIC
from isthmus.doctor import FAILURE, NOTE, OK, WARNING, Finding, Role, RoleKind, examine_bus, examine_open_store
from isthmus.doctor.bus import judge
from isthmus.doctor.findings import CheckOutcome
from isthmus.doctor.machine import BITS, examine_machine, fingerprint
from isthmus.errors import Denied
from isthmus.format.records.frame import Blob, Data
from isthmus.log.run import Run
from isthmus.runtime.clock import Runtime, single_threaded
from isthmus.store import EdgeStore, Layer, open_store, require_create_only
from isthmus_services.main import main
from isthmus_services.servers import Server, redis_server, s3_server
from support.world import world

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
    assert {f["outcome"] for f in found.values()} == {OK}
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


def test_a_run_that_is_not_there_yet_is_a_warning(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = doctor(str(folder), tmp_path=tmp_path, capsys=capsys)
    assert code == 0
    assert found["store: run"]["advice"] == "create it: isthmus init"
    assert "does not exist yet" in found["bus: access"]["said"]
    assert not folder.exists(), "the doctor does not create the folder"


def test_a_folder_around_a_run_names_it(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(folder)]) == 0
    _, found = doctor(str(folder.parent), tmp_path=tmp_path, capsys=capsys)
    assert found["store: run"]["said"].endswith(f"no run here; did you mean {folder}?")
    assert found["store: run"]["advice"] == f"name {folder}"


BUCKETS_OWN = re.compile(r"s3:|bucket|AWS|credential|ACL|password|TLS|region", re.IGNORECASE)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(folder)]) == 0
    folder.chmod(0o500)
    try:
        code, found = doctor(str(folder), tmp_path=tmp_path, capsys=capsys)
    finally:
        folder.chmod(0o700)
    assert code == 1
    assert set(failures(found)) == {"store: may write", "bus: access"}
    for check in failures(found):
        assert str(folder) in found[check]["advice"]
        assert not BUCKETS_OWN.search(found[check]["advice"])


class Refusing(Layer):
    """A folder's store that denies writes and listings, as a disk may."""

    async def put(self, key: str, data: Data) -> None:
        raise Denied(f"{self.url}: Permission denied: {key}")

    async def list(self, prefix: str) -> NoReturn:
        raise Denied(f"{self.url}: Permission denied: {prefix}")


async def test_advice_for_a_folder_speaks_of_folders(folder: Path) -> None:
    async with world(folder) as w:
        found = await findings(EdgeStore(Refusing(w.store), w.runtime), w.runtime)
    for check in ("store: may write", "store: may list"):
        assert found[check].outcome == FAILURE
        assert f"{folder}/scratch" in found[check].advice
        assert not BUCKETS_OWN.search(found[check].advice)


def test_advice_for_a_bus_in_a_file_speaks_of_files(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", str(folder)]) == 0
    (tmp_path / "bus").mkdir()
    code, found = doctor(str(folder), "--bus", f"sqlite://{tmp_path}/bus", tmp_path=tmp_path, capsys=capsys)
    assert code == 1
    assert f"let this user write {tmp_path}/bus" in found["bus: access"]["advice"]
    assert not BUCKETS_OWN.search(found["bus: access"]["advice"])


# --- broken places ----------------------------------------------------------------------------------------------------


def test_no_bucket(
    seaweedfs: Server, redis: Server, use: Callable[[Server], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use(seaweedfs)
    code, found = doctor("s3://no-such-bucket/run", "--bus", redis.url, tmp_path=tmp_path, capsys=capsys)
    assert code == 1
    assert "there is no such bucket" in failures(found)["store: access"]
    assert found["store: access"]["advice"] == "create it: isthmus init s3://no-such-bucket/run --create-bucket"


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


class Deaf:
    """A proxy that removes the condition from each request, in front of a server that checks no signatures."""

    def __init__(self, upstream_port: int) -> None:
        self._upstream = upstream_port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> str:
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(10)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def _close(self) -> None:
        self._server.close()
        serving = asyncio.all_tasks() - {asyncio.current_task()}
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        await asyncio.sleep(0)  # closed transports release their sockets in the next iteration of the loop

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._upstream)

        async def carry(source: asyncio.StreamReader, target: asyncio.StreamWriter, *, change: bool) -> None:
            while data := await source.read(1 << 16):
                # The replacement has the same length, so nothing else in the request changes.
                target.write(re.sub(rb"(?i)\r\nif-none-match: \*", b"\r\nx-nothing-here: *", data) if change else data)
                await target.drain()
            target.close()

        try:
            await asyncio.gather(
                carry(reader, up_writer, change=True), carry(up_reader, writer, change=False), return_exceptions=True
            )
        finally:
            up_writer.close()
            writer.close()


def test_no_conditional_put(
    moto: Server, redis: Server, use: Callable[[Server], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Deaf(int(moto.url.rpartition(":")[2])) as url:
        use(replace(moto, url=url, environment={**moto.environment, "AWS_ENDPOINT_URL": url}))
        assert main(["init", "s3://deaf/run", "--create-bucket"]) == 2
        assert "does not honour create-only PUT" in capsys.readouterr().err
        code, found = doctor("s3://deaf/run", "--bus", redis.url, tmp_path=tmp_path, capsys=capsys)
        assert code == 1
        assert "a second create-only PUT" in failures(found)["store: conditional PUT"]


def test_a_syncer_refuses_a_store_without_conditional_put(
    moto: Server, redis: Server, use: Callable[[Server], None]
) -> None:
    use(moto)
    assert main(["init", "s3://once-good/run", "--create-bucket"]) == 0
    with Deaf(int(moto.url.rpartition(":")[2])) as url:
        done = isthmus("syncer", "s3://once-good/run", "--bus", redis.url, environment={"AWS_ENDPOINT_URL": url})
    assert done.returncode == 2
    assert "does not honour create-only PUT" in done.stderr


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


@pytest.mark.parametrize(("off_s", "outcome"), [(0.0, OK), (60.0, WARNING), (-3600.0, FAILURE)])
async def test_a_skewed_clock(
    off_s: float, outcome: CheckOutcome, moto: Server, redis: Server, use: Callable[[Server], None]
) -> None:
    """Run the doctor with a clock that is off; the servers' clocks are right."""
    use(moto)
    right = single_threaded()
    off = Runtime(right.now, lambda: right.wall() + off_s, right.random, right.offload, right.new_id)
    async with open_store("s3://clock/run", off, make=True) as store:
        found = await findings(store, off)
    async for finding in examine_bus(redis.url, bytes(32), Role(RoleKind.OPERATOR), off):
        found[finding.check] = finding
    for check in ("store: clock", "bus: clock"):
        assert found[check].outcome == outcome, found[check]
        assert ("NTP" in found[check].advice) == (outcome != OK)
    assert ("ahead of" in found["bus: clock"].said) == (off_s > 0)


def test_redis_evicts(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evicting = ("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru", "--appendonly", "yes")
    with redis_server(tmp_path, arguments=evicting) as server:
        code, found = doctor(str(folder), "--bus", server.url, tmp_path=tmp_path, capsys=capsys)
    assert code == 1
    assert list(failures(found)) == ["bus: eviction"]
    assert found["bus: eviction"]["said"] == "allkeys-lru at 67 MB"
    assert found["bus: persistence"]["outcome"] == OK


def test_redis_cannot_be_reached(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = doctor(str(folder), "--bus", "redis://127.0.0.1:9", tmp_path=tmp_path, capsys=capsys)
    assert code == 1
    assert "127.0.0.1:9" in failures(found)["bus: access"]
    assert found["bus: way"]["said"] == "127.0.0.1:9 cannot be reached: 127.0.0.1: connection refused"


def test_a_name_that_nobody_knows(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, found = doctor(str(folder), "--bus", "redis://bus.invalid", tmp_path=tmp_path, capsys=capsys)
    assert found["bus: way"]["said"].startswith("the name bus.invalid cannot be resolved: ")


def test_redis_wants_another_password(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISTHMUS_BUS_PASSWORD", "sesame-secret")
    with redis_server(tmp_path, arguments=("--requirepass", "another", "--save", "")) as server:
        code, found = doctor(str(folder), "--bus", server.url, tmp_path=tmp_path, capsys=capsys)
    assert code == 1
    assert "refuses the one it got" in failures(found)["bus: access"]
    assert "sesame-secret" not in json.dumps(found), "passwords are never shown"


def test_whoever_may_do_too_much_is_told(
    seaweedfs: Server, redis: Server, use: Callable[[Server], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use(seaweedfs)
    assert main(["init", "s3://too-much/run", "--create-bucket"]) == 0
    arguments = ("s3://too-much/run", "--bus", redis.url, "--role", "learner", "--learner", "eu-1")
    code, found = doctor(*arguments, tmp_path=tmp_path, capsys=capsys)
    assert code == 1
    of_store = {f"store: must not {what}" for what in ("write the run object", "read", "list", "create", "delete")}
    assert set(failures(found)) == of_store | {"bus: must not write for others", "bus: must not administer"}


@pytest.mark.parametrize("role", ["learner", "syncer"])
def test_what_a_folder_cannot_restrict_is_a_note(
    role: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", str(folder)]) == 0
    code, found = doctor(str(folder), "--role", role, "--learner", "eu-1", tmp_path=tmp_path, capsys=capsys)
    assert code == 0, failures(found)
    notes = [check for check, f in found.items() if f["outcome"] == NOTE and not check.startswith("machine: ")]
    assert notes == ["store: must not write for others", "bus: must not write for others"]


def test_an_address_of_another_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = doctor("ftp://x/y", "--bus", "amqp://z", tmp_path=tmp_path, capsys=capsys)
    assert code == 1
    assert set(failures(found)) == {"store: address", "bus: address"}


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
        ({"memory_max": 0}, {"bus: memory": WARNING}),
    ],
)
def test_what_a_server_says_of_itself_is_judged(facts: dict[str, object], expected: dict[str, str]) -> None:
    assert changed(**facts) == expected


def test_kernels_that_give_other_bits_are_a_failure(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    assert fingerprint() == BITS[ARITHMETIC]
    monkeypatch.setattr("isthmus.doctor.machine.fingerprint", lambda: "0" * 64)
    found = {f.check: f for f in examine_machine(folder, Role(RoleKind.SYNCER), single_threaded())}
    assert found["machine: kernels"].outcome == FAILURE
    assert "machine: torch" not in found, "a syncer needs no torch"


def test_a_full_disk_is_a_failure(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr("isthmus.doctor.machine.DISK_FAILURE", 1 << 60)
    monkeypatch.setattr("isthmus.doctor.machine.DISK_WARNING", 1 << 60)
    found = {f.check: f for f in examine_machine(folder, Role(RoleKind.SYNCER), single_threaded())}
    assert found["machine: disk"].outcome == FAILURE

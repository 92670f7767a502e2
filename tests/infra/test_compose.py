"""compose.yaml and the image are valid and hardened, and their services work (as processes, see graph.py)."""

import asyncio
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from infra import graph
from isthmus.agent.ports import open_log
from isthmus.codecs.kernels import levels
from isthmus.doctor import Role, RoleKind, examine_bus
from isthmus.inspect import replay as replays
from isthmus.log import Commit
from isthmus.runtime.clock import single_threaded
from isthmus.runtime.metrics import LearnerMetrics, SyncerMetrics
from isthmus_services.commands import access
from isthmus_services.demo import judge
from isthmus_services.servers import free_ports
from isthmus_services.settings.command import installed
from isthmus_services.settings.resolve import fields

ROOT = graph.ROOT
INFRA = ROOT / "infra"
GOES_ON_S = 240.0
COMMITTED = r"isthmus_commits_total\{[^}]*\} [1-9]"
TOLD_TO_STOP = 128 + signal.SIGTERM

LEARNERS = ("learner-a", "learner-b", "learner-c", "learner-d")

pytestmark = pytest.mark.timeout(600)


def compose() -> dict[str, Any]:
    return graph.load({})


# --- the text ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "schema"),
    [
        ("compose.yaml", "vendor.compose-spec"),
        ("infra/compose/seaweedfs.yaml", "vendor.compose-spec"),
        (".github/workflows/test.yaml", "vendor.github-workflows"),
    ],
)
def test_it_is_valid_by_its_specification(file: str, schema: str) -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, str(ROOT / file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_images_recipe_passes_its_linter() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([hadolint, INFRA / "images" / "Dockerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_service_is_hardened_limited_and_pinned() -> None:
    for name, spec in compose().items():
        assert spec["user"] == "10001:10001", name
        assert spec["read_only"] is True, name
        assert spec["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in spec["security_opt"], name
        limits = spec["deploy"]["resources"]["limits"]
        assert {"cpus", "memory"} <= set(limits), name
        _, _, tag = spec["image"].rpartition(":")
        assert re.search(r"\d", tag), f"{name}: {spec['image']} is not pinned"
        for port in spec.get("ports", ()):
            assert port.startswith("127.0.0.1:"), f"{name} would be reachable from outside"


def test_another_store_is_one_variable_away() -> None:
    text = (ROOT / "compose.yaml").read_text()
    assert "MinIO is archived" in text
    assert re.search(r"OBJECT_STORE_IMAGE=\S+/silo:", text)
    (files,) = re.findall(r"COMPOSE_FILE=(\S+)", text)
    assert "infra/compose/seaweedfs.yaml" in files
    assert all((ROOT / file).exists() for file in files.split(":"))
    assert text.count("image: ${OBJECT_STORE_IMAGE:-") == 2, "the server, and the client that makes its users"


def test_it_fits_a_laptop() -> None:
    total = 0.0
    for spec in compose().values():
        memory = spec["deploy"]["resources"]["limits"]["memory"]
        size = float(memory[:-1]) * {"m": 1 / 1024, "g": 1.0}[memory[-1]]
        total += size * spec["deploy"].get("replicas", 1) * ("tools" not in spec.get("profiles", ()))
    assert total <= 12.0, f"{total:.1f} GiB at most"


def test_what_runs_for_long_has_a_health_check_and_time_to_stop() -> None:
    for name, spec in compose().items():
        if spec.get("restart") == "unless-stopped" or name in ("syncer", "board", *LEARNERS):
            assert spec["healthcheck"]["test"], name
    for name in ("syncer", *LEARNERS, "redis", "object-store"):
        assert float(compose()[name]["stop_grace_period"].removesuffix("s")) >= 20, name


def test_each_service_is_given_its_own_secrets_and_no_others() -> None:
    """An attacker who gets into one container gets the secrets of one participant only."""
    sees = {}
    for name, spec in compose().items():
        mounts = [v for v in spec.get("volumes", ()) if isinstance(v, dict) and v["source"] == "secrets"]
        sees[name] = {v["volume"].get("subpath") for v in mounts}
        for v in mounts:
            assert v["read_only"] is True, name
            assert v["target"] == f"/run/isthmus/{v['volume']['subpath']}", name
        used = re.findall(r"/run/isthmus/([\w-]+)/", json.dumps([spec.get(k) for k in ("environment", "command")]))
        assert set(used) <= sees[name] or name == "prepare", name
    own = {user: {user} for user in ("syncer", "collector", *LEARNERS)}
    assert {name: seen for name, seen in sees.items() if seen} == own | {
        "init": {"owner"},
        "tools": {"reader"},
        "board": {"reader"},
        "object-store": {"store"},
        "store-users": {"store", "policies"},
        "redis": {"redis", "reader"},
        "grafana": {"grafana"},
    }
    written = set(compose()["prepare"]["command"])
    assert {f"--learner={name[-1]}" for name in LEARNERS} <= written
    assert f"--run={compose()['init']['environment']['ISTHMUS_RUN']}" in written


def test_users_of_the_store_are_made_without_a_secret_on_a_command_line(tmp_path: Path) -> None:
    """The script runs with a stand-in for MinIO's client that records its arguments. It is not tested on a MinIO."""
    access.prepare(tmp_path / "access", ["a"], ["held-out"], ("isthmus", "demo"))
    programs, said = tmp_path / "bin", tmp_path / "said"
    programs.mkdir()
    (programs / "mc").write_text(
        "#!/bin/sh\n"
        'echo "$*" >> "$SAID.lines"\n'
        'case "$*" in "admin user add store") cat >> "$SAID.users" ;; esac\n'
        'echo "$MC_HOST_store" >> "$SAID.host"\n'
        'case "$*" in *attach*reader*) echo "mc: the policy change is already in effect"; exit 1 ;; esac\n'
    )
    (programs / "mc").chmod(0o755)
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "SAID": str(said)}
    environment["ISTHMUS_ACCESS"] = str(tmp_path / "access")
    script = [str(INFRA / "compose" / "store-users.sh"), "http://object-store:9000", "isthmus"]
    for times in (1, 2):
        done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        users = (tmp_path / "access" / access.USERS_FILE).read_text().split()
        assert (tmp_path / "said.users").read_text().split() == users * times, (
            "names and secrets must come by standard input"
        )
    lines = (tmp_path / "said.lines").read_text().splitlines()
    assert lines[0] == "mb --ignore-existing store/isthmus"
    for name, secret in zip(users[::2], users[1::2], strict=True):
        assert f"admin policy attach store {name} --user {name}" in lines
        policy = tmp_path / "access" / "policies" / "minio" / f"{name}.json"
        assert f"admin policy create store {name} {policy}" in lines
        assert policy.is_file()
        assert secret not in "".join(lines) + done.stdout + done.stderr
    root = (tmp_path / "access" / access.ROOT_PASSWORD).read_text().strip()
    assert set((tmp_path / "said.host").read_text().split()) == {f"http://{access.ROOT}:{root}@object-store:9000"}
    assert root not in "".join(lines)
    (programs / "mc").write_text(
        '#!/bin/sh\ncase "$*" in *attach*) echo "mc: no such user"; exit 1 ;; *) cat ;; esac\n'
    )
    assert subprocess.run(script, env=environment, capture_output=True, check=False).returncode == 1


def test_shellcheck_finds_nothing_in_it() -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run(
        [shellcheck, INFRA / "compose" / "store-users.sh"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_no_secret_is_in_it() -> None:
    for name, spec in compose().items():
        for variable, value in spec.get("environment", {}).items():
            if re.search("PASSWORD|SECRET|TOKEN|CREDENTIAL", variable):
                assert str(value).startswith("/run/isthmus/"), f"{name}: {variable} must name a file"
    assert not re.search(r"://[^/\s]*:[^/\s]*@", (ROOT / "compose.yaml").read_text()), "a password in a URL"


def test_users_of_the_store_are_made_again_only_if_they_changed(tmp_path: Path) -> None:
    access.prepare(tmp_path / "access", ["a"], [], ("isthmus", "demo"))
    (tmp_path / "mc").write_text('#!/bin/sh\necho "$*" >> "$SAID"\n')
    (tmp_path / "mc").chmod(0o755)
    said = tmp_path / "said"
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SAID": str(said)}
    environment["ISTHMUS_ACCESS"] = str(tmp_path / "access")
    script = [str(INFRA / "compose" / "store-users.sh"), "http://object-store:9000", "isthmus", str(tmp_path / "done")]

    def calls() -> int:
        said.unlink(missing_ok=True)
        subprocess.run(script, env=environment, check=True)
        return len(said.read_text().splitlines()) if said.exists() else 0

    users = len((tmp_path / "access" / access.USERS_FILE).read_text().splitlines())
    assert [calls(), calls()] == [1 + 3 * users, 0]
    access.prepare(tmp_path / "access", ["a", "b"], [], ("isthmus", "demo"))
    assert [calls(), calls()] == [1 + 3 * (users + 1), 0]
    script[2] = "other"
    assert calls() == 1 + 3 * (users + 1)


def test_a_service_that_ended_well_is_skipped_when_it_is_started_again(tmp_path: Path) -> None:
    (tmp_path / "isthmus").write_text('#!/bin/sh\necho "ran $*"\nexit "${FAILS:-0}"\n')
    (tmp_path / "isthmus").chmod(0o755)
    (tmp_path / "kernels").mkdir()
    packages = tmp_path / "packages"
    packages.write_text("isthmus 1")
    marks = [tmp_path / "secrets" / "done", tmp_path / "objects" / "done"]
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "KERNELS": str(tmp_path / "kernels")}
    environment |= {"NUMBA_CACHE_DIR": str(tmp_path / "copied"), "PACKAGES": str(packages)}
    environment["DONE"] = " ".join(map(str, marks))

    def runs(*words: str, **more: str) -> bool:
        script = [str(INFRA / "images" / "entrypoint.sh"), *words]
        done = subprocess.run(script, env=environment | more, capture_output=True, text=True, check=False)
        assert done.returncode == int(more.get("FAILS", 0)), done.stderr
        return f"ran {' '.join(words)}" in done.stdout

    assert [runs("access", "a", FAILS="3"), runs("access", "a"), runs("access", "a")] == [True, True, False]
    assert [runs("access", "a", "b"), runs("access", "a", "b")] == [True, False]
    packages.write_text("isthmus 2")
    assert [runs("access", "a", "b"), runs("access", "a", "b")] == [True, False]
    for mark in marks:
        mark.unlink()
        assert [runs("access", "a", "b"), runs("access", "a", "b")] == [True, False], f"{mark} was lost"
    assert [runs("access", "a", "b", DONE=""), runs("access", "a", "b", DONE="")] == [True, True]


def test_its_commands_and_variables_exist() -> None:
    by_name = {c.name: c for c in installed()[0]}
    for name, spec in compose().items():
        if spec["image"] != graph.OURS:
            continue
        command = by_name[spec["command"][0]]
        known = {s.variable for s in fields(command.settings)}
        given = {v for v in spec.get("environment", {}) if v.startswith("ISTHMUS_")}
        # A service may ignore a variable that all services share. It must know every other variable that it has.
        shared = {"ISTHMUS_RUN", "ISTHMUS_BUS", "ISTHMUS_LOG_FORMAT", "ISTHMUS_INSECURE"}
        assert given - shared <= known, name


def test_what_it_mounts_exists_and_every_volume_is_given_its_owner() -> None:
    services = compose()
    named = set(yaml.safe_load((ROOT / "compose.yaml").read_text())["volumes"])
    assert {v.partition(":")[0] for v in services["prepare"]["volumes"]} == named
    dockerfile = (INFRA / "images" / "Dockerfile").read_text()
    for volume in services["prepare"]["volumes"]:
        assert volume.partition(":")[2] in dockerfile, "the image needs this folder, so that the volume gets its owner"
    for name, spec in services.items():
        for volume in spec.get("volumes", ()):
            if isinstance(volume, str) and volume.startswith("./"):
                assert (ROOT / volume.partition(":")[0]).is_dir(), f"{name}: {volume}"
            elif isinstance(volume, dict):
                assert volume["volume"]["nocopy"] is True, f"{name}: only `prepare` fills volumes"


@pytest.mark.tier("all")
def test_kernels_compiled_for_an_image_are_loaded_where_nothing_can_be_compiled_anew(tmp_path: Path) -> None:
    """Dockerfile and entrypoint.sh compile for every level, copy the cache, and load the kernels that the processor can
    run."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("NUMBA_")} | {"NUMBA_DEBUG_CACHE": "1"}
    built, image, runs = (tmp_path / name for name in ("built", "image", "runs"))

    def start(program: str, cache: Path, **more: str) -> str:
        told = {**environment, "NUMBA_CACHE_DIR": str(cache), **more}
        return subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=told
        ).stdout

    for level in levels.levels(platform.machine()):
        build = "from isthmus.codecs import kernels; kernels.build()"
        assert "data saved to" in start(build, built, NUMBA_CPU_NAME=level, NUMBA_CPU_FEATURES="")
    built.rename(image)
    (tmp_path / "isthmus").write_text('#!/bin/sh\necho "isthmus $*"\n')
    (tmp_path / "isthmus").chmod(0o755)
    told = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "KERNELS": str(image), "NUMBA_CACHE_DIR": str(runs)}
    said = subprocess.run(
        [INFRA / "images" / "entrypoint.sh", "syncer"], capture_output=True, text=True, check=True, env=told
    )
    assert said.stdout == "isthmus syncer\n"
    program = (
        "import os; from isthmus.codecs import kernels; from isthmus.doctor.machine import fingerprint; "
        "kernels.warm(); fingerprint(); print('level', os.environ['NUMBA_CPU_NAME'])"
    )
    loaded = start(program, runs, ISTHMUS_KERNELS="levels")
    assert "data loaded from" in loaded
    assert "saved" not in loaded
    assert any(f"level {name}\n" in loaded for name in levels.levels(platform.machine()))


# --- the processes ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Start the services, replace both syncers while learners train, and stop. Return what the tests below check."""
    folder = tmp_path_factory.mktemp("compose")
    with graph.up(folder, {"STEPS": "100000"}) as g:
        url, environment = compose()["init"]["environment"]["ISTHMUS_RUN"], g.replicas("learner")[0].environment
        for service in ("syncer", "learner"):
            for replica in g.replicas(service):
                g.until_healthy(replica)
        healthy = {r.name: _get(r, "healthz") for s in ("syncer", "learner") for r in g.replicas(s)}
        # This is a rolling upgrade: each new syncer is up before an old one is told to stop.
        before, codes = _heads(g), {}
        for old in g.replicas("syncer"):
            g.until_healthy(g.start("syncer"))
            codes[old.name] = g.stop(old)
        upgraded = _heads(g)
        end = time.monotonic() + GOES_ON_S
        while not all(re.search(COMMITTED, _get(r, "metrics")) for r in g.replicas("syncer")):
            assert time.monotonic() < end, "\n".join(r.said()[-2000:] for r in g.running.values())
            time.sleep(0.5)
        running = [*g.replicas("learner"), *g.replicas("syncer")]
        metrics = {r.name: _get(r, "metrics") for r in running}
        codes |= {r.name: g.stop(r) for r in running}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                if name.startswith("AWS_"):
                    patch.setenv(name, value)
            # Replay reads the updates of all learners, which no learner may do.
            patch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(folder / "secrets" / "reader" / access.CREDENTIALS))
            found, commits = asyncio.run(_replayed(url))
        yield {
            "graph": g,
            "codes": codes,
            "healthy": healthy,
            "metrics": metrics,
            "before": before,
            "upgraded": upgraded,
            "replayed": found,
            "commits": commits,
            "logs": {p.stem: p.read_text(errors="replace") for p in folder.glob("*.log")},
        }


def _get(replica: graph.Replica, path: str) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{replica.port}/{path}", timeout=5) as answer:
            text: str = answer.read().decode()
            return text
    except OSError:
        return ""


def _heads(g: graph.Graph) -> dict[str, float]:
    """Return the newest version of each fragment by the syncers' metrics."""
    heads: dict[str, float] = {}
    for replica in g.replicas("syncer"):
        for p, version in re.findall(r'isthmus_fragment_version\{fragment="(\d+)"\} (\S+)', _get(replica, "metrics")):
            heads[p] = max(float(version), heads.get(p, 0.0))
    return heads


async def _replayed(url: str) -> tuple[list[replays.Replayed], list[Commit]]:
    async with open_log(url) as log:
        return await replays.replay(log), await judge.read_commits(log)


@pytest.mark.tier("all")
def test_everything_ends_as_it_should(ran: dict[str, Any]) -> None:
    syncers = {f"syncer-{i}": 0 for i in (1, 2, 3, 4)}
    assert ran["codes"] == syncers | dict.fromkeys(LEARNERS, TOLD_TO_STOP), ran["logs"]


@pytest.mark.tier("all")
def test_health_means_that_loop_store_and_bus_work(ran: dict[str, Any]) -> None:
    assert len(ran["healthy"]) == 6
    for name, said in ran["healthy"].items():
        report = json.loads(said)
        assert report["ok"], (name, said)
        assert set(report["seconds_since"]) == {"loop_turned", "store_answered", "bus_answered"}


@pytest.mark.tier("all")
def test_no_commit_is_lost_when_the_syncers_are_replaced(ran: dict[str, Any]) -> None:
    assert all(r.difference is None for r in ran["replayed"])
    assert sum(r.compared for r in ran["replayed"]) == len(ran["commits"])
    assert judge.continuous(ran["commits"])
    writers = {c.header.writer for c in ran["commits"]}
    assert writers & {"syncer-1", "syncer-2"}, "the old syncers must merge"
    assert writers & {"syncer-3", "syncer-4"}, "the new syncers must take over"
    newest = {str(c.header.fragment): c.version for c in ran["commits"]}
    for p, version in {**ran["before"], **ran["upgraded"]}.items():
        assert newest[p] >= version, f"fragment {p} had version {version} once"
    assert sum(ran["upgraded"].values()) > 0


@pytest.mark.tier("all")
def test_all_learners_took_part(ran: dict[str, Any]) -> None:
    merged = {i.learner for c in ran["commits"] for i in c.header.inputs}
    assert merged == {"a", "b", "c", "d"}


@pytest.mark.tier("all")
def test_metrics_of_every_service_are_there(ran: dict[str, Any]) -> None:
    for name, text in ran["metrics"].items():
        declared = (SyncerMetrics() if name.startswith("syncer") else LearnerMetrics()).declared
        for metric in declared:
            assert f"# TYPE {metric.name.removesuffix('_total')}" in text, f"{name}: {metric.name}"
    syncers = "".join(text for name, text in ran["metrics"].items() if name.startswith("syncer"))
    assert re.search(COMMITTED, syncers)
    learners = "".join(text for name, text in ran["metrics"].items() if name.startswith("learner"))
    assert re.search(r'isthmus_ledger_tokens\{part="merged"\} [1-9]', learners)


@pytest.mark.tier("all")
def test_logs_are_one_object_per_line_and_hold_no_secret(ran: dict[str, Any]) -> None:
    folder = ran["graph"].folder / "secrets"
    secrets = [p.read_text().strip() for p in folder.rglob("*password")]
    secrets += [line.split()[1] for line in (folder / access.USERS_FILE).read_text().splitlines()]
    assert len(secrets) == 16
    said = 0
    for name, text in ran["logs"].items():
        assert not any(secret in text for secret in secrets), name
        if name.startswith(("syncer", "learner-")):
            for line in text.splitlines():
                event = json.loads(line)
                assert event["run"] == "s3://isthmus/demo"
                assert event["service"] == name.partition("-")[0]
                assert event[event["service"]] == (name if name.startswith("syncer") else name[-1])
                said += name.startswith("syncer") and " commits" in event["message"]
    assert said >= 2, "each syncer must log how many commits it made"


# --- the bus's access control -----------------------------------------------------------------------------------------


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Callable[[str], str]]:
    """A Redis 7 with the ACL file that compose mounts: a function that returns a user's URL, password included."""
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    access.prepare(secrets, ["eu-1"])
    (tmp_path / "data" / "redis").mkdir(parents=True)
    g = graph.Graph(tmp_path, compose(), {"redis": free_ports(1)[0], "object-store": 1}, graph.redis_7())
    replica = g.start("redis")
    try:
        g.until_healthy(replica)
        yield (
            lambda user: (
                f"redis://{user}:{(secrets / user / access.BUS_PASSWORD).read_text().strip()}"
                f"@127.0.0.1:{g.ports['redis']}"
            )
        )
    finally:
        g.stop(replica)


async def test_the_bus_keeps_everybody_to_what_the_table_says(guarded: Callable[[str], str]) -> None:
    """This runs the service's own command and settings. integration/test_permissions.py tests each user and stream."""
    for role, user in (
        (Role(RoleKind.SYNCER), "syncer"),
        (Role(RoleKind.READER), "reader"),
        (Role(RoleKind.LEARNER, "eu-1"), "learner-eu-1"),
    ):
        found = {f.check: f.outcome async for f in examine_bus(guarded(user), bytes(32), role, single_threaded())}
        assert "failure" not in found.values(), found
        assert {found[f"bus: {what}"] for what in ("eviction", "value size", "persistence", "must not administer")} == {
            "ok"
        }
        assert found["bus: must not write for others"] == "ok"

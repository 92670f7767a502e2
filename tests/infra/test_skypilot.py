"""SkyPilot's own schemas accept the task files, and a learner that loses its machine goes on on another.

The tests use no cloud. A folder is the home of each machine, with the files that SkyPilot brings there, and another
folder is the bucket. `run` is executed as written, except for its ports and the address that it binds. `setup` is only
linted, because it needs root and Ubuntu.
"""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from e2e.test_processes import QUIET, ROOT, commits_of, wait_for
from infra import graph
from infra.command_lines import command_lines, require_understood
from infra.test_slurm import lives, merged, python_path
from isthmus.bus import open_bus
from isthmus.errors import Unavailable
from isthmus_services.demo import judge
from isthmus_services.main import main
from isthmus_services.servers import free_ports
from support import reaper

FOLDER = ROOT / "infra" / "skypilot"
README = (FOLDER / "README.md").read_text()
TASKS = ("learner.yaml", "syncer.yaml")
SKYPILOT = "skypilot==0.14.1"

Task = dict[str, Any]

READ = """
import json, sys, types

def stub(name, **held):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__dict__.update(held)

# What these import themselves is all of SkyPilot, and more than a hundred packages.
stub("sky", __path__=[sys.argv[1] + "/sky"], __version__="0")
stub("sky.skylet.autostop_lib", AutostopWaitFor=types.SimpleNamespace(supported_modes=list))
stub("sky.server", __path__=[])
stub("sky.server.daemons", INTERNAL_REQUEST_DAEMONS=[])
from sky.utils import schemas
json.dump({"task": schemas.get_task_schema(), "resources": schemas.get_resources_schema()}, sys.stdout)
"""


def task_of(name: str) -> Task:
    task: Task = yaml.safe_load((FOLDER / name).read_text())
    return task


def pairs(text: str) -> dict[str, str]:
    """Return the values in a file of NAME=value lines, by name."""
    return dict(line.split("=", 1) for line in text.splitlines() if line and not line.startswith("#"))


# --- the files --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def schemas(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """SkyPilot's own schemas, from its wheel. It cannot be installed beside Isthmus, and has many dependencies."""
    folder = tmp_path_factory.mktemp("wheel")
    fetch = ("pip", "download", "-q", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--dest")
    done = subprocess.run([sys.executable, "-m", *fetch, folder, SKYPILOT], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(
            f"the wheel of {SKYPILOT} (4 MB) has the schemas, and pip cannot fetch it: reach an index, or point "
            f"PIP_FIND_LINKS to a folder with it\n{done.stderr}",
            pytrace=False,
        )
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder)
    done = subprocess.run([sys.executable, "-c", READ, folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", TASKS)
def test_skypilots_own_schemas_take_them(name: str, schemas: dict[str, Any]) -> None:
    task = task_of(name)
    jsonschema.validate(task, schemas["task"])
    jsonschema.validate(task["resources"], schemas["resources"])
    # The schema leaves names that it does not know here to plugins.
    (known,) = (s for s in schemas["resources"]["properties"]["job_recovery"]["anyOf"] if s["type"] == "object")
    assert task["resources"].get("job_recovery", {}).keys() <= known["properties"].keys()
    for wrong, of in (({**task, "enviroment": {}}, "task"), ({**task["resources"], "spot": True}, "resources")):
        with pytest.raises(jsonschema.ValidationError, match="Additional properties"):
            jsonschema.validate(wrong, schemas[of])


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("part", ["setup", "run"])
def test_shellcheck_finds_nothing(name: str, part: str) -> None:
    shellcheck = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run(
        [shellcheck, "--shell=bash", "-"], input=task_of(name)[part], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_their_command_lines_are_understood() -> None:
    lines = [line for text in [*(task_of(n)["run"] for n in TASKS), README] for line in command_lines(text)]
    assert len(lines) >= 7, lines
    require_understood(lines)


def test_what_has_to_be_given_is_explained_and_everything_else_is_there() -> None:
    told = pairs((FOLDER / "run.env").read_text())
    explained = set(re.findall(r"`([A-Z_]+)`", README))
    for name in TASKS:
        task = task_of(name)
        wanted = {variable for variable, value in {**task["envs"], **task["secrets"]}.items() if value is None}
        assert wanted <= explained, name
        assert {v for v in wanted & task["envs"].keys() if v not in told} <= {"ISTHMUS_LEARNER"}, name
        assert all(value is None for value in task["secrets"].values()), "no secret in a file that is shared"
        used = set(re.findall(r"\$\{?([A-Z_]+)", task["run"]))
        given = {"HOME", "PATH", "PWD", *task["envs"], *task["secrets"]}
        own = {v for v in used if v.startswith(("SKYPILOT_", "PET_")) or f"export {v}=" in task["run"]}
        assert used <= given | own, name
    assert set(re.findall(r"\b[A-Z]+\b", " ".join(told.values()))) <= explained
    assert f"'{SKYPILOT.replace('==', '[aws,gcp]==')}'" in README, (
        "the README must name the version that is tested here"
    )


# --- the processes ----------------------------------------------------------------------------------------------------

STEPS = 80

TRAIN = f"""
STEPS = {STEPS}
import os, time, torch, isthmus

torch.manual_seed(0)
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run, bus, learner = (os.environ["ISTHMUS_" + name] for name in ("RUN", "BUS", "LEARNER"))
with isthmus.join(run, model, optimizer, bus=bus, learner=learner, steps=STEPS, checkpoint_s=0.2,
                  create=isthmus.Rules(fragments=2, sync_every=4), pace=isthmus.Pace(heartbeat_s=0.5)) as link:
    print("goes on after step", link.steps_done, flush=True)
    while link.steps_done < STEPS:
        model(torch.ones(2, 16)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        link.step(tokens=2)
        time.sleep(0.02)
        while link.incarnation == 1 and link.steps_done == STEPS // 2:
            time.sleep(1)  # its machine is about to be taken away
"""


def readme_block(holds: str) -> str:
    """Return the commands of the README's block that contains this text."""
    (block,) = (b for b in re.findall(r"(?:^    .*\n)+", README, re.MULTILINE) if holds in b)
    return textwrap.dedent(block)


class Laptop:
    """The folder from which a user launches tasks, made as the README says, and the secrets in the user's home."""

    def __init__(self, home: Path, run: Path) -> None:
        self.home, self.folder = home, home / "run"
        shutil.copytree(FOLDER, self.folder)
        (self.folder / "my_train.py").write_text(TRAIN)
        bus, rendezvous = free_ports(2)
        # Replace the bus's port, the port where ranks meet, and the address, since nothing here may be reachable.
        self.other = {"6379": str(bus), "29500": str(rendezvous), "0.0.0.0": "127.0.0.1"}
        self.told = pairs((self.folder / "run.env").read_text()) | {"ISTHMUS_RUN": str(run)}
        self.do(readme_block("isthmus access ~/.isthmus/bus "), self.folder)
        self.do(readme_block("ISTHMUS_BUS=rediss:"), self.folder)
        self.secrets = {"learner": self.secrets_of("eu-1"), "syncer": self.secrets_of("syncer")}

    def do(self, script: str, folder: Path) -> None:
        """Run commands of the README in a folder."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {**os.environ, "HOME": str(self.home), "PATH": path, "PYTHONPATH": python_path()}
        command = ["bash", "-euc", elsewhere(script, self.other)]
        subprocess.run(command, cwd=folder, env={**environment, "HOST": "127.0.0.1"}, check=True, capture_output=True)

    def secrets_of(self, who: str) -> dict[str, str]:
        path = self.home / ".isthmus" / f"{who}.secrets"
        assert path.stat().st_mode & 0o077 == 0
        return pairs(path.read_text())


def elsewhere(script: str, other: Mapping[str, str]) -> str:
    """Return a script with other ports and addresses."""
    return re.sub("|".join(rf"\b{re.escape(word)}\b" for word in other), lambda m: other[m[0]], script)


class Machine:
    """A folder as a machine's home, with the files that SkyPilot brings there.

    The machine's processes are those that have the folder as HOME, or whose working directory is in it.
    """

    def __init__(self, home: Path, laptop: Laptop, name: str, given: Mapping[str, str]) -> None:
        task = task_of(f"{name}.yaml")
        shutil.copytree(laptop.folder, home / "sky_workdir")
        programs = home / "venv" / "bin"
        programs.mkdir(parents=True)
        for program in ("isthmus", "torchrun", "python"):  # but not the Redis of the tests' environment
            (programs / program).symlink_to(Path(sys.executable).parent / program)
        for there, here in task.get("file_mounts", {}).items():
            target = home / Path(there).relative_to("~")
            target.parent.mkdir(exist_ok=True)
            shutil.copy(laptop.home / Path(here).relative_to("~"), target)
        variables = {**task["envs"], **laptop.told, **given}
        assert None not in variables.values(), "SkyPilot rejects a task with a variable that has no value"
        # A machine of its own has nothing of this environment but the mark by which what is left over is found.
        environment = {**QUIET, **reaper.mark()}
        environment |= {"PYTHONPATH": python_path(), "PATH": os.environ["PATH"], "HOME": str(home)}
        environment |= variables | laptop.secrets[name]
        script = home / "run.sh"
        script.write_text(elsewhere(task["run"], laptop.other))
        self.home, self.log = home, home / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                ["bash", script], cwd=home / "sky_workdir", env=environment, stdout=log, stderr=subprocess.STDOUT
            )

    def take_away(self) -> None:
        """Kill all processes of the machine at once."""
        own = f"HOME={self.home}".encode()
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                # Redis writes its title over its environment, so its working directory is compared as well.
                is_here = (place / "cwd").readlink().is_relative_to(self.home)
                if is_here or own in (place / "environ").read_bytes().split(b"\0"):
                    os.kill(int(place.name), signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def machines() -> Iterator[list[Machine]]:
    started: list[Machine] = []
    yield started
    for machine in started:
        machine.take_away()


def of_job(number: int) -> dict[str, str]:
    """Return the variables that SkyPilot gives a job's nodes. A recovery changes all of them but the task's id."""
    return {
        "SKYPILOT_TASK_ID": "sky-managed-2026-01-01-00-00-00-000000_eu-1_7-0",
        "SKYPILOT_NUM_NODES": "1",
        "SKYPILOT_NUM_GPUS_PER_NODE": "1",
        "SKYPILOT_NODE_RANK": "0",
        "SKYPILOT_NODE_IPS": f"127.0.0.{number}",
        "SKYPILOT_CLUSTER_INFO": json.dumps({"cluster_name": f"eu-1-{number}", "cloud": "AWS", "zone": f"z{number}"}),
    }


@pytest.mark.tier("all")
def test_a_learner_that_loses_its_machine_goes_on_under_its_name_on_another(
    tmp_path: Path, machines: list[Machine]
) -> None:
    if graph.redis_7() is None:
        message = "needs redis-server 7 or newer on PATH"
        if os.environ.get("ISTHMUS_REQUIRE_REDIS7") == "1":
            pytest.fail(f"{message}, and ISTHMUS_REQUIRE_REDIS7=1 requires it", pytrace=False)
        pytest.skip(message)
    run = tmp_path / "bucket" / "run"
    run.parent.mkdir()
    laptop = Laptop(tmp_path / "laptop", run)
    # `--env ISTHMUS_LEARNER=eu-1` puts this into the job once; a recovery uses it again.
    job = {"ISTHMUS_LEARNER": "eu-1"}
    machines.append(syncer := Machine(tmp_path / "syncer", laptop, "syncer", {}))
    machines.append(first := Machine(tmp_path / "first", laptop, "learner", job | of_job(1)))

    def said() -> str:
        return "".join(f"--- {m.home.name}\n{m.log.read_text()}" for m in machines)

    def gone_on() -> bool:
        assert first.process.poll() is None, said()
        assert {p.name for p in (run / "learners").glob("*")} <= {"eu-1"}, said()
        return [*(run / "learners" / "eu-1" / "000001" / "checkpoints").glob("0*")] != [] and ("eu-1", 1) in merged(run)

    wait_for(gone_on, "something to go on from")
    first.take_away()
    machines.append(second := Machine(tmp_path / "second", laptop, "learner", job | of_job(2)))
    assert second.process.wait() == 0, said()
    assert syncer.process.poll() is None, "the syncer must go on serving"
    (step,) = re.findall(r"goes on after step (\d+)", second.log.read_text())
    assert 0 < int(step) < STEPS
    assert lives(run, "eu-1") == 2
    assert [p.name for p in (run / "learners").iterdir()] == ["eu-1"]
    assert merged(run) == {("eu-1", 1), ("eu-1", 2)}
    commits = commits_of(str(run))
    assert judge.continuous(commits)
    assert {c.header.writer for c in commits} == {"syncer"}
    assert main(["replay", str(run)]) == 0
    # The bus answers only clients that trust its own certificate, and only over TLS.
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", "/dev/null")
    other = ("openssl", "req", "-x509", *key, "-subj", "/CN=isthmus-bus", "-out", tmp_path / "other.pem")
    subprocess.run(other, check=True, capture_output=True)
    told = laptop.secrets["learner"]["ISTHMUS_BUS"]
    assert asyncio.run(answers(told.replace("bus.pem", f"{laptop.folder}/bus.pem")))
    assert not asyncio.run(answers(told.replace("bus.pem", f"{tmp_path}/other.pem")))
    assert not asyncio.run(answers(told.replace("rediss:", "redis:").partition("?")[0]))


async def answers(url: str) -> bool:
    async with open_bus(url, bytes(32), None) as bus:
        try:
            await bus.tail("syncer")
        except Unavailable:
            return False
        return True

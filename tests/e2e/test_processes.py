"""Runs of real processes, started as a user starts them on both kinds of store, survive SIGKILL."""

import asyncio
import json
import os
import pydoc_data.topics
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import CompletedProcess
from typing import TypeVar

import pytest

from isthmus.agent.ports import open_log
from isthmus.bus import default_bus
from isthmus.format.records.messages import PARTS
from isthmus.log import Commit, fold
from isthmus_services.demo import judge
from isthmus_services.main import main
from isthmus_services.servers import Server, redis_server, s3_server
from support import forking
from support.forking import Forked

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_loop.py"
QUIET = {
    "PYTHONPATH": f"{ROOT / 'tests'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
    "OMP_NUM_THREADS": "1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
SMALL = ("--model", "support.paced:small", "--sync-every", "96")
PACED = ("--train", "support.paced:train", "--model", "support.paced:small", "--steps")


TOLD_TO_STOP = 128 + signal.SIGTERM
HANGS_S = 240.0
"""What has not happened after this time never will. This does not test how fast anything is."""


COMMAND = (sys.executable, "-m", "isthmus_services.main")


def isthmus(
    *arguments: str, timeout: float = HANGS_S, environment: Mapping[str, str] | None = None
) -> CompletedProcess[str]:
    return forking.isthmus(*arguments, timeout=timeout, environment={**os.environ, **QUIET, **(environment or {})})


class Processes:
    """The processes that a test started. None of them outlives the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.all: dict[subprocess.Popen[bytes] | Forked, str] = {}

    def start(self, name: str, *command: str, apart: bool = False) -> subprocess.Popen[bytes]:
        """Start a program as a user does; with `apart`, in a new process group."""
        with open(self.folder / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **QUIET},
                process_group=0 if apart else None,
            )
        self.all[process] = name
        return process

    def isthmus(self, name: str, *arguments: str) -> Forked:
        """Start the `isthmus` command in a forked process."""
        log = self.folder / f"{name}.log"
        process = forking.nursery().start([*arguments], {**os.environ, **QUIET}, log, log)
        self.all[process] = name
        return process

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def ends(self, process: subprocess.Popen[bytes] | Forked, code: int = 0) -> None:
        """Wait for a process to end. Raises `AssertionError` with the output of all processes if its code differs."""
        with suppress(subprocess.TimeoutExpired):
            process.wait(HANGS_S)
        said = "".join(f"--- {name}\n{self.said(name)}" for name in dict.fromkeys(self.all.values()))
        assert process.returncode == code, f"{self.all[process]} ended with {process.returncode}, not {code}\n{said}"


@contextmanager
def processes(folder: Path) -> Iterator[Processes]:
    """Yield a `Processes`; at the end kill each process that still runs, by its id."""
    started = Processes(folder)
    try:
        yield started
    finally:
        for process in started.all:
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.fixture(params=[pytest.param("folder and sqlite", marks=pytest.mark.tier("all")), "s3 and redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path, use: Callable[[Server], None]) -> tuple[str, str]:
    """Return (run, bus) of one of the two ways to run."""
    if request.param == "folder and sqlite":
        run = str(tmp_path / "run")
        bus = default_bus(run)
        assert bus is not None
        return run, bus
    use(request.getfixturevalue("seaweedfs"))
    return f"s3://b{uuid.uuid4().hex[:10]}/run", request.getfixturevalue("redis").url


def commits_of(run: str) -> list[Commit]:
    async def go() -> list[Commit]:
        async with open_log(run) as log:
            commits = await judge.read_commits(log)
            # The fold compares every digest.
            for fragment in log.run.layout.fragments:
                await fold.fold(log, fragment.index, fold.Merging(log))
            return commits

    return asyncio.run(go())


def wait_for(condition: Callable[[], T], what: str, timeout: float = HANGS_S) -> T:
    end = time.monotonic() + timeout
    while not (found := condition()):
        assert time.monotonic() < end, f"never happened: {what}"
        time.sleep(0.1)
    return found


def init(*arguments: str) -> int:
    """Run `isthmus init` in this process: importing torch in a new one would take longer than the command."""
    return main(["init", *arguments])


def heads(run: str) -> int:
    """Return the sum of all fragments' versions."""

    async def go() -> int:
        async with open_log(run) as log:
            found = await asyncio.gather(*(log.newest(f.index) for f in log.run.layout.fragments))
            return sum(commit.version for commit in found if commit)

    return asyncio.run(go())


@pytest.mark.tier("test")
@pytest.mark.timeout(600)
def test_a_run_by_hand_survives_kill_9_of_learner_and_syncer(place: tuple[str, str], tmp_path: Path) -> None:
    run, bus = place
    assert init(run, *SMALL, "--seed", "3", "--create-bucket") == 0
    assert init(run, *SMALL, "--seed", "3") == 0, "creating the same run twice is harmless"
    with processes(tmp_path) as p:

        def syncer(name: str) -> subprocess.Popen[bytes]:
            return p.start(name, *COMMAND, "syncer", run, "--bus", bus, "--name", name)

        def learner(i: int) -> subprocess.Popen[bytes]:
            arguments = ("--learner", f"l{i}", "--shard", f"{i}/2", *PACED, "500")
            boards = ("--tensorboard", str(tmp_path / "boards"))
            return p.start(f"l{i}", *COMMAND, "learner", run, "--bus", bus, *arguments, *boards)

        first, learners = syncer("s1"), [learner(0), learner(1)]
        wait_for(lambda: heads(run) > 30, "thirty commits")
        first.kill()
        first.wait()
        learners[0].kill()
        learners[0].wait()
        before = len(commits_of(run))
        second, learners[0] = syncer("s2"), learner(0)
        for process in learners:
            p.ends(process)
        assert len(list((tmp_path / "boards" / "l0").iterdir())) == 2, "each incarnation has an event file"
        # A syncer that is asked to stop finishes the merges under way.
        second.send_signal(signal.SIGTERM)
        p.ends(second)
        assert "read in" in p.said("s2")
    commits = commits_of(run)
    assert judge.continuous(commits)
    assert len(commits) > before
    assert {c.header.writer for c in commits} == {"s1", "s2"}
    assert any(i.learner == "l0" and i.incarnation == 2 for c in commits for i in c.header.inputs)
    assert max(i.step for c in commits for i in c.header.inputs) > 400
    status = isthmus("status", run, "--bus", bus, "--check", "--json", str(tmp_path / "status.json"))
    assert status.returncode == 0, status.stdout + status.stderr
    assert status.stdout.startswith("no learner trains: 2 of 2 learners are done")
    found = json.loads((tmp_path / "status.json").read_text())
    assert {row["learner"]: row["state"] for row in found["learners"]} == {"l0": "done", "l1": "done"}
    for row in found["learners"]:
        ledger = row["ledger"]
        parts = sum(v for k, v in ledger.items() if k != "processed")
        assert parts == pytest.approx(ledger["processed"], abs=1.0)


@pytest.mark.timeout(600)
def test_redis_dies_comes_back_empty_and_the_run_goes_on(
    seaweedfs: Server, use: Callable[[Server], None], tmp_path: Path
) -> None:
    use(seaweedfs)
    run = f"s3://b{uuid.uuid4().hex[:10]}/run"
    assert init(run, *SMALL, "--create-bucket") == 0
    with processes(tmp_path) as p:
        with redis_server(tmp_path / "redis") as redis:
            port = int(redis.url.rsplit(":", 1)[1])
            bus = redis.url
            p.isthmus("s", "syncer", run, "--bus", bus)
            arguments = ("--bus", bus, *PACED, "100000", "--learner")
            learners = [p.isthmus(f"l{i}", "learner", run, *arguments, f"l{i}", "--shard", f"{i}/2") for i in range(2)]
            wait_for(lambda: heads(run) > 20, "twenty commits")
            redis.kill()
        before = len(commits_of(run))
        away = isthmus("status", run, "--bus", bus, "--check")
        assert away.returncode == 1
        assert away.stdout.startswith("the bus cannot be reached")
        with redis_server(tmp_path / "redis", port=port):
            wait_for(lambda: len(commits_of(run)) > before + 24, "commits after Redis came back empty")
            for process in learners:
                process.terminate()
            for process in learners:
                p.ends(process, TOLD_TO_STOP)
    assert judge.continuous(commits_of(run))


@pytest.mark.timeout(600)
def test_the_s3_server_dies_comes_back_and_the_run_goes_on(
    redis: Server, use: Callable[[Server], None], tmp_path: Path
) -> None:
    run = f"s3://b{uuid.uuid4().hex[:10]}/run"
    with processes(tmp_path) as p:
        with s3_server(tmp_path / "s3") as s3:
            use(s3)
            port = int(s3.url.rsplit(":", 1)[1])
            assert init(run, *SMALL, "--create-bucket") == 0
            p.isthmus("s", "syncer", run, "--bus", redis.url)
            arguments = ("--bus", redis.url, *PACED, "100000", "--learner", "l0")
            learner = p.isthmus("l0", "learner", run, *arguments)
            wait_for(lambda: heads(run) > 20, "twenty commits")
            before = len(commits_of(run))
            s3.kill()
            away = isthmus("status", run, "--bus", redis.url)
            assert away.returncode == 2
            assert f"127.0.0.1:{port}" in away.stderr
        time.sleep(3.0)
        assert learner.poll() is None, p.said("l0")
        with s3_server(tmp_path / "s3", port=port):
            wait_for(lambda: len(commits_of(run)) > before + 24, "commits after the store came back")
            learner.terminate()
            p.ends(learner, TOLD_TO_STOP)
            assert judge.continuous(commits_of(run))


@pytest.mark.timeout(600)
def test_a_learner_asked_to_stop_leaves_and_can_come_back(folder: Path, tmp_path: Path) -> None:
    run = str(folder)
    assert init(run, *SMALL) == 0
    with processes(tmp_path) as p:
        p.isthmus("s", "syncer", run)
        arguments = ("learner", run, "--learner", "l0", *PACED, "100000")
        process = p.isthmus("l0", *arguments)
        wait_for(lambda: heads(run) > 10, "ten commits")
        process.send_signal(signal.SIGTERM)
        p.ends(process, TOLD_TO_STOP)
        status = isthmus("status", run, "--json", str(tmp_path / "s.json"))
        assert status.returncode == 0
        (row,) = json.loads((tmp_path / "s.json").read_text())["learners"]
        assert row["state"] == "left"
        again = p.isthmus("l0", *arguments)
        wait_for(lambda: "(start 2 of this name)" in p.said("l0"), "a second joining")
        again.terminate()
        p.ends(again, TOLD_TO_STOP)
        # No token was lost, because the learner stored all work under way before it left.
        assert "(0 tokens lost in all)" in p.said("l0").split("(start 2 of this name)")[1]


@pytest.mark.timeout(600)
def test_the_example_trains_in_its_own_loop(folder: Path, tmp_path: Path) -> None:
    with processes(tmp_path) as p:
        command = (sys.executable, str(EXAMPLE), str(folder), "--steps", "150", "--step-seconds", "0.02", "--learner")
        first = p.start("eu-1", *command, "eu-1")
        wait_for((folder / "run").exists, "the first one creates the run")
        p.isthmus("s", "syncer", str(folder))
        second = p.start("us-1", *command, "us-1")
        for process in (first, second):
            p.ends(process)
        assert "eu-1: 150 steps" in p.said("eu-1")
    commits = commits_of(str(folder))
    assert judge.continuous(commits)
    assert {i.learner for c in commits for i in c.header.inputs} == {"eu-1", "us-1"}


OWN = """
import torch

def model():
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1))

def train(task):
    model = task.model()
    link = task.join(model, torch.optim.SGD(model.parameters(), lr=0.01))
    while link.steps_done < task.steps and not task.should_stop():
        model(torch.ones(4, 3)).sum().backward()
        link.step(tokens=4)
    link.close()
    print("trained", link.steps_done, task.shard, task.learner)
"""


def test_a_model_and_a_trainer_of_ones_own(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ours.py").write_text(OWN)
    made = isthmus("init", str(folder), "--model", "ours:model", "--fragments", "2", "--sync-every", "4")
    assert made.returncode == 0, made.stderr
    assert "26 parameters in 2 fragments" in made.stdout
    train = (
        "learner",
        str(folder),
        "--learner",
        "a",
        "--train",
        "ours:train",
        "--model",
        "ours:model",
        "--steps",
        "20",
        "--shard",
        "1/2",
    )
    with processes(tmp_path) as p:
        p.isthmus("s", "syncer", str(folder))
        wait_for(lambda: "serves" in p.said("s"), "the syncer serves")
        done = isthmus(*train)
    assert done.returncode == 0, done.stderr
    assert "trained 20 (1, 2) a" in done.stdout


WITH_WORKERS = """
import torch
from torch.utils.data import DataLoader, Dataset

class Ones(Dataset):
    def __len__(self):
        return 1 << 20

    def __getitem__(self, index):
        return torch.ones(3)

def train(task):
    model = task.model()
    link = task.join(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for batch in DataLoader(Ones(), batch_size=4, num_workers=2):
        if link.steps_done >= task.steps or task.should_stop():
            break
        model(batch).sum().backward()
        link.step(tokens=4)
        if link.steps_done == 50:
            print("trains", flush=True)
    END
"""


@pytest.mark.parametrize("end", ["link.close(done=False)", "raise RuntimeError('DataLoader worker is killed')"])
def test_a_signal_that_ends_the_workers_of_a_data_loader_is_an_orderly_stop(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """A scheduler signals a whole process group: the signal kills the workers, and the loader raises in the learner."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ours.py").write_text(OWN)
    (tmp_path / "fed.py").write_text(WITH_WORKERS.replace("END", end))
    assert isthmus("init", str(folder), "--model", "ours:model").returncode == 0
    with processes(tmp_path) as p:
        task = (
            "learner",
            str(folder),
            "--learner",
            "a",
            "--train",
            "fed:train",
            "--model",
            "ours:model",
            "--steps",
            "1000000",
        )
        process = p.start("l", *COMMAND, *task, apart=True)
        wait_for(lambda: "trains" in p.said("l"), "it trains")
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(HANGS_S) == TOLD_TO_STOP, p.said("l")
        assert "Traceback" not in p.said("l")
        assert " steps in " in p.said("l").splitlines()[-1], "the last line is the summary"


def test_a_syncer_runs_where_torch_cannot_be_imported(folder: Path, tmp_path: Path) -> None:
    assert init(str(folder)) == 0
    code = (
        "import sys; sys.modules['torch'] = None; from isthmus_services.main import main; sys.exit(main(sys.argv[1:]))"
    )
    with processes(tmp_path) as p:
        process = p.start("s", sys.executable, "-c", code, "syncer", str(folder))
        wait_for(lambda: "serves" in p.said("s"), "the syncer serves")
        process.terminate()
        p.ends(process)


REPORT_KEYS = {
    "global_val_loss",
    "single_val_loss",
    "ledger",
    "tokens_trained_again",
    "commits",
    "commits_per_fragment",
    "participation",
    "updates_merged",
    "updates_clipped",
    "clips",
    "rejections",
    "bytes_up",
    "checkpoint_bytes",
    "bytes_down",
    "kills",
    "recoveries",
    "wall_s",
    "seed",
    "settings",
    "run",
}


TEXT = pydoc_data.topics.__file__
"""A text as long as a demo needs: its held-out part is evaluated 34 times."""

KILLED = ("--kill-every", "4", "--kill-syncer-every", "7", "--steps", "128")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("given", "steps"),
    [
        (("--steps", "64"), 64),
        (("--servers", *KILLED), 128),
        pytest.param(("--servers", "--bucket-only", *KILLED), 128, marks=pytest.mark.tier("all")),
    ],
    ids=["folder", "killed, with servers", "killed, with a bucket only"],
)
def test_the_demo_recovers_and_reports(tmp_path: Path, given: tuple[str, ...], steps: int) -> None:
    out = tmp_path / "demo"
    done = isthmus(
        "demo", "--out", str(out), "--learners", "2", "--data", TEXT, *given,
        "--json", str(tmp_path / "copy.json"), timeout=560,
    )  # fmt: skip
    logs = "".join(f.read_text() for f in (out / "logs").glob("*.log")) if done.returncode else ""
    assert done.returncode == 0, done.stdout + done.stderr + logs
    report = json.loads((out / "report.json").read_text())
    assert report == json.loads((tmp_path / "copy.json").read_text())
    assert report.keys() >= REPORT_KEYS
    assert report["log_intact"]
    killed = "--kill-every" in given
    assert (report["kills_by_kind"]["learner"] >= 1) == killed
    assert (report["kills_by_kind"]["syncer"] >= 1) == killed
    assert report["recoveries"] == report["kills"]
    ledger = report["ledger"]
    assert round(ledger["processed"]) == 2 * steps * 256 + report["tokens_trained_again"]
    assert sum(ledger[part] for part in PARTS) == pytest.approx(ledger["processed"], abs=0.01)
    share = ledger["merged"] / ledger["processed"]
    assert re.search(rf"tokens merged\s+│\s+{ledger['merged']:,.0f} \({share:.1%}", done.stdout)
    assert report["held_out_bytes_in_all"] >= report["held_out_bytes"] > 64 * 128, "64 windows, and the byte after them"
    assert sum(report["commits_per_fragment"]) == report["commits"]
    assert min(report["commits_per_fragment"]) >= 1, "every fragment of the model was merged"
    assert 0.3 < report["participation"] <= 1.0
    assert report["bytes_up"] > report["commits"] * 1000
    assert report["bytes_down"] > 0
    assert report["global_val_loss"] < 4.0 < report["global_curve"][0][1]
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert ("killed learner-" in done.stdout) == killed
    again = isthmus("replay", str(out / "run"))
    assert f"{report['commits']} commits, 0 differ" in again.stdout, again.stdout + again.stderr
    if "--servers" not in given:  # a bus in the run's folder still has the last heartbeats
        assert isthmus("status", str(out / "run"), "--json", str(tmp_path / "status.json")).returncode == 0
        status = json.loads((tmp_path / "status.json").read_text())
        totals = status["totals"]
        for field in ("bytes_up", "checkpoint_bytes", "bytes_down"):
            assert sum(row[field] for row in status["learners"]) == report[field]
        assert totals["ledger"] == pytest.approx(ledger, abs=0.001)
        assert totals["participation"] == report["participation"]
        assert (totals["updates_merged"], totals["updates_clipped"], totals["commits"]) == (
            report["updates_merged"], report["updates_clipped"], report["commits"],
        )  # fmt: skip
    shutil.rmtree(out)

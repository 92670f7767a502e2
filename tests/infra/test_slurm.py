"""The scripts for Slurm work on a real Slurm, also if jobs are told to stop, killed, requeued or cancelled."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.test_processes import QUIET, ROOT, commits_of, wait_for
from infra.command_lines import command_lines, require_understood
from infra.slurm import Slurm, missing, slurm
from isthmus.bus import default_bus
from isthmus_services.demo import judge
from isthmus_services.main import main

pytestmark = pytest.mark.tier("all")

SCRIPTS = ROOT / "infra" / "slurm"
SHELL = sorted([*SCRIPTS.glob("*.sbatch"), SCRIPTS / "common.sh", SCRIPTS / "run.env"])
SMALL = ("--nodes=1", "--gpus-per-node=1", "--cpus-per-task=1")


def python_path() -> str:
    return os.pathsep.join([QUIET["PYTHONPATH"], *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if missing():
        why = f"not run: no {', '.join(missing())} on PATH (Debian: slurmctld, slurmd, slurm-client, munge)"
        if os.environ.get("ISTHMUS_REQUIRE_SLURM") == "1":
            pytest.fail(why, pytrace=False)
        pytest.skip(why)
    with slurm(tmp_path_factory.mktemp("slurm"), {**QUIET, "PYTHONPATH": python_path(), "SETTLED_S": "2"}) as running:
        yield running


def filled_in(folder: Path, run: Path, command: str) -> Path:
    """Return a folder to submit from, with the scripts and a run.env that is filled in for a run in a folder."""
    shutil.copytree(SCRIPTS, folder)
    bus = default_bus(str(run))
    text = (folder / "run.env").read_text()
    for line, given in {
        r"(export ISTHMUS_RUN)=.*": rf"\1={run}",
        r"(export ISTHMUS_BUS)=.*": rf"\1={bus}",
        r"export (ISTHMUS_BUS_|AWS_).*\n": "",
        r"command=.*": f"command=({command})",
    }.items():
        text, count = re.subn(rf"^{line}", given, text, flags=re.MULTILINE)
        assert count, line
    (folder / "run.env").write_text(text)
    return folder


def lives(run: Path, learner: str) -> int:
    return len([*(run / "learners" / learner).glob("*/claim")])


def merged(run: Path) -> set[tuple[str, int]]:
    """Return the incarnations of learners whose work is in commits."""
    return {(i.learner, i.incarnation) for c in commits_of(str(run)) for i in c.header.inputs}


def test_a_job_of_two_nodes_leaves_before_its_time_is_up_and_goes_on(cluster: Slurm, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train = f'torchrun {ROOT}/examples/torchrun_fsdp2.py "$ISTHMUS_RUN" --bus "$ISTHMUS_BUS" --learner "$name"'
    place = filled_in(tmp_path / "jobs", run, f"{train} --steps 160")
    submit = ("sbatch", "--parsable", "--job-name")
    syncer = cluster.tell(*submit, "s1", "syncer.sbatch", cwd=place)
    learner = cluster.tell(*submit, "eu-1", *SMALL, "--nodes=2", "learner.sbatch", cwd=place)
    wait_for(lambda: (run / "run").exists() and ("eu-1", 1) in merged(run), "its first life is merged")
    # Send the signal to the script alone, as --signal=B:TERM does.
    cluster.tell("scancel", "--batch", "--signal=TERM", learner)
    wait_for(lambda: lives(run, "eu-1") == 2, "a second life")
    (checkpoint,) = (run / "learners" / "eu-1" / "000001" / "checkpoints").glob("0*")
    left_at = int(checkpoint.name.partition("-")[0])
    assert 0 < left_at < 160, "the learner must leave in the middle, with a checkpoint"
    wait_for(lambda: cluster.job(learner)["JobState"] in {"COMPLETED", "FAILED"}, "it ends")
    said = (place / f"eu-1-{learner}.log").read_text()
    ended = cluster.job(learner)
    assert (ended["JobState"], ended["Restarts"], ended["NumNodes"]) == ("COMPLETED", "1", "2"), said
    assert f"eu-1: {left_at} steps on 2 ranks" in said
    assert "eu-1: 160 steps on 2 ranks" in said
    assert re.findall(r"eu-1: ended with \d+ .*?(, told to)?, restart (\d)", said) == [(", told to", "0"), ("", "1")], (
        said
    )
    # A syncer that is cancelled leaves in order and is not started again.
    cluster.tell("scancel", syncer)
    wait_for(lambda: "s1: ended with 0" in (place / f"s1-{syncer}.log").read_text(), "the syncer has left")
    wait_for(lambda: cluster.job(syncer)["JobState"] == "CANCELLED", "it stays away")
    assert cluster.job(syncer)["Restarts"] == "0"
    assert merged(run) == {("eu-1", 1), ("eu-1", 2)}
    commits = commits_of(str(run))
    assert judge.continuous(commits)
    assert {c.header.writer for c in commits} == {"s1"}
    steps = {n: [i.step for c in commits for i in c.header.inputs if i.incarnation == n] for n in (1, 2)}
    assert max(steps[1]) <= left_at < min(steps[2]), "the learner must go on where it left"
    assert main(["replay", str(run)]) == 0


def test_an_arrays_learners_come_back_under_names_of_their_own(cluster: Slurm, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert main(["init", str(run), "--model", "support.paced:small", "--sync-every", "96"]) == 0
    command = 'isthmus learner --learner "$name" --steps 300 --train support.paced:train --model support.paced:small --checkpoint 0.3'
    place = filled_in(tmp_path / "jobs", run, command)
    syncers = cluster.tell("sbatch", "--parsable", "--array=1-1", "syncer.sbatch", cwd=place)
    array = ("--job-name=eu", "--array=0-1", "--output=%x-%a.log")
    learners = cluster.tell("sbatch", "--parsable", *array, *SMALL, "learner.sbatch", cwd=place)
    jobs, names = [f"{learners}_{i}" for i in (0, 1)], ["eu-0", "eu-1"]
    for name in names:
        checkpoints = run / "learners" / name / "000001" / "checkpoints"
        wait_for(lambda: (name, 1) in merged(run) and [*checkpoints.glob("0*")], "something to go on from")  # noqa: B023
    # Slurm requeues a job that it preempts.
    cluster.tell("scontrol", "requeue", jobs[0])
    for victim in cluster.processes(jobs[1]):
        os.kill(victim, signal.SIGKILL)
    for job in jobs:
        wait_for(lambda: cluster.job(job)["JobState"] in {"COMPLETED", "FAILED"}, f"{job} ends")  # noqa: B023
    said = [(place / f"{name}.log").read_text() for name in names]
    assert [(cluster.job(job)["JobState"], cluster.job(job)["Restarts"]) for job in jobs] == [("COMPLETED", "1")] * 2
    assert [re.findall(r"ended with (\d+) after", words) for words in said] == [["143", "0"], ["137", "0"]], said
    for words in said:
        (step,) = re.findall(r"\(start 2 of this name\): goes on after step (\d+)", words)
        assert 0 < int(step) < 300
    cluster.tell("scancel", syncers)
    assert merged(run) == {(name, life) for name in names for life in (1, 2)}
    commits = commits_of(str(run))
    assert judge.continuous(commits)
    assert {c.header.writer for c in commits} == {"syncer-1"}
    assert main(["replay", str(run)]) == 0


def test_what_fails_at_once_is_not_started_again(cluster: Slurm, tmp_path: Path) -> None:
    place = filled_in(tmp_path / "jobs", tmp_path / "run", "isthmus learner --stepps 400")
    job = cluster.tell("sbatch", "--parsable", *SMALL, "--export=ALL,SETTLED_S=60", "learner.sbatch", cwd=place)
    wait_for(lambda: cluster.job(job)["JobState"] == "FAILED", "it fails")
    assert cluster.job(job)["ExitCode"] == "2:0"
    assert "there is no flag --stepps: did you mean --steps?" in (place / f"eu-1-{job}.log").read_text()


@pytest.mark.parametrize("script", SHELL, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script: Path) -> None:
    shellcheck = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([shellcheck, "-x", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_its_command_lines_are_understood() -> None:
    lines = [line for script in [*SHELL, SCRIPTS / "README.md"] for line in command_lines(script.read_text())]
    assert len(lines) >= 5, lines
    require_understood(lines)

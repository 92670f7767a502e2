"""After `pip install` of the wheel into an empty environment, Isthmus works, with each Python that this machine has.

Its dependencies come from the index. The environment that trains has only the wheel of its own. It uses torch and the
other libraries of the tests' environment, because a second copy would take another gigabyte.
"""

import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from e2e.test_processes import EXAMPLE, Processes, commits_of, processes, wait_for
from release.conftest import ROOT, git
from release.pythons import at_hand, interpreter

STRANGER = ("env", "-u", "PYTHONPATH")

pytestmark = pytest.mark.timeout(600)


def installed(folder: Path, python: str, *arguments: str) -> Path:
    """Create an environment, install into it, and return the folder of its programs."""
    subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(folder / "bin/python"))
    done = subprocess.run(
        [*pip, "install", "-q", "--no-compile", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "bin"


@pytest.fixture(scope="session", params=at_hand())
def without_torch(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel and what it requires, and nothing else."""
    folder, python = tmp_path_factory.mktemp("without-torch"), interpreter(request.param)
    assert python is not None
    return installed(folder, python, "-c", str(ROOT / "constraints.txt"), str(wheel))


@pytest.fixture(scope="session")
def with_torch(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with Isthmus from the wheel and the libraries of this environment."""
    programs = installed(tmp_path_factory.mktemp("with-torch"), sys.executable, "--no-deps", str(wheel))
    (site,) = programs.parent.glob("lib/python*/site-packages")
    # Libraries in a folder that a .pth file names are found. The .pth files in that folder, such as that of an
    # editable Isthmus, are not read.
    (site / "libraries.pth").write_text(sysconfig.get_path("platlib") + "\n")
    return programs


def stranger(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*STRANGER, *command], cwd=cwd, capture_output=True, text=True, timeout=240, check=False)


def test_it_says_what_is_installed(without_torch: Path, with_torch: Path, released: Path, tmp_path: Path) -> None:
    version = git(released, "describe", "--tags").strip().removeprefix("v")
    for programs, torch in ((without_torch, "no torch"), (with_torch, "torch 2")):
        done = stranger(programs / "isthmus", "--version", cwd=tmp_path)
        assert done.stdout.startswith(f"isthmus {version}, Python 3."), done.stderr
        assert f", {torch}" in done.stdout
        tell = "import isthmus, importlib.metadata as m; print(isthmus.__file__, isthmus.__version__, m.version('isthmus'))"
        file, *said = stranger(programs / "python", "-c", tell, cwd=tmp_path).stdout.split()
        assert Path(file).is_relative_to(programs.parent), "Isthmus must not come from this tree"
        assert said == [version, version]


def test_what_trains_says_what_to_install(without_torch: Path, tmp_path: Path) -> None:
    done = stranger(without_torch / "isthmus", "init", "run", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip().endswith("this needs torch: pip install '.[torch]' in a clone of Isthmus")
    assert not (tmp_path / "run").exists()


def test_a_learner_is_merged_by_a_syncer_without_torch_and_anybody_reads_it(
    without_torch: Path, with_torch: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    isthmus = (*STRANGER, str(without_torch / "isthmus"))
    with processes(tmp_path) as p:
        syncer = p.start("syncer", *isthmus, "syncer", str(run), "--wait")
        command = (*STRANGER, str(with_torch / "python"), str(EXAMPLE), str(run), "--learner", "eu-1")
        # The learner never gets to so many steps: it is killed once every fragment is merged.
        learner = p.start("learner", *command, "--steps", "1000000", "--step-seconds", "0.02")
        wait_for((run / "run").exists, "the learner creates the run")
        wait_for(lambda: merged(run) == {(f, "eu-1") for f in range(4)}, "every fragment of eu-1 is merged")
        learner.kill()
        learner.wait()
        syncer.send_signal(signal.SIGTERM)
        p.ends(syncer)
        read(p, isthmus, run)


def merged(run: Path) -> set[tuple[int, str]]:
    """Return fragment and learner of each update that the log has merged."""
    return {(c.header.fragment, i.learner) for c in commits_of(str(run)) for i in c.header.inputs}


def read(p: Processes, isthmus: tuple[str, ...], run: Path) -> None:
    """Run all commands that read a run, without torch."""
    commits = len(commits_of(str(run)))
    for name, *arguments in (
        ("status", str(run)),
        ("replay", str(run)),
        ("export", str(run), "-o", str(p.folder / "model.safetensors")),
        ("follow", str(run), "--cuts", "1", "--into", str(p.folder / "cuts")),
    ):
        p.ends(p.start(name, *isthmus, name, *arguments))
    assert f"{commits} commits, 0 differ" in p.said("replay")
    assert (p.folder / "cuts/newest").is_dir()
    (cut,) = (p.folder / "cuts/newest").resolve().glob("*.safetensors")
    assert min(cut.stat().st_size, os.path.getsize(p.folder / "model.safetensors")) > 4 * 64 * 64

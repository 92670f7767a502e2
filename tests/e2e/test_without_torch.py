"""Without torch, the commands that train say what to install, and all other commands work."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from isthmus_services.main import main
from isthmus_services.settings.command import installed

BLOCKED = (
    "import sys; sys.modules['torch'] = None; from isthmus_services.main import main; sys.exit(main(sys.argv[1:]))"
)


def without_torch(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", BLOCKED, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ, check=False)


@pytest.mark.parametrize(
    ("arguments", "install"),
    [
        (["learner", "run", "--learner", "a"], ".[torch]"),
        (["init", "run"], ".[torch]"),
        (["plan", "--model", "isthmus.demo.gpt:byte_gpt"], ".[torch]"),
        (["simulate", "training", "codecs"], ".[torch]"),
        (["demo", "--steps", "1"], ".[demo]"),
    ],
    ids=lambda x: x[0] if isinstance(x, list) else "",
)
def test_what_trains_says_what_to_install(
    arguments: list[str], install: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = without_torch(*arguments)
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.strip().endswith(f"this needs torch: pip install '{install}' in a clone of Isthmus")


def test_what_only_reads_the_log_needs_none(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    assert main(["init", run]) == 0
    for arguments in (["status", run], ["replay", run], ["gc", run], ["export", run, "-o", str(tmp_path / "m")]):
        done = without_torch(*arguments)
        assert done.returncode == 0, done.stderr


def test_every_command_can_be_imported_without_it() -> None:
    modules = ", ".join(c.module for c in installed()[0])
    command = [sys.executable, "-c", f"import sys; sys.modules['torch'] = None; import {modules}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr

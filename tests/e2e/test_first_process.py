"""A command that is the first process of a container ends at SIGTERM, as it does anywhere else."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from isthmus_services.main import main
from isthmus_services.processes import isthmus_command

FIRST_PROCESS = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")


def test_a_collector_ends_at_sigterm(tmp_path: Path) -> None:
    try:
        subprocess.run([*FIRST_PROCESS, "true"], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not run: this machine gives no namespace of processes (unshare --user --pid)")
    run = str(tmp_path / "run")
    assert main(["init", run, "--insecure"]) == 0
    command = [*FIRST_PROCESS, *isthmus_command("gc", run, "--apply", "--every", "3600")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as outer:
        try:
            assert outer.stdout is not None
            assert "objects deleted" in outer.stdout.readline()  # the collector waits for its next turn
            (first,) = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
            os.kill(int(first), signal.SIGTERM)
            assert outer.wait(60) == 128 + signal.SIGTERM
        finally:
            outer.kill()

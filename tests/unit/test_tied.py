"""A tied command ends with the thread that started it."""

import signal
import subprocess
import sys
import threading

import pytest

from isthmus_services.processes import tied

WAITS = [sys.executable, "-I", "-c", "import sys; print(*sys.argv[1:], flush=True); sys.stdin.read()", "two words"]


def started() -> "subprocess.Popen[str]":
    """Start the command, and return once it runs."""
    process = subprocess.Popen(tied(WAITS), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "two words\n"
    return process


def test_it_runs_under_its_own_process_id_and_ends_by_itself() -> None:
    with started() as process:
        assert process.poll() is None
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a signal for the end of the parent")
def test_it_is_killed_when_the_thread_that_started_it_ends() -> None:
    found = []
    thread = threading.Thread(target=lambda: found.append(started()))
    thread.start()
    thread.join()
    with found[0] as process:
        assert process.wait(60) == -signal.SIGKILL


def test_elsewhere_the_command_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus_services.processes.sys.platform", "darwin")
    assert tied(WAITS) == WAITS

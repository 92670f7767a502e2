"""A command whose output is read by `head` ends quietly when `head` does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from isthmus_services.main import main

NO_READER = 141


def without_a_reader(*words: str) -> tuple[int, str]:
    """Run a command whose stdout is a pipe that nothing reads; return its exit code and what it writes to stderr."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "isthmus_services.main", *words],
            stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120, check=False,
        )  # fmt: skip
    finally:
        os.close(writing)
    return done.returncode, done.stderr


@pytest.mark.parametrize("command", ["explain RUN 0", "status RUN", "replay RUN", "--version"])
def test_a_command_without_a_reader_ends_without_a_traceback(command: str, folder: Path) -> None:
    if "RUN" in command:
        assert main(["init", str(folder)]) == 0
    assert without_a_reader(*command.replace("RUN", str(folder)).split()) == (NO_READER, "")

"""Processes on this machine that a command starts, watches and kills. Each has its own log."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def isthmus_command(*words: str) -> list[str]:
    """Return the command line of `isthmus …` under this interpreter."""
    return [sys.executable, "-m", "isthmus_services.main", *words]


_TIE = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):  # else the parent ended before the signal was asked for
    os.execvp(sys.argv[2], sys.argv[2:])
"""


def tied(command: Sequence[str]) -> list[str]:
    """Return a command line that the kernel kills (SIGKILL) when the thread that started it ends, however it ends.

    Processes that the command starts are not killed. Only Linux has such a signal: elsewhere the command is unchanged.
    """
    if sys.platform != "linux":
        return [*command]
    # A small interpreter becomes the command, with the same process id: code that runs between fork and exec in a
    # process with threads could wait for a lock that no thread holds there.
    return [sys.executable, "-I", "-S", "-c", _TIE, str(os.getpid()), *command]


def end(process: subprocess.Popen[Any], within_s: float) -> None:
    """Send SIGTERM and wait for the process to end; after `within_s` seconds, send SIGKILL."""
    process.terminate()
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@dataclass
class Processes:
    """Processes by name. Their output goes to `<name>.log`; a process started again appends to it."""

    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables added to this process's own environment."""
    alive: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, command: Sequence[str]) -> None:
        """Start a process."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.log(name), "ab") as out:
            self.alive[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env={**os.environ, **self.environment}
            )

    def kill(self, name: str) -> float:
        """End a process with SIGKILL; return the time of the signal by `time.perf_counter`."""
        process = self.alive.pop(name)
        process.send_signal(signal.SIGKILL)
        at = time.perf_counter()
        process.wait()
        return at

    def close(self) -> None:
        """Kill all processes."""
        for name in tuple(self.alive):
            self.kill(name)

    def log(self, name: str) -> Path:
        """Return the path of a process's log."""
        return self.folder / f"{name}.log"

    def said(self, name: str) -> str:
        """Return the output of a process. Raises `RuntimeError` if the process has ended by itself."""
        text = self.log(name).read_text(errors="replace")
        if self.alive[name].poll() is not None:
            raise RuntimeError(f"{name} ended with {self.alive[name].returncode}:\n{text[-2000:]}")
        return text

"""Kill every process that a test run started, as soon as the test run is gone, however it ended.

`watch()` marks the environment of this process, so every process started from here carries the mark, and starts one
watcher: `python reaper.py MARK`. The watcher waits for the end of its standard input, which the kernel closes when
this process ends (a normal exit, SIGINT or SIGKILL alike). It then kills each process whose initial environment holds
the mark: learners, syncers, browsers, daemons, and whatever those started. Redis writes over its environment; it and
SeaweedFS are killed by the kernel (`isthmus_services.processes.tied`), which reaches direct children only.
"""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

MARK = "TESTS_STARTED_BY"


def watch() -> None:
    """Start the watcher. It lives until this process has ended and everything marked is gone."""
    os.environ[MARK] = f"{os.getpid()}-{os.urandom(8).hex()}"
    unmarked = {name: value for name, value in os.environ.items() if name != MARK}
    read, _held = os.pipe()  # the other end stays open, and no child inherits it, until this process ends
    os.posix_spawn(
        sys.executable,
        [sys.executable, "-S", "-P", __file__, os.environ[MARK]],
        unmarked,
        file_actions=[(os.POSIX_SPAWN_DUP2, read, 0)],
        setsid=True,  # a Ctrl-C in the terminal must not end the watcher first
    )
    os.close(read)


def marked(mark: str) -> list[int]:
    """Return the ids of the processes that were started with this mark."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        # A process may end while it is looked at, or belong to another user.
        with suppress(OSError):
            if folder.name.isdigit() and wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def kill_all(mark: str) -> None:
    """Kill all of them, and those that they started meanwhile."""
    while pids := marked(mark):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    kill_all(sys.argv[1])

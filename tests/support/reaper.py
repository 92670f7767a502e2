"""Kill every process that a test run started, as soon as the test run has ended, however it ended.

`watch()` marks the environment of this process, so every process that it starts has the mark. It also starts one
watcher: `python reaper.py MARK`. The watcher waits for the end of its standard input, which the kernel closes when
this process ends, after a normal exit, SIGINT or SIGKILL. Then the watcher kills each process whose initial environment
has the mark: learners, syncers, browsers, daemons, and their children. Redis overwrites its environment. The kernel
kills Redis and SeaweedFS (`isthmus_services.processes.tied`), which works only for direct children.
"""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

MARK = "TESTS_STARTED_BY"


def watch() -> None:
    """Start the watcher. It lives until this process has ended and no marked process is left."""
    os.environ[MARK] = f"{os.getpid()}-{os.urandom(8).hex()}"
    unmarked = {name: value for name, value in os.environ.items() if name != MARK}
    read, _held = os.pipe()  # `_held` stays open until this process ends, and no child inherits it
    os.posix_spawn(
        sys.executable,
        [sys.executable, "-S", "-P", __file__, os.environ[MARK]],
        unmarked,
        file_actions=[(os.POSIX_SPAWN_DUP2, read, 0)],
        setsid=True,  # a Ctrl-C in the terminal must not end the watcher first
    )
    os.close(read)


def mark() -> dict[str, str]:
    """Return the mark, for a process whose environment is not this one's."""
    return {MARK: os.environ[MARK]} if MARK in os.environ else {}


def marked(mark: str) -> list[int]:
    """Return the ids of the processes that were started with this mark."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        # A process may end while it is read, or belong to another user.
        with suppress(OSError):
            if folder.name.isdigit() and wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def kill_all(mark: str) -> None:
    """Kill all marked processes, and those that they start meanwhile."""
    while pids := marked(mark):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    kill_all(sys.argv[1])

"""Real processes of the `isthmus` command, forked from a process that has imported everything, so they start at once.

A learner spends three seconds of a core on imports before its first step, and a command one second. If a test is about
what a process does and not about how it starts, the process is forked from a nursery. `python -m support.forking` reads
one JSON object a line, {"arguments", "environment", "folder", "out", "err"}. It answers {"pid"}, and later {"pid",
"code"}.
"""

import atexit
import functools
import gc
import json
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, NoReturn


class Forked:
    """A forked process, with those members of `subprocess.Popen` that tests use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = threading.Event()

    def poll(self) -> int | None:
        """Return the exit status as `Popen` does, or None while the process runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process to end. Raises `subprocess.TimeoutExpired`."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"forked process {self.pid}", timeout or 0.0)
        assert self.returncode is not None, "it has ended"
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, unless it has ended."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def _end(self, code: int) -> None:
        self.returncode = code
        self._ended.set()


class Nursery:
    """The process that forks, and its children. All end with the process that uses the nursery."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._lock = threading.Lock()
        self._born: queue.Queue[Forked] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def start(self, arguments: list[str], environment: Mapping[str, str], out: Path, err: Path) -> Forked:
        """Start `isthmus` with these arguments in the current folder; its output is appended to these files."""
        for file in (out, err):
            file.touch()  # the file exists from the start, like an open file that is handed over
        order = {"arguments": arguments, "environment": dict(environment), "folder": os.getcwd()}
        with self._lock:
            pipe = self._process.stdin
            assert pipe is not None, "opened as a pipe"
            pipe.write(json.dumps({**order, "out": str(out), "err": str(err)}) + "\n")
            pipe.flush()
            return self._born.get(timeout=120.0)

    def close(self) -> None:
        """End the process that forks, and its children."""
        assert self._process.stdin is not None, "opened as a pipe"
        self._process.stdin.close()
        self._process.wait()
        self._reader.join()

    def _read(self) -> None:
        forked: dict[int, Forked] = {}
        pipe: IO[str] | None = self._process.stdout
        assert pipe is not None, "opened as a pipe"
        with pipe:
            for line in pipe:
                said = json.loads(line)
                if "code" in said:
                    forked.pop(said["pid"])._end(said["code"])
                else:
                    child = forked[said["pid"]] = Forked(said["pid"])
                    self._born.put(child)


@functools.cache
def nursery() -> Nursery:
    """Return the nursery of this process."""
    made = Nursery()
    atexit.register(made.close)
    return made


def isthmus(
    *arguments: str, environment: Mapping[str, str] | None = None, timeout: float = 240.0
) -> "subprocess.CompletedProcess[str]":
    """Run the `isthmus` command to its end. Raises `subprocess.TimeoutExpired`."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        process = nursery().start([*arguments], os.environ if environment is None else environment, out, err)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        return subprocess.CompletedProcess(
            ["isthmus", *arguments], code, out.read_text(errors="replace"), err.read_text(errors="replace")
        )


# --- the process that forks -------------------------------------------------------------------------------------------


def _import() -> None:
    import aiobotocore.session  # noqa: F401
    import redis.asyncio  # noqa: F401
    import torch._dynamo  # noqa: F401

    import isthmus.demo.trainer  # noqa: F401
    from isthmus.codecs import kernels
    from isthmus_services import main as cli  # noqa: F401
    from isthmus_services.commands import learner, syncer  # noqa: F401

    kernels.warm()
    gc.collect()
    gc.freeze()  # keep pages shared between processes: a collection would write to every page


def _become(order: dict[str, object]) -> int:
    """Run the command in a child that has just been forked; return its exit status."""
    for name, number in (("out", 1), ("err", 2)):
        file = os.open(str(order[name]), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, number)
        os.close(file)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.chdir(str(order["folder"]))
    environment, arguments = order["environment"], order["arguments"]
    assert isinstance(environment, dict), "an object"
    assert isinstance(arguments, list), "an array"
    os.environ.clear()
    os.environ.update(environment)
    # Set the path as an interpreter does that starts there.
    sys.path[:0] = [os.getcwd(), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    sys.argv = ["isthmus", *arguments]
    from isthmus_services.main import main

    return main(arguments)


def _live(order: dict[str, object]) -> NoReturn:
    """Run as the child, and end at once: an interpreter's normal end takes half a second after all the imports."""
    code: object = 1
    try:
        code = _become(order)
    except SystemExit as ended:
        code = ended.code
    except BaseException:
        traceback.print_exc()
    if isinstance(code, str):
        print(code, file=sys.stderr)
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _serve() -> int:
    """Fork a child for each order on stdin, until stdin ends."""
    _import()
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: set[int] = set()
    rest = b""
    while True:
        ready, _, _ = select.select([0, read], [], [])
        if read in ready:
            os.read(read, 4096)
            for pid in list(children):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    children.remove(pid)
                    _say({"pid": pid, "code": os.waitstatus_to_exitcode(status)})
        if 0 not in ready:
            continue
        data = os.read(0, 1 << 16)
        if not data:
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            return 0
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for end in (read, write):
                    os.close(end)
                _live(json.loads(line))
            children.add(pid)
            _say({"pid": pid})


def _say(what: dict[str, int]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(_serve())

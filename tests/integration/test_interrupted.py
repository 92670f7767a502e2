"""No process that a test run has started outlives the test run, however it ends."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from support import reaper

TESTS = Path(__file__).parents[1]

RUN = """
import signal, subprocess, sys, time
from pathlib import Path
from isthmus_services.servers import redis_server, s3_server
from support import reaper

signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background of a shell ignores it
reaper.watch()
folder = Path(sys.argv[1])
child = ["sh", "-c", "sleep 600 & echo $! > grandchild; sleep 600"]
with redis_server(folder / "redis") as redis, s3_server(folder / "s3") as s3:
    started = subprocess.Popen(child, cwd=folder, start_new_session=True)
    while not (folder / "grandchild").exists() or not (folder / "grandchild").read_text():
        time.sleep(0.01)
    print(redis.process.pid, s3.process.pid, started.pid, (folder / "grandchild").read_text(), flush=True)
    time.sleep(600)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_what_tests_started_ends_with_them(number: signal.Signals, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != reaper.MARK}
    environment["PYTHONPATH"] = f"{TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    with process.stdout:
        pids = [int(word) for word in process.stdout.readline().split()]
    try:
        assert len(pids) == 4
        assert all(map(alive, pids))
        process.send_signal(number)
        process.wait(60)
        end = time.monotonic() + 60
        while any(map(alive, pids)):
            assert time.monotonic() < end, f"still there: {[pid for pid in pids if alive(pid)]}"
            time.sleep(0.05)
    finally:
        for pid in (*pids, process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

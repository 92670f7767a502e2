"""Commands that start often import little, and leave the process as it was."""

import os
import subprocess
import sys

STATUS = """
import gc, os, sys
from isthmus_services.main import loaded, parsed
before = dict(os.environ)
loaded(parsed(["status", "run"]).command)
print("numpy" in sys.modules, len(os.listdir("/proc/self/task")), os.environ == before, gc.isenabled())
"""


def printed(program: str, **more: str) -> list[str]:
    clean = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=clean | more)
    return done.stdout.split()


def test_a_status_starts_no_threads_of_numpy() -> None:
    """Processes that this one starts may need them: the environment is as before."""
    assert printed(STATUS) == ["True", "1", "True", "True"]
    assert printed(STATUS, OPENBLAS_NUM_THREADS="1") == ["True", "1", "True", "True"]

"""`make check`, `make test` and `make test-all`: run every part, then print what ran and how long each took.

Style and types are checked at the same time as the tests, which wait for other processes more than they compute. The
output of both is shown after the tests. `--only PART` leaves the other parts out. All other arguments go to pytest.

Temporary files are in memory where there is room for them: what the library writes is synced to the disk, and the tests
would wait for that for a third of their time.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

PYTHON = sys.executable

MEMORY, ROOM = Path("/dev/shm"), 10 << 30
"""A file system in memory, and the bytes that must be free there, and of memory."""

NOT_RUN = 77
"""Exit code of a part that cannot run on this machine, and says why."""


@contextmanager
def temporary() -> Iterator[bool]:
    """Keep the temporary files of processes that are started in memory; yield whether there is room for them."""
    try:
        there = os.statvfs(MEMORY)
        free = int(re.findall(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())[0]) << 10
    except (OSError, IndexError):
        yield False
        return
    runs = not there.f_flag & os.ST_NOEXEC  # tests start what they install
    if "TMPDIR" in os.environ or not runs or min(there.f_bavail * there.f_frsize, free) < ROOM:
        yield False
        return
    for left in MEMORY.glob("isthmus-*"):  # by a run that was killed
        if not Path("/proc", left.name.removeprefix("isthmus-")).exists():
            shutil.rmtree(left, ignore_errors=True)
    mine = MEMORY / f"isthmus-{os.getpid()}"
    mine.mkdir(mode=0o755)  # tests start processes of other users
    os.environ["TMPDIR"] = str(mine)
    try:
        yield True
    finally:
        del os.environ["TMPDIR"]
        shutil.rmtree(mine, ignore_errors=True)


@dataclass
class Part:
    """A part of a test command, and its result."""

    name: str
    commands: Sequence[Sequence[str]]
    result: str = "FAILED"
    seconds: float = 0.0

    def run(self, out: IO[bytes] | None = None) -> None:
        """Run all of its commands, even after one that failed."""
        began = time.monotonic()
        # Several workers keep each core busy: more threads of each would only wait for a core.
        single = {"OMP_NUM_THREADS": "1", **os.environ}
        codes = [subprocess.run(c, stdout=out, stderr=out, check=False, env=single).returncode for c in self.commands]
        self.seconds = time.monotonic() - began
        if not any(codes):
            self.result = "passed"
        elif set(codes) <= {0, NOT_RUN}:
            self.result = "not run"


def parts(tier: str, arguments: Sequence[str]) -> tuple[list[Part], list[Part]]:
    """Return the parts that run one after the other, and the parts that run at the same time as them."""
    beside = [
        Part("style", ([PYTHON, "-m", "ruff", "check", "."], [PYTHON, "-m", "ruff", "format", "--check", "."])),
        Part("types", ([PYTHON, "-m", "mypy"],)),
    ]
    run = [PYTHON, "-m", "pytest", "-n", "logical", "--tier", tier, *arguments]
    # With one worker per core, each worker compiles beside the others in the time that one would take for all.
    alone = [Part("tests", [run] if tier == "check" else [[PYTHON, "-m", "support.compiled"], run])]
    if tier == "all":
        alone += [
            Part("simulation", ([PYTHON, "-m", "simulation.run"],)),
            Part("mutants", ([PYTHON, "-m", "mutants.run"],)),
            Part("chaos", ([PYTHON, "-m", "chaos.run"],)),
            Part("compose", ([PYTHON, "-m", "compose.run"],)),
        ]
    return alone, beside


def run_all(parts: Sequence[Part], out: IO[bytes]) -> None:
    """Run parts one after the other."""
    for part in parts:
        part.run(out)


def main() -> int:
    """Run a tier; return 1 if any part failed."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("tier", choices=("check", "test", "all"))
    parser.add_argument("--only", action="append", metavar="PART", help="run this part (several times)")
    given, arguments = parser.parse_known_args()
    began = time.monotonic()
    with temporary() as in_memory:
        if in_memory:
            arguments = ["-o", "tmp_path_retention_policy=failed", *arguments]
        alone, beside = (
            [part for part in some if given.only is None or part.name in given.only]
            for some in parts(given.tier, arguments)
        )
        if not alone and not beside:
            parser.error(f"there is no part {', '.join(given.only)}")
        with tempfile.TemporaryFile() as said:
            lane = threading.Thread(target=run_all, args=(beside, said))
            lane.start()
            for number, part in enumerate(alone, 1):
                if len(alone) > 1:
                    print(f"--- {part.name} ({number} of {len(alone)})", flush=True)
                part.run()
            lane.join()
            said.seek(0)
            print(said.read().decode(errors="replace"), end="")
        print(f"\n{'part':12}{'result':10}seconds")
        for part in (*alone, *beside):
            print(f"{part.name:12}{part.result:10}{part.seconds:7.0f}")
        print(f"{'in all':22}{time.monotonic() - began:7.0f}")
        return 1 if any(part.result == "FAILED" for part in (*alone, *beside)) else 0


if __name__ == "__main__":
    sys.exit(main())

"""Runs an experiment's settings in worker processes and keeps every finished row.

A run of the command that was interrupted continues: rows that are kept are not computed again.
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec

from isthmus.errors import InputError
from isthmus_lab.training.setting import Row, Setting
from isthmus_services.output.provenance import provenance

Job = tuple[Setting, int]

LINE_MAX = 1 << 20

THREADS = 1
"""Threads of each library in a worker."""


class Kept:
    """Finished rows in a folder: one file for each setting, seed, and what else decides the row.

    That is the code that computes rows, with the modules of a merge rule of one's own, this processor and the versions
    of libraries (`Provenance.decisive`). A row that other code computed is never read.
    """

    def __init__(self, folder: Path, own_rules: Iterable[str] = ()) -> None:
        """Read the source of the lab, and of the merge rules MODULE:FUNCTION of one's own that jobs use."""
        self.made_by = provenance("isthmus_lab.worker", THREADS, own_rules)
        self._folder = folder

    def key(self, job: Job) -> str:
        """Return the name of a job's row. Jobs whose settings differ only in their names have the same."""
        setting, seed = job
        own = self.made_by.own_rules[setting.own_merge] if setting.own_merge else ""
        return setting.key(seed, f"{self.made_by.decisive} {own}")

    def read(self, job: Job) -> Row | None:
        """Return the job's row, with the present name of its setting; None if there is no row or it cannot be read."""
        setting, seed = job
        try:
            row = msgspec.json.decode(self._path(job).read_bytes(), type=Row)
        except (OSError, msgspec.DecodeError):
            return None
        return msgspec.structs.replace(row, setting=setting.name, seed=seed)

    def write(self, job: Job, row: Row) -> None:
        """Write the job's row into the folder. Other processes never see a part of it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        scratch = self._path(job).with_suffix(f".{os.getpid()}")
        scratch.write_bytes(msgspec.json.encode(row))
        scratch.rename(self._path(job))

    def _path(self, job: Job) -> Path:
        return self._folder / f"{self.key(job)}.json"


def cost(setting: Setting) -> float:
    """Return an estimate of how long a setting takes, in an arbitrary unit."""
    return float(setting.budget * (1 + setting.shape.experts / 4))


async def run_all(jobs: Sequence[Job], kept: Kept, workers: int, progress: Callable[[float], None]) -> list[Row]:
    """Return the rows of all jobs, in the order of the jobs. Jobs whose rows are kept do not run again."""
    rows = {at: row for at, job in enumerate(jobs) if (row := kept.read(job)) is not None}
    # Settings that differ only in their names have the same key: one of them runs.
    once = {kept.key(job): at for at, job in enumerate(jobs) if at not in rows}
    todo = sorted(once.values(), key=lambda at: -cost(jobs[at][0]))
    total = sum(cost(jobs[at][0]) for at in todo) or 1.0
    shares = dict.fromkeys(todo, 0.0)

    def tell(at: int, share: float) -> None:
        shares[at] = share
        progress(sum(cost(jobs[i][0]) * done for i, done in shares.items()) / total)

    async def work() -> None:
        if not todo:
            return
        process = await _start()
        try:
            while todo:
                at = todo.pop(0)
                setting, seed = jobs[at]
                rows[at] = await _ask(process, setting, seed, lambda share, at=at: tell(at, share))  # type: ignore[misc]
                kept.write(jobs[at], rows[at])
                tell(at, 1.0)
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(workers, len(todo))):
            tasks.create_task(work())
    for at, job in enumerate(jobs):
        if at not in rows and (row := kept.read(job)) is not None:
            rows[at] = row
    return [rows[at] for at in range(len(jobs))]


async def _start() -> asyncio.subprocess.Process:
    # The workers share the cores, so each library of a worker may use one thread.
    limits = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
    quiet = dict.fromkeys(limits, str(THREADS))
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "isthmus_lab.worker",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=LINE_MAX,
        # Two runs with the same seed must iterate over sets of names in the same order.
        env={**os.environ, **quiet, "PYTHONHASHSEED": "0"},
    )


async def _ask(
    process: asyncio.subprocess.Process, setting: Setting, seed: int, progress: Callable[[float], None]
) -> Row:
    assert process.stdin is not None, "started without a way in"
    assert process.stdout is not None, "started without a way out"
    process.stdin.write(json.dumps({"setting": msgspec.to_builtins(setting), "seed": seed}).encode() + b"\n")
    await process.stdin.drain()
    while line := await process.stdout.readline():
        said = json.loads(line)
        if "row" in said:
            return msgspec.convert(said["row"], Row)
        if "error" in said:
            raise InputError(f"{setting.name}, seed {seed}: {said['error']}")
        progress(said["progress"])
    await process.wait()
    raise InputError(
        f"{setting.name}, seed {seed}: the worker ended with status {process.returncode}; its output is above"
    )

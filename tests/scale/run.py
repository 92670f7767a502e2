"""A run at scale: two learners, one of them two ranks of FSDP2, two syncers, a real S3 server and Redis; then a replay.

The run ends when every fragment has as many versions as asked for. `python -m scale.run --help`; `make scale` runs it
with a model of 3.0e8 parameters in bfloat16, which needs 24 GiB of memory and 40 GB of disk.
"""

import argparse
import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from chaos.cluster import end_on_sigterm
from isthmus.agent.ports import open_log
from isthmus.errors import IsthmusError
from isthmus.log import Log
from isthmus_services.servers import redis_server, s3_server

BUCKET = "s3://scale/run"
LOOK_S = 5.0
HERE = Path(__file__).resolve().parent


class Process:
    """A process of the run, and its log."""

    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self.name, self.log = name, log
        with open(log, "wb") as out:
            self._child = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._child.pid

    def must_live(self) -> None:
        """Raise `RuntimeError` if the process has ended."""
        if self._child.poll() is not None:
            raise RuntimeError(f"{self.name} ended with {self._child.returncode}: see {self.log}\n{self.tail()}")

    def tail(self) -> str:
        """Return the last 20 lines of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])

    def peak_gib(self) -> float:
        """Return its peak resident memory in GiB; 0 once it has ended."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except OSError:
            return 0.0
        found = re.search(r"VmHWM:\s+(\d+) kB", status)
        return int(found[1]) / (1 << 20) if found else 0.0

    def cpu_s(self) -> float:
        """Return the processor time that it has used, in seconds; 0 once it has ended."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self, patience_s: float = 300.0) -> int:
        """Wait until the process ends by itself; return its exit code."""
        return self._child.wait(patience_s)

    def stop(self) -> None:
        """Ask the process to stop; kill its whole group if it does not."""
        if self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)
            try:
                self._child.wait(60.0)
            except subprocess.TimeoutExpired:
                os.killpg(self.pid, signal.SIGKILL)
                self._child.wait()


@contextmanager
def started(name: str, arguments: list[str], logs: Path) -> Iterator[Process]:
    """Run a Python module in another process during the body."""
    process = Process(name, [sys.executable, *arguments], logs / f"{name}.log")
    try:
        yield process
    finally:
        process.stop()


async def heads_of(log: Log, hints: list[int]) -> list[int]:
    """Return the newest version of each fragment."""
    found = await asyncio.gather(*(log.newest(p, hint) for p, hint in enumerate(hints)))
    return [commit.version if commit else 0 for commit in found]


async def all_take_part(log: Log, syncers: int) -> bool:
    """Return whether updates of both learners were merged, and every syncer has committed."""
    learners, writers = set(), set()
    for fragment in log.run.layout.fragments:
        async for commit in log.commits(fragment.index, 0):
            learners |= {given.learner for given in commit.header.inputs}
            writers.add(commit.header.writer)
    return len(learners) == 2 and len(writers) == syncers


async def wait_for(a: argparse.Namespace, processes: list[Process]) -> float:
    """Wait until every fragment has its versions, and print progress; return the seconds since the first commit."""
    began = time.monotonic()
    while True:
        try:
            async with open_log(BUCKET, threads=1) as log:
                heads = [0] * len(log.run.layout.fragments)
                first = None
                while min(heads) < a.rounds or (a.both and not await all_take_part(log, a.syncers)):
                    await asyncio.sleep(LOOK_S)
                    for process in processes:
                        process.must_live()
                    heads = await heads_of(log, heads)
                    if max(heads) > 0 and first is None:
                        first = time.monotonic()
                    print(f"{time.monotonic() - began:6.0f} s  versions {min(heads)} to {max(heads)}", flush=True)
                return time.monotonic() - (first or began)
        except IsthmusError as error:  # there is no run yet
            for process in processes:
                process.must_live()
            if time.monotonic() - began > 600.0:
                raise
            print(f"{time.monotonic() - began:6.0f} s  {type(error).__name__}", flush=True)
            await asyncio.sleep(LOOK_S)


async def stored() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the numbers of objects and bytes by kind, and figures of the commits."""
    async with open_log(BUCKET, threads=1) as log:
        kinds: dict[str, Any] = {}
        for kind in ("updates/", "values/", "snapshots/", "commits/", "learners/"):
            entries = await log.store.list(kind)
            kinds[kind.rstrip("/")] = {"objects": len(entries), "bytes": sum(e.size for e in entries)}
        commits = [commit.header for f in log.run.layout.fragments async for commit in log.commits(f.index, 0)]
        said = {
            "commits": len(commits),
            "writers": {w: sum(c.writer == w for c in commits) for w in sorted({c.writer for c in commits})},
            "inputs": sum(len(c.inputs) for c in commits),
            "learners": sorted({i.learner for c in commits for i in c.inputs}),
            "merge_s": sorted(c.waited.merge_s for c in commits)[len(commits) // 2],
            "publish_s": sorted(c.waited.publish_s for c in commits)[len(commits) // 2],
            "fragments": [f.size for f in log.run.layout.fragments],
        }
        return kinds, said


def main() -> int:
    """Run at scale, and report what the run took; return the exit code of the replay."""
    parser = argparse.ArgumentParser(prog="scale", description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--fragments", type=int, default=24)
    parser.add_argument("--sync-every", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=10, help="versions of every fragment (10)")
    parser.add_argument("--syncers", type=int, default=2)
    parser.add_argument(
        "--both", action="store_true", help="go on until both learners are merged and all syncers merge"
    )
    parser.add_argument("--out", type=Path, default=Path("out/scale"))
    parser.add_argument("--json", type=Path)
    a = parser.parse_args()
    end_on_sigterm()
    shutil.rmtree(a.out, ignore_errors=True)
    (logs := a.out / "logs").mkdir(parents=True)
    stop = a.out / "stop"
    report: dict[str, Any] = {"settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(a).items()}}
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server(a.out / "redis"))
        s3 = stack.enter_context(s3_server(a.out / "s3"))
        os.environ.update(s3.environment)
        os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        # Return large short-lived memory to the system: by default glibc comes to keep blocks of up to 32 MiB.
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)
        subprocess.run([sys.executable, "-c", _MAKE_BUCKET], check=True)
        shape = ["--bus", redis.url, "--width", str(a.width), "--layers", str(a.layers), "--stop", str(stop),
                 "--fragments", str(a.fragments), "--sync-every", str(a.sync_every)]  # fmt: skip
        sharded = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--standalone"]
        syncers = [
            stack.enter_context(
                started(
                    f"syncer-{i}",
                    [
                        "-m",
                        "isthmus_services.main",
                        "syncer",
                        BUCKET,
                        "--bus",
                        redis.url,
                        "--name",
                        f"syncer-{i}",
                        "--wait",
                        "--threads",
                        "1",
                    ],
                    logs,
                )
            )
            for i in range(a.syncers)
        ]
        learners = [
            stack.enter_context(
                started(
                    name,
                    [*how, "-m", "scale.learner", BUCKET, "--learner", name, *shape, "--report", str(a.out / name)],
                    logs,
                )
            )
            for name, how in (("plain", []), ("sharded", sharded))
        ]
        training_s = asyncio.run(wait_for(a, [*syncers, *learners]))
        stop.touch()
        for learner in learners:
            learner.end()
        report["syncers"] = {s.name: {"peak_gib": s.peak_gib(), "cpu_s": s.cpu_s()} for s in syncers}
        for syncer in syncers:
            syncer.stop()
        report["training_s"] = training_s
        report["stored"], report["log"] = asyncio.run(stored())
        report["learners"] = [json.loads(path.read_text()) for path in sorted(a.out.glob("*.json"))]
        began = time.monotonic()
        replay = subprocess.run(
            [sys.executable, "-m", "isthmus_services.main", "replay", BUCKET, "--json", str(a.out / "replay")],
            check=False,
        )
        report["replay"] = {"seconds": time.monotonic() - began, "exit": replay.returncode,
                            **_few(json.loads((a.out / "replay").read_text()))}  # fmt: skip
    _show(report)
    text = json.dumps(report, indent=2) + "\n"
    (a.out / "report").write_text(text)
    if a.json:
        a.json.write_text(text)
    return replay.returncode


_MAKE_BUCKET = """
import asyncio
from aiobotocore.session import get_session

async def main():
    async with get_session().create_client("s3") as client:
        await client.create_bucket(Bucket="scale")

asyncio.run(main())
"""


def _few(replay: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in replay.items() if isinstance(v, int | float | str)}


def _show(report: dict[str, Any]) -> None:
    table = Table(title="a run at size", title_justify="left")
    table.add_column("what")
    table.add_column("found", justify="right")
    log = report["log"]
    rows: list[tuple[str, str]] = [
        ("parameters", f"{report['learners'][0]['parameters']:,}"),
        ("commits, updates merged", f"{log['commits']}, {log['inputs']}"),
        ("by syncer", ", ".join(f"{w} {n}" for w, n in log["writers"].items())),
        ("from the first commit on, s", f"{report['training_s']:.0f}"),
        ("merge and publish, s, median", f"{log['merge_s']:.2f}, {log['publish_s']:.2f}"),
        ("replay, s", f"{report['replay']['seconds']:.0f}"),
    ]
    for learner in report["learners"]:
        who = f"{learner['learner']}, rank {learner['rank']}"
        hold, gib = learner["hold_s"], learner["gib"]
        rows.append((f"{who}: steps; a step, s", f"{learner['steps']}; {learner['step_s']:.2f}"))
        rows.append((f"{who}: held by link.step, s: mean, most", f"{hold['mean']:.3f}, {hold['largest']:.3f}"))
        rows.append((f"{who}: GiB before joining, peak", f"{gib['before_joining']:.2f}, {gib['peak']:.2f}"))
        rows.append(
            (
                f"{who}: loss, first and last five steps",
                f"{learner['loss']['first']:.2f}, {learner['loss']['last']:.2f}",
            )
        )
    for name, syncer in report["syncers"].items():
        rows.append((f"{name}: GiB at most; processor, s", f"{syncer['peak_gib']:.2f}; {syncer['cpu_s']:.0f}"))
    for kind, held in report["stored"].items():
        rows.append((f"{kind}: objects, GB", f"{held['objects']}, {held['bytes'] / 1e9:.2f}"))
    for row in rows:
        table.add_row(*row)
    Console(width=110).print(table)


if __name__ == "__main__":
    sys.exit(main())

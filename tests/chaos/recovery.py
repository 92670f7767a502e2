"""How long the run stands still when a syncer is killed, and where the time goes. `python -m chaos.recovery --help`.

From SIGKILL to the next commit on a fragment the dead one held, split into: detection (a supervisor notices, or the
standby stops hearing it), process start, reading the commits, and the first round, with folding what is taken over.
Commits are dated by the syncers, all on this machine.
"""

import argparse
import json
import random
import re
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from chaos.checker import Checker
from chaos.cluster import RUN, Child, Cluster, end_on_sigterm

_HOLDS = re.compile(r"(?P<life>\S+) holds (?P<held>\d+) of \d+ fragments")
_SERVES = re.compile(r"(?P<life>\S+) serves .* read in (?P<read_s>[0-9.]+) s")
STEADY_S = 3.0
WAIT_S = 60.0
PARTS = ("detection", "start", "read", "first_round", "total")


@dataclass(frozen=True)
class Recovery:
    """One kill, in seconds."""

    detection: float
    start: float
    read: float
    first_round: float

    @property
    def total(self) -> float:
        """From the kill to the next commit."""
        return self.detection + self.start + self.read + self.first_round


def measure(folder: Path, *, standby: bool, kills: int, seed: int, forked: bool = False) -> list[Recovery]:
    """Kill a syncer so many times, with another one running or with a plain restart."""
    shutil.rmtree(folder, ignore_errors=True)
    cluster, draw, found = Cluster(folder, 2 if standby else 1, 3, forked=forked), random.Random(seed), list[Recovery]()
    with cluster.running():
        checker = Checker(RUN, cluster.direct)
        _until_steady(cluster, checker)
        while len(found) < kills:
            cluster.wait(STEADY_S + draw.uniform(0.0, 2.0))
            checker.check("before a kill")
            victim = draw.choice([child for child in cluster.syncers if _held(child) > 0])
            life = victim.life
            newest = dict(sorted(checker.commits))
            held = {p for p, v in newest.items() if checker.commits[p, v].header.writer == life}
            if not held:
                continue
            at = victim.kill()
            # A standby is measured without the restart that it makes good: on a busy machine either may be first.
            wait = time.sleep if standby else cluster.wait
            wait(1.0)  # nothing but supervision: looking at the log takes time
            commit = None
            while commit is None:
                assert time.time() - at < WAIT_S, f"never recovered; logs in {cluster.logs}"
                wait(0.2)
                commit = _next_commit(checker, held, at)
            found.append(_split(cluster, commit[1], at, commit[0]))
            print(f"kill {len(found):3d}: {found[-1].total:5.2f} s  {found[-1]}", flush=True)
            _until_steady(cluster, checker)
        cluster.stop()
        checker.check("end")
        assert not checker.violations, checker.violations
    return found


def _split(cluster: Cluster, writer: str, killed_at: float, committed_at: float) -> Recovery:
    child = next(c for c in cluster.syncers if writer.startswith(f"{c.name}-"))
    served_at, serves = next(_said(child, _SERVES, writer))
    read = float(serves["read_s"])
    if served_at < killed_at:
        # A standby: from its last taking over before the commit.
        took = [at for at, _ in _said(child, _HOLDS, writer) if killed_at < at <= committed_at + 0.01]
        taken_at = min([*took[-1:], committed_at])
        return Recovery(taken_at - killed_at, 0.0, 0.0, committed_at - taken_at)
    spawned_at = child.spawned_at
    return Recovery(spawned_at - killed_at, served_at - spawned_at - read, read, committed_at - served_at)


def _next_commit(checker: Checker, held: set[int], at: float) -> tuple[float, str] | None:
    checker.check("after a kill")
    headers = [c.header for c in checker.commits.values()]
    following = [(h.written_at, h.writer) for h in headers if h.fragment in held and h.written_at > at]
    return min(following, default=None)


def _held(child: Child) -> int:
    """Return how many fragments a syncer's present life said it holds, last."""
    return next((int(match["held"]) for _, match in reversed([*_said(child, _HOLDS, child.life)])), 0)


def _said(child: Child, pattern: re.Pattern[str], life: str) -> Iterator[tuple[float, re.Match[str]]]:
    """Yield what one life of a process logged that matches, and when, in seconds since 1970."""
    # A process that was killed leaves half a line, and what it prints besides its log is none.
    lines = child.log.read_text().splitlines() if child.log.exists() else []
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if (match := pattern.match(event["message"])) and match["life"] == life:
            yield datetime.fromisoformat(event["time"]).timestamp(), match


def _until_steady(cluster: Cluster, checker: Checker) -> None:
    """Wait until every syncer is up, each fragment is held once, and all have a new commit."""

    def steady() -> bool:
        held = [_held(child) for child in cluster.syncers]
        processes = [child.process for child in cluster.syncers]
        return sum(held) == 4 and all(process is not None and process.poll() is None for process in processes)

    _tend_until(cluster, steady)
    before = checker.newest()
    _tend_until(cluster, lambda: all(v > before[p] for p, v in checker.newest().items()))


def _tend_until(cluster: Cluster, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, f"never happened; logs in {cluster.logs}"
        cluster.wait(0.2)


def main() -> int:
    """Measure both ways and print a table."""
    parser = argparse.ArgumentParser(prog="recovery", description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="kills in each way (20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default="out/recovery", metavar="DIR")
    parser.add_argument("--json", metavar="PATH", help="write the report there too")
    a = parser.parse_args()
    end_on_sigterm()
    report = {}
    table = Table(title="from SIGKILL of a syncer to the next commit, seconds: p50 / worst", title_justify="left")
    for column in ("", "kills", *PARTS):
        table.add_column(column, justify="right")
    for name, standby in (("standby", True), ("restart", False)):
        found = measure(Path(a.out) / name, standby=standby, kills=a.kills, seed=a.seed)
        split = {part: [getattr(r, part) for r in found] for part in PARTS}
        report[name] = {
            part: {"p50": round(statistics.median(times), 3), "max": round(max(times), 3)}
            for part, times in split.items()
        } | {"kills": len(found)}
        table.add_row(
            name, str(len(found)), *(f"{statistics.median(split[part]):.2f} / {max(split[part]):.2f}" for part in PARTS)
        )
    Console(width=120).print(table)
    for path in (Path(a.out) / "report.json", a.json and Path(a.json)):
        if path:
            path.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

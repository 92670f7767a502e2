"""How long a run stands still when a syncer is killed.

The time runs from SIGKILL to the next commit by another syncer on a fragment that the killed syncer held.
"""

import asyncio
import itertools
import random
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from isthmus.agent.ports import open_ports
from isthmus_lab.bench.crowd import Crowd
from isthmus_lab.bench.measure import Row, Say, counted, parted, row
from isthmus_lab.bench.round import made, served
from isthmus_services.processes import Processes, isthmus_command

LEARNERS = 4
FRAGMENTS, PARAMS = 12, 70_000
PAUSE_S = 0.1
"""Seconds between a version and the next update of each learner on it."""

KILLS = 3
"""Kills for each repeat: one each is too few, because the worst of seven says little."""

CALM_S = 1.0, 2.0
"""Bounds of the seconds from recovery to the next kill; the time is drawn between them."""

LOOK_S = 0.005

STANDBY, STANDBY_WORST, RESTART = 1.0, 2.0, 1.5
"""Aims, in seconds. `RESTART` leaves out the time of reading the log."""

_SERVES = re.compile(r"serves .* read in ([0-9.]+) s")


@dataclass(frozen=True)
class Recovery:
    """The recovery from one kill, in seconds."""

    total: float
    read: float
    """The part of `total` in which a syncer that was started again read the log; 0 if another syncer took over."""


@dataclass(frozen=True)
class Syncers:
    """Syncers of one run, each a process with a name that no other has had."""

    run: str
    bus: str
    processes: Processes
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def start(self) -> str:
        """Start a syncer, as a supervisor would; return its name."""
        name = f"s{next(self._numbers)}"
        self.processes.start(name, isthmus_command("syncer", self.run, "--bus", self.bus, "--name", name))
        return name

    def read_s(self, name: str) -> float | None:
        """Return the seconds a syncer read the log; None before it serves. Raises `RuntimeError` if it has ended."""
        found = _SERVES.search(self.processes.said(name))
        return float(found[1]) if found else None


def rows(repeats: int, say: Say) -> Iterator[Row]:
    """Yield the recovery times with another syncer at hand, and with the only syncer started again."""
    size = f"{FRAGMENTS} × {counted(PARAMS)}"
    with tempfile.TemporaryDirectory() as folder, served(Path(folder)) as (place, bus):
        standby, restart = (
            asyncio.run(_measure(f"{place}/{count}", bus, Path(folder, str(count)), count, KILLS * repeats, part))
            for count, part in zip((2, 1), parted(say, 2), strict=True)
        )
    totals = [r.total for r in standby]
    yield row("recovery", "another syncer takes over, p50", size, totals, "s", aim=STANDBY, at_most=True)
    yield row("recovery", "the same, worst", size, [max(totals)], "s", aim=STANDBY_WORST, at_most=True)
    totals = [r.total for r in restart]
    without = [r.total - r.read for r in restart]
    yield row("recovery", "started again, p50", size, totals, "s")
    yield row("recovery", "the same, worst", size, [max(totals)], "s")
    yield row("recovery", "started again, less reading the log, p50", size, without, "s", aim=RESTART, at_most=True)


async def _measure(url: str, bus: str, folder: Path, count: int, kills: int, say: Say) -> list[Recovery]:
    """Kill one of `count` syncers, `kills` times; return the recoveries.

    After each kill another syncer is started: at once if the killed syncer was the only one, else after the recovery.
    """
    await made(url, [PARAMS] * FRAGMENTS, 1)
    draw, found = random.Random(0), list[Recovery]()
    with closing(Processes(folder)) as processes:
        syncers = Syncers(url, bus, processes)
        for _ in range(count):
            syncers.start()
        async with open_ports(url, bus) as ports, asyncio.TaskGroup() as tasks:
            crowd = Crowd(ports, LEARNERS)
            background = [tasks.create_task(work) for work in (crowd.listen(), crowd.beat())]
            background += [tasks.create_task(crowd.train(p, PAUSE_S)) for p in range(FRAGMENTS)]
            while len(found) < kills:
                while any(syncers.read_s(name) is None for name in processes.alive):  # noqa: ASYNC110  (other processes)
                    await asyncio.sleep(LOOK_S)
                await crowd.until([head + 2 for head in crowd.heads])
                await asyncio.sleep(draw.uniform(*CALM_S))
                victim = crowd.writers[draw.randrange(FRAGMENTS)]
                kept = {p for p, writer in crowd.writers.items() if writer == victim}
                at = processes.kill(victim)
                following = syncers.start() if count == 1 else ""
                await crowd.changed(lambda: any(crowd.writers[p] != victim for p in kept))  # noqa: B023
                total = time.perf_counter() - at
                found.append(Recovery(total, (syncers.read_s(following) or 0.0) if following else 0.0))
                if not following:
                    syncers.start()
                say(len(found) / kills)
            for task in background:
                task.cancel()
    return found

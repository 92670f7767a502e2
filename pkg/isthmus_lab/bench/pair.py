"""Two replicas of one model on one machine, with this library and with torchft's DiLoCo.

Each pair trains undisturbed, then with one replica killed now and then, then with its coordinator away. The coordinator
is a syncer here and a lighthouse there.
"""

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from isthmus.agent.ports import open_place, open_ports
from isthmus_lab.bench.measure import Row, Say, row
from isthmus_lab.bench.replica import STEP_TOKENS, SYNC_EVERY, Line
from isthmus_lab.bench.round import served
from isthmus_services.processes import Processes, isthmus_command
from isthmus_services.servers import free_ports

REPLICAS = ("a", "b")
READY_ROUNDS = 3
READY_S = 90.0

CALM_S = 8.0
KILLS = 2
KILL_EVERY_S = 6.0
AWAY_S, BACK_S = 8.0, 8.0
"""Seconds for which the coordinator is away, and seconds for which it is back."""


@dataclass(frozen=True)
class Outcome:
    """The figures of two replicas on one machine."""

    calm: float
    """Useful tokens a second, undisturbed: tokens of steps that are in the global model."""
    killed: float
    """Useful tokens a second, while one replica is killed every `KILL_EVERY_S` seconds."""
    orphaned: float
    """Useful tokens a second, from the kill of the coordinator until `BACK_S` seconds after its restart."""
    held_ms: float
    """Mean time in calls of optimizer and library in a round of `SYNC_EVERY` steps, undisturbed."""
    together: float
    """Mean replicas in a round as a share of all, while one replica is killed every `KILL_EVERY_S` seconds."""


class System(Protocol):
    """One of the two systems."""

    def replica(self, name: str) -> list[str]:
        """Return the arguments that start a replica."""

    def coordinator(self) -> list[str]:
        """Return the command that starts the coordinator."""

    def useful(self, reports: dict[str, list[Line]], start: float, stop: float) -> tuple[float, float]:
        """Return useful tokens between two moments, and the mean replicas in a round as a share of all."""


@dataclass(frozen=True)
class Torchft:
    """torchft with a lighthouse that is set to take a silent replica for dead as soon as it can be."""

    port: int = field(default_factory=lambda: free_ports(1)[0])

    def replica(self, name: str) -> list[str]:
        """Return the arguments that start a replica."""
        return ["torchft", "--name", name, "--at", f"http://127.0.0.1:{self.port}"]

    def coordinator(self) -> list[str]:
        """Return the command that starts the coordinator."""
        lighthouse = str(Path(sys.executable).with_name("torchft_lighthouse"))
        return [lighthouse, "--bind", f"127.0.0.1:{self.port}", "--min_replicas", "1", "--join_timeout_ms", "1000",
                "--quorum_tick_ms", "100", "--heartbeat_timeout_ms", "1000"]  # fmt: skip

    def useful(self, reports: dict[str, list[Line]], start: float, stop: float) -> tuple[float, float]:
        """Return useful tokens between two moments, and the mean replicas in a round as a share of all."""
        lines = [line for of in reports.values() for line in of]
        before, after = (max((r.batches for r in lines if r.at <= at), default=0) for at in (start, stop))
        rounds = [r.together for r in lines if start < r.at <= stop]
        share = statistics.fmean(rounds) / len(reports) if rounds else 0.0
        return float((after - before) * SYNC_EVERY * STEP_TOKENS), share


@dataclass(frozen=True)
class Isthmus:
    """A syncer, a store and a bus. The store and the bus are never killed, because torchft has none."""

    run: str
    bus: str

    def replica(self, name: str) -> list[str]:
        """Return the arguments that start a replica."""
        return ["isthmus", "--name", name, "--at", self.run, "--bus", self.bus]

    def coordinator(self) -> list[str]:
        """Return the command that starts the coordinator."""
        return isthmus_command("syncer", self.run, "--bus", self.bus, "--wait")

    def useful(self, reports: dict[str, list[Line]], start: float, stop: float) -> tuple[float, float]:
        """Return useful tokens between two moments, and the mean replicas in a round as a share of all."""
        return asyncio.run(self._merged(len(reports), start, stop))

    async def _merged(self, replicas: int, start: float, stop: float) -> tuple[float, float]:
        async with open_ports(self.run, self.bus) as ports:
            layout = ports.log.run.layout
            tokens, rounds = 0.0, []
            for fragment in layout.fragments:
                async for commit in ports.log.commits(fragment.index, 0):
                    if start < commit.header.written_at <= stop:
                        given = sum(i.tokens for i in commit.header.inputs)
                        tokens += given * fragment.size / layout.size
                        rounds.append(len(commit.header.inputs))
            return tokens, statistics.fmean(rounds) / replicas if rounds else 0.0


@dataclass(frozen=True)
class Pair:
    """The replicas of one system and their coordinator."""

    system: System
    processes: Processes

    def coordinate(self) -> None:
        """Start the coordinator."""
        self.processes.start("coordinator", self.system.coordinator())

    def train(self, name: str) -> None:
        """Start a replica."""
        command = [sys.executable, "-m", "isthmus_lab.bench.replica", *self.system.replica(name)]
        self.processes.start(name, [*command, "--report", str(self._report(name))])

    def _report(self, name: str) -> Path:
        return self.processes.folder / f"{name}.jsonl"

    def reports(self) -> dict[str, list[Line]]:
        """Return the lines that each replica has reported so far."""
        found = {}
        for name in REPLICAS:
            path = self._report(name)
            # A process that was killed may leave half a line.
            lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
            found[name] = [msgspec.json.decode(line, type=Line) for line in lines]
        return found

    def until_ready(self) -> None:
        """Wait until every replica has reported `READY_ROUNDS` rounds.

        Raises `RuntimeError` if a process has ended, or if `READY_S` seconds have passed.
        """
        until = time.monotonic() + READY_S
        while any(len(lines) < READY_ROUNDS for lines in self.reports().values()):
            for name in self.processes.alive:
                said = self.processes.said(name)
                if time.monotonic() > until:
                    raise RuntimeError(f"{name} is not ready after {READY_S:g} s:\n{said[-2000:]}")
            time.sleep(0.1)


def training(repeats: int, say: Say) -> Iterator[Row]:
    """Yield the figures of both systems: undisturbed, with kills of a replica, and without the coordinator."""
    found: dict[str, list[Outcome]] = {"isthmus": [], "torchft": []}
    with tempfile.TemporaryDirectory() as name, served(Path(name)) as (place, bus):
        asyncio.run(_make_bucket(place))
        for number in range(repeats):
            for at, kind in enumerate(found):
                system: System = Torchft() if kind == "torchft" else Isthmus(f"{place}/{number}", bus)
                found[kind].append(_together(system, Path(name) / f"{kind}-{number}"))
                say((2 * number + at + 1) / (2 * repeats))
    size = "2 × 0.84M"

    def both(what: str, unit: str, of: Callable[[Outcome], float]) -> Row:
        ours, theirs = ([of(outcome) for outcome in found[kind]] for kind in found)
        return row("peers", f"{what}; torchft", size, ours, unit, limits=theirs)

    yield both("useful tokens a second", "", lambda o: o.calm)
    yield both("held by all calls of a round", "ms", lambda o: o.held_ms)
    yield both(f"useful tokens a second, a kill every {KILL_EVERY_S:g} s", "", lambda o: o.killed)
    yield both("replicas in a round, of all, meanwhile", "", lambda o: o.together)
    for kind, outcomes in found.items():
        shares = [o.orphaned / o.calm for o in outcomes]
        what = f"{kind}: useful tokens, the coordinator {AWAY_S:g} s away and {BACK_S:g} s back, of calm"
        yield row("peers", what, size, shares, "")


async def _make_bucket(place: str) -> None:
    async with open_place(f"{place}/none", make=True):
        pass


def _together(system: System, folder: Path) -> Outcome:
    with closing(Processes(folder, {"OMP_NUM_THREADS": "1", "RUST_LOG": "error"})) as processes:
        pair = Pair(system, processes)
        pair.coordinate()
        for name in REPLICAS:
            pair.train(name)
        pair.until_ready()
        marks = [time.time()]
        time.sleep(CALM_S)
        marks.append(time.time())
        for _ in range(KILLS):
            processes.kill(REPLICAS[1])
            pair.train(REPLICAS[1])
            time.sleep(KILL_EVERY_S)
        marks.append(time.time())
        time.sleep(KILL_EVERY_S)  # until both replicas train again
        marks.append(time.time())
        processes.kill("coordinator")
        time.sleep(AWAY_S)
        pair.coordinate()
        time.sleep(BACK_S)
        marks.append(time.time())
    reports = pair.reports()
    spans = ((marks[0], marks[1]), (marks[1], marks[2]), (marks[3], marks[4]))
    (calm, _), (killed, together), (orphaned, _) = (system.useful(reports, *span) for span in spans)
    held = [r.held_s for lines in reports.values() for r in lines if marks[0] < r.at <= marks[1]]
    seconds = [stop - start for start, stop in spans]
    return Outcome(
        calm / seconds[0], killed / seconds[1], orphaned / seconds[2], 1e3 * statistics.fmean(held), together
    )

"""The demo's processes: one syncer and M learners, started by the commands that users type, killed and restarted."""

import math
import os
import random
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from isthmus.errors import InputError
from isthmus.inspect.bus_view import BusView
from isthmus_services.commands.learner import NEVER_MERGED
from isthmus_services.processes import end

STOP_S = 30.0
CRASHES_MAX = 3
"""Crashes of one process (ends that the demo did not ask for) after which the demo gives up."""
CALM_PERIODS = 4
"""Periods of H steps for which a learner is not killed: after its last kill, and before its last step."""


@dataclass(frozen=True)
class Kill:
    """One SIGKILL."""

    kind: str
    name: str
    at: float
    """Seconds since 1970."""
    incarnation: int
    step: int


@dataclass
class Worker:
    """One place in the fleet: its present process, and what is known of its processes so far."""

    name: str
    kind: str
    command: list[str]
    log: Path
    environment: Mapping[str, str]
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    killed_incarnation: int = 0
    killed_step: float = -math.inf
    done: bool = False
    crashes: int = 0

    def start(self) -> None:
        """Start the process. A syncer gets a new name at each start, so that the log tells its processes apart."""
        self.starts += 1
        command = [*self.command, "--name", f"{self.name}-{self.starts}"] if self.kind == "syncer" else self.command
        with open(self.log, "ab") as out:
            self.process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={k: v for k, v in os.environ.items() if not k.startswith("ISTHMUS_")} | dict(self.environment),
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        """Whether its process runs."""
        return self.process is not None and self.process.poll() is None


@dataclass
class Fleet:
    """All processes of a demo, and their kills."""

    syncer: Worker
    learners: list[Worker]
    steps: int
    sync_every: int
    random: random.Random
    kill_every: float | None
    kill_syncer_every: float | None
    kills: list[Kill] = field(default_factory=list)
    _next: dict[str, float] = field(default_factory=dict)

    def start(self) -> None:
        """Start all processes."""
        for worker in (self.syncer, *self.learners):
            worker.start()
        now = time.monotonic()
        self._next = {"learner": now + (self.kill_every or 0.0), "syncer": now + (self.kill_syncer_every or 0.0)}

    @property
    def finished(self) -> bool:
        """Whether every learner has done its steps."""
        return all(worker.done for worker in self.learners)

    def tend(self, hearing: BusView) -> None:
        """Restart processes that crashed, and kill those whose kill is due.

        Raises `InputError` for a process that ends with status 2, or crashes `CRASHES_MAX` times.
        """
        for worker in (self.syncer, *self.learners):
            if worker.done or worker.running or worker.process is None:
                continue
            # Both statuses mean that the steps are done. If a short demo merged nothing, its report shows that.
            if worker.kind == "learner" and worker.process.returncode in (0, NEVER_MERGED):
                worker.done = True
                continue
            worker.crashes += 1
            if worker.process.returncode == 2 or worker.crashes >= CRASHES_MAX:
                last = worker.log.read_text(errors="replace").strip().splitlines()[-1:]
                raise InputError(
                    f"{worker.name} ended with status {worker.process.returncode}: {' '.join(last)} ({worker.log})"
                )
            worker.start()
        now = time.monotonic()
        if self.kill_every and now >= self._next["learner"]:
            candidates = [w for w in self.learners if self._may_kill(w, hearing)]
            if candidates:
                self._kill(self.random.choice(candidates), hearing)
                self._next["learner"] = now + self.kill_every
        if self.kill_syncer_every and now >= self._next["syncer"]:
            alive = hearing.syncers.get(f"{self.syncer.name}-{self.syncer.starts}")
            if alive is not None and alive.commits > 0 and not self._nearly_done(hearing):
                self._kill(self.syncer, hearing)
                self._next["syncer"] = now + self.kill_syncer_every

    def stop(self, worker: Worker) -> None:
        """Send SIGTERM and wait for the end of the process; send SIGKILL if it takes longer than `STOP_S`."""
        if worker.process is None or not worker.running:
            return
        end(worker.process, STOP_S)

    def stop_all(self) -> None:
        """End every process."""
        for worker in (*self.learners, self.syncer):
            if worker.running and worker.process is not None:
                worker.process.terminate()
        for worker in (*self.learners, self.syncer):
            self.stop(worker)

    def _may_kill(self, worker: Worker, hearing: BusView) -> bool:
        """Return whether the learner is up again, well past its last kill, and has enough steps left to recover.

        Without this check, no learner would finish if a start takes as long as the time between two kills.
        """
        view = hearing.learners.get(worker.name)
        if view is None or view.heartbeat is None or not worker.running:
            return False
        up = view.heartbeat.incarnation > worker.killed_incarnation
        return up and worker.killed_step + self._calm < view.step < self.steps - self._calm

    @property
    def _calm(self) -> int:
        """`CALM_PERIODS` in steps."""
        return CALM_PERIODS * self.sync_every

    def _nearly_done(self, hearing: BusView) -> bool:
        return all(
            worker.done or hearing.learners[worker.name].step > self.steps - self._calm
            for worker in self.learners
            if worker.name in hearing.learners
        )

    def _kill(self, worker: Worker, hearing: BusView) -> None:
        assert worker.process is not None, "killing what never started"
        view = hearing.learners.get(worker.name)
        worker.process.send_signal(signal.SIGKILL)
        worker.process.wait()
        incarnation = view.incarnation if view and worker.kind == "learner" else worker.starts
        name = worker.name if worker.kind == "learner" else f"{worker.name}-{worker.starts}"
        self.kills.append(Kill(worker.kind, name, time.time(), incarnation, view.step if view else 0))
        worker.killed_incarnation = incarnation
        worker.killed_step = view.step if view else 0
        worker.start()

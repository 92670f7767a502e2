"""The parts of `make gpu` that train: two learners on one GPU beside data parallel and one alone, and a learner killed."""

import json
import os
import random
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import isthmus
from gpu.learner import Text, make_model, make_optimizer, rate, train_step
from gpu.parts import HAS_GPU, wait
from isthmus.demo.text import corpus
from isthmus.errors import InputError
from isthmus.log import polar
from isthmus.runtime.clock import cores
from isthmus_lab.bench.measure import Row, counted, row
from isthmus_services.processes import end, isthmus_command

TEXT_MAX, HELD_OUT = (192 << 20, 256 << 10) if HAS_GPU else (2 << 20, 16 << 10)
SHAPE, BATCH = ([768, 12, 12, 512], 16) if HAS_GPU else ([32, 2, 2, 32], 4)
"""Width, layers, heads and context of the model, 85 million parameters; windows in a learner's batch."""

STEPS_LEAST, STEPS_MOST = (120, 3000) if HAS_GPU else (40, 40)


@dataclass
class Curve:
    """Held-out loss of one run along its tokens."""

    name: str
    tokens: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


PACKAGES = ("torch", "transformers", "jax", "scipy", "sympy", "pandas", "numpy", "sklearn", "numba")
"""Packages whose text is used beside Python's own, as far as they are installed."""


def gather_text(path: Path) -> int:
    """Write text of this machine's Python packages into a file, the held-out part last; return its size.

    A file that an earlier part has written is used again.
    """
    size = Path(f"{path}.size")
    if size.exists():
        return int(size.read_text())
    train: list[bytes] = []
    kept_back: list[bytes] = []
    packages = Path(sysconfig.get_paths()["purelib"])
    for root in (None, *(str(packages / name) for name in PACKAGES if HAS_GPU and (packages / name).is_dir())):
        try:
            found = corpus(root)
        except InputError:  # it has too little to hold any back
            continue
        train += [piece.read() for piece in found.train]
        # A little of many files instead of all of a few.
        kept_back += [piece.read()[: 4 << 10] for piece in found.kept_back]
    random.Random(0).shuffle(kept_back)
    held_out = b"\n".join(kept_back)[:HELD_OUT]
    path.write_bytes(b"\n".join(train)[:TEXT_MAX] + held_out)
    size.write_text(str(len(held_out)))
    return len(held_out)


class Runs:
    """The runs of one part, on one text, with a limit of time."""

    def __init__(self, folder: Path, seconds: float, passes: float) -> None:
        """`passes`: what all runs together take, in units of the steps of one learner alone."""
        began = time.monotonic()
        self.folder, self.text = folder, folder.parent / f"text-{TEXT_MAX >> 20}"
        self.held_out = gather_text(self.text)
        self.started: list[subprocess.Popen[bytes]] = []
        self.steps = self._steps(began + seconds, passes)

    def _steps(self, until: float, passes: float) -> int:
        """Return how many steps of every learner fit into the time until then, as measured."""
        text, model = Text(self.text, self.held_out, SHAPE[3]), make_model(SHAPE)
        self.parameters = sum(p.numel() for p in model.parameters())
        optimizer = make_optimizer(model)
        for step in range(20):
            if step == 5:
                wait()
                began = time.perf_counter()
            train_step(model, optimizer, text.batch(BATCH, 0, step), rate(step, 1000))
        wait()
        self.step_s = (time.perf_counter() - began) / 15
        return max(STEPS_LEAST, min(STEPS_MOST, int((until - time.monotonic()) / passes / self.step_s)))

    def learner(self, name: str, order: int, *more: str, steps: int, batch: int = BATCH) -> subprocess.Popen[bytes]:
        """Start a process that trains."""
        words = [
            "--text", str(self.text), "--held-out", str(self.held_out), "--steps", str(steps), "--batch", str(batch),
            "--order", str(order), "--report", str(self.report(name)), "--shape", *map(str, SHAPE), *more,
        ]  # fmt: skip
        with open(self.folder / f"{name}.log", "ab") as log:
            process = subprocess.Popen([sys.executable, "-m", "gpu.learner", name, *words], stdout=log, stderr=log)
        self.started.append(process)
        return process

    def syncer(self, run: str, *more: str) -> subprocess.Popen[bytes]:
        """Start a syncer on the CPU."""
        with open(f"{run}-syncer.log", "ab") as log:
            process = subprocess.Popen(
                isthmus_command("syncer", run, "--wait", "--threads", str(max(1, cores() // 2)), *more),
                stdout=log, stderr=log,
            )  # fmt: skip
        self.started.append(process)
        return process

    def report(self, name: str) -> Path:
        """Return where a process reports."""
        return self.folder / f"{name}.jsonl"

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Return what a process has reported so far."""
        try:
            whole = self.report(name).read_text().splitlines()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in whole if line.endswith("}")]

    def ended(self, name: str, process: subprocess.Popen[bytes]) -> None:
        """Raise `RuntimeError` if a process did not end well."""
        if process.wait() != 0:
            raise RuntimeError(f"{name} ended with {process.returncode}:\n{self.said(name)}")

    def said(self, name: str) -> str:
        """Return the end of a process's log."""
        return (self.folder / f"{name}.log").read_text(errors="replace")[-1500:]

    def training(self) -> list[subprocess.Popen[bytes]]:
        """Return the processes that train."""
        return [process for process in self.started if "gpu.learner" in process.args]  # type: ignore[operator]

    def close(self) -> None:
        """End what runs."""
        for process in self.started:
            if process.poll() is None:
                process.kill()
                process.wait()


REFERENCE = "data parallel"
ALONE = {REFERENCE: 2, "one learner, half the tokens": 1}
"""What the runs are compared with, as one process each, and the size of its batch in learners' batches."""


@dataclass
class Together:
    """A run of two learners: its processes, and the global model that is followed meanwhile."""

    merge: str
    path: str
    names: tuple[str, str]
    processes: list[subprocess.Popen[bytes]]
    syncer: subprocess.Popen[bytes]
    curve: Curve
    followed: Any = None


def losses(folder: Path, seconds: float) -> Iterator[Row | Curve]:
    """Train as data parallel does, alone, and in runs by RDA and Iso, with the same tokens; yield losses and curves.

    All train at the same time: the losses do not depend on that, and no time is lost while processes start.
    """
    runs = Runs(folder, seconds, passes=7.5)
    try:
        alone = {
            name: runs.learner(name.split()[0], 0, steps=runs.steps, batch=batch * BATCH)
            for name, batch in ALONE.items()
        }
        on_gpu = _merges_on_gpu()
        together = [_start(runs, "rda"), _start(runs, "iso", *(["--gpu"] if on_gpu else []))]
        text, model = Text(runs.text, runs.held_out, SHAPE[3]), make_model(SHAPE)
        while any(process.poll() is None for process in runs.training()):
            time.sleep(1.0)
            for run in together:
                _look(runs, run, text, model)
        size = f"{counted(runs.parameters)}, {counted(2 * runs.steps * BATCH * SHAPE[3])} tokens"
        yield row("training", "steps of every learner", size, [float(runs.steps)], "")
        yield row("training", "isotropic merges computed on the GPU", size, [float(on_gpu)], "")
        reference: list[float] = []
        for name, process in alone.items():
            runs.ended(name.split()[0], process)
            lines = [line for line in runs.lines(name.split()[0]) if "held_out" in line]
            curve = Curve(name, [line["tokens"] for line in lines], [line["held_out"] for line in lines])
            yield curve
            reference = reference or [curve.losses[-1]]
            yield row("training", f"loss of {name}", size, [curve.losses[-1]], "nats per byte", limits=reference)
        for run in together:
            yield from _finish(runs, run, text, model, size, reference)
        for run in together:
            # On the cores isotropic merges take long, so a part of them is replayed.
            newest = max(max(runs.lines(name)[-1]["versions"]) for name in run.names)
            more = ("--to", str(max(1, min(6, newest)))) if run.merge == "iso" else ()
            what = f"{run.merge.upper()}{', the first six versions' if more else ''}"
            yield from _replayed("training", run.path, what, size, *more)
    finally:
        runs.close()


def _merges_on_gpu() -> bool:
    """Return whether the GPU merges matrices with the right bits. On cores, isotropic merges would keep all busy."""
    try:
        print(f"isotropic merges on {polar.require_gpu()}")
    except InputError as error:
        print(f"isotropic merges on the cores: {error}")
        return False
    return True


def _start(runs: Runs, merge: str, *more: str) -> Together:
    path = str(runs.folder / merge)
    names = (f"{merge}-0", f"{merge}-1")
    syncer = runs.syncer(path, *more)
    processes = [
        runs.learner(name, i, "--run", path, "--merge", merge, steps=runs.steps) for i, name in enumerate(names)
    ]
    return Together(merge, path, names, processes, syncer, Curve(f"two learners, {merge.upper()}"))


def _look(runs: Runs, run: Together, text: Text, model: Any) -> None:
    """Measure the global model of a run if it has changed. Raises `RuntimeError` if the run has no syncer any more."""
    if run.syncer.poll() is not None:
        said = Path(f"{run.path}-syncer.log").read_text(errors="replace")[-1500:]
        raise RuntimeError(f"the syncer of {run.merge} ended with {run.syncer.returncode}:\n{said}")
    tokens = sum(max((line.get("tokens", 0) for line in runs.lines(name)), default=0) for name in run.names)
    if run.followed is None and tokens > 0:
        run.followed = isthmus.follow(run.path, model, mixed=True)
    if tokens > 0 and run.followed.update():
        run.curve.tokens.append(tokens)
        run.curve.losses.append(text.loss(model))


def _finish(
    runs: Runs, run: Together, text: Text, model: Any, size: str, reference: list[float]
) -> Iterator[Row | Curve]:
    for name, process in zip(run.names, run.processes, strict=True):
        runs.ended(name, process)
    end(run.syncer, 30.0)
    run.followed.close()
    with isthmus.follow(run.path, model, mixed=True) as followed:
        followed.update(20.0)
    run.curve.tokens.append(2 * runs.steps * BATCH * SHAPE[3])
    run.curve.losses.append(text.loss(model))
    yield run.curve
    what = f"loss of the global model of two learners, {run.merge.upper()}"
    yield row("training", what, size, [run.curve.losses[-1]], "nats per byte", limits=reference)


def _replayed(part: str, run: str, what: str, size: str, *more: str) -> Iterator[Row]:
    """Yield how many versions a replay of a run checks, how many of them differ, and how long it takes."""
    began = time.monotonic()
    with tempfile.NamedTemporaryFile() as file:
        done = subprocess.run(
            isthmus_command("replay", run, "--json", file.name, *more), capture_output=True, text=True, check=False
        )
        took = time.monotonic() - began
        try:
            found = json.loads(Path(file.name).read_text())
        except ValueError:
            raise RuntimeError(f"replay ended with {done.returncode}:\n{done.stderr[-1500:]}") from None
    yield row(part, f"{what}: versions replayed", size, [float(found["commits"])], "", aim=1.0)
    yield row(part, f"{what}: versions that differ", size, [float(found["differ"])], "", aim=0.0, at_most=True)
    yield row(part, f"{what}: seconds of the replay", size, [took], "s")


def killed(folder: Path, seconds: float) -> Iterator[Row]:
    """Kill one of two learners in mid-run and start it again; yield how the other fared and when the first was back."""
    runs = Runs(folder, seconds, passes=3.5)
    try:
        run, steps = str(folder / "run"), runs.steps
        size = f"{counted(runs.parameters)}, {steps} steps"
        syncer = runs.syncer(run)
        more = ("--run", run, "--checkpoint-s", "5" if HAS_GPU else "0.5")
        a = runs.learner("a", 0, *more, steps=steps)
        b = runs.learner("b", 1, *more, steps=steps)
        while _step(runs, "b") < steps // 2 and b.poll() is None:
            time.sleep(0.1)
        os.kill(b.pid, signal.SIGKILL)
        killed_at, lost_at = time.time(), _step(runs, "b")
        b.wait()
        b = runs.learner("b", 1, *more, steps=steps)
        runs.ended("a", a)
        runs.ended("b", b)
        end(syncer, 30.0)
        back = [line for line in runs.lines("b") if line.get("incarnation", 0) > 1]
        gaps = [y["at"] - x["at"] for x, y in pairwise(line for line in runs.lines("a") if "loss" in line)]
        yield row("kill", "from kill -9 to training again, a new process", size, [back[0]["at"] - killed_at], "s")
        yield row("kill", "steps that were trained again", size, [float(lost_at - back[0]["step"])], "")
        middle = sorted(gaps)[len(gaps) // 2]
        yield row(
            "kill",
            "longest between two reports of the other learner, beside the usual",
            size,
            [max(gaps)],
            "s",
            limits=[middle],
        )
        yield from _replayed("kill", run, "RDA, one killed", size)
    finally:
        runs.close()


def _step(runs: Runs, name: str) -> int:
    return max((int(line.get("step", 0)) for line in runs.lines(name)), default=0)

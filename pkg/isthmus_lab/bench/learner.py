"""Cost of a run to the training thread: the copy of a fragment, checkpoints, and the share of useful steps."""

import gc
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from isthmus.format.layout import Spec, TensorClass, partition
from isthmus.format.rules import Adoption, Pace, Rules
from isthmus.learner.boundary import Boundary, Captured, UploadDone
from isthmus.torch.model import TorchReplica
from isthmus_lab.bench.measure import Row, Say, counted, parted, quantile, row
from isthmus_services.processes import isthmus_command

SIZES = (1 << 20, 16 << 20, 50_000_000, 200_000_000)
BOUNDARIES = 25
"""Step boundaries in a repeat. The longest hold of them stands for the p99."""

HOLD, HOLD_MORE_S, P99_MORE_S = 1.3, 0.3e-3, 6e-3

CHECKPOINT_PARAMS, CHECKPOINT_S, WATCHED_S, GAP_S = 50_000_000, 1.5, 8.0, 0.02
STEPS = ((0.01, 0.95), (0.03, 0.98), (0.1, 0.99))
"""Seconds of a step, and the aim: a share of the bare loop's steps."""
STEP_PARAMS, STEP_S = 1_000_000, 4.0


def rows(repeats: int, say: Say) -> Iterator[Row]:
    """Yield the hold of a due fragment, the gaps of another thread, and the share of useful steps."""
    says = parted(say, 3)
    yield from _hold(repeats, says[0])
    with tempfile.TemporaryDirectory() as folder:
        yield from _gaps(repeats, Path(folder), says[1])
    with tempfile.TemporaryDirectory() as folder:
        yield from _useful(repeats, Path(folder), says[2])


# --- the copy of a fragment -------------------------------------------------------------------------------------------


def _hold(repeats: int, say: Say) -> Iterator[Row]:
    import torch

    for at, n in enumerate(SIZES):
        layout = partition([Spec("w", (n,), "float32", TensorClass.DENSE)], 1)
        model = torch.nn.Module()
        model.w = torch.nn.Parameter(torch.zeros(n))
        values = np.zeros(n, np.float32)
        boundary = Boundary(
            layout,
            TorchReplica(model, layout),
            periods=(1, 1),
            pace=Pace(),
            adopt=Adoption.OVERWRITE,
            versions=[(0, values, 0.0)],
            step=0,
            tokens_seen=0,
            now=time.perf_counter,
            notify=lambda: None,
        )
        source, kept = model.w.detach(), torch.zeros(n)
        middle: list[float] = []
        worst: list[float] = []
        copies: list[float] = []
        for number in range(repeats + 1):
            held, copied = [], []
            for _ in range(BOUNDARIES):
                began = time.perf_counter()
                kept.copy_(source)
                between = time.perf_counter()
                boundary.after_step(1)
                held.append(time.perf_counter() - between)
                copied.append(between - began)
                captured = boundary.outbox.pop()
                assert isinstance(captured, Captured), "a fragment is due at every boundary"
                del captured
                boundary.post(UploadDone(0))
            if number:
                middle.append(quantile(held, 0.5))
                worst.append(max(held))
                copies.append(quantile(copied, 0.5))
            say((at + (number + 1) / (repeats + 1)) / len(SIZES))
        size = counted(n)
        for what, found, more_s in (("p50", middle, 0.0), (f"the longest of {BOUNDARIES}", worst, P99_MORE_S)):
            bounds = [HOLD * copy + HOLD_MORE_S + more_s for copy in copies]
            yield row(
                "learner",
                f"hold of a due fragment, {what}, beside {HOLD:g} copies and {1e3 * (HOLD_MORE_S + more_s):g} ms",
                size,
                [1e3 * x for x in found],
                "ms",
                limits=[1e3 * x for x in bounds],
                aim=1.0,
                at_most=True,
            )
        del boundary, model, values, source, kept
        gc.collect()


# --- checkpoints ------------------------------------------------------------------------------------------------------


def _gaps(repeats: int, folder: Path, say: Say) -> Iterator[Row]:
    """Yield the longest gap of another thread of the process, without and with checkpoints, and their number."""
    import torch

    import isthmus

    model = torch.nn.Linear(CHECKPOINT_PARAMS // 1000, 1000, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer.step()
    bare: list[float] = []
    gaps: list[float] = []
    stored: list[float] = []
    with isthmus.join(
        str(folder / "run"),
        model,
        optimizer,
        learner="a",
        create=Rules(fragments=8, sync_every=1 << 20),
        checkpoint_s=CHECKPOINT_S,
    ) as link:
        seen: set[str] = set()

        def step() -> None:
            time.sleep(0.01)
            link.step(1)
            # The names are collected while training, because older checkpoints are deleted.
            if link.steps_done % 20 == 0:
                seen.update(path.name for path in (folder / "run" / "learners").glob("a/*/checkpoints/*"))

        for number in range(repeats + 1):
            quiet = _watch(WATCHED_S / 4, lambda: time.sleep(0.01))
            before = len(seen)
            gap = _watch(WATCHED_S, step)
            if number:
                bare.append(1e3 * quiet)
                gaps.append(1e3 * gap)
                stored.append(len(seen) - before)
            say((number + 1) / (repeats + 1))
    size = counted(CHECKPOINT_PARAMS)
    yield row("learner", "longest gap of another thread, nothing under way", size, bare, "ms")
    yield row("learner", "longest gap of another thread, checkpoints", size, gaps, "ms", aim=1e3 * GAP_S, at_most=True)
    yield row("learner", f"checkpoints stored in {WATCHED_S:g} s of that", size, stored, "")


def _watch(seconds: float, work: Callable[[], object]) -> float:
    """Repeat `work` for some seconds; return the longest gap [s] between turns of a thread that wakes every 0.5 ms."""
    stop, longest = threading.Event(), 0.0

    def turn() -> None:
        nonlocal longest
        last = time.perf_counter()
        while not stop.is_set():
            time.sleep(0.0005)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now

    thread = threading.Thread(target=turn)
    thread.start()
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        work()
    stop.set()
    thread.join()
    return longest


# --- useful steps -----------------------------------------------------------------------------------------------------


def _useful(repeats: int, folder: Path, say: Say) -> Iterator[Row]:
    """Yield the steps a second of a loop in a run with a syncer on this machine, as a share of the bare loop's."""
    import torch

    import isthmus

    torch.set_num_threads(1)
    side = int(STEP_PARAMS**0.5)
    for at, (step_s, aim) in enumerate(STEPS):
        torch.manual_seed(0)
        model = torch.nn.Linear(side, side)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        x = torch.randn(64, side)

        def train(passes: int, model: Any = model, optimizer: Any = optimizer, x: Any = x) -> None:
            for _ in range(passes):
                optimizer.zero_grad()
                model(x).square().mean().backward()
            optimizer.step()

        train(1)
        began = time.perf_counter()
        train(20)
        passes = max(1, round(20 * step_s / (time.perf_counter() - began)))
        run = str(folder / f"run-{at}")
        shares: list[float] = []
        create = Rules(fragments=8, sync_every=24)
        with isthmus.join(run, model, optimizer, learner="a", create=create, pace=Pace(quorum=1)) as link:
            syncer = subprocess.Popen(
                isthmus_command("syncer", run, "--quorum", "1", "--threads", "1"),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            try:
                for number in range(repeats + 1):
                    # The loops take turns of a fraction of a second, so that other load on the machine affects both.
                    counts, spent = [0, 0], [0.0, 0.0]
                    while sum(spent) < STEP_S:
                        for which in (0, 1):
                            began = time.perf_counter()
                            for _ in range(max(2, round(0.25 / step_s))):
                                train(passes)
                                if which:
                                    link.step(64)
                                counts[which] += 1
                            spent[which] += time.perf_counter() - began
                    if number:
                        shares.append((counts[1] / spent[1]) / (counts[0] / spent[0]))
                    say((at + (number + 1) / (repeats + 1)) / len(STEPS))
            finally:
                syncer.kill()
                syncer.wait()
        yield row("learner", "useful steps, share of the bare loop's", f"{1e3 * step_s:g} ms", shares, "", aim=aim)

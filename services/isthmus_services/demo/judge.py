"""Judges a finished run: the global model along the log, one learner alone for comparison, recoveries and totals."""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from isthmus.codecs.kernels import F32
from isthmus.demo.text import Corpus
from isthmus.log import Commit, Log, fold
from isthmus_services.demo.fleet import Kill
from isthmus_services.demo.left import ALONE, DRAWING, JUDGING, LAST, TRAINING
from isthmus_services.settings import declared

if TYPE_CHECKING:
    import torch
    from torch import nn

CURVE_POINTS = 16
CURVE_EVERY = 8
"""The curves are measured on every eighth window of the held-out text, the figures of the report on all windows."""

SAMPLE_PROMPT = b"def "
SAMPLE_BYTES = 240

START_S, LAST_S, DRAWING_S = 6.0, 3.0, 3.0
"""Expected seconds of the parts that are not measured: the start of the processes, the last rounds, the picture."""

MEASURED_STEPS, MEASURED_WINDOWS = 4, 32

WHOLE_STEPS, WINDOWS_MIN = 600, 64
"""From so many steps on, a run is judged on all windows of the held-out text; a shorter run on fewer, at least 64."""


@dataclass(frozen=True)
class Costs:
    """Seconds that this machine takes for the work that a demo consists of."""

    step_s: float
    """One optimizer step, while no other process trains."""
    window_s: float
    """One window of the held-out text."""

    def expected(self, a: declared.Demo, windows: int) -> dict[str, float]:
        """Return the expected seconds of every phase. `windows` is the number of held-out windows."""
        shared = max(1.0, (a.learners + 1) / (os.cpu_count() or 1))
        curve_s = (CURVE_POINTS + 1) * windows / CURVE_EVERY * self.window_s
        return {
            TRAINING: START_S + a.steps * self.step_s * shared,
            LAST: LAST_S,
            JUDGING: curve_s + (windows + SAMPLE_BYTES) * self.window_s,
            ALONE: curve_s + a.steps * self.step_s + windows * self.window_s,
            DRAWING: DRAWING_S,
        }


def windows_of(text: "torch.Tensor") -> int:
    """Return how many windows a held-out text [n] has."""
    from isthmus.demo.gpt import CONTEXT

    return max(1, (text.numel() - 1) // CONTEXT)


def judged(text: "torch.Tensor", steps: int) -> "torch.Tensor":
    """Return the beginning of a held-out text [n] on which a run is judged, in proportion to its steps.

    Otherwise judging a short run would take longer than its training.
    """
    from isthmus.demo.gpt import CONTEXT

    return text[: max(WINDOWS_MIN, windows_of(text) * steps // WHOLE_STEPS) * CONTEXT + 1]


def measure(corpus: Corpus, shard: tuple[int, int], text: "torch.Tensor") -> Costs:
    """Return the seconds of a step and of a window, measured on a few of each with a model that is discarded."""
    import torch

    from isthmus.demo.gpt import CONTEXT, byte_gpt, held_out_loss
    from isthmus.demo.trainer import optimizer_for, schedule, train_step, windows

    model, data = byte_gpt(), np.frombuffer(corpus.shard(*shard), np.uint8)
    optimizer = optimizer_for(model)
    some = text[: MEASURED_WINDOWS * CONTEXT + 1]
    for warm in (True, False):  # the first calls take longer, so only the second pass counts
        started = time.monotonic()
        for step in range(MEASURED_STEPS):
            train_step(model, optimizer, windows(data, 0, 0, step), schedule(step, MEASURED_STEPS))
        stepped = time.monotonic()
        held_out_loss(model, torch.clone(some))
        if not warm:
            return Costs((stepped - started) / MEASURED_STEPS, (time.monotonic() - stepped) / MEASURED_WINDOWS)
    raise AssertionError("one of the two is not for warming up")


@dataclass(frozen=True)
class Point:
    """Held-out loss after some tokens."""

    tokens: int
    loss: float


async def read_commits(log: Log) -> list[Commit]:
    """Return every commit of the run, in the order in which they were written."""

    async def one(fragment: int) -> list[Commit]:
        return [commit async for commit in log.commits(fragment, 0, log.run.digest)]

    found = await asyncio.gather(*(one(f.index) for f in log.run.layout.fragments))
    return sorted((c for commits in found for c in commits), key=lambda c: c.header.written_at)


async def global_curve(
    log: Log, commits: list[Commit], model: "nn.Module", text: "torch.Tensor", progress: Callable[[float], None]
) -> list[Point]:
    """Return the held-out loss of the global model at points along the run. `model` then holds its last version."""
    from isthmus.demo.gpt import held_out_loss
    from isthmus.torch import model as torch_model

    values: list[F32] = [await fold.initial(log, f.index) for f in log.run.layout.fragments]
    publishing = fold.PublishedValue(log)
    marks = {round(i * len(commits) / CURVE_POINTS) for i in range(CURVE_POINTS + 1)}
    tokens: dict[str, int] = {}
    points = []
    for number in range(len(commits) + 1):
        if number:
            commit = commits[number - 1]
            values[commit.header.fragment] = await publishing.step(values[commit.header.fragment], commit)
            for given in commit.header.inputs:
                tokens[given.learner] = max(given.tokens_seen, tokens.get(given.learner, 0))
        if number in marks:
            torch_model.load(model, log.run.layout, values)
            points.append(Point(sum(tokens.values()), held_out_loss(model, text, every=CURVE_EVERY)))
            progress(number / max(len(commits), 1))
    return points


def single_curve(
    model: "nn.Module",
    corpus: Corpus,
    shard: tuple[int, int],
    seed: int,
    steps: int,
    text: "torch.Tensor",
    progress: Callable[[float], None],
) -> list[Point]:
    """Train one learner alone on its shard, with the same initialisation, steps and schedule; return its curve."""
    from isthmus.demo.gpt import CONTEXT, held_out_loss
    from isthmus.demo.trainer import BATCH, optimizer_for, schedule, train_step, windows

    data = np.frombuffer(corpus.shard(*shard), np.uint8)
    optimizer = optimizer_for(model)
    every = max(1, steps // CURVE_POINTS)
    points = [Point(0, held_out_loss(model, text, every=CURVE_EVERY))]
    for step in range(steps):
        train_step(model, optimizer, windows(data, seed, shard[0], step), schedule(step, steps))
        if (step + 1) % every == 0 or step + 1 == steps:
            points.append(Point((step + 1) * BATCH * CONTEXT, held_out_loss(model, text, every=CURVE_EVERY)))
            progress((step + 1) / steps)
    return points


def rejections(commits: list[Commit]) -> dict[str, int]:
    """Return the number of rejected updates in the whole log, by reason."""
    newest = {c.header.fragment: c for c in commits}
    total: Counter[str] = Counter()
    for commit in newest.values():
        total.update(commit.header.rejected_total)
    return dict(total)


def recoveries(kills: list[Kill], commits: list[Commit]) -> list[dict[str, object]]:
    """Return, for each kill, the seconds until the log shows the recovery (None if it never does).

    A learner has recovered with the first commit that holds an update of a later incarnation. A syncer has recovered
    with the first later commit that another syncer process wrote.
    """
    rows: list[dict[str, object]] = []
    for kill in kills:
        seconds = None
        for commit in commits:
            h = commit.header
            if h.written_at <= kill.at:
                continue
            learner = kill.kind == "learner" and any(
                i.learner == kill.name and i.incarnation > kill.incarnation for i in h.inputs
            )
            if learner or (kill.kind == "syncer" and h.writer != kill.name):
                seconds = h.written_at - kill.at
                break
        rows.append({"kind": kill.kind, "name": kill.name, "step": kill.step, "recovery_s": seconds})
    return rows


def continuous(commits: list[Commit]) -> bool:
    """Return whether each fragment's versions are 1, 2, 3, … and each learner's merged bases increase strictly."""
    versions: dict[int, list[int]] = {}
    bases: dict[tuple[int, str], list[int]] = {}
    for c in sorted(commits, key=lambda c: (c.header.fragment, c.version)):
        versions.setdefault(c.header.fragment, []).append(c.version)
        for given in c.header.inputs:
            bases.setdefault((c.header.fragment, given.learner), []).append(given.base)
    contiguous = all(found == list(range(1, len(found) + 1)) for found in versions.values())
    return contiguous and all(a < b for found in bases.values() for a, b in pairwise(found))

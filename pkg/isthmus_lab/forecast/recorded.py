"""Goodput that a recorded run achieved, read from its log, beside the goodput that the model predicts.

For every update, a commit names the learner's incarnation, the learner's own step, and the time at which that step
ended. This is enough: an incarnation ends where a later one begins, and the step at which the later one begins shows
what the failure left.
"""

import itertools
import math
import re
import statistics
from collections import defaultdict
from dataclasses import dataclass

from isthmus.errors import InputError
from isthmus.log import Log
from isthmus_lab.forecast.goodput import Shares, fits
from isthmus_lab.working_time import goodput

_LIFE = re.compile(r"learners/(?P<learner>[^/]+)/(?P<life>[0-9]+)/(?P<what>claim|checkpoints/(?P<step>[0-9]+)-)")


@dataclass(frozen=True, kw_only=True)
class Observed:
    """One run, as its log shows it. Seconds are on its syncers' clocks."""

    learners: int
    span_s: float
    """Seconds from the first step that an update was based on to the last step in an update: the mean over learners."""
    step_s: float
    """Mean seconds of a step within an incarnation."""
    failures: int
    """Number of incarnations that were followed by another one of the same learner."""
    mtbf_s: float
    """Mean seconds between two failures of one learner: the time without recoveries, over the failures."""
    recovery_s: float
    """Mean seconds from the last step of an incarnation to the first of the next, less half the time between two
    updates."""
    checkpoint_s: float
    """Median seconds between two checkpoints of a learner; a failure takes back the training after the last one."""
    steps: int
    """Sum of all learners' own steps at the end; steps that failures took back are not included."""
    goodput: float
    """Time of these steps, as a share of the whole time of all learners."""
    uptime: float
    """Share of the time in which at least one incarnation was alive."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """A run's figures and the model's prediction for them."""

    observed: Observed
    predicted: Shares

    @property
    def error(self) -> float:
        """Predicted minus achieved goodput."""
        return self.predicted.goodput - self.observed.goodput


@dataclass
class _Life:
    """One incarnation in the log: when it began, and time and own step at its first and at its last merged update."""

    began: float
    began_step: int
    """Step of the first update's base; it can lie before an incarnation that continued from a checkpoint."""
    first: tuple[float, int]
    last: tuple[float, int]
    updates: int = 1

    def add(self, other: "_Life") -> None:
        self.updates += 1
        self.began, self.began_step = min(self.began, other.began), min(self.began_step, other.began_step)
        self.first, self.last = min(self.first, other.first), max(self.last, other.last)


async def observe(log: Log) -> Observed:
    """Return the figures of a run, read from its log. Raises `InputError` if the log holds too few updates."""
    lives: dict[tuple[str, int], _Life] = {}
    for p in range(len(log.run.layout.fragments)):
        async for commit in log.commits(p, 0):
            for given in commit.header.inputs:
                at = (given.taken_at, given.step)
                life = _Life(given.taken_at - given.train_s, given.step - given.steps, at, at)
                key = (given.learner, given.incarnation)
                if key in lives:
                    lives[key].add(life)
                else:
                    lives[key] = life
    by_learner: dict[str, list[_Life]] = defaultdict(list)
    for (learner, _), life in sorted(lives.items()):
        by_learner[learner].append(life)
    claims, checkpoints = await _kept(log)
    moved = [life for of in by_learner.values() for life in of if life.last[1] > life.first[1]]
    if not moved:
        raise InputError(f"{log.run.url}: its log holds no update: there is nothing to compare with")
    within_s = sum(life.last[0] - life.first[0] for life in moved)
    within_steps = sum(life.last[1] - life.first[1] for life in moved)
    step_s = within_s / within_steps
    between_s = within_s / max(1, sum(life.updates - 1 for life in moved))
    spans = {name: of[-1].last[0] - min(life.began for life in of) for name, of in by_learner.items()}
    gaps = [
        max(0.0, after.began - before.last[0] - between_s / 2.0)
        for of in by_learner.values()
        for before, after in itertools.pairwise(of)
    ]
    # An incarnation without a merged update is known only by its claim. The gap between its neighbours includes it.
    failures = sum(max(claims.get(name, 0), len(of)) - 1 for name, of in by_learner.items())
    total = sum(spans.values())
    steps = sum(max(life.last[1] for life in of) - of[0].began_step for of in by_learner.values())
    recovering = sum(gaps)
    every = [b - a for of in checkpoints.values() for a, b in itertools.pairwise(of) if b > a]
    return Observed(
        learners=len(by_learner),
        span_s=total / len(by_learner),
        step_s=step_s,
        failures=failures,
        mtbf_s=(total - recovering) / failures if failures else float("inf"),
        recovery_s=recovering / failures if failures else 0.0,
        checkpoint_s=statistics.median(every) * step_s if every else 0.0,
        steps=steps,
        goodput=goodput(steps * step_s, 0.0, total),
        uptime=_uptime([(life.began, life.last[0]) for of in by_learner.values() for life in of]),
    )


def check(observed: Observed) -> Check:
    """Return the run's figures with the model's prediction for learners that fail and come back as these did.

    A learner is one slice. It trains for the time between two failures, is away for a recovery, and loses the training
    after its last checkpoint.
    """
    mtbf_s = observed.mtbf_s
    if math.isinf(mtbf_s):
        here = kept = 1.0
    else:
        here = mtbf_s / (mtbf_s + observed.recovery_s)
        kept = fits(mtbf_s, max(observed.checkpoint_s, observed.step_s), 1.0 / mtbf_s) / mtbf_s
    predicted = Shares(
        goodput=here * kept,
        waiting=1.0 - here,
        repairing=1.0 - here,
        reconfiguring=0.0,
        lost=here * (1.0 - kept),
        uptime=1.0 - (1.0 - here) ** observed.learners,
        participation=1.0,
    )
    return Check(observed=observed, predicted=predicted)


async def _kept(log: Log) -> tuple[dict[str, int], dict[str, list[int]]]:
    """Return, by learner, the number of incarnations and the steps of the newest incarnation's checkpoints."""
    claims: dict[str, int] = defaultdict(int)
    checkpoints: dict[tuple[str, int], list[int]] = defaultdict(list)
    for entry in await log.store.list("learners/"):
        found = _LIFE.match(entry.key)
        if found is None:
            continue
        if found["what"] == "claim":
            claims[found["learner"]] += 1
        else:
            checkpoints[found["learner"], int(found["life"])].append(int(found["step"]))
    newest = {name: max(life for learner, life in checkpoints if learner == name) for name, _ in checkpoints}
    return claims, {name: sorted(checkpoints[name, life]) for name, life in newest.items()}


def _uptime(spans: list[tuple[float, float]]) -> float:
    """Return the share of the time between the first start and the last end that at least one span covers."""
    covered = 0.0
    spans = sorted(spans)
    begun, reached = spans[0]
    whole = max(end for _, end in spans) - begun
    for start, end in spans:
        if start > reached:
            covered += reached - begun
            begun = start
        reached = max(reached, end)
    return (covered + reached - begun) / whole if whole > 0.0 else 1.0

"""Goodput that a recorded run achieved, read from its log, beside the goodput that the model predicts.

For every update, a commit names the learner's incarnation, the learner's own step, and the time at which that step
ended. This is enough: an incarnation ends where a later one begins, the step at which the later one begins shows what
the failure took back, and the updates before the failure show which part of that a commit holds.
"""

import itertools
import math
import random
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from isthmus.errors import InputError
from isthmus.log import Log
from isthmus_lab.forecast.goodput import Shares
from isthmus_lab.working_time import goodput

GOODPUT_WITHIN = 0.06
"""Stated error of the predicted goodput: in virtual time, where the true values are known, it is within this."""

UPTIME_WITHIN = 0.01
"""Error of the measured uptime: updates show when a learner was there only to half the time between two of them."""

DRAWS = 400
"""Times that the outages of a run are placed at random."""

CHANCE = 0.01
"""Share of these draws that lie outside the stated range of the uptime."""

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
    """Median seconds between two checkpoints of a learner, which trains again what followed the last one."""
    update_s: float
    """Mean seconds between two merged updates of one fragment of a learner."""
    steps: int
    """Sum of all learners' own steps at the end; steps that failures took back are not included."""
    again: float
    """Time of steps that were trained again, as a share of the whole time of all learners."""
    goodput: float
    """Time of steps, those trained again included, less work that neither an update nor a checkpoint holds, as a share
    of the whole time of all learners."""
    uptime: float
    """Share of the time in which at least one incarnation was alive."""
    outages: Sequence["Outages"] = field(default=(), repr=False)
    """By learner."""


@dataclass(frozen=True, kw_only=True)
class Outages:
    """When a learner was part of a run, and how long its outages were; seconds."""

    began: float
    ended: float
    away_s: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Check:
    """A run's figures and the model's prediction for them."""

    observed: Observed
    predicted: Shares
    uptime_range: tuple[float, float]
    """Least and greatest uptime that chance explains, if learners fail independently of one another."""

    @property
    def error(self) -> float:
        """Predicted minus achieved goodput."""
        return self.predicted.goodput - self.observed.goodput

    @property
    def uptime_error(self) -> float:
        """Predicted minus achieved uptime."""
        return self.predicted.uptime - self.observed.uptime

    @property
    def off(self) -> list[str]:
        """What is off by more than its stated error, with the likely reason; in words."""
        found = []
        if abs(self.error) > GOODPUT_WITHIN:
            found.append(
                f"goodput is off by {100.0 * self.error:+.1f} points, more than the stated "
                f"{100.0 * GOODPUT_WITHIN:.0f}: learners lost something else than outages and the training after their "
                "last updates and checkpoints, or their speed changed"
                if self.error > 0.0
                else f"goodput is off by {100.0 * self.error:+.1f} points, more than the stated "
                f"{100.0 * GOODPUT_WITHIN:.0f}: failures came soon after updates or checkpoints more often than by "
                "chance"
            )
        low, high = self.uptime_range
        if not low - UPTIME_WITHIN <= self.observed.uptime <= high + UPTIME_WITHIN:
            together = "together more often" if self.observed.uptime < low else "together less often, or in turn"
            found.append(
                f"uptime is off by {100.0 * self.uptime_error:+.1f} points, and chance explains {low:.1%} to "
                f"{high:.1%} for learners that fail independently: these were away {together}, so a forecast for "
                "independent failures does not hold for them"
            )
        return found


@dataclass
class _Life:
    """One incarnation in the log: when it began, and time and own step at its first and at its last merged update."""

    origin: tuple[float, int, float]
    """Of the update whose training began first: that time, its step, and the seconds of its training. Its base can lie
    before the incarnation, if this continued from a checkpoint; its time does not."""
    base_step: int
    """Step of the first update's base."""
    first: tuple[float, int]
    last: tuple[float, int]
    by_fragment: dict[int, list[tuple[float, int]]]
    """Time and own step of each merged update, by fragment."""

    @property
    def began(self) -> float:
        return self.origin[0]

    @property
    def updates(self) -> int:
        return sum(map(len, self.by_fragment.values()))

    def began_step(self, step_s: float) -> float:
        """Return the own step from which this incarnation went on."""
        _, step, trained_s = self.origin
        return step - trained_s / step_s

    def add(self, other: "_Life") -> None:
        self.origin, self.base_step = min(self.origin, other.origin), min(self.base_step, other.base_step)
        self.first, self.last = min(self.first, other.first), max(self.last, other.last)
        for fragment, updates in other.by_fragment.items():
            self.by_fragment.setdefault(fragment, []).extend(updates)


async def observe(log: Log) -> Observed:
    """Return the figures of a run, read from its log. Raises `InputError` if the log holds too few updates."""
    lives: dict[tuple[str, int], _Life] = {}
    for p in range(len(log.run.layout.fragments)):
        async for commit in log.commits(p, 0):
            for given in commit.header.inputs:
                at = (given.taken_at, given.step)
                origin = (given.taken_at - given.train_s, given.step, given.train_s)
                life = _Life(origin, given.step - given.steps, at, at, {p: [at]})
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
    failed = [pair for of in by_learner.values() for pair in itertools.pairwise(of)]
    gaps = [max(0.0, after.began - before.last[0] - between_s / 2.0) for before, after in failed]
    taken_back = [_taken_back(before, after, log.run.shares, step_s, between_s) for before, after in failed]
    # An incarnation without a merged update is known only by its claim. The gap between its neighbours includes it.
    failures = sum(max(claims.get(name, 0), len(of)) - 1 for name, of in by_learner.items())
    total = sum(spans.values())
    steps = sum(max(life.last[1] for life in of) - of[0].base_step for of in by_learner.values())
    again_s = step_s * sum(back for back, _ in taken_back)
    undone_s = step_s * sum(lost for _, lost in taken_back)
    recovering = sum(gaps)
    every = [b - a for of in checkpoints.values() for a, b in itertools.pairwise(of) if b > a]
    updates = [sorted(of) for life in moved for of in life.by_fragment.values()]
    intervals = sum(len(of) - 1 for of in updates)
    return Observed(
        learners=len(by_learner),
        span_s=total / len(by_learner),
        step_s=step_s,
        failures=failures,
        mtbf_s=(total - recovering) / failures if failures else float("inf"),
        recovery_s=recovering / failures if failures else 0.0,
        checkpoint_s=statistics.median(every) * step_s if every else 0.0,
        update_s=sum(of[-1][0] - of[0][0] for of in updates) / intervals if intervals else 0.0,
        steps=steps,
        again=again_s / total,
        goodput=goodput(steps * step_s + again_s, undone_s, total),
        uptime=_uptime([span for of in by_learner.values() for span in _alive(of, between_s)]),
        outages=tuple(_outages(_alive(of, between_s)) for of in by_learner.values()),
    )


def _taken_back(
    before: _Life, after: _Life, shares: Sequence[float], step_s: float, between_s: float
) -> tuple[float, float]:
    """Return the steps that a failure took back, and those of them that no update of the incarnation before holds.

    The failure came half the time between two updates after the last one. `shares`: of the parameters, by fragment.
    """
    failed = before.last[1] + between_s / 2.0 / step_s
    resumed = after.began_step(step_s)
    lost = 0.0
    for p, share in enumerate(shares):
        sent = max((step for _, step in before.by_fragment.get(p, ())), default=before.base_step)
        lost += share * max(0.0, failed - max(resumed, sent))
    return max(0.0, failed - resumed), lost


def _alive(lives: Sequence[_Life], between_s: float) -> list[tuple[float, float]]:
    """Return when a learner was there: after its last merged update before a failure, half the time between two."""
    spans = [(before.began, before.last[0] + between_s / 2.0) for before in lives[:-1]]
    spans = [(began, min(end, after.began)) for (began, end), after in zip(spans, lives[1:], strict=True)]
    return [(began, max(began, end)) for began, end in [*spans, (lives[-1].began, lives[-1].last[0])]]


def _outages(alive: Sequence[tuple[float, float]]) -> Outages:
    away = [max(0.0, after[0] - before[1]) for before, after in itertools.pairwise(alive)]
    began = min(start for start, _ in alive)
    return Outages(began=began, ended=max(end for _, end in alive), away_s=tuple(s for s in away if s > 0.0))


def check(observed: Observed) -> Check:
    """Return the run's figures with the model's prediction for learners that fail and come back as these did.

    A learner is one slice. It trains for the time between two failures and is away for a recovery. A failure takes back
    the training since the last update or the last checkpoint, whichever is later. Each learner's outages lie at random
    times of its own part of the run, independently of those of the others: the uptime is the mean over draws, and their
    range is what chance explains.
    """
    mtbf_s = observed.mtbf_s
    if math.isinf(mtbf_s):
        here = kept = 1.0
    else:
        here = mtbf_s / (mtbf_s + observed.recovery_s)
        kept = max(0.0, 1.0 - since_latest(observed.update_s, observed.checkpoint_s) / mtbf_s)
    draw = random.Random(0)
    uptimes = sorted(_drawn_uptime(observed.outages, draw) for _ in range(DRAWS if observed.outages else 0)) or [1.0]
    cut = int(len(uptimes) * CHANCE / 2.0)
    predicted = Shares(
        goodput=here * kept,
        waiting=1.0 - here,
        repairing=1.0 - here,
        reconfiguring=0.0,
        lost=here * (1.0 - kept),
        uptime=statistics.fmean(uptimes),
        participation=1.0,
    )
    return Check(observed=observed, predicted=predicted, uptime_range=(uptimes[cut], uptimes[-1 - cut]))


def since_latest(a_s: float, b_s: float) -> float:
    """Return the mean seconds since the later of two events that repeat every `a_s` and every `b_s` seconds.

    The times since the events are uniform and independent, so the mean of the shorter one is a/2 - a²/6b, where a is
    the shorter period and b the longer. A period of 0 is not known, and its event is left out.
    """
    short, long = sorted((a_s, b_s))
    return short / 2.0 - short * short / (6.0 * long) if short else long / 2.0


def _drawn_uptime(outages: Sequence[Outages], draw: random.Random) -> float:
    """Return the uptime of a run in which each learner's outages lie at random times of its part of the run."""
    spans: list[tuple[float, float]] = []
    for of in outages:
        away = list(of.away_s)
        draw.shuffle(away)
        trained_s = max(0.0, of.ended - of.began - sum(away))
        at, before = of.began, 0.0
        for point, seconds in zip(sorted(draw.uniform(0.0, trained_s) for _ in away), away, strict=True):
            spans.append((at, at + point - before))
            at, before = at + point - before + seconds, point
        spans.append((at, of.ended))
    return _uptime(spans)


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

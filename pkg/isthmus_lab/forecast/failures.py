"""Failures of a cluster of chips, played event by event: the other derivation of `goodput.exact`."""

import bisect
import heapq
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from isthmus_lab.forecast.goodput import (
    DECOUPLED,
    HOUR_S,
    YEAR_S,
    Cluster,
    Shares,
    Slices,
    longest,
    paced,
    participation,
    slices_of,
    speeds,
    young,
)

REPETITIONS = 20
STUDENT = 2.093
"""97.5 % quantile of Student's t distribution with `REPETITIONS` − 1 degrees of freedom."""

Edge = tuple[float, int]
"""A moment in seconds, and whether a learner starts (+1) or stops (−1) training then."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Shares of time found by simulation."""

    shares: Shares
    goodput_ci: tuple[float, float]
    """95 % confidence interval of the goodput, over independent repetitions."""
    failures: int


class Repairs:
    """Repair times from an exponentiated Weibull distribution with a given mean.

    `draw` gives the whole time of a new repair, `left` the remaining time of a repair that is under way.
    """

    POINTS = 8192

    def __init__(self, mean_s: float, shape: float, power: float) -> None:
        self._inverse = (1.0 / power, 1.0 / shape)
        # Integrate 1 − F over a logarithmic grid. The total is the mean at scale 1; the running sum, divided by the
        # total, is the distribution of the remaining time.
        x = np.geomspace(1e-9, 1e9, self.POINTS)
        alive = -np.expm1(power * np.log(-np.expm1(-(x**shape))))
        pieces = np.diff(x, prepend=0.0) * (alive + np.concatenate(([1.0], alive[:-1]))) / 2.0
        self._scale = mean_s / float(pieces.sum()) if mean_s else 0.0
        self._left = [float(v) for v in np.cumsum(pieces) / pieces.sum()]
        self._x = [float(v) for v in x * self._scale]

    def draw(self, random: random.Random) -> float:
        """Return the seconds that one repair takes."""
        a, b = self._inverse
        return self._scale * float((-math.log(-math.expm1(a * math.log(1.0 - random.random())))) ** b)

    def left(self, random: random.Random) -> float:
        """Return the remaining seconds of a repair that is under way in the stationary state."""
        u = random.random()
        at = min(bisect.bisect_left(self._left, u), self.POINTS - 1)
        if at == 0:
            return self._x[0]
        low, high = self._left[at - 1], self._left[at]
        between = (u - low) / (high - low) if high > low else 0.0
        return self._x[at - 1] + between * (self._x[at] - self._x[at - 1])


class _Played:
    """One learner, played event by event.

    Work is counted in slice-seconds. Memory grows only with the number of slices that are away.
    """

    def __init__(self, cluster: Cluster, a: Slices, repairs: Repairs, seed: str) -> None:
        self.away = self.stalled = self.idle = self.trained = self.lost = self.checkpointing = 0.0
        self.failures = 0
        self._cluster = cluster
        self._a = a
        self._repairs = repairs
        self._draw = random.Random(seed)
        self._shares = (a.slice_rate, a.rack_rate / a.slices, a.maintenance_rate / a.slices)
        self._back: list[tuple[float, int]] = []
        self._here = a.slices
        self._interval_s = 0.0
        if a.restarts and (rate := a.slices * sum(self._shares[:2]) + a.region_rate) > 0.0:
            self._interval_s = young(cluster.checkpoint_s, 1.0 / rate)

    def edges(self, until_s: float) -> Iterator[Edge]:
        """Play until `until_s`; yield an edge whenever the learner stops or starts training."""
        a, back = self._a, self._back
        self._begin()
        t = since = ready = 0.0
        stands, working = False, self._here
        while t < until_s:
            rate = self._here * sum(self._shares) + a.region_rate
            due = t + self._draw.expovariate(rate) if rate > 0.0 else math.inf
            now = min(due, back[0][0] if back else math.inf, ready if stands else math.inf, until_s)
            self._spend(now - t, 0 if stands else working)
            t = now
            if t >= until_s:
                break
            if stands and now >= ready:
                if self._here:
                    stands, since, working = False, now, self._here
                    yield now, 1
                else:
                    ready = math.inf  # No slice is left to train on; wait until one comes back.
                continue
            if back and back[0][0] <= now:
                self._here += heapq.heappop(back)[1]
                fails, counts = False, a.rejoins or not a.restarts
            else:
                fails, counts = self._strike(now, self._draw.random() * rate), True
            if math.isinf(ready) or (stands and counts and self._cluster.interrupted == "again"):
                ready = now + a.stall_s
            elif counts and not stands:
                self._account(working, now - since, fails)
                stands, ready = True, now + a.stall_s
                yield now, -1
        if not stands:
            self._account(working, t - since, False)

    def _begin(self) -> None:
        """Draw which slices are away in the stationary state, and for how much longer."""
        c, a, draw = self._cluster, self._a, self._draw
        repair_s, pause_s = c.repair_hours * HOUR_S, c.maintenance_hours * HOUR_S
        failing = (a.slice_rate + a.rack_rate * a.rack_slices / a.slices) * repair_s
        pausing = a.maintenance_rate / a.slices * pause_s
        for _ in range(a.slices):
            which = draw.random() * (1.0 + failing + pausing)
            if which < failing:
                self._back.append((self._repairs.left(draw), 1))
            elif which < failing + pausing:
                self._back.append((draw.random() * pause_s, 1))
        region_s = c.region_hours * HOUR_S
        if draw.random() * (1.0 + a.region_rate * region_s) > 1.0:
            again = draw.random() * region_s
            self._back = [(max(again, when), count) for when, count in self._back]
            self._back.append((again, a.slices - len(self._back)))
        heapq.heapify(self._back)
        self._here -= sum(count for _, count in self._back)

    def _spend(self, seconds: float, working: int) -> None:
        here = self._here
        self.away += (self._a.slices - here) * seconds
        if working:
            active = min(working, here)
            self.trained += active * seconds
            self.idle += (here - active) * seconds  # These slices are back, but without work until the next restart.
        else:
            self.stalled += here * seconds

    def _strike(self, now: float, which: float) -> bool:
        """Take slices away; return whether the cause was a failure, not maintenance.

        `which` picks the cause: it lies between 0 and the sum of the rates.
        """
        here, back, draw = self._here, self._back, self._draw
        chip, rack, pause = (here * share for share in self._shares)
        if which < chip:
            heapq.heappush(back, (now + self._repairs.draw(draw), 1))
            self._here -= 1
        elif which < chip + rack:
            for _ in range(min(self._a.rack_slices, here)):
                heapq.heappush(back, (now + self._repairs.draw(draw), 1))
                self._here -= 1
        elif which < chip + rack + pause:
            heapq.heappush(back, (now + self._cluster.maintenance_hours * HOUR_S, 1))
            self._here -= 1
            return False
        else:
            again = now + self._cluster.region_hours * HOUR_S
            back[:] = [(max(again, when), count) for when, count in back]
            if here:
                back.append((again, here))
            heapq.heapify(back)
            self._here = 0
        self.failures += 1
        return True

    def _account(self, slices: int, seconds: float, failed: bool) -> None:
        """Add to `lost` and `checkpointing` for a stretch of training that ended, with a failure or without."""
        if self._a.restarts:
            block = self._interval_s + self._cluster.checkpoint_s
            blocks = seconds // block if block > 0.0 else 0.0
            spent = blocks * self._cluster.checkpoint_s
            kept = blocks * self._interval_s if failed and block > 0.0 else seconds - spent
        else:
            spent, step_s = 0.0, self._cluster.step_s
            kept = seconds // step_s * step_s if failed and step_s > 0.0 else seconds
        self.checkpointing += slices * spent
        self.lost += slices * (seconds - spent - kept)


def simulate(
    cluster: Cluster,
    mode: str,
    chips: int,
    learners: int,
    *,
    seed: int = 0,
    failures: int = 4000,
    progress: Callable[[float], None] = lambda _: None,
) -> Estimate:
    """Play `REPETITIONS` independent stretches and return the means of their shares.

    Each stretch is long enough for about `failures` failures and maintenances in the whole cluster.
    """
    if mode != DECOUPLED:
        learners = 1
    a = slices_of(cluster, mode, chips, learners)
    repairs = Repairs(cluster.repair_hours * HOUR_S, cluster.repair_shape, cluster.repair_power)
    rate = learners * (a.slices * a.slice_rate + a.rack_rate + a.region_rate + a.maintenance_rate)
    until_s = failures / rate if rate > 0.0 else YEAR_S
    found, struck = [], 0
    for repetition in range(REPETITIONS):
        played = [_Played(cluster, a, repairs, f"{seed}/{repetition}/{m}") for m in range(learners)]
        found.append(_add_up(cluster, mode, a, played, until_s))
        struck += sum(p.failures for p in played)
        progress((repetition + 1) / REPETITIONS)
    means = {name: statistics.fmean(getattr(f, name) for f in found) for name in vars(found[0])}
    goodputs = [f.goodput for f in found]
    half = STUDENT * statistics.stdev(goodputs) / math.sqrt(REPETITIONS)
    return Estimate(
        shares=Shares(**means),
        goodput_ci=(means["goodput"] - half, means["goodput"] + half),
        failures=struck,
    )


def _add_up(cluster: Cluster, mode: str, a: Slices, played: Sequence[_Played], until_s: float) -> Shares:
    """Play the learners side by side and return the shares of their time."""
    learners, k = len(played), min(cluster.quorum, len(played))
    training = learners
    advancing = held = running = before = 0.0
    patience_s = 0.0 if cluster.lead is None else cluster.lead * cluster.step_s
    short_since = 0.0
    for now, change in (*heapq.merge(*(p.edges(until_s) for p in played)), (until_s, 0)):
        running += training * (now - before)
        if training >= k:
            advancing += now - before
        else:
            held += training * max(0.0, now - max(before, short_since + patience_s))
        if training >= k > training + change:
            short_since = now
        training += change
        before = now
    total = learners * a.slices * until_s

    def share(name: str) -> float:
        return sum(float(getattr(p, name)) for p in played) / total

    going = 1.0
    if cluster.lead is not None:
        going = (1.0 - held / running if running else 1.0) * paced(cluster, speeds(cluster, learners))
    going /= longest(round(a.slices * (1.0 - share("away"))), cluster.speed_deviation)
    kept = share("trained") - share("lost") - share("checkpointing")
    return Shares(
        goodput=kept * going,
        waiting=kept * (1.0 - going) + share("idle") + share("away"),
        repairing=share("away"),
        reconfiguring=share("stalled") + share("checkpointing"),
        lost=share("lost"),
        uptime=advancing / until_s,
        participation=participation(cluster, learners) if mode == DECOUPLED else 1.0,
    )

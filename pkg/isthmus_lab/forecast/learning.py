"""The worth of a processed token: the loss that decoupled training pays, expressed in tokens of data parallel.

A row of the lab ends at a loss that undisturbed data parallel, at its own best inner rate, reaches after fewer steps of
as many learners. The ratio of the two numbers of steps is what a processed token was worth. Its logarithm is a sum of
two parts: for the number of learners with the period H, and for the work that incoming versions overwrite. `quality`
adds the costs of codecs, merge rules and blocks. The cost shrinks as runs grow; the lab's longest runs show by how
much.

All rows (`lab.toml`) are of a model of 0.26 million parameters. At large scale, parity (a worth of 1) was published.
"""

import bisect
import itertools
import math
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.resources import files
from typing import Any

import msgspec
import numpy as np

from isthmus.format.rules import MergeRule
from isthmus_lab.working_time import Figures


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One row of the lab: a mean over seeds."""

    learners: int
    steps: int
    loss: float
    seeds: int
    sync_every: int = 1
    kept: float = 1.0
    experiment: str = ""
    setting: str = ""


RESTS_ON = "a lab model of 0.26 million parameters"
"""What the worth of a token was measured with."""

SHORT = 600
"""Steps of the lab's short runs."""


@dataclass(frozen=True, kw_only=True)
class Worth:
    """Worth of a processed token, in tokens of data parallel."""

    short: float
    """Worth in the lab's runs of 600 steps."""
    long: float
    """Worth in the lab's longest runs: 3,000 steps merged by RDA, 1,800 steps merged isotropically."""
    beyond: tuple[str, ...]
    """Respects in which the setting is outside the measured range, each with the nearest measurement."""
    longest: int
    """Steps of the lab's longest runs, after which `long` is reached."""

    @classmethod
    def of_one(cls) -> "Worth":
        """Return the worth of a token of a single learner, which merges nothing."""
        return cls(short=1.0, long=1.0, beyond=(), longest=SHORT)

    def after(self, steps: float) -> float:
        """Return the worth in runs of this many of the lab's steps.

        Between the short and the longest runs, the cost is linear in the logarithm of the steps; beyond, it stays.
        """
        share = 1.0 if self.longest <= SHORT else math.log(steps / SHORT) / math.log(self.longest / SHORT)
        share = min(1.0, max(0.0, share))
        return math.pow(self.short, 1.0 - share) * math.pow(self.long, share)


@dataclass(frozen=True)
class Lab:
    """The rows of the lab, and the costs that follow from them. Costs are logarithms of a worth, negated."""

    data_parallel: Sequence[Measured]
    decoupled: Sequence[Measured]
    long: Sequence[Measured]
    overwritten: Sequence[Measured]

    def steps_for(self, learners: int, loss: float) -> float:
        """Return after how many steps undisturbed data parallel, at its best inner rate, reaches a loss.

        Between rows, the logarithm of the steps is linear in the loss.
        """
        curve = sorted((r.steps, r.loss) for r in self.data_parallel if r.learners == learners)
        pairs = list(itertools.pairwise(curve))
        (a, high), (b, low) = next((pair for pair in pairs if loss >= pair[1][1]), pairs[-1])
        return math.exp(math.log(a) + (high - loss) / (high - low) * math.log(b / a))

    def loss_after(self, learners: int, steps: int) -> float:
        """Return the measured loss of undisturbed data parallel after this number of steps."""
        return next(r.loss for r in self.data_parallel if (r.learners, r.steps) == (learners, steps))

    def paid(self, row: Measured) -> float:
        """Return what a row paid: the logarithm of its steps over those that data parallel needs; 0 is parity."""
        return math.log(row.steps / self.steps_for(row.learners, row.loss))

    @cached_property
    def costs(self) -> dict[int, dict[int, float]]:
        """Cost by number of learners and by period.

        A period that was not measured with some number of learners costs what the next shorter one does, and the mean
        of what the longer period cost more with the other numbers of learners.
        """
        measured: dict[int, dict[int, float]] = {}
        for r in self.decoupled:
            measured.setdefault(r.learners, {})[r.sync_every] = self.paid(r)
        found = {m: dict(row) for m, row in sorted(measured.items())}
        for h in sorted({r.sync_every for r in self.decoupled}):
            for row in (row for row in found.values() if h not in row):
                shorter = max(k for k in row if k < h)
                more = [other[h] - other[shorter] for other in measured.values() if {h, shorter} <= other.keys()]
                row[h] = row[shorter] + statistics.fmean(more)
        return {m: dict(sorted(row.items())) for m, row in found.items()}

    @cached_property
    def longest_period(self) -> int:
        """The longest period that was measured."""
        return max(r.sync_every for r in self.decoupled)

    @cached_property
    def shortest(self) -> int:
        """The shortest period that was measured."""
        return min(r.sync_every for r in self.decoupled)

    @cached_property
    def near(self) -> dict[int, float]:
        """Share of the tokens that is merged near the store, by period; `costs` include the cost of the rest."""
        found: dict[int, list[float]] = {}
        for r in self.decoupled:
            found.setdefault(r.sync_every, []).append(r.kept)
        return {h: statistics.fmean(kept) for h, kept in found.items()}

    @cached_property
    def per_overwritten(self) -> float:
        """Cost of overwriting all work instead of none, from a linear fit: least squares within groups of rows."""
        groups: dict[tuple[str, int], list[Measured]] = {}
        for r in self.overwritten:
            groups.setdefault((r.experiment, r.sync_every), []).append(r)
        top = bottom = 0.0
        for rows in groups.values():
            kept, paid = statistics.fmean(r.kept for r in rows), statistics.fmean(map(self.paid, rows))
            top += sum((kept - r.kept) * (self.paid(r) - paid) for r in rows)
            bottom += sum((kept - r.kept) ** 2 for r in rows)
        return top / bottom

    @cached_property
    def least_kept(self) -> float:
        """The lowest share of merged work that was measured."""
        return min(r.kept for r in self.overwritten)

    @cached_property
    def shrinks(self) -> float:
        """Factor by which costs are smaller in the longest runs.

        It is measured for the costs of learners and period. That of RDA is assumed for overwritten work, codecs and
        merge rules. For overwritten work there is only one pair of runs: half of the cost was left after 1,800 steps.
        """
        short = sum(self.base(r.learners, r.sync_every) for r in self.long)
        # A row that is ahead of data parallel must not offset a row that is behind it.
        return float(min(1.0, sum(max(0.0, self.paid(r)) for r in self.long) / short))

    def base(self, learners: int, sync_every: Figures) -> Figures:
        """Return the cost of this number of learners and this period in steps, in runs of 600 steps; never negative.

        Between measured numbers of learners and periods, it is linear in the logarithm of both, and beyond the last.
        """
        period = np.maximum(sync_every, self.shortest)
        counts = list(self.costs)
        n = min(max(bisect.bisect_left(counts, learners), 1), len(counts) - 1)
        few, many = counts[n - 1], counts[n]
        share = math.log(learners / few) / math.log(many / few)
        low, high = between(self.costs[few], period), between(self.costs[many], period)
        return np.maximum(0.0, low + (high - low) * share)

    def long_base(self, learners: int, sync_every: Figures) -> Figures:
        """Return the same in the longest runs.

        What a period costs beyond those that were measured is extrapolated and does not shrink: nothing shows that.
        """
        known = self.base(learners, np.minimum(sync_every, self.longest_period))
        return self.shrinks * known + self.base(learners, sync_every) - known

    def merged_near(self, sync_every: Figures) -> Figures:
        """Return the share of the work that is merged near the store; `base` includes the cost of the rest."""
        return between(self.near, np.clip(sync_every, self.shortest, max(self.near)))

    def worth(self, learners: int, sync_every: int, kept: float) -> Worth:
        """Return the worth of a processed token, merged by this rule alone and with its usual codecs.

        `kept`: the share of the work that is merged.
        """
        if learners == 1:
            return Worth.of_one()
        base = self.base(learners, sync_every), self.long_base(learners, sync_every)
        short, long = weighed(*base, self.merged_near(sync_every), 0.0, kept)
        return Worth(
            short=float(short), long=float(long), beyond=self.beyond(learners, sync_every, kept), longest=self.longest
        )

    @cached_property
    def longest(self) -> int:
        """Steps of the longest runs."""
        return max(r.steps for r in self.long)

    def off(self, row: Measured) -> float:
        """Return by how much the forecast of a row's worth is too high, as a share of what was measured."""
        measured = min(1.0, math.exp(-self.paid(row)))
        return self.worth(row.learners, row.sync_every, row.kept).after(row.steps) / measured - 1.0

    def off_between(self, row: Measured) -> float:
        """Return the largest error of the forecast of a row from the rows around it alone; 0 if it is at an edge."""
        by_period = {r.sync_every: self.paid(r) for r in self.decoupled if r.learners == row.learners}
        by_learners = {r.learners: self.paid(r) for r in self.decoupled if r.sync_every == row.sync_every}
        found = 0.0
        for points, at in ((by_period, row.sync_every), (by_learners, row.learners)):
            cost = points.pop(at)
            if points and min(points) < at < max(points):
                worth = math.exp(-max(0.0, float(between(points, at))))
                found = max(found, abs(worth / math.exp(-max(0.0, cost)) - 1.0))
        return found

    def like(self, learners: int) -> tuple[int, int]:
        """Return the nearest number of learners that was measured, and the longest period with so many."""
        like = min({r.learners for r in self.decoupled}, key=lambda m: abs(math.log(learners / m)))
        return like, max(r.sync_every for r in self.decoupled if r.learners == like)

    def outside(self, learners: int, sync_every: Figures, kept: Figures) -> Figures:
        """Return whether `beyond` has anything to say, of arrays."""
        return (learners > max(self.costs)) | (sync_every > self.like(learners)[1]) | (kept < self.least_kept)

    def beyond(self, learners: int, sync_every: int, kept: float) -> tuple[str, ...]:
        """Return the respects in which a setting is outside the measured range, in words."""
        found = []
        if learners > max(self.costs):
            found.append(f"M = {learners} is beyond the {max(self.costs)} that were measured")
        like, longest = self.like(learners)
        if sync_every > self.longest_period:
            found.append(f"H = {sync_every} is beyond the {self.longest_period} that were measured")
        elif sync_every > longest:
            found.append(f"H = {sync_every} is beyond the {longest} that were measured with {like} learners")
        if found:
            row = min(
                (r for r in self.decoupled if r.learners == like),
                key=lambda r: abs(math.log(sync_every / r.sync_every)),
            )
            worth = math.exp(-max(0.0, self.paid(row)))
            found[-1] += f" (nearest: M = {like}, H = {row.sync_every}, {worth:.2f} after {row.steps} steps)"
        if kept < self.least_kept:
            found.append(f"{kept:.0%} of tokens merged is below the {self.least_kept:.0%} that were measured")
        return tuple(found)


def weighed(short: Figures, long: Figures, near: Figures, more: Figures, kept: Figures) -> tuple[Figures, Figures]:
    """Return the worth of a token in short and in long runs, at most 1.

    Arguments are numbers, or arrays that broadcast. `short`, `long`: cost of learners and period in runs of either
    length. `near`: see `Lab.merged_near`. `more`: cost of codecs and merge rule, negative for what is better than the
    usual ones. `kept`: share of the work that is merged.
    """
    rda = lab()
    rest = rda.per_overwritten * np.maximum(0.0, near - np.maximum(kept, rda.least_kept)) + more
    # If nothing is merged, nothing is learnt: below the measured range, the worth falls in proportion to `kept`.
    merged = np.minimum(1.0, kept / rda.least_kept)
    return merged * np.exp(-np.maximum(0.0, short + rest)), merged * np.exp(-np.maximum(0.0, long + rda.shrinks * rest))


def between(points: Mapping[int, float], at: Figures) -> Figures:
    """Return the values at a number or numbers: linear in its logarithm, between the points and beyond the last."""
    x, y = np.log(sorted(points)), np.array([points[n] for n in sorted(points)])
    where = np.log(at)
    n = np.minimum(np.searchsorted(x[1:], where), len(x) - 2)
    return y[n] + (y[n + 1] - y[n]) * (where - x[n]) / (x[n + 1] - x[n])


@lru_cache(maxsize=1)
def recorded() -> dict[str, Any]:
    """Return the tables of `lab.toml`."""
    return tomllib.loads(files("isthmus_lab.forecast").joinpath("lab.toml").read_text())


@lru_cache(maxsize=2)
def lab(merge: str = MergeRule.RDA.value) -> Lab:
    """Return the rows that come with the package, of runs that merge by RDA, or isotropically (`merge` = iso).

    The cost of overwritten work was measured with RDA and is assumed to be the same for isotropic merges.
    """
    merged = ("isotropic", "isotropic_long") if merge == MergeRule.ISO else ("decoupled", "long")
    kinds = ("data_parallel", *merged, "overwritten")
    return Lab(*(msgspec.convert(recorded()[kind], list[Measured]) for kind in kinds))


@lru_cache(maxsize=1)
def error() -> float:
    """Return the largest difference between what the lab measured and its forecast, as a share of a token's worth.

    Rows that lie between others count as they would be forecast without their own measurement.
    """
    rda, iso = lab(), lab(MergeRule.ISO)
    rows = [(rda, r) for r in (*rda.decoupled, *rda.long, *rda.overwritten)]
    rows += [(iso, r) for r in (*iso.decoupled, *iso.long)]
    between_ = [of.off_between(r) for of in (rda, iso) for r in of.decoupled]
    return max(*between_, *(abs(of.off(row)) for of, row in rows))


def tokens_each(steps: float, learners: int) -> float:
    """Return the tokens a parameter that the lab's model has seen after this many steps of as many learners."""
    return float(steps * learners * recorded()["tokens_per_step"] / recorded()["parameters"])

"""What codecs, merge rules and blocks of an isotropic merge cost in loss, from losses measured in the lab.

Costs are logarithms of a worth, negated, as in `learning`, beside the usual settings: int4 both ways with error
feedback, merged by RDA or isotropically. The losses and their experiments are in `lab.toml`. Where work is late or
lost, few bits cost more than here (docs/experiments/codecs.md).
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from functools import lru_cache

import msgspec
import numpy as np

from isthmus.codecs import CODECS
from isthmus.format.rules import ROBUST, MergeRule, Rules, rate_of
from isthmus_lab.forecast import learning
from isthmus_lab.forecast.learning import Lab, Measured, Worth
from isthmus_lab.working_time import Figures

USUAL = "int4"
"""Codec of the runs that `learning` rests on, both ways."""

LOSSLESS = ("f32", "bf16", "int8")
"""Codecs whose losses do not differ from those of float32."""

BITS = {"f32": 32.0, "bf16": 16.0, "int8": 8.0, "int4": 4.0}


class _Coded(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Losses by codec, in the order of the codecs' names, for one number of learners and one way to merge."""

    learners: int
    merge: str
    sent: bool
    setting: str
    both: list[float]
    up: list[float]
    down: list[float]


class _Codecs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    experiment: str
    names: list[str]
    rows: list[_Coded]


class _Merged(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The loss of a merge rule, and that of RDA in the same experiment."""

    merge: str
    learners: int
    steps: int
    loss: float
    rda: float
    seeds: int
    experiment: str
    setting: str
    rda_setting: str


class _Blocks(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Losses of isotropic merges in blocks, by the number of parts of a matrix's shorter side."""

    experiment: str
    rda: float
    whole: float
    parts: list[int]
    losses: list[float]
    settings: list[str]


class Quality(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The measured losses of codecs, merge rules and blocks."""

    codecs: _Codecs
    merges: list[_Merged]
    blocks: _Blocks


@lru_cache(maxsize=1)
def quality() -> Quality:
    """Return the losses that come with the package."""
    return msgspec.convert({name: learning.recorded()[name] for name in Quality.__struct_fields__}, Quality)


def measured(name: str) -> bool:
    """Return whether the lab measured this codec."""
    return name == "bf16" or name in quality().codecs.names


def measured_pair(up: str, down: str) -> bool:
    """Return whether the lab measured these two codecs together: both the same, or one of them without loss."""
    return measured(up) and measured(down) and (up == down or up in LOSSLESS or down in LOSSLESS)


PAIRS = tuple(
    pair for pair in itertools.product((*CODECS, "q3", "q2", "q1.5", "q1", "q0.75"), repeat=2) if measured_pair(*pair)
)
"""Codecs up and down that the lab measured together."""


@lru_cache(maxsize=4096)
def coded(learners: int, merge: str, sent: bool, up: str, down: str) -> float:
    """Return the cost of two codecs beside int4 both ways with error feedback.

    `merge`: iso, or any other rule, which counts as RDA. `sent`: whether learners send matrices isotropically. Between
    numbers of learners that were measured, costs are interpolated; beyond, they are those of the nearest. Fewer
    bits are never counted as better than more: such differences are those of seeds.
    """
    found = {}
    for row in quality().codecs.rows:
        if (row.merge == MergeRule.ISO, row.sent) == (merge == MergeRule.ISO, sent and merge == MergeRule.ISO):
            plain, usual = _paid(row, [row.both[0]])[0], _usual(row)
            ways = [
                [cost - plain for cost in itertools.accumulate(_paid(row, losses), max)]
                for losses in (row.both, row.up, row.down)
            ]
            both_up, one_up, both_down, one_down = (
                _at(up, ways[0]),
                _at(up, ways[1]),
                _at(down, ways[0]),
                _at(down, ways[2]),
            )
            least, most = sorted((both_up, both_down))
            found[row.learners] = plain - usual + min(max(one_up + one_down, least), most)
    (few, low), (many, high) = sorted(found.items())
    share = math.log(min(max(learners, few), many) / few) / math.log(many / few)
    return low + (high - low) * share


def _usual(row: _Coded) -> float:
    """Return what the usual codecs paid with as many learners and the same merge rule."""
    codecs = quality().codecs
    usual = next(r for r in codecs.rows if (r.learners, r.merge, r.sent) == (row.learners, row.merge, False))
    return _paid(usual, [usual.both[codecs.names.index(USUAL)]])[0]


def _paid(row: _Coded, losses: list[float]) -> list[float]:
    """Return what runs with these losses paid, beside data parallel as the rows of the merge rule are."""
    of = learning.lab(row.merge)
    like = next(r for r in of.decoupled if (r.learners, r.sync_every) == (row.learners, of.shortest))
    return [of.paid(msgspec.structs.replace(like, loss=loss)) for loss in losses]


def _at(name: str, costs: list[float]) -> float:
    """Return the cost of a codec; one that was not measured costs what the next with fewer bits does, or more below.

    Below those that were measured, the cost is linear in the logarithm of the bits.
    """
    fewer = counted_as(name)
    if fewer:
        return costs[quality().codecs.names.index(fewer)]
    (few, low), (some, high) = zip(map(_bits, quality().codecs.names[:-3:-1]), costs[:-3:-1], strict=True)
    return low + (high - low) * math.log(_bits(name) / few) / math.log(some / few)


def counted_as(name: str) -> str:
    """Return the codec whose cost counts for this one: itself, or the next with fewer bits that was measured.

    Empty if none has fewer. An estimate between two that were measured would be chosen over both.
    """
    return next((n for n in quality().codecs.names if _bits(n) <= _bits(name)), "")


def _bits(name: str) -> float:
    return rate_of(name) or BITS[name]


@lru_cache(maxsize=8)
def ruled(merge: str) -> float:
    """Return the cost of a merge rule beside RDA, or beside whole isotropic merges for iso: 0.

    A rule whose loss ended below that of RDA counts as RDA: the difference is within the spread between seeds.
    """
    rows = [r for r in quality().merges if r.merge == merge]
    if not rows:
        return 0.0
    return max(0.0, statistics.fmean(_above(r) for r in rows))


def said(merge: str) -> str:
    """Return in words how a merge rule did beside RDA in the lab; nothing for RDA and iso, which have many rows."""
    rows = [r for r in quality().merges if r.merge == merge]
    return ", ".join(
        f"{r.loss:.3f} beside rda's {r.rda:.3f} with {r.learners} learners after {r.steps} steps" for r in rows
    )


def _above(row: _Merged) -> float:
    def paid(loss: float) -> float:
        return learning.lab().paid(Measured(learners=row.learners, steps=row.steps, loss=loss, seeds=row.seeds))

    return paid(row.loss) - paid(row.rda)


@lru_cache(maxsize=256)
def gained(parts: int) -> float:
    """Return which share of the gain of whole isotropic merges over RDA is left, by parts of a matrix's shorter side.

    Linear in the logarithm of the parts between those that were measured, and beyond, down to 0.
    """
    blocks = quality().blocks
    points = {1: 1.0} | {
        p: (blocks.rda - loss) / (blocks.rda - blocks.whole)
        for p, loss in zip(blocks.parts, blocks.losses, strict=True)
    }
    return max(0.0, float(learning.between(points, parts)))


def base(learners: int, merge: str, sync_every: Figures, gain: float) -> tuple[Figures, Figures]:
    """Return the costs of learners and period in short and in long runs; `sync_every`: a number, or an array of them.

    `gain`: the share of the gain of whole isotropic merges that blocks leave (iso only).
    """
    rda = learning.lab()
    short, long = _base(rda, learners, sync_every)
    if merge == MergeRule.ISO:
        iso_short, iso_long = _base(learning.lab(merge), learners, sync_every)
        return gain * iso_short + (1.0 - gain) * short, gain * iso_long + (1.0 - gain) * long
    return short, long


def _base(of: Lab, learners: int, sync_every: Figures) -> tuple[Figures, Figures]:
    return of.base(learners, sync_every), of.long_base(learners, sync_every)


def worth(rules: Rules, period: int, learners: int, kept: float, gain: float = 1.0) -> Worth:
    """Return the worth of a processed token under these rules, and in which respects they were not measured.

    `period`: that of the run, in steps.
    """
    if learners == 1:
        return Worth.of_one()
    of = learning.lab(rules.merge)
    short, long = base(learners, rules.merge, period, gain)
    more = coded(learners, rules.merge, rules.isotropic_up, rules.codec_up, rules.codec_down) + ruled(rules.merge)
    figures = learning.weighed(short, long, of.merged_near(period), more, kept)
    notes = [*of.beyond(learners, period, kept), *_unmeasured(rules, period, learners, gain)]
    # With blocks, a share of the cost is that of isotropic merges and the rest RDA's, whose longest runs are longer.
    share = gain if rules.merge == MergeRule.ISO else 0.0
    longest = round(of.longest**share * learning.lab().longest ** (1.0 - share))
    return Worth(short=float(figures[0]), long=float(figures[1]), beyond=tuple(notes), longest=longest)


def beyond(rules: Sequence[Rules], periods: Figures, learners: int, kept: Figures, gain: float) -> Figures:
    """Return whether `Worth.beyond` of `worth` is not empty, of arrays; `rules`: by pair of codecs."""
    if learners == 1:
        return np.zeros(np.shape(periods), bool)
    of, at = learning.lab(rules[0].merge), coded_at(rules[0].merge)
    near, far = (np.array([bool(_unmeasured(r, h, learners, gain)) for r in rules]) for h in (at, at + 1))
    return of.outside(learners, periods, kept) | np.where(periods > at, far, near)


def coded_at(merge: str) -> int:
    """Return the period with which the lab measured codecs."""
    return learning.lab(merge).shortest


def _unmeasured(rules: Rules, period: int, learners: int, gain: float) -> list[str]:
    found, up, down = [], rules.codec_up, rules.codec_down
    usual, at = {up, down} <= {*LOSSLESS, USUAL}, coded_at(rules.merge)
    if not measured_pair(up, down):
        taken = [f"{name} is counted as {counted_as(name)}" for name in dict.fromkeys((up, down)) if not measured(name)]
        found.append("; ".join([f"not measured: {up} up with {down} down", *(t for t in taken if not t.endswith(" "))]))
    elif learners > max(r.learners for r in quality().codecs.rows) and not usual:
        found.append(f"{up} up with {down} down was not measured with {learners} learners")
    if period > at and not usual:
        found.append(f"{up} up with {down} down was not measured beyond H = {at}")
    if period > at and rules.isotropic_up:
        found.append(f"matrices sent isotropically were not measured beyond H = {at}")
    if rules.merge in ROBUST:
        row = next(r for r in quality().merges if r.merge == rules.merge)
        found.append(
            f"{rules.merge} was measured in one run of {row.steps} steps, with {row.learners} learners: counted as rda"
        )
    if rules.merge == MergeRule.ISO and gain < gained(max(quality().blocks.parts)):
        found.append(f"not measured: blocks of {rules.iso_block} in matrices as wide as these")
    return found

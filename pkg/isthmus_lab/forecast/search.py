"""The search for the best rules: all combinations of the settings that a plan may choose, as arrays.

The work merged, the worth of a token, the load of the links and the dollars are computed for all combinations at once.
A coarse list of periods is tried first, then every period between the neighbours of the best ones. `outcome` then
computes the combinations that can be the best, in order, until none is left.

Figures that differ by less than the error of the forecast are a tie (`tied`). Of all combinations that tie with the
highest figure, one is taken by an order that no setting that is given changes (`_taken`): a plan whose own choices are
given, any of them, is the same plan.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np

from isthmus.errors import InputError
from isthmus.format.rules import FRAGMENTS_MAX, KEPT_VERSIONS, LONGEST, STEPS_MOST, MergeRule, Pace, Rules
from isthmus.log.merge import state_bytes
from isthmus.rounds.period import LAGS
from isthmus.store.base import PART_BYTES, RANGE_BYTES
from isthmus.syncer import snapshots
from isthmus_lab.forecast import learning, quality, traffic
from isthmus_lab.forecast.outcome import (
    DAY_S,
    HEADROOM,
    OBJECT_MAX,
    Case,
    Outcome,
    Round,
    checkpoint_s,
    goodput_of,
    isotropic_s,
    lost_s,
    outcome,
    packing_s,
    utilization,
)
from isthmus_lab.working_time import Figures

PERIODS = (
    12,
    14,
    16,
    20,
    24,
    28,
    32,
    40,
    48,
    56,
    64,
    80,
    96,
    112,
    128,
    160,
    192,
    224,
    256,
    320,
    384,
    448,
    512,
    640,
    768,
)
"""Periods H that are tried first: steps between two syncs of a fragment. Every period from the first to the last counts
as tried: the best one lies between neighbours of the best of these (a test compares with all)."""

NEAR = 0.8
"""Codecs that score less than this share of the best with the periods tried first are not tried with the others: from a
period to the next, scores differ by less."""

FRAGMENT_BYTES = 64 << 20
"""Largest payload of an update, from which the least number of fragments follows: a failed request is repeated whole.
"""

FINE = (1, 2, 4, 8)
"""Multiples of that number of fragments that are tried: smaller fragments take less time to the store and back."""

FRAGMENTS_USUAL = 96
"""Most fragments that the multiples may reach: each fragment needs a tensor of its own."""

ISO_BLOCKS = (0, 2048, 1024, 512, 256, 128)
"""Block sizes that are tried; 0: whole matrices."""

PACK_CORES = 0.25
"""Cores of a learner's host that packing may take; if it takes more, matrices are sent as they are."""

WORTH_SAYING = 1e-2
"""Share of the dollars of a day in steps of which the dollars of ways to merge that tie are compared."""

TIE_STEP = 0.05
"""Steps, as a share of the highest figure, in which the figures of what ties are compared."""

ROUNDING = 1e-9
"""Relative difference between a figure of the search and the same of `outcome`, at most."""


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """Settings that are given; None: the plan chooses."""

    fragments: int | None = None
    sync_every: int | None = None
    merge: str | None = None
    iso_block: int | None = None
    codec: str | None = None
    codec_down: str | None = None
    isotropic_up: bool | None = None
    """No flag gives it: a plan's own searches for its reasons do."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The rules that are taken, and what was tried."""

    best: Outcome
    """What is taken: within the error of the forecast of `to`."""
    to: Outcome
    """The highest figure of what counts: `top`, or the highest with codecs that are not `lossier` if that ties."""
    top: Outcome
    """The outcome with the highest `Outcome.rank`."""
    by_way: list[Outcome]
    """The best of each way to merge, of what counts: rule, block, and whether matrices are sent isotropically. In place
    of the best of the way that is taken: `best`."""
    by_codecs: list[Outcome]
    """The best of each pair of codecs, merged in the way that is taken, that ties with `to`; `best` for its pair."""
    kept: list[float]
    """The largest share of its work that is merged in any combination, by island."""


def search(case: Case, fixed: Fixed) -> Found:
    """Return the combination of settings with the highest `Outcome.rank`, or one that ties with it and is taken.

    Only combinations that `fixed` leaves count. Raises `InputError` if P and H that are given exclude one another, or
    if packing would take too many of a learner's cores in all of them.
    """
    grids, tops, fine, kept = _tried(case, fixed)
    to, counted = _reference(case, fixed, tops, fine)
    best, at = _taken(case, grids, counted, to) or max(
        ((o, n) for n, o in enumerate(counted) if o), key=lambda pair: (pair[0].rank, -pair[1])
    )

    def codecs(of: Outcome) -> tuple[str, str]:
        return of.rules.codec_up, of.rules.codec_down

    others = grids[at].by_codecs(to.per_usd / (1.0 + learning.error()))
    return Found(
        best=best,
        to=to,
        top=_first(tops),
        by_way=[best if n == at else o for n, o in enumerate(counted) if o],
        by_codecs=[best, *(o for o in others if codecs(o) != codecs(best) and tied(o, to))],
        kept=kept,
    )


Tops = Sequence[Outcome | None]
"""The best outcome of each way to merge; None: it has none."""


@lru_cache(maxsize=2)
def _tried(case: Case, fixed: Fixed) -> tuple[list["_Grid"], Tops, Tops, list[float]]:
    """Return what was tried of each way to merge, its best, its best with codecs not `lossier`, and `Found.kept`."""
    grids: list[_Grid] = []
    kept = [0.0 for _ in case.islands]
    space = _Space.of(case, fixed)
    for way in _ways(case, fixed):
        grid = _Grid.of(case, space, *way)
        if grid is None:
            continue
        kept = [max(before, float(of.max())) for before, of in zip(kept, grid.kept, strict=True)]
        finer = None if fixed.sync_every else _Grid.of(case, grid.between(fixed), *way)
        grids.append(finer or grid)
    if not grids:
        raise InputError("sending matrices isotropically would take too many of a learner's cores: leave it out")
    return grids, [g.best() for g in grids], [g.best(~g.lossy) for g in grids], kept


def _first(of: Tops) -> Outcome:
    """Return the highest. Of equals, the first is chosen: the plainest way to merge."""
    return max((o for o in of if o), key=lambda o: o.rank)


@lru_cache(maxsize=16)
def _highest(case: Case) -> tuple[Outcome, Outcome | None]:
    """Return the highest figure if nothing is given, and the highest with codecs not `lossier` if the two tie."""
    _, tops, fine, _ = _tried(case, Fixed())
    return _highest_of(tops, fine)


def _highest_of(tops: Tops, fine: Tops) -> tuple[Outcome, Outcome | None]:
    top = _first(tops)
    high = _first(fine) if any(fine) else None
    return top, high if high and tied(high, top) else None


def _reference(case: Case, fixed: Fixed, tops: Tops, fine: Tops) -> tuple[Outcome, Tops]:
    """Return `Found.to`, and the best of each way among what counts.

    What ties must not depend on what is given. So, where it can be, the figure is that of a plan to which nothing is
    given.
    """
    top, high = _highest(case)
    mine, mine_high = (top, high) if fixed == Fixed() else _highest_of(tops, fine)
    if high and any(fine) and tied(_first(fine), high):
        return high, fine
    if not high and tied(mine, top):
        return top, tops
    return (mine_high, fine) if mine_high else (mine, tops)


def tied(one: Outcome, other: Outcome) -> bool:
    """Return whether the figures of two outcomes differ by less than the error of the forecast.

    What learns nothing, and what a link cannot carry beside what it can, ties with nothing.
    """
    low, high = sorted((one.per_usd, other.per_usd))
    return one.fits == other.fits and low > 0.0 and high <= (1.0 + learning.error()) * low


def _taken(case: Case, grids: Sequence["_Grid"], counted: Tops, to: Outcome) -> tuple[Outcome, int] | None:
    """Return the outcome that is taken of those that tie with `to`, and the place of its way to merge.

    These criteria decide one after another: measured combinations go before extrapolated ones; codecs with which a run
    loses no more than with those that the figures rest on go before others; cheaper ways to merge go first; figures
    nearer to the highest one go first, in steps of `TIE_STEP` of it; plainer ways to merge go first; codecs with fewer
    bits go first. The H and P with the highest figure complete the choice. Each criterion is a property of one
    combination, so a combination that is taken stays taken if there are fewer. Return None if nothing ties.
    """
    if to.per_usd <= 0.0:
        return None
    least = to.per_usd / (1.0 + learning.error())
    fine, order = not lossier(case, to), list[tuple[bool, bool, int, int, int, float, int]]()
    for way, grid in enumerate(grids):
        for beyond in (False, True):
            of_pairs = np.where(grid.beyond == beyond, grid.scores, -np.inf).max(axis=(0, 1))
            for n, pair in enumerate(grid.space.pairs):
                most, lossy = float(of_pairs[n]), bool(grid.lossy[n])
                if counted[way] is not None and not (lossy and fine) and most >= least:
                    behind = max(0, math.floor((1.0 - most / to.per_usd) / TIE_STEP))
                    order.append((beyond, lossy, _usd(case, grid), behind, way, _bits_of(case, pair), n))
    for beyond, _, _, _, way, _, n in sorted(order):
        grid = grids[way]
        best = grid.best((grid.beyond == beyond) & (np.arange(len(grid.space.pairs)) == n))
        if best and tied(best, to):
            return best, way
    return None


def _usd(case: Case, grid: "_Grid") -> int:
    """Return the dollars a day of a syncer that merges in this way, with the other settings of the highest figure.

    They are counted in steps of `WORTH_SAYING` of all dollars.
    """
    top = _highest(case)[0]
    of = top.rules
    rules = _rules(grid.merge, grid.block, grid.sent, of.codec_up, of.codec_down, of.sync_every, of.fragments)
    took = case.speeds(rules)
    seconds = case.params * (case.learners * took.add_s + took.round_s)
    if grid.merge == MergeRule.ISO:
        seconds += isotropic_s(case.matrices, rules, took) * rules.fragments
    usd = 24.0 * case.prices.core_hour * max(1.0, seconds / (of.sync_every * case.step_s))
    return math.floor(usd / (WORTH_SAYING * top.day["usd"])) if usd else 0


def _bits_of(case: Case, pair: tuple[str, str]) -> float:
    """Return the bits per parameter of two codecs."""
    return sum(traffic.bits(name, case.params, 1) for name in pair)


def lossier(case: Case, of: Outcome) -> bool:
    """Return whether the codecs cost more in the lab than int4 both ways, with which its periods were measured."""
    return _lossier(case, of.rules.merge, of.rules.isotropic_up, of.rules.codec_up, of.rules.codec_down)


def _lossier(case: Case, merge: str, sent: bool, up: str, down: str) -> bool:
    return case.learners > 1 and quality.coded(case.learners, merge, sent, up, down) > ROUNDING


def freed(case: Case, fixed: Fixed, best: Outcome) -> Iterator[tuple[tuple[str, ...], Outcome, bool]]:
    """Yield settings that were given at the cost of a worse outcome, a better one without them, and if it is taken.

    Each is left out alone; if that changes nothing, both codecs are, and then all. Outcomes that are worse by less than
    the error of the forecast count as equal. Both what is taken without the settings and the highest figure may tie
    with each other, and only one of them with `best`.
    """
    given = tuple(n for n, value in vars(fixed).items() if value is not None and n != "isotropic_up")
    codecs = tuple(n for n in given if n in ("codec", "codec_down"))
    together = [names for names in dict.fromkeys((codecs, given)) if len(names) > 1]
    found = False
    for names in (*((n,) for n in given), *together):
        if found and len(names) > 1:
            return
        try:
            free = search(case, replace(fixed, **dict.fromkeys(names)))
        except InputError:
            continue
        for other in (free.best, free.to):
            if other.rank[:2] > best.rank[:2] and not tied(other, best):
                found = True
                yield names, other, other is free.best
                break


def _ways(case: Case, fixed: Fixed) -> list[tuple[str, int, bool]]:
    """Return the ways to merge that are tried: merge rule, block, and whether matrices are sent isotropically.

    The mean, the trimmed mean and the geometric median never count as better than RDA (`quality.ruled`), so they are
    tried only where they are given.
    """
    rules = [fixed.merge] if fixed.merge else [MergeRule.RDA.value, MergeRule.ISO.value]
    widest = max((max(shape) for shape in case.matrices.shapes), default=0)
    blocks = [b for b in ISO_BLOCKS if b < widest] if fixed.iso_block is None else [fixed.iso_block]
    found = []
    for merge in rules:
        if merge != MergeRule.ISO:
            found.append((merge, 0, False))
        elif widest or fixed.merge:
            found += [
                (merge, block, sent) for block in blocks or [0] for sent in ((False, True) if widest else (False,))
            ]
    return [way for way in found if fixed.isotropic_up in (None, way[2])]


def _pairs(fixed: Fixed, learners: int) -> list[tuple[str, str]]:
    """Return the codecs up and down that are tried: pairs that the lab measured, unless both are given.

    What codecs cost a single learner was not measured: of those that are not given, it gets none below `USUAL`.
    """
    if fixed.codec and fixed.codec_down:
        return [(fixed.codec, fixed.codec_down)]
    found = [(u, d) for u, d in quality.PAIRS if fixed.codec in (None, u) and fixed.codec_down in (None, d)]
    if learners == 1:
        fine = {*quality.LOSSLESS, quality.USUAL}
        found = [pair for pair in found if fine.issuperset(pair)]
    if found:
        return found
    # A codec that was not measured: beside itself and those without loss.
    given = fixed.codec or fixed.codec_down or ""
    others = (given, *quality.LOSSLESS)
    return [(given, o) if fixed.codec else (o, given) for o in others]


@dataclass(frozen=True, kw_only=True)
class _Space:
    """The combinations of H, P and codecs that are tried with each way to merge: arrays of [H, P, pair of codecs]."""

    pairs: list[tuple[str, str]]
    periods: list[int]
    free: bool
    """Whether the plan chooses the period."""
    fragments: Figures
    up_bits: Figures
    """Bits per parameter; the same for `down_bits`."""
    down_bits: Figures

    @classmethod
    def of(cls, case: Case, fixed: Fixed) -> "_Space":
        """Return the combinations that given settings leave. Raises `InputError` if P and H exclude one another."""
        return cls.around(case, fixed, _pairs(fixed, case.learners), _periods(fixed))

    @classmethod
    def around(cls, case: Case, fixed: Fixed, pairs: list[tuple[str, str]], periods: list[int]) -> "_Space":
        """Return the combinations of these codecs and periods."""
        p = _fragments(case, fixed, periods, [up for up, _ in pairs])
        up_bits, down_bits = (_bits(case.params, p, [pair[n] for pair in pairs]) for n in range(2))
        return cls(
            pairs=pairs,
            periods=periods,
            free=fixed.sync_every is None,
            fragments=p,
            up_bits=up_bits,
            down_bits=down_bits,
        )


@dataclass(frozen=True, kw_only=True)
class _Grid:
    """Figures of all combinations of one way to merge: arrays of [H, P, pair of codecs]."""

    case: Case
    space: _Space
    merge: str
    block: int
    sent: bool
    load: Figures
    kept: list[Figures]
    bound: Figures
    """`Outcome.per_usd`, rounded up; −inf for what cannot be chosen."""
    usd: Figures
    """Dollars a day, rounded down."""
    beyond: Figures
    """Whether the worth of a token is extrapolated."""
    lossy: Figures
    """Whether the codecs are `lossier`, by pair."""

    @classmethod
    def of(cls, case: Case, space: _Space, merge: str, block: int, sent: bool) -> "_Grid | None":
        """Return the figures, or None if packing takes too many of a learner's cores in all combinations."""
        pairs, periods, p = space.pairs, space.periods, space.fragments
        rules = [_rules(merge, block, sent, up, down) for up, down in pairs]
        took = [case.speeds(r) for r in rules]
        pack_s = np.array(
            [packing_s(case.params, case.matrices, r, t) * r.fragments for r, t in zip(rules, took, strict=True)]
        )
        merge_s = np.array([case.params * (case.learners * t.add_s + t.round_s) for t in took])
        if merge == MergeRule.ISO:
            merge_s = merge_s + np.array(
                [isotropic_s(case.matrices, r, t) * r.fragments for r, t in zip(rules, took, strict=True)]
            )
        costs = {int(n): case.messages(int(n)) for n in np.unique(np.minimum(p, 12))}
        own = [
            _each(np.minimum(p, 12), {n: getattr(c.learner, f"{way}_bytes") for n, c in costs.items()})
            for way in ("up", "down")
        ]
        up, down = (
            case.params / p / 8.0 * bits + o for bits, o in zip((space.up_bits, space.down_bits), own, strict=True)
        )
        uneven = _each(p, {int(n): case.uneven(int(n)) for n in np.unique(p)})
        each = Round(
            fragments=p, period_s=math.inf, up=up, down=down, pack_s=pack_s / p, arithmetic_s=merge_s / p, uneven=uneven
        )
        h, settles = _at_rest(case, each, periods, free=space.free)
        each = replace(each, period_s=h * case.step_s)
        possible = settles & (pack_s <= PACK_CORES * each.period_s) if sent else settles
        if not possible.any():
            return None
        kept = [each.kept(island, case.islands) for island in case.islands]
        load = np.max([np.maximum(*each.loads(island)) for island in case.islands], axis=0)
        steps: Figures = 0.0
        for island in case.islands:
            away_s, used = island.away_s(case.read(rules[0])), utilization(case.params, island, h)
            steps = steps + goodput_of(island, used, away_s, lost_s(island, h)) * island.count / island.step_s
        served = np.ceil(h * np.maximum(1.0, load))
        mean = sum(of * i.count for of, i in zip(kept, case.islands, strict=True)) / case.learners
        learnt = steps * _worth(case, merge, block, sent, pairs, served, mean)
        rounds_day = p * DAY_S / each.period_s
        usd = case.gpu_usd + 24.0 * case.prices.core_hour * np.maximum(1.0, each.arithmetic_s * rounds_day / DAY_S)
        usd = usd + _traffic_usd(case, rules, each, rounds_day, costs)
        value = learnt * DAY_S / usd if case.gpu_usd else learnt + 0.0 * usd
        bound = np.where(possible, value * (1.0 + ROUNDING), -np.inf)
        return cls(
            case=case, space=space, merge=merge, block=block, sent=sent, load=load, kept=kept, bound=bound,
            usd=usd * (1.0 - ROUNDING),
            lossy=np.array([_lossier(case, merge, sent, *pair) for pair in pairs]),
            beyond=quality.beyond(rules, served, case.learners, mean, case.matrices.gain(block)),
        )  # fmt: skip

    @cached_property
    def scores(self) -> Figures:
        """Return the bounds; −inf for what links cannot carry, if they can carry anything."""
        fits = self.load <= HEADROOM
        return np.where(fits, self.bound, -np.inf) if (fits & np.isfinite(self.bound)).any() else self.bound

    def between(self, fixed: Fixed) -> _Space:
        """Return all periods between the neighbours of the best ones, with the codecs that may be the best.

        The best ones of those that were measured count, too.
        """
        scores, tried = self.scores, self.space.periods
        by_pair = scores.max(axis=(0, 1))
        near = np.flatnonzero(by_pair >= NEAR * by_pair.max())
        best: set[int] = set()
        for of in (scores, np.where(self.beyond, -np.inf, scores)):
            by_period = of.max(axis=1)
            may = near[by_period.max(axis=0)[near] >= NEAR * by_pair.max()]
            best |= set(by_period.argmax(axis=0)[may].tolist())
        shortest = max(PERIODS[0], fixed.fragments or 1)
        spans = [(tried[n - 1] if n else shortest, tried[min(n + 1, len(tried) - 1)]) for n in best]
        periods = sorted({h for low, high in spans for h in range(low, high + 1)})
        return _Space.around(self.case, fixed, [self.space.pairs[n] for n in near], periods)

    def by_codecs(self, least: float) -> Iterator[Outcome]:
        """Yield the best outcome of each pair of codecs, if it may score at least this much."""
        for n in np.flatnonzero(self.scores.max(axis=(0, 1)) >= max(least, 0.0)):
            yield max(self.contenders(np.arange(len(self.space.pairs)) == n), key=lambda o: o.rank)

    def most(self, among: Figures) -> float:
        """Return the highest score among these combinations; −inf if there is none."""
        return float(np.where(among, self.scores, -np.inf).max())

    def best(self, among: Figures = True) -> Outcome | None:
        """Return the best outcome among these combinations; None if there is none."""
        return max(self.contenders(among), key=lambda o: o.rank) if math.isfinite(self.most(among)) else None

    def contenders(self, among: Figures = True) -> Iterator[Outcome]:
        """Yield outcomes among which the best is; `among`: which combinations count."""
        bound = np.where(among, self.scores, -np.inf)
        some = np.nonzero(np.isfinite(bound))
        load, longest = self.load[some], -np.array(self.space.periods)[some[0]]
        order = np.lexsort((longest, self.usd[some], np.where(load <= HEADROOM, 0.0, load), -bound[some]))
        best: Outcome | None = None
        for at in order:
            where = tuple(int(axis[at]) for axis in some)
            if best is not None and not self._may_be_better(bound, where, best):
                return
            up, down = self.space.pairs[where[2]]
            rules = _rules(
                self.merge,
                self.block,
                self.sent,
                up,
                down,
                self.space.periods[where[0]],
                int(self.space.fragments[where]),
            )
            found = outcome(self.case, rules)
            best = found if best is None or found.rank > best.rank else best
            yield found

    def _may_be_better(self, bound: Figures, where: tuple[int, ...], best: Outcome) -> bool:
        """Return whether a combination can have a higher rank; those before it in the order cannot."""
        if bound[where] < best.per_usd or not math.isfinite(bound[where]):
            return False
        if self.case.gpu_usd and best.per_usd > 0.0:
            return True
        # Of equals, the one with the lower load or the lower price is better.
        tied = bool(bound[where] <= best.per_usd * (1.0 + 2.0 * ROUNDING))
        return not tied or bool(self.usd[where] < best.day["usd"] if best.fits else self.load[where] < best.load)


def _at_rest(case: Case, each: Round, periods: Sequence[int], *, free: bool) -> tuple[Figures, Figures]:
    """Return the period that a run uses in each combination, and which combinations are tried.

    Where the period is free, a run keeps the period of a combination, or lengthens it as far as it may, or the
    combination is not tried: the period to which the run would lengthen it is tried itself. The longest period that the
    plan tries is tried in any case.
    """
    h = np.broadcast_to(np.array(periods)[:, None, None], each.fragments.shape)
    most = np.minimum(LONGEST * h, STEPS_MOST)
    if not free:
        return each.at_rest(case.islands, h, most), np.ones(h.shape, bool)

    def short(period: Figures) -> Figures:
        return LAGS * replace(each, period_s=period * case.step_s).lag_s(case.islands) > period * case.step_s

    lengthened, all_the_way = short(h), short(most - 1)
    rest = np.where(lengthened, most, h)
    if periods[-1] == PERIODS[-1]:
        last = replace(each, **{name: value[-1:] for name, value in vars(each).items() if np.ndim(value)})
        rest[-1] = last.at_rest(case.islands, h[-1:], most[-1:])[0]
    return rest, ~lengthened | all_the_way | (h == PERIODS[-1])


@lru_cache(maxsize=4096)
def _rules(merge: str, block: int, sent: bool, up: str, down: str, h: int = 12, p: int = 12) -> Rules:
    return Rules.suited(
        merge=merge, iso_block=block, isotropic_up=sent, codec_up=up, codec_down=down, sync_every=h, fragments=p
    ).check()


def _periods(fixed: Fixed) -> list[int]:
    if fixed.sync_every and fixed.fragments and fixed.fragments > fixed.sync_every:
        raise InputError(
            f"{fixed.fragments} fragments within {fixed.sync_every} steps: at most one leaves per step, so let H be at "
            "least P"
        )
    found = [fixed.sync_every] if fixed.sync_every else [h for h in PERIODS if h >= (fixed.fragments or 1)]
    if not found:
        raise InputError(
            f"{fixed.fragments} fragments need a period of at least as many steps, and the plan tries up to "
            f"{PERIODS[-1]}: give --sync-every {fixed.fragments} or longer, or fewer --fragments"
        )
    return found


def _fragments(case: Case, fixed: Fixed, periods: Sequence[int], up: Sequence[str]) -> Figures:
    """Return the numbers of fragments that are tried, by period and codec: [H, multiples, codec]."""
    if fixed.fragments:
        return np.full((len(periods), 1, len(up)), fixed.fragments)
    # Periods of about a length have the same limit, so that the best of them is also the best with its P given.
    most = np.array([min(h - h % max(1, 1 << h.bit_length() >> 7), case.tensors or h) for h in periods])[:, None, None]
    least = np.array([_least(case.params, codec) for codec in up])
    # Multiples alone, so that what a period allows is also tried with every longer one.
    times = np.minimum(np.array(FINE)[:, None], np.maximum(1, np.minimum(most, FRAGMENTS_USUAL) // least))
    return np.minimum(most, least * times)


def _least(params: float, up: str) -> int:
    whole = params * traffic.bits(up, params, 1) / 8.0
    return min(FRAGMENTS_MAX, max(Rules().fragments, math.ceil(whole / FRAGMENT_BYTES)))


def _bits(params: float, p: Figures, codecs: Sequence[str]) -> Figures:
    """Return the bits per parameter of each combination, by its number of fragments and codec."""
    found = np.empty(p.shape)
    for n, name in enumerate(codecs):
        found[..., n] = _each(
            p[..., n], {int(count): traffic.bits(name, params, int(count)) for count in np.unique(p[..., n])}
        )
    return found


def _each(keys: Figures, values: dict[int, float]) -> Figures:
    """Return the value of every key, in the shape of the keys."""
    table = np.zeros(max(values) + 1)
    table[list(values)] = list(values.values())
    return table[keys]


def _worth(
    case: Case,
    merge: str,
    block: int,
    sent: bool,
    pairs: Sequence[tuple[str, str]],
    periods: Figures,
    kept: Figures,
) -> Figures:
    """Return the worth of a token in long runs, as `quality.worth` does for one choice of rules."""
    learners = case.learners
    if learners == 1:
        return 1.0
    gain = case.matrices.gain(block)
    short, long = quality.base(learners, merge, periods, gain)
    near = learning.lab(merge).merged_near(periods)
    more = np.array([quality.coded(learners, merge, sent, *pair) for pair in pairs]) + quality.ruled(merge)
    return learning.weighed(short, long, near, more, kept)[1]


def _traffic_usd(
    case: Case, rules: Sequence[Rules], each: Round, rounds_day: Figures, costs: dict[int, traffic.MessageCosts]
) -> Figures:
    """Return the dollars of requests, egress and stored bytes of a day, as `outcome` counts them. `rules`: by pair."""
    prices, learners, p = case.prices, case.learners, each.fragments
    abroad = [i for i in case.islands if i.abroad(case.store_region)]
    read = case.read(rules[0])  # The same for all pairs.
    received = rounds_day * each.down * sum(i.count for i in abroad) + sum(
        i.count * i.restarts_day(read) * read for i in abroad
    )
    saved_s, whole = (np.array([of(r) for r in rules]) for of in (lambda r: checkpoint_s(case, r), case.checkpoint))
    saved = np.where(whole <= OBJECT_MAX, DAY_S * whole / saved_s, 0.0)
    sent = (rounds_day * each.up + saved) * sum(i.count * i.sending_usd_gb(prices) for i in abroad)
    usd = received / 1e9 * prices.egress_gb + sent / 1e9
    state = np.array([state_bytes(r) for r in rules])
    size = case.params / p * state
    by_bytes = np.maximum(snapshots.WORTH * state * np.floor(case.params / p), snapshots.LEAST)
    rounds = np.ceil(by_bytes / np.maximum(1.0, learners * each.up))
    between = np.minimum(Pace().snapshot_every, np.maximum(1.0, rounds))
    kept = p * KEPT_VERSIONS * (learners * each.up + each.down) + case.params * state * KEPT_VERSIONS / between
    kept = kept + np.where(whole <= OBJECT_MAX, 2.0 * learners * whole, 0.0)
    usd = usd + kept / 1e9 * prices.storage_gb_month / 30.0
    # Large objects take more requests than `traffic` measures: parts and ranges.
    reads = rounds_day * learners * (_reads(each.down) + _reads(each.up) - 2.0)
    parts = learners * (_writes(each.up) - 1.0) + _writes(each.down) - 1.0 + (_writes(size) - 1.0) / between
    writes = rounds_day * parts + np.where(whole <= OBJECT_MAX, learners * DAY_S / saved_s * _writes(whole), 0.0)
    usd = usd + (reads * prices.get_per_1000 + writes * prices.put_per_1000) / 1000.0

    def a_round(cost: traffic.MessageCosts) -> float:
        total = 0.0
        for requests, times in ((cost.syncer.requests, 1), (cost.learner.requests, learners)):
            read = requests.get("get", 0.0)
            written = sum(requests.values()) - read
            total += times * (read * prices.get_per_1000 + written * prices.put_per_1000) / 1000.0
        return total

    return usd + rounds_day * _each(np.minimum(p, 12), {n: a_round(cost) for n, cost in costs.items()})


def _reads(size: Figures) -> Figures:
    """Return what `requests_to_read` does, of arrays."""
    return np.maximum(1.0, np.ceil(size / RANGE_BYTES))


def _writes(size: Figures) -> Figures:
    """Return what `requests_to_write` does, of arrays."""
    return np.where(size <= PART_BYTES, 1.0, np.ceil(size / PART_BYTES) + 2.0)

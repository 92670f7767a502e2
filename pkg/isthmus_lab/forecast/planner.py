"""Planning a run: choose the settings for a model and a set of learners, each with its reason.

The settings that learn most per dollar are chosen (`search`). Figures that differ by less than the error of the
forecast are a tie: none is called better, and a stated rule decides. Settings that are given are kept. Where another
value of one of them would learn more, by more than the error, the plan says how much more, and what it would choose.
"""

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from isthmus.agent.speed import Speeds
from isthmus.errors import InputError
from isthmus.format.layout import Spec
from isthmus.format.rules import CHECKPOINT_S, LONGEST, ROBUST, MergeRule, Pace, Rules, overdrive
from isthmus.learner.incarnation import RARER_MAX
from isthmus.rounds.period import LAGS
from isthmus.wording import agreeing, counted
from isthmus_lab.forecast import learning, matrices, quality, traffic
from isthmus_lab.forecast.bandwidth import PARAMS_MAX
from isthmus_lab.forecast.island import Island
from isthmus_lab.forecast.outcome import (
    CHECKPOINT_BYTES,
    CHECKPOINT_SHARE,
    HEADROOM,
    OBJECT_MAX,
    SYNCER_CORES,
    Case,
    Forecast,
    Outcome,
    feedback_bytes,
    isotropic_s,
)
from isthmus_lab.forecast.search import PERIODS, TIE_STEP, Fixed, Found, freed, lossier, search, tied
from isthmus_services.board.prices import Prices

FREE = Fixed()
"""Nothing is given."""

KEPT_LEAST = 0.5
"""Share of tokens merged below which a plan warns that links or distances do not suit the model."""

OVERLAP_MAX = 1024
"""Highest `overlap` in a plan, in steps: an update that takes longer does not come back within any period."""

NOTHING = 5e-4
"""Shares below this would be printed as 0.0 %."""

ALMOST = 0.999
"""Shares from this on, and up to its inverse, are called equal within the difference."""

RARE = 0.1
"""Share of the time between two failures of a learner above which the time between two checkpoints is warned of."""

LENGTHS = 200
"""Lengths of a run that are tried, to find the one at which the best merge rule changes."""

OUTER_LONGEST = 48
"""Longest period in steps at which outer rates were compared (`isthmus.format.rules.LONG_STEPS`)."""

NO_MERGE_TIME = (
    "the lab, where the worth of a token was measured, counts no time for a merge; the plan adds it to rounds"
)
"""Said where isotropic merges are taken or compared: only their merges take long."""

OTHERS = 3
"""Ways to merge that the reason of the merge rule compares with the best one."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One setting and the reason for its value."""

    name: str
    value: object
    reason: str
    brief: str = ""
    """The reason in a few words, if it is long."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A plan: the chosen settings, and what to expect from them."""

    params: float
    rules: Rules
    period: int
    """Steps between two syncs of a fragment that all figures are for: `rules.sync_every`, lengthened as a run does."""
    pace: Pace
    choices: list[Choice]
    forecasts: list[Forecast]
    syncer: dict[str, float]
    day: dict[str, float]
    warnings: list[str]
    worth: learning.Worth
    """Worth of a processed token at these settings."""
    learnt: float
    """Steps a second of all learners, without those that failures take back, times the worth of a token."""
    checkpoint_s: float
    """Seconds between two checkpoints of a learner that every figure is for."""
    per_usd: float
    """Steps learnt per dollar, or `learnt` if GPUs cost nothing: within the error of the forecast of the highest."""
    ties: list[str]
    """For the merge and for the codecs: with which others what is taken ties, and by which rule it is taken."""


def plan(
    params: float,
    islands: Sequence[Island],
    prices: Prices,
    *,
    store_region: str = "",
    fixed: Fixed = FREE,
    speeds: Callable[[Rules], Speeds],
    specs: Sequence[Spec] | None = None,
) -> Plan:
    """Return a plan. Raises `InputError` for impossible input.

    `fixed`: settings that the plan does not choose. `specs`: the model's tensors, which limit its number of fragments;
    without them, its matrices are those of a typical transformer of its size. `speeds`: returns the speed of a
    syncer's arithmetic under given rules (see `speeds.Table`).
    """
    if not (math.isfinite(params) and 1 <= params <= PARAMS_MAX):
        raise InputError(
            f"{params:g} parameters cannot be: at least 1, at most {PARAMS_MAX:g}; 2.9 billion are written 2.9e9"
        )
    if not islands:
        raise InputError("a plan needs learners: give --learners or a file with [[learner]] tables")
    for island in islands:
        island.check()
    case = Case(
        params=params,
        islands=islands,
        prices=prices,
        store_region=store_region,
        speeds=speeds,
        matrices=matrices.typical(params) if specs is None else matrices.of(specs),
        feedback=feedback_bytes(specs),
        specs=specs,
    )
    found = search(case, fixed)
    best, step_s = found.best, case.step_s
    checkpoint_s = best.checkpoint_s
    reasons = _reasons(case, fixed, found)
    reasons.append(_merge(case, fixed, found))
    if best.rules.isotropic_up:
        cores = best.wire.pack_s * best.rules.fragments / (best.period * step_s)
        reasons.append(
            Choice(
                name="isotropic_up",
                value=True,
                reason=f"few bits drown no direction then; packing an update takes a learner {best.wire.pack_s:.2g} s, "
                f"{cores:.2g} of its cores",
            )
        )
    reasons.append(
        Choice(
            name="checkpoint",
            value=int(checkpoint_s),
            reason=_why_checkpoint(case, best),
        )
    )
    backs = sorted(f.back_s / f.island.step_s for f in best.forecasts for _ in range(f.island.count))
    overlap = max(2, math.ceil(min(backs[len(backs) // 2], OVERLAP_MAX)))
    pace = Pace(overlap=float(overlap)).check()
    reasons += [
        Choice(
            name="overlap",
            value=overlap,
            reason=f"an update of the median learner is back as a new version after {backs[len(backs) // 2]:.1f} steps",
        ),
        Choice(
            name="quorum",
            value=1,
            reason="no learner holds up the others; a round waits for learners that answer within the overlap anyway",
        ),
        Choice(
            name="syncers",
            value=max(1, math.ceil(best.syncer["cores"] / SYNCER_CORES)),
            reason=f"merging takes {best.syncer['cores']:.2g} cores, of {SYNCER_CORES:g} in a syncer; several syncers "
            "share the fragments",
        ),
    ]
    return Plan(
        params=params,
        rules=best.rules,
        period=best.period,
        pace=pace,
        choices=reasons,
        forecasts=best.forecasts,
        syncer=best.syncer,
        day=best.day,
        warnings=_warn(case, fixed, found),
        worth=best.worth,
        learnt=best.learnt,
        checkpoint_s=checkpoint_s,
        per_usd=best.per_usd,
        ties=[tie for tie in (_merge_tie(case, found), _codec_tie(case, found)) if tie] if case.learners > 1 else [],
    )


def _merge_tie(case: Case, found: Found) -> str:
    """Return with which other ways to merge the one that is taken ties, and why it is taken; else nothing."""
    best = found.best
    others = sorted((o for o in found.by_way if o is not best and tied(o, best)), key=lambda o: o.rank, reverse=True)
    if not others or case.learners == 1:
        return ""
    first = _first(others, best)
    said = ", ".join(f"{_with(o)} {_beside(case, o, best)}{_marked(o)}" for o in first)
    more = f" and {len(others) - len(first)} more" if len(others) > len(first) else ""
    return (
        f"the merge is a tie: {said}{more}, within the forecast's error of {learning.error():.0%}; {_with(best)} is "
        "taken by the order in docs/paper.md: measured before extrapolated, then cheaper syncers, higher figures, "
        "plainer merges"
    )


def _first(others: Sequence[Outcome], best: Outcome) -> list[Outcome]:
    """Return the first of these, and behind them the first of another rule, if they and `best` have only one."""
    first = list(others[:OTHERS])
    rules = {o.rules.merge for o in (best, *first)}
    return first + [o for o in others[OTHERS:] if len(rules) == 1 and o.rules.merge not in rules][:1]


def _codec_tie(case: Case, found: Found) -> str:
    """Return with which other codecs those that are taken tie, and why they are taken; else nothing."""
    best = found.best
    others = [o for o in found.by_codecs if o is not best and tied(o, best)]
    if not others:
        return ""
    top = max(others, key=lambda o: o.rank)
    pairs = f"{len(others)} other pairs of codecs are" if len(others) > 1 else "another pair of codecs is"
    rule = ""
    if case.learners > 1:
        fine = "pairs that cost no more than int4 in the lab go before others"
        measured = "measured ones before extrapolated ones"
        rule = f"{measured}, then {fine}; " if lossier(case, best) else f"{fine}, then {measured}; "
    return (
        f"the codec is a tie: {pairs} within the forecast's error of {learning.error():.0%} ({top.rules.codec_up} up, "
        f"{top.rules.codec_down} down at {_period(top)} {_beside(case, top, best)}"
        f"{_extrapolated(top)}); {rule}of those left, the one with the fewest bits of those nearest "
        f"to the highest figure, in steps of {TIE_STEP:.0%}, is taken"
    )


def _named(of: Rules) -> str:
    """Return the name of a way to merge."""
    if of.merge != MergeRule.ISO:
        return of.merge
    size = f"blocks of {of.iso_block}" if of.iso_block else "whole matrices"
    return f"iso, {size}{', sent so' if of.isotropic_up else ''}"


def _with(of: Outcome) -> str:
    """Return the name of a way to merge with its H and its codecs; they may differ from those that are taken."""
    rules = of.rules
    return f"{_named(rules)} ({_period(of)}, {rules.codec_up} up, {rules.codec_down} down)"


def _period(of: Outcome) -> str:
    """Return the period H that a user gives as --sync-every, and the period to which a run lengthens it."""
    to = f", which a run lengthens to {of.period}" if of.period > of.rules.sync_every else ""
    return f"H = {of.rules.sync_every}{to}"


def _size(count: float, least: float) -> str:
    """Return a number of bytes in the unit in which it is read; `least`: the smallest of these units [bytes]."""
    units = {1e6: "MB", 1e9: "GB", 1e12: "TB", 1e15: "PB"}
    unit = max((u for u in units if least <= u <= count), default=least)
    return f"{count / unit:.3g} {units[unit]}"


def _per_usd(case: Case) -> str:
    return " per dollar" if case.gpu_usd else ""


def _extrapolated(of: Outcome) -> str:
    return ", extrapolated" if _beyond(of) else ""


def _reasons(case: Case, fixed: Fixed, found: Found) -> list[Choice]:
    best, rules = found.best, found.best.rules
    up = "what it drops is fed back with a later update"
    down = "what it drops stays with the syncer and follows with the next version"
    if not rules.error_feedback:
        up, down = "what it drops is given up", "what it drops is given up: nobody keeps it"

    def codec(name: str, fate: str, which: str) -> str:
        bits = f"{traffic.bits(name, case.params, rules.fragments):.1f} bits per parameter"
        return "; ".join(part for part in (why(which, ""), bits, fate) if part)

    def why(name: str, reason: str) -> str:
        return "as you asked" if getattr(fixed, name) else reason

    suits = f"what suits rounds of {best.period} steps in the lab"
    if best.period > OUTER_LONGEST:
        suits = f"taken from H = {OUTER_LONGEST}, the longest for which it was measured"
    return [
        Choice(
            name="sync_every",
            value=rules.sync_every,
            reason=(_lengthened(case, fixed, best) or why("sync_every", _why_period(case, fixed, best)))
            + (f"; extrapolated: {best.worth.beyond[0]}" if _beyond(best) else ""),
        ),
        Choice(
            name="fragments",
            value=rules.fragments,
            reason=why(
                "fragments",
                f"updates of {_size(best.wire.up, 1e6)}, at most one per step, spread evenly over the period",
            ),
        ),
        Choice(
            name="codec",
            value=rules.codec_up,
            reason="; ".join(
                part
                for part in (codec(rules.codec_up, up, "codec"), _codecs(case, rules), _codec_tie(case, found))
                if part
            ),
            brief="; ".join(part for part in (codec(rules.codec_up, "", "codec"), _codecs_brief(case, found)) if part),
        ),
        Choice(name="codec_down", value=rules.codec_down, reason=codec(rules.codec_down, down, "codec_down")),
        Choice(
            name="outer_lr",
            value=rules.outer_lr,
            reason=f"with momentum {rules.outer_momentum:g}, {suits}",
        ),
    ]


def _codecs(case: Case, rules: Rules) -> str:
    """Return what the codecs of both ways cost in the lab, beside float32."""
    if case.learners == 1:
        return "a run of one learner has nothing to merge"
    cost = _cost_of_codecs(case, rules)
    if not quality.measured_pair(rules.codec_up, rules.codec_down):
        said = "not measured; by its bits it would take"
    else:
        said = "in the lab this pair takes"

    at = quality.coded_at(rules.merge)
    return (
        f"{said} {_taken(cost)} of a token's worth after {learning.SHORT} steps at H = {at}, the only period that was "
        f"tried; counted here, in longer runs and at this H: {_taken(learning.lab().shrinks * cost)}"
    )


def _cost_of_codecs(case: Case, rules: Rules) -> float:
    way = case.learners, rules.merge, rules.isotropic_up
    return quality.coded(*way, rules.codec_up, rules.codec_down) - quality.coded(*way, "f32", "f32")


def _taken(cost: float) -> str:
    """Return the share of a token's worth that a cost takes."""
    taken = -math.expm1(-cost)
    return f"{taken:.1%}" if taken >= NOTHING else "less than 0.1%"


def _codecs_brief(case: Case, found: Found) -> str:
    """Return in a few words what both codecs take, and with how many pairs they tie."""
    if case.learners == 1:
        return ""
    cost = learning.lab().shrinks * _cost_of_codecs(case, found.best.rules)
    others = sum(o is not found.best and tied(o, found.best) for o in found.by_codecs)
    ties = f"; a tie with {others} other {agreeing(others, 'pair', 'pairs')} of codecs" if others else ""
    unknown = "" if quality.measured_pair(found.best.rules.codec_up, found.best.rules.codec_down) else " (not measured)"
    return f"both ways take {_taken(cost)} of a token's worth{unknown}{ties}"


def _merge(case: Case, fixed: Fixed, found: Found) -> Choice:
    """Return the merge rule; the reason compares the ways to merge, and states the cost of isotropic merges."""
    rules, best = found.best.rules, found.best
    if not case.matrices.shapes:
        return Choice(name="merge", value=rules.merge, reason="there are no matrices to merge isotropically")

    def share(of: Outcome) -> str:
        return f"{_with(of)} {_beside(case, of, best)}{_marked(of)}"

    others = sorted((o for o in found.by_way if o is not best), key=lambda o: o.rank, reverse=True)
    behind = _first([o for o in others if not tied(o, best)], best)
    tie = _merge_tie(case, found)
    most = f"learns most{_per_usd(case)}" if best is found.top else "no other way ties with it"
    if case.learners == 1 and rules.merge == MergeRule.RDA:
        most = "it merges the work of a single learner as it is"
    most = "as you asked" if fixed.merge else "" if tie else most
    mine = f"{_named(rules)}{_marked(best)}"
    parts = [f"{mine}: {most}" if others and most else mine if others else most or mine]
    if behind:
        parts[0] += f"; beside it {', '.join(map(share, behind))}"
    if tie:
        parts.append(tie)
    lengths = _by_length(case, found, all_measured=not any(map(_beyond, (best, *others[:OTHERS]))))
    parts += [lengths] if lengths else []
    if any(o.rules.merge == MergeRule.ISO for o in found.by_way) and case.learners > 1:
        parts.append(NO_MERGE_TIME)
    if rules.merge == MergeRule.ISO:
        took = case.speeds(rules)
        seconds = isotropic_s(case.matrices, rules, took)
        cores = seconds * rules.fragments / (best.period * case.step_s)
        flop = case.matrices.flop(rules.iso_block) / rules.fragments
        parts.append(f"it takes, a round: {flop / 1e9:,.4g} GFLOP, {seconds:.2g} s, {cores:.2g} cores")
    if said := quality.said(rules.merge):
        parts.append(said)
    ties = sum(tied(o, best) for o in others) if tie else 0
    like = "as you asked" if fixed.merge else most or f"a tie with {counted(ties, 'other way')} to merge"
    brief = [f"{mine}: {like}"]
    if other := next((o for o in others if o.rules.merge != rules.merge), next(iter(others), None)):
        brief.append(share(other))
    if "learns more" in lengths:
        brief.append(lengths)
    return Choice(name="merge", value=rules.merge, reason="; ".join(parts), brief="; ".join(brief))


def _marked(of: Outcome) -> str:
    return " (extrapolated)" if _beyond(of) else ""


def _beyond(of: Outcome) -> bool:
    """Return whether the worth of a token is outside the measured range."""
    return bool(of.worth.beyond)


def _by_length(case: Case, found: Found, *, all_measured: bool) -> str:
    """Return the lengths of a run at which the other kind of merge learns more; nothing if there is no other.

    Differences below the error of the forecast are none.

    `all_measured`: whether nothing that is compared is extrapolated;
    otherwise the text does not claim that the choice holds in the lab's runs.
    """
    best = found.best

    def score(of: Outcome, steps: float) -> float:
        return of.per_usd / of.worth.long * of.worth.after(steps) if of.worth.long else 0.0

    def other(steps: float) -> Outcome | None:
        """Return the best way of the other kind, if it learns more than the chosen one in runs of this length."""
        iso = best.rules.merge == MergeRule.ISO
        ways = [o for o in found.by_way if o.fits == best.fits and (o.rules.merge == MergeRule.ISO) != iso]
        most = max(ways, key=lambda o: score(o, steps), default=best)
        return most if score(most, steps) > (1.0 + learning.error()) * score(best, steps) else None

    if len({o.rules.merge for o in found.by_way}) == 1 or not best.worth.long or case.learners == 1:
        return ""
    longest = max(o.worth.longest for o in found.by_way)
    lengths = [n for n in np.geomspace(learning.SHORT, longest, LENGTHS).tolist() if other(n)]
    if not lengths:
        kind = MergeRule.RDA if best.rules.merge == MergeRule.ISO else MergeRule.ISO
        ahead = (
            f"{kind} is ahead by more than the error in none of the lab's runs of {learning.SHORT} to {longest:,} "
            f"steps (iso: up to {learning.lab(MergeRule.ISO).longest:,})"
        )
        return ahead if all_measured else ""
    low, high = lengths[0], lengths[-1]
    at = low if low == learning.SHORT else math.sqrt(low * high)
    if (there := other(at)) is None:
        return ""

    def said(steps: float) -> str:
        steps = round(steps, -2)
        return f"{steps:,.0f} ({learning.tokens_each(steps, case.learners):.2g} tokens a parameter)"

    span = f"up to about {said(high)}" if low == learning.SHORT else f"from about {said(low)} to {said(high)}"
    worths = f"{there.worth.after(at):.2f} of data parallel's, by {best.rules.merge} {best.worth.after(at):.2f}"
    return (
        f"{'extrapolated: ' if _beyond(best) or _beyond(there) else ''}in runs of {span} of the lab's steps, "
        f"{_named(there.rules)} learns more: after {round(at, -2):,.0f} steps a token is worth {worths}"
    )


def _lengthened(case: Case, fixed: Fixed, best: Outcome) -> str:
    """Return what the run makes of this period, if it lengthens it; else nothing."""
    if best.period == best.rules.sync_every:
        return ""
    kept = "" if fixed.sync_every else f"; {_shortest_kept(case, fixed, best)}"
    asked = f"you asked for {fixed.sync_every}; " if fixed.sync_every else ""
    least = f"learners lengthen a period that is shorter than {LAGS:g} lags of a round, as they measure them"
    if best.period == best.rules.periods[1]:
        least += f", to at most {LONGEST} times what was asked for"
    return f"{asked}the run will use {best.period}, because {least}; every figure here is for {best.period}{kept}"


def _shortest_kept(case: Case, fixed: Fixed, best: Outcome) -> str:
    """Return the shortest period that is tried and that the run would keep as it is, with its figure."""
    same, longer = _same(fixed, best), [h for h in PERIODS if h > best.rules.sync_every]

    def at(h: int) -> Outcome | None:
        return _at_period(case, same, h)

    n = bisect.bisect_left(longer, True, key=lambda h: (of := at(h)) is not None and of.period == h)
    if n == len(longer) or (other := at(longer[n])) is None:
        return f"it would lengthen any period of up to {PERIODS[-1]} steps, the longest that is tried"
    beside = f"{_beside(case, other, best)}{_marked(other)}"
    return f"the shortest that is tried and that it would keep is {longer[n]}, which {beside}"


def _same(fixed: Fixed, best: Outcome) -> Fixed:
    """Return what is fixed, and the merge and the codecs of an outcome beside it."""
    return replace(
        fixed, merge=best.rules.merge, iso_block=best.rules.iso_block, codec=best.rules.codec_up,
        codec_down=best.rules.codec_down, isotropic_up=best.rules.isotropic_up,
    )  # fmt: skip


def _why_checkpoint(case: Case, best: Outcome) -> str:
    """Return the reason for the time between two checkpoints of a learner."""
    if best.checkpoint > OBJECT_MAX:
        return f"none is stored: {_size(best.checkpoint, 1e9)} are more than one object takes"
    size = f"{_size(best.checkpoint, 1e9)} each"
    if best.checkpoint_s <= CHECKPOINT_S:
        return f"seconds between two, the least; {size}, at most {CHECKPOINT_SHARE:.0%} of every uplink"
    slowest = min(case.islands, key=lambda island: island.up_gbit_s)
    return (
        f"seconds between two: {size} take so long at {CHECKPOINT_SHARE:.0%} of an uplink of {slowest.up_gbit_s:g} "
        f"Gbit/s ({slowest.name}), the rest is for updates; after a failure merged updates stay: only the optimizer's "
        "moments and the position in the data are as old as the checkpoint"
    )


def _why_period(case: Case, fixed: Fixed, best: Outcome) -> str:
    """Return the reason for this period, compared with a shorter and a longer one."""
    if not best.fits:
        return f"even so {best.busiest.name} needs {best.load:.0%} of its link, more than {HEADROOM:.0%}"
    if not best.learnt:
        return "nothing comes back within any period"
    at = f"{best.kept:.0%} of tokens merged, {best.load:.0%} of a link ({HEADROOM:.0%} at most)"
    if best.period >= (longest := learning.lab(best.rules.merge).longest_period) and case.learners > 1:
        at += f"; {longest} is the longest period that the lab measured with {best.rules.merge}"
    here = best.rules.sync_every
    shorter = [h for h in PERIODS if (fixed.fragments or 1) <= h < here]
    longer = [h for h in PERIODS if h > here]
    others, ties = [], []
    same = _same(fixed, best)
    for h in (*shorter[-1:], *longer[:1]):
        if (other := _at_period(case, same, h)) is None:
            continue
        to = f", which the run lengthens to {other.period}," if other.period > h else ""
        others.append(f"{h}{to} {_beside(case, other, best, per=False)}{' (extrapolated)' if _beyond(other) else ''}")
        ties += [str(h)] if tied(other, best) else []
    which = "" if _beyond(best) else " that is not extrapolated" if case.learners > 1 else ""
    most = f"the highest figure{_per_usd(case)} with this merge and these codecs{which}"
    said = f"{most}: {at}; beside it {', '.join(others)}" if others else at
    within = f"{' and '.join(ties)} {'are ties' if len(ties) > 1 else 'is a tie'}"
    return f"{said}; within the error of {learning.error():.0%}, {within}" if ties else said


def _at_period(case: Case, fixed: Fixed, sync_every: int) -> Outcome | None:
    """Return the outcome at another period; None if packing would take too many of a learner's cores there."""
    try:
        return search(case, replace(fixed, sync_every=sync_every)).best
    except InputError:
        return None


def _beside(case: Case, other: Outcome, best: Outcome, *, per: bool = True) -> str:
    """Return how much another choice learns, beside the one that is taken; no difference is printed as nothing.

    `per`: say that it is per dollar, if it is.
    """
    per_usd = _per_usd(case) if per else ""
    if best.fits and not other.fits:
        return f"needs {other.load:.0%} of a link"
    if not best.per_usd:
        return "learns nothing"
    share = other.per_usd / best.per_usd
    return (
        f"learns as much within {1.0 - ALMOST:.1%}{per_usd}"
        if ALMOST <= share <= 1.0 / ALMOST
        else f"learns {share:.1%} as much{per_usd}"
    )


def _warn(case: Case, fixed: Fixed, found_: Found) -> list[str]:
    """Return warnings about the given input; settings that the plan chose get none."""
    best = found_.best
    forecasts, rules, learners = best.forecasts, best.rules, case.learners
    found = []
    better = list(freed(case, fixed, best))
    # Only where the plan itself would choose another period is the period to blame.
    too_short = any("sync_every" in names and o.rules.sync_every > rules.sync_every for names, o, _ in better)
    tried = f"for this model at any period up to {PERIODS[-1]} steps"
    if fixed != FREE:
        tried = "for this model with the settings that you gave"
    if learners == 1:
        found.append(NO_PARTNER)
    fastest = case.step_s
    for f, most in zip(forecasts, found_.kept, strict=True):
        name = f.island.name
        if not f.fits:
            way, load = max(("up", f.up_load), ("down", f.down_load), key=lambda pair: pair[1])
            what = "cannot carry its fragments" if load > 1.0 else "is so busy that fragments queue"
            help_ = "a longer sync_every helps" if too_short else f"too thin {tried}"
            found.append(f"{name}: its link {way} {what}: {load:.0%} of it would be used; {help_}")
        elif f.kept < KEPT_LEAST if too_short else most < KEPT_LEAST:
            help_ = (
                "a longer sync_every, or a store that is nearer, overwrites less"
                if too_short
                else f"too far, or too thin a link, {tried}"
            )
            found.append(
                f"{name}: a new version is {f.back_s:.1f} s away, {f.back_s / f.island.step_s:.1f} steps: "
                f"{1 - f.kept:.0%} of its tokens are overwritten; {help_}"
            )
        if f.island.step_s > 2.0 * fastest:
            found.append(
                f"{name}: its steps take {f.island.step_s / fastest:.1f} times those of the fastest: it answers with "
                f"few steps and weighs little; a smaller batch there makes its steps shorter"
            )
        if (here := f.goodput / f.utilization) < 0.9:
            found.append(f"{name}: failures and restarts cost {1 - here:.0%} of its time")
        if rare := _rare(case, best, f):
            found.append(rare)
    if rules.merge in ROBUST:
        found.append(
            f"merging by {rules.merge} compares the updates of a round with one another: its time is not in this "
            f"plan and grows with the square of {learners} learners (docs/design/arithmetic.md)"
        )
    if (whole := best.checkpoint) > OBJECT_MAX:
        found.append(
            f"a checkpoint has about {whole / 1e12:.0f} TB: stores take objects of up to "
            f"{OBJECT_MAX / 1e12:.0f} TB, and learners then go on without checkpoints"
        )
    if said := overdrive(rules):
        found.append(said)
    return found + [_hint(fixed, names, best, other, taken=taken) for names, other, taken in better]


NO_PARTNER = "one learner has nobody to merge with: a plain training loop does the same"


def trained_again(forecast: Forecast, checkpoint_s: float) -> float:
    """Return the share of a learner's steps that it trains again after failures, from older optimizer moments.

    Goodput counts them as work: what an update holds of the first time is merged. Failures come at random, so the share
    is a little less than half of the ratio of the two times, and never more than all.
    """
    apart = checkpoint_s / (forecast.island.mtbf_hours * 3600.0)
    return 1.0 + apart * math.exp(-apart) / math.expm1(-apart) if apart > 0.0 else 0.0


def _rare(case: Case, best: Outcome, f: Forecast) -> str:
    """Return a warning if a learner's checkpoints are rare beside its failures; else nothing."""
    failure_s, whole = f.island.mtbf_hours * 3600.0, best.checkpoint
    if best.checkpoint_s <= RARE * failure_s or whole > OBJECT_MAX:
        return ""
    wanted_s = math.floor(RARE * failure_s)
    again = trained_again(f, best.checkpoint_s)
    bits_s = whole * 8.0 / wanted_s if wanted_s else math.inf
    link = f.island.up_gbit_s * 1e9
    planned = whole * 8.0 / best.checkpoint_s / link
    fragments = f.up_load - planned
    if fragments + bits_s / link <= 1.0:
        # A learner takes checkpoints that load its uplink up to so many times more rarely than it is told.
        help_ = (
            f"--checkpoint {wanted_s / RARER_MAX:g} there (checkpoint_s= of isthmus.join), instead of the plan's "
            f"{best.checkpoint_s:.0f}, takes one at least every {wanted_s} s (at most {RARER_MAX:g} times as rarely as "
            f"it is told), for {bits_s / link:.0%} of its uplink instead of {planned:.0%}"
        )
    elif wanted_s < CHECKPOINT_S:
        help_ = "a plan leaves at least a minute between two, so only learners that fail less often help"
    else:
        # With another uplink, the plan may choose error feedback, which makes checkpoints larger.
        most = case.params * (CHECKPOINT_BYTES + case.feedback)
        gbit_s = _rounded_up(most * 8.0 / wanted_s / CHECKPOINT_SHARE / 1e9)
        of = "its uplink" if len(case.islands) == 1 else "every uplink"
        help_ = f"{of} carries one every {wanted_s} s from {gbit_s:g} Gbit/s on (--up, up_gbit_s in a file)"
    return (
        f"{f.island.name}: a checkpoint every {best.checkpoint_s:,.0f} s is rare beside a failure every "
        f"{failure_s:,.0f} s: about {again:.0%} of its steps are trained again, from older optimizer moments, which "
        f"the goodput does not count; {help_}"
    )


def _rounded_up(value: float) -> float:
    """Return the value rounded up to three significant digits."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return math.ceil(value / unit) * unit


FLAGS = {name: "--" + name.replace("_", "-") for name in vars(FREE) if name != "isotropic_up"}


def _hint(fixed: Fixed, names: Sequence[str], best: Outcome, other: Outcome, *, taken: bool) -> str:
    """Return what settings that were given cost beside another outcome; `taken`: the plan would choose it instead."""
    chosen = {"codec": "codec_up"}
    instead = [
        f"{FLAGS[name]} {getattr(other.rules, chosen.get(name, name))}"
        for name in names
        if name != "iso_block" or other.rules.merge == MergeRule.ISO
    ]
    if "merge" not in names and other.rules.merge != best.rules.merge:
        instead.append(f"--merge {other.rules.merge}")
    if (
        "iso_block" not in names
        and other.rules.merge == MergeRule.ISO
        and other.rules.iso_block != best.rules.iso_block
    ):
        instead.append(f"--iso-block {other.rules.iso_block}")
    more = (
        f"learn {other.per_usd / best.per_usd - 1:.1%} more{' per dollar' if best.day['gpu_usd'] else ''}"
        if best.per_usd
        else "learn more"
    )
    if other.fits and not best.fits:
        more = "fit into every link"
    if _beyond(best) or _beyond(other):
        more += " (extrapolated)"
    given = " ".join(f"{FLAGS[name]} {getattr(fixed, name)}" for name in names)
    asked = f"{given} {agreeing(len(names), 'is', 'are')} kept as you asked"
    without = agreeing(len(names), "it", "them")
    if not taken:
        return f"{asked}; without {without} {_with(other)} would {more}, and the plan takes what ties with that"
    return f"{asked}; without {without} the plan would {more}, by {' '.join(instead)}"

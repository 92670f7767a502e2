"""Planning a run: choose the settings for a model and a set of learners, each with its reason.

Many choices are tried; `outcome` computes the outcome of each. The P and H that learn most per dollar are chosen.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from isthmus.agent.speed import Speeds
from isthmus.errors import InputError
from isthmus.format.isotropic import SOUND_FLOP_S
from isthmus.format.layout import Spec, partition
from isthmus.format.rules import FRAGMENTS_MAX, ROBUST, MergeRule, Pace, Rules, overdrive
from isthmus_lab.forecast import learning, matrices, traffic
from isthmus_lab.forecast.bandwidth import PARAMS_MAX
from isthmus_lab.forecast.island import Island
from isthmus_lab.forecast.matrices import Matrices
from isthmus_lab.forecast.outcome import (
    CHECKPOINT_SHARE,
    HEADROOM,
    OBJECT_MAX,
    SYNCER_CORES,
    Forecast,
    Outcome,
    feedback_bytes,
    isotropic_s,
    outcome,
    packing_s,
)
from isthmus_services.board.prices import Prices

PERIODS = (12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768)
"""Periods H that are tried: steps between two syncs of a fragment."""

FRAGMENT_BYTES = 64 << 20
"""Largest payload of an update, from which the least number of fragments follows: a failed request is repeated whole.
"""

FINE = (1, 2, 4)
"""Multiples of that number of fragments that are tried: smaller fragments take less time to the store and back."""

FRAGMENTS_USUAL = 96
"""Most fragments that the multiples may reach: each fragment needs a tensor of its own."""

KEPT_LEAST = 0.5
"""Share of the work merged below which a plan warns that links or distances do not suit the model."""

OVERLAP_MAX = 1024
"""Highest `overlap` in a plan, in steps: an update that takes longer does not come back within any period."""

ISO_BLOCKS = (0, 1024, 512)
"""Block sizes whose cost a plan states; 0: whole matrices."""

ROUND_SHARE = 0.1
"""Share of a period that a merge may take before a plan warns that it is too expensive: meanwhile learners train work
that the new version overwrites."""


PACK_CORES = 0.25
"""Cores of a learner's host that packing may take; if it takes more, the plan has matrices sent as they are, in four
bits."""


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """Settings that are given; None: the plan chooses."""

    fragments: int | None = None
    sync_every: int | None = None
    merge: str | None = None
    iso_block: int | None = None
    codec: str | None = None
    codec_down: str | None = None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One setting and the reason for its value."""

    name: str
    value: object
    reason: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A plan: the chosen settings, and what to expect from them."""

    params: float
    rules: Rules
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


def plan(
    params: float,
    islands: Sequence[Island],
    prices: Prices,
    *,
    store_region: str = "",
    fixed: Fixed = Fixed(),
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
    learners = sum(island.count for island in islands)
    step_s = min(i.step_s for i in islands)
    most = None if specs is None else len(partition(specs, FRAGMENTS_MAX).fragments)
    there = matrices.typical(params) if specs is None else matrices.of(specs)
    found = [
        outcome(params, islands, prices, store_region, rules, speeds(rules), there, feedback_bytes(specs))
        for rules in _candidates(params, fixed, most, there, speeds, step_s)
    ]
    best = max(found, key=lambda t: (1.0, t.per_usd, t.rules.sync_every) if t.fits else (0.0, -t.load, 0.0))
    checkpoint_s = best.checkpoint_s
    reasons = _reasons(params, fixed, best, found)
    reasons.append(_merge(fixed, best.rules, speeds(best.rules), there, step_s))
    if best.rules.isotropic_up:
        cores = best.wire.pack_s * best.rules.fragments / (best.rules.sync_every * step_s)
        reasons.append(
            Choice(
                name="isotropic_up",
                value=True,
                reason=f"few bits drown no direction then; packing an update takes a learner {best.wire.pack_s:.2g} s, "
                f"{cores:.2g} of its cores",
            )
        )
    whole = best.checkpoint
    reasons.append(
        Choice(
            name="checkpoint",
            value=int(checkpoint_s),
            reason=f"seconds between two: {whole / 1e9:.3g} GB each, at most {CHECKPOINT_SHARE:.0%} of every uplink",
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
            reason="no learner can hold up the others; grace waits for those who come within the overlap anyway",
        ),
        Choice(
            name="syncers",
            value=max(1, math.ceil(best.syncer["cores"] / SYNCER_CORES)),
            reason=f"merging takes {best.syncer['cores']:.1f} cores; several syncers share the fragments",
        ),
    ]
    return Plan(
        params=params,
        rules=best.rules,
        pace=pace,
        choices=reasons,
        forecasts=best.forecasts,
        syncer=best.syncer,
        day=best.day,
        warnings=_warn(params, fixed, best, found, learners),
        worth=best.worth,
        learnt=best.learnt,
    )


def _candidates(
    params: float,
    fixed: Fixed,
    tensors: int | None,
    there: Matrices,
    speeds: Callable[[Rules], Speeds],
    step_s: float,
) -> list[Rules]:
    """Return the rules to try: one for each P and H that is tried, unless P or H is fixed."""
    block = fixed.iso_block or 0
    merge = fixed.merge or (MergeRule.ISO if there.cheap(block, speeds(Rules()).flop_s) else MergeRule.RDA).value
    given = {"codec_up": fixed.codec, "codec_down": fixed.codec_down}
    codecs: dict[str, Any] = {name: codec for name, codec in given.items() if codec is not None}
    sent = Rules.suited(merge=merge, iso_block=block, isotropic_up=True, **codecs)
    packed_s = sent.fragments * packing_s(params, there, sent, speeds(sent))  # for the whole model, once a period
    periods = [fixed.sync_every] if fixed.sync_every else [h for h in PERIODS if h >= (fixed.fragments or 1)]
    if not periods:
        raise InputError(f"{fixed.fragments} fragments: more than {PERIODS[-1]} need a period of their own, sync_every")
    found = []
    for h in periods:
        if fixed.fragments and fixed.fragments > h:
            raise InputError(
                f"{fixed.fragments} fragments within {h} steps: at most one leaves per step, so let H be at least P"
            )
        isotropic_up = merge == MergeRule.ISO and packed_s <= PACK_CORES * h * step_s
        chosen = Rules.suited(merge=merge, iso_block=block, isotropic_up=isotropic_up, **codecs, sync_every=h)
        least = min(h, _fragments(params, chosen.codec_up, h), tensors or h)
        most = max(least, min(h, FRAGMENTS_USUAL, tensors or h))
        counts = [fixed.fragments] if fixed.fragments else sorted({min(most, least * times) for times in FINE})
        found += [msgspec.structs.replace(chosen, fragments=p).check() for p in counts]
    return found


def _reasons(params: float, fixed: Fixed, best: Outcome, tried: Sequence[Outcome]) -> list[Choice]:
    rules = best.rules
    up = "with error feedback; the lab sees no loss against 32"
    down = "what it drops stays with the syncer and follows with the next version"
    if not rules.error_feedback:
        up = "what it drops is given up; the lab sees no loss against four with feedback, under failures either"
        down = "what it drops is given up: nobody keeps it"

    def bits(name: str) -> str:
        return f"{traffic.bits(name, params, rules.fragments):.1f} bits per parameter"

    def why(name: str, reason: str) -> str:
        return "as you asked" if getattr(fixed, name) else reason

    return [
        Choice(name="sync_every", value=rules.sync_every, reason=why("sync_every", _why_period(best, tried))),
        Choice(
            name="fragments",
            value=rules.fragments,
            reason=why(
                "fragments",
                f"updates of {best.wire.up / 1e6:.3g} MB, at most one per step, spread evenly over the period",
            ),
        ),
        Choice(
            name="codec",
            value=rules.codec_up,
            reason=why("codec", f"{bits(rules.codec_up)}; {up}"),
        ),
        Choice(
            name="codec_down",
            value=rules.codec_down,
            reason=why(
                "codec_down",
                f"{bits(rules.codec_down)}; {down}",
            ),
        ),
        Choice(
            name="outer_lr",
            value=rules.outer_lr,
            reason=f"with momentum {rules.outer_momentum:g}, what suits rounds of {rules.sync_every} steps in the lab",
        ),
    ]


def _merge(fixed: Fixed, rules: Rules, took: Speeds, there: Matrices, step_s: float) -> Choice:
    """Return the merge rule; the reason states the cost of an isotropic merge of whole matrices and of blocks."""

    def cost(block: int) -> str:
        seconds = isotropic_s(there, rules, took, block)
        cores = seconds * rules.fragments / (rules.sync_every * step_s)
        size = f"blocks of {block}" if block else "whole matrices"
        return f"{size} {there.flop(block) / rules.fragments / 1e9:,.4g} GFLOP, {seconds:.2g} s, {cores:.2g} cores"

    blocks = ISO_BLOCKS if fixed.iso_block is None else (fixed.iso_block,)
    if not there.shapes:
        return Choice(name="merge", value=rules.merge, reason="there are no matrices to merge isotropically")
    if rules.merge == MergeRule.ISO:
        why, takes = "cheap for matrices as narrow as these", "it takes"
    elif there.cheap(fixed.iso_block or 0, SOUND_FLOP_S):
        why = f"{took.flop_s / 1e9:.2g} GFLOP/s are too few to merge isotropically, narrow as these matrices are"
        takes = "that would take"
    else:
        why, takes = "matrices as wide as these are dear to merge isotropically", "that would take"
    costs = "; ".join(cost(block) for block in blocks)
    reason = f"{'as you asked' if fixed.merge else why}; {takes}, a round: {costs}"
    return Choice(name="merge", value=rules.merge, reason=reason)


def _why_period(best: Outcome, tried: Sequence[Outcome]) -> str:
    """Return the reason for this period, compared with the nearest periods that were tried."""
    if not best.fits:
        return f"even so {best.busiest.name} needs {best.load:.0%} of its link, more than {HEADROOM:.0%}"
    if not best.learnt:
        return "nothing comes back within any period"
    at = f"{best.kept:.0%} of the work merged, {best.load:.0%} of a link ({HEADROOM:.0%} at most)"
    others = []
    periods = sorted({t.rules.sync_every for t in tried})
    here = periods.index(best.rules.sync_every)
    for h in (*periods[max(0, here - 1) : here], *periods[here + 1 : here + 2]):
        other = max((t for t in tried if t.rules.sync_every == h), key=lambda t: (t.fits, t.per_usd))
        share = f"learns {other.per_usd / best.per_usd:.1%} as much" if other.fits else f"needs {other.load:.0%}"
        others.append(f"{h} {share}")
    most = "learns most per dollar" if best.day["gpu_usd"] else "learns most"
    return f"{most}: {at}; {', '.join(others)}" if others else at


def _fragments(params: float, up: str, period: int) -> int:
    whole = params * traffic.bits(up, params, 1) / 8.0
    return int(min(period, max(Rules().fragments, math.ceil(whole / FRAGMENT_BYTES))))


def _warn(params: float, fixed: Fixed, best: Outcome, tried: Sequence[Outcome], learners: int) -> list[str]:
    """Return warnings about the given input; settings that the plan chose get none."""
    forecasts, rules = best.forecasts, best.rules
    found = []
    if learners == 1:
        found.append("one learner has nobody to merge with: a plain training loop does the same")
    fastest = min(f.island.step_s for f in forecasts)
    for n, f in enumerate(forecasts):
        name = f.island.name
        most = max(t.forecasts[n].kept for t in tried)
        if not f.fits:
            way, load = max(("up", f.up_load), ("down", f.down_load), key=lambda pair: pair[1])
            what = "cannot carry its fragments" if load > 1.0 else "is so busy that fragments queue"
            help_ = "a longer sync_every helps" if fixed.sync_every else "too thin for this model whatever is chosen"
            found.append(f"{name}: its link {way} {what}: {load:.0%} of it would be used; {help_}")
        elif f.kept < 0.7 if fixed.sync_every else most < KEPT_LEAST:
            help_ = (
                "let sync_every be longer, or its store nearer"
                if fixed.sync_every
                else "too far, or too thin a link, for this model whatever is chosen"
            )
            found.append(
                f"{name}: a new version is {f.back_s:.1f} s away, {f.back_s / f.island.step_s:.1f} steps: "
                f"{1 - f.kept:.0%} of its work is overwritten; {help_}"
            )
        if f.island.step_s > 2.0 * fastest:
            found.append(
                f"{name}: its steps take {f.island.step_s / fastest:.1f} times those of the fastest: it answers with "
                f"few steps and weighs little; a smaller batch there makes its steps shorter"
            )
        if f.goodput < 0.9:
            found.append(f"{name}: failures and restarts cost {1 - f.goodput:.0%} of its time")
    merge_s = best.syncer["merge_s"]
    if rules.merge == MergeRule.ISO and merge_s > ROUND_SHARE * fastest * rules.sync_every:
        found.append(
            f"isotropic merges hold a round up for {merge_s:.1f} s, {merge_s / fastest:.1f} steps of the fastest "
            "learner: cut matrices (--iso-block 512), raise sync_every, or merge by rda"
        )
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
    said = overdrive(rules)
    return [*found, said] if said else found

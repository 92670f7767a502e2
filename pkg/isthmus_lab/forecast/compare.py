"""Decoupled training beside data parallel at equal wall time: tokens learnt in a day, after failures and loss.

There are four ways to use the GPUs for a day. *Data parallel in one place*: all GPUs stand side by side, with links
that cost nothing. Any failure stops all of them, and they continue from their last checkpoint. *Data parallel across
the links*: the GPUs stay where they are and all-reduce bfloat16 gradients in every step. *One island alone*: the one
that learns most trains by itself, and the others stand idle. *Decoupled*: as planned. The tokens learnt are the
tokens that failures do not take back, times the worth of a token (`learning`). Data parallel pays no loss, by
definition. `ASSUMED` has what else the figures rest on.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from isthmus.errors import InputError
from isthmus_lab.forecast import bandwidth
from isthmus_lab.forecast.bandwidth import DATA_PARALLEL, OnTheWire, Setup
from isthmus_lab.forecast.goodput import Cluster, fits, young
from isthmus_lab.forecast.island import Island
from isthmus_lab.forecast.outcome import CHECKPOINT_BYTES, DAY_S, goodput_of
from isthmus_lab.forecast.planner import Plan
from isthmus_lab.working_time import goodput
from isthmus_services.board.prices import Prices

ONE_PLACE, ACROSS, DECOUPLED = "data parallel in one place", "data parallel across the links", "decoupled"
ALONE = "one island alone"

ASSUMED = (
    "GPUs cost the same in every place, and are paid while they stand still",
    "store, bus and syncers never fail, failures are independent, and a learner that failed returns with all its GPUs",
    "a data-parallel batch has the tokens of one step of every learner, divided by the learners' speeds, so that no "
    "learner waits for another; learners of decoupled training take steps of equal size, each at its own speed",
    "data-parallel checkpoints take half a second each, at Young's interval",
    "tokens of all ways count alike, although their batches are of different sizes: one island alone has a batch of "
    "one learner, the others one of all (in the lab, a token of the larger batch teaches less)",
    "one place starts again without reading over a link; across the links, every failure reads checkpoint and model",
    "gradients cross the links in bfloat16 during the backward pass, which is two thirds of a step, and wait for two "
    "latencies, as if every learner sent to every other at once: the least there is (a ring waits for 2 (M - 1))",
    "the worth of a token was measured with learners of equal speed that do not fail, and with merges that take no "
    "time; the plan adds the time of a merge to its rounds",
    "if learners are in several regions, all gradients pay for egress; of decoupled training, what learners outside "
    "the store's region send and read; the syncers are in that region",
    "where it begins to pay, every learner has this rate of failures, or every link this bandwidth each way; latencies "
    "and the settings of the plan stay",
)
"""What the figures rest on beside the arguments, each printed with them and listed in docs/compare.md."""

MTBF_LEAST_HOURS = 0.5
"""Hours between two failures of a learner below which nobody would train, unless the plan asks about it; restarts of
large models take longer."""

GRADIENTS = OnTheWire(name="bf16", up_bits=16.0, down_bits=16.0)

PARITY = 1.0
"""Worth of a token if decoupled training costs no loss: published at large scale, not observed in the lab."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Assumptions about the data-parallel job."""

    checkpoint_s: float = Cluster().checkpoint_s
    """Seconds that a checkpoint costs the job."""
    every_s: float | None = None
    """Seconds between two checkpoints; None: Young's interval."""
    overlapped: bool = True
    """Whether gradients leave while the backward pass computes them."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to train, over a day."""

    name: str
    step_s: float
    """Seconds of a step, with the wait for the links; of the fastest learner if learners take their own steps."""
    goodput: float
    """Share of the learners' time in work that no failure undoes (`working_time.goodput`)."""
    processed: float
    """Tokens a day in those steps."""
    worth: float
    """Tokens of data parallel that one of these tokens is worth."""
    learnt: float
    usd: float

    @property
    def per_usd(self) -> float:
        """Tokens learnt per dollar."""
        return self.learnt / self.usd if self.usd else math.inf


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All ways, and the failure rates and bandwidths at which decoupled training falls behind another way."""

    ways: list[Way]
    least: float
    """Tokens that decoupled training learns a day if a token has the worth measured in the lab's short runs."""
    most: float
    """Tokens that decoupled training learns a day at parity."""
    mtbf_hours: float | None
    """Hours between two failures of a learner below which decoupled training learns more than data parallel in one
    place; None: it does at no `mtbf_least_hours` or more, inf: it always does."""
    mtbf_hours_at_parity: float | None
    mtbf_least_hours: float
    """Fewest hours between two failures that were tried: `MTBF_LEAST_HOURS`, or what the plan asks about if fewer."""
    gbit_s: float | None
    """Gbit/s of every link above which data parallel across the links learns more; None: it does at any bandwidth,
    inf: it does at none."""
    gbit_s_at_parity: float | None
    ring_step_s: float
    """Seconds of a step across the links if the gradients go round in a ring: 2 (M - 1) latencies one after another."""
    goodput_at_least: tuple[float, float]
    """Goodputs of one place and of decoupled training if every learner fails each `mtbf_least_hours`."""

    def way(self, name: str) -> Way:
        """Return the way with this name."""
        return next(w for w in self.ways if w.name == name)


def compare(found: Plan, islands: Sequence[Island], prices: Prices, tokens: float, job: Job = Job()) -> Comparison:
    """Return the comparison for a plan.

    `tokens`: tokens in one step of one learner. Raises `InputError` if they are fewer than one.
    """
    if not (math.isfinite(tokens) and tokens >= 1):
        raise InputError(f"a step has at least one token, not {tokens:g}")
    learners = sum(i.count for i in islands)
    gpu_usd = found.day["gpu_usd"]
    one = _parallel(ONE_PLACE, islands, tokens, gpu_usd, job)
    step_s = _across(found.params, islands, job)
    steps = one.goodput * DAY_S / step_s
    moved = 2.0 * (1.0 - 1.0 / learners) * 2.0 * found.params * steps / 1e9
    abroad = islands if len({i.region for i in islands if i.region}) > 1 else []
    egress = sum(moved * i.count * i.sending_usd_gb(prices) for i in abroad)
    read = found.params * CHECKPOINT_BYTES
    across = _parallel(ACROSS, islands, tokens, gpu_usd + egress, job, step_s, read)
    ours = _decoupled(found, islands, tokens)
    plain = ours.processed

    def beats(worth: float) -> Callable[[float], bool]:
        def at(mtbf_hours: float) -> bool:
            failing = [replace(i, mtbf_hours=mtbf_hours) for i in islands]
            theirs = _parallel(ONE_PLACE, failing, tokens, gpu_usd, job).learnt
            return _decoupled(found, failing, tokens).processed * worth >= theirs

        return at

    def slower(worth: float) -> Callable[[float], bool]:
        def at(gbit_s: float) -> bool:
            linked = [replace(i, up_gbit_s=gbit_s, down_gbit_s=gbit_s) for i in islands]
            step_s = _across(found.params, linked, job)
            return plain * worth >= _parallel(ACROSS, linked, tokens, gpu_usd, job, step_s, read).learnt

        return at

    worth = found.worth.long
    least_hours = min(MTBF_LEAST_HOURS, *(i.mtbf_hours for i in islands))
    often = [replace(i, mtbf_hours=least_hours) for i in islands]
    return Comparison(
        ways=[one, across, _alone(islands, tokens, prices, job), ours],
        ring_step_s=_across(found.params, islands, job, 2.0 * (learners - 1)),
        goodput_at_least=(
            _parallel(ONE_PLACE, often, tokens, gpu_usd, job).goodput,
            _decoupled(found, often, tokens).goodput,
        ),
        least=plain * found.worth.short,
        most=plain * PARITY,
        mtbf_hours=_turns(beats(worth), least_hours, 1e7),
        mtbf_hours_at_parity=_turns(beats(PARITY), least_hours, 1e7),
        mtbf_least_hours=least_hours,
        gbit_s=_turns(slower(worth), 1e-6, 1e6),
        gbit_s_at_parity=_turns(slower(PARITY), 1e-6, 1e6),
    )


def held(rate: float, stall_s: float, job: Job) -> float:
    """Return the goodput of a job that fails at `rate` per second.

    After each failure the job stands still for `stall_s` seconds and then continues from its last checkpoint.
    """
    if rate <= 0.0:
        return 1.0
    interval = young(job.checkpoint_s, 1.0 / rate) if job.every_s is None else job.every_s
    block = interval + job.checkpoint_s
    share = interval / block if block else 1.0
    return fits(1.0 / rate, block, rate) * rate * share / (1.0 + rate * stall_s)


def _computing_s(islands: Sequence[Island]) -> float:
    """Return the seconds in which all learners compute a data-parallel batch, divided among them by their speeds."""
    return sum(i.count for i in islands) / sum(i.count / i.step_s for i in islands)


def _parallel(
    name: str, islands: Sequence[Island], tokens: float, usd: float, job: Job, step_s: float = 0.0,
    read: float | None = None,
) -> Way:  # fmt: skip
    """Return one data-parallel job of all learners; the failure of any learner stops it.

    `step_s`: seconds of a step with the wait for the links, if there is one. `read`: bytes that a learner reads over
    its link before the job continues; in one place reading costs nothing.
    """
    learners, computing_s = sum(i.count for i in islands), _computing_s(islands)
    step_s = max(step_s, computing_s)
    rates = [i.count / (i.mtbf_hours * 3600.0) for i in islands]
    rate = sum(rates)
    away = [i.restart_s if read is None else i.away_s(read) for i in islands]
    stall_s = sum(r * s for r, s in zip(rates, away, strict=True)) / rate if rate else 0.0
    useful = goodput(computing_s * held(rate, stall_s, job), 0.0, step_s)
    processed = learners * tokens * useful * DAY_S / computing_s
    return Way(name=name, step_s=step_s, goodput=useful, processed=processed, worth=1.0, learnt=processed, usd=usd)


def _alone(islands: Sequence[Island], tokens: float, prices: Prices, job: Job) -> Way:
    """Return data parallel on the one learner that learns most; only its GPUs are paid."""
    each = [_parallel(ALONE, [replace(i, count=1)], tokens, 24.0 * prices.gpu_hour * i.gpus, job) for i in islands]
    return max(each, key=lambda way: way.learnt)


def _across(params: float, islands: Sequence[Island], job: Job, waits: float = 2.0) -> float:
    """Return the seconds of a step in which all gradients cross every learner's links: that of the slowest link.

    `waits`: for how many latencies the step waits, one after the other.
    """
    learners, computing_s = sum(i.count for i in islands), _computing_s(islands)

    link = Setup(params=params, step_s=computing_s, learners=learners, sync_every=1, fragments=1)

    def over(island: Island) -> float:
        if learners == 1:
            return computing_s
        gbit_s, waits_s = min(island.up_gbit_s, island.down_gbit_s), waits * island.latency_s
        if job.overlapped:
            # The last gradients leave after the backward pass, so no latency is hidden behind it.
            return computing_s / bandwidth.exact(DATA_PARALLEL, link, GRADIENTS, gbit_s) + waits_s
        return computing_s + link.volume * params * GRADIENTS.up_bits / (gbit_s * 1e9) + waits_s

    return max(map(over, islands))


def _decoupled(found: Plan, islands: Sequence[Island], tokens: float) -> Way:
    """Return the planned decoupled training, for islands whose failure rates may differ from those of the plan."""
    useful = [
        (i, float(goodput_of(i, f.utilization, f.restart_s, f.lost_s)))
        for f, i in zip(found.forecasts, islands, strict=True)
    ]
    processed = sum(i.count * share / i.step_s for i, share in useful) * tokens * DAY_S
    worth = found.worth.long
    return Way(
        name=DECOUPLED,
        step_s=min(i.step_s for i in islands),
        goodput=goodput(sum(i.count * share for i, share in useful), 0.0, sum(i.count for i in islands)),
        processed=processed,
        worth=worth,
        learnt=processed * worth,
        usd=found.day["usd"],
    )


def _turns(holds: Callable[[float], bool], low: float, high: float) -> float | None:
    """Return the number between `low` and `high` up to which `holds` is true.

    `holds` changes at most once, from true to false. None: it is false at `low`. inf: it is true at `high`.
    """
    if not holds(low):
        return None
    if holds(high):
        return math.inf
    for _ in range(80):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low

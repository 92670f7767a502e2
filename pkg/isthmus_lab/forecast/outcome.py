"""The outcome of one choice of rules: traffic, work merged, memory, dollars a day, and tokens learnt per dollar.

Everything is counted from the library's own parts: the bits of its codecs, the bytes and requests measured by
`traffic`, and the syncer's arithmetic from a table or a measurement (`speeds`). Costs in loss come from the lab: those
of a period and of work that incoming versions overwrite (`learning`), of codecs and merge rules (`quality`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, reduce

import msgspec
import numpy as np

from isthmus.agent.speed import Speeds
from isthmus.format.layout import Spec, partition
from isthmus.format.rules import CHECKPOINT_S, FRAGMENTS_MAX, KEPT_VERSIONS, ROBUST, MergeRule, Pace, Rules, outer_for
from isthmus.log.merge import state_bytes
from isthmus.rounds.period import LAGS
from isthmus.store.base import requests_to_read, requests_to_write
from isthmus.syncer.agent import FETCHES_MAX
from isthmus.syncer.snapshots import snapshot_after
from isthmus_lab.forecast import learning, quality, traffic
from isthmus_lab.forecast.island import Island
from isthmus_lab.forecast.matrices import Matrices
from isthmus_lab.working_time import Figures, goodput
from isthmus_services.board.prices import Prices

DAY_S = 86400.0

GIB = float(1 << 30)

CHECKPOINT_SHARE = 0.15
"""Share of an uplink that checkpoints may take; on a slow uplink they are taken less often."""

HEADROOM = 0.7
"""Share of a link that fragments may take. In the lab's experiment `links`, even 85 % cost less than a period twice as
long. The rest is for checkpoints, joins and foreign traffic."""

QUEUES = HEADROOM
"""Load of a link up to which fragments wait longer the more it carries; in `links` they waited no longer at 85 %."""

ORDERLY = 0.5
"""Wait of a fragment on a link, as a share of the wait in a queue with random arrivals: fragments are due one after
another. The value was fitted, like `DRIFT`: `tests/unit/test_plan_merged.py` compares with the library's own agents."""

DRIFT = 0.5
"""How long after the learner that opens a round the last learner of equal speed sends its update, as a share of the
time until it is called. Each sends by its own schedule, unless the call comes first."""

CHECKPOINT_BYTES = 12.0
"""Bytes of a checkpoint object per parameter: values and moments."""

VALUE_BYTES = 4.0
"""Bytes per parameter of the newest version, which a learner reads beside its checkpoint when it starts."""

LEARNER_BYTES = 10.0 + CHECKPOINT_BYTES
"""Bytes of a learner's host memory per parameter, approximately, at most: published values, captures and the memory
kept for the next captures (docs/scale.md), and copies of values and moments while a checkpoint is taken."""

FEEDBACK_BYTES = 8.0
"""Additional bytes per parameter, of checkpoint and host memory, for error feedback with four-byte parameters: for what
codecs dropped, and for the part of it that is under way."""

FEEDBACK_BYTES_OF_HALVES = 5.0
"""The same with two-byte parameters."""


def feedback_bytes(specs: Sequence[Spec] | None) -> float:
    """Return the additional bytes per parameter for error feedback; unknown tensors are taken to be of four bytes."""
    halves = specs is not None and all(s.dtype != "float32" for s in specs)
    return FEEDBACK_BYTES_OF_HALVES if halves else FEEDBACK_BYTES


SYNCER_CORES = 4.0
"""Cores of one syncer; if merging takes more, several syncers share the fragments."""

OBJECT_MAX = 5 * 10**12
"""Bytes of the largest object that stores accept, uploaded in parts."""

SYNCER_GBIT_S = 10.0
"""Assumed bandwidth at which a syncer that takes over reads, in Gbit/s."""

COPY_BYTES_S = 5e9
"""Bytes a second copied in memory between a model and the buffers beside it."""

HEARING_LATENCIES = 2.5
"""Mean number of one-way latencies from a message being on the bus until a learner has read it: its own way, and the
rest of the request before."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """What the outcome of rules depends on besides them."""

    params: float
    islands: Sequence[Island]
    prices: Prices
    store_region: str
    speeds: Callable[[Rules], Speeds]
    """Returns the speed of a syncer's arithmetic under given rules."""
    matrices: Matrices
    feedback: float = FEEDBACK_BYTES
    """See `feedback_bytes`."""
    specs: Sequence[Spec] | None = None
    """The model's tensors; None: unknown."""

    @cached_property
    def tensors(self) -> int | None:
        """Most fragments that the model's tensors allow; None: unknown."""
        return None if self.specs is None else len(partition(self.specs, FRAGMENTS_MAX).fragments)

    def uneven(self, fragments: int) -> float:
        """Return the size of the fragment in which a parameter is, on average, over an equal share of the model.

        Without the model's tensors, fragments count as equal.
        """
        if self.specs is None:
            return 1.0
        layout = partition(self.specs, fragments)
        return fragments * sum(f.size**2 for f in layout.fragments) / layout.size**2

    @cached_property
    def learners(self) -> int:
        """Number of learners."""
        return sum(island.count for island in self.islands)

    @cached_property
    def step_s(self) -> float:
        """Seconds of a step of the fastest learner, which sets the pace."""
        return min(island.step_s for island in self.islands)

    @cached_property
    def gpu_usd(self) -> float:
        """Dollars that the GPUs cost a day."""
        return 24.0 * self.prices.gpu_hour * sum(i.gpus * i.count for i in self.islands)

    def fed(self, rules: Rules) -> float:
        """Return the bytes per parameter that error feedback takes under these rules."""
        return self.feedback if rules.error_feedback else 0.0

    def checkpoint(self, rules: Rules) -> float:
        """Return the bytes of a learner's checkpoint."""
        return self.params * (CHECKPOINT_BYTES + self.fed(rules))

    def read(self, rules: Rules) -> float:
        """Return the bytes that a learner reads when it starts; a checkpoint that is too large was never stored."""
        whole = self.checkpoint(rules)
        return self.params * VALUE_BYTES + (whole if whole <= OBJECT_MAX else 0.0)

    def messages(self, fragments: int) -> traffic.MessageCosts:
        """Return the traffic besides payloads; it hardly depends on the other rules, P beyond 12, or M beyond 8."""
        return _costs(min(fragments, 12), min(self.learners, 8))


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Expected performance of the learners of one island."""

    island: Island
    sent_s: float
    """Seconds from a step boundary to the update in the store."""
    back_s: float
    """Seconds from a step boundary to the arrival of the new version, the syncer's part included."""
    utilization: float
    """Share of the time in which a healthy learner computes."""
    kept: float
    """Share of a learner's tokens that a commit will hold; incoming versions overwrite the rest."""
    goodput: float
    """Share of the time in work that no failure undoes: `utilization`, less restarts and what failures take back."""
    lost_s: float
    """Seconds of training that a failure takes back: the work that no update holds yet."""
    restart_s: float
    """Seconds from a failure to the first step after it: `island.restart_s` and `read_s`."""
    read_gb: float
    """Gigabytes that a learner reads when it starts: its checkpoint and the newest version."""
    read_s: float
    """Seconds that reading them takes."""
    in_model: float
    """Share of a learner's time whose work a commit holds: the product of goodput and `kept`."""
    up_load: float
    """Share of a learner's uplink that is used, checkpoints included."""
    down_load: float
    """Share of a learner's downlink that is used."""
    up_gb_day: float
    checkpoints_gb_day: float
    """Gigabytes of `up_gb_day` that are checkpoints."""
    down_gb_day: float
    """Gigabytes that a learner receives a day: new versions, and what it reads when it starts after a failure."""
    requests_day: dict[str, float]
    memory_gib: float
    """Memory of a learner's host, besides model, gradients and optimizer."""
    fits: bool


@dataclass(frozen=True)
class Wire:
    """Traffic of one fragment round between a learner and the store, and the time to pack the update."""

    up: float
    """Bytes that the learner sends, headers and messages included."""
    down: float
    """Bytes that the learner receives, headers and messages included."""
    cost: traffic.Cost
    pack_s: float
    """Seconds that packing an update takes on one of the learner's cores."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """One fragment round: numbers, or arrays of numbers with one element for each candidate."""

    fragments: Figures
    period_s: Figures
    """Seconds between two rounds of a fragment: the fastest learner sets the pace."""
    up: Figures
    """Bytes that a learner sends; `down`: that it receives."""
    down: Figures
    pack_s: Figures
    arithmetic_s: Figures
    """Seconds that one core of a syncer takes for the round."""
    uneven: Figures = 1.0
    """See `Case.uneven`."""

    def loads(self, island: Island) -> tuple[Figures, Figures]:
        """Return the shares of a learner's uplink and downlink that fragments use."""
        bits_s = 8.0 * self.fragments / self.period_s
        return self.up * bits_s / (island.up_gbit_s * 1e9), self.down * bits_s / (island.down_gbit_s * 1e9)

    def _transfer_s(self, size: Figures, gbit_s: float) -> Figures:
        """Return the seconds in which a link carries `size` bytes: the transfer, and its wait behind other fragments.

        The wait is `ORDERLY` of that in a queue with random arrivals and equal transfers (M/D/1).
        """
        transfer_s = size * 8.0 / (gbit_s * 1e9)
        load = np.minimum(QUEUES, transfer_s * self.fragments / self.period_s)
        return self.uneven * transfer_s * (1.0 + ORDERLY * load / (2.0 * (1.0 - load)))

    def sent_s(self, island: Island) -> Figures:
        """Return the seconds from a step boundary to the update in the store."""
        return self.pack_s + self._transfer_s(self.up, island.up_gbit_s) + 2.0 * island.latency_s

    def read_s(self, island: Island) -> Figures:
        """Return the seconds in which a learner that knows of a commit reads it and its value."""
        return 4.0 * island.latency_s + self._transfer_s(self.down, island.down_gbit_s)

    def _announced_s(self, island: Island) -> Figures:
        """Return the seconds from a step boundary until the syncer knows of the update."""
        return self.sent_s(island) + island.latency_s

    def _opened_s(self, islands: Sequence[Island]) -> Figures:
        """Return the seconds from a step boundary to the call of the round: the fastest learners open rounds."""
        fastest = min(i.step_s for i in islands)
        return reduce(np.minimum, [self._announced_s(i) for i in islands if i.step_s == fastest])

    @staticmethod
    def _later_s(opened_s: Figures, island: Island, islands: Sequence[Island], steps: float) -> Figures:
        """Return the seconds from the opener's capture to the capture of the last learner of an island.

        A slower learner is called: it hears the call, and is `steps` later at a step boundary. `opened_s`: seconds to
        the call.
        """
        called_s = opened_s + HEARING_LATENCIES * island.latency_s + steps * island.step_s
        return called_s * (DRIFT if island.step_s == min(i.step_s for i in islands) else 1.0)

    def answers_s(self, islands: Sequence[Island]) -> Figures:
        """Return the seconds from a round's call to its last answer, at most a period."""
        if sum(island.count for island in islands) == 1:
            return 0.0
        opened_s = self._opened_s(islands)
        last_s = reduce(np.maximum, [self._later_s(opened_s, i, islands, 1.0) + self._announced_s(i) for i in islands])
        return np.minimum(np.maximum(0.0, last_s - opened_s), self.period_s)

    def _merged_s(self, islands: Sequence[Island]) -> Figures:
        """Return the seconds from the step boundary of a round's opener to the commit."""
        return self._opened_s(islands) + self.answers_s(islands) + self.arithmetic_s

    def back_s(self, island: Island, islands: Sequence[Island]) -> Figures:
        """Return the seconds from the step boundary of a round's opener to the arrival of the new version.

        That is the upload, its announcement, the answers of all learners, the merge, the commit's announcement, and the
        reading of commit and value.
        """
        return self._merged_s(islands) + HEARING_LATENCIES * island.latency_s + self.read_s(island)

    def lag_s(self, islands: Sequence[Island]) -> Figures:
        """Return the lag of a round in seconds, as a run measures it (`isthmus.rounds.rounds`).

        A run does not see how long the opener's announcement and the commit's take on the bus. The median learner
        decides how long reading a version takes. If a link serves a fragment less often than once a period, updates
        wait for the rest of that time.
        """
        fastest = min(i.step_s for i in islands)
        unseen_s = min(i.latency_s for i in islands if i.step_s == fastest)
        late_s = reduce(np.maximum, [np.maximum(*self.loads(i)) - 1.0 for i in islands]) * self.period_s
        read_s = self._median_s(islands, [self.read_s(i) for i in islands])
        return self._merged_s(islands) - unseen_s + read_s + np.maximum(0.0, late_s)

    @staticmethod
    def _median_s(islands: Sequence[Island], seconds: Sequence[Figures]) -> Figures:
        """Return the median over learners of figures by island."""
        if len(islands) == 1:
            return seconds[0]
        each = np.array(np.broadcast_arrays(*seconds))
        order = np.argsort(each, axis=0)
        counts = np.cumsum(np.array([i.count for i in islands])[order], axis=0)
        middle = np.argmax(2 * counts >= sum(i.count for i in islands), axis=0)
        return np.take_along_axis(each, np.take_along_axis(order, middle[None], axis=0), axis=0)[0]

    def at_rest(self, islands: Sequence[Island], least: Figures, most: Figures) -> Figures:
        """Return the period to which a run lengthens, in whole steps of the fastest learner.

        It is the shortest one, from `least` to `most`, that is not shorter than `LAGS` lags (`isthmus.rounds.period`);
        `period_s` of this round does not matter.
        """
        step_s = min(i.step_s for i in islands)
        low, high = np.array(least), np.array(most)
        tried = low  # most periods that are chosen are at rest
        while (low < high).any():
            lag_s = replace(self, period_s=tried * step_s).lag_s(islands)
            short = LAGS * lag_s > tried * step_s
            low, high = np.where(short, np.minimum(tried + 1, high), low), np.where(short, high, tried)
            tried = (low + high) // 2
        return low

    def kept(self, island: Island, islands: Sequence[Island]) -> Figures:
        """Return the share of a learner's tokens that a commit will hold, once the period is at rest.

        What a learner trains from its capture to the adoption of the new version, at a step boundary, is overwritten.
        Captures of learners of equal speed lie between the first and the last. If a link serves a fragment less often
        than once a period, the next capture waits for it, and what is trained meanwhile is in that update.
        """
        later_s: Figures = 0.0
        if sum(other.count for other in islands) > 1:
            fastest = island.step_s == min(i.step_s for i in islands)
            later_s = self._later_s(self._opened_s(islands), island, islands, 0.5) * (0.5 if fastest else 1.0)
        under_way_s = np.maximum(island.step_s, self.back_s(island, islands) + island.step_s / 2.0 - later_s)
        between_s = self.period_s * np.maximum(1.0, np.maximum(*self.loads(island)))
        return np.maximum(0.0, 1.0 - under_way_s / between_s)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of one choice of rules, at the period that the run will use."""

    rules: Rules
    """With the outer step that suits `period`."""
    period: int
    """Steps between two syncs of a fragment: `rules.sync_every`, or more where the run lengthens it."""
    wire: Wire
    forecasts: list[Forecast]
    syncer: dict[str, float]
    day: dict[str, float]
    worth: learning.Worth
    checkpoint_s: float
    learnt: float
    """Steps a second of all learners, without those that failures take back, times the worth of a token."""
    kept: float
    """Share of all learners' work that is merged."""
    load: float
    """Share of a link that fragments take, on the busiest link."""
    busiest: Island
    """Island with that link."""
    checkpoint: float
    """Bytes of a learner's checkpoint."""

    @property
    def fits(self) -> bool:
        """Whether every link can carry the fragments."""
        return self.load <= HEADROOM

    @property
    def per_usd(self) -> float:
        """Steps learnt per dollar; if GPUs cost nothing, `learnt`."""
        return self.learnt * DAY_S / self.day["usd"] if self.day["gpu_usd"] else self.learnt

    @property
    def rank(self) -> tuple[float, ...]:
        """What the plan maximises: links that can carry the fragments, then steps learnt per dollar.

        Of equals, the cheaper one is better, then the one with the longer period.
        """
        return (self.fits, self.per_usd, 0.0 if self.fits else -self.load, -self.day["usd"], self.rules.sync_every)


@lru_cache(maxsize=4096)  # the search looks at most of its outcomes several times
def outcome(case: Case, rules: Rules) -> Outcome:
    """Return the outcome of these rules."""
    params, islands, learners = case.params, case.islands, case.learners
    took, costs = case.speeds(rules), case.messages(rules.fragments)
    whole = case.checkpoint(rules)
    every_s = checkpoint_s(case, rules)
    wire = _wire(params, rules, costs.learner, packing_s(params, case.matrices, rules, took))
    arithmetic_s = params / rules.fragments * (learners * took.add_s + took.round_s)
    if rules.merge == MergeRule.ISO:
        arithmetic_s += isotropic_s(case.matrices, rules, took)
    each = Round(
        fragments=rules.fragments, period_s=rules.sync_every * case.step_s, up=wire.up, down=wire.down,
        pack_s=wire.pack_s, arithmetic_s=arithmetic_s, uneven=case.uneven(rules.fragments),
    )  # fmt: skip
    period = int(each.at_rest(islands, *rules.periods))
    each = replace(each, period_s=period * case.step_s)
    rate, momentum = outer_for(rules.merge, period)
    rules = msgspec.structs.replace(rules, outer_lr=rate, outer_momentum=momentum)
    # A checkpoint that is too large for the store is not sent.
    saved_s = every_s if whole <= OBJECT_MAX else math.inf
    forecasts = [_forecast(case, island, rules, wire, each, period, saved_s) for island in islands]
    rounds_day = rules.fragments * DAY_S / each.period_s
    syncer = _syncer(params, rules, Pace(), learners, wire, costs.syncer, arithmetic_s, rounds_day)
    day = _day(params, rules, forecasts, costs.syncer, rounds_day, case.prices, case.store_region, wire, whole)
    day["gpu_usd"] = case.gpu_usd
    day["syncer_usd"] = 24.0 * case.prices.core_hour * max(1.0, syncer["cores"])
    day["usd"] += day["gpu_usd"] + day["syncer_usd"]
    kept = sum(f.kept * f.island.count for f in forecasts) / learners
    load, busiest = max(((max(each.loads(i)), i) for i in islands), key=lambda pair: pair[0])
    # A link that serves a fragment less often than once a period makes the period longer.
    served = math.ceil(period * max(1.0, load))
    worth = quality.worth(rules, served, learners, kept, case.matrices.gain(rules.iso_block))
    steps = sum(f.goodput * f.island.count / f.island.step_s for f in forecasts)
    return Outcome(
        rules=rules,
        period=period,
        wire=wire,
        forecasts=forecasts,
        syncer=syncer,
        checkpoint=whole,
        day=day,
        worth=worth,
        checkpoint_s=every_s,
        learnt=steps * worth.long,
        kept=kept,
        load=load,
        busiest=busiest,
    )


def checkpoint_s(case: Case, rules: Rules) -> float:
    """Return the whole seconds between two checkpoints of a learner, as the slowest uplink allows."""
    slowest = min(island.up_gbit_s for island in case.islands)
    needed_s = case.checkpoint(rules) * 8.0 / (CHECKPOINT_SHARE * slowest * 1e9)
    return float(math.ceil(max(CHECKPOINT_S, needed_s)))


def isotropic_s(matrices: Matrices, rules: Rules, took: Speeds, block: int | None = None) -> float:
    """Return the seconds that one core takes to make a round's matrices isotropic.

    `block`: size of the blocks; None: that of the rules.
    """
    return matrices.flop(rules.iso_block if block is None else block) / rules.fragments / took.flop_s


def packing_s(params: float, matrices: Matrices, rules: Rules, took: Speeds) -> float:
    """Return the seconds that one core of a learner takes to pack an update.

    Encoding an update takes about as long as adding an encoded one to a sum (docs/benchmarks.md).
    """
    level_s = isotropic_s(matrices, rules, took) if rules.isotropic_up else 0.0
    return params / rules.fragments * took.add_s + level_s


def goodput_of(island: Island, utilization: Figures, restart_s: float, lost_s: Figures) -> Figures:
    """Return a learner's goodput.

    `utilization`: the share of the time between failures in which the learner computes. Each failure takes the seconds
    of a restart. A failure also takes back what was trained since the last upload of each fragment: `lost_s` seconds on
    average, if failures are rare. The time X to a failure is exponential with mean M. A failure before the first upload
    takes back the time since the restart alone. With U uniform over the period T, the mean of what is taken back is
    E[min(X, U)] = M - M² (1 - exp(-T / M)) / T.
    """
    mtbf_s = island.mtbf_hours * 3600.0
    periods = np.maximum(2.0 * lost_s / mtbf_s, 1e-300)
    undone = 1.0 + np.expm1(-periods) / periods
    return goodput(utilization, utilization * undone, 1.0 + restart_s / mtbf_s)


def lost_s(island: Island, sync_every: Figures) -> Figures:
    """Return the seconds of work that a failure takes back: half a period of every fragment, on average."""
    return sync_every / 2.0 * island.step_s


def utilization(params: float, island: Island, sync_every: Figures) -> Figures:
    """Return the share of the time in which a healthy learner computes.

    Beside every step, a few fragments are copied: see `copied`.
    """
    return island.step_s / (island.step_s + copied(params, sync_every) / COPY_BYTES_S)


def copied(params: float, sync_every: Figures) -> Figures:
    """Return the bytes that are copied beside a step: float32 out of the model for updates, and into it from versions.

    Each fragment is copied twice in a period.
    """
    return 2.0 * 4.0 * params / sync_every


@lru_cache(maxsize=64)
def _costs(fragments: int, learners: int) -> traffic.MessageCosts:
    rules = Rules(fragments=fragments, sync_every=12, outer_lr=0.4, outer_momentum=0.8)
    return traffic.measure(rules, Pace(), learners)


def _wire(params: float, rules: Rules, cost: traffic.Cost, pack_s: float) -> Wire:
    share = params / rules.fragments / 8.0
    return Wire(
        up=share * traffic.bits(rules.codec_up, params, rules.fragments) + cost.up_bytes,
        down=share * traffic.bits(rules.codec_down, params, rules.fragments) + cost.down_bytes,
        cost=cost,
        pack_s=pack_s,
    )


def _forecast(
    case: Case, island: Island, rules: Rules, wire: Wire, each: Round, period: int, checkpoint_s: float
) -> Forecast:
    up_load, down_load = each.loads(island)
    whole = case.checkpoint(rules)
    saving = whole / checkpoint_s
    kept = float(each.kept(island, case.islands))
    step_share = utilization(case.params, island, period)
    lost = lost_s(island, period)
    read = case.read(rules)
    restart_s = island.away_s(read)
    useful = float(goodput_of(island, step_share, restart_s, lost))
    rounds_day = rules.fragments * DAY_S / each.period_s
    # `traffic` counts the requests of a small model, one per object. Large objects take more: parts and ranges.
    more = {"get": requests_to_read(wire.down) - 1, "create": requests_to_write(wire.up) - 1}
    return Forecast(
        island=island,
        sent_s=float(each.sent_s(island)),
        back_s=float(each.back_s(island, case.islands)),
        utilization=step_share,
        kept=kept,
        goodput=useful,
        lost_s=lost,
        restart_s=restart_s,
        read_gb=read / 1e9,
        read_s=island.reading_s(read),
        in_model=useful * kept,
        up_load=up_load + saving * 8.0 / (island.up_gbit_s * 1e9),
        down_load=down_load,
        up_gb_day=(rounds_day * wire.up + DAY_S * saving) / 1e9,
        checkpoints_gb_day=DAY_S * saving / 1e9,
        down_gb_day=(rounds_day * wire.down + island.restarts_day(read) * read) / 1e9,
        requests_day={
            name: (wire.cost.requests.get(name, 0.0) + more.get(name, 0)) * rounds_day
            + (DAY_S / checkpoint_s * requests_to_write(whole) if name == "put" else 0.0)
            for name in traffic.OPERATIONS
        },
        memory_gib=case.params * (LEARNER_BYTES + case.fed(rules)) / GIB,
        fits=max(up_load, down_load) <= HEADROOM,
    )


def _syncer(
    params: float,
    rules: Rules,
    pace: Pace,
    learners: int,
    wire: Wire,
    cost: traffic.Cost,
    arithmetic_s: float,
    rounds_day: float,
) -> dict[str, float]:
    fragment = params / rules.fragments
    between = snapshots_between(params, rules, pace, learners, wire)
    kept = state_bytes(rules)
    snapshot = kept * fragment / between
    # Robust rules compare all updates of a round, so the syncer keeps them until the round closes.
    together = rules.fragments * learners * wire.up if rules.merge in ROBUST else 0.0
    # A syncer that takes over reads the newest snapshot of each fragment and the rounds merged after it.
    taken_over = rules.fragments * (kept * fragment + between * learners * wire.up)
    return {
        "memory_gib": (params * (kept + 4.0) + together + FETCHES_MAX * wire.up) / GIB,
        "takeover_gb": taken_over / 1e9,
        "takeover_s": taken_over * 8.0 / SYNCER_GBIT_S / 1e9 + rules.fragments * between * arithmetic_s / SYNCER_CORES,
        "cores": arithmetic_s * rounds_day / DAY_S,
        "merge_s": arithmetic_s,
        "up_gbit_s": (wire.down + snapshot) * 8.0 * rounds_day / DAY_S / 1e9,
        "down_gbit_s": learners * wire.up * 8.0 * rounds_day / DAY_S / 1e9,
        "rounds_day": rounds_day,
        "requests_day": sum(cost.requests.values()) * rounds_day,
    }


def snapshots_between(params: float, rules: Rules, pace: Pace, learners: int, wire: Wire) -> int:
    """Return the most rounds between two snapshots of a fragment; versions or bytes merged set the limit."""
    by_bytes = snapshot_after(rules, int(params / rules.fragments)) / max(1.0, learners * wire.up)
    return min(pace.snapshot_every, max(1, math.ceil(by_bytes)))


def _day(
    params: float,
    rules: Rules,
    forecasts: Sequence[Forecast],
    syncer: traffic.Cost,
    rounds_day: float,
    prices: Prices,
    store_region: str,
    wire: Wire,
    checkpoint: float,
) -> dict[str, float]:
    """Return the bytes, requests and dollars of one day."""
    totals = {name: count * rounds_day for name, count in syncer.requests.items()}
    learners = sum(f.island.count for f in forecasts)
    totals["get"] = totals.get("get", 0.0) + rounds_day * learners * (requests_to_read(wire.up) - 1)
    snapshot = params / rules.fragments * state_bytes(rules)
    between = snapshots_between(params, rules, Pace(), learners, wire)
    parts = requests_to_write(wire.down) - 1 + (requests_to_write(snapshot) - 1) / between
    totals["create"] = totals.get("create", 0.0) + rounds_day * parts
    received_gb = sent_gb = egress_usd = checkpoints_usd = 0.0
    for f in forecasts:
        for name, count in f.requests_day.items():
            totals[name] = totals.get(name, 0.0) + count * f.island.count
        if f.island.abroad(store_region):
            received, sent = f.down_gb_day * f.island.count, f.up_gb_day * f.island.count
            received_gb += received
            sent_gb += sent
            egress_usd += received * prices.egress_gb + sent * f.island.sending_usd_gb(prices)
            checkpoints_usd += f.checkpoints_gb_day * f.island.count * f.island.sending_usd_gb(prices)
    stored = rules.fragments * KEPT_VERSIONS * (learners * wire.up + wire.down)
    stored += params * state_bytes(rules) * KEPT_VERSIONS / between
    stored += 2.0 * learners * checkpoint if checkpoint <= OBJECT_MAX else 0.0
    reads = totals.get("get", 0.0)
    writes = sum(totals.values()) - reads
    found = {
        "up_gb": sum(f.up_gb_day * f.island.count for f in forecasts),
        "down_gb": sum(f.down_gb_day * f.island.count for f in forecasts),
        "checkpoints_gb": sum(f.checkpoints_gb_day * f.island.count for f in forecasts),
        "restarts_gb": sum(f.island.restarts_day(1e9 * f.read_gb) * f.read_gb * f.island.count for f in forecasts),
        "reads": reads,
        "writes": writes,
        "egress_gb": received_gb + sent_gb,
        "egress_sent_gb": sent_gb,
        "stored_gb": stored / 1e9,
        "requests_usd": reads / 1000.0 * prices.get_per_1000 + writes / 1000.0 * prices.put_per_1000,
        "egress_usd": egress_usd,
        "checkpoints_egress_usd": checkpoints_usd,
        "storage_usd": stored / 1e9 * prices.storage_gb_month / 30.0,
    }
    found["usd"] = found["requests_usd"] + found["egress_usd"] + found["storage_usd"]
    return found

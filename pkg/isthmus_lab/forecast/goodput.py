"""Goodput of N chips that fail: data parallel that restarts, elastic data parallel, and M decoupled learners.

A learner is a number of slices that train in step. A slice is the unit of loss: if one of its chips fails, the whole
slice is away until the chip is repaired. A learner trains until an interruption. It then stands still for as long as a
reconfiguration takes, and continues with the slices that are there by then. The interruptions of different learners
are independent.

`exact` derives the shares of time from a stationary renewal process; `failures.simulate` plays the events. They are two
derivations of one model, and the tests compare them.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from isthmus.errors import InputError

YEAR_S = 365.25 * 86400.0
HOUR_S = 3600.0

RESTART, ELASTIC, DECOUPLED = "restart", "elastic", "decoupled"
MODES = (RESTART, ELASTIC, DECOUPLED)

PUBLISHED_CHIPS = 1_200_000
PUBLISHED = {RESTART: 0.27, ELASTIC: 0.58}
"""Goodput at `PUBLISHED_CHIPS` and one interruption per chip and year (arXiv 2604.21428). The two stalls were not
published and are fitted to these figures. No other parameter is fitted."""


ENDLESS = ("mtbi_years", "rack_mtbi_years", "region_mtbi_years", "maintenance_days")
"""Parameters that may be infinite: the event then never happens."""

SHAPE_MIN = 0.2
"""Least `repair_shape`: below it, a few extremely long repairs make up the mean."""

EXPONENT_MAX = 700.0

REJOINS = ("cheaper", "next", "once")

SLICE_CHIPS = ((16_384, 64), (16, 8), (0, 1))
"""(chips of the cluster, at least; chips that are lost together): a cube of a large machine, a server, one chip."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Everything that goodput depends on, except mode, chips and learners. The reasons are in docs/paper.md."""

    mtbi_years: float = 1.0
    """Mean time between interruptions of one chip."""
    slice_chips: int = 64
    """Chips that are lost and come back together."""
    repair_hours: float = 4.0
    """Mean time until a slice is back."""
    repair_shape: float = 0.7
    """k of the exponentiated Weibull distribution of repair times: F(x) = (1 − exp(−(x / λ)^k))^α."""
    repair_power: float = 2.0
    """α of that distribution."""
    reconfigure_s: float | None = None
    """Seconds that a learner stalls when it shrinks or grows; None: fitted to the published goodput of elastic data
    parallel."""
    restart_s: float | None = None
    """Seconds that a job stalls when it restarts from its checkpoint; None: fitted to the published goodput of data
    parallel."""
    rejoin: str = "cheaper"
    """What a restarting job does when a slice is back: `next` lets the slice wait for the next restart, `once` restarts
    at once, `cheaper` does whichever costs less (see `Slices.rejoins`)."""
    interrupted: str = "absorb"
    """Effect of an interruption during a stall: `absorb` (the stall ends when it would have) or `again` (the stall
    starts again)."""
    step_s: float = 1.0
    """Seconds of a step. A failure loses the step under way."""
    checkpoint_s: float = 0.5
    """Seconds that a checkpoint costs the restarting job; the interval is Young's √(2 · cost · time between failures).
    """
    speed_deviation: float = 0.005
    """Standard deviation of the slices' step times, as a share of the mean: the slices of one learner wait for the
    slowest of them."""
    behind: float = 0.0
    """How much slower the slowest learner is than the fastest, as a share; the others are spaced evenly between."""
    quorum: int = 1
    """K: learners that must train for the global model to advance."""
    lead: float | None = None
    """Steps that a learner continues without a new version before it waits for one; None: it never waits."""
    grace: float = 0.8
    """γ: share of `overlap` steps that a round waits for further learners after the quorum."""
    overlap: float = 2.0
    """τ, in steps."""
    rack_chips: int = 1024
    rack_mtbi_years: float = math.inf
    """Mean time between two failures of one rack; each takes away all slices of the rack; inf: none."""
    region_mtbi_years: float = math.inf
    """Mean time between two failures of a learner's whole region; inf: none."""
    region_hours: float = 1.0
    """Hours that a failed region is away."""
    maintenance_days: float = math.inf
    """Days between two maintenances of a slice. They are announced, so nothing is lost; inf: none."""
    maintenance_hours: float = 4.0
    """Hours that a slice in maintenance is away."""

    def check(self) -> "Cluster":
        """Return self. Raises `InputError` that names the parameter that is out of range."""
        for name, value in vars(self).items():
            if isinstance(value, float) and (math.isnan(value) or value < 0.0):
                raise InputError(f"{name} must not be negative: {value}")
            if value == math.inf and name not in ENDLESS:
                raise InputError(f"{name} must be finite")
        for name in ("mtbi_years", "rack_mtbi_years", "region_mtbi_years", "maintenance_days", "step_s",
                     "repair_shape", "repair_power"):  # fmt: skip
            if not getattr(self, name) > 0.0:
                raise InputError(f"{name} must be more than 0: {getattr(self, name)}")
        for name in ("slice_chips", "rack_chips", "quorum"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1: {getattr(self, name)}")
        if self.repair_shape < SHAPE_MIN:
            raise InputError(f"repair_shape must be at least {SHAPE_MIN:g}: below, a few repairs outlast any run")
        if self.behind >= 1.0:
            raise InputError(f"behind is a share below 1, not {self.behind:g}: at 1 the slowest learner stands still")
        if self.interrupted not in ("absorb", "again"):
            raise InputError(f"interrupted {self.interrupted!r}: choose absorb or again")
        if self.rejoin not in REJOINS:
            raise InputError(f"rejoin {self.rejoin!r}: choose one of {', '.join(REJOINS)}")
        return self


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Shares of the allocated chips' time: goodput, waiting, reconfiguring and lost add up to 1."""

    goodput: float
    """Training steps that failures do not take back."""
    waiting: float
    """Waiting for a repair, slower slices, slower learners or a quorum."""
    repairing: float
    """The part of `waiting` in which a slice is away: failed, or in maintenance."""
    reconfiguring: float
    """Standing still for a reconfiguration or a restart; checkpoints of the restarting job too."""
    lost: float
    """Training that a failure took back."""
    uptime: float
    """Share of the time in which the global model advances."""
    participation: float
    """Share of the training learners whose update is in a round."""


# --- the parts of both derivations ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slices:
    """One learner's slices and the rates at which they are interrupted, per second.

    `slice_rate` is that of one slice; the other rates are those of the whole learner.
    """

    slices: int
    slice_rate: float
    rack_slices: int
    rack_rate: float
    region_rate: float
    maintenance_rate: float
    stall_s: float
    restarts: bool
    rejoins: bool
    """Whether a restarting job restarts when a slice is back. The restart stops all N slices for a stall. Without it,
    the slice waits 1 / Λ for the next failure: seconds among millions of chips, days in a small cluster."""


def slice_of(chips: int, learners: int = 1) -> int:
    """Return the default number of chips that are lost together: the usual one, but at most the chips of a learner."""
    usual = next((size for least, size in SLICE_CHIPS if chips >= least), 1)
    return max(1, min(usual, chips // max(1, learners)))


def stalls(cluster: Cluster) -> tuple[float, float]:
    """Return the seconds of a reconfiguration and of a restart: as given, or fitted to `PUBLISHED`."""
    reconfigure, restart = cluster.reconfigure_s, cluster.restart_s
    if reconfigure is None:
        reconfigure = _fit(cluster, ELASTIC)
    if restart is None:
        restart = _fit(cluster, RESTART)
    return reconfigure, restart


@lru_cache(maxsize=256)
def _fit(cluster: Cluster, mode: str) -> float:
    """Return the stall in seconds at which a mode's exact goodput is the published one.

    Raises `InputError` if no stall up to an hour gives it.
    """
    # The published figures are for failures of chips only, one a year.
    plain = replace(
        cluster,
        mtbi_years=1.0,
        rack_mtbi_years=math.inf,
        region_mtbi_years=math.inf,
        maintenance_days=math.inf,
        quorum=1,
        lead=None,
    )

    def goodput(stall_s: float) -> float:
        return exact(replace(plain, reconfigure_s=stall_s, restart_s=stall_s), mode, PUBLISHED_CHIPS, 1).goodput

    low, high = 0.0, HOUR_S
    if not goodput(high) < PUBLISHED[mode] < goodput(low):
        raise InputError(
            f"no stall gives the published {PUBLISHED[mode]:.0%} of {mode} training with these parameters: without any "
            f"it is {goodput(low):.1%}; give reconfigure_s and restart_s"
        )
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if goodput(middle) > PUBLISHED[mode] else (low, middle)
    return (low + high) / 2.0


def slices_of(cluster: Cluster, mode: str, chips: int, learners: int) -> Slices:
    """Return one learner of a cluster. Raises `InputError` for an unknown mode or less than one slice per learner."""
    if mode not in MODES:
        raise InputError(f"unknown mode {mode!r}: choose one of {', '.join(MODES)}")
    slices = chips // (cluster.slice_chips * max(1, learners))
    if chips < 1 or learners < 1 or slices < 1:
        raise InputError(
            f"{chips} chips in {learners} learners: each needs at least one slice of {cluster.slice_chips} chips"
        )
    rack_slices = max(1, min(slices, cluster.rack_chips // cluster.slice_chips))
    reconfigure_s, restart_s = stalls(cluster)
    year = 1.0 / YEAR_S
    failing = slices * cluster.slice_chips * year / cluster.mtbi_years
    sooner = cluster.rejoin == "cheaper" and slices * restart_s * failing < 1.0
    return Slices(
        slices=slices,
        slice_rate=cluster.slice_chips * year / cluster.mtbi_years,
        rack_slices=rack_slices,
        rack_rate=slices * cluster.slice_chips / cluster.rack_chips * year / cluster.rack_mtbi_years,
        region_rate=year / cluster.region_mtbi_years,
        maintenance_rate=slices / (cluster.maintenance_days * 86400.0),
        stall_s=restart_s if mode == RESTART else reconfigure_s,
        restarts=mode == RESTART,
        rejoins=mode == RESTART and (cluster.rejoin == "once" or sooner),
    )


def longest(count: int, deviation: float) -> float:
    """Return the expected longest of `count` normal step times with mean 1 and this deviation (Blom's formula)."""
    if count < 2:
        return 1.0
    return 1.0 + deviation * statistics.NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def young(cost_s: float, between_s: float) -> float:
    """Return Young's checkpoint interval √(2 C M) (1974), in seconds of training between two checkpoints."""
    return math.sqrt(2.0 * cost_s * between_s)


def fits(seconds: float, block_s: float, rate: float) -> float:
    """Return the expected time in whole blocks that fit into an exponential time of mean `seconds` = 1 / rate."""
    if block_s <= 0.0:
        return seconds
    return block_s / math.expm1(rate * block_s) if rate * block_s < EXPONENT_MAX else 0.0


def speeds(cluster: Cluster, learners: int) -> list[float]:
    """Return the learners' speeds; that of the fastest is 1."""
    if learners == 1:
        return [1.0]
    return [1.0 - cluster.behind * m / (learners - 1) for m in range(learners)]


def participation(cluster: Cluster, learners: int) -> float:
    """Return the expected share of learners in a round.

    The learners' step boundaries are uniform within a step. The round opens at the first boundary and closes γτ steps
    after the K-th. Of M uniform arrivals, the K-th lies at K / (M + 1) on average, and each later one is uniform
    between the K-th and the end of the step.
    """
    first = min(cluster.quorum, learners) / (learners + 1)
    rest = 1.0 - first
    caught = min(1.0, cluster.grace * cluster.overlap / rest) if rest > 0.0 else 1.0
    heard = min(cluster.quorum, learners)
    return (heard + (learners - heard) * caught) / learners


# --- exact ------------------------------------------------------------------------------------------------------------


def exact(cluster: Cluster, mode: str, chips: int, learners: int) -> Shares:
    """Return the stationary shares of time by a renewal argument: interruptions and returns of slices are Poisson.

    Slices come back at the rate at which they fail, whatever the distribution of repairs: the departures of an M/G/∞
    queue are Poisson (Mirasol, 1963). A learner thus trains for an exponential time of rate Λ and then stands still for
    s seconds. It trains for 1 / (1 + Λs) of the time if interruptions during a stall are absorbed, and for exp(−Λs) if
    they start the stall again.

    A learner's failures strike the mean number of slices that are there: the limit of many slices per learner. The
    number of learners that train is binomial, which gives the wait for a quorum. A slice that comes back to a job that
    restarts is idle until the next restart, 1 / Λ later. That is one slice in the mean: negligible among thousands, but
    a sixty-fourth of 64.
    """
    if mode != DECOUPLED:
        learners = 1
    a = slices_of(cluster, mode, chips, learners)
    repair_s = cluster.repair_hours * HOUR_S
    # A slice is away for one reason at a time: a chip, its rack or maintenance. The region takes all slices at once.
    away = a.slice_rate * repair_s + a.rack_rate * a.rack_slices / a.slices * repair_s
    away += a.maintenance_rate / a.slices * cluster.maintenance_hours * HOUR_S
    here = 1.0 / (1.0 + away)
    region_s = cluster.region_hours * HOUR_S
    stands = 1.0 / (1.0 + a.region_rate * region_s)
    failing = a.slices * here * a.slice_rate + a.rack_rate * here + a.region_rate
    planned = a.maintenance_rate * here
    # The slices of a rack come back one by one.
    back = here * (a.slices * a.slice_rate + a.rack_rate * a.rack_slices + a.maintenance_rate) + a.region_rate
    # A slice that comes back to a job that restarts may wait for the next restart.
    rate = failing + planned + (0.0 if a.restarts and not a.rejoins else back)
    if rate <= 0.0:
        trains = 1.0
    elif cluster.interrupted == "absorb":
        trains = 1.0 / (1.0 + rate * a.stall_s)
    else:
        trains = math.exp(-rate * a.stall_s)
    between_s = 1.0 / rate if rate > 0.0 else math.inf
    checkpointing = 0.0
    if failing <= 0.0:
        kept = 1.0
    elif a.restarts:
        interval = young(cluster.checkpoint_s, 1.0 / failing)
        whole = fits(between_s, interval + cluster.checkpoint_s, rate) / between_s
        share = interval / (interval + cluster.checkpoint_s) if interval else 1.0
        checkpointing = whole * (1.0 - share)
        kept = failing / rate * whole * share + (1.0 - failing / rate) * (1.0 - checkpointing)
    else:
        kept = 1.0 - failing / rate * (1.0 - fits(between_s, cluster.step_s, rate) / between_s)
    steady = 1.0 / longest(round(a.slices * here), cluster.speed_deviation)
    some = 1.0 - (1.0 - here) ** a.slices
    quorum, going = _joint(cluster, learners, trains * stands * some)
    if cluster.lead is not None and a.stall_s > 0.0:
        # A learner does not wait if the stall of the others ends before its lead is used up.
        going = 1.0 - (1.0 - going) * max(0.0, 1.0 - cluster.lead * cluster.step_s / a.stall_s)
    used = here * stands * trains
    idle = used * _idle(a, here, rate) if a.restarts and not a.rejoins else 0.0
    used -= idle
    rushing = 1.0 if cluster.lead is None else paced(cluster, speeds(cluster, learners))
    goodput = used * kept * steady * going * rushing
    spent = used * kept * (1.0 - steady * going * rushing)
    return Shares(
        goodput=goodput,
        waiting=spent + idle + 1.0 - here * stands,
        repairing=1.0 - here * stands,
        reconfiguring=here * stands * (1.0 - trains) + used * checkpointing,
        lost=used * (1.0 - kept - checkpointing),
        uptime=quorum,
        participation=participation(cluster, learners) if mode == DECOUPLED else 1.0,
    )


def _idle(a: Slices, here: float, rate: float) -> float:
    """Return which share of the slices that are there while a restarting job trains waits for its next restart.

    Slices come back at the rate at which they are interrupted. Each waits 1 / Λ if another slice trains meanwhile.
    """
    if rate <= 0.0:
        return 0.0
    back = a.slices * a.slice_rate + a.rack_rate * a.rack_slices + a.maintenance_rate
    another = 1.0 - (1.0 - here) ** (a.slices - 1)
    return min(1.0, another * back / (rate * a.slices))


def _joint(cluster: Cluster, learners: int, trains: float) -> tuple[float, float]:
    """Return the share of time with a quorum, and the share of a training learner's time in which it does not wait."""
    k = min(cluster.quorum, learners)

    def at_least(needed: int, of: int) -> float:
        return sum(math.comb(of, n) * trains**n * (1.0 - trains) ** (of - n) for n in range(max(0, needed), of + 1))

    return at_least(k, learners), 1.0 if cluster.lead is None else at_least(k - 1, learners - 1)


def paced(cluster: Cluster, speeds: Sequence[float]) -> float:
    """Return the mean share of its own speed that a learner keeps if no learner runs ahead of the quorum.

    Each learner runs at the speed of the K-th fastest, or at its own if that is lower.
    """
    limit = sorted(speeds, reverse=True)[min(cluster.quorum, len(speeds)) - 1]
    return statistics.fmean(min(1.0, limit / s) for s in speeds)

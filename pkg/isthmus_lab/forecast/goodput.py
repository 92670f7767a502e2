"""Goodput of N chips that fail: data parallel that restarts, elastic data parallel, and M decoupled learners.

A learner is a number of slices that train in step. A slice is the unit of loss: where one of its chips fails, all of it
is gone until the chip is repaired. Between two interruptions a learner trains; then it stands still for as long as a
reconfiguration takes, with whatever slices there are by then. Learners do not know of each other's interruptions.

`exact` is the stationary renewal argument; `failures.simulate` plays the events. They are two derivations of one model,
and the tests hold them against each other.
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
"""Goodput at `PUBLISHED_CHIPS` and one interruption per chip and year (arXiv 2604.21428): what the two stalls, which
were not published, are fitted to. Nothing else is."""


ENDLESS = ("mtbi_years", "rack_mtbi_years", "region_mtbi_years", "maintenance_days")
"""What may be infinite: it then never happens."""

SHAPE_MIN = 0.2
"""Of repair times: below it their mean is made of a few that take ages."""

EXPONENT_MAX = 700.0

REJOINS = ("cheaper", "next", "once")

SLICE_CHIPS = ((16_384, 64), (16, 8), (0, 1))
"""From so many chips on so many are lost together: a cube of a large machine, a server of eight, one."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Everything the answer depends on, but for mode, chips and learners. Reasons are in docs/paper.md."""

    mtbi_years: float = 1.0
    """Mean time between interruptions of one chip."""
    slice_chips: int = 64
    """Chips that are lost and come back together."""
    repair_hours: float = 4.0
    """Mean time until a slice is back."""
    repair_shape: float = 0.7
    """k of the exponentiated Weibull that repair times follow …"""
    repair_power: float = 2.0
    """… and its α: F(x) = (1 − exp(−(x / λ)^k))^α."""
    reconfigure_s: float | None = None
    """Stall of a learner that shrinks or grows; None: fitted to the published goodput of elastic data parallel."""
    restart_s: float | None = None
    """Stall of a job that starts again from its checkpoint; None: fitted to the published one of data parallel."""
    rejoin: str = "cheaper"
    """What a restarting job does with a slice that is back: lets it wait for the `next` restart, restarts at `once`, or
    whichever is `cheaper` (see `Slices.rejoins`)."""
    interrupted: str = "absorb"
    """What an interruption of a reconfiguration does: `absorb` (it is taken into the one under way) or `again`."""
    step_s: float = 1.0
    """A failure takes the step under way with it."""
    checkpoint_s: float = 0.5
    """What a checkpoint of the restarting job costs; the interval is Young's √(2 · cost · time between failures)."""
    speed_deviation: float = 0.005
    """Standard deviation of slices' step times, as a share: those of one learner wait for the slowest among them."""
    behind: float = 0.0
    """How much slower the slowest learner is than the fastest, as a share; the others lie evenly between."""
    quorum: int = 1
    """K: learners without which the global model does not advance."""
    lead: float | None = None
    """Steps that a learner goes on without a new version before it waits for one; None: it never waits."""
    grace: float = 0.8
    """γ, of `overlap` steps: how long a round waits for those that come after the quorum."""
    overlap: float = 2.0
    rack_chips: int = 1024
    rack_mtbi_years: float = math.inf
    """Mean time between two failures of one rack, which take all its slices; inf: none."""
    region_mtbi_years: float = math.inf
    """The same of a whole learner's region …"""
    region_hours: float = 1.0
    """… and how long it is away."""
    maintenance_days: float = math.inf
    """Days between two maintenances of a slice, announced: nothing is lost; inf: none."""
    maintenance_hours: float = 4.0

    def check(self) -> "Cluster":
        """Return self. Raises `InputError` that names a parameter out of its range."""
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
    """What the allocated chips' time goes into: goodput, waiting, reconfiguring and lost add up to 1."""

    goodput: float
    """Training steps that count."""
    waiting: float
    """For a repair, slower slices, slower learners or a quorum."""
    repairing: float
    """The part of `waiting` in which a slice is away: failed, or in maintenance."""
    reconfiguring: float
    """Standing still because something changed; checkpoints of the restarting job too."""
    lost: float
    """Trained, and taken back by a failure."""
    uptime: float
    """Share of the time in which the global model advances."""
    participation: float
    """Of the learners that train, the share whose update makes a round."""


# --- the parts of both derivations ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slices:
    """One learner's slices and what strikes them. Rates are per second."""

    slices: int
    slice_rate: float
    rack_slices: int
    rack_rate: float
    region_rate: float
    maintenance_rate: float
    stall_s: float
    restarts: bool
    rejoins: bool
    """Whether a restarting job restarts for a slice that is back. It stops all N slices for a stall, and otherwise one
    would wait 1 / Λ for the next failure: among millions of chips that is seconds away, in a small cluster days."""


def slice_of(chips: int, learners: int = 1) -> int:
    """Return how many chips are lost together where nobody says: as usual, but a slice for every learner at least."""
    usual = next((size for least, size in SLICE_CHIPS if chips >= least), 1)
    return max(1, min(usual, chips // max(1, learners)))


def stalls(cluster: Cluster) -> tuple[float, float]:
    """Return seconds of a reconfiguration and of a restart: given, or fitted to `PUBLISHED` at the published scale."""
    reconfigure, restart = cluster.reconfigure_s, cluster.restart_s
    if reconfigure is None:
        reconfigure = _fit(cluster, ELASTIC)
    if restart is None:
        restart = _fit(cluster, RESTART)
    return reconfigure, restart


@lru_cache(maxsize=256)
def _fit(cluster: Cluster, mode: str) -> float:
    """Return the stall at which a mode's exact goodput is the published one. Raises `InputError` where none does."""
    # The published figures are for failures of chips alone, one a year.
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
    """Return one learner of a cluster. Raises `InputError` for an unknown mode or less than a slice per learner."""
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
    """Return the expected longest of so many step times with mean 1 and this deviation (normal, Blom's formula)."""
    if count < 2:
        return 1.0
    return 1.0 + deviation * statistics.NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def young(cost_s: float, between_s: float) -> float:
    """Return Young's checkpoint interval √(2 C M) (1974), in seconds of training between two checkpoints."""
    return math.sqrt(2.0 * cost_s * between_s)


def fits(seconds: float, block_s: float, rate: float) -> float:
    """Return the expected time in whole blocks that fits into an exponential time of mean `seconds` = 1 / rate."""
    if block_s <= 0.0:
        return seconds
    return block_s / math.expm1(rate * block_s) if rate * block_s < EXPONENT_MAX else 0.0


def speeds(cluster: Cluster, learners: int) -> list[float]:
    """Return the learners' speeds, the fastest's being 1."""
    if learners == 1:
        return [1.0]
    return [1.0 - cluster.behind * m / (learners - 1) for m in range(learners)]


def participation(cluster: Cluster, learners: int) -> float:
    """Return the expected share of learners in a round.

    Their step boundaries lie anywhere within a step; the round opens at the first, closes γτ steps after the K-th.
    Of M uniform arrivals the K-th lies at K / (M + 1) on average, and each later one is uniform behind it.
    """
    first = min(cluster.quorum, learners) / (learners + 1)
    rest = 1.0 - first
    caught = min(1.0, cluster.grace * cluster.overlap / rest) if rest > 0.0 else 1.0
    heard = min(cluster.quorum, learners)
    return (heard + (learners - heard) * caught) / learners


# --- exact ------------------------------------------------------------------------------------------------------------


def exact(cluster: Cluster, mode: str, chips: int, learners: int) -> Shares:
    """Return the stationary shares by renewal: interruptions are Poisson, and so is what comes back.

    Slices come back at the rate at which they fail, whatever the distribution of repairs: the departures of an M/G/∞
    queue are Poisson (Mirasol, 1963). A learner then trains for an exponential time of rate Λ and stands still for s:
    1 / (1 + Λs) of the time where interruptions on the way are absorbed, exp(−Λs) where they begin it again.
    A learner's failures fall on the slices that are there, in the mean: the limit of many slices per learner. What
    waits for a quorum is binomial over learners. What comes back to a job that restarts stands idle until its next
    restart, 1 / Λ away: one slice in the mean, which is nothing among thousands and a sixty-fourth of 64.
    """
    if mode != DECOUPLED:
        learners = 1
    a = slices_of(cluster, mode, chips, learners)
    repair_s = cluster.repair_hours * HOUR_S
    # Each slice is away for one of three reasons, one after the other at most; the region takes all of them at once.
    away = a.slice_rate * repair_s + a.rack_rate * a.rack_slices / a.slices * repair_s
    away += a.maintenance_rate / a.slices * cluster.maintenance_hours * HOUR_S
    here = 1.0 / (1.0 + away)
    region_s = cluster.region_hours * HOUR_S
    stands = 1.0 / (1.0 + a.region_rate * region_s)
    failing = a.slices * here * a.slice_rate + a.rack_rate * here + a.region_rate
    planned = a.maintenance_rate * here
    # A rack comes back slice by slice.
    back = here * (a.slices * a.slice_rate + a.rack_rate * a.rack_slices + a.maintenance_rate) + a.region_rate
    # What comes back to a job that restarts may wait for its next restart.
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
        # Nobody waits for what is over before the lead is used up.
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
    """Return the share of a restarting job's training slices that are back and wait for its next restart.

    Slices come back at the rate at which they are struck, and each waits 1 / Λ, wherever another one trains meanwhile.
    """
    if rate <= 0.0:
        return 0.0
    back = a.slices * a.slice_rate + a.rack_rate * a.rack_slices + a.maintenance_rate
    another = 1.0 - (1.0 - here) ** (a.slices - 1)
    return min(1.0, another * back / (rate * a.slices))


def _joint(cluster: Cluster, learners: int, trains: float) -> tuple[float, float]:
    """Return the share of time with a quorum, and the share of a training learner's time in which it need not wait."""
    k = min(cluster.quorum, learners)

    def at_least(needed: int, of: int) -> float:
        return sum(math.comb(of, n) * trains**n * (1.0 - trains) ** (of - n) for n in range(max(0, needed), of + 1))

    return at_least(k, learners), 1.0 if cluster.lead is None else at_least(k - 1, learners - 1)


def paced(cluster: Cluster, speeds: Sequence[float]) -> float:
    """Return what is left where nobody runs ahead of the quorum: all at the pace of the K-th fastest, or their own."""
    limit = sorted(speeds, reverse=True)[min(cluster.quorum, len(speeds)) - 1]
    return statistics.fmean(min(1.0, limit / s) for s in speeds)

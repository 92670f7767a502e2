"""Plans a run: what a model and a set of learners would come to, and the settings to choose, each with its reason.

Everything is counted from the same parts the library is made of: bits of its codecs, bytes and requests measured by
`traffic`, the syncer's arithmetic timed on this machine. What the lab supports (docs/experiments.md) decides the rest.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from isthmus.errors import InputError
from isthmus.model import traffic
from isthmus.model.speeds import Speeds
from isthmus.rules import Pace, Rules, overdrive

DAY_S = 86400.0
GIB = float(1 << 30)

CHECKPOINT_SHARE = 0.15
"""Of an uplink that checkpoints may take …"""

CHECKPOINT_S = 60.0
"""… and how often they are taken where that allows it."""

HEADROOM = 0.5
"""Share of a link that fragments may take. What waits for the link comes late and is sent again: in the lab a load of
69 % leaves 24 % of the work merged where 35 % leaves 77 %. Checkpoints, joins and other people's traffic want some too.
"""

PERIODS = (12, 24, 48, 96, 192, 384, 768)
"""Steps between two syncs of a fragment that are tried, the shortest first."""

FRAGMENT_BYTES = 64 << 20
"""Payload of an update up to which a model is cut into few fragments: a request that fails is repeated whole."""

CHECKPOINT_BYTES = 20.0
"""Of a checkpoint object, per parameter: values, moments, residuals."""

LEARNER_BYTES = 16.0 + 12.0 + CHECKPOINT_BYTES
"""Of a learner's host memory, per parameter, about: published values, error feedback of what is under way; while a
checkpoint is taken, copies of values and moments, and the object."""

STATE_BYTES = 12.0
"""Of a syncer's state, per parameter: published, master, momentum."""

PUT_MAX = 5 * 10**9
"""Largest object that stores take in one request."""

FETCHES = 16
"""Updates a syncer has in memory at once, besides its rounds."""

COPY_BYTES_S = 5e9
"""Between a model and the buffers beside it, in memory."""

WORD = 2.0
"""Ways that a message on the bus takes in the mean: its own, and the rest of the request before it."""

KEPT_VERSIONS = 64
"""What `isthmus gc` keeps of every fragment unless told otherwise."""


@dataclass(frozen=True, kw_only=True)
class Island:
    """Learners that are alike."""

    name: str
    count: int = 1
    step_s: float = 1.0
    """Seconds of an optimizer step."""
    up_gbit_s: float = 1.0
    down_gbit_s: float = 1.0
    latency_s: float = 0.05
    """One way to the store."""
    region: str = ""
    """Where it is; traffic from the store's region to another is paid for."""
    mtbf_hours: float = math.inf
    """Mean time between two failures of one learner."""
    restart_s: float = 60.0
    """From a failure to the first step afterwards."""

    def check(self) -> "Island":
        """Return self. Raises `InputError` that names learner and parameter."""
        positive = ("count", "step_s", "up_gbit_s", "down_gbit_s", "mtbf_hours")
        for name, value in vars(self).items():
            if isinstance(value, str):
                continue
            endless = math.isinf(value) and name != "mtbf_hours"
            if math.isnan(value) or endless or (value <= 0 if name in positive else value < 0):
                bound = "finite and more than 0" if name in positive else "finite and at least 0"
                raise InputError(f"learner {self.name}: {name} must be {bound}, not {value:g}")
        return self


@dataclass(frozen=True, kw_only=True)
class Prices:
    """US dollars, as object stores ask them; see the file that comes with the package."""

    put_per_1000: float
    get_per_1000: float
    storage_gb_month: float
    egress_gb: float
    """From the store to another region."""

    def check(self) -> "Prices":
        """Return self. Raises `InputError`."""
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value >= 0.0):
                raise InputError(f"price {name} must be at least 0, not {value}")
        return self


@dataclass(frozen=True, kw_only=True)
class Fixed:
    """Settings that are given; None: to be chosen."""

    fragments: int | None = None
    sync_every: int | None = None
    codec: str | None = None
    codec_down: str | None = None


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What one kind of learner can expect."""

    island: Island
    sent_s: float
    """From a step boundary to the update in the store."""
    back_s: float
    """From a step boundary to the new version in the model, with the syncer's part."""
    utilization: float
    """Share of the time in which a healthy learner computes."""
    kept: float
    """Share of its tokens that a commit will hold; the rest is overwritten by versions on their way."""
    goodput: float
    """Share of the time that goes into work that failures do not take back, restarts included."""
    up_load: float
    """Share of its uplink that is used, checkpoints included …"""
    down_load: float
    """… and of its downlink."""
    up_gb_day: float
    down_gb_day: float
    requests_day: dict[str, float]
    memory_gib: float
    """Of the host, beside model, gradients and optimizer."""
    fits: bool


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One setting and why."""

    name: str
    value: object
    reason: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A whole plan."""

    params: float
    rules: Rules
    pace: Pace
    choices: list[Choice]
    forecasts: list[Forecast]
    syncer: dict[str, float]
    day: dict[str, float]
    warnings: list[str]


# --- planned ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Wire:
    """Bytes per fragment round, headers and messages included."""

    up: float
    down: float
    cost: traffic.Cost


def plan(
    params: float,
    islands: Sequence[Island],
    prices: Prices,
    *,
    store_region: str = "",
    fixed: Fixed = Fixed(),
    speeds: Callable[[Rules], Speeds],
) -> Plan:
    """Return a plan. What is `fixed` is not chosen.

    `speeds` says how fast a syncer does its arithmetic under these rules (`speeds.measure` does it here and now).

    Raises `InputError` for input that cannot be.
    """
    if not (math.isfinite(params) and params >= 1):
        raise InputError(f"a model has at least one parameter, not {params:g}")
    if not islands:
        raise InputError("a plan needs learners: give --learners or a file with [[learner]] tables")
    for island in islands:
        island.check()
    learners = sum(island.count for island in islands)
    rules, reasons = _choose(params, islands, fixed)
    took = speeds(rules)
    whole = params * CHECKPOINT_BYTES
    slowest = min(island.up_gbit_s for island in islands)
    checkpoint_s = float(math.ceil(max(CHECKPOINT_S, whole * 8.0 / (CHECKPOINT_SHARE * slowest * 1e9))))
    reasons.append(
        Choice(
            name="checkpoint",
            value=checkpoint_s,
            reason=f"seconds between two: {whole / 1e9:.3g} GB each, at most {CHECKPOINT_SHARE:.0%} of every uplink",
        )
    )
    costs = traffic.measure(_small(rules), Pace(), min(learners, 8))
    wire = _wire(params, rules, costs.learner)
    arithmetic_s = params / rules.fragments * (learners * took.add_s + took.round_s)
    # What a store refuses is not sent.
    saved_s = checkpoint_s if whole <= PUT_MAX else math.inf
    forecasts = [_forecast(params, island, islands, rules, wire, arithmetic_s, saved_s) for island in islands]
    backs = sorted(f.back_s / f.island.step_s for f in forecasts for _ in range(f.island.count))
    overlap = float(max(2, math.ceil(backs[len(backs) // 2])))
    pace = Pace(overlap=overlap)
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
    ]
    rounds_day = rules.fragments * DAY_S / _period(islands, rules)
    syncer = _syncer(params, rules, pace, learners, wire, costs.syncer, arithmetic_s, rounds_day)
    return Plan(
        params=params,
        rules=rules,
        pace=pace,
        choices=reasons,
        forecasts=forecasts,
        syncer=syncer,
        day=_day(params, rules, forecasts, costs.syncer, rounds_day, prices, store_region, wire),
        warnings=_warn(params, rules, forecasts, syncer, learners),
    )


def _small(rules: Rules) -> Rules:
    """Return rules whose traffic is measured in a moment: what passes per round hardly depends on P and H."""
    return msgspec.structs.replace(
        rules, fragments=min(rules.fragments, 12), sync_every=min(rules.sync_every, 12)
    ).check()


def _period(islands: Sequence[Island], rules: Rules) -> float:
    """Return seconds between two rounds of a fragment: they are called at the pace of the fastest learner."""
    return rules.sync_every * min(island.step_s for island in islands)


def _wire(params: float, rules: Rules, cost: traffic.Cost) -> _Wire:
    share = params / rules.fragments / 8.0
    return _Wire(
        up=share * traffic.bits(rules.codec_up, params, rules.fragments) + cost.up_bytes,
        down=share * traffic.bits(rules.codec_down, params, rules.fragments) + cost.down_bytes,
        cost=cost,
    )


def _choose(params: float, islands: Sequence[Island], fixed: Fixed) -> tuple[Rules, list[Choice]]:
    """Return rules that every link can carry with the shortest period, and why these."""
    base = Rules()
    up, down = fixed.codec or base.codec_up, fixed.codec_down or base.codec_down
    periods = [fixed.sync_every] if fixed.sync_every else [h for h in PERIODS if h >= (fixed.fragments or 1)]
    if not periods:
        raise InputError(f"{fixed.fragments} fragments: more than {PERIODS[-1]} need a period of their own, sync_every")
    nothing = traffic.Cost(requests={}, up_bytes=0.0, down_bytes=0.0, messages=0.0)
    rules = base
    for h in periods:
        fragments = fixed.fragments or _fragments(params, up, h)
        if fragments > h:
            raise InputError(
                f"{fragments} fragments within {h} steps: at most one leaves per step, so let H be at least P"
            )
        rules = Rules.suited(codec_up=up, codec_down=down, sync_every=h, fragments=fragments).check()
        wire = _wire(params, rules, nothing)
        if all(max(_loads(island, islands, rules, wire)) <= HEADROOM for island in islands):
            break
    wire = _wire(params, rules, nothing)
    load, slowest = max(((max(_loads(i, islands, rules, wire)), i) for i in islands), key=lambda pair: pair[0])

    def bits(name: str) -> str:
        return f"{traffic.bits(name, params, rules.fragments):.1f} bits per parameter"

    def why(name: str, reason: str) -> str:
        return "as you asked" if getattr(fixed, name) else reason

    return rules, [
        Choice(
            name="sync_every",
            value=rules.sync_every,
            reason=why(
                "sync_every",
                f"the shortest period that every link carries: {slowest.name} uses {load:.0%} of its link (at most "
                f"{HEADROOM:.0%})"
                if load <= HEADROOM
                else f"even so {slowest.name} needs {load:.0%} of its link, more than {HEADROOM:.0%}",
            ),
        ),
        Choice(
            name="fragments",
            value=rules.fragments,
            reason=why(
                "fragments", f"updates of {wire.up / 1e6:.3g} MB, at most one per step, spread evenly over the period"
            ),
        ),
        Choice(
            name="codec",
            value=rules.codec_up,
            reason=why("codec", f"{bits(up)} with error feedback; the lab sees no loss against 32"),
        ),
        Choice(
            name="codec_down",
            value=rules.codec_down,
            reason=why(
                "codec_down",
                f"{bits(down)}; what it drops stays with the syncer and follows with the next version",
            ),
        ),
        Choice(
            name="outer_lr",
            value=rules.outer_lr,
            reason=f"with momentum {rules.outer_momentum:g}, what suits rounds of {rules.sync_every} steps in the lab",
        ),
    ]


def _fragments(params: float, up: str, period: int) -> int:
    whole = params * traffic.bits(up, params, 1) / 8.0
    return int(min(period, max(Rules().fragments, math.ceil(whole / FRAGMENT_BYTES))))


def _loads(island: Island, islands: Sequence[Island], rules: Rules, wire: _Wire) -> tuple[float, float]:
    """Return the shares of a learner's uplink and downlink that are used."""
    bits_s = 8.0 * rules.fragments / _period(islands, rules)
    return wire.up * bits_s / (island.up_gbit_s * 1e9), wire.down * bits_s / (island.down_gbit_s * 1e9)


def _sent_s(island: Island, wire: _Wire) -> float:
    """Return seconds from a step boundary to the update in the store."""
    return wire.up * 8.0 / (island.up_gbit_s * 1e9) + 2.0 * island.latency_s


def _answers_s(islands: Sequence[Island], rules: Rules, wire: _Wire) -> float:
    """Return seconds from a round's call to its last answer: heard, a boundary, sent, announced; at most H."""
    if sum(island.count for island in islands) == 1:
        return 0.0
    slowest = max(2.0 * WORD * i.latency_s + i.step_s + _sent_s(i, wire) for i in islands)
    return min(slowest, _period(islands, rules))


def _forecast(
    params: float,
    island: Island,
    islands: Sequence[Island],
    rules: Rules,
    wire: _Wire,
    arithmetic_s: float,
    checkpoint_s: float,
) -> Forecast:
    up_load, down_load = _loads(island, islands, rules, wire)
    fits = max(up_load, down_load) <= HEADROOM
    saving = params * CHECKPOINT_BYTES / checkpoint_s
    sent_s = _sent_s(island, wire)
    # Its announcement, a way there and back as all on the bus; then everybody's answers; then commit and value.
    down_s = WORD * island.latency_s + wire.down * 8.0 / (island.down_gbit_s * 1e9) + 4.0 * island.latency_s
    back_s = sent_s + WORD * island.latency_s + _answers_s(islands, rules, wire) + arithmetic_s + down_s
    carried = min(1.0, 1.0 / up_load, 1.0 / down_load)
    kept = max(0.0, 1.0 - back_s / _period(islands, rules)) * carried
    # Between two boundaries a few fragments are copied out and in, at memory speed.
    hold_s = 2.0 * 4.0 * params / rules.sync_every / COPY_BYTES_S
    mtbf_s = island.mtbf_hours * 3600.0
    # What no update holds: on average half a period of every fragment.
    lost_s = rules.sync_every / 2.0 * island.step_s
    goodput = 1.0 / (1.0 + (island.restart_s + lost_s) / mtbf_s)
    rounds_day = rules.fragments * DAY_S / _period(islands, rules)
    return Forecast(
        island=island,
        sent_s=sent_s,
        back_s=back_s,
        utilization=island.step_s / (island.step_s + hold_s),
        kept=kept,
        goodput=goodput,
        up_load=up_load + saving * 8.0 / (island.up_gbit_s * 1e9),
        down_load=down_load,
        up_gb_day=(rounds_day * wire.up + DAY_S * saving) / 1e9,
        down_gb_day=rounds_day * wire.down / 1e9,
        requests_day={
            name: wire.cost.requests.get(name, 0.0) * rounds_day + (DAY_S / checkpoint_s if name == "put" else 0.0)
            for name in traffic.OPERATIONS
        },
        memory_gib=params * LEARNER_BYTES / GIB,
        fits=fits,
    )


def _syncer(
    params: float,
    rules: Rules,
    pace: Pace,
    learners: int,
    wire: _Wire,
    cost: traffic.Cost,
    arithmetic_s: float,
    rounds_day: float,
) -> dict[str, float]:
    fragment = params / rules.fragments
    snapshot = STATE_BYTES * fragment / pace.snapshot_every
    return {
        "memory_gib": (params * (STATE_BYTES + 4.0) + FETCHES * (wire.up + 4.0 * fragment)) / GIB,
        "cores": arithmetic_s * rounds_day / DAY_S,
        "merge_s": arithmetic_s,
        "up_gbit_s": (wire.down + snapshot) * 8.0 * rounds_day / DAY_S / 1e9,
        "down_gbit_s": learners * wire.up * 8.0 * rounds_day / DAY_S / 1e9,
        "rounds_day": rounds_day,
        "requests_day": sum(cost.requests.values()) * rounds_day,
    }


def _day(
    params: float,
    rules: Rules,
    forecasts: Sequence[Forecast],
    syncer: traffic.Cost,
    rounds_day: float,
    prices: Prices,
    store_region: str,
    wire: _Wire,
) -> dict[str, float]:
    """Return bytes, requests and dollars of one day."""
    totals = {name: count * rounds_day for name, count in syncer.requests.items()}
    learners = 0
    egress = 0.0
    for f in forecasts:
        learners += f.island.count
        for name, count in f.requests_day.items():
            totals[name] = totals.get(name, 0.0) + count * f.island.count
        if f.island.region != store_region:
            egress += f.down_gb_day * f.island.count
    stored = rules.fragments * KEPT_VERSIONS * (learners * wire.up + wire.down)
    stored += params * STATE_BYTES * KEPT_VERSIONS / Pace().snapshot_every + 2.0 * learners * params * CHECKPOINT_BYTES
    reads = totals.get("get", 0.0)
    writes = sum(totals.values()) - reads
    found = {
        "up_gb": sum(f.up_gb_day * f.island.count for f in forecasts),
        "down_gb": sum(f.down_gb_day * f.island.count for f in forecasts),
        "reads": reads,
        "writes": writes,
        "egress_gb": egress,
        "stored_gb": stored / 1e9,
        "requests_usd": reads / 1000.0 * prices.get_per_1000 + writes / 1000.0 * prices.put_per_1000,
        "egress_usd": egress * prices.egress_gb,
        "storage_usd": stored / 1e9 * prices.storage_gb_month / 30.0,
    }
    found["usd"] = found["requests_usd"] + found["egress_usd"] + found["storage_usd"]
    return found


def _warn(
    params: float, rules: Rules, forecasts: Sequence[Forecast], syncer: Mapping[str, float], learners: int
) -> list[str]:
    found = []
    if learners == 1:
        found.append("one learner has nobody to merge with: a plain training loop does the same")
    fastest = min(f.island.step_s for f in forecasts)
    for f in forecasts:
        name = f.island.name
        if not f.fits:
            way, load = max(("up", f.up_load), ("down", f.down_load), key=lambda pair: pair[1])
            what = "cannot carry its fragments" if load > 1.0 else "is so busy that fragments queue"
            found.append(f"{name}: its link {way} {what}: {load:.0%} of it would be used; a longer sync_every helps")
        if f.kept < 0.7 and f.fits:
            found.append(
                f"{name}: a new version is {f.back_s:.1f} s away, {f.back_s / f.island.step_s:.1f} steps: "
                f"{1 - f.kept:.0%} of its work is overwritten; let sync_every be longer, or its store nearer"
            )
        if f.island.step_s > 2.0 * fastest:
            found.append(
                f"{name}: its steps take {f.island.step_s / fastest:.1f} times those of the fastest: it answers with "
                f"few steps and weighs little; a smaller batch there makes its steps shorter"
            )
        if f.goodput < 0.9:
            found.append(f"{name}: failures and restarts cost {1 - f.goodput:.0%} of its time")
    if params * CHECKPOINT_BYTES > PUT_MAX:
        found.append(
            f"a checkpoint has about {params * CHECKPOINT_BYTES / 1e9:.0f} GB: stores that take 5 GB per request "
            "refuse it, and learners then go on without checkpoints"
        )
    if syncer["cores"] > 4.0:
        found.append(f"merging needs {syncer['cores']:.1f} cores: run several syncers, they share the fragments")
    said = overdrive(rules)
    return [*found, said] if said else found

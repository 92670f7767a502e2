"""What one choice of rules comes to: traffic, work merged, memory, dollars a day, and what is learnt for them.

Everything is counted from the same parts the library is made of: bits of its codecs, bytes and requests measured by
`traffic`, the syncer's arithmetic from a table or a measurement (`speeds`). What a period, and work that versions on
their way overwrite, cost in loss is the lab's (`learning`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from isthmus.agent.speed import Speeds
from isthmus.format.layout import Spec
from isthmus.format.rules import CHECKPOINT_S, KEPT_VERSIONS, ROBUST, MergeRule, Pace, Rules
from isthmus.log.merge import state_bytes
from isthmus.store.base import requests_to_read, requests_to_write
from isthmus.syncer.agent import FETCHES_MAX
from isthmus.syncer.snapshots import snapshot_after
from isthmus_lab.forecast import learning, traffic
from isthmus_lab.forecast.island import Island
from isthmus_lab.forecast.matrices import Matrices
from isthmus_services.board.prices import Prices

DAY_S = 86400.0

GIB = float(1 << 30)

CHECKPOINT_SHARE = 0.15
"""Of an uplink that checkpoints may take: they are taken more seldom where it is too thin."""

HEADROOM = 0.7
"""Share of a link that fragments may take. In the lab's `links` even 85 % cost less than a period twice as long;
checkpoints, joins and other people's traffic want the rest."""

CHECKPOINT_BYTES = 12.0
"""Of a checkpoint object, per parameter: values and moments."""

LEARNER_BYTES = 10.0 + CHECKPOINT_BYTES
"""Of a learner's host memory, per parameter, at most about: published values, captures and the memory kept for the next
ones (docs/scale.md), and while a checkpoint is taken copies of values and moments."""

FEEDBACK_BYTES = 8.0
"""More of both where a learner feeds back what codecs dropped, that and what of it is under way, and has parameters of
four bytes …"""

FEEDBACK_BYTES_OF_HALVES = 5.0
"""… and where they have two."""


def feedback_bytes(specs: Sequence[Spec] | None) -> float:
    """Return what a model with these tensors takes for that, per parameter; where none are known, as of four bytes."""
    halves = specs is not None and all(s.dtype != "float32" for s in specs)
    return FEEDBACK_BYTES_OF_HALVES if halves else FEEDBACK_BYTES


SYNCER_CORES = 4.0
"""Of one syncer; where merging takes more, several share the fragments."""

OBJECT_MAX = 5 * 10**12
"""Largest object that stores take, in parts."""

SYNCER_GBIT_S = 10.0
"""What a syncer that takes over is taken to read at."""

COPY_BYTES_S = 5e9
"""Between a model and the buffers beside it, in memory."""

WORD_LATENCIES = 2.0
"""Ways that a message on the bus takes in the mean: its own, and the rest of the request before it."""


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
    lost_s: float
    """What a failure takes back: what no update holds yet."""
    in_model: float
    """Share of all its time whose work a commit holds: utilisation, goodput and work merged together."""
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


@dataclass(frozen=True)
class Wire:
    """Of a fragment round, what takes its time between a learner and the store."""

    up: float
    """Bytes, headers and messages included …"""
    down: float
    """… both ways."""
    cost: traffic.Cost
    pack_s: float
    """Seconds of one of a learner's cores until an update is packed."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one choice of P and H comes to."""

    rules: Rules
    wire: Wire
    forecasts: list[Forecast]
    syncer: dict[str, float]
    day: dict[str, float]
    worth: learning.Worth
    checkpoint_s: float
    learnt: float
    kept: float
    """Share of all learners' work that is merged."""
    load: float
    """Share of a link that fragments take, of the learner that has least left …"""
    busiest: Island
    """… which is this one."""
    checkpoint: float
    """Bytes of a learner's checkpoint."""

    @property
    def fits(self) -> bool:
        """Whether every link carries it."""
        return self.load <= HEADROOM

    @property
    def per_usd(self) -> float:
        """Steps that count, per dollar; where GPUs cost nothing, steps that count."""
        return self.learnt * DAY_S / self.day["usd"] if self.day["gpu_usd"] else self.learnt


def outcome(
    params: float,
    islands: Sequence[Island],
    prices: Prices,
    store_region: str,
    rules: Rules,
    took: Speeds,
    matrices: Matrices,
    feedback: float = FEEDBACK_BYTES,
) -> Outcome:
    """Return what these rules come to. `took`: how fast a syncer does its arithmetic under them. `feedback`: see
    `feedback_bytes`."""
    learners = sum(island.count for island in islands)
    costs = _costs(_small(rules), min(learners, 8))
    fed = feedback if rules.error_feedback else 0.0
    whole = params * (CHECKPOINT_BYTES + fed)
    slowest = min(island.up_gbit_s for island in islands)
    checkpoint_s = float(math.ceil(max(CHECKPOINT_S, whole * 8.0 / (CHECKPOINT_SHARE * slowest * 1e9))))
    wire = _wire(params, rules, costs.learner, packing_s(params, matrices, rules, took))
    arithmetic_s = params / rules.fragments * (learners * took.add_s + took.round_s)
    if rules.merge == MergeRule.ISO:
        arithmetic_s += isotropic_s(matrices, rules, took)
    # What a store refuses is not sent.
    saved_s = checkpoint_s if whole <= OBJECT_MAX else math.inf
    forecasts = [_forecast(params, island, islands, rules, wire, arithmetic_s, saved_s, fed) for island in islands]
    rounds_day = rules.fragments * DAY_S / _period(islands, rules)
    syncer = _syncer(params, rules, Pace(), learners, wire, costs.syncer, arithmetic_s, rounds_day)
    day = _day(params, rules, forecasts, costs.syncer, rounds_day, prices, store_region, wire, whole)
    day["gpu_usd"] = 24.0 * prices.gpu_hour * sum(i.gpus * i.count for i in islands)
    day["syncer_usd"] = 24.0 * prices.core_hour * max(1.0, syncer["cores"])
    day["usd"] += day["gpu_usd"] + day["syncer_usd"]
    kept = sum(f.kept * f.island.count for f in forecasts) / learners
    worth = learning.lab(rules.merge).worth(learners, rules.sync_every, kept)
    steps = sum(f.utilization * f.goodput * f.island.count / f.island.step_s for f in forecasts)
    load, busiest = max(((max(_loads(i, islands, rules, wire)), i) for i in islands), key=lambda pair: pair[0])
    return Outcome(
        rules=rules,
        wire=wire,
        forecasts=forecasts,
        syncer=syncer,
        checkpoint=whole,
        day=day,
        worth=worth,
        checkpoint_s=checkpoint_s,
        learnt=steps * worth.long,
        kept=kept,
        load=load,
        busiest=busiest,
    )


def isotropic_s(matrices: Matrices, rules: Rules, took: Speeds, block: int | None = None) -> float:
    """Return seconds of one core that making a round's matrices isotropic takes, in these rules' blocks or others."""
    return matrices.flop(rules.iso_block if block is None else block) / rules.fragments / took.flop_s


def packing_s(params: float, matrices: Matrices, rules: Rules, took: Speeds) -> float:
    """Return seconds of one core that packing an update takes a learner: coding one takes about as long as adding a
    coded one to a sum (docs/benchmarks.md)."""
    level_s = isotropic_s(matrices, rules, took) if rules.isotropic_up else 0.0
    return params / rules.fragments * took.add_s + level_s


def goodput_of(island: Island, lost_s: float) -> float:
    """Return the share of a learner's time that failures do not take back; each takes a restart and `lost_s`."""
    return 1.0 / (1.0 + (island.restart_s + lost_s) / (island.mtbf_hours * 3600.0))


@lru_cache(maxsize=64)
def _costs(rules: Rules, learners: int) -> traffic.MessageCosts:
    return traffic.measure(rules, Pace(), learners)


def _small(rules: Rules) -> Rules:
    """Return rules whose traffic is measured in a moment: what passes per round hardly depends on P and H."""
    p = min(rules.fragments, 12)
    return msgspec.structs.replace(rules, fragments=p, sync_every=12, outer_lr=0.4, outer_momentum=0.8).check()


def _period(islands: Sequence[Island], rules: Rules) -> float:
    """Return seconds between two rounds of a fragment: they are called at the pace of the fastest learner."""
    return rules.sync_every * min(island.step_s for island in islands)


def _wire(params: float, rules: Rules, cost: traffic.Cost, pack_s: float) -> Wire:
    share = params / rules.fragments / 8.0
    return Wire(
        up=share * traffic.bits(rules.codec_up, params, rules.fragments) + cost.up_bytes,
        down=share * traffic.bits(rules.codec_down, params, rules.fragments) + cost.down_bytes,
        cost=cost,
        pack_s=pack_s,
    )


def _loads(island: Island, islands: Sequence[Island], rules: Rules, wire: Wire) -> tuple[float, float]:
    """Return the shares of a learner's uplink and downlink that are used."""
    bits_s = 8.0 * rules.fragments / _period(islands, rules)
    return wire.up * bits_s / (island.up_gbit_s * 1e9), wire.down * bits_s / (island.down_gbit_s * 1e9)


def _sent_s(island: Island, wire: Wire) -> float:
    """Return seconds from a step boundary to the update in the store."""
    return wire.pack_s + wire.up * 8.0 / (island.up_gbit_s * 1e9) + 2.0 * island.latency_s


def _answers_s(islands: Sequence[Island], rules: Rules, wire: Wire) -> float:
    """Return seconds from a round's call to its last answer: heard, a boundary, sent, announced; at most H."""
    if sum(island.count for island in islands) == 1:
        return 0.0
    slowest = max(2.0 * WORD_LATENCIES * i.latency_s + i.step_s + _sent_s(i, wire) for i in islands)
    return min(slowest, _period(islands, rules))


def _forecast(
    params: float,
    island: Island,
    islands: Sequence[Island],
    rules: Rules,
    wire: Wire,
    arithmetic_s: float,
    checkpoint_s: float,
    fed: float,
) -> Forecast:
    up_load, down_load = _loads(island, islands, rules, wire)
    fits = max(up_load, down_load) <= HEADROOM
    whole = params * (CHECKPOINT_BYTES + fed)
    saving = whole / checkpoint_s
    sent_s = _sent_s(island, wire)
    # Its announcement, a way there and back as all on the bus; then everybody's answers; then commit and value.
    down_s = WORD_LATENCIES * island.latency_s + wire.down * 8.0 / (island.down_gbit_s * 1e9) + 4.0 * island.latency_s
    back_s = sent_s + WORD_LATENCIES * island.latency_s + _answers_s(islands, rules, wire) + arithmetic_s + down_s
    carried = min(1.0, 1.0 / up_load, 1.0 / down_load)
    # One learner opens the round; the others take their updates when they have heard the call, at the next boundary, as
    # all of them adopt at one.
    later_s = sent_s + 2.0 * WORD_LATENCIES * island.latency_s + island.step_s / 2.0
    learners = sum(other.count for other in islands)
    under_way_s = max(island.step_s, back_s + island.step_s / 2.0 - later_s * (learners - 1) / learners)
    kept = max(0.0, 1.0 - under_way_s / _period(islands, rules)) * carried
    # Between two boundaries a few fragments are copied out and in, at memory speed.
    hold_s = 2.0 * 4.0 * params / rules.sync_every / COPY_BYTES_S
    step_share = island.step_s / (island.step_s + hold_s)
    # What no update holds: on average half a period of every fragment.
    lost_s = rules.sync_every / 2.0 * island.step_s
    goodput = goodput_of(island, lost_s)
    rounds_day = rules.fragments * DAY_S / _period(islands, rules)
    # What is counted of a small model goes in one request each; large objects go in parts and ranges.
    more = {"get": requests_to_read(wire.down) - 1, "create": requests_to_write(wire.up) - 1}
    return Forecast(
        island=island,
        sent_s=sent_s,
        back_s=back_s,
        utilization=step_share,
        kept=kept,
        goodput=goodput,
        lost_s=lost_s,
        in_model=step_share * goodput * kept,
        up_load=up_load + saving * 8.0 / (island.up_gbit_s * 1e9),
        down_load=down_load,
        up_gb_day=(rounds_day * wire.up + DAY_S * saving) / 1e9,
        down_gb_day=rounds_day * wire.down / 1e9,
        requests_day={
            name: (wire.cost.requests.get(name, 0.0) + more.get(name, 0)) * rounds_day
            + (DAY_S / checkpoint_s * requests_to_write(whole) if name == "put" else 0.0)
            for name in traffic.OPERATIONS
        },
        memory_gib=params * (LEARNER_BYTES + fed) / GIB,
        fits=fits,
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
    # All updates of a round are looked at together: they are kept until it closes.
    together = rules.fragments * learners * wire.up if rules.merge in ROBUST else 0.0
    # All that another one kept: of each fragment the newest snapshot, and the rounds merged after it.
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
    """Return the most rounds between two snapshots of a fragment: by versions, or by the bytes merged."""
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
    """Return bytes, requests and dollars of one day."""
    totals = {name: count * rounds_day for name, count in syncer.requests.items()}
    learners = sum(f.island.count for f in forecasts)
    totals["get"] = totals.get("get", 0.0) + rounds_day * learners * (requests_to_read(wire.up) - 1)
    snapshot = params / rules.fragments * state_bytes(rules)
    between = snapshots_between(params, rules, Pace(), learners, wire)
    parts = requests_to_write(wire.down) - 1 + (requests_to_write(snapshot) - 1) / between
    totals["create"] = totals.get("create", 0.0) + rounds_day * parts
    egress = 0.0
    for f in forecasts:
        for name, count in f.requests_day.items():
            totals[name] = totals.get(name, 0.0) + count * f.island.count
        if f.island.region != store_region:
            egress += f.down_gb_day * f.island.count
    stored = rules.fragments * KEPT_VERSIONS * (learners * wire.up + wire.down)
    stored += params * state_bytes(rules) * KEPT_VERSIONS / between + 2.0 * learners * checkpoint
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

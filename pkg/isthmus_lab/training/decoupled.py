"""Experiments on decoupled training: published results, links, failures, and the gap to data parallel with RDA."""

import math
from collections.abc import Mapping

import msgspec

from isthmus.format.rules import Adoption, outer_for
from isthmus_lab.training.experiment import (
    AVG,
    HASTY,
    ISO,
    LONG_ROUNDS,
    PARALLEL,
    SYNCHRONOUS,
    WAITING,
    Experiment,
    base,
    named,
)
from isthmus_lab.training.setting import Failures, Guests, Moments, Setting, Shape, Wires

TOKENS, TIME = "tokens", "time"


def _heterogeneous(steps: int) -> list[Setting]:
    # The learners' speeds go from that of the fastest down to 0.82 of it.
    paces = tuple(round(1.0 / (1.0 - 0.18 * m / 7), 4) for m in range(8))
    mixed = base(steps, learners=8, step_s=paces, noise=0.1)
    found = [named(mixed, "data parallel", **PARALLEL)]
    for until in (TOKENS, TIME):
        at = f"equal {until}: "
        found += [
            named(mixed, f"{at}K = 8, waiting", until=until, pace_quorum=8, **WAITING),
            named(mixed, f"{at}K = 1, no grace, no late work", until=until, **HASTY),
            named(mixed, f"{at}K = 1, adaptive grace", until=until),
        ]
    return found


def _failures(steps: int) -> list[Setting]:
    # A cluster of eight units of compute is cut into M learners. Each unit fails at the same rate.
    found = []
    for unit_every_s, what in ((math.inf, "none"), (2400.0, "rare"), (600.0, "often")):
        for m in (1, 2, 4, 8):
            failing = Failures(every_s=unit_every_s * m / 8) if math.isfinite(unit_every_s) else None
            found.append(named(base(steps, learners=m, batch=8 // m), f"failures {what}: M = {m}", failures=failing))
    four = base(steps)
    found.append(named(four, "moments: no failures"))
    origins: tuple[tuple[Moments, str], ...] = (("own", "restored"), ("peer", "a peer's"), ("fresh", "fresh"))
    for moments, what in origins:
        failing = Failures(every_s=100.0, repair_s=5.0, checkpoint_s=10.0, moments=moments)
        found.append(named(four, f"moments: {what}", failures=failing))
    return found


def _scavenging(steps: int) -> list[Setting]:
    four = base(steps)
    return [
        named(four, "4 learners"),
        named(four, "8 for half of the tokens", guests=Guests(count=4, come=0.25, go=0.75)),
        named(four, "16 for half of the tokens", guests=Guests(count=12, come=0.25, go=0.75)),
    ]


def _merge(steps: int) -> list[Setting]:
    found = []
    for m in (4, 8, 16):
        few = base(steps, learners=m)
        found += [
            named(few, f"M = {m}: Avg", **AVG),
            named(few, f"M = {m}: RDA everywhere", rules_merge_embeddings="rda"),
            named(few, f"M = {m}: RDA, embeddings Avg"),
        ]
    return found


def _codecs(steps: int) -> list[Setting]:
    four = base(steps)
    plain = named(four, "", rules_codec_down="f32")
    found = [named(plain, f"up: {up}", rules_codec_up=up) for up in ("f32", "bf16", "int8", "int4")]
    found.append(named(plain, "up: int4, no error feedback", rules_codec_up="int4", rules_error_feedback=False))
    return found + [named(four, f"down: {down}", rules_codec_down=down) for down in ("bf16", "int8", "int4")]


def _adoption(steps: int) -> list[Setting]:
    # Learners of mixed speed, so that some updates are late, at two distances: a version comes back after about three
    # steps, or after about six.
    mixed = base(steps, learners=8, step_s=(1.0, 1.0, 1.0, 1.0, 1.3), noise=0.1)
    away = named(mixed, "", wires=Wires(latency_s=0.2, spread=0.5))
    far = named(mixed, "", wires=Wires(latency_s=0.5, spread=0.5))
    return [
        *(named(away, f"adopt: {rule}", adopt=rule) for rule in Adoption),
        *(named(away, f"staleness: {bases}", pace_staleness=bases) for bases in (0, 1, 4)),
        *(named(away, f"grace: {gamma:g}", pace_grace=gamma) for gamma in (0.0, 0.4, 0.8)),
        *(named(away, f"overlap: {tau:g}", pace_overlap=tau) for tau in (1.0, 2.0, 4.0)),
        named(away, "outer momentum: 0.5", rules_outer_momentum=0.5),
        named(far, "twice as far: H = 12"),
        named(far, "twice as far: H = 12, adopt: carry", adopt="carry"),
        named(far, "twice as far: H = 12, outer momentum: 0.5", rules_outer_momentum=0.5),
        named(far, "twice as far: H = 24", rules_sync_every=24, rules_fragments=24),
    ]


def _loaded(load: float) -> Wires:
    # In a period of 12 steps of one second, 4.125 bits of each of 100 million parameters move, up and down.
    gbit = 1e8 * 4.125 / 12 / 1e9 / load
    return Wires(latency_s=0.06, spread=0.3, gbit_s=gbit, parameters=1e8)


def _periods(steps: int) -> list[Setting]:
    four = base(steps, noise=0.1, **ISO)
    found = {
        "calm": four,
        "half a second away": named(four, "", wires=Wires(latency_s=0.5, spread=0.5)),
        "links three times too thin": named(four, "", wires=_loaded(3.0)),
        "one link at 40 %": named(four, "", thin=_loaded(2.5)),
        "one learner four times slower": named(four, "", step_s=(1.0, 1.0, 1.0, 4.0)),
        "failing often": named(four, "", failures=Failures(every_s=100.0, repair_s=5.0, checkpoint_s=10.0)),
    }
    tried: dict[str, dict[str, object]] = {f"H = {h}": {"rules_sync_every": h} for h in (12, 24, 48)}
    tried["adapting"] = {"rules_sync_every_max": 0}
    tried["adapting, carry"] = {"rules_sync_every_max": 0, "adopt": "carry"}
    return [
        named(setting, f"{what}: {how}", **changes) for what, setting in found.items() for how, changes in tried.items()
    ]


def _scale(steps: int) -> list[Setting]:
    found = [named(base(steps, learners=m), f"data parallel: M = {m}", **PARALLEL) for m in (1, 2, 4, 8)]
    for h in (6, 12, 24, 48):
        lr, mu = outer_for("rda", h)
        found += [
            named(
                base(steps, learners=m, rules_sync_every=h, rules_outer_lr=lr, rules_outer_momentum=mu),
                f"decoupled: M = {m}, H = {h}",
            )
            for m in ((2, 4, 8) if h in (12, 48) else (4,))
        ]
    found += [
        named(base(steps, rules_sync_every=h, pace_quorum=4, **SYNCHRONOUS), f"synchronous: M = 4, H = {h}")
        for h in (12, 24, 48)
    ]
    for h, m in ((12, 4), (48, 4), (12, 8)):
        for lr, mu in ((0.8, 0.0), (0.4, 0.5), (0.8, 0.5), (0.6, 0.7), (0.2, 0.8), (0.4, 0.8), (0.6, 0.8), (0.3, 0.9)):
            at = base(steps, learners=m, rules_sync_every=h, rules_outer_lr=lr, rules_outer_momentum=mu)
            found.append(named(at, f"outer, M = {m}, H = {h}: rate {lr:g}, momentum {mu:g}"))
    return found


def _regions(steps: int) -> list[Setting]:
    found = []
    for gbit in (0.05, 0.1, 0.25, 1.0):
        wires = Wires(latency_s=0.06, spread=0.3, gbit_s=gbit, parameters=1e8)
        far = base(steps, learners=8, noise=0.05, wires=wires)
        found += [
            named(far, f"{gbit * 1000:g} Mbit/s: data parallel", **PARALLEL),
            named(far, f"{gbit * 1000:g} Mbit/s: int4 up, int8 down", rules_codec_down="int8"),
            named(far, f"{gbit * 1000:g} Mbit/s: int4 up, int4 down"),
        ]
    return found


LOADS = (0.35, 0.5, 0.69, 0.85)
"""Shares of a link that fragments take at H = 12, one for each setting."""


def _links(steps: int) -> list[Setting]:
    found = []
    for load in (0.0, *LOADS):
        wires = _loaded(load) if load else Wires(latency_s=0.06, spread=0.3, parameters=1e8)
        for h in (12, 24):
            at = base(steps, learners=8, noise=0.05, wires=wires, rules_sync_every=h, rules_fragments=h)
            what = f"{load:.0%} at H = 12" if load else "ample"
            found.append(named(at, f"{what}: H = {h}"))
    return found


def _experts(steps: int) -> list[Setting]:
    found = []
    for count in (4, 16):
        some = base(steps, shape=Shape(width=64, layers=2, heads=2, experts=count))
        found += [
            named(some, f"{count} experts: data parallel", **PARALLEL),
            named(some, f"{count} experts: RDA"),
            named(some, f"{count} experts: Avg", **AVG),
        ]
    return found


def _gap(steps: int) -> list[Setting]:
    found = []
    for m in (4, 8):
        few = base(steps, learners=m)
        at = f"M = {m}: "
        found += [
            named(few, f"{at}data parallel", **PARALLEL),
            named(few, f"{at}defaults"),
            named(few, f"{at}outer momentum 0.5", rules_outer_momentum=0.5),
            named(few, f"{at}H = 6", rules_sync_every=6, rules_fragments=6),
            named(few, f"{at}adopt: carry", adopt="carry"),
            named(few, f"{at}moments of a fragment reset on adoption", reset_moments=True),
            named(few, f"{at}inner rate × 1.5", peak_lr=1.5 * few.peak_lr),
            named(few, f"{at}no inner warm-up", warmup=1),
            named(few, f"{at}inner optimizer Muon: data parallel", inner="muon", **PARALLEL),
            named(few, f"{at}inner optimizer Muon", inner="muon"),
            named(few, f"{at}lossless codecs", rules_codec_up="f32", rules_codec_down="f32"),
            named(few, f"{at}waiting, τ = 0", pace_quorum=m, pace_lead=0.0, pace_overlap=0.0, pace_grace=0.0),
        ]
    long = base(3 * steps)
    away = Wires(latency_s=0.25)
    eight = base(3 * steps, learners=8)
    # Twice the inner learning rate suits eight times the batch.
    large = base(steps, learners=8, batch=8, peak_lr=6e-3)
    return [
        *found,
        named(long, "three times as long: M = 4, data parallel", **PARALLEL),
        named(long, "three times as long: M = 4, defaults"),
        named(long, "three times as long: M = 4, outer momentum 0.5", rules_outer_momentum=0.5),
        named(base(steps, wires=away), "M = 4: 0.25 s away"),
        named(long, "three times as long: M = 4, 0.25 s away", wires=away),
        named(eight, "three times as long: M = 8, data parallel", **PARALLEL),
        named(eight, "three times as long: M = 8, defaults"),
        named(large, "eight times the batch: M = 8, data parallel", **PARALLEL),
        named(large, "eight times the batch: M = 8, defaults"),
    ]


COMPARED: Mapping[str, Mapping[str, object]] = {
    "thin links": {
        "learners": 8,
        "noise": 0.05,
        "wires": Wires(latency_s=0.06, spread=0.3, gbit_s=0.1, parameters=1e8),
        "rules_sync_every": 24,
        "rules_fragments": 24,
    },
    "failing often": {
        "learners": 4,
        "noise": 0.05,
        "wires": Wires(latency_s=0.06, spread=0.3, gbit_s=1.0, parameters=2e7),
        "failures": Failures(every_s=100.0, repair_s=10.0, checkpoint_s=20.0),
    },
    "fast links, calm": {
        "learners": 2,
        "noise": 0.05,
        "wires": Wires(latency_s=0.005, spread=0.3, gbit_s=100.0, parameters=1e8),
    },
}
"""Three environments to train in: what each changes in the setting."""

IN_MEMORY_S = 5.0
"""Seconds between two checkpoints of the data-parallel job; these checkpoints cost it nothing."""

IN_ONE_PLACE = Wires(latency_s=0.0, spread=0.0)

CURVE = (0.125, 0.25, 0.5, 1.0)
"""Shares of the steps after which undisturbed data parallel is evaluated: this gives the worth of a loss in steps."""


def _compare(steps: int) -> list[Setting]:
    found = []
    for place, what in COMPARED.items():
        there = base(steps, until=TIME, **what)
        job = named(there, "", **PARALLEL)
        if there.failures:
            failures = msgspec.structs.replace(there.failures, checkpoint_s=IN_MEMORY_S)
            job = named(job, "", failures=failures)
        found += [
            named(there, f"{place}: decoupled"),
            named(job, f"{place}: data parallel in one place", wires=IN_ONE_PLACE),
            named(job, f"{place}: data parallel across the links"),
        ]
    for m in (2, 4, 8, 16):
        for share in CURVE:
            alone = base(max(1, round(share * steps)), learners=m, wires=IN_ONE_PLACE, **PARALLEL)
            found.append(named(alone, f"undisturbed data parallel: M = {m}, {alone.steps} steps"))
    found.append(named(base(steps, rules_sync_every=96, **LONG_ROUNDS), "decoupled, equal tokens: M = 4, H = 96"))
    return found


def _curve(steps: int) -> list[Setting]:
    found = []  # `parity` has data parallel after all steps
    for m in (2, 4, 8, 16):
        for share in CURVE[:-1]:
            alone = base(max(1, round(share * steps)), learners=m, wires=IN_ONE_PLACE, **PARALLEL)
            at = f"M = {m}, {alone.steps} steps: data parallel, inner rate"
            found += [
                named(alone, f"{at} {peak:g}", peak_lr=peak) for peak in (2e-3, 3e-3, 4.5e-3, 6e-3, 9e-3, 1.35e-2)
            ]
    return found


EXPERIMENTS = (
    Experiment(
        "heterogeneous",
        "Eight learners, the slowest 18 % behind, steps with 10 % noise: what do waiting and grace cost and gain?",
        "goodput and text score: K = 8 84 % / 54.4 · K = 1 100 % / 51.4 · K = 1 with grace 100 % / 55.3",
        _heterogeneous,
        beside={"goodput": "goodput", "kept": "share of tokens merged"},
    ),
    Experiment(
        "failures",
        "A cluster of eight units cut into M learners, units failing at rising rates, at equal tokens",
        "1.2 million chips, goodput: data parallel 27 %, elastic 58 %, M = 8 88 %; uptime about 100 % from M = 4",
        _failures,
        beside={"goodput": "goodput", "uptime": "uptime"},
        quick=("failures none: M = 1", "failures none: M = 8", "failures often: M = 1", "failures often: M = 8"),
    ),
    Experiment(
        "scavenging",
        "Four learners, then more of them for half of the token budget",
        "time 0.5 + 0.5 / (1 + x) with x times extra compute for half of the tokens, at equal quality",
        _scavenging,
        beside={"wall_virtual_s": "virtual seconds"},
    ),
    Experiment(
        "merge",
        "Avg, RDA, and RDA with Avg for embeddings, as M grows",
        "M = 8: 55.4 against 54.1 for Avg; M = 16: 54.5 against 52.7",
        _merge,
        quick=("M = 4: Avg", "M = 4: RDA everywhere", "M = 4: RDA, embeddings Avg"),
    ),
    Experiment(
        "codecs",
        "Fewer bits up and down",
        "bf16 and int4 up alike (55.4, 55.3); int2 42.6, 1 bit 37.3",
        _codecs,
        beside={"up_bits_per_param": "bits per parameter up", "down_bits_per_param": "… and down"},
    ),
    Experiment(
        "adoption",
        "What a new version does to local work, and how late work may be, at 0.2 s and at 0.5 s one way",
        "α = 0 (overwrite) in the paper, 0.5 (blend) in Streaming DiLoCo",
        _adoption,
        beside={"kept": "share of tokens merged"},
        quick=("adopt: overwrite", "adopt: blend", "adopt: carry"),
    ),
    Experiment(
        "periods",
        "Periods that are fixed, and one that adapts, where rounds take long for one reason or another",
        "none",
        _periods,
        beside={"kept": "share of tokens merged", "period": "steps between two rounds"},
        quick=(
            "calm: H = 12",
            "calm: adapting",
            "links three times too thin: H = 12",
            "links three times too thin: adapting",
        ),
    ),
    Experiment(
        "scale",
        "M and H against data parallel and synchronous DiLoCo; rate and momentum of the outer optimizer",
        "parity with data parallel at large scale; momentum 0.9, outer rate growing with M and H (scaling laws)",
        _scale,
        quick=("data parallel: M = 4", "decoupled: M = 4, H = 12", "synchronous: M = 4, H = 12"),
    ),
    Experiment(
        "regions",
        "Eight learners behind wide-area links, a model of 100 million parameters",
        "90 % utilisation: data parallel 104 Gbit/s, decoupled 1.7 (bf16), 0.43 (int4), at 1 s steps",
        _regions,
        beside={"goodput": "goodput", "kept": "share of tokens merged"},
        quick=("50 Mbit/s: data parallel", "50 Mbit/s: int4 up, int4 down", "1000 Mbit/s: int4 up, int4 down"),
    ),
    Experiment(
        "links",
        "Eight learners behind links of which fragments take 35 to 85 % at H = 12, and half of that at H = 24",
        "none",
        _links,
        beside={"kept": "share of tokens merged"},
        quick=("ample: H = 12", "35% at H = 12: H = 12", "69% at H = 12: H = 12", "69% at H = 12: H = 24"),
    ),
    Experiment(
        "curve",
        "Data parallel after a share of the steps, at several inner rates: what a loss is worth in tokens",
        "none",
        _curve,
        quick=("M = 2, 75 steps: data parallel, inner rate 0.003", "M = 4, 75 steps: data parallel, inner rate 0.003"),
    ),
    Experiment(
        "compare",
        "Decoupled, data parallel in one place and across the links, in three settings, at equal wall time",
        "parity at equal tokens at large scale",
        _compare,
        beside={"goodput": "goodput", "tokens": "tokens processed"},
        quick=tuple(
            f"{place}: {method}"
            for place in ("thin links", "failing often")
            for method in ("decoupled", "data parallel in one place", "data parallel across the links")
        ),
    ),
    Experiment(
        "experts",
        "A mixture of experts: RDA against Avg, and experts that get no tokens between two rounds",
        "68.4 / 54.9 against 68.4 / 55.1 for data parallel",
        _experts,
        beside={"idle_experts": "experts without tokens in a round"},
        quick=("4 experts: data parallel", "4 experts: RDA", "4 experts: Avg"),
    ),
    Experiment(
        "gap",
        "What lies between decoupled training and data parallel at this scale",
        "none: parity was reported at large scale",
        _gap,
        beside={"kept": "share of tokens merged"},
        quick=("M = 4: data parallel", "M = 4: defaults", "M = 4: H = 6"),
    ),
)

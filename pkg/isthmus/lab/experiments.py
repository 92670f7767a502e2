"""The experiments: for each question a list of settings, and what their rows say together. Plain data without torch."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from isthmus.errors import InputError
from isthmus.lab.setting import Failures, Guests, Row, Setting, Shape, Wires
from isthmus.rules import Adoption, Rules, outer_for

STEPS = {"quick": 150, "paper": 600}
"""Steps of one learner where `--steps` says nothing."""

SEEDS = {"quick": 1, "paper": 3}

TOKENS, TIME = "tokens", "time"


@dataclass(frozen=True)
class Experiment:
    """One question."""

    name: str
    question: str
    published: str
    """What was published on it, in a line."""
    settings: Callable[[int], list[Setting]]
    """Given the steps of one learner."""
    quick: Sequence[str] = ()
    """Names of the settings that `--scale quick` runs; all where empty."""
    beside: Mapping[str, str] = field(default_factory=dict)
    """What a picture shows beside the loss: a measure and its title."""


def named(setting: Setting, name: str, **changes: object) -> Setting:
    """Return a setting with another name and some fields changed; `rules_…` and `pace_…` reach into those."""
    rules = {k.removeprefix("rules_"): v for k, v in changes.items() if k.startswith("rules_")}
    pace = {k.removeprefix("pace_"): v for k, v in changes.items() if k.startswith("pace_")}
    own = {k: v for k, v in changes.items() if not k.startswith(("rules_", "pace_"))}
    replace = msgspec.structs.replace
    return replace(
        setting,
        name=name,
        rules=replace(setting.rules, **rules),
        pace=replace(setting.pace, **pace),
        **own,
    )


def base(steps: int, **changes: object) -> Setting:
    """Return the setting that all experiments start from: the library's defaults at lab size."""
    return named(Setting(name="", steps=steps), "", **changes)


WAITING: dict[str, object] = {"pace_lead": 0.0, "pace_grace": 0.0}
"""As in the paper's K = M: whoever is τ steps past an upload waits for its answer."""

HASTY: dict[str, object] = {"pace_quorum": 1, "pace_grace": 0.0, "pace_staleness": 0}
"""As in the paper's K = 1 without grace: the first to arrive is the round, and what is late is dropped."""

SYNCHRONOUS: dict[str, object] = {
    "rules_fragments": 1,
    "pace_lead": 0.0,
    "pace_overlap": 0.0,
    "pace_grace": 0.0,
    "pace_staleness": 0,
}
"""DiLoCo: the whole model at once, and nobody goes on before everybody has merged."""

PARALLEL: dict[str, object] = {"method": "data-parallel"}

LONG_ROUNDS: dict[str, object] = {
    "rules_outer_lr": outer_for("rda", 96)[0],
    "rules_outer_momentum": outer_for("rda", 96)[1],
}

AVG: dict[str, object] = {"rules_merge": "avg", "rules_outer_lr": outer_for("avg", Rules().sync_every)[0]}


def iso(rate: float = outer_for("iso", Rules().sync_every)[0]) -> dict[str, object]:
    """Return what makes a setting's merge isotropic."""
    return {"rules_merge": "iso", "rules_outer_lr": rate}


# --- 1 to 9 -----------------------------------------------------------------------------------------------------------


def _heterogeneous(steps: int) -> list[Setting]:
    # Speeds from 1 down to 0.82 of the fastest.
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
    # A cluster of eight units of compute, cut into M learners; each unit fails at the same rate.
    found = []
    for unit_every_s, what in ((math.inf, "none"), (2400.0, "rare"), (600.0, "often")):
        for m in (1, 2, 4, 8):
            failing = Failures(every_s=unit_every_s * m / 8) if math.isfinite(unit_every_s) else None
            found.append(named(base(steps, learners=m, batch=8 // m), f"failures {what}: M = {m}", failures=failing))
    four = base(steps)
    found.append(named(four, "moments: no failures"))
    for moments, what in (("own", "restored"), ("peer", "a peer's"), ("fresh", "fresh")):
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
    # Learners of mixed speed, so that there is something to be late with, at two distances: a version is back after
    # about three and after about six steps.
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
"""Shares of a link that fragments take at H = 12."""


def _links(steps: int) -> list[Setting]:
    # A period of 12 steps of a second moves 4.125 bits of each of 100 million parameters, up and down.
    found = []
    for load in (0.0, *LOADS):
        gbit = 1e8 * 4.125 / 12 / 1e9 / load if load else None
        wires = Wires(latency_s=0.06, spread=0.3, gbit_s=gbit, parameters=1e8)
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
    # Twice the rate suits eight times the batch.
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


def _parity(steps: int) -> list[Setting]:
    # Every method at several inner rates: a baseline at another's rate is no baseline. One learner that sees in a step
    # what all learners see is data parallel with the same outer step.
    found = []
    for m in (2, 4, 8, 16):
        few, at = base(steps, learners=m), f"M = {m}: "
        one = base(steps, learners=1, batch=m)
        for peak in (3e-3, 4.5e-3, 6e-3, 9e-3, 1.35e-2):
            found.append(named(few, f"{at}data parallel, inner rate {peak:g}", peak_lr=peak, **PARALLEL))
        for peak in (3e-3, 4.5e-3, 6e-3):
            found.append(named(few, f"{at}RDA, inner rate {peak:g}", peak_lr=peak))
        for rate in (0.55, 0.8, 1.1):
            for peak in (3e-3, 4.5e-3, 6e-3)[: 2 if rate > 1 else 3]:
                found.append(named(few, f"{at}iso {rate:g}, inner rate {peak:g}", peak_lr=peak, **iso(rate)))
        for peak in (3e-3, 4.5e-3, 6e-3):
            found += [
                named(one, f"{at}one learner, RDA, inner rate {peak:g}", peak_lr=peak),
                named(one, f"{at}one learner, iso, inner rate {peak:g}", peak_lr=peak, **iso()),
            ]
    return found


def _longer(steps: int) -> list[Setting]:
    # Eight learners; each method at the inner rates that were best, or next to it, after the shortest of the runs.
    found = []
    for times in (3, 5):
        for m in (4, 8):
            long, at = base(times * steps, learners=m), f"M = {m}, {times} × as long: "
            found += [
                named(long, f"{at}data parallel, inner rate {r:g}", peak_lr=r, **PARALLEL) for r in (4.5e-3, 6e-3)
            ]
            found += [named(long, f"{at}RDA, inner rate {r:g}", peak_lr=r) for r in (3e-3, 4.5e-3)]
            found += [named(long, f"{at}iso, inner rate {r:g}", peak_lr=r, **iso()) for r in (3e-3, 4.5e-3)]
    return found


def _outer(steps: int) -> list[Setting]:
    found = []
    for h in (12, 24, 48):
        for m in (4, 8):
            rounds, at = base(steps, learners=m, rules_sync_every=h), f"H = {h}, M = {m}: "
            lr, mu = outer_for("rda", h)
            found.append(named(rounds, f"{at}RDA", rules_outer_lr=lr, rules_outer_momentum=mu))
            found += [
                named(rounds, f"{at}iso {lr:g}, momentum {mu:g}", rules_outer_momentum=mu, **iso(lr))
                for lr, mu in ((0.4, 0.8), (0.55, 0.8), (0.8, 0.8), (0.8, 0.7), (1.1, 0.7), (0.8, 0.5), (1.1, 0.5))
            ]
    return found


def _conditions(steps: int) -> list[Setting]:
    eight = base(steps, learners=8)
    away = named(eight, "", noise=0.1, wires=Wires(latency_s=0.2, spread=0.5))
    far = named(away, "", wires=Wires(latency_s=0.5, spread=0.5))
    found = {
        "calm": eight,
        "failing often": base(steps, failures=Failures(every_s=100.0, repair_s=5.0, checkpoint_s=10.0)),
        "mixed speeds": named(
            eight, "", step_s=tuple(round(1.0 / (1.0 - 0.18 * m / 7), 4) for m in range(8)), noise=0.1
        ),
        "4 learners": base(steps),
        "16 for half of the tokens": base(steps, guests=Guests(count=12, come=0.25, go=0.75)),
        "0.2 s away": away,
        "0.2 s away, late work dropped": named(away, "", pace_staleness=0),
        "0.2 s away, four versions late": named(away, "", pace_staleness=4),
        "0.2 s away, carry": named(away, "", adopt="carry"),
        "0.5 s away": far,
        "0.5 s away, carry": named(far, "", adopt="carry"),
        "0.5 s away, H = 24": named(far, "", rules_sync_every=24, rules_fragments=24),
        "float32 both ways": named(eight, "", rules_codec_up="f32", rules_codec_down="f32"),
        "int8 both ways": named(eight, "", rules_codec_up="int8", rules_codec_down="int8"),
        "4 experts": base(steps, shape=Shape(width=64, layers=2, heads=2, experts=4)),
        "inner optimizer Muon": named(eight, "", inner="muon"),
    }
    return [
        named(setting, f"{what}: {merge}", **rule)
        for what, setting in found.items()
        for merge, rule in {"RDA": {}, "iso": iso()}.items()
    ]


def _blocks(steps: int) -> list[Setting]:
    # Sides of this model's matrices are 96, 288 and 384.
    eight = base(steps, learners=8)
    return [named(eight, "RDA")] + [
        named(eight, f"iso, blocks of {block}" if block else "iso, whole", rules_iso_block=block, **iso())
        for block in (0, 96, 48, 24, 12)
    ]


def _variants(steps: int) -> list[Setting]:
    eight = base(steps, learners=8)
    late = named(eight, "", noise=0.1, wires=Wires(latency_s=0.2, spread=0.5), pace_staleness=4)
    found = [named(eight, f"RDA{', ' if v else ''}{v}", variant=v) for v in ("", "restart where opposed")]
    for v in ("", "restart every 8", "restart every 16", "restart where opposed", "momentum of lag"):
        found.append(named(eight, f"iso{', ' if v else ''}{v}", variant=v, **iso()))
    for rate, beta in ((0.8, 0.9), (1.6, 0.9), (3.2, 0.9), (1.6, 0.8)):
        free = named(eight, f"iso {rate:g}, schedule-free, β = {beta:g}", variant="schedule-free", **iso(rate))
        found.append(named(free, free.name, rules_outer_momentum=beta))
    for merge, rule in {"RDA": {}, "iso": iso()}.items():
        found += [
            named(late, f"0.2 s away, four versions late: {merge}", **rule),
            named(late, f"0.2 s away, four versions late: {merge}, late filtered", variant="late filtered", **rule),
        ]
    return found


LARGER = {
    "0.8M parameters": Shape(width=128, layers=4, heads=4),
    "6.4M parameters": Shape(width=256, layers=8, heads=4),
}
"""The demo's model, and one of eight times as many."""


def _larger(steps: int) -> list[Setting]:
    found = []
    for size, shape in LARGER.items():
        eight, at = base(steps, learners=8, shape=shape), f"{size}: "
        for peak in (1.5e-3, 3e-3, 4.5e-3):
            found.append(named(eight, f"{at}data parallel, inner rate {peak:g}", peak_lr=peak, **PARALLEL))
        one = base(steps, learners=1, batch=8, shape=shape)
        for peak in (3e-3, 4.5e-3):
            found.append(named(one, f"{at}one learner, iso, inner rate {peak:g}", peak_lr=peak, **iso()))
        for peak in (1.5e-3, 3e-3):
            found.append(named(eight, f"{at}RDA, inner rate {peak:g}", peak_lr=peak))
        for block in (0, 128, 64, 32):
            what = f"blocks of {block}" if block else "whole"
            peaks = (3e-3,) if block else (1.5e-3, 3e-3, 4.5e-3)
            found += [
                named(eight, f"{at}iso, {what}, inner rate {peak:g}", peak_lr=peak, rules_iso_block=block, **iso())
                for peak in peaks
            ]
    return found


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
"""Three places to train in."""

IN_MEMORY_S = 5.0
"""Between two checkpoints of the data-parallel job, which cost it nothing."""

IN_ONE_PLACE = Wires(latency_s=0.0, spread=0.0)

CURVE = (0.125, 0.25, 0.5, 1.0)
"""Shares of the steps after which undisturbed data parallel is judged: that says what a loss is worth."""


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


EXPERIMENTS = {
    e.name: e
    for e in (
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
            "parity",
            "Merges that keep every direction against data parallel, each at several inner rates",
            "parity at large scale (Decoupled DiLoCo); isotropic merging closes the gap to it (arXiv 2607.03011)",
            _parity,
            quick=tuple(
                f"M = 4: {what}, inner rate 0.003" for what in ("data parallel", "RDA", "iso 0.8", "one learner, iso")
            ),
        ),
        Experiment(
            "longer",
            "The same for three and five times as many steps",
            "none",
            _longer,
            quick=("M = 4, 3 × as long: RDA, inner rate 0.003", "M = 4, 3 × as long: iso, inner rate 0.003"),
        ),
        Experiment(
            "outer",
            "Outer rate and momentum for isotropic merges, by H and M",
            "none",
            _outer,
            quick=(
                "H = 12, M = 4: RDA",
                "H = 12, M = 4: iso 0.8, momentum 0.8",
                "H = 48, M = 4: iso 0.8, momentum 0.7",
            ),
        ),
        Experiment(
            "conditions",
            "Isotropic merges beside RDA where learners fail, differ, come and go, are late or far away",
            "none",
            _conditions,
            beside={"kept": "share of tokens merged"},
            quick=("4 learners: RDA", "4 learners: iso", "failing often: RDA", "failing often: iso"),
        ),
        Experiment(
            "blocks",
            "What it costs to cut matrices into blocks that are isotropic by themselves",
            "none",
            _blocks,
            quick=("RDA", "iso, whole", "iso, blocks of 48"),
        ),
        Experiment(
            "larger",
            "The demo's model and one eight times its size, eight learners",
            "parity with data parallel at large scale (Decoupled DiLoCo)",
            _larger,
            quick=("0.8M parameters: RDA, inner rate 0.003", "0.8M parameters: iso, whole, inner rate 0.003"),
        ),
        Experiment(
            "variants",
            "Other outer steps: momentum restarted, chosen by what is measured, averaged away; late updates filtered",
            "schedule-free outer steps and filters for stale updates help (each at its own)",
            _variants,
            quick=("iso", "iso, restart where opposed", "iso 1.6, schedule-free, β = 0.9"),
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
}


def chosen(name: str, scale: str, steps: int | None) -> list[Setting]:
    """Return an experiment's settings at a scale. Raises `InputError` for an experiment that does not exist."""
    if name not in EXPERIMENTS:
        raise InputError(f"there is no experiment {name}: choose one of {', '.join(EXPERIMENTS)}")
    e = EXPERIMENTS[name]
    found = e.settings(steps or STEPS[scale])
    return [s for s in found if s.name in e.quick] if scale == "quick" and e.quick else found


@dataclass(frozen=True)
class Spread:
    """A mean over seeds and the standard deviation among them (0 for one seed)."""

    mean: float
    deviation: float


MEASURED = (
    "val_loss",
    "goodput",
    "uptime",
    "participation",
    "up_bits_per_param",
    "down_bits_per_param",
    "wall_virtual_s",
    "tokens",
    "kept",
)


def summary(rows: Sequence[Row]) -> dict[str, dict[str, Spread]]:
    """Return, by setting, mean and spread over seeds of everything measured."""
    grouped: dict[str, list[Row]] = {}
    for row in rows:
        grouped.setdefault(row.setting, []).append(row)
    found = {}
    for name, of_one in grouped.items():
        values = {what: [row.measured(what) for row in of_one] for what in (*MEASURED, *of_one[0].extra)}
        found[name] = {what: _spread([x for x in v if x is not None]) for what, v in values.items()}
    return found


def _spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0)

"""Experiments on isotropic merges."""

from isthmus.format.rules import outer_for
from isthmus_lab.training.experiment import HASTY, ISO, PARALLEL, WAITING, Experiment, base, iso, named
from isthmus_lab.training.setting import Failures, Guests, Moments, Setting, Shape, Wires

BEYOND = {2: (1.4e-3, 2e-3), 4: (2e-3,), 8: (9e-3,), 16: (9e-3,)}
"""Additional inner learning rates, by M, where the best of the common rates would be at the edge of their range."""


def _parity(steps: int) -> list[Setting]:
    # Every method runs at several inner rates: at another method's best rate, a baseline is unfair. One learner whose
    # step has the batches of all learners is data parallel with the same outer step.
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
        found += [
            named(few, f"{at}iso by default, inner rate {peak:g}", peak_lr=peak, **ISO) for peak in (3e-3, 4.5e-3, 6e-3)
        ]
        for peak in (3e-3, 4.5e-3, 6e-3):
            found += [
                named(one, f"{at}one learner, RDA, inner rate {peak:g}", peak_lr=peak),
                named(one, f"{at}one learner, iso, inner rate {peak:g}", peak_lr=peak, **iso()),
                named(one, f"{at}one learner, iso by default, inner rate {peak:g}", peak_lr=peak, **ISO),
            ]
        for peak in BEYOND[m]:
            at = f"M = {m}: {{}}, inner rate {peak:g}"
            found += [
                named(few, at.format("RDA"), peak_lr=peak),
                named(few, at.format("iso by default"), peak_lr=peak, **ISO),
                named(one, at.format("one learner, RDA"), peak_lr=peak),
                named(one, at.format("one learner, iso by default"), peak_lr=peak, **ISO),
            ]
            if peak < 3e-3:
                found.append(named(few, at.format("data parallel"), peak_lr=peak, **PARALLEL))
    return found


def _longer(steps: int) -> list[Setting]:
    # Each method runs at the inner rates that were best, or next to the best, in the shortest runs.
    found = []
    for times in (3, 5):
        for m in (4, 8):
            long, at = base(times * steps, learners=m), f"M = {m}, {times} × as long: "
            found += [
                named(long, f"{at}data parallel, inner rate {r:g}", peak_lr=r, **PARALLEL) for r in (4.5e-3, 6e-3)
            ]
            found += [named(long, f"{at}RDA, inner rate {r:g}", peak_lr=r) for r in (3e-3, 4.5e-3)]
            found += [named(long, f"{at}iso, inner rate {r:g}", peak_lr=r, **iso()) for r in (3e-3, 4.5e-3)]
            found += [named(long, f"{at}iso by default, inner rate {r:g}", peak_lr=r, **ISO) for r in (3e-3, 4.5e-3)]
            one = base(times * steps, learners=1, batch=m)
            found += [
                named(one, f"{at}one learner, iso by default, inner rate {r:g}", peak_lr=r, **ISO)
                for r in (3e-3, 4.5e-3)
            ]
    return found


def _outer(steps: int) -> list[Setting]:
    found = []
    for h in (12, 24, 48):
        for m in (4, 8):
            rounds, at = base(steps, learners=m, rules_sync_every=h), f"H = {h}, M = {m}: "
            lr, mu = outer_for("rda", h)
            found.append(named(rounds, f"{at}RDA", rules_outer_lr=lr, rules_outer_momentum=mu))
            found += [
                named(rounds, f"{at}iso {lr:g}, momentum {mu:g}", **iso(lr, mu))
                for lr, mu in (
                    (0.4, 0.8),
                    (0.55, 0.8),
                    (0.8, 0.8),
                    (1.1, 0.8),
                    (0.8, 0.7),
                    (1.1, 0.7),
                    (1.5, 0.7),
                    (0.8, 0.5),
                    (1.1, 0.5),
                    (1.5, 0.5),
                )
            ]
    for h in (24, 48):
        for m in (2, 16):
            few, at = base(steps, learners=m, rules_sync_every=h), f"H = {h}, M = {m}: "
            lr, mu = outer_for("rda", h)
            found.append(named(few, f"{at}RDA", rules_outer_lr=lr, rules_outer_momentum=mu))
            found.append(named(few, f"{at}iso 1.1, momentum 0.7", **iso(1.1, 0.7)))
        # One learner that takes all batches is data parallel with the same outer step.
        for m in (2, 4, 8, 16):
            one = base(steps, learners=1, batch=m, rules_sync_every=h)
            found.append(named(one, f"H = {h}, M = {m}: one learner, iso 1.1, momentum 0.7", **iso(1.1, 0.7)))
    # Rates that are best after few rounds may be too high after many.
    for h in (12, 24, 48):
        rounds, at = base(3 * steps, learners=8, rules_sync_every=h), f"H = {h}, M = 8, 3 × as long: "
        lr, mu = outer_for("rda", h)
        found.append(named(rounds, f"{at}RDA", rules_outer_lr=lr, rules_outer_momentum=mu))
        found += [
            named(rounds, f"{at}iso {lr:g}, momentum {mu:g}", **iso(lr, mu))
            for lr, mu in ((0.8, 0.7), (1.1, 0.7), (1.5, 0.7))
        ]
    return found


def _conditions(steps: int) -> list[Setting]:
    eight = base(steps, learners=8)
    away = named(eight, "", noise=0.1, wires=Wires(latency_s=0.2, spread=0.5))
    far = named(away, "", wires=Wires(latency_s=0.5, spread=0.5))
    mixed = named(eight, "", step_s=tuple(round(1.0 / (1.0 - 0.18 * m / 7), 4) for m in range(8)), noise=0.1)
    found = {
        "calm": eight,
        "8 learners, failing often": named(
            eight, "", failures=Failures(every_s=100.0, repair_s=5.0, checkpoint_s=10.0)
        ),
        "4 learners, failing often": base(steps, failures=Failures(every_s=100.0, repair_s=5.0, checkpoint_s=10.0)),
        "mixed speeds": mixed,
        "mixed speeds, K = 8, waiting": named(mixed, "", pace_quorum=8, **WAITING),
        "mixed speeds, K = 1, no grace": named(mixed, "", **HASTY),
        "4 learners": base(steps),
        "4 learners, 8 for half of the tokens": base(steps, guests=Guests(count=4, come=0.25, go=0.75)),
        "4 learners, 16 for half of the tokens": base(steps, guests=Guests(count=12, come=0.25, go=0.75)),
        "0.2 s away": away,
        "0.2 s away, late work dropped": named(away, "", pace_staleness=0),
        "0.2 s away, four versions late": named(away, "", pace_staleness=4),
        "0.2 s away, carry": named(away, "", adopt="carry"),
        "0.5 s away": far,
        "0.5 s away, carry": named(far, "", adopt="carry"),
        "0.5 s away, H = 24": named(far, "", rules_sync_every=24, rules_fragments=24),
        "float32 both ways": named(eight, "", rules_codec_up="f32", rules_codec_down="f32"),
        "int8 both ways": named(eight, "", rules_codec_up="int8", rules_codec_down="int8"),
        "4 learners, 4 experts": base(steps, shape=Shape(width=64, layers=2, heads=2, experts=4)),
        "inner optimizer Muon": named(eight, "", inner="muon"),
    }
    return [
        *(
            named(setting, f"{what}: {merge}", **rule)
            for what, setting in found.items()
            for merge, rule in {"RDA": {}, "iso": iso()}.items()
        ),
        named(base(steps), "4 learners: iso by default", **ISO),
    ]


def _blocks(steps: int) -> list[Setting]:
    # The sides of this model's matrices are 96, 288 and 384.
    eight = base(steps, learners=8)
    return [named(eight, "RDA")] + [
        named(eight, f"iso, blocks of {block}" if block else "iso, whole", rules_iso_block=block, **iso())
        for block in (0, 96, 48, 24, 12)
    ]


def _cuts(steps: int) -> list[Setting]:
    # With 24 fragments, a fragment has a third of the size of the largest matrix.
    eight = base(steps, learners=8, rules_fragments=24)
    return [
        named(eight, f"{merge}, {what}", variant=variant, **rule)
        for merge, rule in {"RDA": {}, "iso": iso()}.items()
        for what, variant in {"whole tensors": "", "tensors cut": "tensors cut"}.items()
    ]


def _variants(steps: int) -> list[Setting]:
    eight, four = base(steps, learners=8), base(steps)
    late = named(eight, "", noise=0.1, wires=Wires(latency_s=0.2, spread=0.5), pace_staleness=4)
    hasty = named(late, "", **HASTY | {"pace_staleness": 4})
    found = [named(eight, f"RDA{', ' if v else ''}{v}", variant=v) for v in ("", "restart where opposed")]
    for v in ("", "restart every 8", "restart every 16", "restart where opposed", "momentum of lag"):
        found.append(named(eight, f"iso{', ' if v else ''}{v}", variant=v, **iso()))
    for rate, beta in ((0.8, 0.9), (1.6, 0.9), (3.2, 0.9), (1.6, 0.8)):
        name = f"iso {rate:g}, schedule-free, β = {beta:g}"
        found.append(named(eight, name, variant="schedule-free", **iso(rate, beta)))
    for merge, rule in {"RDA": {}, "iso": iso()}.items():
        found += [
            named(late, f"0.2 s away, four versions late: {merge}", **rule),
            named(late, f"0.2 s away, four versions late: {merge}, late filtered", variant="late filtered", **rule),
            named(late, f"0.2 s away: {merge}, overwritten fed back", variant="overwritten fed back", **rule),
            named(hasty, f"0.2 s away, nobody waits: {merge}", **rule),
            named(hasty, f"0.2 s away, nobody waits: {merge}, late filtered", variant="late filtered", **rule),
        ]
    found += [named(eight, f"iso, {v}", variant=v, **iso()) for v in ("H 6, 12, 24", "H 24, 12, 6")]
    whose: dict[Moments, str] = {
        "own": "restored",
        "peer": "a peer's",
        "mean": "the mean of all peers'",
        "fresh": "fresh",
    }
    for moments, what in whose.items():
        failing = Failures(every_s=100.0, repair_s=5.0, checkpoint_s=10.0, moments=moments)
        found.append(named(four, f"moments: {what}: iso", failures=failing, **iso()))
    return found


LARGER = {
    "0.8M parameters": Shape(width=128, layers=4, heads=4),
    "6.4M parameters": Shape(width=256, layers=8, heads=4),
}
"""The demo's model, and one with eight times as many parameters."""


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


EXPERIMENTS = (
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
        quick=(
            "4 learners: RDA",
            "4 learners: iso",
            "4 learners: iso by default",
            "4 learners, failing often: RDA",
            "4 learners, failing often: iso",
        ),
    ),
    Experiment(
        "blocks",
        "What it costs to cut matrices into blocks that are isotropic by themselves",
        "none",
        _blocks,
        quick=("RDA", "iso, whole", "iso, blocks of 48"),
    ),
    Experiment(
        "cuts",
        "What it costs that tensors larger than a fragment are cut into rows, each part merged by itself",
        "none",
        _cuts,
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
)

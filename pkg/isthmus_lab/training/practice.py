"""Experiments on what people do in practice: adapters, and many learners with long rounds."""

from isthmus.format.rules import outer_for
from isthmus_lab.training.experiment import PARALLEL, Experiment, base, named
from isthmus_lab.training.setting import Setting

MEMORYLESS = 0.28
"""Outer rate without momentum that others found best for adapters."""

RULES = ("iso", "rda", "avg")


def _outer(rule: str, period: int) -> dict[str, object]:
    rate, momentum = outer_for(rule, period)
    return {"rules_merge": rule, "rules_outer_lr": rate, "rules_outer_momentum": momentum}


def _memoryless(rule: str, rate: float) -> dict[str, object]:
    return {"rules_merge": rule, "rules_outer_lr": rate, "rules_outer_momentum": 0.0}


def _adapters(steps: int) -> list[Setting]:
    found = []
    for m in (4, 8):
        for period in (16, 64, 256):
            few = base(steps, learners=m, adapters=8, rules_sync_every=period)
            for peak in (3e-3, 1e-2, 3e-2):
                at = f"M = {m}, H = {period}: {{}}, inner rate {peak:g}"
                for rule in RULES:
                    found.append(named(few, at.format(rule), peak_lr=peak, **_outer(rule, period)))
                    for rate in (MEMORYLESS, 0.7, 1.0):
                        how = f"{rule}, no momentum, outer rate {rate:g}"
                        found.append(named(few, at.format(how), peak_lr=peak, **_memoryless(rule, rate)))
        for peak in (3e-3, 1e-2, 3e-2):
            few = base(steps, learners=m, adapters=8)
            found.append(named(few, f"M = {m}: data parallel, inner rate {peak:g}", peak_lr=peak, **PARALLEL))
    for rank in (2, 16):
        few = base(steps, adapters=rank, rules_sync_every=64)
        for peak in (3e-3, 1e-2, 3e-2):
            at = f"rank {rank}, H = 64: {{}}, inner rate {peak:g}"
            found += [named(few, at.format(rule), peak_lr=peak, **_outer(rule, 64)) for rule in RULES]
    return found


def _many(steps: int) -> list[Setting]:
    found = []
    for m in (16, 32, 64):
        for period in (12, 50, 100, 500):
            many, at = base(steps, learners=m, rules_sync_every=period), f"M = {m}, H = {period}: {{}}"
            for rule in RULES[:2]:
                rate, momentum = outer_for(rule, period)
                found.append(named(many, at.format(rule), **_outer(rule, period)))
                found.append(named(many, at.format(f"{rule}, no momentum, outer rate 1"), **_memoryless(rule, 1.0)))
                effective = round(rate / (1.0 - momentum), 3)
                how = f"{rule}, no momentum, outer rate {effective:g}"
                if effective != 1.0:
                    found.append(named(many, at.format(how), **_memoryless(rule, effective)))
                restarted = named(many, at.format(f"{rule}, restart every 8"), **_outer(rule, period))
                found.append(named(restarted, restarted.name, variant="restart every 8"))
        for peak in (3e-3, 6e-3):
            whole = base(steps, learners=m)
            found.append(named(whole, f"M = {m}: data parallel, inner rate {peak:g}", peak_lr=peak, **PARALLEL))
            one = base(steps, learners=1, batch=m)
            found.append(named(one, f"M = {m}: one learner, RDA, inner rate {peak:g}", peak_lr=peak))
    return found


EXPERIMENTS = (
    Experiment(
        "adapters",
        "Low-rank adapters on a frozen model: which merge, which momentum, how long a period",
        "iso 0.008 better at H = 16, level at 64, 0.018 worse at 256; no momentum at outer rate 0.28 ahead of Nesterov",
        _adapters,
        quick=("M = 4, H = 16: iso, inner rate 0.01", "M = 4, H = 16: rda, inner rate 0.01"),
    ),
    Experiment(
        "many",
        "Sixteen to 64 learners with periods of 12 to 500 steps: which merge, and is momentum of use",
        "none with 32 learners and more and a period of 100 and more",
        _many,
        quick=("M = 16, H = 12: rda", "M = 16, H = 12: iso"),
    ),
)

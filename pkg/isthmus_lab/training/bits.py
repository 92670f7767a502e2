"""Experiments on bits per parameter: what a codec with fewer bits costs in loss, up, down and both ways."""

from isthmus_lab.training.experiment import ISO, Experiment, base, named
from isthmus_lab.training.setting import Failures, Setting, Wires

RATES = ("q3", "q2", "q1.5", "q1", "q0.75")

GIVEN_UP: dict[str, object] = {"rules_error_feedback": False, "rules_feedback_down": False}

METHODS: dict[str, dict[str, object]] = {
    "RDA": {},
    "RDA, nothing fed back": GIVEN_UP,
    "iso": ISO,
    "iso, nothing fed back": ISO | GIVEN_UP,
    "iso sent": ISO | GIVEN_UP | {"rules_isotropic_up": True},
    "iso sent, fed back": ISO | {"rules_isotropic_up": True},
    "iso sent, RDA": ISO | GIVEN_UP | {"rules_isotropic_up": True, "rules_merge": "rda"},
}
"""`iso sent`: learners send the polar factors of their differences (`Rules.isotropic_up`)."""


def _bits(steps: int) -> list[Setting]:
    found = []
    for m in (4, 8):
        few = base(steps, learners=m)
        for method, rules in METHODS.items():
            at = f"M = {m}, {method}: "
            for name in ("f32", "int8", "int4", *RATES):
                both = named(few, f"{at}{name} both ways", rules_codec_up=name, rules_codec_down=name, **rules)
                found.append(both)
                if name != "f32":
                    found.append(named(both, f"{at}{name} up", rules_codec_down="f32"))
                    found.append(named(both, f"{at}{name} down", rules_codec_up="f32"))
        for method in ("RDA", "iso"):
            for name in ("int4", "q1.5"):
                half = f"M = {m}, {method}: {name} both ways, residuals in bfloat16"
                codecs = {"rules_codec_up": name, "rules_codec_down": name}
                found.append(named(few, half, variant="residuals in bfloat16", **codecs, **METHODS[method]))
        # SparseLoCo's rule is the mean, at its own outer rate, without outer momentum. int8 transports the kept values.
        for kept in (64, 128, 256):
            for lr in (0.7, 1.0):
                rule = {"rules_merge": "avg", "rules_outer_lr": lr, "rules_outer_momentum": 0.0}
                codecs = {"rules_codec_up": "int8", "rules_codec_down": "f32"}
                name = f"M = {m}, top {kept} of 4,096 in two bits, outer {lr:g} without momentum"
                found.append(named(base(steps, learners=m), name, variant=f"sparse {kept}", **rule, **codecs))
    return found


def _bits_longer(steps: int) -> list[Setting]:
    # Without feedback, the loss may show what codecs drop only after many rounds.
    found = []
    for m in (4, 8):
        long = base(5 * steps, learners=m)
        for method in ("RDA", "RDA, nothing fed back", "iso", "iso sent"):
            for name in ("f32", "int4", "q3", "q2", "q1.5"):
                both = {"rules_codec_up": name, "rules_codec_down": name}
                found.append(named(long, f"M = {m}, {method}: {name} both ways", **both, **METHODS[method]))
    return found


def _bits_strained(steps: int) -> list[Setting]:
    # Fewer bits are harder where feedback is lost with its learner, or is old when it is merged.
    conditions: dict[str, dict[str, object]] = {
        "failures": {"failures": Failures(every_s=100.0, repair_s=5.0, checkpoint_s=10.0)},
        "speeds from 1 to 1.3": {"step_s": (1.0, 1.0, 1.0, 1.0, 1.3), "noise": 0.1},
        "0.2 s away, mixed speeds": {
            "step_s": (1.0, 1.0, 1.0, 1.0, 1.3),
            "noise": 0.1,
            "wires": Wires(latency_s=0.2, spread=0.5),
        },
    }
    found = []
    for what, condition in conditions.items():
        eight = base(steps, learners=8, **condition)
        for method in ("RDA", "iso", "iso sent"):
            for name in ("f32", "int4", "q3", "q2", "q1.5"):
                both = {"rules_codec_up": name, "rules_codec_down": name}
                found.append(named(eight, f"{what}, {method}: {name} both ways", **both, **METHODS[method]))
    return found


_BITS = {"up_bits_per_param": "bits per parameter up", "down_bits_per_param": "… and down"}

EXPERIMENTS = (
    Experiment(
        "bits",
        "Loss against bits a parameter, up, down and both ways; payloads as they were stored",
        "int4 up costs nothing (55.3 against 55.4); int2 42.6, 1 bit 37.3",
        _bits,
        beside=_BITS,
        quick=("M = 4, RDA: f32 both ways", "M = 4, RDA: int4 both ways", "M = 4, iso sent: q1.5 both ways"),
    ),
    Experiment(
        "bits-longer",
        "The same after five times as many steps",
        "none",
        _bits_longer,
        beside=_BITS,
        quick=("M = 4, iso: int4 both ways", "M = 4, iso sent: q1.5 both ways"),
    ),
    Experiment(
        "bits-strained",
        "The same where learners fail, differ in speed, and are far away",
        "none",
        _bits_strained,
        beside=_BITS,
        quick=("failures, RDA: f32 both ways", "failures, iso sent: q1.5 both ways"),
    ),
)

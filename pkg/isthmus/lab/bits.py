"""Experiments on bits: what a codec with fewer of them costs in loss, each way and both."""

from isthmus.lab.experiment import ISO, Experiment, base, named
from isthmus.lab.setting import Failures, Setting, Wires

RATES = ("q3", "q2", "q1.5", "q1", "q0.75")

MERGES: dict[str, dict[str, object]] = {"RDA": {}, "iso": ISO}


def _bits(steps: int) -> list[Setting]:
    found = []
    for m in (4, 8):
        for merge, rules in MERGES.items():
            few, at = base(steps, learners=m), f"M = {m}, {merge}: "
            for name in ("f32", "int8", "int4", *RATES):
                both = named(few, f"{at}{name} both ways", rules_codec_up=name, rules_codec_down=name, **rules)
                found.append(both)
                if name != "f32":
                    found.append(named(both, f"{at}{name} up", rules_codec_down="f32"))
                    found.append(named(both, f"{at}{name} down", rules_codec_up="f32"))
                if name in ("int4", *RATES):
                    off = named(both, f"{at}{name} both ways, nothing fed back", rules_error_feedback=False)
                    found += [off, named(off, f"{at}{name} up, nothing fed back", rules_codec_down="f32")]
    return found


def _bits_strained(steps: int) -> list[Setting]:
    # What makes fewer bits harder: feedback that is lost with its learner, or old when it is merged.
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
        for merge, rules in MERGES.items():
            for name in ("f32", "int4", *RATES[1:]):
                both = {"rules_codec_up": name, "rules_codec_down": name}
                found.append(named(eight, f"{what}, {merge}: {name} both ways", **both, **rules))
    return found


_BITS = {"up_bits_per_param": "bits per parameter up", "down_bits_per_param": "… and down"}

EXPERIMENTS = (
    Experiment(
        "bits",
        "Loss against bits a parameter, up, down and both ways; payloads as they were stored",
        "int4 up costs nothing (55.3 against 55.4); int2 42.6, 1 bit 37.3 without outer momentum's care",
        _bits,
        beside=_BITS,
        quick=("M = 4, RDA: f32 both ways", "M = 4, RDA: int4 both ways", "M = 4, RDA: q1.5 both ways"),
    ),
    Experiment(
        "bits-strained",
        "The same where learners fail, differ in speed, and are far away",
        "none",
        _bits_strained,
        beside=_BITS,
        quick=("failures, RDA: f32 both ways", "failures, RDA: q1.5 both ways"),
    ),
)

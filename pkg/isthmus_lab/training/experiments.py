"""All experiments by name, and the scales at which they run."""

from isthmus.errors import InputError
from isthmus_lab.training import bits, decoupled, hostile, isotropic, practice
from isthmus_lab.training.names import NAMES
from isthmus_lab.training.setting import Setting

STEPS = {"quick": 150, "paper": 600}
"""Steps of one learner by scale, if `--steps` is not given."""

SEEDS = {"quick": 1, "paper": 3}

EXPERIMENTS = {e.name: e for module in (decoupled, isotropic, bits, hostile, practice) for e in module.EXPERIMENTS}

if tuple(EXPERIMENTS) != NAMES:
    raise AssertionError(f"isthmus_lab/training/names.py has to say: {', '.join(EXPERIMENTS)}")


def chosen(name: str, scale: str, steps: int | None) -> list[Setting]:
    """Return an experiment's settings at a scale. Raises `InputError` for an experiment that does not exist."""
    if name not in EXPERIMENTS:
        raise InputError(f"there is no experiment {name}: choose one of {', '.join(EXPERIMENTS)}, or a file NAME.toml")
    e = EXPERIMENTS[name]
    found = e.settings(steps or STEPS[scale])
    return [s for s in found if s.name in e.quick] if scale == "quick" and e.quick else found

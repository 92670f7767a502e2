"""An experiment, the setting that all of them start from, and what several change in it. Plain data without torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from isthmus.format.rules import Rules, outer_for
from isthmus_lab.training.setting import Setting


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
    """Return a setting with another name and some fields changed; `rules_…` and `pace_…` reach into those.

    The period is fixed where nothing is said of `rules_sync_every_max`, also where H is changed.
    """
    if "rules_sync_every" in changes:
        changes = {"rules_sync_every_max": changes["rules_sync_every"]} | changes
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
    return named(Setting(name="", steps=steps), "", **{"rules_sync_every": Rules().sync_every} | changes)


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


def iso(rate: float = 0.8, momentum: float = 0.8) -> dict[str, object]:
    """Return what makes a setting's merge isotropic; where nothing is said, at the outer rates that most experiments
    were made with, before `outer` and `parity` found the default's a little better."""
    return {"rules_merge": "iso", "rules_outer_lr": rate, "rules_outer_momentum": momentum}


ISO = iso(*outer_for("iso", Rules().sync_every))
"""As runs are by default."""

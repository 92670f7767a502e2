"""An experiment, the setting that all experiments start from, and changes that several share: plain data, no torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from isthmus.format.rules import Rules, outer_for
from isthmus_lab.training.setting import Setting


@dataclass(frozen=True)
class Experiment:
    """One question, and the settings that answer it."""

    name: str
    question: str
    published: str
    """Published results on this question, in one line."""
    settings: Callable[[int], list[Setting]]
    """Returns the settings for a number of steps per learner."""
    quick: Sequence[str] = ()
    """Names of the settings that `--scale quick` runs; empty: all."""
    beside: Mapping[str, str] = field(default_factory=dict)
    """Measures that a picture shows beside the loss, with their titles."""


def named(setting: Setting, name: str, **changes: object) -> Setting:
    """Return a setting with another name and changed fields; `rules_x` and `pace_x` change field x of rules or pace.

    A change of `rules_sync_every` (H) also sets `rules_sync_every_max` unless that is given: the period stays fixed.
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
"""As in the paper's K = M: a learner that is τ steps past an upload waits for the new version."""

HASTY: dict[str, object] = {"pace_quorum": 1, "pace_grace": 0.0, "pace_staleness": 0}
"""As in the paper's K = 1 without grace: the first update to arrive closes the round, and late updates are dropped."""

SYNCHRONOUS: dict[str, object] = {
    "rules_fragments": 1,
    "pace_lead": 0.0,
    "pace_overlap": 0.0,
    "pace_grace": 0.0,
    "pace_staleness": 0,
}
"""DiLoCo: the whole model is one fragment, and every learner waits for the merge before it continues."""

PARALLEL: dict[str, object] = {"method": "data-parallel"}

LONG_ROUNDS: dict[str, object] = {
    "rules_outer_lr": outer_for("rda", 96)[0],
    "rules_outer_momentum": outer_for("rda", 96)[1],
}

AVG: dict[str, object] = {"rules_merge": "avg", "rules_outer_lr": outer_for("avg", Rules().sync_every)[0]}


def iso(rate: float = 0.8, momentum: float = 0.8) -> dict[str, object]:
    """Return the changes that make a setting's merge isotropic.

    The defaults are the outer rate and momentum of most experiments. The later experiments `outer` and `parity` found
    the library's defaults a little better.
    """
    return {"rules_merge": "iso", "rules_outer_lr": rate, "rules_outer_momentum": momentum}


ISO = iso(*outer_for("iso", Rules().sync_every))
"""Isotropic merges with the library's default outer rate and momentum."""

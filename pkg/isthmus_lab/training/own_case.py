"""One's own case for the lab, from a TOML file, and settings that are merged by a function of one's own."""

import enum
import math
import tomllib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from isthmus.errors import InputError, plainly
from isthmus.format.rules import Count, MergeRule, Pace, Rules, outer_for
from isthmus_lab.training.experiment import Experiment
from isthmus_lab.training.setting import Failures, Guests, Setting, Shape, Wires
from isthmus_services.settings.resolve import did_you_mean, fields
from isthmus_services.settings.shared import ArithmeticOfRun, PaceOfRun

EXAMPLE = """\
# A case of one's own for the lab: isthmus simulate training my.toml --plot my.png
# Every field may be left out. The values are the defaults; those after a # in front of a name are examples.

question = "What is asked, as the title of table and picture"
seeds = 1                     # runs of each case, with seeds 0, 1, …

# The task: a byte-level GPT that learns Python source code. A window is 128 bytes.
learners = 4                  # each trains on its own part of the text
steps = 150                   # optimizer steps of a learner, on average: faster learners take more
batch = 1                     # windows in a learner's step
inner = "adamw"               # the inner optimizer: adamw or muon
peak_lr = 0.003               # its largest rate, after …
warmup = 100                  # … this many steps, at most a quarter of all
method = "decoupled"          # or data-parallel: one model, all batches in every step
until = "tokens"              # what ends the run: tokens, or the time in which the fastest learner takes its steps

# Mixed speeds, in virtual seconds
step_s = [1.0]                # a step's mean duration, by learner; the last entry is that of all further learners
noise = 0.0                   # its standard deviation, as a share of the mean

# Rules and pace, named as the flags of `isthmus init`, with _ in place of -
fragments = 12
sync_every = 12               # H
# sync_every_max = 12         # the same as sync_every: a fixed period; 0: it adapts, up to eight times as long
merge = "rda"                 # rda, avg, trimmed, median, iso, or a function of yours: module:function
# merge_embeddings = "avg"
# iso_block = 512
# trim = 0.25
# outer_lr = 0.4              # if left out, it suits the merge rule; a function of yours gets that of rda
# outer_momentum = 0.8
codec = "int4"                # of learners' updates: f32, bf16, int8, int4, q1.5, …
codec_down = "int4"
# feedback = true             # whether what a codec drops is sent later
# isotropic_up = false
quorum = 1                    # K
overlap = 2.0                 # τ
grace = 0.8                   # γ
staleness = 1
# lead = 0.0
# snapshot_every = 8
# heartbeat = 5.0
# silence = 15.0

# Adoption of new versions
adopt = "overwrite"           # overwrite, blend or carry
adapters = 0                  # rank of LoRA adapters on a model that was trained on code, for prose; 0: no adapters
reset_moments = false         # whether a fragment's moments are cleared on adoption
# variant = "schedule-free"   # a name in isthmus_lab.training.variants

[shape]                       # the model: 0.26 million parameters
width = 96
layers = 2
heads = 3
experts = 0                   # feed-forward nets in a block; 0: one dense net

[wires]                       # between each learner and the store and the bus
latency_s = 0.02
spread = 0.2                  # of the latency, as a share of it
# gbit_s = 0.1                # each learner's bandwidth; without it, only the latency counts
# parameters = 1e8            # of the model that this one stands for: payloads are scaled to it

# [thin]                      # the same of the last learner alone
# gbit_s = 0.05
# latency_s = 0.02
# spread = 0.2
# parameters = 1e8

# [failures]
# every_s = 100.0             # mean seconds of training between two failures of a learner
# repair_s = 20.0             # mean seconds until a new process reads its checkpoint and the model over its link
# moments = "own"             # with which a learner continues: own, peer, mean or fresh
# checkpoint_s = 30.0

# [guests]                    # learners that take part for a while
# count = 4
# come = 0.25                 # share of the run that is done when they join …
# go = 0.75                   # … and when they leave

# Cases that are compared: each has a name, and changes some of the fields above.
# [cases."mean"]
# merge = "avg"
# [cases."half of the bandwidth"]
# wires = {gbit_s = 0.05}
"""
"""A case that has every field."""

SEEDS, STEPS = 1, 150
"""Seeds of a case, and steps of each learner, unless its file gives them."""

_TABLES: dict[str, type[msgspec.Struct]] = {
    "shape": Shape,
    "wires": Wires,
    "thin": Wires,
    "failures": Failures,
    "guests": Guests,
}
_OWN = frozenset(Setting.__struct_fields__) - {"name", "rules", "pace", "own_merge"} - _TABLES.keys()
_RULES = {s.name: s.of for s in fields(ArithmeticOfRun)} | {"merge_embeddings": "merge_embeddings"}
_PACE = {s.name: s.of for s in fields(PaceOfRun)}
_OF_FILE = {"question": str, "seeds": Count, "cases": dict[str, dict[str, Any]]}


def read(path: Path) -> tuple[Experiment, int]:
    """Return the experiment in a TOML file, and its number of seeds. Raises `InputError` that names file and field.

    The experiment's `settings` returns the settings of the file; a number of steps above 0 replaces the file's.
    """
    try:
        given = tomllib.loads(path.read_text())
    except OSError as error:
        raise InputError(
            f"{path}: {error.strerror}; `isthmus simulate training example > {path}` writes one to start from"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not TOML: {error}") from None
    about = {
        name: _converted(kind, given.pop(name), f"{path}: {name}") for name, kind in _OF_FILE.items() if name in given
    }
    cases = about.get("cases") or {path.stem: {}}
    where = {name: f"{path} [cases.{name}]" if "cases" in about else str(path) for name in cases}
    found = [_setting(name, _joined(given, changes), where[name]) for name, changes in cases.items()]

    def settings(steps: int) -> list[Setting]:
        return [msgspec.structs.replace(s, steps=steps or s.steps) for s in found]

    return Experiment(path.stem, about.get("question", path.stem), "", settings), about.get("seeds", SEEDS)


def beside(settings: Sequence[Setting], path: str) -> list[Setting]:
    """Return the settings, and after some of them the same setting merged by a function MODULE:FUNCTION.

    Settings that differ only in their merge rule and outer optimizer get one such twin. The outer rate and momentum of
    a twin are the defaults of RDA. Data parallel merges nothing and gets none.
    """
    found: list[Setting] = []
    seen: set[Setting] = set()
    for setting in settings:
        found.append(setting)
        rate, momentum = outer_for(MergeRule.RDA, setting.rules.sync_every)
        plain = Rules()
        rules = msgspec.structs.replace(
            setting.rules, merge=plain.merge, merge_embeddings=plain.merge_embeddings, iso_block=plain.iso_block,
            trim=plain.trim, outer_lr=rate, outer_momentum=momentum,
        )  # fmt: skip
        twin = msgspec.structs.replace(setting, name="", rules=rules, own_merge=path)
        if setting.method == "decoupled" and not setting.own_merge and twin not in seen:
            seen.add(twin)
            found.append(msgspec.structs.replace(twin, name=f"{setting.name} → {path}"))
    return found


def _joined(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return common fields with those of one case; within a table, a case replaces single fields."""
    both = {n: common[n] | v for n, v in own.items() if isinstance(v, dict) and isinstance(common.get(n), dict)}
    return {**common, **own, **both}


def _setting(name: str, given: Mapping[str, Any], where: str) -> Setting:
    rules: dict[str, Any] = {}
    pace: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for field, value in given.items():
        at = f"{where}: {field}"
        if field in _TABLES:
            own[field] = _table(_TABLES[field], value, at)
        elif field in _OWN:
            own[field] = _field(Setting, field, value, at)
        elif field in _RULES:
            rules[_RULES[field]] = _field(Rules, _RULES[field], value, at)
        elif field in _PACE:
            pace[_PACE[field]] = _field(Pace, _PACE[field], value, at)
        else:
            known = [*_OF_FILE, *_TABLES, *sorted(_OWN), *_RULES, *_PACE]
            raise InputError(f"{where}: there is no field {field}{did_you_mean(field, known)}")
    if ":" in rules.get("merge", ""):
        own["own_merge"] = rules.pop("merge")
    if "error_feedback" in rules:
        rules["feedback_down"] = rules["error_feedback"]
    # The period is fixed unless the file says otherwise, as in all experiments.
    rules = {"merge": MergeRule.RDA.value, "sync_every_max": rules.get("sync_every", Rules().sync_every)} | rules
    plain = Setting(name=name, steps=STEPS)
    try:
        made = Rules.suited(**rules).check()
        waits = msgspec.structs.replace(plain.pace, **pace).check()
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    setting = msgspec.structs.replace(plain, rules=made, pace=waits, **own)
    if setting.pace.quorum > setting.learners:
        raise InputError(
            f"{where}: quorum {setting.pace.quorum} is more than learners {setting.learners}: choose fewer"
        )
    if setting.shape.width % setting.shape.heads:
        raise InputError(f"{where}: width {setting.shape.width} is no multiple of heads {setting.shape.heads}")
    return setting


def _table(kind: type[msgspec.Struct], given: object, where: str) -> msgspec.Struct:
    if not isinstance(given, dict):
        raise InputError(f"{where} {given!r}: must be a table of {', '.join(kind.__struct_fields__)}")
    for name in given:
        if name not in kind.__struct_fields__:
            raise InputError(f"{where}: there is no field {name}: it has {', '.join(kind.__struct_fields__)}")
    values = {name: _field(kind, name, value, f"{where}.{name}") for name, value in given.items()}
    if missing := [f.name for f in msgspec.structs.fields(kind) if f.required and f.name not in values]:
        raise InputError(f"{where}: {', '.join(missing)} is missing")
    return kind(**values)


def _field(kind: type[msgspec.Struct], name: str, value: object, where: str) -> Any:
    return _converted(next(f.type for f in msgspec.structs.fields(kind) if f.name == name), value, where)


def _converted(kind: Any, value: object, where: str) -> Any:
    """Return a value of the file as the type of its field. Raises `InputError`."""
    numbers = [x for x in (value if isinstance(value, list) else [value]) if isinstance(x, float)]
    if not all(map(math.isfinite, numbers)):
        raise InputError(f"{where} {value}: must be finite")
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        choices = list(kind) if isinstance(kind, enum.EnumMeta) else typing.get_args(kind)
        words = choices and all(isinstance(word, str) for word in choices)
        what = f"choose one of {', '.join(choices)}" if words else f"must be {plainly(str(error))}"
        raise InputError(f"{where} {value!r}: {what}") from None

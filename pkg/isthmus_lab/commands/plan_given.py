"""What `isthmus plan` plans for: the model, the learners and the syncer's speeds, from flags and files."""

import math
import platform
import shlex
from pathlib import Path
from typing import Any

from isthmus.errors import InputError
from isthmus.format.layout import Spec
from isthmus.runtime.clock import single_threaded
from isthmus_lab.commands import rates, settings_classes
from isthmus_lab.forecast import speeds
from isthmus_lab.forecast.island import START_S, Island
from isthmus_services.settings import shared
from isthmus_services.settings.tables import converted, read_table

LEARNERS = 8
"""Equal learners if neither `--learners` nor a file says how many."""

GPUS = 8
"""GPUs of each learner if `--gpus` is not given."""


def measure(path: Path) -> int:
    """Measure the syncer's speeds on this machine, and write them to a file. Raises `InputError` if that fails."""
    when = f"{platform.node()}, Python {platform.python_version()}"
    found = speeds.measured(single_threaded().now, _cpu(), when)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(speeds.written(found))
    except OSError as error:
        raise InputError(f"--measure {path}: {error.strerror}") from None
    print(f"{path}: {found.cpu}, {found.how}; isthmus plan --speeds {shlex.quote(str(path))} uses it")
    return 0


def _cpu() -> str:
    """Return the name of the processor's model."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def speeds_of(arguments: settings_classes.Plan) -> tuple[speeds.Table, str]:
    """Return the syncer's speeds to plan with, and a name for them: the file, or the class of CPU."""
    if arguments.speeds:
        if arguments.cpu:
            raise InputError("--speeds and --cpu both set the syncer's speed: use only one")
        return speeds.table(read_table(arguments.speeds), arguments.speeds), f"{arguments.speeds}"
    default, classes = speeds.classes()
    name = arguments.cpu or default
    if name not in classes:
        raise InputError(f"--cpu {name}: choose one of {', '.join(classes)}, or measure: isthmus plan --measure FILE")
    return classes[name], f"table, class {name}"


def params_of(arguments: settings_classes.Plan, file: dict[str, Any]) -> tuple[float, list[Spec] | None]:
    """Return how many parameters the model has, and with `--model` the specs of its tensors (else None)."""
    given = [arguments.params is not None, arguments.model is not None, "params" in file]
    if sum(given) != 1:
        raise InputError(
            "give the size of the model in exactly one way: --params 2.9e9, "
            "--model PACKAGE.MODULE:FUNCTION, or params = in the file"
        )
    if arguments.model is not None:
        shared.need("torch", "torch")
        from isthmus.torch.model import specs_of

        specs = specs_of(shared.callable_of(arguments.model, "--model")())
        return float(sum(s.size for s in specs)), specs
    params = arguments.params if arguments.params is not None else file["params"]
    if not isinstance(params, int | float):
        raise InputError(f"{arguments.islands}: params must be a number, not {params!r}")
    return float(params), None


_FLAGS = {
    "count": "--learners",
    "step_s": "--step-seconds",
    "up_gbit_s": "--up",
    "down_gbit_s": "--down",
    "latency_s": "--latency",
    "mtbf_hours": "--mtbf-hours",
    "restart_s": "--restart",
    "gpus": "--gpus",
}
"""The flags that describe equal learners, by the field of `Island` that each sets."""


def islands_of(arguments: settings_classes.Plan, file: dict[str, Any], assumed: list[str]) -> list[Island]:
    """Return the learners. Append notes to `assumed` about values that the user did not give."""
    if not arguments.islands:
        if arguments.step_seconds is None:
            assumed.append("1 s a step (--step-seconds)")
        plain = Island(name="learner")
        learners = arguments.learners or LEARNERS
        links = {"up": plain.up_gbit_s, "down": plain.down_gbit_s}
        for name, usual in links.items():
            if (given := getattr(arguments, name)) is None:
                assumed.append(f"{usual:g} Gbit/s {name} (--{name})")
            else:
                links[name] = rates.gbit_s(given)
        if arguments.latency is None:
            assumed.append(f"{plain.latency_s:g} s to the store (--latency)")
        if arguments.mtbf_hours is None:
            assumed.append("no learner ever fails (--mtbf-hours)")
        elif arguments.restart is None:
            assumed.append(f"{START_S:g} s to start after a failure (--restart)")
        gpus = GPUS
        if arguments.gpus is None:
            assumed.append(f"{GPUS} GPUs a learner (--gpus)")
        elif arguments.gpus % learners:
            raise InputError(
                f"--gpus {arguments.gpus}: cannot be divided equally among "
                f"{learners} learners; describe unequal learners in a file (--islands)"
            )
        else:
            gpus = arguments.gpus // learners
        same = Island(
            name="learner",
            count=learners,
            step_s=1.0 if arguments.step_seconds is None else arguments.step_seconds,
            up_gbit_s=links["up"],
            down_gbit_s=links["down"],
            latency_s=plain.latency_s if arguments.latency is None else arguments.latency,
            mtbf_hours=float("inf") if arguments.mtbf_hours is None else arguments.mtbf_hours,
            restart_s=START_S if arguments.restart is None else arguments.restart,
            gpus=gpus,
        )
        return [same.check(_FLAGS)]
    for field, flag in _FLAGS.items():
        name = flag.lstrip("-").replace("-", "_")
        if getattr(arguments, name) is not None:
            raise InputError(
                f"{flag} describes equal learners, and {arguments.islands} describes each: leave {flag} out, and write "
                f"{field} in the [[learner]] tables of the file"
            )
    unknown = sorted(file.keys() - {"params", "store_region", "learner"})
    if unknown:
        raise InputError(
            f"{arguments.islands}: unknown {unknown[0]}: there are params, store_region and [[learner]] tables"
        )
    tables = file.get("learner")
    if not isinstance(tables, list) or not tables:
        raise InputError(f"{arguments.islands}: has no [[learner]] tables")
    found = [
        converted(_rated(table), Island, f"{arguments.islands}, learner {n + 1}") for n, table in enumerate(tables)
    ]
    plain = Island(name="learner")
    for name, what in (
        ("step_s", "1 s a step"),
        ("gpus", f"{GPUS} GPUs"),
        ("up_gbit_s", f"{plain.up_gbit_s:g} Gbit/s up"),
        ("down_gbit_s", f"{plain.down_gbit_s:g} Gbit/s down"),
        ("latency_s", f"{plain.latency_s:g} s to the store"),
        ("mtbf_hours", "no failures"),
    ):
        if silent := [i.name for i, table in zip(found, tables, strict=True) if name not in table]:
            assumed.append(f"{what} of {', '.join(silent)} ({name})")
    if any(i.region for i in found):
        if not file.get("store_region"):
            assumed.append("the store is outside every learner's region (store_region)")
        if silent := [i.name for i in found if not i.region]:
            assumed.append(f"no egress of {', '.join(silent)} (region)")
    fails = [(i, table) for i, table in zip(found, tables, strict=True) if not math.isinf(i.mtbf_hours)]
    if silent := [i.name for i, table in fails if "restart_s" not in table]:
        assumed.append(f"{START_S:g} s to start after a failure of {', '.join(silent)} (restart_s)")
    return found


def _rated(table: dict[str, Any]) -> dict[str, Any]:
    """Return a learner's table with rates that have a unit in Gbit/s. Raises `InputError` that names the field."""
    found = dict(table)
    for name in ("up_gbit_s", "down_gbit_s"):
        if isinstance(given := table.get(name), str):
            try:
                found[name] = rates.gbit_s(given)
            except InputError as error:
                raise InputError(f"learner {table.get('name', '')}: {name} {error}") from None
    return found

"""`isthmus plan`: a model and a set of learners in, the settings to choose, what to expect, and what it costs out."""

import tomllib
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from rich.table import Table

from isthmus.errors import InputError
from isthmus.model import speeds
from isthmus.model.planner import Fixed, Island, Plan, Prices, plan
from isthmus.rules import Rules
from isthmus.runtime import threaded
from isthmus_services import commands, options
from isthmus_services.report import stdout, write_json

T = TypeVar("T")

PRICES = Path(__file__).with_name("prices.toml")


def run(arguments: commands.Plan) -> int:
    """Plan."""
    file = _read(arguments.islands) if arguments.islands else {}
    islands = _islands(arguments, file)
    prices = _convert(_read(arguments.prices or str(PRICES)), Prices, arguments.prices or str(PRICES)).check()
    fixed = Fixed(
        fragments=arguments.fragments,
        sync_every=arguments.sync_every,
        codec=arguments.codec,
        codec_down=arguments.codec_down,
    )
    runtime, threads = threaded(1)

    def measured(rules: Rules) -> speeds.Speeds:
        return speeds.measure(runtime.now, rules.codec_up, rules.codec_down)

    found = plan(
        _params(arguments, file),
        islands,
        prices,
        store_region=arguments.store_region or str(file.get("store_region", "")),
        fixed=fixed,
        speeds=measured,
    )
    threads.shutdown()
    _show(found)
    write_json(plain(found), arguments.json)
    return 0


def plain(found: Plan) -> dict[str, Any]:
    """Return a plan as a report has it."""
    report = msgspec.to_builtins(found)
    for forecast, of in zip(report["forecasts"], found.forecasts, strict=True):
        forecast["island"]["mtbf_hours"] = None if of.island.mtbf_hours == float("inf") else of.island.mtbf_hours
    report["warnings"] = found.warnings
    return report  # type: ignore[no-any-return]


def _params(arguments: commands.Plan, file: dict[str, Any]) -> float:
    given = [arguments.params is not None, arguments.model is not None, "params" in file]
    if sum(given) != 1:
        raise InputError(
            "say how large the model is, once: --params 2.9e9, --model PACKAGE.MODULE:FUNCTION, or params = in the file"
        )
    if arguments.model is not None:
        options.need("torch", "torch")
        model = options.callable_of(arguments.model, "--model")()
        return float(sum(p.numel() for p in model.parameters() if p.requires_grad))
    params = arguments.params if arguments.params is not None else file["params"]
    if not isinstance(params, int | float):
        raise InputError(f"{arguments.islands}: params must be a number, not {params!r}")
    return float(params)


def _islands(arguments: commands.Plan, file: dict[str, Any]) -> list[Island]:
    if not arguments.islands:
        same = Island(
            name="learner",
            count=arguments.learners,
            step_s=arguments.step_seconds,
            up_gbit_s=arguments.up,
            down_gbit_s=arguments.down,
            latency_s=arguments.latency,
            region=arguments.region,
            mtbf_hours=float("inf") if arguments.mtbf_hours is None else arguments.mtbf_hours,
            restart_s=arguments.restart,
        )
        return [same]
    unknown = sorted(file.keys() - {"params", "store_region", "learner"})
    if unknown:
        raise InputError(
            f"{arguments.islands}: unknown {unknown[0]}: there are params, store_region and [[learner]] tables"
        )
    tables = file.get("learner")
    if not isinstance(tables, list) or not tables:
        raise InputError(f"{arguments.islands}: has no [[learner]] tables")
    return [_convert(table, Island, f"{arguments.islands}, learner {n + 1}") for n, table in enumerate(tables)]


def _read(path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {error}") from None


def _convert(table: object, kind: type[T], where: str) -> T:
    known = set(kind.__annotations__)
    if isinstance(table, dict) and (unknown := sorted(table.keys() - known)):
        raise InputError(f"{where}: unknown {unknown[0]}: there are {', '.join(sorted(known))}")
    try:
        return msgspec.convert(table, kind)
    except msgspec.ValidationError as error:
        raise InputError(f"{where}: {error}") from None


# --- shown ------------------------------------------------------------------------------------------------------------


def _show(found: Plan) -> None:
    console = stdout()
    chosen = Table(title=f"settings for {found.params:.3g} parameters", title_justify="left")
    for name in ("setting", "value", "because"):
        chosen.add_column(name)
    for choice in found.choices:
        chosen.add_row(choice.name, str(choice.value), choice.reason)
    console.print(chosen)
    console.print(_forecasts(found))
    s, day = found.syncer, found.day
    console.print(
        f"syncer: {s['memory_gib']:.1f} GiB, {s['cores']:.2f} cores ({s['merge_s']:.2f} s per round), "
        f"{s['down_gbit_s']:.2f} Gbit/s in, {s['up_gbit_s']:.2f} Gbit/s out",
        highlight=False,
    )
    console.print(
        f"a day: {day['up_gb']:,.0f} GB up, {day['down_gb']:,.0f} GB down, {day['writes']:,.0f} writes, "
        f"{day['reads']:,.0f} reads, {day['stored_gb']:,.0f} GB stored: ${day['usd']:,.2f} "
        f"(requests ${day['requests_usd']:,.2f}, egress ${day['egress_usd']:,.2f}, storage ${day['storage_usd']:,.2f})",
        highlight=False,
    )
    for warning in found.warnings:
        console.print(f"warning: {warning}", style="yellow", highlight=False)


def _forecasts(found: Plan) -> Table:
    table = Table(title="what to expect", title_justify="left")
    for name in ("learner", "utilisation", "work merged", "goodput", "link up", "link down", "round trip", "GB a day",
                 "requests a day", "memory"):  # fmt: skip
        table.add_column(name, justify="left" if name == "learner" else "right")
    for f in found.forecasts:
        many = f"{f.island.count} × " if f.island.count > 1 else ""
        table.add_row(
            f"{many}{f.island.name}",
            f"{f.utilization:.1%}",
            f"{f.kept:.0%}",
            f"{f.goodput:.1%}",
            f"{f.up_load:.0%}",
            f"{f.down_load:.0%}",
            f"{f.back_s:.1f} s",
            f"{f.up_gb_day:,.0f} + {f.down_gb_day:,.0f}",
            f"{sum(f.requests_day.values()):,.0f}",
            f"{f.memory_gib:.1f} GiB",
        )
    return table

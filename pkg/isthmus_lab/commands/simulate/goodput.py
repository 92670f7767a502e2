"""`isthmus simulate goodput`: a grid of chips and learners, as published or as given; tables, JSON and a picture."""

import asyncio
import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from isthmus.agent.ports import open_log
from isthmus.errors import InputError
from isthmus_lab.commands import settings_classes
from isthmus_lab.forecast import failures, recorded
from isthmus_lab.forecast import goodput as model
from isthmus_lab.forecast.goodput import DECOUPLED, ELASTIC, RESTART, Cluster
from isthmus_services.output.progress import progress
from isthmus_services.output.report import MARKERS, save, stdout, write_json
from isthmus_services.settings import shared

CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)
LEARNERS = (1, 2, 4, 8, 16)

PREDICTED = (
    (ELASTIC, 2_400_000, 1, "goodput", 0.40),
    (DECOUPLED, 1_200_000, 8, "goodput", 0.88),
    (DECOUPLED, 1_200_000, 4, "uptime", 1.0),
)
"""Published figures to which nothing is fitted: mode, chips, learners, field of `Shares`, published value."""

VARIED: Mapping[str, Sequence[object]] = {
    "slice_chips": (16, 256),
    "repair_hours": (1.0, 12.0),
    "repair_shape": (0.5, 1.5),
    "step_s": (0.3, 10.0),
    "checkpoint_s": (0.05, 5.0),
    "speed_deviation": (0.0, 0.02),
    "interrupted": ("again",),
    "rack_mtbi_years": (1.0,),
    "region_mtbi_years": (0.1,),
    "maintenance_days": (30.0,),
}
"""Parameters that were not published, and other plausible values of each. Stalls that were not given are fitted again
for each value."""

Row = dict[str, Any]


def run(arguments: settings_classes.Goodput) -> int:
    """Simulate every cell of the grid, then print, write and draw the rows; return the exit status.

    With `--check`, compare a recorded run with the model instead: 1 if it is off by more than its stated error.
    """
    if arguments.check:
        return asyncio.run(_check(arguments.check, arguments.json))
    if arguments.plot:
        shared.need("matplotlib", "demo")
    cluster = arguments.cluster()
    sizes = dict.fromkeys(arguments.chips or CHIPS)
    clusters = {n: _sized(cluster, arguments, n) for n in sizes}
    cells = [cell for n in sizes for cell in _cells(n, _learners(arguments, n, clusters[n].slice_chips))]
    for mode, chips, learners in cells:
        # An impossible cell raises `InputError` here, before the first cell is simulated.
        model.exact(clusters[chips], mode, chips, learners)
    predicted, moved = predictions(cluster), sensitivity(cluster) if arguments.sensitivity else []
    rows: list[Row] = []
    with progress(f"goodput: {len(cells)} cells") as say:
        for n, (mode, chips, learners) in enumerate(cells):
            found = failures.simulate(
                clusters[chips],
                mode,
                chips,
                learners,
                seed=arguments.seed,
                failures=arguments.failures,
                progress=lambda done, n=n: say((n + done) / len(cells)),  # type: ignore[misc]
            )
            rows.append(_row(clusters[chips], mode, chips, learners, found))
    reconfigure_s, restart_s = model.stalls(cluster)
    console = stdout()
    _show(rows)
    if any(abs(row["goodput"] - row["goodput_exact"]) > APART for row in rows):
        console.print(
            f"simulated and renewal argument differ by more than {100.0 * APART:.1f} points in some rows: go by the "
            "simulation. The argument takes stalls for short beside repairs and the time between failures",
            highlight=False,
        )
    for size in dict.fromkeys(of.slice_chips for of in clusters.values()):
        of_size = [n for n, of in clusters.items() if of.slice_chips == size]
        source = "given" if arguments.slice_chips else f"assumed for {_span(of_size)}; use --slice-chips to change it"
        console.print(
            f"unit of failure: {f'a slice of {size} chips' if size > 1 else 'one chip'}, {source}",
            highlight=False,
        )
    fitted = {"reconfigure_s": arguments.reconfigure_s is None, "restart_s": arguments.restart_s is None}
    for stall, seconds, name, mode in (
        ("reconfiguration", reconfigure_s, "reconfigure_s", ELASTIC),
        ("restart", restart_s, "restart_s", RESTART),
    ):
        source = f"fitted to the published {model.PUBLISHED[mode]:.0%} of {mode} training at 1.2 million chips"
        console.print(f"a {stall} stalls {seconds:.1f} s: {source if fitted[name] else 'given'}", highlight=False)
    console.print(_given(cluster), highlight=False)
    report: Row = {
        "cluster": {name: None if value == float("inf") else value for name, value in vars(cluster).items()},
        "stalls": {"reconfigure_s": reconfigure_s, "restart_s": restart_s, "fitted": fitted},
        "rows": rows,
        "predictions": predicted,
    }
    if predicted:
        console.print(_predictions(predicted))
    if moved:
        report["sensitivity"] = moved
        for table in sensitivity_tables(moved):
            console.print(table)
    write_json(report, arguments.json)
    if arguments.plot:
        draw(rows, Path(arguments.plot))
        print(f"picture: {arguments.plot}")
    return 0


async def _check(run_url: str, json: str | None) -> int:
    async with open_log(run_url, threads=1) as log:
        found = recorded.check(await recorded.observe(log))
    seen, predicted = found.observed, found.predicted
    table = Table(title=f"{run_url}: prediction and record", title_justify="left")
    for title in ("what", "measured in the run", "predicted"):
        table.add_column(title, justify="left" if title == "what" else "right")
    table.add_row("goodput", f"{seen.goodput:.1%}", f"{predicted.goodput:.1%}")
    table.add_row("uptime", f"{seen.uptime:.2%}", f"{predicted.uptime:.2%}")
    table.add_row("recovering", f"{1 - seen.mtbf_s / (seen.mtbf_s + seen.recovery_s):.1%}" if seen.failures else "0.0%",
                  f"{predicted.repairing:.1%}")  # fmt: skip
    table.add_row("trained again, of all time", f"{seen.again:.1%}", "")
    table.add_row("learners", str(seen.learners), "")
    table.add_row("time of each", f"{seen.span_s:.0f} s", "")
    every = f", every {seen.mtbf_s:.1f} s in which a learner was up" if seen.failures else ""
    table.add_row("failures", f"{seen.failures}{every}", "input")
    table.add_row("recovery", f"{seen.recovery_s:.1f} s" if seen.failures else "none", "input")
    table.add_row("step", f"{seen.step_s * 1000:.0f} ms", "input")
    between = f"{seen.checkpoint_s:.1f} s" if seen.checkpoint_s else "not two of a learner"
    table.add_row("between checkpoints", between, "input")
    table.add_row("between updates", f"{seen.update_s:.1f} s, of one fragment", "input")
    console = stdout()
    console.print(table)
    low, high = found.uptime_range
    console.print(
        f"the model is off by {100.0 * found.error:+.1f} points of goodput (stated error: "
        f"{100.0 * recorded.GOODPUT_WITHIN:.0f}) and {100.0 * found.uptime_error:+.1f} of uptime ("
        f"measured {seen.uptime:.1%}; with outages at other moments it would be {low:.1%} to {high:.1%})",
        highlight=False,
    )
    console.print(
        "goodput counts steps that were trained again after a failure, and leaves out work that no update and no "
        "checkpoint holds, as in plan and lab; a job that restarts would lose both",
        highlight=False,
    )
    for said in found.off:
        console.print(f"warning: {said}", style="yellow", highlight=False)
    inputs = {k: None if v == math.inf else v for k, v in vars(seen).items() if k not in ("goodput", "outages")}
    write_json(
        {
            "predicted_goodput": predicted.goodput,
            "achieved_goodput": seen.goodput,
            "error": found.error,
            "predicted_uptime": predicted.uptime,
            "uptime_range": found.uptime_range,
            "off": found.off,
            "inputs": inputs,
        },
        json,
    )
    return 1 if found.off else 0


def _sized(cluster: Cluster, arguments: settings_classes.Goodput, chips: int) -> Cluster:
    """Return the cluster with a slice size that suits `chips`, unless the size is given. The stalls stay the same."""
    if arguments.slice_chips:
        return cluster
    size = model.slice_of(chips, max(arguments.learners or [1]))
    if size == cluster.slice_chips:
        return cluster
    reconfigure_s, restart_s = model.stalls(cluster)
    return replace(cluster, slice_chips=size, reconfigure_s=reconfigure_s, restart_s=restart_s)


def _learners(arguments: settings_classes.Goodput, chips: int, slice_chips: int) -> Sequence[int]:
    return arguments.learners or [m for m in LEARNERS if m == 1 or m * slice_chips <= chips]


def _cells(chips: int, learners: Sequence[int]) -> list[tuple[str, int, int]]:
    return [(RESTART, chips, 1), (ELASTIC, chips, 1), *((DECOUPLED, chips, m) for m in dict.fromkeys(learners))]


def _span(chips: Sequence[int]) -> str:
    return f"{min(chips):,} chips" if len(chips) == 1 else f"{min(chips):,} to {max(chips):,} chips"


def _row(cluster: Cluster, mode: str, chips: int, learners: int, found: failures.Estimate) -> Row:
    return {
        "mode": mode,
        "learners": learners,
        "chips": chips,
        **vars(found.shares),
        "goodput_ci": list(found.goodput_ci),
        "goodput_exact": model.exact(cluster, mode, chips, learners).goodput,
        "slice_chips": cluster.slice_chips,
        "failures": found.failures,
    }


def predictions(cluster: Cluster) -> list[Row]:
    """Return the published figures to which nothing was fitted, beside the model's own.

    None for another cluster than the published one; the stalls are not published.
    """
    found: list[Row] = []
    if replace(cluster, reconfigure_s=None, restart_s=None) != Cluster():
        return found
    for mode, chips, learners, what, published in PREDICTED:
        if chips < learners * cluster.slice_chips:
            continue  # there are too few chips for one slice per learner
        value = float(getattr(model.exact(cluster, mode, chips, learners), what))
        found.append(
            {
                "mode": mode,
                "chips": chips,
                "learners": learners,
                "what": what,
                "published": published,
                "predicted": value,
                "error": value - published,
            }
        )
    return found


def sensitivity(cluster: Cluster) -> list[Row]:
    """Return the predictions, and the stalls on which they rest, for other values of the unpublished parameters."""
    reconfigure_s, restart_s = model.stalls(cluster)
    variants: list[tuple[str, object, Cluster]] = [("as given", "", cluster)]
    variants += [
        (name, value, replace(cluster, **{name: value}))  # type: ignore[arg-type]
        for name, values in VARIED.items()
        for value in values
    ]
    for factor in (0.5, 2.0):
        for name, seconds in (("reconfigure_s", reconfigure_s), ("restart_s", restart_s)):
            value = round(factor * seconds, 1)
            variants.append((name, value, replace(cluster, **{name: value})))  # type: ignore[arg-type]
    found = []
    for what, choice, variant in variants:
        with contextlib.suppress(InputError):  # leaves out values with which no stall gives the published figures
            found.append(_variant(what, choice, variant))
    return found


def _variant(name: str, value: object, cluster: Cluster) -> Row:
    reconfigure_s, restart_s = model.stalls(cluster)

    def at(mode: str, chips: int, learners: int) -> model.Shares:
        return model.exact(cluster, mode, chips, learners)

    return {
        "parameter": name,
        "value": value,
        "reconfigure_s": reconfigure_s,
        "restart_s": restart_s,
        "restart 1.2M": at(RESTART, 1_200_000, 1).goodput,
        "elastic 1.2M": at(ELASTIC, 1_200_000, 1).goodput,
        "elastic 2.4M": at(ELASTIC, 2_400_000, 1).goodput,
        "M = 8 1.2M": at(DECOUPLED, 1_200_000, 8).goodput,
        "M = 8 2.4M": at(DECOUPLED, 2_400_000, 8).goodput,
        "uptime M = 4 1.2M": at(DECOUPLED, 1_200_000, 4).uptime,
    }


# --- shown ------------------------------------------------------------------------------------------------------------


APART = 0.005
"""Difference of two figures for one goodput from which on it is said which to go by."""


def _given(cluster: Cluster) -> str:
    """Return what every row rests on."""
    return (
        f"assumed unless given: a chip fails every {cluster.mtbi_years:g} years (--mtbi-years), a slice comes back "
        f"after {cluster.repair_hours:g} hours (--repair-hours; `isthmus plan` lets a learner come back after its "
        f"restart), a step takes {cluster.step_s:g} s (--step-s), a checkpoint of the restarting job "
        f"{cluster.checkpoint_s:g} s (--checkpoint-s)"
    )


def _show(rows: Sequence[Row]) -> None:
    """Print two tables, each at most 80 columns wide: goodput and uptime, and where the rest of the time goes."""
    console = stdout()
    played = ("goodput", "95 %", "renewal", "uptime")
    spent = ("waiting", "repairing", "reconfiguring", "lost")
    first = _table("where allocated chips' time goes: simulated, 95 % interval, renewal argument", played)
    second = _table("the rest of the time; repairing is a part of waiting", spent)
    last = None
    for row in rows:
        if last not in (None, row["chips"]):
            first.add_section()
            second.add_section()
        last = row["chips"]
        who = (f"{row['chips']:,}", _mode(row))
        half = (row["goodput_ci"][1] - row["goodput_ci"][0]) / 2
        first.add_row(
            *who, f"{row['goodput']:.1%}", f"± {half:.2%}", f"{row['goodput_exact']:.1%}", f"{row['uptime']:.2%}"
        )
        second.add_row(*who, *(f"{row[share]:.2%}" for share in spent))
    console.print(first)
    console.print(second)


def _mode(row: Row) -> str:
    return row["mode"] if row["mode"] != DECOUPLED else f"decoupled, M = {row['learners']}"


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("chips", justify="right")
    table.add_column("mode")
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _predictions(rows: Sequence[Row]) -> Table:
    table = Table(title="published figures that were not used for fitting", title_justify="left")
    for title in ("mode", "chips", "what", "published", "predicted", "error"):
        table.add_column(title, justify="left" if title in ("mode", "what") else "right")
    for row in rows:
        table.add_row(
            _mode(row), f"{row['chips']:,}", row["what"], f"{row['published']:.0%}", f"{row['predicted']:.2%}",
            f"{row['error']:+.2%}",
        )  # fmt: skip
    return table


def sensitivity_tables(rows: Sequence[Row]) -> list[Table]:
    """Return three tables, each at most 80 columns wide: stalls, data parallel modes, and the decoupled mode."""
    names = [name for name in rows[0] if name not in ("parameter", "value")]
    titles = ("stalls, fitted again unless given", "how the answer moves: data parallel", "and decoupled")
    tables = []
    for title, shown in zip(titles, (names[:2], names[2:5], names[5:]), strict=True):
        table = Table(title=title, title_justify="left")
        for name in ("parameter", "value", *shown):
            table.add_column(name, justify="left" if name == "parameter" else "right")
        for row in rows:
            cells = [f"{row[name]:.1f}" if name.endswith("_s") else f"{row[name]:.1%}" for name in shown]
            table.add_row(row["parameter"], str(row["value"]), *cells)
        tables.append(table)
    return tables


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw goodput against chips: one line per mode and number of learners, with the published points."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 5), layout="constrained")
    lines: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        lines.setdefault((row["mode"], row["learners"]), []).append(row)
    shades = plt.get_cmap("viridis")
    decoupled = [key for key in lines if key[0] == DECOUPLED]
    for number, (key, of) in enumerate(lines.items()):
        mode, learners = key
        color = {RESTART: "tab:red", ELASTIC: "tab:orange"}.get(mode) or shades(
            decoupled.index(key) / max(1, len(decoupled))
        )
        label = {RESTART: "data parallel, restarts", ELASTIC: "data parallel, elastic"}.get(
            mode, f"decoupled, M = {learners}"
        )
        x, y = [row["chips"] for row in of], [row["goodput"] for row in of]
        style = ":" if key == (DECOUPLED, 1) else "-"
        axis.plot(x, y, style, marker=MARKERS[number % len(MARKERS)], markersize=5, color=color, label=label)
        axis.fill_between(x, [r["goodput_ci"][0] for r in of], [r["goodput_ci"][1] for r in of], color=color, alpha=0.2)
    published = [(model.PUBLISHED_CHIPS, value, "fitted to") for value in model.PUBLISHED.values()]
    published += [(chips, value, "predicted") for _, chips, _, what, value in PREDICTED if what == "goodput"]
    for kind, marker in (("fitted to", "x"), ("predicted", "*")):
        at = [(x, y) for x, y, of_kind in published if of_kind == kind]
        axis.plot(
            [x for x, _ in at], [y for _, y in at], marker, color="black", markersize=9, linestyle="none",
            label=f"published, {kind}", zorder=5,
        )  # fmt: skip
    axis.set_xscale("log")
    ticks = sorted({row["chips"] for row in rows})
    axis.set_xticks(ticks, [f"{n / 1e6:g}M" if n >= 1e6 else f"{n / 1e3:g}k" for n in ticks])
    axis.minorticks_off()
    axis.set_ylim(0, 1)
    axis.set_xlabel("chips")
    axis.set_ylabel("goodput")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    save(figure, path)
    plt.close(figure)

"""`isthmus simulate training EXPERIMENT`: training in virtual time, as a table, JSON and a picture.

An experiment is one of the lab's, or a TOML file with a case of one's own.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from fnmatch import fnmatchcase
from pathlib import Path

from isthmus.errors import InputError
from isthmus_lab.commands import settings_classes
from isthmus_lab.commands.simulate.lab_pool import Kept, run_all
from isthmus_lab.training.experiment import Experiment
from isthmus_lab.training.experiments import EXPERIMENTS, SEEDS, chosen
from isthmus_lab.training.own_case import EXAMPLE, beside, read
from isthmus_lab.training.setting import Row, Setting
from isthmus_lab.training.summary import Paired, Spread, baselines, group, outer_of, paired, summary
from isthmus_services.output.progress import progress
from isthmus_services.output.provenance import Provenance
from isthmus_services.output.report import save, stdout, write_json
from isthmus_services.output.tables import Column, fitted
from isthmus_services.settings import shared

DIFFERENCE = "difference"
"""The panel of a picture that shows differences to a baseline."""

Summary = Mapping[str, Mapping[str, Spread]]

COLUMNS = (
    ("val_loss", "loss, nats/byte", "{:.3f}"),
    ("goodput", "goodput", "{:.1%}"),
    ("uptime", "uptime", "{:.1%}"),
    ("participation", "participation", "{:.1%}"),
    ("kept", "tokens merged", "{:.1%}"),
    ("wall_virtual_s", "virtual s", "{:.0f}"),
)


NAMES_SHOWN = 40
"""The most names of settings that an error lists: those that are most like what was asked for."""


def matching(settings: Sequence[Setting], patterns: Sequence[str] | None, experiment: str) -> list[Setting]:
    """Return the settings whose names match a pattern; None: all. Raises `InputError` for one that matches none."""
    for pattern in patterns or ():
        if not any(fnmatchcase(s.name, pattern) for s in settings):
            named = [s.name for s in settings]
            shown = named if len(named) <= NAMES_SHOWN else get_close_matches(pattern, named, NAMES_SHOWN, 0.0)
            names = ", ".join(f'"{name}"' for name in shown)
            more = f", and {len(named) - len(shown)} less like it" if len(shown) < len(named) else ""
            raise InputError(f'--only "{pattern}": {experiment} has no setting with such a name; it has {names}{more}')
    return [s for s in settings if patterns is None or any(fnmatchcase(s.name, p) for p in patterns)]


def run(arguments: settings_classes.Training) -> int:
    """Run an experiment's settings with every seed, then print, write and draw the rows; return the exit status."""
    shared.need("torch", "torch")
    if arguments.plot:
        shared.need("matplotlib", "demo")
    if arguments.experiment == "example":
        print(EXAMPLE, end="")
        return 0
    if arguments.experiment.endswith(".toml"):
        experiment, seeded = read(Path(arguments.experiment))
        settings = experiment.settings(arguments.steps or 0)
    else:
        settings = chosen(arguments.experiment, arguments.scale, arguments.steps)
        experiment, seeded = EXPERIMENTS[arguments.experiment], SEEDS[arguments.scale]
    settings = matching(settings, arguments.only, arguments.experiment)
    own_rules = sorted({arguments.merge or "", *(s.own_merge for s in settings)} - {""})
    for rule in own_rules:
        shared.own_merge(rule, "--merge" if rule == arguments.merge else f"{arguments.experiment}: merge")
    if arguments.merge:
        settings = beside(settings, arguments.merge)
    names = [s.name for s in settings]
    if arguments.baseline is not None and arguments.baseline not in names:
        raise InputError(f"--baseline {arguments.baseline}: there is no such setting; there are {', '.join(names)}")
    seeds = range(arguments.seeds or seeded)
    jobs = [(setting, seed) for setting in settings for seed in seeds]
    kept = Kept(Path(arguments.cache), own_rules)
    hours = sum(setting.core_s for setting, _ in jobs) / 3600
    takes = f"about {hours:.2g} hours of one core in all, less the runs in the cache"
    with progress(f"{experiment.name}: {len(jobs)} runs, {takes}") as say:
        rows = asyncio.run(run_all(jobs, kept, arguments.workers or os.cpu_count() or 1, say))
    found = summary(rows)
    differences = paired(rows, baselines(names, arguments.baseline))
    _show(experiment, settings, found, differences, len(seeds), kept.made_by)
    write_json(
        {
            "experiment": experiment.name,
            "question": experiment.question,
            "published": experiment.published,
            "scale": arguments.scale,
            "steps": settings[0].steps,
            "seeds": list(seeds),
            "reproducible_on": asdict(kept.made_by),
            "outer": {s.name: outer for s in settings if (outer := outer_of(s))},
            "own_merge": {s.name: s.own_merge for s in settings if s.own_merge},
            "rows": [row.plain() for row in rows],
            "summary": {name: {what: asdict(s) for what, s in of.items()} for name, of in found.items()},
            "differences": {name: asdict(d) | {"told": d.told} for name, d in differences.items()},
        },
        arguments.json,
    )
    if arguments.plot:
        draw(experiment, rows, Path(arguments.plot), differences)
        print(f"picture: {arguments.plot}")
    return 0


def _show(
    experiment: Experiment,
    settings: Sequence[Setting],
    found: Summary,
    differences: Mapping[str, Paired],
    seeds: int,
    made_by: Provenance,
) -> None:
    rows = []
    outers = ["{rate:g}, {momentum:g}".format(**outer) if (outer := outer_of(s)) else "" for s in settings]
    for s in settings:
        loss, *others = (_cell(found[s.name][what], form) for what, _, form in COLUMNS)
        rows.append((s.name, loss, _difference(differences.get(s.name)), *others))
    loss_column, *other_columns = (Column(title, n) for n, (_, title, _) in enumerate(COLUMNS))
    columns = [Column("setting", justify="left"), loss_column, Column("difference", 1), *other_columns]
    differ = len({*outers} - {""}) > 1
    if differ:
        columns.insert(3, Column("outer", 1))
        rows = [(*row[:3], outer, *row[3:]) for row, outer in zip(rows, outers, strict=True)]
    console = stdout()
    console.print(fitted(experiment.question, columns, rows, console.width))
    if experiment.published:
        console.print(f"published: {experiment.published}", style="dim", highlight=False)
    spread = "mean ± standard deviation over seeds" if seeds > 1 else "one seed"
    if differ:
        spread += "; outer: the outer rate and momentum"
    for line in (f"{spread}; {_ends(settings)}", COUNTED, *_compared(differences, seeds), *_failing(settings)):
        console.print(line, style="dim", highlight=False)
    if any(s.name.endswith(f"→ {s.own_merge}") for s in settings):
        said = (
            "→: the same setting, merged by your function at RDA's outer rate and momentum; isthmus replay --merge "
            "uses the recorded run's, and another outer step can reverse which rule is better"
        )
        console.print(said, style="dim", highlight=False)
    console.print(made_by.line, style="dim", highlight=False)


COUNTED = (
    "goodput: the first download of the model counts as time without work; tokens merged: merging itself takes no time "
    "here, while isthmus plan counts it"
)
"""What the columns count, printed with every table (docs/experiments/lab.md)."""

ONE_SEED = 0.015
"""Between two runs of one seed, a difference of losses below this means nothing (docs/experiments/lab.md)."""


def _difference(found: Paired | None) -> str:
    """Return a difference as a cell of the table; empty for a baseline."""
    if found is None:
        return ""
    said = f"{found.mean:+.3f}"
    if (n := len(found.by_seed)) > 1:
        said += f" ± {found.deviation:.3f} ({found.agree} of {n}){' *' if found.told else '  '}"
    return said


def _compared(differences: Mapping[str, Paired], seeds: int) -> list[str]:
    """Return the lines that explain the differences, and say of which ones the seeds are too few to tell."""
    if not differences:
        return []
    of = sorted({d.baseline for d in differences.values()})
    what = f"difference: the loss less that of «{of[0]}»" if len(of) == 1 else (
        "difference: the loss less that of the first setting of the group (the same name before the colon)"
    )  # fmt: skip
    if seeds == 1:
        return [f"{what}; one seed is too few to tell a difference below {ONE_SEED} from chance: --seeds 3 tells more"]
    said = [f"{what}, seed by seed (in how many seeds it has this sign); *: beyond chance, at 95 % (paired t-test)"]
    if unsure := [name for name, d in differences.items() if not d.told]:
        said.append(
            f"{seeds} seeds are too few to tell these from their baseline: {', '.join(f'«{name}»' for name in unsure)}"
        )
    return said


def _ends(settings: Sequence[Setting]) -> str:
    """Return what ends the runs: tokens or time, for the fewest and the most steps among the settings."""

    def span(until: str) -> str:
        steps = sorted({s.steps for s in settings if s.until == until})
        fewest = f"{steps[0]} to " if len(steps) > 1 else ""
        return f"{fewest}{steps[-1]} step{'s' if steps[-1] > 1 else ''}"

    said = {
        "tokens": "a run ends after the tokens of {} of each learner, of which faster ones and guests take more",
        "time": "a run ends after the time of {} of its fastest learner",
    }
    used = [until for until in said if any(s.until == until for s in settings)]
    return "; or ".join(said[until].format(span(until)) for until in used)


def _failing(settings: Sequence[Setting]) -> list[str]:
    """Return a line that says what a failure costs, if any setting has failures."""
    failing = [s for s in settings if s.failures]
    found = []
    if any(s.method == "decoupled" for s in failing):
        found.append(
            "after a failure, a learner is away for the repair, then reads its checkpoint and the newest version over "
            "its link, up to 24 bytes per parameter: none of this is goodput, only the repair is no uptime"
        )
    if any(s.method == "data-parallel" for s in failing):
        found.append(
            "after a failure, a data-parallel job waits for the repair and goes on from a checkpoint in memory"
        )
    return found


def _cell(value: Spread, form: str) -> str:
    said = form.format(value.mean)
    return f"{said} ± {form.format(value.deviation)}" if value.deviation else said


def draw(experiment: Experiment, rows: Sequence[Row], path: Path, differences: Mapping[str, Paired]) -> None:
    """Draw the loss of every setting, and beside it the differences, and the measures in the experiment's `beside`.

    Each seed is a dot, and the mean is a bar.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys(row.setting for row in rows))
    heights, colors = _grouped(names)
    panels = [("val_loss", "held-out loss, nats per byte"), *experiment.beside.items()]
    of = {d.baseline for d in differences.values()}
    if of:
        panels.insert(1, (DIFFERENCE, f"loss less that of {of.pop() if len(of) == 1 else 'the first of its group'}"))
    figure, axes = plt.subplots(
        1,
        len(panels),
        figsize=(4 + 4 * len(panels), 1.5 + 0.26 * heights[-1]),
        sharey=True,
        layout="constrained",
        squeeze=False,
    )
    for axis, (what, title) in zip(axes[0], panels, strict=True):
        for y, color, name in zip(heights, colors, names, strict=True):
            if what == DIFFERENCE:
                seen = list(differences[name].by_seed) if name in differences else []
            else:
                values = [row.measured(what) for row in rows if row.setting == name]
                seen = [value for value in values if value is not None]
            if not seen:
                continue
            axis.plot([min(seen), max(seen)], [y, y], color=color, alpha=0.3, linewidth=6, solid_capstyle="round")
            axis.plot(seen, [y] * len(seen), "o", color=color, markersize=4)
            axis.plot([sum(seen) / len(seen)], [y], "|", color="black", markersize=12)
        axis.set_xlabel(title)
        axis.grid(axis="x", alpha=0.3)
        if what == DIFFERENCE:
            axis.axvline(0.0, color="black", linewidth=0.8)
        elif what != "val_loss":
            axis.set_xlim(left=0)
    axes[0][0].set_yticks(heights, names)
    axes[0][0].invert_yaxis()
    figure.suptitle(experiment.question, fontsize=11)
    save(figure, path)
    plt.close(figure)


def _grouped(names: Sequence[str]) -> tuple[list[float], list[str]]:
    """Return the height and the colour of every setting. Neighbours with the same name before the colon are a group."""
    heights: list[float] = []
    colors: list[str] = []
    y, color, last = 0.0, -1, ""
    for name in names:
        of = group(name)
        if not of or of != last:
            color += 1
            y += 0.6 if heights and of else 0.0
        last = of
        heights.append(y)
        colors.append(f"C{color % 10}")
        y += 1.0
    return heights, colors

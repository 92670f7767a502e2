"""`isthmus simulate training EXPERIMENT`: learning in virtual time, as tables, JSON and a picture."""

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from isthmus.lab.experiments import EXPERIMENTS, SEEDS, Experiment, Spread, chosen, summary
from isthmus.lab.setting import Row, Setting
from isthmus_services import commands, options
from isthmus_services.lab import Kept, run_all
from isthmus_services.progress import progress
from isthmus_services.report import save, stdout, write_json

Summary = Mapping[str, Mapping[str, Spread]]

COLUMNS = (
    ("val_loss", "loss, nats/byte", "{:.3f}"),
    ("goodput", "goodput", "{:.1%}"),
    ("uptime", "uptime", "{:.1%}"),
    ("participation", "participation", "{:.1%}"),
    ("kept", "tokens merged", "{:.1%}"),
    ("wall_virtual_s", "virtual s", "{:.0f}"),
)


def run(arguments: commands.Training) -> int:
    """Run an experiment."""
    options.need("torch", "torch")
    if arguments.plot:
        options.need("matplotlib", "demo")
    settings = chosen(arguments.experiment, arguments.scale, arguments.steps)
    experiment = EXPERIMENTS[arguments.experiment]
    seeds = range(arguments.seeds or SEEDS[arguments.scale])
    jobs = [(setting, seed) for setting in settings for seed in seeds]
    kept = Kept(Path(arguments.cache))
    with progress(f"{experiment.name}: {len(jobs)} runs") as say:
        rows = asyncio.run(run_all(jobs, kept, arguments.workers or os.cpu_count() or 1, say))
    found = summary(rows)
    _show(experiment, settings, found, len(seeds))
    write_json(
        {
            "experiment": experiment.name,
            "question": experiment.question,
            "published": experiment.published,
            "scale": arguments.scale,
            "steps": settings[0].steps,
            "seeds": list(seeds),
            "rows": [row.plain() for row in rows],
            "summary": {name: {what: asdict(s) for what, s in of.items()} for name, of in found.items()},
        },
        arguments.json,
    )
    if arguments.plot:
        draw(experiment, rows, Path(arguments.plot))
        print(f"picture: {arguments.plot}")
    return 0


def _show(experiment: Experiment, settings: Sequence[Setting], found: Summary, seeds: int) -> None:
    table = Table(title=experiment.question, caption=f"published: {experiment.published}", title_justify="left")
    table.add_column("setting")
    for _, title, _ in COLUMNS:
        table.add_column(title, justify="right")
    for setting in settings:
        of = found[setting.name]
        table.add_row(setting.name, *(_cell(of[what], form) for what, _, form in COLUMNS))
    console = stdout()
    console.print(table)
    spread = "mean ± standard deviation over seeds" if seeds > 1 else "one seed"
    console.print(f"{spread} · {settings[0].steps} steps per learner", style="dim", highlight=False)


def _cell(value: Spread, form: str) -> str:
    said = form.format(value.mean)
    return f"{said} ± {form.format(value.deviation)}" if value.deviation else said


def draw(experiment: Experiment, rows: Sequence[Row], path: Path) -> None:
    """Draw loss and goodput of every setting, each seed a dot."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys(row.setting for row in rows))
    figure, axes = plt.subplots(1, 2, figsize=(12, 1.2 + 0.32 * len(names)), sharey=True, layout="constrained")
    for axis, what, title in zip(
        axes, ("val_loss", "goodput"), ("held-out loss, nats per byte", "goodput"), strict=True
    ):
        for y, name in enumerate(names):
            values = [float(getattr(row, what)) for row in rows if row.setting == name]
            axis.plot([min(values), max(values)], [y, y], color="0.75", linewidth=6, solid_capstyle="round")
            axis.plot(values, [y] * len(values), "o", color="tab:blue", markersize=4)
            axis.plot([sum(values) / len(values)], [y], "|", color="black", markersize=12)
        axis.set_xlabel(title)
        axis.grid(axis="x", alpha=0.3)
    axes[0].set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    axes[1].set_xlim(0, 1.02)
    figure.suptitle(experiment.question, fontsize=11)
    save(figure, path)
    plt.close(figure)

"""The demo's results for people: the picture loss.png and the table of the summary."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from isthmus.format.records.messages import PARTS
from isthmus_services.demo.fleet import CALM_PERIODS
from isthmus_services.demo.judge import CURVE_EVERY, WHOLE_STEPS, Point
from isthmus_services.output.report import save
from isthmus_services.output.view import clips, rejections


def plot(
    path: Path,
    global_points: list[Point],
    single_points: list[Point],
    ends: tuple[float, float],
    learners: int,
    title: str,
) -> None:
    """Draw held-out loss against tokens per learner: in both curves, the same x means the same steps and time.

    `ends`: the last loss of each curve on all windows, as the table has it.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    axes.plot(
        [p.tokens / 1e3 for p in single_points],
        [p.loss for p in single_points],
        linestyle="--",
        marker="s",
        markersize=3,
        color="tab:gray",
        label=f"one learner alone on its shard (at its end {ends[1]:.4f} on all windows)",
    )
    axes.plot(
        [p.tokens / learners / 1e3 for p in global_points],
        [p.loss for p in global_points],
        marker="o",
        markersize=3,
        color="tab:blue",
        label=f"global model of {learners} learners (at its end {ends[0]:.4f} on all windows)",
    )
    # The y axis leaves out the first drop, from noise to letters: it would flatten the rest of the curves.
    later = [p.loss for p in (*global_points[1:], *single_points[1:])]
    if later:
        axes.set_ylim(min(later) - 0.05, max(later) + 0.15)
    axes.set_xlabel("thousand tokens per learner")
    axes.set_ylabel(f"loss on every {CURVE_EVERY}th held-out window, nats per byte")
    axes.set_title(title)
    total = axes.secondary_xaxis(
        "top", functions=(lambda x: np.asarray(x) * learners, lambda x: np.asarray(x) / learners)
    )
    total.set_xlabel(f"thousand tokens of all {learners} learners")
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, path)
    pyplot.close(figure)


def _why_none(report: Mapping[str, object], settings: Mapping[str, Any]) -> str:
    """Return which kind of process was to be killed and never was, and why; empty if none was spared so."""
    by_kind = report["kills_by_kind"]
    assert isinstance(by_kind, dict)
    asked = {"learner": settings.get("kill_every"), "syncer": settings.get("kill_syncer_every")}
    spared = [kind for kind, every in asked.items() if every and not by_kind[kind]]
    if not spared:
        return ""
    calm = CALM_PERIODS * settings["rules"]["sync_every"]
    return (
        f"no {' and no '.join(spared)} was killed: at its time each was within {calm} steps of its start or its end; "
        "give more --steps, or kill sooner"
    )


def show(report: dict[str, object], console: Console) -> None:
    """Print the summary of the report as a table."""
    table = Table(title="summary", title_justify="left", show_header=False)
    table.add_column("what", overflow="fold")
    table.add_column("value", justify="right", overflow="fold")

    def number(key: str) -> float:
        value = report[key]
        assert isinstance(value, int | float), key
        return float(value)

    gain = number("single_val_loss") - number("global_val_loss")
    table.add_row("held-out loss, global model", f"{number('global_val_loss'):.4f} nats/byte")
    table.add_row("held-out loss, one learner alone", f"{number('single_val_loss'):.4f} nats/byte")
    table.add_row(
        "judged on", f"{number('held_out_bytes'):,.0f} of {number('held_out_bytes_in_all'):,.0f} held-out bytes"
    )
    settings = report["settings"]
    assert isinstance(settings, dict)
    brief = "" if settings["steps"] >= WHOLE_STEPS else " (too short to compare)"
    table.add_row("gain", f"{gain:+.4f}{brief}")
    ledger = report["ledger"]
    assert isinstance(ledger, dict)
    table.add_row("tokens processed", f"{ledger['processed']:,.0f}")
    for part in PARTS:
        share = f"{ledger[part] / max(ledger['processed'], 1):.1%}"
        last = ": each learner's last steps, not in the model" if part == "pending" and ledger[part] else ""
        table.add_row(f"tokens {part}", f"{ledger[part]:,.0f} ({share}{last})")
    if again := report.get("tokens_trained_again"):
        table.add_row("tokens trained again", f"{again:,} (of those processed, after kills)")
    table.add_row("commits", f"{number('commits'):,.0f}")
    table.add_row("participation", f"{number('participation'):.1%}")
    table.add_row("updates merged", f"{number('updates_merged'):,.0f}")
    reasons = report["clips"]
    assert isinstance(reasons, dict)
    table.add_row("updates clipped", clips(int(number("updates_clipped")), reasons))
    counts = report["rejections"]
    assert isinstance(counts, dict)
    rejected, spare = rejections(counts)
    table.add_row("updates rejected", rejected or "none")
    table.add_row("rejected without loss", spare or "none")
    up, down, kept = (number(name) / 1e6 for name in ("bytes_up", "bytes_down", "checkpoint_bytes"))
    table.add_row("up / down / of checkpoints", f"{up:.1f} / {down:.1f} / {kept:.1f} MB")
    kills, recovered = report["kills"], report["recoveries"]
    table.add_row("kills (recovered)", f"{kills} ({recovered})")
    table.add_row("wall time", f"{number('wall_s'):.0f} s, of which training {number('train_s'):.0f} s")
    console.print(table)
    if spared := _why_none(report, settings):
        console.print(spared, highlight=False)

"""`isthmus status`: one look at a run, from store and bus alone."""

import asyncio
import sys

from rich.console import Console
from rich.table import Table

from isthmus.learner.history import checkpoints_in
from isthmus.records.objects import LEARNERS
from isthmus.status import PARTS, Ledger, Status, read_ledgers, read_status
from isthmus_services import commands, options
from isthmus_services.ports import open_ports
from isthmus_services.report import write_json

LISTEN_BEATS = 1.5
"""Heartbeats to listen for before a learner counts as silent."""


def run(settings: commands.Status) -> int:
    """Print the state of a run."""

    async def go() -> tuple[Status, str, dict[str, Ledger]]:
        bus = options.bus_of(settings, settings.run)
        async with open_ports(settings.run, bus, bus_must_answer=False) as ports:
            made = ports.log.run
            title = (
                f"{made.url}: run {made.digest[:8].hex()}, {made.layout.size:,} parameters, "
                f"{len(made.layout.fragments)} fragments, H {made.rules.sync_every}, {made.rules.merge}, "
                f"{made.rules.codec_up} up, {made.rules.codec_down} down"
            )
            listen_s = LISTEN_BEATS * made.pace.heartbeat_s
            status = await read_status(ports.log, ports.bus, ports.runtime, listen_s)
            listed = checkpoints_in(await ports.store.list(LEARNERS)) if settings.ledger else []
            return status, title, await read_ledgers(ports.log, listed)

    status, title, ledgers = asyncio.run(go())
    show(status, title)
    for learner, ledger in sorted(ledgers.items()):
        show_ledger(learner, ledger)
    write_json(status.as_json() | ({"ledgers": ledgers} if settings.ledger else {}), settings.json)
    return 0


def show(status: Status, title: str) -> None:
    """Print a status as tables."""
    # Into a pipe there is no width to fit.
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(title, highlight=False)
    if status.bus_error:
        console.print(f"the bus cannot be reached: {status.bus_error}", style="red", highlight=False)

    fragments = Table(title="fragments", title_justify="left")
    for column in ("fragment", "version", "merged", "missing", "closed by", "quorum s", "grace s", "writer"):
        fragments.add_column(column, justify="right" if column in ("fragment", "version") else "left")
    for p, commit in enumerate(status.heads):
        if commit is None:
            fragments.add_row(str(p), "0", *[""] * 6)
            continue
        w = commit.header.waited
        fragments.add_row(
            str(p),
            str(commit.version),
            " ".join(i.learner for i in commit.header.inputs),
            " ".join(w.missing),
            w.closed_by,
            f"{w.quorum_s:.3f}",
            f"{w.grace_s:.3f}",
            commit.header.writer,
        )
    console.print(fragments)

    learners = Table(title="learners", title_justify="left")
    for column in ("learner", "life", "step", "loss", "versions", "state", "tokens", *PARTS):
        learners.add_column(column)
    for view in sorted(status.hearing.learners.values(), key=lambda v: v.name):
        beat = view.heartbeat
        target = f"/{beat.steps_target}" if beat and beat.steps_target else ""
        row = [view.name, str(view.incarnation), f"{view.step}{target}"]
        if beat is None:
            row += ["", "", status.why_behind(view), *[""] * 7]
        else:
            low, high = min(beat.versions, default=0), max(beat.versions, default=0)
            row += [
                "" if beat.loss is None else f"{beat.loss:.3f}",
                f"{low}–{high}",
                status.why_behind(view) or "training",
                f"{beat.ledger.processed:,.0f}",
            ]
            row += [f"{getattr(beat.ledger, part) / max(beat.ledger.processed, 1):.1%}" for part in PARTS]
        learners.add_row(*row)
    console.print(learners)

    for alive in status.hearing.syncers.values():
        live = "alive" if alive.syncer in status.hearing.syncers_live else "silent"
        waiting = f", waiting for {alive.waiting_for}" if alive.waiting_for else ""
        console.print(
            f"syncer {alive.syncer}: {live}, holds {alive.held} of {len(alive.heads)} fragments, "
            f"{alive.commits} commits since its start{waiting}",
            highlight=False,
        )
        for p in alive.broken:
            console.print(f"syncer {alive.syncer} cannot fold fragment {p}: see its log", style="red", highlight=False)
    rejected = ", ".join(f"{reason} {count}" for reason, count in sorted(status.rejected.items()))
    console.print(f"rejected: {rejected or 'nothing'}", highlight=False)


def show_ledger(learner: str, ledger: Ledger) -> None:
    """Print one learner's ledger: where the tokens it processed went, in each fragment."""
    lost = f", {ledger['tokens_lost']:,} of them beyond a checkpoint" if ledger["tokens_lost"] else ""
    table = Table(title=f"ledger of {learner}: {ledger['processed']:,} tokens processed{lost}", title_justify="left")
    for column in ("fragment", "base", *PARTS):
        table.add_column(column, justify="right")
    for row in ledger["fragments"]:
        table.add_row(str(row["fragment"]), str(row["base"]), *(f"{row[part]:,}" for part in PARTS))
    Console(width=None if sys.stdout.isatty() else 150).print(table)

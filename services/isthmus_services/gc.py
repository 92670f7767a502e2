"""`isthmus gc`: say what the log has passed by, and with --apply delete it."""

import argparse
import asyncio

from rich.console import Console
from rich.table import Table

from isthmus import collect
from isthmus.errors import InputError
from isthmus_services import report
from isthmus_services.ports import open_log
from isthmus_services.progress import progress


def run(arguments: argparse.Namespace) -> int:
    """Plan, show, and apply where it was asked for."""
    if arguments.keep < 1:
        raise InputError(f"--keep {arguments.keep}: at least one version")
    if not arguments.min_age >= 0:
        raise InputError(f"--min-age {arguments.min_age:g}: seconds, not less than none")
    plan = asyncio.run(_collect(arguments))
    table = Table(title=f"garbage of {arguments.run}", title_justify="left")
    for column in ("kind", "objects", "bytes"):
        table.add_column(column, justify="left" if column == "kind" else "right")
    for kind, entries in sorted(plan.doomed.items()):
        table.add_row(kind, f"{len(entries):,}", f"{sum(e.size for e in entries):,}")
    table.add_row("all", f"{plan.objects:,}", f"{plan.bytes:,}")
    Console().print(table)
    packed = sum(map(len, plan.pack))
    first, last = min(plan.starts), max(plan.starts)
    print(f"commits to pack: {packed} into {len(plan.pack)} segments; too young for now: {plan.young} objects")
    print(f"foldable afterwards: from version {first if first == last else f'{first} to {last} (by fragment)'}")
    print("done" if arguments.apply else "dry run: nothing was deleted; --apply does it")
    report.write_json(
        {
            "applied": arguments.apply,
            "objects": {kind: len(entries) for kind, entries in plan.doomed.items()},
            "bytes": plan.bytes,
            "packed": packed,
            "segments": len(plan.pack),
            "young": plan.young,
            "starts": plan.starts,
            "heads": plan.heads,
        },
        arguments.json,
    )
    return 0


async def _collect(arguments: argparse.Namespace) -> collect.Plan:
    async with open_log(arguments.run) as log:
        with progress("reading the log") as say:
            plan = await collect.plan(log, keep=arguments.keep, min_age_s=arguments.min_age, progress=say)
        if arguments.apply:
            with progress("collecting") as say:
                await collect.apply(log, plan, say)
        return plan

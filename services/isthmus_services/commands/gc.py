"""`isthmus gc`: list the objects that a run no longer needs; --apply deletes them, --every repeats that for ever."""

import asyncio
import os
import tempfile
import time
from collections.abc import Awaitable
from typing import NoReturn

from rich.text import Text

from isthmus.agent.ports import open_log
from isthmus.errors import Denied, InputError, LogCorrupt, Unavailable, first_cause, told
from isthmus.format.rules import MemberRole
from isthmus.log import Log, gc
from isthmus.log.membership import require_may
from isthmus.runtime.urls import Place
from isthmus.wording import key_flag
from isthmus_services.output import report
from isthmus_services.output.progress import progress
from isthmus_services.output.tables import Column, fitted
from isthmus_services.settings import declared, shared

AHEAD_S = 60.0
"""Seconds by which this machine's clock may be ahead of the one that dates files."""


def run(settings: declared.Gc) -> int:
    """Plan the collection, apply it if that was asked for, and print it. With --every, repeat this and never return."""
    if settings.every is not None:
        if not settings.apply:
            raise InputError("--every needs --apply")
        asyncio.run(_again_and_again(settings, settings.every))
    plan, signed = asyncio.run(_collect(settings))
    rows = [
        (kind, f"{len(entries):,}", f"{sum(e.size for e in entries):,}")
        for kind, entries in sorted(plan.doomed.items())
    ]
    rows.append(("all", f"{plan.objects:,}", f"{plan.bytes:,}"))
    console = report.stdout()
    columns = (Column("kind", justify="left"), Column("objects"), Column("bytes"))
    # Leave the wrapping to the terminal: a URL has no good place for a line break.
    console.print(Text(f"garbage of {settings.run}", style="italic"), soft_wrap=True)
    console.print(fitted("", columns, rows, console.width))
    packed, nothing = sum(map(len, plan.pack)), not (plan.objects or plan.pack)
    first, last = min(plan.starts), max(plan.starts)
    if packed:
        print(f"commits to pack: {packed} into {len(plan.pack)} segments")
    if plan.young:
        print(
            f"{plan.young} objects younger than {settings.min_age:g} s are kept for now; use --min-age 0 to delete "
            "them, but only once every learner and syncer of the run has ended; if the store is full and they must go "
            "on, give it more space"
        )
    elif nothing:
        print(
            f"nothing can be deleted: the newest {settings.keep} versions are kept, and they need all objects; if the "
            "store is full, give it more space, or use a smaller --keep"
        )
    if plan.messages:
        print(
            f"{plan.messages} objects with messages are kept: each goes a day after the last message of its process, "
            "whose end `isthmus status` reads there"
        )
    print(f"foldable afterwards: from version {first if first == last else f'{first} to {last} (by fragment)'}")
    if plan.promoted is not None:
        print(f"kept besides: what the newest promoted version, {plan.promoted}, is folded from")
    if nothing:
        print(f"nothing was deleted: there was nothing to delete{' yet' if plan.young else ''}")
    else:
        key = key_flag("collector", signed=signed)
        print("done" if settings.apply else f"dry run: nothing was deleted; use --apply{key} to delete")
    report.write_json(
        {
            "applied": settings.apply,
            "objects": {kind: len(entries) for kind, entries in plan.doomed.items()},
            "bytes": plan.bytes,
            "packed": packed,
            "segments": len(plan.pack),
            "young": plan.young,
            "messages": plan.messages,
            "starts": plan.starts,
            "heads": plan.heads,
            "promoted": plan.promoted,
        },
        settings.json,
    )
    return 0


async def _collect(settings: declared.Gc) -> tuple[gc.Garbage, bool]:
    """Return what was found, and whether the run is signed."""
    async with open_log(settings.run, shared.trust_in(settings)) as log:
        return await _once(log, settings), log.members.signed


def _require_clock(log: Log) -> None:
    """Raise `Unavailable` if this machine's clock is ahead of the clock by which the run's folder dates its files: all
    of them would seem old. Servers of buckets refuse requests of a wrong date themselves."""
    folder = Place.of(log.run.url).folder
    if folder is None:
        return
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            ahead_s = log.runtime.wall() - os.fstat(file.fileno()).st_mtime
    except OSError:
        return  # a disk that is full must be collected, too
    if ahead_s > AHEAD_S:
        raise Unavailable(
            f"this machine's clock is {ahead_s:,.0f} s ahead of the one that dates the files in {folder}: nothing is "
            "deleted, since all of them would seem old; set both by NTP (timedatectl set-ntp true)"
        )


async def _once(log: Log, settings: declared.Gc) -> gc.Garbage:
    if settings.apply:
        require_may(log.members, log.signer, MemberRole.COLLECTOR)
        await log.runtime.offload(_require_clock, log)
    with progress("reading the log") as say:
        holes = shared.holes_in(settings)
        plan = await gc.plan(log, keep=settings.keep, min_age_s=settings.min_age, accepted=holes, progress=say)
    if settings.apply:
        with progress("collecting") as say:
            await gc.apply(log, plan, say)
    return plan


async def _again_and_again(settings: declared.Gc, every_s: float) -> NoReturn:
    """Collect garbage every `every_s` seconds, for ever. Print an outage or damage, and try again the next time."""
    async with open_log(settings.run, shared.trust_in(settings)) as log:
        while True:
            started = time.monotonic()
            line = await line_of(_once(log, settings))
            print(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {line}", flush=True)
            await asyncio.sleep(max(0.0, every_s - (time.monotonic() - started)))


async def line_of(collecting: Awaitable[gc.Garbage]) -> str:
    """Return the result of a collection in one line; after `Unavailable`, `Denied` or `LogCorrupt`, why it failed."""
    try:
        plan = await collecting
    except (Unavailable, Denied, LogCorrupt, ExceptionGroup) as error:
        cause = first_cause(error)  # objects are deleted by a group of tasks
        if not isinstance(cause, Unavailable | Denied | LogCorrupt):
            raise
        if isinstance(cause, Unavailable):
            return f"collection failed, the next one will continue: {told(cause)}"
        return f"collection failed, and nothing is collected until this is mended: {told(cause)}"
    return f"{plan.objects:,} objects deleted, {plan.bytes:,} bytes; {sum(map(len, plan.pack))} commits packed"

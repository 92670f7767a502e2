"""`isthmus status`: show the state of a run once, or live with --watch, from its store and bus alone."""

import asyncio
import time
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live as Display
from rich.text import Text

from isthmus.agent.ports import bus_answers, open_ports
from isthmus.errors import Denied, InputError, Unavailable
from isthmus.format.records.keys import LEARNERS
from isthmus.inspect.decisions import expelled, waiting
from isthmus.inspect.health_summary import Health, News, health
from isthmus.inspect.learner_problems import Part
from isthmus.inspect.live import Live
from isthmus.inspect.status import Ledger, Status, read_ledgers, read_status
from isthmus.log import evaluations
from isthmus.log.evaluations import Series
from isthmus.log.listing import checkpoints_in
from isthmus.log.log_health import collects
from isthmus.log.run import Run
from isthmus_services.output import pictures, view
from isthmus_services.output.report import stdout, write_json
from isthmus_services.output.tables import WIDEN, in_view
from isthmus_services.process import logs
from isthmus_services.settings import declared, shared

LISTEN_BEATS = 1.5
"""Heartbeats to listen for before a learner counts as silent."""

NEWEST = 2
"""Points of each series that are read if no plot is asked for: the newest and the one before."""

REFRESH_S = 0.5
LINES_EVERY_S = 5.0


def run(settings: declared.Status) -> int:
    """Print the state of a run. With --check, return 1 if the run is not healthy, else 0. Raises `InputError`."""
    console = stdout()
    if settings.plot is not None:
        shared.need("matplotlib", "demo")
        if settings.watch:
            raise InputError("--plot cannot be combined with --watch")
    if settings.watch:
        asyncio.run(_watch(settings, console))
        return 0

    async def go() -> tuple[Status, Run, str, dict[str, Ledger], dict[str, Series], list[str]]:
        bus = shared.bus_of(settings, settings.run)
        async with open_ports(settings.run, bus, trust=shared.owner_in(settings)) as ports:
            with suppress(Unavailable):
                await bus_answers(ports.bus)
            made = ports.log.run
            listen_s = LISTEN_BEATS * made.pace.heartbeat_s
            status = await read_status(ports.log, ports.bus, ports.runtime, listen_s, shared.holes_in(settings))
            listed = checkpoints_in(await ports.store.list(LEARNERS)) if settings.ledger else []
            newest = None if settings.plot is not None else NEWEST
            measured: dict[str, Series] = {}
            with suppress(Denied):  # without permission to read the series, show the rest
                for name in await evaluations.names(ports.log):
                    measured[name] = await evaluations.series(ports.log, name, newest)
            known = {*status.hearing.learners, *status.hearing.strangers, *status.losses}
            notes = [] if status.members_lost else expelled(ports.log.members, known)
            notes += await waiting(ports.log)
            return status, made, ports.bus.url, await read_ledgers(ports.log, listed), measured, notes

    status, made, bus, ledgers, measured, notes = asyncio.run(go())
    found = health(status, made.url, bus, settings.expect or 0)
    # Leave the wrapping to the terminal, so that commands can be copied.
    for line in found.lines:
        console.print(Text(line, style="" if found.ok else "yellow"), soft_wrap=True)
    for note in notes:  # no failures: --check does not mind them
        console.print(Text(note), soft_wrap=True)
    console.print(title(made), highlight=False)
    console.print(view.tables(status, console.width))
    if status.uncollected:
        grows = collects(made.url, status.uncollected, status.accepted, signed=made.header.owner is not None)
        console.print(Text(grows, style="yellow"), soft_wrap=True)
    for learner, ledger in sorted(ledgers.items()):
        console.print(view.ledger(learner, ledger, console.width))
    for name, series in measured.items():
        if series.points or series.contested:
            console.print(view.measured(name, series), soft_wrap=True)
    if settings.plot is not None:
        pictures.measured(made.url, {name: series.points for name, series in measured.items()}, Path(settings.plot))
    problems = [{"said": part.said, "do": part.do} for part in found.parts]
    report = status.as_json() | {"health": {"ok": found.ok, "said": found.said, "problems": problems}, "notes": notes}
    report["measured"] = {name: [[p.cut, p.value, p.at] for p in series.points] for name, series in measured.items()}
    report["contested"] = {name: [asdict(one) for one in series.contested] for name, series in measured.items()}
    write_json(report | ({"ledgers": ledgers} if settings.ledger else {}), settings.json)
    return 1 if settings.check and not found.ok else 0


def title(made: Run) -> str:
    """Return a description of a run in one line."""
    return (
        f"{made.url}: run {made.digest[:8].hex()}, {made.layout.size:,} parameters, "
        f"{len(made.layout.fragments)} fragments, H {made.rules.sync_every}, {made.rules.merge}, "
        f"{made.rules.codec_up} up, {made.rules.codec_down} down"
    )


async def _watch(settings: declared.Status, console: Console) -> None:
    """Show the run until interrupted: a live display on a terminal, a line every `LINES_EVERY_S` seconds elsewhere."""
    logs.quiet()
    bus = shared.bus_of(settings, settings.run)
    async with open_ports(settings.run, bus, trust=shared.owner_in(settings)) as ports:
        with suppress(Unavailable):
            await bus_answers(ports.bus)
        live = Live(ports.log, ports.store, ports.bus, ports.runtime, shared.holes_in(settings))
        await live.begin()
        following = asyncio.ensure_future(live.run())
        try:
            # Listen first: until heartbeats have arrived, every learner looks silent.
            await asyncio.wait([following], timeout=LISTEN_BEATS * ports.log.run.pace.heartbeat_s)
            if console.is_terminal:
                await _display(live, ports.log.run, ports.bus.url, console, following, settings.expect or 0)
            else:
                await _lines(live, ports.log.run, ports.bus.url, following, settings.expect or 0)
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


async def _display(
    live: Live, made: Run, bus: str, console: Console, following: "asyncio.Future[None]", expected: int
) -> None:
    with Display(console=console, screen=True, auto_refresh=False) as display:
        while not following.done():
            status = live.status()
            lines = [
                *map(Text, _seen(live, status, made, bus, expected).lines),
                Text(title(made)),
                Text(f"{time.strftime('%H:%M:%S')}  {view.totals(status)}"),
            ]
            display.update(in_view(Group(*lines, view.tables(status, console.width, WIDEN)), console), refresh=True)
            await asyncio.wait([following], timeout=REFRESH_S)
    following.result()


def _seen(live: Live, status: Status, made: Run, bus: str, expected: int) -> Health:
    """Return the run's health, and before it what this process cannot see."""
    found = health(status, made.url, bus, expected)
    if not live.trouble or status.bus_error:  # `health` says what the bus does
        return found
    return replace(found, ok=False, parts=[Part(live.trouble), *found.parts])


async def _lines(live: Live, made: Run, bus: str, following: "asyncio.Future[None]", expected: int) -> None:
    news = News()
    while not following.done():
        status = live.status()
        found = _seen(live, status, made, bus, expected)
        waits = {p: names for p in status.hearing.rounds if (names := status.waited_for(p))}
        said = f"{time.strftime('%H:%M:%S')}  {view.totals(status)}"
        if waits:
            said += f", rounds wait for {', '.join(sorted(set.union(*waits.values())))}"
        print("; ".join([said, *filter(None, [found.count])]), flush=True)
        for line in news.of(found.parts):
            print(f"  {line}", flush=True)
        await asyncio.wait([following], timeout=LINES_EVERY_S)
    following.result()

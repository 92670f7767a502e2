"""`isthmus doctor`: run every check and print a line for each, with advice, and the failures again at the end.

The exit code is 1 if a check fails.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence

from rich.console import Console
from rich.text import Text

from isthmus.agent.ports import THREADS
from isthmus.bus import in_store
from isthmus.doctor import (
    FAILURE,
    NOTE,
    OK,
    WARNING,
    CheckOutcome,
    Finding,
    Role,
    RoleKind,
    brought,
    examine_bus,
    examine_machine,
    examine_part,
    examine_ranks,
    examine_store,
    examine_trust,
    examine_way,
    is_signed,
)
from isthmus.errors import legible
from isthmus.format.records.fields import require_name
from isthmus.log.holes import Holes
from isthmus.log.run import Run
from isthmus.log.trust import Trust, is_near
from isthmus.runtime.clock import Runtime, threaded
from isthmus.runtime.urls import Place, without_passwords
from isthmus.wording import counted
from isthmus_services.output.report import stdout, write_json
from isthmus_services.process import logs
from isthmus_services.settings import declared, shared

_STYLE = {OK: "green", NOTE: "cyan", WARNING: "yellow", FAILURE: "bold red"}
NO_RUN = bytes(32)
"""Stands for the run's digest on the bus if there is no run yet."""


def run(settings: declared.Doctor) -> int:
    """Run the checks and print the findings. Return 1 if a check failed, else 0."""
    logs.quiet()
    require_name("--learner", settings.learner)
    require_name("--series", settings.series)
    role = Role(RoleKind(settings.role), settings.learner, settings.series)
    bus = shared.bus_of(settings, settings.run) if role.on_bus else ""
    size, holes = int(settings.size * (1 << 20)), shared.holes_in(settings)
    trust, unusable = brought(settings.key, settings.owner, settings.run_digest)
    console = stdout()
    found: list[Finding] = []

    async def go() -> None:
        with threaded(THREADS) as runtime:
            for finding in unusable:
                found.append(finding)
                show(finding, console)
            async for finding in examine(settings.run, bus, role, trust, runtime, size, holes):
                found.append(finding)
                show(finding, console)

    asyncio.run(go())
    counts = {outcome: sum(f.outcome == outcome for f in found) for outcome in CheckOutcome}
    if failures := [finding for finding in found if finding.outcome == FAILURE]:
        console.print(f"\n{counted(len(failures), 'failure')}, to look at first:", highlight=False)
        for finding in failures:
            show(finding, console)
        console.print()
    console.print(summary(counts), highlight=False)
    write_json({"role": role.kind, "counts": counts, "findings": [f.as_json() for f in found]}, settings.json)
    return 1 if counts[FAILURE] else 0


async def examine(
    url: str, bus: str, role: Role, trust: Trust, runtime: Runtime, size: int, accepted: Holes | None = None
) -> AsyncIterator[Finding]:
    """Yield the findings about the machine, the ranks, the store, the bus and the trust, in this order.

    `accepted`: holes in the log that are only noted. Findings about the network path to the store follow those about
    the store; the same holds for the bus.
    """
    folder = Place.of(url).folder
    signed = folder is not None and await is_signed(url, runtime)
    for finding in examine_machine(folder, role, runtime, signed=signed):
        yield finding
    for finding in examine_ranks(role):
        yield finding
    digest, run, full, failed, apart = NO_RUN, None, False, False, list[Finding]()
    async for said in examine_store(url, role, runtime, size, accepted):
        if isinstance(said, Run):
            digest, run = said.digest, said
        elif said.check.startswith("store: must not "):
            apart.append(said)
        else:
            full |= said.outcome == FAILURE and " is full (" in said.said
            yield said
    for finding in _roles(apart, url, run):
        yield finding
    async for finding in examine_way("store", url, runtime):
        yield finding
    async for finding in examine_bus(bus, digest, role, runtime, url):
        failed |= finding.outcome == FAILURE
        yield finding
    if role.on_bus and not in_store(bus):
        async for finding in examine_way("bus", bus, runtime):
            yield finding
    if run is None:
        return
    for finding in examine_trust(url, bus, run, trust):
        yield finding
    async for finding in examine_part(url, bus, run, role, trust, runtime, full=full, failed=failed):
        yield finding


def _roles(apart: Sequence[Finding], url: str, run: Run | None) -> Sequence[Finding]:
    """Return the findings about what a role must not do; a single warning where nothing was meant to keep roles apart.

    That is so if nothing is signed, the store is an S3 server on this machine, and its credentials may do all that was
    tried.
    """
    tried = [finding for finding in apart if finding.outcome in (OK, FAILURE)]
    one_for_all = tried and all(finding.outcome == FAILURE for finding in tried)
    own = is_near(url) and Place.of(url).scheme.startswith("s3")
    if run is None or run.header.owner is not None or not own or not one_for_all:
        return apart
    said = "nothing keeps participants apart: these credentials may do all that this role must not"
    more = (
        "usual on one machine; else use the role's own credentials, which `isthmus access` and `isthmus create` write"
    )
    others = [finding for finding in apart if finding not in tried]
    return [Finding("store: roles", WARNING, said, more), *others]


def summary(counts: Mapping[CheckOutcome, int]) -> str:
    """Return the last line: how many findings of each outcome there are."""
    notes = f", {counted(counts[NOTE], 'note')}" if counts.get(NOTE) else ""
    return f"{counts[OK]} ok{notes}, {counted(counts[WARNING], 'warning')}, {counted(counts[FAILURE], 'failure')}"


def show(finding: Finding, console: Console) -> None:
    """Print a finding on one line, and its advice, if any, on a second."""
    line = Text(f"{finding.outcome:<8}", style=_STYLE[finding.outcome])
    line.append(f"{finding.check}: ", style="bold")
    line.append(legible(without_passwords(finding.said)), style="default")
    console.print(line, soft_wrap=True)
    if finding.advice:
        console.print(Text(f"{'':8}→ {legible(without_passwords(finding.advice))}"), soft_wrap=True)

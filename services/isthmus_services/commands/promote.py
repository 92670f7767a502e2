"""`isthmus promote RUN`: promote a version whose measurements satisfy the charter's gate, or list the promotions."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from isthmus.agent.ports import open_log
from isthmus.errors import InputError
from isthmus.format.records.charter import PromotionRule
from isthmus.format.records.keys import promotion_key
from isthmus.format.rules import MemberRole
from isthmus.log import Log, promotions
from isthmus.log.membership import require_may
from isthmus.log.promotions import Measured, Promotion, Promotions
from isthmus_services.output.report import stdout, write_json
from isthmus_services.output.tables import Column, fitted
from isthmus_services.settings import declared, shared


def run(settings: declared.Promote) -> int:
    """Promote, and print what was promoted, or why the gate fails. Return 1 if it fails. Raises `InputError`."""
    if settings.list:
        known, beyond, stored = asyncio.run(_read(settings))
        _print_list(settings, known, beyond, stored)
        return 0
    if settings.name is None:
        raise InputError("name the promoter: --name NAME (or --list, to look at the promotions)")
    found, lines = asyncio.run(_promote(settings, settings.name))
    print("\n".join(lines))
    write_json({"promoted": _as_json(found) if found else None, "why_not": [] if found else lines}, settings.json)
    return 0 if found else 1


async def _promote(settings: declared.Promote, name: str) -> tuple[Promotion | None, list[str]]:
    """Return the promotion, or None if the gate fails, and what to print."""
    async with open_log(settings.run, shared.trust_in(settings)) as log:
        gate = promotions.gate_of(await log.members.refresh(log.store))
        if gate is None:
            raise InputError(
                f"{log.run.url}: nothing can be promoted, since this run has no charter with a gate (isthmus charter "
                "propose)"
            )
        if name not in gate.promoters:
            raise InputError(f"{name} is no promoter of this run's charter: {', '.join(gate.promoters)} may promote")
        require_may(log.members, log.signer, MemberRole.FOLLOWER, name)
        known = Promotions(log)
        last = await known.refresh()
        numbers = await promotions.measured(log, gate)
        version = settings.version
        if version is None:
            version = promotions.candidate(gate, numbers, last.version if last else -1)
        if version is None:
            return None, [_too_few(log, gate, numbers, last)]
        if last and version <= last.version:
            return _not_after(version, known, last)
        cut = await promotions.cut_in_log(log, version)
        if cut is None:
            raise InputError(f"version {version}: not every fragment has it yet (isthmus status {log.run.url})")
        good, not_good = promotions.chosen(gate, numbers.get(version, {}), cut, last)
        if len(good) < gate.least:
            return None, [
                f"not promoted: version {version} has {len(good)} of the {gate.least} numbers that the charter asks "
                f"for in the series {gate.series}",
                *not_good,
                "the run goes on, and a later version can pass; if the rule is wrong, the owners change it: isthmus "
                f"charter propose {log.run.url} FILE",
            ]
        found = await promotions.promote(known, name, version, cut, good)
        return found, [
            f"promoted: version {version} of {log.run.url}, as promotion {found.number}, by {name}: {gate.series} "
            f"{_numbers(found)}",
            *(f"not counted: {why}" for why in not_good),
        ]


def _not_after(version: int, known: Promotions, last: Promotion) -> tuple[Promotion | None, list[str]]:
    """Return what `_promote` does for a version that is not newer than the last promoted one."""
    there = next((p for p in known.sound if p.version == version), None)
    if there and there.header:
        return there, [f"version {version} is promoted already: promotion {there.number}, by {there.header.by}"]
    return None, [
        f"not promoted: version {version} is older than version {last.version}, which promotion {last.number} promoted"
    ]


def _too_few(
    log: Log, gate: PromotionRule, numbers: Mapping[int, Mapping[str, Sequence[Measured]]], last: Promotion | None
) -> str:
    """Return in words that no version has numbers of enough evaluators."""
    after, cut = last.version if last else -1, ""
    newer = f", and is newer than the promoted version {after}" if last else ""
    said = f"not promoted: no version has numbers of {gate.least} evaluators in the series {gate.series}{newer}"
    if beyond := [version for version in numbers if version > after]:
        best = max(beyond, key=lambda version: (len(numbers[version]), version))
        there = numbers[best]
        missing = [name for name in gate.evaluators if name not in there]
        said += f": version {best} has those of {', '.join(there)}, and {gate.least - len(there)} more must come from "
        said += ", ".join(missing)
        cut = f" --version {best}"
    return f"{said} (isthmus follow {log.run.url}{cut} --exec COMMAND --series {gate.series} --name NAME stores them)"


async def _read(settings: declared.Promote) -> tuple[Promotions, list[int], list[Measured]]:
    """Return the promotions, the numbers of those that are not read, and all numbers of the gates' evaluators."""
    async with open_log(settings.run, shared.owner_in(settings)) as log:
        await log.members.refresh(log.store)
        known = Promotions(log)
        await known.refresh()
        return known, await known.beyond(), await promotions.stored(log)


def _print_list(settings: declared.Promote, known: Promotions, beyond: list[int], stored: Sequence[Measured]) -> None:
    found = sorted([*known.sound, *known.unsound], key=lambda promotion: promotion.number)
    others = {p.number: promotions.others(p, stored) for p in found}
    console = stdout()
    if found:
        columns = (
            Column("promotion"), Column("version"), Column("verdict", justify="left"),
            Column("numbers", leaves=1, justify="left"), Column("by", leaves=2, justify="left"),
            Column("written at", leaves=3, justify="left"),
        )  # fmt: skip
        rows = [
            (
                str(p.number), str(p.version) if p.header else "?", p.fault or "holds", _numbers(p),
                p.header.by if p.header else "?", _date(p.header.written_at) if p.header else "?",
            )
            for p in found
        ]  # fmt: skip
        console.print(Text(f"promotions of {settings.run}", style="italic"), soft_wrap=True)
        console.print(fitted("", columns, rows, console.width))
    last = known.last
    newest = f"version {last.version} (promotion {last.number})" if last else "none"
    console.print(Text(f"the newest promoted version is: {newest}"), soft_wrap=True)
    for p in found:
        for said in promotions.doubts(p, stored):
            console.print(Text(said), soft_wrap=True)
        if rest := promotions.left_out(p, stored):
            numbers = ", ".join(f"{by} {value:g}" for by, values in rest.items() for value in values)
            console.print(Text(f"promotion {p.number} does not rest on: {numbers}"), soft_wrap=True)
    if beyond:
        console.print(
            Text(
                f"{promotion_key(known.free)} is missing, so promotions {', '.join(map(str, beyond))} after it are not "
                "read: restore it from a backup"
            ),
            soft_wrap=True,
        )
    write_json(
        {
            "promotions": [
                _as_json(p) | {"others": others[p.number], "left_out": promotions.left_out(p, stored)} for p in found
            ],
            "newest": last.version if last else None,
            "not_read": beyond,
        },
        settings.json,
    )


def _numbers(found: Promotion) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in found.values.items())


def _date(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))


def _as_json(found: Promotion) -> dict[str, Any]:
    h = found.header
    return {
        "number": found.number,
        "version": found.version if h else None,
        "holds": not found.fault,
        "why_not": found.fault,
        "series": found.measured[0].series if found.measured else None,
        "values": dict(found.values),
        "by": h.by if h else None,
        "members": h.members if h else None,
        "published": h.published.hex() if h else None,
        "written_at": h.written_at if h else None,
    }

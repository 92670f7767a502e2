"""`isthmus charter show RUN`: print the charter in force, and the changes that wait for approvals."""

import asyncio
from typing import Any

import msgspec
from rich.text import Text

from isthmus.agent.ports import open_log
from isthmus.format.signing import fingerprint
from isthmus.inspect.charter_words import (
    at_time,
    differences,
    gone,
    in_force,
    in_word,
    in_words,
    run_in_words,
    until,
)
from isthmus.log.membership import Members, Membership
from isthmus.log.proposals import Proposal, entitled, every_proposal, needs
from isthmus.log.run import Run
from isthmus_services.commands.charter import threshold
from isthmus_services.commands.members import require_signed
from isthmus_services.output.report import stdout, write_json
from isthmus_services.settings import declared, shared


def run(settings: declared.CharterShow) -> int:
    """Print the charter."""
    members, stored, run = asyncio.run(_read(settings))
    now, waiting = members.current, [p for p in stored if p.instead is None]
    void, absent = [p for p in stored if p.is_void], gone(members)
    lines = in_words(now.charter) or ["this run has no charter: its owner decides alone (isthmus charter propose)"]
    if now.charter is not None:
        lines.insert(0, f"membership {now.version}, {in_force(now)}, approved by {', '.join(_by(now))}")
        lines += map(in_word, now.members)
    lines.append(run_in_words(run))
    lines += absent.values()
    for proposal in waiting:
        names = entitled(now, proposal.header)
        have = ", ".join(names[key] for key in proposal.approvals)
        lines += ["", f"proposal {proposal.id} ({threshold(now, proposal.header)}): approved by {have}"]
        lines += [f"  {line}" for line in (*differences(now, proposal.header), until(now, proposal.header))]
        lines.append(f"  proposed {at_time(proposal.header.written_at)}; {needs(proposal, now)}")
    for proposal in void:
        assert proposal.instead is not None, "it is void"
        lines += [
            "",
            f"proposal {proposal.id} is void: membership {proposal.instead.version}, another change, came before it; "
            "if it is still wanted, propose it anew",
        ]
    console = stdout()
    for line in lines:
        console.print(Text(line), soft_wrap=True)
    write_json(
        _report(now, waiting) | {"run": _run(run), "void": [p.id for p in void], "absent": absent}, settings.json
    )
    return 0


def _by(now: Membership) -> list[str]:
    names = {owner.key: owner.name for owner in (now.charter.owners if now.charter else ())}
    return [names.get(given.owner, fingerprint(given.owner)) for given in now.approvals]


def _report(now: Membership, waiting: list[Proposal]) -> dict[str, Any]:
    charter = None
    if now.charter is not None:
        charter = msgspec.to_builtins(now.charter, builtin_types=(bytes,))
        charter["owners"] = [{"name": o.name, "key": fingerprint(o.key)} for o in now.charter.owners]
    return {
        "version": now.version,
        "charter": charter,
        "approved_by": _by(now),
        "proposals": [
            {
                "id": proposal.id,
                "changes": list(differences(now, proposal.header)),
                "proposed_at": proposal.header.written_at,
                "until": list(proposal.header.until),
                "approved_by": [entitled(now, proposal.header)[key] for key in proposal.approvals],
                "still_needs": proposal.lacks(now),
            }
            for proposal in waiting
        ],
    }


def _run(run: Run) -> dict[str, Any]:
    return {
        "digest": run.digest.hex(),
        "parameters": run.layout.size,
        "rules": msgspec.to_builtins(run.rules),
        "bounds": msgspec.to_builtins(run.header.bounds),
    }


async def _read(settings: declared.CharterShow) -> tuple[Members, list[Proposal], Run]:
    async with open_log(settings.run, shared.owner_in(settings)) as log:
        require_signed(log)
        return log.members, await every_proposal(log.store, log.members), log.run

"""`isthmus charter propose RUN FILE`: propose a charter, or another one, and the members whose keys the file states."""

import asyncio

from isthmus.agent.ports import open_log
from isthmus_services.commands.charter import give_approval, proposed
from isthmus_services.commands.charter.agreement import read_agreement
from isthmus_services.commands.members import require_signed
from isthmus_services.output.report import write_json
from isthmus_services.settings import declared, shared


def run(settings: declared.CharterPropose) -> int:
    """Propose the charter in the file. Raises `InputError` for a charter that cannot work."""
    asyncio.run(_propose(settings))
    return 0


async def _propose(settings: declared.CharterPropose) -> None:
    agreement, trust = read_agreement(settings.file), shared.trust_in(settings)
    async with open_log(settings.run, trust) as log:
        require_signed(log)
        before = await log.members.refresh(log.store)
        entries = agreement.members(before.members)
        header = await proposed(log, entries, agreement.charter, settings.hours)
        write_json(await give_approval(log, header, trust, settings.file, hours=settings.hours), settings.json)

"""`isthmus charter propose RUN FILE`: propose a charter, or another one, with the proposer's approval."""

import asyncio

from isthmus.agent.ports import open_log
from isthmus_services.commands.charter import give_approval, proposed, read_charter
from isthmus_services.commands.members import require_signed
from isthmus_services.settings import declared, shared


def run(settings: declared.CharterPropose) -> int:
    """Propose the charter in the file. Raises `InputError` for a charter that cannot work."""
    asyncio.run(_propose(settings))
    return 0


async def _propose(settings: declared.CharterPropose) -> None:
    charter = read_charter(settings.file)
    async with open_log(settings.run, shared.trust_in(settings)) as log:
        require_signed(log)
        before = await log.members.refresh(log.store)
        await give_approval(log, await proposed(log, before.members, charter, settings.hours))

"""`isthmus charter approve RUN ID`: approve a proposed change. The last approval needed puts it into force."""

import asyncio

from isthmus.agent.ports import open_log
from isthmus.log.proposals import require
from isthmus_services.commands.charter import approved
from isthmus_services.commands.members import require_signed
from isthmus_services.settings import declared, shared


def run(settings: declared.CharterApprove) -> int:
    """Approve the proposal. Raises `InputError` if there is none with this id, or the key is no owner's."""
    print("\n".join(asyncio.run(_approve(settings))))
    return 0


async def _approve(settings: declared.CharterApprove) -> list[str]:
    async with open_log(settings.run, shared.trust_in(settings)) as log:
        require_signed(log)
        found = await require(log.store, log.members, settings.proposal)
        return await approved(log, found.header)

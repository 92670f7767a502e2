"""`isthmus charter approve RUN ID`: approve a proposed change. The last approval needed puts it into force."""

import asyncio

from isthmus.agent.ports import open_log
from isthmus.errors import InputError
from isthmus.inspect.charter_words import in_force, made_before
from isthmus.log.listing import heads_of
from isthmus.log.proposals import require
from isthmus_services.commands.charter import give_approval
from isthmus_services.commands.charter.agreement import read_agreement, require_expected
from isthmus_services.commands.members import require_signed
from isthmus_services.settings import declared, shared


def run(settings: declared.CharterApprove) -> int:
    """Approve the proposal. Raises `InputError` if there is none with this id, it is void, it is not as expected,
    or the key is no owner's."""
    asyncio.run(_approve(settings))
    return 0


async def _approve(settings: declared.CharterApprove) -> None:
    trust = shared.trust_in(settings)
    async with open_log(settings.run, trust) as log:
        require_signed(log)
        found = await require(log.store, log.members, settings.proposal)
        if (now := found.instead) is None:
            if settings.expect is not None:
                require_expected(found.header, log.members.current, read_agreement(settings.expect))
                first = log.members.current.charter is None and not settings.with_earlier
                if first and (head := max(await heads_of(log))):
                    raise InputError(f"{made_before(head)}: if you have agreed on that, add --with-earlier")
            await give_approval(log, found.header, trust, settings.expect, hours=settings.hours)
            return
        since = in_force(now)
        if found.is_void:
            raise InputError(
                f"proposal {found.id} is void: membership {now.version}, another change, came before it ("
                f"{since}). If it is still wanted, propose it anew: isthmus charter propose, or isthmus members"
            )
        print(
            f"proposal {found.id} is in force by membership {now.version} ({since}), approved by "
            f"{len(now.approvals)}: no approval is needed any more"
        )

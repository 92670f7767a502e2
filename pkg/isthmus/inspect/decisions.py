"""What the owners of a run have decided, or are to decide, as `isthmus status` and the board mention it."""

from collections.abc import Iterable

from isthmus.errors import Denied
from isthmus.inspect.charter_words import differences
from isthmus.log import Log
from isthmus.log.expulsions import expulsions
from isthmus.log.membership import Members
from isthmus.log.proposals import needs, proposals

NAMED_MAX = 3
"""The most expelled learners, and the most proposals, that are named."""


def expelled(members: Members, learners: Iterable[str]) -> list[str]:
    """Return, in words, which learners were expelled: of those that `learners` names, and of all entries that a version
    of the membership removed."""
    entries = {m.name for v in members.versions for m in v.members if not m.name.endswith("*")}
    found = expulsions(members, {*learners, *entries})
    more = len(found) - NAMED_MAX
    return [*map(str, found[:NAMED_MAX]), *([f"{more} more learners were expelled before"] if more > 0 else [])]


async def waiting(log: Log) -> list[str]:
    """Return, in words, which proposals wait for approvals. Lists. Empty in an unsigned run, or without the right to
    read proposals. Raises `LogCorrupt`, and what the store raises."""
    if not log.members.signed:
        return []
    try:
        found = await proposals(log.store, log.members)
    except Denied:
        return []
    now, show = log.members.current, f"isthmus charter show {log.run.url}"
    said = list[str]()
    for one in found[:NAMED_MAX]:
        changes = list(differences(now, one.header)) or ["nothing changes"]
        others = f" and {len(changes) - 1} more" if len(changes) > 1 else ""
        names = now.owners | {o.key: o.name for o in (one.header.charter.owners if one.header.charter else ())}
        have = ", ".join(names[key] for key in one.approvals)
        said.append(
            f"a proposal waits: {one.id} ({changes[0]}{others}), approved by {have or 'nobody'}; "
            f"{needs(one, now)} ({show})"
        )
    more = len(found) - NAMED_MAX
    return said + ([f"{more} more proposals wait ({show})"] if more > 0 else [])

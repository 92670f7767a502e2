"""`isthmus charter`: what the owners of a run have agreed on, and how they change it together."""

import shlex
from collections.abc import Sequence
from typing import Any

from isthmus.errors import InputError
from isthmus.format.records.charter import Charter
from isthmus.format.records.objects import MembersHeader, MemberSpec
from isthmus.format.signing import fingerprint
from isthmus.inspect.charter_words import at_time, coming_back, differences, made_before, until
from isthmus.log import Log, proposals
from isthmus.log.charter import needed
from isthmus.log.listing import heads_of
from isthmus.log.membership import CLOCKS_S, GRACE_VERSIONS, Membership, following
from isthmus.log.trust import Trust

HOUR_S = 3600.0
HOURS = 24.0
"""Hours that owners have to approve a change, unless they agree on others."""
APPROVING_VERSIONS = 16
"""Versions of a fragment that syncers may commit while an owner's command reads the log and writes its approval."""


async def proposed(log: Log, entries: Sequence[MemberSpec], charter: Charter | None, hours: float) -> MembersHeader:
    """Return the next version of the membership with these entries. Owners have `hours` to approve it.

    Commits made meanwhile under the present membership stay valid: it allows as many as the run makes in that time.
    Before a first charter whoever created the run could make commits in any member's name, so if there are none, no
    commit may be made but under the charter.
    """
    heads = await heads_of(log)
    if charter is not None and log.members.current.charter is None and not any(heads):
        return following(log.members, entries, heads, log.runtime.wall(), charter=charter, room=0)
    room = GRACE_VERSIONS + int(await _pace(log, heads) * hours * HOUR_S)
    return following(log.members, entries, heads, log.runtime.wall(), charter=charter, room=room)


async def _pace(log: Log, heads: Sequence[int]) -> float:
    """Return how many versions of a fragment the run makes in a second, by the newest commits of the fastest one."""
    pace = 0.0
    for fragment, head in enumerate(heads):
        first = max(1, head - GRACE_VERSIONS)
        earlier = await log.commit(fragment, first) if head > first else None
        newest = await log.commit(fragment, head) if earlier else None
        if earlier and newest:
            pace = max(pace, (head - first) / max(1e-3, newest.header.written_at - earlier.header.written_at))
    return pace


def require_known(log: Log, trust: Trust) -> None:
    """Raise `InputError` unless an owner's command was told which run it is about, or the owner's key has signed for
    this run before: whoever can write to a store can put another run there."""
    assert log.signer is not None, "an owner's command has a key"
    creator, mine = log.members.versions[0].owner, log.signer.author
    before = any(given.owner == mine for version in log.members.versions for given in version.approvals)
    if trust.owner or trust.run_digest or before or mine == creator:
        return
    raise InputError(
        f"{log.run.url}: your key has approved nothing in this run yet, and nothing here says that it is the run that "
        "you mean: name the key that created it, as its holder reads it to you, with --owner or ISTHMUS_OWNER (or the "
        f"run's digest, with --run-digest). This run was created by {fingerprint(creator)}"
    )


async def require_timely(log: Log, header: MembersHeader, hours: float = HOURS) -> None:
    """Raise `InputError` if a proposal states a time that cannot be true, if the run has come too near to the versions
    that it leaves to the present membership (commits made while the approval is written must not be beyond), or if it
    leaves more than the run makes in twice these hours: so long, members whom it removes could go on."""
    now, before, heads = log.runtime.wall(), log.members.current, await heads_of(log)
    if not before.proposed_at - CLOCKS_S <= header.written_at <= now + CLOCKS_S:
        raise InputError(
            f"this proposal says that it was made at {at_time(header.written_at)}; it is {at_time(now)} now, and the "
            f"membership before it was proposed at {at_time(before.proposed_at)}: look at the clocks, and let its "
            "owner propose it again"
        )
    if before.charter is None and not any(heads):
        if any(header.until):
            raise InputError(
                f"this proposal leaves {max(header.until)} versions to the time before the charter, when whoever "
                "created the run could make commits in any member's name, and the run has none yet: propose it again"
            )
        return
    beyond = next((p for p, head in enumerate(heads) if head + APPROVING_VERSIONS > header.until[p]), None)
    if beyond is not None:
        raise InputError(
            f"this proposal is out of date: fragment {beyond} is at version {heads[beyond]}, and no version after "
            f"{header.until[beyond]} may be of the members before it: propose it again"
        )
    pace, left = await _pace(log, heads), max(u - head for u, head in zip(header.until, heads, strict=True))
    if left > GRACE_VERSIONS + 2.0 * pace * hours * HOUR_S:
        long = f" ({(left - GRACE_VERSIONS) / pace / HOUR_S:.3g} hours at the run's pace)" if pace else ""
        raise InputError(
            f"this proposal leaves the next {left:,} versions{long} to the membership before it, members whom it "
            f"removes among them; you would agree to {hours:g} hours: let its owner propose it again with fewer "
            "--hours, or, if you have agreed on that, give the same --hours"
        )


async def give_approval(
    log: Log, header: MembersHeader, trust: Trust, path: str | None = None, *, hours: float = HOURS
) -> dict[str, Any]:
    """Print what a change changes, approve it with the log's key, and print what follows; return this as a report.

    `path`: the file that the charter was read from. `hours`: see `require_timely`.

    Raises `InputError` if there is no key, it is no owner's, the change is out of date, or it changes nothing.
    """
    if log.signer is None:
        raise InputError("use --key OWNER_KEY_FILE, the private key of one of the run's owners")
    require_known(log, trust)
    await require_timely(log, header, hours)
    before, url = log.members.current, log.run.url
    if not (changes := list(differences(before, header))):
        raise InputError(f"{url}: this changes nothing but spaces or the order, so there is nothing to approve")
    first = before.charter is None and any(heads := await heads_of(log))
    early = [f"! {made_before(max(heads))}"] if first else []
    early += [f"! {said}" for said in coming_back(log.members, header)]
    print("\n".join([*changes, *early, until(before, header), f"proposed {at_time(header.written_at)}"]), flush=True)
    earlier = next((p for p in await proposals.proposals(log.store, log.members) if p.header == header), None)
    again = earlier is not None and log.signer.author in earlier.approvals
    found = await proposals.approve(log.store, log.members, log.signer, header, log.runtime.wall())
    if not isinstance(found, proposals.Proposal):
        print(
            f"membership {found.version} is in force, approved by {len(found.approvals)}: syncers apply it to the "
            "commits that they begin from now on"
        )
        return {"membership": found.version, "proposal": None, "still_needs": ""}
    if again:
        print(f"{proposals.entitled(before, header)[log.signer.author]} has approved this proposal before")
    lacks = found.lacks(before)
    print(f"proposal {found.id} is approved by {len(found.approvals)}; it still needs {lacks}")
    expecting = f" --expect {shlex.quote(path)}" if path else ""
    print(f"each of them: isthmus charter approve {url} {found.id}{expecting} --key OWNER_KEY_FILE")
    return {"membership": None, "proposal": found.id, "still_needs": lacks}


def threshold(before: Membership, header: MembersHeader) -> str:
    """Return, in words, how many owners must approve a change."""
    if before.charter is None:
        return "the run's owner"
    return f"{needed(before.charter, before.members, header)} of {len(before.charter.owners)} owners"

"""Proposals: changes of the membership or the charter that wait for the approvals of enough owners.

A proposal is the next version of the membership, without its approvals. Each owner who approves it stores a signed copy
with that one approval, so owners need no other channel than the run's store. The owner whose approval is the last one
needed creates the version, with all approvals in it. Nothing but `isthmus charter` reads proposals: what counts is the
version that is created, which every reader checks by itself. Once the version exists, every other proposal for it is
void, and stays in the store.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgspec

from isthmus.errors import InputError, ObjectMissing, RecordInvalid
from isthmus.format.records import frame
from isthmus.format.records.charter import Approval
from isthmus.format.records.frame import Kind
from isthmus.format.records.keys import PROPOSALS, proposal_key, proposals_prefix
from isthmus.format.records.objects import MembersHeader
from isthmus.format.signing import Signer, fingerprint
from isthmus.log.charter import approval, change_of, is_genuine, outstanding, undecided
from isthmus.log.membership import Members, Membership, create
from isthmus.store import Store, checked

ID_CHARACTERS = 32
"""Characters of a change's digest that name a proposal on the command line. Nobody can make two changes that have the
same ones, so who approves a name approves what it named when it was looked at."""


@dataclass(frozen=True)
class Proposal:
    """A change that is proposed, with the approvals that it has."""

    header: MembersHeader
    """The version without its approvals."""
    change: bytes
    """Digest of the change [32 bytes]."""
    approvals: Mapping[bytes, Approval] = field(default_factory=dict)
    """Genuine approvals by the owner's key."""
    instead: Membership | None = None
    """The version of the membership for which this was proposed; None: it does not exist yet, so the proposal waits."""

    @property
    def id(self) -> str:
        """The name of the proposal on the command line."""
        return self.change.hex()[:ID_CHARACTERS]

    def lacks(self, before: Membership) -> str:
        """Return, in words, which approvals it still needs; empty if it has enough."""
        return outstanding(before.charter, before.owner, before.members, self.header, self.approvals)

    @property
    def is_in_force(self) -> bool:
        """Whether the version that exists is the proposed one."""
        h, now = self.header, self.instead
        return now is not None and (now.members, now.until, now.proposed_at, now.charter, now.owner) == (
            h.members, h.until, h.written_at, h.charter, h.owner,
        )  # fmt: skip

    @property
    def is_void(self) -> bool:
        """Whether another change came before it."""
        return self.instead is not None and not self.is_in_force


def needs(proposal: Proposal, before: Membership) -> str:
    """Return, in words, what a proposal that waits still needs."""
    if lacks := proposal.lacks(before):
        return f"it still needs {lacks}"
    return (
        "it has all approvals, and its version is not there: the last approver's command ended too early, or the store "
        "lost or withholds the version; approve it once more, and it is in force"
    )


def entitled(before: Membership, header: MembersHeader) -> dict[bytes, str]:
    """Return the names of the owners who may approve a change, by key: those before it, and those that it names."""
    named = {owner.key: owner.name for owner in (header.charter.owners if header.charter else ())}
    return before.owners | named


async def proposals(store: Store, members: Members) -> list[Proposal]:
    """Return the proposals that wait for approvals, ordered by id. Raises what the store raises."""
    now = await members.refresh(store)
    return await _listed(store, members, proposals_prefix(now.version + 1))


async def every_proposal(store: Store, members: Members) -> list[Proposal]:
    """Return all stored proposals, ordered by id: those that wait, those in force, and those that are void. Raises what
    the store raises."""
    await members.refresh(store)
    return await _listed(store, members, PROPOSALS)


async def _listed(store: Store, members: Members, prefix: str) -> list[Proposal]:
    found: dict[bytes, Proposal] = {}
    for entry in await store.list(prefix):
        try:
            blob = await checked.whole(store, entry.key, Kind.MEMBERS)
            frame.head_end(blob, Kind.MEMBERS)
            author = frame.require_signature(blob, Kind.MEMBERS)
            header, _ = frame.parse(blob, Kind.MEMBERS, MembersHeader)
        except (ObjectMissing, RecordInvalid):
            continue  # anybody who may write here can leave anything
        change = change_of(header)
        key = proposal_key(header.version, change, author)
        if not 1 <= header.version <= members.known:
            continue
        before, instead = members.versions[header.version - 1], next(iter(members.versions[header.version :]), None)
        if _follows(header, members, before) and author in entitled(before, header) and entry.key == key:
            bare = undecided(header)
            genuine = {a.owner: a for a in header.approvals if a.owner == author and is_genuine(a, change)}
            known = found.get(change, Proposal(bare, change, instead=instead))
            found[change] = replace(known, approvals={**known.approvals, **genuine})
    return sorted(found.values(), key=lambda proposal: proposal.change)


def _follows(header: MembersHeader, members: Members, before: Membership) -> bool:
    return (header.run, header.version, header.previous) == (members.run.digest, before.version + 1, before.digest)


async def approve(
    store: Store, members: Members, signer: Signer, header: MembersHeader, now: float
) -> Proposal | Membership:
    """Approve a change; create the version if it now has enough approvals. Return the version, or the proposal.

    `now`: the time [s since 1970], which the version states as that of its last approval.

    Raises `InputError` if the signer is no owner, the change does not follow the newest version, or is invalid.
    """
    before = await members.refresh(store)
    if signer.author not in entitled(before, header):
        who = ", ".join(f"{name} ({fingerprint(key)})" for key, name in entitled(before, header).items())
        raise InputError(f"the key {fingerprint(signer.author)} is no owner's: this change is approved by {who}")
    if not _follows(header, members, before):
        raise InputError("the membership was changed meanwhile: look at it (isthmus charter show), and propose again")
    if header.charter is not None and (fault := header.charter.fault()):
        raise InputError(f"the charter is invalid: {fault}")
    given, change = approval(header, signer), change_of(header)
    try:
        blob = frame.draft(Kind.MEMBERS, msgspec.structs.replace(header, approvals=(given,))).blob
    except ValueError as error:
        raise InputError(f"the charter is invalid: {error}") from None
    frame.seal(blob, signer)
    await store.create(proposal_key(header.version, change, signer.author), blob)
    found = next((p for p in await proposals(store, members) if p.change == change), Proposal(header, change))
    found = Proposal(found.header, change, {**found.approvals, signer.author: given})
    if found.lacks(before):
        return found
    names = entitled(before, header)
    approvals = tuple(a for _, a in sorted(found.approvals.items()) if a.owner in names)
    decided_at = max(now, header.written_at)  # clocks differ a little
    decided = msgspec.structs.replace(found.header, approvals=approvals, decided_at=decided_at)
    return await create(store, members, signer, decided)


async def require(store: Store, members: Members, name: str) -> Proposal:
    """Return the proposal of this id, or of a longer part of its digest, whether it waits, is in force or is void.

    Raises `InputError`, which lists those that wait.
    """
    there = await every_proposal(store, members)
    found = [p for p in there if len(name) >= ID_CHARACTERS and p.change.hex().startswith(name)]
    if not found:
        listed = ", ".join(p.id for p in there if p.instead is None) or "none"
        said = f"no proposal has this id, of {ID_CHARACTERS} digits"
        raise InputError(
            f"{name}: {said}; those that wait for approvals: {listed} (isthmus charter show {members.run.url} prints "
            "what each changes)"
        )
    return found[0]

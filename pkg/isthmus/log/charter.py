"""Agreement of a run's owners: which changes of the membership and the charter as many have approved as must.

A change is a whole version of the membership without its approvals. Each approval is an owner's signature of it. The
first charter is approved by the key that owned the run alone until then, and by as many of the new owners as its own
`amend` says. So no charter names owners of whom too few have accepted it (the rule of TUF's root, for k of n keys).
Approvals of one change are worth nothing for another, as the change names the version before it.
"""

from collections.abc import Iterable, Sequence

import msgpack
import msgspec

from isthmus.errors import RecordInvalid
from isthmus.format import digests
from isthmus.format.records.charter import Approval, Charter, Owner
from isthmus.format.records.objects import MembersHeader, MemberSpec
from isthmus.format.signing import Forged, Signer, fingerprint, verify
from isthmus.reasons import Reason

APPROVAL = "isthmus-approval"
"""Signing namespace in which an owner approves a change."""


def undecided(header: MembersHeader) -> MembersHeader:
    """Return a version of the membership without its approvals and their time: as it is proposed."""
    return msgspec.structs.replace(header, approvals=(), decided_at=msgspec.UNSET)


def change_of(header: MembersHeader) -> bytes:
    """Return the digest [32 bytes] of a version of the membership as it is proposed: what owners approve."""
    plain = msgspec.to_builtins(undecided(header), builtin_types=(bytes,))
    return digests.digest(msgpack.packb(plain, use_bin_type=True))


def approval(header: MembersHeader, signer: Signer) -> Approval:
    """Return the approval of a change by this key."""
    return Approval(signer.author, signer.sign(APPROVAL, change_of(header)))


def is_genuine(given: Approval, change: bytes) -> bool:
    """Return whether an approval is of this change [32 bytes], and by the owner that it names."""
    try:
        verify(given.owner, APPROVAL, change, given.signature)
    except Forged:
        return False
    return True


def needed(before: Charter, members: Sequence[MemberSpec], header: MembersHeader) -> int:
    """Return how many of the owners in `before` must approve a change. `members`: those before it."""
    was, now = {m.name: m for m in members}, {m.name: m for m in header.members}
    least = 0
    if header.charter != before:
        least = before.amend
    if was.keys() - now.keys():
        least = max(least, before.expel)
    if any(was.get(name) != entry for name, entry in now.items()):
        least = max(least, before.admit)
    return least or before.amend


def outstanding(
    before: Charter | None, owner: bytes, members: Sequence[MemberSpec], header: MembersHeader, given: Iterable[bytes]
) -> str:
    """Return, in words, which approvals a change still needs; empty if it has enough.

    `before`: the charter before it; None: `owner` [32 bytes] decided alone. `given`: the keys of genuine approvals.
    """
    keys, missing = set(given), []
    if before is None:
        if owner not in keys:
            missing.append(f"that of the run's owner, {fingerprint(owner)}")
    else:
        missing += _missing(before.owners, keys, needed(before, members, header), "")
    if header.charter is not None and header.charter != before:
        others = before is None or before.owners != header.charter.owners
        whose = " of the owners that the new charter names" if others else ""
        missing += [m for m in _missing(header.charter.owners, keys, header.charter.amend, whose) if m not in missing]
    return ", and ".join(missing)


def _missing(owners: Sequence[Owner], keys: set[bytes], least: int, whose: str) -> list[str]:
    found = [owner.name for owner in owners if owner.key in keys]
    if len(found) >= least:
        return []
    others = ", ".join(owner.name for owner in owners if owner.key not in keys)
    return [f"{least - len(found)} more{whose or ' of the owners'} ({others})"]


def require_agreement(
    author: bytes, header: MembersHeader, before: Charter | None, owner: bytes, members: Sequence[MemberSpec]
) -> None:
    """Raise `RecordInvalid` unless the owners have agreed on a version of the membership.

    `author`: the key that signed it [32 bytes]; the others are those of the version before: its charter, the owner
    without a charter, and its members.
    """
    if header.charter is None:
        raise RecordInvalid(Reason.MALFORMED, "the charter is gone: owners can change it, and not do without it")
    if fault := header.charter.fault():
        raise RecordInvalid(Reason.MALFORMED, f"the charter is invalid: {fault}")
    if header.owner != owner or header.accepted is not None:
        raise RecordInvalid(Reason.MALFORMED, "it names another single owner: owners change by the charter")
    change = change_of(header)
    keys = [given.owner for given in header.approvals]
    if len(set(keys)) < len(keys):
        raise RecordInvalid(Reason.MALFORMED, "an owner approves it twice")
    if false := next((given for given in header.approvals if not is_genuine(given, change)), None):
        raise RecordInvalid(Reason.BAD_SIGNATURE, f"{fingerprint(false.owner)} has not approved this change")
    if author not in keys:
        raise RecordInvalid(Reason.NOT_A_MEMBER, f"signed by {fingerprint(author)}, who has not approved it")
    entitled = {owner, *(o.key for o in (*(before.owners if before else ()), *header.charter.owners))}
    if strange := next((key for key in keys if key not in entitled), None):
        raise RecordInvalid(Reason.NOT_A_MEMBER, f"approved by {fingerprint(strange)}, which is no owner's key")
    if missing := outstanding(before, owner, members, header, keys):
        raise RecordInvalid(Reason.NOT_A_MEMBER, f"it lacks approvals: {missing}")

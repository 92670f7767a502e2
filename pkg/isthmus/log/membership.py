"""The membership: who may take part in a run. It is a second log beside the commits.

Each version holds all members, names the version before it, and is signed by the owner. Versions are created and never
overwritten. Version 0 is the run object: it names only the owner, who may do everything. A new owner takes over in a
version that the old key signs and the new key has accepted (the rule of TUF's root). If the run object names no owner,
there are no members, and nothing in the run may be signed.

A version may hold a charter. From then on the owners named in it decide together, as many as it asks for
(`isthmus.log.charter`), and no owner may write any other object of the run by being an owner.
"""

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, TypeVar

import msgspec

from isthmus.errors import InputError, LogCorrupt, ObjectMissing, RecordInvalid
from isthmus.format.records import frame
from isthmus.format.records.charter import Approval, Charter, Terms
from isthmus.format.records.frame import Blob, Kind
from isthmus.format.records.keys import learner_in, members_key
from isthmus.format.records.objects import SCHEMA, MembersHeader, MemberSpec
from isthmus.format.rules import MemberRole as Role
from isthmus.format.signing import Forged, Signer, fingerprint, verify
from isthmus.format.signing.points import is_small_order
from isthmus.log.charter import require_agreement
from isthmus.log.run import Run
from isthmus.reasons import Reason
from isthmus.store import Store, checked
from isthmus.wording import an, key_file

SUCCESSION = "isthmus-succession"
"""Signing namespace in which a key accepts a run as its own."""

ROLE = "ISTHMUS_ROLE"
"""Environment variable with the role whose variables these are, as the folders of `isthmus create` set it."""

GRACE_VERSIONS = 64
"""How many versions beyond a fragment's newest commit may still be created under an earlier membership.

Syncers read the membership before each commit, so this need only cover the commits made while the owner writes.
"""

MISSING = (
    "is missing: restore it from a backup; until then the commits cannot be judged, and no process can be started: let "
    "those that run go on"
)
"""What is wrong with a version of the membership that is gone, and what to do."""

CLOCKS_S = 300.0
"""By how much the clocks of those who decide together may differ."""


WRITERS = {
    Kind.UPDATE: (Role.LEARNER,),
    Kind.CLAIM: (Role.LEARNER,),
    Kind.CHECKPOINT: (Role.LEARNER,),
    Kind.PART: (Role.LEARNER,),
    Kind.VALUE: (Role.SYNCER,),
    Kind.SNAPSHOT: (Role.SYNCER,),
    Kind.COMMIT: (Role.SYNCER,),
    Kind.SEGMENT: (Role.COLLECTOR,),
    Kind.PACKED: (Role.COLLECTOR,),
    Kind.EVALUATION: tuple(Role),
    Kind.MANIFEST: (Role.LEARNER,),
    Kind.PROMOTION: (Role.FOLLOWER,),
    Kind.MESSAGE: (Role.LEARNER, Role.SYNCER),
}
"""The roles that may write objects of each kind. Without a charter the owner may write any kind."""

N = TypeVar("N")

AS_RUN = Terms(member="*")
"""The terms of a member for which the charter states none: those of the run."""


@dataclass(frozen=True)
class Membership:
    """One version of the membership."""

    version: int
    owner: bytes
    """The owner's public key [32 bytes], in force from this version on."""
    members: tuple[MemberSpec, ...] = ()
    until: tuple[int, ...] = ()
    """By fragment: the last version that may be created under an earlier membership version."""
    digest: bytes = field(default=b"", repr=False)
    """Digest of the object; for version 0, of the run object."""
    written_at: float = 0.0
    """When it came into force [s since 1970], by the clock of whoever wrote it: the last owner to approve it."""
    proposed_at: float = 0.0
    """When it was proposed; as `written_at` if nobody had to approve it."""
    charter: Charter | None = None
    approvals: tuple[Approval, ...] = ()
    """The owners who approved this version; empty if one owner decides alone."""
    author: bytes = field(default=b"", repr=False)
    """The public key that signed the object; empty for version 0."""

    @cached_property
    def _entries(self) -> "_ByName[MemberSpec]":
        return _ByName({m.name: m for m in self.members})

    @cached_property
    def _terms(self) -> "_ByName[Terms]":
        return _ByName({terms.member: terms for terms in self.charter.terms} if self.charter else {})

    def member(self, name: str) -> MemberSpec | None:
        """Return the entry for a name: the one with that name, else the pattern with the longest matching prefix."""
        return self._entries.of(name)

    @property
    def owners(self) -> dict[bytes, str]:
        """The names of those who decide, by key: the charter's owners, or without a charter the run's only one."""
        if self.charter is None:
            return {self.owner: "the run's owner"}
        return {owner.key: owner.name for owner in self.charter.owners}

    @property
    def decider(self) -> str:
        """The one who begins a change, in words: the only owner, or one of several."""
        return "the run's owner" if self.charter is None else "an owner of the run"

    @property
    def approving(self) -> str:
        """What an owner's command that admits or changes a member still needs, in words; empty if nothing."""
        return self._approving(self.charter.admit) if self.charter else ""

    @property
    def expelling(self) -> str:
        """What an owner's command that removes a member still needs, in words; empty if nothing."""
        return self._approving(self.charter.expel) if self.charter else ""

    def _approving(self, least: int) -> str:
        count = len(self.owners)
        asked = f"{least} of {count} owners must approve it: isthmus charter approve"
        return f" (under the charter this proposes it; {asked})" if least > 1 else ""

    def terms(self, learner: str) -> Terms:
        """Return the charter's terms for a learner, found as `member` finds its entry; `AS_RUN` if there are none."""
        return self._terms.of(learner) or AS_RUN

    def institution(self, entry: str) -> str:
        """Return the institution to which an entry belongs by the charter; the entry's own name if it says none."""
        found = self.terms(entry.removesuffix("*")).institution
        return entry if found is msgspec.UNSET else found

    def permits(self, author: bytes, roles: Collection[Role], name: str | None) -> bool:
        """Return whether a key may write in one of these roles under a name; None: under any of its names."""
        if author == self.owner and self.charter is None:
            return True
        if name is not None:
            found = self.member(name)
            return found is not None and found.key == author and found.role in roles
        return any(m.key == author and m.role in roles for m in self.members)

    def names_of(self, author: bytes, role: Role) -> list[str]:
        """Return the names and patterns that a key has in a role."""
        return [m.name for m in self.members if m.key == author and m.role == role]

    def owners_of(self, author: bytes) -> str:
        """Return the roles and names that a key has, such as `learner eu-1, collector gc`; empty if it has none."""
        return ", ".join(f"{m.role} {m.name}" for m in self.members if m.key == author)


class _ByName(Generic[N]):
    """Things by name, of which some stand for all names that begin in a way (`north-*`)."""

    def __init__(self, found: Mapping[str, N]) -> None:
        self._named = {name: what for name, what in found.items() if not name.endswith("*")}
        patterns = [(name[:-1], what) for name, what in found.items() if name.endswith("*")]
        self._patterns = sorted(patterns, key=lambda pattern: -len(pattern[0]))

    def of(self, name: str) -> N | None:
        return self._named.get(name) or next((what for begin, what in self._patterns if name.startswith(begin)), None)


class MembershipUnknown(RecordInvalid):
    """An object, by an author that a known membership names, was written under a membership that is not known here."""


class Members:
    """The versions of a run's membership that are known here, from version 0 on."""

    def __init__(self, run: Run) -> None:
        self.run = run
        owner = run.header.owner
        self.signed = owner is not None
        """Whether objects of this run are signed at all."""
        self.versions = [Membership(0, owner or bytes(32), digest=run.digest)]
        self._said = (0, "")
        """The newest version that another process says it knows, and the name of that process."""

    @property
    def current(self) -> Membership:
        """The newest version known."""
        return self.versions[-1]

    @property
    def known(self) -> int:
        """How many versions are known here."""
        return len(self.versions)

    def buckets_of(self, learner: str) -> Sequence[str]:
        """Return the URLs of the buckets where a learner's updates are or were stored, newest first; "" is the run's
        own."""
        found = [m.bucket if (m := version.member(learner)) else "" for version in reversed(self.versions)]
        return list(dict.fromkeys(found))

    def buckets(self) -> Sequence[str]:
        """Return the URLs of all current buckets except the run's own."""
        return list(dict.fromkeys(m.bucket for m in self.current.members if m.bucket))

    def judging(self, version: int) -> Membership:
        """Return the version that a verified commit names; in an unsigned run, which has no members, version 0."""
        return self.versions[version if self.signed else 0]

    @property
    def before_a_syncer(self) -> str:
        """What is to be done before a syncer can start, in parentheses after a space; empty if a member is one."""
        now = self.current
        if not self.signed or any(m.role == Role.SYNCER for m in now.members):
            return ""
        return (
            f" (first {now.decider} admits one, since membership {now.version} names none: "
            f"{_add(self.run.url, None, Role.SYNCER)}{now.approving})"
        )

    def said(self, version: int, by: str) -> bool:
        """Note the version that another process says, in a signed message, that it knows; return whether it is newer
        than the newest one known here."""
        if version > max(self._said[0], self.current.version):
            self._said = version, by
        return version > self.current.version

    @property
    def withheld(self) -> tuple[int, str] | None:
        """The newer version that another process says it knows, and the name of that process; None if there is none.

        If reading the store does not find this version, the store withholds it or the process's statement is false.
        """
        return self._said if self._said[0] > self.current.version else None

    def vouched(self, key: str, signature: bytes) -> bool:
        """Return whether the owner has vouched for a checkpoint, by its key and signature [64 bytes].

        The owner does so when it rotates a learner's key, so that the learner can still resume from this checkpoint.
        """
        member = self.current.member(learner_in(key))
        return member is not None and signature in member.vouched

    async def refresh(self, store: Store) -> Membership:
        """Read the versions beyond those known here; return the newest.

        Raises `LogCorrupt`, and what the store raises.
        """
        while self.signed:
            following = self.current.version + 1
            try:
                blob = await checked.whole(store, members_key(following), Kind.MEMBERS)
            except ObjectMissing:
                break
            except RecordInvalid as error:
                raise _no_membership(following, error) from None
            if self.current.version + 1 == following:  # otherwise a concurrent refresh has taken it
                self._take(blob)
        return self.current

    async def damage(self, store: Store) -> str:
        """Read all versions again; return which one is missing, damaged or replaced, with what to do, or an empty text.

        What was read once is kept here: only another process would notice. Raises what the store raises, but not
        `LogCorrupt`.
        """
        for known in self.versions[1:]:
            key = members_key(known.version)
            try:
                blob = await checked.whole(store, key, Kind.MEMBERS)
            except ObjectMissing:
                return f"{key}: {MISSING}"
            except RecordInvalid as error:
                return str(_no_membership(known.version, error))
            if frame.digest(blob) != known.digest:
                changed = RecordInvalid(Reason.MALFORMED, "it is another one than was read here before")
                return str(_no_membership(known.version, changed))
        try:
            await self.refresh(store)
        except LogCorrupt as error:
            return str(error)
        return ""

    async def reach(self, version: int, store: Store) -> Membership:
        """Return a version, reading it if it is not known. Raises `LogCorrupt` if it does not exist, and what the store
        raises."""
        if version > self.current.version:
            await self.refresh(store)
        if version > self.current.version:
            raise LogCorrupt(members_key(self.current.version + 1), f"is missing, and version {version} was named")
        return self.versions[version]

    def _take(self, blob: Blob) -> None:
        try:
            self.versions.append(opened(blob, self.current, self.run))
        except RecordInvalid as error:
            raise _no_membership(self.current.version + 1, error) from None

    def require_author(
        self, blob: Blob, kind: Kind, under: int | None = None, roles: Collection[Role] | None = None
    ) -> bytes:
        """Return an object's author [32 bytes; zeros in an unsigned run]. Raises `RecordInvalid`.

        The signature must be valid, and the author must be allowed to write this kind, under any name. `under`: the
        membership version that decides; None: any known version may allow it, for objects that another object vouches
        for. `roles`: the roles in which it may have been written, if these do not follow from its kind. Slow for large
        objects: call it off the loop.
        """
        if not self.signed:
            if frame.author_of(blob) != frame.UNSIGNED_AUTHOR:
                raise RecordInvalid(Reason.MALFORMED, "it is signed, and nothing in this run is")
            return frame.UNSIGNED_AUTHOR
        author = frame.require_signature(blob, kind)
        self.require_member(author, roles or WRITERS[kind], None, under)
        return author

    def require_member(
        self, author: bytes, roles: Collection[Role], name: str | None = None, under: int | None = None
    ) -> None:
        """Raise `RecordInvalid` unless a key [32 bytes] may write in one of these roles, under a name (None: any)."""
        if not self.signed:
            return
        if under is not None and under >= len(self.versions):
            raise MembershipUnknown(Reason.NOT_A_MEMBER, f"membership {under} is not known here")
        judges = reversed(self.versions) if under is None else [self.versions[under]]
        if not any(membership.permits(author, roles, name) for membership in judges):
            who = f"{name} with the key {fingerprint(author)}" if name else f"with the key {fingerprint(author)}"
            by = "the membership" if under is None else f"membership {under}"
            raise RecordInvalid(Reason.NOT_A_MEMBER, f"{by} has no {' or '.join(roles)} {who}")

    def in_force(self, fragment: int, version: int) -> int:
        """Return the earliest known membership version under which a version of a fragment may be created."""
        return max((m.version for m in self.versions if m.until and version > m.until[fragment]), default=0)


def _no_membership(version: int, error: RecordInvalid) -> LogCorrupt:
    left = (
        "whoever may write there left or changed it. If this version was in force, restore it from a backup: commits "
        "made under it cannot be verified without it. If the owners never wrote it, delete it"
    )
    return LogCorrupt(members_key(version), f"is no membership: {error} ({left})")


def opened(blob: Blob, before: Membership, run: Run) -> Membership:
    """Return the membership version in these bytes, which must follow `before`. Raises `RecordInvalid`."""
    frame.head_end(blob, Kind.MEMBERS)
    author = frame.require_signature(blob, Kind.MEMBERS)
    header, payload = frame.parse(blob, Kind.MEMBERS, MembersHeader)
    if len(payload):
        raise RecordInvalid(Reason.MALFORMED, "it has a payload")
    if header.run != run.digest:
        raise RecordInvalid(Reason.WRONG_RUN, "of another run")
    if (header.version, header.previous) != (before.version + 1, before.digest):
        raise RecordInvalid(
            Reason.MALFORMED, f"version {header.version} after {header.previous.hex()[:16]}: another history"
        )
    if header.decided_at is not msgspec.UNSET and header.decided_at < header.written_at:
        raise RecordInvalid(Reason.MALFORMED, "it was decided before it was proposed")
    if before.charter is not None or header.charter is not None:
        require_agreement(author, header, before.charter, before.owner, before.members)
    elif author != before.owner:
        raise RecordInvalid(Reason.NOT_A_MEMBER, f"signed by {fingerprint(author)}, not by the owner's key in force")
    if len(header.until) != len(run.layout.fragments):
        raise RecordInvalid(Reason.WRONG_LAYOUT, f"versions of {len(header.until)} fragments")
    if len({m.name for m in header.members}) < len(header.members):
        raise RecordInvalid(Reason.MALFORMED, "a name stands there twice")
    if any(is_small_order(key) for key in (header.owner, *(m.key for m in header.members))):
        raise RecordInvalid(Reason.MALFORMED, "a key of small order: anybody could sign under it")
    if (header.owner != before.owner) != (header.accepted is not None):
        raise RecordInvalid(Reason.MALFORMED, "a new owner that has not accepted, or an acceptance of none")
    if header.accepted is not None:
        try:
            verify(header.owner, SUCCESSION, succession(run, before, header.owner), header.accepted)
        except Forged as error:
            raise RecordInvalid(Reason.BAD_SIGNATURE, f"the new owner has not accepted: {error}") from None
    return Membership(
        version=header.version,
        owner=header.owner,
        members=header.members,
        until=header.until,
        digest=frame.digest(blob),
        written_at=header.written_at if header.decided_at is msgspec.UNSET else header.decided_at,
        proposed_at=header.written_at,
        charter=header.charter,
        approvals=header.approvals,
        author=author,
    )


def succession(run: Run, before: Membership, owner: bytes) -> bytes:
    """Return the bytes that the next owner's key [32 bytes] signs to accept a run, in the namespace `SUCCESSION`."""
    return b"".join((run.digest, (before.version + 1).to_bytes(8, "little"), before.digest, owner))


# --- writing ----------------------------------------------------------------------------------------------------------


def changed(members: Iterable[MemberSpec], *, without: str = "", added: MemberSpec | None = None) -> list[MemberSpec]:
    """Return the entries without one and with another one added or replaced, ordered by name."""
    gone = {without, added.name if added else ""}
    return sorted([m for m in members if m.name not in gone] + ([added] if added else []), key=lambda m: m.name)


async def write(
    store: Store, members: Members, signer: Signer, entries: Sequence[MemberSpec], heads: Sequence[int], now: float, *,
    successor: Signer | None = None,
) -> Membership:  # fmt: skip
    """Create the next version of the membership from these entries, signed by the owner; return it.

    `heads`: the newest version of each fragment. `successor`: the key that owns the run from now on. Raises
    `InputError` if the signer is not the owner, the entries are invalid, or the membership was changed meanwhile.
    Raises `Unavailable` if the outcome is not known: calling this again finds it out.
    """
    before = await members.refresh(store)
    if before.charter is not None:
        raise InputError("this run has a charter: its owners change the membership together (isthmus charter --help)")
    if signer.author != before.owner:
        raise InputError(
            f"the key {fingerprint(signer.author)} is not the owner's, {fingerprint(before.owner)}: only the owner's "
            "key can change the membership"
        )
    header = following(members, entries, heads, now, owner=successor.author if successor else before.owner)
    if successor:
        accepted = successor.sign(SUCCESSION, succession(members.run, before, header.owner))
        header = msgspec.structs.replace(header, accepted=accepted)
    return await create(store, members, signer, header)


def following(
    members: Members, entries: Sequence[MemberSpec], heads: Sequence[int], now: float, *,
    owner: bytes = b"", charter: Charter | None = None, room: int = GRACE_VERSIONS,
) -> MembersHeader:  # fmt: skip
    """Return the next version of the membership, neither approved nor signed.

    `heads`: the newest version of each fragment. `owner`: its key [32 bytes]; empty: as before. `charter`: another one;
    None: as before. `room`: versions beyond the heads that may still be created under an earlier membership.
    """
    before = members.current
    return MembersHeader(
        schema=SCHEMA,
        run=members.run.digest,
        version=before.version + 1,
        previous=before.digest,
        owner=owner or before.owner,
        accepted=None,
        members=tuple(entries),
        until=tuple(head + room for head in heads),
        written_at=now,
        charter=charter or before.charter,
    )


async def create(store: Store, members: Members, signer: Signer, header: MembersHeader) -> Membership:
    """Sign the next version of the membership, and create it; return it. Raises as `write` does."""
    try:
        blob = frame.draft(Kind.MEMBERS, header).blob
        frame.seal(blob, signer)
        opened(blob, members.current, members.run)
    except (RecordInvalid, ValueError) as error:
        raise InputError(f"the new membership is invalid: {error}") from None
    created = await store.create(members_key(header.version), blob)
    found = await members.reach(header.version, store)
    if not created and found.digest != frame.digest(blob):
        raise InputError("another owner's command changed the membership at the same time: look at it, and try again")
    return found


def may_share(one: Role, other: Role) -> bool:
    """Return whether one key may be for two members in these roles: a syncer may be the collector, too."""
    return {one, other} == {Role.SYNCER, Role.COLLECTOR}


def require_may(members: Members, signer: Signer | None, role: Role, name: str | None = None) -> None:
    """Raise `InputError`, which says what to do, unless a process may take part in a role under a name (None: any)."""
    if not members.signed:
        if signer is not None:
            raise InputError(
                f"{members.run.url}: nothing in this run is signed, since it was created without an owner's key: leave "
                "the key out, or create a run with one (isthmus init --key OWNER_KEY_FILE)"
            )
        return
    url, now = members.run.url, members.current
    if signer is None:
        signed = (
            f"{url}: everything in this run is signed: pass your key (--key {key_file(role.value)}, ISTHMUS_KEY or "
            "join(key=…))"
        )
        here = os.environ.get(ROLE, role.value)
        if here != role.value:
            raise InputError(
                f"{signed}; {ROLE} is {here}, so the variables here are those of the {here}'s folder: use the env of "
                f"the {role.value}'s"
            )
        raise InputError(
            f"{signed}; if `isthmus create` made {an(role.value)}'s folder, load its env (. FOLDER/env); else "
            f"`isthmus keys new NAME` makes one, and {now.decider} adds it to the members{now.approving}"
        )
    if now.permits(signer.author, (role,), name):
        return
    mine, there = fingerprint(signer.author), now.member(name) if name else None
    said = f"{url}: the membership does not name {name or 'anybody'} with the key {mine} as {an(role.value)}"
    if theirs := now.owners_of(signer.author):
        known = name if there is not None and there.name == name else ""  # another name may be a random one
        same = [m.name for m in now.members if m.key == signer.author and m.role == role]
        if name and same and not known:
            instead = f"use that name, or {now.decider} adds {name}, with a key of its own"
            raise InputError(f"{said}; it is the key of {theirs}: {instead}: {_add(url, name, role)}{now.approving}")
        more = f"it is the key of {theirs}: use the folder, or the key, of {known or an(role.value)}"
        free = there is None or there.name != name
        if free and any(may_share(m.role, role) for m in now.members if m.key == signer.author):
            more += f"; or {now.decider} makes it {an(role.value)}'s, too: {_add(url, name, role)}{now.approving}"
    elif there is not None and there.name == name:
        more = f"{name} is {an(there.role)} with the key {fingerprint(there.key)}: use that key, or another name"
        if there.role == role:
            more += (
                f"; if this is its new key, {now.decider} says so: isthmus members rotate {url} --member {name} "
                f"--public-key FILE.pub --key OWNER_KEY_FILE{now.approving}"
            )
    else:
        more = f"{now.decider} adds it: {_add(url, name, role)}{now.approving}"
    raise InputError(f"{said}; {more}")


def _add(url: str, name: str | None, role: Role) -> str:
    return f"isthmus members add {url} {name or 'NAME'} --as {role.value} --public-key FILE.pub --key OWNER_KEY_FILE"

"""Who may take part in a run: a log of its own beside the commits, each version whole, chained, signed by the owner.

Version 0 is the run object's: its owner alone, who may do everything. Versions are created, never written over; each
names the one before. The owner changes by a version that the old key signs and the new key has accepted (the rule of
TUF's root). Where the run object names no owner there are no members, and nothing in the run may be signed.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from isthmus.errors import InputError, LogCorrupt, ObjectMissing, RecordInvalid
from isthmus.format.records import frame
from isthmus.format.records.frame import Blob, Kind
from isthmus.format.records.keys import learner_in, members_key
from isthmus.format.records.objects import SCHEMA, MembersHeader, MemberSpec
from isthmus.format.rules import MemberRole as Role
from isthmus.format.signing import Forged, Signer, fingerprint, verify
from isthmus.format.signing.points import is_small_order
from isthmus.log.run import Run
from isthmus.reasons import Reason
from isthmus.store import Store, checked

SUCCESSION = "isthmus-succession"
"""Namespace in which a key accepts that a run becomes its own."""

GRACE_VERSIONS = 64
"""How far beyond the newest commits an earlier membership may still be in force when a new one is written: syncers look
before each commit, so what is needed is only what is committed while the owner writes."""


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
    Kind.MESSAGE: (Role.LEARNER, Role.SYNCER),
}
"""Who may write objects of a kind, beside the owner, who may write any."""


@dataclass(frozen=True)
class Membership:
    """One version of who may take part."""

    version: int
    owner: bytes
    """Public key [32 bytes] in force from here on."""
    members: tuple[MemberSpec, ...] = ()
    until: tuple[int, ...] = ()
    """By fragment: the last version that may be created under an earlier membership."""
    digest: bytes = field(default=b"", repr=False)
    """Of the object; of version 0 that of the run object."""
    written_at: float = 0.0

    @cached_property
    def _named(self) -> dict[str, MemberSpec]:
        return {m.name: m for m in self.members if not m.name.endswith("*")}

    @cached_property
    def _patterns(self) -> list[tuple[str, MemberSpec]]:
        """Beginnings of names, the longest first."""
        found = [(m.name[:-1], m) for m in self.members if m.name.endswith("*")]
        return sorted(found, key=lambda pattern: -len(pattern[0]))

    def member(self, name: str) -> MemberSpec | None:
        """Return the entry a name speaks under: its own, else the longest beginning that is one."""
        return self._named.get(name) or next((m for begin, m in self._patterns if name.startswith(begin)), None)

    def permits(self, author: bytes, roles: Collection[Role], name: str | None) -> bool:
        """Return whether a key may write as one of these roles under a name; None: under any name it has."""
        if author == self.owner:
            return True
        if name is not None:
            found = self.member(name)
            return found is not None and found.key == author and found.role in roles
        return any(m.key == author and m.role in roles for m in self.members)

    def names_of(self, author: bytes, role: Role) -> list[str]:
        """Return the entries of a key in a role."""
        return [m.name for m in self.members if m.key == author and m.role == role]


class Members:
    """The versions of a run's membership that are known here, from the first on."""

    def __init__(self, run: Run) -> None:
        self.run = run
        owner = run.header.owner
        self.signed = owner is not None
        """Whether objects of this run are signed at all."""
        self.versions = [Membership(0, owner or bytes(32), digest=run.digest)]
        self._said = (0, "")
        """The newest version that somebody says it knows, and who says so."""

    @property
    def current(self) -> Membership:
        """The newest version known."""
        return self.versions[-1]

    @property
    def known(self) -> int:
        """How many versions are known here."""
        return len(self.versions)

    def buckets_of(self, learner: str) -> Sequence[str]:
        """Return the URLs that a learner's updates are, or were, stored at; the one in force first, empty where that is
        the run's own."""
        found = [m.bucket if (m := version.member(learner)) else "" for version in reversed(self.versions)]
        return list(dict.fromkeys(found))

    def buckets(self) -> Sequence[str]:
        """Return the URLs of all buckets in force, beside the run's own."""
        return list(dict.fromkeys(m.bucket for m in self.current.members if m.bucket))

    def said(self, version: int, by: str) -> bool:
        """Note which version somebody knows, in words that it has signed; return whether that is beyond what is known
        here."""
        if version > max(self._said[0], self.current.version):
            self._said = version, by
        return version > self.current.version

    @property
    def withheld(self) -> tuple[int, str] | None:
        """The version beyond those known here that somebody says it knows, and who says so; None where there is none.

        Where a look at the store does not find it, the store withholds it, or that was not the truth.
        """
        return self._said if self._said[0] > self.current.version else None

    def vouched(self, key: str, signature: bytes) -> bool:
        """Return whether the owner has said, when it rotated a learner's key, that the checkpoint of this signature
        [64 bytes] under this key may be gone on from all the same."""
        member = self.current.member(learner_in(key))
        return member is not None and signature in member.vouched

    async def refresh(self, store: Store) -> Membership:
        """Read what is there beyond what is known; return the newest.

        Raises `LogCorrupt`, and what the store raises.
        """
        while self.signed:
            following = self.current.version + 1
            try:
                blob = await checked.whole(store, members_key(following), Kind.MEMBERS)
            except ObjectMissing:
                break
            except RecordInvalid as error:
                raise LogCorrupt(members_key(following), f"is no membership: {error}") from None
            if self.current.version + 1 == following:  # else another look was here meanwhile
                self._take(blob)
        return self.current

    async def reach(self, version: int, store: Store) -> Membership:
        """Return a version, read if need be. Raises `LogCorrupt` where there is none, and what the store raises."""
        if version > self.current.version:
            await self.refresh(store)
        if version > self.current.version:
            raise LogCorrupt(members_key(self.current.version + 1), f"is missing, and version {version} was named")
        return self.versions[version]

    def _take(self, blob: Blob) -> None:
        try:
            self.versions.append(opened(blob, self.current, self.run))
        except RecordInvalid as error:
            raise LogCorrupt(members_key(self.current.version + 1), f"is no membership: {error}") from None

    def require_author(
        self, blob: Blob, kind: Kind, under: int | None = None, roles: Collection[Role] | None = None
    ) -> bytes:
        """Return whose signature an object bears [32 bytes; zeros where nothing is signed], which fits, and whose key
        may write its kind, under whatever name. Raises `RecordInvalid`.

        `under`: by which version of the membership that is judged; None: one of those known has to allow it, as of what
        is vouched for by something else. `roles`: as which it was written, where that is not clear from its kind. Slow
        for large objects: off the loop.
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
        """Return if a key [32 bytes] may write as one of these roles, under a name. Raises `RecordInvalid`."""
        if not self.signed:
            return
        if under is not None and under >= len(self.versions):
            raise RecordInvalid(Reason.NOT_A_MEMBER, f"membership {under} is not known here")
        judges = reversed(self.versions) if under is None else [self.versions[under]]
        if not any(membership.permits(author, roles, name) for membership in judges):
            who = f"{name} signed by {fingerprint(author)}" if name else fingerprint(author)
            by = "no version of the membership" if under is None else f"membership {under}"
            raise RecordInvalid(Reason.NOT_A_MEMBER, f"{by} names {who} as a {' or a '.join(roles)}")

    def in_force(self, fragment: int, version: int) -> int:
        """Return the earliest membership that a commit may be made under, of those known."""
        return max((m.version for m in self.versions if m.until and version > m.until[fragment]), default=0)


def opened(blob: Blob, before: Membership, run: Run) -> Membership:
    """Return the version of the membership in these bytes, which follows `before`. Raises `RecordInvalid`."""
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
    if author != before.owner:
        raise RecordInvalid(Reason.NOT_A_MEMBER, f"signed by {fingerprint(author)}, not by the owner's key in force")
    if len(header.until) != len(run.layout.fragments):
        raise RecordInvalid(Reason.WRONG_LAYOUT, f"versions of {len(header.until)} fragments")
    if before.until and any(a < b for a, b in zip(header.until, before.until, strict=True)):
        raise RecordInvalid(Reason.MALFORMED, "it takes back what the version before it stated")
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
    return Membership(header.version, header.owner, header.members, header.until, frame.digest(blob), header.written_at)


def succession(run: Run, before: Membership, owner: bytes) -> bytes:
    """Return what the next owner's key [32 bytes] signs to accept a run, in the namespace `SUCCESSION`."""
    return b"".join((run.digest, (before.version + 1).to_bytes(8, "little"), before.digest, owner))


# --- writing ----------------------------------------------------------------------------------------------------------


def changed(members: Iterable[MemberSpec], *, without: str = "", added: MemberSpec | None = None) -> list[MemberSpec]:
    """Return entries with one more, or one less; in order of their names."""
    gone = {without, added.name if added else ""}
    return sorted([m for m in members if m.name not in gone] + ([added] if added else []), key=lambda m: m.name)


async def write(
    store: Store, members: Members, signer: Signer, entries: Sequence[MemberSpec], heads: Sequence[int], now: float, *,
    successor: Signer | None = None,
) -> Membership:  # fmt: skip
    """Create the next version of the membership: these entries, signed by the owner; return it.

    `heads`: the newest version of each fragment. `successor`: the key whose run this is from now on. Raises
    `InputError` where the signer is not the owner, or somebody else changed the membership meanwhile; `Unavailable`
    where the outcome is not known: doing it again finds out.
    """
    before = await members.refresh(store)
    if signer.author != before.owner:
        raise InputError(
            f"the key {fingerprint(signer.author)} is not the owner's, {fingerprint(before.owner)}: only that one "
            "changes who takes part"
        )
    until = [head + GRACE_VERSIONS for head in heads]
    if before.until:
        until = [max(a, b) for a, b in zip(until, before.until, strict=True)]
    owner = successor.author if successor else before.owner
    header = MembersHeader(
        schema=SCHEMA,
        run=members.run.digest,
        version=before.version + 1,
        previous=before.digest,
        owner=owner,
        accepted=successor.sign(SUCCESSION, succession(members.run, before, owner)) if successor else None,
        members=tuple(entries),
        until=tuple(until),
        written_at=now,
    )
    try:
        blob = frame.draft(Kind.MEMBERS, header).blob
        frame.seal(blob, signer)
        opened(blob, before, members.run)
    except (RecordInvalid, ValueError) as error:
        raise InputError(f"the membership cannot be this: {error}") from None
    created = await store.create(members_key(header.version), blob)
    found = await members.reach(header.version, store)
    if not created and found.digest != frame.digest(blob):
        raise InputError("somebody else changed the membership in this moment: look at it, and try again")
    return found


def require_may(members: Members, signer: Signer | None, role: Role, name: str | None = None) -> None:
    """Return if a process may take part so; without a name, under any. Raises `InputError` that says what to do."""
    if not members.signed:
        if signer is not None:
            raise InputError(
                f"{members.run.url}: nothing in this run is signed, since it was created without an owner's key: leave "
                "the key out, or create a run with one (isthmus init --key FILE)"
            )
        return
    if signer is None:
        raise InputError(
            f"{members.run.url}: everything in this run is signed: say with which key (--key FILE, ISTHMUS_KEY or "
            "join(key=…)); `isthmus keys new NAME` makes one, and the run's owner adds it to the members"
        )
    if not members.current.permits(signer.author, (role,), name):
        raise InputError(
            f"{members.run.url}: the membership does not name {name or 'anybody'} with the key "
            f"{fingerprint(signer.author)} as a {role.value}; the run's owner adds it: isthmus members add "
            f"{members.run.url} {name or 'NAME'} --as {role.value} --public-key FILE.pub --key OWNER"
        )

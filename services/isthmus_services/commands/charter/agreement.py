"""A charter in a file, with the members that it names: what the owners agree on before one of them proposes it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Literal

import msgspec

from isthmus.errors import InputError
from isthmus.format.records.charter import Charter
from isthmus.format.records.objects import MembersHeader, MemberSpec
from isthmus.format.rules import MemberRole
from isthmus.format.signing.keys import read_public
from isthmus.inspect.charter_words import in_word, in_words
from isthmus.log.membership import Membership, changed, may_share
from isthmus_services.commands.members import bucket_of


class _Owner(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    key: str
    """The line of a .pub file, or the file's path."""


class _Member(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    key: str | None = None
    """The line of a .pub file, or the file's path; None: the membership's."""
    role: MemberRole = MemberRole.LEARNER
    bucket: str | None = None
    """None: as in the membership; without an entry there, the run's own."""
    factor: float = 1.0
    cap: float | None = None
    sources: list[str] = []
    institution: str | None = None


class _Gate(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    series: str
    better: Literal["lower", "higher"]
    tolerance: float = 0.0
    limit: float | msgspec.UnsetType = msgspec.UNSET
    evaluators: list[str]
    least: int
    promoters: list[str]


class _File(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    purpose: str = ""
    amend: int
    admit: int
    expel: int
    manifests: bool = False
    owner: list[_Owner]
    member: list[_Member] = []
    gate: _Gate | None = None


@dataclass(frozen=True)
class Agreement:
    """What a file says that the owners agree on."""

    path: str
    charter: Charter
    stated: tuple[_Member, ...]
    """Members whose keys the file states."""

    def members(self, before: Sequence[MemberSpec]) -> list[MemberSpec]:
        """Return the entries `before`, with those that the file states added or replaced, ordered by name.

        Raises `InputError` if the file states one key for two of them.
        """
        entries, names = list(before), {member.name for member in self.stated}
        for member in self.stated:
            there = next((m for m in entries if m.name == member.name), None)
            bucket = bucket_of(member.bucket) if member.bucket is not None else there.bucket if there else ""
            entry = MemberSpec(member.name, member.role, read_public(str(member.key)), bucket)
            if there is None or msgspec.structs.replace(there, vouched=()) != entry:
                entries = changed(entries, added=entry)
        for one, other in combinations([m for m in entries if m.name in names], 2):
            if one.key == other.key and not may_share(one.role, other.role):
                raise InputError(
                    f"{self.path}: {one.name} and {other.name} have one key, so each could act as the other: give each "
                    "a key of its own; if this is meant, add one of them by `isthmus members add --shared-key` after "
                    "the charter is in force, and leave its key out here"
                )
        return entries


def read_agreement(path: str) -> Agreement:
    """Return what a TOML file states. Raises `InputError`, which names the file and the field."""
    try:
        said = msgspec.toml.decode(Path(path).expanduser().read_bytes(), type=_File)
        made = {
            "purpose": said.purpose,
            "owners": [(owner.name, read_public(owner.key)) for owner in said.owner],
            "amend": said.amend,
            "admit": said.admit,
            "expel": said.expel,
            "manifests": said.manifests,
            "gate": said.gate and msgspec.to_builtins(said.gate),
            "terms": [
                {"member": m.name, "factor": m.factor, "cap": m.cap, "sources": m.sources}
                | ({"institution": m.institution} if m.institution is not None else {})
                for m in said.member
            ],
        }
        charter = msgspec.convert(made, Charter, builtin_types=(bytes,))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except (msgspec.MsgspecError, ValueError) as error:
        raise InputError(f"{path}: {error} (docs/consortium.md has a charter to begin with)") from None
    if fault := charter.fault():
        raise InputError(f"{path}: {fault}")
    for member in said.member:
        if member.key is None and (member.role != MemberRole.LEARNER or member.bucket is not None):
            raise InputError(f"{path}: member {member.name} has a role or a bucket here, and no key: add its key")
    return Agreement(path, charter, tuple(member for member in said.member if member.key is not None))


def require_expected(header: MembersHeader, before: Membership, agreement: Agreement) -> None:
    """Raise `InputError` unless a proposal changes the charter and the members to what a file states, and nothing else.

    The first charter must have no member whose key the file does not state: nobody has agreed on the members before it.
    """
    path = agreement.path
    if header.charter != agreement.charter:
        said = _apart(in_words(agreement.charter), in_words(header.charter)) or "only the order of its entries differs"
        raise InputError(f"{path}: the proposal has another charter (- this file, + the proposal):\n{said}")
    ours = agreement.members(() if before.charter is None else before.members)
    if ours != list(header.members):
        said = _apart([in_word(m) for m in ours], [in_word(m) for m in header.members])
        raise InputError(
            f"{path}: the proposal has this charter, but other members (- this file, + the proposal):\n{said}\nIf you "
            "have agreed on that, too: add those with + to the file, with key and role; a proposal that removes those "
            "with - is approved without --expect, by its id"
        )


def _apart(ours: Sequence[str], theirs: Sequence[str]) -> str:
    lines = [*(f"- {x}" for x in ours if x not in theirs), *(f"+ {x}" for x in theirs if x not in ours)]
    return "\n".join(line.encode("ascii", "backslashreplace").decode() for line in lines)  # letters that look alike

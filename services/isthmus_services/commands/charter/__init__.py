"""`isthmus charter`: what the owners of a run have agreed on, and how they change it together."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from isthmus.errors import InputError
from isthmus.format.records.charter import Charter
from isthmus.format.records.objects import MembersHeader, MemberSpec
from isthmus.format.signing.keys import read_public
from isthmus.inspect.charter_words import differences, in_words, until
from isthmus.log import Log, proposals
from isthmus.log.charter import needed
from isthmus.log.listing import heads_of
from isthmus.log.membership import GRACE_VERSIONS, Membership, following

HOUR_S = 3600.0


# --- a charter in a file ----------------------------------------------------------------------------------------------


class _Owner(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    key: str
    """The line of a .pub file, or the file's path."""


class _Member(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: str
    factor: float = 1.0
    cap: float | None = None
    sources: list[str] = []
    institution: str | None = None


class _Gate(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    series: str
    better: Literal["lower", "higher"]
    tolerance: float = 0.0
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


def read_charter(path: str) -> Charter:
    """Return the charter in a TOML file. Raises `InputError`, which names the file and the field."""
    try:
        said = msgspec.toml.decode(Path(path).expanduser().read_bytes(), type=_File)
        made = {
            "purpose": said.purpose,
            "owners": [(owner.name, read_public(owner.key)) for owner in said.owner],
            "amend": said.amend,
            "admit": said.admit,
            "expel": said.expel,
            "manifests": said.manifests,
            "gate": said.gate and msgspec.structs.asdict(said.gate),
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
    return charter


# --- proposing --------------------------------------------------------------------------------------------------------


async def proposed(log: Log, entries: Sequence[MemberSpec], charter: Charter | None, hours: float) -> MembersHeader:
    """Return the next version of the membership with these entries. Owners have `hours` to approve it.

    Commits made meanwhile under the present membership stay valid: it allows as many as the run makes in that time.
    """
    room, heads = GRACE_VERSIONS, await heads_of(log)
    for fragment, head in enumerate(heads):
        first = max(1, head - GRACE_VERSIONS)
        earlier = await log.commit(fragment, first) if head > first else None
        newest = await log.commit(fragment, head) if earlier else None
        if earlier and newest:
            apart_s = max(1e-3, newest.header.written_at - earlier.header.written_at)
            room = max(room, int((head - first) / apart_s * hours * HOUR_S))
    return following(log.members, entries, heads, log.runtime.wall(), charter=charter, room=room)


async def require_timely(log: Log, header: MembersHeader) -> None:
    """Raise `InputError` if the run has gone beyond the versions that a proposal leaves to the present membership."""
    heads = await heads_of(log)
    beyond = next((p for p, head in enumerate(heads) if head >= header.until[p]), None)
    if beyond is not None:
        raise InputError(
            f"this proposal is out of date: fragment {beyond} is at version {heads[beyond]}, and no version after "
            f"{header.until[beyond]} may be of the members before it: propose it again"
        )


async def give_approval(log: Log, header: MembersHeader) -> None:
    """Print what a change changes, approve it with the log's key, and print what follows.

    Raises `InputError` if there is no key, it is no owner's, the change is out of date, or it changes nothing.
    """
    if log.signer is None:
        raise InputError("use --key FILE with the private key of one of the run's owners")
    await require_timely(log, header)
    before, url = log.members.current, log.run.url
    if not (changes := list(differences(before, header))):
        raise InputError(f"{url}: this changes nothing but spaces or the order, so there is nothing to approve")
    print("\n".join([*changes, until(header)]), flush=True)
    earlier = next((p for p in await proposals.proposals(log.store, log.members) if p.header == header), None)
    again = earlier is not None and log.signer.author in earlier.approvals
    found = await proposals.approve(log.store, log.members, log.signer, header)
    if not isinstance(found, proposals.Proposal):
        print(
            f"membership {found.version} is in force, approved by {len(found.approvals)}: syncers apply it to the "
            "commits that they begin from now on"
        )
        return
    if again:
        print(f"{proposals.entitled(before, header)[log.signer.author]} has approved this proposal before")
    print(f"proposal {found.id} is approved by {len(found.approvals)}; it still needs {found.lacks(before)}")
    expecting = "" if header.charter == before.charter else " --expect charter.toml"
    print(f"each of them: isthmus charter approve {url} {found.id}{expecting} --key FILE")


def require_expected(header: MembersHeader, before: Membership, path: str) -> None:
    """Raise `InputError` unless a proposal changes the charter to exactly the one in a file, and nothing else."""
    charter = read_charter(path)
    if header.charter != charter:
        ours, theirs = in_words(charter), in_words(header.charter)
        apart = [f"- {line}" for line in ours if line not in theirs] + [f"+ {t}" for t in theirs if t not in ours]
        said = "\n".join(apart) or "only the order of its entries differs"
        raise InputError(f"{path}: the proposal has another charter (- this file, + the proposal):\n{said}")
    if header.members != before.members:
        raise InputError(
            f"{path}: the proposal has this charter, but changes members, too: approve it without --expect if you want "
            "that (isthmus charter show prints it)"
        )


def threshold(before: Membership, header: MembersHeader) -> str:
    """Return, in words, how many owners must approve a change."""
    if before.charter is None:
        return "the run's owner"
    return f"{needed(before.charter, before.members, header)} of {len(before.charter.owners)} owners"

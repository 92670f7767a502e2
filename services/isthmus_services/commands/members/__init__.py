"""`isthmus members`: manage who may take part in a run. Its owner decides that, and every process checks it."""

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec

from isthmus.agent.ports import open_log
from isthmus.errors import InputError, ObjectMissing, RecordInvalid
from isthmus.format.records import frame
from isthmus.format.records.keys import LEARNERS
from isthmus.format.records.objects import VOUCHED_MAX, CheckpointHeader, MemberSpec
from isthmus.format.rules import MemberRole
from isthmus.format.signing import Signer, fingerprint
from isthmus.log import Log
from isthmus.log.listing import by_learner, checkpoints_in, heads_of
from isthmus.log.membership import Membership, may_share, write
from isthmus.runtime.urls import Place
from isthmus.store import Entry, checked
from isthmus_services.commands.charter import HOURS, give_approval, proposed
from isthmus_services.output.report import write_json
from isthmus_services.settings import declared, shared

logger = logging.getLogger(__name__)

Change = Callable[[Membership], Sequence[MemberSpec]]
"""Returns the entries of the next version, given the current version. Raises `InputError`."""

Writing = declared.MembersAdd | declared.MembersRemove | declared.MembersRotate


def change(settings: Writing, made: Change, successor: Signer | None = None) -> int:
    """Write the next version of the membership, and print after which versions only it is accepted. Return 0."""
    asyncio.run(_change(settings, made, successor))
    return 0


async def _change(settings: Writing, made: Change, successor: Signer | None) -> None:
    trust = shared.trust_in(settings)
    async with open_log(settings.run, trust) as log:
        require_signed(log)
        if log.signer is None:
            raise InputError("use --key OWNER_KEY_FILE, the private key of an owner of the run (isthmus members list)")
        heads = await heads_of(log)
        before = await log.members.refresh(log.store)
        entries = made(before)
        if isinstance(settings, declared.MembersRotate) and settings.public_key and not settings.no_checkpoints:
            entries, resumes = await _vouched(log, before, entries)
            if any(m.role == MemberRole.LEARNER for m in entries if m.name == settings.name):
                print(
                    f"{'; '.join(resumes) or 'no learner of this name has a checkpoint'}; end the process that has the "
                    "old key, and start it again with the new one: what it trains until then is not merged"
                )
        if before.charter is not None:
            if successor is not None:
                raise InputError("this run has a charter: its owners change with it (isthmus charter propose)")
            hours = settings.hours if isinstance(settings, declared.MembersRemove) else HOURS
            report = await give_approval(log, await proposed(log, entries, None, hours), trust, hours=hours)
            write_json(report, settings.json)
            return
        after = await write(log.store, log.members, log.signer, entries, heads, log.runtime.wall(), successor=successor)
        print(f"membership {after.version}: {len(after.members)} members, owner {fingerprint(after.owner)}")
        print(
            "syncers apply it to the commits that they begin from now "
            "on; after these versions, no other membership is accepted: "
            + ", ".join(f"{p}/{version}" for p, version in enumerate(after.until[:8]))
            + (", …" if len(after.until) > 8 else "")
        )
        if any(_syncs(m) for m in before.members) and not any(_syncs(m) for m in after.members):
            print(
                f"no syncer can take part any more, so nothing is merged: isthmus members add {settings.run} NAME --as "
                "syncer --public-key FILE.pub --key OWNER_KEY_FILE adds one"
            )
        write_json({"membership": after.version, "proposal": None, "still_needs": ""}, settings.json)


def _syncs(member: MemberSpec) -> bool:
    return member.role == MemberRole.SYNCER


async def _vouched(
    log: Log, before: Membership, entries: Sequence[MemberSpec]
) -> tuple[list[MemberSpec], Sequence[str]]:
    """Return the entries, each learner whose key changes with the signatures of its newest checkpoints; and in words,
    from which steps learners go on.

    The learner's next incarnation may then continue from them, although the key that signed them is no longer valid.
    An entry whose name is a pattern stands for several learners, and gets a signature for each.
    """
    held = by_learner(checkpoints_in(await log.store.list(LEARNERS)))
    found = []
    resumes: list[str] = []
    for member in entries:
        earlier = next((m for m in before.members if m.name == member.name), None)
        if member.role != MemberRole.LEARNER or earlier is None or earlier.key == member.key:
            found.append(member)
            continue
        signatures: list[bytes] = []
        for name, checkpoints in held.items():
            if before.member(name) is earlier and len(signatures) < VOUCHED_MAX:
                signature, step = await _newest_of(log, name, checkpoints)
                signatures += [signature] if signature else []
                resumes.append(
                    f"{name} goes on after step {step}" if signature else f"no checkpoint of {name} is valid"
                )
        found.append(msgspec.structs.replace(member, vouched=tuple(signatures)))
    return found, resumes


async def _newest_of(log: Log, name: str, checkpoints: Sequence[Entry]) -> tuple[bytes, int]:
    """Return the signature [64 bytes] and the step of a learner's newest valid checkpoint in a list.

    The signature is empty if there is none.
    """
    for entry in checkpoints:
        if entry.size > log.checkpoint_most:
            logger.warning("skipping %s: it has %d bytes", entry.key, entry.size)
            continue
        try:
            blob = await checked.read(log.store, log.runtime, entry.key, entry.size, cut=True)
            opened = await log.open(blob, entry.key, CheckpointHeader, in_force=True)
        except (ObjectMissing, RecordInvalid) as error:
            logger.warning("skipping %s: %s", entry.key, error)
            continue
        return frame.signature_of(blob), opened.header.step
    return b"", 0


def bucket_of(url: str | None) -> str:
    """Return the URL of a member's bucket as its entry has it; empty if none is given. Raises `InputError`."""
    if not url:
        return ""
    place = Place.of(url)
    if not (place.in_bucket or place.scheme == "file") or "@" in place.authority:
        raise InputError(
            f"--bucket {place}: write it as s3://BUCKET/PREFIX, "
            "gs://BUCKET/PREFIX, az://CONTAINER/PREFIX, or file:///PATH if the run is in a folder"
        )
    return url


def require_own_key(before: Membership, entry: MemberSpec, shared_key: bool) -> None:
    """Raise `InputError` if another member has this entry's key, unless `shared_key` says that this is meant.

    A syncer and a collector may always have the same key: `isthmus syncer --collect` needs it.
    """
    theirs = [m for m in before.members if m.key == entry.key and m.name != entry.name]
    if not shared_key and (found := [m for m in theirs if not may_share(m.role, entry.role)]):
        whose = ", ".join(f"{m.role} {m.name}" for m in found)
        raise InputError(
            f"{fingerprint(entry.key)} is the key of {whose}, who could then act as {entry.name}, too: use the key of "
            f"{entry.name}; if both are meant to have this key, add --shared-key"
        )


def require_signed(log: Log) -> None:
    """Raise `InputError` if the run is unsigned: only a signed run has members."""
    if not log.members.signed:
        raise InputError(
            f"{log.run.url}: this run was created without an owner's key, so it has no members: create one with "
            "isthmus init --key OWNER_KEY_FILE"
        )

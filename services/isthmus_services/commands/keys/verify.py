"""`isthmus keys verify RUN OBJECT`: print an object's signer and whether to trust it; write files for `ssh-keygen`."""

import asyncio
from pathlib import Path

from isthmus.agent.ports import open_log
from isthmus.errors import InputError, LogCorrupt, ObjectMissing, RecordInvalid
from isthmus.format import memory
from isthmus.format.records import frame
from isthmus.format.records.frame import Kind
from isthmus.format.records.keys import RUN_KEY, can_be_named, commit_in, learner_in
from isthmus.format.signing import armored, fingerprint, namespace_of, public_line
from isthmus.log import Log
from isthmus.log.membership import WRITERS, Membership
from isthmus.log.verify import KINDS
from isthmus.store import checked
from isthmus.wording import an
from isthmus_services.settings import declared, shared

MESSAGE, SIGNATURE, ALLOWED = "message", "message.sig", "allowed_signers"


def run(settings: declared.KeysVerify) -> int:
    """Print who signed the object. Return 1 if the object is not to be trusted, else 0."""
    return asyncio.run(_verify(settings))


async def _verify(settings: declared.KeysVerify) -> int:
    async with open_log(settings.run, shared.owner_in(settings)) as log:
        if not can_be_named(settings.object):
            raise InputError(
                f"{settings.object} is not the path of an object, such as "
                "updates/00000/NAME/000000000012-0123456789abcdef"
            )
        try:
            blob = await checked.read(log.store, log.runtime, settings.object, memory.machine_bytes())
        except ObjectMissing:
            raise InputError(f"{log.run.url}: nothing is stored under {settings.object}") from None
        try:
            kind = Kind(frame.kind_of(blob))
        except ValueError:
            raise InputError(f"{settings.object} is not an object of a run") from None
        if not log.members.signed:
            raise InputError(f"{log.run.url}: nothing in this run is signed")
        why = await log.runtime.offload(_why_not, log, blob, kind, settings.object)
        author = frame.author_of(blob)
        names = _names(log.members.versions, author)
        said = f"{settings.object}: {kind.name.lower()} signed by {fingerprint(author)}"
        print(f"{said} ({', '.join(names) or 'not a member'})")
        if settings.into is not None:
            print("\n".join(_write(Path(settings.into), log, blob, kind, names)))
        print("the signature is valid, and the signer may write this object" if why is None else f"not trusted: {why}")
        return 0 if why is None else 1


def _why_not(log: Log, blob: frame.Body, kind: Kind, key: str) -> str | None:
    """Return why an object is not to be trusted, or None if it is. Every version of the membership has been read."""
    try:
        if kind == Kind.RUN:
            return None if key == RUN_KEY and frame.digest(blob) == log.run.digest else "it belongs to another run"
        if kind == Kind.MEMBERS:
            known = any(frame.digest(blob) == membership.digest for membership in log.members.versions)
            return None if known else "it is in no membership of this run"
        record = next((record for record, of in KINDS.items() if of == kind), None)
        if record is None:
            log.members.require_author(blob, kind)
            return f"{an(kind.name.lower())} cannot be verified alone: verify the object that names it"
        if kind == Kind.COMMIT:
            log.verifier.commit(blob, *_fragment_and_version(key))
            return None
        opened = log.verifier.open(blob, key, record)
        try:
            by = log.members.current.version
            log.members.require_member(opened.author, WRITERS[kind], learner_in(key) or None, by)
        except RecordInvalid as error:
            return f"it is trusted only if a commit or the owner vouches for it: {error.detail}"
    except (RecordInvalid, LogCorrupt) as error:
        return str(error)
    return None


def _fragment_and_version(key: str) -> tuple[int, int]:
    parts = key.split("/")
    return (int(parts[1]) if len(parts) == 3 and parts[1].isdigit() else 0), commit_in(key) if "/" in key else 0


def _names(versions: list[Membership], author: bytes) -> list[str]:
    found = ["owner"] if any(author == membership.owner for membership in versions) else []
    return found + sorted({f"{m.name}, {m.role}" for v in versions for m in v.members if m.key == author})


def _write(folder: Path, log: Log, blob: frame.Body, kind: Kind, names: list[str]) -> list[str]:
    """Write the files that `ssh-keygen -Y verify` reads; return its command line."""
    author, namespace = frame.author_of(blob), namespace_of(kind.name)
    who = names[0].partition(",")[0] if names else "unknown"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / MESSAGE).write_bytes(frame.signed_part(blob))
        (folder / SIGNATURE).write_text(armored(author, namespace, frame.signature_of(blob)))
        (folder / ALLOWED).write_text("".join(line + "\n" for line in allowed_signers(log.members.versions)))
    except OSError as error:
        raise InputError(f"{folder}: {error.strerror}") from None
    return [
        f"ssh-keygen -Y verify -f {folder / ALLOWED} -I '{who}' -n {namespace} -s {folder / SIGNATURE} "
        f"< {folder / MESSAGE}"
    ]


def allowed_signers(versions: list[Membership]) -> list[str]:
    """Return the lines of an allowed-signers file: owners and members of these versions, each name and key once."""
    lines = [f"owner {public_line(membership.owner)}" for membership in versions]
    lines += [f"{m.name} {public_line(m.key)}" for membership in versions for m in membership.members]
    return list(dict.fromkeys(lines))

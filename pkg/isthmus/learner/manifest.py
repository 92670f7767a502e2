"""The learner's manifest: reads the file in which an operator states what is trained and on what, and stores it.

The manifest holds the names and digests of files, never their content.
"""

import platform
import subprocess
import tomllib
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from isthmus.errors import InputError, ObjectMissing, RecordInvalid, plainly
from isthmus.format import digests
from isthmus.format.records import frame
from isthmus.format.records.charter import SOURCES_MAX
from isthmus.format.records.fields import Name, Text, Word
from isthmus.format.records.frame import Kind
from isthmus.format.records.keys import manifest_key, manifests_prefix
from isthmus.format.records.objects import SCHEMA, WORDS_MAX, ManifestHeader, Source
from isthmus.log import Log
from isthmus.log.manifests import are_required, model_digest, not_allowed
from isthmus.log.membership import Membership
from isthmus.runtime.clock import cores

MANIFEST = "ISTHMUS_MANIFEST"

GIT_S = 10.0
"""Seconds that git gets to name the commit of the working directory."""

COMPARED_MAX = 64
"""The most earlier manifests of a learner that are compared with its present one, the newest first."""

PIECE = 1 << 20
"""Bytes of a file that are read at once."""


class _Source(msgspec.Struct, frozen=True):
    name: Name
    description: str | None = None
    path: str | None = None


class _File(msgspec.Struct, frozen=True):
    code: Text | None = None
    configuration: str | None = None
    source: Annotated[tuple[_Source, ...], msgspec.Meta(max_length=SOURCES_MAX)] = ()
    hardware: Text | None = None
    more: Annotated[dict[Word, Text], msgspec.Meta(max_length=WORDS_MAX)] = {}


class Statement(msgspec.Struct, frozen=True):
    """What an operator states in a manifest; the run, the learner, the model and the time are added in the run."""

    code: str
    configuration: bytes
    """Digest [32 bytes]; zeros if there is none."""
    sources: tuple[Source, ...]
    hardware: str
    more: Mapping[str, str]


def statement(given: str | Path | Mapping[str, Any], accelerators: Callable[[], str] = lambda: "") -> Statement:
    """Return the statement in a TOML file, or in a mapping with the same fields. Raises `InputError`.

    `accelerators` describes the machine's accelerators; it is called if the hardware is not given. Paths in a file are
    relative to its folder.
    """
    where, folder = "manifest", Path()
    if not isinstance(given, Mapping):
        path = Path(given)
        where, folder, given = str(path), path.parent, _parsed(path)
    known, of_source = set(_File.__struct_fields__), set(_Source.__struct_fields__)
    unknown = [str(name) for name in given if name not in known]
    sources = given.get("source", ())
    for source in sources if isinstance(sources, list | tuple) else ():
        unknown += [f"source.{name}" for name in source if name not in of_source] if isinstance(source, Mapping) else []
    if unknown:
        raise InputError(f"{where}: there is no field {', '.join(unknown)}: {', '.join(sorted(known))} are known")
    try:
        found = msgspec.convert(given, _File)
    except msgspec.ValidationError as error:
        field = str(error).partition(" - at `$.")[2].rstrip("`")
        raise InputError(f"{where}: {field or 'it'}: {plainly(str(error))}") from None
    if twice := [name for name, times in Counter(s.name for s in found.source).items() if times > 1]:
        raise InputError(f"{where}: source {twice[0]} stands there twice")
    return Statement(
        code=commit_of(Path()) if found.code is None else found.code,
        configuration=_digest_of(folder / found.configuration, where) if found.configuration else bytes(digests.SIZE),
        sources=tuple(Source(s.name, _described(s, folder, where)) for s in found.source),
        hardware=_joined(accelerators(), processor()) if found.hardware is None else found.hardware,
        more=found.more,
    )


def objection(judge: Membership, learner: str, stated: Statement | None) -> str:
    """Return why the charter of a membership lets no update of a learner be merged, and what to do; empty if it does.

    `stated`: what the learner's manifest states; None: it has none.
    """
    if not are_required(judge):
        return ""
    if stated is None:
        return (
            f"the run's charter asks for a manifest, and {learner} has none, so none of its updates is merged: start "
            f"it with --manifest FILE ({MANIFEST}, isthmus.join: manifest=); docs/your-loop.md has the fields"
        )
    if other := not_allowed(judge, learner, stated.sources):
        allowed = ", ".join(judge.terms(learner).sources)
        return (
            f"the manifest of {learner} declares the source {other}, and the run's charter allows it {allowed} only, "
            "so none of its updates is merged: train on these sources and name them in the manifest, or ask the "
            "owners for another charter (isthmus charter propose)"
        )
    return ""


async def store(log: Log, learner: str, stated: Statement) -> bytes:
    """Store a learner's manifest, unless the learner has stored the same one before; return its digest [32 bytes].

    Raises what the store raises.
    """
    header = ManifestHeader(
        schema=SCHEMA,
        run=log.run.digest,
        learner=learner,
        model=model_digest(log.run.layout),
        written_at=log.runtime.wall(),
        **msgspec.structs.asdict(stated),
    )
    earlier = await log.store.list(manifests_prefix(learner))
    for entry in sorted(earlier, key=lambda entry: -entry.modified)[:COMPARED_MAX]:
        try:
            blob = await log.fetch(entry.key, Kind.MANIFEST)
            found = await log.open(blob, entry.key, ManifestHeader, in_force=True)
        except (ObjectMissing, RecordInvalid):
            continue  # not this learner's, or signed by its earlier key
        if msgspec.structs.replace(found.header, written_at=header.written_at) == header:
            return found.digest
    body = frame.draft(Kind.MANIFEST, header).blob
    log.seal(body)
    digest = frame.digest(body)
    await log.store.create(manifest_key(learner, digest), body)
    return digest


def commit_of(folder: Path) -> str:
    """Return the git commit that is checked out in a folder, with `-dirty` if files differ from it; empty if none."""
    words = ("git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    try:
        said = subprocess.run(words, capture_output=True, text=True, timeout=GIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return said.stdout.strip()


def processor() -> str:
    """Return the number and the name of this machine's processor cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{cores()} cores of {name}"


def _parsed(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}: name a manifest that exists") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not TOML: {error}") from None


def _described(source: _Source, folder: Path, where: str) -> bytes:
    if (source.description is None) == (source.path is None):
        raise InputError(f"{where}: source {source.name} needs either a description or the path of one")
    if source.path is not None:
        return _digest_of(folder / source.path, f"{where}: source {source.name}")
    assert source.description is not None, "it has one of them"
    return digests.digest(source.description.encode())


def _digest_of(path: Path, where: str) -> bytes:
    """Return the digest [32 bytes] of a file."""
    try:
        with path.open("rb") as file:
            return digests.digest_of(iter(lambda: file.read(PIECE), b""))
    except OSError as error:
        raise InputError(f"{where}: {path}: {error.strerror}") from None


def _joined(*said: str) -> str:
    """Return descriptions of hardware, without characters that a manifest may not hold."""
    text = ", ".join(filter(None, said))
    return "".join(letter if letter.isprintable() else " " for letter in text)[:256]

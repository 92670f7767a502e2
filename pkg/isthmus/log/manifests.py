"""Manifests: what learners state about their training. How a manifest is read, judged by the charter, and told.

A learner writes its manifest before its first update, and its updates name the manifest's digest. So does the commit
that merges such an update. If the charter asks for manifests, syncers and replay judge them by the same rule.
"""

from collections import OrderedDict
from collections.abc import Iterable

import msgspec

from isthmus.errors import Denied, ObjectMissing, RecordInvalid
from isthmus.format import digests
from isthmus.format.layout import Layout
from isthmus.format.records import frame
from isthmus.format.records.frame import Kind
from isthmus.format.records.keys import manifest_key
from isthmus.format.records.objects import ManifestHeader, Source
from isthmus.log.commits import Log
from isthmus.log.membership import Membership
from isthmus.reasons import Reason

KEPT = 512
"""The most manifests in memory, one of each learner."""

NAMED = 3
"""The most data sources that a rejection names."""


def model_digest(layout: Layout) -> bytes:
    """Return the digest [32 bytes] of the names, shapes, dtypes and roles of a model's tensors."""
    specs = [(spec.name, spec.shape, spec.dtype, spec.role) for spec in layout.specs]
    return digests.digest(msgspec.msgpack.encode(specs))


async def read(log: Log, learner: str, digest: bytes) -> ManifestHeader:
    """Return the manifest that a learner's update names by its digest [32 bytes].

    Its author must be or have been the learner, since the update vouches for it. Raises `RecordInvalid`:
    `UNREAD_MANIFEST` if the store does not have these bytes, or denies them; `NO_MANIFEST` if they are not a manifest
    of this learner, run and model. Also raises `Unavailable`.
    """
    key = manifest_key(learner, digest)
    try:
        blob = await log.fetch(key, Kind.MANIFEST)
    except ObjectMissing:
        raise RecordInvalid(Reason.UNREAD_MANIFEST, f"{key} is missing") from None
    except Denied as error:
        raise RecordInvalid(Reason.UNREAD_MANIFEST, f"{key} may not be read: {error}") from None
    except RecordInvalid as error:
        raise RecordInvalid(Reason.UNREAD_MANIFEST, f"{key} is damaged: {error.detail}") from None
    if (found := frame.digest(blob)) != digest:
        raise RecordInvalid(Reason.UNREAD_MANIFEST, f"{key} is damaged: it has digest {found.hex()[:16]}")
    try:
        header = (await log.open(blob, key, ManifestHeader, digest=digest)).header
    except RecordInvalid as error:
        raise RecordInvalid(Reason.NO_MANIFEST, f"{key} is no manifest of {learner}: {error.detail}") from None
    if header.model != model_digest(log.run.layout):
        raise RecordInvalid(Reason.NO_MANIFEST, f"{key} states another model than the run's")
    return header


class Manifests:
    """Reads manifests, and keeps the one of each learner that was read last."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._kept: OrderedDict[str, tuple[bytes, ManifestHeader]] = OrderedDict()

    async def of(self, learner: str, digest: bytes) -> ManifestHeader:
        """Return a manifest. Raises what `read` does."""
        kept = self._kept.get(learner)
        header = kept[1] if kept is not None and kept[0] == digest else await read(self._log, learner, digest)
        self._kept[learner] = digest, header
        self._kept.move_to_end(learner)
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return header


# --- judging ----------------------------------------------------------------------------------------------------------


def are_required(judge: Membership) -> bool:
    """Return whether the charter of a membership lets only updates with a manifest be merged."""
    return judge.charter is not None and judge.charter.manifests


def require(judge: Membership, learner: str, named: bytes | None, manifest: ManifestHeader | None) -> None:
    """Raise `RecordInvalid` unless the charter of a membership lets an update be merged with its manifest.

    `named`: the digest that the update names. `manifest`: that manifest; None: it was not read.
    """
    if not are_required(judge):
        return
    if named is None:
        raise RecordInvalid(Reason.NO_MANIFEST, "it names no manifest, and the charter asks for one")
    if manifest is None:
        raise RecordInvalid(Reason.UNREAD_MANIFEST, "its manifest was not read")
    if other := not_allowed(judge, learner, manifest.sources):
        raise RecordInvalid(
            Reason.SOURCE_NOT_ALLOWED, f"its manifest declares {other}, which the charter does not allow {learner}"
        )


def not_allowed(judge: Membership, learner: str, sources: Iterable[Source]) -> str:
    """Return the names of the sources that the charter does not allow a learner, as one text; empty if there are
    none."""
    allowed = judge.terms(learner).sources
    other = [source.name for source in sources if allowed and source.name not in allowed]
    more = f" and {len(other) - NAMED} more" if len(other) > NAMED else ""
    return f"{', '.join(other[:NAMED])}{more}"


# --- in words ---------------------------------------------------------------------------------------------------------


def told(manifest: ManifestHeader) -> list[str]:
    """Return in words what a manifest states."""
    sources = ", ".join(f"{s.name} ({_short(s.description)})" for s in manifest.sources)
    return [
        f"code {manifest.code or 'not stated'}; configuration {_short(manifest.configuration)}; "
        f"hardware {manifest.hardware or 'not stated'}",
        f"sources: {sources or 'none stated'}",
        *(f"more.{name}: {text}" for name, text in sorted(manifest.more.items())),
    ]


def changes(before: ManifestHeader, after: ManifestHeader) -> list[str]:
    """Return in words how a learner's manifest differs from an earlier one; the times are not compared."""
    old, new = _facts(before), _facts(after)
    return [
        f"{name} is new: {new[name]}"
        if name not in old
        else f"{name} is gone, and was {old[name]}"
        if name not in new
        else f"{name} was {old[name]}, and is {new[name]}"
        for name in [*new, *(name for name in old if name not in new)]
        if old.get(name) != new.get(name)
    ]


def _facts(manifest: ManifestHeader) -> dict[str, str]:
    return {
        "code": manifest.code or "not stated",
        "configuration": _short(manifest.configuration),
        **{f"source {s.name}": _short(s.description) for s in manifest.sources},
        "hardware": manifest.hardware or "not stated",
        **{f"more.{name}": text for name, text in sorted(manifest.more.items())},
    }


def _short(digest: bytes) -> str:
    return digest.hex()[:16] if any(digest) else "not stated"

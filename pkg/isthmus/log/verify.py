"""Verification of every stored object: bytes go in, values of verified types come out.

No other module parses an object; `tests/unit/test_verified.py` enforces this. Every object is checked in this order:

    digest    it is the one that a verified object names, if one does
    frame     kind and sizes are right, and nothing is larger than its kind may be
    author    the signature is valid, and the membership allows its key this kind; before the header is decoded
    header    every field is there, of its type and in its range
    run       it belongs to this run
    name      the author may write under the name that the object bears
    key       it lies under the key that follows from its header and digest

Checks that only one kind needs follow. An object read without these checks is `Unverified`. It may be shown as such,
and help to choose what is read next, but nothing is computed with it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from isthmus.codecs import codec, packed_bounds
from isthmus.codecs.kernels import ARITHMETIC, F32
from isthmus.errors import LogCorrupt, RecordInvalid
from isthmus.format import digests
from isthmus.format.layout import TensorClass
from isthmus.format.records import frame, keys
from isthmus.format.records.frame import Blob, Kind
from isthmus.format.records.keys import learner_in
from isthmus.format.records.objects import (
    UNSTATED,
    CheckpointHeader,
    ClaimHeader,
    CommitHeader,
    EvaluationHeader,
    Input,
    ManifestHeader,
    PackedHeader,
    PartHeader,
    PromotionHeader,
    Record,
    SegmentHeader,
    SnapshotHeader,
    UpdateHeader,
    ValueHeader,
)
from isthmus.format.rules import STALENESS_MAX, CodecName
from isthmus.log import merge
from isthmus.log.membership import MISSING, WRITERS, Members, MembershipUnknown
from isthmus.log.run import Run
from isthmus.reasons import Clip, Reason
from isthmus.wording import an

H = TypeVar("H", bound=Record)

KINDS: Mapping[type[Record], Kind] = {
    UpdateHeader: Kind.UPDATE,
    ValueHeader: Kind.VALUE,
    SnapshotHeader: Kind.SNAPSHOT,
    CommitHeader: Kind.COMMIT,
    ClaimHeader: Kind.CLAIM,
    SegmentHeader: Kind.SEGMENT,
    PackedHeader: Kind.PACKED,
    CheckpointHeader: Kind.CHECKPOINT,
    PartHeader: Kind.PART,
    EvaluationHeader: Kind.EVALUATION,
    ManifestHeader: Kind.MANIFEST,
    PromotionHeader: Kind.PROMOTION,
}
"""The kind that each header type belongs to. The run object and the versions of the membership vouch for all other
objects and are read in `run` and `membership`."""

HEALER = "heal"
"""The writer's name in a healing commit, which an operator writes, not a syncer."""

SEGMENT_MOST = 256 << 20
"""Most bytes of packed commits that are read at once; the commits of a longer segment are read one by one."""

HEADER_LEAST, HEADER_EACH = 1 << 20, 4 << 10
"""Most bytes of header in another learner's checkpoint: a constant, plus so many for each tensor of the model."""

_OF_AUTHORS = frozenset({Reason.UNSIGNED, Reason.BAD_SIGNATURE, Reason.NOT_A_MEMBER})

WITHOUT_PAYLOAD = frozenset({Kind.COMMIT, Kind.CLAIM, Kind.PACKED, Kind.EVALUATION, Kind.MANIFEST, Kind.PROMOTION})

_KEYS: Mapping[type[Record], Callable[[Any, bytes], str]] = {
    UpdateHeader: lambda h, digest: keys.update_key(h.fragment, h.learner, h.base, digest),
    ValueHeader: lambda h, digest: keys.value_key(h.fragment, h.version, digest),
    SnapshotHeader: lambda h, digest: keys.snapshot_key(h.fragment, h.version, digest),
    CommitHeader: lambda h, _: keys.commit_key(h.fragment, h.version),
    ClaimHeader: lambda h, _: keys.claim_key(h.learner, h.incarnation),
    SegmentHeader: lambda h, digest: keys.segment_key(h.fragment, h.first, digest),
    PackedHeader: lambda h, _: keys.commit_key(h.fragment, h.version),
    CheckpointHeader: lambda h, digest: keys.checkpoint_key(h.learner, h.incarnation, h.step, digest),
    PartHeader: lambda h, digest: keys.part_key(h.learner, h.incarnation, h.step, h.rank, digest),
    EvaluationHeader: lambda h, digest: keys.evaluation_key(h.series, h.cut, digest),
    ManifestHeader: lambda h, digest: keys.manifest_key(h.learner, digest),
    PromotionHeader: lambda h, _: keys.promotion_key(h.number),
}
"""The key that an object of each kind must lie under, from its header and its digest."""


class Unverified(Generic[H]):
    """The header of an object of which only the beginning was read: neither signature nor digest was checked."""

    __slots__ = ("said",)

    def __init__(self, said: H) -> None:
        self.said = said


class _Proof:
    """Proof that a `Verifier` makes a `Verified`: no other code has an instance."""


_PROOF = _Proof()


class Verified(Generic[H]):
    """An object that passed every check. Only a `Verifier` makes one."""

    __slots__ = ("author", "digest", "header", "key", "payload")

    def __init__(
        self, key: str, header: H, payload: memoryview, digest: bytes, author: bytes, *, proof: _Proof
    ) -> None:
        if proof is not _PROOF:
            raise TypeError("only a Verifier makes a Verified")
        self.key = key
        self.header = header
        self.payload = payload
        self.digest = digest
        """Digest [32 bytes] of all bytes of the object."""
        self.author = author
        """The public key that signed it [32 bytes]; zeros in an unsigned run."""


@dataclass(frozen=True, slots=True)
class Commit:
    """A verified commit: its header and the digest of its bytes."""

    header: CommitHeader
    digest: bytes
    in_segment: bool = False
    """Whether its bytes were read from a segment."""
    author: bytes = b""
    """The public key that signed it [32 bytes]; zeros in an unsigned run."""

    @property
    def version(self) -> int:
        """The version that it created."""
        return self.header.version


class Verifier:
    """Checks the objects of one run. Pure. Slow for large objects: call it off the loop for those."""

    def __init__(self, run: Run, members: Members | None = None) -> None:
        """`members`: who may write which objects; may be left out only for an unsigned run."""
        self.run = run
        self.members = members or Members(run)

    @property
    def header_most(self) -> int:
        """Most bytes of header in another learner's checkpoint that is decoded here.

        Each byte may become 80 bytes of memory. A learner needs this many to describe a model and an optimizer of the
        run's size. The header of a learner's own checkpoint may be longer.
        """
        return HEADER_LEAST + HEADER_EACH * len(self.run.layout.specs)

    def payload_most(self, kind: Kind, fragment: int = 0) -> int:
        """Return the most payload bytes of a kind of object in this run; `fragment` matters for kinds that belong to
        one."""
        of = self.run.layout.fragments[fragment]
        match kind:
            case Kind.UPDATE:
                return packed_bounds(codec(self.run.rules.codec_up), of)[1]
            case Kind.VALUE:
                # A healing commit publishes its value in float32, whatever the rules say.
                return max(packed_bounds(codec(name), of)[1] for name in (CodecName.F32, self.run.rules.codec_down))
            case Kind.SNAPSHOT:
                return 3 * 4 * of.size
            case Kind.SEGMENT:
                return SEGMENT_MOST
            case _:
                return 0

    def open(
        self,
        blob: Blob,
        key: str,
        record: type[H],
        *,
        digest: bytes | None = None,
        under: int | None = None,
        header_most: int | None = None,
    ) -> Verified[H]:
        """Return the verified object in these bytes, found under a key. Raises `RecordInvalid` with a named reason.

        `digest`: the digest that a verified object names. `under`: the membership version that its author is checked
        against; None: any known version may allow the author, for objects that a verified object vouches for.
        `header_most`: the most bytes of header to decode, if that is less than the kind's limit.
        """
        kind = KINDS[record]
        found = frame.digest(blob)
        if digest is not None and found != digest:
            raise RecordInvalid(Reason.DIGEST_MISMATCH, f"digest {found.hex()[:16]}, {digest.hex()[:16]} was named")
        end = frame.head_end(blob, kind)
        author = self.members.require_author(blob, kind, under)
        if header_most is not None and end > frame.PREFIX.size + header_most:
            raise RecordInvalid(Reason.OVERSIZED, f"{end} bytes of header, but at most {header_most} are decoded here")
        header, payload = frame.parse(blob, kind, record)
        if kind in WITHOUT_PAYLOAD and len(payload):
            raise RecordInvalid(Reason.MALFORMED, f"{an(kind.name.lower())} with a payload")
        run: bytes = getattr(header, "run")  # noqa: B009 - every kind has one, though `Record` does not say so
        # Version 0 is stored before the run object, which names its digest, so it holds zeros as the run's digest.
        first = isinstance(header, SnapshotHeader) and header.version == 0
        if run != (bytes(32) if first else self.run.digest):
            raise RecordInvalid(Reason.WRONG_RUN, f"this {kind.name.lower()} belongs to another run")
        by = header.members if isinstance(header, CommitHeader) else under
        self.members.require_member(author, WRITERS[kind], _name_in(header), by)
        # A part's key holds the digest of its head. The head names the digests of all its pieces.
        named = digests.digest(blob[: frame.payload_start(blob)]) if kind == Kind.PART else found
        if key != (belongs := _KEYS[record](header, named)):
            raise RecordInvalid(_displaced(key, belongs), f"it lies under {key}, and is {belongs}")
        return Verified(key, header, payload, found, author, proof=_PROOF)

    # --- commits ------------------------------------------------------------------------------------------------------

    def commit(self, blob: Blob, fragment: int, version: int, in_segment: bool = False) -> Commit:
        """Return the verified commit in these bytes. Raises `LogCorrupt`.

        The membership version that the commit names must be known (see `Members.reach`). The commit's writer knows it.
        """
        key = keys.commit_key(fragment, version)
        try:
            found = self.open(blob, key, CommitHeader)
        except MembershipUnknown:
            missing = keys.members_key(self.members.current.version + 1)
            why = MISSING
            raise LogCorrupt(missing, why) from None
        except RecordInvalid as error:
            what = "a syncer's commit" if error.reason in _OF_AUTHORS else "a commit"
            raise LogCorrupt(key, f"not {what}: {error.detail}") from None
        if why := self.why_not(found.header):
            raise LogCorrupt(key, why)
        return Commit(found.header, found.digest, in_segment, found.author)

    def why_not(self, h: CommitHeader) -> str:
        """Return why a commit cannot belong to this run, whoever wrote it; empty if it can."""
        if h.arithmetic != ARITHMETIC:
            return f"written with arithmetic {h.arithmetic}; this release has {ARITHMETIC}"
        if bool(h.inputs) == (h.healed is not None):
            return "merges nothing and does not heal" if not h.inputs else "merges and heals at once"
        if (h.writer == HEALER) != (h.healed is not None):
            return f"written by {h.writer}: who heals is called {HEALER}, and nobody else is"
        earliest = self.members.in_force(h.fragment, h.version)
        if h.members < earliest:
            return f"made under membership {h.members}, when {earliest} was in force"
        outer = merge.outers(self.run.rules, h.inputs)
        if (h.dense, h.embedding) != (outer[TensorClass.DENSE], outer[TensorClass.EMBEDDING]):
            return "merged by other rules than the run's"
        if h.state_digest == UNSTATED and (h.healed is not None or not self.run.header.states_at_snapshots):
            return "states no digest of its state"
        codec = CodecName.F32 if h.healed else self.run.rules.codec_down
        if h.codec_down != codec:
            return f"published in {h.codec_down}, and not in {codec}"
        if h.value_key != keys.value_key(h.fragment, h.version, h.value_digest):
            return f"names {h.value_key} as what it published, which cannot be"
        shortest, longest = self.run.rules.periods
        if h.period and not shortest <= h.period <= longest:
            return f"says a period of {h.period:g} steps; the run's are from {shortest} to {longest}"
        if h.healed is not None and not (h.healed.source < h.version and h.healed.broken_at <= h.version):
            return "heals from a version that was not there yet"
        for given in h.inputs:
            agreed = self.members.judging(h.members).terms(given.learner).factor
            if given.factor != agreed:
                return f"weighs {given.key} by a factor of {given.factor:g}; the charter says {agreed:g}"
        bases = {(given.learner, given.base) for given in h.inputs}
        if len(bases) < len(h.inputs):
            return "merges two updates of one learner on one base"
        return next((f"input {given.key} {why}" for given in h.inputs if (why := _input(h, given))), "")

    # --- what commits name --------------------------------------------------------------------------------------------

    def value(self, blob: Blob, h: CommitHeader) -> Verified[ValueHeader]:
        """Return the value that a commit published. Raises `RecordInvalid`."""
        found = self.open(blob, h.value_key, ValueHeader, digest=h.value_digest, under=h.members)
        if found.header.codec != h.codec_down:
            raise RecordInvalid(Reason.WRONG_LAYOUT, f"packed in {found.header.codec}, and not in {h.codec_down}")
        return found

    def snapshot(self, blob: Blob, key: str, fragment: int, commit: Commit | None) -> merge.State:
        """Return the state in a snapshot; `commit` made its version (None: version 0). Raises `RecordInvalid`."""
        first = self.run.header.snapshots[fragment] if commit is None else None
        found = self.open(blob, key, SnapshotHeader, digest=first)
        version = commit.version if commit else 0
        if (found.header.fragment, found.header.version) != (fragment, version):
            raise RecordInvalid(
                Reason.WRONG_LAYOUT, f"it is of fragment {found.header.fragment}, version {found.header.version}"
            )
        try:
            state = merge.restore(found.header, found.payload, self.run.layout.fragments[fragment].size)
        except ValueError as error:
            raise RecordInvalid(Reason.WRONG_LAYOUT, f"it holds {error}") from None
        if commit is not None and commit.header.state_digest == UNSTATED:
            raise RecordInvalid(Reason.DIGEST_MISMATCH, f"commit {version} does not state the digest of its state")
        if commit is not None and state.digest != commit.header.state_digest:
            raise RecordInvalid(
                Reason.DIGEST_MISMATCH,
                f"it holds state {state.digest.hex()[:16]}, commit {version} says "
                f"{commit.header.state_digest.hex()[:16]}",
            )
        return state

    def published(self, begin: Blob, key: str, fragment: int, commit: Commit | None) -> F32:
        """Return the published value [n], with which a snapshot begins. Bytes after it are not needed.

        `commit` made its version; None: version 0. The run object vouches only for the whole snapshot of version 0, but
        its other bytes are known to be zeros. Raises `RecordInvalid`.
        """
        size = 4 * self.run.layout.fragments[fragment].size
        frame.head_end(begin, Kind.SNAPSHOT)
        start = frame.payload_start(begin)
        if len(begin) < start + size:
            raise RecordInvalid(
                Reason.TRUNCATED, f"it holds {len(begin) - start} bytes of published value, its fragment has {size}"
            )
        values = np.frombuffer(memoryview(begin)[start : start + size], np.dtype("<f4")).copy()
        if commit is None:
            wanted = self.run.header.snapshots[fragment]
            found = digests.digest_of((memoryview(begin)[: start + size], bytes(size)))
        else:
            wanted, found = commit.header.published_digest, merge.array_digest(values)
        if found != wanted:
            by = f"version {commit.version} published" if commit else "the run object names for version 0"
            raise RecordInvalid(Reason.DIGEST_MISMATCH, f"it has digest {found.hex()[:16]}, {wanted.hex()[:16]} {by}")
        return values


def glance(begin: Blob, record: type[H]) -> Unverified[H]:
    """Return the unverified header of an object of which only the beginning is given. Raises `RecordInvalid`."""
    return Unverified(frame.parse_head(begin, KINDS[record], record))


def head_of(begin: Blob, key: str, record: type[H], digest: bytes) -> H:
    """Return the header of an object whose beginning has the digest that a verified object names.

    Raises `RecordInvalid`.
    """
    if digests.digest(begin) != digest:
        raise RecordInvalid(Reason.DIGEST_MISMATCH, f"{key} does not begin as was said")
    return frame.parse_head(begin, KINDS[record], record)


def _displaced(key: str, belongs: str) -> Reason:
    """Return the reason to reject an object that lies under another key than its own."""
    if learner_in(key) != learner_in(belongs):
        return Reason.WRONG_AUTHOR
    return Reason.WRONG_LAYOUT if key.split("/")[1:2] != belongs.split("/")[1:2] else Reason.MALFORMED


def _name_in(header: Record) -> str | None:
    """Return the name under which an object was written; None if its kind bears no name, or for a healing commit."""
    match header:
        case UpdateHeader() | ClaimHeader() | CheckpointHeader() | PartHeader() | ManifestHeader():
            return header.learner
        case EvaluationHeader() | PromotionHeader():
            return header.by
        case CommitHeader():
            return None if header.healed else header.writer  # an operator who heals writes under no syncer's name
    return None


def _input(h: CommitHeader, given: Input) -> str:
    """Return why a commit cannot have merged this input; empty if it can."""
    if given.key != keys.update_key(h.fragment, given.learner, given.base, given.digest):
        return "is not where that update is"
    if given.base >= h.version:
        return f"is based on version {given.base}, which was not there yet"
    if given.base < h.version - 1 - STALENESS_MAX:
        return f"is based on version {given.base}, and none is merged of so long ago"
    if given.steps < 1 or given.tokens < 1:
        return "is no work"
    if bool(given.believed) != (Clip.STEPS in given.clipped) or given.believed > given.steps:
        return f"is of {given.steps} steps, of which {given.believed} cannot be what was believed"
    asked = merge.weight(given.tokens, given.steps) * given.factor
    if given.clipped:
        return "" if given.weight <= asked else f"weighs {given.weight:g}, more than the {asked:g} that it asked for"
    if (given.weight, given.scale) != (asked, 1.0):
        return f"weighs {given.weight:g} at {given.scale:g} of its length, and nothing is said of why"
    return ""

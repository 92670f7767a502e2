"""The objects a run consists of in the store: what each one says about itself, and the key it lives under."""

from typing import Annotated, Any, Literal

import msgspec

from isthmus.format.layout import TensorClass
from isthmus.format.records.fields import (
    VERSION_MAX,
    Bytes,
    Counter,
    Digest,
    Finite,
    Index,
    Instant,
    Key,
    Name,
    PublicKey,
    Scale,
    Seconds,
    Signature,
    Steps,
    Text,
    Tokens,
    Version,
    Weight,
    Word,
)
from isthmus.format.records.tree import LeafSpec
from isthmus.format.rules import (
    BLOCK_MAX,
    BOUNDS,
    FRAGMENTS_MAX,
    STEPS_MOST,
    Bounds,
    MemberRole,
    MergeRule,
    Pace,
    Rules,
)

Schema = Literal[1]
SCHEMA: Schema = 1

INPUTS_MAX = 4096
LISTED_MAX = 64
WORDS_MAX = 64
"""Rejections and late updates listed one by one in a commit; beyond that they are counts."""


CUTS_MAX = 1 << 16
"""Pieces of one tensor."""


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A header: exactly these fields, each within its range."""


# --- run --------------------------------------------------------------------------------------------------------------


Versions = Annotated[tuple[Version, ...], msgspec.Meta(max_length=1 << 12)]
"""One per fragment."""


class TensorSpec(Record, frozen=True, kw_only=True):
    """One parameter: its place in the model and in the run."""

    name: Text
    shape: Annotated[tuple[Annotated[int, msgspec.Meta(ge=1, le=1 << 40)], ...], msgspec.Meta(max_length=16)]
    dtype: Literal["float32", "bfloat16", "float16"]
    role: TensorClass
    fragment: Index
    cuts: Annotated[
        tuple[tuple[Index, Annotated[int, msgspec.Meta(ge=1)]], ...], msgspec.Meta(max_length=CUTS_MAX)
    ] = ()
    """Where it is cut along its first dimension: fragment and rows of each piece; `fragment` is that of the first."""


class RunHeader(Record, frozen=True, kw_only=True):
    """What the run is. The payload is a msgpack list of `TensorSpec` and the digests of frozen parameters."""

    schema: Schema
    rules: Rules
    pace: Pace
    arithmetic: Annotated[int, msgspec.Meta(ge=1)]
    model: Text
    """How the model can be made again (`package.module:function`), or empty where the caller brings it."""
    seed: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    created_at: Instant
    snapshots: Annotated[tuple[Digest, ...], msgspec.Meta(min_length=1, max_length=FRAGMENTS_MAX)]
    """Digest of the version-0 snapshot object of each fragment."""
    layout: Digest
    """Of the payload: nothing else vouches for it, and the identity of the run is the digest of the whole."""
    bounds: Bounds = BOUNDS
    """How much one learner can do."""
    owner: PublicKey | None = None
    """Whose key signed this, and says who may take part; None: nothing in this run is signed."""


class RunLayout(Record, frozen=True, kw_only=True):
    """The payload of the run object."""

    tensors: Annotated[tuple[TensorSpec, ...], msgspec.Meta(min_length=1)]
    frozen: dict[str, Digest]
    """Parameters that are not trained: not merged, but the same everywhere."""


# --- who may take part ------------------------------------------------------------------------------------------------

MEMBERS_MAX = 4096
PATTERN = r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,61}[*]?\Z"


BUCKET_PATTERN = r"\A[!-~]*\Z"

VOUCHED_MAX = 256
"""Names that may stand below one pattern and go on from checkpoints of an earlier key."""


class MemberSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One entry of the membership: a name, or the beginning of names that a key may speak under, and as what."""

    name: Annotated[str, msgspec.Meta(pattern=PATTERN)]
    """With `*` at its end it stands for every name that begins so and is not a member's own."""
    role: MemberRole
    key: PublicKey
    bucket: Annotated[str, msgspec.Meta(max_length=1024, pattern=BUCKET_PATTERN)] = ""
    """URL where its updates are stored, and what is published is copied to; empty: with the run."""
    vouched: Annotated[tuple[Signature, ...], msgspec.Meta(max_length=VOUCHED_MAX)] = ()
    """Signatures of checkpoints by its earlier key that may still be gone on from: the newest at its rotation."""


class MembersHeader(Record, frozen=True, kw_only=True):
    """A version of the membership, whole. Signed by the owner's key in force before it."""

    schema: Schema
    run: Digest
    version: Annotated[int, msgspec.Meta(ge=1, le=VERSION_MAX)]
    previous: Digest
    """Digest of the version before, or of the run object for version 1."""
    owner: PublicKey
    """Whose key is in force from here on."""
    accepted: Signature | None
    """Where the owner changes: the new key's signature of `succession`."""
    members: Annotated[tuple[MemberSpec, ...], msgspec.Meta(max_length=MEMBERS_MAX)]
    until: Versions
    """By fragment: the last version that a commit may create under an earlier membership."""
    written_at: Instant


# --- what learners write ----------------------------------------------------------------------------------------------


class UpdateHeader(Record, frozen=True, kw_only=True):
    """One learner's outer gradient of one fragment: base − θ, compressed. The whole way since `base` was adopted."""

    schema: Schema
    run: Digest
    fragment: Index
    learner: Name
    incarnation: Counter
    base: Version
    codec: Text
    steps: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]
    step: Steps
    """The learner's own step count when this was taken, over all its incarnations."""
    tokens_seen: Tokens
    """The tokens of those steps."""
    train_s: Seconds
    """From adopting the base to taking this."""


class ClaimHeader(Record, frozen=True, kw_only=True):
    """Taking a learner's name: created once per incarnation. A learner stops when it sees a higher one."""

    schema: Schema
    run: Digest
    learner: Name
    incarnation: Counter
    claimed_at: Instant
    resumed: Annotated[str, msgspec.Meta(max_length=512)]
    """Key of the checkpoint this incarnation goes on from, or empty."""
    versions: Versions
    """What the log held when this incarnation began."""
    tokens_seen: Tokens
    """Where this incarnation begins."""
    tokens_lost: Tokens
    """Tokens that all incarnations before this one trained beyond the checkpoint the next one went on from."""


class Sent(Record, frozen=True, kw_only=True):
    """An update no commit had settled when the checkpoint was taken."""

    header: UpdateHeader
    key: Key
    digest: Digest
    size: Bytes


class FragmentPoint(Record, frozen=True, kw_only=True):
    """One fragment of a learner at a checkpoint. Tokens and steps count from the learner's first step on."""

    base: Version
    settled_to: Version
    """The last commit whose inputs and rejections the ledger below knows of."""
    origin_step: Steps
    origin_tokens: Tokens
    sent_step: Steps | None
    sent_tokens: Tokens
    merged: bool
    """Whether an update on `base` was merged already."""
    ledger: tuple[Tokens, Tokens, Tokens, Tokens, Tokens]
    """merged, overwritten, late, rejected, lost."""
    open_bases: Annotated[tuple[tuple[Version, Tokens], ...], msgspec.Meta(max_length=1 << 12)]
    settled_bases: Annotated[tuple[tuple[Version, Tokens], ...], msgspec.Meta(max_length=1 << 12)]
    given_up: Annotated[tuple[tuple[Version, Tokens, Tokens], ...], msgspec.Meta(max_length=1 << 12)]
    """Settled bases that were not merged: what is counted of each as late and as rejected."""
    attempts: Annotated[tuple[Sent, ...], msgspec.Meta(max_length=128)]
    residual_of: Annotated[str, msgspec.Meta(max_length=512)]
    """Key of the last merged update that the error feedback comes from, or empty."""
    taken_by: Annotated[tuple[Version, ...], msgspec.Meta(max_length=128)] = ()
    """Bases whose updates carry error feedback that is not in the account while they may be merged."""


Extent = Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, le=1 << 40)], ...], msgspec.Meta(max_length=16)]


class Piece(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A rectangle of one of a checkpoint's arrays, in the payload of a part."""

    array: Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]
    """Its number in the checkpoint's header."""
    offset: Extent
    """Where it begins in the array."""
    shape: Extent
    at: Bytes
    """Where its bytes begin in the payload, in the order of C."""
    size: Bytes
    digest: Digest


class PartHeader(Record, frozen=True, kw_only=True):
    """What a rank of a learner wrote of a checkpoint; its payload holds the pieces, each from a multiple of 64 on."""

    schema: Schema
    run: Digest
    learner: Name
    incarnation: Counter
    step: Steps
    rank: Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]
    pieces: tuple[Piece, ...]


class Part(Record, frozen=True, kw_only=True):
    """A part as a checkpoint names it."""

    key: Key
    size: Bytes
    """Of the whole object."""
    head: Bytes
    """Up to where its header goes."""
    digest: Digest
    """Of its head, up to there."""


class CheckpointHeader(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Where a learner stood after a step.

    The payload holds the `arrays`, but for those that are in `parts`, in pieces. Of each fragment, float32 [n] or [0]
    where there is none: its parameters, those at its last upload, its error feedback, the residual of each attempt,
    what updates on each of `taken_by` carry; of a fragment whose parameters have two bytes, all but the first two are
    bfloat16 (`<u2`). Then what `optimizer` and `data` refer to.
    """

    schema: Schema
    run: Digest
    learner: Name
    incarnation: Counter
    step: Steps
    tokens_seen: Tokens
    tokens_lost: Tokens
    loss: Finite | None
    taken_at: Instant
    fragments: Annotated[tuple[FragmentPoint, ...], msgspec.Meta(max_length=1 << 12)]
    arrays: tuple[LeafSpec, ...]
    optimizer: Any
    data: Any
    parts: Annotated[tuple[Part, ...], msgspec.Meta(max_length=1 << 16)] = ()
    """What the ranks of a learner wrote, where it has several."""
    in_parts: tuple[Annotated[int, msgspec.Meta(ge=0, le=1 << 32)], ...] = ()
    """Numbers of the arrays that are there."""
    local: Any = None
    """Tensors of the model that are not merged, by name."""


# --- what syncers write -----------------------------------------------------------------------------------------------


class ValueHeader(Record, frozen=True, kw_only=True):
    """What a commit published: the compressed difference of the published value to the version before."""

    schema: Schema
    run: Digest
    fragment: Index
    version: Version
    codec: Text


class SnapshotHeader(Record, frozen=True, kw_only=True):
    """The full state of a fragment: published value, master, momentum; float32 each, in this order."""

    schema: Schema
    run: Digest
    fragment: Index
    version: Version
    published_digest: Digest
    state_digest: Digest


class Input(Record, frozen=True, kw_only=True):
    """One update as it was merged."""

    key: Key
    digest: Digest
    learner: Name
    incarnation: Counter
    base: Version
    steps: Steps
    tokens: Tokens
    step: Steps
    tokens_seen: Tokens
    bytes: Bytes
    train_s: Seconds
    taken_at: Instant
    """The step boundary at which it was taken. All times are the merging syncer's; learners send ages only."""
    heard_at: Instant
    fetched_at: Instant
    """Its bytes are here and checked."""
    arrived_at: Instant
    """It is accumulated: the moment that counts."""
    weight: Weight
    """Effective weight, exactly as it was used (float64)."""
    scale: Scale = 1.0
    """By which it was clipped, exactly as it was used (float64): 1 where it was not."""
    norm: Finite = 0.0
    """Its Euclidean length before that; 0 where it was not recorded."""
    clipped: Annotated[tuple[Text, ...], msgspec.Meta(max_length=8)] = ()
    """Why its weight is not tokens² / steps, or its scale not 1: names of `isthmus.reasons.Clip`."""
    believed: Steps = 0
    """Steps that there was time for, where it claimed more; else 0."""


class Late(Record, frozen=True, kw_only=True):
    """An update that was announced but not in this round; it may still join the next one."""

    learner: Name
    base: Version
    digest: Digest
    heard_at: Instant


class Rejection(Record, frozen=True, kw_only=True):
    """An update or announcement that was turned away since the commit before."""

    learner: Name
    base: Version
    reason: Text
    digest: Digest
    """Of the last one turned away for this reason: another update on the same base may still be merged."""
    count: Counter
    at: Instant
    """The last time."""


class Outer(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The arithmetic of one class of tensors in this commit."""

    merge: MergeRule
    learning_rate: Finite
    momentum: Finite
    block: Annotated[int, msgspec.Meta(ge=0, le=BLOCK_MAX)] = 0
    """Longest side of what is one matrix to `iso`; 0: as long as it is. Only written where it is not."""
    trim: Annotated[float, msgspec.Meta(ge=0.0, lt=0.5)] = 0.0
    """Share that `trimmed` leaves out at either end; 0 with every other rule."""


class Passing(Record, frozen=True, kw_only=True):
    """A learner that was called and had nothing to give."""

    learner: Name
    at: Instant


What = Literal["in", "pass", "here", "gone"]
CHANGES_MAX = 1024
"""Comings and goings recorded of one round; a learner that flaps must not make a commit too long to write."""


SEEN_MAX = 2 * INPUTS_MAX + CHANGES_MAX


class Seen(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One thing a round was decided by. In order, and with their times, they decide it again (`readers.whatif`)."""

    at: Finite
    """Seconds since opening, on the merging syncer's clock, not rounded to any date."""
    what: What
    """`in`: the next of the commit's inputs is accumulated; `pass`; `here` or `gone`: expected from now on, or not."""
    learner: Name


class Waited(Record, frozen=True, kw_only=True):
    """Who a round waited for, and how long each phase took."""

    called_by: Text
    quorum: Counter
    quorum_missed: bool
    closed_by: Text
    expected: Annotated[tuple[Name, ...], msgspec.Meta(max_length=INPUTS_MAX)]
    missing: Annotated[tuple[Name, ...], msgspec.Meta(max_length=INPUTS_MAX)]
    passed: Annotated[tuple[Passing, ...], msgspec.Meta(max_length=INPUTS_MAX)]
    boundary_at: Instant
    """The opener's step boundary."""
    opened_at: Instant
    closed_at: Instant
    hold_until: Instant
    """Before this the round was not to close early: the syncer had just started, or the bus had just come back."""
    quorum_s: Seconds
    """From the opener's boundary to the K-th fresh update."""
    grace_s: Seconds
    """Grace granted."""
    waited_s: Seconds
    """From opening to closing."""
    fastest_step_s: Seconds
    slowest_step_s: Seconds
    sync_s: Seconds
    cap_s: Seconds
    """What grace was computed from: the expected members' step times, close to adoptable, and the most it may be."""
    merge_s: Seconds
    publish_s: Seconds
    overlap_steps: Finite
    """The effective τ of this round."""
    boundary_s: Seconds = 0.0
    """From the opener's step boundary to opening."""
    gives_up_s: Seconds = 0.0
    """From opening to when the round would have merged whatever was in."""
    hold_s: Finite = 0.0
    """From opening to `hold_until`; negative where that was before."""
    own_s: Seconds = 0.0
    """From opening to when it closed, where it was kept open for updates that the syncer had still to read; else 0."""
    seen: Annotated[tuple[Seen, ...], msgspec.Meta(max_length=SEEN_MAX)] = ()
    """What it was decided by, in order; empty in logs of releases that did not record it, or where it was too much."""


class Healed(Record, frozen=True, kw_only=True):
    """What makes a commit one that heals: it merges nothing and starts the fragment again, with no momentum.

    Its value object holds the published value itself, in float32, not a difference: nothing before it is needed. What
    cannot be folded before it stays unverifiable for good, and this says so.
    """

    source: Version
    """The version whose published value it starts from."""
    broken_at: Version
    """The first version that could not be folded any more."""
    key: Text
    """What is gone or damaged: an object, or a place."""
    why: Text


class CommitHeader(Record, frozen=True, kw_only=True):
    """One step of a fragment's log: what was merged, how, and what came out. The commit point of the system."""

    schema: Schema
    run: Digest
    previous: Digest
    """Digest of the commit before, or of the run object for version 1."""
    arithmetic: Annotated[int, msgspec.Meta(ge=1)]
    fragment: Index
    version: Annotated[int, msgspec.Meta(ge=1)]
    inputs: Annotated[tuple[Input, ...], msgspec.Meta(max_length=INPUTS_MAX)]
    """In order of accumulation; none where it heals, and only there."""
    late: Annotated[tuple[Late, ...], msgspec.Meta(max_length=LISTED_MAX)]
    dense: Outer
    embedding: Outer
    codec_down: Text
    cancelled: Counter
    """Tensors whose directions cancelled, so that the mean direction was used as it is."""
    value_key: Key
    value_digest: Digest
    published_digest: Digest
    state_digest: Digest
    rejected: Annotated[tuple[Rejection, ...], msgspec.Meta(max_length=LISTED_MAX)]
    rejected_total: Annotated[dict[Word, Counter], msgspec.Meta(max_length=WORDS_MAX)]
    """By reason, over the whole log of this fragment."""
    clipped_total: Annotated[dict[Word, Counter], msgspec.Meta(max_length=WORDS_MAX)] = {}
    """Updates that were merged for less than they said, by reason, over the whole log of this fragment."""
    waited: Waited
    writer: Name
    attempt: Text
    written_at: Instant
    members: Counter = 0
    """Version of the membership it was made under; 0: that of the run object, its owner alone."""
    period: Annotated[float, msgspec.Meta(ge=0.0, le=STEPS_MOST)] = 0.0
    """Steps between two uploads of this fragment from here on; 0: as many as the rules say."""
    usual_length: Annotated[float, msgspec.Meta(ge=0.0, le=1.7e308)] = 0.0
    """What an update's length is compared with from here on, norm per root of a step; 0 while nothing is known."""
    healed: Healed | None = None
    """Set where this commit merges nothing and starts the fragment again."""


# --- what the collector writes ----------------------------------------------------------------------------------------

SEGMENT_COMMITS_MAX = 1024


class SegmentHeader(Record, frozen=True, kw_only=True):
    """Old commits of one fragment, packed: the payload is their bytes, one after the other, as they were."""

    schema: Schema
    run: Digest
    fragment: Index
    first: Annotated[int, msgspec.Meta(ge=1)]
    sizes: Annotated[tuple[Bytes, ...], msgspec.Meta(min_length=1, max_length=SEGMENT_COMMITS_MAX)]
    """Bytes of each commit, in order of versions."""


class PackedHeader(Record, frozen=True, kw_only=True):
    """What stands under the key of a packed commit: where its bytes are now. The key itself is never free again."""

    schema: Schema
    run: Digest
    fragment: Index
    version: Annotated[int, msgspec.Meta(ge=1)]
    segment: Key
    offset: Bytes
    size: Bytes
    digest: Digest


# --- what those write who follow --------------------------------------------------------------------------------------


class EvaluationHeader(Record, frozen=True, kw_only=True):
    """What somebody measured of a cut of the global model, as one number. Nothing rests on it."""

    schema: Schema
    run: Digest
    series: Name
    cut: Counter
    """The version of every fragment; of a mixture, their sum."""
    value: Finite
    written_at: Instant

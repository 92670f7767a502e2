"""The headers of the objects that a run consists of in the store."""

from typing import Annotated, Any, Literal, TypedDict

import msgspec

from isthmus.format.layout import TensorClass
from isthmus.format.records.charter import (
    FACTOR_LEAST,
    FACTOR_MOST,
    OWNERS_MAX,
    PATTERN,
    SOURCES_MAX,
    Approval,
    Charter,
)
from isthmus.format.records.fields import (
    VERSION_MAX,
    Bytes,
    Counter,
    Digest,
    Finite,
    Index,
    Instant,
    Key,
    Loss,
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
"""Most rejections, and most late updates, that a commit lists one by one. All rejections are counted by reason."""
WORDS_MAX = 64
"""Most reasons in the counts of a commit."""


CUTS_MAX = 1 << 16
"""Most pieces of one tensor."""


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A header. It has exactly the fields of its class, each within its range."""


# --- run --------------------------------------------------------------------------------------------------------------


Versions = Annotated[tuple[Version, ...], msgspec.Meta(max_length=1 << 12)]
"""One per fragment."""


class TensorSpec(Record, frozen=True, kw_only=True):
    """One parameter, and its place in the model and in the run."""

    name: Text
    shape: Annotated[tuple[Annotated[int, msgspec.Meta(ge=1, le=1 << 40)], ...], msgspec.Meta(max_length=16)]
    dtype: Literal["float32", "bfloat16", "float16"]
    role: TensorClass
    fragment: Index
    cuts: Annotated[
        tuple[tuple[Index, Annotated[int, msgspec.Meta(ge=1)]], ...], msgspec.Meta(max_length=CUTS_MAX)
    ] = ()
    """If the parameter is cut along its first dimension: the fragment and the number of rows of each piece. `fragment`
    is that of the first piece."""


class RunHeader(Record, frozen=True, kw_only=True):
    """The definition of a run. The payload is a `RunLayout` as msgpack."""

    schema: Schema
    rules: Rules
    pace: Pace
    arithmetic: Annotated[int, msgspec.Meta(ge=1)]
    model: Text
    """The function that makes the model (`package.module:function`), or empty if the caller brings the model."""
    seed: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    created_at: Instant
    snapshots: Annotated[tuple[Digest, ...], msgspec.Meta(min_length=1, max_length=FRAGMENTS_MAX)]
    """Digest of the version-0 snapshot object of each fragment."""
    layout: Digest
    """Digest of the payload, which no other object verifies. The run's identity is the digest of the whole object."""
    bounds: Bounds = BOUNDS
    """Limits of one learner's influence."""
    owner: PublicKey | None = None
    """Key of the owner, who signed this object and decides the membership; None: nothing in this run is signed."""
    states_at_snapshots: bool = False
    """Whether commits state the digest of a fragment's whole state only where a snapshot may follow. False in runs of
    earlier releases: there every commit states it."""


class RunLayout(Record, frozen=True, kw_only=True):
    """The payload of the run object."""

    tensors: Annotated[tuple[TensorSpec, ...], msgspec.Meta(min_length=1)]
    frozen: dict[str, Digest]
    """Digests of the parameters that are not trained. They are not merged, but are the same at every learner."""


# --- membership -------------------------------------------------------------------------------------------------------

MEMBERS_MAX = 4096
BUCKET_PATTERN = r"\A[!-~]*\Z"

VOUCHED_MAX = 256
"""Most signatures in `vouched`. A pattern may cover many names, each with checkpoints by an earlier key."""


class MemberSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One entry of the membership: a name, or a pattern of names, under which a key may write, and its role."""

    name: Annotated[str, msgspec.Meta(pattern=PATTERN)]
    """A name that ends with `*` stands for every name that begins so and has no entry of its own."""
    role: MemberRole
    key: PublicKey
    bucket: Annotated[str, msgspec.Meta(max_length=1024, pattern=BUCKET_PATTERN)] = ""
    """URL of the store that has the member's updates, and copies of published objects; empty: the run's store."""
    vouched: Annotated[tuple[Signature, ...], msgspec.Meta(max_length=VOUCHED_MAX)] = ()
    """Signatures, by the member's earlier key, of checkpoints from which it may still resume: the newest when its key
    was rotated."""


class MembersHeader(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A complete version of the membership.

    Without a charter, the owner's key in force before it signs it. With one, any owner does, and it holds the approvals
    of as many owners as the charter before it asks for.
    """

    schema: Schema
    run: Digest
    version: Annotated[int, msgspec.Meta(ge=1, le=VERSION_MAX)]
    previous: Digest
    """Digest of the version before, or of the run object for version 1."""
    owner: PublicKey
    """The owner's key in force from this version on."""
    accepted: Signature | None
    """If the owner's key changes: the new key's signature of `succession`."""
    members: Annotated[tuple[MemberSpec, ...], msgspec.Meta(max_length=MEMBERS_MAX)]
    until: Versions
    """For each fragment, the last version that a commit may create under an earlier membership."""
    written_at: Instant
    """When it was written; with a charter, when it was proposed."""
    charter: Charter | None = None
    """None: the owner alone decides."""
    approvals: Annotated[tuple[Approval, ...], msgspec.Meta(max_length=2 * OWNERS_MAX + 1)] = ()
    """Approvals of owners, those of before and of after this version: of the whole header, but for this field and
    `decided_at`."""
    decided_at: Instant | msgspec.UnsetType = msgspec.UNSET
    """With a charter: when the last approval was given, by the clock of that owner, who signs the object."""


# --- objects of learners ----------------------------------------------------------------------------------------------


class Work(TypedDict):
    """The work that an update holds. Every record of an update has these fields; `UpdateHeader` describes them."""

    base: int
    steps: int
    tokens: int
    step: int
    tokens_seen: int


def work_of(given: Any) -> Work:
    """Return the work that a record of an update states, to spread it into another record of the update."""
    return Work(base=given.base, steps=given.steps, tokens=given.tokens, step=given.step, tokens_seen=given.tokens_seen)


class UpdateHeader(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One learner's compressed outer gradient of one fragment, base − θ, of all steps since `base` was adopted."""

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
    """The learner's step count when the update was captured, over all its incarnations."""
    tokens_seen: Tokens
    """The tokens of those steps."""
    train_s: Seconds
    """Time from adopting the base to capturing the update."""
    loss: Loss | None = None
    """Mean training loss over those of its steps whose loss the loop gave, was at most `LOSS_MAX` in size and is still
    known: a learner keeps the newest 8,192 of its present incarnation. None if there are none."""
    manifest: Digest | None = None
    """Digest of the learner's manifest, the statement of what it trains and on what; None: it has stated nothing."""


class ClaimHeader(Record, frozen=True, kw_only=True):
    """The claim of a learner's name, created once per incarnation. A learner that sees a later one stops."""

    schema: Schema
    run: Digest
    learner: Name
    incarnation: Counter
    claimed_at: Instant
    resumed: Annotated[str, msgspec.Meta(max_length=512)]
    """Key of the checkpoint from which this incarnation resumed, or empty."""
    versions: Versions
    """The newest version of each fragment in the log when this incarnation began."""
    tokens_seen: Tokens
    """The learner's `tokens_seen` when this incarnation began."""
    tokens_lost: Tokens
    """Tokens that all earlier incarnations trained beyond the checkpoint from which the next one resumed."""


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One source of a learner's training data: a name, and the digest of its description. The data are not in it."""

    name: Name
    description: Digest


class ManifestHeader(Record, frozen=True, kw_only=True, omit_defaults=True):
    """What a learner states about its training: in words of its own, and by digests of what it does not show."""

    schema: Schema
    run: Digest
    learner: Name
    code: Text
    """The version of the training code, such as a commit."""
    model: Digest
    """Digest of the names, shapes, dtypes and roles of the model's tensors."""
    configuration: Digest
    """Digest of the file with the training's settings; zeros if there is none."""
    sources: Annotated[tuple[Source, ...], msgspec.Meta(max_length=SOURCES_MAX)]
    hardware: Text
    more: Annotated[dict[Word, Text], msgspec.Meta(max_length=WORDS_MAX)] = {}
    """Further statements, such as a licence or a contact."""
    written_at: Instant


class Sent(Record, frozen=True, kw_only=True):
    """An update that no commit had settled when the checkpoint was taken."""

    header: UpdateHeader
    key: Key
    digest: Digest
    size: Bytes


class FragmentPoint(Record, frozen=True, kw_only=True):
    """One fragment of a learner at a checkpoint. Tokens and steps count from the learner's first step on."""

    base: Version
    settled_to: Version
    """The last commit whose inputs and rejections are counted in `ledger`."""
    origin_step: Steps
    origin_tokens: Tokens
    sent_step: Steps | None
    sent_tokens: Tokens
    merged: bool
    """Whether an update on `base` has been merged."""
    ledger: tuple[Tokens, Tokens, Tokens, Tokens, Tokens]
    """Tokens merged, overwritten, late, rejected, lost."""
    open_bases: Annotated[tuple[tuple[Version, Tokens], ...], msgspec.Meta(max_length=1 << 12)]
    settled_bases: Annotated[tuple[tuple[Version, Tokens], ...], msgspec.Meta(max_length=1 << 12)]
    given_up: Annotated[tuple[tuple[Version, Tokens, Tokens], ...], msgspec.Meta(max_length=1 << 12)]
    """The settled bases without a merge, each with the tokens counted as late and those counted as rejected."""
    attempts: Annotated[tuple[Sent, ...], msgspec.Meta(max_length=128)]
    residual_of: Annotated[str, msgspec.Meta(max_length=512)]
    """Key of the last merged update, from which the error feedback comes, or empty."""
    taken_by: Annotated[tuple[Version, ...], msgspec.Meta(max_length=128)] = ()
    """Bases whose updates carry error feedback. The fragment's own error feedback lacks it while they may be merged."""


Extent = Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, le=1 << 40)], ...], msgspec.Meta(max_length=16)]


class Piece(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A rectangle of one of a checkpoint's arrays, in the payload of a part."""

    array: Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]
    """Number of the array in the checkpoint's header."""
    offset: Extent
    """Where the rectangle begins in the array."""
    shape: Extent
    at: Bytes
    """The byte of the payload at which the rectangle begins. Its bytes are in C order."""
    size: Bytes
    digest: Digest


class PartHeader(Record, frozen=True, kw_only=True):
    """The part of a checkpoint that one rank wrote. Its payload holds the pieces, each at a multiple of 64 bytes."""

    schema: Schema
    run: Digest
    learner: Name
    incarnation: Counter
    step: Steps
    rank: Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)]
    pieces: tuple[Piece, ...]


class Part(Record, frozen=True, kw_only=True):
    """A checkpoint's reference to a part."""

    key: Key
    size: Bytes
    """Bytes of the whole object."""
    head: Bytes
    """Bytes of the object before its payload."""
    digest: Digest
    """Digest of the bytes before the payload."""


class CheckpointHeader(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The state of a learner after a step.

    The payload holds the `arrays`, except for those whose pieces are in `parts`. For each fragment there are these
    arrays, float32 [n], or [0] if there is no value: the parameters; the parameters at the last upload; the error
    feedback; the residual of each attempt; the error feedback that updates on each base of `taken_by` carry. If the
    fragment's parameters have two bytes, all but the first two arrays are bfloat16 (`<u2`). Then follow the arrays to
    which `optimizer`, `local` and `data` refer.
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
    """The parts that the ranks of the learner wrote."""
    in_parts: tuple[Annotated[int, msgspec.Meta(ge=0, le=1 << 32)], ...] = ()
    """Numbers of the arrays that are in `parts`."""
    local: Any = None
    """Tensors of the model that are not merged, by name."""
    first_loss: Finite | None = None
    """The median of the learner's first three losses, if they are known. A restart compares later ones with it."""


# --- objects of syncers -----------------------------------------------------------------------------------------------


class ValueHeader(Record, frozen=True, kw_only=True):
    """The value that a commit published: the compressed difference to the published value of the version before."""

    schema: Schema
    run: Digest
    fragment: Index
    version: Version
    codec: Text


class SnapshotHeader(Record, frozen=True, kw_only=True):
    """The full state of a fragment: published value, master and momentum, float32 each, in this order."""

    schema: Schema
    run: Digest
    fragment: Index
    version: Version
    published_digest: Digest
    state_digest: Digest


class Input(Record, frozen=True, kw_only=True, omit_defaults=True):
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
    """When the learner captured the update, at a step boundary. All times are on the merging syncer's clock, because
    learners send ages only."""
    heard_at: Instant
    fetched_at: Instant
    """When the update's bytes were fetched and checked."""
    arrived_at: Instant
    """When the update was accumulated. This is the time that counts."""
    weight: Weight
    """Effective weight, exactly as it was used (float64)."""
    scale: Scale = 1.0
    """The factor by which the update was clipped, exactly as it was used (float64); 1 if it was not clipped."""
    norm: Finite = 0.0
    """Euclidean norm of the update before clipping; 0 if it was not recorded."""
    clipped: Annotated[tuple[Text, ...], msgspec.Meta(max_length=8)] = ()
    """Why the weight is not tokens² / steps, or the scale is not 1: names of `isthmus.reasons.Clip`."""
    believed: Steps = 0
    """Steps for which there was time, if the update claimed more; else 0."""
    loss: Loss | None = None
    """The loss in the update's header. Its learner states it, and nobody can check whether it is true."""
    factor: Annotated[float, msgspec.Meta(ge=FACTOR_LEAST, le=FACTOR_MOST)] = 1.0
    """The factor of its learner in the charter, by which the weight was multiplied."""
    manifest: Digest | None = None
    """Digest of the manifest that the update names."""


class Late(Record, frozen=True, kw_only=True):
    """An update that was announced but is not in this round. It may still join the next one."""

    learner: Name
    base: Version
    digest: Digest
    heard_at: Instant


class Rejection(Record, frozen=True, kw_only=True):
    """An update or announcement that was rejected since the commit before."""

    learner: Name
    base: Version
    reason: Text
    digest: Digest
    """Digest of the last update rejected for this reason. Another update on the same base may still be merged."""
    count: Counter
    at: Instant
    """When the last one was rejected."""


class Outer(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The arithmetic of one class of tensors in this commit."""

    merge: MergeRule
    learning_rate: Finite
    momentum: Finite
    block: Annotated[int, msgspec.Meta(ge=0, le=BLOCK_MAX)] = 0
    """Longest side of a block that `iso` treats as one matrix; 0: matrices are not cut. Left out of the header if 0."""
    trim: Annotated[float, msgspec.Meta(ge=0.0, lt=0.5)] = 0.0
    """Share that `trimmed` leaves out at either end; 0 with any other rule."""


class Passing(Record, frozen=True, kw_only=True):
    """A learner that was called and had no update."""

    learner: Name
    at: Instant


What = Literal["in", "pass", "here", "gone"]
CHANGES_MAX = 1024
"""Most changes of the expected learners that are recorded for one round.

Without a limit, a learner that comes and goes could make a commit too large to write.
"""


SEEN_MAX = 2 * INPUTS_MAX + CHANGES_MAX


class Seen(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """An event that helped to decide a round. `isthmus.inspect.whatif` decides the round again from these events."""

    at: Finite
    """Seconds since opening, on the merging syncer's clock, not rounded as dates are."""
    what: What
    """`in`: the next of the commit's inputs was accumulated; `pass`: the learner had no update; `here` and `gone`: the
    learner was expected, or not, from then on."""
    learner: Name


class Waited(Record, frozen=True, kw_only=True):
    """The learners that a round waited for, and how long each phase took."""

    called_by: Text
    quorum: Counter
    quorum_missed: bool
    closed_by: Text
    expected: Annotated[tuple[Name, ...], msgspec.Meta(max_length=INPUTS_MAX)]
    missing: Annotated[tuple[Name, ...], msgspec.Meta(max_length=INPUTS_MAX)]
    passed: Annotated[tuple[Passing, ...], msgspec.Meta(max_length=INPUTS_MAX)]
    boundary_at: Instant
    """Step boundary of the learner that opened the round."""
    opened_at: Instant
    closed_at: Instant
    hold_until: Instant
    """The round was not to close early before this: the syncer had just started, or the bus had just come back."""
    quorum_s: Seconds
    """From the opener's step boundary to the K-th fresh update."""
    grace_s: Seconds
    """The grace that was granted."""
    waited_s: Seconds
    """From opening to closing."""
    fastest_step_s: Seconds
    """Step time of the fastest expected learner, from which grace was computed."""
    slowest_step_s: Seconds
    """Step time of the slowest expected learner."""
    sync_s: Seconds
    """Time from closing a round until its version can be adopted, from which grace was computed."""
    cap_s: Seconds
    """The most that grace may be."""
    merge_s: Seconds
    publish_s: Seconds
    overlap_steps: Finite
    """The effective τ of this round."""
    boundary_s: Seconds = 0.0
    """From the opener's step boundary to opening."""
    gives_up_s: Seconds = 0.0
    """From opening to when the round would have merged whatever had arrived."""
    hold_s: Finite = 0.0
    """From opening to `hold_until`; negative if that was earlier."""
    own_s: Seconds = 0.0
    """From opening to closing, if the round was kept open for updates that the syncer had yet to read; else 0."""
    seen: Annotated[tuple[Seen, ...], msgspec.Meta(max_length=SEEN_MAX)] = ()
    """The events that decided the round, in order. Empty if there were too many, or if the release did not record them.
    """


class Healed(Record, frozen=True, kw_only=True):
    """Marks a commit that heals a log: it merges nothing and starts the fragment again, without momentum.

    Its value object holds the published value itself, in float32, instead of a difference, so no earlier object is
    needed. Earlier versions that cannot be folded stay unverifiable for good, as this record says.
    """

    source: Version
    """The version with whose published value the fragment starts again."""
    broken_at: Version
    """The first version that could not be folded any more."""
    key: Text
    """The missing or damaged object, or its prefix."""
    why: Text


UNSTATED = bytes(32)
"""In place of a state's digest: the commit does not state it."""


class CommitHeader(Record, frozen=True, kw_only=True):
    """One step of a fragment's log: the updates that were merged, the arithmetic and the result.

    The creation of this object is the only commit point of the system.
    """

    schema: Schema
    run: Digest
    previous: Digest
    """Digest of the commit before, or of the run object for version 1."""
    arithmetic: Annotated[int, msgspec.Meta(ge=1)]
    fragment: Index
    version: Annotated[int, msgspec.Meta(ge=1)]
    inputs: Annotated[tuple[Input, ...], msgspec.Meta(max_length=INPUTS_MAX)]
    """In order of accumulation. A commit that heals has none; any other commit has some."""
    late: Annotated[tuple[Late, ...], msgspec.Meta(max_length=LISTED_MAX)]
    dense: Outer
    embedding: Outer
    codec_down: Text
    cancelled: Counter
    """Tensors whose directions cancelled, so that their mean was not normalised."""
    value_key: Key
    value_digest: Digest
    published_digest: Digest
    state_digest: Digest
    """Digest of published value, master and momentum; `UNSTATED` where no snapshot follows."""
    rejected: Annotated[tuple[Rejection, ...], msgspec.Meta(max_length=LISTED_MAX)]
    rejected_total: Annotated[dict[Word, Counter], msgspec.Meta(max_length=WORDS_MAX)]
    """Rejections by reason, over the whole log of this fragment."""
    clipped_total: Annotated[dict[Word, Counter], msgspec.Meta(max_length=WORDS_MAX)] = {}
    """Updates that were clipped, by reason, over the whole log of this fragment."""
    waited: Waited
    writer: Name
    attempt: Text
    written_at: Instant
    members: Counter = 0
    """Version of the membership under which the commit was made; 0: that of the run object, the owner alone."""
    period: Annotated[float, msgspec.Meta(ge=0.0, le=STEPS_MOST)] = 0.0
    """Steps between two uploads of this fragment after this commit; 0: `sync_every` of the rules."""
    usual_length: Annotated[float, msgspec.Meta(ge=0.0, le=1.7e308)] = 0.0
    """The norm / √steps with which the norms of later updates are compared; 0 while it is not known."""
    healed: Healed | None = None
    """Set if this commit merges nothing and starts the fragment again."""


# --- objects of the collector -----------------------------------------------------------------------------------------

SEGMENT_COMMITS_MAX = 1024


class SegmentHeader(Record, frozen=True, kw_only=True):
    """Old commits of one fragment, packed: the payload is the concatenation of their unchanged bytes."""

    schema: Schema
    run: Digest
    fragment: Index
    first: Annotated[int, msgspec.Meta(ge=1)]
    sizes: Annotated[tuple[Bytes, ...], msgspec.Meta(min_length=1, max_length=SEGMENT_COMMITS_MAX)]
    """Size in bytes of each commit, in order of versions."""


class PackedHeader(Record, frozen=True, kw_only=True):
    """A pointer under the key of a packed commit to the place of its bytes. So the key can never be created again."""

    schema: Schema
    run: Digest
    fragment: Index
    version: Annotated[int, msgspec.Meta(ge=1)]
    segment: Key
    offset: Bytes
    size: Bytes
    digest: Digest


# --- objects of followers ---------------------------------------------------------------------------------------------


class EvaluationHeader(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One measured number of a cut of the global model. Nothing in the run depends on it."""

    schema: Schema
    run: Digest
    series: Name
    cut: Counter
    """The version of every fragment; if the versions differ, their sum."""
    value: Finite
    written_at: Instant
    by: Name | None = None
    """The member that measured it, under whose key it is signed; None: some member."""
    published: Digest | None = None
    """Digest of the cut, so that the number is of these bytes and no others."""


class Evidence(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A measurement that a promotion rests on."""

    key: Key
    digest: Digest


class PromotionHeader(Record, frozen=True, kw_only=True):
    """The promotion of a cut of the global model. Promotions form a chain; everything in one can be checked again."""

    schema: Schema
    run: Digest
    number: Annotated[int, msgspec.Meta(ge=1, le=VERSION_MAX)]
    previous: Digest
    """Digest of the promotion before, or of the run object for number 1."""
    members: Counter
    """Version of the membership whose charter has the rule."""
    versions: Versions
    """The version of each fragment in the cut."""
    published: Digest
    """Digest of the cut: of the published digests of all fragments, in order."""
    evidence: Annotated[tuple[Evidence, ...], msgspec.Meta(min_length=1, max_length=OWNERS_MAX)]
    by: Name
    """The member that promotes."""
    written_at: Instant

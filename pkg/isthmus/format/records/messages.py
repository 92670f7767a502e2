"""The messages on the bus: pointers and signs of life, never tensors. Any message can be lost, and is then repeated."""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from isthmus.format.records.fields import (
    Bytes,
    Counter,
    Digest,
    Finite,
    Index,
    Key,
    Loss,
    Name,
    Seconds,
    Steps,
    Text,
    Tokens,
    Version,
    Waiting,
    Word,
    is_name,
)
from isthmus.format.records.frame import HEADER_MAX, Blob, Kind, draft, parse, seal
from isthmus.format.signing import Signer

SYNCER_STREAM = "syncer"
DROPPED_LISTED = 16
REFUSED_LISTED = 64
_LEARNER_STREAM = "learner/"


def learner_stream(learner: str) -> str:
    """Return the stream that only this learner writes."""
    return _LEARNER_STREAM + learner


def learner_of(stream: str) -> str | None:
    """Return the learner whose stream this is, or None: the bus may have streams of any name."""
    name = stream.removeprefix(_LEARNER_STREAM)
    return name if name != stream and is_name(name) else None


def is_stream(stream: str) -> bool:
    """Return whether a member of a run may write this stream."""
    return stream == SYNCER_STREAM or learner_of(stream) is not None


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type"):
    """The fields that all messages have: their run, and an id of their own."""

    run: Digest
    id: Text


# --- from a learner ---------------------------------------------------------------------------------------------------


class Announce(Message, frozen=True, kw_only=True, tag="announce"):
    """An update is in the store."""

    learner: Name
    incarnation: Counter
    fragment: Index
    base: Version
    key: Key
    digest: Digest
    size: Bytes
    steps: Steps
    tokens: Tokens
    step: Steps
    tokens_seen: Tokens
    due: bool
    """Whether the learner's own schedule asked for this update. Only such an update opens a round."""
    age_s: Seconds
    """Time since the step boundary at which the update was captured. Messages carry ages, never clock readings."""
    step_s: Seconds
    """Duration of the learner's step: the median of the last 12."""
    upload_s: Seconds
    """From the step boundary to this announcement, a moving average."""
    sync_s: Seconds
    """From the start of fetching to a value that can be adopted: the lower median of the last five."""
    seen: Version = 0
    """The newest commit of the fragment that the learner has read."""
    seen_digest: Digest = bytes(32)
    """The digest of that commit. It reveals a store that shows two histories."""


class Pass(Message, frozen=True, kw_only=True, tag="pass"):
    """A learner that was called for a round has no update: the round need not wait for it."""

    learner: Name
    fragment: Index
    version: Version


class Tally(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A learner's ledger in tokens, weighted by the fragments' shares of parameters. The other fields add up to
    `processed`."""

    processed: Finite
    merged: Finite
    overwritten: Finite
    late: Finite
    pending: Finite
    rejected: Finite
    lost: Finite


PARTS = ("merged", "overwritten", "late", "pending", "rejected", "lost")
"""The fields of a `Tally` that say what became of the processed tokens."""


class Heartbeat(Message, frozen=True, kw_only=True, tag="heartbeat"):
    """A learner is alive; its state."""

    learner: Name
    incarnation: Counter
    step: Steps
    steps_target: Steps
    """Steps that the learner is to train, or 0 if that is not known."""
    tokens_seen: Tokens
    loss: Finite | None
    step_s: Seconds
    upload_s: Seconds
    sync_s: Seconds
    versions: Annotated[tuple[Version, ...], msgspec.Meta(max_length=1 << 12)]
    """The base of each fragment."""
    bytes_up: Bytes
    bytes_down: Bytes
    tokens_lost: Tokens
    """Tokens that earlier incarnations trained beyond the checkpoint from which the next incarnation resumed."""
    ledger: Tally
    waiting_for: Waiting
    """The ports that the learner cannot reach now, or empty."""
    checkpoint_bytes: Bytes = 0
    """The bytes of checkpoints among `bytes_up`."""
    members: Counter = 0
    """The newest version of the membership that the learner knows."""
    risen: tuple[Loss, Loss] | None = None
    """The loss before it rose and that of the newest steps, if it has risen and not come down again."""


class Progress(Message, frozen=True, kw_only=True, tag="progress"):
    """A learner's progress, sent between heartbeats, so that the work lost by a kill is known."""

    learner: Name
    incarnation: Counter
    step: Steps
    tokens_seen: Tokens


class Leave(Message, frozen=True, kw_only=True, tag="leave"):
    """A learner stops on purpose: rounds need not wait for it."""

    learner: Name
    incarnation: Counter
    step: Steps
    done: bool
    """Whether the learner has done all its steps."""
    kept_to: Steps | None = None
    """The step of the learner's newest checkpoint; None: the author did not say."""
    diverged: bool = False
    """Whether the learner's last loss was a NaN or an infinity."""


# --- from a syncer ----------------------------------------------------------------------------------------------------


class Call(Message, frozen=True, kw_only=True, tag="call"):
    """A round that will create `version` of a fragment is open: learners are asked for an update."""

    syncer: Name
    fragment: Index
    version: Version
    afresh: bool = False
    """Whether learners that have sent an update already must send a new one, because their updates waited for long."""


class Committed(Message, frozen=True, kw_only=True, tag="committed"):
    """A commit is in the log."""

    syncer: Name
    fragment: Index
    version: Version
    digest: Digest = bytes(32)
    """Digest of the commit; zeros if the author did not set it."""


class Refusal(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An update that a syncer has rejected for good, while no commit lists that yet."""

    learner: Name
    fragment: Index
    base: Version
    digest: Digest
    reason: Word


class Alive(Message, frozen=True, kw_only=True, tag="alive"):
    """A syncer is alive; its state."""

    syncer: Name
    commits: Counter
    """Commits that the syncer created since it started."""
    heads: Annotated[tuple[Version, ...], msgspec.Meta(max_length=1 << 12)]
    """The newest version of each fragment that this syncer has read."""
    rejected: dict[Text, Counter]
    """Messages that the syncer rejected since it started and that belong to no fragment's log, by reason."""
    waiting_for: Waiting
    lag_ms: Finite
    """Longest delay of the syncer's event loop since its previous message of this type."""
    held: Counter
    """Number of fragments whose rounds the syncer opens."""
    fold_s: Seconds
    """The time that folding a fragment took when the syncer last took one over: the longest of its fragments."""
    broken: Annotated[tuple[Index, ...], msgspec.Meta(max_length=1 << 12)]
    """Fragments whose log the syncer cannot fold to the end, for any reason. Other syncers are to hold them."""
    stopping: bool
    """Whether this is the syncer's last message: the other syncers take over now."""
    able: bool = True
    """Whether the syncer reaches the store, hears others and is heard. Other syncers take over from one that is not."""
    members: Counter = 0
    """The newest version of the membership that the syncer knows."""
    dropped: Annotated[dict[Name, Counter], msgspec.Meta(max_length=DROPPED_LISTED)] = {}
    """Messages dropped lately because too many of one author waited; by author, the worst only."""
    slow: Annotated[tuple[Index, ...], msgspec.Meta(max_length=1 << 12)] = ()
    """The fragments of `broken` whose log is only slow to read: nothing is known to be damaged."""
    refused: Annotated[tuple[Index, ...], msgspec.Meta(max_length=1 << 12)] = ()
    """The fragments of `broken` for which the store denied a read."""
    holed: Annotated[tuple[Index, ...], msgspec.Meta(max_length=1 << 12)] = ()
    """Fragments that the syncer can hold although a commit that other processes would need is missing in their log."""
    quorum: Counter = 0
    """Learners with a fresh update that the syncer's rounds need before grace starts; 0: the author did not say."""
    twin: bool = False
    """Whether another syncer of this name was heard lately: each takes the other's messages for its own."""
    turned_away: Annotated[dict[Name, Word], msgspec.Meta(max_length=DROPPED_LISTED)] = {}
    """Learners whose newest update was rejected for its manifest, and the reason. If nothing is merged, no commit can
    list these rejections."""
    unlisted: Annotated[tuple[Refusal, ...], msgspec.Meta(max_length=REFUSED_LISTED)] = ()
    """Updates rejected for good in rounds that are open: a round that has nothing to merge ends in no commit. Another
    syncer may judge them anew, so this settles nothing."""


FromLearner = Announce | Pass | Heartbeat | Progress | Leave
FromSyncer = Call | Committed | Alive
AnyMessage = FromLearner | FromSyncer


BATCH_MAX = 16
"""Most messages under one signature."""

BATCH_BYTES = HEADER_MAX[Kind.MESSAGE] - 1024


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    messages: Annotated[tuple[AnyMessage, ...], msgspec.Meta(min_length=1, max_length=BATCH_MAX)]


def encode(*messages: AnyMessage, signer: Signer | None = None) -> bytes:
    """Return the bytes of messages of one author, signed if there is a signer.

    Raises `ValueError` if the messages are too large for one record (see `batches`).
    """
    blob = draft(Kind.MESSAGE, _Envelope(messages)).blob
    seal(blob, signer)
    return bytes(blob)


def batches(messages: Sequence[AnyMessage], signer: Signer | None) -> list[bytes]:
    """Return messages of one author as bytes, in order: as many as fit under one signature, or each by itself if
    unsigned."""
    if signer is None:
        return [encode(message) for message in messages]
    found: list[list[AnyMessage]] = []
    room = 0
    for message in messages:
        size = len(msgspec.msgpack.encode(message))
        if size > room or len(found[-1]) == BATCH_MAX:
            found.append([])
            room = BATCH_BYTES
        found[-1].append(message)
        room -= size
    return [encode(*batch, signer=signer) for batch in found]


def decode(blob: Blob) -> tuple[AnyMessage, ...]:
    """Return the messages in these bytes. Raises `RecordInvalid`.

    `Members.require_author` checks the author.
    """
    return parse(blob, Kind.MESSAGE, _Envelope)[0].messages

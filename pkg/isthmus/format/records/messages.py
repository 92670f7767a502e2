"""What crosses the bus: pointers and signs of life, never tensors. All of it can be lost and is then said again."""

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
    Name,
    Seconds,
    Steps,
    Text,
    Tokens,
    Version,
    is_name,
)
from isthmus.format.records.frame import HEADER_MAX, Blob, Kind, draft, parse, seal
from isthmus.format.signing import Signer

SYNCER_STREAM = "syncer"
DROPPED_LISTED = 16
_LEARNER_STREAM = "learner/"


def learner_stream(learner: str) -> str:
    """Return the stream only this learner writes."""
    return _LEARNER_STREAM + learner


def learner_of(stream: str) -> str | None:
    """Return the learner whose stream this is, or None: a stream may bear any name that somebody likes to write."""
    name = stream.removeprefix(_LEARNER_STREAM)
    return name if name != stream and is_name(name) else None


def is_stream(stream: str) -> bool:
    """Return whether somebody of a run may speak on it."""
    return stream == SYNCER_STREAM or learner_of(stream) is not None


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="type"):
    """Common to all messages: the run they belong to and an id of their own."""

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
    """Whether the learner's own schedule asked for this update: only such an update opens a round."""
    age_s: Seconds
    """Time since the step boundary at which it was taken. Ages travel, clock readings never do."""
    step_s: Seconds
    """The learner's step duration, a moving average."""
    upload_s: Seconds
    """From the step boundary to this announcement, a moving average."""
    sync_s: Seconds
    """From hearing of a commit to having its value ready to adopt, a moving average."""
    seen: Version = 0
    """The newest commit of the fragment that its author has read …"""
    seen_digest: Digest = bytes(32)
    """… and that commit's digest: a store that shows two histories is found out."""


class Pass(Message, frozen=True, kw_only=True, tag="pass"):
    """Called for a round, nothing to give: do not wait for me."""

    learner: Name
    fragment: Index
    version: Version


class Tally(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A learner's ledger in tokens, weighted by the fragments' shares of parameters: all but the first add up to it."""

    processed: Finite
    merged: Finite
    overwritten: Finite
    late: Finite
    pending: Finite
    rejected: Finite
    lost: Finite


PARTS = ("merged", "overwritten", "late", "pending", "rejected", "lost")
"""Of a `Tally`: what has become of the tokens that were processed."""


class Heartbeat(Message, frozen=True, kw_only=True, tag="heartbeat"):
    """A learner is there, and how it does."""

    learner: Name
    incarnation: Counter
    step: Steps
    steps_target: Steps
    """0 where it is not known."""
    tokens_seen: Tokens
    loss: Finite | None
    step_s: Seconds
    upload_s: Seconds
    sync_s: Seconds
    versions: Annotated[tuple[Version, ...], msgspec.Meta(max_length=1 << 12)]
    """Base of each fragment, by fragment."""
    bytes_up: Bytes
    bytes_down: Bytes
    tokens_lost: Tokens
    """Tokens its predecessor trained that the run knows of but that no stored update holds."""
    ledger: Tally
    waiting_for: Text
    """What it cannot reach right now, or empty."""
    checkpoint_bytes: Bytes = 0
    """Of `bytes_up`, those of checkpoints."""
    members: Counter = 0
    """The newest version of the membership that it knows."""


class Progress(Message, frozen=True, kw_only=True, tag="progress"):
    """A learner has trained on: said between heartbeats, so that what a kill loses is known."""

    learner: Name
    incarnation: Counter
    step: Steps
    tokens_seen: Tokens


class Leave(Message, frozen=True, kw_only=True, tag="leave"):
    """A learner stops on purpose: do not wait for it."""

    learner: Name
    incarnation: Counter
    step: Steps
    done: bool
    """Whether it has done all its steps."""


# --- from a syncer ----------------------------------------------------------------------------------------------------


class Call(Message, frozen=True, kw_only=True, tag="call"):
    """A round of a fragment is open that will create `version`: answer with what you have."""

    syncer: Name
    fragment: Index
    version: Version
    afresh: bool = False
    """Whether learners that have sent an update already are to send what they have now: the updates waited for long."""


class Committed(Message, frozen=True, kw_only=True, tag="committed"):
    """A commit is in the log."""

    syncer: Name
    fragment: Index
    version: Version
    digest: Digest = bytes(32)
    """Of the commit; zeros where its author does not say."""


class Alive(Message, frozen=True, kw_only=True, tag="alive"):
    """A syncer is there, and how it does."""

    syncer: Name
    commits: Counter
    """Commits it created since it started."""
    heads: Annotated[tuple[Version, ...], msgspec.Meta(max_length=1 << 12)]
    """The newest version of each fragment that this syncer has read."""
    rejected: dict[Text, Counter]
    """Messages it turned away since it started that belong to no fragment's log, by reason."""
    waiting_for: Text
    lag_ms: Finite
    """Worst delay of its event loop since the message before."""
    held: Counter
    """Fragments it opens rounds of."""
    fold_s: Seconds
    """How long it took to fold the log at its start."""
    broken: Annotated[tuple[Index, ...], msgspec.Meta(max_length=1 << 12)]
    """Fragments whose log it cannot fold to the end, for whatever reason: others are to keep them."""
    stopping: bool
    """Its last word: others take over now."""
    able: bool = True
    """Whether it reaches the store, hears and is heard; the others take over from one that is not."""
    members: Counter = 0
    """The newest version of the membership that it knows."""
    dropped: Annotated[dict[Name, Counter], msgspec.Meta(max_length=DROPPED_LISTED)] = {}
    """Messages dropped since it started because too many of the same author waited; the loudest authors."""
    slow: Annotated[tuple[Index, ...], msgspec.Meta(max_length=1 << 12)] = ()
    """Those of `broken` that are only slow to be read: nothing is known to be damaged."""
    refused: Annotated[tuple[Index, ...], msgspec.Meta(max_length=1 << 12)] = ()
    """Those of `broken` of which it may not read what it needs."""
    holed: Annotated[tuple[Index, ...], msgspec.Meta(max_length=1 << 12)] = ()
    """Fragments that it keeps, and of whose log a commit is missing that others would need."""


FromLearner = Announce | Pass | Heartbeat | Progress | Leave
FromSyncer = Call | Committed | Alive
AnyMessage = FromLearner | FromSyncer


BATCH_MAX = 16
"""Messages that go under one signature."""

BATCH_BYTES = HEADER_MAX[Kind.MESSAGE] - 1024


class _Envelope(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    messages: Annotated[tuple[AnyMessage, ...], msgspec.Meta(min_length=1, max_length=BATCH_MAX)]


def encode(*messages: AnyMessage, signer: Signer | None = None) -> bytes:
    """Return the bytes of messages of one author, under its signature where there is a key.

    Raises `ValueError` for more than go into one (see `batches`).
    """
    blob = draft(Kind.MESSAGE, _Envelope(messages)).blob
    seal(blob, signer)
    return bytes(blob)


def batches(messages: Sequence[AnyMessage], signer: Signer | None) -> list[bytes]:
    """Return messages of one author as bytes, in order: as many as fit under one signature, or each by itself where
    nothing is signed."""
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
    """Return the messages in these bytes; whose they are is for `Members.require_author` to say.

    Raises `RecordInvalid`.
    """
    return parse(blob, Kind.MESSAGE, _Envelope)[0].messages

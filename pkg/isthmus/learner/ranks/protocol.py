"""What is said between the first rank of a learner and those that own fragments: msgpack messages, with raw bytes.

    offset  bytes
         0      4   bytes of the message
         4      8   bytes of the body
        12      …   the message (msgpack), then the body

All numbers are little endian. Both ends are one program in one job, which have exchanged a secret; sizes are bounded
all the same.
"""

import asyncio
import struct
from typing import Any

import msgspec

from isthmus.errors import RankLost
from isthmus.format.records.frame import Blob
from isthmus.format.records.objects import Part, PartHeader, UpdateHeader
from isthmus.learner.checkpoint_shards import ShardRef
from isthmus.log import Commit

_HEAD = struct.Struct("<IQ")
MESSAGE_MAX = 64 << 20
BODY_MAX = 1 << 40
STREAM_LIMIT = 1 << 20
"""Bytes that a stream buffers before it stops reading from its socket."""


class Message(msgspec.Struct, frozen=True, tag=True):
    """Something that is said."""


class Hello(Message, frozen=True):
    """A rank introduces itself, with the secret that the first one has told."""

    rank: int
    secret: bytes


class Start(Message, frozen=True):
    """`Carry.start`."""

    fragment: int
    version: int
    key: str
    commit: Commit | None
    into: int


class Step(Message, frozen=True):
    """`Carry.step`."""

    carried: int
    commit: Commit
    into: int


class Restart(Message, frozen=True):
    """`Carry.restart`."""

    commit: Commit
    into: int


class Pack(Message, frozen=True):
    """`ArrayBackend.pack`."""

    header: UpdateHeader
    base: int
    values: int
    feedback: int | None
    body: int
    dropped: int


class Store(Message, frozen=True):
    """`ArrayBackend.store`."""

    key: str
    body: int


class Sum(Message, frozen=True):
    """`ArrayBackend.sum`. Nothing is answered."""

    fragment: int
    a: int
    b: int
    into: int


class Give(Message, frozen=True):
    """`ArrayBackend.home` of what lies with the first rank: the body is an array's bytes."""

    into: int
    half: bool
    """It is a residual of two bytes a parameter."""


class Bring(Message, frozen=True):
    """`ArrayBackend.home` of what lies in the store."""

    fragment: int
    pieces: tuple[ShardRef, ...]
    residual: bool
    into: int


class Stage(Message, frozen=True):
    """`ArrayBackend.staged`."""

    fragment: int
    number: int
    into: int


class Land(Message, frozen=True):
    """`ArrayBackend.landed`."""

    fragment: int
    number: int
    into: int


class IsFinite(Message, frozen=True):
    """`ArrayBackend.is_finite`."""

    number: int


class Keep(Message, frozen=True):
    """`ArrayBackend.keep`."""

    part: PartHeader
    numbers: list[int]


class Forget(Message, frozen=True):
    """Nobody refers to these any more. Nothing is answered."""

    numbers: list[int]


class Answer(Message, frozen=True):
    """It is done."""

    bytes_up: int
    """Moved to the store since the last answer."""
    bytes_down: int
    digest: bytes = b""
    size: int = 0
    yes: bool = False
    """Something was dropped; it is finite."""
    part: Part | None = None


class Failure(Message, frozen=True):
    """It came to nothing."""

    kind: str
    text: str
    about: dict[str, Any]


Asked = Start | Step | Restart | Pack | Store | Sum | Give | Bring | Stage | Land | IsFinite | Keep | Forget
Said = Answer | Failure


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """A message with the number of its question."""

    number: int
    message: Hello | Asked | Said


def write(writer: asyncio.StreamWriter, number: int, message: Hello | Asked | Said, body: Blob = b"") -> None:
    """Begin to send a message."""
    packed = msgspec.msgpack.encode(Envelope(number, message))
    writer.write(_HEAD.pack(len(packed), len(body)) + packed)
    if len(body):
        writer.write(body)


HELLO_MAX = 4 << 10
"""Bytes that are read of somebody who has not said the secret yet."""


async def read(
    reader: asyncio.StreamReader, message_max: int = MESSAGE_MAX, body_max: int = BODY_MAX
) -> tuple[Envelope, bytearray]:
    """Return the next message and its body. Raises `RankLost` at the end of the stream, and beyond the limits."""
    try:
        size, more = _HEAD.unpack(await reader.readexactly(_HEAD.size))
        if size > message_max or more > body_max:
            raise RankLost(f"a message of {size} and {more} bytes between ranks")
        envelope = msgspec.msgpack.decode(await reader.readexactly(size), type=Envelope)
        body = bytearray(more)
        at = 0
        while at < more:
            piece = await reader.read(min(more - at, STREAM_LIMIT))
            if not piece:
                raise RankLost("its connection ended in the middle of a message")
            body[at : at + len(piece)] = piece
            at += len(piece)
    except (OSError, asyncio.IncompleteReadError) as error:
        raise RankLost(f"its connection ended: {error}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RankLost(f"a message that is none between ranks: {error}") from None
    return envelope, body

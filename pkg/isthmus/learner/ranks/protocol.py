"""The messages between the first rank of a learner and the ranks that own fragments: msgpack, with raw bytes.

    offset  bytes
         0      4   bytes of the message
         4      8   bytes of the body
        12      …   the message (msgpack), then the body

All numbers are little endian. Both ends run the same program in one job and have exchanged a secret. Sizes are limited
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
    """A message between ranks."""


class Hello(Message, frozen=True):
    """A rank introduces itself, with the secret that it got from the first rank."""

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
    """`ArrayBackend.sum`. There is no answer."""

    fragment: int
    a: int
    b: int
    into: int


class Give(Message, frozen=True):
    """`ArrayBackend.home` of an array that the first rank has: the body is the array's bytes."""

    into: int
    half: bool
    """Whether the array is a residual of two bytes per parameter."""


class Bring(Message, frozen=True):
    """`ArrayBackend.home` of an array in the store."""

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
    """Nothing refers to these numbers any more. There is no answer."""

    numbers: list[int]


class Answer(Message, frozen=True):
    """The rank has done what it was asked for."""

    bytes_up: int
    """Bytes moved to the store since the last answer."""
    bytes_down: int
    """Bytes moved from the store since the last answer."""
    digest: bytes = b""
    size: int = 0
    yes: bool = False
    """For `Pack`: the codec dropped something. For `IsFinite`: the array is finite."""
    part: Part | None = None


class Failure(Message, frozen=True):
    """The rank failed to do what it was asked for."""

    kind: str
    text: str
    about: dict[str, Any]


Asked = Start | Step | Restart | Pack | Store | Sum | Give | Bring | Stage | Land | IsFinite | Keep | Forget
Said = Answer | Failure


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """A message with the number of the question that it asks or answers."""

    number: int
    message: Hello | Asked | Said


def write(writer: asyncio.StreamWriter, number: int, message: Hello | Asked | Said, body: Blob = b"") -> None:
    """Start sending a message."""
    packed = msgspec.msgpack.encode(Envelope(number, message))
    writer.write(_HEAD.pack(len(packed), len(body)) + packed)
    if len(body):
        writer.write(body)


HELLO_MAX = 4 << 10
"""Most bytes read from a peer that has not sent the secret yet."""


async def read(
    reader: asyncio.StreamReader, message_max: int = MESSAGE_MAX, body_max: int = BODY_MAX
) -> tuple[Envelope, bytearray]:
    """Return the next message and its body.

    Raises `RankLost` if the stream ends, or if a message is malformed or exceeds the limits.
    """
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

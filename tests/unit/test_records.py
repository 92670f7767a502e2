"""Frames survive a round trip, and every kind of damage is rejected with a named reason, never another exception."""

import math
import struct
import zlib
from collections.abc import Callable

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.errors import RecordInvalid
from isthmus.format.records import frame, messages
from isthmus.format.records.frame import Body, Kind
from isthmus.format.records.objects import UpdateHeader
from isthmus.reasons import Reason

UPDATE = UpdateHeader(
    schema=1,
    run=bytes(range(32)),
    fragment=3,
    learner="eu-1",
    incarnation=2,
    base=7,
    codec="int4",
    steps=12,
    tokens=3072,
    step=84,
    tokens_seen=21504,
    train_s=1.5,
)


def update(payload: bytes = b"x" * 100) -> Body:
    out = frame.draft(Kind.UPDATE, UPDATE, len(payload))
    out.payload[:] = payload
    return out.blob


def with_header(raw: bytes, payload: bytes = b"") -> bytes:
    """Return a frame with these bytes as its header, and the right checksum."""
    start = frame.payload_offset(len(raw))
    prefix = frame.PREFIX.pack(
        frame.MAGIC,
        frame.FRAME_VERSION,
        Kind.UPDATE,
        len(raw),
        len(payload),
        zlib.crc32(raw),
        0,
        bytes(32),
        bytes(64),
    )
    return (prefix + raw).ljust(start, b"\0") + payload


def reason_of(blob: bytes | Body) -> Reason:
    with pytest.raises(RecordInvalid) as caught:
        frame.parse(blob, Kind.UPDATE, UpdateHeader)
    return caught.value.reason


def test_a_record_survives_the_trip() -> None:
    header, payload = frame.parse(update(), Kind.UPDATE, UpdateHeader)
    assert header == UPDATE
    assert bytes(payload) == b"x" * 100


def test_the_payload_is_aligned() -> None:
    blob = update()
    assert frame.payload_offset(frame.header_size(blob)) % 64 == 0
    assert len(blob) == frame.payload_offset(frame.header_size(blob)) + 100


def test_the_place_of_author_and_signature_is_reserved() -> None:
    blob = update()
    assert bytes(blob[32:64]) == bytes(32)
    assert bytes(blob[64:128]) == bytes(64)
    blob[40] = 1
    assert reason_of(blob) is Reason.MALFORMED


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda b: b[:50], Reason.TRUNCATED),
        (lambda b: b[:-1], Reason.TRUNCATED),
        (lambda b: b + b"!", Reason.OVERSIZED),
        (lambda b: b"PK" + b[2:], Reason.MALFORMED),
        (lambda b: b[:8] + struct.pack("<H", 9) + b[10:], Reason.MALFORMED),
        (lambda b: b[:10] + struct.pack("<H", Kind.COMMIT) + b[12:], Reason.MALFORMED),
        (lambda b: b[:12] + struct.pack("<I", 1 << 31) + b[16:], Reason.OVERSIZED),
        (lambda b: b[:130] + b"\xff" + b[131:], Reason.MALFORMED),
    ],
)
def test_damage_has_a_name(damage: Callable[[bytes], bytes], reason: Reason) -> None:
    assert reason_of(damage(bytes(update()))) is reason


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 0},
        {"base": -1},
        {"learner": "../../etc"},
        {"learner": "a\n"},
        {"tokens": 2**60},
        {"run": b"short"},
        {"steps": 1.5},
        {"surprise": 1},
        {"codec": None},
        {"schema": 2},
    ],
)
def test_fields_outside_their_range_are_turned_away(change: dict[str, object]) -> None:
    plain = msgspec.to_builtins(UPDATE, builtin_types=(bytes,)) | change
    assert reason_of(with_header(msgpack.packb(plain))) is Reason.MALFORMED


def test_a_missing_field_is_turned_away() -> None:
    plain = msgspec.to_builtins(UPDATE, builtin_types=(bytes,))
    del plain["base"]
    assert reason_of(with_header(msgpack.packb(plain))) is Reason.MALFORMED


@pytest.mark.parametrize(
    "raw",
    [
        b"\xdd\xff\xff\xff\xff",  # an array of four billion
        b"\xdf\xff\xff\xff\xff",  # a map of four billion
        b"\xc6\xff\xff\xff\xff",  # four gigabytes of bytes
        b"\xc9\xff\xff\xff\xff\x01",  # an extension
        b"\x91" * 5000,  # nested deeper than any stack
        b"\xd4\x01\x00",  # a small extension
        b"\x81\x01\x02",  # a key that is no text
        b"\xc0",
        b"",
    ],
)
def test_hostile_msgpack_is_turned_away_without_being_built(raw: bytes) -> None:
    if len(raw) > frame.HEADER_MAX[Kind.UPDATE]:
        assert reason_of(with_header(raw)) is Reason.OVERSIZED
    else:
        assert reason_of(with_header(raw)) is Reason.MALFORMED


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_no_damage_raises_anything_else(data: st.DataObject) -> None:
    blob = update()
    for _ in range(data.draw(st.integers(1, 4))):
        blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(blob)[: data.draw(st.integers(0, len(blob)))] if data.draw(st.booleans()) else bytes(blob)
    try:
        frame.parse(cut, Kind.UPDATE, UpdateHeader)
    except RecordInvalid:
        pass


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400))
def test_random_bytes_are_no_message(blob: bytes) -> None:
    with pytest.raises(RecordInvalid):
        messages.decode(blob)


def test_messages_survive_the_trip() -> None:
    call = messages.Call(run=bytes(32), id="1", syncer="s", fragment=2, version=9)
    assert messages.decode(messages.encode(call)) == (call,)


@pytest.mark.parametrize("age", [float("nan"), float("inf"), -1.0])
def test_a_duration_that_is_none_is_turned_away(age: float) -> None:
    announce = messages.Announce(
        run=bytes(32),
        id="1",
        learner="l",
        incarnation=1,
        fragment=0,
        base=0,
        key="updates/k",
        digest=bytes(32),
        size=10,
        steps=1,
        tokens=1,
        step=1,
        tokens_seen=1,
        due=True,
        age_s=age,
        step_s=0.0,
        upload_s=0.0,
        sync_s=0.0,
    )
    with pytest.raises(RecordInvalid):
        messages.decode(messages.encode(announce))


def test_a_header_over_its_limit_is_never_written() -> None:
    big = messages.Alive(
        run=bytes(32),
        id="1",
        syncer="s",
        commits=0,
        heads=(),
        rejected={f"{i:060d}": 1 for i in range(2000)},
        waiting_for="",
        lag_ms=0.0,
        held=0,
        fold_s=0.0,
        broken=(),
        stopping=False,
    )
    with pytest.raises(ValueError, match="over its limit"):
        messages.encode(big)


def test_a_loss_costs_its_bytes_only_where_there_is_one() -> None:
    stated = msgspec.structs.replace(UPDATE, loss=2.25)
    assert b"loss" not in bytes(frame.draft(Kind.UPDATE, UPDATE, 0).blob)
    assert frame.parse(frame.draft(Kind.UPDATE, stated, 0).blob, Kind.UPDATE, UpdateHeader)[0] == stated
    for wrong in (math.nan, math.inf, 1.1e30, -1.1e30):
        with pytest.raises(RecordInvalid):
            frame.parse(
                frame.draft(Kind.UPDATE, msgspec.structs.replace(UPDATE, loss=wrong), 0).blob, Kind.UPDATE, UpdateHeader
            )

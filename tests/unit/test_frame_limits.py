"""A frame at its limits is accepted; beyond them, or with other reserved, padding or header bytes, it is rejected."""

import msgspec
import pytest

from isthmus.errors import RecordInvalid
from isthmus.format.records import frame
from isthmus.format.records.frame import HEADER_MAX, PREFIX, Body, Kind
from isthmus.format.records.keys import is_versioned, update_key, version_in
from isthmus.format.records.objects import (
    INPUTS_MAX,
    LISTED_MAX,
    SEEN_MAX,
    CommitHeader,
    Input,
    Late,
    Passing,
    Rejection,
    Seen,
)
from isthmus.reasons import Clip, Reason
from support.commits import committed


class Note(msgspec.Struct, frozen=True):
    """A header as long as its text."""

    text: str


def note(length: int, payload: bytes = b"") -> Body:
    """Return a record whose header takes so many bytes."""
    overhead = len(b"\x81\xa4text\xda??")
    out = frame.draft(Kind.UPDATE, Note("x" * (length - overhead)), len(payload))
    out.payload[:] = payload
    return out.blob


def reason_of(blob: Body) -> Reason:
    with pytest.raises(RecordInvalid) as caught:
        frame.parse(blob, Kind.UPDATE, Note)
    return caught.value.reason


def test_a_header_may_be_as_long_as_its_limit() -> None:
    longest = HEADER_MAX[Kind.UPDATE]
    blob = note(longest, b"payload")
    assert frame.header_size(blob) == longest
    assert bytes(frame.parse(blob, Kind.UPDATE, Note)[1]) == b"payload"
    with pytest.raises(ValueError, match="over its limit"):
        note(longest + 1)
    assert len(blob) == frame.largest(Kind.UPDATE, 7)


def test_a_payload_begins_at_the_next_multiple_of_64_and_at_once_where_the_header_ends_there() -> None:
    assert PREFIX.size == 128
    assert [frame.payload_offset(n) for n in (0, 1, 63, 64, 65, 128)] == [128, 192, 192, 192, 256, 256]
    blob = note(64 * 5, b"payload")
    assert len(blob) == 128 + 64 * 5 + 7


@pytest.mark.parametrize("at", [32, 63, 64, 127], ids=lambda at: f"byte {at}")
def test_what_is_reserved_for_a_signature_is_zero(at: int) -> None:
    blob = note(300)
    blob[at] = 1
    assert reason_of(blob) is Reason.MALFORMED


def test_padding_is_zero() -> None:
    blob = note(300, b"payload")
    assert not blob[128 + 300]
    blob[128 + 300] = 1
    assert reason_of(blob) is Reason.MALFORMED


def test_a_header_in_which_one_letter_is_another_one_is_noticed() -> None:
    """Without the CRC it would be a valid record with other contents."""
    blob = note(300)
    at = bytes(blob).index(b"xxxx")
    blob[at] = ord("y")
    assert reason_of(blob) is Reason.MALFORMED
    with pytest.raises(RecordInvalid, match="CRC"):
        frame.parse_head(blob, Kind.UPDATE, Note)


def test_too_short_and_too_long_are_told_apart() -> None:
    blob = note(300, b"payload")
    assert reason_of(blob[:-1]) is Reason.TRUNCATED
    assert reason_of(bytearray(blob) + b"!") is Reason.OVERSIZED


def test_a_head_is_whole_or_it_is_none() -> None:
    blob = note(300, b"payload")
    end = frame.head_end(blob, Kind.UPDATE)
    assert end == 128 + 300
    assert len(frame.parse_head(blob[:end], Kind.UPDATE, Note).text) > 200
    with pytest.raises(RecordInvalid) as caught:
        frame.parse_head(blob[: end - 1], Kind.UPDATE, Note)
    assert caught.value.reason is Reason.TRUNCATED


@pytest.mark.parametrize("name", ["a\n", "-a", "a" * 64, "a/b", ""])
def test_a_name_is_a_segment_of_a_key_to_its_last_letter(name: str) -> None:
    from isthmus.errors import InputError
    from isthmus.format.records.fields import require_name

    with pytest.raises(InputError):
        require_name("learner", name)
    require_name("learner", "a" * 63)


def test_only_keys_that_end_as_ours_do_have_versions() -> None:
    key = update_key(3, "eu-1", 77, bytes(range(32)))
    assert (is_versioned(key), version_in(key)) == (True, 77)
    for other in (f"{key}.tmp", key[:-1], key.replace("-", "_"), f"x{key}/more"):
        assert not is_versioned(other), other


def test_a_commit_names_as_many_inputs_as_it_may_whatever_they_are_called() -> None:
    """The names and numbers are the longest possible, and the round has noted all that it can of these learners."""
    at, digest = 4e9 + 0.123456789, bytes(range(32))
    names = [f"{number:06d}".ljust(63, "n") for number in range(INPUTS_MAX)]
    inputs = tuple(
        Input(
            key=update_key(4095, name, 10**12 - 1, digest), digest=digest, learner=name, incarnation=10**6, base=10**12 - 1,
            steps=10**9, tokens=10**15, step=10**12, tokens_seen=10**15, bytes=10**12, train_s=1e5 / 3, taken_at=at,
            heard_at=at, fetched_at=at, arrived_at=at, weight=1e20 / 3, scale=1 / 3, norm=1 / 3,
            clipped=tuple(reason.value for reason in Clip),
        )
        for name in names
    )  # fmt: skip
    base = committed(10**6, *inputs)
    waited = msgspec.structs.replace(
        base.waited,
        called_by=names[0],
        expected=tuple(names),
        missing=tuple(names),
        passed=tuple(Passing(learner=name, at=at) for name in names),
        seen=tuple(Seen(at=1e5 / 3, what="pass", learner=names[n % INPUTS_MAX]) for n in range(SEEN_MAX)),
    )
    late = tuple(Late(learner=name, base=10**12 - 1, digest=digest, heard_at=at) for name in names[:LISTED_MAX])
    rejected = tuple(
        Rejection(learner=n, base=10**12 - 1, reason=Reason.NOT_A_MEMBER.value, digest=digest, count=10**9, at=at)
        for n in names[:LISTED_MAX]
    )
    header = msgspec.structs.replace(base, waited=waited, late=late, rejected=rejected)
    blob = frame.draft(Kind.COMMIT, header).blob
    assert frame.parse(blob, Kind.COMMIT, CommitHeader)[0] == header
    assert len(blob) < HEADER_MAX[Kind.COMMIT]

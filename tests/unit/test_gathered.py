"""An object gathered from several arrays without a copy has the same bytes as one that was copied together."""

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from isthmus.format.records import frame
from isthmus.format.records.frame import Gathered, Kind
from isthmus.format.records.objects import SCHEMA, ValueHeader

HEADER = ValueHeader(schema=SCHEMA, run=bytes(32), fragment=3, version=8, codec="f32")


@given(st.lists(st.binary(max_size=9), max_size=6), st.integers(0, 60), st.integers(0, 60))
def test_any_part_of_it_is_that_part_of_the_whole(pieces: list[bytes], start: int, stop: int) -> None:
    found, whole = Gathered(pieces), b"".join(pieces)
    assert (len(found), bytes(found), b"".join(found.views())) == (len(whole), whole, whole)
    assert bytes(found.part(start, stop)) == whole[start:stop]
    assert frame.digest(found) == blake3(whole).digest()


def test_what_lies_together_is_not_copied() -> None:
    x = np.arange(100, dtype=np.float32)
    found = Gathered([b"head", x, b"tail"])
    assert np.shares_memory(np.frombuffer(found.part(8, 400), np.uint8), x)
    assert not np.shares_memory(np.frombuffer(found.part(2, 400), np.uint8), x)


def test_arrays_are_their_bytes_in_order_whatever_they_are() -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert bytes(Gathered([x.T, np.empty(0, np.float32), x[1]])) == x.T.tobytes() + x[1].tobytes()


def test_an_object_that_is_gathered_is_the_one_that_is_drafted() -> None:
    values = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    draft = frame.draft(Kind.VALUE, HEADER, values.nbytes)
    frame.fill(draft.payload, values)
    found = frame.gathered(Kind.VALUE, HEADER, [values[:300], values[300:]])
    assert bytes(found) == bytes(draft.blob)
    header, payload = frame.parse(bytes(found), Kind.VALUE, ValueHeader)
    assert (header, bytes(payload)) == (HEADER, values.tobytes())


def test_a_header_over_its_limit_is_refused() -> None:
    long = ValueHeader(schema=SCHEMA, run=bytes(32), fragment=3, version=8, codec="x" * 5000)
    with pytest.raises(ValueError, match="over its limit"):
        frame.gathered(Kind.VALUE, long, [])

"""Bits are a promise: no codec, merge, record, key or signature changes a byte of what it made before."""

import json
from collections.abc import Callable, Iterator

import msgspec
import pytest
from msgspec import inspect

from isthmus.format.records import objects
from support import golden
from support.filled import default_of, filled, least

STORED: dict[str, str] = json.loads(golden.STORED.read_text())


@pytest.mark.parametrize("part", golden.PARTS)
def test_every_byte_is_as_it_was(part: Callable[[], Iterator[tuple[str, str]]]) -> None:
    for name, found in part():
        assert STORED.get(name) == found, f"{name} has changed: if that is meant, see support/golden.py"


def test_nothing_is_stored_that_is_not_made() -> None:
    made = [name for part in golden.PARTS for name, _ in part()]
    assert sorted(made) == sorted(STORED)


@pytest.mark.parametrize("record", golden.RECORDS)
def test_every_field_of_a_record_survives_the_trip(record: type[msgspec.Struct]) -> None:
    full = filled(record)
    kind = inspect.type_info(record)
    assert isinstance(kind, inspect.StructType)
    for field in kind.fields:
        assert getattr(full, field.name) != default_of(field)
    for each in (full, least(full)):
        assert msgspec.convert(msgspec.msgpack.decode(golden.plain(each)), record) == each


def test_a_record_with_an_unknown_field_is_refused() -> None:
    plain = msgspec.msgpack.decode(golden.plain(filled(objects.UpdateHeader)))
    with pytest.raises(msgspec.ValidationError, match="unknown"):
        msgspec.convert(plain | {"unknown": 1}, objects.UpdateHeader)

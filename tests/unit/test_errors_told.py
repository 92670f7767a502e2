"""Every error message states a reason; no message holds control characters or a password."""

import contextlib
import logging
from functools import partial

import msgspec
import pytest

from isthmus.errors import LogCorrupt, ObjectMissing, RecordInvalid, Unavailable, legible, told
from isthmus.format.records.fields import Text, Word
from isthmus.format.records.keys import can_be_named, is_versioned
from isthmus.reasons import Reason
from isthmus_services.main import main
from isthmus_services.process import logs


def test_an_error_that_says_nothing_is_told_by_its_name() -> None:
    assert told(TimeoutError()) == "TimeoutError"
    assert told(Unavailable("the store is away")) == "the store is away"


ESCAPES = "\x1b[31mred\x1b[0m\nforged\u202eline\x9b"


def is_plain(words: str) -> bool:
    return words.isprintable()


def test_what_others_wrote_moves_no_cursor_and_forges_no_line() -> None:
    assert not is_plain(ESCAPES)
    assert legible(ESCAPES) == "\\x1b[31mred\\x1b[0m\\nforged\\u202eline\\x9b"
    assert legible("läuft, 3 % …") == "läuft, 3 % …"
    invalid = RecordInvalid(Reason.MALFORMED, f"unknown field `{ESCAPES}`")
    assert is_plain(str(invalid))
    assert is_plain(invalid.detail)
    corrupt = LogCorrupt(f"updates/{ESCAPES}", ESCAPES)
    assert is_plain(str(corrupt) + corrupt.key + corrupt.detail)
    assert is_plain(str(ObjectMissing(ESCAPES)))


@pytest.mark.parametrize("text", [*ESCAPES[:1], "\u202e", "\u2066", "\u2028", "\u200b", "\ufeff", "\x85"])
def test_no_field_holds_what_would(text: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(f"a{text}b", Text)


@pytest.mark.parametrize("word", ["", "Too-long", "too long", "-x", "x" * 41, "\x1b[2J", "a\n"])
def test_a_reason_is_a_word(word: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(word, Word)
    assert all(msgspec.convert(reason.value, Word) for reason in Reason)


def test_what_is_called_strangely_is_no_object_of_a_run() -> None:
    name = "000000000001-0123456789abcdef"
    assert is_versioned(f"updates/00000/eu/{name}")
    assert not any(is_versioned(f"updates/00000/{odd}/{name}") for odd in ("\x1b[2J", "a b", "..", "", "\u202e"))
    assert not any(
        can_be_named(odd) for odd in ("../../etc/passwd", "/etc/passwd", "", "a//b", "a\n", "x/" * 300 + "x")
    )


def test_a_line_of_the_log_is_one_line_without_passwords(capsys: pytest.CaptureFixture[str]) -> None:
    level, handlers = logging.getLogger("isthmus").level, logging.getLogger().handlers
    try:
        for configure in (partial(logs.configure, "text"), logs.quiet):
            configure()
            logging.getLogger("isthmus.test").warning("%s of redis://:hunter2@host", ESCAPES)
            said = capsys.readouterr().err
            assert said.count("\n") == 1
            assert is_plain(said.strip())
            assert "hunter2" not in said
    finally:
        logging.getLogger("isthmus").setLevel(level)
        logging.getLogger().handlers = handlers


@pytest.mark.parametrize(
    "words",
    [
        ["status", "redis://:hunter2@host/0"],
        ["status", "s3://u:hunter2@host/bucket"],
        ["status", "run", "redis://:hunter2@host/0"],
        ["status", "run", "--bus-password", "hunter2"],
        ["s3://u:hunter2@h/b"],
        ["learner", "s3:///u:hunter2@host/b", "--steps", "1"],
        ["export", "gs://u:hunter2@host/b", "-o", "x"],
    ],
)
def test_no_command_repeats_a_password(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        assert main(words) == 2
    said = capfd.readouterr()
    assert said.err
    assert "hunter2" not in said.err + said.out

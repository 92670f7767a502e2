"""What a URL says is kept to the letter, or refused."""

from pathlib import Path

import pytest

from isthmus.bus import default_bus, open_bus
from isthmus.errors import InputError
from isthmus.runtime.clock import single_threaded
from isthmus.runtime.urls import split, without_passwords
from isthmus.store import open_store


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://bucket/exp#1", "# ends a URL"),
        ("s3+aiobotocore://bucket/exp#1", "# ends a URL"),
        ("gs://bucket/exp#1", "# ends a URL"),
        ("file:///tmp/exp#1", "# ends a URL"),
        ("file:///tmp/exp?1", r"\? ends a URL"),
        ("s3://bucket/a//b", "between two slashes"),
        ("s3://bucket//a", "between two slashes"),
        ("s3://bucket/a/b//", "between two slashes"),
        ("s3://bucket/a/./b", r"\./ is no folder"),
        ("s3://bucket/a/../b", r"\.\./ is no folder"),
        ("file://host/tmp/exp", "a file has no host"),
        ("redis://user:pass#word@host", "%23"),
        ("rediss://host:6379/0#1", "%23"),
    ],
)
def test_what_would_be_lost_is_refused(url: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        split(url)
    assert "pass#word" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["s3://bucket", "s3://bucket/", "s3://bucket/a", "s3://bucket/a/b/", "s3://bucket/läufe/my run"]
)
def test_other_names_are_taken_as_they_are(url: str) -> None:
    parts = split(url)
    assert f"s3://{parts.netloc}{parts.path}" == url


@pytest.mark.parametrize("name", ["exp#1", "exp?1", "my run", "läufe", "a%20b", "a+b"])
async def test_a_folder_may_have_any_name(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    async with open_store(str(folder), single_threaded()) as store:
        await store.put("k", b"x")
    assert (folder / "k").read_bytes() == b"x"
    bus = default_bus(str(folder))
    assert bus is not None
    async with open_bus(bus, b"r" * 32) as opened:
        await opened.append("s", b"x")
    assert {path.name for path in tmp_path.iterdir()} == {name}
    assert (folder / "bus.sqlite").exists()


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("no bus at redis://:hunter2@host:6379/0 answers", "no bus at redis://…@host:6379/0 answers"),
        ("s3://u:hunter2@h/b and gs://u:hunter2@h/b", "s3://…@h/b and gs://…@h/b"),
        ("s3://b/r at http://u:hunter2@127.0.0.1:1: no", "s3://b/r at http://…@127.0.0.1:1: no"),
        ("'s3:///u:hunter2@h' is none", "'s3://…@h' is none"),
        ("redis://u:hunter2/with@host", "redis://…@host"),
        ("say redis://USER:PASSWORD@host:port", "say redis://USER:PASSWORD@host:port"),
        ("s3://bucket/a@b is there", "s3://bucket/a@b is there"),
    ],
)
def test_no_password_is_shown_however_it_got_into_the_words(words: str, shown: str) -> None:
    assert without_passwords(words) == shown

"""A URL is used exactly as it is written, or it is rejected."""

from pathlib import Path
from urllib.parse import quote

import pytest

from isthmus.bus import default_bus, open_bus
from isthmus.errors import InputError
from isthmus.runtime.clock import single_threaded
from isthmus.runtime.urls import Place, without_passwords
from isthmus.store import open_store


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://bucket/exp#1", "# ends a URL"),
        ("s3+aiobotocore://bucket/exp#1", "# ends a URL"),
        ("gs://bucket/exp#1", "# ends a URL"),
        ("az://container/exp#1", "# ends a URL"),
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
        ("s3//bucket/run", r"the colon is missing: write s3://"),
        ("redis//host", r"the colon is missing: write redis://"),
    ],
)
def test_what_would_be_lost_is_refused(url: str, said: str) -> None:
    with pytest.raises(InputError, match=said) as caught:
        Place.of(url)
    assert "pass#word" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["s3://bucket", "s3://bucket/", "s3://bucket/a", "s3://bucket/a/b/", "s3://bucket/läufe/my run"]
)
def test_other_names_are_taken_as_they_are(url: str) -> None:
    place = Place.of(url)
    assert f"s3://{place.authority}{place.path}" == url


@pytest.mark.parametrize(
    ("url", "folder"),
    [("/a/b?c#d", "/a/b?c#d"), ("file:///a/b", "/a/b"), ("file://localhost/a", "/a"), ("~/a", str(Path.home() / "a"))],
)
def test_a_folder_is_a_path_or_a_file_url(url: str, folder: str) -> None:
    assert str(Place.of(url).folder) == folder
    assert not Place.of(url).in_bucket


def test_a_place_is_shown_without_secrets() -> None:
    place = Place.of("rediss://user:sesame@host:6380/1?password=sesame&db=2&db=3&ssl_ca_certs=")
    assert (place.host, place.port, place.path) == ("host", 6380, "/1")
    assert place.options == {"password": "sesame", "db": "3", "ssl_ca_certs": ""}
    assert f"{place}" == repr(place) == "rediss://host:6380/1"


@pytest.mark.parametrize(
    "url",
    [
        *("redis://u:sesame@h?db=1&odd=x", "redis://h?odd=sesame&db=1", "unix:///h?odd=1"),
        *(f"{scheme}://h?{option}" for scheme, option in (("redis", "ssl_cert_reqs=none"), ("rediss", "retry=x"))),
        *("redis://h?db=x", "redis://h?protocol=9"),
    ],
)
async def test_an_option_that_the_client_of_redis_does_not_take_is_named(url: str) -> None:
    wrong = next(name for name in ("odd", "ssl_cert_reqs", "retry", "protocol", "db") if f"{name}=" in url)
    with pytest.raises(InputError, match=f"correct or leave out the option {wrong}$") as caught:
        async with open_bus(url, b"r" * 32, None):
            pass
    assert "sesame" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("store:x", "store:x: nothing may follow store:, which means the run's own store: leave the rest out"),
        ("store:?sesame", "store:: nothing may follow store:"),
        ("store://", "store://: nothing may follow store:"),
        ("redis:", "redis:: the host is missing: write redis://host:port"),
        ("rediss://u:sesame@", "rediss://: the host is missing: write rediss://host:port"),
        ("redis:h:6379", "redis:h:6379: the host is missing: write redis://host:port"),
        ("sqlite:", "sqlite:: the path is missing: write sqlite:///path"),
        ("unix:", "unix:: the path is missing: write unix:///path"),
        ("amqp://u:sesame@h", "amqp://h: a bus is redis://host:port, sqlite:///path or store: (the run's own store), not amqp"),
        ("h:6379", "h:6379: a bus is redis://host:port, sqlite:///path or store: (the run's own store), not h"),
        ("bus", "bus: a bus is redis://host:port, sqlite:///path or store: (the run's own store), not a path"),
    ],
)  # fmt: skip
async def test_an_address_that_no_bus_can_have_is_refused(url: str, said: str) -> None:
    with pytest.raises(InputError) as caught:
        async with open_bus(url, b"r" * 32, None):
            pass
    assert str(caught.value).startswith(said)
    assert "sesame" not in str(caught.value)


@pytest.mark.parametrize(
    "endpoint",
    [
        *("garbage", "host:9000", "//host", "ftp://host", "http://", "http://:9000", "http://a b", " http://host"),
        *("http://host:99999", "http://u:sesame@host:x", "http://[::1", "http://höst", "http://host/{"),
    ],
)
async def test_an_endpoint_that_is_no_url_of_a_server_is_named(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
        monkeypatch.setenv(name, "x")
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    for variable, query in ((endpoint, ""), ("http://127.0.0.1:9", f"?endpoint={quote(endpoint)}")):
        monkeypatch.setenv("AWS_ENDPOINT_URL", variable)
        with pytest.raises(InputError, match=r"AWS_ENDPOINT_URL.* is no URL of a server: write http") as caught:
            async with open_store(f"s3://bucket/run{query}", single_threaded()):
                pass
        assert "sesame" not in str(caught.value)


@pytest.mark.parametrize("name", ["exp#1", "exp?1", "my run", "läufe", "a%20b", "a+b"])
async def test_a_folder_may_have_any_name(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    async with open_store(str(folder), single_threaded()) as store:
        await store.put("k", b"x")
    assert (folder / "k").read_bytes() == b"x"
    bus = default_bus(str(folder))
    assert bus is not None
    assert Place.of(bus).path == str(folder / "bus.sqlite")
    async with open_bus(bus, b"r" * 32, None) as opened:
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

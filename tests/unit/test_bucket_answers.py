"""Every answer of a bucket becomes the right result or error. A stub server gives the answers to the real client."""

import asyncio
import base64
import hashlib
import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from isthmus.agent.ports import open_place
from isthmus.errors import Denied, InputError, ObjectMissing, Unavailable
from isthmus.format.records.frame import Gathered
from isthmus.runtime.clock import single_threaded
from isthmus.store import EdgeStore, Patience, bucket, compares_sums, open_probe
from isthmus.store.credentials import access
from support.requests import DOING

ONCE = Patience(attempts=1)
SILENCE = b"silence"


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Stub:
    """A server that gives prepared answers, of which the last one repeats, and keeps all requests."""

    answers: list[bytes] = field(default_factory=list)
    asked: list[Request] = field(default_factory=list)
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:] if line)}
                if "expect" in headers:
                    writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                method, path, _ = head[0].split(" ")
                self.asked.append(Request(method, path, headers, body))
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                if answer == SILENCE:
                    await reader.read()  # until the client gives up
                    return
                writer.write(answer)
                if not answer or b"Connection: close" in answer:
                    return
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()


def answer(status: int, code: str = "", body: bytes = b"", **headers: str) -> bytes:
    body = body or (f"<Error><Code>{code}</Code><Message>said so</Message></Error>".encode() if code else b"")
    told = {"Content-Length": str(len(body)), **{k.replace("_", "-"): v for k, v in headers.items()}}
    lines = "".join(f"{k}: {v}\r\n" for k, v in told.items())
    return f"HTTP/1.1 {status} Whatever\r\n{lines}\r\n".encode() + body


WHEN = "Mon, 23 Nov 2026 12:00:00 GMT"


def part(body: bytes, start: int, whole: int, etag: str = '"one"', **headers: str) -> bytes:
    told = {"Content_Range": f"bytes {start}-{start + len(body) - 1}/{whole}", "ETag": etag, "Last_Modified": WHEN}
    return answer(206, body=body, **told | headers)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")

    @asynccontextmanager
    async def open_it(*answers: bytes) -> AsyncIterator[tuple[EdgeStore, Stub]]:
        stub = Stub(list(answers))
        server = await asyncio.start_server(stub.serve, "127.0.0.1", 0)
        async with server:
            stub.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            monkeypatch.setenv("AWS_ENDPOINT_URL", stub.url)
            async with open_place("s3://bucket/run") as store:
                yield store.with_patience(ONCE), stub

    return open_it


async def test_a_create_says_that_it_is_one_and_what_its_bytes_are(opened: Callable[..., Any]) -> None:
    async with opened(answer(200, ETag='"x"')) as (store, stub):
        assert await store.create("k", b"some bytes") is True
        await store.put("k", memoryview(b"other bytes"))
        created, put = stub.asked
        assert [(r.method, r.path, r.body) for r in (created, put)] == [
            ("PUT", "/bucket/run/k", b"some bytes"),
            ("PUT", "/bucket/run/k", b"other bytes"),
        ]
        assert (created.headers.get("if-none-match"), put.headers.get("if-none-match")) == ("*", None)
        for r in (created, put):
            assert r.headers["x-amz-checksum-sha256"] == base64.b64encode(hashlib.sha256(r.body).digest()).decode()


async def test_a_failed_condition_is_an_answer(opened: Callable[..., Any]) -> None:
    async with opened(answer(412, "PreconditionFailed")) as (store, stub):
        assert await store.create("k", b"x") is False
        assert len(stub.asked) == 1


@pytest.mark.parametrize(
    "reply",
    [
        answer(409, "ConditionalRequestConflict"),
        answer(409, "OperationAborted"),
        answer(500, "InternalError"),
        answer(503, "SlowDown"),
        b"",
    ],
    ids=["conflict", "aborted", "error", "slow down", "no reply"],
)
async def test_a_create_of_unknown_outcome_is_sent_once_and_said_to_be_unknown(
    opened: Callable[..., Any], reply: bytes
) -> None:
    async with opened(reply) as (store, stub):
        with pytest.raises(Unavailable):
            await store.create("k", b"x")
        assert len(stub.asked) == 1
        with pytest.raises(Unavailable):
            await store.put("k", b"x")
        assert len(stub.asked) == 2


@pytest.mark.parametrize(
    ("reply", "raised", "said"),
    [
        (answer(404, "NoSuchKey"), ObjectMissing, "k"),
        (answer(404), Unavailable, "not as a store answers"),
        (answer(404, "NoSuchBucket"), Denied, "there is no such bucket"),
        (answer(403, "AccessDenied"), Denied, r"access denied \(AccessDenied\)"),
        (answer(403, "SomethingNew"), Denied, r"refused \(SomethingNew\)"),
        (answer(401), Denied, "refused"),
        (answer(403, "InvalidObjectState"), Denied, "archive"),
        (answer(503, "ServiceUnavailable"), Unavailable, "ServiceUnavailable: said so"),
        (answer(500), Unavailable, "500"),
        (b"", Unavailable, r"at http://127\.0\.0\.1:\d+: "),
        (part(b"abc", 0, 3, Content_Length="7", Connection="close"), Unavailable, "127.0.0.1"),
    ],
)
async def test_every_refusal_has_its_meaning(
    opened: Callable[..., Any], reply: bytes, raised: type[Exception], said: str
) -> None:
    async with opened(reply) as (store, stub):
        with pytest.raises(raised, match=said):
            await store.get("k")
        assert len(stub.asked) == 1


@pytest.mark.parametrize("what", DOING)
async def test_a_denied_request_is_named(opened: Callable[..., Any], what: str) -> None:
    async with opened(answer(403, "AccessDenied")) as (store, _):
        with pytest.raises(Denied, match=rf"access denied \(AccessDenied\) for {what}[:,]"):
            await DOING[what](store)


async def test_an_object_that_is_replaced_between_two_ranges_did_not_come(
    opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket, "RANGE_BYTES", 4)
    async with opened(part(b"abcd", 0, 8), answer(412, "PreconditionFailed")) as (store, stub):
        with pytest.raises(Unavailable, match="k was replaced while it was read"):
            await store.get("k")
        assert [r.headers["range"] for r in stub.asked] == ["bytes=0-3", "bytes=4-7"]
        assert stub.asked[1].headers["if-match"] == '"one"'
    async with opened(part(b"abcd", 0, 8), part(b"efgh", 4, 8)) as (store, _):
        assert bytes(await store.get("k")) == b"abcdefgh"


async def test_deleting_what_is_not_there_is_harmless_but_not_where_there_is_no_bucket(
    opened: Callable[..., Any],
) -> None:
    async with opened(answer(404, "NoSuchKey")) as (store, stub):
        await store.delete("k")
        assert [(r.method, r.path) for r in stub.asked] == [("DELETE", "/bucket/run/k")]
    async with opened(answer(404, "NoSuchBucket")) as (store, _):
        with pytest.raises(Denied, match="no such bucket"):
            await store.delete("k")


async def test_a_write_that_nobody_reads_ends(opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "READ_TIMEOUT", timedelta(seconds=0.2))
    async with opened(SILENCE) as (store, _):
        with pytest.raises(Unavailable, match="no answer in time"):
            await store.put("k", b"x")


@pytest.mark.parametrize("request_", ["get", "get_range", "list"])
async def test_a_read_that_nobody_answers_ends_and_the_next_uses_another_connection(
    opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, request_: str
) -> None:
    monkeypatch.setattr(bucket, "READ_TIMEOUT", timedelta(seconds=0.2))
    reads = {
        "get": lambda store: store.get("k"),
        "get_range": lambda store: store.get_range("k", 0, 3),
        "list": lambda store: store.list("p/"),
    }
    async with opened(SILENCE, answer(404, "NoSuchKey")) as (store, stub):
        with pytest.raises(Unavailable):
            await reads[request_](store)
        with pytest.raises((ObjectMissing, Unavailable)):
            await reads[request_](store)
        assert len(stub.asked) == 2, "the silent connection is not used again"


# --- credentials ------------------------------------------------------------------------------------------------------


def test_the_environment_alone_is_enough_and_its_parts_win_in_order(tmp_path: Path) -> None:
    known = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "eu-west-1"}
    found = access(known)
    assert (found.region, found.endpoint, found.authorities) == ("eu-west-1", None, None)
    assert asyncio.run(found.identity.ask()) == {
        "access_key_id": "a",
        "secret_access_key": "b",
        "token": None,
        "expires_at": None,
    }
    more = {"AWS_ENDPOINT_URL": "http://all", "AWS_SESSION_TOKEN": "t", "AWS_DEFAULT_REGION": "x"}
    found = access(known | more)
    assert (found.region, found.endpoint, asyncio.run(found.identity.ask())["token"]) == (
        "eu-west-1",
        "http://all",
        "t",
    )
    assert access(known | more | {"AWS_ENDPOINT_URL_S3": "http://s3"}).endpoint == "http://s3"
    (tmp_path / "ca.pem").write_bytes(b"certificates")
    assert access(known | {"AWS_CA_BUNDLE": str(tmp_path / "ca.pem")}).authorities == b"certificates"
    with pytest.raises(InputError, match="AWS_CA_BUNDLE"):
        access(known | {"AWS_CA_BUNDLE": str(tmp_path / "nothing")})


async def test_a_profile_of_aws_files_is_what_botocore_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, secrets = tmp_path / "config", tmp_path / "credentials"
    config.write_text("[profile lab]\nregion = eu-north-1\nendpoint_url = http://lab:9000\n")
    secrets.write_text("[lab]\naws_access_key_id = from\naws_secret_access_key = file\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(secrets))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    found = access()
    asked = await found.identity.ask()
    assert (found.region, found.endpoint) == ("eu-north-1", "http://lab:9000")
    assert (asked["access_key_id"], asked["secret_access_key"]) == ("from", "file")
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(InputError, match="nobody"):
        access()


# --- integrity --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("client", ["s3", "s3+aiobotocore"])
async def test_a_store_that_compares_no_sum_is_found_out(opened: Callable[..., Any], client: str) -> None:
    async with opened(answer(400, "BadDigest")) as (_, stub):
        assert await compares_sums(f"{client}://bucket/run", "k", single_threaded()) is True
    async with opened(answer(200, ETag='"x"'), answer(204)) as (_, stub):
        assert await compares_sums(f"{client}://bucket/run", "k", single_threaded()) is False
        assert [r.method for r in stub.asked] == ["PUT", "DELETE"]
        wrong = "x-amz-checksum-sha256" if client == "s3" else "content-md5"
        assert wrong in stub.asked[0].headers


async def test_a_condition_that_does_not_hold_shows_the_permission(opened: Callable[..., Any]) -> None:
    """The doctor asks whether a role may create a key that exists, as an owner's run object does."""
    answers = answer(400, "BadDigest"), answer(412, "PreconditionFailed"), answer(403, "AccessDenied")
    async with opened(*answers), open_probe("s3://bucket/run", "k", single_threaded()) as probe:
        assert probe is not None
        await probe("run", True)
        with pytest.raises(Denied):
            await probe("run", True)


async def test_a_folder_has_no_sum_to_compare(tmp_path: Path) -> None:
    assert await compares_sums(str(tmp_path), "k", single_threaded()) is None


# --- Google -----------------------------------------------------------------------------------------------------------


async def test_google_is_asked_in_its_own_words(
    opened: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(answer(200, ETag='"x"'), answer(412), answer(404, "NoSuchKey")) as (_, stub):
        key = {
            "gcs_base_url": stub.url,
            "disable_oauth": True,
            "client_email": "",
            "private_key": "",
            "private_key_id": "",
        }
        (tmp_path / "key.json").write_text(json.dumps(key))
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "key.json"))
        async with open_place("gs://bucket/run") as store:
            store = store.with_patience(ONCE)
            assert await store.create("k", b"x") is True
            assert await store.create("k", b"x") is False
            with pytest.raises(ObjectMissing):
                await store.get("k")
        assert [(r.method, r.path) for r in stub.asked] == [("PUT", "/bucket/run%2Fk")] * 2 + [
            ("GET", "/bucket/run%2Fk")
        ]
        assert [r.headers.get("x-goog-if-generation-match") for r in stub.asked] == ["0", "0", None]


async def test_a_large_object_in_pieces_is_put_together_away_from_the_loop(
    opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, threads = Gathered.part, list[int]()

    def part(gathered: Gathered, start: int, stop: int) -> memoryview:
        threads.append(threading.get_ident())
        return own(gathered, start, stop)

    monkeypatch.setattr(Gathered, "part", part)
    async with opened(answer(200, ETag='"x"')) as (store, stub):
        for size in (10, 1 << 18):
            await store.put("k", Gathered([b"a" * size, b"b" * size]))
            assert stub.asked[-1].body == b"a" * size + b"b" * size
    small, large = threads
    assert small == threading.get_ident() != large


LINGERING = """
import asyncio, sys, threading, time
from asyncio.selector_events import BaseSelectorEventLoop as Loop
from isthmus.agent.ports import open_place

wake = Loop._write_to_self

def slowly(loop):
    wake(loop)
    if threading.get_ident() not in {t.ident for t in threading.enumerate()}:
        time.sleep(0.3)  # the loop goes on: a busy machine does that to any thread

Loop._write_to_self = slowly

class Ending:
    def __del__(self, sleep=time.sleep):
        sleep(0.6)

sys.ending = Ending()  # the interpreter is still ending when that thread comes back

async def main():
    async with open_place("s3://bucket/run") as store:
        print(bytes(await store.get("k")).decode())

asyncio.run(main())
"""


async def test_a_process_ends_well_though_a_thread_of_the_client_is_late(opened: Callable[..., Any]) -> None:
    """Without `wait_for_foreign_threads`, Python before 3.14 aborts the process."""
    async with opened(part(b"bytes", 0, 5)) as (_, stub):
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", LINGERING, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        out, err = await child.communicate()
        assert (child.returncode, out, err) == (0, b"bytes\n", b""), stub.asked

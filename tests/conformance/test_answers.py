"""One table says what each answer of a bucket means for each kind of request, and each client keeps to it.

A test server gives the table's answer to the request under test, and a store's normal answers to all others.
"""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from urllib.parse import parse_qs, urlsplit

import pytest

from isthmus.errors import BucketMissing, Denied, ObjectMissing, StoreFull, Unavailable
from isthmus.format.records.frame import Gathered
from isthmus.runtime.clock import single_threaded
from isthmus.store import EdgeStore, Patience, bucket, open_store, s3
from support.identities import Request, serving

PART = 1 << 10
WHEN = "Mon, 23 Nov 2026 12:00:00 GMT"
PAGE = b"<html><body>404 page not found</body></html>"
CLIENTS = ("s3", "s3+aiobotocore", "gs", "az")

Raw = tuple[int, bytes, dict[str, str]]
"""Status, body and headers of an answer."""


def said(status: int, code: str = "", body: bytes = b"", **headers: str) -> Raw:
    body = body or (f"<Error><Code>{code}</Code><Message>so</Message></Error>".encode() if code else b"")
    return status, body, {name.replace("_", "-"): value for name, value in headers.items()}


CUT: Raw = (0, b"", {})
"""The connection ends without an answer."""

LISTING = (
    b'<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>bucket</Name><KeyCount>1</KeyCount>'
    b"<IsTruncated>false</IsTruncated><Contents><Key>run/p/k</Key><LastModified>2026-11-23T12:00:00.000Z</LastModified>"
    b"<ETag>&quot;x&quot;</ETag><Size>3</Size><StorageClass>STANDARD</StorageClass></Contents></ListBucketResult>"
)
NOTHING = LISTING.partition(b"<Contents>")[0].replace(b">1<", b">0<") + b"</ListBucketResult>"
GOOD: Mapping[str, Raw] = {
    "get": said(206, body=b"abc", ETag='"x"', Content_Range="bytes 0-2/3", Last_Modified=WHEN),
    "list": said(200, body=LISTING),
    "put": said(200, ETag='"x"'),
    "create": said(200, ETag='"x"'),
    "delete": said(204),
    "begin": said(
        200, body=b"<InitiateMultipartUploadResult><Bucket>bucket</Bucket><Key>run/k</Key><UploadId>u</UploadId>"
        b"</InitiateMultipartUploadResult>",
    ),
    "part": said(200, ETag='"x"'),
    "complete": said(
        200, body=b"<CompleteMultipartUploadResult><Bucket>bucket</Bucket><Key>run/k</Key><ETag>&quot;x&quot;</ETag>"
        b"</CompleteMultipartUploadResult>",
    ),
    "abort": said(204),
}  # fmt: skip


BATCH = "multipart/mixed; boundary=b"
AZURE: Mapping[str, Raw] = {
    "list": said(
        200, body=b'<EnumerationResults ContainerName="bucket"><Blobs><Blob><Name>run/p/k</Name><Properties><Etag>x</Etag>'
        b"<Last-Modified>" + WHEN.encode() + b"</Last-Modified><Content-Length>3</Content-Length><Content-Type>x</Content-Type>"
        b"</Properties></Blob></Blobs><NextMarker/></EnumerationResults>",
    ),
    "delete": said(
        202, body=b"--b\r\nContent-Type: application/http\r\nContent-ID: 0\r\n\r\nHTTP/1.1 202 Accepted\r\n\r\n--b--\r\n",
        Content_Type=BATCH,
    ),
    "part": said(201),
    "complete": said(201, ETag='"x"'),
}  # fmt: skip
"""Where Azure's good answers differ: deletions are batches of one, and nothing begins an upload in parts."""

NONE_AT_AZURE = b"<EnumerationResults><Blobs/><NextMarker/></EnumerationResults>"


def good(client: str, kind: str) -> Raw:
    return AZURE.get(kind, GOOD[kind]) if client == "az" else GOOD[kind]


AZURES_CODES = {
    b"NoSuchKey": b"BlobNotFound",
    b"NoSuchBucket": b"ContainerNotFound",
    b"AccessDenied": b"AuthorizationFailure",
}


CREATES = {"if-none-match", "x-goog-if-generation-match"}


def kind_of(request: Request) -> str:
    asked = parse_qs(urlsplit(request.path).query, keep_blank_values=True)
    if "comp" in asked:
        return {"block": "part", "blocklist": "complete", "batch": "delete", "list": "list"}[asked["comp"][0]]
    if request.method == "POST":
        return "begin" if "uploads" in asked else "complete"
    if request.method == "PUT":
        creates = CREATES & request.headers.keys()
        return "part" if "partNumber" in asked else "create" if creates else "put"
    if request.method == "DELETE":
        return "abort" if "uploadId" in asked else "delete"
    return "list" if "list-type" in asked else "get"


LARGE = Gathered([b"a" * PART, b"b" * PART])
SENT: Mapping[str, Callable[[EdgeStore], Awaitable[object]]] = {
    "get": lambda store: store.get("k"),
    "range": lambda store: store.get_range("k", 0, 3),
    "list": lambda store: store.list("p/"),
    "put": lambda store: store.put("k", b"x"),
    "create": lambda store: store.create("k", b"x"),
    "delete": lambda store: store.delete("k"),
    "begin": lambda store: store.put("k", LARGE),
    "part": lambda store: store.put("k", LARGE),
    "complete": lambda store: store.put("k", LARGE),
}

AWAY, DENIED, MISSING, NO_BUCKET, FULL = Unavailable, Denied, ObjectMissing, BucketMissing, StoreFull
DONE = {"get": b"abc", "range": b"abc", "list": ["p/k"], "create": True}
"""Results of requests that are answered well. Requests that are not in it return None."""

Meaning = type[Exception] | object

READS = ("get", "range")
TABLE: Mapping[str, tuple[Raw, Meaning, Mapping[str, Meaning]]] = {
    # name: (answer, meaning, other meanings for some requests)
    "404 in the store's words": (said(404, "NoSuchKey"), AWAY, {**dict.fromkeys(READS, MISSING), "delete": None}),
    "404 of a gateway": (said(404, body=PAGE, Content_Type="text/html"), AWAY, {}),
    "404 without a body": (said(404), AWAY, {}),
    "404 of another code": (said(404, "NotHere"), AWAY, {}),
    "404 no bucket": (said(404, "NoSuchBucket"), NO_BUCKET, {}),
    "404 no upload": (said(404, "NoSuchUpload"), AWAY, {}),
    "301 with a region": (said(301, "PermanentRedirect", x_amz_bucket_region="eu-west-1"), DENIED, {}),
    "400 of a gateway": (said(400, body=PAGE), AWAY, {}),
    "400 too slow": (said(400, "RequestTimeout"), AWAY, {}),
    "400 damaged on the way": (said(400, "BadDigest"), AWAY, {}),
    "400 region": (said(400, "AuthorizationHeaderMalformed"), DENIED, {}),
    "401": (said(401), DENIED, {}),
    "403": (said(403, "AccessDenied"), DENIED, {}),
    "403 of a gateway": (said(403, body=PAGE), DENIED, {}),
    "403 clock": (said(403, "RequestTimeTooSkewed"), DENIED, {}),
    "403 new code": (said(403, "SomethingNew"), DENIED, {}),
    "405": (said(405, "MethodNotAllowed"), DENIED, {}),
    "405 of a gateway": (said(405, body=PAGE), DENIED, {}),
    "409": (said(409, "OperationAborted"), AWAY, {}),
    "409 condition": (said(409, "ConditionalRequestConflict"), AWAY, {}),
    "412": (said(412, "PreconditionFailed"), AWAY, {"create": False}),
    "412 without a body": (said(412), AWAY, {"create": False}),
    "416": (said(416, "InvalidRange"), AWAY, dict.fromkeys(READS, b"")),
    "429": (said(429, "TooManyRequests", Retry_After="1"), AWAY, {}),
    "500": (said(500, "InternalError"), AWAY, {}),
    "500 without a body": (said(500), AWAY, {}),
    "501": (said(501, "NotImplemented"), DENIED, {}),
    "502 of a gateway": (said(502, body=PAGE), AWAY, {}),
    "503": (said(503, "SlowDown", Retry_After="1"), AWAY, {}),
    "503 of a gateway": (said(503, body=PAGE, Retry_After="1"), AWAY, {}),
    "504 without a body": (said(504), AWAY, {}),
    "507": (said(507, "InsufficientStorage"), FULL, {}),
    "507 of a gateway": (said(507, body=PAGE), FULL, {}),
    "507 its disks are full": (said(507, "XMinioStorageFull"), FULL, {}),
    "403 the quota is used up": (said(403, "QuotaExceeded"), FULL, {}),
    "no answer": (CUT, AWAY, {}),
    # No store answers like this, but the status means success.
    "200 and a page": (said(200, body=PAGE, Content_Type="text/html"), AWAY, {"delete": None}),
    "200 and nothing": (said(200), AWAY, {"delete": None}),
    "200 and an error inside": (said(200, "InternalError"), AWAY, {"delete": None}),
    "204": (said(204), AWAY, {"delete": None}),
}  # fmt: skip

READ: Mapping[str, Raw] = {
    # name: an answer to a read that counts as an outage
    "206 and less than it announces": (
        206, b"ab", {"ETag": '"x"', "Content-Range": "bytes 0-2/3", "Last-Modified": WHEN, "Content-Length": "3"},
    ),
    "200 and all of it, where a range was asked for": said(200, body=b"abcdef", ETag='"x"', Last_Modified=WHEN),
}  # fmt: skip

UNLIKE: Mapping[tuple[str, str, str], Meaning] = {
    # Meanings that differ for a client.
    ("s3+aiobotocore", "200 and an error inside", "delete"): AWAY,  # to delete again is harmless
    # obstore takes any page for an empty listing. `EdgeStore.landmark` detects this; see below.
    **{(client, f"200 and {what}", "list"): [] for client in ("s3", "gs") for what in ("a page", "an error inside")},
    **{("az", f"20{what}", "delete"): AWAY for what in ("0 and a page", "0 and nothing", "0 and an error inside", "4")},
    # Azure does not complete an upload of which a part is missing.
    **{("az", f"20{what}", "part"): None for what in ("0 and a page", "0 and nothing", "0 and an error inside", "4")},
}


@contextmanager
def leading_to(url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make each client find its store at this URL."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    for name, value in {"ACCOUNT_NAME": "account", "ACCOUNT_KEY": "a2V5", "ENDPOINT": url}.items():
        monkeypatch.setenv(f"AZURE_STORAGE_{name}", value)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as key:
        who = {"client_email": "", "private_key": "", "private_key_id": ""}
        key.write(json.dumps({"gcs_base_url": url, "disable_oauth": True, **who}))
        key.flush()
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", key.name)
        yield


@asynccontextmanager
async def answering(
    client: str, monkeypatch: pytest.MonkeyPatch, tried: str, raw: Raw
) -> AsyncIterator[tuple[EdgeStore, list[str]]]:
    asked: list[str] = []

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        kind = kind_of(request)
        asked.append(kind)
        status, body, headers = raw if kind == ("get" if tried == "range" else tried) else good(client, kind)
        if client == "az":
            for code, azures in AZURES_CODES.items():
                body = body.replace(code, azures)
        if status:
            told = {"Content-Length": str(len(body)), "Connection": "close", **headers}
            lines = "".join(f"{name}: {value}\r\n" for name, value in told.items())
            writer.write(f"HTTP/1.1 {status} So\r\n{lines}\r\n".encode() + (b"" if request.method == "HEAD" else body))
            await writer.drain()

    for name, value in {"ACCESS_KEY_ID": "k", "SECRET_ACCESS_KEY": "s", "REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    for module in (bucket, s3):
        monkeypatch.setattr(module, "PART_BYTES", PART)
    monkeypatch.setattr(bucket, "PART_TRIES", 0)
    monkeypatch.setattr(s3, "PART_TRIES", 1)
    async with serving(answer) as url:
        with leading_to(url, monkeypatch):
            async with open_store(f"{client}://bucket/run", single_threaded()) as store:
                yield store.with_patience(Patience(attempts=1)), asked


def cases() -> list[object]:
    """Return all cases. Only gets and creates of one client run in the quick tier."""

    def tier(client: str, tried: str) -> list[pytest.MarkDecorator]:
        if client != "s3" or tried in ("range", "begin", "part"):
            return [pytest.mark.tier("all")]
        return [] if tried in ("get", "create") else [pytest.mark.tier("test")]

    return [
        pytest.param(client, name, tried, marks=tier(client, tried))
        for client in CLIENTS
        for name in TABLE
        for tried in SENT
        if (client, tried) != ("az", "begin")
    ]


@pytest.mark.parametrize(("client", "name", "tried"), cases())
async def test_every_answer_has_its_meaning(
    client: str, name: str, tried: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, meaning, but = TABLE[name]
    wanted = UNLIKE.get((client, name, tried), but.get(tried, meaning))
    async with answering(client, monkeypatch, tried, raw) as (store, asked):
        if isinstance(wanted, type):
            with pytest.raises(wanted) as caught:
                await SENT[tried](store)
            assert type(caught.value) is wanted
        else:
            found = await SENT[tried](store)
            assert (bytes(found) if isinstance(found, bytearray | memoryview) else found) == wanted
        assert ("get" if tried == "range" else tried) in asked


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("tried", SENT)
async def test_a_good_answer_is_taken(client: str, tried: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with answering(client, monkeypatch, "nothing", CUT) as (store, _):
        found = await SENT[tried](store)
        if tried == "list":
            found = [entry.key for entry in found]  # type: ignore[attr-defined]
        assert (bytes(found) if isinstance(found, bytearray | memoryview) else found) == DONE.get(tried)


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("tried", READS)
@pytest.mark.parametrize("name", READ)
async def test_what_is_not_the_range_that_was_asked_for_did_not_come(
    client: str, tried: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with answering(client, monkeypatch, tried, READ[name]) as (store, _):
        with pytest.raises(Unavailable):
            await SENT[tried](store)


@pytest.mark.parametrize("client", CLIENTS)
async def test_nothing_is_believed_of_a_store_that_does_not_list_what_is_there(
    client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = NONE_AT_AZURE if client == "az" else NOTHING
    for raw, raised in ((said(200, body=PAGE), True), (said(200, body=nothing), True), (good(client, "list"), False)):
        async with answering(client, monkeypatch, "list", raw) as (store, asked):
            store.landmark = "snapshots/00000/"
            if raised:
                told = r"its listing is empty|the answer to a listing|invalid list response"
                with pytest.raises(Unavailable, match=told):
                    await store.list("p/")
            else:
                assert [entry.key for entry in await store.at_start.list("p/")] == ["p/k"]
                assert asked == ["list"], "a listing with an object in it must be believed"


async def test_a_listing_of_azure_is_read_to_its_last_page(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = [AZURE["list"][1].replace(b"<NextMarker/>", b"<NextMarker>2</NextMarker>"), AZURE["list"][1]]

    async def answer(request: Request, _: object) -> tuple[int, bytes]:
        asked = parse_qs(urlsplit(request.path).query)
        return 200, pages[1].replace(b"run/p/k", b"run/p/a") if asked.get("marker") == ["2"] else pages[0]

    async with answering("az", monkeypatch, "nothing", CUT), serving(answer) as url:
        with leading_to(url, monkeypatch):
            async with open_store("az://bucket/run", single_threaded()) as store:
                assert [entry.key for entry in await store.list("p/")] == ["p/a", "p/k"]


@pytest.mark.parametrize("client", CLIENTS)
async def test_an_empty_listing_is_believed_of_a_store_that_lists_the_rest(
    client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    nothing = NONE_AT_AZURE if client == "az" else NOTHING

    async def answer(request: Request, _: object) -> tuple[int, bytes]:
        asked.append(parse_qs(urlsplit(request.path).query)["prefix"][0])
        there = good(client, "list")[1].replace(b"run/p/k", b"run/snapshots/00000/k")
        return 200, there if "snapshots" in request.path else nothing

    async with answering(client, monkeypatch, "nothing", CUT), serving(answer) as url:
        with leading_to(url, monkeypatch):
            async with open_store(f"{client}://bucket/run", single_threaded()) as store:
                store.landmark = "snapshots/00000/"
                assert await store.with_patience(Patience(attempts=1)).list("p/") == []
    assert asked == ["run/p/", "run/snapshots/00000/", "run/p/"]


# --- another host -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("status", [302, 307])
@pytest.mark.parametrize("tried", ["get", "range", "put", "create", "list"])
async def test_a_read_follows_to_another_host_and_takes_no_credentials_there(
    client: str, status: int, tried: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buckets of Hugging Face redirect reads to a network of copies. Writes and listings follow no redirect."""
    came: list[Request] = []

    async def elsewhere(request: Request, writer: asyncio.StreamWriter) -> None:
        came.append(request)
        ranged = "range" in request.headers
        told = {"Content-Length": "3", "ETag": '"x"', "Last-Modified": WHEN, "Connection": "close"}
        told |= {"Content-Range": "bytes 0-2/3"} if ranged and request.method == "GET" else {}
        kind = 405 if request.method == "PUT" else 206 if ranged else 200
        lines = "".join(f"{name}: {value}\r\n" for name, value in told.items())
        writer.write(f"HTTP/1.1 {kind} So\r\n{lines}\r\nabc".encode())
        await writer.drain()

    async with serving(elsewhere) as there:
        raw = said(status, Location=f"{there}/copy?signature=1")
        async with answering(client, monkeypatch, tried, raw) as (store, asked):
            if tried in READS:
                assert bytes(await SENT[tried](store)) == b"abc"  # type: ignore[call-overload]
                assert len(came) == 1
            else:
                with pytest.raises((Unavailable, Denied)) as caught:
                    await SENT[tried](store)
                assert not isinstance(caught.value, BucketMissing | ObjectMissing)
    assert asked
    assert not any("authorization" in request.headers for request in came)

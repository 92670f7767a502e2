"""Imitations of stores with S3's protocol: a proxy before moto with the manners that a store's documents name."""

import http.client
import re
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from urllib.parse import parse_qs, urlsplit

import pytest

from advice.gate import gate

Raw = tuple[int, bytes, dict[str, str]]
"""Status, body and headers of an answer."""

Ask = Callable[[str, str, bytes, dict[str, str]], Raw]
"""Sends a request to moto: method, path, body, headers (names in small letters)."""

SLOW_S = 0.05
"""How long each PUT to a bucket of Hugging Face takes here."""

INSIDE = {"authorization": "AWS4-HMAC-SHA256 Credential=x/20261128/us-east-1/s3/aws4_request, Signature=0"}
"""With which an imitation asks moto by itself. Moto verifies no signature, but refuses requests without one."""

FOLLOWS = re.compile(r"aws-cli|botocore|aws-sdk-rust", re.IGNORECASE)
"""Clients for which Hugging Face's gateway reads by itself. It redirects all others."""


def refusal(status: int, code: str, message: str) -> Raw:
    """Return an error answer in S3's form."""
    return status, f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode(), {}


def upstream(url: str) -> Ask:
    """Return what sends requests to the server at a URL."""

    def ask(method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Raw:
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
        connection.request(method, path, body, dict(headers))
        got = connection.getresponse()
        content = got.read()
        connection.close()
        dropped = ("transfer-encoding", "connection", "date", "server", "content-length")
        return got.status, content, {n: v for n, v in got.getheaders() if n.lower() not in dropped}

    return ask


@contextmanager
def mannered(manners: str, url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Run the imitation of a store before the moto at a URL, and lead clients to it; yield what it has done how often.

    `manners`: `hugging-face`, `r2` or `directory` (of S3 Express One Zone).
    """
    seen: Counter[str] = Counter()
    with {"hugging-face": hugging_face, "r2": r2, "directory": directory}[manners](upstream(url), seen) as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield seen


def parts(path: str) -> tuple[str, str, dict[str, list[str]]]:
    """Return the bucket, the key and the query of a request."""
    at = urlsplit(path)
    bucket, _, key = at.path.lstrip("/").partition("/")
    return bucket, key, parse_qs(at.query, keep_blank_values=True)


def unreadable(headers: Mapping[str, str]) -> bool:
    """Return whether a request has a checksum behind its body, which these stores do not parse."""
    return "x-amz-trailer" in headers or "aws-chunked" in headers.get("content-encoding", "")


@contextmanager
def hugging_face(ask: Ask, seen: Counter[str]) -> Iterator[Mapping[str, str]]:
    """Storage Buckets of Hugging Face, through their gateway for S3.

    The endpoint names a namespace. A read is redirected to a network of copies, which takes no credentials. There is no
    user metadata, no ListObjects but version 2, and no condition on a read. Writes are slow.
    """

    def copies(method: str, path: str, body: bytes, headers: dict[str, str]) -> Raw:
        if "authorization" in headers or "signature=" not in path:
            return 400, b"only signed URLs, and no other credentials", {}
        ranged = {"range": headers["range"]} if "range" in headers else {}
        seen["copied"] += 1
        status, content, told = ask(method, urlsplit(path).path, b"", {**INSIDE, **ranged})
        kept = {n: v for n, v in told.items() if n.lower() in ("etag", "last-modified", "content-range")}
        return (status, content, kept) if status < 400 else (status, b"not here", {})

    with gate("", copies) as cdn:

        def gateway(method: str, path: str, body: bytes, headers: dict[str, str]) -> Raw:
            if not path.startswith("/namespace/"):
                return refusal(404, "NoSuchBucket", "the endpoint has no namespace")
            path = path.removeprefix("/namespace")
            _, key, query = parts(path)
            if unreadable(headers) or "//" in urlsplit(path).path:
                return refusal(400, "InvalidRequest", "a trailing checksum, or an empty part of a key")
            if any(name.startswith("x-amz-meta-") for name in headers):
                return refusal(400, "InvalidRequest", "user metadata is not stored")
            if method == "GET" and not key and query.get("list-type") != ["2"]:
                return refusal(501, "NotImplemented", "only ListObjectsV2")
            if method == "GET" and key:
                headers = {n: v for n, v in headers.items() if n not in ("if-match", "if-none-match")}
                there, _, _ = ask("HEAD", path, b"", INSIDE)
                if there == 200 and not FOLLOWS.search(headers.get("user-agent", "")):
                    return 302, b"", {"Location": f"{cdn.url}{path}?signature=1"}
            if method == "PUT":
                seen["slow"] += 1
                time.sleep(SLOW_S)
            return ask(method, path, body, headers)

        with gate("", gateway) as there:
            yield {"AWS_ENDPOINT_URL": f"{there.url}/namespace"}


@contextmanager
def r2(ask: Ask, seen: Counter[str]) -> Iterator[Mapping[str, str]]:
    """R2 of Cloudflare: only one write of a key at a time, parts of one size, and a region of its own."""
    writing: defaultdict[str, Lock] = defaultdict(Lock)
    sizes: defaultdict[str, dict[int, int]] = defaultdict(dict)

    def answer(method: str, path: str, body: bytes, headers: dict[str, str]) -> Raw:
        _, key, query = parts(path)
        if not re.search(r"/(auto|us-east-1)/s3/", headers.get("authorization", "")):
            return refusal(400, "InvalidRegionName", "the region is auto")
        if unreadable(headers) or headers.keys() & {"x-amz-acl", "x-amz-tagging", "x-amz-object-lock-mode"}:
            return refusal(501, "NotImplemented", "this header is not implemented")
        if "partNumber" in query:
            sizes[query["uploadId"][0]][int(query["partNumber"][0])] = len(body)
        elif "uploadId" in query and method == "POST":
            *before, _ = (size for _, size in sorted(sizes[query["uploadId"][0]].items()))
            if len(set(before)) > 1:
                return refusal(400, "InvalidPart", "all parts but the last must have one size")
        elif method == "PUT" and key:
            if not writing[key].acquire(blocking=False):
                seen["busy"] += 1
                return refusal(429, "TooManyRequests", "one write of a key at a time")
            try:
                return ask(method, path, body, headers)
            finally:
                writing[key].release()
        return ask(method, path, body, headers)

    with gate("", answer) as there:
        yield {"AWS_ENDPOINT_URL": there.url, "AWS_REGION": "auto"}


@contextmanager
def directory(ask: Ask, seen: Counter[str]) -> Iterator[Mapping[str, str]]:
    """A directory bucket of S3 Express One Zone: listings in no order, below whole folders, and ETags that mean nothing.

    Its sessions are not imitated: the library asks AWS's own host for them.
    """
    item = re.compile(rb"<Contents>.*?</Contents>", re.DOTALL)

    def answer(method: str, path: str, body: bytes, headers: dict[str, str]) -> Raw:
        _, key, query = parts(path)
        if not key and method == "GET":
            (prefix,) = query.get("prefix", [""])
            if (
                (prefix and not prefix.endswith("/"))
                or "start-after" in query
                or query.get("delimiter", ["/"]) != ["/"]
            ):
                return refusal(400, "InvalidRequest", "prefixes end with /, and there is no start-after")
            status, content, told = ask(method, path, body, headers)
            found = item.findall(content)[::-1]
            seen["unsorted"] += len(found) > 1
            return status, item.sub(lambda _: found.pop(0), content), told
        status, content, told = ask(method, path, body, headers)
        return status, content, {**told, **({"ETag": f'"{uuid.uuid4().hex}"'} if method == "PUT" else {})}

    with gate("", answer) as there:
        yield {"AWS_ENDPOINT_URL": there.url}

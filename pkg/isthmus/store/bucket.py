"""A store in a bucket, over obstore: S3, stores with its protocol, Google Cloud Storage, and Azure Blob Storage.

Only parts and ranges of large objects are retried here; a layer above retries other requests. Requests run on threads
of the library, outside the interpreter. A small request takes a quarter of the CPU time that aiobotocore needs for it
(`isthmus bench store`), and no request blocks the event loop.
"""

import asyncio
import atexit
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import numpy as np
import obstore
import obstore.store
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from typing_extensions import override

from isthmus.errors import Denied, InputError, Unavailable, first_cause, legible
from isthmus.format.records.frame import Blob, Body, Data, Gathered, blank, fill
from isthmus.runtime.clock import Runtime, wait_for_foreign_threads
from isthmus.runtime.descriptors import explained
from isthmus.runtime.urls import Place, redacted
from isthmus.store.base import PART_BYTES, RANGE_BYTES, Entry, Store, is_there, part_of
from isthmus.store.credentials import GOOGLE, Identity, access, azure_host, google_host, signer_of
from isthmus.store.refused import DENIED, EXISTS, EXPIRED, MISSING, RangeBeyondEnd, doubted, refusal, refused_read

PARTS_AT_ONCE = 4
RANGES_AT_ONCE = 8

CONNECT_TIMEOUT = timedelta(seconds=3)
READ_TIMEOUT = timedelta(seconds=15)
"""Longest wait for the first bytes of an answer, and between two reads of its body.

A connection that is silent for longer is given up, and the next try uses another.
"""

WRITE_LEAST = 64 << 10
"""A write that is slower than this many bytes a second, after `READ_TIMEOUT`, counts as hung."""

PUT_MAX = 5 << 30
"""Largest object that S3 accepts in one request [bytes]."""

_CHUNK_BYTES = 1 << 20
_NO_LIMIT = timedelta(days=1)
PART_TRIES = 3
"""Tries after the first, for each part that is written and for each range of a large object that is read."""

PART_PAUSE_S = 0.5
_FINAL = (PreconditionError, FileNotFoundError, PermissionDeniedError, UnauthenticatedError)
_BUCKET = re.compile(r"[a-zA-Z0-9.\-_]{1,255}")
_CONTAINER = re.compile(r"[a-z0-9](-?[a-z0-9]){2,62}")
_STATUS = re.compile(r"(?:status |\()code: (\d{3})")
_NOT_IN_BATCH = re.compile(r"Bulk delete request failed for key .*\(code: 404\)")
"""obstore deletes at Azure by a batch of one, whose answer has no code for a blob that does not exist."""

_CODE = re.compile(r"<Code>(\w[\w.]*)</Code>")
_MESSAGES = [
    re.compile(r"<Message>([^<]*)</Message>"),
    re.compile(r"<Details>([^<]*)</Details>"),
    re.compile(r"<AuthenticationErrorDetail>([^<]*)</AuthenticationErrorDetail>"),
    re.compile(r'"message"\s*:\s*"([^"]*)"'),
]
_TOKEN = "token request"
"""Words in obstore's error if Google or Azure gave no token for the requests."""

_BEYOND = "object was only"
"""Words in obstore's error if the store answers with a range that is not in the object (Azurite, at its very end)."""

_PROVIDER = "External AWS credential provider"
"""Words in obstore's error if the credentials could not be fetched."""

_ELSEWHERE = "redirect without LOCATION"
"""Words in obstore's error if a bucket of AWS is in another region."""

KEY_FILE = "GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_SERVICE_ACCOUNT"
"""The variables that name a key file of Google's."""

_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*(\w+)")
_LOOKUP = re.compile(r'failed to lookup address information: ([^"]+)"')
_SYSTEM = re.compile(r'message: "([^"]+)"')
"""What the tree of causes says if no connection was made: that of a name's look-up, and the system's."""

_NO_TLS = "InvalidContentType"
"""What it says if the first bytes of the answer are not those of TLS."""


atexit.register(wait_for_foreign_threads)


@dataclass(frozen=True, slots=True)
class Clients:
    """Three clients for one bucket, which differ in how long they wait and in what they retry."""

    read: Any
    write: Any
    """Sends everything once: the outcome of a write that failed is unknown, and a layer above decides what to do."""
    parts: Any
    """Retries each part of an upload by itself."""


class BucketStore(Store):
    """Objects of one bucket below an optional prefix."""

    def __init__(
        self, clients: Clients, prefix: str, url: str, where: str, runtime: Runtime, identity: Identity | None = None
    ) -> None:
        """`identity`: the source of the credentials, if this process fetches them."""
        self._clients = clients
        self._identity = identity
        self._prefix = prefix
        self._where = f"{url} at {where}"
        self._runtime = runtime
        self._whole = False
        self.url = url

    @override
    async def get(self, key: str) -> Body:
        try:
            return await self._read(key, 0, None)
        except RangeBeyondEnd:
            return bytearray()  # an empty object contains no range

    @override
    async def get_range(self, key: str, start: int, stop: int) -> Body:
        if stop <= start:
            return bytearray()
        try:
            return await self._read(key, start, stop)
        except RangeBeyondEnd:
            return bytearray()

    @override
    async def put(self, key: str, data: Data) -> None:
        try:
            await self._write(key, data, "overwrite")
        except (BaseError, OSError, TimeoutError) as error:
            self._fail(error, key, "writing")

    async def create(self, key: str, data: Blob) -> bool:
        """See `Store.create`. Beyond `PART_BYTES`, two concurrent creates may both return True.

        The completion of an upload in parts has no condition here; such large objects are named after their content. If
        a policy allows creating only with the condition, this object and all later ones are sent in one request.
        """
        try:
            if len(data) > PART_BYTES and await is_there(self, key):
                return False
            await self._write(key, data, "create")
        except PermissionDeniedError as error:
            if self._whole or not PART_BYTES < len(data) <= PUT_MAX:
                self._fail(error, key, "writing")
            self._whole = True
            return await self.create(key, data)
        except (AlreadyExistsError, PreconditionError) as error:
            # Azure says with 409 that the object exists. S3 says that two creates are under way, and none has won yet.
            if _status(error) == 409 and _code(error) not in EXISTS:
                self._fail(error, key, "writing")
            return False
        except (BaseError, OSError, TimeoutError) as error:
            self._fail(error, key, "writing")
        return True

    @override
    async def list(self, prefix: str) -> Sequence[Entry]:
        if prefix and not prefix.endswith("/"):
            raise ValueError(f"a prefix ends with '/': {prefix!r}")
        try:
            found = await obstore.list(self._clients.read, self._prefix + prefix, chunk_size=1000).collect_async()
        except (BaseError, OSError, TimeoutError) as error:
            self._fail(error, prefix, "listing")
        entries = (
            Entry(item["path"].removeprefix(self._prefix), item["size"], item["last_modified"].timestamp())
            for item in found
        )
        return sorted(entries)

    @override
    async def delete(self, key: str) -> None:
        try:
            await obstore.delete_async(self._clients.write, self._prefix + key)
        except (BaseError, OSError, TimeoutError) as error:
            if _code(error) not in MISSING:
                self._fail(error, key, "deleting")

    async def _write(self, key: str, data: Data, mode: Any) -> None:
        async with asyncio.timeout(READ_TIMEOUT.total_seconds() + len(data) / WRITE_LEAST):
            if len(data) > PART_BYTES and not (self._whole and mode == "create"):
                pieces = self._pieces(data if isinstance(data, Gathered) else Gathered([data]))
                await obstore.put_async(
                    self._clients.parts,
                    self._prefix + key,
                    pieces,
                    use_multipart=True,
                    chunk_size=PART_BYTES,
                    max_concurrency=PARTS_AT_ONCE,
                )
            else:
                whole = await part_of(data, 0, len(data), self._runtime) if isinstance(data, Gathered) else data
                await obstore.put_async(self._clients.write, self._prefix + key, whole, mode=mode, use_multipart=False)

    async def _pieces(self, data: Gathered) -> AsyncIterator[Blob]:
        for start in range(0, len(data), PART_BYTES):
            yield await part_of(data, start, min(start + PART_BYTES, len(data)), self._runtime)

    async def _read(self, key: str, start: int, stop: int | None) -> Body:
        """Return bytes [start, stop) of an object, or all from start; the answer to the first range tells the size."""
        try:
            last = start + RANGE_BYTES if stop is None else min(stop, start + RANGE_BYTES)
            first = await self._ask(key, {"range": (start, last)})
            end = first.meta["size"] if stop is None else min(stop, first.meta["size"])
            data = blank(end - start)
            size = min(last, end) - start
            if size == len(data):
                await self._drain(key, first, data)
                return data
            # All ranges must come from the same version of the object.
            same = {"if_match": first.meta["e_tag"]} if first.meta["e_tag"] else {}
            slots = asyncio.Semaphore(RANGES_AT_ONCE)

            async def one(at: int, answer: Any = None) -> None:
                """Read one range, and retry it by itself if it fails: the other ranges need not be read again."""
                part = data[at : at + RANGE_BYTES] if at else data[:size]
                async with slots:
                    for left in range(PART_TRIES, -1, -1):
                        try:
                            if answer is None:
                                answer = await self._ask(key, {"range": (start + at, start + at + len(part)), **same})
                            await self._drain(key, answer, part)
                            return
                        except (BaseError, OSError, TimeoutError, Unavailable) as error:
                            if not left or isinstance(error, _FINAL):
                                raise
                            answer = None
                            await asyncio.sleep(PART_PAUSE_S)

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(one(0, first))
                for at in range(size, len(data), RANGE_BYTES):
                    tasks.create_task(one(at))
        except BaseExceptionGroup as group:
            self._fail(first_cause(group), key, "reading")
        except (BaseError, OSError, TimeoutError) as error:
            self._fail(error, key, "reading")
        return data

    async def _ask(self, key: str, options: Any) -> Any:
        return await obstore.get_async(self._clients.read, self._prefix + key, options=options)

    async def _drain(self, key: str, answer: Any, data: memoryview) -> None:
        at = 0
        chunks = answer.stream(_CHUNK_BYTES) if len(data) > _CHUNK_BYTES else _once(answer)
        async for chunk in chunks:
            if at + len(chunk) > len(data):
                raise Unavailable(f"{self.url}: {key} sent more than the {len(data)} bytes it announced")
            fill(data[at : at + len(chunk)], np.frombuffer(chunk, np.uint8))
            at += len(chunk)
        if at != len(data):
            raise Unavailable(f"{self.url}: {key} ended after {at} of {len(data)} bytes")

    def _fail(self, error: BaseException, key: str, doing: str) -> NoReturn:
        """Raise what a failed request means. `doing`: its kind; only `reading` can find its object missing."""
        reads, what = doing == "reading", f"{doing} {key}".strip()
        status, code = _status(error), _code(error)
        signer = self._identity.origin if self._identity else signer_of(self.url)
        if code in EXPIRED and self._identity is not None and self._identity.doubt():
            raise doubted(code, where=self._where, signer=signer) from None
        if _TOKEN in _words(error):
            kind = Denied if status is not None and status < 500 else Unavailable
            whom = "Azure" if self.url.startswith("az:") else "Google"
            why = _told(error).partition(": start the store")[0]  # what gives out tokens is no store
            raise kind(f"{self._where}: no credentials from {whom}: {why}, for {signer}") from None
        if _PROVIDER in str(error) and self._identity is not None and (failed := self._identity.failure) is not None:
            raise type(failed)(f"{self._where}: {failed}") from None
        if reads and _BEYOND in _words(error):
            raise RangeBeyondEnd(key) from None
        if reads and isinstance(error, PreconditionError) and status == 412:
            raise Unavailable(f"{self._where}: {key} was replaced while it was read") from None
        if status is not None or code:
            about = code or str(status), status, _said(error)
            if reads:
                raise refused_read(*about, key=key, url=self.url, where=self._where, signer=signer, what=what) from None
            raise refusal(*about, url=self.url, where=self._where, signer=signer, what=what) from None
        if _ELSEWHERE in str(error):
            raise Denied(
                f"{self._where}: {DENIED['PermanentRedirect']}: set AWS_REGION, or ?region= in the URL"
            ) from None
        if isinstance(error, UnauthenticatedError | PermissionDeniedError):
            raise Denied(f"{self._where}: {_told(error).rpartition('Denied: ')[2]}") from None
        if isinstance(error, TimeoutError):
            raise Unavailable(f"{self._where}: no answer in time") from None
        if not isinstance(error, BaseError | OSError):
            raise error
        raise Unavailable(f"{self._where}: {_told(error)}") from None


async def _once(answer: Any) -> AsyncIterator[Any]:
    if whole := await answer.bytes_async():
        yield whole


def _words(error: BaseException) -> str:
    """Return the library's message without the tree of causes that follows it."""
    return str(error).partition("\n\nDebug source")[0]


def _told(error: BaseException) -> str:
    # Only the tree of causes shows that the certificate was the reason.
    if found := _CERTIFICATE.search(str(error)):
        of_s3 = "; AWS_CA_BUNDLE names a file of authorities" if "Generic S3" in str(error) else ""
        return f"its certificate is not trusted ({found[1]}){of_s3}"
    if "kind: Connect" in str(error):
        return _unconnected(str(error))
    said = _words(error).partition(" - ")
    return " ".join((said[2] or said[0]).split())


def _unconnected(tree: str) -> str:
    """Return why no connection was made, and what to do, from the tree of causes that follows the library's message."""
    if _NO_TLS in tree:
        return "it does not speak TLS: write http:// in the endpoint, or start the store with TLS"
    if found := _LOOKUP.search(tree):
        return f"its name cannot be resolved ({found[1]}): correct the endpoint"
    found = _SYSTEM.search(tree)
    if found and (why := explained(found[1])) != found[1]:
        return why
    return f"{found[1].lower() if found else 'no connection'}: start the store there, or correct the endpoint"


def _said(error: BaseException) -> str:
    """Return the server's own words in an error: its message and details, or else the beginning of its answer."""
    if found := [one for pattern in _MESSAGES for one in pattern.findall(_words(error))]:
        return " ".join(" ".join(one.partition("RequestId:")[0].split()) for one in found)
    answer = "" if "<" in _words(error) else _words(error).partition("status code: ")[2].partition(": ")[2]
    return legible(" ".join(answer.split())[:200])


def _status(error: BaseException) -> int | None:
    found = _STATUS.search(_words(error))
    return int(found[1]) if found else None


def _code(error: BaseException) -> str:
    found = _CODE.search(_words(error))
    return found[1] if found else "BlobNotFound" if _NOT_IN_BATCH.search(_words(error)) else ""


@asynccontextmanager
async def open_s3(place: Place, runtime: Runtime) -> AsyncIterator[BucketStore]:
    """Open a bucket of S3, or of a store with its protocol. Raises `InputError`.

    The options `region` and `endpoint` say where the bucket is, if not where the environment says.
    """
    bucket = place.authority
    if not _BUCKET.fullmatch(bucket):
        raise InputError(f"{place}: {redacted(bucket)} is no valid name of a bucket")
    found = access(now=runtime.now).at(place)
    in_path = found.in_path(bucket)
    where = found.endpoint or f"https://s3.{found.region}.amazonaws.com"

    def client(retries: int, **limits: Any) -> Any:
        options: Any = {"allow_http": True, "connect_timeout": CONNECT_TIMEOUT, "timeout": _NO_LIMIT, **limits}
        if found.authorities:
            options["root_certificate"] = found.authorities
        return obstore.store.S3Store(
            bucket,
            config={
                "region": found.region,
                **({"endpoint": where} if in_path else {}),
                "virtual_hosted_style_request": not in_path,
                "s3_express": bool(found.zone(bucket)),
                # The server verifies this against the bytes it received. Without it SeaweedFS 4.48 keeps an empty
                # object for good, even under the key of a commit, when a PUT loses its connection before the first
                # byte of the body.
                "checksum_algorithm": "SHA256",
                "disable_bulk_delete": True,  # many stores do not support it
            },
            client_options=options,
            retry_config={"max_retries": retries},
            credential_provider=found.identity.ask,
        )

    yield BucketStore(_clients(client), place.prefix, place.url, where, runtime, found.identity)


@asynccontextmanager
async def open_google(place: Place, runtime: Runtime) -> AsyncIterator[BucketStore]:
    """Open a bucket of Google Cloud Storage by its own protocol.

    The library finds the credentials in `GOOGLE_APPLICATION_CREDENTIALS` and the like. Raises `InputError` if it cannot
    read them.
    """

    def client(retries: int, **limits: Any) -> Any:
        options: Any = {"allow_http": True, "connect_timeout": CONNECT_TIMEOUT, "timeout": _NO_LIMIT, **limits}
        return obstore.store.GCSStore(place.authority, client_options=options, retry_config={"max_retries": retries})

    try:
        clients = _clients(client)
    except BaseError as error:
        raise InputError(f"{place.url}: {_told(error)} ({KEY_FILE} name a key file)") from None
    host = google_host()
    where = "Google Cloud Storage" if host == GOOGLE else host
    yield BucketStore(clients, place.prefix, place.url, where, runtime)


@asynccontextmanager
async def open_azure(place: Place, runtime: Runtime) -> AsyncIterator[BucketStore]:
    """Open a container of Azure Blob Storage.

    The library finds the storage account and the credentials in `AZURE_STORAGE_ACCOUNT_NAME` and the like. Raises
    `InputError` if it finds no account, or cannot read a key.
    """
    if not _CONTAINER.fullmatch(place.authority):
        raise InputError(
            f"{place}: {redacted(place.authority)} is no valid name of a container (small letters, digits and single "
            "hyphens, 3 to 63; the storage account is named by AZURE_STORAGE_ACCOUNT_NAME)"
        )

    def client(retries: int, **limits: Any) -> Any:
        options: Any = {"allow_http": True, "connect_timeout": CONNECT_TIMEOUT, "timeout": _NO_LIMIT, **limits}
        return obstore.store.AzureStore(place.authority, client_options=options, retry_config={"max_retries": retries})

    try:
        clients = _clients(client)
    except BaseError as error:
        raise InputError(
            f"{place.url}: {_told(error)} (AZURE_STORAGE_ACCOUNT_NAME names the storage account, and "
            "AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN or an identity the credentials)"
        ) from None
    yield BucketStore(clients, place.prefix, place.url, azure_host(), runtime)


def _clients(client: Callable[..., Any]) -> Clients:
    # A client's read timeout also covers the time to send the body, so `_write` limits the time of writes itself.
    return Clients(
        read=client(0, read_timeout=READ_TIMEOUT), write=client(0), parts=client(PART_TRIES, read_timeout=_NO_LIMIT)
    )

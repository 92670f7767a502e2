"""A store in a bucket, over aiobotocore. Only parts of large objects are retried here, as in `_patiently`."""

import asyncio
import base64
import contextlib
import hashlib
import io
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import aiohttp
from aiobotocore.config import AioConfig
from aiobotocore.credentials import AioCredentials
from aiobotocore.session import get_session
from botocore.credentials import ReadOnlyCredentials
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    HTTPClientError,
    ParamValidationError,
    ProfileNotFound,
)
from botocore.parsers import ResponseParserError
from typing_extensions import override

from isthmus.errors import InputError, Unavailable, first_cause, told
from isthmus.format.records.frame import Blob, Body, Data, Gathered, blank
from isthmus.runtime.clock import Runtime
from isthmus.runtime.descriptors import explained
from isthmus.runtime.urls import Place
from isthmus.store.base import PART_BYTES, Entry, Store, is_there, part_of
from isthmus.store.credentials import Access, Identity, access, with_models
from isthmus.store.refused import (
    DENIED,
    EXISTS,
    EXPIRED,
    MISSING,
    NO_UPLOAD,
    RangeBeyondEnd,
    doubted,
    refusal,
    refused_read,
)

PARTS_MAX = 10_000
"""Largest number of parts that stores accept for one object."""

PARTS_AT_ONCE = 4
PART_TRIES = 4
PART_PAUSE_S = 0.2

CONNECTIONS_MAX = 64
CONNECT_TIMEOUT_S = 3.0
READ_TIMEOUT_S = 60.0  # between two reads of a body, not for the whole body
_CHUNK_BYTES = 1 << 20
_INLINE_MAX = 1 << 17  # bytes; up to this size a thread for the MD5 would cost more than it saves

_SUMS = {"ContentMD5": hashlib.md5, "ChecksumSHA256": hashlib.sha256}
_UNFIT = {"BadDigest", "InvalidDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch", "InvalidRequest"}

_FAILURES = (ClientError, BotoCoreError, ResponseParserError, aiohttp.ClientError, OSError, TimeoutError)
"""What the client raises for an error answer, an answer that it cannot read, or none."""

BEGUN_MAX = 16
"""Failed uploads that are kept to be continued, at most.

The bucket's lifecycle rule removes those of processes that ended.
"""


@dataclass(slots=True)
class _Begun:
    """An upload in parts that is not complete."""

    upload: str
    size: int
    parts: dict[int, tuple[str, str]] = field(default_factory=dict)
    """MD5 and ETag of each part that is stored, by its number."""
    again: bool = False
    """Whether this is a second try."""


class S3Store(Store):
    """Objects of one bucket below an optional prefix. Endpoint and credentials come from the AWS environment."""

    def __init__(
        self, client: Any, bucket: str, prefix: str, url: str, runtime: Runtime, identity: Identity | None = None
    ) -> None:
        """`identity`: the source of the credentials."""
        self._identity = identity
        self._runtime = runtime
        self._client = client
        self._bucket = bucket
        self._prefix = prefix
        self._begun: dict[str, _Begun] = {}
        self.url = url

    async def get(self, key: str) -> Body:
        """See `Store.get`. It requests a range, since a page that a gateway made up does not name the range it has."""
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
            if len(data) > PART_BYTES:
                await self._put_in_parts(key, data)
            else:
                whole = await part_of(data, 0, len(data), self._runtime) if isinstance(data, Gathered) else data
                answer = await self._client.put_object(
                    Bucket=self._bucket, Key=self._prefix + key, Body=_Body(whole), ContentMD5=await self._md5(whole)
                )
                self._tag(answer, key)
        except _FAILURES as error:
            self._fail(error, key, "writing")

    async def create(self, key: str, data: Blob) -> bool:
        """See `Store.create`. Beyond `PART_BYTES`, two concurrent creates may both return True.

        This happens if the server ignores the condition on the completion of an upload in parts. Such large objects are
        named after their content.
        """
        try:
            if len(data) > PART_BYTES:
                if await is_there(self, key):
                    return False
                await self._put_in_parts(key, data, IfNoneMatch="*")
            else:
                answer = await self._client.put_object(
                    Bucket=self._bucket,
                    Key=self._prefix + key,
                    Body=_Body(data),
                    ContentMD5=await self._md5(data),
                    IfNoneMatch="*",
                )
                self._tag(answer, key)
        except ClientError as error:
            if _code(error) in EXISTS:
                return False
            self._fail(error, key, "writing")
        except _FAILURES as error:
            self._fail(error, key, "writing")
        return True

    @override
    async def list(self, prefix: str) -> Sequence[Entry]:
        if prefix and not prefix.endswith("/"):
            raise ValueError(f"a prefix ends with '/': {prefix!r}")
        entries: list[Entry] = []
        try:
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix + prefix
            )
            async for page in pages:
                if "Name" not in page:
                    raise Unavailable(
                        f"{self.url}: the answer to a listing is not valid: check for a gateway in between"
                    )
                entries.extend(
                    Entry(item["Key"].removeprefix(self._prefix), item["Size"], item["LastModified"].timestamp())
                    for item in page.get("Contents", ())
                )
        except _FAILURES as error:
            self._fail(error, prefix, "listing")
        return sorted(entries)

    @override
    async def delete(self, key: str) -> None:
        try:
            await self._client.delete_object(Bucket=self._bucket, Key=self._prefix + key)
        except ClientError as error:
            if _code(error) not in MISSING:
                self._fail(error, key, "deleting")
        except _FAILURES as error:
            self._fail(error, key, "deleting")

    async def create_bucket(self) -> bool:
        """Create the bucket unless it exists. Return whether the store says that it made it."""
        try:
            try:
                await self._client.create_bucket(Bucket=self._bucket)
            except ClientError as error:
                if _code(error) != "IllegalLocationConstraintException":
                    raise
                # AWS wants the region named, except for us-east-1; other stores know no regions.
                region = {"LocationConstraint": self._client.meta.region_name}
                await self._client.create_bucket(Bucket=self._bucket, CreateBucketConfiguration=region)
        except ClientError as error:
            if _code(error) not in {"BucketAlreadyOwnedByYou", "BucketAlreadyExists"}:
                self._fail(error, "", "creating the bucket")
            return False
        except _FAILURES as error:
            self._fail(error, "", "creating the bucket")
        return True

    async def compares(self, key: str, name: str, **condition: str) -> bool:
        """Return whether the store rejects a PUT whose bytes do not match their checksum.

        `name`: which checksum is sent, `ContentMD5` or `ChecksumSHA256`. `condition`: further parameters of the
        request. No object is left behind. A condition that does not hold counts as rejected: the store has let the
        request through to it. Raises what writes do.
        """
        data = b"what was sent"
        other = _SUMS[name](b"what arrived").digest()
        try:
            await self._client.put_object(
                Bucket=self._bucket,
                Key=self._prefix + key,
                Body=data,
                **{name: base64.b64encode(other).decode()},
                **condition,
            )
        except ClientError as error:
            if _code(error) in _UNFIT or (condition and _code(error) in EXISTS):
                return True
            self._fail(error, key, "writing")
        except _FAILURES as error:
            self._fail(error, key, "writing")
        await self.delete(key)
        return False

    async def _md5(self, data: Blob) -> str:
        """Return the MD5 in base64, which the server compares with the bytes it received.

        Without it SeaweedFS 4.48 keeps an empty object for good, even under the key of a commit, when a PUT loses its
        connection before the first byte of the body.
        """
        if len(data) <= _INLINE_MAX:
            return _base64_md5(data)
        return await self._runtime.offload(_base64_md5, data)

    async def _put_in_parts(self, key: str, data: Data, **condition: str) -> None:
        """Upload an object in parts, several at once. The object appears whole, once all parts are stored, or never.

        A part that fails is sent again by itself. If the upload still fails, its parts are kept once for the next
        upload of the same size under this key, which sends only parts that are missing or differ.
        """
        place = {"Bucket": self._bucket, "Key": self._prefix + key}
        whole = data if isinstance(data, Gathered) else Gathered([data])
        size = max(PART_BYTES, -(-len(whole) // PARTS_MAX))
        begun = self._begun.pop(key, None)
        if begun is None or begun.size != len(whole):
            answer = await self._client.create_multipart_upload(**place)
            if "UploadId" not in answer:
                raise Unavailable(
                    f"{self.url}: the answer to starting an upload is not valid: check for a gateway in between"
                )
            begun = _Begun(answer["UploadId"], len(whole))
        slots = asyncio.Semaphore(PARTS_AT_ONCE)

        async def one(number: int) -> None:
            async with slots:
                part = await part_of(whole, (number - 1) * size, min(number * size, len(whole)), self._runtime)
                sum_ = await self._md5(part)
                if begun.parts.get(number, ("", ""))[0] != sum_:
                    answer = await self._patiently(
                        lambda: self._client.upload_part(
                            **place, UploadId=begun.upload, PartNumber=number, Body=_Body(part), ContentMD5=sum_
                        )
                    )
                    begun.parts[number] = sum_, self._tag(answer, key)

        try:
            async with asyncio.TaskGroup() as tasks:
                for number in range(1, -(-len(whole) // size) + 1):
                    tasks.create_task(one(number))
            parts = [{"PartNumber": number, "ETag": etag} for number, (_, etag) in sorted(begun.parts.items())]
            answer = await self._client.complete_multipart_upload(
                **place, UploadId=begun.upload, MultipartUpload={"Parts": parts}, **condition
            )
            self._tag(answer, key)
        except BaseExceptionGroup as group:
            await self._keep_or_abort(key, begun, first_cause(group))
            raise first_cause(group) from None
        except Exception as error:
            await self._keep_or_abort(key, begun, error)
            raise

    async def _keep_or_abort(self, key: str, begun: "_Begun", error: BaseException) -> None:
        """Keep the uploaded parts for one more try, or abort the upload.

        They are kept only once, since the store may no longer know the upload.
        """
        passing = isinstance(error, ClientError | BotoCoreError | OSError | TimeoutError) and not _is_final(error)
        if passing and not begun.again and len(self._begun) < BEGUN_MAX:
            begun.again = True
            self._begun[key] = begun
            return
        with contextlib.suppress(ClientError, BotoCoreError, OSError):
            await self._client.abort_multipart_upload(
                Bucket=self._bucket, Key=self._prefix + key, UploadId=begun.upload
            )

    async def _patiently(self, send: Callable[[], Awaitable[Any]]) -> Any:
        """Send the request for one part, and retry it by itself if it fails: the other parts need not be sent again."""
        for tried in range(1, PART_TRIES + 1):
            try:
                return await send()
            except (ClientError, BotoCoreError, OSError, aiohttp.ClientError, Unavailable) as error:
                if _is_final(error) or tried == PART_TRIES:
                    raise
                await asyncio.sleep(PART_PAUSE_S * 2.0**tried * self._runtime.random.random())
        raise AssertionError("unreachable: the last try returns or raises")

    async def _read(self, key: str, start: int, stop: int | None) -> Body:
        """Return bytes [start, stop) of an object, or all from start."""
        asked = f"bytes={start}-" if stop is None else f"bytes={start}-{stop - 1}"
        try:
            response = await self._client.get_object(Bucket=self._bucket, Key=self._prefix + key, Range=asked)
            size = self._range_of(response, key)
            data = blank(size)
            if size <= PART_BYTES:
                await self._drain(key, response, data)
            else:
                await self._read_in_parts(key, start, response, data)
        except BaseExceptionGroup as group:
            cause = first_cause(group)
            if not isinstance(cause, _FAILURES):
                raise cause from None
            self._fail(cause, key, "reading")
        except _FAILURES as error:
            self._fail(error, key, "reading")
        return data

    def _range_of(self, response: Any, key: str) -> int:
        """Return the size of the answer to a range [bytes]. Raises `Unavailable` if the answer is not a range."""
        if "ContentRange" not in response:
            with contextlib.suppress(Exception):
                response["Body"].close()
            raise Unavailable(
                f"{self.url}: asked for a range of {key}, but got a whole answer: this server serves no ranges, "
                "or a gateway in between has answered"
            )
        return int(response["ContentLength"])

    def _tag(self, answer: Any, key: str) -> str:
        """Return the ETag of what was stored. Raises `Unavailable` if there is none: a store would have sent it."""
        if not answer.get("ETag"):
            raise Unavailable(
                f"{self.url}: no ETag says that {key} is stored: a gateway in between has answered, or this server "
                "sends none, and no run can be kept there"
            )
        return str(answer["ETag"])

    async def _read_in_parts(self, key: str, start: int, first: Any, data: memoryview) -> None:
        """Fetch a large body in ranges, several at once; `first` is the answer to a request for the whole body."""
        first["Body"].close()
        same = {"IfMatch": first["ETag"]} if "ETag" in first else {}  # all from one version
        slots = asyncio.Semaphore(PARTS_AT_ONCE)

        async def one(at: int) -> None:
            part = data[at : at + PART_BYTES]
            asked = {"Range": f"bytes={start + at}-{start + at + len(part) - 1}", **same}

            async def fetch() -> None:
                answer = await self._client.get_object(Bucket=self._bucket, Key=self._prefix + key, **asked)
                if self._range_of(answer, key) != len(part):
                    raise Unavailable(f"{self.url}: {key} sent {answer['ContentLength']} bytes for {len(part)}")
                await self._drain(key, answer, part)

            async with slots:
                await self._patiently(fetch)

        async with asyncio.TaskGroup() as tasks:
            for at in range(0, len(data), PART_BYTES):
                tasks.create_task(one(at))

    async def _drain(self, key: str, response: Any, data: memoryview) -> None:
        at = 0
        async with response["Body"] as body:
            async for chunk in body.iter_chunks(_CHUNK_BYTES):
                if at + len(chunk) > len(data):
                    raise Unavailable(f"{self.url}: {key} sent more than the {len(data)} bytes it announced")
                data[at : at + len(chunk)] = chunk
                at += len(chunk)
        if at != len(data):
            raise Unavailable(f"{self.url}: {key} ended after {at} of {len(data)} bytes")

    def _fail(self, error: BaseException, key: str, doing: str) -> NoReturn:
        """Raise what a failed request means. `doing`: its kind; only `reading` can find its object missing."""
        reads, what = doing == "reading", f"{doing} {key}".strip()
        where = f"{self.url} at {self._client.meta.endpoint_url}"
        if isinstance(error, ClientError):
            signer = self._identity.origin if self._identity else ""
            if _code(error) in EXPIRED and self._identity is not None and self._identity.doubt():
                raise doubted(_code(error), where=where, signer=signer) from None
            status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            about = _code(error), status, str(error.response.get("Error", {}).get("Message", ""))
            if reads:
                raise refused_read(*about, key=key, url=self.url, where=where, signer=signer, what=what) from None
            raise refusal(*about, url=self.url, where=where, signer=signer, what=what) from None
        if isinstance(error, ParamValidationError):
            raise InputError(f"{where}: {str(error).splitlines()[-1]}") from None
        if isinstance(error, HTTPClientError | aiohttp.ClientError | OSError | TimeoutError):
            raise Unavailable(f"{where}: {explained(told(error))}") from None
        raise Unavailable(f"{where}: {type(error).__name__}: {error}") from None


class _Provider:
    """Gives aiobotocore the credentials of an `Identity`."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    async def load_credentials(self) -> AioCredentials:
        """Return credentials that ask the `Identity` again for each request."""
        return _Credentials(self._identity)


class _Credentials(AioCredentials):  # type: ignore[misc]
    def __init__(self, identity: Identity) -> None:
        super().__init__("", "")
        self._identity = identity

    async def get_frozen_credentials(self) -> ReadOnlyCredentials:
        """Return the credentials that sign the next request."""
        found = await self._identity.ask()
        return ReadOnlyCredentials(found["access_key_id"], found["secret_access_key"], found["token"])


class _Body(io.RawIOBase):
    """A seekable view of a buffer: botocore reads from it without another copy of the object."""

    def __init__(self, data: Blob) -> None:
        self._view = memoryview(data)
        self._at = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True: a request that is sent again starts over."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position, like `seek` of a file, and return it."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._view)}[whence]
        self._at = min(max(start + offset, 0), len(self._view))
        return self._at

    def tell(self) -> int:
        """Return the position."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Copy the next bytes into `buffer` and return how many."""
        count = min(len(buffer), len(self._view) - self._at)
        buffer[:count] = self._view[self._at : self._at + count]
        self._at += count
        return count

    def __len__(self) -> int:
        return len(self._view)


def _base64_md5(data: Blob) -> str:
    return base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()


def _is_final(error: BaseException) -> bool:
    """Return whether the store would reject the same request for a part again."""
    return isinstance(error, ClientError) and _code(error) in {*NO_UPLOAD, *DENIED, *EXISTS}


def _code(error: ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))


@asynccontextmanager
async def open_client(place: Place, runtime: Runtime, service: str = "s3") -> AsyncIterator[tuple[Any, Access]]:
    """Open a client of an AWS service for a bucket's URL, and yield it with the access that it uses.

    At an endpoint of one's own, every service is at that endpoint. Raises `InputError`.
    """
    config = AioConfig(
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=READ_TIMEOUT_S,
        retries={"mode": "standard", "total_max_attempts": 1},
        max_pool_connections=CONNECTIONS_MAX,
        # Many stores reject the defaults since botocore 1.36 (checksums in trailers), and we check digests ourselves.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={"addressing_style": "auto", "payload_signing_enabled": False},
        ignore_configured_endpoint_urls=True,  # `access` knows them, and what counts before them
    )
    try:
        found = access(now=runtime.now).at(place)
        session = with_models(get_session())
        session.register_component("credential_provider", _Provider(found.identity))
        async with session.create_client(
            service, region_name=found.region, endpoint_url=found.endpoint, config=config
        ) as client:
            yield client, found
    except (ProfileNotFound, ValueError) as error:
        raise InputError(f"{place.url}: {error}") from None


@asynccontextmanager
async def open_s3(place: Place, runtime: Runtime) -> AsyncIterator[S3Store]:
    """Open a bucket; the client is closed with the context. Raises `InputError`."""
    async with open_client(place, runtime) as (client, found):
        yield S3Store(client, place.authority, place.prefix, place.url, runtime, found.identity)

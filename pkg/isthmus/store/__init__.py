"""The store for the objects of a run: the port, its implementations, the layers around it, and opening by URL."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from urllib.parse import parse_qs

from isthmus.errors import InputError
from isthmus.runtime.clock import Runtime
from isthmus.runtime.urls import BUCKETS, redacted, split
from isthmus.store.atomic import require_create_only
from isthmus.store.base import Entry, Store
from isthmus.store.edge import EdgeStore
from isthmus.store.files import FileStore
from isthmus.store.layer import Layer
from isthmus.store.measured import Traffic
from isthmus.store.regions import Regions
from isthmus.store.retrying import AT_START, BESIDE, RUNNING, Patience
from isthmus.store.watched import Outage

__all__ = [
    "AT_START",
    "BESIDE",
    "BUCKETS",
    "RUNNING",
    "EdgeStore",
    "Entry",
    "FileStore",
    "Layer",
    "Outage",
    "Patience",
    "Probe",
    "Regions",
    "Store",
    "compares_sums",
    "endpoint_of",
    "open_probe",
    "open_store",
    "require_create_only",
]


@asynccontextmanager
async def open_store(url: str, runtime: Runtime, *, make: bool = False) -> AsyncIterator[EdgeStore]:
    """Open `s3://bucket/prefix`, `gs://bucket/prefix`, `file:///path` or a path. `make`: create a missing bucket.

    `s3+aiobotocore://` uses another client for the same buckets; `s3+obstore://` is the same as `s3://`. Raises
    `InputError` for a URL of another kind. Without `make`, nothing is contacted before the first request.
    """
    if make and split(url).scheme in BUCKETS:
        await _make_bucket(split(url).scheme, split(url).netloc, url, runtime)

    @asynccontextmanager
    async def beside(other: str) -> AsyncIterator[Store]:
        if split(url).scheme in BUCKETS and split(other).scheme not in BUCKETS:
            raise InputError(f"{redacted(other)}: the owner of a run in a bucket names no folders of other machines")
        async with _open(other, runtime) as store:
            yield EdgeStore(store, runtime, BESIDE, traffic=traffic)

    regions, traffic = Regions(beside, runtime), Traffic()
    try:
        async with _open(url, runtime) as store:
            yield EdgeStore(store, runtime, traffic=traffic, regions=regions)
    finally:
        await regions.close()


@asynccontextmanager
async def _open(url: str, runtime: Runtime) -> AsyncIterator[Store]:
    parts = split(url)
    if parts.scheme in BUCKETS:
        if not parts.netloc:
            raise InputError(f"{url}: a URL of a bucket names it: {parts.scheme}://bucket/run")
        async with _opener(parts.scheme)(parts.netloc, _prefix(parts.path), url, runtime, **_where(url)) as store:
            yield store
    elif parts.scheme in ("", "file"):
        yield FileStore(_folder(parts.path if parts.scheme else url), runtime)
    else:
        known = "s3://bucket/prefix, in gs://bucket/prefix or in a folder"
        raise InputError(f"{redacted(url)}: runs live in {known}, not in {parts.scheme}://")


def _where(url: str) -> dict[str, str]:
    """Return the region and endpoint in the URL of a bucket, which replace those of the environment."""
    parts = split(url)
    if not parts.query:
        return {}
    said = parse_qs(parts.query, keep_blank_values=True)
    if parts.scheme not in ("s3", "s3+obstore") or not said.keys() <= {"region", "endpoint"}:
        raise InputError(f"{redacted(url)}: after ? there may be region=NAME and endpoint=URL, of s3:// alone")
    return {name: values[-1] for name, values in said.items()}


def _prefix(path: str) -> str:
    path = path.strip("/")
    return f"{path}/" if path else ""


def _opener(scheme: str) -> Callable[..., AbstractAsyncContextManager[Store]]:
    # Imported only when needed, since each needs a library of its own.
    if scheme == "s3+aiobotocore":
        from isthmus.store.s3 import open_s3

        return open_s3
    from isthmus.store import bucket

    return bucket.open_google if scheme == "gs" else bucket.open_s3


def endpoint_of(url: str) -> str | None:
    """Return the URL of the host that a store's requests go to; None for a folder. Raises `InputError`."""
    parts = split(url)
    if parts.scheme not in BUCKETS:
        return None
    if parts.scheme == "gs":
        return "https://storage.googleapis.com"
    from isthmus.store.credentials import access

    return access().host(parts.netloc)


async def compares_sums(url: str, key: str, runtime: Runtime) -> bool | None:
    """Return whether the store at a URL rejects a PUT whose bytes do not match the checksum sent with every PUT.

    Returns None for a store to which no checksum is sent. `key` is written and deleted. Raises what writes do.
    """
    parts = split(url)
    if not parts.scheme.startswith("s3"):
        return None
    from isthmus.store.s3 import open_s3

    async with open_s3(parts.netloc, _prefix(parts.path), url, runtime) as store:
        return await store.compares(key, "ContentMD5" if parts.scheme == "s3+aiobotocore" else "ChecksumSHA256")


Probe = Callable[[str, bool], Awaitable[None]]
"""Tests whether a key may be written (with True: only created), without writing it. Raises `Denied` if it may not."""


@asynccontextmanager
async def open_probe(url: str, key: str, runtime: Runtime) -> AsyncIterator[Probe | None]:
    """Open a probe for write permissions; yields None if the store does not verify checksums.

    The probe sends bytes that do not match their checksum. A store that verifies checksums checks the permission first,
    and then rejects the bytes. Whether it verifies them is tested on `key`, which is written and deleted. Raises what
    writes do.
    """
    parts = split(url)
    if not parts.scheme.startswith("s3"):
        yield None
        return
    from isthmus.store.s3 import open_s3

    async with open_s3(parts.netloc, _prefix(parts.path), url, runtime) as store:
        for name in ("ContentMD5", "ChecksumSHA256"):
            if await store.compares(key, name):
                break
        else:
            yield None
            return

        async def probe(key: str, create: bool) -> None:
            await store.compares(key, name, **({"IfNoneMatch": "*"} if create else {}))

        yield probe


async def _make_bucket(scheme: str, bucket: str, url: str, runtime: Runtime) -> None:
    if scheme == "gs":
        raise InputError(f"{url}: create the bucket first: gcloud storage buckets create gs://{bucket}")
    from isthmus.store.s3 import open_s3

    async with open_s3(bucket, "", url, runtime) as store:
        await store.create_bucket()


def _folder(text: str) -> Path:
    path = Path(text).expanduser().absolute()
    if path.exists() and not path.is_dir():
        raise InputError(f"{path} is a file; a run is a folder")
    return path

"""The store for the objects of a run: the port, its implementations, the layers around it, and opening by URL."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from isthmus.errors import InputError, azure_container_command
from isthmus.runtime.clock import Runtime
from isthmus.runtime.urls import Place
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
    "make_bucket",
    "open_probe",
    "open_store",
    "require_create_only",
]


@asynccontextmanager
async def open_store(url: str, runtime: Runtime, *, make: bool = False) -> AsyncIterator[EdgeStore]:
    """Open `s3://bucket/prefix`, `gs://…`, `az://container/prefix`, `file:///path` or a path.

    `make`: create a missing bucket. `s3+aiobotocore://` uses another client for the same buckets; `s3+obstore://` is
    the same as `s3://`. Raises `InputError` for a URL of another kind. Without `make`, nothing is contacted before the
    first request.
    """
    if not url.strip():
        raise InputError("the address of the run is empty: is a variable not set that should have it?")
    place = Place.of(url)
    if make and place.in_bucket:
        await make_bucket(place, runtime)

    @asynccontextmanager
    async def beside(other: str) -> AsyncIterator[Store]:
        near = Place.of(other)
        if place.in_bucket and not near.in_bucket:
            raise InputError(f"{near}: for a run in a bucket, a member's store cannot be a folder")
        async with _open(near, runtime) as store:
            yield EdgeStore(store, runtime, BESIDE, traffic=traffic)

    regions, traffic = Regions(beside, runtime), Traffic()
    try:
        async with _open(place, runtime) as store:
            yield EdgeStore(store, runtime, traffic=traffic, regions=regions)
    finally:
        await regions.close()


@asynccontextmanager
async def _open(place: Place, runtime: Runtime) -> AsyncIterator[Store]:
    if place.in_bucket:
        if not place.authority:
            raise InputError(f"{place}: a URL of a bucket names it: {place.scheme}://bucket/run")
        if place.options.keys() - ({"region", "endpoint"} if place.scheme in ("s3", "s3+obstore") else set()):
            raise InputError(f"{place}: only s3:// takes options after ?, region=NAME and endpoint=URL")
        async with _opener(place.scheme)(place, runtime) as store:
            yield store
    elif (folder := place.folder) is not None:
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder} is a file; a run is a folder")
        yield FileStore(folder, runtime)
    else:
        known = "s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or in a folder"
        raise InputError(f"{place}: runs live in {known}, not in {place.scheme}://")


def _opener(scheme: str) -> Callable[..., AbstractAsyncContextManager[Store]]:
    # Imported only when needed, since each needs a library of its own.
    if scheme == "s3+aiobotocore":
        from isthmus.store.s3 import open_s3

        return open_s3
    from isthmus.store import bucket

    return {"gs": bucket.open_google, "az": bucket.open_azure}.get(scheme, bucket.open_s3)


def endpoint_of(url: str) -> str | None:
    """Return the URL of the host that a store's requests go to; None for a folder. Raises `InputError`."""
    place = Place.of(url)
    if not place.in_bucket:
        return None
    from isthmus.store.credentials import access, azure_host, google_host

    if place.scheme in ("gs", "az"):
        return google_host() if place.scheme == "gs" else azure_host()
    return access().at(place).host(place.authority)


R2 = ".r2.cloudflarestorage.com"


def rewrite_s(url: str) -> float:
    """Return how far apart two writes of one key must be [s]: Google and R2 refuse more than one in a second (429)."""
    limited = Place.of(url).scheme == "gs" or (Place.of(endpoint_of(url) or "").host or "").endswith(R2)
    return 1.0 if limited else 0.0


async def compares_sums(url: str, key: str, runtime: Runtime) -> bool | None:
    """Return whether the store at a URL rejects a PUT whose bytes do not match the checksum sent with every PUT.

    Returns None for a store to which no checksum is sent. `key` is written and deleted. Raises what writes do.
    """
    place = Place.of(url)
    if not place.scheme.startswith("s3"):
        return None
    from isthmus.store.s3 import open_s3

    async with open_s3(place, runtime) as store:
        return await store.compares(key, "ContentMD5" if place.scheme == "s3+aiobotocore" else "ChecksumSHA256")


Probe = Callable[[str, bool], Awaitable[None]]
"""Tests whether a key may be written (with True: only created), without writing it. Raises `Denied` if it may not."""


@asynccontextmanager
async def open_probe(url: str, key: str, runtime: Runtime) -> AsyncIterator[Probe | None]:
    """Open a probe for write permissions; yields None if the store does not verify checksums.

    The probe sends bytes that do not match their checksum. A store that verifies checksums checks the permission first,
    and then rejects the bytes. Whether it verifies them is tested on `key`, which is written and deleted. Raises what
    writes do.
    """
    place = Place.of(url)
    if not place.scheme.startswith("s3"):
        yield None
        return
    from isthmus.store.s3 import open_s3

    async with open_s3(place, runtime) as store:
        for name in ("ContentMD5", "ChecksumSHA256"):
            if await store.compares(key, name):
                break
        else:
            yield None
            return

        async def probe(key: str, create: bool) -> None:
            await store.compares(key, name, **({"IfNoneMatch": "*"} if create else {}))

        yield probe


async def make_bucket(place: Place, runtime: Runtime) -> bool:
    """Create the bucket of a place unless it exists; return whether it was made.

    Raises `Denied`, `Unavailable`; `InputError` but for `s3://`.
    """
    if place.scheme == "gs":
        raise InputError(f"{place}: create the bucket first: gcloud storage buckets create gs://{place.authority}")
    if place.scheme == "az":
        raise InputError(f"{place}: create the container first: {azure_container_command(place.authority)}")
    from isthmus.store.credentials import access
    from isthmus.store.s3 import open_s3

    if zone := access().at(place).zone(place.authority):
        raise InputError(
            f"{place}: create the directory bucket first: aws s3api create-bucket --bucket {place.authority} "
            f"--create-bucket-configuration 'Location={{Type=AvailabilityZone,Name={zone}}},"
            "Bucket={Type=Directory,DataRedundancy=SingleAvailabilityZone}'"
        )

    async with open_s3(place, runtime) as store:
        return await store.create_bucket()

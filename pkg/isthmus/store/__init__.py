"""Where the bytes of a run live: the port, its implementations, the layers at its edge, and opening by URL."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from isthmus.errors import InputError
from isthmus.runtime import Runtime
from isthmus.store.atomic import require_create_only
from isthmus.store.base import Entry, Store
from isthmus.store.edge import EdgeStore
from isthmus.store.files import FileStore
from isthmus.store.layer import Layer
from isthmus.store.retrying import AT_START, RUNNING, Patience
from isthmus.store.watched import Outage
from isthmus.urls import redacted, split

__all__ = [
    "AT_START",
    "RUNNING",
    "EdgeStore",
    "Entry",
    "FileStore",
    "Layer",
    "Outage",
    "Patience",
    "Store",
    "open_store",
    "require_create_only",
]


@asynccontextmanager
async def open_store(url: str, runtime: Runtime, *, make: bool = False) -> AsyncIterator[EdgeStore]:
    """Open `s3://bucket/prefix`, `file:///path` or a path. With `make`, a missing bucket is created.

    Raises `InputError` for a URL of another kind. Nothing is contacted before the first request (or `make`).
    """
    parts = split(url)
    if parts.scheme == "s3":
        from isthmus.store.s3 import open_s3

        if not parts.netloc:
            raise InputError(f"{url}: an S3 URL names a bucket: s3://bucket/run")
        prefix = parts.path.strip("/")
        async with open_s3(parts.netloc, f"{prefix}/" if prefix else "", url, runtime) as store:
            if make:
                await store.create_bucket()
            yield EdgeStore(store, runtime)
    elif parts.scheme in ("", "file"):
        yield EdgeStore(FileStore(_folder(parts.path if parts.scheme else url), runtime), runtime)
    else:
        raise InputError(f"{redacted(url)}: runs live in s3://bucket/prefix or in a folder, not in {parts.scheme}://")


def _folder(text: str) -> Path:
    path = Path(text).expanduser().absolute()
    if path.exists() and not path.is_dir():
        raise InputError(f"{path} is a file; a run is a folder")
    return path

"""Buckets beside a run's own: each holds the updates of learners near it, and copies of values and snapshots.

The membership, signed by the run's owner, says which learner has which bucket. The run does not depend on these
buckets. If one does not accept an update, the update is stored in the run's own bucket; if one lacks a value, the value
is read from there. Updates and values are named by their digests, so it does not matter where they were found. The log,
claims and checkpoints are only in the run's own bucket.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Protocol, TypeVar

from isthmus.errors import Denied, InputError, ObjectMissing, Unavailable
from isthmus.format.records.keys import UPDATES
from isthmus.runtime.clock import Runtime
from isthmus.runtime.urls import redacted
from isthmus.store.base import Entry, Store

logger = logging.getLogger(__name__)

T = TypeVar("T")

Ask = Callable[[Store], Awaitable[T]]
"""Sends a request to the given bucket."""

Home = Callable[[], Awaitable[T]]
"""Sends the same request to the run's own bucket."""

AVOIDED_S, AVOIDED_MOST_S = 30.0, 480.0
"""How long a bucket is not asked first after a failure [s]; each further failure doubles it, up to the second value."""

MIRROR_S = 2.0
"""How long a copy may still take when the run's own bucket has the value [s]: the next round waits for it."""

PUBLISHED = ("values/", "snapshots/")


class Directory(Protocol):
    """Knows which learner has which bucket."""

    @property
    def known(self) -> int:
        """How many versions of the membership are known."""
        ...

    def buckets_of(self, learner: str) -> Sequence[str]:
        """Return the URLs of the buckets that a learner's updates are or were stored in, the present one first.

        The URL of the run's own bucket is given as an empty string.
        """
        ...

    def buckets(self) -> Sequence[str]:
        """Return the URLs of all present buckets beside the run's own."""
        ...


class Regions:
    """Access to the buckets beside a run's own; each is opened when it is first needed."""

    def __init__(self, open_bucket: Callable[[str], AbstractAsyncContextManager[Store]], runtime: Runtime) -> None:
        self.near = ""
        """The learner of this process, which reads values and snapshots from its own bucket first; empty: none."""
        self.mirrors = False
        """Whether this process copies values and snapshots that it publishes to every present bucket."""
        self._directories: list[Directory] = []
        self._open_bucket = open_bucket
        self._runtime = runtime
        self._open: dict[str, asyncio.Future[Store]] = {}
        self._stack = AsyncExitStack()
        self._avoided: dict[str, float] = {}
        self._failures: dict[str, int] = {}

    def directed_by(self, directory: Directory) -> None:
        """Add a directory that knows which learner has which bucket."""
        if not any(known is directory for known in self._directories):
            self._directories.append(directory)

    @property
    def _directory(self) -> Directory | None:
        """The directory that knows the most versions; None if there is none."""
        return max(self._directories, key=lambda directory: directory.known, default=None)

    async def close(self) -> None:
        """Close all buckets that were opened."""
        await self._stack.aclose()

    async def read(self, key: str, ask: Ask[T], home: Home[T]) -> T:
        """Return the answer of the first bucket that has an object.

        Raises what the run's own bucket raises; for an update that is missing there, what the learner's bucket raised.
        """
        urls = self._read_at(key)
        first = [url for url in urls if not self._is_avoided(url)]
        failed: Unavailable | Denied | None = None
        missing: ObjectMissing | None = None
        for url in (*first, "", *(url for url in urls if url not in first and key.startswith(UPDATES))):
            try:
                if not url:
                    return await home()
                found = await ask(await self._at(url))
            except ObjectMissing as error:
                missing = missing if url else error
            except (Unavailable, Denied) as error:
                if not url:
                    raise
                self._avoid(url, error)
                failed = error
            else:
                self._failures.pop(url, None)
                return found
        # If a learner's bucket failed, the update may be there, so it is not known to be missing.
        raise failed if failed is not None and key.startswith(UPDATES) else missing or ObjectMissing(key)

    def doubt(self, key: str, error: Exception) -> bool:
        """Note that the object read under a key is damaged. Return whether it may have been a copy in another bucket.

        If so, that bucket is avoided for a while, and the next read asks the run's own bucket.
        """
        urls = self._read_at(key) if key.startswith(PUBLISHED) else ()
        for url in urls:
            self._avoid(url, error)
        return bool(urls)

    async def create(
        self, key: str, ask: Callable[[Store], Awaitable[bool]], home: Callable[[], Awaitable[bool]]
    ) -> bool:
        """Create an object in the run's own bucket; an update in its learner's bucket first, if that accepts it."""
        for url in self._buckets_of(key)[:1]:
            if url and not self._is_avoided(url):
                try:
                    created = await ask(await self._at(url))
                except (Unavailable, Denied) as error:
                    self._avoid(url, error)
                else:
                    self._failures.pop(url, None)
                    return created
        return await home()

    async def put(self, key: str, ask: Ask[None], home: Home[None]) -> None:
        """Store an object in the run's own bucket, and try to copy values and snapshots to all present buckets."""
        urls = self._directory.buckets() if self.mirrors and self._directory and key.startswith(PUBLISHED) else ()
        copies = {asyncio.ensure_future(self._copy(url, ask)): url for url in urls if not self._is_avoided(url)}
        try:
            await home()
            if copies:
                _, late = await asyncio.wait(copies, timeout=MIRROR_S)
                for copy in late:
                    self._avoid(copies[copy], TimeoutError(f"no copy within {MIRROR_S:g} s"))
        finally:
            for copy in copies:
                copy.cancel()
            await asyncio.gather(*copies, return_exceptions=True)

    async def delete(
        self, key: str, ask: Callable[[Store], Awaitable[None]], home: Callable[[], Awaitable[None]]
    ) -> None:
        """Delete an object in all buckets that may have it.

        An update that another bucket fails to delete is listed again.
        """
        urls = self._buckets_of(key)
        if key.startswith(PUBLISHED) and self._directory:
            urls = self._directory.buckets()
        for url in filter(None, urls):
            try:
                await ask(await self._at(url))
            except (Unavailable, Denied) as error:
                self._avoid(url, error)
        await home()

    async def list(self, prefix: str, home: Home[Sequence[Entry]]) -> Sequence[Entry]:
        """Return what the run's own bucket has below a prefix, and the updates there of the other buckets."""
        found = {entry.key: entry for entry in await home()}
        if self._directory and prefix.startswith(UPDATES):
            urls = self._buckets_of(prefix) if prefix.count("/") > 2 else self._directory.buckets()
            for url in filter(None, urls):
                try:
                    found |= {entry.key: entry for entry in await (await self._at(url)).list(prefix)}
                except (Unavailable, Denied) as error:
                    self._avoid(url, error)
        return sorted(found.values())

    # --- inside -------------------------------------------------------------------------------------------------------

    def _buckets_of(self, key: str) -> Sequence[str]:
        parts = key.split("/")  # the doctor also asks for keys that no update has
        if self._directory is None or not key.startswith(UPDATES) or len(parts) < 3:
            return ()
        return self._directory.buckets_of(parts[2])

    def _read_at(self, key: str) -> Sequence[str]:
        if self._directory and self.near and key.startswith(PUBLISHED):
            return [url for url in self._directory.buckets_of(self.near)[:1] if url]
        return [url for url in self._buckets_of(key) if url]

    async def _copy(self, url: str, ask: Ask[None]) -> None:
        try:
            await ask(await self._at(url))
        except (Unavailable, Denied) as error:
            self._avoid(url, error)

    async def _at(self, url: str) -> Store:
        if url not in self._open:
            self._open[url] = asyncio.ensure_future(self._opened(url))
        try:
            return await asyncio.shield(self._open[url])
        except InputError as error:
            raise Denied(str(error)) from None

    async def _opened(self, url: str) -> Store:
        return await self._stack.enter_async_context(self._open_bucket(url))

    def _is_avoided(self, url: str) -> bool:
        return self._runtime.now() < self._avoided.get(url, 0.0)

    def _avoid(self, url: str, error: Exception) -> None:
        if self._is_avoided(url):
            return
        again = self._failures.get(url, 0)
        seconds = min(AVOIDED_S * 2.0 ** min(again, 4), AVOIDED_MOST_S)
        self._failures[url] = again + 1
        self._avoided[url] = self._runtime.now() + seconds
        logger.warning("%s will not be asked first for %g s: %s", redacted(url), seconds, error)

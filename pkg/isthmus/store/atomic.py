"""Test whether a store honours create-only PUT. The log rests on this request, so it is tested, never assumed.

A store that ignores the condition would let two syncers overwrite each other. A store that checks first and writes
later passes a test with one client but fails with several, so the test includes races.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from isthmus.errors import Denied, IsthmusError, ObjectMissing, Unavailable, first_cause
from isthmus.format.records.keys import SCRATCH
from isthmus.runtime.clock import Runtime
from isthmus.store.base import Store

RACES_AT_START = 4
"""Concurrent races, of two creates each, that a process holds before it writes a log.

Servers that lock a key make the losers wait (SeaweedFS: a second each), so many racers on one key would delay every
start.
"""


async def why_not_create_only(
    store: Store, runtime: Runtime, below: str = SCRATCH, *, races: int = 1, racers: int = 2
) -> str:
    """Return why the log must not be written to this store, or an empty string; no objects are left behind.

    Creates one key twice, then holds `races` at once with `racers` creates each, on its own keys below `below`. Raises
    `Denied` if the credentials do not allow this, `Unavailable`, or a group of these.
    """
    key = f"{below}{runtime.new_id()}"
    # Read first: some servers create a missing bucket on the first write, which would hide a mistyped name.
    with contextlib.suppress(ObjectMissing):
        await store.get(key)
    first, second = b"isthmus: first", b"isthmus: second"
    async with swept(store, key):
        await store.create(key, first)
        again = await store.create(key, second)
        found = bytes(await store.get(key))
    if again or found != first:
        return "a second create-only PUT (If-None-Match: *) of the same key got through"
    async with asyncio.TaskGroup() as tasks:
        held = [tasks.create_task(_race(store, f"{below}{runtime.new_id()}", runtime, racers)) for _ in range(races)]
    return next((why for task in held if (why := task.result())), "")


async def _race(store: Store, key: str, runtime: Runtime, racers: int) -> str:
    bodies = [f"isthmus: racer {i} {runtime.new_id()}".encode() for i in range(racers)]
    async with swept(store, key):
        # Wait for all creates before the key is deleted; a late one would leave an object behind.
        said = await asyncio.gather(*(store.create(key, body) for body in bodies), return_exceptions=True)
        failed = [answer for answer in said if isinstance(answer, BaseException)]
        # A store may limit the writes of one key (R2: one a second), so that not every racer gets an answer.
        if fatal := [error for error in failed if not isinstance(error, Unavailable) or len(said) - len(failed) < 2]:
            raise fatal[0]
        won = [answer is True for answer in said]
        found = bytes(await store.get(key))
    winners = [body for body, created in zip(bodies, won, strict=True) if created]
    if len(winners) > 1:
        return f"{len(winners)} of {racers} concurrent create-only PUTs of one key got through: it is not atomic"
    # If replies are lost, no racer may know that it won. But if one was told so, its object must be the stored one.
    if found not in bodies or (winners and found != winners[0]):
        return "the object of the creator that was told it had won is not the one that is stored"
    return ""


@asynccontextmanager
async def swept(store: Store, key: str) -> AsyncIterator[None]:
    """Delete a key when the block ends, whether or not it raises."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(IsthmusError):
            await store.delete(key)
        raise
    await store.delete(key)


async def require_create_only(store: Store, runtime: Runtime) -> None:
    """Raise `Denied` if the log must not be written to this store."""
    try:
        why = await why_not_create_only(store, runtime, races=RACES_AT_START)
    except BaseExceptionGroup as error:
        raise first_cause(error) from None
    if why:
        raise Denied(
            f"{store.url}: this store does not honour create-only PUT, on which the commit log rests: {why}; "
            "use one that does (AWS S3, MinIO, SeaweedFS, R2)"
        )

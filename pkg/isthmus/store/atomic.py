"""Does a store honour create-only PUT? The log rests on that one request, so it is tried and never taken on trust.

A store that ignores the condition would let two syncers overwrite each other. One that checks first and writes later
passes the check with one client and fails it with several: hence a race.
"""

import asyncio
import contextlib

from isthmus.errors import Denied, ObjectMissing
from isthmus.records.objects import SCRATCH
from isthmus.runtime import Runtime
from isthmus.store.base import Store

RACES_AT_START = 4
"""Races of two that a process holds, side by side, before it writes a log.

Servers that lock a key make the losers wait (SeaweedFS: a second each): many racers on one key would delay every start.
"""


async def why_not_create_only(
    store: Store, runtime: Runtime, below: str = SCRATCH, *, races: int = 1, racers: int = 2
) -> str:
    """Return why the log must not be written to this store, or an empty string; leaves nothing behind.

    Tries a second create after a first, then `races` of so many `racers` at once, on keys of its own below `below`.
    Raises `Denied` where the credentials do not reach so far, `Unavailable`.
    """
    key = f"{below}{runtime.new_id()}"
    # Reading comes first: some servers create a missing bucket on the first write, and hide a mistyped name.
    with contextlib.suppress(ObjectMissing):
        await store.get(key)
    first, second = b"isthmus: first", b"isthmus: second"
    await store.create(key, first)
    again = await store.create(key, second)
    found = bytes(await store.get(key))
    await store.delete(key)
    if again or found != first:
        return "a second create-only PUT (If-None-Match: *) of the same key got through"
    found_in = await asyncio.gather(
        *(_race(store, runtime, f"{below}{runtime.new_id()}", racers) for _ in range(races))
    )
    return next((why for why in found_in if why), "")


async def _race(store: Store, runtime: Runtime, key: str, racers: int) -> str:
    bodies = [f"isthmus: racer {i} {runtime.new_id()}".encode() for i in range(racers)]
    won = await asyncio.gather(*(store.create(key, body) for body in bodies))
    found = bytes(await store.get(key))
    await store.delete(key)
    winners = [body for body, created in zip(bodies, won, strict=True) if created]
    if len(winners) > 1:
        return f"{len(winners)} of {racers} concurrent create-only PUTs of one key got through: it is not atomic"
    # None may have heard of its success, where replies are lost; but what was told to have won must be there.
    if found not in bodies or (winners and found != winners[0]):
        return "the object of the creator that was told it had won is not the one that is stored"
    return ""


async def require_create_only(store: Store, runtime: Runtime) -> None:
    """Raise `Denied` for a store on which the log must not be written."""
    if why := await why_not_create_only(store, runtime, races=RACES_AT_START):
        raise Denied(
            f"{store.url}: this store does not honour create-only PUT, on which the commit log rests: {why}; "
            "use one that does (AWS S3, MinIO, SeaweedFS, R2)"
        )

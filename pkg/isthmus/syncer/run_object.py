"""Watch over the run object: every process needs it to start, and none that runs would miss it."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from isthmus.errors import Denied, ObjectMissing, Unavailable
from isthmus.format.records.keys import RUN_KEY, commit_key
from isthmus.log.run import Run
from isthmus.store import Store
from isthmus.store.base import is_there

logger = logging.getLogger(__name__)

LOOK_S = 60.0
"""Seconds between two looks."""


async def keep(run: Run, store: Store, heads: Callable[[], Sequence[int]]) -> None:
    """Write the run object again, byte by byte, if it is gone; where that is denied, log what to do, once.

    If it is there with other bytes, log that: no object is ever replaced. `store`: one that does not take a denial for
    an outage. `heads`: the newest version of each fragment. If the newest commit of a fragment is gone, too, its
    owner is deleting the whole run, and nothing is written.
    """
    denied, damaged = False, False
    while True:
        await asyncio.sleep(LOOK_S)
        newest = next(((p, version) for p, version in enumerate(heads()) if version), None)
        try:
            found = await _found(store, len(run.blob))
            if found is not None and found != run.blob and not damaged:
                logger.error(
                    "the run object %s/%s is not the one that this syncer started with (%d bytes in place of %d), and "
                    "no process can start: end no syncer; move it away, and it is written again within a minute",
                    run.url, RUN_KEY, len(found), len(run.blob),
                )  # fmt: skip
            damaged = found is not None and found != run.blob
            if newest is None or found is not None or not await is_there(store, commit_key(*newest)):
                continue
            if await store.create(RUN_KEY, run.blob):
                logger.warning(
                    "the run object %s/%s was gone, and is written again: find out what deleted it",
                    run.url,
                    RUN_KEY,
                )
        except Unavailable:
            continue
        except Denied:
            if not denied:
                logger.error(
                    "the run object %s/%s is gone, and this syncer may not write it: restore it from a backup before "
                    "any process has to start, since none can without it",
                    run.url, RUN_KEY,
                )  # fmt: skip
            denied = True


async def _found(store: Store, size: int) -> bytes | None:
    """Return the run object, and of a longer one than `size` no more than shows that it is longer; None: it is gone."""
    try:
        return bytes(await store.get_range(RUN_KEY, 0, size + 1))
    except ObjectMissing:
        return None

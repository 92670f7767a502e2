"""Snapshots of a fragment that this syncer keeps, from which others fold, and checks that its log has no holes."""

import asyncio
import logging
import math
from collections.abc import Callable

from isthmus.errors import Denied, LogCorrupt, Unavailable
from isthmus.format.layout import Fragment
from isthmus.format.records.keys import snapshot_key
from isthmus.format.rules import Pace, Rules
from isthmus.log import Log, merge
from isthmus.log.holes import HOLE, require_commits
from isthmus.log.merge import State, state_bytes
from isthmus.runtime.clock import Runtime

logger = logging.getLogger(__name__)

WORTH, LEAST = 2, 16 << 20
"""The bytes of updates merged since the newest snapshot after which the next one is written: a multiple of a state's
bytes, and a least number, since fewer are folded in a moment."""

WHOLE_EVERY_S = 600.0
"""The least seconds between two checks for missing commits. Each check follows a snapshot."""


def snapshot_after(rules: Rules, size: int) -> int:
    """Return the bytes of merged updates after which a snapshot is due, for a fragment of `size` parameters."""
    return max(WORTH * state_bytes(rules) * size, LEAST)


class Snapshots:
    """Writes the snapshots of one fragment, one at a time."""

    def __init__(
        self,
        log: Log,
        fragment: Fragment,
        pace: Pace,
        runtime: Runtime,
        turns: asyncio.Semaphore,
        newest: Callable[[], State | None],
    ) -> None:
        """`turns` is shared by all fragments. `newest` returns the newest state, or None if it is not here."""
        self.merged = 0
        """Bytes of updates merged since the newest snapshot, as far as known."""
        self.hole = ""
        """The error that names a missing commit, from the last check of the log; or empty."""
        self._log = log
        self._fragment = fragment
        self._pace = pace
        self._runtime = runtime
        self._turns = turns
        self._newest = newest
        self._after = snapshot_after(log.run.rules, fragment.size)
        self._version = 0
        """The newest version of which a snapshot is stored."""
        self._looked_at = -math.inf
        self._task: asyncio.Task[None] | None = None

    def look(self, version: int, tasks: asyncio.TaskGroup) -> None:
        """Begin to write a snapshot if one is due at this version."""
        if self.is_due(version):
            self._task = tasks.create_task(self.write())

    def is_due(self, version: int) -> bool:
        """Return whether a snapshot is due. A syncer that takes over reads the newest one and the updates merged
        since."""
        if self._task is not None and not self._task.done():
            return False
        by_versions = (version + self._fragment.index) % self._pace.snapshot_every == 0
        return by_versions or self.merged >= self._after

    async def write(self) -> None:
        """Write a snapshot when its turn comes. If the store is away, none is written."""
        p = self._fragment.index
        async with self._turns:
            # Take the newest state only now: while other snapshots are written, no old state is kept in memory.
            state, told = self._newest(), self.merged
            if state is None:
                return  # another syncer keeps the fragment, and writes its snapshots
            blob = await self._runtime.offload(merge.snapshot, state, p, self._log.run.digest)
            digest = await self._log.sealed_digest(blob)
            try:
                await self._log.store.put(snapshot_key(p, state.version, digest), blob)
            except Unavailable as error:
                about = {"fragment": p, "version": state.version}
                logger.warning("fragment %d: no snapshot: %s", p, error, extra=about)
            else:
                self._version = max(state.version, self._version)
                self.merged -= told
        if self._version and self._runtime.now() - self._looked_at >= WHOLE_EVERY_S:
            await self._look_for_holes()

    async def _look_for_holes(self) -> None:
        """Check that every commit is there. This syncer would not notice a missing one, but other syncers and replay
        need all."""
        p = self._fragment.index
        try:
            await require_commits(self._log, p, self._version)
        except LogCorrupt as error:
            if self.hole != str(error):
                logger.error("fragment %d has %s: %s", p, HOLE, error, extra={"fragment": p})
            self.hole = str(error)
        except (Unavailable, Denied):
            return
        else:
            self.hole = ""
        self._looked_at = self._runtime.now()

    async def write_last(self) -> None:
        """Write the last state as a snapshot, unless there is one, so that the next syncer need not fold up to it."""
        state = self._newest()
        if state is None or self._version >= state.version:
            return
        if self._task is not None:
            await self._task
        if await self._at_the_end(state.version):
            await self.write()

    async def _at_the_end(self, version: int) -> bool:
        """Return whether a version is the newest. From an older one no snapshot is written: the updates merged after it
        may have been collected, so that nothing could be folded from there."""
        try:
            return await self._log.commit(self._fragment.index, version + 1) is None
        except (Unavailable, Denied, LogCorrupt):
            return False

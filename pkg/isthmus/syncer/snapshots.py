"""Of a fragment that is kept here: when its state is written as a snapshot, from which others fold, and whether the log
is whole for them."""

import asyncio
import logging
import math
from collections.abc import Callable

from isthmus.errors import Denied, LogCorrupt, Unavailable
from isthmus.format.layout import Fragment
from isthmus.format.records.keys import snapshot_key
from isthmus.format.rules import Pace, Rules
from isthmus.log import Log, merge
from isthmus.log.complete import require_commits
from isthmus.log.merge import State, state_bytes
from isthmus.runtime.clock import Runtime

logger = logging.getLogger(__name__)

WORTH, LEAST = 2, 16 << 20
"""Updates merged since the newest snapshot, in snapshots' bytes, after which the next one is written; and in bytes, of
which fewer are folded in a moment."""

WHOLE_EVERY_S = 600.0
"""Between two looks for commits that are missing, each after a snapshot."""


def snapshot_after(rules: Rules, size: int) -> int:
    """Return the bytes of updates merged into a fragment of so many parameters after which a snapshot is due."""
    return max(WORTH * state_bytes(rules) * size, LEAST)


class Snapshots:
    """The snapshots of one fragment that this syncer writes, one at a time."""

    def __init__(
        self,
        log: Log,
        fragment: Fragment,
        pace: Pace,
        runtime: Runtime,
        turns: asyncio.Semaphore,
        newest: Callable[[], State | None],
    ) -> None:
        """`turns` is shared by all fragments; `newest` returns the state by now, None where it is not here."""
        self.merged = 0
        """Bytes of updates merged since the newest snapshot, as far as is known."""
        self.hole = ""
        """Which commit was missing when the log was last looked through, or empty."""
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
        """Begin to write one, where one is due at this version."""
        if self.is_due(version):
            self._task = tasks.create_task(self.write())

    def is_due(self, version: int) -> bool:
        """Return whether who takes over should find a newer snapshot: it reads that one and what was merged since."""
        if self._task is not None and not self._task.done():
            return False
        by_versions = (version + self._fragment.index) % self._pace.snapshot_every == 0
        return by_versions or self.merged >= self._after

    async def write(self) -> None:
        """Write one when its turn comes; where the store is away there is none."""
        p = self._fragment.index
        async with self._turns:
            # What it is by now: while others are written, no state is kept that has been left behind meanwhile.
            state, told = self._newest(), self.merged
            if state is None:
                return  # it is another's, who writes its own
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
        """See whether every commit is there. Who keeps the fragment would not miss one; others would, and replay."""
        p = self._fragment.index
        try:
            await require_commits(self._log, p, self._version)
        except LogCorrupt as error:
            if self.hole != str(error):
                logger.error("fragment %d goes on, but its log has a hole: %s", p, error, extra={"fragment": p})
            self.hole = str(error)
        except (Unavailable, Denied):
            return
        else:
            self.hole = ""
        self._looked_at = self._runtime.now()

    async def write_last(self) -> None:
        """Write the state that this syncer leaves, where none was: whoever starts next need not fold what it knows."""
        state = self._newest()
        if state is None or self._version >= state.version:
            return
        if self._task is not None:
            await self._task
        if await self._at_the_end(state.version):
            await self.write()

    async def _at_the_end(self, version: int) -> bool:
        """Return whether a version is the newest. From a snapshot of an older one no way may lead on any more: what was
        merged after it may have been collected."""
        try:
            return await self._log.commit(self._fragment.index, version + 1) is None
        except (Unavailable, Denied, LogCorrupt):
            return False

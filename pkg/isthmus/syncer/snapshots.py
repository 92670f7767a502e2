"""Snapshots of a fragment that this syncer keeps, from which others fold, and checks that its log has no holes."""

import asyncio
import logging
import math
from collections.abc import Callable, Collection

from isthmus.errors import Denied, LogCorrupt, Unavailable
from isthmus.format.layout import Fragment
from isthmus.format.records.keys import snapshot_key
from isthmus.format.records.objects import UNSTATED
from isthmus.format.rules import Pace, Rules
from isthmus.log import Commit, Log, merge
from isthmus.log.holes import HOLE, require_commits
from isthmus.log.merge import State, state_bytes
from isthmus.runtime.clock import Runtime

logger = logging.getLogger(__name__)

WORTH, LEAST = 2, 16 << 20
"""The bytes of updates merged since the newest snapshot after which the next one is written: a multiple of a state's
bytes, and a least number, since fewer are folded in a moment."""

WHOLE_EVERY_S = 600.0
"""The least seconds between two checks for missing commits. Each check follows a snapshot."""


SMALL = 4 << 20
"""Bytes of a state up to which every commit states its digest, which then costs a millisecond or two."""


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
        accepted: Collection[int] = (),
    ) -> None:
        """`turns` is shared by all fragments. `newest` returns the newest state, or None if it is not here. `accepted`:
        versions that are lost for good, and are not reported."""
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
        self._accepted = accepted
        self._after = snapshot_after(log.run.rules, fragment.size)
        self._always = not log.run.header.states_at_snapshots or state_bytes(log.run.rules) * fragment.size <= SMALL
        self._version = 0
        """The newest version of which a snapshot is stored."""
        self._overdue = False
        """Whether one is due by the number of versions, and was not begun yet."""
        self._looked_at = -math.inf
        self._task: asyncio.Task[None] | None = None

    def states(self, version: int) -> bool:
        """Return whether the commit of a version, which is not yet merged, is to state the digest of its state."""
        return self._always or self.is_due(version)

    def look(self, commit: Commit, state: State, tasks: asyncio.TaskGroup) -> None:
        """Begin to write a snapshot of the state that a commit led to, if one is due and the commit vouches for it."""
        if commit.header.state_digest != UNSTATED and self.is_due(commit.version):
            self._overdue = False
            self._task = tasks.create_task(self._write(state))

    def is_due(self, version: int) -> bool:
        """Return whether a snapshot of this version is due, and can be written now.

        A syncer that takes over reads the newest one and the updates merged since. While other snapshots are written,
        none begins: it would keep an old state in memory until its turn.
        """
        self._overdue = self._overdue or (version + self._fragment.index) % self._pace.snapshot_every == 0
        busy = self._turns.locked() or (self._task is not None and not self._task.done())
        return (self._overdue or self.merged >= self._after) and not busy

    async def _write(self, state: State) -> None:
        """Write a snapshot. If the store is away, none is written."""
        p, told = self._fragment.index, self.merged
        async with self._turns:
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
            await require_commits(self._log, p, self._version, self._accepted)
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
        """Write the last state as a snapshot, unless there is one or its commit does not vouch for it, so that the next
        syncer need not fold up to it."""
        state = self._newest()
        if state is None or self._version >= state.version:
            return
        if self._task is not None:
            await self._task
        if await self._is_last(state.version):
            await self._write(state)

    async def _is_last(self, version: int) -> bool:
        """Return whether a version is the newest, and its commit vouches for its state.

        From an older one no snapshot is written: the updates merged after it may have been collected, so that nothing
        could be folded from there.
        """
        p = self._fragment.index
        try:
            commit, later = [await self._log.commit(p, v) for v in (version, version + 1)]
        except (Unavailable, Denied, LogCorrupt):
            return False
        return later is None and commit is not None and commit.header.state_digest != UNSTATED

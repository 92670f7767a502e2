"""Reading one fragment from its log: only the commits while another syncer keeps it, the state once it is wanted
here."""

import logging
from collections.abc import AsyncIterator

from isthmus.errors import LogCorrupt, Unavailable
from isthmus.format.layout import Fragment
from isthmus.format.rules import Pace
from isthmus.log import Log, fold
from isthmus.log.holes import require_whole
from isthmus.log.merge import State, state_bytes
from isthmus.rounds.bounds import REMEMBERED
from isthmus.runtime.clock import Runtime

logger = logging.getLogger(__name__)

FOLDS_TRIED = 3
"""Folds in a row that the store cut short, after which a fragment is left to other syncers. Folding is retried all the
same."""

FOLD_S, FOLD_BYTES_S = 10.0, 8 << 20
"""A fragment that is being folded is left to other syncers if no object arrives for these seconds, and a second more
for so many bytes of its state."""

At = fold.At[State] | fold.At[None]
"""A fragment at one version of its log: with its state, or known from its commits alone."""


class FragmentReader:
    """How far one fragment's log was read, which versions are known beyond that, and the state if it is wanted."""

    def __init__(self, log: Log, fragment: Fragment, pace: Pace, runtime: Runtime) -> None:
        self.state: State | None = None
        """The state at `version`; None while only the commits are known."""
        self.wanted = False
        """Whether this syncer is to hold the fragment, for which it needs the state."""
        self.broken = ""
        """The reason why the log cannot be folded to its end here, or empty."""
        self.refused = False
        """Whether the reason is that this syncer is denied an object."""
        self.version = 0
        self.digest = log.run.digest
        """The digest of the commit that made `version`, which the next commit must name."""
        self.under = 0
        """The membership version under which that commit was made."""
        self.begun = False
        """Whether the log has been read at all."""
        self.need = max(2, pace.staleness + 1)
        """The number of newest commits that must be there."""
        self.keep = max(REMEMBERED, self.need)
        """The number of newest commits that are read."""
        self.fold_s = 0.0
        """The time that folding the state took when the fragment was last taken over, in seconds."""
        self.folded: int | None = None
        """The bytes of updates that the last fold merged after its snapshot; None once they were taken into account."""
        self._log = log
        self._fragment = fragment
        self._pace = pace
        self._runtime = runtime
        self._state_bytes = state_bytes(log.run.rules) * fragment.size
        self._merging = fold.Merging(log, self._moved)
        self._following = fold.ChainOnly()
        self._retry_at = 0.0
        self._known = 0
        """The newest version that must be in the log, since it stopped a commit of this syncer."""
        self._said = 0
        """The newest version that a message names; 0 after a read of the log did not find it."""
        self._behind_since = runtime.now()
        self._read = 0
        """Bytes of updates read since folding began."""
        self._moved_at = runtime.now()
        """When folding the state began, or last read an object."""
        self._folding = False
        self._failed = 0
        """Folds in a row that the store cut short."""

    @property
    def folds(self) -> bool:
        """Whether the state is to be folded. After folding has failed, only another fold can show that it works
        again."""
        return self.wanted or bool(self.broken) or self._failed >= FOLDS_TRIED

    @property
    def retries(self) -> bool:
        """Whether it is time to read the log again. An object that was damaged in transfer may be whole in the store. A
        version that a message names counts until a read has reached the end of the log."""
        lacking = self.folds and self.state is None
        behind = self.version < max(self._known, self._said)
        return (lacking or behind or bool(self.broken)) and self._runtime.now() >= self._retry_at

    def lacks(self, version: int) -> bool:
        """Return whether this syncer cannot go on if the log is readable only up to `version`."""
        return self.version <= version or (self.folds and self.state is None)

    def learn_of(self, version: int, *, hearsay: bool = False) -> None:
        """Note that a version is in the log; `hearsay`: only a message says so."""
        if self.version >= max(self._known, self._said):
            self._behind_since = self._runtime.now()
        if hearsay:
            self._said = max(version, self._said)
        else:
            self._known = max(version, self._known)

    @property
    def said(self) -> int:
        """The newest version that a message names; 0 if a read of the log did not find it."""
        return self._said

    def looked(self, said: int) -> None:
        """Note that a read has reached the end of the log. `said`: the value of `said` when the read began. If the log
        does not have that version, it was false. One that was named meanwhile still counts."""
        if self._said <= said:
            self._said = 0

    def overdue(self, silent_s: float) -> bool:
        """Return whether to leave this fragment to other syncers: a known version could not be read here for longer
        than `silent_s`, the silence after which a syncer is taken for dead [s], or folding fails or stalls."""
        now = self._runtime.now()
        if self._failed >= FOLDS_TRIED:
            return True
        if self._folding:  # what counts is the time since the fold last read an object, not the wait for its turn
            return now - self._moved_at > FOLD_S + self._state_bytes / FOLD_BYTES_S
        return self.version < max(self._known, self._said) and now - self._behind_since > silent_s

    def go_to(self, version: int, digest: bytes, under: int, state: State | None) -> None:
        """Move to a version: `digest` is that of the commit that made it, `under` its membership version; `state` is
        None if only the commits are known."""
        self.version, self.digest, self.under, self.state = version, digest, under, state

    async def begin(self) -> fold.At[None]:
        """Read the commits to their end. Raises `LogCorrupt`, `Unavailable`, `Denied`."""
        at = await fold.fold(self._log, self._fragment.index, self._following, keep=self.keep, need=self.need)
        await require_whole(self._log, self._fragment.index, at.version)
        return at

    async def onward(self) -> AsyncIterator[At]:
        """Read the commits after `version`, and fold them if the state is wanted. Yields the places reached. Raises
        `LogCorrupt`, `Unavailable`."""
        self._retry_at = self._runtime.now() + self._pace.heartbeat_s
        p, folds = self._fragment.index, self.folds
        try:
            if folds and self.state is not None:
                here = fold.At(self.version, self.state, self.digest, (), self.under)
                async for folded in fold.onward(self._log, p, self._merging, here, keep=self.keep):
                    yield folded
                return
            if self.begun:
                known = fold.At(self.version, None, self.digest, (), self.under)
                async for followed in fold.onward(self._log, p, self._following, known, keep=self.keep):
                    yield followed
                if not folds:
                    return
        except LogCorrupt as error:
            # The next commits may have been collected while this syncer was away: start again from a snapshot.
            logger.warning("fragment %d: starts again from a snapshot: %s", p, error, extra={"fragment": p})
        if folds:
            yield await self._fold()
        else:
            yield await self.begin()

    async def _fold(self) -> fold.At[State]:
        started, self._read = self._runtime.now(), 0
        self._folding = True
        self._moved()
        try:
            at = await fold.fold(self._log, self._fragment.index, self._merging, keep=self.keep, need=self.need)
            await require_whole(self._log, self._fragment.index, at.version)
        except Unavailable:
            self._failed += 1
            raise
        finally:
            self._folding = False
        self._failed, self.fold_s, self.folded = 0, self._runtime.now() - started, self._read
        return at

    def _moved(self, size: int = 0) -> None:
        """Note that an object was read; `size`: its bytes if it is an update, else 0."""
        self._moved_at = self._runtime.now()
        self._read += size

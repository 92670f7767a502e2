"""How one fragment is read from its log: the commits alone while another keeps it, its state once it is wanted here."""

import logging
from collections.abc import AsyncIterator

from isthmus.errors import LogCorrupt, Unavailable
from isthmus.format.layout import Fragment
from isthmus.format.rules import Pace
from isthmus.log import Log, fold
from isthmus.log.complete import require_whole
from isthmus.log.merge import State, state_bytes
from isthmus.rounds.bounds import REMEMBERED
from isthmus.runtime.clock import Runtime

logger = logging.getLogger(__name__)

FOLDS_TRIED = 3
"""Folds in a row that the store cuts short, after which a fragment is left to others; they are tried again even so."""

FOLD_S, FOLD_BYTES_S = 10.0, 8 << 20
"""A fragment that is being folded is left to others where no object comes for as long as that, and a second more for so
many bytes of its state."""

At = fold.At[State] | fold.At[None]
"""With the state, or as its commits alone tell of it."""


class FragmentReader:
    """Where one fragment's log has been read to, what is known of it beyond, and the state where that is wanted."""

    def __init__(self, log: Log, fragment: Fragment, pace: Pace, runtime: Runtime) -> None:
        self.state: State | None = None
        """At `version`; None where only the commits are known."""
        self.wanted = False
        """Whether this syncer is to hold the fragment, which takes its state."""
        self.broken = ""
        """Why the log cannot be folded to its end here, or empty."""
        self.refused = False
        """Whether that is because something may not be read here."""
        self.version = 0
        self.digest = log.run.digest
        """Of the commit that made `version`: what the next commit must name."""
        self.under = 0
        """The membership which that was made under."""
        self.begun = False
        """Whether any place in the log has been read."""
        self.need = max(2, pace.staleness + 1)
        self.keep = max(REMEMBERED, self.need)
        """The newest commits that are asked for, and those that have to be there."""
        self.fold_s = 0.0
        """How long folding the state took when the fragment was last taken over, in seconds."""
        self.folded: int | None = None
        """Bytes of updates merged on the way from a snapshot to the state; whoever takes that state takes them, too."""
        self._log = log
        self._fragment = fragment
        self._pace = pace
        self._runtime = runtime
        self._state_bytes = state_bytes(log.run.rules) * fragment.size
        self._merging = fold.Merging(log, self._moved)
        self._following = fold.ChainOnly()
        self._retry_at = 0.0
        self._known = 0
        """The newest version that is in the log, as a commit of ours was refused for it."""
        self._said = 0
        """The newest version that somebody says is there, unless a look at the log has found that it is not."""
        self._behind_since = runtime.now()
        self._read = 0
        """Bytes of updates read since folding began."""
        self._moved_at = runtime.now()
        """When folding the state began, or last read a part of it."""
        self._folding = False
        self._failed = 0
        """Folds in a row that the store did not let come to an end."""

    @property
    def folds(self) -> bool:
        """Whether the state is wanted. Where folding it failed, only folding it tells that it goes again."""
        return self.wanted or bool(self.broken) or self._failed >= FOLDS_TRIED

    @property
    def retries(self) -> bool:
        """Whether it is time to look at the log again. An object that was damaged on its way may be whole in the store.
        A version that somebody named counts until one look at the log has come to its end."""
        lacking = self.folds and self.state is None
        behind = self.version < max(self._known, self._said)
        return (lacking or behind or bool(self.broken)) and self._runtime.now() >= self._retry_at

    def lacks(self, version: int) -> bool:
        """Return whether a log that can be read up to this version is not enough to go on here."""
        return self.version <= version or (self.folds and self.state is None)

    def learn_of(self, version: int, *, hearsay: bool = False) -> None:
        """Note that a version is in the log; `hearsay`: somebody says so."""
        if self.version >= max(self._known, self._said):
            self._behind_since = self._runtime.now()
        if hearsay:
            self._said = max(version, self._said)
        else:
            self._known = max(version, self._known)

    @property
    def said(self) -> int:
        """The newest version that somebody says is there."""
        return self._said

    def looked(self, said: int) -> None:
        """Note that a look at the log has come to its end. What was `said` when it began, and is not in the log then,
        was false."""
        if self.version < self._said <= said:
            self._said = 0

    def overdue(self, silent_s: float) -> bool:
        """Return whether this fragment is for others to keep: they know of a version that could not be read here for
        longer than `silent_s`, the silence of a syncer taken for dead [s], or its state does not come."""
        now = self._runtime.now()
        if self._failed >= FOLDS_TRIED:
            return True
        if self._folding:  # what waits for its turn to be folded is not late, whatever that takes
            return now - self._moved_at > FOLD_S + self._state_bytes / FOLD_BYTES_S
        return self.version < max(self._known, self._said) and now - self._behind_since > silent_s

    def go_to(self, version: int, digest: bytes, under: int, state: State | None) -> None:
        """Stand at a version, made by the commit of this digest under that membership, with its state where that is
        here."""
        self.version, self.digest, self.under, self.state = version, digest, under, state

    async def begin(self) -> fold.At[None]:
        """Read the commits to their end. Raises `LogCorrupt`, `Unavailable`, `Denied`."""
        at = await fold.fold(self._log, self._fragment.index, self._following, keep=self.keep, need=self.need)
        await require_whole(self._log, self._fragment.index, at.version)
        return at

    async def onward(self) -> AsyncIterator[At]:
        """Read what others committed, and fold it where the state is wanted. Raises `LogCorrupt`, `Unavailable`."""
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
            # What comes next may have been collected while we were away: start again from a snapshot.
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
        """Note that an object was read, and how many bytes of an update that were."""
        self._moved_at = self._runtime.now()
        self._read += size

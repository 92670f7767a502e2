"""The downlink: follows the log of every fragment, lazily, and hands newer values to the training side."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from isthmus.codecs import codec, packed_size
from isthmus.errors import LogCorrupt, Unavailable
from isthmus.format.rules import Pace
from isthmus.learner.backend import ArrayBackend, ArrayRef
from isthmus.learner.boundary import Ready, ToTraining
from isthmus.log import Commit, Log, fold
from isthmus.log.fork_detection import ForkDetection
from isthmus.runtime.averages import Usual
from isthmus.runtime.clock import Runtime

logger = logging.getLogger(__name__)

FRAGMENTS_AT_ONCE = 4
"""Fragments that are fetched at the same time."""

PROBE_BEATS = 10
"""Heartbeats without a message about a fragment, after which the store is asked for its next commit.

If no syncer is heard at all, the store is asked sooner, and then at ever longer intervals: the last commit before an
outage is often one that no message could announce. Work on its base that is sent after it is wasted.
"""


@dataclass(slots=True)
class Known:
    """What the agent knows of one fragment's log."""

    version: int
    values: ArrayRef
    digest: bytes
    wanted: int
    heard_at: float
    period: float = 0.0
    """Steps between two uploads, as the newest commit says; 0 stands for the number in the rules."""
    under: int = 0
    """The version of the membership that the newest commit was made under."""
    fetching: bool = False
    brought_at: float = 0.0
    """When the last fetch of the fragment ended, successful or not."""


class Downlink:
    """One learner's knowledge of the log, and the tasks that extend it."""

    def __init__(
        self,
        log: Log,
        runtime: Runtime,
        pace: Pace,
        backend: ArrayBackend,
        *,
        settle: Callable[[Commit], None],
        tell: Callable[[ToTraining], None],
        found_other: Callable[[], None] = lambda: None,
    ) -> None:
        """`found_other` is called when a syncer names another commit of a version than the store shows this learner."""
        self.known: list[Known] = []
        self._syncs = Usual()
        self.forks = [ForkDetection(f.index, found_other) for f in log.run.layout.fragments]
        self.found_at = 0.0
        """When the newest commit that no message announced was written, by the clock of its syncer; 0 without one."""
        self.merged_lately: set[str] = set()
        """Learners with an update in the newest commit of some fragment, as `begin` or `reach` read it."""
        self._log = log
        self._run = log.run
        self._runtime = runtime
        self._pace = pace
        self._settle = settle
        self._tell = tell
        self._carry = backend
        self._staged = backend.staged
        self._stale = asyncio.Event()
        self._syncer_heard_at = runtime.now()

    async def begin(self) -> None:
        """Read the newest published value of every fragment."""
        slots = asyncio.Semaphore(FRAGMENTS_AT_ONCE)
        self.known = list(await asyncio.gather(*(self._newest(f.index, slots) for f in self._run.layout.fragments)))

    async def reach(self, versions: Sequence[int]) -> None:
        """Read those fragments again whose known version is older than the given one. `versions`: by fragment."""
        slots = asyncio.Semaphore(FRAGMENTS_AT_ONCE)
        behind = [p for p, version in enumerate(versions) if self.known[p].version < version]
        for p, known in zip(behind, await asyncio.gather(*(self._newest(p, slots) for p in behind)), strict=True):
            self.known[p] = known

    async def _newest(self, fragment: int, slots: asyncio.Semaphore) -> Known:
        async with slots:
            at = await fold.fold(self._log, fragment, self._carry)
            self.merged_lately |= {given.learner for commit in at.last for given in commit.header.inputs}
            for commit in at.last:
                self.forks[fragment].know(commit.version, commit.digest)
            period = at.last[-1].header.period if at.last else 0.0
            return Known(at.version, at.carried, at.digest, at.version, self._runtime.now(), period, at.under)

    def want(self, fragment: int, version: int) -> None:
        """Note that a message says that a version exists. A false message costs one look at the store."""
        if fragment >= len(self.known):
            return
        self._syncer_heard_at = self.known[fragment].heard_at = self._runtime.now()
        self._want(fragment, version)

    def _want(self, fragment: int, version: int) -> None:
        if version > self.known[fragment].wanted:
            self.known[fragment].wanted = version
            self._stale.set()

    def said(self, fragment: int, version: int, digest: bytes, by: str) -> None:
        """Note the digest that a syncer gives for a version's commit."""
        if fragment < len(self.forks):
            self.forks[fragment].contradicts(version, digest, by)

    async def probe(self) -> None:
        """Look for commits that no message announced: the bus may have lost the message, or be unavailable."""
        while True:
            await asyncio.sleep(self._pace.heartbeat_s * self._runtime.random.uniform(0.5, 1.5))
            quiet = self._runtime.now() - self._patience_s()
            for p, known in enumerate(self.known):
                if known.heard_at < quiet:
                    known.heard_at = self._runtime.now()
                    try:
                        if await self._log.commit(p, known.version + 1) is None:
                            continue
                        if (commit := await self._log.newest(p, known.version + 1)) is not None:
                            self.found_at = max(self.found_at, commit.header.written_at)
                            self._want(p, commit.version)
                    except (Unavailable, LogCorrupt) as error:
                        logger.warning(
                            "could not probe fragment %d for a new version: %s", p, error, extra={"fragment": p}
                        )
                        break

    def _patience_s(self) -> float:
        """Return after how long without a message about a fragment the store is asked for its next commit [s]."""
        unheard_s, longest_s = self._runtime.now() - self._syncer_heard_at, PROBE_BEATS * self._pace.heartbeat_s
        if unheard_s < self._pace.silence_s:
            return longest_s
        return min(longest_s, max(self._pace.silence_s, unheard_s / 2))

    @property
    def sync_s(self) -> float:
        """The usual time from hearing of a commit until its value is ready to adopt, in seconds; 0 while unknown."""
        return self._syncs.value

    async def fetch(self) -> None:
        """Fetch fragments that are behind, for ever. Several tasks run this at the same time."""
        while True:
            behind = [p for p, k in enumerate(self.known) if k.wanted > k.version and not k.fetching]
            if not behind:
                self._stale.clear()
                await self._stale.wait()
                continue
            p = max(behind, key=self._need)
            self.known[p].fetching = True
            try:
                await self._bring(p)
            except (Unavailable, LogCorrupt) as error:
                logger.warning("fragment %d cannot be fetched for now: %s", p, error, extra={"fragment": p})
                await asyncio.sleep(self._runtime.random.uniform(0.2, 1.0))
            finally:
                self.known[p].fetching = False
                self.known[p].brought_at = self._runtime.now()
                self._stale.set()

    def _need(self, p: int) -> tuple[int, float]:
        """Return how urgent it is to fetch a fragment: how far it is behind, then how long it has waited."""
        known = self.known[p]
        return known.wanted - known.version, -known.brought_at

    async def _bring(self, p: int) -> None:
        """Fetch one fragment up to the newest version heard of, difference by difference or from a snapshot."""
        known = self.known[p]
        started = self._runtime.now()
        before, wanted = known.version, known.wanted
        behind = wanted - before
        fragment = self._run.layout.fragments[p]
        difference = packed_size(codec(self._run.rules.codec_down), fragment)
        # Bytes of a snapshot's published part and, on average, half a snapshot interval of differences after it.
        from_snapshot = 4 * fragment.size + difference * self._pace.snapshot_every // 2
        if behind * difference > from_snapshot:
            with contextlib.suppress(LogCorrupt):  # The version was announced but is not in the log.
                await self._leap(p, wanted)
        here: fold.At[ArrayRef] = fold.At(known.version, known.values, known.digest, (), known.under)
        try:
            async for at in fold.onward(self._log, p, self._carry, here, until=wanted):
                self._advance_to(p, at)
        except LogCorrupt as error:
            # The next object may have been collected while this learner was away, so start again from a snapshot.
            logger.warning("fragment %d starts again from a snapshot: %s", p, error, extra={"fragment": p})
            try:
                await self._leap(p, None)
            except LogCorrupt:
                if known.version > before:
                    await self._tell_of(p)  # The versions before the damage are sound.
                raise
        if known.version < wanted == known.wanted:
            known.wanted = known.version  # The version was announced but is not in the log.
        if known.version == before:
            return  # There is no newer version to report.
        if behind == 1:
            self._syncs.note(self._runtime.now() - started)
        await self._tell_of(p)

    async def _tell_of(self, p: int) -> None:
        """Offer the fragment's present version to the training side."""
        known = self.known[p]
        version, values = known.version, await self._staged(p, known.values)
        self._tell(Ready(p, version, values, known.period))

    async def _leap(self, p: int, until: int | None) -> None:
        """Go on from the newest snapshot, and settle updates by the commits that are skipped.

        `until`: the version to stop at; None: the end of the log. On a thin link the log may grow as fast as it is
        read.
        """
        known = self.known[p]
        at = await fold.fold(self._log, p, self._carry, until=until)
        async for commit in self._log.commits(p, known.version, known.digest, known.under):
            if commit.version > at.version:
                break
            self.forks[p].know(commit.version, commit.digest)
            self._settle(commit)
        if at.version > known.version:
            known.version, known.values, known.digest, known.under = at.version, at.carried, at.digest, at.under
            known.period = at.last[-1].header.period if at.last else 0.0

    def _advance_to(self, p: int, at: fold.At[ArrayRef]) -> None:
        known = self.known[p]
        known.version, known.values, known.digest, known.under = at.version, at.carried, at.digest, at.under
        self.forks[p].know(at.version, at.digest)
        known.period = at.last[-1].header.period
        self._settle(at.last[-1])

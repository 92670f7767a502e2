"""A learner's name and what is stored under it: the claim and checkpoints. The learner stops after a later claim."""

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from isthmus.errors import Denied, Fenced, LogCorrupt, ObjectMissing, RankLost, RecordInvalid, Unavailable, told
from isthmus.format.records import frame
from isthmus.format.records.keys import checkpoint_key, claim_key
from isthmus.format.records.objects import SCHEMA, ClaimHeader
from isthmus.format.rules import CHECKPOINTS_KEPT
from isthmus.learner.backend import ArrayBackend
from isthmus.learner.boundary import CopyState, ToTraining
from isthmus.learner.checkpoint import Saver, StateCopy, UnwrittenCheckpoint, UplinkPoint, draft, moved, why_useless
from isthmus.learner.resume import History, read_claim
from isthmus.learner.uplink import Uplink
from isthmus.log import Log
from isthmus.log.expulsions import replaced
from isthmus.runtime.clock import Runtime
from isthmus.runtime.metrics import LearnerMetrics

logger = logging.getLogger(__name__)

HOLD_SHARE, UPLINK_SHARE = 0.02, 0.15
"""The shares of the training thread's time, and of the uplink's, that checkpoints may take.

After a checkpoint that costs more, the next one comes later than the cadence says.
"""

RARER_MAX = 10
"""The longest such delay, in checkpoint periods: an outage of the store says nothing about the next checkpoint."""

FIRST_S = 10.0
"""Seconds to the first checkpoint of a process, unless its period is shorter."""

CLAIM_LOOKS = 3
"""A claim that this many looks have found invalid is skipped from then on."""

CLAIM_BEATS = 10
"""Heartbeats between two looks for a later claim of this name. A message of a later incarnation causes one at once."""


class Incarnation:
    """One incarnation of a learner's name."""

    def __init__(
        self,
        log: Log,
        runtime: Runtime,
        name: str,
        uplink: Uplink,
        backend: ArrayBackend,
        metrics: LearnerMetrics,
        *,
        heartbeat_s: float,
        checkpoint_s: float,
        tell: Callable[[ToTraining], None],
        through: Callable[[], None],
    ) -> None:
        """`tell` hands a message to the training side; `through` is called after each checkpoint has been handled."""
        self.saver: Saver | None = None
        self.busy = 0
        """Number of checkpoints on their way to the store."""
        self.bytes_stored = 0
        self.stored_step: int | None = None
        """Step of the newest checkpoint that this incarnation has stored; None before the first."""
        self.last_bytes = 0
        """Size of the arrays in the newest drafted checkpoint, in bytes."""
        self._log = log
        self._run = log.run
        self._store = log.store
        self._runtime = runtime
        self._name = name
        self._uplink = uplink
        self._backend = backend
        self._metrics = metrics
        self._heartbeat_s = heartbeat_s
        self._checkpoint_s = checkpoint_s
        self._tell = tell
        self._through = through
        self._keys: dict[str, list[str]] = {}  # by checkpoint, oldest first: the keys of its parts
        self._useless = False
        self._stored_at = runtime.now()
        self._not_before = -math.inf
        """The earliest time at which the next checkpoint may be asked for."""
        self._successor = asyncio.Event()
        self._passed = 0
        """The newest incarnation that is skipped, because several looks have found its claim invalid."""
        self._looks: dict[int, int] = {}
        """By later incarnation, how many looks have found its claim invalid."""

    def age_s(self) -> float:
        """Return the age in seconds of this incarnation's newest checkpoint; without one, of the incarnation itself."""
        return self._runtime.now() - self._stored_at

    # --- the name -----------------------------------------------------------------------------------------------------

    async def claim(self, history: History, versions: Sequence[int]) -> int:
        """Claim the name and return the number of this incarnation. `versions`: those of the log when it began."""
        incarnation = max(history.incarnation, history.heard) + 1
        while True:
            header = ClaimHeader(
                schema=SCHEMA,
                run=self._run.digest,
                learner=self._name,
                incarnation=incarnation,
                claimed_at=self._runtime.wall(),
                resumed=history.checkpoint.key if history.checkpoint else "",
                versions=tuple(versions),
                tokens_seen=history.tokens_seen,
                tokens_lost=history.tokens_lost,
            )
            claim = frame.draft(frame.Kind.CLAIM, header).blob
            self._log.seal(claim)
            if await self._store.create(claim_key(self._name, incarnation), claim):
                return incarnation
            incarnation += 1

    def doubt(self) -> None:
        """Make `watch` look for a later claim at once: a message says that it is from a later incarnation."""
        self._successor.set()

    async def watch(self) -> None:
        """Wait until another process has claimed this name. Raises `Fenced` then."""
        while True:
            try:
                async with asyncio.timeout(CLAIM_BEATS * self._heartbeat_s):
                    await self._successor.wait()
            except TimeoutError:
                pass
            self._successor.clear()
            if (following := await self._claimed()) is not None:
                raise Fenced(self._name, following)

    async def _claimed(self) -> int | None:
        """Return the incarnation of a later claim of this name; None if there is none.

        Only a claim by an author who may write under the name now counts.
        """
        incarnation = max(self._uplink.incarnation, self._passed)
        while True:
            incarnation += 1
            try:
                await read_claim(self._log, self._name, incarnation)
            except (ObjectMissing, Unavailable, LogCorrupt):
                return None
            except RecordInvalid as error:
                logger.error(
                    "ignoring claim %d on %s: its author is not authorised: %s", incarnation, self._name, error
                )
                # The claim may have been damaged on its way here, so it is skipped only after several looks.
                self._looks[incarnation] = self._looks.get(incarnation, 0) + 1
                if (
                    incarnation == max(self._uplink.incarnation, self._passed) + 1
                    and self._looks[incarnation] >= CLAIM_LOOKS
                ):
                    self._passed = incarnation
                    del self._looks[incarnation]
            else:
                return incarnation

    # --- checkpoints --------------------------------------------------------------------------------------------------

    async def ask_for_checkpoints(self) -> None:
        """Ask for a copy at the cadence; less often if copies cost much, and never while a checkpoint is on its way.

        The first copy comes early: a process that was just started is killed more often than later.
        """
        pause_s = min(FIRST_S, self._checkpoint_s)
        while math.isfinite(self._checkpoint_s):
            await asyncio.sleep(pause_s)
            pause_s = self._checkpoint_s
            await asyncio.sleep(max(0.0, self._not_before - self._runtime.now()))
            if not self.busy and not replaced(self._log, self._name):
                self._tell(CopyState())

    def take(self, frozen: StateCopy, tasks: asyncio.TaskGroup) -> None:
        """Take the training side's copy, and copy the uplink's state now, before a later message changes it."""
        self.busy += 1
        points = tuple(self._uplink.reconciled(p, point) for p, point in enumerate(frozen.points))
        tasks.create_task(self._keep(replace(frozen, points=points), self._uplink.traffic(), self._uplink.tokens_lost))

    async def _keep(self, frozen: StateCopy, traffic: Sequence[UplinkPoint], tokens_lost: int) -> None:
        began = self._runtime.now()
        try:
            points, traffic = await moved(frozen.points, traffic, self._backend.landed)
            frozen = replace(frozen, points=points)
            if not await self._is_useful(frozen):
                return
            drafted = await self._runtime.offload(
                draft, self._run, self._name, self._uplink.incarnation, tokens_lost, self._runtime.wall(), frozen,
                traffic, self.saver.take if self.saver else lambda _: None,
            )  # fmt: skip
            await self._store_one(drafted)
        except RankLost:
            raise
        except Exception as error:  # Training goes on if state cannot be kept or memory is full.
            self._metrics.checkpoints_failed.inc()
            logger.warning("no checkpoint of step %d: %s", frozen.step, told(error))
        finally:
            stored_s = self._runtime.now() - began
            apart_s = max(frozen.held_s / HOLD_SHARE, stored_s / UPLINK_SHARE)
            self._not_before = began + min(apart_s, RARER_MAX * self._checkpoint_s)
            self.busy -= 1
            self._through()

    async def _is_useful(self, frozen: StateCopy) -> bool:
        """Return whether this learner or a peer could go on from a state.

        The first useless state is logged, and so is the first useful one after it.
        """
        why = await why_useless(frozen, self._backend, self._runtime)
        if why is not None:
            self._metrics.checkpoints_failed.inc()
            if not self._useless:
                logger.warning("no checkpoint of step %d, and none after it until this is over: %s", frozen.step, why)
        elif self._useless:
            logger.warning("checkpoints are written again, from step %d on", frozen.step)
        self._useless = why is not None
        return why is None

    async def _store_one(self, drafted: UnwrittenCheckpoint) -> None:
        """Store a checkpoint, and delete the oldest beyond those that are kept.

        A process whose key was replaced stores and deletes nothing: no process can go on from a checkpoint that the
        old key signs, and the oldest checkpoint may be the one that the owner has vouched for.
        """
        with suppress(Unavailable, Denied, LogCorrupt):  # a membership that cannot be read must cost no checkpoint
            await self._log.members.refresh(self._store)
        if replaced(self._log, self._name):
            return
        step = drafted.header.step
        self.last_bytes = sum(leaf.spec.size for leaf in drafted.leaves)
        try:
            # Parts are stored before the checkpoint that names them, so a checkpoint that can be read is complete.
            stored = await asyncio.gather(*(self._backend.keep(part, held) for part, held in drafted.parts()))
            blob = await self._runtime.offload(drafted.pack, stored)
            digest = await self._log.sealed_digest(blob)
            key = checkpoint_key(self._name, self._uplink.incarnation, step, digest)
            await self._store.put(key, blob)
        except (Unavailable, Denied) as error:
            self._metrics.checkpoints_failed.inc()
            logger.warning("no checkpoint of step %d (%d bytes): %s", step, self.last_bytes, error)
            return
        self.bytes_stored += len(blob) + sum(part.size for part in stored)
        self._stored_at, self.stored_step = self._runtime.now(), step
        self._keys[key] = [part.key for part in stored]
        try:
            while len(self._keys) > CHECKPOINTS_KEPT:
                oldest = next(iter(self._keys))
                parts = self._keys.pop(oldest)  # at once: another checkpoint may be stored beside this one
                needed = {part for of in self._keys.values() for part in of}
                for gone in (oldest, *(part for part in parts if part not in needed)):
                    await self._store.delete(gone)
        except (Unavailable, Denied) as error:
            logger.warning("could not delete old checkpoints; the collector will: %s", error)

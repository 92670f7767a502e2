"""The way up: pack what the boundary captured, store it, announce it, say it again until a commit settles it."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from isthmus import kernels
from isthmus.codecs import as_bytes, codec, pack, packed_size, unpack
from isthmus.errors import Unavailable
from isthmus.kernels import F32
from isthmus.layout import Fragment
from isthmus.learner.boundary import BaseMerged, Captured, ToTraining, UploadDone, UploadFailed, rounded
from isthmus.learner.ledger import Account
from isthmus.log import Commit
from isthmus.members import smooth
from isthmus.reasons import Reason
from isthmus.records import frame
from isthmus.records.objects import SCHEMA, UpdateHeader, update_key
from isthmus.rules import Pace
from isthmus.run import Run
from isthmus.runtime import Runtime
from isthmus.store import Store

logger = logging.getLogger(__name__)

FINAL = {
    reason.value
    for reason in Reason
    # These speak of one update among several on its base, not of the newest one.
    if reason not in (Reason.SUPERSEDED, Reason.DUPLICATE, Reason.UNKNOWN_BASE, Reason.BASE_MERGED)
}
"""Rejections after which an update is not said again."""


@dataclass(slots=True)
class Attempt:
    """An upload that no commit has settled."""

    header: UpdateHeader
    key: str
    digest: bytes
    size: int
    due: bool
    boundary_at: float
    said_at: float
    residual: F32 | None
    """What the codec dropped; the next update's error feedback, if this one is merged."""


class Uplink:
    """One learner's updates from capture to settlement, and its account of every token."""

    def __init__(
        self,
        run: Run,
        store: Store,
        runtime: Runtime,
        name: str,
        pace: Pace,
        *,
        announce: Callable[[Attempt], None],
        tell: Callable[[ToTraining], None],
    ) -> None:
        self.incarnation = 0
        self.upload_s = 0.0
        """From a step boundary to the announcement, a moving average."""
        self.accounts = [Account() for _ in run.layout.fragments]
        self.attempts: list[dict[int, Attempt]] = [{} for _ in run.layout.fragments]
        """By fragment and base."""
        self.residuals: list[F32 | None] = [None] * len(run.layout.fragments)
        """Error feedback: what the codec dropped from the last merged update."""
        self.draining = False
        self._run = run
        self._store = store
        self._runtime = runtime
        self._name = name
        self._pace = pace
        self._say = announce
        self._tell = tell
        self._up = codec(run.rules.codec_up)
        self._lossy = run.rules.error_feedback and not self._up.lossless
        self._bases = [0] * len(run.layout.fragments)
        self._uploading: set[asyncio.Task[None]] = set()

    @property
    def busy(self) -> bool:
        """Whether uploads are under way."""
        return bool(self._uploading)

    def take(self, captured: Captured, tasks: asyncio.TaskGroup, done: Callable[[], None]) -> None:
        """Upload a capture in a task of its own; `done` is called when it is dealt with."""
        self._bases[captured.fragment] = captured.base
        if not self.accounts[captured.fragment].send(captured.base, captured.tokens):
            self._tell(UploadDone(captured.fragment))  # an earlier update on this base was merged meanwhile
            return

        def finished(task: asyncio.Task[None]) -> None:
            self._uploading.discard(task)
            done()

        task = tasks.create_task(self._upload(captured))
        self._uploading.add(task)
        task.add_done_callback(finished)

    def adopted(self, fragment: int, version: int, overwritten: int) -> None:
        """Note that the model holds a version now, and what it replaced."""
        self._bases[fragment] = version
        self.accounts[fragment].overwritten += overwritten

    def called(self, fragment: int, version: int) -> None:
        """Answer a call with what was already sent, should its announcement be lost; not at once, should they cross."""
        sent = self.attempts[fragment].get(version - 1)
        if sent is not None and self._runtime.now() - sent.said_at > self._pace.heartbeat_s / 4:
            self._announce(sent)

    def repeat(self) -> None:
        """Say the newest unsettled update of each fragment again, with jitter, where its last announcement is old."""
        now = self._runtime.now()
        for attempts in self.attempts:
            if attempts:
                newest = attempts[max(attempts)]
                if now - newest.said_at >= self._pace.heartbeat_s * self._runtime.random.uniform(0.8, 1.2):
                    self._announce(newest)

    def settle(self, commit: Commit) -> None:
        """Learn from a commit what became of our updates."""
        p = commit.header.fragment
        attempts, account = self.attempts[p], self.accounts[p]
        for given in commit.header.inputs:
            if given.learner != self._name:
                continue
            for base in [b for b in account.sent if b < given.base]:
                self._close(p, base, "rejected")
            attempt = attempts.get(given.base)
            if attempt is not None and attempt.digest == given.digest:
                self.residuals[p] = attempt.residual
            # A predecessor's update on this base is not ours, but closes the base all the same.
            self._close(p, given.base, "merged", given.tokens if given.incarnation == self.incarnation else 0)
            self._tell(BaseMerged(p, given.base))
        for turned in commit.header.rejected:
            if turned.learner == self._name and turned.reason in FINAL and turned.base in attempts:
                self._close(p, turned.base, "rejected")
        for base in [b for b in account.sent if commit.version - b > self._pace.staleness]:
            self._close(p, base, "late")
        account.forget(commit.version - self._pace.staleness - 1)

    def _close(self, p: int, base: int, part: str, tokens: int | None = None) -> None:
        """Settle a base; an attempt that was not merged takes its residual with it."""
        self.attempts[p].pop(base, None)
        self.accounts[p].settle(base, part, tokens)

    async def _upload(self, captured: Captured) -> None:
        p = captured.fragment
        header = UpdateHeader(
            schema=SCHEMA,
            run=self._run.digest,
            fragment=p,
            learner=self._name,
            incarnation=self.incarnation,
            base=captured.base,
            codec=self._up.name,
            steps=captured.steps,
            tokens=captured.tokens,
            step=captured.step,
            tokens_seen=captured.tokens_seen,
            train_s=captured.train_s,
        )
        account = self.accounts[p]
        blob, residual = await self._runtime.offload(
            self._pack, captured, header, self._run.layout.fragments[p], self.residuals[p]
        )
        if blob is None:
            logger.warning("fragment %d diverged here: the difference to version %d is not finite", p, captured.base)
            account.settle(captured.base, "rejected")
            self._tell(UploadDone(p))
            return
        digest = frame.digest(blob)
        key = update_key(p, self._name, captured.base, digest)
        try:
            await self._store.put(key, blob)
        except Unavailable as error:
            logger.warning("%s cannot be uploaded for now: %s", key, error)
            self._upload_failed(captured)
            return
        self._tell(UploadDone(p))
        self.upload_s = smooth(self.upload_s, self._runtime.now() - captured.boundary_at)
        if captured.base not in account.sent:
            return  # settled while it was on its way
        self.attempts[p][captured.base] = Attempt(
            header, key, digest, len(blob), captured.due, captured.boundary_at, 0.0, residual if self._lossy else None
        )
        self._announce(self.attempts[p][captured.base])

    def _upload_failed(self, captured: Captured) -> None:
        p, base = captured.fragment, captured.base
        account, earlier = self.accounts[p], self.attempts[p].get(base)
        if base not in account.sent or self.draining:
            self._tell(UploadDone(p))  # settled without it, or nobody is left to take it again
            return
        if self._bases[p] != base:
            account.settle(base, "late", earlier.header.tokens if earlier else None)
            self._tell(UploadDone(p))
            return
        account.unsend(base, earlier.header.tokens if earlier else None)
        header = earlier.header if earlier else None
        self._tell(UploadFailed(p, base, header.step if header else None, header.tokens_seen if header else 0))

    def _pack(
        self, captured: Captured, header: UpdateHeader, fragment: Fragment, residual: F32 | None
    ) -> tuple[bytearray | None, F32]:
        """Return the update object and what its codec dropped; (None, …) where the difference is not finite."""
        gradient = np.empty(fragment.size, np.float32)
        kernels.subtract(rounded(captured.base_values, fragment.tensors), captured.values, gradient)
        if residual is not None:
            kernels.add(gradient, residual, gradient)
        if not kernels.all_finite(gradient):
            return None, gradient
        out = frame.draft(frame.Kind.UPDATE, header, packed_size(self._up, fragment))
        pack(self._up, fragment, gradient, as_bytes(out.payload))
        if self._lossy:
            sent = np.empty_like(gradient)
            unpack(self._up, fragment, as_bytes(out.payload), sent)
            kernels.subtract(gradient, sent, gradient)
        return out.blob, gradient

    def _announce(self, attempt: Attempt) -> None:
        attempt.said_at = self._runtime.now()
        self._say(attempt)

"""The uplink: packs captures, stores the updates, announces them, and repeats that until a commit settles them."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from isthmus.codecs import codec
from isthmus.errors import Unavailable
from isthmus.format.records.keys import update_key
from isthmus.format.records.messages import Refusal
from isthmus.format.records.objects import SCHEMA, Input, Sent, UpdateHeader, work_of
from isthmus.format.rules import Pace
from isthmus.learner.backend import ArrayBackend, ArrayRef
from isthmus.learner.boundary import Adopted, BaseMerged, Captured, ToTraining, UploadDone, UploadFailed
from isthmus.learner.checkpoint import FragmentCopy, UplinkPoint
from isthmus.learner.ledger import Account
from isthmus.learner.resume import History
from isthmus.learner.unmerged import Unmerged
from isthmus.learner.upload_window import Window
from isthmus.log import Commit, Log
from isthmus.log.run import Run
from isthmus.reasons import FINAL, REMEDIES, Reason
from isthmus.runtime.averages import smooth
from isthmus.runtime.clock import Runtime

logger = logging.getLogger(__name__)

UNHEARD_MAX = 1 << 50
"""Most tokens of earlier incarnations, in all, that are believed to be merged without this learner knowing of them. No
training has more, and larger sums would exceed the range of messages and checkpoints."""

PASTS_AT_ONCE = 4
"""Fragments whose past commits are read at the same time."""

MADE_MAX = 3
"""Newest updates on a base whose residuals are kept. Each residual has the size of the fragment."""


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
    residual: ArrayRef | None
    """What the codec dropped: the error feedback of later updates, if this update is merged."""
    refused: bool = False
    """Whether a syncer has rejected the update for good. Another syncer may judge otherwise: only commits settle."""


@dataclass(frozen=True, slots=True)
class MadeUpdate:
    """An update that a round may merge.

    It is kept from before it is stored: the store's reply may be lost, or another process under this name may announce
    the same update.
    """

    digest: bytes
    key: str
    residual: ArrayRef


class Uplink:
    """One learner's updates from capture to settlement, and its account of every token."""

    def __init__(
        self,
        run: Run,
        backend: ArrayBackend,
        runtime: Runtime,
        name: str,
        pace: Pace,
        *,
        announce: Callable[[Attempt], None],
        tell: Callable[[ToTraining], None],
    ) -> None:
        self.incarnation = 0
        self.manifest: bytes | None = None
        """Digest of the manifest that updates name [32 bytes]; None: they name none."""
        self.upload_s = 0.0
        """Seconds from a step boundary until the update is stored, a moving average."""
        self.accounts = [Account() for _ in run.layout.fragments]
        self.attempts: list[dict[int, Attempt]] = [{} for _ in run.layout.fragments]
        """By fragment and base."""
        self.residuals: list[ArrayRef | None] = [None] * len(run.layout.fragments)
        """Error feedback that no update carries: what the codec dropped from merged updates."""
        self.residual_of = [""] * len(run.layout.fragments)
        """By fragment: key of the last merged update whose residual was added to the error feedback."""
        self.tokens_lost = 0
        """Tokens that earlier incarnations trained beyond the checkpoints from which later ones resumed."""
        self.settled_to = [0] * len(run.layout.fragments)
        """By fragment: the newest commit that these accounts include."""
        self.draining = False
        self.unmerged = Unmerged(runtime.now(), 0)
        self._run = run
        self._backend = backend
        self._runtime = runtime
        self._name = name
        self._pace = pace
        self._say = announce
        self._tell = tell
        self._codec_up = codec(run.rules.codec_up).name
        self._bases = [0] * len(run.layout.fragments)
        self._absorbed: set[int] = set()  # fragments whose local work at the checkpoint is in an update stored later
        self.taken: list[dict[int, ArrayRef | None]] = [{} for _ in run.layout.fragments]
        """By fragment and base: the error feedback that updates packed on the base carry. It is out of `residuals`
        until the base is merged or too old to be: no update on another base may carry it too."""
        self.window = Window()
        self._made: list[dict[int, tuple[MadeUpdate, ...]]] = [{} for _ in run.layout.fragments]
        """By fragment and base, oldest first. Kept until the base is merged or too old, even after a rejection."""
        self._own_feedback: set[int] = set()  # fragments whose newest residual comes from this incarnation's updates
        self._uploading: set[asyncio.Task[None]] = set()
        self._freed = asyncio.Event()

    # --- going on from a checkpoint -----------------------------------------------------------------------------------

    def resume(self, history: History) -> None:
        """Take over the accounts, unsettled updates and error feedback of the incarnations before this one.

        Updates that they stored after the checkpoint are announced again too: a commit may still merge them.
        """
        now = self._runtime.now()
        self.unmerged = Unmerged(now, history.step)
        self.tokens_lost = history.tokens_lost
        c = history.checkpoint
        if c is not None:
            self.accounts = [t.account.copy() for t in c.traffic]
        for p, account in enumerate(self.accounts):
            if c is not None:
                known, point = c.traffic[p], c.points[p]
                self.residuals[p], self.residual_of[p] = known.residual, known.residual_of
                self.taken[p] = dict(known.taken)
                for sent, residual in known.attempts:
                    self.attempts[p][sent.header.base] = _attempt(sent, residual, now)
                    if residual is not None:
                        self._remember(p, sent.header.base, MadeUpdate(sent.digest, sent.key, residual))
            account.lost += history.lost_since
            self.settled_to[p] = history.settled_to[p] if history.settled_to else 0
            for sent in history.stored[p] if history.stored else []:
                base, earlier = sent.header.base, self.attempts[p].get(sent.header.base)
                if base in account.settled or (earlier and earlier.header.tokens >= sent.header.tokens):
                    continue
                longer = sent.header.tokens > account.sent.get(base, 0)
                if c is not None and base == point.base and not point.merged and longer:
                    # The update holds all of the checkpoint's local work, and more. So that work counts as sent.
                    account.sent[base] = c.header.tokens_seen - point.origin_tokens
                    self._absorbed.add(p)
                else:
                    account.sent.setdefault(base, 0)
                self.attempts[p][base] = _attempt(sent, None, now)

    async def settle_past(self, log: Log, history: History, read: Sequence[int], known: Sequence[int]) -> None:
        """Learn what became of earlier incarnations' updates. Reads only the commits that can have merged one of them.

        `read`: the versions that the log had when those updates were listed; later commits may have merged later
        updates. `known`: the versions that the log is known to have by now.
        """
        slots = asyncio.Semaphore(PASTS_AT_ONCE)

        async def one(p: int, known: int) -> None:
            if not history.settled_to:
                self.settled_to[p] = known
                return
            bases = [history.newest_bases[p], *self.attempts[p], *self.accounts[p].sent]
            last = known if known > read[p] else min(known, max(bases) + self._pace.staleness + 1)
            async with slots:
                # Updates merged below the oldest kept snapshot may be collected and not listed. Read up to there.
                kept = [version for version, _ in await log.snapshots(p) if version > 0]
                last = max(last, min([known, *kept]) if kept else 0)
                async for commit in log.commits(p, history.settled_to[p]):
                    if commit.version > last:
                        break
                    self.absorb(commit, history)
                    self.settle(commit)
            self.expire(p, known)

        await asyncio.gather(*(one(p, version) for p, version in enumerate(known)))

    def absorb(self, commit: Commit, history: History) -> None:
        """Count the checkpoint's local work as sent if a past commit merged it. Call this before settling the commit.

        The commit merged that work if it merged more tokens on the work's base than the checkpoint has as sent.
        """
        c, p = history.checkpoint, commit.header.fragment
        if c is None:
            return
        point, account = c.points[p], self.accounts[p]
        if point.merged:
            return  # this local work is not in any update on the base: an update on it was merged before
        for given in commit.header.inputs:
            if (given.learner, given.base) != (self._name, point.base) or given.base in account.settled:
                continue
            if given.tokens > account.sent.get(given.base, 0):
                account.sent[given.base] = c.header.tokens_seen - point.origin_tokens
                self._absorbed.add(p)

    def point(self, history: History, p: int, version: int, values: ArrayRef) -> FragmentCopy | None:
        """Return the local work with which a fragment resumes at this version, or None if the version replaces it."""
        c, account = history.checkpoint, self.accounts[p]
        if c is None:
            return None
        point = c.points[p]
        if p in self._absorbed:
            if version != point.base:
                return None
            # A longer update on this base is stored. Anything more that is sent on the base would be rejected.
            return FragmentCopy(version, values, history.step, history.tokens_seen, None, 0, None, merged=True)
        if version != point.base:
            local = c.header.tokens_seen - (point.origin_tokens if point.sent_step is None else point.sent_tokens)
            account.overwritten += local
            return None
        if point.sent_step is not None and point.base not in self.attempts[p] and point.base in account.sent:
            # The upload was under way and is lost, so its tokens are local again.
            account.unsend(point.base, None)
            return replace(point, sent_step=None, sent_tokens=0, sent_values=None)
        return point

    def reconciled(self, p: int, point: FragmentCopy) -> FragmentCopy:
        """Return the training side's copy of a fragment, without a failed upload that it was not told of yet."""
        sent, earlier = self.accounts[p].sent.get(point.base), self.attempts[p].get(point.base)
        if point.sent_step is None or point.base in self.accounts[p].settled:
            return point
        if sent is None:
            return replace(point, sent_step=None, sent_tokens=0, sent_values=None)
        if point.origin_tokens + sent != point.sent_tokens and earlier is not None:
            return replace(point, sent_step=earlier.header.step, sent_tokens=earlier.header.tokens_seen)
        return point

    def traffic(self) -> tuple[UplinkPoint, ...]:
        """Return the uplink's part of a checkpoint."""
        return tuple(
            UplinkPoint(
                account.copy(),
                self.settled_to[p],
                tuple(
                    (Sent(header=a.header, key=a.key, digest=a.digest, size=a.size), a.residual)
                    for a in self.attempts[p].values()
                ),
                self.residuals[p],
                self.residual_of[p],
                tuple(self.taken[p].items()),
            )
            for p, account in enumerate(self.accounts)
        )

    # --- an incarnation -----------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether uploads are under way."""
        return bool(self._uploading)

    def take(self, captured: Captured, tasks: asyncio.TaskGroup, done: Callable[[], None]) -> None:
        """Upload a capture in its own task, and call `done` when the task ends."""
        self._bases[captured.fragment] = captured.base
        if not self.accounts[captured.fragment].send(captured.base, captured.tokens):
            self._tell(UploadDone(captured.fragment))  # an earlier update on this base was settled meanwhile
            return

        def finished(task: asyncio.Task[None]) -> None:
            self._uploading.discard(task)
            done()

        task = tasks.create_task(self._upload(captured))
        self._uploading.add(task)
        task.add_done_callback(finished)

    def adopted(self, adopted: Adopted) -> None:
        """Note which version the model holds now, and how many tokens of local work it replaced."""
        p, account = adopted.fragment, self.accounts[adopted.fragment]
        self._bases[p] = adopted.version
        account.overwritten += adopted.overwritten
        # If an upload failed while the version came, its tokens are in no update and cannot be sent any more.
        account.late += max(0, adopted.sent - account.known(adopted.base))

    def called(self, fragment: int, version: int) -> None:
        """Announce the update that an open round asks for again, if it was sent: the announcement may be lost.

        An update announced less than a quarter of a heartbeat ago is not repeated, since it may have crossed the call.
        """
        sent = self.attempts[fragment].get(version - 1)
        if sent is not None and self._runtime.now() - sent.said_at > self._pace.heartbeat_s / 4:
            self._announce(sent)

    def repeat(self) -> None:
        """Announce the newest unsettled update of each fragment again, with jitter, if its announcement is old."""
        now = self._runtime.now()
        for attempts in self.attempts:
            if attempts:
                newest = attempts[max(attempts)]
                if now - newest.said_at >= self._pace.heartbeat_s * self._runtime.random.uniform(0.8, 1.2):
                    self._announce(newest)

    def refuse(self, refusals: Iterable[Refusal]) -> None:
        """Note which of this learner's updates a syncer has rejected for good, before a commit lists that."""
        for one in refusals:
            if one.learner != self._name or one.fragment >= len(self.attempts):
                continue
            attempt = self.attempts[one.fragment].get(one.base)
            if attempt is not None and attempt.digest == one.digest:
                attempt.refused = True
                if one.reason in REMEDIES:
                    self.unmerged.rejected_for = one.reason

    @property
    def awaits_answer(self) -> bool:
        """Whether updates are sent of which neither a commit nor a syncer has said what becomes of them."""
        return any(not a.refused for attempts in self.attempts for a in attempts.values())

    def told(self) -> list[Account]:
        """Return the accounts as reports show them: what a syncer has rejected counts as rejected, by fragment."""
        return [self._told(account, attempts) for account, attempts in zip(self.accounts, self.attempts, strict=True)]

    def _told(self, account: Account, attempts: Mapping[int, Attempt]) -> Account:
        # A longer update on the base may be on its way.
        refused = [base for base, a in attempts.items() if a.refused and a.header.tokens >= account.sent.get(base, 0)]
        told = account.copy() if refused else account
        for base in refused:
            told.settle(base, "rejected")
        return told

    def settle(self, commit: Commit) -> None:
        """Learn from a commit what became of this learner's updates."""
        p = commit.header.fragment
        attempts, account = self.attempts[p], self.accounts[p]
        if commit.version <= self.settled_to[p]:
            return  # after an interrupted read of the log, commits are read again
        self.window.open_s = smooth(self.window.open_s, commit.header.waited.waited_s)
        for given in commit.header.inputs:
            if given.learner != self._name:
                continue
            for base in [b for b in account.sent if b < given.base]:
                self._close(p, base, "rejected")
            self._feed_back(p, given)
            self._close(p, given.base, "merged", given.tokens)
            self.unmerged = Unmerged(self._runtime.now(), max(self.unmerged.step, given.step))
            self._tell(BaseMerged(p, given.base))
        for turned in commit.header.rejected:
            if turned.learner == self._name and turned.reason in REMEDIES:
                self.unmerged.rejected_for = turned.reason
            attempt = attempts.get(turned.base) if turned.learner == self._name else None
            # A rejected update does not close the base if a longer update on it may still be merged.
            if attempt is not None and turned.reason in FINAL and turned.digest == attempt.digest:
                self._close(p, turned.base, "rejected")
        self.expire(p, commit.version)

    def _remember(self, p: int, base: int, made: MadeUpdate) -> None:
        self._made[p][base] = (*self._made[p].get(base, ()), made)[-MADE_MAX:]

    def _feed_back(self, p: int, merged: Input) -> None:
        """Add what the codec dropped from a merged update of this learner to the error feedback."""
        left = next((a for a in self._made[p].get(merged.base, ()) if a.digest == merged.digest), None)
        self.taken[p].pop(merged.base, None)  # the merged update has sent it
        for base in [b for b in self._made[p] if b <= merged.base]:
            del self._made[p][base]
        self._put_back(p, merged.base)
        if left is not None:
            self.residuals[p] = self._sum(p, self.residuals[p], left.residual)
            self.residual_of[p] = left.key
            (self._own_feedback.add if merged.incarnation == self.incarnation else self._own_feedback.discard)(p)
        elif merged.incarnation != self.incarnation and p not in self._own_feedback:
            # Nothing is known of what the codec dropped from this update, and the update carried the feedback that
            # was kept until now. So feedback starts anew. (An update of another incarnation cannot have carried
            # residuals of this incarnation's updates: those are still to be sent.)
            self.residuals[p], self.residual_of[p] = None, ""

    def _take_over(self, p: int, base: int) -> ArrayRef | None:
        """Return the error feedback for an update on a base: all that is there, and the same for further updates."""
        if base not in self.taken[p]:
            self.taken[p][base], self.residuals[p] = self.residuals[p], None
        return self.taken[p][base]

    def _put_back(self, p: int, below: int) -> None:
        """Take back the feedback that updates on bases below `below` carried: they cannot be merged any more."""
        for base in [b for b in self.taken[p] if b < below]:
            self.residuals[p] = self._sum(p, self.residuals[p], self.taken[p].pop(base))

    def _sum(self, p: int, a: ArrayRef | None, b: ArrayRef | None) -> ArrayRef | None:
        """Return a + b. If one is None, return the other."""
        if a is None or b is None:
            return b if a is None else a
        return self._backend.sum(p, a, b)

    @property
    def lost(self) -> float:
        """Tokens that are gone with killed incarnations and in no update, by the fragments' shares of the model.

        The accounts also count as lost what only a stored update of an earlier incarnation holds, until it is settled.
        """

        def of(p: int) -> int:
            sent = self.accounts[p].sent
            stored = sum(max(0, a.header.tokens - sent.get(base, 0)) for base, a in self.attempts[p].items())
            return max(0, self.accounts[p].lost - stored)

        return sum(share * of(p) for p, share in enumerate(self._run.shares))

    def expire(self, p: int, version: int) -> None:
        """Note that the log has reached a version. Updates on bases that are now too old count as late."""
        for base in [b for b in self._made[p] if version - b > self._pace.staleness]:
            del self._made[p][base]
        self._put_back(p, version - self._pace.staleness)
        for base in [b for b in self.accounts[p].sent if version - b > self._pace.staleness]:
            self._close(p, base, "late")
        # Something may still be captured on the base that the model has.
        self.accounts[p].forget(min(version - self._pace.staleness - 1, self._bases[p]))
        self.settled_to[p] = max(version, self.settled_to[p])

    def _close(self, p: int, base: int, part: str, tokens: int | None = None) -> None:
        """Settle a base, and count merged tokens that this learner did not know of as merged."""
        self.attempts[p].pop(base, None)
        unheard = self.accounts[p].settle(base, part, tokens)
        if unheard > (room := UNHEARD_MAX - self.tokens_lost):
            logger.error(
                "fragment %d: the log says that %d tokens of %s on version %d were merged, which is impossibly many: "
                "they are not counted",
                p, unheard, self._name, base, extra={"fragment": p, "version": base},
            )  # fmt: skip
            unheard = max(0, room)
        if unheard:
            # An earlier incarnation went on training after this one had read its progress. Another process under this
            # name does that until it stops.
            self.tokens_lost += unheard
            for account in self.accounts:
                account.lost += unheard
            self.accounts[p].lost -= unheard
            self.accounts[p].merged += unheard

    async def _upload(self, captured: Captured) -> None:
        p = captured.fragment
        header = UpdateHeader(
            schema=SCHEMA,
            run=self._run.digest,
            fragment=p,
            learner=self._name,
            incarnation=self.incarnation,
            codec=self._codec_up,
            **work_of(captured),
            train_s=captured.train_s,
            loss=captured.loss,
            manifest=self.manifest,
        )
        account = self.accounts[p]
        feedback = self._take_over(p, captured.base)
        packed = await self._backend.pack(header, captured.base_values, captured.values, feedback)
        if packed is None:
            about = {"fragment": p, "version": captured.base}
            if self.unmerged.rejected_for != Reason.NON_FINITE:  # warn once; the reporter repeats it
                logger.warning(
                    "fragment %d: the difference to version %d is not finite: it is not sent, and its tokens count as "
                    "rejected; later ones are treated alike until a merge",
                    p, captured.base, extra=about,
                )  # fmt: skip
            self.unmerged.rejected_for = Reason.NON_FINITE
            account.settle(captured.base, "rejected")
            self._tell(UploadDone(p))
            return
        key = update_key(p, self._name, captured.base, packed.digest)
        if packed.dropped is not None:
            self._remember(p, captured.base, MadeUpdate(packed.digest, key, packed.dropped))
        await self._turn()
        if captured.base not in account.sent:
            self._tell(UploadDone(p))  # settled, or too old, while it waited for its turn
            return
        number, stored = self.window.began(packed.size, self._runtime.now()), False
        try:
            await self._backend.store(key, packed)
            stored = True
        except Unavailable as error:
            about = {"fragment": p, "version": captured.base}
            logger.warning("%s cannot be uploaded for now: %s", key, error, extra=about)
            self._upload_failed(captured)
            return
        finally:
            self.window.ended(number, self._runtime.now(), stored=stored)
            self._freed.set()
        self._tell(UploadDone(p))
        self.upload_s = smooth(self.upload_s, self._runtime.now() - captured.boundary_at)
        if captured.base not in account.sent:
            return  # settled during the upload
        self.attempts[p][captured.base] = Attempt(
            header, key, packed.digest, packed.size, captured.due, captured.boundary_at, 0.0, packed.dropped
        )
        self._announce(self.attempts[p][captured.base])

    async def _turn(self) -> None:
        """Wait until the upload window has room."""
        while self.window.full:
            self._freed.clear()
            await self._freed.wait()

    def _upload_failed(self, captured: Captured) -> None:
        p, base = captured.fragment, captured.base
        account, earlier = self.accounts[p], self.attempts[p].get(base)
        if base not in account.sent or self.draining:
            self._tell(UploadDone(p))  # it is settled already, or the learner is leaving and will not capture it again
            return
        if self._bases[p] != base:
            account.settle(base, "late", earlier.header.tokens if earlier else None)
            self._tell(UploadDone(p))
            return
        account.unsend(base, earlier.header.tokens if earlier else None)
        header = earlier.header if earlier else None
        self._tell(UploadFailed(p, base, header.step if header else None, header.tokens_seen if header else 0))

    def _announce(self, attempt: Attempt) -> None:
        attempt.said_at = self._runtime.now()
        self.unmerged.announced += 1
        self._say(attempt)


def _attempt(sent: Sent, residual: ArrayRef | None, now: float) -> Attempt:
    """Return a stored update of an earlier incarnation as an attempt to announce again. It may open a round."""
    return Attempt(sent.header, sent.key, sent.digest, sent.size, True, now, 0.0, residual)

"""The training side of a learner: what happens between two optimizer steps, and nothing that has to wait.

The training thread owns it. It hands its copies to the agent through a queue. The agent leaves the newest message of
each kind for each fragment, and every result of an upload (`deque.append` and `popleft` are atomic). The same code
therefore works with an agent in another thread and with one on the same event loop, and a pause of any length costs
nothing. At each boundary a small, fixed number of fragments is copied out and in: twice what the schedule needs on
average. Rounds are called at the pace of the fastest learner, and a learner that is half as fast can then still answer
every call.
"""

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from isthmus.errors import InputError, RankLost, told
from isthmus.format.layout import Layout
from isthmus.format.rules import Adoption, Pace
from isthmus.learner.backend import ArrayRef, Arrays, LocalArrays
from isthmus.learner.checkpoint import FragmentCopy, LoopState, Saver, StateCopy
from isthmus.learner.losses import Losses
from isthmus.learner.summary import rose
from isthmus.learner.upload_window import LIMIT_MAX, Window
from isthmus.runtime.averages import smooth

logger = logging.getLogger(__name__)

UPLOADS_MAX = LIMIT_MAX + 1
"""Largest number of captures under way at once; a further capture waits for a later boundary."""

STEPS_TIMED = 12
"""The duration of a step is the median of this many last steps: a long evaluation between two steps must not count."""

GROWTH = 8
"""A fragment that no round merges is sent again once the work on it has grown by one part in this many.

A syncer outage of 2,880 periods then costs about 60 objects for each fragment, not 2,880.
"""

LATE_STEPS = 2.0
"""Time that an upload takes besides its time on the wire, in steps: waiting for the wire, being heard, being read."""


class Replica(Protocol):
    """A learner's model as the boundary sees it. An implementation may span several processes."""

    def read(self, fragment: int, out: Any) -> None:
        """Copy the fragment's parameters into `out` [n] float32, an array that `Arrays.empty` made."""
        ...

    def write(self, fragment: int, values: Any) -> None:
        """Set the fragment's parameters from values [n] float32, rounded to the parameters' own dtypes."""
        ...


# --- to the agent -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Captured:
    """A copy of a fragment, taken at a step boundary to be uploaded."""

    fragment: int
    base: int
    base_values: ArrayRef
    values: ArrayRef
    steps: int
    """Steps since the base was adopted; with `blend` and `carry` also those before that no capture held."""
    tokens: int
    """Tokens of these steps."""
    step: int
    tokens_seen: int
    due: bool
    boundary_at: float
    train_s: float
    """Seconds since the base was adopted."""
    loss: float | None
    """Mean loss of these steps; None if none gave one that counts (see `Losses`)."""


@dataclass(frozen=True, slots=True)
class NothingToGive:
    """The learner was called for this version's round and has no update for it."""

    fragment: int
    version: int


@dataclass(frozen=True, slots=True)
class Adopted:
    """A version is now in the model; it replaced `overwritten` tokens of work on the fragment that no capture holds."""

    fragment: int
    version: int
    overwritten: int
    base: int
    """The base of the fragment until now."""
    sent: int
    """Tokens on that base that were captured to be uploaded."""


# --- to the training side ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CalledFor:
    """A round that creates this version is open. `afresh`: an update sent before is too old, so send a new one."""

    fragment: int
    version: int
    afresh: bool = False


@dataclass(eq=False, frozen=True, slots=True)
class Ready:
    """A newer published value [n] can be adopted."""

    fragment: int
    version: int
    values: ArrayRef
    period: float = 0.0
    """Steps between two uploads of the fragment, as its commit says; 0 stands for the number in the rules."""


@dataclass(frozen=True, slots=True)
class BaseMerged:
    """The log has merged this learner's update on this base: no other update on it or an older base will be merged."""

    fragment: int
    base: int


@dataclass(frozen=True, slots=True)
class UploadDone:
    """A capture is finished: it was stored, or dropped for good."""

    fragment: int


@dataclass(frozen=True, slots=True)
class UploadFailed:
    """A capture could not be stored: its work is local again, except the part in an earlier update on the base."""

    fragment: int
    base: int
    sent_step: int | None
    sent_tokens: int


@dataclass(frozen=True, slots=True)
class CopyState:
    """A request to copy everything that a checkpoint holds, after the next step."""


@dataclass(frozen=True, slots=True)
class SyncerBack:
    """A syncer is heard again after a silence, so uploads are due after every period again."""


ToAgent = Captured | NothingToGive | Adopted | StateCopy
Word = CalledFor | BaseMerged | UploadDone | UploadFailed | CopyState | SyncerBack
ToTraining = Word | Ready


@dataclass(slots=True)
class Slot:
    """One fragment as the training side knows it. Work is counted as differences of the learner's own totals."""

    base: int
    values: ArrayRef
    """The published value at `base`."""
    due_at: int
    """The learner's step at which the next upload is due."""
    origin_step: int
    origin_tokens: int
    adopted_at: float
    sent_step: int | None = None
    """The learner's step at the last capture on this base; None while there is none."""
    sent_tokens: int = 0
    sent_values: ArrayRef | None = None
    """Parameters at that capture; kept only if adoption needs them."""
    prior_values: ArrayRef | None = None
    """`sent_values` of the previous capture, kept until the upload under way has ended."""
    captured_step: int = 0
    """The learner's step at the last capture on any base."""
    uploading: bool = False
    called: int | None = None
    answered: int = 0
    """The version of the newest call that had been heard at the last capture."""
    period: int = 0
    """Steps between two uploads."""
    heard_call: tuple[int, float] = (0, 0.0)
    """The version of the newest call heard, and the time when it was heard, in seconds."""
    merged: bool = False
    offered: deque[Ready] = field(default_factory=lambda: deque(maxlen=1))
    """The newest version that waits to be adopted. The agent's thread replaces it by a newer version."""

    @property
    def ready(self) -> Ready | None:
        """The version that waits to be adopted, or None."""
        waiting = tuple(self.offered)
        return waiting[0] if waiting else None


class Inbox:
    """The agent's messages to the training side, except versions: the newest of each kind for each fragment.

    However long training pauses, the inbox holds only a few messages for each fragment.
    """

    def __init__(self, fragments: int) -> None:
        self._uploads: deque[UploadDone | UploadFailed] = deque()  # at most one for each upload under way
        self._merged: list[deque[BaseMerged]] = [deque(maxlen=1) for _ in range(fragments)]
        self._calls: list[deque[CalledFor]] = [deque(maxlen=1) for _ in range(fragments)]
        self._freeze: deque[CopyState] = deque(maxlen=1)
        self._back: deque[SyncerBack] = deque(maxlen=1)

    def put(self, message: "Word") -> None:
        """Take a message. It replaces an older message of its kind for the fragment, which no longer matters.

        Results of uploads are all kept.
        """
        match message:
            case BaseMerged(fragment, base):
                if all(known.base < base for known in tuple(self._merged[fragment])):
                    self._merged[fragment].append(message)
            case CalledFor(fragment, version):
                if all(known.version < version for known in tuple(self._calls[fragment])):
                    self._calls[fragment].append(message)
            case CopyState():
                self._freeze.append(message)
            case SyncerBack():
                self._back.append(message)
            case UploadDone() | UploadFailed():
                self._uploads.append(message)

    def take(self) -> "Iterator[Word]":
        """Yield the waiting messages: upload results, merges, calls, `SyncerBack`, then the request to freeze."""
        queues: list[deque[Any]] = [self._uploads, *self._merged, *self._calls, self._back, self._freeze]
        for queue in queues:
            while queue:
                yield queue.popleft()

    def __len__(self) -> int:
        rest = len(self._back) + len(self._freeze)
        return len(self._uploads) + sum(map(len, self._merged)) + sum(map(len, self._calls)) + rest


class Boundary:
    """Counts steps and, between them, moves fragments in and out of the model."""

    def __init__(
        self,
        layout: Layout,
        replica: Replica,
        *,
        periods: tuple[int, int],
        pace: Pace,
        adopt: Adoption,
        versions: Sequence[tuple[int, ArrayRef, float]],
        step: int,
        tokens_seen: int,
        now: Callable[[], float],
        notify: Callable[[], None],
        points: Sequence[FragmentCopy | None] = (),
        saver: Saver | None = None,
        window: Window | None = None,
        arrays: Arrays | None = None,
        first_loss: float | None = None,
    ) -> None:
        """Write the newest versions into the model; a fragment with a point goes on from the point's local work.

        `periods`: the shortest and the longest, in steps. `versions`: number, value and period (see `Ready`).
        `window` says whether the uplink has room for another upload; without it only `UPLOADS_MAX` is a limit.
        `first_loss`: see `CheckpointHeader`.
        """
        self.step = step
        self.tokens_seen = tokens_seen
        self.loss: float | None = None
        self._losses = Losses(first_loss)
        self.step_s = 0.0
        self.whole = True
        """Whether the last call ran to its end. Only then do the model and the counters belong to the same step."""
        self.outbox: deque[ToAgent] = deque()
        self.inbox = Inbox(len(layout.fragments))
        self._arrays = arrays or LocalArrays(layout)
        self._replica = replica
        self._shortest, self._longest = periods
        self._staleness = pace.staleness
        self._overdue = math.inf if pace.lead is None else pace.overlap + pace.lead
        self._adopt_rule = adopt
        self._now = now
        self._notify = notify
        self.news: Callable[[], None] = lambda: None
        """Called on the agent's side after each message to the training side."""
        self._saver = saver
        self._freeze_asked = False
        self._uploads = 0
        self._window = window
        self._stepped_at: float | None = None
        self._round_s = 0.0  # seconds between two calls of a fragment, a moving average
        self._durations: deque[float] = deque(maxlen=STEPS_TIMED)
        count = len(layout.fragments)
        self.moves = max(2, -(-2 * count // self._shortest))
        """Largest number of fragments copied out, and of fragments copied in, at one boundary."""
        self.slots = [
            Slot(base, values, step, step, tokens_seen, now(), period=self._within(period))
            for p, (base, values, period) in enumerate(versions)
        ]
        for p, slot in enumerate(self.slots):
            # Stagger the first uploads. In a run under way a newcomer waits one more period: rounds of other learners
            # call it before that.
            slot.due_at += 1 + p * slot.period // count + (slot.period if slot.base > 0 else 0)
            point = points[p] if points else None
            if point is None:
                replica.write(p, slot.values)
                continue
            replica.write(p, point.values)
            slot.origin_step, slot.origin_tokens = point.origin_step, point.origin_tokens
            slot.sent_step, slot.sent_tokens, slot.merged = point.sent_step, point.sent_tokens, point.merged
            slot.sent_values = point.sent_values
        self.mark()

    @property
    def longest_period(self) -> int:
        """The longest period of any fragment at the moment, in steps."""
        return max(slot.period for slot in self.slots)

    @property
    def first_due(self) -> float:
        """The step after which the next update of any fragment is due."""
        return min(slot.due_at for slot in self.slots)

    def local_tokens(self, fragment: int) -> int:
        """Return the tokens of local work on a fragment that no capture holds."""
        slot = self.slots[fragment]
        return self.tokens_seen - (slot.origin_tokens if slot.sent_step is None else slot.sent_tokens)

    def after_step(self, tokens: int, loss: float | None = None) -> None:
        """Count one optimizer step of this many tokens, then copy at most `moves` fragments out and in.

        Raises `InputError` if the previous call was cut short: what the model then holds is not known.
        """
        if not self.whole:
            raise InputError(
                "the call of link.step before this one was cut short by an error: join again, and go on at the newest "
                "checkpoint"
            )
        self.whole = False
        now = self._now()
        if self._stepped_at is not None:
            self._durations.append(now - self._stepped_at)
            self.step_s = statistics.median(self._durations)
        self._stepped_at = now
        self.step += 1
        self.tokens_seen += tokens
        if loss is not None:  # loops that report a loss now and then: keep the last
            self.loss = loss
            before = self._losses.risen
            self._losses.add(self.step, loss)
            if (risen := self._losses.risen) is not None and before is None:
                logger.warning("%s", rose(*risen))
        self._move(now)
        self.mark()
        if self._freeze_asked:
            self.freeze()

    @property
    def risen(self) -> tuple[float, float] | None:
        """The loss before it rose and that of the newest steps, if it has risen and not come down again."""
        return self._losses.risen

    def overdue(self) -> bool:
        """Return whether `lead` makes the learner wait at this boundary for a version under way.

        As long as it does, call `wait_on` whenever there is news.
        """
        return any(self._waits(slot) for slot in self.slots)

    def _waits(self, slot: Slot) -> bool:
        return slot.sent_step is not None and self.step - slot.sent_step >= self._overdue

    def is_last(self, fragment: int, base: int) -> bool:
        """Return whether no later update on this base will come, so that a round must be opened for the sent update.

        This is so while the learner waits for the merge of its update. It is also so if an update that an earlier
        incarnation sent on this base excludes a further one. May be called from the agent's thread.
        """
        slot = self.slots[fragment]
        return slot.base == base and (self._waits(slot) or (slot.merged and self.step >= slot.due_at))

    def let_go(self) -> None:
        """Stop waiting for versions, whatever `lead` says: the learner is leaving. May be called from any thread."""
        self._overdue = math.inf

    def wait_on(self) -> None:
        """Answer calls and adopt versions again at a boundary where the learner waits. No step is counted."""
        self.whole = False
        self._move(self._now())
        self.mark()

    def post(self, message: ToTraining) -> None:
        """Take a message from the agent, on the agent's thread. A newer version replaces the version that waits."""
        if isinstance(message, Ready):
            slot = self.slots[message.fragment]
            waiting = slot.ready
            if message.version > (slot.base if waiting is None else waiting.version):
                slot.offered.append(message)
        else:
            self.inbox.put(message)
        self.news()

    def _move(self, now: float) -> None:
        """Handle the agent's messages, then copy at most `moves` fragments out and at most `moves` in.

        While the learner would have to wait, adopt further versions that are ready. The learner waits for news, and a
        version that is already here brings none.
        """
        self._drain()
        for _ in range(self.moves):
            if (chosen := self._choose_out(now)) is None:
                break
            self._capture(*chosen, now)
        for _ in range(self.moves):
            into = self._choose_in(now)
            if into is None:
                break
            self._adopt(into)
        while self.overdue() and (into := self._choose_in(now)) is not None:
            self._adopt(into)

    def mark(self) -> None:
        """Note a step boundary: the model, the counters and the loop's state belong to the same step."""
        if self._saver is not None:
            self._saver.mark(self._now)
        self.whole = True

    def why_not_whole(self, orderly: bool) -> str | None:
        """Return why no checkpoint can be taken now, perhaps in the middle of a step; None if one can.

        `orderly`: the loop stands between two steps, so state that was not noted at the boundary can be read now.
        """
        if not self.whole:
            return "link.step was cut short"
        return None if self._saver is None else self._saver.moved(orderly)

    def freeze(self) -> None:
        """Copy everything that a checkpoint holds, as it was at the last step, and hand it to the agent.

        If something cannot be copied, this checkpoint is left out with a warning, and training goes on.
        """
        self._freeze_asked = False
        began = self._now()
        try:
            points = tuple(self._point(p) for p in range(len(self.slots)))
            loop = self._saver.save() if self._saver else LoopState()
        except RankLost:
            raise
        except Exception as error:
            logger.warning("no checkpoint of step %d: %s", self.step, told(error))
            return
        held_s = self._now() - began
        self._tell(StateCopy(self.step, self.tokens_seen, self.loss, points, loop, held_s, self._losses.first))

    def _point(self, fragment: int) -> FragmentCopy:
        slot, values = self.slots[fragment], self._arrays.empty(fragment)
        self._replica.read(fragment, values)
        return FragmentCopy(
            slot.base, values, slot.origin_step, slot.origin_tokens, slot.sent_step, slot.sent_tokens,
            slot.sent_values, slot.merged,
        )  # fmt: skip

    # --- inside -------------------------------------------------------------------------------------------------------

    def _within(self, period: float) -> int:
        """Return a commit's period in whole steps, within the limits of the rules."""
        return min(max(math.ceil(period), self._shortest), self._longest)

    def _drain(self) -> None:
        for word in self.inbox.take():
            match word:
                case UploadDone(fragment):
                    self._uploads -= 1
                    self.slots[fragment].uploading, self.slots[fragment].prior_values = False, None
                case UploadFailed(fragment, base, sent_step, sent_tokens):
                    self._uploads -= 1
                    slot = self.slots[fragment]
                    slot.uploading = False
                    if slot.base == base:
                        # Capture the fragment again, with the work done since, as soon as there is room.
                        slot.sent_step, slot.sent_tokens, slot.due_at = sent_step, sent_tokens, self.step
                        slot.sent_values = None if sent_step is None else slot.prior_values
                    slot.prior_values = None
                case BaseMerged(fragment, base):
                    slot = self.slots[fragment]
                    slot.merged = slot.merged or base >= slot.base
                case CalledFor(fragment, version, afresh):
                    self._called(fragment, version, afresh)
                case SyncerBack():
                    for slot in self.slots:
                        if slot.sent_step is not None:
                            slot.due_at = min(slot.due_at, slot.sent_step + slot.period)
                case CopyState():
                    self._freeze_asked = True

    def _called(self, fragment: int, version: int, afresh: bool) -> None:
        slot = self.slots[fragment]
        now = self._now()
        if version == slot.heard_call[0] + 1:
            self._round_s = smooth(self._round_s, now - slot.heard_call[1])
        if version > slot.heard_call[0]:
            slot.heard_call = version, now
        if version <= slot.base or (slot.sent_step is not None and not (afresh and slot.answered < version)):
            return  # The call is answered or outdated. The agent announces a sent update again.
        behind = version - 1 - slot.base
        # A learner that waits at a boundary may be called for a fragment that it has just adopted, or sent, there.
        nothing = self.step == (slot.origin_step if slot.sent_step is None else slot.sent_step)
        if behind > self._staleness or slot.merged or nothing:
            self._tell(NothingToGive(fragment, version))
        else:
            slot.called = version

    def _choose_out(self, now: float) -> tuple[int, bool] | None:
        """Return the fragment to copy out, and whether its own schedule asks for it; None if none is to be.

        The fragment that was captured longest ago goes first; fragments that would come too late go last. If the uplink
        carries everything, the order does not matter. If it does not, a fragment that misses a round keeps its base,
        and the next round still takes its update, one version late. On a thin link an update therefore carries the work
        of several periods, and no fragment starves.
        """
        if self._uploads >= UPLOADS_MAX or (
            self._window is not None and not self._window.room(self._uploads, now, self.step_s)
        ):
            return None
        wanting = [
            (self._too_late(slot, now), slot.captured_step, p)
            for p, slot in enumerate(self.slots)
            if not slot.uploading and self._wants_out(p, now)
        ]
        if not wanting:
            return None
        _, _, p = min(wanting)
        slot = self.slots[p]
        # If a newer version is ready, the update would come too late to open a round.
        return p, self.step >= slot.due_at and slot.ready is None

    def _wants_out(self, fragment: int, now: float) -> bool:
        """Return whether to send a fragment: it was called, is due by its own schedule, or is about to be replaced."""
        slot = self.slots[fragment]
        called = slot.called is not None and (slot.ready is None or slot.called > slot.ready.version)
        due = self.step >= max(slot.due_at, slot.origin_step + 1) and slot.ready is None and not slot.merged
        return called or due or self._is_worth_sending(fragment, now)

    def _choose_in(self, now: float) -> int | None:
        # The oldest base is replaced first. If the newest version went first, one fragment could wait for ever.
        # Work that no upload holds is sent before it is replaced: the next round may still take it.
        ready = [
            (slot.base, p)
            for p, slot in enumerate(self.slots)
            if slot.ready is not None and not self._is_worth_sending(p, now)
        ]
        return min(ready)[1] if ready else None

    def _is_worth_sending(self, fragment: int, now: float) -> bool:
        """Return whether work that a newer version would replace may still be merged if it is sent now."""
        slot = self.slots[fragment]
        if slot.ready is None or slot.sent_step is not None or slot.merged or slot.uploading:
            return False
        in_time = not self._too_late(slot, now)
        return slot.ready.version - slot.base <= self._staleness and self.step > slot.origin_step and in_time

    def _too_late(self, slot: Slot, now: float) -> bool:
        """Return whether an upload that begins now will probably end after the last round that can take it has closed.

        The estimate uses the last call heard, the usual time between two calls, and how long rounds stay open.
        """
        version, heard_at = slot.heard_call
        if self._window is None or version <= slot.base:
            return False
        last = slot.base + 1 + self._staleness
        closes_at = heard_at + (last - version) * self._round_s + self._window.open_s
        return now + self._window.upload_s + LATE_STEPS * self.step_s > closes_at

    def _capture(self, fragment: int, due: bool, now: float) -> None:
        slot = self.slots[fragment]
        values = self._arrays.empty(fragment)
        self._replica.read(fragment, values)
        slot.sent_step, slot.sent_tokens, slot.captured_step = self.step, self.tokens_seen, self.step
        slot.prior_values = slot.sent_values
        slot.sent_values = None if self._adopt_rule == Adoption.OVERWRITE else values
        slot.called, slot.answered = None, max(slot.answered, slot.heard_call[0])
        slot.due_at = self.step + max(slot.period, (self.step - slot.origin_step) // GROWTH)
        slot.uploading = True
        self._uploads += 1
        self._tell(
            Captured(
                fragment=fragment,
                base=slot.base,
                base_values=slot.values,
                values=values,
                steps=self.step - slot.origin_step,
                tokens=self.tokens_seen - slot.origin_tokens,
                step=self.step,
                tokens_seen=self.tokens_seen,
                due=due,
                boundary_at=now,
                train_s=max(0.0, now - slot.adopted_at),
                loss=self._losses.mean_after(slot.origin_step),
            )
        )

    def _adopt(self, fragment: int) -> None:
        slot, ready = self.slots[fragment], self.slots[fragment].ready
        assert ready is not None, "nothing to adopt"
        version, values = ready.version, ready.values
        overwritten, left = 0, slot.base
        sent = 0 if slot.sent_step is None else slot.sent_tokens - slot.origin_tokens
        if self._adopt_rule == Adoption.OVERWRITE:
            self._replica.write(fragment, values)
            overwritten = self.local_tokens(fragment)
            slot.origin_step, slot.origin_tokens = self.step, self.tokens_seen
        else:
            local = self._arrays.empty(fragment)
            self._replica.read(fragment, local)
            mixed = self._arrays.mixed(fragment, self._adopt_rule, local, values, slot.values, slot.sent_values)
            self._replica.write(fragment, mixed)
            if slot.sent_step is not None:
                # All captured work leaves local progress, merged or not; the work after the capture stays.
                slot.origin_step, slot.origin_tokens = slot.sent_step, slot.sent_tokens
        period = self._within(ready.period)
        slot.due_at, slot.period = slot.due_at + period - slot.period, period
        if slot.sent_step is None:
            slot.due_at = max(slot.due_at, self.step + slot.period)  # as if the learner had just joined
        slot.base, slot.values, slot.adopted_at = version, values, self._now()
        with suppress(ValueError):  # a newer version has already replaced it
            slot.offered.remove(ready)
        slot.sent_step, slot.sent_values, slot.called, slot.merged = None, None, None, False
        self._tell(Adopted(fragment, version, overwritten, left, sent))

    def _tell(self, message: ToAgent) -> None:
        self.outbox.append(message)
        self._notify()

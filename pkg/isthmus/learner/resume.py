"""What a learner's name left in the store: its incarnations' claims, its newest good checkpoint, its newest updates.

A learner reads this once, when it starts. Its keys are listed only here.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from isthmus.bus import START, Bus
from isthmus.errors import Denied, ObjectMissing, RecordInvalid, Unavailable, told
from isthmus.format import memory
from isthmus.format.records import frame
from isthmus.format.records.keys import (
    LEARNERS,
    claim_key,
    claims_prefix,
    incarnation_in,
    is_versioned,
    learner_in,
    updates_prefix,
    version_in,
)
from isthmus.format.records.messages import Announce, Heartbeat, Leave, Progress, learner_stream
from isthmus.format.records.objects import CheckpointHeader, ClaimHeader, Sent, UpdateHeader
from isthmus.format.rules import CHECKPOINTS_KEPT
from isthmus.learner import checkpoint_shards
from isthmus.learner.checkpoint import Checkpoint, open_checkpoint
from isthmus.log import Log
from isthmus.log.bus_messages import verify_batch
from isthmus.log.checkpoint_head import read_head
from isthmus.log.listing import checkpoints_in
from isthmus.log.verify import glance
from isthmus.reasons import Reason
from isthmus.store import Entry, checked

logger = logging.getLogger(__name__)

LAST_WORD_S = 20.0
"""How long, in seconds, a starting learner reads the messages that were published in its name."""

_READS_AT_ONCE = 8
DONORS_MAX = 3
"""Most checkpoints of other learners that are looked at for an optimizer that fits."""

DONOR_S = 120.0
"""How long, in seconds, reading other learners' checkpoints may take."""


Bring = Callable[[Checkpoint], Awaitable[Checkpoint]]


@dataclass(slots=True)
class History:
    """Where to resume, and what was lost before."""

    incarnation: int = 0
    """The newest incarnation that has a claim; 0 for a new name."""
    checkpoint: Checkpoint | None = None
    unread: int = 0
    """How many stored checkpoints there are, if none of them can be read; else 0."""
    tokens_lost: int = 0
    """Tokens that all incarnations so far trained beyond the checkpoint from which the next incarnation resumed."""
    settled_to: list[int] = field(default_factory=list)
    """Per fragment, the last commit that the ledger knows of; empty for a new name."""
    stored: list[list[Sent]] = field(default_factory=list)
    """Per fragment, this name's stored updates that may still be merged."""
    heard: int = 0
    """The newest incarnation that the bus remembers: newer than `incarnation` if the store was set back since."""
    alive: bool = False
    """Whether a process of this name spoke within the run's silence, and did not say that it leaves."""
    newest_bases: list[int] = field(default_factory=list)
    """Per fragment, the newest base on which this name ever sent an update; -1 if it sent none."""

    @property
    def step(self) -> int:
        """The learner's own steps that are done. Training goes on after this step."""
        return self.checkpoint.header.step if self.checkpoint else 0

    @property
    def tokens_seen(self) -> int:
        """The tokens trained in those steps."""
        return self.checkpoint.header.tokens_seen if self.checkpoint else 0

    @property
    def first_loss(self) -> float | None:
        """The learner's first losses, if its checkpoint has them."""
        return self.checkpoint.header.first_loss if self.checkpoint else None

    def let_go(self) -> None:
        """Drop the checkpoint's arrays, which are large, and keep its header. Call this after resuming from it."""
        if self.checkpoint is not None:
            self.checkpoint = replace(self.checkpoint, points=(), traffic=(), leaves=())

    @property
    def lost_since(self) -> int:
        """Lost tokens that the checkpoint's ledger does not include."""
        return self.tokens_lost - (self.checkpoint.header.tokens_lost if self.checkpoint else 0)


async def read_history(log: Log, bus: Bus, learner: str, since: Sequence[int], bring: Bring) -> History:
    """Return what is known of earlier incarnations. Per fragment, only updates on bases from `since` on are included.

    `bring` moves a checkpoint's arrays to where they are needed. It raises the errors that reading a checkpoint raises.

    A damaged checkpoint is logged and the one before it is used. A damaged update is ignored.
    """
    entries = await log.store.list(claims_prefix(learner))
    incarnations = sorted(incarnation for e in entries if (incarnation := incarnation_in(e.key)))
    stored, history = checkpoints_in(entries), History()
    if not incarnations and not stored:
        with suppress(Unavailable):
            _, history.heard, _ = await _last_word(log, bus, learner, 0)
        return history
    # Only claims whose author may use this name now count; others are ignored, whatever their number.
    claim = await _first_claim(log, learner, reversed(incarnations))
    first = await _first_claim(log, learner, incarnations)
    history.checkpoint = await _newest(log, stored, bring)
    resumed = history.checkpoint.header.incarnation if history.checkpoint is not None else 0
    if resumed and resumed not in incarnations:
        logger.warning("%s is gone (who deleted it?); its checkpoint is used", claim_key(learner, resumed))
    history.incarnation = max(claim.incarnation if claim else 0, resumed)
    history.unread = 0 if history.checkpoint is not None else len(stored)
    try:
        heard, history.heard, history.alive = await _last_word(log, bus, learner, history.incarnation)
    except Unavailable as error:
        logger.warning(
            "the last messages of %s are not known; its tokens are counted as far as they are stored: %s",
            learner,
            error,
        )
        heard = 0
    for updates, newest, top in await _stored(log, learner, since):
        history.stored.append(updates)
        history.newest_bases.append(top)
        for header in (*(sent.header for sent in updates), *([newest] if newest else [])):
            heard = max(heard, header.tokens_seen if header.incarnation == history.incarnation else 0)
    begun, lost = (claim.tokens_seen, claim.tokens_lost) if claim else (0, 0)
    c = history.checkpoint
    if c is not None and (c.header.incarnation == history.incarnation or claim is None or claim.resumed != c.key):
        begun, lost = c.header.tokens_seen, max(lost, c.header.tokens_lost)
    history.tokens_lost = lost + max(0, heard - begun)
    if c is not None:
        history.settled_to = [f.settled_to for f in c.header.fragments]
    else:
        # Without the first claim, nothing says at which versions this name's first incarnation began.
        history.settled_to = list(first.versions) if first is not None else [0] * len(log.run.layout.fragments)
    return history


async def donor(
    log: Log,
    learner: str,
    among: Collection[str],
    fits: Callable[[Checkpoint], str | None],
    likely: Callable[[CheckpointHeader], str | None] = lambda _: None,
) -> Checkpoint | None:
    """Return a healthy learner's checkpoint that fits, for a learner that is new in a run under way, or None.

    `likely` and `fits` return why a checkpoint does not fit, or None if it does. `likely` sees the header before the
    rest of the object is read. Both run off the loop. Only learners in `among`, of whom the log has merged something
    lately, are considered. Their checkpoints are read from the store; no process is asked. Any error with a checkpoint
    only means that it is not used.
    """
    try:
        async with asyncio.timeout(DONOR_S):
            unfit = set[str]()
            for entry in await donors(log, learner, among):
                if learner_in(entry.key) in unfit:
                    continue  # an older checkpoint of this learner is tried only if its newer ones are not valid
                try:
                    found = await _look_at(log, entry, fits, likely)
                except _Unfit as error:
                    unfit.add(learner_in(entry.key))
                    logger.info("the optimizer of %s does not fit: %s", learner_in(entry.key), error)
                    continue
                except Exception as error:  # another learner's object may fail in any way; it must not end the join
                    logger.warning("checkpoint %s is not used: %s", entry.key, told(error))
                    continue
                if found is not None:
                    return found
    except (Unavailable, Denied, TimeoutError) as error:
        # This is only a help: without a checkpoint, a new learner warms up.
        logger.warning("no checkpoint of another learner could be read: %s", told(error))
    return None


class _Unfit(Exception):
    """Raised for a checkpoint that could be read but does not fit this learner."""


async def _look_at(
    log: Log,
    entry: Entry,
    fits: Callable[[Checkpoint], str | None],
    likely: Callable[[CheckpointHeader], str | None],
) -> Checkpoint | None:
    header = (await read_head(log, entry.key)).said
    size = entry.size + sum(part.size for part in header.parts)
    why = await log.runtime.offload(likely, header)
    if why is None and size > log.checkpoint_most:
        why = f"with its parts it has {size} bytes"
    if why is not None:
        raise _Unfit(why)
    found = await read_checkpoint(log, entry.key, entry.size, stranger=True)
    if found is None:
        return None
    found = await found.whole(log)
    if (why := await log.runtime.offload(fits, found)) is not None:
        raise _Unfit(why)
    return found


async def donors(log: Log, learner: str, among: Collection[str]) -> Sequence[Entry]:
    """Return up to `DONORS_MAX` newest checkpoints of the other learners in `among`, latest first. Lists the store."""
    held: dict[str, list[Entry]] = {}
    for entry in checkpoints_in(await log.store.list(LEARNERS)):
        held.setdefault(learner_in(entry.key), []).append(entry)
    fit = [
        (n, entry)
        for name, entries in held.items()
        if name != learner and name in among
        for n, entry in enumerate(entries[:CHECKPOINTS_KEPT])
        if entry.size <= log.checkpoint_most
    ]
    # The newest of each learner come first, then older ones, since the newest may not be valid.
    return [entry for _, entry in sorted(fit, key=lambda e: (e[0], -e[1].modified))][:DONORS_MAX]


async def seen_beyond(log: Log, learner: str, versions: Sequence[int]) -> list[str]:
    """Return the keys of a learner's checkpoints that have seen a later version of some fragment, newest first.

    The headers are not verified. The learner does not start as long as it reads such a checkpoint, whoever wrote it.
    """
    found: list[str] = []
    for entry in checkpoints_in(await log.store.list(claims_prefix(learner))):
        try:
            seen = (await read_head(log, entry.key)).said.fragments
        except (ObjectMissing, RecordInvalid):
            continue  # it is not read at the next start either
        if any(f.settled_to > version for f, version in zip(seen, versions, strict=False)):
            found.append(entry.key)
    return found


async def read_checkpoint(log: Log, key: str, size: int, stranger: bool = False) -> Checkpoint | None:
    """Return a checkpoint of `size` bytes, or None, with a log line, if it is damaged, gone, or by a wrong author.

    The author must be a member who may use the name now. A checkpoint that was signed with an earlier key of the name
    also counts if the run's owner vouched for it when the key was rotated. `stranger`: it is another learner's, so no
    more than `size` bytes are read and all of it must fit in `log.checkpoint_most`.
    """
    try:
        if size > memory.machine_bytes():
            raise RecordInvalid(Reason.OVERSIZED, f"{size} bytes, more than this machine has memory")
        blob = await checked.read(log.store, log.runtime, key, size, cut=stranger)
        found = await log.open_checkpoint(blob, key, own=not stranger)
        held = found.header.parts
        if stranger and (in_all := size + sum(part.size for part in held)) > log.checkpoint_most:
            raise RecordInvalid(Reason.OVERSIZED, f"with its parts it has {in_all} bytes")
        heads = log.verifier.header_most if stranger else sum(part.head for part in held)
        located = await checkpoint_shards.located(log, found.header, heads)
        return await log.runtime.offload(open_checkpoint, found, log.run, located)
    except (ObjectMissing, RecordInvalid) as error:
        logger.warning("checkpoint %s is not used: %s", key, error)
        return None


async def _newest(log: Log, entries: Sequence[Entry], bring: Bring) -> Checkpoint | None:
    for entry in entries:
        found = await read_checkpoint(log, entry.key, entry.size)
        if found is None:
            continue
        try:
            return await bring(found)
        except (ObjectMissing, RecordInvalid) as error:
            logger.warning("checkpoint %s is not used: %s", entry.key, error)
    return None


async def read_claim(log: Log, learner: str, incarnation: int) -> ClaimHeader:
    """Return an incarnation's claim, if its author may use the name now.

    Raises `RecordInvalid`, `ObjectMissing`, `LogCorrupt`, `Unavailable`.
    """
    key = claim_key(learner, incarnation)
    return (await log.open(await log.fetch(key, frame.Kind.CLAIM), key, ClaimHeader, in_force=True)).header


CLAIM_READS = 3
"""How often a claim is read, at most, until it is valid: it may have been damaged on its way here, and without it the
work of an earlier incarnation would not be found in the log."""


async def _first_claim(log: Log, learner: str, incarnations: Iterable[int]) -> ClaimHeader | None:
    """Return the first of these claims whose author may use the name now, or None."""
    for incarnation in incarnations:
        for left in reversed(range(CLAIM_READS)):
            try:
                return await read_claim(log, learner, incarnation)
            except (ObjectMissing, RecordInvalid) as error:
                damaged = isinstance(error, RecordInvalid) and error.reason != Reason.NOT_A_MEMBER
                if not (damaged and left):
                    logger.log(_level(error), "ignoring claim %d on %s: %s", incarnation, learner, error)
                    break
    return None


async def _stored(log: Log, learner: str, since: Sequence[int]) -> list[tuple[list[Sent], UpdateHeader | None, int]]:
    """Return, per fragment, the learner's longest update on each base from `since` on, the header of its newest update,
    and the newest base on which it ever sent one."""
    slots = asyncio.Semaphore(_READS_AT_ONCE)

    async def one(fragment: int) -> tuple[list[Sent], UpdateHeader | None, int]:
        async with slots:
            listed = [e for e in await log.store.list(updates_prefix(fragment, learner)) if is_versioned(e.key)]
            # Updates on bases below `since` cannot be merged. Only those on the newest such base are read.
            top = max((base for e in listed if (base := version_in(e.key)) < since[fragment]), default=-1)
            best: dict[int, Sent] = {}
            for entry in sorted(listed, key=lambda e: version_in(e.key)):
                base = version_in(entry.key)
                if base < min(since[fragment], top):
                    continue
                known = best.get(base)
                sent = await _own_update(log, fragment, learner, entry, known.header.tokens if known else 0)
                if sent is not None:
                    best[base] = sent
            top = max([top, *best])
            newest = best[top].header if top in best else None
            return [best[base] for base in sorted(best) if base >= since[fragment]], newest, top

    return list(await asyncio.gather(*(one(f.index) for f in log.run.layout.fragments)))


def _level(error: ObjectMissing | RecordInvalid) -> int:
    """Return the level of a line about an object that is not used: after a change of keys there are many."""
    others = isinstance(error, RecordInvalid) and error.reason == Reason.NOT_A_MEMBER
    return logging.INFO if others else logging.WARNING


async def _own_update(log: Log, fragment: int, learner: str, entry: Entry, more_than: int) -> Sent | None:
    """Return this name's update under a key, to be announced again, if it has more tokens than `more_than`.

    Return None if it has not, is gone or damaged, or if its author may not use the name now.
    """
    try:
        begin = await log.store.get_range(entry.key, 0, frame.largest(frame.Kind.UPDATE, 0))
        if glance(begin, UpdateHeader).said.tokens <= more_than:
            return None
        most = frame.largest(frame.Kind.UPDATE, log.verifier.payload_most(frame.Kind.UPDATE, fragment))
        blob = await checked.read(log.store, log.runtime, entry.key, min(entry.size, most))
        found = await log.open(blob, entry.key, UpdateHeader, in_force=True)
    except ObjectMissing:
        return None  # garbage collection has just removed it, so it is settled
    except RecordInvalid as error:
        logger.log(_level(error), "ignoring update %s: %s", entry.key, error)
        return None
    if found.header.learner != learner:
        return None
    return Sent(header=found.header, key=entry.key, digest=found.digest, size=len(blob))


async def speaks(log: Log, bus: Bus, learner: str, since: str, patience_s: float) -> bool:
    """Return whether a process of this name says more after the position `since` within this many seconds, and not that
    it leaves."""
    stream, end = learner_stream(learner), log.runtime.now() + patience_s
    with suppress(Unavailable):
        while (left_s := end - log.runtime.now()) > 0.0:
            for item in (await bus.read({stream: since}, left_s)).get(stream, ()):
                since = item.position
                try:
                    messages = verify_batch(stream, item.body, log.run.digest, log.members)
                except RecordInvalid:
                    continue
                for message in messages:
                    if isinstance(message, Heartbeat | Progress | Announce | Leave):
                        return not isinstance(message, Leave)
    return False


async def _last_word(log: Log, bus: Bus, learner: str, incarnation: int) -> tuple[int, int, bool]:
    """Return the most tokens that an incarnation said it had seen, as far as the bus remembers, the newest incarnation
    that it remembers, and whether that spoke lately.

    Announcements do not count: an incarnation also announces updates of the ones before it, with their counts.
    """
    position, stream, tokens, newest, left = START, learner_stream(learner), 0, 0, False
    end = log.runtime.now() + LAST_WORD_S  # another process under this name may keep publishing
    while log.runtime.now() < end and (said := (await bus.read({stream: position}, 0.0)).get(stream)):
        position = said[-1].position
        for item in said:
            try:
                messages = verify_batch(stream, item.body, log.run.digest, log.members)
            except RecordInvalid:
                continue
            for message in messages:
                if isinstance(message, Heartbeat | Progress) and message.incarnation == incarnation:
                    tokens = max(tokens, message.tokens_seen)
                left = isinstance(message, Leave)
                if isinstance(message, Heartbeat | Progress | Announce | Leave):
                    newest = max(newest, message.incarnation)
    lately = (await bus.ago([stream], log.run.pace.silence_s))[stream]
    return tokens, newest, not left and bool(await bus.read({stream: lately}, 0.0))

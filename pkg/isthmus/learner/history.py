"""What a name left behind in the store: claims of its lives, its newest good checkpoint, its newest updates.

Read once, when a learner starts; this is the only place where its keys are listed.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from isthmus.bus import START, Bus
from isthmus.errors import Denied, ObjectMissing, RecordInvalid, Unavailable, told
from isthmus.learner import parts
from isthmus.learner.checkpoint import Checkpoint, open_checkpoint
from isthmus.log import Log
from isthmus.log.select import checkpoints_in
from isthmus.log.speech import heard
from isthmus.reasons import Reason
from isthmus.records import frame
from isthmus.records.keys import (
    LEARNERS,
    claim_key,
    claims_prefix,
    is_versioned,
    update_key,
    updates_prefix,
    version_in,
)
from isthmus.records.messages import Announce, Heartbeat, Progress, learner_stream
from isthmus.records.objects import CheckpointHeader, ClaimHeader, Sent, UpdateHeader
from isthmus.rules import MemberRole
from isthmus.store import Entry, checked

logger = logging.getLogger(__name__)

_READS_AT_ONCE = 8
_CLAIM = re.compile(r"learners/[^/]+/[0-9]+/claim")
DONOR_BYTES, DONOR_EXTRA = 64, 64 << 20
"""Bytes per parameter, and in all, that another's checkpoint may have to be looked at."""

DONORS_MAX = 3
"""Checkpoints of other learners looked at for an optimizer that fits."""

DONOR_S = 120.0
"""Reading another learner's checkpoint may take this long."""

HEAD_BYTES = 64 << 10
"""Read of another's checkpoint first; more where its header is longer."""


Bring = Callable[[Checkpoint], Awaitable[Checkpoint]]


@dataclass(slots=True)
class History:
    """Where to go on, and what was lost on the way here."""

    life: int = 0
    """The newest claim; 0 for a new name."""
    checkpoint: Checkpoint | None = None
    tokens_lost: int = 0
    """Tokens that all lives so far trained beyond the checkpoint the next one goes on from."""
    settled_to: list[int] = field(default_factory=list)
    """Per fragment, the last commit the ledger knows of; empty for a new name."""
    stored: list[list[Sent]] = field(default_factory=list)
    """Per fragment, this name's updates that may still be merged, as the store has them."""
    newest_bases: list[int] = field(default_factory=list)
    """Per fragment, the newest base this name ever sent an update on, -1 where it sent none."""

    @property
    def step(self) -> int:
        """Own steps done: training goes on after this one."""
        return self.checkpoint.header.step if self.checkpoint else 0

    @property
    def tokens_seen(self) -> int:
        """The tokens of those steps."""
        return self.checkpoint.header.tokens_seen if self.checkpoint else 0

    def let_go(self) -> None:
        """Keep of the checkpoint only what it says of itself, once it was gone on from: its arrays are many bytes."""
        if self.checkpoint is not None:
            self.checkpoint = replace(self.checkpoint, points=(), traffic=(), leaves=())

    @property
    def lost_since(self) -> int:
        """Tokens lost that the checkpoint's ledger does not know of."""
        return self.tokens_lost - (self.checkpoint.header.tokens_lost if self.checkpoint else 0)


async def read_history(log: Log, bus: Bus, learner: str, since: Sequence[int], bring: Bring) -> History:
    """Return what is known of earlier lives; of its updates those on bases from `since`, per fragment, on.

    `bring` gets from the store what of a checkpoint is needed, and raises as reading one does.

    A damaged checkpoint is named in the log and the one before it is used; a damaged update counts as not there.
    """
    entries = await log.store.list(claims_prefix(learner))
    lives = sorted(int(e.key.split("/")[2]) for e in entries if _CLAIM.fullmatch(e.key))
    history = History()
    if not lives:
        return history
    history.life = lives[-1]
    claim, first = [await _read_claim(log, learner, life) for life in (lives[-1], lives[0])]
    history.checkpoint = await _newest(log, checkpoints_in(entries), bring)
    try:
        heard = await _last_word(log, bus, learner, lives[-1])
    except Unavailable as error:
        logger.warning("what %s said last is not known, and is counted as far as it is stored: %s", learner, error)
        heard = 0
    for stored, newest, top in await _stored(log, learner, since):
        history.stored.append(stored)
        history.newest_bases.append(top)
        for header in (*(sent.header for sent in stored), *([newest] if newest else [])):
            heard = max(heard, header.tokens_seen if header.incarnation == lives[-1] else 0)
    begun, lost = (claim.tokens_seen, claim.tokens_lost) if claim else (0, 0)
    c = history.checkpoint
    if c is not None and (c.header.incarnation == lives[-1] or claim is None or claim.resumed != c.key):
        begun, lost = c.header.tokens_seen, max(lost, c.header.tokens_lost)
    history.tokens_lost = lost + max(0, heard - begun)
    if c is not None:
        history.settled_to = [f.settled_to for f in c.header.fragments]
    else:
        # Without the first claim nothing says where this name's first life began.
        history.settled_to = list(first.versions) if first is not None else [0] * len(log.run.layout.fragments)
    return history


async def donor(
    log: Log,
    learner: str,
    among: Collection[str],
    fits: Callable[[Checkpoint], str | None],
    glance: Callable[[CheckpointHeader], str | None] = lambda _: None,
) -> Checkpoint | None:
    """Return a healthy learner's checkpoint that fits, for a newcomer to a run in flight; None where there is none.

    `glance` and `fits` return why not; the first is shown the header before the rest of the object is fetched. Both
    run off the loop. Asked are only those `among` whom the log has merged something lately; and no process: the
    checkpoints are in the store. Whatever goes wrong with one of them, it is not used.
    """
    try:
        async with asyncio.timeout(DONOR_S):
            for entry in await donors(log, learner, among):
                try:
                    found = await _look_at(log, entry, fits, glance)
                except Exception as error:  # a stranger's object: whatever it is, it ends no join
                    logger.warning("checkpoint %s is not used: %s", entry.key, told(error))
                    continue
                if found is not None:
                    return found
    except (Unavailable, Denied, TimeoutError) as error:
        # A nicety: a newcomer without it warms up.
        logger.warning("no checkpoint of another learner could be read: %s", told(error))
    return None


async def _look_at(
    log: Log,
    entry: Entry,
    fits: Callable[[Checkpoint], str | None],
    glance: Callable[[CheckpointHeader], str | None],
) -> Checkpoint | None:
    header = await read_head(log, entry.key)
    size = entry.size + sum(part.size for part in header.parts)
    why = await log.runtime.offload(glance, header)
    if why is None and size > largest(log):
        why = f"with its parts it has {size} bytes"
    if why is None:
        found = await read_checkpoint(log, entry.key, entry.size, stranger=True)
        if found is None:
            return None
        found = await found.whole(log)
        why = await log.runtime.offload(fits, found)
        if why is None:
            return found
    logger.info("the optimizer of %s does not fit: %s", header.learner, why)
    return None


async def donors(log: Log, learner: str, among: Collection[str]) -> Sequence[Entry]:
    """Return the newest checkpoints of those other learners, the most recent first, a few of them. Lists."""
    newest: dict[str, Entry] = {}
    for entry in checkpoints_in(await log.store.list(LEARNERS)):
        newest.setdefault(entry.key.split("/")[1], entry)
    fit = [e for name, e in newest.items() if name != learner and name in among and e.size <= largest(log)]
    return sorted(fit, key=lambda e: e.modified, reverse=True)[:DONORS_MAX]


def largest(log: Log) -> int:
    """Return the most bytes that are read of another learner's checkpoint."""
    return DONOR_BYTES * log.run.layout.size + DONOR_EXTRA


async def read_head(log: Log, key: str) -> CheckpointHeader:
    """Return what a checkpoint says of itself, without its arrays. Raises `RecordInvalid`, `ObjectMissing`."""
    blob = await log.store.get_range(key, 0, HEAD_BYTES)
    end = frame.head_end(blob, frame.Kind.CHECKPOINT)
    if end > HEAD_BYTES:
        blob = await log.store.get_range(key, 0, end)
    header = frame.parse_head(blob, frame.Kind.CHECKPOINT, CheckpointHeader)
    if header.run != log.run.digest:
        raise RecordInvalid(Reason.WRONG_RUN, "a checkpoint of another run")
    return header


async def read_checkpoint(log: Log, key: str, size: int, stranger: bool = False) -> Checkpoint | None:
    """Return a checkpoint of so many bytes (of a stranger's no more are read), or None (named in the log) where it is
    damaged or gone."""
    try:
        blob = await checked.read(log.store, log.runtime, key, size, cut=stranger)
        elsewhere = await parts.located(log, frame.parse_head(blob, frame.Kind.CHECKPOINT, CheckpointHeader))
        # One's own may have been written with an earlier key.
        name = key.removeprefix(LEARNERS).partition("/")[0]
        await log.require_author(blob, frame.Kind.CHECKPOINT, name)
        if stranger and log.members.signed:
            by = log.members.current.version
            log.members.require_member(frame.author_of(blob), (MemberRole.LEARNER,), name, by)
        return await log.runtime.offload(open_checkpoint, blob, key, log.run, elsewhere)
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


async def _read_claim(log: Log, learner: str, life: int) -> ClaimHeader | None:
    try:
        blob = await log.store.get(claim_key(learner, life))
        claim, _ = frame.parse(blob, frame.Kind.CLAIM, ClaimHeader)
        await log.require_author(blob, frame.Kind.CLAIM, learner)
        return claim
    except (ObjectMissing, RecordInvalid) as error:
        logger.warning("claim %d of %s cannot be read: %s", life, learner, error)
        return None


async def _stored(log: Log, learner: str, since: Sequence[int]) -> list[tuple[list[Sent], UpdateHeader | None, int]]:
    """Return, per fragment, the learner's longest update on each base from `since` on, the header of its newest, and
    the newest base it ever sent one on, readable or not."""
    gate = asyncio.Semaphore(_READS_AT_ONCE)

    async def one(fragment: int) -> tuple[list[Sent], UpdateHeader | None, int]:
        async with gate:
            entries = [e for e in await log.store.list(updates_prefix(fragment, learner)) if is_versioned(e.key)]
            top = max((version_in(e.key) for e in entries), default=-1)
            best: dict[int, Sent] = {}
            newest: UpdateHeader | None = None
            for entry in entries:
                base = version_in(entry.key)
                if base < min(since[fragment], top):
                    continue
                header = await _update_header(log, learner, entry.key)
                if header is None:
                    continue
                if base == top and (newest is None or header.tokens > newest.tokens):
                    newest = header
                known = best.get(base)
                if base >= since[fragment] and (known is None or header.tokens > known.header.tokens):
                    # Saying it again takes the digest of the whole.
                    try:
                        blob = await checked.read(log.store, log.runtime, entry.key, entry.size)
                    except ObjectMissing:
                        continue  # collected in this moment: settled
                    except RecordInvalid:
                        blob = bytearray()
                    digest = frame.digest(blob)
                    if entry.key != update_key(fragment, learner, base, digest):
                        logger.warning("update %s is damaged and counts as not there", entry.key)
                        continue
                    best[base] = Sent(header=header, key=entry.key, digest=digest, size=len(blob))
            return [best[base] for base in sorted(best)], newest, top

    return list(await asyncio.gather(*(one(f.index) for f in log.run.layout.fragments)))


async def _update_header(log: Log, learner: str, key: str) -> UpdateHeader | None:
    try:
        blob = await log.store.get_range(key, 0, frame.largest(frame.Kind.UPDATE, 0))
        header = frame.parse_head(blob, frame.Kind.UPDATE, UpdateHeader)
    except (ObjectMissing, RecordInvalid):
        return None
    ours = (header.run, header.base, header.learner) == (log.run.digest, version_in(key), learner)
    return header if ours else None


async def _last_word(log: Log, bus: Bus, learner: str, life: int) -> int:
    """Return the most tokens a life was heard to have seen, as far as the bus remembers."""
    position, stream, tokens = START, learner_stream(learner), 0
    while said := (await bus.read({stream: position}, 0.0)).get(stream):
        position = said[-1].position
        for item in said:
            try:
                messages = heard(stream, item.body, log.run.digest, log.members)
            except RecordInvalid:
                continue
            for message in messages:
                if isinstance(message, Announce | Heartbeat | Progress) and message.incarnation == life:
                    tokens = max(tokens, message.tokens_seen)
    return tokens

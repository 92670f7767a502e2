"""Decoding and checking messages from the bus: each must come from the owner of its stream."""

import asyncio
import contextlib
import logging
from collections.abc import Callable

from isthmus.errors import LogCorrupt, RecordInvalid, Unavailable
from isthmus.format.records import frame
from isthmus.format.records.frame import Blob, Kind
from isthmus.format.records.messages import (
    SYNCER_STREAM,
    AnyMessage,
    FromSyncer,
    decode,
    is_stream,
    learner_of,
    learner_stream,
)
from isthmus.format.rules import MemberRole
from isthmus.log.commits import Log
from isthmus.log.membership import Members, Membership
from isthmus.reasons import Reason

logger = logging.getLogger(__name__)

LOOK_LEAST_S = 0.25
"""Least time between two reads of the membership, however often one is requested."""


def verify_batch(
    stream: str, body: Blob, run: bytes, members: Members | None = None, under: int | None = None
) -> tuple[AnyMessage, ...]:
    """Return a batch's messages, in order, for the run with this digest. Raises `RecordInvalid` with a named reason.

    A stream carries only its owner's messages. A learner's stream may hold no message in another learner's name and
    none of a syncer's kinds. In a signed run, the member must have signed the batch. One bad message rejects the whole
    batch. `under`: the version of the membership that decides; None: the newest one.
    """
    owner = learner_of(stream)
    role = MemberRole.SYNCER if owner is None else MemberRole.LEARNER
    author = bytes(32)
    if members is not None:
        under = members.current.version if under is None else under
        frame.head_end(body, Kind.MESSAGE)
        author = members.require_author(body, Kind.MESSAGE, under, (role,))
    messages = decode(body)
    for message in messages:
        if message.run != run:
            raise RecordInvalid(Reason.WRONG_RUN, "a message of another run")
        if isinstance(message, FromSyncer):
            if stream != SYNCER_STREAM:
                raise RecordInvalid(Reason.WRONG_AUTHOR, f"a syncer's message on {stream}")
        elif message.learner != owner:
            raise RecordInvalid(Reason.WRONG_AUTHOR, f"not by the learner of {stream}")
    if members is not None:
        names = {m.syncer if isinstance(m, FromSyncer) else m.learner for m in messages}
        if len(names) > 1:
            raise RecordInvalid(Reason.WRONG_AUTHOR, "one author speaks under several names")
        members.require_member(author, (role,), names.pop(), under)
    return messages


def may_speak(stream: str, members: Members) -> bool:
    """Return whether a stream may be read: the syncers' stream, or that of a learner in any version of the membership.

    In an unsigned run any well-formed stream name will do. Anyone who can write to the bus can create any number of
    streams with any names; in a signed run, those of unknown learners are never read.
    """
    learner = learner_of(stream)
    if learner is None or not members.signed:
        return is_stream(stream)
    return any(version.member(learner) is not None for version in members.versions)


def streams_of(members: Members) -> set[str]:
    """Return the streams of the learners that the current membership lists by full name (no patterns)."""
    named = (m.name for m in members.current.members if m.role == MemberRole.LEARNER and not m.name.endswith("*"))
    return {learner_stream(name) for name in named}


async def keep_members(
    log: Log, asked: asyncio.Event, every_s: float, changed: Callable[[Membership], None] = lambda _: None
) -> None:
    """Read the membership for ever: every `every_s` seconds, and when `asked` is set.

    Callers set `asked` when, for example, an author whom the known membership does not list sends a message. `changed`
    is called with a newer version of the membership.
    """
    told, before = None, log.members.current.version
    while log.members.signed:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(every_s):
                await asked.wait()
        asked.clear()
        try:
            now = await log.members.refresh(log.store)
        except (Unavailable, LogCorrupt) as error:
            logger.warning("the membership stays at version %d: %s", before, error)
            await asyncio.sleep(every_s)
            continue
        if log.members.withheld not in (None, told):
            told = log.members.withheld
            assert told is not None, "there is one"
            logger.error(
                "%s says that it knows membership %d, but the newest one in the store is %d: the store withholds it, "
                "so that members expelled by it still take part here, or %s reports a false version",
                told[1],
                told[0],
                now.version,
                told[1],
            )
        if now.version > before:
            logger.info("membership %d: %s", now.version, ", ".join(m.name for m in now.members) or "the owner alone")
            before = now.version
            changed(now)
        await asyncio.sleep(LOOK_LEAST_S)

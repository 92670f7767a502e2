"""Learners that are started again and again, and never live long enough to store a checkpoint."""

from typing import NamedTuple

from isthmus.errors import Denied, LogCorrupt, ObjectMissing, RecordInvalid
from isthmus.format.records.frame import Kind
from isthmus.format.records.keys import claim_key, claims_prefix, incarnation_in, is_versioned, version_in
from isthmus.format.records.objects import ClaimHeader
from isthmus.log import Log
from isthmus.log.listing import checkpoints_in

JOINED = 3
"""A learner restarts in vain if it has joined this many times since its last checkpoint."""

CLAIMS_READ = 8
"""The most claims of a learner that are read, the newest ones."""


class Restarts(NamedTuple):
    """How often a learner has joined since its last checkpoint."""

    joined: int
    """At most `CLAIMS_READ`."""
    step: int
    """The step of the checkpoint from which it went on each time; 0 without one."""


async def in_vain(log: Log, learner: str, incarnation: int) -> Restarts | None:
    """Return how often a learner has joined since its last checkpoint, if that is `JOINED` times or more; else None.

    `incarnation`: the newest that was heard. Claims that the membership does not allow are passed over. Returns None
    without permission to list or read claims. Raises `Unavailable`.
    """
    if incarnation < JOINED:
        return None
    try:
        entries = await log.store.list(claims_prefix(learner))
        newest = sorted({incarnation_in(entry.key) for entry in entries} - {0}, reverse=True)[:CLAIMS_READ]
        claims = [claim for number in newest if (claim := await _claim(log, learner, number)) is not None]
    except Denied:
        return None
    if not claims:
        return None
    life, resumed = claim_key(learner, claims[0].incarnation).removesuffix("claim"), claims[0].resumed
    joined = next((n for n, claim in enumerate(claims) if claim.resumed != resumed), len(claims))
    if joined < JOINED or any(entry.key.startswith(life) for entry in checkpoints_in(entries)):
        return None
    return Restarts(joined, version_in(resumed) if is_versioned(resumed) else 0)


async def _claim(log: Log, learner: str, incarnation: int) -> ClaimHeader | None:
    key = claim_key(learner, incarnation)
    try:
        return (await log.open(await log.fetch(key, Kind.CLAIM), key, ClaimHeader, in_force=True)).header
    except (ObjectMissing, RecordInvalid, LogCorrupt):
        return None

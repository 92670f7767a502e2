"""The header of a learner's checkpoint, read without its arrays."""

from isthmus.errors import RecordInvalid
from isthmus.format.records import frame
from isthmus.format.records.objects import CheckpointHeader
from isthmus.log.commits import Log
from isthmus.log.verify import Unverified, glance
from isthmus.reasons import Reason

HEAD_BYTES = 64 << 10
"""Bytes of another learner's checkpoint that are read first. A longer header is then read as a whole."""


async def read_head(log: Log, key: str) -> Unverified[CheckpointHeader]:
    """Return a checkpoint's header, not verified, without its arrays. Raises `RecordInvalid`, `ObjectMissing`."""
    blob = await log.store.get_range(key, 0, HEAD_BYTES)
    end = frame.head_end(blob, frame.Kind.CHECKPOINT)
    if end > frame.PREFIX.size + log.verifier.header_most:
        raise RecordInvalid(Reason.OVERSIZED, f"{end} bytes of header")
    if end > HEAD_BYTES:
        blob = await log.store.get_range(key, 0, end)
    found = glance(blob, CheckpointHeader)
    if found.said.run != log.run.digest:
        raise RecordInvalid(Reason.WRONG_RUN, "a checkpoint of another run")
    return found

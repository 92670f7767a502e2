"""Reading claims: the objects with which incarnations of learners begin."""

from isthmus.format.records.frame import Kind
from isthmus.format.records.objects import ClaimHeader
from isthmus.log.commits import Log


async def claim_at(log: Log, key: str) -> ClaimHeader:
    """Return the claim under a key, if its author may use the name now or might once, as an expelled learner.

    Raises `Denied`, `ObjectMissing`, `RecordInvalid`, `LogCorrupt`, `Unavailable`.
    """
    return (await log.open(await log.fetch(key, Kind.CLAIM), key, ClaimHeader)).header

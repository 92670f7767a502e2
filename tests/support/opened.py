"""Verify objects of tests, under the key that follows from their content."""

from isthmus.errors import RecordInvalid
from isthmus.format.layout import Fragment
from isthmus.format.records import frame
from isthmus.format.records.frame import Blob, Kind
from isthmus.format.records.keys import checkpoint_key, update_key
from isthmus.format.records.objects import CheckpointHeader, UpdateHeader
from isthmus.log.membership import Members
from isthmus.log.run import Run
from isthmus.log.updates import Update, verify_update
from isthmus.log.verify import Verified, Verifier


def key_of_update(blob: Blob) -> str:
    """Return an update's key, from its content; any key if its content is invalid."""
    try:
        h, _ = frame.parse(blob, Kind.UPDATE, UpdateHeader)
    except RecordInvalid:
        return update_key(0, "nobody", 0, frame.digest(blob))
    return update_key(h.fragment, h.learner, h.base, frame.digest(blob))


def opened_update(
    run: Run,
    blob: Blob,
    fragment: Fragment,
    learner: str,
    base: int,
    *,
    digest: bytes | None = None,
    members: Members | None = None,
    under: int | None = None,
) -> Update:
    """Return an update as a syncer opens it. Raises `RecordInvalid`."""
    digest = digest or frame.digest(blob)
    return verify_update(
        Verifier(run, members), blob, key_of_update(blob), digest, fragment, learner, base, under=under
    )


def verified_checkpoint(run: Run, blob: Blob, members: Members | None = None) -> Verified[CheckpointHeader]:
    """Return a verified checkpoint. Raises `RecordInvalid`."""
    h, _ = frame.parse(blob, Kind.CHECKPOINT, CheckpointHeader)
    key = checkpoint_key(h.learner, h.incarnation, h.step, frame.digest(blob))
    return Verifier(run, members).open(blob, key, CheckpointHeader)

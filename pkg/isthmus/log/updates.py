"""An update: from bytes to a packed outer gradient, every check on the way; for the live merge and the fold."""

import math
from dataclasses import dataclass

from isthmus.codecs import BadCode, as_bytes, codec
from isthmus.codecs.packed import Packed, packed
from isthmus.errors import RecordInvalid
from isthmus.kernels import require_denormals
from isthmus.layout import Fragment
from isthmus.log.membership import Members
from isthmus.log.run import Run
from isthmus.reasons import Reason
from isthmus.records import frame
from isthmus.records.frame import Blob
from isthmus.records.objects import UpdateHeader
from isthmus.runtime import ALONE, Crew

GRADIENT_NORM_MAX = 1e18
"""Length of an update above which it is turned away: sums of such numbers leave float32's range."""


@dataclass(frozen=True, slots=True)
class Update:
    """A verified update: what it says, and its outer gradient, packed as it came."""

    header: UpdateHeader
    gradient: Packed
    author: bytes = frame.UNSIGNED_AUTHOR
    """Whose key signed it [32 bytes]; zeros where nothing is signed."""


def open_update(
    blob: Blob,
    digest: bytes,
    run: Run,
    fragment: Fragment,
    learner: str,
    base: int,
    crew: Crew = ALONE,
    members: Members | None = None,
    under: int | None = None,
) -> Update:
    """Verify and measure an update. Pure, slow: runs off the loop. Raises `RecordInvalid` with a named reason.

    Checked in this order: digest, frame, signature, run, fragment and codec, author, base, size, finiteness, length.
    `members` judges who may sign, by its version `under` (see `Members.require_author`); without it a run is unsigned.
    Raises `DenormalsFlushed` in a thread that would decode other bits.
    """
    require_denormals()
    if frame.digest(blob) != digest:
        raise RecordInvalid(Reason.DIGEST_MISMATCH, "the bytes are not those that were announced")
    header, payload = frame.parse(blob, frame.Kind.UPDATE, UpdateHeader)
    (members or Members(run)).require_author(blob, frame.Kind.UPDATE, learner, under)
    if header.run != run.digest:
        raise RecordInvalid(Reason.WRONG_RUN, "the update belongs to another run")
    if (header.fragment, header.codec) != (fragment.index, run.rules.codec_up):
        raise RecordInvalid(Reason.WRONG_LAYOUT, f"fragment {header.fragment} in {header.codec}")
    if header.learner != learner:
        raise RecordInvalid(Reason.WRONG_AUTHOR, f"the update is by {header.learner}, announced by {learner}")
    if header.base != base:
        raise RecordInvalid(Reason.MALFORMED, f"base {header.base} where {base} was announced")
    code = codec(run.rules.codec_up)
    try:
        gradient = packed(fragment, code, as_bytes(payload), crew)
    except BadCode as error:
        raise RecordInvalid(Reason.WRONG_LAYOUT if code.exact else Reason.MALFORMED, str(error)) from None
    if not math.isfinite(gradient.norm):
        raise RecordInvalid(Reason.NON_FINITE, "holds a NaN or an infinity")
    if gradient.norm > GRADIENT_NORM_MAX:
        raise RecordInvalid(Reason.OVERFLOW, f"longer than {GRADIENT_NORM_MAX:g}: no training step goes that far")
    return Update(header, gradient, frame.author_of(blob))

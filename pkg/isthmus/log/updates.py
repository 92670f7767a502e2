"""An update: from bytes to a checked, packed outer gradient. Both the live merge and the fold use this."""

import math
from dataclasses import dataclass

from isthmus.codecs import BadCode, as_bytes, codec
from isthmus.codecs.kernels import require_denormals
from isthmus.codecs.packed import Packed, packed
from isthmus.errors import RecordInvalid
from isthmus.format.layout import Fragment
from isthmus.format.records import frame
from isthmus.format.records.frame import Blob
from isthmus.format.records.objects import ManifestHeader, UpdateHeader
from isthmus.log.verify import Verifier
from isthmus.reasons import Reason
from isthmus.runtime.clock import ALONE, ComputePool

GRADIENT_NORM_MAX = 1e18
"""Length above which an update is rejected: sums of such numbers leave float32's range."""


@dataclass(frozen=True, slots=True)
class Update:
    """A verified update: its header, and its outer gradient, packed as it was sent."""

    header: UpdateHeader
    gradient: Packed
    author: bytes = frame.UNSIGNED_AUTHOR
    """The public key that signed it [32 bytes]; zeros in an unsigned run."""
    manifest: ManifestHeader | None = None
    """The manifest that it names; None: it was not read."""


def verify_update(
    verifier: Verifier,
    blob: Blob,
    key: str,
    digest: bytes,
    fragment: Fragment,
    learner: str,
    base: int,
    compute: ComputePool = ALONE,
    under: int | None = None,
) -> Update:
    """Verify and measure an update. Raises `RecordInvalid` with a named reason. Pure and slow: call it off the loop.

    `under`: the membership version that its author is checked against (see `Verifier.open`). The checks of every
    object come first, then fragment and codec, learner, base, size, finiteness and length. Raises `DenormalsFlushed` in
    a thread that would decode other bits.
    """
    require_denormals()
    run = verifier.run
    found = verifier.open(blob, key, UpdateHeader, digest=digest, under=under)
    header = found.header
    if (header.fragment, header.codec) != (fragment.index, run.rules.codec_up):
        raise RecordInvalid(Reason.WRONG_LAYOUT, f"fragment {header.fragment} in {header.codec}")
    if header.learner != learner:
        raise RecordInvalid(Reason.WRONG_AUTHOR, f"the update is by {header.learner}, announced by {learner}")
    if header.base != base:
        raise RecordInvalid(Reason.MALFORMED, f"base {header.base} where {base} was announced")
    code = codec(run.rules.codec_up)
    try:
        gradient = packed(fragment, code, as_bytes(found.payload), compute)
    except BadCode as error:
        raise RecordInvalid(Reason.WRONG_LAYOUT if code.exact else Reason.MALFORMED, str(error)) from None
    if not math.isfinite(gradient.norm):
        raise RecordInvalid(Reason.NON_FINITE, "holds a NaN or an infinity")
    if gradient.norm > GRADIENT_NORM_MAX:
        raise RecordInvalid(Reason.OVERFLOW, f"longer than {GRADIENT_NORM_MAX:g}: no training step goes that far")
    return Update(header, gradient, found.author)

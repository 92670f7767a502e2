"""The names under which updates and announcements are turned away: recorded in commits, counted, shown by `status`."""

from enum import StrEnum


class Reason(StrEnum):
    """Why something was not merged. Every rejection has exactly one of these."""

    # About the bytes
    MALFORMED = "malformed"  # not a frame, not the schema, values out of range
    OVERSIZED = "oversized"  # larger than this object can be
    TRUNCATED = "truncated"  # shorter than it says it is
    DIGEST_MISMATCH = "digest-mismatch"  # the bytes are not those that were announced
    MISSING = "missing"  # announced, but nothing is stored under the key
    UNREADABLE = "unreadable"  # stored, but the syncer may not read it: another key, another account, an archive
    # About what they say
    WRONG_RUN = "wrong-run"  # belongs to another run
    WRONG_LAYOUT = "wrong-layout"  # not the size, codec or fragment this run has
    WRONG_AUTHOR = "wrong-author"  # a stream or key of one learner speaks for another
    NON_FINITE = "non-finite"  # holds a NaN or an infinity
    OVERFLOW = "overflow"  # finite, but merging it would not be
    TOO_LONG = "too-long"  # so much longer than what was merged lately that it is no step of this training
    UNSIGNED = "unsigned"  # nobody's signature, in a run whose objects are signed
    BAD_SIGNATURE = "bad-signature"  # a signature that is none of these bytes by this key
    NOT_A_MEMBER = "not-a-member"  # signed by a key that the membership does not name for this
    OTHER_HISTORY = "other-history"  # its author was shown another commit under a key that we know
    # About the round
    STALE = "stale"  # its base is more than `staleness` versions old
    BASE_MERGED = "base-merged"  # an update of this learner on this or a newer base was merged
    SUPERSEDED = "superseded"  # the same learner sent more tokens on the same base
    OVERTAKEN = "overtaken"  # a newer base of the same learner is already in the round
    DUPLICATE = "duplicate"  # said again
    UNKNOWN_BASE = "unknown-base"  # its base does not exist (yet)


class Clip(StrEnum):
    """Why an update counted for less than it said. Recorded in commits beside what it counted for."""

    STEPS = "steps"  # more steps than there was time for since its base
    TOKENS = "tokens"  # far more tokens a step than others have, or than it had itself
    WEIGHT = "weight"  # far more weight than the median of what came lately
    NORM = "norm"  # far longer than what came lately: its length is cut
    SHORT = "short"  # far shorter than what came lately: its weight is cut, since directions are taken by weight alone


HARMLESS = frozenset({Reason.SUPERSEDED, Reason.DUPLICATE})
"""Happens in every healthy run, and nothing is lost by it: the same work has come another way."""

FINAL = frozenset(
    reason.value
    for reason in Reason
    # These speak of one update among several on its base, not of the newest one; or of what may pass.
    if reason
    not in (
        Reason.SUPERSEDED,
        Reason.DUPLICATE,
        Reason.UNKNOWN_BASE,
        Reason.BASE_MERGED,
        Reason.UNREADABLE,
        Reason.NOT_A_MEMBER,
        Reason.OTHER_HISTORY,
    )
)
"""An update that a commit lists as rejected for one of these is not said again, and no later commit merges it."""

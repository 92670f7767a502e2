"""Reasons for which updates and announcements are rejected, and what to do: in commits, counted, shown by `status`."""

from enum import StrEnum
from typing import Self


class _Told(StrEnum):
    """A short text, and what it means."""

    means: str

    def __new__(cls, text: str, means: str = "") -> Self:
        made = str.__new__(cls, text)
        made._value_, made.means = text, means
        return made


class Reason(_Told):
    """Why an update was not merged or a message was rejected. Every rejection has exactly one reason."""

    # About the bytes
    MALFORMED = "malformed", "not a frame, not the schema, values out of range"
    OVERSIZED = "oversized", "larger than an object of this kind can be"
    TRUNCATED = "truncated", "shorter than it states"
    DIGEST_MISMATCH = "digest-mismatch", "the bytes are not those that were announced"
    MISSING = "missing", "announced, but nothing is stored under the key"
    UNREADABLE = "unreadable", "stored, but the syncer may not read it: another key, another account, an archive"
    # About their content
    WRONG_RUN = "wrong-run", "belongs to another run"
    WRONG_LAYOUT = "wrong-layout", "a size, codec or fragment that this run does not have"
    WRONG_AUTHOR = "wrong-author", "in the stream or under the key of one learner, but by another"
    NON_FINITE = "non-finite", "holds a NaN or an infinity"
    OVERFLOW = "overflow", "finite, but so large that a merge with it would not be"
    TOO_LONG = "too-long", "far longer than recently merged updates, so it cannot come from this training"
    UNSIGNED = "unsigned", "no signature, in a run whose objects are signed"
    BAD_SIGNATURE = "bad-signature", "the signature does not fit the bytes and the key"
    NOT_A_MEMBER = "not-a-member", "signed by a key that the membership does not name for this purpose"
    OTHER_HISTORY = "other-history", "its author has read another commit than we have under the same key"
    # About its manifest, if the charter asks for manifests
    NO_MANIFEST = "no-manifest", "names no manifest, or one that is not of its learner, run and model"
    UNREAD_MANIFEST = "unread-manifest", "the store does not have the manifest that it names, or denies it"
    SOURCE_NOT_ALLOWED = "source-not-allowed", "its manifest declares a source that the charter does not allow"
    # About the round
    STALE = "stale", "its base is more than `staleness` versions old"
    BASE_MERGED = "base-merged", "an update of this learner on this or a newer base was merged without this work"
    SUPERSEDED = "superseded", "an update of the same learner on the same base has at least as many tokens"
    OVERTAKEN = "overtaken", "an update of the same learner with a newer base is already in the round"
    DUPLICATE = "duplicate", "announced again: this very update waits, was merged, or was rejected before"
    UNKNOWN_BASE = "unknown-base", "its base does not exist (yet)"


class Clip(_Told):
    """Why an update counted for less than it stated. Recorded in commits beside what it counted for."""

    STEPS = "steps", "more steps than there was time for since its base"
    TOKENS = "tokens", "far more tokens a step than other learners have, or than this learner had before"
    WEIGHT = "weight", "far more weight than the median of recent updates"
    NORM = "norm", "far longer than recent updates: its length is cut"
    PERIODS = "periods", "the first work, of many periods at once: it moves the model in full, and the momentum as one"
    SHORT = "short", "far shorter than recent updates: its weight is cut, as its direction counts by weight alone"
    CHARTER = "charter", "more weight than the charter grants its member in a round"


USUAL: dict[str, str] = {
    Reason.BASE_MERGED: "usual: another update of its learner was merged before it",
    Reason.OVERTAKEN: "usual: a newer update of its learner was in the round",
    Clip.SHORT: "usual while a learning rate falls, and of a learner that has all but converged",
}
"""Why some rejections and clips that cost work need no attention."""

PASSING = frozenset(
    {Reason.UNKNOWN_BASE, Reason.UNREADABLE, Reason.NOT_A_MEMBER, Reason.OTHER_HISTORY, Reason.UNREAD_MANIFEST}
)
"""Reasons for now: the update can still be merged, and its learner announces it again."""

ABOUT_MANIFEST = frozenset({Reason.NO_MANIFEST, Reason.UNREAD_MANIFEST, Reason.SOURCE_NOT_ALLOWED})
"""Reasons that stay until the learner's manifest, or the charter, is another one."""

LOSSLESS = PASSING | {Reason.SUPERSEDED, Reason.DUPLICATE}
"""Reasons of rejections by which no work is lost.

The work is merged, waits, or was counted as lost before; or the update may still be merged (`PASSING`). If it never is,
it is rejected once more when it cannot be merged any longer. So an update whose work is lost is rejected once for a
reason that is not among these.
"""

FINAL = frozenset(reason.value for reason in Reason if reason not in {*LOSSLESS, Reason.BASE_MERGED})
"""Reasons for good: an update that a commit lists as rejected for one is not announced again and never merged later."""


_ITS_BYTES = "the syncer cannot use what it finds in the store: see its log, and the store's policies"
_STRANGE = "this program does not match the run: see the syncer's log"
_TOO_SLOW = (
    "its updates arrive too late: give it a faster link or machine (`isthmus status --json` has its upload_s and "
    "step_s), or start the syncers again with a higher --staleness"
)
AGAIN_FINITE = (
    "clip gradients or lower the learning rate (and join with hyperparameters='passed', or it goes on with "
    "that of its checkpoint), and start it again under its name: it goes on from its newest checkpoint, which is from "
    "before, since values that are not finite are not stored; without one it begins at step 0"
)
_NOT_FINITE = f"stop it, {AGAIN_FINITE}"
_DIVERGED = (
    "lower the learning rate or clip gradients, and start it under a new name (in a signed run an owner adds that: "
    "isthmus create once more, with --learner NAME, or isthmus members add), so that it begins with the run's model "
    "instead of its own checkpoint"
)
_NO_MEMBER = (
    "the run's members no longer include this learner with this key: ask an owner of the run (`isthmus members list`)"
)

REMEDIES: dict[str, str] = {
    Reason.MALFORMED: _STRANGE,
    Reason.OVERSIZED: _STRANGE,
    Reason.WRONG_RUN: _STRANGE,
    Reason.WRONG_LAYOUT: _STRANGE,
    Reason.WRONG_AUTHOR: _STRANGE,
    Reason.TRUNCATED: _ITS_BYTES,
    Reason.DIGEST_MISMATCH: _ITS_BYTES,
    Reason.MISSING: _ITS_BYTES,
    Reason.UNREADABLE: _ITS_BYTES,
    Reason.NON_FINITE: _NOT_FINITE,
    Reason.OVERFLOW: _DIVERGED,
    Reason.TOO_LONG: _DIVERGED,
    Reason.STALE: _TOO_SLOW,
    Reason.UNSIGNED: _NO_MEMBER,
    Reason.BAD_SIGNATURE: _NO_MEMBER,
    Reason.NOT_A_MEMBER: _NO_MEMBER,
    Reason.OTHER_HISTORY: "the store shows this learner another log than syncers: stop, and compare the logs of both",
    Reason.NO_MANIFEST: "the charter asks for a manifest: start this learner with --manifest (isthmus.join: manifest=)",
    Reason.UNREAD_MANIFEST: (
        "the syncer cannot read its manifest: restart this learner to store it again, or let syncers read manifests/*"
    ),
    Reason.SOURCE_NOT_ALLOWED: (
        "its manifest declares data that the charter does not allow it: `isthmus charter show` has its sources"
    ),
    Reason.UNKNOWN_BASE: "this learner is ahead of the log: check that store and bus belong to the same run",
}
"""By reason: what a learner's owner can do if every update is rejected for it. Reasons that only say that another of
the learner's updates took the place of this one show no problem and are not listed."""

WRITING = "store for writing"
"""What a process waits for whose store answers, and takes no writes: it is full, or read-only."""
UNHEARD = "no syncer is heard"
GOES_ON = "but the run goes on"
LATE_WORK = (
    "it is merged then, unless a syncer has gone on without it, but an update counts for at most four times the usual "
    "length, however many steps it holds"
)
"""What becomes of work that waited for a syncer. Four is the default of `Bounds.norm`."""
FEW_VERSIONS = 10
"""A model whose fragments were merged fewer times may be worse than a learner's own. Of isotropic runs of two learners
that trained 800 steps in two seconds, the loss was 1.83 after a single round, and 0.62 and 0.73 after 15."""
REJECTED = "every update is rejected: "
UNSENT = "no update was sent"
UNMERGED = "no update is merged"


def remedy_of(trouble: str) -> str:
    """Return what to do about a trouble that `Unmerged.trouble` names; empty for any other text."""
    if trouble == UNSENT:
        return "no upload finishes: check its uplink (`isthmus doctor` on its machine measures it)"
    if trouble == UNMERGED:
        return "`isthmus status` shows which learners rounds wait for, and which are late"
    return REMEDIES.get(trouble.removeprefix(REJECTED), "") if trouble.startswith(REJECTED) else ""

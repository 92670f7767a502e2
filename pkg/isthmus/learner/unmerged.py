"""Why none of a learner's updates is merged, and what the learner's owner can do about it."""

from dataclasses import dataclass

from isthmus.agent.trouble import Trouble
from isthmus.reasons import Reason

DRY_PERIODS = 4
"""Periods without a merge after which the learner reports it. The first round and a late answer take two periods."""

_ITS_BYTES = "the syncer cannot use what it finds in the store: see its log, and the store's policies"
_STRANGE = "this program does not match the run: see the syncer's log"
_TOO_SLOW = (
    "its updates arrive too late: give it a faster link or machine (`isthmus status --json` has its upload_s and "
    "step_s), or start the syncers again with a higher --staleness"
)
_NOT_A_NUMBER = "lower the learning rate or clip gradients, and start again from an earlier checkpoint"
_NO_MEMBER = (
    "the run's members no longer include this learner with this key: ask the run's owner (`isthmus members list`)"
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
    Reason.NON_FINITE: _NOT_A_NUMBER,
    Reason.OVERFLOW: _NOT_A_NUMBER,
    Reason.TOO_LONG: _NOT_A_NUMBER,
    Reason.STALE: _TOO_SLOW,
    Reason.UNSIGNED: _NO_MEMBER,
    Reason.BAD_SIGNATURE: _NO_MEMBER,
    Reason.NOT_A_MEMBER: _NO_MEMBER,
    Reason.OTHER_HISTORY: "the store shows this learner another log than syncers: stop, and compare the logs of both",
    Reason.UNKNOWN_BASE: "this learner is ahead of the log: check that store and bus belong to the same run",
}
"""By reason: what a learner's owner can do if every update is rejected for it. Reasons that only say that another of
the learner's updates took the place of this one show no problem and are not listed."""


_REJECTED = "every update is rejected: "
_UNSENT = "no update was sent"
_UNMERGED = "no update is merged"


def remedy_of(trouble: str) -> str:
    """Return what to do about a trouble that `Unmerged.trouble` names; empty for any other text."""
    if trouble == _UNSENT:
        return "no upload finishes: check its uplink (`isthmus doctor` on its machine measures it)"
    if trouble == _UNMERGED:
        return "`isthmus status` shows which learners rounds wait for, and which are late"
    return REMEDIES.get(trouble.removeprefix(_REJECTED), "") if trouble.startswith(_REJECTED) else ""


@dataclass(slots=True)
class Unmerged:
    """What happened to a learner's updates since one of them was last merged."""

    at: float
    """When an update was last merged; before the first merge, when the learner joined."""
    step: int
    """The learner's step up to which its work was merged; before the first merge, the step at which it joined."""
    announced: int = 0
    rejected_for: str = ""
    """The newest reason for a rejection, or empty."""

    def trouble(self, now: float, step: int, period: int) -> Trouble | None:
        """Return what to report about a learner at this step, or None if nothing is due yet."""
        steps = step - self.step
        if steps < DRY_PERIODS * period:
            return None
        what = f"{_REJECTED}{self.rejected_for}" if self.rejected_for else _UNMERGED if self.announced else _UNSENT
        return now - self.at, what, remedy_of(what)

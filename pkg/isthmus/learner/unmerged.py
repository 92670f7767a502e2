"""Why none of a learner's updates is merged, and what the learner's owner can do about it."""

from dataclasses import dataclass

from isthmus.agent.trouble import Trouble
from isthmus.reasons import REJECTED, UNMERGED, UNSENT, remedy_of

DRY_PERIODS = 4
"""Periods without a merge after which the learner reports it. The first round and a late answer take two periods."""


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
        what = f"{REJECTED}{self.rejected_for}" if self.rejected_for else UNMERGED if self.announced else UNSENT
        return now - self.at, what, remedy_of(what)

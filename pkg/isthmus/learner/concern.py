"""What keeps a learner's work from being merged, said on the log: soon, then ever more seldom, and once when over.

A training loop that nobody merges looks like one that is: its loss falls, nothing fails. So the agent says what it
waits for and what to do about it.
"""

import logging
from collections.abc import Sequence

logger = logging.getLogger(__name__)

PATIENCE_S = 10.0
"""Trouble shorter than this, or than two silences of a member, is not worth a word."""

REMIND_S = 60.0
REMIND_S_MAX = 3600.0


class Concern:
    """The trouble of one learner, as last said."""

    def __init__(self, learner: str, silence_s: float) -> None:
        self._learner = learner
        self._patience_s = max(PATIENCE_S, 2.0 * silence_s)
        self._say_at = 0.0
        self._pause_s = REMIND_S
        self._said = ""

    def look(self, now: float, troubles: Sequence[tuple[float, str, str]]) -> None:
        """Say what there is to say. `troubles`: seconds it has lasted, what it is, what to do; the root cause first."""
        lasting = [(for_s, what, remedy) for for_s, what, remedy in troubles if for_s >= self._patience_s]
        if not lasting:
            if self._said:
                logger.warning("%s: %s: over", self._learner, self._said)
            self._said, self._pause_s = "", REMIND_S
            return
        for_s, what, remedy = lasting[0]
        if what == self._said and now < self._say_at:
            return
        self._pause_s = min(REMIND_S_MAX, 2.0 * self._pause_s) if what == self._said else REMIND_S
        self._said, self._say_at = what, now + self._pause_s
        logger.warning(
            "%s: %s (for %.0f s): training goes on, but nothing of it is merged meanwhile; %s",
            self._learner, what, for_s, remedy,
        )  # fmt: skip

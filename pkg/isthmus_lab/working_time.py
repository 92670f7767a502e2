"""The one definition of goodput: that of the plan, of its comparison, of the lab and of recorded runs."""

from typing import Any

Figures = Any
"""A number, or an array of numbers with one element for each candidate."""


def goodput(worked_s: Figures, undone_s: Figures, time_s: Figures) -> Figures:
    """Return the share of the learners' time in work that no failure undid.

    `worked_s`: seconds of computing steps, by all learners. Waiting for a link, for another learner or for a repair,
    copying, saving and reading are not work. `undone_s`: the part of it that failures took back. `time_s`: all seconds
    of all learners.
    """
    return (worked_s - undone_s) / time_s

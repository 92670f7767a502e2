"""Figures of a run that several tools show, each computed here alone. docs/glossary.md says what they mean."""

import statistics
from collections.abc import Iterable

from isthmus.format.records.objects import CommitHeader


def places(header: CommitHeader) -> tuple[int, int]:
    """Return how many learners are in a commit, and how many are in it or were expected; (0, 0) if it heals."""
    there = {given.learner for given in header.inputs}
    return len(there), len(there.union(header.waited.expected))


def participation(headers: Iterable[CommitHeader]) -> float | None:
    """Return the mean share of the learners expected, or in nevertheless, that are in a commit; None without commits.

    Commits that heal are left out.
    """
    shares = [there / count for there, count in map(places, headers) if count]
    return statistics.fmean(shares) if shares else None

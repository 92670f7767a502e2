"""Figures of a run that several tools show, each computed here alone. docs/glossary.md says what they mean."""

import statistics
from collections.abc import Iterable

from isthmus.format.records.objects import CommitHeader


def places(header: CommitHeader) -> tuple[int, int]:
    """Return how many learners are in a commit, and how many are in it or were expected; (0, 0) if it heals."""
    there = {given.learner for given in header.inputs}
    return len(there), len(there.union(header.waited.expected))


def attendance(header: CommitHeader) -> dict[str, bool]:
    """Return by learner that a round expected whether it is in the commit. A learner's participation is the share of
    these rounds that it was in. A commit that heals expected nobody."""
    there = {given.learner for given in header.inputs}
    return {name: name in there for name in header.waited.expected}


def shares(header: CommitHeader) -> dict[str, tuple[float, float]]:
    """Return by learner its shares of a commit's weight and tokens; nothing for a commit of fewer than two learners."""
    inputs = header.inputs
    if len({given.learner for given in inputs}) < 2:
        return {}
    weight, tokens = sum(given.weight for given in inputs), sum(given.tokens for given in inputs)
    found: dict[str, tuple[float, float]] = {}
    for given in inputs:
        so_far = found.get(given.learner, (0.0, 0.0))
        found[given.learner] = so_far[0] + given.weight / weight, so_far[1] + given.tokens / tokens
    return found


def participation(headers: Iterable[CommitHeader]) -> float | None:
    """Return the mean share of the learners expected, or in nevertheless, that are in a commit; None without commits.

    Commits that heal are left out.
    """
    found = [there / count for there, count in map(places, headers) if count]
    return statistics.fmean(found) if found else None

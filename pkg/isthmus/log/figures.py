"""Figures of a run that several tools show, each computed here alone. docs/glossary.md says what they mean."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from isthmus.format.records.messages import Tally
from isthmus.format.records.objects import CommitHeader, Input
from isthmus.reasons import LOSSLESS


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


def updates_rejected(rejections: Mapping[str, int]) -> int:
    """Return how many of these rejections, by reason, are of updates whose work is lost, each update once.

    The others are rejected without loss.
    """
    return sum(count for reason, count in rejections.items() if reason not in LOSSLESS)


class Reached(NamedTuple):
    """How far a merged update says that its learner has come. The largest of a learner's is its newest: of the merged
    updates of its newest incarnation, the one with the most steps."""

    incarnation: int
    step: int
    tokens_seen: int
    """Tokens of these steps. An incarnation counts on from its checkpoint, and counts work that a kill took again."""

    @classmethod
    def of(cls, given: Input) -> "Reached":
        """Return how far one merged update says that its learner has come."""
        return cls(given.incarnation, given.step, given.tokens_seen)

    def processed(self, again: Mapping[int, int]) -> int:
        """Return the tokens that the learner had processed then, in all incarnations. `again`: see `trained_again`."""
        return self.tokens_seen + again.get(self.incarnation, 0)


def trained_again(spans: Mapping[int, tuple[int, int]], claimed: Mapping[int, int]) -> dict[int, int]:
    """Return the tokens that were trained again, by incarnation of one learner: the tokens that all incarnations before
    it trained beyond the checkpoint from which the next one resumed.

    `spans`: by incarnation with merged updates, the `tokens_seen` at which the first of these begins and the last one
    ends. `claimed`: what claims state, by incarnation, as far as they can be read. Without an incarnation's claim, the
    merged updates alone tell: they do not have what was trained after the last one of an incarnation that was killed.
    They do not correct a claim: an incarnation's first one may reach back before the checkpoint from which it resumed.
    """
    found: dict[int, int] = {}
    again, ended = 0, 0
    for incarnation, (begun, end) in sorted(spans.items()):
        again = claimed.get(incarnation, again + max(0, ended - max(0, begun)))
        found[incarnation], ended = again, end
    return found


class LogSums:
    """Figures of a run, summed over its commits, which may be taken in any order."""

    def __init__(self, headers: Iterable[CommitHeader] = ()) -> None:
        self.commits = 0
        self.merged = 0
        """Updates that were merged."""
        self.clipped = 0
        """Updates that were merged and clipped. An update that was clipped for two reasons is one."""
        self.clips: Counter[str] = Counter()
        """Clipped updates by reason. These add up to more than `clipped`, since an update may have several reasons."""
        self.learners = set[str]()
        """Learners whose updates were merged."""
        self._shares, self._rounds = 0.0, 0
        for header in headers:
            self.take(header)

    def take(self, header: CommitHeader) -> None:
        """Add a commit."""
        self.commits += 1
        self.merged += len(header.inputs)
        for given in header.inputs:
            self.learners.add(given.learner)
            self.clipped += bool(given.clipped)
            self.clips.update(given.clipped)
        there, count = places(header)
        if count:
            self._shares, self._rounds = self._shares + there / count, self._rounds + 1

    @property
    def participation(self) -> float | None:
        """The mean share of the learners expected, or in nevertheless, that are in a commit; None without commits.

        Commits that heal are left out.
        """
        return self._shares / self._rounds if self._rounds else None


def ledger(tallies: Iterable[Tally]) -> Tally:
    """Return the ledger of a run, in tokens: the sum of its learners' ledgers."""
    found = list(tallies)
    return Tally(**{part: sum(getattr(tally, part) for tally in found) for part in Tally.__struct_fields__})

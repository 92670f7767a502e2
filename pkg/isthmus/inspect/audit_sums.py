"""The sums of an audit: what each member and learner did in each period, from the commits of a run."""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from isthmus.format.records.objects import CommitHeader
from isthmus.format.rules import STALENESS_MAX
from isthmus.log import Commit, Log
from isthmus.log.figures import Reached, attendance, places, updates_rejected
from isthmus.log.membership import Membership

NOBODY = "(no member)"
"""Stands for the entry of learners that the membership does not name."""

DEFINITIONS = {
    "updates": "updates that commits merged",
    "tokens": "the tokens of these updates, each fragment's counted by its share of the parameters",
    "weight": (
        "the sum of the effective weights of these updates, as the commits used them; its share is of the sum over all "
        "updates of the period"
    ),
    "movement": (
        "of the distance by which each commit moved the published value of its fragment, |Θ(v) − Θ(v−1)|, every "
        "input i gets the share w_i·s_i·|g_i| / Σ w·s·|g|, where w is its weight, s its scale and |g| the length of "
        "its update before clipping; summed over commits. Commits that replay did not fold, and commits that heal, are "
        "left out. This divides up what happened. It does not say what would have happened without a member: "
        "influence does"
    ),
    "participation": (
        "of a run: of the learners that a round expected, or that were in nevertheless, the share that is in its "
        "commit, in the mean over commits; commits that heal do not count. Of a learner: of the rounds that expected "
        "it, the share that it was in. Of a member or an institution: the same over all its learners"
    ),
    "in_commits": (
        "commits that have at least one of these updates, whether or not their rounds expected the learner; the page "
        "has their share of all commits"
    ),
    "clipped": "merged updates that counted for less than they stated, by reason; an update may have several reasons",
    "cut": "the number of these updates, each counted once",
    "rejections": "rejections that commits list, by reason. A commit lists the newest ones; others are only counted",
    "updates_rejected": (
        "of these rejections, those by which work is lost, once for each update. By the others nothing is lost. It is "
        "a number of updates: commits name a rejected update without its tokens"
    ),
    "institution": (
        "the members that the charter counts as one, by its newest version that has the member. A member for which the "
        "charter names no institution is one by itself. Nobody checks that two institutions are independent"
    ),
    "verified": "of the updates, those in commits that replay folded again with the same result",
}
"""What each figure means, for the report."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What a member or learner did in a span of time. `DEFINITIONS` says what the figures mean."""

    updates: int
    tokens: float
    weight: float
    weight_share: float | None
    """None: nothing was merged then."""
    movement: float
    """In units of the parameters."""
    movement_share: float | None
    """None: no commit of the span has a known movement."""
    expected: int
    there: int
    participation: float | None
    in_commits: int
    cut: int
    clipped: Mapping[str, int]
    rejections: Mapping[str, int]
    updates_rejected: int
    verified: int


@dataclass(frozen=True, slots=True)
class Period:
    """A span of the run's time. A commit belongs to the span in which it was written."""

    begin: float
    end: float
    commits: int
    updates: int
    tokens: float
    weight: float
    movement: float
    participation: float | None


@dataclass(frozen=True, slots=True)
class Heal:
    """A commit that started a fragment again."""

    fragment: int
    version: int
    at: float
    source: int
    broken_at: int
    key: str
    why: str


@dataclass(slots=True)
class _Tally:
    """Sums of one learner in one period."""

    updates: int = 0
    tokens: float = 0.0
    weight: float = 0.0
    movement: float = 0.0
    expected: int = 0
    there: int = 0
    cut: int = 0
    verified: int = 0
    clipped: Counter[str] = field(default_factory=Counter)
    rejections: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Span:
    """Sums of one period over all learners."""

    commits: int = 0
    updates: int = 0
    tokens: float = 0.0
    weight: float = 0.0
    movement: float = 0.0
    share: float = 0.0
    """Sum of the shares of learners that were in, over `shared` commits."""
    shared: int = 0


@dataclass(slots=True)
class Named:
    """Uses of one manifest."""

    at: float
    first: str
    updates: int
    member: str


class Sums:
    """Takes in each commit once, in any order of fragments and versions."""

    def __init__(self, log: Log, edges: Sequence[float]) -> None:
        """`edges`: where the periods begin, and where the last one ends [seconds since 1970]."""
        self.log, self.edges = log, edges
        self.tallies: dict[str, dict[str, dict[int, _Tally]]] = defaultdict(
            lambda: defaultdict(lambda: defaultdict(_Tally))
        )
        """By member, learner and period."""
        self.spans = [Span() for _ in edges[1:]]
        self.seen: list[set[int]] = [set() for _ in log.run.layout.fragments]
        self.verified = 0
        self.under: Counter[int] = Counter()
        """Commits by the version of the membership that they name."""
        self.first_under: dict[int, float] = {}
        """When the earliest of these was written, as the syncers state."""
        self.written: Counter[str] = Counter()
        """Commits by the member that wrote them."""
        self.manifests: dict[tuple[str, bytes], Named] = {}
        self.heals: list[Heal] = []
        self.newest: list[dict[int, CommitHeader]] = [{} for _ in log.run.layout.fragments]
        """By fragment, about the last `STALENESS_MAX` commits by version."""
        self.last_merged: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
        """By member and learner: by fragment, the newest version that merged it."""
        self.reached: dict[str, Reached] = {}
        """By learner, how far it had come by its newest merged update."""
        self.lived: dict[str, dict[int, tuple[int, int]]] = defaultdict(dict)
        """By learner and incarnation, the `tokens_seen` at which its first merged update begins and the last ends."""
        self._together: Counter[tuple[int, frozenset[tuple[str, str]]]] = Counter()
        """Commits by period and by the members and learners that are in them."""
        self._totals: dict[int, Counter[str]] = defaultdict(Counter)
        self._listed: Counter[str] = Counter()

    def take(self, commit: Commit, moved: float | None, verified: bool) -> None:
        """Add a commit; see `replay.Visit`."""
        h = commit.header
        if h.version in self.seen[h.fragment]:
            return
        self.seen[h.fragment].add(h.version)
        self.verified += verified
        judge = self.log.members.judging(h.members)
        self.under[h.members] += 1
        self.first_under[h.members] = min(h.written_at, self.first_under.get(h.members, h.written_at))
        self.written[self.member_of(judge, h.writer)] += h.healed is None
        self._keep(h)
        self._totals[h.fragment] |= Counter(dict(h.rejected_total))
        when = self._period(h.written_at)
        span, there = self.spans[when], places(h)
        span.commits += 1
        span.shared += there[1] > 0
        span.share += there[0] / max(1, there[1])
        self._merged(h, judge, when, moved, verified)
        for name, was_there in attendance(h).items():
            tally = self.tallies[self.member_of(judge, name)][name][when]
            tally.expected += 1
            tally.there += was_there
        for r in h.rejected:
            tally = self.tallies[self.member_of(judge, r.learner)][r.learner][when]
            tally.rejections[r.reason] += r.count
            self._listed[r.reason] += r.count
        if h.healed is not None:
            why = h.healed
            self.heals.append(Heal(h.fragment, h.version, h.written_at, why.source, why.broken_at, why.key, why.why))

    def member_of(self, judge: Membership, learner: str) -> str:
        """Return the entry that covers a learner in a version of the membership, or else in the newest that has one."""
        if not self.log.members.signed:
            return learner
        versions = (judge, *reversed(self.log.members.versions))
        found = next((entry for version in versions if (entry := version.member(learner)) is not None), None)
        return found.name if found else NOBODY

    @property
    def unlisted(self) -> Counter[str]:
        """Rejections, by reason, that commits counted and did not list."""
        return sum(self._totals.values(), Counter[str]()) - self._listed

    def _period(self, at: float) -> int:
        begin, end = self.edges[0], self.edges[-1]
        share = (at - begin) / (end - begin)
        return min(len(self.spans) - 1, max(0, math.floor(share * len(self.spans))))

    def _merged(self, h: CommitHeader, judge: Membership, when: int, moved: float | None, verified: bool) -> None:
        span, share = self.spans[when], self.log.run.shares[h.fragment]
        self._together[when, frozenset((self.member_of(judge, i.learner), i.learner) for i in h.inputs)] += 1
        pulls = [i.weight * i.scale * i.norm for i in h.inputs]
        pull = sum(pulls)
        known = moved if moved is not None and verified and pull > 0.0 else 0.0
        span.movement += known
        for i, own in zip(h.inputs, pulls, strict=True):
            member = self.member_of(judge, i.learner)
            tally = self.tallies[member][i.learner][when]
            for sums in (span, tally):
                sums.updates += 1
                sums.tokens += i.tokens * share
                sums.weight += i.weight
            tally.movement += known * own / pull if pull else 0.0
            tally.verified += verified
            tally.clipped.update(i.clipped)
            tally.cut += bool(i.clipped)
            stated = Reached.of(i)
            self.reached[i.learner] = max(stated, self.reached.get(i.learner, stated))
            begun, end = self.lived[i.learner].get(i.incarnation, (i.tokens_seen, i.tokens_seen))
            self.lived[i.learner][i.incarnation] = min(begun, i.tokens_seen - i.tokens), max(end, i.tokens_seen)
            last = self.last_merged[member, i.learner]
            last[h.fragment] = max(h.version, last.get(h.fragment, 0))
            if i.manifest is not None:
                place = f"{h.fragment}/{h.version}"
                named = self.manifests.setdefault((i.learner, i.manifest), Named(h.written_at, place, 0, member))
                named.updates += 1
                if h.written_at < named.at:
                    named.at, named.first = h.written_at, place

    def _keep(self, h: CommitHeader) -> None:
        kept = self.newest[h.fragment]
        kept[h.version] = h
        if len(kept) > 4 * STALENESS_MAX:
            for version in sorted(kept)[: -2 * STALENESS_MAX]:
                del kept[version]

    # --- figures ------------------------------------------------------------------------------------------------------

    def figures(self, members: Collection[str], learner: str | None = None) -> tuple[Figures, list[Figures]]:
        """Return the figures of members together, or of one of their learners: over the whole run, and by period."""
        chosen = [
            (when, tally)
            for member in members
            for name, found in self.tallies.get(member, {}).items()
            if learner in (None, name)
            for when, tally in found.items()
        ]
        within = Counter[int]()
        for (when, who), commits in self._together.items():
            within[when] += commits * any(m in members and learner in (None, name) for m, name in who)
        by_period = [
            _figures([tally for at, tally in chosen if at == when], [span], within[when])
            for when, span in enumerate(self.spans)
        ]
        return _figures([tally for _, tally in chosen], self.spans, within.total()), by_period

    def periods(self) -> list[Period]:
        """Return the periods with their sums."""
        return [
            Period(
                begin,
                end,
                s.commits,
                s.updates,
                rounded(s.tokens),
                rounded(s.weight),
                rounded(s.movement),
                rounded(s.share / s.shared) if s.shared else None,
            )
            for (begin, end), s in zip(itertools.pairwise(self.edges), self.spans, strict=True)
        ]


def rounded(value: float) -> float:
    """Return a figure with nine digits: the others depend on the order in which commits were read."""
    return float(f"{value:.9g}")


def _figures(tallies: Sequence[_Tally], spans: Sequence[Span], in_commits: int) -> Figures:
    weight, movement = sum(s.weight for s in spans), sum(s.movement for s in spans)
    own_weight, own_movement = sum(t.weight for t in tallies), sum(t.movement for t in tallies)
    expected, there = sum(t.expected for t in tallies), sum(t.there for t in tallies)
    rejections = _summed(t.rejections for t in tallies)
    return Figures(
        updates=sum(t.updates for t in tallies),
        tokens=rounded(sum(t.tokens for t in tallies)),
        weight=rounded(own_weight),
        weight_share=rounded(own_weight / weight) if weight else None,
        movement=rounded(own_movement),
        movement_share=rounded(own_movement / movement) if movement else None,
        expected=expected,
        there=there,
        participation=rounded(there / expected) if expected else None,
        in_commits=in_commits,
        cut=sum(t.cut for t in tallies),
        clipped=_summed(t.clipped for t in tallies),
        rejections=rejections,
        updates_rejected=updates_rejected(rejections),
        verified=sum(t.verified for t in tallies),
    )


def _summed(counts: Iterable[Counter[str]]) -> dict[str, int]:
    return dict(sorted(sum(counts, Counter[str]()).items()))

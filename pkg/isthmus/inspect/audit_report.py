"""What an audit says of a run: its parts, its headline, and what needs a look."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from isthmus.inspect import replay as replays
from isthmus.inspect.audit_sums import Figures, Heal, Period
from isthmus.inspect.charter_words import at_time
from isthmus.inspect.influence import Influence
from isthmus.log.membership import CLOCKS_S
from isthmus.log.replaced import Outdated, OutdatedTogether, together
from isthmus.wording import agreeing, counted, fragments, lasting


@dataclass(frozen=True, slots=True)
class LearnerFigures:
    """One learner's figures, over the whole run and by period."""

    name: str
    total: Figures
    periods: Sequence[Figures]


@dataclass(frozen=True, slots=True)
class Member:
    """An entry of the membership with the learners that it covers; in an unsigned run, a learner."""

    name: str
    roles: Sequence[str]
    keys: Sequence[str]
    """Fingerprints, in the order in which they came into force."""
    since: int
    """The membership version that named it first; 0: an unsigned run, or no version named it."""
    gone: int | None
    """The version that removed it; None: it is a member now."""
    factor: float
    cap: float | None
    sources: Sequence[str]
    """The newest terms that the charter states for it, while it was a member."""
    institution: str
    """The one that these terms name; the member's own name if they name none."""
    commits: int
    """Commits that it wrote as a syncer."""
    total: Figures
    periods: Sequence[Figures]
    learners: Sequence[LearnerFigures]


@dataclass(frozen=True, slots=True)
class Institution:
    """The members of one institution together."""

    name: str
    members: Sequence[str]
    commits: int
    """Commits that they wrote as syncers."""
    total: Figures
    periods: Sequence[Figures]


@dataclass(frozen=True, slots=True)
class Signature:
    """Who signed or approved a version of the membership."""

    name: str
    key: str
    """The key's fingerprint."""


@dataclass(frozen=True, slots=True)
class MembershipChange:
    """A version of the membership: what it changed, and who agreed."""

    version: int
    at: float
    """When it came into force [s since 1970], as the last owner to approve it states."""
    proposed_at: float
    signed_by: Signature
    approvals: Sequence[Signature]
    changes: Sequence[str]
    commits: int
    """Commits that were made under it."""
    first_commit_at: float | None
    """When the earliest of them was written, as its syncer states; None: there is none."""
    chartered: bool
    """Whether it has a charter."""

    @property
    def late_s(self) -> float:
        """By how long the time that this version states is after its first commit; 0: not by more than clocks differ.

        A false time can make it look as if commits had been made before the owners agreed, or after.
        """
        apart = self.at - self.first_commit_at if self.first_commit_at is not None else 0.0
        return apart if apart > CLOCKS_S else 0.0


@dataclass(frozen=True, slots=True)
class ManifestUse:
    """A manifest that commits name."""

    learner: str
    member: str
    digest: str
    key: str
    since: float
    """When the first commit that names it was written."""
    first: str
    """That commit, as FRAGMENT/VERSION."""
    updates: int
    missing: str
    """Why it cannot be read; empty if it was."""
    says: Sequence[str]


@dataclass(frozen=True, slots=True)
class PromotionRow:
    """A promotion, and whether it holds."""

    number: int
    key: str
    version: int
    by: str
    at: float
    published: str
    fault: str
    """Why it does not hold; empty if it does."""
    series: str
    values: Mapping[str, float]
    """The measured values that it rests on, by evaluator."""
    others: Mapping[str, Sequence[float]]
    """Other numbers for the same cut that these evaluators have stored. Nothing proves which was first."""
    left_out: Mapping[str, Sequence[float]]
    """Numbers of other evaluators for the same cut, on which it does not rest: they came later, or are worse than the
    gate allows."""


@dataclass(frozen=True, slots=True)
class Number:
    """A number that an evaluator of a gate has stored."""

    series: str
    version: int
    by: str
    value: float
    said_at: float
    """When it was stored, as the evaluator states; nothing proves it."""
    published: str
    """Digest of the cut that was measured; empty if the number names none, and so does not count."""
    key: str
    promotions: Sequence[int]
    """The promotions that hold and rest on it."""
    contested: bool
    """Whether the evaluator has stored different numbers for this version: none of them counts for a promotion."""


@dataclass(frozen=True, slots=True)
class Restart:
    """A claim: the beginning of an incarnation of a learner."""

    learner: str
    member: str
    incarnation: int
    at: float
    resumed: str
    """Key of the checkpoint from which it resumed; empty: from none."""
    tokens_seen: int
    tokens_trained_again: int
    """Tokens that all earlier incarnations trained beyond the checkpoint from which the next one resumed."""


@dataclass(frozen=True, slots=True)
class Stated:
    """The ledger that a learner states in its newest checkpoint: what became of the tokens processed up to then."""

    step: int
    processed: int
    """The sum of the parts below."""
    merged: float
    overwritten: float
    late: float
    pending: float
    rejected: float
    lost: float


@dataclass(frozen=True, slots=True)
class Work:
    """What became of a learner's work, in tokens, each fragment's counted by its share of the parameters."""

    learner: str
    member: str
    merged: float
    """Tokens in commits."""
    held: float
    """Tokens in valid updates that no commit has; of several on one base, those of the longest."""
    processed: int | None
    """Tokens that the learner states to have processed, in all incarnations, at its newest merged update; None: no
    update was merged."""
    stated: Stated | None
    """None: it has no checkpoint that can be read."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Versions of a fragment that replay cannot verify, and why."""

    fragment: int
    first: int
    last: int
    why: str
    key: str = ""
    detail: str = ""
    writers: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Verification:
    """What replay found."""

    commits: int
    """All commits that the audit read."""
    verified: int
    unverified: Sequence[Gap]
    differences: Sequence[replays.Difference]
    unproven: int
    unproven_in: Sequence[int]
    """How many commits depend on updates that are not in the log, so that weights are not verified; their fragments."""
    untimely: int
    untimely_in: Sequence[int]
    """How many updates have more steps than the times in the log allow, and their fragments."""
    ignored: Sequence[str]
    """Snapshots that count as missing, with reasons."""
    unstated: Sequence[str]
    """Lost manifests: whether the charter allowed their updates cannot be verified."""
    outdated: Sequence[Outdated]
    """Commits made under a membership after another one, which does not allow them, had replaced it."""

    @property
    def outdated_together(self) -> list[OutdatedTogether]:
        """The same, those of all fragments together."""
        return together(self.outdated)


@dataclass(frozen=True, slots=True)
class Headline:
    """What the audit found, in one sentence."""

    level: Literal["good", "amber", "bad"]
    """bad: a commit differs; amber: none does, but something else needs a look; good: nothing does."""
    said: str
    remarks: Sequence[str]
    """What needs a look, each with how much there is of it and where. They are part of `said`."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """An update of an unfinished round: stored, and neither merged nor rejected for good by any commit."""

    learner: str
    member: str
    base: int
    key: str
    steps: int | None
    tokens: int | None
    """None: the object is not a valid update."""
    stored_at: float | None
    """By the store's clock; None: the store does not list it."""
    late_at: float | None
    """When the syncer of the newest commit heard of it, if that commit lists it as late."""
    fault: str
    """Why it is no valid update; empty if it is one."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """The round after a fragment's newest commit: the contributions that are in if it dies now."""

    fragment: int
    version: int
    """The version that it would have made."""
    since: float
    """When the newest commit was written, or the run was created."""
    updates: Sequence[Waiting]

    @property
    def by_learner(self) -> list[Sequence[Waiting]]:
        """The updates of each learner, by name: valid ones first, then the newest base and the most tokens."""
        found = defaultdict[str, list[Waiting]](list)
        for one in sorted(self.updates, key=lambda u: (u.learner, bool(u.fault), -u.base, -(u.tokens or 0), u.key)):
            found[one.learner].append(one)
        return list(found.values())


@dataclass(frozen=True, slots=True)
class Audit:
    """The whole audit. Times are seconds since 1970; those of commits are by the clocks of their syncers."""

    isthmus: str
    written_at: float
    run: Mapping[str, object]
    definitions: Mapping[str, str]
    memberships: Sequence[MembershipChange]
    members: Sequence[Member]
    institutions: Sequence[Institution]
    periods: Sequence[Period]
    participation: float | None
    manifests: Sequence[ManifestUse]
    promotions: Sequence[PromotionRow]
    numbers: Sequence[Number]
    """All numbers of the evaluators, those on which nothing rests too."""
    promotions_beyond: Sequence[int]
    """Numbers of promotions after one that is missing. They have no effect."""
    restarts: Sequence[Restart]
    heals: Sequence[Heal]
    replay: Verification
    rejections_unlisted: Mapping[str, int]
    """Rejections, by reason, that commits counted without listing the learner."""
    unfinished: Sequence[Unfinished]
    work: Sequence[Work]
    influence: Sequence[Influence]
    differs: Sequence[str]
    """What differs between two audits of the same log."""
    not_read: Sequence[str]
    """What this reader could not read, or may not."""

    @property
    def grouped(self) -> bool:
        """Whether the charter names institutions."""
        return any(m.institution != m.name for m in self.members)

    @property
    def before_charter(self) -> int:
        """Commits made before the owners agreed on a first charter; 0: the run has none."""
        first = next((v.version for v in self.memberships if v.chartered), 0)
        return self.replay.commits - sum(v.commits for v in self.memberships if v.version >= first) if first else 0

    @property
    def sound(self) -> bool:
        """Whether nothing differs from what replay computes."""
        return not self.replay.differences

    @property
    def headline(self) -> Headline:
        """What the audit found, with everything that some section names as a fault."""
        r, remarks = self.replay, list(_remarks(self))
        if r.differences:
            differ = f"{counted(len(r.differences), 'commit')} differ{'s' if len(r.differences) == 1 else ''}"
            said = f"{differ} from what replay computes; replay verified {r.verified:,} of {r.commits:,} commits"
        elif r.verified < r.commits:
            said = f"replay verified {r.verified:,} of {r.commits:,} commits, and none differs"
        else:
            said = f"replay verified all {r.commits:,} commits" if r.commits else "there is no commit yet"
        if early := self.before_charter:
            said += f"; {counted(early, 'commit')} {agreeing(early, 'was', 'were')} made before the first charter"
        if remarks:
            said += f"; BUT {'; '.join(remarks)}"
        return Headline("bad" if r.differences else "amber" if remarks else "good", said, remarks)


def _remarks(a: Audit) -> Iterator[str]:
    """Yield what needs a look although no commit differs, the worst first."""
    r = a.replay
    for one in r.outdated_together:
        yield f"{one.writer} made {one.where} under membership {one.under}, which membership {one.newer} had replaced"
    for v in a.memberships:
        if v.late_s:
            yield (
                f"membership {v.version} states that it came into force at {at_time(v.at)}, {lasting(v.late_s)} after "
                "the first commit under it"
            )
    if r.unproven:
        yield f"the weights in {counted(r.unproven, 'commit')} of {fragments(r.unproven_in)} are not verified"
    if r.unverified:
        versions = {(gap.fragment, version) for gap in r.unverified for version in range(gap.first, gap.last + 1)}
        yield f"not verified: {counted(len(versions), 'version')} of {fragments(p for p, _ in versions)}"
    if r.untimely:
        yield f"more steps than there was time for: {counted(r.untimely, 'update')} of {fragments(r.untimely_in)}"
    if r.ignored:
        yield f"ignored: {counted(len(r.ignored), 'snapshot')}"
    if missing := sum(bool(m.missing) for m in a.manifests) or len(r.unstated):
        yield f"not readable: {counted(missing, 'manifest')} that commits name"
    if several := [p.number for p in a.promotions if p.others]:
        yield f"promotion {', '.join(map(str, several))} rests on one of several numbers of an evaluator"
    for by, version in dict.fromkeys((n.by, n.version) for n in a.numbers if n.contested):
        yield f"contested: the different numbers of {by} for version {version}"
    if faulty := [p.number for p in a.promotions if p.fault]:
        yield f"promotion {', '.join(map(str, faulty))} does not hold"
    if a.promotions_beyond:
        yield f"promotion {', '.join(map(str, a.promotions_beyond))} comes after one that is missing"
    if a.not_read:
        yield f"not readable for this reader: {counted(len(a.not_read), 'object')}"

"""Audit a run: who agreed on what, what each member contributed, and what of it replay verified. The audit only reads.

Every commit is read once. Replay verifies the commits as it folds them, and hands each one over. Commits that replay
does not reach (their inputs were collected, or a commit before them differs) are read alone and count as not verified.
"""

import asyncio
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from isthmus.errors import Denied, InputError, LogCorrupt, ObjectMissing, RecordInvalid
from isthmus.format.records.frame import Kind
from isthmus.format.records.keys import (
    LEARNERS,
    UPDATES,
    commit_in,
    commit_key,
    commits_prefix,
    incarnation_in,
    is_versioned,
    learner_in,
    manifest_key,
    promotion_key,
    update_key,
    version_in,
)
from isthmus.format.records.messages import PARTS
from isthmus.format.records.objects import MemberSpec, UpdateHeader
from isthmus.format.signing import fingerprint
from isthmus.inspect import replay as replays
from isthmus.inspect.audit_sums import DEFINITIONS, Figures, Heal, Named, Period, Span, Sums, rounded
from isthmus.inspect.charter_words import at_time, differences
from isthmus.inspect.influence import Evaluate, Influence, without
from isthmus.inspect.status import read_ledgers
from isthmus.log import Log, evaluations, manifests, promotions
from isthmus.log.claims import claim_at
from isthmus.log.figures import trained_again
from isthmus.log.listing import ShareDone, checkpoints_in
from isthmus.log.membership import CLOCKS_S, Membership
from isthmus.log.promotions import Measured, Promotions, gate_of
from isthmus.log.replaced import Outdated, OutdatedTogether, Replaced, together
from isthmus.reasons import FINAL
from isthmus.version import __version__
from isthmus.wording import agreeing, counted, fragments, lasting

PERIODS_MOST = 24
"""The number of equal spans into which the run's time is cut, unless a length is given."""

SPANS_MOST = 10_000
"""The most spans that a given length may make."""

AT_ONCE = 16

# --- the result -------------------------------------------------------------------------------------------------------


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


# --- the audit --------------------------------------------------------------------------------------------------------


async def audit(
    log: Log,
    *,
    period_s: float | None = None,
    leave_out: Sequence[str] = (),
    last: int = 16,
    evaluate: Evaluate | None = None,
    at_once: int = 2,
    progress: ShareDone = lambda _: None,
) -> Audit:
    """Return the audit of a run. Reads as a reader does: what it may not read is named in `not_read`.

    `period_s`: length of a period; None: `PERIODS_MOST` equal ones. `leave_out`: members and institutions whose
    influence is computed, of each one alone, over the `last` rounds of each fragment (0: all). `evaluate`: returns the
    held-out loss of a model. Raises `InputError` for an unknown name or too short a period, `LogCorrupt` if no fold can
    begin, and what the store raises.
    """
    await log.members.refresh(log.store)
    known = {entry.name: v.institution(entry.name) for v in log.members.versions for entry in v.members}
    if log.members.signed:
        _require_known(leave_out, known)
    collected = Sums(log, await _edges(log, period_s))
    result = await replays.replay(log, at_once=at_once, progress=progress, visit=collected.take)
    outdated = [one for r in result for one in r.outdated]
    unverified = await _rest(log, collected, result, outdated)
    names = {name: name for name in collected.tallies} | known
    _require_known(leave_out, names)
    not_read = list[str]()
    restarts = await _restarts(log, collected, not_read)
    promoted, beyond, stored = await _promoted(log, not_read)
    losses = dict[tuple[int, ...], float | None]()
    unfinished = [await _unfinished(log, collected, f.index) for f in log.run.layout.fragments]
    return Audit(
        isthmus=__version__,
        written_at=log.runtime.wall(),
        run=_run(log),
        definitions=DEFINITIONS,
        memberships=[_change(log, collected, v) for v in log.members.versions[1:]],
        members=_members(log, collected, names),
        institutions=_institutions(collected, names),
        periods=collected.periods(),
        participation=_whole(collected.spans),
        manifests=await _manifests(log, collected),
        promotions=_promotions(promoted, stored),
        numbers=_numbers(promoted, stored),
        promotions_beyond=beyond,
        restarts=restarts,
        heals=sorted(collected.heals, key=lambda heal: (heal.at, heal.fragment)),
        replay=_verification(collected, result, unverified, outdated),
        rejections_unlisted=dict(sorted(collected.unlisted.items())),
        unfinished=unfinished,
        work=await _work(log, collected, restarts, unfinished, not_read),
        influence=[
            await _influence(log, collected, result, name, members, last, evaluate, losses, progress)
            for name, members in _left_out(leave_out, names)
        ],
        differs=["written_at", *(f"influence.{field}" for field in ("seconds", "bytes_read"))],
        not_read=not_read,
    )


def _require_known(wanted: Iterable[str], known: Mapping[str, str]) -> None:
    """Raise `InputError` unless each name is a member's or an institution's; `known` has the institution by member."""
    if strange := next((name for name in wanted if name not in {*known, *known.values()}), None):
        others = sorted(set(known.values()) - known.keys())
        raise InputError(
            f"--influence {strange}: there is no such member; members are {', '.join(sorted(known))}"
            + (f"; institutions are {', '.join(others)}" if others else "")
        )


def _left_out(wanted: Iterable[str], known: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Yield what each name stands for: a member, an institution with its members, or first one and then the other."""
    for name in dict.fromkeys(wanted):
        of = [member for member, institution in sorted(known.items()) if institution == name]
        if name in known:
            yield name, [name]
        if of not in ([], [name]):
            yield name, of


async def _edges(log: Log, period_s: float | None) -> list[float]:
    """Return where the periods begin and the last one ends, from the creation to the newest commit."""
    begin, newest = log.run.header.created_at, 0.0
    for f in log.run.layout.fragments:
        try:
            commit = await log.newest(f.index)
        except LogCorrupt:
            continue  # replay names it
        newest = max(newest, commit.header.written_at if commit else 0.0)
    end = max(newest, begin + 1.0)
    if period_s is None:
        return [begin + (end - begin) * n / PERIODS_MOST for n in range(PERIODS_MOST + 1)]
    count = max(1, math.ceil((end - begin) / period_s))
    if count > SPANS_MOST:
        raise InputError(f"--period makes {count} periods of this run; {SPANS_MOST} are the most: choose longer ones")
    return [begin + period_s * n for n in range(count + 1)]


async def _rest(log: Log, collected: Sums, result: Sequence[replays.Replayed], outdated: list[Outdated]) -> list[Gap]:
    """Take in the commits that replay did not hand over; return the versions that are not verified, and why.

    Adds those that are outdated to `outdated`.
    """
    found = list[Gap]()
    for r in result:
        seen = collected.seen[r.fragment]
        first, last = min(seen, default=r.earliest + 1), max(seen, default=r.earliest)
        if first > 1:
            why = "the updates that they merged were collected: only their chain and signatures are checked"
            found.append(Gap(r.fragment, 1, first - 1, why))
            await _take(log, collected, r.fragment, 0, first - 1, found, outdated)
        for gap in r.gaps:
            found.append(
                Gap(
                    r.fragment, gap.first, gap.last, "an object that they need is missing or damaged; a heal followed",
                    gap.key, gap.detail, gap.writers,
                )
            )  # fmt: skip
            if any(version not in seen for version in range(gap.first, gap.last + 1)):
                await _take(log, collected, r.fragment, gap.first - 1, gap.last, found, outdated)
        if r.difference is not None:
            top = max(r.difference.version + r.unreached, await _listed_to(log, r.fragment, r.difference.version))
            why = "this version differs from what replay computes, and later ones rest on it"
            if r.difference.refused:
                why = "an object that this version needs may not be read with these credentials"
            found.append(Gap(r.fragment, last + 1, top, why, r.difference.key, r.difference.detail))
            await _take(log, collected, r.fragment, last, top, found, outdated)
    return found


async def _listed_to(log: Log, p: int, version: int) -> int:
    """Return the last version of a fragment that the store lists, without a gap after `version`.

    Replay does not know it if the newest commit is damaged.
    """
    there = {commit_in(entry.key) for entry in await log.store.list(commits_prefix(p))}
    return next(known for known in itertools.count(version) if known + 1 not in there)


async def _take(
    log: Log, collected: Sums, p: int, after: int, last: int, found: list[Gap], outdated: list[Outdated]
) -> None:
    """Take in the commits after a version, up to `last`, without folding. Adds those that cannot be read to `found`."""
    replaced = Replaced(log.members)
    while after < last:
        key, detail = commit_key(p, after + 1), "is missing"
        try:
            async for commit in log.commits(p, after, None if after else log.run.digest):
                if commit.version > last:
                    break
                if commit.version not in collected.seen[p]:
                    replaced.take(commit)
                collected.take(commit, None, False)
                after = commit.version
                key = commit_key(p, after + 1)
        except LogCorrupt as error:
            key, detail = error.key, error.detail
        if after < last:
            after += 1
            found.append(Gap(p, after, after, "this commit cannot be read, and no figure has it", key, detail))
    outdated += replaced.found


def _run(log: Log) -> dict[str, object]:
    header = log.run.header
    return {
        "url": log.run.url,
        "digest": log.run.digest.hex(),
        "created_at": header.created_at,
        "owner": fingerprint(header.owner) if header.owner else "",
        "owners": [
            {"name": name, "key": fingerprint(key)}
            for key, name in (log.members.current.owners.items() if log.members.signed else ())
        ],
        "purpose": charter.purpose if (charter := log.members.current.charter) else "",
        "parameters": log.run.layout.size,
        "fragments": len(log.run.layout.fragments),
        "rules": {name: getattr(header.rules, name) for name in header.rules.__struct_fields__},
        "bounds": {name: getattr(header.bounds, name) for name in header.bounds.__struct_fields__},
    }


def _whole(spans: Sequence[Span]) -> float | None:
    shared = sum(s.shared for s in spans)
    return rounded(sum(s.share for s in spans) / shared) if shared else None


def _change(log: Log, collected: Sums, now: Membership) -> MembershipChange:
    before = log.members.versions[now.version - 1]
    names = before.owners | now.owners

    def signature(key: bytes) -> Signature:
        return Signature(names.get(key, "not an owner"), fingerprint(key))

    return MembershipChange(
        version=now.version,
        at=now.written_at,
        proposed_at=now.proposed_at,
        signed_by=signature(now.author),
        approvals=[signature(given.owner) for given in now.approvals],
        changes=list(differences(before, now)),
        commits=collected.under[now.version],
        first_commit_at=collected.first_under.get(now.version),
        chartered=now.charter is not None,
    )


def _institutions(collected: Sums, known: Mapping[str, str]) -> list[Institution]:
    found = list[Institution]()
    for name in sorted(set(known.values())):
        own = sorted(member for member, institution in known.items() if institution == name)
        commits = sum(collected.written[member] for member in own)
        found.append(Institution(name, own, commits, *collected.figures(own)))
    return found


def _members(log: Log, collected: Sums, institutions: Mapping[str, str]) -> list[Member]:
    named = defaultdict[str, list[tuple[Membership, MemberSpec]]](list)
    for version in log.members.versions:
        for entry in version.members:
            named[entry.name].append((version, entry))
    return [_member(log, collected, name, of, named[name]) for name, of in sorted(institutions.items())]


def _member(
    log: Log, collected: Sums, name: str, institution: str, named: Sequence[tuple[Membership, MemberSpec]]
) -> Member:
    total, by_period = collected.figures([name])
    terms = named[-1][0].terms(name.removesuffix("*")) if named else None
    now = bool(named) and named[-1][0] is log.members.current
    return Member(
        name=name,
        roles=list(dict.fromkeys(entry.role.value for _, entry in named)) or ["learner"],
        keys=list(dict.fromkeys(fingerprint(entry.key) for _, entry in named)),
        since=named[0][0].version if named else 0,
        gone=named[-1][0].version + 1 if named and not now else None,
        factor=terms.factor if terms else 1.0,
        cap=terms.cap if terms else None,
        sources=terms.sources if terms else (),
        institution=institution,
        commits=collected.written[name],
        total=total,
        periods=by_period,
        learners=[
            LearnerFigures(learner, *collected.figures([name], learner))
            for learner in sorted(collected.tallies.get(name, ()))
        ],
    )


async def _manifests(log: Log, collected: Sums) -> list[ManifestUse]:
    async def one(learner: str, digest: bytes, use: Named) -> ManifestUse:
        missing, says = "", list[str]()
        try:
            says = manifests.told(await manifests.read(log, learner, digest))
        except RecordInvalid as error:
            missing = error.detail
        return ManifestUse(
            learner, use.member, digest.hex(), manifest_key(learner, digest), use.at, use.first, use.updates, missing,
            says,
        )  # fmt: skip

    ordered = sorted(collected.manifests.items(), key=lambda item: (item[0][0], item[1].at))
    return [await one(learner, digest, use) for (learner, digest), use in ordered]


async def _promoted(log: Log, not_read: list[str]) -> tuple[Promotions, list[int], list[Measured]]:
    """Return the promotions, the numbers of those after one that is missing, and all measurements for the gates.

    Reads nothing without a gate.
    """
    known, beyond, stored = Promotions(log), list[int](), list[Measured]()
    if not any(map(gate_of, log.members.versions)):
        return known, beyond, stored
    try:
        await known.refresh()
        beyond = await known.beyond()
    except (Denied, LogCorrupt) as error:
        not_read.append(f"promotions after number {known.last.number if known.last else 0}: {error}")
    try:
        stored = await promotions.stored(log)
    except Denied as error:
        not_read.append(f"the evaluators' numbers: {error}")
    return known, beyond, stored


def _numbers(known: Promotions, stored: Sequence[Measured]) -> list[Number]:
    rests = defaultdict[str, list[int]](list)
    for p in known.sound:
        for named in p.header.evidence if p.header else ():
            rests[named.key].append(p.number)
    none = {(one.cut, one.by) for one in evaluations.contested(stored)}
    return [
        Number(
            h.series, h.cut, h.by or "", h.value, h.written_at, h.published.hex() if h.published else "", one.key,
            rests[one.key], (h.cut, h.by) in none,
        )
        for one in stored
        for h in (one.header,)
    ]  # fmt: skip


def _promotions(known: Promotions, stored: Sequence[Measured]) -> list[PromotionRow]:
    return [
        PromotionRow(
            number=p.number,
            key=promotion_key(p.number),
            version=p.version,
            by=p.header.by if p.header else "",
            at=p.header.written_at if p.header else 0.0,
            published=p.header.published.hex() if p.header else "",
            fault=p.fault,
            series=p.measured[0].series if p.measured else "",
            values=dict(p.values),
            others=promotions.others(p, stored),
            left_out=promotions.left_out(p, stored),
        )
        for p in sorted((*known.sound, *known.unsound), key=lambda p: p.number)
    ]


async def _restarts(log: Log, collected: Sums, not_read: list[str]) -> list[Restart]:
    """Return the claims of all learners, in order of time."""
    try:
        keys = [entry.key for entry in await log.store.list(LEARNERS) if incarnation_in(entry.key)]
    except Denied as error:
        not_read.append(f"claims of learners: {error}")
        return []
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(key: str) -> Restart | None:
        async with slots:
            try:
                h = await claim_at(log, key)
            except (Denied, ObjectMissing, RecordInvalid) as error:
                not_read.append(f"{key}: {error}")
                return None
        member = collected.member_of(log.members.current, h.learner)
        return Restart(h.learner, member, h.incarnation, h.claimed_at, h.resumed, h.tokens_seen, h.tokens_lost)

    found = await asyncio.gather(*(one(key) for key in keys))
    return sorted((r for r in found if r is not None), key=lambda r: (r.at, r.learner, r.incarnation))


async def _work(
    log: Log, collected: Sums, restarts: Sequence[Restart], unfinished: Sequence[Unfinished], not_read: list[str]
) -> list[Work]:
    """Return what became of the work of each learner that stored anything."""
    shares, held = log.run.shares, defaultdict[str, dict[tuple[int, int], float]](lambda: defaultdict(float))
    for u in unfinished:
        for w in u.updates:
            if not w.fault and w.tokens:
                place = u.fragment, w.base
                held[w.learner][place] = max(held[w.learner][place], w.tokens * shares[u.fragment])
    try:
        ledgers = await read_ledgers(log, checkpoints_in(await log.store.list(LEARNERS)))
    except Denied as error:
        not_read.append(f"checkpoints of learners: {error}")
        ledgers = {}
    members = {name: member for member, found in collected.tallies.items() for name in found}
    claimed = defaultdict[str, dict[int, int]](dict)
    for r in restarts:
        claimed[r.learner][r.incarnation] = r.tokens_trained_again
    found = list[Work]()
    for name in sorted({*members, *ledgers, *held, *collected.reached}):
        reached, ledger = collected.reached.get(name), ledgers.get(name)
        parts = {
            part: rounded(sum(row[part] * shares[row["fragment"]] for row in ledger["fragments"])) if ledger else 0.0
            for part in PARTS
        }
        found.append(
            Work(
                learner=name,
                member=members.get(name) or collected.member_of(log.members.current, name),
                merged=collected.figures(collected.tallies, name)[0].tokens,
                held=rounded(sum(held[name].values())),
                processed=reached.processed(trained_again(collected.lived[name], claimed[name])) if reached else None,
                stated=Stated(ledger["step"], ledger["processed"], **parts) if ledger else None,
            )
        )
    return found


def _verification(
    collected: Sums,
    result: Sequence[replays.Replayed],
    unverified: Sequence[Gap],
    outdated: Sequence[Outdated],
) -> Verification:
    return Verification(
        commits=sum(map(len, collected.seen)),
        verified=collected.verified,
        unverified=unverified,
        differences=[r.difference for r in result if r.difference is not None and not r.difference.refused],
        unproven=sum(r.unproven for r in result),
        unproven_in=[r.fragment for r in result if r.unproven],
        untimely=sum(len(r.untimely) for r in result),
        untimely_in=[r.fragment for r in result if r.untimely],
        ignored=[line for r in result for line in r.nobodys],
        unstated=[line for r in result for line in r.unstated],
        outdated=sorted(outdated, key=lambda one: (one.fragment, one.first)),
    )


# --- the round that is not finished -----------------------------------------------------------------------------------


async def _unfinished(log: Log, collected: Sums, p: int) -> Unfinished:
    """Return the updates that a fragment's next round could merge, and no commit has merged or rejected for good."""
    kept = collected.newest[p]
    head = max(kept, default=0)
    oldest = head - log.run.pace.staleness
    settled = {i.key for h in kept.values() for i in h.inputs}
    settled |= {
        update_key(p, r.learner, r.base, r.digest) for h in kept.values() for r in h.rejected if r.reason in FINAL
    }
    merged = Counter[str]()
    for h in kept.values():
        for i in h.inputs:
            merged[i.learner] = max(merged[i.learner], i.base + 1)
    late = {update_key(p, r.learner, r.base, r.digest): r.heard_at for r in kept[head].late} if head else {}
    stored = {
        entry.key: entry.modified
        for entry in await log.store.list(f"{UPDATES}{p:05d}/")
        if is_versioned(entry.key) and learner_in(entry.key)
    }
    found = list[Waiting]()
    for key in sorted(stored.keys() | late.keys()):
        learner, base = learner_in(key), version_in(key)
        if key in settled or not max(oldest, merged[learner]) <= base <= head:
            continue
        said, fault = None, ""
        try:
            said = (await log.open(await log.fetch(key, Kind.UPDATE, p), key, UpdateHeader, in_force=True)).header
        except ObjectMissing:
            if key not in late:
                continue  # it was collected meanwhile
            fault = "it was announced, and is not in the store"
        except RecordInvalid as error:
            fault = error.detail or str(error)
        except Denied as error:
            fault = str(error)
        found.append(
            Waiting(
                learner, collected.member_of(log.members.current, learner), base, key, said.steps if said else None,
                said.tokens if said else None, stored.get(key), late.get(key), fault,
            )
        )  # fmt: skip
    since = kept[head].written_at if head else log.run.header.created_at
    return Unfinished(p, head + 1, since, found)


# --- influence --------------------------------------------------------------------------------------------------------


async def _influence(
    log: Log,
    collected: Sums,
    result: Sequence[replays.Replayed],
    name: str,
    members: Sequence[str],
    last: int,
    evaluate: Evaluate | None,
    losses: dict[tuple[int, ...], float | None],
    progress: ShareDone,
) -> Influence:
    """Return the influence of members together over the last rounds that can be folded."""
    starts, heads, foldable, left_out = dict[int, int](), list[int](), list[int](), set[str]()
    for r in sorted(result, key=lambda r: r.fragment):
        whole, head = max([r.earliest, *(gap.last + 1 for gap in r.gaps)]), max(collected.seen[r.fragment], default=0)
        starts[r.fragment] = max(whole, head - last if last else 0)
        heads.append(head)
        foldable.append(max(0, head - whole))
    for (member, learner), newest in collected.last_merged.items():
        if member in members and any(version > starts[p] for p, version in newest.items()):
            left_out.add(learner)
    return await without(
        log, name, members, left_out, starts, heads, foldable,
        rounds=last, evaluate=evaluate, losses=losses, progress=progress,
    )  # fmt: skip

"""Audit a run: who agreed on what, what each member contributed, and what of it replay verified. The audit only reads.

Every commit is read once. Replay verifies the commits as it folds them, and hands each one over. Commits that replay
does not reach (their inputs were collected, or a commit before them differs) are read alone and count as not verified.
"""

import asyncio
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

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
from isthmus.inspect.audit_report import (
    Audit,
    Gap,
    Institution,
    LearnerFigures,
    ManifestUse,
    Member,
    MembershipChange,
    Number,
    PromotionRow,
    Restart,
    Signature,
    Stated,
    Unfinished,
    Verification,
    Waiting,
    Work,
)
from isthmus.inspect.audit_sums import DEFINITIONS, Named, Span, Sums, rounded
from isthmus.inspect.charter_words import differences
from isthmus.inspect.influence import Evaluate, Influence, without
from isthmus.inspect.status import read_ledgers
from isthmus.log import Log, evaluations, manifests, promotions
from isthmus.log.claims import claim_at
from isthmus.log.figures import trained_again
from isthmus.log.listing import ShareDone, checkpoints_in
from isthmus.log.membership import Membership
from isthmus.log.promotions import Measured, Promotions, gate_of
from isthmus.log.replaced import Outdated, Replaced
from isthmus.reasons import FINAL
from isthmus.version import __version__

PERIODS_MOST = 24
"""The number of equal spans into which the run's time is cut, unless a length is given."""

SPANS_MOST = 10_000
"""The most spans that a given length may make."""

AT_ONCE = 16


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
            f"--influence {strange}: no participant has this name; participants are {', '.join(sorted(known))}"
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

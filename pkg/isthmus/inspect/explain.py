"""Explain what became of one update, one commit or one fragment, from the records in the log."""

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from isthmus.errors import InputError, LogCorrupt, ObjectMissing, RecordInvalid
from isthmus.format.records.frame import Kind
from isthmus.format.records.keys import (
    UPDATES,
    commit_key,
    is_versioned,
    learner_in,
    manifest_key,
    update_key,
    updates_prefix,
    version_in,
)
from isthmus.format.records.objects import CommitHeader, Healed, Input, Late, ManifestHeader, Rejection, UpdateHeader
from isthmus.format.rules import STALENESS_MAX
from isthmus.inspect.persistence import differences
from isthmus.log import Commit, Log, manifests
from isthmus.log.holes import ask_heal, lacking
from isthmus.log.listing import all_or
from isthmus.reasons import FINAL, LOSSLESS, REMEDIES, USUAL, Clip, Reason
from isthmus.rounds.bounds import YOUNG
from isthmus.wording import listed

_COMMIT = re.compile(r"(?:commits/)?(\d+)/(\d+)")
_UPDATE_KEY = re.compile(r"updates/(\d+)/([^/]+)/(\d+)-([0-9a-f]{16})")
_UPDATE = re.compile(r"(\d+)/([^/]+)/(\d+)")

FULL = 0.995
"""From this share on, an update's weight is written as the one that it asked for."""

LOOKED_BACK = 64
"""How many commits are searched for the learner's merged update before the one that is explained."""

_WHY = {
    Reason.STALE: "its base was more versions old than the staleness bound allows",
    Reason.BASE_MERGED: "an update of this learner on this or a newer base was merged without this work",
    Reason.SUPERSEDED: "another update of the same learner on the same base has at least as many tokens",
    Reason.OVERTAKEN: "a newer base of the same learner was already in the round",
    Reason.DUPLICATE: "this very update was announced before: it waits, was merged, or was rejected then",
    Reason.UNKNOWN_BASE: "its base did not exist yet",
    Reason.UNREADABLE: "the store denied it to the syncer; it may still be merged",
    Reason.NOT_A_MEMBER: "its signer was no member then; it may still be merged",
    Reason.OTHER_HISTORY: "its learner had read another commit than the syncer; it may still be merged",
    Reason.NO_MANIFEST: "the charter asked for a manifest, and it named none that is its learner's",
    Reason.UNREAD_MANIFEST: "its manifest was not in the store, or was denied to the syncer; it may still be merged",
    Reason.SOURCE_NOT_ALLOWED: "its manifest declared a data source that the charter did not allow its learner",
    Reason.MISSING: "nothing was stored under its key when it was fetched",
    Reason.NON_FINITE: "it holds a NaN or an infinity",
    Reason.OVERFLOW: "merging it would leave float32's range",
    Reason.TOO_LONG: "it is over a hundred times as long as recent updates are, as after a loss that diverged",
}


@dataclass(slots=True)
class Explanation:
    """An explanation: lines for people, facts for programs."""

    subject: str
    lines: list[str] = field(default_factory=list)
    facts: dict[str, object] = field(default_factory=dict)

    def say(self, line: str) -> None:
        """Add a line."""
        self.lines.append(line)


async def explain(log: Log, what: str) -> Explanation:
    """Explain a commit (`commits/P/V` or P/V), an update (its key, or P/LEARNER/BASE), or a whole fragment (P).

    Raises `InputError` if `what` is none of these, or is not in the run, and `LogCorrupt` for a commit that is missing
    or damaged.
    """
    if found := _UPDATE_KEY.fullmatch(what):
        return await _update(log, int(found[1]), found[2], int(found[3]), found[4])
    if found := _COMMIT.fullmatch(what):
        return await _commit(log, int(found[1]), int(found[2]))
    if found := _UPDATE.fullmatch(what):
        return await _update(log, int(found[1]), found[2], int(found[3]), "")
    if what.isdecimal():
        return await _fragment(log, int(what))
    raise InputError(
        f"{what}: name a commit as FRAGMENT/VERSION, an update by its key or as FRAGMENT/LEARNER/BASE, or a FRAGMENT"
    )


# --- one fragment -----------------------------------------------------------------------------------------------------


async def _fragment(log: Log, p: int) -> Explanation:
    all_or(log, [p])
    found = await differences(log, p)
    told = Explanation(f"fragment {p}")
    tensors = log.run.layout.fragments[p].tensors
    told.say(f"fragment {p}: {sum(t.size for t in tensors):,} parameters in {len(tensors)} tensors")
    if not found:
        told.say("nothing was merged that could be folded")
        await _tell_turned_away(log, told, p)
        return told
    cosines = [d.cosine for d in found if d.cosine is not None]
    lengths = [d.length for d in found]
    told.say(
        f"versions {found[0].version} to {found[-1].version}: merged differences are {lengths[0]:.3g} long at first, "
        f"{lengths[-1]:.3g} at last"
    )
    if cosines:
        third = max(1, len(cosines) // 3)
        told.say(
            f"each resembles the one before it by a cosine of {statistics.fmean(cosines):.2f} in the mean "
            f"({statistics.fmean(cosines[:third]):.2f} in the first third, {statistics.fmean(cosines[-third:]):.2f} in "
            f"the last); the outer momentum is {log.run.rules.outer_momentum:g}"
        )
    told.facts = {
        "fragment": p,
        "momentum": log.run.rules.outer_momentum,
        "differences": [{"version": d.version, "length": d.length, "cosine": d.cosine} for d in found],
    }
    return told


async def _tell_turned_away(log: Log, told: Explanation, p: int) -> None:
    """Add which learners have sent updates on version 0 that syncers reject for their manifests: each learner once for
    each reason."""
    listed = await log.store.list(f"{UPDATES}{p:05d}/")
    for learner in sorted({learner_in(entry.key) for entry in listed} - {""}):
        rejected = defaultdict[str, list[str]](list)
        for key, header in (await _stored(log, p, learner, 0, "")).items():
            if isinstance(header, UpdateHeader):
                manifest = None if header.manifest is None else await _manifest(log, learner, header.manifest)
                one = Explanation(key)
                _judge_manifest(log, one, learner, header.manifest, manifest)
                for line in one.lines:
                    rejected[line].append(key)
        for line, keys in rejected.items():
            more = f" and {len(keys) - 1} more of {learner}" if len(keys) > 1 else ""
            told.say(f"{keys[0]}{more}: {line}")


# --- one commit -------------------------------------------------------------------------------------------------------


async def _commit(log: Log, p: int, version: int) -> Explanation:
    commit = await log.commit(p, version) if p < len(log.run.layout.fragments) and version > 0 else None
    if commit is None:
        newest = await log.newest(p) if p < len(log.run.layout.fragments) else None
        if newest is not None and 0 < version < newest.version:
            said = f"{lacking(version, newest.version)}: nothing is known of what it merged"
            raise LogCorrupt(commit_key(p, version), f"{said}; {ask_heal(log.run.url, signed=log.members.signed)}")
        last = len(log.run.layout.fragments) - 1
        at = (
            f"its fragments are 0 to {last}"
            if p > last
            else f"the newest of fragment {p} is {newest.version if newest else 0}"
        )
        raise InputError(f"there is no commit {p}/{version} in {log.run.url}: {at}")
    h, w = commit.header, commit.header.waited
    told = Explanation(commit_key(p, version))
    told.say(f"{told.subject}: version {version} of fragment {p}, by {h.writer}")
    if h.healed is not None:
        return _healed(told, h, h.healed)
    if h.members:
        told.say(f"signed by {h.writer}'s key, and made under version {h.members} of the membership")
    told.say(f"opened {_s(w.opened_at - w.boundary_at)} after a step boundary, called by {w.called_by}")
    fresh = [i for i in h.inputs if i.base == version - 1]
    quorum = f"quorum of {w.quorum} after {_s(w.quorum_s)} from that boundary"
    told.say(quorum if not w.quorum_missed else f"quorum of {w.quorum} missed: {len(fresh)} fresh updates were in")
    told.say(f"grace granted {_s(w.grace_s)} (cap {_s(w.cap_s)}, effective overlap {w.overlap_steps:.1f} steps)")
    told.say(f"closed by {w.closed_by} after {_s(w.waited_s)}")
    if w.own_s:
        told.say(f"  kept open beyond grace for updates that {h.writer} had heard of but not read yet")
    if not h.inputs:
        told.say("  it merged no update")
    total = sum(i.weight for i in h.inputs)
    for number, i in enumerate(h.inputs, 1):
        late = "" if i.base == version - 1 else f", {version - 1 - i.base} version(s) late"
        share = f"{i.weight / total:.1%} of the weight{_cut(i, version)}"
        told.say(
            f"  in {number}: {i.learner} (incarnation {i.incarnation}) from version {i.base}{late}: {i.steps} steps, "
            f"{i.tokens:,} tokens, length {i.norm:.3g}, {share}; arrived {_s(i.arrived_at - w.opened_at)} after opening"
        )
    for name, who in (("missing", w.missing), ("passed", [f.learner for f in w.passed])):
        if who:
            told.say(f"  {name}: {', '.join(who)}")
    for late_one in h.late:
        told.say(f"  late: {late_one.learner} from version {late_one.base}, heard {_missed(late_one, w.closed_at)}")
    for r in h.rejected:
        told.say(f"  rejected{_without_loss(r)}: {r.learner} from version {r.base}, {r.count} times: {_reason(r)}")
    told.say(
        f"merged in {_s(w.merge_s)} ({h.dense.merge}, embeddings {h.embedding.merge}, rate {h.dense.learning_rate:g}, "
        f"momentum {h.dense.momentum:g}"
        + (f", {h.cancelled} tensors cancelled" if h.cancelled else "")
        + f"), published in {_s(w.publish_s)} as {h.value_key}"
    )
    told.say(f"in the log {_s(h.written_at - w.closed_at)} after closing")
    period, rules = h.period or float(log.run.rules.sync_every), log.run.rules
    told.say(
        f"period from here on: {math.ceil(period)} steps"
        + ("" if period <= rules.sync_every else f" (the rules ask for {rules.sync_every}; rounds take long)")
    )
    if commit.in_segment:
        told.say("old: its bytes are in a segment, and the updates it merged may have been collected")
    told.facts = {
        "commit": told.subject,
        "inputs": [i.key for i in h.inputs],
        "expected": list(w.expected),
        "missing": list(w.missing),
        "passed": [f.learner for f in w.passed],
        "closed_by": w.closed_by,
        "period": period,
        "seconds": {
            "boundary_to_open": w.opened_at - w.boundary_at,
            "quorum": w.quorum_s,
            "grace": w.grace_s,
            "waited": w.waited_s,
            "kept_open": w.own_s,
            "merge": w.merge_s,
            "publish": w.publish_s,
            "close_to_commit": h.written_at - w.closed_at,
        },
    }
    return told


def _healed(told: Explanation, h: CommitHeader, healed: Healed) -> Explanation:
    told.say("merges nothing: it starts the fragment again, because it could not be folded to its end any more")
    told.say(f"  {healed.key}: {healed.why}")
    told.say(f"from the published value of version {healed.source}, with a master equal to it and no momentum")
    if healed.broken_at < h.version:
        told.say(f"versions {healed.broken_at} to {h.version - 1} cannot be verified any more")
    told.facts = {
        "commit": told.subject,
        "writer": h.writer,
        "healed": {"source": healed.source, "broken_at": healed.broken_at, "key": healed.key, "why": healed.why},
    }
    return told


# --- one update -------------------------------------------------------------------------------------------------------


async def _update(log: Log, p: int, learner: str, base: int, digest: str) -> Explanation:
    """Explain the update with this digest; without a digest, all updates of the learner on the base, the merged one
    first."""
    if p >= len(log.run.layout.fragments):
        raise InputError(f"there is no fragment {p} in {log.run.url}")
    stored = await _stored(log, p, learner, base, digest)
    commits = list[Commit]()
    for version in range(base + 1, base + 2 + STALENESS_MAX):
        if (commit := await log.commit(p, version)) is None:
            break
        commits.append(commit)
    named = _named(commits, p, learner, base)
    if digest:
        key = update_key(p, learner, base, bytes.fromhex(digest))
        keys = [key] if key in stored or named else []
    else:
        keys = sorted(stored.keys() | named)
    if not keys:
        newest = await log.newest(p)
        names = sorted({given.learner for given in newest.header.inputs}) if newest else []
        known = f"; its newest version, {newest.version}, merges {listed(names, 3)}" if newest and names else ""
        raise InputError(
            f"{log.run.url} has no record of an update of {learner} on version {base} of fragment {p}{known}"
        )
    stories = [_story(commits, p, learner, base, key, stored.get(key)) for key in keys]
    for told in stories:
        await _tell_manifest(log, told, commits, p, learner, base, stored.get(told.subject))
    stories.sort(key=lambda told: (told.facts["fate"] != "merged", -_tokens(stored.get(told.subject)), told.subject))
    first, *others = stories
    for other in others:
        first.say(f"another one of {learner} on version {base}:")
        first.lines += [f"  {line}" for line in other.lines]
    first.facts["others"] = [{name: other.facts.get(name) for name in ("key", "fate", "reason")} for other in others]
    return first


async def _tell_manifest(
    log: Log,
    told: Explanation,
    commits: Sequence[Commit],
    p: int,
    learner: str,
    base: int,
    header: UpdateHeader | str | None,
) -> None:
    """Add to an update's explanation what its manifest states, and how that differs from the learner's merged update
    before it."""
    inputs = [(c.version, i) for c in commits for i in c.header.inputs if i.key == told.subject]
    if inputs:
        version, digest = inputs[0][0], inputs[0][1].manifest
    elif isinstance(header, UpdateHeader):
        version, digest = commits[-1].version + 1 if commits else base + 1, header.manifest
    else:
        return
    manifest = None if digest is None else await _manifest(log, learner, digest)
    if digest is not None:
        told.facts["manifest"] = digest.hex()
        key = manifest_key(learner, digest)
        told.say(f"its manifest, {key}:" if manifest else f"its manifest, {key}, is not in the store, or is damaged")
        told.lines += [f"  {line}" for line in manifests.told(manifest)] if manifest else []
    if told.facts["fate"] == "unknown":
        _judge_manifest(log, told, learner, digest, manifest)
    before = await _merged_before(log, p, learner, base, version)
    if before is None or before.manifest == digest:
        return
    earlier = None if before.manifest is None else await _manifest(log, learner, before.manifest)
    if digest is None:
        changed = ["that update named one, this update names none"]
    elif before.manifest is None:
        changed = ["that update named none"]
    elif manifest is None or earlier is None:
        changed = ["one of the two manifests cannot be read"]
    else:
        changed = manifests.changes(earlier, manifest)
    told.say(f"its manifest changed since the learner's merged update on version {before.base}:")
    told.lines += [f"  {line}" for line in changed]
    told.facts["manifest_changed"] = changed


def _judge_manifest(
    log: Log, told: Explanation, learner: str, digest: bytes | None, manifest: ManifestHeader | None
) -> None:
    """Add why syncers reject an update for its manifest, though no commit could list that yet."""
    try:
        manifests.require(log.members.current, learner, digest, manifest)
    except RecordInvalid as error:
        told.say(f"syncers reject it ({error.reason.value}): {error.detail}; {REMEDIES[error.reason]}")
        told.facts |= {"fate": "rejected", "reason": error.reason.value}


async def _manifest(log: Log, learner: str, digest: bytes) -> ManifestHeader | None:
    """Return a manifest; None if it is lost or not valid."""
    try:
        return await manifests.read(log, learner, digest)
    except RecordInvalid:
        return None


async def _merged_before(log: Log, p: int, learner: str, base: int, version: int) -> Input | None:
    """Return the learner's newest merged update on an earlier base, from the commits before a version; None if there is
    none among the last `LOOKED_BACK`."""
    for earlier in range(version - 1, max(0, version - 1 - LOOKED_BACK), -1):
        try:
            commit = await log.commit(p, earlier)
        except LogCorrupt:
            return None
        if commit is None:
            return None
        if found := [i for i in commit.header.inputs if i.learner == learner and i.base < base]:
            return max(found, key=lambda i: i.base)
    return None


def _named(commits: Sequence[Commit], p: int, learner: str, base: int) -> set[str]:
    """Return the keys of a learner's updates on a base that commits name. Several updates may have the same base, but
    their digests differ."""
    said = list[Input | Late | Rejection]()
    for commit in commits:
        said += [*commit.header.inputs, *commit.header.late, *commit.header.rejected]
    return {update_key(p, learner, base, x.digest) for x in said if (x.learner, x.base) == (learner, base)}


def _story(
    commits: Sequence[Commit], p: int, learner: str, base: int, key: str, header: UpdateHeader | str | None
) -> Explanation:
    """Explain one update, from the commits after its base."""
    told = Explanation(key)
    told.facts = {"key": key, "learner": learner, "fragment": p, "base": base, "fate": "unknown"}
    told.say(key)
    if isinstance(header, str):
        told.say(f"what is stored there is not a valid update: {header}")
    elif header is not None:
        told.say(
            f"trained by {learner} (incarnation {header.incarnation}) from version {base}: {header.steps} steps, "
            f"{header.tokens:,} tokens in {_s(header.train_s)}, up to its step {header.step}"
        )
    else:
        told.say(_gone(commits, learner, base, key))
    heard, passed_by = False, list[Commit]()
    for commit in commits:
        heard |= _in_commit(told, commit, key, passed_by)
        if told.facts["fate"] == "merged":
            break  # a later announcement of the same update is only rejected
        passed_by.append(commit)
    if told.facts["fate"] == "unknown":
        last = commits[-1].version if commits else base
        told.say(
            f"no commit up to version {last} settles it: it was never announced, or its announcement was lost"
            if not heard
            else f"no commit up to version {last} settles it further"
        )
    return told


def _gone(commits: Sequence[Commit], learner: str, base: int, key: str) -> str:
    """Return why an update is not in the store, as far as the commits after its base tell."""
    for commit in commits:
        if any((i.learner, i.base) == (learner, base) and i.key == key for i in commit.header.inputs):
            return (
                f"not in the store any more: collected by `isthmus gc`, which has packed version {commit.version}"
                if commit.in_segment
                else f"missing, though version {commit.version} merged it and `isthmus gc` has not passed it: damage"
            )
    return "not in the store: never uploaded, or collected since"


def _in_commit(told: Explanation, commit: Commit, key: str, passed_by: Sequence[Commit]) -> bool:
    """Add what a commit says about the update to its explanation; return whether the commit says anything about it.

    `passed_by`: the earlier commits after its base, which have not merged it.
    """
    h, said = commit.header, False
    learner, base = told.facts["learner"], told.facts["base"]

    def is_it(x: Input | Late | Rejection) -> bool:
        return (x.learner, x.base) == (learner, base) and update_key(h.fragment, x.learner, x.base, x.digest) == key

    for late in filter(is_it, h.late):
        missed = _missed(late, h.waited.closed_at)
        told.say(f"not in version {h.version} (closed by {h.waited.closed_by}): heard of {missed}")
        told.facts |= {"fate": "late", "missed_s": late.heard_at - h.waited.closed_at, "late_for": h.version}
        said = True
    for r in filter(is_it, h.rejected):
        told.say(f"rejected{_without_loss(r)} before version {h.version}, {r.count} times: {_reason(r)}")
        if told.facts["fate"] == "base-merged":
            told.facts["reason"] = r.reason
        elif r.reason != Reason.DUPLICATE or told.facts["fate"] == "unknown":
            told.facts |= {"fate": "rejected", "reason": r.reason}
        said = True
    for number, i in enumerate(h.inputs, 1):
        if (i.learner, i.base) != (learner, base):
            continue
        if is_it(i):
            for earlier in passed_by:
                closed_at = earlier.header.waited.closed_at
                told.say(
                    f"came {_s(i.arrived_at - closed_at)} too late for version {earlier.version}: {_how(i, closed_at)}"
                )
                told.facts["missed_s"] = i.arrived_at - closed_at
            _merged(told, commit, i, number)
        else:
            told.say(f"version {h.version} merged another update on the same base instead: {i.key}")
            told.facts["instead"] = i.key
            if told.facts.get("reason") not in FINAL:
                told.facts |= {"fate": "base-merged", "reason": told.facts.get("reason", Reason.BASE_MERGED.value)}
        said = True
    return said


def _merged(told: Explanation, commit: Commit, i: Input, number: int) -> None:
    h, w = commit.header, commit.header.waited
    told.say(
        f"announced and heard {_s(i.heard_at - i.taken_at)} after its step boundary (packing and upload in between)"
    )
    told.say(
        f"fetched and checked {_s(i.fetched_at - i.heard_at)} later, "
        f"accumulated {_s(i.arrived_at - i.fetched_at)} after that"
    )
    late = "" if i.base == h.version - 1 else f", {h.version - 1 - i.base} version(s) late"
    share = i.weight / sum(x.weight for x in h.inputs)
    told.say(
        f"merged into version {h.version} as input {number} of {len(h.inputs)}{late}: {share:.1%} of the weight"
        f"{_cut(i, h.version)}; "
        f"the round closed {_s(w.closed_at - i.arrived_at)} later by {w.closed_by}"
    )
    told.say(f"in the log {_s(h.written_at - i.taken_at)} after its step boundary, by {h.writer}")
    told.facts |= {
        "fate": "merged",
        "version": h.version,
        "seconds": {
            "train": i.train_s,
            "upload": i.heard_at - i.taken_at,
            "fetch": i.fetched_at - i.heard_at,
            "accumulate": i.arrived_at - i.fetched_at,
            "wait": w.closed_at - i.arrived_at,
            "commit": h.written_at - w.closed_at,
        },
    }


async def _stored(log: Log, p: int, learner: str, base: int, digest: str) -> dict[str, UpdateHeader | str]:
    """Return the headers of the learner's stored updates on this base, by key; with a digest, only of that update.

    In place of the header of an object that is not what its key says, the result has what is wrong with it.
    """
    if digest:
        keys = [update_key(p, learner, base, bytes.fromhex(digest))]
    else:
        entries = await log.store.list(updates_prefix(p, learner))
        keys = [e.key for e in entries if is_versioned(e.key) and version_in(e.key) == base]
    found: dict[str, UpdateHeader | str] = {}
    for key in keys:
        try:
            found[key] = (await log.open(await log.fetch(key, Kind.UPDATE, p), key, UpdateHeader)).header
        except ObjectMissing:
            continue
        except RecordInvalid as error:
            found[key] = str(error)
    return found


def _tokens(header: UpdateHeader | str | None) -> int:
    return header.tokens if isinstance(header, UpdateHeader) else 0


def _how(i: Input, closed_at: float) -> str:
    if i.taken_at > closed_at:
        return f"its learner captured it {_s(i.taken_at - closed_at)} after that round closed"
    if i.heard_at > closed_at:
        return f"captured {_s(closed_at - i.taken_at)} before that round closed, announced after it"
    return f"announced {_s(closed_at - i.heard_at)} before that round closed, its bytes came after it"


def _missed(late: Late, closed_at: float) -> str:
    after = late.heard_at - closed_at
    return f"{_s(after)} after it closed" if after >= 0 else f"{_s(-after)} before it closed, its bytes came too late"


def _cut(given: Input, version: int) -> str:
    """Return in words how far an update was clipped, and what the charter made of it; empty if nothing was.

    `version`: that of the commit.
    """
    by_factor = f", weight {given.factor:g} of usual: the charter's factor for {given.learner}"
    by_factor = by_factor if given.factor != 1.0 else ""
    if not given.clipped:
        return by_factor
    share = given.weight / given.factor / (given.tokens * (given.tokens / max(1, given.steps)))
    weight = f"cut to {share:.2g} of the weight" if share < FULL else "with the weight"
    length = f", and to {given.scale:.2g} of its length" if given.scale < 1.0 else ""
    notes = [f"charter: its cap for {given.learner}" if why == Clip.CHARTER else why for why in given.clipped]
    if version <= YOUNG and Clip.NORM in given.clipped:
        notes.append("the fragment has no history yet: learners' first updates are short, and set the usual length")
    if Clip.SHORT in given.clipped:
        notes.append(USUAL[Clip.SHORT])
    if Clip.PERIODS in given.clipped:
        notes.append("this is the first work, of many periods: the outer rate makes up for its length")
    return f", {weight} that it asked for{length} ({', '.join(notes)}){by_factor}"


def why_of(reason: str) -> str:
    """Return in words why updates are rejected for a named reason; empty if there are no words for it."""
    return _WHY.get(Reason(reason), "") if reason in set(Reason) else ""


def _reason(r: Rejection) -> str:
    why = why_of(r.reason)
    return f"{r.reason} ({why})" if why else r.reason


def _without_loss(r: Rejection) -> str:
    return ", without loss" if r.reason in LOSSLESS else ""


def _s(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if abs(seconds) < 1.0 else f"{seconds:.2f} s"

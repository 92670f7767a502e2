"""Fold a log again, and compare the result with everything that the commits recorded. Replay only reads."""

import asyncio
import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from isthmus.codecs import kernels
from isthmus.codecs.kernels import F32
from isthmus.errors import Denied, InputError, LogCorrupt, ObjectMissing, RecordInvalid
from isthmus.format.layout import Fragment
from isthmus.format.records import frame
from isthmus.format.records.fields import VERSION_MAX
from isthmus.format.records.frame import Kind
from isthmus.format.records.keys import commit_key
from isthmus.format.records.objects import CommitHeader, Input, SnapshotHeader
from isthmus.format.rules import STALENESS_MAX
from isthmus.inspect.losses import LossCurves
from isthmus.log import Commit, Log, fold
from isthmus.log.holes import lacking, require_whole
from isthmus.log.listing import ShareDone, all_or, earliest
from isthmus.log.manifests import Manifests, are_required, require
from isthmus.log.membership import Members
from isthmus.log.merge import Advance, State
from isthmus.log.replaced import Outdated, Replaced
from isthmus.log.run import Run
from isthmus.log.updates import Update
from isthmus.reasons import Reason
from isthmus.rounds.bounds import REMEMBERED, Influence, WeightSoFar, claim_of, first_norm


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """How far one tensor of a replayed published value is from the recorded one."""

    name: str
    elements: int
    different: int
    largest: float
    """Largest absolute difference of an element."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first version of a fragment that differs from its record, and where the two differ."""

    fragment: int
    version: int
    key: str
    detail: str
    inputs: tuple[str, ...] = ()
    """The inputs, and other facts, that differ from the commit's record, in words."""
    tensors: tuple[TensorDifference, ...] = ()
    damaged: bool = False
    """Whether an object is missing or damaged, so that nothing can be compared."""
    refused: bool = False
    """Whether an object may not be read. Then nothing is known to differ."""
    goes_on: int = 0
    """The next version that can be compared without what is damaged, from a later snapshot; 0 if there is none."""

    def lines(self) -> list[str]:
        """Return the difference in words."""
        how = "is not readable (rights)" if self.refused else "differs"
        said = [f"fragment {self.fragment}, version {self.version} {how}: {self.key}: {self.detail}"]
        said += [f"  input {line}" for line in self.inputs]
        said += [
            f"  tensor {t.name}: {t.different:,} of {t.elements:,} elements differ, by up to {t.largest:.3g}"
            for t in self.tensors
        ]
        return [*said, f"  fragment {self.fragment} is as recorded up to version {self.version - 1}"]


@dataclass(frozen=True, slots=True)
class Gap:
    """Versions that cannot be folded any more, up to the commit that heals the fragment."""

    first: int
    last: int
    key: str
    detail: str
    writers: tuple[str, ...] = ()
    """The syncers that wrote these versions. Nothing else supports what they published."""

    def line(self, fragment: int) -> str:
        """Return the gap in words."""
        by = ", ".join(self.writers) or "nobody"
        return (
            f"fragment {fragment}, versions {self.first} to {self.last} (by {by}) cannot be verified: {self.key}: "
            f"{self.detail}; healed at version {self.last + 1}"
        )


BEFORE = max(REMEMBERED, STALENESS_MAX + 1)
"""How many commits before the first compared one are read. They tell what is usual, and what was merged before."""

LEAPS, FEW = 8.0, 3
"""A version that cannot be verified may move the published value at most `LEAPS` times as far as the newest verified
versions did, if there are at least `FEW` of these."""


@dataclass(slots=True)
class Replayed:
    """The result of replaying one fragment."""

    fragment: int
    start: int
    """The versions after this one are compared."""
    earliest: int
    """The earliest version that a fold can begin with. The inputs of earlier versions were collected."""
    compared: int = 0
    difference: Difference | None = None
    unreached: int = 0
    """Number of versions after the first difference, which were not compared; 0 if the newest is not known."""
    gaps: list[Gap] = field(default_factory=list)
    """Versions before a healing commit that cannot be folded. They are no difference, but are not verified either."""
    nobodys: list[str] = field(default_factory=list)
    """Snapshots that are damaged, or that no syncer of a signed run wrote, each with the reason. They count as missing.
    """
    unproven: int = 0
    """Number of commits that record updates rejected as too long. The weights of the other updates depend on those
    updates, too."""
    untimely: list[str] = field(default_factory=list)
    """In words, the inputs of which more steps were believed than the times in the log allow."""
    unstated: list[str] = field(default_factory=list)
    """In words, the lost manifests. Whether the charter allowed the updates that name them cannot be verified."""
    outdated: list[Outdated] = field(default_factory=list)
    """Commits made under a membership after another one had replaced it. They are valid, and no difference."""


Visit = Callable[[Commit, float | None, bool], None]
"""Called with each commit that was read, how far it moved the published value (Euclidean distance; None: unknown), and
whether it was verified."""


@dataclass(slots=True)
class _Watch:
    """Compares each input with what the commit says of it, as the input is merged."""

    odd: list[str] = field(default_factory=list)

    def __call__(self, given: Input, update: Update) -> None:
        h = update.header
        facts: dict[str, tuple[float | None, float | None]] = {
            "incarnation": (given.incarnation, h.incarnation),
            "steps": (given.steps, h.steps),
            "tokens": (given.tokens, h.tokens),
            "step": (given.step, h.step),
            "tokens_seen": (given.tokens_seen, h.tokens_seen),
            "norm": (given.norm, update.gradient.norm),
            "loss": (given.loss, h.loss),
        }
        if given.manifest != h.manifest:
            stated, merged = (digest.hex()[:16] if digest else "none" for digest in (h.manifest, given.manifest))
            self.odd.append(f"{given.key}: its manifest is {stated}, the commit merged it with {merged}")
        for what, (recorded, found) in facts.items():
            if recorded != found:
                self.odd.append(f"{given.key}: its {what} is {found}, the commit merged it with {recorded}")


class _Judge:
    """Computes again what each input of a fragment counts for. It follows from the log before it (`rounds.bounds`)."""

    def __init__(self, run: Run, size: int, last: Sequence[Commit], members: Members) -> None:
        """`size`: the fragment's parameters. `last`: the newest commits before the first that is judged."""
        self._influence = Influence(run.header.bounds, run.rules)
        self._bounds = run.header.bounds
        self._size = size
        self._members = members
        self._bases: dict[str, int] = {}
        self._written_at: dict[int, float] = {}
        """When each of the newest versions was written, by its writer's clock [seconds since 1970]."""
        for commit in last:
            self.note(commit)

    def note(self, commit: Commit) -> None:
        """Take in a commit."""
        h = commit.header
        self._influence.note(h.version, h.inputs, h.usual_length)
        for given in h.inputs:
            self._bases[given.learner] = max(given.base, self._bases.get(given.learner, -1))
        self._written_at[h.version] = h.written_at
        self._written_at.pop(h.version - REMEMBERED, None)

    def untimely(self, h: CommitHeader) -> list[str]:
        """Return, in words, the inputs whose believed steps are more than there was time for.

        They must also be far more than the steps of other learners' updates.
        """
        found, step_s = list[str](), h.waited.fastest_step_s / self._bounds.slow
        for given in h.inputs:
            usual = self._influence.usual_steps(given.learner)
            if step_s <= 0.0 or not usual or given.base not in self._written_at:
                continue
            elapsed_s = max(0.0, given.fetched_at - self._written_at[given.base])
            steps = given.believed or given.steps
            if steps > max(1.0 + elapsed_s / step_s, self._bounds.slow * usual):
                found.append(
                    f"{given.key}: {steps} steps were believed; {elapsed_s:.0f} s had passed since version "
                    f"{given.base}, and others' updates are of {usual:g}"
                )
        return found

    def odd(self, h: CommitHeader, before: F32) -> list[str]:
        """Return, in words, the inputs that do not count for what the run's bounds give, or that count a second time.

        `before`: the published value [n] of the version before.
        """
        influence, found, exact = self._influence, list[str](), not _unproven(h)
        first = math.inf if influence.length else first_norm(kernels.norm(before), self._size)
        claims = [claim_of(given) for given in h.inputs]
        terms = [self._members.judging(h.members).terms(given.learner) for given in h.inputs]
        so_far = WeightSoFar()
        for number, (given, claim, agreed) in enumerate(zip(h.inputs, claims, terms, strict=True)):
            among = claims[:number] if influence.known else claims
            by = influence.judge(claim, among, already=so_far.of(given.learner, agreed), first=first, terms=agreed)
            so_far.add(given, agreed)
            counts = by.weight * agreed.factor, by.scale, tuple(map(str, by.clipped))
            if exact and counts != (given.weight, given.scale, given.clipped):
                said = _counts(given.weight, given.scale, given.clipped)
                found.append(f"{given.key} counts for {said}; by the run's bounds it is {_counts(*counts)}")
            if given.base <= (merged := self._bases.get(given.learner, -1)):
                found.append(f"{given.key}: work of {given.learner} on base {merged} was merged before")
        usual = influence.after(h.inputs) if h.healed is None else influence.length
        if exact and usual != h.usual_length:
            found.append(f"the usual length is {usual:g}, the commit says {h.usual_length:g}")
        if not exact and self._has_majority(h):
            found += self._too_long(h)
        return found

    def _has_majority(self, h: CommitHeader) -> bool:
        """Return whether learners with updates rejected as too long are less than half: they cannot move a median
        far."""
        rejected_learners = {r.learner for r in h.rejected if r.reason == Reason.TOO_LONG}
        return 2 * len(rejected_learners) < len(self._influence.learners(h.inputs) | rejected_learners)

    def _too_long(self, h: CommitHeader) -> list[str]:
        """Return, in words, the lengths that are impossible, whichever updates were rejected.

        The usual length is at most the longest one that was seen.
        """
        # With one or two learners the usual length falls slowly, and may exceed all lengths that were seen.
        longest, found = max(self._influence.longest(h.inputs), self._influence.length), list[str]()
        if h.usual_length > longest:
            found.append(f"the usual length is {longest:g} at most, the commit says {h.usual_length:g}")
        for given in h.inputs:
            most = self._bounds.norm * longest * math.sqrt(given.believed or max(1, given.steps))
            if given.scale * given.norm > most * (1.0 + 1e-9):
                found.append(f"{given.key} counts for a length of {given.scale * given.norm:g}; the most is {most:g}")
        return found


def _counts(weight: float, scale: float, clipped: Sequence[str]) -> str:
    return f"{weight:g} at {scale:g} of its length ({', '.join(clipped) or 'in full'})"


def _unproven(h: CommitHeader) -> bool:
    """Return whether the usual values depend on updates that were rejected as too long, which the log does not hold."""
    return any(rejection.reason == Reason.TOO_LONG for rejection in h.rejected)


async def replay(
    log: Log,
    *,
    fragments: Sequence[int] | None = None,
    first: int = 1,
    last: int | None = None,
    at_once: int = 2,
    progress: ShareDone = lambda _: None,
    losses: LossCurves | None = None,
    visit: Visit = lambda commit, moved, verified: None,
) -> list[Replayed]:
    """Fold versions `first` … `last` again (by default all that can be folded), and compare them with the log.

    The replay of a fragment stops at its first difference. `at_once`: fragments replayed concurrently. `losses`
    takes the losses of the compared commits. `visit` is called for each fragment in order of versions, also for commits
    in gaps, but not from the first difference on, and not for those whose inputs were collected. Raises `InputError`
    for a fragment or range that does not exist.
    """
    chosen = all_or(log, fragments)
    tops = [min(await _end(log, p), VERSION_MAX if last is None else last) for p in chosen]
    if first < 1 or (last is not None and (last < first or max(tops) < last)):
        raise InputError(f"versions {first} to {last}: the newest version is {max(tops)}, the first is 1")
    total, done = max(1, sum(max(0, top - first + 1) for top in tops)), 0
    slots = asyncio.Semaphore(at_once)

    def tick(commit: Commit, moved: float | None, verified: bool) -> None:
        nonlocal done
        visit(commit, moved, verified)
        if losses is not None and verified:
            losses.take([commit])
        done += 1
        progress(min(1.0, done / total))

    async def one(p: int, top: int) -> Replayed:
        replaced = Replaced(log.members)

        def each(commit: Commit, moved: float | None, verified: bool) -> None:
            replaced.take(commit)
            tick(commit, moved, verified)

        async with slots:
            found = await _fragment(log, p, first, top, each)
            found.outdated = replaced.found
            if found.difference is None and last is None:
                try:
                    await require_whole(log, p, top, lists=True)
                except LogCorrupt as error:
                    found.difference = Difference(p, top + 1, error.key, error.detail, damaged=True)
            if found.difference is not None and top < VERSION_MAX:
                found.unreached = max(0, top - found.difference.version)
                if found.difference.damaged:
                    later = [v + 1 for v, _ in await log.snapshots(p) if found.difference.version <= v < top]
                    found.difference = replace(found.difference, goes_on=min(later, default=0))
            return found

    return list(await asyncio.gather(*(one(p, top) for p, top in zip(chosen, tops, strict=True))))


async def _end(log: Log, p: int) -> int:
    """Return the newest version of a fragment; `VERSION_MAX` if a commit is damaged, which the fold will report."""
    try:
        newest = await log.newest(p)
    except LogCorrupt:
        return VERSION_MAX
    return newest.version if newest else 0


async def _fragment(log: Log, p: int, first: int, top: int, tick: Visit) -> Replayed:
    carry = fold.Merging(log)
    begin = await earliest(log, p)
    at = await fold.begin(log, p, carry, at_most=max(begin, first - 1), keep=BEFORE, need=1)
    size = log.run.layout.fragments[p].size
    judge = _Judge(log.run, size, at.last, log.members)
    result = Replayed(p, max(at.version, first - 1), begin)
    manifests = Manifests(log)
    snapshots, moved = defaultdict[int, list[str]](list), deque[float](maxlen=REMEMBERED)
    for version, key in await log.snapshots(p):
        snapshots[version].append(key)
    while True:
        try:
            async for commit in log.commits(p, at.version, at.digest, at.under):
                if commit.version > top:
                    break
                disallowed = await _disallowed(log, manifests, commit.header, result.unstated)
                result.difference, state = await _version(log, carry, judge, at.carried, commit, disallowed)
                if result.difference is not None:
                    return result
                moved.append(await log.runtime.offload(_way, at.carried.published, state.published))
                for key in snapshots[commit.version]:
                    await _require_snapshot(log, carry, commit, key, result)
                result.untimely += judge.untimely(commit.header)
                judge.note(commit)
                result.unproven += _unproven(commit.header)
                at = fold.At.made_by(commit, state, (*at.last, commit)[-BEFORE:])
                if commit.version >= first:
                    result.compared += 1
                    tick(commit, moved[-1], True)
                if commit.version == top:
                    break
        except LogCorrupt as error:
            healed = await _healed(log, p, carry, at, top)
            if healed is None:
                refused = error.refused
                result.difference = Difference(
                    p, at.version + 1, error.key, error.detail, damaged=not refused, refused=refused
                )
                return result
            last, most = healed.version - 1, max(moved) if len(moved) >= FEW else math.inf
            writers, result.difference = await _looked_through(log, p, at, last, most, tick)
            result.gaps.append(Gap(at.version + 1, last, error.key, error.detail, writers))
            if result.difference is not None:
                return result
            if healed.version >= first:
                result.compared += 1
                tick(healed.last[-1], None, True)
            at, judge = healed, _Judge(log.run, size, healed.last, log.members)
            continue
        except Denied as error:
            result.difference = Difference(p, at.version + 1, commit_key(p, at.version + 1), str(error), refused=True)
            return result
        if at.version < top < VERSION_MAX:
            key = commit_key(p, at.version + 1)
            result.difference = Difference(p, at.version + 1, key, lacking(at.version + 1, top), damaged=True)
        return result


async def _version(
    log: Log, carry: fold.Merging, judge: _Judge, before: State, commit: Commit, odd: Sequence[str]
) -> tuple[Difference | None, State]:
    """Fold one version; return its difference, if any, and its state. Raises `LogCorrupt` if it cannot be folded.

    `odd`: what is known, in words, to be wrong with its inputs.
    """
    h = commit.header
    watch = _Watch([*odd, *await log.runtime.offload(judge.odd, h, before.published)])
    if h.healed is not None:
        watch.odd.append(
            f"it heals what is whole: version {before.version} can be folded, and it says that {h.healed.key} "
            f"{h.healed.why}; whoever wrote it has set the fragment back to version {h.healed.source}"
        )
    advance = await carry.merged(before, commit, watch)
    return await _compare(log, before, commit, advance, watch.odd), advance.state


async def _disallowed(log: Log, manifests: Manifests, h: CommitHeader, unstated: list[str]) -> list[str]:
    """Return, in words, the inputs that the charter does not allow with their manifests. Note lost manifests."""
    judge, found = log.members.judging(h.members), list[str]()
    for given in h.inputs if are_required(judge) else ():
        try:
            manifest = None if given.manifest is None else await manifests.of(given.learner, given.manifest)
            require(judge, given.learner, given.manifest, manifest)
        except RecordInvalid as error:
            if error.reason != Reason.UNREAD_MANIFEST:
                found.append(f"{given.key}: {error.detail}")
            elif error.detail not in unstated:
                unstated.append(error.detail)
    return found


async def _require_snapshot(log: Log, carry: fold.Merging, commit: Commit, key: str, result: Replayed) -> None:
    """Raise `LogCorrupt` if a snapshot is not the state that its commit recorded.

    A snapshot that is cut or no snapshot says nothing about the commit, and is only added to `Replayed.nobodys`. So is,
    in a signed run, one that no present syncer signed: anyone who may write to the store, or has a former syncer's key,
    can have stored it since.
    """
    try:
        await carry.start(commit.header.fragment, commit.version, key, commit)
    except LogCorrupt as error:
        try:
            blob = await log.fetch(key, Kind.SNAPSHOT, commit.header.fragment)
            await log.open(blob, key, SnapshotHeader, in_force=log.members.signed)
        except (RecordInvalid, ObjectMissing):
            result.nobodys.append(f"{key}: {error.detail}")
            return
        raise


def _way(before: F32, after: F32) -> float:
    """Return how far a published value moved (Euclidean distance)."""
    return kernels.norm(after - before)


async def _looked_through(
    log: Log, p: int, at: fold.At[State], last: int, most: float, tick: Visit
) -> tuple[tuple[str, ...], Difference | None]:
    """Return the writers of a gap's versions, up to `last`, and the first version that moved much too far, if any.

    The inputs of a version in a gap are gone, so any value could have been published there, and a heal could have
    started from it. `most`: the farthest that one of the newest verified versions moved the published value.
    """
    publishing, values, writers = fold.PublishedValue(log), at.carried.published, dict[str, None]()
    try:
        async for commit in log.commits(p, at.version, at.digest, at.under):
            if commit.version > last:
                break
            writers[commit.header.writer] = None
            before, values = values, await publishing.step(values, commit)
            if (way := await log.runtime.offload(_way, before, values)) > LEAPS * most:
                found = Difference(
                    p,
                    commit.version,
                    commit_key(p, commit.version),
                    f"what {commit.header.writer} published went {way:g} far, where the versions before went {most:g} "
                    "at most, and nothing is left of what it merged",
                )
                return tuple(writers), found
            tick(commit, way, False)
    except LogCorrupt:
        pass  # the value of this version is gone, too, so no heal has started from it
    return tuple(writers), None


async def _healed(log: Log, p: int, carry: fold.Merging, at: fold.At[State], top: int) -> fold.At[State] | None:
    try:
        return await fold.beyond(log, p, carry, at, until=top, keep=BEFORE)
    except LogCorrupt:
        return None


async def _compare(log: Log, before: State, commit: Commit, found: Advance, odd: list[str]) -> Difference | None:
    h = commit.header
    key = commit_key(h.fragment, h.version)
    stored: frame.Body | None
    try:
        stored = await log.fetch(h.value_key, Kind.VALUE, h.fragment)
    except ObjectMissing:
        stored = None
    except RecordInvalid as error:
        return Difference(h.fragment, h.version, h.value_key, error.detail, damaged=True)
    held = b"" if stored is None else frame.digest(stored)
    problems = []
    if found.state_digest != h.state_digest:
        problems.append(f"the state is {found.state_digest.hex()[:16]}, recorded is {h.state_digest.hex()[:16]}")
    if found.published_digest != h.published_digest:
        problems.append(
            f"the published value is {found.published_digest.hex()[:16]}, recorded is {h.published_digest.hex()[:16]}"
        )
    stands: bytes | None = h.value_digest
    if log.members.signed:  # the value merged again here has no signature, so it is compared with the unsigned object
        stands = frame.digest(frame.unsealed(stored)) if stored is not None and held == h.value_digest else None
    if stands is not None and stands != found.value_digest:
        problems.append(f"the difference is {found.value_digest.hex()[:16]}, recorded is {stands.hex()[:16]}")
    if held != h.value_digest:
        what = "missing" if stored is None else f"{len(stored)} bytes of digest {held.hex()[:16]}"
        if not problems and not odd:
            detail = f"is {what}, published was {h.value_digest.hex()[:16]}"
            return Difference(h.fragment, h.version, h.value_key, detail, damaged=True)
        problems.append(f"its value object is {what}")
    if not problems and not odd:
        return None
    tensors: tuple[TensorDifference, ...] = ()
    if held == h.value_digest:
        # Compare the value that learners were given with the one that comes out here.
        recorded = await fold.PublishedValue(log).step(before.published, commit)
        tensors = _tensors(log.run.layout.fragments[h.fragment], recorded, found.state.published)
    problems += [] if odd else [f"all {len(h.inputs)} inputs are as it says"]
    problems += [] if tensors else ["the published value is the same or cannot be had: no tensor to name"]
    return Difference(h.fragment, h.version, key, "; ".join(problems), tuple(odd), tensors)


def _tensors(fragment: Fragment, recorded: F32, found: F32) -> tuple[TensorDifference, ...]:
    differences = []
    for t in fragment.tensors:
        a, b = recorded[t.start : t.stop], found[t.start : t.stop]
        different = int(np.count_nonzero(a.view(np.uint32) != b.view(np.uint32)))
        if different:
            largest = float(np.max(np.abs(a.astype(np.float64) - b)))
            differences.append(TensorDifference(t.name, t.size, different, largest))
    return tuple(differences)

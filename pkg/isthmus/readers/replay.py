"""Replay: the fold of a log once more, compared with everything the commits recorded. It reads and never writes."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from isthmus.errors import InputError, LogCorrupt, ObjectMissing
from isthmus.kernels import F32
from isthmus.layout import Fragment
from isthmus.log import Commit, Log, fold, merge
from isthmus.log.complete import require_whole
from isthmus.log.merge import Advance, State
from isthmus.log.select import ShareDone, all_or, earliest
from isthmus.log.updates import Update
from isthmus.records import frame
from isthmus.records.keys import commit_key
from isthmus.records.objects import Input


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
    """The first version of a fragment that did not come out as recorded, and what can be said of it."""

    fragment: int
    version: int
    key: str
    detail: str
    inputs: tuple[str, ...] = ()
    """Inputs that are not what the commit says of them."""
    tensors: tuple[TensorDifference, ...] = ()

    def lines(self) -> list[str]:
        """Return it in words."""
        said = [f"fragment {self.fragment}, version {self.version} differs: {self.key}: {self.detail}"]
        said += [f"  input {line}" for line in self.inputs]
        said += [
            f"  tensor {t.name}: {t.different:,} of {t.elements:,} elements differ, by up to {t.largest:.3g}"
            for t in self.tensors
        ]
        return [*said, f"  fragment {self.fragment} is as recorded up to version {self.version - 1}"]


@dataclass(frozen=True, slots=True)
class Gap:
    """Versions that cannot be folded any more, up to a commit that healed the fragment."""

    first: int
    last: int
    key: str
    detail: str

    def line(self, fragment: int) -> str:
        """Return it in words."""
        return (
            f"fragment {fragment}, versions {self.first} to {self.last} cannot be verified: {self.key}: {self.detail}; "
            f"healed at version {self.last + 1}"
        )


@dataclass(slots=True)
class Replayed:
    """What became of one fragment."""

    fragment: int
    start: int
    """The version the fold began with: compared are those after it."""
    earliest: int
    """The earliest version one can begin with; before it the inputs were collected."""
    compared: int = 0
    difference: Difference | None = None
    gaps: list[Gap] = field(default_factory=list)
    """Where a commit that heals says that what was before it is gone: no difference, and no proof."""


@dataclass(slots=True)
class _Watch:
    """Compares each input with what the commit says of it, while it is merged anyway."""

    odd: list[str] = field(default_factory=list)

    def __call__(self, given: Input, update: Update) -> None:
        h = update.header
        facts: dict[str, tuple[float, float]] = {
            "steps": (given.steps, h.steps),
            "tokens": (given.tokens, h.tokens),
            "step": (given.step, h.step),
        }
        # What was clipped counts as the commit says; it is never more than what it asked for.
        asked = merge.weight(h.tokens, h.steps)
        facts["weight"] = given.weight, min(given.weight, asked) if given.clipped else asked
        for what, (recorded, found) in facts.items():
            if recorded != found:
                self.odd.append(f"{given.key}: its {what} is {found}, the commit merged it with {recorded}")


async def replay(
    log: Log,
    *,
    fragments: Sequence[int] | None = None,
    first: int = 1,
    last: int | None = None,
    at_once: int = 2,
    progress: ShareDone = lambda _: None,
) -> list[Replayed]:
    """Fold versions `first` … `last` (all that can be, by default) and compare; a fragment stops where it differs.

    Raises `InputError` for a fragment or range that does not exist.
    """
    chosen = all_or(log, fragments)
    heads = [await log.newest(p) for p in chosen]
    tops = [min(commit.version if commit else 0, 1 << 62 if last is None else last) for commit in heads]
    if first < 1 or (last is not None and (last < first or max(tops) < last)):
        raise InputError(f"versions {first} to {last}: the newest version is {max(tops)}, the first is 1")
    total, done = max(1, sum(max(0, top - first + 1) for top in tops)), 0
    gate = asyncio.Semaphore(at_once)

    def tick() -> None:
        nonlocal done
        done += 1
        progress(min(1.0, done / total))

    async def one(p: int, top: int) -> Replayed:
        async with gate:
            found = await _fragment(log, p, first, top, tick)
            if found.difference is None and last is None:
                try:
                    await require_whole(log, p, top, lists=True)
                except LogCorrupt as error:
                    found.difference = Difference(p, top + 1, error.key, error.detail)
            return found

    return list(await asyncio.gather(*(one(p, top) for p, top in zip(chosen, tops, strict=True))))


async def _fragment(log: Log, p: int, first: int, top: int, tick: Callable[[], None]) -> Replayed:
    carry = fold.Merging(log)
    begin = await earliest(log, p)
    at = await fold.begin(log, p, carry, at_most=max(begin, first - 1))
    result = Replayed(p, max(at.version, first - 1), begin)
    snapshots = dict(await log.snapshots(p))
    while True:
        try:
            async for commit in log.commits(p, at.version, at.digest):
                if commit.version > top:
                    break
                result.difference, state = await _version(log, carry, at.carried, commit, snapshots.get(commit.version))
                if result.difference is not None:
                    return result
                at = fold.At(commit.version, state, commit.digest, (commit,))
                if commit.version >= first:
                    result.compared += 1
                    tick()
                if commit.version == top:
                    break
        except LogCorrupt as error:
            healed = await _healed(log, p, carry, at, top)
            if healed is None:
                result.difference = Difference(p, at.version + 1, error.key, error.detail)
                return result
            result.gaps.append(Gap(at.version + 1, healed.version - 1, error.key, error.detail))
            result.compared += healed.version >= first
            at = healed
            continue
        if at.version < top:
            key = commit_key(p, at.version + 1)
            result.difference = Difference(p, at.version + 1, key, f"is missing, and version {top} is there")
        return result


async def _version(
    log: Log, carry: fold.Merging, before: State, commit: Commit, snapshot: str | None
) -> tuple[Difference | None, State]:
    """Fold one version and compare it. Raises `LogCorrupt` where it cannot be folded."""
    watch = _Watch()
    advance = await carry.merged(before, commit, watch)
    difference = await _compare(log, before, commit, advance, watch.odd)
    if difference is None and snapshot is not None:
        # Raises where the snapshot is not the state its commit recorded.
        await carry.start(commit.header.fragment, commit.version, snapshot, commit)
    return difference, advance.state


async def _healed(log: Log, p: int, carry: fold.Merging, at: fold.At[State], top: int) -> fold.At[State] | None:
    try:
        return await fold.beyond(log, p, carry, at, until=top)
    except LogCorrupt:
        return None


async def _compare(log: Log, before: State, commit: Commit, found: Advance, odd: list[str]) -> Difference | None:
    h = commit.header
    key = commit_key(h.fragment, h.version)
    stored: frame.Body | None
    try:
        stored = await log.store.get(h.value_key)
    except ObjectMissing:
        stored = None
    held = b"" if stored is None else frame.digest(stored)
    problems = []
    if found.state_digest != h.state_digest:
        problems.append(f"the state is {found.state_digest.hex()[:16]}, recorded is {h.state_digest.hex()[:16]}")
    if found.published_digest != h.published_digest:
        problems.append(
            f"the published value is {found.published_digest.hex()[:16]}, recorded is {h.published_digest.hex()[:16]}"
        )
    stands: bytes | None = h.value_digest
    if log.members.signed:  # what is merged again here is signed by nobody
        stands = frame.digest(frame.unsealed(stored)) if stored is not None and held == h.value_digest else None
    if stands is not None and stands != found.value_digest:
        problems.append(f"the difference is {found.value_digest.hex()[:16]}, recorded is {stands.hex()[:16]}")
    if held != h.value_digest:
        what = "missing" if stored is None else f"{len(stored)} bytes of digest {held.hex()[:16]}"
        if not problems and not odd:
            return Difference(
                h.fragment, h.version, h.value_key, f"is {what}, published was {h.value_digest.hex()[:16]}"
            )
        problems.append(f"its value object is {what}")
    if not problems and not odd:
        return None
    tensors: tuple[TensorDifference, ...] = ()
    if held == h.value_digest:
        # What learners were given, next to what comes out here.
        recorded = await fold.Publishing(log).step(before.published, commit)
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

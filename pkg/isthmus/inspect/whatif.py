"""Fold a log under other rules, and compare the result with the log as it is.

Updates are taken as recorded, from their original bases, although learners would have trained otherwise. If a rule of
waiting is changed, the syncer's own state machine decides anew from the recorded times which updates are in a round.
Otherwise every round keeps its updates. Version v here corresponds to version v in the log: a round that would still
wait when the next one was opened merges the updates that it has. A learner that is left out is waited for as recorded;
a round of its updates alone merges nothing.
"""

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from typing_extensions import override

from isthmus.codecs import codec
from isthmus.codecs.kernels import F32
from isthmus.errors import InputError
from isthmus.format.records.fields import require_name
from isthmus.format.records.objects import CommitHeader, Input, Outer, Seen, Waited, work_of
from isthmus.format.rules import ABSENT_MAX, STALENESS_MAX, Bounds, MergeRule, Pace, Rules
from isthmus.inspect.own_merge import OwnMerge
from isthmus.log import Commit, Log, fold
from isthmus.log.listing import ShareDone, all_or, earliest
from isthmus.log.merge import Advance, State, by_class
from isthmus.reasons import Clip
from isthmus.rounds.events import Action, Announced, Appended, Arrived, Called, Fetch, Merge, Passed, Pointer, Tick
from isthmus.rounds.grace import Terms
from isthmus.rounds.live_learners import LiveLearners
from isthmus.rounds.rounds import Rounds

_OUTER = {
    "merge": "merge",
    "merge.embeddings": "merge",
    "trim": "trim",
    "outer.lr": "learning_rate",
    "outer.momentum": "momentum",
}
_WITHIN: dict[str, Callable[[float], bool]] = {
    "trim": lambda share: 0.0 < share < 0.5,
    "outer.lr": lambda rate: 0.0 < rate <= 10.0,
    "outer.momentum": lambda share: 0.0 <= share < 1.0,
}
_PACE = ("quorum", "grace", "overlap", "staleness")
_WITHOUT = "without"
_TAKES = {
    "merge": f"one of {', '.join(MergeRule)}",
    "merge.embeddings": f"one of {', '.join(MergeRule)}",
    "trim": "a share above 0 and below 0.5",
    "outer.lr": "a number above 0 and at most 10",
    "outer.momentum": "a number from 0 to below 1",
    "quorum": "a whole number of learners, at least 1",
    "grace": "a number from 0 to 1",
    "overlap": "a number of steps from 0 to 1024",
    "staleness": f"a whole number of versions from 0 to {STALENESS_MAX}",
}
_FIXED = {
    "codec": "updates and values are stored in it",
    "codec.up": "updates are stored in it",
    "codec.down": "learners trained from values published through it",
    "fragments": "the run is cut into them",
    "P": "the run is cut into them",
    "sync_every": "learners uploaded at it",
    "H": "learners uploaded at it",
}


INSTANT_S = 1e-6
"""Times no further apart than this count as equal [s]: they are differences of large clock readings, and as inexact."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Changed rules. Rules that are not named stay as each commit recorded them."""

    outer: dict[str, Any] = field(default_factory=dict)
    embeddings: str | None = None
    """Merge rule of embeddings alone; None: not set."""
    pace: dict[str, Any] = field(default_factory=dict)
    without: frozenset[str] = frozenset()
    """Learners whose updates are left out."""
    own: OwnMerge | None = None
    """A function that merges in place of the recorded rules; None: none."""

    async def combined(self, log: Log, state: State, header: CommitHeader, inputs: Sequence[Input]) -> Advance:
        """Return the state after merging updates in place of those of a commit.

        Raises `LogCorrupt` for a damaged update, and `InputError` if the result is not finite or the function fails.
        """
        p, accumulator = header.fragment, self.own.accumulator if self.own else None
        result = await fold.combine(
            log, state, p, inputs, self.outers(header), codec(header.codec_down), accumulator=accumulator
        )
        if not result.finite:
            raise InputError(f"under these rules fragment {p} leaves float32's range at version {header.version}")
        return result

    def left(self, inputs: Sequence[Input]) -> tuple[Input, ...]:
        """Return the updates of a round except those of learners that are left out."""
        return tuple(i for i in inputs if i.learner not in self.without)

    def outers(self, header: CommitHeader) -> dict[str, Outer]:
        """Return the arithmetic of a commit under these rules, by class of tensors. Raises `InputError`."""
        changes = dict(self.outer)
        if any(Clip.PERIODS in given.clipped for given in header.inputs):
            # The rate of a first round with the work of many periods follows from the momentum (`merge.outers`).
            recorded = header.dense
            whole = recorded.learning_rate * (1.0 + recorded.momentum)
            changes["learning_rate"] = whole / (1.0 + changes.get("momentum", recorded.momentum))
        dense = msgspec.structs.replace(header.dense, **changes)
        embedding = msgspec.structs.replace(header.embedding, **changes)
        # Iso is for matrices that map vectors to vectors. Embeddings are merged by it only if it is set for them.
        kept = self.embeddings or (header.embedding.merge if embedding.merge == MergeRule.ISO else embedding.merge)
        embedding = msgspec.structs.replace(embedding, merge=kept)
        if "trim" in self.outer and MergeRule.TRIMMED not in (dense.merge, embedding.merge):
            raise InputError(f"--set trim: these versions are merged by {dense.merge}; set merge=trimmed too")
        return by_class(_trimming(dense), _trimming(embedding))


def _trimming(outer: Outer) -> Outer:
    """Return the arithmetic with a share to trim if and only if its merge rule is `trimmed`.

    Commits under other rules record no share, so the default is used.
    """
    return msgspec.structs.replace(
        outer, trim=(outer.trim or Rules().trim) if outer.merge == MergeRule.TRIMMED else 0.0
    )


def parse(pairs: Iterable[str], own: OwnMerge | None = None) -> Settings:
    """Return the settings in `name=value` texts, and a rule of one's own.

    Raises `InputError` for names that cannot be set, and wrong values.
    """
    outer: dict[str, Any] = {}
    embeddings, pace, without = None, {}, set[str]()
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if name in _FIXED:
            raise InputError(f"--set {pair}: {name} cannot be changed afterwards: {_FIXED[name]}")
        if not equals or name not in (*_OUTER, *_PACE, _WITHOUT):
            names = ", ".join([*_OUTER, *_PACE, _WITHOUT])
            raise InputError(f"--set {pair}: write it as NAME=VALUE; names are {names}")
        if name == _WITHOUT:
            require_name(f"--set {pair}: learner name", text)
            without.add(text)
            continue
        try:
            value = _value(name, text)
        except (ValueError, InputError):
            raise InputError(f"--set {pair}: {name} takes {_TAKES[name]}, not {text!r}") from None
        if name == "merge.embeddings":
            embeddings = value
        elif name in _OUTER:
            outer[_OUTER[name]] = value
        else:
            pace[name] = value
    if own is not None and (embeddings is not None or not outer.keys().isdisjoint(("merge", "trim"))):
        raise InputError("--merge and --set merge or trim name two rules: leave one of them out")
    return Settings(outer, embeddings, pace, frozenset(without), own)


def _value(name: str, text: str) -> Any:
    """Return the value of a setting from text. Raises `ValueError` or `InputError` if the setting does not take it."""
    if name in ("merge", "merge.embeddings"):
        return MergeRule(text)
    if name in _PACE:
        number: float = int(text) if name in ("quorum", "staleness") else float(text)
        msgspec.structs.replace(Pace(), **{name: number}).check()
        return number
    share = float(text)
    if not _WITHIN[name](share):
        raise ValueError(text)
    return share


@dataclass(frozen=True, slots=True)
class Departure:
    """How far the other trajectory is from the recorded one at a version, over all fragments.

    A fragment that ended earlier counts with its last version.
    """

    version: int
    inputs_recorded: int
    inputs_other: int
    difference: float
    """‖Θ' − Θ‖ of the published values."""
    way: float
    """‖Θ − Θ_start‖: how far the recorded run has moved since the fold began."""
    cosine: float
    """Cosine between the ways of the two trajectories from the start; NaN if one of them has not moved."""

    @property
    def relative(self) -> float:
        """The difference as a share of the way; 0 if the way is 0."""
        return self.difference / self.way if self.way else 0.0


@dataclass(slots=True)
class Outcome:
    """The other trajectory, next to the recorded one."""

    rows: list[Departure]
    starts: list[int]
    heads: list[int]
    states: dict[int, State]
    """By fragment, the state in which the other trajectory ends."""


@dataclass(slots=True)
class _Sums:
    """Numbers of inputs, squared lengths and a scalar product, of one version of one fragment."""

    recorded: int
    other: int
    difference: float
    way: float
    other_way: float
    product: float


async def what_if(
    log: Log,
    settings: Settings,
    *,
    fragments: Sequence[int] | None = None,
    last: int | None = None,
    starts: Mapping[int, int] | None = None,
    at_once: int = 2,
    progress: ShareDone = lambda _: None,
) -> Outcome:
    """Fold the log under other rules. Raises `LogCorrupt` if it cannot be folded, `InputError` for a bad choice.

    A bad choice is also a learner that is left out and of which no update was merged. `starts`: by fragment, the
    version after which the other rules hold; until then all is as recorded.
    """
    chosen = all_or(log, fragments)
    newest = [await log.newest(p) for p in chosen]
    tops = [min(c.version if c else 0, 1 << 62 if last is None else last) for c in newest]
    outcome = Outcome([], [0] * len(chosen), tops, {})
    sums: dict[int, dict[int, _Sums]] = {p: {} for p in chosen}
    merged: set[str] = set()
    total, done = max(1, sum(tops) - sum((starts or {}).values())), 0
    slots = asyncio.Semaphore(at_once)

    def tick() -> None:
        nonlocal done
        done += 1
        progress(min(1.0, done / total))

    async def one(number: int, p: int) -> None:
        async with slots:
            outcome.starts[number], outcome.states[p] = await _fragment(
                log, p, (starts or {}).get(p), tops[number], settings, sums[p], merged, tick
            )

    await asyncio.gather(*(one(number, p) for number, p in enumerate(chosen)))
    if unknown := sorted(settings.without - merged):
        known = ", ".join(sorted(merged)) or "nobody"
        raise InputError(f"--set without={unknown[0]}: no update of it is merged there; merged are updates of {known}")
    newest_sums: dict[int, _Sums] = {}
    for version in sorted({v for found in sums.values() for v in found}):
        here = {p: found[version] for p, found in sums.items() if version in found}
        newest_sums |= here
        found = list(newest_sums.values())
        ways = math.sqrt(sum(s.way for s in found)) * math.sqrt(sum(s.other_way for s in found))
        outcome.rows.append(
            Departure(
                version,
                sum(s.recorded for s in here.values()),
                sum(s.other for s in here.values()),
                math.sqrt(sum(s.difference for s in found)),
                math.sqrt(sum(s.way for s in found)),
                sum(s.product for s in found) / ways if ways else math.nan,
            )
        )
    return outcome


async def _fragment(
    log: Log,
    p: int,
    start_at: int | None,
    top: int,
    settings: Settings,
    sums: dict[int, _Sums],
    merged: set[str],
    tick: Callable[[], None],
) -> tuple[int, State]:
    """Return where the fold of a fragment begins, and the state in which the other trajectory ends.

    Fills `sums`, by version, and adds the learners whose updates were merged to `merged`.
    """
    keep = max(2, log.run.pace.staleness + 1)
    if start_at is None:
        at = await fold.begin(log, p, fold.Merging(log), at_most=await earliest(log, p), keep=keep)
    else:
        at = await fold.fold(log, p, fold.Merging(log), until=start_at, keep=keep)
    commits = []
    async for commit in log.commits(p, at.version, at.digest, at.under):
        if commit.version > top:
            break
        commits.append(commit)
    members = decide(log, commits, at.last, settings.pace) if settings.pace else [c.header.inputs for c in commits]
    publishing, start, recorded, other = (
        fold.PublishedValue(log),
        at.carried.published,
        at.carried.published,
        at.carried,
    )
    for commit, taken in zip(commits, members, strict=True):
        h, inputs = commit.header, settings.left(taken)
        merged.update(i.learner for i in h.inputs)
        recorded = await publishing.step(recorded, commit)
        if h.healed is not None:
            # The other trajectory was not damaged. It loses its momentum, too, so that the two stay comparable.
            zeros = np.zeros_like(other.momentum)
            other = State(h.version, other.published, other.published.copy(), zeros)
        elif inputs:
            other = (await settings.combined(log, other, h, inputs)).state
        else:
            other = State(h.version, other.published, other.master, other.momentum)
        entry = await log.runtime.offload(_distances, start, recorded, other.published)
        sums[h.version] = _Sums(len(h.inputs), len(inputs), *entry)
        tick()
    return at.version, other


def _distances(start: F32, recorded: F32, other: F32) -> tuple[float, float, float, float]:
    way, other_way = recorded.astype(np.float64) - start, other.astype(np.float64) - start
    difference = other_way - way
    return (
        float(difference @ difference),
        float(way @ way),
        float(other_way @ other_way),
        float(way @ other_way),
    )


# --- one round alone --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OneRound:
    """One round under other rules, from the recorded state before it."""

    recorded: tuple[str, ...]
    other: tuple[str, ...]
    """The learners whose updates are merged, as recorded and under the other rules, in order of arrival."""
    closed_recorded_s: float
    closed_other_s: float
    """Seconds from opening to closing; both are the same if no rule of waiting was changed."""
    step: float
    """‖Θ_v − Θ_{v-1}‖ of the published values, as recorded."""
    other_step: float
    difference: float
    """‖Θ'_v − Θ_v‖."""
    cosine: float
    """Cosine between the two steps; NaN if one of them is 0."""


async def one_round(log: Log, fragment: int, version: int, settings: Settings) -> OneRound:
    """Merge one round anew under other rules, from the state before it. Raises `InputError`, `LogCorrupt`.

    Only updates that had arrived when the round closed can be merged: the log does not record when a later update would
    have arrived in this round. The same is true of `what_if`.
    """
    all_or(log, [fragment])
    commit = await log.commit(fragment, version) if version > 0 else None
    if commit is None:
        raise InputError(f"there is no commit {fragment}/{version} in {log.run.url}")
    h, merging = commit.header, fold.Merging(log)
    if h.healed is not None:
        raise InputError(f"version {version} of fragment {fragment} merged nothing: it heals the fragment")
    if version <= await earliest(log, fragment):
        raise InputError(f"what version {version} of fragment {fragment} merged was collected by `isthmus gc`")
    at = await fold.fold(log, fragment, merging, until=version - 1, keep=max(2, log.run.pace.staleness + 1))
    inputs, closed_at = h.inputs, h.waited.waited_s
    if settings.pace:
        ((inputs, closed_at),) = _decided(log, [commit], at.last, settings.pace)
    inputs = settings.left(inputs)
    recorded = await fold.PublishedValue(log).step(at.carried.published, commit)
    other = at.carried.published
    if inputs:
        other = (await settings.combined(log, at.carried, h, inputs)).state.published
    difference, step, other_step, product = await log.runtime.offload(_distances, at.carried.published, recorded, other)
    lengths = math.sqrt(step) * math.sqrt(other_step)
    return OneRound(
        tuple(i.learner for i in h.inputs), tuple(i.learner for i in inputs), h.waited.waited_s, closed_at,
        math.sqrt(step), math.sqrt(other_step), math.sqrt(difference), product / lengths if lengths else math.nan,
    )  # fmt: skip


# --- which updates would have been in ---------------------------------------------------------------------------------


class _Recorded(LiveLearners):
    """The live learners of a round, as its commit recorded them. Times are seconds since the round was opened."""

    def __init__(self, pace: Pace) -> None:
        super().__init__(pace, 0.0)
        self.here: set[str] = set()
        self.known = Terms()

    @override
    def expected(self, recent: Iterable[str], now: float) -> set[str]:
        return set(self.here)

    @override
    def terms(self, expected: Iterable[str], missing: Iterable[str]) -> Terms:
        return self.known


def decide(
    log: Log, commits: Sequence[Commit], before: Sequence[Commit], changed: dict[str, Any]
) -> list[tuple[Input, ...]]:
    """Return, for each commit, the updates that would have been merged under another pace, in order of arrival.

    Each round gets its recorded events, in order and at the recorded times; under the recorded pace it decides as it
    did. Only merged updates have recorded arrivals, so an update that no commit merged is in no round here either.
    Raises `InputError` for a commit that does not record the events of its round.
    """
    return [inputs for inputs, _ in _decided(log, commits, before, changed)]


def _decided(
    log: Log, commits: Sequence[Commit], before: Sequence[Commit], changed: dict[str, Any]
) -> list[tuple[tuple[Input, ...], float]]:
    """Return what `decide` does, each with the time at which its round closed [seconds since it was opened]."""
    pace = msgspec.structs.replace(log.run.pace, **changed)
    at_once = pace.grace == 0.0 < log.run.pace.grace  # rounds now end with their quorum, and none is kept open
    live = _Recorded(pace)
    # Commits do not list absent learners as expected, so the rounds here need not find out which are absent.
    rounds = Rounds(pace, log.run.rules.periods, live, Bounds(absent=ABSENT_MAX))
    rounds.restored(commits[0].version - 1 if commits else 0, [c.header for c in before])
    decided: list[tuple[tuple[Input, ...], float]] = []
    given: dict[bytes, Input] = {}
    for number, commit in enumerate(commits):
        h = commit.header
        given |= {i.digest: i for i in h.inputs}
        until = math.inf
        if number + 1 < len(commits):
            until = commits[number + 1].header.waited.opened_at - h.waited.opened_at
        merged, closed_at = ((), 0.0) if h.healed is not None else _Story(rounds, live, given, h).tell(until, at_once)
        decided.append((merged, closed_at))
        # The commit follows at once: the recorded terms already contain the time between closing and commit.
        rounds.on(Appended(msgspec.structs.replace(h, inputs=merged, rejected=(), rejected_total={})), closed_at)
    return decided


class _Story:
    """One round, decided anew from its recorded events."""

    def __init__(self, rounds: Rounds, live: _Recorded, given: dict[bytes, Input], header: CommitHeader) -> None:
        w = header.waited
        if sum(seen.what == "in" for seen in w.seen) != len(header.inputs):
            raise InputError(
                f"version {header.version} of fragment {header.fragment} does not say what its round saw (written by "
                "an earlier release, or too long to say): rules of waiting cannot be changed afterwards here"
            )
        self._rounds = rounds
        self._live = live
        self._given = given
        self._header = header
        self._now = 0.0
        self._merged: tuple[Input, ...] | None = None
        self._closed_at = 0.0
        # The syncer's loop was busy and noticed that a time had come a little late. Assume the same delay here.
        due = (w.quorum_s - w.boundary_s + w.grace_s, max(w.gives_up_s, w.hold_s), w.hold_s)
        self._lag = max((w.waited_s - at for at in due if 0.0 < at <= w.waited_s), default=0.0)
        if w.own_s:
            self._lag = w.waited_s - w.own_s  # the other times did not decide this round

    def tell(self, until: float, at_once: bool) -> tuple[tuple[Input, ...], float]:
        """Return the updates in the round when it closes, and when it closes [seconds since it was opened].

        It closes at the latest when the next round was opened, `until` seconds after this one. With `at_once` it is not
        kept open past its end, even if it was.
        """
        w = self._header.waited
        self._live.here = _expected_at_first(w)
        self._live.known = Terms(w.fastest_step_s, w.slowest_step_s, w.sync_s, w.cap_s)
        self._live.all_heard_at = w.hold_s
        actions = self._rounds.on(Called(self._header.version, w.called_by), 0.0)
        if self._rounds.round is not None:
            self._rounds.round.boundary_at, self._rounds.round.gives_up_at = -w.boundary_s, w.gives_up_s
            if w.own_s and not at_once:
                # An update that arrived at that very moment is still in the round.
                self._rounds.round.own_until, self._rounds.round.not_before = w.own_s + INSTANT_S, w.own_s
        self._do(actions)
        inputs = iter(self._header.inputs)
        for number, seen in enumerate(w.seen):
            self._wait(seen.at)
            # At an arrival or a pass, the syncer first noted which learners had come or gone, and decided after that.
            self._come_and_go(w.seen[number + 1 :], seen.at)
            match seen.what:
                case "in":
                    self._do(self._rounds.on(Announced(self._pointer(next(inputs))), self._now))
                case "pass":
                    self._do(self._rounds.on(Passed(seen.learner, self._header.version), self._now))
                case _:
                    self._come_and_go([seen], seen.at)
            self._do(self._rounds.on(Tick(), self._now))
        self._wait(until)
        if self._merged is None and self._rounds.round is not None and self._rounds.round.arrived:
            self._take()
        return self._merged or (), self._closed_at

    def _come_and_go(self, trail: Iterable[Seen], at: float) -> None:
        """Apply the leading entries of `trail` that let learners come or go at this very moment."""
        for seen in trail:
            if seen.at != at or seen.what not in ("here", "gone"):
                return
            (self._live.here.add if seen.what == "here" else self._live.here.discard)(seen.learner)

    def _pointer(self, given: Input) -> Pointer:
        return Pointer(
            learner=given.learner,
            incarnation=given.incarnation,
            **work_of(given),
            digest=given.digest,
            key=given.key,
            size=given.bytes,
            due=False,  # no update opens a round here: rounds open at their recorded times
            boundary_at=self._now,
            heard_at=self._now,
        )

    def _wait(self, until: float) -> None:
        again_s = INSTANT_S
        while self._merged is None:
            deadline = self._rounds.deadline(self._now)
            if deadline is None or deadline + self._lag >= until - INSTANT_S:
                break
            # If the deadline has passed, tick again a moment later, and double that wait each time, so that this ends.
            self._now, again_s = (deadline, INSTANT_S) if deadline > self._now else (self._now + again_s, 2 * again_s)
            self._do(self._rounds.on(Tick(), self._now))
        if math.isfinite(until):
            self._now = max(self._now, until)

    def _do(self, actions: list[Action]) -> None:
        while actions:
            action = actions.pop(0)
            if isinstance(action, Fetch) and self._rounds.take_fetched(action.pointer):
                actions += self._rounds.on(Arrived(action.pointer), self._now)
            elif isinstance(action, Merge):
                self._take()

    def _take(self) -> None:
        assert self._rounds.round is not None, "merging without a round"
        self._merged = tuple(self._given[p.digest] for p in self._rounds.round.arrived.values())
        self._closed_at = self._now


def _expected_at_first(w: Waited) -> set[str]:
    """Return the learners expected when a round was opened: those expected at its end, with the changes undone."""
    expected = set(w.expected)
    for seen in reversed(w.seen):
        if seen.what == "here":
            expected.discard(seen.learner)
        elif seen.what == "gone":
            expected.add(seen.learner)
    return expected

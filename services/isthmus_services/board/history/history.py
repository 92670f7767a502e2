"""A summary of a run's log: a row for each commit, sums in time buckets for each learner, and how far it was read.

The log is read once, in the way that every fold reads it, and the summary can be kept in a file. Commits in the log
never change, so the summary stays true and only new commits are read. Nothing is decided by the summary. The pages of a
run are drawn from it (`time_views`); details of a commit are read from the commit (`commit_views`).
"""

import asyncio
import itertools
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from isthmus.errors import Denied, LogCorrupt, ObjectMissing, RecordInvalid
from isthmus.format.records.keys import claim_key
from isthmus.format.records.objects import CommitHeader, Input
from isthmus.inspect.losses import Point
from isthmus.log import Commit, Log
from isthmus.log.claims import claim_at
from isthmus.log.figures import Reached, attendance, places, trained_again, updates_rejected
from isthmus.log.holes import Holes
from isthmus.log.run import Run
from isthmus.reasons import LOSSLESS, REMEDIES
from isthmus_services.board.history.rows import HEALED, QUORUM_MISSED, Rows
from isthmus_services.board.history.time_buckets import Kept, TimeBuckets

FORMAT = 14
"""Format version of the file. A file of another format is not used, and the log is read again."""

INCARNATIONS_MAX = 20_000
BEFORE_S = 60.0
"""How long before the first commit the time buckets begin, if the run's creation time is later [seconds]."""

NAMES_MAX = 60_000
"""Largest number of writers, and of reasons for closing, that are told apart."""

TOGETHER_MAX = 256
"""Commits between two reports of progress. Other tasks get a turn then, even if the store answers at once."""

AT_ONCE = 16
"""Number of fragments whose logs are read at the same time."""

LEARNER = (
    "expected", "there", "merged", "fresh", "missing", "passed", "late", "rejected", "repeated", "faults", "clipped",
    "tokens", "steps", "bytes", "train_s", "upload_s", "fetch_s", "wait_s", "weight", "gone", "loss_sum", "loss_steps",
)  # fmt: skip
"""The fields that are summed for each learner.

`tokens` and `steps` are multiplied by the fragment's share of the parameters, so over all fragments they add up to the
learner's own counts. The times are those of merged updates [seconds]: `train_s` in training, `upload_s` from then until
the syncer heard of the update, `fetch_s` until the update was accumulated, `wait_s` until the round closed. `weight` is
in shares of a round's weight. `there` counts the rounds that expected the learner and merged it. `gone` counts how
often a round stopped expecting the learner. `loss_sum` is the sum of the losses that merged updates state, each
multiplied by the update's steps; `loss_steps` counts these steps.
"""

REACHED = (*Reached._fields, "taken_at")
"""Fields of a learner's newest merged update (see `Reached`), and when it was taken."""

BEAT = (
    "incarnation", "step", "target", "tokens", "loss", "step_s", "upload_s", "sync_s", "bytes_up", "bytes_down",
    "checkpoint_bytes", "processed", "merged", "overwritten", "late", "pending", "rejected", "lost", "left",
    "base_up", "base_down", "base_checkpoints",
)  # fmt: skip
"""The fields of a learner's last heartbeat while a board listened, and whether the learner has left.

`left` is 1 if the learner has left, 2 if it left with all its steps done, else 0. `bytes_up` (without checkpoints),
`bytes_down` and `checkpoint_bytes` count all incarnations that were heard. `base_up`, `base_down` and
`base_checkpoints` are the parts of earlier incarnations in them.
"""


_FIELD = {name: place for place, name in enumerate(LEARNER)}
_OF_INPUT = np.array([
    _FIELD[name] for name in (
        "merged", "fresh", "clipped", "tokens", "steps", "bytes", "train_s", "upload_s", "fetch_s", "wait_s", "weight",
        "loss_sum", "loss_steps",
    )
])  # fmt: skip


@dataclass(slots=True)
class Incarnation:
    """One incarnation of a learner, as the log shows it. Times are seconds since 1970."""

    began: float
    """When training began for the first of its merged updates."""
    step: int
    """The learner's own step at `began`."""
    last: float
    """When the last of its merged updates was taken."""
    tokens: tuple[int, int]
    """The learner's own counts of tokens at `began` and `last`."""
    again: int | None = None
    """Tokens trained again before it, as its claim states (see `trained_again`); None: the claim was not read."""


@dataclass(slots=True)
class _End:
    """How far the log of a fragment was read."""

    version: int = 0
    digest: bytes = b""
    rejected: int = 0
    repeated: int = 0
    faults: int = 0
    skipped: int = 0
    """Versions up to `version` that were passed over: accepted holes."""
    broken: str = ""
    """Why the log cannot be read further; empty if it can."""


class _Meta(msgspec.Struct, forbid_unknown_fields=True):
    format: int
    run: bytes
    learners: list[str]
    writers: list[tuple[str, float]]
    closings: list[str]
    reasons: list[str]
    ends: list[tuple[int, bytes, int, int, int, int]]
    incarnations: list[tuple[int, int, float, int, float, tuple[int, int], int | None]]
    """The learner's number, the incarnation, and the fields of an `Incarnation`."""


@dataclass(slots=True)
class Names:
    """Names, numbered in the order in which they were first seen."""

    known: list[str] = field(default_factory=list)
    _numbers: dict[str, int] = field(default_factory=dict)

    def number(self, name: str, most: int | None = None) -> int:
        """Return a name's number. A new name gets the next one, or the last one if there are `most` names already."""
        found = self._numbers.get(name)
        if found is None and most is not None and len(self.known) >= most:
            return most - 1
        if found is None:
            found = self._numbers[name] = len(self.known)
            self.known.append(name)
        return found

    def find(self, name: str) -> int | None:
        """Return a name's number, or None."""
        return self._numbers.get(name)

    def restored(self, names: list[str]) -> None:
        """Replace all names with these, numbered in their order."""
        self.known, self._numbers = list(names), {name: n for n, name in enumerate(names)}


class RunHistory:
    """The summary of a run's log as far as it was read, and the heartbeats that were heard meanwhile."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.learners, self.writers, self.closings, self.reasons = Names(), Names(), Names(), Names()
        began = run.header.created_at
        self.by_learner = TimeBuckets(began, LEARNER, Kept.SUM)
        self.by_reason = TimeBuckets(began, ("times",), Kept.SUM)
        self.reached = TimeBuckets(began, REACHED, Kept.NEWEST)
        self.losses = TimeBuckets(began, Point._fields, Kept.NEWEST)
        """By learner, its newest merged loss (see `isthmus.inspect.losses`)."""
        self.beats = TimeBuckets(began, BEAT, Kept.LAST)
        sizes = np.array([f.size for f in run.layout.fragments], np.float64)
        self.shares = sizes / sizes.sum()
        """Each fragment's share of all parameters [P]."""
        self.incarnations: dict[tuple[int, int], Incarnation] = {}
        """By learner's number and incarnation; at most `INCARNATIONS_MAX`."""
        self._unclaimed: set[tuple[int, int]] = set()
        """Those of `incarnations` whose claims are still to be read."""
        self.ends = [_End(digest=run.digest) for _ in run.layout.fragments]
        self.heads: list[int] | None = None
        """The newest version of each fragment in the log [P], or None if not known: how much there is to read."""
        self.rows = Rows()
        self.first_written: list[float] = []
        """By writer's number, when its first commit was written [seconds since 1970]."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def read(self) -> float:
        """Share of the log that was read; 1 if the length of the log is not known."""
        if not self.heads:
            return 1.0
        return sum(end.version for end in self.ends) / max(1, sum(self.heads))

    @property
    def broken(self) -> dict[int, str]:
        """The fragments that cannot be read further, and why."""
        return {p: end.broken for p, end in enumerate(self.ends) if end.broken}

    def learner(self, name: str) -> int:
        """Return a learner's number. A new learner gets one, and room in the time buckets."""
        found = self.learners.find(name)
        if found is None:
            found = self.learners.number(name)
            for moments in (self.by_learner, self.reached, self.losses, self.beats):
                moments.room(found + 1)
        return found

    # --- reading ------------------------------------------------------------------------------------------------------

    def take(self, commit: Commit, skipped: int = 0) -> None:
        """Record the next commit of a fragment. `skipped`: versions before it that are passed over."""
        h, end = commit.header, self.ends[commit.header.fragment]
        if not len(self.rows):
            self._begin(h)
        assert h.version == end.version + 1 + skipped, f"commit {h.fragment}/{h.version} after version {end.version}"
        self._row(h, end)
        self._learners(h)
        end.version, end.digest, end.skipped = h.version, commit.digest, end.skipped + skipped

    def _begin(self, h: CommitHeader) -> None:
        """Let the time buckets begin before the first commit, if the clock of the run's creator was ahead."""
        if h.written_at > self.run.header.created_at:
            return
        began = h.written_at - BEFORE_S
        for _, moments in self._moments():
            if not moments.touched:
                moments.began = began

    def _row(self, h: CommitHeader, end: _End) -> None:
        w = h.waited
        rejected = updates_rejected(h.rejected_total)
        repeated = sum(h.rejected_total.values()) - rejected
        faults = sum(h.rejected_total.get(reason, 0) for reason in REMEDIES)
        writer = self.writers.number(h.writer, NAMES_MAX)
        if writer == len(self.first_written):
            self.first_written.append(h.written_at)
        self.first_written[writer] = min(self.first_written[writer], h.written_at)
        there, count = places(h)
        self.rows.append((
            h.written_at, h.fragment, h.version, writer, self.closings.number(w.closed_by, NAMES_MAX),
            QUORUM_MISSED * w.quorum_missed | HEALED * (h.healed is not None),
            len(h.inputs), sum(i.base == h.version - 1 for i in h.inputs), len(w.expected), len(w.missing),
            there / max(1, count), count > 0, len(h.late),
            max(0, rejected - end.rejected), max(0, repeated - end.repeated), max(0, faults - end.faults),
            sum(i.tokens for i in h.inputs) * float(self.shares[h.fragment]), sum(i.bytes for i in h.inputs),
            w.grace_s, w.waited_s, w.merge_s, w.publish_s, h.written_at - w.closed_at,
            h.period or float(self.run.rules.sync_every),
        ))  # fmt: skip
        end.rejected, end.repeated, end.faults = rejected, repeated, faults

    def _learners(self, h: CommitHeader) -> None:
        w, attended = h.waited, attendance(h)
        if h.inputs:
            self._merged(h)
        counted: dict[str, list[int]] = {
            "expected": [self.learner(name) for name in attended],
            "there": [self.learner(name) for name, there in attended.items() if there],
            "missing": [self.learner(name) for name in w.missing],
            "passed": [self.learner(passing.learner) for passing in w.passed],
            "late": [self.learner(late.learner) for late in h.late],
            "gone": [self.learner(seen.learner) for seen in w.seen if seen.what == "gone"],
            "rejected": [],
            "repeated": [],
            "faults": [],
        }
        times: Counter[int] = Counter()
        for r in h.rejected:
            counted["repeated" if r.reason in LOSSLESS else "rejected"] += [self.learner(r.learner)] * r.count
            counted["faults"] += [self.learner(r.learner)] * r.count if r.reason in REMEDIES else []
            times[self.reasons.number(r.reason)] += r.count
        if times:
            self.by_reason.room(max(times) + 1)
            self.by_reason.add(h.written_at, list(times), np.array([[float(n)] for n in times.values()]))
        sums = self.by_learner.at(h.written_at)
        for name, who in counted.items():
            if who:
                np.add.at(sums[:, _FIELD[name]], who, 1.0)

    def _merged(self, h: CommitHeader) -> None:
        """Record the updates that a commit has merged."""
        share, closed_at = float(self.shares[h.fragment]), h.waited.closed_at
        total = sum(i.weight for i in h.inputs) or 1.0
        who = [self.learner(i.learner) for i in h.inputs]
        what = [
            (
                1, i.base == h.version - 1, bool(i.clipped), i.tokens * share, i.steps * share, i.bytes, i.train_s,
                max(0.0, i.heard_at - i.taken_at), max(0.0, i.arrived_at - i.heard_at),
                max(0.0, closed_at - i.arrived_at), i.weight / total,
                0.0 if i.loss is None else i.loss * i.steps, 0 if i.loss is None else i.steps,
            )
            for i in h.inputs
        ]  # fmt: skip
        sums = self.by_learner.at(h.written_at)
        np.add.at(sums, (np.asarray(who)[:, None], _OF_INPUT), np.array(what, np.float64))
        for number, i in zip(who, h.inputs, strict=True):
            self._lived(number, i)
        counts = [(*Reached.of(i), i.taken_at) for i in h.inputs]
        self.reached.add(h.written_at, who, np.array(counts, np.float64))
        if stated := [(n, Point(i.taken_at, i.loss)) for n, i in zip(who, h.inputs, strict=True) if i.loss is not None]:
            self.losses.add(h.written_at, [n for n, _ in stated], np.array([point for _, point in stated], np.float64))

    def _lived(self, learner: int, given: Input) -> None:
        one = self.incarnations.get((learner, given.incarnation))
        began, step = given.taken_at - given.train_s, given.step - given.steps
        tokens = given.tokens_seen - given.tokens, given.tokens_seen
        if one is not None:
            one.began, one.step = min(one.began, began), min(one.step, step)
            one.last = max(one.last, given.taken_at)
            one.tokens = min(one.tokens[0], tokens[0]), max(one.tokens[1], tokens[1])
        elif len(self.incarnations) < INCARNATIONS_MAX:
            self.incarnations[learner, given.incarnation] = Incarnation(began, step, given.taken_at, tokens)
            self._unclaimed |= {(learner, given.incarnation)} if given.incarnation > 1 else set()

    def trained_again(self) -> dict[int, dict[int, int]]:
        """Return by learner's number and incarnation the tokens that were trained again before it."""
        spans, claimed = defaultdict[int, dict[int, tuple[int, int]]](dict), defaultdict[int, dict[int, int]](dict)
        for (learner, incarnation), one in self.incarnations.items():
            spans[learner][incarnation] = one.tokens
            if one.again is not None:
                claimed[learner][incarnation] = one.again
        return {learner: trained_again(of, claimed[learner]) for learner, of in spans.items()}

    async def follow(
        self,
        log: Log,
        fragments: Iterable[int] | None = None,
        progress: Callable[[], None] = lambda: None,
        accepted: Holes | None = None,
    ) -> int:
        """Read the new commits of these fragments, or of all; return how many there were.

        A fragment that cannot be read further stays where it is, and `broken` says why. The other fragments are still
        read. `accepted`: versions that are passed over if they cannot be read and the next one can. Raises what the
        store raises.
        """
        slots = asyncio.Semaphore(AT_ONCE)
        before = len(self)

        async def one(p: int) -> None:
            end, more = self.ends[p], True
            async with slots:
                while more:
                    try:
                        async for commit in log.commits(p, end.version, end.digest):
                            self.take(commit)
                            if len(self) % TOGETHER_MAX == 0:
                                progress()
                                await asyncio.sleep(0)
                        end.broken = ""
                    except LogCorrupt as error:
                        end.broken = f"{error.key}: {error.detail}"
                    more = await self._passes(log, p, (accepted or {}).get(p, ()))

        await asyncio.gather(*(one(p) for p in (range(len(self.ends)) if fragments is None else set(fragments))))
        await asyncio.gather(*(self._claim(log, slots, *which) for which in sorted(self._unclaimed)))
        return len(self) - before

    async def _claim(self, log: Log, slots: asyncio.Semaphore, learner: int, incarnation: int) -> None:
        """Read what an incarnation's claim states. A claim that cannot be read is not looked for again."""
        async with slots:
            try:
                claim = await claim_at(log, claim_key(self.learners.known[learner], incarnation))
                self.incarnations[learner, incarnation].again = claim.tokens_lost
            except (Denied, LogCorrupt, ObjectMissing, RecordInvalid):
                pass
        self._unclaimed.discard((learner, incarnation))

    async def _passes(self, log: Log, p: int, accepted: Collection[int]) -> bool:
        """Record the commit after the accepted hole at which reading a fragment ended; return whether there is one."""
        end = self.ends[p]
        if (following := first_beyond(end.version, accepted)) == end.version + 1:
            return False
        end.broken = ""
        try:
            found = await log.commit(p, following)
        except LogCorrupt as error:
            end.broken = f"{error.key}: {error.detail}"
            return False
        if found is not None:
            self.take(found, following - 1 - end.version)
        return found is not None

    async def belongs(self, log: Log) -> bool:
        """Return whether the summary is of this log: the last commit read of each fragment must be in the log."""

        async def one(p: int, end: _End) -> bool:
            if not end.version:
                return True
            try:
                commit = await log.commit(p, end.version)
            except LogCorrupt:
                return False
            return commit is not None and commit.digest == end.digest

        return all(await asyncio.gather(*(one(p, end) for p, end in enumerate(self.ends))))

    async def replaced(self, log: Log) -> list[int]:
        """Return the fragments that cannot be read further because the last commit read of them is another one now."""

        async def one(p: int, end: _End) -> bool:
            try:
                commit = await log.commit(p, end.version) if end.broken and end.version else None
            except LogCorrupt:
                return False
            return commit is not None and commit.digest != end.digest

        found = await asyncio.gather(*(one(p, end) for p, end in enumerate(self.ends)))
        return [p for p, other in enumerate(found) if other]

    def again(self) -> "RunHistory":
        """Return a summary that has read nothing of the log yet, with the learners and their heartbeats."""
        made = RunHistory(self.run)
        for name in self.learners.known:
            made.learner(name)
        made.beats = self.beats
        return made

    # --- on disk ------------------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write the summary to a file, whole or not at all. Raises `OSError`."""
        write(path, self.arrays())

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return a copy of the summary for `write`, which may run on another thread while more is read."""
        writers = list(zip(self.writers.known, self.first_written, strict=True))
        meta = _Meta(
            FORMAT, self.run.digest, self.learners.known, writers, self.closings.known, self.reasons.known,
            [(e.version, e.digest, e.rejected, e.repeated, e.faults, e.skipped) for e in self.ends],
            [(*key, x.began, x.step, x.last, x.tokens, x.again) for key, x in self.incarnations.items()],
        )  # fmt: skip
        arrays: dict[str, NDArray[Any]] = {
            "meta": np.frombuffer(msgspec.msgpack.encode(meta), np.uint8),
            **{name: column.copy() for name, column in self.rows.arrays().items()},
        }
        for name, moments in self._moments():
            arrays |= {kept: values.copy() for kept, values in moments.arrays(name).items()}
        return arrays

    @classmethod
    def load(cls, run: Run, path: Path) -> "RunHistory | None":
        """Return the summary of this run that a file holds; None if the file cannot be used."""
        made = cls(run)
        try:
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as found:
                arrays = {name: found[name] for name in found.files}
            meta = msgspec.msgpack.decode(arrays["meta"].tobytes(), type=_Meta)
            if meta.format != FORMAT or meta.run != run.digest or len(meta.ends) != len(made.ends):
                return None
            made.rows.restored(arrays)
            if len(made) != sum(version - skipped for version, *_, skipped in meta.ends):
                return None
            for name, moments in made._moments():
                moments.restored(name, arrays)
            for names, known in (
                (made.learners, meta.learners), (made.writers, [name for name, _ in meta.writers]),
                (made.closings, meta.closings), (made.reasons, meta.reasons),
            ):  # fmt: skip
                names.restored(known)
            if min(m.things for m in (made.by_learner, made.reached, made.losses, made.beats)) < len(meta.learners):
                return None
        except Exception:  # zip, NumPy and MessagePack raise many different errors for a damaged file
            return None
        made.first_written = [at for _, at in meta.writers]
        made.ends = [_End(*end) for end in meta.ends]
        made.incarnations = {(one[0], one[1]): Incarnation(*one[2:]) for one in meta.incarnations}
        made._unclaimed = {key for key, x in made.incarnations.items() if key[1] > 1 and x.again is None}
        return made

    def _moments(self) -> Iterator[tuple[str, TimeBuckets]]:
        yield "learners", self.by_learner
        yield "reasons", self.by_reason
        yield "reached", self.reached
        yield "losses", self.losses
        yield "beats", self.beats


def first_beyond(version: int, accepted: Collection[int]) -> int:
    """Return the first version after another one that is not accepted as lost."""
    return next(following for following in itertools.count(version + 1) if following not in accepted)


def write(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    """Write the result of `RunHistory.arrays` to a file, whole or not at all. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        with open(scratch, "wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)

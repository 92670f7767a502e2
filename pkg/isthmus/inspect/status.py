"""Read the state of a run from its store and bus alone, at any time and from anywhere, for `isthmus status`."""

import asyncio
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple, TypedDict

from isthmus.bus import Bus, default_bus
from isthmus.bus.base import Refusing
from isthmus.bus.endpoints import Listener
from isthmus.errors import Denied, LogCorrupt, ObjectMissing, RecordInvalid, Unavailable
from isthmus.format.records.keys import LEARNERS, MEMBERS, incarnation_in, learner_in
from isthmus.format.records.messages import Tally
from isthmus.format.records.objects import CheckpointHeader, FragmentPoint
from isthmus.format.rules import Pace
from isthmus.inspect.bursts import Burst, Bursts
from isthmus.inspect.bus_view import BusView, LearnerView, Outdated
from isthmus.inspect.losses import Point, sampled
from isthmus.inspect.restarts import Restarts, in_vain
from isthmus.log import Commit, Log
from isthmus.log.bus_messages import may_speak, streams_of
from isthmus.log.expulsions import expulsions
from isthmus.log.figures import LogSums, ledger
from isthmus.log.heal import lost_after, newest_starts
from isthmus.log.holes import Holes
from isthmus.log.log_health import LOOKS_AT_ONCE, look, room_left
from isthmus.runtime.clock import Runtime
from isthmus.runtime.disk import Room
from isthmus.store import Entry, checked

OLDER = 128
"""Commits that each look at the log reads of those older than the newest ones, at random: all of them, if they are
fewer."""

SUMMED = 2048
"""Commits over which the figures of a run are summed: its newest ones, as many of each fragment."""

JOINING_S = 60.0
"""A learner whose claim is younger than this [s] may still be on its way into the run."""

AT_WORK_S = 600.0
"""A learner that has stored nothing for this long [s] may have ended."""

OTHERS_S = 60.0
"""Processes of another run are taken to be alive if they wrote to the bus within so many seconds."""

STORING_S = 90.0
"""A learner that has stored a checkpoint within so many seconds is at work: it stores one a minute, unless it is told
otherwise or its link is slow."""


@dataclass(frozen=True)
class Status:
    """The state of a run at one moment."""

    hearing: BusView
    heads: list[Commit | None]
    """The newest commit of each fragment; None at version 0."""
    bus_error: str
    """Why the bus could not be read, or empty."""
    live_since: float
    """Learners and syncers that were last heard before this time, on the reader's clock, are silent."""
    at: float
    """When the state was read, in seconds since 1970."""
    wrong: Mapping[int, str] = field(default_factory=dict)
    """By fragment, the object of the log that is missing or damaged, and how, as far as this was checked."""
    standing: Sequence[int] = ()
    """Fragments that stand still while others are merged."""
    uncollected: int = 0
    """Versions of the first fragment, if they are many and nothing was ever collected; else 0."""
    period: float = 0.0
    """The longest period of a fragment now [steps]; 0: not known."""
    losses: Mapping[str, Sequence[Point]] = field(default_factory=dict)
    """By learner, the losses of its merged updates over the life of the run, sampled from the log."""
    sums: LogSums | None = None
    """Figures of the run, summed over the newest commits: all, if they are few; None: the log was not read for it."""
    recent: Sequence[Commit] = ()
    """The newest commits of all fragments, several of each, those of `heads` included."""
    restarts: Mapping[str, Restarts] = field(default_factory=dict)
    """By live learner that was started again and again since its last checkpoint: how often."""
    unheard: Collection[str] = ()
    """Learners that have lately stored something, joined a while ago, and were never heard on this bus."""
    anew: Mapping[str, int] = field(default_factory=dict)
    """The same of learners that were heard in an earlier incarnation: the newest one that the store has."""
    storing: Collection[str] = ()
    """Learners that have stored a checkpoint within `STORING_S`."""
    joining: Mapping[str, int] = field(default_factory=dict)
    """By learner that joined within the last minute, its incarnation: it may still load its model."""
    ahead: Mapping[int, tuple[int, Sequence[str]]] = field(default_factory=dict)
    """By fragment of which live learners have a version that its log lacks: the newest of these, and the learners."""
    membership: str = ""
    """Which version of the membership is missing or damaged in the store, and what to do; empty if none is."""
    room: Room | None = None
    """The bytes that are free on the disk of a run in a folder, if it is full; else None."""
    bus_refusing: Refusing | None = None
    """Why the bus takes no messages, if no process is heard; None if it takes them, or does not say."""
    intruders: Sequence[str] = ()
    """Digests of other runs whose processes speak on a bus in this run's folder."""
    accepted: Holes = field(default_factory=dict)
    """Holes that are accepted. What syncers report of their fragments is not repeated: `wrong` has all others."""
    pace: Pace = field(default_factory=Pace)
    """The pace of processes that are started without another one."""
    bursts: Sequence[Burst] = ()
    """Learners that diverged for a moment and train as before, in the commits that were summed or heard of."""

    @property
    def members_lost(self) -> bool:
        """Whether a version of the membership cannot be read, so that it is not known who is a member."""
        return bool(self.membership) or any(why.startswith(MEMBERS) for why in self.wrong.values())

    @cached_property
    def expelled(self) -> Mapping[str, int]:
        """Learners that the owners have expelled, each with the version of the membership that did."""
        members = self.hearing.members
        if self.members_lost:
            return {}
        known = {*self.hearing.learners, *self._merged}
        return {one.learner: one.version for one in expulsions(members, known)} if members is not None else {}

    @property
    def taking_part(self) -> list[LearnerView]:
        """The learners that were heard, but for those that are expelled."""
        return [view for name, view in self.hearing.learners.items() if name not in self.expelled]

    @cached_property
    def unheard_merged(self) -> list[str]:
        """Learners in the log of which no message is kept on the bus, so that no sum over messages has them."""
        return sorted(self._merged - self.hearing.learners.keys())

    @property
    def views(self) -> list[LearnerView]:
        """All learners by name: those that were heard, and empty views of those that are only in the log."""
        views = [*self.hearing.learners.values(), *map(LearnerView, self.unheard_merged)]
        return sorted(views, key=lambda view: view.name)

    @property
    def _merged(self) -> set[str]:
        """The learners in the log, as far as it was read."""
        merged = self.sums.learners if self.sums else set[str]()
        return {*self.losses, *merged, *(i.learner for commit in self.recent for i in commit.header.inputs)}

    @property
    def elsewhere(self) -> set[str]:
        """Learners that are at work by what they store, and whose present incarnation was not heard on this bus."""
        return {*self.unheard, *self._not_heard(self.anew)} - self.forgotten

    @property
    def forgotten(self) -> set[str]:
        """Learners of which this bus has no message, though syncers that were heard on it have merged them lately: it
        was emptied since."""
        commits = [c for c in self.recent if c.header.writer in self.hearing.syncers]
        return {i.learner for c in commits for i in c.header.inputs}.intersection(self.unheard)

    @property
    def not_yet(self) -> set[str]:
        """Learners that joined within the last minute and are not heard yet."""
        return self._not_heard(self.joining)

    def _not_heard(self, found: Mapping[str, int]) -> set[str]:
        heard = self.hearing.learners
        return {name for name, life in found.items() if name not in heard or heard[name].incarnation < life}

    @property
    def outdated(self) -> Mapping[str, Outdated]:
        """The learners that speak, or spoke last, with a key that was replaced."""
        return {
            name: found
            for name, found in self.hearing.outdated.items()
            if (found.at is not None and found.at >= self.live_since) or name not in self.live
        }

    @property
    def live(self) -> set[str]:
        """The live learners: those heard lately that have not left, and are not expelled."""
        return self.hearing.live(self.live_since) - self.expelled.keys()

    @property
    def syncers_live(self) -> set[str]:
        """The syncers that were heard lately."""
        return {name for name, at in self.hearing.syncers_heard.items() if at >= self.live_since}

    def waited_for(self, fragment: int) -> set[str]:
        """Return the live learners that the open round of a fragment waits for; empty if no round is open."""
        return self.hearing.waited_for(fragment, self.live)

    @property
    def rejections(self) -> dict[str, int]:
        """Rejections of updates, by reason, over the whole log."""
        total: Counter[str] = Counter()
        for commit in self.heads:
            if commit is not None:
                total.update(commit.header.rejected_total)
        return dict(total)

    @property
    def messages_rejected(self) -> dict[str, int]:
        """Messages that the syncers have rejected since they started, by reason."""
        total: Counter[str] = Counter()
        for alive in self.hearing.syncers.values():
            total.update(alive.rejected)
        return dict(total)

    @property
    def turned_away(self) -> dict[str, str]:
        """Learners whose updates live syncers reject for their manifest, and the reason."""
        alive = [self.hearing.syncers[name] for name in sorted(self.syncers_live)]
        return {learner: reason for a in alive for learner, reason in a.turned_away.items()}

    def refused(self, p: int) -> dict[str, str]:
        """Learners whose answer to the open round of a fragment is rejected for good, and the reason."""
        open_round = self.hearing.rounds.get(p)
        alive = [self.hearing.syncers[name] for name in sorted(self.syncers_live)]
        found = [one for a in alive for one in a.unlisted if one.fragment == p]
        return {one.learner: one.reason for one in found if open_round and one.base == open_round.version - 1}

    @property
    def clipped(self) -> dict[str, int]:
        """Updates that were clipped, by reason, over the whole log."""
        total: Counter[str] = Counter()
        for commit in self.heads:
            if commit is not None:
                total.update(commit.header.clipped_total)
        return dict(total)

    @property
    def commits(self) -> int:
        """Commits of all fragments."""
        return sum(commit.version for commit in self.heads if commit is not None)

    @property
    def ledger(self) -> Tally:
        """Where the tokens went that all learners have processed, by the newest heartbeat of each."""
        return ledger(view.heartbeat.ledger for view in self.hearing.learners.values() if view.heartbeat is not None)

    @property
    def ledger_before(self) -> Tally:
        """The ledger as of the oldest heartbeat of each learner that was heard: what is not in it is of lately."""
        return ledger(view.oldest.ledger for view in self.hearing.learners.values() if view.oldest is not None)

    @property
    def updates_clipped(self) -> int | None:
        """Updates that were clipped, over the whole log; None if that is not known."""
        return self.sums.clipped if self.sums is not None and self.sums.commits == self.commits else None

    def why_behind(self, view: LearnerView) -> str:
        """Return why a learner is behind or silent, or an empty string."""
        if view.name in self.expelled:
            return f"expelled by membership {self.expelled[view.name]}"
        if view.name not in self.hearing.learners:
            return "in the log, not heard here"
        if view.left is not None:
            return "done" if view.left.done else "left"
        if (view.heard_at is None or view.heard_at < self.live_since) and not self.bus_error:
            return "silent"
        beat = view.heartbeat
        if beat is None:
            return "no heartbeat yet"
        if beat.waiting_for:
            return f"waiting for {beat.waiting_for}"
        lag = max((self.version(p) - v for p, v in enumerate(beat.versions)), default=0)
        return f"{lag} versions behind, fetching" if lag > 1 else ""

    def version(self, fragment: int) -> int:
        """Return the newest version of a fragment in the log."""
        commit = self.heads[fragment] if fragment < len(self.heads) else None
        return commit.version if commit else 0

    def as_json(self) -> dict[str, object]:
        """Return everything as plain data."""
        return {
            "fragments": [
                {
                    "fragment": p,
                    "version": c.version if c else 0,
                    "inputs": [i.learner for i in c.header.inputs] if c else [],
                    "missing": list(c.header.waited.missing) if c else [],
                    "closed_by": c.header.waited.closed_by if c else "",
                    "healed": c is not None and c.header.healed is not None,
                    "quorum_s": c.header.waited.quorum_s if c else 0.0,
                    "grace_s": c.header.waited.grace_s if c else 0.0,
                    "period": c.header.period if c else 0.0,
                    "written_at": c.header.written_at if c else 0.0,
                    "writer": c.header.writer if c else "",
                    "open": self.hearing.rounds[p].version if p in self.hearing.rounds else None,
                    "waits_for": sorted(self.waited_for(p)),
                    "wrong": self.wrong.get(p, ""),
                    "stands": p in self.standing,
                }
                for p, c in enumerate(self.heads)
            ],
            "learners": [
                {
                    "learner": v.name,
                    "incarnation": v.incarnation,
                    "joined_in_vain": self.restarts[v.name].joined if v.name in self.restarts else 0,
                    "step": v.step,
                    "steps_target": v.heartbeat.steps_target if v.heartbeat else 0,
                    "loss": v.heartbeat.loss if v.heartbeat else None,
                    "step_s": v.heartbeat.step_s if v.heartbeat else 0.0,
                    "upload_s": v.heartbeat.upload_s if v.heartbeat else 0.0,
                    "sync_s": v.heartbeat.sync_s if v.heartbeat else 0.0,
                    "versions": list(v.heartbeat.versions) if v.heartbeat else [],
                    "bytes_up": v.traffic.up,
                    "bytes_down": v.traffic.down,
                    "checkpoint_bytes": v.traffic.checkpoints,
                    "ledger": {f: getattr(v.heartbeat.ledger, f) for f in v.heartbeat.ledger.__struct_fields__}
                    if v.heartbeat
                    else {},
                    "state": self.why_behind(v) or "training",
                }
                for v in self.views
            ],
            "syncers": [
                {
                    "syncer": a.syncer,
                    "live": a.syncer in self.syncers_live,
                    "commits": a.commits,
                    "held": a.held,
                    "quorum": a.quorum,
                    "broken": list(a.broken),
                    "slow": list(a.slow),
                    "refused": list(a.refused),
                    "holed": list(a.holed),
                    "waiting_for": a.waiting_for,
                    "lag_ms": a.lag_ms,
                    "able": a.able,
                    "dropped": a.dropped,
                    "twin": a.twin,
                    "turned_away": a.turned_away,
                    "unlisted": [
                        {"learner": r.learner, "fragment": r.fragment, "base": r.base, "reason": r.reason}
                        for r in a.unlisted
                    ],
                }
                for a in self.hearing.syncers.values()
            ],
            "losses": {name: [list(point) for point in points] for name, points in self.losses.items()},
            "totals": {
                "commits": self.commits,
                "summed_commits": self.sums.commits if self.sums else 0,
                "participation": self.sums.participation if self.sums else None,
                "updates_merged": self.sums.merged if self.sums else None,
                "updates_clipped": self.updates_clipped,
                "ledger": {f: getattr(self.ledger, f) for f in Tally.__struct_fields__},
            },
            "uncollected": self.uncollected,
            "disk_full_bytes_left": self.room and self.room.bytes,
            "disk_full_files_left": self.room and self.room.files,
            "rejections": self.rejections,
            "messages_rejected": self.messages_rejected,
            "clipped": self.clipped,
            "bus_error": self.bus_error,
        }


def listener_of(log: Log, bus: Bus, runtime: Runtime) -> Listener:
    """Return a listener to all streams of a run."""
    return Listener(bus, runtime, partial(may_speak, members=log.members), known=partial(streams_of, log.members))


async def read_status(log: Log, bus: Bus, runtime: Runtime, listen_s: float, accepted: Holes | None = None) -> Status:
    """Read the run's state, and listen for `listen_s` seconds to find live learners and syncers.

    `accepted`: holes that are not reported if the run goes on without them. If the bus is away, the state says so in
    `bus_error`.
    """
    hearing, bus_error, refusing, others = BusView(log.run.digest, log.members), "", None, list[str]()
    listener = listener_of(log, bus, runtime)
    try:
        async for stream, said in listener.backlog():
            hearing.take(stream, said, None)
        # The backlog may be that of a finished run. Only messages from now on show that their authors are alive.
        until = runtime.now() + listen_s
        while (left := until - runtime.now()) > 0:
            found = await bus.read(listener.positions, left)
            for stream, messages in found.items():
                listener.positions[stream] = messages[-1].position
                for said in messages:
                    hearing.take(stream, said, runtime.now())
            async for stream, said in listener.backlog():
                hearing.take(stream, said, runtime.now())
        refusing = None if hearing.live(-math.inf) or hearing.syncers_heard else await bus.refusing()
        others = await bus.other_runs(OTHERS_S) if bus.url == default_bus(log.run.url) else []
    except Unavailable as error:
        bus_error = f"the bus cannot be reached: {error}"
    await log.members.refresh(log.store)  # messages may have named a newer version meanwhile
    # A syncer that is at work reads these objects itself, and reports what it cannot fold.
    state = await look(log, hearing.heads, objects=not hearing.syncers_heard, older=OLDER, accepted=accepted)
    slots = asyncio.Semaphore(LOOKS_AT_ONCE)

    async def restarted(name: str) -> tuple[str, Restarts | None]:
        async with slots:
            return name, await in_vain(log, name, hearing.learners[name].incarnation)

    sums, bursts = await _summed(log, state.heads)
    restarts = await asyncio.gather(*map(restarted, sorted(hearing.live(-math.inf))))
    return Status(
        hearing,
        list(state.heads),
        bus_error,
        -math.inf,
        runtime.wall(),
        wrong=state.wrong,
        standing=state.standing,
        uncollected=state.uncollected,
        period=period_of(log, state.heads),
        losses=(await sampled(log, state.recent)).points(),
        **(await stored_in(log, hearing))._asdict(),
        sums=sums,
        recent=state.recent,
        restarts={name: found for name, found in restarts if found is not None},
        room=await room_of(log),
        bus_refusing=refusing,
        intruders=others,
        ahead=await _ahead(log, hearing, state.heads),
        accepted=accepted or {},
        pace=log.run.pace,
        bursts=bursts.found(),
    )


async def _summed(log: Log, heads: Sequence[Commit | None]) -> tuple[LogSums, Bursts]:
    """Return the sums over the newest commits, and their bursts. Those of a fragment end where its log is damaged."""
    sums, found, slots = LogSums(), Bursts(), asyncio.Semaphore(LOOKS_AT_ONCE)

    async def one(p: int, newest: int) -> None:
        async with slots:
            try:
                async for commit in log.commits(p, max(0, newest - SUMMED // len(heads))):
                    if commit.version > newest:
                        return  # written since `heads` was read
                    sums.take(commit.header)
                    found.take(commit.header)
            except LogCorrupt:
                pass  # what looks at the log's condition says so

    await asyncio.gather(*(one(p, head.version) for p, head in enumerate(heads) if head is not None))
    return sums, found


async def _ahead(log: Log, hearing: BusView, heads: Sequence[Commit | None]) -> dict[int, tuple[int, Sequence[str]]]:
    """Return the versions that learners have and the log lacks, by fragment, as `ahead_of` does.

    If no process is heard, the learners' newest checkpoints count, too.
    """
    # Without live learners those that have left count: they saw what they say. Beside live ones that have been started
    # again, what a dead one saw may be over.
    live = hearing.live(-math.inf)
    found = ahead_of(hearing, live or hearing.learners, heads)
    if live or hearing.syncers_heard:
        return found
    starts = await newest_starts(log)
    for p, head in enumerate(heads):
        version = head.version if head is not None else 0
        seen = max((versions[p] for _, versions in starts.seen if p < len(versions)), default=0)
        if p not in found and seen > version and (lost := await lost_after(log, p, version, starts)) is not None:
            found[p] = lost.version, lost.learners
    return found


def ahead_of(
    hearing: BusView, names: Collection[str], heads: Sequence[Commit | None]
) -> dict[int, tuple[int, Sequence[str]]]:
    """Return, by fragment, which learners have a version that its log lacks. `heads`: read after they spoke."""
    found = dict[int, tuple[int, Sequence[str]]]()
    for p, commit in enumerate(heads):
        head, having, newest = commit.version if commit is not None else 0, list[str](), 0
        for name in sorted(names):
            beat = hearing.learners[name].heartbeat
            if beat is not None and p < len(beat.versions) and beat.versions[p] > head:
                having.append(name)
                newest = max(newest, beat.versions[p])
        if having:
            found[p] = newest, having
    return found


class Stored(NamedTuple):
    """Learners that are at work by what they store, and are not heard, in the words of `Status`."""

    unheard: Collection[str] = ()
    anew: Mapping[str, int] = {}
    joining: Mapping[str, int] = {}
    storing: Collection[str] = ()


async def stored_in(log: Log, hearing: BusView) -> Stored:
    """Return the learners below `learners/` that are at work, by what they store, and of which nothing was heard.

    Empty without permission to list. Raises `Unavailable`.
    """
    try:
        entries = await log.store.list(LEARNERS)
    except Denied:
        return Stored()
    now = log.runtime.wall()
    lives = dict[str, int]()
    for entry in entries:
        if life := incarnation_in(entry.key):
            lives[learner_in(entry.key)] = max(life, lives.get(learner_in(entry.key), 0))
    for one in expulsions(log.members, lives.keys()):  # nobody hears an expelled learner
        lives.pop(one.learner, None)
    known = {*hearing.strangers, *hearing.outdated}  # these are heard, though not as members
    young = {learner_in(e.key) for e in entries if incarnation_in(e.key) and now - e.modified < JOINING_S}
    at_work = {learner_in(entry.key) for entry in entries if now - entry.modified < AT_WORK_S}
    found = {name: life for name, life in lives.items() if name in at_work and name not in known}
    heard, later = hearing.learners, {name: life for name, life in found.items() if name not in young}
    return Stored(
        {name for name in later if name not in heard},
        {name: life for name, life in later.items() if name in heard and heard[name].incarnation < life},
        {name: life for name, life in found.items() if name in young},
        {learner_in(e.key) for e in entries if not incarnation_in(e.key) and now - e.modified < STORING_S},
    )


async def room_of(log: Log) -> Room | None:
    """Return the bytes that are free on the disk of a run in a folder, if it is full; else None."""
    try:
        return await log.runtime.offload(room_left, log.run)
    except OSError:
        return None  # the folder is away, which reading the run says


def period_of(log: Log, heads: Sequence[Commit | None]) -> float:
    """Return the longest period of a fragment after these newest commits [steps]."""
    return max(
        commit.header.period if commit and commit.header.period else log.run.rules.sync_every for commit in heads
    )


class Ledger(TypedDict):
    """Where the tokens of one learner went, over all its incarnations, as of a checkpoint."""

    step: int
    incarnation: int
    processed: int
    tokens_trained_again: int
    """Those of `processed` that an earlier incarnation trained beyond the checkpoint from which a later one resumed."""
    fragments: list[dict[str, int]]
    """For each fragment: fragment, base, settled_to, and the parts of the ledger, which add up to `processed`."""


async def read_ledgers(log: Log, checkpoints: Sequence[Entry]) -> dict[str, Ledger]:
    """Return each learner's ledger by fragment, in tokens, as of its newest readable checkpoint.

    `checkpoints`: a listing that `checkpoints_in` has sorted. In a signed run, a checkpoint counts only if a member in
    force has signed it, or the owner has vouched for it; of an expelled learner, if it was a member.
    """
    found: dict[str, Ledger] = {}
    for entry in checkpoints:
        learner = learner_in(entry.key)
        if learner not in found and (header := await _checkpoint_header(log, entry)) is not None:
            found[learner] = {
                "step": header.step,
                "incarnation": header.incarnation,
                "processed": header.tokens_seen + header.tokens_lost,
                "tokens_trained_again": header.tokens_lost,
                "fragments": [_ledger_row(p, f, header.tokens_seen) for p, f in enumerate(header.fragments)],
            }
    return found


def _ledger_row(p: int, f: FragmentPoint, tokens_seen: int) -> dict[str, int]:
    merged, overwritten, late, rejected, lost = f.ledger
    local = tokens_seen - (f.origin_tokens if f.sent_step is None else f.sent_tokens)
    return {
        "fragment": p,
        "base": f.base,
        "settled_to": f.settled_to,
        "merged": merged,
        "overwritten": overwritten,
        "late": late,
        "pending": local + sum(tokens for _, tokens in f.open_bases),
        "rejected": rejected,
        "lost": lost,
    }


async def _checkpoint_header(log: Log, entry: Entry) -> CheckpointHeader | None:
    try:
        blob = await checked.read(log.store, log.runtime, entry.key, min(entry.size, log.checkpoint_most), cut=True)
        if expulsions(log.members, [learner_in(entry.key)]):
            most = log.verifier.header_most
            return (await log.open(blob, entry.key, CheckpointHeader, header_most=most)).header
        return (await log.open_checkpoint(blob, entry.key)).header
    except (ObjectMissing, RecordInvalid):
        return None

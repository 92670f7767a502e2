"""How a run does, from store and bus alone: read by `isthmus status`, at any time, from anywhere."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from isthmus.bus import Bus
from isthmus.bus.base import Said
from isthmus.bus.voice import Listener
from isthmus.errors import ObjectMissing, RecordInvalid, Unavailable
from isthmus.learner.ledger import PARTS
from isthmus.log import Commit, Log
from isthmus.records import frame
from isthmus.records.messages import Alive, Announce, Call, Committed, Heartbeat, Leave, Pass, Progress, decode
from isthmus.records.objects import CheckpointHeader, FragmentPoint
from isthmus.runtime import Runtime
from isthmus.store import Entry

__all__ = ["PARTS", "Hearing", "LearnerView", "Ledger", "Status", "read_ledgers", "read_status"]


@dataclass(slots=True)
class LearnerView:
    """One learner, as its messages show it."""

    name: str
    incarnation: int = 0
    step: int = 0
    heartbeat: Heartbeat | None = None
    left: Leave | None = None
    heard_live: bool = False
    """Whether it spoke while we listened."""


@dataclass(slots=True)
class Hearing:
    """What the bus says about a run: feed it every message."""

    run: bytes
    learners: dict[str, LearnerView] = field(default_factory=dict)
    syncers: dict[str, Alive] = field(default_factory=dict)
    syncers_live: set[str] = field(default_factory=set)
    heads: dict[int, int] = field(default_factory=dict)
    calls: dict[int, int] = field(default_factory=dict)
    invalid: Counter[str] = field(default_factory=Counter)

    def take(self, said: Said, *, live: bool) -> None:
        """Note one message."""
        if not said.body:
            return
        try:
            message = decode(said.body)
        except RecordInvalid as error:
            self.invalid[error.reason.value] += 1
            return
        if message.run != self.run:
            return
        match message:
            case Alive():
                self.syncers[message.syncer] = message
                if live:
                    self.syncers_live.add(message.syncer)
                for p, version in enumerate(message.heads):
                    self.heads[p] = max(version, self.heads.get(p, 0))
            case Committed():
                self.heads[message.fragment] = max(message.version, self.heads.get(message.fragment, 0))
            case Call():
                self.calls[message.fragment] = max(message.version, self.calls.get(message.fragment, 0))
            case Heartbeat() | Progress() | Announce() | Leave() | Pass():
                self._learner(message, live)

    def _learner(self, message: Heartbeat | Progress | Announce | Leave | Pass, live: bool) -> None:
        view = self.learners.setdefault(message.learner, LearnerView(message.learner))
        if isinstance(message, Pass) or message.incarnation < view.incarnation:
            return
        if message.incarnation > view.incarnation:
            view.incarnation, view.left = message.incarnation, None
        view.step = message.step
        view.heard_live = view.heard_live or live
        if isinstance(message, Heartbeat):
            view.heartbeat = message
        elif isinstance(message, Leave):
            view.left = message


@dataclass(frozen=True, slots=True)
class Status:
    """A run at one moment."""

    hearing: Hearing
    heads: list[Commit | None]
    """The newest commit of each fragment; None at version 0."""
    bus_error: str
    """Why the bus could not be read, or empty."""

    @property
    def rejected(self) -> dict[str, int]:
        """Rejections by reason: those in the log and those the syncers counted since they started."""
        total: Counter[str] = Counter()
        for commit in self.heads:
            if commit is not None:
                total.update(commit.header.rejected_total)
        for alive in self.hearing.syncers.values():
            total.update(alive.rejected)
        return dict(total)

    def why_behind(self, view: LearnerView) -> str:
        """Return why a learner is behind or silent, or an empty string."""
        if view.left is not None:
            return "done" if view.left.done else "left"
        if not view.heard_live and not self.bus_error:
            return "silent"
        beat = view.heartbeat
        if beat is None:
            return "no heartbeat yet"
        if beat.waiting_for:
            return f"waiting for {beat.waiting_for}"
        lag = max((self._version(p) - v for p, v in enumerate(beat.versions)), default=0)
        return f"{lag} versions behind, fetching" if lag > 1 else ""

    def _version(self, fragment: int) -> int:
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
                    "quorum_s": c.header.waited.quorum_s if c else 0.0,
                    "grace_s": c.header.waited.grace_s if c else 0.0,
                    "written_at": c.header.written_at if c else 0.0,
                    "writer": c.header.writer if c else "",
                }
                for p, c in enumerate(self.heads)
            ],
            "learners": [
                {
                    "learner": v.name,
                    "incarnation": v.incarnation,
                    "step": v.step,
                    "steps_target": v.heartbeat.steps_target if v.heartbeat else 0,
                    "loss": v.heartbeat.loss if v.heartbeat else None,
                    "step_s": v.heartbeat.step_s if v.heartbeat else 0.0,
                    "versions": list(v.heartbeat.versions) if v.heartbeat else [],
                    "ledger": {f: getattr(v.heartbeat.ledger, f) for f in v.heartbeat.ledger.__struct_fields__}
                    if v.heartbeat
                    else {},
                    "state": self.why_behind(v) or "training",
                }
                for v in sorted(self.hearing.learners.values(), key=lambda v: v.name)
            ],
            "syncers": [
                {
                    "syncer": a.syncer,
                    "live": a.syncer in self.hearing.syncers_live,
                    "commits": a.commits,
                    "held": a.held,
                    "broken": list(a.broken),
                    "waiting_for": a.waiting_for,
                    "lag_ms": a.lag_ms,
                }
                for a in self.hearing.syncers.values()
            ],
            "rejected": self.rejected,
            "bus_error": self.bus_error,
        }


async def read_status(log: Log, bus: Bus, runtime: Runtime, listen_s: float) -> Status:
    """Read the run's state; listens for `listen_s` seconds to tell who is alive. Survives a bus that is away."""
    hearing, bus_error = Hearing(log.run.digest), ""
    listener = Listener(bus, runtime, lambda _: True)
    try:
        async for _, said in listener.backlog():
            hearing.take(said, live=False)
        # The backlog may be all of a finished run; only what is said from here on shows life.
        until = runtime.now() + listen_s
        while (left := until - runtime.now()) > 0:
            found = await bus.read(listener.positions, left)
            for stream, messages in found.items():
                listener.positions[stream] = messages[-1].position
                for said in messages:
                    hearing.take(said, live=True)
            await listener.find()
            async for _, said in listener.backlog():
                hearing.take(said, live=True)
    except Unavailable as error:
        bus_error = str(error)
    heads = await asyncio.gather(
        *(log.newest(p.index, hearing.heads.get(p.index, 0)) for p in log.run.layout.fragments)
    )
    return Status(hearing, list(heads), bus_error)


class Ledger(TypedDict):
    """Where the tokens of one learner went, over all its lives, as of a checkpoint."""

    step: int
    incarnation: int
    processed: int
    tokens_lost: int
    fragments: list[dict[str, int]]
    """{fragment, base, settled_to} and the parts, which add up to `processed` in each."""


async def read_ledgers(log: Log, checkpoints: Sequence[Entry]) -> dict[str, Ledger]:
    """Return each learner's ledger by fragment, in tokens, as of its newest readable checkpoint.

    `checkpoints` is a listing as `checkpoints_in` sorts it; only headers are read.
    """
    found: dict[str, Ledger] = {}
    for entry in checkpoints:
        learner = entry.key.split("/")[1]
        if learner not in found and (header := await _checkpoint_header(log, entry.key)) is not None:
            found[learner] = {
                "step": header.step,
                "incarnation": header.incarnation,
                "processed": header.tokens_seen + header.tokens_lost,
                "tokens_lost": header.tokens_lost,
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


async def _checkpoint_header(log: Log, key: str) -> CheckpointHeader | None:
    try:
        prefix = await log.store.get_range(key, 0, frame.PREFIX.size)
        size = frame.header_size(prefix) if frame.kind_of(prefix) == frame.Kind.CHECKPOINT else 0
        blob = await log.store.get_range(key, 0, frame.PREFIX.size + min(size, frame.HEADER_MAX[frame.Kind.CHECKPOINT]))
        header = frame.parse_head(blob, frame.Kind.CHECKPOINT, CheckpointHeader)
    except (ObjectMissing, RecordInvalid):
        return None
    return header if header.run == log.run.digest else None

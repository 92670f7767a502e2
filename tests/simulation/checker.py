"""Check the invariants at every moment and at the end, from the world alone: no state of the agents is trusted."""

import functools
import math
import traceback
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from isthmus.bus.endpoints import UNSAID_MAX
from isthmus.bus.store import open_box
from isthmus.codecs.kernels import F32
from isthmus.errors import IsthmusError, RecordInvalid
from isthmus.format.records import frame
from isthmus.format.records.frame import Body, Kind
from isthmus.format.records.keys import BUS, commit_key, is_versioned, version_in
from isthmus.format.records.messages import (
    SYNCER_STREAM,
    Alive,
    Announce,
    Call,
    Committed,
    Heartbeat,
    Leave,
    decode,
    learner_of,
)
from isthmus.format.records.objects import LISTED_MAX, UNSTATED, CommitHeader, SnapshotHeader, UpdateHeader
from isthmus.format.rules import STALENESS_MAX
from isthmus.inspect import whatif
from isthmus.inspect.replay import replay
from isthmus.learner import LearnerAgent
from isthmus.learner.backend import local_array
from isthmus.learner.boundary import UPLOADS_MAX
from isthmus.log import Commit, Log, merge
from isthmus.log.run import Run
from isthmus.log.updates import verify_update
from isthmus.log.verify import Verifier
from isthmus.rounds.rounds import FINAL_EACH, POINTERS_MAX, Phase
from isthmus.syncer import Syncer
from isthmus.syncer.coordinator import INBOX_MAX, FragmentCoordinator
from isthmus_lab.simulate.process import Process
from isthmus_lab.simulate.world import World
from simulation.hostile import NAME, is_its_own
from simulation.liars import Most, is_a_lie
from simulation.scenario import STRANGER
from simulation.values import Life, Values
from simulation.waiting import Waiting

if TYPE_CHECKING:
    from simulation.cluster import Seat

BEHIND_MAX = 3
"""Versions that a well learner may be behind, since rounds go on while it fetches."""


PERIOD_SHRINKS, PERIOD_GROWS = 0.75, 2.0
"""Limits of the period's change from one commit to the next, as factors."""

QUIET_S = 4.0
"""For this long after a disturbance on the bus, no process is blamed for a message that it did not hear."""

SPEAKS_S = 1.5
"""A learner counts as speaking all the time if its heartbeats come at most this many seconds apart."""

PROMPT_S = 2.0
"""A syncer whose store was not disturbed for this long writes a commit within this time after it has closed a round."""

STEPS_KNOWN = 15
STEP_MOST, STEP_MORE_S = 4.0, 0.6
"""After `STEPS_KNOWN` steps of an incarnation, the step time that a learner states is at most `STEP_MOST` times the
true one plus `STEP_MORE_S`. A pause or an evaluation between two steps does not count."""

IDLE_SILENCES, IDLE_MOST = 1.2, 2.5
"""A round is opened for an update that waits, whatever it is based on, within this many silences and this many periods
of the slowest learner."""

VERSIONS_HELD = 2
"""Versions of a fragment that a learner may hold besides the one that it trains on: one that waits to be adopted, and
the one that the agent knows."""

SHORTER = 0.95
"""Within this share of `silence_s` no learner can count as silent, whatever clocks and links do."""


@dataclass
class Checker:
    """Watches one world."""

    world: World
    run: Run
    say: Callable[[str, str], None]
    most: Most
    """How far the updates of a learner that explodes may reach."""
    latency_s: float = 0.0
    """Median latency to the store."""
    stall_s: float = 0.0
    places: int = 0
    """The rounds of a syncer that may hold an accumulator at once."""
    violations: list[str] = field(default_factory=list)
    strays: set[str] = field(default_factory=set)
    lies: dict[int, int] = field(default_factory=dict)
    """By fragment, the version whose key was taken by a lie that every process can detect."""
    misjudges: tuple[str, int] = "", -1
    """The syncer that lies about what updates count for, and the fragment in which it does."""
    misjudged: dict[int, int] = field(default_factory=dict)
    """By fragment, the first version with such a lie."""

    def __post_init__(self) -> None:
        self.commits: list[list[tuple[CommitHeader, bytes]]] = [[] for _ in self.run.layout.fragments]
        self.states: dict[tuple[int, int], bytes] = {}
        """By fragment and version, the digest of the state, where the commit does not state it."""
        self.snapshots: list[set[int]] = [{0} for _ in self.run.layout.fragments]
        self.bases: dict[tuple[int, str], int] = {}
        self.due: set[tuple[int, int]] = set()  # fragment and base of every due update that was announced
        self.oldest: dict[int, int] = {}  # by fragment, the oldest base of an announced update
        self.grown: dict[tuple[int, int], float] = {}  # by fragment and version, when its commit was written
        self.heard: dict[str, float] = {}
        self.left: dict[str, int] = {}
        self.ever_left: set[str] = set()
        self.began: dict[str, float] = {}  # by syncer, when its newest process began
        self.processes: dict[str, Process] = {}  # the newest process of each name
        self.step_s = 0.0  # the longest step time that any learner stated
        self.speaking: dict[str, float] = {}  # by learner, since when it speaks without a pause
        self.lives: dict[tuple[str, int], Life] = {}  # records of learners, by name and number of the process
        self.digests: dict[int, tuple[object, bytes]] = {}
        self.disturbed: dict[tuple[str, str], float] = {}
        self.waiting = Waiting(self)
        self.values = Values(self)
        self.names: set[str] = set()  # learners that ever sent a message
        self.said_last: dict[str, int] = {}  # by box of a bus in the store, the newest message
        self.originals: dict[str, bytes] = {}  # what a hostile learner stored first under each key
        self.initial = []
        for p in range(len(self.run.layout.fragments)):
            (key,) = [k for k in self.world.objects.blobs if k.startswith(f"snapshots/{p:05d}/")]
            header = frame.parse_head(self.world.objects.get(key), Kind.SNAPSHOT, SnapshotHeader)
            self.initial.append(header.published_digest)
            self.values.begin(p, self.world.objects.get(key))
        self.world.objects.written.append(self.written)
        self.world.objects.deleted.append(self.deleted)
        self.world.streams.appended.append(self.said)

    def heads(self) -> dict[int, int]:
        """Return the newest version of each fragment in the log."""
        return {p: len(commits) for p, commits in enumerate(self.commits)}

    def disturb(self, who: str, port: str = "bus", for_s: float = 0.0) -> None:
        """Note that something holds up this process, or one of its requests, for a while."""
        until = self.world.clock.time() + for_s
        self.disturbed[who, port] = max(until, self.disturbed.get((who, port), 0.0))

    def violate(self, what: str, error: BaseException | None = None) -> None:
        """Note a violation."""
        self.say("CHECK", what)
        if error is not None:
            what += "\n" + "".join(traceback.format_exception(error))
        self.violations.append(f"{self.world.clock.time():.3f} s: {what}")

    # --- at every write -----------------------------------------------------------------------------------------------

    def written(self, key: str, data: bytes, before: bytes | None) -> None:
        """Check an object that was just written."""
        if key.startswith(BUS):
            self.boxed(key, data)
            return
        if is_its_own(key):
            self.originals.setdefault(key, data)
        elif before is not None and before != data:
            if not (key.startswith("commits/") and frame.kind_of(data) == Kind.PACKED):
                self.violate(f"{key} got other bytes")
            return
        kind = key.split("/", maxsplit=1)[0]
        if kind == "commits" and before is None:
            if int(key.split("/")[1]) not in self.lies:
                self.committed(key, data)
            elif version_in(key) != self.lies[int(key.split("/")[1])]:
                self.violate(f"{key}: goes on from a lie")
        elif kind == "snapshots" and key not in self.strays:
            header = frame.parse_head(data, Kind.SNAPSHOT, SnapshotHeader)
            p, v = header.fragment, header.version
            if v > len(self.commits[p]):
                self.violate(f"{key}: a snapshot of a version that is not in the log")
            elif header.state_digest != self.commits[p][v - 1][0].state_digest:
                self.violate(f"{key}: not the state its commit recorded")
            else:
                self.snapshots[p].add(v)
                for what in self.values.snapshot(header, data):
                    self.violate(f"{key}: {what}")
        if kind in ("commits", "snapshots", "learners"):
            self.say("store", f"has {key}")

    def boxed(self, key: str, data: bytes) -> None:
        """Take note of what was said by writing a box of a bus in the store."""
        opened = open_box(data)
        assert opened is not None, f"{key} is no box"
        for said in opened.said:
            if said.number > self.said_last.get(key, 0):
                self.said_last[key] = said.number
                self.said(key.split("/", 2)[2].rpartition("/")[0], said.body)

    def committed(self, key: str, data: bytes) -> None:
        """Check a commit that was just written."""
        try:
            header, _ = frame.parse(data, Kind.COMMIT, CommitHeader)
        except RecordInvalid as error:
            self.violate(f"{key}: {error}")
            return
        p, v = header.fragment, header.version
        log = self.commits[p]
        if key != commit_key(p, v) or v != len(log) + 1:
            self.violate(f"{key}: version {v} after {len(log)}")
            return
        wanted = log[-1][1] if log else self.run.digest
        if header.previous != wanted:
            self.violate(f"{key}: names another commit before it")
        if header.run != self.run.digest:
            self.violate(f"{key}: of another run")
        updates = []
        for given in header.inputs:
            blob = self.stored(given.key)
            if blob is None:
                self.violate(f"{key}: merges {given.key}, which is not there")
                continue
            fragment = self.run.layout.fragments[p]
            try:
                update = verify_update(
                    Verifier(self.run), blob, given.key, given.digest, fragment, given.learner, given.base
                )
            except RecordInvalid as error:
                self.violate(f"{key}: merges {given.key}: {error}")
                continue
            updates.append((given, update))
            h = update.header
            asked = h.tokens * (h.tokens / h.steps)
            if (given.steps, given.tokens) != (h.steps, h.tokens) or not (
                given.weight == asked and given.scale == 1.0
                if not given.clipped
                else given.weight > 0.0 and 0.0 < given.scale <= 1.0
            ):
                self.violate(f"{key}: merges {given.key} with another weight")
            if given.base >= v or given.base <= self.bases.get((p, given.learner), -1):
                self.violate(f"{key}: base {given.base} of {given.learner} after {self.bases.get((p, given.learner))}")
            self.bases[p, given.learner] = given.base
        value = self.world.objects.blobs.get(header.value_key)
        if value is None or frame.digest(value[0]) != header.value_digest:
            self.violate(f"{key}: its value {header.value_key} is not there")
        if header.healed is not None:
            wrong = [*self.healing(header), *self.values.healed(header)]
        else:
            self.closing(key, header)
            period = (log[-1][0].period if log else 0.0) or float(self.run.rules.sync_every)
            self.paced(key, header, period)
            wrong = [*self.waiting.judge(header, period), *self.values.committed(header)]
        for what in (*wrong, *self.most.judge(header, updates, self.world.clock.time())):
            self.violate(f"{key}: {what}")
        if (header.writer, p) == self.misjudges and any(map(is_a_lie, header.inputs)):
            self.misjudged.setdefault(p, v)
        log.append((header, frame.digest(data)))
        self.grown[p, v] = self.world.clock.time()

    def stored(self, key: str) -> bytes | None:
        """Return an object as it was first written: a hostile learner may spoil its updates after they were merged."""
        found = self.world.objects.blobs.get(key)
        return self.originals.get(key, found[0] if found else None)

    def closing(self, key: str, header: CommitHeader) -> None:
        """Check that each expected learner is in, has passed or is named as missing, and that none was overlooked."""
        w, p = header.waited, header.fragment
        fresh = {given.learner for given in header.inputs if given.base == header.version - 1}
        passed = {passing.learner for passing in w.passed}
        unaccounted = set(w.expected) - fresh - passed - set(w.missing)
        if unaccounted:
            self.violate(f"{key}: {sorted(unaccounted)} expected, and neither in, nor passed, nor missing")
        if w.closed_by == "everyone" and w.missing:
            self.violate(f"{key}: closed by everyone, {list(w.missing)} missing")
        recent = {given.learner for h, _ in self.commits[p][-2:] for given in h.inputs}
        now = self.world.clock.time()
        waited_s = now - self.waiting.when(header.writer, w.closed_at)  # since the writer closed the round
        if now - self.began[header.writer] < SHORTER * self.run.pace.silence_s:
            # To a writer that started more recently than `silence_s` ago, no learner in the log is silent yet.
            for learner in recent - set(w.expected) - fresh - self.ever_left:
                self.violate(f"{key}: {header.writer} has only just started, and did not wait for {learner}")
        for learner in recent - set(w.expected) - fresh - self.left.keys():
            # The learner has spoken for a while, and lately nothing disturbed it or the writer on the bus. So the
            # writer must know it, at least from the log.
            speaks = now - self.heard.get(learner, -1e9) < SPEAKS_S and now - self.speaking.get(learner, now) > QUIET_S
            quiet = max(self.disturbed.get((who, "bus"), 0.0) for who in (header.writer, learner))
            prompt = now - self.disturbed.get((header.writer, "store"), 0.0) > PROMPT_S > waited_s
            if speaks and prompt and now - quiet > QUIET_S:
                self.violate(f"{key}: {learner} is there, in the last commits, and was not waited for")

    def paced(self, key: str, header: CommitHeader, before: float) -> None:
        """Check that a commit's period is within the rules, and near the period of the commit before it."""
        least, most = self.run.rules.periods
        if not least <= header.period <= most:
            self.violate(f"{key}: a period of {header.period:g} steps, and the rules say {least} to {most}")
        if (
            not min(PERIOD_SHRINKS * before, before) <= header.period <= PERIOD_GROWS * before
            and header.period != least
        ):
            self.violate(f"{key}: a period of {header.period:g} steps after one of {before:g}")

    def healing(self, header: CommitHeader) -> list[str]:
        """Return what is wrong with a heal: it must be needed, and start from the newest published value."""
        healed, wrong = header.healed, []
        assert healed is not None
        there = self.world.objects.blobs.get(healed.key)
        if healed.key not in self.originals or (there is not None and there[0] == self.originals[healed.key]):
            wrong.append(f"heals for {healed.key}, which nobody spoiled")
        merged = {given.key for h, _ in self.commits[header.fragment] for given in h.inputs}
        if healed.key not in merged:
            wrong.append(f"heals for {healed.key}, which was not merged")
        if healed.source != header.version - 1:
            wrong.append(f"starts again from version {healed.source}, and every published value is there")
        return wrong

    def deleted(self, key: str) -> None:
        """Check that an object that was just deleted is not needed."""
        kind = key.split("/", maxsplit=1)[0]
        self.say("store", f"no longer has {key}")
        if kind == "commits":
            self.violate(f"{key}: a commit was deleted")
            return
        if kind not in ("values", "updates", "snapshots") or not is_versioned(key) or is_its_own(key):
            return
        p, v = int(key.split("/")[1]), version_in(key)
        head = len(self.commits[p])
        start = max(self.snapshots[p] - ({v} if kind == "snapshots" else set()))
        if kind == "snapshots":
            if key not in self.strays:
                self.snapshots[p].discard(v)
            if not self.snapshots[p] - {0} and v and key not in self.strays:
                self.violate(f"{key}: the last snapshot was deleted")
            return
        if kind == "values" and v > head:
            self.violate(f"{key}: deleted above the head, {head}")
        named = [
            h.version for h, _ in self.commits[p] if h.value_key == key or any(given.key == key for given in h.inputs)
        ]
        if named and max(named) > start:
            self.violate(f"{key}: deleted, and version {max(named)} cannot be folded without it (snapshot {start})")
        if not named and kind == "updates" and v >= head - STALENESS_MAX:
            self.violate(f"{key}: deleted, and may still be merged")

    # --- at every message ---------------------------------------------------------------------------------------------

    def said(self, stream: str, body: bytes) -> None:
        """Check a message on the bus. An empty message has no content: it only tests the permission to publish."""
        if not body:
            self.names.add(learner_of(stream) or stream)
            return
        try:
            (message,) = decode(body)
        except RecordInvalid as error:
            self.names.add(learner_of(stream) or stream)
            if learner_of(stream) != NAME:
                self.violate(f"{stream} carries what nobody can read: {error}")
            return
        if (learner := learner_of(stream)) is not None:
            self.names.add(learner)
        now = self.world.clock.time()
        match message:
            case Committed(syncer=by) if by == STRANGER:
                pass
            case Committed(fragment=p, version=v) if v > len(self.commits[p]):
                self.violate(f"{message.syncer} announces commit {p}/{v}, which is not in the log")
            case Call(fragment=p, version=v):
                idle = now - self.grown.get((p, v - 1), 0.0) > SHORTER * self.run.pace.silence_s
                if (p, v - 1) not in self.due and not (idle and self.oldest.get(p, v) < v):
                    self.violate(
                        f"{message.syncer} calls {p}/{v}: nothing due on {v - 1} was announced, nor did it wait"
                    )
            case Alive(heads=heads):
                for p, v in enumerate(heads):
                    if v > len(self.commits[p]):
                        self.violate(f"{message.syncer} claims version {v} of {p}, which is not in the log")
            case Announce():
                if message.learner != NAME:
                    self.step_s = max(self.step_s, message.step_s)
                self.oldest[message.fragment] = min(message.base, self.oldest.get(message.fragment, message.base))
                if message.due:
                    self.due.add((message.fragment, message.base))
                blob = self.world.objects.blobs.get(message.key)
                settled = self.bases.get((message.fragment, message.learner), -1) >= message.base
                stale = message.base < len(self.commits[message.fragment]) - STALENESS_MAX
                if blob is None and not settled and not stale and message.learner != NAME:
                    self.violate(f"{message.learner} announces {message.key}, which is not stored")
            case Heartbeat() if message.incarnation > self.left.get(message.learner, -1):
                if now - self.heard.get(message.learner, -1e9) > SPEAKS_S:
                    self.speaking[message.learner] = now
                self.heard[message.learner] = now
                self.step_s = max(self.step_s, message.step_s)
                self.left.pop(message.learner, None)
            case Leave():
                self.left[message.learner] = max(message.incarnation, self.left.get(message.learner, -1))
                self.ever_left.add(message.learner)
            case _:
                pass
        if (stream == SYNCER_STREAM) != isinstance(message, Committed | Call | Alive):
            self.violate(f"{type(message).__name__} on {stream}")

    # --- what a learner sends -----------------------------------------------------------------------------------------

    def watch(self, name: str, life: int, agent: object, process: Process) -> None:
        """Note when a syncer begins; check each update that a learner packs."""
        self.processes[name] = process
        if not isinstance(agent, LearnerAgent):
            self.began[name] = self.world.clock.time()
            return
        backend = agent.own_backend
        pack = backend.packed

        def packed(header: UpdateHeader, base: F32, values: F32, feedback: F32 | None) -> tuple[Body | None, F32]:
            blob, after = pack(header, base, values, feedback)
            if blob is not None and (name, life) in self.lives:
                self.values.packs(self.lives[name, life], header, base, values, feedback, blob, after)
            return blob, after

        backend.packed = packed  # type: ignore[method-assign]

    # --- now and then -------------------------------------------------------------------------------------------------

    def look(self, seats: "Iterable[Seat]") -> None:
        """Check the state of every agent alive."""
        for seat in seats:
            for life, (_, agent) in seat.processes.items():
                who = f"{seat.name}, life {life}"
                if isinstance(agent, Syncer):
                    self.look_at_syncer(who, agent)
                elif isinstance(agent, LearnerAgent) and agent.boundary is not None:
                    self.look_at_learner(who, agent, seat.step_s)
                    self.look_at_memory(who, self.lives[seat.name, life])

    def look_at_syncer(self, who: str, syncer: Syncer) -> None:
        for coordinator in syncer.coordinators:
            p = coordinator.fragment.index
            if coordinator.head > len(self.commits[p]):
                self.violate(
                    f"{who}: believes version {coordinator.head} of {p}, the log ends at {len(self.commits[p])}"
                )
            elif (
                coordinator.state is not None and coordinator.state.version == coordinator.head and coordinator.head > 0
            ):
                found = self.digest(coordinator.state, coordinator.state.measured)
                stated = self.commits[p][coordinator.head - 1][0].state_digest
                # Where a commit does not state it, all syncers must have the state of the first that was looked at.
                wanted = self.states.setdefault((p, coordinator.head), found) if stated == UNSTATED else stated
                if found != wanted:
                    self.violate(f"{who}: its state {p}/{coordinator.head} is not the one in the log")
            if coordinator.waiting > INBOX_MAX + 64 or len(coordinator.rounds._waiting) > POINTERS_MAX:
                self.violate(f"{who}: queues over their limits")
            rounds = coordinator.rounds
            if idle := self.idle(syncer, coordinator):
                self.violate(f"{who}: {idle} waits, and no round is opened")
            if (
                len(rounds._rejections) > LISTED_MAX + FINAL_EACH * len(self.names)
                or len(rounds._opened) > 2
                or len(rounds._merged) > len(self.names)
                or any(len(bases) > coordinator._pace.staleness + 2 for bases in rounds._merged.values())
                or max(len(rounds._losses), len(rounds._put_off)) > POINTERS_MAX + LISTED_MAX * STALENESS_MAX
            ):
                self.violate(f"{who}: remembers more of fragment {p} than there is to remember")
        if sum(coordinator._has_slot for coordinator in syncer.coordinators) > self.places:
            self.violate(f"{who}: more accumulators than the pool has")
        if len(syncer._listener.positions) > len(self.names) + 1 or len(syncer._live._learners) > len(self.names):
            self.violate(f"{who}: remembers more names than there are")
        if len(syncer._speaker._unsaid) > UNSAID_MAX:
            self.violate(f"{who}: too much unsaid")

    def idle(self, syncer: Syncer, coordinator: FragmentCoordinator) -> str:
        """Return an update that has waited for too long without a round, as text; empty if none has."""
        rounds, now = coordinator.rounds, coordinator._runtime.now()
        if rounds.phase is not Phase.CLOSED or not rounds.holding or rounds._in_line:
            return ""
        # A coordinator that waits for the store opens nothing meanwhile.
        disturbed_s = self.world.clock.time() - self.disturbed.get((syncer.name, "store"), -math.inf)
        since = max(rounds._ended_at, now - disturbed_s)
        most_s = IDLE_SILENCES * self.run.pace.silence_s + IDLE_MOST * rounds.period * self.step_s
        for waits in rounds._waiting.values():
            if waits.base <= rounds.head and now - max(since, waits.heard_at) > most_s:
                return f"{waits.learner}'s update of {coordinator.fragment.index}/{waits.base}"
        return ""

    def look_at_learner(self, who: str, agent: LearnerAgent, nominal_s: float) -> None:
        boundary = agent.boundary
        assert boundary is not None
        for p, slot in enumerate(boundary.slots):
            if slot.base > len(self.commits[p]):
                self.violate(f"{who}: holds version {slot.base} of {p}, the log ends at {len(self.commits[p])}")
                continue
            wanted = self.commits[p][slot.base - 1][0].published_digest if slot.base else self.initial[p]
            if self.digest(slot.values, functools.partial(merge.array_digest, local_array(slot.values))) != wanted:
                self.violate(f"{who}: what it holds as {p}/{slot.base} is not what was published")
            # An incarnation that starts while its twin goes on finds updates on bases that it has not read of yet.
            unread = len(self.commits[p]) - agent.uplink.settled_to[p]
            if len(agent.uplink.attempts[p]) > agent.pace.staleness + 3 + unread:
                self.violate(f"{who}: {len(agent.uplink.attempts[p])} open updates of fragment {p}")
        fragments = len(boundary.slots)
        if (
            boundary._uploads > UPLOADS_MAX
            or len(boundary.outbox) > 64
            or len(boundary.inbox) > 2 * fragments + UPLOADS_MAX + 1
        ):
            self.violate(f"{who}: queues over their limits")
        if self.run.pace.lead is None and boundary.step - agent.history.step >= STEPS_KNOWN:
            # Pauses and evaluations do not count as steps.
            most = STEP_MOST * nominal_s + STEP_MORE_S
            if boundary.step_s > most:
                self.violate(f"{who}: says a step takes {boundary.step_s:.2f} s, and it takes {nominal_s:.2f} s")
        if boundary.outbox or boundary.inbox:
            return  # messages between its training thread and its agent are under way
        processed = boundary.tokens_seen + agent.uplink.tokens_lost
        for p, account in enumerate(agent.uplink.accounts):
            account.local = boundary.local_tokens(p)
            merged = sum(
                given.tokens
                for h, _ in self.commits[p][: agent.uplink.settled_to[p]]
                for given in h.inputs
                if given.learner == agent.name
            )
            if account.merged != merged:
                self.violate(f"{who}: fragment {p}: the log merged {merged} of its tokens, the ledger says {account}")
            if account.processed != processed:
                self.violate(f"{who}: the ledger of fragment {p}, {account}, is not {processed}")

    def look_at_memory(self, who: str, record: "Life") -> None:
        """Check that few versions wait for a training loop, however long it takes no step."""
        looked_at = {id(what) for what, _ in self.digests.values()}  # alive only because this checker keeps them
        alive = [values for offered in record.offered if (values := offered()) is not None]
        record.offered = [weakref.ref(values) for values in alive]
        waiting = sum(id(values) not in looked_at for values in alive)
        if waiting > VERSIONS_HELD * len(record.arrays.values):
            self.violate(f"{who}: holds {waiting} versions of {len(record.arrays.values)} fragments")

    def digest(self, what: object, of: Callable[[], bytes]) -> bytes:
        """Return the digest of an object; compute it only once."""
        known = self.digests.get(id(what))
        if known is None or known[0] is not what:
            known = self.digests[id(what)] = what, of()
        return known[1]

    def ill(self, seats: "Iterable[Seat]", since: dict[int, int]) -> list[str]:
        """Return what has not recovered yet."""
        found = []
        heads = self.heads()
        for p, head in heads.items():
            if head < since[p] + 2 and p not in self.lies:
                found.append(f"fragment {p} stands at {head}")
        for seat in seats:
            if len(seat.processes) != 1 and not (self.lies and seat.unfoldable):
                found.append(f"{len(seat.processes)} processes are {seat.name}")
            for agent in seat.agents:
                if isinstance(agent, LearnerAgent) and agent.boundary is not None:
                    held = [slot.base for slot in agent.boundary.slots]
                    if any(head - base > BEHIND_MAX for base, head in zip(held, heads.values(), strict=True)):
                        found.append(f"{seat.name} holds {held} of {list(heads.values())}")
                elif isinstance(agent, Syncer) and any(
                    coordinator.broken and coordinator.fragment.index not in self.lies
                    for coordinator in agent.coordinators
                ):
                    found.append(f"{seat.name} does not serve all fragments")
        return found

    # --- at the end ---------------------------------------------------------------------------------------------------

    async def judge(self) -> None:
        """Read the log again, through the library's own replay."""
        ports = self.world.ports(self.world.process("judge"))
        log = Log(self.run, ports.store, ports.process.runtime)
        healed = {h.healed.key for commits in self.commits for h, _ in commits if h.healed is not None}
        for key, data in self.originals.items():
            if key not in healed:  # replay must see that an object is damaged if a heal says so
                self.world.objects.blobs[key] = data, 0.0  # replay would rightly report a spoiled object
        lied = {**self.misjudged, **self.lies}
        try:
            for result in await replay(log):
                found = result.difference
                if result.fragment in lied:
                    self.named(result.fragment, found.version if found else None, lied[result.fragment])
                elif found is not None:
                    self.violate("replay: " + " / ".join(found.lines()))
        except IsthmusError as error:
            self.violate(f"replay: {error}")
        for p, commits in enumerate(self.commits):
            try:
                told = whatif.decide(log, [Commit(header, digest) for header, digest in commits], (), {})
            except IsthmusError as error:
                self.violate(f"rounds of {p} cannot be decided anew: {error}")
                continue
            for (header, _), inputs in zip(commits, told, strict=True):
                if inputs != header.inputs:
                    self.violate(
                        f"round {p}/{header.version}, decided anew from what it saw, merges "
                        f"{[i.key for i in inputs]} instead of {[i.key for i in header.inputs]}"
                    )
        for p, commits in enumerate(self.commits):
            for header, digest in commits:
                stored = await log.commit(p, header.version)
                if stored is None or stored.digest != digest:
                    self.violate(f"commit {p}/{header.version} is another than it was, or gone")

    def named(self, p: int, version: int | None, wanted: int) -> None:
        """Check that replay names the version of a lie."""
        self.say("replay", f"names version {version} of fragment {p}")
        if version != wanted:
            self.violate(f"replay: version {wanted} of fragment {p} is a lie, and {version or 'none'} is named")

"""What must hold at every moment, and at the end. It reads the world from outside and shares no belief of the agents."""

import functools
import traceback
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from isthmus.bus.endpoints import UNSAID_MAX
from isthmus.codecs.kernels import F32
from isthmus.errors import IsthmusError, RecordInvalid
from isthmus.format.records import frame
from isthmus.format.records.frame import Body, Kind
from isthmus.format.records.keys import commit_key, is_versioned, version_in
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
from isthmus.format.records.objects import LISTED_MAX, CommitHeader, SnapshotHeader, UpdateHeader
from isthmus.format.rules import STALENESS_MAX
from isthmus.inspect import whatif
from isthmus.inspect.replay import replay
from isthmus.learner import LearnerAgent
from isthmus.learner.backend import local_array
from isthmus.learner.boundary import UPLOADS_MAX
from isthmus.log import Commit, Log, merge
from isthmus.log.gate import Gate
from isthmus.log.run import Run
from isthmus.log.updates import verify_update
from isthmus.rounds.rounds import FINAL_EACH, POINTERS_MAX
from isthmus.syncer import Syncer
from isthmus.syncer.agent import ACCUMULATORS_MAX
from isthmus.syncer.coordinator import INBOX_MAX
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
"""Versions a well learner may be behind: rounds go on while it fetches."""


PERIOD_SHRINKS, PERIOD_GROWS = 0.75, 2.0
"""From one commit to the next."""

QUIET_S = 4.0
"""After a disturbance on the bus, for so long nobody is blamed for what it did not hear."""

SPEAKS_S = 1.5
"""A learner without a pause this long between heartbeats speaks all the time."""

PROMPT_S = 2.0
"""Without a disturbance of its store for so long, a syncer's commit is written right after its round was closed."""

STEPS_KNOWN = 15
STEP_MOST, STEP_MORE_S = 4.0, 0.6
"""After so many steps of a life, what a learner says a step takes is at most this many times the truth, and so much
more: what came between two steps, a pause or an evaluation, is none."""

VERSIONS_HELD = 2
"""Versions of a fragment that a learner may hold at once, besides the one that it trains on: the one that waits, and the
one that the agent knows."""

SHORTER = 0.95
"""Share of the time after which a learner is silent in which nobody can be, whatever clocks and links do."""


@dataclass
class Checker:
    """Watches one world."""

    world: World
    run: Run
    say: Callable[[str, str], None]
    most: Most
    """Of a learner that explodes."""
    latency_s: float = 0.0
    """Of the way to the store, the median."""
    stall_s: float = 0.0
    violations: list[str] = field(default_factory=list)
    strays: set[str] = field(default_factory=set)
    lies: dict[int, int] = field(default_factory=dict)
    """By fragment, the version whose key a lie has taken that everybody sees."""
    misjudges: tuple[str, int] = "", -1
    """Which syncer lies of what updates count for, and in which fragment."""
    misjudged: dict[int, int] = field(default_factory=dict)
    """By fragment, the first version of which it did."""

    def __post_init__(self) -> None:
        self.commits: list[list[tuple[CommitHeader, bytes]]] = [[] for _ in self.run.layout.fragments]
        self.snapshots: list[set[int]] = [{0} for _ in self.run.layout.fragments]
        self.bases: dict[tuple[int, str], int] = {}
        self.due: set[tuple[int, int]] = set()  # fragment and base of every due update that was announced
        self.heard: dict[str, float] = {}
        self.left: dict[str, int] = {}
        self.ever_left: set[str] = set()
        self.began: dict[str, float] = {}  # when the process of each syncer did
        self.processes: dict[str, Process] = {}  # the newest of each name
        self.step_s = 0.0  # the longest step anybody said it takes
        self.speaking: dict[str, float] = {}  # since when without a pause
        self.lives: dict[tuple[str, int], Life] = {}  # of learners, by name and number of the process
        self.digests: dict[int, tuple[object, bytes]] = {}
        self.disturbed: dict[tuple[str, str], float] = {}
        self.waiting = Waiting(self)
        self.values = Values(self)
        self.names: set[str] = set()  # of learners that ever said anything
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
        """The newest version of each fragment, by the log itself."""
        return {p: len(commits) for p, commits in enumerate(self.commits)}

    def disturb(self, who: str, port: str = "bus", for_s: float = 0.0) -> None:
        """Something happened to this process, or to a request of it, that holds it up for a while."""
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
        """A write took effect."""
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

    def committed(self, key: str, data: bytes) -> None:
        """A commit took its key."""
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
                    Gate(self.run), blob, given.key, given.digest, fragment, given.learner, given.base
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

    def stored(self, key: str) -> bytes | None:
        """Return an object as it was when it was written: whoever spoils its own later has been merged before."""
        found = self.world.objects.blobs.get(key)
        return self.originals.get(key, found[0] if found else None)

    def closing(self, key: str, header: CommitHeader) -> None:
        """Whoever was expected is in, has passed, or is named as missing; nobody who is there was overlooked."""
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
        waited_s = now - self.waiting.when(header.writer, w.closed_at)  # since the round was closed, by its writer
        if now - self.began[header.writer] < SHORTER * self.run.pace.silence_s:
            # To a writer that has not been there for as long as silence takes, nobody in the log is silent.
            for learner in recent - set(w.expected) - fresh - self.ever_left:
                self.violate(f"{key}: {header.writer} has only just started, and did not wait for {learner}")
        for learner in recent - set(w.expected) - fresh - self.left.keys():
            # It has spoken for a while, and nothing has disturbed it or the writer on the bus of late: the writer must
            # know of it, if only by the log.
            speaks = now - self.heard.get(learner, -1e9) < SPEAKS_S and now - self.speaking.get(learner, now) > QUIET_S
            quiet = max(self.disturbed.get((who, "bus"), 0.0) for who in (header.writer, learner))
            prompt = now - self.disturbed.get((header.writer, "store"), 0.0) > PROMPT_S > waited_s
            if speaks and prompt and now - quiet > QUIET_S:
                self.violate(f"{key}: {learner} is there, in the last commits, and was not waited for")

    def paced(self, key: str, header: CommitHeader, before: float) -> None:
        """What a commit says of the period is within the rules, and no leap from what the one before it said."""
        least, most = self.run.rules.periods
        if not least <= header.period <= most:
            self.violate(f"{key}: a period of {header.period:g} steps, and the rules say {least} to {most}")
        if (
            not min(PERIOD_SHRINKS * before, before) <= header.period <= PERIOD_GROWS * before
            and header.period != least
        ):
            self.violate(f"{key}: a period of {header.period:g} steps after one of {before:g}")

    def healing(self, header: CommitHeader) -> list[str]:
        """A fragment was started again: only where that was needed, and from the newest published value."""
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
        """An object was removed."""
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

    # --- at every word ------------------------------------------------------------------------------------------------

    def said(self, stream: str, body: bytes) -> None:
        """A message is on the bus; an empty one is nobody's, and only shows that its author may speak."""
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
                if (p, v - 1) not in self.due:
                    self.violate(f"{message.syncer} calls {p}/{v}, and nothing due on {v - 1} was ever announced")
            case Alive(heads=heads):
                for p, v in enumerate(heads):
                    if v > len(self.commits[p]):
                        self.violate(f"{message.syncer} claims version {v} of {p}, which is not in the log")
            case Announce():
                if message.learner != NAME:
                    self.step_s = max(self.step_s, message.step_s)
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
        """Note when a syncer begins; look over a learner's shoulder when it packs updates."""
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
        """Look at every agent alive."""
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
                wanted = self.commits[p][coordinator.head - 1][0].state_digest
                if self.digest(coordinator.state, coordinator.state.measured) != wanted:
                    self.violate(f"{who}: its state {p}/{coordinator.head} is not the one in the log")
            if coordinator.waiting > INBOX_MAX + 64 or len(coordinator.rounds._waiting) > POINTERS_MAX:
                self.violate(f"{who}: queues over their limits")
            rounds = coordinator.rounds
            if (
                len(rounds._rejections) > LISTED_MAX + FINAL_EACH * len(self.names)
                or len(rounds._opened) > 2
                or len(rounds._merged) > len(self.names)
            ):
                self.violate(f"{who}: remembers more of fragment {p} than there is to remember")
        if sum(coordinator._has_slot for coordinator in syncer.coordinators) > ACCUMULATORS_MAX:
            self.violate(f"{who}: more accumulators than the pool has")
        if len(syncer._listener.positions) > len(self.names) + 1 or len(syncer._members._members) > len(self.names):
            self.violate(f"{who}: remembers more names than there are")
        if len(syncer._speaker._unsaid) > UNSAID_MAX:
            self.violate(f"{who}: too much unsaid")

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
            # A life that starts while a twin goes on finds updates on bases that it has yet to read of.
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
            # Pauses and evaluations are no steps.
            most = STEP_MOST * nominal_s + STEP_MORE_S
            if boundary.step_s > most:
                self.violate(f"{who}: says a step takes {boundary.step_s:.2f} s, and it takes {nominal_s:.2f} s")
        if boundary.outbox or boundary.inbox:
            return  # words on their way between its two halves
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
        """However long a training loop takes no step, few versions wait for it."""
        looked_at = {id(what) for what, _ in self.digests.values()}  # kept here, as what it trained on once
        alive = [values for offered in record.offered if (values := offered()) is not None]
        record.offered = [weakref.ref(values) for values in alive]
        waiting = sum(id(values) not in looked_at for values in alive)
        if waiting > VERSIONS_HELD * len(record.arrays.values):
            self.violate(f"{who}: holds {waiting} versions of {len(record.arrays.values)} fragments")

    def digest(self, what: object, of: Callable[[], bytes]) -> bytes:
        """Return a digest, computed once per object."""
        known = self.digests.get(id(what))
        if known is None or known[0] is not what:
            known = self.digests[id(what)] = what, of()
        return known[1]

    def ill(self, seats: "Iterable[Seat]", since: dict[int, int]) -> list[str]:
        """Say what is not yet as it should be."""
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
        """Read the log once more, through the library's own replay."""
        ports = self.world.ports(self.world.process("judge"))
        log = Log(self.run, ports.store, ports.process.runtime)
        healed = {h.healed.key for commits in self.commits for h, _ in commits if h.healed is not None}
        for key, data in self.originals.items():
            if key not in healed:  # of what a heal says that it is damaged, replay sees that it is so
                self.world.objects.blobs[key] = data, 0.0  # replay would rightly name what it spoiled
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
        """Replay names the version of a lie, or it is a violation."""
        self.say("replay", f"names version {version} of fragment {p}")
        if version != wanted:
            self.violate(f"replay: version {wanted} of fragment {p} is a lie, and {version or 'none'} is named")

"""Planted bugs: each breaks one promise of the library, as a plausible mistake would. The checker must notice every one.

A bug is a context manager that patches the library while it is entered.
"""

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

import msgspec
import numpy as np

from isthmus.bus import replies
from isthmus.codecs import as_bytes, codec
from isthmus.codecs.int4 import Int4
from isthmus.codecs.kernels import F32
from isthmus.errors import LogCorrupt, ObjectMissing, Unavailable
from isthmus.format.layout import TensorClass
from isthmus.format.records import frame
from isthmus.format.records.keys import version_in
from isthmus.format.records.messages import Alive, Committed, decode
from isthmus.format.records.objects import CommitHeader, SnapshotHeader, ValueHeader
from isthmus.format.rules import MergeRule
from isthmus.inspect import replay
from isthmus.learner import agent as learner_agent
from isthmus.learner import backend, downlink, incarnation, uplink
from isthmus.learner.boundary import Boundary, Ready
from isthmus.log import Log, fold, gc, heal, merge, polar
from isthmus.log.verified import Gate
from isthmus.reasons import Clip
from isthmus.rounds import rounds
from isthmus.rounds.bounds import Influence
from isthmus.rounds.events import CallRound, CatchUp, CaughtUp, Tick
from isthmus.rounds.grace import Grace
from isthmus.rounds.live_learners import LiveLearners
from isthmus.rounds.rounds import Phase, Rounds
from isthmus.runtime.averages import smooth
from isthmus.store import EdgeStore, FileStore
from isthmus.syncer import agent as syncer_agent
from isthmus.syncer.coordinator import FragmentCoordinator
from isthmus.syncer.fairness import FairQueue
from isthmus.syncer.fragment_reader import FragmentReader
from isthmus.syncer.holders import Holders
from isthmus_lab.simulate import store as simulated_store
from isthmus_lab.simulate.store import SimulatedStore

Bug = Callable[[], contextlib.AbstractContextManager[object]]


class Planted(NamedTuple):
    """A bug, and what catches it."""

    bug: Bug
    within: int
    """Of so many seeds from 0 on, one must catch it."""
    kind: str | None
    """Of which kind they are; None: as they are drawn."""
    caught_by: int
    """The first that did when this was written: tried first, for the conditions of tests to be short."""

    @property
    def seeds(self) -> Iterator[int]:
        """Those to try, in order."""
        yield self.caught_by
        yield from (seed for seed in range(self.within) if seed != self.caught_by)


BUGS: dict[str, Planted] = {}


def planted(
    within: int, kind: str | None = None, *, caught_by: int = 0
) -> Callable[[Callable[[], Iterator[None]]], Bug]:
    """Register a bug that is caught within so many seeds of a kind."""

    def register(fn: Callable[[], Iterator[None]]) -> Bug:
        bug = contextlib.contextmanager(fn)
        BUGS[fn.__name__.replace("_", "-")] = Planted(bug, within, kind, caught_by)
        return bug

    return register


@planted(20)
def settle_a_commit_that_lost() -> Iterator[None]:
    """A create that found the key taken is taken for won."""

    async def append(self: Any, fragment: Any, version: Any, body: Any) -> Any:
        await original(self, fragment, version, body)
        return True

    original = Log.append
    with patch.object(Log, "append", append):
        yield


@planted(20)
def announce_before_commit() -> Iterator[None]:
    """The new version is said as soon as its value is stored."""

    async def put(self: Any, key: Any, data: Any) -> None:
        await original(self, key, data)
        if key.startswith("values/"):
            self._say(
                Committed(
                    run=self._log.run.digest,
                    id=self._runtime.new_id(),
                    syncer=self._name,
                    fragment=self.fragment.index,
                    version=version_in(key),
                )
            )

    original = FragmentCoordinator._put
    with patch.object(FragmentCoordinator, "_put", put):
        yield


@planted(20)
def count_announced_as_arrived() -> Iterator[None]:
    """A learner counts towards quorum and everybody once it has announced."""

    def announced(self: Any, pointer: Any, now: Any) -> Any:
        actions = original(self, pointer, now)
        if self.round is not None and pointer.base == self.head:
            self.round.fresh.add(pointer.learner)
        return actions

    original = Rounds._announced
    with patch.object(Rounds, "_announced", announced):
        yield


@planted(50)
def accept_a_second_update_on_a_merged_base() -> Iterator[None]:
    """The memory of merged bases is not consulted."""

    def judge(self: Any, pointer: Any) -> Any:
        merged, self._merged = self._merged, {}
        try:
            return original(self, pointer)
        finally:
            self._merged = merged

    original = Rounds._judge
    with patch.object(Rounds, "_judge", judge):
        yield


@planted(50)
def a_late_update_opens_a_round() -> Iterator[None]:
    """Whatever is due opens, on whatever base."""

    def announced(self: Any, pointer: Any, now: Any) -> Any:
        actions = original(self, pointer, now)
        if self._may_open and pointer.due and pointer.base < self.head and self._judge(pointer) is None:
            self._open(pointer.boundary_at, now, pointer.learner)
            return [*actions, CallRound(self.head + 1), *self.fetches()]
        return actions

    original = Rounds._announced
    with patch.object(Rounds, "_announced", announced):
        yield


@planted(50, caught_by=12)
def close_early_on_the_only_learner_heard() -> Iterator[None]:
    """After a start or a gap, whom the log knows is not waited for, and neither is a heartbeat interval."""

    def expected(self: Any, recent: Any, now: Any) -> Any:
        self.hold_until = -1e18
        return original(self, (), now)

    original = LiveLearners.expected
    with patch.object(LiveLearners, "expected", expected):
        yield


@planted(50, caught_by=18)
def change_the_body_between_two_tries() -> Iterator[None]:
    """A commit that is tried again is written anew."""

    async def create(self: Any, key: Any, data: Any) -> Any:
        tried = self.__dict__.setdefault("tried", set())
        if key.startswith("commits/"):
            if key in tried:
                header, _ = frame.parse(data, frame.Kind.COMMIT, CommitHeader)
                later = msgspec.structs.replace(header, written_at=header.written_at + 1.0)
                data = frame.draft(frame.Kind.COMMIT, later).blob
            tried.add(key)
        return await original(self, key, data)

    original = SimulatedStore.create
    with patch.object(SimulatedStore, "create", create):
        yield


@planted(50, caught_by=3)
def collect_above_the_head() -> Iterator[None]:
    """Values nobody names are garbage, also those of a commit that is on its way."""

    async def plan(log: Any, **options: Any) -> Any:
        found = await original(log, **options)
        for fragment in log.run.layout.fragments:
            p = fragment.index
            for entry in await log.store.list(f"values/{p:05d}/"):
                if version_in(entry.key) > found.heads[p]:
                    found.doomed.setdefault("values", []).append(entry)
        return found

    original = gc.plan
    with patch.object(gc, "plan", plan):
        yield


@planted(20, caught_by=4)
def drop_the_residual_on_rejection() -> Iterator[None]:
    """An update that is turned away takes the residual of the one merged before it along."""

    def close(self: Any, p: Any, base: Any, part: Any, tokens: Any = None) -> None:
        if part in ("rejected", "late"):
            self.residuals[p] = None
        original(self, p, base, part, tokens)

    original = uplink.Uplink._close
    with patch.object(uplink.Uplink, "_close", close):
        yield


@planted(20)
def take_the_residual_of_what_was_sent_last() -> Iterator[None]:
    """Error feedback goes on from the last update that was sent, merged or not."""

    async def upload(self: Any, captured: Any) -> None:
        await original(self, captured)
        attempt = self.attempts[captured.fragment].get(captured.base)
        if attempt is not None:
            self.residuals[captured.fragment] = attempt.residual

    original = uplink.Uplink._upload
    with patch.object(uplink.Uplink, "_upload", upload):
        yield


@planted(20)
def forget_what_a_longer_update_replaced() -> Iterator[None]:
    """The residual of an update that a round had taken before a longer one replaced it is gone."""

    def settle(self: Any, commit: Any) -> None:
        self._packed = [{base: kept[-1:] for base, kept in of.items()} for of in self._packed]
        original(self, commit)

    original = uplink.Uplink.settle
    with patch.object(uplink.Uplink, "settle", settle):
        yield


@planted(100, caught_by=49)
def trust_an_unmatched_snapshot() -> Iterator[None]:
    """The newest snapshot is the state, whatever its commit says."""

    async def start(self: Any, fragment: Any, version: Any, key: Any, commit: Any) -> Any:
        blob = await self.log.store.get(key)
        header, payload = frame.parse(blob, frame.Kind.SNAPSHOT, SnapshotHeader)
        return merge.restore(header, payload, self.log.run.layout.fragments[fragment].size)

    with patch.object(fold.Merging, "start", start):
        yield


@planted(50)
def adopt_a_value_nobody_committed() -> Iterator[None]:
    """A learner takes a value object for the next version, before any commit has named it."""

    async def probe(self: Any) -> None:
        while True:
            await asyncio.sleep(0.1 * self._pace.heartbeat_s)
            for p, known in enumerate(self.known):
                for entry in await self._log.store.list(f"values/{p:05d}/"):
                    if version_in(entry.key) != known.version + 1:
                        continue
                    blob = await self._log.store.get(entry.key)
                    value, payload = frame.parse(blob, frame.Kind.VALUE, ValueHeader)
                    code, fragment = codec(value.codec), self._run.layout.fragments[p]
                    values = merge.next_published(known.values, fragment, code, as_bytes(payload))
                    self._tell(Ready(p, known.version + 1, values))

    with patch.object(downlink.Downlink, "probe", probe):
        yield


@planted(20)
def write_the_snapshot_before_the_commit() -> Iterator[None]:
    """The state is stored as soon as it is merged."""

    async def put(self: Any, key: Any, data: Any) -> None:
        await original(self, key, data)
        if key.startswith("values/") and self.state is not None:
            state = replace(self.state, version=version_in(key))
            blob = merge.snapshot(state, self.fragment.index, self._log.run.digest)
            name = f"snapshots/{self.fragment.index:05d}/{state.version:012d}-{frame.digest(blob).hex()[:16]}"
            await original(self, name, bytes(blob))

    original = FragmentCoordinator._put
    with patch.object(FragmentCoordinator, "_put", put):
        yield


@planted(100, caught_by=1)
def a_twin_goes_on() -> Iterator[None]:
    """Nobody looks whether the name was claimed again."""

    async def watch(self: Any) -> None:
        await asyncio.sleep(1e9)

    with patch.object(incarnation.Incarnation, "watch", watch):
        yield


@planted(20)
def overwritten_work_is_not_counted() -> Iterator[None]:
    """Adoption forgets the steps since the upload."""

    def adopted(self: Any, adopted: Any) -> None:
        original(self, replace(adopted, overwritten=0))

    original = uplink.Uplink.adopted
    with patch.object(uplink.Uplink, "adopted", adopted):
        yield


@planted(50)
def a_commit_forgets_an_input() -> Iterator[None]:
    """What was accumulated first is not in the list."""

    async def merging(self: Any, version: Any, closed_by: Any) -> Any:
        self._inputs = self._inputs[1:] or self._inputs
        return await original(self, version, closed_by)

    original = FragmentCoordinator._merge
    with patch.object(FragmentCoordinator, "_merge", merging):
        yield


@planted(450, caught_by=375)
def a_lost_round_is_lost() -> Iterator[None]:
    """What a round had taken when another syncer's commit came is not taken up again, and nobody repeats it."""

    def lost(self: Any) -> None:
        self.phase, self.round = type(self.phase).MERGING, self.round

    with patch.object(Rounds, "_lost", lost):
        yield


@planted(50, caught_by=8)
def a_learner_never_probes_and_hears_only_once() -> Iterator[None]:
    """A commit whose announcement is lost is never looked for, and heads in a syncer's sign of life are ignored."""

    async def probe(self: Any) -> None:
        await asyncio.sleep(1e9)

    def hear(self: Any, message: Any) -> None:
        if not isinstance(message, Alive):
            original(self, message)

    original = learner_agent.LearnerAgent._hear
    with (
        patch.object(downlink.Downlink, "probe", probe),
        patch.object(learner_agent.LearnerAgent, "_hear", hear),
    ):
        yield


@planted(20)
def blend_into_the_base() -> Iterator[None]:
    """What the model holds after adoption is taken for the published value."""

    def adopt(self: Any, fragment: Any) -> None:
        original(self, fragment)
        slot = self.slots[fragment]
        slot.values = slot.values + np.float32(1e-3)

    original = Boundary._adopt
    with patch.object(Boundary, "_adopt", adopt):
        yield


# --- waiting ----------------------------------------------------------------------------------------------------------


@planted(20, "choir")
def wait_on_when_grace_is_over() -> Iterator[None]:
    """Grace ends, and the round waits for a repeated call or so before anybody looks."""

    def tick(self: Any, now: Any) -> Any:
        if self.phase is Phase.GRACE and now < original_ends(self, self.round) + 0.8:
            return []
        return original(self, now)

    original, original_ends = Rounds._tick, Rounds._grace_ends
    with patch.object(Rounds, "_tick", tick):
        yield


@planted(20, "choir")
def close_when_half_of_grace_is_over() -> Iterator[None]:
    """The wait is not what was granted and recorded."""

    def ends(self: Any, r: Any) -> Any:
        return r.quorum_at + 0.5 * r.grace_s

    with patch.object(Rounds, "_grace_ends", ends):
        yield


@contextlib.contextmanager
def durations_as_said() -> Iterator[None]:
    """Durations are taken to be what anybody says."""
    with (
        patch.object(LiveLearners, "_believed", lambda self, member, said_s, usual_s: said_s),
        patch.object(LiveLearners, "_step_s", lambda self, member, usual_s: member.step_s),
    ):
        yield


@planted(40, "hostile", caught_by=6)
def wait_as_long_as_anybody_says() -> Iterator[None]:
    """Grace is what the slowest says it takes, and nothing bounds it."""

    def grace(pace: Any, sync_every: Any, terms: Any, quorum_s: Any) -> Any:
        return Grace(terms.cap_s, pace.overlap)

    with patch.object(rounds, "adaptive_grace", grace), durations_as_said():
        yield


@planted(60, "hostile", caught_by=6)
def steps_take_as_long_as_anybody_says() -> Iterator[None]:
    """A round that misses its quorum waits for H steps of 30 years, while who says that never answers."""
    with durations_as_said():
        yield


@planted(20)
def a_pause_collects_versions() -> Iterator[None]:
    """Every version that others make waits, whole, for a training thread that takes no step."""

    def post(self: Any, message: Any) -> None:
        self.__dict__.setdefault("hoard", []).append(message)
        original(self, message)

    original = Boundary.post
    with patch.object(Boundary, "post", post):
        yield


@planted(20, "siege")
def a_pause_is_a_step() -> Iterator[None]:
    """What comes between two steps counts as a step's duration: an evaluation of minutes, a stopped process."""

    def after_step(self: Any, tokens: Any, loss: Any = None) -> None:
        now, before = self._now(), self.__dict__.setdefault("before", self._now())
        self.averaged = smooth(self.__dict__.get("averaged", 0.0), now - before)
        self.before = now
        original(self, tokens, loss)
        self.step_s = self.averaged

    original = Boundary.after_step
    with patch.object(Boundary, "after_step", after_step):
        yield


# --- while it lasts ---------------------------------------------------------------------------------------------------


@planted(40, "siege", caught_by=6)
def a_silent_syncer_keeps_its_fragments() -> Iterator[None]:
    """Peers that were heard once are there for ever, unless they say goodbye."""

    def held(self: Any, now: Any, broken: Any = (), *, able: bool = True) -> Any:
        for peer in self._peers.values():
            peer.heard_at = now
        return original(self, now, broken, able=able)

    original = Holders.held
    with patch.object(Holders, "held", held):
        yield


@planted(20, "siege", caught_by=1)
def what_may_not_be_read_ends_the_syncer() -> Iterator[None]:
    """A 403 for an update of one learner is taken for one of our own."""

    async def fetch(self: Any, pointer: Any) -> None:
        with contextlib.suppress(Unavailable, ObjectMissing):
            await self._store.get_range(pointer.key, 0, 1)
        await original(self, pointer)

    original = FragmentCoordinator._fetch
    with patch.object(FragmentCoordinator, "_fetch", fetch):
        yield


@planted(60, "siege", caught_by=5)
def a_body_that_never_ends_holds_all_up() -> Iterator[None]:
    """Updates are fetched one at a time."""
    with patch.object(syncer_agent, "FETCHES_MAX", 1):
        yield


@planted(20, "hostile", caught_by=7)
def a_message_nobody_can_read_ends_the_syncer() -> Iterator[None]:
    """What cannot be decoded is not expected on the bus."""

    def hear(self: Any, stream: Any, said: Any, old: Any) -> None:
        decode(said.body)
        original(self, stream, said, old)

    original = syncer_agent.Syncer._hear
    with patch.object(syncer_agent.Syncer, "_hear", hear):
        yield


@planted(60, "hostile", caught_by=11)
def an_overwritten_input_ends_the_syncer() -> Iterator[None]:
    """A log that cannot be folded further is a reason to stop, for fragments held elsewhere too."""

    def break_(self: Any, error: Any) -> None:
        raise error

    with patch.object(FragmentCoordinator, "_break", break_):
        yield


# --- values -----------------------------------------------------------------------------------------------------------


def _advance(change: Any) -> Any:
    """Patch the outer step: `change(state, master, momentum)` gives what it makes of its result."""

    def step(self: Any, state: Any) -> Any:
        master, momentum, cancelled = original(self, state)
        return (*change(state, master, momentum), cancelled)

    original = merge.Accumulator.outer_step
    return patch.object(merge.Accumulator, "outer_step", step)


@planted(20)
def publish_the_way_of_the_master() -> Iterator[None]:
    """What is published is how far the master went, without what the codec dropped before."""

    def advance(state: Any, round_: Any, codec_down: Any, *more: Any) -> Any:
        return original(replace(state, published=state.master), round_, codec_down, *more)

    def next_published(published: Any, fragment: Any, codec_down: Any, payload: Any) -> Any:
        kept = true.pop() if true else published
        return apply(kept, fragment, codec_down, payload)

    def patched(state: Any, round_: Any, codec_down: Any, *more: Any) -> Any:
        true.append(state.published)
        return advance(state, round_, codec_down, *more)

    true: list[F32] = []
    original, apply = merge.advance, merge.next_published
    with patch.object(merge, "advance", patched), patch.object(merge, "next_published", next_published):
        yield


@planted(20)
def the_momentum_pushes_back() -> Iterator[None]:
    """A sign in Nesterov's step."""

    def change(state: Any, master: Any, momentum: Any) -> Any:
        return state.master + (state.master - master), momentum

    with _advance(change):
        yield


@planted(20)
def the_momentum_is_not_kept() -> Iterator[None]:
    """Every round starts with no momentum."""

    def change(state: Any, master: Any, momentum: Any) -> Any:
        return master, momentum - np.float32(0.8) * state.momentum

    with _advance(change):
        yield


@planted(40, caught_by=2)
def directions_are_not_made_longer() -> Iterator[None]:
    """RDA without the norm: the mean direction is taken as it is."""
    with patch.object(merge, "CANCELLED_BELOW", 1e9):
        yield


@planted(40, caught_by=22)
def matrices_are_merged_like_vectors() -> Iterator[None]:
    """Iso is taken for RDA."""
    with patch.object(merge, "_merge_of", lambda _, rule: MergeRule.RDA if rule == MergeRule.ISO else rule):
        yield


@planted(60, caught_by=22)
def a_quintic_is_left_out() -> Iterator[None]:
    """Small directions are not made as long as the others."""
    with patch.object(polar, "QUINTICS", polar.QUINTICS[:-1]):
        yield


@planted(40, caught_by=1)
def embeddings_are_merged_like_the_rest() -> Iterator[None]:
    """The rule for embeddings is overlooked."""

    def outers(rules: Any) -> Any:
        found = original(rules)
        return dict.fromkeys(found, found[TensorClass.DENSE])

    original = merge.outers
    with patch.object(merge, "outers", outers):
        yield


@planted(20)
def weigh_by_tokens_alone() -> Iterator[None]:
    """Quantity without quality."""
    with patch.object(merge, "weight", lambda tokens, steps: float(tokens)):
        yield


@planted(20)
def codes_are_cut_off() -> Iterator[None]:
    """A quantised level is rounded towards zero."""

    def encode(self: Any, x: Any, out: Any) -> None:
        original(self, np.float32(0.8) * x, out)

    original = Int4.encode
    with patch.object(Int4, "encode", encode):
        yield


@planted(60, caught_by=10)
def blend_with_another_share() -> Iterator[None]:
    """More of the local model stays than the rule says."""
    with patch.object(backend, "BLEND", np.float32(0.6)):
        yield


@planted(60, caught_by=6)
def carry_what_was_uploaded_too() -> Iterator[None]:
    """Local progress since the base is kept whole, also what an update already holds."""

    def adopt(self: Any, fragment: Any) -> None:
        self.slots[fragment].sent_values = None
        original(self, fragment)

    original = Boundary._adopt
    with patch.object(Boundary, "_adopt", adopt):
        yield


@planted(40, "choir", caught_by=19)
def a_life_begins_with_what_is_published() -> Iterator[None]:
    """The local work of a checkpoint is counted, and its parameters are not loaded."""

    def point(self: Any, history: Any, p: Any, version: Any, values: Any) -> Any:
        found = original(self, history, p, version, values)
        return None if found is None else replace(found, values=values)

    original = uplink.Uplink.point
    with patch.object(uplink.Uplink, "point", point):
        yield


# --- faults that a review found, put back -----------------------------------------------------------------------------


@planted(20, "choir", caught_by=3)
def look_at_the_clock_only_when_nobody_speaks() -> Iterator[None]:
    """A3: where a message waits it is handled, and the timer starts anew."""

    async def run(self: Any, stopping: Any) -> None:
        async with asyncio.TaskGroup() as self._tasks:
            following = self._tasks.create_task(self._follow())
            while not stopping.is_set():
                now = self._runtime.now()
                deadline = self.rounds.deadline(now)
                if deadline is not None and deadline <= now:
                    deadline = now + self._pace.heartbeat_s
                event = None
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._pace.heartbeat_s if deadline is None else deadline - now):
                        event = await self._inbox.get()
                if event is None:
                    await self._do(self.rounds.on(Tick(), self._runtime.now()))
                else:
                    await self._do(await self._handle(event))
            for task in (following, *self._fetching):
                task.cancel()

    with patch.object(FragmentCoordinator, "run", run):
        yield


@planted(60, "siege", caught_by=3)
def a_syncer_without_its_store_keeps_its_fragments() -> Iterator[None]:
    """A4: whoever speaks is there, whatever it can do."""
    with (
        patch.object(syncer_agent.Syncer, "_able", lambda self: True),
        patch.object(FragmentCoordinator, "overdue", lambda self, silent_s: False),
    ):
        yield


@planted(60, "hostile", caught_by=42)
def a_flood_is_looked_into_message_by_message() -> Iterator[None]:
    """A7: one queue for all, and a look at the log for each word of a version that does not exist."""

    def __init__(self: Any, each: Any, total: Any, dropped: Any) -> None:
        original_init(self, total, total, dropped)

    def put(self: Any, author: Any, event: Any) -> None:
        original_put(self, "everybody", event)

    async def do(self: Any, actions: Any) -> None:
        actions = list(actions)
        await original_do(self, [action for action in actions if not isinstance(action, CatchUp)])
        for _ in range(sum(isinstance(action, CatchUp) for action in actions)):
            await original_do(self, await self._catch_up())

    original_init, original_put, original_do = FairQueue.__init__, FairQueue.put, FragmentCoordinator._do
    with (
        patch.object(FairQueue, "__init__", __init__),
        patch.object(FairQueue, "put", put),
        patch.object(FragmentCoordinator, "_do", do),
    ):
        yield


@planted(40)
def two_updates_carry_the_same_feedback() -> Iterator[None]:
    """A18: what was dropped from the last merged update goes out with every one that is open."""

    def take_over(self: Any, p: Any, base: Any) -> Any:
        self.taken[p].setdefault(base, None)
        return self.residuals[p]

    with patch.object(uplink.Uplink, "_take_over", take_over):
        yield


@planted(200, caught_by=150)
def rounds_are_reopened_in_the_middle_of_a_look() -> Iterator[None]:
    """What a round opened on the way asks for is lost: its updates are taken for being fetched, for ever."""

    def go_to(self: Any, at: Any) -> None:
        original(self, at)
        self.rounds.on(CaughtUp(), self._runtime.now())

    original = FragmentCoordinator._go_to
    with patch.object(FragmentCoordinator, "_go_to", go_to):
        yield


@planted(60, "hostile", caught_by=8)
def a_fragment_starts_again_from_its_newest_snapshot() -> Iterator[None]:
    """What was merged since then was published, and would be lost."""

    async def newest(log: Any, p: Any) -> Any:
        return max(version for version, _ in await log.snapshots(p))

    with patch.object(heal, "_newest_published", newest):
        yield


@planted(20, "thin", caught_by=19)
def version_numbers_decide_who_is_fetched() -> Iterator[None]:
    """The lowest goes first: on a thin way down the others are never fetched."""
    with patch.object(downlink.Downlink, "_need", lambda self, p: -self.known[p].version):
        yield


@planted(200, caught_by=28)
def a_gateways_404_is_a_missing_object() -> Iterator[None]:
    """S1: whatever comes with that status says that there is nothing."""

    def refused_read(*about: Any, key: str, **where: Any) -> Any:
        return ObjectMissing(key)

    with patch.object(simulated_store, "refused_read", refused_read):
        yield


@planted(200, caught_by=14)
def an_empty_listing_is_believed() -> Iterator[None]:
    """A page with status 200 passes for a listing without objects."""
    with patch.object(EdgeStore, "list", EdgeStore._listed):
        yield


@planted(200, caught_by=2)
def a_lost_mount_is_an_empty_store() -> Iterator[None]:
    """S4: the folder below it is read and written as if it were the run's."""
    with patch.object(FileStore, "_require_same", lambda self: None):
        yield


@planted(200, caught_by=21)
def a_demoted_primary_is_waited_for() -> Iterator[None]:
    """S2: it says READONLY for ever, and nothing is merged any more."""
    waits = replies.Meaning(replies.Action.WAIT, "it will pass")
    with patch.dict(replies.MEANINGS, {"READONLY": waits}):
        yield


@planted(200, caught_by=17)
def hearsay_is_knowledge() -> Iterator[None]:
    """S3: a fragment is behind as long as somebody has named a version beyond it."""
    with patch.object(FragmentReader, "looked", lambda self, said: None):
        yield


@planted(60, "siege", caught_by=8)
def a_store_that_says_nothing_is_waited_for() -> Iterator[None]:
    """Without a timeout nothing is down, and its fragments stand."""
    with patch.object(syncer_agent, "HUNG_S", math.inf):
        yield


@planted(60, "siege")
def a_deaf_syncer_takes_itself_for_able() -> Iterator[None]:
    """S11: the bus answers, so it must be well."""

    def able(self: Any) -> bool:
        away_s = max(self._reach.store_down_s, self._reach.refused_s, self._reach.bus_down_s)
        return bool(away_s < self._holders.silent_s and self._store.outage.hung_s < syncer_agent.HUNG_S)

    with patch.object(syncer_agent.Syncer, "_able", able):
        yield


# --- more asked for than can be done ----------------------------------------------------------------------------------


@planted(12, "overload")
def rounds_end_while_their_updates_wait_to_be_read() -> Iterator[None]:
    """O2: what is read for them afterwards is for nothing."""
    with patch.object(Rounds, "_own_until", lambda self, r: r.own_until):
        yield


@planted(40, "overload", caught_by=39)
def what_was_replaced_is_read_all_the_same() -> Iterator[None]:
    """Where updates wait long to be read, longer ones come meanwhile."""
    with patch.object(Rounds, "newest", lambda self, pointer: pointer):
        yield


@planted(12, "overload")
def nobody_heeds_the_period() -> Iterator[None]:
    """O4: everybody sends every H steps, and most of what is trained meanwhile is overwritten."""
    with patch.object(Boundary, "_within", lambda self, period: self._shortest):
        yield


@planted(24, "overload", caught_by=1)
def a_period_knows_no_bounds() -> Iterator[None]:
    """The rules say how long it may be."""
    with patch.object(
        rounds, "next_period", lambda period, lag, least, most: max(period + (3.0 * lag - period) / 4, least)
    ):
        yield


@planted(12, "overload", caught_by=2)
def what_waited_for_room_is_read_as_it_is() -> Iterator[None]:
    """What was trained while it waited is overwritten."""
    with patch.object(rounds, "AFRESH_LEADS", math.inf):
        yield


# --- lies -------------------------------------------------------------------------------------------------------------


@planted(20, "liars", caught_by=3)
def a_length_is_as_it_is_found() -> Iterator[None]:
    """Nothing is cut, however long it is."""

    def judge(self: Any, *a: Any, **k: Any) -> Any:
        found = original(self, *a, **k)
        return replace(found, scale=1.0, clipped=tuple(c for c in found.clipped if c != Clip.NORM), refused=False)

    original = Influence.judge
    with patch.object(Influence, "judge", judge):
        yield


@planted(20, "liars", caught_by=3)
def steps_are_as_they_are_said() -> Iterator[None]:
    """T1: who says that it took 2^40 steps may be as long as these are."""
    with patch.object(Influence, "timed", lambda self, claim, among=(): claim._replace(believed=claim.steps)):
        yield


@planted(20, "liars")
def a_lie_is_merged_onto() -> Iterator[None]:
    """What a commit says is not compared with the run's rules and the round."""
    with patch.object(Gate, "why_not", lambda *_: ""):
        yield


@planted(20, "liars", caught_by=2)
def replay_believes_what_updates_count_for() -> Iterator[None]:
    """A log that folds is taken for a log that was made by the rules."""
    with patch.object(replay._Judge, "odd", lambda *_: []):
        yield


@planted(40, "liars", caught_by=1)
def what_is_sound_before_a_lie_is_not_told() -> Iterator[None]:
    """A learner that is behind stays there where a fragment's log ends in a lie."""

    async def tell_of(self: Any, p: Any) -> None:
        if p not in self.__dict__.setdefault("torn", set()):
            await original(self, p)

    async def leap(self: Any, p: Any, until: Any) -> None:
        try:
            await leap_original(self, p, until)
        except LogCorrupt:
            self.__dict__.setdefault("torn", set()).add(p)
            raise

    original, leap_original = downlink.Downlink._tell_of, downlink.Downlink._leap
    with patch.object(downlink.Downlink, "_tell_of", tell_of), patch.object(downlink.Downlink, "_leap", leap):
        yield

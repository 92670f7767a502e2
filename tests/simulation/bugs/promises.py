"""Planted bugs: the log, the ledger and the rounds."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np

from isthmus.codecs import as_bytes, codec
from isthmus.format.records import frame
from isthmus.format.records.keys import version_in
from isthmus.format.records.messages import Alive, Committed
from isthmus.format.records.objects import CommitHeader, SnapshotHeader, ValueHeader
from isthmus.learner import agent as learner_agent
from isthmus.learner import downlink, incarnation, uplink
from isthmus.learner.boundary import Boundary, Ready
from isthmus.log import Log, fold, gc, merge
from isthmus.rounds.events import CallRound
from isthmus.rounds.live_learners import LiveLearners
from isthmus.rounds.rounds import Rounds
from isthmus.syncer.coordinator import FragmentCoordinator
from isthmus_lab.simulate.store import SimulatedStore
from simulation.bugs.planted import planted


@planted(20)
def settle_a_commit_that_lost() -> Iterator[None]:
    """A create that found the key taken counts as a success."""

    async def append(self: Any, fragment: Any, version: Any, body: Any) -> Any:
        await original(self, fragment, version, body)
        return True

    original = Log.append
    with patch.object(Log, "append", append):
        yield


@planted(20)
def announce_before_commit() -> Iterator[None]:
    """The new version is announced as soon as its value is stored."""

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
    """A learner counts towards the quorum and as present as soon as it has announced an update."""

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
    """The record of merged bases is ignored."""

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
    """Every due update opens a round, whatever its base."""

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
    """After a start or a gap, a round waits neither for the learners in the log nor for a heartbeat interval."""

    def expected(self: Any, recent: Any, now: Any) -> Any:
        self.all_heard_at = -1e18
        return original(self, (), now)

    original = LiveLearners.expected
    with patch.object(LiveLearners, "expected", expected):
        yield


@planted(50, caught_by=18)
def change_the_body_between_two_tries() -> Iterator[None]:
    """A retried commit is written with other bytes."""

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
    """Values that no commit names are garbage, even the value of a commit that is under way."""

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
    """A rejected or late update deletes the residual of the update that was merged before it."""

    def close(self: Any, p: Any, base: Any, part: Any, tokens: Any = None) -> None:
        if part in ("rejected", "late"):
            self.residuals[p] = None
        original(self, p, base, part, tokens)

    original = uplink.Uplink._close
    with patch.object(uplink.Uplink, "_close", close):
        yield


@planted(20)
def take_the_residual_of_what_was_sent_last() -> Iterator[None]:
    """Error feedback continues from the last update that was sent, merged or not."""

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
    """The residual of an update is forgotten if a round took the update before a longer one replaced it."""

    def settle(self: Any, commit: Any) -> None:
        self._made = [{base: kept[-1:] for base, kept in of.items()} for of in self._made]
        original(self, commit)

    original = uplink.Uplink.settle
    with patch.object(uplink.Uplink, "settle", settle):
        yield


@planted(100, caught_by=49)
def trust_an_unmatched_snapshot() -> Iterator[None]:
    """The newest snapshot is used as the state, whatever its commit says."""

    async def start(self: Any, fragment: Any, version: Any, key: Any, commit: Any) -> Any:
        blob = await self.log.store.get(key)
        header, payload = frame.parse(blob, frame.Kind.SNAPSHOT, SnapshotHeader)
        return merge.restore(header, payload, self.log.run.layout.fragments[fragment].size)

    with patch.object(fold.Merging, "start", start):
        yield


@planted(50)
def adopt_a_value_nobody_committed() -> Iterator[None]:
    """A learner takes a value for the next version before a commit has named it."""

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
    """The state is stored as a snapshot as soon as it is merged."""

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
    """A learner never looks whether its name was claimed again."""

    async def watch(self: Any) -> None:
        await asyncio.sleep(1e9)

    with patch.object(incarnation.Incarnation, "watch", watch):
        yield


@planted(20)
def overwritten_work_is_not_counted() -> Iterator[None]:
    """Tokens of the steps since the upload are not counted when an adoption overwrites them."""

    def adopted(self: Any, adopted: Any) -> None:
        original(self, replace(adopted, overwritten=0))

    original = uplink.Uplink.adopted
    with patch.object(uplink.Uplink, "adopted", adopted):
        yield


@planted(50)
def a_commit_forgets_an_input() -> Iterator[None]:
    """The first update that was accumulated is missing from the commit's list."""

    async def merging(self: Any, version: Any, closed_by: Any) -> Any:
        self._sum.inputs = self._sum.inputs[1:] or self._sum.inputs
        return await original(self, version, closed_by)

    original = FragmentCoordinator._merge
    with patch.object(FragmentCoordinator, "_merge", merging):
        yield


@planted(450, caught_by=375)
def a_lost_round_is_lost() -> Iterator[None]:
    """Updates of a round that lost to another syncer's commit are not taken again, and no learner repeats them."""

    def lost(self: Any) -> None:
        self.phase, self.round = type(self.phase).MERGING, self.round

    with patch.object(Rounds, "_lost", lost):
        yield


@planted(50, caught_by=8)
def a_learner_never_probes_and_hears_only_once() -> Iterator[None]:
    """A commit whose announcement is lost is never looked for, and the heads in a syncer's `Alive` are ignored."""

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
    """After an adoption the base is what the model holds, not the published value."""

    def adopt(self: Any, fragment: Any) -> None:
        original(self, fragment)
        slot = self.slots[fragment]
        slot.values = slot.values + np.float32(1e-3)

    original = Boundary._adopt
    with patch.object(Boundary, "_adopt", adopt):
        yield

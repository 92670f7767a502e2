"""A learner that leaves waits for answers to its updates, and work that came too late opens a round of its own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np

from isthmus.format.records.keys import UPDATES
from isthmus.format.records.messages import Call
from isthmus.format.rules import Pace, Rules
from isthmus.inspect.status import read_status
from isthmus.learner import LearnerAgent
from isthmus.reasons import FINAL, Reason
from isthmus.syncer import Syncer
from isthmus_services.output.view import _fragment
from support.world import (
    NumpyReplica,
    Sleepy,
    World,
    all_commits,
    in_virtual_time,
    seed_of,
    serving,
    train,
    until,
    world,
)

RULES = Rules(fragments=1, sync_every=20)
PACE = Pace(heartbeat_s=0.5, silence_s=2.0, staleness=3)
STEP_S = 0.1
PERIOD_S = 20 * STEP_S
WAIT_S = 15.0


@dataclass
class Scene:
    """A learner whose first update came too late for its round, and another learner that was in time."""

    w: World
    syncer: Syncer
    late: LearnerAgent
    running: "asyncio.Task[None]"

    async def leaves(self, wait_s: float | None = WAIT_S) -> float:
        """Let the late learner leave; return how many seconds that takes."""
        began = self.w.runtime.now()
        self.late.drain(done=True, wait_s=wait_s)
        await self.running
        return self.w.runtime.now() - began


@asynccontextmanager
async def scene(steps: int, *, alone: bool) -> AsyncIterator[Scene]:
    """Set the scene. The other learner takes this many steps; if `alone`, it has left when the late update arrives."""
    asleep, wake = asyncio.Event(), asyncio.Event()
    async with world("", seed_of(RULES, PACE)) as w, serving(w.syncer()) as syncer:
        late = w.through(lambda store: Sleepy(store, UPDATES, asleep, wake)).learner("late")
        await late.join()
        boundary = late.attach(NumpyReplica(late.layout))
        running = asyncio.ensure_future(late.run())
        other = asyncio.ensure_future(train(w.learner("other"), steps, step_s=STEP_S))
        while not (asleep.is_set() and syncer.coordinators[0].head >= 1):
            boundary.after_step(100, 1.0)
            await asyncio.sleep(STEP_S)
        if alone:
            await other
        wake.set()
        await until(lambda: late.uplink.attempts[0], "the update arrives")
        yield Scene(w, syncer, late, running)
        await other


@in_virtual_time
async def test_the_next_round_takes_what_came_too_late_for_one() -> None:
    async with scene(200, alone=False) as s:
        assert await s.leaves() < 2 * PERIOD_S
        assert not s.late.uplink.attempts[0], "the update must be answered"
        assert s.late.uplink.accounts[0].merged > 0


@in_virtual_time
async def test_without_anybody_else_it_opens_a_round_itself() -> None:
    async with scene(30, alone=True) as s:
        assert 2 * PERIOD_S < await s.leaves() < WAIT_S
        assert not s.late.uplink.attempts[0], "the update must be answered"
        assert s.late.uplink.accounts[0].merged > 0


@in_virtual_time
async def test_it_is_merged_although_its_learner_has_left() -> None:
    async with scene(30, alone=True) as s:
        assert await s.leaves(0.0) < 1.0
        assert s.late.uplink.attempts[0], "the learner must leave before the update is answered"
        coordinator, before = s.syncer.coordinators[0], s.syncer.coordinators[0].head
        await until(lambda: coordinator.head > before, "a version with its update")
        newest = (await all_commits(s.w.log))[0][-1].header
        assert [(given.learner, given.base) for given in newest.inputs] == [("late", 0)]


@in_virtual_time
async def test_no_round_waits_for_a_learner_that_waits_for_answers() -> None:
    """Its training loop has ended, so its agent answers calls, but not those that its update answers."""
    async with scene(30, alone=True) as s:
        leaving = asyncio.ensure_future(s.leaves())
        await asyncio.sleep(0.5)
        passed = list[tuple[int, int]]()
        s.late._reporter.have_nothing = lambda *which: passed.append(which)  # type: ignore[method-assign]
        (base,) = s.late.uplink.attempts[0]
        for version, afresh in ((base + 1, False), (base + 2, False), (base + 1, True)):
            s.late._hear(Call(run=s.w.run.digest, id="x", syncer="s1", fragment=0, version=version, afresh=afresh))
        assert passed == [(0, base + 2), (0, base + 1)]
        await leaving


@in_virtual_time
async def test_a_learner_that_hears_no_syncer_leaves_at_once() -> None:
    async with scene(30, alone=True) as s:
        s.late._reporter.syncer_heard_at -= 100.0
        assert await s.leaves(None) < 1.0


@in_virtual_time
async def test_a_learner_whose_update_is_rejected_alone_waits_for_no_merge() -> None:
    """A round with nothing to merge ends in no commit, so no commit can say that the update is rejected."""
    async with world("", seed_of(RULES, PACE)) as w, serving(w.syncer()) as syncer:
        both = [asyncio.ensure_future(train(w.learner(name), 4 * 20, step_s=STEP_S, wait_s=60.0)) for name in "ab"]
        await asyncio.gather(*both)
        head = syncer.coordinators[0].head
        wild = w.learner("wild")
        far = [np.full(f.size, 1e6, np.float32) for f in w.run.layout.fragments]
        began = w.runtime.now()
        await train(wild, 40, step_s=STEP_S, wait_s=600.0, toward=far)
        assert w.runtime.now() - began < 2 * PERIOD_S + WAIT_S, "it is told of the rejection"
        assert syncer.coordinators[0].head == head
        summary = wild.summary()
        (sent,) = wild.uplink.accounts[0].sent.values()
        assert summary.ledger.rejected == sent >= 2000
        assert summary.ledger.pending == summary.ledger.processed - sent, "the steps after it"
        assert summary.unanswered == 0.0
        assert summary.unkept == 40, "no checkpoint was stored"
        assert summary.stands_out
        assert (
            f"NONE OF ITS WORK WAS MERGED: its newest update was rejected (too-long: {Reason.TOO_LONG.means}); "
            in str(summary)
        )
        assert wild.uplink.accounts[0].pending == 4000, "only a commit settles it"
        status = await read_status(w.log, w.bus, w.runtime, 1.0)
        assert status.refused(0) == {"wild": "too-long"}
        assert _fragment(status, 0)[-1] == f"{head + 1}: only answers that are rejected (too-long)"
        await train(w.learner("c"), 2 * 20, step_s=STEP_S, wait_s=60.0)
        assert syncer.coordinators[0].head > head
        listed = [r for commit in (await all_commits(w.log))[0] for r in commit.header.rejected if r.learner == "wild"]
        assert [r.reason for r in listed if r.reason in FINAL] == ["too-long"]
        await asyncio.sleep(2 * PACE.heartbeat_s)
        assert (await read_status(w.log, w.bus, w.runtime, 1.0)).refused(0) == {}, "a commit lists it now"

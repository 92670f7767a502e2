"""A learner that leaves waits for answers to its updates, and work that came too late opens a round of its own."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from isthmus.format.records.keys import UPDATES
from isthmus.format.records.messages import Call
from isthmus.format.rules import Pace, Rules
from isthmus.learner import LearnerAgent
from isthmus.syncer import Syncer
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

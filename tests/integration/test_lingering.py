"""A learner that leaves waits for answers to its updates for as long as another learner may open a round for them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from isthmus.format.records.keys import UPDATES
from isthmus.format.records.messages import Call
from isthmus.format.rules import Pace, Rules
from isthmus.learner import LearnerAgent
from support.world import NumpyReplica, Sleepy, World, in_virtual_time, seed_of, serving, train, until, world

RULES = Rules(fragments=1, sync_every=20)
PACE = Pace(heartbeat_s=0.5, silence_s=2.0, staleness=3)
STEP_S = 0.1
PERIOD_S = 20 * STEP_S
WAIT_S = 15.0


@dataclass
class Scene:
    """A learner whose first update came too late for its round, and another learner that was in time."""

    w: World
    late: LearnerAgent
    running: "asyncio.Task[None]"

    async def leaves(self) -> float:
        """Let the late learner leave; return how many seconds that takes."""
        began = self.w.runtime.now()
        self.late.drain(done=True, wait_s=WAIT_S)
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
        yield Scene(w, late, running)
        await other


@in_virtual_time
async def test_the_next_round_takes_what_came_too_late_for_one() -> None:
    async with scene(200, alone=False) as s:
        assert await s.leaves() < WAIT_S
        assert not s.late.uplink.attempts[0], "the update must be answered"
        assert s.late.uplink.accounts[0].merged > 0


@in_virtual_time
async def test_without_anybody_else_there_is_no_next_round() -> None:
    async with scene(30, alone=True) as s:
        took = await s.leaves()
        assert s.late.uplink.attempts[0], "no learner was left to open a round for the update"
        assert PERIOD_S < took < PERIOD_S + 1.0


@in_virtual_time
async def test_a_round_that_is_open_is_waited_for() -> None:
    async with scene(30, alone=True) as s:
        call = Call(run=s.w.run.digest, id="x", syncer="s1", fragment=0, version=s.late.downlink.known[0].version + 1)
        calling = asyncio.ensure_future(_says(s.late, call))
        assert await s.leaves() > 3 * PERIOD_S
        calling.cancel()


async def _says(learner: LearnerAgent, call: Call) -> None:
    for _ in range(int(3 * PERIOD_S / PACE.heartbeat_s)):
        learner._hear(call)
        await asyncio.sleep(PACE.heartbeat_s)

"""`isthmus status` names a learner whose training loop reaches no step boundary while versions come."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from advice.followed import mine
from advice.rows import row
from advice.test_status_waits import FEW, line, over, said, training
from isthmus.inspect.learner_problems import STANDS_STILL
from isthmus.learner import LearnerAgent
from support.world import NumpyReplica, in_virtual_time, serving, world


@asynccontextmanager
async def joined(agent: LearnerAgent) -> AsyncIterator[Callable[..., Awaitable[None]]]:
    """Let a learner join, and yield what makes its loop end 40 steps; it ends none by itself."""
    await agent.join()
    boundary = agent.attach(NumpyReplica(agent.layout))
    task = asyncio.ensure_future(agent.run())

    async def steps(count: int = 40, step_s: float = 0.25) -> None:
        for _ in range(count):
            boundary.after_step(100, 1.0)
            await asyncio.sleep(step_s)

    try:
        yield steps
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


STACK = "`py-spy dump --pid PID`, beside it, shows where it stands (an evaluation, data that do not come, a deadlock)"


@row(
    "status",
    "…: its loop has ended no step since it joined, … versions of each fragment ago",
    means="The learner's process lives and hears of new versions, and its training loop has not called `link.step` yet. So it "
    "sends nothing, and takes over no version.",
    like="A first step that takes long: compilation, or the first batch of data.",
    do=f"if it trains, it does not call link.step(tokens=…) after each step of the optimizer; else {STACK}",
    then="After its first step the sentence is gone.",
    lost="the steps that were never told to Isthmus",
)
@in_virtual_time
async def test_a_loop_that_never_says_that_it_has_stepped() -> None:
    (here,) = mine(test_a_loop_that_never_says_that_it_has_stepped)
    async with (
        world(Path(), FEW) as w, serving(w.syncer("s1")), training(w.learner("a")), joined(w.learner("b")) as steps,
    ):  # fmt: skip
        found = await said(here, w)
        assert found.startswith("b: its loop")
        assert "1 of 2 learners merge" in found
        await steps()
        await over(here, w)


@row(
    "status",
    "…: its loop has ended no step for … versions of each fragment",
    means="The learner's process lives and hears of new versions, and its training loop has ended no step meanwhile.",
    like="An evaluation or a step that takes longer than ten rounds.",
    do=f"{STACK}. Its checkpoint, and what it has sent, are not affected",
    then="Once it steps again, it takes the newest version over, and the sentence is gone. Started again, it goes on from its "
    "last checkpoint.",
    lost="if it is killed, what it trained since its last checkpoint and has not sent",
)
@in_virtual_time
async def test_a_loop_that_hangs() -> None:
    (here,) = mine(test_a_loop_that_hangs)
    async with (
        world(Path(), FEW) as w, serving(w.syncer("s1")), training(w.learner("a")), joined(w.learner("b")) as steps,
    ):  # fmt: skip
        await steps()
        assert "its loop" not in await line(w)
        await said(here, w)
        await steps()
        await over(here, w)


@in_virtual_time
async def test_a_loop_whose_steps_take_longer_than_ten_rounds_does_not_hang() -> None:
    async with (
        world(Path(), FEW) as w, serving(w.syncer("s1")) as syncer, training(w.learner("a")), joined(w.learner("b")) as steps,
    ):  # fmt: skip
        await steps(3, 60.0)
        head = syncer.coordinators[0].head
        await steps(1, 60.0)
        assert syncer.coordinators[0].head > head + STANDS_STILL, "many versions come in one of its steps"
        assert "its loop" not in await line(w)
        await asyncio.sleep(130.0)
        assert "b: its loop has ended no step for " in await line(w), "now it takes longer than two of its steps"

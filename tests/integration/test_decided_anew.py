"""The inputs of a round can be recomputed from what its commit recorded, however busy the syncer's machine was."""

import asyncio
import random
import time
from pathlib import Path

import pytest

from isthmus.errors import InputError
from isthmus.format.rules import Pace, Rules
from isthmus.inspect import whatif
from support.world import all_commits, in_virtual_time, seed_of, serving, train, until, world


async def stall(seed: int) -> None:
    """Block the event loop now and then, as Python's garbage collection or a busy machine does."""
    draw = random.Random(seed)
    while True:
        await asyncio.sleep(draw.uniform(0.01, 0.3))
        time.sleep(draw.uniform(0.01, 0.12))  # noqa: ASYNC251  (that is what a stall is)


@pytest.mark.parametrize("seed", [0, 1])
@in_virtual_time
async def test_the_recorded_pace_gives_the_recorded_rounds_every_one(folder: Path, seed: int) -> None:
    rules, pace = Rules(fragments=3, sync_every=4), Pace(heartbeat_s=0.2, silence_s=0.8, quorum=2)
    async with world(folder, seed_of(rules, pace)) as w:
        stalling = asyncio.ensure_future(stall(seed))
        syncer = w.syncer("east")
        async with serving(syncer):
            enough = lambda: min(k.head for k in syncer.coordinators) >= 5  # noqa: E731
            # The learners differ in speed, and one comes late and leaves early.
            slow = asyncio.ensure_future(train(w.learner("slow"), 10, seed=9, step_s=0.07, enough=enough))
            fast = [train(w.learner(f"l{i}"), 30, seed=i, step_s=0.01 + 0.01 * i, enough=enough) for i in range(2)]
            training = asyncio.gather(slow, *fast)
            await until(lambda: syncer.coordinators[0].head >= 2, "a few commits")
            await train(w.learner("guest"), 15, seed=5)
            await training
        stalling.cancel()
        for commits in (await all_commits(w.log)).values():
            told = whatif.decide(w.log, commits, (), {})
            assert [[i.key for i in inputs] for inputs in told] == [
                [i.key for i in c.header.inputs] for c in commits
            ], [c.header.waited for c, i in zip(commits, told, strict=True) if c.header.inputs != i]


@in_virtual_time
async def test_a_commit_that_does_not_say_what_its_round_saw_cannot_be_decided_anew(folder: Path) -> None:
    import msgspec

    from isthmus.log import Commit

    async with world(folder) as w:
        async with serving(w.syncer("east")) as syncer:
            await train(w.learner("l0"), 20, enough=lambda: syncer.coordinators[0].head >= 2)
        (first, *_) = (await all_commits(w.log))[0]
        silent = msgspec.structs.replace(first.header.waited, seen=())
        old = Commit(msgspec.structs.replace(first.header, waited=silent), first.digest)
        with pytest.raises(InputError, match="does not say what its round saw"):
            whatif.decide(w.log, [old], (), {})

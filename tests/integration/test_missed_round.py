"""Work that a version was merged without comes in when its learner comes back, without any newer work."""

import asyncio
from pathlib import Path

from advice.test_status_other_bus import elsewhere
from isthmus.format.rules import Pace, Rules
from isthmus.inspect.status import read_status
from isthmus.syncer import Syncer
from support.world import World, in_virtual_time, seed_of, serving, train, until, world

PACE = Pace(heartbeat_s=0.5, silence_s=2.0)
STEPS, PERIOD = 200, 48


async def pending(w: World) -> float:
    """Return the share of learner late's tokens up to `STEPS` that is pending."""
    beat = (await read_status(w.log, w.bus, w.runtime, 1.0)).hearing.learners["late"].heartbeat
    assert beat is not None
    return beat.ledger.pending / (100.0 * STEPS)


def merged(syncer: Syncer, version: int) -> bool:
    """Return whether every fragment has this version."""
    return min(k.head for k in syncer.coordinators) >= version


@in_virtual_time
async def test_a_wait_at_the_end_brings_in_what_a_version_was_merged_without() -> None:
    async with world(Path(), seed_of(Rules(fragments=2, sync_every=PERIOD), PACE)) as w:
        late = elsewhere(w).learner("late", checkpoint_s=0.5)  # no syncer reads this bus
        adopted = asyncio.Event()
        task = asyncio.ensure_future(train(late, STEPS, step_s=0.05, enough=adopted.is_set))
        await asyncio.sleep(0.05 * STEPS)
        async with serving(w.syncer("s1"), killed=True) as syncer:
            other = asyncio.ensure_future(train(w.learner("other"), 10_000, step_s=0.05))
            await until(lambda: merged(syncer, 1), "a version without it")
            other.cancel()
            await asyncio.gather(other, return_exceptions=True)
        await until(lambda: late.boundary is not None and min(s.base for s in late.boundary.slots) == 1, "adopted")
        await asyncio.sleep(1.0)  # it stores a checkpoint
        adopted.set()
        await task
        assert late.summary().ledger.pending > 80.0 * STEPS
        async with serving(w.syncer("s2")):
            await train(w.learner("late"), 0, wait_s=600.0)
            assert await pending(w) < 0.1

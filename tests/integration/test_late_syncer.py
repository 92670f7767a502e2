"""Learners that trained alone until the first syncer came: the first version is where they are, and not beyond."""

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest

from isthmus.format.rules import Pace, Rules
from isthmus.inspect.explain import explain
from isthmus.inspect.replay import replay
from isthmus.inspect.whatif import parse, what_if
from isthmus.log import Log, fold, merge
from support.world import World, check_log, in_virtual_time, seed_of, serving, train, until, world

PERIOD, STEPS = 4, 150
PACE = Pace(heartbeat_s=0.5, silence_s=2.0)
RULES = Rules(fragments=2, sync_every=PERIOD, merge="avg", codec_up="f32", codec_down="f32")


async def first_versions(w: World, steps: int, learners: tuple[str, ...]) -> None:
    """Let learners train alone for this many steps, and then a syncer merge a first version of every fragment."""
    enough = asyncio.Event()
    tasks = [
        asyncio.ensure_future(train(w.learner(name), steps, step_s=0.05, seed=n, enough=enough.is_set))
        for n, name in enumerate(learners)
    ]
    await asyncio.sleep(0.05 * steps)
    async with serving(w.syncer("late")) as syncer:
        await until(lambda: min(k.head for k in syncer.coordinators) >= 3, "three versions")
        enough.set()
        await asyncio.gather(*tasks)


async def differences(log: Log, p: int) -> tuple[np.ndarray, np.ndarray, merge.State]:
    """Return what the first version added, what its learners had moved on average, and the state at that version."""
    before, (commit, *_) = await fold.initial(log, p), [c async for c in log.commits(p, 0)]
    state = await fold.Merging(log).step(merge.initial(before), commit)
    moved = []
    for given in commit.header.inputs:
        update = await fold.read_input(log, log.run.layout.fragments[p], given)
        x = np.zeros(before.size, np.float32)
        for i, t in enumerate(log.run.layout.fragments[p].tensors):
            update.gradient.add(i, 1.0, x[t.start : t.stop])
        moved.append(x)
    weights = [given.weight for given in commit.header.inputs]
    return before - state.published, np.average(moved, axis=0, weights=weights), state


@in_virtual_time
@pytest.mark.parametrize("learners", [("a",), ("a", "b"), ("a", "b", "c")])
async def test_the_first_version_is_where_learners_are_that_trained_alone(learners: tuple[str, ...]) -> None:
    async with world(Path(), seed_of(RULES, PACE)) as w:
        await first_versions(w, STEPS, learners)
        for p in range(2):
            step, moved, state = await differences(w.log, p)
            np.testing.assert_allclose(step, moved, rtol=1e-4, atol=1e-6)
            # What the momentum still adds is less than the momentum of one period's work would.
            later = RULES.outer_lr * RULES.outer_momentum / (1.0 - RULES.outer_momentum)
            assert later * np.linalg.norm(state.momentum) < 0.1 * np.linalg.norm(moved)
        await check_log(w)
        found = await replay(w.log)
        assert [r.difference for r in found] == [None, None]


@in_virtual_time
async def test_a_first_version_of_few_periods_is_merged_as_any_other() -> None:
    async with world(Path(), seed_of(RULES, PACE)) as w:
        await first_versions(w, 3 * PERIOD, ("a", "b"))
        [commit, *_] = [c.header async for c in w.log.commits(0, 0)]
        assert commit.dense.learning_rate == RULES.outer_lr
        assert not any(given.clipped for given in commit.inputs)


@in_virtual_time
async def test_it_stays_so_under_other_outer_settings_and_is_explained() -> None:
    async with world(Path(), seed_of(RULES, PACE)) as w:
        await first_versions(w, STEPS, ("a", "b"))
        recorded, begin = (await differences(w.log, 0))[0], await fold.initial(w.log, 0)
        for pair in ("outer.lr=0.1", "outer.momentum=0.3"):
            other = await what_if(w.log, parse([pair]), last=1)
            np.testing.assert_allclose(begin - other.states[0].published, recorded, rtol=1e-4, atol=1e-6)
        said = "\n".join((await explain(w.log, "0/1")).lines)
        assert "(periods, this is the first work, of many periods: the outer rate makes up for its length)" in said


@in_virtual_time
async def test_a_commit_with_another_rate_is_no_commit() -> None:
    async with world(Path(), seed_of(RULES, PACE)) as w:
        await first_versions(w, STEPS, ("a", "b"))
        first, second = [c.header async for c in w.log.commits(0, 0)][:2]
        assert w.log.verifier.why_not(first) == w.log.verifier.why_not(second) == ""
        for header, other in ((first, second), (second, first)):
            for changed in ({"dense": other.dense}, {"embedding": other.embedding}):
                why = w.log.verifier.why_not(msgspec.structs.replace(header, **changed))
                assert why == "merged by other rules than the run's"

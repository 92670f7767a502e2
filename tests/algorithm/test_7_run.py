"""All steps: two learners and a syncer on a simulated store and bus. The syncer is killed, and another one goes on."""

import asyncio
from pathlib import Path

import numpy as np

from isthmus.inspect.replay import replay
from support.world import all_commits, in_virtual_time, serving, train, world


@in_virtual_time
async def test_learners_train_one_model_and_no_kill_loses_what_was_merged(tmp_path: Path) -> None:
    async with world(tmp_path / "run") as w:
        async with serving(w.syncer("syncer-1"), killed=True) as syncer:
            enough = lambda: min(c.head for c in syncer.coordinators) >= 3  # noqa: E731
            await asyncio.gather(*(train(w.learner(name), 20, seed=i, enough=enough) for i, name in enumerate("ab")))
        before = await all_commits(w.log)

        async with serving(w.syncer("syncer-2")) as syncer:
            assert min(c.head for c in syncer.coordinators) >= 3, "the new syncer must fold the log"
            enough = lambda: min(c.head for c in syncer.coordinators) >= 6  # noqa: E731
            models = await asyncio.gather(
                *(train(w.learner(name), 20, seed=i, enough=enough) for i, name in enumerate("ab"))
            )
        after = await all_commits(w.log)

        for p, commits in before.items():
            assert after[p][: len(commits)] == commits, "what was merged before the kill is in the log as it was"
            learners = {given.learner for commit in after[p] for given in commit.header.inputs}
            assert learners == {"a", "b"}, "both learners are in the model"
        assert all(found.difference is None for found in await replay(w.log)), "every merge can be computed again"
        apart = [np.abs(x - y).max() for x, y in zip(models[0].values, models[1].values, strict=True)]
        assert max(apart) < 0.2, "the two copies have not drifted apart"

"""A syncer whose store answers again after an outage asks learners for newer updates."""

import math
from pathlib import Path

from isthmus.format.rules import Pace, Rules
from support.world import in_virtual_time, seed_of, serving, train, world

FEW = seed_of(Rules(fragments=2, sync_every=4), Pace(heartbeat_s=0.5, silence_s=2.0))


@in_virtual_time
async def test_a_long_silence_is_an_outage_once_between_two_commits() -> None:
    async with world(Path(), FEW) as w, serving(w.syncer("s1")) as syncer:
        w.store.outage.over(5.1)
        assert syncer._live.back_at == w.runtime.now(), "of a syncer that has committed nothing yet"
        syncer._live.back_at = -math.inf
        await train(w.learner("a"), 4, enough=lambda: min(k.head for k in syncer.coordinators) >= 4)
        answered, live = w.store.outage.over, syncer._live
        answered(4.9)
        assert live.back_at == -math.inf, "a retry"
        answered(5.1)
        known = live.back_at
        assert known == w.runtime.now()
        await train(w.learner("b"), 1)
        live.back_at = known
        answered(60.0)
        assert live.back_at == known, "nothing was committed since"
        syncer.tallies.commits += 1
        for coordinator in syncer.coordinators:
            for _ in range(5):
                coordinator.rounds._close_to_commit.note(20.0)
        answered(79.0)
        assert live.back_at == known, "a commit takes as long here"
        answered(81.0)
        assert live.back_at == w.runtime.now() > known

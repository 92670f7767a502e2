"""What a learner's log says is the matter when syncers are away, and when the learner was expelled."""

import asyncio
import logging
from pathlib import Path

import pytest

from isthmus.format.rules import Pace, Rules
from isthmus.reasons import REMEDIES, Reason
from support.signed import EU, EVERYBODY, EVIL, SYNC, L, admit
from support.signed import seed as signed
from support.world import in_virtual_time, seed_of, serving, train, until, world

PACE = Pace(heartbeat_s=0.5, silence_s=2.0)
AWAY_S = 42.0


@in_virtual_time
async def test_no_rejection_is_blamed_while_all_syncers_are_away(caplog: pytest.LogCaptureFixture) -> None:
    """The last commit that the learner heard of rejected one of its updates, as happens to a slow learner."""
    caplog.set_level(logging.WARNING)
    async with world(Path(), seed_of(Rules(fragments=1, sync_every=4), PACE)) as w:
        learner, back = w.learner("us-1"), asyncio.Event()
        task = asyncio.ensure_future(train(learner, 8, step_s=0.25, enough=back.is_set))
        async with serving(w.syncer("s1"), killed=True) as syncer:
            await until(lambda: syncer.coordinators[0].head >= 3, "it is merged")
        learner.uplink.unmerged.rejected_for = Reason.STALE
        await asyncio.sleep(AWAY_S)
        async with serving(w.syncer("s2")) as syncer:
            head = syncer.coordinators[0].head
            await until(lambda: syncer.coordinators[0].head >= head + 3, "it is merged again")
            back.set()
            await task
    said = [m for m in caplog.messages if m.startswith("us-1: ")]
    assert said[0].startswith("us-1: no syncer is heard (for ")
    assert not [m for m in said if "rejected" in m]


@in_virtual_time
async def test_an_expelled_learner_is_told_that_it_is_no_member(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with world(folder, signed()) as w:
        await admit(w, *EVERYBODY, ("more", L, EVIL))
        async with serving(w.by(SYNC).syncer("s-1")) as syncer:
            others = asyncio.ensure_future(train(w.by(EU).learner("eu"), 120, step_s=0.25))
            expelled = asyncio.ensure_future(train(w.by(EVIL).learner("more"), 120, step_s=0.25))
            await until(lambda: syncer.coordinators[0].head >= 3, "both are merged")
            await admit(w, *EVERYBODY)
            await asyncio.gather(others, expelled)
    said = [m for m in caplog.messages if m.startswith("more: ")]
    assert said[0].startswith("more: every update is rejected: not-a-member (for ")
    assert said[0].endswith(REMEDIES[Reason.NOT_A_MEMBER])
    assert not [m for m in caplog.messages if "no update is merged" in m]

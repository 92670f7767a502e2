"""What `isthmus status` says while a learner or a syncer is refused one fragment's folder, and others are open to it."""

import asyncio
from functools import partial
from pathlib import Path

import pytest

from advice import test_status_waits
from advice.followed import mine, says
from advice.lives import Fault
from advice.lives import training as trains
from advice.test_status_waits import FEW, line, said
from isthmus.errors import Denied
from support.world import in_virtual_time, serving, world

training = partial(trains, step_s=1.0)


@in_virtual_time
async def test_a_learner_that_may_not_write_one_fragment_says_so_all_the_time() -> None:
    """Its uploads of the other fragment succeed meanwhile, between two tries of the refused one."""
    _, here, *_ = mine(test_status_waits.test_a_learner_that_is_kept_from_store_or_bus)
    fault = Fault(Denied("403: AccessDenied"), "updates/00000/b/", mended=True)
    async with (
        world(Path(), FEW) as w,
        serving(w.syncer("s1")),
        training(w.learner("a")),
        training(fault.of(w).learner("b")),
    ):
        await asyncio.sleep(5.0)
        fault.mended = False
        assert "permission (create updates/00000/b/ for" in await said(here, w)
        lines = [await line(w) for _ in range(20)]
        assert [one for one in lines if not says(here, one)] == []


@pytest.mark.tier("all")
@in_virtual_time
async def test_a_syncer_that_may_not_write_one_fragment_says_so_until_it_ends() -> None:
    _, here, *_ = mine(test_status_waits.test_a_learner_that_is_kept_from_store_or_bus)
    fault = Fault(Denied("403: AccessDenied"), "commits/00000/", ("create",), mended=True)
    async with world(Path(), FEW) as w, training(w.learner("a")):
        with pytest.raises(ExceptionGroup) as ended:
            async with serving(fault.of(w).syncer("s1")):
                await asyncio.sleep(5.0)
                fault.mended = False
                while not says(here, found := await line(w)):
                    pass
                assert "s1: waits for permission (create commits/00000/ for" in found
                lines = [await line(w) for _ in range(20)]
                assert [one for one in lines if not says(here, one)] == []
                async with serving(w.syncer("s2")):
                    await asyncio.sleep(10.0)
                    assert "s1: waits for permission (create commits/00000/ for" in await line(w), "named beside s2"
                    await asyncio.sleep(300.0)
        assert ended.group_contains(Denied, depth=None)

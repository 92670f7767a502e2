"""What `isthmus status` says of learners on another bus than the syncers', on either bus, and what comes of its advice."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import cast

from advice.followed import mine, says
from advice.rows import row
from advice.test_status_waits import FEW, PATIENT_S, line, over, said, training
from isthmus_lab.simulate.bus import SimulatedBus, Streams
from isthmus_lab.simulate.conditions import Conditions
from support.world import World, in_virtual_time, serving, world

JOINING_S = 60.0  # figures of status, written again: a changed one is noticed here
AT_WORK_S = 600.0


def elsewhere(w: World) -> World:
    """Return the same run with another bus, on which nothing was said."""
    return replace(w, bus=SimulatedBus(Streams(), cast(SimulatedBus, w.bus)._process, Conditions(), "sim://other"))


@row(
    "status",
    "0 of … learners merge; no syncer is heard, but the run goes on (the last commit is of …): … is not the bus of its syncers",
    means="Commits are written, and no syncer was ever heard on this bus: these learners, and this command, use another bus "
    "than the syncers. A second syncer here would only hide that.",
    like="A bus that was emptied a moment ago, for a heartbeat. A syncer that was heard here and was killed is said as `no "
    "syncer is heard; the last commit is of …`.",
    do="start none here: give these learners, and --bus here, the URL that the syncers have (redis://…; store: for the "
    "run's own store; or, for the bus.sqlite of a run in a folder, no --bus and no ISTHMUS_BUS); the learners go on from "
    "their checkpoints",
    then="On the syncers' bus, `… of … learners merge`, with these learners.",
    lost="what they trained on the other bus, but for a part of their newest updates",
)
@in_virtual_time
async def test_learners_on_another_bus_than_the_syncers() -> None:
    (here,) = mine(test_learners_on_another_bus_than_the_syncers)
    async with world(Path(), FEW) as w, serving(w.syncer("s1")), training(w.learner("a")):
        other = elsewhere(w)
        async with training(other.learner("b", checkpoint_s=1.0)):
            assert "start one with" not in await said(here, other)
        async with training(w.learner("b", checkpoint_s=1.0)):
            await asyncio.sleep(5.0)
            assert (await line(w)).startswith("2 of 2 learners merge")


@in_virtual_time
async def test_a_bus_whose_syncer_was_killed_just_now_is_the_right_one() -> None:
    async with world(Path(), FEW) as w, training(w.learner("a")):
        async with serving(w.syncer("s1"), killed=True):
            await asyncio.sleep(5.0)
        assert "no syncer is heard; the last commit is of" in await line(w)


@row(
    "status",
    "… joined in the store and … never heard here",
    means="This learner has a place in the run's store, where it has stored something in the last ten minutes, and this bus has "
    "no message of it. It is no failure, since it may have ended.",
    like="A learner that needs over a minute to load its model before its first message; or a bus that was emptied since it ended.",
    do="a learner of these that trains has another bus than …: start it again with this one (--bus, ISTHMUS_BUS, join(bus=…))",
    then="`… of … learners merge`, with this learner.",
    lost="what it trained on the other bus, but for a part of its newest update",
)
@in_virtual_time
async def test_a_learner_that_speaks_on_another_bus() -> None:
    (here,) = mine(test_a_learner_that_speaks_on_another_bus)
    async with world(Path(), FEW) as w, serving(w.syncer("s1")), training(w.learner("a")):
        async with training(elsewhere(w).learner("b", checkpoint_s=10.0)):
            await asyncio.sleep(JOINING_S - PATIENT_S / 2)
            assert not says(here, await line(w)), "it may still be on its way"
            await said(here, w)
        async with training(w.learner("b")):
            await over(here, w)
            assert (await line(w)).startswith("2 of 2 learners merge")


@in_virtual_time
async def test_a_learner_that_ended_long_ago_is_not_missed() -> None:
    (here,) = mine(test_a_learner_that_speaks_on_another_bus)
    async with world(Path(), FEW) as w:
        async with training(elsewhere(w).learner("b", checkpoint_s=10.0)):
            await asyncio.sleep(15.0)
        await asyncio.sleep(JOINING_S)
        assert says(here, await line(w))
        await asyncio.sleep(AT_WORK_S)
        assert not says(here, await line(w))

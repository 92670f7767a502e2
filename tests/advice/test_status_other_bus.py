"""What `isthmus status` says of learners on another bus than the syncers', on either bus, and what comes of its advice."""

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from typing import cast

from advice.followed import command_in, isthmus, mine, says
from advice.rows import A_GAP, row
from advice.test_status_waits import FEW, PATIENT_S, judged, line, over, said, training
from isthmus_lab.simulate.bus import SimulatedBus, Streams
from isthmus_lab.simulate.conditions import Conditions
from support.world import World, in_virtual_time, serving, train, world

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


@row(
    "status",
    "0 of … learners merge; no syncer was heard on …, though the last commit is of …, less than a minute ago: the syncers have "
    "another bus, or have ended and this one was emptied",
    means="The run was committed to, and this bus has no message of a syncer. Learners that find new versions say after a while that "
    "the run goes on; status then says that this is not its bus.",
    do="look on their machines whether they live (pgrep -af isthmus; for a loop of your own, the name of its script): if a syncer "
    "does, start none here, and give these learners, and --bus here, the URL that it has (redis://…; store: for the run's own store; "
    "or, for the bus.sqlite of a run in a folder, no --bus and no ISTHMUS_BUS); if none does, start one with: isthmus syncer …",
    then="`… of … learners merge`.",
    lost=A_GAP,
)
@in_virtual_time
async def test_a_bus_that_was_emptied_while_no_syncer_lives() -> None:
    (here,) = mine(test_a_bus_that_was_emptied_while_no_syncer_lives)
    async with world(Path(), FEW) as w:
        async with serving(w.syncer("s1"), killed=True), training(w.learner("a")):
            await asyncio.sleep(5.0)
        emptied = elsewhere(w)
        async with training(emptied.learner("a")):
            await said(here, emptied)
            async with serving(emptied.syncer("s1")):
                await over(here, emptied)
                assert (await line(emptied)).startswith("1 of 1 learners merge")


@row(
    "status",
    "… joined in the store and … not heard here since…: use the one that the syncers' commands or logs name, here and there",
    means="Learners use two buses, and no syncer is heard on this one. So nothing here says which is the right one; the one that "
    "was named may well be merged.",
    do="use the one that the syncers' commands or logs name, here and there",
    then="On the syncers' bus status names the learners that have another one.",
    lost="what learners train on the wrong bus, but for a part of their newest updates",
)
@in_virtual_time
async def test_a_learner_on_the_syncers_bus_seen_from_another() -> None:
    (here,) = mine(test_a_learner_on_the_syncers_bus_seen_from_another)
    async with world(Path(), FEW) as w, serving(w.syncer("s1")), training(w.learner("a", checkpoint_s=5.0), step_s=1.0):
        other = elsewhere(w)
        async with training(other.learner("b"), step_s=1.0):
            await asyncio.sleep(70.0)
            told = await said(here, other)
            assert "a joined in the store" in told
            assert "start it again with this one" not in told
        assert (await line(w)).startswith("1 of 1") or "b joined" in await line(w)


@in_virtual_time
async def test_a_bus_whose_syncer_was_killed_just_now_is_the_right_one() -> None:
    async with world(Path(), FEW) as w, training(w.learner("a")):
        async with serving(w.syncer("s1"), killed=True):
            await asyncio.sleep(5.0)
        assert "no syncer is heard; the last commit is of" in await line(w)


@row(
    "status",
    "no learner was heard since this bus was emptied; the last commit is of …",
    means="The syncers on this bus have merged learners of which it has no message now. It lost its messages, and the learners speak "
    "no more.",
    like="A bus that was emptied a moment ago, for a heartbeat.",
    do="start it again under its name: it goes on from its checkpoint, if it has one",
    then="`… of … learners merge`.",
    lost="what they trained since their newest checkpoints",
)
@in_virtual_time
async def test_learners_that_were_killed_before_the_bus_was_emptied() -> None:
    (here,) = mine(test_learners_that_were_killed_before_the_bus_was_emptied)
    async with world(Path(), FEW) as w, serving(w.syncer("s1")):
        async with training(w.learner("a", checkpoint_s=1.0)):
            await asyncio.sleep(5.0)
        cast(SimulatedBus, w.bus)._streams.wipe()
        await asyncio.sleep(JOINING_S)
        told = await said(here, w)
        assert "no messages come from a: it was killed or is cut off" in told
        assert "another bus than redis://h: start" not in told
        async with training(w.learner("a")):
            await over(here, w)
            assert (await line(w)).startswith("1 of 1 learners merge")


@row(
    "status",
    "no syncer is heard either",
    means="No learner was ever heard here, and the syncers that were heard have fallen silent.",
    do="if … lives, ps -o stat= -p PID (its first log line has it) says T if it is frozen (kill -CONT PID wakes it) and D if it waits "
    "for a disk; else start one with: isthmus syncer …",
    then="The part is gone; learners are then merged once they have joined.",
)
@in_virtual_time
async def test_a_syncer_that_fell_silent_before_any_learner_came() -> None:
    (here,) = mine(test_a_syncer_that_fell_silent_before_any_learner_came)
    async with world(Path(), FEW) as w:
        async with serving(w.syncer("s1"), killed=True):
            await asyncio.sleep(5.0)
            assert "no syncer" not in await line(w)
        assert "no learner trains, and none was ever heard on this bus" in await said(here, w)
        async with serving(w.syncer("s2")):
            await over(here, w)


@row(
    "status",
    "… joined in the store and … not heard here since",
    means="This learner has a place in the run's store, where it has stored something in the last ten minutes, and this bus has "
    "no message of it, or none since it joined anew. `--check` ends with 1 while it goes on storing "
    "checkpoints, and with 0 after that, since it may have ended.",
    like="A learner that needs over a minute to load its model before its first message; or a bus that was emptied since it ended.",
    do="a learner of these whose log says «joined» has another bus than …: start it again with this one (--bus, ISTHMUS_BUS, join(bus=…)); one whose log does not yet still loads its model. For one that has ended nothing is to be done, unless its log says NONE OF ITS WORK WAS MERGED, or IS LOST: start it again with this bus, and --wait-at-end 600 or link.close(wait=600)",
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
            assert not (await judged(w)).ok, "it is at work"
        await asyncio.sleep(2 * JOINING_S)
        assert says(here, (await judged(w)).said)
        assert (await judged(w)).ok, "it may have ended"
        async with training(w.learner("b")):
            await over(here, w)
            assert (await line(w)).startswith("2 of 2 learners merge")


@in_virtual_time
async def test_a_claim_alone_shows_nobody_at_work() -> None:
    """It may have ended before it stored anything, or still load its model."""
    (here,) = mine(test_a_learner_that_speaks_on_another_bus)
    async with world(Path(), FEW) as w, serving(w.syncer("s1")), training(w.learner("a")):
        async with training(elsewhere(w).learner("b", checkpoint_s=math.inf)):
            await asyncio.sleep(JOINING_S + 5.0)
            health = await judged(w)
        assert says(here, health.said)
        assert health.ok


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


async def test_the_doctor_tells_a_learner_on_another_bus_from_one_that_was_killed(folder: Path, tmp_path: Path) -> None:
    async with world(folder, FEW) as w, serving(w.syncer("s1")), training(w.learner("a")):
        async with training(w.learner("b")):
            await asyncio.sleep(1.0)
        for _ in range(int(PATIENT_S)):
            _, told = await isthmus("status", w.run.url, "--bus", w.bus.url)
            if "no messages come from b" in told:
                break
            await asyncio.sleep(0.5)
        assert f"or has another bus than {w.bus.url}" in told
        words = command_in(told, "doctor")
        assert words[-2:] == ["--bus", "ITS_BUS"]
        _, other = await isthmus(*words[:-1], f"sqlite://{tmp_path}/other.sqlite", "--size", "0.02")
        assert "none of its syncers is heard on this bus" in other
        _, same = await isthmus(*words[:-1], w.bus.url, "--size", "0.02")
        assert "none of its syncers is heard on this bus" not in same


@in_virtual_time
async def test_a_learner_that_is_started_again_on_another_bus() -> None:
    """It is not called killed: the store has its new incarnation."""
    (here,) = mine(test_a_learner_that_speaks_on_another_bus)
    async with world(Path(), FEW) as w, serving(w.syncer("s1")), training(w.learner("a")):
        async with training(w.learner("b", checkpoint_s=10.0)):
            await asyncio.sleep(2.0)
        async with training(elsewhere(w).learner("b", checkpoint_s=10.0)):
            await asyncio.sleep(JOINING_S / 2)
            told = await line(w)
            assert "b joined within the last minute and is not heard yet" in told
            await asyncio.sleep(JOINING_S)
            told = await said(here, w)
            assert "no messages come from" not in told


@row(
    "status",
    "no learner trains at the moment; the last commit is of …; … joined within the last minute and … not heard yet",
    means="Learners have a place in the run's store since less than a minute, and still load their models and checkpoints.",
    like="A learner on another bus: after a minute `joined in the store and … not heard here since` is said of it.",
    do="wait a minute: a learner is heard once it has loaded its model and its checkpoint (if its process has ended, its log "
    "says why)",
    then="`… of … learners merge`.",
)
@row(
    "status",
    "… joined within the last minute and … not heard yet",
    means="The same of one learner, while others train.",
    like="A learner on another bus: after a minute `joined in the store and … not heard here since` is said of it.",
    do="wait a minute: a learner is heard once it has loaded its model and its checkpoint (if its process has ended, its log "
    "says why)",
    then="It is among the learners that merge.",
)
@in_virtual_time
async def test_learners_that_are_started_again() -> None:
    all_of_them, _ = mine(test_learners_that_are_started_again)
    async with world(Path(), FEW) as w, serving(w.syncer("s1")):
        await train(w.learner("a", checkpoint_s=0.1), 20, done=False)
        assert "no learner trains: 1 of 1 learners stopped" in await line(w)
        again = w.learner("a", checkpoint_s=0.1)
        await again.join()  # and it loads its model
        told = await line(w)
        assert says(all_of_them, told), told
        assert "stopped" not in told
        async with training(w.learner("a", checkpoint_s=0.1)):
            await asyncio.sleep(5.0)
            assert (await line(w)).startswith("1 of 1 learners merge")

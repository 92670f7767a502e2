"""A syncer notices that the run object is gone, and writes it again, unless the whole run is being deleted."""

import asyncio
from pathlib import Path

import pytest

from advice.followed import mine
from advice.rows import row
from isthmus.errors import Denied, LogCorrupt, RunMissing
from isthmus.format.records.keys import RUN_KEY, commit_key
from isthmus.format.rules import Pace, Rules
from isthmus.log.run import read_run
from isthmus.store import Layer
from isthmus.store.layer import Send, T
from isthmus.syncer.run_object import LOOK_S
from support.world import World, in_virtual_time, seed_of, serving, train, until, world

RUN = seed_of(Rules(fragments=2, sync_every=4), Pace(heartbeat_s=1.0, silence_s=3.0))


async def merged(w: World, head: int = 1) -> None:
    """Train until both fragments have a version."""
    async with serving(w.syncer("s1")) as syncer:
        await train(w.learner("a"), 10, enough=lambda: min(k.head for k in syncer.coordinators) >= head)


@row(
    "log",
    "the run object … was gone, and is written again: find out what deleted it",
    means="Somebody deleted the object `run`, which every process reads at its start. A syncer has written the same bytes again.",
    do="find out what deleted it",
    then="Processes can start.",
    lost="nothing",
)
@in_virtual_time
async def test_a_run_object_that_is_gone_is_written_again(caplog: pytest.LogCaptureFixture) -> None:
    (here,) = mine(test_a_run_object_that_is_gone_is_written_again)
    async with world(Path(), RUN) as w:
        await merged(w)
        kept = bytes(await w.store.get(RUN_KEY))
        async with serving(w.syncer("s2")) as syncer:
            await until(lambda: min(k.head for k in syncer.coordinators) >= 1, "it has read the log")
            await w.store.delete(RUN_KEY)
            with pytest.raises(RunMissing):
                await read_run(w.store)
            await asyncio.sleep(LOOK_S + 5.0)
            assert bytes(await w.store.get(RUN_KEY)) == kept
            assert [here.is_in(message) for message in caplog.messages].count(True) == 1
            await asyncio.sleep(2 * LOOK_S)
        assert [here.is_in(message) for message in caplog.messages].count(True) == 1


@row(
    "log",
    "the run object … is not the one that this syncer started with (… bytes in place of …), and no process can start: end no "
    "syncer; move it away, and it is written again within a minute",
    means="The object `run` was cut or replaced, as by a power cut or a full disk. What runs goes on, and nothing can start. The "
    "syncer that says so has the right bytes.",
    do="end no syncer; move it away, and it is written again within a minute",
    then="The syncer logs that the object was gone and is written again, and processes can start.",
    lost="nothing, while a syncer runs",
)
@pytest.mark.parametrize("cut", [0, 40])
@in_virtual_time
async def test_a_run_object_that_was_cut_is_named_and_can_be_made_again(
    cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    (here,) = mine(test_a_run_object_that_was_cut_is_named_and_can_be_made_again)
    async with world(Path(), RUN) as w:
        await merged(w)
        kept = bytes(await w.store.get(RUN_KEY))
        async with serving(w.syncer("s2")):
            await asyncio.sleep(2 * LOOK_S)
            assert not any(here.is_in(message) for message in caplog.messages)
            await w.store.delete(RUN_KEY)
            await w.store.create(RUN_KEY, kept[:cut])
            with pytest.raises(LogCorrupt, match="end no syncer: move this object away, and one that runs writes it"):
                await read_run(w.store)
            await asyncio.sleep(3 * LOOK_S)
            assert [here.is_in(message) for message in caplog.messages].count(True) == 1
            assert bytes(await w.store.get(RUN_KEY)) == kept[:cut], "nothing is replaced"
            await w.store.delete(RUN_KEY)
            await asyncio.sleep(LOOK_S + 5.0)
            assert bytes(await w.store.get(RUN_KEY)) == kept
            await w.store.delete(RUN_KEY)
            await w.store.create(RUN_KEY, kept[:cut])
            await asyncio.sleep(LOOK_S + 5.0)
            assert [here.is_in(message) for message in caplog.messages].count(True) == 2, "it is damaged once more"


@in_virtual_time
async def test_nothing_is_written_into_a_run_that_is_being_deleted() -> None:
    async with world(Path(), RUN) as w:
        await merged(w)
        async with serving(w.syncer("s2")) as syncer:
            await asyncio.sleep(LOOK_S / 2)  # it has merged what came late
            assert min(k.head for k in syncer.coordinators) >= 1
            for key in [entry.key for entry in await w.store.list("commits/")]:
                await w.store.delete(key)
            await w.store.delete(RUN_KEY)
            await asyncio.sleep(2 * LOOK_S)
            assert not [entry for entry in await w.store.list("") if entry.key in (RUN_KEY, commit_key(0, 1))]


class NoRuns(Layer):
    """A store in which the run object may not be created."""

    async def _through(self, operation: str, key: str, send: Send[T]) -> T:
        if operation == "create" and key == RUN_KEY:
            raise Denied("403")
        return await send()


@row(
    "log",
    "the run object … is gone, and this syncer may not write it: restore it from a backup before any process has to start, since "
    "none can without it",
    means="Somebody deleted the object `run`. What runs goes on, and nothing can start.",
    do="restore it from a backup before any process has to start",
    then="Processes can start.",
    lost="nothing, if a backup has it; without one, the run cannot be continued once its processes have ended",
)
@in_virtual_time
async def test_a_run_object_that_may_not_be_written_is_named(caplog: pytest.LogCaptureFixture) -> None:
    (here,) = mine(test_a_run_object_that_may_not_be_written_is_named)
    async with world(Path(), RUN) as w:
        await merged(w)
        async with serving(w.through(NoRuns).syncer("s2")) as syncer:
            await until(lambda: min(k.head for k in syncer.coordinators) >= 1, "it has read the log")
            await asyncio.sleep(2 * LOOK_S)
            assert not any(here.is_in(message) for message in caplog.messages), "it is there"
            await w.store.delete(RUN_KEY)
            await asyncio.sleep(3 * LOOK_S + 5.0)
            assert [here.is_in(message) for message in caplog.messages].count(True) == 1
            assert min(k.head for k in syncer.coordinators) >= 1

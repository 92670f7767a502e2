"""A commit that is missing below a newer one is found by whoever reads the log, and no other is put in its place."""

import asyncio
from pathlib import Path

import pytest

from isthmus.errors import LogCorrupt
from isthmus.log import heal
from isthmus.log.complete import AHEAD, require_whole
from isthmus.readers.replay import replay
from isthmus.records.keys import commit_key
from isthmus.rules import Pace, Rules
from isthmus_services.cli import main
from support.world import World, newest_commit, seed_of, serving, train, world

FEW = seed_of(Rules(fragments=2, sync_every=4), Pace(heartbeat_s=0.2, silence_s=0.8, snapshot_every=4096))


async def grown(w: World, versions: int, killed: bool = True) -> int:
    """Let a learner train until both fragments have so many versions; return the newest of the first."""
    async with serving(w.syncer("s1"), killed=killed) as syncer:
        await train(w.learner("l0"), 20, enough=lambda: min(k.head for k in syncer.keepers) >= versions)
    return (await newest_commit(w, 0)).version


@pytest.mark.parametrize("below", [1, 2, AHEAD + 4], ids=["the newest", "one below", "far below"])
async def test_a_missing_commit_is_found_and_no_other_put_in_its_place(folder: Path, below: int) -> None:
    async with world(folder, FEW) as w:
        head = await grown(w, 24)
        hole = head - below
        await w.store.delete(commit_key(0, hole))
        replayed = await replay(w.log)
        assert [one.difference is None for one in replayed] == [False, True]
        assert replayed[0].difference is not None
        assert replayed[0].difference.key == commit_key(0, hole)
        assert "is missing" in replayed[0].difference.detail
        found = await heal.diagnose(w.log)
        assert "is missing" in found[0].hopeless
        assert found[1].sound
        async with serving(w.syncer("s2")) as syncer:
            before = syncer.keepers[1].head
            assert "is missing" in syncer.keepers[0].broken
            await train(w.learner("l1"), 20, enough=lambda: syncer.keepers[1].head > before + 4)
        with pytest.raises(LogCorrupt, match="is missing, and version"):
            await require_whole(w.log, 0, hole - 1, lists=True)


async def test_a_hole_below_a_snapshot_is_found_where_the_whole_log_is_read(folder: Path) -> None:
    """A syncer goes on all the same: it needs nothing that was before the snapshot."""
    async with world(folder, FEW) as w:
        head = await grown(w, 24, killed=False)
        await w.store.delete(commit_key(0, head - 10))
        assert [one.difference is None for one in await replay(w.log)] == [False, True]
        assert [diagnosis.sound for diagnosis in await heal.diagnose(w.log)] == [False, True]
        async with serving(w.syncer("s2")) as syncer:
            await train(w.learner("l1"), 20, enough=lambda: min(k.head for k in syncer.keepers) > head + 4)


async def test_a_log_that_grows_meanwhile_is_whole(folder: Path) -> None:
    async with world(folder, FEW) as w:
        head = await grown(w, 12)
        for earlier in range(head + 1):
            await require_whole(w.log, 0, earlier, lists=True)


async def test_replay_says_so_and_ends_with_1(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with world(folder, FEW) as w:
        head = await grown(w, 12)
        await w.store.delete(commit_key(0, head - 1))
    assert await asyncio.to_thread(main, ["replay", str(folder)]) == 1
    assert "is missing" in capsys.readouterr().out

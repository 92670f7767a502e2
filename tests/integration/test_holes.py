"""A commit that is missing below a newer one is found when the log is read, and no other commit takes its place."""

import asyncio
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from isthmus.errors import Denied, LogCorrupt
from isthmus.format.records.keys import commit_key
from isthmus.format.rules import Pace, Rules
from isthmus.inspect import live as live_
from isthmus.inspect import status as status_
from isthmus.inspect.live import Live
from isthmus.inspect.replay import replay
from isthmus.inspect.status import read_status
from isthmus.log import heal
from isthmus.log.holes import AHEAD, require_commits, require_whole
from isthmus.log.log_health import STANDS, look, standing
from isthmus.store import Entry, Layer
from isthmus.syncer import snapshots
from isthmus_services.main import main
from support.world import World, in_virtual_time, newest_commit, seed_of, serving, train, until, world

PACE = Pace(heartbeat_s=0.2, silence_s=0.8, snapshot_every=4096)
WHOLE_EVERY_S = 20.0
FEW = seed_of(Rules(fragments=2, sync_every=4), PACE)


async def grown(w: World, versions: int, killed: bool = True) -> int:
    """Train until both fragments have this many versions; return the newest version of the first fragment."""
    async with serving(w.syncer("s1"), killed=killed) as syncer:
        await train(w.learner("l0"), 20, enough=lambda: min(k.head for k in syncer.coordinators) >= versions)
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
            before = syncer.coordinators[1].head
            assert "is missing" in syncer.coordinators[0].broken
            await train(w.learner("l1"), 20, enough=lambda: syncer.coordinators[1].head > before + 4)
        with pytest.raises(LogCorrupt, match="is missing, and version"):
            await require_whole(w.log, 0, hole - 1, lists=True)


async def test_a_hole_below_a_snapshot_is_found_where_the_whole_log_is_read(folder: Path) -> None:
    """A syncer goes on all the same: it needs no commit from before the snapshot."""
    async with world(folder, FEW) as w:
        head = await grown(w, 24, killed=False)
        await w.store.delete(commit_key(0, head - 10))
        lacks, whole = [one.difference for one in await replay(w.log)]
        assert lacks is not None
        assert (lacks.fragment, lacks.version) == (0, head - 10)
        assert lacks.key == commit_key(0, head - 10)
        assert whole is None
        assert [diagnosis.sound for diagnosis in await heal.diagnose(w.log)] == [False, True]
        async with serving(w.syncer("s2")) as syncer:
            await train(w.learner("l1"), 20, enough=lambda: min(k.head for k in syncer.coordinators) > head + 4)


async def test_a_log_that_grows_meanwhile_is_whole(folder: Path) -> None:
    async with world(folder, FEW) as w:
        head = await grown(w, 12)
        for earlier in range(head + 1):
            await require_whole(w.log, 0, earlier, lists=True)


async def test_replay_and_explain_say_so_and_end_with_1(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with world(folder, FEW) as w:
        head = await grown(w, 12, killed=False)
        await w.store.delete(commit_key(0, head - 4))
    assert await asyncio.to_thread(main, ["replay", str(folder)]) == 1
    told = capsys.readouterr().out
    assert "is missing" in told
    assert told.rstrip().endswith(" commits, 1 differs, 4 after these were not compared")
    assert await asyncio.to_thread(main, ["explain", str(folder), f"0/{head - 4}"]) == 1
    told = capsys.readouterr().err
    assert f"{commit_key(0, head - 4)}: is missing, and version {head} is there: nothing is known of " in told
    assert "isthmus heal" in told
    assert await asyncio.to_thread(main, ["explain", str(folder), f"0/{head + 1}"]) == 2
    assert f"there is no commit 0/{head + 1}" in (told := capsys.readouterr().err)
    assert f": the newest of fragment 0 is {head}" in told
    assert await asyncio.to_thread(main, ["explain", str(folder), "99/1"]) == 2
    assert re.search(r"there is no commit 99/1 in \S+: its fragments are 0 to \d", capsys.readouterr().err)
    assert await asyncio.to_thread(main, ["explain", str(folder), "0/nobody/1"]) == 2
    assert f"on version 1 of fragment 0; its newest version, {head}, merges " in capsys.readouterr().err


# --- found without reading the whole log ------------------------------------------------------------------------------


class NoList(Layer):
    """A store that does not allow this user to list commits. The policies of earlier releases did not."""

    async def list(self, prefix: str) -> Sequence[Entry]:
        """List objects; raise `Denied` for commits."""
        if prefix.startswith("commits/"):
            raise Denied(f"{prefix}: 403")
        return await super().list(prefix)


async def test_one_look_finds_a_hole_wherever_it_is(folder: Path) -> None:
    async with world(folder, FEW) as w:
        head = await grown(w, 24, killed=False)
        assert (await look(w.log)).wrong == {}
        for hole in (1, head - 10, head - 1):
            key = commit_key(0, hole)
            kept = await w.store.get(key)
            await w.store.delete(key)
            found = await look(w.log, {0: head})
            assert set(found.wrong) == {0}
            assert found.wrong[0].startswith(f"{key}: is missing, and version ")
            assert found.heads[1] is not None
            await w.store.put(key, kept)
        assert (await look(w.log)).whole_log


async def test_who_may_not_list_looks_for_what_a_new_syncer_needs(folder: Path) -> None:
    async with world(folder, FEW) as w:
        head = await grown(w, 24, killed=False)
        snapshot = (await w.log.snapshots(0))[0][0]
        log = w.through(NoList).log
        found = await look(log)
        assert not found.whole_log
        assert not found.wrong
        await w.store.delete(commit_key(0, 1))
        assert not (await look(log)).wrong, "the missing commit is below the newest snapshot"
        await w.store.delete(commit_key(0, snapshot))
        with pytest.raises(LogCorrupt, match="is missing"):
            await require_commits(log, 0, head)


async def test_a_damaged_commit_hides_neither_its_fragment_nor_others(folder: Path) -> None:
    async with world(folder, FEW) as w:
        head = await grown(w, 24)
        await w.store.put(commit_key(0, head - 2), b"nonsense")
        found = await look(w.log)
        assert "not a commit" in found.wrong[0]
        assert [c.version if c else 0 for c in found.heads] == [head - 3, (await newest_commit(w, 1)).version]


def spoiled(path: Path, how: str) -> bytes:
    """Damage an object in a folder; return what it was. `rotted`: its size and its date stay as they were."""
    kept, at = path.read_bytes(), path.stat().st_mtime
    path.write_bytes({"cut": b"garbage", "shorter": kept[: len(kept) // 3]}.get(how, bytes(reversed(kept))))
    if how != "written again":
        os.utime(path, (at, at))
    return kept


@pytest.mark.parametrize("how", ["cut", "shorter", "written again", "rotted"])
async def test_an_old_commit_that_is_damaged_is_found_by_status(
    folder: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The listing gives all but the last away, however long the log is; that is found when its turn comes."""
    if how != "rotted":
        for module in (status_, live_):
            monkeypatch.setattr(module, "OLDER", 0)
    async with world(folder, FEW) as w:
        assert await grown(w, 24, killed=False) > 20
        path = folder / commit_key(0, 3)
        kept = spoiled(path, how)
        for _ in range(2):
            wrong = (await read_status(w.log, w.bus, w.runtime, 0.1)).wrong
            assert set(wrong) == {0}
            assert wrong[0].startswith(f"{commit_key(0, 3)}: not a commit: ")
        live = Live(w.log, w.store, w.bus, w.runtime)
        await live.begin()
        inspecting = asyncio.ensure_future(live._inspect())
        await until(lambda: set(live.status().wrong) == {0}, "a watch that is started now says it")
        inspecting.cancel()
        if how != "rotted":
            with pytest.raises(LogCorrupt, match="not a commit"):
                await require_commits(w.log, 0, (await newest_commit(w, 0)).version)
        path.write_bytes(kept)
        assert not (await read_status(w.log, w.bus, w.runtime, 0.1)).wrong


def test_status_check_and_doctor_end_with_1(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def hole() -> str:
        async with world(folder, FEW) as w:
            head = await grown(w, 24, killed=False)
            assert head > 12
            await w.store.delete(commit_key(0, head - 10))
            return commit_key(0, head - 10)

    key = asyncio.run(hole())
    assert main(["status", str(folder), "--check"]) == 1
    assert f"{key}: is missing" in " ".join(capsys.readouterr().out.split())
    assert main(["doctor", str(folder)]) == 0, "the run goes on"
    said = capsys.readouterr().out
    assert f"warning log: commits: fragment 0 has a hole in its history (the run goes on): {key}: is missing" in said
    assert "isthmus heal" in said


@in_virtual_time
async def test_a_syncer_at_work_says_it_and_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "WHOLE_EVERY_S", WHOLE_EVERY_S)
    pace = Pace(heartbeat_s=0.2, silence_s=0.8, snapshot_every=8)
    async with world(Path(), seed_of(Rules(fragments=2, sync_every=4), pace)) as w, serving(w.syncer("s1")) as syncer:
        coordinators = syncer.coordinators
        await train(w.learner("l0"), 60, enough=lambda: min(k.head for k in coordinators) >= 12)
        kept = await w.store.get(commit_key(0, 3))
        await w.store.delete(commit_key(0, 3))
        # The syncer looks for holes every `WHOLE_EVERY_S`, not at each snapshot.
        assert coordinators[0].hole == ""
        await asyncio.sleep(WHOLE_EVERY_S)
        head = coordinators[0].head
        await train(w.learner("l1"), 60, enough=lambda: bool(coordinators[0].hole) and coordinators[0].head > head + 8)
        assert commit_key(0, 3) in coordinators[0].hole
        assert not coordinators[1].hole
        assert "fragment 0 has a hole in its history (the run goes on): commits/" in caplog.text
        status = await read_status(w.log, w.bus, w.runtime, 1.0)
        assert status.hearing.syncers["s1"].holed == (0,)
        assert set(status.wrong) == {0}
        await w.store.put(commit_key(0, 3), kept)
        await asyncio.sleep(WHOLE_EVERY_S)
        await train(w.learner("l2"), 60, enough=lambda: not coordinators[0].hole)


@in_virtual_time
async def test_a_syncer_counts_no_hole_that_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "WHOLE_EVERY_S", WHOLE_EVERY_S)
    pace = Pace(heartbeat_s=0.2, silence_s=0.8, snapshot_every=8)
    async with (
        world(Path(), seed_of(Rules(fragments=2, sync_every=4), pace)) as w,
        serving(w.syncer("s1", accepted={0: {3}})) as syncer,
    ):
        first, second = syncer.coordinators
        await train(w.learner("l0"), 60, enough=lambda: min(first.head, second.head) >= 12)
        for p in (0, 1):
            await w.store.delete(commit_key(p, 3))
        await asyncio.sleep(WHOLE_EVERY_S)
        head = first.head
        await train(w.learner("l1"), 60, enough=lambda: bool(second.hole) and first.head > head + 16)
        assert (first.hole, commit_key(1, 3) in second.hole) == ("", True)
        await w.store.delete(commit_key(0, 5))
        await asyncio.sleep(WHOLE_EVERY_S)
        await train(w.learner("l2"), 60, enough=lambda: bool(first.hole))
        assert commit_key(0, 5) in first.hole, "another hole of the same fragment is counted"


# --- a fragment that stands still while others move -------------------------------------------------------------------


def test_a_fragment_stands_when_most_others_were_merged_eight_times_since() -> None:
    last = [10.0, 100.0, 101.0, 102.0]
    assert standing(last, [1.0, 11.0, 12.0, 5.0]) == [0]
    assert standing(last, [1.0, 11.0, 9.0, 5.0]) == []
    assert standing([None, 100.0, 101.0], [None, 1.0, 2.0]) == [0]
    assert standing([None, 100.0, 101.0], [None, 1.0, None]) == []
    assert standing([5.0], [None]) == []
    assert standing([None, None], [None, None]) == []


@in_virtual_time
async def test_a_clock_that_is_wrong_makes_no_fragment_stand() -> None:
    """The syncer of four fragments has a clock ten minutes ahead, so the commits of the two others look old."""
    async with world(Path(), seed_of(Rules(fragments=6, sync_every=4), PACE)) as w:
        wrong = replace(w, runtime=replace(w.runtime, wall=lambda: w.runtime.wall() + 600.0))
        async with serving(wrong.syncer("s1")), serving(w.syncer("s3")):
            await train(w.learner("l0"), 150, step_s=0.05)
        state = await look(w.log)
        heads = [head for head in state.heads if head is not None]
        assert min(head.version for head in heads) > 2 * STANDS
        assert Counter(head.header.writer for head in heads) == {"s1": 4, "s3": 2}
        assert state.standing == []


async def test_a_fragment_that_stands_is_seen(folder: Path) -> None:
    """An object that is no commit lies under the key of a future commit, so its fragment cannot go on."""
    async with world(folder, seed_of(Rules(fragments=3, sync_every=6), PACE)) as w, serving(w.syncer("s1")) as syncer:
        live = Live(w.log, w.store, w.bus, w.runtime)
        await live.begin()
        assert live.status().standing == []
        await w.store.put(commit_key(0, 4), b"nonsense")
        await train(w.learner("l0"), 400, enough=lambda: min(k.head for k in syncer.coordinators[1:]) >= 4 + STANDS)
        assert syncer.coordinators[0].head == 3, "the fragment must be served up to the object that is no commit"
        assert (await look(w.log)).standing == [0]
        assert (await read_status(w.log, w.bus, w.runtime, 0.5)).standing == [0]
        await live._newest()
        assert live.status().standing == [0]

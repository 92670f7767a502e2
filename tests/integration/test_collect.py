"""Garbage collection deletes only what no kept version needs, and a process that slept through it does no harm."""

import asyncio
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from isthmus.errors import Denied, LogCorrupt, ObjectMissing
from isthmus.format.records import frame
from isthmus.format.records.frame import Body, Kind
from isthmus.format.records.keys import commit_key, version_in
from isthmus.format.records.objects import MemberSpec
from isthmus.format.rules import MemberRole, Pace, Rules
from isthmus.format.signing.keys import new_signer, write_signer
from isthmus.learner.backend import local_array
from isthmus.log import Commit, fold, gc, log_health, merge
from isthmus.log.gc import Garbage
from isthmus.log.membership import Members, write
from isthmus.log.merge import State
from isthmus.store import Entry
from isthmus.store.layer import Layer
from isthmus_services.commands import syncer as service
from isthmus_services.main import main
from support.forking import isthmus, nursery
from support.world import (
    Sleepy,
    World,
    all_commits,
    balanced,
    check_log,
    commit_of,
    head,
    in_virtual_time,
    seed_of,
    serving,
    train,
    until,
    world,
)

SMALL = seed_of(Rules(fragments=2, sync_every=2), Pace(heartbeat_s=0.2, silence_s=0.8, snapshot_every=3))


async def grow(w: World, versions: int, **options: Any) -> None:
    """Train until every fragment has this many versions."""
    async with serving(w.syncer("maker"), killed=True) as syncer:
        enough = lambda: min(k.head for k in syncer.coordinators) >= versions  # noqa: E731
        await asyncio.gather(
            *(train(w.learner(f"l{i}", **options), 10, seed=i, enough=enough, step_s=0.005) for i in range(2))
        )


async def collected(w: World, keep: int) -> Garbage:
    plan = await gc.plan(w.log, keep=keep, min_age_s=-1.0)
    await gc.apply(w.log, plan)
    return plan


@in_virtual_time
async def test_what_a_fold_within_the_retention_needs_stays_and_the_rest_goes(folder: Path) -> None:
    async with world(folder, SMALL) as w:
        await grow(w, 20, checkpoint_s=0.05)
        before = await all_commits(w.log)
        states = [(await head(w, p)).carried.digest for p in range(2)]
        plan = await collected(w, keep=6)
        assert plan.doomed.keys() >= {"values", "snapshots", "updates"}
        for p, start in enumerate(plan.starts):
            top = plan.heads[p]
            assert 0 < start <= top - 6
            # All commits are there, unchanged; those below the start are packed.
            after = (await all_commits(w.log))[p]
            assert [c.digest for c in after] == [c.digest for c in before[p]]
            assert [c.in_segment for c in after] == [c.version < start for c in after]
            # Every kept version can be folded, and has the recorded digest.
            for version in range(start, top + 1):
                at = await fold.fold(w.log, p, fold.Merging(w.log), until=version)
                assert at.carried.digest == after[version - 1].header.state_digest
                value = await fold.fold(w.log, p, fold.PublishedValue(w.log), until=version)
                assert merge.array_digest(value.carried) == after[version - 1].header.published_digest
            assert (await head(w, p)).carried.digest == states[p]
            # An older version cannot be folded: the initial snapshot is there, but the updates after it are not.
            with pytest.raises(LogCorrupt, match="is missing"):
                await fold.fold(w.log, p, fold.Merging(w.log), until=start - 1)
            kept = {version_in(e.key) for e in await w.store.list(f"values/{p:05d}/")}
            assert min(kept) >= start
            assert {version_in(e.key) for e in await w.store.list(f"snapshots/{p:05d}/")} - {0} == {
                v for v in range(start, top + 1) if (v + p) % 3 == 0
            }
        # A second collection finds nothing to do.
        again = await gc.plan(w.log, keep=6, min_age_s=-1.0)
        assert (again.objects, again.pack) == (0, [])
        # The run goes on.
        await grow(w, 26)
        for p in range(2):
            assert (await head(w, p)).version >= 26


@in_virtual_time
async def test_age_delays_and_a_plan_changes_nothing(folder: Path) -> None:
    async with world(folder, SMALL) as w:
        await grow(w, 12)
        before = {e.key for e in await w.store.list("")}
        plan = await gc.plan(w.log, keep=4, min_age_s=3600.0)
        assert plan.objects == 0
        assert not plan.pack
        assert plan.young > 0
        assert (await gc.plan(w.log, keep=4, min_age_s=-1.0)).objects > 0
        assert {e.key for e in await w.store.list("")} == before


@in_virtual_time
async def test_nothing_is_collected_below_a_snapshot_that_cannot_be_believed(folder: Path) -> None:
    async with world(folder, SMALL) as w:
        await grow(w, 16)
        top = (await head(w, 0)).version
        chosen = next(v for v, _ in await w.log.snapshots(0) if v <= top - 6)
        key = dict(await w.log.snapshots(0))[chosen]
        blob = await w.store.get(key)
        blob[-1] ^= 1
        await w.store.put(key, blob)
        plan = await collected(w, keep=6)
        assert plan.starts[0] < chosen
        assert (await fold.fold(w.log, 0, fold.Merging(w.log), until=chosen)).version == chosen


@in_virtual_time
async def test_a_collection_that_was_interrupted_is_finished_by_the_next(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(folder, SMALL) as w:
        await grow(w, 16)
        before = await all_commits(w.log)
        plan = await gc.plan(w.log, keep=6, min_age_s=-1.0)
        put, puts = w.store.put, []

        async def dies(key: str, data: Body) -> None:
            puts.append(key)
            if len(puts) == 5:
                raise asyncio.CancelledError
            await put(key, data)

        monkeypatch.setattr(w.store, "put", dies)
        task = asyncio.ensure_future(gc.apply(w.log, plan))
        with pytest.raises(asyncio.CancelledError):
            await task
        monkeypatch.undo()
        assert len({c.in_segment for c in (await all_commits(w.log))[0]}) == 2
        await collected(w, keep=6)
        after = await all_commits(w.log)
        assert {p: [c.digest for c in found] for p, found in after.items()} == {
            p: [c.digest for c in found] for p, found in before.items()
        }


@in_virtual_time
async def test_a_syncer_that_slept_through_a_collection_loses_its_commit_and_goes_on_from_a_snapshot(
    folder: Path,
) -> None:
    """The syncer falls asleep when it has closed a round and is about to write the commit.

    Meanwhile another syncer commits many versions, and the objects of older versions are collected.
    """
    async with world(folder, SMALL) as w:
        await grow(w, 4)
        asleep, wake = asyncio.Event(), asyncio.Event()
        sleepy = w.through(lambda store: Sleepy(store, "commits/", asleep, wake))
        sleeper, awake = sleepy.syncer("sleeper", deaf=True), w.syncer("awake", deaf=True)
        async with serving(sleeper):
            training = [asyncio.ensure_future(train(w.learner(f"l{i}"), 500, seed=i)) for i in range(2)]
            await asleep.wait()
            slept_at = [k.head for k in sleeper.coordinators]
            async with serving(awake):
                await until(lambda: min(k.head for k in awake.coordinators) > max(slept_at) + 14, "the others went on")
                plan = await collected(w, keep=3)
                assert all(start > at + 1 for start, at in zip(plan.starts, slept_at, strict=True))
            top = [k.head for k in awake.coordinators]
            wake.set()
            await until(lambda: all(k.head > t for k, t in zip(sleeper.coordinators, top, strict=True)), "it goes on")
            assert sleeper.tallies.races_lost > 0
            assert not any(k.broken for k in sleeper.coordinators)
            await asyncio.gather(*training)
        for p, commits in (await all_commits(w.log)).items():
            assert [c.version for c in commits] == list(range(1, len(commits) + 1))
            assert (await head(w, p)).version == len(commits)


@in_virtual_time
async def test_a_learner_that_slept_through_a_collection_goes_on_from_a_snapshot(folder: Path) -> None:
    async with world(folder, SMALL) as w:
        await grow(w, 3)
        sleeper = w.learner("sleeper")
        await sleeper.join()
        await grow(w, 20)
        await collected(w, keep=3)
        known = sleeper.downlink.known[0]
        with pytest.raises(ObjectMissing):
            commit = await commit_of(w, 0, known.version + 1)
            await w.store.get(commit.header.value_key)
        top = (await head(w, 0)).version
        sleeper.downlink.want(0, top)
        fetching = asyncio.ensure_future(sleeper.downlink.fetch())
        await until(lambda: sleeper.downlink.known[0].version == top, "caught up")
        fetching.cancel()
        value = await fold.fold(w.log, 0, fold.PublishedValue(w.log))
        assert merge.array_digest(local_array(sleeper.downlink.known[0].values)) == merge.array_digest(value.carried)


@in_virtual_time
async def test_a_fold_that_is_overtaken_by_a_collection_starts_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(folder, SMALL) as w:
        await grow(w, 8)
        log, begun, overtaken = w.log, asyncio.Event(), asyncio.Event()
        carry = fold.Merging(log)
        step = carry.step

        async def slow(carried: State, commit: Commit) -> State:
            begun.set()
            await overtaken.wait()
            return await step(carried, commit)

        monkeypatch.setattr(carry, "step", slow)
        # Start from an old snapshot, like a fold that began long ago.
        old = [await log.snapshots(0), None]

        async def stale(fragment: int) -> list[tuple[int, str]]:
            found, old[0] = old[0], None
            return [s for s in found if s[0] <= 3] if found else await type(log).snapshots(log, fragment)

        monkeypatch.setattr(log, "snapshots", stale)
        folding = asyncio.ensure_future(fold.fold(log, 0, carry))
        await begun.wait()
        await grow(w, 20)
        await collected(w, keep=3)
        overtaken.set()
        at = await folding
        assert at.version >= 20
        assert at.carried.digest == (await head(w, 0)).carried.digest


@in_virtual_time
async def test_damage_in_a_segment_names_it(folder: Path) -> None:
    async with world(folder, SMALL) as w:
        await grow(w, 12)
        await collected(w, keep=3)
        (entry, *_) = await w.store.list("segments/00000/")
        blob = await w.store.get(entry.key)
        blob[-10] ^= 1
        await w.store.put(entry.key, blob)
        with pytest.raises(LogCorrupt, match="says") as caught:
            [c async for c in w.log.commits(0, 0)]
        assert caught.value.key == entry.key
        await w.store.delete(entry.key)
        with pytest.raises(LogCorrupt, match="packed in it"):
            [c async for c in w.log.commits(0, 0)]


@in_virtual_time
async def test_the_key_of_a_packed_commit_cannot_be_created_again(folder: Path) -> None:
    async with world(folder, SMALL) as w:
        await grow(w, 12)
        commit = await w.store.get(commit_key(0, 1))
        await collected(w, keep=3)
        pointer = await w.store.get(commit_key(0, 1))
        assert frame.kind_of(pointer) == Kind.PACKED
        assert len(pointer) < len(commit)
        assert not await w.store.create(commit_key(0, 1), commit)
        # A writer whose reply was lost before the collection still learns that the commit is its own.
        assert await w.log.append(0, 1, commit)
        assert not await w.log.append(0, 1, bytes(commit[:-1]) + b"x")


@in_virtual_time
async def test_a_run_in_flight_is_collected_while_it_trains(folder: Path) -> None:
    async with world(folder, SMALL) as w:
        async with serving(w.syncer("east")) as syncer:
            agents = [w.learner(f"l{i}", checkpoint_s=0.05) for i in range(2)]
            enough = lambda: min(k.head for k in syncer.coordinators) >= 30  # noqa: E731
            training = [asyncio.ensure_future(train(a, 100, seed=i, enough=enough)) for i, a in enumerate(agents)]
            while not all(t.done() for t in training):
                await collected(w, keep=4)
                await asyncio.sleep(0.1)
            await asyncio.gather(*training)
        for agent in agents:
            balanced(agent)
        for p in range(2):
            assert (await head(w, p)).version >= 30


@in_virtual_time
async def test_check_log_needs_everything_and_says_so(folder: Path) -> None:
    """`check_log` folds from version 0, so it must fail on a collected log."""
    async with world(folder, SMALL) as w:
        await grow(w, 12)
        assert await check_log(w) >= 24
        await collected(w, keep=3)
        with pytest.raises(LogCorrupt):
            await check_log(w)


async def test_collected_by_itself_a_store_stays_as_large_as_what_is_kept_while_the_run_goes_on(folder: Path) -> None:
    async with world(folder, SMALL) as w:
        out = folder.parent / "gc.log"

        def lines() -> int:
            return out.read_text().count("objects deleted")

        child = nursery().start(
            ["gc", str(folder), "--apply", "--every", "0.2", "--keep", "4", "--min-age", "0"], os.environ, out, out
        )
        try:
            async with serving(w.syncer()) as syncer:
                enough = lambda: min(k.head for k in syncer.coordinators) >= 40 and lines() >= 4  # noqa: E731
                learners = [w.learner(f"l{i}") for i in range(2)]
                await asyncio.gather(*(train(a, 20, seed=i, enough=enough) for i, a in enumerate(learners)))
            said, heads = lines(), [k.head for k in syncer.coordinators]
            await until(lambda: lines() >= said + 2, "collected twice more, after the end", 120.0)
        finally:
            child.kill()
            child.wait(30.0)
        for p, head_ in enumerate(heads):
            # The kept values are those of four versions and back to the next snapshot; one version in three has one.
            assert len(await w.store.list(f"values/{p:05d}/")) <= 4 + 3
            assert (await head(w, p)).version == head_
        assert "collection failed" not in out.read_text()


async def test_to_collect_again_and_again_without_applying_it_is_refused(folder: Path) -> None:
    async with world(folder, SMALL):
        done = await asyncio.to_thread(isthmus, "gc", str(folder), "--every", "1")
        assert done.returncode == 2
        assert "--every needs --apply" in done.stderr


class Denying(Layer):
    """A store whose policies do not allow to list messages."""

    @override
    async def list(self, prefix: str) -> Sequence[Entry]:
        if prefix == "bus/":
            raise Denied("403")
        return await super().list(prefix)


async def test_the_words_of_processes_that_ended_are_collected_after_a_day(folder: Path) -> None:
    """A bus in the store leaves one object for each process; `status` reads there how a process ended."""
    async with world(folder, SMALL) as w:
        await grow(w, 4)
        for key in ("bus/0123456789abcdef/syncer/aaaaaaaaaaaaaaaa", "bus/0123456789abcdef/syncer/bbbbbbbbbbbbbbbb"):
            await w.store.put(key, b"words")
        hours_ago = time.time() - 3600.0 * 20
        os.utime(folder / "bus/0123456789abcdef/syncer/aaaaaaaaaaaaaaaa", (hours_ago, hours_ago))
        for age_s, left in ((0.0, 2), (3600.0 * 30, 1)):
            os.utime(folder / "bus/0123456789abcdef/syncer/bbbbbbbbbbbbbbbb", 2 * (time.time() - age_s,))
            done = await asyncio.to_thread(isthmus, "gc", str(folder), "--min-age", "0", "--apply")
            assert done.returncode == 0, done.stderr
            assert len(await w.store.list("bus/")) == left
            told = " ".join(done.stdout.split())
            assert f"{left} objects with messages are kept: each goes a day after the last message" in told
            assert "--min-age" not in told
            assert not told.endswith("yet")
        # A collector of before, whose policy does not name this folder, collects the rest.
        os.utime(folder / "bus/0123456789abcdef/syncer/aaaaaaaaaaaaaaaa", (1.0, 1.0))
        assert "messages" in (await gc.plan(w.log, min_age_s=0.0)).doomed
        assert "messages" not in (await gc.plan(w.log.through(Denying(w.store)), min_age_s=0.0)).doomed


# --- in a syncer's process, and before the disk is full ---------------------------------------------------------------


async def test_a_syncer_collects_on_request_and_goes_on(folder: Path) -> None:
    async with world(folder, SMALL) as w:
        await grow(w, 12)
        for key in ("scratch/old", "scratch/new"):
            await w.store.put(key, b"of a doctor that was cut short")
        os.utime(folder / "scratch/old", (1.0, 1.0))
        out = folder.parent / "syncer.log"
        child = nursery().start(["syncer", str(folder), "--name", "s2", "--collect", "0.3"], os.environ, out, out)
        try:
            heads = [len(commits) for commits in (await all_commits(w.log)).values()]
            await until(lambda: out.read_text().count("objects deleted") >= 2, "collected twice", 120.0)
            agent = w.learner("l5")
            await train(agent, 10, enough=lambda: min(k.version for k in agent.downlink.known) > max(heads))
        finally:
            child.kill()
            child.wait(30.0)
        assert [entry.key for entry in await w.store.list("scratch/")] == ["scratch/new"]
        assert "collecting: 1 objects deleted" in out.read_text()
        assert "collection failed" not in out.read_text()


async def test_a_syncer_whose_key_is_no_collectors_does_not_start_as_one(folder: Path, tmp_path: Path) -> None:
    owner, key = new_signer(), new_signer()
    write_signer(tmp_path / "key", key, "s2")
    async with world(folder, replace(SMALL, signer=owner)) as w:
        entries = [MemberSpec("s2", MemberRole.SYNCER, key.author)]
        await write(w.store, Members(w.run), owner, entries, [0, 0], w.runtime.wall())
        arguments = ("syncer", str(folder), "--name", "s2", "--key", str(tmp_path / "key"), "--collect", "60")
        done = await asyncio.to_thread(isthmus, *arguments)
        assert done.returncode == 2
        assert "collector" in done.stderr


@in_virtual_time
async def test_a_run_that_grows_and_is_not_collected_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(log_health, "GROWN", 10)
    monkeypatch.setattr(service, "SPACE_S", 3.0)
    async with world(Path(), SMALL) as w:
        await grow(w, 8)
        assert (await log_health.look(w.log)).uncollected == 0
        await grow(w, 12)
        assert (await log_health.look(w.log)).uncollected == 0, "all of it is young"
        await asyncio.sleep(log_health.LEFT_S)
        await grow(w, 14)
        found = (await log_health.look(w.log)).uncollected
        assert found >= 12
        async with serving(w.syncer("s9")) as syncer:
            watching = asyncio.ensure_future(service._watch_space(syncer, w.log))
            await asyncio.sleep(3 * service.SPACE_S)
            assert caplog.text.count("nothing was collected in") == 1, "this warning must come once a day"
            assert f"isthmus gc {w.run.url} lists what can be deleted" in caplog.text
            monkeypatch.setattr(service, "_share_free", lambda _: 0.04)
            await asyncio.sleep(2 * service.SPACE_S)
            assert caplog.text.count("4 % of the disk of") == 2
            watching.cancel()
        await collected(w, keep=2)
        assert (await log_health.look(w.log)).uncollected == 0


def test_the_share_of_a_disk_that_is_free_is_that_of_the_runs_disk(tmp_path: Path) -> None:
    usage = shutil.disk_usage(tmp_path)
    for url in (str(tmp_path), tmp_path.as_uri()):
        assert service._share_free(url) == pytest.approx(usage.free / usage.total, rel=0.05)
    assert service._share_free("s3://bucket/run") == 1.0


async def test_status_says_that_a_run_grows_until_it_is_collected(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(log_health, "GROWN", 6)
    async with world(folder, SMALL) as w:
        await grow(w, 8)
        os.utime(min((folder / "values/00000").iterdir()), (time.time() - log_health.LEFT_S - 60.0,) * 2)
        for says in (True, False):
            assert await asyncio.to_thread(main, ["status", str(folder)]) in (0, 1)
            said = " ".join(capsys.readouterr().out.split())
            assert (f"isthmus gc {w.run.url} lists" in said) is says, said
            await collected(w, keep=2)

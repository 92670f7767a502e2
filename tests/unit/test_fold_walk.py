"""A fold starts from a sound snapshot, checks what it reads, ends where it should, and goes on after healed damage."""

import dataclasses
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from isthmus.codecs.kernels import F32
from isthmus.errors import Denied, LogCorrupt
from isthmus.format.records import frame
from isthmus.format.records.keys import commit_key, snapshot_key, snapshots_prefix
from isthmus.format.records.objects import UNSTATED
from isthmus.log import Commit, Log, fold, heal, merge
from support.written_log import Written


async def state_at(w: Written, until: int | None = None, keep: int = 1) -> fold.At[merge.State]:
    return await fold.fold(w.log, 0, fold.Merging(w.log), until=until, keep=keep)


async def value_at(w: Written, until: int | None = None) -> fold.At[F32]:
    return await fold.fold(w.log, 0, fold.PublishedValue(w.log), until=until)


def digest_at(w: Written, version: int) -> bytes:
    return w.commits[0][version - 1].header.state_digest


# --- where it starts and ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [0, 1, 3, 4, 5, 8, 9])
def test_every_version_can_be_folded_from_the_newest_snapshot_at_or_below_it(version: int) -> None:
    async def body(w: Written) -> None:
        await w.grow(9, snapshot_every=4)
        w.store.requests.clear()
        at = await state_at(w, version)
        assert at.version == at.carried.version == version
        if version:
            assert at.carried.digest == digest_at(w, version)
        start = version // 4 * 4
        [key] = w.store.of("get", snapshots_prefix(0))
        assert f"/{start:012d}-" in key
        assert len(w.store.of("get", "updates/")) == 2 * (version - start), "no update beyond the version is read"

    Written().drive(body)


def test_a_version_that_is_not_there_yet_is_no_other_one() -> None:
    async def body(w: Written) -> None:
        await w.grow(3)
        with pytest.raises(LogCorrupt, match="version 5 was asked for") as caught:
            await state_at(w, 5)
        assert (caught.value.key, caught.value.readable) == (commit_key(0, 4), (0, 3))

    Written().drive(body)


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_commits_come_along_as_many_as_were_asked_for(keep: int) -> None:
    async def body(w: Written) -> None:
        await w.grow(7, snapshot_every=6)
        for until in (6, 7):
            at = await state_at(w, until, keep)
            assert [commit.version for commit in at.last] == list(range(until + 1 - keep, until + 1))
            assert at.digest == w.commits[0][until - 1].digest

    Written().drive(body)


# --- what it checks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [-1, -4 * 700, 700], ids=["momentum", "master", "published"])
def test_a_damaged_snapshot_is_passed_over(at: int) -> None:
    async def body(w: Written) -> None:
        await w.grow(6, snapshot_every=2)
        newest = max(w.keys(snapshots_prefix(0)))
        blob = w.blob(newest)
        blob[at] ^= 1
        w.put(newest, blob)
        w.store.requests.clear()
        assert (await state_at(w)).carried.digest == digest_at(w, 6)
        assert len(w.store.of("get", snapshots_prefix(0))) == 2
        assert merge.array_digest((await value_at(w)).carried) == w.commits[0][-1].header.published_digest

    Written().drive(body)


def test_a_version_0_of_somebody_elses_is_not_where_anything_starts() -> None:
    async def body(w: Written) -> None:
        own = snapshot_key(0, 0, w.run.header.snapshots[0])
        other = merge.snapshot(merge.initial(w.states[0].published + np.float32(1)), 0, bytes(32))
        w.put(snapshot_key(0, 0, frame.digest(other)), other)
        assert np.array_equal((await value_at(w)).carried, w.states[0].published)
        assert np.array_equal((await state_at(w)).carried.published, w.states[0].published)
        w.world.objects.delete(own)
        with pytest.raises(LogCorrupt, match="the run object names for version 0"):
            await value_at(w)

    Written().drive(body)


def test_a_commit_whose_inputs_come_to_another_state_is_damaged() -> None:
    async def body(w: Written) -> None:
        await w.grow(2)
        await w.commit(state_digest=b"x" * 32)
        with pytest.raises(LogCorrupt, match="its inputs fold to state") as caught:
            await state_at(w)
        assert caught.value.readable == (0, 2)
        assert (await value_at(w)).version == 3, "the published version is as recorded"

    Written().drive(body)


def test_a_commit_need_not_state_its_state_and_then_vouches_for_no_snapshot() -> None:
    async def body(w: Written) -> None:
        await w.grow(2, snapshot_every=2)
        await w.commit(state_digest=UNSTATED)
        w.snapshot()
        await w.commit()
        w.store.requests.clear()
        at = await state_at(w)
        assert at.carried.digest == digest_at(w, 4)
        assert len(w.store.of("get", "updates/")) == 4, "it is folded from version 2"

    Written().drive(body)


def test_in_a_run_of_an_earlier_release_each_commit_states_its_state() -> None:
    async def body(w: Written) -> None:
        await w.commit(state_digest=UNSTATED)
        assert (await w.log.commit(0, 1)) is not None
        old = replace(w.run, header=msgspec.structs.replace(w.run.header, states_at_snapshots=False))
        with pytest.raises(LogCorrupt, match="states no digest of its state"):
            await Log(old, w.log.store, w.log.runtime).commit(0, 1)

    Written().drive(body)


def test_weights_are_part_of_what_is_folded() -> None:
    async def body(w: Written) -> None:
        long, short = w.upload("a", 0, tokens=90_000, steps=9), w.upload("b", 0, tokens=10, steps=10)
        await w.commit(long, short)
        assert (await state_at(w)).carried.digest == digest_at(w, 1)

    Written().drive(body)


def test_a_difference_is_applied_to_the_version_before_and_to_no_other() -> None:
    async def body(w: Written) -> None:
        await w.grow(3)
        before, after = (await value_at(w, 2)).carried, (await value_at(w, 3)).carried
        step = fold.PublishedValue(w.log).step
        assert np.array_equal(await step(before, w.commits[0][2]), after)
        with pytest.raises(LogCorrupt, match="does not give the published version"):
            await step((await value_at(w, 1)).carried, w.commits[0][2])

    Written().drive(body)


@pytest.mark.parametrize("what", ["gone", "other bytes", "refused"])
def test_an_input_that_is_not_to_be_had_is_named_and_is_no_outage(what: str) -> None:
    async def body(w: Written) -> None:
        await w.grow(3)
        key = w.commits[0][1].header.inputs[1].key
        if what == "gone":
            w.world.objects.delete(key)
        elif what == "other bytes":
            w.put(key, w.update("b", 1, tokens=401))
        else:
            w.store.answers = lambda operation, asked: Denied("403") if asked == key else None
        with pytest.raises(LogCorrupt) as caught:
            await state_at(w)
        assert (caught.value.key, caught.value.readable) == (key, (0, 1))

    Written().drive(body)


# --- healing ----------------------------------------------------------------------------------------------------------


async def wound(w: Written, version: int) -> None:
    """Delete an update that this version merged."""
    w.world.objects.delete(w.commits[0][version - 1].header.inputs[0].key)


async def healed(w: Written) -> heal.Diagnosis:
    """Heal the fragment, and let the writer go on from the healed version."""
    [found] = await heal.diagnose(w.log, [0])
    commit = await heal.heal(w.log, found)
    assert commit is not None
    w.commits[0].append(commit)
    w.states[0] = (await state_at(w)).carried
    return found


def test_what_is_broken_and_what_it_starts_again_from_is_said_exactly() -> None:
    async def body(w: Written) -> None:
        await w.grow(6)
        await wound(w, 3)
        [found] = await heal.diagnose(w.log, [0])
        assert found.wound is not None
        assert (found.head, found.wound.broken_at, found.wound.source) == (6, 3, 6)
        assert found.wound.key == w.commits[0][2].header.inputs[0].key
        assert found.head_at == w.commits[0][5].header.written_at
        w.world.objects.delete(w.commits[0][5].header.value_key)
        [found] = await heal.diagnose(w.log, [0])
        assert found.wound is not None
        assert (found.head, found.wound.broken_at, found.wound.source) == (6, 3, 5)

    Written().drive(body)


def test_a_healed_fragment_goes_on_from_what_was_published_without_momentum() -> None:
    async def body(w: Written) -> None:
        await w.grow(5)
        await w.commit(rejected_total={"stale": 7}, clipped_total={"norm": 3})
        await wound(w, 3)
        before = (await value_at(w)).carried
        await healed(w)
        commit = await w.log.commit(0, 7)
        assert commit is not None
        assert commit.header.healed is not None
        assert commit.header.healed.source == 6
        assert commit.header.previous == w.commits[0][5].digest
        assert commit.header.rejected_total == {"stale": 7}
        assert commit.header.clipped_total == {"norm": 3}
        state = (await state_at(w)).carried
        assert np.array_equal(state.published, before)
        assert np.array_equal(state.master, before)
        assert not state.momentum.any()
        assert [version for version, _ in await w.log.snapshots(0)] == [7, 0], "the next fold starts from version 7"
        await w.grow(9)
        assert (await state_at(w)).carried.digest == digest_at(w, 9)

    Written().drive(body)


def test_of_two_that_heal_the_newest_is_where_it_goes_on() -> None:
    async def body(w: Written) -> None:
        await w.grow(3)
        await wound(w, 2)
        await healed(w)
        await w.grow(6)
        for key in w.keys(snapshots_prefix(0)):
            if not key.startswith(f"{snapshots_prefix(0)}{0:012d}"):
                w.world.objects.delete(key)
        first = w.commits[0][3].header
        await wound(w, 6)
        await healed(w)
        for key in w.keys(snapshots_prefix(0)):
            if not key.startswith(f"{snapshots_prefix(0)}{0:012d}"):
                w.world.objects.delete(key)
        w.world.objects.delete(first.value_key)
        at = await state_at(w)
        assert (at.version, at.carried.digest) == (7, digest_at(w, 7))

    Written().drive(body)


def test_whoever_healed_first_is_not_written_over() -> None:
    async def body(w: Written) -> None:
        await w.grow(4)
        await wound(w, 2)
        [found] = await heal.diagnose(w.log, [0])
        assert await heal.heal(w.log, found) is not None
        there = w.blob(commit_key(0, 5))
        snapshots = w.keys(snapshots_prefix(0))
        assert await heal.heal(w.log, dataclasses.replace(found)) is None
        assert w.blob(commit_key(0, 5)) == there
        assert w.keys(snapshots_prefix(0)) == snapshots

    Written().drive(body)


def test_a_damaged_commit_among_the_last_before_the_start_is_named() -> None:
    """The commits before a start tell what is usual and what was merged; a start without one of them is not used."""

    async def body(w: Written) -> None:
        await w.grow(6, snapshot_every=4)
        key = commit_key(0, 3)
        blob = w.blob(key)
        blob[300] ^= 1
        w.put(key, blob)
        merging = fold.Merging(w.log)
        assert (await fold.begin(w.log, 0, merging, keep=4)).version == 0
        assert (await fold.begin(w.log, 0, merging, keep=1)).version == 4
        assert len((await fold.begin(w.log, 0, merging, keep=4, need=1)).last) == 1, (
            "with `need=1`, one commit is enough"
        )

    Written().drive(body)


def test_a_commit_that_is_damaged_on_its_way_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a syncer would record another usual length than a replay computes (seed 40,659)."""

    async def body(w: Written) -> None:
        await w.grow(6)
        w.snapshot()
        damaged = [1, 1]

        async def commit(fragment: int, version: int) -> Commit | None:
            if version in damaged:
                damaged.remove(version)
                raise LogCorrupt(commit_key(fragment, version), "does not match its digest")
            return await own(fragment, version)

        own = w.log.commit
        monkeypatch.setattr(w.log, "commit", commit)
        at = await fold.fold(w.log, 0, fold.ChainOnly(), keep=16, need=2)
        assert [found.version for found in at.last] == [1, 2, 3, 4, 5, 6]
        damaged += [1, 1, 1]
        at = await fold.fold(w.log, 0, fold.ChainOnly(), keep=16, need=2)
        assert [found.version for found in at.last] == [2, 3, 4, 5, 6], (
            "commit 1 is damaged in the store, and is not needed"
        )

    Written().drive(body)

"""The log decides which objects garbage collection deletes; an object's age only delays its deletion."""

import asyncio

import pytest

from isthmus.errors import LogCorrupt
from isthmus.format.records import frame
from isthmus.format.records.frame import Kind
from isthmus.format.records.keys import checkpoint_key, commit_key, part_key, snapshots_prefix, value_key, version_in
from isthmus.format.rules import STALENESS_MAX
from isthmus.log import fold, gc
from isthmus.store import Entry
from support.written_log import Written

AGE_S = 3600.0


async def collected(w: Written, keep: int, min_age_s: float = -1.0) -> gc.Garbage:
    plan = await gc.plan(w.log, keep=keep, min_age_s=min_age_s)
    await gc.apply(w.log, plan)
    return plan


def versions(w: Written, prefix: str) -> list[int]:
    return [version_in(key) for key in w.keys(prefix)]


def doomed(plan: gc.Garbage, kind: str) -> list[int]:
    return sorted(version_in(entry.key) for entry in plan.doomed.get(kind, []))


async def foldable(w: Written, start: int) -> None:
    """Assert that every version from `start` on can be folded, and that all commits can be read, packed or not."""
    for version in range(start, w.states[0].version + 1):
        at = await fold.fold(w.log, 0, fold.Merging(w.log), until=version)
        assert at.carried.digest == w.commits[0][version - 1].header.state_digest
    found = [commit.digest async for commit in w.log.commits(0, 0, w.run.digest)]
    assert found == [commit.digest for commit in w.commits[0]]


# --- by the log -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [3, 4, 5, 6])
def test_the_newest_versions_stay_foldable_as_many_as_were_asked_for(keep: int) -> None:
    async def body(w: Written) -> None:
        await w.grow(12, snapshot_every=2)
        plan = await collected(w, keep)
        start = (12 - keep) // 2 * 2
        assert (plan.starts[0], plan.heads[0]) == (start, 12)
        assert versions(w, snapshots_prefix(0)) == [0, *range(start, 13, 2)]
        assert versions(w, "values/00000/") == list(range(start, 13))
        assert set(versions(w, "updates/00000/")) == set(range(start, 12))
        assert [c.in_segment async for c in w.log.commits(0, 0)] == [v < start for v in range(1, 13)]
        await foldable(w, start)

    Written().drive(body)


def test_what_lies_above_the_head_may_be_of_a_commit_on_its_way() -> None:
    async def body(w: Written) -> None:
        await w.grow(8, snapshot_every=2)
        header, result = w.draft(w.upload("a", 8))
        w.put(header.value_key, result.value)
        w.put(value_key(0, 3, bytes(32)), b"of a merge that lost")
        plan = await collected(w, 2)
        assert header.value_key in w.keys("values/")
        assert value_key(0, 3, bytes(32)) in [e.key for e in plan.doomed["values"]]

    Written().drive(body)


def test_an_update_that_no_commit_speaks_of_stays_until_no_pace_could_merge_it() -> None:
    async def body(w: Written) -> None:
        await w.grow(STALENESS_MAX + 4, snapshot_every=STALENESS_MAX + 2)
        head = w.states[0].version
        keys = {base: w.upload("late", base) for base in (head - STALENESS_MAX - 1, head - STALENESS_MAX, head - 1)}
        await collected(w, 1)
        assert [base for base, key in keys.items() if key in w.keys("updates/00000/late/")] == [
            head - STALENESS_MAX,
            head - 1,
        ]

    Written().drive(body)


def test_two_checkpoints_of_each_learner_stay() -> None:
    async def body(w: Written) -> None:
        keys = [
            checkpoint_key(who, life, step, bytes(32)) for who in "ab" for life, step in ((1, 90), (2, 10), (2, 20))
        ]
        for key in keys:
            w.put(key, b"checkpoint")
        plan = await collected(w, 1)
        assert [e.key for e in plan.doomed["checkpoints"]] == [keys[0], keys[3]], (
            "each learner's checkpoint of its earlier incarnation"
        )

    Written().drive(body)


def test_parts_go_with_the_checkpoint_that_they_are_of() -> None:
    async def body(w: Written) -> None:
        for life, step in ((1, 90), (2, 10), (2, 20)):
            w.put(checkpoint_key("a", life, step, bytes(32)), b"checkpoint")
        stands = [("a", 1, 90), ("a", 2, 10), ("a", 2, 20), ("a", 2, 30), ("b", 2, 20)]
        keys = [part_key(*stand, rank, bytes(32)) for stand in stands for rank in (0, 1)]
        for key in keys:
            w.put(key, b"part")
        plan = await collected(w, 1)
        gone = {e.key for e in plan.doomed["checkpoints"]}
        assert gone == {checkpoint_key("a", 1, 90, bytes(32)), *keys[:2], *keys[6:]}, (
            "parts without a checkpoint go, too"
        )

    Written().drive(body)


def test_what_a_commit_merged_whose_bytes_are_not_what_the_next_one_names_is_not_packed() -> None:
    async def body(w: Written) -> None:
        await w.grow(8, snapshot_every=2)
        plan = await gc.plan(w.log, keep=2, min_age_s=-1.0)
        w.replace_commit(3, written_at=1.0)
        before = w.keys()
        with pytest.raises(LogCorrupt, match="is not the commit that") as caught:
            await gc.apply(w.log, plan)
        assert caught.value.key == commit_key(0, 3)
        assert w.keys() == before, "nothing was deleted or stored"

    Written().drive(body)


# --- by age -----------------------------------------------------------------------------------------------------------


def test_each_object_that_is_young_is_counted_once() -> None:
    found = gc.Garbage()
    entries = [Entry(f"updates/{n}", 1, float(n)) for n in range(7)]
    gc._doom(found, "updates", entries, before=3.0)
    assert found.young == 3
    assert [entry.key for entry in found.doomed["updates"]] == [f"updates/{n}" for n in range(4)]


async def aged(w: Written, versions: int, later: int, snapshot_every: int = 2) -> None:
    """Grow the log to `versions`, let it age, then grow it to `later`."""
    await w.grow(versions, snapshot_every=snapshot_every)
    await asyncio.sleep(2 * AGE_S)
    await w.grow(later, snapshot_every=snapshot_every)


def test_a_snapshot_too_young_to_go_is_a_place_to_start_from_so_what_follows_it_stays() -> None:
    async def body(w: Written) -> None:
        await w.grow(12, snapshot_every=4)
        await asyncio.sleep(2 * AGE_S)
        [young] = [key for key in w.keys(snapshots_prefix(0)) if version_in(key) == 4]
        w.put(young, w.blob(young))  # as if it had been copied from elsewhere
        plan = await collected(w, 1, AGE_S)
        assert plan.starts[0] == 4
        await foldable(w, 4)
        assert doomed(plan, "values") == [1, 2, 3]

    Written().drive(body)


def test_commits_are_packed_once_they_are_old_and_what_the_others_merged_stays() -> None:
    async def body(w: Written) -> None:
        await aged(w, 6, 12)
        plan = await collected(w, 2, AGE_S)
        assert plan.pack == [[(0, version) for version in range(1, 7)]]
        # A fold from version 0 reads commits 7 and later, so the updates that these merged must stay.
        assert set(versions(w, "updates/00000/")) >= set(range(6, 12))
        assert set(versions(w, "updates/00000/")).isdisjoint(range(6))
        assert plan.starts[0] == 8, "the oldest snapshot that is too young to go"
        await foldable(w, 8)

    Written().drive(body)


def test_the_first_commit_that_is_too_young_is_not_packed() -> None:
    async def body(w: Written) -> None:
        await w.grow(3)
        await w.commit(written_at=w.runtime.wall() + AGE_S)  # by a clock that is ahead
        await w.grow(10, snapshot_every=10)
        await asyncio.sleep(1.5 * AGE_S)
        await w.grow(12, snapshot_every=12)
        plan = await gc.plan(w.log, keep=1, min_age_s=AGE_S)
        assert plan.pack == [[(0, version) for version in (1, 2, 3)]], "the commits after the young one must wait"
        # Replay can begin at version 0 and read the commits that are not packed, so the updates that they merged stay
        # although they are old.
        assert sorted({*doomed(plan, "updates")}) == [0, 1, 2]
        assert doomed(plan, "values") == [1, 2, 3]

    Written().drive(body)


# --- interrupted ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [1, 2, 3, 5, 8, 13])
def test_a_collection_cut_short_leaves_no_snapshot_that_leads_nowhere(after: int) -> None:
    """Whichever objects were deleted, the end of the log can be reached from every snapshot that is left."""

    async def body(w: Written) -> None:
        await w.grow(12, snapshot_every=2)
        plan = await gc.plan(w.log, keep=2, min_age_s=-1.0)
        left = iter(range(after))
        w.store.answers = lambda operation, key: (
            ConnectionError("killed") if operation == "delete" and next(left, None) is None else None
        )
        with pytest.raises(BaseExceptionGroup):
            await gc.apply(w.log, plan)
        w.store.answers = lambda operation, key: None
        await asyncio.sleep(60.0)  # requests that were sent still take effect
        for version in versions(w, snapshots_prefix(0)):
            if version == 0:
                continue
            log = w.log
            at = await fold.begin(log, 0, fold.Merging(log), at_most=version)
            assert at.version == version
            async for further in fold.onward(log, 0, fold.Merging(log), at):
                at = further
            assert at.version == 12
        await collected(w, 2)
        await foldable(w, 10)

    Written().drive(body)


def test_nothing_else_goes_as_long_as_a_snapshot_that_has_to_go_is_there() -> None:
    async def body(w: Written) -> None:
        await w.grow(12, snapshot_every=2)
        plan = await gc.plan(w.log, keep=2, min_age_s=-1.0)
        [first] = [key for key in w.keys(snapshots_prefix(0)) if version_in(key) == 2]
        w.store.answers = lambda operation, key: (
            ConnectionError("away") if (operation, key) == ("delete", first) else None
        )
        with pytest.raises(BaseExceptionGroup):
            await gc.apply(w.log, plan)
        await asyncio.sleep(60.0)
        assert first in w.keys(snapshots_prefix(0))
        assert versions(w, "values/00000/") == list(range(1, 13))
        assert set(versions(w, "updates/00000/")) == set(range(12))

    Written().drive(body)


def test_what_is_packed_is_where_its_pointer_says() -> None:
    async def body(w: Written) -> None:
        await w.grow(10, snapshot_every=8)
        await collected(w, 1)
        for version in range(1, 8):
            assert frame.kind_of(w.blob(commit_key(0, version))) == Kind.PACKED
            found = await w.log.commit(0, version)
            assert found is not None
            assert (found.in_segment, found.digest) == (True, w.commits[0][version - 1].digest)

    Written().drive(body)

"""The log accepts only commits that continue its chain, reads ahead, and knows a syncer's own commit from another's."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from isthmus.errors import LogCorrupt, Unavailable
from isthmus.format.records import frame
from isthmus.format.records.frame import Body, Kind
from isthmus.format.records.keys import commit_key
from isthmus.format.records.objects import CommitHeader, Healed, SegmentHeader
from isthmus.log import Commit, gc
from isthmus.log.commits import AHEAD_MAX
from support.written_log import ONE_WAY_S, Written


async def walked(w: Written, after: int = 0, digest: bytes | None = None) -> list[int]:
    return [commit.version async for commit in w.log.commits(0, after, digest)]


async def commit_of(w: Written, version: int) -> Commit:
    found = await w.log.commit(0, version)
    assert found is not None
    return found


async def end_of(w: Written, hint: int = 0) -> int:
    newest = await w.log.newest(0, hint=hint)
    assert newest is not None
    return newest.version


async def packed(w: Written, keep: int = 1) -> str:
    """Pack the commits below the oldest snapshot kept; return the key of the segment."""
    await gc.apply(w.log, await gc.plan(w.log, keep=keep, min_age_s=-1.0))
    [key] = w.keys("segments/00000/")
    return key


# --- accepted commits -------------------------------------------------------------------------------------------------


def test_a_commit_that_follows_another_one_is_another_history() -> None:
    async def body(w: Written) -> None:
        await w.grow(3)
        w.replace_commit(2, previous=bytes(32))
        with pytest.raises(LogCorrupt, match="another history") as caught:
            await walked(w, 0, w.run.digest)
        assert caught.value.key == commit_key(0, 2)
        assert caught.value.readable == (0, 1)

    Written().drive(body)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"fragment": 1}, "and is commits/00001/000000000002"),
        ({"version": 3}, "and is commits/00000/000000000003"),
        ({"run": bytes(32)}, "belongs to another run"),
        ({"arithmetic": 2}, "written with arithmetic 2"),
        ({"inputs": ()}, "merges nothing and does not heal"),
        ({"healed": Healed(source=1, broken_at=2, key="k", why="")}, "merges and heals at once"),
    ],
)
def test_what_stands_under_a_key_is_that_commit_or_none(changed: Mapping[str, Any], why: str) -> None:
    async def body(w: Written) -> None:
        await w.grow(2)
        w.replace_commit(2, **changed)
        with pytest.raises(LogCorrupt, match=why):
            await w.log.commit(0, 2)
        with pytest.raises(LogCorrupt, match=why):
            await walked(w)

    Written().drive(body)


# --- walking ----------------------------------------------------------------------------------------------------------


def test_a_long_log_is_asked_for_ahead_and_not_for_ever() -> None:
    async def body(w: Written) -> None:
        await w.grow(60)
        w.store.requests.clear()
        began = w.clock.time()
        assert await walked(w, 0, w.run.digest) == list(range(1, 61))
        # One request at a time would take 61 round trips to the store.
        assert w.clock.time() - began < 61 / 3 * 2 * ONE_WAY_S
        asked = [int(key.rsplit("/")[-1]) for key in w.store.of("get", "commits/")]
        assert sorted(asked) == list(range(1, len(asked) + 1)), "each commit is read once"
        assert len(asked) <= 60 + AHEAD_MAX

    Written().drive(body)


@pytest.mark.parametrize("after", [0, 1, 3, 8, 11])
def test_packed_commits_come_as_they_were_wherever_the_walk_begins(after: int) -> None:
    async def body(w: Written) -> None:
        await w.grow(14, snapshot_every=12)
        before = [commit.digest for commit in w.commits[0]]
        await packed(w)
        found = [commit async for commit in w.log.commits(0, after, before[after - 1] if after else w.run.digest)]
        assert [commit.version for commit in found] == list(range(after + 1, 15))
        assert [commit.digest for commit in found] == before[after:]
        assert [commit.in_segment for commit in found] == [commit.version < 12 for commit in found]

    Written().drive(body)


def test_a_segment_is_read_for_all_of_its_commits_at_once() -> None:
    async def body(w: Written) -> None:
        for top in (20, 40):
            await w.grow(top)
            w.snapshot()
            await w.grow(top + 1)
            await gc.apply(w.log, await gc.plan(w.log, keep=1, min_age_s=-1.0))
        first, second = w.keys("segments/00000/")
        w.store.requests.clear()
        assert await walked(w, 0, w.run.digest) == list(range(1, 42))
        # The first commit of each segment is read alone, before it is known that the whole segment is wanted. The last
        # one is checked by its pointer, since no commit in the segment vouches for it.
        assert len(w.store.of("get", first)) == 2
        assert len(w.store.of("get", second)) == 2

    Written().drive(body)


def changed_in(segment: Body, number: int, **changed: Any) -> Body:
    """Return a segment in which one commit was replaced by another valid one."""
    header, payload = frame.parse(segment, Kind.SEGMENT, SegmentHeader)
    start = sum(header.sizes[:number])
    was = bytes(payload[start : start + header.sizes[number]])
    commit, _ = frame.parse(was, Kind.COMMIT, CommitHeader)
    other = frame.draft(Kind.COMMIT, msgspec.structs.replace(commit, **changed)).blob
    assert len(other) == len(was)
    offset = len(segment) - sum(header.sizes) + start
    segment[offset : offset + len(was)] = other
    return segment


@pytest.mark.parametrize("number", [4, 10], ids=["in the middle", "the last"])
def test_a_commit_replaced_in_a_segment_is_noticed_and_the_segment_named(number: int) -> None:
    """A segment vouches for none of its commits: the next commit does, or the digest in the commit's own pointer."""

    async def body(w: Written) -> None:
        await w.grow(14, snapshot_every=12)
        segment = await packed(w)
        w.put(segment, changed_in(w.blob(segment), number, written_at=1.0))
        read = []
        with pytest.raises(LogCorrupt, match="says") as caught:
            async for commit in w.log.commits(0, 0, w.run.digest):
                read.append(commit.version)
        assert caught.value.key == segment
        assert read == list(range(1, number + 1)), "the commits before it are read"

    Written().drive(body)


def test_a_pointer_into_a_damaged_segment_says_so() -> None:
    async def body(w: Written) -> None:
        await w.grow(14, snapshot_every=12)
        segment = await packed(w)
        w.put(segment, changed_in(w.blob(segment), 4, written_at=1.0))
        assert (await commit_of(w, 4)).version == 4
        with pytest.raises(LogCorrupt, match="says") as caught:
            await w.log.commit(0, 5)
        assert caught.value.key == segment

    Written().drive(body)


# --- finding versions -------------------------------------------------------------------------------------------------


def test_the_end_is_looked_for_from_the_newest_snapshot_on() -> None:
    async def body(w: Written) -> None:
        await w.grow(20, snapshot_every=6)
        w.store.requests.clear()
        assert await end_of(w) == 20
        assert w.store.of("get") == [commit_key(0, v) for v in (18, 19, 20, 21)]
        w.store.requests.clear()
        assert await end_of(w, hint=19) == 20
        assert w.store.of("get") == [commit_key(0, v) for v in (19, 20, 21)]
        assert await w.log.newest(1) is None

    Written().drive(body)


@pytest.mark.parametrize(("after_s", "version"), [(-0.5, 0), (0.0, 1), (0.5, 1), (1.0, 2), (4.0, 5), (100.0, 5)])
def test_what_was_written_at_a_time_is_there_at_that_time(after_s: float, version: int) -> None:
    async def body(w: Written) -> None:
        for second in range(5):
            await w.commit(written_at=1e9 + second)
        assert await w.log.version_at(0, 1e9 + after_s) == version

    Written().drive(body)


# --- appending --------------------------------------------------------------------------------------------------------


def test_a_commit_whose_reply_was_lost_is_ours_and_another_one_is_not() -> None:
    async def body(w: Written) -> None:
        await w.grow(1)
        ours = w.blob(commit_key(0, 1))
        assert await w.log.append(0, 1, ours) is True
        header, _ = frame.parse(ours, Kind.COMMIT, CommitHeader)
        other = frame.draft(Kind.COMMIT, msgspec.structs.replace(header, attempt="another")).blob
        assert await w.log.append(0, 1, other) is False
        assert w.blob(commit_key(0, 1)) == ours

    Written().drive(body)


def test_an_append_goes_on_with_the_same_bytes_until_its_outcome_is_known() -> None:
    async def body(w: Written) -> None:
        header, _ = w.draft(w.upload("a", 0))
        tries = iter([Unavailable("lost"), Unavailable("lost"), None])
        w.store.answers = lambda operation, key: next(tries) if operation == "create" else None
        assert await w.log.append(0, 1, frame.draft(Kind.COMMIT, header).blob) is True
        assert w.store.of("create") == [commit_key(0, 1)] * 3
        assert (await commit_of(w, 1)).header == header

    Written().drive(body)

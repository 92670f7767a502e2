"""The downlink fetches the fragment that is furthest behind first, and a false message costs one look at the store."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from isthmus.errors import Unavailable
from isthmus.format.records.keys import commit_key, snapshots_prefix
from isthmus.format.rules import Pace, Rules
from isthmus.learner.backend import LocalBackend, local_array
from isthmus.learner.boundary import Ready, ToTraining
from isthmus.learner.downlink import PROBE_BEATS, Downlink
from isthmus.log import Commit
from isthmus.log.merge import array_digest
from support.written_log import ONE_WAY_S, Written

RULES = Rules(fragments=3, sync_every=4)
PACE = Pace(heartbeat_s=1.0, silence_s=3.0, snapshot_every=4)


class Kept(Downlink):
    """A downlink that keeps the commits that it settled and the messages that it sent to training."""

    def __init__(self, w: Written) -> None:
        self.settled: list[Commit] = []
        self.told: list[ToTraining] = []
        super().__init__(
            w.log, w.runtime, w.pace, LocalBackend(w.log), settle=self.settled.append, tell=self.told.append
        )

    @property
    def ready(self) -> list[Ready]:
        """The versions that were handed to training; nothing else may have been."""
        ready = [message for message in self.told if isinstance(message, Ready)]
        assert len(ready) == len(self.told)
        return ready


@asynccontextmanager
async def learner(w: Written, fetchers: int = 1) -> AsyncIterator[Kept]:
    """Run a learner's downlink that has read the log and fetches every version that it hears of."""
    downlink = Kept(w)
    await downlink.begin()
    w.store.requests.clear()
    tasks = [asyncio.ensure_future(downlink.fetch()) for _ in range(fetchers)]
    try:
        yield downlink
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def versions(downlink: Kept) -> list[tuple[int, int]]:
    """Return fragment and version of what was handed to training."""
    return [(ready.fragment, ready.version) for ready in downlink.ready]


def is_published(w: Written, ready: Ready, p: int = 0) -> bool:
    return array_digest(local_array(ready.values)) == w.commits[p][ready.version - 1].header.published_digest


async def all_grow(w: Written, *heads: int) -> None:
    for p, head in enumerate(heads):
        await w.grow(head, p, snapshot_every=4)


# --- announced versions -----------------------------------------------------------------------------------------------


def test_a_version_that_was_said_is_fetched_and_handed_on() -> None:
    async def body(w: Written) -> None:
        async with learner(w) as downlink:
            await w.commit()
            downlink.want(0, 1)
            await asyncio.sleep(1.0)
            [ready] = downlink.ready
            assert (ready.fragment, ready.version) == (0, 1)
            assert is_published(w, ready)
            assert [commit.version for commit in downlink.settled] == [1]

    Written(RULES, PACE).drive(body)


@pytest.mark.parametrize("said", [1, 7, 10**9])
def test_a_version_that_does_not_exist_costs_one_look(said: int) -> None:
    async def body(w: Written) -> None:
        async with learner(w) as downlink:
            downlink.want(0, said)
            await asyncio.sleep(600.0)
            assert len(w.store.requests) <= 4, "one look at the log, from a snapshot if much is missing"
            assert versions(downlink) == [], "training gets no message, as each one copies the fragment"
            await w.commit()
            downlink.want(0, 1)
            await asyncio.sleep(1.0)
            assert versions(downlink) == [(0, 1)], "the next true message is believed"

    Written(RULES, PACE).drive(body)


def test_words_of_other_fragments_and_older_versions_cost_nothing() -> None:
    async def body(w: Written) -> None:
        await w.grow(2)
        async with learner(w) as downlink:
            downlink.want(99, 1)
            downlink.want(0, 2)
            await asyncio.sleep(10.0)
            assert w.store.requests == []

    Written(RULES, PACE).drive(body)


def test_a_commit_nobody_told_of_is_found_after_a_while_of_silence() -> None:
    """As long as a syncer is heard on other fragments, that takes a while: only the message was lost."""

    async def body(w: Written) -> None:
        async with learner(w) as downlink:
            probing = asyncio.ensure_future(downlink.probe())
            await w.commit()
            w.store.requests.clear()
            for second in range(2 * PROBE_BEATS):
                if second == PROBE_BEATS:
                    assert w.store.requests == []
                downlink.want(1, 0)
                downlink.want(2, 0)
                await asyncio.sleep(PACE.heartbeat_s)
            probing.cancel()
            assert versions(downlink) == [(0, 1)]

    Written(RULES, PACE).drive(body)


def test_if_no_syncer_is_heard_the_store_is_asked_soon_and_then_ever_less() -> None:
    async def body(w: Written) -> None:
        async with learner(w) as downlink:
            probing = asyncio.ensure_future(downlink.probe())
            await w.commit()  # the last one before the outage
            w.store.requests.clear()
            asked: list[float] = []
            for second in range(120):
                await asyncio.sleep(1.0)
                asked += [second + 1.0] * sum(key == commit_key(1, 1) for _, key in w.store.requests)
                w.store.requests.clear()
            probing.cancel()
            assert versions(downlink) == [(0, 1)]
            assert PACE.silence_s <= asked[0] <= PACE.silence_s + 2.0
            waits = [after - before for before, after in itertools.pairwise(asked)]
            assert PACE.silence_s <= min(waits)
            assert waits[0] <= PACE.silence_s + 2.0
            assert PROBE_BEATS - 1.0 <= min(waits[-3:]) <= max(waits[-3:]) <= PROBE_BEATS + 2.0
            assert len(asked) <= 16

    Written(RULES, PACE).drive(body)


def test_only_a_fetch_of_one_version_says_how_long_one_takes() -> None:
    async def body(w: Written) -> None:
        async with learner(w) as downlink:
            for head, measured in ((2, False), (3, True)):
                await w.grow(head)
                downlink.want(0, head)
                await asyncio.sleep(10.0)
                assert versions(downlink)[-1] == (0, head)
                assert (downlink.sync_s > 0.0) is measured

    Written(RULES, PACE).drive(body)


# --- the order of fetches ---------------------------------------------------------------------------------------------


def test_whoever_is_furthest_behind_is_fetched_first_whatever_its_number() -> None:
    async def body(w: Written) -> None:
        async with learner(w) as downlink:
            await all_grow(w, 1, 3, 2)
            for p, head in enumerate((1, 3, 2)):
                downlink.want(p, head)
            await asyncio.sleep(10.0)
            assert versions(downlink) == [(1, 3), (2, 2), (0, 1)]

    Written(RULES, PACE).drive(body)


def test_of_several_equally_far_behind_it_is_whoever_was_brought_longest_ago() -> None:
    async def body(w: Written) -> None:
        async with learner(w) as downlink:
            for p in (2, 0, 1):
                await w.commit(p=p)
                downlink.want(p, 1)
                await asyncio.sleep(1.0)
            downlink.told.clear()
            await all_grow(w, 2, 2, 2)
            for p in range(3):
                downlink.want(p, 2)
            await asyncio.sleep(10.0)
            assert versions(downlink) == [(2, 2), (0, 2), (1, 2)]

    Written(RULES, PACE).drive(body)


def test_a_fragment_that_cannot_be_fetched_does_not_stop_the_others() -> None:
    async def body(w: Written) -> None:
        async with learner(w, fetchers=2) as downlink:
            await all_grow(w, 2, 1, 1)
            w.store.answers = lambda operation, key: Unavailable("away") if key == commit_key(0, 1) else None
            for p, head in enumerate((2, 1, 1)):
                downlink.want(p, head)
            await asyncio.sleep(20.0)
            assert sorted(versions(downlink)) == [(1, 1), (2, 1)]
            w.store.answers = lambda operation, key: None
            await asyncio.sleep(20.0)
            assert versions(downlink)[-1] == (0, 2)

    Written(RULES, PACE).drive(body)


# --- by differences or from a snapshot --------------------------------------------------------------------------------


def test_a_version_or_two_behind_differences_are_fetched_and_no_snapshot() -> None:
    async def body(w: Written) -> None:
        await w.grow(4, snapshot_every=4)
        async with learner(w) as downlink:
            await w.grow(6)
            downlink.want(0, 6)
            await asyncio.sleep(5.0)
            assert versions(downlink) == [(0, 6)]
            assert w.store.of("list") == w.store.of("get", snapshots_prefix(0)) == []
            assert len(w.store.of("get", "values/")) == 2

    Written(RULES, PACE).drive(body)


def test_far_behind_a_snapshot_is_read_and_every_commit_on_the_way_is_settled_all_the_same() -> None:
    async def body(w: Written) -> None:
        async with learner(w) as downlink:
            await w.grow(42, snapshot_every=4)
            downlink.want(0, 42)
            await asyncio.sleep(60.0)
            assert is_published(w, downlink.ready[-1])
            assert [commit.version for commit in downlink.settled] == list(range(1, 43))
            assert len(w.store.of("get_range", snapshots_prefix(0))) == 1
            assert len(w.store.of("get", "values/")) == 2

    Written(RULES, PACE).drive(body)


def test_what_is_brought_is_the_version_that_was_asked_for_also_where_the_log_runs_ahead() -> None:
    """On a thin link the log may grow as fast as it is read. A downlink that chased its end would hand on nothing."""

    async def body(w: Written) -> None:
        async with learner(w) as downlink:
            await w.grow(60, snapshot_every=4)
            downlink.want(0, 42)
            await asyncio.sleep(60.0)
            assert versions(downlink) == [(0, 42)]
            assert is_published(w, downlink.ready[-1])

    Written(RULES, PACE).drive(body)


def test_how_long_a_version_takes_is_measured_where_only_one_was_missing() -> None:
    async def body(w: Written) -> None:
        async with learner(w) as downlink:
            await w.commit()
            downlink.want(0, 1)
            await asyncio.sleep(1.0)
            once = downlink.sync_s
            assert 2 * 2 * ONE_WAY_S <= once < 0.5, (
                "a commit and a value are requested, and each request goes there and back"
            )
            await w.grow(4)
            downlink.want(0, 4)
            await asyncio.sleep(1.0)
            assert downlink.sync_s == once

    Written(RULES, PACE).drive(body)


def test_a_learner_that_begins_reads_the_newest_values_and_who_was_merged_lately() -> None:
    async def body(w: Written) -> None:
        await w.grow(3)
        await w.commit(w.upload("c", 3))
        async with learner(w) as downlink:
            assert [known.version for known in downlink.known] == [4, 0, 0]
            assert np.array_equal(local_array(downlink.known[0].values), w.states[0].published)
            assert downlink.merged_lately == {"c"}
            await w.commit(p=1)
            await downlink.reach([4, 1, 0])
            assert [known.version for known in downlink.known] == [4, 1, 0]
            assert not w.store.of("list", snapshots_prefix(0))

    Written(RULES, PACE).drive(body)


def test_nothing_is_fetched_twice_by_several_fetchers() -> None:
    async def body(w: Written) -> None:
        async with learner(w, fetchers=4) as downlink:
            await all_grow(w, 2, 2, 2)
            for p in range(3):
                downlink.want(p, 2)
            await asyncio.sleep(10.0)
            assert sorted(versions(downlink)) == [(0, 2), (1, 2), (2, 2)]
            values = w.store.of("get", "values/")
            assert len(values) == len(set(values)) == 6

    Written(RULES, PACE).drive(body)

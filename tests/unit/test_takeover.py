"""A syncer takes over a fragment once it has folded its state, and leaves it to others if it cannot (virtual time)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec
import pytest

from isthmus.errors import Unavailable
from isthmus.format.rules import Pace, Rules
from isthmus.log import Log
from isthmus.log.merge import state_bytes
from isthmus.store import EdgeStore, Patience
from isthmus.syncer import Syncer, agent, fragment_reader, snapshots
from isthmus.syncer.inbox import Heard
from isthmus.syncer.snapshots import snapshot_after
from isthmus_lab.simulate.conditions import Conditions
from support.written_log import ONE_WAY_S, Asked, Written, unstated

RULES = Rules(fragments=4, sync_every=4)
PACE = Pace(heartbeat_s=1.0, silence_s=3.0, snapshot_every=4096)
ONCE = Patience(attempts=1)


class Serving(Syncer):
    """A syncer for which the answers of the store can be replaced."""

    wire: Asked


@asynccontextmanager
async def syncer(w: Written, latency_s: float = ONE_WAY_S) -> AsyncIterator[Serving]:
    """Start a syncer of this run, and kill it at the end."""
    process = w.world.process("syncer", len(w.store.requests))
    ports = w.world.ports(process, Conditions(latency_s=latency_s), Conditions(latency_s=ONE_WAY_S))
    wire = Asked(ports.wire)
    store = EdgeStore(wire, process.runtime, ONCE)
    found = Serving(Log(w.run, store, process.runtime), store, ports.bus, process.runtime, "s1", None)
    found.wire = wire
    await found.recover()
    task = process.start(found.run(asyncio.Event()))
    try:
        yield found
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def grown(w: Written, versions: int = 3) -> None:
    for p in range(4):
        await w.grow(versions, p)


def test_at_start_commits_are_read_and_states_when_fragments_are_taken() -> None:
    async def body(w: Written) -> None:
        await grown(w)
        async with syncer(w) as serving:
            assert not serving.wire.of("get", "updates/")
            assert not serving.wire.of("get", "snapshots/")
            assert [k.head for k in serving.coordinators] == [3] * 4
            assert all(k.state is None for k in serving.coordinators)
            await asyncio.sleep(5.0)
            assert serving.held == {0, 1, 2, 3}
            for p, k in enumerate(serving.coordinators):
                assert k.state is not None
                assert k.state.digest == w.states[p].digest
                assert k.rounds.holding
            assert len(serving.wire.of("get", "snapshots/")) == 4
            assert serving.fold_s > 0.0

    Written(RULES, PACE).drive(body)


def test_a_version_that_only_a_message_names_counts_until_the_log_was_read() -> None:
    """Otherwise a false message would make a syncer read the log for ever, and give the fragment away."""

    async def body(w: Written) -> None:
        await grown(w)
        async with syncer(w) as serving:
            await asyncio.sleep(5.0)
            coordinator = serving.coordinators[0]
            reader = coordinator._reader
            coordinator.offer("s2", Heard(50))
            await asyncio.sleep(PACE.silence_s)
            asked = len(serving.wire.of("get", "commits/00000/"))
            await asyncio.sleep(3 * PACE.silence_s)
            assert len(serving.wire.of("get", "commits/00000/")) == asked, "the log is not read for ever"
            assert serving.held == {0, 1, 2, 3}
            assert (reader.said, reader.retries, reader.overdue(0.0)) == (0, False, False)
            # A version that is named while the log is read is looked for by the next read.
            reader.learn_of(9, hearsay=True)
            reader.looked(8)
            assert (reader.said, reader.retries) == (9, True)
            reader.looked(9)
            assert (reader.said, reader.retries) == (0, False)

    Written(RULES, PACE).drive(body)


def test_what_waits_for_its_turn_to_be_folded_is_not_given_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """One fold at a time from a distant store: the last one ends long after a silent syncer would count as dead."""
    monkeypatch.setattr(agent, "FOLDS_MAX", 1)

    async def body(w: Written) -> None:
        await grown(w)
        async with syncer(w, latency_s=0.5) as serving:
            await asyncio.sleep(1.0)
            folded_at: dict[int, float] = {}
            for _ in range(400):
                await asyncio.sleep(0.1)
                assert not serving._broken
                for p, k in enumerate(serving.coordinators):
                    if k.state is not None:
                        folded_at.setdefault(p, w.clock.time())
            times = sorted(folded_at.values())
            assert len(times) == 4
            assert times[-1] - times[0] > 2 * serving._holders.silent_s

    Written(RULES, PACE).drive(body)


def test_a_fold_that_comes_to_nothing_leaves_the_fragment_to_others_until_it_does() -> None:
    async def body(w: Written) -> None:
        await grown(w)
        async with syncer(w) as serving:
            serving.wire.answers = lambda operation, key: (
                Unavailable("not now") if key.startswith("updates/00002/") else None
            )
            await asyncio.sleep(30.0)
            assert list(serving._broken) == [2]
            assert serving.held == {0, 1, 3}
            assert serving.coordinators[2]._reader._failed >= fragment_reader.FOLDS_TRIED
            serving.wire.answers = lambda operation, key: None
            await asyncio.sleep(5.0)
            assert not serving._broken
            assert serving.held == {0, 1, 2, 3}
            assert serving.coordinators[2].rounds.holding

    Written(RULES, PACE).drive(body)


def test_an_update_that_never_ends_leaves_the_fragment_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(w: Written) -> None:
        await grown(w)
        async with syncer(w) as serving:
            own = serving.wire.get_range
            stuck = asyncio.Event()

            async def get_range(key: str, start: int, stop: int) -> object:
                if key.startswith("updates/00001/") and not stuck.is_set():
                    await stuck.wait()
                return await own(key, start, stop)

            monkeypatch.setattr(serving.wire, "get_range", get_range)
            await asyncio.sleep(8.0)
            assert 1 in serving.held, "the update may still arrive"
            await asyncio.sleep(8.0)
            assert list(serving._broken) == [1]
            assert serving.held == {0, 2, 3}
            stuck.set()
            await asyncio.sleep(8.0)
            assert serving.held == {0, 1, 2, 3}

    Written(RULES, PACE).drive(body)


def test_a_large_share_is_folded_after_as_long_as_that_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another syncer that was only late is back by then."""

    async def body(w: Written) -> None:
        await grown(w)
        size = sum(state_bytes(RULES) * f.size for f in w.run.layout.fragments)
        monkeypatch.setattr(agent, "TAKES_BYTES_S", size / 20.0)
        async with syncer(w) as serving:
            await asyncio.sleep(19.0)
            assert serving.held == set()
            assert not serving.wire.of("get", "snapshots/")
            await asyncio.sleep(6.0)
            assert serving.held == {0, 1, 2, 3}

    Written(RULES, PACE).drive(body)


def test_snapshots_follow_what_is_merged() -> None:
    """If rounds merge many bytes, a snapshot is due sooner than the pace's number of versions."""

    async def body(w: Written) -> None:
        await grown(w, versions=1)
        async with syncer(w) as serving:
            await asyncio.sleep(5.0)
            k = serving.coordinators[0]
            assert k.state is not None
            commit, weight, written = w.commits[0][-1], snapshot_after(RULES, k.fragment.size), k._snapshots
            written.merged = weight - 1
            assert not written.is_due(1)
            written.merged = weight
            assert written.is_due(1)
            async with asyncio.TaskGroup() as tasks:
                written.look(unstated(commit), k.state, tasks)
            assert written.merged == weight, "no commit vouches for this state"
            async with asyncio.TaskGroup() as tasks:
                written.look(commit, k.state, tasks)
                written.look(commit, k.state, tasks)
            assert len(serving.wire.of("put", "snapshots/00000/")) == 1
            assert written.merged == 0
            assert not written.is_due(1)
            turns = [written._turns.acquire() for _ in range(agent.SNAPSHOTS_MAX)]
            await asyncio.gather(*turns)
            assert not written.is_due(4096), "others are being written"
            for _ in turns:
                written._turns.release()
            assert written.is_due(4097), "one is due since as many versions as the pace says were made"

    Written(RULES, PACE).drive(body)


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("of_before", [True, False])
def test_commits_of_large_fragments_state_their_state_where_a_snapshot_is_due(
    small: bool, of_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a run of an earlier release every commit states it."""

    async def body(w: Written) -> None:
        async with syncer(w) as serving:
            fragment, log = serving.coordinators[0].fragment, serving._log
            size = state_bytes(RULES) * fragment.size
            monkeypatch.setattr(snapshots, "SMALL", size if small else size - 1)
            log.run = replace(
                log.run, header=msgspec.structs.replace(log.run.header, states_at_snapshots=not of_before)
            )
            written = snapshots.Snapshots(log, fragment, PACE, serving._runtime, asyncio.Semaphore(1), lambda: None)
            assert written.states(1) == (small or of_before)
            assert written.states(4096)

    Written(RULES, PACE).drive(body)


def test_what_was_folded_counts_once_for_the_next_snapshot() -> None:
    async def body(w: Written) -> None:
        await grown(w, versions=3)
        async with syncer(w) as serving:
            await asyncio.sleep(5.0)
            for p, k in enumerate(serving.coordinators):
                commits = [commit.header async for commit in w.log.commits(p, 0)]
                assert k._snapshots.merged == sum(given.bytes for h in commits for given in h.inputs) > 0

    Written(RULES, PACE).drive(body)

"""Several syncers share the fragments and take over those of dead syncers. A syncer that stalled does no harm."""

import asyncio
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from isthmus.errors import LogCorrupt
from isthmus.format.records.frame import Body
from isthmus.format.records.keys import commit_key, commits_prefix
from isthmus.format.rules import Pace, Rules
from isthmus.log import Commit
from isthmus.store import EdgeStore, Layer, Store
from isthmus.syncer.coordinator import FragmentCoordinator
from isthmus_services.servers import Server
from support.world import (
    Sleepy,
    World,
    all_commits,
    balanced,
    check_log,
    head,
    in_virtual_time,
    newest_commit,
    seed_of,
    serving,
    train,
    until,
    world,
)


def writers(commits: dict[int, list[Commit]]) -> dict[int, list[str]]:
    return {p: [c.header.writer for c in found] for p, found in commits.items()}


@in_virtual_time
async def test_syncers_share_the_fragments_and_each_commits_only_its_own(folder: Path) -> None:
    # With so long a silence, no syncer takes the other for dead.
    async with world(folder, seed_of(pace=Pace(heartbeat_s=0.2, silence_s=20.0))) as w:
        one, two = w.syncer("east"), w.syncer("west")
        async with serving(one), serving(two):
            await until(lambda: one.held and two.held and len(one.held | two.held) == 4, "shared")
            assert not one.held & two.held
            mine = {p: "east" if p in one.held else "west" for p in range(4)}
            learners = [w.learner(f"l{i}") for i in range(2)]
            enough = lambda: min(k.head for k in one.coordinators) >= 4  # noqa: E731
            await asyncio.gather(*(train(a, 40, seed=i, enough=enough) for i, a in enumerate(learners)))
            await until(
                lambda: [k.head for k in one.coordinators] == [k.head for k in two.coordinators], "both at the head"
            )
            # Read the writers now: the syncer that stops last may still merge updates of the other's fragments.
            wrote = {p: set(found) for p, found in writers(await all_commits(w.log)).items()}
        assert await check_log(w) == one.tallies.commits + two.tallies.commits
        assert wrote == {p: {name} for p, name in mine.items()}
        assert one.tallies.races_lost == two.tallies.races_lost == 0
        for agent in learners:
            balanced(agent)


class Noted(Layer):
    """A store that records the keys that are read."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.read: list[str] = []

    async def get(self, key: str) -> Body:
        """Record the key and read the object."""
        self.read.append(key)
        return await super().get(key)

    async def get_range(self, key: str, start: int, stop: int) -> Body:
        """Record the key and read a range."""
        self.read.append(key)
        return await super().get_range(key, start, stop)

    def fragments(self, kind: str) -> set[int]:
        """Return the fragments of which an object of a kind was read."""
        return {int(key.split("/")[1]) for key in self.read if key.startswith(kind)}


@in_virtual_time
async def test_of_what_another_keeps_a_syncer_reads_the_commits_alone_until_it_takes_over(folder: Path) -> None:
    """With S syncers, each reads and merges only its share."""
    async with world(folder, seed_of(pace=Pace(heartbeat_s=0.2, silence_s=20.0, snapshot_every=5))) as w:
        noted: list[Noted] = []

        def watched() -> World:
            def wrap(store: EdgeStore) -> Store:
                noted.append(Noted(store))
                return noted[-1]

            return w.through(wrap)

        one, two = watched().syncer("east"), watched().syncer("west")
        await one.recover()
        dying = asyncio.ensure_future(one.run(asyncio.Event()))
        async with serving(two):
            await until(lambda: one.held and two.held and len(one.held | two.held) == 4, "shared")
            shares = set(one.held), set(two.held)
            for was in noted:
                was.read.clear()  # the first syncer may have read all fragments while it was alone
            learners = [w.learner(f"l{i}") for i in range(2)]
            enough = lambda: min(k.head for s in (one, two) for k in s.coordinators) >= 7  # noqa: E731
            await asyncio.gather(*(train(a, 40, seed=i, enough=enough) for i, a in enumerate(learners)))
            for was, mine, syncer in zip(noted, shares, (one, two), strict=True):
                assert was.fragments("updates/") == mine
                assert was.fragments("snapshots/") <= mine
                assert was.fragments("commits/") >= {0, 1, 2, 3} - mine
                assert {p for p, k in enumerate(syncer.coordinators) if k.state is not None} == mine
                assert min(k.head for k in syncer.coordinators) >= 7
            dying.cancel()
            with pytest.raises(asyncio.CancelledError):
                await dying
            noted[1].read.clear()
            before = [k.head for k in two.coordinators]
            await until(lambda: two.held == {0, 1, 2, 3}, "taken over")
            again = w.learner("l2")
            await train(
                again, 20, enough=lambda: all(k.head > b for k, b in zip(two.coordinators, before, strict=True))
            )
            assert shares[0] <= noted[1].fragments("snapshots/")
            assert two.fold_s > 0.0
        # No syncer writes any more. The killed one may have written one commit of each fragment without counting it.
        total = await check_log(w)
        wrote = [name for found in writers(await all_commits(w.log)).values() for name in found]
        assert len(wrote) == total
        assert wrote.count("west") == two.tallies.commits
        assert 0 <= wrote.count("east") - one.tallies.commits <= len(shares[0])


@in_virtual_time
async def test_a_fragment_given_back_is_kept_until_it_is_old_and_folded_anew_when_it_comes_again(folder: Path) -> None:
    """A syncer that is wrongly believed to be there costs no fold: if it commits nothing, the old state is current."""
    async with world(folder) as w:
        syncer = w.syncer("east")
        async with serving(syncer):
            enough = lambda: syncer.coordinators[0].head >= 3  # noqa: E731
            await train(w.learner("l0"), 10, enough=enough)
            coordinator = syncer.coordinators[0]
            state = coordinator.state
            coordinator.hold(False)
            await until(lambda: not coordinator.rounds.holding, "left")
            assert coordinator.state is state
            coordinator.hold(True)
            await until(lambda: coordinator.rounds.holding, "taken again")
            assert coordinator.state is state
        await check_log(w)


@in_virtual_time
async def test_a_standby_takes_over_what_a_dead_one_held_and_gives_back_what_it_lost_when_another_joins(
    folder: Path,
) -> None:
    async with world(folder) as w:
        one, two = w.syncer("east"), w.syncer("west")
        await one.recover()
        dying = asyncio.ensure_future(one.run(asyncio.Event()))
        async with serving(two):
            await until(lambda: one.held and two.held, "shared")
            training = [asyncio.ensure_future(train(w.learner(f"l{i}"), 300, seed=i)) for i in range(2)]
            await until(lambda: one.tallies.commits > 2 and two.tallies.commits > 2, "both commit")
            dying.cancel()
            with pytest.raises(asyncio.CancelledError):
                await dying
            heads = [k.head for k in two.coordinators]
            await until(lambda: two.held == {0, 1, 2, 3}, "taken over")
            await until(lambda: all(k.head > h + 1 for k, h in zip(two.coordinators, heads, strict=True)), "all go on")
            third = w.syncer("north")
            async with serving(third):
                await until(lambda: third.tallies.commits > 2, "the newcomer commits")
                assert third.held
                assert not third.held & two.held
            await asyncio.gather(*training)
        await check_log(w)


@in_virtual_time
async def test_a_syncer_that_stalled_while_another_went_on_loses_its_commit_and_folds_the_winners(folder: Path) -> None:
    """The syncer falls asleep when it has closed a round and is about to write the commit."""
    async with world(folder) as w:
        asleep, wake = asyncio.Event(), asyncio.Event()
        sleepy = w.through(lambda store: Sleepy(store, commits_prefix(0), asleep, wake))
        one, two = sleepy.syncer("east", deaf=True), w.syncer("west", deaf=True)
        async with serving(one):
            training = [asyncio.ensure_future(train(w.learner(f"l{i}"), 400, seed=i)) for i in range(2)]
            await asleep.wait()
            behind = one.coordinators[0].head
            async with serving(two):
                await until(lambda: two.coordinators[0].head > behind + 4, "the other went on")
            wake.set()
            await until(lambda: one.coordinators[0].head > two.coordinators[0].head, "it goes on after the winner")
            assert one.tallies.races_lost > 0
            await asyncio.gather(*training)
        await check_log(w)
        commits = (await all_commits(w.log))[0]
        assert {"east", "west"} <= {c.header.writer for c in commits}


def digest(coordinator: FragmentCoordinator) -> bytes:
    assert coordinator.state is not None
    return coordinator.state.digest


async def test_two_syncers_that_both_hold_everything_leave_one_log_on_a_real_s3_server(
    seaweedfs: Server, redis: Server, use: Callable[[Server], None]
) -> None:
    use(seaweedfs)
    url = f"s3://b{uuid.uuid4().hex[:10]}/run"
    async with world(url, seed_of(pace=Pace(heartbeat_s=0.5, silence_s=2.0)), bus=redis.url) as w:
        one, two = w.syncer("east", deaf=True), w.syncer("west", deaf=True)
        learners = [w.learner(f"l{i}") for i in range(3)]
        async with serving(one), serving(two):

            def raced() -> bool:
                both = one.tallies.commits > 5 and two.tallies.commits > 5
                return both and one.tallies.races_lost + two.tallies.races_lost > 5

            await asyncio.gather(*(train(a, 100, seed=i, enough=raced) for i, a in enumerate(learners)))
            await until(
                lambda: [k.head for k in one.coordinators] == [k.head for k in two.coordinators], "both at the head"
            )
            states = [[digest(k) for k in s.coordinators] for s in (one, two)]
        assert states[0] == states[1]
        assert await check_log(w) == one.tallies.commits + two.tallies.commits
        commits = await all_commits(w.log)
        assert {c.header.writer for found in commits.values() for c in found} == {"east", "west"}
        for agent in learners:
            balanced(agent)


# --- a log that one syncer cannot fold --------------------------------------------------------------------------------

FEW = seed_of(Rules(fragments=4, sync_every=4), Pace(heartbeat_s=0.2, silence_s=0.8, snapshot_every=5))


async def damage(w: World, fragment: int) -> str:
    """Damage an update that the newest commit of a fragment merged; return its key."""
    commit = await newest_commit(w, fragment)
    key = commit.header.inputs[0].key
    blob = await w.store.get(key)
    blob[-1] ^= 1
    await w.store.put(key, blob)
    return key


@in_virtual_time
async def test_a_fragment_that_cannot_be_folded_is_named_and_the_others_are_served(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(folder, FEW) as w:
        async with serving(w.syncer("east"), killed=True) as syncer:
            enough = lambda: all(k.head >= 6 for k in syncer.coordinators)  # noqa: E731
            await train(w.learner("l0"), 20, enough=enough)
        newest = [await newest_commit(w, p) for p in range(4)]
        victim = next(p for p in range(4) if (newest[p].version + p) % 5)  # its newest commit is in no snapshot
        key = await damage(w, victim)
        with pytest.raises(LogCorrupt) as caught:
            await head(w, victim)
        assert caught.value.readable == (victim, newest[victim].version - 1)
        async with serving(w.syncer("west")) as hurt:
            await until(lambda: hurt.coordinators[victim].broken, "it tried to fold it")
            assert key in hurt.coordinators[victim].broken
            assert f"can be read up to version {newest[victim].version - 1}" in hurt.coordinators[victim].broken
            assert key in caplog.text
            others = [k for p, k in enumerate(hurt.coordinators) if p != victim]
            before = [k.head for k in others]
            await until(lambda: hurt.held == {0, 1, 2, 3} - {victim}, "it holds the rest")
            enough = lambda: all(k.head > b + 2 for k, b in zip(others, before, strict=True))  # noqa: E731
            await train(w.learner("l1"), 20, enough=enough)
        assert (await newest_commit(w, victim)).version == newest[victim].version


@in_virtual_time
async def test_a_damaged_update_heals_with_the_next_snapshot_of_a_syncer_that_had_merged_it(folder: Path) -> None:
    async with world(folder, FEW) as w:
        healthy = w.syncer("east")
        async with serving(healthy):
            training = asyncio.ensure_future(train(w.learner("l0"), 400))
            await until(
                lambda: healthy.coordinators[0].head >= 6 and healthy.coordinators[0].head % 5 in (1, 2), "in between"
            )
            await damage(w, 0)
            hurt = w.syncer("west")
            async with serving(hurt):
                # Either it started before the next snapshot and recovered with it, or the snapshot was there already.
                await until(lambda: not hurt.coordinators[0].broken and hurt.coordinators[0].head > 11, "healed")
            await training


@in_virtual_time
async def test_a_syncer_that_can_fold_nothing_says_so_and_ends(folder: Path) -> None:
    async with world(folder, FEW) as w:
        for entry in await w.store.list("snapshots/"):
            await w.store.delete(entry.key)
        with pytest.raises(LogCorrupt, match="no snapshot can be believed"):
            await w.syncer("east").recover()


@in_virtual_time
async def test_bytes_that_are_no_commit_under_the_next_key_stop_that_fragment_alone(folder: Path) -> None:
    async with world(folder, FEW) as w:
        syncer = w.syncer("east")
        async with serving(syncer):
            training = asyncio.ensure_future(train(w.learner("l0"), 300))
            await until(lambda: syncer.coordinators[0].head >= 2, "it runs")
            await w.store.create(commit_key(0, syncer.coordinators[0].head + 2), b"")
            await until(lambda: bool(syncer.coordinators[0].broken), "noticed")
            assert "not a commit" in syncer.coordinators[0].broken
            heads = [k.head for k in syncer.coordinators[1:]]
            await until(
                lambda: all(k.head > h + 2 for k, h in zip(syncer.coordinators[1:], heads, strict=True)), "go on"
            )
            await training

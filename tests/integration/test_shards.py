"""Several syncers on one loop: they share the fragments, take over from the dead, and one that slept does no harm."""

import asyncio

import pytest

from tests_helpers import all_commits, balanced, check_log, deaf, serving, train, until, world


def writers(commits):
    return {p: [c.header.writer for c in found] for p, found in commits.items()}


def test_syncers_share_the_fragments_and_each_commits_only_its_own(folder):
    async def body():
        async with world(folder) as w:
            one, two = w.syncer("east"), w.syncer("west")
            async with serving(one), serving(two):
                await until(lambda: one.held and two.held and len(one.held | two.held) == 4, "shared")
                assert not one.held & two.held
                mine = {p: "east" if p in one.held else "west" for p in range(4)}
                learners = [w.learner(f"l{i}") for i in range(2)]
                enough = lambda: min(k.head for k in one.keepers) >= 4  # noqa: E731
                await asyncio.gather(*(train(a, 40, seed=i, enough=enough) for i, a in enumerate(learners)))
                await until(lambda: [k.head for k in one.keepers] == [k.head for k in two.keepers], "both at the head")
            assert await check_log(w) == one.tallies.commits + two.tallies.commits
            assert {p: set(found) for p, found in writers(await all_commits(w.log)).items()} == {
                p: {name} for p, name in mine.items()
            }
            assert one.tallies.commits_lost == two.tallies.commits_lost == 0
            for agent in learners:
                balanced(agent)

    asyncio.run(body())


def test_a_standby_takes_over_what_a_dead_one_held_and_gives_back_what_it_lost_when_another_joins(folder):
    async def body():
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
                heads = [k.head for k in two.keepers]
                await until(lambda: two.held == {0, 1, 2, 3}, "taken over")
                await until(lambda: all(k.head > h + 1 for k, h in zip(two.keepers, heads, strict=True)), "all go on")
                third = w.syncer("north")
                async with serving(third):
                    await until(lambda: third.tallies.commits > 2, "the newcomer commits")
                    assert third.held
                    assert not third.held & two.held
                await asyncio.gather(*training)
            await check_log(w)

    asyncio.run(body())


def test_a_syncer_that_stalled_while_another_went_on_loses_its_commit_and_folds_the_winners(folder):
    """It had closed its round and was about to write the commit when it fell asleep."""

    async def body():
        async with world(folder) as w:
            one, two = w.syncer("east"), w.syncer("west")
            asleep, wake = asyncio.Event(), asyncio.Event()
            append = one.keepers[0]._log.append

            async def sleepy(fragment, version, data):
                if fragment == 0 and not wake.is_set():
                    asleep.set()
                    await wake.wait()
                return await append(fragment, version, data)

            one._log.append = sleepy
            deaf(one, two)
            async with serving(one):
                training = [asyncio.ensure_future(train(w.learner(f"l{i}"), 400, seed=i)) for i in range(2)]
                await asleep.wait()
                behind = one.keepers[0].head
                async with serving(two):
                    await until(lambda: two.keepers[0].head > behind + 4, "the other went on")
                wake.set()
                await until(lambda: one.keepers[0].head > two.keepers[0].head, "it goes on after the winner")
                assert one.tallies.commits_lost > 0
                await asyncio.gather(*training)
            await check_log(w)
            commits = (await all_commits(w.log))[0]
            assert {"east", "west"} <= {c.header.writer for c in commits}

    asyncio.run(body())

"""Learners and syncers work on one event loop without threads, with a run in a folder and a bus in a file."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import TypeVar, cast

import numpy as np
import pytest

from isthmus.bus import Bus, BusItem
from isthmus.codecs.kernels import F32
from isthmus.errors import LogCorrupt, Unavailable
from isthmus.format.layout import Spec, TensorClass
from isthmus.format.records import frame
from isthmus.format.records.frame import Body
from isthmus.format.records.keys import commit_key
from isthmus.format.records.messages import SYNCER_STREAM, Alive, AnyMessage, Committed, decode, encode, learner_stream
from isthmus.format.records.objects import CommitHeader, UpdateHeader
from isthmus.format.rules import Pace, Rules
from isthmus.learner.backend import local_array
from isthmus.learner.boundary import SyncerBack, ToTraining
from isthmus.log import fold, merge
from isthmus.log.run import read_run
from isthmus.store import Layer, Patience, Store
from isthmus.store.layer import Send
from isthmus.syncer import Syncer
from support.world import (
    NumpyReplica,
    all_commits,
    balanced,
    check_log,
    head,
    in_virtual_time,
    seed_of,
    serving,
    train,
    until,
    world,
)

T = TypeVar("T")


async def test_learners_and_a_syncer_share_one_loop_without_any_thread(folder: Path) -> None:
    before = set(threading.enumerate())
    async with world(folder) as w:
        learners = [w.learner(f"l{i}") for i in range(3)]
        async with serving(w.syncer()) as syncer:

            def enough() -> bool:
                return syncer.tallies.commits >= 40

            replicas = await asyncio.gather(*(train(a, 50, seed=i, enough=enough) for i, a in enumerate(learners)))
        assert not set(threading.enumerate()) - before
        assert await check_log(w) == syncer.tallies.commits
        for agent, replica in zip(learners, replicas, strict=True):
            balanced(agent)
            merged = sum(a.merged for a in agent.uplink.accounts)
            assert merged > 0
            assert all(np.isfinite(v).all() for v in replica.values)


@pytest.mark.parametrize("adopt", ["overwrite", "blend", "carry"])
@pytest.mark.parametrize("up", ["f32", "bf16", "int8", "int4"])
async def test_every_adoption_and_codec_keeps_the_ledger(folder: Path, adopt: str, up: str) -> None:
    rules = Rules(fragments=3, sync_every=4, codec_up=up, codec_down=up)
    async with world(folder, seed_of(rules)) as w:
        learners = [w.learner(f"l{i}", adopt=adopt) for i in range(2)]
        async with serving(w.syncer()) as syncer:
            await asyncio.gather(
                *(train(a, 50, seed=i, enough=lambda: syncer.tallies.commits >= 6) for i, a in enumerate(learners))
            )
        assert await check_log(w) >= 6
        for agent in learners:
            balanced(agent)


@pytest.mark.parametrize("block", [0, 12])
async def test_an_isotropic_run_folds_to_what_was_merged(folder: Path, block: int) -> None:
    rules = Rules.suited(merge="iso", iso_block=block, fragments=3, sync_every=4)
    async with world(folder, seed_of(rules)) as w:
        learners = [w.learner(f"l{i}") for i in range(2)]
        async with serving(w.syncer()) as syncer:
            await asyncio.gather(
                *(train(a, 50, seed=i, enough=lambda: syncer.tallies.commits >= 6) for i, a in enumerate(learners))
            )
        assert await check_log(w) >= 6
        recorded = {
            (c.header.dense.merge, c.header.dense.block) for cs in (await all_commits(w.log)).values() for c in cs
        }
        assert recorded == {("iso", block)}


async def test_an_untouched_parameter_of_an_adopted_version_is_no_progress(folder: Path) -> None:
    """A learner that trains nothing sends zeros, so the model stays unchanged, in bfloat16 as in float32."""
    specs = [Spec("half", (300,), "bfloat16", TensorClass.DENSE), Spec("whole", (200,), "float32", TensorClass.DENSE)]
    async with world(folder, seed_of(Rules(fragments=2, sync_every=2), specs=specs)) as w:
        before = [await fold.initial(w.log, p) for p in range(2)]
        agent = w.learner("idle")
        async with serving(w.syncer()) as syncer:
            await agent.join()
            from isthmus.learner.backend import rounded

            class Still:
                def __init__(self) -> None:
                    self.values: dict[int, F32] = {}

                def read(self, fragment: int, out: F32) -> None:
                    out[:] = self.values[fragment]

                def write(self, fragment: int, values: F32) -> None:
                    self.values[fragment] = rounded(values, w.run.layout.fragments[fragment].tensors)

            boundary = agent.attach(Still())
            task = asyncio.ensure_future(agent.run())
            while min(k.head for k in syncer.coordinators) < 3:
                boundary.after_step(10)
                await asyncio.sleep(0.01)
            agent.drain()
            await task
        assert await check_log(w) > 4
        for p in range(2):
            assert np.array_equal((await fold.fold(w.log, p, fold.PublishedValue(w.log))).carried, before[p])


async def test_error_feedback_starts_from_the_last_merged_update(folder: Path) -> None:
    async with world(folder) as w:
        agent = w.learner("l0")
        async with serving(w.syncer()) as syncer:
            await train(agent, 60, enough=lambda: min(k.head for k in syncer.coordinators) >= 2)
        merged = {p: c[-1].header.inputs[-1] for p, c in (await all_commits(w.log)).items()}
        for p, given in merged.items():
            header = frame.parse(await w.store.get(given.key), frame.Kind.UPDATE, UpdateHeader)[0]
            assert header.codec == "int4"
            # The residual waits for the next update, or an update that was packed since carries it.
            fed_back = [agent.uplink.residuals[p], *agent.uplink.taken[p].values()]
            assert any(residual is not None and local_array(residual).any() for residual in fed_back)


class Slow(Layer):
    """A store in which requests take long enough to overlap."""

    async def _through(self, operation: str, key: str, send: Send[T]) -> T:
        await asyncio.sleep(0.004)
        return await send()


def has_committed(syncer: Syncer, commits: int) -> bool:
    return syncer.tallies.commits >= commits


# --- several syncers, restarts ----------------------------------------------------------------------------------------


async def test_two_syncers_that_both_hold_everything_do_no_harm(folder: Path) -> None:
    async with world(folder) as w:
        w = w.through(Slow)
        one, two = w.syncer("s1", deaf=True), w.syncer("s2", deaf=True)
        learners = [w.learner(f"l{i}") for i in range(3)]
        async with serving(one), serving(two):

            def raced() -> bool:
                return one.tallies.races_lost + two.tallies.races_lost > 0

            await asyncio.gather(*(train(a, 120, seed=i, enough=raced) for i, a in enumerate(learners)))
            await until(
                lambda: [k.head for k in one.coordinators] == [k.head for k in two.coordinators], "both at the head"
            )
        assert await check_log(w) == one.tallies.commits + two.tallies.commits
        assert one.tallies.races_lost + two.tallies.races_lost > 0, "the syncers never raced: this shows nothing"
        for agent in learners:
            balanced(agent)


async def test_a_syncer_that_comes_back_folds_the_log_and_goes_on(folder: Path) -> None:
    async with world(folder) as w:
        learners = [w.learner(f"l{i}") for i in range(2)]
        training = [asyncio.ensure_future(train(a, 300, seed=i)) for i, a in enumerate(learners)]
        heads = []
        for life in range(4):
            syncer = w.syncer(f"s{life}")
            await syncer.recover()
            heads.append(sum(k.head for k in syncer.coordinators))
            task = asyncio.ensure_future(syncer.run(asyncio.Event()))
            await until(partial(has_committed, syncer, 8), "eight commits of this life")
            task.cancel()  # like a kill: the syncer finishes nothing and sends no message
            with pytest.raises(asyncio.CancelledError):
                await task
        assert heads == sorted(heads)
        assert heads[0] == 0 < heads[1]
        async with serving(w.syncer("last")):
            await asyncio.gather(*training)
        await check_log(w)
        for agent in learners:
            balanced(agent)


async def test_a_syncer_reads_the_newest_snapshot_and_only_what_follows(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(folder, seed_of(pace=Pace(heartbeat_s=0.2, silence_s=0.8, snapshot_every=4))) as w:
        async with serving(w.syncer()) as syncer:
            await train(w.learner("l0"), 200, enough=lambda: syncer.coordinators[0].head >= 14)
        log, inner = w.log, w.store.get_range
        read: list[str] = []

        async def get_range(key: str, start: int, stop: int) -> Body:
            read.append(key)
            return await inner(key, start, stop)

        monkeypatch.setattr(w.store, "get_range", get_range)
        head = await fold.fold(log, 0, fold.Merging(log))
        assert head.version > 12
        commits = sorted(int(k.rsplit("/", 1)[1]) for k in read if k.startswith("commits/"))
        # These are the commits before and at the snapshot, those after it, and the missing one that marks the end.
        assert commits[-1] == head.version + 1
        assert len(commits) <= 4 + 3
        assert len([k for k in read if k.startswith("snapshots/")]) == 1


async def test_a_learner_killed_before_its_first_checkpoint_begins_again_and_what_was_merged_of_it_counts(
    folder: Path,
) -> None:
    async with world(folder) as w, serving(w.syncer()):
        first = w.learner("l0")
        await first.join()
        boundary = first.attach(NumpyReplica(w.run.layout))
        task = asyncio.ensure_future(first.run())
        for _ in range(43):
            boundary.after_step(100)
            await asyncio.sleep(0.01)
        reported = 0
        while reported < 43:
            await asyncio.sleep(0.02)
            said = (await w.bus.read({learner_stream("l0"): ""}, 0.1))[learner_stream("l0")]
            reported = max(getattr(word, "step", 0) for m in said if m.body for word in decode(m.body))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        second = w.learner("l0")
        await second.join()
        assert second.incarnation == 2
        assert (second.history.step, second.history.tokens_lost) == (0, 4300)
        again = second.attach(NumpyReplica(w.run.layout))
        assert all(slot.base > 0 for slot in again.slots)
        balanced(second)
        for p, commits in (await all_commits(w.log)).items():
            account = second.uplink.accounts[p]
            assert account.merged == sum(i.tokens for c in commits for i in c.header.inputs)
            assert account.lost == 4300 - account.merged


# --- store and bus fail -----------------------------------------------------------------------------------------------


class Faulty(Layer):
    """A store that loses replies and requests at random, while `rate` is above 0."""

    def __init__(self, inner: Store, random: Random) -> None:
        super().__init__(inner)
        self.random, self.rate, self.faults = random, 0.0, 0

    async def _through(self, operation: str, key: str, send: Send[T]) -> T:
        if self.random.random() < self.rate:
            self.faults += 1
            if self.random.random() < 0.5:
                await send()
            raise Unavailable("lost")
        return await send()


async def test_lost_replies_and_refusals_leave_the_log_whole(folder: Path) -> None:
    async with world(folder) as w:
        faulty = Faulty(w.store, w.runtime.random)
        w = w.through(lambda _: faulty, Patience(attempts=3, first_s=0.001, longest_s=0.01))
        syncers = [w.syncer("s1"), w.syncer("s2")]
        learners = [w.learner(f"l{i}") for i in range(2)]
        async with serving(syncers[0]), serving(syncers[1]):
            training = [asyncio.ensure_future(train(a, 200, seed=i)) for i, a in enumerate(learners)]
            await until(lambda: sum(s.tallies.commits for s in syncers) > 0, "it runs")
            faulty.rate = 0.2
            await until(lambda: faulty.faults > 100, "a hundred faults")
            faulty.rate = 0.0
            await asyncio.gather(*training)
        assert await check_log(w) >= 20
        for agent in learners:
            balanced(agent)


async def test_learners_train_on_without_store_and_bus_and_catch_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(folder) as w:
        faulty = Faulty(w.store, w.runtime.random)
        w = w.through(lambda _: faulty)
        async with serving(w.syncer()) as syncer:
            agent = w.learner("l0")
            training = asyncio.ensure_future(train(agent, 400, enough=lambda: caught_up))
            caught_up = False
            await until(lambda: syncer.tallies.commits > 4, "a first few commits")

            async def refuse(*_: object) -> None:
                raise Unavailable("the bus is away")

            faulty.rate = 1.0
            monkeypatch.setattr(w.bus, "append", refuse)
            await until(
                lambda: "bus" in agent.waiting_for and any("store" in what for what in agent.waiting_for), "it waits"
            )
            boundary = agent.boundary
            assert boundary is not None
            step, commits = boundary.step, syncer.tallies.commits
            await until(lambda: boundary.step > step + 100, "training goes on meanwhile")
            assert "bus" in agent.waiting_for
            assert any("store" in what for what in agent.waiting_for)
            assert syncer.tallies.commits == commits
            faulty.rate = 0.0
            monkeypatch.undo()
            await until(lambda: syncer.tallies.commits > commits + 8, "commits after the outage")
            caught_up = True
            await training
        balanced(agent)
    async with world(folder) as w:
        await check_log(w)


async def test_a_bus_that_lost_everything_is_told_again(folder: Path) -> None:
    async with world(folder) as w, serving(w.syncer()) as syncer:
        learners = [w.learner(f"l{i}") for i in range(2)]
        training = [asyncio.ensure_future(train(a, 400, seed=i)) for i, a in enumerate(learners)]
        for _ in range(3):
            commits = syncer.tallies.commits
            await until(partial(has_committed, syncer, commits + 7), "commits between losses")
            for file in folder.glob("bus.sqlite*"):
                file.unlink()
        commits = syncer.tallies.commits
        await until(lambda: syncer.tallies.commits > commits + 6, "commits after the last loss")
        await asyncio.gather(*training)
    async with world(folder) as w:
        await check_log(w)


@in_virtual_time
async def test_a_learner_learns_that_syncers_are_back_once_after_each_silence(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(folder, seed_of(pace=Pace(heartbeat_s=0.1, silence_s=0.4))) as w:
        agent, told, done = w.learner("l0"), list[object](), False
        tell = agent._tell

        def noted(message: ToTraining) -> None:
            told.append(message)
            tell(message)

        monkeypatch.setattr(agent, "_tell", noted)
        training = asyncio.ensure_future(train(agent, 50, enough=lambda: done))
        for silences in (1, 2):
            await asyncio.sleep(0.8)
            async with serving(w.syncer(f"s{silences}")) as syncer:
                await until(partial(has_committed, syncer, 12), "a syncer serves")
            assert told.count(SyncerBack()) == silences
        done = True
        await training


class Deaf:
    """A bus from which readers get no messages while `deaf` is true."""

    def __init__(self, bus: Bus) -> None:
        self.bus, self.url, self.deaf = bus, bus.url, False

    def __getattr__(self, name: str) -> object:
        return getattr(self.bus, name)

    async def read(self, positions: Mapping[str, str], timeout_s: float) -> Mapping[str, Sequence[BusItem]]:
        if not self.deaf:
            return await self.bus.read(positions, timeout_s)
        await asyncio.sleep(timeout_s)
        return {}


async def test_a_syncer_that_does_not_hear_itself_leaves_its_fragments_to_others(folder: Path) -> None:
    async with world(folder) as w:
        bus = Deaf(w.bus)
        one = replace(w, bus=cast(Bus, bus)).syncer("s1")
        async with serving(one), serving(w.syncer("s2")) as two:
            done = False
            training = asyncio.ensure_future(train(w.learner("l0"), 20, enough=lambda: done))
            await until(lambda: one.tallies.commits >= 4, "it serves")
            bus.deaf = True
            await until(lambda: not one._able(), "it notices")
            await until(lambda: len(two.held) == len(two.coordinators), "the other one takes all fragments over")
            before = two.tallies.commits
            await until(lambda: two.tallies.commits >= before + 8, "it merges")
            bus.deaf = False
            await until(one._able, "it hears itself again")
            done = True
            await training


@pytest.mark.parametrize("kind", ["alive", "committed"])
async def test_a_version_that_does_not_exist_costs_one_look(folder: Path, kind: str) -> None:
    """A syncer may name such a version if it works on a copy of the run, or if this store was set back or unmounted."""
    async with world(folder) as w, serving(w.syncer("s1")) as one, serving(w.syncer("s2")) as two:
        done = False
        training = asyncio.ensure_future(train(w.learner("l0"), 20, enough=lambda: done))

        def commits() -> int:
            return one.tallies.commits + two.tallies.commits

        await until(lambda: commits() >= 8, "commits before")
        heads = tuple(coordinator.head + 1000 for coordinator in one.coordinators)
        said: list[AnyMessage] = [
            Alive(
                run=w.run.digest, id="x", syncer="ghost", commits=0, heads=heads, rejected={}, waiting_for="",
                lag_ms=0.0, held=0, fold_s=0.0, broken=(), stopping=True, able=False,
            )
        ]  # fmt: skip
        if kind == "committed":
            said = [
                Committed(run=w.run.digest, id=f"x{p}", syncer="ghost", fragment=p, version=v)
                for p, v in enumerate(heads)
            ]
        await w.bus.append(SYNCER_STREAM, *(encode(message) for message in said))
        # This is longer than a syncer keeps a fragment that it cannot read.
        before = commits()
        await asyncio.sleep(4 * w.run.pace.silence_s)
        assert commits() > before
        between = commits()
        await until(lambda: commits() >= between + 12, "commits after")
        assert not any(
            coordinator.overdue(w.run.pace.silence_s) for syncer in (one, two) for coordinator in syncer.coordinators
        )
        done = True
        await training


# --- a damaged log ----------------------------------------------------------------------------------------------------


async def test_a_damaged_snapshot_is_not_believed_and_an_older_one_is(folder: Path) -> None:
    async with world(folder, seed_of(pace=Pace(heartbeat_s=0.2, silence_s=0.8, snapshot_every=3))) as w:
        async with serving(w.syncer()) as syncer:
            await train(w.learner("l0"), 150, enough=lambda: syncer.coordinators[0].head >= 8)
        good = await head(w, 0)
        version, key = (await w.log.snapshots(0))[0]
        assert version > 0
        blob = await w.store.get(key)
        blob[-1] ^= 1
        await w.store.put(key, blob)
        assert (await head(w, 0)).carried.digest == good.carried.digest


@pytest.mark.parametrize("what", ["input", "commit", "missing input"])
async def test_damage_in_the_log_names_the_key(folder: Path, what: str) -> None:
    async with world(folder, seed_of(pace=Pace(heartbeat_s=0.2, silence_s=0.8, snapshot_every=4096))) as w:
        async with serving(w.syncer(), killed=True) as syncer:
            await train(w.learner("l0"), 60, enough=lambda: syncer.coordinators[0].head >= 4)
        commit = await w.log.commit(0, 2)
        assert commit is not None
        key = commit_key(0, 2) if what == "commit" else commit.header.inputs[0].key
        if what == "missing input":
            await w.store.delete(key)
        else:
            blob = await w.store.get(key)
            blob[200] ^= 255
            await w.store.put(key, blob)
        with pytest.raises(LogCorrupt) as caught:
            await head(w, 0)
        assert caught.value.key == key


async def test_a_run_object_that_is_none_is_said_so(folder: Path) -> None:
    async with world(folder) as w:
        await w.store.put("run", b"nonsense")
        with pytest.raises(LogCorrupt, match="not a run object"):
            await read_run(w.store)


async def test_a_commit_survives_the_trip_and_records_what_the_design_lists(folder: Path) -> None:
    async with world(folder) as w:
        async with serving(w.syncer()) as syncer:

            def enough() -> bool:
                return syncer.coordinators[0].head >= 3

            await asyncio.gather(*(train(w.learner(f"l{i}"), 40, seed=i, enough=enough) for i in range(2)))
        commit = (await all_commits(w.log))[0][2].header
        assert isinstance(commit, CommitHeader)
        given = commit.inputs[0]
        assert given.weight == merge.weight(given.tokens, given.steps)
        assert given.arrived_at > 0
        assert commit.waited.expected
        assert commit.writer == "s1"
        assert commit.dense.merge == "rda"
        assert commit.embedding.merge == "avg"

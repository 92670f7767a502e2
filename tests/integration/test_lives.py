"""A learner that dies and comes back goes on from its checkpoint, and its ledger covers all its incarnations."""

import asyncio
import random
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import msgspec
import numpy as np
import pytest

from isthmus.errors import Denied, Fenced, InputError, ObjectMissing
from isthmus.format.records import frame
from isthmus.format.records.frame import Body, Kind
from isthmus.format.records.keys import claim_key
from isthmus.format.records.objects import ClaimHeader
from isthmus.format.rules import Pace
from isthmus.inspect.status import read_status
from isthmus.learner import LearnerAgent, residuals
from isthmus.learner.backend import local_residual
from isthmus.learner.checkpoint import LoopState
from isthmus.learner.ledger import weigh
from isthmus.log.listing import checkpoints_in
from isthmus.store import Layer
from isthmus_lab.simulate.bus import SimulatedBus
from support.world import (
    SPECS,
    NumpyReplica,
    World,
    all_commits,
    balanced,
    check_log,
    in_virtual_time,
    newest_commit,
    seed_of,
    serving,
    train,
    until,
    world,
)


class Counting:
    """A stand-in for optimizer and sampler, whose state is the number of batches so far."""

    def __init__(self) -> None:
        self.batches = 0

    def mark(self, now: object) -> None:
        pass

    def moved(self, orderly: bool) -> None:
        return None

    def save(self) -> LoopState:
        return LoopState({"moment": np.full(3, self.batches, np.float32)}, None, ({"next": self.batches},))

    def take(self, node: object) -> None:
        return None


class Life:
    """One incarnation of a learner, driven step by step."""

    def __init__(self, w: World, name: str, **options: Any) -> None:
        self.agent = w.learner(name, checkpoint_s=0.15, **options)
        self.saver = Counting()
        self.run = w.run

    async def start(self) -> "Life":
        await self.agent.join()
        c = self.agent.history.checkpoint
        if c is not None:
            self.saver.batches = c.ranks(lambda leaf: None)[0]["next"]
            assert c.optimizer(lambda leaf: None)["moment"][0] == self.saver.batches
        self.replica = NumpyReplica(self.run.layout)
        self.boundary = self.agent.attach(self.replica, saver=self.saver)
        self.draw = np.random.default_rng(self.saver.batches)
        self.task = asyncio.ensure_future(self.agent.run())
        return self

    async def steps(self, count: int, step_s: float = 0.01) -> None:
        for _ in range(count):
            for values in self.replica.values:
                values += (0.01 * self.draw.normal(size=values.size)).astype(np.float32)
            self.saver.batches += 1
            self.boundary.after_step(100, loss=1.0)
            await asyncio.sleep(step_s)
            if self.task.done():
                self.task.result()

    async def kill(self) -> None:
        self.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await self.task

    async def end(self) -> None:
        self.boundary.freeze()
        self.agent.drain(done=True)
        await self.task


def held(agent: LearnerAgent) -> list[Any]:
    """Return the residuals that wait for the next update, and those that unsettled updates carry."""
    uplink = agent.uplink
    both = [r for p, left in enumerate(uplink.residuals) for r in (left, *uplink.taken[p].values())]
    return [r for r in both if r is not None]


@in_virtual_time
async def test_a_learner_goes_on_at_its_checkpoint_and_the_ledger_covers_all_its_lives(folder: Path) -> None:
    async with world(folder) as w, serving(w.syncer()):
        other = asyncio.ensure_future(train(w.learner("other"), 700, seed=9))
        draw = random.Random(4)
        before = 0
        for life in range(6):
            one = await Life(w, "l0").start()
            history = one.agent.history
            assert one.agent.incarnation == life + 1
            assert one.boundary.step == history.step == one.saver.batches, "batch and step go on together"
            assert history.tokens_lost >= before
            before = history.tokens_lost
            balanced(one.agent)
            await one.steps(20 + draw.randrange(40))
            balanced(one.agent)
            await one.kill()
        last = await Life(w, "l0").start()
        assert last.boundary.step > 60, "checkpoints were used"
        assert last.agent.history.tokens_lost > 0, "no tokens were lost: this shows nothing"
        await last.steps(60)
        await last.end()
        balanced(last.agent)
        assert sum(a.merged for a in last.agent.uplink.accounts) > 0
        again = await Life(w, "l0").start()
        assert again.boundary.step == last.boundary.step, "a learner that left on purpose loses nothing"
        assert again.agent.history.tokens_lost == last.agent.history.tokens_lost
        await again.steps(3)
        await again.end()
        third = await Life(w, "l0").start()
        assert third.agent.history.first_loss == 1.0, "a process of three steps knows it from its checkpoint only"
        await third.kill()
        await other
        await check_log(w)


@in_virtual_time
async def test_merged_tokens_of_all_lives_are_those_in_the_log(folder: Path) -> None:
    """The ledger's `merged` agrees with the commits, also for updates sent after an incarnation's last checkpoint."""
    async with world(folder) as w, serving(w.syncer()):
        trained = 0
        for _ in range(5):
            one = await Life(w, "l0").start()
            before = one.boundary.tokens_seen
            await one.steps(35)
            trained += one.boundary.tokens_seen - before
            await one.kill()
            await asyncio.sleep(0.3)  # a few commits pass before it is back
        last = await Life(w, "l0").start()
        before = last.boundary.tokens_seen
        await last.steps(60)
        trained += last.boundary.tokens_seen - before
        await until(lambda: not any(last.agent.uplink.attempts), "everything is settled")
        merged = [0] * 4
        for p, head in enumerate([k.version for k in last.agent.downlink.known]):
            async for commit in w.log.commits(p, 0):
                if commit.version <= head:
                    merged[p] += sum(i.tokens for i in commit.header.inputs if i.learner == "l0")
        assert [a.merged for a in last.agent.uplink.accounts] == merged
        balanced(last.agent)
        # This is what was trained, without the last tokens that each killed incarnation had not reported yet.
        processed = last.boundary.tokens_seen + last.agent.uplink.tokens_lost
        assert trained - 5 * 1000 <= processed <= trained
        await last.end()


@in_virtual_time
async def test_tokens_of_a_killed_life_that_an_update_holds_are_not_said_to_be_lost(folder: Path) -> None:
    async with world(folder) as w:  # no syncer: the updates wait
        one = await Life(w, "l0").start()
        await one.steps(14)
        await one.kill()
        two = await Life(w, "l0").start()
        uplink, history = two.agent.uplink, two.agent.history
        assert history.checkpoint is None
        sent = [sum(a.header.tokens for a in attempts.values()) for attempts in uplink.attempts]
        stored = sum(share * tokens for share, tokens in zip(w.run.shares, sent, strict=True))
        assert 0 < stored < history.tokens_lost
        assert uplink.lost == pytest.approx(history.tokens_lost - stored)
        said = uplink.lost
        async with serving(w.syncer()):
            await until(lambda: not any(any(base == 0 for base in a) for a in uplink.attempts), "they are merged")
            assert weigh(uplink.accounts, w.run.shares, 0).lost == pytest.approx(said)
            await two.end()


@in_virtual_time
async def test_local_work_goes_on_where_no_newer_version_replaced_it(folder: Path) -> None:
    async with world(folder) as w:  # no syncer: nothing is ever merged
        one = await Life(w, "l0").start()
        await one.steps(30)
        await one.end()
        two = await Life(w, "l0").start()
        for mine, before in zip(two.replica.values, one.replica.values, strict=True):
            assert np.array_equal(mine, before)
        assert two.boundary.step == 30
        # This incarnation announces the updates of the one before it again: no commit has settled them.
        assert [set(a) for a in two.agent.uplink.attempts] == [{0}] * 4
        balanced(two.agent)
        async with serving(w.syncer()) as syncer:
            await until(lambda: min(k.head for k in syncer.coordinators) > 0, "merged after all")
            await two.steps(20)
            await two.end()
        commits = [c async for c in w.log.commits(0, 0)]
        assert commits[0].header.inputs[0].incarnation == 1, "the update of the first incarnation must be merged"
        balanced(two.agent)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@in_virtual_time
async def test_error_feedback_survives_with_the_update_it_belongs_to(folder: Path, dtype: str) -> None:
    seed = seed_of(specs=[replace(spec, dtype=dtype) for spec in SPECS])
    async with world(folder, seed) as w, serving(w.syncer()) as syncer:
        one = await Life(w, "l0").start()
        while min(k.head for k in syncer.coordinators) < 2:
            await one.steps(5)
        await one.end()
        two = await Life(w, "l0").start()
        uplink = two.agent.uplink
        # If an upload was in progress at the end, its residual is lost, and no update is named for it.
        assert any(uplink.residual_of)
        for p, key in enumerate(uplink.residual_of):
            # A residual that an unsettled update carries is in `taken` instead of `residuals`.
            held = [r for r in (uplink.residuals[p], *uplink.taken[p].values()) if r is not None]
            assert bool(key) == bool(held)
            if key:
                assert key in {i.key for c in [c async for c in w.log.commits(p, 0)] for i in c.header.inputs}
            for residual in held:
                assert local_residual(residual).any()
                assert local_residual(residual).dtype == (np.float32 if dtype == "float32" else np.uint16)
        await two.kill()


@in_virtual_time
async def test_residuals_of_an_earlier_release_are_kept_as_precisely_as_those_of_this_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = seed_of(specs=[replace(spec, dtype="bfloat16") for spec in SPECS])
    async with world(folder, seed) as w, serving(w.syncer()) as syncer:
        with monkeypatch.context() as before:
            before.setattr(residuals, "are_halves", lambda fragment: False)
            one = await Life(w, "l0").start()
            while min(k.head for k in syncer.coordinators) < 2:
                await one.steps(5)
            assert {local_residual(r).dtype for r in held(one.agent)} == {np.dtype(np.float32)}
            await one.end()
        two = await Life(w, "l0").start()
        assert {local_residual(r).dtype for r in held(two.agent)} == {np.dtype(np.uint16)}
        await two.kill()


@in_virtual_time
async def test_of_two_processes_of_one_name_the_older_stops(folder: Path) -> None:
    async with world(folder) as w, serving(w.syncer()):
        old = await Life(w, "l0").start()
        await old.steps(10)
        new = await Life(w, "l0", takeover=True).start()
        with pytest.raises(BaseExceptionGroup) as caught:
            for _ in range(100):
                await asyncio.gather(old.steps(5), new.steps(5))
        assert caught.group_contains(Fenced, match="its incarnation 2")
        assert not new.task.done()
        await new.steps(10)
        await new.end()
        await check_log(w)


@in_virtual_time
@pytest.mark.parametrize("lives", [1, 3])
@pytest.mark.parametrize("bus", ["remembers", "has forgotten"])
async def test_a_checkpoint_whose_claim_is_gone_is_used(folder: Path, lives: int, bus: str) -> None:
    """A rule of a bucket that deletes old objects deletes the claim first: it is older than every checkpoint."""
    async with world(folder) as w, serving(w.syncer()):
        for _ in range(lives):
            one = await Life(w, "l0").start()
            await one.steps(60)
            await one.kill()
        stored = one.agent.stored_step
        assert stored
        await w.store.delete(claim_key("l0", lives))
        if bus == "has forgotten":
            cast(SimulatedBus, w.bus)._streams.wipe()
        again = await Life(w, "l0").start()
        assert again.boundary.step == again.saver.batches == stored
        assert again.agent.incarnation == lives + 1
        balanced(again.agent)
        await again.steps(30)
        await again.end()
        balanced(again.agent)
        await check_log(w)


@in_virtual_time
@pytest.mark.parametrize("end", ["goes on", "leaves", "is killed", "was killed long ago"])
async def test_a_name_in_use_is_taken_only_from_a_process_that_has_ended(folder: Path, end: str) -> None:
    async with world(folder) as w, serving(w.syncer()):
        old = await Life(w, "l0").start()
        await old.steps(20)
        if end == "is killed":
            await old.kill()
        if end == "was killed long ago":
            await old.kill()
            await asyncio.sleep(2 * w.run.pace.silence_s)
        second, began = Life(w, "l0"), asyncio.get_running_loop().time()
        starting = asyncio.ensure_future(second.start())
        if end == "leaves":
            await asyncio.sleep(0.001)
            await old.end()
        if end == "goes on":
            with pytest.raises(
                InputError, match=r"another process of the name l0.* --takeover, or join\(takeover=True"
            ):
                await starting
            with pytest.raises(ObjectMissing):
                await w.store.get(claim_key("l0", 2))
            await old.steps(10)
            await old.end()
        else:
            await starting
            waited = asyncio.get_running_loop().time() - began >= w.run.pace.heartbeat_s
            assert waited == (end == "is killed"), "who fell silent long before is not waited for"
            assert second.agent.incarnation == 2
            await second.steps(3)
            await second.end()


@in_virtual_time
async def test_a_newcomer_that_may_not_speak_does_not_take_the_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(folder) as w, serving(w.syncer()):
        old = await Life(w, "l0").start()
        await old.steps(10)

        async def refuse(*_: object) -> None:
            raise Denied("no permission to access a key (NOPERM)")

        with monkeypatch.context() as only_now:
            only_now.setattr(w.bus, "append", refuse)
            with pytest.raises(Denied, match="NOPERM"):
                await w.learner("l0").join()
        with pytest.raises(ObjectMissing):
            await w.store.get(claim_key("l0", 2))
        await old.steps(10)
        await old.end()


@in_virtual_time
async def test_a_twin_is_found_without_the_bus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus.learner.incarnation.CLAIM_BEATS", 2)
    async with world(folder, seed_of(pace=Pace(heartbeat_s=0.1, silence_s=0.5))) as w:
        old = await Life(w, "l0").start()
        blob = await w.store.get(claim_key("l0", 1))
        await w.store.create(claim_key("l0", 2), blob)  # not valid: this claim lies under a key that is not its own
        mine, _ = frame.parse(blob, Kind.CLAIM, ClaimHeader)
        third = msgspec.structs.replace(mine, incarnation=3)
        await w.store.create(claim_key("l0", 3), frame.draft(Kind.CLAIM, third).blob)
        with pytest.raises(BaseExceptionGroup) as caught:
            await old.steps(500)
        assert caught.group_contains(Fenced, match="its incarnation 3")


@in_virtual_time
async def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(folder: Path) -> None:
    async with world(folder) as w, serving(w.syncer()):
        one = await Life(w, "l0").start()
        while len(checkpoints_in(await w.store.list("learners/l0/"))) < 2:
            await one.steps(5)
        await one.kill()
        keys = sorted(e.key for e in await w.store.list("learners/l0/") if "checkpoints" in e.key)
        assert len(keys) == 2, "older ones are deleted"
        blob = await w.store.get(keys[-1])
        blob[-1] ^= 1
        await w.store.put(keys[-1], blob)
        two = await Life(w, "l0").start()
        assert two.agent.history.checkpoint is not None
        assert two.agent.history.checkpoint.key == keys[0]
        balanced(two.agent)
        await two.steps(5)
        balanced(two.agent)
        await two.kill()


@in_virtual_time
async def test_a_newcomer_takes_the_moments_of_the_newest_checkpoint_that_fits(folder: Path) -> None:
    async with world(folder) as w, serving(w.syncer()) as syncer:
        one = await Life(w, "l0").start()
        while min(k.head for k in syncer.coordinators) < 1 or not checkpoints_in(await w.store.list("learners/")):
            await one.steps(5)
        newcomer = w.learner("l1")
        await newcomer.join()
        found = await newcomer.donor(lambda c: None)
        assert found is not None
        assert found.header.learner == "l0"
        assert await newcomer.donor(lambda c: "another optimizer") is None
        await one.end()


@in_virtual_time
async def test_learners_added_for_a_while_and_killed_leave_nothing_that_waits_for_them(folder: Path) -> None:
    async with world(folder) as w, serving(w.syncer()) as syncer:
        away = False
        steady = asyncio.ensure_future(train(w.learner("steady"), 700, seed=1, enough=lambda: away))
        await until(lambda: syncer.tallies.commits > 8, "it runs")
        extra = [await Life(w, f"spot-{i}").start() for i in range(3)]
        await asyncio.gather(*(life.steps(60) for life in extra))
        for life in extra:
            await life.kill()

        async def alone() -> bool:
            return (await newest_commit(w, 0)).header.waited.expected == ("steady",)

        while not await alone():
            assert not steady.done(), "rounds still wait for a killed learner"
            await asyncio.sleep(0.02)
        commits = syncer.tallies.commits
        await until(lambda: syncer.tallies.commits > commits + 12, "it goes on alone")
        away = True
        await steady
        newest = (await newest_commit(w, 0)).header
        assert newest.waited.expected == ("steady",)
        assert newest.waited.closed_by == "everyone"
        await check_log(w)


class DamagesFirst(Layer):
    """A store whose first answer for the first claim of l0 has a flipped bit."""

    answered: ClassVar[Counter[str]] = Counter()

    async def get_range(self, key: str, start: int, stop: int) -> Body:
        """Read a range."""
        found = bytearray(await super().get_range(key, start, stop))
        if key == claim_key("l0", 1):
            self.answered[key] += 1
            if self.answered[key] == 1:
                found[len(found) // 2] ^= 1
        return found


@in_virtual_time
async def test_a_claim_that_was_damaged_on_its_way_is_read_again(folder: Path) -> None:
    """Without its name's first claim, a learner would not find what earlier incarnations had merged."""
    async with world(folder) as w, serving(w.syncer()) as syncer:
        one = await Life(w, "l0").start()
        while min(k.head for k in syncer.coordinators) < 2:
            await one.steps(10)
        await one.kill()
        await (await Life(w, "l0").start()).kill()
        for entry in checkpoints_in(await w.store.list("learners/l0/")):
            await w.store.delete(entry.key)
        DamagesFirst.answered.clear()
        again = await Life(w.through(DamagesFirst), "l0").start()
        assert DamagesFirst.answered[claim_key("l0", 1)] > 1
        await again.steps(5)
        balanced(again.agent)
        merged = sum(i.tokens for cs in (await all_commits(w.log)).values() for c in cs for i in c.header.inputs)
        assert merged > 0
        assert sum(account.merged for account in again.agent.uplink.accounts) == merged


@in_virtual_time
async def test_tokens_of_an_earlier_life_are_lost_once(folder: Path) -> None:
    """The second life announces updates of the first, which had trained further; the third must not count that."""
    async with world(folder) as w:
        first = await Life(w, "a").start()
        await first.steps(200)
        await first.kill()
        for entry in checkpoints_in(await w.store.list("learners/a/")):
            await w.store.delete(entry.key)
        second = await Life(w, "a").start()
        lost = second.agent.uplink.tokens_lost
        assert 15_000 < lost <= 20_000
        await second.steps(20)
        await asyncio.sleep(2.0)
        status = await read_status(w.log, w.bus, w.runtime, 1.0)
        assert status.hearing.learners["a"].step == 20
        await second.end()
        third = await Life(w, "a").start()
        assert third.agent.history.tokens_seen == 2_000
        assert third.agent.uplink.tokens_lost == lost
        balanced(third.agent)
        await third.end()


async def test_a_start_is_numbered_above_those_that_the_bus_remembers(folder: Path) -> None:
    """The store was set back: its claims are fewer than the starts that were heard, and nobody listens to an older one."""
    async with world(folder) as w:
        for number in (1, 2, 3):
            agent = w.learner("a")
            await train(agent, 4)
            assert agent.incarnation == number
        for number in (2, 3):
            shutil.rmtree((folder / claim_key("a", number)).parent)
        for name in "ab":
            agent = w.learner(name)
            await train(agent, 4)
            assert agent.incarnation == {"a": 4, "b": 1}[name]

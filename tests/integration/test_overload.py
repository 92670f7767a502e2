"""An overloaded syncer works at a constant rate: it reads no update twice, and no fragment delays another."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from isthmus.format.records.frame import Body, Data
from isthmus.format.records.keys import commit_key
from isthmus.format.rules import Pace, Rules
from isthmus.inspect import whatif
from isthmus.inspect.explain import explain
from isthmus.store import Layer, Store
from isthmus.syncer import agent as syncer_agent
from support.world import World, all_commits, in_virtual_time, seed_of, serving, train, until, world

PACE = Pace(heartbeat_s=0.2, silence_s=0.8)


class Slow(Layer):
    """A store that takes `read_s` to read an update, and in which a PUT to a prefix in `hangs` does not end."""

    def __init__(self, inner: Store, read_s: float = 0.0) -> None:
        super().__init__(inner)
        self.read_s = read_s
        self.hangs: tuple[str, ...] = ()
        self.reads: Counter[str] = Counter()

    async def get_range(self, key: str, start: int, stop: int) -> Body:
        """Read a range; count and delay the reads of updates."""
        if key.startswith("updates/"):
            self.reads[key] += 1
            await asyncio.sleep(self.read_s)
        return await super().get_range(key, start, stop)

    async def put(self, key: str, data: Data) -> None:
        """Write an object once its prefix is not in `hangs`."""
        while any(map(key.startswith, self.hangs)):  # noqa: ASYNC110  (the test that clears `hangs` sets no event)
            await asyncio.sleep(0.05)
        await super().put(key, data)


def slowly(w: World, read_s: float) -> tuple[World, Slow]:
    """Return the world behind a slow store, and that store."""
    slow: list[Slow] = []

    def wrap(inner: Store) -> Slow:
        slow.append(Slow(inner, read_s))
        return slow[0]

    return w.through(wrap), slow[0]


async def trained(w: World, learners: int, step_s: float) -> Sequence["asyncio.Future[object]"]:
    return [asyncio.ensure_future(train(w.learner(f"l{i}"), 10**6, step_s=step_s, seed=i)) for i in range(learners)]


@in_virtual_time
async def test_one_hung_put_holds_up_its_own_fragment_alone(folder: Path) -> None:
    async with world(folder, seed_of(Rules(fragments=4, sync_every=4), PACE)) as w:
        behind, slow = slowly(w, 0.05)
        async with serving(behind.syncer("s1"), killed=True) as syncer:
            training = await trained(w, 12, 0.1)

            def heads() -> list[int]:
                return [coordinator.head for coordinator in syncer.coordinators]

            await until(lambda: min(heads()) >= 3, "a few commits")
            before, began = heads(), asyncio.get_running_loop().time()
            await until(lambda: min(heads()) >= min(before) + 5, "undisturbed rounds")
            usual_s = (asyncio.get_running_loop().time() - began) / 5
            slow.hangs = ("values/00000/",)
            await asyncio.sleep(2 * usual_s)  # then all work in progress has ended, except the PUTs that hang
            before = heads()
            await asyncio.sleep(10 * usual_s)
            made = [head - old for head, old in zip(heads(), before, strict=True)]
            assert made[0] == 0
            assert min(made[1:]) >= 8, made
            slow.hangs = ()
            await until(lambda: heads()[0] > before[0] + 2, "the one that hung")
            for task in training:
                task.cancel()
        assert max(slow.reads.values()) == 1, "an update that was read while the round before was stored was read again"


@pytest.mark.parametrize("read_s", [0.1, pytest.param(0.4, marks=pytest.mark.tier("all"))])
@in_virtual_time
async def test_what_is_read_is_merged_however_slow_the_store(
    folder: Path, read_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve learners send an update of each of four fragments every 4 · 0.1 s: 120 updates a second.

    Four reads at once make 40 a second if a read takes 0.1 s, and 10 if it takes 0.4 s.
    """
    monkeypatch.setattr(syncer_agent, "FETCHES_MAX", 4)
    async with world(folder, seed_of(Rules(fragments=4, sync_every=4), PACE)) as w:
        behind, slow = slowly(w, read_s)
        async with serving(behind.syncer("s1"), killed=True) as syncer:
            training = await trained(w, 12, 0.1)
            await until(
                lambda: min(coordinator.head for coordinator in syncer.coordinators) >= 8,
                "rounds of every fragment",
                600.0,
            )
            for task in training:
                task.cancel()
        by_fragment = await all_commits(w.log)
        merged = [c for commits in by_fragment.values() for c in commits]
        kept_open = [c.header for c in merged if c.header.waited.own_s]
        assert kept_open, "no round was kept open for updates that were still to be read"
        told = await explain(w.log, commit_key(kept_open[0].fragment, kept_open[0].version))
        assert "kept open beyond grace for updates that s1 had heard of but not read yet" in "\n".join(told.lines)
        for commits in by_fragment.values():
            decided = whatif.decide(w.log, commits, (), {})
            assert [[i.key for i in inputs] for inputs in decided] == [
                [i.key for i in c.header.inputs] for c in commits
            ], "the recorded observations must give the recorded inputs"
        inputs = sum(len(c.header.inputs) for c in merged)
        assert inputs >= 0.95 * (sum(slow.reads.values()) - 12), (inputs, slow.reads.total())
        assert inputs / len(merged) >= 11.0, "updates announced in time must be merged"
        counts = Counter(given.learner for c in merged for given in c.header.inputs)
        assert max(counts.values()) <= 1.2 * min(counts.values()), counts

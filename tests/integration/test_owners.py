"""A learner's arrays that another rank owns give the same results there as they would give on the first rank."""

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isthmus.agent.tolerance import Tolerance
from isthmus.codecs import codec
from isthmus.codecs.kernels import F32
from isthmus.errors import Denied, LogCorrupt, RankLost, Unavailable
from isthmus.format.records import frame
from isthmus.format.records.keys import update_key
from isthmus.format.records.objects import SCHEMA, UpdateHeader
from isthmus.format.rules import Pace, Rules
from isthmus.learner.backend import ArrayRef, LocalBackend, PackedUpdate, Remote, local_array
from isthmus.learner.ranks import client, protocol, server
from isthmus.learner.ranks.arrays import ArrayTable
from isthmus.learner.ranks.client import Owners, Peers, interfaces
from isthmus.log import Log, fold
from isthmus.runtime.clock import threaded
from isthmus.store import Layer, Store
from isthmus.store.measured import Traffic
from support.world import World, seed_of, serving, train, until, world

SECRET = b"told to all ranks"
LOSSY = Rules(fragments=2, sync_every=2)


class Faulty(Layer):
    """A store in which every request fails with `error`, if there is one."""

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.error: Exception | None = None

    async def _through(self, operation: str, key: str, send: Any) -> Any:
        if self.error is not None:
            raise self.error
        return await send()


class Pair:
    """A first rank, which owns fragment 0, and another rank, which owns fragment 1, on one event loop."""

    def __init__(self, w: World, peers: Peers) -> None:
        self.w = w
        self.array_table = ArrayTable()
        self.peers = peers
        self.own = LocalBackend(w.log)
        self.there = Faulty(w.store)
        self.moved = [0, 0]
        self.traffic = Traffic()
        self.owners = Owners(self.own, peers, [0, 1], Tolerance(w.runtime), self._move)
        self.serving: asyncio.Task[None]

    def _move(self, up: int, down: int) -> None:
        self.moved[0] += up
        self.moved[1] += down

    async def serve(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.peers.port)
        protocol.write(writer, 0, protocol.Hello(1, SECRET))
        backend = LocalBackend(Log(self.w.run, self.there, self.w.runtime))
        try:
            await server.Served(backend, self.w.runtime, self.array_table, reader, writer, self.traffic).run()
        finally:
            writer.close()

    def header(self, p: int = 1, base: int = 0) -> UpdateHeader:
        return UpdateHeader(
            schema=SCHEMA, run=self.w.run.digest, fragment=p, learner="a", incarnation=1, base=base,
            codec=codec(self.w.run.rules.codec_up).name, steps=4, tokens=400, step=4, tokens_seen=400, train_s=1.0,
        )  # fmt: skip

    def draw(self, seed: int, p: int = 1) -> F32:
        return np.random.default_rng(seed).normal(size=self.w.run.layout.fragments[p].size).astype(np.float32)

    async def seen(self, held: ArrayRef) -> F32:
        """Return an array, wherever it lies."""
        if isinstance(held, Remote):
            found: F32 = await self.w.runtime.offload(self.array_table.wait_for, held.number)
            return found
        return local_array(held)

    async def both(
        self, base: F32, values: F32, feedback: F32 | None = None
    ) -> tuple[PackedUpdate | None, PackedUpdate | None]:
        """Pack an update on the first rank and on the other rank."""
        here = await self.own.pack(self.header(), base, values, feedback)
        held = [None if x is None else await self.owners.home(1, x) for x in (base, values, feedback)]
        assert held[0] is not None
        assert held[1] is not None
        return here, await self.owners.pack(self.header(), held[0], held[1], held[2])


@asynccontextmanager
async def pair(folder: Path, rules: Rules = LOSSY, rounds: int = 0) -> AsyncIterator[Pair]:
    """Yield two ranks of a learner, in a run whose fragments have had this many rounds."""
    with threaded(2, 0) as runtime:
        async with world(folder / "run", seed_of(rules), runtime=runtime) as w, paired(w, rounds) as two:
            yield two


@asynccontextmanager
async def paired(w: World, rounds: int) -> AsyncIterator[Pair]:
    if rounds:
        async with serving(w.syncer(pace=Pace(heartbeat_s=0.2, silence_s=0.8, snapshot_every=2))) as syncer:
            there = lambda: min(coordinator.head for coordinator in syncer.coordinators) >= rounds  # noqa: E731
            await train(w.learner("b"), 4, enough=there)
    peers = Peers([1], SECRET)
    async with peers.listening("127.0.0.1"):
        two = Pair(w, peers)
        two.serving = asyncio.ensure_future(two.serve())
        await peers.complete()
        try:
            yield two
        finally:
            two.serving.cancel()
            await asyncio.gather(two.serving, return_exceptions=True)


def run(folder: Path, body: Callable[[Pair], Awaitable[None]], **options: Any) -> None:
    async def go() -> None:
        async with pair(folder, **options) as two:
            await body(two)

    asyncio.run(go())


def test_an_update_packed_there_is_the_one_packed_here(tmp_path: Path) -> None:
    async def body(two: Pair) -> None:
        for feedback in (None, two.draw(3)):
            here, there = await two.both(two.draw(1), two.draw(2), feedback)
            assert here is not None
            assert there is not None
            assert (there.digest, there.size) == (here.digest, here.size)
            assert isinstance(there.body, Remote)
            assert here.dropped is not None
            assert there.dropped is not None
            assert np.array_equal(await two.seen(there.dropped), await two.seen(here.dropped))
        assert here is not None
        assert there is not None
        key = update_key(1, "a", 0, there.digest)
        await two.owners.store(key, there)
        assert frame.digest(await two.w.store.get(key)) == here.digest
        # The first rank packs its own fragment itself.
        own = await two.owners.pack(two.header(0), two.draw(1, 0), two.draw(2, 0), None)
        assert own is not None
        assert not isinstance(own.body, Remote)

    run(tmp_path, body)


@pytest.mark.parametrize("rules", [Rules(fragments=2, codec_up="f32"), Rules(fragments=2, error_feedback=False)])
def test_what_drops_nothing_or_gives_it_up_leaves_nothing_there(tmp_path: Path, rules: Rules) -> None:
    async def body(two: Pair) -> None:
        here, there = await two.both(two.draw(1), two.draw(2))
        assert here is not None
        assert there is not None
        assert (here.dropped, there.dropped) == (None, None)
        assert there.digest == here.digest

    run(tmp_path, body, rules=rules)


def test_a_difference_that_is_not_finite_is_no_update(tmp_path: Path) -> None:
    async def body(two: Pair) -> None:
        assert await two.both(two.draw(1), np.full_like(two.draw(1), np.inf)) == (None, None)

    run(tmp_path, body)


def test_versions_and_sums_are_the_same_there(tmp_path: Path) -> None:
    async def body(two: Pair) -> None:
        for p in (0, 1):
            here = await fold.fold(two.w.log, p, fold.PublishedValue(two.w.log))
            there: fold.At[ArrayRef] = await fold.fold(two.w.log, p, two.owners)
            assert there.version == here.version >= 3
            assert isinstance(there.carried, Remote) == (p == 1)
            assert np.array_equal(await two.seen(there.carried), here.carried)
            # A fold from version 0 on, by the differences alone, gives the same.
            values = await two.owners.start(p, 0, *await first(two, p))
            async for at in fold.onward(two.w.log, p, two.owners, fold.At(0, values, two.w.run.digest, ())):
                there = at
            assert np.array_equal(await two.seen(there.carried), here.carried)
        a, b = two.draw(1), two.draw(2)
        total = two.owners.sum(1, await two.owners.home(1, a), await two.owners.home(1, b))
        assert np.array_equal(await two.seen(total), a + b)

    run(tmp_path, body, rounds=3)


async def first(two: Pair, p: int) -> tuple[str, None]:
    ((_, key),) = [found for found in await two.w.log.snapshots(p) if found[0] == 0]
    return key, None


def test_what_goes_wrong_there_is_said_here_as_it_is(tmp_path: Path) -> None:
    async def body(two: Pair) -> None:
        values: ArrayRef = await two.owners.start(1, 0, *await first(two, 1))
        commit = await two.w.log.commit(1, 1)
        assert commit is not None
        two.there.error = Unavailable("away")
        with pytest.raises(Unavailable, match=r"rank 1: .*away"):
            await two.owners.step(values, commit)
        two.there.error = Denied("not you")
        with pytest.raises(Denied, match=r"rank 1: .*not you"):
            await two.owners.step(values, commit)
        two.there.error = None
        await two.w.store.put(commit.header.value_key, b"other bytes")
        with pytest.raises(LogCorrupt, match=r"rank 1: .*was named") as caught:
            await two.owners.step(values, commit)
        assert caught.value.key == commit.header.value_key
        assert caught.value.after(1, 0).readable == (1, 0), "the error must arrive complete"
        two.there.error = ValueError("a mistake of ours")
        with pytest.raises(Exception, match=r"rank 1: .*a mistake of ours"):
            await two.owners.restart(commit)
        two.there.error = None
        assert await two.owners.home(1, two.draw(1)), "the other rank must go on serving"

    run(tmp_path, body, rounds=1)


def test_what_nobody_refers_to_any_more_is_let_go_of_there(tmp_path: Path) -> None:
    async def body(two: Pair) -> None:
        held = [await two.owners.home(1, two.draw(n)) for n in range(3)]
        total = two.owners.sum(1, held[0], held[1])
        assert len(two.array_table) >= 3
        held.clear()  # although the sum, which was only just requested, is still made from both arrays
        gc.collect()
        assert np.array_equal(await two.seen(total), two.draw(0) + two.draw(1))
        assert len(two.array_table) == 1
        # An array that is on its way from the training thread may be released before it arrives.
        late = two.peers.of[1].remote()
        number = late.number
        del late
        gc.collect()
        await two.owners.is_finite(total)
        two.array_table.put(number, two.draw(9))
        assert len(two.array_table) == 1
        # A request waits for an array that has not arrived yet.
        coming = two.peers.of[1].remote()
        asked_for = asyncio.ensure_future(two.owners.is_finite(coming))
        await asyncio.sleep(0.05)
        assert not asked_for.done()
        del total
        gc.collect()
        two.array_table.put(coming.number, two.draw(4))
        assert await asked_for

    run(tmp_path, body)


def test_what_many_threads_let_go_of_at_once_is_all_let_go_of(tmp_path: Path) -> None:
    async def body(two: Pair) -> None:
        held: list[list[Remote]] = [[] for _ in range(8)]
        for n in range(1600):
            held[n % 8].append(two.peers.remote(1))
            two.array_table.put(held[n % 8][-1].number, two.draw(0))
        await asyncio.gather(*(asyncio.to_thread(some.clear) for some in held))
        await until(lambda: len(two.array_table) == 0, "all are let go of")

    run(tmp_path, body)


def test_a_rank_that_is_gone_ends_whoever_waits_for_it(tmp_path: Path) -> None:
    async def body(two: Pair) -> None:
        watching = asyncio.ensure_future(two.peers.until_one_is_lost())
        values = await two.owners.home(1, two.draw(1))
        asleep = asyncio.Event()

        async def never(operation: str, key: str, send: Any) -> None:
            asleep.set()
            await asyncio.Event().wait()

        two.there._through = never  # type: ignore[method-assign]
        here = await two.own.pack(two.header(), two.draw(1), two.draw(2), None)
        there = await two.owners.pack(two.header(), values, await two.owners.home(1, two.draw(2)), None)
        assert here is not None
        assert there is not None
        storing = asyncio.ensure_future(two.owners.store("updates/x", there))
        await asleep.wait()
        two.serving.cancel()
        with pytest.raises(RankLost, match="rank 1"):
            await storing
        with pytest.raises(RankLost, match="rank 1"):
            await watching
        with pytest.raises(RankLost, match="rank 1"):
            await two.owners.home(1, two.draw(1))

    run(tmp_path, body)


def test_bytes_moved_there_are_counted_here_once(tmp_path: Path) -> None:
    async def body(two: Pair) -> None:
        two.traffic.bytes_up, two.traffic.bytes_down = 7, 11
        await two.owners.home(1, two.draw(1))
        two.traffic.bytes_up += 5
        await two.owners.home(1, two.draw(1))
        assert two.moved == [12, 11]

    run(tmp_path, body)


def test_strangers_are_not_heard_and_who_never_comes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "CONNECT_S", 0.3)

    async def go() -> None:
        peers = Peers([1, 3], SECRET)
        async with peers.listening("127.0.0.1"):
            for hello in (protocol.Hello(1, b"guessed"), protocol.Hello(2, SECRET)):
                reader, writer = await asyncio.open_connection("127.0.0.1", peers.port)
                protocol.write(writer, 0, hello)
                assert await reader.read() == b"", "this connection must be rejected"
                writer.close()
            reader, writer = await asyncio.open_connection("127.0.0.1", peers.port)
            writer.write(protocol._HEAD.pack(1 << 31, 0))  # no message is this long
            assert await reader.read() == b""
            writer.close()
            _, writer = await asyncio.open_connection("127.0.0.1", peers.port)
            protocol.write(writer, 0, protocol.Hello(1, SECRET))
            with pytest.raises(Unavailable, match="ranks 3 of this learner did not reach the first rank"):
                await peers.complete()
            writer.close()

    asyncio.run(go())


def test_a_first_rank_that_cannot_be_reached_is_said_with_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "CONNECT_S", 1.0)
    with pytest.raises(Unavailable, match=r"127.0.0.1:1: .*; nowhere.invalid:1: "):
        asyncio.run(server._reach([("127.0.0.1", 1), ("nowhere.invalid", 1)]))


def test_ranks_of_one_machine_talk_over_loopback_alone() -> None:
    assert interfaces(True, "10.0.0.1", "a") == ("127.0.0.1", ["127.0.0.1"])
    assert interfaces(False, "10.0.0.1", "a") == ("0.0.0.0", ["10.0.0.1", "a"])
    assert interfaces(False, "fd00::1", "a") == ("::", ["fd00::1", "a"])
    assert interfaces(False, None, "a") == ("0.0.0.0", ["a"])

"""In virtual time, processes can be reordered, paused and killed, and the simulated ports can fail."""

import asyncio

import pytest

from isthmus.errors import ObjectMissing, Unavailable
from isthmus.store.edge import EdgeStore
from isthmus_lab.simulate.clock import Clock, StandsStill
from isthmus_lab.simulate.conditions import Conditions, Fault
from isthmus_lab.simulate.world import World


def test_time_passes_only_by_waiting() -> None:
    clock = Clock()

    async def body() -> float:
        await asyncio.sleep(3600.0)
        async with asyncio.timeout(5.0):
            await asyncio.sleep(1.0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5.0):
                await asyncio.sleep(10.0)
        return clock.time()

    assert clock.run_until_complete(body()) == 3606.0


def test_within_a_life_order_is_asyncios_and_among_lives_it_is_drawn() -> None:
    def order(seed: int) -> list[tuple[str, int]]:
        world = World(str(seed))
        said = []

        async def one(name: str) -> None:
            for i in range(5):
                said.append((name, i))
                await asyncio.sleep(0)

        async def body() -> None:
            await asyncio.gather(*(world.process(name).start(one(name)) for name in "abc"))

        world.clock.run_until_complete(body())
        return said

    runs = [order(seed) for seed in range(8)]
    for run in runs:
        for name in "abc":
            assert [i for who, i in run if who == name] == [0, 1, 2, 3, 4]
    assert len({tuple(run) for run in runs}) > 4
    assert order(3) == runs[3]


def test_a_paused_life_goes_on_with_what_it_believes() -> None:
    world = World("pause")
    seen = []

    async def watch() -> None:
        while True:
            seen.append(world.clock.time())
            await asyncio.sleep(1.0)

    async def body() -> None:
        process = world.process("p")
        process.start(watch())
        await asyncio.sleep(2.5)
        process.pause()
        await asyncio.sleep(10.0)
        process.resume()
        await asyncio.sleep(1.2)

    world.clock.run_until_complete(body())
    world.clock.close()
    assert seen == [0.0, 1.0, 2.0, 12.5, 13.5]


def test_a_killed_life_runs_no_finally_and_what_it_sent_still_lands() -> None:
    world = World("kill")
    ended = []

    async def write(store: EdgeStore) -> None:
        try:
            await store.put("a/b", b"sent")
        finally:
            ended.append(world.clock.time())

    async def body() -> None:
        process = world.process("p")
        ports = world.ports(process, Conditions(latency_s=1.0))
        process.start(write(ports.store))
        await asyncio.sleep(0.5)
        assert "a/b" not in world.objects.blobs
        process.kill()
        await asyncio.sleep(5.0)
        assert world.objects.get("a/b") == b"sent"
        assert not process.alive
        assert ended == []

    world.clock.run_until_complete(body())
    world.clock.close()  # the killed process is unwound only now


def test_what_can_never_come_is_an_error() -> None:
    clock = Clock()

    async def body() -> None:
        await asyncio.Event().wait()

    with pytest.raises(StandsStill, match="nothing is left to happen"):
        clock.run_until_complete(body())
    clock.close()


@pytest.mark.parametrize(
    ("fault", "lands"),
    [(Fault.ERROR, False), (Fault.LOST_REQUEST, False), (Fault.LOST_REPLY, True), (Fault.LANDS_LATE, True)],
)
def test_a_write_that_failed_may_have_landed(fault: Fault, lands: bool) -> None:
    world = World("fault")
    conditions = Conditions(latency_s=0.01, chances={fault: 1.0}, timeout_s=3.0, late_s=60.0)

    async def body() -> tuple[bool, bool]:
        ports = world.ports(world.process("p"), conditions)
        with pytest.raises(Unavailable):
            await ports.wire.put("a/b", b"x")
        soon = "a/b" in world.objects.blobs
        await asyncio.sleep(100.0)
        return soon, "a/b" in world.objects.blobs

    soon, later = world.clock.run_until_complete(body())
    assert later == lands
    assert soon == (fault is Fault.LOST_REPLY)
    assert conditions.seen[fault] == 1


def test_bodies_take_their_turn_on_a_link() -> None:
    world = World("link")

    async def body() -> float:
        wire = world.ports(world.process("p"), Conditions(up_bytes_s=100.0)).wire
        await asyncio.gather(wire.put("a/1", b"x" * 100), wire.put("a/2", b"x" * 300))
        return world.clock.time()

    assert world.clock.run_until_complete(body()) == pytest.approx(4.0)


def test_a_partition_lets_nothing_through_and_good_conditions_everything() -> None:
    world = World("cut")
    conditions = Conditions(timeout_s=2.0, cut_off=True)

    async def body() -> float:
        wire = world.ports(world.process("p"), conditions).wire
        with pytest.raises(Unavailable):
            await wire.list("")
        conditions.cut_off = False
        with pytest.raises(ObjectMissing):
            await wire.get("a")
        return world.clock.time()

    assert world.clock.run_until_complete(body()) == pytest.approx(2.0)

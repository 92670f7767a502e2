"""The simulation models handling times, stalls, one-way partitions, denied access and bodies without end."""

import asyncio
from collections.abc import Coroutine

import pytest

from isthmus.errors import Denied, Unavailable
from isthmus_lab.simulate.conditions import Conditions, Fault
from isthmus_lab.simulate.process import Costs, Process
from isthmus_lab.simulate.world import World


def run(world: World, body: Coroutine[None, None, None]) -> None:
    try:
        world.clock.run_until_complete(body)
    finally:
        world.clock.close()


def test_a_loop_that_handles_much_is_late() -> None:
    """A hundred callbacks of 10 ms each take a second, and a timer has to wait for callbacks."""
    world = World("handling")
    process = world.process("p", costs=Costs(callback_s=0.01))
    woke: list[float] = []

    async def busy() -> None:
        for _ in range(100):
            await asyncio.sleep(0)

    async def timer() -> None:
        await asyncio.sleep(0.001)
        woke.append(world.clock.time())

    async def body() -> None:
        await asyncio.gather(process.start(busy()), process.start(timer()))

    run(world, body())
    assert world.clock.time() == pytest.approx(1.0, abs=0.1)
    assert 0.01 < woke[0] < 1.0


def test_time_passes_while_one_callback_handles_several_things() -> None:
    world = World("clock")
    process = world.process("p", costs=Costs(callback_s=0.01))

    async def body() -> None:
        async def look() -> tuple[float, float]:
            return process.runtime.now(), process.runtime.now()

        first, second = await process.start(look())
        assert second - first == pytest.approx(0.01)

    run(world, body())


def test_a_stall_holds_one_process_up_and_no_other() -> None:
    world = World("stall")
    struck, other = world.process("struck", costs=Costs(callback_s=1e-6)), world.process("other")
    woke: dict[str, float] = {}

    async def turn(process: Process) -> None:
        for _ in range(100):
            process.runtime.now()
            await asyncio.sleep(0.01)
        woke[process.name] = world.clock.time()

    async def body() -> None:
        struck.stall(5.0)
        await asyncio.gather(struck.start(turn(struck)), other.start(turn(other)))

    run(world, body())
    assert woke["other"] == pytest.approx(1.0, abs=0.1)
    assert woke["struck"] == pytest.approx(6.0, abs=0.1)
    assert struck.life.stood_s(0.0, 10.0) == pytest.approx(5.0, abs=0.01)


def test_threads_of_a_process_are_few() -> None:
    """Eight tasks of a second each take two seconds on four threads."""
    world = World("threads")
    process = world.process("p", costs=Costs(byte_s=0.01, threads=4))

    async def body() -> None:
        async def work() -> None:
            await asyncio.gather(*(process.runtime.offload(len, bytes(100)) for _ in range(8)))

        await process.start(work())

    run(world, body())
    assert world.clock.time() == pytest.approx(2.0)


def test_half_a_partition_lets_one_direction_through() -> None:
    world = World("half")
    process = world.process("p")
    deaf, dumb = Conditions(cut_reads=True, timeout_s=2.0), Conditions(cut_writes=True, timeout_s=2.0)
    hears_nothing, says_nothing = world.ports(process, bus=deaf).bus, world.ports(process, bus=dumb).bus

    async def body() -> None:
        async def use() -> None:
            await hears_nothing.append("s", b"x")
            await asyncio.sleep(0.1)
            assert await says_nothing.read({"s": ""}, 0.0)
            with pytest.raises(Unavailable):
                await hears_nothing.read({"s": ""}, 0.0)
            with pytest.raises(Unavailable):
                await says_nothing.append("s", b"y")

        await process.start(use())

    run(world, body())
    assert deaf.seen == dumb.seen == {Fault.HALF_CUT: 1}


def test_what_may_not_be_read_is_denied_and_the_rest_is_not() -> None:
    world = World("denied")
    process = world.process("p")
    conditions = Conditions(unreadable=frozenset({"updates/00000/l/"}))
    wire = world.ports(process, conditions).wire

    async def body() -> None:
        async def use() -> None:
            for key in ("updates/00000/l/a", "updates/00000/m/a"):
                await wire.put(key, b"x")
            assert bytes(await wire.get("updates/00000/m/a")) == b"x"
            with pytest.raises(Denied):
                await wire.get("updates/00000/l/a")
            conditions.denies_writes = True
            with pytest.raises(Denied):
                await wire.put("updates/00000/m/a", b"y")

        await process.start(use())

    run(world, body())


def test_a_body_without_end_is_waited_for_until_the_connection_breaks() -> None:
    world = World("endless")
    process = world.process("p")
    conditions = Conditions(endless=frozenset({"k"}), timeout_s=3.0)
    wire = world.ports(process, conditions).wire

    async def body() -> None:
        async def use() -> None:
            await wire.put("k", b"x")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(500.0):
                    await wire.get("k")
            reading = asyncio.ensure_future(wire.get("k"))
            await asyncio.sleep(10.0)
            conditions.clear()
            with pytest.raises(Unavailable):
                await reading

        await process.start(use())

    run(world, body())

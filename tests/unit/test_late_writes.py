"""A simulated late write takes effect after its timeout, and no later than its conditions allow."""

import asyncio

import pytest

from isthmus.errors import Unavailable
from isthmus_lab.simulate.conditions import Conditions, Fault
from isthmus_lab.simulate.world import World

TIMEOUT_S, LATE_S, LATENCY_S = 3.0, 60.0, 0.01
WRITES = 200


@pytest.mark.parametrize("port", ["store", "bus"])
def test_a_late_write_lands_within_its_bound(port: str) -> None:
    world = World("late")
    conditions = Conditions(latency_s=LATENCY_S, chances={Fault.LANDS_LATE: 1.0}, timeout_s=TIMEOUT_S, late_s=LATE_S)
    ports = world.ports(world.process("p"), conditions, conditions)
    took: list[float] = []
    sent_at = 0.0
    landed = asyncio.Event()

    def note(*_: object) -> None:
        took.append(world.clock.time() - sent_at)
        landed.set()

    world.objects.written.append(note)
    world.streams.appended.append(note)

    async def body() -> None:
        nonlocal sent_at
        for number in range(WRITES):
            sent_at = world.clock.time()
            landed.clear()
            with pytest.raises(Unavailable):
                await (ports.wire.put(f"a/{number}", b"x") if port == "store" else ports.bus.append("s", b"x"))
            await landed.wait()

    world.clock.run_until_complete(body())
    assert len(took) == WRITES
    assert min(took) >= TIMEOUT_S
    assert max(took) <= TIMEOUT_S + LATE_S + 2 * LATENCY_S
    assert sum(took) / WRITES == pytest.approx(TIMEOUT_S + LATE_S / 2, rel=0.15)

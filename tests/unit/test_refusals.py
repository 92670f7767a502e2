"""A denied request counts as an outage for a while only if the same kind of request to store or bus worked before."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from isthmus.agent.tolerance import LATELY_S, REMIND_S, Tolerance, TolerantBus, TolerantStore
from isthmus.bus import Bus
from isthmus.errors import Denied, Unavailable
from isthmus_lab.simulate.world import World


class Gate:
    """A store and a bus in one, which denies the operations in `refuses`."""

    url = "admission://"

    def __init__(self) -> None:
        self.refuses: set[str] = set()

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        async def call(*_: object) -> bytes:
            if operation in self.refuses:
                raise Denied("403")
            return b""

        return call


def drive(body: Callable[[Gate, TolerantStore, TolerantBus, Tolerance], Awaitable[None]]) -> None:
    """Run `body` in virtual time with a gate, a tolerant store and a tolerant bus around it, and their tolerance."""
    world = World("refusals")

    async def go() -> None:
        admission, tolerance = Gate(), Tolerance(world.process("p").runtime)
        await body(
            admission, TolerantStore(admission, tolerance), TolerantBus(cast(Bus, admission), tolerance), tolerance
        )

    try:
        world.clock.run_until_complete(go())
    finally:
        world.clock.close()


@pytest.mark.parametrize(
    "request_of",
    [
        lambda store: store.put("commits/1", b""),
        lambda store: store.create("commits/1", b""),
        lambda store: store.list("commits/"),
        lambda store: store.delete("commits/1"),
        lambda store: store.get("values/1"),
    ],
    ids=["put", "create", "list", "delete", "another folder"],
)
def test_one_kind_of_request_does_not_vouch_for_another(
    request_of: Callable[[TolerantStore], Awaitable[object]],
) -> None:
    async def body(admission: Gate, store: TolerantStore, bus: TolerantBus, tolerance: Tolerance) -> None:
        await store.get("commits/1")
        admission.refuses = {"put", "create", "list", "delete", "get"}
        with pytest.raises(Denied):
            await request_of(store)
        admission.refuses = set()
        await request_of(store)
        admission.refuses = {"put", "create", "list", "delete", "get"}
        with pytest.raises(Unavailable):
            await request_of(store)

    drive(body)


def test_a_range_of_an_object_is_as_good_as_all_of_it() -> None:
    async def body(admission: Gate, store: TolerantStore, bus: TolerantBus, tolerance: Tolerance) -> None:
        await store.get_range("snapshots/1", 0, 8)
        admission.refuses = {"get"}
        with pytest.raises(Unavailable):
            await store.get("snapshots/2")

    drive(body)


def test_of_several_refusals_the_longest_counts() -> None:
    async def body(admission: Gate, store: TolerantStore, bus: TolerantBus, tolerance: Tolerance) -> None:
        await store.get("values/1")
        await store.put("values/1", b"")
        admission.refuses = {"put"}
        with pytest.raises(Unavailable):
            await store.put("values/1", b"")
        await asyncio.sleep(0.5 * LATELY_S)
        admission.refuses = {"put", "get"}
        with pytest.raises(Unavailable):
            await store.get("values/1")
        await asyncio.sleep(0.25 * LATELY_S)
        assert tolerance.refused_s == pytest.approx(0.75 * LATELY_S)

    drive(body)


def test_it_is_said_now_and_then_and_when_it_has_passed(caplog: pytest.LogCaptureFixture) -> None:
    async def body(admission: Gate, store: TolerantStore, bus: TolerantBus, tolerance: Tolerance) -> None:
        await store.get("commits/1")
        admission.refuses = {"get"}
        for _ in range(round(2.5 * REMIND_S)):
            with pytest.raises(Unavailable):
                await store.get("commits/1")
            await asyncio.sleep(1.0)
        admission.refuses = set()
        await store.get("commits/1")
        await store.get("commits/1")

    with caplog.at_level(logging.WARNING):
        drive(body)
    said = [record.getMessage() for record in caplog.records]
    assert len([text for text in said if "this process ends" in text]) == 3
    assert [text for text in said if "no longer" in text] == ["requests are no longer refused (read commits/)"]


def test_on_a_bus_saying_hearing_and_finding_streams_are_three_things() -> None:
    async def body(admission: Gate, store: TolerantStore, bus: TolerantBus, tolerance: Tolerance) -> None:
        await bus.append("s", b"x")
        admission.refuses = {"append", "tail", "names"}
        with pytest.raises(Unavailable):
            await bus.append("s", b"x")
        with pytest.raises(Denied):
            await bus.tail("s")
        admission.refuses = set()
        await bus.read({}, 0.0)
        admission.refuses = {"tail", "names"}
        with pytest.raises(Unavailable):
            await bus.tail("s")
        with pytest.raises(Denied):
            await bus.names()

    drive(body)

"""At start, an operator is told within ten seconds that store or bus cannot be reached (store: in virtual time)."""

import asyncio
import random
from typing import cast

import pytest

from isthmus.bus import redis as redis_bus
from isthmus.errors import Unavailable
from isthmus.format.records.frame import Body
from isthmus.log.run import read_run
from isthmus.runtime.clock import Runtime, inline
from isthmus.store import AT_START, RUNNING, EdgeStore, Store, s3
from isthmus.store.retrying import Patience
from isthmus_lab.simulate.clock import Clock

TEN_S = 10.0


class Silent:
    """A store that accepts every request and answers none; its client gives up after `slow_s`."""

    url = "s3://silent/run"

    def __init__(self, slow_s: float) -> None:
        self.slow_s, self.asked = slow_s, 0

    async def get_range(self, key: str, start: int, stop: int) -> Body:
        self.asked += 1
        await asyncio.sleep(self.slow_s)
        raise Unavailable("no answer")


class Absent(Silent):
    """A store that refuses every connection."""

    async def get_range(self, key: str, start: int, stop: int) -> Body:
        self.asked += 1
        raise Unavailable("connection refused")


def told_after(store: Silent, patience: Patience) -> float:
    """Return the seconds until a process that reads the run is told that it cannot be read."""
    clock = Clock()
    draw = random.Random(0)
    draw.random = lambda: 1.0  # type: ignore[method-assign]  # the longest pause there can be
    runtime = Runtime(clock.time, clock.time, draw, inline, lambda: "0" * 16)
    edge = EdgeStore(cast(Store, store), runtime, patience)

    async def body() -> float:
        began = clock.time()
        with pytest.raises(Unavailable):
            await read_run(edge)
        return clock.time() - began

    took_s: float = clock.run_until_complete(body())
    return took_s


@pytest.mark.parametrize("kind", [Silent, Absent])
def test_at_start_it_is_said_well_within_ten_seconds(kind: type[Silent]) -> None:
    store = kind(s3.CONNECT_TIMEOUT_S + s3.READ_TIMEOUT_S)
    assert told_after(store, AT_START) < TEN_S - 4.0, "the other four seconds are for starting a process"
    assert store.asked == AT_START.attempts > 1, "one lost packet is no reason to give up"


def test_once_it_has_worked_an_outage_is_ridden_out() -> None:
    assert told_after(Absent(0.0), RUNNING) > TEN_S / 2


def test_a_redis_that_does_not_answer_is_given_up_before_that_too() -> None:
    assert redis_bus.CONNECT_TIMEOUT_S + redis_bus.WRITE_TIMEOUT_S <= TEN_S

"""The more a checkpoint costs, the longer a learner waits until the next one."""

import asyncio
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from isthmus.learner.boundary import CopyState
from isthmus.learner.checkpoint import LoopState, StateCopy
from isthmus.learner.incarnation import FIRST_S, Incarnation
from isthmus_lab.simulate.clock import Clock

CADENCE_S = 60.0


class Uplink:
    """An uplink with nothing under way."""

    incarnation = 1
    tokens_lost = 0

    def traffic(self) -> tuple[()]:
        """Return nothing."""
        return ()


def asked_at(held_s: float, stored_s: float, until_s: float = 3000.0, cadence_s: float = CADENCE_S) -> list[float]:
    """Return when checkpoints are requested.

    Each holds the training thread for `held_s`, and storing it takes `stored_s`.
    """
    clock = Clock()
    found: list[float] = []
    runtime: Any = type("Now", (), {"now": staticmethod(clock.time)})()

    async def body() -> None:
        async with asyncio.TaskGroup() as tasks:

            def tell(message: object) -> None:
                assert isinstance(message, CopyState)
                found.append(clock.time())
                incarnation.take(StateCopy(1, 1, 1.0, (), LoopState(), held_s), tasks)

            incarnation = Slow(tell, runtime, stored_s, cadence_s)
            asking = tasks.create_task(incarnation.ask_for_checkpoints())
            await asyncio.sleep(until_s)
            asking.cancel()

    clock.run_until_complete(body())
    clock.close()
    return found


class Here:
    async def landed(self, fragment: int, held: Any) -> Any:
        return held


class Slow(Incarnation):
    """An incarnation that takes `stored_s` to store a checkpoint."""

    def __init__(self, tell: Any, runtime: Any, stored_s: float, cadence_s: float) -> None:
        nothing: Any = None
        log: Any = SimpleNamespace(
            run=None, store=None, signer=None, members=SimpleNamespace(signed=False, current=None)
        )
        uplink: Any = Uplink()
        here: Any = Here()
        super().__init__(
            log, runtime, "l", uplink, here, nothing, heartbeat_s=1.0, checkpoint_s=cadence_s, tell=tell,
            through=lambda: None,
        )  # fmt: skip
        self._takes_s = stored_s

    async def _is_useful(self, frozen: StateCopy) -> bool:
        await asyncio.sleep(self._takes_s)
        return False


@pytest.mark.parametrize(
    ("held_s", "stored_s", "apart_s"),
    [
        (0.1, 1.0, CADENCE_S),
        (1.2, 0.0, CADENCE_S),  # 2 % of a minute
        (3.0, 0.0, 150.0),
        (0.0, 30.0, 200.0),  # 15 % of the uplink
        (0.0, 1000.0, 1000.0),  # an outage: never two at once
        (1000.0, 0.0, 10 * CADENCE_S),
    ],
)
def test_what_costs_more_is_taken_more_seldom(held_s: float, stored_s: float, apart_s: float) -> None:
    at = asked_at(held_s, stored_s)
    apart = [after - before for before, after in pairwise(at)]
    assert at[0] == pytest.approx(FIRST_S), "a process that was just started is killed more often than later"
    assert len(apart) >= 1
    assert all(apart_s <= seconds + 1e-6 <= apart_s + CADENCE_S for seconds in apart), apart


def test_a_short_period_begins_with_itself() -> None:
    assert asked_at(0.0, 0.0, until_s=11.0, cadence_s=5.0) == [5.0, 10.0]
    assert asked_at(0.0, 0.0, until_s=1e9, cadence_s=float("inf")) == []

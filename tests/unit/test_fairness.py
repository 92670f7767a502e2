"""No author takes more than its share of a syncer's message handling, and no user more than its share of fetches."""

import asyncio
from typing import Any

import pytest

from isthmus.syncer.fairness import FairQueue, FairSlots


def queue(each: int = 4, total: int = 100) -> tuple[FairQueue[Any], list[str]]:
    dropped: list[str] = []
    return FairQueue(each, total, dropped.append), dropped


def drained(q: FairQueue[Any]) -> list[Any]:
    found = []
    while q:
        found.append(q.get_nowait())
    return found


def test_authors_are_served_in_turn_each_in_its_own_order() -> None:
    q, _ = queue()
    for event in ("a1", "a2", "a3", "b1", "c1", "c2"):
        q.put(event[0], event)
    assert drained(q) == ["a1", "b1", "c1", "a2", "c2", "a3"]


def test_whoever_says_a_thousand_things_waits_for_itself_and_loses_its_own_oldest() -> None:
    q, dropped = queue(each=4)
    for i in range(1000):
        q.put("loud", f"loud {i}")
    q.put("quiet", "quiet 0")
    assert dropped == ["loud"] * 996
    assert drained(q) == ["loud 996", "quiet 0", "loud 997", "loud 998", "loud 999"]


def test_where_many_wait_each_has_less_room() -> None:
    q, dropped = queue(each=50, total=100)
    for who in range(20):
        q.put(f"l{who}", (who, 0))
    for i in range(1, 50):
        q.put("l0", (0, i))
    assert len(q) <= 100
    assert set(dropped) == {"l0"}
    assert len([e for e in drained(q) if e[0] == 0]) == 5


def test_the_owners_events_go_first_and_are_never_dropped() -> None:
    q, dropped = queue(each=1, total=1)
    q.put("a", "a1")
    for i in range(10):
        q.put_own(i)
    assert drained(q) == [*range(10), "a1"]
    assert dropped == []


async def test_waiting_for_an_event_loses_none() -> None:
    q, _ = queue()
    got = asyncio.ensure_future(q.get())
    await asyncio.sleep(0)
    q.put("a", 1)
    assert await got == 1
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(q.get(), 0.01)
    q.put("a", 2)
    assert await q.get() == 2
    with pytest.raises(IndexError):
        q.get_nowait()


class Users:
    """Users of a pool of slots; `holding` names those that hold one."""

    def __init__(self, total: int, each: int) -> None:
        self.slots = FairSlots(total, each)
        self.holding: list[str] = []
        self.leave: dict[str, list[asyncio.Event]] = {}
        self.tasks: list[asyncio.Task[None]] = []

    def come(self, user: str) -> None:
        left = asyncio.Event()
        self.leave.setdefault(user, []).append(left)

        async def hold() -> None:
            async with self.slots.slot(user):
                self.holding.append(user)
                try:
                    await left.wait()
                finally:
                    self.holding.remove(user)

        self.tasks.append(asyncio.ensure_future(hold()))

    async def go(self, user: str) -> None:
        self.leave[user].pop(0).set()
        await self.settle()

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)


async def test_one_user_holds_at_most_its_share_and_others_pass_it() -> None:
    u = Users(total=4, each=2)
    for user in ("a", "a", "a", "a", "b", "c"):
        u.come(user)
    await u.settle()
    assert sorted(u.holding) == ["a", "a", "b", "c"]
    await u.go("b")
    assert sorted(u.holding) == ["a", "a", "c"]  # a has its share, however many slots are free
    await u.go("a")
    assert sorted(u.holding) == ["a", "a", "c"]
    for task in u.tasks:
        task.cancel()
    await asyncio.gather(*u.tasks, return_exceptions=True)
    assert u.holding == []


async def test_one_that_was_slow_holds_a_single_slot_until_it_is_quick_again() -> None:
    u = Users(total=4, each=3)
    u.slots.judge("slow", slow=True)
    for _ in range(3):
        u.come("slow")
    await u.settle()
    assert u.holding == ["slow"]
    u.slots.judge("slow", slow=False)
    await u.go("slow")
    assert u.holding == ["slow", "slow"]
    for task in u.tasks:
        task.cancel()
    await asyncio.gather(*u.tasks, return_exceptions=True)


async def test_who_gives_up_waiting_leaves_no_slot_behind() -> None:
    u = Users(total=1, each=1)
    u.come("a")
    await u.settle()
    u.come("b")
    await u.settle()
    u.tasks[1].cancel()
    await u.settle()
    await u.go("a")
    u.come("c")
    await u.settle()
    assert u.holding == ["c"]
    await u.go("c")

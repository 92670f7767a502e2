"""Authors and users are served in turn, a user that has its share is passed over, and no slot is ever lost."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from isthmus.syncer.fairness import SLOW_MAX, FairQueue, FairSlots


class Queue(FairQueue[object]):
    """A queue that keeps the author of each event that it dropped."""

    def __init__(self, each: int = 4, total: int = 100) -> None:
        self.lost: list[str] = []
        super().__init__(each, total, self.lost.append)


def drained(found: Queue) -> list[object]:
    return [found.get_nowait() for _ in range(len(found))]


# --- events -----------------------------------------------------------------------------------------------------------


def test_who_comes_anew_waits_behind_those_who_wait() -> None:
    found = Queue()
    for who in "ab":
        found.put(who, f"{who} 0")
        found.put(who, f"{who} 1")
    assert found.get_nowait() == "a 0"
    found.put("c", "c 0")
    assert drained(found) == ["b 0", "a 1", "c 0", "b 1"]


def test_of_one_author_the_oldest_is_dropped_and_counted_by_name() -> None:
    found = Queue(each=3)
    for i in range(5):
        found.put("loud", i)
    found.put("quiet", "word")
    assert found.lost == ["loud", "loud"]
    assert len(found) == 4
    assert drained(found) == [2, "word", 3, 4]
    assert len(found) == 0


def test_where_many_wait_each_may_have_less_waiting_but_always_one() -> None:
    found = Queue(each=10, total=20)
    for who in range(4):
        for i in range(10):
            found.put(f"l{who}", i)
    assert len(found) <= 10 + 10 + 6 + 5
    assert found.lost.count("l3") == 5
    crowd = Queue(each=10, total=5)
    for who in range(30):
        crowd.put(f"l{who}", who)
    assert crowd.lost == []
    assert drained(crowd) == list(range(30))


# --- fetches ----------------------------------------------------------------------------------------------------------


class Users:
    """Users of a pool of slots; each task holds its slot until it is told to give it back."""

    def __init__(self, total: int, each: int) -> None:
        self.slots = FairSlots(total, each)
        self.holding: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.released: list[asyncio.Event] = []

    def want(self, user: str) -> int:
        """Ask for a slot; return the number of this request."""
        release = asyncio.Event()

        async def hold() -> None:
            async with self.slots.slot(user):
                self.holding.append(user)
                await release.wait()
                self.holding.remove(user)

        self.tasks.append(asyncio.ensure_future(hold()))
        self.released.append(release)
        return len(self.tasks) - 1

    async def settle(self) -> list[str]:
        """Let all tasks run until they wait; return the users that hold a slot."""
        for _ in range(10):
            await asyncio.sleep(0)
        return sorted(self.holding)

    async def done(self) -> None:
        """Give all slots back."""
        for release in self.released:
            release.set()
        await asyncio.gather(*self.tasks, return_exceptions=True)


@asynccontextmanager
async def users_of(total: int, each: int) -> AsyncIterator[Users]:
    """Share `total` slots, and check at the end that all of them are free again."""
    users = Users(total, each)
    yield users
    await users.done()
    for i in range(total):
        users.want(f"last {i}")
    assert len(await users.settle()) == total
    await users.done()


async def test_a_slot_given_back_goes_to_whoever_may_have_it_in_order() -> None:
    async with users_of(total=3, each=2) as users:
        first = [users.want("a"), users.want("a"), users.want("b")]
        for who in ("a", "b", "c"):
            users.want(who)
        assert await users.settle() == ["a", "a", "b"]
        users.released[first[2]].set()  # the slot of b: the next in order is a, which has its share
        assert await users.settle() == ["a", "a", "b"]
        users.released[first[0]].set()
        assert await users.settle() == ["a", "a", "b"]
        users.released[first[1]].set()
        assert await users.settle() == ["a", "b", "c"]


async def test_all_that_can_be_served_are_served_also_those_behind_one_that_cannot() -> None:
    async with users_of(total=2, each=1) as users:
        numbers = [users.want("a"), users.want("b")]
        users.want("a")
        users.want("a")
        users.want("c")
        users.want("d")
        assert await users.settle() == ["a", "b"]
        users.released[numbers[1]].set()
        assert await users.settle() == ["a", "c"]
        users.released[numbers[0]].set()
        assert await users.settle() == ["a", "c"]


async def test_a_request_cancelled_in_the_moment_it_is_served_gives_its_slot_back() -> None:
    async with users_of(total=1, each=1) as users:
        first = users.want("a")
        waiting = users.want("b")
        users.want("c")
        await users.settle()
        users.released[first].set()
        for _ in range(20):
            # Once the first task is done, the slot has been given to the second one, which has not run since.
            if users.tasks[first].done():
                break
            await asyncio.sleep(0)
        users.tasks[waiting].cancel()
        assert await users.settle() == ["c"]


async def test_those_remembered_as_slow_are_bounded() -> None:
    slots = FairSlots(4, 2)
    slots.judge("first", True)
    for i in range(SLOW_MAX):
        slots.judge(f"l{i}", True)
    async with AsyncExitStack() as stack:
        for _ in range(2):
            await asyncio.wait_for(stack.enter_async_context(slots.slot("first")), 5.0)


async def test_whoever_waits_hears_once_when_it_waits_for_its_own_others_alone() -> None:
    slots = FairSlots(2, 1)
    said: list[str] = []
    async with AsyncExitStack() as stack:
        others = [AsyncExitStack() for _ in range(2)]
        for name, other in zip(("a", "b"), others, strict=True):
            await other.enter_async_context(slots.slot(name, partial(said.append, f"{name} at once")))
        assert said == ["a at once", "b at once"]

        async def wait(name: str, number: int) -> None:
            async with slots.slot(name, lambda: said.append(f"{name}{number}")):
                await asyncio.sleep(0)

        waiting = [asyncio.ensure_future(wait(name, n)) for n, name in enumerate(("a", "a", "c", "b"))]
        await asyncio.sleep(0)
        assert said[2:] == [], "no slot is free: all wait for slots of others"
        await others[1].aclose()
        await asyncio.wait_for(asyncio.gather(*waiting[2:]), 5.0)
        assert sorted(said[2:]) == ["a0", "a1", "b3", "c2"], "a has its share, and its requests wait for nothing else"
        await others[0].aclose()
        await asyncio.wait_for(asyncio.gather(*waiting), 5.0)
        assert len(said) == 6, "each was told once"
        await stack.aclose()


async def test_the_owners_events_of_a_kind_can_be_taken_out_of_turn() -> None:
    queue: FairQueue[int | str] = FairQueue(4, 16, lambda _: None)
    queue.put("a", 7)
    for event in (1, "x", 2):
        queue.put_own(event)
    assert queue.take_own(int) == [1, 2]
    assert [queue.get_nowait() for _ in range(len(queue))] == ["x", 7]

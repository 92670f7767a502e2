"""Planted bugs: faults that reviews found, put back."""

import asyncio
import contextlib
import math
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

from isthmus.bus import replies
from isthmus.errors import ObjectMissing
from isthmus.learner import downlink, uplink
from isthmus.log import heal
from isthmus.rounds.events import CatchUp, CaughtUp, Tick
from isthmus.store import EdgeStore, FileStore
from isthmus.syncer import agent as syncer_agent
from isthmus.syncer.coordinator import FragmentCoordinator
from isthmus.syncer.fairness import FairQueue
from isthmus.syncer.fragment_reader import FragmentReader
from isthmus_lab.simulate import store as simulated_store
from simulation.bugs.planted import planted


@planted(20, "choir", caught_by=3)
def look_at_the_clock_only_when_nobody_speaks() -> Iterator[None]:
    """If a message waits, it is handled, and the timer starts anew."""

    async def run(self: Any, stopping: Any) -> None:
        async with asyncio.TaskGroup() as self._tasks:
            following = self._tasks.create_task(self._follow())
            while not stopping.is_set():
                now = self._runtime.now()
                deadline = self.rounds.deadline(now)
                if deadline is not None and deadline <= now:
                    deadline = now + self._pace.heartbeat_s
                event = None
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._pace.heartbeat_s if deadline is None else deadline - now):
                        event = await self._inbox.get()
                if event is None:
                    await self._do(self.rounds.on(Tick(), self._runtime.now()))
                else:
                    await self._do(await self._handle(event))
            for task in (following, *self._fetching):
                task.cancel()

    with patch.object(FragmentCoordinator, "run", run):
        yield


@planted(60, "siege", caught_by=3)
def a_syncer_without_its_store_keeps_its_fragments() -> Iterator[None]:
    """A syncer that sends messages counts as present, even if it cannot serve."""
    with (
        patch.object(syncer_agent.Syncer, "_able", lambda self: True),
        patch.object(FragmentCoordinator, "overdue", lambda self, silent_s: False),
    ):
        yield


@planted(60, "hostile", caught_by=42)
def a_flood_is_looked_into_message_by_message() -> Iterator[None]:
    """All messages share one queue, and each message about a version that does not exist causes a read of the log."""

    def __init__(self: Any, each: Any, total: Any, dropped: Any) -> None:
        original_init(self, total, total, dropped)

    def put(self: Any, author: Any, event: Any) -> None:
        original_put(self, "everybody", event)

    async def do(self: Any, actions: Any) -> None:
        actions = list(actions)
        await original_do(self, [action for action in actions if not isinstance(action, CatchUp)])
        for _ in range(sum(isinstance(action, CatchUp) for action in actions)):
            await original_do(self, await self._catch_up())

    original_init, original_put, original_do = FairQueue.__init__, FairQueue.put, FragmentCoordinator._do
    with (
        patch.object(FairQueue, "__init__", __init__),
        patch.object(FairQueue, "put", put),
        patch.object(FragmentCoordinator, "_do", do),
    ):
        yield


@planted(40)
def two_updates_carry_the_same_feedback() -> Iterator[None]:
    """What the codec dropped from the last merged update is sent with every open update."""

    def take_over(self: Any, p: Any, base: Any) -> Any:
        self.taken[p].setdefault(base, None)
        return self.residuals[p]

    with patch.object(uplink.Uplink, "_take_over", take_over):
        yield


@planted(200, caught_by=150)
def rounds_are_reopened_in_the_middle_of_a_look() -> Iterator[None]:
    """A round that opens while the log is being read loses its actions: its updates count as being fetched forever."""

    def go_to(self: Any, at: Any) -> None:
        original(self, at)
        self.rounds.on(CaughtUp(), self._runtime.now())

    original = FragmentCoordinator._go_to
    with patch.object(FragmentCoordinator, "_go_to", go_to):
        yield


@planted(60, "hostile", caught_by=8)
def a_fragment_starts_again_from_its_newest_snapshot() -> Iterator[None]:
    """What was merged since the snapshot was published, and is lost."""

    async def newest(log: Any, p: Any) -> Any:
        return max(version for version, _ in await log.snapshots(p))

    with patch.object(heal, "_newest_published", newest):
        yield


@planted(20, "thin", caught_by=19)
def version_numbers_decide_who_is_fetched() -> Iterator[None]:
    """The fragment with the lowest version is fetched first: a thin downlink never fetches the others."""
    with patch.object(downlink.Downlink, "_need", lambda self, p: -self.known[p].version):
        yield


@planted(200, caught_by=28)
def a_gateways_404_is_a_missing_object() -> Iterator[None]:
    """Every answer with status 404 is taken to say that the object does not exist."""

    def refused_read(*about: Any, key: str, **where: Any) -> Any:
        return ObjectMissing(key)

    with patch.object(simulated_store, "refused_read", refused_read):
        yield


@planted(200, caught_by=14)
def an_empty_listing_is_believed() -> Iterator[None]:
    """A gateway's page with status 200 is taken for a listing without objects."""
    with patch.object(EdgeStore, "list", EdgeStore._listed):
        yield


@planted(200, caught_by=2)
def a_lost_mount_is_an_empty_store() -> Iterator[None]:
    """The folder below the lost mount is read and written as if it were the run's."""
    with patch.object(FileStore, "_require_same", lambda self: None):
        yield


@planted(200, caught_by=21)
def a_demoted_primary_is_waited_for() -> Iterator[None]:
    """A demoted Redis answers READONLY forever, and nothing is merged any more."""
    waits = replies.Meaning(replies.Action.WAIT, "it will pass")
    with patch.dict(replies.MEANINGS, {"READONLY": waits}):
        yield


@planted(200, caught_by=17)
def hearsay_is_knowledge() -> Iterator[None]:
    """A fragment counts as behind as long as any message has named a version beyond it."""
    with patch.object(FragmentReader, "looked", lambda self, said: None):
        yield


@planted(60, "siege", caught_by=8)
def a_store_that_says_nothing_is_waited_for() -> Iterator[None]:
    """Without a timeout the store never counts as down, and the syncer's fragments get no commits."""
    with patch.object(syncer_agent, "HUNG_S", math.inf):
        yield


@planted(60, "siege")
def a_deaf_syncer_takes_itself_for_able() -> Iterator[None]:
    """A syncer whose bus answers takes itself for able, even if it reads no messages."""

    def able(self: Any) -> bool:
        away_s = max(self._reach.store_down_s, self._reach.refused_s, self._reach.bus_down_s)
        return bool(away_s < self._holders.silent_s and self._store.outage.hung_s < syncer_agent.HUNG_S)

    with patch.object(syncer_agent.Syncer, "_able", able):
        yield

"""The bus port in virtual time: streams that can be lost, and for every process a connection with delays and faults."""

import asyncio
import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

from typing_extensions import override

from isthmus.bus.base import READ_MAX, RETAINED_MESSAGES, START, Bus, BusItem
from isthmus.errors import Unavailable
from isthmus_lab.simulate.conditions import UNHEARD, Conditions, Fault
from isthmus_lab.simulate.process import Process

T = TypeVar("T")


@dataclass(slots=True)
class _Stream:
    said: deque[tuple[int, float, bytes]] = field(default_factory=lambda: deque(maxlen=RETAINED_MESSAGES))
    """Number, virtual time and body of each message."""
    count: int = 0


class Streams:
    """The messages on the bus, and the readers that wait for more."""

    def __init__(self) -> None:
        self.appended: list[Callable[[str, bytes], None]] = []
        """Functions that are called with every message added."""
        self._streams: dict[str, _Stream] = {}
        self._epoch = 0
        self.primary = 0
        """Number of the server that takes writes. Each failover increases it."""
        self._waiting: dict[asyncio.Future[None], Mapping[str, str]] = {}

    def append(self, stream: str, body: bytes, now: float = 0.0) -> None:
        """Add a message and wake the readers that wait for it."""
        kept = self._streams.setdefault(stream, _Stream())
        kept.count += 1
        kept.said.append((kept.count, now, body))
        for tell in self.appended:
            tell(stream, body)
        for waiter, positions in list(self._waiting.items()):
            if stream in positions and not waiter.done():
                waiter.set_result(None)

    def after(self, positions: Mapping[str, str]) -> dict[str, list[BusItem]]:
        """Return the messages after these positions. A position from before a `wipe` means the start of the stream."""
        found = {}
        for stream, position in positions.items():
            kept = self._streams.get(stream)
            if kept is None or not kept.said:
                continue
            at = self._number(position)
            if at >= kept.count:
                continue
            # Kept messages are numbered without gaps, so the new ones begin right behind the position.
            fresh = itertools.islice(kept.said, max(0, len(kept.said) - (kept.count - at)), None)
            found[stream] = [BusItem(f"{self._epoch}-{n}", body) for n, _, body in itertools.islice(fresh, READ_MAX)]
        return found

    def tail(self, stream: str) -> str:
        """Return the position behind the newest message."""
        return f"{self._epoch}-{self._streams[stream].count}" if stream in self._streams else START

    def before(self, stream: str, time: float) -> str:
        """Return the position before the first message at or after a time."""
        kept = self._streams.get(stream)
        if kept is None or not kept.said:
            return START
        first = next((n for n, at, _ in kept.said if at >= time), kept.count + 1)
        return f"{self._epoch}-{first - 1}"

    def names(self, since: float = -math.inf) -> set[str]:
        """Return the names of all streams, or of those written to at or after a time."""
        return {name for name, kept in self._streams.items() if not kept.said or kept.said[-1][1] >= since}

    def wipe(self) -> None:
        """Lose all messages, as a Redis without persistence does."""
        self._streams.clear()
        self._epoch += 1

    def fail_over(self) -> None:
        """Make another server the primary. Connected readers hear on, because the old server follows it now."""
        self.primary += 1

    def wait(self, waiter: "asyncio.Future[None]", positions: Mapping[str, str]) -> None:
        """Resolve a future at the next message on one of these streams."""
        self._waiting[waiter] = positions
        waiter.add_done_callback(lambda done: self._waiting.pop(done, None))

    def _number(self, position: str) -> int:
        epoch, _, number = position.partition("-")
        return int(number) if position and int(epoch) == self._epoch else 0


class SimulatedBus(Bus):
    """One process's connection to the streams."""

    def __init__(self, streams: Streams, process: Process, conditions: Conditions, url: str = "sim://bus") -> None:
        self.url = url
        self.conditions = conditions
        self._streams = streams
        self._process = process
        self._clock = process.clock
        self._server = streams.primary

    @override
    async def append(self, stream: str, *bodies: bytes) -> None:
        self._process.spend(len(bodies) * self._process.costs.message_s)
        if self._server != self._streams.primary:
            await self._refused_by_a_replica()
        harm = (Fault.ERROR, Fault.LOST_REQUEST, Fault.LOST_REPLY, Fault.LANDS_LATE, Fault.SWALLOWED)
        fault = self.conditions.strikes(self._process.random, f"append {stream}", *harm, writes=True)
        world, draw = self._clock.world.context, self._process.random
        if fault in UNHEARD:
            await asyncio.sleep(self.conditions.timeout_s)
        else:
            there = self.conditions.delay(draw)
            if fault is Fault.LANDS_LATE:
                there += self.conditions.timeout_s + draw.uniform(0.0, self.conditions.late_s)
            if fault in (Fault.LOST_REPLY, Fault.LANDS_LATE):
                bodies = bodies[: draw.randint(1, len(bodies))]  # the connection broke in the middle
            if fault not in (Fault.ERROR, Fault.SWALLOWED):
                for body in bodies:
                    self._clock.call_later(there, self._land, stream, body, context=world)
            lost = fault in (Fault.LOST_REPLY, Fault.LANDS_LATE)
            await asyncio.sleep(self.conditions.timeout_s if lost else there + self.conditions.delay(draw))
        if fault is not None and fault is not Fault.SWALLOWED:
            raise Unavailable(f"{self.url}: {fault.value}")

    @override
    async def read(self, positions: Mapping[str, str], timeout_s: float) -> Mapping[str, Sequence[BusItem]]:
        await self._travel()
        if self.conditions.deaf:
            self.conditions.strike(Fault.DEAF, "read")
            await asyncio.sleep(timeout_s)
            return {}
        found = self._streams.after(positions)
        if not found and timeout_s > 0.0:
            waiter: asyncio.Future[None] = self._clock.create_future()
            self._streams.wait(waiter, positions)
            timer = self._clock.call_later(timeout_s, _resolve, waiter, context=self._clock.world.context)
            try:
                await waiter
            finally:
                timer.cancel()
                waiter.cancel()
            found = self._streams.after(positions)
        await asyncio.sleep(self.conditions.delay(self._process.random))
        self._process.spend(sum(map(len, found.values())) * self._process.costs.message_s)
        return found

    @override
    async def ago(self, streams: Sequence[str], seconds: float) -> Mapping[str, str]:
        await self._travel()
        return {stream: self._streams.before(stream, self._clock.time() - seconds) for stream in streams}

    async def _refused_by_a_replica(self) -> NoReturn:
        """Raise the error of a server that is no longer the primary, and reconnect if the library would do so."""
        from isthmus.bus.replies import Action, meaning

        found = meaning(Unavailable("READONLY You can't write against a read only replica."))
        await asyncio.sleep(2.0 * self.conditions.delay(self._process.random))
        if found.action is Action.RECONNECT:
            self._server = self._streams.primary
        raise Unavailable(f"{self.url}: {found.words}")

    def _land(self, stream: str, body: bytes) -> None:
        self._streams.append(stream, body, self._clock.time())

    @override
    async def tail(self, stream: str) -> str:
        await self._travel()
        return self._streams.tail(stream)

    @override
    async def names(self, within_s: float | None = None) -> set[str]:
        await self._travel()
        return self._streams.names(-math.inf if within_s is None else self._clock.time() - within_s)

    async def _travel(self) -> None:
        """Wait for as long as a request and its reply take. Raises `Unavailable`."""
        harm = (Fault.ERROR, Fault.LOST_REQUEST, Fault.LOST_REPLY)
        fault = self.conditions.strikes(self._process.random, "read", *harm)
        if fault is not None:
            await asyncio.sleep(0.0 if fault is Fault.ERROR else self.conditions.timeout_s)
            raise Unavailable(f"{self.url}: {fault.value}")
        await asyncio.sleep(2.0 * self.conditions.delay(self._process.random))


def _resolve(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)

"""Whether an agent is well: its loop turns, its store and bus answer. May be asked from any thread, stuck or not."""

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from isthmus.bus.endpoints import Listener, Speaker
from isthmus.errors import Denied, ObjectMissing, Unavailable
from isthmus.format.records.keys import RUN_KEY
from isthmus.runtime.clock import Runtime
from isthmus.store import EdgeStore

if TYPE_CHECKING:
    from isthmus.runtime.metrics import Metrics

TICK_S = 0.1

LOOP_S_MAX = 10.0
"""A loop that has not turned for this long is stuck: nothing the agent does takes so long on it."""

PORT_S_MAX = 30.0
"""A store or bus that has not answered for this long is down."""

PROBE_S = 10.0
"""Without a request for this long the store is asked for a byte, so that silence means something."""


@dataclass(frozen=True)
class Pulse:
    """One look at an agent, in seconds since each last did what it is there for."""

    loop_s: float
    store_s: float
    bus_s: float
    ended: bool = False
    """The agent ended in order; its process may have more to do."""

    @property
    def alive(self) -> bool:
        """Whether the event loop turns. A process whose store or bus is away is alive: it rides that out."""
        return self.loop_s <= LOOP_S_MAX

    @property
    def trouble(self) -> str:
        """What is wrong, or empty."""
        if self.ended:
            return "ended"
        checks = (
            ("event loop", self.loop_s, LOOP_S_MAX),
            ("store", self.store_s, PORT_S_MAX),
            ("bus", self.bus_s, PORT_S_MAX),
        )
        return ", ".join(f"{what} silent for {for_s:.0f} s" for what, for_s, longest in checks if for_s > longest)


class Vitals:
    """Feels the pulse of one agent."""

    def __init__(
        self, runtime: Runtime, store: EdgeStore, listener: Listener, speaker: Speaker, metrics: "Metrics"
    ) -> None:
        self.lag_s_max = 0.0
        """Worst delay of the loop; whoever reads it may set it back."""
        self._runtime = runtime
        self._store = store
        self._listener = listener
        self._speaker = speaker
        self._at_rest = False
        self._metrics = metrics
        self._turned_at = runtime.now()
        self._began_at = runtime.now()
        metrics.store_silence.set_function(lambda: self._since(store.outage.answered_at))
        metrics.bus_silence.set_function(self._bus_s)

    def pulse(self) -> Pulse:
        """Look."""
        if self._at_rest:
            return Pulse(0.0, 0.0, 0.0, ended=True)
        return Pulse(self._runtime.now() - self._turned_at, self._since(self._store.outage.answered_at), self._bus_s())

    def rest(self) -> None:
        """The agent was asked to end, and has."""
        self._at_rest = True

    async def watch(self) -> None:
        """Measure the loop's delay and keep asking the store, until cancelled. What was before does not count."""
        self._began_at = self._turned_at = self._runtime.now()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tick())
            tasks.create_task(self._probe())

    async def _tick(self) -> None:
        while True:
            before = self._runtime.now()
            await asyncio.sleep(TICK_S)
            self._turned_at = self._runtime.now()
            lag = max(0.0, self._turned_at - before - TICK_S)
            self.lag_s_max = max(self.lag_s_max, lag)
            self._metrics.loop_lag.observe(lag)

    async def _probe(self) -> None:
        while True:
            await asyncio.sleep(PROBE_S / 2)
            if self._since(self._store.outage.answered_at) >= PROBE_S:
                with contextlib.suppress(Unavailable, Denied, ObjectMissing):
                    await self._store.get_range(RUN_KEY, 0, 1)

    def _bus_s(self) -> float:
        """Reading may work where speaking does not: a user without the right, a full server."""
        down = self._speaker.down_since
        return max(self._since(self._listener.answered_at), 0.0 if down is None else self._runtime.now() - down)

    def _since(self, at: float | None) -> float:
        return self._runtime.now() - max(self._began_at, at or 0.0)

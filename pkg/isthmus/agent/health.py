"""Health of an agent: whether its event loop runs and its store and bus answer.

Any thread may ask, also while the event loop is stuck.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from isthmus.bus import in_store
from isthmus.bus.endpoints import Listener, Speaker
from isthmus.errors import Denied, ObjectMissing, Unavailable
from isthmus.format.records.keys import RUN_KEY
from isthmus.runtime.clock import Runtime
from isthmus.store import EdgeStore

if TYPE_CHECKING:
    from isthmus.runtime.metrics import Metrics

logger = logging.getLogger(__name__)

STOOD_S = 5.0
"""A delay of the event loop that is longer is logged: others take the process for dead meanwhile."""

TICK_S = 0.1

LOOP_S_MAX = 10.0
"""An event loop that has not run for this long is stuck: nothing the agent does on it takes so long."""

PORT_S_MAX = 30.0
"""A store or bus that has not answered for this long is down."""

PROBE_S = 10.0
"""After this long without an answer the store is asked for one byte, so that its silence means an outage."""


@dataclass(frozen=True)
class Pulse:
    """The state of an agent at one moment: seconds since its loop last ran and since store and bus last answered."""

    loop_s: float
    store_s: float
    bus_s: float
    ended: bool = False
    """Whether the agent ended in order; its process may have more to do."""

    @property
    def alive(self) -> bool:
        """Whether the event loop runs. A process whose store or bus is away is alive: it waits until they are back."""
        return self.loop_s <= LOOP_S_MAX

    @property
    def trouble(self) -> str:
        """What is wrong; empty if nothing is."""
        if self.ended:
            return "ended"
        checks = (
            ("event loop", self.loop_s, LOOP_S_MAX),
            ("store", self.store_s, PORT_S_MAX),
            ("bus", self.bus_s, PORT_S_MAX),
        )
        return ", ".join(f"{what} silent for {for_s:.0f} s" for what, for_s, longest in checks if for_s > longest)


class Vitals:
    """Measures the health of one agent."""

    def __init__(
        self,
        runtime: Runtime,
        store: EdgeStore,
        listener: Listener,
        speaker: Speaker,
        metrics: "Metrics",
        bus_url: str = "",
        stood: Callable[[float], None] = lambda _: None,
    ) -> None:
        """`bus_url`: if the bus is in the store, an outage of the store does not count as one of the bus, too.

        `stood`: called with the seconds for which this process stood still, when it goes on.
        """
        self.lag_s_max = 0.0
        """Longest delay of the event loop [s]; the reader may reset it to 0."""
        self._runtime = runtime
        self._store = store
        self._listener = listener
        self._speaker = speaker
        self._in_store = in_store(bus_url)
        self._stood = stood
        self._at_rest = False
        self._metrics = metrics
        self._turned_at = runtime.now()
        self._began_at = runtime.now()
        metrics.store_silence.set_function(lambda: self._since(store.outage.answered_at))
        metrics.bus_silence.set_function(self._bus_s)

    def pulse(self) -> Pulse:
        """Return the present state of the agent."""
        if self._at_rest:
            return Pulse(0.0, 0.0, 0.0, ended=True)
        return Pulse(self._runtime.now() - self._turned_at, self._since(self._store.outage.answered_at), self._bus_s())

    def rest(self) -> None:
        """Note that the agent was asked to end, and has ended."""
        self._at_rest = True

    async def watch(self) -> None:
        """Measure the event loop's delay and probe a silent store, until cancelled.

        Silence before this call does not count.
        """
        self._began_at = self._turned_at = self._runtime.now()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tick())
            tasks.create_task(self._probe())

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.look(ticked=True)

    def look(self, *, ticked: bool = False) -> None:
        """Notice that this process has just stood still. Call this before acting on what may have changed meanwhile.

        When a process goes on, its tasks run in no certain order, and the one that ticks is not always the first.
        """
        now = self._runtime.now()
        lag = max(0.0, now - self._turned_at - TICK_S)
        if not ticked and lag <= STOOD_S:
            return
        self._turned_at = now
        self.lag_s_max = max(self.lag_s_max, lag)
        self._metrics.loop_lag.observe(lag)
        if lag > STOOD_S:
            logger.warning(
                "this process stood still for %.0f s: it was stopped (SIGSTOP), or its machine slept or was "
                "overloaded; it goes on by itself",
                lag,
            )
            self._stood(lag)

    async def _probe(self) -> None:
        while True:
            await asyncio.sleep(PROBE_S / 2)
            if self._since(self._store.outage.answered_at) >= PROBE_S:
                with contextlib.suppress(Unavailable, Denied, ObjectMissing):
                    await self._store.get_range(RUN_KEY, 0, 1)

    def _bus_s(self) -> float:
        """Return for how long the bus has not answered a read or has not accepted a message, whichever is longer [s].

        Reading may work where writing does not: a user without the permission, or a full server. Of a bus in the store,
        only what goes beyond the store's own silence counts.
        """
        down = self._speaker.down_since
        silent_s = max(self._since(self._listener.answered_at), 0.0 if down is None else self._runtime.now() - down)
        return max(0.0, silent_s - self._since(self._store.outage.answered_at)) if self._in_store else silent_s

    def _since(self, at: float | None) -> float:
        return self._runtime.now() - max(self._began_at, at or 0.0)

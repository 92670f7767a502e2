"""How agents talk and listen on a bus that may be away: speaking never blocks, listening comes back by itself."""

import asyncio
import itertools
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from isthmus.bus.base import NAMES_MAX, START, Bus, BusItem
from isthmus.errors import Unavailable
from isthmus.format.records.messages import AnyMessage, batches
from isthmus.format.signing import Signer
from isthmus.runtime.clock import Runtime

UNSAID_MAX = 512
"""Messages kept while the bus is away; the oldest are dropped, since whatever matters is said again."""

MESSAGES_AT_ONCE = 64
"""Messages sent in one request: one by one, a distant bus would take as many round trips, and they would pile up."""

NAMES_EVERY_S = 1.0
"""How often new streams are looked for, at most."""

RECENT_S = 120.0
"""A stream nothing was said on for so long is not read until something is: those of a run's past cost nothing. Agents
that are there say something every heartbeat."""

BACKOFF_S = (0.1, 2.0)


class Speaker:
    """Appends messages to one stream from a bounded queue."""

    def __init__(self, bus: Bus, stream: str, runtime: Runtime, signer: Signer | None = None) -> None:
        self._bus = bus
        self._signer = signer
        self._stream = stream
        self._runtime = runtime
        self._unsaid: deque[AnyMessage] = deque(maxlen=UNSAID_MAX)
        self._wake = asyncio.Event()
        self.down_since: float | None = None

    def say(self, message: AnyMessage) -> None:
        """Queue a message."""
        self._unsaid.append(message)
        self._wake.set()

    async def run(self) -> None:
        """Send what is queued, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self.flush()
            except Unavailable:
                self._wake.set()
                await asyncio.sleep(self._runtime.random.uniform(*BACKOFF_S))

    async def flush(self) -> None:
        """Send everything queued now. Raises `Unavailable`; what was not sent stays queued."""
        while self._unsaid:
            messages = list(itertools.islice(self._unsaid, MESSAGES_AT_ONCE))
            try:
                await self._bus.append(self._stream, *batches(messages, self._signer))
            except Unavailable:
                if self.down_since is None:
                    self.down_since = self._runtime.now()
                raise
            self.down_since = None
            for message in messages:
                if self._unsaid and self._unsaid[0] is message:  # else it was dropped meanwhile
                    self._unsaid.popleft()


class Listener:
    """Reads streams from positions of its own, finds new ones, and survives outages of the bus."""

    def __init__(
        self,
        bus: Bus,
        runtime: Runtime,
        wanted: Callable[[str], bool] | None,
        every_s: float = NAMES_EVERY_S,
        *,
        back_s: float | None = None,
        known: Callable[[], set[str]] = set,
    ) -> None:
        """`wanted`: which streams to read besides those in `positions`; None: no others are looked for. `known`: which
        of those may be there in any case: they are read where the list is full, as somebody may have filled it.

        `back_s`: how far back to begin in a stream that is found; None: at its beginning. Whatever matters is said
        again, so an agent that reads the streams of a thousand others has no use for all that is kept of them.
        """
        self.positions: dict[str, str] = {}
        self.down_since: float | None = None
        self.answered_at: float | None = None
        """When the bus last answered a read, on the runtime's clock."""
        self._bus = bus
        self._runtime = runtime
        self._wanted = wanted
        self._every_s = min(every_s, NAMES_EVERY_S)
        self._back_s = back_s
        self._known = known
        self._found: set[str] = set()
        self._heard: dict[str, float] = {}
        """When something was last heard on a stream that was found, or it was."""
        self._left: dict[str, str] = {}
        """Positions in streams that are not read for now."""
        self._begun = False

    async def follow(self, stream: str) -> None:
        """Read this stream, be it there or not, from as far back as one that is found. Raises `Unavailable`."""
        self.positions[stream] = START
        if self._back_s is not None:
            self.positions.update(await self._bus.ago([stream], self._back_s))

    async def find(self) -> None:
        """Look for streams, and leave those on which nothing is said any more. Raises `Unavailable`.

        Who begins at the beginning is told of all that are kept, once.
        """
        if self._wanted is None:
            return
        past = not self._begun and self._back_s is None
        listed = await self._bus.names(None if past else RECENT_S)
        there = {name for name in listed if self._wanted(name)}
        if len(listed) >= NAMES_MAX:
            there |= self._known()
        now = self._runtime.now()
        for name in self._found - there:
            # A stream on which something was heard lately is read on, even if the list of streams lacks it.
            if now - self._heard.get(name, -math.inf) >= RECENT_S:
                self._leave(name)
        fresh = sorted(there - self.positions.keys())
        positions = {name: self._left.pop(name) for name in fresh if name in self._left}
        new = [name for name in fresh if name not in positions]
        if new and self._back_s is not None:
            positions.update(await self._bus.ago(new, self._back_s))
        self.positions.update({name: positions.get(name, START) for name in fresh})
        # What there was before is left the next time, unless it speaks.
        self._heard.update(dict.fromkeys(fresh, -math.inf if past else now))
        self._found |= set(fresh)
        self._begun = True

    def _leave(self, name: str) -> None:
        self._found.discard(name)
        self._heard.pop(name, None)
        self._left[name] = self.positions.pop(name)
        if len(self._left) > NAMES_MAX:
            del self._left[next(iter(self._left))]

    async def backlog(self) -> AsyncIterator[tuple[str, BusItem]]:
        """Yield what is kept and not yet read, without waiting. Raises `Unavailable`."""
        await self.find()
        while found := await self._bus.read(self.positions, 0.0):
            for pair in self._advance(found):
                yield pair

    async def live(self, gap: Callable[[], None]) -> AsyncIterator[tuple[str, BusItem]]:
        """Yield what is said from here on, for ever; `gap` is called whenever the bus is back after an outage."""
        looked = self._runtime.now()
        while True:
            try:
                if self.down_since is not None or self._runtime.now() - looked >= self._every_s:
                    await self.find()
                    looked = self._runtime.now()
                found = await self._bus.read(self.positions, self._every_s)
            except Unavailable:
                if self.down_since is None:
                    self.down_since = self._runtime.now()
                await asyncio.sleep(self._runtime.random.uniform(*BACKOFF_S))
                continue
            self.answered_at = self._runtime.now()
            self._heard.update((name, self.answered_at) for name in found if name in self._heard)
            if self.down_since is not None:
                self.down_since = None
                gap()
            for pair in self._advance(found):
                yield pair

    def _advance(self, found: Mapping[str, Sequence[BusItem]]) -> list[tuple[str, BusItem]]:
        pairs = []
        for stream, messages in found.items():
            self.positions[stream] = messages[-1].position
            pairs += [(stream, message) for message in messages if message.body]
        return pairs

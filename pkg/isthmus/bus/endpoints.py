"""How agents talk and listen on a bus that may be away: speaking never blocks, listening comes back by itself."""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from isthmus.bus.base import START, Bus, Said
from isthmus.errors import Unavailable
from isthmus.records.messages import AnyMessage, batches
from isthmus.runtime import Runtime
from isthmus.signing import Signer

UNSAID_MAX = 512
"""Messages kept while the bus is away; the oldest are dropped, since whatever matters is said again."""

MESSAGES_AT_ONCE = 64
"""Messages sent in one request: one by one, a distant bus would take as many round trips, and they would pile up."""

NAMES_EVERY_S = 1.0
"""How often new streams are looked for, at most."""

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
    ) -> None:
        """`wanted`: which streams to read besides those in `positions`; None: no others are looked for.

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
        self._found: set[str] = set()

    async def follow(self, stream: str) -> None:
        """Read this stream, be it there or not, from as far back as one that is found. Raises `Unavailable`."""
        self.positions[stream] = START
        if self._back_s is not None:
            self.positions.update(await self._bus.ago([stream], self._back_s))

    async def find(self) -> None:
        """Look for streams, and forget those that are no more. Raises `Unavailable`."""
        if self._wanted is None:
            return
        there = {name for name in await self._bus.names() if self._wanted(name)}
        for name in self._found - there:
            self.positions.pop(name, None)
        fresh = sorted(there - self.positions.keys())
        if fresh and self._back_s is not None:
            self.positions.update(await self._bus.ago(fresh, self._back_s))
        self.positions.update({name: START for name in fresh if name not in self.positions})
        self._found = there & (self._found | set(fresh))

    async def backlog(self) -> AsyncIterator[tuple[str, Said]]:
        """Yield what is kept and not yet read, without waiting. Raises `Unavailable`."""
        await self.find()
        while found := await self._bus.read(self.positions, 0.0):
            for pair in self._advance(found):
                yield pair

    async def live(self, gap: Callable[[], None]) -> AsyncIterator[tuple[str, Said]]:
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
            if self.down_since is not None:
                self.down_since = None
                gap()
            for pair in self._advance(found):
                yield pair

    def _advance(self, found: Mapping[str, Sequence[Said]]) -> list[tuple[str, Said]]:
        pairs = []
        for stream, messages in found.items():
            self.positions[stream] = messages[-1].position
            pairs += [(stream, message) for message in messages if message.body]
        return pairs

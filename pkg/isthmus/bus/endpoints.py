"""How agents write and read on a bus that may be away: writing never blocks, and reading resumes by itself."""

import asyncio
import itertools
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence

from isthmus.bus.base import NAMES_MAX, READ_MAX, RETAINED_MESSAGES, START, Bus, BusItem, Refused
from isthmus.errors import Unavailable
from isthmus.format.records.messages import Announce, AnyMessage, Call, batches
from isthmus.format.signing import Signer
from isthmus.runtime.clock import Runtime

UNSAID_MAX = 512
"""Messages kept while the bus is away. The oldest are dropped: whatever matters is sent again."""

MESSAGES_AT_ONCE = 64
"""Messages sent in one request. Sent one by one, each would take a round trip, and a distant bus would fall behind."""

NAMES_EVERY_S = 1.0
"""Longest time between two searches for new streams [s]."""

RECENT_S = 120.0
"""A stream with no message for this long is not read until a new one comes, so that a run's old streams cost nothing.

A live agent sends a message every heartbeat.
"""

BACKLOG_READS = 2 * RETAINED_MESSAGES // READ_MAX + 1
"""Reads that return the messages kept when the first of them began: a bus keeps at most twice as many as it should."""

BACKOFF_S = (0.1, 2.0)

ASKING = (Announce, Call)
"""Messages that others answer at once: a round is open, or opens."""


class Speaker:
    """Appends messages to one stream, from a bounded queue."""

    def __init__(self, bus: Bus, stream: str, runtime: Runtime, signer: Signer | None = None) -> None:
        self._bus = bus
        self._signer = signer
        self._stream = stream
        self._runtime = runtime
        self._unsaid: deque[AnyMessage] = deque(maxlen=UNSAID_MAX)
        self._wake = asyncio.Event()
        self.down_since: float | None = None
        self.refused = ""
        """Why the bus refuses messages although it answers, by its last answer; else empty."""

    def say(self, message: AnyMessage) -> None:
        """Queue a message. It replaces an announcement on the same base that has not been sent.

        The bus may have been away. Whoever hears of the shorter update first may merge it, and the work that only the
        longer one holds would be rejected.
        """
        if isinstance(message, ASKING):
            self._bus.hurry()
        if isinstance(message, Announce):
            for waiting in [w for w in self._unsaid if isinstance(w, Announce) and _place(w) == _place(message)]:
                self._unsaid.remove(waiting)
        self._unsaid.append(message)
        self._wake.set()

    async def run(self) -> None:
        """Send queued messages, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self.flush()
            except Unavailable:
                self._wake.set()
                await asyncio.sleep(self._runtime.random.uniform(*BACKOFF_S))

    async def flush(self) -> None:
        """Send all queued messages. Raises `Unavailable`; messages that were not sent stay queued."""
        while self._unsaid:
            messages = list(itertools.islice(self._unsaid, MESSAGES_AT_ONCE))
            try:
                await self._bus.append(self._stream, *batches(messages, self._signer))
            except Unavailable as error:
                self.refused = str(error) if isinstance(error, Refused) else ""
                if self.down_since is None:
                    self.down_since = self._runtime.now()
                raise
            self.down_since, self.refused = None, ""
            sent = set(map(id, messages))
            while self._unsaid and id(self._unsaid[0]) in sent:  # the queue may have dropped some of them meanwhile
                self._unsaid.popleft()


def _place(message: Announce) -> tuple[int, int]:
    return message.fragment, message.base


class Listener:
    """Reads streams, remembers its positions, finds new streams, and survives outages of the bus."""

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
        """Create a listener that reads nothing yet.

        `wanted`: which streams to read besides those in `positions`; None: do not look for others. `every_s`: time
        between two searches for streams, and the longest wait of one read. `known`: wanted streams that are read even
        if missing from a full list of streams, since an attacker may have filled that list.

        `back_s`: how far back to begin in a stream that is found; None: at its beginning. Whatever matters is sent
        again, so an agent that reads a thousand streams does not need all their old messages.
        """
        self.positions: dict[str, str] = {}
        self.down_since: float | None = None
        self.answered_at: float | None = None
        """When the bus last answered a read, on the runtime's clock."""
        self.behind = False
        """Whether messages of before wait to be read, since this process stood still. Set by the reader; over once a
        read finds less than it may."""
        self._bus = bus
        self._runtime = runtime
        self._wanted = wanted
        self._every_s = min(every_s, NAMES_EVERY_S)
        self._back_s = back_s
        self._known = known
        self._found: set[str] = set()
        self._heard: dict[str, float] = {}
        """When a message last came on a stream that `find` added, or when the stream was added."""
        self._left: dict[str, str] = {}
        """Positions in streams that are not read for now."""
        self._begun = False

    async def follow(self, stream: str) -> None:
        """Read this stream, even if it does not exist yet, from `back_s` ago or its beginning. Raises `Unavailable`."""
        self.positions[stream] = START
        if self._back_s is not None:
            self.positions.update(await self._bus.ago([stream], self._back_s))

    async def find(self) -> None:
        """Start to read wanted streams that are new, and stop to read silent ones. Raises `Unavailable`.

        Without `back_s`, the first call takes all streams that are kept; later calls take only recently used ones.
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
            # A stream with recent messages is still read, even if the list of streams lacks it.
            if now - self._heard.get(name, -math.inf) >= RECENT_S:
                self._leave(name)
        fresh = sorted(there - self.positions.keys())
        positions = {name: self._left.pop(name) for name in fresh if name in self._left}
        new = [name for name in fresh if name not in positions]
        if new and self._back_s is not None:
            positions.update(await self._bus.ago(new, self._back_s))
        self.positions.update({name: positions.get(name, START) for name in fresh})
        # Streams from before the start are dropped at the next call, unless they were used lately.
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
        """Yield the messages that are kept and not yet read, without waiting. Raises `Unavailable`.

        This ends however fast messages come: a stream counts as read to its end once a read returns fewer of its
        messages than it may. In a busy run, no read of all streams would find nothing.
        """
        await self.find()
        unread: Iterable[str] = self.positions
        for _ in range(BACKLOG_READS):
            found = await self._bus.read({stream: self.positions[stream] for stream in unread}, 0.0)
            for pair in self._advance(found):
                yield pair
            unread = [stream for stream, messages in found.items() if len(messages) >= READ_MAX]
            if not unread:
                return

    async def live(self, gap: Callable[[float], None]) -> AsyncIterator[tuple[str, BusItem]]:
        """Yield new messages, for ever; `gap` is called with the seconds of each outage of the bus, when it is over."""
        looked = self._runtime.now()
        while True:
            try:
                if self.down_since is not None or self._runtime.now() - looked >= self._every_s:
                    await self.find()
                    looked = self._runtime.now()
                behind = self.behind
                found = await self._bus.read(self.positions, self._every_s)
            except Unavailable:
                if self.down_since is None:
                    self.down_since = self._runtime.now()
                await asyncio.sleep(self._runtime.random.uniform(*BACKOFF_S))
                continue
            self.answered_at = self._runtime.now()
            self._heard.update((name, self.answered_at) for name in found if name in self._heard)
            if (since := self.down_since) is not None:
                self.down_since = None
                gap(self.answered_at - since)
            for pair in self._advance(found):
                yield pair
            if behind:
                self.behind = any(len(messages) >= READ_MAX for messages in found.values())

    def _advance(self, found: Mapping[str, Sequence[BusItem]]) -> list[tuple[str, BusItem]]:
        pairs = []
        for stream, messages in found.items():
            self.positions[stream] = messages[-1].position
            pairs += [(stream, message) for message in messages if message.body]
        return pairs

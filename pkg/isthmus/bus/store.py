"""The bus in the run's own store: no server, only objects.

Each process has one object for each stream that it writes, a *box* with its newest messages, which it replaces to add
more. Readers find boxes by listing, and ask for the boxes of live writers directly. So a run's boxes are as many as its
processes, and reading costs one small request for each live writer, however many messages there are.

    bus/<run>/<stream>/<writer>

A writer is one process; its id is random, so it never writes over another's box. It numbers its messages. A reader's
position in a stream is the number of the last message that it read of each writer.

    offset  bytes
         0      8   magic "\\x89ISTHBOX"
         8      8   how many times the box was written
        16      8   number of the newest message
        24      …   messages, newest first: number (8), age in milliseconds (4), length (4), body
         …      …   zeros, until the size and how many times the box was written are equal modulo 256

All numbers are little endian. The zeros let a listing, which shows sizes and perhaps whole seconds, tell whether a box
was written. Ages are counted on the writer's clock up to the write, which the store's clock dates. So no clock of one
machine is compared with that of another.
"""

import asyncio
import math
import re
import struct
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from typing_extensions import override

from isthmus.bus.base import NAMES_MAX, READ_MAX, Bus, BusItem
from isthmus.errors import Denied, ObjectMissing, Unavailable
from isthmus.format.records.keys import BUS
from isthmus.runtime.clock import Runtime
from isthmus.store.base import Entry, Store

SCHEME = "store"

HEAD_BYTES = 4096
"""Bytes that are read of a box to see whether it has new messages. The newest few are among them."""

KEPT_BYTES = 128 << 10
"""Most bytes of a box's messages and their numbers together. One message is kept whatever its size."""

KEPT_S = 120.0
"""A message is kept in the box for this long."""

KEPT_LEAST = 16
"""So many of the newest messages are kept however old they are: who comes late hears each process's last words."""

BOX_MAX = KEPT_BYTES + (1 << 20)
"""Largest box that is read [bytes]."""

QUICK, SLOW = 0.1, 0.25
"""Time between two looks, in heartbeats: while an answer is due, and otherwise. A syncer gives four signs of life in a
heartbeat, so with looks that are further apart it would be taken for dead."""

QUICK_BEATS = 2.0
"""For how many heartbeats an answer is due after something was asked."""

LIVE_BEATS = 4.0
"""The box of a writer that was silent for this many heartbeats is found by listing only."""

ASKED_MAX = 12
"""Up to this many live writers are asked one by one; beyond, one listing costs less than so many reads."""

LIST_BEATS = 6.0
"""Heartbeats between two listings while the known writers are heard; otherwise a listing comes every heartbeat."""

BOXES_EACH = 64
"""Boxes of one stream that are read: those written last. A learner may make any number of boxes in its own stream."""

READS_AT_ONCE = 16

ABANDONED_S = 3600.0
"""A box of the same stream that was not written for this long is deleted: its process has ended."""

_MAGIC = b"\x89ISTHBOX"
_HEAD = struct.Struct("<8sQQ")
_SAID = struct.Struct("<QII")
_PAD = 256
_WRITER = re.compile(r"[0-9a-f]{16}")
_AGE_MAX = (1 << 32) - 1


class Said(NamedTuple):
    """A message in a box."""

    number: int
    age_s: float
    """Its age when the box was written."""
    body: bytes


class Opened(NamedTuple):
    """A box that was read."""

    written: int
    """How many times the box was written."""
    newest: int
    """The number of its newest message."""
    said: tuple[Said, ...]
    """Its messages, oldest first."""
    whole: bool
    """Whether these are all of the box's messages."""

    def reaches(self, number: int) -> bool:
        """Return whether no message behind this number is missing."""
        return bool(self.said) and self.said[0].number <= number + 1


def pack_box(written: int, newest: int, said: Sequence[Said]) -> bytes:
    """Return a box with these messages, oldest first."""
    parts = [_HEAD.pack(_MAGIC, written, newest)]
    for number, age_s, body in reversed(said):
        parts += [_SAID.pack(number, min(max(0, int(age_s * 1e3)), _AGE_MAX), len(body)), body]
    packed = b"".join(parts)
    return packed + bytes((written - len(packed)) % _PAD)


def open_box(data: bytes | bytearray | memoryview) -> Opened | None:
    """Return the messages in a box, or in its beginning; None if these bytes are no box."""
    view = memoryview(data)
    if len(view) < _HEAD.size:
        return None
    magic, written, newest = _HEAD.unpack_from(view)
    if magic != _MAGIC:
        return None
    at, last = _HEAD.size, newest + 1
    found: list[Said] = []
    while at + _SAID.size <= len(view):
        number, age_ms, size = _SAID.unpack_from(view, at)
        if not 0 < number < last:  # zeros: the end
            return Opened(written, newest, tuple(reversed(found)), whole=True)
        if at + _SAID.size + size > len(view):
            return Opened(written, newest, tuple(reversed(found)), whole=False)
        at += _SAID.size
        found.append(Said(number, age_ms / 1e3, bytes(view[at : at + size])))
        at += size
        last = number
    # What is left is too short for a message: the end of the box, or of the part that was read.
    return Opened(
        written, newest, tuple(reversed(found)), whole=not any(view[at:]) and len(view) % _PAD == written % _PAD
    )


@dataclass(slots=True)
class _Own:
    """The box that this process writes."""

    said: deque[tuple[int, float, bytes]] = field(default_factory=deque)
    """Number, time on this process's clock, and body."""
    written: int = 0
    newest: int = 0
    stored: int = 0
    """The newest message that the store has taken."""
    written_at: float = -math.inf
    tidied: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def trim(self, now: float) -> None:
        """Drop what is too old or too much."""
        room = KEPT_BYTES
        for kept, (_, at, body) in enumerate(reversed(self.said)):
            room -= _SAID.size + len(body)
            if kept and (room < 0 or (kept >= KEPT_LEAST and now - at > KEPT_S)):
                for _ in range(len(self.said) - kept):
                    self.said.popleft()
                return


@dataclass(slots=True)
class _Box:
    """What is known of another process's box."""

    listed: Entry | None = None
    """The box in the newest listing."""
    read: Entry | None = None
    """The box in the listing that showed what was read."""
    written: int = -1
    newest: int = 0
    said: tuple[Said, ...] = ()
    changed_at: float = 0.0
    """When the box was last seen to have changed, on this process's clock."""


class StoreBus(Bus):
    """Streams of one run in a store. A position names the last number read of each writer, as `WRITER:NUMBER …`."""

    polled = True

    def __init__(self, store: Store, runtime: Runtime, run: str, beat_s: float, gap_s: float = 0.0) -> None:
        """`run`: the beginning of the run's digest in hexadecimal. `beat_s`: the heartbeat of the run's processes.

        `gap_s`: least time between two writes of a box. What is said meanwhile goes with the next one.
        """
        self.url = f"{SCHEME}:"
        self._store = store
        self._runtime = runtime
        self._prefix = f"{BUS}{run}/"
        self._writer = runtime.new_id()
        self._beat_s, self._gap_s = beat_s, gap_s
        self._own: dict[str, _Own] = {}
        self._boxes: dict[str, dict[str, _Box]] = {}
        """By stream and writer."""
        self._lists: dict[str, float] = {}
        """When each prefix was last listed."""
        self._names: dict[str, float] = {}
        """The streams of the last full listing, and when each was last written, on the store's clock."""
        self._store_now = 0.0
        """The newest write that was listed: the time on the store's clock, or earlier."""
        self._looked: dict[str, float] = {}
        """When each stream was last looked at."""
        self._quick_until = -1.0
        self._looking = asyncio.Lock()
        self._reads = asyncio.Semaphore(READS_AT_ONCE)

    # --- writing ------------------------------------------------------------------------------------------------------

    @override
    async def append(self, stream: str, *bodies: bytes) -> None:
        own, now = self._own.setdefault(stream, _Own()), self._runtime.now()
        first = own.newest + 1
        for body in bodies:
            own.newest += 1
            own.said.append((own.newest, now, body))
        last = own.newest
        try:
            async with own.lock:  # whoever waits here may find that another append has sent its messages
                if own.stored < last:
                    await asyncio.sleep(own.written_at + self._gap_s - self._runtime.now())
                    await self._write(stream, own)
        except BaseException:
            # Their numbers are not used again: a reader may have seen the write whose answer was lost.
            own.said = deque(said for said in own.said if not first <= said[0] <= last)
            raise

    async def _write(self, stream: str, own: _Own) -> None:
        own.written_at = now = self._runtime.now()
        own.trim(now)
        own.written += 1
        newest = own.newest
        said = [Said(number, now - at, body) for number, at, body in own.said]
        await self._store.put(self._key(stream, self._writer), pack_box(own.written, newest, said))
        own.stored = newest
        if not own.tidied:
            own.tidied = True
            await self._tidy(stream)

    async def _tidy(self, stream: str) -> None:
        """Delete the boxes of processes of this stream that ended long ago."""
        with suppress(Unavailable, Denied):  # the next process of this stream tries again, or `isthmus gc`
            for _, _, entry in await self._list(f"{self._prefix}{stream}/"):
                if self._store_now - entry.modified > ABANDONED_S:
                    await self._store.delete(entry.key)

    @override
    def hurry(self) -> None:
        self._quick_until = self._runtime.now() + QUICK_BEATS * self._beat_s

    # --- reading ------------------------------------------------------------------------------------------------------

    @override
    async def read(self, positions: Mapping[str, str], timeout_s: float) -> Mapping[str, Sequence[BusItem]]:
        until = self._runtime.now() + timeout_s
        at = {stream: _numbers(position) for stream, position in positions.items()}
        while True:
            await self._look(positions, now=timeout_s <= 0.0)
            if found := self._after(at):
                return found
            left = until - self._runtime.now()
            if left <= 0.0:
                return {}
            await asyncio.sleep(min(QUICK * self._beat_s, left))

    def _after(self, positions: Mapping[str, dict[str, int]]) -> dict[str, list[BusItem]]:
        found = {}
        for stream, seen in positions.items():
            said_by = dict(self._said(stream))
            # The numbers of writers that are not listed are kept, since a listing may be late, but not for ever.
            at = seen.copy() if len(seen) < 4 * BOXES_EACH else {w: n for w, n in seen.items() if w in said_by}
            items: list[BusItem] = []
            for writer, said in said_by.items():
                for one in said:
                    if one.number > seen.get(writer, 0) and len(items) < READ_MAX:
                        at[writer] = one.number
                        items.append(BusItem(_position(at), one.body))
            if items:
                found[stream] = items
        return found

    def _said(self, stream: str) -> Iterable[tuple[str, Iterable[Said]]]:
        """Yield the writers of a stream, and the messages that are known of each."""
        if (own := self._own.get(stream)) is not None:
            yield self._writer, [Said(number, 0.0, body) for number, _, body in own.said if number <= own.stored]
        for writer, box in self._boxes.get(stream, {}).items():
            yield writer, box.said

    async def _look(self, streams: Collection[str], *, now: bool) -> None:
        """Read what is new in the boxes of these streams, if a look is due, or `now`."""
        if not streams:
            return
        async with self._looking:
            clock = self._runtime.now()
            every_s = (QUICK if clock < self._quick_until else SLOW) * self._beat_s
            if not now and all(clock < self._looked.get(stream, -every_s) + every_s for stream in streams):
                return
            live = {id(box) for *_, box in self._known(streams) if clock - box.changed_at < LIVE_BEATS * self._beat_s}
            many = len(live) > ASKED_MAX
            list_s = 0.0 if now or many else (LIST_BEATS if live else 1.0) * self._beat_s
            for prefix in self._prefixes(streams):
                if clock - self._listed_at(prefix) >= list_s:
                    await self._list(prefix)
            asked = [
                known for known in self._known(streams)
                if (known[2].listed != known[2].read) or (id(known[2]) in live and not many)
            ]  # fmt: skip
            failed = [e for e in await asyncio.gather(*(self._ask(*one) for one in asked)) if e is not None]
            if failed and len(failed) == len(asked):  # one box that cannot be read hides no other
                raise failed[0]
            recent = ((stream, at) for stream, at in self._looked.items() if clock - at < KEPT_S)
            self._looked = {**dict(recent), **dict.fromkeys(streams, clock)}

    def _known(self, streams: Iterable[str]) -> list[tuple[str, str, _Box]]:
        """Return the boxes of others that are known of these streams, with stream and writer."""
        return [(stream, writer, box) for stream in streams for writer, box in self._boxes.get(stream, {}).items()]

    def _prefixes(self, streams: Collection[str]) -> list[str]:
        """Return what to list: a few streams each by itself, else all at once."""
        return [f"{self._prefix}{stream}/" for stream in streams] if len(streams) <= 2 else [self._prefix]

    def _listed_at(self, prefix: str) -> float:
        return max(self._lists.get(prefix, -math.inf), self._lists.get(self._prefix, -math.inf))

    async def _list(self, prefix: str) -> list[tuple[str, str, Entry]]:
        """List boxes; return the stream, writer and entry of each, and forget the boxes that are gone."""
        asked_at = self._runtime.now()
        named = ((*self._names_in(entry.key), entry) for entry in await self._store.list(prefix))
        found = [(stream, writer, entry) for stream, writer, entry in named if writer]
        self._lists[prefix] = asked_at
        there: dict[str, dict[str, Entry]] = {}
        for stream, writer, entry in sorted(found, key=lambda box: box[2].modified, reverse=True):
            of_stream = there.setdefault(stream, {})
            if writer != self._writer and len(of_stream) < BOXES_EACH:
                of_stream[writer] = entry
        for stream in [stream for stream in self._boxes if f"{self._prefix}{stream}/".startswith(prefix)]:
            there.setdefault(stream, {})
        for stream, entries in there.items():
            known = self._boxes.get(stream, {})
            self._boxes[stream] = {writer: known.get(writer) or _Box() for writer in entries}
            for writer, entry in entries.items():
                self._boxes[stream][writer].listed = entry
        self._store_now = max([self._store_now, *(entry.modified for _, _, entry in found)])
        return found

    async def _ask(self, stream: str, writer: str, box: _Box) -> Unavailable | Denied | None:
        """Read a box; return why it cannot be read."""
        key, listed = self._key(stream, writer), box.listed
        try:
            async with self._reads:
                opened = open_box(await self._store.get_range(key, 0, HEAD_BYTES))
                if opened and opened.written != box.written and not (opened.whole or opened.reaches(box.newest)):
                    opened = open_box(await self._store.get_range(key, 0, BOX_MAX))
        except ObjectMissing:
            self._boxes[stream].pop(writer, None)
            return None
        except (Unavailable, Denied) as error:
            return error
        if opened is None or listed is None or listed.size % _PAD == opened.written % _PAD:
            box.read = listed  # else the box was written since it was listed, or the store showed an older one
        if opened is None or opened.written == box.written:
            return None
        fresh = tuple(said for said in opened.said if said.number > box.newest)
        box.said = _newest(opened.said if opened.whole else (*box.said, *fresh))
        box.written, box.newest, box.changed_at = opened.written, max(box.newest, opened.newest), self._runtime.now()
        return None

    # --- times and names ----------------------------------------------------------------------------------------------

    @override
    async def ago(self, streams: Sequence[str], seconds: float) -> Mapping[str, str]:
        await self._look(streams, now=True)
        since, clock = self._store_now - seconds, self._runtime.now()
        found = {}
        for stream in streams:
            at = {writer: box.newest for writer, box in self._boxes.get(stream, {}).items()}
            for writer, box in self._boxes.get(stream, {}).items():
                written_at = box.read.modified if box.read else math.inf
                for said in box.said:
                    if written_at - said.age_s >= since:
                        at[writer] = said.number - 1
                        break
            if (own := self._own.get(stream)) is not None:
                late = [number for number, said_at, _ in own.said if clock - said_at <= seconds]
                at[self._writer] = late[0] - 1 if late else own.newest
            found[stream] = _position(at)
        return found

    @override
    async def tail(self, stream: str) -> str:
        await self._look([stream], now=True)
        at = {writer: box.newest for writer, box in self._boxes.get(stream, {}).items()}
        if (own := self._own.get(stream)) is not None:
            at[self._writer] = own.stored
        return _position(at)

    @override
    async def names(self, within_s: float | None = None) -> set[str]:
        if within_s is None or self._runtime.now() - self._lists.get(self._prefix, -math.inf) >= self._beat_s:
            self._names = {}
            for stream, _, entry in await self._list(self._prefix):
                self._names[stream] = max(entry.modified, self._names.get(stream, 0.0))
        since = -math.inf if within_s is None else self._store_now - within_s
        late = sorted((modified, stream) for stream, modified in self._names.items() if modified >= since)
        return {stream for _, stream in late[-NAMES_MAX:]}

    # --- keys ---------------------------------------------------------------------------------------------------------

    def _key(self, stream: str, writer: str) -> str:
        return f"{self._prefix}{stream}/{writer}"

    def _names_in(self, key: str) -> tuple[str, str]:
        """Return the stream and the writer of a box; an empty writer for any other key."""
        stream, _, writer = key.removeprefix(self._prefix).rpartition("/")
        return stream, writer if stream and _WRITER.fullmatch(writer) else ""


def _newest(said: Sequence[Said]) -> tuple[Said, ...]:
    """Return the newest messages, as many as a box holds."""
    room = KEPT_BYTES
    for count, one in enumerate(reversed(said)):
        room -= _SAID.size + len(one.body)
        if room < 0 and count:
            return tuple(said[len(said) - count :])
    return tuple(said)


def _numbers(position: str) -> dict[str, int]:
    pairs = (part.partition(":") for part in position.split())
    return {writer: int(number) for writer, _, number in pairs}


def _position(numbers: Mapping[str, int]) -> str:
    return " ".join(f"{writer}:{number}" for writer, number in sorted(numbers.items()) if number)

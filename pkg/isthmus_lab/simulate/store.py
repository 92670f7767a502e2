"""The store port in virtual time: one set of objects, and for every process a connection with delays and faults.

Once sent, a request takes effect whether or not its sender lives to see the effect. Effects are atomic, as the port
requires. Requests and replies can be lost, are not repeated here, and may land minutes late.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from typing_extensions import override

from isthmus.errors import Denied, ObjectMissing, PortError, Unavailable
from isthmus.format.records.frame import Blob, Body, Data, payload_start
from isthmus.store.base import Entry, Store
from isthmus.store.refused import refusal, refused_read
from isthmus_lab.simulate.conditions import UNHEARD, Conditions, Fault, Wire
from isthmus_lab.simulate.process import EPOCH_S, Process

T = TypeVar("T")


@dataclass(slots=True)
class Objects:
    """The stored objects. Every method takes effect at once."""

    blobs: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    written: list[Callable[[str, bytes, bytes | None], None]] = field(default_factory=list)
    """Functions that are called after every write that took effect, with key, bytes, and the bytes before or None."""
    deleted: list[Callable[[str], None]] = field(default_factory=list)

    def get(self, key: str) -> bytes:
        """Return the bytes of an object. Raises `ObjectMissing`."""
        if key not in self.blobs:
            raise ObjectMissing(key)
        return self.blobs[key][0]

    def put(self, key: str, data: bytes, now: float) -> None:
        """Write an object."""
        before = self.blobs.get(key)
        self.blobs[key] = data, now
        for tell in self.written:
            tell(key, data, before[0] if before else None)

    def create(self, key: str, data: bytes, now: float) -> bool:
        """Write an object if its key has none; return whether it was written."""
        if key in self.blobs:
            return False
        self.put(key, data, now)
        return True

    def list(self, prefix: str) -> list[Entry]:
        """Return the entries below a prefix, in the order of their keys."""
        return [Entry(k, len(b), at) for k, (b, at) in sorted(self.blobs.items()) if k.startswith(prefix)]

    def delete(self, key: str) -> None:
        """Remove an object, if there is one."""
        if self.blobs.pop(key, None) is not None:
            for tell in self.deleted:
                tell(key)


class Mount(Protocol):
    """A process's mount of the folder that holds the objects."""

    def objects(self, unmounted: bool) -> Objects:
        """Return the objects in the folder. Raises the folder store's errors when it is another folder."""
        ...


class SimulatedStore(Store):
    """One process's connection to the objects."""

    def __init__(self, objects: Objects, process: Process, conditions: Conditions, url: str = "sim://run") -> None:
        self.url = url
        self.conditions = conditions
        self.bytes_up = 0
        self.bytes_down = 0
        self.reads: Counter[str] = Counter()
        self.read_bytes: Counter[str] = Counter()
        """Number of reads, and bytes that they returned, by the first part of the key."""
        self.mount: Mount | None = None
        self._earlier: dict[str, Sequence[Entry]] = {}
        """By prefix, the last listing that was not late, where listings may be late."""
        self._objects = objects
        self._process = process
        self._clock = process.clock
        self._up, self._down = Wire(), Wire()

    @override
    async def get(self, key: str) -> Body:
        return await self._read(key, lambda: self._there.get(key))

    @override
    async def get_range(self, key: str, start: int, stop: int) -> Body:
        return await self._read(key, lambda: self._there.get(key)[start:stop])

    @override
    async def put(self, key: str, data: Data) -> None:
        body = bytes(data)
        await self._request("put", key, lambda: self._there.put(key, body, self._wall()), up=body, writes=True)
        self.bytes_up += len(body)

    @override
    async def create(self, key: str, data: Blob) -> bool:
        body = bytes(data)
        done = await self._request(
            "create", key, lambda: self._there.create(key, body, self._wall()), up=body, writes=True
        )
        self.bytes_up += len(body)
        return done

    async def list(self, prefix: str) -> Sequence[Entry]:
        """See `Store.list`. Pages are read one after another: an object written meanwhile may be listed or not."""
        if prefix and not prefix.endswith("/"):
            raise ValueError(f"a prefix ends with '/': {prefix!r}")
        if Fault.LISTED_LATE not in self.conditions.chances:
            return await self._pages(prefix)
        found, draw = await self._pages(prefix), self._process.random
        strange = self.conditions.strikes(draw, f"list {prefix}", Fault.LISTED_LATE, Fault.LISTED_TWICE)
        if strange is Fault.LISTED_LATE:
            return self._earlier.get(prefix, ())
        self._earlier[prefix] = found
        return [*draw.choices(found, k=2 * len(found)), *found] if strange is Fault.LISTED_TWICE and found else found

    async def _pages(self, prefix: str) -> Sequence[Entry]:
        first: list[Entry] = await self._request("list", prefix, lambda: self._there.list(prefix))
        if len(first) < 2:
            return first
        page = first[: self._process.random.randrange(1, len(first) + 1)]
        rest: list[Entry] = await self._request("list", prefix, lambda: self._there.list(prefix))
        return page + [entry for entry in rest if entry.key > page[-1].key]

    @override
    async def delete(self, key: str) -> None:
        await self._request("delete", key, lambda: self._there.delete(key), writes=True)

    async def _read(self, key: str, effect: Callable[[], bytes]) -> Body:
        self.reads[key.partition("/")[0]] += 1
        body = bytearray(await self._request("get", key, effect, carries=True))
        self.bytes_down += len(body)
        self.read_bytes[key.partition("/")[0]] += len(body)
        if body and self.conditions.strikes(self._process.random, f"body of {key}", Fault.CORRUPTED) is Fault.CORRUPTED:
            at = self._process.random.randrange(len(body))
            body[at] ^= 1 << self._process.random.randrange(8)
        return body

    @property
    def _there(self) -> Objects:
        return self._objects if self.mount is None else self.mount.objects(self.conditions.unmounted)

    def _wall(self) -> float:
        return EPOCH_S + self._clock.time()

    def _of_a_gateway(self, verb: str, key: str) -> Any:
        """Return or raise what a client makes of a gateway's answer: a 404, or a page with status 200."""
        if verb == "list" and (self.conditions.lists_nothing or self._process.random.random() < 0.5):
            return []
        about = {"url": self.url, "where": self.url}
        if verb == "get":
            raise refused_read("404", 404, "a page", key=key, **about)
        raise refusal("404", 404, "a page", **about)

    async def _request(
        self,
        verb: str,
        key: str,
        effect: Callable[[], T],
        *,
        up: bytes = b"",
        carries: bool = False,
        writes: bool = False,
    ) -> T:
        """Send a request and wait for its result. Raises `PortError`.

        If the request `carries` a result, the result comes down the wire as a body.
        """
        conditions, draw, clock = self.conditions, self._process.random, self._clock
        harm = (Fault.ERROR, Fault.LOST_REQUEST, Fault.LOST_REPLY, *((Fault.LANDS_LATE,) if writes else ()), Fault.SLOW)
        self._process.spend(self._process.costs.request_s)
        fault = conditions.strikes(
            draw, f"{verb} {key}", *harm, key=key if verb == "get" or writes else "", writes=writes
        )
        if fault in UNHEARD:
            while conditions.silent:  # noqa: ASYNC110  (the code that lifts it sets no event)
                await asyncio.sleep(1.0)
            await asyncio.sleep(conditions.timeout_s)
            raise Unavailable(f"{self.url}: no answer")
        if fault is Fault.ENDLESS:
            # The client's timeout is for the next piece, not for the body, so it waits until the connection breaks.
            while any(map(key.startswith, conditions.endless)):  # noqa: ASYNC110  (the code that lifts it sets no event)
                await asyncio.sleep(1.0)
            raise Unavailable(f"{self.url}: the connection broke")
        answer: asyncio.Future[T] = clock.create_future()
        slow = draw.uniform(1.0, conditions.timeout_s) if fault is Fault.SLOW else 0.0

        def land() -> None:
            try:
                if fault in (Fault.ERROR, Fault.THROTTLED):
                    raise Unavailable(f"{self.url}: 503")
                if fault is Fault.DENIED:
                    raise Denied(f"{self.url}: access denied (403)")
                result = self._of_a_gateway(verb, key) if fault is Fault.GATEWAY else effect()
            except PortError as error:
                failure: PortError | None = error
            else:
                failure = None
            if fault in (Fault.LOST_REPLY, Fault.LANDS_LATE):
                return
            down = 0.0
            if failure is None and carries:
                down = self._down.through(clock.time(), _on_wire(result, conditions), conditions.down_bytes_s)

            def reply() -> None:
                if answer.done():
                    return
                if failure is not None:
                    answer.set_exception(failure)
                else:
                    answer.set_result(result)

            clock.call_later(down + slow + conditions.delay(draw), reply, context=clock.world.context)

        late = draw.uniform(0.0, conditions.late_s) + conditions.timeout_s if fault is Fault.LANDS_LATE else 0.0
        there = (
            self._up.through(clock.time(), _on_wire(up, conditions), conditions.up_bytes_s)
            + conditions.delay(draw)
            + late
        )
        clock.call_later(there, land, context=clock.world.context)
        try:
            if fault not in (Fault.LOST_REPLY, Fault.LANDS_LATE):
                return await answer
            await asyncio.sleep(conditions.timeout_s)
            raise Unavailable(f"{self.url}: no answer")
        finally:
            answer.cancel()


def _on_wire(body: Any, conditions: Conditions) -> float:
    """Return the bytes that a body takes on the wire: payloads scale with the model, headers do not."""
    head = min(len(body), payload_start(body))
    return head + conditions.payload_scale * (len(body) - head)

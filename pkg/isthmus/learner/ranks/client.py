"""The side of the first rank: a backend whose arrays lie with the ranks that own their fragments."""

import asyncio
import logging
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
from typing_extensions import override

from isthmus.agent.tolerance import Tolerance, kind
from isthmus.codecs.kernels import U8
from isthmus.errors import RankLost, Unavailable, known_error
from isthmus.format.records.frame import Blob
from isthmus.format.records.keys import LEARNERS
from isthmus.format.records.objects import Part, PartHeader, UpdateHeader
from isthmus.learner.backend import ArrayBackend, ArrayRef, LocalBackend, PackedUpdate, Remote, Stored, local_residual
from isthmus.learner.ranks import protocol
from isthmus.learner.ranks.arrays import Numbers
from isthmus.learner.ranks.server import CONNECT_S, WrapBackend, is_secret
from isthmus.log import Commit

logger = logging.getLogger(__name__)


Moved = Callable[[int, int], None]
"""Is called with the bytes moved to the store, and from the store."""


class Peer:
    """The first rank's connection to a rank that owns fragments. On the agent's loop, except `number` and `remote`."""

    def __init__(self, rank: int, numbers: Numbers, loop: asyncio.AbstractEventLoop) -> None:
        self.rank = rank
        self._numbers = numbers
        self._loop = loop
        self._writer: asyncio.StreamWriter | None = None
        self._waiting: dict[int, asyncio.Future[protocol.Answer]] = {}
        self._gone: deque[int] = deque()
        self._telling = False
        self._lost: RankLost | None = None

    def number(self) -> int:
        """Return an unused number. From any thread."""
        return self._numbers.take()

    def remote(self, number: int | None = None) -> Remote:
        """Return a reference to an array of that rank, under a new number if none is given. From any thread.

        When nothing refers to the array any more, that rank drops it.
        """
        found = Remote(self.rank, self.number() if number is None else number)
        weakref.finalize(found, self._forget, found.number).atexit = False
        return found

    def _forget(self, number: int) -> None:
        # A finalizer may run in any thread, at any point of the program.
        self._gone.append(number)
        if not self._telling:
            self._telling = True
            with suppress(RuntimeError):  # the loop has ended, so the other rank drops everything anyway
                self._loop.call_soon_threadsafe(self._say_forgotten)

    def _say_forgotten(self) -> None:
        self._telling = False  # reset before the queue is read, so that later numbers schedule another call
        numbers = []
        while self._gone:
            numbers.append(self._gone.popleft())
        if numbers and self._writer is not None and self._lost is None:
            protocol.write(self._writer, 0, protocol.Forget(numbers))

    async def listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, moved: Moved) -> None:
        """Receive answers until the connection ends, then raise `RankLost`."""
        self._writer = writer
        try:
            while True:
                envelope, _ = await protocol.read(reader)
                waiting = self._waiting.pop(envelope.number, None)
                match envelope.message:
                    case protocol.Answer() as answer:
                        moved(answer.bytes_up, answer.bytes_down)
                        if waiting is not None and not waiting.done():
                            waiting.set_result(answer)
                    case protocol.Failure(name, text, about):
                        if waiting is not None and not waiting.done():
                            waiting.set_exception(known_error(name, f"rank {self.rank}: {text}", about))
        except RankLost as error:
            self._lost = RankLost(f"rank {self.rank}: {error}")
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(self._lost)
            self._waiting.clear()
            raise self._lost from None

    async def ask(self, message: protocol.Asked, body: Blob = b"") -> protocol.Answer:
        """Return the rank's answer. Raises the error with which the rank failed, or `RankLost`."""
        number = self.number()
        answer: asyncio.Future[protocol.Answer] = self._loop.create_future()
        self._waiting[number] = answer
        self.post(message, body, number)
        assert self._writer is not None, "post has used it"
        try:
            await self._writer.drain()
        except OSError as error:
            logger.debug("rank %d: %s", self.rank, error)  # `listen` notices that the rank is lost
        return await answer

    def post(self, message: protocol.Asked, body: Blob = b"", number: int = 0) -> None:
        """Send a message without waiting for an answer. Raises `RankLost`."""
        if self._lost is not None:
            raise self._lost
        assert self._writer is not None, "nobody is asked before all have come"
        protocol.write(self._writer, number, message, body)


class Peers:
    """All other ranks that own fragments."""

    def __init__(self, ranks: Sequence[int], secret: bytes) -> None:
        """`ranks`: the ranks that are expected. Must be made on the agent's loop."""
        self._numbers = numbers = Numbers()
        loop = asyncio.get_running_loop()
        self.of: Mapping[int, Peer] = {rank: Peer(rank, numbers, loop) for rank in ranks}
        self.port = 0
        self.moved: Moved = lambda up, down: None
        self._secret = secret
        self._there: set[int] = set()
        self._all_there = asyncio.Event()
        self._listening: dict[int, asyncio.Task[None]] = {}
        self._writers: list[asyncio.StreamWriter] = []

    def remote(self, rank: int, number: int | None = None) -> Remote:
        """Return a reference to an array of a rank, see `Peer.remote`. From any thread."""
        return self.of[rank].remote(number)

    def reserve(self, count: int) -> int:
        """Return the first of `count` consecutive unused numbers. From any thread."""
        return self._numbers.take(count)

    @asynccontextmanager
    async def listening(self, host: str) -> AsyncIterator[None]:
        """Accept connections of the ranks, and close them at the end."""
        server = await asyncio.start_server(self._come, host, 0, limit=protocol.STREAM_LIMIT)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()
            for task in self._listening.values():
                task.cancel()
            for writer in self._writers:
                writer.close()

    async def complete(self) -> None:
        """Wait until all ranks have connected. Raises `Unavailable` if one does not."""
        try:
            async with asyncio.timeout(2 * CONNECT_S):
                if self.of:
                    await self._all_there.wait()
        except TimeoutError:
            missing = ", ".join(str(rank) for rank in self.of if rank not in self._there)
            raise Unavailable(
                f"ranks {missing} of this learner did not reach the first rank within {2 * CONNECT_S:g} s: see their "
                "logs for the cause; ranks connect over TCP, at ports that the system chooses"
            ) from None

    async def until_one_is_lost(self) -> None:
        """Wait until a rank is lost and raise its `RankLost`; never return normally."""
        if not self._listening:
            await asyncio.Event().wait()  # in a job of one rank, no other rank can be lost
        await asyncio.wait(self._listening.values(), return_when=asyncio.FIRST_EXCEPTION)
        for task in self._listening.values():
            if task.done():
                task.result()

    def _count(self, up: int, down: int) -> None:
        self.moved(up, down)

    async def _come(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(CONNECT_S):
                envelope, _ = await protocol.read(reader, protocol.HELLO_MAX, 0)
        except (RankLost, TimeoutError, ValueError):
            writer.close()
            return
        hello = envelope.message
        if (
            not isinstance(hello, protocol.Hello)
            or not is_secret(hello.secret, self._secret)
            or hello.rank not in self.of
        ):
            logger.warning("closed a connection from a process that is no rank of this learner")
            writer.close()
            return
        self._writers.append(writer)
        self._listening[hello.rank] = asyncio.ensure_future(self.of[hello.rank].listen(reader, writer, self._count))
        await asyncio.sleep(0)  # let `listen` start
        self._there.add(hello.rank)
        if len(self._there) == len(self.of):
            self._all_there.set()


class RunInfo(msgspec.Struct, frozen=True, array_like=True):
    """What the first rank tells all ranks, so that they can reach it."""

    run: bytes
    """The run, encoded by `told_run`."""
    owner: list[int]
    """The owning rank of each fragment."""
    addresses: list[tuple[str, int]]
    """Addresses at which the first rank listens."""
    secret: bytes


class Assembled(Protocol):
    """A learner's ranks, all of which have connected."""

    def backend(self, own: LocalBackend, tolerance: Tolerance, moved: Moved) -> ArrayBackend:
        """Return the backend for the arrays of all ranks. `own`: the backend for those of this process."""
        ...

    async def until_one_is_lost(self) -> None:
        """Wait until another rank is lost and raise `RankLost`; never return normally."""
        ...


@dataclass(frozen=True, slots=True)
class SingleRank(Assembled):
    """A learner of one process."""

    wrap: WrapBackend

    @override
    def backend(self, own: LocalBackend, tolerance: Tolerance, moved: Moved) -> ArrayBackend:
        return self.wrap(own)

    @override
    async def until_one_is_lost(self) -> None:
        await asyncio.Event().wait()


@dataclass(frozen=True, slots=True)
class RankGroup(Assembled):
    """A learner's fragments spread over its ranks."""

    peers: Peers
    owner: Sequence[int]
    wrap: WrapBackend
    """Makes the backend for the fragments that the first rank owns itself."""
    on_devices: bool
    """Whether ranks keep arrays on the devices that train."""

    @override
    def backend(self, own: LocalBackend, tolerance: Tolerance, moved: Moved) -> ArrayBackend:
        return Owners(self.wrap(own), self.peers, self.owner, tolerance, moved, on_devices=self.on_devices)

    @override
    async def until_one_is_lost(self) -> None:
        await self.peers.until_one_is_lost()


def interfaces(alone: bool, rendezvous: str | None, hostname: str) -> tuple[str, list[str]]:
    """Return the address at which the first rank listens, and the host names under which other ranks reach it.

    `alone`: all ranks are on its machine. `rendezvous`: where the job's ranks have met, if that is known.
    """
    if alone:
        return "127.0.0.1", ["127.0.0.1"]
    return ("::" if rendezvous and ":" in rendezvous else "0.0.0.0"), [*([rendezvous] if rendezvous else []), hostname]


class Owners(ArrayBackend):
    """A backend that has each operation done by the rank that owns the fragment's arrays."""

    divides = True

    def __init__(
        self,
        own: ArrayBackend,
        peers: Peers,
        owner: Sequence[int],
        tolerance: Tolerance,
        moved: Moved,
        *,
        on_devices: bool = False,
    ) -> None:
        """`own`: the backend for the first rank's own fragments. `owner`: the rank of each fragment. `moved` is told
        what other ranks move. `on_devices`: the ranks that own arrays stage and land them."""
        peers.moved = moved
        self._own = own
        self._peers = peers
        self._owner = owner
        self._tolerance = tolerance
        self._on_devices = on_devices

    @override
    async def start(self, fragment: int, version: int, key: str, commit: Commit | None) -> ArrayRef:
        if (peer := self._peer(fragment)) is None:
            return await self._own.start(fragment, version, key, commit)
        into = peer.number()
        await self._ask(peer, kind("read", key), protocol.Start(fragment, version, key, commit, into))
        return peer.remote(into)

    @override
    async def step(self, carried: ArrayRef, commit: Commit) -> ArrayRef:
        if not isinstance(carried, Remote):
            return await self._own.step(carried, commit)
        peer = self._peers.of[carried.rank]
        into, about = peer.number(), kind("read", commit.header.value_key)
        await self._ask(peer, about, protocol.Step(carried.number, commit, into))
        return peer.remote(into)

    @override
    async def restart(self, commit: Commit) -> ArrayRef:
        if (peer := self._peer(commit.header.fragment)) is None:
            return await self._own.restart(commit)
        into, about = peer.number(), kind("read", commit.header.value_key)
        await self._ask(peer, about, protocol.Restart(commit, into))
        return peer.remote(into)

    @override
    async def pack(
        self, header: UpdateHeader, base: ArrayRef, values: ArrayRef, feedback: ArrayRef | None
    ) -> PackedUpdate | None:
        if (peer := self._peer(header.fragment)) is None:
            return await self._own.pack(header, base, values, feedback)
        body, dropped = peer.number(), peer.number()
        carried = None if feedback is None else _there(feedback).number
        asked = protocol.Pack(header, _there(base).number, _there(values).number, carried, body, dropped)
        answer = await peer.ask(asked)
        if not answer.digest:
            return None
        left = peer.remote(dropped) if answer.yes else None
        return PackedUpdate(answer.digest, answer.size, peer.remote(body), left)

    @override
    async def store(self, key: str, packed: PackedUpdate) -> None:
        if not isinstance(packed.body, Remote):
            await self._own.store(key, packed)
            return
        peer = self._peers.of[packed.body.rank]
        await self._ask(peer, kind("create", key), protocol.Store(key, packed.body.number))

    @override
    def sum(self, fragment: int, a: ArrayRef, b: ArrayRef) -> ArrayRef:
        if (peer := self._peer(fragment)) is None:
            return self._own.sum(fragment, a, b)
        into = peer.number()
        peer.post(protocol.Sum(fragment, _there(a).number, _there(b).number, into))
        return peer.remote(into)

    @override
    async def staged(self, fragment: int, held: ArrayRef) -> ArrayRef:
        if not isinstance(held, Remote):
            return await self._own.staged(fragment, held)
        return await self._elsewhere(protocol.Stage, fragment, held)

    @override
    async def landed(self, fragment: int, held: ArrayRef) -> ArrayRef:
        if not isinstance(held, Remote):
            return await self._own.landed(fragment, held)
        return await self._elsewhere(protocol.Land, fragment, held)

    async def _elsewhere(self, move: type[protocol.Stage | protocol.Land], fragment: int, held: Remote) -> Remote:
        if not self._on_devices:
            return held
        peer = self._peers.of[held.rank]
        into = peer.number()
        await peer.ask(move(fragment, held.number, into))
        return peer.remote(into)

    @override
    async def home(self, fragment: int, held: ArrayRef) -> ArrayRef:
        if (peer := self._peer(fragment)) is None:
            return await self._own.home(fragment, held)
        into = peer.number()
        if isinstance(held, Stored):
            await self._ask(
                peer, kind("read", held.pieces[0].key), protocol.Bring(fragment, held.pieces, held.residual, into)
            )
        else:
            given = np.ascontiguousarray(local_residual(held))
            await peer.ask(protocol.Give(into, given.dtype == np.uint16), given.view(np.uint8).data)
        return peer.remote(into)

    @override
    async def is_finite(self, held: ArrayRef) -> bool:
        if not isinstance(held, Remote):
            return await self._own.is_finite(held)
        return (await self._peers.of[held.rank].ask(protocol.IsFinite(held.number))).yes

    @override
    async def keep(self, part: PartHeader, held: Sequence[ArrayRef | U8]) -> Part:
        if (peer := self._peers.of.get(part.rank)) is None:
            return await self._own.keep(part, held)
        asked = protocol.Keep(part, [_there(one).number for one in held])
        answer = await self._ask(peer, kind("write", LEARNERS), asked)
        assert answer.part is not None, "it says what it has stored"
        return answer.part

    def _peer(self, fragment: int) -> Peer | None:
        return self._peers.of.get(self._owner[fragment])

    async def _ask(self, peer: Peer, about: str, message: protocol.Asked) -> protocol.Answer:
        """Ask for something that uses the store. Its errors are tolerated like those of this process's requests."""
        return await self._tolerance.of(about, peer.ask(message))


def _there(held: ArrayRef | U8) -> Remote:
    assert isinstance(held, Remote), "all arrays of a fragment lie with its owner"
    return held

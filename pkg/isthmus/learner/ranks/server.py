"""The side of a rank that owns fragments: does what the first rank asks for with their arrays."""

import asyncio
import hmac
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from isthmus.agent.ports import open_place
from isthmus.errors import IsthmusError, RankLost, Unavailable, told
from isthmus.format.records.objects import Part
from isthmus.format.signing import Signer
from isthmus.learner.backend import ArrayBackend, LocalBackend, PackedUpdate, Stored
from isthmus.learner.ranks import protocol
from isthmus.learner.ranks.arrays import ArrayTable
from isthmus.log import Log
from isthmus.log.run import Run
from isthmus.runtime.clock import Runtime
from isthmus.store.measured import Traffic

logger = logging.getLogger(__name__)

CONNECT_S = 30.0
"""The first rank must be reached within this many seconds."""


WrapBackend = Callable[[LocalBackend], ArrayBackend]
"""Makes the backend of a rank's own fragments, around one that works in the host's memory."""


def local_backend(own: LocalBackend) -> ArrayBackend:
    """Return the backend as it is: it keeps all arrays in the host's memory."""
    return own


async def serve(
    url: str,
    run: Run,
    array_table: ArrayTable,
    make_backend: WrapBackend,
    rank: int,
    addresses: Sequence[tuple[str, int]],
    secret: bytes,
    threads: int,
    opened: Callable[[Log], None],
    signer: Signer | None = None,
) -> None:
    """Connect to the first rank and serve it until it closes.

    `threads`: how many threads share one computation here. `opened` is called with the log through which the run is
    read. `signer` signs what is stored here.

    Raises `Unavailable` if the first rank cannot be reached.
    """
    async with open_place(url, compute=threads) as store:
        own = LocalBackend(Log(run, store, store.runtime, signer))
        opened(own.log)
        reader, writer = await _reach(addresses)
        try:
            protocol.write(writer, 0, protocol.Hello(rank, secret))
            await Served(make_backend(own), store.runtime, array_table, reader, writer, store.traffic).run()
        finally:
            array_table.close()
            writer.close()


async def _reach(addresses: Sequence[tuple[str, int]]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    problems = []
    for host, port in addresses:
        try:
            async with asyncio.timeout(CONNECT_S / len(addresses)):
                return await asyncio.open_connection(host, port, limit=protocol.STREAM_LIMIT)
        except (OSError, TimeoutError) as error:
            problems.append(f"{host}:{port}: {told(error)}")
    raise Unavailable(f"the first rank of this learner cannot be reached ({'; '.join(problems)})")


def is_secret(said: bytes, secret: bytes) -> bool:
    """Return whether a peer knows the secret. The time that this takes reveals nothing about the secret."""
    return hmac.compare_digest(said, secret)


class Served:
    """A connection to the first rank, at a rank that serves it."""

    def __init__(
        self,
        backend: ArrayBackend,
        runtime: Runtime,
        array_table: ArrayTable,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        traffic: Traffic,
    ) -> None:
        self._backend = backend
        self._runtime = runtime
        self._array_table = array_table
        self._reader, self._writer = reader, writer
        self._traffic = traffic
        self._told = 0, 0

    async def run(self) -> None:
        """Answer until the first rank closes the connection or is gone. Other signs tell which it was."""
        async with asyncio.TaskGroup() as tasks:
            under_way: set[asyncio.Task[None]] = set()
            while True:
                try:
                    envelope, body = await protocol.read(self._reader)
                except RankLost as error:
                    logger.debug("served to the end: %s", error)
                    for task in under_way:
                        task.cancel()
                    return
                message = envelope.message
                if isinstance(message, protocol.Forget):
                    self._array_table.forget(message.numbers)
                    continue
                assert not isinstance(message, protocol.Hello | protocol.Answer | protocol.Failure), (
                    "only questions come this way"
                )
                # Look up the arguments now: the next message may forget them.
                known = {number: self._array_table.find(number) for number in _arguments(message)}
                if isinstance(message, protocol.Sum):
                    # Sums are computed at once: later messages may use the result and forget it. The arguments were
                    # made by earlier answers and sums, so they are here.
                    a, b = known[message.a], known[message.b]
                    assert a is not None, "made before"
                    assert b is not None, "made before"
                    self._array_table.put(message.into, self._backend.sum(message.fragment, a, b))
                    continue
                task = tasks.create_task(self._answer(envelope.number, message, known, body))
                under_way.add(task)
                task.add_done_callback(under_way.discard)

    async def _answer(self, number: int, message: protocol.Asked, known: dict[int, Any], body: bytearray) -> None:
        said: protocol.Said
        try:
            for missing in [n for n, thing in known.items() if thing is None]:
                known[missing] = await self._runtime.offload(self._array_table.wait_for, missing)
            said = await self._do(message, known, body)
        except IsthmusError as error:
            said = protocol.Failure(type(error).__name__, str(error), vars(error))
        except Exception as error:
            logger.exception("a question of the first rank")
            said = protocol.Failure(type(error).__name__, repr(error), {})
        with suppress(OSError):  # the first rank has gone, which the reading loop notices
            protocol.write(self._writer, number, said)
            await self._writer.drain()

    async def _do(self, message: protocol.Asked, known: dict[int, Any], body: bytearray) -> protocol.Answer:
        backend, array_table = self._backend, self._array_table
        match message:
            case protocol.Start(fragment, version, key, commit, into):
                array_table.put(into, await backend.start(fragment, version, key, commit))
            case protocol.Step(carried, commit, into):
                array_table.put(into, await backend.step(known[carried], commit))
            case protocol.Restart(commit, into):
                array_table.put(into, await backend.restart(commit))
            case protocol.Pack(header, base, values, feedback, at, dropped):
                carried_back = None if feedback is None else known[feedback]
                packed = await backend.pack(header, known[base], known[values], carried_back)
                if packed is not None:
                    array_table.put(at, packed)
                    if packed.dropped is not None:
                        array_table.put(dropped, packed.dropped)
                    return self._done(packed.digest, packed.size, packed.dropped is not None)
            case protocol.Store(key, at):
                packed = known[at]
                assert isinstance(packed, PackedUpdate), "only what was packed is stored"
                await backend.store(key, packed)
            case protocol.Give(into, half):
                array_table.put(into, np.frombuffer(body, np.uint16 if half else np.float32))
            case protocol.Bring(fragment, pieces, residual, into):
                array_table.put(into, await backend.home(fragment, Stored(pieces, residual)))
            case protocol.Stage(fragment, n, into):
                array_table.put(into, await backend.staged(fragment, known[n]))
            case protocol.Land(fragment, n, into):
                array_table.put(into, await backend.landed(fragment, known[n]))
            case protocol.IsFinite(n):
                return self._done(yes=await backend.is_finite(known[n]))
            case protocol.Keep(part, numbers):
                return self._done(part=await backend.keep(part, [known[n] for n in numbers]))
            case protocol.Forget() | protocol.Sum():
                raise AssertionError("is dealt with at once")
        return self._done()

    def _done(self, digest: bytes = b"", size: int = 0, yes: bool = False, part: Part | None = None) -> protocol.Answer:
        up, down = self._traffic.bytes_up, self._traffic.bytes_down
        before, self._told = self._told, (up, down)
        return protocol.Answer(up - before[0], down - before[1], digest, size, yes, part)


def _arguments(message: protocol.Asked) -> list[int]:
    """Return the numbers of the objects that a question needs."""
    match message:
        case protocol.Step(carried):
            return [carried]
        case protocol.Pack(_, base, values, feedback):
            return [base, values, *([] if feedback is None else [feedback])]
        case protocol.Store(_, body):
            return [body]
        case protocol.Sum(_, a, b):
            return [a, b]
        case protocol.IsFinite(number) | protocol.Stage(_, number) | protocol.Land(_, number):
            return [number]
        case protocol.Keep(_, numbers):
            return numbers
    return []

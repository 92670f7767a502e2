"""A proxy on loopback before a real S3 server that imitates the faults of bad networks.

It passes every byte on unchanged, so that signed requests stay valid. It parses HTTP only to know where one request
ends and the next begins. It runs in its own thread: tests switch its fault while processes use it.
"""

import asyncio
import random
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine
from enum import StrEnum
from typing import Any, Self

HEAD_MAX = 64 << 10
SWITCH_S = 10.0
UPLOAD_END_S = 1.0  # time for a client to finish its body after the server has answered
_HOST = "127.0.0.1"
_PIECE = 256 << 10
_END_OF_HEAD = b"\r\n\r\n"

_SLOW_DOWN = (
    b'<?xml version="1.0" encoding="UTF-8"?>\n'
    b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
)
_ACCESS_DENIED = (
    b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>'
)
_FORBIDDEN = (
    b"HTTP/1.1 403 Forbidden\r\nContent-Type: application/xml\r\n"
    b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(_ACCESS_DENIED)
)
_SERVICE_UNAVAILABLE = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/xml\r\n"
    b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(_SLOW_DOWN)
)

Sink = Callable[[bytes], Awaitable[None]]


class Fault(StrEnum):
    """A fault of the network or the store."""

    NONE = "none"
    REFUSE = "refuse"
    """The port is closed, and open connections are dropped."""
    ERRORS = "errors"
    """Requests are answered with 503 SlowDown; the server never sees them."""
    SLOW = "slow"
    """Requests wait for a random time before they are passed on."""
    LOST_REPLIES = "lost_replies"
    """Requests are executed, then the connection closes without an answer."""
    TRUNCATED = "truncated"
    """An answer to GET gets only the first half of its body, then the connection closes."""
    CUT = "cut"
    """The server gets only the head of a request with a body, then the connection closes."""
    DENIED = "denied"
    """GETs of matching paths are answered with 403 AccessDenied, as for objects of another account or another key."""
    MIXED = "mixed"
    """Each request draws ERRORS, SLOW, LOST_REPLIES, TRUNCATED, CUT or no fault."""


_MIXED = (Fault.ERRORS, Fault.SLOW, Fault.LOST_REPLIES, Fault.TRUNCATED, Fault.CUT, Fault.NONE)


class FaultProxy:
    """The proxy, which runs while its context is open. `url` has the same port through every fault."""

    def __init__(self, upstream_port: int, *, seed: int = 0) -> None:
        self.url = ""
        self.counts = {str(f): 0 for f in Fault if f not in {Fault.NONE, Fault.MIXED}}
        """By fault, the number of requests that it struck; for REFUSE, how often the port was closed."""
        self._upstream_port = upstream_port
        self._random = random.Random(seed)
        self._fault, self._rate, self._slow_s = Fault.NONE, 1.0, 0.0
        self._denied = ""
        self._conversations: set[asyncio.Task[None]] = set()

    def __enter__(self) -> Self:
        self._socket = _bound(0)
        self._port: int = self._socket.getsockname()[1]
        self.url = f"http://{_HOST}:{self._port}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._thread.start()
        self._on_loop(self._listen())
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._on_loop(self._stop_listening())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def set(self, fault: Fault, rate: float = 1.0, slow_s: float = 0.5, denied: str = "") -> None:
        """Switch to a fault that strikes this share of the requests whose head comes from now on.

        `denied`: for DENIED, a part of the paths of objects that may not be read.
        """
        self._on_loop(self._switch(fault, rate, slow_s, denied))

    def clear(self) -> None:
        """Let every request through again."""
        self.set(Fault.NONE)

    # --- on the proxy's thread ----------------------------------------------------------------------------------------

    def _on_loop(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(SWITCH_S)

    async def _switch(self, fault: Fault, rate: float, slow_s: float, denied: str) -> None:
        before, self._fault, self._rate, self._slow_s = self._fault, fault, rate, slow_s
        self._denied = denied
        if before != Fault.REFUSE and fault == Fault.REFUSE:
            self.counts[Fault.REFUSE] += 1
            await self._stop_listening()
            # The socket is bound but does not listen: connects are refused, and no other process gets the port.
            self._socket = _bound(self._port)
        if before == Fault.REFUSE and fault != Fault.REFUSE:
            await self._listen()

    async def _listen(self) -> None:
        self._socket.listen(128)
        # Do not use asyncio's own server: closing it loses connections that it is about to accept.
        self._loop.add_reader(self._socket, self._accept)

    async def _stop_listening(self) -> None:
        self._loop.remove_reader(self._socket)
        self._socket.close()
        for conversation in self._conversations:
            conversation.cancel()
        await asyncio.gather(*self._conversations, return_exceptions=True)

    def _accept(self) -> None:
        try:
            accepted, _ = self._socket.accept()
        except OSError:
            return  # the client is already gone
        conversation = self._loop.create_task(self._converse(accepted))
        self._conversations.add(conversation)

        def end(ended: asyncio.Task[None]) -> None:
            self._conversations.discard(ended)
            accepted.close()  # a task that was cancelled before it began has not closed it

        conversation.add_done_callback(end)

    async def _converse(self, accepted: socket.socket) -> None:
        """Serve one client's connection through one connection to the server, until either ends."""
        accepted.setblocking(False)
        peers: list[_Peer] = []
        try:
            client = _Peer(*await asyncio.open_connection(sock=accepted, limit=HEAD_MAX))
            peers.append(client)
            server = _Peer(*await asyncio.open_connection(_HOST, self._upstream_port, limit=HEAD_MAX))
            peers.append(server)
            while await self._exchange(client, server):
                pass
        except (OSError, EOFError, asyncio.LimitOverrunError, ValueError):
            pass  # one side is gone or sent invalid HTTP; the other side notices the close
        finally:
            for peer in peers:
                peer.drop()

    async def _exchange(self, client: "_Peer", server: "_Peer") -> bool:
        """Pass one request and its answer on; return whether the connection goes on."""
        request = await _next_request(client, server)
        fault = self._draw()
        if fault == Fault.ERRORS:
            if not request.waits:
                await _copy_body(client, request.body_size, _discard)
            self.counts[fault] += 1
            await client.send(_SERVICE_UNAVAILABLE + (b"" if request.method == "HEAD" else _SLOW_DOWN))
            return False
        if fault == Fault.DENIED and request.method == "GET" and self._denied and self._denied in request.path:
            self.counts[fault] += 1
            await client.send(_FORBIDDEN + _ACCESS_DENIED)
            return False
        if fault == Fault.SLOW:
            self.counts[fault] += 1
            await asyncio.sleep(self._random.uniform(0.0, self._slow_s))
        await server.send(request.raw)
        if fault == Fault.CUT and request.body_size:
            self.counts[fault] += 1
            return False
        upload = asyncio.create_task(_upload(client, server, request.body_size))
        try:
            goes_on = await self._answer(client, server, request, fault)
            if goes_on:
                await asyncio.wait({upload}, timeout=UPLOAD_END_S)
            return goes_on and upload.done()
        finally:
            upload.cancel()
            await asyncio.gather(upload, return_exceptions=True)

    async def _answer(self, client: "_Peer", server: "_Peer", request: "_Request", fault: Fault) -> bool:
        """Pass the server's answer on, unless it is lost; return whether the connection goes on."""
        while (answer := _Answer(await server.reader.readuntil(_END_OF_HEAD), request)).is_interim:
            await client.send(answer.raw)  # 100 Continue: the client sends its body only after this
        if fault == Fault.LOST_REPLIES:
            await _copy_body(server, answer.body_size, _discard)
            self.counts[fault] += 1
            return False
        if fault == Fault.TRUNCATED and request.method == "GET":
            body = bytearray()

            async def collect(piece: bytes) -> None:
                body.extend(piece)

            await _copy_body(server, answer.body_size, collect)
            if body:
                self.counts[fault] += 1
            await client.send(answer.raw + body[: len(body) // 2])
            return not body
        await client.send(answer.raw)
        await _copy_body(server, answer.body_size, client.send)
        return True

    def _draw(self) -> Fault:
        if self._fault == Fault.NONE or self._random.random() >= self._rate:
            return Fault.NONE
        return self._random.choice(_MIXED) if self._fault == Fault.MIXED else self._fault


# --- HTTP, as far as it is needed -------------------------------------------------------------------------------------

_CHUNKED = -1
_UNTIL_CLOSE = -2


class _Peer:
    """One side of a conversation."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer
        # Then the kernel has all that `send` has sent, and it survives `drop`.
        writer.transport.set_write_buffer_limits(high=0)

    async def send(self, data: bytes) -> None:
        """Send data at the pace of the receiver."""
        self._writer.write(data)
        await self._writer.drain()

    def drop(self) -> None:
        """Close the connection now."""
        self._writer.transport.abort()


class _Head:
    """The first line and the fields of a request or an answer, and its original bytes."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        first, *lines = raw.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
        self.first = first.split(" ", 2)
        self.fields = {name.strip().lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)}

    def size_of_body(self, otherwise: int) -> int:
        """Return the size of the body; `otherwise` if the fields do not give it."""
        if "chunked" in self.fields.get("transfer-encoding", "").lower():
            return _CHUNKED
        return int(self.fields.get("content-length", otherwise))


class _Request(_Head):
    def __init__(self, raw: bytes) -> None:
        super().__init__(raw)
        self.method, self.path = self.first[0], self.first[1]
        self.body_size = self.size_of_body(0)
        self.waits = self.fields.get("expect", "").lower() == "100-continue"
        """The body comes only after an interim answer."""


class _Answer(_Head):
    def __init__(self, raw: bytes, request: _Request) -> None:
        super().__init__(raw)
        _, code, *_ = self.first
        status = int(code)
        self.is_interim = 100 <= status < 200
        bare = request.method == "HEAD" or status in {204, 304}
        self.body_size = 0 if bare else self.size_of_body(_UNTIL_CLOSE)


async def _next_request(client: _Peer, server: _Peer) -> _Request:
    """Wait for a request. Raises `EOFError` if the server closes first, so that idle clients notice it, too."""
    head = asyncio.create_task(client.reader.readuntil(_END_OF_HEAD))
    closed = asyncio.create_task(server.reader.read(1))
    try:
        await asyncio.wait({head, closed}, return_when=asyncio.FIRST_COMPLETED)
        if closed.done():
            raise EOFError
        return _Request(head.result())
    finally:
        head.cancel()
        closed.cancel()
        await asyncio.gather(head, closed, return_exceptions=True)


async def _upload(client: _Peer, server: _Peer, size: int) -> None:
    """Pass a request's body on, concurrently with the answer: a server may answer before it has read the whole body."""
    try:
        await _copy_body(client, size, server.send)
    except (OSError, EOFError, asyncio.LimitOverrunError, ValueError):
        server.drop()  # the server will not answer half a request


async def _copy_body(source: _Peer, size: int, sink: Sink) -> None:
    """Read a body to its end and pass its bytes to `sink`, framing included."""
    if size == _UNTIL_CLOSE:
        while piece := await source.reader.read(_PIECE):
            await sink(piece)
    elif size == _CHUNKED:
        await _copy_chunks(source, sink)
    else:
        await _copy_exactly(source, size, sink)


async def _copy_chunks(source: _Peer, sink: Sink) -> None:
    last = False
    while not last:
        line = await source.reader.readuntil(b"\r\n")
        size = int(line.partition(b";")[0], 16)
        await sink(line)
        last = size == 0
        if not last:
            await _copy_exactly(source, size + 2, sink)
    while line != b"\r\n":  # trailers
        line = await source.reader.readuntil(b"\r\n")
        await sink(line)


async def _copy_exactly(source: _Peer, size: int, sink: Sink) -> None:
    while size > 0:
        piece = await source.reader.read(min(size, _PIECE))
        if not piece:
            raise EOFError
        await sink(piece)
        size -= len(piece)


async def _discard(_: bytes) -> None:
    pass


def _bound(port: int) -> socket.socket:
    """Return a socket that holds the port (0: a free one) without listening."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.setblocking(False)
    held.bind((_HOST, port))
    return held

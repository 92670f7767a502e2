"""The fault proxy passes requests on unchanged, and each of its faults does what it says."""

import asyncio
import http.client
import re
import socket
import threading
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from urllib.parse import urlsplit

import pytest

from chaos.proxy import HEAD_MAX, Fault, FaultProxy
from isthmus.errors import ObjectMissing, Unavailable
from isthmus.runtime.clock import single_threaded
from isthmus.runtime.urls import Place
from isthmus.store import Store
from isthmus.store.edge import EdgeStore
from isthmus.store.s3 import open_s3
from isthmus_services.servers import Server, free_ports
from support.world import until

pytestmark = pytest.mark.timeout(60)
BIG = bytes(range(256)) * (8 << 10)  # 2 MiB


def port_of(url: str) -> int:
    return urlsplit(url).port or 0


@pytest.fixture
def proxy(seaweedfs: Server, use: Callable[[Server], None], monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """Start a proxy before the S3 server, and point the environment at it."""
    use(seaweedfs)
    with FaultProxy(port_of(seaweedfs.url), seed=1) as opened:
        monkeypatch.setenv("AWS_ENDPOINT_URL", opened.url)
        yield opened


@asynccontextmanager
async def bucket() -> AsyncIterator[Store]:
    """Create and open an empty bucket at the address in the environment."""
    name = f"chaos-{uuid.uuid4().hex[:10]}"
    async with open_s3(Place.of(f"s3://{name}"), single_threaded(0)) as store:
        # If tests keep all cores busy, connecting may take longer than the timeout of one request.
        for left in range(5, -1, -1):
            try:
                await store.create_bucket()
                break
            except Unavailable:
                if not left:
                    raise
        yield store


def run(body: Callable[[Store], Awaitable[None]]) -> None:
    async def go() -> None:
        async with bucket() as store:
            await body(store)

    asyncio.run(go())


def patient(store: Store) -> Store:
    """Return the store with the retries of a run: on a busy machine some of many connections are not made in time."""
    return EdgeStore(store, single_threaded(0))


def counted(proxy: FaultProxy) -> dict[str, int]:
    """Return the counts that are not zero."""
    return {name: count for name, count in proxy.counts.items() if count}


# --- before a real S3 server ------------------------------------------------------------------------------------------


def test_everything_comes_through(proxy: FaultProxy) -> None:
    async def body(store: Store) -> None:
        for data in (b"", b"x", BIG):
            await store.put("a/k", data)
            assert bytes(await store.get("a/k")) == data
        assert bytes(await store.get_range("a/k", 1000, 1_500_000)) == BIG[1000:1_500_000]
        assert await store.create("a/new", BIG)
        assert not await store.create("a/new", b"other")
        assert not await store.create("a/new", BIG)
        assert bytes(await store.get("a/new")) == BIG
        assert [(e.key, e.size) for e in await store.list("a/")] == [("a/k", len(BIG)), ("a/new", len(BIG))]
        await store.delete("a/k")
        with pytest.raises(ObjectMissing):
            await store.get("a/k")

    run(body)
    assert counted(proxy) == {}


def test_many_at_once_come_through(proxy: FaultProxy) -> None:
    async def body(store: Store) -> None:
        names, store = [f"many/{i:03d}" for i in range(100)], patient(store)
        await asyncio.gather(*(store.put(n, n.encode() * 3000) for n in names))
        assert [e.key for e in await store.list("many/")] == names  # an answer long enough to come in chunks
        assert [bytes(x) for x in await asyncio.gather(*map(store.get, names))] == [n.encode() * 3000 for n in names]

    run(body)


def test_refuse_closes_the_port_and_gives_the_same_one_back(proxy: FaultProxy) -> None:
    url = proxy.url

    async def body(store: Store) -> None:
        await store.put("k", b"x")
        for _ in range(2):
            proxy.set(Fault.REFUSE)
            calls: tuple[Callable[[], Awaitable[object]], ...] = (
                lambda: store.get("k"),
                lambda: store.put("k", b"y"),
                lambda: store.list(""),
            )
            for call in calls:
                with pytest.raises(Unavailable):
                    await call()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port_of(url)), 1.0)
            proxy.clear()
            assert bytes(await store.get("k")) == b"x"

    run(body)
    assert (proxy.url, counted(proxy)) == (url, {Fault.REFUSE: 2})


def test_refuse_drops_requests_under_way(proxy: FaultProxy) -> None:
    async def body(store: Store) -> None:
        proxy.set(Fault.SLOW, slow_s=1000.0)
        under_way = asyncio.ensure_future(store.put("k", BIG))
        await until(lambda: proxy.counts[Fault.SLOW] == 1, "a request under way")
        proxy.set(Fault.REFUSE)
        with pytest.raises(Unavailable):
            await under_way
        proxy.clear()
        assert list(await store.list("")) == []

    run(body)


def test_errors_are_answers_and_the_server_sees_nothing(proxy: FaultProxy) -> None:
    async def body(store: Store) -> None:
        proxy.set(Fault.ERRORS)
        for call in (
            store.put("k", b"x"),
            store.put("k", BIG),
            store.create("k", b"x"),
            store.get("k"),
            store.list(""),
        ):
            with pytest.raises(Unavailable, match="SlowDown"):
                await call
        assert counted(proxy) == {Fault.ERRORS: 5}
        proxy.clear()
        assert list(await store.list("")) == []

    run(body)


@pytest.mark.parametrize("data", [b"small", BIG])
def test_a_lost_reply_leaves_the_object(proxy: FaultProxy, data: bytes) -> None:
    async def body(store: Store) -> None:
        proxy.set(Fault.LOST_REPLIES)
        with pytest.raises(Unavailable):
            await store.create("k", data)
        proxy.clear()
        assert bytes(await store.get("k")) == data
        assert set(counted(proxy)) == {Fault.LOST_REPLIES}

    run(body)


def test_whatever_a_create_says_its_object_is_there(proxy: FaultProxy) -> None:
    async def body(store: Store) -> None:
        proxy.set(Fault.LOST_REPLIES, rate=0.5)
        said: set[bool | None] = set()
        for i in range(40):
            try:
                # False means that aiohttp sent the request again and found its own object.
                said.add(await store.create(f"k{i}", b"%d" % i))
            except Unavailable:
                said.add(None)
        assert {True, None} <= said
        proxy.clear()
        for i in range(40):
            assert bytes(await store.get(f"k{i}")) == b"%d" % i

    run(body)


@pytest.mark.parametrize("data", [b"x", b"small", BIG])
def test_a_truncated_get_is_unavailable(proxy: FaultProxy, data: bytes) -> None:
    async def body(store: Store) -> None:
        await store.put("k", data)
        proxy.set(Fault.TRUNCATED)
        calls: tuple[Callable[[], Awaitable[object]], ...] = (
            lambda: store.get("k"),
            lambda: store.get_range("k", 0, len(data)),
        )
        for call in calls:
            with pytest.raises(Unavailable):
                await call()
        assert counted(proxy) == {Fault.TRUNCATED: 2}
        await store.put("k", data[::-1])  # only reads are truncated
        assert counted(proxy) == {Fault.TRUNCATED: 2}
        proxy.clear()
        assert bytes(await store.get("k")) == data[::-1]

    run(body)


def test_a_truncated_listing_is_unavailable(proxy: FaultProxy) -> None:
    async def body(store: Store) -> None:
        await asyncio.gather(*(patient(store).put(f"many/{i:03d}", b"") for i in range(50)))
        proxy.set(Fault.TRUNCATED)
        with pytest.raises(Unavailable):
            await store.list("many/")
        assert counted(proxy) == {Fault.TRUNCATED: 1}

    run(body)


def test_slow_requests_succeed(proxy: FaultProxy) -> None:
    async def body(store: Store) -> None:
        proxy.set(Fault.SLOW, slow_s=0.05)
        await store.put("k", BIG)
        assert bytes(await store.get("k")) == BIG
        assert counted(proxy) == {Fault.SLOW: 2}

    run(body)


def test_the_rate_is_the_share_that_is_hit(proxy: FaultProxy) -> None:
    async def body(store: Store) -> None:
        await store.put("k", b"x")
        proxy.set(Fault.ERRORS, rate=0.5)
        failed = 0
        for _ in range(60):
            try:
                assert bytes(await store.get("k")) == b"x"
            except Unavailable:
                failed += 1
        assert 15 < failed < 45
        assert counted(proxy) == {Fault.ERRORS: failed}

    run(body)


def test_mixed_faults_never_give_wrong_data(proxy: FaultProxy) -> None:
    async def body(store: Store) -> None:
        await store.put("k", BIG)
        proxy.set(Fault.MIXED, slow_s=0.01)

        async def read() -> bool:
            try:
                assert bytes(await store.get("k")) == BIG
            except Unavailable:
                return False
            return True

        came = [await read() for _ in range(60)]
        assert any(came)
        assert not all(came)
        assert set(counted(proxy)) == {Fault.ERRORS, Fault.SLOW, Fault.LOST_REPLIES, Fault.TRUNCATED}
        proxy.clear()
        assert bytes(await store.get("k")) == BIG

    run(body)


def test_faults_switch_while_requests_run(proxy: FaultProxy) -> None:
    async def body(store: Store) -> None:
        await store.put("k", BIG)
        switching = True

        async def read() -> None:
            while switching:
                try:
                    assert bytes(await store.get("k")) == BIG
                except Unavailable:
                    await asyncio.sleep(0.001)

        readers = [asyncio.ensure_future(read()) for _ in range(6)]
        for fault in list(Fault) * 4:
            proxy.set(fault, rate=0.7, slow_s=0.01)
            await asyncio.sleep(0.03)
        proxy.clear()
        switching = False
        await asyncio.gather(*readers)
        assert bytes(await store.get("k")) == BIG
        assert proxy.counts[Fault.REFUSE] == 4

    run(body)
    asyncio.run(until(lambda: not proxy._conversations, "every connection ends"))


def test_leaving_with_a_request_under_way_ends_it(
    seaweedfs: Server, use: Callable[[Server], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(seaweedfs)

    async def go() -> None:
        with ExitStack() as stack:
            proxy = stack.enter_context(FaultProxy(port_of(seaweedfs.url)))
            monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
            async with bucket() as store:
                proxy.set(Fault.SLOW, slow_s=1000.0)
                calls = [asyncio.ensure_future(c) for c in (store.put("k", BIG), store.list(""))]
                await until(lambda: proxy.counts[Fault.SLOW] == 2, "a request under way")
                stack.close()
                for call in calls:
                    with pytest.raises(Unavailable):
                        await call

    asyncio.run(go())


# --- before anything else ---------------------------------------------------------------------------------------------


@contextmanager
def answering(answer: bytes, request_ends: bytes = b"\r\n\r\n") -> Iterator[tuple[FaultProxy, list[bytes]]]:
    """Start a proxy before a server that reads one request per connection, sends this answer and closes."""
    seen: list[bytes] = []

    def serve(listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            with connection:
                request = b""
                while not request.endswith(request_ends) and (piece := connection.recv(1 << 16)):
                    request += piece
                if request == b"quit":
                    return
                seen.append(request)
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        port = listener.getsockname()[1]
        serving = pool.submit(serve, listener)
        try:
            with FaultProxy(port) as proxy:
                yield proxy, seen
        finally:
            with socket.create_connection(("127.0.0.1", port)) as last:
                last.sendall(b"quit")
        serving.result(10)


def exchange(proxy: FaultProxy, request: bytes) -> bytes:
    """Send a request; return all bytes that come until the connection closes."""
    with socket.create_connection(("127.0.0.1", port_of(proxy.url)), 10.0) as connection:
        connection.sendall(request)
        came = b""
        try:
            while piece := connection.recv(1 << 16):
                came += piece
        except ConnectionResetError:
            pass
        return came


GET = b"GET / HTTP/1.1\r\nHost: somewhere.else\r\n\r\n"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\nA\r\n0123456789\r\n0\r\nTrailer: t\r\n\r\n"
)
ANSWERS = {
    "length": b"HTTP/1.1 200 OK\r\ncontent-LENGTH: 4\r\n\r\nabcd",
    "chunked": CHUNKED,
    "until close": b"HTTP/1.1 200 OK\r\n\r\nabc",
    "no content": b"HTTP/1.1 204 No Content\r\n\r\n",
    "not modified": b"HTTP/1.1 304 Not Modified\r\nContent-Length: 4\r\n\r\n",
    "after an interim answer": b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx",
}


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_answers_come_as_they_are(answer: bytes) -> None:
    with answering(answer) as (proxy, seen):
        assert exchange(proxy, GET) == answer
    assert seen == [GET]


def test_an_answer_to_head_has_no_body() -> None:
    request, answer = GET.replace(b"GET", b"HEAD"), b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\n"
    with answering(answer) as (proxy, _):
        assert exchange(proxy, request) == answer
        proxy.set(Fault.ERRORS)
        assert exchange(proxy, request).endswith(b"\r\n\r\n")


def test_a_chunked_request_goes_as_it_is() -> None:
    request = b"PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n\r\n\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    with answering(ANSWERS["length"], b"0\r\n\r\n") as (proxy, seen):
        assert exchange(proxy, request) == ANSWERS["length"]
    assert seen == [request]


def test_the_first_half_of_a_body_is_sent() -> None:
    with answering(ANSWERS["length"]) as (proxy, _):
        proxy.set(Fault.TRUNCATED)
        assert exchange(proxy, GET) == ANSWERS["length"][:-2]
        assert exchange(proxy, GET.replace(b"GET", b"PUT")) == ANSWERS["length"]
        assert counted(proxy) == {Fault.TRUNCATED: 1}


def test_nothing_of_a_lost_reply_is_sent() -> None:
    with answering(CHUNKED) as (proxy, seen):
        proxy.set(Fault.LOST_REPLIES)
        assert exchange(proxy, GET) == b""
    assert seen == [GET]


def test_an_error_reads_the_body_before_it_answers() -> None:
    request = b"PUT / HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(BIG), BIG)
    with answering(b"") as (proxy, seen):
        proxy.set(Fault.ERRORS)
        came = exchange(proxy, request)
        assert re.match(rb"HTTP/1.1 503 .*<Error><Code>SlowDown</Code>.*</Error>$", came, re.DOTALL)
    assert seen == [b""]  # the server saw only a connection without a request


def test_an_early_answer_is_passed_on() -> None:
    request = b"PUT / HTTP/1.1\r\nContent-Length: 100\r\nExpect: 100-continue\r\n\r\n"
    with answering(ANSWERS["length"]) as (proxy, seen):
        assert exchange(proxy, request) == ANSWERS["length"]
    assert seen == [request]


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET / HTTP/1.1\r\nX: " + b"x" * (HEAD_MAX + 10) + b"\r\n\r\n",
        b"PUT / HTTP/1.1\r\nContent-Length: many\r\n\r\n",
    ],
)
def test_what_is_not_understood_ends_the_connection(request_bytes: bytes) -> None:
    with answering(ANSWERS["length"]) as (proxy, _):
        assert exchange(proxy, request_bytes) == b""
        assert exchange(proxy, GET) == ANSWERS["length"]


@pytest.mark.parametrize(
    "answer",
    [b"", b"HTTP/1.1 200", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"],
)
def test_a_server_that_breaks_off_ends_the_connection(answer: bytes) -> None:
    with answering(answer) as (proxy, _):
        assert exchange(proxy, GET) in {b"", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"}
        assert exchange(proxy, GET) in {b"", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"}


def test_a_client_that_breaks_off_takes_its_connection_to_the_server_with_it() -> None:
    with answering(ANSWERS["length"], b"never") as (proxy, seen):
        with socket.create_connection(("127.0.0.1", port_of(proxy.url))) as connection:
            connection.sendall(b"PUT / HTTP/1.1\r\nContent-Length: 100\r\n\r\nabc")
        asyncio.run(until(lambda: len(seen) == 1, "the server learns of it"))


def test_a_server_that_is_down_closes_the_connection() -> None:
    with FaultProxy(free_ports(1)[0]) as proxy:
        for _ in range(3):
            connection = http.client.HTTPConnection("127.0.0.1", port_of(proxy.url), timeout=10.0)
            with pytest.raises(ConnectionError):
                connection.request("GET", "/")
                connection.getresponse()
            connection.close()


def test_nothing_is_left_behind() -> None:
    before = set(threading.enumerate())
    with FaultProxy(free_ports(1)[0]) as proxy:
        proxy.set(Fault.REFUSE)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port_of(proxy.url)), 1.0)
    assert not set(threading.enumerate()) - before


def test_a_request_cut_before_its_body_leaves_nothing_behind(proxy: FaultProxy) -> None:
    """SeaweedFS 4.48 would keep an empty object after this, unless the request states the digest of its body."""

    async def body(store: Store) -> None:
        proxy.set(Fault.CUT)
        for number in range(5):
            with pytest.raises(Unavailable):
                await store.create(f"commit-{number}", b"x" * 5000)
            with pytest.raises(Unavailable):
                await store.put(f"object-{number}", b"x" * 300_000)
        proxy.clear()
        for number in range(5):
            for key in (f"commit-{number}", f"object-{number}"):
                with pytest.raises(ObjectMissing):
                    await store.get(key)
            assert await store.create(f"commit-{number}", b"y" * 5000)
            assert bytes(await store.get(f"commit-{number}")) == b"y" * 5000
        assert proxy.counts[Fault.CUT] >= 10

    run(body)

"""Every store implementation, on real servers too, passes this suite."""

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from advice.google import google
from isthmus.agent.ports import open_place
from isthmus.errors import Denied, InputError, ObjectMissing, Unavailable
from isthmus.format.records.frame import Blob, Gathered
from isthmus.store import EdgeStore, Layer, Patience, require_create_only
from isthmus.store.layer import Send
from isthmus_lab.simulate.conditions import Conditions
from isthmus_lab.simulate.world import World
from isthmus_services.servers import Server
from support.manners import mannered

T = TypeVar("T")

KINDS = [
    *(
        "files",
        "moto",
        "seaweedfs",
        "moto by aiobotocore",
        "seaweedfs by aiobotocore",
        "azurite",
        "google",
        "simulated",
    ),
    *("moto as hugging-face", "moto as r2", "moto as directory"),
    *(f"moto as {manners} by aiobotocore" for manners in ("hugging-face", "r2", "directory")),
]
"""A server, the manners of another store, and the client if it is not the usual one."""

CLIENTS = ["s3", "s3+aiobotocore"]


@dataclass
class Opened:
    """How to open an empty store, and how to run a coroutine that uses the store."""

    store: Callable[[], AbstractAsyncContextManager[EdgeStore]]
    drive: Callable[[Coroutine[Any, Any, None]], object] = asyncio.run
    page: int = 1000
    """How many keys the server lists in one answer."""


@pytest.fixture
def started() -> Iterator[ExitStack]:
    """Return a stack of servers that end with the test."""
    with ExitStack() as stack:
        yield stack


def tiered(kind: str) -> Any:
    """Return a kind as a parameter: in `make test`, both clients against a server, and one client against the other server."""
    seldom = " as " in kind or kind == "moto by aiobotocore"
    return pytest.param(kind, marks=[pytest.mark.tier("all")] if seldom else [])


@pytest.fixture(params=[tiered(kind) for kind in KINDS])
def opened(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    use: Callable[[Server], None],
    monkeypatch: pytest.MonkeyPatch,
    started: ExitStack,
) -> Opened:
    """Return how to open an empty store of this kind."""
    page = 1000
    if request.param == "simulated":
        return simulated()
    if request.param == "files":
        url = str(tmp_path / "store")
    elif request.param == "google":
        there, _ = started.enter_context(google(tmp_path))
        page = there.page = 7
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(there.key))
        monkeypatch.delenv("GOOGLE_BASE_URL", raising=False)
        url = "gs://bucket/some/prefix"
    else:
        server, _, client = request.param.partition(" by ")
        server, _, manners = server.partition(" as ")
        use(given := request.getfixturevalue(server))
        if manners:
            started.enter_context(mannered(manners, given.url, monkeypatch))
        if server == "moto":
            page = 7
            monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", str(page))
        scheme = "az" if server == "azurite" else f"s3{client and f'+{client}'}"
        url = f"{scheme}://conformance/{uuid.uuid4().hex[:10]}/some/prefix"

    @asynccontextmanager
    async def open_it() -> AsyncIterator[EdgeStore]:
        async with open_place(url, make=not url.startswith(("az:", "gs:"))) as store:
            yield store

    return Opened(open_it, page=page)


def simulated() -> Opened:
    """Return how to open the simulator's store in good conditions. It lives in virtual time."""
    world = World("conformance")

    @asynccontextmanager
    async def open_it() -> AsyncIterator[EdgeStore]:
        yield world.ports(world.process("p"), Conditions(0.01, 0.5, 1e6, 1e6)).store

    return Opened(open_it, world.clock.run_until_complete)


def run(opened: Opened, body: Callable[[EdgeStore], Awaitable[None]]) -> None:
    async def go() -> None:
        async with opened.store() as store:
            await body(store)

    opened.drive(go())


def test_what_is_put_is_there(opened: Opened) -> None:
    async def body(store: EdgeStore) -> None:
        await store.put("a/b", b"one")
        assert bytes(await store.get("a/b")) == b"one"
        await store.put("a/b", memoryview(b"two!"))
        assert bytes(await store.get("a/b")) == b"two!"
        await store.put("a/b", Gathered([b"three", b"", np.arange(3, dtype=np.uint8), b"!"]))
        assert bytes(await store.get("a/b")) == b"three\x00\x01\x02!"

    run(opened, body)


def test_what_was_never_put_is_missing(opened: Opened) -> None:
    async def body(store: EdgeStore) -> None:
        with pytest.raises(ObjectMissing) as caught:
            await store.get("nothing/here")
        assert caught.value.key == "nothing/here"
        with pytest.raises(ObjectMissing):
            await store.get_range("nothing/here", 0, 4)

    run(opened, body)


def test_a_range_is_cut_at_the_end(opened: Opened) -> None:
    async def body(store: EdgeStore) -> None:
        await store.put("digits", b"0123456789")
        ranges = ((0, 4, b"0123"), (3, 5, b"34"), (8, 99, b"89"), (10, 12, b""), (50, 60, b""), (4, 4, b""))
        for start, stop, found in ranges:
            assert bytes(await store.get_range("digits", start, stop)) == found, (start, stop)

    run(opened, body)


def test_create_writes_only_where_there_is_nothing(opened: Opened) -> None:
    async def body(store: EdgeStore) -> None:
        assert await store.create("commits/1", b"first")
        assert not await store.create("commits/1", b"second")
        assert bytes(await store.get("commits/1")) == b"first"

    run(opened, body)


def test_of_racing_creators_one_wins_and_its_bytes_stay(opened: Opened) -> None:
    async def body(store: EdgeStore) -> None:
        for version in range(3):
            bodies = [f"writer {i}".encode() * 50 for i in range(8)]
            won = await asyncio.gather(*(store.create(f"race/{version}", b) for b in bodies))
            assert sum(won) == 1
            assert bytes(await store.get(f"race/{version}")) == bodies[won.index(True)]

    run(opened, body)


def test_listing_goes_by_folder_and_in_order(opened: Opened) -> None:
    async def body(store: EdgeStore) -> None:
        for key in ("b/2", "b/10", "a/1", "b/c/3", "bb/1"):
            await store.put(key, b"x" * len(key))
        assert [e.key for e in await store.list("b/")] == ["b/10", "b/2", "b/c/3"]
        assert {e.key: e.size for e in await store.list("")} == {
            k: len(k) for k in ("b/2", "b/10", "a/1", "b/c/3", "bb/1")
        }
        assert list(await store.list("nothing/")) == []

    run(opened, body)


def test_a_listing_says_when_objects_were_written(opened: Opened) -> None:
    async def body(store: EdgeStore) -> None:
        now = store.runtime.wall
        before = now()
        await store.put("a/x", b"1")
        (entry,) = await store.list("a/")
        assert (entry.key, entry.size) == ("a/x", 1)
        assert before - 2.0 <= entry.modified <= now() + 2.0  # some stores keep whole seconds

    run(opened, body)


def test_a_listing_has_more_than_one_page(opened: Opened) -> None:
    async def body(store: EdgeStore) -> None:
        many = [f"many/{i:05d}" for i in range(opened.page + 5)]
        await asyncio.gather(*(store.put(key, b"") for key in many))
        assert [entry.key for entry in await store.list("many/")] == many

    run(opened, body)


def test_deleting_twice_is_harmless(opened: Opened) -> None:
    async def body(store: EdgeStore) -> None:
        await store.put("gone", b"x")
        await store.delete("gone")
        await store.delete("gone")
        with pytest.raises(ObjectMissing):
            await store.get("gone")

    run(opened, body)


@pytest.mark.parametrize("size", [0, 1, 5 << 20])
def test_objects_of_any_size_come_back_whole(opened: Opened, size: int) -> None:
    data = bytes(range(256)) * (size // 256) + b"x" * (size % 256)

    async def body(store: EdgeStore) -> None:
        await store.put("big", data)
        assert bytes(await store.get("big")) == data
        assert store.traffic.bytes_up == store.traffic.bytes_down == size

    run(opened, body)


def test_readers_never_see_half_an_object(opened: Opened) -> None:
    async def body(store: EdgeStore) -> None:
        await store.put("k", b"a" * 100_000)

        async def write() -> None:
            for letter in b"bcde":
                await store.put("k", bytes([letter]) * 100_000)

        async def read() -> None:
            for _ in range(12):
                assert len(set(await store.get("k"))) == 1

        await asyncio.gather(write(), read(), read())

    run(opened, body)


def test_the_create_only_check_passes(opened: Opened) -> None:
    async def body(store: EdgeStore) -> None:
        from isthmus.runtime.clock import single_threaded

        await require_create_only(store, single_threaded())
        assert list(await store.list("scratch/")) == []

    run(opened, body)


def test_prefixes_end_with_a_slash(opened: Opened) -> None:
    async def body(store: EdgeStore) -> None:
        with pytest.raises(ValueError, match="ends with"):
            await store.list("commits")

    run(opened, body)


@pytest.mark.parametrize("prefix", ["plain", "with space", "a%20b", "ünï~+=(x)'@:*", "..x/y"])
async def test_both_clients_of_buckets_see_the_same_objects(
    seaweedfs: Server, use: Callable[[Server], None], prefix: str
) -> None:
    use(seaweedfs)
    place = f"conformance/{uuid.uuid4().hex[:10]}/{prefix}"
    async with open_place(f"s3://{place}", make=True) as one, open_place(f"s3+aiobotocore://{place}") as other:
        await one.put("k/x", b"one")
        await other.put("k/y", b"other")
        assert (bytes(await other.get("k/x")), bytes(await one.get("k/y"))) == (b"one", b"other")
        for store in (one, other):
            assert [(e.key, e.size) for e in await store.list("k/")] == [("k/x", 3), ("k/y", 5)]
        await one.delete("k/y")
        with pytest.raises(ObjectMissing):
            await other.get("k/y")


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize(
    ("manners", "met"),
    [("hugging-face", {"copied": 2, "slow": 1}), ("r2", {"busy": 1}), ("directory", {"unsorted": 1})],
)
async def test_the_manners_of_another_store_are_met(
    moto: Server,
    use: Callable[[Server], None],
    monkeypatch: pytest.MonkeyPatch,
    manners: str,
    met: Mapping[str, int],
    client: str,
) -> None:
    use(moto)
    with mannered(manners, moto.url, monkeypatch) as seen:
        async with open_place(f"{client}://b{uuid.uuid4().hex[:10]}/run", make=True) as store:
            await asyncio.gather(*(store.put(f"k/{i}", b"x") for i in (2, 10, 1)))
            assert [entry.key for entry in await store.list("k/")] == ["k/1", "k/10", "k/2"]
            assert sum(await asyncio.gather(*(store.create("once", b"%d" % i) for i in range(8)))) <= 1
            assert bytes(await store.get("once")) == bytes(await store.get_range("once", 0, 9))
    # Hugging Face's gateway reads by itself for this client.
    wanted = {**met, "copied": 0} if client == "s3+aiobotocore" and "copied" in met else met
    assert all(seen[what] >= count if count else not seen[what] for what, count in wanted.items()), seen


# --- errors -----------------------------------------------------------------------------------------------------------


async def failing(url: str) -> None:
    async with open_place(url) as store:
        await store.at_start.get("run")


@pytest.mark.parametrize("client", CLIENTS)
async def test_a_missing_bucket_is_named(seaweedfs: Server, use: Callable[[Server], None], client: str) -> None:
    use(seaweedfs)
    with pytest.raises(Denied, match=r"//no-such-bucket-here/x at http://127.0.0.1:\d+: there is no such bucket"):
        await failing(f"{client}://no-such-bucket-here/x")


@pytest.mark.parametrize("client", CLIENTS)
async def test_wrong_credentials_are_said_so(
    seaweedfs: Server, use: Callable[[Server], None], monkeypatch: pytest.MonkeyPatch, client: str
) -> None:
    use(seaweedfs)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(Denied, match="secret key does not fit"):
        await failing(f"{client}://bucket/x")


@pytest.mark.parametrize("client", CLIENTS)
async def test_missing_credentials_are_said_so(
    seaweedfs: Server, use: Callable[[Server], None], monkeypatch: pytest.MonkeyPatch, client: str
) -> None:
    use(seaweedfs)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    with pytest.raises(Denied, match="AWS_ACCESS_KEY_ID"):
        await failing(f"{client}://bucket/x")


@pytest.mark.parametrize("client", CLIENTS)
async def test_an_endpoint_that_does_not_answer_is_unavailable(
    seaweedfs: Server, use: Callable[[Server], None], monkeypatch: pytest.MonkeyPatch, client: str
) -> None:
    use(seaweedfs)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:9"):
        await failing(f"{client}://bucket/x")


@pytest.mark.parametrize(
    "url", ["s3://", "s3+aiobotocore://", "ftp://host/x", "s3://UPPER_case!/x", "s3+aiobotocore://UPPER_case!/x"]
)
async def test_a_url_of_no_store_is_refused(url: str, seaweedfs: Server, use: Callable[[Server], None]) -> None:
    use(seaweedfs)
    with pytest.raises(InputError):
        await failing(url)


async def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file"):
        await failing(str(tmp_path / "file"))


async def test_a_folder_without_permission_is_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_kwargs: object) -> None:
        raise PermissionError(13, "Permission denied", "somewhere")

    monkeypatch.setattr(os, "link", refuse)
    async with open_place(str(tmp_path / "s")) as store:
        with pytest.raises(Denied, match="Permission denied"):
            await store.create("k", b"")


@pytest.mark.parametrize("key", ["../x", "/etc/passwd", "a//b", "a/./b", ".hidden", "a/.x"])
async def test_a_key_never_leaves_the_folder(tmp_path: Path, key: str) -> None:
    async with open_place(str(tmp_path / "s")) as store:
        with pytest.raises(ValueError, match="not a key"):
            await store.put(key, b"x")


class Flaky(Layer):
    """A store that fails `failures` times, before or after a request takes effect, and then works."""

    def __init__(self, inner: EdgeStore, failures: int, *, after: bool) -> None:
        super().__init__(inner)
        self.failures, self.after = failures, after

    async def _through(self, operation: str, key: str, send: Send[T]) -> T:
        if self.failures > 0:
            self.failures -= 1
            if self.after:
                await send()
            raise Unavailable("the reply was lost")
        return await send()


QUICK = Patience(attempts=5, first_s=0.001, longest_s=0.002)


@pytest.mark.parametrize("after", [False, True])
def test_the_edge_tries_again_and_counts(opened: Opened, after: bool) -> None:
    async def body(store: EdgeStore) -> None:
        edge = EdgeStore(Flaky(store, 3, after=after), store.runtime, QUICK)
        await edge.put("k", b"abc")
        assert bytes(await store.get("k")) == b"abc"
        assert (edge.traffic.retries, edge.traffic.bytes_up, edge.outage.down_s) == (3, 3, 0.0)

    run(opened, body)


def test_the_edge_gives_up_and_remembers_since_when(opened: Opened) -> None:
    async def body(store: EdgeStore) -> None:
        edge = EdgeStore(Flaky(store, 99, after=False), store.runtime, QUICK)
        with pytest.raises(Unavailable):
            await edge.get("k")
        assert edge.outage.down_s > 0

    run(opened, body)


def test_a_create_whose_reply_was_lost_finds_its_own_object(opened: Opened) -> None:
    async def body(store: EdgeStore) -> None:
        edge = EdgeStore(Flaky(store, 1, after=True), store.runtime, QUICK)
        assert not await edge.create("k", b"mine")
        assert bytes(await edge.get("k")) == b"mine"

    run(opened, body)


def test_the_edge_does_not_swallow_cancellation(opened: Opened) -> None:
    async def body(store: EdgeStore) -> None:
        edge = EdgeStore(Flaky(store, 10**9, after=False), store.runtime, Patience(attempts=10**9, first_s=0.01))
        task = asyncio.ensure_future(edge.get("k"))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(opened, body)


def test_a_store_that_ignores_the_condition_is_refused(opened: Opened) -> None:
    class Careless(Layer):
        async def create(self, key: str, data: Blob) -> bool:
            await self.put(key, data)
            return True

    async def body(store: EdgeStore) -> None:
        with pytest.raises(Denied, match="does not honour create-only PUT"):
            await require_create_only(Careless(store), store.runtime)

    run(opened, body)

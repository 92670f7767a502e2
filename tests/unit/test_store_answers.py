"""Each answer of a store has one meaning, and a request without an answer is tried again a limited number of times."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError

from isthmus.errors import Denied, ObjectMissing, Unavailable, first_cause
from isthmus.format.records import frame
from isthmus.runtime.clock import single_threaded
from isthmus.store import EdgeStore, Patience, Store
from isthmus.store.atomic import why_not_create_only
from isthmus.store.files import FileStore
from isthmus.store.s3 import S3Store
from isthmus_lab.simulate.world import World
from support.requests import DOING


class Body:
    """The body of an answer, in pieces."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces

    async def __aenter__(self) -> "Body":
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def iter_chunks(self, _size: int) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            yield piece


class Client:
    """An S3 client that gives one fixed answer and records its requests."""

    class meta:
        endpoint_url = "http://here"

    def __init__(self, answer: object) -> None:
        self.answer = answer
        self.asked: list[dict[str, Any]] = []

    async def _request(self, **asked: Any) -> object:
        self.asked.append(asked)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    put_object = get_object = delete_object = _request

    def get_paginator(self, _name: str) -> "Client":
        return self

    async def paginate(self, **asked: Any) -> AsyncIterator[object]:
        yield await self._request(**asked)


def code(name: str, status: int = 400) -> ClientError:
    return ClientError({"Error": {"Code": name, "Message": ""}, "ResponseMetadata": {"HTTPStatusCode": status}}, "Any")


def bucket(answer: object) -> S3Store:
    client = answer if isinstance(answer, Client) else Client(answer)
    return S3Store(client, "bucket", "prefix/", "s3://bucket/prefix", single_threaded())


def content(*pieces: bytes, length: int | None = None) -> dict[str, object]:
    size = sum(map(len, pieces)) if length is None else length
    return {"ContentLength": size, "ContentRange": f"bytes 0-{size - 1}/{size}", "Body": Body(*pieces)}


# --- S3 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["PreconditionFailed", "412"])
async def test_a_failed_condition_is_an_answer(name: str) -> None:
    assert await bucket(code(name, 412)).create("k", b"x") is False


@pytest.mark.parametrize("name", ["ConditionalRequestConflict", "OperationAborted", "409", "SlowDown", "InternalError"])
async def test_a_conflict_is_no_answer_nobody_has_won_yet(name: str) -> None:
    with pytest.raises(Unavailable):
        await bucket(code(name, 409)).create("k", b"x")


async def test_a_create_says_that_it_is_one() -> None:
    client = Client({"ETag": '"x"'})
    store = bucket(client)
    assert await store.create("k", b"x") is True
    await store.put("k", b"x")
    assert [asked.get("IfNoneMatch") for asked in client.asked] == ["*", None]
    assert {asked["Key"] for asked in client.asked} == {"prefix/k"}
    assert all(asked["ContentMD5"] for asked in client.asked)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (code("NoSuchKey", 404), ObjectMissing),
        (code("404", 404), Unavailable),
        (code("AccessDenied", 403), Denied),
        (code("SomethingNew", 403), Denied),
        (code("InvalidObjectState", 403), Denied),
        (code("ServiceUnavailable", 503), Unavailable),
        (EndpointConnectionError(endpoint_url="http://here"), Unavailable),
        (ConnectionResetError(), Unavailable),
    ],
)
async def test_every_refusal_has_its_meaning(error: Exception, raised: type[Exception]) -> None:
    with pytest.raises(raised):
        await bucket(error).get("k")


@pytest.mark.parametrize("what", DOING)
async def test_a_denied_request_is_named(what: str) -> None:
    with pytest.raises(Denied, match=rf"access denied \(AccessDenied\) for {what}: check"):
        await DOING[what](bucket(code("AccessDenied", 403)))
    with pytest.raises(Denied, match=r"the secret key does not fit the access key \(SignatureDoesNotMatch\): correct"):
        await DOING[what](bucket(code("SignatureDoesNotMatch", 403)))


async def test_a_range_ends_before_its_stop() -> None:
    client = Client(content(b"3456"))
    store = bucket(client)
    assert bytes(await store.get_range("k", 3, 7)) == b"3456"
    assert client.asked[0]["Range"] == "bytes=3-6"
    assert bytes(await store.get_range("k", 7, 7)) == b""
    assert len(client.asked) == 1


@pytest.mark.parametrize("length", [5, 7], ids=["more than it announced", "less than it announced"])
async def test_a_body_of_another_length_than_announced_did_not_come(length: int) -> None:
    with pytest.raises(Unavailable, match=r"k (sent more|ended after)"):
        await bucket(content(b"abc", b"def", length=length)).get("k")
    assert bytes(await bucket(content(b"abc", b"def")).get("k")) == b"abcdef"


# --- trying again -----------------------------------------------------------------------------------------------------


class Away:
    """A store that does not answer the first `failures` requests."""

    url = "away://"

    def __init__(self, failures: float, answer: bytes | Exception = b"", takes_s: float = 0.0) -> None:
        self.failures, self.answer, self.takes_s, self.tries = failures, answer, takes_s, 0

    async def get(self, key: str) -> bytes:
        self.tries += 1
        if self.takes_s:
            await asyncio.sleep(self.takes_s)
        if self.tries <= self.failures:
            raise Unavailable("away")
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def drive(away: Away, patience: Patience, body: Callable[[EdgeStore], Awaitable[object]]) -> tuple[object, float]:
    """Run `body` in virtual time with an edge store in front of `away`; return its result and the seconds it took."""
    world = World("edge")
    edge = EdgeStore(cast(Store, away), world.process("p").runtime, patience)

    async def go() -> tuple[object, float]:
        return await body(edge), world.clock.time()

    try:
        found: tuple[object, float] = world.clock.run_until_complete(go())
        return found
    finally:
        world.clock.close()


@pytest.mark.parametrize("attempts", [1, 2, 5])
def test_a_request_is_tried_as_often_as_patience_says(attempts: int) -> None:
    async def body(edge: EdgeStore) -> None:
        with pytest.raises(Unavailable):
            await edge.get("k")

    away = Away(99)
    drive(away, Patience(attempts=attempts), body)
    assert away.tries == attempts
    away = Away(attempts - 1)
    drive(away, Patience(attempts=attempts), lambda edge: edge.get("k"))
    assert away.tries == attempts


def test_pauses_grow_to_the_longest_and_no_further() -> None:
    async def body(edge: EdgeStore) -> None:
        with pytest.raises(Unavailable):
            await edge.get("k")

    patience = Patience(attempts=400, first_s=0.5, longest_s=2.0)
    _, took_s = drive(Away(999), patience, body)
    # With full jitter a pause is half of its ceiling on average.
    assert 0.7 * 400 < took_s < 1.3 * 400
    _, took_s = drive(Away(999), Patience(attempts=3, first_s=0.5, longest_s=1e9), body)
    assert took_s <= 0.5 + 1.0


def test_a_request_that_takes_too_long_counts_as_not_answered() -> None:
    async def body(edge: EdgeStore) -> None:
        with pytest.raises(Unavailable, match=r"no answer within 2\.5 s"):
            await edge.get("k")

    away = Away(0, takes_s=60.0)
    _, took_s = drive(away, Patience(attempts=2, first_s=0.1, longest_s=0.1, request_s=2.5), body)
    assert away.tries == 2
    assert 5.0 <= took_s < 5.2


@pytest.mark.parametrize("answer", [b"", ObjectMissing("k"), Denied("403")], ids=["bytes", "missing", "denied"])
def test_any_answer_ends_an_outage(answer: bytes | Exception) -> None:
    async def body(edge: EdgeStore) -> None:
        with pytest.raises(Unavailable):
            await edge.get("k")
        await asyncio.sleep(100.0)
        assert edge.outage.down_s >= 100.0
        try:
            await edge.get("k")
        except (ObjectMissing, Denied):
            pass
        assert edge.outage.down_s == 0.0
        assert edge.outage.answered_at is not None

    drive(Away(1, answer), Patience(attempts=1), body)


def test_an_outage_is_as_long_as_nothing_was_answered() -> None:
    async def body(edge: EdgeStore) -> None:
        for _ in range(3):
            with pytest.raises(Unavailable):
                await edge.get("k")
            await asyncio.sleep(100.0)
        assert edge.outage.down_s == pytest.approx(300.0)

    drive(Away(99), Patience(attempts=1), body)


def test_a_request_nobody_answers_hangs_since_it_was_sent_or_since_the_last_answer() -> None:
    async def body(edge: EdgeStore) -> None:
        hung = asyncio.ensure_future(edge.get("k"))
        await asyncio.sleep(30.0)
        assert edge.outage.hung_s == pytest.approx(30.0)
        later = asyncio.ensure_future(edge.get("k"))
        await asyncio.sleep(10.0)
        assert edge.outage.hung_s == pytest.approx(40.0), "since the first of the two was sent"
        away.takes_s = 0.0
        await edge.get("k")
        await asyncio.sleep(5.0)
        assert edge.outage.hung_s == pytest.approx(5.0), "since the last answer"
        for task in (hung, later):
            task.cancel()
        await asyncio.gather(hung, later, return_exceptions=True)
        assert edge.outage.hung_s == 0.0

    away = Away(0, takes_s=1e6)
    drive(away, Patience(attempts=1), body)


def test_an_answer_says_how_long_none_came_after_a_request() -> None:
    async def body(edge: EdgeStore) -> None:
        silent = list[float]()
        edge.outage.over = silent.append
        away.takes_s = 2.0
        await edge.get("k")
        await asyncio.sleep(100.0)  # nothing is asked
        await edge.get("k")
        away.takes_s = 30.0
        slow = asyncio.ensure_future(edge.get("k"))
        await asyncio.sleep(10.0)
        away.takes_s = 1.0
        await edge.get("k")  # a store that answers others is not silent
        await slow
        away.takes_s = 1e6
        hung = asyncio.ensure_future(edge.get("k"))
        await asyncio.sleep(40.0)
        hung.cancel()
        await asyncio.gather(hung, return_exceptions=True)
        await asyncio.sleep(5.0)
        away.takes_s = 1.0
        await edge.get("k")  # who asked before did not wait for an answer
        assert silent == pytest.approx([2.0, 2.0, 11.0, 19.0, 1.0])

    away = Away(0)
    drive(away, Patience(attempts=1), body)


def test_an_answer_after_failures_says_how_long_none_came() -> None:
    async def body(edge: EdgeStore) -> None:
        silent = list[float]()
        edge.outage.over = silent.append
        for _ in range(2):
            with pytest.raises(Unavailable):
                await edge.get("k")
            await asyncio.sleep(20.0)
        await edge.get("k")
        assert silent == pytest.approx([40.0])

    drive(Away(2), Patience(attempts=1), body)


# --- create-only ------------------------------------------------------------------------------------------------------


class Memory:
    """A store whose create looks first and writes later; `between` is called in between."""

    url = "memory://"

    def __init__(self, between: Callable[[], Awaitable[None]]) -> None:
        self.blobs: dict[str, bytes] = {}
        self.between = between

    async def get(self, key: str) -> frame.Body:
        if key not in self.blobs:
            raise ObjectMissing(key)
        return bytearray(self.blobs[key])

    async def create(self, key: str, data: bytes) -> bool:
        there = key in self.blobs
        await self.between()
        if there:
            return False
        self.blobs[key] = bytes(data)
        return True

    async def delete(self, key: str) -> None:
        self.blobs.pop(key, None)


@pytest.mark.parametrize("racers", [2, 3])
async def test_a_store_that_looks_first_and_writes_later_is_found_out_by_a_race(racers: int) -> None:
    async def at_once() -> None:
        return None

    for between, found in ((at_once, ""), (lambda: asyncio.sleep(0), f"{racers} of {racers} concurrent")):
        store = Memory(between)
        why = await why_not_create_only(cast(Store, store), single_threaded(0), racers=racers)
        assert why.startswith(found)
        assert bool(why) is bool(found)
        assert store.blobs == {}, "nothing is left behind"


@pytest.mark.parametrize(("answered", "raised"), [(2, False), (1, True)])
async def test_a_race_counts_if_two_racers_get_an_answer(answered: int, raised: bool) -> None:
    """R2 lets one write of a key through in a second, and refuses the others with 429."""

    class Busy(Memory):
        tries = -2  # those before the race

        async def create(self, key: str, data: bytes) -> bool:
            self.tries += 1
            if self.tries > answered:
                raise Unavailable("429")
            return await super().create(key, data)

    async def at_once() -> None:
        return None

    store = Busy(at_once)
    if raised:
        with pytest.raises(ExceptionGroup) as caught:
            await why_not_create_only(cast(Store, store), single_threaded(0), racers=16)
        assert isinstance(first_cause(caught.value), Unavailable)
    else:
        assert await why_not_create_only(cast(Store, store), single_threaded(0), racers=16) == ""


# --- files ------------------------------------------------------------------------------------------------------------


async def test_files_are_created_once_replaced_whole_and_listed_in_order(tmp_path: Path) -> None:
    store = FileStore(tmp_path, single_threaded())
    for key in ("b/2", "b/10", "a/1", "bb/1"):
        assert await store.create(key, b"first") is True
    assert await store.create("a/1", b"second") is False
    assert bytes(await store.get("a/1")) == b"first"
    await store.put("a/1", b"third!")
    assert bytes(await store.get("a/1")) == b"third!"
    assert bytes(await store.get_range("a/1", 1, 3)) == b"hi"
    assert bytes(await store.get_range("a/1", 4, 99)) == b"d!"
    assert bytes(await store.get_range("a/1", 9, 12)) == b""
    assert [e.key for e in await store.list("")] == ["a/1", "b/10", "b/2", "bb/1"]
    assert [e.key for e in await store.list("b/")] == ["b/10", "b/2"]
    assert not any((tmp_path / ".scratch").iterdir()), "no scratch file is left"


async def test_a_file_is_on_disk_before_its_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a power cut could leave a commit of zeros under its key for good."""
    done: list[str] = []

    def told(name: str) -> Callable[..., object]:
        real = getattr(os, name)

        def call(*arguments: object) -> object:
            done.append(name)
            return real(*arguments)

        return call

    for name in ("fsync", "link", "replace"):
        monkeypatch.setattr(os, name, told(name))

    store = FileStore(tmp_path, single_threaded())
    await store.create("a/1", b"x")
    done.clear()
    await store.create("a/2", b"x")
    assert done == ["fsync", "link", "fsync"], "the bytes, the name, the folder that holds the name"
    done.clear()
    await store.put("a/2", b"y")
    assert done == ["fsync", "replace", "fsync"]


async def test_another_folder_in_its_place_is_an_outage(tmp_path: Path) -> None:
    """A lost mount leaves its empty mount point. A folder with the same run object is the same, whatever its inode."""
    root, away = tmp_path / "run", tmp_path / "away"
    store = FileStore(root, single_threaded())
    await store.put("run", b"this run")
    await store.put("a/1", b"x")
    root.rename(away)
    for request in (store.get("a/1"), store.put("a/2", b"y"), store.create("a/2", b"y"), store.list("a/")):
        with pytest.raises(Unavailable, match="is gone"):
            await request
    assert not root.exists()
    root.mkdir()
    for request in (store.get("a/1"), store.put("a/2", b"y"), store.create("a/2", b"y"), store.list("a/")):
        with pytest.raises(Unavailable, match="is another folder than before"):
            await request
    assert list(root.iterdir()) == [], "nothing was written into the empty mount point"
    root.rmdir()
    shutil.copytree(away, root)
    assert bytes(await store.get("a/1")) == b"x"
    assert await store.create("a/2", b"y")


async def test_a_folder_that_is_lost_in_the_middle_of_a_write_is_an_outage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, away = tmp_path / "run", tmp_path / "away"
    store = FileStore(root, single_threaded())
    await store.put("run", b"this run")
    link = os.link

    def lost(source: Path, target: Path) -> None:
        link(source, target)
        root.rename(away)
        root.mkdir()

    monkeypatch.setattr(os, "link", lost)
    with pytest.raises(Unavailable, match="is another folder"):
        await store.create("a/1", b"x")


async def test_a_folder_is_waited_for(tmp_path: Path) -> None:
    """As long as the folder holds no run, another folder may take its place: it may be mounted later."""
    root = tmp_path / "run"
    store = FileStore(root, single_threaded())
    root.mkdir()
    with pytest.raises(ObjectMissing):
        await store.get("run")
    (tmp_path / "mounted").mkdir()
    (tmp_path / "mounted" / "run").write_bytes(b"a run")
    root.rmdir()
    (tmp_path / "mounted").rename(root)
    assert bytes(await store.get("run")) == b"a run"


@pytest.mark.parametrize("link", [".scratch", "updates", "updates/00000/evil"])
async def test_no_link_is_followed(tmp_path: Path, link: str) -> None:
    """A link could lead to foreign files: objects would be written and deleted there."""
    root, other = tmp_path / "run", tmp_path / "other"
    store = FileStore(root, single_threaded())
    await store.put("run", b"this run")
    other.mkdir()
    (other / "precious").write_text("of another")
    os.utime(other / "precious", (1, 1))
    (root / link).parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(root / link, ignore_errors=True)
    (root / link).symlink_to(other)
    with pytest.raises(Denied, match="is a link"):
        await store.put("updates/00000/evil/x", b"x")
    if link != ".scratch":
        with pytest.raises(Denied, match="is a link"):
            await store.delete("updates/00000/evil/precious")
        assert [entry.key for entry in await store.list("")] == ["run"]
    assert (other / "precious").exists()
    assert [path.name for path in other.iterdir()] == ["precious"]

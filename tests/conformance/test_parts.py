"""An object too large for one request is stored in parts, on real servers. A failed part is sent again alone."""

import asyncio
import os
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from botocore.exceptions import EndpointConnectionError

from isthmus.errors import ObjectMissing, Unavailable
from isthmus.format.records.frame import Gathered
from isthmus.runtime.clock import single_threaded
from isthmus.runtime.urls import Place
from isthmus.store import bucket, s3
from isthmus.store.bucket import BucketStore
from isthmus.store.s3 import S3Store, open_s3
from isthmus_services.servers import Server

PART = 5 << 20
"""The smallest part that servers accept."""

LARGE = os.urandom(3 * PART + 12345)


class Client:
    """An S3 client that counts its requests, and fails some of them as often as `fails` says."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.meta = client.meta
        self.fails: Counter[tuple[str, object]] = Counter()
        self.asked: Counter[tuple[str, object]] = Counter()

    def __getattr__(self, name: str) -> Any:
        if name == "get_paginator":
            return self._client.get_paginator

        async def request(**given: Any) -> Any:
            what = name, given.get("PartNumber", given.get("Range"))
            self.asked[what] += 1
            if self.fails[what]:
                self.fails[what] -= 1
                raise EndpointConnectionError(endpoint_url="http://here")
            return await getattr(self._client, name)(**given)

        return request


@pytest.fixture(params=["seaweedfs", "moto"])
def opened(
    request: pytest.FixtureRequest, use: Callable[[Server], None], monkeypatch: pytest.MonkeyPatch
) -> Callable[[], Any]:
    use(request.getfixturevalue(request.param))
    monkeypatch.setattr(s3, "PART_BYTES", PART)
    monkeypatch.setattr(s3, "PART_PAUSE_S", 0.001)

    @asynccontextmanager
    async def open_it() -> AsyncIterator[tuple[S3Store, Client]]:
        async with open_s3(Place.of(f"s3://b{uuid.uuid4().hex[:10]}/p"), single_threaded()) as store:
            await store.create_bucket()
            store._client = client = Client(store._client)
            yield store, client

    return open_it


async def test_what_is_put_in_parts_is_there_whole(opened: Callable[[], Any]) -> None:
    async with opened() as (store, client):
        await store.put("k", LARGE)
        assert [client.asked["upload_part", number] for number in range(1, 6)] == [1, 1, 1, 1, 0]
        assert client.asked["put_object", None] == 0
        assert bytes(await store.get("k")) == LARGE
        assert bytes(await store.get_range("k", PART - 7, 2 * PART + 9)) == LARGE[PART - 7 : 2 * PART + 9]
        ((key, size, _),) = await store.list("")
        assert (key, size) == ("k", len(LARGE))
        changed = LARGE[::-1]
        await store.put("k", memoryview(changed))
        assert bytes(await store.get("k")) == changed
        # If the data lies in pieces, parts begin and end anywhere in them.
        await store.put("k", Gathered([LARGE[:100], LARGE[100 : 2 * PART + 1], LARGE[2 * PART + 1 :]]))
        assert bytes(await store.get("k")) == LARGE


async def test_of_two_creates_in_parts_the_second_finds_the_first(opened: Callable[[], Any]) -> None:
    async with opened() as (store, client):
        assert await store.create("k", LARGE) is True
        sent = sum(n for (what, _), n in client.asked.items() if what == "upload_part")
        assert await store.create("k", LARGE[1:] + b"x") is False
        assert sum(n for (what, _), n in client.asked.items() if what == "upload_part") == sent
        assert bytes(await store.get("k")) == LARGE


async def test_a_part_that_fails_is_sent_again_alone(opened: Callable[[], Any]) -> None:
    async with opened() as (store, client):
        client.fails["upload_part", 2] = s3.PART_TRIES - 1
        await store.put("k", LARGE)
        assert [client.asked["upload_part", number] for number in range(1, 5)] == [1, s3.PART_TRIES, 1, 1]
        a, b = f"bytes=0-{PART - 1}", f"bytes={PART}-{2 * PART - 1}"
        client.fails["get_object", b] = 1
        assert bytes(await store.get("k")) == LARGE
        assert (client.asked["get_object", a], client.asked["get_object", b]) == (1, 2)


async def test_a_range_that_is_cut_is_read_again_alone(
    use: Callable[[Server], None], seaweedfs: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(seaweedfs)
    monkeypatch.setattr(bucket, "RANGE_BYTES", PART)
    monkeypatch.setattr(bucket, "PART_PAUSE_S", 0.001)
    name = f"b{uuid.uuid4().hex[:10]}"
    asked: Counter[int] = Counter()
    cuts: Counter[int] = Counter()

    class Cut:
        """An answer whose body ends early."""

        def __init__(self, answer: Any) -> None:
            self.meta = answer.meta
            self._chunks = answer.stream(1 << 20)

        def stream(self, _: int) -> AsyncIterator[Any]:
            async def chunks() -> AsyncIterator[Any]:
                async for chunk in self._chunks:
                    yield chunk
                    raise OSError("connection reset")

            return chunks()

    class Flaky(BucketStore):
        async def _ask(self, key: str, options: Any) -> Any:
            at = options["range"][0]
            asked[at] += 1
            answer = await super()._ask(key, options)
            if cuts[at]:
                cuts[at] -= 1
                return Cut(answer)
            return answer

    async with open_s3(Place.of(f"s3://{name}"), single_threaded()) as maker:
        await maker.create_bucket()
    monkeypatch.setattr(bucket, "BucketStore", Flaky)
    async with bucket.open_s3(Place.of(f"s3://{name}/p"), single_threaded()) as store:
        await store.put("k", LARGE)
        cuts.update({0: 1, 2 * PART: bucket.PART_TRIES})
        assert bytes(await store.get("k")) == LARGE
        assert asked == {0: 2, PART: 1, 2 * PART: 1 + bucket.PART_TRIES, 3 * PART: 1}
        cuts[PART] = 1 + bucket.PART_TRIES
        with pytest.raises(Unavailable, match="connection reset"):
            await store.get("k")


async def test_an_upload_that_was_cut_goes_on_with_what_is_missing(opened: Callable[[], Any]) -> None:
    async with opened() as (store, client):
        client.fails["complete_multipart_upload", None] = 1
        with pytest.raises(Unavailable):
            await store.put("k", LARGE)
        with pytest.raises(ObjectMissing):
            await store.get("k")
        await store.put("k", LARGE)
        assert [client.asked["upload_part", number] for number in range(1, 5)] == [1, 1, 1, 1]
        assert client.asked["create_multipart_upload", None] == 1
        assert bytes(await store.get("k")) == LARGE
        # An unfinished upload of other bytes, of the same size and under the same key, is not continued with these.
        client.fails["complete_multipart_upload", None] = 1
        with pytest.raises(Unavailable):
            await store.put("j", LARGE)
        other = LARGE[: 2 * PART] + bytes(len(LARGE) - 2 * PART)
        await store.put("j", other)
        assert bytes(await store.get("j")) == other


async def test_an_upload_that_nobody_knows_any_more_begins_anew(opened: Callable[[], Any]) -> None:
    async with opened() as (store, client):
        client.fails["complete_multipart_upload", None] = 1
        with pytest.raises(Unavailable):
            await store.put("k", LARGE)
        begun = store._begun["k"]
        await client.abort_multipart_upload(Bucket=store._bucket, Key="p/k", UploadId=begun.upload)
        for _ in range(2):
            try:
                await store.put("k", LARGE)
                break
            except Unavailable:
                await asyncio.sleep(0)
        assert bytes(await store.get("k")) == LARGE

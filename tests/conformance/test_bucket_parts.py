"""Through obstore, large objects are written in parts and read in ranges, on real servers."""

import os
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import pytest

from isthmus.agent.ports import open_place
from isthmus.errors import ObjectMissing
from isthmus.format.records.frame import Gathered
from isthmus.store import EdgeStore, bucket
from isthmus_services.servers import Server
from support.azure import CONTAINER
from support.manners import mannered

PART = 5 << 20
"""The smallest part that servers accept."""

LARGE = os.urandom(3 * PART + 12345)


class Asked:
    """Records the ranges that the store requests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ranges: list[tuple[int, int]] = []
        own = bucket.BucketStore._ask

        async def ask(store: bucket.BucketStore, key: str, options: Any) -> Any:
            self.ranges.append(options["range"])
            return await own(store, key, options)

        monkeypatch.setattr(bucket.BucketStore, "_ask", ask)


@pytest.fixture(params=["seaweedfs", "moto", "azurite", "moto as hugging-face", "moto as r2"])
def opened(
    request: pytest.FixtureRequest, use: Callable[[Server], None], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], Any]]:
    server, _, manners = request.param.partition(" as ")
    use(given := request.getfixturevalue(server))
    monkeypatch.setattr(bucket, "PART_BYTES", PART)
    monkeypatch.setattr(bucket, "RANGE_BYTES", PART)

    @asynccontextmanager
    async def open_it() -> AsyncIterator[EdgeStore]:
        if request.param == "azurite":
            url, make = f"az://{CONTAINER}/{uuid.uuid4().hex[:10]}", False
        else:
            url, make = f"s3://b{uuid.uuid4().hex[:10]}/p", True
        async with open_place(url, make=make) as store:
            yield store

    with mannered(manners, given.url, monkeypatch) if manners else nullcontext():
        yield open_it


async def test_what_is_put_in_parts_is_there_whole(opened: Callable[[], Any]) -> None:
    async with opened() as store:
        await store.put("k", LARGE)
        assert bytes(await store.get("k")) == LARGE
        ((key, size, _),) = await store.list("")
        assert (key, size) == ("k", len(LARGE))
        changed = LARGE[::-1]
        await store.put("k", memoryview(changed))
        assert bytes(await store.get("k")) == changed
        # If the data lies in pieces, parts begin and end anywhere in them.
        await store.put("k", Gathered([LARGE[:100], LARGE[100 : 2 * PART + 1], LARGE[2 * PART + 1 :]]))
        assert bytes(await store.get("k")) == LARGE


async def test_of_two_creates_in_parts_the_second_finds_the_first(opened: Callable[[], Any]) -> None:
    async with opened() as store:
        assert await store.create("k", LARGE) is True
        assert await store.create("k", LARGE[1:] + b"x") is False
        assert bytes(await store.get("k")) == LARGE


async def test_a_large_object_is_read_in_ranges_and_a_range_of_it_in_as_few(
    opened: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened() as store:
        await store.put("k", LARGE)
        asked = Asked(monkeypatch)
        assert bytes(await store.get("k")) == LARGE
        assert [(a, min(b, len(LARGE))) for a, b in sorted(asked.ranges)] == [
            (at, min(at + PART, len(LARGE))) for at in range(0, len(LARGE), PART)
        ]
        for start, stop in ((7, PART), (PART - 7, 2 * PART + 9), (3 * PART, 9 * PART), (1, 1 + PART)):
            asked.ranges.clear()
            assert bytes(await store.get_range("k", start, stop)) == LARGE[start:stop]
            assert len(asked.ranges) == -(-(min(stop, len(LARGE)) - start) // PART)
        with pytest.raises(ObjectMissing):
            await store.get("j")

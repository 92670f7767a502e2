"""A denial of requests that should work counts as an outage for a while; any other denial is raised at once."""

import logging
import random
from typing import cast

import pytest

from isthmus.agent.tolerance import REFUSED_S, Tolerance, TolerantStore
from isthmus.errors import Denied, ObjectMissing, Unavailable
from isthmus.format.records.frame import Body
from isthmus.runtime.clock import Runtime, inline
from isthmus.store import Store


class Clock:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.runtime = Runtime(lambda: self.now, lambda: self.now, random.Random(0), inline, lambda: "0" * 16)


class Told:
    """A store that denies the requests in `refused`, by operation and folder."""

    url = "s3://bucket/run"

    def __init__(self) -> None:
        self.refused: set[tuple[str, str]] = set()

    async def get(self, key: str) -> Body:
        if ("get", key.split("/", maxsplit=1)[0]) in self.refused:
            raise Denied(f"{self.url}: access denied (ExpiredToken)")
        if key.endswith("nothing"):
            raise ObjectMissing(key)
        return bytearray(b"x")

    async def put(self, key: str, data: bytes) -> None:
        if ("put", key.split("/", maxsplit=1)[0]) in self.refused:
            raise Denied(f"{self.url}: access denied (AccessDenied)")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store() -> Told:
    return Told()


@pytest.fixture
def tolerant(clock: Clock, store: Told) -> tuple[TolerantStore, Tolerance]:
    tolerance = Tolerance(clock.runtime)
    return TolerantStore(cast(Store, store), tolerance), tolerance


async def test_what_never_worked_is_refused_at_once(store: Told, tolerant: tuple[TolerantStore, Tolerance]) -> None:
    store.refused = {("get", "commits")}
    with pytest.raises(Denied):
        await tolerant[0].get("commits/0")


async def test_what_worked_is_ridden_out_loudly_and_ends_after_the_stated_time(
    clock: Clock, store: Told, tolerant: tuple[TolerantStore, Tolerance], caplog: pytest.LogCaptureFixture
) -> None:
    ways, tolerance = tolerant
    await ways.get("commits/0")
    store.refused = {("get", "commits")}
    with caplog.at_level(logging.WARNING):
        for _ in range(int(REFUSED_S)):
            with pytest.raises(Unavailable, match="ExpiredToken"):
                await ways.get("commits/0")
            clock.now += 1.0
    assert tolerance.refused_s == REFUSED_S
    said = [r.getMessage() for r in caplog.records]
    assert "this process ends in 300 s" in said[0]
    assert 5 <= len(said) <= 12  # now and then, not at each request
    with pytest.raises(Denied):
        await ways.get("commits/0")


async def test_once_it_is_over_it_starts_anew(
    clock: Clock, store: Told, tolerant: tuple[TolerantStore, Tolerance]
) -> None:
    ways, tolerance = tolerant
    await ways.get("commits/0")
    for _ in range(3):
        store.refused = {("get", "commits")}
        with pytest.raises(Unavailable):
            await ways.get("commits/0")
        clock.now += 0.9 * REFUSED_S
        store.refused = set()
        await ways.get("commits/0")
        assert tolerance.refused_s == 0.0


async def test_that_nothing_is_there_is_an_answer_too(store: Told, tolerant: tuple[TolerantStore, Tolerance]) -> None:
    ways, _ = tolerant
    with pytest.raises(ObjectMissing):
        await ways.get("commits/nothing")
    store.refused = {("get", "commits")}
    with pytest.raises(Unavailable):
        await ways.get("commits/0")


async def test_reading_does_not_vouch_for_writing_nor_one_folder_for_another(
    clock: Clock, store: Told, tolerant: tuple[TolerantStore, Tolerance]
) -> None:
    ways, _ = tolerant
    await ways.get("values/0")
    await ways.put("values/0", b"")
    store.refused = {("put", "values")}
    with pytest.raises(Unavailable):
        await ways.put("values/0", b"")
    clock.now += REFUSED_S
    await ways.get("values/0")  # successful reads do not hide that writes are denied
    with pytest.raises(Denied):
        await ways.put("values/0", b"")
    store.refused = {("get", "learners")}
    with pytest.raises(Denied):
        await ways.get("learners/l0")


async def test_that_the_run_could_be_read_once_is_known_from_the_start(
    store: Told, tolerant: tuple[TolerantStore, Tolerance]
) -> None:
    store.refused = {("get", "run")}
    with pytest.raises(Unavailable):
        await tolerant[0].get("run")


async def test_what_has_not_been_asked_for_lately_is_not_known_to_be_refused_still(
    clock: Clock, store: Told, tolerant: tuple[TolerantStore, Tolerance]
) -> None:
    ways, tolerance = tolerant
    await ways.put("values/0", b"")
    store.refused = {("put", "values")}
    with pytest.raises(Unavailable):
        await ways.put("values/0", b"")
    clock.now += 10.0
    assert tolerance.refused_s == 10.0
    clock.now += 10.0
    assert tolerance.refused_s == 0.0


async def test_a_refusal_of_an_update_says_nothing_of_the_rest(
    store: Told, tolerant: tuple[TolerantStore, Tolerance]
) -> None:
    ways, tolerance = tolerant
    await ways.get("updates/0")
    store.refused = {("get", "updates")}
    with pytest.raises(Denied):
        await ways.get("updates/0")
    assert tolerance.refused_s == 0.0


async def test_what_is_vouched_for_is_ridden_out_though_it_never_worked(
    store: Told, tolerant: tuple[TolerantStore, Tolerance], clock: Clock
) -> None:
    tolerant[0].vouch()
    store.refused = {("put", "values")}
    with pytest.raises(Unavailable):
        await tolerant[0].put("values/0", b"x")
    clock.now += REFUSED_S
    with pytest.raises(Denied):
        await tolerant[0].put("values/0", b"x")

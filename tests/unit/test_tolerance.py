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
    """A store that denies the requests in `refused`, by operation and a folder that their keys are in."""

    url = "s3://bucket/run"

    def __init__(self) -> None:
        self.refused: set[tuple[str, str]] = set()

    async def get(self, key: str) -> Body:
        if self._refuses("get", key):
            raise Denied(f"{self.url}: access denied (ExpiredToken)")
        if key.endswith("nothing"):
            raise ObjectMissing(key)
        return bytearray(b"x")

    async def put(self, key: str, data: bytes) -> None:
        if self._refuses("put", key):
            raise Denied(f"{self.url}: access denied (AccessDenied)")

    def _refuses(self, operation: str, key: str) -> bool:
        return any(operation == refused and f"{key}/".startswith(f"{folder}/") for refused, folder in self.refused)


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
    assert "(read commits/): if it still is in 300 s, this process ends" in said[0]
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


async def test_a_folder_that_works_does_not_hide_that_the_one_beside_it_is_refused(
    clock: Clock, store: Told, tolerant: tuple[TolerantStore, Tolerance]
) -> None:
    """As where one fragment's folder has lost its permissions: the updates of the others are stored meanwhile."""
    ways, tolerance = tolerant
    await ways.put("updates/00001/eu/1", b"")
    store.refused = {("put", "updates/00000/eu")}
    for at in range(0, int(REFUSED_S), 10):
        with pytest.raises(Unavailable, match=f"refused for {at} s"):
            await ways.put("updates/00000/eu/1", b"")
        await ways.put("updates/00001/eu/1", b"")
        assert tolerance.refused == f"write updates/00000/eu/ for {at} s; it ends after 300 s"
        clock.now += 10.0
    with pytest.raises(Denied):
        await ways.put("updates/00000/eu/1", b"")
    assert tolerance.refused == "", "a caller that goes on without it waits for nothing"


async def test_an_agent_that_asks_seldom_remembers_a_refusal_until_it_asks_again(clock: Clock, store: Told) -> None:
    tolerance = Tolerance(clock.runtime, lately_s=REFUSED_S)
    ways = TolerantStore(cast(Store, store), tolerance)
    await ways.put("updates/00000/eu/1", b"")
    store.refused = {("put", "updates/00000/eu")}
    with pytest.raises(Unavailable):
        await ways.put("updates/00000/eu/1", b"")
    clock.now += 200.0
    await ways.put("updates/00001/eu/1", b"")
    assert tolerance.refused_s == 200.0
    store.refused = set()
    await ways.put("updates/00000/eu/1", b"")
    assert tolerance.refused_s == 0.0


async def test_two_refusals_a_day_apart_are_two(
    clock: Clock, store: Told, tolerant: tuple[TolerantStore, Tolerance]
) -> None:
    await tolerant[0].put("values/0", b"")
    store.refused = {("put", "values")}
    for _ in range(2):
        with pytest.raises(Unavailable, match="refused for 0 s"):
            await tolerant[0].put("values/0", b"")
        clock.now += 86400.0


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

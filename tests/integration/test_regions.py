"""A run in which a learner has a bucket near it stays correct and goes on when that bucket fails."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import pytest

from isthmus.errors import InputError, LogCorrupt, Unavailable
from isthmus.format.records import frame
from isthmus.format.records.keys import version_in
from isthmus.format.records.objects import MemberSpec
from isthmus.format.rules import MemberRole, Rules
from isthmus.format.signing import Signer
from isthmus.format.signing.keys import new_signer
from isthmus.inspect.replay import replay
from isthmus.log import Log, fold, gc
from isthmus.log.membership import Members, write
from isthmus.store import EdgeStore, Layer, Store, open_store
from isthmus.store.layer import Send
from support.world import QUICK, World, all_commits, balanced, seed_of, serving, train, world

T = TypeVar("T")

OWNER, SYNC, EU, US = (new_signer() for _ in range(4))
RULES = Rules(fragments=2, sync_every=4, codec_up="f32", codec_down="f32")


class Failing(Layer):
    """A store that does not answer while it is down."""

    def __init__(self, store: Store, places: "Places") -> None:
        super().__init__(store)
        self.places = places

    async def _through(self, operation: str, key: str, send: Send[T]) -> T:
        if self.places.down:
            raise Unavailable(f"{self.url}: is down")
        return await send()


@dataclass
class Places:
    """A run in one folder, and a folder near the learner `us`."""

    w: World
    near: Path
    stack: AsyncExitStack
    down: bool = False
    """Whether the store near `us` does not answer."""

    async def process(self, signer: Signer) -> World:
        """Return the world as another process sees it, with its own store object."""
        store = await self.stack.enter_async_context(open_store(self.w.store.url, self.w.runtime))
        assert store.regions is not None
        really = store.regions._open_bucket

        @asynccontextmanager
        async def at_times(url: str) -> AsyncIterator[Store]:
            async with really(url) as found:
                yield Failing(found, self)

        store.regions._open_bucket = at_times
        return replace(self.w, store=store, signer=signer)

    async def log(self, signer: Signer) -> Log:
        """Return the log as another process reads it."""
        log = (await self.process(signer)).log
        await log.members.refresh(log.store)
        return log

    async def moved(self, bucket: str) -> None:
        """Write a members object which says that the updates of `us` go to this bucket."""
        members, log = Members(self.w.run), self.w.log
        heads = [len(commits) for commits in (await all_commits(log)).values()]
        entries = [
            MemberSpec("eu", MemberRole.LEARNER, EU.author),
            MemberSpec("us", MemberRole.LEARNER, US.author, bucket),
            MemberSpec("s-*", MemberRole.SYNCER, SYNC.author),
        ]
        await write(self.w.store, members, OWNER, entries, heads, self.w.runtime.wall())

    def keys(self, prefix: str) -> set[str]:
        """Return the keys below a prefix in the folder near `us`."""
        return {str(p.relative_to(self.near)) for p in (self.near / prefix).rglob("*") if p.is_file()}


@pytest.fixture
async def places(folder: Path, tmp_path: Path) -> AsyncIterator[Places]:
    near = tmp_path / "near"
    near.mkdir()
    async with world(folder, replace(seed_of(RULES, QUICK), signer=OWNER)) as w, AsyncExitStack() as stack:
        found = Places(w, near, stack)
        await found.moved(near.as_uri())
        yield found


async def differences(places: Places) -> list[str]:
    found = await replay(await places.log(US))
    assert sum(one.compared for one in found) > 0
    return [str(one.difference) for one in found if one.difference is not None]


async def merged_of(log: Log) -> dict[str, int]:
    """Return how many updates of each learner are in the log."""
    found: dict[str, int] = {}
    for commits in (await all_commits(log)).values():
        for commit in commits:
            for given in commit.header.inputs:
                found[given.learner] = found.get(given.learner, 0) + 1
    return found


async def trained(places: Places, until_version: int, during: Callable[[int], None] = lambda head: None) -> None:
    """Train with both learners and a syncer until every fragment has this version.

    `during` is called with the lowest version of a fragment, again and again.
    """
    async with serving((await places.process(SYNC)).syncer("s-1")) as syncer:

        def enough() -> bool:
            head = min(k.head for k in syncer.coordinators)
            during(head)
            return head >= until_version

        agents = [(await places.process(key)).learner(name) for key, name in ((EU, "eu"), (US, "us"))]
        await asyncio.gather(*(train(agent, 1, enough=enough) for agent in agents))
        for agent in agents:
            balanced(agent)
        assert not syncer.tallies.rejected


async def test_updates_lie_near_their_learner_and_what_is_published_is_copied_there(places: Places) -> None:
    await trained(places, 6)
    assert {key.split("/")[2] for key in places.keys("updates")} == {"us"}
    everything = await (await places.log(EU)).store.list("updates/")
    assert not list((Path(places.w.store.url) / "updates").rglob("us/*"))
    # A listing contains the updates of both learners.
    assert {entry.key.split("/")[2] for entry in everything} == {"eu", "us"}
    for prefix in ("values/", "snapshots/"):
        there = places.keys(prefix)
        # Version 0 is not copied: it was written before there were members.
        assert {e.key for e in await places.w.store.list(prefix)} - there <= {
            key for key in (e.key for e in await places.w.store.list("snapshots/")) if "/000000000000-" in key
        }
        assert there
    assert not places.keys("commits")
    assert not places.keys("learners")
    assert min((await merged_of(await places.log(EU))).values()) > 0
    assert await differences(places) == []


async def test_what_is_published_is_read_near_first_and_with_the_run_else(places: Places) -> None:
    await trained(places, 4)
    store = (await places.log(US)).store
    assert isinstance(store, EdgeStore)
    assert store.regions is not None
    store.regions.near = "us"
    key = sorted(places.keys("values"))[-1]
    body = bytes(await store.get(key))
    copy = places.near / key
    copy.write_bytes(b"of the copy")
    assert bytes(await store.get(key)) == b"of the copy"
    copy.unlink()
    assert bytes(await store.get(key)) == body
    copy.write_bytes(b"of the copy")
    places.down = True
    assert bytes(await store.get(key)) == body, "the near store does not answer, but the run's own store does"
    places.down = False
    assert bytes(await store.get(key)) == body, "the near store must not be asked first for a while"


@pytest.mark.parametrize("damaged", ["values", "snapshots"])
async def test_a_damaged_copy_costs_one_look_at_the_runs_own(places: Places, damaged: str) -> None:
    await trained(places, 10)
    log = await places.log(US)
    assert isinstance(log.store, EdgeStore)
    assert log.store.regions is not None
    whole = [(await fold.fold(log, p, fold.PublishedValue(log))).carried.tobytes() for p in range(2)]
    log.store.regions.near = "us"
    for key in places.keys(damaged):
        body = bytearray((places.near / key).read_bytes())
        body[len(body) // 2 if damaged == "values" else frame.payload_start(body) + 8] ^= 1
        (places.near / key).write_bytes(body)
    assert [(await fold.fold(log, p, fold.PublishedValue(log))).carried.tobytes() for p in range(2)] == whole
    # A fold fails if the run's own object is damaged.
    home, newest = Path(places.w.store.url), max(places.keys("values/00000"))
    for key in places.keys("snapshots"):
        for place in (home, places.near):
            (place / key).unlink()
    (home / newest).write_bytes(b"nonsense")
    with pytest.raises(LogCorrupt, match=newest):
        await fold.fold(log, 0, fold.PublishedValue(log))


async def test_a_learner_goes_on_where_the_copies_near_it_are_damaged(places: Places) -> None:
    """All copies of one fragment are damaged from its third version on."""

    def spoil(head: int) -> None:
        for key in places.keys("values/00000"):
            path = places.near / key
            if version_in(key) >= 3 and path.read_bytes()[-4:] != b"evil":
                path.write_bytes(path.read_bytes()[:-4] + b"evil")

    await trained(places, 12, spoil)
    assert min((await merged_of(await places.log(EU))).values()) > 6
    assert await differences(places) == []


async def test_a_bucket_that_fails_stops_nobody(places: Places) -> None:
    def during(head: int) -> None:
        places.down = 3 <= head < 9

    await trained(places, 12, during)
    # Updates that could not be stored near `us` are in the run's own store.
    assert list((Path(places.w.store.url) / "updates").rglob("us/*"))
    assert places.keys("updates")
    merged = await merged_of(await places.log(EU))
    assert merged["us"] >= merged["eu"] / 2
    places.down = False
    assert await differences(places) == []


async def test_one_that_moves_is_found_in_both_places(places: Places) -> None:
    await trained(places, 4)
    before = places.keys("updates")
    await places.moved("")
    await trained(places, 8)
    assert places.keys("updates") == before
    assert await differences(places) == []


async def test_what_is_collected_is_collected_everywhere(places: Places) -> None:
    await trained(places, 20)
    before = places.keys("updates"), places.keys("values")
    log = await places.log(OWNER)
    await gc.apply(log, await gc.plan(log, keep=2, min_age_s=0.0))
    after = places.keys("updates"), places.keys("values")
    assert after[0] < before[0]
    assert after[1] < before[1]


async def test_a_run_in_a_bucket_names_no_folders(folder: Path) -> None:
    async with world(folder, replace(seed_of(RULES, QUICK), signer=OWNER)) as w:
        store = w.store
        assert store.regions is not None
        with pytest.raises(InputError, match="region=NAME"):
            async with open_store("s3://bucket/run?user=x", w.runtime):
                pass

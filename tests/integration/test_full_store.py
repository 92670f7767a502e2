"""In a store without space, garbage collection still works, and commands say that the store is full and what to do."""

import asyncio
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from isthmus.errors import StoreFull, Unavailable
from isthmus.format.records.frame import Blob, Data
from isthmus.format.rules import Pace, Rules
from isthmus.inspect.replay import replay
from isthmus.log import gc
from isthmus.store import Layer, Store
from isthmus.store.retrying import Patience
from isthmus_services.processes import isthmus_command
from support.world import World, all_commits, in_virtual_time, newest_commit, seed_of, serving, train, world

RULES = Rules(fragments=2, sync_every=4)


class Full(Layer):
    """A store that has room for `room` more bytes. `sizes` has the size of each object in it."""

    def __init__(self, store: Store, room: int = 0) -> None:
        super().__init__(store)
        self.room, self.sizes, self.deleted, self.refused = room, dict[str, int](), list[str](), 0

    async def _takes(self, key: str, size: int) -> None:
        if size - self.sizes.get(key, 0) > self.room:
            self.refused += 1
            raise StoreFull(self.url, self.url, "test")
        self.room -= size - self.sizes.get(key, 0)
        self.sizes[key] = size

    async def put(self, key: str, data: Data) -> None:
        """Store an object if there is room."""
        await self._takes(key, len(data))
        await super().put(key, data)

    async def create(self, key: str, data: Blob) -> bool:
        """Create an object if there is room."""
        await self._takes(key, len(data))
        return await super().create(key, data)

    async def delete(self, key: str) -> None:
        """Delete an object, which makes room."""
        self.deleted.append(key)
        self.room += self.sizes.pop(key, 0)
        await super().delete(key)


async def full(w: World) -> Full:
    """Return the world's store with room for not one more byte."""
    found = Full(w.store)
    found.sizes = {entry.key: entry.size for entry in await w.store.list("")}
    return found


async def grown(w: World, versions: int, **options: Any) -> None:
    async with serving(w.syncer("s1")) as syncer:
        await train(w.learner("l0", **options), 10, enough=lambda: min(k.head for k in syncer.coordinators) >= versions)


@pytest.mark.parametrize("snapshot_every", [4, 20], ids=["old snapshots", "none but the newest"])
@in_virtual_time
async def test_a_store_without_a_byte_is_collected(snapshot_every: int) -> None:
    pace = Pace(heartbeat_s=0.2, silence_s=0.8, snapshot_every=snapshot_every)
    async with world(Path(), seed_of(RULES, pace)) as w:
        await grown(w, 24, checkpoint_s=0.2)
        store = await full(w)
        log = w.through(lambda _: store, Patience(attempts=1)).log
        plan = await gc.plan(log, keep=1, min_age_s=-1.0)
        assert plan.pack
        assert ("snapshots" in plan.doomed) == (snapshot_every == 4)
        if snapshot_every != 4:
            plan.doomed.pop("checkpoints", None)
        await gc.apply(log, plan)
        assert store.refused > 0
        first = store.deleted[0].split("/")[0]
        assert first == ("snapshots" if snapshot_every == 4 else "values"), (
            "objects that no commit names must be deleted first"
        )
        assert {e.key for of in plan.doomed.values() for e in of} <= set(store.deleted)
        assert store.room > 0
        for p, commits in (await all_commits(w.log)).items():
            assert [c.in_segment for c in commits] == [c.version < plan.starts[p] for c in commits]
        assert all(one.difference is None for one in await replay(w.log))


@in_virtual_time
async def test_where_nothing_can_go_it_says_that_it_is_full() -> None:
    async with world(Path(), seed_of(RULES, Pace(heartbeat_s=0.2, silence_s=0.8, snapshot_every=4))) as w:
        await grown(w, 24)
        store = await full(w)
        log = w.through(lambda _: store, Patience(attempts=1)).log
        plan = await gc.plan(log, keep=1, min_age_s=-1.0)
        plan.doomed.clear()
        with pytest.raises(Unavailable, match="is full, and nothing is left to be collected"):
            await gc.apply(log, plan)


@in_virtual_time
async def test_a_run_whose_store_was_full_goes_on_when_there_is_room_again() -> None:
    async with world(Path(), seed_of(RULES, Pace(heartbeat_s=0.2, silence_s=0.8))) as w:
        await grown(w, 4)
        store = await full(w)
        store.room = 1 << 30
        narrow = w.through(lambda _: store)
        async with serving(narrow.syncer("s2")) as syncer:
            before = [coordinator.head for coordinator in syncer.coordinators]

            def enough() -> bool:
                head = min(k.head for k in syncer.coordinators)
                if head > max(before) and not store.refused:
                    store.room = 0
                elif store.refused > 20:
                    store.room = 1 << 30
                return head > max(before) + 4

            await train(narrow.learner("l1"), 10, enough=enough)
        assert store.refused > 20
        assert (await newest_commit(w, 0)).version > before[0] + 4


def test_it_is_no_refusal_and_is_ridden_out() -> None:
    assert issubclass(StoreFull, Unavailable)


# --- a real disk ------------------------------------------------------------------------------------------------------

IN_A_DISK_OF_ITS_OWN = ("unshare", "--user", "--map-root-user", "--mount")


@pytest.fixture
def own_mounts() -> None:
    """Require a mount namespace, in which a test can mount a file system of any size."""
    if subprocess.run([*IN_A_DISK_OF_ITS_OWN, "true"], capture_output=True, check=False).returncode:
        why = "not run: this machine gives no namespace of mounts (unshare --user --mount)"
        if os.environ.get("ISTHMUS_REQUIRE_MOUNTS") == "1":
            pytest.fail(why, pytrace=False)
        pytest.skip(why)


@pytest.mark.usefixtures("own_mounts")
async def test_on_a_disk_without_space_the_commands_say_so_and_gc_frees_it(folder: Path, tmp_path: Path) -> None:
    pace = Pace(heartbeat_s=0.2, silence_s=0.8, snapshot_every=4)
    async with world(folder, seed_of(RULES, pace)) as w:
        await grown(w, 24)
    disk, isthmus = tmp_path / "disk", " ".join(isthmus_command())
    disk.mkdir()
    script = f"""
        mount -t tmpfs -o size=64m tmpfs {disk} && cp -r {folder} {disk}/run || exit 99
        head -c 100M /dev/zero > {disk}/ballast 2> {tmp_path}/filled
        {isthmus} doctor {disk}/run > {tmp_path}/doctor; echo $? > {tmp_path}/doctor.code
        {isthmus} gc {disk}/run --keep 1 --min-age 0 --apply --json {tmp_path}/gc.json > {tmp_path}/gc 2>&1
        echo $? > {tmp_path}/gc.code
        {isthmus} replay {disk}/run > {tmp_path}/replay 2>&1; echo $? > {tmp_path}/replay.code
        df --output=avail -B1 {disk} | tail -1 > {tmp_path}/free
    """
    command = [*IN_A_DISK_OF_ITS_OWN, "sh", "-c", script]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)

    def read(name: str) -> str:
        return (tmp_path / name).read_text()

    assert done.returncode == 0, done.stderr
    assert "No space left" in read("filled")
    assert read("doctor.code").strip() == "1"
    assert "store: may write" in read("doctor")
    assert "is full (No space left on device)" in read("doctor")
    assert f"isthmus gc {disk}/run lists what can be deleted, and --apply deletes it" in read("doctor")
    assert read("gc.code").strip() == "0", read("gc")
    assert json.loads(read("gc.json"))["bytes"] > 0
    assert int(read("free")) > 0
    assert read("replay.code").strip() == "0", read("replay")

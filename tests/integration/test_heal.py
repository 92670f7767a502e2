"""If objects that a fold needs are lost and no syncer has the state, `isthmus heal` starts the fragment again."""

import asyncio
import json
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import pytest

from isthmus.codecs.kernels import F32
from isthmus.errors import Denied, LogCorrupt, Unavailable
from isthmus.format.rules import Pace, Rules
from isthmus.inspect.replay import replay
from isthmus.log import fold, heal, merge
from isthmus.store import Layer, Patience, Store
from isthmus.store.layer import Send
from isthmus_services.main import main
from support.world import (
    World,
    all_commits,
    commit_of,
    in_virtual_time,
    newest_commit,
    seed_of,
    serving,
    train,
    until,
    world,
)

T = TypeVar("T")

FEW = seed_of(Rules(fragments=2, sync_every=4), Pace(heartbeat_s=0.2, silence_s=0.8, snapshot_every=4096))


async def grow(w: World, versions: int) -> list[int]:
    """Let two learners train, then kill the only syncer; return the heads."""
    async with serving(w.syncer("east"), killed=True) as syncer:
        enough = lambda: min(k.head for k in syncer.coordinators) >= versions  # noqa: E731
        await asyncio.gather(*(train(w.learner(f"l{i}"), 20, seed=i, enough=enough) for i in range(2)))
    return [(await newest_commit(w, p)).version for p in range(2)]


async def overwrite(w: World, fragment: int, version: int) -> str:
    """Overwrite one of the updates that a version merged, as its learner may do; return the key."""
    commit = await commit_of(w, fragment, version)
    key = commit.header.inputs[0].key
    await w.store.put(key, b"gone")
    return key


async def published_at(w: World, fragment: int, version: int) -> F32:
    return (await fold.fold(w.log, fragment, fold.PublishedValue(w.log), until=version)).carried


async def run(*arguments: str) -> int:
    """Run a command in a thread without an event loop, as on a command line."""
    return await asyncio.to_thread(main, [*arguments])


async def test_a_dry_run_says_what_is_broken_and_writes_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with world(folder, FEW) as w:
        heads = await grow(w, 6)
        key = await overwrite(w, 0, 3)
        with pytest.raises(LogCorrupt):
            await fold.fold(w.log, 0, fold.Merging(w.log))
    before = sorted(path for path in folder.rglob("*") if path.is_file())
    assert await run("heal", str(folder), "--json", str(folder.parent / "heal.json")) == 1
    said = capsys.readouterr().out
    assert f"fragment 0, at version {heads[0]}, cannot be folded beyond version 2: {key}" in said
    assert f"restarts it from version {heads[0]} as published, without its momentum" in said
    assert "Stop that syncer with SIGTERM" in said
    assert "2 fragments: 1 sound, 1 that cannot be folded" in said
    assert sorted(path for path in folder.rglob("*") if path.is_file()) == before
    report = json.loads((folder.parent / "heal.json").read_text())
    assert [f["sound"] for f in report["fragments"]] == [False, True]
    assert report["fragments"][0]["broken_at"] == 3


async def test_a_sound_run_has_nothing_to_heal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with world(folder, FEW) as w:
        await grow(w, 2)
    assert await run("heal", str(folder), "--apply") == 0
    assert "2 fragments: 2 sound\n" in capsys.readouterr().out


async def test_a_healed_fragment_goes_on_from_what_was_published_and_the_log_says_so_for_good(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with world(folder, FEW) as w:
        heads = await grow(w, 6)
        await overwrite(w, 0, 3)
        published = await published_at(w, 0, heads[0])
        found = await heal.diagnose(w.log)
        commit = await heal.heal(w.log, found[0])
        assert commit is not None
        assert commit.version == heads[0] + 1
        waited = msgspec.structs.asdict(commit.header.waited)
        times = {name: at for name, at in waited.items() if name.endswith("_at") or name == "hold_until"}
        assert set(times.values()) == {commit.header.written_at}
        assert {name for name in waited.keys() - times.keys() if waited[name]} == {"called_by", "closed_by"}
        assert (await w.log.snapshots(0))[0][0] == commit.version
        # The fragment goes on from the published value that learners hold. Its momentum and its master are lost.
        at = await fold.fold(w.log, 0, fold.Merging(w.log))
        assert np.array_equal(at.carried.published, published)
        assert np.array_equal(at.carried.master, published)
        assert not at.carried.momentum.any()
        # A syncer starts, and learners that know nothing of the heal go on.
        syncer = w.syncer("west")
        async with serving(syncer, killed=True):
            assert syncer.coordinators[0].head == commit.version
            assert not syncer.coordinators[0].broken
            ends = (commit.version + 3, commit.version)  # then the other fragment also has a version of that number

            def enough() -> bool:
                return all(coordinator.head >= end for coordinator, end in zip(syncer.coordinators, ends, strict=True))

            await asyncio.gather(*(train(w.learner(f"l{i}"), 20, seed=i, enough=enough) for i in range(2)))
        # No update is merged twice, not even one from before the heal.
        bases: dict[str, int] = {}
        for c in (await all_commits(w.log))[0]:
            for given in c.header.inputs:
                assert given.base > bases.get(given.learner, -1)
                bases[given.learner] = given.base
        results = await replay(w.log)
        assert all(r.difference is None for r in results)
        assert [(g.first, g.last) for g in results[0].gaps] == [(3, heads[0])]
        assert results[1].gaps == []
    healed = heads[0] + 1
    for arguments, words in {
        ("replay", str(folder)): f"{heads[0] - 2} cannot be verified (healed)",
        ("replay", str(folder), "--trace", str(folder.parent / "trace.json")): "timeline",
        ("explain", str(folder), f"0/{healed}"): "starts the fragment again",
        ("export", str(folder), "-o", str(folder.parent / "m.safetensors")): "",
        ("export", str(folder), "--version", str(healed), "-o", str(folder.parent / "h.safetensors")): "",
        ("status", str(folder)): "",
        ("gc", str(folder), "--keep", "1", "--min-age", "0"): "",
        ("heal", str(folder)): "2 fragments: 2 sound",
    }.items():
        assert await run(*arguments) == 0, arguments
        assert words in capsys.readouterr().out, arguments


@in_virtual_time
async def test_without_its_snapshot_a_commit_that_heals_is_a_place_to_start_all_the_same(folder: Path) -> None:
    """The snapshot is missing if the process that heals is killed between its two writes."""
    async with world(folder, FEW) as w:
        heads = await grow(w, 6)
        await overwrite(w, 0, 2)
        (found,) = await heal.diagnose(w.log, [0])
        commit = await heal.heal(w.log, found)
        assert commit is not None
        for version, key in await w.log.snapshots(0):
            if version == commit.version:
                await w.store.delete(key)
        at = await fold.fold(w.log, 0, fold.Merging(w.log))
        assert at.version == heads[0] + 1
        assert at.carried.digest == commit.header.state_digest
        assert (await heal.diagnose(w.log, [0]))[0].sound


@in_virtual_time
async def test_where_published_values_are_gone_too_it_goes_back_to_the_newest_that_is_left_and_says_so(
    folder: Path,
) -> None:
    async with world(folder, FEW) as w:
        heads = await grow(w, 6)
        await overwrite(w, 0, 3)
        lost = await commit_of(w, 0, heads[0] - 1)
        await w.store.delete(lost.header.value_key)
        before = await published_at(w, 0, heads[0] - 2)
        (found,) = await heal.diagnose(w.log, [0])
        assert found.wound is not None
        assert found.wound.source == heads[0] - 2
        commit = await heal.heal(w.log, found)
        assert commit is not None
        assert merge.array_digest(before) == commit.header.published_digest
        # A fold of published values, as learners do it, goes on beyond the hole.
        at = await fold.fold(w.log, 0, fold.PublishedValue(w.log))
        assert (at.version, merge.array_digest(at.carried)) == (commit.version, merge.array_digest(before))


async def test_a_fragment_without_a_commit_restarts_from_what_the_run_began_with(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with world(folder, FEW) as w:
        first = await published_at(w, 0, 0)
        (snapshot,) = (folder / "snapshots" / "00000").iterdir()
        snapshot.write_bytes(snapshot.read_bytes()[:-9])  # the published value lies before these bytes
        assert await run("heal", str(folder), "--apply") == 0
        assert "fragment 0, at version 0, cannot be folded" in (said := capsys.readouterr().out)
        assert "healed: version 1 restarts from version 0 as published" in said
        healed = await newest_commit(w, 0)
        assert healed.version == 1
        assert healed.header.rejected_total == healed.header.clipped_total == {}
        assert np.array_equal(await published_at(w, 0, 1), first)
        assert (await heal.diagnose(w.log, [0]))[0].sound


@in_virtual_time
async def test_whoever_committed_meanwhile_wins(folder: Path) -> None:
    async with world(folder, FEW) as w:
        heads = await grow(w, 4)
        await overwrite(w, 0, 2)
        first, second = (await heal.diagnose(w.log, [0]))[0], (await heal.diagnose(w.log, [0]))[0]
        assert await heal.heal(w.log, first) is not None
        assert await heal.heal(w.log, second) is None
        assert (await newest_commit(w, 0)).version == heads[0] + 1


async def test_a_chain_that_is_broken_itself_is_left_to_people(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with world(folder, FEW) as w:
        await grow(w, 4)
        blob = await w.store.get("commits/00000/000000000002")
        blob[200] ^= 1
        await w.store.put("commits/00000/000000000002", blob)
    assert await run("heal", str(folder), "--apply") == 1
    assert "cannot be healed: the chain of commits is broken" in capsys.readouterr().out


@in_virtual_time
async def test_a_syncer_that_could_not_fold_goes_on_once_somebody_healed(folder: Path) -> None:
    async with world(folder, FEW) as w:
        await grow(w, 5)
        await overwrite(w, 1, 2)
        syncer = w.syncer("west")
        async with serving(syncer):
            await until(lambda: syncer.coordinators[1].broken, "it tried to fold it")
            (found,) = await heal.diagnose(w.log, [1])
            await heal.heal(w.log, found)
            await until(lambda: not syncer.coordinators[1].broken, "it serves the fragment again")
            head = syncer.coordinators[1].head
            await train(w.learner("l0"), 20, enough=lambda: syncer.coordinators[1].head > head)


@in_virtual_time
async def test_a_syncer_that_stops_in_order_leaves_nothing_to_heal(folder: Path) -> None:
    async with world(folder, FEW) as w:
        async with serving(w.syncer("east")) as syncer:
            enough = lambda: min(k.head for k in syncer.coordinators) >= 5  # noqa: E731
            await train(w.learner("l0"), 20, enough=enough)
        for entry in await w.store.list("updates/"):
            await w.store.put(entry.key, b"gone")
        async with serving(w.syncer("west")) as syncer:
            await until(
                lambda: all(coordinator.rounds.holding for coordinator in syncer.coordinators), "it folded all of them"
            )
            assert not any(coordinator.broken for coordinator in syncer.coordinators)
            assert all(coordinator.head >= 5 for coordinator in syncer.coordinators)


class Refuses(Layer):
    """A store that fails each read of an update, with `Denied` or `Unavailable`."""

    def __init__(self, inner: Store, error: type[Exception]) -> None:
        super().__init__(inner)
        self.error = error

    async def _through(self, operation: str, key: str, send: Send[T]) -> T:
        if operation == "get" and key.startswith("updates/"):
            raise self.error(f"{key}: refused")
        return await send()


@pytest.mark.parametrize(("error", "said"), [(Denied, "Nothing is known to be damaged"), (Unavailable, "refused")])
async def test_what_may_not_be_read_is_not_damaged(folder: Path, error: type[Exception], said: str) -> None:
    async with world(folder, FEW) as w:
        await grow(w, 3)
        barred = w.through(lambda store: Refuses(store, error), Patience(attempts=1))
        with pytest.raises(error, match=said):
            await heal.diagnose(barred.log)
        assert all(diagnosis.sound for diagnosis in await heal.diagnose(w.log))

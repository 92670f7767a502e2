"""Commits of large fragments state the digest of the whole state only where a snapshot is due (virtual time)."""

from pathlib import Path

import pytest

from isthmus.format.records import frame
from isthmus.format.records.keys import snapshot_key, version_in
from isthmus.format.records.objects import UNSTATED
from isthmus.format.rules import Pace, Rules
from isthmus.inspect.replay import replay
from isthmus.log import fold, merge
from isthmus.syncer import snapshots
from support.world import World, all_commits, in_virtual_time, seed_of, serving, train, until, world

EVERY = 3
FEW = seed_of(Rules(fragments=2, sync_every=4), Pace(heartbeat_s=0.2, silence_s=0.8, snapshot_every=EVERY))


@pytest.fixture(autouse=True)
def _all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "SMALL", 0)


async def grow(w: World, syncer: str, versions: int) -> None:
    async with serving(w.syncer(syncer)) as serving_it:
        await train(w.learner("l0"), 200, enough=lambda: min(k.head for k in serving_it.coordinators) >= versions)


@in_virtual_time
async def test_a_run_goes_on_is_replayed_and_has_snapshots_where_states_are_stated(folder: Path) -> None:
    async with world(folder, FEW) as w:
        await grow(w, "east", 8)
        await grow(w, "west", 15)  # it folds from the newest snapshot over commits that state nothing
        for p, commits in (await all_commits(w.log)).items():
            due = {c.version for c in commits if (c.version + p) % EVERY == 0}
            assert {c.version for c in commits if c.header.state_digest != UNSTATED} == due
            stored = {version_in(entry.key) for entry in await w.store.list(f"snapshots/{p:05d}/")}
            assert stored == {0, *due}
        found = await replay(w.log)
        assert [r.difference for r in found] == [None, None]
        assert min(r.compared for r in found) >= 15


@in_virtual_time
async def test_a_snapshot_that_no_commit_vouches_for_is_not_used(folder: Path) -> None:
    async with world(folder, FEW) as w:
        await grow(w, "east", 7)
        head = len((await all_commits(w.log))[0])
        version = head if head % EVERY else head - 1
        true = await fold.fold(w.log, 0, fold.Merging(w.log), until=version)
        false = merge.State(version, true.carried.published, true.carried.master, true.carried.momentum * 9)
        blob = merge.snapshot(false, 0, w.run.digest)
        await w.store.put(snapshot_key(0, version, frame.digest(blob)), blob)
        again = await fold.fold(w.log, 0, fold.Merging(w.log), until=version)
        assert again.carried.digest == true.carried.digest
        async with serving(w.syncer("west")) as syncer:
            await until(lambda: syncer.coordinators[0].state, "it folded the fragment")
            assert not syncer.coordinators[0].broken


@in_virtual_time
async def test_a_false_momentum_is_found_at_the_next_version_that_it_reaches(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No commit states the momentum of this version. Published values depend on it, and so do later states."""
    advance = merge.advance

    def wrong(state: merge.State, *more: object, **stated: bool) -> merge.Advance:
        made = advance(state, *more, **stated)  # type: ignore[arg-type]
        if made.state.version == 4:
            made.state.momentum[:] *= 1.5
        return made

    async with world(folder, FEW) as w:
        with monkeypatch.context() as patched:
            patched.setattr("isthmus.syncer.coordinator.merge.advance", wrong)
            await grow(w, "liar", 7)
        first = (await replay(w.log))[0].difference
        assert first is not None
        assert first.version == 5
        assert "the published value is" in first.detail

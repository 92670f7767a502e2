"""The doctor calls a bus another run's only while the run is committed to, and hears a syncer behind any other message."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from isthmus.bus import Bus, BusItem, open_bus
from isthmus.bus.base import READ_MAX
from isthmus.doctor import FAILURE, NOTE, OK, WARNING, CheckOutcome, Finding, RoleKind
from isthmus.doctor.trust import _is_of_run
from isthmus.format.records.keys import commit_key
from isthmus.format.records.messages import SYNCER_STREAM
from isthmus.format.rules import Pace, Rules
from isthmus.log import Log
from support.world import World, in_virtual_time, newest_commit, seed_of, serving, train, world

RECENT_S = 60.0  # figures of the doctor, written again: a changed one is noticed here
HEARTBEATS = 3
SEED = seed_of(Rules(fragments=2, sync_every=4), Pace(heartbeat_s=1.0, silence_s=5.0))


async def grown(w: World, versions: int, name: str, *, killed: bool = False) -> None:
    async with serving(w.syncer(name), killed=killed) as syncer:
        await train(w.learner(f"l-{name}"), 10, enough=lambda: min(k.head for k in syncer.coordinators) >= versions)


async def found(w: World, bus: Bus, role: RoleKind = RoleKind.OPERATOR) -> Finding:
    """Return what the doctor finds about a bus, with no memory of the log."""
    return await _is_of_run(Log(w.run, w.store, w.runtime), bus, w.runtime, role)


@asynccontextmanager
async def a_run(folder: Path) -> AsyncIterator[tuple[World, Bus]]:
    """Yield a world, and a bus on which nothing was said."""
    async with world(folder, SEED) as w, open_bus(f"sqlite://{folder}.bus", w.run.digest, None) as silent:
        yield w, silent


@in_virtual_time
async def test_a_run_that_nobody_commits_to_says_little_about_a_bus(folder: Path) -> None:
    async with a_run(folder) as (w, silent):
        finding = await found(w, silent)
        assert finding.outcome == NOTE, "nothing was committed"
        await grown(w, 2, "s1")
        heads = [await newest_commit(w, f) for f in range(2)]
        since = w.runtime.wall() - max(head.header.written_at for head in heads)
        await asyncio.sleep(RECENT_S - since - HEARTBEATS - 1.0)
        finding = await found(w, silent)
        assert finding.outcome == FAILURE
        await asyncio.sleep(HEARTBEATS + 1.0)
        finding = await found(w, silent)
        assert finding.outcome == NOTE
        assert "the last commit is 1.0" in finding.said


@pytest.mark.parametrize(
    ("role", "killed", "outcome"),
    [
        (RoleKind.LEARNER, True, FAILURE),
        (RoleKind.LEARNER, False, WARNING),  # it was stopped in order: the run may be over
        (RoleKind.SYNCER, True, WARNING),  # one is about to start
    ],
)
@in_virtual_time
async def test_syncers_that_were_heard_and_are_no_more_have_ended(
    role: RoleKind, killed: bool, outcome: CheckOutcome, folder: Path
) -> None:
    async with a_run(folder) as (w, _):
        await grown(w, 2, "s1", killed=killed)
        finding = await found(w, w.bus, role)
        assert finding.outcome == OK, "it may only be late"
        await asyncio.sleep(2 * HEARTBEATS)
        finding = await found(w, w.bus, role)
        assert finding.outcome == outcome
        await asyncio.sleep(RECENT_S)
        finding = await found(w, w.bus, role)
        assert finding.outcome == WARNING, "the run may be over"
        assert finding.said.startswith(
            "syncers were heard here, and the last word of one is 48 to 96 s old; the last commit is "
        )
        await asyncio.sleep(3600.0)
        finding = await found(w, w.bus, role)
        assert finding.outcome == (WARNING if role == RoleKind.LEARNER else NOTE)
        assert finding.said.startswith(
            "no syncer is heard on this bus (none runs, or it has another), and the last commit is 1"
        )


@pytest.mark.parametrize("old", [0, 1])
@in_virtual_time
async def test_one_fragment_that_is_committed_is_enough(old: int, folder: Path) -> None:
    async with a_run(folder) as (w, silent):
        await grown(w, 2, "s1")
        first = await newest_commit(w, old)
        await asyncio.sleep(2 * RECENT_S)
        await grown(w, first.header.version + 3, "s2")
        for version in range(first.header.version + 1, (await newest_commit(w, old)).header.version + 1):
            await w.store.delete(commit_key(old, version))
        finding = await found(w, silent)
        assert finding.outcome == FAILURE


@pytest.mark.parametrize("after_s", [0.0, HEARTBEATS - 0.5])
@in_virtual_time
async def test_a_syncer_is_heard_behind_what_is_no_syncers(after_s: float, folder: Path) -> None:
    """A syncer may be silent for a heartbeat, and others may write nonsense."""
    async with a_run(folder) as (w, other):
        await grown(w, 2, "s1")
        said = (await w.bus.read(await w.bus.ago([SYNCER_STREAM], 1e6), 0.0))[SYNCER_STREAM]
        await other.append(SYNCER_STREAM, b"", *[b"nonsense"] * READ_MAX)
        finding = await found(w, other)
        assert finding.outcome == FAILURE

        async def say() -> None:
            await asyncio.sleep(after_s)
            await other.append(SYNCER_STREAM, said[-1].body)

        finding, _ = await asyncio.gather(found(w, other), say())
        assert finding.outcome == OK


@in_virtual_time
async def test_nonsense_that_comes_during_every_read_does_not_keep_the_doctor(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_run(folder) as (w, other):
        await grown(w, 2, "s1")
        read = type(other).read

        async def busy(bus: Bus, positions: Mapping[str, str], timeout_s: float) -> Mapping[str, Sequence[BusItem]]:
            await other.append(SYNCER_STREAM, b"nonsense")
            await asyncio.sleep(0.1)
            return await read(bus, positions, timeout_s)

        monkeypatch.setattr(type(other), "read", busy)
        finding = await asyncio.wait_for(found(w, other), 60.0)
        assert finding.outcome == FAILURE

"""What `isthmus status` says of a damaged log, and what comes of its advice."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest

from advice.doctors import ACCEPT
from advice.followed import advises, command_in, isthmus, mine, says
from advice.lives import FEW, MANY, PACE, Fault, command, finished, said, status, training, well
from advice.rows import A_GAP, row
from integration.test_full_store import IN_A_DISK_OF_ITS_OWN, own_mounts  # noqa: F401  (a fixture)
from isthmus.errors import Unavailable
from isthmus.format.records.keys import commit_key
from isthmus.format.rules import Pace, Rules
from isthmus.inspect import live as live_
from isthmus.inspect.health_summary import health
from isthmus.inspect.live import Live
from isthmus.log import log_health
from support.world import newest_commit, seed_of, serving, train, until, world


@row(
    "status",
    "fragment … has a hole in its history (the run goes on): …: is missing, and version … is there: restore it from a backup: "
    "`isthmus replay` needs it, and a learner with an older checkpoint may (fragment … can be read up to version …)",
    means="A commit from before the newest snapshot is missing, or cannot be read. Syncers and learners do not need it.",
    like="Where the store is away, status says so and ends with an error instead.",
    do=ACCEPT,
    then="`isthmus heal` has a line for each of these fragments. Once their objects are restored from a backup, status says "
    "nothing of them.",
)
@row(
    "status",
    "the logs of … more fragments are damaged, too",
    means="Three damaged fragments are named, the others counted. With `each by a hole in its history (the run goes on)` "
    "nothing is lost of the model.",
    do=ACCEPT,
    then="`isthmus heal` has a line for each fragment.",
    lost="what the line of `isthmus heal` says",
)
async def test_a_finished_run_with_commits_missing(folder: Path) -> None:
    here, others = mine(test_a_finished_run_with_commits_missing)
    async with world(folder, MANY) as w:
        await finished(w)
        assert (await status(w))[0] == 0
        kept = {path: path.read_bytes() for p in range(5) if (path := folder / commit_key(p, 3))}
        for path in kept:
            path.unlink()
        line = await said(here, w)
        advises(others, line)
        assert "the logs of 2 more fragments are damaged, too, each by a hole" in line
        code, told = await isthmus(*command_in(line, "heal"))
        assert code == 1
        assert all(str(path.relative_to(folder)) in told for path in kept)
        for path, blob in kept.items():
            path.write_bytes(blob)
        await well(w)


@row(
    "status",
    "the log of fragment … is damaged: commits/…: is missing, and version … is there: restore it from a backup; without one, a syncer that still merges this fragment writes a snapshot once it is stopped with SIGTERM, and the run goes on from that; if none does, go on in a new run from the newest version that can be exported (`isthmus export --version N`, then `isthmus init --from`) (fragment … can be "
    "read up to version …)",
    means="A commit that was made since the newest snapshot is gone, and later ones are there: no new syncer can start with the "
    "fragment. A syncer that still merges it has the state in memory, and its next snapshot makes the damage a hole.",
    like="`has a hole in its history (the run goes on)`: a snapshot is there already.",
    do="isthmus heal … says what can be done (run it as the reader, and with --apply as a syncer)",
    then="`isthmus heal` names the object. With the object restored from a backup, status says nothing of it.",
    lost="without a backup: what was merged after that commit, unless a syncer that still merges it writes a snapshot",
)
@row(
    "status",
    "the log of fragment … is damaged: commits/…: is missing, and its snapshot is there (a snapshot is used only together with its commit): restore it from a backup; without one, a syncer that still merges this fragment writes a snapshot once it is stopped with SIGTERM, and the run goes on from that; if none does, isthmus heal names what is to be deleted, and the run goes on from the version before (fragment … can be "
    "read up to version …)",
    means="The newest commit is gone, and the snapshot of its version shows that it existed.",
    do="isthmus heal … says what can be done (run it as the reader, and with --apply as a syncer)",
    then="`isthmus heal` says the same. With the object restored from a backup, status says nothing of it.",
    lost="without a backup: what that commit merged",
)
@pytest.mark.parametrize("newest", [False, True], ids=["below the end", "the newest"])
async def test_a_commit_after_the_newest_snapshot_that_is_missing(folder: Path, newest: bool) -> None:
    below, last = mine(test_a_commit_after_the_newest_snapshot_that_is_missing)
    async with world(folder, FEW) as w:
        if newest:
            await finished(w)
        else:
            async with serving(w.syncer("s0"), killed=True) as syncer:
                await train(w.learner("a"), 10, enough=lambda: min(k.head for k in syncer.coordinators) >= 4)
        path = folder / commit_key(0, (await newest_commit(w, 0)).version if newest else 3)
        kept = path.read_bytes()
        path.unlink()
        line = await said(last if newest else below, w)
        code, told = await isthmus(*command_in(line, "heal"))
        assert (code, str(path.relative_to(folder)) in told) == (1, True), told
        path.write_bytes(kept)
        assert "damaged" not in (await status(w))[1]


async def test_damage_of_older_commits_is_said_as_long_as_it_lasts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one that looks once, that goes on looking, and that writes lines into a pipe. The syncer that has the state of
    a fragment goes on beyond its damaged commit, so that this is soon an old one."""
    monkeypatch.setattr(live_, "INSPECT_EVERY_S", 0.2)
    pace = Pace(heartbeat_s=0.2, silence_s=0.8, snapshot_every=4)
    async with world(folder, seed_of(Rules(fragments=2, sync_every=4), pace)) as w, serving(w.syncer("s1")) as syncer:
        live = Live(w.log, w.store, w.bus, w.runtime)
        await live.begin()
        following = asyncio.ensure_future(live.run())

        def said_live() -> str:
            return health(live.status(), w.run.url, w.bus.url).said

        def adopted() -> int:
            beat = live.hearing.learners["a"].heartbeat if "a" in live.hearing.learners else None
            return beat.versions[0] if beat else 0

        async with training(w.learner("a"), step_s=0.05):
            await until(lambda: adopted() >= 4, "its learner is beyond the commit")
            version = adopted()
            path = folder / commit_key(0, version)
            kept = path.read_bytes()
            path.write_bytes(b"no commit")
            await until(lambda: syncer.coordinators[0].head >= version + 5, "there is a snapshot after it")
        hole = f"fragment 0 has a hole in its history (the run goes on): {commit_key(0, version)}: not a commit"
        await until(lambda: hole in said_live(), "who looks on says it")
        assert hole in (await status(w))[1]
        async with command(folder.parent, "status", w.run.url, "--bus", w.bus.url, "--watch"):
            await until(lambda: hole in (folder.parent / "status.log").read_text(), "the piped line says it")
        async with training(w.learner("b")):  # the checkpoint of the other one may be older than the damaged commit
            await until(lambda: syncer.coordinators[0].head > version + log_health.RECENT, "the commit is an old one")
        looks = w.runtime.now()
        await until(lambda: w.runtime.now() > looks + 1.0, "it was looked at again")
        assert hole in said_live()
        path.write_bytes(kept)
        await until(lambda: "hole" not in said_live(), "it is restored")
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


@row(
    "status",
    "… still: most others were merged at least … times since then",
    means="`fragment … stands still`, or `fragments … stand still`. Something keeps these fragments alone from being merged: the store does not take its objects, or its syncer hangs.",
    like="`the log of fragment … is damaged` names an object.",
    do="the syncers' logs say why, and isthmus heal … says whether the log is sound; if they say nothing, no learner lives for a "
    "period (the table of fragments has it, in steps), after which it sends a fragment",
    then="If `isthmus heal` calls the log sound, nothing is damaged: the log of the syncer that holds the fragment has "
    "what fails. Once that is over, the fragment moves again.",
    lost=A_GAP,
)
async def test_a_fragment_that_stands_still(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (here,) = mine(test_a_fragment_that_stands_still)
    fault = Fault(Unavailable("503 SlowDown"), "values/00000/", ("put",), mended=True)
    async with (
        world(folder, seed_of(Rules(fragments=4, sync_every=4), PACE)) as w,
        serving(fault.of(w).syncer("s1")) as syncer,
        training(w.learner("a")),
    ):
        await until(lambda: min(k.head for k in syncer.coordinators) >= 2, "all fragments move")
        fault.mended = False
        line = await said(here, w)
        code, told = await isthmus(*command_in(line, "heal"))
        assert (code, "4 sound" in told) == (0, True), told
        assert "503 SlowDown" in caplog.text
        fault.mended = True
        head = syncer.coordinators[0].head
        await until(lambda: syncer.coordinators[0].head > head, "the fragment moves again")
        await well(w)


@row(
    "status",
    "nothing was collected in … versions: the run grows until its store is full",
    means="The oldest published value is over two hours older than the newest. A collector that ran meanwhile would have "
    "deleted it, unless its `--min-age` is longer.",
    do="isthmus gc … lists what can be deleted, --apply deletes it, and --apply --every 3600 repeats this hourly",
    then="The sentence goes away. Objects younger than an hour stay until the next collection.",
)
async def test_a_run_whose_garbage_was_never_collected(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here,) = mine(test_a_run_whose_garbage_was_never_collected)
    monkeypatch.setattr(log_health, "GROWN", 66)
    pace = Pace(heartbeat_s=0.2, silence_s=0.8, snapshot_every=1)
    async with world(folder, seed_of(Rules(fragments=1, sync_every=1), pace)) as w:
        day = replace(w, runtime=replace(w.runtime, wall=lambda: w.runtime.wall() - 86400.0))
        async with serving(day.syncer("s1")) as syncer:
            await train(w.learner("a"), 10, step_s=0.001, enough=lambda: syncer.coordinators[0].head >= 70)
        for path in folder.rglob("*"):
            os.utime(path, (w.runtime.wall() - 86400.0,) * 2)
        os.utime(max((folder / "values/00000").iterdir()))
        _, out = await isthmus("status", w.run.url)
        advises(here, out)
        gc = command_in(out, "gc")
        assert "dry run" in (await isthmus(*gc))[1]
        assert (await isthmus(*gc, "--apply"))[0] == 0
        assert not says(here, (await isthmus("status", w.run.url))[1])


@row(
    "status",
    "the log of fragment … is damaged: updates/…: is missing, and version … merged … bytes",
    means="An update that was merged since the newest snapshot is gone: no new syncer can start with the fragment.",
    like="Status looks for these objects only if no syncer is heard, and compares no bytes: `isthmus replay` does.",
    do="isthmus heal … says what can be done (run it as the reader, and with --apply as a syncer)",
    then="`isthmus heal` names the object and what `--apply` restarts the fragment from. With the object restored from a "
    "backup, status says nothing of it.",
    lost="without a backup: the fragment's momentum",
)
@row(
    "status",
    "the log of fragment … is damaged: updates/…: has … bytes, and version … merged … bytes",
    means="An update that was merged since the newest snapshot has another size than it had then.",
    do="isthmus heal … says what can be done (run it as the reader, and with --apply as a syncer)",
    then="`isthmus heal` names the object. With the object restored from a backup, status says nothing of it.",
    lost="without a backup: the fragment's momentum",
)
async def test_a_finished_run_with_an_update_missing(folder: Path) -> None:
    here, _ = mine(test_a_finished_run_with_an_update_missing)
    async with world(folder, FEW) as w:
        async with serving(w.syncer("s1"), killed=True) as syncer:
            await train(w.learner("a"), 10, enough=lambda: min(k.head for k in syncer.coordinators) >= 4)
        for stream in (folder / "bus.sqlite").parent.glob("bus.sqlite*"):
            stream.unlink()  # the bus of a finished run is often gone, too
        commit = await w.log.commit(0, 3)
        assert commit is not None
        path = folder / commit.header.inputs[0].key
        kept = path.read_bytes()
        path.unlink()
        code, line = await status(w)
        assert code == 1
        advises(here, line)
        code, told = await isthmus(*command_in(line, "heal"))
        assert (code, str(path.relative_to(folder)) in told) == (1, True), told
        path.write_bytes(kept[:-1])
        assert f"has {len(kept) - 1} bytes, and version 3 merged {len(kept)} bytes" in (await status(w))[1]
        path.write_bytes(kept)
        assert not says(here, (await status(w))[1])

"""What `isthmus heal` says of snapshots and values that can be made again, and what comes of its advice."""

from pathlib import Path

from advice.doctors import ACCEPT
from advice.followed import advises, command_in, isthmus, mine
from advice.heals import grown, heal, hold_all, sound
from advice.lives import FEW, finished, training
from advice.rows import row
from isthmus.format.records.keys import commit_key
from support.world import newest_commit, serving, until, world


@row(
    "heal",
    "fragment …: snapshots/…: …; syncers go on from an older one",
    means="The newest snapshot of a fragment is damaged. An older one and the updates since are there, so nothing is lost yet.",
    do="Start a syncer unless one runs; once isthmus status says that syncers hold all fragments (mend those first that cannot be folded), stop them with SIGTERM, and start "
    "them again: they write snapshots, which have all that is missing",
    then="`isthmus heal` calls the fragment sound: a newer snapshot is there.",
)
@row(
    "doctor",
    "log: fold: fragment …: snapshots/…: …; syncers go on from an older one",
    means="The newest snapshot of a fragment is damaged. An older one and the updates since are there, so nothing is lost yet.",
    do="Start a syncer unless one runs; once isthmus status says that syncers hold all fragments (mend those first that cannot be folded), stop them with SIGTERM, and start "
    "them again: they write snapshots, which have all that is missing",
    then="`ok log: fold`: a newer snapshot is there.",
)
async def test_a_newest_snapshot_that_is_damaged(folder: Path) -> None:
    here, noticed = mine(test_a_newest_snapshot_that_is_damaged)
    async with world(folder, FEW) as w:
        await finished(w)
        newest = max((folder / "snapshots" / "00000").iterdir())
        newest.write_bytes(newest.read_bytes()[:-9])
        told = await heal(here, w)
        assert "2 fragments: 1 sound, 1 with an object missing that a syncer can make again" in told
        code, told = await isthmus("doctor", w.run.url, "--size", "0.02")
        assert (code, noticed.is_in(told)) == (0, True), told
        await hold_all(w)
        await sound(w)
        assert not noticed.is_in((await isthmus("doctor", w.run.url, "--size", "0.02"))[1])


@row(
    "heal",
    "fragment … has a hole in its history (the run goes on): commits/…: not a commit: …: restore it from a backup: `isthmus "
    "replay` needs it, and a learner with an older checkpoint may",
    means="A commit from before the newest snapshot is damaged. Syncers and learners do not need it; a replay does.",
    do="restore it from a backup: `isthmus replay` needs it, and a learner with an older checkpoint may",
    then="`isthmus heal` calls the fragment sound.",
    lost="without a backup: the proof of the versions before the snapshot, and nothing of the model",
)
@row(
    "status",
    "fragment … has a hole in its history (the run goes on): commits/…: not a commit: …",
    means="A commit is damaged, and a snapshot after it is there: syncers and learners do not need the commit. Each look reads "
    "the newest commits, older ones whose size or date in the store is odd, and 128 others at random (the doctor 32). "
    "`status --watch` and the board look once a minute, and go on saying what they found.",
    do=ACCEPT,
    then="`isthmus heal` says the same. With the object restored, status says nothing of it.",
    lost="without a backup: the proof of the versions before the snapshot, and nothing of the model",
)
async def test_a_commit_below_a_snapshot_that_is_damaged(folder: Path) -> None:
    below, noticed = mine(test_a_commit_below_a_snapshot_that_is_damaged)
    async with world(folder, FEW) as w:
        await finished(w)
        path = folder / commit_key(0, (await newest_commit(w, 0)).version - 1)
        kept = path.read_bytes()
        path.write_bytes(bytes(reversed(kept)))
        code, told = await isthmus("status", w.run.url, "--bus", w.bus.url, "--check")
        assert code == 1, told
        advises(noticed, told)
        code, told = await isthmus(*command_in(told, "heal"))
        assert code == 1, told
        advises(below, told)
        path.write_bytes(kept)
        await sound(w)


@row(
    "heal",
    "fragment …: values/… is missing, and version … published it: a syncer can make it again",
    means="What learners fetch is gone. The log can be folded without it, so nothing is lost of the model.",
    do="Start a syncer unless one runs; once isthmus status says that syncers hold all fragments (mend those first that cannot be folded), stop them with SIGTERM, and "
    "start them again: they write snapshots, which have all that is missing",
    then="`isthmus export` gives the newest version. As long as the version is one of the newest four, heal and status say "
    "that `isthmus replay` still needs the value: the fragment has a hole in its history, and the run goes on.",
    lost="without a backup: the proof of that version's value, and nothing of the model",
)
@row(
    "status",
    "the log of fragment … is damaged: values/…: is missing, and version … published it",
    means="What learners fetch is gone.",
    like="Of versions older than the newest four, status looks for values only if no syncer is heard.",
    do="isthmus heal … says what can be done",
    then="`isthmus heal` says how a syncer makes it again.",
)
async def test_a_value_that_is_gone(folder: Path) -> None:
    healed, noticed = mine(test_a_value_that_is_gone)
    async with world(folder, FEW) as w:
        await grown(w)
        (folder / (await newest_commit(w, 0)).header.value_key).unlink()
        for stream in (folder / "bus.sqlite").parent.glob("bus.sqlite*"):
            stream.unlink()
        code, told = await isthmus("status", w.run.url, "--bus", w.bus.url, "--check")
        advises(noticed, told)
        code, told = await isthmus(*command_in(told, "heal"))
        assert (code, "2 fragments: 1 sound, 1 with an object missing that a syncer can make again" in told) == (
            1,
            True,
        )
        advises(healed, told)
        await hold_all(w)
        code, told = await isthmus("export", w.run.url, "-o", str(folder.parent / "model.safetensors"))
        assert code == 0, told
        for tool in ("heal", "status"):
            more = ("--bus", w.bus.url) if tool == "status" else ()
            told = " ".join((await isthmus(tool, w.run.url, *more))[1].split())
            assert "fragment 0 has a hole in its history (the run goes on): values/" in told
        async with serving(w.syncer("s10")) as syncer, training(w.learner("z")):
            head = syncer.coordinators[0].head
            await until(lambda: syncer.coordinators[0].head > head + 4, "learners and syncers go on")
        await sound(w)


@row(
    "heal",
    "fragment … has a hole in its history (the run goes on): values/…: is missing, and version … published it: restore it "
    "from a backup: `isthmus replay` needs it, and a learner with an older checkpoint may",
    means="A value that one of the newest four versions published is gone, and a snapshot has what it led to. Of a damaged "
    "value heal says `is not what version … published`.",
    do="restore it from a backup",
    then="heal calls the fragment sound, and `isthmus replay` verifies the whole log.",
    lost="without a backup: the proof of that version's value, and nothing of the model",
)
@row(
    "status",
    "fragment … has a hole in its history (the run goes on): values/…: is missing, and version … published it: restore it from "
    "a backup: `isthmus replay` needs it, and a learner with an older checkpoint may",
    means="A value that one of the newest four versions published is gone, and a snapshot has what it led to.",
    like="Status only looks whether the values are there, and `isthmus heal` reads those of the newest four versions. Older "
    "ones are read by `isthmus replay` alone.",
    do=ACCEPT,
    then="With the object restored, status says nothing of it.",
    lost="without a backup: the proof of that version's value, and nothing of the model",
)
async def test_a_value_below_a_snapshot_that_is_gone(folder: Path) -> None:
    healed, noticed = mine(test_a_value_below_a_snapshot_that_is_gone)
    async with world(folder, FEW) as w:
        await finished(w)
        head = (await newest_commit(w, 0)).version

        async def value_of(version: int) -> tuple[Path, bytes]:
            commit = await w.log.commit(0, version)
            assert commit is not None
            path: Path = folder / commit.header.value_key
            return path, path.read_bytes()

        path, kept = await value_of(head)
        path.unlink()
        code, told = await isthmus("status", w.run.url, "--bus", w.bus.url, "--check")
        assert code == 1, told
        advises(noticed, told)
        told = await heal(healed, w)
        assert "1 with a hole in its history (the run goes on)" in told
        path.write_bytes(bytes(len(kept)))
        assert f"is not what version {head} published" in " ".join((await isthmus("heal", w.run.url))[1].split())
        assert (await isthmus("replay", w.run.url))[0] == 1
        path.write_bytes(kept)
        old, kept = await value_of(head - 4)
        old.unlink()
        code, told = await isthmus("heal", w.run.url)
        assert (
            code,
            "the newest 4 values; not read: checkpoints, and older updates, values" in " ".join(told.split()),
        ) == (
            0,
            True,
        )
        code, told = await isthmus(*command_in(told, "replay"))
        assert (code, str(old.relative_to(folder)) in told) == (1, True), told
        old.write_bytes(kept)
        assert (await isthmus("replay", w.run.url))[0] == 0
        await sound(w)


@row(
    "heal",
    "fragment … cannot be healed: no published value can be read: …",
    means="The fold fails, and neither a snapshot nor the values since can be read.",
    do="restore that object from a backup, or go on in a new run from the newest version that can be exported (`isthmus "
    "export --version N`, then `isthmus init --from`)",
    then="With the object restored, heal has a version to restart from, or calls the fragment sound.",
    lost="without a backup: the fragment, as far as no learner's checkpoint has it",
)
async def test_snapshots_that_are_gone(folder: Path) -> None:
    (here,) = mine(test_snapshots_that_are_gone)
    async with world(folder, FEW) as w:
        await grown(w)
        (first,) = (folder / "snapshots" / "00000").iterdir()
        kept = first.read_bytes()
        first.write_bytes(b"gone")
        await heal(here, w)
        first.write_bytes(kept)
        await sound(w)

"""What `isthmus heal` says of a newest commit that is lost, and what comes of its advice."""

import re
from pathlib import Path

import pytest

from advice.doctors import HEAL
from advice.followed import advises, command_in, isthmus, mine
from advice.heals import adopted_by_a, delete_as_told, delete_named, grown, heal, hold_all, join_once_told, moves, sound
from advice.lives import FEW, finished
from advice.rows import row
from isthmus.errors import LogCorrupt
from isthmus.format.records.keys import commit_key
from support.world import newest_commit, world


@row(
    "heal",
    "fragment … cannot be healed: the newest commit is lost: …: is missing, and its snapshot is there (a snapshot is used only "
    "together with its commit)",
    means="The newest commit is gone. The snapshot of its version shows that it existed; the snapshot alone is not used.",
    do="Restore it from a backup. Without one: if a syncer still merges this fragment, let it go on for a version or more, and stop "
    "it with SIGTERM: it writes a snapshot, and the run goes on from that. If none does, stop all syncers and learners, delete … with the credentials of the store's administrator (no "
    "participant may delete …), and the checkpoints named below, since they know the "
    "lost version (a learner that is started names its own, too), and start them again: they go on from "
    "version …; a learner that has no older checkpoint goes on with the run's model alone, from its first "
    "step",
    then="With the object restored: `… sound`. Without it the fragment moves again, and then `isthmus heal` calls it sound.",
    lost="without a backup: what that commit merged; of a learner whose checkpoints all know it also its optimizer state, its step and "
    "its place in the data",
)
@row(
    "doctor",
    "log: commits: fragment …: …: is missing, and its snapshot is there (a snapshot is used only together with its commit): restore it from a backup; without one, a syncer that still merges this fragment writes a snapshot once it is stopped with SIGTERM, and the run goes on from that; if none does, isthmus heal names what is to be deleted, and the run goes on from the version before (fragment … can be read up to "
    "version …)",
    means="The newest commit is gone. The snapshot of its version shows that it existed.",
    do=HEAL,
    then="`ok log: commits` once the object is restored from a backup",
)
@pytest.mark.parametrize("backup", [True, False], ids=["restored", "deleted"])
async def test_the_newest_commit_that_is_missing(folder: Path, backup: bool) -> None:
    here, noticed = mine(test_the_newest_commit_that_is_missing)
    async with world(folder, FEW) as w:
        await finished(w)
        hole = folder / commit_key(0, (await newest_commit(w, 0)).version)
        kept = hole.read_bytes()
        hole.unlink()
        code, told = await isthmus("doctor", w.run.url, "--size", "0.02")
        assert (code, noticed.is_in(told)) == (1, True), told
        told = await heal(here, w)
        if backup:
            hole.write_bytes(kept)
        else:
            await delete_as_told(told, int(hole.name), 1)
        await sound(w)


@row(
    "heal",
    "fragment … cannot be healed: the newest commits are lost: …: is missing, like all commits after it, and a snapshot or a value "
    "of version … is there (a snapshot is used only together with its commit)",
    means="The same, of several commits.",
    do="Restore them from a backup. Without one: if a syncer still merges this fragment, let it go on for a version or more, and "
    "stop it with SIGTERM: it writes a snapshot, and the run goes on from that. If none does, stop all syncers and learners, delete "
    "… with the credentials of the store's administrator (no participant may delete …), and the checkpoints named below, since they "
    "know the lost version (a learner that is started names its own, too), and start them again: they go on from version …; a "
    "learner that has no older checkpoint goes on with the run's model alone, from its first step",
    then="As with one commit.",
    lost="without a backup: what those commits merged; of a learner whose checkpoints all know them also its optimizer state, its "
    "step and its place in the data",
)
@row(
    "doctor",
    "log: commits: fragment …: …: is missing, like all commits after it, and a snapshot or a value of version … is there (a snapshot "
    "is used only together with its commit): restore it from a backup; without one, a syncer that still merges this fragment writes a "
    "snapshot once it is stopped with SIGTERM, and the run goes on from that; if none does, isthmus heal names what is to be deleted, "
    "and the run goes on from the version before (fragment … can be read up to version …)",
    means="The newest commits are gone. The snapshot of the last one shows that they existed.",
    do=HEAL,
    then="`ok log: commits` once the objects are restored from a backup",
)
@row(
    "status",
    "the log of fragment … is damaged: commits/…: is missing, like all commits after it, and a snapshot or a value of version … is "
    "there (a snapshot is used only together with its commit)",
    means="The newest commits are gone. The snapshot of the last one shows that they existed; it alone is not used.",
    do="isthmus heal … says what can be done",
    then="As `isthmus heal` says.",
    lost="without a backup: what those commits merged",
)
@pytest.mark.parametrize("backup", [True, False], ids=["restored", "deleted"])
async def test_the_newest_commits_that_are_missing(folder: Path, backup: bool) -> None:
    """It was called a hole with which the run goes on, since the snapshot is newer than the first one that is missing."""
    here, noticed, seen = mine(test_the_newest_commits_that_are_missing)
    async with world(folder, FEW) as w:
        await adopted_by_a(w, folder)
        await hold_all(w)  # it leaves a snapshot
        newest = (await newest_commit(w, 0)).version
        lost = [folder / commit_key(0, version) for version in (newest - 1, newest)]
        kept = [path.read_bytes() for path in lost]
        for path in lost:
            path.unlink()
        code, told = await isthmus("status", w.run.url, "--check")
        assert (code, seen.is_in(told)) == (1, True), told
        assert "a hole in its history" not in told
        code, told = await isthmus("doctor", w.run.url, "--size", "0.02")
        assert (code, noticed.is_in(told)) == (1, True), told
        told = await heal(here, w)
        if backup:
            for path, data in zip(lost, kept, strict=True):
                path.write_bytes(data)
        else:
            found = re.search(r", delete (.+?) with .* they go on from version (\d+)", told)
            assert found is not None, told
            assert int(found[2]) == newest - 2
            for name in found[1].split(" and "):
                Path(name).unlink()
            delete_named(told, folder)
            await w.learner("a").join()
        await sound(w)


@row(
    "heal",
    "fragment … cannot be healed: the chain of commits is broken: …: not a commit: …",
    means="A commit is damaged, and later versions exist.",
    do="restore that object from a backup, or go on in a new run from the newest version that can be exported (`isthmus "
    "export --version N`, then `isthmus init --from`)",
    then="With the object restored: `… sound`.",
    lost="without a backup: what was merged into the run after that version",
)
@row(
    "status",
    "the log of fragment … is damaged: commits/…: not a commit: …",
    means="One of a fragment's newest commits is damaged, and no snapshot is there to go on from without it.",
    do="isthmus heal … says what can be done",
    then="`isthmus heal` says whether the run goes on without it. With the object restored, status says nothing of it.",
    lost="without a backup: what `isthmus heal` then says",
)
async def test_a_commit_that_is_damaged(folder: Path) -> None:
    here, noticed = mine(test_a_commit_that_is_damaged)
    async with world(folder, FEW) as w:
        await grown(w)
        path = folder / commit_key(0, 2)
        kept = path.read_bytes()
        path.write_bytes(kept[:-9])
        advises(noticed, told := (await isthmus("status", w.run.url, "--bus", w.bus.url))[1])
        assert command_in(told, "heal") == ["heal", w.run.url]
        await heal(here, w)
        path.write_bytes(kept)
        await sound(w)


@row(
    "heal",
    "fragment … cannot be healed: an object that is no commit is in the place of the next one: …",
    means="Something that is no commit lies under the key of the fragment's next commit, or its last commit is damaged.",
    like="If later versions exist, heal says `the chain of commits is broken`.",
    do="If it was a commit, restore it from a backup. If it was not, or there is no backup, stop all syncers, delete … with "
    "the credentials of the store's administrator (no participant may delete it), and start them again: they go on from "
    "version …; start learners that ended meanwhile, too",
    then="`isthmus heal` calls the fragment sound, and it moves again.",
    lost="if it was the last commit: what that one merged",
)
async def test_an_object_in_the_place_of_the_next_commit(folder: Path) -> None:
    (here,) = mine(test_an_object_in_the_place_of_the_next_commit)
    async with world(folder, FEW) as w:
        head = await grown(w)
        (folder / commit_key(0, head + 1)).write_bytes(b"no commit")
        told = await heal(here, w)
        found = re.search(r"delete (\S+) with .* they go on from version (\d+)", told)
        assert found is not None
        assert int(found[2]) == head
        Path(found[1]).unlink()
        await sound(w)


@row(
    "heal",
    "fragment … cannot be healed: the newest commit is lost: …: not a commit: …",
    means="The last commit of a fragment is damaged. Learners train on what it published, or a snapshot of it is there: no round can "
    "go on without it.",
    do="Restore it from a backup. Without one: if a syncer still merges this fragment, let it go on for a version or more, and stop "
    "it with SIGTERM: it writes a snapshot, and the run goes on from that. If none does, stop all syncers and learners, delete … with the credentials of the store's administrator (no "
    "participant may delete …), and the checkpoints named below, since they know the "
    "lost version (a learner that is started names its own, too), and start them again: they go on from "
    "version …; a learner that has no older checkpoint goes on with the run's model alone, from its first "
    "step",
    then="The fragment moves again, and once it has, `isthmus heal` calls it sound.",
    lost="without a backup: what the commit merged, and what learners trained since; of a learner whose checkpoints all know it "
    "also its optimizer state, its step and its place in the data",
)
async def test_a_newest_commit_that_learners_have_adopted(folder: Path) -> None:
    (here,) = mine(test_a_newest_commit_that_learners_have_adopted)
    async with world(folder, FEW) as w:
        head = await adopted_by_a(w, folder)
        (folder / commit_key(0, head)).write_bytes(b"no commit")
        told = await heal(here, w)
        assert "Updates of a rest on it." in told
        names = mine(test_a_newest_commit_that_is_gone_and_learners_have_adopted)[1]
        assert names.is_in(told)
        await delete_as_told(told, head, 1)
        await join_once_told(w, folder)
        await moves(w, head)
        await sound(w)


async def test_a_newest_commit_that_is_damaged_and_has_a_snapshot(folder: Path) -> None:
    async with world(folder, FEW) as w:
        await grown(w)
        await hold_all(w)
        head = (await newest_commit(w, 0)).version
        assert (await w.log.snapshots(0))[0][0] == head
        (folder / commit_key(0, head)).write_bytes(b"no commit")
        out = str(folder.parent / "model.safetensors")
        code, told = await isthmus("export", w.run.url, "-o", out)
        older = re.search(r"; --version (\d+) is the newest that all fragments have from before that", told)
        assert code == 1
        assert older, told
        for number, version in enumerate(("0", older[1])):
            code, told = await isthmus("export", w.run.url, "-o", f"{out}{number}", "--version", version)
            assert code == 0, told
        when = (await w.log.version_at(0, w.runtime.wall() - 3600.0), await w.log.commit(0, head - 1))
        assert when[0] == 0
        assert when[1] is not None
        assert await w.log.version_at(0, when[1].header.written_at) == head - 1
        with pytest.raises(LogCorrupt):
            await w.log.version_at(0, when[1].header.written_at + 0.001)
        row_of = mine(test_a_newest_commit_that_learners_have_adopted)[0]
        told = await heal(row_of, w)
        await delete_as_told(told, head, 2)
        await sound(w)


@row(
    "heal",
    "fragment … cannot be healed: … version … of fragment …, and its log ends at version …: no update on that version "
    "can be merged",
    means="The last commit of a fragment is gone. Only the updates that learners made on it, or checkpoints that know it, "
    "show that it was there.",
    do="restore commits/… and what follows it from a backup. Without one, stop all learners and syncers, "
    "delete the checkpoints named below, since they know the lost version (a learner "
    "that is started names its own, too), and start them again: the fragment goes on from version …; a "
    "learner that has no older checkpoint goes on with the run's model alone, from its first step",
    then="The fragment moves again, and once it has, `isthmus heal` calls it sound.",
    lost="without a backup: what the commit merged, and what learners trained since; of a learner whose checkpoints all know it "
    "also its optimizer state, its step and its place in the data",
)
@row(
    "heal",
    "checkpoints that know a lost version: delete them once all learners have stopped (until then learners store more of them), "
    "and before they start",
    means="A learner does not start as long as it reads a checkpoint that knows a version that the log lacks. The lines below it "
    "name these checkpoints.",
    do="delete them once all learners have stopped",
    then="Learners start, and `isthmus heal` names none.",
    lost="of a learner whose checkpoints are all named: its optimizer state, its step and its place in the data",
)
@row(
    "heal",
    "no checkpoint that can be read here knows a lost version",
    means="Only updates show the version that is lost. Of a run whose learners' folders heal may not read, each learner names "
    "its checkpoints when it is started.",
    do="nothing",
    then="`isthmus heal` calls the fragment sound once it moves again.",
)
@pytest.mark.parametrize(
    ("backup", "shown_by"),
    [(True, "update"), (False, "update"), (False, "checkpoint")],
    ids=["restored", "deleted", "without updates"],
)
async def test_a_newest_commit_that_is_gone_and_learners_have_adopted(
    folder: Path, backup: bool, shown_by: str
) -> None:
    here, names, none = mine(test_a_newest_commit_that_is_gone_and_learners_have_adopted)
    async with world(folder, FEW) as w:
        head = await adopted_by_a(w, folder)
        if shown_by == "checkpoint":
            for path in (folder / "updates" / "00000" / "a").glob(f"{head:012d}-*"):
                path.unlink()
        path = folder / commit_key(0, head)
        kept = path.read_bytes()
        path.unlink()
        told = await heal(here, w)
        assert f"a has version {head} of fragment 0, and its log ends at version {head - 1}" in told
        assert f"restore {commit_key(0, head)}" in told
        assert "2 fragments: 1 sound, 1 that cannot be folded" in told
        assert names.is_in(told)
        if backup:
            path.write_bytes(kept)
        else:
            delete_named(told, folder)
            assert none.is_in((await isthmus("heal", w.run.url))[1]) == (shown_by == "update")
            await w.learner("a").join()
            await sound(w)
            await moves(w, head)
        await sound(w)


@row(
    "heal",
    "start only syncers until the other fragments below are mended: a learner needs all fragments",
    means="One fragment lacks a commit that learners know, and others lack something else. A learner that is started before the "
    "others are mended ends with an error.",
    do="start only syncers until the other fragments below are mended",
    then="`isthmus heal` names the first fragment alone; then start the learners.",
)
async def test_two_damages_of_which_one_keeps_learners_from_starting(folder: Path) -> None:
    (here,) = mine(test_two_damages_of_which_one_keeps_learners_from_starting)
    async with world(folder, FEW) as w:
        head = await adopted_by_a(w, folder)
        (folder / commit_key(0, head)).unlink()
        assert not here.is_in((await isthmus("heal", w.run.url))[1])
        max((folder / "values" / "00001").iterdir()).unlink()
        code, told = await isthmus("heal", w.run.url)
        assert code == 1
        advises(here, told)
        delete_named(told, folder)
        with pytest.raises(LogCorrupt):
            await w.learner("a").join()
        await hold_all(w)
        assert not here.is_in((await isthmus("heal", w.run.url))[1])
        await w.learner("a").join()
        await moves(w, head)

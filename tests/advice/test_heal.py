"""What `isthmus heal` says of damaged logs, and what comes of its advice."""

import asyncio
import re
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch
from torch import nn

from advice.doctors import ACCEPT, HEAL
from advice.followed import advises, command_in, isthmus, mine, says
from advice.lives import FEW, Fault, finished, training
from advice.rows import Row, row
from advice.test_gc import SNAPSHOTS
from isthmus.errors import Denied, LogCorrupt
from isthmus.format.records.keys import commit_key, members_key
from isthmus.inspect.replay import replay
from isthmus.inspect.status import read_ledgers
from isthmus.log import heal as healing
from isthmus.log.listing import checkpoints_in
from support.signed import EU, EVERYBODY, EVIL, SYNC, L, admit
from support.signed import seed as signed
from support.world import SPECS, World, in_virtual_time, newest_commit, serving, train, until, world


def model() -> nn.Module:
    """Return a module with the parameters of the runs of these tests."""
    made = nn.Module()
    for spec in SPECS:
        made.register_parameter(spec.name, nn.Parameter(torch.zeros(spec.shape)))
    return made


async def grown(w: World, versions: int = 4) -> int:
    """Train until each fragment has this many versions, then kill the only syncer; return the first one's version."""
    async with serving(w.syncer("s0"), killed=True) as syncer:
        await train(w.learner("a"), 10, enough=lambda: min(k.head for k in syncer.coordinators) >= versions)
    return (await newest_commit(w, 0)).version


async def settled_to(w: World) -> int:
    """Return the version of fragment 0 that learner a's newest checkpoint knows."""
    ledgers = await read_ledgers(w.log, checkpoints_in(await w.store.list("learners/")))
    return ledgers["a"]["fragments"][0]["settled_to"] if ledgers else 0


async def heal(here: Row, w: World) -> str:
    """Run `isthmus heal`, which must have a row's sentence and advice; return what it printed, in one line."""
    code, told = await isthmus("heal", w.run.url)
    assert code == 1, told
    advises(here, told)
    return " ".join(told.split())


async def moves(w: World, version: int) -> None:
    """Let a syncer and a learner go on until the first fragment has this version again."""
    async with serving(w.syncer("s8")) as syncer, training(w.learner("a")):
        await until(lambda: syncer.coordinators[0].head >= version, "the fragment moves")


async def hold_all(w: World) -> None:
    """Let a syncer fold both fragments, and end it as SIGTERM does."""
    async with serving(w.syncer("s7")) as syncer:
        await until(
            lambda: len(syncer.held) == 2 and all(k.state is not None for k in syncer.coordinators), "it holds all"
        )


async def sound(w: World) -> None:
    """Assert that heal finds nothing, and that a syncer and a learner go on with every fragment."""
    code, told = await isthmus("heal", w.run.url)
    assert (code, "2 fragments: 2 sound" in told) == (0, True), told
    async with serving(w.syncer("s9")) as syncer, training(w.learner("z")):
        heads = [k.head for k in syncer.coordinators]
        await until(lambda: all(k.head > n for k, n in zip(syncer.coordinators, heads, strict=True)), "they go on")


async def adopted_by_a(w: World, folder: Path) -> int:
    """Return the first fragment's newest version once learner a has an update on it, and a checkpoint that knows it."""
    async with training(w.learner("a", checkpoint_s=0.1)):
        async with serving(w.syncer("s1"), killed=True) as syncer:
            await until(lambda: min(k.head for k in syncer.coordinators) >= 3, "it merges")
        head = (await newest_commit(w, 0)).version
        rest = folder / "updates" / "00000" / "a"
        await until(lambda: any(path.name.startswith(f"{head:012d}-") for path in rest.iterdir()), "a goes on")
        while await settled_to(w) < head:  # noqa: ASYNC110 – only the store knows
            await asyncio.sleep(0.05)
    return head


async def delete_as_told(told: str, lost: int, count: int) -> None:
    """Delete what heal names, which must be so many objects, so that a fragment goes on without its newest version."""
    found = re.search(r", delete (.+?) with .* they go on from version (\d+)", told)
    assert found is not None, told
    assert int(found[2]) == lost - 1
    paths = found[1].split(" and ")
    assert len(paths) == count, told
    for path in paths:
        Path(path).unlink()


async def join_once_told(w: World, folder: Path) -> None:
    """Let learner a join, delete the checkpoints of its own that it names, of which there must be one, and let it join."""
    with pytest.raises(LogCorrupt) as caught:
        await w.learner("a").join()
    named = re.findall(r"learners/a/\d+/checkpoints/[^\s:]+", caught.value.detail)
    assert named
    for key in named:
        (folder / key).unlink()
    await w.learner("a").join()


def delete_named(told: str, folder: Path) -> None:
    """Delete the checkpoints that heal names, of which there must be one."""
    named = re.findall(rf"{re.escape(str(folder))}/learners/a/\d+/checkpoints/\S+", told)
    assert named
    for path in named:
        Path(path).unlink()


async def spoil_update(w: World, folder: Path, version: int = 3) -> Path:
    """Overwrite an update that this version of the first fragment merged; return its path."""
    commit = await w.log.commit(0, version)
    assert commit is not None
    path: Path = folder / commit.header.inputs[0].key
    path.write_bytes(b"gone")
    return path


@row(
    "heal",
    "fragment …, at version …, cannot be folded beyond version …: …",
    means="An update or a snapshot that the log names is damaged or gone. No syncer can start with this fragment.",
    like="With `its newest commit is … s old` a running syncer may still have the state: see the next sentence.",
    do="--apply restarts it from version … as published, without its momentum",
    then="`healed: version … restarts from version … as published`; syncers and learners go on with it. If the object can "
    "be restored from a backup instead, nothing is lost.",
    lost="the fragment's momentum; a replay cannot verify the versions in between",
)
async def test_an_update_that_is_gone(folder: Path) -> None:
    (here,) = mine(test_an_update_that_is_gone)
    async with world(folder, FEW) as w:
        head = await grown(w)
        await spoil_update(w, folder)
        await heal(here, w)
        code, told = await isthmus("heal", w.run.url, "--apply")
        assert code == 0
        assert f"healed: version {head + 1} restarts from version {head} as published" in told
        await sound(w)
        assert all(one.difference is None for one in await replay(w.log))


@row(
    "heal",
    "its newest commit is … s old: a syncer that runs and merges this fragment still holds the state",
    means="The log cannot be folded, but it moved within two minutes: a syncer that still merges has the state in memory.",
    like="A syncer that was killed since, that was started since, or that hangs: it has no state of this fragment, or "
    "cannot write it.",
    do="Stop that syncer with SIGTERM, and it writes a snapshot; then nothing is lost. This does not help if none runs "
    "(isthmus status: no syncer is heard), if it cannot fold the fragment either (isthmus status: cannot be folded), or if "
    "it hangs and has not ended after a minute (then end it with SIGKILL): a backup helps, or --apply",
    then="`isthmus heal` calls the fragment sound, or has restarted it.",
    lost="nothing, if the syncer writes its snapshot; with --apply the fragment's momentum",
)
async def test_a_syncer_that_still_has_the_state(folder: Path) -> None:
    (here,) = mine(test_a_syncer_that_still_has_the_state)
    async with world(folder, FEW) as w:
        async with serving(w.syncer("s0")) as syncer:  # ends as at SIGTERM
            await train(w.learner("a"), 10, enough=lambda: min(k.head for k in syncer.coordinators) >= 4)
            await spoil_update(w, folder)
            await heal(here, w)
        await sound(w)


@pytest.mark.parametrize("started", [False, True], ids=["none runs", "one that cannot fold"])
async def test_a_syncer_that_has_no_state_to_save(folder: Path, started: bool) -> None:
    """Status names each case in the words of heal's advice, SIGTERM does not help, and `--apply` does."""
    (here,) = mine(test_a_syncer_that_still_has_the_state)
    async with world(folder, FEW) as w:
        await grown(w)
        await spoil_update(w, folder)
        await heal(here, w)
        async with training(w.learner("a")), AsyncExitStack() as running:
            if started:
                await running.enter_async_context(serving(w.syncer("s1")))  # ends as at SIGTERM
            words = "fragment 0 cannot be folded" if started else "no syncer is heard"
            told = ""
            for _ in range(25):
                told = (await isthmus("status", w.run.url, "--bus", w.bus.url))[1]
                if words in told:
                    break
            assert words in told
        await heal(here, w)
        assert (await isthmus("heal", w.run.url, "--apply"))[0] == 0
        await sound(w)


@row(
    "heal",
    "versions after … are lost",
    means="The newest published values are gone, too: the fragment can only go back to an older version.",
    do="--apply restarts it from version … as published, without its momentum; versions after … are lost",
    then="`healed: version … restarts from version …`; learners adopt the older values and go on.",
    lost="what was merged into the fragment after that version, unless the objects can be restored from a backup",
)
async def test_values_that_are_gone_too(folder: Path) -> None:
    (here,) = mine(test_values_that_are_gone_too)
    async with world(folder, FEW) as w:
        head = await grown(w)
        await spoil_update(w, folder)
        (folder / (await newest_commit(w, 0)).header.value_key).unlink()
        await heal(here, w)
        code, told = await isthmus("heal", w.run.url, "--apply")
        assert code == 0
        assert f"healed: version {head + 1} restarts from version {head - 1} as published" in told
        await sound(w)


@row(
    "heal",
    "not healed: a syncer committed in the meantime",
    means="Between the diagnosis and the healing commit, a syncer went on with the fragment.",
    do="run isthmus heal again",
    then="It finds the fragment sound, or diagnoses its new end.",
)
async def test_a_syncer_that_commits_meanwhile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here,) = mine(test_a_syncer_that_commits_meanwhile)
    async with world(folder, FEW) as w:
        await grown(w)
        await spoil_update(w, folder)
        diagnose = healing.diagnose

        async def slow(*arguments: object) -> object:
            found = await diagnose(*arguments)  # type: ignore[arg-type]
            (other,) = await diagnose(w.log, [0])
            assert await healing.heal(w.log, other) is not None  # another process commits meanwhile
            return found

        with monkeypatch.context() as patch:
            patch.setattr(healing, "diagnose", slow)
            code, told = await isthmus("heal", w.run.url, "--apply")
        assert code == 1
        advises(here, told)
        await sound(w)


@row(
    "heal",
    "fragment … cannot be healed: …: is missing, and version … is there",
    means="A commit is gone while later ones exist. No one may write another commit in its place.",
    do="restore it from a backup; without one, a syncer that still merges this fragment writes a snapshot once it is stopped with SIGTERM, and the run goes on from that; if none does, go on in a new run from the newest version that can be exported (`isthmus export`, then `isthmus init --from`)",
    then="With the object restored: `… sound`. Otherwise `isthmus export` with the version before the missing one gives a "
    "model, from which a new run starts.",
    lost="without a backup: what was merged into the run after that version",
)
@pytest.mark.parametrize("backup", [True, False], ids=["restored", "exported"])
async def test_a_commit_that_is_missing(folder: Path, backup: bool) -> None:
    (here,) = mine(test_a_commit_that_is_missing)
    async with world(folder, FEW) as w:
        await grown(w)
        hole = folder / commit_key(0, 3)
        kept = hole.read_bytes()
        hole.unlink()
        await heal(here, w)
        if backup:
            hole.write_bytes(kept)
            await sound(w)
            return
    model, new = folder.parent / "model.safetensors", folder.parent / "new"
    code, told = await isthmus("export", str(folder), "-o", str(model), "--version", "2")
    assert code == 0, told
    code, told = await isthmus("init", str(new), "--from", str(model), "--model", "advice.test_heal:model")
    assert code == 0, told


@row(
    "heal",
    "fragment … has a hole in its history (the run goes on): …: is missing, and version … is there: restore it from a "
    "backup: `isthmus replay` needs it, and a learner with an older checkpoint may",
    means="A commit from before the newest snapshot is gone. Syncers and learners do not need it; a replay does.",
    do="restore it from a backup",
    then="`isthmus heal` calls the fragment sound, and `isthmus replay` verifies the whole log.",
    lost="without a backup: the proof of the versions before the snapshot, and nothing of the model",
)
@row(
    "heal",
    "holes have not to be mended, and --apply does nothing about them: the run goes on",
    means="Only `isthmus replay` and a learner with an older checkpoint need what is lost, and the board, to show that version.",
    do="Without a backup, isthmus status … --accept-hole … reports it no more, nor does isthmus board … --accept-hole …, which "
    "reads past it, and isthmus gc … --accept-hole … collects past it, once it is older than the versions that gc keeps",
    then="`isthmus status --check` ends with 0 again, and with 1 for any other damage. Where the flag is to stay, set "
    "ISTHMUS_ACCEPT_HOLE; the doctor takes it, too, and syncers that are started with it, so that the alert "
    "IsthmusCommitMissing ends. heal still has the hole. Once gc has packed the commits around it, replay begins after it.",
    lost="the proof of the versions before the snapshot, and nothing of the model",
)
async def test_a_commit_below_a_snapshot_that_is_missing(folder: Path) -> None:
    here, accepted = mine(test_a_commit_below_a_snapshot_that_is_missing)
    async with world(folder, FEW) as w:
        await finished(w)
        hole = folder / commit_key(0, 3)
        kept = hole.read_bytes()
        hole.unlink()
        told = await heal(here, w)
        assert told.endswith("2 fragments: 1 sound, 1 with a hole in its history (the run goes on)")
        assert (await isthmus("replay", w.run.url))[0] == 1
        advises(accepted, (await isthmus("heal", w.run.url, "--apply"))[1])
        hole.write_bytes(kept)
        assert (await isthmus("replay", w.run.url))[0] == 0
        await sound(w)


@pytest.mark.parametrize("gone", [True, False], ids=["missing", "damaged"])
async def test_a_hole_that_is_accepted(folder: Path, gone: bool) -> None:
    """Neither status nor gc stops at it any more; other damage of the same fragment is still found."""

    def spoil(version: int) -> tuple[Path, bytes]:
        path: Path = folder / commit_key(0, version)
        kept = path.read_bytes()
        path.unlink()
        if not gone:
            path.write_bytes(b"garbage")
        return path, kept

    (accepted,) = mine(test_a_commit_below_a_snapshot_that_is_missing)[1:]
    async with world(folder, SNAPSHOTS) as w:
        await finished(w, 12)
        spoil(3)
        code, told = await isthmus("heal", w.run.url, "--apply")
        assert code == 1, told
        advises(accepted, told)
        check, collect = command_in(told, "status"), command_in(told, "gc")
        assert check[-2:] == collect[-2:] == ["--accept-hole", "0/3"]
        watch = ("--bus", w.bus.url, "--check")
        assert (await isthmus(*check, *watch))[0] == 0
        assert (await isthmus("status", w.run.url, *watch))[0] == 1
        path, kept = spoil(5)
        code, told = await isthmus(*check, *watch)
        assert (code, commit_key(0, 5) in told) == (1, True), told
        now = ("--apply", "--keep", "1", "--min-age", "0")
        assert (await isthmus(*collect, *now))[0] == 1
        path.write_bytes(kept)
        assert (await isthmus(*collect, "--min-age", "0"))[0] == 1, "the versions that are kept by default need it"
        code, told = await isthmus(*collect, *now)
        assert code == 0, told
        for version in (2, 4):
            found = await w.log.commit(0, version)
            assert found is not None
            assert found.in_segment, "the commits on both sides of the hole are packed"
        for words in (("replay", w.run.url), (*collect, *now), (*check, *watch)):
            code, told = await isthmus(*words)
            assert code == 0, told
        async with serving(w.syncer("s9")) as syncer, training(w.learner("z")):
            heads = [k.head for k in syncer.coordinators]
            await until(lambda: all(k.head > n for k, n in zip(syncer.coordinators, heads, strict=True)), "they go on")


async def test_commits_that_are_missing_in_a_row_are_accepted_at_once(folder: Path) -> None:
    """As after the store was set back while syncers went on: one flag for each would never end."""
    async with world(folder, SNAPSHOTS) as w:
        await finished(w, 12)
        for version in (3, 4, 5, 6, 8):
            (folder / commit_key(0, version)).unlink()
        code, told = await isthmus("heal", w.run.url)
        assert (code, "up to 4 commits in a row are missing in a fragment" in told) == (1, True), told
        check = command_in(told, "status")
        assert check[-1] == "0/3-6"
        code, told = await isthmus(*check, "0/8", "--bus", w.bus.url, "--check")
        assert code == 0, told
        assert (await isthmus(*check[:-1], "0/6-3"))[0] == 2


async def test_a_hole_is_accepted_only_where_the_run_goes_on_without_it(folder: Path) -> None:
    async with world(folder, FEW) as w:
        await grown(w)
        (folder / commit_key(0, 3)).unlink()
        code, told = await isthmus("status", w.run.url, "--bus", w.bus.url, "--check", "--accept-hole", "0/3")
        assert (code, commit_key(0, 3) in told) == (1, True), told
        assert (await isthmus("status", w.run.url, "--accept-hole", "0-3"))[0] == 2


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
    "fragment … cannot be healed: the chain of commits is broken: …: not a commit: …",
    means="A commit is damaged, and later versions exist.",
    do="restore that object from a backup, or go on in a new run from the newest version that can be exported (`isthmus "
    "export`, then `isthmus init --from`)",
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
    "fragments … cannot be healed: members/…: is missing",
    means="A version of the membership is gone, so that commits made under it cannot be verified. The commits are whole. "
    "Processes that run know that version, and go on; none can start.",
    do="restore it from a backup; the commits are sound",
    then="`… sound`",
    lost="without a backup: the run beyond that membership, except what can be exported from learners' checkpoints",
)
@row(
    "status",
    "members/…: is no membership: …",
    means="An object that is no version of the membership lies in its place. If it was one, commits made under it cannot be "
    "verified without it.",
    do="If this version was in force, restore it from a backup: commits made under it cannot be verified without it. If the "
    "owners never wrote it, delete it",
    then="`… of … learners merge`",
    lost="if it was in force and there is no backup: the run beyond that membership, except what can be exported from learners' "
    "checkpoints",
)
@row(
    "status",
    "members/…: is missing",
    means="A version of the membership is gone, so that commits made under it cannot be verified. The commits are whole. "
    "Processes that run know that version, and go on; none can start.",
    do="restore it from a backup; the commits are sound",
    then="`… of … learners merge`",
    lost="without a backup: the run beyond that membership, except what can be exported from learners' checkpoints",
)
async def test_a_membership_that_is_missing(folder: Path) -> None:
    healed, changed, noticed = mine(test_a_membership_that_is_missing)
    async with world(folder, signed()) as w:
        await admit(w, *EVERYBODY)
        await admit(w, *EVERYBODY, ("more", L, EVIL))
        async with serving(w.by(SYNC).syncer("s-1")) as syncer:
            await train(w.by(EU).learner("eu"), 10, enough=lambda: min(k.head for k in syncer.coordinators) >= 2)
        path = folder / members_key(2)
        kept = path.read_bytes()
        path.unlink()
        for tool, here in (("status", noticed), ("heal", healed)):
            more = ("--bus", w.bus.url, "--check") if tool == "status" else ()
            code, told = await isthmus(tool, w.run.url, *more)
            assert code == 1, told
            advises(here, told)
            assert told.count(members_key(2)) == 1, told
            assert "ever committed" not in told
        _, told = await isthmus("doctor", w.run.url, "--size", "0.02")
        assert f"failure log: commits: fragments 0 to 3: {members_key(2)}: is missing" in told
        path.write_bytes(kept[:-9])
        code, told = await isthmus("status", w.run.url, "--bus", w.bus.url, "--check")
        assert code != 0, told
        advises(changed, told)
        path.write_bytes(kept)
        code, told = await isthmus("heal", w.run.url)
        assert code == 0, told
        assert says(changed, (await isthmus("status", w.run.url, "--bus", w.bus.url))[1]) is False
        assert says(noticed, (await isthmus("status", w.run.url, "--bus", w.bus.url))[1]) is False


async def test_where_a_membership_is_missing_nobody_is_called_a_stranger(folder: Path) -> None:
    """Eu was removed and added again, and the version that added it is gone: the processes know it, and go on."""
    missing = mine(test_a_membership_that_is_missing)[2]
    async with world(folder, signed()) as w:
        await admit(w, *EVERYBODY)
        await admit(w, *(one for one in EVERYBODY if one[0] != "eu"))
        await admit(w, *EVERYBODY)
        async with serving(w.by(SYNC).syncer("s-1")) as syncer, training(w.by(EU).learner("eu")):
            await until(lambda: min(k.head for k in syncer.coordinators) >= 2, "it merges")
            path = folder / members_key(3)
            kept = path.read_bytes()
            path.unlink()
            code, told = await isthmus("status", w.run.url, "--bus", w.bus.url, "--check")
            assert code == 1
            advises(missing, told)
            assert "does not name" not in told
            assert "expelled" not in told
            path.write_bytes(kept)


@row(
    "heal",
    "up to … commits in a row are missing in a fragment: as after the store was set back to an older copy while syncers went on, "
    "or after a folder was lost. A newer backup may have them",
    means="Many commits in a row are gone from a fragment, and the run goes on from a snapshot after them. It is said before the "
    "advice about holes. Status names the holes alone.",
    do="restore them from a newer backup, if there is one; else accept them as lost, with the flags that heal prints next",
    then="With the objects restored, heal names no hole.",
    lost="without a backup: the proof of those versions, and nothing of the model",
)
async def test_many_commits_in_a_row_that_are_missing(folder: Path) -> None:
    (here,) = mine(test_many_commits_in_a_row_that_are_missing)
    async with world(folder, SNAPSHOTS) as w:
        await finished(w, 12)
        kept = {path: path.read_bytes() for path in (folder / commit_key(0, version) for version in range(3, 8))}
        for path in kept:
            path.unlink()
        assert here.is_in((await isthmus("heal", w.run.url))[1])
        for path, blob in kept.items():
            path.write_bytes(blob)
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
    "export`, then `isthmus init --from`)",
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


@row(
    "heal",
    "…: only readers and syncers may read updates",
    means="The credentials in use may not read the learners' updates. Nothing is known to be damaged.",
    do="diagnose with the env of the reader's folder, or of a syncer's",
    then="With these credentials heal gives its diagnosis.",
)
@in_virtual_time
async def test_a_reader_without_rights() -> None:
    (here,) = mine(test_a_reader_without_rights)
    async with world(Path(), FEW) as w:
        await grown(w)
        denied = Fault(Denied("403: AccessDenied"), "updates/", ("get",))
        with pytest.raises(Denied) as caught:
            await healing.diagnose(denied.of(w).log)
        advises(here, str(caught.value))
        denied.mended = True
        assert all(found.sound for found in await healing.diagnose(denied.of(w).log))


@row(
    "heal",
    "dry run: nothing was written",
    means="Heal has only looked. The lines above say what `--apply` would do.",
    do="use --apply, as a syncer, to restart the fragments as described above",
    then="`… healed` in the last line.",
)
async def test_a_dry_run(folder: Path) -> None:
    (here,) = mine(test_a_dry_run)
    async with world(folder, FEW) as w:
        await grown(w)
        await spoil_update(w, folder)
        told = await heal(here, w)
        assert not says(here, (await isthmus("heal", w.run.url, "--apply"))[1])
        assert "--apply" in told
        await sound(w)

"""What `isthmus heal` says of damaged logs, and what comes of its advice."""

from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from advice.followed import advises, command_in, isthmus, mine, says
from advice.heals import grown, heal, sound, spoil_update
from advice.lives import FEW, Fault, finished, training
from advice.rows import row
from advice.test_gc import SNAPSHOTS
from isthmus.errors import Denied
from isthmus.format.records.keys import commit_key, members_key
from isthmus.inspect.replay import replay
from isthmus.log import heal as healing
from support.signed import EU, EVERYBODY, EVIL, SYNC, L, admit
from support.signed import seed as signed
from support.world import in_virtual_time, newest_commit, serving, train, until, world


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
    do="restore it from a backup; without one, a syncer that still merges this fragment writes a snapshot once it is stopped with SIGTERM, and the run goes on from that; if none does, go on in a new run from the newest version that can be exported (`isthmus export --version N`, then `isthmus init --from`)",
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
    code, told = await isthmus("init", str(new), "--from", str(model), "--model", "advice.heals:model")
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
    "fragments … cannot be healed: members/…: is missing",
    means="A version of the membership is gone, so that commits made under it cannot be verified. The commits are whole. "
    "Processes that run know that version, and go on; none can start.",
    do="restore it from a backup; until then the commits cannot be judged, and no process can be started: let those that run go on",
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
    do="restore it from a backup; until then the commits cannot be judged, and no process can be started: let those that run go on",
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


async def test_a_hole_does_not_hide_that_a_fragment_cannot_be_folded(folder: Path) -> None:
    """Status and doctor look on after a hole in the history: the same fragment may have worse damage."""
    async with world(folder, SNAPSHOTS) as w:
        await finished(w, 12)
        newest = await newest_commit(w, 0)
        for version, key in await w.log.snapshots(0):
            if version == newest.version:
                (folder / key).unlink()  # so that a fold begins below the newest version, whatever that is
        (folder / commit_key(0, 3)).unlink()
        code, told = await isthmus("status", w.run.url, "--check")
        assert "fragment 0 has a hole in its history (the run goes on)" in told
        lost = folder / newest.header.inputs[0].key
        lost.unlink()
        code, told = await isthmus("status", w.run.url, "--check")
        assert code == 1
        assert f"{newest.header.inputs[0].key}: is missing, and version {newest.version} merged" in told
        assert "nothing else is to be done" not in told
        code, told = await isthmus("doctor", w.run.url, "--role", "syncer")
        assert code == 1
        assert "failure log: fold" in told
        assert "warning log: commits: fragment 0 has a hole in its history" in told

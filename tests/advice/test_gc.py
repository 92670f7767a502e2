"""What `isthmus gc` says when it collects nothing or not all, and what comes of its advice."""

import asyncio
import re
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from advice.doctors import HEAL
from advice.followed import advises, command_in, commands_in, isthmus, mine, says
from advice.lives import PACE, Fault, training
from advice.rows import A_GAP, row
from isthmus.doctor.advice import IN_BUCKET, IN_FOLDER, IN_GOOGLE, Advice, freeing
from isthmus.errors import Denied, StoreFull, Unavailable
from isthmus.format.records.keys import checkpoint_key, commit_key
from isthmus.format.records.objects import MemberSpec
from isthmus.format.rules import Rules
from isthmus.format.signing.keys import read_signer, write_signer
from isthmus.log import gc
from isthmus.log.membership import Members, write
from isthmus_services.commands.gc import line_of
from isthmus_services.main import main
from support.signed import EU, EVERYBODY, SYNC, US, L, S, admit
from support.signed import seed as signed
from support.world import World, all_commits, seed_of, serving, train, until, world

NOW = ("--keep", "1", "--min-age", "0")
SNAPSHOTS = seed_of(Rules(fragments=2, sync_every=4), msgspec.structs.replace(PACE, snapshot_every=4))


async def grown(w: World, versions: int = 10) -> str:
    """Train until each fragment has this many versions, then let all leave in order.

    Returns the `--keep` that keeps the fifth version of fragment 0 and all after it, however far it grew.
    """
    async with serving(w.syncer("s0")) as syncer:
        await train(w.learner("a"), 10, enough=lambda: min(k.head for k in syncer.coordinators) >= versions)
    return str(syncer.coordinators[0].head - 5)


def objects(folder: Path) -> int:
    """Return the number of objects in a folder."""
    return sum(path.is_file() for path in folder.rglob("*"))


@row(
    "gc",
    "this machine's clock is … s ahead of the one that dates the files in …: nothing is deleted, since all of them would seem old; "
    "set both by NTP (timedatectl set-ntp true)",
    means="The age of an object is counted from the date that its file system gave it, up to this machine's time: young objects that "
    "learners still need would be deleted.",
    do="set both by NTP (timedatectl set-ntp true)",
    then="The collection goes on.",
)
async def test_a_clock_that_is_ahead(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (here,) = mine(test_a_clock_that_is_ahead)
    async with world(folder, SNAPSHOTS) as w:
        await grown(w)
    there, real = len(list(folder.rglob("*"))), time.time
    for ahead_s in (25 * 3600.0, 0.0):
        monkeypatch.setattr(time, "time", lambda ahead_s=ahead_s: real() + ahead_s)
        code = await asyncio.to_thread(main, ["gc", w.run.url, "--apply", "--keep", "1"])
        said = capsys.readouterr()
        if ahead_s:
            assert code != 0
            advises(here, said.err)
            assert len(list(folder.rglob("*"))) == there
        else:
            assert code == 0
            assert "objects younger than" in said.out


@row(
    "gc",
    "…: is missing below the end of the log: nothing is collected",
    means="A commit is gone. Garbage collection could delete what is left of its work, so it does nothing.",
    do=HEAL,
    then="`isthmus heal` names the commit. Once it is restored from a backup, gc collects.",
)
@row(
    "gc",
    "…: not a commit: …: nothing is collected",
    means="A commit is damaged. Garbage collection cannot know what the commit names, so it does nothing.",
    do=HEAL,
    then="`isthmus heal` names the commit. Once it is restored from a backup, gc collects.",
)
@pytest.mark.parametrize(
    ("version", "gone"), [(3, True), (6, True), (3, False), (6, False)],
    ids=["missing", "missing among those that are kept", "damaged", "damaged among those that are kept"],
)  # fmt: skip
async def test_a_log_with_a_hole(folder: Path, version: int, gone: bool) -> None:
    missing, damaged = mine(test_a_log_with_a_hole)
    async with world(folder, SNAPSHOTS) as w:
        keep = await grown(w)
        hole = folder / commit_key(0, version)
        kept = hole.read_bytes()
        hole.unlink()
        if not gone:
            hole.write_bytes(b"garbage")
        before = objects(folder)
        # A fold begins at the snapshot of version 4: what the commits after it name must stay.
        code, told = await isthmus("gc", w.run.url, "--keep", keep, "--min-age", "0", "--apply")
        assert code != 0
        advises(missing if gone else damaged, told)
        assert objects(folder) == before
        code, said = await isthmus(*command_in(told, "heal"))
        assert (code, commit_key(0, version) in said) == (1, True), said
        hole.write_bytes(kept)
        assert (await isthmus("gc", w.run.url, *NOW, "--apply"))[0] == 0
        assert objects(folder) < before


@row(
    "gc",
    "…: is missing below the end of the log: it is accepted, and nothing is collected until it is older than all that is kept",
    means="The flag `--accept-hole` names this commit, and the commit is still among those that are kept.",
    do="collect again later, or keep less (--keep, --min-age)",
    then="Once there are enough versions after it, and a snapshot after it is old enough, gc collects.",
)
async def test_a_hole_that_is_accepted_too_soon(folder: Path) -> None:
    (here,) = mine(test_a_hole_that_is_accepted_too_soon)
    async with world(folder, SNAPSHOTS) as w:
        keep = await grown(w)
        kept = (folder / commit_key(0, 6)).read_bytes()
        (folder / commit_key(0, 6)).unlink()
        words = ("gc", w.run.url, "--accept-hole", "0/6", "--apply")
        before = objects(folder)
        code, told = await isthmus(*words, "--keep", keep, "--min-age", "0")
        assert code != 0, told
        advises(here, told)
        assert objects(folder) == before
        (folder / commit_key(0, 6)).write_bytes(kept)
        (folder / commit_key(0, 3)).unlink()
        code, told = await isthmus("gc", w.run.url, "--accept-hole", "0/3", "--apply", "--keep", "1", "--min-age", "0")
        assert code == 0, told
        assert objects(folder) < before


@row(
    "gc",
    "…: is not the commit that … names as the one before it: nothing more is collected",
    means="A commit is damaged, in the store or on its way. It is not packed, since its copy would be the only one.",
    do=HEAL,
    then="`isthmus heal` names the commit. Once it is restored from a backup, gc goes on.",
)
async def test_a_commit_that_changes_while_it_is_packed(folder: Path) -> None:
    (here,) = mine(test_a_commit_that_changes_while_it_is_packed)
    async with world(folder, SNAPSHOTS) as w:
        await grown(w)
        plan = await gc.plan(w.log, keep=1, min_age_s=-60.0)
        path = folder / commit_key(0, 2)
        kept = path.read_bytes()
        path.write_bytes((folder / commit_key(1, 2)).read_bytes())
        said = await line_of(_apply(w, plan))
        advises(here, said)
        code, told = await isthmus(*command_in(said, "heal"))
        assert (code, commit_key(0, 2) in told) == (1, True), told
        path.write_bytes(kept)
        assert (await isthmus("gc", w.run.url, *NOW, "--apply"))[0] == 0


async def _apply(w: World, plan: gc.Garbage) -> gc.Garbage:
    await gc.apply(w.log, plan)
    return plan


@row(
    "gc",
    "… is full, and nothing is left to be collected that would make room for a segment of commits",
    means="The store has no space, and everything in it is still needed.",
    like="`… is full (…): give it more space, or free what the run does not need` is said by processes that write; there gc "
    "helps.",
    do="give it more space",
    then="gc packs and deletes, and learners and syncers go on by themselves.",
    lost=A_GAP,
)
async def test_a_store_that_is_full_of_what_is_needed(folder: Path) -> None:
    (here,) = mine(test_a_store_that_is_full_of_what_is_needed)
    async with world(folder, SNAPSHOTS) as w:
        await grown(w)
        full = Fault(StoreFull(w.run.url, w.run.url, "ENOSPC"), operations=("put", "create"))
        log = full.of(w).log
        plan = await gc.plan(log, keep=1, min_age_s=-60.0)
        plan.doomed.clear()
        with pytest.raises(Unavailable) as caught:
            await gc.apply(log, plan)
        advises(here, str(caught.value))
        full.mended = True
        await gc.apply(log, plan)
        assert (await all_commits(w.log))[0][0].in_segment


@row(
    "gc",
    "collection failed, the next one will continue: …",
    means="With `--every`: the store did not answer. What was deleted was not needed.",
    do="the next one will continue",
    then="The next line has `… objects deleted`.",
)
@row(
    "gc",
    "collection failed, and nothing is collected until this is mended: …",
    means="With `--every`: the store denied a request, or the log of one fragment is damaged. Then no fragment is collected, "
    "and the store fills up.",
    do=f"nothing is collected until this is mended: … {HEAL}",
    then="The next line has `… objects deleted`. For a denied request the line has the store's answer: `isthmus doctor` with "
    "`--role collector` says which permission is missing.",
)
@pytest.mark.parametrize("hole", [False, True], ids=["away", "damaged"])
async def test_a_collection_that_fails(folder: Path, hole: bool) -> None:
    away, damaged = mine(test_a_collection_that_fails)
    async with world(folder, SNAPSHOTS) as w:
        await grown(w)
        if hole:
            missing = folder / commit_key(0, 3)
            kept = missing.read_bytes()
            missing.unlink()
            for _ in range(2):
                advises(damaged, await line_of(gc.plan(w.log, keep=1, min_age_s=-60.0)))
            missing.write_bytes(kept)
            assert "objects deleted" in await line_of(gc.plan(w.log, keep=1, min_age_s=-60.0))
            return
        fault = Fault(Unavailable("503: SlowDown"), operations=("delete",))
        plan = await gc.plan(w.log, keep=1, min_age_s=-60.0)
        advises(away, await line_of(_apply(fault.of(w), plan)))
        fault.mended = True
        plan = await gc.plan(w.log, keep=1, min_age_s=-60.0)
        assert "objects deleted" in await line_of(_apply(fault.of(w), plan))


@row(
    "gc",
    "nothing can be deleted: the newest … versions are kept, and they need all objects",
    means="The run has few versions, or was collected just now. By default 64 versions remain foldable.",
    do="if the store is full, give it more space, or use a smaller --keep",
    then="With a smaller --keep the table has objects to delete, unless no snapshot is old enough.",
)
async def test_a_run_that_needs_everything(folder: Path) -> None:
    (here,) = mine(test_a_run_that_needs_everything)
    async with world(folder, SNAPSHOTS) as w:
        await grown(w)
        assert (await isthmus("gc", w.run.url, *NOW, "--apply"))[0] == 0
        code, told = await isthmus("gc", w.run.url, "--min-age", "0")
        assert code == 0
        advises(here, told)
        await grown(w, 20)
        code, told = await isthmus("gc", w.run.url, *NOW)
        assert (code, says(here, told)) == (0, False), told


@row(
    "gc",
    "… objects younger than … s are kept for now",
    means="Nothing needs these objects, but a process may be about to use them.",
    do="use --min-age 0 to delete them, but only once every learner and syncer of the run has ended; if the store is full "
    "and they must go on, give it more space",
    then="The objects are gone, and gc says this no more.",
)
@row(
    "gc",
    "nothing was deleted: there was nothing to delete",
    means="gc had nothing to delete or to pack. With `yet`, objects that nothing needs are younger than `--min-age`.",
    do="give it more space",
    then="Learners and syncers go on by themselves.",
)
async def test_objects_that_are_young(folder: Path) -> None:
    here, nothing = mine(test_objects_that_are_young)
    async with world(folder, SNAPSHOTS) as w:
        await grown(w)
        before = objects(folder)
        _, told = await isthmus("gc", w.run.url, "--keep", "1", "--apply")
        advises(here, told)
        advises(nothing, told)
        assert told.rstrip().endswith("nothing to delete yet")
        assert objects(folder) == before
        code, told = await isthmus("gc", w.run.url, "--keep", "1", "--apply", "--min-age", "0")
        assert (code, says(here, told), says(nothing, told)) == (0, False, False), told
        assert told.rstrip().endswith("done")
        _, told = await isthmus("gc", w.run.url, "--keep", "1", "--apply", "--min-age", "0")
        assert told.rstrip().endswith("nothing to delete")
        assert (await isthmus("replay", w.run.url))[0] == 0


@pytest.mark.parametrize("kind", [IN_BUCKET, IN_GOOGLE, IN_FOLDER], ids=["bucket", "google", "folder"])
async def test_the_chain_of_commands_for_a_full_store(folder: Path, kind: Advice) -> None:
    """The doctor advises three commands in turn. In a young run only the last one makes room."""
    chain = [words for words in commands_in(freeing(kind.full, str(folder), signed=False)) if words[0] == "gc"]
    assert len(chain) == 3
    async with world(folder, SNAPSHOTS) as w:
        await grown(w, 20)
        left = [objects(folder)]
        for words in chain:
            code, told = await isthmus(*words)
            assert code == 0, told
            left.append(objects(folder))
    assert left[0] == left[1] == left[2] > left[3], "objects in the store, before and after each command"


@row(
    "gc",
    "dry run: nothing was deleted",
    means="gc has only looked. The table says what it would delete.",
    do="use --apply to delete",
    then="`done`, and the objects are gone.",
)
@row(
    "gc",
    "--every needs --apply",
    means="A collection that repeats must be told to delete.",
    do="--every needs --apply",
    then="A line for each collection.",
)
async def test_a_dry_run(folder: Path) -> None:
    dry, every = mine(test_a_dry_run)
    async with world(folder, SNAPSHOTS) as w:
        await grown(w)
        before = objects(folder)
        advises(dry, (await isthmus("gc", w.run.url, *NOW))[1])
        code, told = await isthmus("gc", w.run.url, *NOW, "--every", "60")
        assert code == 2
        advises(every, told)
        assert objects(folder) == before
        code, told = await isthmus("gc", w.run.url, *NOW, "--apply")
        assert (code, told.rstrip().endswith("done")) == (0, True), told
        assert objects(folder) < before


@row(
    "gc",
    "…: everything in this run is signed: pass your key (--key COLLECTOR_KEY_FILE, ISTHMUS_KEY or join(key=…))",
    means="The run has an owner, and whoever writes must have a key. `isthmus heal --apply` says the same.",
    do="if `isthmus create` made a collector's folder, load its env (. FOLDER/env); else `isthmus keys new NAME` makes "
    "one, and the run's owner adds it to the members",
    then="With `--key`, the next sentence, or `done`.",
)
@row(
    "gc",
    "…: the membership does not name anybody with the key … as a collector; it is the key of …",
    means="The key is a learner's or a syncer's, as with `. learner-eu-1/env` in place of `. collector/env`.",
    do="use the folder, or the key, of a collector",
    then="`isthmus gc` with this key deletes.",
    like="For a syncer's key the sentence goes on: the owner may make it a collector's, too.",
)
@row(
    "gc",
    "…: the membership does not name anybody with the key … as a collector; the run's owner adds it",
    means="The membership does not name the key.",
    do="the run's owner adds it: isthmus members add … NAME --as collector --public-key FILE.pub --key OWNER_KEY_FILE",
    then="`isthmus gc` with this key deletes.",
)
async def test_a_collector_without_a_key(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unsigned, theirs, unknown = mine(test_a_collector_without_a_key)
    monkeypatch.chdir(tmp_path)
    for name in ("owner", "col"):
        assert (await isthmus("keys", "new", name, "--folder", "."))[0] == 0
    owner = await asyncio.to_thread(read_signer, tmp_path / "owner")
    async with world(folder, replace(SNAPSHOTS, signer=owner)) as w:
        await write(
            w.store, Members(w.run), owner,
            [MemberSpec("a", L, US.author), MemberSpec("s0", S, SYNC.author)], [0, 0], w.runtime.wall(),
        )  # fmt: skip
        async with serving(w.by(SYNC).syncer("s0")) as syncer:
            await train(w.by(US).learner("a"), 10, enough=lambda: min(k.head for k in syncer.coordinators) >= 10)
        code, told = await isthmus("gc", w.run.url, *NOW, "--apply")
        assert code == 2
        advises(unsigned, told)
        code, told = await isthmus("gc", w.run.url, *NOW, "--apply", "--key", "col")
        assert code == 2
        advises(unknown, told)
        add = re.search(r"isthmus (members add .* --key OWNER_KEY_FILE)", " ".join(told.split()))
        assert add is not None
        words = add[1].replace("NAME", "col").replace("FILE.pub", "col.pub").replace("OWNER_KEY_FILE", "owner").split()
        code, told = await isthmus(*words)
        assert code == 0, told
        code, told = await isthmus("gc", w.run.url, *NOW, "--apply", "--key", "col")
        assert code == 0, told
        for name, signer in (("a", US), ("s0", SYNC)):
            write_signer(tmp_path / name, signer, name)
        code, told = await isthmus("gc", w.run.url, *NOW, "--apply", "--key", "a")
        assert code == 2
        advises(theirs, told)
        assert "members add" not in told
        adding = ("members", "add", w.run.url, "gc", "--as", "collector", "--public-key")
        code, refused = await isthmus(*adding, "a.pub", "--key", "owner")
        assert (code, "is the key of learner a, who could then act as gc, too" in refused) == (2, True), refused
        code, told = await isthmus("gc", w.run.url, *NOW, "--apply", "--key", "s0")
        assert code == 2
        advises(theirs, told)
        assert "or the run's owner makes it a collector's, too: isthmus members add" in " ".join(told.split())
        assert (await isthmus(*adding, "s0.pub", "--key", "owner"))[0] == 0
        code, told = await isthmus("gc", w.run.url, *NOW, "--apply", "--key", "s0")
        assert code == 0, told


@row(
    "gc",
    "all checkpoints are kept, because this process may not read them (…)",
    means="A signed run: gc keeps a learner's newest valid checkpoints, and may not read which ones are valid.",
    do="give it a collector's rights (isthmus doctor … --role collector --key COLLECTOR_KEY_FILE, beside it, names what is "
    "missing)",
    then="Old checkpoints are deleted.",
)
@row(
    "gc",
    "… is kept: with … bytes it is too large to be judged here",
    means="A checkpoint is larger than one of this run can be. Its learner may have written it all the same.",
    do="delete it if its learner did not write it",
    then="gc no longer speaks of it.",
)
async def test_checkpoints_of_a_signed_run(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    denied, large = mine(test_checkpoints_of_a_signed_run)
    async with world(folder, signed()) as w:
        await admit(w, *EVERYBODY)
        async with serving(w.by(SYNC).syncer("s-1")):
            for life in range(1, 4):
                async with training(w.by(EU).learner("eu", checkpoint_s=0.1)):
                    stored = folder / f"learners/eu/{life:06d}/checkpoints"
                    await until(lambda: list(stored.glob("0*")), "there is a checkpoint")  # noqa: B023
        fault = Fault(Denied("403: AccessDenied"), "learners/", ("get",))
        log = fault.of(w).by(None).log
        await log.members.refresh(w.store)
        assert "checkpoints" not in (await gc.plan(log, min_age_s=-60.0)).doomed
        advises(denied, caplog.text)
        assert command_in(caplog.text, "doctor") == [
            *("doctor", w.run.url, "--role", "collector", "--key", "COLLECTOR_KEY_FILE"),
        ]
        fault.mended = True
        assert (await gc.plan(log, min_age_s=-60.0)).doomed["checkpoints"]
        assert not says(large, caplog.text)
        key = checkpoint_key("eu", 9, 10**6, bytes(32))
        await w.store.put(key, bytes(log.checkpoint_most + 1))
        await gc.plan(log, min_age_s=-60.0)
        advises(large, caplog.text)
        caplog.clear()
        (folder / key).unlink()
        await gc.plan(log, min_age_s=-60.0)
        assert not says(large, caplog.text)

"""What `isthmus replay` says of versions that it cannot verify, and what comes of its advice."""

import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from advice.followed import advises, command_in, commands_in, isthmus, mine
from advice.heals import grown, spoil_update
from advice.lives import FEW, finished, training
from advice.rows import row
from advice.test_doctor_store import as_user
from isthmus.format.records import frame
from isthmus.format.records.keys import commit_key
from support.world import newest_commit, serving, until, world


@row(
    "replay",
    "fragment …, version … differs: commits/…: …",
    means="The commit says something else than its updates give. All versions before it are as recorded; those after it were "
    "not compared.",
    like="`is missing` or `not a commit` after the key: nothing can be compared, and the advice is another one.",
    do="compare on a second machine: isthmus replay … --fragment … --from … --to …. If it differs there, too, the syncer that "
    "wrote the version merged something else: isthmus explain … … names it. End it and have its machine checked; in a "
    "signed run the owner can expel it",
    then="The second machine says the same, or has `0 differ`: then the first machine computes wrongly.",
    lost="nothing; the model has what was published, whether or not it is the merge of the updates",
)
async def test_a_version_that_differs(folder: Path) -> None:
    (here,) = mine(test_a_version_that_differs)
    async with world(folder, FEW) as w:
        await grown(w)
        newest = await newest_commit(w, 0)
        lied = msgspec.structs.replace(newest.header, usual_length=2.0 * newest.header.usual_length)
        (folder / commit_key(0, newest.version)).write_bytes(frame.draft(frame.Kind.COMMIT, lied).blob)
        code, told = await isthmus("replay", w.run.url)
        assert (code, ", 1 differ" in told) == (1, True), told
        advises(here, told)
        code, again = await isthmus(*command_in(told, "replay"))
        assert (code, "1 commit, 1 differs" in again) == (1, True), again
        code, story = await isthmus(*command_in(told, "explain"))
        assert (code, "by s0" in story) == (0, True), story


@row(
    "replay",
    "fragment …, version … differs: …: is missing, …",
    means="An object of the log is gone (`is missing`) or damaged (`not a commit`, `bytes of digest`), so that this version and "
    "those after it cannot be compared.",
    do="restore it from a backup. isthmus heal … --fragment … says whether the run needs it; if the fragment is sound or has a hole, "
    "it does not, and without a backup these versions are not verified any more",
    then="With the object restored: `0 differ`. Without it, the command with `--from`, if one is named: `0 differ` for the versions after "
    "the next snapshot.",
    lost="without a backup: the proof of these versions, and what `isthmus heal` says",
)
async def test_a_version_whose_object_is_gone(folder: Path) -> None:
    (here,) = mine(test_a_version_whose_object_is_gone)
    async with world(folder, FEW) as w:
        await finished(w)
        hole = folder / commit_key(0, 3)
        kept = hole.read_bytes()
        hole.unlink()
        code, told = await isthmus("replay", w.run.url)
        assert code == 1
        advises(here, told)
        code, healed = await isthmus(*command_in(told, "heal"))
        assert (code, commit_key(0, 3) in " ".join(healed.split())) == (1, True), healed
        hole.write_bytes(kept)
        assert (await isthmus("replay", w.run.url))[0] == 0
        await finished(w)
        hole.unlink()
        told = (await isthmus("replay", w.run.url))[1]
        assert "compares those after the next snapshot" in told
        code, rest = await isthmus(*command_in(told, "replay"))
        assert (code, " 0 differ" in rest) == (0, True), rest


@row(
    "replay",
    "fragment …, versions … to … (by …) cannot be verified: …: …; healed at version …",
    means="`isthmus heal --apply` restarted the fragment after this object was lost. The versions between are in the model.",
    do="nothing, unless a backup has the object: restored, it is verified again",
    then="The line stays, and the exit code is 0.",
    lost="the proof of these versions",
)
async def test_versions_before_a_heal(folder: Path) -> None:
    (here,) = mine(test_versions_before_a_heal)
    async with world(folder, FEW) as w:
        await grown(w)
        path = await spoil_update(w, folder)
        assert path.exists()
        assert (await isthmus("heal", w.run.url, "--apply"))[0] == 0
        code, told = await isthmus("replay", w.run.url)
        assert (code, here.is_in(told), " 0 differ" in told) == (0, True, True), told


@row(
    "replay",
    "… on updates that were rejected as too long and are not in the log: the weights of their inputs are not verified",
    means="A round that rejected an update as too long weighs its other updates beside that one, which the log does not have. "
    "The merge itself is verified, and the exit code is 0.",
    do="nothing; isthmus explain … of such a round names the learner whose update was too long",
    then="The line stays.",
    lost="the proof of these weights",
)
async def test_rounds_that_rejected_an_update_as_too_long(folder: Path) -> None:
    (here,) = mine(test_rounds_that_rejected_an_update_as_too_long)
    async with (
        world(folder, FEW) as w, serving(w.syncer("s1")) as syncer,
        training(w.learner("a"), 0.01), training(w.learner("b"), 0.01),
    ):  # fmt: skip
        await until(lambda: syncer.coordinators[0].head > 10, "it is known what is usual")
        async with training(w.learner("wild"), 1e4):
            for _ in range(50):
                code, told = await isthmus("replay", w.run.url)
                if here.is_in(told):
                    break
                await asyncio.sleep(0.2)
        assert (code, here.is_in(told), " 0 differ" in told) == (0, True, True), told


# --- rights -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """A place for a run that every user may enter."""
    above = Path(tempfile.mkdtemp())
    above.chmod(0o755)
    yield above / "run"
    shutil.rmtree(above)


@row(
    "replay",
    "fragment …, version … is not readable (rights): …",
    means="This user or these credentials may not read an object of this version. It is counted apart from what differs.",
    do="nothing is known to be damaged: give this user the right to read it (in a folder the message names the command), or "
    "replay with a reader's credentials; isthmus doctor … --role reader names missing rights",
    then="`0 differ`, and no more word of rights.",
)
@row(
    "heal",
    "…: may not be read, and was merged: … Nothing is known to be damaged",
    means="In a folder, the user of this command may not read a learner's update. Heal then gives no diagnosis.",
    do="`…` allows it",
    then="Heal gives its diagnosis.",
)
@row(
    "doctor",
    "log: fold: fragment … cannot be folded here: …",
    means="This user or these credentials may not read something that a syncer reads when it starts.",
    do="nothing is known to be damaged: in a folder, let this user read it, by the command that the message names; else run "
    "this with a reader's or a syncer's credentials",
    then="`ok log: fold`",
)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
async def test_an_object_that_may_not_be_read(shared_folder: Path) -> None:
    replayed, healed, examined = mine(test_an_object_that_may_not_be_read)
    run = str(shared_folder)
    async with world(shared_folder, FEW) as w:
        await grown(w)
        commit = await w.log.commit(0, 3)
        assert commit is not None
    for path in (shared_folder, *shared_folder.rglob("*")):
        os.chown(path, 65534, 65534)
    doctor = ("doctor", run, "--role", "reader", "--size", "0.02")
    assert "ok      log: fold" in (await isthmus(*doctor))[1]
    (shared_folder / commit.header.inputs[0].key).chmod(0)
    with as_user():
        code, told = await isthmus("replay", run)
        assert (code, ", 0 differ, 1 not readable (rights)" in told) == (1, True), told
        advises(replayed, told)
        assert " differs: " not in told
        asked = next(words for words in commands_in(told) if words[0] == "doctor")
        code, seen = await isthmus(*asked, "--size", "0.02")
        assert (code, examined.is_in(seen), examined.advice_is_in(seen)) == (1, True, True), seen
        code, told = await isthmus("heal", run)
        assert (code, healed.is_in(told), "readers and syncers" in told) == (2, True, False), told
        command = told.partition("`")[2].partition("` allows it")[0]
        await asyncio.to_thread(subprocess.run, command, shell=True, check=True)
        for words in (("replay", run), ("heal", run)):
            code, told = await isthmus(*words)
            assert code == 0, told
        assert "ok      log: fold" in (await isthmus(*doctor))[1]

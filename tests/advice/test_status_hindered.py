"""What `isthmus status` says of syncers that are kept from their work, and what comes of its advice."""

import asyncio
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from advice.followed import advises, command_in, isthmus, mine, says
from advice.lives import FEW, MANY, Fault, T, said, training, well
from advice.rows import A_GAP, row
from integration.test_full_store import IN_A_DISK_OF_ITS_OWN, own_mounts  # noqa: F401  (a fixture)
from isthmus.errors import Denied, Unavailable
from isthmus.format.layout import Spec, TensorClass
from isthmus.format.records.keys import commit_key
from isthmus.format.rules import Pace, Rules
from isthmus.inspect.health_summary import health
from isthmus.inspect.status import read_status
from isthmus.store import Layer
from isthmus.store.layer import Send
from isthmus.syncer import snapshots
from isthmus_services.board.history import warnings
from isthmus_services.processes import isthmus_command
from support.boards import a_board, ask
from support.world import seed_of, serving, train, until, world


@row(
    "status",
    "0 of … learners merge: 0 of … syncers can serve for now; the last commit is of … waits for …",
    means="Syncers are there, and none of them reaches its store or hears its own messages. Nothing is merged.",
    like="Without `waits for …` the syncer hears nothing of itself on the bus: see its log.",
    do="it goes on by itself once that is over; isthmus doctor … --bus … --role syncer, beside it, says what is wrong",
    then="The doctor names what fails from there. Once it is mended: `… of … learners merge`.",
    lost=A_GAP,
)
async def test_syncers_that_do_not_reach_their_store(folder: Path) -> None:
    (here,) = mine(test_syncers_that_do_not_reach_their_store)
    fault = Fault(Unavailable("connection refused"), mended=True)
    async with world(folder, FEW) as w, serving(fault.of(w).syncer("s1")), training(w.learner("a")):
        await well(w)
        fault.mended = False
        line = await said(here, w)
        code, told = await isthmus(*command_in(line, "doctor"))
        assert code == 0, told  # from here the store can be reached: the doctor must be asked beside the syncer
        fault.mended = True
        await well(w)


@row(
    "status",
    "fragment … may not be read by …",
    means="The store denies this syncer objects that learners or other syncers wrote. Nothing is damaged.",
    like="`fragment … cannot be folded` is damage.",
    do="give it a syncer's rights (isthmus doctor … --role syncer, beside it, names what is missing)",
    then="The syncer tries again by itself, and the fragment is merged.",
    lost=A_GAP,
)
async def test_a_syncer_without_the_right_to_read_updates(folder: Path) -> None:
    (here,) = mine(test_a_syncer_without_the_right_to_read_updates)
    async with world(folder, FEW) as w:
        async with serving(w.syncer("s0"), killed=True) as first:
            await train(w.learner("a"), 10, enough=lambda: min(k.head for k in first.coordinators) >= 2)
        fault = Fault(Denied("403: AccessDenied"), "updates/00000/", ("get",))
        async with serving(fault.of(w).syncer("s1")) as syncer, training(w.learner("a")):
            line = await said(here, w)
            code, told = await isthmus(*command_in(line, "doctor"))
            assert code == 0, told  # from here nothing is denied: it must be asked beside the syncer
            fault.mended = True
            await well(w)
            head = syncer.coordinators[0].head
            await until(lambda: syncer.coordinators[0].head > head, "the fragment goes on")


@row(
    "status",
    "fragment … cannot be folded",
    means="An update or a snapshot that the log needs is damaged or gone, and no syncer has the fragment's state.",
    like="`is slow to be read` and `may not be read` are no damage.",
    do="isthmus heal … says what can be done (run it as the reader, and with --apply as a syncer)",
    then="`isthmus heal` names the object, and what `--apply` restarts the fragment from.",
    lost="the fragment's momentum, unless the object can be restored; and " + A_GAP,
)
async def test_a_fragment_that_cannot_be_folded(folder: Path) -> None:
    (here,) = mine(test_a_fragment_that_cannot_be_folded)
    async with world(folder, FEW) as w:
        async with serving(w.syncer("s0"), killed=True) as first:
            await train(w.learner("a"), 10, enough=lambda: min(k.head for k in first.coordinators) >= 2)
        commit = await w.log.commit(0, 1)
        assert commit is not None
        (folder / commit.header.inputs[0].key).write_bytes(b"gone")
        async with serving(w.syncer("s1")) as syncer, training(w.learner("a")):
            line = await said(here, w)
            heal = command_in(line, "heal")
            code, told = await isthmus(*heal)
            assert code == 1
            assert "--apply restarts it from version" in told
            assert (await isthmus(*heal, "--apply"))[0] == 0
            await well(w)
            head = syncer.coordinators[0].head
            await until(lambda: syncer.coordinators[0].head > head, "the fragment goes on")


async def test_a_fragment_that_cannot_be_folded_is_not_said_to_stand_as_well(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by status, nor by a board that would call a fragment stuck at once."""
    monkeypatch.setattr(warnings, "STUCK_LEAST_S", 0.0)
    monkeypatch.setattr(warnings, "STUCK_PERIODS", 0.0)
    (here,) = mine(test_a_fragment_that_cannot_be_folded)
    async with world(folder, MANY) as w:
        async with serving(w.syncer("s0"), killed=True) as first:
            await train(w.learner("a"), 10, enough=lambda: min(k.head for k in first.coordinators) >= 2)
        commit = await w.log.commit(0, 1)
        assert commit is not None
        (folder / commit.header.inputs[0].key).write_bytes(b"gone")
        async with serving(w.syncer("s1")) as syncer, training(w.learner("a")), a_board(w.log, w) as (url, _):
            await until(lambda: min(k.head for k in syncer.coordinators[1:]) >= 12, "the others are merged")
            line = await said(here, w)
            assert "stand" not in line, line
            cause = (
                "fragment 0 cannot be folded",
                "the log of fragment 0 is damaged",
            )  # by a syncer, by the board itself
            for _ in range(50):
                told = [w["said"] for w in (await ask(url, "state"))["warnings"]]
                if told and told[0].startswith(cause):
                    break
                await asyncio.sleep(0.1)
            assert told[0].startswith(cause), told
            assert not [words for words in told if re.search(r"fragments? 0\b.*(stand|not merged)", words)], told


@row(
    "status",
    "… slow to be read by …, which leaves … to others; nothing is known to be damaged",
    means="The syncer takes longer than its silence allows to read this fragment's log.",
    do="see whether its machine or its way to the store is overloaded",
    then="The syncer serves the fragment as soon as it has read it.",
    lost=A_GAP,
)
async def test_a_syncer_whose_way_to_the_store_is_slow(folder: Path) -> None:
    (here,) = mine(test_a_syncer_whose_way_to_the_store_is_slow)
    slow = asyncio.Event()

    class Slow(Layer):
        async def _through(self, operation: str, key: str, send: Send[T]) -> T:
            if operation == "get" and key.startswith("commits/00000/"):
                await slow.wait()
            return await send()

    async with world(folder, FEW) as w:
        slow.set()
        async with serving(w.syncer("s0")), serving(w.through(Slow).syncer("s1")), training(w.learner("a")):
            await well(w)
            slow.clear()
            await said(here, w)
            slow.set()
            await well(w)


@row(
    "status",
    "fragment … has a hole in its history (the run goes on): isthmus heal … names what is missing",
    means="A syncer found a hole in the log below its snapshot. The run goes on; a replay ends before the hole. Whoever "
    "asks may not list commits, and so does not see which one is missing.",
    do="isthmus heal … names what is missing",
    then="`isthmus heal` names the object. Once it is restored from a backup, the sentence goes away within the time after "
    "which syncers look again: ten minutes.",
)
async def test_a_hole_that_only_a_syncer_sees(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here,) = mine(test_a_hole_that_only_a_syncer_sees)
    monkeypatch.setattr(snapshots, "WHOLE_EVERY_S", 0.2)
    pace = Pace(heartbeat_s=0.2, silence_s=0.8, snapshot_every=4)
    async with world(folder, seed_of(Rules(fragments=2, sync_every=4), pace)) as w, serving(w.syncer("s1")) as syncer:
        unlisted = Fault(Denied("403"), "commits/", ("list",)).of(w)

        async def line() -> str:
            return health(await read_status(unlisted.log, w.bus, w.runtime, 0.5), w.run.url, w.bus.url).said

        async with training(w.learner("a")):
            await until(lambda: min(k.head for k in syncer.coordinators) >= 8, "there are snapshots")
            hidden = folder / commit_key(0, 2)
            kept = hidden.read_bytes()
            hidden.unlink()
            await until(lambda: syncer.coordinators[0].hole, "the syncer sees it")
            advises(here, found := await line())
            code, told = await isthmus(*command_in(found, "heal"))
            assert code == 1
            assert commit_key(0, 2) in told
            hidden.write_bytes(kept)
            await until(lambda: not syncer.coordinators[0].hole, "the syncer looks again")
            assert not says(here, await line())


@row(
    "status",
    "the disk of … is full: … are left",
    means="The disk of a run in a folder has no room for another checkpoint. Learners train on; little or nothing is merged.",
    like="A bucket is never said to be full: the processes' logs have what its server answers.",
    do="enlarge it while they run, or make room on it: isthmus gc … --apply frees what the run does not need and is over an "
    "hour old, which is little in a young or small run; if that is not enough, stop all processes of the run (what learners "
    "have trained since their last checkpoints is lost then: none can be stored), wait until they have ended, delete the "
    "rest by isthmus gc … --apply --keep 8 --min-age 0 and start them again",
    then="The sentence goes away, and processes that still run go on by themselves.",
    lost="if the processes go on: "
    + A_GAP
    + ". If learners are stopped: what they have trained since their last checkpoints",
)
@pytest.mark.tier("all")
@pytest.mark.usefixtures("own_mounts")
async def test_a_disk_that_is_full(folder: Path, tmp_path: Path) -> None:
    """The run itself fills a disk of 64 MB: only what the last command deletes makes room."""
    (here,) = mine(test_a_disk_that_is_full)
    specs = [Spec("layer", (400_000,), "float32", TensorClass.DENSE)]
    rules = Rules(fragments=1, sync_every=1, codec_up="f32", codec_down="f32")
    pace = Pace(heartbeat_s=0.2, silence_s=0.8, snapshot_every=4)
    async with (
        world(folder, seed_of(rules, pace, specs)) as w,
        serving(w.syncer("s1"), killed=True) as syncer,
        training(w.learner("a")),
    ):
        await until(lambda: syncer.coordinators[0].head >= 16, "it has grown")
    disk, out, isthmus_ = tmp_path / "disk", tmp_path, " ".join(isthmus_command())
    disk.mkdir()
    size = 1 + sum(path.stat().st_size + 4096 for path in folder.rglob("*")) // 2**20
    script = f"""
        mount -t tmpfs -o size={size + 4}m tmpfs {disk} && cp -r {folder} {disk}/run || exit 99
        {isthmus_} status {disk}/run > {out}/full
        sed -n 's/.*isthmus \\(gc .*\\) frees what.*/\\1/p' {out}/full > {out}/first
        sed -n 's/.*by isthmus \\(gc .*\\) and start.*/\\1/p' {out}/full > {out}/then
        {isthmus_} $(cat {out}/first) > {out}/gc 2>&1 || exit 98
        {isthmus_} $(cat {out}/then) >> {out}/gc 2>&1 || exit 97
        {isthmus_} status {disk}/run > {out}/roomy
    """
    command_ = [*IN_A_DISK_OF_ITS_OWN, "sh", "-c", script]
    done = await asyncio.to_thread(subprocess.run, command_, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + (out / "gc").read_text()
    advises(here, (out / "full").read_text())
    assert not says(here, (out / "roomy").read_text())


@row(
    "status",
    "processes of another run (…) speak on the bus in this run's folder: a mount was lost, and this run was created in its empty "
    "place, or its folder was replaced while they ran",
    means="The bus of a run in a folder is a file there. Two runs have one only if the folder itself was replaced. A learner whose "
    "loop creates a run that is missing (`create=`) does so in the empty place of a mount that was lost.",
    do="if … should be on a mount (findmnt -T …), end the processes of this run, mount it again and start them again: they join the "
    "run that was there; else end the processes of the other run",
    then="Once the folder is the old one, its processes go on by themselves, and status shows their run.",
    lost="the steps that learners trained in the other run",
)
async def test_a_run_that_was_made_in_the_empty_place_of_a_mount(folder: Path) -> None:
    (here,) = mine(test_a_run_that_was_made_in_the_empty_place_of_a_mount)
    away = folder.with_name("away")
    async with world(folder, FEW) as w, serving(w.syncer("s1")), training(w.learner("a")):
        await well(w)
        assert (await read_status(w.log, w.bus, w.runtime, 0.1)).intruders == []
        folder.rename(away)
        code, told = await isthmus("init", str(folder), "--model", "advice.heals:model")
        assert code == 0, told
        for _ in range(100):
            code, told = await isthmus("status", str(folder), "--check")
            if here.is_in(told):
                break
        assert code == 1
        advises(here, told)
        assert w.run.digest.hex()[:16] in told
        await asyncio.to_thread(subprocess.run, ["findmnt", "-T", str(folder)], check=True, capture_output=True)
        shutil.rmtree(folder)
        away.rename(folder)
        await well(w)

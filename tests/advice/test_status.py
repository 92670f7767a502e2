"""What `isthmus status` says of processes that are not there, and what comes of its advice."""

import asyncio
import os
import re
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from redis import Redis

from advice.followed import advises, command_in, isthmus, mine, says
from advice.lives import FEW, PACE, command, said, status, training, well
from advice.rows import A_GAP, row
from integration.test_full_store import IN_A_DISK_OF_ITS_OWN, own_mounts  # noqa: F401  (a fixture)
from isthmus.bus import default_bus
from isthmus.format.records.keys import commit_key
from isthmus.inspect.live import Live
from isthmus.inspect.status import read_status
from isthmus_services.processes import isthmus_command
from isthmus_services.servers import redis_server
from support.world import World, serving, train, until, world


@row(
    "status",
    "0 of … learners merge; no syncer is heard; nothing was ever committed",
    means="Learners train, and no syncer runs, or none reaches this bus. Each learner trains by itself.",
    like="A bus that is away is said as `the bus cannot be reached`; a syncer that is there and cannot work as `0 of "
    "… syncers can serve for now`.",
    do="start one with: isthmus syncer … --bus …",
    then="Within seconds `… of … learners merge`. What the learners trained meanwhile is merged.",
    lost=A_GAP,
)
async def test_a_run_without_a_syncer(folder: Path) -> None:
    (here,) = mine(test_a_run_without_a_syncer)
    async with world(folder, FEW) as w, training(w.learner("a")):
        line = await said(here, w)
        async with command(folder.parent, *command_in(line, "syncer")):
            assert (await well(w)).startswith("1 of 1 learners merge")


@row(
    "status",
    "0 of … learners merge; no syncer is heard; the last commit is of …",
    means="Every syncer that was heard has said that it stops, as SIGTERM makes it do. Each learner trains by itself.",
    like="A syncer that fell silent without such a word: then the advice is to look first whether it is frozen.",
    do="start one with: isthmus syncer … --bus …",
    then="Within seconds `… of … learners merge`.",
    lost=A_GAP,
)
async def test_the_command_for_a_syncer_has_the_quorum_of_the_one_before(folder: Path) -> None:
    (here,) = mine(test_the_command_for_a_syncer_has_the_quorum_of_the_one_before)
    async with world(folder, FEW) as w, training(w.learner("a")) as a, training(w.learner("b")) as b:
        async with serving(w.syncer("s1", msgspec.structs.replace(PACE, quorum=2))):
            assert (await well(w)).startswith("2 of 2 learners merge")
        line = await said(here, w)
        assert "frozen" not in line
        assert command_in(line, "syncer")[-2:] == ["--quorum", "2"], line
        async with command(folder.parent, *command_in(line, "syncer")):
            await well(w)
        a.set()
        b.set()


@row(
    "status",
    "isthmus status: no run at …: check the URL. If there was one, bring it back (is a mount or a disk lost? its processes' "
    "logs say): one that is created in its place is another run",
    means="The folder or the bucket is there and has no run. Other commands say the same. While its mount is lost, learners train "
    "on, and say `… is gone: was a mount lost?` in their logs; a run that is created in its place is another one, and they do "
    "not take it for theirs.",
    like="A mistyped address. With `isthmus status --watch` from before, the view goes on, and says that the folder is gone.",
    do="bring it back",
    then="Everything goes on by itself within seconds.",
    lost="nothing, once the folder is back; meanwhile no checkpoint can be stored",
)
async def test_a_run_whose_folder_is_lost(folder: Path) -> None:
    (here,) = mine(test_a_run_whose_folder_is_lost)
    async with world(folder, FEW) as w, serving(w.syncer("s1")), training(w.learner("a")):
        assert (await well(w)).startswith("1 of 1")
        await asyncio.to_thread(folder.rename, folder.with_name("elsewhere"))
        code, told = await isthmus("status", w.run.url)
        assert code == 2
        advises(here, told)
        await asyncio.sleep(1.0)
        assert not folder.exists(), "what is made in its place would stand in the way"
        await asyncio.to_thread(folder.with_name("elsewhere").rename, folder)
        assert (await well(w)).startswith("1 of 1")


@row(
    "status",
    "no learner trains, and none was ever heard on this bus; …",
    means="The bus holds no message of a learner: none was ever started, or the bus was emptied, or it is another one.",
    do="start one, or check that … is the bus of the run's learners",
    then="`… of … learners merge`.",
)
async def test_a_run_that_no_learner_ever_trained(folder: Path) -> None:
    (here,) = mine(test_a_run_that_no_learner_ever_trained)
    async with world(folder, FEW) as w, serving(w.syncer("s1")):
        await said(here, w)
        async with training(w.learner("a")):
            await well(w)


@row(
    "status",
    "no learner and no syncer was heard on …, though the last commit is of …, less than a minute ago: they have another bus, or "
    "have ended and this one was emptied",
    means="A syncer wrote a commit within the last minute, and this bus has no message of a process. Either the processes use another "
    "bus, or all of them ended and the bus lost its messages, as a server in memory does when its machine restarts.",
    like="A bus that was emptied a moment ago, for a heartbeat.",
    do="look on their machines whether they live (pgrep -af isthmus; for a loop of your own, the name of its script): if so, give "
    "--bus the URL that they have: redis://…; store: for the run's own store; or, for the bus.sqlite of a run in a folder, no "
    "--bus and no ISTHMUS_BUS; if not, start them by their old commands",
    then="`… of … learners merge`.",
)
async def test_a_status_that_listens_to_another_bus(folder: Path) -> None:
    (here,) = mine(test_a_status_that_listens_to_another_bus)
    async with world(folder, FEW) as w, serving(w.syncer("s1")) as syncer, training(w.learner("a")):
        await until(lambda: min(k.head for k in syncer.coordinators) >= 1, "it goes on")
        code, out = await isthmus("status", w.run.url, "--bus", default_bus(f"{folder}-other") or "", "--check")
        assert code == 1
        advises(here, out)
        await well(w)
    for path in folder.glob("bus.sqlite*"):
        path.unlink()
    await said(here, w)
    async with serving(w.syncer("s1")), training(w.learner("a")):
        await well(w)


@row(
    "status",
    "the bus cannot be reached: sqlite://…: file is not a database: it is unknown which processes are live; the last commit is of …",
    means="The file of the embedded bus is damaged. Nothing that it holds is needed. Learners train on meanwhile; nothing is merged.",
    do="delete …, …-wal and …-shm: processes make the bus anew, and nothing that was merged is lost",
    then="`… of … learners merge`, without a restart.",
    lost=A_GAP,
)
async def test_a_bus_whose_file_is_damaged(folder: Path) -> None:
    (here,) = mine(test_a_bus_whose_file_is_damaged)
    async with world(folder, FEW) as w, serving(w.syncer("s1")), training(w.learner("a")):
        await well(w)
        for path in folder.glob("bus.sqlite*"):  # newer pages are in the file beside it
            path.write_bytes(os.urandom(path.stat().st_size))
        told = await said(here, w)
        for path in re.findall(r"delete (\S+), (\S+) and (\S+):", told)[0]:
            Path(path).unlink(missing_ok=True)
        await well(w)


@row(
    "status",
    "the bus cannot be reached: …: it is unknown which processes are live; the last commit is of …",
    means="This machine gets no answer from the bus. Learners train on meanwhile; nothing is merged while the syncers "
    "have none either.",
    like="Only this machine is cut off: the time of the last commit moves on.",
    do="give --bus the URL that the run's syncers have; if it is this one, start the server that should answer there: nothing "
    "that was in it has to be restored, and an empty Redis will do",
    then="`… of … learners merge`. Every message is sent again, also to an empty Redis.",
    lost=A_GAP,
)
async def test_a_bus_that_is_away(folder: Path, tmp_path: Path) -> None:
    (here,) = mine(test_a_bus_that_is_away)
    with redis_server(tmp_path / "first") as redis:
        port = int(redis.url.rpartition(":")[2])
        async with world(folder, FEW, redis.url) as w, serving(w.syncer("s1")), training(w.learner("a")):
            await well(w)
            assert redis.process is not None
            redis.process.kill()
            await asyncio.to_thread(redis.process.wait)
            await said(here, w)
            with redis_server(tmp_path / "second", port=port):
                await well(w)


@row(
    "status",
    "0 of … learners merge; no process is heard, and none has left (the last commit is of …): all were killed or are cut "
    "off, or the bus refuses their messages",
    means="Learners and syncers were heard once, did not say that they leave, and are all silent now.",
    like="An embedded bus on a full disk, or a full Redis that does not tell its readers so (without `+info`): such "
    "readers see a run without any messages.",
    do="look first whether they live, on each of their machines: pgrep -af isthmus (for a training loop of your own, the "
    "name of its script in place of isthmus). Beside those that live, isthmus doctor … --bus … --role syncer says what "
    "keeps them from the bus; start the others again by their old commands",
    then="`pgrep` prints the processes that live. Once the bus takes messages, `… of … learners merge`: processes that live go on by themselves. A second process "
    "under the name of one that lives would end it.",
    lost=A_GAP,
)
@row(
    "status",
    "0 of … learners merge; no process is heard; the syncers have stopped, and no learner has left (the last commit is of …): "
    "the learners were killed or are cut off, or the bus refuses their messages",
    means="Each syncer that was heard has said that it stops, as at SIGTERM. The learners did not say that they leave, and are "
    "silent.",
    like="Training loops of one's own that SIGTERM ends at once: they say nothing when they end (docs/your-loop.md).",
    do="look first whether they live, on each of their machines: pgrep -af isthmus (for a training loop of your own, the "
    "name of its script in place of isthmus). Beside those that live, isthmus doctor … --bus … --role syncer says what "
    "keeps them from the bus; start the others again by their old commands",
    then="`pgrep` prints the processes that live.",
    lost=A_GAP,
)
@pytest.mark.parametrize("killed", [True, False], ids=["all", "learners"])
async def test_processes_that_were_all_killed(folder: Path, killed: bool) -> None:
    here = mine(test_processes_that_were_all_killed)[not killed]
    async with world(folder, FEW) as w:
        async with training(w.learner("a")), serving(w.syncer("s1"), killed=killed):
            await well(w)
        line = await said(here, w)
        assert "no messages come from" not in line
        assert "start one with" not in line
        await names_a_process_that_lives(line, w)
        code, told = await isthmus(*command_in(line, "doctor"))
        assert code == 0, told
        async with serving(w.syncer("s1")), training(w.learner("a")):
            await well(w)


@row(
    "status",
    "0 of … learners merge; no process is heard, and none has left (the last commit is of …): the bus refuses their "
    "messages, since its memory is full (… of … MB)",
    means="Redis has no room for another message. Learners train on meanwhile, and nothing is merged.",
    do="raise its maxmemory, or delete what else this server stores: processes that live go on by themselves",
    then="`… of … learners merge`, without a restart.",
    lost=A_GAP,
)
async def test_a_bus_that_is_full(folder: Path, tmp_path: Path) -> None:
    (here,) = mine(test_a_bus_that_is_full)
    with redis_server(tmp_path / "redis") as redis, Redis.from_url(redis.url) as client:
        async with world(folder, FEW, redis.url) as w, serving(w.syncer("s1")), training(w.learner("a")):
            await well(w)
            client.config_set("maxmemory", 1)
            line = await said(here, w)
            assert "no messages come from" not in line
            assert "start one with" not in line
            client.config_set("maxmemory", 0)
            await well(w)


@row(
    "status",
    "0 of … learners merge; no process is heard, and none has left (the last commit is of …): the bus refuses their "
    "messages, since the server is a replica now",
    means="Redis failed over, and this address still leads to the server that was demoted. Learners train on meanwhile, and "
    "nothing is merged.",
    do="make it the primary again, or let the bus's name lead to the primary: processes that live go on by themselves",
    then="`… of … learners merge`, without a restart.",
    lost=A_GAP,
)
async def test_a_bus_that_was_demoted(folder: Path, tmp_path: Path) -> None:
    (here,) = mine(test_a_bus_that_was_demoted)
    with redis_server(tmp_path / "redis") as redis, Redis.from_url(redis.url) as client:
        async with world(folder, FEW, redis.url) as w, serving(w.syncer("s1")), training(w.learner("a")):
            await well(w)
            client.execute_command("REPLICAOF", "127.0.0.1", "1")
            await said(here, w)
            client.execute_command("REPLICAOF", "NO", "ONE")
            await well(w)


@row(
    "status",
    "0 of … learners merge; no process is heard, and none has left (the last commit is of …): the bus refuses their "
    "messages, since it cannot write to its disk",
    means="Redis could not store its last snapshot, and takes no writes until it can. Learners train on meanwhile, and nothing is "
    "merged.",
    do="free that disk (its log names the file); or, since nothing in a bus has to be kept, redis-cli CONFIG SET "
    "stop-writes-on-bgsave-error no: processes that live go on by themselves",
    then="`… of … learners merge`, without a restart.",
    lost=A_GAP,
)
async def test_a_bus_that_cannot_write_to_its_disk(folder: Path, tmp_path: Path) -> None:
    (here,) = mine(test_a_bus_that_cannot_write_to_its_disk)
    with redis_server(tmp_path / "redis") as redis, Redis.from_url(redis.url) as client:
        async with world(folder, FEW, redis.url) as w, serving(w.syncer("s1")), training(w.learner("a")):
            await well(w)
            (tmp_path / "taken").mkdir()
            client.config_set("dir", str(tmp_path))
            client.config_set("dbfilename", "taken")
            client.config_set("save", "1 1")
            line = await said(here, w)
            asked = re.findall(r"redis-cli (CONFIG SET \S+ no)", line)
            assert await w.bus.refusing() is not None
            client.execute_command(*asked[0].split())
            await well(w)
            assert await w.bus.refusing() is None, "it cannot save, and takes messages all the same"


@row(
    "status",
    "isthmus status: redis://…: the server asks for a password: redis://USER:PASSWORD@host:port, or ISTHMUS_BUS_USER and "
    "ISTHMUS_BUS_PASSWORD_FILE…",
    means="The bus lets nobody in without a password, and this shell has none. If the server got its password lately, learners "
    "and syncers wait, train on, and end 300 s after the change (their logs: `a request that worked before is refused`).",
    do="redis://USER:PASSWORD@host:port, or ISTHMUS_BUS_USER and ISTHMUS_BUS_PASSWORD_FILE",
    then="`… of … learners merge`. Processes go on by themselves once the server takes them again.",
    lost="where processes ended: what learners trained since their newest update and checkpoint",
)
async def test_a_bus_that_got_a_password(folder: Path, tmp_path: Path) -> None:
    (here,) = mine(test_a_bus_that_got_a_password)
    with redis_server(tmp_path / "redis") as redis, Redis.from_url(redis.url) as client:
        async with world(folder, FEW, redis.url) as w, serving(w.syncer("s1")), training(w.learner("a")):
            await well(w)
            client.config_set("requirepass", "sesame")
            code, told = await isthmus("status", w.run.url, "--bus", redis.url)
            assert code == 2
            advises(here, told)
            code, told = await isthmus("status", w.run.url, "--bus", redis.url.replace("//", "//:sesame@"))
            assert "learners merge" in told, told
            client.config_set("requirepass", "")
            await well(w)


async def names_a_process_that_lives(line: str, w: World) -> None:
    """Run the `pgrep` that a line advises beside a process with the command line of a learner, and one of another."""
    (look,) = re.findall(r"pgrep -af isthmus", line)
    lives = await asyncio.create_subprocess_exec("bash", "-c", f"exec -a 'isthmus learner {w.run.url}' sleep 60")
    try:
        for _ in range(100):
            told = await asyncio.to_thread(subprocess.run, look.split(), capture_output=True, text=True, check=False)
            if f"{lives.pid} isthmus learner {w.run.url}" in told.stdout:
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"not named: {told.stdout}")
    finally:
        lives.kill()
        await lives.wait()


def tells_a_frozen_process(line: str) -> None:
    """Run the `ps` and the `kill` that a line advises on a process that is stopped."""
    ps, wake = (re.search(pattern_, line) for pattern_ in (r"ps -o stat= -p PID", r"kill -CONT PID"))
    assert ps, line
    assert wake, line
    with subprocess.Popen(["sleep", "60"]) as process:
        try:

            def state() -> str:
                words = ps[0].replace("PID", str(process.pid)).split()
                return subprocess.run(words, capture_output=True, text=True, check=True).stdout[0]

            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            assert state() == "T"
            subprocess.run(wake[0].replace("PID", str(process.pid)).split(), check=True)
            os.waitid(os.P_PID, process.pid, os.WCONTINUED)
            assert state() != "T"
        finally:
            process.kill()


@row(
    "status",
    "no messages come from …: … killed or … cut off, or … another bus than …",
    means="These learners were heard once, did not say that they leave, and are silent now. The others are merged.",
    like="A spot machine that was taken away on purpose, or a learner that exploded and whose place another name took: then nothing is to be done, and `--check` still ends with 0. Or a "
    "learner that is started again and again, and dies each time before it joins (bad data, too little memory to load the "
    "model): its log then has more lines of `isthmus learner` with `starts:` than lines with `joined`. The end of its log "
    "says why. If it does not, the kernel may have ended it for want of memory: dmesg | grep -i oom, or the reason "
    "OOMKilled of its container, whose count of restarts rises",
    do="on its machine, pgrep -af isthmus (a loop of your own: the name of its script) says whether it lives. If not, start it again "
    "under its name: it goes on from its checkpoint, if it has one. If it does, ps -o stat= -p PID (its first log line has it) says T if it is frozen (kill -CONT PID wakes it) "
    "and D if it waits for a disk; else isthmus doctor … --role learner --learner … --bus ITS_BUS, there, says whether that is the "
    "bus of the run's syncers. --check ends with 1 while one is away with --expect …",
    then="The sentence goes away, and its incarnation is one higher.",
    lost="what it trained since its last checkpoint and was not merged",
)
async def test_a_learner_that_was_killed(folder: Path) -> None:
    (here,) = mine(test_a_learner_that_was_killed)
    async with world(folder, FEW) as w, serving(w.syncer("s1")), training(w.learner("a")):
        async with training(w.learner("b", checkpoint_s=0.1)):
            assert (await well(w)).startswith("2 of 2")
        tells_a_frozen_process(await said(here, w))
        assert (await status(w))[0] == 0
        again = w.learner("b", checkpoint_s=0.1)
        async with training(again):
            assert (await well(w)).startswith("2 of 2")
            assert again.incarnation == 2
            assert again.history.step > 0
            assert not says(here, await well(w))


@pytest.mark.tier("all")
async def test_a_learner_that_dies_before_it_joins(folder: Path, tmp_path: Path) -> None:
    """Its log has what the row tells to look for."""
    (here,) = mine(test_a_learner_that_was_killed)
    (tmp_path / "own.py").write_text("def train(task):\n    raise MemoryError('no room for the data')\n")
    command = [*isthmus_command(), "learner", str(folder), "--learner", "b", "--steps", "9", "--train", "own:train"]
    environment, log = {**os.environ, "PYTHONPATH": str(tmp_path)}, ""
    async with world(folder, FEW) as w, serving(w.syncer("s1")), training(w.learner("a")):
        async with training(w.learner("b", checkpoint_s=0.1)):
            assert (await well(w)).startswith("2 of 2")
        for _ in range(2):
            ended = await asyncio.create_subprocess_exec(
                *command, env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
            )
            log += (await ended.communicate())[0].decode()
        await said(here, w)
    assert (log.count(" starts: "), log.count(" joined ")) == (2, 0), log
    assert log.splitlines()[-1].endswith("no room for the data")


@row(
    "status",
    "… has joined … times since its last checkpoint and went on after step … each time",
    means="The learner is started again and again, and loses each time what it trained. Two machines may run it under one "
    "name: each that joins ends the other. Or it dies within its first minute, for instance of memory.",
    like="A learner that was killed three times within a minute by chance: the sentence goes with its next checkpoint.",
    do="two processes have its name, or it dies before it can store one; its log says which",
    then="With one process left, or once the learner lives long enough to store a checkpoint, the sentence goes away.",
    lost="what each life trained and had not merged",
)
async def test_a_learner_that_restarts_in_vain(folder: Path) -> None:
    (here,) = mine(test_a_learner_that_restarts_in_vain)
    async with world(folder, FEW) as w, serving(w.syncer("s1")):
        await train(w.learner("a", checkpoint_s=0.05), 20, done=False)
        await w.learner("a").join()
        async with training(w.learner("a")):
            await well(w)
        again = w.learner("a")
        async with training(again):
            line = await said(here, w)
            assert again.history.step > 0
            assert (
                f"a has joined 3 times since its last checkpoint and went on after step {again.history.step} ea" in line
            )
            live = Live(w.log, w.store, w.bus, w.runtime)
            await live.begin()
            following = asyncio.ensure_future(live.run())
            await until(lambda: bool(live.status().restarts), "a reader that goes on looking sees it, too")
            following.cancel()
        async with training(w.learner("a", checkpoint_s=0.1)):
            assert not says(here, await well(w))


@row(
    "status",
    "… a quorum of …, and … ever heard: … rounds wait for every learner, and until their deadline for one that stalls",
    means="This syncer was started with a `--quorum` that this run's learners cannot reach. It merges all the same.",
    like="A run whose other learners are yet to be started.",
    do="start the other learners, or start … again with --quorum K, where K is at most …",
    then="The sentence goes away.",
)
async def test_a_quorum_that_cannot_be_reached(folder: Path) -> None:
    (here,) = mine(test_a_quorum_that_cannot_be_reached)
    async with world(folder, FEW) as w, training(w.learner("a")), training(w.learner("b")):
        async with serving(w.syncer("s1", msgspec.structs.replace(PACE, quorum=5))):
            line = await said(here, w)
            assert "s1 has a quorum of 5, and 2 learners" in line
            assert "quorum 5, " in (await isthmus("status", w.run.url, "--bus", w.bus.url))[1]
        async with serving(w.syncer("s1", msgspec.structs.replace(PACE, quorum=2))):
            assert not says(here, await well(w))


@row(
    "status",
    "… learners expected, … heard",
    means="`--expect` asks for more learners than are at work.",
    do="start the others, or expect fewer",
    then="`--check` ends with 0.",
)
async def test_fewer_learners_than_are_expected(folder: Path) -> None:
    (here,) = mine(test_fewer_learners_than_are_expected)
    async with world(folder, FEW) as w, serving(w.syncer("s1")), training(w.learner("a")):
        await said(here, w, "--expect", "2")
        await well(w, "--expect", "1")
        async with training(w.learner("b")):
            await well(w, "--expect", "2")


@row(
    "status",
    "no learner trains: … of … learners stopped; the last commit is of …; … left before … last step",
    means="All learners have left, and some before their last step: by SIGTERM or by an error, which its log has.",
    do="unless the run is to end here, start what stopped again: each learner goes on from its checkpoint (one that was "
    "started in the last minute may not have joined yet: its log says «joined» when it has, or why it could not)",
    like="With `… learners are done, … stopped before`, the others had done all their steps.",
    then="`… of … learners merge`, and in the end all are done.",
    lost="nothing; work that no syncer answered is named, with its share",
)
async def test_a_learner_that_was_told_to_stop(folder: Path) -> None:
    (here,) = mine(test_a_learner_that_was_told_to_stop)
    async with world(folder, FEW) as w, serving(w.syncer("s1")):
        await train(w.learner("a", checkpoint_s=0.1), 20, done=False)
        await said(here, w)
        again = w.learner("a", checkpoint_s=0.1)
        async with training(again) as done:
            await well(w)
            assert again.history.step > 0
            done.set()
        assert (await well(w)).startswith("no learner trains: 1 of 1 learners are done; ")


@row(
    "status",
    "no learner trains: … of … learners stopped; …; … left before … last step; … left with tokens that no syncer answered, "
    "which are not in the model",
    means="All learners were stopped while no syncer was there. What they had sent since the last commit is in their checkpoints "
    "and in the store.",
    do="unless the run is to end here, bring their work in soon (it is merged then, unless a syncer has gone on without it, but an "
    "update counts for at most four times the usual length, however many steps it holds): start them again with --wait-at-end 600 "
    "(a loop of your own: link.close(wait=600)) and, once they have joined, a syncer: isthmus syncer … --bus …",
    then="`… of … learners merge`, with their work.",
    lost="what a learner had sent, if a syncer goes on without it: it is too old then",
)
async def test_learners_that_were_stopped_while_no_syncer_was_there(folder: Path) -> None:
    (here,) = mine(test_learners_that_were_stopped_while_no_syncer_was_there)
    async with world(folder, FEW) as w:
        for name in "ab":
            await train(w.learner(name, checkpoint_s=0.1), 20, done=False)
        line = await said(here, w)
        assert re.search(r"a \(\d+%\), b \(\d+%\) left with tokens", line), line
        again = [w.learner(name, checkpoint_s=0.1) for name in "ab"]

        def sent() -> bool:
            """Whether each has sent an update of the fragment with all steps of before."""
            held = [max((a.header.steps for a in agent.uplink.attempts[0].values()), default=0) for agent in again]
            return min(held) >= 20

        async with training(again[0]), training(again[1]):
            await until(sent, "they have joined, and sent their work")
            async with command(folder.parent, *command_in(line, "syncer")):
                await until((folder / commit_key(0, 1)).exists, "it is merged")
                await well(w)
        merged = await w.log.commit(0, 1)
        assert merged is not None
        assert {(given.learner, given.steps >= 20) for given in merged.header.inputs} == {("a", True), ("b", True)}


@row(
    "status",
    "… left with tokens that no syncer answered, which are not in the model",
    means="No syncer is there, others train on, and these learners have ended with work that none has merged.",
    like="`no learner trains: …; … left with tokens that no syncer answered`, if no learner trains on: then the advice names the syncer's command, too.",
    do="start it again before a syncer, with --wait-at-end 600 (a loop of your own: link.close(wait=600)): once a syncer has "
    "gone on without that work, it is too old",
    then="With a syncer, which the next line names, it ends once its work is merged.",
    lost="nothing yet. If the syncer comes first, all of that work",
)
async def test_work_of_one_that_left_while_no_syncer_was_there(folder: Path) -> None:
    (here,) = mine(test_work_of_one_that_left_while_no_syncer_was_there)
    async with world(folder, FEW) as w, training(w.learner("b")):
        await train(w.learner("a"), 100)
        await said(here, w)
        again = asyncio.ensure_future(train(w.learner("a"), 0, wait_s=60.0))
        await asyncio.sleep(1.0)  # it joins
        async with serving(w.syncer("s1")):
            await again
            assert "left with tokens" not in await well(w)
        beat = (await read_status(w.log, w.bus, w.runtime, 1.0)).hearing.learners["a"].heartbeat
        assert beat is not None
        assert beat.ledger.merged > 0.5 * beat.ledger.processed


@row(
    "status",
    "no learner trains: … of … learners are done; nothing was ever committed; what they learnt is not in the run",
    means="The learners trained all their steps without a syncer. Their checkpoints and last updates are in the store.",
    do="bring their work in soon (it is merged then, unless a syncer has gone on without it, but an update counts for at most "
    "four times the usual length, however many steps it holds; a model that was merged once may be worse than a learner's own): start them again with --wait-at-end 600 (a loop of your own: link.close(wait=600)) and, once "
    "they have joined, a syncer: isthmus syncer … --bus …",
    then="The learners send their work again and end once it is merged; then the sentence is gone. It is as if they had met "
    "once: each fragment is merged from their last updates, with all steps in them.",
    lost="no token; but one round of long updates brings less than many rounds would have",
)
@row(
    "status",
    "done; their pending tokens are not in the model, but in their checkpoints: …",
    means="Below the table of learners: the share of their tokens that no commit has settled.",
    like="A few per cent after a run that ended well: steps after the last update, which no round takes.",
    do="nothing, if it is a few per cent; else the lines above the tables say how to bring the work in",
    then="It falls once the work is merged.",
)
@row(
    "status",
    "done; their pending tokens are not in the model, nor all in a checkpoint: …",
    means="Below the table of learners: these stored no checkpoint of their last steps. checkpoint_s was infinite, the store refused "
    "it, or the loop ended in the middle of a step. What they had sent is in the store.",
    do="the lines above the tables say how to bring in the updates that were sent; the steps after the last update are lost. The "
    "learner's last log lines say why it has no checkpoint",
    then="The share falls once these updates are merged.",
    lost="the steps after the last update",
)
async def test_a_run_without_a_syncer_that_is_over(folder: Path) -> None:
    here, pending, unkept = mine(test_a_run_without_a_syncer_that_is_over)
    async with world(folder, FEW) as w:
        await train(w.learner("b"), 10)
        found = (await isthmus("status", w.run.url, "--bus", w.bus.url))[1]
        assert (unkept.is_in(found), pending.is_in(found)) == (True, False)
    shutil.rmtree(folder)
    async with world(folder, FEW) as w:
        await train(w.learner("a"), 10, keep=True)
        found = (await isthmus("status", w.run.url, "--bus", w.bus.url))[1]
        assert (unkept.is_in(found), pending.is_in(found)) == (False, True)
        line = await said(here, w)
        async with training(w.learner("a")) as again:
            async with command(folder.parent, *command_in(line, "syncer")):
                await until((folder / commit_key(0, 1)).exists, "it is merged")
                await well(w)
            again.set()
        merged = await w.log.commit(0, 1)
        assert merged is not None
        assert merged.header.inputs[0].learner == "a"


@row(
    "status",
    "the clock of … is … s … this machine's",
    means="A commit that was announced just now has a time that is minutes off: the clock of that syncer's machine, or "
    "of this one, is wrong. Rounds and merges do not go by these clocks.",
    do="set both by NTP (timedatectl set-ntp true); garbage collection and every time that is shown go by these clocks",
    then="The sentence goes away once each fragment has a commit of the clock that was set.",
)
@pytest.mark.parametrize("ahead_s", [3600.0, -3600.0])
async def test_a_syncer_whose_clock_is_an_hour_off(folder: Path, ahead_s: float) -> None:
    (here,) = mine(test_a_syncer_whose_clock_is_an_hour_off)
    off = ahead_s
    async with world(folder, FEW) as w:
        skewed = replace(w, runtime=replace(w.runtime, wall=lambda: w.runtime.wall() + off))
        async with serving(skewed.syncer("s1")), training(w.learner("a")):
            line = await said(here, w)
            assert f"s1 is {3600 if ahead_s > 0 else 3599}" in line or f"s1 is {abs(ahead_s):.0f}" in line
            off = 0.0
            await well(w)

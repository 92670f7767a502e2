"""What `isthmus status` says of a run whose processes or store are not well, and what comes of its advice."""

import asyncio
import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import pytest
from redis import Redis

from advice.doctors import ACCEPT
from advice.followed import advises, command_in, isthmus, mine, says
from advice.rows import A_GAP, Row, row
from integration.test_full_store import IN_A_DISK_OF_ITS_OWN, own_mounts  # noqa: F401  (a fixture)
from isthmus.bus import default_bus
from isthmus.errors import Denied, Unavailable
from isthmus.format.layout import Spec, TensorClass
from isthmus.format.records.keys import commit_key
from isthmus.format.rules import Pace, Rules
from isthmus.inspect import live as live_
from isthmus.inspect.health_summary import health
from isthmus.inspect.live import Live
from isthmus.inspect.status import read_status
from isthmus.learner import LearnerAgent
from isthmus.log import log_health
from isthmus.store import Layer, Patience, Store
from isthmus.store.layer import Send
from isthmus.syncer import snapshots
from isthmus_services.board.history import warnings
from isthmus_services.processes import isthmus_command
from isthmus_services.servers import redis_server
from support.boards import a_board, ask
from support.forking import Forked, nursery
from support.world import NumpyReplica, World, newest_commit, seed_of, serving, train, until, world

T = TypeVar("T")

PACE = Pace(heartbeat_s=0.2, silence_s=0.8, snapshot_every=4096)
FEW = seed_of(Rules(fragments=2, sync_every=4), PACE)
MANY = seed_of(Rules(fragments=6, sync_every=4), PACE)


@dataclass
class Fault:
    """A fault of requests to a store, which lasts until it is mended."""

    error: BaseException
    prefix: str | tuple[str, ...] = ""
    operations: tuple[str, ...] = ("get", "put", "create", "list", "delete")
    mended: bool = False
    after_s: float = 0.0
    """How long a request waits for the error [seconds]."""

    def of(self, w: World) -> World:
        """Return the world with this fault in its store."""
        return w.through(lambda store: Faulty(store, self), Patience(attempts=1))


class Faulty(Layer):
    """A store with a fault."""

    def __init__(self, store: Store, fault: Fault) -> None:
        super().__init__(store)
        self._fault = fault

    async def _through(self, operation: str, key: str, send: Send[T]) -> T:
        if not self._fault.mended and operation in self._fault.operations and key.startswith(self._fault.prefix):
            await asyncio.sleep(self._fault.after_s)
            raise self._fault.error
        return await send()


@asynccontextmanager
async def training(
    agent: LearnerAgent,
    speed: float | Callable[[], float] = 0.0,
    step_s: float = 0.01,
    loss: Callable[[], float] = lambda: 1.0,
    tokens: int = 100,
) -> AsyncIterator[asyncio.Event]:
    """Let a learner train during the body. It is killed at the end, unless the event is set: then it has left, done.

    `speed`: how far each parameter moves in a step, beside noise. `loss`: the loss of the next step.
    """
    await agent.join()
    replica = NumpyReplica(agent.layout)
    boundary = agent.attach(replica)
    serving_ = asyncio.ensure_future(agent.run())
    done = asyncio.Event()

    async def steps() -> None:
        draw = np.random.default_rng(0)
        while not done.is_set():
            for values in replica.values:
                moved = speed() if callable(speed) else speed
                values += np.float32(moved) + draw.normal(scale=1e-3, size=values.size).astype(np.float32)
            boundary.after_step(tokens, loss())
            await asyncio.sleep(step_s)

    stepping = asyncio.ensure_future(steps())
    try:
        yield done
    finally:
        if done.is_set():
            await stepping
            agent.drain(done=True)
            await serving_
        for task in (stepping, serving_):
            task.cancel()
        await asyncio.gather(stepping, serving_, return_exceptions=True)


async def status(w: World, *flags: str) -> tuple[int, str]:
    """Run `isthmus status --check`; return its exit code and its lines about the run's health."""
    code, out = await isthmus("status", w.run.url, "--bus", w.bus.url, "--check", *flags)
    return code, out.partition(f"\n{w.run.url}: run ")[0]


PATIENT = 100
"""The most looks, each a second or so: beside other work on the machine, some need many."""


async def said(here: Row, w: World, *flags: str) -> str:
    """Repeat `isthmus status --check` until it has a row's sentence; return its lines, which must have the advice."""
    for _ in range(PATIENT):
        _, line = await status(w, *flags)
        if says(here, line):
            advises(here, line)
            return line
        await asyncio.sleep(0.2)
    raise AssertionError(f"never said: {here.said}\nbut: {line}")


async def well(w: World, *flags: str) -> str:
    """Repeat `isthmus status --check` until it ends with 0 in a run with a commit; return its lines about the run's health.

    Learners are said to merge as soon as a syncer is there, before the first commit.
    """
    for _ in range(PATIENT):
        code, line = await status(w, *flags)
        if code == 0 and await w.log.newest(0) is not None:
            return line
        await asyncio.sleep(0.2)
    raise AssertionError(f"never well: {line}")


@asynccontextmanager
async def command(folder: Path, *words: str) -> AsyncIterator[Forked]:
    """Run an `isthmus` command in a process of its own during the body, then stop it with SIGTERM."""
    log = folder / f"{words[0]}.log"
    process = await asyncio.to_thread(nursery().start, [*words], os.environ, log, log)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.to_thread(process.wait, 60.0)
        finally:
            process.kill()


# --- which processes are there ----------------------------------------------------------------------------------------


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
    "no learner trains, and none was ever heard; …",
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
    "no learner and no syncer is heard, but the run goes on (the last commit is of …): … is not the bus of its processes",
    means="Somebody commits, and this bus has no message of it: the run's processes use another bus.",
    like="A bus that was emptied a moment ago, for a heartbeat.",
    do="give --bus the URL that they have: redis://…; store: for the run's own store; or, for the bus.sqlite of a run in a "
    "folder, no --bus and no ISTHMUS_BUS",
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
async def test_processes_that_were_all_killed(folder: Path) -> None:
    (here,) = mine(test_processes_that_were_all_killed)
    async with world(folder, FEW) as w:
        async with serving(w.syncer("s1"), killed=True), training(w.learner("a")):
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
    "under its name: it goes on from its checkpoint. If it does, ps -o stat= -p PID (its first log line has it) says T if it is frozen (kill -CONT PID wakes it) "
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
    "four times the usual length, however many steps it holds): start them again with --wait-at-end 600 (a loop of your own: link.close(wait=600)) and, once "
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
async def test_a_run_without_a_syncer_that_is_over(folder: Path) -> None:
    here, pending = mine(test_a_run_without_a_syncer_that_is_over)
    async with world(folder, FEW) as w:
        await train(w.learner("a"), 10)
        line = await said(here, w)
        assert pending.is_in((await isthmus("status", w.run.url, "--bus", w.bus.url))[1])
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
    then="The sentence goes away with the next commit.",
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


# --- what keeps syncers from their work -------------------------------------------------------------------------------


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


# --- what is wrong with the log ---------------------------------------------------------------------------------------


async def finished(w: World, versions: int = 6) -> None:
    """Let a learner train until every fragment has this many versions; then all leave in order."""
    async with serving(w.syncer("s1")) as syncer:
        await train(w.learner("a"), 10, enough=lambda: min(k.head for k in syncer.coordinators) >= versions)


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
    "the log of fragment … is damaged: commits/…: is missing, and version … is there: restore it from a backup; without one, a syncer that still merges this fragment writes a snapshot once it is stopped with SIGTERM, and the run goes on from that; if none does, go on in a new run from the newest version that can be exported (`isthmus export`, then `isthmus init --from`) (fragment … can be "
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
    "the log of fragment … is damaged: commits/…: is missing, and its snapshot is there (a snapshot is used only together with its commit): restore it from a backup; without one, a syncer that still merges this fragment writes a snapshot once it is stopped with SIGTERM, and the run goes on from that; if none does, go on in a new run from the newest version that can be exported (`isthmus export`, then `isthmus init --from`) (fragment … can be "
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
    "… explodes: of its … newest updates, … cut to less than a quarter of their length (the shortest to …)",
    means="The learner's updates are many times as long as usual, or not finite. They are merged at a part of their length, "
    "or not at all. The learner is not counted as one that merges.",
    like="`… rejected (…)`, in place of the cut or beside it, has the reason. A learner's first or last update may be cut a "
    "little; status then says nothing.",
    do="the table of learners shows its loss, isthmus explain … … such a round; stop it by SIGTERM, so that it leaves (a loop of your "
    "own leaves if it closes its link then), lower the learning rate or clip gradients, and start it under a new name (in a signed run an owner adds that: isthmus create once more, with --learner NAME, or isthmus members add), so that it begins with the run's model instead of its own checkpoint; the "
    "owner can expel it",
    then="`isthmus explain` names the learner's update and what it was cut to, or why it was rejected. Once the learner "
    "has stopped, the sentence goes away.",
    lost="most of what that learner trained",
)
@row(
    "status",
    "no messages come from …, which explodes: of its … newest updates, …",
    means="The learner exploded, and fell silent without leaving: it was killed, or ended without closing its link.",
    do="leave it away, or lower the learning rate or clip gradients, and start it under a new name (in a signed run an owner adds that: isthmus create once more, with --learner NAME, or isthmus members add), so that it begins with the run's model instead of its own checkpoint",
    then="Once other commits are the newest ones, it is one of those of which no messages come. `--check` minds neither.",
    lost="most of what that learner trained",
)
async def test_a_learner_that_explodes(folder: Path) -> None:
    here, gone = mine(test_a_learner_that_explodes)
    async with (
        world(folder, FEW) as w, serving(w.syncer("s1")),
        training(w.learner("a"), 0.01), training(w.learner("b"), 0.01), training(w.learner("c"), 0.01),
    ):  # fmt: skip
        await well(w)
        async with training(w.learner("wild"), 0.3):
            line = await said(here, w)
            assert "wild explodes" in line
            assert (line.startswith("wild explodes: "), line.splitlines()[-1]) == (True, "3 of 4 learners merge")
            code, told = await isthmus(*command_in(line, "explain"))
            assert (code, "of its length (norm" in told) == (0, True), told
        for _ in range(100):
            if says(gone, line := (await status(w))[1]):
                break
        advises(gone, line)
        assert "start it again under its name" not in line
        await well(w)


@row(
    "status",
    "… explodes: of its … newest updates, … cut to less than half of their length (the shortest to …)",
    means="Most of the learner's updates are many times as long as those of others, and have been for so long that they count as "
    "usual by half: they are merged at more of their length than at first, and the losses of the others may rise.",
    do="the table of learners shows its loss, isthmus explain … … such a round; stop it by SIGTERM, so that it leaves (a loop of your "
    "own leaves if it closes its link then), lower the learning rate or clip gradients, and start it under a new name (in a signed run an owner adds that: isthmus create once more, with --learner NAME, or isthmus members add), so that it begins with the run's model instead of its own checkpoint; the "
    "owner can expel it",
    then="Once the learner has stopped, the sentence goes away.",
    lost="most of what that learner trained",
)
async def test_a_learner_that_explodes_on_and_on(folder: Path) -> None:
    (here,) = mine(test_a_learner_that_explodes_on_and_on)
    async with (
        world(folder, FEW) as w, serving(w.syncer("s1")),
        training(w.learner("a"), 0.01), training(w.learner("b"), 0.01), training(w.learner("c"), 0.01),
    ):  # fmt: skip
        await well(w)
        async with training(w.learner("wild"), 0.12):  # twelve times as far as the others: a third of it is merged
            line = await said(here, w)
            assert (line.startswith("wild explodes: "), line.splitlines()[-1]) == (True, "3 of 4 learners merge")
            code, told = await isthmus(*command_in(line, "explain"))
            assert (code, "of its length (norm" in told) == (0, True), told
        await well(w)


@row(
    "status",
    "… exploded for a moment, and trains as before: an update was …",
    means="One of this learner's updates was more than four times as long as its updates before and after, whatever the number "
    "of its steps, and was cut to less than a tenth of its length; or it was rejected since it was not finite or far too long. "
    "Its newest ones are as usual. It is no failure: `--check` ends with 0. Status looks at the newest 2,048 "
    "commits, `--watch` and the board at those since they began.",
    do="isthmus explain … … has the round; if it comes again, look at the data of that time, and lower the learning rate or "
    "clip gradients",
    then="The sentence goes away after some thousand commits.",
    lost="what was cut of that update",
)
@row(
    "status",
    "the loss of … leapt for a moment: … in an update, … at most before, … in the newest updates",
    means="The loss of one of this learner's updates was more than twice that of each of the (up to) 64 before it, and is low "
    "again.",
    do="isthmus explain … … has the round; if it comes again, look at the data of that time, and lower the learning rate or "
    "clip gradients",
    then="The sentence goes away after some thousand commits.",
)
@pytest.mark.parametrize("what", ["length", pytest.param("loss", marks=pytest.mark.tier("all"))])
async def test_a_learner_that_exploded_for_a_moment(folder: Path, what: str) -> None:
    exploded, leapt = mine(test_a_learner_that_exploded_for_a_moment)
    wild = False
    async with (
        world(folder, FEW) as w, serving(w.syncer("s1")) as syncer,
        training(w.learner("a"), 0.01), training(w.learner("b"), 0.01),
        training(w.learner("c"), lambda: 1.0 if wild and what == "length" else 0.01,
                 loss=lambda: 9.0 if wild and what == "loss" else 1.0),
    ):  # fmt: skip
        await until(lambda: syncer.coordinators[0].head > 10, "it is known what is usual")
        assert "for a moment" not in await well(w)
        wild, head = True, syncer.coordinators[0].head
        await until(lambda: syncer.coordinators[0].head > head + 1, "it is wild for some rounds")
        wild, head = False, syncer.coordinators[0].head
        await until(lambda: syncer.coordinators[0].head > head + 24, "all newest updates are as usual")
        line = await well(w)
        advises(exploded if what == "length" else leapt, line)
        code, told = await isthmus(*command_in(line, "explain"))
        assert (code, "c" in told) == (0, True), told


@row(
    "status",
    "the loss of … rises: … or more in its newest updates, … at its lowest",
    means="All of the learner's newest merged updates state a loss well above the lowest level that it had reached.",
    like="A learner whose data or schedule changed on purpose, as at the start of another stage of training. (A learner "
    'that is started again uses the rate in its checkpoint unless it joins with `hyperparameters="passed"`.)',
    do="look at its data, or start it again with a lower learning rate (hyperparameters='passed'); isthmus replay … draws all losses",
    then="`isthmus replay` has a curve of each learner's loss. The sentence goes away once some of its newest updates "
    "are low again.",
)
async def test_a_loss_that_rises(folder: Path) -> None:
    (here,) = mine(test_a_loss_that_rises)
    async with world(folder, FEW) as w, serving(w.syncer("s1")) as syncer, training(w.learner("a")):
        far = iter(range(10**9))
        async with training(w.learner("b", checkpoint_s=0.1), loss=lambda: 1.0 + 9.0 / (1 + next(far))):
            await until(lambda: syncer.coordinators[0].head > 20, "it learns")
            await well(w)
        async with training(w.learner("b", checkpoint_s=0.1), loss=lambda: 4.0):
            while "of b rises: 4 or more" not in (line := await said(here, w)):
                pass  # updates that began before the rise are among the newest ones
            code, told = await isthmus(*command_in(line, "replay"))
            assert code == 0, told
            assert [name for name in "ab" if re.search(rf"│ {name} .*rises", told)] == ["b"], told
        async with training(w.learner("b", checkpoint_s=0.1), loss=lambda: 0.9):
            await well(w)


@row(
    "status",
    "the loss of … rose to its end: … or more in its newest updates, … at its lowest",
    means="All learners have left, and this one's last updates state a loss well above its lowest level, or above one and a half of its first. "
    "The model that the run ends with is no better.",
    do="isthmus replay … draws all losses, and isthmus export … --version N -o FILE writes the model of before it rose: isthmus "
    "init NEW --from FILE begins there, with a lower learning rate",
    then="The new run's learners state the losses of that time.",
    lost="the work that was merged after version N",
)
async def test_a_loss_that_rose_to_its_end(folder: Path) -> None:
    (here,) = mine(test_a_loss_that_rose_to_its_end)
    steps = iter(range(10**9))
    async with world(folder, FEW) as w:
        async with serving(w.syncer("s1")) as syncer:
            high = training(w.learner("a"), loss=lambda: 4.5 if next(steps) < 30 else 3000.0 / (1 + next(steps) / 100))
            async with high as done:
                await until(lambda: syncer.coordinators[0].head > 30, "it has diverged")
                done.set()
        line = await said(here, w)
        assert re.search(r"rose to its end: [\d.e+]+ or more in its newest updates, 4.5 at its lowest", line), line
        code, told = await isthmus(*command_in(line, "replay"))
        assert code == 0, told
        file = folder.parent / "before.safetensors"
        code, told = await isthmus("export", w.run.url, "--version", "1", "-o", str(file))
        assert code == 0, told
        code, told = await isthmus(
            "init", str(folder.parent / "new"), "--from", str(file), "--model", "advice.test_heal:model"
        )
        assert code == 0, told


@row(
    "status",
    "… has … of the weight of the newest rounds, with … of their tokens: the others hardly count",
    means="One learner decides what the model becomes, although the others do much of the work.",
    like="A learner that is ten times as fast has most of the weight and most of the tokens: status says nothing then.",
    do="isthmus explain … … shows the weights of a round and why; stop or expel … if it should not count for so much",
    then="`isthmus explain` names why the others count for less. Without that learner the sentence goes away with the "
    "next round of each fragment.",
    lost="most of what the others train meanwhile",
)
async def test_a_learner_that_has_all_weight(folder: Path) -> None:
    (here,) = mine(test_a_learner_that_has_all_weight)
    # Of as many tokens, the larger batch has more weight.
    async with world(folder, FEW) as w, serving(w.syncer("s1")):
        async with training(w.learner("heavy"), step_s=0.05, tokens=1000), training(w.learner("a"), step_s=0.01):
            line = await said(here, w)
            assert "heavy has" in line, line
            code, told = await isthmus(*command_in(line, "explain"))
            assert (code, "weight" in told) == (0, True), told
        async with training(w.learner("a")):
            await well(w)


@row(
    "status",
    "… hardly moves: … of the weight of the newest rounds, with … of their tokens",
    means="The updates of this learner are so short beside the others' that they count for almost nothing.",
    like="A learner that has converged while another one still learns, or whose learning rate is still being warmed up.",
    do="isthmus explain … … shows how short the updates of a round are; look whether the learner's rate is almost 0, its "
    "parameters are frozen, or its loop steps another optimizer than the one handed to join; a learner that has converged needs nothing",
    then="Once its updates are as long as the others', the sentence goes away with the next round of each fragment.",
    lost="nothing of the others' work; what this learner trains is in the model as far as it moves",
)
async def test_a_learner_that_hardly_moves(folder: Path) -> None:
    (here,) = mine(test_a_learner_that_hardly_moves)
    async with world(folder, FEW) as w, serving(w.syncer("s1")) as syncer:
        async with training(w.learner("usual"), 0.3):
            await until(lambda: syncer.coordinators[0].head > 10, "its updates are what is usual")
            async with training(w.learner("a")):
                line = await said(here, w)
                assert "a hardly moves: " in line, line
                code, told = await isthmus(*command_in(line, "explain"))
                assert (code, "short" in told) == (0, True), told
        async with training(w.learner("a")):
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


@row(
    "status",
    "the disk of … is full: … MB are left",
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

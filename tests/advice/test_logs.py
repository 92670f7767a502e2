"""What the logs of learners and syncers say of work that is not merged, and what comes of their advice."""

import asyncio
import logging
import math
import re
import resource
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis as redis_client
import torch
from torch import nn

import isthmus as isthmus_link
from advice.followed import advises, commands_in, isthmus, mine
from advice.lives import FEW, command, said, training, well
from advice.rows import row
from e2e.test_processes import processes, wait_for
from integration.test_learner_warnings import Away
from isthmus.agent import trouble
from isthmus.agent.health import STOOD_S
from isthmus.demo import trainer
from isthmus.errors import Fenced, InputError, LogCorrupt
from isthmus.format.rules import CHECKPOINTS_KEPT, Hyperparameters, Pace, Rules
from isthmus.link import agent_thread
from isthmus.syncer import agent as syncer_agent
from isthmus.torch import moments
from isthmus.torch.loop import DISORDERED, IDLE_STEPS, UNCOUNTED_STEPS
from isthmus_services.main import main
from isthmus_services.processes import isthmus_command
from isthmus_services.servers import Server
from support.world import NumpyReplica, in_virtual_time, seed_of, serving, train, until, world

RULES = Rules(fragments=2, sync_every=4)


def learner(run: str, *more: str) -> str:
    """Run a learner of the built-in model to its end; return its log."""
    words = [*isthmus_command(), "learner", run, "--learner", "a", "--steps", "24", "--log-format", "text", *more]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@row(
    "log",
    "…: … steps in …; NONE OF ITS WORK WAS MERGED before it left…. What it learnt is not in the run: start it and the others "
    "again on the syncers' bus, with close(wait=600) or --wait-at-end 600, and then a syncer if none runs (`isthmus status …` "
    "shows which processes are live)",
    means="The learner has ended, and no commit holds anything of it. The command ends with exit code 3. After the colon stands "
    "what it waited for at last, as `isthmus status` says it.",
    do="start it and the others again on the syncers' bus, with close(wait=600) or --wait-at-end 600, and then a syncer if none "
    "runs",
    then="`isthmus status …` says which processes are missing. The learner that is started again says at its "
    "end which share of its tokens was merged.",
    lost="nothing yet: its checkpoint and its last updates are in the store",
)
@row(
    "log",
    "… joined … (start … of this name): goes on after step … (… tokens lost in all)",
    means="The learner has read its checkpoint, and trains on from there. Lost are the tokens of all its earlier starts that went "
    "with a killed process and are in no update; those that an update holds are merged, or may be.",
    like="A learner that is to go on, and says `start 1 of this name` or `after step 0`: it has another name or another run, or "
    "died before its first checkpoint.",
    do="nothing, unless the step is lower than you expect: checkpoints are then too rare (--checkpoint)",
    then="It trains.",
    lost="the tokens that it names",
)
@pytest.mark.tier("all")
async def test_a_learner_of_which_nothing_was_merged(folder: Path) -> None:
    none, joined = mine(test_a_learner_of_which_nothing_was_merged)
    run = str(folder)
    assert (await isthmus("init", run, "--sync-every", "4", "--fragments", "2"))[0] == 0
    log = await asyncio.to_thread(learner, run)
    advises(none, log)
    code, told = await isthmus(*commands_in(log)[-1])
    assert (code, "what they learnt is not in the run" in told) == (0, True), told
    log = await asyncio.to_thread(learner, run, "--wait-at-end", "0")
    assert joined.is_in(log), log
    assert re.search(r"start 2 of this name\): goes on after step 24 \(0 tokens lost in all\)", log), log


@row(
    "log",
    "… is new in this run, in which … trains: if that is a mistyped name, stop this learner, which begins anew",
    means="A learner joined under a name that differs from another's by a letter or a sign. It has no checkpoint, takes part beside the "
    "other one, and trains on data that the other may have trained on.",
    like="A learner that is meant to have such a name: nothing is to be done.",
    do="stop this learner, and start it under the right name",
    then="`… joined … (start 2 of this name): goes on after step …`",
    lost="nothing; what the mistyped one sent may be merged",
)
async def test_a_name_that_may_be_mistyped(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (here,) = mine(test_a_name_that_may_be_mistyped)
    caplog.set_level(logging.INFO)

    def trains(name: str) -> None:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with isthmus_link.join(str(folder), model, optimizer, learner=name, create=RULES) as link:
            for _ in range(24):
                link.step(tokens=1)

    await asyncio.to_thread(trains, "us-1")
    async with command(tmp_path, "syncer", str(folder)):
        for name in ("us-1", "eu-1", "us1"):
            assert not here.is_in(caplog.text)
            await asyncio.to_thread(trains, name)
    assert here.is_in(caplog.text)
    assert "us1 is new in this run, in which us-1 trains" in caplog.text


@row(
    "log",
    "… was started again elsewhere (its incarnation …): this process stops; if both are to train, give one of them another name (--learner, "
    "join(learner=…))",
    means="Another process has joined under the same name: it was started twice, or a supervisor took it for dead. The older one "
    "ends with an error; the newer one goes on.",
    like="A replacement that was started on purpose: then this is as it should be.",
    do="give each learner a name of its own (--learner, join(learner=…)); one process of a name is enough",
    then="Both train under their own names, and `isthmus status` lists both.",
    lost="what the older one trained since its last checkpoint and had not merged",
)
@row(
    "log",
    "another process of the name … spoke less than … s ago: if it still runs, it ends now, and what it trained since its newest checkpoint is "
    "lost",
    means="The name of a learner that joins was in use a moment ago. Either no process speaks under it now, or the learner was started "
    "with `--takeover`.",
    like="A supervisor that restarts a killed learner at once: then nothing more is lost.",
    do="give each process a name of its own (--learner, join(learner=…))",
    then="Both train under their own names, and `isthmus status` lists both.",
    lost="what the older one trained since its last checkpoint and had not merged",
)
@row(
    "log",
    "another process of the name …, or an earlier join in this one, trains, and would end if this one took its name: end it first, or give "
    "this one a name of its own (--learner, join(learner=…)). If it must end now: --takeover, or join(takeover=True); what it trained since "
    "its newest checkpoint is lost",
    means="A learner was started under a name under which another process is heard. The other one trains on; this one has ended.",
    like="A process that is about to end, and a supervisor that starts the next one too early: it starts it again.",
    do="what the message says",
    then="Both train under their own names, or the one that is left goes on.",
    lost="nothing, without `--takeover`",
)
async def test_two_processes_of_one_name(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    here, newer, refused = mine(test_two_processes_of_one_name)
    async with world(folder, FEW) as w, serving(w.syncer("s1")):
        older = w.learner("a")
        await older.join()
        older.attach(NumpyReplica(older.layout))
        running = asyncio.ensure_future(older.run())
        await asyncio.sleep(2 * w.run.pace.heartbeat_s)
        with pytest.raises(InputError) as told:
            await w.learner("a").join()
        assert refused.is_in(str(told.value))
        async with training(w.learner("a", takeover=True)):
            with pytest.raises(BaseExceptionGroup) as ended:
                await asyncio.wait_for(running, 20.0)
            (why,) = [e for e in flat(ended.value) if isinstance(e, Fenced)]
            assert here.is_in(str(why))
            assert newer.is_in(caplog.text)
            assert caplog.text.count("another process of the name") == 1
            async with training(w.learner("b")):
                assert (await well(w)).startswith("2 of 2 learners merge")


def flat(error: BaseException) -> list[BaseException]:
    """Return the errors in a group."""
    return [e for one in error.exceptions for e in flat(one)] if isinstance(error, BaseExceptionGroup) else [error]


@row(
    "log",
    "fragment …: updates/… is cut to … of its length: if that happens again and again, … explodes",
    means="A syncer's log: an update of this learner is over forty times as long as is usual, and counts for this part of its "
    "length only. With `far beyond what is usual` it is over a hundred times as long, and is rejected.",
    like="`is compared with the run's first updates, which are short`, in the first versions of a run: no problem.",
    do="nothing, if it happens once; isthmus status … says whether the learner explodes, and what to do then",
    then="Without that learner, or with its lower learning rate, the log says no more of it.",
    lost="what was cut",
)
async def test_an_update_that_is_cut(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (here,) = mine(test_an_update_that_is_cut)
    async with (
        world(folder, FEW) as w, serving(w.syncer("s1")) as syncer,
        training(w.learner("a"), 0.01), training(w.learner("b"), 0.01), training(w.learner("c"), 0.01),
    ):  # fmt: skip
        await until(lambda: syncer.coordinators[0].head > 10, "it is known what is usual")
        with caplog.at_level(logging.WARNING):
            async with training(w.learner("wild"), 1.0):
                await until(lambda: here.is_in(caplog.text), "the log says it")
                for _ in range(50):
                    code, told = await isthmus("status", w.run.url, "--bus", w.bus.url)
                    if "wild explodes" in told:
                        break
                assert (code, "wild explodes" in told) == (0, True), told
        await well(w)


@row(
    "log",
    "…: this process has no file descriptors left (for … s): …; raise its limit of … (ulimit -n, LimitNOFILE= of a systemd "
    "service), and start it again",
    means="A learner's or a syncer's log: the process may open no further connection or file. Store and bus are well.",
    like="A store or a bus that is away: then other processes miss it, too. `isthmus status` names the lack as long as the process "
    "reaches the bus; after that, status only says that no messages come from it.",
    do="raise its limit of … (ulimit -n, LimitNOFILE= of a systemd service), and start it again",
    then="A learner goes on from its checkpoint, a syncer with what the log has.",
    lost="what a learner trained since its newest update and checkpoint",
)
async def test_a_process_without_file_descriptors(
    folder: Path, redis: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here,) = mine(test_a_process_without_file_descriptors)
    monkeypatch.setattr(trouble, "PATIENCE_S", 0.5)
    pace = Pace(heartbeat_s=0.2, silence_s=0.4)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with (
        world(folder, seed_of(pace=pace), bus=redis.url) as w,
        serving(w.syncer("s1")) as syncer,
        training(w.learner("a")),
    ):
        await until(lambda: syncer.coordinators[0].head >= 2, "it merges")
        with redis_client.Redis.from_url(redis.url) as server:
            server.ping()
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
            try:
                server.execute_command("CLIENT", "KILL", "TYPE", "normal")
                await until(lambda: here.is_in(caplog.text), "both say so", 30.0)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        advises(here, caplog.text)
        before = syncer.coordinators[0].head
        await until(lambda: syncer.coordinators[0].head >= before + 2, "with more of them it goes on by itself")


@row(
    "log",
    "… (… tokens lost in all), in … s, as process … on …; none of its … stored checkpoints can be used (the lines before say why): restore one from a backup, "
    "and start it again; one that an earlier key signed counts if the owner vouched for it, as isthmus members rotate does, and members "
    "add does not",
    means="The learner begins anew, although it had come further: each of its checkpoints is damaged. Lines above name them "
    "and what is wrong (`checkpoint … is not used: …`).",
    do="restore one from a backup, and start it again",
    then="`goes on after step …`, with that checkpoint's step",
    lost="without a backup: its optimizer's state and its place in the data, and of its work what no update holds",
)
def test_a_learner_whose_checkpoints_are_damaged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (here,) = mine(test_a_learner_whose_checkpoints_are_damaged)

    def steps() -> None:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with isthmus_link.join(str(folder), model, optimizer, learner="a", create=RULES) as link:
            for _ in range(6):
                link.step(tokens=1)

    caplog.set_level(logging.INFO)
    steps()
    steps()
    kept = {path: path.read_bytes() for path in (folder / "learners" / "a").rglob("checkpoints/*") if path.is_file()}
    assert len(kept) == 2
    for path, blob in kept.items():
        path.write_bytes(blob[:-1] + bytes([blob[-1] ^ 1]))
    caplog.clear()
    steps()
    advises(here, caplog.text)
    assert "goes on after step 0 " in caplog.text
    assert "see checkpoint_s" not in caplog.text
    last = max(kept)
    for path in (folder / "learners" / "a").rglob("checkpoints/*"):
        path.unlink()
    last.write_bytes(kept[last])
    caplog.clear()
    steps()
    assert not here.is_in(caplog.text)
    assert "goes on after step 12 " in caplog.text


@row(
    "log",
    "THE LOSS ROSE from … to …, and what is learnt there is merged with the others' work: look at the data, or start this learner "
    "again with a lower learning rate (hyperparameters='passed')",
    means="The mean loss of 64 steps in a row was far above the first ones, or more than half of what it had fallen was lost "
    "again. The learner says so once, and in its last line if it is still so then.",
    like="Data that became harder: then the others' losses rise, too.",
    do="look at the data, or start this learner again with a lower learning rate (hyperparameters='passed')",
    then="The loss falls, and no such line comes again.",
    lost="nothing; merging cuts updates that are far longer than the others', and what is left of them is in the model",
)
def test_a_loss_that_rose(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (here,) = mine(test_a_loss_that_rose)

    def steps(*losses: float) -> None:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with isthmus_link.join(str(folder), model, optimizer, learner="a", create=RULES) as link:
            for loss in losses:
                link.step(tokens=1, loss=loss)

    caplog.set_level(logging.INFO)
    steps(*[2.0] * 32, *[9.0] * 64)
    advises(here, caplog.text)
    assert caplog.text.count("THE LOSS ROSE from 2 to 9") == 2, "once, and in the last line"
    caplog.clear()
    steps(*[2.0] * 96)
    assert not here.is_in(caplog.text)


@row(
    "log",
    "… exists, and its rules never change: … is … there, not …",
    means="A learner joins a run with `create=functools.partial(Rules.suited, …)`, and the run was created with other rules than "
    "those that it names.",
    do="nothing, if the run's rules are as they should be; else join another place, where a run with these rules is created",
    then="The line does not come where the names are left out, or fit.",
)
def test_a_run_with_other_rules_than_are_asked_for(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (here,) = mine(test_a_run_with_other_rules_than_are_asked_for)

    def join(create: Any) -> None:
        model = nn.Linear(4, 2)
        isthmus_link.join(
            str(folder), model, torch.optim.SGD(model.parameters(), lr=0.1), learner="a", create=create
        ).close()

    join(partial(Rules.suited, sync_every=24))
    join(partial(Rules.suited, sync_every=24))
    join(Rules.suited)
    assert not here.is_in(caplog.text)
    join(partial(Rules.suited, sync_every=12, fragments=6))
    assert here.is_in(caplog.text)
    assert "sync_every is 24 there, not 12, fragments is 12 there, not 6" in caplog.text


@row(
    "log",
    "parameters were changed between link.step and the optimizer's step (by load_state_dict, for example): the change counts as work "
    "of this learner, and is merged; load weights before join, and evaluate others in a copy of the model",
    means="Something else than the optimizer has set the model's parameters. What differs from the run's model goes into the next "
    "update, as if it had been trained.",
    like="A loop that clips or projects weights after `link.step`: do it before.",
    do="load weights before join, and evaluate others in a copy of the model",
    then="The line does not come.",
    lost="nothing; merging cuts updates that are far longer than the others', and what is left of them is in the model",
)
def test_weights_that_are_loaded_after_join(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (here,) = mine(test_weights_that_are_loaded_after_join)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with isthmus_link.join(str(folder), model, optimizer, learner="a", create=RULES) as link:
        for number in range(8):
            if number == 6:
                assert not here.is_in(caplog.text)
                model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            link.step(tokens=1)
    advises(here, caplog.text)


@row(
    "log",
    "ITS LAST LOSS IS …: nothing it learns from there is sent; start it again with clipped gradients or a lower learning rate "
    "(hyperparameters='passed', or it goes on with that of its checkpoint): it goes on after step …",
    means="The learner has ended, and the last loss that its loop reported is a NaN or an infinity.",
    do="start it again with clipped gradients, after a look at its data, or with a lower learning rate and "
    "`join(…, hyperparameters='passed')`: it goes on from its last checkpoint, which was written while the loss was a number",
    then="It goes on after the step of that checkpoint.",
    lost="what it trained since that checkpoint",
)
@row(
    "log",
    "the loss of step … is …: training goes on; differences that are not finite are not sent",
    means="A learner's loop reported a loss that is a NaN or an infinity. At its end it says ITS LAST LOSS IS nan, if so.",
    like="A single bad batch: the next losses are numbers again, and nothing is to be done.",
    do="if it goes on, stop it, look at its data and precision, lower the learning rate (with `hyperparameters='passed'`, or it goes "
    "on with that of its checkpoint), and start it again: no checkpoint is written while the loss is not a number",
    then="It goes on from its last checkpoint before, and its updates are merged again.",
    lost="what it trained since that checkpoint",
)
def test_a_loss_that_is_no_number(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    last, here = mine(test_a_loss_that_is_no_number)

    def steps(loss: float) -> None:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with isthmus_link.join(str(folder), model, optimizer, learner="a", create=RULES) as link:
            for _ in range(6):
                link.step(tokens=1, loss=torch.tensor(loss))

    with caplog.at_level(logging.INFO):
        steps(1.0)
        assert not here.is_in(caplog.text)
        steps(math.nan)
        assert here.is_in(caplog.text), caplog.text
        assert last.is_in(caplog.text)
        caplog.clear()
        steps(1.0)
    assert "goes on after step 6 " in caplog.text, caplog.text


@row(
    "log",
    "…: is missing: an earlier incarnation of … has seen version …, so the store was set back, or shows less than it did",
    means="The learner's checkpoint includes a version that the store no longer has, as after a backup was restored. Its work "
    "would not fit the model, so it does not start.",
    do="Restore the commits; or, to go on without them, delete …",
    then="The learner joins. Restore the snapshots and values beside the commits, too. Without a checkpoint it begins at step 0, with the newest versions and a new optimizer.",
    lost="with the commits restored nothing; else what they merged, and the learner's optimizer and data position",
)
async def test_a_learner_that_has_seen_more_than_the_store_has(folder: Path) -> None:
    (here,) = mine(test_a_learner_that_has_seen_more_than_the_store_has)
    async with world(folder, FEW) as w:
        async with serving(w.syncer("s0")) as syncer:
            await train(w.learner("a", checkpoint_s=0.1), 60, enough=lambda: syncer.coordinators[0].head >= 6)
        kept = {path: path.read_bytes() for kind in ("commits", "snapshots", "values") for path in newer(folder / kind)}
        for path in kept:
            path.unlink()
        with pytest.raises(LogCorrupt) as caught:
            await w.learner("a").join()
        advises(here, str(caught.value))
        named = re.findall(r"learners/a/\d+/[^\s:]+", str(caught.value))
        assert len(named) == len(set(named)) == CHECKPOINTS_KEPT
        for path, data in kept.items():
            path.write_bytes(data)
        await w.learner("a").join()
        for path in kept:
            path.unlink()
        for key in named:
            (folder / key).unlink()
        agent = w.learner("a")
        await agent.join()
        assert (agent.history.step, {known.version for known in agent.downlink.known}) == (0, {1})


@row(
    "log",
    "this process stood still for … s: it was stopped (SIGSTOP), or its machine slept or was overloaded; it goes on by itself",
    means="The event loop of this learner or syncer had no turn for so long. Others took it for dead meanwhile; a round did not wait "
    "for it. The line is written once it runs again.",
    do="it goes on by itself",
    then="Status counts it again. If it comes back often, look at the machine: memory that is swapped, a laptop's lid, a supervisor "
    "that freezes processes.",
    lost="of a learner at most its updates that were on their way; what it trained is in its next update",
)
def test_a_process_that_was_stopped(folder: Path, tmp_path: Path) -> None:
    (here,) = mine(test_a_process_that_was_stopped)
    assert main(["init", str(folder)]) == 0
    with processes(tmp_path) as p:
        syncer = p.isthmus("s", "syncer", str(folder))
        wait_for(lambda: "holds" in p.said("s"), "it serves")
        syncer.send_signal(signal.SIGSTOP)
        time.sleep(STOOD_S + 1.0)
        syncer.send_signal(signal.SIGCONT)
        wait_for(lambda: "stood still" in p.said("s"), "it says so")
        advises(here, p.said("s"))
        syncer.terminate()
        p.ends(syncer)


def newer(folder: Path) -> list[Path]:
    """Return the files of versions after 1."""
    return [path for path in folder.rglob("*") if path.is_file() and int(path.name[:12]) > 1]


@row(
    "log",
    "…: no syncer is heard (for … s): training goes on, but its updates are not merged meanwhile; if one runs, use its bus (--bus, "
    "ISTHMUS_BUS, join(bus=…)); else start one: isthmus syncer …",
    means="A learner hears no syncer on its bus. It says so after ten seconds, and then ever less often. In brackets at the end it asks "
    "for the address of a run in which nothing was ever merged.",
    like="`…, but the run goes on`: syncers commit, and have another bus.",
    do="else start one: isthmus syncer …",
    then="`…: no syncer is heard: over`",
    lost="nothing yet; after a long time, what its next update holds counts for a part only",
)
@row(
    "log",
    "…: the store does not answer (for … s): …; check that … is reachable",
    means="A learner's or a syncer's log: its requests get no answer. A learner trains on; a syncer leaves its fragments to others.",
    like="`requests that worked before are refused`: the store answers, and a permission or a credential is gone.",
    do="check that … is reachable",
    then="`…: the store does not answer: over`, and all goes on by itself.",
    lost="nothing: learners send afterwards what they trained meanwhile",
)
@row(
    "log",
    "updates/… cannot be uploaded for now: …",
    means="A learner's log: one upload failed, for the reason at its end. Its work is in the next one.",
    do="nothing, unless it goes on: a line with `the store does not answer` then says since when",
    then="No such line comes any more.",
)
@in_virtual_time
async def test_first_no_syncer_and_then_no_store(caplog: pytest.LogCaptureFixture) -> None:
    silence, store, upload = mine(test_first_no_syncer_and_then_no_store)
    caplog.set_level(logging.INFO)
    pace = Pace(heartbeat_s=0.5, silence_s=2.0)
    async with world(Path(), seed_of(Rules(fragments=1, sync_every=4), pace)) as whole:
        away = Away(whole)
        async with away.process() as its, away.process() as hers:
            back = asyncio.Event()
            task = asyncio.ensure_future(train(hers.learner("us-1"), 8, step_s=0.25, enough=back.is_set))
            await asyncio.sleep(15.0)
            assert silence.is_in(caplog.text)
            async with serving(its.syncer("s1")) as syncer:
                await until(lambda: syncer.coordinators[0].head >= 3, "it is merged")
                assert "us-1: no syncer is heard: over" in caplog.text
                away.now = True
                await asyncio.sleep(15.0)
                away.now = False
                head = syncer.coordinators[0].head
                await until(lambda: syncer.coordinators[0].head >= head + 3, "it is merged again")
                await until(lambda: caplog.text.count("the store does not answer: over") == 2, "both say so")
                back.set()
                await task
    for here in (store, upload):
        assert here.is_in(caplog.text), here.said


@row(
    "log",
    "another syncer is named … too: each takes the other's messages for its own, and both merge all fragments; start one of them again with "
    "another --name",
    means="Two syncers were started with the same --name. The table of status has one. Both merge every fragment, and of each commit one "
    "of them has worked for nothing.",
    do="start one of them again with another --name",
    then="`isthmus status` lists both, and each holds a part of the fragments.",
)
@row(
    "status",
    "two syncers are named …: each takes the other's messages for its own, and both merge all fragments",
    means="Two syncers were started with the same --name. The table of status has one. Both merge every fragment, and of each commit one "
    "of them has worked for nothing.",
    do="start one of them again with another --name",
    then="`isthmus status` lists both, and each holds a part of the fragments.",
)
async def test_two_syncers_of_one_name(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    here, in_status = mine(test_two_syncers_of_one_name)
    async with world(folder, FEW) as w, serving(w.syncer("s1")), training(w.learner("b")):
        await asyncio.sleep(4 * w.run.pace.heartbeat_s)
        assert "another syncer" not in caplog.text
        async with serving(w.syncer("s1")):
            await until(lambda: here.is_in(caplog.text), "it is said")
            await said(in_status, w)
        caplog.clear()
        async with serving(w.syncer("s2")):
            assert (await well(w)).startswith("1 of 1")
        assert "another syncer" not in caplog.text


@in_virtual_time
async def test_a_syncer_alone_is_no_twin_after_the_bus_was_away(caplog: pytest.LogCaptureFixture) -> None:
    """All heartbeats that waited are sent at once then, and come back."""
    async with world(Path(), seed_of(Rules(fragments=1, sync_every=4), Pace(heartbeat_s=0.5, silence_s=2.0))) as whole:
        away = Away(whole)
        async with away.process() as its, serving(its.syncer("s1")):
            await asyncio.sleep(5.0)
            away.now = True
            await asyncio.sleep(90.0)
            away.now = False
            await asyncio.sleep(10.0)
    assert "does not answer" in caplog.text
    assert "another syncer" not in caplog.text


@row(
    "log",
    "no learner is heard yet on …: one whose log says «joined» has another bus, and is to be started again with this one (--bus, "
    "ISTHMUS_BUS, join(bus=…)), or this syncer with that one; one whose log does not say it yet still loads",
    means="Ten seconds after a syncer began to listen, no learner has spoken on its bus. It is said once.",
    like="A syncer that was started before the learners: then nothing is to be done.",
    do="one whose log says «joined» has another bus, and is to be started again with this one (--bus, ISTHMUS_BUS, "
    "join(bus=…)), or this syncer with that one",
    then="The syncer's next lines are of commits.",
)
async def test_a_syncer_that_hears_no_learner(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here,) = mine(test_a_syncer_that_hears_no_learner)
    monkeypatch.setattr(syncer_agent, "PATIENCE_S", 0.5)
    caplog.set_level(logging.INFO)
    async with world(folder, FEW) as w:
        async with serving(w.syncer("s1")):
            await until(lambda: here.is_in(caplog.text), "it is said")
        caplog.clear()
        async with training(w.learner("b")), serving(w.syncer("s1")) as syncer:
            await until(lambda: syncer.coordinators[0].head > 2, "it merges")
            await asyncio.sleep(1.0)
        assert "no learner is heard" not in caplog.text


@row(
    "log",
    "…: no checkpoint of step … was stored, its last: a restart goes on after step …",
    means="A learner has left, and its last checkpoint did not reach the store in time. Earlier ones may have.",
    like="A learner without checkpoints on purpose says nothing of this.",
    do="look whether the store answers and takes writes (isthmus doctor), before the learner is started again",
    then="The learner that is started again says after which step it goes on.",
    lost="what it trained after that step and was not merged",
)
def test_a_last_checkpoint_that_is_not_stored(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here,) = mine(test_a_last_checkpoint_that_is_not_stored)
    for name in ("DRAIN_S", "LAST_S", "CLOSE_S", "LEAVE_S"):
        monkeypatch.setattr(agent_thread, name, 0.1)
    link = joined_by_hand(folder)
    away = folder.rename(folder.with_name("away"))
    link.close(wait=0.0)
    assert here.is_in(caplog.text)
    away.rename(folder)
    again = joined_by_hand(folder)
    assert again.steps_done == 1, "it trained that step again"
    again.close(wait=0.0)


def joined_by_hand(run: Path) -> isthmus_link.Link:
    """Return the link of a learner that has trained a step."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    link = isthmus_link.join(str(run), model, optimizer, learner="a", create=RULES)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    link.step(tokens=2)
    return link


@row(
    "log",
    "the learner goes on with the settings of its checkpoint: … and not … in group …; to use those that the optimizer was made with, "
    "join with hyperparameters='passed'",
    means="A learner was started again with another learning rate, weight decay or other setting of its optimizer than its checkpoint "
    "has, and goes on with that of the checkpoint.",
    like="A loop that sets the rate itself at every step, and gives its optimizer's groups no `initial_lr`: then nothing is to be done.",
    do="join with hyperparameters='passed'",
    then="No such line comes, and the optimizer has the rate that it was made with.",
)
def test_a_lower_rate_that_a_restart_does_not_take(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (here,) = mine(test_a_lower_rate_that_a_restart_does_not_take)

    def started(rate: float, how: str = "restored") -> float:
        caplog.clear()
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        with isthmus_link.join(str(folder), model, optimizer, learner="a", create=RULES, hyperparameters=how) as link:
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            link.step(tokens=2)
        return float(optimizer.param_groups[0]["lr"])

    assert started(0.1) == 0.1
    assert (started(0.01), here.is_in(caplog.text)) == (0.1, True)
    assert (started(0.01, "passed"), here.is_in(caplog.text)) == (0.01, False)


def test_the_rate_that_a_schedule_begins_with_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """A warm-up has set another one by then, which is in no script."""
    made = []
    for rate in (0.002, 0.001):
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=rate)
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 50)
        made.append(optimizer)
    moments.choose(made[1], {"state": made[0].state_dict()}, Hyperparameters.RESTORED)
    assert "lr 0.002 and not 0.001 in group 0" in caplog.text


def test_a_schedule_alone_is_no_other_setting(caplog: pytest.LogCaptureFixture) -> None:
    """The built-in trainer sets the rate at each step: its restarts warned of that."""
    model = nn.Linear(2, 2)
    first, again = trainer.optimizer_for(model), trainer.optimizer_for(model)
    for group in first.param_groups:
        group["lr"] *= 0.3
    moments.choose(again, {"state": first.state_dict()}, Hyperparameters.RESTORED)
    assert not caplog.messages


@row(
    "log",
    "… of … calls of link.step came after a step of the optimizer that was handed to join: call link.step once after each "
    "optimizer.step(), not for each micro-batch, or hand join the optimizer that steps",
    means="A loop forgets `optimizer.step()`, or made another optimizer after `join`, or calls `link.step` more often than the optimizer "
    "steps. In the first case nothing is learnt; in the second, checkpoints hold the state of an optimizer that is not used; in the "
    "third, steps and tokens are counted several times.",
    like="An optimizer that steps within `backward`: then nothing is to be done.",
    do="call link.step once after each optimizer.step(), not for each micro-batch, or hand join the optimizer that steps",
    then="The line does not come again.",
    lost="the steps that were counted and not made; with another optimizer, its moments at a restart",
)
def test_a_loop_without_a_step_of_its_optimizer(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (here,) = mine(test_a_loop_without_a_step_of_its_optimizer)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    link = isthmus_link.join(str(folder), model, optimizer, learner="a", create=RULES)
    for every, warnings in ((1, 0), (1000, 1), (1, 0), (2, 1), (1, 0)):
        caplog.clear()
        for step in range(2 * IDLE_STEPS):
            model(torch.ones(2)).sum().backward()
            if step % every == every - 1:
                optimizer.step()
            link.step(tokens=2)
        assert [here.is_in(message) for message in caplog.messages].count(True) == warnings
    for step in range(IDLE_STEPS):  # a gradient scaler leaves every fourth step out
        if step % 4:
            optimizer.step()
        link.step(tokens=2)
    assert [here.is_in(message) for message in caplog.messages].count(True) == 0
    link.close(wait=0.0)


@row(
    "log",
    "…: … steps in …; its model is at …; THE OPTIMIZER THAT JOIN WAS GIVEN NEVER STEPPED: a restart lacks the moments of "
    "one that does…",
    means="The loop's last line. Another optimizer changed the model: it was made after `join`, or wraps the one that join was given "
    "and does not call it.",
    like="An optimizer that steps within `backward`: its moments are in no checkpoint, either.",
    do="call link.step once after each optimizer.step(), not for each micro-batch, or hand join the optimizer that steps",
    then="The words are gone, and a restart has the moments.",
    lost="the optimizer's moments at a restart",
)
def test_a_loop_that_hands_over_another_optimizer(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (here,) = mine(test_a_loop_that_hands_over_another_optimizer)
    (warns,) = mine(test_a_loop_without_a_step_of_its_optimizer)
    model = nn.Linear(2, 2)
    for whose, warnings in (("another", 1), ("its own", 0)):
        caplog.clear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        own = torch.optim.SGD(model.parameters(), lr=0.1) if whose == "another" else optimizer
        link = isthmus_link.join(str(folder), model, optimizer, learner="a", create=RULES)
        for step in range(UNCOUNTED_STEPS):
            assert not any(warns.is_in(message) for message in caplog.messages), step
            model(torch.ones(2)).sum().backward()
            own.step()
            link.step(tokens=2)
        told = [message for message in caplog.messages if warns.is_in(message)]
        assert len(told) == warnings
        assert all(
            f"0 of {UNCOUNTED_STEPS} calls" in one and one.endswith("; until then, a restart lacks its moments")
            for one in told
        )
        link.close(wait=0.0)
        assert here.is_in(str(link.summary)) is link.summary.never_stepped is bool(warnings)
        assert link.summary.stands_out or not warnings


@row(
    "log",
    "link.step is called between the backward pass and optimizer.step(): call it after optimizer.step(); whenever this loop ends, "
    "it is in the middle of a step, and nothing of its end is stored",
    means="Ten calls of `link.step` in a row found gradients that the optimizer had not used yet.",
    like="`link.step` once per micro-batch: then its calls and the optimizer's steps are counted.",
    do="call it after optimizer.step()",
    then="The line does not come again, and the loop's end is stored.",
    lost="when the loop ends, what its learner has trained since its last checkpoint",
)
def test_a_loop_that_tells_of_a_step_before_it_is_made(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (here,) = mine(test_a_loop_that_tells_of_a_step_before_it_is_made)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    link = isthmus_link.join(str(folder), model, optimizer, learner="a", create=RULES)

    def step(order: str) -> None:
        for what in order:
            if what == "b":
                model(torch.ones(2)).sum().backward()
            elif what == "o":
                optimizer.step()
            elif what in "zn":
                optimizer.zero_grad(set_to_none=what == "n")
            else:
                link.step(tokens=2)

    # b: backward pass, o: optimizer, l: link, n and z: gradients are removed, or set to zero
    for order, warnings in {
        "bol": 0,
        "blon": 1,
        "bolz": 0,
        "nblo": 1,
        "bozl": 0,
        "bbloz": 1,
        "bonl": 0,
        "nbol": 0,
    }.items():
        caplog.clear()
        for _ in range(DISORDERED + 2):
            step(order)
        assert [here.is_in(message) for message in caplog.messages].count(True) == warnings, order
        step("bol")
    for _ in range(DISORDERED + 2):  # of a step that a gradient scaler leaves out, the gradients are not used
        step("nbl")
    assert not any(here.is_in(message) for message in caplog.messages)
    link.close(wait=0.0)


@row(
    "log",
    "the optimizer that was handed to join made … steps in … calls of link.step: call link.step once after each optimizer.step(), or "
    "the steps of this learner are counted too low",
    means="The loop makes several steps of the optimizer for each `link.step`. Periods, the learner's speed and its weight follow from "
    "the steps that are counted.",
    like="Several steps that belong together, such as those of a line search: then nothing is to be done.",
    do="call link.step once after each optimizer.step()",
    then="The line does not come again.",
    lost="nothing",
)
def test_a_loop_that_tells_of_every_second_step(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (here,) = mine(test_a_loop_that_tells_of_every_second_step)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    link = isthmus_link.join(str(folder), model, optimizer, learner="a", create=RULES)
    for every, warnings in ((1, 0), (2, 1), (1, 0)):
        caplog.clear()
        for _ in range(2 * IDLE_STEPS):
            for _ in range(every):
                model(torch.ones(2)).sum().backward()
                optimizer.step()
            link.step(tokens=2)
        assert [here.is_in(message) for message in caplog.messages].count(True) == warnings
    link.close(wait=0.0)


@row(
    "log",
    "the optimizer that join was given made … steps in a row without link.step: nothing of them is sent or stored; call "
    "link.step(tokens=…) after each step of the optimizer",
    means="The loop trains and does not tell Isthmus so: no update, no checkpoint, and no version is taken over.",
    like="A hundred steps of the optimizer that together are one step: then nothing is to be done.",
    do="call link.step(tokens=…) after each step of the optimizer",
    then="The line does not come again, and `isthmus status` shows the learner's steps.",
    lost="nothing in the store; the process's own steps are sent with the next `link.step`",
)
def test_a_loop_without_link_step(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (here,) = mine(test_a_loop_without_link_step)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    link = isthmus_link.join(str(folder), model, optimizer, learner="a", create=RULES)
    for told in (True, False, True):
        caplog.clear()
        for _ in range(2 * IDLE_STEPS):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
            if told:
                link.step(tokens=2)
        assert [here.is_in(message) for message in caplog.messages].count(True) == (0 if told else 1)
    link.close(wait=0.0)


@row(
    "status",
    "… left as done, without a step",
    means="A learner joined, and ended well, and told of no step.",
    like="A learner that was started only to try whether it can join.",
    do="if it trained, its loop does not call link.step(tokens=…) after each step of the optimizer",
    then="Once the learner was started again and has made a step, status no longer names it.",
    lost="what the process trained",
)
@row(
    "log",
    "…: … steps in …; its model is at …; NONE OF ITS WORK WAS MERGED: its optimizer made … steps, and link.step was never called; "
    "call link.step(tokens=…) after each step of the optimizer",
    means="The loop's last line. It trained and never told Isthmus so: nothing was sent or stored, and no version was taken over. "
    "`link.summary.never_merged` is true.",
    do="call link.step(tokens=…) after each step of the optimizer",
    then="The last line counts the steps, and says which share was merged.",
    lost="what the process trained",
)
def test_a_trial_that_never_calls_link_step(
    folder: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    untrained, here = mine(test_a_trial_that_never_calls_link_step)
    (warns,) = mine(test_a_loop_without_link_step)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with isthmus_link.join(str(folder), model, optimizer, learner="a", create=RULES) as link:
        for _ in range(UNCOUNTED_STEPS):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert [warns.is_in(message) for message in warned].count(True) == 1
    advises(here, warned[-1])
    assert link.summary.never_merged
    assert main(["status", str(folder), "--check"]) == 1
    advises(untrained, capsys.readouterr().out)
    assert not any("parameters were changed" in message or "call it after" in message for message in warned)
    with isthmus_link.join(str(folder), model, optimizer, learner="a") as link:
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        link.step(tokens=2)
    assert not here.is_in(str(link.summary))
    main(["status", str(folder)])
    assert not untrained.is_in(capsys.readouterr().out)

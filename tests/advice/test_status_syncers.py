"""What `isthmus status` says where no syncer or no store answers, and what comes of its advice."""

import asyncio
import os
import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from advice.doctors import small_run
from advice.followed import command_in, isthmus, mine, says
from advice.gate import gate
from advice.lives import FEW, command, said, training, well
from advice.rows import A_GAP, row
from advice.test_status import tells_a_frozen_process
from isthmus.format.signing.keys import write_signer
from isthmus.syncer import Syncer
from isthmus_services.processes import isthmus_command
from isthmus_services.servers import Server
from support.signed import EU, OWNER, SYNC, L, S, admit
from support.world import serving, until, world


@row(
    "status",
    "no syncer is heard; the last commit is of …",
    means="Learners train, syncers merged before, and none is heard now: all were killed or stopped, or are cut off.",
    like="`nothing was ever committed` is said of a run that never had a syncer.",
    do="if … lives, ps -o stat= -p PID (its first log line has it) says T if it is frozen (kill -CONT PID wakes it) and D if it waits for a disk; else start "
    "one with: isthmus syncer … --bus …",
    then="Within seconds `… of … learners merge`. The new syncer goes on from the newest commit.",
    lost=A_GAP,
)
async def test_a_run_whose_syncer_was_killed(folder: Path) -> None:
    (here,) = mine(test_a_run_whose_syncer_was_killed)
    async with world(folder, FEW) as w, training(w.learner("a")):
        for name in ("s1", "s2"):
            async with serving(w.syncer(name), killed=True) as syncer:
                head = min(k.head for k in syncer.coordinators)
                await until(partial(_merges, syncer, head + 2), "it merges")
        line = await said(here, w)
        assert "if s2 or s1 lives" in line
        tells_a_frozen_process(line)
        async with command(folder.parent, *command_in(line, "syncer")):
            assert (await well(w)).startswith("1 of 1 learners merge")


def _merges(syncer: Syncer, version: int) -> bool:
    return min(k.head for k in syncer.coordinators) >= version


@row(
    "status",
    "no syncer is heard; … start one with: . syncer/env && isthmus syncer",
    means="The same in a signed run: a syncer needs its key, and with the folders of `isthmus create` also its rights.",
    do="start one with: . syncer/env && isthmus syncer (with the folders of isthmus create; else isthmus syncer … --key "
    "SYNCER_KEY_FILE)",
    then="Within seconds `… of … learners merge`. The new syncer goes on from the newest commit.",
    lost=A_GAP,
)
async def test_a_signed_run_without_a_syncer(folder: Path, tmp_path: Path) -> None:
    (here,) = mine(test_a_signed_run_without_a_syncer)
    own = tmp_path / "syncer"
    own.mkdir()
    write_signer(own / "key", SYNC, "syncer")
    async with world(folder, replace(FEW, signer=OWNER)) as w:
        await admit(w, ("a", L, EU), ("syncer-*", S, SYNC))
        values = {"ISTHMUS_RUN": w.run.url, "ISTHMUS_BUS": w.bus.url, "ISTHMUS_KEY": str(own / "key")}
        (own / "env").write_text("".join(f"export {name}='{value}'\n" for name, value in values.items()))
        async with training(w.by(EU).learner("a")):
            line = await said(here, w)
            assert "first" not in line
            do = re.search(r"with: (\. syncer/env && isthmus syncer) ", line)
            assert do is not None
            words = do[1].replace("isthmus", f"exec {' '.join(isthmus_command())}")
            process = await asyncio.create_subprocess_shell(words, cwd=tmp_path)
            try:
                assert (await well(w)).startswith("1 of 1 learners merge")
            finally:
                process.terminate()
                await process.wait()


@row(
    "status",
    "no syncer is heard; … (first the run's owner admits one, since membership … names none: isthmus members add …)",
    means="The owner has removed the last syncer from the membership: none can start until another one is admitted. A learner "
    "that hears no syncer says the same.",
    do="start one with: … (first the run's owner admits one, since membership … names none: isthmus members add … NAME --as "
    "syncer --public-key FILE.pub --key OWNER_KEY_FILE)",
    then="Within seconds `… of … learners merge`. The new syncer goes on from the newest commit.",
    lost=A_GAP,
)
async def test_a_signed_run_without_a_syncer_in_its_membership(folder: Path, tmp_path: Path) -> None:
    (here,) = mine(test_a_signed_run_without_a_syncer_in_its_membership)
    for who, signer in (("owner", OWNER), ("syncer", SYNC)):
        write_signer(tmp_path / who, signer, who)
    async with world(folder, replace(FEW, signer=OWNER)) as w:
        await admit(w, ("a", L, EU))
        async with training(w.by(EU).learner("a")):
            line = await said(here, w)
            found = re.search(r"isthmus (members add [^)]*)\)", line)
            assert found is not None
            files = {"NAME": "new", "FILE.pub": str(tmp_path / "syncer.pub"), "OWNER_KEY_FILE": str(tmp_path / "owner")}
            code, out = await isthmus(*(files.get(word, word) for word in found[1].split()))
            assert code == 0, out
            start = [w.run.url, "--bus", w.bus.url, "--key", str(tmp_path / "syncer")]
            async with command(folder.parent, "syncer", *start):
                assert (await well(w)).startswith("1 of 1 learners merge")


@row(
    "status",
    "isthmus status: s3://…: no answer within 2.5 s",
    means="The store took the request and did not answer: it is overloaded, or the network drops its answers. Learners and "
    "syncers may have the same trouble; then they wait.",
    like="A store that is down says `connection refused`.",
    do="`isthmus doctor` with the run's address says how long requests take; look at the store's own log and load",
    then="Once the store answers, status prints its table.",
    lost="nothing, if learners and syncers have no such trouble; else " + A_GAP,
)
async def test_a_store_that_takes_requests_and_is_silent(
    moto: Server, use: Callable[[Server], None], tmp_path: Path
) -> None:
    (here,) = mine(test_a_store_that_takes_requests_and_is_silent)
    with gate(moto.url) as there:
        use(replace(moto, url=there.url, environment={**moto.environment, "AWS_ENDPOINT_URL": there.url}))
        run = await asyncio.to_thread(small_run, f"s3://silent-{os.getpid()}/run", make=True)
        there.answers = lambda *_: time.sleep(4.0)
        code, told = await isthmus("status", run, "--bus", f"sqlite://{tmp_path}/bus")
        assert (code, says(here, told)) == (2, True), told
        there.open()
        code, told = await isthmus("status", run, "--bus", f"sqlite://{tmp_path}/bus")
        assert code == 0, told

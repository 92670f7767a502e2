"""What `isthmus status` says where no syncer or no store answers, and what comes of its advice."""

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from advice.doctors import small_run
from advice.followed import command_in, isthmus, mine, says
from advice.gate import gate
from advice.rows import A_GAP, row
from advice.test_status import FEW, command, said, training, well
from isthmus_services.servers import Server
from support.world import serving, until, world


@row(
    "status",
    "no syncer is heard; the last commit is of …",
    means="Learners train, syncers merged before, and none is heard now: all were killed or stopped, or are cut off.",
    like="`nothing was ever committed` is said of a run that never had a syncer.",
    do="start one with: isthmus syncer … --bus …",
    then="Within seconds `… of … learners merge`. The new syncer goes on from the newest commit.",
    lost=A_GAP,
)
async def test_a_run_whose_syncer_was_killed(folder: Path) -> None:
    (here,) = mine(test_a_run_whose_syncer_was_killed)
    async with world(folder, FEW) as w, training(w.learner("a")):
        async with serving(w.syncer("s1"), killed=True) as syncer:
            await until(lambda: min(k.head for k in syncer.coordinators) >= 2, "it merges")
        line = await said(here, w)
        async with command(folder.parent, *command_in(line, "syncer")):
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

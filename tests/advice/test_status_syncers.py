"""What `isthmus status` says of a run whose syncers are gone, and what comes of its advice."""

from pathlib import Path

from advice.followed import command_in, mine
from advice.rows import row
from advice.test_status import FEW, command, said, training, well
from support.world import serving, until, world


@row(
    "status",
    "no syncer is heard; the last commit is of …",
    means="Learners train, syncers merged before, and none is heard now: all were killed or stopped, or are cut off.",
    like="`nothing was ever committed` is said of a run that never had a syncer.",
    do="start one with: isthmus syncer … --bus …",
    then="Within seconds `… of … learners merge`. The new syncer goes on from the newest commit.",
)
async def test_a_run_whose_syncer_was_killed(folder: Path) -> None:
    (here,) = mine(test_a_run_whose_syncer_was_killed)
    async with world(folder, FEW) as w, training(w.learner("a")):
        async with serving(w.syncer("s1"), killed=True) as syncer:
            await until(lambda: min(k.head for k in syncer.coordinators) >= 2, "it merges")
        line = await said(here, w)
        async with command(folder.parent, *command_in(line, "syncer")):
            assert (await well(w)).startswith("1 of 1 learners merge")

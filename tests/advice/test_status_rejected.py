"""What `isthmus status` and a learner's last line say of updates that were rejected, and what comes of their advice."""

import asyncio
import math
from pathlib import Path

from advice.followed import advises, mine
from advice.rows import row
from advice.test_status_waits import FEW, PACE, over, said, training
from isthmus.format.rules import Rules
from isthmus.inspect.status import read_status
from isthmus.reasons import REMEDIES, Reason
from isthmus_services.output.view import _fragment
from support.world import in_virtual_time, seed_of, serving, train, world


@row(
    "status",
    "the last loss of … was not finite: the model has nothing from there on",
    means="A learner's loss became NaN or infinite, and it ended so. Nothing that is not finite is sent or stored: the run is not "
    "harmed, and lacks what this learner could have learnt.",
    do="clip gradients or lower the learning rate (and join with hyperparameters='passed', or it goes on with that of its "
    "checkpoint), and start it again under its name: it goes on from its newest checkpoint, which is from before, since "
    "values that are not finite are not stored; without one it begins at step 0",
    then="Once it has ended with a finite loss, status no longer names it.",
    lost="what it trained since its loss was not finite",
)
@in_virtual_time
async def test_a_learner_that_ended_with_a_loss_that_is_no_number() -> None:
    (here,) = mine(test_a_learner_that_ended_with_a_loss_that_is_no_number)
    far = 0.0
    async with world(Path(), FEW) as w, serving(w.syncer("s1")), training(w.learner("a")) as a:
        async with training(w.learner("b", checkpoint_s=0.5), lambda: far, loss=lambda: 1.0 + far) as b:
            await asyncio.sleep(3.0)
            far = math.nan
            await asyncio.sleep(3.0)
            b.set()
        assert (await said(here, w)).startswith("the last loss of b was not finite"), "it is said while others train"
        far = 0.0
        again = w.learner("b")
        async with training(again) as b:
            await over(here, w)
            assert again.history.checkpoint is not None
            assert again.history.step > 0
            await asyncio.sleep(1.0)
            b.set()
        await over(here, w)
        a.set()


@row(
    "status",
    "only answers that are rejected (…)",
    means="In the table of fragments: each learner has answered the open round, and no answer can be merged. The round stays open "
    "until there is one that can be.",
    like="`all have answered`: the round is about to be merged.",
    do="nothing for the run, whose next good update closes the round; what the learner is to do stands in its last line",
    then="Once another update has come, the fragment has its next version, and `isthmus explain` shows the rejection in it.",
    lost="the work of the update that was rejected",
)
@row(
    "log",
    "…: … steps in …; …; NONE OF ITS WORK WAS MERGED: its newest update was rejected (…: …); …",
    means="This is the learner's last line. A syncer has rejected its update, for the reason in parentheses, and the model has nothing "
    "of that update. If `of its … tokens` stands before the reason, some earlier work of the learner was merged.",
    do=f"{REMEDIES[Reason.TOO_LONG]}",
    then="The new learner's last line says which share was merged.",
    lost="the work of the updates that were rejected",
)
@in_virtual_time
async def test_a_learner_that_left_with_its_only_update_rejected() -> None:
    rejected, here = mine(test_a_learner_that_left_with_its_only_update_rejected)
    async with world(Path(), FEW) as w, serving(w.syncer("s1")):
        async with training(w.learner("a")) as a, training(w.learner("c")) as c:
            await asyncio.sleep(3.0)
            for done in (a, c):
                done.set()
        b = w.learner("b")
        async with training(b, 1e6) as done:
            await asyncio.sleep(3.0)
            done.set()
        advises(here, str(b.summary()))
        assert b.summary().stands_out
        found = await read_status(w.log, w.bus, w.runtime, 1.0)
        cells = [_fragment(found, p)[-1] for p in range(len(found.heads))]
        assert any(rejected.is_in(cell) for cell in cells), cells
        again = w.learner("b-2")
        async with training(again) as done:
            await asyncio.sleep(3.0)
            done.set()
        found = await read_status(w.log, w.bus, w.runtime, 1.0)
        assert not any(rejected.is_in(_fragment(found, p)[-1]) for p in range(len(found.heads)))
        assert not here.is_in(str(again.summary()))
        assert again.summary().ledger.merged


@row(
    "log",
    "…: … steps in …; …; NONE OF ITS WORK WAS MERGED: its first update would have been sent after … steps: train longer, or create "
    "a run of a smaller --sync-every (sync_every)",
    means="The learner's last line. It ended before it had to send anything.",
    do="train longer, or create a run of a smaller --sync-every (sync_every)",
    then="The last line says which share was merged.",
    lost="nothing, if a checkpoint was stored: it goes on there",
)
@in_virtual_time
async def test_a_learner_that_ends_before_its_first_update() -> None:
    (here,) = mine(test_a_learner_that_ends_before_its_first_update)
    async with world(Path(), seed_of(Rules(fragments=1, sync_every=8), PACE)) as w, serving(w.syncer("s1")):
        await train(w.learner("c"), 40, wait_s=600.0, step_s=0.25)
        brief = w.learner("a")  # of a run under way, it sends the first update after a whole period
        await train(brief, 8, wait_s=600.0)
        advises(here, str(brief.summary()))
        longer = w.learner("a")
        await train(longer, 40, wait_s=600.0, step_s=0.25)
        assert longer.summary().ledger.merged
        assert not here.is_in(str(longer.summary()))

"""What `isthmus status` says of learners that harm the model or hardly count, and what comes of its advice."""

import re
from functools import partial
from pathlib import Path

import pytest

from advice.followed import advises, command_in, isthmus, mine, says
from advice.lives import FEW, said, status, training, well
from advice.rows import row
from integration.test_full_store import IN_A_DISK_OF_ITS_OWN, own_mounts  # noqa: F401  (a fixture)
from isthmus.format.rules import Pace, Rules
from isthmus.inspect.losses import rising
from isthmus.inspect.status import read_status
from support.world import seed_of, serving, until, world


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
            # Of a learner that had several steps' work, the weight is cut, too.
            assert (code, bool(re.search(r"of its length \((weight, )?norm", told))) == (0, True), told
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
            # Of a learner that had several steps' work, the weight is cut, too.
            assert (code, bool(re.search(r"of its length \((weight, )?norm", told))) == (0, True), told
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
    "the loss of … rises: … in its newest steps, … before it rose",
    means="The learner says so itself, of all its steps: it diverged before its first update, or in one that status does not read. "
    "What it learns from there is merged with the others' work.",
    like="A learner whose data or schedule changed on purpose.",
    do="look at its data, or start it again with a lower learning rate (hyperparameters='passed'); isthmus replay … draws all losses",
    then="Started again with a lower rate, it is no longer named once its loss is low for 32 steps.",
    lost="what it learns until then, and some of what the others learn",
)
@row(
    "status",
    "the loss of … rose to its end: … in its newest steps, … before it rose",
    means="The same of a learner that has left, as all have.",
    do="isthmus replay … draws all losses, and isthmus export … --version N -o FILE writes the model of before it rose: isthmus "
    "init NEW --from FILE begins there, with a lower learning rate",
    then="The new run's learners state the losses of that time.",
    lost="the work that was merged after version N",
)
async def test_a_loss_that_rose_before_the_first_update(folder: Path) -> None:
    here, over_ = mine(test_a_loss_that_rose_before_the_first_update)
    steps = iter(range(10**9))

    def loss() -> float:
        step = next(steps)
        return 5.0 if step < 32 else 1e9 / step

    async with world(folder, seed_of(Rules(fragments=1, sync_every=100), Pace(heartbeat_s=0.5, silence_s=2.0))) as w:
        async with serving(w.syncer("s1")) as syncer, training(w.learner("a")) as a:
            async with training(w.learner("b"), loss=loss) as b:
                await until(lambda: syncer.coordinators[0].head > 3, "its updates are merged")
                found = await read_status(w.log, w.bus, w.runtime, 1.0)
                assert rising(found.losses) == {}, "the log does not show it"
                assert re.search(r"b rises: [\d.e+]+ in its newest steps, 5 before it rose", await said(here, w))
                b.set()
            a.set()
        assert (await read_status(w.log, w.bus, w.runtime, 1.0)).hearing.learners["b"].left
        assert "of b rose to its end: " in await said(over_, w)
        async with serving(w.syncer("s1")), training(w.learner("b"), loss=lambda: 5.0), training(w.learner("a")):
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
            "init", str(folder.parent / "new"), "--from", str(file), "--model", "advice.heals:model"
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
    like="A learner that has converged while another one still learns, or whose learning rate is still being warmed up. With two "
    "learners, it may be the other one whose rate is too high.",
    do="isthmus explain … … shows how short the updates of a round are; look whether the learner's rate is almost 0, its "
    "parameters are frozen, or its loop steps another optimizer than the one handed to join, and whether the rate of … is too high, whose "
    "updates are the long ones; a learner that has converged needs nothing",
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
    "the newest updates of … are … times as long as the others', for as many steps",
    means="This learner moves the model much further than the others do: its learning rate is probably too high. The "
    "others' losses may still fall, but less far.",
    like="The others' learning rates are still being warmed up, as after a restart. This alone is no failure (exit code 0).",
    do="isthmus explain … … has such a round; if the learning rate of … is too high, start it again with a lower one "
    "(hyperparameters='passed'); while the others warm up, this is usual",
    then="Once most of its newest updates are as long as the others', the sentence goes away.",
)
@row(
    "status",
    "the newest updates of … are … times as long as the others', for as many steps, and no loss has fallen: … at first, … in "
    "the newest updates",
    means="One learner moves the model so far that no learner's loss has fallen below four fifths of its first.",
    do="isthmus explain … … has such a round; if the learning rate of … is too high, start it again with a lower one "
    "(hyperparameters='passed')",
    then="Once most of its newest updates are as long as the others', the sentence goes away, and losses fall.",
    lost="what the others train meanwhile",
)
async def test_a_learner_whose_steps_are_too_long(folder: Path) -> None:
    noted, failed = mine(test_a_learner_whose_steps_are_too_long)
    async with world(folder, FEW) as w, serving(w.syncer("s1")) as syncer:
        a, c = (partial(w.learner, name, checkpoint_s=0.1) for name in "ac")
        async with training(a(), loss=lambda: 2.3), training(w.learner("b"), 0.0035, loss=lambda: 2.2) as b:
            line = await said(failed, w)
            assert "updates of b are" in line, line
            code, told = await isthmus(*command_in(line, "explain"))
            assert code == 0, told
            lengths = {name: float(length) for name, length in re.findall(r" in \d: (\w) .* length ([\d.e-]+),", told)}
            assert lengths["b"] > 3.0 * lengths.get("a", 0.0), told
            b.set()
        assert (await status(w))[0] == 1, "the run that all have left is no better"
        falls = (3.0 / n for n in range(1, 10**9))
        async with training(a(), loss=lambda: next(falls)), training(c(), 0.0035):
            assert "no loss has fallen" not in await said(noted, w)
            await well(w)
            head = syncer.coordinators[0].head
        async with training(a(), loss=lambda: next(falls)), training(c()):
            await until(lambda: syncer.coordinators[0].head > head + 20, "newer commits")
            assert "times as long" not in await well(w)

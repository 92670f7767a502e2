"""What `isthmus replay` says of objects that members stored, beside its commits, and what comes of its advice."""

import inspect
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from advice.followed import advises, command_in, isthmus, mine
from advice.lives import FEW as UNSIGNED
from advice.lives import Fault, training
from advice.rows import Row, row
from integration.test_lying_syncer import test_steps_that_there_was_no_time_for_are_named as forged
from integration.test_manifests import WEB, stored, trained
from isthmus.errors import ObjectMissing
from isthmus.format.records.keys import members_key
from isthmus.log.replaced import AFTER_S
from support.signed import EU, EVERYBODY, EVIL, SYNC, L, S, admit, agree
from support.signed import seed as signed
from support.world import World, serving, until, world

FEW = signed(msgspec.structs.replace(signed().rules, fragments=2))
"""A signed run of two fragments."""


async def replayed(here: Row, w: World, code: int = 0) -> str:
    """Run `isthmus replay`, which must have a row's line; return what it printed, in one line."""
    ended, told = await isthmus("replay", w.run.url)
    assert (ended, here.is_in(told)) == (code, True), told
    return " ".join(told.split())


@row(
    "replay",
    "fragment …: manifests/… is missing: whether the charter allowed the updates that name this manifest cannot be verified",
    means="The store has lost a manifest, which a learner's updates name. The commits are whole, and the exit code is 0.",
    do="restore it from a backup (a learner that is started again stores another one, which only its next updates name)",
    then="The line is gone.",
    lost="without a backup: the proof that the charter allowed these updates",
)
async def test_a_manifest_that_is_gone(folder: Path) -> None:
    (here,) = mine(test_a_manifest_that_is_gone)
    async with world(folder, FEW) as w:
        await admit(w, *EVERYBODY)
        await agree(w, manifests=True)
        await trained(w, 2, WEB)
        (key,) = await stored(w)
        kept = await w.store.get(key)
        await w.store.delete(key)
        assert " 0 differ" in await replayed(here, w)
        await trained(w, 1, WEB)
        assert key not in await stored(w)
        await w.store.put(key, kept)
        assert not here.is_in((await isthmus("replay", w.run.url))[1])


@row(
    "replay",
    "snapshots/…: …: this snapshot is ignored",
    means="A snapshot is damaged; or, in a signed run, something stands in its place that no present syncer has signed. Nobody "
    "uses it; the commits are verified without it.",
    do="nothing: a syncer or the collector replaces it. If nobody was expelled and no disk is at fault, find out who may write "
    "there (`isthmus doctor … --role learner` names rights that are too wide)",
    then="With the next snapshots the older ones are collected, and the line is gone.",
)
@pytest.mark.parametrize("signed_run", [True, False])
async def test_a_snapshot_that_is_ignored(folder: Path, signed_run: bool) -> None:
    (here,) = mine(test_a_snapshot_that_is_ignored)
    async with world(folder, FEW if signed_run else UNSIGNED) as w:
        if signed_run:
            await admit(w, *EVERYBODY)
        merging, training_ = (w.by(SYNC), w.by(EU)) if signed_run else (w, w)
        async with serving(merging.syncer("s-1")) as syncer, training(training_.learner("eu")):
            await until(lambda: min(k.head for k in syncer.coordinators) >= 4, "it is merged")
        path = max((folder / "snapshots/00000").iterdir())
        kept = path.read_bytes()
        path.write_bytes(kept[:-1])
        assert " 0 differ" in await replayed(here, w)
        path.write_bytes(kept)
        assert not here.is_in((await isthmus("replay", w.run.url))[1])


@row(
    "replay",
    "… wrote this under membership …, … after membership … had replaced it; …: such commits are valid; their writer may not "
    "have known",
    means="A syncer that was expelled, or that did not know that a learner was, wrote these commits more than a minute after the "
    "newer membership. They count.",
    like="A clock of that syncer that is behind by more than a minute.",
    do="see what isthmus status … says: if it still names that syncer, end it and take its rights away",
    then="The line stays, since the log does; status no longer names the syncer once others have written newer commits.",
    lost="what the other syncers would have merged instead",
)
async def test_commits_under_a_membership_that_was_replaced(folder: Path) -> None:
    (here,) = mine(test_commits_under_a_membership_that_was_replaced)
    async with world(folder, FEW) as w:
        await admit(w, *EVERYBODY, ("t-1", S, EVIL))
        async with serving(w.by(SYNC).syncer("s-1")) as syncer, training(w.by(EU).learner("eu")):
            await until(lambda: min(k.head for k in syncer.coordinators) >= 2, "it is merged")
        await admit(w, ("eu", L, EU), ("t-1", S, EVIL))
        lacking = Fault(ObjectMissing(members_key(2)), members_key(2), ("get",)).of(w)
        later = replace(lacking, runtime=replace(w.runtime, wall=lambda: w.runtime.wall() + 2 * AFTER_S))
        async with serving(later.by(SYNC).syncer("s-1")) as syncer, training(w.by(EU).learner("eu")):
            heads = [k.head for k in syncer.coordinators]
            await until(
                lambda: all(k.head > n + 1 for k, n in zip(syncer.coordinators, heads, strict=True)), "it goes on"
            )
        await replayed(here, w)
        code, told = await isthmus("status", w.run.url, "--bus", w.bus.url)
        assert (code, "s-1 goes on under a membership that was replaced" in told) == (0, True), told


@row(
    "replay",
    "updates/…: … steps were believed; … s had passed since version …, and others' updates are of …: more than the times in the "
    "log allow",
    means="A learner and a syncer state together that an update has more steps than there was time for. Such an update may be "
    "longer and weighs more than it should. It is no difference, and the exit code is 0.",
    do="compare with the learner's own log how many steps it made; a wrong clock of a syncer looks the same (isthmus doctor … "
    "looks at the clocks)",
    then="If the learner made fewer steps, both lied: the owner expels them (`isthmus members remove`). The line stays.",
    lost="what the update outweighed",
)
async def test_more_steps_than_there_was_time_for(folder: Path) -> None:
    (here,) = mine(test_more_steps_than_there_was_time_for)
    await inspect.unwrap(forged)(folder)
    code, told = await isthmus("replay", str(folder))
    assert (code, " 0 differ" in told) == (0, True), told
    advises(here, told)
    code, told = await isthmus(*command_in(told, "doctor"), "--size", "0.02")
    assert "clock" in told, told

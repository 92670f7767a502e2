"""What `isthmus status` says of learners whose updates are not merged, and what comes of its advice, in virtual time."""

import asyncio
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import pytest
from typing_extensions import override

from advice.followed import advises, isthmus, mine, says
from advice.lives import Fault
from advice.lives import training as trains
from advice.rows import A_GAP, Row, row
from advice.test_alerts import Deaf
from isthmus.agent.trouble import PATIENCE_S
from isthmus.bus import BusItem
from isthmus.errors import Denied, ObjectMissing, StoreFull, StoreReadOnly, Unavailable
from isthmus.format.records.charter import Terms
from isthmus.format.records.frame import Blob, Data
from isthmus.format.records.keys import MEMBERS, members_key
from isthmus.format.records.objects import Source
from isthmus.format.rules import Pace, Rules
from isthmus.format.signing.keys import fingerprint
from isthmus.inspect import live as live_
from isthmus.inspect.health_summary import Health, health, of_log
from isthmus.inspect.live import Live
from isthmus.inspect.status import read_status
from isthmus.learner import manifest as manifests
from isthmus.learner.backend import local_array
from isthmus.learner.manifest import statement
from isthmus.log.heal import newest_starts
from isthmus.log.listing import checkpoints_in
from isthmus.log.replaced import AFTER_S
from isthmus.runtime.descriptors import explained
from isthmus.store import Layer
from isthmus.store.layer import Send
from isthmus.store.watched import WRITES
from support.signed import EU, EVERYBODY, EVIL, NORTH, OWNER, SYNC, US, L, S, admit, agree, seed
from support.world import World, in_virtual_time, newest_commit, seed_of, serving, train, until, world

T = TypeVar("T")

training = partial(trains, step_s=0.25)
PACE = Pace(heartbeat_s=0.5, silence_s=2.0)
FEW = seed_of(Rules(fragments=2, sync_every=4), PACE)
PATIENT_S = 40.0
"""Time [s] within which a learner must have said what it waits for: it says so after ten seconds."""


async def line(w: World) -> str:
    """Return the first line of `isthmus status`."""
    return (await judged(w)).said


async def judged(w: World) -> Health:
    """Return the health that `isthmus status` prints."""
    log = w.log
    await log.members.refresh(w.store)
    return health(await read_status(log, w.bus, w.runtime, 1.0), "s3://b/run", "redis://h")


async def said(here: Row, w: World) -> str:
    """Wait until status has a row's sentence; return its line, which must have the advice."""
    for _ in range(int(PATIENT_S)):
        if says(here, found := await line(w)):
            advises(here, found)
            return found
        await asyncio.sleep(1.0)
    raise AssertionError(f"never said: {here.said}\nbut: {found}")


async def over(here: Row, w: World) -> None:
    """Wait until status no longer has a row's sentence."""
    for _ in range(int(PATIENT_S)):
        if not says(here, found := await line(w)):
            return
        await asyncio.sleep(1.0)
    raise AssertionError(f"still said: {found}")


CUT_OFF = "of what it trains meanwhile, what comes too late (stale) because others are merged; alone, what a gap loses"
DOCTOR = "it goes on by itself once that is over; isthmus doctor … --bus … --role …, beside it, says what is wrong"


@row(
    "status",
    "…: waits for store (… s)",
    means="This learner or syncer gets no answer from its store, and the words behind it, if any, are the last error's. A "
    "learner trains on; other syncers take over.",
    do=DOCTOR,
    then="It uploads again, and is merged.",
    lost=CUT_OFF,
)
@row(
    "status",
    "…: waits for permission (… for … s; it ends after … s), which says: …",
    means="Requests of this kind, in this folder, are refused to this learner or syncer: its credentials have expired, or a "
    "policy or the owner of a folder was changed. Other folders may still be open to it. It ends with an error at the first "
    "refusal after that time.",
    do=DOCTOR,
    then="With new credentials in their old place it goes on by itself.",
    lost=CUT_OFF,
)
@row(
    "status",
    "…: waits for bus",
    means="This learner or syncer cannot publish, but still reads or stores: its user lacks a permission, or Redis is full.",
    like="A learner that is cut off from the bus altogether is silent: `no messages come from …`.",
    do=DOCTOR,
    then="It publishes again, and is merged.",
    lost=CUT_OFF,
)
@row(
    "log",
    "…: requests that worked before are refused (for … s): …; check credentials and policies",
    means="A learner's or a syncer's log: store or bus answers, and denies what it allowed before. Credentials have expired, or a "
    "policy or a password was changed. If it lasts 300 s, the process ends.",
    do="check credentials and policies",
    then="With new credentials in their old place: `…: requests that worked before are refused: over`.",
    lost=CUT_OFF,
)
@pytest.mark.parametrize("which", [0, 1, 2], ids=["store", "permission", "bus"])
@in_virtual_time
async def test_a_learner_that_is_kept_from_store_or_bus(which: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    *status_says, log_says = mine(test_a_learner_that_is_kept_from_store_or_bus)
    here = status_says[which]
    error = Unavailable("refused") if which == 0 else Denied("403: ExpiredToken")
    fault = Fault(error, "" if which == 0 else "updates/", mended=True)
    async with world(Path(), FEW) as w, serving(w.syncer("s1")), training(w.learner("a")):
        deaf = Reading(w.bus)
        async with training((replace(w, bus=deaf) if which == 2 else fault.of(w)).learner("b")):
            await asyncio.sleep(3.0)
            fault.mended = deaf.mended = False
            await said(here, w)
            await asyncio.sleep(20.0)
            fault.mended = deaf.mended = True
            await over(here, w)
            await asyncio.sleep(10.0)
    assert "b: no update " not in caplog.text, "another trouble explains it"
    if which == 1:
        advises(log_says, caplog.text)
        assert "b: requests that worked before are refused: over" in caplog.text


@row(
    "status",
    "…: waits for store (… s), which says: …: this process has no file descriptors left: raise its limit of … (ulimit -n, "
    "LimitNOFILE= of a systemd service), and start it again",
    means="This learner or syncer may open no further connection or file. Store and bus are well. Syncers take over from a syncer.",
    like="One whose bus is a server may not reach that either: `no messages come from …`, or a syncer that is not heard; its log says it.",
    do="it does not go on by itself: the limit is its own, so start it again with a higher one",
    then="It is merged, or merges, again.",
    lost="what a learner trained since its newest update and checkpoint",
)
@in_virtual_time
async def test_a_learner_that_has_no_file_descriptors() -> None:
    (here,) = mine(test_a_learner_that_has_no_file_descriptors)
    async with world(Path(), FEW) as w, serving(w.syncer("s1")), training(w.learner("a")):
        fault = Fault(Unavailable(f"/run: {explained('[Errno 24] Too many open files')}"), mended=True)
        async with training(fault.of(w).learner("b")):
            await asyncio.sleep(3.0)
            fault.mended = False
            assert "isthmus doctor" not in await said(here, w)
        async with training(w.learner("b")):
            await over(here, w)


@row(
    "status",
    "…: waits for store for writing (… s), which says: …",
    means="The store of this learner or syncer answers, and takes no writes: it is full, or its file system is mounted "
    "read-only, as the kernel does after an error of the disk. The words behind it are the store's.",
    do=DOCTOR,
    then="It stores again, and goes on.",
    lost=A_GAP,
)
@row(
    "log",
    "… cannot be written for now: …",
    means="A syncer's log: the store takes no writes, for the reason at the end of the line. The merge waits, and is not made again.",
    do="nothing, if it passes; else mend what the end of the line says",
    then="The fragment's next commit is logged.",
    lost=A_GAP,
)
@row(
    "log",
    "…: the store takes no writes (for … s): …; …",
    means="A learner's or a syncer's log: the store answers, and takes no writes. It is full, or its file system is mounted "
    "read-only. Of a read-only one, the end of the line has the command that mounts it anew.",
    do="give it more space, or free what the run does not need any more: isthmus gc … lists what can be deleted, and --apply deletes it",
    then="`…: the store takes no writes: over`.",
    lost=A_GAP,
)
@pytest.mark.parametrize("role", ["learner", "syncer"])
@in_virtual_time
async def test_a_store_that_takes_no_writes(role: str, caplog: pytest.LogCaptureFixture) -> None:
    here, commit_says, log_says = mine(test_a_store_that_takes_no_writes)
    full = StoreFull("/runs/one", "/runs/one", "No space left on device")
    fault = Fault(full if role == "learner" else StoreReadOnly("/runs/one is mounted read-only"), operations=WRITES)
    fault.mended = True
    async with world(Path(), FEW) as w:
        bad = fault.of(w)
        syncer, learner = ((bad if role == one else w) for one in ("syncer", "learner"))
        async with serving(syncer.syncer("s1")), training(w.learner("a")), training(learner.learner("b")):
            await asyncio.sleep(3.0)
            fault.mended = False
            told = await said(here, w)
            assert ("/runs/one is mounted read-only" if role == "syncer" else "/runs/one is full (No space") in told
            assert commit_says.is_in(caplog.text) == (role == "syncer")
            await asyncio.sleep(PATIENCE_S)
            assert log_says.is_in(caplog.text)
            assert log_says.advice_is_in(caplog.text) == (role == "learner")
            assert ("0 of 1 syncers can serve" in told) == (role == "syncer")
            fault.mended = True
            await over(here, w)


class Mute(Deaf):
    """A bus that gives out no message until it is mended, without an error."""

    @override
    async def read(self, positions: Mapping[str, str], timeout_s: float) -> Mapping[str, Sequence[BusItem]]:
        if self.mended:
            return await self._bus.read(positions, timeout_s)
        await asyncio.sleep(timeout_s)
        return {}

    def _require(self) -> None:
        """Let every request through."""


@row(
    "status",
    "…: waits for a merge (no syncer is heard…: syncers are heard here",
    means="This learner publishes, and the syncers' messages do not reach it: its bus gives it none, without an error. It "
    "trains on, and finds new versions in the store. Without `but the run goes on` it finds none, either.",
    like="If status hears no syncer, either, it says `no syncer is heard` once, and does not name the learners that only say "
    "the same.",
    do="isthmus doctor … --bus … --role learner --learner …, beside it, says what keeps their messages from it",
    then="Once it hears the syncers, status says nothing of it.",
    lost=CUT_OFF,
)
@in_virtual_time
async def test_a_learner_that_hears_no_syncer() -> None:
    (here,) = mine(test_a_learner_that_hears_no_syncer)
    async with world(Path(), FEW) as w, serving(w.syncer("s1")):
        mute = Mute(w.bus)
        async with training(replace(w, bus=mute).learner("a")):
            await asyncio.sleep(3.0)
            mute.mended = False
            await said(here, w)
            mute.mended = True
            await over(here, w)


class Reading(Deaf):
    """A bus from which nothing can be read until it is mended, though messages can be published."""

    @override
    async def append(self, stream: str, *bodies: bytes) -> None:
        await self._bus.append(stream, *bodies)


@row(
    "status",
    "… more learners have such trouble",
    means="Three learners are named, and more have the same or another trouble.",
    do="the table of learners names all",
    then="The table's column `state` has it for each.",
)
@in_virtual_time
async def test_many_learners_with_trouble() -> None:
    (here,) = mine(test_many_learners_with_trouble)
    fault = Fault(Unavailable("refused"), mended=True)
    async with world(Path(), FEW) as w, serving(w.syncer("s1")):
        far = fault.of(w)
        async with (
            training(far.learner("a")), training(far.learner("b")), training(far.learner("c")), training(far.learner("d")),
            training(far.learner("e")),
        ):  # fmt: skip
            await asyncio.sleep(3.0)
            fault.mended = False
            await said(here, w)
            status = await read_status(w.log, w.bus, w.runtime, 1.0)
            states = {v.name: status.why_behind(v) for v in status.hearing.learners.values()}
            assert all(state.startswith("waiting for store") for state in states.values())
            fault.mended = True
            await over(here, w)


# --- updates that are rejected ----------------------------------------------------------------------------------------


@row(
    "status",
    "…: waits for a merge (every update is rejected: non-finite)",
    means="What this learner trains is not a number. It neither sends that nor stores it in a checkpoint.",
    like="`… explodes` is said of updates that are numbers and far too long, with other advice: a checkpoint may have them, too.",
    do="stop it, clip gradients or lower the learning rate (and join with hyperparameters='passed', or it goes on with that of its "
    "checkpoint), and start it again under its name: it goes on from its newest checkpoint, which is from before, since values that "
    "are not finite are not stored; without one it begins at step 0",
    then="It goes on after the step of its checkpoint, with its moments, and is merged again.",
    lost="what it trained since it diverged",
)
@in_virtual_time
async def test_a_learner_that_trains_what_is_no_number() -> None:
    (here,) = mine(test_a_learner_that_trains_what_is_no_number)
    async with world(Path(), FEW) as w, serving(w.syncer("s1")), training(w.learner("a")), training(w.learner("c")):
        await asyncio.sleep(3.0)
        first = w.learner("b", checkpoint_s=0.5)
        async with training(first):
            await asyncio.sleep(5.0)
            assert checkpoints_in(await w.store.list("learners/b/"))
        async with training(w.learner("b", checkpoint_s=0.5), math.nan):
            await said(here, w)
            await asyncio.sleep(3.0)
        again = w.learner("b")
        async with training(again):
            await over(here, w)
            checkpoint = again.history.checkpoint
            assert checkpoint is not None
            assert all(np.isfinite(local_array(point.values)).all() for point in checkpoint.points)


@row(
    "status",
    "… of the tokens of … were rejected, and it has left",
    means="More than half of what this learner trained was rejected, and it left as one that is done does. While it trained, status "
    "named it as one that waits for a merge or explodes.",
    do="… names the reason; the model has nothing of that work, and is not harmed by it",
    then="Nothing changes: the sentence, and `--check` ending with 1, say that this run lacks work that was paid for.",
    lost="that work",
)
@in_virtual_time
async def test_a_learner_that_left_with_most_of_its_work_rejected() -> None:
    (here,) = mine(test_a_learner_that_left_with_most_of_its_work_rejected)
    async with world(Path(), FEW) as w, serving(w.syncer("s1")):
        async with training(w.learner("a")) as a, training(w.learner("b"), math.nan) as b:
            await asyncio.sleep(5.0)
            for done in (b, a):
                done.set()
        found = await said(here, w)
        assert "of the tokens of a" not in found
        assert found.endswith("2 of 2 learners are done; the last commit is of " + found[-8:]), found


@in_virtual_time
async def test_a_learner_whose_updates_are_rejected_as_too_long_explodes_for_as_long_as_it_trains() -> None:
    """Its own heartbeat says that it waits for a merge, now and then: status says one thing all the time."""
    async with world(Path(), FEW) as w, serving(w.syncer("s1")), training(w.learner("a")), training(w.learner("c")):
        await asyncio.sleep(3.0)
        async with training(w.learner("b"), 1e6):
            await asyncio.sleep(5.0)
            lines = []
            for _ in range(20):
                lines.append(await line(w))
                await asyncio.sleep(0.5)
            assert [one for one in lines if not one.startswith("b explodes: ")] == []
            assert [one for one in lines if not one.endswith("; 2 of 3 learners merge")] == []
            assert "rejected (too-long)" in lines[-1]
        async with training(w.learner("b-2")):
            await asyncio.sleep(10.0)
            assert "no messages come from b, which explodes" in (told := await line(w))
            assert "b explodes: " not in told
            assert told.count("no messages come from") == 1, "it is not told to come back, too"


class Loses(Layer):
    """A store that confirms the uploads of a learner and forgets them, until it is mended."""

    mended = False

    @override
    async def create(self, key: str, data: Blob) -> bool:
        return True if self._loses(key) else await super().create(key, data)

    @override
    async def put(self, key: str, data: Data) -> None:
        if not self._loses(key):
            await super().put(key, data)

    def _loses(self, key: str) -> bool:
        return key.startswith("updates/") and not Loses.mended


@row(
    "status",
    "…: waits for a merge (every update is rejected: missing)",
    means="missing, truncated, digest-mismatch, unreadable: the syncer does not find in the store what this learner "
    "announces. They use two stores, or the store loses or changes objects.",
    do="the syncer cannot use what it finds in the store: see its log, and the store's policies",
    then="Once the syncer can read the objects, they are merged.",
    lost="the work in these updates",
)
@in_virtual_time
async def test_a_learner_whose_updates_do_not_reach_the_syncer() -> None:
    (here,) = mine(test_a_learner_whose_updates_do_not_reach_the_syncer)
    Loses.mended = False
    async with (
        world(Path(), FEW) as w,
        serving(w.syncer("s1")),
        training(w.learner("a")),
        training(w.through(Loses).learner("b")),
    ):
        await said(here, w)
        Loses.mended = True
        await over(here, w)


@row(
    "status",
    "…: waits for a merge (every update is rejected: wrong-layout)",
    means="wrong-run, wrong-layout, wrong-author, malformed, oversized: this program writes what the run does not have, such "
    "as another codec.",
    do="this program does not match the run: see the syncer's log",
    then="The right program is merged.",
    lost="the work in these updates",
)
@in_virtual_time
async def test_a_learner_of_another_program() -> None:
    (here,) = mine(test_a_learner_of_another_program)
    async with world(Path(), FEW) as w, serving(w.syncer("s1")), training(w.learner("a")):
        header = msgspec.structs.replace(w.run.header, rules=msgspec.structs.replace(w.run.rules, codec_up="f32"))
        strange = replace(w, run=replace(w.run, header=header))
        async with training(strange.learner("b")):
            await said(here, w)
        async with training(w.learner("b")):
            await over(here, w)


class Slow(Layer):
    """A store that takes longer to give out a version than the run needs for the next ones, until it is mended."""

    mended = False

    @override
    async def _through(self, operation: str, key: str, send: Send[T]) -> T:
        if operation == "get" and key.startswith("values/") and not Slow.mended:
            await asyncio.sleep(1.5)
        return await send()


@row(
    "status",
    "…: waits for a merge (every update is rejected: stale)",
    means="This learner learns of new versions so late that the run is more versions ahead of its updates than `staleness` allows.",
    do="its updates arrive too late: give it a faster link or machine (`isthmus status --json` has its upload_s and "
    "step_s), or start the syncers again with a higher --staleness",
    then="Its updates arrive in time, and it is merged.",
    lost="the work in these updates",
)
@in_virtual_time
async def test_a_learner_that_is_too_slow() -> None:
    (here,) = mine(test_a_learner_that_is_too_slow)
    Slow.mended = False
    made = seed_of(
        Rules(fragments=1, sync_every=1, sync_every_max=1), Pace(heartbeat_s=0.5, silence_s=2.0, staleness=0)
    )
    async with (
        world(Path(), made) as w,
        serving(w.syncer("s1")),
        training(w.learner("a")),
        training(w.through(Slow).learner("b")),
    ):
        await said(here, w)
        Slow.mended = True
        await over(here, w)


class LosesManifests(Loses):
    """A store that confirms a manifest and forgets it, until it is mended."""

    @override
    def _loses(self, key: str) -> bool:
        return key.startswith("manifests/eu/") and not Loses.mended


@row(
    "status",
    "updates of … are rejected for their manifest (no-manifest)",
    means="The charter of this run asks for manifests, and this learner's updates name none, or one of another learner, run "
    "or model.",
    do="the charter asks for a manifest: start this learner with --manifest (isthmus.join: manifest=)",
    then="Its updates name the manifest, and it is merged.",
    lost="the work in these updates",
)
@row(
    "status",
    "updates of … are rejected for their manifest (source-not-allowed)",
    means="The manifest of this learner declares a source that its terms in the charter do not have.",
    do="its manifest declares data that the charter does not allow it: `isthmus charter show` has its sources",
    then="A manifest with allowed sources, of training on no others, lets it be merged.",
    lost="the work in these updates",
)
@row(
    "status",
    "updates of … are rejected for their manifest (unread-manifest)",
    means="The charter asks for manifests, and the store does not have this learner's, or denies it to the syncer.",
    do="the syncer cannot read its manifest: restart this learner to store it again, or let syncers read manifests/*",
    then="Its updates are merged; those that wait, too.",
    lost="nothing, unless it lasts: what comes too late by then (stale)",
)
@pytest.mark.parametrize("which", [0, 1, 2], ids=["none", "source", "lost"])
@in_virtual_time
async def test_a_learner_whose_manifest_the_charter_does_not_accept(
    which: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = mine(test_a_learner_whose_manifest_the_charter_does_not_accept)[which]
    Loses.mended = False
    good = statement({"code": "1", "hardware": "one", "source": [{"name": "web", "description": ""}]})
    bad = msgspec.structs.replace(good, sources=(Source("books", bytes(32)),))
    async with world(Path(), replace(FEW, signer=OWNER)) as w:
        await admit(w, *EVERYBODY)
        await agree(w, manifests=True, terms=(Terms(member="eu", sources=("web",)),))
        eu = w.by(EU).through(LosesManifests) if which == 2 else w.by(EU)
        async with (
            serving(w.by(SYNC).syncer("s-1")),
            training(w.by(US).learner("us-1", manifest=good)),
        ):
            with (
                monkeypatch.context() as unasked
            ):  # such a learner does not start; one that runs when the charter changes goes on
                unasked.setattr(manifests, "objection", lambda *_: "")
                async with training(eu.learner("eu", manifest=(None, bad, good)[which])):
                    await said(here, w)
            Loses.mended = True
            async with training(eu.learner("eu", manifest=good)):
                await over(here, w)


# --- updates that are not sent or not merged --------------------------------------------------------------------------


@row(
    "status",
    "…: waits for a merge (no update was sent)",
    means="For four periods no upload of this learner has come through.",
    do="no upload finishes: check its uplink (`isthmus doctor` on its machine measures it)",
    then="Its uploads come through, and it is merged.",
    lost="what was overwritten meanwhile",
)
@in_virtual_time
async def test_a_learner_whose_uploads_hang() -> None:
    (here,) = mine(test_a_learner_whose_uploads_hang)
    through = asyncio.Event()

    class Hangs(Layer):
        @override
        async def put(self, key: str, data: Data) -> None:
            if key.startswith("updates/"):
                await through.wait()
            await super().put(key, data)

        @override
        async def create(self, key: str, data: Blob) -> bool:
            if key.startswith("updates/"):
                await through.wait()
            return await super().create(key, data)

    async with (
        world(Path(), FEW) as w, serving(w.syncer("s1")), training(w.learner("a")), training(w.through(Hangs).learner("b")),
    ):  # fmt: skip
        await said(here, w)
        through.set()
        await over(here, w)


@row(
    "status",
    "…: waits for a merge (no update is merged)",
    means="For four periods no update of this learner was merged, and none was rejected: it is too late for each round.",
    do="the table of fragments shows whether new versions come, and whom rounds wait for: if none comes, the syncers' logs "
    "say why; else isthmus explain … … names the learners that a round missed, and by how much",
    then="Once rounds wait long enough for it, or it is as quick as the others, it is merged.",
    lost="what was overwritten meanwhile",
)
@in_virtual_time
async def test_a_learner_that_no_round_merges() -> None:
    (here,) = mine(test_a_learner_that_no_round_merges)
    fault = Fault(Unavailable("503 SlowDown"), "values/", ("put",))
    async with world(Path(), FEW) as w, serving(fault.of(w).syncer("s1")), training(w.learner("a")):
        await said(here, w)
        fault.mended = True
        await over(here, w)


# --- syncers ----------------------------------------------------------------------------------------------------------


@row(
    "status",
    "… cannot serve for now: its log says why",
    like="With `0 of … syncers can serve for now` before it, nothing is merged; else other syncers take over its fragments.",
    means="The syncer publishes, and does not hear its own messages: its bus gives it none, without an error.",
    do="its log says why",
    then="Once it hears its messages, it takes its fragments up again.",
    lost=A_GAP,
)
@in_virtual_time
async def test_a_syncer_that_hears_nothing() -> None:
    (here,) = mine(test_a_syncer_that_hears_nothing)
    async with world(Path(), FEW) as w:
        mute = Mute(w.bus)
        async with serving(replace(w, bus=mute).syncer("s1")), training(w.learner("a")):
            await asyncio.sleep(3.0)
            mute.mended = False
            await said(here, w)
            mute.mended = True
            await over(here, w)


@row(
    "status",
    "… heard, and the membership does not name … work is not merged",
    means="This learner was expelled, and trains on. Syncers ignore it.",
    do="end …, or make it a member again, as the owner: isthmus members add … … --public-key FILE.pub --key OWNER_KEY_FILE",
    then="The sentence goes away.",
    lost="what it has trained since it was expelled",
)
@in_virtual_time
async def test_a_learner_that_was_expelled(folder: Path) -> None:
    (here,) = mine(test_a_learner_that_was_expelled)
    async with world(folder, seed()) as w:
        await admit(w, *EVERYBODY, ("more", L, EVIL))
        async with serving(w.by(SYNC).syncer("s-1")), training(w.by(EU).learner("eu")):
            async with training(w.by(EVIL).learner("more")):
                await asyncio.sleep(2.0)
                assert not says(here, await line(w))
                await admit(w, *EVERYBODY)
                assert "more is heard" in await said(here, w)
            await over(here, w)


BACK = (
    "(its folder's env, or --key); if the old key was to stay, … gives it back: isthmus members rotate … --member … "
    "--public-key FILE.pub --key OWNER_KEY_FILE"
)


@row(
    "status",
    "… speaks with the key …, and since membership … its key is …: what it trains is not merged",
    means="The owner gave the learner another key, and this process began before that. Its messages count for nothing; the "
    "table shows the learner as silent, or not at all.",
    do=f"end it, and start it again with the key … {BACK}",
    then="The learner goes on from the checkpoint that the owner vouched for, and the sentence goes away.",
    lost="what it has trained since the owner gave it another key",
)
@row(
    "status",
    "… spoke last with the key …, and since membership … its key is …: what it trained since is not merged",
    means="The same, and the process with the old key has ended.",
    do=f"start it again, from the checkpoint that the owner vouched for, with the key … {BACK}",
    then="The learner goes on from that checkpoint, and the sentence goes away.",
    lost="what it has trained since the owner gave it another key",
)
@in_virtual_time
async def test_a_learner_whose_key_was_replaced(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    here, after = mine(test_a_learner_whose_key_was_replaced)
    async with world(folder, seed()) as w:
        await admit(w, *EVERYBODY, ("more", L, EVIL))
        async with serving(w.by(SYNC).syncer("s-1")), training(w.by(EU).learner("eu")):
            async with training(agent := w.by(EVIL).learner("more")):
                await asyncio.sleep(2.0)
                assert not says(here, await line(w))
                await admit(w, *EVERYBODY, ("more", L, NORTH))
                told = await said(here, w)
                assert "no messages come from more" not in told
                assert "more joined in the store" not in told
                assert f"more speaks with the key {fingerprint(EVIL.author)}, and since membership 2" in told
            told = await said(after, w)
            assert not says(here, told)
            assert "more joined in the store" not in told
            why = (
                f"since membership 2 the key of more is {fingerprint(NORTH.author)}, and not {fingerprint(EVIL.author)}"
            )
            assert f"{why}: nothing that this process trains from now on is merged" in caplog.text
            assert why in str(agent.summary())
            assert "rejected a message on learner/more" not in "".join(
                record.getMessage() for record in caplog.records if record.name == "isthmus.learner.agent"
            )
            async with training(w.by(NORTH).learner("more")):
                await over(after, w)
                assert not says(here, await line(w))
            assert not says(after, await line(w)), "the messages of before are followed by those of the new key"


@row(
    "status",
    "… says that it knows membership …, and the store has … as the newest one",
    means="The store lost a version of the membership, or withholds it from whoever asks here. If commits were made under "
    "it, `members/… is missing` is said instead.",
    like="For a moment, a store whose reads lag behind its writes.",
    do="if the store lost the others, restore members/… from a backup; else it withholds them, and who was expelled by "
    "that may still be merged (SECURITY.md)",
    then="Once the store shows the version, the sentence goes away. If it never does, its operator is not to be trusted.",
    lost="what an expelled member had merged meanwhile, if the others are not to keep it",
)
@in_virtual_time
async def test_a_store_that_withholds_a_membership(folder: Path) -> None:
    (here,) = mine(test_a_store_that_withholds_a_membership)
    async with world(folder, seed()) as w:
        await admit(w, *EVERYBODY)
        async with serving(w.by(SYNC).syncer("s-1")):
            async with training(w.by(EU).learner("eu")):
                await asyncio.sleep(2.0)
            await admit(w, *EVERYBODY, ("more", L, EVIL))  # no commit is made under it yet: this would say more
            hidden = Fault(ObjectMissing(members_key(2)), members_key(2), ("get",))
            await said(here, hidden.of(w))
            hidden.mended = True
            await over(here, hidden.of(w))


@row(
    "status",
    "… goes on under a membership that was replaced: …",
    means="A syncer that was expelled, or that does not know that a learner was, wrote one of the newest commits, more than "
    "a minute after the membership that says so. The commits are valid, since a membership leaves room for commits that "
    "are under way. A syncer stops, or leaves the learner out, as soon as it reads the membership: this one has a copy of "
    "the run that lacks it, or does not read it on purpose.",
    do="end … if it lives, and take its rights to the store away; if it is to go on, it needs a store that has members/…; "
    "isthmus replay … names all such commits",
    then="When other syncers have written newer commits, the sentence goes away; `isthmus replay` and `isthmus audit` keep "
    "naming these commits.",
    lost="what the other syncers would have merged instead",
)
@in_virtual_time
async def test_a_syncer_that_goes_on_after_it_was_expelled(folder: Path) -> None:
    (here,) = mine(test_a_syncer_that_goes_on_after_it_was_expelled)
    async with world(folder, seed()) as w:
        await admit(w, *EVERYBODY, ("t-1", S, EVIL))
        async with serving(w.by(SYNC).syncer("s-1")), training(w.by(EU).learner("eu")):
            await asyncio.sleep(2.0)
        await admit(w, ("eu", L, EU), ("t-1", S, EVIL))
        assert not says(here, await line(w))
        lacking = Fault(ObjectMissing(members_key(2)), members_key(2), ("get",))
        copy = lacking.of(w)
        await asyncio.sleep(AFTER_S)
        async with serving(copy.by(SYNC).syncer("s-1")), training(w.by(EU).learner("eu")):
            await asyncio.sleep(2.0)
        assert "s-1" in await said(here, w)
        async with serving(w.by(EVIL).syncer("t-1")), training(w.by(EU).learner("eu")):
            await over(here, w)


LACKING = (
    "restore commits/… and what follows it from a backup. Without one, stop all learners and syncers, "
    "delete the checkpoints that isthmus heal … then names, since they know the lost version (a learner "
    "that is started names its own, too), and start them again: the fragment goes on from version …; a "
    "learner that has no older checkpoint goes on with the run's model alone, from its first step"
)


@row(
    "status",
    "… version … of fragment …, and its log ends at version …: no update on that version can be merged",
    means="The store has lost the newest commits of this fragment, as when it was set back to an older backup, while learners "
    "that had fetched what they published train on. The fragment stands still.",
    like="For a moment, a store whose reads lag behind its writes.",
    do=LACKING,
    then="With the commits restored, the fragment is merged again.",
    lost="without a backup: what the lost commits merged, and what learners trained since; of a learner whose checkpoints all know it "
    "also its optimizer state, its step and its place in the data",
)
@row(
    "log",
    "… version … of fragment …, and its log ends at version …: no update on that version can be merged",
    means="The same, in a syncer's log.",
    do=LACKING,
    then="With the commits restored, the fragment is merged again.",
    lost="without a backup: what the lost commits merged, and what learners trained since; of a learner whose checkpoints all know it "
    "also its optimizer state, its step and its place in the data",
)
async def test_learners_that_know_versions_that_the_log_lacks(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    here, logged = mine(test_learners_that_know_versions_that_the_log_lacks)
    async with world(folder, FEW) as w, training(w.learner("a")):
        async with serving(w.syncer("s1"), killed=True) as syncer:
            await until(lambda: min(k.head for k in syncer.coordinators) >= 8, "it merges")
        head = (await newest_commit(w, 0)).version
        rest = folder / "updates" / "00000" / "a"
        await until(lambda: any(path.name.startswith(f"{head:012d}-") for path in rest.iterdir()), "a goes on")
        gone = range(head - 3, head + 1)
        files = [
            p for kind in ("commits", "values", "snapshots", "updates") for p in (folder / kind / "00000").rglob("*")
        ]
        lost = [path for path in files if path.is_file() and int(path.name[:12]) in gone]
        kept = {path: path.read_bytes() for path in lost}
        assert kept
        for path in lost:
            path.unlink()
        async with serving(w.syncer("s2")):
            told = await said(here, w)
            assert f"a has version {head} of fragment 0, and its log ends at version" in told
            await until(lambda: says(logged, caplog.text), "the syncer says it, too", 30.0)
            advises(logged, caplog.text)
            for path, blob in kept.items():
                path.write_bytes(blob)
            await over(here, w)


async def test_versions_that_the_log_lacks_are_named_on_a_bus_that_was_emptied(folder: Path) -> None:
    """After a loss of power only checkpoints may show them."""
    here, _ = mine(test_learners_that_know_versions_that_the_log_lacks)
    async with world(folder, FEW) as w:
        async with serving(w.syncer("s1"), killed=True) as syncer:
            agent = w.learner("a", checkpoint_s=0.2)
            await train(agent, 10, enough=lambda: min(k.head for k in syncer.coordinators) >= 9)
        ((_, seen),) = (await newest_starts(w.log)).seen
    on_it = [p for p in (folder / "updates" / "00000" / "a").iterdir() if int(p.name[:12]) >= seen[0]]
    for path in [*folder.glob("bus.sqlite*"), *on_it]:
        path.unlink()
    for path in [*(folder / "commits" / "00000").iterdir(), *(folder / "snapshots" / "00000").glob("*")]:
        if int(path.name[:12]) >= seen[0]:
            path.unlink()
    async with world(folder, FEW) as w:
        told = await said(here, w)
        assert f"a has version {seen[0]} of fragment 0, and its log ends at version {seen[0] - 1}:" in told
        assert "isthmus heal" in told


async def test_versions_that_the_log_lacks_are_named_when_all_have_left(folder: Path) -> None:
    here, _ = mine(test_learners_that_know_versions_that_the_log_lacks)
    async with world(folder, FEW) as w:
        async with serving(w.syncer("s1")) as syncer:
            await train(w.learner("a"), 10, enough=lambda: min(k.head for k in syncer.coordinators) >= 9)
        assert not says(here, (await isthmus("status", w.run.url, "--bus", w.bus.url))[1])
        head = (await newest_commit(w, 0)).version
        for path in [*(folder / "commits" / "00000").iterdir(), *(folder / "snapshots" / "00000").iterdir()]:
            if int(path.name[:12]) > head - 5:
                path.unlink()
        told = await said(here, w)
        assert re.search(rf"a has version \d+ of fragment 0, and its log ends at version {head - 5}:", told), told


@in_virtual_time
async def test_a_membership_that_is_damaged_while_it_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Status --watch and the board read the membership once, and look at it again once a minute."""
    monkeypatch.setattr(live_, "INSPECT_EVERY_S", 1.0)
    async with world(Path(), seed()) as w:
        await admit(w, *EVERYBODY)
        await admit(w, *EVERYBODY, ("more", L, EVIL))
        async with serving(w.by(SYNC).syncer("s-1")), training(w.by(EU).learner("eu"), step_s=2.0):
            gone = Fault(ObjectMissing(members_key(1)), members_key(1), ("get",), mended=True)
            seen = gone.of(w)
            live = Live(seen.log, seen.store, seen.bus, seen.runtime)
            await live.begin()
            following = asyncio.ensure_future(live.run())
            try:
                await asyncio.sleep(5.0)
                assert MEMBERS not in str(of_log(live.status(), "s3://b/run"))
                gone.mended = False
                await asyncio.sleep(5.0)
                parts = of_log(live.status(), "s3://b/run")
                assert any(f"{members_key(1)}: is missing" in part.said and "restore it" in part.do for part in parts)
                assert not health(live.status(), "s3://b/run", "sim://").ok
                gone.mended = True
                await asyncio.sleep(5.0)
                assert MEMBERS not in str(of_log(live.status(), "s3://b/run"))
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)


@row(
    "log",
    "the log cannot be read for now: …",
    means="The store did not answer when `isthmus status --watch` or the board asked for the newest commits. The figures shown "
    "stay as they were; both ask again within seconds.",
    like="`reading the log is denied`: the store answers, and refuses these credentials.",
    do="nothing, if the log has this line once or twice; else run isthmus doctor … --role reader on this machine: it says what "
    "is wrong",
    then="Once the store answers, status and board show new versions again, and the line does not come back.",
)
@row(
    "log",
    "the membership stays at version …: …",
    means="A syncer or a learner cannot read the run's newest list of members: the store does not answer, or the list is missing "
    "or damaged. The process goes on with the members that it knows. Members who were added since are rejected meanwhile, and "
    "members who were expelled since still take part.",
    do="read what follows the colon. The process asks a store that does not answer again by itself; if members/… is missing or "
    "damaged, isthmus heal … says what to restore",
    then="The log says `membership …` with the new members, and the line does not come back.",
)
@in_virtual_time
async def test_what_cannot_be_read_for_a_time_while_it_is_watched(caplog: pytest.LogCaptureFixture) -> None:
    unread, stays = mine(test_what_cannot_be_read_for_a_time_while_it_is_watched)
    caplog.set_level("INFO")
    async with world(Path(), seed()) as w:
        await admit(w, *EVERYBODY)
        away = Fault(Unavailable("s3://b: no answer"), ("commits/", MEMBERS), ("get", "list"), mended=True)
        seen = away.of(w)
        async with (
            serving(w.by(SYNC).syncer("s-1")), serving(seen.by(SYNC).syncer("s-2")), training(w.by(EU).learner("eu")),
        ):  # fmt: skip
            live = Live(seen.log, seen.store, seen.bus, seen.runtime)
            await live.begin()
            following = asyncio.ensure_future(live.run())
            try:
                await asyncio.sleep(5.0)
                assert not unread.is_in(caplog.text)
                assert not stays.is_in(caplog.text)
                away.mended = False
                await asyncio.sleep(15.0)
                assert unread.is_in(caplog.text)
                assert stays.is_in(caplog.text)
                before = max(c.version for c in live.commits.values())
                away.mended = True
                await admit(w, *EVERYBODY, ("more", L, EVIL))
                await asyncio.sleep(15.0)
                assert caplog.text.count("membership 2: ") == 3, "two syncers and a learner"
                caplog.clear()
                await asyncio.sleep(15.0)
                assert not unread.is_in(caplog.text)
                assert not stays.is_in(caplog.text)
                assert max(c.version for c in live.commits.values()) > before
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)

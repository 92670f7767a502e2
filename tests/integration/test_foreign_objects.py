"""Objects that strangers put under a run's keys are read no further than valid ones can be long, and have no effect."""

import logging
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from copy import copy
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from isthmus.errors import InputError, LogCorrupt, RecordInvalid
from isthmus.format import digests
from isthmus.format.records import frame, keys
from isthmus.format.records.frame import Body, Kind
from isthmus.format.records.objects import CheckpointHeader, ClaimHeader, MemberSpec, Part
from isthmus.format.rules import MemberRole
from isthmus.format.signing import fingerprint
from isthmus.format.signing.keys import new_signer
from isthmus.inspect.replay import replay
from isthmus.learner.global_local import global_local
from isthmus.learner.resume import read_checkpoint
from isthmus.log import Log, gc, heal, merge
from isthmus.log.holes import require_commits, require_whole
from isthmus.log.listing import checkpoints_in
from isthmus.log.membership import Members, changed, write
from isthmus.log.run import read_run
from isthmus.log.trust import Trust
from isthmus.reasons import Reason
from isthmus.store import checked
from isthmus.store.layer import Layer
from isthmus_services.commands.members import _vouched
from support.forgery import COLLECTOR, EU, OWNER, RULES, SYNC, Stage, earlier, entries
from support.world import World, in_virtual_time, seed_of, serving, train, world

LATER = "learners/eu/999999/checkpoints/99999999999"
STAGE = Stage()
SIGNED = replace(seed_of(RULES), signer=OWNER)


@asynccontextmanager
async def checkpointed(folder: Path, *steps: int) -> AsyncIterator[tuple[World, Members, Stage]]:
    """Create a signed run in which `eu` has written checkpoints at these steps."""
    async with world(folder, SIGNED) as w:
        members, stage = Members(w.run), copy(STAGE)
        for specs in (earlier(), entries()):
            await write(w.store, members, OWNER, specs, [0] * len(w.run.layout.fragments), 1.8e9)
        stage.run = w.run
        for step in steps:
            blob = stage.checkpoint(step=step)
            frame.seal(blob, EU)
            await w.store.put(keys.checkpoint_key("eu", 1, step, frame.digest(blob)), blob)
        yield w, members, stage


def claims_a_long_header() -> bytes:
    """Return an unsigned frame prefix which says that a header of 60 MiB follows."""
    blob = bytearray(frame.PREFIX.size)
    frame.PREFIX.pack_into(
        blob, 0, frame.MAGIC, frame.FRAME_VERSION, Kind.CHECKPOINT, 60 << 20, 0, 0, 0, bytes(32), bytes(64)
    )
    return bytes(blob)


async def test_junk_that_is_called_a_later_checkpoint_costs_no_good_one(folder: Path) -> None:
    async with checkpointed(folder, 12, 24) as (w, members, _):
        log = Log(w.run, w.store, w.runtime, COLLECTOR, members)
        for n in (1, 2):
            await w.store.put(f"{LATER}{n}-{n:016x}", claims_a_long_header())
        await gc.apply(log, await gc.plan(log, min_age_s=-10))
        left = checkpoints_in(await w.store.list("learners/"))
        good = [e for e in left if await read_checkpoint(log, e.key, e.size) is not None]
        assert [keys.version_in(e.key) for e in good] == [24, 12]
        assert good == left, "the junk must be deleted"


async def test_junk_claims_are_collected_by_the_owner_alone(folder: Path) -> None:
    async with checkpointed(folder, 24) as (w, members, stage):
        header = msgspec.structs.replace(stage.header(Kind.CLAIM), run=w.run.digest)
        assert isinstance(header, ClaimHeader)
        good = frame.draft(Kind.CLAIM, header).blob
        frame.seal(good, EU)
        genuine = keys.claim_key(header.learner, header.incarnation)
        await w.store.put(genuine, good)
        # One claim is signed by a stranger, one is unsigned, and one may have been damaged in transit.
        forged, unsigned, damaged = bytearray(good), bytearray(good), bytearray(good)
        frame.seal(forged, new_signer())
        unsigned[32:128] = bytes(96)
        damaged[-1] ^= 1
        for life, blob in ((101, forged), (102, unsigned), (103, damaged)):
            await w.store.put(keys.claim_key("eu", life), blob)
        for signer in (COLLECTOR, None, OWNER):
            log = Log(w.run, w.store, w.runtime, signer, members)
            doomed = (await gc.plan(log, min_age_s=-10)).doomed.get("claims", [])
            if signer is OWNER:
                assert [keys.incarnation_in(e.key) for e in doomed] == [101, 102]
                await gc.apply(log, await gc.plan(log, min_age_s=-10))
            else:
                assert doomed == []
        left = [e.key for e in await w.store.list("learners/") if keys.incarnation_in(e.key)]
        assert left == [genuine, keys.claim_key("eu", 103)]


async def test_a_rotation_vouches_for_the_newest_that_is_good(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with checkpointed(folder, 24) as (w, members, _):
        await w.store.put(f"{LATER}1-{0:016x}", b"x")
        log = Log(w.run, w.store, w.runtime, OWNER, members)
        spec = MemberSpec("eu", MemberRole.LEARNER, new_signer().author)
        found, resumes = await _vouched(log, members.current, changed(members.current.members, added=spec))
        assert [len(m.vouched) for m in found if m.name == "eu"] == [1]
        assert [words.partition(" step ")[0] for words in resumes] == ["eu goes on after"]
        assert "skipping " in caplog.text
        # If no checkpoint is valid, it is said.
        for entry in checkpoints_in(await w.store.list("learners/"))[1:]:
            await w.store.delete(entry.key)
        found, resumes = await _vouched(log, members.current, found)
        assert not any(m.vouched for m in found)
        assert resumes == ["no checkpoint of eu is valid"]


async def test_the_global_buffers_are_of_the_newest_good_checkpoint(folder: Path) -> None:
    async with checkpointed(folder, 24) as (w, members, _):
        await w.store.put(f"{LATER}1-{0:016x}", b"x")
        _, whose = await global_local(Log(w.run, w.store, w.runtime, None, members))
        assert whose in (["eu"], [])  # test_global_buffers.py checks the buffers themselves
        found = [e for e in checkpoints_in(await w.store.list("learners/")) if "999999" not in e.key]
        assert len(found) == 1


async def test_the_heads_of_a_strangers_parts_are_bounded_together(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with checkpointed(folder) as (w, members, stage):
        count = 2 << 20
        packed = b"\x81\xa6pieces\xdd" + count.to_bytes(4, "big") + b"\x80" * count
        head = bytearray(frame.PREFIX.size)
        frame.PREFIX.pack_into(
            head,
            0,
            frame.MAGIC,
            frame.FRAME_VERSION,
            Kind.PART,
            len(packed),
            0,
            zlib.crc32(packed),
            0,
            EU.author,
            b"1" * 64,
        )
        part = bytes(head) + packed
        named = Part(
            key="learners/eu/000001/checkpoints/parts/x", size=len(part), head=len(part), digest=digests.digest(part)
        )
        await w.store.put(named.key, part)
        header, payload = frame.parse(stage.checkpoint(step=24), Kind.CHECKPOINT, CheckpointHeader)
        blob = frame.written(
            Kind.CHECKPOINT, msgspec.structs.replace(header, parts=(named,)), np.frombuffer(payload, np.uint8)
        )
        frame.seal(blob, EU)
        key = keys.checkpoint_key("eu", 1, 24, frame.digest(blob))
        await w.store.put(key, blob)
        log = Log(w.run, w.store, w.runtime, None, members)
        assert await read_checkpoint(log, key, len(blob), stranger=True) is None
        assert "bytes of headers, limit" in caplog.text


@in_virtual_time
async def test_a_key_that_was_expelled_says_nothing_of_later_versions(folder: Path) -> None:
    old = new_signer()
    async with world(folder, SIGNED) as w:
        members, fragments = Members(w.run), w.run.layout.fragments
        with_old = changed(entries(), added=MemberSpec("s-old", MemberRole.SYNCER, old.author))
        await write(w.store, members, OWNER, with_old, [0] * len(fragments), 1.8e9)
        async with serving(w.by(SYNC).syncer("s-1")) as syncer:
            await train(w.by(EU).learner("eu"), 20, enough=lambda: syncer.coordinators[0].head >= 3)
            heads = [coordinator.head for coordinator in syncer.coordinators]

        async def put(version: int, p: int) -> None:
            zeros = [np.zeros(fragments[p].size, np.float32) for _ in range(3)]
            blob = merge.snapshot(merge.State(version, *zeros), p, w.run.digest)
            frame.seal(blob, old)
            await w.store.put(keys.snapshot_key(p, version, frame.digest(blob)), blob)

        # While the key is a member's, its snapshot of a later version shows that versions are missing …
        await put(heads[0] + 40, 0)
        log = w.by(SYNC).log
        for look in (require_whole, require_commits):
            with pytest.raises(LogCorrupt, match="is missing"):
                await look(log, 0, heads[0])
        # … but after the key is expelled, its snapshots of later versions show nothing.
        await write(w.store, members, OWNER, entries(), heads, 1.8e9)
        await log.members.refresh(w.store)
        for p in range(len(fragments)):
            for entry in await w.store.list(keys.snapshots_prefix(p)):
                if keys.version_in(entry.key) > heads[p]:
                    await w.store.delete(entry.key)
            await put(10**6, p)
            await require_whole(log, p, heads[p])
            await require_commits(log, p, heads[p])
        fresh = w.by(SYNC).syncer("s-1")
        await fresh.recover()
        assert not any(coordinator.broken for coordinator in fresh.coordinators)
        assert not any(found.hopeless for found in await heal.diagnose(w.by(SYNC).log))
        # Replay does not take a snapshot by an expelled key as evidence against a commit.
        await put(2, 0)
        [first, *_] = await replay(w.log)
        assert first.difference is None


async def test_a_run_object_is_not_parsed_before_its_owner_has_signed_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(folder, SIGNED) as w:
        forged = await w.store.get("run")
        forged[64:128] = b"\x07" * 64
        await w.store.put("run", forged)
        monkeypatch.setattr("isthmus.log.run.parsed", lambda blob: pytest.fail("it was parsed"))
        with pytest.raises(InputError, match="is not signed by SHA256"):
            await read_run(w.store, Trust(owner=fingerprint(OWNER.author)).require)


# --- bounded reads ----------------------------------------------------------------------------------------------------


class Endless(Layer):
    """A store in which every object is endless, so that to read a whole object would never end."""

    def __init__(self, inner: Layer) -> None:
        super().__init__(inner)
        self.most = 0

    async def get(self, key: str) -> Body:
        """Fail the test: no object may be read whole."""
        pytest.fail(f"{key} is read to its end")

    async def get_range(self, key: str, start: int, stop: int) -> Body:
        """Return the range, filled up with zeros, and keep the length of the longest range."""
        self.most = max(self.most, stop - start)
        found = await super().get_range(key, start, stop)
        return bytearray(found) + bytes(stop - start - len(found))


async def test_an_object_is_read_no_further_than_one_of_its_kind_can_be(folder: Path) -> None:
    async with world(folder) as w:
        store = Endless(w.store)
        for kind in Kind:
            if frame.largest(kind, 0) > 1 << 20:
                continue
            with pytest.raises(RecordInvalid) as caught:
                await checked.whole(store, "run", kind, 100)
            assert caught.value.reason is Reason.OVERSIZED
            assert store.most == frame.largest(kind, 100) + 1
            store.most = 0
        with pytest.raises(RecordInvalid, match="more than the 5000 bytes"):
            await checked.read(store, w.runtime, "run", 5000)
        assert len(await checked.read(store, w.runtime, "run", 5000, cut=True)) == 5000
        assert store.most == 5001


@in_virtual_time
async def test_nobody_reads_an_object_to_its_end(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With endless objects, a syncer's start, a learner's join, the collector, replay and heal end with an error."""
    caplog.set_level(logging.CRITICAL)
    async with world(folder, seed_of(RULES)) as w:
        async with serving(w.syncer("s")) as syncer:
            await train(w.learner("a"), 20, enough=lambda: syncer.coordinators[0].head >= 3)
        endless = w.through(Endless)
        log = endless.log
        with pytest.raises(LogCorrupt, match="has more than the"):
            await endless.syncer("t").recover()
        with pytest.raises(LogCorrupt):
            await endless.learner("b").join()
        with pytest.raises(LogCorrupt):
            await gc.plan(log, min_age_s=-10)
        with pytest.raises(LogCorrupt):
            await replay(log)
        assert any(found.hopeless for found in await heal.diagnose(log))

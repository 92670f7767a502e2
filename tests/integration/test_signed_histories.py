"""Participants notice a store that shows two histories, withholds a membership, or was set back."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from isthmus.errors import LogCorrupt, ObjectMissing
from isthmus.format.records import frame
from isthmus.format.records.frame import Body, Kind
from isthmus.format.records.keys import checkpoint_key, commit_key, members_key, update_key
from isthmus.format.records.messages import (
    Committed,
    encode,
    learner_stream,
)
from isthmus.format.records.objects import CheckpointHeader, CommitHeader
from isthmus.inspect.health_summary import health
from isthmus.inspect.status import read_status
from isthmus.log import Log, gc
from isthmus.log.listing import checkpoints_in
from isthmus.log.log_health import look
from isthmus.store import Layer
from support.signed import COLLECTOR, EU, EVERYBODY, EVIL, SYNC, US, L, admit, an_update, announced, differences, seed
from support.world import World, in_virtual_time, serving, train, until, world

# --- a store that shows two histories ---------------------------------------------------------------------------------


@in_virtual_time
async def test_a_store_that_shows_two_histories_is_found_out_by_both_sides(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(folder, seed()) as w:
        await admit(w, *EVERYBODY)
        async with serving(w.by(SYNC).syncer("s-1")) as syncer:
            coordinator = syncer.coordinators[0]
            await train(w.by(EU).learner("eu"), 40, enough=lambda: coordinator.head >= 2)
            blob = await w.store.get(commit_key(0, 1))
            header, _ = frame.parse(blob, Kind.COMMIT, CommitHeader)
            other = frame.draft(Kind.COMMIT, msgspec.structs.replace(header, attempt="another")).blob
            frame.seal(other, SYNC)
            # The store showed the learner another commit, and the learner's next announcement has its digest.
            told = announced(
                w, "us-1", "updates/00000/us-1/x", b"x", seen=coordinator.head, seen_digest=frame.digest(other)
            )
            await w.bus.append(learner_stream("us-1"), encode(told, signer=US))
            await until(
                lambda: coordinator.rounds.rejected_total.get("malformed"), "a key that is none is rejected first"
            )
            update = an_update(w, "us-1", US, base=coordinator.head)
            key = update_key(0, "us-1", coordinator.head, frame.digest(update))
            await w.store.put(key, update)
            told = announced(
                w, "us-1", key, update, base=coordinator.head, seen=coordinator.head, seen_digest=frame.digest(other)
            )
            await w.bus.append(learner_stream("us-1"), encode(told, signer=US))
            await until(lambda: coordinator.rounds.rejected_total.get("other-history"), "it is found out")
            assert "the store shows two histories" in caplog.text
            # The learner notices it as well: the syncer announces the digest of a commit that the learner did not see.
            caplog.clear()
            learner = w.by(US).learner("us-2")
            await learner.join()
            mine = learner.downlink.known[0]
            said = Committed(
                run=w.run.digest, id="x", syncer="s-1", fragment=0, version=mine.version, digest=frame.digest(other)
            )
            learner._hear(said)
            assert "the store shows two histories" in caplog.text


# --- a store that shows less than it did ------------------------------------------------------------------------------


async def opened(w: World) -> Log:
    """Return a log with the newest membership, as a process opens it."""
    log = w.log
    await log.members.refresh(w.store)
    return log


@in_virtual_time
async def test_a_store_that_withholds_a_membership_is_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with world(folder, seed()) as w:
        await admit(w, *EVERYBODY)
        async with serving(w.by(SYNC).syncer("s-1")) as syncer:
            await train(w.by(EU).learner("eu"), 30, enough=lambda: syncer.coordinators[0].head >= 2)
            await admit(w, *EVERYBODY, ("more", L, EVIL))
            hidden = members_key(2)

            class Hides(Layer):
                async def get_range(self, key: str, start: int, stop: int) -> Body:
                    """Return a range, unless the object is withheld."""
                    if key == hidden:
                        raise ObjectMissing(key)
                    return await super().get_range(key, start, stop)

            blind = w.through(Hides).by(SYNC)
            async with serving(blind.syncer("s-2")) as other:
                await until(lambda: "s-1 says that it knows membership 2" in caplog.text, "it is named")
                assert other._log.members.current.version == 1
                told = health(await read_status(await opened(blind), w.bus, w.runtime, 1.0), "RUN", "BUS")
                assert "says that it knows membership 2, and the store has 1" in told.said
                assert not told.ok
            seeing = await read_status(await opened(w), w.bus, w.runtime, 1.0)
            assert "membership" not in health(seeing, "RUN", "BUS").said


@in_virtual_time
async def test_a_learner_does_not_go_on_where_the_store_was_set_back(folder: Path) -> None:
    async with world(folder, seed()) as w:
        await admit(w, *EVERYBODY)
        async with serving(w.by(SYNC).syncer("s-1")) as syncer:
            await train(w.by(EU).learner("eu", checkpoint_s=0.1), 60, enough=lambda: syncer.coordinators[0].head >= 6)
        log = w.by(EU).log
        await log.members.refresh(w.store)
        newest = await log.newest(0)
        assert newest is not None
        for prefix in ("commits/00000/", "snapshots/00000/", "values/00000/"):
            for entry in await w.store.list(prefix):
                if int(entry.key.rsplit("/", 1)[1][:12]) > 1:
                    await w.store.delete(entry.key)
        with pytest.raises(LogCorrupt, match="an earlier incarnation of eu has seen version") as caught:
            await w.by(EU).learner("eu").join()
        assert caught.value.key == commit_key(0, 2)
        # The error's advice helps.
        for entry in checkpoints_in(await w.store.list("learners/eu/")):
            await w.store.delete(entry.key)
        agent = w.by(EU).learner("eu")
        await agent.join()
        assert agent.downlink.known[0].version == 1


@in_virtual_time
async def test_names_of_what_nobody_wrote_are_no_versions(folder: Path) -> None:
    """Junk under the key of a snapshot of version 10¹² once made `isthmus status` use all memory."""
    async with world(folder, seed()) as w:
        await admit(w, *EVERYBODY)
        async with serving(w.by(SYNC).syncer("s-1")) as syncer:
            await train(w.by(EU).learner("eu"), 30, enough=lambda: syncer.coordinators[0].head >= 2)
            for place in ("snapshots", "values"):
                await w.store.put(f"{place}/00000/{10**12 - 1:012d}-{'0' * 16}", b"junk")
            await w.store.put(commit_key(0, 10**9), b"junk")
            log = await opened(w)
            state = await look(log)
            assert (state.wrong, [c and c.version for c in state.heads]) == ({}, [k.head for k in syncer.coordinators])
            assert await differences(w.log) == []
            # No syncer takes the junk for a sign of a hole, so the fragment is still served.
            async with serving(w.by(SYNC).syncer("s-2")) as other:
                assert other.coordinators[0].broken == ""
                head = syncer.coordinators[0].head
                await train(w.by(EU).learner("eu"), 60, enough=lambda: syncer.coordinators[0].head >= head + 2)


@in_virtual_time
async def test_the_collector_spares_a_checkpoint_that_was_damaged_on_its_way(folder: Path) -> None:
    """It deletes a checkpoint that a stranger has put beside it."""
    async with world(folder, seed()) as w:
        await admit(w, *EVERYBODY)
        async with serving(w.by(SYNC).syncer("s-1")) as syncer:
            await train(w.by(EU).learner("eu", checkpoint_s=0.1), 60, enough=lambda: syncer.coordinators[0].head >= 4)
        newest = checkpoints_in(await w.store.list("learners/eu/"))[0].key
        mine, payload = frame.parse(await w.store.get(newest), Kind.CHECKPOINT, CheckpointHeader)
        later = msgspec.structs.replace(mine, incarnation=9)
        junk = frame.written(Kind.CHECKPOINT, later, np.frombuffer(payload, np.uint8))
        frame.seal(junk, EVIL)
        strange = checkpoint_key("eu", 9, later.step, frame.digest(junk))
        await w.store.put(strange, junk)

        class Damages(Layer):
            async def get_range(self, key: str, start: int, stop: int) -> Body:
                """Return a range; the last byte is wrong if it is one of this checkpoint."""
                blob = await super().get_range(key, start, stop)
                if key == newest:
                    blob[-1] ^= 1
                return blob

        plan = await gc.plan(await opened(w.through(Damages).by(COLLECTOR)), keep=2, min_age_s=-1.0)
        doomed = {entry.key for entry in plan.doomed.get("checkpoints", ())}
        assert strange in doomed
        assert newest not in doomed

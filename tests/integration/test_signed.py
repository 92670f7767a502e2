"""In a signed run, an object or a message has no effect unless an author who may write it has signed it."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from isthmus.errors import Expelled, LogCorrupt, RecordInvalid, first_cause
from isthmus.format.records import frame
from isthmus.format.records.frame import Body, Kind
from isthmus.format.records.keys import checkpoint_key, claim_key, commit_key, members_key, update_key, value_key
from isthmus.format.records.messages import (
    SYNCER_STREAM,
    Committed,
    Leave,
    encode,
    learner_stream,
)
from isthmus.format.records.objects import CheckpointHeader, ClaimHeader, CommitHeader, MemberSpec
from isthmus.format.rules import MemberRole, Rules
from isthmus.format.signing import Signer, fingerprint
from isthmus.inspect.replay import replay
from isthmus.learner import agent as agent_module
from isthmus.log import evaluations, fold, gc, heal
from isthmus.log.bus_messages import verify_batch
from isthmus.log.listing import checkpoints_in
from isthmus.log.membership import GRACE_VERSIONS, Membership, changed, write
from isthmus.log.replaced import AFTER_S, why_not
from isthmus.reasons import Reason
from isthmus.syncer.coordinator import FragmentCoordinator
from isthmus_services.commands.members import _vouched
from support.signed import (
    COLLECTOR,
    EU,
    EVERYBODY,
    EVIL,
    OWNER,
    SYNC,
    US,
    C,
    L,
    S,
    admit,
    an_update,
    announced,
    differences,
    seed,
)
from support.world import World, all_commits, balanced, in_virtual_time, newest_commit, serving, train, until, world


@in_virtual_time
async def test_a_signed_run_trains_is_replayed_exported_and_collected(folder: Path) -> None:
    async with world(folder, seed(snapshot_every=2)) as w:
        await admit(w, *EVERYBODY)
        async with serving(w.by(SYNC).syncer("s-1")) as syncer:
            eu = w.by(EU).learner("eu")
            await train(eu, 60, enough=lambda: min(k.head for k in syncer.coordinators) >= 6)
            balanced(eu)
            assert not syncer.tallies.rejected
        commits = await all_commits(w.log)
        assert {c.header.members for cs in commits.values() for c in cs} == {1}
        # Each object is signed with its author's key.
        for prefix, author in (("updates/", EU), ("values/", SYNC), ("commits/", SYNC), ("learners/", EU)):
            for entry in await w.store.list(prefix):
                blob = await w.store.get(entry.key)
                assert frame.require_signature(blob, Kind(frame.kind_of(blob))) == author.author, entry.key
        await evaluations.note(w.by(EU).log, "loss", 1, 0.5)
        await evaluations.note(w.by(EVIL).log, "loss", 2, 0.1)
        known = w.log
        await known.members.refresh(w.store)
        assert [p.cut for p in (await evaluations.series(known, "loss")).points] == [1], (
            "a stranger's measurement is left out"
        )
        collecting = w.by(COLLECTOR).log
        await collecting.members.refresh(w.store)
        await gc.apply(collecting, await gc.plan(collecting, keep=2, min_age_s=0.0), lambda _: None)
        packed = [c.header for cs in (await all_commits(w.log)).values() for c in cs if c.in_segment]
        assert packed
        for f in w.run.layout.fragments:
            assert (await fold.fold(w.log, f.index, fold.Merging(w.log))).version == len(commits[f.index])
        assert await differences(w.log) == []
        # A collector may sign a pointer to a packed commit; a learner may not.
        key = commit_key(packed[0].fragment, packed[0].version)
        pointer = await w.store.get(key)
        assert frame.require_signature(pointer, Kind.PACKED) == COLLECTOR.author
        frame.seal(pointer, EU)
        await w.store.put(key, pointer)
        with pytest.raises(LogCorrupt, match="not a commit"):
            await known.commit(packed[0].fragment, packed[0].version)


@pytest.mark.parametrize("forger", [EVIL, US, None], ids=["a stranger", "another member", "nobody"])
@in_virtual_time
async def test_an_update_that_its_learner_did_not_sign_is_in_no_commit(folder: Path, forger: Signer | None) -> None:
    async with world(folder, seed()) as w:
        await admit(w, *EVERYBODY)
        async with serving(w.by(SYNC).syncer("s-1")) as syncer:
            coordinator = syncer.coordinators[0]
            update = an_update(w, "eu", forger)
            key = update_key(0, "eu", 0, frame.digest(update))
            await w.store.put(key, update)
            # The learner itself announces the update: it was tricked, or another process wrote to its prefix.
            await w.bus.append(learner_stream("eu"), encode(announced(w, "eu", key, update), signer=EU))
            why = Reason.UNSIGNED if forger is None else Reason.NOT_A_MEMBER
            await until(lambda: coordinator.rounds.rejected_total.get(why.value), f"rejected as {why.value}")
            assert coordinator.head == 0


@pytest.mark.parametrize(
    ("forger", "reason"),
    [(EVIL, Reason.NOT_A_MEMBER), (US, Reason.NOT_A_MEMBER), (SYNC, Reason.NOT_A_MEMBER), (None, Reason.UNSIGNED)],
    ids=["a stranger", "another member", "a syncer", "nobody"],
)
@in_virtual_time
async def test_nobody_speaks_for_another(folder: Path, forger: Signer | None, reason: Reason) -> None:
    async with world(folder, seed()) as w:
        await admit(w, *EVERYBODY)
        async with serving(w.by(SYNC).syncer("s-1")) as syncer:
            gone = Leave(run=w.run.digest, id="x", learner="eu", incarnation=99, step=0, done=True)
            agent = w.by(EU).learner("eu")
            head = syncer.coordinators[0]
            await w.bus.append(learner_stream("eu"), encode(gone, signer=forger))
            await until(lambda: syncer.tallies.rejected.get(reason.value), f"rejected as {reason.value}")
            await train(agent, 40, enough=lambda: head.head >= 2)  # the syncer hears the learner: it never left


@in_virtual_time
async def test_no_flipped_bit_of_what_a_member_signed_is_accepted(folder: Path) -> None:
    async with world(folder, seed()) as w:
        await admit(w, *EVERYBODY)
        async with serving(w.by(SYNC).syncer("s-1")) as syncer:
            await train(w.by(EU).learner("eu"), 40, enough=lambda: syncer.coordinators[0].head >= 2)
        log = w.log
        await log.members.refresh(w.store)
        said = next(s.body for s in (await w.bus.read({learner_stream("eu"): ""}, 0.0))[learner_stream("eu")] if s.body)
        draw = np.random.default_rng(0)
        for bit in draw.permutation(8 * len(said))[:1500]:
            with pytest.raises(RecordInvalid):
                verify_batch(learner_stream("eu"), flipped(said, int(bit)), w.run.digest, log.members)
        kinds: dict[Kind, Body] = {}
        for prefix in ("updates/", "values/", "commits/", "snapshots/", "learners/"):
            for entry in await w.store.list(prefix):
                blob = await w.store.get(entry.key)
                kinds.setdefault(Kind(frame.kind_of(blob)), blob)
        assert kinds.keys() >= {Kind.UPDATE, Kind.VALUE, Kind.COMMIT, Kind.SNAPSHOT, Kind.CLAIM}
        for kind, blob in kinds.items():
            log.members.require_author(blob, kind)
            start = frame.payload_start(blob)
            head = list(range(8 * start))
            for bit in head + [8 * start + int(b) for b in draw.integers(0, max(1, 8 * (len(blob) - start)), 200)]:
                if bit < 8 * len(blob):
                    with pytest.raises(RecordInvalid):
                        log.members.require_author(flipped(blob, bit), kind)


async def test_what_one_kind_was_signed_as_is_no_other_and_no_other_runs(folder: Path, tmp_path: Path) -> None:
    async with world(folder, seed()) as w, world(tmp_path / "other", seed(Rules(fragments=2))) as other:
        log = w.log
        update = an_update(w, "eu", EU)
        assert frame.require_signature(update, Kind.UPDATE) == EU.author
        with pytest.raises(RecordInvalid, match="no isthmus-claim signature"):
            frame.require_signature(update, Kind.CLAIM)
        gone = Leave(run=other.run.digest, id="x", learner="eu", incarnation=1, step=0, done=True)
        await admit(w, *EVERYBODY)
        await log.members.refresh(w.store)
        with pytest.raises(RecordInvalid, match="another run"):
            verify_batch(learner_stream("eu"), encode(gone, signer=EU), w.run.digest, log.members)


def renumbered(header: CommitHeader, version: int, **changed: object) -> CommitHeader:
    """Return a commit's header with another version, also in its value's key."""
    value = value_key(header.fragment, version, header.value_digest)
    return msgspec.structs.replace(header, version=version, value_key=value, **changed)


@pytest.mark.parametrize(
    "stolen", [pytest.param(False, id="rotated", marks=pytest.mark.tier("all")), pytest.param(True, id="stolen")]
)
@in_virtual_time
async def test_a_new_key_goes_on_from_what_the_owner_vouches_for_and_the_old_one_is_nobodys(
    folder: Path, stolen: bool
) -> None:
    async with world(folder, seed()) as w:
        await admit(w, *EVERYBODY)
        async with serving(w.by(SYNC).syncer("s-1")) as syncer:
            first = w.by(EU).learner("eu", checkpoint_s=0.2)
            await train(first, 120, enough=lambda: syncer.coordinators[0].head >= 2)
            log = w.log
            before = await log.members.refresh(w.store)
            entries = changed(before.members, added=MemberSpec("eu", L, EVIL.author))
            if not stolen:
                entries, resumes = await _vouched(log, before, entries)
                assert resumes == [f"eu goes on after step {first._claimed.stored_step}"]
            await write(w.store, log.members, OWNER, entries, [k.head for k in syncer.coordinators], 0.0)
            [*_, newest] = sorted(e.key for e in checkpoints_in(await w.store.list("learners/eu/")))
            blob = await w.store.get(newest)
            # With the old key, write a checkpoint of a later incarnation, and later a claim.
            mine, payload = frame.parse(blob, Kind.CHECKPOINT, CheckpointHeader)
            later = msgspec.structs.replace(mine, incarnation=9, step=777_777)
            forged = frame.written(Kind.CHECKPOINT, later, np.frombuffer(payload, np.uint8))
            frame.seal(forged, EU)
            await w.store.put(checkpoint_key("eu", 9, 777_777, frame.digest(forged)), forged)
            second = w.by(EVIL).learner("eu")
            await second.join()
            found = second.history.checkpoint
            assert (found is None) if stolen else (found is not None and found.key == newest)
            claim, _ = frame.parse(await w.store.get(claim_key("eu", 1)), Kind.CLAIM, ClaimHeader)
            successor = msgspec.structs.replace(claim, incarnation=second.incarnation + 1)
            taken = frame.draft(Kind.CLAIM, successor).blob
            frame.seal(taken, EU)
            await w.store.create(claim_key("eu", successor.incarnation), taken)
            head = syncer.coordinators[0].head
            await train(second, 400, enough=lambda: syncer.coordinators[0].head >= head + 2)


@pytest.mark.parametrize("hears", [True, False], ids=["and hears of it", "and does not hear of it in time"])
@in_virtual_time
async def test_a_process_whose_key_was_replaced_leaves_the_checkpoint_that_the_owner_vouches_for(
    folder: Path, hears: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It trained on, and its fourth checkpoint deleted the one from which the new key was to go on."""
    if not hears:
        monkeypatch.setattr(agent_module, "PROBE_BEATS", 1e6)
    async with world(folder, seed()) as w:
        await admit(w, *EVERYBODY)
        async with serving(w.by(SYNC).syncer("s-1")) as syncer:
            old = w.by(EU).learner("eu", checkpoint_s=0.2)
            rotated = asyncio.Event()

            async def rotate() -> None:
                await until(lambda: old._claimed.stored_step is not None, "it has a checkpoint")
                log = w.log
                before = await log.members.refresh(w.store)
                entries, resumes = await _vouched(
                    log, before, changed(before.members, added=MemberSpec("eu", L, EVIL.author))
                )
                await write(w.store, log.members, OWNER, entries, [k.head for k in syncer.coordinators], 0.0)
                found.append(int(resumes[0].removeprefix("eu goes on after step ")))
                rotated.set()

            found = list[int]()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(rotate())
                tasks.create_task(train(old, 400))
            assert rotated.is_set()
            assert old.boundary is not None
            assert old.boundary.step == 400
            second = w.by(EVIL).learner("eu")
            await second.join()
            assert second.history.checkpoint is not None
            assert second.history.step == found[0] < 400


@in_virtual_time
async def test_a_membership_that_cannot_be_read_costs_no_checkpoint(folder: Path) -> None:
    async with world(folder, seed()) as w:
        await admit(w, *EVERYBODY)
        async with serving(w.by(SYNC).syncer("s-1")):
            agent = w.by(EU).learner("eu", checkpoint_s=0.2)

            async def damage() -> None:
                await until(lambda: agent._claimed.stored_step is not None, "it has a checkpoint")
                await w.store.put(members_key(2), b"junk")
                before = agent._claimed.stored_step
                await until(lambda: (agent._claimed.stored_step or 0) > (before or 0), "it stores another one")

            async with asyncio.TaskGroup() as tasks:
                damaged = tasks.create_task(damage())
                tasks.create_task(train(agent, 1, enough=damaged.done))


@in_virtual_time
async def test_damage_to_a_membership_that_was_read_before_is_found(folder: Path) -> None:
    async with world(folder, seed()) as w:
        await admit(w, *EVERYBODY)
        await admit(w, *EVERYBODY, ("more", L, EVIL))
        members = w.log.members
        assert (await members.refresh(w.store)).version == 2
        first, second = [bytes(await w.store.get(members_key(n))) for n in (1, 2)]
        for blob, said in [
            (b"junk", f"{members_key(1)}: is no membership: "),
            (second, f"{members_key(1)}: is no membership: malformed: it is another one than was read here before ("),
            (first, ""),
        ]:
            await w.store.put(members_key(1), blob)
            found = await members.damage(w.store)
            assert found.startswith(said)
            assert bool(found) == bool(said)
        await w.store.delete(members_key(2))
        assert (await members.damage(w.store)).startswith(f"{members_key(2)}: is missing: restore it from a backup")
        await w.store.put(members_key(2), second)
        await w.store.put(members_key(3), b"junk")
        assert (await members.damage(w.store)).startswith(f"{members_key(3)}: is no membership: ")


# --- syncers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forger", [EVIL, EU, None], ids=["a stranger", "a learner", "nobody"])
@in_virtual_time
async def test_a_commit_that_no_syncer_signed_is_no_commit(folder: Path, forger: Signer | None) -> None:
    async with world(folder, seed()) as w:
        await admit(w, *EVERYBODY)
        async with serving(w.by(SYNC).syncer("s-1")) as syncer:
            await train(w.by(EU).learner("eu"), 40, enough=lambda: syncer.coordinators[0].head >= 2)
        newest = (await all_commits(w.log))[0][-1]
        header = renumbered(newest.header, newest.version + 1, previous=newest.digest)
        body = frame.draft(Kind.COMMIT, header).blob
        frame.seal(body, forger)
        await w.store.create(commit_key(0, header.version), body)
        with pytest.raises(LogCorrupt, match="not a syncer's commit"):
            await w.log.newest(0)


@in_virtual_time
async def test_a_syncer_who_was_expelled_cannot_go_on_under_the_membership_of_before(folder: Path) -> None:
    async with world(folder, seed()) as w:
        await admit(w, *EVERYBODY)
        async with serving(w.by(SYNC).syncer("s-1")) as syncer:
            await train(w.by(EU).learner("eu"), 40, enough=lambda: syncer.coordinators[0].head >= 2)
        commits = (await all_commits(w.log))[0]
        await admit(w, ("eu", L, EU))
        newest = commits[-1]
        # Up to this version the old membership is in force, so that the run may finish work in progress …
        last = len(commits) + GRACE_VERSIONS
        for version in (last, last + 1):
            header = renumbered(newest.header, version, members=1)
            body = frame.draft(Kind.COMMIT, header).blob
            frame.seal(body, SYNC)
            await w.store.put(commit_key(0, version), body)
        log = w.log
        await log.members.refresh(w.store)
        assert (await log.commit(0, last)) is not None
        with pytest.raises(LogCorrupt, match="made under membership 1, when 2 was in force"):
            await log.commit(0, last + 1)
        # … and the new membership does not name the syncer.
        header = renumbered(newest.header, last + 1, members=2)
        body = frame.draft(Kind.COMMIT, header).blob
        frame.seal(body, SYNC)
        await w.store.put(commit_key(0, last + 1), body)
        with pytest.raises(LogCorrupt, match="membership 2 has no"):
            await log.commit(0, last + 1)


@in_virtual_time
async def test_a_membership_never_goes_back_along_the_log(folder: Path) -> None:
    async with world(folder, seed()) as w:
        await admit(w, *EVERYBODY)
        async with serving(w.by(SYNC).syncer("s-1")) as syncer:
            await train(w.by(EU).learner("eu"), 40, enough=lambda: syncer.coordinators[0].head >= 2)
            await admit(w, *EVERYBODY, ("more", L, EVIL))
            await until(lambda: syncer._log.members.current.version == 2, "the syncer knows of it")
            before = syncer.coordinators[0].head
            await train(w.by(US).learner("us-1"), 40, enough=lambda: syncer.coordinators[0].head >= before + 3)
        commits = (await all_commits(w.log))[0]
        assert commits[-1].header.members == 2
        last = commits[-1]
        header = renumbered(last.header, last.version + 1, previous=last.digest, members=1)
        body = frame.draft(Kind.COMMIT, header).blob
        frame.seal(body, SYNC)
        await w.store.create(commit_key(0, header.version), body)
        with pytest.raises(LogCorrupt, match="made under membership 1, and the one before it under 2"):
            async for _ in w.log.commits(0, 0):
                pass


@in_virtual_time
async def test_a_syncer_who_learns_that_it_was_expelled_stops(folder: Path) -> None:
    """It commits nothing more, although the membership leaves room for commits under the one before it."""
    async with world(folder, seed()) as w:
        await admit(w, *EVERYBODY)
        syncer = w.by(SYNC).syncer("s-1")
        await syncer.recover()
        serving_it = asyncio.ensure_future(syncer.run(asyncio.Event()))
        coordinator = syncer.coordinators[0]
        learner = w.by(EU).learner("eu")
        training = asyncio.ensure_future(train(learner, 400))
        await until(lambda: coordinator.head >= 2, "it serves")
        await admit(w, ("eu", L, EU))
        heads = [len(commits) for commits in (await all_commits(w.log)).values()]
        with pytest.raises(ExceptionGroup) as raised:
            await serving_it
        why = first_cause(raised.value)
        assert isinstance(why, Expelled)
        assert "membership 2 of this run does not name syncer s-1" in str(why)
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)
        after = [len(commits) for commits in (await all_commits(w.log)).values()]
        # A commit of each fragment may have been under way while the owner wrote.
        assert all(b - a <= 1 for a, b in zip(heads, after, strict=True)), (heads, after)


@in_virtual_time
async def test_commits_of_an_expelled_syncer_that_lacks_the_newest_membership_are_named(folder: Path) -> None:
    async with world(folder, seed()) as w:
        await admit(w, *EVERYBODY)
        async with serving(w.by(SYNC).syncer("s-1")) as syncer:
            await train(w.by(EU).learner("eu"), 40, enough=lambda: min(k.head for k in syncer.coordinators) >= 2)
        with_room = [len(commits) for commits in (await all_commits(w.log)).values()]
        await admit(w, ("eu", L, EU), ("us-*", L, US))
        hidden = await w.store.get(members_key(2))
        await w.store.delete(members_key(2))
        await asyncio.sleep(AFTER_S / 2)
        async with serving(w.by(SYNC).syncer("s-1")) as syncer:  # too soon: it may just have begun to write
            await train(w.by(EU).learner("eu"), 40, enough=lambda: syncer.coordinators[0].head > with_room[0])
        soon = (await newest_commit(w, 0)).version
        await asyncio.sleep(AFTER_S)
        async with serving(w.by(SYNC).syncer("s-1")) as syncer:
            await train(w.by(EU).learner("eu"), 60, enough=lambda: syncer.coordinators[0].head >= soon + 2)
        await w.store.put(members_key(2), hidden)
        log = w.log
        await log.members.refresh(w.store)
        first, *_ = found = await replay(log)
        assert [r.difference for r in found] == [None] * 4
        [made] = first.outdated
        assert (made.first, made.last) == (soon + 1, (await newest_commit(w, 0)).version)
        assert (made.count, made.writer, made.under, made.newer) == (made.last - soon, "s-1", 1, 2)
        written_at = [c.header.written_at for c in (await all_commits(w.log))[0]]
        assert made.after_s == written_at[-1] - log.members.versions[2].written_at > AFTER_S
        assert f"membership 2 names no syncer s-1 with the key {fingerprint(SYNC.author)}" in str(made)


@pytest.mark.parametrize(
    ("after", "why"),
    [
        ([("s-*", S, SYNC), ("eu", L, EU)], "names no learner us-1 with the key"),
        ([("s-*", S, SYNC), ("eu", L, EU), ("us-*", L, EVIL)], "names no learner us-1 with the key"),
        ([("s-*", S, SYNC), ("eu", L, EU), ("us-*", C, US)], "names no learner us-1 with the key"),
        ([("s-*", S, EVIL), ("eu", L, EU), ("us-*", L, US)], "names no syncer s-1"),
        ([("s-*", C, SYNC), ("eu", L, EU), ("us-*", L, US)], "names no syncer s-1"),
        ([("s-*", S, SYNC), ("eu", L, EVIL), ("us-*", L, US)], ""),
        ([("s-1", S, SYNC), ("us-1", L, US)], ""),
    ],
    ids=["removed", "another key", "another role", "syncer's key", "syncer's role", "not merged", "by other entries"],
)
def test_what_a_newer_membership_does_not_allow(after: list[tuple[str, MemberRole, Signer]], why: str) -> None:
    def membership(version: int, members: Sequence[tuple[str, MemberRole, Signer]]) -> Membership:
        return Membership(version, OWNER.author, tuple(MemberSpec(n, r, k.author) for n, r, k in members))

    found = why_not(membership(2, after), membership(1, EVERYBODY), "s-1", SYNC.author, {"us-1"})
    assert found.startswith(why) if why else found == ""


# --- coming and going -------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_a_learner_is_expelled_while_the_run_goes_on_and_replay_judges_by_the_commits(folder: Path) -> None:
    async with world(folder, seed()) as w:
        await admit(w, *EVERYBODY)
        async with serving(w.by(SYNC).syncer("s-1")) as syncer:
            coordinator = syncer.coordinators[0]
            both = [w.by(EU).learner("eu"), w.by(US).learner("us-1")]
            await train(both[0], 30, enough=lambda: coordinator.head >= 2)
            await train(both[1], 30, enough=lambda: coordinator.head >= 4)
            await admit(w, ("us-*", L, US), ("s-*", S, SYNC))
            await until(lambda: syncer._log.members.current.version == 2, "the syncer knows of it")
            expelled_at = coordinator.head
            key, update = await an_update_of_now(w, "eu", EU, coordinator.head)
            await w.bus.append(
                learner_stream("eu"), encode(announced(w, "eu", key, update, base=coordinator.head), signer=EU)
            )
            await until(lambda: syncer.tallies.rejected.get("not-a-member"), "it is not heard any more")
            await train(w.by(US).learner("us-1"), 70, enough=lambda: coordinator.head >= expelled_at + 3)
        commits = (await all_commits(w.log))[0]
        later = [c for c in commits if c.header.members == 2]
        assert later, "the run must go on"
        assert {i.learner for c in later for i in c.header.inputs} == {"us-1"}
        assert {i.learner for c in commits if c.header.members == 1 for i in c.header.inputs} >= {"eu"}
        assert await differences(w.log) == []


@in_virtual_time
async def test_a_round_that_holds_work_of_an_expelled_learner_is_merged_again_without_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner expels the learner while its work is being committed. There is room for commits as before, and the syncer
    leaves the work out all the same."""
    look, after = FragmentCoordinator._look_at_members, list[int]()

    async def expelled_meanwhile(self: FragmentCoordinator) -> None:
        if not after and self.head >= 2 and any(i.learner == "eu" for i in self._sum.inputs):
            after.extend([self.fragment.index, self.head])
            await admit(w, ("us-*", L, US), ("s-*", S, SYNC))
        await look(self)

    async with world(folder, seed()) as w:
        await admit(w, *EVERYBODY)
        monkeypatch.setattr(FragmentCoordinator, "_look_at_members", expelled_meanwhile)
        async with serving(w.by(SYNC).syncer("s-1")) as syncer:

            def enough() -> bool:
                return bool(after) and syncer.coordinators[after[0]].head >= after[1] + 3

            eu, us = w.by(EU).learner("eu"), w.by(US).learner("us-1")
            await asyncio.gather(train(eu, 400, enough=enough), train(us, 400, enough=enough))
        fragment, head = after
        commits = (await all_commits(w.log))[fragment]
        assert "eu" in {i.learner for c in commits[:head] for i in c.header.inputs}
        assert {(i.learner, c.header.members) for c in commits[head:] for i in c.header.inputs} == {("us-1", 2)}
        assert await differences(w.log) == []


@in_virtual_time
async def test_who_is_added_is_merged_without_a_restart(folder: Path) -> None:
    async with world(folder, seed()) as w:
        await admit(w, ("s-*", S, SYNC))
        async with serving(w.by(SYNC).syncer("s-1")) as syncer:
            await admit(w, ("s-*", S, SYNC), ("late", L, EU))
            coordinator = syncer.coordinators[0]
            await train(w.by(EU).learner("late"), 40, enough=lambda: coordinator.head >= 2)
        assert (await all_commits(w.log))[0][0].header.members == 2


@in_virtual_time
async def test_a_new_key_takes_the_place_of_an_old_one_and_the_learner_goes_on(folder: Path) -> None:
    async with world(folder, seed()) as w:
        await admit(w, *EVERYBODY)
        async with serving(w.by(SYNC).syncer("s-1")) as syncer:
            coordinator = syncer.coordinators[0]
            first = w.by(EU).learner("eu")
            await train(first, 40, enough=lambda: coordinator.head >= 2)
            await admit(w, ("eu", L, EVIL), ("s-*", S, SYNC))
            await until(lambda: syncer._log.members.current.version == 2, "the syncer knows of it")
            second = w.by(EVIL).learner("eu")
            head = coordinator.head
            await train(second, 60, enough=lambda: coordinator.head >= head + 2)
            assert second.incarnation == first.incarnation + 1
            balanced(second)
        assert await differences(w.log) == []


@in_virtual_time
async def test_a_claim_that_the_learner_did_not_sign_stops_nobody(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(folder, seed()) as w:
        await admit(w, *EVERYBODY)
        async with serving(w.by(SYNC).syncer("s-1")) as syncer:
            agent = w.by(EU).learner("eu")
            coordinator = syncer.coordinators[0]
            told = False

            async def forge() -> None:
                mine = await w.store.get(claim_key("eu", 1))
                frame.seal(mine, US)
                await w.store.create(claim_key("eu", 2), mine)
                agent._claimed.doubt()

            def enough() -> bool:
                nonlocal told
                told = told or "its author is not authorised" in caplog.text
                return told and coordinator.head >= 3

            async def later() -> None:
                while not agent.incarnation:  # noqa: ASYNC110 (nothing says that it has joined)
                    await asyncio.sleep(0.02)
                await forge()

            forging = asyncio.ensure_future(later())
            await train(agent, 30, enough=enough)
            await forging


# --- who writes what --------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_messages_of_a_signed_run_travel_in_batches_of_one_author(folder: Path) -> None:
    async with world(folder, seed()) as w:
        await admit(w, *EVERYBODY)
        log = w.log
        await log.members.refresh(w.store)
        words = [
            Leave(run=w.run.digest, id=f"{i}", learner=who, incarnation=1, step=i, done=False)
            for i, who in enumerate(["us-1", "us-1", "us-2"])
        ]
        assert verify_batch(learner_stream("us-1"), encode(*words[:2], signer=US), w.run.digest, log.members) == tuple(
            words[:2]
        )
        with pytest.raises(RecordInvalid, match="not by the learner"):
            verify_batch(learner_stream("us-1"), encode(*words, signer=US), w.run.digest, log.members)
        committed = [Committed(run=w.run.digest, id="x", syncer=name, fragment=0, version=1) for name in ("s-1", "s-2")]
        with pytest.raises(RecordInvalid, match="several names"):
            verify_batch(SYNCER_STREAM, encode(*committed, signer=SYNC), w.run.digest, log.members)


@in_virtual_time
async def test_in_an_unsigned_run_a_signature_is_out_of_place(folder: Path) -> None:
    async with world(folder) as w:
        update = an_update(w, "eu", EU)
        with pytest.raises(RecordInvalid, match="nothing in this run is"):
            w.log.members.require_author(update, Kind.UPDATE)


@in_virtual_time
async def test_a_fragment_of_a_signed_run_heals_by_a_member(folder: Path) -> None:
    async with world(folder, seed()) as w:
        await admit(w, *EVERYBODY)
        async with serving(w.by(SYNC).syncer("s-1"), killed=True) as syncer:
            await train(w.by(EU).learner("eu"), 60, enough=lambda: syncer.coordinators[0].head >= 3)
        commits = (await all_commits(w.log))[0]
        await w.store.delete(commits[-1].header.inputs[0].key)
        log = w.by(SYNC).log
        await log.members.refresh(w.store)
        found = (await heal.diagnose(log, [0]))[0]
        assert found.wound is not None
        assert await heal.heal(log, found) is not None
        assert (await fold.fold(w.log, 0, fold.Merging(w.log))).version == len(commits) + 1


def flipped(data: bytes | Body, bit: int) -> bytearray:
    out = bytearray(data)
    out[bit // 8] ^= 1 << bit % 8
    return out


async def an_update_of_now(w: World, learner: str, signer: Signer, base: int) -> tuple[str, Body]:
    blob = an_update(w, learner, signer, base)
    key = update_key(0, learner, base, frame.digest(blob))
    await w.store.put(key, blob)
    return key, blob


@in_virtual_time
async def test_a_newer_membership_is_read_as_soon_as_a_syncer_speaks_of_it(folder: Path) -> None:
    async with world(folder, seed(heartbeat_s=2.0, silence_s=6.0)) as w:
        await admit(w, *EVERYBODY)
        async with serving(w.by(SYNC).syncer("s-1")) as syncer:
            agent = w.by(EU).learner("eu")
            task = asyncio.ensure_future(train(agent, 10**9, step_s=0.02))
            await until(lambda: syncer.coordinators[0].head >= 1, "it is merged")
            await admit(w, *EVERYBODY, ("more", L, EVIL))
            # By itself the learner looks every ten heartbeats, 20 s. The syncer looks more often, and tells it.
            await until(lambda: agent._log.members.current.version == 2, "the learner knows of it", 15.0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

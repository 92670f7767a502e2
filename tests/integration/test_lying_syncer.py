"""All readers reject a syncer's lie if it shows, and `isthmus replay` finds the others (SECURITY.md)."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from isthmus.codecs import codec, pack
from isthmus.codecs.packed import packed
from isthmus.errors import LogCorrupt
from isthmus.format.records import frame
from isthmus.format.records.frame import Kind
from isthmus.format.records.keys import commit_key, update_key, value_key
from isthmus.format.records.messages import SYNCER_STREAM, Committed, encode, learner_stream
from isthmus.format.records.objects import CommitHeader, Healed, Rejection, UpdateHeader
from isthmus.format.rules import Rules
from isthmus.inspect.replay import Difference, replay
from isthmus.learner.resume import read_checkpoint
from isthmus.log import fold, merge
from isthmus.log.bus_messages import verify_batch
from isthmus.log.listing import checkpoints_in
from isthmus.log.merge import Accumulator, Advance
from isthmus.reasons import Clip
from isthmus.rounds.bounds import Believed, Claim, Influence
from isthmus.syncer import Syncer
from isthmus.syncer.coordinator import FragmentCoordinator
from support.forgery import SYNC, Stage, sealed
from support.lies import REFUSED, following
from support.world import NumpyReplica, World, in_virtual_time, newest_commit, seed_of, serving, train, until, world

RULES = Rules(fragments=2, sync_every=4, codec_up="f32", codec_down="f32")
SEED = seed_of(RULES)


async def differences(w: World) -> dict[int, Difference]:
    """Return the first difference of each fragment that has one."""
    return {r.fragment: r.difference for r in await replay(w.log) if r.difference is not None}


async def begun(w: World, syncer: Syncer) -> None:
    """Merge a few versions, with one learner after another."""
    for number, name in enumerate(("a", "b", "c"), 1):
        wanted = 2 * number
        await train(w.learner(name), 20, enough=lambda wanted=wanted: syncer.coordinators[0].head >= wanted)  # type: ignore[misc]


async def append(w: World, header: CommitHeader, value: frame.Body | None = None) -> None:
    """Append a commit without checking it."""
    if value is not None:
        await w.store.put(header.value_key, value)
    body = frame.draft(Kind.COMMIT, header).blob
    assert await w.log.append(header.fragment, header.version, body)


# --- lies that every reader rejects -----------------------------------------------------------------------------------


@pytest.mark.parametrize("lie", REFUSED)
@in_virtual_time
async def test_a_lie_that_shows_is_taken_by_nobody_and_ends_nobody(lie: str, folder: Path) -> None:
    made, why = REFUSED[lie]
    async with world(folder, SEED) as w, serving(w.syncer("honest")) as syncer:
        await begun(w, syncer)
        newest = await newest_commit(w, 0)
        lying = made(newest)
        await append(w, lying)
        said = Committed(run=w.run.digest, id="x", syncer="liar", fragment=0, version=lying.version)
        await w.bus.append(SYNCER_STREAM, encode(said))
        before = syncer.coordinators[1].head
        learner = w.learner("d")
        with pytest.raises(LogCorrupt, match=why):
            await learner.join()
        await until(lambda: why in syncer.coordinators[0].broken, "the syncer says so")
        found = await differences(w)
        assert (found[0].version, why in found[0].detail) == (newest.version + 1, True)
        assert syncer.coordinators[1].head >= before
        assert 1 not in found


# --- lies that only replay finds --------------------------------------------------------------------------------------


async def _lied(w: World, syncer: Syncer, lie: Callable[[FragmentCoordinator], None]) -> tuple[int, Difference]:
    """Let a coordinator lie in its next commits. Return the version before them and replay's first difference."""
    await begun(w, syncer)
    assert await differences(w) == {}
    assert [(r.unproven, r.untimely, r.nobodys) for r in await replay(w.log)] == [(0, [], [])] * 2
    coordinator = syncer.coordinators[0]
    head = coordinator.head
    lie(coordinator)
    await train(w.learner("a"), 20, enough=lambda: coordinator.head >= head + 2)
    return head, (await differences(w))[0]


def _weighs_less(coordinator: FragmentCoordinator) -> None:
    own = coordinator._sum.usual.judge
    coordinator._sum.usual.judge = lambda *a, **k: replace(own(*a, **k), weight=1.0, clipped=(Clip.WEIGHT,))  # type: ignore[method-assign]


def _says_it_was_long(coordinator: FragmentCoordinator) -> None:
    own = coordinator._sum.usual.judge

    def judge(*a: Any, **k: Any) -> Believed:
        return replace(own(*a, **k), scale=0.01, clipped=(Clip.NORM,))

    coordinator._sum.usual.judge = judge  # type: ignore[method-assign]


def _says_what_is_usual(coordinator: FragmentCoordinator) -> None:
    coordinator._sum.usual.after = lambda inputs: 1e9  # type: ignore[method-assign]


def _says_how_long_it_is(coordinator: FragmentCoordinator) -> None:
    own = coordinator._recorder.given
    coordinator._recorder.given = lambda *a: msgspec.structs.replace(own(*a), norm=0.5)  # type: ignore[method-assign]


def _says_another_loss(coordinator: FragmentCoordinator) -> None:
    own = coordinator._recorder.given
    coordinator._recorder.given = lambda *a: msgspec.structs.replace(own(*a), loss=0.5)  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (_weighs_less, "by the run's bounds it is"),
        (_says_it_was_long, "by the run's bounds it is"),
        (_says_what_is_usual, "the usual length is"),
        (_says_how_long_it_is, "its norm is"),
        (_says_another_loss, "its loss is"),
    ],
)
@in_virtual_time
async def test_replay_finds_again_what_each_input_counts_for(
    lie: Callable[[FragmentCoordinator], None], why: str, folder: Path
) -> None:
    async with world(folder, SEED) as w, serving(w.syncer("liar")) as syncer:
        head, found = await _lied(w, syncer, lie)
        assert found.version == head + 1
        assert any(why in line for line in found.inputs), found


@in_virtual_time
async def test_replay_names_a_value_that_does_not_follow_from_what_was_merged(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Learners accept this value, because they do not merge its inputs again. A fold that does finds the lie."""
    own = merge.advance

    def advance(state: merge.State, round_: Accumulator, *rest: Any, stated: bool) -> Advance:
        round_.add(np.full(round_.fragment.size, 5.0, np.float32), 1e9, learner="nobody")
        return own(state, round_, *rest, stated=stated)

    async with world(folder, SEED) as w, serving(w.syncer("liar")) as syncer:
        await begun(w, syncer)
        head = syncer.coordinators[0].head
        with monkeypatch.context() as patched:
            patched.setattr("isthmus.syncer.coordinator.merge.advance", advance)
            await train(w.learner("a"), 20, enough=lambda: syncer.coordinators[0].head >= head + 1)
        found = (await differences(w))[0]
        assert found.version == head + 1
        assert "the published value is" in found.detail
        assert found.tensors
        async with serving(w.syncer("honest")) as honest:
            await until(lambda: honest.coordinators[0].broken or honest.coordinators[0].state, "it has looked")
        with pytest.raises(LogCorrupt, match="isthmus replay"):
            await fold.fold(w.log, 0, fold.Merging(w.log), until=head + 1)


@in_virtual_time
async def test_replay_names_work_that_was_merged_before(folder: Path) -> None:
    async with world(folder, SEED) as w, serving(w.syncer("s")) as syncer:
        await begun(w, syncer)
    newest = await newest_commit(w, 0)
    at = await fold.fold(w.log, 0, fold.Merging(w.log))
    h = newest.header
    again = await fold.combine(w.log, at.carried, 0, h.inputs, fold.outer_of(h), codec("f32"))
    header = following(
        newest, inputs=h.inputs, value_key=value_key(0, newest.version + 1, again.value_digest),
        value_digest=again.value_digest, published_digest=again.published_digest, state_digest=again.state_digest,
        cancelled=again.cancelled,
    )  # fmt: skip
    await append(w, header, again.value)
    found = (await differences(w))[0]
    assert found.version == newest.version + 1
    assert any("was merged before" in line for line in found.inputs), found


@pytest.mark.parametrize("what", ["whole", "anything"])
@in_virtual_time
async def test_a_heal_starts_where_it_says_and_replay_names_one_of_what_is_whole(what: str, folder: Path) -> None:
    async with world(folder, SEED) as w, serving(w.syncer("s")) as syncer:
        await begun(w, syncer)
    newest = await newest_commit(w, 0)
    source = newest.version - 2
    values = (await fold.fold(w.log, 0, fold.PublishedValue(w.log), until=source)).carried
    if what == "anything":
        values = np.full_like(values, 666.0)
    version = newest.version + 1
    made = merge.healed(version, values, w.run.layout.fragments[0], w.run.digest)
    wound = Healed(source=source, broken_at=source + 1, key=newest.header.inputs[0].key, why="is missing")
    header = following(
        newest, inputs=(), late=(), healed=wound, writer="heal", codec_down="f32", cancelled=0,
        value_key=value_key(0, version, made.value_digest), value_digest=made.value_digest,
        published_digest=made.published_digest, state_digest=made.state_digest,
    )  # fmt: skip
    await append(w, header, made.value)
    found = (await differences(w))[0]
    if what == "anything":
        with pytest.raises(LogCorrupt, match=f"says that it starts again from version {source}, and does not"):
            await fold.fold(w.log, 0, fold.PublishedValue(w.log))
        assert "and does not" in found.detail
    else:
        assert any("it heals what is whole" in line and f"back to version {source}" in line for line in found.inputs)


@in_virtual_time
async def test_a_false_rejection_hides_nothing(folder: Path) -> None:
    """An update that was rejected as too long changes the usual length. That excuses neither an update that is merged
    twice nor a usual length beyond all lengths that were seen."""
    async with world(folder, SEED) as w, serving(w.syncer("s")) as syncer:
        await begun(w, syncer)
    newest = await newest_commit(w, 0)
    at = await fold.fold(w.log, 0, fold.Merging(w.log))
    h = newest.header
    again = await fold.combine(w.log, at.carried, 0, h.inputs, fold.outer_of(h), codec("f32"))
    turned = Rejection(learner="zz", base=0, reason="too-long", digest=bytes(32), count=1, at=h.written_at)
    header = following(
        newest, inputs=h.inputs, value_key=value_key(0, newest.version + 1, again.value_digest),
        value_digest=again.value_digest, published_digest=again.published_digest, state_digest=again.state_digest,
        cancelled=again.cancelled, rejected=(turned,), usual_length=1e9,
    )  # fmt: skip
    await append(w, header, again.value)
    found = (await differences(w))[0]
    assert found.version == newest.version + 1
    assert any("was merged before" in line for line in found.inputs), found
    assert any("the usual length is" in line and "at most, the commit says 1e+09" in line for line in found.inputs)


@in_virtual_time
async def test_a_published_value_of_its_own_is_seen_by_every_syncer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They see it even if the commit records the true state."""
    own = merge.advance

    def advance(state: merge.State, round_: Accumulator, down: Any, run: bytes, *rest: Any, stated: bool) -> Advance:
        true, f = own(state, round_, down, run, *rest, stated=stated), round_.fragment
        if f.index:
            return true  # a syncer that can serve no fragment ends
        packed = pack(down, f, np.full(f.size, 666.0, np.float32))
        value = merge._value(run, f, true.state.version, down, packed)
        published = merge.next_published(state.published, f, down, packed)
        return replace(
            true, value=value, value_digest=frame.digest(value), published_digest=merge.array_digest(published)
        )

    async with world(folder, SEED) as w, serving(w.syncer("liar"), killed=True) as syncer:
        await begun(w, syncer)
        head = syncer.coordinators[0].head
        with monkeypatch.context() as patched:
            patched.setattr("isthmus.syncer.coordinator.merge.advance", advance)
            await train(w.learner("a"), 20, enough=lambda: syncer.coordinators[0].head >= head + 1)
    async with serving(w.syncer("honest")) as honest:
        await until(lambda: "its inputs publish" in honest.coordinators[0].broken, "it does not go on")
    assert (await differences(w))[0].version == head + 1


@in_virtual_time
async def test_steps_that_there_was_no_time_for_are_named(folder: Path) -> None:
    """A learner and a syncer lie together: the bounds allow an update of very many steps to be very long."""
    async with world(folder, SEED) as w, serving(w.syncer("s")) as syncer:
        await begun(w, syncer)
    assert all(result.untimely == [] for result in await replay(w.log))
    newest, steps = await newest_commit(w, 0), 1 << 40
    fragment = w.run.layout.fragments[0]
    long = np.random.default_rng(0).standard_normal(fragment.size).astype(np.float32)
    said = UpdateHeader(
        schema=1, run=w.run.digest, fragment=0, learner="a", incarnation=9, base=newest.version, codec="f32",
        steps=steps, tokens=steps * 100, step=steps, tokens_seen=steps * 100, train_s=1.0,
    )  # fmt: skip
    payload = pack(codec("f32"), fragment, long)
    blob = frame.written(Kind.UPDATE, said, payload)
    key = update_key(0, "a", newest.version, frame.digest(blob))
    await w.store.put(key, blob)
    influence = Influence(w.run.header.bounds, w.run.rules)
    async for commit in w.log.commits(0, 0):
        influence.note(commit.version, commit.header.inputs, commit.header.usual_length)
    norm = packed(fragment, codec("f32"), payload).norm
    by = influence.judge(Claim("a", steps, said.tokens, norm, believed=steps))
    given = msgspec.structs.replace(
        newest.header.inputs[0], key=key, digest=frame.digest(blob), learner="a", incarnation=9, base=newest.version,
        steps=steps, tokens=said.tokens, step=steps, tokens_seen=said.tokens_seen, bytes=len(blob), norm=norm,
        weight=by.weight, scale=by.scale, clipped=tuple(map(str, by.clipped)), believed=by.steps, train_s=1.0, loss=None,
    )  # fmt: skip
    at = await fold.fold(w.log, 0, fold.Merging(w.log))
    made = await fold.combine(w.log, at.carried, 0, (given,), fold.outer_of(newest.header), codec("f32"))
    header = following(
        newest, inputs=(given,), value_key=value_key(0, newest.version + 1, made.value_digest),
        value_digest=made.value_digest, published_digest=made.published_digest, state_digest=made.state_digest,
        cancelled=made.cancelled, usual_length=influence.after((given,)),
    )  # fmt: skip
    await append(w, header, made.value)
    [first, *_] = await replay(w.log)
    assert first.difference is None
    assert len(first.untimely) == 1
    assert f"{key}: {steps} steps were believed" in first.untimely[0]


@in_virtual_time
async def test_a_learner_of_whom_too_much_is_said_goes_on_speaking(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If commits name work that a learner never did, its ledger still fits into its messages and checkpoints."""
    async with world(folder, SEED) as w:
        async with serving(w.syncer("s")) as syncer:
            await begun(w, syncer)
        learner = w.learner("a", checkpoint_s=0.5)
        await learner.join()
        boundary = learner.attach(NumpyReplica(learner.layout))
        task = asyncio.ensure_future(learner.run())
        state = (await fold.fold(w.log, 0, fold.Merging(w.log))).carried
        fragment = w.run.layout.fragments[0]
        for _ in range(2):
            newest = await newest_commit(w, 0)
            h, most = newest.header, 1 << 53
            total = Accumulator(fragment, fold.outer_of(h))
            total.add(np.full(fragment.size, 1e-3, np.float32), 1.0, learner="a")
            made = merge.advance(state, total, codec("f32"), w.run.digest, w.run.rules.feedback_down)
            state = made.state
            given = msgspec.structs.replace(
                h.inputs[0], key=update_key(0, "a", newest.version, h.inputs[0].digest), learner="a",
                base=newest.version, steps=1, tokens=most, weight=float(most) * most, clipped=(), scale=1.0, believed=0,
            )  # fmt: skip
            header = following(
                newest, inputs=(given,), value_key=value_key(0, newest.version + 1, made.value_digest),
                value_digest=made.value_digest, published_digest=made.published_digest,
                state_digest=made.state_digest, cancelled=made.cancelled,
            )  # fmt: skip
            await append(w, header, made.value)
            learner.downlink.want(0, header.version)
            await until(lambda at=header.version: learner.downlink.known[0].version == at, "it has read it")  # type: ignore[misc]
        assert "impossibly many" in caplog.text
        position = await w.bus.tail(learner_stream("a"))
        for _ in range(60):
            boundary.after_step(100, 1.0)
            await asyncio.sleep(0.05)
        said = (await w.bus.read({learner_stream("a"): position}, 0.0))[learner_stream("a")]
        assert len(said) > 10
        assert all(verify_batch(learner_stream("a"), one.body, w.run.digest) for one in said)
        own = [e for e in checkpoints_in(await w.store.list("learners/")) if "/a/" in e.key]
        assert await read_checkpoint(w.log, own[0].key, own[0].size) is not None
        learner.drain()
        await asyncio.wait_for(task, 60)


@in_virtual_time
async def test_a_heal_of_what_never_was_does_not_bring_any_value_in(folder: Path) -> None:
    """A version that merges an update that was never stored cannot be folded, so only its syncer vouches for its value.
    A heal then starts from that value. Replay names the syncer, and says if the value moved further than any before."""
    async with world(folder, SEED) as w, serving(w.syncer("s")) as syncer:
        await begun(w, syncer)
    newest = await newest_commit(w, 0)
    before = (await fold.fold(w.log, 0, fold.PublishedValue(w.log))).carried
    fragment, down, version = w.run.layout.fragments[0], codec("f32"), newest.version + 1
    for far, differs in ((1e-4, False), (666.0, True)):
        way = pack(down, fragment, np.full(fragment.size, far, np.float32))
        value = merge._value(w.run.digest, fragment, version, down, way)
        published = merge.next_published(before, fragment, down, way)
        given = newest.header.inputs[0]
        missing = msgspec.structs.replace(
            given, base=newest.version, digest=bytes(32), key=update_key(0, given.learner, newest.version, bytes(32))
        )
        digest = frame.digest(value)
        lying = following(
            newest, inputs=(missing,), value_key=value_key(0, version, digest), value_digest=digest, writer="liar",
            published_digest=merge.array_digest(published), state_digest=bytes(32),
        )  # fmt: skip
        await append(w, lying, value)
        latest = await newest_commit(w, 0)
        made = merge.healed(version + 1, published, fragment, w.run.digest)
        wound = Healed(source=version, broken_at=version, key=missing.key, why="is missing")
        healing = following(
            latest, inputs=(), late=(), healed=wound, writer="heal", codec_down="f32", cancelled=0,
            value_key=value_key(0, version + 1, made.value_digest), value_digest=made.value_digest,
            published_digest=made.published_digest, state_digest=made.state_digest,
        )  # fmt: skip
        await append(w, healing, made.value)
        [first, *_] = await replay(w.log)
        assert [gap.writers for gap in first.gaps] == [("liar",)]
        assert "(by liar) cannot be verified" in first.gaps[0].line(0)
        assert (first.difference is not None) == differs
        if first.difference is not None:
            assert first.difference.version == version
            assert "what liar published went" in first.difference.detail
        for v in (version, version + 1):
            await w.store.delete(commit_key(0, v))


def test_who_heals_bears_no_syncers_name() -> None:
    """Otherwise a syncer could be blamed for a heal."""
    stage = Stage()
    wound = Healed(source=0, broken_at=1, key="x", why="is missing")
    for writer, why in (("s-2", "who heals is called heal"), ("heal", "")):
        _, blob = sealed(stage.changed(Kind.COMMIT, writer=writer, healed=wound, inputs=(), codec_down="f32"), SYNC)
        if why:
            with pytest.raises(LogCorrupt, match=why):
                stage.verifier.commit(blob, 0, 1)
        else:
            assert stage.verifier.commit(blob, 0, 1).header.writer == writer

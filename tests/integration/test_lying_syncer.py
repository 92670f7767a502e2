"""A syncer that lies. What all who read refuse; and what they cannot see and `isthmus replay` names (SECURITY.md)."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from isthmus.codecs import codec
from isthmus.errors import LogCorrupt
from isthmus.log import fold, merge
from isthmus.log.merge import Accumulator, Advance
from isthmus.readers.replay import Difference, replay
from isthmus.reasons import Clip
from isthmus.records import frame
from isthmus.records.frame import Kind
from isthmus.records.keys import value_key
from isthmus.records.messages import SYNCER_STREAM, Committed, encode
from isthmus.records.objects import CommitHeader, Healed
from isthmus.rounds.bounds import Believed
from isthmus.rules import Rules
from isthmus.syncer import Syncer
from isthmus.syncer.keeper import Keeper
from support.lies import REFUSED, following
from support.world import World, in_virtual_time, newest_commit, seed_of, serving, train, until, world

RULES = Rules(fragments=2, sync_every=4, codec_up="f32", codec_down="f32")
SEED = seed_of(RULES)


async def differences(w: World) -> dict[int, Difference]:
    """Return the first difference of each fragment that has one."""
    return {r.fragment: r.difference for r in await replay(w.log) if r.difference is not None}


async def begun(w: World, syncer: Syncer) -> None:
    """Let a few versions be merged, of one learner after another."""
    for number, name in enumerate(("a", "b", "c"), 1):
        wanted = 2 * number
        await train(w.learner(name), 20, enough=lambda wanted=wanted: syncer.keepers[0].head >= wanted)  # type: ignore[misc]


async def append(w: World, header: CommitHeader, value: frame.Body | None = None) -> None:
    """Commit something, whatever it is."""
    if value is not None:
        await w.store.put(header.value_key, value)
    body = frame.draft(Kind.COMMIT, header).blob
    assert await w.log.append(header.fragment, header.version, body)


# --- what nobody takes ------------------------------------------------------------------------------------------------


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
        before = syncer.keepers[1].head
        learner = w.learner("d")
        with pytest.raises(LogCorrupt, match=why):
            await learner.join()
        await until(lambda: why in syncer.keepers[0].broken, "the syncer says so")
        found = await differences(w)
        assert (found[0].version, why in found[0].detail) == (newest.version + 1, True)
        assert syncer.keepers[1].head >= before
        assert 1 not in found


# --- what only replay sees --------------------------------------------------------------------------------------------


async def _lied(w: World, syncer: Syncer, lie: Callable[[Keeper], None]) -> tuple[int, Difference]:
    """Let a keeper lie from now on until it has committed; return after which version, and what replay says."""
    await begun(w, syncer)
    assert await differences(w) == {}
    keeper = syncer.keepers[0]
    head = keeper.head
    lie(keeper)
    await train(w.learner("a"), 20, enough=lambda: keeper.head >= head + 2)
    return head, (await differences(w))[0]


def _weighs_less(keeper: Keeper) -> None:
    own = keeper._usually.judge
    keeper._usually.judge = lambda *a, **k: replace(own(*a, **k), weight=1.0, clipped=(Clip.WEIGHT,))  # type: ignore[method-assign]


def _says_it_was_long(keeper: Keeper) -> None:
    own = keeper._usually.judge

    def judge(*a: Any, **k: Any) -> Believed:
        return replace(own(*a, **k), scale=0.01, clipped=(Clip.NORM,))

    keeper._usually.judge = judge  # type: ignore[method-assign]


def _says_what_is_usual(keeper: Keeper) -> None:
    keeper._usually.after = lambda inputs: 1e9  # type: ignore[method-assign]


def _says_how_long_it_is(keeper: Keeper) -> None:
    own = keeper._recorder.given
    keeper._recorder.given = lambda *a: msgspec.structs.replace(own(*a), norm=0.5)  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (_weighs_less, "by the run's bounds it is"),
        (_says_it_was_long, "by the run's bounds it is"),
        (_says_what_is_usual, "the usual length is"),
        (_says_how_long_it_is, "its norm is"),
    ],
)
@in_virtual_time
async def test_replay_finds_again_what_each_input_counts_for(
    lie: Callable[[Keeper], None], why: str, folder: Path
) -> None:
    async with world(folder, SEED) as w, serving(w.syncer("liar")) as syncer:
        head, found = await _lied(w, syncer, lie)
        assert found.version == head + 1
        assert any(why in line for line in found.inputs), found


@in_virtual_time
async def test_replay_names_a_value_that_does_not_follow_from_what_was_merged(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Learners take it: they do not merge anew. Whoever does is not taken in."""
    own = merge.advance

    def advance(state: merge.State, round_: Accumulator, *rest: Any) -> Advance:
        round_.add(np.full(round_.fragment.size, 5.0, np.float32), 1e9, learner="nobody")
        return own(state, round_, *rest)

    async with world(folder, SEED) as w, serving(w.syncer("liar")) as syncer:
        await begun(w, syncer)
        head = syncer.keepers[0].head
        with monkeypatch.context() as patched:
            patched.setattr("isthmus.syncer.keeper.merge.advance", advance)
            await train(w.learner("a"), 20, enough=lambda: syncer.keepers[0].head >= head + 1)
        found = (await differences(w))[0]
        assert found.version == head + 1
        assert "the published value is" in found.detail
        assert found.tensors
        async with serving(w.syncer("honest")) as honest:
            await until(lambda: honest.keepers[0].broken or honest.keepers[0].state, "it has looked")
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
    values = (await fold.fold(w.log, 0, fold.Publishing(w.log), until=source)).carried
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
            await fold.fold(w.log, 0, fold.Publishing(w.log))
        assert "and does not" in found.detail
    else:
        assert any("it heals what is whole" in line and f"back to version {source}" in line for line in found.inputs)

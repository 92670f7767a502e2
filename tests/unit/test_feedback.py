"""What a codec drops is fed back into the next update or version; without feedback it is lost, but not the length."""

import numpy as np
import pytest

from isthmus.codecs import codec, kernels, pack, unpack
from isthmus.codecs.kernels import F32
from isthmus.errors import LogCorrupt, RecordInvalid
from isthmus.format.layout import Spec, TensorClass, partition
from isthmus.format.records import frame
from isthmus.format.records.keys import value_key
from isthmus.format.records.objects import SnapshotHeader
from isthmus.format.rules import Rules
from isthmus.log import fold, merge
from isthmus.reasons import Reason
from support.opened import opened_update
from support.written_log import Written

SPECS = [Spec("m", (90, 70), "float32", TensorClass.DENSE), Spec("v", (90,), "float32", TensorClass.VECTOR)]

FRAGMENT = partition(SPECS, 1).fragments[0]


def drawn(seed: int, n: int = FRAGMENT.size) -> F32:
    return np.random.default_rng(seed).normal(size=n).astype(np.float32)


def round_of(*updates: F32, rules: Rules | None = None) -> merge.Accumulator:
    found = merge.Accumulator(FRAGMENT, merge.outers(rules or Rules()))
    for x in updates:
        found.add(x, 1.0)
    return found


@pytest.mark.parametrize("name", ["q0.5", "q1", "q1.5", "q3"])
def test_what_is_given_up_takes_no_length_away(name: str) -> None:
    x = drawn(1)
    lengths = {}
    for whole in (False, True):
        back = np.empty_like(x)
        unpack(codec(name), FRAGMENT, pack(codec(name), FRAGMENT, x, whole=whole), back)
        lengths[whole] = kernels.norm(back[:6300]) / kernels.norm(x[:6300])
    assert lengths[True] == pytest.approx(1.0, abs=1e-6)
    assert lengths[False] < 0.997


@pytest.mark.parametrize("name", ["f32", "bf16", "int8", "int4"])
def test_codecs_that_keep_the_length_by_themselves_do_nothing_else(name: str) -> None:
    packed = [pack(codec(name), FRAGMENT, drawn(2), whole=whole).tobytes() for whole in (False, True)]
    assert packed[0] == packed[1]


def test_without_feedback_the_master_is_what_was_published() -> None:
    state = merge.initial(drawn(3))
    for version in range(3):
        result = merge.advance(state, round_of(drawn(version), drawn(9)), codec("q1.5"), bytes(32), feedback=False)
        state = result.state
        assert state.is_published
        assert result.published_digest == state.published_digest
        twin = merge.State(state.version, state.published, state.published.copy(), state.momentum)
        assert twin.digest == state.digest == result.state_digest, (
            "equal states have one digest, whether or not they share an array"
        )


def test_a_version_moves_as_far_as_the_outer_step_where_nothing_is_fed_back() -> None:
    before = merge.initial(drawn(3))
    moved = {}
    for feedback in (True, False):
        after = merge.advance(before, round_of(drawn(4)), codec("q1"), bytes(32), feedback=feedback).state
        moved[feedback] = np.linalg.norm((after.published - before.published)[:6300])
    wanted = merge.advance(before, round_of(drawn(4)), codec("f32"), bytes(32)).state
    assert moved[False] == pytest.approx(np.linalg.norm((wanted.published - before.published)[:6300]), rel=1e-3)
    assert moved[True] < 0.9 * moved[False]


def test_a_snapshot_without_a_master_is_two_thirds_as_large_and_comes_back() -> None:
    state = merge.advance(merge.initial(drawn(5)), round_of(drawn(6)), codec("q2"), bytes(32), feedback=False).state
    blob = bytes(merge.snapshot(state, 0, bytes(32)))
    header, payload = frame.parse(blob, frame.Kind.SNAPSHOT, SnapshotHeader)
    assert len(payload) == 8 * FRAGMENT.size
    back = merge.restore(header, payload, FRAGMENT.size)
    assert back.is_published
    assert back.digest == state.digest == header.state_digest
    assert np.array_equal(back.momentum, state.momentum)
    with pytest.raises(ValueError, match="bytes of state"):
        merge.restore(header, payload[:-4], FRAGMENT.size)


@pytest.mark.parametrize("feedback", [True, False])
def test_the_log_folds_to_what_was_merged(feedback: bool) -> None:
    """With snapshots of both kinds and values of few bits, a syncer and a learner fold to the recorded state."""

    async def body(w: Written) -> None:
        await w.grow(6, snapshot_every=4)
        at = await fold.fold(w.log, 0, fold.Merging(w.log))
        assert at.carried.digest == w.states[0].digest == w.commits[0][-1].header.state_digest
        assert at.carried.is_published is not feedback
        seen = await fold.fold(w.log, 0, fold.PublishedValue(w.log))
        assert np.array_equal(seen.carried, at.carried.published)
        key = w.commits[0][-1].header.value_key
        blob = w.blob(key)
        blob[-5] ^= 0xFF
        w.put(key, blob)
        with pytest.raises(LogCorrupt, match="was named"):
            await fold.fold(w.log, 0, fold.PublishedValue(w.log))

    rules = Rules(fragments=1, sync_every=4, codec_up="q2", codec_down="q1.5", feedback_down=feedback)
    Written(rules, options={"specs": SPECS}).drive(body)


def test_a_value_whose_table_is_damaged_is_a_damaged_log() -> None:
    """The digest of the value is right, as if it had been stored like this."""

    async def body(w: Written) -> None:
        commit = await w.commit()
        blob = w.blob(commit.header.value_key)
        blob[frame.payload_offset(frame.header_size(blob)) + 4] = 0xFF  # more levels than there can be
        key = value_key(0, 1, frame.digest(blob))
        w.put(key, blob)
        w.replace_commit(1, value_key=key, value_digest=frame.digest(blob))
        with pytest.raises(LogCorrupt, match=r"is no packed fragment: q1\.5: no header"):
            await fold.fold(w.log, 0, fold.PublishedValue(w.log))

    Written(Rules(fragments=1, sync_every=4, codec_down="q1.5"), options={"specs": SPECS}).drive(body)


def test_an_update_whose_table_is_damaged_is_malformed() -> None:
    async def body(w: Written) -> None:
        blob = w.update("a", 0)
        blob[frame.payload_offset(frame.header_size(blob)) + 4] = 0xFF
        with pytest.raises(RecordInvalid, match=r"q1\.5: no header") as caught:
            opened_update(w.run, blob, w.run.layout.fragments[0], "a", 0)
        assert caught.value.reason == Reason.MALFORMED

    Written(Rules(fragments=1, sync_every=4, codec_up="q1.5"), options={"specs": SPECS}).drive(body)

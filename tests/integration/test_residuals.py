"""Residuals, the parts of updates that codecs drop, are kept as precisely as the parameters, on every rank."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.codecs import codec, pack, unpack
from isthmus.codecs.kernels import F32
from isthmus.errors import RecordInvalid
from isthmus.format.layout import partition
from isthmus.format.records import frame
from isthmus.format.records.objects import SCHEMA, CheckpointHeader, Part, PartHeader, Piece, UpdateHeader
from isthmus.format.rules import Rules
from isthmus.learner import checkpoint_shards, residuals
from isthmus.learner.backend import LocalBackend, Stored, local_residual
from isthmus.log.creation import Seed
from support.world import SPECS, in_virtual_time, seed_of, world

HALVES = [replace(s, dtype="bfloat16") for s in SPECS]
RULES = Rules(fragments=2, sync_every=2)


def seed(dtype: str = "bfloat16") -> Seed:
    return seed_of(RULES, specs=[replace(s, dtype=dtype) for s in SPECS])


@given(
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=40),
    st.sampled_from(["float16", "bfloat16"]),
)
def test_what_is_kept_is_the_nearest_that_two_bytes_hold(values: list[float], dtype: str) -> None:
    x = np.array(values, np.float32)
    fragment = partition([replace(SPECS[1], dtype=dtype, shape=(x.size,))], 1).fragments[0]
    kept = residuals.kept(fragment, x)
    assert kept.nbytes == 2 * x.size
    again = residuals.whole(kept)
    assert (np.abs(again - x) <= np.abs(x) / 256 + np.finfo(np.float32).tiny).all()
    assert np.array_equal(residuals.kept(fragment, again), kept)


def test_four_bytes_are_kept_where_any_parameter_has_them() -> None:
    mixed = [HALVES[1], SPECS[2]]
    fragment = partition(mixed, 1).fragments[0]
    x = np.ones(fragment.size, np.float32)
    assert not residuals.are_halves(fragment)
    assert residuals.kept(fragment, x) is x
    assert residuals.whole(x) is x


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@in_virtual_time
async def test_an_update_carries_what_was_kept(tmp_path: Path, dtype: str) -> None:
    async with world(tmp_path / "run", seed(dtype)) as w:
        own, fragment = LocalBackend(w.log), w.run.layout.fragments[0]
        header = UpdateHeader(
            schema=SCHEMA, run=w.run.digest, fragment=0, learner="a", incarnation=1, base=0,
            codec=w.run.rules.codec_up, steps=4, tokens=400, step=4, tokens_seen=400, train_s=1.0,
        )  # fmt: skip
        draw = np.random.default_rng(0)
        # The values are exact in bfloat16, because what the dtype cannot hold of a base does not count as progress.
        base, values = (draw.integers(-64, 64, fragment.size).astype(np.float32) for _ in range(2))
        first = await own.pack(header, base, values, None)
        assert first is not None
        assert first.dropped is not None
        code, sent = codec(w.run.rules.codec_up), np.empty(fragment.size, np.float32)

        def left_of(gradient: F32) -> F32:
            unpack(code, fragment, pack(code, fragment, gradient), sent)
            return residuals.whole(residuals.kept(fragment, gradient - sent))

        once = left_of(base - values)
        assert np.array_equal(residuals.whole(local_residual(first.dropped)), once)
        again = await own.pack(header, base, values, first.dropped)
        assert again is not None
        assert again.dropped is not None
        assert np.array_equal(residuals.whole(local_residual(again.dropped)), left_of((base - values) + once))
        total = own.sum(0, first.dropped, again.dropped)
        assert total.dtype == (np.float32 if dtype == "float32" else np.uint16)
        both = once + residuals.whole(local_residual(again.dropped))
        assert np.array_equal(residuals.whole(total), residuals.whole(residuals.kept(fragment, both)))


@pytest.mark.parametrize("residual", [True, False])
@in_virtual_time
async def test_what_a_rank_brings_home_of_an_earlier_release_is_kept_as_here(tmp_path: Path, residual: bool) -> None:
    async with world(tmp_path / "run", seed()) as w:
        own, size = LocalBackend(w.log), w.run.layout.fragments[0].size
        x = np.random.default_rng(0).normal(size=size).astype(np.float32)
        header = PartHeader(
            schema=SCHEMA, run=w.run.digest, learner="a", incarnation=1, step=4, rank=1,
            pieces=(Piece(0, (0,), (size,), 0, 0, bytes(32)),),
        )  # fmt: skip
        part = await checkpoint_shards.write(w.log, header, [x])
        head = await w.store.get_range(part.key, 0, part.head)
        said = frame.parse_head(head, frame.Kind.PART, PartHeader).pieces[0]
        lies = checkpoint_shards.ShardRef(part.key, part.head + said.at, said.size, said.digest, (0,), (size,))
        home = await own.home(0, Stored((lies,), residual))
        assert home.dtype == (np.uint16 if residual else np.float32)
        wanted = residuals.kept(w.run.layout.fragments[0], x) if residual else x
        assert np.array_equal(local_residual(home), wanted)


@in_virtual_time
async def test_nobody_reads_more_of_a_part_than_a_head_can_have(tmp_path: Path) -> None:
    async with world(tmp_path / "run", seed()) as w:
        for head, size in ((2**60, 1), (2**30, 2**40)):
            header = CheckpointHeader(
                schema=SCHEMA, run=w.run.digest, learner="a", incarnation=1, step=4, tokens_seen=0, tokens_lost=0,
                loss=None, taken_at=0.0, fragments=(), arrays=(), optimizer=None, data=None,
                parts=(Part(key="learners/a/00000001/checkpoints/parts/x", size=size, head=head, digest=bytes(32)),),
            )  # fmt: skip
            with pytest.raises(RecordInvalid, match=f"is said to begin with {head} bytes of header"):
                await checkpoint_shards.located(w.log, header, 1 << 20)

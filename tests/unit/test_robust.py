"""Robust merges agree with a float64 reference, give the same bits with any threads, and resist a hostile minority."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from isthmus.codecs import as_bytes, codec, pack
from isthmus.codecs.kernels import F32
from isthmus.codecs.packed import Packed, packed
from isthmus.errors import InputError
from isthmus.format.layout import Spec, TensorClass, partition
from isthmus.format.rules import ROBUST, Bounds, MergeRule, Rules
from isthmus.inspect.replay import replay
from isthmus.log import fold, merge, robust
from isthmus.runtime.clock import ALONE, ComputePool
from support.world import QUICK, all_commits, seed_of, serving, train, world

FRAGMENT = partition(
    [
        Spec("embed", (400, 50), "float32", TensorClass.EMBEDDING),
        Spec("weight", (640, 331), "float32", TensorClass.DENSE),
        Spec("gain", (17,), "float32", TensorClass.DENSE),
    ],
    1,
).fragments[0]
BOTH = sorted(ROBUST)


def rules(merge_: str, **more: Any) -> Rules:
    return Rules.suited((), fragments=1, merge=merge_, **more)


def honest(count: int, seed: int = 0, alike: float = 1.0) -> list[F32]:
    """Return updates with a common direction and independent noise."""
    draw = np.random.default_rng(seed)
    common = draw.standard_normal(FRAGMENT.size)
    return [(0.01 * (alike * common + draw.standard_normal(FRAGMENT.size))).astype(np.float32) for _ in range(count)]


def merged(given: list[F32], of: Rules, weights: list[float] | None = None, compute: ComputePool = ALONE) -> F32:
    accumulator = merge.Accumulator(FRAGMENT, merge.outers(of), compute)
    for x, w in zip(given, weights or [1.0] * len(given), strict=True):
        accumulator.add(x, w)
    return np.concatenate([total * np.float64(scale) for total, scale in accumulator.deltas()[0]]).astype(np.float32)


def cosine(a: F32, b: F32) -> float:
    x, y = a.astype(np.float64), b.astype(np.float64)
    return float(x @ y / (np.linalg.norm(x) * np.linalg.norm(y)))


def reference(given: list[F32], weights: list[float], trim: float | None) -> np.ndarray:
    """Compute a robust merge from its definition, in float64, tensor by tensor."""
    out = np.zeros(FRAGMENT.size)
    weights = robust.votes(weights)
    w = np.array(weights)
    for t in FRAGMENT.tensors:
        vs = np.stack([x[t.start : t.stop].astype(np.float64) for x in given])
        norms = np.linalg.norm(vs, axis=1)
        units = vs / norms[:, None]
        if trim is None:
            y = w @ units / w.sum()
            for _ in range(robust.WEISZFELD_STEPS):
                pull = w / np.maximum(np.linalg.norm(units - y, axis=1), robust.SMOOTHING)
                y = pull @ units / pull.sum()
        else:
            k = robust.left_out(trim, len(given))
            order = np.argsort(units, axis=0, kind="stable")[k : len(given) - k]
            kept, of = np.take_along_axis(units, order, 0), w[order]
            y = (kept * of).sum(0) / of.sum(0)
        out[t.start : t.stop] = robust.weighted_median(list(norms), weights) * y / np.linalg.norm(y)
    return out


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("rule", BOTH)
def test_it_is_what_its_definition_says(rule: str, count: int) -> None:
    given = honest(count, seed=count)
    weights = [float(w) for w in np.random.default_rng(count).uniform(0.5, 2.0, count)]
    trim = Rules().trim if rule == MergeRule.TRIMMED else None
    found, wanted = merged(given, rules(rule), weights), reference(given, weights, trim)
    np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-7)


@pytest.mark.parametrize("rule", BOTH)
def test_the_bits_do_not_depend_on_threads(rule: str) -> None:
    given = honest(5)
    alone = merged(given, rules(rule))
    for threads in (2, 3, 7):
        with ThreadPoolExecutor(threads) as pool:
            assert np.array_equal(
                alone.view(np.uint32), merged(given, rules(rule), compute=ComputePool(pool, threads)).view(np.uint32)
            )
    found: list[F32] = []
    other = threading.Thread(target=lambda: found.append(merged(given, rules(rule))))
    other.start()
    other.join()
    assert np.array_equal(alone.view(np.uint32), found[0].view(np.uint32))


@pytest.mark.parametrize("rule", BOTH)
def test_packed_updates_are_merged_as_what_they_decode_to(rule: str) -> None:
    code = codec("int4")
    sent: list[Packed] = [packed(FRAGMENT, code, as_bytes(bytes(pack(code, FRAGMENT, x)))) for x in honest(4)]
    accumulator = merge.Accumulator(FRAGMENT, merge.outers(rules(rule)))
    for x in sent:
        accumulator.add(x, 1.0)
    found = np.concatenate([total * np.float64(s) for total, s in accumulator.deltas()[0]])
    np.testing.assert_allclose(found, merged([x.decode() for x in sent], rules(rule)), rtol=1e-4, atol=1e-8)


ATTACKS: dict[str, Callable[[F32, np.random.Generator], F32]] = {
    "the other way": lambda x, draw: -x,
    "a thousand times as far": lambda x, draw: 1000 * x,
    "the other way, a thousand times": lambda x, draw: -1000 * x,
    "noise": lambda x, draw: draw.standard_normal(x.size).astype(np.float32) * np.float32(10),
    "one way, together": lambda x, draw: np.full(x.size, 5.0, np.float32),
    "nothing": lambda x, draw: np.zeros_like(x),
    "nearly nothing, together": lambda x, draw: np.full(x.size, 1e-30, np.float32),
}


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("hostile", [1, 2, 3])
@pytest.mark.parametrize("rule", BOTH)
def test_three_of_eight_do_not_choose_the_direction_nor_the_length(rule: str, hostile: int, name: str) -> None:
    draw = np.random.default_rng(7)
    good = honest(8 - hostile)
    clean = merged(good, rules(rule, trim=0.4))
    bad = [ATTACKS[name](x, draw) for x in honest(hostile, seed=3)]
    found = merged([*bad, *good], rules(rule, trim=0.4))
    assert cosine(found, clean) > (0.9 if hostile < 3 else 0.7)
    assert 0.5 < np.linalg.norm(found) / np.linalg.norm(clean) < 2.0


@pytest.mark.parametrize("rule", BOTH)
def test_a_learner_with_several_updates_has_one_vote(rule: str) -> None:
    """Three hostile learners of eight, with two updates each, send six of the eleven updates."""
    good = honest(5)
    of = rules(rule, trim=0.4)
    accumulator = merge.Accumulator(FRAGMENT, merge.outers(of))
    for base in range(2):
        for name in ("a", "b", "c"):
            accumulator.add(np.float32(-1.0 - base) * good[0], 1.0, learner=name)
    for number, x in enumerate(good):
        accumulator.add(x, 1.0, learner=f"l{number}")
    found = np.concatenate([total * np.float64(scale) for total, scale in accumulator.deltas()[0]])
    assert cosine(found, merged(good, of)) > 0.6
    # The hostile updates have one direction. So the result is as if each hostile learner had sent one update, 1.5 times
    # as long, that weighs no more than the others.
    one = merged([np.float32(-1.5) * good[0]] * 3 + good, of)
    np.testing.assert_allclose(found, one, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("rule", BOTH)
def test_several_updates_of_a_learner_are_their_weighted_mean(rule: str) -> None:
    first, second, *others = honest(4)
    accumulator = merge.Accumulator(FRAGMENT, merge.outers(rules(rule)))
    accumulator.add(first, 3.0, 0.5, learner="a")
    for number, x in enumerate(others):
        accumulator.add(x, 4.0, learner=f"l{number}")
    accumulator.add(second, 1.0, learner="a")
    found = np.concatenate([total * np.float64(scale) for total, scale in accumulator.deltas()[0]])
    mean = (0.375 * first + 0.25 * second).astype(np.float32)
    np.testing.assert_allclose(found, merged([mean, *others], rules(rule), [4.0] * 3), rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("boast", [1.0, Bounds().weight, 1e6])
@pytest.mark.parametrize("rule", BOTH)
def test_a_minority_is_no_majority_by_what_it_says_it_weighs(rule: str, boast: float) -> None:
    """At the largest weight that bounds allow, three of eight learners weigh six, and the five honest ones five."""
    good = honest(5)
    against = [np.float32(-9.0) * good[0]] * 3
    found = merged([*against, *good], rules(rule, trim=0.4), [boast] * 3 + [1.0] * 5)
    clean = merged(good, rules(rule, trim=0.4))
    assert cosine(found, clean) > 0.6
    assert np.linalg.norm(found) < 1.2 * np.linalg.norm(clean)


def test_what_weighs_little_counts_for_little_and_what_weighs_much_for_no_more_than_the_median() -> None:
    assert robust.votes([1.0, 4.0, 2.0]) == [1.0, 2.0, 2.0]
    assert robust.votes([3.0, 1.0, 9.0, 2.0]) == [2.0, 1.0, 2.0, 2.0]
    assert robust.votes([5.0]) == [5.0]


@pytest.mark.parametrize("name", ["the other way, a thousand times", "one way, together"])
def test_a_plain_mean_is_theirs(name: str) -> None:
    """This is why robust merges exist: with a plain mean, the same three of eight learners choose the direction."""
    draw = np.random.default_rng(7)
    good = honest(5)
    bad = [ATTACKS[name](x, draw) for x in honest(3, seed=3)]
    avg = Rules(fragments=1, merge="avg")
    assert cosine(merged([*bad, *good], avg), merged(good, avg)) < 0.3


@pytest.mark.parametrize("rule", BOTH)
def test_what_is_clipped_is_shorter_and_points_the_same_way(rule: str) -> None:
    given = honest(3)
    whole, cut = (merge.Accumulator(FRAGMENT, merge.outers(rules(rule))) for _ in range(2))
    for x in given:
        whole.add(x, 1.0)
        cut.add(x, 1.0, 0.5)
    for (a, of_a), (b, of_b) in zip(whole.deltas()[0], cut.deltas()[0], strict=True):
        assert np.array_equal(a, b)
        assert of_b == pytest.approx(0.5 * of_a)


@pytest.mark.parametrize("rule", BOTH)
def test_directions_that_cancel_are_counted_and_not_blown_up(rule: str) -> None:
    x = honest(1)[0]
    accumulator = merge.Accumulator(FRAGMENT, merge.outers(rules(rule)))
    for sign in (1.0, -1.0):
        accumulator.add(np.float32(sign) * x, 1.0)
    deltas, cancelled = accumulator.deltas()
    assert cancelled == len(FRAGMENT.tensors)
    assert max(float(np.abs(total * scale).max()) for total, scale in deltas) < 1e-6


@pytest.mark.parametrize(("count", "out"), [(1, 0), (2, 0), (3, 1), (4, 1), (5, 1), (8, 2), (9, 2), (100, 25)])
def test_how_many_are_left_out(count: int, out: int) -> None:
    assert robust.left_out(0.25, count) == out
    assert robust.left_out(0.49, count) <= (count - 1) // 2


def test_medians_by_weight() -> None:
    assert robust.weighted_median([3.0, 1.0, 2.0], [1.0, 1.0, 1.0]) == 2.0
    assert robust.weighted_median([1.0, 2.0], [1.0, 1.0]) == 1.5
    assert robust.weighted_median([1.0, 9.0], [1.0, 3.0]) == 9.0
    assert robust.weighted_median([5.0], [2.0]) == 5.0


def test_embeddings_are_merged_alike_where_the_rest_is_robust() -> None:
    assert Rules.suited((), merge="trimmed").merge_embeddings == "trimmed"
    assert Rules.suited((), merge="median").merge_embeddings == "median"
    assert Rules.suited((), merge="rda").merge_embeddings == "avg"
    with pytest.raises(InputError, match="merge_embeddings avg: with merge median, choose trimmed or median"):
        Rules.suited((), merge="median", merge_embeddings="avg").check()


@pytest.mark.parametrize("rule", BOTH)
async def test_a_run_merges_by_it_and_is_replayed_bit_by_bit(folder: Path, rule: str) -> None:
    of = Rules.suited((), fragments=2, sync_every=4, merge=rule)
    async with world(folder, seed_of(of, QUICK)) as w:
        async with serving(w.syncer()) as syncer:
            import asyncio

            await asyncio.gather(
                *(
                    train(w.learner(f"l{i}"), 60, seed=i, enough=lambda: syncer.coordinators[0].head >= 4)
                    for i in range(3)
                )
            )
        commits = (await all_commits(w.log))[0]
        assert {c.header.dense.merge for c in commits} == {rule}
        assert {c.header.embedding.merge for c in commits} == {rule}
        assert [one.difference for one in await replay(w.log)] == [None, None]
        assert (await fold.fold(w.log, 0, fold.Merging(w.log))).version == len(commits)

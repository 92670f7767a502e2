"""A merge agrees with a plain float64 reference, and its bits do not depend on how threads share the work."""

import math
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from isthmus.codecs import as_bytes, codec, kernels
from isthmus.codecs.base import PIECE
from isthmus.codecs.kernels import F32
from isthmus.format.layout import Spec, TensorClass, partition
from isthmus.format.records import frame
from isthmus.format.records.objects import SnapshotHeader, ValueHeader
from isthmus.format.rules import Rules
from isthmus.log import merge
from isthmus.runtime.clock import ALONE, ComputePool

FRAGMENT = partition(
    [
        Spec("embed", (50, 16), "float32", TensorClass.EMBEDDING),
        Spec("weight", (64, 33), "float32", TensorClass.DENSE),
        Spec("gain", (17,), "float32", TensorClass.DENSE),
    ],
    1,
).fragments[0]


def updates(count: int, seed: int = 0) -> list[tuple[F32, float]]:
    draw = np.random.default_rng(seed)
    return [
        (draw.normal(scale=0.01, size=FRAGMENT.size).astype(np.float32), merge.weight(int(draw.integers(1, 9999)), 12))
        for _ in range(count)
    ]


def state(seed: int = 1) -> merge.State:
    return merge.initial(np.random.default_rng(seed).normal(size=FRAGMENT.size).astype(np.float32))


def accumulated(given: list[tuple[F32, float]], rules: Rules, compute: ComputePool = ALONE) -> merge.Accumulator:
    accumulator = merge.Accumulator(FRAGMENT, merge.outers(rules), compute)
    for x, w in given:
        accumulator.add(x, w)
    return accumulator


def reference(given: list[tuple[F32, float]], rules: Rules) -> NDArray[np.float64]:
    """Return Δ in float64, straight from the definitions."""
    out = np.zeros(FRAGMENT.size)
    weights = np.array([w for _, w in given])
    for t in FRAGMENT.tensors:
        vs = np.stack([x[t.start : t.stop].astype(np.float64) for x, _ in given])
        norms = np.linalg.norm(vs, axis=1)
        rule = rules.merge_for(t.spec.role)
        mean = weights @ vs / weights.sum()
        if rule == "avg":
            out[t.start : t.stop] = mean
            continue
        if rule == "iso" and len(t.spec.shape) == 2:
            u, _, v = np.linalg.svd(mean.reshape(t.spec.shape), full_matrices=False)
            polar = (u @ v).reshape(-1)
            out[t.start : t.stop] = weights @ norms / weights.sum() * polar / np.linalg.norm(polar)
            continue
        units = np.divide(vs, norms[:, None], out=np.zeros_like(vs), where=norms[:, None] > 0)
        direction = weights @ units / weights.sum()
        length = np.linalg.norm(direction)
        magnitude = weights @ norms / weights.sum()
        out[t.start : t.stop] = magnitude * (direction / length if length >= merge.CANCELLED_BELOW else direction)
    return out


def gradient_of(accumulator: merge.Accumulator) -> NDArray[np.float64]:
    """Return Δ as the outer step uses it."""
    deltas, _ = accumulator.deltas()
    return np.concatenate([delta.astype(np.float64) * scale for delta, scale in deltas])


@pytest.mark.parametrize(("rule", "exact"), [("rda", 2e-6), ("avg", 2e-6), ("iso", 5e-3)])
@pytest.mark.parametrize("learners", [1, 2, 4, 16])
def test_a_round_matches_the_reference(rule: str, exact: float, learners: int) -> None:
    rules, given = Rules(merge=rule), updates(learners)
    expected, found = reference(given, rules), gradient_of(accumulated(given, rules))
    for t in FRAGMENT.tensors:
        at = slice(t.start, t.stop)
        # Five iterations leave the singular values of a matrix within half a percent of each other.
        worst = exact if t.spec.is_matrix else 2e-6
        assert np.linalg.norm((found - expected)[at]) < worst * np.linalg.norm(expected[at])


def test_iso_takes_matrices_alone_and_keeps_the_mean_length() -> None:
    given = updates(8)
    iso, rda = gradient_of(accumulated(given, Rules(merge="iso"))), gradient_of(accumulated(given, Rules()))
    vector = Spec("weight", (64, 33), "float32", TensorClass.VECTOR)
    named = partition([vector if t.spec.name == "weight" else t.spec for t in FRAGMENT.tensors], 1).fragments[0]
    plain = merge.Accumulator(named, merge.outers(Rules(merge="iso")))
    for x, w in given:
        plain.add(x, w)
    assert np.array_equal(gradient_of(plain), rda), "a tensor that the run's creator names is no matrix"
    for t in FRAGMENT.tensors:
        at = slice(t.start, t.stop)
        assert np.array_equal(iso[at], rda[at]) == (t.spec.name != "weight")
        assert np.linalg.norm(iso[at]) == pytest.approx(np.linalg.norm(rda[at]), rel=1e-5)


def test_what_cancels_is_relative_to_the_lengths_of_the_differences() -> None:
    given = [((x * np.float32(1e-6)).astype(np.float32), w) for x, w in updates(4)]
    assert accumulated(given, Rules(merge="iso")).deltas()[1] == 0


@pytest.mark.parametrize("left", [0.0, 5e-4])
def test_iso_takes_the_plain_mean_where_directions_cancel(left: float) -> None:
    x = updates(1)[0][0]
    given = [(x, 1.0 + left), (-x, 1.0)]
    found = accumulated(given, Rules(merge="iso"))
    assert found.deltas()[1] == 2
    at = next(slice(t.start, t.stop) for t in FRAGMENT.tensors if t.spec.name == "weight")
    assert np.array_equal(gradient_of(found)[at], gradient_of(accumulated(given, Rules(merge="avg")))[at])


def test_rda_keeps_the_length_that_avg_loses() -> None:
    given = [(x, 1.0) for x, _ in updates(16)]
    weight = FRAGMENT.tensors[1] if FRAGMENT.tensors[1].spec.name == "weight" else FRAGMENT.tensors[0]
    at = slice(weight.start, weight.stop)
    mean = np.mean([np.linalg.norm(x[at]) for x, _ in given])
    rda = np.linalg.norm(gradient_of(accumulated(given, Rules(merge="rda")))[at])
    avg = np.linalg.norm(gradient_of(accumulated(given, Rules(merge="avg")))[at])
    assert rda == pytest.approx(mean, rel=1e-5)
    assert avg == pytest.approx(mean / 4, rel=0.1)  # 1/√16, the directions being nearly orthogonal


def test_embeddings_are_averaged_and_all_else_is_not() -> None:
    given = updates(8)
    mixed, avg = gradient_of(accumulated(given, Rules())), gradient_of(accumulated(given, Rules(merge="avg")))
    for t in FRAGMENT.tensors:
        same = np.array_equal(mixed[t.start : t.stop], avg[t.start : t.stop])
        assert same == (t.spec.role == "embedding")


def test_directions_that_cancel_are_counted_and_not_blown_up() -> None:
    x = updates(1)[0][0]
    accumulator = accumulated([(x, 1.0), (-x, 1.0)], Rules())
    _, cancelled = accumulator.deltas()
    assert cancelled == 2  # the two dense tensors; the embedding is averaged
    assert np.abs(gradient_of(accumulator)).max() < 1e-6 * np.abs(x).max()


def test_a_learner_without_gradient_weighs_but_does_not_move() -> None:
    x = updates(1)[0][0]
    zero = np.zeros_like(x)
    alone = gradient_of(accumulated([(x, 1.0)], Rules()))
    both = gradient_of(accumulated([(x, 1.0), (zero, 1.0)], Rules()))
    assert np.allclose(both, alone / 2, rtol=1e-5)
    assert not gradient_of(accumulated([(zero, 1.0)], Rules())).any()


def test_an_overflow_is_seen() -> None:
    x = np.full(FRAGMENT.size, 3e38, np.float32)
    rules = Rules(merge="avg", outer_lr=1.0)
    assert not merge.advance(state(), accumulated([(x, 1.0), (x, 1.0)], rules), codec("f32"), bytes(32)).finite
    assert merge.advance(state(), accumulated(updates(2), rules), codec("f32"), bytes(32)).finite


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e30])
def test_extreme_lengths_neither_overflow_nor_vanish(scale: float) -> None:
    x = (updates(1)[0][0] * np.float32(100)).astype(np.float64)
    given = [((x * scale).astype(np.float32), 1e12)]
    out = gradient_of(accumulated(given, Rules()))
    assert np.isfinite(out).all()
    assert np.linalg.norm(out) == pytest.approx(np.linalg.norm(given[0][0].astype(np.float64)), rel=1e-2)


def test_the_outer_step_is_torchs_nesterov() -> None:
    rules = Rules(merge="avg", outer_lr=0.7, outer_momentum=0.9)
    now = state()
    parameter = torch.nn.Parameter(torch.from_numpy(now.master.copy()))
    sgd = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    for version in range(4):
        given = updates(3, seed=version)
        accumulator = accumulated(given, rules)
        parameter.grad = torch.from_numpy(reference(given, rules).astype(np.float32))
        sgd.step()
        now = merge.advance(now, accumulator, codec("f32"), bytes(32)).state
    assert np.allclose(now.master, parameter.detach().numpy(), rtol=1e-5, atol=1e-6)


def test_weights_are_quantity_times_quality() -> None:
    assert merge.weight(3072, 12) == 3072 * 256
    assert merge.weight(100, 50) == 200.0


@pytest.mark.parametrize("down", ["f32", "bf16", "int8", "int4"])
def test_the_published_value_follows_the_master_through_the_codec(down: str) -> None:
    now = state()
    for version in range(30):
        before = now
        result = merge.advance(now, accumulated(updates(4, seed=version), Rules()), codec(down), bytes(32))
        now = result.state
        # A learner that applies the value object holds exactly the published version.
        _, payload = frame.parse(result.value, frame.Kind.VALUE, ValueHeader)
        learner = merge.next_published(before.published, FRAGMENT, codec(down), as_bytes(payload))
        assert merge.array_digest(learner) == result.published_digest
    # What the codec drops is carried on, not lost: the distance does not grow beyond one step.
    moved = np.abs(now.master - before.master).max()
    assert np.abs(now.master - now.published).max() <= moved


def test_state_is_never_written_to() -> None:
    now = state()
    digest = now.measured()
    merge.advance(now, accumulated(updates(4), Rules()), codec("int8"), bytes(32))
    assert now.measured() == digest


def test_the_same_round_gives_the_same_bits_whoever_computes_it() -> None:
    given, start = updates(8), state()

    def digest() -> bytes:
        return merge.advance(start, accumulated(given, Rules()), codec("int4"), bytes(32)).state_digest

    wanted, found = digest(), []
    threads = [threading.Thread(target=lambda: found.append(digest())) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found == [wanted] * 8


def test_a_compute_shares_what_a_round_comes_to_and_changes_no_bit() -> None:
    class Halving(ComputePool):
        shared = 0

        def share(self, work: Callable[[int, int], object], count: int, least: int = 64) -> None:
            Halving.shared += 1
            work(count // 2, count)
            work(0, count // 2)

    given, start, rules = updates(8), state(), Rules(merge="iso")
    plain, shared = (
        merge.advance(start, accumulated(given, rules, compute), codec("int4"), bytes(32))
        for compute in (ALONE, Halving())
    )
    assert shared.state_digest == plain.state_digest
    assert Halving.shared


class Cut(ComputePool):
    """Cuts all work into parts of one piece, the last one first."""

    def share(self, work: Callable[[int, int], object], count: int, least: int = 64) -> None:
        for i in reversed(range(count)):
            work(i, i + 1)


@pytest.mark.parametrize("compute", [ALONE, Cut()], ids=["whole", "cut"])
@pytest.mark.parametrize("feedback", [True, False], ids=["fed back", "dropped"])
@pytest.mark.parametrize("down", ["int8", "int4"])
def test_one_pass_has_the_bits_of_step_difference_codec_and_sum_one_after_the_other(
    down: str, feedback: bool, compute: ComputePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = [(1,), (127,), (128,), (129, 1), (300, 700), (PIECE,), (PIECE + 1,), (2 * PIECE + 65,)]
    specs = [Spec(f"t{i}", shape, "float32", TensorClass.DENSE) for i, shape in enumerate(shapes)]
    fragment, code = partition(specs, 1).fragments[0], codec(down)
    draw = np.random.default_rng(7)

    def values(scale: float) -> F32:
        spread = np.exp(draw.uniform(-20.0, 3.0, fragment.size))
        found = (scale * spread * draw.standard_normal(fragment.size)).astype(np.float32)
        found[draw.integers(0, fragment.size, fragment.size // 9)] = 0.0
        return found

    start = merge.State(3, values(1.0), values(1.0), values(0.1))
    given = merge.Accumulator(fragment, merge.outers(Rules(merge="avg", outer_lr=0.3, outer_momentum=0.7)), compute)
    given.add(values(0.5), 2.0)
    given.add(values(0.5), 3.0)
    assert code.advances
    at_once = merge.advance(start, given, code, bytes(32), feedback)
    monkeypatch.setattr(type(code), "advances", False)
    in_turn = merge.advance(start, given, code, bytes(32), feedback)
    assert bytes(at_once.value) == bytes(in_turn.value)
    assert at_once.state.measured() == in_turn.state.measured() == at_once.state_digest
    assert at_once.finite
    assert in_turn.finite


@pytest.mark.parametrize("down", ["int8", "int4", "f32", "bf16"])
@pytest.mark.parametrize(
    ("published", "master", "momentum", "total", "finite"),
    [
        (0.0, 0.0, 0.0, 1.0, True),
        (0.0, 0.0, 0.0, math.nan, False),
        (0.0, 0.0, 0.0, math.inf, False),
        (0.0, 0.0, 3.4e38, 3.4e38, False),
        (0.0, -3.4e38, 0.0, 3e38, False),
        (-3.4e38, 3.4e38, 0.0, 1.0, False),
        (3.4e38, 3.4e38, 0.0, 1.0, True),
    ],
    ids=["finite", "a NaN", "an infinity", "momentum", "master", "difference", "close to the end"],
)
@pytest.mark.parametrize("at", [0, 130, 299])
def test_what_is_not_finite_is_noticed_wherever_it_is(
    down: str, published: float, master: float, momentum: float, total: float, finite: bool, at: int
) -> None:
    fragment = partition([Spec("t", (300,), "float32", TensorClass.DENSE)], 1).fragments[0]
    arrays = [np.zeros(300, np.float32) for _ in range(4)]
    for x, value in zip(arrays, (published, master, momentum, total), strict=True):
        x[at] = value
    rules = Rules(merge="avg", outer_lr=1.0, outer_momentum=0.9)
    given = merge.Accumulator(fragment, merge.outers(rules))
    given.add(np.zeros(300, np.float32), 1.0)
    given._total[:] = arrays[3]
    assert merge.advance(merge.State(0, *arrays[:3]), given, codec(down), bytes(32)).finite == finite


def test_the_order_of_accumulation_is_part_of_the_bits() -> None:
    given, start = updates(8), state()
    one = merge.advance(start, accumulated(given, Rules()), codec("f32"), bytes(32))
    other = merge.advance(start, accumulated(given[::-1], Rules()), codec("f32"), bytes(32))
    assert one.state_digest != other.state_digest
    assert np.allclose(one.state.master, other.state.master, rtol=1e-4, atol=1e-6)


def test_a_snapshot_brings_the_state_back_bit_by_bit() -> None:
    now = merge.advance(state(), accumulated(updates(3), Rules()), codec("int8"), bytes(32)).state
    header, payload = frame.parse(bytes(merge.snapshot(now, 0, bytes(32))), frame.Kind.SNAPSHOT, SnapshotHeader)
    assert merge.restore(header, payload, FRAGMENT.size).digest == now.digest == header.state_digest


def test_the_kernels_bits_are_recorded() -> None:
    """A change of these bits must raise `kernels.ARITHMETIC`, and record the new digest here."""
    rules = Rules(outer_lr=0.4, outer_momentum=0.5)
    result = merge.advance(state(), accumulated(updates(5), rules), codec("int8"), bytes(32))
    assert kernels.ARITHMETIC == 1
    assert result.state_digest.hex() == RECORDED


RECORDED = "91571978e3dd2bb277aab27aa3eaa1e3a511baa2f445ebda3b645dc0665a61b6"


@pytest.mark.parametrize("rule", ["rda", "iso", "avg"])
def test_what_is_clipped_counts_as_if_it_were_so_much_shorter(rule: str) -> None:
    rules = Rules(fragments=1, merge=rule)
    given = updates(4)
    clipped, shorter = (merge.Accumulator(FRAGMENT, merge.outers(rules)) for _ in range(2))
    for number, (x, w) in enumerate(given):
        scale = 0.25 if number == 2 else 1.0
        clipped.add(x, w, scale)
        shorter.add(x * np.float32(scale), w)
    for (a, to_a), (b, to_b) in zip(clipped.deltas()[0], shorter.deltas()[0], strict=True):
        np.testing.assert_allclose(a * to_a, b * to_b, rtol=1e-5, atol=1e-9)

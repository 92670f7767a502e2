"""Step 4: the updates of a round are merged into one outer gradient, and the outer optimizer takes one step with it."""

from typing import Any

import numpy as np
import pytest

from isthmus.codecs import codec
from isthmus.codecs.kernels import F32
from isthmus.format.layout import Spec, TensorClass, partition
from isthmus.format.rules import Rules
from isthmus.log.merge import Accumulator, Advance, State, advance, outers, weight

(FRAGMENT,) = partition([Spec("t", (2,), "float32", TensorClass.DENSE)], 1).fragments
START = np.array([10.0, 10.0], np.float32)


def merged(*updates: tuple[F32, float], state: State | None = None, **rules: Any) -> Advance:
    """Merge outer gradients with their weights, and take the outer step."""
    outer = outers(Rules(fragments=1, **rules))
    total = Accumulator(FRAGMENT, outer)
    for gradient, its_weight in updates:
        total.add(gradient, its_weight)
    state = state or State(0, START, START, np.zeros_like(START))
    return advance(state, total, codec("f32"), bytes(32))


def vector(x: float, y: float) -> F32:
    return np.array([x, y], np.float32)


def test_an_update_weighs_its_tokens_times_its_tokens_per_step() -> None:
    """Many tokens make an update worth more, and so does a large batch, whose gradient is less noisy. A syncer limits
    weight and length to a multiple of what is usual (`isthmus.rounds.bounds`): what a learner says may be false."""
    assert weight(tokens=1000, steps=10) == 1000 * 100
    assert weight(tokens=1000, steps=5) == 2 * weight(tokens=1000, steps=10)


def test_avg_is_the_weighted_mean() -> None:
    result = merged((vector(4, 0), 3.0), (vector(0, 4), 1.0), merge="avg", outer_lr=1.0, outer_momentum=0.0)
    assert START - result.state.published == pytest.approx(vector(3, 1))


def test_rda_is_the_mean_of_the_directions_at_the_mean_of_the_lengths() -> None:
    """The mean of two vectors at right angles is shorter than both of them. RDA keeps their length."""
    updates = (vector(4, 0), 1.0), (vector(0, 4), 1.0)
    avg = merged(*updates, merge="avg", outer_lr=1.0, outer_momentum=0.0)
    rda = merged(*updates, merge="rda", outer_lr=1.0, outer_momentum=0.0)
    assert np.linalg.norm(START - avg.state.published) == pytest.approx(4 / np.sqrt(2))
    assert np.linalg.norm(START - rda.state.published) == pytest.approx(4)


def test_the_outer_step_is_nesterov_momentum_on_the_merged_gradient() -> None:
    """b ← μ·b + Δ, then Θ ← Θ − η·(Δ + μ·b)."""
    rules: dict[str, Any] = {"merge": "avg", "outer_lr": 0.5, "outer_momentum": 0.8}
    gradient = vector(1, 1)
    first = merged((gradient, 1.0), **rules)
    assert START - first.state.published == pytest.approx(0.5 * (1 + 0.8) * gradient)
    second = merged((gradient, 1.0), state=first.state, **rules)
    momentum = 0.8 * 1 + 1
    assert first.state.published - second.state.published == pytest.approx(0.5 * (1 + 0.8 * momentum) * gradient)


def test_the_same_updates_give_the_same_bits() -> None:
    """This holds on every machine: sums are made in the recorded order of arrival, and in a fixed precision."""
    draw = np.random.default_rng(1)
    updates = [(draw.normal(size=2).astype(np.float32), 1.0 + i) for i in range(5)]
    assert merged(*updates).state_digest == merged(*updates).state_digest

"""Step 2: a learner trains by itself and, every H steps, turns what changed in a fragment since its base into an update."""

import numpy as np
import pytest

from isthmus.codecs import codec, pack, unpack
from isthmus.codecs.kernels import F32
from isthmus.format.layout import Spec, TensorClass, partition
from isthmus.format.rules import Adoption, Pace
from isthmus.learner.boundary import Boundary, Captured

H = 4
LAYOUT = partition([Spec(f"t{i}", (64,), "float32", TensorClass.DENSE) for i in range(2)], 2)
LEARNING_RATE = np.float32(0.1)


class Model:
    """Parameters that start at one and take the steps of a plain SGD."""

    def __init__(self) -> None:
        self.values = [np.ones(fragment.size, np.float32) for fragment in LAYOUT.fragments]

    def read(self, fragment: int, out: F32) -> None:
        out[:] = self.values[fragment]

    def write(self, fragment: int, values: F32) -> None:
        self.values[fragment][:] = values

    def step(self, gradient: float) -> None:
        for values in self.values:
            values -= LEARNING_RATE * np.float32(gradient)


def trained(steps: int) -> list[Captured]:
    """Train this many steps with a gradient of 1; return what was captured at the step boundaries."""
    model = Model()
    start = [(0, np.ones(fragment.size, np.float32), 0.0) for fragment in LAYOUT.fragments]
    boundary = Boundary(
        LAYOUT, model, periods=(H, 8 * H), pace=Pace(), adopt=Adoption.OVERWRITE, versions=start,
        step=0, tokens_seen=0, now=lambda: 0.0, notify=lambda: None,
    )  # fmt: skip
    for _ in range(steps):
        model.step(gradient=1.0)
        boundary.after_step(tokens=100)
    return [message for message in boundary.outbox if isinstance(message, Captured)]


def test_each_fragment_is_captured_once_in_H_steps_and_fragments_take_turns() -> None:
    captured = trained(H)
    assert sorted(c.fragment for c in captured) == [0, 1]
    assert captured[0].step < captured[1].step


def test_the_outer_gradient_is_the_base_minus_the_parameters() -> None:
    """The sum of the learner's own steps, with the sign of a gradient: the outer optimizer subtracts it."""
    captured = trained(H)[-1]
    outer_gradient = np.asarray(captured.base_values) - np.asarray(captured.values)
    assert outer_gradient == pytest.approx(captured.steps * LEARNING_RATE)
    assert captured.tokens == captured.steps * 100


def test_the_codec_packs_it_into_four_bits_and_the_rest_is_added_later() -> None:
    """This is error feedback: what the codec drops of a merged update is added to a later one, so little is lost. Here
    the test adds it; in a run `isthmus.learner.uplink` does."""
    fragment, int4 = LAYOUT.fragments[0], codec("int4")
    wanted = np.random.default_rng(0).normal(size=fragment.size).astype(np.float32)
    sent_in_all, dropped = np.zeros_like(wanted), np.zeros_like(wanted)
    for _ in range(50):
        packed = pack(int4, fragment, wanted + dropped)
        assert packed.nbytes < wanted.nbytes / 3, "four bits, and a scale for each block"
        sent = np.empty_like(wanted)
        unpack(int4, fragment, packed, sent)
        dropped = wanted + dropped - sent
        sent_in_all += sent
    assert np.abs(sent - wanted).max() > 0.1, "one update is coarse"
    assert sent_in_all / 50 == pytest.approx(wanted, abs=0.02), "the mean of many updates is precise"

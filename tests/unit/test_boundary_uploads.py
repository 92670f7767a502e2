"""On a thin or failing uplink, fragments are captured in a fair order, and a failed upload's work is local again."""

from collections.abc import Iterable

import numpy as np
import pytest

from isthmus.codecs.kernels import F32
from isthmus.format.layout import Layout, Spec, TensorClass, partition
from isthmus.format.rules import Adoption, Pace
from isthmus.learner.backend import rounded
from isthmus.learner.boundary import (
    Adopted,
    Boundary,
    CalledFor,
    Captured,
    NothingToGive,
    Ready,
    ToAgent,
    ToTraining,
    UploadDone,
    UploadFailed,
)
from isthmus.learner.upload_window import Window

STEP_S = 0.1


def layout(dtype: str = "float32") -> Layout:
    return partition([Spec(f"t{i}", (10,), dtype, TensorClass.DENSE) for i in range(4)], 4)


class Training:
    """A loop over four fragments that grow by `grow` at each step; uploads are under way until told otherwise."""

    def __init__(
        self,
        *,
        adopt: Adoption = Adoption.OVERWRITE,
        sync_every: int = 100,
        staleness: int = 1,
        base: int = 0,
        window: Window | None = None,
        dtype: str = "float32",
        start: float = 0.0,
        grow: float = 1.0,
    ) -> None:
        self.layout, self.grow, self.now = layout(dtype), np.float32(grow), 0.0
        self.values = [np.zeros(10, np.float32) for _ in self.layout.fragments]
        self.boundary = Boundary(
            self.layout,
            self,
            periods=(sync_every, 8 * sync_every),
            pace=Pace(staleness=staleness),
            adopt=adopt,
            versions=[(base, np.full(10, start, np.float32), 0.0) for _ in self.layout.fragments],
            step=0,
            tokens_seen=0,
            now=lambda: self.now,
            notify=lambda: None,
            window=window,
        )

    def read(self, fragment: int, out: F32) -> None:
        out[:] = self.values[fragment]

    def write(self, fragment: int, values: F32) -> None:
        self.values[fragment][:] = rounded(values, self.layout.fragments[fragment].tensors)

    def step(self, count: int = 1, *, step_s: float = STEP_S) -> list[ToAgent]:
        """Train `count` steps; return the boundary's messages to the agent."""
        said: list[ToAgent] = []
        for _ in range(count):
            self.now += step_s
            for v in self.values:
                v += self.grow
            self.boundary.after_step(100)
            said += self.boundary.outbox
            self.boundary.outbox.clear()
        return said

    def tell(self, *messages: ToTraining) -> None:
        for message in messages:
            self.boundary.post(message)


def captured(said: Iterable[ToAgent], fragment: int | None = None) -> list[Captured]:
    return [m for m in said if isinstance(m, Captured) and fragment in (None, m.fragment)]


# --- uploads that fail ------------------------------------------------------------------------------------------------


def first_and_second(training: Training) -> tuple[Captured, Captured]:
    """Send a fragment twice on one base: the first upload is done, the second is under way."""
    [first] = captured(training.step(1), 0)
    training.tell(UploadDone(0))
    [second] = captured(training.step(3), 0)
    assert (first.step, second.step) == (1, 4)
    return first, second


def test_with_carry_a_second_upload_that_failed_takes_no_local_work_along() -> None:
    training = Training(adopt=Adoption.CARRY, sync_every=3)
    first, _ = first_and_second(training)
    training.tell(UploadFailed(0, 0, first.step, first.tokens_seen), Ready(0, 1, np.full(10, 40, np.float32)))
    [adopted] = [m for m in training.step(1) if isinstance(m, Adopted)]
    assert (adopted.version, adopted.sent) == (1, 100)
    assert (training.values[0] == 40 + 4).all(), "four steps since the first upload"


def test_with_carry_a_first_upload_that_failed_is_local_work_again() -> None:
    training = Training(adopt=Adoption.CARRY, sync_every=100, staleness=0)
    training.tell(CalledFor(0, 1))
    assert captured(training.step(1), 0)
    training.tell(UploadFailed(0, 0, None, 0), Ready(0, 1, np.full(10, 40, np.float32)))
    assert Adopted(0, 1, overwritten=0, base=0, sent=0) in training.step(1)
    assert (training.values[0] == 42).all(), "the work of both steps is kept"


def test_what_failed_is_captured_again_with_what_came_on_top() -> None:
    training = Training()
    training.tell(CalledFor(0, 1))
    training.step(1)
    training.tell(UploadFailed(0, 0, None, 0))
    [again] = captured(training.step(1), 0)
    assert (again.base, again.steps, again.tokens, again.due) == (0, 2, 200, True)


def test_a_failure_on_a_base_that_is_gone_changes_nothing_about_the_next_one() -> None:
    training = Training(adopt=Adoption.CARRY, sync_every=100)
    training.tell(CalledFor(0, 1))
    training.step(1)
    training.tell(Ready(0, 1, np.full(10, 40, np.float32)))
    training.step(1)
    training.tell(UploadDone(0), CalledFor(0, 2))
    [second] = captured(training.step(1), 0)
    assert second.base == 1
    training.tell(UploadFailed(0, 0, None, 0))  # the capture on version 0 failed, and the message comes only now
    assert captured(training.step(5), 0) == [], "the capture on version 1 still counts as sent"
    assert training.boundary.local_tokens(0) == 500


# --- calls ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_a_call_is_answered_as_long_as_the_base_is_not_too_old(staleness: int) -> None:
    for behind in range(staleness + 2):
        training = Training(staleness=staleness, base=5)
        training.tell(CalledFor(0, 6 + behind))
        said = training.step(1)
        if behind <= staleness:
            assert [m.base for m in captured(said, 0)] == [5]
        else:
            assert said == [NothingToGive(0, 6 + behind)]


# --- time -------------------------------------------------------------------------------------------------------------


def test_an_evaluation_between_two_steps_is_no_step() -> None:
    training = Training()
    training.step(6)
    training.step(1, step_s=600.0)
    training.step(2)
    assert training.boundary.step_s == pytest.approx(STEP_S)


# --- a thin uplink ----------------------------------------------------------------------------------------------------


def narrow(upload_s: float = 0.0) -> Window:
    """Return a window for one upload at a time; an earlier upload took `upload_s`."""
    window = Window()
    if upload_s:
        number = window.began(1000, 0.0)
        window.ended(number, upload_s, stored=True)
    window.limit = 1
    return window


def test_where_there_is_no_room_whoever_was_sent_longest_ago_goes_first() -> None:
    window = narrow()
    window.free_at = 1e9
    training, order = Training(sync_every=1, window=window), []
    for _ in range(12):
        said = captured(training.step(1))
        order += [m.fragment for m in said]
        training.tell(*(UploadDone(m.fragment) for m in said))
    assert order == [0, 1, 2, 3] * 3


@pytest.mark.parametrize(("upload_s", "waits"), [(0.5, True), (1.6, True), (2.0, False), (30.0, False)])
def test_work_waits_to_be_sent_as_long_as_a_round_to_come_can_still_take_it(upload_s: float, waits: bool) -> None:
    """Rounds come every 2 s. Work on version 1 can be merged into versions 2 to 4; version 3 was called just now."""
    window = narrow(upload_s)
    window.free_at = 1e9
    training = Training(staleness=2, window=window, base=1)
    training.tell(CalledFor(3, 2))
    assert captured(training.step(1), 3), "this upload fills the uplink"
    training.tell(CalledFor(0, 2))
    training.step(1)
    training.step(1, step_s=2.0)
    training.tell(CalledFor(0, 3))
    training.step(1)
    training.tell(Ready(0, 2, np.zeros(10, np.float32)))
    said = training.step(1)
    assert ([m for m in said if isinstance(m, Adopted)] == []) is waits


def test_of_versions_at_hand_the_fragment_that_holds_the_oldest_is_replaced_first() -> None:
    """If more versions are ready than one boundary moves, no fragment waits for ever behind the others."""
    training = Training(staleness=0)
    assert training.boundary.moves == 2
    for version in range(10, 300, 10):
        training.tell(*(Ready(p, version + p, np.zeros(10, np.float32)) for p in range(4)))
        training.step(1)
    assert min(slot.base for slot in training.boundary.slots) >= 280


# --- half precision ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "half_ulp"), [("bfloat16", 2**-7), ("float16", 2**-10)])
def test_with_carry_what_a_parameter_cannot_hold_is_no_work_to_keep(dtype: str, half_ulp: float) -> None:
    """A learner that trained nothing holds the rounded values of the adopted version, even close to a tie."""
    training = Training(adopt=Adoption.CARRY, dtype=dtype, start=1 + 2**-12, grow=0.0)
    version = np.full(10, 2 + half_ulp + 2**-14, np.float32)
    training.tell(Ready(0, 2, version))
    training.step(1)
    assert training.boundary.slots[0].base == 2
    assert (training.values[0] == np.float32(2 + 2 * half_ulp)).all()

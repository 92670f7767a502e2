"""A learner notices that its loss has risen, and only then."""

import math
from collections.abc import Iterable

import numpy as np
import pytest

from isthmus.learner.losses import HIGH_WINDOWS, WINDOW, Losses


def watched(losses: Iterable[float]) -> Losses:
    found = Losses()
    for step, loss in enumerate(losses, 1):
        found.add(step, loss)
    return found


def ever_risen(losses: Iterable[float]) -> bool:
    found = Losses()
    for step, loss in enumerate(losses, 1):
        found.add(step, loss)
        if found.risen:
            return True
    return False


@pytest.mark.parametrize(
    ("start", "end", "scatter"),
    [
        (10.4, 2.5, 0.1),
        (2.3, 0.001, 0.001),
        (2.5, 2.4, 0.5),
        (3.0, -7.0, 0.5),
        (1.0, 0.9, 0.6),  # batches of one
    ],
)
@pytest.mark.parametrize("resumed", [False, True])
def test_a_loss_that_falls_or_stays_has_not_risen(start: float, end: float, scatter: float, resumed: bool) -> None:
    for seed in range(100):
        draw = np.random.default_rng(seed)
        begin = end if resumed else start
        losses = [end + (begin - end) * math.exp(-k / 100) + scatter * draw.normal() for k in range(40 * WINDOW)]
        assert not ever_risen(losses), seed


def test_a_loss_that_diverges_at_once_has_risen() -> None:
    """As with a far too high rate: 5.5 at first, and some 60 from the twentieth step on."""
    draw = np.random.default_rng(0)
    losses = [5.5, 6.0, 7.0, *np.linspace(8.0, 60.0, 17), *(60.0 + 5.0 * draw.normal(size=3 * WINDOW))]
    risen = watched(losses).risen
    assert risen is not None
    assert risen[0] == 6.0, "the median of the first three"
    assert 50.0 < risen[1] < 70.0


def test_a_loss_that_loses_half_of_what_was_learnt_has_risen_until_it_comes_down() -> None:
    learnt, lost = [*np.linspace(8.0, 1.0, 2 * WINDOW), *[1.0] * WINDOW], [5.0] * HIGH_WINDOWS * WINDOW
    assert watched([*learnt, *lost[:-1]]).risen is None, "the windows that must be high are not over"
    assert watched([*learnt, *lost]).risen == (1.0, 5.0)
    assert watched([*learnt, *lost, *[1.2] * WINDOW]).risen is None
    assert watched([*learnt, *[4.0] * HIGH_WINDOWS * WINDOW]).risen is None, "less than half"
    assert watched([*learnt, *[5.0] * WINDOW, *[1.0] * WINDOW, *[5.0] * WINDOW]).risen is None, "not in a row"


def test_a_process_that_goes_on_compares_with_the_first_losses_of_the_learner() -> None:
    """Seen after a restart of a learner whose loss was near zero: it doubled, and nothing that was learnt was lost."""
    again = [*[0.004] * WINDOW, *[0.008] * HIGH_WINDOWS * WINDOW]
    assert watched(again).risen == (0.004, 0.008)
    learner = watched([2.0, 2.5, 2.25, *[0.1] * WINDOW])
    assert learner.first == 2.25
    restarted = Losses(learner.first)
    for step, loss in enumerate(again, 1):
        restarted.add(step, loss)
    assert (restarted.first, restarted.risen) == (2.25, None)
    for step in range(HIGH_WINDOWS * WINDOW):
        restarted.add(step, 1.5)
    assert restarted.risen == (0.004, 1.5)


def test_losses_that_say_nothing_are_left_out() -> None:
    found = watched([2.0] * WINDOW + [math.inf, math.nan, 1e300] * WINDOW)
    assert found.risen is None
    assert found.mean_after(0) == 2.0
    assert found.mean_after(WINDOW) is None

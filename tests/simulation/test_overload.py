"""A syncer under overload reaches a steady state: the aims of `isthmus bench overload`, in virtual time."""

import pytest

from isthmus_lab.bench.overload import KEPT, OLDEST, SERVED, USED, measured


@pytest.mark.tier("all")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("limited", "load", "learners"),
    [
        ("link", 0.5, 12),
        ("link", 3.0, 12),
        ("store", 3.0, 12),
        ("link", 5.0, 12),
        ("link", 3.0, 40),
        ("store", 3.0, 100),
    ],
)
def test_what_is_read_is_merged_and_no_fragment_is_left_behind(limited: str, load: float, learners: int) -> None:
    seen = measured(limited, load, learners)
    assert seen.used >= USED, seen
    assert seen.served >= SERVED, seen
    assert seen.oldest <= OLDEST, seen
    assert seen.present >= 0.95, seen
    # With M ≥ 40, reading a round takes most of a step. A distant store leads to longer periods instead.
    assert seen.kept >= (KEPT - 0.02 if limited == "link" else 0.6), seen

"""Rejections that occur in every healthy run are shown apart from those that show a problem."""

import pytest

from isthmus.reasons import FINAL, LOSSLESS, PASSING, REJECTED, REMEDIES, Reason, remedy_of
from isthmus_services.output.view import clips, rejections


def test_what_is_lost_by_nobody_is_no_rejection() -> None:
    counts: dict[str, int] = {Reason.DUPLICATE: 8, Reason.SUPERSEDED: 2, Reason.STALE: 1, Reason.MALFORMED: 3}
    assert rejections(counts) == ("malformed 3, stale 1", "duplicate 8, superseded 2")
    assert rejections({"duplicate": 8}) == ("", "duplicate 8")
    assert rejections({}) == ("", "")


def test_what_is_usual_is_said_to_be() -> None:
    assert rejections({"base-merged": 3, "stale": 1})[0] == (
        "base-merged 3 (usual: another update of its learner was merged before it), stale 1"
    )
    assert clips(5, {"steps": 1, "short": 4}) == (
        "5 updates: short 4 (usual while a learning rate falls, and of a learner that has all but converged), steps 1 (an update may have several reasons)"
    )


def test_only_work_that_is_lost_is_rejected_for_good() -> None:
    assert not LOSSLESS & FINAL
    assert LOSSLESS | FINAL | {Reason.BASE_MERGED} == set(Reason)
    assert PASSING < LOSSLESS


@pytest.mark.parametrize("reason", sorted(REMEDIES))
def test_every_reason_for_which_all_updates_are_rejected_has_a_remedy(reason: Reason) -> None:
    assert remedy_of(f"{REJECTED}{reason.value}")

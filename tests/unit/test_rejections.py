"""Rejections that occur in every healthy run are shown apart from those that show a problem."""

import pytest

from isthmus.reasons import HARMLESS, REJECTED, Reason, remedy_of
from isthmus_services.output.view import rejections


def test_what_is_lost_by_nobody_is_no_rejection() -> None:
    counts: dict[str, int] = {Reason.DUPLICATE: 8, Reason.SUPERSEDED: 2, Reason.STALE: 1, Reason.MALFORMED: 3}
    assert rejections(counts) == ("malformed 3, stale 1", "duplicate 8, superseded 2")
    assert rejections({"duplicate": 8}) == ("", "duplicate 8")
    assert rejections({}) == ("", "")


@pytest.mark.parametrize("reason", sorted(set(Reason) - HARMLESS))
def test_every_rejection_by_which_work_is_lost_has_a_remedy(reason: Reason) -> None:
    assert remedy_of(f"{REJECTED}{reason.value}")

"""Rejections that occur in every healthy run are shown apart from those that show a problem."""

from isthmus.reasons import Reason
from isthmus_services.output.view import rejections


def test_what_is_lost_by_nobody_is_no_rejection() -> None:
    counts: dict[str, int] = {Reason.DUPLICATE: 8, Reason.SUPERSEDED: 2, Reason.STALE: 1, Reason.MALFORMED: 3}
    assert rejections(counts) == ("malformed 3, stale 1", "duplicate 8, superseded 2")
    assert rejections({"duplicate": 8}) == ("", "duplicate 8")
    assert rejections({}) == ("", "")

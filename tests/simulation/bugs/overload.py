"""Planted bugs: syncers are asked for more than they can do."""

import math
from collections.abc import Iterator
from unittest.mock import patch

from isthmus.learner.boundary import Boundary
from isthmus.rounds import rounds
from isthmus.rounds.rounds import Rounds
from simulation.bugs.planted import planted


@planted(12, "overload")
def rounds_end_while_their_updates_wait_to_be_read() -> Iterator[None]:
    """Updates that are read after their round has ended are read for nothing."""
    with patch.object(Rounds, "_own_until", lambda self, r: r.own_until):
        yield


@planted(40, "overload", caught_by=39)
def what_was_replaced_is_read_all_the_same() -> Iterator[None]:
    """An update is read although a longer one replaced it while it waited."""
    with patch.object(Rounds, "newest", lambda self, pointer: pointer):
        yield


@planted(12, "overload")
def nobody_heeds_the_period() -> Iterator[None]:
    """Learners send every H steps, and most of what they train meanwhile is overwritten."""
    with patch.object(Boundary, "_within", lambda self, period: self._shortest):
        yield


@planted(24, "overload", caught_by=1)
def a_period_knows_no_bounds() -> Iterator[None]:
    """The longest period that the rules allow is ignored."""
    with patch.object(
        rounds, "next_period", lambda period, lag, least, most: max(period + (3.0 * lag - period) / 4, least)
    ):
        yield


@planted(24, "overload", caught_by=22)
def what_waited_for_room_is_read_as_it_is() -> Iterator[None]:
    """An update that waited for admission is not renewed, so what its learner trained meanwhile is overwritten."""
    with patch.object(rounds, "AFRESH_LEADS", math.inf):
        yield

"""Trouble that keeps a learner's updates from being merged is logged soon, then less and less often, and at its end."""

import logging
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from isthmus.agent.trouble import TroubleLog
from isthmus.format.rules import Pace, Rules
from isthmus.learner.reporter import Reporter
from isthmus.learner.unmerged import Unmerged
from isthmus.reasons import REMEDIES, UNHEARD, Reason

SYNCER = ("no syncer is heard", "start one")
STORE = ("the store does not answer", "see whether it is there")


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO)
    return lambda: [record.getMessage() for record in caplog.records]


def test_trouble_that_passes_is_not_worth_a_word(said: Callable[[], list[str]]) -> None:
    trouble_log = TroubleLog("eu-1", 3.0, "nothing of it is merged")
    for second in range(9):
        trouble_log.look(second, [(second, *SYNCER)])
    trouble_log.look(10, [(0.0, *SYNCER)])
    assert said() == []


def test_it_is_said_soon_then_ever_more_seldom_with_what_to_do(said: Callable[[], list[str]]) -> None:
    trouble_log = TroubleLog("eu-1", 3.0, "nothing of it is merged")
    for second in range(3600):
        trouble_log.look(second, [(second, *SYNCER)])
    found = said()
    assert found[0].startswith("eu-1: no syncer is heard (for 10 s)")
    assert "nothing of it is merged" in found[0]
    assert found[0].endswith("start one")
    assert 4 <= len(found) <= 8


def test_the_end_is_said_once_and_the_next_time_it_is_said_at_once_again(said: Callable[[], list[str]]) -> None:
    trouble_log = TroubleLog("eu-1", 3.0, "nothing of it is merged")
    trouble_log.look(20, [(20.0, *SYNCER)])
    for second in range(21, 30):
        trouble_log.look(second, [(0.0, *SYNCER)])
    assert [line for line in said() if line.endswith("over")] == ["eu-1: no syncer is heard: over"]
    trouble_log.look(100, [(12.0, *SYNCER)])
    assert len(said()) == 3


def test_the_root_cause_comes_first_and_a_new_one_is_said_at_once(said: Callable[[], list[str]]) -> None:
    trouble_log = TroubleLog("eu-1", 3.0, "nothing of it is merged")
    trouble_log.look(20, [(0.0, *STORE), (20.0, *SYNCER)])
    trouble_log.look(21, [(15.0, *STORE), (21.0, *SYNCER)])
    assert ["store" in line for line in said()] == [False, True]


def test_the_end_of_a_trouble_is_said_although_another_one_lasts(said: Callable[[], list[str]]) -> None:
    trouble_log = TroubleLog("eu-1", 3.0, "nothing of it is merged")
    trouble_log.look(20, [(20.0, *STORE), (0.0, *SYNCER)])
    trouble_log.look(21, [(0.0, *STORE), (15.0, *SYNCER)])
    assert said()[1] == "eu-1: the store does not answer: over"
    assert said()[2].startswith("eu-1: no syncer is heard (for 15 s)")
    trouble_log.look(22, [(0.0, *STORE), (0.0, *SYNCER)])
    assert said()[3:] == ["eu-1: no syncer is heard: over"]


def test_a_trouble_that_another_one_hides_is_not_over(said: Callable[[], list[str]]) -> None:
    trouble_log = TroubleLog("eu-1", 3.0, "nothing of it is merged")
    trouble_log.look(20, [(0.0, *STORE), (20.0, *SYNCER)])
    trouble_log.look(21, [(15.0, *STORE)])
    assert [line for line in said() if line.endswith("over")] == []
    trouble_log.look(22, [(0.0, *STORE), (0.0, *SYNCER)])
    assert sorted(line for line in said() if line.endswith("over")) == [
        "eu-1: no syncer is heard: over",
        "eu-1: the store does not answer: over",
    ]


def test_a_slow_pace_is_given_more_time(said: Callable[[], list[str]]) -> None:
    trouble_log = TroubleLog("eu-1", 60.0, "nothing of it is merged")
    trouble_log.look(100, [(100.0, *SYNCER)])
    assert said() == []
    trouble_log.look(121, [(121.0, *SYNCER)])
    assert len(said()) == 1


# --- what becomes of its updates --------------------------------------------------------------------------------------


def dry(**happened: Any) -> Unmerged:
    return Unmerged(at=100.0, step=10, **happened)


@pytest.mark.parametrize(
    ("happened", "what", "remedy"),
    [
        ({"rejected_for": "non-finite"}, "every update is rejected: non-finite", "learning rate"),
        ({"rejected_for": "unreadable", "announced": 3}, "every update is rejected: unreadable", "policies"),
        ({}, "no update was sent", "uplink"),
        ({"announced": 3}, "no update is merged", "isthmus status"),
    ],
)
def test_work_of_four_periods_that_nobody_merged_is_told_with_its_reason(
    happened: dict[str, Any], what: str, remedy: str
) -> None:
    assert dry(**happened).trouble(110.0, 10 + 4 * 8 - 1, 8) is None
    trouble = dry(**happened).trouble(112.0, 10 + 4 * 8, 8)
    assert trouble is not None
    for_s, said, to_do = trouble
    assert (for_s, said) == (12.0, what)
    assert remedy in to_do


def test_every_reason_has_a_remedy_or_speaks_of_one_update_among_several() -> None:
    of_several = {Reason.DUPLICATE, Reason.SUPERSEDED, Reason.BASE_MERGED, Reason.OVERTAKEN}
    assert set(Reason) - REMEDIES.keys() == of_several


UNSIGNED = SimpleNamespace(members=SimpleNamespace(signed=False, current=None, before_a_syncer=""), signer=None)
"""What a reporter asks of the log of a run without signatures."""


def test_a_learner_that_joins_for_long_does_not_say_that_nobody_is_heard() -> None:
    """While its model loads it listens to nobody: that is no silence of the syncers."""
    at = SimpleNamespace(now=0.0)
    runtime = SimpleNamespace(now=lambda: at.now, wall=lambda: at.now)
    found = Reporter.__new__(Reporter)
    vars(found).update(
        _runtime=runtime, _connectivity=SimpleNamespace(bus_is_down=False, troubles=list), syncer_heard_at=0.0,
        _deaf_at=-math.inf, _has_listened=False, _pace=Pace(), _log=UNSIGNED, _members=UNSIGNED.members, _name="a", boundary=None,
        _edge=SimpleNamespace(url="run"), _bus=SimpleNamespace(url="redis://bus"), first_step=0,
        _run=SimpleNamespace(rules=Rules()), downlink=SimpleNamespace(found_at=-math.inf, known=[SimpleNamespace(version=0)]),
        uplink=SimpleNamespace(unmerged=Unmerged(0.0, 0)), _hindered_at=0.0,
        _hindered_step=0, _unheard_at=0.0,
    )  # fmt: skip
    at.now = 95.0
    assert found._troubles() == []
    silences = []
    for at.now, heard_at in ((100.0, 0.0), (101.0, 100.5)):
        found.syncer_heard_at = heard_at
        ((silent_s, what, remedy),) = found._troubles()
        assert what == UNHEARD
        assert remedy.endswith(" (nothing was ever merged in run: is that the address of the run?)")
        silences.append(silent_s)
    assert silences == [5.0, 0.5]
    vars(found)["downlink"].known.append(SimpleNamespace(version=1))
    ((_, _, remedy),) = found._troubles()
    assert "the address of the run" not in remedy


@pytest.mark.parametrize("reason", [Reason.STALE, Reason.NON_FINITE])
def test_what_came_too_late_as_the_store_was_away_is_not_blamed_on_the_uplink(reason: Reason) -> None:
    at, away, period = SimpleNamespace(now=0.0), list[tuple[float, str, str]](), 8
    found = Reporter.__new__(Reporter)
    vars(found).update(
        _runtime=SimpleNamespace(now=lambda: at.now, wall=lambda: at.now),
        _connectivity=SimpleNamespace(bus_is_down=True, troubles=lambda: list(away)), syncer_heard_at=0.0,
        _has_listened=True, _pace=Pace(), _log=UNSIGNED, _members=UNSIGNED.members, _name="a",
        boundary=SimpleNamespace(step=0, longest_period=period), _run=SimpleNamespace(rules=Rules()),
        uplink=SimpleNamespace(unmerged=Unmerged(at=0.0, step=0, announced=9, rejected_for=reason)),
        _hindered_at=-math.inf, _hindered_step=0, _unheard_at=-math.inf,
    )  # fmt: skip

    def told(step: int, *, store: bool) -> list[str]:
        at.now = found.syncer_heard_at = float(step)
        vars(found)["boundary"].step = step
        away[:] = [] if store else [(1.0, "the store does not answer", "")]
        return [what for for_s, what, _ in found._troubles() if for_s > 10.0 and "store" not in what]

    assert told(4 * period, store=True) == [f"every update is rejected: {reason}"]
    told(100, store=False)
    soon = [told(step, store=True) for step in range(100, 100 + 4 * period, 4)]
    if reason == Reason.STALE:
        assert not any(soon), "it was away a moment ago"
    else:
        assert all(soon), "no outage explains it"
    assert told(100 + 4 * period, store=True) == [f"every update is rejected: {reason}"]

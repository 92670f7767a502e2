"""The demo reports the time left over all phases, and no loss before a learner has reported one."""

import math
from types import SimpleNamespace
from typing import cast

import pytest

from isthmus.format.records.messages import Heartbeat
from isthmus.inspect.bus_view import BusView, LearnerView
from isthmus.inspect.live import Live
from isthmus_services.demo import watch as watching
from isthmus_services.demo.left import ALONE, DRAWING, JUDGING, LAST, TRAINING, Left

EXPECTED = {TRAINING: 100.0, LAST: 3.0, JUDGING: 30.0, ALONE: 60.0, DRAWING: 3.0}


class Clock:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_at_the_start_it_is_what_was_expected_of_all_phases(clock: Clock) -> None:
    left = Left(EXPECTED, clock)
    assert left.seconds is None
    left.enter(TRAINING)
    assert left.seconds == pytest.approx(196.0)
    clock.now = 20.0
    assert left.seconds == pytest.approx(176.0)


def test_a_phase_under_way_is_judged_by_its_own_speed(clock: Clock) -> None:
    left = Left(EXPECTED, clock)
    left.enter(TRAINING)
    clock.now = 10.0
    left.at(0.001)  # speed is measured from here on: processes take a while to start
    clock.now = 60.0
    left.at(0.251)
    assert left.seconds == pytest.approx(149.8 + 96.0)


def test_when_training_ends_what_comes_after_it_is_still_to_come(clock: Clock) -> None:
    left = Left(EXPECTED, clock)
    left.enter(TRAINING)
    for now, share in ((5.0, 0.01), (50.0, 0.5), (95.0, 1.0)):
        clock.now = now
        left.at(share)
    assert left.seconds == pytest.approx(96.0), "the last rounds, judging, the baseline and the picture"
    left.enter(ALONE)
    assert left.seconds == pytest.approx(63.0)
    clock.now += 500.0
    assert left.seconds == pytest.approx(3.0), "the phase is late, but the later phases still count"


def learner(name: str, step: int, loss: float) -> LearnerView:
    heartbeat = SimpleNamespace(loss=loss, step=step)
    return LearnerView(name, step=step, heartbeat=cast(Heartbeat, heartbeat))


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_lines_into_a_pipe(clock: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "LINES_EVERY_S", 0.0)
    hearing = BusView(bytes(32))
    run = cast(Live, SimpleNamespace(hearing=hearing, commits={}))
    watch = watching.Watch("r", 2, 100, run, Left(EXPECTED, clock))
    watch.enter(TRAINING)
    watch.show(0)
    said = lines(capsys)
    assert all("nan" not in line and "train loss" not in line for line in said)
    assert "about 196 s left" in said[-1]
    hearing.learners = {"a": learner("a", 10, 2.5), "b": learner("b", 0, math.nan)}
    watch.show(3)
    assert "steps 10 0 of 100  train loss 2.500  commits 0" in lines(capsys)[-1]
    watch.enter(JUDGING)
    watch.done(0.5)
    last = lines(capsys)[-1]
    assert "judging the run 50%" in last
    assert "train loss" not in last
    assert "steps" not in last
    assert "left" in last

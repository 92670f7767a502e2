"""A service logs a line each minute that says what its metrics gained, in words and as fields."""

import logging
import signal
from types import SimpleNamespace
from typing import cast

import pytest

from isthmus.link import Link
from isthmus.runtime.metrics import LearnerMetrics, SyncerMetrics
from isthmus_services.process.minutes import Diary, LearnerMinute, SyncerMinute


def test_a_syncers_minute_is_what_the_minute_brought() -> None:
    m = SyncerMetrics()
    m.rounds_closed.labels("all").inc(7)  # before the first minute
    minute = SyncerMinute("s1", m)
    assert minute.say()[0] == "s1: 0 commits, 0 learners here, rejected nothing, 0.0 MB up, 0.0 MB down"
    m.rounds_closed.labels("all").inc(9)
    m.rounds_closed.labels("grace").inc(3)
    m.rejections.labels("stale").inc(2)
    m.updates_missed.inc(4)
    m.races_lost.inc()
    m.learners.set(4)
    m.store_bytes.labels("up").inc(1_500_000)
    m.store_bytes.labels("down").inc(2_400_000)
    line, facts = minute.say()
    assert line == (
        "s1: 12 commits (closed by all 9, grace 3), 4 learners here, rejected stale 2, 4 missed their round, "
        "1 races lost, 1.5 MB up, 2.4 MB down"
    )
    assert (facts["commits"], facts["rejections"]) == (12, {"stale": 2.0})
    assert (facts["races_lost"], facts["store_bytes_up"], facts["store_bytes_down"]) == (1.0, 1_500_000, 2_400_000)
    assert minute.say()[0].startswith("s1: 0 commits, 4 learners here, rejected nothing")


@pytest.fixture
def link() -> SimpleNamespace:
    """Return the parts of a link that a minute's line reads."""
    return SimpleNamespace(metrics=LearnerMetrics(), steps_done=0, versions=[0, 0])


def test_a_learners_minute(link: SimpleNamespace) -> None:
    clock = SimpleNamespace(now=100.0)
    minute = LearnerMinute("eu-1", 1500, cast(Link, link), lambda: clock.now)
    clock.now = 160.0
    assert minute.say()[0] == (
        "eu-1: step 0 of 1500 (0 since the last line), 0 tokens/s, versions 0 to 0, nothing merged yet"
    ), "a loss that is not known yet is left out"
    m = link.metrics
    m.steps.inc(600)
    m.tokens.inc(600 * 256)
    m.loss.set(2.3456)
    m.ledger.labels("merged").set(90)
    m.ledger.labels("pending").set(10)
    link.steps_done, link.versions = 600, [31, 33, 32]
    clock.now = 220.0
    line, facts = minute.say()
    assert line == (
        "eu-1: step 600 of 1500 (600 since the last line), loss 2.346, 2,560 tokens/s, versions 31 to 33, merged 90%"
    )
    assert facts["tokens_s"] == pytest.approx(2560.0)
    assert facts["loss"] == pytest.approx(2.3456)


def test_a_diary_says_minutes_and_signals_and_ends(link: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        diary = Diary(logging.getLogger("isthmus.test"), "eu-1", every_s=0.05)
        diary.joined(1500, cast(Link, link))
        diary.asked(signal.SIGTERM)
        while not any("step 0 of 1500" in message for message in caplog.messages):
            diary._thread.join(0.01)
        diary.close()
    assert not diary._thread.is_alive()
    (asked,) = [r for r in caplog.records if getattr(r, "signal", "") == "SIGTERM"]
    assert asked.message == (
        "eu-1 was asked to stop by SIGTERM: it finishes its step, completes its uploads and leaves"
    )

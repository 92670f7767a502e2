"""Training metrics reach a sink in order, off the training thread, and never disturb the training."""

import math
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from isthmus.sinks import Feeder, TensorBoard


class Kept:
    def __init__(self, fails_at: int = -1) -> None:
        self.taken: list[tuple[int, dict[str, float]]] = []
        self.flushed = 0
        self.closed = False
        self.fails_at = fails_at

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        if step == self.fails_at:
            raise RuntimeError("disk full")
        self.taken.append((step, dict(values)))

    def flush(self) -> None:
        self.flushed += 1

    def close(self) -> None:
        self.closed = True


def test_what_is_noted_arrives_in_order_and_the_sink_is_closed() -> None:
    sink = Kept()
    feeder = Feeder(sink, lambda: None)
    for step in range(5):
        feeder.note(step, {"train/loss": float(step)})
    feeder.close()
    assert sink.taken == [(step, {"train/loss": float(step)}) for step in range(5)]
    assert sink.closed


def test_what_else_there_is_comes_along() -> None:
    sink = Kept()
    Feeder(sink, lambda: (7, {"ledger/merged": 0.5})).close()
    assert sink.taken[-1] == (7, {"ledger/merged": 0.5})


def test_a_sink_that_fails_is_left_out_and_said_to_be(caplog: pytest.LogCaptureFixture) -> None:
    sink = Kept(fails_at=1)
    feeder = Feeder(sink, lambda: None)
    for step in range(3):
        feeder.note(step, {})
    feeder.close()
    assert [step for step, _ in sink.taken] == [0]
    assert "RuntimeError: disk full" in caplog.text
    feeder.note(4, {})
    assert len(feeder._waiting) == 0, "no metrics pile up for a sink that failed"


def test_a_slow_sink_keeps_the_newest_and_is_called_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus.sinks.WAITING_MAX", 100)
    calling, go_on = set(), threading.Event()

    class Slow(Kept):
        def scalars(self, step: int, values: Mapping[str, float]) -> None:
            calling.add(threading.current_thread())
            go_on.wait(10)
            super().scalars(step, values)

    sink = Slow()
    feeder = Feeder(sink, lambda: None)
    for step in range(300):
        feeder.note(step, {})
    go_on.set()
    feeder.close()
    assert len(sink.taken) <= 101
    assert sink.taken[-1][0] == 299
    assert len(calling) == 1
    assert sink.closed


def test_a_sink_that_hangs_keeps_nobody_from_ending(tmp_path: Path) -> None:
    """Neither the end of a link nor the end of the process waits for it."""
    (tmp_path / "hangs.py").write_text(
        "import threading, isthmus.sinks as sinks\n"
        "sinks.CLOSE_S = 0.2\n"
        "class Hangs:\n"
        "    def scalars(self, step, values): threading.Event().wait()\n"
        "    def flush(self): pass\n"
        "    def close(self): pass\n"
        "feeder = sinks.Feeder(Hangs(), lambda: None)\n"
        "feeder.note(1, {})\n"
        "feeder.close()\n"
        "print('ended')\n"
    )
    done = subprocess.run(
        [sys.executable, tmp_path / "hangs.py"], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    sink = TensorBoard(str(tmp_path))
    sink.scalars(1, {"train/loss": 2.0})
    sink.scalars(2, {"train/loss": math.pi})
    sink.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, round(e.value, 5)) for e in events.Scalars("train/loss")] == [(1, 2.0), (2, 3.14159)]

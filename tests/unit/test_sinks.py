"""Training metrics to a sink: in order, off the training thread, and never in a training's way."""

import asyncio
import math

from isthmus.runtime import single_threaded
from isthmus.sinks import WAITING_MAX, Feeder, TensorBoard
from tests_helpers import until


class Kept:
    def __init__(self, fails_at: int = -1) -> None:
        self.taken: list[tuple[int, dict[str, float]]] = []
        self.flushed = 0
        self.closed = False
        self.fails_at = fails_at

    def scalars(self, step, values):
        if step == self.fails_at:
            raise RuntimeError("disk full")
        self.taken.append((step, dict(values)))

    def flush(self):
        self.flushed += 1

    def close(self):
        self.closed = True


def test_what_is_noted_arrives_in_order_and_the_sink_is_closed():
    sink = Kept()
    feeder = Feeder(sink, single_threaded(), lambda: None)
    for step in range(5):
        feeder.note(step, {"train/loss": float(step)})
    asyncio.run(feeder.close())
    assert sink.taken == [(step, {"train/loss": float(step)}) for step in range(5)]
    assert sink.closed


def test_what_else_there_is_comes_along(monkeypatch):
    monkeypatch.setattr("isthmus.sinks.EVERY_S", 0.01)
    sink = Kept()
    feeder = Feeder(sink, single_threaded(), lambda: (7, {"ledger/merged": 0.5}))

    async def body():
        task = asyncio.ensure_future(feeder.run())
        await until(lambda: sink.flushed > 0, "a flush")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(body())
    assert sink.taken[0] == (7, {"ledger/merged": 0.5})


def test_a_sink_that_fails_is_left_out_and_said_to_be(caplog):
    sink = Kept(fails_at=1)
    feeder = Feeder(sink, single_threaded(), lambda: None)
    for step in range(3):
        feeder.note(step, {})
    asyncio.run(feeder.close())
    assert [step for step, _ in sink.taken] == [0]
    assert "RuntimeError: disk full" in caplog.text
    feeder.note(4, {})
    asyncio.run(feeder.close())
    assert len(sink.taken) == 1


def test_a_slow_sink_keeps_the_newest():
    sink = Kept()
    feeder = Feeder(sink, single_threaded(), lambda: None)
    for step in range(WAITING_MAX + 10):
        feeder.note(step, {})
    asyncio.run(feeder.close())
    assert len(sink.taken) == WAITING_MAX
    assert sink.taken[-1][0] == WAITING_MAX + 9


def test_tensorboard_reads_what_was_written(tmp_path):
    sink = TensorBoard(str(tmp_path))
    sink.scalars(1, {"train/loss": 2.0})
    sink.scalars(2, {"train/loss": math.pi})
    sink.close()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(e.step, round(e.value, 5)) for e in events.Scalars("train/loss")] == [(1, 2.0), (2, 3.14159)]

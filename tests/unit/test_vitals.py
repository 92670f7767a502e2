"""How long store and bus have been silent, as an agent's metrics and /healthz say it."""

from types import SimpleNamespace
from typing import Any

import pytest

from isthmus.agent.health import STOOD_S, Vitals
from isthmus.runtime.metrics import SyncerMetrics


@pytest.mark.parametrize(
    ("bus_url", "store_at", "bus_at", "store_s", "bus_s"),
    [
        ("redis://h", 0.0, 0.0, 100.0, 100.0),
        ("store:", 0.0, 0.0, 100.0, 0.0),
        ("store:", 90.0, 0.0, 10.0, 90.0),  # the store answers, but for what is in the bus
        ("store:", 90.0, 99.0, 10.0, 0.0),
    ],
)
def test_an_outage_of_a_store_that_has_the_bus_is_one_silence(
    bus_url: str, store_at: float, bus_at: float, store_s: float, bus_s: float
) -> None:
    now = 0.0
    runtime: Any = SimpleNamespace(now=lambda: now)
    store: Any = SimpleNamespace(outage=SimpleNamespace(answered_at=store_at))
    listener: Any = SimpleNamespace(answered_at=bus_at)
    speaker: Any = SimpleNamespace(down_since=None)
    metrics = SyncerMetrics()
    vitals = Vitals(runtime, store, listener, speaker, metrics, bus_url)
    now = 100.0
    pulse = vitals.pulse()
    assert (pulse.store_s, pulse.bus_s) == (store_s, bus_s)
    gauges = {sample.name: sample.value for family in metrics.registry.collect() for sample in family.samples}
    assert gauges["isthmus_store_silence_seconds"] == store_s
    assert gauges["isthmus_bus_silence_seconds"] == bus_s


def test_standing_still_is_told_once_and_before_the_next_tick() -> None:
    """When a process goes on, the task that ticks may be the last to run."""
    now, told = 0.0, list[float]()
    runtime: Any = SimpleNamespace(now=lambda: now)
    some: Any = SimpleNamespace(outage=SimpleNamespace(answered_at=0.0), answered_at=0.0, down_since=None)
    vitals = Vitals(runtime, some, some, some, SyncerMetrics(), stood=told.append)
    now = STOOD_S
    vitals.look()
    assert told == []
    now = 30.0
    vitals.look()
    assert told == [pytest.approx(30.0, abs=0.2)]
    vitals.look()
    vitals.look(ticked=True)
    assert len(told) == 1
    assert vitals.lag_s_max == told[0]

"""Loss curves out of the log: what is kept, when a loss rises, and how a curve is drawn."""

import math
from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest
from rich.console import Console

from isthmus.format.records.fields import LOSS_MAX
from isthmus.inspect import losses
from isthmus.inspect.losses import LossCurves, Point, not_fallen, rise, sampled
from isthmus.log import Commit, Log
from isthmus_services.output import curves
from support.commits import RecordedLog, committed, digest_of, given


def points(values: Sequence[float], every_s: float = 60.0) -> list[Point]:
    return [Point(every_s * k, float(value)) for k, value in enumerate(values)]


def falling(start: float, end: float, scatter: float, count: int = 60, seed: int = 0) -> list[float]:
    draw = np.random.default_rng(seed)
    return [end + (start - end) * math.exp(-k / 8) + scatter * draw.normal() for k in range(count)]


def commit(version: int, p: int = 0, **loss: float | None) -> Commit:
    header = committed(version, *(given(name, version - 1, version, loss=value) for name, value in loss.items()), p=p)
    return Commit(header, digest_of(f"{p}/{version}"))


@pytest.mark.parametrize(
    ("start", "end", "scatter"), [(10.4, 2.5, 0.1), (1e-2, 1e-5, 1e-6), (3.0, -7.0, 0.5), (2.5, 2.4, 0.05)]
)
def test_a_loss_that_falls_or_stays_does_not_rise(start: float, end: float, scatter: float) -> None:
    for seed in range(200):
        assert rise(points(falling(start, end, scatter, seed=seed))) is None
        assert rise(points(falling(end, end, scatter, seed=seed))) is None


@pytest.mark.parametrize(
    ("start", "end", "scatter"), [(10.4, 2.5, 0.1), (1e-2, 1e-5, 1e-6), (3.0, -7.0, 0.1), (2.5, 2.2, 0.005)]
)
def test_a_loss_that_comes_back_by_a_third_rises(start: float, end: float, scatter: float) -> None:
    for seed in range(50):
        again = [end + (start - end) / 3 + scatter * k for k in (1, -1, 0, 1, 0, -1, 0, 1, -1, 1, 0, 1, 0, 1)]
        fell = falling(start, end, scatter, seed=seed)
        risen = rise(points([*fell, *again]))
        assert risen is not None
        assert risen[0] == pytest.approx(end, abs=abs(start - end) / 50)
        assert min(again) <= risen[1] <= max(again)
        # A spike is over once the newest points are low again.
        assert rise(points([*fell, *again[:8], end, end, end])) is None


def test_updates_of_the_same_steps_are_no_proof() -> None:
    """All fragments of a learner state the same steps, so their points lie together and scatter little."""
    draw = np.random.default_rng(0)
    for _ in range(300):
        curve = []
        for moment in range(40):
            loss = 1.0 + 3.0 * math.exp(-moment / 10) + 0.2 * draw.normal()
            curve += [Point(moment + 0.01 * p, loss + 0.01 * draw.normal()) for p in range(12)]
        assert rise(curve) is None


def test_a_rise_of_less_than_a_fiftieth_is_none() -> None:
    fell = falling(2.5, 2.4, 0.0)
    assert rise(points([*fell, *[2.44] * 14])) is None
    assert rise(points([*fell, *[2.46] * 14])) is not None


def test_a_small_rise_in_the_first_minutes_is_none() -> None:
    """Seen a minute into a run whose loss then fell on."""
    fell = falling(0.55, 0.4715, 0.0)
    assert rise(points([*fell, *[0.4896] * 14], every_s=1.0)) is None
    assert rise(points([*fell, *[0.4896] * 14], every_s=10.0)) is not None
    assert rise(points([*fell, *[0.6] * 14], every_s=1.0)) is not None, "a large one is said at once"


def test_an_explosion_rises_and_a_young_run_says_nothing() -> None:
    assert rise(points([3.0] * 12 + [1e9 * k for k in range(10, 18)])) is not None
    assert rise(points([3.0] * 7 + [1e9] * 4)) is None
    assert rise([]) is None


def test_curves_are_in_order_of_time_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "POINTS_MAX", 16)
    found = LossCurves()
    found.take([commit(version, a=float(version), b=None) for version in (3, 1, 2)])
    assert [(name, [p.loss for p in kept]) for name, kept in found.points().items()] == [("a", [1.0, 2.0, 3.0])]
    found.take(commit(version, a=float(version)) for version in range(4, 200))
    kept = [p.loss for p in found.points()["a"]]
    assert kept == sorted(kept)
    assert (kept[0], kept[-8:]) == (1.0, [float(v) for v in range(192, 200)])
    assert 8 < len(kept) <= 16


async def test_a_sample_spans_the_log_and_has_all_newest() -> None:
    headers = [commit(version, a=float(version)).header for version in range(1, 401)]
    log = RecordedLog(headers)
    other = commit(7, 1, b=0.5)
    newest = [c for version in (400, 398, 399) if (c := await log.commit(0, version)) is not None]
    found = (await sampled(cast(Log, log), [*newest, other])).points()
    versions = [p.loss for p in found["a"]]
    assert (versions[0], versions[-3:]) == (1.0, [398.0, 399.0, 400.0])
    assert max(np.diff(versions)) <= 400 / losses.SAMPLES + 1
    assert len(versions) == losses.SAMPLES + 3
    assert [p.loss for p in found["b"]] == [0.5]
    assert (await sampled(cast(Log, log), [])).points() == {}
    assert [p.loss for p in (await sampled(cast(Log, log), [commit(1, a=1.0)])).points()["a"]] == [1.0]


def test_a_curve_is_drawn_from_its_lowest_mean_to_its_highest() -> None:
    assert curves.curve(points(range(16), 1.0), 0.0, 16.0) == "▁▁▂▂▃▃▄▄▅▅▆▆▇▇██"
    assert curves.curve(points([5.0, 5.0], 1.0), 0.0, 16.0) == "▁▁" + 14 * " "
    assert curves.curve([Point(3.0, 2.0)], 3.0, 3.0) == "▁" + 15 * " "


def test_the_largest_losses_that_can_be_stated_are_drawn_and_judged() -> None:
    """Any learner can state them, so they must not stop who looks."""
    wild = [Point(float(k), LOSS_MAX * (1 if k % 2 else -1)) for k in range(64)]
    assert rise(wild) is None
    assert curves.curve(wild, 0.0, 64.0).strip()
    assert curves.curve([*wild[:1], Point(1.0, 0.0)], 0.0, 16.0)[0] == "▁"


def test_the_table_says_where_each_loss_began_and_ended() -> None:
    console = Console(width=100, record=True)
    rising = points([*falling(4.0, 1.0, 0.0), *[2.5] * 14])
    console.print(curves.losses({"a": points(falling(4.0, 1.0, 0.0)), "b": rising}, 100))
    a, b = [line for line in console.export_text().splitlines() if line.startswith(("│ a", "│ b"))]
    assert a.split()[3::2][:3] == ["4.000", "1.002", "1.002"]
    assert b.split()[3::2][:3] == ["4.000", "1.002", "2.500"]
    assert ("rises" in a, "rises" in b) == (False, True)


def test_a_run_that_diverged_at_once_rises_however_much_its_loss_falls_again() -> None:
    first, fell = [Point(float(k), 4.5) for k in range(3)], [Point(3.0 + k, 4000.0 - 10.0 * k) for k in range(300)]
    low, now = rise([*first, *fell]) or (0.0, 0.0)
    assert low == 4.5
    assert now == pytest.approx(1020.0, rel=0.1)
    assert rise([Point(float(k), 4.5 - 0.01 * k) for k in range(300)]) is None


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([2.0] * 32, (2.0, 2.0)),
        ([3.0, 2.5, 2.0, 2.5, *[2.1] * 28], (2.0, 2.1)),  # below none of the first ones
        ([2.0] * 28 + [1.7] * 4, (2.0, 1.7)),
        ([2.0] * 28 + [1.5] * 4, None),
        ([2.0] * 28 + [1.5, 2.0, 2.0, 2.0], None),  # it scatters
        ([2.0] * 11, None),
        ([2.0] * 12, (2.0, 2.0)),
    ],
)
def test_a_loss_that_stays_near_its_first_has_not_fallen(
    values: list[float], expected: tuple[float, float] | None
) -> None:
    assert not_fallen(points(values)) == expected

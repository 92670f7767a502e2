"""`isthmus simulate goodput --check` says so, and fails, if its prediction is off by more than its stated error."""

import contextlib
import json
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from isthmus_lab.commands.simulate import goodput as command
from isthmus_lab.forecast import recorded
from isthmus_lab.forecast.recorded import Observed, Outages, _uptime, check, since_latest
from isthmus_services.main import main

SPAN_S = 1000.0


def observed(away: Sequence[Sequence[tuple[float, float]]]) -> Observed:
    """Return the figures of learners that were away for these times, and lost nothing else."""
    alive = []
    for of in away:
        edges = [0.0, *(t for span in of for t in span), SPAN_S]
        alive.append([(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True)])
    gone = sum(b - a for of in away for a, b in of)
    failures = sum(map(len, away))
    total = SPAN_S * len(away)
    return Observed(
        learners=len(away),
        span_s=SPAN_S,
        step_s=0.1,
        failures=failures,
        mtbf_s=(total - gone) / failures,
        recovery_s=gone / failures,
        checkpoint_s=0.1,
        update_s=0.1,
        steps=round((total - gone) / 0.1),
        again=0.0,
        goodput=1.0 - gone / total,
        uptime=_uptime([span for of in alive for span in of]),
        outages=tuple(Outages(began=0.0, ended=SPAN_S, away_s=tuple(b - a for a, b in of)) for of in away),
    )


def at_random(draw: random.Random) -> list[tuple[float, float]]:
    found, at = [], draw.expovariate(1 / 60.0)
    while at < SPAN_S - 100.0:
        back = at + draw.uniform(10.0, 60.0)
        found.append((at, back))
        at = back + draw.expovariate(1 / 60.0)
    return found


def test_learners_that_fail_independently_are_within_what_chance_explains() -> None:
    """The old figure was the mean over endless runs: a short run was points away from it by chance, without a word."""
    by_formula, off = 0, 0
    for seed in range(30):
        draw = random.Random(seed)
        found = check(observed([at_random(draw), at_random(draw)]))
        seen = found.observed
        away = seen.recovery_s / (seen.recovery_s + seen.mtbf_s)
        by_formula += abs(1.0 - away**2 - seen.uptime) > 0.03
        off += bool(found.off)
        assert found.uptime_range[0] <= found.predicted.uptime <= found.uptime_range[1]
    assert by_formula >= 8
    assert off <= 1


def test_learners_that_are_away_together_or_in_turn_are_called_so() -> None:
    together = check(observed([[(100.0 * n, 100.0 * n + 40.0) for n in range(1, 9)]] * 2))
    assert together.observed.uptime == pytest.approx(0.68)
    assert together.uptime_error > 0.1
    (said,) = together.off
    assert "uptime is off by +" in said
    assert "away together more often" in said
    in_turn = check(observed([[(100.0 * n + k, 100.0 * n + k + 40.0) for n in range(1, 9)] for k in (0.0, 45.0)]))
    assert in_turn.observed.uptime == 1.0
    (said,) = in_turn.off
    assert "together less often, or in turn" in said


def test_a_learner_that_ends_early_does_not_count_for_the_rest_of_the_run() -> None:
    """Four learners are away for a third of their time, but three of them end at a tenth of the run."""
    draw = random.Random(3)
    seen = observed([at_random(draw) for _ in range(4)])
    short = [replace(of, ended=100.0, away_s=(33.0,)) for of in seen.outages[1:]]
    found = check(replace(seen, outages=(seen.outages[0], *short)))
    alone = 1.0 - sum(seen.outages[0].away_s) / SPAN_S
    assert alone <= found.predicted.uptime < alone + 0.06


@pytest.mark.parametrize(
    ("more", "said"), [(-0.2, "learners lost something else"), (0.1, "soon after updates or checkpoints")]
)
def test_a_goodput_that_is_off_is_said(more: float, said: str) -> None:
    draw = random.Random(5)
    seen = observed([at_random(draw), at_random(draw)])
    assert not check(seen).off
    found = check(replace(seen, goodput=seen.goodput + more))
    assert any("goodput is off by" in line and said in line for line in found.off)


@pytest.mark.parametrize("together", [True, False])
def test_the_command_warns_and_fails(
    together: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    draw = random.Random(1)
    seen = observed([at_random(draw)] * 2 if together else [at_random(draw), at_random(draw)])

    @contextlib.asynccontextmanager
    async def opened(*_: object, **__: object) -> AsyncIterator[None]:
        yield None

    async def observe(_: object) -> Observed:
        return seen

    monkeypatch.setattr(command, "open_log", opened)
    monkeypatch.setattr(recorded, "observe", observe)
    file = tmp_path / "r.json"
    assert main(["simulate", "goodput", "--check", "RUN", "--json", str(file)]) == int(together)
    shown = " ".join(capsys.readouterr().out.split())
    assert "points of goodput (stated error: 6)" in shown
    assert ("warning: uptime is off by +" in shown) == together
    assert bool(json.loads(file.read_text())["off"]) == together


@pytest.mark.parametrize(("a_s", "b_s"), [(3.0, 10.0), (10.0, 3.0), (4.0, 4.0), (0.0, 6.0), (6.0, 0.0)])
def test_what_a_failure_takes_back_is_what_came_after_the_later_of_update_and_checkpoint(
    a_s: float, b_s: float
) -> None:
    draw = random.Random(7)
    known = [period for period in (a_s, b_s) if period]
    seen = sum(min(draw.uniform(0.0, period) for period in known) for _ in range(40_000)) / 40_000
    assert since_latest(a_s, b_s) == pytest.approx(seen, rel=0.02)
    assert since_latest(0.0, 0.0) == 0.0

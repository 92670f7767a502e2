"""A learner that is interrupted anywhere and restarted ends with the same bits as a loop that was never interrupted."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from support.restarts import (
    ENDS,
    IMPOSSIBLE,
    MODELS,
    OPTIMIZERS,
    STEPS,
    Life,
    Trace,
    differences,
    live,
    restarted,
    uninterrupted,
)

pytestmark = pytest.mark.usefixtures("uncompiled")


@cache
def wanted(model: str, optimizer: str) -> Life:
    return uninterrupted(model, optimizer)


def cases() -> list[Any]:
    """Return each pair of model and optimizer with one way to end, and each way to end with three pairs.

    Only a few of them run in the quick tier.
    """
    quick = {("normed", "adamw"), ("teacher", "fused"), ("convolutions", "foreach"), ("experts", "momentum")}
    found: list[Any] = []
    pairs = [(m, o) for m in MODELS for o in OPTIMIZERS if (m, o) not in IMPOSSIBLE]
    for n, (model, optimizer) in enumerate(pairs):
        tier = [] if (model, optimizer) in quick else [pytest.mark.tier("test" if n % 5 == 0 else "all")]
        found.append(pytest.param(model, optimizer, ENDS[n % len(ENDS)], 2 + n % 2, marks=tier))
    for n, end in enumerate(ENDS):
        for model, optimizer in (("normed", "adamw"), ("teacher", "schedule-free"), ("experts", "lbfgs")):
            tier = [] if (model, n % 3) == ("normed", 0) else [pytest.mark.tier("test" if model == "normed" else "all")]
            found.append(pytest.param(model, optimizer, end, 3, marks=tier))
    return found


@pytest.mark.parametrize(("model", "optimizer", "end", "lives"), cases())
def test_a_restart_is_not_seen(model: str, optimizer: str, end: str, lives: int, tmp_path: Path) -> None:
    found = restarted(tmp_path / "run", model, optimizer, end, lives)
    assert differences(found, wanted(model, optimizer)) == []


EVERY = 16
"""The quick tiers raise an error at every sixteenth line of a step. `make test-all` tries every line."""


def lines(model: str, optimizer: str, folder: Path) -> int:
    counting = Trace(0)
    live(folder, model, optimizer, 4, "line", counting)
    assert counting.lines > 100
    return counting.lines


@pytest.mark.parametrize(
    "first",
    [pytest.param(n, marks=[] if n == 0 else pytest.mark.tier("all")) for n in range(EVERY)],
)
def test_an_error_at_any_line_of_a_step_leaves_a_boundary(first: int, tmp_path: Path) -> None:
    model, optimizer = "experts", "adamw"
    for at in range(1 + first, lines(model, optimizer, tmp_path / "counted") + 1, EVERY):
        folder = tmp_path / str(at)
        cut = live(folder, model, optimizer, 4, "line", Trace(at))
        last = live(folder, model, optimizer, STEPS, "return")
        last.batches = cut.batches[: last.first] + last.batches
        assert differences(last, wanted(model, optimizer)) == [], f"cut at line {at}, restarted at step {last.first}"
        assert last.first in (2, 3, 4)

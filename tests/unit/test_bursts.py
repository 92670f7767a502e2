"""Which learners are said to have exploded: those whose updates leapt by themselves, and none that was only cut."""

import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import pytest
from msgspec.structs import replace

from isthmus.format.records.objects import CommitHeader, Input
from isthmus.format.rules import Bounds, Rules
from isthmus.inspect.bursts import Bursts
from isthmus.reasons import Reason
from isthmus.rounds.bounds import Claim, Influence
from support.commits import committed, given, rejected

WARMUP, STEPS = 24, 6
"""Steps in which a learner's rate rises, and steps between two updates."""

Learners = Mapping[str, Callable[[int], tuple[int, float]]]
"""By learner: the steps of its update for a version, and by how much they are longer than usual; 0 steps: no update."""


def run_of(learners: Learners, versions: int = 60) -> list[CommitHeader]:
    """Return the commits of a run, in which updates have half of their length from noise, cut by the run's bounds."""
    influence, trained, commits = Influence(Bounds(), Rules()), dict.fromkeys(learners, 0), list[CommitHeader]()
    for version in range(1, versions + 1):
        inputs, claims = list[Input](), list[Claim]()
        for name, says in learners.items():
            steps, longer = says(version)
            if not steps:
                continue
            rates = [min(1.0, (trained[name] + n + 1) / WARMUP) for n in range(steps)]
            trained[name] += steps
            norm = longer * (sum(rates) + math.sqrt(sum(rate * rate for rate in rates)))
            claims.append(Claim(name, steps, 100 * steps, norm, believed=steps))
            judged = influence.judge(claims[-1], () if influence.known else claims)
            inputs.append(
                given(
                    name, version - 1, version, steps=steps, tokens=100 * steps, norm=norm, scale=judged.scale,
                    weight=judged.weight, step=trained[name],
                )
            )  # fmt: skip
        commits.append(committed(version, *inputs))
        influence.note(version, inputs, influence.after(inputs))
    return commits


def said(commits: Iterable[CommitHeader]) -> list[str]:
    bursts = Bursts()
    for header in commits:
        bursts.take(header)
    return [burst.said for burst in bursts.found()]


def steady(_: int) -> tuple[int, float]:
    return STEPS, 1.0


HEALTHY: dict[str, Learners] = {
    "all from the start": {"a": steady, "b": steady, "c": steady},
    "a late joiner with long rounds": {"a": steady, "b": steady, "late": lambda v: (0 if v < 4 else 27, 1.0)},
    "a late joiner beside one that goes on alone": {
        "a": lambda v: (STEPS if v < 4 else 0, 1.0), "late": lambda v: (0 if v < 5 else 60, 1.0),
    },
    "a learner with long rounds": {"a": steady, "b": steady, "slow": lambda v: (0 if v % 8 else 8 * STEPS, 1.0)},
    "a restarted learner that trained alone": {"a": steady, "b": lambda v: (0 if 20 < v < 40 else 120 if v == 40 else 6, 1.0)},
    "short rounds at first": {"a": lambda v: (1 if v < 8 else 40, 1.0), "b": lambda v: (1 if v < 9 else 40, 1.0)},
}  # fmt: skip


@pytest.mark.parametrize("what", HEALTHY)
def test_a_healthy_run_has_no_learner_that_exploded(what: str) -> None:
    commits = run_of(HEALTHY[what])
    assert said(commits) == []


def test_a_healthy_update_may_be_cut_as_one_that_exploded() -> None:
    """Else the test above would pass whatever is said of cut updates."""
    cut = [i.scale for name in HEALTHY for header in run_of(HEALTHY[name])[3:] for i in header.inputs if i.scale < 0.1]
    assert cut


@pytest.mark.parametrize("steps", [STEPS, 1, 27])
def test_a_learner_whose_updates_leapt_and_came_back_exploded(steps: int) -> None:
    learners: Learners = {"a": steady, "b": steady, "c": lambda v: (steps, 300.0) if v == 30 else steady(v)}
    [line] = said(run_of(learners))
    assert line.startswith("c exploded for a moment, and trains as before: an update was cut to ")


def losses(values: Iterable[float]) -> list[str]:
    commits = [committed(v, replace(given("a", v - 1, v), loss=loss)) for v, loss in enumerate(values, 1)]
    return said(commits)


def test_a_loss_leaps_if_it_was_never_so_high_of_late_and_is_low_again() -> None:
    low = [1.0] * 40
    [line] = losses([*low, 9.0, *low])
    assert line == "the loss of a leapt for a moment: 9 in an update, 1 at most before, 1 in the newest updates"
    for high in (5.0, 3.0):
        assert losses([*low, 9.0, *([high] * 8)]) == [], "it is not low again"
    draw = np.random.default_rng(0)
    scattered = np.exp(draw.normal(scale=0.5, size=2000)) * 0.005
    often = [n for n in range(72, 1990) if scattered[n] > 2.0 * scattered[n - 8 : n].max()]
    assert len(often) > 10, "beside the eight before, it leaps again and again"
    assert losses([*scattered, *(0.005,) * 8]) == []


def test_a_learner_that_is_still_cut_does_not_train_as_before() -> None:
    commits = run_of({"a": steady, "b": lambda v: (STEPS, 300.0 if v == 30 else 1.0)})
    assert said(commits)
    last = commits[-1]
    cut = [replace(given, scale=0.3) if given.learner == "b" else given for given in last.inputs]
    assert said([*commits[:-1], replace(last, inputs=tuple(cut))]) == []


def test_a_rejected_update_exploded_unless_it_may_have_been_long() -> None:
    commits = run_of({"a": steady, "b": lambda v: (0 if v == 30 else STEPS, 1.0)})
    turned = rejected("b", 29, Reason.TOO_LONG, 30)
    commits[29] = committed(30, *commits[29].inputs, rejected=(turned,))
    assert said(commits) == ["b exploded for a moment, and trains as before: an update was rejected (too-long)"]
    alone = run_of({"a": steady, "b": lambda v: (0 if v == 30 else 120 if v == 31 else STEPS, 1.0)})
    alone[29] = committed(30, *alone[29].inputs, rejected=(turned,))
    assert said(alone) == [], "it had trained alone for long, and its next update was so long, too"

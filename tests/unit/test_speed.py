"""A machine that merges too slowly for its learners is found by measurement, and the operator is warned."""

import asyncio
import gc
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from isthmus.agent import speed
from isthmus.agent.speed import PART_MAX, Speeds, glance, too_slow
from isthmus.doctor import OK, WARNING, Finding, Role, RoleKind
from isthmus.doctor import log as doctor_log
from isthmus.format.isotropic import flop
from isthmus.format.layout import Layout, Spec, TensorClass, partition
from isthmus.format.rules import Rules
from isthmus_services.commands import syncer as command
from isthmus_services.main import main
from support.world import all_commits, in_virtual_time, seed_of, serving, train, world

MODEL = [Spec("a", (40, 30), "float32", TensorClass.DENSE), Spec("b", (50,), "float32", TensorClass.VECTOR)]
ISO, RDA = Rules(merge="iso", fragments=1, sync_every=10), Rules(merge="rda", fragments=1, sync_every=10)
FAST = Speeds(add_s=1e-9, round_s=4e-9, flop_s=5e10)
SLOW = Speeds(add_s=1.0, round_s=4.0, flop_s=1e3)


def layout() -> Layout:
    return partition(MODEL, 1)


def test_what_a_round_of_every_fragment_takes() -> None:
    plain = 1250 * (8 * 1e-9 + 4e-9)
    assert FAST.merge_s(layout(), RDA, 8) == pytest.approx(plain)
    assert FAST.merge_s(layout(), ISO, 8) == pytest.approx(plain + flop(40, 30) / 5e10)
    blocks = Rules(merge="iso", fragments=1, sync_every=10, iso_block=20)
    assert FAST.merge_s(layout(), blocks, 8) == pytest.approx(plain + flop(40, 30, 20) / 5e10)


def test_more_than_half_of_a_period_is_too_slow() -> None:
    takes = FAST.merge_s(layout(), ISO, 8)
    limit = takes / (2 * 10 * PART_MAX)  # two cores, periods of ten steps

    def said(**changes: Any) -> str | None:
        given = {"learners": 8, "step_s": limit, "cores": 2.0} | changes
        return too_slow(FAST, layout(), ISO, **given)

    assert said(step_s=1.001 * limit) is None
    assert said(step_s=0.999 * limit) is not None
    assert said(step_s=0.999 * limit, cores=2.1) is None
    assert said(step_s=1.001 * limit, learners=9) is not None
    assert said(step_s=0.0) is None, "the duration of a step is not known"
    assert said(learners=0, step_s=1e-12) is not None


def test_a_glance_is_some_milliseconds_of_the_real_thing() -> None:
    glance(time.perf_counter, ISO)  # compiles
    found = glance(time.perf_counter, ISO)
    assert 0.0 < found.add_s < 1e-6
    assert 0.0 < found.round_s < 1e-6
    assert 1e7 < found.flop_s < 1e13
    assert "GFLOP/s" in str(found)


@in_virtual_time
async def findings(kind: RoleKind) -> list[Finding]:
    async with world("", seed_of()) as w:
        async with serving(w.syncer()):
            await train(w.learner("a"), 40)
        found = [f async for f in doctor_log.examine_log(w.run, w.store, Role(kind), w.runtime)]
        made = sum(map(len, (await all_commits(w.log)).values()))
        (said,) = (f.said for f in found if f.check == "log: commits")
        assert said.startswith(f"none of {made:,} is missing, by their names; the newest and ")
        return [f for f in found if f.check == "machine: merging"]


@pytest.mark.parametrize(("speeds", "outcome"), [(FAST, OK), (SLOW, WARNING)])
def test_the_doctor_says_so_to_whoever_runs_syncers(
    speeds: Speeds, outcome: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_log, "glance", lambda now, rules: speeds)
    for kind in (RoleKind.SYNCER, RoleKind.OPERATOR):
        (found,) = findings(kind)
        assert found.outcome == outcome
        assert ("Give syncers more cores" in found.advice) == (outcome == WARNING)
    assert not findings(RoleKind.LEARNER)


@pytest.mark.parametrize(("flop_s", "merged"), [(5e10, "iso"), (2e8, "rda")])
def test_a_run_created_on_a_slow_machine_merges_by_rda(
    flop_s: float,
    merged: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(speed, "products", lambda now, **_: flop_s)
    assert main(["init", str(tmp_path / "run")]) == 0
    assert f", {merged}, int4 up" in capsys.readouterr().out
    assert ("this machine computes 0.2 GFLOP/s" in caplog.text) == (merged == "rda")
    assert main(["init", str(tmp_path / "run")]) == 0, "a run that exists keeps its rule"
    assert f", {merged}, int4 up" in capsys.readouterr().out
    monkeypatch.setattr(speed, "products", None)
    assert main(["init", str(tmp_path / "asked"), "--merge", "iso"]) == 0, "nothing is measured if the rule is given"


@in_virtual_time
async def _warned(speeds: Speeds, caplog: pytest.LogCaptureFixture) -> int:
    async with world("", seed_of()) as w, serving(w.syncer()) as syncer:
        learner = asyncio.ensure_future(train(w.learner("a"), 75, step_s=2.0))
        with caplog.at_level(logging.WARNING, "isthmus.services.syncer"):
            warming = asyncio.ensure_future(command._warm(syncer, w.log))
            await asyncio.sleep(140.0)
        warming.cancel()
        await learner
    return sum("rounds will come late" in record.message for record in caplog.records)


@pytest.mark.parametrize(("speeds", "words"), [(FAST, 0), (SLOW, 1)])
def test_a_syncer_says_so_once_an_hour(
    speeds: Speeds, words: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(command, "glance", lambda now, rules, compute: speeds)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    assert _warned(speeds, caplog) == words

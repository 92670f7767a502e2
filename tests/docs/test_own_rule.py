"""docs/own-rule.md works from top to bottom."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from isthmus.format.rules import Pace, Rules
from support.docs_blocks import Shell, blocks
from support.world import seed_of, serving, train, world

pytestmark = pytest.mark.tier("all")

PAGE = "docs/own-rule.md"

LAB, REPLAY = "isthmus simulate", "isthmus replay"

STEPS, FEWER = " 50", " 24"
"""The page's steps of each run, and two rounds of each fragment instead: training takes most of the test's time."""


async def recorded(folder: Path) -> None:
    seed = seed_of(Rules(fragments=2, sync_every=4), Pace(heartbeat_s=0.2, silence_s=0.8, quorum=2))
    async with world(folder, seed) as w, serving(w.syncer("s1")) as syncer:
        enough = lambda: min(k.head for k in syncer.coordinators) >= 4  # noqa: E731
        await asyncio.gather(*(train(w.learner(f"l{i}"), 60, seed=i, step_s=0.01, enough=enough) for i in range(2)))


def test_each_command_of_the_page_is_in_one_of_the_tests() -> None:
    """Two tests run the page, so that neither takes long on a busy machine."""
    commands = [block.text for block in blocks(PAGE) if block.commands]
    assert all((LAB in text) != (REPLAY in text) for text in commands)
    assert sum(block.text.count(STEPS) for block in blocks(PAGE)) == 2, "in a command and in a case"


def said(folder: Path, only: str) -> dict[str, str]:
    """Run the page's blocks of commands with this text; return what each said."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with Shell(folder, environment) as shell:
        shell.page(PAGE, STEPS, FEWER, only)
    return {block.strip(): text for block, text in shell.said.items()}


def test_a_rule_of_ones_own_is_compared_in_the_lab(tmp_path: Path) -> None:
    by_block = said(tmp_path, LAB)
    (compared,) = (text for block, text in by_block.items() if block.startswith("isthmus simulate training conditions"))
    for name in (
        "4 learners: RDA",
        "4 learners: iso",
        "4 learners: iso by default",
        "4 learners: RDA → my_rule:agreed",
    ):
        assert name in compared
    assert "difference: the loss less that of «4 learners: iso by default»" in " ".join(compared.split())
    found = json.loads((tmp_path / "my.json").read_text())
    assert found["summary"].keys() == {
        "iso",
        "iso, outer rate 0.8",
        "mean",
        "agreed",
        "agreed, outer rate 0.7",
    }
    assert {d["baseline"] for d in found["differences"].values()} == {"iso"}
    assert {len(d["by_seed"]) for d in found["differences"].values()} == {3}
    assert all(2.0 < row["val_loss"] < 5.0 for row in found["rows"])
    assert (tmp_path / "my.png").stat().st_size


def test_a_recorded_run_is_folded_by_a_rule_of_ones_own(tmp_path: Path) -> None:
    asyncio.run(recorded(tmp_path / "RUN"))
    by_block = said(tmp_path, REPLAY)
    assert sum("merge=my_rule:agreed" in text for text in by_block.values()) == 4
    for name in ("whatif.png", "other.safetensors"):
        assert (tmp_path / name).stat().st_size

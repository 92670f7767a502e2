"""docs/own-rule.md works from top to bottom."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from isthmus.format.rules import Pace, Rules
from support.docs_blocks import Shell
from support.world import seed_of, serving, train, world

pytestmark = pytest.mark.tier("all")

PAGE = "docs/own-rule.md"


async def recorded(folder: Path) -> None:
    seed = seed_of(Rules(fragments=2, sync_every=4), Pace(heartbeat_s=0.2, silence_s=0.8, quorum=2))
    async with world(folder, seed) as w, serving(w.syncer("s1")) as syncer:
        enough = lambda: min(k.head for k in syncer.coordinators) >= 4  # noqa: E731
        await asyncio.gather(*(train(w.learner(f"l{i}"), 60, seed=i, step_s=0.01, enough=enough) for i in range(2)))


def test_a_rule_of_ones_own_is_compared_and_folded(tmp_path: Path) -> None:
    asyncio.run(recorded(tmp_path / "RUN"))
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with Shell(tmp_path, environment) as shell:
        shell.page(PAGE)
    said = {block.strip(): text for block, text in shell.said.items()}
    (compared,) = (text for block, text in said.items() if block.startswith("isthmus simulate training conditions"))
    for name in (
        "4 learners: RDA",
        "4 learners: iso",
        "4 learners: iso by default",
        "4 learners: RDA → my_rule:agreed",
    ):
        assert name in compared
    assert "difference: the loss less that of «4 learners: iso by default»" in " ".join(compared.split())
    found = json.loads((tmp_path / "my.json").read_text())
    assert found["summary"].keys() == {"iso", "mean", "agreed", "agreed, outer rate 0.7"}
    assert {d["baseline"] for d in found["differences"].values()} == {"iso"}
    assert {len(d["by_seed"]) for d in found["differences"].values()} == {3}
    assert all(2.0 < row["val_loss"] < 5.0 for row in found["rows"])
    assert sum("merge=my_rule:agreed" in text for text in said.values()) == 4
    for name in ("my.png", "whatif.png", "other.safetensors"):
        assert (tmp_path / name).stat().st_size

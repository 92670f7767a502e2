"""A merge rule of one's own: the lab trains with it, replay folds a recorded run with it, and neither shows old results."""

import asyncio
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from isthmus.format.rules import Pace, Rules
from isthmus_services.commands import replay
from isthmus_services.main import main
from support.world import seed_of, serving, train, world

RULE = """
import numpy as np

from own_rule_more import FACTOR


def mean(updates, weights, tensors):
    return FACTOR * (weights @ updates)


def draws(updates, weights, tensors):
    noise = 0 if tensors[0].name == "embedding" else np.random.normal()
    return FACTOR * (weights @ updates) + np.float32(noise)


def breaks(updates, weights, tensors):
    if tensors[0].name != "embedding":
        raise ValueError("not today")
    return updates[0]
"""

EVALUATE = """
import os
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

files = Path(os.environ["ISTHMUS_CUT_DIR"]).glob("*.safetensors")
print("loss", sum(float(np.abs(x).sum()) for file in files for x in load_file(file).values()))
"""

CASE = """
learners = 2
steps = 8
fragments = 3
sync_every = 4
shape = {width = 16, layers = 1, heads = 1}
codec_down = "f32"
outer_lr = 0.7
outer_momentum = 0.8
[cases.built-in]
merge = "avg"
[cases.mine]
merge = "own_rule:mean"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a rule and a case, which is the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_rule.py").write_text(RULE)
    (tmp_path / "own_rule_more.py").write_text("FACTOR = 1.0\n")
    (tmp_path / "my.toml").write_text(CASE)
    for name in ("own_rule", "own_rule_more"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def simulated() -> dict[str, Any]:
    words = ("my.toml", "--cache", "cache", "--workers", "1", "--json", "r.json", "--plot", "p.png")
    assert main(["simulate", "training", *words]) == 0
    found: dict[str, Any] = json.loads(Path("r.json").read_text())
    return found


@pytest.mark.tier("all")
def test_an_edited_rule_runs_anew_and_all_else_comes_from_the_cache(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = simulated()
    said = capsys.readouterr().out
    assert "mine" in said
    assert "reproducible on: " in said
    assert (folder / "p.png").stat().st_size > 1_000
    losses = {row["setting"]: row["val_loss"] for row in first["rows"]}
    assert losses["mine"] == pytest.approx(losses["built-in"], abs=1e-3)
    assert {"cpu", "instructions", "threads", "libraries", "python", "source"} <= first["reproducible_on"].keys()
    assert first["reproducible_on"]["threads"] == 1
    assert first["own_merge"] == {"mine": "own_rule:mean"}
    assert first["differences"].keys() == {"mine"}
    assert first["differences"]["mine"]["by_seed"] == [losses["mine"] - losses["built-in"]]
    assert "difference: the loss less that of «built-in»; one seed is too few" in " ".join(said.split())
    source = first["reproducible_on"]["own_rules"]["own_rule:mean"]
    assert f"digest of own_rule:mean with its imports {source}" in " ".join(said.split())

    def stamps() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in (folder / "cache").iterdir()}

    before = stamps()
    assert len(before) == 2
    assert simulated() == first
    assert stamps() == before, "what is unchanged is not computed again"
    # The rule's own file is as before: a module that it imports changes.
    (folder / "own_rule_more.py").write_text("FACTOR = 0.5\n")
    edited = simulated()
    assert edited["reproducible_on"]["own_rules"]["own_rule:mean"] != source
    assert edited["reproducible_on"]["source"] == first["reproducible_on"]["source"]
    second = {row["setting"]: row["val_loss"] for row in edited["rows"]}
    assert second["built-in"] == losses["built-in"]
    assert abs(second["mine"] - losses["mine"]) > 0.01
    assert len(stamps()) == 3
    assert stamps().items() > before.items()


@pytest.mark.tier("all")
def test_a_rule_that_breaks_in_training_ends_the_command_with_its_place(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "my.toml").write_text(CASE.replace("own_rule:mean", "own_rule:breaks"))
    assert main(["simulate", "training", "my.toml", "--cache", "cache", "--only", "mine"]) == 2
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "not today" in line]
    assert said.startswith("isthmus simulate training: mine, seed 0: merge own_rule:breaks: merging ")
    assert f"raised ValueError at {folder}/own_rule.py:18: not today" in said


@pytest.mark.tier("all")
def test_a_rule_that_draws_at_random_is_found_where_it_first_merges(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "my.toml").write_text(CASE.replace("own_rule:mean", "own_rule:draws"))
    assert main(["simulate", "training", "my.toml", "--cache", "cache", "--only", "mine"]) == 2
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "different bits" in line]
    assert said.startswith("isthmus simulate training: mine, seed 0: merge own_rule:draws: merging ")
    assert "default_rng(0)" in said
    assert not list((folder / "cache").glob("*")), "no figure of it is kept"


def test_a_recorded_run_is_folded_by_a_rule_of_ones_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def body() -> None:
        rules = Rules(fragments=2, sync_every=4, codec_down="f32")
        seed = seed_of(rules, Pace(heartbeat_s=0.2, silence_s=0.8, quorum=2))
        async with world(folder / "RUN", seed) as w, serving(w.syncer("s1")) as syncer:
            enough = lambda: min(k.head for k in syncer.coordinators) >= 4  # noqa: E731
            await asyncio.gather(*(train(w.learner(f"l{i}"), 60, seed=i, step_s=0.01, enough=enough) for i in range(2)))

    asyncio.run(body())
    mine = ("--merge", "own_rule:mean", "--export", "mine.safetensors", "--json", "r.json")
    assert main(["replay", "RUN", *mine]) == 0
    said = capsys.readouterr().out
    assert "RUN with merge=own_rule:mean" in said
    assert "the function merges in place of all rules, at the recorded outer rate and momentum" in said
    # The lab's outer step for this period is RDA's.
    assert "for the lab's, add --set outer.lr=0.4 --set outer.momentum=0.8\n" in said
    assert "reproducible on: " in said
    assert main(["replay", "RUN", "--set", "merge=avg", "--export", "avg.safetensors", "--json", "a.json"]) == 0
    own, built_in = load_file("mine.safetensors"), load_file("avg.safetensors")
    assert all(np.allclose(own[name], built_in[name], rtol=1e-5, atol=1e-5) for name in built_in)
    found, other = (json.loads(Path(name).read_text()) for name in ("r.json", "a.json"))
    assert found["merge"] == "own_rule:mean"
    assert found["reproducible_on"]["own_rules"].keys() == {"own_rule:mean"}
    assert other["reproducible_on"] is None, "the library's own arithmetic has the same bits everywhere"
    assert found["rows"][-1]["difference"] == pytest.approx(other["rows"][-1]["difference"], rel=1e-3)
    assert found["rows"][-1]["difference"] > 0.0
    assert "it says how far apart the two models are, not which one is better" in said
    (offered,) = re.findall(r"losses of both models at version \d+: (isthmus replay .*)", said)
    early = str(max(1, max(found["heads"]) // 4))
    plain = ["isthmus", "replay", "RUN", "--merge", "own_rule:mean"]
    assert shlex.split(offered) == [*plain, "--to", early, "--exec", replay.EVALUATE]
    assert (found["loss"], found["loss_other"]) == (None, None)

    # The losses are of the recorded model and of the other one: here, the sums of their weights.
    (folder / "evaluate.py").write_text(EVALUATE)
    evaluated = ("--exec", f"{sys.executable} evaluate.py", "--json", "l.json")
    assert main([*shlex.split(offered)[1:-2], *evaluated]) == 0
    said = capsys.readouterr().out
    assert f"held-out loss at version {early}: " in said
    assert "this says little" not in said
    assert main([*plain[1:], *evaluated]) == 0
    said = capsys.readouterr().out
    assert f"compare at an early version: --to {early}" in said
    assert main(["export", "RUN", "--out", "recorded.safetensors"]) == 0
    capsys.readouterr()
    recorded, other = (
        sum(float(np.abs(x).sum()) for x in load_file(file).values())
        for file in ("recorded.safetensors", "mine.safetensors")
    )
    assert recorded != pytest.approx(other, rel=1e-3)
    losses = json.loads(Path("l.json").read_text())
    assert (losses["loss"], losses["loss_other"]) == (pytest.approx(recorded), pytest.approx(other))
    assert f"{losses['loss']:.4f} as recorded, {losses['loss_other']:.4f} with merge=own_rule:mean" in said
    assert main(["replay", "RUN", "--set", "merge=avg", "--exec", "false"]) == 1
    assert "held-out losses: not known" in capsys.readouterr().out
    assert main(["replay", "RUN", "--exec", "true"]) == 2
    assert "--exec compares the losses of two whole models: add --set or --merge" in capsys.readouterr().err
    assert main(["replay", "RUN", "--set", "merge=avg", "--exec", " "]) == 2
    assert "--exec is empty: give a command" in capsys.readouterr().err

    both = ("--merge", "own_rule:mean", "--set", "without=l0", "--set", "outer.lr=0.1")
    assert main(["replay", "RUN", *both]) == 0
    capsys.readouterr()
    assert main(["replay", "RUN", "--merge", "own_rule:mean", "--set", "merge=avg"]) == 2
    assert "--merge and --set merge or trim name two rules: leave one of them out" in capsys.readouterr().err
    assert main(["replay", "RUN", "--merge", "own_rule:breaks"]) == 2
    assert "raised ValueError at" in capsys.readouterr().err
    assert main(["replay", "RUN", "--merge", "own_rule:draws"]) == 2
    assert "returned different bits for the same updates" in capsys.readouterr().err

"""A row of each recorded experiment of the lab, trained again, comes out as recorded: see docs/results/README.md."""

import json
import re
from pathlib import Path

import pytest

from isthmus_lab.forecast.learning import lab
from isthmus_lab.training.experiments import EXPERIMENTS
from isthmus_services.main import main

pytestmark = pytest.mark.tier("all")

RESULTS = Path(__file__).parents[2] / "docs" / "results"
ROWS = {
    "adoption": "adopt: overwrite",
    "blocks": "RDA",
    "compare": "thin links: decoupled",
    "gap": "M = 4: defaults",
    "hostile": "RDA: nobody",
    "links": "ample: H = 12",
    "merge": "M = 4: RDA everywhere",
    "outer": "H = 12, M = 4: iso 1.1, momentum 0.7",
    "scale": "decoupled: M = 4, H = 6",
}
"""By experiment, a row that takes minutes: a few learners, and 600 steps or fewer."""

NEAR = {1: 0.02, 3: 0.01}
"""By the number of seeds: how far apart the losses may be [nats per byte]. The code changed since, and with it the bits;
seeds of one row differ by 0.002 to 0.013."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("experiment", ROWS)
def test_a_recorded_row_comes_out_again(experiment: str, tmp_path: Path) -> None:
    recorded = json.loads((RESULTS / f"{experiment}.json").read_text())
    words = [experiment, "--seeds", str(len(recorded["seeds"])), "--steps", str(recorded["steps"])]
    into = ["--cache", str(tmp_path / "cache"), "--json", str(tmp_path / "again.json"), "--workers", "1"]
    assert main(["simulate", "training", *words, "--only", ROWS[experiment], *into]) == 0
    again = json.loads((tmp_path / "again.json").read_text())["summary"][ROWS[experiment]]["val_loss"]["mean"]
    before = recorded["summary"][ROWS[experiment]]["val_loss"]["mean"]
    assert again == pytest.approx(before, abs=NEAR[len(recorded["seeds"])])


def test_the_page_has_every_file_and_the_rows_that_are_trained_again() -> None:
    page = (RESULTS / "README.md").read_text()
    listed = dict(re.findall(r"^\| `([\w-]+)\.json` \|.*\| (?:`(.*)` |– )\|", page, re.MULTILINE))
    assert listed.keys() == {path.stem for path in RESULTS.glob("*.json")}
    assert {name: row for name, row in listed.items() if row} == ROWS


@pytest.mark.tier("test")
def test_the_page_says_which_settings_and_rows_have_no_file() -> None:
    page = " ".join((RESULTS / "README.md").read_text().split())
    for name, said in re.findall(r"\| `([\w-]+)\.json` \| [^|]* \| ([^|]*) \|", page):
        found = json.loads((RESULTS / f"{name}.json").read_text())
        experiment = EXPERIMENTS.get(found.get("experiment", ""))
        if experiment is not None:
            kept, of = len(found["summary"]), len({setting.name for setting in experiment.settings(600)})
            assert said == (f"{kept}" if kept == of else f"{kept} of {of}"), name
    rows = [row for of in (lab(), lab("iso")) for row in (*of.decoupled, *of.long)]
    rows += [*lab().data_parallel, *lab().overwritten]
    lost = [row for row in rows if not row.experiment]
    assert f"On {len(lost)} of these the forecast of `isthmus plan` rests, of its {len(rows)} rows" in page

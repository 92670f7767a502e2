"""The digest of the code that computes a figure changes with each file that the code imports, and with no other."""

import importlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from isthmus_lab.commands.simulate.lab_pool import Kept
from isthmus_lab.training.setting import Setting
from isthmus_services.output.copies import SELVES, which_runs
from isthmus_services.output.provenance import _imported, digest_of, provenance, source_of

pytestmark = pytest.mark.tier("test")

ROOT = Path(__file__).parents[2]
FOLDERS = {name: ROOT / ("services" if name == "isthmus_services" else "pkg") for name in SELVES}


def test_each_file_that_is_imported_counts_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "own_rules/__init__.py": "",
        "own_rules/rule.py": "import numpy\nfrom . import inner\n\n\ndef f():\n    from own_helper import g\n",
        "own_rules/inner.py": "from .deep.most import x\n",
        "own_rules/deep/most.py": "x = 1\n",
        "own_helper.py": "g = 1\n",
        "own_other.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    before = source_of("own_rules.rule")
    assert source_of("own_rules.rule") == before
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}# edited\n")
        assert (source_of("own_rules.rule") == before) == (name == "own_other.py"), name
        (tmp_path / name).write_text(text)
    assert source_of("own_rules.rule") == before


def copied(folder: Path) -> None:
    """Copy the project's packages into one folder, as an installation has them."""
    for name, at in FOLDERS.items():
        shutil.copytree(at / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))


def services(names: Iterable[str]) -> list[str]:
    """Return the first file of `isthmus_services` among names, if there is one."""
    return [name for name in sorted(names) if name.startswith("isthmus_services/")][:1]


def test_an_installed_copy_and_a_clone_have_the_same_digest_and_it_is_said_which_runs(tmp_path: Path) -> None:
    """A clone has `isthmus_services` in another folder than `isthmus`, an installation has all in one."""
    installed, clone = tmp_path / "site-packages", tmp_path / "clone"
    copied(installed)
    for place in ("pkg", "services"):
        shutil.copytree(ROOT / place, clone / place, ignore=shutil.ignore_patterns("__pycache__"))
    apart = {name: clone / ("services" if name == "isthmus_services" else "pkg") for name in SELVES}
    together = dict.fromkeys(SELVES, installed)
    assert digest_of("isthmus_services.main", apart) == digest_of("isthmus_services.main", together)
    show = "from isthmus_services.output.copies import *; print(which_runs(Path.cwd()))"

    def ran(path: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
        return subprocess.run(
            [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, check=True
        )

    of_clone = f"{clone / 'pkg'}:{clone / 'services'}"
    assert ran(str(installed), clone, "-c", show).stdout == "\n", "it does not matter which of two equal copies runs"
    worker = clone / "pkg" / "isthmus_lab" / "worker.py"
    worker.write_text(worker.read_text() + "# edited\n")
    said = ran(str(installed), clone, "-m", "isthmus_services.main", "simulate", "training", "example").stderr
    assert said.count("\n") == 1
    assert f"note: the code that runs is in {installed}; the copy in {clone / 'pkg'}" in said
    assert "which differs, is not used: PYTHONPATH=" in said
    assert ran(str(installed), clone / "pkg" / "isthmus_lab", "-c", show).stdout in said.removeprefix("note: ")
    assert digest_of("isthmus_lab.worker", apart) != digest_of("isthmus_lab.worker", together)
    assert ran(of_clone, clone, "-c", show).stdout == "\n"
    assert ran(str(installed), tmp_path, "-c", show).stdout == "\n"
    assert which_runs(ROOT) == ""


@pytest.mark.tier("all")
def test_the_labs_results_rest_on_the_library_and_not_on_the_list_of_experiments(tmp_path: Path) -> None:
    names = _imported("isthmus_lab.worker", FOLDERS, None).keys()
    assert {
        "isthmus/codecs/kernels/vectors.py", "isthmus/codecs/int4.py", "isthmus/log/merge.py", "isthmus/log/polar.py",
        "isthmus/rounds/rounds.py", "isthmus/learner/boundary.py", "isthmus/syncer/coordinator.py",
        "isthmus/inspect/own_merge.py", "isthmus/demo/gpt.py", "isthmus/demo/text.py", "isthmus/format/rules.py",
        "isthmus_lab/training/training.py", "isthmus_lab/training/variants.py", "isthmus_lab/simulate/clock.py",
    } <= names  # fmt: skip
    assert (
        not {"isthmus_lab/training/decoupled.py", "isthmus/doctor/machine.py", "isthmus_lab/commands/plan.py"} & names
    )
    copied(tmp_path)
    folders = dict.fromkeys(SELVES, tmp_path)
    before = digest_of("isthmus_lab.worker", folders)
    assert before == source_of("isthmus_lab.worker")
    for edited in ("isthmus_lab/training/variants.py", "isthmus/log/robust.py", *services(names)):
        text = (tmp_path / edited).read_text()
        (tmp_path / edited).write_text(text + "# edited\n")
        assert digest_of("isthmus_lab.worker", folders) != before
        (tmp_path / edited).write_text(text)


def test_a_row_is_kept_under_all_that_decides_it_and_not_under_a_commit(tmp_path: Path) -> None:
    kept, job = Kept(tmp_path), (Setting(name="a"), 0)
    before = kept.key(job)
    assert kept.key((Setting(name="b"), 0)) == before
    made_by = kept.made_by
    assert {"torch", "numpy", "numba"} == made_by.libraries.keys()
    kept.made_by = replace(made_by, revision="another", isthmus="9.9")
    assert kept.key(job) == before
    kept.made_by = replace(made_by, own_rules={"mine:rule": "a", "mine:other": "b"})
    assert kept.key(job) == before, "a rule of one's own decides only the figures that it made"
    mine = Setting(name="a", own_merge="mine:rule"), 0
    own = kept.key(mine)
    kept.made_by = replace(made_by, own_rules={"mine:rule": "a2", "mine:other": "b"})
    assert kept.key(mine) != own != before
    for other in (
        replace(made_by, libraries=made_by.libraries | {"numpy": "0.1"}),
        replace(made_by, source="another"),
        replace(made_by, cpu="another"),
        replace(made_by, instructions="another"),
        replace(made_by, python="2.7"),
    ):
        kept.made_by = other
        assert kept.key(job) != before


def test_the_line_says_where_a_figure_can_be_had_again() -> None:
    found = provenance("isthmus.inspect.whatif", 1)
    assert found.source == source_of("isthmus.inspect.whatif")
    found = replace(found, cpu="A CPU", instructions="avx2", revision="abc+", source="0123456789")
    assert found.line.startswith("reproducible on: A CPU (avx2), threads: 1, Python 3.")
    assert found.line.endswith("at abc+, digest of isthmus.inspect.whatif with its imports 0123456789")
    assert f"torch {found.libraries['torch']}" in found.line

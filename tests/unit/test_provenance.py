"""The digest of the code that computes a figure changes with each file that the code imports, and with no other."""

import importlib
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from isthmus_lab.commands.simulate.lab_pool import Kept
from isthmus_lab.training.setting import Setting
from isthmus_services.output.provenance import _SELVES, _imported, digest_below, provenance, source_of

PACKAGES = Path(__file__).parents[2] / "pkg"


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


def test_the_labs_results_rest_on_the_library_and_not_on_the_list_of_experiments(tmp_path: Path) -> None:
    names = {str(path.relative_to(PACKAGES)) for path in _imported("isthmus_lab.worker", PACKAGES, _SELVES)}
    assert {
        "isthmus/codecs/kernels/vectors.py", "isthmus/codecs/int4.py", "isthmus/log/merge.py", "isthmus/log/polar.py",
        "isthmus/rounds/rounds.py", "isthmus/learner/boundary.py", "isthmus/syncer/coordinator.py",
        "isthmus/inspect/own_merge.py", "isthmus/demo/gpt.py", "isthmus/demo/text.py", "isthmus/format/rules.py",
        "isthmus_lab/training/training.py", "isthmus_lab/training/variants.py", "isthmus_lab/simulate/clock.py",
    } <= names  # fmt: skip
    assert (
        not {"isthmus_lab/training/decoupled.py", "isthmus/doctor/machine.py", "isthmus_lab/commands/plan.py"} & names
    )
    for package in ("isthmus", "isthmus_lab"):
        shutil.copytree(PACKAGES / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    before = digest_below(tmp_path, "isthmus_lab.worker", _SELVES)
    assert before == source_of("isthmus_lab.worker")
    for edited in ("isthmus_lab/training/variants.py", "isthmus/log/robust.py"):
        text = (tmp_path / edited).read_text()
        (tmp_path / edited).write_text(text.replace("1.0", "1.5", 1))
        assert digest_below(tmp_path, "isthmus_lab.worker", _SELVES) != before
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
    found = replace(provenance("0123456789", 1), cpu="A CPU", instructions="avx2", revision="abc+")
    assert found.line.startswith("reproducible on: A CPU (avx2), threads: 1, Python 3.")
    assert found.line.endswith("at abc+, digest of its code 0123456789")
    assert f"torch {found.libraries['torch']}" in found.line

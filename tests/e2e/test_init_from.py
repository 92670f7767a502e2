"""`isthmus init --from FILE` takes values from a model file; which code runs is the operator's choice."""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from e2e.test_processes import isthmus
from isthmus.inspect import export
from isthmus_services.main import main
from isthmus_services.settings import shared

pytestmark = pytest.mark.tier("test")

THEIRS = """
import pathlib
pathlib.Path("imported").touch()

def make():
    import torch
    pathlib.Path("called").touch()
    return torch.nn.Linear(2, 2, bias=False)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a current folder with a module of code that a model file can name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs.py").write_text(THEIRS)
    yield tmp_path
    sys.modules.pop("theirs", None)


def file_naming(model: str) -> str:
    weights = {"weight": np.full((2, 2), 3.0, np.float32)}
    safetensors.numpy.save_file(weights, "m.safetensors", metadata={"isthmus.model": model})
    return "m.safetensors"


def test_code_that_a_file_names_is_neither_imported_nor_called(here: Path) -> None:
    done = isthmus("init", "run", "--from", file_naming("theirs:make"))
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.splitlines() == [
        "isthmus init: m.safetensors names theirs:make as its model function; code that a file names is not run by "
        "default: add --model theirs:make to run it"
    ]
    assert not (here / "imported").exists()
    assert not (here / "run").exists(), "no run is created either"


def test_with_model_it_is_run_as_asked(here: Path) -> None:
    done = isthmus("init", "run", "--from", file_naming("theirs:make"), "--model", "theirs:make")
    assert done.returncode == 0, done.stderr
    assert (here / "called").exists()
    assert isthmus("export", "run", "-o", "out.safetensors").returncode == 0
    assert np.array_equal(export.read(here / "out.safetensors").values[0], np.full(4, 3.0, np.float32))


def test_a_demo_model_goes_from_run_to_file_to_run_without_asking(here: Path) -> None:
    assert main(["init", "first", "--seed", "4"]) == 0
    assert main(["export", "first", "-o", "demo.safetensors"]) == 0
    assert main(["init", "second", "--from", "demo.safetensors"]) == 0
    assert main(["export", "second", "-o", "again.safetensors"]) == 0
    first, second = (export.read(here / name) for name in ("demo.safetensors", "again.safetensors"))
    assert first.model == second.model == shared.BUILT_IN_MODEL
    assert all(np.array_equal(a, b) for a, b in zip(first.values, second.values, strict=True))


@pytest.mark.parametrize(
    "named",
    [
        "isthmus.demo.gpt:Block",  # not a function
        "isthmus.demo.gpt:functional",  # imported in that module, not defined in it
        "isthmus.demo.trainer:train",  # part of Isthmus, but makes no model
        "isthmus.demo.trainer:loss_of",
        "isthmus.demo.gpt:byte_gpt.__globals__",
        "isthmus.demo.nothing:byte_gpt",
        "isthmus.demonstration:make",
        "isthmus.runtime.clock:random_id",
        "isthmus.demo.gpt.torch.hub:list",
        "isthmus.demo..gpt:byte_gpt",
        "theirs.isthmus.demo.gpt:byte_gpt",
    ],
)
def test_only_what_makes_a_model_in_our_own_package_is_built_in(
    named: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shared.built_in(named) is None
    assert main(["init", "run", "--from", file_naming(named)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("named", ["x:y; rm -rf z", "a:b\nc", "\x1b[2J:x", "theirs", ":", "$(id):x", "a:" + "b" * 9999])
def test_a_name_that_is_none_is_shown_harmlessly(named: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "run", "--from", file_naming(named)]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert "\x1b" not in said
    assert ("use --model" in said) == (shared.CALLABLE.fullmatch(named) is None)
    assert "--model x" not in said

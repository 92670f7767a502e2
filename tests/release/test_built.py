"""The wheel and the sdist contain the two packages as committed, their licence, and the metadata of pyproject.toml."""

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from release.conftest import ROOT, STRAYS, git

PACKAGES = {"pkg/isthmus/": "isthmus/", "services/isthmus_services/": "isthmus_services/"}
"""Folders of the tree, and the names under which they are installed."""

ABOUT = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as file:
        assert file.testzip() is None
        return {name: file.read(name) for name in file.namelist()}


def committed(tree: Path) -> dict[str, bytes]:
    names = git(tree, "ls-tree", "-r", "-z", "--name-only", "HEAD").split("\0")
    return {name: (tree / name).read_bytes() for name in names if name}


def packaged(tree: Path) -> dict[str, bytes]:
    """Return the files of a tree's packages, by the names under which they are installed."""
    files = committed(tree).items()
    return {new + n.removeprefix(old): data for n, data in files for old, new in PACKAGES.items() if n.startswith(old)}


def metadata(wheel: Path) -> Message:
    (text,) = (data for name, data in contents(wheel).items() if name.endswith(".dist-info/METADATA"))
    return message_from_string(text.decode())


def test_the_wheel_is_the_two_packages_as_they_are_committed(released: Path, wheel: Path) -> None:
    found, about = contents(wheel), f"{wheel.name.removesuffix('-py3-none-any.whl')}.dist-info/"
    wanted = packaged(released)
    assert {"isthmus/py.typed", "isthmus_services/py.typed", "isthmus_services/settings/prices.toml"} <= wanted.keys()
    assert "isthmus_services/board/static/board.js" in wanted
    assert found.keys() == wanted.keys() | {about + name for name in ABOUT}
    assert all(found[name] == data for name, data in wanted.items())
    assert found[about + "licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    assert found[about + "entry_points.txt"].decode().split() == [
        "[console_scripts]",
        "isthmus",
        "=",
        "isthmus_services.main:main",
    ]
    assert "Root-Is-Purelib: true" in found[about + "WHEEL"].decode()


def test_the_sdist_is_what_the_wheel_is_built_from_and_nothing_else(released: Path) -> None:
    (sdist,) = (released / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as file:
        found = {m.name.partition("/")[2] for m in file if m.isfile()}
        assert all(m.isfile() for m in file), "there must be no links"
    sources = {name for name in committed(released) if name.startswith(("pkg/", "services/"))}
    assert found == sources | {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", ".gitignore", "PKG-INFO"}


def test_what_git_does_not_know_stays_out_of_it(released: Path, wheel: Path) -> None:
    (sdist,) = (released / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as file:
        names = [*contents(wheel), *file.getnames()]
    assert all((released / stray).exists() for stray in STRAYS), "the stray files must be there"
    assert not [name for name in names if re.search(r"stray|__pycache__|\.pyc$", name)]


def test_an_index_is_told_what_pyproject_says(released: Path, wheel: Path) -> None:
    told, project = metadata(wheel), tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (told["Name"], told["Requires-Python"]) == (project["name"], project["requires-python"])
    assert told["Version"] == wheel.name.split("-")[1] == git(released, "describe", "--tags").strip().removeprefix("v")
    assert (told["License-Expression"], told.get_all("License-File")) == ("Apache-2.0", ["LICENSE"])
    assert told["Summary"] == project["description"]
    assert told.get_all("Classifier") == sorted(project["classifiers"])
    assert told["Description-Content-Type"] == "text/markdown"
    assert told.get_payload().strip() == (released / "README.md").read_text().strip()  # type: ignore[union-attr]


def test_torch_comes_by_an_extra_alone(wheel: Path) -> None:
    told = metadata(wheel)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [Requirement(text) for text in told.get_all("Requires-Dist", [])]
    assert {r.name for r in required if r.marker is None} == {Requirement(d).name for d in project["dependencies"]}
    assert {r.name for r in required if r.marker and r.marker.evaluate({"extra": "torch"})} == {"torch"}
    assert set(told.get_all("Provides-Extra", [])) == set(project["optional-dependencies"])


@pytest.mark.parametrize("source", ["the sdist", "what the image's recipe copies"])
def test_it_is_the_same_wheel_wherever_it_is_built(source: str, released: Path, wheel: Path, tmp_path: Path) -> None:
    """A build needs no git, tags or history: the version is a line of a file."""
    tree = tmp_path / "tree"
    if source == "the sdist":
        (sdist,) = (released / "dist").glob("*.tar.gz")
        with tarfile.open(sdist) as file:
            file.extractall(tmp_path, filter="data")
        (tmp_path / sdist.name.removesuffix(".tar.gz")).rename(tree)
    else:
        recipe = (ROOT / "infra/images/Dockerfile").read_text().partition("RUN ")[0]
        for copied in re.findall(r"^COPY (.*) \S+$", recipe, re.MULTILINE):
            for name, data in committed(released).items():
                if any(name == word or name.startswith(f"{word}/") for word in copied.split()):
                    (tree / name).parent.mkdir(parents=True, exist_ok=True)
                    (tree / name).write_bytes(data)
    command = (sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(tmp_path), str(tree))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert contents(tmp_path / wheel.name) == contents(wheel)

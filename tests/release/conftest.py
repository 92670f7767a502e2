"""Fixtures for a release of this tree's tracked files, which tools/release.py makes in another folder."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STRAYS = ("pkg/isthmus/stray.py", "services/isthmus_services/stray.toml")
"""Untracked files in the tree, which git ignores."""

NOBODYS = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
ME = {f"GIT_{who}_{what}": "tests@localhost" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}

Git = Callable[..., str]


def git(tree: Path, *arguments: str) -> str:
    command = ("git", "-C", str(tree), *arguments)
    environment = {**os.environ, **NOBODYS, **ME}
    return subprocess.run(command, env=environment, check=True, text=True, stdout=subprocess.PIPE).stdout


def release(tree: Path) -> subprocess.CompletedProcess[str]:
    command = (sys.executable, "tools/release.py")
    environment = {**os.environ, **NOBODYS, **ME}
    return subprocess.run(command, cwd=tree, env=environment, text=True, capture_output=True, check=False)


def edit(file: Path, pattern: str, new: str) -> None:
    """Replace all matches of a pattern in a file. Raises `AssertionError` if there is none."""
    text, found = re.subn(pattern, new, file.read_text(), flags=re.MULTILINE)
    assert found, f"{file} has no {pattern}"
    file.write_text(text)


def known_to_git() -> list[str]:
    """Return the tracked files of this tree that exist."""
    said = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], check=True, text=True, stdout=subprocess.PIPE).stdout
    return [name for name in said.split("\0") if (ROOT / name).is_file()]


@pytest.fixture(scope="session")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this tree, committed and ready to be released."""
    tree = tmp_path_factory.mktemp("ready") / "tree"
    for name in known_to_git():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    edit(tree / "pkg/isthmus/version.py", r'^(__version__ = "[\d.]+?)(\.dev\d+)?"', r'\1"')
    edit(tree / "CHANGELOG.md", r"\A(# Changelog\n\n## [\d.]+) \(.*\)", r"\1 (2026-11-30)")
    git(tree, "init", "--quiet")
    git(tree, "add", "--all")
    git(tree, "commit", "--quiet", "--message", "Release")
    return tree


@pytest.fixture(scope="session")
def released(ready: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone of `ready` in which the release was made. It also has untracked files."""
    tree = tmp_path_factory.mktemp("released") / "tree"
    git(ready, "clone", "--quiet", str(ready), str(tree))
    (tree / ".git/info/exclude").write_text("stray.*\n")
    for stray in STRAYS:
        (tree / stray).write_text("")
    done = release(tree)
    assert done.returncode == 0, done.stderr
    (tree / "dist/said").write_text(done.stdout)
    return tree


@pytest.fixture(scope="session")
def wheel(released: Path) -> Path:
    """The wheel of the release."""
    (found,) = (released / "dist").glob("*.whl")
    return found

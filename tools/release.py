"""Makes a release of the commit that is checked out: builds it, checks it, writes its notes and tags it.

Nothing leaves this machine: the commands that publish are printed. docs/releasing.md has the steps around it.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from packaging.version import Version

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
NAMES_THE_IMAGE = ("compose.yaml", "infra", "docs")
"""Where manifests and guides say which version to run."""


def said_by(*command: str, environment: dict[str, str] | None = None, cwd: Path = ROOT) -> str:
    """Run a command; return what it said. Exits with its errors where it fails."""
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **(environment or {})}, text=True, capture_output=True, check=False
    )
    if done.returncode != 0:
        sys.exit(f"release: {' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def notes_of(version: str, changelog: str) -> str:
    """Return a version's section of the changelog. Exits where there is none that is finished."""
    section = rf"^## {re.escape(version)}(?: \(([^\n]*)\))?\n(.*?)(?=^## |\Z)"
    found = re.search(section, changelog, re.MULTILINE | re.DOTALL)
    if found is None or not found[2].strip():
        sys.exit(f"release: CHANGELOG.md says nothing of {version}: write its section, «## {version} (YYYY-MM-DD)»")
    if found[1] is None or not re.fullmatch(r"\d{4}-\d\d-\d\d", found[1]):
        sys.exit(f"release: CHANGELOG.md has {version} without its day: make the heading «## {version} (YYYY-MM-DD)»")
    return f"Isthmus {version}\n\n{found[2].strip()}\n"


def refuse_what_is_not_ready(version: str) -> None:
    """Exit with the first thing that is to be done before this version can be released."""
    if changed := said_by("git", "status", "--porcelain").splitlines():
        sys.exit(f"release: {changed[0].strip()}: commit or remove what is not committed ({len(changed)} in all)")
    if Version(version).is_devrelease:
        release = Version(version).base_version
        sys.exit(f"release: {version} is no release: write {release} into pkg/isthmus/version.py, and commit it")
    if said_by("git", "tag", "--list", f"v{version}"):
        sys.exit(f"release: there is a tag v{version}: write the next version into pkg/isthmus/version.py")
    for file, named in named_images():
        if named != version:
            sys.exit(f"release: {file} names {named}, not {version}: correct it, and commit it")


def named_images() -> list[tuple[str, str]]:
    """Return every version of the image that a committed file names, with the file."""
    text = said_by("git", "grep", "-E", r"isthmus:[0-9]|newTag:", "HEAD", "--", *NAMES_THE_IMAGE)
    lines = [line.removeprefix("HEAD:").partition(":") for line in text.splitlines()]
    return [(file, v) for file, _, line in lines for v in re.findall(r"(?:isthmus:|newTag: )(\d[\w.]*\w)", line)]


def build(version: str) -> list[Path]:
    """Build sdist, and the wheel from it, out of what is committed and nothing else that lies here; check both."""
    shutil.rmtree(DIST, ignore_errors=True)
    # What is built depends on the commit alone, down to the dates inside.
    dated = {"SOURCE_DATE_EPOCH": said_by("git", "log", "-1", "--format=%ct").strip()}
    with tempfile.TemporaryDirectory(prefix="release-") as folder:
        tree = Path(folder) / "tree"
        said_by("git", "archive", "--output", f"{folder}/tree.tar", "HEAD")
        with tarfile.open(f"{folder}/tree.tar") as archive:
            archive.extractall(tree, filter="data")
        command = (sys.executable, "-m", "build", "--no-isolation", "--outdir", str(DIST))
        said_by(*command, environment=dated, cwd=tree)
    built = sorted(DIST.iterdir())
    if [file.name for file in built] != [f"isthmus-{version}-py3-none-any.whl", f"isthmus-{version}.tar.gz"]:
        sys.exit(f"release: expected a wheel and an sdist of {version} alone: {', '.join(f.name for f in built)}")
    said_by(sys.executable, "-m", "twine", "check", "--strict", *map(str, built))
    return built


def main() -> None:
    """Release what is checked out."""
    version = said_by(sys.executable, "-m", "hatchling", "version").strip()
    refuse_what_is_not_ready(version)
    notes = notes_of(version, (ROOT / "CHANGELOG.md").read_text())
    built = build(version)
    notes_file = DIST / f"notes-{version}.md"
    notes_file.write_text(notes)
    said_by("git", "tag", "--annotate", "--cleanup=whitespace", "--file", str(notes_file), f"v{version}")
    files = " ".join(str(file.relative_to(ROOT)) for file in built)
    print(f"v{version} is tagged here: {files}, notes in {notes_file.relative_to(ROOT)}. To publish it:")
    print(f"    git push origin v{version}")
    print(f"    {Path(sys.executable).parent}/twine upload {files}")
    print(f"To take it back before that: git tag --delete v{version}")


if __name__ == "__main__":
    main()

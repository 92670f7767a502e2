"""tools/release.py rejects a commit that is not ready, with one sentence, and tags and builds one that is."""

from pathlib import Path

import pytest

from release.conftest import edit, git, release

VERSION = "pkg/isthmus/version.py"


def commit(tree: Path) -> None:
    git(tree, "commit", "--quiet", "--all", "--message", "Change")


def untracked(tree: Path) -> None:
    (tree / "pkg/isthmus/new.py").write_text("")


def changed(tree: Path) -> None:
    (tree / VERSION).write_text((tree / VERSION).read_text() + "\n")


def of_development(tree: Path) -> None:
    edit(tree / VERSION, r'"([\d.]+)"', r'"\1.dev0"')
    commit(tree)


def without_notes(tree: Path) -> None:
    edit(tree / VERSION, r'"[\d.]+"', '"99.0.0"')
    for file in ("compose.yaml", "docs", "infra"):
        for path in [tree / file, *(tree / file).rglob("*")]:
            if path.is_file() and path.suffix in ("", ".md", ".yaml"):
                text = path.read_text()
                path.write_text(
                    text.replace("isthmus:0.1.0", "isthmus:99.0.0").replace("newTag: 0.1.0", "newTag: 99.0.0")
                )
    commit(tree)


def without_a_day(tree: Path) -> None:
    edit(tree / "CHANGELOG.md", r"\A(# Changelog\n\n## [\d.]+) \(.*\)", r"\1 (unreleased)")
    commit(tree)


def tagged(tree: Path) -> None:
    git(tree, "tag", "v" + version(tree))


def another_image(tree: Path) -> None:
    edit(tree / "infra/kubernetes/kustomization.yaml", r"newTag: .*", "newTag: 0.0.9")
    commit(tree)


def version(tree: Path) -> str:
    found: dict[str, str] = {}
    exec((tree / VERSION).read_text(), found)
    return found["__version__"]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (untracked, "?? pkg/isthmus/new.py: commit or remove what is not committed (1 in all)"),
        (changed, "M pkg/isthmus/version.py: commit or remove what is not committed (1 in all)"),
        (of_development, "{v}.dev0 is no release: write {v} into pkg/isthmus/version.py, and commit it"),
        (without_notes, "CHANGELOG.md says nothing of 99.0.0: write its section, «## 99.0.0 (YYYY-MM-DD)»"),
        (without_a_day, "CHANGELOG.md has {v} without its day: make the heading «## {v} (YYYY-MM-DD)»"),
        (tagged, "there is a tag v{v}: write the next version into pkg/isthmus/version.py"),
        (another_image, "infra/kubernetes/kustomization.yaml names 0.0.9, not {v}: correct it, and commit it"),
    ],
)
def test_what_is_not_ready_is_refused(spoil, said: str, ready: Path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    tree = tmp_path / "tree"
    git(ready, "clone", "--quiet", str(ready), str(tree))
    now = version(tree)
    spoil(tree)
    before = git(tree, "tag")
    done = release(tree)
    assert done.returncode == 1
    assert done.stderr == f"release: {said.format(v=now)}\n"
    assert git(tree, "tag") == before
    assert not (tree / "dist").exists()


def test_the_commit_is_tagged_with_the_changelogs_section(released: Path) -> None:
    tag = "v" + version(released)
    assert git(released, "cat-file", "-t", tag).strip() == "tag", "the tag must be annotated"
    assert git(released, "rev-parse", f"{tag}^{{commit}}") == git(released, "rev-parse", "HEAD")
    (notes,) = (released / "dist").glob("notes-*.md")
    said = git(released, "tag", "--list", "--format=%(contents)", tag)
    assert said.strip() == notes.read_text().strip()
    sections = (released / "CHANGELOG.md").read_text().split("\n## ")
    assert said.strip().endswith(sections[1].partition("\n")[2].strip())


def test_it_publishes_nothing_and_says_how_to(released: Path, ready: Path) -> None:
    assert git(ready, "tag") == "", "the original repository must not get the tag"
    said, v = (released / "dist/said").read_text(), version(released)
    assert f"git push origin v{v}" in said
    assert f"twine upload dist/isthmus-{v}-py3-none-any.whl dist/isthmus-{v}.tar.gz" in said


def test_it_is_released_once(released: Path) -> None:
    done = release(released)
    assert done.returncode == 1
    assert "there is a tag" in done.stderr

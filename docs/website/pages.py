"""The repository's own Markdown as pages of the site.

Pages stay where they are in the repository, where README and code link to them. On the site docs/ is the top, README
its first page, and what a page links to outside of docs/ (an example, a template) becomes a page that shows the file.
"""

import os
import posixpath
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

LINK = re.compile(r"(\]\()([^)\s]+)(\))")
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
FENCE = re.compile(r"\s*```")
FENCED = re.compile(r"^( *)(`{3,})[^\n]*\n.*?^\1\2 *$", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`[^`\n]+`")
NUMBERED = re.compile(r"(\d+\. )(.*)")
PICTURES = {".png", ".svg"}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".json": "json"}
SHOWN = "files/"
"""Where pages are that show a file of the repository."""


class LinkDead(Exception):
    """A page links to a file that is not in the repository."""


@dataclass
class Copied:
    """What the repository's own pages come to, by path below the site's top."""

    pages: dict[str, str] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)
    """Pictures."""


def sources(root: Path) -> dict[str, str]:
    """Return the repository's pages: path in the repository, and path on the site."""
    found = {"README.md": "index.md", "CHANGELOG.md": "CHANGELOG.md", "SECURITY.md": "SECURITY.md"}
    for place in sorted([*root.glob("docs/**/*.md"), *root.glob("infra/*/README.md")]):
        path = place.relative_to(root).as_posix()
        found[path] = path.removeprefix("docs/")
    return found


def copied(root: Path) -> Copied:
    """Return all of them with their links mended. Raises `LinkDead`."""
    out = Copied()
    places = sources(root)
    shown: dict[str, str] = {}
    for path, page in places.items():
        text = (root / path).read_text()

        def mend(link: str, path: str = path, page: str = page) -> str:
            if re.match(r"[a-z]+:|#", link):
                return link
            target, hash_, anchor = link.partition("#")
            target = posixpath.normpath(posixpath.join(posixpath.dirname(path), unquote(target)))
            if not (root / target).is_file():
                raise LinkDead(f"{path}: {link} leads to {target}, which is no file of the repository")
            if target in places:
                there = places[target]
            elif Path(target).suffix in PICTURES:
                there = target.removeprefix("docs/")
                out.files[there] = root / target
            else:
                there = shown[target] = f"{SHOWN}{target}.md"
            return os.path.relpath(there, posixpath.dirname(page) or ".") + hash_ + anchor

        out.pages[page] = "\n".join(_lines(text, mend)) + "\n"
    for target, page in shown.items():
        language = LANGUAGES.get(Path(target).suffix, "text")
        out.pages[page] = f"# {target}\n\n````{language}\n{(root / target).read_text().rstrip()}\n````\n"
    return out


def _lines(text: str, mend: Callable[[str], str]) -> Iterator[str]:
    """Yield a page's lines as Python-Markdown wants them: no comments, four spaces below a number, links mended."""
    text = COMMENT.sub(lambda found: "\n" * found[0].count("\n"), text)
    fenced = numbered = False
    for line in text.splitlines():
        if FENCE.match(line):
            fenced = not fenced
        mended = line if fenced else LINK.sub(lambda found: found[1] + mend(found[2]) + found[3], line)
        if not fenced and (found := NUMBERED.match(mended)):
            numbered = True
            yield f"{found[1]} {found[2]}"
            continue
        numbered = numbered and (not line or line.startswith("   "))
        yield f" {mended}" if numbered and line else mended

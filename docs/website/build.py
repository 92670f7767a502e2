"""From the repository to HTML: pages are written into a folder, and Zensical makes a site of them, strictly."""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from website import api, commands, metrics, pages, records

ROOT = Path(__file__).parents[2]

STYLE = Path(__file__).with_name("site.css")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")

WRITTEN = {
    "reference/commands.md": commands.commands_page,
    "reference/settings.md": commands.settings_page,
    "reference/metrics.md": metrics.page,
    "reference/records.md": records.page,
}
"""Pages that are written from what the code declares."""


class SiteInvalid(Exception):
    """A page links to nothing, or Zensical refused or warned."""


def build(into: Path) -> None:
    """Write the site into a folder, replacing it. Raises `SiteInvalid` and leaves the folder as it was."""
    with tempfile.TemporaryDirectory() as made:
        workspace = Path(made)
        write(workspace / "pages")
        shutil.copy(ROOT / "zensical.toml", workspace)
        command = [sys.executable, "-m", "zensical", "build", "--strict", "-f", str(workspace / "zensical.toml")]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            said = COLOUR.sub("", done.stdout + done.stderr).partition("Traceback")[0]
            raise SiteInvalid(f"zensical ended with {done.returncode}:\n{said}")
        shutil.rmtree(into, ignore_errors=True)
        shutil.copytree(workspace / "html", into)


def write(into: Path) -> None:
    """Write every page and picture into a folder. Raises `SiteInvalid` for a link to what is not there."""
    written = {path: page() for path, page in WRITTEN.items()} | api.pages()
    try:
        copied = pages.copied(ROOT)
    except pages.LinkDead as error:
        raise SiteInvalid(str(error)) from None
    for path, text in (written | copied.pages).items():
        place = into / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    for path, source in ({"site.css": STYLE} | copied.files).items():
        place = into / path
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, place)

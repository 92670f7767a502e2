"""The documentation site builds without warnings, has no dead links, and documents everything that is public."""

import argparse
import functools
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from isthmus.format.records.frame import Kind
from isthmus.runtime import metrics
from isthmus_services import main as cli
from isthmus_services.settings.command import installed
from isthmus_services.settings.resolve import fields
from website import api, build, pages
from website.build import ROOT, SiteInvalid

griffe = pytest.importorskip("griffe")


class Page(HTMLParser):
    """The anchors and links of an HTML page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.text = html
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" or (name == "name" and tag == "a"):
                self.anchors.add(value or "")
            elif name in ("href", "src") and value is not None:
                self.links.append(value)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Page]:
    """Every page of the site, by its path."""
    into = tmp_path_factory.mktemp("site") / "html"
    build.build(into)
    found = {p.relative_to(into).as_posix(): Page(p.read_text()) for p in into.rglob("*.html")}
    found[""] = Page("")
    found[""].links = [p.relative_to(into).as_posix() for p in into.rglob("*") if p.is_file()]
    return found


def external(link: str) -> bool:
    """Return whether a link leads to another site. Raises `AssertionError` for an invalid link."""
    parts = urlsplit(link)
    if parts.scheme in ("", "file"):
        assert not parts.netloc, link
        return False
    assert parts.scheme in ("https", "http", "mailto", "data"), link
    assert parts.scheme in ("mailto", "data") or re.fullmatch(r"[A-Za-z0-9.-]+(:\d+)?", parts.netloc), link
    return True


def dead(place: str, links: list[str], files: set[str], anchors: dict[str, set[str]]) -> Iterator[str]:
    """Yield a description of each dead link of a file."""
    for link in links:
        if external(link):
            continue
        target, _, anchor = unquote(link).partition("#")
        there = place if not target else (Path("/", place).parent / target).as_posix()
        there = str(Path("/", re.sub(r"/\./", "/", there)).resolve()).lstrip("/")
        there = f"{there}/index.html".lstrip("/") if f"{there}/index.html".lstrip("/") in files else there
        if there not in files:
            yield f"{place}: {link} leads to {there}, which is not there"
        elif anchor and there in anchors and anchor not in anchors[there]:
            yield f"{place}: {there} has no #{anchor}"


# --- links ------------------------------------------------------------------------------------------------------------


@pytest.mark.tier("all")
def test_no_link_of_the_site_is_dead(site: dict[str, Page]) -> None:
    files = set(site[""].links)
    anchors = {path: page.anchors for path, page in site.items()}
    wrong = [
        said
        for path, page in site.items()
        if path not in ("", "404.html")
        for said in dead(path, page.links, files, anchors)
    ]
    assert not wrong, "\n".join(wrong)


def slug(heading: str) -> str:
    """Return the anchor that a heading has on the repository's web page."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


def test_no_link_of_the_repositorys_markdown_is_dead() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    files = set(listed.stdout.splitlines())
    files |= {parent.as_posix() for path in files for parent in Path(path).parents}
    texts = {path: pages.FENCED.sub("", (ROOT / path).read_text()) for path in files if path.endswith(".md")}
    assert len(texts) > 25
    anchors = {
        path: Page(text).anchors | {slug(found[1]) for found in re.finditer(r"^#+ (.*)$", text, re.MULTILINE)}
        for path, text in texts.items()
    }
    wrong = [
        said
        for path, text in texts.items()
        for said in dead(path, [found[2] for found in pages.LINK.finditer(pages.CODE.sub("", text))], files, anchors)
    ]
    assert not wrong, "\n".join(wrong)


def test_a_link_to_what_is_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for name in ("README.md", "CHANGELOG.md", "SECURITY.md"):
        (tmp_path / name).write_text("# x\n")
    (tmp_path / "docs" / "a.md").write_text("[b](../examples/gone.py)\n")
    with pytest.raises(pages.LinkDead, match=r"docs/a.md: \.\./examples/gone.py leads to examples/gone.py"):
        pages.copied(tmp_path)


@pytest.mark.tier("all")
def test_a_page_that_the_builder_warns_of_is_no_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "WRITTEN", {"reference/metrics.md": lambda: "# Metrics\n\n[gone](gone.md)\n"})
    monkeypatch.setattr(api, "PUBLIC", {})
    (tmp_path / "site").mkdir()
    with pytest.raises(SiteInvalid, match=r"page does not exist[^a-z]*reference/metrics.md:3"):
        build.build(tmp_path / "site")
    assert (tmp_path / "site").is_dir()


# --- names ------------------------------------------------------------------------------------------------------------


def public_names() -> Iterator[Any]:
    """Yield the names that public modules and their classes define and do not hide."""
    package = griffe.load("isthmus")

    def within(room: Any) -> Iterator[Any]:
        for name, found in room.members.items():
            if found.is_alias or name.startswith("_") or name in api.HIDDEN:
                continue
            yield found
            if found.is_class:
                yield from within(found)

    for module in api.MODULES:
        room = package[module.removeprefix("isthmus.")]
        yield room
        yield from within(room)


def overrides(name: Any) -> bool:
    """Return whether a method overrides another one, whose docstring then applies."""
    return name.is_function and any(str(d.value).endswith("override") for d in name.decorators)


@functools.cache
def names() -> dict[str, Any]:
    """Return the public names by their paths."""
    return {name.path: name for name in public_names()}


@pytest.mark.tier("all")
def test_every_public_name_is_on_the_site(site: dict[str, Page]) -> None:
    shown = {path: page for path, page in site.items() if path.startswith("reference/python/")}
    anchors = set().union(*(page.anchors for page in shown.values()))
    assert len(names()) > 300
    assert sorted(names().keys() - anchors) == []


def test_every_public_name_says_what_it_is() -> None:
    """An attribute needs a docstring only if it has neither a type nor a value."""
    silent = [path for path, name in names().items() if not name.docstring and not name.is_attribute]
    assert [path for path in silent if not overrides(names()[path])] == []
    bare = [path for path, name in names().items() if name.is_attribute and not name.docstring]
    told = [names()[path] for path in bare]
    untold = [name.path for name in told if name.annotation is None and name.value is None]
    assert untold == [], "an attribute with neither type, value nor docstring"


def test_the_front_door_is_public() -> None:
    import isthmus

    home = {f"{getattr(isthmus, name).__module__}.{name}" for name in isthmus.__all__ if not name.startswith("__")}
    assert home <= names().keys()


def test_what_pages_and_examples_import_is_public() -> None:
    places = [*ROOT.glob("docs/*.md"), ROOT / "README.md", *ROOT.glob("examples/*.py")]
    found = defaultdict(set)
    for place in places:
        for module, listed in re.findall(
            r"^\s*from (isthmus\.[\w.]+) import ([\w, ]+)", place.read_text(), re.MULTILINE
        ):
            for name in listed.split(","):
                found[f"{module}.{name.strip()}"].add(place.name)
    assert found
    assert {name: places for name, places in found.items() if name not in names()} == {}


# --- generated pages --------------------------------------------------------------------------------------------------


def parser_of(command: str) -> argparse.ArgumentParser:
    """Return the parser of one command."""
    found = cli.parser()
    for word in command.split():
        found = next(action.choices[word] for action in found._actions if isinstance(action.choices, dict))
    return found


@pytest.mark.tier("all")
def test_every_flag_variable_and_metric_has_its_line(site: dict[str, Page]) -> None:
    commanded, settings = site["reference/commands.html"], site["reference/settings.html"]
    for command in installed()[0]:
        assert f"isthmus-{command.name.replace(' ', '-')}" in commanded.anchors
        _, _, section = commanded.text.partition(f'<h2 id="isthmus-{command.name.replace(" ", "-")}"')
        section, _, _ = section.partition("<h2 ")
        parser = parser_of(command.name)
        flags = {flag for action in parser._actions for flag in action.option_strings}
        for flag in flags - {"-h", "--help", "--config", "--show-settings"}:
            assert re.search(rf"<code>(-\w, )?{flag}[ ,<]", section), f"{command.name}: {flag}"
        for setting in fields(command.settings):
            assert setting.flag_only or f"<code>{setting.variable}</code>" in settings.text, setting.variable
    for metric in metrics.declared():
        assert f"<code>{metric.name}</code>" in site["reference/metrics.html"].text


@pytest.mark.tier("all")
def test_every_kind_of_record_and_every_field_has_its_line(site: dict[str, Page]) -> None:
    text = site["reference/records.html"].text
    from website.records import HEADERS

    assert set(HEADERS) == set(Kind)
    for structs in HEADERS.values():
        for struct in structs:
            for field in struct.__struct_fields__:
                assert f"<code>{field}</code>" in text, f"{struct.__name__}.{field}"

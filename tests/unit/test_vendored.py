"""The board's third-party files are as they were published, each has its licence, and the page loads no others."""

import hashlib
import re

from isthmus_services.board.server import SCRIPTS, STATIC, STYLES, index

VENDOR = STATIC / "vendor"

PUBLISHED = {
    "htm-preact.umd.js": "62c4ffea400078c0eda7f435b22726b4961ebdf74c8506f188e92bec41d8ac51",
    "uPlot.iife.min.js": "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f",
    "uPlot.min.css": "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04",
    "htm.LICENSE": "740725f7252e750af735d0028cc534970772f513331e9f68150fede8fb3ce00f",
    "preact.LICENSE": "1fe6958409c8c257a70c587a18b6f7f412b179b456630790d30b2ec9a8e4b7d4",
    "uPlot.LICENSE": "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd",
}
"""SHA-256 of each file as published on npm."""


def test_vendored_files_are_those_that_were_published() -> None:
    found = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in VENDOR.iterdir() if p.name != "README.md"}
    assert found == PUBLISHED


def test_each_has_its_licence_and_its_row_in_the_table() -> None:
    table = (VENDOR / "README.md").read_text()
    rows = {
        row[0].strip("`"): row for row in re.findall(r"^\| (\S+) \| (\S+) \| (\S+) \| (.+) \| `(\S+)` \|$", table, re.M)
    }
    assert rows.keys() == {name for name in PUBLISHED if not name.endswith(".LICENSE")}
    for row in rows.values():
        for licence in re.findall(r"`(\w+\.LICENSE)`", row[3]):
            assert (VENDOR / licence).stat().st_size > 500
    named = {name for row in rows.values() for name in re.findall(r"`(\w+\.LICENSE)`", row[3])}
    assert named == {name for name in PUBLISHED if name.endswith(".LICENSE")}


def test_the_page_asks_for_files_that_are_there_and_for_nothing_else() -> None:
    asked = re.findall(r'(?:src|href)="([^"]+)"', index())
    assert asked == ["/static/icon.svg", *(f"/static/{name}" for name in (*STYLES, *SCRIPTS))]
    ours = {p.name for p in STATIC.glob("*.js")} | {p.name for p in STATIC.glob("*.css")}
    assert ours == {name for name in (*SCRIPTS, *STYLES) if "/" not in name}, "each of our files is used"
    for name in (*SCRIPTS, *STYLES):
        text = (STATIC / name).read_text(encoding="utf-8")
        assert "</script" not in text.lower(), f"{name} would end the element it is put into by --export"
        if "vendor" not in name:
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|dangerouslySet|\beval\(", text
            ), name

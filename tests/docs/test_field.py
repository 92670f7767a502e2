"""The figures in docs/field.md are those that `isthmus bench peers` recorded."""

import json
import re

from support.docs_blocks import ROOT

ROWS = {row["case"]: row for row in json.loads((ROOT / "docs" / "results" / "bench-peers.json").read_text())["rows"]}
PAGE = (ROOT / "docs" / "field.md").read_text()


def number(cell: str) -> float:
    return float(cell.replace(",", "").removesuffix(" ms"))


def test_each_row_of_the_table_is_a_recorded_one() -> None:
    table = re.findall(r"^\| (.*; \w+) \| ([\d, ms.]+) \| ([\d, ms.]+) \| ([\d.]+) \|$", PAGE, re.MULTILINE)
    assert len(table) == 7
    for case, ours, theirs, ratio in table:
        row = ROWS[case]
        assert (number(ours), number(theirs)) == (round(row["value"]), round(row["limit"])), case
        assert number(ratio) == round(row["ratio"], 2), case


def test_what_is_said_of_a_coordinator_that_is_away_was_recorded() -> None:
    kept = {
        who: ROWS[f"{who}: useful tokens, the coordinator 8 s away and 8 s back, of calm"]
        for who in ("isthmus", "torchft")
    }
    assert f"keep {kept['isthmus']['value']:.2f} of their useful tokens, and torchft's none" in PAGE
    assert kept["torchft"]["value"] == 0


def test_every_source_names_a_commit_and_every_note_is_used() -> None:
    notes = dict(re.findall(r"^\[\^(\w+)\]: (.*)$", PAGE, re.MULTILINE))
    assert len(notes) == 8
    for name, note in notes.items():
        assert PAGE.count(f"[^{name}]") >= 2, name
        for repository, version in re.findall(r"https://github.com/([\w.-]+/[\w.-]+)/(?:blob|tree)/(\w+)/", note):
            assert re.fullmatch(r"[0-9a-f]{40}", version), f"{repository}: {version}"

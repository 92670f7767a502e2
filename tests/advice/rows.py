"""The table of sentences that the tools can say. Each row is the decorator of the test that follows its advice.

`PYTHONPATH=tests python -m advice.rows` prints the table as the page docs/when-it-rings.md. A sentence whose advice no
test follows is therefore not on the page; `test_every_sentence.py` fails for one that a tool can say and no row has.
"""

import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

A_GAP = (
    "about 1 % of the tokens of a gap of a minute (in simulated ones at most 6 %), and less of a longer one; but an update counts "
    "for at most four times the usual length, however many steps it holds"
)
"""What is lost while nothing is merged (`tests/simulation/test_outages.py`): the work on a base whose merge no learner
heard of, and the work that a learner does after its update that is the first to be merged."""

TOOLS = {
    "status": "`isthmus status`, and the board's warnings of the present",
    "board": "The board",
    "doctor": "`isthmus doctor`",
    "heal": "`isthmus heal`",
    "gc": "`isthmus gc`",
    "replay": "`isthmus replay`",
    "log": "The logs of learners and syncers",
    "promote": "`isthmus promote`, and followers of promoted versions",
    "alert": "Alerts",
}
"""What says a sentence, in the order of the page, and the title of its part."""

GAP = "…"
"""Stands in a sentence for what varies."""


@dataclass(frozen=True)
class Row:
    """A sentence, and what to do about it."""

    tool: str
    """One of `TOOLS`."""
    said: str
    """The sentence as the tool prints it; `GAP` for what varies."""
    means: str
    do: str
    """The advice as the tool prints it, in full, or where the tool gives none what the page advises."""
    then: str
    """What you then see."""
    like: str = ""
    """What else looks the same, and how to tell it apart; empty if nothing does."""
    lost: str = "nothing"
    """What is lost for good."""

    def is_in(self, text: str) -> bool:
        """Return whether a text has the sentence, whatever its line breaks."""
        return pattern(self.said).search(_one_line(text)) is not None

    def advice_is_in(self, text: str) -> bool:
        """Return whether a text has the advice, whatever its line breaks. A signed run's commands have keys besides."""
        return any(pattern(self.do).search(_one_line(one)) for one in (text, unkeyed(text)))


def row(tool: str, said: str, **more: str) -> Callable[[F], F]:
    """Decorate the test that breaks a thing, follows the advice as printed, and sees it work. Rows may be stacked."""
    if tool not in TOOLS:
        raise ValueError(f"{tool} is not one of {', '.join(TOOLS)}")
    made = Row(tool, said, **more)

    def mark(test: F) -> F:
        test.__dict__["rows"] = (made, *test.__dict__.get("rows", ()))
        return test

    return mark


def pattern(sentence: str) -> re.Pattern[str]:
    """Return the pattern of a sentence with gaps."""
    return re.compile(".+?".join(map(re.escape, _one_line(sentence).split(GAP))))


def unkeyed(text: str) -> str:
    """Return a text without the flags for keys that commands have in a signed run; the page says it of all rows."""
    return re.sub(r"\s--key\s\w+_KEY_FILE\b", "", text)


def _one_line(text: str) -> str:
    return " ".join(text.split())


@cache
def rows() -> Sequence[Row]:
    """Return all rows: the tools in the order of the page, and within each the order of the tests."""
    found = list[Row]()
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        for thing in vars(importlib.import_module(f"advice.{path.stem}")).values():
            found += getattr(thing, "__dict__", {}).get("rows", ())
    return sorted(found, key=lambda r: list(TOOLS).index(r.tool))


HEAD = """\
# When it rings

<!-- printed by tests/advice/rows.py: PYTHONPATH=tests python -m advice.rows; tests/advice compares -->

Each sentence that a tool can say, with what to do. Search this page for two or three words in a row of what you see: …
stands for a name, a number or an address, and for words such as «is» or «are» that go by the number of names. A tool says
the worst first, and causes before effects: begin with its first line. A test breaks the thing, follows the advice as it is
printed, and looks whether it worked (`tests/advice`).

The parts of the page are status (with what the board says of the present), the board, the doctor, heal, gc, replay, the logs
of learners and syncers, promote, and the alerts.

If each participant has a folder of its own (`isthmus create`), load its `env` before a command: the reader's for `status`,
`board`, `explain`, `replay`, `export` and `heal`; a syncer's for `syncer` and `heal --apply`; the collector's for `gc`; the
owner's for `members`; and for `doctor`, that of the participant in trouble. Without such folders, any shell will do.

In a signed run, what needs a key is printed with `--key SYNCER_KEY_FILE`, `--key COLLECTOR_KEY_FILE` and the like: put there
the private key of a member in that role (`OWNER_KEY_FILE`: of the run's owner). Where you have loaded the `env` of that
role's folder, leave `--key` out: the `env` names the key.

You have minutes: learners go on training by themselves, and the store keeps every merged update. But what waits to be
merged for longer [counts for less](your-loop.md#at-the-end): so the rows say what a gap in the merging loses.
"""


def page() -> str:
    """Return the page."""
    parts = [HEAD]
    for tool, title in TOOLS.items():
        mine = [r for r in rows() if r.tool == tool]
        if not mine:
            continue
        parts.append(f"## {title}\n")
        for r in mine:
            parts.append(f"### {r.said}\n")
            lines = [("What it means", r.means), ("Looks the same", r.like), ("Do", r.do), ("Then", r.then)]
            lines.append(("Lost", r.lost))
            parts.append("\n".join(f"- **{name}**: {text}" for name, text in lines if text) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")

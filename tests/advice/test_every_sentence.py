"""The page holds what the tests follow, and the tests follow what the tools can say."""

import ast
import re
from pathlib import Path

import pytest
import yaml

from advice.rows import GAP, page, rows
from isthmus.reasons import REMEDIES, Reason

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/when-it-rings.md"
LEAST_WORDS = 4
"""A text with fewer words is a part of a sentence."""

SPOKEN = {
    "pkg/isthmus/inspect/health_summary.py": "status",
    "services/isthmus_services/board/history/warnings.py": "board",
    "pkg/isthmus/log/heal.py": "heal",
    "pkg/isthmus/log/holes.py": "heal",  # and status
    "services/isthmus_services/commands/heal.py": "heal",
    "pkg/isthmus/log/gc.py": "gc",
    "services/isthmus_services/commands/gc.py": "gc",
    "services/isthmus_services/commands/promote.py": "promote",
}
"""The modules that make sentences, and the tool that says them."""

NOT_IN_STATUS = {
    # Status believes a learner's messages no more than a syncer does: of these, the learner's own log speaks.
    Reason.UNSIGNED,
    Reason.BAD_SIGNATURE,
    Reason.NOT_A_MEMBER,
    # The alert IsthmusTwoHistories has a row.
    Reason.OTHER_HISTORY,
    # A commit lists it only beside work of other learners that is merged; alone, `no update is merged` is said.
    Reason.UNKNOWN_BASE,
}
"""Reasons for which status never says that every update is rejected."""

PLAIN = {
    "status": {"… more fragments are damaged, too", "the log of 1 more fragment is"},
    "heal": {
        # The doctor and gc say this, and have rows.
        "isthmus heal … says what can be done (run it as the reader, and with --apply as a syncer)",
        "read: commits, the updates merged since the newest snapshots, and the newest … values; not read: checkpoints, and "
        "older updates, values and snapshots. Syncers go on without these; isthmus replay … reads all but checkpoints",
        "the log of fragment … is damaged: …",  # status says it, and has rows
        "with a hole in its history (the run goes on)",
        "cannot be healed: …",  # the row of each reason begins with it
        "that cannot be folded",  # in the last line
        "with an object missing that a syncer can make again",  # in the last line
        "is not what version … published: …",  # in place of `is missing, and version … published it`
        "healed: version … restarts from version … as published",  # what the rows say that you then see
        "is listed, and the store does not give it out",  # a store that contradicts itself; no advice is known
        "nothing to heal, or nothing to heal it from",  # an assertion
        "no published value can be read: …; …",
    },
    "gc": {
        "commits to pack: … into … segments",
        "foldable afterwards: from version …",
        "kept besides: what the newest promoted version, …, is folded from",
        "… objects deleted, … bytes; … commits packed",
        "no checkpoint of …",
        "… objects with messages are kept: each goes a day after the last message of its process, whose end `isthmus status` "
        "reads there",
    },
    "promote": {
        "name the promoter: --name NAME (or --list, to look at the promotions)",
        "not promoted: version … is older than version …, which promotion … promoted",
        "promoted: version … of …, as promotion …, by …: … …",
        "the newest promoted version is: …",
        "version … is promoted already: promotion …, by …",
        "version …: not every fragment has it yet (isthmus status …)",
        "… is no promoter of this run's charter: … may promote",
        "…: nothing can be promoted, since this run has no charter with a gate (isthmus charter propose)",
        ", and is newer than the promoted version …",  # in the sentence that has a row
    },
}
"""Texts that report no problem, by tool, and parts of sentences that have rows."""


def test_the_page_is_the_table() -> None:
    assert page() == PAGE.read_text(), "PYTHONPATH=tests python -m advice.rows > docs/when-it-rings.md"


def test_no_sentence_is_there_twice() -> None:
    sentences = [(r.tool, r.said) for r in rows()]
    assert len(sentences) == len(set(sentences))


def texts(path: Path) -> set[str]:
    """Return the texts of a module that are not documentation, with `GAP` for what varies."""
    tree = ast.parse(path.read_text())
    documentation = {
        id(body[0].value)
        for node in ast.walk(tree)
        if isinstance(body := getattr(node, "body", None), list) and body and isinstance(body[0], ast.Expr)
    }
    documentation |= {
        id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)
    }
    parts = {id(v) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for v in node.values}
    found = set[str]()
    for node in ast.walk(tree):
        if id(node) in documentation or id(node) in parts:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            found.add("".join(str(v.value) if isinstance(v, ast.Constant) else GAP for v in node.values))
    return {text for text in found if len(re.findall(r"[A-Za-z]{2,}", text)) >= LEAST_WORDS}


def words(text: str) -> str:
    """Return a text as its words and gaps alone, so that quotes, marks and line breaks do not count.

    Gaps beside each other are one: the time to find a text grows with the power of their number.
    """
    found = " ".join(re.findall(rf"[\w-]+|{GAP}", re.sub("%[sd]", GAP, text)))
    return re.sub(rf"{GAP}( {GAP})+", GAP, found)


def said_by(tool: str) -> list[str]:
    """Return what the rows of a tool say, advice included."""
    return [words(f"{r.said} {r.do}") for r in rows() if r.tool == tool]


@pytest.mark.parametrize("module", sorted(SPOKEN))
def test_every_sentence_has_a_row(module: str) -> None:
    tool = SPOKEN[module]
    known = said_by(tool) + [words(text) for text in PLAIN.get(tool, ())]
    missing = [text for text in texts(ROOT / module) if not any(_fits(words(text), row) for row in known)]
    assert not missing, f"give each a row in tests/advice/test_{tool}.py"


def _fits(text: str, row: str) -> bool:
    """Return whether a row has a text. Either may have gaps where the other has words."""
    return _pattern(text).search(row) is not None


def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(".*?".join(map(re.escape, text.split(f"{GAP}"))).replace(r"\ .*?\ ", r"\ ?.*?\ ?"))


def test_every_alert_has_a_row() -> None:
    (group,) = yaml.safe_load((ROOT / "infra/prometheus/alerts.yaml").read_text())["groups"]
    known = {r.said.partition(":")[0] for r in rows() if r.tool == "alert"}
    assert known == {rule["alert"] for rule in group["rules"]}


def test_every_remedy_of_a_rejection_has_a_row() -> None:
    known = said_by("status")
    missing = {r for r, remedy in REMEDIES.items() if not any(words(remedy) in row for row in known)}
    assert missing == NOT_IN_STATUS

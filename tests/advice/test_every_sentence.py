"""The page holds what the tests follow, and the tests follow what the tools can say."""

import ast
import re
from pathlib import Path

import pytest
import yaml

from advice import findings
from advice.findings import Reader
from advice.rows import GAP, page, rows
from isthmus.log import holes, log_health
from isthmus.reasons import REMEDIES, Reason

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/when-it-rings.md"
LEAST_WORDS = 4
"""A text with fewer words is a part of a sentence."""

SPOKEN = {
    "pkg/isthmus/inspect/health_summary.py": "status",
    "pkg/isthmus/inspect/learner_problems.py": "status",
    "services/isthmus_services/board/history/warnings.py": "board",
    "pkg/isthmus/log/heal.py": "heal",
    "pkg/isthmus/log/holes.py": "heal",  # and status
    "services/isthmus_services/commands/heal.py": "heal",
    "pkg/isthmus/log/gc.py": "gc",
    "services/isthmus_services/commands/gc.py": "gc",
    "services/isthmus_services/commands/promote.py": "promote",
    "pkg/isthmus/log/log_health.py": "status",
    "pkg/isthmus/inspect/bursts.py": "status",
    "services/isthmus_services/output/view.py": "status",
    "services/isthmus_services/commands/replay.py": "replay",
    "pkg/isthmus/learner/summary.py": "log",
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
    "status": {
        "… more fragments are damaged, too",
        "the log of 1 more fragment is",
        "cut to … of its length",  # in the sentence that has a row
        "check that … is reachable",  # where the error of the bus does not say it
        "the newest commits cannot be read",  # beside the sentence that says why, and has a row
        # In the lines of the tables, below the sentences with rows that say the same with what to do.
        "is slow to read",
        "syncer … … fragment …: see its log",
        "syncer … finds that fragment … has …: see its log",
        "syncer … cannot serve for now: other syncers take over its fragments",
        "…; … left with tokens that are too old by now to be merged",  # nothing is left to be done
        # Figures.
        "tokens rejected: … of …, in rejected updates or sent after a shorter update on the same base was merged",
        "of the newest … tokens, as far back as the bus has messages: rejected …, lost …",
        "syncer …: …, … … of … fragments…, … commits since its start, loop lag … ms…",
        "usual: another update of its learner was merged before it",
        "usual: a newer update of its learner was in the round",
        "(an update may have several reasons)",
        "in … of them (isthmus board reads all)",
        ", … of them beyond a checkpoint and trained again",
        "ledger of …: … tokens processed…",
        ", participation … and … updates merged…",
        "; not among these, since not heard here: …",
        "… commits…; learners, tokens and bytes are not known without the bus",
        "… commits, … of … learners here…, … tokens: …, as heard … MB up, … MB down, … MB of checkpoints…",
    },
    "replay": {
        "and … more such updates",
        "… compares those after the next snapshot",  # at the end of a row's advice, if there is one
        "isthmus replay … --fragment … --from …",
        "fragment …: from version … on; earlier versions were collected",
        "from versions … on; earlier versions were collected",
        # In the last line; each has a line above it.
        ", … were made under a replaced membership",
        ", … cannot be verified (healed)",
        ", … have weights that are not verified",
        ", … after these were not compared",
        "timeline of … commits in …: open it in https://ui.perfetto.dev",
        # Of flags, and under other rules (docs/replaying.md).
        "--exec compares the losses of two whole models: add --set or --merge, leave --fragment out",
        "--exec is empty: give a command",
        "--set and --merge fold from the beginning: leave --from and --trace out",
        "--export writes the whole model at its newest versions: leave --fragment and --to out",
        "--export and --plot need --set or --merge; to export the recorded model, use isthmus export",
        "at the last versions this says little: the updates were made for the recorded model, from which the other one has "
        "drifted; compare at an early version: --to …",
        "for the held-out losses of both models at version …: … (for another model than the demo's, give a command that prints "
        "the loss of the model in $ISTHMUS_CUT_DIR)",
        "held-out loss at …: … as recorded, … with … (…)",
        "held-out losses: not known, since the command's last word was no number, or it failed",
        "python -m isthmus.demo.evaluate",
        "relative: the difference as a share of how far the recorded run had moved from its start; it says how far apart the "
        "two models are, not which one is better updates are taken as recorded, from their original bases: under these rules, "
        "learners would have trained differently",
        "the function merges in place of all rules, at the recorded outer rate and momentum unless --set changes them; the lab "
        "gives it those of RDA, and another outer step can reverse which rule is better: for the lab's, add --set outer.lr=… --set "
        "outer.momentum=… …",
        "at RDA's outer rate and momentum, as in the lab",
        "cosine between the two",
        "difference between the two",
        "distance of the recorded run from its start",
        "norm of the published values",
    },
    "log": {
        "the bus does not answer",  # of a trouble's text, which a summary looks for
        # A part of the figures of a summary, without anything to do.
        "sent after a version had a shorter update of them, or in an update that was rejected",
        "…: … steps in ……; its model is at …",
        "…; of its … tokens ……; the model: isthmus export … -o model.safetensors",
        ", … over all its incarnations",
        "(of all its incarnations)",
        "; so few versions say little about merging (the first ones overshoot): judge the run's model once its fragments were "
        "merged … times or more",
        "that goes on when this learner comes back (if the others have merged newer versions by then, it is overwritten)",
        "; OF WHAT WAS NOT MERGED, ALL AFTER STEP … IS LOST: no checkpoint of later steps was stored",
        "its rounds were open",
        "trained since it was last sent",
        # The page on loops of one's own explains it.
        "; versions overwrite much, as they come many steps after the work they contain: keep it with join(adopt='carry') or "
        "--adopt carry, or create the next run with a larger sync_every",
        # Nothing is left to be done.
        "…; NONE OF ITS WORK WAS MERGED: … of its tokens came after the run had gone on without it, and are lost; what it trains "
        "from now on is merged",
        # Of a learner that was expelled: status has a row.
        "…; NONE OF ITS WORK WAS MERGED, nor will it be: …",
        "; …: WHAT WAS NOT MERGED BEFORE THAT IS NOT IN THE MODEL, and is not merged later",
    },
    "heal": {
        # Of status and the doctor: heal has its own advice in its place.
        "… isthmus heal names what is to be deleted, and the run goes on from the version before",
        "Updates of … rest on it.",  # in a sentence that has a row
        # Status, the doctor and gc say these, and have rows.
        "nothing else is to be done; without a backup, isthmus heal … says which flags accept it as lost",
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
        "…. isthmus heal goes on saying this until these learners have joined again, or the fragment has moved past version …",  # after a row's advice
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
        "promotion … does not rest on: …",
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


def damage() -> set[str]:
    """Return what a look at a log can find to be damaged: the texts of the errors that its modules raise."""
    found = set[str]()
    for module in (holes, log_health):
        tree = ast.parse(Path(module.__file__ or "").read_text())
        constants = {n: frozenset([v]) for n, v in vars(holes).items() if n.isupper() and isinstance(v, str)}
        reader = Reader(tree, constants)
        for function in reader.functions.values():
            for call in ast.walk(function):
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "LogCorrupt":
                    found |= reader.texts(call.args[1], function)
    return {text.replace(findings.GAP, GAP) for text in found if len(text.split()) >= LEAST_WORDS}


def test_all_damage_that_a_look_can_find_has_a_row() -> None:
    """What stands before it says only whether the run goes on: each text needs a row of its own."""
    contradiction = "is listed, and the store does not give it out"
    missing = [text for text in damage() if not any(_fits(words(text), row) for row in said_by("status"))]
    assert missing == [contradiction], "give each a row in tests/advice/test_status_*.py"


SAME_TOOL = {
    "isthmus status --json",
    "isthmus board RUN --bus URL",
    "isthmus board again",
    "isthmus heal again",
    "isthmus replay … --fragment … --from … --to …",
    "isthmus promote … --list names its author",
}
"""Advice to run the command that gave it once more, in another way, or after something was mended."""


def test_no_tool_sends_its_reader_to_itself() -> None:
    found = {m[0].replace("`", "") for r in rows() for m in re.finditer(rf"isthmus {r.tool}\b[^;:.,)]*", r.do)}
    assert {said for said in found if not said.startswith(tuple(SAME_TOOL))} == set()


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

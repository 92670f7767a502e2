"""Every command in README and docs/ is run by a test or says why not, and the parser accepts each `isthmus` line."""

import contextlib
import functools
import io
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from isthmus.errors import InputError
from isthmus_lab.commands import settings_classes
from isthmus_lab.commands.simulate import training
from isthmus_lab.training.experiments import EXPERIMENTS, chosen
from isthmus_services import main as cli
from isthmus_services.settings import resolve
from isthmus_services.settings.command import names
from support.docs_blocks import ENDS_WITH_1, ROOT, Block, blocks
from website import pages

EXECUTED = {
    "docs/consortium.md": "test_consortium.py",
    "docs/tutorial.md": "test_tutorial.py",
    "docs/replaying.md": "test_replaying.py",
    "docs/own-rule.md": "test_own_rule.py",
}
"""Pages that a test runs from top to bottom, with that test."""

PAGES = [path for path in pages.sources(ROOT) if path != "CHANGELOG.md"]
BLOCKS = [block for path in PAGES for block in blocks(path) if block.commands]
GIVEN = {"ISTHMUS_RUN": "s3://bucket/run", "ISTHMUS_BUS": "redis://host", "ISTHMUS_LEARNER": "eu-1"}
"""Settings that a page may leave to the environment or to a file."""


@pytest.fixture(autouse=True)
def one_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """Create the parser only once, not for each of about a hundred lines."""
    with_all_flags = functools.cache(cli.parser)
    monkeypatch.setattr(cli, "parser", lambda _words=None: with_all_flags())


def said_of(block: Block) -> str:
    """Return what is wrong with a block's mark, or an empty string."""
    kind, _, rest = block.mark.partition(" by ") if block.mark.startswith("run by ") else block.mark.partition(": ")
    if block.page in EXECUTED and kind in ("", "in a terminal of its own", ENDS_WITH_1):
        return ""
    if kind in ("not run", "not run on this page"):
        if block.page in EXECUTED and kind == "not run on this page":
            return f"{block.where}: «{kind}» on a page that a test runs: write «not run» above the one block"
        return "" if rest else f"{block.where}: «{kind}» without a reason"
    if kind != "run":
        return f"{block.where}: say above the block which test runs it, or why none does (tests/support/docs_blocks.py)"
    texts = []
    for path in rest.split():
        if not (path.startswith("tests/") and (ROOT / path).is_file()):
            return f"{block.where}: {path} is no test"
        texts.append((ROOT / path).read_text())
    names = [words[1] for words in block.commands if words[0] == "isthmus"]
    missing = [name for name in names if not re.search(rf'"{name}"|isthmus {name}\b', "".join(texts))]
    return f"{block.where}: {rest} does not run {', '.join(missing)}" if missing else ""


def test_every_command_is_run_or_says_why_not() -> None:
    assert len(BLOCKS) > 60
    wrong = [said for block in BLOCKS if (said := said_of(block))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", EXECUTED)
def test_an_executed_page_is_run_by_its_test(page: str) -> None:
    assert f'"{page}"' in (Path(__file__).parent / EXECUTED[page]).read_text()


@pytest.mark.parametrize(
    ("mark", "wrong"),
    [
        ("", "say above the block which test runs it"),
        ("not run: ", "without a reason"),
        ("run by tests/e2e/test_gone.py", "is no test"),
        ("run by tests/unit/test_reach.py", "does not run heal"),
        ("run by tests/integration/test_heal.py tests/e2e/test_gone.py", "is no test"),
        ("in a terminal of its own", "say above the block"),
    ],
)
def test_a_mark_that_says_nothing_is_refused(mark: str, wrong: str) -> None:
    assert wrong in said_of(Block("docs/x.md", 1, "", "", mark, "isthmus heal RUN\n"))


# --- lines of isthmus and make ----------------------------------------------------------------------------------------


def refusal(words: list[str]) -> str:
    """Return the error of the command line for these words, or an empty string."""
    err = io.StringIO()
    try:
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(err):
            arguments = cli.parsed(words)
        command = arguments.command
        found = resolve.resolve(command.settings, command.name, arguments, GIVEN, names).values
        if isinstance(found, settings_classes.Training) and found.experiment in EXPERIMENTS:
            training.matching(chosen(found.experiment, found.scale, found.steps), found.only, found.experiment)
    except SystemExit as error:
        return err.getvalue() if error.code else ""
    except InputError as error:
        return str(error)
    return ""


def test_the_parser_takes_every_line_of_isthmus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in GIVEN.items():
        monkeypatch.setenv(name, value)
    lines = [(block, words[1:]) for block in BLOCKS for words in block.commands if words[0] == "isthmus"]
    assert len(lines) > 80
    wrong = [
        f"{block.where}: isthmus {shlex.join(words)}: {said}" for block, words in lines if (said := refusal(words))
    ]
    assert not wrong, "\n".join(wrong)


def known(words: list[str]) -> str:
    """Return the unknown command or flags among these words, or an empty string. Arguments may be missing."""
    parser = cli.parser()
    while words and (inner := next((a.choices for a in parser._actions if isinstance(a.choices, dict)), None)):
        if words[0] not in inner:
            return f"there is no command {words[0]}"
        parser, words = inner[words[0]], words[1:]
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    return ", ".join(f"there is no flag {flag}" for flag in flags if flag not in parser._option_string_actions)


def test_commands_and_flags_in_the_middle_of_a_line_are_there() -> None:
    spans = [
        (path, span)
        for path in PAGES
        for span in re.findall(r"`isthmus ([a-z][^`]*)`", pages.FENCED.sub("", (ROOT / path).read_text()))
    ]
    assert len(spans) > 50
    wrong = [
        f"{path}: isthmus {span}: {said}" for path, span in spans if (said := known(span.replace(":", " ").split()))
    ]
    assert not wrong, "\n".join(wrong)
    assert known(["gc", "RUN", "--applye"]) == "there is no flag --applye"
    assert known(["simulate", "trainings"]) == "there is no command trainings"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("replay RUN --sett merge=avg", "there is no flag --sett: did you mean --set?"),
        ("replya RUN", "did you mean replay?"),
        ("syncer RUN --quorum 0", "must be at least 1"),
        ("learner RUN --steps many", "--steps many"),
        ("simulate training parity --only 'M = 2: RDA, inner rate 3'", "has no setting with such a name"),
    ],
)
def test_a_line_that_the_command_would_refuse_is_found(line: str, said: str) -> None:
    assert said in refusal(shlex.split(line))


def test_every_target_of_make_is_there() -> None:
    named = {target for block in BLOCKS for words in block.commands if words[0] == "make" for target in targets(words)}
    for path in PAGES:
        for span in re.findall(r"`make ([^`]+)`", (ROOT / path).read_text()):
            named |= targets(["make", *shlex.split(span)])
    assert {"demo", "site"} <= named
    for target in sorted(named):
        command = ["make", "-n", target]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"make {target}: {done.stderr}"


def targets(words: list[str]) -> set[str]:
    """Return the targets in the words of a `make` command."""
    return {word for word in words[1:] if "=" not in word}

"""Run the commands that a tool prints, word for word, as a reader does who copies them."""

import asyncio
import contextlib
import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from advice.rows import Row, pattern, rows
from isthmus_services.main import main

VALUED = {
    "--accept-hole",
    "--bus",
    "--role",
    "--learner",
    "--fragment",
    "--keep",
    "--min-age",
    "--every",
    "-o",
    "--from",
    "--expect",
    "--quorum",
    "--key",
}
"""Flags whose next word is their value, whatever it looks like."""

ENDS = ".,;:)`"


def mine(test: Callable[..., object]) -> tuple[Row, ...]:
    """Return the rows of a test, in the order in which they are written."""
    found: tuple[Row, ...] = test.__dict__["rows"]
    return found


def commands_in(text: str) -> list[list[str]]:
    """Return the commands in a text, each as the words after `isthmus`.

    A command's words are flags, their values, places (anything with a slash) and numbers; any other word ends it.
    """
    found = []
    for after in re.split(r"\bisthmus (?=[a-z])", " ".join(text.split()))[1:]:
        first, *others = after.split(" ")
        words = [first.rstrip(ENDS)]
        for word in others if words[0] == first else ():
            bare = word.rstrip(ENDS)
            if not (bare.startswith("-") or "/" in bare or bare.isdigit() or words[-1] in VALUED):
                break
            words.append(bare)
            if bare != word:
                break
        found.append(words)
    return found


def command_in(text: str, name: str) -> list[str]:
    """Return the first command of this name in a text, with a place. Raises `AssertionError` if there is none."""
    found = [words for words in commands_in(text) if words[0] == name and len(words) > 1]
    assert found, f"no isthmus {name} in: {text}"
    return found[0]


def keyed(words: Sequence[str], files: Mapping[str, Path]) -> list[str]:
    """Return the words of a command with files in the place of words like SYNCER_KEY_FILE, by the role."""
    return [
        str(files[word.removesuffix("_KEY_FILE").lower()]) if word.endswith("_KEY_FILE") else word for word in words
    ]


def advises(row: Row, text: str) -> None:
    """Assert that a text has a row's sentence with its advice."""
    assert row.is_in(text), f"not said: {row.said}\nbut: {text}"
    assert row.advice_is_in(text), f"not advised: {row.do}\nbut: {text}"


def says(row: Row, text: str) -> bool:
    """Return whether a text has a row's sentence."""
    return pattern(row.said).search(" ".join(text.split())) is not None


async def isthmus(*words: str) -> tuple[int, str]:
    """Run a command to its end in a thread; return its exit code and what it printed.

    All that status says with what to do must have a row, also where a test asks for something else.
    """
    out = io.StringIO()

    def run() -> int:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            try:
                return main([*words])
            except SystemExit as ended:
                return int(ended.code or 0)

    code = await asyncio.to_thread(run)
    if words[0] == "status":
        # A line without advice begins the sentence of the next one.
        for begun, said, do in re.findall(r"(?:^(?!  → )(.*)\n)?^(.*)\n  → (.*)$", out.getvalue(), re.MULTILINE):
            whole = f"{begun} {said}: {do}"
            known = any(r.tool == "status" and r.is_in(whole) and r.advice_is_in(do) for r in rows())
            assert known, f"give it a row in tests/advice/test_status_*.py: {said}\n  → {do}"
    return code, out.getvalue()

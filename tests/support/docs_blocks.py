"""The code blocks of a page, the comments above them that say how they are run, and a shell that runs a page.

A comment directly above a block, which readers do not see, says how the block is run:

    <!-- not run: REASON -->            no test runs the block; its lines are parsed all the same
    <!-- run by tests/…/test_x.py -->   that file, or several, runs the same commands; arguments may differ
    <!-- in a terminal of its own -->   the block goes on while the rest of the page runs (executed pages)

`<!-- not run on this page: REASON -->` anywhere in a page applies to all its blocks.
"""

import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]

SHELL = {"", "sh"}
PROGRAMS = {
    *(".", "aws", "docker", "kubectl", "redis-server", "deploy"),
    *("export", "install", "kill", "mkdir", "sed"),
    *("isthmus", "make", "pip", "python", "torchrun"),
}
"""First words of a block of commands. Other blocks without a language are drawings, trees and files."""

ASSIGNMENT = re.compile(r"[A-Z_]+=\S*")
ENDS = {"&&", "||", "|", "&", ";"}
HANGS_S = 240.0
MARK = re.compile(r"<!-- (not run on this page: .+|not run: .+|run by (?P<path>\S+)|in a terminal of its own)( -->)")


@dataclass(frozen=True)
class Block:
    """A block of code."""

    page: str
    line: int
    language: str
    title: str
    mark: str
    """The text of the comment above it; empty if there is none."""
    text: str

    @property
    def where(self) -> str:
        """The page and line of the block, for messages."""
        return f"{self.page}:{self.line}"

    @property
    def lines(self) -> list[str]:
        """The lines of the block, without prompts; continued lines are joined."""
        whole = re.sub(r"\\\n\s*", " ", self.text)
        return [line.strip().removeprefix("$ ") for line in whole.splitlines() if line.strip()]

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command, without variables set for it; empty if this is no block of commands."""
        if self.language not in SHELL:
            return []
        found = [words for line in self.lines for words in commands(line)]
        return found if found and (found[0][0] in PROGRAMS or "()" in self.lines[0]) else []


def commands(line: str) -> Iterator[list[str]]:
    """Yield the words of each command in a line of shell."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.wordchars += "…$@:{}%,'«»<"
    try:
        words = list(lexer)
    except ValueError:  # a quotation continues in the next line
        words = line.split()
    one: list[str] = []
    for word in [*words, ";"]:
        if word in ENDS:
            if one:
                yield one
            one = []
        elif one or not ASSIGNMENT.fullmatch(word):
            one.append(word)


def blocks(path: str) -> list[Block]:
    """Return the code blocks of a page of the repository."""
    text = (ROOT / path).read_text()
    whole = re.search(r"<!-- (not run on this page: .+) -->", text)
    found, mark, end = [], "", -1
    for token in MarkdownIt("commonmark").parse(text):
        if token.type == "html_block" and token.map:
            said = re.fullmatch(r"<!-- (.*) -->\s*", token.content)
            mark, end = (said[1] if said else ""), token.map[1]
        elif token.type in ("fence", "code_block") and token.map:
            language, _, rest = token.info.partition(" ")
            title = re.search(r'title="(.*)"', rest)
            near = mark if token.map[0] - end <= 1 else ""
            found.append(
                Block(
                    path,
                    token.map[0] + 1,
                    language,
                    title[1] if title else "",
                    near or (whole[1] if whole else ""),
                    token.content,
                )
            )
    return found


ENDS_WITH_1 = "ends with 1 here"
"""The mark of a block whose command finds what the page is about."""


class Shell:
    """A folder in which the blocks of a page run one after the other, as in a terminal that stays open."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment
        self.said: dict[str, str] = {}
        """The output of each block, by the text of the block."""
        self._state = folder / ".state"
        self._state.touch()
        self._beside: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Shell":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._beside:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for process in self._beside:
            process.wait(HANGS_S)

    def page(self, path: str, was: str = "", now: str = "", only: str = "") -> None:
        """Run a page, with other words for some words if `was` is given; `only`: of the commands, blocks with this text.

        Raises `AssertionError` with the output if a block does not end with 0, or, with `ENDS_WITH_1`, with 1.
        """
        for found in blocks(path):
            block = replace(found, text=found.text.replace(was, now)) if was else found
            if not block.title and only not in block.text:
                continue
            if block.title:
                (self.folder / block.title).write_text(block.text)
            elif block.commands and block.mark == "in a terminal of its own":
                self._start(block)
            elif block.commands and block.mark in ("", ENDS_WITH_1):
                self._run(block)

    def _bash(self, text: str) -> list[str]:
        return ["bash", "-c", f"set -euo pipefail; . {self._state}\n{text}"]

    def _run(self, block: Block) -> None:
        command = self._bash(f"{block.text}\nexport -p >{self._state}")
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=HANGS_S, check=False
        )
        self.said[block.text] = done.stdout + done.stderr
        beside = "".join(f"--- beside it\n{path.read_text()}" for path in sorted(self.folder.glob(".beside-*")))
        assert done.returncode == int(block.mark == ENDS_WITH_1), (
            f"{block.where} ended with {done.returncode}\n{block.text}{done.stdout}{done.stderr}{beside}"
        )

    def _start(self, block: Block) -> None:
        """Start a block that goes on, and wait for its first output."""
        said = self.folder / f".beside-{len(self._beside)}"
        alone = len(block.commands) == 1  # then it replaces the shell, and ends as the shell is told to
        with said.open("wb") as out:
            process = subprocess.Popen(
                self._bash(f"{'exec ' * alone}{block.text}"), cwd=self.folder, env=self.environment, stdout=out, stderr=out,
                start_new_session=True,
            )  # fmt: skip
        self._beside.append(process)
        until = time.monotonic() + HANGS_S
        while not said.stat().st_size:
            assert process.poll() is None, f"{block.where} ended with {process.returncode}"
            assert time.monotonic() < until, f"{block.where} says nothing"
            time.sleep(0.05)

"""Run `isthmus doctor` as a user does, and compare what it prints with the rows of a test."""

import asyncio
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from advice.rows import Row, pattern
from isthmus.log.creation import create_run
from isthmus.runtime.clock import single_threaded
from isthmus.store import open_store
from isthmus_services.main import main
from support.world import seed_of

ACCEPT = "nothing else is to be done; without a backup, isthmus heal … says which flags accept it as lost"
HEAL = "isthmus heal … says what can be done (run it as the reader, and with --apply as a syncer)"
"""The advice for damage to the log, of the doctor and of gc."""

FREES = (
    "isthmus gc … --apply frees what the run does not need any more and is over an hour old. If that is not enough, "
    "isthmus gc … --apply --keep 8 keeps 8 versions in place of 64. In a young or small run both free little: enlarge the "
    "disk or the store while they run; or stop all learners and syncers of the run (what learners have trained since "
    "their last checkpoints is lost then: none can be stored), wait until they have ended, and isthmus gc … --apply "
    "--keep 8 --min-age 0 keeps no young objects either"
)
"""The advice for a store that is full."""

KEYED = FREES.replace("--apply", "--apply --key COLLECTOR_KEY_FILE")
"""The same in a signed run."""


@dataclass
class Doctor:
    """The doctor, and the rows of the test that runs it."""

    rows: Sequence[Row]
    capsys: pytest.CaptureFixture[str]
    printed: Mapping[str, str] = field(default_factory=dict)

    def only(self, *words: str) -> "Doctor":
        """Return this doctor with the rows whose sentences begin with these words."""
        return replace(self, rows=[r for r in self.rows if r.said.startswith(words)])

    def of(self, printed: Mapping[str, str]) -> "Doctor":
        """Return this doctor for texts that it printed in other processes, by the word that then stands for each."""
        return replace(self, printed=printed)

    def prints(self, *words: str) -> str:
        """Return what the doctor prints."""
        if self.printed:
            return self.printed[words[0]]
        self.capsys.readouterr()
        main(["doctor", *words, *(() if "--size" in words else ("--size", "0.02"))])
        return self.capsys.readouterr().out

    def finds(self, *words: str) -> str:
        """Assert that the doctor prints each row's sentence and below it the advice; return what it prints."""
        text = self.prints(*words)
        advice = dict(_findings(text))
        for r in self.rows:
            found = [sentence for sentence in advice if pattern(r.said).fullmatch(sentence)]
            assert found, f"{r.said}\nis not in\n{text}"
            assert any(pattern(r.do).fullmatch(advice[sentence]) for sentence in found), f"{r.do}\nis not in\n{text}"
        return text

    def finds_no_more(self, *words: str) -> str:
        """Assert that the doctor prints none of the rows' sentences; return what it prints."""
        text = self.prints(*words)
        for r in self.rows:
            assert not any(pattern(r.said).fullmatch(sentence) for sentence, _ in _findings(text)), text
        return text


def small_run(place: Path | str, *, make: bool = False) -> str:
    """Create a small run, which nobody has trained; return its URL. `make`: create its bucket as well."""

    async def create() -> None:
        runtime = single_threaded(0)
        async with open_store(str(place), runtime, make=make) as store:
            await create_run(store, runtime, seed_of())

    asyncio.run(create())
    return str(place)


def _findings(text: str) -> list[tuple[str, str]]:
    """Return the sentences about what is not well, without their outcomes, and the advice of each, without its arrow."""
    return re.findall(r"^(?:note|warning|failure) +(.*)\n +→ (.*)$", text, re.MULTILINE)


def does(text: str, command: str, **instead: str) -> int:
    """Run the `isthmus` command that begins with these words as it is printed in a text; return its exit code.

    `instead`: what a user puts in the place of words like FILE.
    """
    return main([instead.get(word, word) for word in printed(text, command)])


def printed(text: str, command: str) -> list[str]:
    """Return the words, after `isthmus`, of the command in a text that begins with these words."""
    found = re.search(rf"\bisthmus ({re.escape(command)}[^\n`;]*)", text)
    assert found, f"isthmus {command} is not in\n{text}"
    return shlex.split(re.split(r" (?:frees|deletes|says|lists|names) ", found[1])[0])


def settings(text: str, variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return the flags of Redis for settings that a text tells to start the server with: their names, and values."""
    for name, value in variables.items():
        assert f"{name} {value}" in text, f"{name} {value} is not in\n{text}"
    return tuple(word for name, value in variables.items() for word in (f"--{name}", value))

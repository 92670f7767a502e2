"""Finds command lines of `isthmus` in scripts and guides, and checks them with the program itself."""

import re
import shlex
from collections.abc import Iterable

import pytest

from isthmus_services.main import main


def command_lines(text: str) -> list[list[str]]:
    """Return the arguments of every `isthmus …` in a script or in a guide's indented blocks, commented out or not.

    A variable is replaced by its name in lower case.
    """
    found = []
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        line = re.sub(r"\$\{?(\w+)[^}\s\"]*\}?", lambda m: m[1].lower(), line)
        for match in re.finditer(r"(?:^(?:    |# )|command=\(|attend |again |&& |; |exec )\s*isthmus (.*)", line):
            words = shlex.shlex(match[1], posix=True, punctuation_chars=True)
            words.whitespace_split, words.commenters = True, "#"
            arguments = []
            for word in words:
                if set(word) <= set("();<>|&"):
                    break
                arguments.append(word)
            found.append(arguments)
    return found


def require_understood(lines: Iterable[list[str]]) -> None:
    """Pass each line through parser and settings. `--show-settings` makes the program stop before it does anything."""
    for arguments in lines:
        try:
            code = main([*arguments, "--show-settings"])
        except SystemExit as ended:
            pytest.fail(f"isthmus {' '.join(arguments)}: {ended.code}")
        assert code == 0, f"isthmus {' '.join(arguments)}"

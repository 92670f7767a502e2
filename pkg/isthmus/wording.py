"""Counts, lists and lengths of time in sentences, with nouns and verbs that agree with them."""

import itertools
from collections.abc import Iterable, Sequence

FROZEN = (
    "ps -o stat= -p PID (its first log line has it) says T if it is frozen (kill -CONT PID wakes it) and D if it waits "
    "for a disk"
)
"""What to type beside a process that is silent, but alive."""


def an(noun: str) -> str:
    """Return a noun after its article: `a syncer`, `an owner`, and `a unit`, by its sound."""
    vowel = noun[:1].lower() in "aeiou" and not noun.lower().startswith(("uni", "use", "uint", "eu", "one"))
    return f"{'an' if vowel else 'a'} {noun}"


def counted(count: int, what: str) -> str:
    """Return a count and its noun, in the plural unless the count is one."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def agreeing(count: int, one: str, several: str) -> str:
    """Return the form of a word for a count of one, or for any other."""
    return one if count == 1 else several


def listed(names: Sequence[str], most: int) -> str:
    """Return names with commas; of more than `most`, the first and how many others there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def key_flag(role: str, *, signed: bool) -> str:
    """Return the flag, after a space, that names the key of a member in this role in a printed command.

    It is empty if nothing in the run is signed: no command takes a key there.
    """
    return f" --key {key_file(role)}" if signed else ""


def key_file(role: str) -> str:
    """Return the word that stands in a printed command for the private key of a member in this role."""
    return f"{role.upper()}_KEY_FILE"


def fragments(numbers: Iterable[int], each: str = "") -> str:
    """Return fragments in words, those in a row together: `fragment 3`, or `fragments 0 to 3, 7`.

    `each`: begins the words if there are several.
    """
    found = sorted(set(numbers))
    rows = [[n for _, n in row] for _, row in itertools.groupby(enumerate(found), lambda one: one[1] - one[0])]
    said = ", ".join(f"{row[0]} to {row[-1]}" if len(row) > 2 else ", ".join(map(str, row)) for row in rows)
    return f"{each}fragments {said}" if len(found) > 1 else f"fragment {said}"


def lasting(seconds: float) -> str:
    """Return a length of time in words, in its largest unit."""
    unit, size = next(
        (u for u in (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0)) if seconds >= u[1]), ("s", 1.0)
    )
    return f"{seconds / size:.3g} {unit}"

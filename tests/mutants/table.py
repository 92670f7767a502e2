"""Small, realistic mistakes in the core of the library, and the tests that notice each: an operator, a missing check, a
wrong order, something forgotten. The planted bugs of the simulator (`simulation/bugs`) break promises; these break
lines.

A row gives a name, the text as it is in the module, and what a slip of the hand would make of it. That text must be
found exactly once: whoever changes a line also changes its mutants. Where nobody could notice, `argued` says why.
"""

from collections.abc import Iterator
from pathlib import Path

from mutants.mutant import Mutant
from mutants.sections import arithmetic, garbage, layout, log, outside, permissions, readers, records, rounds, sent

MUTANTS = [
    mutant
    for section in (log, arithmetic, records, rounds, sent, garbage, layout, outside, readers, permissions)
    for mutant in section.MUTANTS
]


def faults(mutant: Mutant, root: Path) -> Iterator[str]:
    """Yield why a mutant does not fit the library as it is."""
    path = root / mutant.path
    if not path.is_file():
        yield f"there is no {path}"
        return
    source = path.read_text()
    if (count := source.count(mutant.before)) != 1:
        yield f"its text is in {mutant.file} {count} times, not once: {mutant.before!r}"
        return
    if mutant.before == mutant.after:
        yield "it changes nothing"
    try:
        compile(source.replace(mutant.before, mutant.after), mutant.file, "exec")
    except SyntaxError as error:
        yield f"it leaves no Python: {error}"
    for test in mutant.tests:
        if not (root / test.split("::")[0]).is_file():
            yield f"there is no {test}"

"""Small, realistic mistakes in the library, and the tests that notice each.

Examples are a wrong operator, a missing check, a wrong order, or a forgotten statement. The planted bugs of the
simulator (`simulation/bugs`) break promises; these mistakes break lines.

A row gives a name, a text in a module, and the text with the mistake. The text must be in the module exactly once, so a
change to a line also changes its mutants. If no test can notice a mistake, `argued` says why.
"""

from collections.abc import Iterator
from pathlib import Path

from mutants.mutant import Mutant
from mutants.sections import (
    advice,
    arithmetic,
    garbage,
    layout,
    log,
    outside,
    permissions,
    readers,
    records,
    rounds,
    sent,
)

MUTANTS = [
    mutant
    for section in (log, arithmetic, records, rounds, sent, garbage, layout, outside, readers, permissions, advice)
    for mutant in section.MUTANTS
]


def faults(mutant: Mutant, root: Path) -> Iterator[str]:
    """Yield why a mutant does not fit the current library."""
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

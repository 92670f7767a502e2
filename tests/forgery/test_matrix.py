"""No reader takes over anything from a forged object. The quick tier tries some cells, `make test-all` all of them."""

import random
import re
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from forgery.matrix import FORGERS, KINDS, READERS, Stage, cells
from isthmus.format.records.frame import Kind

SECURITY = Path(__file__).parents[2] / "SECURITY.md"


@pytest.mark.parametrize("share", [0.05, pytest.param(1.0, marks=pytest.mark.tier("all"))])
def test_nobody_takes_what_somebody_forged(share: float) -> None:
    seen: Counter[str] = Counter()
    wrong = []
    with closing(Stage()) as stage:
        for reader, forgery, came in cells(stage, random.Random(0), share):
            seen[came.partition(":")[0]] += 1
            if came.startswith("TAKEN"):
                wrong.append(f"{reader}: {forgery.kind.name.lower()} {forgery.deed} by {forgery.forger}: {came}")
    assert not wrong, "\n".join(wrong)
    assert set(seen) == {"refused", "as ever", "as if gone"}
    assert sum(seen.values()) > 2000 * share


def test_the_matrix_lacks_no_kind_and_the_page_says_how_large_it_is() -> None:
    assert set(KINDS) == set(Kind) - {Kind.MESSAGE, Kind.PART}
    said = SECURITY.read_text()
    found = re.search(r"(\d+) readers × (\d+) kinds × (\d+) forgers", said)
    assert found, "SECURITY.md must name the size of the matrix"
    assert [int(n) for n in found.groups()] == [len(READERS), len(KINDS), len(FORGERS)]

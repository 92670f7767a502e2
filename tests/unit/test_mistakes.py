"""Each kind of random mistake is made only where it fits, and the tests that run the changed line are found."""

import ast
import json
from pathlib import Path

import pytest
from coverage import CoverageData

from mutants import covered
from mutants.mistakes import Mistake, changes, places, sample

SOURCE = b'''\
"""1 < 2 is not touched here."""
LIMIT = 3


async def f(a, b, *, deep=True):
    """Nor is 4 < 5 here."""
    assert a < b
    if a < b and not deep or b is None:
        raise ValueError(f"{a + 1} is too small")
    for x in (y for y in a if y):
        if x in b:
            continue
        a.total += -x.size * LIMIT
    await g(a, b, key=min(a, b))
    logger.info("%s", a + 1)
    del b[1:]
    try:
        a.done = {"left": 1.5, "right": b if deep else a}
    except (KeyError, OSError):
        pass
'''

EXPECTED = {
    2: {"LIMIT = 4", "LIMIT = 2"},
    5: {"async def f(a, b, *, deep=False):"},
    8: {
        "if a <= b and not deep or b is None:", "if a < b or not deep or b is None:", "if a < b and deep or b is None:",
        "if a < b and not deep and b is None:", "if a < b and not deep or b is not None:", "if True and not deep or b is None:",
        "if a < b and True or b is None:", "if False or b is None:", "if a < b and not deep or False:", "if False:",
        "if not (a < b and not deep or b is None):",
    },
    9: {"pass"},
    10: {"for x in (y for y in a if True):"},
    11: {"if x not in b:", "if False:"},
    12: {"break", "pass"},
    13: {"pass", "a.total -= -x.size * LIMIT", "a.total += x.size * LIMIT", "a.total += -x.size / LIMIT"},
    14: {
        "pass", "g(a, b, key=min(a, b))", "await g(b, a, key=min(a, b))", "await g(a, b)", "await g(a, b, key=max(a, b))",
        "await g(a, b, key=min(b, a))",
    },
    16: {"pass", "del b[2:]", "del b[:]"},
    18: {
        "pass", 'a.done = { "right": b if deep else a}', 'a.done = {"left": 3.0, "right": b if deep else a}',
        'a.done = {"left": 1.5}', 'a.done = {"left": 1.5, "right": b}', 'a.done = {"left": 1.5, "right": a}',
    },
    19: {"except (OSError,):", "except (KeyError,):"},
}  # fmt: skip
"""By line: what the line may become."""


def line_of(mistake: Mistake) -> str:
    return mistake.apply(SOURCE).decode().splitlines()[mistake.line - 1].strip()


def test_every_kind_is_made_where_it_can_be_and_nowhere_else() -> None:
    found: dict[int, set[str]] = {}
    for mistake in places("f.py", SOURCE):
        if changes(mistake, SOURCE):
            found.setdefault(mistake.line, set()).add(line_of(mistake))
    assert found == EXPECTED


def test_a_mistake_that_is_no_python_or_changes_nothing_is_not_made() -> None:
    def replaced(old: bytes, new: bytes) -> Mistake:
        start = SOURCE.index(old)
        return Mistake("f.py", 1, start, start + len(old), "", new)

    assert changes(replaced(b"LIMIT = 3", b"LIMIT = 4"), SOURCE)
    assert not changes(replaced(b"LIMIT = 3", b"LIMIT ="), SOURCE)
    assert not changes(replaced(b"LIMIT = 3", b"LIMIT = (3)"), SOURCE)
    assert not changes(replaced(b"pass\n", b"break\n"), SOURCE), "it parses but does not compile"


def test_lines_can_be_chosen_and_a_seed_gives_the_same_sample_with_one_mistake_a_line() -> None:
    assert {m.line for m in places("f.py", SOURCE, {2, 14})} == {2, 14}
    found = places("f.py", SOURCE)
    chosen = sample(found, {"f.py": SOURCE}, 100, seed=1)
    assert sorted(m.line for m in chosen) == sorted(EXPECTED)
    assert sample(reversed(found), {"f.py": SOURCE}, 100, seed=1) == chosen
    assert sample(found, {"f.py": SOURCE}, 3, seed=1) == chosen[:3]
    assert sample(found, {"f.py": SOURCE}, 100, seed=2) != chosen


def test_every_mistake_in_the_library_is_applied_where_it_was_found() -> None:
    """Spans count bytes, so they are right even after letters that take several bytes."""
    source = "x = 'ü', 1 < 2\n".encode()
    (lt,) = [m for m in places("g.py", source) if m.after == b"<="]
    assert lt.apply(source).decode() == "x = 'ü', 1 <= 2\n"
    assert ast.parse(lt.apply(source))


# --- which tests are run ----------------------------------------------------------------------------------------------

KERNEL = """\
def kernel(a):
    return a + 1


def outer(a):
    return kernel(a)
"""
CALLER = """\
LIMIT = 3


def caller(a):
    return outer(a)


def limited(a):
    b = a
    return min(b, LIMIT)
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two modules, and a recording of the lines that two test files ran in them."""
    monkeypatch.setattr(covered, "ROOT", tmp_path)
    monkeypatch.setattr(covered, "STORED", tmp_path / "stored")
    monkeypatch.setattr(covered, "_spans", covered._spans.__wrapped__)
    for name, text in (("pkg/kernels/k.py", KERNEL), ("pkg/c.py", CALLER)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    record(
        tmp_path, 1, {"a.py": "1", "b.py": "1"}, {"a.py::caller": [5], "b.py::limited": [9, 10], "b.py::slow": [9, 10]}
    )
    return tmp_path


def record(root: Path, number: int, files: dict[str, str], ran: dict[str, list[int]]) -> None:
    """Store a recording (a layer) in which these tests ran these lines of the caller."""
    folder = root / "stored" / f"layer-{number:04}"
    folder.mkdir(parents=True)
    data = CoverageData(str(folder / "data"))
    for test, lines in ran.items():
        data.set_context(f"{test}|run")
        data.add_lines({str(root / "pkg/c.py"): lines})
    data.write()
    for name in ("pkg/kernels/k.py", "pkg/c.py"):
        (folder / "sources" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "sources" / name).write_text((root / name).read_text())
    seconds = {test: 9.0 if "slow" in test else 1.0 for test in ran}
    (folder / "seconds.json").write_text(json.dumps(seconds))
    (folder / "files.json").write_text(json.dumps(files))


def covering(file: str, line: int) -> list[str]:
    return covered.Map().tests_of(Mistake(file, line, 0, 0, "", b""))


def test_the_tests_that_ran_the_line_are_run_quickest_first(tree: Path) -> None:
    assert covering("pkg/c.py", 5) == ["a.py::caller"]
    assert covering("pkg/c.py", 10) == ["b.py::limited", "b.py::slow"]


def test_a_line_that_moved_is_found_and_a_new_one_has_the_tests_of_its_function(tree: Path) -> None:
    changed = CALLER.replace("    b = a\n", "    b = a\n    b = b + 1\n").replace(
        "LIMIT = 3\n", "LIMIT = 3\nMORE = 4\n"
    )
    (tree / "pkg/c.py").write_text(changed)
    assert covering("pkg/c.py", 6) == ["a.py::caller"]
    assert covering("pkg/c.py", 11) == ["b.py::limited", "b.py::slow"], "the line is new"


def test_kernels_and_constants_have_the_tests_of_the_lines_that_mention_them(tree: Path) -> None:
    assert covering("pkg/kernels/k.py", 2) == ["a.py::caller"], "through `outer`, the kernel that calls this one"
    assert covering("pkg/c.py", 1) == ["b.py::limited", "b.py::slow"]


def test_the_newest_recording_of_a_test_file_counts(tree: Path) -> None:
    record(tree, 2, {"b.py": "2"}, {"b.py::renamed": [5]})
    assert covering("pkg/c.py", 5) == ["a.py::caller", "b.py::renamed"]
    assert covering("pkg/c.py", 10) == [], "the older recording of b.py no longer counts"


def test_a_recording_that_was_interrupted_does_not_count(tree: Path) -> None:
    record(tree, 2, {"b.py": "2"}, {"b.py::renamed": [5]})
    (tree / "stored/layer-0002/files.json").unlink()
    assert covering("pkg/c.py", 5) == ["a.py::caller"]

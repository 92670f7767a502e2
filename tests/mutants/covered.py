"""The coverage map: which tests run which line, and how long each test takes, stored below out/coverage.

The map is a list of layers. The first has all tests that run in the process of pytest; each later layer has the test
files that have changed since. A layer keeps the sources of its time, so that current lines can be found in them.
"""

import ast
import asyncio
import difflib
import functools
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from coverage import CoverageData

from isthmus_services.processes import tied
from mutants.copies import PACKAGES, ROOT
from mutants.mistakes import Mistake

STORED = ROOT / "out/coverage"
FOLDERS = ("unit", "fuzz", "conformance", "integration", "simulation", "advice", "forgery", "algorithm")
"""Folders of tests that call the library in their own process; only tests that `make test` runs count. Lines that other
processes run are not recorded."""


RECORDED_LEAST = 0.8
"""The least share of tests with recorded lines. The other tests run no line of the packages in their own process,
as those of texts and tables, or of whole processes."""


def test_files() -> dict[str, str]:
    """Return the digest of each test file whose coverage is recorded."""
    found = sorted(path for folder in FOLDERS for path in (ROOT / "tests" / folder).glob("test_*.py"))
    return {str(p.relative_to(ROOT)): hashlib.sha256(p.read_bytes()).hexdigest() for p in found}


def sources() -> list[str]:
    """Return the paths of all modules of the packages, below the root."""
    return sorted(str(p.relative_to(ROOT)) for name in PACKAGES for p in (ROOT / name).rglob("*.py"))


@dataclass(frozen=True, eq=False)
class Layer:
    """One recording."""

    folder: Path
    files: dict[str, str]
    """Digest of each recorded test file."""
    seconds: dict[str, float]
    """Duration of each recorded test."""

    @functools.cached_property
    def data(self) -> CoverageData:
        """The data that coverage.py recorded."""
        found = CoverageData(str(self.folder / "data"))
        found.read()
        return found

    @functools.cache  # noqa: B019  (a layer lives as long as the process)
    def lines(self, file: str) -> dict[int, set[str]]:
        """Return the tests that ran each line of a module, by its number at that time."""
        # Recorded as "tests/unit/test_x.py::test_y|run"; lines that run at import time have no test.
        by_line = self.data.contexts_by_lineno(str(ROOT / file))
        return {n: {c.rsplit("|", 1)[0] for c in contexts if c} for n, contexts in by_line.items()}

    @functools.cache  # noqa: B019
    def line_then(self, file: str) -> dict[int, int]:
        """Return, by current number, the number that each unchanged line had at that time."""
        stored = self.folder / "sources" / file
        if not stored.is_file():
            return {}
        then, now = stored.read_text().splitlines(), (ROOT / file).read_text().splitlines()
        blocks = difflib.SequenceMatcher(None, then, now, autojunk=False).get_matching_blocks()
        return {b.b + i + 1: b.a + i + 1 for b in blocks for i in range(b.size)}

    def tests(self, file: str, lines: Iterable[int]) -> set[str]:
        """Return the tests that ran any of these current lines."""
        then, recorded = self.line_then(file), self.lines(file)
        return {test for n in lines if n in then for test in recorded.get(then[n], ())}


def layers() -> list[Layer]:
    """Return the stored layers, oldest first."""
    found = []
    for folder in sorted(STORED.glob("layer-*")):
        if (folder / "files.json").is_file():  # written last: without it the recording was interrupted
            files = json.loads((folder / "files.json").read_text())
            found.append(Layer(folder, files, json.loads((folder / "seconds.json").read_text())))
    return found


class Map:
    """The newest layer of each test file."""

    def __init__(self) -> None:
        self._layers = layers()
        self._newest = {file: layer for layer in self._layers for file in layer.files}
        self.seconds = {
            test: s for layer in self._layers for test, s in layer.seconds.items() if self._is_of(layer, test)
        }

    def _is_of(self, layer: Layer, test: str) -> bool:
        return self._newest.get(test.partition("::")[0]) is layer

    def tests(self, file: str, lines: Iterable[int]) -> set[str]:
        """Return the tests that run any of these lines of a module."""
        lines = list(lines)
        return {t for layer in self._layers for t in layer.tests(file, lines) if self._is_of(layer, t)}

    def tests_of(self, mistake: Mistake) -> list[str]:
        """Return the tests that can notice a mistake, quickest first.

        These tests run its line. A line has no recorded test if it is new, if numba compiles it, or if it runs at
        import time. Then the tests run another line of the same function, or else any line that mentions the name
        defined there.
        """
        found = self.tests(mistake.file, [mistake.line])
        if not found:
            names, body = _defined(mistake.file, mistake.line)
            found = self.tests(mistake.file, body)
            if not found:
                found = {t for file, lines in _mentions(names) for t in self.tests(file, lines)}
        known = [t for t in found if t in self.seconds]
        return sorted(known, key=lambda t: (self.seconds[t], t))


def _defined(file: str, line: int) -> tuple[set[str], range]:
    """Return the names that the statements around a line define, and the lines of the function around it."""
    names: set[str] = set()
    body = range(0)
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if not isinstance(node, ast.stmt) or not node.lineno <= line <= (node.end_lineno or node.lineno):
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
            body = range(node.lineno + 1, (node.end_lineno or node.lineno) + 1)
        elif isinstance(node, ast.ClassDef) and not names:
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {t.id for t in targets if isinstance(t, ast.Name)}
    return names, body


def _mentions(names: set[str]) -> Iterator[tuple[str, list[int]]]:
    """Yield the modules and lines that mention one of the names, or a function around such a line in the kernels."""
    if not names:
        return
    texts = {file: (ROOT / file).read_text().splitlines() for file in sources()}
    names = set(names)
    while True:  # include kernels that call these kernels
        pattern = re.compile(rf"\b({'|'.join(map(re.escape, sorted(names)))})\b")
        hits = {file: [n for n, line in enumerate(lines, 1) if pattern.search(line)] for file, lines in texts.items()}
        callers = {
            name for file, lines in hits.items() if "/kernels/" in file for n in lines for name in _functions(file, n)
        }
        if callers <= names:
            break
        names |= callers
    yield from ((file, lines) for file, lines in hits.items() if lines)


@functools.cache
def _spans(file: str) -> list[tuple[str, int, int]]:
    tree = ast.parse((ROOT / file).read_text())
    return [(n.name, n.lineno, n.end_lineno or n.lineno) for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]


def _functions(file: str, line: int) -> set[str]:
    return {name for name, first, last in _spans(file) if first <= line <= last}


async def bring_up_to_date(workers: int) -> None:
    """Record the test files that are new or have changed since their recording. Raises `SystemExit` if pytest fails."""
    recorded = {file: digest for layer in layers() for file, digest in layer.files.items()}
    files = {file: digest for file, digest in test_files().items() if recorded.get(file) != digest}
    if not files:
        return
    print(f"recording which lines {len(files)} files of tests run", flush=True)
    number = max((int(p.name.partition("-")[2]) for p in STORED.glob("layer-*")), default=0) + 1
    folder = STORED / f"layer-{number:04}"
    folder.mkdir(parents=True)
    for source in sources():
        (folder / "sources" / source).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / source, folder / "sources" / source)
    paths = [ROOT / name for name in (*PACKAGES, "tests")]
    process = await asyncio.create_subprocess_exec(
        *tied([
            sys.executable, "-m", "pytest", "-q", "-n", str(workers), "--tier", "test", "-p", "mutants.timed",
            *(f"--cov={name}" for name in PACKAGES), "--cov-context=test", "--cov-report=", *files,
        ]),
        cwd=ROOT,
        env=os.environ | {
            "COVERAGE_FILE": str(folder / "data"), "TIMED": str(folder / "seconds.json"),
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
        },
    )  # fmt: skip
    if await process.wait() not in (0, 1):  # 1: some tests failed; a test that fails anyway notices no mistake
        raise SystemExit(f"pytest ended with {process.returncode}: no coverage was recorded")
    seconds = json.loads((folder / "seconds.json").read_text())
    recorded_data = CoverageData(str(folder / "data"))
    recorded_data.read()
    ran = {context.rsplit("|", 1)[0] for context in recorded_data.measured_contexts()} & seconds.keys()
    if len(ran) < RECORDED_LEAST * len(seconds):
        raise SystemExit(
            f"coverage is recorded of {len(ran)} of {len(seconds)} tests: one of them has taken the trace function away"
        )
    (folder / "files.json").write_text(json.dumps(files))

"""Make mistakes at random in the lines of interest, and run the tests that cover each, quickest first."""

import argparse
import asyncio
import difflib
import re
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from isthmus_services.output.progress import progress
from isthmus_services.output.report import write_json
from mutants import covered
from mutants.copies import (
    FAILED,
    INTERRUPTED,
    KERNELS,
    PACKAGES,
    PASSED,
    ROOT,
    copy_packages,
    first_failure,
    require_copy,
    run_pytest,
)
from mutants.mistakes import Mistake, places, sample

SAMPLE = 60
BUDGET_S = 120.0
"""The tests of a mistake run until their recorded seconds add up to this. The other tests are left out, and counted."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one mistake: `noticed`, `survived`, `not covered`, or `not run` (the output says why)."""

    mistake: Mistake
    fate: str
    by: str = ""
    """The first test that failed, or `timeout`."""
    tests: int = 0
    """The number of tests that were chosen."""
    left_out: int = 0
    """The number of tests that cover the line and were left out to save time."""
    output: str = ""


def main(a: argparse.Namespace) -> int:
    """Make the mistakes that the arguments ask for, and print those that survived."""
    began = time.perf_counter()
    asyncio.run(covered.bring_up_to_date(a.workers))
    if a.map:
        return 0
    sources = {file: (ROOT / file).read_bytes() for file in _files(a.room)}
    changed = _changed_since(a.since) if a.since else None
    found = [
        m for file, source in sources.items() if changed is None or file in changed
        for m in places(file, source, None if changed is None else changed[file])
    ]  # fmt: skip
    chosen = sample(found, sources, SAMPLE if a.sample is None else a.sample, a.seed)
    print(f"{len(chosen)} mistakes of {len(found)} that can be made there, seed {a.seed}", flush=True)
    if a.list:
        for mistake in chosen:
            _show(mistake, "")
        return 0
    with tempfile.TemporaryDirectory(prefix="isthmus-mutants-") as folder:
        outcomes = asyncio.run(_all(chosen, Path(folder), a.workers, a.timeout_s))
    _report(outcomes, time.perf_counter() - began, a.json)
    return 0


def _files(rooms: list[str] | None) -> list[str]:
    """Return the modules below the rooms, which are paths below the root or below one of the packages."""
    if rooms is None:
        return covered.sources()
    roots = ("", "pkg/", "pkg/isthmus/", "pkg/isthmus_lab/", "services/", "services/isthmus_services/")
    below = [str(Path(root + room)) for room in rooms for root in roots]
    found = [f for f in covered.sources() if any(f == b or f.startswith(f"{b}/") for b in below)]
    if not found:
        raise SystemExit(f"there is no module below {', '.join(rooms)}: name a folder or a file as pkg/isthmus/log")
    return found


def _changed_since(revision: str) -> dict[str, set[int]]:
    """Return the lines of each module that differ from a revision."""
    command = ["git", "diff", "--unified=0", "--no-color", "--no-ext-diff", revision, "--", *PACKAGES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr.strip())
    changed: dict[str, set[int]] = {}
    file = ""
    for line in done.stdout.splitlines():
        if line.startswith("+++ "):
            file = line[4:].removeprefix("b/")
        elif hunk := re.match(r"@@ .* \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(hunk[1]), int(hunk[2] or 1)
            changed.setdefault(file, set()).update(range(first, first + count))
    return changed


async def _all(chosen: list[Mistake], folder: Path, workers: int, timeout_s: float) -> list[Outcome]:
    sound = copy_packages(ROOT, folder / "sound")
    await require_copy(sound)
    runner = _Runner(sound, covered.Map(), timeout_s)
    slots, outcomes = asyncio.Semaphore(workers), []

    async def one(mistake: Mistake, number: int) -> None:
        async with slots:
            outcome = await runner.attempt(mistake, folder / f"{number}")
        outcomes.append(outcome)
        say(len(outcomes) / len(chosen))

    with progress(f"{len(chosen)} mistakes") as say:
        async with asyncio.TaskGroup() as tasks:
            for number, mistake in enumerate(chosen):
                tasks.create_task(one(mistake, number))
    return sorted(outcomes, key=lambda o: o.mistake)


class _Runner:
    """Tries mistakes, and remembers which tests fail without any."""

    def __init__(self, sound: Path, covering: covered.Map, timeout_s: float) -> None:
        self._sound, self._covering, self._timeout_s = sound, covering, timeout_s
        self._verdicts: dict[str, bool] = {}
        self._one = asyncio.Lock()

    async def attempt(self, mistake: Mistake, folder: Path) -> Outcome:
        """Run the tests that cover a mistake on a copy that holds it."""
        tests, left_out = self._within_budget(self._covering.tests_of(mistake))
        if not tests:
            return Outcome(mistake, "not covered")
        await asyncio.to_thread(copy_packages, self._sound, folder)
        path = folder / mistake.file
        path.write_bytes(mistake.apply(path.read_bytes()))
        try:
            return await self._run(mistake, folder, tests, left_out)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder)

    async def _run(self, mistake: Mistake, folder: Path, tests: list[str], left_out: int) -> Outcome:
        own_cache = mistake.file.startswith(KERNELS)
        while True:
            try:
                code, output = await run_pytest(folder, tests, timeout_s=self._timeout_s, own_cache=own_cache)
            except TimeoutError:
                return Outcome(mistake, "noticed", "timeout", len(tests), left_out)
            if code == PASSED:
                return Outcome(mistake, "survived", "", len(tests), left_out)
            # A mistake that keeps modules of tests from being imported is noticed; pytest then takes their tests for typos.
            if code not in (FAILED, INTERRUPTED) and not first_failure(output):
                return Outcome(mistake, "not run", "", len(tests), left_out, output)
            by = first_failure(output)
            if by not in tests or await self._passes_without(by):
                return Outcome(mistake, "noticed", by, len(tests), left_out)
            tests = [t for t in tests if t != by]
            if not tests:
                return Outcome(mistake, "not covered")

    async def _passes_without(self, test: str) -> bool:
        """Return whether a test passes on the unchanged copy. Only then does its failure show a mistake."""
        async with self._one:
            if test not in self._verdicts:
                try:
                    code, _ = await run_pytest(self._sound, [test], timeout_s=self._timeout_s)
                except TimeoutError:
                    code = FAILED
                self._verdicts[test] = code == PASSED
            return self._verdicts[test]

    def _within_budget(self, tests: list[str]) -> tuple[list[str], int]:
        total = 0.0
        chosen: list[str] = []
        for test in tests:
            total += self._covering.seconds[test]
            if chosen and total > BUDGET_S:
                break
            chosen.append(test)
        return chosen, len(tests) - len(chosen)


FATES = ("noticed", "survived", "not covered", "not run")


def _room(file: str) -> str:
    """Return the folder of a module below its package; of format, the folder in it."""
    package, *rest = Path(file).parts[1:-1]
    inner = rest[: 2 if rest[:1] == ["format"] else 1]
    return "/".join([package.removeprefix("isthmus_"), *inner])


def _show(mistake: Mistake, fate: str) -> None:
    before = (ROOT / mistake.file).read_bytes()
    then, now = (text.decode().splitlines() for text in (before, mistake.apply(before)))
    print(f"\n{mistake.name}" + (f": {fate}" if fate else ""))
    print(*list(difflib.unified_diff(then, now, n=2, lineterm=""))[3:], sep="\n")


def _report(outcomes: list[Outcome], wall_s: float, path: str | None) -> None:
    for o in outcomes:
        if o.fate != "noticed":
            _show(o.mistake, f"{o.fate} ({o.tests} tests run, {o.left_out} left out)")
            if o.fate == "not run":
                print(o.output[-1500:])
    rooms: dict[str, Counter[str]] = {}
    for o in outcomes:
        rooms.setdefault(_room(o.mistake.file), Counter())[o.fate] += 1
    print(f"\n{'room':24}" + "".join(f"{fate:>12}" for fate in FATES))
    for room, found in sorted(rooms.items()):
        print(f"{room:24}" + "".join(f"{found[fate]:12}" for fate in FATES))
    total = Counter(o.fate for o in outcomes)
    print(f"\n{total['noticed']} of {len(outcomes)} noticed, in {wall_s:.0f} s")
    rows = [
        {"name": o.mistake.name, "after": o.mistake.after.decode(), "fate": o.fate, "by": o.by, "tests": o.tests,
         "left_out": o.left_out}
        for o in outcomes
    ]  # fmt: skip
    write_json({"mistakes": len(outcomes), **total, "wall_s": wall_s, "outcomes": rows}, Path(path) if path else None)

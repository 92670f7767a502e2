"""`make mutants`: put mistakes into the library one at a time; a test must notice each.

Without --sample, --since or --room, the mistakes are those of the table, and each is run with the tests that the table
names. These tests first run on an unchanged copy. The exit code is 1 if a mistake survives, unless the table argues why
no test can notice it.

With one of these options, the mistakes are made at random, in the lines changed since a revision or in the named rooms.
Each is run with the tests that cover its line. Mistakes that survive are printed. Whether one is a fault is for the
reader to decide, so the exit code is 0.
"""

import argparse
import asyncio
import difflib
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from isthmus_services.output.progress import progress
from isthmus_services.output.report import write_json
from mutants import sampled
from mutants.copies import (
    FAILED,
    INTERRUPTED,
    KERNELS,
    PASSED,
    ROOT,
    copy_packages,
    first_failure,
    require_copy,
    run_pytest,
)
from mutants.mutant import Mutant
from mutants.table import MUTANTS, faults

TIMEOUT_S = 240.0
"""Limit for all tests of one mutant. Tests that take longer count as failed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one mutant: `killed`, `survived`, or `not run` (the output says why)."""

    mutant: Mutant
    fate: str
    by: str
    """The first test that failed, or `timeout`."""
    wall_s: float
    output: str

    @property
    def good(self) -> bool:
        """Whether the result is as the table says."""
        return self.fate == ("survived" if self.mutant.equivalent else "killed")


def main() -> int:
    """Run what the arguments ask for; return 1 if a result is not as the table says, or the table does not fit."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="those whose name begins so (several times)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timeout-s", type=float, default=TIMEOUT_S, help=f"per mutant ({TIMEOUT_S:g})")
    parser.add_argument("--list", action="store_true", help="name them and stop")
    parser.add_argument("--json", help="write the report there too")
    random = parser.add_argument_group("mistakes made at random")
    random.add_argument("--sample", type=int, metavar="N", help=f"how many ({sampled.SAMPLE})")
    random.add_argument("--since", metavar="REV", help="in the lines changed since this revision, uncommitted ones too")
    random.add_argument("--room", action="append", metavar="PATH", help="below this path (several times)")
    random.add_argument("--seed", type=int, default=1, help="the same seed and source make the same mistakes (1)")
    random.add_argument("--map", action="store_true", help="only bring the coverage map up to date")
    a = parser.parse_args()
    if a.map or a.sample is not None or a.since is not None or a.room is not None:
        return sampled.main(a)
    chosen = [m for m in MUTANTS if a.only is None or any(m.name.startswith(name) for name in a.only)]
    if a.list or not chosen:
        print(*(m.name for m in chosen or MUTANTS), sep="\n")
        return 0 if a.list else 2
    if wrong := [f"{m.name}: {why}" for m in chosen for why in faults(m, ROOT)]:
        print(*wrong, sep="\n", file=sys.stderr)
        return 1
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="isthmus-mutants-") as folder:
        outcomes = asyncio.run(_all(chosen, Path(folder), a.workers, a.timeout_s))
    if outcomes is None:
        return 1
    return _report(outcomes, time.perf_counter() - began, a.json)


async def _all(chosen: list[Mutant], folder: Path, workers: int, timeout_s: float) -> list[Outcome] | None:
    """Return the results of all mutants; None if the tests fail on the unchanged library."""
    sound = folder / "sound"
    copy_packages(ROOT, sound)
    await require_copy(sound)
    tests = sorted({test for m in chosen for test in m.tests})
    print(f"{len(chosen)} mutants; first {len(tests)} files or tests on the library as it is", flush=True)
    code, output = await run_pytest(sound, tests, timeout_s=len(tests) * timeout_s)
    if code != PASSED:
        print(output[-8000:], "these tests fail without any mutant", sep="\n", file=sys.stderr)
        return None
    slots, done, outcomes = asyncio.Semaphore(workers), 0, []

    async def one(mutant: Mutant, number: int) -> None:
        nonlocal done
        async with slots:
            outcome = await _try(mutant, sound, folder / f"{number}", timeout_s)
        done += 1
        outcomes.append(outcome)
        say(done / len(chosen))
        if not outcome.good:
            _show(outcome)

    with progress(f"{len(chosen)} mutants") as say:
        async with asyncio.TaskGroup() as tasks:
            for number, mutant in enumerate(chosen):
                tasks.create_task(one(mutant, number))
    return sorted(outcomes, key=lambda o: chosen.index(o.mutant))


async def _try(mutant: Mutant, sound: Path, folder: Path, timeout_s: float) -> Outcome:
    began = time.perf_counter()
    await asyncio.to_thread(copy_packages, sound, folder)
    path = folder / mutant.path
    path.write_text(path.read_text().replace(mutant.before, mutant.after))
    try:
        own_cache = mutant.path.startswith(KERNELS)
        code, output = await run_pytest(folder, mutant.tests, timeout_s=timeout_s, own_cache=own_cache)
    except TimeoutError:
        return Outcome(mutant, "killed", "timeout", time.perf_counter() - began, "")
    finally:
        await asyncio.to_thread(shutil.rmtree, folder)
    fate = {PASSED: "survived", FAILED: "killed", INTERRUPTED: "killed"}.get(code, "not run")
    return Outcome(mutant, fate, first_failure(output), time.perf_counter() - began, output)


def _show(outcome: Outcome) -> None:
    m = outcome.mutant
    print(f"\n{m.name}: {outcome.fate}" + (f" by {outcome.by}" if outcome.by else ""))
    lines = difflib.unified_diff(m.before.splitlines(), m.after.splitlines(), m.file, m.file, n=99, lineterm="")
    print("\n".join(lines))
    if m.equivalent:
        print(f"argued: {m.equivalent}")
    if outcome.fate == "not run":
        print(outcome.output[-1500:])


def _report(outcomes: list[Outcome], wall_s: float, path: str | None) -> int:
    modules: dict[str, Counter[str]] = {}
    for o in outcomes:
        modules.setdefault(o.mutant.file, Counter())[_heading(o)] += 1
    print(f"\n{'':28}{'killed':>8}{'argued':>8}{'wrong':>8}")
    for file, found in modules.items():
        print(f"{file:28}{found['killed']:8}{found['argued']:8}{found['wrong']:8}")
    total = Counter(_heading(o) for o in outcomes)
    print(f"{'all':28}{total['killed']:8}{total['argued']:8}{total['wrong']:8}   in {wall_s:.0f} s")
    wrong = [o for o in outcomes if not o.good]
    for o in wrong:
        print(f"{o.mutant.name}: {o.fate}   (again: make mutants ARGS='--only {o.mutant.name}')")
    report = {
        "mutants": len(outcomes),
        **{heading: total[heading] for heading in ("killed", "argued", "wrong")},
        "wall_s": wall_s,
        "modules": {file: dict(found) for file, found in modules.items()},
        "outcomes": [
            {
                "name": o.mutant.name,
                "file": o.mutant.file,
                "fate": o.fate,
                "by": o.by,
                "wall_s": o.wall_s,
                "argued": o.mutant.equivalent,
            }
            for o in outcomes
        ],
    }
    write_json(report, Path(path) if path else None)
    return 1 if wrong else 0


def _heading(outcome: Outcome) -> str:
    if not outcome.good:
        return "wrong"
    return "argued" if outcome.mutant.equivalent else "killed"


if __name__ == "__main__":
    sys.exit(main())

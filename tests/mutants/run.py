"""`make mutants`: put the table's mistakes into the library one at a time; the tests named beside each must notice.

Every mutant is a copy of the package in a folder of its own. The tests are run on an unchanged copy first, or all would
seem to be noticed. What survives is shown with its change; exit code 1 unless the table argues why nobody could notice.
"""

import argparse
import asyncio
import contextlib
import difflib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from isthmus_services.output.progress import progress
from isthmus_services.output.report import write_json
from mutants.mutant import Mutant
from mutants.table import MUTANTS, faults

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "pkg"
KERNELS = "kernels/"
"""What numba compiles: a mutant of it has its machine code to itself."""

TIMEOUT_S, TEST_S = 240.0, 60.0
"""For all tests of one mutant, and for one of them: those that take longer have noticed, somebody waits for ever."""

PASSED, FAILED, INTERRUPTED = 0, 1, 2  # exit codes of pytest; others mean that it did not get as far as a test


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one mutant: `killed`, `survived`, or `not run` (the output says why)."""

    mutant: Mutant
    fate: str
    by: str
    """The first test that failed, or `timeout`."""
    wall_s: float
    output: str

    @property
    def good(self) -> bool:
        """Whether it is as the table says."""
        return self.fate == ("survived" if self.mutant.equivalent else "killed")


def main() -> int:
    """Run what the arguments ask for; 1 where a mutant is not as the table says, or the table does not fit."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="those whose name begins so (several times)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timeout-s", type=float, default=TIMEOUT_S, help=f"per mutant ({TIMEOUT_S:g})")
    parser.add_argument("--list", action="store_true", help="name them and stop")
    parser.add_argument("--json", help="write the report there too")
    a = parser.parse_args()
    chosen = [m for m in MUTANTS if a.only is None or any(m.name.startswith(name) for name in a.only)]
    if a.list or not chosen:
        print(*(m.name for m in chosen or MUTANTS), sep="\n")
        return 0 if a.list else 2
    if wrong := [f"{m.name}: {why}" for m in chosen for why in faults(m, PACKAGE, ROOT)]:
        print(*wrong, sep="\n", file=sys.stderr)
        return 1
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="isthmus-mutants-") as folder:
        outcomes = asyncio.run(_all(chosen, Path(folder), a.workers, a.timeout_s))
    if outcomes is None:
        return 1
    return _report(outcomes, time.perf_counter() - began, a.json)


async def _all(chosen: list[Mutant], folder: Path, workers: int, timeout_s: float) -> list[Outcome] | None:
    """Return what became of each; None where the tests do not pass as it is."""
    sound = folder / "sound"
    shutil.copytree(PACKAGE, sound / "pkg", ignore=shutil.ignore_patterns("__pycache__"))
    await _require_copy(sound)
    tests = sorted({test for m in chosen for test in m.tests})
    print(f"{len(chosen)} mutants; first {len(tests)} files or tests on the library as it is", flush=True)
    code, output = await _pytest(sound, tests, timeout_s=len(tests) * timeout_s)
    if code != PASSED:
        print(output[-8000:], "these tests fail without any mutant", sep="\n", file=sys.stderr)
        return None
    gate, done, outcomes = asyncio.Semaphore(workers), 0, []

    async def one(mutant: Mutant, number: int) -> None:
        nonlocal done
        async with gate:
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
    # With what is compiled: only what differs is compiled again.
    await asyncio.to_thread(shutil.copytree, sound / "pkg", folder / "pkg")
    path = folder / "pkg/isthmus" / mutant.file
    path.write_text(path.read_text().replace(mutant.before, mutant.after))
    try:
        code, output = await _pytest(
            folder, mutant.tests, timeout_s=timeout_s, own_cache=mutant.file.startswith(KERNELS)
        )
    except TimeoutError:
        return Outcome(mutant, "killed", "timeout", time.perf_counter() - began, "")
    finally:
        await asyncio.to_thread(shutil.rmtree, folder)
    fate = {PASSED: "survived", FAILED: "killed", INTERRUPTED: "killed"}.get(code, "not run")
    by = next((line.split()[1] for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))), "")
    return Outcome(mutant, fate, by, time.perf_counter() - began, output)


def _environment(folder: Path, own_cache: bool = False) -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    if own_cache:
        found["NUMBA_CACHE_DIR"] = str(folder / "numba")
    return found | {"PYTHONPATH": os.pathsep.join(map(str, (folder / "pkg", ROOT / "services", ROOT / "tests")))}


async def _pytest(folder: Path, tests: Iterable[str], *, timeout_s: float, own_cache: bool = False) -> tuple[int, str]:
    """Run tests on the package in a folder; return the exit code and what was said. Raises `TimeoutError`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", f"--timeout={TEST_S:g}", "-p", "no:cacheprovider", f"--basetemp={folder / 'tmp'}", *tests,
        cwd=ROOT, env=_environment(folder, own_cache), start_new_session=True,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        async with asyncio.timeout(timeout_s):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    assert process.returncode is not None
    return process.returncode, output.decode(errors="replace")


async def _require_copy(folder: Path) -> None:
    """Fail unless it is the copy that is imported."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "import isthmus; print(isthmus.__file__)",
        env=_environment(folder), stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    found = (await process.communicate())[0].decode().strip()
    if not Path(found).is_relative_to(folder):
        raise SystemExit(f"{found} is imported, not the copy in {folder}: mutants would never be run")


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

"""What a GPU does with this library, in nine minutes: `make gpu` runs every part and writes a report with a picture.

    python -m gpu.run [--out out/gpu] [--only PART] [--seconds 530]     # `large` only where it is named
    python -m gpu.run --page docs/benchmarks.md --out docs/results/gpu

Every part is a process with a limit of its own, and its rows are written as they are measured, so that whatever happens
there is a report. Without a GPU every part runs at a small size on the CPU and says "no GPU". The tests are those that
carry the mark `gpu`. Returns 1 if a part failed or ran out of time.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from gpu import parts, training
from isthmus_lab.bench.measure import Row
from isthmus_lab.bench.report import COLUMNS, cells
from isthmus_services.output.report import save

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent

NO_GPU, DONE, FAILED, LATE = "no GPU", "done", "FAILED", "OUT OF TIME"


@dataclass(frozen=True)
class Part:
    """A part of the report: its name, what it shows, and how many seconds it may take."""

    name: str
    says: str
    limit_s: float
    rows: Callable[[Path, float], Iterator[Row | training.Curve]] | None
    """Called with a folder of its own and the seconds it has; None for the tests."""


PARTS = (
    Part("machine", "What the machine does", 40.0, lambda folder, s: parts.machine()),
    Part("tests", "The tests that carry the mark `gpu`", 130.0, None),
    Part("codecs", "Codecs on the device, beside a copy within it, and matrices of isotropic merges", 45.0,
         lambda folder, s: parts.codecs()),
    Part("steps-1M", "What a learner of a million parameters costs the training thread", 40.0,
         lambda folder, s: parts.steps("1M", s / 4)),
    Part("steps-100M", "The same with a hundred million", 40.0, lambda folder, s: parts.steps("100M", s / 4)),
    Part("steps-1B", "The same with a billion, without checkpoints", 90.0, lambda folder, s: parts.steps("1B", s / 4)),
    Part("training", "Two learners on one GPU, a syncer on the CPU", 150.0,
         lambda folder, s: training.losses(folder, 0.6 * s)),
    Part("kill", "One of two learners killed, and started again", 90.0, lambda folder, s: training.killed(folder, 0.5 * s)),
    Part("large", "The largest model that fits, in bfloat16: create a run, join it, one round", 150.0,
         lambda folder, s: parts.large()),
)  # fmt: skip

ASKED = ("large",)
"""Parts that run only where they are named, as all parts together would take more than nine minutes."""


@dataclass
class Result:
    """What a part has found so far."""

    name: str
    says: str
    state: str
    seconds: float
    limit_s: float
    rows: list[Row] = field(default_factory=list)
    curves: list[training.Curve] = field(default_factory=list)
    tests: list[dict[str, Any]] = field(default_factory=list)
    said: str = ""


def main() -> int:
    """Run the parts one after the other; return 1 if any of them failed."""
    parser = argparse.ArgumentParser(prog="gpu", description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("out/gpu"), help="folder of the report (out/gpu)")
    parser.add_argument(
        "--only", action="append", choices=[part.name for part in PARTS], help="run this part (several times)"
    )
    parser.add_argument("--seconds", type=float, default=530.0, help="for all parts together (530)")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--page", type=Path, help="run nothing: write the report in --out into a page")
    a = parser.parse_args()
    if a.part:
        return run_part(next(part for part in PARTS if part.name == a.part), a.out, a.seconds)
    if a.page:
        return into_page(a.page, a.out)
    a.out.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + a.seconds
    results: list[Result] = []
    machine = parts.about()
    print(", ".join(f"{name} {value}" for name, value in machine.items()), flush=True)
    chosen = a.only or [part.name for part in PARTS if part.name not in ASKED]
    for part in [next(part for part in PARTS if part.name == name) for name in chosen]:
        print(f"--- {part.name}: {part.says}", flush=True)
        result = run_apart(part, a.out, min(part.limit_s, until - time.monotonic()))
        results.append(result)
        for row in result.rows:
            print("  " + "  ".join(cells(row)[:6]), flush=True)
        for name, what in summed(result.tests).items():
            print(f"  {name}: {what}", flush=True)
        print(
            f"--- {part.name}: {result.state} after {result.seconds:.0f} s of {result.limit_s:.0f} s {result.said}",
            flush=True,
        )
        write(a.out, machine, results)
    print(f"report: {a.out / 'report.md'}")
    return 1 if any(result.state in (FAILED, LATE) for result in results) else 0


# --- one part ---------------------------------------------------------------------------------------------------------


def run_apart(part: Part, out: Path, limit_s: float) -> Result:
    """Run a part as a process group of its own, which is killed at its limit; return what it wrote."""
    found = out / f"{part.name}.rows"
    found.unlink(missing_ok=True)
    began = time.monotonic()
    if limit_s < 5.0:
        return Result(part.name, part.says, LATE, 0.0, limit_s, said="no time was left for it")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])}
    with open(out / f"{part.name}.log", "wb") as log:
        process = subprocess.Popen(
            command(part, out, limit_s), stdout=log, stderr=log, start_new_session=True, env=environment, cwd=ROOT
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)  # servers and learners that it left, too
            except ProcessLookupError:
                pass
            process.wait()
    state = LATE if code is None else FAILED if code else DONE if parts.HAS_GPU else NO_GPU
    result = Result(part.name, part.says, state, time.monotonic() - began, limit_s)
    if found.exists():
        for line in found.read_text().splitlines():
            record = json.loads(line)
            if "tokens" in record:
                result.curves.append(training.Curve(**record))
            else:
                result.rows.append(msgspec.convert(record, Row))
    if part.rows is None:
        result.tests = tests_in(out / "tests.xml") or tests_said((out / f"{part.name}.log").read_text(errors="replace"))
    if state in (FAILED, LATE):
        logs = [out / f"{part.name}.log", *sorted((out / part.name).glob("**/*.log"))]
        result.said = "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-2000:]}" for log in logs)
    shutil.rmtree(out / part.name, ignore_errors=True)
    return result


def command(part: Part, out: Path, limit_s: float) -> list[str]:
    """Return the command line of a part."""
    if part.rows is None:
        workers = str(max(2, min(6, (os.cpu_count() or 1) // 2)))
        return [
            sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-W", "default", "-n", workers, "--tier", "all", "--durations", "10", "-p", "no:benchmark",
            f"--junitxml={(out / 'tests.xml').absolute()}", "tests/gpu/test_ranks.py", "tests/gpu", "tests/integration/test_device.py",
            "tests/unit/test_device_codecs.py",
        ]  # fmt: skip
    return [
        sys.executable,
        "-m",
        "gpu.run",
        "--part",
        part.name,
        "--out",
        str(out.absolute()),
        "--seconds",
        str(limit_s),
    ]


def run_part(part: Part, out: Path, seconds: float) -> int:
    """Run a part in this process, and write each row as it comes."""
    assert part.rows is not None, "pytest runs the tests"
    (folder := out / part.name).mkdir(exist_ok=True)
    with open(out / f"{part.name}.rows", "ab", buffering=0) as file:
        try:
            for found in part.rows(folder, seconds):
                record = vars(found) if isinstance(found, training.Curve) else msgspec.to_builtins(found)
                file.write(json.dumps(record).encode() + b"\n")
        except Exception:
            traceback.print_exc()
            return 1
    return 0


def tests_in(path: Path) -> list[dict[str, Any]]:
    """Return the name, outcome, seconds and message of each test in a JUnit report, without those that passed on a CPU."""
    found = []
    for case in ElementTree.parse(path).iter("testcase") if path.exists() else ():
        ends = {child.tag: child for child in case}
        outcome = next((what for what in ("failure", "error", "skipped") if what in ends), "passed")
        message = ends[outcome].get("message", "") if outcome in ends else ""
        said = (ends[outcome].text or "").splitlines() if outcome in ("failure", "error") else []
        detail = "\n".join(line for line in said if line.startswith(("E ", ">")))[-1500:]
        name = f"{case.get('classname', '').removeprefix('tests.')}.{case.get('name')}"
        found.append({"name": name, "outcome": NO_GPU if message.endswith(NO_GPU) else outcome, "message": message,
                      "seconds": float(case.get("time", 0)), "detail": detail})  # fmt: skip
    return found


def tests_said(log: str) -> list[dict[str, Any]]:
    """Return the name and outcome of each test in what pytest printed before it was stopped."""
    lines = re.findall(r"(PASSED|FAILED|ERROR|SKIPPED) (tests/\S+.*)", log)
    return [{"name": name.removeprefix("tests/"), "outcome": outcome.lower(), "message": "", "seconds": 0.0, "detail": ""}
            for outcome, name in dict.fromkeys(lines)]  # fmt: skip


# --- the report -------------------------------------------------------------------------------------------------------


def write(out: Path, machine: dict[str, str], results: Sequence[Result]) -> None:
    """Write report.json, report.md and losses.png from what there is so far."""
    whole = {"machine": machine, "parts": [msgspec.to_builtins(r) for r in results]}
    (out / "report.json").write_text(json.dumps(whole, indent=1) + "\n")
    curves = [curve for result in results for curve in result.curves]
    if curves:
        draw(curves, out / "losses.png")
    (out / "report.md").write_text(markdown(machine, results))


def markdown(machine: dict[str, str], results: Sequence[Result], picture: str = "losses.png") -> str:
    """Return the report as Markdown."""
    lines = [", ".join(f"{name} {value}" for name, value in machine.items()) + ".", ""]
    if machine["GPU"] == NO_GPU:
        lines += [
            "**No GPU: every part ran on the CPU, at a size that shows that it works. The figures mean nothing.**",
            "",
        ]
    lines += ["| part | result | seconds | of at most |", "|---|---|---|---|"]
    lines += [f"| {r.name} | {r.state} | {r.seconds:.0f} | {r.limit_s:.0f} |" for r in results]
    for result in results:
        lines += ["", f"### {result.says}", ""]
        if result.tests:
            lines += ["| test | result |", "|---|---|"]
            lines += [f"| `{name}` | {what} |" for name, what in summed(result.tests).items()]
        if result.rows:
            lines += ["| " + " | ".join(c.name for c in COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
            lines += ["| " + " | ".join(cells(row)) + " |" for row in result.rows]
        if result.curves:
            lines += ["", f"![held-out loss along the tokens]({picture})"]
        failed = [t for t in result.tests if t["detail"]]
        ended = [(result.state, result.said)] if result.said and not failed else []
        for title, text in [(t["name"], t["detail"]) for t in failed] + ended:
            lines += ["", f"{title}:", "", "```text", text.strip(), "```"]
    return "\n".join(lines) + "\n"


def summed(tests: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the outcomes of each test over its parameters, by its name."""
    counts: dict[str, Counter[str]] = {}
    for test in tests:
        counts.setdefault(test["name"].partition("[")[0], Counter())[test["outcome"]] += 1
    return {name: ", ".join(f"{n} {what}" for what, n in found.items()) for name, found in sorted(counts.items())}


def draw(curves: Sequence[training.Curve], path: Path) -> None:
    """Draw the held-out losses along the tokens."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for curve in curves:
        points = sorted((t, y) for t, y in zip(curve.tokens, curve.losses, strict=True) if t > 0)
        axes.plot([t / 1e6 for t, _ in points], [y for _, y in points], marker=".", label=curve.name)
    axes.set_xlabel("tokens of all learners, millions")
    axes.set_ylabel("held-out loss, nats per byte")
    axes.grid(alpha=0.3)
    axes.legend()
    save(figure, path)


def into_page(page: Path, out: Path) -> int:
    """Write the tables of a report between `<!-- gpu -->` and `<!-- end gpu -->` of a page."""
    whole = json.loads((out / "report.json").read_text())
    results = [msgspec.convert(part, Result) for part in whole["parts"]]
    text = page.read_text()
    mark = re.compile(r"(<!-- gpu -->\n).*?(<!-- end gpu -->)", re.DOTALL)
    if not mark.search(text):
        print(f"{page} has no place for it: <!-- gpu --> and <!-- end gpu -->", file=sys.stderr)
        return 1
    inside = markdown(whole["machine"], results, "images/gpu-losses.png")
    page.write_text(mark.sub(lambda found: f"{found[1]}{inside}{found[2]}", text))
    print(f"report: {page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

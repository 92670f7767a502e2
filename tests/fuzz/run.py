"""`make fuzz`: run the coverage-guided fuzzer on every target, and add the figures to a report over all runs.

Each target runs in its own process under atheris. Half of its inputs come from libFuzzer, which mutates inputs that
reached new lines and branches of `isthmus`. The other half are mutations with corrected checksums (`fuzz.mutate`). A
target ends at its first finding. The finding is kept in the corpus as `found-…`, and a test replays it from then on.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from fuzz.targets import CORPUS, TARGETS, seeds

LONGEST_S = 5
"""Seconds after which an input counts as a hang."""

MOST_MB = 2048
"""Memory limit of a process in MB, far above any input's declared limit plus the libraries."""

ALLOCATION_MB = 256
"""Limit of one allocation in MB. A header may have 16 MiB, and memory for what it names is allocated as it is read."""


def main() -> int:
    """Fuzz the targets that the arguments name; return 1 if there is a finding."""
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000_000, help="in all, over the targets (10,000,000)")
    parser.add_argument("--target", nargs="+", choices=sorted(TARGETS), help="only these (all)")
    parser.add_argument("--into", default="out/fuzz", help="where the report and what was learned go (out/fuzz)")
    parser.add_argument("--minutes", type=float, help="stop after so long; what is left is run the next time")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        return _one(arguments.one, arguments.rest)
    into = Path(arguments.into)
    into.mkdir(parents=True, exist_ok=True)
    kept = into / "report.json"
    report = json.loads(kept.read_text()) if kept.exists() else {}
    names = arguments.target or list(TARGETS)
    until = time.monotonic() + 60 * arguments.minutes if arguments.minutes else float("inf")
    findings = 0
    for number, name in enumerate(names):
        row = report.setdefault(name, {"inputs": 0, "seconds": 0.0, "findings": 0})
        share = -(-arguments.inputs // len(names)) - row["inputs"]
        left = until - time.monotonic()
        if share <= 0 or left <= 0:
            continue
        # The targets that are left share the time that is left.
        seconds = min(left, max(5.0, left / (len(names) - number))) if left < float("inf") else 0.0
        print(f"{number + 1} of {len(names)}: {name}, {share:,} inputs", flush=True)
        findings += _run(name, share, int(seconds), into, row)
        kept.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
        total = sum(r["inputs"] for r in report.values())
        print(f"    {row['inputs']:,} inputs, {row['findings']} findings; {total:,} in all", flush=True)
    (into / "report.md").write_text(table(report))
    print(f"report: {into / 'report.md'}")
    return 1 if findings else 0


def _run(name: str, inputs: int, seconds: int, into: Path, row: dict[str, float]) -> int:
    """Run one target in its own process, and add its figures to the row. Return the number of findings."""
    learned = into / "corpus" / name
    learned.mkdir(parents=True, exist_ok=True)
    for seed in seeds(TARGETS[name]):
        (learned / hashlib.sha256(seed).hexdigest()[:16]).write_bytes(seed)
    found = into / "found" / name
    found.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable, "-m", "fuzz.run", "--one", name, "--", str(learned), f"-runs={inputs}", "-print_final_stats=1",
        f"-timeout={LONGEST_S}", f"-rss_limit_mb={MOST_MB}", f"-malloc_limit_mb={ALLOCATION_MB}", "-max_len=16384",
        "-len_control=0", f"-artifact_prefix={found}/", "-reload=0",
    ]  # fmt: skip
    command += [f"-max_total_time={seconds}"] if seconds else []
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, env=os.environ)
    said = done.stderr + done.stdout
    (into / f"{name}.log").write_text(said)

    def number(pattern: str) -> float:
        values = re.findall(pattern, said)
        return float(values[-1]) if values else 0.0

    row["inputs"] += int(number(r"stat::number_of_executed_units:\s+(\d+)") or number(r"#(\d+)\s"))
    row["seconds"] += time.monotonic() - began
    row["coverage"] = max(row.get("coverage", 0), number(r"cov: (\d+)"))
    row["peak_mb"] = max(row.get("peak_mb", 0), number(r"stat::peak_rss_mb:\s+(\d+)"))
    row["corpus"] = len(list(learned.iterdir()))
    fresh = [path for path in found.iterdir() if path.name.startswith(("crash-", "timeout-", "oom-"))]
    for path in fresh:
        folder = CORPUS / name.removeprefix("record-")
        folder.mkdir(exist_ok=True)
        path.rename(folder / f"found-{path.name[:24]}")
        row["findings"] += 1
        print(f"    FOUND {path.name}: see {into / f'{name}.log'}", flush=True)
    if done.returncode and not fresh:
        print(f"    ended with {done.returncode}: see {into / f'{name}.log'}", flush=True)
        row["findings"] += 1
        return 1
    return len(fresh)


def _one(name: str, rest: list[str]) -> int:
    """Fuzz one target in this process, under atheris."""
    import random

    import atheris

    from fuzz.mutate import mutated

    target = TARGETS[name]
    known = seeds(target)
    # Only Python code of Isthmus is instrumented, not native code: decoders of msgpack and msgspec, compiled kernels.
    for module in [m for key, m in sys.modules.items() if key.startswith("isthmus.") and m is not None]:
        for value in list(vars(module).values()):
            if getattr(value, "__module__", None) == module.__name__ and hasattr(value, "__code__"):
                try:
                    atheris.instrument_func(value)
                except (ValueError, TypeError, RuntimeError):
                    pass

    def custom(data: bytes, most: int, seed: int) -> bytes:
        draw = random.Random(seed)
        if draw.random() < 0.5:
            return bytes(atheris.Mutate(data, most))
        return mutated(data, draw, draw.choice(known), target.framed)[:most]

    atheris.Setup([sys.argv[0], *[word for word in rest if word != "--"]], target.run, custom_mutator=custom)
    atheris.Fuzz()
    return 0


def table(report: dict[str, dict[str, float]]) -> str:
    """Return the report as a Markdown table."""
    lines = [
        "| target | inputs | a second | places of ours reached | inputs kept | peak MiB | findings left |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in sorted(report.items()):
        rate = row["inputs"] / max(row["seconds"], 1e-9)
        lines.append(
            f"| {name} | {int(row['inputs']):,} | {rate:,.0f} | {int(row.get('coverage', 0))} "
            f"| {int(row.get('corpus', 0))} | {int(row.get('peak_mb', 0))} | {int(row['findings'])} |"
        )
    total = sum(int(row["inputs"]) for row in report.values())
    lines.append(f"| all | {total:,} | | | | | {sum(int(row['findings']) for row in report.values())} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())

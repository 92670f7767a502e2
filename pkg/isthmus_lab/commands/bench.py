"""`isthmus bench`: speed and bytes on this machine, each figure beside its limit or that of a peer."""

import importlib
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console, RenderableType

from isthmus.errors import InputError
from isthmus.runtime.clock import cores
from isthmus_lab.bench import report
from isthmus_lab.bench.measure import MIN_REPEATS, Row, load
from isthmus_lab.commands import settings_classes
from isthmus_services.output.progress import progress
from isthmus_services.output.report import stdout, write_json
from isthmus_services.settings import shared


def run(settings: settings_classes.Bench) -> int:
    """Run the benchmarks, then print, write and draw their rows.

    With `--tables`, measure nothing and write the tables of earlier JSON files. Returns the exit status.
    """
    if settings.tables:
        return _tables(settings.tables, Path(settings.into))
    if settings.plot:
        shared.need("matplotlib", "demo")
    if settings.repeats < MIN_REPEATS:
        print(
            f"warning: {settings.repeats} repeats are too few for reliable figures: use {MIN_REPEATS} or more",
            file=sys.stderr,
        )
    console = stdout()
    console.print(machine(), highlight=False)
    rows: list[Row] = []
    for name in settings_classes.BENCHES if settings.what == "all" else (settings.what,):
        module = importlib.import_module(f"isthmus_lab.bench.{name}")
        before = load()
        found: list[Row] = []
        with progress(f"bench {name}") as say:
            found.extend(module.rows(settings.repeats, say))
        console.print(_table(name, found, console, before))
        rows += found
    write_json({"machine": machine(), "rows": msgspec.to_builtins(rows)}, settings.json)
    if settings.plot:
        report.draw(rows, Path(settings.plot))
        print(f"picture: {settings.plot}")
    return 0


def machine() -> str:
    """Return a description of this machine: cores, processor, operating system and Python version."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{cores()} cores of {model}, {platform.system()} {platform.release()}, Python {platform.python_version()}"


def _table(name: str, rows: Sequence[Row], console: Console, before: float) -> RenderableType:
    return report.table(f"{name} (load {before:.1f} before, {load():.1f} after)", rows, console.width)


def _tables(paths: Sequence[str], into: Path) -> int:
    rows: list[Row] = []
    machines = set()
    for path in paths:
        try:
            found = json.loads(Path(path).read_text())
            rows += msgspec.convert(found["rows"], list[Row])
            machines.add(found["machine"])
        except (OSError, ValueError, KeyError, TypeError, msgspec.ValidationError) as error:
            raise InputError(f"--tables {path}: not a file that --json wrote ({error})") from None
    report.write_tables(rows, sorted(machines), into)
    print(f"tables: {into}")
    return 0

"""Simulate many seeds, or replay one. Prints violating seeds with their events, and counts faults; writes JSON."""

import argparse
import asyncio
import gc
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isthmus_services.output.progress import progress
from isthmus_services.output.report import write_json

if TYPE_CHECKING:
    from simulation.cluster import Outcome

COLLECT_EVERY = 8
"""Number of seeds between two garbage collections: without any, thousands of seeds would fill the memory."""

SHOWN = 3
"""Number of violating seeds whose event log is printed; the others are only named."""


def main() -> int:
    """Run what the arguments ask for; return 1 if a seed violates an invariant."""
    parser = argparse.ArgumentParser(prog="make sim", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this one, with its event log")
    parser.add_argument("--seeds", type=int, default=10_000, help="how many (10000)")
    parser.add_argument("--first", type=int, default=0, help="the first (0)")
    parser.add_argument("--kind", help="all seeds of one kind (see simulation/scenario.py)")
    parser.add_argument("--bug", help="with a planted bug (see simulation/bugs)")
    parser.add_argument(
        "--bugs", action="store_true", help="which seed catches each planted bug first, and which is noted"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", help="write the report there too")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":
        # Sets of names need a fixed order, or a seed would not determine its run.
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "simulation.run", *sys.argv[1:]])
    logging.disable(logging.CRITICAL)
    if arguments.worker:
        return _work(arguments.bug, arguments.kind)
    if arguments.bugs:
        return _scan(arguments.workers)
    if arguments.seed is not None:
        return _replay(arguments.seed, arguments.bug, arguments.kind)
    return asyncio.run(_many(arguments))


def _simulate(seed: int, bug: str | None, kind: str | None) -> "Outcome":
    from simulation.bugs import BUGS
    from simulation.cluster import simulate

    if bug is None:
        return simulate(seed, kind)
    with BUGS[bug].bug():
        return simulate(seed, kind)


def _replay(seed: int, bug: str | None, kind: str | None) -> int:
    outcome = _simulate(seed, bug, kind)
    print("\n".join(outcome.events))
    for violation in outcome.violations:
        print(f"VIOLATION {violation}")
    print(f"seed {seed}: {outcome.commits} commits, {len(outcome.violations)} violations")
    return 1 if outcome.violations else 0


def _scan(workers: int) -> int:
    """Print the first seed that catches each planted bug. Return 1 if a bug notes another: its test is then slower."""
    from simulation.bugs import BUGS

    off = 0
    with ProcessPoolExecutor(workers) as pool:
        for name, seed in zip(BUGS, pool.map(_first_to_catch, BUGS), strict=True):
            noted = BUGS[name].caught_by
            off += seed != noted
            print(f"{name}: seed {seed}" + ("" if seed == noted else f", noted is {noted}"), flush=True)
    return 1 if off else 0


def _first_to_catch(bug: str) -> int | None:
    from simulation.bugs import BUGS

    logging.disable(logging.CRITICAL)
    planted = BUGS[bug]
    return next((s for s in range(planted.within) if _simulate(s, bug, planted.kind).violations), None)


def _work(bug: str | None, kind: str | None) -> int:
    """Run each seed that comes on stdin."""
    for number, line in enumerate(sys.stdin):
        o = _simulate(int(line), bug, kind)
        if number % COLLECT_EVERY == 0:
            gc.collect()  # a seed is one large cycle, and runs with the collector off
        said = {
            "seed": o.seed,
            "violations": o.violations,
            "events": o.events if o.violations else [],
            "faults": dict(o.faults),
            "virtual_s": o.virtual_s,
            "commits": o.commits,
        }
        print(json.dumps(said), flush=True)
    return 0


async def _many(a: argparse.Namespace) -> int:
    todo = iter(range(a.first, a.first + a.seeds))
    outcomes: list[dict[str, Any]] = []
    started = time.perf_counter()

    async def work(say: Callable[[float], object]) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "simulation.run", "--worker", *(["--bug", a.bug] if a.bug else []),
            *(["--kind", a.kind] if a.kind else []),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 26,
        )  # fmt: skip
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None
        assert stdout is not None
        for seed in todo:
            stdin.write(f"{seed}\n".encode())
            await stdin.drain()
            line = await stdout.readline()
            if not line:
                raise SystemExit(f"seed {seed}: the worker ended with {await process.wait()}")
            outcomes.append(outcome := json.loads(line))
            for violation in outcome["violations"][:1]:
                print(f"seed {seed}: {violation.splitlines()[0]}", file=sys.stderr, flush=True)
            say(len(outcomes) / a.seeds)
        stdin.close()
        await process.wait()

    with progress(f"{a.seeds} seeds") as say:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(a.workers):
                tasks.create_task(work(say))
    wall = time.perf_counter() - started
    bad = sorted((o for o in outcomes if o["violations"]), key=lambda o: o["seed"])
    for o in bad[:SHOWN]:
        print(*o["events"], *(f"VIOLATION {v}" for v in o["violations"]), sep="\n")
    faults: Counter[str] = Counter()
    for o in outcomes:
        faults.update(o["faults"])
    hours = sum(o["virtual_s"] for o in outcomes) / 3600
    for name, count in sorted(faults.items(), key=lambda item: -item[1]):
        print(f"  {count:9,}  {name}")
    print(
        f"{len(outcomes):,} seeds, {len(bad)} with violations, {sum(o['commits'] for o in outcomes):,} commits, "
        f"{hours:.1f} virtual hours, {len(outcomes) / wall:.1f} seeds/s"
    )
    for o in bad:
        print(f"seed {o['seed']}: {o['violations'][0].splitlines()[0]}   (again: make sim SEED={o['seed']})")
    report = {
        "seeds": len(outcomes),
        "first": a.first,
        "violations": sum(len(o["violations"]) for o in outcomes),
        "violating_seeds": [o["seed"] for o in bad],
        "seeds_per_s": len(outcomes) / wall,
        "virtual_hours": hours,
        "commits": sum(o["commits"] for o in outcomes),
        "faults": dict(sorted(faults.items())),
        "wall_s": wall,
    }
    write_json(report, Path(a.json) if a.json else None)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

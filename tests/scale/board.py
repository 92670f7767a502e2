"""Measure how fast the board opens and answers on a large run: 100 learners, 96 fragments, a million commits.

Syncers and learners are simulated for some periods, with kills. Their commits are then repeated with later times until
there are enough. Their history is stored as `isthmus board` stores it. The command itself is started on it, and its
pages are opened in a browser if there is one. `make scale-board`; `python -m scale.board --help`.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from isthmus.agent.ports import open_log
from isthmus.format.layout import Layout, Spec, TensorClass
from isthmus.format.records import frame
from isthmus.format.records.keys import RUN_KEY, commit_key, snapshot_key
from isthmus.format.records.objects import CommitHeader, Input
from isthmus.format.rules import Pace, Rules
from isthmus.learner import LearnerAgent
from isthmus.learner.boundary import Replica
from isthmus.learner.checkpoint import Saver
from isthmus.log import Commit
from isthmus.log.creation import Seed
from isthmus.log.run import read_run
from isthmus_lab.simulate.conditions import Conditions
from isthmus_lab.simulate.world import Arrays, Times, World, learn, serve
from isthmus_services.board.feed import cache_of
from isthmus_services.board.history.history import RunHistory
from isthmus_services.processes import isthmus_command

LATENCY_S = 0.05
STEP_S = 1.0
ELEMENTS = 64
WHOLE = 9600
"""Number of commits of the log that is stored completely as objects, to measure the first reading."""

TAIL = 8
"""Newest commits of each fragment that are stored as objects. A million would take tens of gigabytes."""

QUESTIONS = (
    "run", "state", "series", "learners", "lanes", "fragments", "commits", "commits?only=late", "services", "learner/l3",
    "fragment/5",
)  # fmt: skip


class _Trainee:
    """Trains nothing, in steps of its own length."""

    def __init__(self, number: int) -> None:
        self._random = random.Random(number)
        self._step_s = STEP_S * self._random.uniform(0.8, 1.6)

    def begin(self, agent: LearnerAgent, layout: Layout) -> tuple[Replica, Saver | None]:
        """See `Trainee.begin`."""
        return Arrays(layout), None

    def duration(self) -> float:
        """See `Trainee.duration`."""
        return self._step_s * self._random.uniform(0.95, 1.1)

    def step(self, number: int) -> tuple[int, float]:
        """See `Trainee.step`."""
        return 1024, 0.0

    def enough(self, agent: LearnerAgent) -> bool:
        """See `Trainee.enough`."""
        return False


def simulated(learners: int, fragments: int, periods: int) -> dict[str, bytes]:
    """Return the objects of a simulated run: commits, snapshots of version 0 and the run itself."""
    world = World("board")
    try:
        world.clock.run_until_complete(_simulate(world, learners, fragments, periods))
    finally:
        world.clock.close()
    return {
        key: blob
        for key, (blob, _) in world.objects.blobs.items()
        if key.startswith(("commits/", "snapshots/", RUN_KEY))
    }


async def _simulate(world: World, learners: int, fragments: int, periods: int) -> None:
    rules = Rules(fragments=fragments, sync_every=fragments, merge="avg")
    pace = Pace(quorum=max(1, learners // 3), grace=0.5, overlap=6.0)
    specs = [Spec(f"w{i}", (ELEMENTS,), "float32", TensorClass.DENSE) for i in range(fragments)]
    await world.create(Seed(specs, [np.zeros(ELEMENTS, np.float32) for _ in specs], {}, rules, pace))
    wire = Conditions(LATENCY_S, 0.2 * LATENCY_S)
    stopping = asyncio.Event()

    def start(number: int, life: int = 0) -> Any:
        process = world.process(f"l{number}", life)
        body = learn(
            world.ports(process, wire, wire), f"l{number}", _Trainee(number), Times(), stopping=stopping.is_set,
            checkpoint_s=20.0,
        )  # fmt: skip
        process.start(body)
        return process

    syncers = []
    for name in ("s0", "s1"):
        process = world.process(name)
        process.start(serve(world.ports(process, wire, wire), name, stopping))
        syncers.append(process)
    processes = [start(n) for n in range(learners)]
    draw = random.Random(1)
    for period in range(periods):
        await asyncio.sleep(0.5 * fragments * STEP_S)
        for number in draw.sample(range(learners), max(1, learners // 20)):
            processes[number].kill()
            processes[number] = start(number, period + 1)
        await asyncio.sleep(0.5 * fragments * STEP_S)
    syncers[0].kill()
    await asyncio.sleep(0.5 * fragments * STEP_S)
    stopping.set()
    for process in (*processes, *syncers):
        process.kill()


def templates(objects: dict[str, bytes], fragments: int) -> list[list[CommitHeader]]:
    """Return the commits of each fragment, in order."""
    found: list[list[CommitHeader]] = []
    for p in range(fragments):
        keys = sorted(key for key in objects if key.startswith(f"commits/{p:05d}/"))
        found.append([frame.parse(objects[key], frame.Kind.COMMIT, CommitHeader)[0] for key in keys])
    return found


def repeated(made: list[CommitHeader], version: int, span_s: float) -> CommitHeader:
    """Return a commit of this version: a simulated commit, moved to a later time."""
    times, place = divmod(version - 1, len(made))
    h, late_s, further = made[place], times * span_s, times * len(made)

    def moved(i: Input) -> Input:
        return msgspec.structs.replace(
            i, base=i.base + further, taken_at=i.taken_at + late_s, heard_at=i.heard_at + late_s,
            fetched_at=i.fetched_at + late_s, arrived_at=i.arrived_at + late_s,
            step=i.step + times * 400, tokens_seen=i.tokens_seen + times * 400 * 1024,
        )  # fmt: skip

    w = h.waited
    waited = msgspec.structs.replace(
        w, boundary_at=w.boundary_at + late_s, opened_at=w.opened_at + late_s, closed_at=w.closed_at + late_s,
        hold_until=w.hold_until + late_s,
    )  # fmt: skip
    total = {reason: n + times * made[-1].rejected_total.get(reason, 0) for reason, n in h.rejected_total.items()}
    return msgspec.structs.replace(
        h, version=version, inputs=tuple(map(moved, h.inputs)), waited=waited, written_at=h.written_at + late_s,
        rejected_total={**made[-1].rejected_total, **total} if times else total,
    )  # fmt: skip


def grown(
    run: Any, made: list[list[CommitHeader]], commits: int, tail: int, say: Any
) -> tuple[RunHistory, dict[str, bytes]]:
    """Return the history of a run of this many commits, and the newest `tail` commits of each fragment as objects."""
    history, objects = RunHistory(run), {}
    span_s = max(h.written_at for of in made for h in of) - min(h.written_at for of in made for h in of) + STEP_S
    versions = commits // len(made)
    for p, of in enumerate(made):
        digest = run.digest
        for version in range(1, versions + 1):
            header = repeated(of, version, span_s)
            if version > versions - tail:
                header = msgspec.structs.replace(header, previous=digest)
                blob = bytes(frame.draft(frame.Kind.COMMIT, header, 0).blob)
                digest = frame.digest(blob)
                objects[commit_key(p, version)] = blob
            history.take(Commit(header, digest))
        if tail < versions:
            objects[snapshot_key(p, versions - tail + 1, bytes(32))] = b"the fold is not asked for here"
        say((p + 1) / len(made))
    return history, objects


# --- measuring --------------------------------------------------------------------------------------------------------


@contextmanager
def board(folder: Path, memory: list[float] | None = None) -> Iterator[tuple[str, float]]:
    """Start the command; yield its URL, and the time until it answered a page's first question [s]."""
    began = time.perf_counter()
    process = subprocess.Popen(
        isthmus_command("board", str(folder), "--http", "127.0.0.1:0"), stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        url = next(word for word in process.stdout.readline().split() if word.startswith("http://")).rstrip("/")
        ask(url, "state")
        yield url, time.perf_counter() - began
        if memory is not None:
            (line,) = (x for x in Path(f"/proc/{process.pid}/status").read_text().splitlines() if x.startswith("VmHWM"))
            memory.append(int(line.split()[1]) / 1e3)
    finally:
        process.terminate()
        process.wait()


def ask(url: str, question: str) -> tuple[bytes, float]:
    """Return an answer and the time it took [s]."""
    began = time.perf_counter()
    with urllib.request.urlopen(f"{url}/api/{question}") as answer:
        return answer.read(), time.perf_counter() - began


def numbers(value: object) -> int:
    """Return the number of numbers in an answer."""
    if isinstance(value, dict):
        return sum(numbers(v) for v in value.values())
    if isinstance(value, list):
        return sum(numbers(v) for v in value)
    return isinstance(value, int | float) and not isinstance(value, bool)


async def first_reading(objects: dict[str, bytes], made: list[list[CommitHeader]], folder: Path) -> dict[str, float]:
    """Measure how fast a log in a folder is read for the first time."""
    put({key: blob for key, blob in objects.items() if not key.startswith("commits/")}, folder)
    async with open_log(str(folder)) as log:
        versions = WHOLE // len(made)
        put(grown(log.run, made, WHOLE, versions, lambda _: None)[1], folder)
    async with open_log(str(folder)) as log:
        history = RunHistory(log.run)
        began = time.perf_counter()
        count = await history.follow(log)
        seconds = time.perf_counter() - began
    return {"commits": count, "seconds": seconds, "commits_per_s": count / seconds}


def taken(folder: Path) -> dict[str, bytes]:
    """Return the objects that an earlier run of this program has simulated."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def put(objects: dict[str, bytes], folder: Path) -> None:
    """Write objects as files."""
    for key, blob in objects.items():
        path = folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(blob)


FRAMES = """async (go) => {
  const gaps = []; let last = performance.now(), on = true;
  const tick = (now) => { gaps.push(now - last); last = now; if (on) requestAnimationFrame(tick); };
  requestAnimationFrame(tick);
  await eval(go)();
  on = false;
  gaps.sort((a, b) => a - b);
  return [gaps[Math.floor(gaps.length / 2)], gaps[Math.floor(0.99 * (gaps.length - 1))], gaps.length];
}"""
SCROLL = """(async () => { for (let y = 0; y < 2400; y += 24) { window.scrollTo(0, y); await new Promise(requestAnimationFrame); } })"""
SCRUB = """(async () => { const s = document.getElementById('scrubber');
  for (let n = 0; n < 100; n++) { s.value = 1000 - 8 * n; s.dispatchEvent(new Event('input', { bubbles: true })); await new Promise(requestAnimationFrame); } })"""


def browsed(url: str, chromium: str) -> dict[str, Any]:
    """Measure in a browser how long pages take to show their content [s], and the frames while scrolling [ms]."""
    from playwright.sync_api import sync_playwright

    found: dict[str, Any] = {"opens_s": {}, "frames_ms": {}}
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu", "--disable-quic"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        for name, path, shown in (
            ("run", "/", "#totals"), ("learners", "/learners", "canvas"), ("fragments", "/fragments", "canvas"),
            ("commits", "/commits", "tbody tr"), ("services", "/services", "tbody tr"),
        ):  # fmt: skip
            times = []
            for _ in range(5):
                began = time.perf_counter()
                page.goto(url + path)
                page.wait_for_selector(shown)
                if name == "run":
                    page.wait_for_selector("#sentence")
                    page.wait_for_selector(".chart canvas")
                times.append(time.perf_counter() - began)
            found["opens_s"][name] = {"median": statistics.median(times), "largest": max(times)}
            median, p99, count = page.evaluate(FRAMES, SCROLL)
            found["frames_ms"][f"{name}, scrolling"] = {"median": median, "p99": p99, "frames": count}
        page.goto(url + "/")
        page.wait_for_selector("#totals")
        median, p99, count = page.evaluate(FRAMES, SCRUB)
        found["frames_ms"]["run, scrubbing"] = {"median": median, "p99": p99, "frames": count}
        browser.close()
    return found


def table(report: dict[str, Any]) -> str:
    """Return the figures as a table for docs/board.md."""
    start, reading = report["start_to_first_answer_s"], report["first_reading"]
    answers, opens, frames = (report[name] for name in ("answers", "opens_s", "frames_ms"))
    largest = max(answers, key=lambda q: float(answers[q]["kb"]))
    slowest = max(answers, key=lambda q: float(answers[q]["median_ms"]))
    medians = [of["median"] for of in opens.values()]
    rows = {
        "from the command to its first answer": f"{start['median']:.1f} s ({start['largest']:.1f} s at most)",
        "a page in the browser, until it shows what it is for": f"{min(medians):.1f} to {max(medians):.1f} s "
        f"({max(of['largest'] for of in opens.values()):.1f} s at most)",
        "frames while one scrolls, and while one drags the slider": f"one every "
        f"{max(of['median'] for of in frames.values()):.0f} ms, 99 of 100 within "
        f"{max(of['p99'] for of in frames.values()):.0f} ms, on every page",
        "the largest answer, before it is compressed": f"{answers[largest]['kb']:.0f} kB (`{largest}`)",
        "the slowest answer": f"{answers[slowest]['median_ms']:.0f} ms (`{slowest}`)",
        "the server's memory": f"{report['memory_mb']:.0f} MB",
        "what was read, kept in a file": f"{report['cache_mb']:.0f} MB",
        "reading such a log for the first time, out of a folder": f"{reading['commits_per_s']:.0f} commits a second: "
        f"{1e6 / reading['commits_per_s'] / 60:.0f} minutes for a million",
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {what} | {said} |" for what, said in rows.items())]) + "\n"


def written(report: dict[str, Any], page: Path) -> None:
    """Write the figures into a page, between its marks."""
    before, _, rest = page.read_text().partition("<!-- size -->\n")
    _, mark, after = rest.partition("<!-- /size -->")
    assert mark, f"{page} has no place for them"
    page.write_text(f"{before}<!-- size -->\n{table(report)}{mark}{after}")


def main() -> int:
    """Make the run, measure the board, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--learners", type=int, default=100)
    parser.add_argument("--fragments", type=int, default=96)
    parser.add_argument("--commits", type=int, default=1_000_000)
    parser.add_argument("--periods", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--into", type=Path, default=Path("out/scale-board"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path, help="put the figures into docs/board.md")
    a = parser.parse_args()
    folder = a.into / "run"
    report: dict[str, Any] = {"learners": a.learners, "fragments": a.fragments}
    kept = a.into / "simulated"
    began = time.perf_counter()
    objects = taken(kept) if kept.exists() else simulated(a.learners, a.fragments, a.periods)
    put(objects, kept)
    made = templates(objects, a.fragments)
    inputs = [len(h.inputs) for of in made for h in of]
    report["simulated"] = {
        "commits": len(inputs), "updates_a_commit": statistics.fmean(inputs), "seconds": time.perf_counter() - began,
    }  # fmt: skip
    print(json.dumps(report["simulated"]), flush=True)
    if not folder.exists():
        began = time.perf_counter()
        asyncio.run(_made(folder, objects, made, a.commits))
        report["grown_s"] = time.perf_counter() - began
    whole = a.into / "whole"
    shutil.rmtree(whole, ignore_errors=True)
    report["first_reading"] = asyncio.run(first_reading(objects, made, whole))
    print(json.dumps(report["first_reading"]), flush=True)
    cache = next((folder / ".board").glob("*.npz"))
    report["cache_mb"] = cache.stat().st_size / 1e6
    starts: list[float] = []
    memory: list[float] = []
    answers: dict[str, list[tuple[float, int, int]]] = {}
    for _ in range(a.repeats):
        with board(folder, memory) as (url, seconds):
            starts.append(seconds)
            for question in QUESTIONS:
                body, took = ask(url, question)
                answers.setdefault(question, []).append((took, len(body), numbers(json.loads(body))))
    report["memory_mb"] = max(memory)
    report["start_to_first_answer_s"] = {"median": statistics.median(starts), "largest": max(starts)}
    report["answers"] = {
        q: {"median_ms": 1e3 * statistics.median(t for t, _, _ in of), "kb": of[0][1] / 1e3, "numbers": of[0][2]}
        for q, of in answers.items()
    }
    chromium = os.environ.get("CHROMIUM", "/usr/bin/chromium")
    if os.path.exists(chromium):
        with board(folder) as (url, _):
            report |= browsed(url, chromium)
        if a.page:
            written(report, a.page)
    else:
        report["browser"] = f"not run: there is no {chromium}"
    print(json.dumps(report, indent=1))
    if a.json:
        a.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


async def _made(folder: Path, objects: dict[str, bytes], made: list[list[CommitHeader]], commits: int) -> None:
    put({key: blob for key, blob in objects.items() if not key.startswith("commits/")}, folder)
    async with open_log(str(folder)) as log:
        run = await read_run(log.store)
    said = 0.0

    def say(share: float) -> None:
        nonlocal said
        if share - said >= 0.05:
            said = share
            print(f"grown: {share:.0%}", file=sys.stderr, flush=True)

    history, newest = grown(run, made, commits, TAIL, say)
    put(newest, folder)
    history.save(cache_of(str(folder), run.digest, None))


if __name__ == "__main__":
    sys.exit(main())

"""What one syncer on one core carries: small updates a second, by learners and fragments, and the memory it takes."""

import asyncio
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from isthmus.ports import open_ports
from isthmus.records.messages import learner_stream
from isthmus_services.bench.crowd import Crowd
from isthmus_services.bench.measure import Row, Say, row, sized
from isthmus_services.bench.round import made, served, syncing

UPDATE = 8 << 10
PARAMS = UPDATE * 128 // 66 // 128 * 128
CASES = ((2, 8), (8, 8), (32, 8), (100, 8), (8, 32), (8, 96))
"""Learners and fragments."""
UPDATES_S = 1500.0
ROUNDS_LEAST = 200
"""Updates of a repeat, at least."""

SYNCERS = (1, 2, 4)
SHARED = 8, 32
"""Learners and fragments of the runs that several syncers share."""


def rows(repeats: int, say: Say) -> Iterator[Row]:
    """Yield the updates a second of a syncer's processor, as many as rounds would bring it at full speed."""
    with tempfile.TemporaryDirectory() as folder, served(Path(folder)) as (place, bus):
        by_case: dict[tuple[int, int], tuple[list[float], float]] = {}
        for at, (learners, fragments) in enumerate(CASES):
            by_case[learners, fragments] = asyncio.run(
                _measure(f"{place}/{learners}-{fragments}", bus, learners, fragments, repeats)
            )
            say((at + 1) / (len(CASES) + len(SYNCERS)))
        shared = {}
        for at, count in enumerate(SYNCERS):
            shared[count], _ = asyncio.run(_measure(f"{place}/shared-{count}", bus, *SHARED, repeats, syncers=count))
            say((len(CASES) + at + 1) / (len(CASES) + len(SYNCERS)))
        for (learners, fragments), (costs, _) in by_case.items():
            size = f"M {learners}, P {fragments}"
            yield row(
                "scale",
                f"updates of {sized(UPDATE)} a second of the syncer's processor",
                size,
                [1e3 / each for each in costs],
                "",
                aim=UPDATES_S,
            )
        few, many = by_case[2, 8][0], by_case[100, 8][0]
        yield row(
            "scale",
            "cost of an update with 100 learners, beside 2",
            "P 8",
            many,
            "ms",
            limits=few,
            aim=1.0,
            at_most=True,
        )
        grown = by_case[32, 8][1] / by_case[2, 8][1]
        for count in SYNCERS[1:]:
            what = "processor of the busiest syncer for an update of all, beside one alone"
            yield row("scale", what, f"{count} syncers", shared[count], "ms", limits=shared[1])
        yield row("scale", "memory with 32 learners, beside 2", "P 8", [grown], "", aim=1.1, at_most=True)


async def _measure(
    url: str, bus: str, learners: int, fragments: int, repeats: int, syncers: int = 1
) -> tuple[list[float], float]:
    """Return what an update takes of the processor of the busiest syncer [ms], in every repeat, and a syncer's memory
    [bytes] at the end."""
    await made(url, [PARAMS] * fragments, learners, heartbeat_s=2.0, silence_s=60.0)
    found: list[float] = []
    with ExitStack() as stack:
        pids = [stack.enter_context(syncing(url, bus, "--threads", "1")).pid for _ in range(syncers)]
        async with open_ports(url, bus) as ports, asyncio.TaskGroup() as tasks:
            crowd = Crowd(ports, learners)
            background = [tasks.create_task(crowd.listen()), tasks.create_task(crowd.beat())]
            await asyncio.sleep(2.0)
            version = 0
            for number in range(repeats + 1):
                before, given = [_processor_s(pid) for pid in pids], 0
                while given < ROUNDS_LEAST * syncers:
                    version += 1
                    for name in crowd.names:
                        said = await asyncio.gather(*(crowd.store(name, p) for p in range(fragments)))
                        await ports.bus.append(learner_stream(name), *said)
                        given += fragments
                    await crowd.until([version] * fragments)
                if number:
                    used = [_processor_s(pid) - was for pid, was in zip(pids, before, strict=True)]
                    found.append(1e3 * max(used) / given)
            for task in background:
                task.cancel()
        return found, _memory(pids[0])


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

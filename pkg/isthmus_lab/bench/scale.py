"""Capacity of one syncer on one core: small updates a second, by learners and fragments, and its memory."""

import asyncio
import os
import secrets
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from isthmus.agent.ports import open_ports
from isthmus.format.records.messages import learner_stream
from isthmus.store import EdgeStore
from isthmus_lab.bench.crowd import Crowd
from isthmus_lab.bench.measure import Row, Say, row, sized
from isthmus_lab.bench.round import made, served, syncing

UPDATE = 8 << 10
PARAMS = UPDATE * 128 // 66 // 128 * 128
CASES = ((2, 8), (8, 8), (32, 8), (100, 8), (8, 32), (8, 96))
"""Learners and fragments of each run."""
UPDATES_S = 1500.0
REQUESTS, AT_ONCE = 200, 8
"""Requests in a measurement of the store alone, and how many of them run at once."""
ROUNDS_LEAST = 200
"""Minimum of updates in a repeat, for each syncer."""

SYNCERS = (1, 2, 4)
SHARED = 8, 32
"""Learners and fragments of the runs that several syncers share."""


def rows(repeats: int, say: Say) -> Iterator[Row]:
    """Yield updates per second of a syncer's processor time, with rounds that follow each other at full speed.

    Then yield the cost of requests alone, of more learners and of more syncers, and the memory.
    """
    with tempfile.TemporaryDirectory() as folder, served(Path(folder)) as (place, bus):
        by_case: dict[tuple[int, int], Carried] = {}
        for at, (learners, fragments) in enumerate(CASES):
            by_case[learners, fragments] = asyncio.run(
                _measure(f"{place}/{learners}-{fragments}", bus, learners, fragments, repeats)
            )
            say((at + 1) / (len(CASES) + len(SYNCERS)))
        shared = {}
        for at, count in enumerate(SYNCERS):
            shared[count] = asyncio.run(_measure(f"{place}/shared-{count}", bus, *SHARED, repeats, syncers=count)).ms
            say((len(CASES) + at + 1) / (len(CASES) + len(SYNCERS)))
        for (learners, fragments), carried in by_case.items():
            size = f"M {learners}, P {fragments}"
            yield row(
                "scale",
                f"updates of {sized(UPDATE)} a second of the syncer's processor",
                size,
                [1e3 / each for each in carried.ms],
                "",
                aim=UPDATES_S,
            )
        few, many = by_case[2, 8], by_case[100, 8]
        for size, carried in (("M 2, P 8", few), ("M 100, P 8", many)):
            what = "processor of an update's requests alone, beside an update"
            yield row("scale", what, size, carried.raw_ms, "ms", limits=carried.ms)
        yield row(
            "scale",
            "cost of an update with 100 learners, beside 2",
            "P 8",
            many.ms,
            "ms",
            limits=few.ms,
            aim=1.0,
            at_most=True,
        )
        grown = by_case[32, 8].memory / few.memory
        for count in SYNCERS[1:]:
            what = "processor of the busiest syncer for an update of all, beside one alone"
            yield row("scale", what, f"{count} syncers", shared[count], "ms", limits=shared[1])
        yield row("scale", "memory with 32 learners, beside 2", "P 8", [grown], "", aim=1.1, at_most=True)


@dataclass(frozen=True)
class Carried:
    """The cost to syncers of a number of learners and fragments."""

    ms: list[float]
    """Processor time per update of the busiest syncer, in every repeat."""
    raw_ms: list[float]
    """Processor time of an update's requests alone, with the same client: one read, and the update's share of its
    round's writes of value and commit."""
    memory: float
    """Memory of the first syncer at the end, in bytes."""


async def _measure(url: str, bus: str, learners: int, fragments: int, repeats: int, syncers: int = 1) -> Carried:
    await made(url, [PARAMS] * fragments, learners, heartbeat_s=2.0, silence_s=60.0)
    found: list[float] = []
    raw: list[float] = []
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
                    raw.append(await _raw(ports.store, learners))
            for task in background:
                task.cancel()
        return Carried(found, raw, _memory(pids[0]))


async def _raw(store: EdgeStore, learners: int) -> float:
    """Return the processor time in milliseconds that an update's requests take."""
    data, place = os.urandom(UPDATE), f"scratch/{secrets.token_hex(8)}"
    await store.put(place, data)

    async def one(request: Callable[[int], Awaitable[object]]) -> float:
        began = time.process_time()
        for first in range(0, REQUESTS, AT_ONCE):
            await asyncio.gather(*(request(number) for number in range(first, first + AT_ONCE)))
        return 1e3 * (time.process_time() - began) / REQUESTS

    read = await one(lambda number: store.get(place))
    return read + 2.0 * await one(lambda number: store.create(f"{place}-{number}", data)) / learners


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

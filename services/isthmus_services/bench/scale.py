"""What one syncer on one core carries: small updates a second, by learners and fragments, and the memory it takes."""

import asyncio
import os
import tempfile
from collections.abc import Iterator
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


def rows(repeats: int, say: Say) -> Iterator[Row]:
    """Yield the updates a second of a syncer's processor, as many as rounds would bring it at full speed."""
    with tempfile.TemporaryDirectory() as folder, served(Path(folder)) as (place, bus):
        by_case: dict[tuple[int, int], tuple[list[float], float]] = {}
        for at, (learners, fragments) in enumerate(CASES):
            by_case[learners, fragments] = asyncio.run(
                _measure(f"{place}/{learners}-{fragments}", bus, learners, fragments, repeats)
            )
            say((at + 1) / len(CASES))
        for (learners, fragments), (rates, _) in by_case.items():
            size = f"M {learners}, P {fragments}"
            yield row(
                "scale",
                f"updates of {sized(UPDATE)} a second of the syncer's processor",
                size,
                rates,
                "",
                aim=UPDATES_S,
            )
        few, many = by_case[2, 8][0], by_case[100, 8][0]
        yield row(
            "scale",
            "cost of an update with 100 learners, beside 2",
            "P 8",
            [1e3 / rate for rate in many],
            "ms",
            limits=[1e3 / rate for rate in few],
            aim=1.0,
            at_most=True,
        )
        grown = by_case[32, 8][1] / by_case[2, 8][1]
        yield row("scale", "memory with 32 learners, beside 2", "P 8", [grown], "", aim=1.1, at_most=True)


async def _measure(url: str, bus: str, learners: int, fragments: int, repeats: int) -> tuple[list[float], float]:
    """Return updates for each second of the syncer's processor, of every repeat, and its memory [bytes] at the end."""
    await made(url, [PARAMS] * fragments, learners, heartbeat_s=2.0, silence_s=60.0)
    found: list[float] = []
    with syncing(url, bus, "--threads", "1") as syncer:
        async with open_ports(url, bus) as ports, asyncio.TaskGroup() as tasks:
            crowd = Crowd(ports, learners)
            background = [tasks.create_task(crowd.listen()), tasks.create_task(crowd.beat())]
            await asyncio.sleep(2.0)
            version = 0
            for number in range(repeats + 1):
                before, given = _processor_s(syncer.pid), 0
                while given < ROUNDS_LEAST:
                    version += 1
                    for name in crowd.names:
                        said = await asyncio.gather(*(crowd.store(name, p) for p in range(fragments)))
                        await ports.bus.append(learner_stream(name), *said)
                        given += fragments
                    await crowd.until([version] * fragments)
                if number:
                    found.append(given / (_processor_s(syncer.pid) - before))
            for task in background:
                task.cancel()
        return found, _memory(syncer.pid)


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

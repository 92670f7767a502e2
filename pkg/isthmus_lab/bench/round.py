"""A round with a real S3 server and Redis, from the last announcement needed until the version has been read."""

import asyncio
import os
import secrets
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from isthmus.agent.ports import open_place, open_ports
from isthmus.bus import IN_STORE, PACE_IN_STORE
from isthmus.format.layout import Spec, TensorClass
from isthmus.format.records.keys import value_key
from isthmus.format.rules import Pace, Rules
from isthmus.log.creation import Seed, create_run
from isthmus.log.run import Run
from isthmus.store import EdgeStore
from isthmus_lab.bench.crowd import Crowd
from isthmus_lab.bench.measure import Row, Say, quantile, row, sized
from isthmus_lab.bench.servers import bucket
from isthmus_services.processes import isthmus_command
from isthmus_services.servers import redis_server, s3_server

LEARNERS = 4
SIZES = ((64 << 10, 1.5), (2 << 20, 1.3), (16 << 20, 1.5))
"""Bytes of a value, and the aim: a round's time in multiples of the time of the four raw calls."""

LAG, LAG_MS = "the syncer's loop late, worst of each quarter of a second, p99", 20.0


def rows(repeats: int, say: Say) -> Iterator[Row]:
    """Yield the time of a round beside that of four raw calls, and the lag of the syncer's loop.

    The raw calls read an update, write a value and a commit, and read the value.
    """
    with tempfile.TemporaryDirectory() as folder, served(Path(folder)) as (place, bus):
        for at, (size, aim) in enumerate(SIZES):
            # int4 takes 66 bytes for 128 parameters.
            params = size * 128 // 66 // 128 * 128
            rounds, raw, lags = asyncio.run(
                _measure(f"{place}/{size}", bus, params, size, repeats, lambda share: say((at + share) / len(SIZES)))  # noqa: B023
            )
            yield row(
                "round",
                f"{LEARNERS} learners, beside the four raw calls",
                sized(size),
                [1e3 * s for s in rounds],
                "ms",
                limits=[1e3 * s for s in raw],
                aim=aim,
                at_most=True,
            )
            lag = quantile(lags, 0.99)
            yield row("round", LAG, sized(size), [lag], "ms", aim=LAG_MS, at_most=True)
        yield from _by_bus(place, bus, repeats)


def _by_bus(place: str, redis: str, repeats: int) -> Iterator[Row]:
    """Yield the time of a round with the bus in the store, beside the same with Redis."""
    for beat_s in (PACE_IN_STORE.heartbeat_s, 1.0):
        found = {
            bus: asyncio.run(
                _measure(
                    f"{place}/{bus.partition(':')[0]}-{beat_s:g}", bus, 128 * 1024, 64 << 10, repeats, lambda _: None,
                    heartbeat_s=beat_s, silence_s=3.0 * beat_s,
                )
            )[0]
            for bus in (redis, IN_STORE)
        }  # fmt: skip
        yield row(
            "round",
            f"{LEARNERS} learners, heartbeat {beat_s:g} s, the bus in the store, beside Redis",
            sized(64 << 10),
            [1e3 * s for s in found[IN_STORE]],
            "ms",
            limits=[1e3 * s for s in found[redis]],
            at_most=True,
        )


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, str]]:
    """Run an S3 server and a Redis server; yield the URL of a bucket for runs and the URL of the bus."""
    before = dict(os.environ)
    with s3_server(folder / "s3") as s3, redis_server(folder / "redis") as redis:
        os.environ.update(s3.environment)
        try:
            yield f"s3://{bucket()}", redis.url
        finally:
            for name in s3.environment:
                os.environ.pop(name, None)
            os.environ.update({name: before[name] for name in s3.environment if name in before})


@contextmanager
def syncing(run: str, bus: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Run a syncer as a process of its own; yield it once the syncer holds its fragments, and kill it at the end."""
    command = isthmus_command("syncer", run, "--bus", bus, *words)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        line = next((line for line in process.stderr if " holds " in line), None)
        if line is None:
            raise RuntimeError(f"the syncer ended with {process.wait()} before it held anything")
        # The syncer's further output has to be read, because a full pipe would stop the syncer.
        drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)
        yield process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    drain.wait()


async def made(url: str, sizes: list[int], learners: int, code: str = "int4", **pace: float) -> Run:
    """Create a run with a tensor and a fragment for each of these sizes, whose rounds wait for all learners."""
    specs = [Spec(f"t{i:03d}", (n,), "float32", TensorClass.DENSE) for i, n in enumerate(sizes)]
    rules = Rules(fragments=len(sizes), sync_every=max(len(sizes), 24), codec_up=code, codec_down=code)
    seed = Seed(specs, [np.zeros(n, np.float32) for n in sizes], {}, rules, Pace(quorum=learners, **pace))  # type: ignore[arg-type]
    async with open_place(url, make=True) as store:
        return await create_run(store, store.runtime, seed)


async def _measure(
    url: str, bus: str, params: int, size: int, repeats: int, say: Say, **pace: float
) -> tuple[list[float], list[float], list[float]]:
    """Return seconds of rounds and of raw calls, and the longest delays [ms] of the syncer's loop."""
    await made(url, [params], LEARNERS, "int4", **pace)
    rounds: list[float] = []
    raw: list[float] = []
    with syncing(url, bus):
        async with open_ports(url, bus) as ports, asyncio.TaskGroup() as tasks:
            crowd = Crowd(ports, LEARNERS)
            background = [tasks.create_task(crowd.listen()), tasks.create_task(crowd.beat())]
            await asyncio.sleep(max(2.0, 2.0 * pace.get("heartbeat_s", 1.0)))  # until the syncer knows the learners
            for number in range(repeats + 2):
                said = {name: await crowd.store(name, 0) for name in crowd.names}
                *early, last = crowd.names
                for name in early:
                    await crowd.announce(name, said[name])
                await asyncio.sleep(0.5)  # the syncer fetches these updates meanwhile
                began = time.perf_counter()
                await crowd.announce(last, said[last])
                await crowd.until([number + 1])
                commit = await ports.log.commit(0, number + 1)
                assert commit is not None, "it was said to be there"
                await ports.store.get(value_key(0, number + 1, commit.header.value_digest))
                took = time.perf_counter() - began
                plain = await _raw(ports.store, size)
                if number == 1:
                    crowd.lags_ms.clear()
                if number > 1:
                    rounds.append(took)
                    raw.append(plain)
                say((number + 1) / (repeats + 2))
            for task in background:
                task.cancel()
    return rounds, raw, crowd.lags_ms


async def _raw(store: EdgeStore, size: int) -> float:
    data, key = os.urandom(size), f"scratch/{secrets.token_hex(8)}"
    await store.put(key, data)
    began = time.perf_counter()
    await store.get(key)
    await store.create(f"{key}-value", data)
    await store.create(f"{key}-commit", data[:2048])
    await store.get(f"{key}-value")
    return time.perf_counter() - began

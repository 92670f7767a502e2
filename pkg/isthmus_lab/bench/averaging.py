"""Time until peers have the mean of their arrays, with this library and with hivemind's averaging.

With this library the peers are learners of one run. Each learner packs, stores and announces its array, and reads the
version that a syncer makes from the updates. With hivemind the peers find each other through a distributed hash table
and reduce among themselves.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from isthmus.agent.ports import open_ports
from isthmus.codecs import codec, pack
from isthmus.codecs.kernels import F32
from isthmus.log import fold
from isthmus_lab.bench.crowd import Crowd
from isthmus_lab.bench.measure import Row, Say, counted, row
from isthmus_lab.bench.round import made, served, syncing

PARAMS = 4 << 20
PEERS = (2, 4)
WAIT_S = 60.0

CASES = (("float32", "f32", "NoCompression"), ("int4; float16", "int4", "Float16Compression"))
"""What is sent: its name, this library's codec, hivemind's compression. (hivemind's 8-bit one fails with NumPy 2.4.)"""


def averaging(repeats: int, say: Say, peer: Callable[[str], Any]) -> Iterator[Row]:
    """Yield the time until all peers have the mean, beside hivemind's. `peer` imports a module of another project."""
    x = (0.01 * np.random.default_rng(0).standard_normal(PARAMS)).astype(np.float32)
    done, parts = 0, len(PEERS) * len(CASES) * (repeats + 1)
    for peers in PEERS:
        for called, ours, theirs in CASES:
            found: tuple[list[float], list[float]] = ([], [])
            with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
                place, bus = stack.enter_context(served(Path(folder)))
                averages = (
                    stack.enter_context(_ours(f"{place}/run", bus, peers, ours, x)),
                    stack.enter_context(_theirs(peer, peers, theirs, x)),
                )
                for number in range(repeats + 1):
                    for times, average in zip(found, averages, strict=True):
                        took = average()
                        if number:
                            times.append(1e3 * took)
                    done += 1
                    say(done / parts)
            what = f"time until {peers} peers have the mean, {called}; hivemind"
            yield row("peers", what, counted(PARAMS), found[0], "ms", limits=found[1])


@contextmanager
def _ours(run: str, bus: str, peers: int, name: str, x: F32) -> Iterator[Callable[[], float]]:
    """Yield a function that brings the next version to all learners of a run and returns how many seconds that took."""
    with asyncio.Runner() as runner, ExitStack() as stack:
        runner.run(made(run, [x.size], peers, name))
        stack.enter_context(syncing(run, bus))
        ports_of = open_ports(run, bus)
        ports = runner.run(ports_of.__aenter__())
        stack.callback(lambda: runner.run(ports_of.__aexit__(None, None, None)))
        crowd, code, fragment = Crowd(ports, peers), codec(name), ports.log.run.layout.fragments[0]
        carry = fold.PublishedValue(ports.log)
        start = runner.run(fold.fold(ports.log, 0, carry))
        has = dict.fromkeys(crowd.names, start)

        async def learner(name: str) -> None:
            wanted = has[name].version + 1
            payload = await ports.runtime.offload(pack, code, fragment, x)
            await crowd.announce(name, await crowd.store(name, 0, payload))
            await crowd.until([wanted])
            async for at in fold.onward(ports.log, 0, carry, has[name], until=wanted):
                has[name] = at

        async def all_of_them() -> float:
            async with asyncio.TaskGroup() as tasks:
                background = [tasks.create_task(crowd.listen()), tasks.create_task(crowd.beat())]
                await asyncio.sleep(1.0)  # until the syncer knows the learners
                began = time.perf_counter()
                await asyncio.gather(*(learner(name) for name in crowd.names))
                took = time.perf_counter() - began
                for task in background:
                    task.cancel()
            return took

        yield lambda: runner.run(all_of_them())


@contextmanager
def _theirs(peer: Callable[[str], Any], peers: int, compression: str, x: F32) -> Iterator[Callable[[], float]]:
    """Yield a function that lets all of hivemind's averagers average once and returns how many seconds that took."""
    import torch

    hivemind = peer("hivemind")
    coded = getattr(peer("hivemind.compression"), compression)
    with ExitStack() as stack:
        here = {"start": True, "host_maddrs": ["/ip4/127.0.0.1/tcp/0"]}
        tables = [hivemind.DHT(**here)]
        there = [str(address) for address in tables[0].get_visible_maddrs()]
        tables += [hivemind.DHT(initial_peers=there, **here) for _ in range(peers - 1)]
        averagers = [
            hivemind.averaging.DecentralizedAverager(
                [torch.from_numpy(x.copy())],
                table,
                start=True,
                prefix="bench",
                target_group_size=peers,
                min_matchmaking_time=1.0,
                request_timeout=0.5,
                compression=coded(),
            )
            for table in tables
        ]
        for one in (*tables, *averagers):
            stack.callback(one.shutdown)

        def average() -> float:
            time.sleep(1.0)
            began = time.perf_counter()
            for step in [averager.step(wait=False) for averager in averagers]:
                if len(step.result(timeout=WAIT_S)) != peers:
                    return average()  # some averagers formed a group without the others: repeat
            return time.perf_counter() - began

        yield average

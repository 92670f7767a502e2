"""When a user fills the shared Redis, rounds stop and learners train on. Nothing is lost when there is room again."""

import asyncio
from pathlib import Path

import pytest
import redis as redis_client

from isthmus.agent import trouble
from isthmus.bus import open_bus, sqlite
from isthmus.bus.base import Refused
from isthmus.errors import Unavailable
from isthmus.format.records.messages import SYNCER_STREAM, learner_stream
from isthmus.format.rules import Pace, Rules
from isthmus.learner import LearnerAgent
from isthmus_services.servers import redis_server
from support.world import balanced, check_log, seed_of, serving, train, until, world

FULL = ("--save", "", "--maxmemory", "16mb", "--maxmemory-policy", "noeviction", "--proto-max-bulk-len", "1mb")
SEED = seed_of(Rules(fragments=2, sync_every=4), Pace(heartbeat_s=0.2, silence_s=1.0))


def fill(client: redis_client.Redis) -> str:
    """Append to one stream until the server has no memory left; return the stream's key."""
    key = f"isthmus:somewhere:{learner_stream('evil')}"
    for size in (1 << 20, 1 << 10, 1):
        with pytest.raises(redis_client.exceptions.OutOfMemoryError):
            while True:
                client.xadd(key, {"m": bytes(size)})
    return key


def step_of(agent: LearnerAgent) -> int:
    assert agent.boundary is not None
    return agent.boundary.step


async def test_a_filled_redis_costs_time_and_nothing_else(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trouble, "PATIENCE_S", 0.0)
    with redis_server(tmp_path / "redis", arguments=FULL) as server, redis_client.Redis.from_url(server.url) as client:
        async with world(folder, SEED, bus=server.url) as w:
            learners = [w.learner(name) for name in ("eu-1", "us-1")]
            async with serving(w.syncer()) as syncer:
                done = asyncio.Event()
                training = [
                    asyncio.ensure_future(train(a, 1, seed=i, enough=done.is_set)) for i, a in enumerate(learners)
                ]
                await until(lambda: syncer.tallies.commits >= 4, "commits to begin with")

                for stream in (SYNCER_STREAM, learner_stream("eu-1")):
                    while True:
                        key = fill(client)
                        try:
                            await w.bus.append(stream, b"refused, whoever says it")
                        except Unavailable:
                            break  # a freed client buffer can leave room for one message; then fill Redis again
                steps = [step_of(a) for a in learners]
                await until(
                    lambda: all(step_of(a) > s + 50 for a, s in zip(learners, steps, strict=True)),
                    "learners train on while nothing can be said",
                )

                said = [f"{name}: the bus refuses messages (for" for name in ("eu-1", "us-1", syncer.name)]
                await until(lambda: all(line in caplog.text for line in said), "the logs say so")
                assert "the server's memory is full: raise maxmemory" in caplog.text
                assert "is reachable" not in caplog.text
                client.delete(key)
                commits = syncer.tallies.commits
                await until(lambda: syncer.tallies.commits >= commits + 4, "rounds close once there is room")
                done.set()
                await asyncio.gather(*training)
            assert await check_log(w) == syncer.tallies.commits
            for agent in learners:
                balanced(agent)


async def test_an_embedded_bus_on_a_full_disk_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "_SCHEMA", (*sqlite._SCHEMA, "PRAGMA max_page_count = 32"))
    async with open_bus(f"sqlite://{tmp_path}/bus.sqlite", b"r" * 32, None) as bus:
        with pytest.raises(Refused, match="database or disk is full: free space on its disk"):
            for _ in range(100):
                await bus.append("s", bytes(1 << 16))

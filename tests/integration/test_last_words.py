"""What a syncer says last is that it stops, however long its last words take."""

import asyncio
from pathlib import Path

import pytest

from isthmus.bus.endpoints import Speaker
from isthmus.format.records.messages import SYNCER_STREAM, Alive
from isthmus.log.bus_messages import verify_batch
from support.world import in_virtual_time, seed_of, serving, world


@in_virtual_time
async def test_no_heartbeat_after_it_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    flush = Speaker.flush

    async def slow(self: Speaker) -> None:
        await asyncio.sleep(2.5)  # several heartbeats, and within the time that last words have
        await flush(self)

    async with world(Path(), seed_of()) as w:
        async with serving(w.syncer("s1")):
            await asyncio.sleep(1.0)
            monkeypatch.setattr(Speaker, "flush", slow)
        items = (await w.bus.read({SYNCER_STREAM: ""}, 0.0))[SYNCER_STREAM]
        said = [m for i in items if i.body for m in verify_batch(SYNCER_STREAM, i.body, w.run.digest, None)]
    stopping = [m.stopping for m in said if isinstance(m, Alive)]
    first = stopping.index(True)
    assert len(stopping) - first > 2
    assert all(stopping[first:])

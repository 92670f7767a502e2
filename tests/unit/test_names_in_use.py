"""A process that joins hears whether another one goes on speaking under its name."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import pytest

from isthmus.bus import BusItem
from isthmus.format.records.messages import FromLearner, encode, learner_stream
from isthmus.learner.resume import speaks
from support.healths import beat, left
from support.world import in_virtual_time, world


@in_virtual_time
@pytest.mark.parametrize(
    ("messages", "used"),
    [((), False), ((beat("a"),), True), ((left("a", True),), False), ((left("a", False), beat("a")), False)],
    ids=["silent", "beats", "leaves", "leaves, and a message is late"],
)
async def test_a_name_is_in_use_while_somebody_beats(
    messages: tuple[FromLearner, ...], used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(Path()) as w:
        stream, read, reads = learner_stream("a"), w.bus.read, []

        async def counted(positions: Mapping[str, str], timeout_s: float) -> Mapping[str, Sequence[BusItem]]:
            reads.append(positions)
            return await read(positions, timeout_s)

        monkeypatch.setattr(w.bus, "read", counted)

        def of_run(message: FromLearner) -> bytes:
            return encode(msgspec.structs.replace(message, run=w.run.digest))

        await w.bus.append(stream, of_run(beat("a")))
        since = await w.bus.tail(stream)
        listening = asyncio.ensure_future(speaks(w.log, w.bus, "a", since, 2.0))
        await asyncio.sleep(0.5)
        await w.bus.append(stream, b"", b"not a message")  # its own test of its rights, and junk
        for message in messages:
            await w.bus.append(stream, of_run(message))
        began = asyncio.get_running_loop().time()
        assert await listening is used
        waited = asyncio.get_running_loop().time() - began
        assert (waited > 1.0) == (not messages), "an answer ends the wait"
        assert len(reads) <= 4, "no message is read twice"
